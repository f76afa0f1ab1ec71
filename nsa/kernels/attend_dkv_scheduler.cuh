/* attend_dkv_scheduler.cuh: attention over few keys, backward: what a thread block that
   keeps keys works through, and where its sums of dk and dv go.
   Twin: nsa.h, "Attention over few keys", its backward.
   Not here: the products (attend_backward.cuh, attend_backward_sm90.cuh). */
#ifndef NSA_ATTEND_DKV_SCHEDULER_CUH
#define NSA_ATTEND_DKV_SCHEDULER_CUH

#include "attend_forward.cuh"

/* Rows that one block works through before others share the readers of a tile of compressed keys,
   in at most NSA__CMP_PARTS parts of a sequence; tests define it small. */
#ifndef NSA__CMP_PART_ROWS
#define NSA__CMP_PART_ROWS 4096
#endif
enum { NSA__CMP_PARTS = 8 };

NSA__DEVICE bool nsa__cuda_is_nan_bits(float x) {
    return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u;
}

NSA__DEVICE nsa__cuda_row_terms *nsa__cuda_row_terms_at(const nsa__cuda_attend_params &params,
                                                        int64_t row, int head) {
    return params.rows + row * params.d.heads + head;
}

/* Keys begin .. end - 1, and `readers` queries that may see them: list[i], or first + i. */
struct nsa__cuda_key_work {
    int begin, end;
    int first, readers;
    const int32_t *list;
    float *partial; /* row `begin` of what this part sums up; null: it is the only part */
};

/* Floats of a row of partial sums: dk and dv side by side. */
NSA__DEVICE int64_t nsa__cuda_partial_row(const nsa__cuda_attend_params &params) {
    return params.d.dim + params.d.dim_v;
}

/* Queries of a part of a tile of compressed keys: the length of the sequence alone decides. */
NSA__DEVICE int nsa__cuda_cmp_part(const nsa__cuda_attend_params &params, int tokens) {
    return max((NSA__CMP_PART_ROWS + params.group - 1) / params.group,
               (tokens + NSA__CMP_PARTS - 1) / NSA__CMP_PARTS);
}

NSA__DEVICE float *nsa__cuda_cmp_partial(const nsa__cuda_attend_params &params,
                                         const nsa__cuda_attend_head &at, int part, int key) {
    const int64_t line = static_cast<int64_t>(at.kv_head) * params.max_parts + part;
    const int64_t place = nsa__cuda_place_of(params.cmp_rows, at.b, at.seq) + key;
    return params.partial_dkv +
           (line * params.cmp_rows.total + place) * nsa__cuda_partial_row(params);
}

/* cmp, win, dense: tiles of keys, for cmp each with max_parts parts. */
NSA__DEVICE nsa__cuda_key_work nsa__cuda_key_work_of_tile(const nsa__cuda_attend_params &params,
                                                          const nsa__cuda_attend_head &at,
                                                          int keys) {
    const int part = at.tile % params.max_parts;
    nsa__cuda_key_work w = {at.tile / params.max_parts * keys, 0, 0, 0, nullptr, nullptr};
    w.end = min(w.begin + keys, at.keys);
    if (w.begin >= w.end) return w;
    const nsa__cuda_key_span all = nsa__cuda_readers_of(params, at, w.begin, w.end);
    nsa__cuda_key_span mine = all;
    if (params.branch == NSA__KEYS_CMP && all.begin < all.end) {
        const int size = nsa__cuda_cmp_part(params, at.seq.tokens);
        mine.begin = max(all.begin, part * size);
        mine.end = min(all.end, (part + 1) * size);
        if (all.begin / size != (all.end - 1) / size)
            w.partial = nsa__cuda_cmp_partial(params, at, part, w.begin);
    }
    w.first = mine.begin;
    w.readers = max(mine.end - mine.begin, 0);
    return w;
}

/* slc: parts of the readers of blocks, each in pieces of at most `keys` keys. */
NSA__DEVICE nsa__cuda_key_work nsa__cuda_key_work_of_block(const nsa__cuda_attend_params &params,
                                                           const nsa__cuda_attend_head &at,
                                                           int keys) {
    const nsa__cuda_block_readers &r = params.readers;
    const int pieces = (params.d.slc_block + keys - 1) / keys;
    const nsa__cuda_reader_part part = nsa__cuda_reader_part_of(params, at, at.tile / pieces);
    nsa__cuda_key_work w = {0, 0, 0, 0, nullptr, nullptr};
    if (part.block < 0) return w;
    const int block_begin = part.block * params.d.slc_block;
    w.begin = block_begin + at.tile % pieces * keys;
    w.end =
        w.begin + min(min(keys, params.d.slc_block - (w.begin - block_begin)), at.keys - w.begin);
    w.list = part.query;
    w.readers = part.count;
    if (part.parts > 1) {
        const int64_t slot = nsa__cuda_place_in(r.slots, at) + part.part +
                             r.slot_begin[nsa__cuda_place_in(r.entries, at) + part.block];
        w.partial = params.partial_dkv + (slot * params.d.slc_block + w.begin - block_begin) *
                                             nsa__cuda_partial_row(params);
    }
    return w;
}

/* Neighbours c and c + 1 of a gradient's row: += factor times them. The row is f32 or, as the
   tensors are, T; naming T leaves one branch to compile for every pair. */
template <typename T>
NSA__DEVICE void nsa__cuda_add_pair(nsa_dtype dtype, void *row, int c, float factor, float low,
                                    float high) {
    constexpr nsa_dtype own = nsa__dtype_of<T>::value;
    if (own == NSA_F32 || dtype == NSA_F32) {
        float2 *to = reinterpret_cast<float2 *>(static_cast<float *>(row) + c);
        *to = make_float2(to->x + factor * low, to->y + factor * high);
    } else {
        uint32_t *to = reinterpret_cast<uint32_t *>(static_cast<uint16_t *>(row) + c);
        const float2 x = nsa__unpack(own, *to);
        *to = nsa__pack_as(own, x.x + factor * low, x.y + factor * high);
    }
}

/* Adds a thread's rows of dk or dv to the gradient, or leaves them as partial sums. */
template <typename T, int N>
NSA__DEVICE void nsa__cuda_dkv_end(const nsa__cuda_attend_params &params,
                                   const nsa__cuda_attend_head &at, const nsa__cuda_key_work &work,
                                   const nsa_tensor &to, int width, int partial_at, float factor,
                                   int key, int column, const bool (&bad)[2],
                                   const float (&sum)[N][4]) {
    const float nan = __uint_as_float(0x7fc00000u);
    if (!to.data) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (key + 8 * h >= work.end) continue;
        const int64_t nth = nsa__cuda_gradient_row(
            params, partial_at ? NSA__CUDA_SUM_V : NSA__CUDA_SUM_K, at.key_row + key + 8 * h);
        void *row = nsa__row_at(to, at.seq.key_batch, nth, at.kv_head);
        float *part = work.partial;
        if (part) part += (key + 8 * h - work.begin) * nsa__cuda_partial_row(params) + partial_at;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int c = column + 8 * n;
            const float low = bad[h] ? nan : sum[n][2 * h], high = bad[h] ? nan : sum[n][2 * h + 1];
            if (c >= width) continue;
            if (part)
                nsa__store_pair(part + c, low, high);
            else
                nsa__cuda_add_pair<T>(to.dtype, row, c, factor, low, high);
        }
    }
}

#endif

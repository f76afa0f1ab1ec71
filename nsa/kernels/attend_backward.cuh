/* attend_backward.cuh: attention over few keys, backward: one core for all branches.
   Twin: nsa.h, "Attention over few keys", its backward.
   Not here: which keys (attend_keys.cuh), which queries read a block (attend_readers.cuh), forward
   (attend_forward.cuh).

   With p = exp(scale q k - lse), out = sum p v and delta = dout . out:
     dv[s] = sum_t p dout[t]    ds = p (dout . v[s] - delta)    dq[t] = scale sum_s ds k[s]
     dk[s] = scale sum_t ds q[t]
   One kernel walks the key tiles of a Q tile as forward does and makes dq. Another keeps a tile of
   keys, walks the rows that read it and makes dk and dv. Every row of a gradient has one owner,
   who adds to it once, so nothing is atomic. Keys that very many queries read (the first block, the
   first compressed rows) are shared out among blocks by parts of their readers, whose sums are
   then added in order. */
#ifndef NSA_ATTEND_BACKWARD_CUH
#define NSA_ATTEND_BACKWARD_CUH

#include "attend_forward.cuh"

/* Rows that one block works through before others share the readers of a tile of compressed keys,
   in at most NSA__CMP_PARTS parts of a sequence; tests define it small. */
#ifndef NSA__CMP_PART_ROWS
#define NSA__CMP_PART_ROWS 4096
#endif
enum { NSA__CMP_PARTS = 8, NSA__ROWS_WARPS = 8 };

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

/* ---- lse and delta of every row ------------------------------------------------------------ */

NSA__DEVICE float2 *nsa__cuda_row_sums(const nsa__cuda_attend_params &params, int b, int index,
                                       int head) {
    return params.rows + (static_cast<int64_t>(b) * params.rows_of + index) * params.d.heads + head;
}

/* A warp makes one row. lse is NaN where forward met a value that is not finite. */
static __global__ void nsa__cuda_attend_rows_kernel(nsa__cuda_attend_params params) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int blocks = static_cast<int>(gridDim.x) / params.d.batch;
    const int b = static_cast<int>(blockIdx.x) / blocks;
    const int64_t item =
        static_cast<int64_t>(static_cast<int>(blockIdx.x) % blocks) * NSA__ROWS_WARPS + warp;
    const nsa__sequence seq = nsa__sequence_of(params.d, b);
    const int64_t place = item / params.d.heads;
    const int head = static_cast<int>(item % params.d.heads);
    if (place >= seq.count) return;
    const void *out = nsa__row_at(params.x.out, seq.batch, seq.row + place, head);
    const void *dout = nsa__row_at(params.dx.out, seq.batch, seq.row + place, head);
    const float lse = *nsa__row_of<float>(params.x.lse, seq.batch, seq.row + place, head);
    bool finite = nsa__finite(lse);
    float delta = 0;
    for (int c = 8 * lane; c < params.d.dim_v; c += 256) {
        float o[8], g[8];
        nsa__load8(o, params.x.out.dtype, out, c);
        nsa__load8(g, params.dx.out.dtype, dout, c);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            finite &= nsa__finite(g[i]);
            delta = fmaf(o[i], g[i], delta);
        }
    }
#pragma unroll
    for (int step = 16; step; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
    if (params.dx.lse.data) { /* dlse / ds = p: ds = p (dout . v - delta + dlse) */
        const float dlse = *nsa__row_of<float>(params.dx.lse, seq.batch, seq.row + place, head);
        finite &= nsa__finite(dlse);
        delta -= dlse;
    }
    finite = __all_sync(0xffffffffu, finite);
    if (lane == 0)
        *nsa__cuda_row_sums(params, b, static_cast<int>(place), head) =
            finite ? make_float2(lse * 1.44269504f, delta)
                   : make_float2(__uint_as_float(0x7fc00000u), 0.0f);
}

NSA__DEVICE bool nsa__cuda_is_nan_bits(float x) {
    return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u;
}

/* Starts copying rows of dout; rounds them on the way where they are f32 and tensors are not. */
template <typename T, int DV, int ROWS, int THREADS, typename Row>
NSA__DEVICE void nsa__cuda_stage_dout(T *tile, const nsa__cuda_attend_params &params,
                                      const nsa__cuda_attend_head &at, Row row_of) {
    if (params.dx.out.dtype == nsa__dtype_of<T>::value)
        nsa__cuda_tile_copy<T, DV, ROWS, THREADS>(
            tile, params.d.dim_v, static_cast<const T *>(params.dx.out.data), [&](int r) {
                const nsa__cuda_query_row row = row_of(r);
                return row.there
                           ? nsa__cuda_query_at<const T>(params.dx.out, at, row.query, row.head)
                           : nullptr;
            });
    else
        nsa__cuda_tile_round<T, DV, ROWS, THREADS>(tile, params.d.dim_v, [&](int r) {
            const nsa__cuda_query_row row = row_of(r);
            return row.there
                       ? nsa__cuda_query_at<const float>(params.dx.out, at, row.query, row.head)
                       : nullptr;
        });
}

template <typename T, int DK, int ROWS, int THREADS, typename Row>
NSA__DEVICE void nsa__cuda_stage_q(T *tile, const nsa__cuda_attend_params &params,
                                   const nsa__cuda_attend_head &at, Row row_of) {
    nsa__cuda_tile_copy<T, DK, ROWS, THREADS>(
        tile, params.d.dim, static_cast<const T *>(params.x.q.data), [&](int r) {
            const nsa__cuda_query_row row = row_of(r);
            return row.there ? nsa__cuda_query_at<const T>(params.x.q, at, row.query, row.head)
                             : nullptr;
        });
}

/* ---- dq ------------------------------------------------------------------------------------ */

template <typename T, int DK, int DV>
struct nsa__cuda_dq_shape : nsa__cuda_tile_shape<T, DK + DV, DK + DV, 64, 16> {};

/* What a thread knows of its two rows, g and g + 8 of its warp. */
struct nsa__cuda_dq_rows {
    nsa__cuda_key_span keys[2];
    int number[2];
    float lse2[2], delta[2]; /* lse2 is inf where p is to be 0 */
    bool bad[2], reads[2];
};

NSA__DEVICE void nsa__cuda_dq_begin(nsa__cuda_dq_rows &rows, const nsa__cuda_attend_params &params,
                                    const nsa__cuda_attend_head &at,
                                    const nsa__cuda_query_tile &tile) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const nsa__cuda_query_row row =
            nsa__cuda_query_row_of(params, at, tile, nsa__cuda_upper_row() + 8 * h);
        rows.number[h] = (tile.skip + nsa__cuda_upper_row() + 8 * h) / params.group -
                         nsa__cuda_warpgroup_first(params, tile);
        rows.keys[h] = {0, 0};
        rows.lse2[h] = INFINITY;
        rows.delta[h] = 0;
        rows.bad[h] = rows.reads[h] = false;
        if (!row.there) continue;
        const float2 sums = *nsa__cuda_row_sums(params, at.b, row.query - at.seq.first, row.head);
        rows.keys[h] = nsa__cuda_keys_of(params, row.query);
        rows.bad[h] = nsa__cuda_is_nan_bits(sums.x);
        if (!rows.bad[h]) rows.lse2[h] = sums.x;
        rows.delta[h] = sums.y;
    }
}

/* dq += scale (what the thread's rows have summed up). */
template <typename T, int N>
NSA__DEVICE void nsa__cuda_dq_end(const nsa__cuda_attend_params &params,
                                  const nsa__cuda_attend_head &at, const nsa__cuda_query_tile &tile,
                                  const nsa__cuda_dq_rows &rows, const float (&dq)[N][4]) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    const float nan = __uint_as_float(0x7fc00000u);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const nsa__cuda_query_row row =
            nsa__cuda_query_row_of(params, at, tile, nsa__cuda_upper_row() + 8 * h);
        if (!row.there || !rows.reads[h]) continue;
        if (params.gathered) {
            float *partial = params.partial_out +
                             nsa__cuda_partial_out_index(params, at, tile, row) * params.d.dim;
#pragma unroll
            for (int n = 0; n < N; n++)
                if (8 * n < params.d.dim)
                    nsa__store_pair(partial + 8 * n + column, dq[n][2 * h], dq[n][2 * h + 1]);
            continue;
        }
        void *to =
            nsa__row_at(params.dx.q, at.seq.batch, at.seq.row + row.query - at.seq.first, row.head);
#pragma unroll
        for (int n = 0; n < N; n++)
            if (8 * n < params.d.dim)
                nsa__cuda_add_pair<T>(params.dx.q.dtype, to, 8 * n + column, params.scale,
                                      rows.bad[h] ? nan : dq[n][2 * h],
                                      rows.bad[h] ? nan : dq[n][2 * h + 1]);
    }
}

template <typename T, int DK, int DV, bool LISTS>
static __global__ void __launch_bounds__(32 * nsa__cuda_dq_shape<T, DK, DV>::WARPS, 2)
    nsa__cuda_attend_dq_kernel(nsa__cuda_attend_params params) {
    using shape = nsa__cuda_dq_shape<T, DK, DV>;
    constexpr int BLOCK_M = shape::TILE, BLOCK_N = shape::STAGE, THREADS = 32 * shape::WARPS;
    NSA_SHARED_ALL(shared);
    T *const q = reinterpret_cast<T *>(shared), *const dout = q + BLOCK_M * DK,
             *const stages = dout + BLOCK_M * DV;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;

    NSA_SHARED(nsa__cuda_attend_head, at, );
    NSA_SHARED(nsa__cuda_query_tile, tile_rows, );
    if (threadIdx.x == 0) {
        at = nsa__cuda_attend_head_of(params, blockIdx.x);
        tile_rows = nsa__cuda_query_tile_of(params, at, BLOCK_M);
    }
    __syncthreads();
    if (tile_rows.first >= tile_rows.end) return;
    nsa__cuda_walk_keys<BLOCK_N, BLOCK_M, LISTS> walk = {};
    nsa__cuda_walk_begin(walk, params, at, tile_rows);
    const auto row_of = [&](int r) { return nsa__cuda_query_row_of(params, at, tile_rows, r); };
    nsa__cuda_stage_q<T, DK, BLOCK_M, THREADS>(q, params, at, row_of);
    nsa__cuda_stage_dout<T, DV, BLOCK_M, THREADS>(dout, params, at, row_of);
    bool more = nsa__cuda_walk_next(walk, params, at, tile_rows);
    if (more) nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, THREADS>(stages, params, at, walk.tile);
    nsa__cp_async_commit();

    nsa__cuda_dq_rows rows;
    nsa__cuda_dq_begin(rows, params, at, tile_rows);
    float dq[DK / 8][4] = {};
    for (int stage = 0; more; stage ^= 1) {
        const nsa__cuda_key_tile tile = walk.tile;
        T *const k = stages + stage * BLOCK_N * (DK + DV), *const v = k + BLOCK_N * DK;
        /* this stage has arrived, and no warp reads the other one any more */
        nsa__cuda_tiles_wait<T, BLOCK_N>();
        more = nsa__cuda_walk_next(walk, params, at, tile_rows);
        if (more)
            nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, THREADS>(
                stages + (stage ^ 1) * BLOCK_N * (DK + DV), params, at, walk.tile);
        nsa__cp_async_commit();
        if (tile.bad) nsa__cuda_clean_stage<T, DK, DV, BLOCK_N, THREADS>(k, tile.bad);

        const nsa__cuda_key_span seen[2] = {nsa__cuda_seen_of(tile, rows.keys[0], rows.number[0]),
                                            nsa__cuda_seen_of(tile, rows.keys[1], rows.number[1])};
        const bool sees[2] = {seen[0].begin < seen[0].end, seen[1].begin < seen[1].end};
        rows.reads[0] |= sees[0];
        rows.reads[1] |= sees[1];
        if (!nsa__cuda_takes_part<T, BLOCK_N>(sees[0] || sees[1], tile.readers != 0)) continue;
        float s[BLOCK_N / 8][4], dp[BLOCK_N / 8][4];
        nsa__cuda_product_nt<T, DK, BLOCK_N, BLOCK_M>(s, q, warp_row, k);
        nsa__cuda_mask_tile(s, seen, params.scale2);
        nsa__cuda_product_nt<T, DV, BLOCK_N, BLOCK_M>(dp, dout, warp_row, v);
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[n][e] = nsa__ex2(s[n][e] - rows.lse2[e / 2]) * (dp[n][e] - rows.delta[e / 2]);
        nsa__cuda_hide(s, seen, 0.0f); /* dp of what is masked may overflow, and 0 inf is NaN */
        nsa__cuda_product_nn<T, BLOCK_N, DK>(dq, s, k, 0);
    }
    nsa__cp_async_wait<0>(); /* a row without keys has waited for nothing yet */
    nsa__cuda_dq_end<T>(params, at, tile_rows, rows, dq);
}

/* A warp adds the partial results of one row: dq += scale (the sum). */
static __global__ void nsa__cuda_gather_dq_kernel(nsa__cuda_attend_params params) {
    const nsa__cuda_gather_row row = nsa__cuda_gather_row_of(params);
    if (!row.there) return;
    const float *partial = params.partial_out + row.number * params.list_width * params.d.dim;
    const bool bad =
        nsa__cuda_is_nan_bits(nsa__cuda_row_sums(params, row.b, row.index, row.head)->x);
    const float nan = __uint_as_float(0x7fc00000u);
    void *to = nsa__row_at(params.dx.q, row.batch, row.row, row.head);
    for (int c = static_cast<int>(threadIdx.x) % 32 * 8; c < params.d.dim; c += 256) {
        float sum[8] = {};
        int before = -1;
        for (int i = nsa__cuda_gather_next(params, row, 0, before); i < params.list_width;
             i = nsa__cuda_gather_next(params, row, i + 1, before)) {
            float x[8];
            nsa__load8(x, NSA_F32, partial + static_cast<int64_t>(i) * params.d.dim, c);
#pragma unroll
            for (int e = 0; e < 8; e++) sum[e] += bad ? nan : x[e];
        }
        if (before >= 0) nsa__add8(params.dx.q.dtype, to, c, params.scale, sum);
    }
}

template <typename T, int DK, int DV> struct nsa__cuda_dq_launch {
    static nsa_status launch(nsa__cuda_attend_params params, cudaStream_t stream) {
        using shape = nsa__cuda_dq_shape<T, DK, DV>;
        dim3 grid;
        NSA__CHECK(nsa__cuda_query_grid(&params, shape::TILE, &grid, stream));
        const bool lists = params.branch == NSA__KEYS_SLC && !params.gathered;
        return nsa__cuda_status(NSA_LAUNCH((lists ? nsa__cuda_attend_dq_kernel<T, DK, DV, true>
                                                  : nsa__cuda_attend_dq_kernel<T, DK, DV, false>),
                                           grid, dim3(32 * shape::WARPS), shape::BYTES, stream,
                                           params));
    }
};

/* ---- dk and dv: what one block works through ----------------------------------------------- */

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
    const int64_t keys = nsa__cmp_count(params.d, params.d.tokens);
    return params.partial_dkv +
           ((nsa__cuda_attend_pair(params, at) * params.max_parts + part) * keys + key) *
               nsa__cuda_partial_row(params);
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
        const int64_t pair = nsa__cuda_attend_pair(params, at);
        const int slot = r.slot_begin[pair * (r.blocks + 1) + part.block] + part.part;
        w.partial = params.partial_dkv +
                    ((pair * r.max_slots + slot) * params.d.slc_block + w.begin - block_begin) *
                        nsa__cuda_partial_row(params);
    }
    return w;
}

/* ---- dk and dv ----------------------------------------------------------------------------- */

/* Where the accumulators of 16 keys pass what a thread has, two warps share the columns. */
template <typename T, int DK, int DV>
struct nsa__cuda_dkv_shape : nsa__cuda_tile_shape<T, DK + DV, DK + DV, (DK + DV > 256 ? 16 : 32),
                                                  (DK + DV > 256 ? 8 : 16)> {
    static constexpr int SPLIT = DK + DV > 320 ? 2 : 1;
    static constexpr int THREADS = 32 * SPLIT * nsa__cuda_dkv_shape::WARPS;
};

/* A row that reads the keys of the tile, as the thread block shares it. */
struct nsa__cuda_reader_row {
    int query, head;         /* query < 0: no row */
    nsa__cuda_key_span keys; /* empty where there is no row */
    float lse2, delta;       /* lse2 is inf where p is to be 0 */
    int bad;
};

template <int ROWS>
NSA__DEVICE void
nsa__cuda_reader_rows(nsa__cuda_reader_row *table, const nsa__cuda_attend_params &params,
                      const nsa__cuda_attend_head &at, const nsa__cuda_key_work &work, int step) {
    const int r = static_cast<int>(threadIdx.x);
    if (r >= ROWS) return;
    const int64_t row = static_cast<int64_t>(step) * ROWS + r, i = row / params.group;
    nsa__cuda_reader_row x = {-1, 0, {0, 0}, INFINITY, 0, 0};
    if (i < work.readers) {
        x.query = work.list ? work.list[i] : work.first + static_cast<int>(i);
        x.head = at.kv_head * params.group + static_cast<int>(row % params.group);
        x.keys = nsa__cuda_keys_of(params, x.query);
        const float2 sums = *nsa__cuda_row_sums(params, at.b, x.query - at.seq.first, x.head);
        x.bad = nsa__cuda_is_nan_bits(sums.x);
        if (!x.bad) x.lse2 = sums.x;
        x.delta = sums.y;
    }
    table[r] = x;
}

/* s = k q^T becomes p, and dp = v dout^T becomes ds; columns are rows of the table. */
template <int N>
NSA__DEVICE void nsa__cuda_dkv_tile(float (&s)[N][4], float (&dp)[N][4],
                                    const nsa__cuda_reader_row *table, int key, float scale2,
                                    bool whole) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const nsa__cuda_reader_row &row = table[8 * n + column + e % 2];
            const int mine = key + e / 2 * 8;
            float p = nsa__ex2(fmaf(s[n][e], scale2, -row.lse2));
            float ds = p * (dp[n][e] - row.delta);
            /* ds too: what is masked may overflow, and 0 inf is NaN */
            if (!whole && (mine < row.keys.begin || mine >= row.keys.end)) p = ds = 0;
            s[n][e] = p;
            dp[n][e] = ds;
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
        void *row = nsa__row_at(to, at.seq.batch, at.key_row + key + 8 * h, at.kv_head);
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

template <typename T, int DK, int DV>
static __global__ void __launch_bounds__(nsa__cuda_dkv_shape<T, DK, DV>::THREADS,
                                         nsa__cuda_dkv_shape<T, DK, DV>::SPLIT == 1 ? 2 : 1)
    nsa__cuda_attend_dkv_kernel(nsa__cuda_attend_params params) {
    using shape = nsa__cuda_dkv_shape<T, DK, DV>;
    constexpr int BLOCK_N = shape::TILE, BLOCK_M = shape::STAGE, THREADS = shape::THREADS;
    constexpr int NK = DK / shape::SPLIT, NV = DV / shape::SPLIT;
    NSA_SHARED_ALL(shared);
    NSA_SHARED(nsa__cuda_reader_row, tables, [3][BLOCK_M]);
    T *const k = reinterpret_cast<T *>(shared), *const v = k + BLOCK_N * DK,
             *const stages = v + BLOCK_N * DV;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int warp_row = warp % shape::WARPS * 16, split = warp / shape::WARPS;

    NSA_SHARED(nsa__cuda_attend_head, at, );
    NSA_SHARED(nsa__cuda_key_work, work, );
    if (threadIdx.x == 0) {
        at = nsa__cuda_attend_head_of(params, blockIdx.x);
        work = params.branch == NSA__KEYS_SLC ? nsa__cuda_key_work_of_block(params, at, BLOCK_N)
                                              : nsa__cuda_key_work_of_tile(params, at, BLOCK_N);
    }
    __syncthreads();
    if (work.begin >= work.end || !work.readers) return;
    const int steps = static_cast<int>(
        (static_cast<int64_t>(work.readers) * params.group + BLOCK_M - 1) / BLOCK_M);
    const int first_key = work.begin + warp_row;

    const auto stage_rows = [&](int step) {
        T *const q = stages + step % 2 * BLOCK_M * (DK + DV);
        const auto row_of = [&](int r) {
            const nsa__cuda_reader_row &x = tables[step % 3][r];
            return nsa__cuda_query_row{x.query, x.head, x.query >= 0};
        };
        nsa__cuda_stage_q<T, DK, BLOCK_M, THREADS>(q, params, at, row_of);
        nsa__cuda_stage_dout<T, DV, BLOCK_M, THREADS>(q + BLOCK_M * DK, params, at, row_of);
    };
    nsa__cuda_reader_rows<BLOCK_M>(tables[0], params, at, work, 0);
    nsa__cuda_reader_rows<BLOCK_M>(tables[1], params, at, work, 1);
    __syncthreads();
    const nsa__cuda_key_tile k_tile = {work.begin, work.end, 0,
                                       nsa__cuda_bad_keys<BLOCK_N>(params, at, work.begin)};
    nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, THREADS>(k, params, at, k_tile);
    stage_rows(0);
    nsa__cp_async_commit();
    if (k_tile.bad) {
        nsa__cp_async_wait<0>();
        __syncthreads();
        nsa__cuda_clean_stage<T, DK, DV, BLOCK_N, THREADS>(k, k_tile.bad);
    }

    float dk[NK / 8][4] = {}, dv[NV / 8][4] = {};
    bool bad_key[2] = {false, false};
    for (int step = 0; step < steps; step++) {
        /* this stage and the next table have arrived, and no warp reads the others any more */
        nsa__cuda_tiles_wait<T, BLOCK_M>();
        if (step + 1 < steps) stage_rows(step + 1);
        nsa__cp_async_commit();
        nsa__cuda_reader_rows<BLOCK_M>(tables[(step + 2) % 3], params, at, work, step + 2);

        const nsa__cuda_reader_row *const table = tables[step % 3];
        T *const q = stages + step % 2 * BLOCK_M * (DK + DV), *const dout = q + BLOCK_M * DK;
        const nsa__cuda_reader_row &mine = table[lane % BLOCK_M];
        const int key = first_key + lane / 4;
        uint32_t bad = __ballot_sync(0xffffffffu, mine.bad && lane < BLOCK_M);
        if (bad) {
            nsa__cuda_tile_zero<T, DK, BLOCK_M, THREADS>(q, bad);
            nsa__cuda_tile_zero<T, DV, BLOCK_M, THREADS>(dout, bad);
            nsa__cuda_tiles_written<T, BLOCK_M>();
        }
        for (; bad; bad &= bad - 1) {
            const nsa__cuda_key_span reads = table[__ffs(static_cast<int>(bad)) - 1].keys;
#pragma unroll
            for (int h = 0; h < 2; h++)
                bad_key[h] |= key + 8 * h >= reads.begin && key + 8 * h < reads.end;
        }
        const bool sees = mine.keys.begin < first_key + 16 && mine.keys.end > first_key;
        if (!nsa__cuda_takes_part<T, BLOCK_M>(sees && first_key < work.end, true)) continue;
        const bool whole = __all_sync(0xffffffffu, mine.keys.begin <= first_key &&
                                                       mine.keys.end >= first_key + 16);
        float s[BLOCK_M / 8][4], dp[BLOCK_M / 8][4];
        nsa__cuda_product_nt<T, DK, BLOCK_M, BLOCK_N>(s, k, warp_row, q);
        nsa__cuda_product_nt<T, DV, BLOCK_M, BLOCK_N>(dp, v, warp_row, dout);
        nsa__cuda_dkv_tile(s, dp, table, key, params.scale2, whole);
        nsa__cuda_product_nn<T, BLOCK_M, NV>(dv, s, dout, split * NV);
        nsa__cuda_product_nn<T, BLOCK_M, NK>(dk, dp, q, split * NK);
    }
    const int key = first_key + lane / 4, column = lane % 4 * 2;
    nsa__cuda_dkv_end<T>(params, at, work, params.dx.k, params.d.dim, 0, params.scale, key,
                         column + split * NK, bad_key, dk);
    nsa__cuda_dkv_end<T>(params, at, work, params.dx.v, params.d.dim_v, params.d.dim, 1.0f, key,
                         column + split * NV, bad_key, dv);
}

/* ---- Adding up parts ----------------------------------------------------------------------- */

/* The partial sums of keys begin .. end - 1: `parts` of them, `stride` floats apart. */
struct nsa__cuda_part_sums {
    int begin, end, parts;
    const float *first;
    int64_t stride;
};

NSA__DEVICE nsa__cuda_part_sums nsa__cuda_part_sums_of(const nsa__cuda_attend_params &params,
                                                       const nsa__cuda_attend_head &at, int keys) {
    nsa__cuda_part_sums s = {0, 0, 0, nullptr, 0};
    if (params.branch == NSA__KEYS_SLC) {
        const nsa__cuda_block_readers &r = params.readers;
        const int64_t pair = nsa__cuda_attend_pair(params, at),
                      entry = pair * (r.blocks + 1) + at.tile;
        s.begin = at.tile * params.d.slc_block;
        s.end = s.begin + min(params.d.slc_block, at.keys - s.begin);
        s.parts = r.part_begin[entry + 1] - r.part_begin[entry];
        s.stride = params.d.slc_block * nsa__cuda_partial_row(params);
        s.first = params.partial_dkv + (pair * r.max_slots + r.slot_begin[entry]) * s.stride;
    } else {
        s.begin = at.tile * keys;
        s.end = min(s.begin + keys, at.keys);
        if (s.begin >= s.end) return s;
        const nsa__cuda_key_span all = nsa__cuda_readers_of(params, at, s.begin, s.end);
        if (all.begin >= all.end) return s;
        const int size = nsa__cuda_cmp_part(params, at.seq.tokens), part = all.begin / size;
        s.parts = (all.end - 1) / size + 1 - part;
        s.stride = static_cast<int64_t>(nsa__cmp_count(params.d, params.d.tokens)) *
                   nsa__cuda_partial_row(params);
        s.first = nsa__cuda_cmp_partial(params, at, part, s.begin);
    }
    return s;
}

enum { NSA__ATTEND_PARTS_THREADS = 128 };

static __global__ void nsa__cuda_attend_parts_kernel(nsa__cuda_attend_params params, int keys) {
    const nsa__cuda_attend_head at = nsa__cuda_attend_head_of(params, blockIdx.x);
    const nsa__cuda_part_sums s = nsa__cuda_part_sums_of(params, at, keys);
    const int of_k = params.d.dim / 8, pieces = of_k + params.d.dim_v / 8;
    if (s.parts < 2) return;
    for (int i = static_cast<int>(threadIdx.x); i < (s.end - s.begin) * pieces;
         i += NSA__ATTEND_PARTS_THREADS) {
        const int key = i / pieces, piece = i % pieces;
        const bool is_k = piece < of_k;
        const nsa_tensor &to = is_k ? params.dx.k : params.dx.v;
        if (!to.data) continue;
        float sum[8] = {};
        for (int part = 0; part < s.parts; part++) {
            float x[8];
            nsa__load8(x, NSA_F32, s.first + part * s.stride + key * nsa__cuda_partial_row(params),
                       8 * piece);
#pragma unroll
            for (int e = 0; e < 8; e++) sum[e] += x[e];
        }
        nsa__add8(to.dtype, nsa__row_at(to, at.seq.batch, at.key_row + s.begin + key, at.kv_head),
                  8 * (is_k ? piece : piece - of_k), is_k ? params.scale : 1.0f, sum);
    }
}

template <typename T, int DK, int DV> struct nsa__cuda_dkv_launch {
    static nsa_status launch(nsa__cuda_attend_params params, cudaStream_t stream) {
        using shape = nsa__cuda_dkv_shape<T, DK, DV>;
        const bool slc = params.branch == NSA__KEYS_SLC, cmp = params.branch == NSA__KEYS_CMP;
        const int64_t keys = cmp ? nsa_cmp_count(&params.d, params.d.tokens) : params.d.tokens;
        const int64_t tiles = nsa__cuda_ceil_div(keys, shape::TILE);
        dim3 grid;
        nsa_status s = nsa__cuda_attend_grid(
            &params,
            slc ? params.readers.max_parts * nsa__cuda_ceil_div(params.d.slc_block, shape::TILE)
                : tiles * params.max_parts,
            &grid);
        if (s != NSA_OK || tiles == 0) return s;
        s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_dkv_kernel<T, DK, DV>, grid,
                                        dim3(shape::THREADS), shape::BYTES, stream, params));
        if (s != NSA_OK || !params.partial_dkv) return s;
        if ((s = nsa__cuda_attend_grid(&params, slc ? params.readers.blocks : tiles, &grid)) !=
            NSA_OK)
            return s;
        return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_parts_kernel, grid,
                                           dim3(NSA__ATTEND_PARTS_THREADS), 0, stream, params,
                                           int{shape::TILE}));
    }
};

/* ---- Calls --------------------------------------------------------------------------------- */

/* cmp: how many parts a sequence may have; the others' tiles are not shared out. */
static void nsa__cuda_plan_parts(nsa__cuda_attend_params *params, nsa__cuda_arena *arena) {
    const nsa_desc *d = &params->d;
    const int64_t least = nsa__cuda_ceil_div(NSA__CMP_PART_ROWS, params->group);
    params->max_parts = 1;
    if (params->branch != NSA__KEYS_CMP || d->tokens <= least) return;
    const int64_t parts = nsa__cuda_ceil_div(d->tokens, least);
    params->max_parts = parts < NSA__CMP_PARTS ? static_cast<int>(parts) : int{NSA__CMP_PARTS};
    params->partial_dkv = nsa__cuda_take<float>(
        arena, static_cast<int64_t>(d->batch) * d->kv_heads * params->max_parts *
                   nsa_cmp_count(d, d->tokens) * (d->dim + d->dim_v));
}

static void nsa__cuda_backward_plan(nsa__cuda_attend_params *params, const nsa_desc *d,
                                    nsa__cuda_branch_keys branch, nsa__cuda_arena *arena) {
    nsa__cuda_attend_plan(params, d, branch, arena);
    params->rows =
        nsa__cuda_take<float2>(arena, static_cast<int64_t>(d->batch) * d->count * d->heads);
    nsa__cuda_plan_parts(params, arena);
    if (branch == NSA__KEYS_SLC) {
        nsa__cuda_plan_readers(params, d->count, arena);
        nsa__cuda_plan_reader_parts(params, NSA__SLC_PART_ROWS / params->group);
        nsa__cuda_plan_slots(params, arena);
    }
    params->rows_of = d->count;
    params->chunk = nsa__cuda_gather_chunk(params, d->dim);
    params->partial_out =
        nsa__cuda_take<float>(arena, static_cast<int64_t>(d->batch) * d->heads *
                                         params->list_width * params->chunk * d->dim);
}

static nsa_status nsa__cuda_attend_check_gradient(const nsa_attend *dx, const nsa_attend *x,
                                                  const nsa_desc *d, nsa__cuda_branch_keys branch,
                                                  const nsa__attend_fields *at) {
    const unsigned dtypes = 1u << x->q.dtype | 1u << NSA_F32;
    NSA__CHECK(nsa__cuda_check_rows(&dx->out, nsa__cuda_query_shape(d, d->heads, d->dim_v), dtypes,
                                    0, at->out | NSA__GRADIENT));
    NSA__CHECK(
        nsa__cuda_check_gradient(&dx->q, &x->q, nsa__cuda_query_shape(d, d->heads, d->dim), at->q));
    NSA__CHECK(
        nsa__cuda_check_gradient(&dx->k, &x->k, nsa__cuda_branch_shape(d, branch, d->dim), at->k));
    return nsa__cuda_check_gradient(&dx->v, &x->v, nsa__cuda_branch_shape(d, branch, d->dim_v),
                                    at->v);
}

static nsa_status nsa__cuda_attend_rows(const nsa__cuda_attend_params *params,
                                        cudaStream_t stream) {
    dim3 grid;
    const int64_t rows = static_cast<int64_t>(params->d.count) * params->d.heads;
    NSA__CHECK(nsa__cuda_grid(params->d.batch * nsa__cuda_ceil_div(rows, NSA__ROWS_WARPS), &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_rows_kernel, grid,
                                       dim3(32 * NSA__ROWS_WARPS), 0, stream, *params));
}

/* Backward of one branch behind its checks; the workspace has nsa__cuda_backward_plan's bytes. */
static nsa_status nsa__cuda_attend_backward_run(const nsa_attend *dx, const nsa_attend *x,
                                                const nsa_desc *d, nsa__cuda_branch_keys branch,
                                                void *workspace, cudaStream_t stream) {
    if (d->count == 0) return NSA_OK;
    nsa__cuda_attend_params params =
        nsa__cuda_attend_params_of(d, branch, nsa__cuda_backward_plan, workspace);
    params.x = *x;
    params.dx = *dx;
    nsa_status s = nsa__cuda_attend_prepare(&params, stream);
    if (s == NSA_OK) s = nsa__cuda_attend_rows(&params, stream);
    if (s == NSA_OK && dx->q.data)
        s = params.chunk ? nsa__cuda_gather_run<nsa__cuda_dq_launch>(
                               &params, nsa__cuda_gather_dq_kernel, stream)
                         : nsa__cuda_attend_choose<nsa__cuda_dq_launch>(params, stream);
    if (s != NSA_OK || (!dx->k.data && !dx->v.data)) return s;
    if (branch == NSA__KEYS_SLC) s = nsa__cuda_invert_lists(&params, stream);
    return s == NSA_OK ? nsa__cuda_attend_choose<nsa__cuda_dkv_launch>(params, stream) : s;
}

static nsa_status nsa__cuda_attend_backward(const nsa_attend *dx, const nsa_attend *x,
                                            const nsa_desc *d, nsa__cuda_branch_keys branch,
                                            void *workspace, size_t bytes, cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_check_desc(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(nsa__cuda_attend_check(x, d, branch, 0, &nsa__attend_names));
    NSA__CHECK(nsa__cuda_attend_check_gradient(dx, x, d, branch, &nsa__attend_names));
    NSA__CHECK(nsa__check_lse_gradient(&dx->lse, &x->lse, nsa__cuda_query_shape(d, d->heads, 1)));
    nsa_status s = nsa__cuda_check_workspace(
        nsa__cuda_attend_bytes(d, branch, nsa__cuda_backward_plan), workspace, bytes);
    return s == NSA_OK ? nsa__cuda_attend_backward_run(dx, x, d, branch, workspace, stream) : s;
}

#endif

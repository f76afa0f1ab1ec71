/* attend_backward.cuh: attention over few keys, backward: one core for all branches.
   Twin: nsa.h, "Attention over spans of keys", -- backward --.
   Not here: which queries read a block (attend_slc.cuh), forward (attend.cuh).

   With p = exp(scale q k - lse), out = sum p v and delta = dout . out:
     dv[s] = sum_t p dout[t]    ds = p (dout . v[s] - delta)    dq[t] = scale sum_s ds k[s]
     dk[s] = scale sum_t ds q[t]
   One kernel goes over query tiles as forward does and makes dq; another holds a tile of keys, goes
   over the rows that read it and makes dk and dv. Every row of a gradient has one owner, who adds
   to it once, so nothing is atomic. Keys that very many queries read (the first block, the first
   compressed rows) are shared out among blocks by parts of their readers, whose sums are then added
   up in order. */
#ifndef NSA_ATTEND_BACKWARD_CUH
#define NSA_ATTEND_BACKWARD_CUH

#include "attend_gather.cuh"

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

NSA__DEVICE float2 *nsa__cuda_row_sums(const nsa__cuda_attend_job &job, int b, int place,
                                       int head) {
    return job.rows + (static_cast<int64_t>(b) * job.rows_of + place) * job.d.heads + head;
}

/* A warp makes one row. lse is NaN where forward met a value that is not finite. */
static __global__ void nsa__cuda_attend_rows_kernel(nsa__cuda_attend_job job) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int blocks = static_cast<int>(gridDim.x) / job.d.batch;
    const int b = static_cast<int>(blockIdx.x) / blocks;
    const int64_t item =
        static_cast<int64_t>(static_cast<int>(blockIdx.x) % blocks) * NSA__ROWS_WARPS + warp;
    const nsa__sequence seq = nsa__sequence_of(job.d, b);
    const int64_t place = item / job.d.heads;
    const int head = static_cast<int>(item % job.d.heads);
    if (place >= seq.count) return;
    const void *out = nsa__row_at(job.x.out, seq.batch, seq.row + place, head);
    const void *dout = nsa__row_at(job.dx.out, seq.batch, seq.row + place, head);
    const float lse = *nsa__row_of<float>(job.x.lse, seq.batch, seq.row + place, head);
    bool finite = nsa__finite(lse);
    float delta = 0;
    for (int c = 8 * lane; c < job.d.dim_v; c += 256) {
        float o[8], g[8];
        nsa__load8(o, job.x.out.dtype, out, c);
        nsa__load8(g, job.dx.out.dtype, dout, c);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            finite &= nsa__finite(g[i]);
            delta = fmaf(o[i], g[i], delta);
        }
    }
#pragma unroll
    for (int step = 16; step; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
    finite = __all_sync(0xffffffffu, finite);
    if (lane == 0)
        *nsa__cuda_row_sums(job, b, static_cast<int>(place), head) =
            finite ? make_float2(lse * 1.44269504f, delta)
                   : make_float2(__uint_as_float(0x7fc00000u), 0.0f);
}

NSA__DEVICE bool nsa__cuda_is_nan_bits(float x) {
    return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u;
}

/* Starts copying rows of dout; rounds them on the way where they are f32 and tensors are not. */
template <typename T, int DV, int ROWS, int THREADS, typename Row>
NSA__DEVICE void nsa__cuda_stage_dout(T *tile, const nsa__cuda_attend_job &job,
                                      const nsa__cuda_attend_place &at, Row row_of) {
    if (job.dx.out.dtype == nsa__dtype_of<T>::value)
        nsa__cuda_tile_copy<T, DV, ROWS, THREADS>(
            tile, job.d.dim_v, static_cast<const T *>(job.dx.out.data), [&](int r) {
                const nsa__cuda_query_row row = row_of(r);
                return row.there ? nsa__cuda_query_at<const T>(job.dx.out, at, row.query, row.head)
                                 : nullptr;
            });
    else
        nsa__cuda_tile_round<T, DV, ROWS, THREADS>(tile, job.d.dim_v, [&](int r) {
            const nsa__cuda_query_row row = row_of(r);
            return row.there ? nsa__cuda_query_at<const float>(job.dx.out, at, row.query, row.head)
                             : nullptr;
        });
}

template <typename T, int DK, int ROWS, int THREADS, typename Row>
NSA__DEVICE void nsa__cuda_stage_q(T *tile, const nsa__cuda_attend_job &job,
                                   const nsa__cuda_attend_place &at, Row row_of) {
    nsa__cuda_tile_copy<T, DK, ROWS, THREADS>(
        tile, job.d.dim, static_cast<const T *>(job.x.q.data), [&](int r) {
            const nsa__cuda_query_row row = row_of(r);
            return row.there ? nsa__cuda_query_at<const T>(job.x.q, at, row.query, row.head)
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

NSA__DEVICE void nsa__cuda_dq_begin(nsa__cuda_dq_rows &rows, const nsa__cuda_attend_job &job,
                                    const nsa__cuda_attend_place &at,
                                    const nsa__cuda_query_tile &tile) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const nsa__cuda_query_row row =
            nsa__cuda_query_row_of(job, at, tile, nsa__cuda_upper_row() + 8 * h);
        rows.number[h] = (tile.skip + nsa__cuda_upper_row() + 8 * h) / job.group -
                         nsa__cuda_group_first(job, tile);
        rows.keys[h] = {0, 0};
        rows.lse2[h] = INFINITY;
        rows.delta[h] = 0;
        rows.bad[h] = rows.reads[h] = false;
        if (!row.there) continue;
        const float2 sums = *nsa__cuda_row_sums(job, at.b, row.query - at.seq.first, row.head);
        rows.keys[h] = nsa__cuda_keys_of(job, row.query);
        rows.bad[h] = nsa__cuda_is_nan_bits(sums.x);
        if (!rows.bad[h]) rows.lse2[h] = sums.x;
        rows.delta[h] = sums.y;
    }
}

/* dq += scale (what the thread's rows have summed up). */
template <typename T, int N>
NSA__DEVICE void nsa__cuda_dq_end(const nsa__cuda_attend_job &job, const nsa__cuda_attend_place &at,
                                  const nsa__cuda_query_tile &tile, const nsa__cuda_dq_rows &rows,
                                  const float (&dq)[N][4]) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    const float nan = __uint_as_float(0x7fc00000u);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const nsa__cuda_query_row row =
            nsa__cuda_query_row_of(job, at, tile, nsa__cuda_upper_row() + 8 * h);
        if (!row.there || !rows.reads[h]) continue;
        if (job.gathered) {
            float *found = job.found + nsa__cuda_found_at(job, at, tile, row) * job.d.dim;
#pragma unroll
            for (int n = 0; n < N; n++)
                if (8 * n < job.d.dim)
                    nsa__store_pair(found + 8 * n + column, dq[n][2 * h], dq[n][2 * h + 1]);
            continue;
        }
        void *to =
            nsa__row_at(job.dx.q, at.seq.batch, at.seq.row + row.query - at.seq.first, row.head);
#pragma unroll
        for (int n = 0; n < N; n++)
            if (8 * n < job.d.dim)
                nsa__cuda_add_pair<T>(job.dx.q.dtype, to, 8 * n + column, job.scale,
                                      rows.bad[h] ? nan : dq[n][2 * h],
                                      rows.bad[h] ? nan : dq[n][2 * h + 1]);
    }
}

template <typename T, int DK, int DV>
static __global__ void __launch_bounds__(32 * nsa__cuda_dq_shape<T, DK, DV>::WARPS, 2)
    nsa__cuda_attend_dq_kernel(nsa__cuda_attend_job job) {
    using shape = nsa__cuda_dq_shape<T, DK, DV>;
    constexpr int ROWS = shape::HELD, KEYS = shape::STREAMED, THREADS = 32 * shape::WARPS;
    NSA_SHARED_ALL(shared);
    T *const q = reinterpret_cast<T *>(shared), *const dout = q + ROWS * DK,
             *const stages = dout + ROWS * DV;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;

    NSA_SHARED(nsa__cuda_attend_place, at, );
    NSA_SHARED(nsa__cuda_query_tile, tile_rows, );
    if (threadIdx.x == 0) {
        at = nsa__cuda_attend_place_of(job, blockIdx.x);
        tile_rows = nsa__cuda_query_tile_of(job, at, ROWS);
    }
    __syncthreads();
    if (tile_rows.first >= tile_rows.end) return;
    nsa__cuda_walk_keys<KEYS, ROWS> walk = {};
    nsa__cuda_walk_begin(walk, job, at, tile_rows);
    const auto row_of = [&](int r) { return nsa__cuda_query_row_of(job, at, tile_rows, r); };
    nsa__cuda_stage_q<T, DK, ROWS, THREADS>(q, job, at, row_of);
    nsa__cuda_stage_dout<T, DV, ROWS, THREADS>(dout, job, at, row_of);
    bool more = nsa__cuda_walk_next(walk, job, at, tile_rows);
    if (more) nsa__cuda_stage_keys<T, DK, DV, KEYS, THREADS>(stages, job, at, walk.tile);
    nsa__cp_async_commit();

    nsa__cuda_dq_rows rows;
    nsa__cuda_dq_begin(rows, job, at, tile_rows);
    float dq[DK / 8][4] = {};
    for (int stage = 0; more; stage ^= 1) {
        const nsa__cuda_key_tile tile = walk.tile;
        T *const k = stages + stage * KEYS * (DK + DV), *const v = k + KEYS * DK;
        /* this stage is there, and nobody reads the other one any more */
        nsa__cuda_tiles_wait<T, KEYS>();
        more = nsa__cuda_walk_next(walk, job, at, tile_rows);
        if (more)
            nsa__cuda_stage_keys<T, DK, DV, KEYS, THREADS>(stages + (stage ^ 1) * KEYS * (DK + DV),
                                                           job, at, walk.tile);
        nsa__cp_async_commit();
        if (tile.bad) nsa__cuda_clean_stage<T, DK, DV, KEYS, THREADS>(k, tile.bad);

        const nsa__cuda_key_span seen[2] = {nsa__cuda_seen_of(tile, rows.keys[0], rows.number[0]),
                                            nsa__cuda_seen_of(tile, rows.keys[1], rows.number[1])};
        const bool sees[2] = {seen[0].begin < seen[0].end, seen[1].begin < seen[1].end};
        rows.reads[0] |= sees[0];
        rows.reads[1] |= sees[1];
        if (!nsa__cuda_takes_part<T, KEYS>(sees[0] || sees[1], tile.readers != 0)) continue;
        float s[KEYS / 8][4], dp[KEYS / 8][4];
        nsa__cuda_product_nt<T, DK, KEYS, ROWS>(s, q, warp_row, k);
        nsa__cuda_mask_tile(s, seen, job.scale2);
        nsa__cuda_product_nt<T, DV, KEYS, ROWS>(dp, dout, warp_row, v);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[n][e] = nsa__ex2(s[n][e] - rows.lse2[e / 2]) * (dp[n][e] - rows.delta[e / 2]);
        nsa__cuda_hide(s, seen, 0.0f); /* dp of what is masked may overflow, and 0 inf is NaN */
        nsa__cuda_product_nn<T, KEYS, DK>(dq, s, k, 0);
    }
    nsa__cp_async_wait<0>(); /* a row without keys has waited for nothing yet */
    nsa__cuda_dq_end<T>(job, at, tile_rows, rows, dq);
}

/* A warp adds up what one row has found: dq += scale (the sum). */
static __global__ void nsa__cuda_gather_dq_kernel(nsa__cuda_attend_job job) {
    const nsa__cuda_gather_row row = nsa__cuda_gather_row_of(job);
    if (!row.there) return;
    const float *found = job.found + row.number * job.list_width * job.d.dim;
    const bool bad = nsa__cuda_is_nan_bits(nsa__cuda_row_sums(job, row.b, row.place, row.head)->x);
    const float nan = __uint_as_float(0x7fc00000u);
    void *to = nsa__row_at(job.dx.q, row.batch, row.row, row.head);
    for (int c = static_cast<int>(threadIdx.x) % 32 * 8; c < job.d.dim; c += 256) {
        float sum[8] = {};
        int before = -1;
        for (int i = nsa__cuda_gather_next(job, row, 0, before); i < job.list_width;
             i = nsa__cuda_gather_next(job, row, i + 1, before)) {
            float x[8];
            nsa__load8(x, NSA_F32, found + static_cast<int64_t>(i) * job.d.dim, c);
#pragma unroll
            for (int e = 0; e < 8; e++) sum[e] += bad ? nan : x[e];
        }
        if (before >= 0) nsa__add8(job.dx.q.dtype, to, c, job.scale, sum);
    }
}

template <typename T, int DK, int DV> struct nsa__cuda_dq_run {
    static nsa_status launch(nsa__cuda_attend_job job, cudaStream_t stream) {
        using shape = nsa__cuda_dq_shape<T, DK, DV>;
        dim3 grid;
        const nsa_status s = nsa__cuda_query_grid(&job, shape::HELD, &grid, stream);
        if (s != NSA_OK) return s;
        return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_dq_kernel<T, DK, DV>, grid,
                                           dim3(32 * shape::WARPS), shape::BYTES, stream, job));
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
NSA__DEVICE int64_t nsa__cuda_partial_row(const nsa__cuda_attend_job &job) {
    return job.d.dim + job.d.dim_v;
}

/* The positions of queries that may see keys begin .. end - 1. */
NSA__DEVICE nsa__cuda_key_span nsa__cuda_readers_of(const nsa__cuda_attend_job &job,
                                                    const nsa__cuda_attend_place &at, int begin,
                                                    int end) {
    int64_t first = begin, last = at.seq.tokens;
    if (job.branch == NSA__KEYS_CMP)
        first = static_cast<int64_t>(begin) * job.d.cmp_stride + job.d.cmp_block - 1;
    if (job.branch == NSA__KEYS_WIN)
        last = min(last, static_cast<int64_t>(end) + job.d.window -
                             (job.d.window_rule == NSA_WINDOW_COUNTS_SELF));
    first = max(first, static_cast<int64_t>(at.seq.first));
    last = min(last, static_cast<int64_t>(at.seq.first) + at.seq.count);
    return {static_cast<int>(min(first, last)), static_cast<int>(last)};
}

/* Queries of a part of a tile of compressed keys: the length of the sequence alone decides. */
NSA__DEVICE int nsa__cuda_cmp_part(const nsa__cuda_attend_job &job, int tokens) {
    return max((NSA__CMP_PART_ROWS + job.group - 1) / job.group,
               (tokens + NSA__CMP_PARTS - 1) / NSA__CMP_PARTS);
}

NSA__DEVICE float *nsa__cuda_cmp_partial(const nsa__cuda_attend_job &job,
                                         const nsa__cuda_attend_place &at, int part, int key) {
    const int64_t keys = nsa__cmp_count(job.d, job.d.tokens);
    return job.partial + ((nsa__cuda_attend_pair(job, at) * job.max_parts + part) * keys + key) *
                             nsa__cuda_partial_row(job);
}

/* cmp, win, dense: tiles of keys, for cmp each with max_parts parts. */
NSA__DEVICE nsa__cuda_key_work nsa__cuda_key_work_of_tile(const nsa__cuda_attend_job &job,
                                                          const nsa__cuda_attend_place &at,
                                                          int keys) {
    const int part = at.tile % job.max_parts;
    nsa__cuda_key_work w = {at.tile / job.max_parts * keys, 0, 0, 0, nullptr, nullptr};
    w.end = min(w.begin + keys, at.keys);
    if (w.begin >= w.end) return w;
    const nsa__cuda_key_span all = nsa__cuda_readers_of(job, at, w.begin, w.end);
    nsa__cuda_key_span mine = all;
    if (job.branch == NSA__KEYS_CMP && all.begin < all.end) {
        const int size = nsa__cuda_cmp_part(job, at.seq.tokens);
        mine.begin = max(all.begin, part * size);
        mine.end = min(all.end, (part + 1) * size);
        if (all.begin / size != (all.end - 1) / size)
            w.partial = nsa__cuda_cmp_partial(job, at, part, w.begin);
    }
    w.first = mine.begin;
    w.readers = max(mine.end - mine.begin, 0);
    return w;
}

/* slc: parts of the readers of blocks, each in pieces of at most `keys` keys. */
NSA__DEVICE nsa__cuda_key_work nsa__cuda_key_work_of_block(const nsa__cuda_attend_job &job,
                                                           const nsa__cuda_attend_place &at,
                                                           int keys) {
    const nsa__cuda_block_readers &r = job.readers;
    const int pieces = (job.d.slc_block + keys - 1) / keys;
    const nsa__cuda_reader_part part = nsa__cuda_reader_part_of(job, at, at.tile / pieces);
    nsa__cuda_key_work w = {0, 0, 0, 0, nullptr, nullptr};
    if (part.block < 0) return w;
    const int block_begin = part.block * job.d.slc_block;
    w.begin = block_begin + at.tile % pieces * keys;
    w.end = w.begin + min(min(keys, job.d.slc_block - (w.begin - block_begin)), at.keys - w.begin);
    w.list = part.query;
    w.readers = part.count;
    if (part.parts > 1) {
        const int64_t pair = nsa__cuda_attend_pair(job, at);
        const int slot = r.slot_begin[pair * (r.blocks + 1) + part.block] + part.part;
        w.partial =
            job.partial + ((pair * r.max_slots + slot) * job.d.slc_block + w.begin - block_begin) *
                              nsa__cuda_partial_row(job);
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

/* A row that reads the keys held, as the block's threads share it. */
struct nsa__cuda_reader_row {
    int query, head;         /* query < 0: no row */
    nsa__cuda_key_span keys; /* empty where there is no row */
    float lse2, delta;       /* lse2 is inf where p is to be 0 */
    int bad;
};

template <int ROWS>
NSA__DEVICE void nsa__cuda_reader_rows(nsa__cuda_reader_row *table, const nsa__cuda_attend_job &job,
                                       const nsa__cuda_attend_place &at,
                                       const nsa__cuda_key_work &work, int step) {
    const int r = static_cast<int>(threadIdx.x);
    if (r >= ROWS) return;
    const int64_t row = static_cast<int64_t>(step) * ROWS + r, i = row / job.group;
    nsa__cuda_reader_row x = {-1, 0, {0, 0}, INFINITY, 0, 0};
    if (i < work.readers) {
        x.query = work.list ? work.list[i] : work.first + static_cast<int>(i);
        x.head = at.kv_head * job.group + static_cast<int>(row % job.group);
        x.keys = nsa__cuda_keys_of(job, x.query);
        const float2 sums = *nsa__cuda_row_sums(job, at.b, x.query - at.seq.first, x.head);
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
NSA__DEVICE void nsa__cuda_dkv_end(const nsa__cuda_attend_job &job,
                                   const nsa__cuda_attend_place &at, const nsa__cuda_key_work &work,
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
        if (part) part += (key + 8 * h - work.begin) * nsa__cuda_partial_row(job) + partial_at;
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
    nsa__cuda_attend_dkv_kernel(nsa__cuda_attend_job job) {
    using shape = nsa__cuda_dkv_shape<T, DK, DV>;
    constexpr int KEYS = shape::HELD, ROWS = shape::STREAMED, THREADS = shape::THREADS;
    constexpr int NK = DK / shape::SPLIT, NV = DV / shape::SPLIT;
    NSA_SHARED_ALL(shared);
    NSA_SHARED(nsa__cuda_reader_row, tables, [3][ROWS]);
    T *const k = reinterpret_cast<T *>(shared), *const v = k + KEYS * DK,
             *const stages = v + KEYS * DV;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int warp_row = warp % shape::WARPS * 16, split = warp / shape::WARPS;

    NSA_SHARED(nsa__cuda_attend_place, at, );
    NSA_SHARED(nsa__cuda_key_work, work, );
    if (threadIdx.x == 0) {
        at = nsa__cuda_attend_place_of(job, blockIdx.x);
        work = job.branch == NSA__KEYS_SLC ? nsa__cuda_key_work_of_block(job, at, KEYS)
                                           : nsa__cuda_key_work_of_tile(job, at, KEYS);
    }
    __syncthreads();
    if (work.begin >= work.end || !work.readers) return;
    const int steps =
        static_cast<int>((static_cast<int64_t>(work.readers) * job.group + ROWS - 1) / ROWS);
    const int first_key = work.begin + warp_row;

    const auto stage_rows = [&](int step) {
        T *const q = stages + step % 2 * ROWS * (DK + DV);
        const auto row_of = [&](int r) {
            const nsa__cuda_reader_row &x = tables[step % 3][r];
            return nsa__cuda_query_row{x.query, x.head, x.query >= 0};
        };
        nsa__cuda_stage_q<T, DK, ROWS, THREADS>(q, job, at, row_of);
        nsa__cuda_stage_dout<T, DV, ROWS, THREADS>(q + ROWS * DK, job, at, row_of);
    };
    nsa__cuda_reader_rows<ROWS>(tables[0], job, at, work, 0);
    nsa__cuda_reader_rows<ROWS>(tables[1], job, at, work, 1);
    __syncthreads();
    const nsa__cuda_key_tile held = {work.begin, work.end, 0,
                                     nsa__cuda_bad_keys<KEYS>(job, at, work.begin)};
    nsa__cuda_stage_keys<T, DK, DV, KEYS, THREADS>(k, job, at, held);
    stage_rows(0);
    nsa__cp_async_commit();
    if (held.bad) {
        nsa__cp_async_wait<0>();
        __syncthreads();
        nsa__cuda_clean_stage<T, DK, DV, KEYS, THREADS>(k, held.bad);
    }

    float dk[NK / 8][4] = {}, dv[NV / 8][4] = {};
    bool bad_key[2] = {false, false};
    for (int step = 0; step < steps; step++) {
        /* stage and next table are there; nobody reads the others any more */
        nsa__cuda_tiles_wait<T, ROWS>();
        if (step + 1 < steps) stage_rows(step + 1);
        nsa__cp_async_commit();
        nsa__cuda_reader_rows<ROWS>(tables[(step + 2) % 3], job, at, work, step + 2);

        const nsa__cuda_reader_row *const table = tables[step % 3];
        T *const q = stages + step % 2 * ROWS * (DK + DV), *const dout = q + ROWS * DK;
        const nsa__cuda_reader_row &mine = table[lane % ROWS];
        const int key = first_key + lane / 4;
        uint32_t bad = __ballot_sync(0xffffffffu, mine.bad && lane < ROWS);
        if (bad) {
            nsa__cuda_tile_zero<T, DK, ROWS, THREADS>(q, bad);
            nsa__cuda_tile_zero<T, DV, ROWS, THREADS>(dout, bad);
            nsa__cuda_tiles_written<T, ROWS>();
        }
        for (; bad; bad &= bad - 1) {
            const nsa__cuda_key_span reads = table[__ffs(static_cast<int>(bad)) - 1].keys;
#pragma unroll
            for (int h = 0; h < 2; h++)
                bad_key[h] |= key + 8 * h >= reads.begin && key + 8 * h < reads.end;
        }
        const bool sees = mine.keys.begin < first_key + 16 && mine.keys.end > first_key;
        if (!nsa__cuda_takes_part<T, ROWS>(sees && first_key < work.end, true)) continue;
        const bool whole = __all_sync(0xffffffffu, mine.keys.begin <= first_key &&
                                                       mine.keys.end >= first_key + 16);
        float s[ROWS / 8][4], dp[ROWS / 8][4];
        nsa__cuda_product_nt<T, DK, ROWS, KEYS>(s, k, warp_row, q);
        nsa__cuda_product_nt<T, DV, ROWS, KEYS>(dp, v, warp_row, dout);
        nsa__cuda_dkv_tile(s, dp, table, key, job.scale2, whole);
        nsa__cuda_product_nn<T, ROWS, NV>(dv, s, dout, split * NV);
        nsa__cuda_product_nn<T, ROWS, NK>(dk, dp, q, split * NK);
    }
    const int key = first_key + lane / 4, column = lane % 4 * 2;
    nsa__cuda_dkv_end<T>(job, at, work, job.dx.k, job.d.dim, 0, job.scale, key, column + split * NK,
                         bad_key, dk);
    nsa__cuda_dkv_end<T>(job, at, work, job.dx.v, job.d.dim_v, job.d.dim, 1.0f, key,
                         column + split * NV, bad_key, dv);
}

/* ---- Adding up parts ----------------------------------------------------------------------- */

/* The partial sums of keys begin .. end - 1: `parts` of them, `stride` floats apart. */
struct nsa__cuda_part_sums {
    int begin, end, parts;
    const float *first;
    int64_t stride;
};

NSA__DEVICE nsa__cuda_part_sums nsa__cuda_part_sums_of(const nsa__cuda_attend_job &job,
                                                       const nsa__cuda_attend_place &at, int keys) {
    nsa__cuda_part_sums s = {0, 0, 0, nullptr, 0};
    if (job.branch == NSA__KEYS_SLC) {
        const nsa__cuda_block_readers &r = job.readers;
        const int64_t pair = nsa__cuda_attend_pair(job, at),
                      entry = pair * (r.blocks + 1) + at.tile;
        s.begin = at.tile * job.d.slc_block;
        s.end = s.begin + min(job.d.slc_block, at.keys - s.begin);
        s.parts = r.part_begin[entry + 1] - r.part_begin[entry];
        s.stride = job.d.slc_block * nsa__cuda_partial_row(job);
        s.first = job.partial + (pair * r.max_slots + r.slot_begin[entry]) * s.stride;
    } else {
        s.begin = at.tile * keys;
        s.end = min(s.begin + keys, at.keys);
        if (s.begin >= s.end) return s;
        const nsa__cuda_key_span all = nsa__cuda_readers_of(job, at, s.begin, s.end);
        if (all.begin >= all.end) return s;
        const int size = nsa__cuda_cmp_part(job, at.seq.tokens), part = all.begin / size;
        s.parts = (all.end - 1) / size + 1 - part;
        s.stride =
            static_cast<int64_t>(nsa__cmp_count(job.d, job.d.tokens)) * nsa__cuda_partial_row(job);
        s.first = nsa__cuda_cmp_partial(job, at, part, s.begin);
    }
    return s;
}

enum { NSA__ATTEND_PARTS_THREADS = 128 };

static __global__ void nsa__cuda_attend_parts_kernel(nsa__cuda_attend_job job, int keys) {
    const nsa__cuda_attend_place at = nsa__cuda_attend_place_of(job, blockIdx.x);
    const nsa__cuda_part_sums s = nsa__cuda_part_sums_of(job, at, keys);
    const int of_k = job.d.dim / 8, pieces = of_k + job.d.dim_v / 8;
    if (s.parts < 2) return;
    for (int i = static_cast<int>(threadIdx.x); i < (s.end - s.begin) * pieces;
         i += NSA__ATTEND_PARTS_THREADS) {
        const int key = i / pieces, piece = i % pieces;
        const bool is_k = piece < of_k;
        const nsa_tensor &to = is_k ? job.dx.k : job.dx.v;
        if (!to.data) continue;
        float sum[8] = {};
        for (int part = 0; part < s.parts; part++) {
            float x[8];
            nsa__load8(x, NSA_F32, s.first + part * s.stride + key * nsa__cuda_partial_row(job),
                       8 * piece);
#pragma unroll
            for (int e = 0; e < 8; e++) sum[e] += x[e];
        }
        nsa__add8(to.dtype, nsa__row_at(to, at.seq.batch, at.key_row + s.begin + key, at.kv_head),
                  8 * (is_k ? piece : piece - of_k), is_k ? job.scale : 1.0f, sum);
    }
}

template <typename T, int DK, int DV> struct nsa__cuda_dkv_run {
    static nsa_status launch(nsa__cuda_attend_job job, cudaStream_t stream) {
        using shape = nsa__cuda_dkv_shape<T, DK, DV>;
        const bool slc = job.branch == NSA__KEYS_SLC, cmp = job.branch == NSA__KEYS_CMP;
        const int64_t keys = cmp ? nsa_cmp_count(&job.d, job.d.tokens) : job.d.tokens;
        const int64_t tiles = nsa__cuda_ceil_div(keys, shape::HELD);
        dim3 grid;
        nsa_status s = nsa__cuda_attend_grid(
            &job,
            slc ? job.readers.max_parts * nsa__cuda_ceil_div(job.d.slc_block, shape::HELD)
                : tiles * job.max_parts,
            &grid);
        if (s != NSA_OK || tiles == 0) return s;
        s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_dkv_kernel<T, DK, DV>, grid,
                                        dim3(shape::THREADS), shape::BYTES, stream, job));
        if (s != NSA_OK || !job.partial) return s;
        if ((s = nsa__cuda_attend_grid(&job, slc ? job.readers.blocks : tiles, &grid)) != NSA_OK)
            return s;
        return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_parts_kernel, grid,
                                           dim3(NSA__ATTEND_PARTS_THREADS), 0, stream, job,
                                           int{shape::HELD}));
    }
};

/* ---- Calls --------------------------------------------------------------------------------- */

/* cmp: how many parts a sequence may have; the others' tiles are not shared out. */
static void nsa__cuda_plan_parts(nsa__cuda_attend_job *job, nsa__cuda_arena *arena) {
    const nsa_desc *d = &job->d;
    const int64_t least = nsa__cuda_ceil_div(NSA__CMP_PART_ROWS, job->group);
    job->max_parts = 1;
    if (job->branch != NSA__KEYS_CMP || d->tokens <= least) return;
    const int64_t parts = nsa__cuda_ceil_div(d->tokens, least);
    job->max_parts = parts < NSA__CMP_PARTS ? static_cast<int>(parts) : int{NSA__CMP_PARTS};
    job->partial =
        nsa__cuda_take<float>(arena, static_cast<int64_t>(d->batch) * d->kv_heads * job->max_parts *
                                         nsa_cmp_count(d, d->tokens) * (d->dim + d->dim_v));
}

static void nsa__cuda_backward_plan(nsa__cuda_attend_job *job, const nsa_desc *d,
                                    nsa__cuda_branch_keys branch, nsa__cuda_arena *arena) {
    nsa__cuda_attend_plan(job, d, branch, arena);
    job->rows = nsa__cuda_take<float2>(arena, static_cast<int64_t>(d->batch) * d->count * d->heads);
    nsa__cuda_plan_parts(job, arena);
    if (branch == NSA__KEYS_SLC) {
        nsa__cuda_plan_readers(job, d->count, arena);
        nsa__cuda_plan_reader_parts(job, NSA__SLC_PART_ROWS / job->group);
        nsa__cuda_plan_slots(job, arena);
    }
    job->rows_of = d->count;
    job->chunk = nsa__cuda_gather_chunk(job, d->dim);
    job->found = nsa__cuda_take<float>(arena, static_cast<int64_t>(d->batch) * d->heads *
                                                  job->list_width * job->chunk * d->dim);
}

static nsa_status nsa__cuda_attend_check_gradient(const nsa_attend *dx, const nsa_attend *x,
                                                  const nsa_desc *d, nsa__cuda_branch_keys branch,
                                                  const nsa__cuda_attend_fields *at) {
    const unsigned dtypes = 1u << x->q.dtype | 1u << NSA_F32;
    nsa_status s = nsa__cuda_check_rows(&dx->out, nsa__cuda_query_shape(d, d->heads, d->dim_v),
                                        dtypes, 0, at->out | NSA__GRADIENT);
    if (s != NSA_OK) return s;
    s = nsa__cuda_check_gradient(&dx->q, &x->q, nsa__cuda_query_shape(d, d->heads, d->dim), at->q);
    if (s != NSA_OK) return s;
    s = nsa__cuda_check_gradient(&dx->k, &x->k, nsa__cuda_branch_shape(d, branch, d->dim), at->k);
    if (s != NSA_OK) return s;
    return nsa__cuda_check_gradient(&dx->v, &x->v, nsa__cuda_branch_shape(d, branch, d->dim_v),
                                    at->v);
}

static nsa_status nsa__cuda_attend_rows(const nsa__cuda_attend_job *job, cudaStream_t stream) {
    dim3 grid;
    const int64_t rows = static_cast<int64_t>(job->d.count) * job->d.heads;
    const nsa_status s =
        nsa__cuda_grid(job->d.batch * nsa__cuda_ceil_div(rows, NSA__ROWS_WARPS), &grid);
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_rows_kernel, grid,
                                       dim3(32 * NSA__ROWS_WARPS), 0, stream, *job));
}

static nsa_status nsa__cuda_attend_backward(const nsa_attend *dx, const nsa_attend *x,
                                            const nsa_desc *d, nsa__cuda_branch_keys branch,
                                            void *workspace, size_t bytes, cudaStream_t stream) {
    nsa_status s = nsa__cuda_check_desc(d);
    if (s != NSA_OK) return s;
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    s = nsa__cuda_attend_check(x, d, branch, 0, &nsa__cuda_attend_names);
    if (s != NSA_OK) return s;
    s = nsa__cuda_attend_check_gradient(dx, x, d, branch, &nsa__cuda_attend_names);
    if (s != NSA_OK) return s;
    nsa__cuda_attend_job job;
    s = nsa__cuda_attend_open(&job, d, branch, nsa__cuda_backward_plan, workspace, bytes);
    if (s != NSA_OK || d->count == 0) return s;
    job.x = *x;
    job.dx = *dx;
    if ((s = nsa__cuda_attend_prepare(&job, stream)) != NSA_OK) return s;
    if ((s = nsa__cuda_attend_rows(&job, stream)) != NSA_OK) return s;
    if (dx->q.data) {
        s = job.chunk
                ? nsa__cuda_gather_run<nsa__cuda_dq_run>(&job, nsa__cuda_gather_dq_kernel, stream)
                : nsa__cuda_attend_choose<nsa__cuda_dq_run>(job, stream);
        if (s != NSA_OK) return s;
    }
    if (!dx->k.data && !dx->v.data) return NSA_OK;
    if (branch == NSA__KEYS_SLC && (s = nsa__cuda_invert_lists(&job, stream)) != NSA_OK) return s;
    return nsa__cuda_attend_choose<nsa__cuda_dkv_run>(job, stream);
}

/* The four public functions of a branch. */
#define NSA__CUDA_ATTEND_DOORS(name, branch)                                                       \
    extern "C" size_t nsa_cuda_attend_##name##_forward_workspace_size(const nsa_desc *d) {         \
        return nsa__cuda_attend_bytes(d, branch, nsa__cuda_forward_plan);                          \
    }                                                                                              \
    extern "C" nsa_status nsa_cuda_attend_##name##_forward(const nsa_attend *x, const nsa_desc *d, \
                                                           void *workspace, size_t bytes,          \
                                                           cudaStream_t stream) {                  \
        return nsa__cuda_attend_forward(x, d, branch, workspace, bytes, stream);                   \
    }                                                                                              \
    extern "C" size_t nsa_cuda_attend_##name##_backward_workspace_size(const nsa_desc *d) {        \
        return nsa__cuda_attend_bytes(d, branch, nsa__cuda_backward_plan);                         \
    }                                                                                              \
    extern "C" nsa_status nsa_cuda_attend_##name##_backward(                                       \
        const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d, void *workspace,             \
        size_t bytes, cudaStream_t stream) {                                                       \
        return nsa__cuda_attend_backward(dx, x, d, branch, workspace, bytes, stream);              \
    }

#endif

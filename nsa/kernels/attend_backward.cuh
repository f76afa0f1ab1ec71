/* attend_backward.cuh: attention over few keys, backward: one core for all branches.
   Twin: nsa.h, "Attention over few keys", its backward.
   Not here: which keys (attend_keys.cuh), which queries read a block (attend_readers.cuh), what a
   thread block that keeps keys works through (attend_dkv_scheduler.cuh), what dq knows of its rows
   (attend_dq_epilogue.cuh), forward (attend_forward.cuh).

   With p = exp(scale q k - lse), out = sum p v and delta = dout . out:
     dv[s] = sum_t p dout[t]    ds = p (dout . v[s] - delta)    dq[t] = scale sum_s ds k[s]
     dk[s] = scale sum_t ds q[t]
   In the whole, out = sum_i gate_i out_i, so dout of branch i is gate_i dout. It is not written
   down: gate_i p stands for p, and delta is dout . out_i.
   One kernel walks the key tiles of a Q tile as forward does and makes dq, of the whole for all
   branches at once. Another keeps a tile of keys, walks the rows that read it and makes dk and dv.
   On sm_90a both are pipelines (attend_dq_sm90.cuh, attend_backward_sm90.cuh), but for f32 and the
   widest heads.
   Every row of a gradient has one owner, who adds to it once, so nothing is atomic. Keys that very
   many queries read (the first block, the first compressed rows) are shared out among blocks by
   parts of their readers, whose sums are then added in order.

   Heads of 128 in bf16, two stages, two thread blocks an SM, but on sm_90a:
   | kernel | kept     | a stage | dynamic shared | registers (sm_80) |
   |---|---|---|---|---|
   | dq     | 64 rows  | 64 keys | 96 KB          | 254 |
   | dkv    | 64 keys  | 32 rows | 64 KB          | 247 | */
#ifndef NSA_ATTEND_BACKWARD_CUH
#define NSA_ATTEND_BACKWARD_CUH

#include "attend_backward_sm90.cuh"
#include "attend_dq_sm90.cuh"
#include "gate.cuh"

/* ---- Terms of every row -------------------------------------------------------------------- */

/* One branch without a gate, or the three of the whole with theirs. */
struct nsa__cuda_rows_params {
    nsa_desc d;
    int branches, gate_heads;
    nsa__cuda_teams teams;
    nsa__cuda_extent rows_of;
    nsa_tensor dout, out[3], lse[3];
    nsa__cuda_row_terms *rows[3]; /* (rows_of, H) */
    nsa_tensor logits, dlogits;   /* data NULL: no gate; no gradient of it */
    nsa_tensor dlse;              /* of one branch; data NULL: none */
};

/* dout . out of the branches, added up over a team; whether all of dout is finite. */
NSA__DEVICE bool nsa__cuda_rows_dot(const nsa__cuda_rows_params &p, const nsa__cuda_team_place &at,
                                    int head, float (&dot)[3]) {
    const int64_t t = at.s.row + at.row;
    int finite = 1;
    dot[0] = dot[1] = dot[2] = 0;
    if (at.mine && at.c < p.d.dim_v) {
        float dout[8], out[8];
        nsa__load8(dout, p.dout.dtype, nsa__row_at(p.dout, at.s.batch, t, head), at.c);
#pragma unroll
        for (int e = 0; e < 8; e++) finite &= nsa__finite(dout[e]);
#pragma unroll
        for (int i = 0; i < 3; i++) {
            if (i >= p.branches) continue;
            nsa__load8(out, p.out[i].dtype, nsa__row_at(p.out[i], at.s.batch, t, head), at.c);
#pragma unroll
            for (int e = 0; e < 8; e++) dot[i] = fmaf(out[e], dout[e], dot[i]);
        }
    }
    for (int step = p.teams.size / 2; step > 0; step /= 2) {
        finite &= __shfl_xor_sync(0xffffffffu, finite, step);
#pragma unroll
        for (int i = 0; i < 3; i++) dot[i] += __shfl_xor_sync(0xffffffffu, dot[i], step);
    }
    return finite != 0;
}

/* out = sum_i g[i] out_i  =>  dout_i = g[i] dout, and dg[i] = sum over the heads that share the
   gate of dout . out_i, which is delta_i before the gate. A team makes the rows of one gate head.
   lse is NaN where forward met a value that is not finite. */
static __global__ void
nsa__cuda_attend_rows_kernel(const NSA_GRID_CONSTANT nsa__cuda_rows_params p) {
    const nsa__cuda_team_place at = nsa__cuda_team_place_of(p.d, p.teams, p.gate_heads);
    const int64_t t = at.s.row + at.row;
    const int64_t place = nsa__cuda_place_of(p.rows_of, at.b, at.s) + at.row;
    const int sharers = p.d.heads / p.gate_heads;
    float g[3] = {1, 1, 1}, dg[3] = {0, 0, 0};
    if (at.mine && p.logits.data) nsa__cuda_gate_weights(p.d, p.logits, at.s.batch, t, at.head, g);
    for (int head = at.head * sharers; head < (at.head + 1) * sharers; head++) {
        float dot[3];
        const bool finite = nsa__cuda_rows_dot(p, at, head, dot);
        for (int i = 0; i < 3; i++) {
            dg[i] += dot[i];
            if (i >= p.branches || !at.mine || at.c != 0) continue;
            const float lse = *nsa__row_of<float>(p.lse[i], at.s.batch, t, head);
            const float dlse = p.dlse.data ? *nsa__row_of<float>(p.dlse, at.s.batch, t, head) : 0;
            const bool good = finite && nsa__finite(lse) && nsa__finite(g[i]) && nsa__finite(dlse);
            /* dlse / ds = p: ds = p (dout . v - delta + dlse) */
            p.rows[i][place * p.d.heads + head] = {good ? lse : __uint_as_float(0x7fc00000u),
                                                   good ? dot[i] - dlse : 0.0f, good ? g[i] : 0.0f};
        }
    }
    if (p.dlogits.data && at.mine && at.c == 0)
        nsa__cuda_gate_put_logits(p.d, p.dlogits, at.s.batch, t, at.head, g, dg);
}

static nsa_status nsa__cuda_attend_rows(nsa__cuda_rows_params p, cudaStream_t stream) {
    dim3 grid;
    NSA__CHECK(nsa__cuda_team_grid(&p.d, p.gate_heads, p.d.dim_v, &p.teams, &grid));
    return nsa__cuda_status(
        NSA_LAUNCH(nsa__cuda_attend_rows_kernel, grid, dim3(NSA__TEAM_THREADS), 0, stream, p));
}

/* ---- dq ------------------------------------------------------------------------------------ */

/* dq of heads wider than 128 leaves registers for half the keys. */
template <typename T, int DK, int DV, int HOPPER>
struct nsa__cuda_dq_shape
    : nsa__cuda_tile_shape<T, DK + DV, DK + DV, (DK > 128 ? 32 : 64), (DK > 192 ? 8 : 16), HOPPER> {
};

/* The thread block's tiles: q and dout stay, keys and values come in two stages. */
template <typename T> struct nsa__cuda_dq_tiles { T *q, *dout, *stages; };

/* What one branch adds to dq. `at` is shared: its key rows are the branch's. */
template <typename T, int DK, int DV, bool LISTS>
NSA__DEVICE void
nsa__cuda_dq_branch(float (&dq)[DK / 8][4], nsa__cuda_dq_rows &rows,
                    const nsa__cuda_dq_tiles<T> &tiles, const nsa__cuda_attend_params &params,
                    nsa__cuda_attend_head &at, const nsa__cuda_query_tile &tile_rows) {
    using shape = nsa__cuda_dq_shape<T, DK, DV, NSA__HOPPER>;
    constexpr int BLOCK_M = shape::TILE, BLOCK_N = shape::STAGE, THREADS = 32 * shape::WARPS;
    const int warp_row = static_cast<int>(threadIdx.x / 32 * 16);
    __syncthreads(); /* nobody reads `at` or a stage any more */
    if (threadIdx.x == 0) at = nsa__cuda_attend_head_of(params, blockIdx.x);
    __syncthreads();
    nsa__cuda_walk_keys<BLOCK_N, BLOCK_M, LISTS> walk = {};
    nsa__cuda_walk_begin(walk, params, at, tile_rows);
    bool more = nsa__cuda_walk_next(walk, params, at, tile_rows);
    if (more)
        nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, THREADS, false>(tiles.stages, params, at,
                                                                 walk.tile);
    nsa__cp_async_commit();
    nsa__cuda_dq_begin(rows, params, at, tile_rows);
    for (int stage = 0; more; stage ^= 1) {
        const nsa__cuda_key_tile tile = nsa__cuda_walk_tile(walk);
        T *const k = tiles.stages + stage * BLOCK_N * (DK + DV), *const v = k + BLOCK_N * DK;
        /* this stage has arrived, and no warp reads the other one any more */
        nsa__cuda_tiles_wait<T, BLOCK_N>();
        if (__builtin_expect(tile.bad != 0, 0))
            nsa__cuda_clean_stage<T, DK, DV, BLOCK_N, THREADS>(k, tile.bad);
        float s[BLOCK_N / 8][4], dp[BLOCK_N / 8][4];
        nsa__cuda_product_nt_begin_two<T, DK, DV, BLOCK_N, BLOCK_M>(s, dp, tiles.q, warp_row, k);
        more = nsa__cuda_walk_next(walk, params, at, tile_rows);
        if (more)
            nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, THREADS, false>(
                tiles.stages + (stage ^ 1) * BLOCK_N * (DK + DV), params, at, walk.tile);
        nsa__cp_async_commit();
        nsa__cuda_key_span seen[2];
        nsa__cuda_dq_see(seen, rows, tile);
        const bool sees = seen[0].begin < seen[0].end || seen[1].begin < seen[1].end;
        nsa__cuda_product_nt_await<T, BLOCK_N, 1>(s);
        nsa__cuda_product_nt_await<T, BLOCK_N, 0>(dp);
        if (!nsa__cuda_takes_part<T, BLOCK_N>(sees, tile.readers != 0)) continue;
        nsa__cuda_product_nt_finish<T, DK, BLOCK_N, BLOCK_M>(s, tiles.q, warp_row, k);
        nsa__cuda_dq_p(s, rows, params.scale);
        nsa__cuda_product_nt_finish<T, DV, BLOCK_N, BLOCK_M>(dp, tiles.dout, warp_row, v);
        nsa__cuda_dq_ds(s, dp, rows);
        nsa__cuda_hide(s, seen, 0.0f);
        nsa__cuda_product_nn<T, BLOCK_N, DK>(dq, s, k, 0);
    }
    nsa__cp_async_wait<0>(); /* a row without keys has waited for nothing yet */
    nsa__cuda_dq_branch_end(rows);
}

template <typename T, int DK, int DV, bool LISTS>
static __global__ void __launch_bounds__(32 * nsa__cuda_dq_shape<T, DK, DV, NSA__HOPPER>::WARPS, 2)
    nsa__cuda_attend_dq_kernel(const NSA_GRID_CONSTANT nsa__cuda_dq_params all) {
    if constexpr (NSA__HOPPER && nsa__cuda_dq_pipe<T, DK, DV>::value) return;
    using shape = nsa__cuda_dq_shape<T, DK, DV, NSA__HOPPER>;
    constexpr int BLOCK_M = shape::TILE, THREADS = 32 * shape::WARPS;
    NSA_SHARED_ALL(shared);
    nsa__cuda_dq_tiles<T> tiles;
    tiles.q = reinterpret_cast<T *>(shared);
    tiles.dout = tiles.q + BLOCK_M * DK;
    tiles.stages = tiles.dout + BLOCK_M * DV;

    const nsa__cuda_attend_params &params = all.branch[0];
    NSA_SHARED(nsa__cuda_attend_head, at, );
    NSA_SHARED(nsa__cuda_query_tile, tile_rows, );
    static_assert(nsa__cuda_shared_fits<shape::BYTES, sizeof at + sizeof tile_rows>::value);
    if (threadIdx.x == 0) {
        at = nsa__cuda_attend_head_of(params, blockIdx.x);
        tile_rows = nsa__cuda_query_tile_of(params, at, BLOCK_M);
    }
    __syncthreads();
    if (tile_rows.first >= tile_rows.end) return;
    nsa__cuda_tile_copy<T, DK, BLOCK_M, THREADS>(
        tiles.q, params.d.dim, static_cast<const T *>(params.x.q.data), [&](int r) {
            const nsa__cuda_query_row row = nsa__cuda_query_row_of(params, at, tile_rows, r);
            return row.there ? nsa__cuda_query_at<const T>(params.x.q, at, row.query, row.head)
                             : nullptr;
        });
    nsa__cuda_stage_dout<T, DV, BLOCK_M, THREADS>(tiles.dout, params, [&](int r) {
        const nsa__cuda_query_row row = nsa__cuda_query_row_of(params, at, tile_rows, r);
        return row.there ? nsa__cuda_query_offset(params.dx.out, at, row.query, row.head)
                         : int64_t(-1);
    });
    nsa__cuda_dq_rows rows = {};
    float dq[DK / 8][4] = {};
#pragma unroll 1
    for (int i = 0; i < all.branches - LISTS; i++)
        nsa__cuda_dq_branch<T, DK, DV, false>(dq, rows, tiles, all.branch[i], at, tile_rows);
    if constexpr (LISTS)
        nsa__cuda_dq_branch<T, DK, DV, true>(dq, rows, tiles, all.branch[all.branches - 1], at,
                                             tile_rows);
    nsa__cuda_dq_end<T>(params, at, tile_rows, rows, dq);
}

/* A warp adds the partial results of one row: dq += scale (the sum). */
static __global__ void nsa__cuda_gather_dq_kernel(nsa__cuda_attend_params params) {
    const nsa__cuda_gather_row row = nsa__cuda_gather_row_of(params);
    if (!row.there) return;
    const float *partial = params.partial_out + row.number * params.list_width * params.d.dim;
    const bool bad =
        nsa__cuda_is_nan_bits(nsa__cuda_row_terms_at(params, row.terms, row.head)->lse);
    const float nan = __uint_as_float(0x7fc00000u);
    void *to = nsa__row_at(params.dx.q, row.batch,
                           nsa__cuda_gradient_row(params, NSA__CUDA_SUM_Q, row.row), row.head);
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

/* The host's form of nsa__cuda_dq_params: the first branch, and those behind it. */
struct nsa__cuda_dq_whole : nsa__cuda_attend_params {
    const nsa__cuda_attend_params *more[2];
    int branches;
};

template <typename T, int DK, int DV> struct nsa__cuda_dq_launch {
    /* By a kernel of `rows` rows a tile: of block lists, or of none. */
    static nsa_status launch_tiles(const nsa__cuda_dq_whole &whole,
                                   void (*of_lists)(nsa__cuda_dq_params),
                                   void (*of_spans)(nsa__cuda_dq_params), int rows, int threads,
                                   int bytes, cudaStream_t stream) {
        nsa__cuda_dq_params all;
        dim3 grid;
        all.branches = whole.branches;
        all.branch[0] = whole;
        NSA__CHECK(nsa__cuda_query_grid(&all.branch[0], rows, &grid, stream));
        for (int i = 1; i < all.branches; i++) {
            all.branch[i] = *whole.more[i - 1];
            all.branch[i].tiles = all.branch[0].tiles;
            all.branch[i].group = all.branch[0].group;
            all.branch[i].lists = all.branch[0].lists;
            all.branch[i].spread = all.branch[0].spread;
        }
        const nsa__cuda_attend_params &last = all.branch[all.branches - 1];
        const bool lists = last.branch == NSA__KEYS_SLC && !last.gathered;
        return nsa__cuda_status(
            NSA_LAUNCH((lists ? of_lists : of_spans), grid, dim3(threads), bytes, stream, all));
    }
    template <int HOPPER>
    static nsa_status launch_as(const nsa__cuda_dq_whole &whole, cudaStream_t stream) {
        using shape = nsa__cuda_dq_shape<T, DK, DV, HOPPER>;
        return launch_tiles(whole, nsa__cuda_attend_dq_kernel<T, DK, DV, true>,
                            nsa__cuda_attend_dq_kernel<T, DK, DV, false>, shape::TILE,
                            32 * shape::WARPS, shape::BYTES, stream);
    }
    static nsa_status launch(const nsa__cuda_dq_whole &whole, cudaStream_t stream) {
        bool hopper;
        NSA__CHECK(nsa__cuda_on_hopper(&hopper));
        using pipe = nsa__cuda_dq_pipe<T, DK, DV>;
        if constexpr (pipe::value)
            if (hopper)
                return launch_tiles(whole, nsa__cuda_attend_dq_sm90_kernel<T, DK, DV, true>,
                                    nsa__cuda_attend_dq_sm90_kernel<T, DK, DV, false>,
                                    pipe::BLOCK_M, pipe::CONSUMERS + pipe::PRODUCERS, pipe::BYTES,
                                    stream);
        return hopper ? launch_as<1>(whole, stream) : launch_as<0>(whole, stream);
    }
    static nsa_status launch(const nsa__cuda_attend_params &params, cudaStream_t stream) {
        return launch(nsa__cuda_dq_whole{params, {NULL, NULL}, 1}, stream);
    }
};

/* ---- dk and dv ----------------------------------------------------------------------------- */

/* Where the accumulators of 16 keys pass what a thread has, two warps share the columns. */
template <typename T, int DK, int DV, int HOPPER>
struct nsa__cuda_dkv_shape : nsa__cuda_tile_shape<T, DK + DV, DK + DV, (DK + DV > 256 ? 16 : 32),
                                                  (DK + DV > 256 ? 8 : 16), HOPPER> {
    static constexpr int SPLIT = DK + DV > 320 ? 2 : 1;
    static constexpr int THREADS = 32 * SPLIT * nsa__cuda_dkv_shape::WARPS;
};

/* A row that reads the keys of the tile, as the thread block shares it. Its terms are copied
   asynchronously; all are 0 if there is no row. */
struct nsa__cuda_reader_row {
    bool there;
    nsa__cuda_key_span keys; /* empty if there is no row */
    int64_t q, dout;         /* element offsets of the row in both views */
    nsa__cuda_row_terms terms;
};

/* Whose row of a step thread r makes: the reader's number, and the head of its row. A step on is an
   addition, not a division. */
struct nsa__cuda_reader_index {
    int reader, head;
};

/* Starts copying the query of a reader, for the same thread in the next call. */
NSA__DEVICE void nsa__cuda_reader_prefetch(int32_t *queries, const nsa__cuda_reader_index &index,
                                           const nsa__cuda_key_work &work) {
    if (!work.list) return;
    const bool there = index.reader < work.readers;
    nsa__cp_async<4>(queries + threadIdx.x, there ? work.list + index.reader : work.list,
                     there ? 4 : 0);
}

/* Writes the table of one step, whose queries were asked for a step ago, and starts copying its
   terms and the next step's queries: nothing waits for memory here. */
template <int ROWS>
NSA__DEVICE void
nsa__cuda_reader_rows(nsa__cuda_reader_row *table, int32_t *queries,
                      nsa__cuda_reader_index *indices, const nsa__cuda_attend_params &params,
                      const nsa__cuda_attend_head &at, const nsa__cuda_key_work &work) {
    if (threadIdx.x >= ROWS) return;
    nsa__cuda_reader_row &x = table[threadIdx.x];
    nsa__cuda_reader_index index = indices[threadIdx.x];
    const nsa__cuda_row_terms *terms = params.rows;
    x.there = index.reader < work.readers;
    x.keys = {0, 0};
    if (x.there) {
        nsa__cuda_reader reader = {work.first + index.reader, 0};
        if (work.list) reader = nsa__cuda_reader_of(params, queries[threadIdx.x]);
        const int query = reader.query;
        const int head = (at.list + reader.list) * params.group + index.head;
        x.keys = nsa__cuda_keys_of(params, at.seq.tokens, query);
        x.q = nsa__cuda_query_offset(params.x.q, at, query, head);
        x.dout = nsa__cuda_query_offset(params.dx.out, at, query, head);
        terms = nsa__cuda_row_terms_at(params, at.row + query - at.seq.first, head);
    }
    const int bytes = x.there ? 4 : 0;
    nsa__cp_async<4>(&x.terms.lse, &terms->lse, bytes);
    nsa__cp_async<4>(&x.terms.delta, &terms->delta, bytes);
    nsa__cp_async<4>(&x.terms.gate, &terms->gate, bytes);
    index.reader += ROWS / params.group;
    index.head += ROWS % params.group;
    if (index.head >= params.group) {
        index.head -= params.group;
        index.reader++;
    }
    indices[threadIdx.x] = index;
    nsa__cuda_reader_prefetch(queries, index, work);
}

/* A bit for each row of the table that is not finite. */
template <int ROWS> NSA__DEVICE uint32_t nsa__cuda_bad_readers(const nsa__cuda_reader_row *table) {
    static_assert(ROWS <= 32, "a lane for each row");
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return __ballot_sync(0xffffffffu,
                         lane < ROWS && nsa__cuda_is_nan_bits(table[lane % ROWS].terms.lse));
}

/* s = k q^T becomes gate p; columns are rows of the table. */
template <int N>
NSA__DEVICE void nsa__cuda_dkv_p(float (&s)[N][4], const nsa__cuda_reader_row *table, int key,
                                 float scale, bool whole) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const nsa__cuda_reader_row &row = table[8 * n + column + e % 2];
            const int mine = key + e / 2 * 8;
            s[n][e] = nsa__cuda_p(s[n][e], scale, row.terms.lse) * row.terms.gate;
            if (!whole && (mine < row.keys.begin || mine >= row.keys.end)) s[n][e] = 0;
        }
}

/* dp = v dout^T becomes ds = p (dp - delta). It is 0 where p is: dp of what is masked may overflow,
   and 0 inf is NaN. */
template <int N>
NSA__DEVICE void nsa__cuda_dkv_ds(const float (&p)[N][4], float (&dp)[N][4],
                                  const nsa__cuda_reader_row *table) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float delta = table[8 * n + column + e % 2].terms.delta;
            dp[n][e] = p[n][e] == 0 ? 0.0f : p[n][e] * (dp[n][e] - delta);
        }
}

template <typename T, int DK, int DV>
static __global__ void
__launch_bounds__(nsa__cuda_dkv_shape<T, DK, DV, NSA__HOPPER>::THREADS,
                  nsa__cuda_dkv_shape<T, DK, DV, NSA__HOPPER>::SPLIT == 1 ? 2 : 1)
    nsa__cuda_attend_dkv_kernel(nsa__cuda_attend_params params) {
    if constexpr (NSA__HOPPER && nsa__cuda_dkv_pipe<T, DK, DV>::value) return;
    using shape = nsa__cuda_dkv_shape<T, DK, DV, NSA__HOPPER>;
    constexpr int BLOCK_N = shape::TILE, BLOCK_M = shape::STAGE, THREADS = shape::THREADS;
    constexpr int NK = DK / shape::SPLIT, NV = DV / shape::SPLIT;
    NSA_SHARED_ALL(shared);
    NSA_SHARED(nsa__cuda_reader_row, tables, [3][BLOCK_M]);
    NSA_SHARED(int32_t, queries, [BLOCK_M]);
    NSA_SHARED(nsa__cuda_reader_index, indices, [BLOCK_M]);
    T *const k = reinterpret_cast<T *>(shared), *const v = k + BLOCK_N * DK,
             *const stages = v + BLOCK_N * DV;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int warp_row = warp % shape::WARPS * 16, split = warp / shape::WARPS;

    NSA_SHARED(nsa__cuda_attend_head, at, );
    NSA_SHARED(nsa__cuda_key_work, work, );
    static_assert(
        nsa__cuda_shared_fits<shape::BYTES, sizeof tables + sizeof queries + sizeof indices +
                                                sizeof at + sizeof work>::value);
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
        const nsa__cuda_reader_row *const table = tables[step % 3];
        const T *const from = static_cast<const T *>(params.x.q.data);
        nsa__cuda_tile_copy<T, DK, BLOCK_M, THREADS>(q, params.d.dim, from, [&](int r) {
            return table[r].there ? from + table[r].q : nullptr;
        });
        nsa__cuda_stage_dout<T, DV, BLOCK_M, THREADS>(q + BLOCK_M * DK, params, [&](int r) {
            return table[r].there ? table[r].dout : int64_t(-1);
        });
    };
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < BLOCK_M) {
        indices[thread] = {thread / params.group, thread % params.group};
        nsa__cuda_reader_prefetch(queries, indices[thread], work);
    }
    for (int step = 0; step < 2; step++) {
        nsa__cp_async_commit();
        nsa__cp_async_wait<0>();
        nsa__cuda_reader_rows<BLOCK_M>(tables[step], queries, indices, params, at, work);
    }
    __syncthreads();
    const nsa__cuda_key_tile k_tile = {work.begin, work.end, 0,
                                       nsa__cuda_bad_keys<BLOCK_N>(params, at, work.begin)};
    nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, THREADS, false>(k, params, at, k_tile);
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
        const nsa__cuda_reader_row *const table = tables[step % 3];
        T *const q = stages + step % 2 * BLOCK_M * (DK + DV), *const dout = q + BLOCK_M * DK;
        const int key = first_key + lane / 4;
        uint32_t bad = nsa__cuda_bad_readers<BLOCK_M>(table);
        if (__builtin_expect(bad != 0, 0)) {
            nsa__cuda_tile_zero<T, DK, BLOCK_M, THREADS>(q, bad);
            nsa__cuda_tile_zero<T, DV, BLOCK_M, THREADS>(dout, bad);
            __syncthreads(); /* all have seen what is not finite */
            if (thread < BLOCK_M && bad >> thread & 1)
                tables[step % 3][thread].terms.lse = INFINITY; /* p is 0 */
            nsa__cuda_tiles_written<T, BLOCK_M>();
        }
        for (; bad; bad &= bad - 1) {
            const nsa__cuda_key_span reads = table[__ffs(static_cast<int>(bad)) - 1].keys;
#pragma unroll
            for (int h = 0; h < 2; h++)
                bad_key[h] |= key + 8 * h >= reads.begin && key + 8 * h < reads.end;
        }
        if (step + 1 < steps) stage_rows(step + 1);
        nsa__cuda_reader_rows<BLOCK_M>(tables[(step + 2) % 3], queries, indices, params, at, work);
        nsa__cp_async_commit();
        const nsa__cuda_key_span keys = table[lane % BLOCK_M].keys;
        const bool sees = keys.begin < first_key + 16 && keys.end > first_key;
        const bool whole =
            __all_sync(0xffffffffu, keys.begin <= first_key && keys.end >= first_key + 16);
        if (!__any_sync(0xffffffffu, sees && first_key < work.end)) continue;
        float s[BLOCK_M / 8][4], dp[BLOCK_M / 8][4];
        nsa__cuda_product_nt<T, DK, BLOCK_M, BLOCK_N>(s, k, warp_row, q);
        nsa__cuda_dkv_p(s, table, key, params.scale, whole);
        nsa__cuda_product_nt<T, DV, BLOCK_M, BLOCK_N>(dp, v, warp_row, dout);
        nsa__cuda_dkv_ds(s, dp, table);
        nsa__cuda_product_nn<T, BLOCK_M, NV>(dv, s, dout, split * NV);
        nsa__cuda_product_nn<T, BLOCK_M, NK>(dk, dp, q, split * NK);
    }
    nsa__cp_async_wait<0>(); /* the tables of steps behind the last */
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
        const int64_t entry = nsa__cuda_place_in(r.entries, at) + at.tile;
        if (at.tile >= nsa__slc_count(params.d, at.seq.tokens)) return s;
        s.begin = at.tile * params.d.slc_block;
        s.end = s.begin + min(params.d.slc_block, at.keys - s.begin);
        s.parts = r.part_begin[entry + 1] - r.part_begin[entry];
        s.stride = params.d.slc_block * nsa__cuda_partial_row(params);
        s.first =
            params.partial_dkv + (nsa__cuda_place_in(r.slots, at) + r.slot_begin[entry]) * s.stride;
    } else {
        s.begin = at.tile * keys;
        s.end = min(s.begin + keys, at.keys);
        if (s.begin >= s.end) return s;
        const nsa__cuda_key_span all = nsa__cuda_readers_of(params, at, s.begin, s.end);
        if (all.begin >= all.end) return s;
        const int size = nsa__cuda_cmp_part(params, at.seq.tokens), part = all.begin / size;
        s.parts = (all.end - 1) / size + 1 - part;
        s.stride = params.cmp_rows.total * nsa__cuda_partial_row(params);
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
        const int64_t row = nsa__cuda_gradient_row(params, is_k ? NSA__CUDA_SUM_K : NSA__CUDA_SUM_V,
                                                   at.key_row + s.begin + key);
        nsa__add8(to.dtype, nsa__row_at(to, at.seq.key_batch, row, at.kv_head),
                  8 * (is_k ? piece : piece - of_k), is_k ? params.scale : 1.0f, sum);
    }
}

template <typename T, int DK, int DV> struct nsa__cuda_dkv_launch {
    /* By a kernel that keeps `keys` keys: dk and dv, then the sums of what has several parts. */
    static nsa_status launch_tiles(nsa__cuda_attend_params params,
                                   void (*kernel)(nsa__cuda_attend_params), int keys, int threads,
                                   int bytes, cudaStream_t stream) {
        const bool slc = params.branch == NSA__KEYS_SLC;
        nsa__cuda_extent tiles = nsa__cuda_key_tiles(&params, keys, 1);
        dim3 grid;
        if (tiles.each == 0) return NSA_OK;
        nsa_status s = nsa__cuda_attend_grid(
            &params,
            slc ? nsa__cuda_reader_tiles(&params, nsa__cuda_ceil_div(params.d.slc_block, keys))
                : nsa__cuda_key_tiles(&params, keys, params.max_parts),
            &grid);
        if (s != NSA_OK) return s;
        s = nsa__cuda_status(NSA_LAUNCH(kernel, grid, dim3(threads), bytes, stream, params));
        if (s != NSA_OK || !params.partial_dkv) return s;
        if (slc) tiles = nsa__cuda_key_tiles(&params, params.d.slc_block, 1);
        if ((s = nsa__cuda_attend_grid(&params, tiles, &grid)) != NSA_OK) return s;
        return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_parts_kernel, grid,
                                           dim3(NSA__ATTEND_PARTS_THREADS), 0, stream, params,
                                           keys));
    }
    template <int HOPPER>
    static nsa_status launch_as(const nsa__cuda_attend_params &params, cudaStream_t stream) {
        using shape = nsa__cuda_dkv_shape<T, DK, DV, HOPPER>;
        return launch_tiles(params, nsa__cuda_attend_dkv_kernel<T, DK, DV>, shape::TILE,
                            shape::THREADS, shape::BYTES, stream);
    }
    template <bool LISTS>
    static nsa_status launch_pipe(const nsa__cuda_attend_params &params, cudaStream_t stream) {
        using shape = nsa__cuda_dkv_pipe<T, DK, DV, LISTS>;
        return launch_tiles(params, nsa__cuda_attend_dkv_sm90_kernel<T, DK, DV, LISTS>,
                            shape::BLOCK_N, shape::CONSUMERS + shape::PRODUCERS, shape::BYTES,
                            stream);
    }
    static nsa_status launch(const nsa__cuda_attend_params &params, cudaStream_t stream) {
        bool hopper;
        NSA__CHECK(nsa__cuda_on_hopper(&hopper));
        if constexpr (nsa__cuda_dkv_pipe<T, DK, DV>::value)
            if (hopper)
                return params.branch == NSA__KEYS_SLC ? launch_pipe<true>(params, stream)
                                                      : launch_pipe<false>(params, stream);
        return hopper ? launch_as<1>(params, stream) : launch_as<0>(params, stream);
    }
};

/* ---- Calls --------------------------------------------------------------------------------- */

/* cmp: how many parts a sequence may have; the others' tiles are not shared out. */
static void nsa__cuda_plan_parts(nsa__cuda_attend_params *params, nsa__arena *arena) {
    const nsa_desc *d = &params->d;
    const int64_t least = nsa__cuda_ceil_div(NSA__CMP_PART_ROWS, params->group);
    params->max_parts = 1;
    if (params->branch != NSA__KEYS_CMP || d->tokens <= least) return;
    const int64_t parts = nsa__cuda_ceil_div(d->tokens, least);
    params->max_parts = parts < NSA__CMP_PARTS ? static_cast<int>(parts) : int{NSA__CMP_PARTS};
    params->cmp_rows = nsa__cuda_extent_of(d, nsa_cmp_count(d, d->tokens), 1, d->cmp_stride, 0);
    params->partial_dkv = nsa__cuda_take<float>(arena, params->cmp_rows.total * d->kv_heads *
                                                           params->max_parts * (d->dim + d->dim_v));
}

static void nsa__cuda_backward_plan(nsa__cuda_attend_params *params, const nsa_desc *d,
                                    nsa__cuda_branch_keys branch, nsa__arena *arena) {
    nsa__cuda_attend_plan(params, d, branch, arena);
    params->rows_of = nsa__cuda_query_extent_of(d, d->count, 1, 1, 0);
    params->rows = nsa__cuda_take<nsa__cuda_row_terms>(arena, params->rows_of.total * d->heads);
    nsa__cuda_plan_parts(params, arena);
    if (branch == NSA__KEYS_SLC) {
        nsa__cuda_plan_readers(params, d->count, arena);
        nsa__cuda_plan_reader_parts(params, NSA__SLC_PART_ROWS / params->group);
        nsa__cuda_plan_slots(params, arena);
    }
    params->chunk = nsa__cuda_gather_chunk(params, d->dim);
    params->chunk_rows = nsa__cuda_gather_rows(params);
    params->partial_out = nsa__cuda_take<float>(arena, params->chunk_rows.total * d->heads *
                                                           params->list_width * d->dim);
}

/* dq of one branch, whose row terms are there. */
static nsa_status nsa__cuda_attend_dq(const nsa__cuda_attend_params *params, cudaStream_t stream) {
    if (params->chunk)
        return nsa__cuda_gather_run<nsa__cuda_dq_launch>(params, nsa__cuda_gather_dq_kernel,
                                                         stream);
    return nsa__cuda_attend_choose<nsa__cuda_dq_launch>(*params, stream);
}

/* dk and dv of one branch, whose row terms are there. */
static nsa_status nsa__cuda_attend_dkv(const nsa__cuda_attend_params *params, cudaStream_t stream) {
    if (!params->dx.k.data && !params->dx.v.data) return NSA_OK;
    if (params->branch == NSA__KEYS_SLC) NSA__CHECK(nsa__cuda_invert_lists(params, stream));
    return nsa__cuda_attend_choose<nsa__cuda_dkv_launch>(*params, stream);
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
    nsa__cuda_rows_params rows = {};
    rows.branches = 1;
    rows.gate_heads = d->heads;
    rows.dout = dx->out;
    rows.out[0] = x->out;
    rows.lse[0] = x->lse;
    rows.rows[0] = params.rows;
    rows.rows_of = params.rows_of;
    rows.dlse = dx->lse;
    NSA__CHECK(nsa__cuda_attend_prepare(&params, stream));
    rows.d = params.d;
    NSA__CHECK(nsa__cuda_attend_rows(rows, stream));
    if (dx->q.data) NSA__CHECK(nsa__cuda_attend_dq(&params, stream));
    return nsa__cuda_attend_dkv(&params, stream);
}

static nsa_status nsa__cuda_attend_backward(const nsa_attend *dx, const nsa_attend *x,
                                            const nsa_desc *d, nsa__cuda_branch_keys branch,
                                            void *workspace, size_t bytes, cudaStream_t stream) {
    nsa_desc own;
    d = nsa__cuda_branch_desc(d, branch, &own);
    NSA__CHECK(nsa__cuda_check_desc(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(nsa__check_backward(d, 0));
    const nsa__checked c = nsa__cuda_attend_checked(x, d, branch, 0);
    NSA__CHECK(nsa__cuda_attend_check(x, d, branch, 0));
    NSA__CHECK(nsa__check_gradients(&c, nsa__attend_views, NSA__ATTEND_VIEWS, dx, x));
    nsa_status s = nsa__cuda_check_workspace(
        nsa__cuda_attend_bytes(d, branch, nsa__cuda_backward_plan), workspace, bytes);
    return s == NSA_OK ? nsa__cuda_attend_backward_run(dx, x, d, branch, workspace, stream) : s;
}

#endif

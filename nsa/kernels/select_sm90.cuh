/* select_sm90.cuh: the blocks that each query reads, as a pipeline for sm_90a.
   Twin: nsa.h, "Selection"; to the bit what decoding ranks by.
   Not here: what products become (select_score.cuh), ranking (select_rank.cuh), other
   architectures (select_blocks.cuh).

   One warpgroup copies tiles of compressed keys into stages, four multiply and rank; barriers in
   shared memory connect them, as in attend_mainloop_sm90.cuh. The product is attention's very own:
   the rows of A are query heads, the columns of B 64 keys, the same instruction in the same order.
   So the scores have the bits of those that decoding's scan leaves (decode_attend.cuh), whatever
   wgmma does inside. A consumer has one product under way; three other warps of its scheduler have
   exponentials to issue meanwhile.

   A warp owns 16 rows: the heads of 16 / COLUMNS queries. They lie so that head 2 j + h is row
   j + 8 h of the query's: then a sum over heads begins within a thread, goes on over lanes in the
   order that select_score.cuh names, and takes 14 shuffles for 64 keys. A warp of one query ranks
   every other tile: 32 blocks of the paper's, a lane each.

   | heads | Q tile | key tile | stages | dynamic shared, used | registers |
   |---|---|---|---|---|---|
   | 64    | 256    | 64       | 4      | 64 KB + sums, lists  | 64, 70    |
   | 128   | 256    | 64       | 4      | 128 KB + sums, lists | 64, 70    |
   | 192   | 256    | 64       | 3      | 168 KB + sums, lists | 64        |
   One thread block an SM. Sums and lists: 19 KB for 16 heads to a query, 16 blocks to a list; the
   second number of registers is for 16 heads. */
#ifndef NSA_SELECT_SM90_CUH
#define NSA_SELECT_SM90_CUH

#include "attend_mainloop_sm90.cuh"
#include "select_score.cuh"

/* Whether the pipeline serves keys of this width. */
template <typename T, int D> struct nsa__cuda_select_pipe {
    static constexpr bool value = sizeof(T) == 2 && D <= 192;
    static constexpr int BLOCK_M = 256, BLOCK_N = 64, STAGES = D > 128 ? 3 : 4;
    static constexpr int CONSUMERS = 2 * BLOCK_M, PRODUCERS = 128;
    static constexpr int STAGE = BLOCK_N * D; /* elements */
    static constexpr int BYTES = static_cast<int>(sizeof(T)) * (BLOCK_M * D + STAGES * STAGE);
};

/* Tiles from one ranking to the next of a warp of one query: then it has a block for each lane. */
enum { NSA__SELECT_TURNS = 2 };

/* Its shared memory for heads that are padded to `dim`, but for sums and lists. */
static inline size_t nsa__cuda_select_pipe_bytes(int dim) {
    typedef __nv_bfloat16 T; /* all types of 16 bits take the same */
    return static_cast<size_t>(dim == 64    ? nsa__cuda_select_pipe<T, 64>::BYTES
                               : dim == 128 ? nsa__cuda_select_pipe<T, 128>::BYTES
                                            : nsa__cuda_select_pipe<T, 192>::BYTES);
}

/* The plan of a launch; lists are in the workspace if shared memory has no room for them. */
static nsa__cuda_select_plan nsa__cuda_select_pipe_plan(const nsa_desc *d, int dim, int most,
                                                        nsa__arena *a) {
    nsa__cuda_select_plan p = nsa__cuda_select_plan_begin(d, most);
    p.columns = 2;
    while (p.columns < d->heads / d->kv_heads && p.columns < 16) p.columns *= 2;
    p.queries = 16 / p.columns;
    p.warps = 16;
    const size_t queries = static_cast<size_t>(p.warps * p.queries);
    const size_t list = sizeof(uint64_t) * static_cast<size_t>(p.length);
    p.shared_bytes =
        nsa__cuda_select_pipe_bytes(dim) +
        queries * nsa__cuda_select_plan_ring(&p, p.columns == 16 ? 64 * NSA__SELECT_TURNS : 64);
    const bool shared = p.shared_bytes + queries * list <= NSA__SHARED_HOPPER;
    if (shared) p.shared_bytes += queries * list;
    nsa__cuda_select_plan_end(&p, d, shared, a);
    return p;
}

/* Whether the pipeline serves a call. Heads of values that are wider make decoding multiply
   otherwise (nsa__cuda_decode_shape), more heads a query are no warp's. */
static bool nsa__cuda_select_pipe_serves(const nsa_desc *d, int dim) {
    nsa__arena none = {NULL, 0};
    return dim <= 192 && d->dim_v <= 128 && d->heads / d->kv_heads <= 16 &&
           nsa__cuda_select_pipe_plan(d, dim, 1, &none).shared_bytes <= NSA__SHARED_HOPPER;
}

/* Its stages: stages[i] is full when all producers have arrived at full[i], and empty when a lane
   of each consumer warp has arrived at empty[i]. */
template <typename T> struct nsa__cuda_select_stages {
    T *q, *stages;
    uint64_t *full, *empty;
};

#if NSA__USES_WGMMA

/* ---- Producer ------------------------------------------------------------------------------ */

/* Starts copying keys first .. first + BLOCK_N - 1, of which `count` exist. */
template <typename T, int D>
NSA__DEVICE void nsa__cuda_select_stage(T *stage, const nsa__cuda_select_keys<T> &k,
                                        const nsa_tensor &x, const nsa_desc &d, int first,
                                        int count) {
    using shape = nsa__cuda_select_pipe<T, D>;
    constexpr int BLOCK_N = shape::BLOCK_N, PRODUCERS = shape::PRODUCERS;
    const T *const rows = k.first + first * x.token;
    if (count == 0)
        nsa__cuda_tile_zero<T, D, BLOCK_N, PRODUCERS>(stage, ~uint64_t(0));
    else if (d.pages)
        nsa__cuda_tile_copy<T, D, BLOCK_N, PRODUCERS>(stage, d.dim, k.first, [&](int r) {
            const T *row = nullptr;
            if (first + r < count) {
                const nsa__cuda_page_row at =
                    nsa__cuda_page_row_of(k.pages, d.page_tokens / d.cmp_stride, d.page_count,
                                          first + r + nsa__stencil_lead(d));
                row = k.first + x.batch * at.page + x.token * at.row;
            }
            return row;
        });
    else if (first + BLOCK_N <= count && D <= 128)
        nsa__cuda_tile_copy_all<T, (D <= 128 ? D : 128), BLOCK_N, PRODUCERS>(stage, d.dim, rows,
                                                                             x.token);
    else
        nsa__cuda_tile_copy_rows<T, D, BLOCK_N, PRODUCERS>(stage, d.dim, rows, x.token,
                                                           count - first);
}

/* Copies `tiles` key tiles; all but the last STAGES - 1 have arrived when one is posted. */
template <typename T, int D>
NSA__DEVICE void nsa__cuda_select_produce(const nsa__cuda_select_stages<T> &pipe,
                                          const nsa__cuda_select_place<T> &at, const nsa_tensor &x,
                                          const nsa_desc &d, int tiles) {
    using shape = nsa__cuda_select_pipe<T, D>;
    constexpr int STAGES = shape::STAGES, LAG = STAGES - 1;
    for (int n = 0; n < tiles + LAG; n++) {
        const int stage = n % STAGES, posted = n - LAG;
        if (n < tiles) {
            if (n >= STAGES) nsa__mbarrier_wait(pipe.empty + stage, (n / STAGES - 1) & 1);
            nsa__cuda_select_stage<T, D>(pipe.stages + stage * shape::STAGE, at.k, x, d,
                                         n * shape::BLOCK_N, at.keys);
        }
        nsa__cp_async_commit();
        if (posted < 0) continue;
        nsa__cp_async_wait<LAG>();
        nsa__fence_async();
        nsa__mbarrier_arrive(pipe.full + posted % STAGES);
    }
}

/* ---- Consumers ----------------------------------------------------------------------------- */

/* A row of the Q tile: which head of which of the block's queries it is. */
struct nsa__cuda_select_head {
    int query, head;
};
template <int COLUMNS> NSA__DEVICE nsa__cuda_select_head nsa__cuda_select_head_of(int row) {
    constexpr int HALF = COLUMNS / 2;
    return {row / 16 * (16 / COLUMNS) + row % 8 / HALF, row % HALF * 2 + row / 8 % 2};
}

/* Sums over the lanes that have heads of one query, W values of each: two of them stay. */
template <int W> NSA__DEVICE void nsa__cuda_select_fold_rows(float *v) {
    if constexpr (W > 2) {
        nsa__cuda_select_fold(reinterpret_cast<float(&)[W]>(*v), W);
        nsa__cuda_select_fold_rows<W / 2>(v);
    }
}

/* The sums of p over the heads of each query of a warp, for 64 keys from `key` on. */
template <int COLUMNS>
NSA__DEVICE void nsa__cuda_select_sum_rows(const float (&p)[8][4], float *ring, int size, int key) {
    constexpr int HALF = COLUMNS / 2;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float v[16]; /* (n, e): keys 8 n + 2 (lane % 4) + e */
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = p[i / 2][i % 2] + p[i / 2][2 + i % 2];
    float *const to =
        ring + lane / 4 / HALF * size + (key & (size - 1)) + lane / 4 % HALF * 8 + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < 8 / HALF; k++) {
        nsa__cuda_select_fold_rows<COLUMNS>(v + COLUMNS * k);
        nsa__store_pair(to + 8 * HALF * k, v[COLUMNS * k], v[COLUMNS * k + 1]);
    }
}

/* Blocks whose keys are all among the first `keys`. */
NSA__DEVICE int nsa__cuda_select_whole(const nsa__cuda_select_plan &p, int keys) {
    return p.strides == 4 ? keys / 4 : keys / p.strides;
}

/* What the consumers do with the tiles: sums of p over heads, scores of blocks, candidates. What a
   query does not see may be anything: no score reads it. */
template <typename T, int D, int COLUMNS>
NSA__DEVICE void nsa__cuda_select_consume(const nsa__cuda_select_stages<T> &pipe,
                                          const nsa__cuda_select_warp &w,
                                          const nsa__cuda_select_plan &p, nsa_score_map map,
                                          float scale, const float (&lse)[2], int tiles) {
    using shape = nsa__cuda_select_pipe<T, D>;
    constexpr int BLOCK_N = shape::BLOCK_N, STAGES = shape::STAGES;
    constexpr uint32_t STEP = shape::STAGE / 8; /* of stages, in units of 16 bytes */
    constexpr int TURNS = COLUMNS == 16 ? NSA__SELECT_TURNS : 1;
    const bool in_lanes = COLUMNS == 16 && p.length <= 32;
    const uint64_t queries =
        nsa__cuda_warpgroup_operand(pipe.q + static_cast<int>(threadIdx.x) / 128 * 64 * 64, 16);
    const uint64_t stages = nsa__cuda_warpgroup_operand(pipe.stages, 16);
    nsa__cuda_rank_slot slot = {0, 0};
    for (int n = 0, ranked = 0; n < tiles;) {
        const unsigned number = static_cast<unsigned>(n), stage = number % STAGES;
        const uint64_t keys = nsa__cuda_warpgroup_moved(stages, stage * STEP),
                       mine = nsa__cuda_warpgroup_moved(queries, 0);
        float s[BLOCK_N / 8][4];
        nsa__mbarrier_wait(pipe.full + stage, static_cast<int>(number / STAGES & 1));
        nsa__cuda_warpgroup_start_nt<T, D, BLOCK_N, shape::BLOCK_M>(s, mine, keys);
        nsa__cuda_warpgroup_await<BLOCK_N, 0>(s);
        nsa__cuda_pipe_release(pipe.empty + stage);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[i][e] = nsa__cuda_select_term<false>(p, s[i][e], scale, lse[e / 2]);
        nsa__cuda_select_sum_rows<COLUMNS>(s, w.ring, p.ring, n * BLOCK_N);
        n++;
        if (n < tiles && n % TURNS) continue;
        const int end =
            n < tiles ? min(nsa__cuda_select_whole(p, n * BLOCK_N), w.candidates) : w.candidates;
        __syncwarp();
        if (in_lanes)
            nsa__cuda_select_rank_lanes(slot, p, map, w, ranked, end);
        else
            nsa__cuda_select_rank<false>(p, map, w, ranked, end);
        ranked = end; /* sums are overwritten behind the next release, which waits for the warp */
    }
    if (in_lanes) nsa__cuda_rank_leave_lanes(slot, w.lists, p.length);
}

#endif

/* COLUMNS: rows of a query, a power of two, as many as it has heads or more. */
template <typename T, int D, int COLUMNS>
static __global__ void __launch_bounds__(640, 1)
    nsa__cuda_select_blocks_sm90_kernel(const NSA_GRID_CONSTANT nsa_desc d,
                                        const NSA_GRID_CONSTANT nsa_select x,
                                        const NSA_GRID_CONSTANT nsa__cuda_select_plan p,
                                        float scale) {
#if NSA__USES_WGMMA
    using shape = nsa__cuda_select_pipe<T, D>;
    constexpr int BLOCK_M = shape::BLOCK_M, BLOCK_N = shape::BLOCK_N, STAGES = shape::STAGES;
    constexpr int THREADS = shape::CONSUMERS + shape::PRODUCERS;
    constexpr int BLOCK_QUERIES = BLOCK_M / COLUMNS, QUERIES = 16 / COLUMNS; /* of a warp */
    NSA_SHARED_ALL(bytes);
    NSA_SHARED(uint64_t, full, [2 * STAGES]);
    NSA_SHARED(nsa__cuda_select_place<T>, at, );
    static_assert(nsa__cuda_shared_fits<NSA__SHARED_HOPPER, sizeof full + sizeof at>::value);
    T *const q = reinterpret_cast<T *>(bytes);
    uint64_t *const empty = full + STAGES; /* from one address: a turn computes one */
    const nsa__cuda_select_stages<T> pipe = {q, q + BLOCK_M * D, full, empty};
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int group = d.heads / d.kv_heads;
    if (threadIdx.x == 0) {
        at = nsa__cuda_select_place_of<T, false>(d, x, p);
        for (int i = 0; i < STAGES; i++) {
            nsa__mbarrier_init(full + i, shape::PRODUCERS);
            nsa__mbarrier_init(empty + i, shape::CONSUMERS / 32);
        }
        nsa__fence_async();
    }
    __syncthreads();
    if (at.first >= at.s.count) return;
    nsa__cuda_tile_copy<T, D, BLOCK_M, THREADS>(
        q, d.dim, static_cast<const T *>(x.q.data), [&](int r) {
            const nsa__cuda_select_head h = nsa__cuda_select_head_of<COLUMNS>(r);
            const bool there = at.first + h.query < at.s.count && h.head < group;
            return there ? nsa__row_of<const T>(x.q, at.s.batch, at.s.row + at.first + h.query,
                                                at.kv_head * group + h.head)
                         : nullptr;
        });
    nsa__cp_async_commit();
    nsa__cuda_tiles_wait<T, BLOCK_N>();
    const int tiles = max(at.keys - 1, 0) / BLOCK_N + 1; /* forced blocks need no key */
    if (threadIdx.x >= shape::CONSUMERS) {
        nsa__cuda_select_produce<T, D>(pipe, at, x.k, d, tiles);
        return;
    }
    auto *const of = reinterpret_cast<nsa__cuda_select_query *>(bytes + shape::BYTES);
    float *const rings = reinterpret_cast<float *>(of + BLOCK_QUERIES);
    uint64_t *const lists =
        p.lists ? p.lists + static_cast<int64_t>(blockIdx.x) * BLOCK_QUERIES * p.length
                : reinterpret_cast<uint64_t *>(rings + BLOCK_QUERIES * p.ring);
    nsa__cuda_select_warp w;
    w.first_query = at.first + warp * QUERIES;
    w.queries = of + warp * QUERIES;
    w.ring = rings + warp * QUERIES * p.ring;
    w.lists = lists + warp * QUERIES * p.length;
    w.lse = nullptr; /* in registers */
    nsa__cuda_select_begin<false>(w, x, d, at.s, p, at.b, at.kv_head);
    const uint32_t bad = nsa__cuda_tile_bad_rows<T, D, BLOCK_M>(q, 16 * warp);
    nsa__cuda_select_mark(w, QUERIES, COLUMNS / 2, bad | bad >> 8); /* row j and row j + 8 */
    float lse[2]; /* inf where a row is not there; of a query with a bad one nobody reads sums */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const nsa__cuda_select_head h =
            nsa__cuda_select_head_of<COLUMNS>(16 * warp + 8 * i + lane / 4);
        lse[i] = __uint_as_float(0x7f800000u);
        if (at.first + h.query >= at.s.count || h.head >= group) continue;
        lse[i] = nsa__load1(x.lse.dtype,
                            nsa__row_at(x.lse, at.s.batch, at.s.row + at.first + h.query,
                                        static_cast<int64_t>(at.kv_head) * group + h.head),
                            0);
    }
    nsa__cuda_select_consume<T, D, COLUMNS>(pipe, w, p, d.score_map, scale, lse, tiles);
    nsa__cuda_select_end<false>(w, x, d, at, p);
#else
    static_cast<void>(d), static_cast<void>(x), static_cast<void>(p); /* never launched */
    static_cast<void>(scale);
#endif
}

#endif

/* attend_forward_sm90.cuh: attention over few keys, forward, as a pipeline for sm_90a.
   Twin: nsa.h, "Attention over few keys"; to the bit what attend_forward.cuh computes.
   Not here: which keys (attend_keys.cuh), softmax (attend_softmax.cuh), other architectures.

   Three warpgroups share a Q tile of 128 rows. The third is the producer: it walks the key tiles,
   copies them into stages and posts, beside each, which tile it is. The first two are consumers
   with 64 rows each: they multiply and never walk. Barriers in shared memory connect them, so no
   warp waits for the whole thread block. A consumer starts q k of the next tile before p v of this
   one, and takes the softmax of the next while p v runs. Warpgroups pass over tiles that none of
   their queries reads. Descriptors of both products are made before the wait for the next tile.

   | heads    | Q tile | key tile | stages | dynamic shared | registers: consumer, producer |
   |---|---|---|---|---|---|
   | 64, 64   | 128    | 64       | 4      | 80 KB          | 192, 120 |
   | 128, 128 | 128    | 64       | 4      | 160 KB         | 192, 120 |
   | 192, 128 | 128    | 64       | 4      | 208 KB         | 192, 120 |
   One thread block an SM. */
#ifndef NSA_ATTEND_FORWARD_SM90_CUH
#define NSA_ATTEND_FORWARD_SM90_CUH

#include "attend_softmax.cuh"

/* Whether the pipeline serves these heads: wider ones leave no registers for a tile of 64 keys. */
template <typename T, int DK, int DV> struct nsa__cuda_forward_pipe {
    static constexpr bool value = sizeof(T) == 2 && DV <= 128;
    static constexpr int BLOCK_M = 128, BLOCK_N = 64, STAGES = 4;
    static constexpr int LAG = 2; /* tiles whose copies are under way before one is posted */
    static constexpr int CONSUMERS = 2 * BLOCK_M, PRODUCERS = 128;
    static constexpr int BYTES =
        static_cast<int>(sizeof(T)) * (BLOCK_M * DK + STAGES * BLOCK_N * (DK + DV));
    /* A consumer holds a tile until it has the next one: that one must be posted by then. */
    static_assert(STAGES >= LAG + 2, "the producer would wait for the consumers, and they for it");
};

/* What the producer posts beside a stage. */
struct nsa__cuda_pipe_tile {
    int begin, end;      /* keys; begin < 0: no more tiles */
    uint64_t bad;        /* a bit for each key */
    uint64_t readers[2]; /* LISTS: of each warpgroup, a bit for each query that reads the block */
};

/* The queries of a warpgroup: the first one's place in the tile, and a bit for each. */
struct nsa__cuda_pipe_group {
    int first;
    uint64_t queries;
};

/* What both sides share: stages[i] is full when all producers have arrived at full[i], and empty
   when a lane of each consumer warp has arrived at empty[i]. */
template <typename T, int STAGES> struct nsa__cuda_pipe {
    T *q, *stages;
    nsa__cuda_pipe_tile *tiles;
    const nsa__cuda_pipe_group *groups;
    uint64_t *full, *empty;
};

#if NSA__USES_WGMMA

template <typename T, int DK, int DV, bool LISTS>
NSA__DEVICE void
nsa__cuda_forward_produce(const nsa__cuda_pipe<T, nsa__cuda_forward_pipe<T, DK, DV>::STAGES> &pipe,
                          const nsa__cuda_attend_params &params, const nsa__cuda_attend_head &at,
                          const nsa__cuda_query_tile &tile_rows) {
    using shape = nsa__cuda_forward_pipe<T, DK, DV>;
    constexpr int BLOCK_N = shape::BLOCK_N, LAG = shape::LAG, STAGES = shape::STAGES;
    const bool writes = threadIdx.x % shape::PRODUCERS == 0;
    nsa__cuda_walk_keys<BLOCK_N, shape::BLOCK_M, LISTS> walk = {};
    nsa__cuda_walk_begin(walk, params, at, tile_rows);
    nsa__cuda_bad_words bad[LAG + 1] = {}; /* of the newest tile, the one before, ... */
    int begin[LAG + 1] = {};
    /* The tile that was started `back` tiles ago has arrived. */
    const auto post = [&](int number, const nsa__cuda_bad_words &words, int first) {
        const int stage = number % STAGES;
        T *const k = pipe.stages + stage * BLOCK_N * (DK + DV);
        const uint64_t mask = first < 0 ? 0 : nsa__cuda_bad_bits<BLOCK_N>(words, first);
        if (mask) {
            nsa__barrier_sync(1, shape::PRODUCERS); /* every producer's part has arrived */
            nsa__cuda_tile_zero<T, DK, BLOCK_N, shape::PRODUCERS>(k, mask);
            nsa__cuda_tile_zero<T, DV, BLOCK_N, shape::PRODUCERS>(k + BLOCK_N * DK, mask);
        }
        if (writes) pipe.tiles[stage].bad = mask;
        nsa__fence_async();
        nsa__mbarrier_arrive(pipe.full + stage);
    };
    int number = 0;
    for (bool more = true; more; number++) {
        const int stage = number % STAGES;
        more = nsa__cuda_walk_next(walk, params, at, tile_rows);
        if (number >= STAGES) nsa__mbarrier_wait(pipe.empty + stage, (number / STAGES - 1) & 1);
        if (more)
            nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, shape::PRODUCERS, true>(
                pipe.stages + stage * BLOCK_N * (DK + DV), params, at, walk.tile);
        nsa__cp_async_commit();
#pragma unroll
        for (int i = LAG; i > 0; i--) bad[i] = bad[i - 1], begin[i] = begin[i - 1];
        bad[0] = walk.bad;
        begin[0] = more ? walk.tile.begin : -1;
        if (writes) {
            pipe.tiles[stage].begin = begin[0];
            pipe.tiles[stage].end = walk.tile.end;
#pragma unroll
            for (int g = 0; g < 2; g++)
                if (LISTS)
                    pipe.tiles[stage].readers[g] = nsa__cuda_walk_readers<4>(
                        walk.ballots, pipe.groups[g].first, pipe.groups[g].queries);
        }
        if (number < LAG) continue;
        nsa__cp_async_wait<LAG>();
        post(number - LAG, bad[LAG], begin[LAG]);
    }
    nsa__cp_async_wait<0>();
#pragma unroll
    for (int i = LAG - 1; i >= 0; i--)
        if (number > i) post(number - 1 - i, bad[i], begin[i]);
}

/* A consumer's tile: the stage it lies in, and what its warpgroup sees of it. */
struct nsa__cuda_pipe_turn {
    int number;
    nsa__cuda_key_tile tile; /* readers 0: there is no more */
    uint64_t group;          /* a bit for each of the warpgroup's queries */
};

/* One arrival of the warp: it has read the stage. */
NSA__DEVICE void nsa__cuda_pipe_release(uint64_t *empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) nsa__mbarrier_arrive(empty);
}

/* Turns to the next tile; readers 0: the warpgroup passes over it, or it is the end. */
template <typename T, int STAGES, bool LISTS>
NSA__DEVICE void nsa__cuda_pipe_next(nsa__cuda_pipe_turn &turn,
                                     const nsa__cuda_pipe<T, STAGES> &pipe) {
    const unsigned number = static_cast<unsigned>(++turn.number), stage = number % STAGES;
    nsa__mbarrier_wait(pipe.full + stage, static_cast<int>(number / STAGES & 1));
    const nsa__cuda_pipe_tile &posted = pipe.tiles[stage];
    turn.tile = {posted.begin, posted.end, turn.group, posted.bad};
    if (LISTS) turn.tile.readers = posted.readers[threadIdx.x / 128];
    if (posted.begin < 0) turn.tile.readers = 0;
}

/* From a tile that the warpgroup passes over, released unread, to the next that it does not. */
template <typename T, int STAGES, bool LISTS>
NSA__DEVICE void nsa__cuda_pipe_pass(nsa__cuda_pipe_turn &turn,
                                     const nsa__cuda_pipe<T, STAGES> &pipe) {
    while (!turn.tile.readers && turn.tile.begin >= 0) {
        nsa__cuda_pipe_release(pipe.empty + static_cast<unsigned>(turn.number) % STAGES);
        nsa__cuda_pipe_next<T, STAGES, LISTS>(turn, pipe);
    }
}

/* Scores of a tile become p. */
template <int N>
NSA__DEVICE void nsa__cuda_pipe_softmax(float (&s)[N / 8][4], nsa__cuda_forward_rows &rows,
                                        float (&shrink)[2], const nsa__cuda_key_tile &tile,
                                        float scale2) {
    const nsa__cuda_key_span seen[2] = {nsa__cuda_seen_of(tile, rows.keys[0], rows.number[0]),
                                        nsa__cuda_seen_of(tile, rows.keys[1], rows.number[1])};
    nsa__cuda_mask_tile(s, seen, scale2);
    nsa__cuda_softmax_tile(s, rows, shrink);
#pragma unroll
    for (int h = 0; h < 2; h++) rows.bad[h] |= (nsa__cuda_key_span_bits(seen[h]) & tile.bad) != 0;
}

/* p as the operand of its product with v; no product that reads `to` may be under way. */
template <typename T, int N>
NSA__DEVICE void nsa__cuda_pipe_pack(uint32_t (&to)[N / 16][4], const float (&p)[N / 8][4]) {
#pragma unroll
    for (int k = 0; k < N / 16; k++) nsa__cuda_pack_product<T>(to[k], p[2 * k], p[2 * k + 1]);
}

template <int N>
NSA__DEVICE void nsa__cuda_pipe_rescale(float (&out)[N][4], const float (&shrink)[2]) {
    if (!__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[n][e] *= shrink[e / 2];
}

template <typename T, int DK, int DV, bool LISTS>
NSA__DEVICE void
nsa__cuda_forward_consume(float (&out)[DV / 8][4], nsa__cuda_forward_rows &rows,
                          const nsa__cuda_pipe<T, nsa__cuda_forward_pipe<T, DK, DV>::STAGES> &pipe,
                          const nsa__cuda_attend_params &params) {
    using shape = nsa__cuda_forward_pipe<T, DK, DV>;
    constexpr int BLOCK_M = shape::BLOCK_M, BLOCK_N = shape::BLOCK_N, STAGES = shape::STAGES;
    /* in units of 16 bytes: from a stage's keys to the next one's; from its keys to its values,
       whose descriptor also says how far panels are apart */
    constexpr uint32_t STEP = BLOCK_N * (DK + DV) / 8;
    constexpr uint32_t VALUES = BLOCK_N * DK / 8 + (BLOCK_N * 8 - 1) * 65536u;
    const uint64_t queries =
        nsa__cuda_warpgroup_operand(pipe.q + static_cast<int>(threadIdx.x) / 128 * 64 * 64, 16);
    const uint64_t stages = nsa__cuda_warpgroup_operand(pipe.stages, 16);
    const auto keys = [&](int number) {
        return nsa__cuda_warpgroup_moved(stages, static_cast<unsigned>(number) % STAGES * STEP);
    };
    nsa__cuda_pipe_turn turn = {-1, {}, pipe.groups[threadIdx.x / 128].queries};
    float s[BLOCK_N / 8][4], shrink[2];
    uint32_t p[BLOCK_N / 16][4];
    nsa__cuda_pipe_next<T, STAGES, LISTS>(turn, pipe);
    nsa__cuda_pipe_pass<T, STAGES, LISTS>(turn, pipe);
    while (turn.tile.readers) {
        nsa__cuda_warpgroup_start_nt<T, DK, BLOCK_N, BLOCK_M>(s, queries, keys(turn.number));
        nsa__cuda_warpgroup_await<BLOCK_N, 0>(s);
        nsa__cuda_pipe_softmax<BLOCK_N>(s, rows, shrink, turn.tile, params.scale2);
        nsa__cuda_pipe_rescale(out, shrink);
        nsa__cuda_pipe_pack<T, BLOCK_N>(p, s);
        int before; /* the tile that p is of, and that the warpgroup holds */
        uint64_t values;
        for (;;) {
            before = turn.number;
            values = keys(before) + VALUES;
            const uint64_t next = keys(before + 1), mine = nsa__cuda_warpgroup_moved(queries, 0);
            nsa__cuda_pipe_next<T, STAGES, LISTS>(turn, pipe);
            if (!turn.tile.readers) break;
            nsa__cuda_warpgroup_start_nt<T, DK, BLOCK_N, BLOCK_M>(s, mine, next);
            nsa__cuda_warpgroup_start_nn<T, BLOCK_N, DV>(out, p, values);
            nsa__cuda_warpgroup_await<BLOCK_N, 1>(s);
            nsa__cuda_pipe_softmax<BLOCK_N>(s, rows, shrink, turn.tile, params.scale2);
            nsa__cuda_warpgroup_await<DV, 0>(out);
            nsa__cuda_pipe_release(pipe.empty + static_cast<unsigned>(before) % STAGES);
            nsa__cuda_pipe_rescale(out, shrink);
            nsa__cuda_pipe_pack<T, BLOCK_N>(p, s);
        }
        /* It may hold one tile until the next is posted, but not pass over others meanwhile: the
           producer would wait for that one. */
        nsa__cuda_warpgroup_start_nn<T, BLOCK_N, DV>(out, p, values);
        nsa__cuda_warpgroup_await<DV, 0>(out);
        nsa__cuda_pipe_release(pipe.empty + static_cast<unsigned>(before) % STAGES);
        nsa__cuda_pipe_pass<T, STAGES, LISTS>(turn, pipe);
    }
}

#endif

/* LISTS: slc, of which a tile of neighbouring queries reads the union of their block lists. */
template <typename T, int DK, int DV, bool LISTS>
static __global__ void __launch_bounds__(384, 1)
    nsa__cuda_attend_forward_sm90_kernel(const NSA_GRID_CONSTANT nsa__cuda_attend_params params) {
#if NSA__USES_WGMMA
    using shape = nsa__cuda_forward_pipe<T, DK, DV>;
    constexpr int BLOCK_M = shape::BLOCK_M, STAGES = shape::STAGES;
    constexpr int THREADS = shape::CONSUMERS + shape::PRODUCERS;
    NSA_SHARED_ALL(shared);
    NSA_SHARED(nsa__cuda_pipe_tile, tiles, [STAGES]);
    NSA_SHARED(nsa__cuda_pipe_group, groups, [2]);
    NSA_SHARED(uint64_t, full, [STAGES]);
    NSA_SHARED(uint64_t, empty, [STAGES]);
    T *const q = reinterpret_cast<T *>(shared);
    const nsa__cuda_pipe<T, STAGES> pipe = {q, q + BLOCK_M * DK, tiles, groups, full, empty};

    NSA_SHARED(nsa__cuda_attend_head, at, );
    NSA_SHARED(nsa__cuda_query_tile, tile_rows, );
    if (threadIdx.x == 0) {
        at = nsa__cuda_attend_head_of(params, blockIdx.x);
        tile_rows = nsa__cuda_query_tile_of(params, at, BLOCK_M);
        for (int g = 0; g < 2; g++)
            groups[g] = {nsa__cuda_warpgroup_first(params, tile_rows, g),
                         nsa__cuda_warpgroup_bits(params, tile_rows, g)};
        for (int i = 0; i < STAGES; i++) {
            nsa__mbarrier_init(full + i, shape::PRODUCERS);
            nsa__mbarrier_init(empty + i, shape::CONSUMERS / 32);
        }
        nsa__fence_async();
    }
    __syncthreads();
    if (tile_rows.first >= tile_rows.end) return;
    nsa__cuda_tile_copy<T, DK, BLOCK_M, THREADS>(
        q, params.d.dim, static_cast<const T *>(params.x.q.data), [&](int r) {
            const nsa__cuda_query_row row = nsa__cuda_query_row_of(params, at, tile_rows, r);
            return row.there ? nsa__cuda_query_at<const T>(params.x.q, at, row.query, row.head)
                             : nullptr;
        });
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
    __syncthreads();
    if (threadIdx.x >= shape::CONSUMERS) {
        nsa__registers<120, false>();
        nsa__cuda_forward_produce<T, DK, DV, LISTS>(pipe, params, at, tile_rows);
        return;
    }
    nsa__registers<192, true>();
    nsa__cuda_forward_rows rows;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    nsa__cuda_forward_begin(rows, params, at, tile_rows,
                            nsa__cuda_tile_clean<T, DK, BLOCK_M>(q, 16 * warp));
    nsa__fence_async(); /* copied and cleaned rows, before the warpgroup multiplies them */
    nsa__barrier_sync(2 + warp / 4, 128);
    float out[DV / 8][4] = {};
    nsa__cuda_forward_consume<T, DK, DV, LISTS>(out, rows, pipe, params);
    if (!LISTS && params.gathered)
        nsa__cuda_gathered_end<T>(params, at, tile_rows, rows, out);
    else
        nsa__cuda_forward_end<T>(params, at, tile_rows, rows, out);
#else
    static_cast<void>(params); /* never launched (nsa__cuda_on_hopper) */
#endif
}

#endif

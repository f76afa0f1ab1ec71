/* attend_mainloop_sm90.cuh: what sm_90a's pipelines over key tiles share: stages with their
   barriers, the producer, how a consumer turns from tile to tile.
   Twin: none; nsa.h has nothing that runs beside the products.
   Not here: what consumers compute (attend_forward_sm90.cuh, attend_dq_sm90.cuh), which keys
   (attend_keys.cuh).

   Three warpgroups share a Q tile of 128 rows. The third is the producer: it walks the key tiles,
   copies them into stages and publishes beside each which tile it is. The first two are consumers
   with 64 rows each: they multiply and never walk. Barriers in shared memory connect them, so no
   warp waits for the whole thread block. Warpgroups pass over tiles that none of their queries
   reads. The producer also says which warps need no mask, so most turns compute no bounds.

   Copies are cp.async, three instructions for 16 bytes of a whole tile: some 70 of 800 issue slots.
   TMA would save no more, and need a tensor map of each view from the host. */
#ifndef NSA_ATTEND_MAINLOOP_SM90_CUH
#define NSA_ATTEND_MAINLOOP_SM90_CUH

#include "attend_slc_scheduler.cuh"

/* HELD: elements of a row of the Q tile. PAGED: keys and values may lie in pages. */
template <typename T, int DK, int DV, int HELD, int COUNT, bool PAGES> struct nsa__cuda_pipe_shape {
    typedef T type;
    static constexpr int WIDTH_K = DK, WIDTH_V = DV;
    static constexpr int BLOCK_M = 128, BLOCK_N = 64, STAGES = COUNT;
    /* Tiles whose copies are under way before one is posted. A consumer holds a tile until it has
       the next one, which must be posted by then: else they would wait for each other. */
    static constexpr int LAG = STAGES - 2;
    static constexpr int CONSUMERS = 2 * BLOCK_M, PRODUCERS = 128;
    static constexpr int STAGE = BLOCK_N * (DK + DV); /* elements */
    static constexpr int BYTES = static_cast<int>(sizeof(T)) * (BLOCK_M * HELD + STAGES * STAGE);
    static constexpr bool PAGED = PAGES;
    static_assert(LAG >= 1, "a tile would be waited for as soon as it is asked for");
};

/* What the producer publishes beside a stage. */
struct alignas(16) nsa__cuda_pipe_tile {
    int begin, end;      /* keys; begin < 0: the walk is over */
    uint64_t bad;        /* a bit for each key */
    uint64_t readers[2]; /* LISTS: of each warpgroup, a bit for each query that reads the block */
    uint32_t whole;      /* a bit for each consumer warp: all its rows see all keys, finite ones */
};

/* The queries of a warpgroup: the first one's place in the tile, and a bit for each. */
struct nsa__cuda_pipe_group {
    int first;
    uint64_t queries;
};

/* What both sides share: stages[i] is full when all producers have arrived at full[i], and empty
   when a lane of each consumer warp has arrived at empty[i]. */
template <typename Shape> struct nsa__cuda_pipe {
    typename Shape::type *q, *stages;
    nsa__cuda_pipe_tile *tiles;
    const nsa__cuda_pipe_group *groups;
    uint64_t *full, *empty;
};

#if NSA__USES_WGMMA

/* By one thread, before a block barrier. */
template <typename Shape>
NSA__DEVICE void
nsa__cuda_pipe_init(const nsa__cuda_pipe<Shape> &pipe, nsa__cuda_pipe_group (&groups)[2],
                    const nsa__cuda_attend_params &params, const nsa__cuda_query_tile &tile_rows) {
    for (int g = 0; g < 2; g++)
        groups[g] = {nsa__cuda_warpgroup_first(params, tile_rows, g),
                     nsa__cuda_warpgroup_bits(params, tile_rows, g)};
    for (int i = 0; i < Shape::STAGES; i++) {
        nsa__mbarrier_init(pipe.full + i, Shape::PRODUCERS);
        nsa__mbarrier_init(pipe.empty + i, Shape::CONSUMERS / 32);
    }
    nsa__fence_async();
}

/* ---- Producer ------------------------------------------------------------------------------ */

/* Tiles that are under way: the newest, the one before, ... */
template <int LAG> struct nsa__cuda_pipe_commits {
    int number; /* of the next tile, counted over all walks */
    nsa__cuda_bad_words bad[LAG + 1];
    int begin[LAG + 1];
};

/* Starts copying a tile to its stage. Beside heads of 192 dq's producers have too few registers for
   unrolled copies. */
template <typename Shape>
NSA__DEVICE void
nsa__cuda_pipe_stage(typename Shape::type *stage, const nsa__cuda_attend_params &params,
                     const nsa__cuda_attend_head &at, const nsa__cuda_key_tile &tile) {
    constexpr int DK = Shape::WIDTH_K, DV = Shape::WIDTH_V, BLOCK_N = Shape::BLOCK_N;
    constexpr int PRODUCERS = Shape::PRODUCERS;
    using T = typename Shape::type;
    if constexpr (DK <= 128)
        if (tile.end - tile.begin == BLOCK_N && !(Shape::PAGED && params.d.pages)) {
            const nsa_tensor &k = params.x.k, &v = params.x.v;
            const int64_t batch = at.seq.key_batch, row = at.key_row + tile.begin;
            nsa__cuda_tile_copy_all<T, DK, BLOCK_N, PRODUCERS>(
                stage, params.d.dim, nsa__row_of<const T>(k, batch, row, at.kv_head), k.token);
            nsa__cuda_tile_copy_all<T, DV, BLOCK_N, PRODUCERS>(
                stage + BLOCK_N * DK, params.d.dim_v,
                nsa__row_of<const T>(v, batch, row, at.kv_head), v.token);
            return;
        }
    nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, PRODUCERS, Shape::PAGED>(stage, params, at, tile);
}

/* Tile `number` has arrived. */
template <typename Shape>
NSA__DEVICE void nsa__cuda_pipe_commit(const nsa__cuda_pipe<Shape> &pipe, int number,
                                       const nsa__cuda_bad_words &words, int first) {
    constexpr int DK = Shape::WIDTH_K, DV = Shape::WIDTH_V, BLOCK_N = Shape::BLOCK_N;
    using T = typename Shape::type;
    const int stage = number % Shape::STAGES;
    T *const k = pipe.stages + stage * Shape::STAGE;
    const uint64_t mask = first < 0 ? 0 : nsa__cuda_bad_bits<BLOCK_N>(words, first);
    if (mask) {
        nsa__barrier_sync(1, Shape::PRODUCERS); /* every producer's part has arrived */
        nsa__cuda_tile_zero<T, DK, BLOCK_N, Shape::PRODUCERS>(k, mask);
        nsa__cuda_tile_zero<T, DV, BLOCK_N, Shape::PRODUCERS>(k + BLOCK_N * DK, mask);
    }
    if (threadIdx.x % Shape::PRODUCERS == 0) {
        pipe.tiles[stage].bad = mask;
        if (mask) pipe.tiles[stage].whole = 0;
    }
    nsa__fence_async();
    nsa__mbarrier_arrive(pipe.full + stage);
}

/* What all rows of consumer warp `lane % 8` see. Most tiles lie in it, and need no mask. */
struct nsa__cuda_pipe_common {
    nsa__cuda_key_span keys;
    uint64_t queries; /* of the warpgroup, those of the warp's rows */
};

/* A later query's keys begin and end no earlier; what rows see that are not there does no harm. */
NSA__DEVICE nsa__cuda_pipe_common nsa__cuda_pipe_common_of(const nsa__cuda_attend_params &params,
                                                           const nsa__cuda_attend_head &at,
                                                           const nsa__cuda_query_tile &tile_rows) {
    const int row = static_cast<int>(threadIdx.x % 8 * 16);
    const nsa__cuda_query_row first = nsa__cuda_query_row_of(params, at, tile_rows, row),
                              last = nsa__cuda_query_row_of(params, at, tile_rows, row + 15);
    const int place = nsa__cuda_warpgroup_first(params, tile_rows, row / 64);
    return {{nsa__cuda_keys_of(params, at.seq.tokens, last.query).begin,
             nsa__cuda_keys_of(params, at.seq.tokens, first.query).end},
            nsa__cuda_key_span_bits({(tile_rows.skip + row) / params.group - place,
                                     (tile_rows.skip + row + 15) / params.group + 1 - place})};
}

/* Writes beside a stage which tile it is to hold. All warps count though the first alone writes: if
   one is asked, ptxas spills. */
template <bool LISTS, typename Shape, typename Walk>
NSA__DEVICE void nsa__cuda_pipe_name(const nsa__cuda_pipe<Shape> &pipe, int stage, int begin,
                                     const Walk &walk, const nsa__cuda_pipe_common &all) {
    const unsigned thread = threadIdx.x % Shape::PRODUCERS, lane = threadIdx.x % 32;
    nsa__cuda_pipe_tile &tile = pipe.tiles[stage];
    uint64_t readers = all.queries;
    if (LISTS) {
        const nsa__cuda_pipe_group &group = pipe.groups[lane / 4 % 2];
        readers = nsa__cuda_walk_readers<4>(walk.ballots, group.first, group.queries);
        if (thread == 0 || thread == 4) tile.readers[thread / 4] = readers;
    }
    const bool sees = begin >= all.keys.begin && begin + Shape::BLOCK_N <= all.keys.end &&
                      begin + Shape::BLOCK_N == walk.tile.end && !(all.queries & ~readers);
    const uint32_t whole = __ballot_sync(0xffffffffu, sees);
    if (thread > 0) return;
    tile.begin = begin;
    tile.end = walk.tile.end;
    tile.whole = whole;
}

/* Walks the key tiles of one branch. The last ones stay under way; behind them stands an end. */
template <bool LISTS, typename Shape>
NSA__DEVICE void
nsa__cuda_pipe_produce(nsa__cuda_pipe_commits<Shape::LAG> &commits,
                       const nsa__cuda_pipe<Shape> &pipe, const nsa__cuda_attend_params &params,
                       const nsa__cuda_attend_head &at, const nsa__cuda_query_tile &tile_rows) {
    constexpr int LAG = Shape::LAG, STAGES = Shape::STAGES;
    nsa__cuda_walk_keys<Shape::BLOCK_N, Shape::BLOCK_M, LISTS> walk = {};
    nsa__cuda_walk_begin(walk, params, at, tile_rows);
    const nsa__cuda_pipe_common all = nsa__cuda_pipe_common_of(params, at, tile_rows);
    for (bool more = true; more; commits.number++) {
        const int number = commits.number, stage = number % STAGES;
        more = nsa__cuda_walk_next(walk, params, at, tile_rows);
        if (number >= STAGES) nsa__mbarrier_wait(pipe.empty + stage, (number / STAGES - 1) & 1);
        if (more)
            nsa__cuda_pipe_stage<Shape>(pipe.stages + stage * Shape::STAGE, params, at, walk.tile);
        nsa__cp_async_commit();
#pragma unroll
        for (int i = LAG; i > 0; i--)
            commits.bad[i] = commits.bad[i - 1], commits.begin[i] = commits.begin[i - 1];
        commits.bad[0] = walk.bad;
        commits.begin[0] = more ? walk.tile.begin : -1;
        nsa__cuda_pipe_name<LISTS>(pipe, stage, commits.begin[0], walk, all);
        if (number < LAG) continue;
        nsa__cp_async_wait<LAG>();
        nsa__cuda_pipe_commit(pipe, number - LAG, commits.bad[LAG], commits.begin[LAG]);
    }
}

/* Posts what is under way behind the last walk. */
template <typename Shape>
NSA__DEVICE void nsa__cuda_pipe_drain(const nsa__cuda_pipe_commits<Shape::LAG> &commits,
                                      const nsa__cuda_pipe<Shape> &pipe) {
    nsa__cp_async_wait<0>();
#pragma unroll
    for (int i = Shape::LAG - 1; i >= 0; i--)
        if (commits.number > i)
            nsa__cuda_pipe_commit(pipe, commits.number - 1 - i, commits.bad[i], commits.begin[i]);
}

/* ---- Consumers ----------------------------------------------------------------------------- */

/* A consumer's tile, and what its warpgroup and its warp see of it. */
struct nsa__cuda_pipe_state {
    int number;
    bool over, whole; /* the walk; the tile, of the warp's rows */
    uint64_t readers; /* a bit for each of the warpgroup's queries; 0: it passes over, or is over */
    uint64_t group;   /* all of them */
};

/* One arrival of the warp: it has read the stage. */
NSA__DEVICE void nsa__cuda_pipe_release(uint64_t *empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) nsa__mbarrier_arrive(empty);
}

/* Turns to the next tile; readers 0: the warpgroup passes over it, or it is the end. */
template <bool LISTS, typename Shape>
NSA__DEVICE void nsa__cuda_pipe_next(nsa__cuda_pipe_state &state,
                                     const nsa__cuda_pipe<Shape> &pipe) {
    constexpr unsigned STAGES = Shape::STAGES;
    const unsigned number = static_cast<unsigned>(++state.number), stage = number % STAGES;
    nsa__mbarrier_wait(pipe.full + stage, static_cast<int>(number / STAGES & 1));
    const nsa__cuda_pipe_tile &posted = pipe.tiles[stage];
    state.over = posted.begin < 0;
    state.whole = __all_sync(0xffffffffu, posted.whole >> threadIdx.x / 32 & 1);
    state.readers = LISTS ? posted.readers[threadIdx.x / 128] : state.group;
    if (state.over) state.readers = 0;
}

/* The tile of a state, as a mask wants to know it. */
template <typename Shape>
NSA__DEVICE nsa__cuda_key_tile nsa__cuda_pipe_tile_of(const nsa__cuda_pipe_state &state,
                                                      const nsa__cuda_pipe<Shape> &pipe) {
    const nsa__cuda_pipe_tile &posted =
        pipe.tiles[static_cast<unsigned>(state.number) % unsigned{Shape::STAGES}];
    return {posted.begin, posted.end, state.readers, posted.bad};
}

/* From a tile that the warpgroup passes over, released unread, to the next that it does not. */
template <bool LISTS, typename Shape>
NSA__DEVICE void nsa__cuda_pipe_skip(nsa__cuda_pipe_state &state,
                                     const nsa__cuda_pipe<Shape> &pipe) {
    while (!state.readers && !state.over) {
        nsa__cuda_pipe_release(pipe.empty + static_cast<unsigned>(state.number) % Shape::STAGES);
        nsa__cuda_pipe_next<LISTS>(state, pipe);
    }
}

/* A product's values as the operand of the next one; no product that reads `to` may be under
   way. */
template <typename T, int N>
NSA__DEVICE void nsa__cuda_pipe_pack(uint32_t (&to)[N / 16][4], const float (&p)[N / 8][4]) {
#pragma unroll
    for (int k = 0; k < N / 16; k++) nsa__cuda_pack_product<T>(to[k], p[2 * k], p[2 * k + 1]);
}

#endif

#endif

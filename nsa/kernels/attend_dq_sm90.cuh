/* attend_dq_sm90.cuh: attention over few keys, dq, as a pipeline for sm_90a.
   Twin: nsa.h, "Attention over few keys", its backward; to the bit what attend_backward.cuh
   computes.
   Not here: which keys (attend_keys.cuh), rows (attend_dq_epilogue.cuh), dk and dv, other
   architectures.

   attend_mainloop_sm90.cuh has the pipeline: one warpgroup copies key tiles, two multiply. A
   consumer's tile has three products: s = q k^T, dp = dout v^T, dq += ds k. It starts the first two
   of the next tile before the last of this one, and makes p of the next while those run. The
   branches follow each other in one walk, so dq stays in registers; the producer goes on to the
   next branch while consumers have tiles of the one before.

   | heads    | Q tile | key tile | stages | dynamic shared | registers: consumer, producer |
   |---|---|---|---|---|---|
   | 64, 64   | 128    | 64       | 4      | 96 KB          | 192, 120 |
   | 128, 128 | 128    | 64       | 4      | 192 KB         | 192, 120 |
   | 192, 128 | 128    | 64       | 3      | 200 KB         | 224, 56 |
   One thread block an SM. */
#ifndef NSA_ATTEND_DQ_SM90_CUH
#define NSA_ATTEND_DQ_SM90_CUH

#include "attend_dq_epilogue.cuh"

/* Whether the pipeline serves these heads: wider ones leave no registers for a tile of 64 keys. */
template <typename T, int DK, int DV>
struct nsa__cuda_dq_pipe
    : nsa__cuda_pipe_shape<T, DK, DV, DK + DV, (DK + DV > 256 ? 3 : 4), false> {
    static constexpr bool value = sizeof(T) == 2 && DK + DV <= 320;
    static constexpr int MORE = DK > 128 ? 224 : 192, LESS = 2 * (252 - MORE); /* registers */
};

#if NSA__USES_WGMMA

/* ds of keys that a row does not see becomes 0; a row that sees something has read a key. In the
   loop over lists ptxas forgets that all lanes agree, and is told again: elsewhere it would put the
   vote between two products. */
template <int N, bool LISTS, typename Shape>
NSA__DEVICE void nsa__cuda_dq_mask(float (&ds)[N / 8][4], nsa__cuda_dq_rows &rows,
                                   const nsa__cuda_pipe_state &state,
                                   const nsa__cuda_pipe<Shape> &pipe) {
    if (LISTS ? __all_sync(0xffffffffu, state.whole) : state.whole) {
        rows.flags |= 3 * NSA__DQ_SEES;
        return;
    }
    nsa__cuda_key_span seen[2];
    nsa__cuda_dq_see(seen, rows, nsa__cuda_pipe_tile_of(state, pipe));
    nsa__cuda_hide(ds, seen, 0.0f);
}

/* What one branch adds to dq. */
template <typename T, int DK, int DV, bool LISTS>
NSA__DEVICE void
nsa__cuda_dq_consume(float (&dq)[DK / 8][4], nsa__cuda_dq_rows &rows, nsa__cuda_pipe_state &state,
                     const nsa__cuda_pipe<nsa__cuda_dq_pipe<T, DK, DV>> &pipe, float scale) {
    using shape = nsa__cuda_dq_pipe<T, DK, DV>;
    constexpr int BLOCK_M = shape::BLOCK_M, BLOCK_N = shape::BLOCK_N, STAGES = shape::STAGES;
    /* in units of 16 bytes: from q to dout, from a stage to the next one, from its keys to its
       values; and what makes a descriptor of rows one of columns, which says how far panels are
       apart */
    constexpr uint32_t DOUT = BLOCK_M * DK / 8, STEP = shape::STAGE / 8, V = BLOCK_N * DK / 8;
    constexpr uint32_t COLUMNS = (BLOCK_N * 8 - 1) * 65536u;
    const uint64_t first =
        nsa__cuda_warpgroup_operand(pipe.q + static_cast<int>(threadIdx.x) / 128 * 64 * 64, 16);
    const uint64_t stages = nsa__cuda_warpgroup_operand(pipe.stages, 16);
    const auto queries = [&] { return nsa__cuda_warpgroup_moved(first, 0); };
    const auto keys = [&](int number) {
        return nsa__cuda_warpgroup_moved(stages, static_cast<unsigned>(number) % STAGES * STEP);
    };
    float s[BLOCK_N / 8][4], dp[BLOCK_N / 8][4];
    uint32_t ds[BLOCK_N / 16][4];
    nsa__cuda_pipe_next<LISTS>(state, pipe);
    nsa__cuda_pipe_skip<LISTS>(state, pipe);
    while (state.readers) {
        const uint64_t mine = queries(), these = keys(state.number);
        nsa__cuda_warpgroup_start_nt<T, DK, BLOCK_N, BLOCK_M>(s, mine, these);
        nsa__cuda_warpgroup_start_nt<T, DV, BLOCK_N, BLOCK_M>(dp, mine + DOUT, these + V);
        nsa__cuda_warpgroup_await<BLOCK_N, 1>(s);
        nsa__cuda_dq_p(s, rows, scale);
        nsa__cuda_warpgroup_await<BLOCK_N, 0>(dp);
        nsa__cuda_dq_ds(s, dp, rows);
        nsa__cuda_dq_mask<BLOCK_N, LISTS>(s, rows, state, pipe);
        nsa__cuda_pipe_pack<T, BLOCK_N>(ds, s);
        int before; /* the tile that ds is of, and that the warpgroup holds */
        uint64_t columns;
        for (;;) {
            before = state.number;
            columns = keys(before) + COLUMNS;
            const uint64_t next = keys(before + 1), again = queries();
            nsa__cuda_pipe_next<LISTS>(state, pipe);
            if (!state.readers) break;
            nsa__cuda_warpgroup_start_nt<T, DK, BLOCK_N, BLOCK_M>(s, again, next);
            nsa__cuda_warpgroup_start_nt<T, DV, BLOCK_N, BLOCK_M>(dp, again + DOUT, next + V);
            nsa__cuda_warpgroup_start_nn<T, BLOCK_N, DK>(dq, ds, columns);
            nsa__cuda_warpgroup_await<BLOCK_N, 2>(s);
            nsa__cuda_dq_p(s, rows, scale);
            nsa__cuda_warpgroup_await<BLOCK_N, 1>(dp);
            nsa__cuda_dq_ds(s, dp, rows);
            nsa__cuda_dq_mask<BLOCK_N, LISTS>(s, rows, state, pipe);
            nsa__cuda_warpgroup_await<DK, 0>(dq);
            nsa__cuda_pipe_release(pipe.empty + static_cast<unsigned>(before) % STAGES);
            nsa__cuda_pipe_pack<T, BLOCK_N>(ds, s);
        }
        /* It may hold one tile until the next is posted, but not pass over others meanwhile: the
           producer would wait for that one. */
        nsa__cuda_warpgroup_start_nn<T, BLOCK_N, DK>(dq, ds, columns);
        nsa__cuda_warpgroup_await<DK, 0>(dq);
        nsa__cuda_pipe_release(pipe.empty + static_cast<unsigned>(before) % STAGES);
        nsa__cuda_pipe_skip<LISTS>(state, pipe);
    }
    nsa__cuda_pipe_release(pipe.empty + static_cast<unsigned>(state.number) % STAGES);
    nsa__cuda_dq_branch_end(rows);
}

#endif

/* LISTS: the last branch follows block lists. */
template <typename T, int DK, int DV, bool LISTS>
static __global__ void __launch_bounds__(384, 1)
    nsa__cuda_attend_dq_sm90_kernel(const NSA_GRID_CONSTANT nsa__cuda_dq_params all) {
#if NSA__USES_WGMMA
    using shape = nsa__cuda_dq_pipe<T, DK, DV>;
    constexpr int BLOCK_M = shape::BLOCK_M, THREADS = shape::CONSUMERS + shape::PRODUCERS;
    NSA_SHARED_ALL(shared);
    NSA_SHARED(nsa__cuda_pipe_tile, tiles, [shape::STAGES]);
    NSA_SHARED(nsa__cuda_pipe_group, groups, [2]);
    NSA_SHARED(uint64_t, full, [shape::STAGES]);
    NSA_SHARED(uint64_t, empty, [shape::STAGES]);
    T *const q = reinterpret_cast<T *>(shared), *const dout = q + BLOCK_M * DK;
    const nsa__cuda_pipe<shape> pipe = {q, dout + BLOCK_M * DV, tiles, groups, full, empty};

    const nsa__cuda_attend_params &params = all.branch[0];
    NSA_SHARED(nsa__cuda_attend_head, heads, [3]); /* they differ in their key rows */
    NSA_SHARED(nsa__cuda_query_tile, tile_rows, );
    static_assert(nsa__cuda_shared_fits<shape::BYTES, sizeof tiles + sizeof groups + sizeof full +
                                                          sizeof empty + sizeof heads +
                                                          sizeof tile_rows>::value);
    if (threadIdx.x == 0) {
        for (int i = 0; i < all.branches; i++)
            heads[i] = nsa__cuda_attend_head_of(all.branch[i], blockIdx.x);
        tile_rows = nsa__cuda_query_tile_of(params, heads[0], BLOCK_M);
        nsa__cuda_pipe_init(pipe, groups, params, tile_rows);
    }
    __syncthreads();
    if (tile_rows.first >= tile_rows.end) return;
    nsa__cuda_tile_copy<T, DK, BLOCK_M, THREADS>(
        q, params.d.dim, static_cast<const T *>(params.x.q.data), [&](int r) {
            const nsa__cuda_query_row row = nsa__cuda_query_row_of(params, heads[0], tile_rows, r);
            return row.there
                       ? nsa__cuda_query_at<const T>(params.x.q, heads[0], row.query, row.head)
                       : nullptr;
        });
    nsa__cuda_stage_dout<T, DV, BLOCK_M, THREADS>(dout, params, [&](int r) {
        const nsa__cuda_query_row row = nsa__cuda_query_row_of(params, heads[0], tile_rows, r);
        return row.there ? nsa__cuda_query_offset(params.dx.out, heads[0], row.query, row.head)
                         : int64_t(-1);
    });
    nsa__cp_async_commit();
    nsa__cuda_tiles_wait<T, shape::BLOCK_N>();
    if (threadIdx.x >= shape::CONSUMERS) {
        nsa__registers<shape::LESS, false>();
        nsa__cuda_pipe_commits<shape::LAG> commits = {};
#pragma unroll 1
        for (int i = 0; i < all.branches - LISTS; i++)
            nsa__cuda_pipe_produce<false>(commits, pipe, all.branch[i], heads[i], tile_rows);
        if constexpr (LISTS)
            nsa__cuda_pipe_produce<true>(commits, pipe, all.branch[all.branches - 1],
                                         heads[all.branches - 1], tile_rows);
        nsa__cuda_pipe_drain(commits, pipe);
        return;
    }
    nsa__registers<shape::MORE, true>();
    nsa__cuda_dq_rows rows = {};
    nsa__cuda_pipe_state state = {-1, false, false, 0, groups[threadIdx.x / 128].queries};
    float dq[DK / 8][4] = {};
#pragma unroll 1
    for (int i = 0; i < all.branches - LISTS; i++) {
        nsa__cuda_dq_begin(rows, all.branch[i], heads[i], tile_rows);
        nsa__cuda_dq_consume<T, DK, DV, false>(dq, rows, state, pipe, all.branch[i].scale);
    }
    if constexpr (LISTS) {
        const int last = all.branches - 1;
        nsa__cuda_dq_begin(rows, all.branch[last], heads[last], tile_rows);
        nsa__cuda_dq_consume<T, DK, DV, true>(dq, rows, state, pipe, all.branch[last].scale);
    }
    nsa__cuda_dq_end<T>(params, heads[0], tile_rows, rows, dq);
#else
    static_cast<void>(all); /* never launched (nsa__cuda_on_hopper) */
#endif
}

#endif

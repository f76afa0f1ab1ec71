/* attend_forward_sm90.cuh: attention over few keys, forward, as a pipeline for sm_90a.
   Twin: nsa.h, "Attention over few keys"; to the bit what attend_forward.cuh computes.
   Not here: which keys (attend_keys.cuh), softmax (attend_softmax.cuh), other architectures.

   attend_mainloop_sm90.cuh has the pipeline: one warpgroup copies key tiles, two multiply. A
   consumer starts q k of the next tile before p v of this one, and takes the softmax of the next
   while p v runs. Descriptors of both products are made before the wait for the next tile. In slc a
   warpgroup multiplies rows that do not read a block, too, if others do: bytes from L2 bound lists
   that differ, not products.

   | heads    | Q tile | key tile | stages | dynamic shared | registers: consumer, producer |
   |---|---|---|---|---|---|
   | 64, 64   | 128    | 64       | 4      | 80 KB          | 192, 120 |
   | 128, 128 | 128    | 64       | 4      | 160 KB         | 192, 120 |
   | 192, 128 | 128    | 64       | 4      | 208 KB         | 192, 120 |
   One thread block an SM. */
#ifndef NSA_ATTEND_FORWARD_SM90_CUH
#define NSA_ATTEND_FORWARD_SM90_CUH

#include "attend_mainloop_sm90.cuh"
#include "attend_softmax.cuh"

/* Whether the pipeline serves these heads: wider ones leave no registers for a tile of 64 keys. */
template <typename T, int DK, int DV>
struct nsa__cuda_forward_pipe : nsa__cuda_pipe_shape<T, DK, DV, DK, 4, true> {
    static constexpr bool value = sizeof(T) == 2 && DV <= 128;
};

#if NSA__USES_WGMMA

/* Scores of a tile become p. */
template <int N, typename Shape>
NSA__DEVICE void nsa__cuda_pipe_softmax(float (&s)[N / 8][4], nsa__cuda_forward_rows &rows,
                                        float (&shrink)[2], const nsa__cuda_pipe_state &state,
                                        const nsa__cuda_pipe<Shape> &pipe, float scale) {
    nsa__cuda_scale_tile(s, scale);
    if (!state.whole) {
        const nsa__cuda_key_tile tile = nsa__cuda_pipe_tile_of(state, pipe);
        const nsa__cuda_key_span seen[2] = {nsa__cuda_seen_of(tile, rows.keys[0], rows.number[0]),
                                            nsa__cuda_seen_of(tile, rows.keys[1], rows.number[1])};
        nsa__cuda_hide(s, seen, -INFINITY);
#pragma unroll
        for (int h = 0; h < 2; h++)
            rows.bad[h] |= (nsa__cuda_key_span_bits(seen[h]) & tile.bad) != 0;
    }
    nsa__cuda_softmax_tile(s, rows, shrink);
}

NSA__DEVICE bool nsa__cuda_pipe_shrinks(const float (&shrink)[2]) {
    return __any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f);
}
template <int N>
NSA__DEVICE void nsa__cuda_pipe_rescale(float (&out)[N][4], const float (&shrink)[2]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[n][e] *= shrink[e / 2];
}

template <typename T, int DK, int DV, bool LISTS>
NSA__DEVICE void
nsa__cuda_forward_consume(float (&out)[DV / 8][4], nsa__cuda_forward_rows &rows,
                          const nsa__cuda_pipe<nsa__cuda_forward_pipe<T, DK, DV>> &pipe,
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
    nsa__cuda_pipe_state state = {-1, false, false, 0, pipe.groups[threadIdx.x / 128].queries};
    float s[BLOCK_N / 8][4], shrink[2];
    uint32_t p[BLOCK_N / 16][4];
    nsa__cuda_pipe_next<LISTS>(state, pipe);
    nsa__cuda_pipe_skip<LISTS>(state, pipe);
    while (state.readers) {
        nsa__cuda_warpgroup_start_nt<T, DK, BLOCK_N, BLOCK_M>(s, queries, keys(state.number));
        nsa__cuda_warpgroup_await<BLOCK_N, 0>(s);
        nsa__cuda_pipe_softmax<BLOCK_N>(s, rows, shrink, state, pipe, params.scale);
        if (nsa__cuda_pipe_shrinks(shrink)) nsa__cuda_pipe_rescale(out, shrink);
        nsa__cuda_pipe_pack<T, BLOCK_N>(p, s);
        int before; /* the tile that p is of, and that the warpgroup holds */
        uint64_t values;
        for (;;) {
            before = state.number;
            values = keys(before) + VALUES;
            const uint64_t next = keys(before + 1), mine = nsa__cuda_warpgroup_moved(queries, 0);
            nsa__cuda_pipe_next<LISTS>(state, pipe);
            if (!state.readers) break;
            nsa__cuda_warpgroup_start_nt<T, DK, BLOCK_N, BLOCK_M>(s, mine, next);
            nsa__cuda_warpgroup_start_nn<T, BLOCK_N, DV>(out, p, values);
            nsa__cuda_warpgroup_await<BLOCK_N, 1>(s);
            nsa__cuda_pipe_softmax<BLOCK_N>(s, rows, shrink, state, pipe, params.scale);
            /* Each way has a wait of its own: one in front of the branch ptxas moves up, to where
               the softmax begins, which then runs beside no product. */
            if (nsa__cuda_pipe_shrinks(shrink)) {
                nsa__cuda_warpgroup_await<DV, 0>(out);
                nsa__cuda_pipe_rescale(out, shrink);
            } else {
                nsa__cuda_warpgroup_await<DV, 0>(out);
            }
            nsa__cuda_pipe_release(pipe.empty + static_cast<unsigned>(before) % STAGES);
            nsa__cuda_pipe_pack<T, BLOCK_N>(p, s);
        }
        /* It may hold one tile until the next is posted, but not pass over others meanwhile: the
           producer would wait for that one. */
        nsa__cuda_warpgroup_start_nn<T, BLOCK_N, DV>(out, p, values);
        nsa__cuda_warpgroup_await<DV, 0>(out);
        nsa__cuda_pipe_release(pipe.empty + static_cast<unsigned>(before) % STAGES);
        nsa__cuda_pipe_skip<LISTS>(state, pipe);
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
    const nsa__cuda_pipe<shape> pipe = {q, q + BLOCK_M * DK, tiles, groups, full, empty};

    NSA_SHARED(nsa__cuda_attend_head, at, );
    NSA_SHARED(nsa__cuda_query_tile, tile_rows, );
    static_assert(nsa__cuda_shared_fits<shape::BYTES, sizeof tiles + sizeof groups + sizeof full +
                                                          sizeof empty + sizeof at +
                                                          sizeof tile_rows>::value);
    if (threadIdx.x == 0) {
        at = nsa__cuda_attend_head_of(params, blockIdx.x);
        tile_rows = nsa__cuda_query_tile_of(params, at, BLOCK_M);
        nsa__cuda_pipe_init(pipe, groups, params, tile_rows);
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
        nsa__cuda_pipe_commits<shape::LAG> commits = {};
        nsa__cuda_pipe_produce<LISTS>(commits, pipe, params, at, tile_rows);
        nsa__cuda_pipe_drain(commits, pipe);
        return;
    }
    nsa__registers<192, true>();
    nsa__cuda_forward_rows rows;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    nsa__cuda_forward_begin(rows, params, at, tile_rows,
                            nsa__cuda_tile_clean<T, DK, BLOCK_M>(q, 16 * warp));
    /* The producers copied some of these rows and have not fenced. A product may read them all the
       same: between a write and a read by another proxy a fence may stand anywhere on the path of
       causality (PTX ISA, memory consistency model, "Causality order"), and from the block barrier
       to the product that path leads through this one. */
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

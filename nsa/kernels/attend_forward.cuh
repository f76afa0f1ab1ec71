/* attend_forward.cuh: attention over few keys, forward: one kernel for all branches.
   Twin: nsa.h, "Attention over few keys".
   Not here: which keys (attend_keys.cuh), backward (attend_backward.cuh).

   A warp owns 16 rows of the Q tile and skips a key tile that none of them sees. On sm_90a the four
   warps of a warpgroup skip what none of their queries sees. A row that sees nothing of a tile
   keeps its state to the bit, so a row's bits do not depend on its neighbours. Tiles hold finite
   numbers only: rows with a non-finite value enter as zeros, and the rows that read them are set
   to NaN at the end. */
#ifndef NSA_ATTEND_FORWARD_CUH
#define NSA_ATTEND_FORWARD_CUH

#include "attend_forward_sm90.cuh"

/* ---- Forward ------------------------------------------------------------------------------- */

template <typename T, int DK, int DV, int HOPPER, int TILE_MOST = 128>
struct nsa__cuda_forward_shape : nsa__cuda_tile_shape<T, DK, DK + DV, (DV > 192 ? 16 : 64),
                                                      (DV > 192 ? 8 : 16), HOPPER, TILE_MOST> {};

/* LISTS: slc, of which a tile of neighbouring queries reads the union of their block lists. */
template <typename T, int DK, int DV, bool LISTS>
static __global__ void __launch_bounds__(32 *
                                             nsa__cuda_forward_shape<T, DK, DV, NSA__HOPPER>::WARPS,
                                         8 / nsa__cuda_forward_shape<T, DK, DV, NSA__HOPPER>::WARPS)
    nsa__cuda_attend_forward_kernel(nsa__cuda_attend_params params) {
    if constexpr (NSA__HOPPER && nsa__cuda_forward_pipe<T, DK, DV>::value) return;
    using shape = nsa__cuda_forward_shape<T, DK, DV, NSA__HOPPER>;
    constexpr int BLOCK_M = shape::TILE, BLOCK_N = shape::STAGE, THREADS = 32 * shape::WARPS;
    NSA_SHARED_ALL(shared);
    T *const q = reinterpret_cast<T *>(shared), *const stages = q + BLOCK_M * DK;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;

    NSA_SHARED(nsa__cuda_attend_head, at, );
    NSA_SHARED(nsa__cuda_query_tile, tile_rows, );
    static_assert(nsa__cuda_shared_fits<shape::BYTES, sizeof at + sizeof tile_rows>::value);
    if (threadIdx.x == 0) {
        at = nsa__cuda_attend_head_of(params, blockIdx.x);
        tile_rows = nsa__cuda_query_tile_of(params, at, BLOCK_M);
    }
    __syncthreads();
    if (tile_rows.first >= tile_rows.end) return;
    nsa__cuda_walk_keys<BLOCK_N, BLOCK_M, LISTS> walk = {};
    nsa__cuda_walk_begin(walk, params, at, tile_rows);

    nsa__cuda_tile_copy<T, DK, BLOCK_M, THREADS>(
        q, params.d.dim, static_cast<const T *>(params.x.q.data), [&](int r) {
            const nsa__cuda_query_row row = nsa__cuda_query_row_of(params, at, tile_rows, r);
            return row.there ? nsa__cuda_query_at<const T>(params.x.q, at, row.query, row.head)
                             : nullptr;
        });
    bool more = nsa__cuda_walk_next(walk, params, at, tile_rows);
    if (more)
        nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, THREADS, true>(stages, params, at, walk.tile);
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
    __syncthreads();

    nsa__cuda_forward_rows rows;
    nsa__cuda_forward_begin(rows, params, at, tile_rows,
                            nsa__cuda_tile_clean<T, DK, BLOCK_M>(q, warp_row));
    float out[DV / 8][4] = {};
    for (int at_stage = 0; more; at_stage ^= 1) {
        const nsa__cuda_key_tile tile = nsa__cuda_walk_tile(walk);
        T *const k = stages + at_stage * BLOCK_N * (DK + DV), *const v = k + BLOCK_N * DK;
        /* this stage has arrived, and no warp reads the other one any more */
        nsa__cuda_tiles_wait<T, BLOCK_N>();
        if (__builtin_expect(tile.bad != 0, 0))
            nsa__cuda_clean_stage<T, DK, DV, BLOCK_N, THREADS>(k, tile.bad);
        float s[BLOCK_N / 8][4], shrink[2];
        /* A warpgroup that sees nothing multiplies too: a product that only some of them start
           would make the compiler wait for each. Walk and copies run under the product. */
        nsa__cuda_product_nt_begin<T, DK, BLOCK_N, BLOCK_M>(s, q, warp_row, k);
        more = nsa__cuda_walk_next(walk, params, at, tile_rows);
        if (more)
            nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, THREADS, true>(
                stages + (at_stage ^ 1) * BLOCK_N * (DK + DV), params, at, walk.tile);
        nsa__cp_async_commit();
        const nsa__cuda_key_span seen[2] = {nsa__cuda_seen_of(tile, rows.keys[0], rows.number[0]),
                                            nsa__cuda_seen_of(tile, rows.keys[1], rows.number[1])};
        const bool sees = seen[0].begin < seen[0].end || seen[1].begin < seen[1].end;
        nsa__cuda_product_nt_await<T, BLOCK_N, 0>(s);
        if (!nsa__cuda_takes_part<T, BLOCK_N>(sees, tile.readers != 0)) continue;
        nsa__cuda_product_nt_finish<T, DK, BLOCK_N, BLOCK_M>(s, q, warp_row, k);
        nsa__cuda_mask_tile(s, seen, params.scale);
        nsa__cuda_softmax_tile(s, rows, shrink);
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
            for (int n = 0; n < DV / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[n][e] *= shrink[e / 2];
        nsa__cuda_product_nn<T, BLOCK_N, DV>(out, s, v, 0);
        if (tile.bad)
#pragma unroll
            for (int h = 0; h < 2; h++)
                rows.bad[h] |= (nsa__cuda_key_span_bits(seen[h]) & tile.bad) != 0;
    }
    if (!LISTS && params.gathered)
        nsa__cuda_gathered_end<T>(params, at, tile_rows, rows, out);
    else
        nsa__cuda_forward_end<T>(params, at, tile_rows, rows, out);
}

template <typename T, int DK, int DV> struct nsa__cuda_forward_launch {
    template <int HOPPER>
    static nsa_status launch_as(nsa__cuda_attend_params params, cudaStream_t stream) {
        using shape = nsa__cuda_forward_shape<T, DK, DV, HOPPER>;
        dim3 grid;
        NSA__CHECK(nsa__cuda_query_grid(&params, shape::TILE, &grid, stream));
        const bool lists = params.branch == NSA__KEYS_SLC && !params.gathered;
        return nsa__cuda_status(
            NSA_LAUNCH((lists ? nsa__cuda_attend_forward_kernel<T, DK, DV, true>
                              : nsa__cuda_attend_forward_kernel<T, DK, DV, false>),
                       grid, dim3(32 * shape::WARPS), shape::BYTES, stream, params));
    }
    static nsa_status launch(const nsa__cuda_attend_params &params, cudaStream_t stream) {
        bool hopper;
        NSA__CHECK(nsa__cuda_on_hopper(&hopper));
        if constexpr (nsa__cuda_forward_pipe<T, DK, DV>::value)
            if (hopper) return launch_pipe(params, stream);
        return hopper ? launch_as<1>(params, stream) : launch_as<0>(params, stream);
    }
    static nsa_status launch_pipe(nsa__cuda_attend_params params, cudaStream_t stream) {
        using shape = nsa__cuda_forward_pipe<T, DK, DV>;
        dim3 grid;
        NSA__CHECK(nsa__cuda_query_grid(&params, shape::BLOCK_M, &grid, stream));
        const bool lists = params.branch == NSA__KEYS_SLC && !params.gathered;
        return nsa__cuda_status(NSA_LAUNCH(
            (lists ? nsa__cuda_attend_forward_sm90_kernel<T, DK, DV, true>
                   : nsa__cuda_attend_forward_sm90_kernel<T, DK, DV, false>),
            grid, dim3(shape::CONSUMERS + shape::PRODUCERS), shape::BYTES, stream, params));
    }
};

/* ---- Calls --------------------------------------------------------------------------------- */

static void nsa__cuda_forward_plan(nsa__cuda_attend_params *params, const nsa_desc *d,
                                   nsa__cuda_branch_keys branch, nsa__arena *arena) {
    nsa__cuda_attend_plan(params, d, branch, arena);
    params->chunk = nsa__cuda_gather_chunk(params, d->dim_v + 3);
    if (!params->chunk) return;
    params->chunk_rows = nsa__cuda_gather_rows(params);
    const int64_t partials = params->chunk_rows.total * d->heads * params->list_width;
    nsa__cuda_plan_readers(params, params->chunk, arena);
    params->partial_out = nsa__cuda_take<float>(arena, partials * d->dim_v);
    params->partial_sums = nsa__cuda_take<float2>(arena, partials);
    params->partial_units = nsa__cuda_take<float>(arena, partials);
}

/* Forward of one branch behind its checks; the workspace has nsa__cuda_forward_plan's bytes. */
static nsa_status nsa__cuda_attend_forward_run(const nsa_attend *x, const nsa_desc *d,
                                               nsa__cuda_branch_keys branch, void *workspace,
                                               cudaStream_t stream) {
    if (d->count == 0) return NSA_OK;
    nsa__cuda_attend_params params =
        nsa__cuda_attend_params_of(d, branch, nsa__cuda_forward_plan, workspace);
    params.x = *x;
    NSA__CHECK(nsa__cuda_attend_prepare(&params, stream));
    if (params.chunk)
        return nsa__cuda_gather_run<nsa__cuda_forward_launch>(
            &params, nsa__cuda_gather_forward_kernel, stream);
    return nsa__cuda_attend_choose<nsa__cuda_forward_launch>(params, stream);
}

static nsa_status nsa__cuda_attend_forward(const nsa_attend *x, const nsa_desc *d,
                                           nsa__cuda_branch_keys branch, void *workspace,
                                           size_t bytes, cudaStream_t stream) {
    nsa_desc own;
    d = nsa__cuda_branch_desc(d, branch, &own);
    NSA__CHECK(nsa__cuda_check_desc(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    NSA__CHECK(nsa__cuda_attend_check(x, d, branch, 1));
    nsa_status s = nsa__cuda_check_workspace(
        nsa__cuda_attend_bytes(d, branch, nsa__cuda_forward_plan), workspace, bytes);
    return s == NSA_OK ? nsa__cuda_attend_forward_run(x, d, branch, workspace, stream) : s;
}

#endif

/* decode_select.cuh: the blocks that new tokens read: the sums of p over a group's heads shared out
   among blocks by keys, then one warp ranks.
   Twin: nsa.h, "Decoding" and "Selection". Scores and ranking are select_blocks.cuh's functions, in
   the same order, so that a list is the list that select_blocks.cuh writes.
   Not here: the logarithms that scores hang on (decode_attend.cuh). */
#ifndef NSA_DECODE_SELECT_CUH
#define NSA_DECODE_SELECT_CUH

#include "decode_attend.cuh"

enum { NSA__DECODE_SELECT_WARPS = 4 };

struct nsa__cuda_decode_select_params {
    nsa_desc d; /* first, count: a slice of the step's tokens */
    nsa_select x;
    nsa__cuda_select_plan plan; /* ring: all compressed keys of a query */
    nsa__cuda_places places;
    float *sums;    /* (B, Hk, rows, ring) */
    uint64_t *best; /* (B, Hk, rows, length) */
    int rows;       /* queries, up to whole warps */
    int splits, run_keys;
    float scale2;
};

/* What a block works on. */
struct nsa__cuda_decode_select_place {
    nsa__sequence s;
    int b, kv_head, split, tile;
};

NSA__DEVICE nsa__cuda_decode_select_place
nsa__cuda_decode_select_place_of(const nsa__cuda_decode_select_params &params, int splits) {
    const int block = static_cast<int>(blockIdx.x), heads = params.d.batch * params.d.kv_heads;
    const int pair = block / splits % heads;
    nsa__cuda_decode_select_place p;
    p.split = block % splits;
    p.tile = block / splits / heads;
    p.b = pair / params.d.kv_heads;
    p.kv_head = pair % params.d.kv_heads;
    p.s = nsa__sequence_at(params.d, p.b, params.places);
    return p;
}

/* A warp's queries, its sums and its lists in device memory. */
NSA__DEVICE nsa__cuda_select_warp nsa__cuda_decode_select_warp_of(
    const nsa__cuda_decode_select_params &params, const nsa__cuda_decode_select_place &p, int warps,
    nsa__cuda_select_query *queries, float *lse2, int columns) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    nsa__cuda_select_warp w;
    w.first_query = (p.tile * warps + warp) * params.plan.queries;
    w.visible = w.candidates = 0;
    w.queries = queries + warp * params.plan.queries;
    w.lse2 = lse2 + warp * columns;
    const int64_t row =
        (static_cast<int64_t>(p.b) * params.d.kv_heads + p.kv_head) * params.rows + w.first_query;
    w.ring = params.sums + row * params.plan.ring;
    w.lists = params.best + row * params.plan.length;
    return w;
}

/* Sums of p over the heads, for one run of keys. */
template <typename T, int D, int NT, bool CHUNKS>
static __global__ void __launch_bounds__(32 * NSA__DECODE_SELECT_WARPS,
                                         D <= 128 && sizeof(T) == 2 ? 2 : 1)
    nsa__cuda_decode_select_sums_kernel(nsa__cuda_decode_select_params params) {
    typedef nsa__cuda_select_tile<T, D> shape;
    NSA_SHARED_ALL(bytes);
    T *tiles = reinterpret_cast<T *>(bytes);
    auto *queries = reinterpret_cast<nsa__cuda_select_query *>(tiles + 2 * shape::keys * D);
    float *lse2 =
        reinterpret_cast<float *>(queries + NSA__DECODE_SELECT_WARPS * params.plan.queries);

    const nsa__cuda_decode_select_place p = nsa__cuda_decode_select_place_of(params, params.splits);
    const int tile_queries = NSA__DECODE_SELECT_WARPS * params.plan.queries;
    const int first_query = p.tile * tile_queries, first = p.split * params.run_keys;
    if (first_query >= p.s.count) return;
    const int keys = nsa__cmp_visible(params.d, p.s.tokens,
                                      p.s.first + min(first_query + tile_queries, p.s.count) - 1);
    const int last = min(first + params.run_keys, keys);
    if (first >= last) return;
    nsa__cuda_select_warp w =
        nsa__cuda_decode_select_warp_of(params, p, NSA__DECODE_SELECT_WARPS, queries, lse2, 8 * NT);
    nsa__cuda_select_plan plan = params.plan;
    plan.length = 0; /* lists are the ranking's */
    nsa__cuda_select_begin<false>(w, params.x, params.d, p.s, plan, p.b, p.kv_head);

    nsa__cuda_select_columns<T, D, NT> c;
    if (!CHUNKS)
        nsa__cuda_select_load<T, D, NT, false>(c, w.lse2, params.x, params.d, p.s, plan, p.kv_head,
                                               w.first_query, 0);
    const nsa__cuda_select_keys<T> k = {
        nsa__row_of<const T>(params.x.k, p.s.key_batch, 0, p.kv_head), nullptr};
    nsa__cuda_select_copy<T, D>(tiles, k, params.x.k, params.d, first, keys);
    nsa__cp_async_commit();
    for (int key = first; key < last; key += shape::keys) {
        T *tile = tiles + (key - first) / shape::keys % 2 * shape::keys * D;
        T *next = tiles + ((key - first) / shape::keys + 1) % 2 * shape::keys * D;
        if (key + shape::keys < last)
            nsa__cuda_select_copy<T, D>(next, k, params.x.k, params.d, key + shape::keys, keys);
        nsa__cp_async_commit();
        nsa__cp_async_wait<1>();
        __syncthreads();
        if (key < w.visible)
            nsa__cuda_select_sums<T, D, NT, CHUNKS, false>(c, params.x, params.d, p.s, plan, w,
                                                           p.kv_head, params.scale2, tile, key);
        __syncthreads();
    }
}

/* A warp to a warp's queries of the sums. */
static __global__ void nsa__cuda_decode_select_rank_kernel(nsa__cuda_decode_select_params params) {
    NSA_SHARED(nsa__cuda_select_query, queries, [8]);
    NSA_SHARED(float, lse2, [1]); /* ranking needs none */
    const nsa__cuda_decode_select_place p = nsa__cuda_decode_select_place_of(params, 1);
    if (p.tile * params.plan.queries >= p.s.count) return;
    nsa__cuda_select_warp w = nsa__cuda_decode_select_warp_of(params, p, 1, queries, lse2, 0);
    nsa__cuda_select_begin<false>(w, params.x, params.d, p.s, params.plan, p.b, p.kv_head);
    nsa__cuda_select_rank<false>(params.plan, params.d.score_map, w, 0, w.candidates);
    for (int q = 0; q < params.plan.queries && w.first_query + q < p.s.count; q++)
        nsa__cuda_rank_write(
            nsa__cuda_forced_of(params.d, p.s.tokens, p.s.first + w.first_query + q),
            w.lists + q * params.plan.length,
            nsa__row_of<int32_t>(params.x.blocks, p.s.batch, w.first_query + q, p.kv_head),
            params.plan.width);
}

/* ---- Launches -------------------------------------------------------------------------------- */

/* The plan of select_blocks.cuh with a ring that holds every key. */
static nsa__cuda_select_plan nsa__cuda_decode_select_plan(const nsa_desc *d, size_t element,
                                                          int padded, int wide) {
    nsa__cuda_arena none = {NULL, 0};
    nsa__cuda_select_plan p =
        nsa__cuda_select_plan_of(d, element, padded, wide, nsa__cuda_select_length(d), &none);
    const int keys = nsa_cmp_count(d, d->tokens) + 64; /* the last tile may reach behind them */
    while (p.ring < keys) p.ring *= 2;
    const size_t tiles =
        2 * static_cast<size_t>(element == 2 ? 64 : 32) * static_cast<size_t>(padded) * element;
    const size_t warp = static_cast<size_t>(p.queries) * sizeof(nsa__cuda_select_query) +
                        sizeof(float) * static_cast<size_t>(wide);
    p.warps = NSA__DECODE_SELECT_WARPS;
    p.shared_bytes = tiles + static_cast<size_t>(p.warps) * warp;
    return p;
}

/* What a slice needs, whatever kernel it takes. */
static void nsa__cuda_decode_select_take(nsa__cuda_decode_select_params *params,
                                         nsa__cuda_arena *a) {
    const nsa_desc *d = &params->d;
    int64_t rows = 0;
    for (int wide = 8; wide <= 32; wide *= 2) {
        params->plan = nsa__cuda_decode_select_plan(d, 4, NSA_CUDA_MAX_DIM, wide);
        const int64_t whole =
            nsa__cuda_ceil_div(d->count, params->plan.queries) * params->plan.queries;
        rows = whole > rows ? whole : rows;
    }
    rows *= static_cast<int64_t>(d->batch) * d->kv_heads;
    params->sums = nsa__cuda_take<float>(a, rows * params->plan.ring);
    params->best = nsa__cuda_take<uint64_t>(a, rows * params->plan.length);
}

struct nsa__cuda_decode_select_call {
    const nsa__cuda_decode_select_params *params;
    cudaStream_t stream;
    template <typename T, int D, int NT, bool CHUNKS> nsa_status run() const {
        nsa__cuda_decode_select_params j = *params;
        j.plan = nsa__cuda_decode_select_plan(&j.d, sizeof(T), D, 8 * NT);
        const int64_t warps = nsa__cuda_ceil_div(j.d.count, j.plan.queries);
        const int64_t heads = static_cast<int64_t>(j.d.batch) * j.d.kv_heads;
        j.rows = static_cast<int>(warps * j.plan.queries);
        const int tile = nsa__cuda_select_tile<T, D>::keys;
        j.run_keys = NSA__DECODE_RUN_KEYS > tile ? NSA__DECODE_RUN_KEYS / tile * tile : tile;
        j.splits =
            static_cast<int>(nsa__cuda_ceil_div(nsa_cmp_count(&j.d, j.d.tokens), j.run_keys));
        dim3 sums, rank;
        nsa_status s = nsa__cuda_grid(
            heads * j.splits * nsa__cuda_ceil_div(warps, NSA__DECODE_SELECT_WARPS), &sums);
        if (s == NSA_OK) s = nsa__cuda_grid(heads * warps, &rank);
        if (s == NSA_OK && j.splits)
            s = nsa__cuda_status(NSA_LAUNCH((nsa__cuda_decode_select_sums_kernel<T, D, NT, CHUNKS>),
                                            sums, dim3(32 * NSA__DECODE_SELECT_WARPS),
                                            j.plan.shared_bytes, stream, j));
        if (s != NSA_OK) return s;
        return nsa__cuda_status(
            NSA_LAUNCH(nsa__cuda_decode_select_rank_kernel, rank, dim3(32), 0, stream, j));
    }
};

#endif

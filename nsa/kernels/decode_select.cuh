/* decode_select.cuh: the blocks that new tokens read: the sums of p over a group's heads from the
   scores of decode_attend.cuh, shared out among blocks by keys; then a block ranks each list.
   Twin: nsa.h, "Decoding" and "Selection". Terms, sums and block scores are select_blocks.cuh's
   functions, in the same order, and the ranking takes the same blocks, so that a list is the list
   that select_blocks.cuh writes.
   Not here: scores of keys (decode_attend.cuh). */
#ifndef NSA_DECODE_SELECT_CUH
#define NSA_DECODE_SELECT_CUH

#include "decode_epilogue.cuh"
#include "select_lists.cuh"

enum { NSA__DECODE_SUM_WARPS = 4 };

/* Scores of blocks that the ranking keeps in shared memory; those of longer caches stay in the
   workspace. Tests define it small. */
#ifndef NSA__DECODE_RANK_BLOCKS
#define NSA__DECODE_RANK_BLOCKS 8192
#endif

struct nsa__cuda_decode_select_params {
    nsa__cuda_decode_params cmp;
    nsa_select x;
    nsa__cuda_select_plan plan; /* ring: all compressed keys of a query */
    float *sums;                /* (B, Hk, rows, ring) */
    float *scores;              /* (B, Hk, count, blocks), where they are too many; else NULL */
    int rows;                   /* queries, up to whole products' columns */
    int blocks;                 /* of a query, at most */
    int runs, run_keys;
};

/* Where a thread's columns of a product lie in the scores, and how many keys they have. */
template <int NT> struct nsa__cuda_decode_columns {
    const float *scores[NT][2];
    int keys[NT][2];
};

/* nsa__cuda_select_ring in device memory: nothing is written of queries that are not there. */
struct nsa__cuda_decode_ring : nsa__cuda_select_ring {
    int queries;
    __device__ __forceinline__ void put(int query, int key, float value) const {
        if (query < queries) nsa__cuda_select_ring::put(query, key, value);
    }
};

/* lse of the heads of queries first .. first + queries - 1, a quad to each;
   inf where one is not finite, as selection has them. Totals of them are written if asked for. */
NSA__DEVICE void nsa__cuda_decode_totals(float *lse_of,
                                         const nsa__cuda_decode_select_params &params,
                                         const nsa__sequence &s, int b, int kv_head, int first,
                                         bool writes) {
    const nsa__cuda_decode_params &cmp = params.cmp;
    const nsa_desc &d = cmp.d;
    const int thread = static_cast<int>(threadIdx.x), group = cmp.group;
    const int rows = params.plan.queries * group;
    for (int base = 0; base < rows; base += static_cast<int>(blockDim.x) / 4) {
        const int r = base + thread / 4, i = first + r / group;
        const bool there = r < rows && i < s.count;
        const int64_t row =
            (static_cast<int64_t>(b) * d.count + i) * d.heads + kv_head * group + r % group;
        const nsa__cuda_key_span keys = nsa__cuda_keys_of(cmp, s.tokens, s.first + i);
        const float2 total =
            nsa__cuda_decode_total(cmp, row, there ? nsa__cuda_decode_tiles(cmp, keys) : 0);
        if (r >= rows || thread % 4 != 0) continue;
        const float lse = nsa__cuda_decode_lse(total);
        lse_of[r] = nsa__finite(lse) ? lse : __uint_as_float(0x7f800000u);
        if (there && writes) cmp.totals[row] = total;
    }
    __syncthreads();
}

/* Sums of p over the heads, for one run of keys: a warp takes 16 of them, then others. */
template <int NT, bool CHUNKS>
static __global__ void __launch_bounds__(32 * NSA__DECODE_SUM_WARPS, 2)
    nsa__cuda_decode_sums_kernel(const NSA_GRID_CONSTANT nsa__cuda_decode_select_params params) {
    NSA_SHARED_ALL(bytes);
    float *const lse = reinterpret_cast<float *>(bytes);
    const nsa_desc &d = params.cmp.d;
    const nsa__cuda_select_plan &plan = params.plan;
    const int lane = static_cast<int>(threadIdx.x) % 32, group = params.cmp.group;
    const int block = static_cast<int>(blockIdx.x), heads = d.batch * d.kv_heads;
    const int run_index = block % params.runs, pair = block / params.runs % heads;
    const int b = pair / d.kv_heads, kv_head = pair % d.kv_heads;
    const int first_query = block / params.runs / heads * plan.queries;
    const nsa__sequence s = nsa__sequence_at(d, b, params.cmp.positions);
    if (first_query >= s.count) return;
    const int last_query = s.first + min(first_query + plan.queries, s.count) - 1;
    const int first = run_index * params.run_keys;
    const int last = min(first + params.run_keys, nsa__cmp_visible(d, s.tokens, last_query));
    if (first >= last && run_index > 0) return;
    nsa__cuda_decode_totals(lse, params, s, b, kv_head, first_query, run_index == 0);

    float *const sums =
        params.sums + (static_cast<int64_t>(pair) * params.rows + first_query) * plan.ring;
    for (int chunk = 0; chunk < (CHUNKS ? plan.chunks : 1); chunk++) {
        nsa__cuda_decode_columns<NT> c;
        float mine[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int column = 8 * n + lane % 4 * 2 + e, q = column / plan.columns;
                const int i = first_query + q, g = chunk * plan.columns + column % plan.columns;
                const bool there = i < s.count && g < group;
                c.keys[n][e] = there ? nsa__cmp_visible(d, s.tokens, s.first + i) : 0;
                c.scores[n][e] =
                    params.cmp.scores +
                    ((static_cast<int64_t>(b) * d.count + i) * d.heads + kv_head * group + g) *
                        params.cmp.score_row;
                mine[n][e] = there ? lse[q * group + g] : __uint_as_float(0x7f800000u);
            }
        const nsa__cuda_decode_ring ring = {{sums, plan.ring, chunk > 0}, s.count - first_query};
        for (int key = first + static_cast<int>(threadIdx.x) / 32 * 16; key < last;
             key += 16 * NSA__DECODE_SUM_WARPS) {
            float p[NT][4];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int at = key + lane / 4 + e / 2 * 8;
                    const float product = at < c.keys[n][e % 2] ? c.scores[n][e % 2][at] : 0.0f;
                    p[n][e] = nsa__cuda_select_term<false>(plan, product, params.cmp.scale,
                                                           mine[n][e % 2]);
                }
            nsa__cuda_select_sum_heads<NT>(p, ring, plan.columns, key + lane / 4);
        }
    }
}

/* A block ranks the blocks of one query and kv head. */
static __global__ void __launch_bounds__(NSA__RANK_THREADS)
    nsa__cuda_decode_rank_kernel(const NSA_GRID_CONSTANT nsa__cuda_decode_select_params params) {
    NSA_SHARED(nsa__cuda_rank_memory, memory, [1]);
    NSA_SHARED_ALL(bytes);
    const nsa_desc &d = params.cmp.d;
    const int block = static_cast<int>(blockIdx.x), row = block % d.count, pair = block / d.count;
    const int b = pair / d.kv_heads, kv_head = pair % d.kv_heads, group = params.cmp.group;
    const nsa__sequence s = nsa__sequence_at(d, b, params.cmp.positions);
    if (row >= s.count) return;
    float *const scores = params.scores
                              ? params.scores + static_cast<int64_t>(block) * params.blocks
                              : reinterpret_cast<float *>(bytes);
    const float2 *totals =
        params.cmp.totals + (static_cast<int64_t>(b) * d.count + row) * d.heads + kv_head * group;
    bool bad = false;
    for (int g = static_cast<int>(threadIdx.x); g < group; g += NSA__RANK_THREADS)
        bad |= !nsa__finite(nsa__cuda_decode_lse(totals[g]));
    bad = __syncthreads_or(bad);
    const nsa__cuda_forced_blocks f = nsa__cuda_forced_of(d, s.tokens, s.first + row);
    const int visible = bad ? -1 : nsa__cmp_visible(d, s.tokens, s.first + row);
    const float *const sums =
        params.sums + (static_cast<int64_t>(pair) * params.rows + row) * params.plan.ring;
    for (int j = f.init + static_cast<int>(threadIdx.x); j < f.local; j += NSA__RANK_THREADS)
        scores[j] = nsa__cuda_select_score(params.plan, d.score_map, sums, visible, j);
    __syncthreads();
    nsa__cuda_rank_row(memory[0], NSA_F32, scores, f,
                       nsa__row_of<int32_t>(params.x.blocks, s.batch, row, kv_head),
                       params.plan.width);
}

/* ---- Launches -------------------------------------------------------------------------------- */

/* The plan of select_blocks.cuh with a ring that holds every key. */
static nsa__cuda_select_plan nsa__cuda_decode_select_plan(const nsa_desc *d, size_t element,
                                                          int padded, int wide) {
    nsa__arena none = {NULL, 0};
    nsa__cuda_select_plan p = nsa__cuda_select_plan_of(d, element, padded, wide, 1, &none);
    const int keys = nsa_cmp_count(d, d->tokens) + 16; /* the last product may reach behind them */
    p.ring = 1;
    while (p.ring < keys) p.ring *= 2;
    p.shared_bytes = sizeof(float) * static_cast<size_t>(p.queries) *
                     static_cast<size_t>(d->heads / d->kv_heads);
    return p;
}

/* What a slice needs, whatever kernel it takes. */
static void nsa__cuda_decode_select_take(nsa__cuda_decode_select_params *params, nsa__arena *a) {
    const nsa_desc *d = &params->cmp.d;
    const int64_t pairs = static_cast<int64_t>(d->batch) * d->kv_heads;
    int64_t rows = 0;
    for (int wide = 8; wide <= 32; wide *= 2) {
        params->plan = nsa__cuda_decode_select_plan(d, 4, NSA_CUDA_MAX_DIM, wide);
        const int64_t whole =
            nsa__cuda_ceil_div(d->count, params->plan.queries) * params->plan.queries;
        rows = whole > rows ? whole : rows;
    }
    params->blocks = nsa_slc_count(d, d->tokens);
    params->sums = nsa__cuda_take<float>(a, rows * pairs * params->plan.ring);
    params->scores = NULL;
    if (params->blocks > NSA__DECODE_RANK_BLOCKS)
        params->scores = nsa__cuda_take<float>(a, pairs * d->count * params->blocks);
}

struct nsa__cuda_decode_select_call {
    const nsa__cuda_decode_select_params *params;
    cudaStream_t stream;
    template <typename T, int D, int NT, bool CHUNKS> nsa_status run() const {
        nsa__cuda_decode_select_params j = *params;
        const nsa_desc *d = &j.cmp.d;
        j.plan = nsa__cuda_decode_select_plan(d, sizeof(T), D, 8 * NT);
        const int64_t tiles = nsa__cuda_ceil_div(d->count, j.plan.queries);
        const int64_t heads = static_cast<int64_t>(d->batch) * d->kv_heads;
        j.rows = static_cast<int>(tiles * j.plan.queries);
        j.run_keys = NSA__DECODE_RUN_KEYS;
        const int64_t runs = nsa__cuda_ceil_div(nsa_cmp_count(d, d->tokens), j.run_keys);
        j.runs = static_cast<int>(runs > 1 ? runs : 1);
        const size_t scores = j.scores ? 0 : sizeof(float) * static_cast<size_t>(j.blocks);
        dim3 sums, rank;
        NSA__CHECK(nsa__cuda_grid(heads * j.runs * tiles, &sums));
        NSA__CHECK(nsa__cuda_grid(heads * d->count, &rank));
        NSA__CHECK(nsa__cuda_status(NSA_LAUNCH((nsa__cuda_decode_sums_kernel<NT, CHUNKS>), sums,
                                               dim3(32 * NSA__DECODE_SUM_WARPS),
                                               j.plan.shared_bytes, stream, j)));
        return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_rank_kernel, rank,
                                           dim3(NSA__RANK_THREADS), scores, stream, j));
    }
};

#endif

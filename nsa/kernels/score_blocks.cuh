/* score_blocks.cuh: lists of the best blocks by scores that are no attention: weighed products,
   summed over the heads of a group, of every block the largest or the mean.
   Twin: nsa.h, "Selection by scores of keys". The kernel is that of
   select_blocks.cuh, the ranking that of select_lists.cuh.
   Not here: a T x T buffer. Queries go chunk by chunk; the workspace holds the scores of one. */
#ifndef NSA_SCORE_BLOCKS_CUH
#define NSA_SCORE_BLOCKS_CUH

#include "select_blocks.cuh"
#include "select_lists.cuh"

/* Lists of a chunk, enough to fill a device, but no fewer queries than some blocks of threads work
   on; tests define both small. */
#ifndef NSA__SCORE_LISTS
#define NSA__SCORE_LISTS 2048
#endif
#ifndef NSA__SCORE_QUERIES
#define NSA__SCORE_QUERIES 64
#endif

/* Queries of a chunk, of each sequence. */
static int nsa__cuda_score_chunk(const nsa_desc *d) {
    const nsa__cuda_extent blocks =
        nsa__cuda_extent_of(d, nsa_slc_count(d, d->tokens), 1, d->slc_block, 1);
    int64_t most = NSA__SCORE_LISTS / (static_cast<int64_t>(d->batch) * d->kv_heads);
    int64_t least = NSA__SCORE_QUERIES;
    if (blocks.packed) { /* as many scores as of one sequence of all the rows */
        most = NSA__SCORE_LISTS * blocks.total / (d->batch * blocks.each * d->kv_heads);
        least /= 8;
    }
    const int64_t queries = most > least ? most : least;
    return queries < d->count ? static_cast<int>(queries) : d->count;
}

/* The scores of one chunk, (B, chunk, Hk, blocks). */
static nsa_tensor nsa__cuda_score_take(const nsa_desc *d, nsa__arena *a) {
    const int64_t blocks = nsa_slc_count(d, d->tokens), chunk = nsa__cuda_score_chunk(d);
    const int64_t rows = d->batch * chunk * d->kv_heads;
    nsa_tensor scores = {};
    scores.data = nsa__cuda_take<float>(a, rows * blocks);
    scores.dtype = NSA_F32;
    scores.batch = chunk * d->kv_heads * blocks;
    scores.token = d->kv_heads * blocks;
    scores.head = blocks;
    return scores;
}

/* Where the keys of packed sequences begin, if they stand for several tokens. */
static int32_t *nsa__cuda_score_begins(const nsa_desc *d, nsa__arena *a) {
    return nsa__cuda_take<int32_t>(a, d->begins ? d->batch + int64_t(1) : 0);
}

/* One chunk's scores; keys are compressed blocks of their tokens. */
struct nsa__cuda_score_call {
    const nsa_select *x;
    const nsa_desc *d; /* by list */
    const nsa_score *score;
    int32_t *cmp_begins;
    int lists_per_kv_head;
    bool own;
    cudaStream_t stream;
    template <typename T, int D, int NT, bool CHUNKS> nsa_status run() const {
        nsa__arena none = {NULL, 0};
        nsa__cuda_select_plan p = nsa__cuda_select_plan_of(d, sizeof(T), D, 8 * NT, 0, &none);
        p.own = own;
        p.cmp_begins = cmp_begins;
        p.lists_per_kv_head = lists_per_kv_head;
        p.act = score->act;
        p.pool = score->pool;
        dim3 grid;
        const nsa_status s = nsa__cuda_grid(p.tiles.total * d->kv_heads, &grid);
        if (s != NSA_OK) return s;
        return nsa__cuda_status(NSA_LAUNCH((nsa__cuda_select_blocks_kernel<T, D, NT, CHUNKS, true>),
                                           grid, dim3(32u * static_cast<unsigned>(p.warps)),
                                           p.shared_bytes, stream, *d, *x, p, 1.0f));
    }
};

static nsa_status nsa__cuda_score_run(const nsa_score *x, const nsa_desc *d, void *workspace,
                                      cudaStream_t stream) {
    nsa__arena a = nsa__cuda_arena_at(workspace);
    const nsa_desc all = nsa__cuda_all_queries(d), by = nsa__cuda_by_list(&all);
    const nsa_tensor room = nsa__cuda_score_take(&by, &a);
    int32_t *const cmp_begins = nsa__cuda_score_begins(d, &a);
    const int chunk = nsa__cuda_score_chunk(&by);
    const bool own = !x->scores.data;
    nsa_status s =
        d->cmp_stride > 1 && d->begins ? nsa__cuda_cmp_begins(d, cmp_begins, stream) : NSA_OK;
    for (int first = 0; first < d->count && s == NSA_OK; first += chunk) {
        nsa_desc part = by;
        part.first += first;
        part.count = d->count - first < chunk ? d->count - first : chunk;
        nsa_select scored = {};
        scored.q = nsa__cuda_view_from(x->q, first);
        scored.k = x->k;
        scored.lse = nsa__cuda_view_from(x->weights, first);
        scored.scores = own ? room : nsa__cuda_view_from(x->scores, first);
        const nsa_rank ranked = {scored.scores, nsa__cuda_view_from(x->blocks, first)};
        const nsa__cuda_score_call call = {
            &scored, &part, x, cmp_begins, nsa__cuda_lists_per_kv_head(d), own, stream};
        s = nsa__cuda_select_choose(x->q.dtype, &part, call);
        if (s == NSA_OK) s = nsa__cuda_rank_queries_run(&ranked, &part, own, stream);
    }
    return s;
}

static size_t nsa__cuda_score_bytes(const nsa_desc *d) {
    const nsa_desc by = nsa__cuda_by_list(d);
    nsa__arena a = {NULL, 0};
    nsa__cuda_score_take(&by, &a);
    nsa__cuda_score_begins(d, &a);
    return nsa__cuda_arena_bytes(&a);
}

extern "C" size_t nsa_cuda_score_blocks_workspace_size(const nsa_desc *d) {
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    return nsa__cuda_check_desc(d) == NSA_OK ? nsa__cuda_score_bytes(d) : 0;
}

extern "C" nsa_status nsa_cuda_score_blocks(const nsa_score *x, const nsa_desc *d, void *workspace,
                                            size_t bytes, cudaStream_t stream) {
    nsa_desc own;
    NSA__CHECK(nsa__score_options(x, NSA__USES_SLC | NSA__USES_FORCED, &d, &own));
    const nsa__checked c = nsa__cuda_checked_of(d, nsa__cuda_dtype_of(&x->q, d), 1, x->stride > 1);
    NSA__CHECK(nsa__check_call(&c, nsa__score_views, NSA__SCORE_VIEWS, NULL, x));
    NSA__CHECK(nsa__cuda_check_workspace(nsa__cuda_score_bytes(d), workspace, bytes));
    return nsa__cuda_score_run(x, d, workspace, stream);
}

#endif

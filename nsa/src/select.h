/* ---- Selection ----------------------------------------------------------------------------------
   Twin: kernels/select_blocks.cuh. Not here: selection from cmp's own scores (attend_forward.h). */
#pragma once
#include "attend_rows.h"
#include "select_scores.h"

typedef struct nsa__rank_job {
    const nsa_rank *x;
    const nsa_desc *d;
    const nsa__tiles *tiles;
    nsa__seq seq;
} nsa__rank_job;

/* Queries of a task. */
enum { NSA__RANK_QUERIES = 8 };

/* Eq. 11 for some queries: their scores as reals, then as ordered integers, then the lists. */
static void nsa__rank_task(const void *context, int64_t nth, void *scratch) {
    const nsa__rank_job *job = (const nsa__rank_job *)context;
    const nsa_rank *x = job->x;
    nsa_real *scores = (nsa_real *)scratch;
    int64_t end = nsa__min(job->seq.count, (nth + 1) * NSA__RANK_QUERIES);
    for (int64_t t = nth * NSA__RANK_QUERIES; t < end; t++)
        for (int head = 0; head < nsa__list_heads(job->d); head++) {
            int query = job->seq.first + (int)t;
            int n = nsa__slc_candidates(job->d, job->seq.tokens, query);
            int64_t row = job->seq.row + t;
            nsa__load(scores, x->scores.dtype, nsa__row(&x->scores, job->seq.batch, row, head), n);
            nsa__order(scores, n);
            nsa__rank(scores, n, nsa__forced_local(job->d, job->seq.tokens, query), job->d,
                      job->tiles, (int32_t *)nsa__row(&x->blocks, job->seq.batch, row, head));
        }
}

/* Scratch of a thread: the scores of one list, in whole vectors. */
static size_t nsa__rank_scratch(const nsa_desc *d) {
    nsa__arena scratch = {NULL, 0};
    nsa__alloc_reals(&scratch, (int64_t)nsa_slc_count(d, d->tokens) + NSA__LANES);
    return scratch.used;
}

NSA_API size_t nsa_rank_queries_workspace_size(const nsa_desc *d) {
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    return nsa_desc_check(d) == NSA_OK ? nsa__workspace_bytes(d, 0, nsa__rank_scratch(d)) : 0;
}

NSA_API nsa_status nsa_rank_queries(const nsa_rank *x, const nsa_desc *d, void *workspace,
                                    size_t bytes) {
    nsa__rank_job job;
    nsa__team team;
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    NSA__CHECK(nsa_desc_check(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    const nsa__checked c = nsa__checked_of(d, 1, 0);
    NSA__CHECK(nsa__check_views(&c, nsa__rank_views, NSA__RANK_VIEWS, x));
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, 0, nsa__rank_scratch(d)));
    job.x = x;
    job.d = d;
    job.tiles = nsa__tiles_of(d->isa);
    for (job.seq = nsa__seq_begin(d); job.seq.nth < d->batch; nsa__seq_next(d, &job.seq))
        nsa__run(&team, nsa__ceil_div(job.seq.count, NSA__RANK_QUERIES), nsa__rank_task, &job);
    return NSA_OK;
}

/* Scratch of a task of nsa_select_blocks: as a forward task's, without values and softmax. */
typedef struct nsa__selecting {
    nsa__tile_iter iter;
    nsa__scoring scoring;
    nsa_real *q, *lse;
    unsigned char *nonfinite; /* of every row */
} nsa__selecting;

static void nsa__selecting_alloc(nsa__selecting *f, const nsa__attend_plan *p, nsa__arena *a) {
    int64_t rows = (int64_t)p->cut.task_queries * p->group;
    nsa__tile_iter_alloc(&f->iter, p, a, a);
    nsa__scoring_alloc(&f->scoring, p, a);
    f->q = nsa__alloc_reals(a, rows * p->k.wide);
    f->lse = nsa__alloc_reals(a, rows);
    f->nonfinite = (unsigned char *)nsa__alloc(a, rows, 1);
}

/* Scores of all compressed keys up to the last query's, for all queries of a task; then their
   lists. Keys that a query does not see are not masked, because nsa__scores does not read their
   p_cmp. */
static void nsa__select_task(const void *context, int64_t nth, void *scratch) {
    const nsa__head_job *job = nsa__job_of(context, &nth);
    const nsa__attend_plan *p = job->plan;
    nsa__selecting f;
    nsa__arena a = {(char *)scratch, 0};
    nsa__selecting_alloc(&f, p, &a);
    nsa__tile_iter_begin(&f.iter, job, nth);
    int rows = f.iter.queries * p->group;
    memset(f.nonfinite, 0, (size_t)rows);
    nsa__load_queries(job, &f.iter, &p->x->q, &p->k, f.q, f.nonfinite);
    for (int r = 0; r < rows; r++) f.lse[r] = nsa__load_lse(job, &f.iter, r, f.nonfinite);
    const nsa__matrix q = {f.q, p->k.stride, 1, NULL};
    for (int tile = 0; tile < f.iter.tile_end; tile++) {
        ptrdiff_t key = (ptrdiff_t)tile * p->cut.tile;
        const nsa__matrix k_t = {job->k_t + key * p->k.depth, p->cut.tile, 1, NULL};
        const nsa__result scores =
            nsa__result_at(f.scoring.s + key, (ptrdiff_t)f.scoring.stride, 0);
        nsa__product_along(&p->k, rows, p->cut.tile, &q, &k_t, &scores);
    }
    nsa__select_queries(job, &f.iter, &f.scoring, f.lse, f.nonfinite);
}

static void nsa__select_layout(nsa__head_job *jobs, const nsa__attend_plan *p, nsa__arena *shared) {
    for (int i = 0; i < p->cut.head_slots; i++) {
        jobs[i] = nsa__job_make(p);
        nsa__alloc_keys(&jobs[i], shared, 0, 0);
        jobs[i].stencil = nsa__alloc_reals(shared, nsa__stencil_size(p->d));
    }
}

/* The plan of cmp's forward without values. x has q, k and lse; NULL in a size query. */
static nsa__attend_plan nsa__select_plan(const nsa_attend *x, const nsa_select *select,
                                         const nsa_desc *d) {
    nsa__attend_plan p = nsa__attend_plan_of(x, NULL, d, NSA__CMP, 1, nsa__heads_near(d));
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__selecting f;
    nsa__arena shared = {NULL, 0}, scratch = {NULL, 0};
    p.options.select = select;
    nsa__plan_pairs(&p);
    nsa__select_layout(jobs, &p, &shared);
    nsa__selecting_alloc(&f, &p, &scratch);
    p.shared = shared.used;
    p.scratch = nsa__pack_scratch(&p, scratch.used);
    return p;
}

static void nsa__select_heads(nsa__head_job *jobs, const nsa__team *team) {
    nsa__run(team, nsa__query_tasks(jobs), nsa__select_task, jobs);
}

static nsa_status nsa__select_run(const nsa_select *x, const nsa_desc *d, void *workspace,
                                  size_t bytes) {
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__team team;
    nsa_attend attend;
    nsa__arena shared = nsa__arena_at(workspace);
    memset(&attend, 0, sizeof attend);
    attend.q = x->q;
    attend.k = x->k;
    attend.lse = x->lse;
    const nsa__attend_plan p = nsa__select_plan(&attend, x, d);
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, p.shared, p.scratch));
    nsa__select_layout(jobs, &p, &shared);
    for (int i = 0; i < p.cut.head_slots; i++) nsa__fill_stencil(&jobs[i]);
    nsa__each_heads(jobs, &team, 0, nsa__select_heads);
    return NSA_OK;
}

NSA_API size_t nsa_select_blocks_workspace_size(const nsa_desc *d) {
    if (nsa_desc_check(d) != NSA_OK) return 0;
    nsa__attend_plan p = nsa__select_plan(NULL, NULL, d);
    return nsa__attend_plan_bytes(&p, nsa__threads(d));
}

static nsa_status nsa__select_check(const nsa_select *x, const nsa_desc *d, const int *fields) {
    nsa__checked c = nsa__checked_of(d, 1, 1);
    c.fields = fields;
    return nsa__check_views(&c, nsa__select_views, NSA__SELECT_VIEWS, x);
}

NSA_API nsa_status nsa_select_blocks(const nsa_select *x, const nsa_desc *d, void *workspace,
                                     size_t bytes) {
    NSA__CHECK(nsa_desc_check(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    NSA__CHECK(nsa__select_check(x, d, NULL));
    return nsa__select_run(x, d, workspace, bytes);
}

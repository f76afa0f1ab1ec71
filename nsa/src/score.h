/* ---- Selection by scores of keys -------------------------------------------------------------
   Twin: kernels/score_blocks.cuh. Not here: ranking (lists.h), p_cmp (select_scores.h).
   Tasks iterate over keys as attention does, tile by tile. nsa_select_blocks keeps all scores of
   cmp's keys and ends as cmp's forward does. nsa_score_blocks has scores that are no attention:
     of_key[i] = sum_h weights[t, h] act(q[t, h] . k[i]) for query t and the heads h of a group
   The score of block j is the maximum or the mean of of_key[i] over those i of the block that t
   sees. A tile may hold parts of several blocks, and a block may cover several tiles, so a block's
   score is pooled part by part, in the order of its keys. A task has some queries and all tiles. A
   sequence of few queries would be one such a head. There a task has all queries and some tiles,
   which it reads in place and which end where a block does. */
#pragma once
#include "attend.h"

/* A task and its scratch. */
typedef struct nsa__scorer {
    const nsa_score *x; /* NULL: nsa_select_blocks */
    nsa__tile_iter iter;
    nsa_real *q;              /* of every row; for a pool not scaled */
    nsa_real *of_row;         /* of every row: its lse; for a pool its weight, or 1 */
    unsigned char *nonfinite; /* of every row: 1 if its q or that number is not finite */
    nsa__scoring scoring;     /* nsa_select_blocks */
    nsa_real *s;              /* of every row of a batch: q . k for the keys of the tile at hand */
    nsa_real *scores;         /* of every query and selection block, pooled so far */
    nsa__in_place in_place;
} nsa__scorer;

/* The context of the tasks: the head jobs, and the arguments that a head job does not have. */
typedef struct nsa__scorer_jobs {
    nsa__head_job keys[NSA__HEADS_NEAR]; /* first: nsa__job_of takes the context for it */
    const nsa_score *x;
    nsa_real *scores; /* in place: of the one job at hand, whose tasks share them */
    int64_t tiles;    /* in place: of a task */
} nsa__scorer_jobs;

/* Numbers from one query's scores to the next one's. */
static int64_t nsa__scorer_stride(const nsa_desc *d) {
    return nsa__ceil_div(nsa_slc_count(d, d->tokens), NSA__LANES) * NSA__LANES;
}

/* Queries of the job whose scores are shared: none if no sequence has few. */
static int64_t nsa__scorer_shared(const nsa__attend_plan *p) {
    const int few = p->cut.in_place_max, ragged = p->d->counts || p->d->begins;
    return ragged || p->d->count <= few ? nsa__min(p->d->count, few) : 0;
}

static void nsa__scorer_alloc(nsa__scorer *f, const nsa__attend_plan *p, nsa__arena *a) {
    int64_t rows = (int64_t)p->cut.task_queries * p->group;
    nsa__tile_iter_alloc(&f->iter, p, a, a);
    f->q = nsa__alloc_reals(a, (rows + NSA__LANES) * p->k.wide);
    f->of_row = nsa__alloc_reals(a, rows);
    f->nonfinite = (unsigned char *)nsa__alloc(a, rows, 1);
    if (!p->cut.in_place_max) { /* nsa_select_blocks, which has all keys packed */
        nsa__scoring_alloc(&f->scoring, p, a);
        return;
    }
    f->s = nsa__alloc_reals(a, rows * p->cut.tile);
    nsa__in_place_queries(&f->in_place, p, a);
    nsa__in_place_alloc(&f->in_place, p, a);
    if (p->d->count > p->cut.in_place_max)
        f->scores = nsa__alloc_reals(a, p->cut.task_queries * nsa__scorer_stride(p->d));
}

/* One head's part of n keys: of_key[i] += weight act(s[i]). */
NSA__COMPILED static void nsa__scorer_add_head(nsa_real *of_key, const nsa_real *s, int n,
                                               nsa_real weight, nsa_score_act act) {
    if (act == NSA_SCORE_RELU)
        for (int i = 0; i < n; i++) of_key[i] += weight * (s[i] > 0 ? s[i] : 0);
    else
        for (int i = 0; i < n; i++) of_key[i] += weight * s[i];
}

/* Pools keys begin .. end - 1 of a tile, which lie in one block, into the block's score.
   `nonfinite` has a bit for each non-finite key of the tile. One such key makes the score NaN. NaN
   is found by its order, because -ffast-math folds comparisons with it. */
static void nsa__scorer_pool(nsa_real *score, const nsa_real *of_key, int begin, int end,
                             uint64_t nonfinite, nsa_score_pool pool) {
    if (nonfinite & nsa__bits(begin, end)) *score = nsa__nan();
    if (nsa__score_order(*score) == 0) return;
    for (int i = begin; i < end; i++) {
        if (pool == NSA_POOL_MEAN)
            *score += of_key[i];
        else
            *score = of_key[i] > *score ? of_key[i] : *score;
    }
}

/* Keys of a block. */
static int nsa__scorer_block(const nsa_desc *d) {
    return d->slc_block / d->cmp_stride;
}

/* Query i of a batch: adds up the heads' scores of keys, then pools them block by block, up to the
   last key that the query sees. */
static void nsa__scorer_pool_keys(const nsa__scorer *f, const nsa__head_job *job,
                                  const nsa__batch *b, int i) {
    const nsa__attend_plan *p = job->plan;
    const int a = b->query[i], block = nsa__scorer_block(p->d), n = b->end - b->begin;
    const int end = (int)nsa__min(b->key + (int64_t)n, nsa__span_end(job, f->iter.first + a));
    nsa_real of_key[NSA__TILE] = {0};
    for (int g = 0; g < p->group; g++)
        nsa__scorer_add_head(of_key, f->s + (ptrdiff_t)(i * p->group + g) * p->cut.tile, n,
                             f->of_row[a * p->group + g], f->x->act);
    for (int key = b->key; key < end;) {
        int j = key / block, until = (int)nsa__min((j + (int64_t)1) * block, end);
        nsa__scorer_pool(f->scores + a * nsa__scorer_stride(p->d) + j, of_key, key - b->key,
                         until - b->key, f->in_place.nonfinite, f->x->pool);
        key = until;
    }
}

/* One product for all rows of a batch; then each of its queries pools what it sees. Of those that
   it does not see, nsa__scores reads no p_cmp. */
static void nsa__scorer_batch(nsa__scorer *f, const nsa__head_job *job, const nsa__batch *b) {
    const ptrdiff_t stride = f->x ? job->plan->cut.tile : (ptrdiff_t)f->scoring.stride;
    nsa_real *s = f->x ? f->s : f->scoring.s + b->row[0] * stride + b->key;
    nsa__batch_scores(&f->in_place, job, b, f->q, stride, s);
    for (int i = 0; f->x && i < b->queries; i++) nsa__scorer_pool_keys(f, job, b, i);
}

/* Ends one query: divides sums by the keys seen if the mean is asked for, stores the scores, ranks
   them. The last candidate may be cut by the query's own position, and have no key then. */
static void nsa__scorer_end(const nsa__scorer *f, const nsa__head_job *job, int a) {
    const nsa__attend_plan *p = job->plan;
    const nsa_desc *d = p->d;
    int query = f->iter.first + a, nonfinite = 0, block = nsa__scorer_block(d);
    int n = nsa__slc_candidates(d, job->seq.tokens, query);
    nsa_real *scores = f->scores + a * nsa__scorer_stride(d);
    for (int g = 0; g < p->group; g++) nonfinite |= f->nonfinite[a * p->group + g];
    if (nonfinite) memset(scores, 0, (size_t)n * sizeof *scores);
    for (int j = 0; j < n; j++) {
        int64_t keys = nsa__min(block, nsa__span_end(job, query) - (int64_t)j * block);
        if (keys <= 0)
            scores[j] = nsa__minus_infinity();
        else if (f->x->pool == NSA_POOL_MEAN)
            scores[j] /= (nsa_real)keys;
    }
    nsa__store_list(job, query, scores);
}

/* Loads the rows of q and their numbers, and marks rows that are not finite. */
static void nsa__scorer_begin(nsa__scorer *f, const nsa__head_job *job, int64_t task) {
    const nsa__attend_plan *p = job->plan;
    const nsa_tensor *of_row = f->x ? &f->x->weights : &p->x->lse;
    nsa__tile_iter_begin(&f->iter, job, task);
    int rows = f->iter.queries * p->group;
    memset(f->nonfinite, 0, (size_t)rows);
    nsa__load_queries(job, &f->iter, &p->x->q, &p->k, f->q, f->nonfinite);
    for (int r = 0; r < rows; r++)
        f->of_row[r] = of_row->data ? nsa__load_number(job, &f->iter, of_row, r, f->nonfinite) : 1;
}

/* Tiles of a task in place: about NSA__SCORED_TILES, or a thread's share, as whole blocks too. */
static int64_t nsa__scorer_task_tiles(const nsa__head_job *job, int threads) {
    const int tile = job->plan->cut.tile;
    const int64_t block = nsa__scorer_block(job->plan->d);
    const int64_t least = block / nsa__min(tile, block & -block);
    const int64_t share = nsa__max(1, nsa__ceil_div(job->tile_end, threads));
    return nsa__ceil_div(nsa__min(NSA__SCORED_TILES, share), least) * least;
}

/* All tiles up to the last query's of tiles `begin` .. end - 1. Pools start at 0 for a sum, at the
   lowest number for a maximum. */
static void nsa__scorer_tiles(nsa__scorer *f, const nsa__head_job *job, int64_t begin,
                              int64_t tiles) {
    const nsa__attend_plan *p = job->plan;
    const int64_t stride = nsa__scorer_stride(p->d), block = nsa__scorer_block(p->d);
    const int64_t from = begin * p->cut.tile / block;
    const int64_t to = nsa__min(stride, nsa__ceil_div((begin + tiles) * p->cut.tile, block));
    for (int a = 0; f->x && a < f->iter.queries; a++)
        for (int64_t j = from; j < to; j++)
            f->scores[a * stride + j] = f->x->pool == NSA_POOL_MEAN ? 0 : NSA__LOWEST;
    f->iter.tile = (int)begin - 1;
    f->iter.tile_end = (int)nsa__min(f->iter.tile_end, begin + tiles);
    while (nsa__tile_iter_next(&f->iter, job)) {
        const nsa__batch b = nsa__batch_at(&f->iter, job, 0);
        nsa__scorer_batch(f, job, &b);
    }
}

/* The scratch of a task, and where its scores are. */
static const nsa__head_job *nsa__scorer_make(nsa__scorer *f, const void *context, int64_t *nth,
                                             void *scratch) {
    const nsa__scorer_jobs *jobs = (const nsa__scorer_jobs *)context;
    const nsa__head_job *job = nsa__job_of(context, nth);
    const nsa__attend_plan *p = job->plan;
    nsa__arena a = {(char *)scratch, 0};
    nsa__scorer_alloc(f, p, &a);
    f->x = jobs->x;
    if (job->in_place) f->scores = jobs->scores;
    nsa__scorer_begin(f, job, job->in_place ? 0 : *nth);
    return job;
}

/* Some queries of a head, through all of their tiles, to their lists. */
static void nsa__scorer_task(const void *context, int64_t nth, void *scratch) {
    nsa__scorer f;
    const nsa__head_job *job = nsa__scorer_make(&f, context, &nth, scratch);
    nsa__scorer_tiles(&f, job, 0, f.iter.tile_end);
    for (int i = 0; f.x && i < f.iter.queries; i++) nsa__scorer_end(&f, job, i);
    if (!f.x) nsa__select(job, &f.iter, &f.scoring, f.of_row, f.nonfinite);
}

/* In place: some tiles of a head, for all queries. */
static void nsa__scorer_keys_task(const void *context, int64_t nth, void *scratch) {
    nsa__scorer f;
    const nsa__head_job *job = nsa__scorer_make(&f, context, &nth, scratch);
    const int64_t tiles = ((const nsa__scorer_jobs *)context)->tiles;
    nsa__rows_to_columns(&job->plan->k, f.iter.queries * job->plan->group, f.q, f.in_place.columns,
                         f.in_place.q_t);
    nsa__scorer_tiles(&f, job, nth * tiles, tiles);
}

/* In place: a query, when all tiles are done. */
static void nsa__scorer_end_task(const void *context, int64_t nth, void *scratch) {
    nsa__scorer f;
    const nsa__head_job *job = nsa__scorer_make(&f, context, &nth, scratch);
    nsa__scorer_end(&f, job, (int)nth);
}

/* Returns the scores that tasks share. */
static nsa_real *nsa__scorer_layout(nsa__head_job *jobs, const nsa__attend_plan *p,
                                    nsa__arena *shared) {
    for (int i = 0; i < p->cut.head_slots; i++) {
        jobs[i] = nsa__job_make(p);
        if (p->d->count > p->cut.in_place_max) nsa__alloc_keys(&jobs[i], shared);
    }
    return nsa__alloc_reals(shared, nsa__scorer_shared(p) * nsa__scorer_stride(p->d));
}

/* The plan of a branch whose spans are all keys that a query sees: tokens, or compressed blocks.
   x has q and k, and cmp's lse; NULL in a size query. */
static nsa__attend_plan nsa__scorer_plan(const nsa_attend *x, const nsa_desc *d, int pools) {
    const nsa__branch branch = pools && d->cmp_stride == 1 ? NSA__DENSE : NSA__CMP;
    nsa__attend_plan p = nsa__attend_plan_of(x, NULL, d, branch, 1, nsa__heads_near(d));
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__scorer f;
    nsa__arena shared = {NULL, 0}, scratch = {NULL, 0};
    if (pools) p.k.scale = 1, p.cut.in_place_max = p.cut.batch_queries;
    nsa__scorer_layout(jobs, &p, &shared);
    nsa__scorer_alloc(&f, &p, &scratch);
    p.shared = shared.used;
    p.scratch = nsa__pack_scratch(&p, scratch.used);
    return p;
}

/* In place one head after another, because the threads share its keys. */
static void nsa__scorer_heads(nsa__head_job *jobs, const nsa__team *team) {
    const nsa__attend_plan *p = jobs->plan;
    nsa__scorer_jobs one = *(const nsa__scorer_jobs *)(const void *)jobs;
    nsa__team fewer = *team;
    if (!jobs->in_place) {
        nsa__run(team, nsa__query_tasks(jobs), nsa__scorer_task, jobs);
        return;
    }
    const int64_t queries = jobs->seq.count;
    fewer.threads = nsa__threads_for(team->threads, queries * p->group * p->k.wide * jobs->keys);
    for (int i = 0; i < jobs->heads; i++) {
        one.keys[0] = jobs[i];
        one.keys[0].heads = 1;
        one.tiles = nsa__scorer_task_tiles(jobs, fewer.threads);
        nsa__run(&fewer, nsa__ceil_div(jobs->tile_end, one.tiles), nsa__scorer_keys_task, &one);
        nsa__run(&fewer, queries, nsa__scorer_end_task, &one);
    }
}

static size_t nsa__scorer_bytes(const nsa_desc *d, int pools) {
    if (nsa_desc_check(d) != NSA_OK) return 0;
    const nsa__attend_plan p = nsa__scorer_plan(NULL, d, pools);
    return nsa__attend_plan_bytes(&p, nsa__threads(d));
}

/* Lists of `to` from its q and k, by x or, if that is NULL, as cmp's forward makes them. */
static nsa_status nsa__scorer_run(const nsa_select *to, const nsa_score *x, const nsa_desc *d,
                                  void *workspace, size_t bytes) {
    nsa__scorer_jobs jobs;
    nsa__team team;
    nsa_attend attend;
    nsa__arena shared = nsa__arena_at(workspace);
    memset(&attend, 0, sizeof attend);
    attend.q = to->q;
    attend.k = to->k;
    attend.lse = to->lse;
    nsa__attend_plan p = nsa__scorer_plan(&attend, d, x != NULL);
    p.select = to;
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, p.shared, p.scratch));
    jobs.x = x;
    jobs.scores = nsa__scorer_layout(jobs.keys, &p, &shared);
    nsa__each_heads(jobs.keys, &team, 0, nsa__scorer_heads);
    return NSA_OK;
}

NSA_API size_t nsa_score_blocks_workspace_size(const nsa_desc *d) {
    nsa_desc own;
    return nsa__scorer_bytes(nsa__rank_desc(d, &own), 1);
}

NSA_API nsa_status nsa_score_blocks(const nsa_score *x, const nsa_desc *d, void *workspace,
                                    size_t bytes) {
    nsa_desc own;
    nsa_select to;
    NSA__CHECK(nsa__score_options(x, NSA__USES_SLC | NSA__USES_FORCED, &d, &own));
    const nsa__checked c = nsa__checked_of(d, 1, x->stride > 1);
    NSA__CHECK(nsa__check_call(&c, nsa__score_views, NSA__SCORE_VIEWS, NULL, x));
    memset(&to, 0, sizeof to);
    to.q = x->q;
    to.k = x->k;
    to.scores = x->scores;
    to.blocks = x->blocks;
    return nsa__scorer_run(&to, x, d, workspace, bytes);
}

NSA_API size_t nsa_select_blocks_workspace_size(const nsa_desc *d) {
    return nsa__scorer_bytes(d, 0);
}

NSA_API nsa_status nsa_select_blocks(const nsa_select *x, const nsa_desc *d, void *workspace,
                                     size_t bytes) {
    const nsa__checked c = nsa__checked_of(d, 1, 1);
    NSA__CHECK(nsa__check_call(&c, nsa__select_views, NSA__SELECT_VIEWS, NULL, x));
    return nsa__scorer_run(x, NULL, d, workspace, bytes);
}

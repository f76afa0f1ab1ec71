/* ---- Attention: one task by several threads -----------------------------------------------------
   Twin: none; a step of few queries is split there by keys (kernels/decode_attend.cuh). Not here:
   products, sums (attend_in_place.h).
   A step of decoding may have fewer tasks than threads. Then a task's batches are computed some at
   a time, in three loops, each over smaller tasks:
     scores:  q k^T of a few batches
     softmax: of a few rows, through all batches at hand
     sums:    p v of a few columns, through all batches at hand
   Each number is the same sum in the same order as nsa__forward_task computes it alone. */
#pragma once
#include "attend_forward.h"

/* A task that is split. It lies in the scratch of a thread, as there are fewer of them. */
typedef struct nsa__split {
    const nsa__head_job *job; /* NULL: there is no such task */
    nsa__head_job own;        /* the job of one query, whose keys are gathered */
    nsa__forward f;
    int from;            /* of the tile's queries, the first of the next batch */
    int n, most;         /* batches at hand, and room for them */
    nsa__batch *batches; /* the query, row and mask of each lie in the next two: */
    uint64_t *masks;     /* of each batch and query */
    int *ascending;      /* 0, 1, 2, ...: queries of a batch in place are neighbours */
    uint64_t *nonfinite; /* of each batch: non-finite keys, then those of each part of columns */
    nsa_real *shrink;    /* of each batch and row */
    nsa_real *p;         /* (rows, stride): p of all batches; before, scores that are not kept */
    ptrdiff_t stride;
} nsa__split;

/* Queries and rows of a batch. */
static int nsa__split_queries(const nsa__attend_plan *p) {
    return (int)nsa__max(1, nsa__min(p->d->count, p->cut.batch_queries));
}
static int nsa__split_rows(const nsa__attend_plan *p) {
    return nsa__split_queries(p) * p->group;
}

/* Returns where the split lies. More queries have fewer batches at hand, and all have the room of
   the most, because a workspace for many must serve fewer. */
static nsa__split *nsa__split_alloc(nsa__split *s, const nsa__attend_plan *p, nsa__arena *a) {
    const int queries = p->cut.batch_queries, tile = p->cut.tile;
    const int64_t numbers =
        nsa__max(NSA__SPLIT_NUMBERS / tile, (int64_t)NSA__SPLIT_BATCHES * queries * p->group);
    const int64_t masks = nsa__max(numbers / p->group, 1);
    nsa__split *at = (nsa__split *)nsa__alloc(a, 1, sizeof *at);
    memset(s, 0, sizeof *s);
    nsa__forward_alloc(&s->f, p, a);
    s->most = (int)nsa__max(NSA__SPLIT_BATCHES, NSA__SPLIT_NUMBERS / tile / nsa__split_rows(p));
    s->stride = (ptrdiff_t)s->most * tile + NSA__LANES;
    s->batches = (nsa__batch *)nsa__alloc(a, masks, sizeof *s->batches);
    s->masks = (uint64_t *)nsa__alloc(a, masks, sizeof *s->masks);
    s->nonfinite = (uint64_t *)nsa__alloc(a, masks * (1 + NSA__SPLIT_PARTS), sizeof *s->nonfinite);
    s->ascending = (int *)nsa__alloc(a, (int64_t)queries * p->group, sizeof *s->ascending);
    s->shrink = nsa__alloc_reals(a, numbers + NSA__LANES);
    s->p = nsa__alloc_reals(a, numbers * tile + (int64_t)queries * p->group * NSA__LANES);
    return at;
}

/* What the loops share. */
typedef struct nsa__splits {
    const nsa__head_job *jobs;
    const nsa__team *team;
    int heads, count; /* jobs, and tasks of them that are split */
    int columns;      /* of a part */
} nsa__splits;

static nsa__split *nsa__split_at(const nsa__splits *all, int64_t i) {
    return (nsa__split *)(void *)(all->team->scratch + all->team->scratch_bytes * (size_t)i);
}

/* Task i of those that are split, from its begin; jobs alternate. */
static void nsa__split_begin(const nsa__splits *all, int i) {
    const nsa__head_job *job = &all->jobs[i % all->heads];
    const int task = i / all->heads;
    nsa__split s;
    nsa__arena a = {(char *)nsa__split_at(all, i), 0};
    nsa__split *at = nsa__split_alloc(&s, job->plan, &a);
    *at = s;
    if (task >= nsa__head_tasks(job)) return;
    at->job = job;
    if (job->gathers) at->job = nsa__gather(&at->own, job, job->seq.first + task);
    for (int r = 0; r < nsa__split_rows(job->plan); r++) at->ascending[r] = r;
    nsa__forward_begin(&at->f, at->job, task);
    at->f.iter.tile_queries = 0;
}

/* Takes the next batches in hand; none is left if they are none. */
static void nsa__split_take(nsa__split *s) {
    nsa__tile_iter *it = &s->f.iter;
    for (s->n = 0; s->job && s->n < s->most; s->n++) {
        nsa__batch *b = &s->batches[s->n];
        if (s->from >= it->tile_queries) {
            if (!nsa__tile_iter_next(it, s->job)) break;
            s->from = 0;
        }
        *b = nsa__batch_at(it, s->job, s->from);
        s->from += b->queries;
        uint64_t *mask = s->masks + (ptrdiff_t)s->n * nsa__split_queries(s->job->plan);
        memcpy(mask, b->mask, (size_t)b->queries * sizeof *mask);
        b->mask = mask;
        b->query = s->ascending + b->query[0];
        b->row = s->ascending + b->row[0];
    }
}

/* The state of a split task with the scratch of the thread that works at it. */
static nsa__forward nsa__split_scratch(const nsa__split *s, void *scratch) {
    nsa__split mine;
    nsa__arena a = {(char *)scratch, 0};
    nsa__forward f = s->f;
    nsa__split_alloc(&mine, s->job->plan, &a);
    f.in_place = mine.f.in_place;
    f.in_place.q_t = s->f.in_place.q_t;
    f.in_place.scores_alone = 1;
    f.shrink = mine.f.shrink;
    return f;
}

/* Where the scores of batch i are. */
static nsa_real *nsa__split_scores(const nsa__split *s, int i, ptrdiff_t *apart) {
    const nsa__attend_plan *p = s->job->plan;
    *apart = s->stride;
    if (!p->options.select) return s->p + (ptrdiff_t)i * p->cut.tile;
    return nsa__forward_scores(&s->f, p, &s->batches[i], apart);
}

static void nsa__split_score(const void *context, int64_t nth, void *scratch) {
    const nsa__splits *all = (const nsa__splits *)context;
    const nsa__split *s = nsa__split_at(all, nth % all->count);
    const int first = (int)(nth / all->count) * NSA__SPLIT_BATCHES;
    if (first >= s->n) return;
    nsa__forward f = nsa__split_scratch(s, scratch);
    for (int i = first; i < nsa__min(first + NSA__SPLIT_BATCHES, s->n); i++) {
        ptrdiff_t apart;
        nsa_real *scores = nsa__split_scores(s, i, &apart);
        nsa__in_place_scores(&f.in_place, s->job, &s->batches[i], apart, scores);
        s->nonfinite[i * (1 + NSA__SPLIT_PARTS)] = f.in_place.nonfinite;
    }
}

/* Rows of a task of the softmax: they share a mask. */
static int nsa__split_softmax_rows(const nsa__attend_plan *p) {
    return p->group % NSA__SPLIT_ROWS ? p->group : NSA__SPLIT_ROWS;
}

static void nsa__split_softmax(const void *context, int64_t nth, void *scratch) {
    const nsa__splits *all = (const nsa__splits *)context;
    const nsa__split *s = nsa__split_at(all, nth % all->count);
    if (!s->n) return;
    const nsa__attend_plan *p = s->job->plan;
    const int rows = nsa__split_softmax_rows(p), first = (int)(nth / all->count) * rows;
    const nsa__forward f = nsa__split_scratch(s, scratch);
    const nsa__running so_far = {f.m, f.l, f.shrink};
    for (int i = 0; i < s->n; i++) {
        const nsa__batch *b = &s->batches[i];
        const int at = first - b->row[0]; /* in the batch */
        if (at < 0 || at >= b->rows) continue;
        ptrdiff_t apart;
        nsa_real *scores = nsa__split_scores(s, i, &apart);
        nsa_real *weights = s->p + at * s->stride + (ptrdiff_t)i * p->cut.tile;
        nsa__scored x = nsa__batch_scored(p, b);
        x.rows = x.group = rows;
        x.mask += at / p->group;
        x.row += at;
        p->tiles->softmax(&x, apart, scores + at * apart, s->stride, weights, &so_far);
        memcpy(s->shrink + (ptrdiff_t)i * nsa__split_rows(p) + at, f.shrink,
               (size_t)rows * sizeof *f.shrink);
        if (p->v.pairs) p->v.pairs->round_rows(rows, x.n, s->stride, weights);
    }
}

static void nsa__split_sum(const void *context, int64_t nth, void *scratch) {
    const nsa__splits *all = (const nsa__splits *)context;
    const nsa__split *s = nsa__split_at(all, nth % all->count);
    const int part = (int)(nth / all->count), first = part * all->columns;
    if (!s->n) return;
    const nsa__attend_plan *p = s->job->plan;
    const int wide = (int)nsa__min(all->columns, p->v.wide - first);
    nsa__forward f = nsa__split_scratch(s, scratch);
    f.in_place.first = first;
    f.in_place.wide = wide;
    for (int i = 0; i < s->n; i++) {
        const int ahead = s->batches[i].next_key;
        const nsa_real *shrink = s->shrink + (ptrdiff_t)i * nsa__split_rows(p);
        const nsa__matrix weights = {s->p + (ptrdiff_t)i * p->cut.tile, s->stride, 1, NULL};
        const nsa__result out = {f.out, p->v.wide, s->batches[i].row, 1, shrink};
        f.in_place.nonfinite = 0;
        nsa__fetch_rows(s->job, &p->x->v, ahead, ahead + p->cut.tile, first, wide);
        nsa__in_place_sums(&f.in_place, s->job, &s->batches[i], &weights, &out);
        s->nonfinite[i * (1 + NSA__SPLIT_PARTS) + 1 + part] = f.in_place.nonfinite;
    }
}

/* Marks the rows that read what is not finite. */
static void nsa__split_note(nsa__split *s, int parts) {
    for (int i = 0; i < s->n; i++) {
        uint64_t nonfinite = 0;
        for (int j = 0; j <= parts; j++) nonfinite |= s->nonfinite[i * (1 + NSA__SPLIT_PARTS) + j];
        nsa__forward_note(&s->f, s->job, &s->batches[i], nonfinite << s->batches[i].begin);
    }
}

/* Runs `count` tasks of the jobs, fewer than the team has threads. */
static void nsa__split_run(const nsa__head_job *jobs, int heads, int count, const nsa__team *team) {
    const nsa__attend_plan *p = jobs->plan;
    nsa__splits all = {jobs, team, heads, count, 0};
    const int64_t vectors = p->v.wide / NSA__LANES;
    const int64_t wanted = nsa__min(nsa__ceil_div(team->threads, count), NSA__SPLIT_PARTS);
    all.columns = (int)nsa__ceil_div(vectors, nsa__min(wanted, vectors)) * NSA__LANES;
    const int parts = (int)nsa__ceil_div(p->v.wide, all.columns);
    for (int i = 0; i < count; i++) nsa__split_begin(&all, i);
    for (int most = 1; most;) {
        most = 0;
        for (int i = 0; i < count; i++) {
            nsa__split *s = nsa__split_at(&all, i);
            nsa__split_take(s);
            most = s->n > most ? s->n : most;
        }
        if (!most) break;
        nsa__run(team, count * nsa__ceil_div(most, NSA__SPLIT_BATCHES), nsa__split_score, &all);
        nsa__run(team, (int64_t)count * nsa__split_rows(p) / nsa__split_softmax_rows(p),
                 nsa__split_softmax, &all);
        nsa__run(team, (int64_t)count * parts, nsa__split_sum, &all);
        for (int i = 0; i < count; i++) nsa__split_note(nsa__split_at(&all, i), parts);
    }
    for (int i = 0; i < count; i++) {
        nsa__split *s = nsa__split_at(&all, i);
        if (s->job) nsa__forward_end(&s->f, s->job);
    }
}

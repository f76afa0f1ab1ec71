/* ---- Attention: one task by several threads -----------------------------------------------------
   Twin: none; a step of few queries is split there by keys (kernels/decode_attend.cuh). Not here:
   products, sums (attend_in_place.h).
   A step of decoding may have fewer tasks than threads. Then a task's batches are computed by
   several threads, some batches at a time, and only what depends on the batches before is done in
   turn:
     scores:  q k^T
     softmax: in turn, because it goes on from the maximum and the sum before
     sums:    p v of each batch alone
     joined:  in turn, out = p v + shrink out
   Each number is the same sum in the same order as nsa__forward_task computes it alone. */
#pragma once
#include "attend_forward.h"

/* A task that is split. It lies in the scratch of a thread, as there are fewer of them. What the
   threads share is the one's where the split lies; p, shrink and sums are each thread's own. */
typedef struct nsa__split {
    const nsa__head_job *job; /* NULL: there is no such task */
    nsa__head_job own;        /* the job of one query, whose keys are gathered */
    int64_t task;             /* which of the job's */
    nsa__forward f;
    int from;            /* of the tile's queries, the first of the next batch */
    int n, most;         /* batches at hand, and room for them */
    int at_once;         /* batches that a thread takes */
    int32_t scored;      /* such parts of the batches at hand whose softmax is done */
    int32_t joined;      /* the same of those that are in out */
    nsa__batch *batches; /* the query, row and mask of each lie in the next two: */
    uint64_t *masks;     /* of each batch and query */
    int *ascending;      /* 0, 1, 2, ...: queries of a batch in place are neighbours */
    nsa_real *p;         /* of each batch of a part */
    nsa_real *shrink;    /* of the same */
    nsa_real *sums;      /* of the same: p v */
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
    const int queries = p->cut.batch_queries;
    const int64_t rows = (int64_t)queries * p->group, wide = p->v.wide;
    const int64_t masks = nsa__max(NSA__SPLIT_MASKS, (int64_t)NSA__SPLIT_BATCHES * queries);
    nsa__split *at = (nsa__split *)nsa__alloc(a, 1, sizeof *at);
    memset(s, 0, sizeof *s);
    nsa__forward_alloc(&s->f, p, a);
    s->most = (int)(masks / nsa__split_queries(p));
    s->at_once = (int)nsa__min(NSA__SPLIT_BATCHES, NSA__SPLIT_NUMBERS / wide / nsa__split_rows(p));
    s->at_once = (int)nsa__max(1, s->at_once);
    s->batches = (nsa__batch *)nsa__alloc(a, masks, sizeof *s->batches);
    s->masks = (uint64_t *)nsa__alloc(a, masks, sizeof *s->masks);
    s->ascending = (int *)nsa__alloc(a, rows, sizeof *s->ascending);
    s->p = nsa__alloc_reals(a, NSA__SPLIT_BATCHES * rows * p->cut.tile);
    s->shrink = nsa__alloc_reals(a, NSA__SPLIT_BATCHES * (rows + NSA__LANES));
    s->sums = nsa__alloc_reals(a, nsa__max(NSA__SPLIT_NUMBERS, rows * wide));
    return at;
}

/* What the threads share. */
typedef struct nsa__splits {
    const nsa__head_job *jobs;
    const nsa__team *team;
    int heads, count; /* jobs, and tasks of them that are split */
} nsa__splits;

static nsa__split *nsa__split_at(const nsa__splits *all, int64_t i) {
    return (nsa__split *)(void *)(all->team->scratch + all->team->scratch_bytes * (size_t)i);
}

/* The task from its first tile on. */
static void nsa__split_restart(nsa__split *s) {
    nsa__forward_begin(&s->f, s->job, s->task);
    s->f.iter.tile_queries = s->from = 0;
}

/* Task i of those that are split; jobs alternate. */
static void nsa__split_begin(const void *context, int64_t i, void *scratch) {
    const nsa__splits *all = (const nsa__splits *)context;
    const nsa__head_job *job = &all->jobs[i % all->heads];
    nsa__split s;
    nsa__arena a = {(char *)nsa__split_at(all, i), 0};
    nsa__split *at = nsa__split_alloc(&s, job->plan, &a);
    (void)scratch;
    *at = s;
    at->task = i / all->heads;
    if (at->task >= nsa__head_tasks(job)) return;
    at->job = job;
    if (job->gathers) at->job = nsa__gather(&at->own, job, job->seq.first + (int)at->task);
    for (int r = 0; r < nsa__split_rows(job->plan); r++) at->ascending[r] = r;
    nsa__split_restart(at);
}

/* Takes the next batches in hand. The last of a part prefetches the keys of the part that its
   thread is likely to take next: `apart` batches behind its own. */
static void nsa__split_next(nsa__split *s, int apart) {
    nsa__tile_iter *it = &s->f.iter;
    for (s->n = 0; s->n < s->most; s->n++) {
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
    for (int i = s->at_once - 1; i + 1 + apart < s->n; i += s->at_once)
        s->batches[i].next_key = s->batches[i + 1 + apart].key;
    s->scored = s->joined = 0;
}

/* The next batches of task i, or its end if none is left. */
static void nsa__split_go_on(const void *context, int64_t i, void *scratch) {
    const nsa__splits *all = (const nsa__splits *)context;
    const int others = (int)nsa__ceil_div(all->team->threads, all->count) - 1; /* at a task */
    nsa__split *s = nsa__split_at(all, i);
    (void)scratch;
    if (!s->job) return;
    nsa__split_next(s, others * s->at_once);
    if (s->n) return;
    if (nsa__forward_repeats(&s->f, s->job)) {
        nsa__split_restart(s);
        nsa__split_next(s, others * s->at_once);
    } else {
        nsa__forward_end(&s->f, s->job);
        s->job = NULL;
    }
}

/* A part of the batches at hand, by one thread. */
typedef struct nsa__part {
    int32_t nth;
    int n; /* batches */
    const nsa__batch *batches;
    nsa__in_place *in_place;              /* the thread's */
    nsa__forward of[NSA__SPLIT_BATCHES];  /* the task's, with p and shrink of each batch */
    nsa_real *scores[NSA__SPLIT_BATCHES]; /* rows `apart` from each other */
    nsa_real *sums[NSA__SPLIT_BATCHES];
    uint64_t nonfinite[NSA__SPLIT_BATCHES]; /* keys of each batch */
    ptrdiff_t apart;
} nsa__part;

/* Part `nth` of a task; `mine` is what the thread has for it. */
static nsa__part nsa__split_part(const nsa__split *s, int32_t nth, nsa__split *mine) {
    const nsa__attend_plan *p = s->job->plan;
    const ptrdiff_t rows = nsa__split_rows(p);
    nsa__part part;
    memset(&part, 0, sizeof part);
    part.nth = nth;
    part.n = (int)nsa__min(s->at_once, s->n - nth * s->at_once);
    part.batches = s->batches + (ptrdiff_t)nth * s->at_once;
    part.in_place = &mine->f.in_place;
    part.in_place->q_t = s->f.in_place.q_t;
    part.in_place->copies = s->f.in_place.copies;
    for (int i = 0; i < part.n; i++) {
        part.of[i] = s->f;
        part.of[i].s = mine->p + i * rows * p->cut.tile;
        part.of[i].shrink = mine->shrink + i * (rows + NSA__LANES);
        part.sums[i] = mine->sums + i * rows * p->v.wide;
        part.scores[i] = nsa__forward_scores(&part.of[i], p, &part.batches[i], &part.apart);
    }
    return part;
}

/* Waits until it is the turn of part `nth`. Those before it have begun, and wait for none behind
   them. */
static void nsa__split_await(const int32_t *turn, int32_t nth) {
    while (nsa__read(turn) != nth) nsa__yield();
}

static void nsa__split_softmax(nsa__split *s, nsa__part *part) {
    nsa__split_await(&s->scored, part->nth);
    for (int i = 0; i < part->n; i++)
        nsa__forward_softmax(&part->of[i], s->job, &part->batches[i], part->scores[i], part->apart);
    nsa__write(&s->scored, part->nth + 1);
}

static void nsa__split_sums(nsa__split *s, nsa__part *part) {
    const nsa__attend_plan *p = s->job->plan;
    const int wide = p->v.wide;
    for (int i = 0; i < part->n; i++) {
        const nsa__matrix weights = {part->of[i].s, p->cut.tile, 1, NULL};
        const nsa__result sums = nsa__result_at(part->sums[i], wide, 0);
        part->in_place->nonfinite = part->nonfinite[i];
        nsa__in_place_sums(part->in_place, s->job, &part->batches[i], &weights, &sums);
        part->nonfinite[i] = part->in_place->nonfinite;
    }
    nsa__split_await(&s->joined, part->nth);
    for (int i = 0; i < part->n; i++) {
        const nsa__batch *b = &part->batches[i];
        const nsa__result out = {s->f.out, wide, b->row, 1, part->of[i].shrink};
        p->tiles->join(b->rows, wide, part->sums[i], &out);
        nsa__forward_note(&s->f, s->job, b, part->nonfinite[i] << b->begin);
    }
    nsa__write(&s->joined, part->nth + 1);
}

static void nsa__split_task(const void *context, int64_t nth, void *scratch) {
    const nsa__splits *all = (const nsa__splits *)context;
    nsa__split *s = nsa__split_at(all, nth % all->count), mine;
    nsa__arena a = {(char *)scratch, 0};
    if (nth / all->count * s->at_once >= s->n) return;
    nsa__split_alloc(&mine, s->job->plan, &a);
    nsa__part part = nsa__split_part(s, (int32_t)(nth / all->count), &mine);
    for (int i = 0; i < part.n; i++) {
        nsa__in_place_scores(part.in_place, s->job, &part.batches[i], part.apart, part.scores[i]);
        part.nonfinite[i] = part.in_place->nonfinite;
    }
    nsa__split_softmax(s, &part);
    nsa__split_sums(s, &part);
}

/* Runs `count` tasks of the jobs, fewer than the team has threads. */
static void nsa__split_run(const nsa__head_job *jobs, int heads, int count, const nsa__team *team) {
    const nsa__splits all = {jobs, team, heads, count};
    nsa__run(team, count, nsa__split_begin, &all);
    for (int64_t parts = 1; parts;) {
        parts = 0;
        nsa__run(team, count, nsa__split_go_on, &all);
        for (int i = 0; i < count; i++) {
            const nsa__split *s = nsa__split_at(&all, i);
            parts = nsa__max(parts, nsa__ceil_div(s->n, s->at_once));
        }
        nsa__run(team, count * parts, nsa__split_task, &all);
    }
}

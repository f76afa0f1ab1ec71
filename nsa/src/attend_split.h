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
   Where lists are selected, the last parts are keys of p_cmp. Each number is the same sum in the
   same order as nsa__forward_task computes it alone.
   All tasks of a call are in one parallel region. A thread looks for a part of any of them. Where
   all parts at hand have been joined, the thread that sees it takes the next batches in hand, or
   ends the task, while the others work at other tasks: win's batches fill the time in which one
   thread selects blocks. */
#pragma once
#include "attend_forward.h"

/* What a thread has for its part of any task. */
typedef struct nsa__split_room {
    nsa__in_place in_place;
    nsa_real *p;      /* of each batch of a part */
    nsa_real *shrink; /* of the same */
    nsa_real *sums;   /* of the same: p v */
} nsa__split_room;

/* A task that is split. It lies in the scratch of a thread, behind the thread's own room, as there
   are no more tasks than threads. */
typedef struct nsa__split {
    int32_t claims;            /* 0: no thread takes a part */
    int32_t ended;             /* 1: nothing is left */
    int32_t taken, parts;      /* of the batches at hand: parts that have been taken, and all */
    int32_t scored;            /* parts whose softmax is done */
    int32_t joined;            /* parts that are in out */
    int selects;               /* 1: parts are keys of p_cmp */
    const nsa__head_job *job;  /* NULL: not begun */
    const nsa__head_job *then; /* the job to begin next */
    nsa__head_job own;         /* the job of one query, whose keys are gathered */
    nsa__forward f;
    int from;            /* of the tile's queries, the first of the next batch */
    int n, most;         /* batches at hand, and room for them */
    int at_once;         /* batches of a part */
    nsa__batch *batches; /* the query, row and mask of each lie in the next two: */
    uint64_t *masks;     /* of each batch and query */
    int *ascending;      /* 0, 1, 2, ...: queries of a batch in place are neighbours */
} nsa__split;

/* Queries and rows of a batch. */
static int nsa__split_queries(const nsa__attend_plan *p) {
    return (int)nsa__max(1, nsa__min(p->d->count, p->cut.batch_queries));
}
static int nsa__split_rows(const nsa__attend_plan *p) {
    return nsa__split_queries(p) * p->group;
}

static void nsa__split_room_alloc(nsa__split_room *r, const nsa__attend_plan *p, nsa__arena *a) {
    const int64_t rows = (int64_t)p->cut.batch_queries * p->group;
    nsa__arena task = {NULL, 0}; /* which has the queries */
    nsa__in_place_queries(&r->in_place, p, &task);
    nsa__in_place_alloc(&r->in_place, p, a);
    r->p = nsa__alloc_reals(a, NSA__SPLIT_BATCHES * rows * p->cut.tile);
    r->shrink = nsa__alloc_reals(a, NSA__SPLIT_BATCHES * (rows + NSA__LANES));
    r->sums = nsa__alloc_reals(a, nsa__max(NSA__SPLIT_NUMBERS, rows * p->v.wide));
}

/* What a split task has, from the split itself on. More queries have fewer batches at hand, and all
   have the room of the most, because a workspace for many must serve fewer. */
static void nsa__split_alloc(nsa__split *s, const nsa__attend_plan *p, nsa__arena *a) {
    const int queries = p->cut.batch_queries;
    const int64_t rows = (int64_t)queries * p->group;
    const int64_t masks = nsa__max(NSA__SPLIT_MASKS, (int64_t)NSA__SPLIT_BATCHES * queries);
    nsa__alloc(a, 1, sizeof *s);
    nsa__forward_alloc(&s->f, p, a);
    s->most = (int)(masks / nsa__split_queries(p));
    s->batches = (nsa__batch *)nsa__alloc(a, masks, sizeof *s->batches);
    s->masks = (uint64_t *)nsa__alloc(a, masks, sizeof *s->masks);
    s->ascending = (int *)nsa__alloc(a, rows, sizeof *s->ascending);
}

/* What the threads share. */
typedef struct nsa__splits {
    const nsa__team *team;
    size_t room; /* bytes of a thread's own room */
    int count;   /* tasks that are split */
    int first;   /* the first of them, which all threads prefer: others wait for them */
} nsa__splits;

static nsa__split *nsa__split_at(const nsa__splits *all, int64_t i) {
    const nsa__team *team = all->team;
    return (nsa__split *)(void *)(team->scratch + team->scratch_bytes * (size_t)i + all->room);
}

/* The task from its first tile on. */
static void nsa__split_restart(nsa__split *s) {
    nsa__forward_begin(&s->f, s->job, 0);
    s->f.iter.tile_queries = s->from = 0;
}

/* Begins the next job. */
static void nsa__split_begin(nsa__split *s) {
    const nsa__head_job *job = s->then;
    nsa__arena a = {(char *)s, 0};
    nsa__split_alloc(s, job->plan, &a);
    s->then = job->then;
    s->job = job;
    if (job->gathers) s->job = nsa__gather(&s->own, job, job->seq.first);
    for (int r = 0; r < nsa__split_rows(job->plan); r++) s->ascending[r] = r;
    nsa__split_restart(s);
}

/* What is at hand now, as so many parts. */
static void nsa__split_offer(nsa__split *s, int64_t parts) {
    s->taken = s->scored = s->joined = 0;
    s->parts = (int32_t)parts;
}

/* Takes the next batches in hand: two parts or more for each of the task's threads, of two batches
   or more. The last of a part prefetches the keys of the part that its thread is likely to take
   next. Returns 0 at the end. */
static int nsa__split_next(nsa__split *s, int threads) {
    const nsa__attend_plan *p = s->job->plan;
    const int64_t fit = NSA__SPLIT_NUMBERS / p->v.wide / nsa__split_rows(p);
    nsa__tile_iter *it = &s->f.iter;
    for (s->n = 0; s->n < s->most; s->n++) {
        nsa__batch *b = &s->batches[s->n];
        if (s->from >= it->tile_queries) {
            if (!nsa__tile_iter_next(it, s->job)) break;
            s->from = 0;
        }
        *b = nsa__batch_at(it, s->job, s->from);
        s->from += b->queries;
        uint64_t *mask = s->masks + (ptrdiff_t)s->n * nsa__split_queries(p);
        memcpy(mask, b->mask, (size_t)b->queries * sizeof *mask);
        b->mask = mask;
        b->query = s->ascending + b->query[0];
        b->row = s->ascending + b->row[0];
    }
    const int64_t share = nsa__max(2, s->n / (2 * threads));
    s->at_once = (int)nsa__max(1, nsa__min(nsa__min(NSA__SPLIT_BATCHES, fit), share));
    const int apart = (threads - 1) * s->at_once;
    for (int i = s->at_once - 1; i + 1 + apart < s->n; i += s->at_once)
        s->batches[i].next_key = s->batches[i + 1 + apart].key;
    nsa__split_offer(s, nsa__ceil_div(s->n, s->at_once));
    return s->n > 0;
}

/* The job's batches have all been joined: its rows, or once more from its first tile on. Returns 1
   if there are parts at hand then: of its batches, or of p_cmp. */
static int nsa__split_end(nsa__split *s, int threads) {
    const nsa__head_job *job = s->job;
    if (nsa__forward_repeats(&s->f, job)) {
        nsa__split_restart(s);
        return nsa__split_next(s, threads);
    }
    nsa__forward_rows(&s->f, job);
    s->selects = job->plan->select != NULL;
    if (s->selects) nsa__split_offer(s, nsa__ceil_div(job->tile_end, NSA__SPLIT_BATCHES));
    return s->selects;
}

/* All parts at hand have been joined: the next, or those of the next job, or the end. */
static void nsa__split_go_on(nsa__split *s, int threads) {
    if (s->job && !s->selects && (nsa__split_next(s, threads) || nsa__split_end(s, threads)))
        return;
    if (s->job && s->selects)
        nsa__select_queries(s->job, &s->f.iter, &s->f.scoring, s->f.nonfinite);
    s->selects = 0;
    if (s->then)
        nsa__split_begin(s);
    else
        nsa__write(&s->ended, 1);
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

static nsa__part nsa__split_part(const nsa__split *s, int32_t nth, nsa__split_room *mine) {
    const nsa__attend_plan *p = s->job->plan;
    const ptrdiff_t rows = nsa__split_rows(p);
    nsa__part part;
    memset(&part, 0, sizeof part);
    part.nth = nth;
    part.n = (int)nsa__min(s->at_once, s->n - nth * s->at_once);
    part.batches = s->batches + (ptrdiff_t)nth * s->at_once;
    part.in_place = &mine->in_place;
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
    for (int looks = 0; nsa__read(turn) != nth; looks++)
        if (looks > NSA__SPLIT_LOOKS) nsa__yield();
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
        const nsa__result out = {s->f.out, wide, b->row, 1, part->of[i].shrink, NULL};
        p->tiles->join(b->rows, wide, part->sums[i], &out);
        nsa__forward_note(&s->f, s->job, b, part->nonfinite[i] << b->begin);
    }
    nsa__write(&s->joined, part->nth + 1);
}

/* p_cmp of the keys of part `nth`, which are those of as many batches as another part has. */
static void nsa__split_select(nsa__split *s, int32_t nth, void *scratch) {
    const int keys = NSA__SPLIT_BATCHES * s->job->plan->cut.tile;
    (void)scratch;
    nsa__select_keys(s->job, &s->f.iter, &s->f.scoring, s->f.m, nth * keys, keys);
    nsa__split_await(&s->joined, nth);
    nsa__write(&s->joined, nth + 1);
}

/* Part `nth` of a task's batches. */
static void nsa__split_compute(nsa__split *s, int32_t nth, void *scratch) {
    nsa__split_room mine;
    nsa__arena a = {(char *)scratch, 0};
    nsa__split_room_alloc(&mine, s->job->plan, &a);
    nsa__part part = nsa__split_part(s, nth, &mine);
    for (int i = 0; i < part.n; i++) {
        nsa__in_place_scores(part.in_place, s->job, &part.batches[i], part.apart, part.scores[i]);
        part.nonfinite[i] = part.in_place->nonfinite;
    }
    nsa__split_softmax(s, &part);
    nsa__split_sums(s, &part);
}

/* One part of the task, or the next batches of it. Returns 0 if there is neither, or if another
   thread takes one. */
static int nsa__split_step(const nsa__splits *all, nsa__split *s, void *scratch) {
    const int threads = (int)nsa__ceil_div(all->team->threads, all->first); /* of a task */
    int32_t part = -1;
    int goes_on;
    if (nsa__read(&s->claims) || !nsa__claim(&s->claims)) return 0;
    goes_on = !s->ended && nsa__read(&s->joined) == s->parts;
    if (goes_on) nsa__split_go_on(s, threads);
    if (!goes_on && s->taken < s->parts) part = s->taken++;
    nsa__write(&s->claims, 0);
    if (part >= 0) (s->selects ? nsa__split_select : nsa__split_compute)(s, part, scratch);
    return goes_on || part >= 0;
}

/* What thread `nth` does, until all tasks have ended. Of the first tasks it looks at one of its own
   before the others. */
static void nsa__split_work(const void *context, int64_t nth, void *scratch) {
    const nsa__splits *all = (const nsa__splits *)context;
    for (int left = 1, done, looks = 0; left;) {
        left = done = 0;
        for (int i = 0; i < all->count && !done; i++) {
            nsa__split *s = nsa__split_at(all, i < all->first ? (nth + i) % all->first : i);
            if (nsa__read(&s->ended)) continue;
            left = 1;
            done = nsa__split_step(all, s, scratch);
        }
        looks = done ? 0 : looks + 1;
        if (left && looks > NSA__SPLIT_LOOKS) nsa__yield();
    }
}

/* Runs the first tasks of `count` jobs, which are no more than the team has threads. */
static void nsa__split_run(const nsa__splits *all, const nsa__head_job *jobs) {
    for (int i = 0; i < all->count; i++) {
        nsa__split *s = nsa__split_at(all, i);
        s->claims = s->ended = s->taken = s->parts = s->scored = s->joined = s->selects = 0;
        s->job = NULL;
        s->then = &jobs[i];
    }
    nsa__run(all->team, all->team->threads, nsa__split_work, all);
}

/* ---- Attention: forward ----------------------------------------------------------------------
   Twin: kernels/attend_forward.cuh. Not here: which keys (attend_plan.h, attend_tiles.h).
   Softmax in one pass over the keys. q has been multiplied by scale. For each row
   and tile:
     m'  = max(m, max s)             the largest score so far
     p   = exp(s - m')               never more than 1, so nothing overflows
     l   = l exp(m - m') + sum p     exp(m - m') is the shrink of all sums before this tile
     out = out exp(m - m') + p v
   At the end out / l is the softmax's average of v, and lse = m + ln l. If one key has
   all of p, lse is its score to the bit, and backward, whose scores are the same bits, finds p = 1
   however large they are. So scores are in base e, and a difference of two is taken to base 2. */
#pragma once
#include "attend_in_place.h"
#include "attend_rows.h"
#include "select_scores.h"

/* A forward task's scratch. */
typedef struct nsa__forward {
    nsa__tile_iter iter;
    nsa_real *q;              /* rows of the task, times scale, and up to 15 more */
    nsa_real *out;            /* rows of the task: sums of p v, not yet divided by l */
    nsa_real *m;              /* of every row: the largest score so far */
    nsa_real *l;              /* of the same: NSA__LANES partial sums of p */
    nsa_real *s;              /* rows of a batch: scores of a tile, if they are not kept; then p */
    nsa_real *shrink;         /* of every row of a batch, for the tile at hand */
    unsigned char *nonfinite; /* of every row: 1 if it used a non-finite number; it becomes NaN */
    nsa__scoring scoring;     /* if lists are selected too */
    nsa__in_place in_place;
} nsa__forward;

static void nsa__forward_alloc(nsa__forward *f, const nsa__attend_plan *p, nsa__arena *a) {
    int64_t rows = (int64_t)p->cut.task_queries * p->group,
            batch_rows = (int64_t)p->cut.batch_queries * p->group;
    nsa__tile_iter_alloc(&f->iter, p, a, a);
    f->q = nsa__alloc_reals(a, (rows + NSA__LANES) * p->k.wide);
    f->out = nsa__alloc_reals(a, rows * p->v.wide);
    f->m = nsa__alloc_reals(a, rows);
    f->l = nsa__alloc_reals(a, rows * NSA__LANES);
    f->shrink = nsa__alloc_reals(a, batch_rows + NSA__LANES);
    f->s = nsa__alloc_reals(a, batch_rows * p->cut.tile);
    f->nonfinite = (unsigned char *)nsa__alloc(a, rows, 1);
    if (p->select) nsa__scoring_alloc(&f->scoring, p, a);
    /* Allocated for many queries too, because a workspace for them must serve fewer. */
    nsa__in_place_queries(&f->in_place, p, a);
}

/* Sums of a row start at 0 and its maximum at the lowest number, so that the first tile needs no
   case of its own. */
static void nsa__forward_begin(nsa__forward *f, const nsa__head_job *job, int64_t task) {
    const nsa__attend_plan *p = job->plan;
    nsa__tile_iter_begin(&f->iter, job, task);
    int rows = f->iter.queries * p->group;
    memset(f->nonfinite, 0, (size_t)rows);
    memset(f->out, 0, (size_t)rows * (size_t)p->v.wide * sizeof *f->out);
    memset(f->l, 0, (size_t)rows * NSA__LANES * sizeof *f->l);
    for (int r = 0; r < rows; r++) f->m[r] = NSA__LOWEST;
    nsa__load_queries(job, &f->iter, &p->x->q, &p->k, f->q, f->nonfinite);
    if (job->in_place)
        nsa__rows_to_columns(&p->k, rows, f->q, f->in_place.columns, f->in_place.q_t);
}

/* Where the scores of a batch go, and how far apart its rows are. If lists are selected, they stay
   in the task's scores; rows of a batch of cmp are neighbours. */
static nsa_real *nsa__forward_scores(const nsa__forward *f, const nsa__attend_plan *p,
                                     const nsa__batch *b, ptrdiff_t *apart) {
    *apart = p->select ? (ptrdiff_t)f->scoring.stride : p->cut.tile;
    return p->select ? f->scoring.s + b->row[0] * *apart + b->key : f->s;
}

/* f->s = p, the softmax so far of scores s, as pairs if v is. l sums p before it is rounded. */
static void nsa__forward_softmax(nsa__forward *f, const nsa__head_job *job, const nsa__batch *b,
                                 nsa_real *s, ptrdiff_t apart) {
    const nsa__attend_plan *p = job->plan;
    const nsa__scored x = nsa__batch_scored(p, b);
    const nsa__running so_far = {f->m, f->l, f->shrink};
    p->tiles->softmax(&x, apart, s, p->cut.tile, f->s, &so_far);
    nsa__round_rows(&p->v, x.rows, x.n, p->cut.tile, f->s);
}

/* Counts the keys that the batch has read, and marks its rows that read a non-finite one. A marked
   row goes on with zeros in place of the key, and is made NaN at the end. */
static void nsa__forward_note(nsa__forward *f, const nsa__head_job *job, const nsa__batch *b,
                              uint64_t nonfinite) {
    const nsa__attend_plan *p = job->plan;
    int64_t *reads = p->step && !f->in_place.copies ? p->step->reads : NULL;
    if (!reads && !nonfinite) return;
    for (int i = 0; i < b->queries; i++) {
        int64_t query = job->seq.row + f->iter.first - job->seq.first + b->query[i];
        if (reads) reads[query * p->d->kv_heads + job->kv_head] += nsa__bit_count(b->mask[i]);
        if (b->mask[i] & nonfinite)
            memset(f->nonfinite + (ptrdiff_t)b->query[i] * p->group, 1, (size_t)p->group);
    }
}

/* Rows s of a batch's scores q k^T, `apart` numbers from each other, from packed keys or in place;
   f->nonfinite gets the keys that are not finite. */
static void nsa__batch_scores(nsa__in_place *f, const nsa__head_job *job, const nsa__batch *b,
                              const nsa_real *rows, ptrdiff_t apart, nsa_real *s) {
    const nsa__attend_plan *p = job->plan;
    if (job->in_place) {
        nsa__in_place_scores(f, job, b, apart, s);
        return;
    }
    const nsa__matrix q = {rows, p->k.stride, 1, b->row};
    const nsa__matrix k_t = {nsa__packed_columns(job, NSA__OF_K, b->key), p->cut.tile, 1, NULL};
    const nsa__result products = nsa__result_at(s, apart, 0);
    nsa__product_along(&p->k, b->rows, b->end - b->begin, &q, &k_t, &products);
    f->nonfinite = job->nonfinite[b->key / p->cut.tile] >> b->begin;
}

/* s = q k^T, with q scaled; p = softmax so far; out = out * shrink + p v */
static void nsa__forward_batch(nsa__forward *f, const nsa__head_job *job, const nsa__batch *b) {
    const nsa__attend_plan *p = job->plan;
    const nsa__operand *v = &p->v;
    const nsa__matrix weights = {f->s, p->cut.tile, 1, NULL};
    const nsa__matrix values = {nsa__packed_rows(job, NSA__OF_V, b->key), v->wide, 1, NULL};
    const nsa__result out = {f->out, v->wide, b->row, 1, f->shrink, NULL};
    ptrdiff_t apart;
    nsa_real *scores = nsa__forward_scores(f, p, b, &apart);
    nsa__batch_scores(&f->in_place, job, b, f->q, apart, scores);
    nsa__forward_softmax(f, job, b, scores, apart);
    if (job->in_place)
        nsa__in_place_sums(&f->in_place, job, b, &weights, &out);
    else
        nsa__product_over(v, b->rows, b->end - b->begin, &weights, &values, &out);
    nsa__forward_note(f, job, b, f->in_place.nonfinite << b->begin);
}

/* 1 / l of a row, where l is the sum of its parts, and lse = m + ln l. Of a row without keys, whose
   l is 0, these are 0 and -inf. NaN is found by its bits, because -ffast-math knows none. */
NSA__COMPILED static nsa_real nsa__forward_finish(nsa_real *parts, nsa_real m, nsa_real *lse) {
    NSA__ARITHMETIC
    const nsa_real l = nsa__sum_parts(parts);
    if (l == 0) {
        *lse = nsa__minus_infinity();
        return 0;
    }
    *lse = nsa__is_finite((double)l) ? (nsa_real)((double)m + log((double)l)) : l;
    return (nsa_real)(1 / (double)l);
}

/* out and lse of one row; both are NaN if the row used what is not finite. Selection reads lse back
   from the caller's view, because nsa_select_blocks does: both get the same bits. */
static void nsa__forward_row(nsa__forward *f, const nsa__head_job *job, int r) {
    const nsa__attend_plan *p = job->plan;
    const nsa_tensor *out = &p->x->out;
    void *row = nsa__walk_queries(job, &f->iter, out, p->d->dim_v, r);
    nsa_real *sums = f->out + (ptrdiff_t)r * p->v.wide, lse;
    const nsa_real inv_l = nsa__forward_finish(f->l + (ptrdiff_t)r * NSA__LANES, f->m[r], &lse);
    p->tiles->scale(p->v.wide, inv_l, sums, sums);
    if (inv_l != 0 && f->nonfinite[r]) {
        for (int c = 0; c < p->d->dim_v; c++) sums[c] = nsa__nan();
        lse = nsa__nan();
    }
    nsa__store_by(p->pairs, out->dtype, row, sums, p->d->dim_v);
    nsa__store(p->x->lse.dtype, nsa__query_row(job, &f->iter, &p->x->lse, r), &lse, 1);
    if (p->select) f->m[r] = nsa__load_number(job, &f->iter, &p->x->lse, r, f->nonfinite);
}

static void nsa__forward_rows(nsa__forward *f, const nsa__head_job *job) {
    const int rows = f->iter.queries * job->plan->group;
    for (int r = 0; r < rows; r++) nsa__forward_row(f, job, r);
}

/* Whether the task goes through its tiles once more, after nsa__forward_begin: if it read values in
   place and a sum is not finite, so that one of them may not be. */
static int nsa__forward_repeats(nsa__forward *f, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    const int rows = f->iter.queries * p->group, first = job->in_place && !f->in_place.copies;
    if (!first || p->tiles->all_finite(rows, p->v.wide, p->v.wide, f->out)) return 0;
    return f->in_place.copies = 1;
}

/* A task: some queries of one head, through all of their tiles. Every batch of a tile's queries
   updates the running softmax of its rows. slc's tasks are large, and dense's last ones are its
   longest: these go from the last queries to the first, which have least to read, because no thread
   should begin much last. */
static void nsa__forward_task(const void *context, int64_t nth, void *scratch) {
    const nsa__head_job *job = nsa__job_of(context, &nth);
    nsa__forward f;
    nsa__arena a = {(char *)scratch, 0};
    nsa__head_job own;
    if (nth >= nsa__head_tasks(job)) return;
    if (job->plan->is.last_first) nth = nsa__head_tasks(job) - 1 - nth;
    if (job->gathers) job = nsa__gather(&own, job, job->seq.first + (int)nth);
    nsa__forward_alloc(&f, job->plan, &a);
    nsa__in_place_alloc(&f.in_place, job->plan, &a);
    do {
        nsa__forward_begin(&f, job, nth);
        while (nsa__tile_iter_next(&f.iter, job))
            for (int i = 0; i < f.iter.tile_queries;) {
                nsa__batch b = nsa__batch_at(&f.iter, job, i);
                nsa__forward_batch(&f, job, &b);
                i += b.queries;
            }
    } while (nsa__forward_repeats(&f, job));
    nsa__forward_rows(&f, job);
    if (job->plan->select) nsa__select(job, &f.iter, &f.scoring, f.m, f.nonfinite);
}

/* ---- Attention: in-place keys -----------------------------------------------------------------
   Twin: none. Not here: when they are (attend_plan.h).
   Small query counts (decoding) use K and V in place, unpacked, because packing a tile would cost
   more than its products do. */
#pragma once
#include "prefetch.h"

/* The batch's rows of x, where they lie. From page to page and around a ring's end they do
   not follow each other: `order` then says where each one lies. Without data if no product can read
   them: they are neither reals nor pairs, no whole vectors, or lie apart by what is no multiple of
   a row's stride. */
static nsa__matrix nsa__rows_in_place(const nsa__head_job *job, const nsa_tensor *x,
                                      const nsa__operand *o, const nsa__batch *b, int *order) {
    nsa__matrix rows = {NULL, nsa__operand_stride(o, x), 1, NULL};
    const int begin = b->key, n = b->present;
    const nsa__packed *first = (const nsa__packed *)nsa__key(job, x, begin);
    if (!nsa__is_operand(o, x)) return rows;
    for (int i = 0, together; n > nsa__rows_together(&job->rows, begin) && i < n; i += together) {
        ptrdiff_t offset = (const nsa__packed *)nsa__key(job, x, begin + i) - first;
        ptrdiff_t at = rows.row ? offset / rows.row : 0;
        if (at * rows.row != offset || at < INT_MIN || at > INT_MAX - n) return rows;
        together = (int)nsa__min(n - i, nsa__rows_together(&job->rows, begin + i));
        for (int r = 0; r < together; r++) order[i + r] = (int)at + r;
        rows.rows = order;
    }
    rows.data = first;
    return rows;
}

/* Scratch of a task that reads keys in place. It computes s^T = k q^T, because the right operand of
   a product has contiguous rows: queries are cheap to transpose, keys are not. */
typedef struct nsa__in_place {
    nsa_real *q_t;       /* (depth, columns): q transposed */
    nsa_real *s_t;       /* (tile, columns): the scores of a tile, transposed */
    nsa_real *rows;      /* copies, as reals or pairs, of rows that no product can read in place */
    nsa__packed *paired; /* values as pairs of rows */
    int *order;          /* of rows in place that do not follow each other */
    uint64_t nonfinite;  /* keys of the batch whose rows of k or v were copied as zeros */
    int copies;          /* 1: values are copied, because a sum over them was not finite */
    int columns; /* rows of a batch in whole vectors, and one vector more: a product reads whole
                    vectors from any row on that a batch begins with */
} nsa__in_place;

/* What belongs to the queries, */
static void nsa__in_place_queries(nsa__in_place *f, const nsa__attend_plan *p, nsa__arena *a) {
    int64_t rows = (int64_t)p->cut.batch_queries * p->group;
    memset(f, 0, sizeof *f);
    f->columns = (int)nsa__ceil_div(rows, NSA__LANES) * NSA__LANES + NSA__LANES;
    f->q_t = nsa__alloc_reals(a, (int64_t)p->d->dim * f->columns);
}

/* and to the batch at hand. */
static void nsa__in_place_alloc(nsa__in_place *f, const nsa__attend_plan *p, nsa__arena *a) {
    f->s_t = nsa__alloc_reals(a, (int64_t)p->cut.tile * f->columns);
    f->order = (int *)nsa__alloc(a, p->cut.tile, sizeof *f->order);
    f->rows = nsa__alloc_reals(a, p->cut.tile * nsa__max(p->k.wide, p->v.wide));
    if (p->pairs) f->paired = nsa__alloc_reals(a, (int64_t)p->cut.tile / 2 * p->v.wide);
}

/* Keys begin .. begin + n - 1 of x as reals, whatever they hold. */
static nsa__matrix nsa__rows_widened(const nsa__in_place *f, const nsa__head_job *job,
                                     const nsa_tensor *x, const nsa__operand *o, int begin, int n) {
    const nsa__matrix rows = {f->rows, o->stride, 1, NULL};
    for (int i = 0, some; i < n; i += some) {
        some = (int)nsa__min(n - i, nsa__rows_together(&job->rows, begin + i));
        nsa__widen_rows(o, some, x, nsa__key(job, x, begin + i),
                        f->rows + (ptrdiff_t)i * o->stride);
    }
    return rows;
}

/* Keys of one product. */
static int nsa__keys_at_once(const nsa_tensor *k, int width) {
    const int keys = NSA__BYTES_AT_ONCE / (int)nsa__row_bytes(k, width), piece = NSA__KEYS_AT_ONCE;
    return keys > piece ? keys - keys % piece : (int)nsa__max(keys, NSA__KEYS_LEAST);
}

/* What is read after the scores of a batch: its values, unless only scores are wanted, and keys of
   the next tile. Returns NULL if their rows lie apart. */
static nsa__lines *nsa__in_place_later(const nsa__in_place *f, const nsa__head_job *job,
                                       const nsa__batch *b, nsa__lines *later) {
    const nsa__attend_plan *p = job->plan;
    const nsa__lines no_more = {(const char *)f->q_t, INT_MAX};
    nsa__lines *end = later;
    if (p->x->v.data) end = nsa__add_lines(end, job, &p->x->v, p->v.width, b->key, b->present);
    if (end) end = nsa__add_lines(end, job, &p->x->k, p->k.width, b->next_key, b->present);
    if (!end) return NULL;
    *end = no_more;
    return later;
}

/* s_t = k q_t for the batch's keys; without data they are widened part by part, so that a part is
   still in L1 when it is multiplied. What is read later is prefetched meanwhile or, where rows lie
   apart, before each part. Every score is the same sum in the same order as from packed keys. */
static void nsa__in_place_product(const nsa__in_place *f, const nsa__head_job *job,
                                  const nsa__batch *b, const nsa__matrix *keys) {
    const nsa__attend_plan *p = job->plan;
    nsa__lines room[2 * NSA__TILE + 1], *later = nsa__in_place_later(f, job, b, room);
    const int ahead = b->next_key, begin = b->key, n = b->present;
    const int at_once = keys->data && later ? n : nsa__keys_at_once(&p->x->k, p->k.width);
    int columns = (int)nsa__ceil_div(b->rows, NSA__LANES) * NSA__LANES;
    const nsa__matrix q_t = {f->q_t + (ptrdiff_t)b->query[0] * p->group, f->columns, 1, NULL};
    for (int i = 0, some; i < n; i += some) {
        some = (int)nsa__min(at_once, n - i);
        nsa__matrix k = *keys;
        const nsa__result s_t = {
            f->s_t + (ptrdiff_t)i * f->columns, f->columns, NULL, 0, NULL, later};
        if (!later && p->x->v.data)
            nsa__fetch_rows(job, &p->x->v, begin + i, begin + i + some, p->v.width);
        if (!later) nsa__fetch_rows(job, &p->x->k, ahead + i, ahead + i + some, p->k.width);
        if (!k.data)
            k = nsa__rows_widened(f, job, &p->x->k, &p->k, begin + i, some);
        else if (k.rows)
            k.rows += i;
        else
            k.data += i * k.row;
        nsa__product_along(&p->k, some, columns, &k, &q_t, &s_t);
    }
}

/* A copy of the batch's rows of x. A non-finite row becomes zeros and sets its bit of
   f->nonfinite. */
static nsa__matrix nsa__rows_copied(nsa__in_place *f, const nsa__head_job *job, const nsa_tensor *x,
                                    const nsa__operand *o, const nsa__batch *b) {
    nsa__matrix rows = {f->rows, o->stride, 1, NULL};
    nsa_real *copy = f->rows;
    for (int i = 0; i < b->present; i++, copy += o->stride)
        if (!nsa__copy_operand(o, copy, x, nsa__key(job, x, b->key + i)))
            f->nonfinite |= (uint64_t)1 << i;
    return rows;
}

/* The batch's scores as rows of s, `apart` numbers from each other. A non-finite key makes a
   non-finite score, so keys are tested one by one, in copies, only if a score is not finite. The
   last tile may be short: of its keys only `present` exist, and masks hide the rest. */
static void nsa__in_place_scores(nsa__in_place *f, const nsa__head_job *job, const nsa__batch *b,
                                 ptrdiff_t apart, nsa_real *s) {
    const nsa__attend_plan *p = job->plan;
    int columns = (int)nsa__ceil_div(b->rows, NSA__LANES) * NSA__LANES, n = b->present, done = 0;
    nsa__matrix k = nsa__rows_in_place(job, &p->x->k, &p->k, b, f->order);
    f->nonfinite = 0;
    if (k.data || nsa__takes_reals(&p->k)) {
        nsa__in_place_product(f, job, b, &k);
        done = p->tiles->all_finite(n, columns, f->columns, f->s_t);
    }
    if (!done) {
        k = nsa__rows_copied(f, job, &p->x->k, &p->k, b);
        nsa__in_place_product(f, job, b, &k);
    }
    p->tiles->transpose(n, b->rows, f->columns, f->s_t, apart, s);
    for (int r = 0; n < b->end - b->begin && r < b->rows; r++, s += apart)
        for (int i = n; i < b->end - b->begin; i++) s[i] = 0;
}

/* out = out * shrink + p v for the batch's keys. A non-finite value makes its column of out
   non-finite, whatever p is: nsa__forward_repeats sees it. Then values come from copies, where
   non-finite rows are zeros. */
static void nsa__in_place_sums(nsa__in_place *f, const nsa__head_job *job, const nsa__batch *b,
                               const nsa__matrix *weights, const nsa__result *out) {
    const nsa__attend_plan *p = job->plan;
    const nsa__operand *o = &p->v;
    nsa__matrix v = nsa__rows_in_place(job, &p->x->v, o, b, f->order);
    if (f->copies || (!v.data && !nsa__takes_reals(o)))
        v = nsa__rows_copied(f, job, &p->x->v, o, b);
    else if (!v.data)
        v = nsa__rows_widened(f, job, &p->x->v, o, b->key, b->present);
    v = nsa__rows_for_over(o, b->present, v, f->paired);
    nsa__product_over(o, b->rows, b->present, weights, &v, out);
}

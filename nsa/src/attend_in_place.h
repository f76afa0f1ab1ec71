/* ---- Attention: in-place keys -----------------------------------------------------------------
   Twin: none. Not here: when they are (attend_plan.h).
   Small query counts (decoding) use K and V in place, unpacked, because packing a tile would cost
   more than its products do. */
#pragma once
#include "prefetch.h"

/* 1 if every row of bf16 begins where a pair may lie. */
static int nsa__rows_of_pairs(const nsa_tensor *x) {
    return (uintptr_t)x->data % sizeof(nsa__packed) == 0 && !((x->batch | x->token | x->head) & 1);
}

/* Rows of x from key `begin` on, where they lie. From page to page and around a ring's end they do
   not follow each other: `order` then says where each one lies. Without data if no product can read
   them: they are neither reals nor pairs, no whole vectors, or lie apart by what is no multiple of
   a row's stride. */
static nsa__matrix nsa__rows_in_place(const nsa__head_job *job, const nsa_tensor *x, int begin,
                                      int n, int width, int wide, int pairs, int *order) {
    nsa__matrix rows = {NULL, (ptrdiff_t)(pairs ? x->token / 2 : x->token), 1, NULL};
    const nsa__packed *first = (const nsa__packed *)nsa__key(job, x, begin);
    if ((pairs ? !nsa__rows_of_pairs(x) : x->dtype != NSA_REAL_DTYPE) || width != wide) return rows;
    for (int i = 0, some; n > nsa__rows_together(&job->rows, begin) && i < n; i += some) {
        ptrdiff_t apart = (const nsa__packed *)nsa__key(job, x, begin + i) - first;
        ptrdiff_t at = rows.row ? apart / rows.row : 0;
        if (at * rows.row != apart || at < INT_MIN || at > INT_MAX - n) return rows;
        some = (int)nsa__min(n - i, nsa__rows_together(&job->rows, begin + i));
        for (int r = 0; r < some; r++) order[i + r] = (int)at + r;
        rows.rows = order;
    }
    rows.data = first;
    return rows;
}

/* 1 if all numbers of n rows of values in place are finite. */
static int nsa__finite_in_place(const nsa__attend_plan *p, const nsa__matrix *rows, int n) {
    int (*all_finite)(int, int, ptrdiff_t, const nsa__packed *) =
        p->values ? p->values->all_finite : p->tiles->all_finite;
    if (!rows->rows) return all_finite(n, p->stride_v, rows->row, rows->data);
    for (int i = 0; i < n; i++)
        if (!all_finite(1, p->stride_v, 0, rows->data + rows->rows[i] * rows->row)) return 0;
    return 1;
}

/* Copies n rows of x from key `begin` on. A non-finite row becomes zeros and sets its bit of
   `nonfinite`. */
static nsa__matrix nsa__rows_copied(const nsa__head_job *job, const nsa_tensor *x, int begin, int n,
                                    int width, int wide, int pairs, nsa_real *copy,
                                    uint64_t *nonfinite) {
    nsa__matrix rows = {copy, pairs ? wide / 2 : wide, 1, NULL};
    for (int i = 0; i < n; i++, copy += rows.row) {
        const void *from = nsa__key(job, x, begin + i);
        int all_finite = pairs ? nsa__copy_finite_pairs(copy, from, width, wide)
                               : nsa__load_finite(copy, x->dtype, from, width);
        if (!all_finite) *nonfinite |= (uint64_t)1 << i;
        if (!pairs) memset(copy + width, 0, (size_t)(wide - width) * sizeof *copy);
    }
    return rows;
}

/* The first key of the tile that the task iterates to next; job->keys if there is none. */
static int nsa__tile_iter_peek(const nsa__tile_iter *it, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    int tile = it->tile + 1;
    if (p->is.lists)
        while (tile < it->tile_end && it->list_begin[tile] == it->list_begin[tile + 1]) tile++;
    return tile < it->tile_end ? tile * p->cut.tile : job->keys;
}

/* Scratch of a task that reads keys in place. It computes s^T = k q^T, because the right operand of
   a product has contiguous rows: queries are cheap to transpose, keys are not. */
typedef struct nsa__in_place {
    nsa_real *q_t;       /* (depth, columns): q transposed */
    nsa_real *s_t;       /* (tile, columns): the scores of a tile, transposed */
    nsa_real *rows;      /* copies of rows that no product can read in place */
    nsa__packed *paired; /* values as pairs of rows */
    int *order;          /* of rows in place that do not follow each other */
    int columns; /* rows of a batch in whole vectors, and one vector more: a product reads whole
                    vectors from any row on that a batch begins with */
} nsa__in_place;

static void nsa__in_place_alloc(nsa__in_place *f, const nsa__attend_plan *p, nsa__arena *a) {
    int64_t rows = (int64_t)p->cut.batch_queries * p->group;
    f->columns = (int)nsa__ceil_div(rows, NSA__LANES) * NSA__LANES + NSA__LANES;
    f->q_t = nsa__alloc_reals(a, (int64_t)p->d->dim * f->columns);
    f->s_t = nsa__alloc_reals(a, (int64_t)p->cut.tile * f->columns);
    f->order = (int *)nsa__alloc(a, p->cut.tile, sizeof *f->order);
    f->rows =
        nsa__alloc_reals(a, (int64_t)p->cut.tile * (p->wide > p->wide_v ? p->wide : p->wide_v));
    if (p->pairs) f->paired = nsa__alloc_packed(a, (int64_t)p->cut.tile / 2 * p->wide_v);
}

/* Transposes the task's queries; columns behind the last are zeros. */
static void nsa__in_place_begin(const nsa__in_place *f, const nsa__attend_plan *p,
                                const nsa_real *q, int rows) {
    memset(f->q_t, 0, (size_t)p->depth * (size_t)f->columns * sizeof *f->q_t);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < p->depth; c++)
            f->q_t[(ptrdiff_t)c * f->columns + r] = q[(ptrdiff_t)r * p->stride + c];
}

/* s_t = k q_t for n keys from `begin` on. Before each part of the product its values and the next
   tile's keys are prefetched. Every score is the same sum in the same order as from packed keys. */
static void nsa__in_place_product(const nsa__in_place *f, const nsa__head_job *job,
                                  const nsa__tile_iter *it, const nsa__batch *b,
                                  const nsa__matrix *keys, int begin, int n) {
    const nsa__attend_plan *p = job->plan;
    int ahead = nsa__tile_iter_peek(it, job), dim = p->d->dim;
    int columns = (int)nsa__ceil_div(b->rows, NSA__LANES) * NSA__LANES;
    const nsa__matrix q_t = {f->q_t + (ptrdiff_t)b->query[0] * p->group, f->columns, 1, NULL};
    for (int i = 0; i < n; i += NSA__KEYS_AT_ONCE) {
        int some = (int)nsa__min(NSA__KEYS_AT_ONCE, n - i);
        const nsa__matrix k = {keys->data + (keys->rows ? 0 : i * keys->row), keys->row, 1,
                               keys->rows ? keys->rows + i : NULL};
        const nsa__result s_t = {
            f->s_t + (ptrdiff_t)i * f->columns, f->columns, NULL, 0, NULL, NULL};
        nsa__fetch_rows(job, &p->x->v, begin + i, begin + i + some, p->d->dim_v);
        nsa__fetch_rows(job, &p->x->k, ahead + i, ahead + i + some, dim);
        nsa__score_product(p, some, columns, &k, &q_t, &s_t);
    }
}

/* The batch's scores of n keys from `begin` on, as rows of s, `apart` numbers from each other. A
   non-finite key makes a non-finite score, so keys are tested one by one, in copies, only if a
   score is not finite. */
static void nsa__in_place_scores(const nsa__in_place *f, const nsa__head_job *job,
                                 const nsa__tile_iter *it, const nsa__batch *b, int begin, int n,
                                 ptrdiff_t apart, nsa_real *s, uint64_t *nonfinite) {
    const nsa__attend_plan *p = job->plan;
    const nsa_tensor *x = &p->x->k;
    int columns = (int)nsa__ceil_div(b->rows, NSA__LANES) * NSA__LANES, done = 0;
    const int pairs = p->scores != NULL, dim = p->d->dim;
    nsa__matrix k = nsa__rows_in_place(job, x, begin, n, dim, p->wide, pairs, f->order);
    if (k.data) {
        nsa__in_place_product(f, job, it, b, &k, begin, n);
        done = p->tiles->all_finite(n, columns, f->columns, f->s_t);
    }
    if (!done) {
        k = nsa__rows_copied(job, x, begin, n, dim, p->wide, pairs, f->rows, nonfinite);
        nsa__in_place_product(f, job, it, b, &k, begin, n);
    }
    p->tiles->transpose(n, b->rows, f->columns, f->s_t, apart, s);
    for (int r = 0; n < b->end - b->begin && r < b->rows; r++, s += apart)
        for (int i = n; i < b->end - b->begin; i++) s[i] = 0;
}

/* out = out * shrink + p v for n keys from `begin` on. Non-finite rows of values come from copies,
   as zeros. For more rows than a piece has, values of bf16 are paired ahead. */
static void nsa__in_place_sums(const nsa__in_place *f, const nsa__head_job *job, int begin, int n,
                               int rows, const nsa__matrix *weights, const nsa__result *out,
                               uint64_t *nonfinite) {
    const nsa__attend_plan *p = job->plan;
    const nsa_tensor *x = &p->x->v;
    const int pairs = p->values != NULL, dim_v = p->d->dim_v, wide_v = p->wide_v;
    const int ahead = pairs && rows > NSA__PIECE_ROWS;
    const nsa__matrix paired = {f->paired, wide_v, 1, NULL};
    nsa__matrix v = nsa__rows_in_place(job, x, begin, n, dim_v, wide_v, pairs, f->order);
    int done = 0;
    if (v.data)
        done =
            ahead ? p->values->pair_rows(n, wide_v, &v, f->paired) : nsa__finite_in_place(p, &v, n);
    if (!done) {
        v = nsa__rows_copied(job, x, begin, n, dim_v, wide_v, pairs, f->rows, nonfinite);
        if (ahead) p->values->pair_rows(n, wide_v, &v, f->paired);
    }
    if (ahead)
        p->values->gemm(rows, wide_v, (n + 1) / 2, weights, &paired, out, 1);
    else if (pairs)
        p->values->gemm_singles(rows, wide_v, n, weights, &v, out);
    else
        p->tiles->gemm(rows, wide_v, n, weights, &v, out);
}

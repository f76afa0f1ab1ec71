/* ---- Attention: formats of operands -------------------------------------------------------------
   Twin: kernels/tiles.cuh. Not here: products (tiles.inl), how rows are read (attend_rows.h,
   attend_pack.h, attend_in_place.h).
   Attention multiplies along rows, q k and dout v, and over rows, as p v and ds k. A format says
   how a row lies and which products take it: numbers, or pairs of bf16. In rows that are multiplied
   along, a pair is two neighbours of a row; over rows it is one column of two neighbouring rows. */
#pragma once
#include "schedule.h"
#include "tiles.h"

/* Rows of q and k, or of dout and v. */
typedef struct nsa__operand {
    const nsa__tiles *tiles;
    const nsa__pairs *pairs; /* of bf16; NULL: numbers */
    int width, wide;         /* dim or dim_v, and rounded up to whole vectors */
    int depth;               /* what a product sums along a row: width, or half of it in pairs */
    int stride;              /* from row to row, where they lie side by side: wide, or half of it */
    nsa_real
        scale; /* of q k. q is loaded times it; in pairs, which would round, products have it */
} nsa__operand;

static nsa__operand nsa__operand_of(const nsa__tiles *tiles, int width, double scale) {
    const int wide = nsa__whole_vectors(width);
    const nsa__operand o = {tiles, NULL, width, wide, width, wide, (nsa_real)scale};
    return o;
}

static void nsa__operand_pair(nsa__operand *o, const nsa__pairs *pairs) {
    o->pairs = pairs;
    o->depth = (o->width + 1) / 2;
    o->stride = o->wide / 2;
}

/* A product takes pairs of bf16 where all that it reads is bf16, in backward where dout is too.
   Forward and selection ask this alike for q k, so both have the same scores. A size query has no
   x: pairs take less. Returns the products of bf16 that the machine has and the caller wants. */
static const nsa__pairs *nsa__pair_operands(nsa__operand *k, nsa__operand *v, const nsa_attend *x,
                                            const nsa_attend *dx, const nsa_desc *d) {
    const nsa__pairs *pairs = nsa__pairs_of(d);
    if (!x || !pairs || (dx && dx->out.dtype != NSA_BF16)) return pairs;
    int scores = x->q.dtype == NSA_BF16 && x->k.dtype == NSA_BF16;
    int values = x->v.data && x->v.dtype == NSA_BF16;
    if (dx && !(scores && values)) return pairs;
    if (scores) nsa__operand_pair(k, pairs);
    if (values) nsa__operand_pair(v, pairs);
    return pairs;
}

/* c = scale a b, along the rows of both. The order of a sum is the same from packed keys and in
   place, and each multiplies q by k as k by q. */
static void nsa__product_along(const nsa__operand *o, int m, int n, const nsa__matrix *a,
                               const nsa__matrix *b, const nsa__result *c) {
    if (o->pairs)
        o->pairs->gemm(m, n, o->depth, a, b, c, o->scale);
    else
        o->tiles->gemm(m, n, o->depth, a, b, c);
}

/* c = a b, over n rows of b. */
static void nsa__product_over(const nsa__operand *o, int m, int n, const nsa__matrix *a,
                              const nsa__matrix *b, const nsa__result *c) {
    if (o->pairs)
        o->pairs->gemm(m, o->wide, (n + 1) / 2, a, b, c, 1);
    else
        o->tiles->gemm(m, o->wide, n, a, b, c);
}

/* n rows of it, side by side, as `columns` columns of `to`. Those behind the last are zeros, as up
   to 15 rows behind the n become. */
static void nsa__rows_to_columns(const nsa__operand *o, int n, nsa_real *rows, int columns,
                                 nsa_real *to) {
    const int behind = nsa__whole_vectors(n) - n;
    memset(rows + (ptrdiff_t)n * o->stride, 0, (size_t)behind * (size_t)o->stride * sizeof *rows);
    memset(to, 0, (size_t)o->depth * (size_t)columns * sizeof *to);
    o->tiles->transpose(n, o->depth, o->stride, rows, columns, to);
}

/* n rows as such a product takes them: pairs of rows go to `paired`, which numbers do not need. */
static nsa__matrix nsa__rows_for_over(const nsa__operand *o, int n, nsa__matrix rows,
                                      nsa__packed *paired) {
    const nsa__matrix pairs = {paired, o->wide, 1, NULL};
    if (!o->pairs) return rows;
    o->pairs->pair_rows(n, o->wide, &rows, paired);
    return pairs;
}

/* p or ds, the left operand of such products: in pairs rounded, times factor of the row, to pairs
   by key. They also go to `by_row`, if it is there; what is multiplied along a row is returned. */
static const nsa__packed *nsa__round_left(const nsa__operand *o, const nsa__scored *x, ptrdiff_t ld,
                                          const nsa_real *factor, nsa_real *s,
                                          nsa__packed *by_row) {
    if (!o->pairs) return s;
    o->pairs->round_pairs(x->rows, x->n, ld, x->row, factor, s, by_row);
    return by_row;
}

/* The same of p, which no other product reads: row by row, from each row's start on. */
static void nsa__round_rows(const nsa__operand *o, int rows, int n, ptrdiff_t ld, nsa_real *s) {
    if (o->pairs) o->pairs->round_rows(rows, n, ld, s);
}

/* Whether a product reads reals, which rows of every dtype may be widened to; and whether what was
   loaded may be multiplied where it is, which would round pairs twice. */
static int nsa__takes_reals(const nsa__operand *o) {
    return !o->pairs;
}

/* What so many rows are to such a product: rows, or pairs of them. */
static ptrdiff_t nsa__rows_over(const nsa__operand *o, ptrdiff_t rows) {
    return o->pairs ? rows / 2 : rows;
}

/* What a sum over rows of q lacks: the scale, if rows were not loaded times it. */
static nsa_real nsa__sum_scale(const nsa__operand *o) {
    return o->pairs ? o->scale : 1;
}

/* Numbers of the format from row to row of a view, and whether products read its rows where they
   lie: they are of the format, whole vectors, and pairs begin where a pair may lie. */
static ptrdiff_t nsa__operand_stride(const nsa__operand *o, const nsa_tensor *x) {
    return (ptrdiff_t)(o->pairs ? x->token / 2 : x->token);
}
static int nsa__is_operand(const nsa__operand *o, const nsa_tensor *x) {
    if (o->width != o->wide) return 0;
    if (!o->pairs) return x->dtype == NSA_REAL_DTYPE;
    return (uintptr_t)x->data % sizeof(nsa__packed) == 0 && !((x->batch | x->token | x->head) & 1);
}

/* Copies rows of x from `row` on as reals, with zeros behind each. */
static void nsa__widen_rows(const nsa__operand *o, int rows, const nsa_tensor *x, const void *row,
                            nsa_real *to) {
    const size_t behind = (size_t)(o->wide - o->width) * sizeof *to;
    for (int r = 0; behind && r < rows; r++)
        memset(to + (ptrdiff_t)r * o->stride + o->width, 0, behind);
    o->tiles->widen(rows, o->width, x, row, o->stride, to);
}

/* A non-finite row becomes zeros and returns 0: the caller records it in a mask, and queries that
   use the row get NaN at the end. So no kernel meets a NaN and no other query is affected. In place
   it is otherwise: there the scores of a tile are checked afterwards, and at the end the output. */
static int nsa__finite_row(const nsa__operand *o, nsa_real *row) {
    if (o->tiles->all_finite(1, o->wide, 0, row)) return 1;
    memset(row, 0, (size_t)o->wide * sizeof *row);
    return 0;
}

/* The same of many rows of numbers: nonfinite[r] becomes 1. Few tasks have such a row, and a look
   at all of them costs little more than at one. */
static void nsa__zero_nonfinite(const nsa__operand *o, int rows, nsa_real *x,
                                unsigned char *nonfinite) {
    if (o->pairs || o->tiles->all_finite(rows, o->wide, o->stride, x)) return;
    for (int r = 0; r < rows; r++)
        if (!nsa__finite_row(o, x + (ptrdiff_t)r * o->stride)) nonfinite[r] = 1;
}

/* Copies a row of the format, and returns the same, but for numbers, which nsa__zero_nonfinite is
   to look at. */
static int nsa__copy_row(const nsa__operand *o, nsa_real *to, const nsa_tensor *x,
                         const void *from) {
    if (o->pairs) return nsa__copy_finite_pairs(to, from, o->width, o->wide);
    nsa__widen_rows(o, 1, x, from, to);
    return 1;
}

/* The same of one row alone. */
static int nsa__copy_operand(const nsa__operand *o, nsa_real *to, const nsa_tensor *x,
                             const void *from) {
    return nsa__copy_row(o, to, x, from) && (o->pairs || nsa__finite_row(o, to));
}

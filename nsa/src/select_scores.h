/* ---- Selection: scores of blocks -------------------------------------------------------------
   Twin: kernels/select_score.cuh. Not here: who asks for lists (score.h, attend_forward.h).
   From scores to lists, for the queries of a task. nsa_select_blocks computes the scores for this
   end; cmp's forward keeps those that it computes anyway.
     Eq. 8:  p_cmp = exp(scale q k_cmp - lse_cmp), of every head
     Eq. 10: p_cmp is summed over the heads of a group
     Eq. 9:  p_slc[j] = sum_u stencil[u] p_cmp[j l'/d - lead + u]
     Eq. 11: nsa__rank
   Eq. 10 comes before Eq. 9, because Eq. 9 is linear: the heads' sum is mapped once, not each head.
   The maximum of NSA_SCORE_OVERLAP_MAX is taken over that sum. */
#pragma once
#include "lists.h"
#include "attend_tiles.h"

/* What selection needs of a task's rows: all of their scores against the compressed keys. */
typedef struct nsa__scoring {
    nsa_real *s;      /* of every row, its scores against all compressed keys, times scale; then
                         in the first row of a query p_cmp, summed over the group's heads */
    int64_t stride;   /* of a row of s: whole tiles and one vector */
    nsa_real *scores; /* of one query and selection block: p_slc */
} nsa__scoring;

/* Eq. 9 in strides: selection block j collects compressed blocks j l'/d - lead .. j l'/d - lead +
   size - 1. With l 32, d 16, l' 64 these are blocks 4j - 1 .. 4j + 3, with weights 1 2 2 2 1. */
static int nsa__stencil_lead(const nsa_desc *d) {
    return d->cmp_block / d->cmp_stride - 1;
}
static int nsa__stencil_size(const nsa_desc *d) {
    return d->slc_block / d->cmp_stride + nsa__stencil_lead(d);
}

static void nsa__scoring_alloc(nsa__scoring *f, const nsa__attend_plan *p, nsa__arena *a) {
    /* One vector more: rows a power of two apart would share the same few sets of the cache. */
    f->stride = nsa__ceil_div(nsa__max_keys(p), p->cut.tile) * p->cut.tile + NSA__LANES;
    f->s = nsa__alloc_reals(a, (int64_t)p->cut.task_queries * p->group * f->stride);
    f->scores = nsa__alloc_reals(a, nsa_slc_count(p->d, p->d->tokens));
}

/* Scores of the candidates of one query from its p_cmp. The stencil is cut at block 0 and at the
   last compressed block that the query sees. A candidate without such a block has score 0. One
   weight at a time for all candidates: a candidate alone has too few for a loop. The weight is
   nsa_block_overlap's, of a block whose stencil does not begin before block 0. */
NSA__COMPILED static void nsa__scores(const nsa__scoring *f, const nsa__head_job *job, int query,
                                      const nsa_real *p_cmp) {
    const nsa_desc *d = job->plan->d;
    nsa_real *scores = f->scores;
    const int visible = nsa__cmp_visible(d, job->seq.tokens, query);
    const int candidates = nsa__slc_candidates(d, job->seq.tokens, query);
    const int step = d->slc_block / d->cmp_stride, lead = nsa__stencil_lead(d);
    memset(scores, 0, (size_t)candidates * sizeof *scores);
    for (int u = 0; u < nsa__stencil_size(d); u++) {
        const nsa_real weight = (nsa_real)(nsa__min(u + 1, step) - nsa__max(u - lead, 0));
        const int from = (int)nsa__ceil_div(nsa__max(0, lead - u), step);
        const int to = (int)nsa__min(candidates, nsa__ceil_div(visible + lead - u, step));
        for (int j = from; j < to; j++) {
            const nsa_real value = p_cmp[(ptrdiff_t)j * step + u - lead];
            if (d->score_map == NSA_SCORE_OVERLAP_SUM)
                scores[j] += weight * value;
            else if (value > scores[j])
                scores[j] = value;
        }
    }
}

/* The row of a query and of the list that the job makes. */
static void *nsa__list_row(const nsa__head_job *job, const nsa_tensor *x, int query) {
    return nsa__row(x, job->seq.batch, job->seq.row + query - job->seq.first, job->head);
}

/* Stores n numbers, and `behind` up to the row's width. */
static void nsa__store_reals(void *row, const nsa_real *from, int n, int width, nsa_real behind) {
    nsa_real *to = (nsa_real *)row;
    memcpy(to, from, (size_t)n * sizeof *to);
    for (; n < width; n++) to[n] = behind;
}

/* Ends a query: stores its scores, if they are asked for, and its list, Eq. 11. The scores become
   integers in their order. */
static void nsa__store_list(const nsa__head_job *job, int query, nsa_real *scores) {
    const nsa__attend_plan *p = job->plan;
    const nsa_select *to = p->select;
    const int n = nsa__slc_candidates(p->d, job->seq.tokens, query);
    if (to->scores.data)
        nsa__store_reals(nsa__list_row(job, &to->scores, query), scores, n,
                         nsa_slc_count(p->d, p->d->tokens), nsa__minus_infinity());
    nsa__order(scores, n);
    nsa__rank(scores, n, nsa__forced_local(p->d, job->seq.tokens, query), p->d, p->tiles,
              (int32_t *)nsa__list_row(job, &to->blocks, query));
}

/* p_cmp of n keys of every query of a task, from `key` on. */
static void nsa__select_keys(const nsa__head_job *job, const nsa__tile_iter *it,
                             const nsa__scoring *f, const nsa_real *lse, int key, int n) {
    const nsa__attend_plan *p = job->plan;
    for (int a = 0; a < it->queries; a++) {
        const int visible = nsa__cmp_visible(p->d, job->seq.tokens, it->first + a);
        const int end = (int)nsa__min((int64_t)key + n, nsa__whole_vectors(visible));
        nsa_real *s = f->s + (ptrdiff_t)a * p->group * f->stride + key;
        p->tiles->probability(p->group, end - key, (ptrdiff_t)f->stride,
                              lse + (ptrdiff_t)a * p->group, s, s);
    }
}

/* Scores and list of every query of a task, from p_cmp. A query that read a non-finite number gets
   the list of equal scores, because its real scores are NaN and a list must still be valid. */
static void nsa__select_queries(const nsa__head_job *job, const nsa__tile_iter *it,
                                const nsa__scoring *f, const unsigned char *nonfinite_rows) {
    const nsa__attend_plan *p = job->plan;
    const nsa_tensor *to = &p->select->p_cmp;
    int group = p->group;
    for (int a = 0; a < it->queries; a++) {
        int query = it->first + a, nonfinite = 0;
        int visible = nsa__cmp_visible(p->d, job->seq.tokens, query);
        int candidates = nsa__slc_candidates(p->d, job->seq.tokens, query);
        const nsa_real *p_cmp = f->s + (ptrdiff_t)a * group * f->stride;
        nsa__scores(f, job, query, p_cmp);
        for (int g = 0; g < group; g++) nonfinite |= nonfinite_rows[a * group + g];
        for (int j = 0; nonfinite && j < candidates; j++) f->scores[j] = 0;
        if (to->data)
            nsa__store_reals(nsa__list_row(job, to, query), p_cmp, nonfinite ? 0 : visible,
                             nsa_cmp_count(p->d, p->d->tokens), 0);
        nsa__store_list(job, query, f->scores);
    }
}

static void nsa__select(const nsa__head_job *job, const nsa__tile_iter *it, const nsa__scoring *f,
                        const nsa_real *lse, const unsigned char *nonfinite_rows) {
    nsa__select_keys(job, it, f, lse, 0, INT_MAX);
    nsa__select_queries(job, it, f, nonfinite_rows);
}

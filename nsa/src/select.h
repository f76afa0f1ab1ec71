/* ---- Selection ----------------------------------------------------------------------------------
   Twin: kernels/select_blocks.cuh. Not here: selection from cmp's own scores (attend_forward.h),
   tasks of nsa_select_blocks (score.h). */
#pragma once
#include "score.h"

/* Ranking of scores that are given: a head job of which sequence and head are used. */
typedef struct nsa__rank_job {
    nsa__head_job job;
    const nsa_tensor *scores;
} nsa__rank_job;

/* Eq. 11 for a query: its scores as reals, then as ordered integers, then the lists. */
static void nsa__rank_token(const void *context, int64_t t, void *scratch) {
    const nsa_tensor *x = ((const nsa__rank_job *)context)->scores;
    nsa__head_job job = ((const nsa__rank_job *)context)->job;
    nsa_real *scores = (nsa_real *)scratch;
    const int query = job.seq.first + (int)t;
    const int n = nsa__slc_candidates(job.plan->d, job.seq.tokens, query);
    for (job.head = 0; job.head < job.plan->heads; job.head++) {
        nsa__load(scores, x->dtype, nsa__list_row(&job, x, query), n);
        nsa__order(scores, n);
        nsa__rank_query(&job, query, scores);
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
    nsa__rank_job rank;
    nsa__team team;
    nsa_desc own;
    nsa_select to;
    d = nsa__rank_desc(d, &own);
    const nsa__checked c = nsa__checked_of(d, 1, 0);
    NSA__CHECK(nsa__check_call(&c, nsa__rank_views, NSA__RANK_VIEWS, NULL, x));
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, 0, nsa__rank_scratch(d)));
    memset(&to, 0, sizeof to);
    to.blocks = x->blocks;
    nsa__attend_plan p = nsa__attend_plan_of(NULL, NULL, d, NSA__DENSE, 1, 1);
    p.select = &to;
    rank.job = nsa__job_make(&p);
    rank.scores = &x->scores;
    nsa__run_tokens(&team, d, &rank.job.seq, nsa__rank_token, &rank);
    return NSA_OK;
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

/* indexer.h - sparse attention by a learned indexer, as DeepSeek's, Qwen's and MiniMax's have it:
   heads of their own score tokens, the best blocks of tokens are read by one softmax.
   Twin: none. Not here: the sizes of a method; dsa.c, qsa.c and msa.c have them. */
#ifndef INDEXER_H
#define INDEXER_H

#include "family.h"

typedef struct indexer {
    const char *name;
    int T, H, Hk, D;       /* of attention */
    int heads, list_heads; /* index heads; lists: one for each kv head, or one for all */
    int key_heads;         /* heads of index keys: one for each list, or one for all */
    int dim;               /* of an index head */
    int block, count;      /* tokens of a block, blocks of a list */
    int local;             /* forced blocks at the query, inside the count; 0: nothing is forced */
    int weighted;          /* heads have weights that depend on the query */
    int pooled;            /* index keys are means of `block` tokens, one a block */
    nsa_score_act act;
} indexer;

typedef struct index_inputs {
    float *q, *k, *weights; /* (T, heads, dim), (T, key_heads, dim), (T, heads) */
} index_inputs;

/* The geometry that the scores and their lists have. */
static inline nsa_desc index_desc(const indexer *x) {
    nsa_desc d = nsa_desc_default(1, x->T, x->heads, x->list_heads, x->dim);
    d.cmp_block = d.cmp_stride = d.slc_block = x->block; /* nothing is compressed here */
    d.slc_count = x->count, d.slc_init = 0, d.slc_local = x->local;
    d.forced = x->local ? NSA_FORCED_INSIDE : NSA_FORCED_ON_TOP; /* none on top of the count */
    return d;
}

/* One call scores and ranks, one attends, one goes back. */
static inline void with_nsa(const indexer *x, const index_inputs *in, problem *p, int32_t *lists,
                            float *scores) {
    nsa_desc of_scores = index_desc(x), of_attention = nsa_desc_default(1, x->T, x->H, x->Hk, x->D);
    nsa_score score = {NSA_SCORE_LINEAR, NSA_POOL_MAX, {0}, {0}, {0}, {0}, {0}};
    nsa_attend a = views_of(p), da = gradients_of(p);
    score.act = x->act, score.pool = x->pooled ? NSA_POOL_MEAN : NSA_POOL_MAX;
    score.q = view(in->q, x->T, x->heads, x->dim);
    score.k = view(in->k, x->T, x->key_heads, x->dim);
    if (x->key_heads < x->list_heads) score.k.head = 0; /* all lists share one head of keys */
    if (x->weighted) score.weights = view(in->weights, x->T, x->heads, 1);
    score.blocks = nsa_tensor_bthd(lists, NSA_I32, x->T, x->list_heads, x->count);
    score.scores = view(scores, x->T, x->list_heads, nsa_slc_count(&of_scores, x->T));
    WITH_WORKSPACE(nsa_score_blocks_workspace_size(&of_scores),
                   nsa_score_blocks(&score, &of_scores, workspace, bytes));

    of_attention.slc_block = x->block, of_attention.slc_count = x->count;
    a.blocks = score.blocks;
    if (x->list_heads < x->Hk) a.blocks.head = 0; /* all heads share one list */
    WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&of_attention),
                   nsa_attend_slc_forward(&a, &of_attention, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&of_attention),
                   nsa_attend_slc_backward(&da, &a, &of_attention, workspace, bytes));
}

/* score of token s = sum over the heads of w act(q . k[s]); of a block the largest, or that of the
   mean of its keys. Forced blocks have +inf. */
static inline void scores_naively(const indexer *x, const index_inputs *in, int t, int list,
                                  int forced, double *of_block) {
    int group = x->heads / x->list_heads, key_head = list * x->key_heads / x->list_heads;
    for (int j = 0; j <= t / x->block; j++) {
        double best = -INFINITY, sum = 0;
        int n = 0;
        for (int s = j * x->block; s < (j + 1) * x->block && s <= t; s++, n++) {
            double score = 0;
            for (int h = list * group; h < (list + 1) * group; h++) {
                double product = dot(in->q + (t * x->heads + h) * x->dim,
                                     in->k + (s * x->key_heads + key_head) * x->dim, x->dim);
                if (x->act == NSA_SCORE_RELU && product < 0) product = 0;
                score += (x->weighted ? (double)in->weights[t * x->heads + h] : 1) * product;
            }
            sum += score;
            best = score > best ? score : best;
        }
        of_block[j] = x->pooled ? sum / n : best;
        if (forced && j > t / x->block - x->local) of_block[j] = INFINITY;
    }
}

static inline int indexer_main(const indexer *x) {
    problem p = problem_new(x->T, x->H, x->Hk, x->D);
    result r = result_new(&p);
    size_t T = (size_t)x->T, lists_of = T * (size_t)x->list_heads;
    size_t blocks = (T + (size_t)x->block - 1) / (size_t)x->block;
    index_inputs in = {random_floats(11, T * (size_t)(x->heads * x->dim)),
                       random_floats(12, T * (size_t)(x->key_heads * x->dim)),
                       random_floats(13, T * (size_t)x->heads)};
    int32_t *lists = (int32_t *)allocate(lists_of * (size_t)x->count * sizeof *lists);
    float *scores = floats(lists_of * blocks);
    double *of_block = doubles(blocks), *want = doubles(lists_of * blocks);
    int best = 1;
    printf("%s\n", x->name);
    with_nsa(x, &in, &p, lists, scores);
    for (size_t row = 0; row < lists_of; row++) {
        int t = (int)row / x->list_heads, list = (int)row % x->list_heads;
        int candidates = t / x->block + 1;
        for (size_t j = 0; j < blocks; j++) want[row * blocks + j] = -INFINITY;
        scores_naively(x, &in, t, list, 0, want + row * blocks);
        scores_naively(x, &in, t, list, 1, of_block);
        best &= is_best(lists + row * (size_t)x->count, x->count, of_block, candidates);
    }
    compare("scores", scores, want, lists_of * blocks);
    check(best, "every list holds the best blocks");
    mask_of_lists(&p, lists, x->list_heads, x->count, x->block);
    attend_naively(&p, NULL, NULL, &r);
    compare_all(&p, &r);
    release(in.q), release(in.k), release(in.weights), release(lists), release(scores),
        release(of_block), release(want);
    return finish(&p, &r);
}

#endif

/* indexer.h - sparse attention by a learned indexer, as DeepSeek's and MiniMax's have it: heads of
   their own score tokens, the best blocks of tokens are read by one softmax. Each is computed for
   one sequence, and for several that are packed, whose lists count from their own first token.
   Twin: none. Not here: the sizes of a method; dsa.c and msa.c have them. */
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
    int layers;            /* that read by the lists of the first, as GLM-5's do */
    nsa_score_act act;
} indexer;

typedef struct index_inputs {
    float *q, *k, *weights; /* (T, heads, dim), (T, key_heads, dim), (T, heads) */
} index_inputs;

/* Where sequences begin and end. */
typedef struct sequences {
    int number, longest;
    int32_t *begins;
} sequences;

static inline sequences sequences_of(const indexer *x, int packed) {
    sequences s = {packed ? 3 : 1, packed ? x->T - x->T / 3 : x->T, NULL};
    s.begins = (int32_t *)allocate(4 * sizeof *s.begins);
    s.begins[1] = s.begins[2] = packed ? x->T / 3 : x->T; /* the second one is empty */
    s.begins[3] = x->T;
    return s;
}

/* Of query t. */
static inline int begin_of(const sequences *s, int t) {
    return t >= s->begins[1] ? s->begins[1] : 0;
}

static inline nsa_desc desc_of(const sequences *s, int heads, int kv_heads, int dim) {
    nsa_desc d = nsa_desc_default(s->number, s->longest, heads, kv_heads, dim);
    if (s->number > 1) d.begins = s->begins;
    return d;
}

/* One call scores and ranks. */
static inline void choose(const indexer *x, const index_inputs *in, const sequences *s,
                          nsa_tensor blocks, float *scores) {
    nsa_desc d = desc_of(s, x->heads, x->list_heads, x->dim);
    d.cmp_block = d.cmp_stride = d.slc_block = x->block; /* nothing is compressed here */
    d.slc_count = x->count, d.slc_init = 0, d.slc_local = x->local;
    d.forced = x->local ? NSA_FORCED_INSIDE : NSA_FORCED_ON_TOP; /* none on top of the count */
    nsa_score score = {NSA_SCORE_LINEAR, NSA_POOL_MAX, {0}, {0}, {0}, {0}, {0}, 0};
    score.act = x->act;
    score.q = view(in->q, x->T, x->heads, x->dim);
    score.k = view(in->k, x->T, x->key_heads, x->dim);
    if (x->key_heads < x->list_heads) score.k.head = 0; /* all lists share one head of keys */
    if (x->weighted) score.weights = view(in->weights, x->T, x->heads, 1);
    score.blocks = blocks;
    score.scores = view(scores, x->T, x->list_heads, nsa_slc_count(&d, s->longest));
    WITH_WORKSPACE(nsa_score_blocks_workspace_size(&d),
                   nsa_score_blocks(&score, &d, workspace, bytes));
}

/* One call attends, one goes back. */
static inline void attend(const indexer *x, const sequences *s, problem *p, nsa_tensor blocks) {
    nsa_desc d = desc_of(s, x->H, x->Hk, x->D);
    nsa_attend a = views_of(p), da = gradients_of(p);
    d.slc_block = x->block, d.slc_count = x->count;
    a.blocks = blocks;
    if (x->list_heads < x->Hk) a.blocks.head = 0; /* all heads share one list */
    WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&d),
                   nsa_attend_slc_forward(&a, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&d),
                   nsa_attend_slc_backward(&da, &a, &d, workspace, bytes));
}

/* ---- The definition ---- */

/* score of token s = sum over the heads of w act(q . k[s]); of a block the largest. Forced blocks
   have +inf. Blocks count from `begin`, the query's sequence. */
static inline void scores_naively(const indexer *x, const index_inputs *in, int begin, int t,
                                  int list, int forced, double *of_block) {
    int group = x->heads / x->list_heads, key_head = list * x->key_heads / x->list_heads;
    int own = (t - begin) / x->block;
    for (int j = 0; j <= own; j++) {
        double best = -INFINITY;
        for (int s = begin + j * x->block; s < begin + (j + 1) * x->block && s <= t; s++) {
            double score = 0;
            for (int h = list * group; h < (list + 1) * group; h++) {
                double product = dot(in->q + (t * x->heads + h) * x->dim,
                                     in->k + (s * x->key_heads + key_head) * x->dim, x->dim);
                if (x->act == NSA_SCORE_RELU && product < 0) product = 0;
                score += (x->weighted ? (double)in->weights[t * x->heads + h] : 1) * product;
            }
            best = score > best ? score : best;
        }
        of_block[j] = forced && j > own - x->local ? INFINITY : best;
    }
}

/* What a query reads by its list: tokens s <= t of its blocks, in its own sequence. */
static inline void mask_naively(const indexer *x, const sequences *s, const int32_t *lists,
                                problem *p) {
    for (int t = 0; t < x->T; t++)
        for (int h = 0; h < x->H; h++) {
            const int32_t *list =
                lists + (t * x->list_heads + h / (x->H / x->list_heads)) * x->count;
            unsigned char *mask = p->mask + ((size_t)t * (size_t)x->H + (size_t)h) * (size_t)x->T;
            int begin = begin_of(s, t);
            for (int i = 0; i < x->count && list[i] >= 0; i++)
                for (int key = begin + list[i] * x->block, n = 0; n < x->block && key <= t;
                     n++, key++)
                    mask[key] = 1;
        }
}

/* A layer's own q, k and v; all of them read by the same lists. */
static inline void layer(const indexer *x, const sequences *s, nsa_tensor blocks, int number) {
    problem p = problem_new(x->T, x->H, x->Hk, x->D);
    result r = result_new(&p);
    for (int i = 0; number && i < x->T * x->H * x->D; i++) p.q[i] = -p.q[i];
    attend(x, s, &p, blocks);
    mask_naively(x, s, (const int32_t *)blocks.data, &p);
    attend_naively(&p, NULL, NULL, &r);
    compare_all(&p, &r);
    finish(&p, &r);
}

static inline void run(const indexer *x, int packed) {
    sequences s = sequences_of(x, packed);
    size_t T = (size_t)x->T, lists_of = T * (size_t)x->list_heads;
    size_t blocks = ((size_t)s.longest + (size_t)x->block - 1) / (size_t)x->block;
    index_inputs in = {random_floats(11, T * (size_t)(x->heads * x->dim)),
                       random_floats(12, T * (size_t)(x->key_heads * x->dim)),
                       random_floats(13, T * (size_t)x->heads)};
    int32_t *lists = (int32_t *)allocate(lists_of * (size_t)x->count * sizeof *lists);
    float *scores = floats(lists_of * blocks);
    double *of_block = doubles(blocks), *want = doubles(lists_of * blocks);
    nsa_tensor view_of_lists = nsa_tensor_bthd(lists, NSA_I32, x->T, x->list_heads, x->count);
    int best = 1;
    printf("%s%s\n", x->name, packed ? ", packed" : "");
    choose(x, &in, &s, view_of_lists, scores);
    for (size_t row = 0; row < lists_of; row++) {
        int t = (int)row / x->list_heads, list = (int)row % x->list_heads;
        int begin = begin_of(&s, t), candidates = (t - begin) / x->block + 1;
        for (size_t j = 0; j < blocks; j++) want[row * blocks + j] = -INFINITY;
        scores_naively(x, &in, begin, t, list, 0, want + row * blocks);
        scores_naively(x, &in, begin, t, list, 1, of_block);
        best &= is_best(lists + row * (size_t)x->count, x->count, of_block, candidates);
    }
    compare("scores", scores, want, lists_of * blocks);
    check(best, "every list holds the best blocks");
    for (int i = 0; i <= x->layers; i++) layer(x, &s, view_of_lists, i);
    release(in.q), release(in.k), release(in.weights), release(lists), release(scores),
        release(of_block), release(want), release(s.begins);
}

static inline int indexer_main(const indexer *x) {
    run(x, 0);
    run(x, 1);
    return failures;
}

#endif

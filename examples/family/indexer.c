/* indexer.c - training a lightning indexer (DeepSeek Sparse Attention, arXiv 2512.02556) by its KL
   loss: the target is the attention of all heads, summed and normalised; the indexer's scores
   sum_h w_h ReLU(q_h . k) go through a softmax. First over all earlier tokens, then over the tokens
   of its own lists alone. The model is fixed, every step sees a new sequence, and recall is
   measured on one that no step sees: the share of the best tokens by attention that are in the
   lists by the indexer.
   Twin: none. Not here: the lists in attention (dsa.c). */
#include "family.h"

enum { T = 128, E = 16, H = 4, D = 16, HEADS = 4, DIM = 16, COUNT = 16, WARM = 200, STEPS = 400 };

/* A matrix of E rows, its gradient, and what Adam keeps of it. */
typedef struct parameter {
    int columns;
    float *w, *dw, *m, *v;
} parameter;

static parameter parameter_new(unsigned seed, int columns, float size) {
    size_t n = (size_t)(E * columns);
    parameter p = {columns, random_floats(seed, n), floats(n), floats(n), floats(n)};
    for (size_t i = 0; i < n; i++) p.w[i] *= size / sqrtf(E);
    return p;
}

static void parameter_free(parameter *p) {
    release(p->w), release(p->dw), release(p->m), release(p->v);
}

/* out = x w */
static void project(const float *x, const parameter *p, float *out) {
    for (int t = 0; t < T; t++)
        for (int c = 0; c < p->columns; c++) {
            float sum = 0;
            for (int e = 0; e < E; e++) sum += x[t * E + e] * p->w[e * p->columns + c];
            out[t * p->columns + c] = sum;
        }
}

/* dw = x^T dout, then a step of Adam. */
static void learn(const float *x, const float *dout, parameter *p, int step) {
    const float rate = 0.02f, left_m = 1 - powf(0.9f, (float)step),
                left_v = 1 - powf(0.99f, (float)step);
    for (int i = 0; i < E * p->columns; i++) {
        p->dw[i] = 0;
        for (int t = 0; t < T; t++)
            p->dw[i] += x[t * E + i / p->columns] * dout[t * p->columns + i % p->columns];
        p->m[i] += 0.1f * (p->dw[i] - p->m[i]);
        p->v[i] += 0.01f * (p->dw[i] * p->dw[i] - p->v[i]);
        p->w[i] -= rate * (p->m[i] / left_m) / (sqrtf(p->v[i] / left_v) + 1e-8f);
    }
}

/* What attention says of a sequence x: p_cmp of single tokens, summed over all heads, and the best
   tokens by it. */
typedef struct attention {
    parameter wq, wk;
    float *q, *k, *out, *lse, *p;
    int32_t *best;
} attention;

static nsa_desc tokens_as_blocks(int heads, int dim, int count) {
    nsa_desc d = nsa_desc_default(1, T, heads, 1, dim);
    d.cmp_block = d.cmp_stride = d.slc_block = 1;
    d.slc_count = count, d.slc_init = d.slc_local = 0;
    d.forced = NSA_FORCED_ON_TOP; /* none */
    return d;
}

static void attend(attention *a, const float *x) {
    nsa_desc d = tokens_as_blocks(H, D, COUNT);
    project(x, &a->wq, a->q), project(x, &a->wk, a->k);
    nsa_attend dense = {view(a->q, T, H, D),   view(a->k, T, 1, D),   view(a->k, T, 1, D),
                        view(a->out, T, H, D), view(a->lse, T, H, 1), {0}};
    nsa_select select = {dense.q, dense.k, dense.lse, {0}, {0}, view(a->p, T, 1, T)};
    select.blocks = nsa_tensor_bthd(a->best, NSA_I32, T, 1, COUNT);
    WITH_WORKSPACE(nsa_attend_dense_forward_workspace_size(&d),
                   nsa_attend_dense_forward(&dense, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_select_blocks_workspace_size(&d),
                   nsa_select_blocks(&select, &d, workspace, bytes));
}

/* The indexer, and a list's scores with their gradient. */
typedef struct indexer {
    parameter wq, wk, ww;
    float *q, *k, *w, *dq, *dk, *dw, *scores, *dscores;
    int32_t *lists;
} indexer;

/* The indexer's own lists of `count` tokens; of T, all earlier tokens. */
static nsa_score choose(indexer *x, const float *tokens, int count) {
    nsa_desc d = tokens_as_blocks(HEADS, DIM, count);
    nsa_score s = {NSA_SCORE_RELU, NSA_POOL_MAX, {0}, {0}, {0}, {0}, {0}, 0};
    project(tokens, &x->wq, x->q), project(tokens, &x->wk, x->k), project(tokens, &x->ww, x->w);
    s.q = view(x->q, T, HEADS, DIM), s.k = view(x->k, T, 1, DIM);
    s.weights = view(x->w, T, HEADS, 1);
    s.blocks = nsa_tensor_bthd(x->lists, NSA_I32, T, 1, count);
    WITH_WORKSPACE(nsa_score_blocks_workspace_size(&d), nsa_score_blocks(&s, &d, workspace, bytes));
    return s;
}

/* KL(p || softmax of the scores) of one list, p normalised over it, and the gradient of scores:
   softmax - p. */
static double loss_of(const int32_t *list, const float *p, const float *scores, float *dscores,
                      int count) {
    double most = -INFINITY, sum = 0, of_p = 0, loss = 0;
    int n = 0;
    for (; n < count && list[n] >= 0; n++) {
        most = scores[n] > most ? scores[n] : most;
        of_p += p[list[n]];
    }
    for (int i = 0; i < n; i++) sum += exp(scores[i] - most);
    for (int i = 0; i < n; i++) {
        double share = exp(scores[i] - most) / sum, target = p[list[i]] / of_p;
        if (target > 0) loss += target * log(target / share);
        dscores[i] = (float)((share - target) / T);
    }
    return loss / T;
}

/* One step on a sequence; returns the loss. */
static double train(indexer *x, attention *a, const float *tokens, int count, int step) {
    nsa_desc d = tokens_as_blocks(HEADS, DIM, count);
    double loss = 0;
    attend(a, tokens);
    nsa_score s = choose(x, tokens, count), ds = s;
    s.scores = view(x->scores, T, 1, count), ds.scores = view(x->dscores, T, 1, count);
    WITH_WORKSPACE(nsa_score_blocks_forward_workspace_size(&d),
                   nsa_score_blocks_forward(&s, &d, workspace, bytes));
    for (int t = 0; t < T; t++)
        loss += loss_of(x->lists + t * count, a->p + t * T, x->scores + t * count,
                        x->dscores + t * count, count);
    for (int i = 0; i < T * HEADS * DIM; i++) x->dq[i] = 0;
    for (int i = 0; i < T * DIM; i++) x->dk[i] = 0;
    for (int i = 0; i < T * HEADS; i++) x->dw[i] = 0;
    ds.q = view(x->dq, T, HEADS, DIM), ds.k = view(x->dk, T, 1, DIM);
    ds.weights = view(x->dw, T, HEADS, 1);
    WITH_WORKSPACE(nsa_score_blocks_backward_workspace_size(&d),
                   nsa_score_blocks_backward(&ds, &s, &d, workspace, bytes));
    learn(tokens, x->dq, &x->wq, step), learn(tokens, x->dk, &x->wk, step);
    learn(tokens, x->dw, &x->ww, step);
    return loss;
}

/* Of queries that must leave tokens out: how many of the best are in the list. */
static double recall(indexer *x, attention *a, const float *tokens) {
    int found = 0, asked = 0;
    attend(a, tokens);
    choose(x, tokens, COUNT);
    for (int t = 2 * COUNT; t < T; t++)
        for (int i = 0; i < COUNT; i++, asked++)
            for (int j = 0; j < COUNT; j++)
                found += a->best[t * COUNT + i] == x->lists[t * COUNT + j];
    return (double)found / asked;
}

/* The first number of a token is 1, so that weights may have a part that no query decides. */
static float *sequence(unsigned seed) {
    float *x = random_floats(seed, (size_t)T * E);
    for (int t = 0; t < T; t++) x[t * E] = 1;
    return x;
}

int main(void) {
    const size_t queries = (size_t)T * HEADS * DIM, lists = (size_t)T * T;
    attention a = {parameter_new(1, H * D, 1.8f),
                   parameter_new(2, D, 1.8f),
                   floats((size_t)T * H * D),
                   floats((size_t)T * D),
                   floats((size_t)T * H * D),
                   floats((size_t)T * H),
                   floats(lists),
                   (int32_t *)allocate((size_t)T * COUNT * 4)};
    indexer x = {parameter_new(3, HEADS * DIM, 1),
                 parameter_new(4, DIM, 1),
                 parameter_new(5, HEADS, 1),
                 floats(queries),
                 floats((size_t)T * DIM),
                 floats((size_t)T * HEADS),
                 floats(queries),
                 floats((size_t)T * DIM),
                 floats((size_t)T * HEADS),
                 floats(lists),
                 floats(lists),
                 (int32_t *)allocate(lists * 4)};
    float *unseen = sequence(7);
    const double before = recall(&x, &a, unseen);
    double now = before, warm = 0;
    printf("An indexer by the KL loss\n  step   0: recall %.3f\n", before);
    for (int step = 1; step <= STEPS; step++) {
        float *tokens = sequence(100 + (unsigned)step);
        double loss = train(&x, &a, tokens, step <= WARM ? T : COUNT, step);
        release(tokens);
        if (step % 50) continue;
        now = recall(&x, &a, unseen);
        if (step == WARM) warm = now;
        printf("  step %3d: recall %.3f, loss %.3f over %s\n", step, now, loss,
               step <= WARM ? "all tokens" : "its lists");
    }
    check(warm > before + 0.2, "recall has risen over all tokens");
    check(now > warm, "and rises further over the lists");
    parameter *all[] = {&a.wq, &a.wk, &x.wq, &x.wk, &x.ww};
    for (int i = 0; i < 5; i++) parameter_free(all[i]);
    void *rest[] = {a.q, a.k,  a.out, a.lse, a.p,      a.best,    x.q,     x.k,
                    x.w, x.dq, x.dk,  x.dw,  x.scores, x.dscores, x.lists, unseen};
    for (int i = 0; i < 16; i++) release(rest[i]);
    return failures;
}

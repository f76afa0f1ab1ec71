/* model_test.h - what the model's tests share: small models, random tokens, a pass in one call.
   Twin: none. Counting is check.h's. */
#ifndef MODEL_TEST_H
#define MODEL_TEST_H

#include "base/rng.h"
#include "harness/check.h"
#include "model/model_inside.h"

static fault why;

/* Uniformly random tokens; the label of each is the token after it, as the data modules do it. */
static inline void random_tokens(int32_t *tokens, int32_t *labels, int batch, int tokens_each,
                                 int vocab, uint64_t first) {
    for (int b = 0; b < batch; b++)
        for (int t = 0; t <= tokens_each; t++) {
            uint64_t index = first + (uint64_t)(b * (tokens_each + 1) + t);
            int32_t token = (int32_t)rng_below(7, RNG_SYNTHETIC, index, (uint64_t)vocab);
            if (t < tokens_each) tokens[b * tokens_each + t] = token;
            if (t > 0) labels[b * tokens_each + t - 1] = token;
        }
}

static inline ops open_ops(int threads) {
    ops o = {0};
    CHECK(ops_cpu_open(&o, threads, &why), "%s", why.text);
    return o;
}

static inline bool open_model(model *m, const model_config *c, int batch, int tokens,
                              checkpointing how, const ops *o) {
    model_options options = {
        .batch = batch, .tokens = tokens, .training = true, .checkpointing = how};
    return CHECK(model_open(m, c, &options, o, 1, &why), "%s", why.text);
}

/* Loss summed over the labels, gradients of that sum. */
static inline double train_once(model *m, const model_batch *b) {
    model_zero_state(m);
    model_zero_gradients(m);
    CHECK(model_train(m, b, 1, &why), "%s", why.text);
    return model_state(m).loss;
}

static inline double evaluate_once(model *m, const model_batch *b) {
    model_zero_state(m);
    CHECK(model_evaluate(m, b, &why), "%s", why.text);
    return model_state(m).loss;
}

/* Away from the small initial values, where most gradients would hide below the tolerance. */
static inline void enlarge(const model *m, double factor) {
    for (int i = 0; i < m->params.length; i++) {
        const param *p = &m->params.list[i];
        bool matrix = p->init_std != 0;
        for (int64_t e = 0; e < p->count; e++) {
            real *x = m->params.value + p->offset + e;
            double normal = rng_normal(3, (uint64_t)i, (uint64_t)e);
            *x = (real)(matrix ? factor * (double)*x : (double)*x + 0.3 * normal);
        }
    }
}

#endif

/* test_leak.c - uniformly random tokens, never repeated, cannot be learnt: a loss that falls below
   ln V tells that a token was read before it was asked for. Twin: model.c. The same run with a
   planted leak must fail, or this test would prove nothing.

   Once with rows longer than the window, once with a window longer than the rows. */
#include "base/threads.h"
#include "model/optimizer.h"
#include "model_test.h"

enum { VOCAB = 256, BATCH = 4, TOKENS = 96, STEPS = 120, MEAN = 20 };

static const ops *real_ops;

/* out[t] += v_win[t + 1], as a window that ends one token late would do. */
static void add_leak(const nsa_tensor *to, const nsa_tensor *from, const nsa_desc *d) {
    int per_group = d->heads / d->kv_heads;
    for (int b = 0; b < d->batch; b++)
        for (int t = 0; t + 1 < d->tokens; t++)
            for (int h = 0; h < d->heads; h++) {
                real *out = (real *)to->data + b * to->batch + t * to->token + h * to->head;
                const real *v = (const real *)from->data + b * from->batch + (t + 1) * from->token +
                                h / per_group * from->head;
                for (int c = 0; c < d->dim_v; c++) out[c] += v[c];
            }
}

static void leaking_forward(const ops *o, const nsa_attention *x, const nsa_desc *d,
                            void *workspace, size_t bytes) {
    real_ops->attention_forward(o, x, d, workspace, bytes);
    add_leak(&x->out, &x->v_win, d);
}

/* The lowest mean loss of MEAN consecutive steps. */
static double lowest_mean(const ops *o, int window) {
    static int32_t tokens[BATCH * TOKENS], labels[BATCH * TOKENS];
    model_config c = tinylm(VOCAB, 32, 2, 4, 2, 8, 8, 8, 4, 16, 4, window);
    model_batch b = {.tokens = tokens, .labels = labels, .batch = BATCH, .tokens_each = TOKENS};
    double losses[STEPS], lowest = INFINITY;
    model m;
    if (!open_model(&m, &c, BATCH, TOKENS, false, o)) return 0;
    for (int step = 0; step < STEPS; step++) {
        adamw a = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = step + 1};
        random_tokens(tokens, labels, BATCH, TOKENS, VOCAB, (uint64_t)step * BATCH * (TOKENS + 1));
        model_zero_state(&m);
        model_zero_gradients(&m);
        CHECK(model_train(&m, &b, 1.0 / (BATCH * TOKENS), &why), "%s", why.text);
        losses[step] = model_state(&m).loss / (BATCH * TOKENS);
        CHECK(optimizer_step(&m, &a, 1, &why), "%s", why.text);
    }
    for (int step = MEAN; step <= STEPS; step++) {
        double sum = 0;
        for (int i = step - MEAN; i < step; i++) sum += losses[i];
        lowest = fmin(lowest, sum / MEAN);
    }
    model_close(&m);
    return lowest;
}

int main(int argc, char **argv) {
    const double floor = log(VOCAB) - 0.05;
    static const int windows[] = {16, 128};
    (void)argc;
    threads_wait_asleep(argv);
    ops o = open_ops(0), leaking = o;
    real_ops = &o;
    leaking.attention_forward = leaking_forward;
    for (int i = 0; i < 2; i++) {
        double lowest = lowest_mean(&o, windows[i]);
        check_case("window %d of %d tokens", windows[i], TOKENS);
        printf("window %d: lowest mean of %d steps %.4f, ln V %.4f\n", windows[i], MEAN, lowest,
               log(VOCAB));
        CHECK(lowest > floor, "the loss falls to %.4f, below ln V - 0.05 = %.4f", lowest, floor);
    }
    double leaked = lowest_mean(&leaking, windows[0]);
    check_case("planted leak");
    printf("planted leak: %.4f\n", leaked);
    CHECK(leaked < floor, "a leak goes unseen: %.4f", leaked);
    ops_cpu_close(&o);
    return check_done("test_leak");
}

/* test_trainer.c - the trainer's CUDA operations under the executor, beside those of the CPU: each
   alone over shapes, then whole training steps of small models: loss, every gradient, every update;
   recorded steps; states that are read late. Twin: test_ops.c, which holds the CPU's against
   formulas. */
#include <stdlib.h>

#include "base/fallback.h"
#include "model/optimizer.h"
#include "model_test.h"
#include "ops/cuda/ops_cuda.h"

/* ---- Each operation ------------------------------------------------------------------------- */

enum { BUFFERS = 6, PER_GROUP = 3 };

typedef struct shape {
    int rows, dim, vocab;
} shape;

static const shape shapes[] = {{1, 8, 5}, {5, 7, 3}, {7, 24, 11}, {67, 40, 300}, {130, 129, 2}};

/* What an operation is given: buffers of normal numbers, tokens, labels with holes, a state. */
typedef struct setup {
    shape s;
    int64_t stride; /* of rows with groups of heads */
    void *b[BUFFERS];
    int32_t *tokens, *labels;
    step_state *state; /* gradients are four times too large */
    adamw_rates *rates;
} setup;

static void embed_forward(const ops *o, const setup *x) {
    o->embed_forward(o, x->b[0], x->b[1], x->tokens, x->s.rows, x->s.dim);
}
static void embed_backward(const ops *o, const setup *x) {
    o->embed_backward(o, x->b[0], x->b[1], x->tokens, x->s.rows, x->s.dim);
}
static void rmsnorm_forward(const ops *o, const setup *x) {
    o->rmsnorm_forward(o, x->b[0], x->b[1], x->b[2], x->b[3], x->s.rows, x->s.dim, 1e-5);
}
static void rmsnorm_backward(const ops *o, const setup *x) {
    o->rmsnorm_backward(o, x->b[0], x->b[1], x->b[2], x->b[3], x->b[4], x->b[5], x->s.rows,
                        x->s.dim);
}
static void linear_forward(const ops *o, const setup *x) {
    o->linear_forward(o, x->b[0], x->b[1], x->b[2], NULL, x->s.rows, x->s.dim, x->s.vocab);
}
static void linear_residual(const ops *o, const setup *x) {
    o->linear_forward(o, x->b[0], x->b[1], x->b[2], x->b[3], x->s.rows, x->s.dim, x->s.vocab);
}
static void linear_backward_input(const ops *o, const setup *x) {
    o->linear_backward_input(o, x->b[0], x->b[1], x->b[2], x->s.rows, x->s.dim, x->s.vocab);
}
static void linear_backward_weight(const ops *o, const setup *x) {
    o->linear_backward_weight(o, x->b[0], x->b[1], x->b[2], x->s.rows, x->s.dim, x->s.vocab);
}
static void bias_forward(const ops *o, const setup *x) {
    o->bias_forward(o, x->b[0], x->b[1], x->s.rows, x->s.dim);
}
static void bias_backward(const ops *o, const setup *x) {
    o->bias_backward(o, x->b[0], x->b[1], x->s.rows, x->s.dim);
}
static void silu_forward(const ops *o, const setup *x) {
    o->silu_forward(o, x->b[0], x->b[1], (int64_t)x->s.rows * x->s.dim);
}
static void silu_backward(const ops *o, const setup *x) {
    o->silu_backward(o, x->b[0], x->b[1], x->b[2], (int64_t)x->s.rows * x->s.dim);
}
static void swiglu_forward(const ops *o, const setup *x) {
    o->swiglu_forward(o, x->b[0], x->b[1], x->s.rows, x->s.dim);
}
static void swiglu_backward(const ops *o, const setup *x) {
    o->swiglu_backward(o, x->b[0], x->b[1], x->b[2], x->b[3], x->s.rows, x->s.dim);
}
static void group_mean_forward(const ops *o, const setup *x) {
    o->group_mean_forward(o, x->b[0], x->b[1], x->stride, x->s.rows, 2, PER_GROUP, x->s.dim);
}
static void group_mean_backward(const ops *o, const setup *x) {
    o->group_mean_backward(o, x->b[0], x->stride, x->b[1], x->s.rows, 2, PER_GROUP, x->s.dim);
}
static void copy_columns(const ops *o, const setup *x) {
    o->copy_columns(o, x->b[0], x->stride, x->b[1], x->s.dim + 1, x->s.rows, x->s.dim);
}
static void loss_alone(const ops *o, const setup *x) {
    o->cross_entropy(o, x->state, x->b[0], x->labels, x->s.rows, x->s.vocab, 0);
}
static void cross_entropy(const ops *o, const setup *x) {
    o->cross_entropy(o, x->state, x->b[0], x->labels, x->s.rows, x->s.vocab, 0.25);
}
static void square_sum(const ops *o, const setup *x) {
    o->square_sum(o, x->state, x->b[0], (int64_t)x->s.rows * x->s.dim);
    o->square_sum(o, x->state, x->b[1], x->s.dim);
}
/* Clipped, at its third step, by a scaled gradient. */
static void clip_and_adamw(const ops *o, const setup *x) {
    adamw_rates a = {.beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .keep = 0.999f};
    int64_t count = (int64_t)x->s.rows * x->s.dim, half = count / 2;
    a.rate = (real)(0.01 / (1 - pow(0.9, 3)));
    a.bias = (real)(1 / sqrt(1 - pow(0.95, 3)));
    o->upload(o, x->rates, &a, sizeof a);
    o->zero(o, x->b[3], (size_t)count * sizeof(real));
    square_sum(o, x);
    o->clip(o, x->state, 0.5);
    for (int decay = 0; decay < 2; decay++) {
        int64_t at = decay ? half : 0;
        real *p[4];
        for (int i = 0; i < 4; i++) p[i] = (real *)x->b[i] + at;
        o->adamw(o, x->rates, decay, x->state, p[0], p[1], p[2], p[3], decay ? count - half : half);
    }
}
/* Directions of clipped gradients, and an update by what stands for their matrix. */
static void muon(const ops *o, const setup *x) {
    const adamw_rates a = {.keep = 0.999f, .momentum = 0.95f, .lr = 0.01f};
    int64_t count = (int64_t)x->s.rows * x->s.dim;
    o->upload(o, x->rates, &a, sizeof a);
    square_sum(o, x);
    o->clip(o, x->state, 0.5);
    o->muon_direction(o, x->rates, x->state, x->b[1], x->b[2], count);
    o->muon_update(o, x->rates, x->state, x->b[0], x->b[3], 1.6, count);
}
static void unit(const ops *o, const setup *x) {
    o->unit(o, x->b[0], x->b[1], (int64_t)x->s.rows * x->s.dim);
    o->unit(o, x->b[2], x->b[2], x->s.dim);
}
static void mix(const ops *o, const setup *x) {
    o->mix(o, x->b[0], x->b[1], 3.4445, -4.775, (int64_t)x->s.rows * x->s.dim);
}
static void products(const ops *o, const setup *x) {
    const shape *s = &x->s;
    o->product(o, PRODUCT_NN, x->b[0], x->b[3], x->b[4], s->rows, s->vocab, s->dim);
    o->product(o, PRODUCT_NT, x->b[1], x->b[3], x->b[4], s->rows, s->vocab, s->dim);
    o->product(o, PRODUCT_TN, x->b[2], x->b[3], x->b[4], s->dim, s->vocab, s->rows);
}
/* A gradient that is not finite leaves everything as it is, but for what nobody reads. */
static void overflow(const ops *o, const setup *x) {
    static const real infinite = (real)INFINITY;
    o->upload(o, x->b[1], &infinite, sizeof infinite);
    clip_and_adamw(o, x);
    muon(o, x);
}

#define OPERATION(name) \
    { #name, name }
static const struct operation {
    const char *name;
    void (*run)(const ops *o, const setup *x);
} operations[] = {OPERATION(embed_forward),
                  OPERATION(embed_backward),
                  OPERATION(rmsnorm_forward),
                  OPERATION(rmsnorm_backward),
                  OPERATION(linear_forward),
                  OPERATION(linear_residual),
                  OPERATION(linear_backward_input),
                  OPERATION(linear_backward_weight),
                  OPERATION(bias_forward),
                  OPERATION(bias_backward),
                  OPERATION(silu_forward),
                  OPERATION(silu_backward),
                  OPERATION(swiglu_forward),
                  OPERATION(swiglu_backward),
                  OPERATION(group_mean_forward),
                  OPERATION(group_mean_backward),
                  OPERATION(copy_columns),
                  OPERATION(loss_alone),
                  OPERATION(cross_entropy),
                  OPERATION(square_sum),
                  OPERATION(clip_and_adamw),
                  OPERATION(muon),
                  OPERATION(unit),
                  OPERATION(mix),
                  OPERATION(products),
                  OPERATION(overflow)};

static size_t room_of(const shape *s) {
    return (size_t)(s->rows + s->vocab) * (size_t)(2 * PER_GROUP * s->dim + 3 + s->vocab);
}

/* What buffer i begins with, for every operation, shape and back end. */
static const real *numbers_of(int i) {
    static real *numbers[BUFFERS];
    size_t most = 0;
    if (numbers[i]) return numbers[i];
    for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
        if (room_of(&shapes[j]) > most) most = room_of(&shapes[j]);
    numbers[i] = check_alloc(most * sizeof **numbers);
    for (size_t e = 0; e < most; e++) numbers[i][e] = (real)check_normal((uint64_t)i + 1, e);
    return numbers[i];
}

static void open_setup(setup *x, const ops *o, const shape *s) {
    static const step_state scaled = {.scaler = {4, 0, 0}};
    size_t bytes = room_of(s) * sizeof(real);
    int32_t *ids = check_alloc((size_t)s->rows * sizeof *ids);
    size_t id_bytes = (size_t)s->rows * sizeof *ids;
    x->s = *s;
    x->stride = 2 * PER_GROUP * s->dim + 3;
    for (int i = 0; i < BUFFERS; i++) {
        x->b[i] = o->allocate(o, bytes);
        o->upload(o, x->b[i], numbers_of(i), bytes);
    }
    x->tokens = o->allocate(o, id_bytes);
    x->labels = o->allocate(o, id_bytes);
    x->state = o->allocate(o, sizeof *x->state);
    x->rates = o->allocate(o, sizeof *x->rates);
    o->upload(o, x->state, &scaled, sizeof scaled);
    for (int r = 0; r < s->rows; r++) ids[r] = check_below(s->vocab, 8, (uint64_t)r);
    o->upload(o, x->tokens, ids, id_bytes);
    for (int r = 0; r < s->rows; r++)
        ids[r] = r % 4 == 3 ? -1 : check_below(s->vocab, 9, (uint64_t)r);
    o->upload(o, x->labels, ids, id_bytes);
    free(ids);
}

static void close_setup(setup *x, const ops *o) {
    for (int i = 0; i < BUFFERS; i++) o->release(o, x->b[i]);
    o->release(o, x->tokens);
    o->release(o, x->labels);
    o->release(o, x->state);
    o->release(o, x->rates);
}

/* Arrays of both back ends, the first one's as it should be. */
static void compare(const ops *cpu, const ops *cuda, const void *want, const void *got, size_t n,
                    double allowed, const char *what) {
    real *a = check_alloc(n * sizeof *a), *b = check_alloc(n * sizeof *b);
    double *wanted = check_alloc(n * sizeof *wanted), *found = check_alloc(n * sizeof *found);
    cpu->download(cpu, a, want, n * sizeof *a);
    cuda->download(cuda, b, got, n * sizeof *b);
    for (size_t i = 0; i < n; i++) wanted[i] = (double)a[i], found[i] = (double)b[i];
    CHECK_NEAR(what, found, wanted, n, n, allowed * check_norm(wanted, n) + 1e-30);
    free(a);
    free(b);
    free(wanted);
    free(found);
}

static void compare_state(const step_state *want, const step_state *got) {
    const double pairs[][2] = {{want->loss, got->loss},
                               {want->squares, got->squares},
                               {want->grad_norm, got->grad_norm},
                               {want->clip, got->clip}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        double a = pairs[i][0], b = pairs[i][1];
        CHECK(a == b || fabs(a - b) <= 1e-6 * fabs(a), "number %zu of the state: %.12g, not %.12g",
              i, b, a);
    }
    CHECK(want->labels == got->labels, "%lld labels, not %lld", (long long)got->labels,
          (long long)want->labels);
    CHECK(!want->overflow == !got->overflow && !want->skipped == !got->skipped,
          "overflow %lld, skipped %lld", (long long)got->overflow, (long long)got->skipped);
    CHECK(want->scaler.scale == got->scaler.scale &&
              want->scaler.good_steps == got->scaler.good_steps &&
              want->scaler.skipped_steps == got->scaler.skipped_steps,
          "the scale is %g after %lld good steps, not %g after %lld", got->scaler.scale,
          (long long)got->scaler.good_steps, want->scaler.scale,
          (long long)want->scaler.good_steps);
}

static void compare_counts(const stats_sum *want, const stats_sum *got) {
    const double pairs[][2] = {{want->entropy, got->entropy},     {want->largest, got->largest},
                               {want->shares[0], got->shares[0]}, {want->shares[1], got->shares[1]},
                               {want->shares[2], got->shares[2]}, {want->k, got->k},
                               {want->gates, got->gates}};
    const int64_t whole[][2] = {
        {want->gate_rows, got->gate_rows},     {want->collapsed, got->collapsed},
        {want->k_rows, got->k_rows},           {want->k_max, got->k_max},
        {want->at_max, got->at_max},           {want->layers_collapsed, got->layers_collapsed},
        {want->layers_shut, got->layers_shut}, {want->first_collapsed, got->first_collapsed},
        {want->first_shut, got->first_shut}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        CHECK(pairs[i][0] > 0 && fabs(pairs[i][0] - pairs[i][1]) <= 1e-6 * pairs[i][0],
              "sum %zu of the statistics: %.12g, not %.12g", i, pairs[i][1], pairs[i][0]);
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        CHECK(whole[i][0] == whole[i][1], "count %zu of the statistics: %lld, not %lld", i,
              (long long)whole[i][1], (long long)whole[i][0]);
}

static void test_operation(const struct operation *op, const shape *s, const ops *cpu,
                           const ops *cuda) {
    size_t room = room_of(s);
    setup want, got;
    step_state wanted, found;
    check_case("%s, %d rows, dim %d, vocab %d", op->name, s->rows, s->dim, s->vocab);
    open_setup(&want, cpu, s);
    open_setup(&got, cuda, s);
    op->run(cpu, &want);
    op->run(cuda, &got);
    /* without a gradient the logits may be left as anything */
    for (int i = op->run == loss_alone; i < BUFFERS; i++)
        compare(cpu, cuda, want.b[i], got.b[i], room, 1e-6, "buffer");
    cpu->download(cpu, &wanted, want.state, sizeof wanted);
    cuda->download(cuda, &found, got.state, sizeof found);
    compare_state(&wanted, &found);
    CHECK(!cuda->failed(cuda, &why), "%s", why.text);
    close_setup(&want, cpu);
    close_setup(&got, cuda);
}

/* ---- What the host learns ------------------------------------------------------------------- */

static void *sent(const ops *o, const void *host, size_t bytes) {
    void *to = o->allocate(o, bytes);
    o->upload(o, to, host, bytes);
    return to;
}

/* How it is known where a row stands in its sequence. */
typedef enum places { BY_ROWS, BY_DOCUMENTS, BY_PLACES } places;

/* Statistics of three layers, one after the other, the first with more rows than a sweep of the
   threads; some rows are collapsed. */
static void count_layers(const ops *o, nsa_gate_kind kind, places how, step_state *found) {
    enum { ROWS = 9000, GROUPS = 2, WIDTH = 4, BLOCK = 16, SEQUENCES = 3, EACH = ROWS / SEQUENCES };
    enum { HEADS = 3, STRIDE = 3 * HEADS + 2 };
    static const int32_t begins[] = {0, 40, 41, ROWS};
    static float gates[ROWS * STRIDE];
    static int32_t lists[ROWS * GROUPS * WIDTH], given[ROWS];
    for (int r = 0; r < ROWS; r++) given[r] = r < 40 ? r : r == 40 ? 0 : r - 41; /* as begins say */
    for (int i = 0; i < ROWS * STRIDE; i++)
        gates[i] = (float)((i / 3 % 7 ? 1 : 20) * check_normal(11, (uint64_t)i));
    for (int64_t r = 0; r < ROWS * GROUPS; r++)
        for (int i = 0; i < WIDTH; i++) /* now and then shorter, or past the row's own token */
            lists[r * WIDTH + i] = i <= r % 5 ? i * (1 + (int)(r % 3)) : -1;
    const step_state none = {.scaler = {1, 0, 0}};
    layer_choices x = {sent(o, gates, sizeof gates),
                       kind,
                       sent(o, lists, sizeof lists),
                       ROWS,
                       GROUPS,
                       WIDTH,
                       BLOCK,
                       NULL,
                       SEQUENCES,
                       EACH,
                       HEADS,
                       STRIDE,
                       4,
                       NULL};
    void *at = sent(o, begins, sizeof begins), *known = sent(o, given, sizeof given);
    step_state *s = sent(o, &none, sizeof none);
    if (how == BY_DOCUMENTS) x.begins = at;
    if (how == BY_PLACES) x.places = known;
    o->count_choices(o, s, &x);
    /* the second layer's gates have collapsed, the third's are shut */
    x.rows = 500, x.sequences = 1, x.tokens_each = 500;
    for (x.layer = 7; how == BY_ROWS && x.layer < 9; x.layer++) {
        for (int i = 0; i < 500 * STRIDE; i++)
            gates[i] = i % STRIDE % 3 || x.layer == 8 ? -20.0f : 20.0f;
        o->upload(o, (void *)(uintptr_t)x.gates, gates, 500 * STRIDE * sizeof *gates);
        o->count_choices(o, s, &x);
    }
    o->download(o, found, s, sizeof *found);
    void *memory[] = {(void *)(uintptr_t)x.gates, (void *)(uintptr_t)x.blocks, at, known, s};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) o->release(o, memory[i]);
}

/* Layers 4, 7 and 8 are counted, the others have nothing. */
static void compare_layers(const step_state *want, const step_state *got) {
    for (int i = 0; i < STATS_LAYERS; i++) {
        const float *a = &want->layers[i].entropy, *b = &got->layers[i].entropy;
        CHECK((a[1] > 0) == (i == 4 || i == 7 || i == 8), "layer %d: share %g", i, (double)a[1]);
        for (int k = 0; k < (int)(sizeof want->layers[i] / sizeof *a); k++)
            CHECK(fabsf(a[k] - b[k]) <= 1e-5f * (1 + fabsf(a[k])), "layer %d: %d is %g, must be %g",
                  i, k, (double)b[k], (double)a[k]);
    }
}

static void test_counts(const ops *cpu, const ops *cuda) {
    static const nsa_gate_kind kinds[] = {NSA_GATE_SIGMOID, NSA_GATE_SOFTMAX};
    step_state want, got;
    for (int i = 0; i < 4; i++) {
        check_case("statistics, gate %d, %s", i / 2, i % 2 ? "documents" : "rows");
        count_layers(cpu, kinds[i / 2], i % 2 ? BY_DOCUMENTS : BY_ROWS, &want);
        count_layers(cuda, kinds[i / 2], i % 2 ? BY_DOCUMENTS : BY_ROWS, &got);
        compare_counts(&want.seen, &got.seen);
        if (i % 2 == 0) compare_layers(&want, &got);
    }
    check_case("statistics, places");
    count_layers(cpu, NSA_GATE_SIGMOID, BY_DOCUMENTS, &want);
    for (int i = 0; i < 2; i++) {
        count_layers(i ? cuda : cpu, NSA_GATE_SIGMOID, BY_PLACES, &got);
        compare_counts(&want.seen, &got.seen);
    }
}

/* What f16 decides about the next step's scale, beside the CPU; and what other types must not. */
static void test_scaler(const ops *cpu, const ops *cuda) {
    static const step_state states[] = {
        {.loss = 3, .squares = 5, .scaler = {64, 7, 2}},
        {.loss = 3, .squares = 5, .scaler = {64, SCALER_GOOD_STEPS - 1, 2}},
        {.loss = 3, .squares = 5, .scaler = {SCALER_MOST, SCALER_GOOD_STEPS - 1, 0}},
        {.loss = 3, .squares = INFINITY, .scaler = {64, 7, 2}},
        {.loss = 3, .squares = INFINITY, .scaler = {1, 7, 2}},
        {.loss = INFINITY, .squares = INFINITY, .scaler = {64, 7, 2}},
        {.loss = NAN, .squares = NAN, .scaler = {64, 7, 2}}};
    const ops *both[] = {cpu, cuda};
    for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
        step_state after[2];
        check_case("scaler %zu", i);
        for (int k = 0; k < 2; k++) {
            step_state *s = sent(both[k], &states[i], sizeof states[i]);
            both[k]->clip(both[k], s, 1);
            both[k]->download(both[k], &after[k], s, sizeof after[k]);
            both[k]->release(both[k], s);
        }
        CHECK(after[0].skipped == (i == 3), "skipped: %lld", (long long)after[0].skipped);
        after[0].loss = after[1].loss = after[0].squares = after[1].squares = 0;
        if (!isfinite(after[0].grad_norm)) {
            CHECK(!isfinite(after[1].grad_norm), "norm %g", after[1].grad_norm);
            after[0].grad_norm = after[1].grad_norm = after[0].clip = after[1].clip = 0;
        }
        compare_state(&after[0], &after[1]);
    }
}

/* Two states may be under way; each is as it was when it was posted. */
static void test_late(const ops *cuda) {
    step_state *s = cuda->allocate(cuda, sizeof *s);
    check_case("states that are read late");
    for (int i = 1; i <= 7; i++) {
        step_state now = {.loss = i}, then;
        cuda->upload(cuda, s, &now, sizeof now);
        cuda->post(cuda, s);
        if (i == 1) continue;
        cuda->fetch(cuda, &then);
        CHECK(then.loss == i - 1, "state %d has the loss %g", i - 1, then.loss);
    }
    cuda->release(cuda, s);
}

/* ---- Whole steps ---------------------------------------------------------------------------- */

enum { BATCH = 2, TOKENS = 76, VOCAB = 48, STEPS = 2, DOCUMENTS = 6 };

static int32_t tokens[BATCH * TOKENS], labels[BATCH * TOKENS];

static void compare_tensors(const model *want, const model *got, const real *a, const real *b,
                            double allowed, const char *what) {
    for (int i = 0; i < want->params.length; i++) {
        const param *p = &want->params.list[i];
        char text[128];
        snprintf(text, sizeof text, "%s of %s", what, p->name);
        compare(want->o, got->o, a + p->offset, b + p->offset, (size_t)p->count, allowed, text);
    }
}

/* The CPU's model goes on from an array of the device's. */
static void take_over(const model *from, real *a, const real *b, int64_t count) {
    from->o->download(from->o, a, b, (size_t)count * sizeof *a);
}

/* How far gradients may be apart, as a share of their tensor's size. In f32 an operation adds
   about 2 units of 2^-24 (sums of 16 to 152 products whose errors are as random as their signs),
   some 40 of them follow one another forward and backward, and two sides err: sqrt(2 x 40) x 2 =
   18 units, 1.1e-6. Beside f64 each side has 0.3e-6 to 0.9e-6, and they differ by 0.7e-6 to
   1.1e-6, but for two tensors. A vector that is added to all keys moves no weight of a softmax,
   so what reaches the compressed keys cancels in sums over them, and phi_k's pos and b1 are
   added to all. Their errors are 2e-10 to 5e-10 whatever is left, 0.7e-4 to 2.4e-4: 3 to 9 times
   less than its terms. 9 x 1.1e-6 is 1e-5 (measured over 3 models and 4 kinds of the CPU's
   products: 7e-6); twice that is allowed, for less may be left. */
static const double GRADIENT = 2e-5;

/* Updates are not compared after gradients that differ: at its first step AdamW moves a
   parameter by lr g / (|g| + eps), so that one whose clipped g is near eps moves by its
   rounding. With products that sum in another order (OPENBLAS_CORETYPE) one to two parameters of
   20,000 then differ by up to 6e-5, and gradients of the second step by 2e-5 to 2e-4. So each
   half of a step begins at the same numbers on both sides: gradients at the same parameters,
   updates from the same gradients, which come out equal to the bit where the norms do; 1e-6 is a
   norm's rounding to f32, and 4 operations. */
static void test_model(const char *name, const model_config *c, const int32_t *begins,
                       checkpointing how, const ops *cpu, const ops *cuda) {
    const adamw a = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    model_batch batch = {.tokens = tokens, .labels = labels, .batch = BATCH, .tokens_each = TOKENS};
    model m[2];
    batch.begins = begins;
    if (begins) {
        batch.documents = DOCUMENTS;
        batch.longest = begins[DOCUMENTS] - begins[DOCUMENTS - 1];
        batch.tokens_each = begins[DOCUMENTS] / BATCH;
    }
    if (!open_model(&m[0], c, BATCH, TOKENS, how, cpu)) return;
    if (!open_model(&m[1], c, BATCH, TOKENS, how, cuda)) return;
    for (int step = 1; step <= STEPS; step++) {
        adamw now = a;
        now.step = step;
        check_case("%s, step %d", name, step);
        double want = train_once(&m[0], &batch), got = train_once(&m[1], &batch);
        CHECK(fabs(got - want) <= 1e-6 * want, "loss %.9g, not %.9g", got, want);
        params *p = &m[0].params, *q = &m[1].params;
        compare_tensors(&m[0], &m[1], p->grad, q->grad, GRADIENT, "gradient");
        take_over(&m[1], p->grad, q->grad, p->elements);
        for (int i = 0; i < 2; i++) CHECK(optimizer_step(&m[i], &now, 1, &why), "%s", why.text);
        step_state states[2] = {model_state(&m[0]), model_state(&m[1])};
        CHECK(fabs(states[0].grad_norm - states[1].grad_norm) <= 1e-6 * states[0].grad_norm,
              "norm %.9g, not %.9g", states[1].grad_norm, states[0].grad_norm);
        compare_tensors(&m[0], &m[1], p->value, q->value, 1e-6, "value");
        take_over(&m[1], p->value, q->value, p->elements);
        take_over(&m[1], p->m, q->m, p->moments);
        take_over(&m[1], p->v, q->v, p->moments);
    }
    for (int i = 0; i < 2; i++) model_close(&m[i]);
}

/* Steps of two micro-batches: launched one by one, or recorded the second time and then run. */
static real *steps_of(const model_config *c, const ops *o, bool graphs, int count,
                      step_state *last) {
    enum { HALF = BATCH / 2 * TOKENS };
    model_options options = {
        .batch = BATCH / 2, .tokens = TOKENS, .training = true, .muon = true, .graphs = graphs};
    adamw a = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    model m;
    if (!CHECK(model_open(&m, c, &options, o, 1, &why), "%s", why.text)) exit(99);
    for (a.step = 1; a.step <= count; a.step++) {
        model_zero_state(&m);
        model_zero_gradients(&m);
        for (int i = 0; i < 2; i++) {
            model_batch b = {tokens + i * HALF, labels + i * HALF, BATCH / 2, TOKENS, NULL, 0, 0};
            m.last_of_step = i == 1;
            CHECK(model_train(&m, &b, 1.0 / (BATCH * TOKENS), &why), "%s", why.text);
        }
        CHECK(optimizer_step(&m, &a, 1, &why), "%s", why.text);
        a.lr *= 0.5;
    }
    *last = model_state(&m);
    for (int i = 0; i < MODEL_PARTS; i++)
        CHECK(!!m.recordings[i].graph == graphs, "part %d was %srecorded", i, graphs ? "not " : "");
    real *value = check_alloc((size_t)m.params.elements * sizeof *value);
    o->download(o, value, m.params.value, (size_t)m.params.elements * sizeof *value);
    model_close(&m);
    return value;
}

static void test_graphs(const model_config *c, const ops *o) {
    step_state plain, recorded;
    int64_t parameters;
    arena sizes;
    model_options options = {.batch = 1, .tokens = TOKENS, .training = true};
    check_case("recorded steps");
    model_measure(c, &options, o, &sizes, &parameters, &why);
    real *want = steps_of(c, o, false, 4, &plain), *got = steps_of(c, o, true, 4, &recorded);
    CHECK_BITS("parameters", got, want, (size_t)parameters * sizeof *want, sizeof *want);
    CHECK(plain.loss == recorded.loss && plain.grad_norm == recorded.grad_norm, "loss %g and %g",
          plain.loss, recorded.loss);
    CHECK(!o->failed(o, &why), "%s", why.text);
    free(want);
    free(got);
}

/* The gradients of one pass, to be freed. */
static real *gradients(const model_config *c, const ops *o, double *loss) {
    model_batch batch = {.tokens = tokens, .labels = labels, .batch = BATCH, .tokens_each = TOKENS};
    model m;
    if (!open_model(&m, c, BATCH, TOKENS, CHECKPOINT_NONE, o)) exit(99);
    *loss = train_once(&m, &batch);
    size_t bytes = (size_t)m.params.elements * sizeof(real);
    real *grad = check_alloc(bytes + sizeof(real));
    o->download(o, grad + 1, m.params.grad, bytes);
    grad[0] = (real)m.params.elements;
    model_close(&m);
    return grad;
}

static double distance(const real *a, const real *b) {
    double sum = 0;
    for (size_t i = 1; i <= (size_t)a[0]; i++)
        sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    return sqrt(sum);
}

#ifdef NSA_SIMT
enum { WITHOUT_WGMMA = 1 }; /* the executor is an sm_90 with kernels for others */
#else
enum { WITHOUT_WGMMA = 0 };
#endif

/* In 16 bits both back ends round; the device's may not be much further from f32 than the CPU's,
   which computes in f32 and rounds what it stores. All blocks are selected, so that none is by
   rounding. */
static void test_narrow(model_config c, nsa_dtype dtype, const ops *cpu) {
    ops cuda, half = open_ops(1);
    double loss[3];
    check_case("%s", dtype == NSA_BF16 ? "bf16" : "f16");
    c.n_sel = 5;
    ops_cpu_narrow(&half, dtype);
    if (!CHECK(ops_cuda_open(&cuda, dtype, &why), "%s", why.text)) return;
    real *want = gradients(&c, cpu, &loss[0]), *cpu_half = gradients(&c, &half, &loss[1]);
    fallback_restore(FALLBACK_CUDA_MAINLOOP, 0);
    real *cuda_half = gradients(&c, &cuda, &loss[2]);
    CHECK(fallback_count(FALLBACK_CUDA_MAINLOOP) == WITHOUT_WGMMA * 2 * c.n_layers,
          "attention without wgmma, forward and backward of each layer: %lld",
          (long long)fallback_count(FALLBACK_CUDA_MAINLOOP));
    double allowed = 3 * distance(want, cpu_half), found = distance(want, cuda_half);
    CHECK(found <= allowed, "gradients %.3g from f32, allowed %.3g", found, allowed);
    CHECK(fabs(loss[2] - loss[0]) <= (dtype == NSA_BF16 ? 0x1p-8 : 0x1p-11) * loss[0],
          "loss %.9g, in f32 %.9g", loss[2], loss[0]);
    test_scaler(&half, &cuda);
    free(want);
    free(cpu_half);
    free(cuda_half);
    ops_cuda_close(&cuda);
    ops_cpu_close(&half);
}

/* Logits from a cache, a few tokens at a time. */
static void test_decoding(const char *name, const model_config *c, const ops *cpu,
                          const ops *cuda) {
    enum { AT_ONCE = 7 };
    const ops *both[2] = {cpu, cuda};
    model_options options = {.batch = 1, .tokens = AT_ONCE, .room = TOKENS};
    static real logits[2][TOKENS * VOCAB];
    static double want[TOKENS * VOCAB], got[TOKENS * VOCAB];
    model m;
    check_case("decoding, %s", name);
    for (int i = 0; i < 2; i++) {
        if (!CHECK(model_open(&m, c, &options, both[i], 1, &why), "%s", why.text)) return;
        CHECK(model_append(&m, tokens, 40, 40, logits[i], &why), "%s", why.text);
        CHECK(model_append(&m, tokens + 40, TOKENS - 40, TOKENS - 40, logits[i] + 40 * VOCAB, &why),
              "%s", why.text);
        model_close(&m);
    }
    for (int i = 0; i < TOKENS * VOCAB; i++)
        want[i] = (double)logits[0][i], got[i] = (double)logits[1][i];
    CHECK_NEAR("logits", got, want, TOKENS * VOCAB, VOCAB, 1e-5 * check_norm(want, TOKENS * VOCAB));
}

static model_config small(nsa_phi phi) {
    model_config c = tinylm(VOCAB, 24, 2, 4, 2, 8, 16, 8, 4, 16, 4, 12);
    c.phi = phi;
    return c;
}

/* "operations": each alone and no more, for the slower modes of the executor. */
int main(int argc, char **argv) {
    /* Rows of 70 tokens. Six documents as long as the longest would have three times the rows. */
    static const int32_t begins[DOCUMENTS + 1] = {0, 3, 14, 15, 40, 64, 2 * 70};
    int phase_layer;
    ops cpu = open_ops(1), cuda;
    if (!CHECK(ops_cuda_open(&cuda, NSA_F32, &why), "%s", why.text))
        return check_done("test_trainer");
    random_tokens(tokens, labels, BATCH, TOKENS, VOCAB, 0);
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
            test_operation(&operations[i], &shapes[j], &cpu, &cuda);
    test_counts(&cpu, &cuda);
    test_late(&cuda);
    if (argc > 1 && !strcmp(argv[1], "operations")) {
        ops_cuda_close(&cuda);
        ops_cpu_close(&cpu);
        return check_done("test_trainer");
    }
    model_config c = small(NSA_PHI_MEAN);
    test_decoding("nsa", &c, &cpu, &cuda);
    test_model("mean", &c, NULL, CHECKPOINT_NONE, &cpu, &cuda);
    test_model("mean, checkpointing", &c, NULL, CHECKPOINT_SELECTIVE, &cpu, &cuda);
    test_model("mean, documents", &c, begins, CHECKPOINT_NONE, &cpu, &cuda);
    test_graphs(&c, &cuda);
    c.shared_kv = c.gate_linear = c.swiglu = true;
    c.hidden = 40;
    c.slc_init = 0;
    test_decoding("swiglu, shared k and v, linear gate", &c, &cpu, &cuda);
    test_model("swiglu, shared k and v, linear gate", &c, NULL, CHECKPOINT_LAYERS, &cpu, &cuda);
    c = small(NSA_PHI_CONV);
    c.tied = true;
    test_model("conv, tied", &c, NULL, CHECKPOINT_NONE, &cpu, &cuda);
    c = small(NSA_PHI_MLP);
    c.gate = NSA_GATE_SOFTMAX;
    test_model("mlp, softmax", &c, NULL, CHECKPOINT_NONE, &cpu, &cuda);
    model_attend_with(&c, ATTENTION_FULL);
    test_decoding("full", &c, &cpu, &cuda);
    test_model("full", &c, NULL, CHECKPOINT_NONE, &cpu, &cuda);
    c = small(NSA_PHI_MEAN);
    c.attention[0] = ATTENTION_WINDOW;
    c.attention[1] = ATTENTION_CMP_SLC;
    c.qk_norm = true;
    test_decoding("window and cmp+slc", &c, &cpu, &cuda);
    test_model("window and cmp+slc", &c, NULL, CHECKPOINT_LAYERS, &cpu, &cuda);
    CHECK(phase_get(&phase_layer) == PHASE_OPT && phase_layer == -1, "the device says where it is");
    ops_cuda_close(&cuda);
    CHECK(fallback_total() == 0, "f32 has no slower path");
    c = small(NSA_PHI_MLP);
    test_narrow(c, NSA_BF16, &cpu);
    test_narrow(c, NSA_F16, &cpu);
    ops_cpu_close(&cpu);
    return check_done("test_trainer");
}

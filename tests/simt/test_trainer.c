/* test_trainer.c - the trainer's CUDA operations under the executor, beside those of the CPU: each
   alone over shapes, then whole training steps of small models: loss, every gradient, the
   parameters after two steps. Twin: test_ops.c, which holds the CPU's against formulas. */
#include <stdlib.h>

#include "model_test.h"
#include "ops_cuda.h"
#include "optimizer.h"

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
    step_state *state;
} setup;

static void embed_forward(const ops *o, const setup *x) {
    o->embed_forward(o, x->b[0], x->b[1], x->tokens, x->s.rows, x->s.dim);
}
static void embed_backward(const ops *o, const setup *x) {
    o->embed_backward(o, x->b[0], x->b[1], x->tokens, x->s.rows, x->s.dim);
}
static void rmsnorm_forward(const ops *o, const setup *x) {
    o->rmsnorm_forward(o, x->b[0], x->b[1], x->b[2], x->b[3], x->s.rows, x->s.dim);
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
    adamw a = {
        .lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = 3};
    int64_t count = (int64_t)x->s.rows * x->s.dim;
    o->zero(o, x->b[3], (size_t)count * sizeof(real));
    square_sum(o, x);
    o->clip(o, x->state, 0.5, 8);
    o->adamw(o, &a, x->state, x->b[0], x->b[1], x->b[2], x->b[3], count);
}
/* A gradient that is not finite leaves everything as it is. */
static void overflow(const ops *o, const setup *x) {
    static const real infinite = (real)INFINITY;
    o->upload(o, x->b[1], &infinite, sizeof infinite);
    clip_and_adamw(o, x);
}

#define OPERATION(name) \
    { #name, name }
static const struct operation {
    const char *name;
    void (*run)(const ops *o, const setup *x);
} operations[] = {OPERATION(embed_forward),         OPERATION(embed_backward),
                  OPERATION(rmsnorm_forward),       OPERATION(rmsnorm_backward),
                  OPERATION(linear_forward),        OPERATION(linear_residual),
                  OPERATION(linear_backward_input), OPERATION(linear_backward_weight),
                  OPERATION(bias_forward),          OPERATION(bias_backward),
                  OPERATION(silu_forward),          OPERATION(silu_backward),
                  OPERATION(group_mean_forward),    OPERATION(group_mean_backward),
                  OPERATION(copy_columns),          OPERATION(loss_alone),
                  OPERATION(cross_entropy),         OPERATION(square_sum),
                  OPERATION(clip_and_adamw),        OPERATION(overflow)};

/* The same numbers for every back end. */
static void open_setup(setup *x, const ops *o, const shape *s, size_t room) {
    real *host = check_alloc(room * sizeof *host);
    int32_t *ids = check_alloc((size_t)s->rows * sizeof *ids);
    size_t id_bytes = (size_t)s->rows * sizeof *ids;
    x->s = *s;
    x->stride = 2 * PER_GROUP * s->dim + 3;
    for (int i = 0; i < BUFFERS; i++) {
        for (size_t e = 0; e < room; e++) host[e] = (real)check_normal((uint64_t)i + 1, e);
        x->b[i] = o->allocate(o, room * sizeof *host);
        o->upload(o, x->b[i], host, room * sizeof *host);
    }
    x->tokens = o->allocate(o, id_bytes);
    x->labels = o->allocate(o, id_bytes);
    x->state = o->allocate(o, sizeof *x->state);
    for (int r = 0; r < s->rows; r++) ids[r] = check_below(s->vocab, 8, (uint64_t)r);
    o->upload(o, x->tokens, ids, id_bytes);
    for (int r = 0; r < s->rows; r++)
        ids[r] = r % 4 == 3 ? -1 : check_below(s->vocab, 9, (uint64_t)r);
    o->upload(o, x->labels, ids, id_bytes);
    free(host);
    free(ids);
}

static void close_setup(setup *x, const ops *o) {
    for (int i = 0; i < BUFFERS; i++) o->release(o, x->b[i]);
    o->release(o, x->tokens);
    o->release(o, x->labels);
    o->release(o, x->state);
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
    CHECK(!want->overflow == !got->overflow, "overflow %lld", (long long)got->overflow);
}

static void test_operation(const struct operation *op, const shape *s, const ops *cpu,
                           const ops *cuda) {
    size_t room = (size_t)(s->rows + s->vocab) * (size_t)(2 * PER_GROUP * s->dim + 3 + s->vocab);
    setup want, got;
    step_state wanted, found;
    check_case("%s, %d rows, dim %d, vocab %d", op->name, s->rows, s->dim, s->vocab);
    open_setup(&want, cpu, s, room);
    open_setup(&got, cuda, s, room);
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

/* ---- Whole steps ---------------------------------------------------------------------------- */

enum { BATCH = 2, TOKENS = 76, VOCAB = 48, STEPS = 2 };

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

/* AdamW divides by a gradient's size, so that one near zero moves by its rounding: from the first
   step on parameters differ by more than sums do. */
static void test_model(const char *name, const model_config *c, const int32_t *begins,
                       checkpointing how, const ops *cpu, const ops *cuda) {
    const adamw a = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    model_batch batch = {.tokens = tokens, .labels = labels, .batch = BATCH, .tokens_each = TOKENS};
    model m[2];
    batch.begins = begins;
    if (begins) {
        batch.documents = 2;
        batch.longest = begins[2] - begins[1];
        batch.tokens_each = begins[2] / BATCH;
    }
    if (!open_model(&m[0], c, BATCH, TOKENS, how, cpu)) return;
    if (!open_model(&m[1], c, BATCH, TOKENS, how, cuda)) return;
    for (int step = 1; step <= STEPS; step++) {
        adamw now = a;
        now.step = step;
        check_case("%s, step %d", name, step);
        double want = train_once(&m[0], &batch), got = train_once(&m[1], &batch);
        CHECK(fabs(got - want) <= 1e-6 * want, "loss %.9g, not %.9g", got, want);
        compare_tensors(&m[0], &m[1], m[0].params.grad, m[1].params.grad, step == 1 ? 2e-5 : 2e-4,
                        "gradient");
        for (int i = 0; i < 2; i++) CHECK(optimizer_step(&m[i], &now, 1, 1, &why), "%s", why.text);
        step_state states[2] = {model_state(&m[0]), model_state(&m[1])};
        CHECK(fabs(states[0].grad_norm - states[1].grad_norm) <= 1e-5 * states[0].grad_norm,
              "norm %.9g, not %.9g", states[1].grad_norm, states[0].grad_norm);
    }
    compare_tensors(&m[0], &m[1], m[0].params.value, m[1].params.value, 2e-4, "value");
    for (int i = 0; i < 2; i++) model_close(&m[i]);
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
    real *cuda_half = gradients(&c, &cuda, &loss[2]);
    double allowed = 3 * distance(want, cpu_half), found = distance(want, cuda_half);
    CHECK(found <= allowed, "gradients %.3g from f32, allowed %.3g", found, allowed);
    CHECK(fabs(loss[2] - loss[0]) <= (dtype == NSA_BF16 ? 0x1p-8 : 0x1p-11) * loss[0],
          "loss %.9g, in f32 %.9g", loss[2], loss[0]);
    free(want);
    free(cpu_half);
    free(cuda_half);
    ops_cuda_close(&cuda);
    ops_cpu_close(&half);
}

/* Logits from a cache, a few tokens at a time. */
static void test_decoding(const model_config *c, const ops *cpu, const ops *cuda) {
    enum { AT_ONCE = 7 };
    const ops *both[2] = {cpu, cuda};
    model_options options = {.batch = 1, .tokens = AT_ONCE, .room = TOKENS};
    static real logits[2][TOKENS * VOCAB];
    static double want[TOKENS * VOCAB], got[TOKENS * VOCAB];
    model m;
    check_case("decoding, %s", c->full ? "full" : "nsa");
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
    static const int32_t begins[] = {0, 64, 2 * 70}; /* rows of 70 tokens */
    int phase_layer;
    ops cpu = open_ops(1), cuda;
    CHECK(ops_cuda_open(&cuda, NSA_F32, &why), "%s", why.text);
    random_tokens(tokens, labels, BATCH, TOKENS, VOCAB, 0);
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
            test_operation(&operations[i], &shapes[j], &cpu, &cuda);
    if (argc > 1 && !strcmp(argv[1], "operations")) {
        ops_cuda_close(&cuda);
        ops_cpu_close(&cpu);
        return check_done("test_trainer");
    }
    model_config c = small(NSA_PHI_MEAN);
    test_decoding(&c, &cpu, &cuda);
    test_model("mean", &c, NULL, CHECKPOINT_NONE, &cpu, &cuda);
    test_model("mean, checkpointing", &c, NULL, CHECKPOINT_SELECTIVE, &cpu, &cuda);
    test_model("mean, documents", &c, begins, CHECKPOINT_NONE, &cpu, &cuda);
    c = small(NSA_PHI_CONV);
    c.tied = true;
    test_model("conv, tied", &c, NULL, CHECKPOINT_NONE, &cpu, &cuda);
    c = small(NSA_PHI_MLP);
    c.gate = NSA_GATE_SOFTMAX;
    test_model("mlp, softmax", &c, NULL, CHECKPOINT_NONE, &cpu, &cuda);
    c.full = true;
    test_decoding(&c, &cpu, &cuda);
    test_model("full", &c, NULL, CHECKPOINT_NONE, &cpu, &cuda);
    c.windowed = true;
    test_model("window", &c, NULL, CHECKPOINT_NONE, &cpu, &cuda);
    CHECK(phase_get(&phase_layer) == PHASE_OPT && phase_layer == -1, "the device says where it is");
    ops_cuda_close(&cuda);
    c = small(NSA_PHI_MLP);
    test_narrow(c, NSA_BF16, &cpu);
    test_narrow(c, NSA_F16, &cpu);
    ops_cpu_close(&cpu);
    return check_done("test_trainer");
}

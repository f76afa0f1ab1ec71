/* test_model.c - TinyLM's parameters, memory and bits: the counts that are known, gradients that
   reach every tensor, the same bits with checkpointing and with any number of threads, documents as
   if alone, updates, refusals. Twin: model.c. Gradients are checked in test_model_gradients.c. */
#include <stdlib.h>

#include "base/threads.h"
#include "model/optimizer.h"
#include "model_test.h"

enum { BATCH = 2, TOKENS = 100, ROWS = BATCH * TOKENS, VOCAB = 64 };

static int32_t tokens[ROWS], labels[ROWS];
static const model_batch batch = {
    .tokens = tokens, .labels = labels, .batch = BATCH, .tokens_each = TOKENS};

/* Longer than its window, not a multiple of its blocks, with blocks to choose from. */
static model_config small(int layers) {
    return tinylm(VOCAB, 32, layers, 4, 2, 8, 12, 8, 4, 16, 4, 24);
}

static void test_counts(const ops *o) {
    static const struct {
        const char *name;
        int64_t count;
        int arguments[12];
    } known[] = {
        {"TinyLM(256,128,5,...)", 1009839, {256, 128, 5, 8, 2, 16, 16, 16, 8, 32, 8, 64}},
        {"train_showcase", 254499, {256, 128, 1, 8, 2, 16, 16, 16, 8, 32, 8, 64}},
        {"m7c_3090_smoke", 4659858, {256, 256, 6, 8, 2, 32, 32, 16, 8, 32, 8, 256}},
        {"m7c_125m, bytes", 78295332, {256, 768, 12, 12, 2, 64, 64, 32, 16, 64, 16, 512}},
        {"m7c_125m, GPT-2", 155096868, {50257, 768, 12, 12, 2, 64, 64, 32, 16, 64, 16, 512}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const int *a = known[i].arguments;
        model_config c =
            tinylm(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
        model_options options = {.batch = 1, .tokens = 64, .training = true};
        arena sizes;
        int64_t count = 0;
        check_case("%s", known[i].name);
        CHECK(model_measure(&c, &options, o, &sizes, &count, &why), "%s", why.text);
        CHECK(count == known[i].count, "%lld parameters, not %lld", (long long)count,
              (long long)known[i].count);
        c.tied = true;
        CHECK(model_measure(&c, &options, o, &sizes, &count, &why), "%s", why.text);
        CHECK(count == known[i].count - (int64_t)a[0] * a[1], "tied: %lld parameters",
              (long long)count);
    }
}

/* Matrices begin with deviation 0.02; what is added to the residual stream, twice a layer, with
   less. */
/* What begins as a constant: norms as 1, conv as the mean, biases as 0. */
static void check_constant(const param *p, const real *values, const model_config *c) {
    double want = strstr(p->name, "norm") ? 1 : strstr(p->name, ".w1") ? 1.0 / c->l : 0;
    for (int64_t e = 0; e < p->count; e++)
        if (!CHECK(values[e] == (real)want, "%s: %g, not %g", p->name, (double)values[e], want))
            return;
}

static void test_initial_values(const ops *o, nsa_phi phi) {
    enum { LAYERS = 8 };
    model_config c = small(LAYERS);
    model m;
    c.phi = phi;
    check_case("initial values, phi %d", (int)phi);
    if (!open_model(&m, &c, 1, TOKENS, false, o)) return;
    for (int i = 0; i < m.params.length; i++) {
        const param *p = &m.params.list[i];
        const real *values = m.params.value + p->offset;
        bool residual = strstr(p->name, "attn.out.") || strstr(p->name, "mlp.fc2.");
        bool is_w = strstr(p->name, "phi_") && strstr(p->name, ".w"); /* of a network */
        double width = strstr(p->name, "phi_k") ? c.d_k : c.d_v;
        double want = residual ? 0.02 / sqrt(2.0 * LAYERS)
                      : !is_w  ? 0.02
                               : 1 / sqrt(strstr(p->name, ".w1") ? c.l * width : width);
        double squares = 0;
        if (p->init_std == 0) {
            check_constant(p, values, &c);
            continue;
        }
        for (int64_t e = 0; e < p->count; e++) squares += pow((double)values[e], 2);
        double got = sqrt(squares / (double)p->count);
        if (strstr(p->name, "gate.fc2"))
            CHECK(got > 0 && got < 0.02, "%s: deviation %g, not small", p->name, got);
        else /* five deviations of an estimate from so many numbers */
            CHECK(fabs(got / want - 1) < 5 / sqrt(2 * (double)p->count), "%s: deviation %g, not %g",
                  p->name, got, want);
    }
    model_close(&m);
}

/* Every kind of layer beside every other, in this order. */
static model_config mixed(void) {
    model_config c = small(4);
    for (int i = 0; i < ATTENTION_KINDS; i++) c.attention[i] = (unsigned char)i;
    c.qk_norm = true;
    return c;
}

static void test_nonzero_gradients(const ops *o) {
    static const char *const names[] = {"mean", "conv", "mlp", "full", "by layer"};
    for (int kind = 0; kind < 5; kind++) {
        model m;
        model_config c = kind == 4 ? mixed() : small(2);
        if (kind == 3) model_attend_with(&c, ATTENTION_FULL);
        if (kind < 3) c.phi = (nsa_phi)kind;
        check_case("gradients, %s", names[kind]);
        if (!open_model(&m, &c, BATCH, TOKENS, false, o)) return;
        train_once(&m, &batch);
        for (int i = 0; i < m.params.length; i++) {
            const param *p = &m.params.list[i];
            double largest = 0;
            for (int64_t e = 0; e < p->count; e++)
                largest = check_larger(largest, fabs((double)m.params.grad[p->offset + e]));
            /* More than rounding leaves where the sum ought to be zero. */
            CHECK(largest > 1e-5 && isfinite(largest), "%s: largest gradient %g", p->name, largest);
        }
        model_close(&m);
    }
}

/* Gradients and loss of one pass, to be freed; layers first .. end - 1 are computed again. */
static real *gradients(const model_config *c, checkpointing how, int first, int end, const ops *o,
                       int64_t *count, double *loss) {
    model m;
    model_options options = {.batch = BATCH,
                             .tokens = TOKENS,
                             .training = true,
                             .checkpointing = how,
                             .first = first,
                             .end = end};
    *count = 0;
    if (!CHECK(model_open(&m, c, &options, o, 1, &why), "%s", why.text)) return NULL;
    *loss = train_once(&m, &batch);
    *count = m.params.elements;
    real *copy = check_alloc((size_t)*count * sizeof *copy);
    memcpy(copy, m.params.grad, (size_t)*count * sizeof *copy);
    model_close(&m);
    return copy;
}

static void test_same_bits(const ops *one, const char *dtype) {
    static const struct {
        const char *name;
        checkpointing how;
        int first, end;
    } forms[] = {{"every layer", CHECKPOINT_LAYERS, 0, 0},
                 {"selective", CHECKPOINT_SELECTIVE, 0, 0},
                 {"layers 1 and 2 of 4", CHECKPOINT_LAYERS, 1, 3},
                 {"the last layer", CHECKPOINT_LAYERS, 3, 4},
                 {"layers 0 to 2, selective", CHECKPOINT_SELECTIVE, 0, 3}};
    ops two = open_ops(2);
    if (one->dtype != NSA_F32) ops_cpu_narrow(&two, one->dtype);
    static const char *const names[] = {"nsa", "full", "by layer"};
    for (int kind = 0; kind < 3; kind++) {
        model_config c = kind == 2 ? mixed() : small(4);
        int64_t count, other;
        double loss, again;
        if (kind == 1) model_attend_with(&c, ATTENTION_FULL);
        check_case("bits, %s, %s", names[kind], dtype);
        real *want = gradients(&c, CHECKPOINT_NONE, 0, 0, one, &count, &loss);
        for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
            real *recomputed =
                gradients(&c, forms[i].how, forms[i].first, forms[i].end, one, &other, &again);
            if (!want || !recomputed) break;
            CHECK(loss == again, "%s: loss %.9g, not %.9g", forms[i].name, again, loss);
            CHECK_BITS(forms[i].name, recomputed, want, (size_t)count * sizeof *want, sizeof *want);
            free(recomputed);
        }
        real *threads = gradients(&c, CHECKPOINT_NONE, 0, 0, &two, &other, &again);
        if (want && threads) {
            CHECK(loss == again, "2 threads: loss %.9g, not %.9g", again, loss);
            CHECK_BITS("gradients with 2 threads", threads, want, (size_t)count * sizeof *want,
                       sizeof *want);
        }
        free(want);
        free(threads);
    }
    ops_cpu_close(&two);
}

/* Copies what two models have in common, by name; the rest of `to` stays. */
static void copy_common(const model *to, const model *from) {
    for (int i = 0; i < to->params.length; i++)
        for (int j = 0; j < from->params.length; j++) {
            const param *x = &to->params.list[i], *y = &from->params.list[j];
            int64_t count = x->count < y->count ? x->count : y->count;
            if (strcmp(x->name, y->name)) continue;
            memcpy(to->params.value + x->offset, from->params.value + y->offset,
                   (size_t)count * sizeof(real));
        }
}

static const param *named(const model *m, const char *name) {
    for (int i = 0; i < m->params.length; i++)
        if (!strcmp(m->params.list[i].name, name)) return &m->params.list[i];
    return NULL;
}

/* To the bit with the plain loops, within rounding with a library: there a sum's order may hang on
   how wide the product is (OpenBLAS and oneDNN on AVX2). */
static void compare_loss(double got, double want) {
#ifdef NSA_TEST_PLAIN
    double allowed = 0;
#else
    double allowed = 1e-6 * fabs(want);
#endif
    CHECK(fabs(got - want) <= allowed, "loss %.9g, with the window shut %.9g", got, want);
}

static void compare_gradients(const param *x, const real *got, const real *want) {
    size_t count = (size_t)x->count;
#ifdef NSA_TEST_PLAIN
    CHECK_BITS(x->name, got, want, count * sizeof(real), sizeof(real));
#else
    double *a = check_alloc(count * sizeof *a), *b = check_alloc(count * sizeof *b);
    for (size_t i = 0; i < count; i++) a[i] = (double)got[i], b[i] = (double)want[i];
    CHECK_NEAR(x->name, a, b, count, count, 1e-5 * check_norm(b, count));
    free(a);
    free(b);
#endif
}

/* cmp+slc is nsa whose window's gate is shut, whatever that window holds: the same loss, and the
   same gradients of what both have. */
static void test_without_window(const ops *o, nsa_gate_kind gate) {
    model_config c = small(1), whole = c;
    model part, all;
    c.gate = whole.gate = gate;
    check_case("cmp+slc, gate %d", (int)gate);
    model_attend_with(&c, ATTENTION_CMP_SLC);
    if (!open_model(&part, &c, BATCH, TOKENS, false, o)) return;
    if (!open_model(&all, &whole, BATCH, TOKENS, false, o)) return;
    enlarge(&part, 4);
    enlarge(&all, 4);
    copy_common(&all, &part);
    const param *w = named(&all, "blocks.0.attn.gate.fc2.weight");
    const param *b = named(&all, "blocks.0.attn.gate.fc2.bias");
    memset(all.params.value + w->offset + 2 * w->shape[1], 0, (size_t)w->shape[1] * sizeof(real));
    all.params.value[b->offset + 2] = -10000;
    double loss = train_once(&part, &batch), want = train_once(&all, &batch);
    compare_loss(loss, want);
    for (int i = 0; i < part.params.length; i++) {
        const param *x = &part.params.list[i], *y = named(&all, x->name);
        if (CHECK(y != NULL, "%s: not there", x->name))
            compare_gradients(x, part.params.grad + x->offset, all.params.grad + y->offset);
    }
    CHECK(part.params.count < all.params.count, "no pair was spared");
    model_close(&part);
    model_close(&all);
}

/* Activations of 16 bits: the loss and the gradients of f32, but for their rounding. */
static void test_precision(const ops *o, const ops *narrow, const char *dtype, double allowed) {
    model_config c = small(2);
    int64_t count, other;
    double loss, rounded, difference = 0, size = 0;
    check_case("%s", dtype);
    real *want = gradients(&c, CHECKPOINT_NONE, 0, 0, o, &count, &loss);
    real *got = gradients(&c, CHECKPOINT_NONE, 0, 0, narrow, &other, &rounded);
    if (!want || !got || !CHECK(count == other, "%lld elements", (long long)other)) return;
    for (int64_t e = 0; e < count; e++) {
        difference += pow((double)got[e] - (double)want[e], 2);
        size += pow((double)want[e], 2);
    }
    CHECK(fabs(rounded - loss) <= allowed * loss && rounded != loss, "loss %.9g, in f32 %.9g",
          rounded, loss);
    CHECK(sqrt(difference / size) <= allowed, "gradients differ by %.3g", sqrt(difference / size));
    free(want);
    free(got);
}

/* Each document of a packed batch has the loss and the gradients that it has alone. */
static void test_documents(const ops *o) {
    static const int32_t begins[] = {0, 7, 61, TOKENS, TOKENS + 1, ROWS};
    enum { DOCUMENTS = sizeof begins / sizeof *begins - 1 };
    model_config c = small(2);
    model m;
    model_batch packed = batch;
    double sum = 0, difference = 0, size = 0;
    check_case("documents");
    packed.begins = begins;
    packed.documents = DOCUMENTS;
    packed.longest = ROWS - TOKENS - 1;
    if (!open_model(&m, &c, BATCH, TOKENS, false, o)) return;
    double loss = train_once(&m, &packed);
    size_t bytes = (size_t)m.params.elements * sizeof(real);
    real *together = check_alloc(bytes);
    memcpy(together, m.params.grad, bytes);
    model_zero_gradients(&m);
    for (int i = 0; i < DOCUMENTS; i++) {
        model_batch alone = {.tokens = tokens + begins[i],
                             .labels = labels + begins[i],
                             .batch = 1,
                             .tokens_each = begins[i + 1] - begins[i]};
        model_zero_state(&m);
        CHECK(model_train(&m, &alone, 1, &why), "document %d: %s", i, why.text);
        sum += model_state(&m).loss;
    }
    CHECK(fabs(loss - sum) <= 1e-5 * sum, "loss %.9g together, %.9g alone", loss, sum);
    for (int64_t e = 0; e < m.params.elements; e++) {
        double a = (double)together[e], b = (double)m.params.grad[e];
        difference += (a - b) * (a - b);
        size += b * b;
    }
    CHECK(difference <= 1e-10 * size, "gradients differ by %.3g", sqrt(difference / size));
    free(together);
    model_close(&m);
}

/* AdamW as its authors write it, in f64, on the gradients of one pass: what optimizer_step makes of
   the settings. The second step is clipped, which the first could not show: it divides by |g|. */
static void test_updates(const ops *o) {
    static const double clips[] = {0, 0.5, 0};
    model_config c = small(1);
    model m;
    double norm = 0;
    check_case("updates");
    if (!open_model(&m, &c, BATCH, TOKENS, false, o)) return;
    double *w = check_alloc((size_t)m.params.elements * sizeof *w);
    double *m1 = calloc((size_t)m.params.elements, sizeof *m1);
    double *m2 = calloc((size_t)m.params.elements, sizeof *m2);
    for (int64_t e = 0; e < m.params.elements; e++) w[e] = (double)m.params.value[e];
    train_once(&m, &batch);
    for (int64_t e = 0; e < m.params.elements; e++) norm += pow((double)m.params.grad[e], 2);
    for (int step = 1; step <= 3; step++) {
        adamw a = {0.01, 0.9, 0.95, 1e-8, 0.1, step};
        double clip = clips[step - 1], scale = clip > 0 ? clip / sqrt(norm) : 1;
        model_zero_state(&m);
        CHECK(optimizer_step(&m, &a, clip, &why), "%s", why.text);
        for (int i = 0; i < m.params.length; i++) {
            const param *p = &m.params.list[i];
            double worst = 0;
            for (int64_t e = p->offset; e < p->offset + p->count; e++) {
                double g = (double)m.params.grad[e] * scale;
                m1[e] = 0.9 * m1[e] + 0.1 * g;
                m2[e] = 0.95 * m2[e] + 0.05 * g * g;
                double up = m1[e] / (1 - pow(0.9, step)),
                       down = sqrt(m2[e] / (1 - pow(0.95, step))) + 1e-8;
                w[e] -= 0.01 * (up / down + (p->decay ? 0.1 * w[e] : 0));
                worst = check_larger(worst, fabs((double)m.params.value[e] - w[e]));
            }
            CHECK(worst < 1e-6, "step %d: %s is off by %g", step, p->name, worst);
        }
    }
    free(w), free(m1), free(m2);
    model_close(&m);
}

/* Memory is what it was measured to be, and grows with layers by the same step each. */
static void test_memory(const ops *o) {
    size_t bytes[13] = {0}, checkpointed[13] = {0};
    int64_t count;
    check_case("memory");
    for (int layers = 1; layers <= 12; layers++) {
        model_config c = tinylm(256, 128, layers, 8, 2, 16, 16, 16, 8, 32, 8, 64);
        model_options options = {.batch = 1, .tokens = 128, .training = true};
        arena sizes;
        model m;
        CHECK(model_measure(&c, &options, o, &sizes, &count, &why), "%s", why.text);
        bytes[layers] = sizes.used;
        if (!open_model(&m, &c, 1, 128, false, o)) return;
        CHECK(m.arena.used == sizes.used, "%d layers: %zu bytes, measured %zu", layers,
              m.arena.used, sizes.used);
        model_close(&m);
        options.checkpointing = CHECKPOINT_LAYERS;
        CHECK(model_measure(&c, &options, o, &sizes, &count, &why), "%s", why.text);
        checkpointed[layers] = sizes.used - sizes.by_purpose[FOR_WEIGHTS] -
                               sizes.by_purpose[FOR_GRADIENTS] - sizes.by_purpose[FOR_MOMENTS];
    }
    for (int layers = 3; layers <= 12; layers++) {
        double before = (double)(bytes[layers - 1] - bytes[layers - 2]);
        double step = (double)(bytes[layers] - bytes[layers - 1]);
        CHECK(fabs(step - before) <= 4096, "layer %d takes %.0f bytes, the one before %.0f", layers,
              step, before);
        size_t input = 128 * 128 * sizeof(real);
        CHECK(checkpointed[layers] - checkpointed[layers - 1] == input,
              "with checkpointing layer %d takes %zu bytes beside its parameters, its input %zu",
              layers, checkpointed[layers] - checkpointed[layers - 1], input);
    }
}

/* Of the production model, in each form of checkpointing, twice the tokens take little more than
   twice the memory. */
static void test_growth(const ops *o) {
    model_config c = tinylm(256, 768, 12, 12, 2, 64, 64, 32, 16, 64, 16, 512);
    int64_t count;
    check_case("growth");
    for (int how = CHECKPOINT_NONE; how <= CHECKPOINT_SELECTIVE; how++)
        for (int length = 1024; length <= 32768; length *= 2) {
            arena half, whole;
            model_options options = {.batch = 1,
                                     .tokens = length,
                                     .training = true,
                                     .checkpointing = (checkpointing)how};
            CHECK(model_measure(&c, &options, o, &half, &count, &why), "%s", why.text);
            options.tokens = 2 * length;
            CHECK(model_measure(&c, &options, o, &whole, &count, &why), "%s", why.text);
            CHECK((double)whole.used <= 2.2 * (double)half.used,
                  "form %d: %d tokens take %zu bytes, %d take %zu", how, length, half.used,
                  2 * length, whole.used);
        }
}

/* Logits of the next token are those that training computes: what follows changes nothing. */
static void test_next(const ops *o) {
    model_config c = small(2);
    model m;
    real logits[VOCAB], shorter[VOCAB];
    check_case("next token");
    if (!open_model(&m, &c, BATCH, TOKENS, false, o)) return;
    CHECK(model_next(&m, tokens, 50, logits, &why), "%s", why.text);
    model_batch b = {.tokens = tokens, .labels = labels, .batch = 1, .tokens_each = 50};
    int32_t only_last[50];
    for (int i = 0; i < 50; i++) only_last[i] = i == 49 ? labels[49] : -1;
    b.labels = only_last;
    double sum = 0, loss = evaluate_once(&m, &b);
    for (int i = 0; i < VOCAB; i++) sum += exp((double)logits[i]);
    double want = log(sum) - (double)logits[labels[49]];
    double allowed = o->dtype == NSA_F32 ? 1e-5 : 2e-2;
    CHECK(fabs(loss - want) <= allowed, "loss %.9g, from the logits %.9g", loss, want);
    CHECK(model_state(&m).labels == 1, "%lld labels", (long long)model_state(&m).labels);
    CHECK(model_next(&m, tokens, 1, shorter, &why), "%s", why.text);
    CHECK(memcmp(logits, shorter, sizeof logits) != 0, "the context does not matter");
    model_close(&m);
}

static void refuse(const model_config *c, int rows, int each, const ops *o, const char *word) {
    model m;
    model_options options = {.batch = rows, .tokens = each, .training = true};
    if (!CHECK(!model_open(&m, c, &options, o, 1, &why), "opened; %s was due", word)) {
        model_close(&m);
        return;
    }
    CHECK(strstr(why.text, word) != NULL, "\"%s\" lacks \"%s\"", why.text, word);
}

static void test_refusals(const ops *o) {
    model_config c = small(1);
    model m;
    model_batch b = batch;
    check_case("refusals");
    c.dim = 0;
    refuse(&c, 1, 8, o, "dim");
    c = small(1), c.d_k = 7;
    refuse(&c, 1, 8, o, "d_k");
    c = small(1), c.n_heads = 3;
    refuse(&c, 1, 8, o, "heads");
    c = small(1), c.d = 3;
    refuse(&c, 1, 8, o, "cmp_stride");
    c = small(1), c.w = 0;
    refuse(&c, 1, 8, o, "window");
    c = small(1);
    refuse(&c, 1 << 20, 1 << 20, o, "tokens");
    refuse(&c, 0, 8, o, "batch");
    if (!open_model(&m, &c, 1, TOKENS, false, o)) return;
    CHECK(!model_evaluate(&m, &b, &why) && strstr(why.text, "between 1 and"), "%s", why.text);
    b.batch = 0;
    CHECK(!model_evaluate(&m, &b, &why) && strstr(why.text, "between 1 and"), "%s", why.text);
    model_close(&m);
}

int main(int argc, char **argv) {
    (void)argc;
    threads_wait_asleep(argv);
    ops o = open_ops(1);
    random_tokens(tokens, labels, BATCH, TOKENS, VOCAB, 0);
    test_counts(&o);
    for (int phi = NSA_PHI_MEAN; phi <= NSA_PHI_MLP; phi++) test_initial_values(&o, (nsa_phi)phi);
    test_nonzero_gradients(&o);
    ops bf16 = open_ops(1), f16 = open_ops(1);
    ops_cpu_narrow(&bf16, NSA_BF16);
    ops_cpu_narrow(&f16, NSA_F16);
    test_same_bits(&o, "f32");
    test_same_bits(&bf16, "bf16");
    test_precision(&o, &bf16, "bf16", 3e-2);
    test_precision(&o, &f16, "f16", 4e-3);
    test_next(&bf16);
    ops_cpu_close(&bf16);
    ops_cpu_close(&f16);
    test_without_window(&o, NSA_GATE_SIGMOID);
    test_without_window(&o, NSA_GATE_SOFTMAX);
    test_documents(&o);
    test_updates(&o);
    test_memory(&o);
    test_growth(&o);
    test_next(&o);
    test_refusals(&o);
    ops_cpu_close(&o);
    return check_done("test_model");
}

/* test_muon.c - Muon against plain loops in f64 that share no code with it: the iteration over
   shapes, the singular values of its result, whole steps of a model, bits with any number of
   threads, steps that overflow. Twins: muon.c, optimizer.c. */
#include <stdlib.h>

#include "model/optimizer.h"
#include "model_test.h"

enum { MOST = 96 * 96, BATCH = 2, TOKENS = 40, ROWS = BATCH * TOKENS, VOCAB = 64 };

static int32_t tokens[ROWS], labels[ROWS];
static const model_batch batch = {
    .tokens = tokens, .labels = labels, .batch = BATCH, .tokens_each = TOKENS};

static muon_room open_room(const ops *o) {
    muon_room r;
    real **const parts[] = {&r.x, &r.y, &r.gram, &r.square};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        *parts[i] = o->allocate(o, MOST * sizeof(real));
    return r;
}

static void close_room(const ops *o, muon_room *r) {
    o->release(o, r->x);
    o->release(o, r->y);
    o->release(o, r->gram);
    o->release(o, r->square);
}

/* c = a b, or a b^T, in f64. */
static void multiply(double *c, const double *a, const double *b, int m, int n, int k, bool t) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int e = 0; e < k; e++) sum += a[i * k + e] * (t ? b[j * k + e] : b[e * n + j]);
            c[i * n + j] = sum;
        }
}

/* Always from the left, whatever the shape: X <- a X + b (X X^T) X + c (X X^T)^2 X. */
static void reference(double *x, int rows, int cols) {
    double *gram = check_alloc((size_t)(rows * rows) * sizeof *gram), sum = 0;
    double *once = check_alloc((size_t)(rows * cols) * sizeof *once);
    double *twice = check_alloc((size_t)(rows * cols) * sizeof *twice);
    for (int i = 0; i < rows * cols; i++) sum += x[i] * x[i];
    for (int i = 0; i < rows * cols; i++) x[i] /= sqrt(sum) + 1e-7;
    for (int k = 0; k < 5; k++) {
        multiply(gram, x, x, rows, rows, cols, true);
        multiply(once, gram, x, rows, cols, rows, false);
        multiply(twice, gram, once, rows, cols, rows, false);
        for (int i = 0; i < rows * cols; i++)
            x[i] = 3.4445 * x[i] - 4.7750 * once[i] + 2.0315 * twice[i];
    }
    free(gram), free(once), free(twice);
}

/* The largest eigenvalue of shift I + sign M for a symmetric M, by repeated multiplication. */
static double largest(const double *m, int n, double shift, double sign) {
    double v[96], w[96], size = 0;
    for (int i = 0; i < n; i++) v[i] = check_normal(5, (uint64_t)i);
    for (int k = 0; k < 3000; k++) {
        double squares = 0;
        for (int i = 0; i < n; i++) {
            w[i] = shift * v[i];
            for (int j = 0; j < n; j++) w[i] += sign * m[i * n + j] * v[j];
            squares += w[i] * w[i];
        }
        size = sqrt(squares);
        for (int i = 0; i < n; i++) v[i] = w[i] / size;
    }
    return size;
}

static void test_iteration(const ops *o) {
    static const int shapes[][2] = {{1, 7},   {7, 1},   {3, 8},   {8, 3},   {16, 16},
                                    {24, 60}, {60, 24}, {96, 33}, {33, 96}, {80, 80}};
    static real from[MOST];
    static double want[MOST], got[MOST], gram[MOST];
    muon_room room = open_room(o);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        int rows = shapes[s][0], cols = shapes[s][1], side = rows < cols ? rows : cols;
        int count = rows * cols;
        check_case("%d x %d", rows, cols);
        for (int i = 0; i < count; i++) {
            from[i] = (real)(1e-3 * check_normal(9 + s, (uint64_t)i));
            want[i] = (double)from[i];
        }
        reference(want, rows, cols);
        const real *x = muon_orthogonalize(o, &room, from, rows, cols);
        for (int i = 0; i < count; i++) got[i] = (double)x[i];
        /* 15 products of f32, and a slope of up to 485 where a singular value is small */
        CHECK_NEAR("iteration", got, want, (size_t)count, (size_t)cols,
                   3e-5 * check_norm(want, (size_t)count));
        if (rows > cols) continue;
        multiply(gram, got, got, side, side, cols, true);
        double most = largest(gram, side, 0, 1), least = 4 - largest(gram, side, 4, -1);
        CHECK(sqrt(most) <= 1.21, "a singular value of %g", sqrt(most));
        if (rows < cols) CHECK(sqrt(least) >= 0.68, "a singular value of %g", sqrt(least));
    }
    close_room(o, &room);
}

/* An update moves an element by 0.2 of the rate in the root of the mean square, whatever the
   shape, but for singular values that are not quite 1. */
static void test_scale(const ops *o) {
    static const int shapes[][2] = {{24, 60}, {60, 24}, {33, 96}};
    static real from[MOST];
    muon_room room = open_room(o);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        int rows = shapes[s][0], cols = shapes[s][1];
        double squares = 0;
        check_case("scale of %d x %d", rows, cols);
        for (int i = 0; i < rows * cols; i++) from[i] = (real)check_normal(3, (uint64_t)i);
        const real *x = muon_orthogonalize(o, &room, from, rows, cols);
        for (int i = 0; i < rows * cols; i++) squares += (double)x[i] * (double)x[i];
        double moved = muon_scale(rows, cols) * sqrt(squares / (rows * cols));
        CHECK(moved > 0.2 * 0.68 && moved < 0.2 * 1.21, "an element moves by %g", moved);
    }
    close_room(o, &room);
}

static model_config geometry(void) {
    model_config c = tinylm(VOCAB, 24, 2, 4, 2, 8, 16, 8, 4, 16, 4, 12);
    c.phi = NSA_PHI_MLP; /* several matrices in a tensor */
    return c;
}

static bool open_muon(model *m, const model_config *c, const ops *o) {
    model_options options = {.batch = BATCH, .tokens = TOKENS, .training = true, .muon = true};
    return CHECK(model_open(m, c, &options, o, 1, &why), "%s", why.text);
}

/* Which tensors are Muon's, said once more: matrices of blocks, phi's networks among them. */
static bool is_muon(const char *name) {
    static const char *const ends[] = {".weight", ".w1", ".w2"};
    if (strncmp(name, "blocks.", 7) || strstr(name, "norm")) return false;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (!strcmp(name + strlen(name) - strlen(ends[i]), ends[i])) return true;
    return false;
}

/* One step of one tensor in f64. */
static void step_tensor(const param *p, const real *grad, double scale, int step, double *w,
                        double *m1, double *m2) {
    static double direction[MOST];
    if (!is_muon(p->name)) {
        for (int64_t e = 0; e < p->count; e++) {
            double g = (double)grad[e] * scale;
            m1[e] = 0.9 * m1[e] + 0.1 * g;
            m2[e] = 0.95 * m2[e] + 0.05 * g * g;
            double up = m1[e] / (1 - pow(0.9, step)), down = sqrt(m2[e] / (1 - pow(0.95, step)));
            w[e] -= 0.01 * (up / (down + 1e-8) + (p->decay ? 0.1 * w[e] : 0));
        }
        return;
    }
    int64_t rows = p->shape[p->dims - 2], cols = p->shape[p->dims - 1], each = rows * cols;
    for (int64_t at = 0; at < p->count; at += each) {
        for (int64_t e = 0; e < each; e++) {
            double g = (double)grad[at + e] * scale;
            m1[at + e] = 0.95 * m1[at + e] + g;
            direction[e] = g + 0.95 * m1[at + e];
        }
        reference(direction, (int)rows, (int)cols);
        double rate = 0.01 * 0.2 * sqrt((double)(rows > cols ? rows : cols));
        for (int64_t e = 0; e < each; e++)
            w[at + e] -= rate * direction[e] + 0.01 * 0.1 * w[at + e];
    }
}

/* Gradients are made up, and differ from step to step; those of the second are clipped. */
static void test_steps(const ops *o) {
    model_config c = geometry();
    model m;
    int muons = 0;
    if (!open_muon(&m, &c, o)) return;
    size_t count = (size_t)m.params.elements;
    double *w = calloc(3 * count, sizeof *w), *m1 = w + count, *m2 = m1 + count;
    for (size_t e = 0; e < count; e++) w[e] = (double)m.params.value[e];
    real *kept = check_alloc(count * sizeof *kept);
    for (int step = 1; step <= 3; step++) {
        adamw a = {0.01, 0.9, 0.95, 1e-8, 0.1, step};
        double squares = 0;
        check_case("step %d", step);
        memset(m.params.grad, 0, count * sizeof(real));
        for (int i = 0; i < m.params.length; i++) {
            const param *p = &m.params.list[i];
            for (int64_t e = p->offset; e < p->offset + p->count; e++) {
                m.params.grad[e] = (real)check_normal((uint64_t)step, (uint64_t)e);
                squares += pow((double)m.params.grad[e], 2);
            }
        }
        memcpy(kept, m.params.grad, count * sizeof *kept);
        double clip = step == 2 ? 1 : 0, scale = clip > 0 ? clip / sqrt(squares) : 1;
        model_zero_state(&m);
        CHECK(optimizer_step(&m, &a, clip, &why), "%s", why.text);
        for (int i = 0; i < m.params.length; i++) {
            const param *p = &m.params.list[i];
            double worst = 0;
            int64_t at = p->offset;
            CHECK(p->inner == is_muon(p->name), "%s: whose is it?", p->name);
            muons += p->inner;
            step_tensor(p, kept + at, scale, step, w + at, m1 + at, m2 + at);
            for (int64_t e = at; e < at + p->count; e++)
                worst = check_larger(worst, fabs((double)m.params.value[e] - w[e]));
            /* an update is 0.01 x 0.2, of which the iteration has 3e-5; values are rounded */
            CHECK(worst < 1e-6, "%s is off by %g", p->name, worst);
        }
    }
    CHECK(muons == 3 * 2 * 16, "%d matrices in blocks, not 16", muons / 6);
    free(w);
    free(kept);
    model_close(&m);
}

/* Parameters and moments after three steps, to be freed. */
static real *trained(const ops *o, size_t *count) {
    model_config c = geometry();
    adamw a = {0.01, 0.9, 0.95, 1e-8, 0.1, 0};
    model m;
    if (!open_muon(&m, &c, o)) exit(99);
    for (a.step = 1; a.step <= 3; a.step++) {
        train_once(&m, &batch);
        CHECK(optimizer_step(&m, &a, 1, &why), "%s", why.text);
    }
    size_t elements = (size_t)m.params.elements;
    real *all = check_alloc(2 * elements * sizeof *all);
    memcpy(all, m.params.value, elements * sizeof *all);
    memcpy(all + elements, m.params.m, elements * sizeof *all);
    *count = 2 * elements;
    model_close(&m);
    return all;
}

static void test_threads(const ops *o) {
    ops two = open_ops(2);
    size_t count, other;
    check_case("two threads");
    real *want = trained(o, &count), *got = trained(&two, &other);
    CHECK_BITS("parameters and moments", got, want, count * sizeof *want, sizeof *want);
    free(want);
    free(got);
    ops_cpu_close(&two);
}

/* Of f16: nothing moves, neither weights nor moments. */
static void test_overflow(const ops *o) {
    model_config c = geometry();
    adamw a = {0.01, 0.9, 0.95, 1e-8, 0.1, 1};
    model m;
    check_case("overflow");
    if (!open_muon(&m, &c, o)) return;
    train_once(&m, &batch);
    size_t bytes = (size_t)m.params.elements * sizeof(real);
    real *kept = check_alloc(bytes);
    memcpy(kept, m.params.value, bytes);
    m.params.grad[m.params.list[3].offset] = (real)INFINITY;
    CHECK(optimizer_step(&m, &a, 1, &why), "%s", why.text);
    CHECK(model_state(&m).overflow == 1, "no overflow");
    CHECK_BITS("parameters", m.params.value, kept, bytes, sizeof(real));
    memset(kept, 0, bytes);
    CHECK_BITS("moments", m.params.m, kept, bytes, sizeof(real));
    free(kept);
    model_close(&m);
}

int main(void) {
    ops o = open_ops(1);
    random_tokens(tokens, labels, BATCH, TOKENS, VOCAB, 0);
    test_iteration(&o);
    test_scale(&o);
    test_steps(&o);
    test_threads(&o);
    test_overflow(&o);
    ops_cpu_close(&o);
    return check_done("test_muon");
}

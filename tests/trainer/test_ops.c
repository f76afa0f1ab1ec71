/* test_ops.c - the operations one by one against plain f64 formulas: matrix products of odd shapes,
   norms, SiLU, loss, clipping, AdamW; and the drawing of tokens. Twins: gemm.c, ops_cpu.c,
   sample.c. The derivatives are checked through the model in test_model_gradients.c. */
#include <stdlib.h>

#include "base/fallback.h"
#include "base/threads.h"
#include "model_test.h"
#include "ops/gemm.h"
#include "ops/gemm_bf16.h"
#include "ops/ops_half.h"
#include "train/sample.h"

static real *draw(int64_t count, uint64_t seed) {
    real *x = check_alloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = (real)check_normal(seed, (uint64_t)i);
    return x;
}

static double a_of(gemm_form form, const real *a, int m, int k, int i, int p) {
    return (double)(form == GEMM_TN ? a[(int64_t)p * m + i] : a[(int64_t)i * k + p]);
}

static double b_of(gemm_form form, const real *b, int n, int k, int p, int j) {
    return (double)(form == GEMM_NT ? b[(int64_t)j * k + p] : b[(int64_t)p * n + j]);
}

static void check_product(gemm_form form, int m, int n, int k, int add) {
    size_t size = (size_t)m * (size_t)n;
    real *a = draw((int64_t)m * k, 1), *b = draw((int64_t)k * n, 2), *c = draw((int64_t)m * n, 3);
    real *two = check_alloc(size * sizeof *two);
    double *want = check_alloc(size * sizeof *want), *got = check_alloc(size * sizeof *got);
    memcpy(two, c, size * sizeof *two);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = add ? (double)c[(size_t)i * (size_t)n + (size_t)j] : 0;
            for (int p = 0; p < k; p++)
                sum += a_of(form, a, m, k, i, p) * b_of(form, b, n, k, p, j);
            want[(size_t)i * (size_t)n + (size_t)j] = sum;
        }
    check_case("gemm form %d, %d x %d x %d, add %d", (int)form, m, n, k, add);
    gemm(form, m, n, k, a, b, c, add, 1);
    gemm(form, m, n, k, a, b, two, add, 3);
    for (size_t i = 0; i < size; i++) got[i] = (double)c[i];
    CHECK_NEAR("product", got, want, size, (size_t)n, 1e-6 * check_norm(want, size) + 1e-30);
    CHECK_BITS("product with 3 threads", two, c, size * sizeof *c, sizeof *c);
    free(a);
    free(b);
    free(c);
    free(two);
    free(want);
    free(got);
}

static void test_gemm(void) {
    static const int shapes[][3] = {{1, 1, 1},   {1, 300, 7},   {5, 3, 200},     {64, 64, 64},
                                    {67, 65, 1}, {300, 130, 9}, {129, 257, 140}, {18, 1030, 390}};
    gemm_open();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int form = 0; form < 3; form++)
            for (int add = 0; add < 2; add++)
                check_product((gemm_form)form, shapes[i][0], shapes[i][1], shapes[i][2], add);
}

static void test_silu(const ops *o) {
    enum { COUNT = 4001 };
    real x[COUNT], y[COUNT], again[COUNT], dx[COUNT], nan = (real)NAN;
    check_case("silu");
    for (int i = 0; i < COUNT; i++) x[i] = (real)((i - COUNT / 2) * 0.05), dx[i] = 1;
    x[0] = -1000, x[COUNT - 1] = 1000;
    o->silu_forward(o, y, x, COUNT);
    memcpy(again, y, sizeof y);
    memset(y, 0, sizeof y);
    o->silu_backward(o, dx, y, x, COUNT);
    for (int i = 0; i < COUNT; i++) {
        double z = (double)x[i], s = 1 / (1 + exp(-z)), slope = s * (1 + z * (1 - s));
        /* Below -87 the exponential is held where f32 ends, and the value is 0 for all purposes. */
        double allowed = z < -87 ? 1e-34 : 4e-7 * fabs(z * s);
        CHECK(fabs((double)y[i] - z * s) <= allowed, "silu(%g) = %.9g", z, (double)y[i]);
        CHECK(fabs((double)again[i] - z * s) <= allowed, "again %.9g", (double)again[i]);
        CHECK(fabs((double)dx[i] - slope) <= 1e-6, "silu'(%g) = %.9g", z, (double)dx[i]);
    }
    o->silu_forward(o, y, &nan, 1);
    CHECK(isnan((double)y[0]), "silu(NaN) = %g", (double)y[0]);
}

/* silu(a) b and its derivatives, in rows of two halves. */
static void test_swiglu(const ops *o) {
    enum { ROWS = 7, WIDTH = 33 };
    real x[ROWS * 2 * WIDTH], dy[ROWS * WIDTH], y[2][ROWS * WIDTH], dx[ROWS * 2 * WIDTH];
    double worst = 0;
    check_case("swiglu");
    for (int i = 0; i < ROWS * 2 * WIDTH; i++) x[i] = (real)(3 * check_normal(30, (uint64_t)i));
    for (int i = 0; i < ROWS * WIDTH; i++) dy[i] = (real)check_normal(31, (uint64_t)i);
    o->swiglu_forward(o, y[0], x, ROWS, WIDTH);
    o->swiglu_backward(o, dx, y[1], x, dy, ROWS, WIDTH);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < WIDTH; c++) {
            int at = r * 2 * WIDTH + c, i = r * WIDTH + c;
            double a = (double)x[at], b = (double)x[at + WIDTH], g = (double)dy[i];
            double s = 1 / (1 + exp(-a));
            const double off[] = {(double)y[0][i] - a * s * b, (double)y[1][i] - a * s * b,
                                  (double)dx[at] - g * b * s * (1 + a * (1 - s)),
                                  (double)dx[at + WIDTH] - g * a * s};
            for (int k = 0; k < 4; k++) worst = check_larger(worst, fabs(off[k]));
        }
    CHECK(worst < 1e-5, "off by %g", worst);
}

/* Rows so small that eps is most of what is divided by. */
static void test_rmsnorm(const ops *o, double eps) {
    enum { ROWS = 5, DIM = 24 };
    real x[ROWS * DIM], w[DIM], y[ROWS * DIM], rstd[ROWS];
    double worst = 0;
    check_case("rmsnorm");
    for (int i = 0; i < ROWS * DIM; i++) x[i] = (real)(1e-3 * check_normal(20, (uint64_t)i));
    for (int c = 0; c < DIM; c++) w[c] = (real)check_normal(21, (uint64_t)c);
    o->rmsnorm_forward(o, y, rstd, x, w, ROWS, DIM, eps);
    for (int r = 0; r < ROWS; r++) {
        double squares = 0;
        for (int c = 0; c < DIM; c++) squares += pow((double)x[r * DIM + c], 2);
        double scale = 1 / sqrt(squares / DIM + eps);
        for (int c = 0; c < DIM; c++)
            worst = check_larger(worst, fabs((double)y[r * DIM + c] -
                                             (double)x[r * DIM + c] * scale * (double)w[c]));
    }
    CHECK(worst < 1e-6, "off by %g", worst);
}

static void test_cross_entropy(const ops *o) {
    enum { ROWS = 700, V = 37 };
    static real x[ROWS * V], kept[ROWS * V];
    static int32_t labels[ROWS];
    step_state s = {.scaler = {2, 0, 0}};
    double loss = 0, worst = 0;
    check_case("cross entropy");
    for (int i = 0; i < ROWS * V; i++) kept[i] = x[i] = (real)(20 * check_normal(4, (uint64_t)i));
    for (int r = 0; r < ROWS; r++) labels[r] = r % 9 == 4 ? -1 : check_below(V, 5, (uint64_t)r);
    o->cross_entropy(o, &s, x, labels, ROWS, V, 0.25); /* times the scaler's 2 */
    for (int r = 0; r < ROWS; r++) {
        double top = -INFINITY, sum = 0;
        for (int i = 0; i < V; i++) top = fmax(top, (double)kept[r * V + i]);
        for (int i = 0; i < V; i++) sum += exp((double)kept[r * V + i] - top);
        for (int i = 0; i < V; i++) {
            double p = exp((double)kept[r * V + i] - top) / sum - (i == labels[r]);
            double want = labels[r] < 0 ? 0 : 0.5 * p;
            worst = check_larger(worst, fabs((double)x[r * V + i] - want));
        }
        if (labels[r] >= 0) loss += top + log(sum) - (double)kept[r * V + labels[r]];
    }
    CHECK(worst < 1e-6, "gradient off by %g", worst);
    CHECK(fabs(s.loss - loss) < 1e-6 * loss, "loss %.9g, not %.9g", s.loss, loss);
    CHECK(s.labels == ROWS - 78, "%lld labels", (long long)s.labels);
    step_state t = {0};
    o->cross_entropy(o, &t, kept, labels, ROWS, V, 0);
    CHECK(t.loss == s.loss, "without gradient the loss is %.17g, not %.17g", t.loss, s.loss);
}

static void test_optimizer(const ops *o) {
    enum { COUNT = 1003 };
    real value[COUNT], grad[COUNT], m[COUNT] = {0}, v[COUNT] = {0};
    double w[COUNT], dm[COUNT] = {0}, dv[COUNT] = {0}, sum = 0, worst = 0;
    step_state s = {.scaler = {1, 0, 0}};
    adamw_rates a = {
        .beta1 = (real)0.9, .beta2 = (real)0.95, .eps = (real)1e-8, .keep = 1 - (real)1e-3};
    check_case("clip and AdamW");
    for (int i = 0; i < COUNT; i++) w[i] = (double)(value[i] = (real)check_normal(6, (uint64_t)i));
    for (int step = 1; step <= 5; step++) {
        a.rate = (real)(0.01 / (1 - pow(0.9, step)));
        a.bias = (real)(1 / sqrt(1 - pow(0.95, step)));
        for (int i = 0; i < COUNT; i++)
            grad[i] = (real)check_normal(7 + (uint64_t)step, (uint64_t)i);
        sum = 0;
        for (int i = 0; i < COUNT; i++) sum += (double)grad[i] * (double)grad[i];
        s.squares = 0;
        o->square_sum(o, &s, grad, 400);
        o->square_sum(o, &s, grad + 400, COUNT - 400);
        o->clip(o, &s, 2.5);
        CHECK(fabs(s.grad_norm - sqrt(sum)) < 1e-9 * sqrt(sum), "norm %.12g, not %.12g",
              s.grad_norm, sqrt(sum));
        o->adamw(o, &a, true, &s, value, grad, m, v, COUNT);
        for (int i = 0; i < COUNT; i++) {
            double g = (double)grad[i] * 2.5 / sqrt(sum);
            dm[i] = 0.9 * dm[i] + 0.1 * g;
            dv[i] = 0.95 * dv[i] + 0.05 * g * g;
            double change =
                dm[i] / (1 - pow(0.9, step)) / (sqrt(dv[i] / (1 - pow(0.95, step))) + 1e-8);
            w[i] -= 0.01 * (change + 0.1 * w[i]);
        }
    }
    for (int i = 0; i < COUNT; i++) worst = check_larger(worst, fabs((double)value[i] - w[i]));
    CHECK(worst < 2e-6, "parameters off by %g after 5 steps", worst);
    real still = 7, zero = 0, first = 0, second = 0;
    o->adamw(o, &a, false, &s, &still, &zero, &first, &second, 1);
    CHECK(still == 7, "what does not decay went from 7 to %g", (double)still);
    o->clip(o, &s, 1000);
    CHECK(s.clip == 1, "a norm below the limit is clipped by %g", s.clip);
    o->clip(o, &s, 0);
    CHECK(s.clip == 1, "without a limit gradients are clipped by %g", s.clip);
    s.scaler.scale = 8;
    o->clip(o, &s, 2.5);
    CHECK(fabs(s.grad_norm - sqrt(sum) / 8) < 1e-9 * sqrt(sum), "scaled by 8: norm %.12g",
          s.grad_norm);
    CHECK(fabs(s.clip * s.grad_norm * 8 - 2.5) < 1e-12, "scaled by 8: clipped to %.12g",
          s.clip * s.grad_norm * 8);
    value[0] = 3, grad[5] = (real)INFINITY;
    o->square_sum(o, &s, grad, COUNT);
    o->clip(o, &s, 2.5);
    o->adamw(o, &a, true, &s, value, grad, m, v, COUNT);
    CHECK(s.overflow == 1 && value[0] == 3, "after an overflow the first parameter is %g",
          (double)value[0]);
    CHECK(s.skipped == 1 && s.scaler.scale == 4 && s.scaler.skipped_steps == 1,
          "after an overflow the scale is %g", s.scaler.scale);
    s.scaler.scale = 1; /* then it is no overflow of fp16, and not to be passed over */
    o->clip(o, &s, 2.5);
    CHECK(s.overflow == 1 && s.skipped == 0, "without a scale an infinite gradient is skipped");
}

/* The scale doubles after SCALER_GOOD_STEPS good steps, up to a limit, and in fp16 alone. */
static void test_scaler(void) {
    check_case("loss scale");
    for (int half = 0; half < 2; half++) {
        ops o = open_ops(1);
        if (half) ops_cpu_narrow(&o, NSA_F16);
        step_state s = {.squares = 1, .scaler = {4, 0, 0}};
        for (int i = 1; i < SCALER_GOOD_STEPS; i++) o.clip(&o, &s, 1);
        CHECK(s.scaler.scale == 4, "%g after %d steps", s.scaler.scale, SCALER_GOOD_STEPS - 1);
        o.clip(&o, &s, 1);
        CHECK(s.scaler.scale == (half ? 8 : 4) && s.scaler.good_steps == 0, "then %g",
              s.scaler.scale);
        s.scaler.scale = SCALER_MOST;
        for (int i = 0; i < SCALER_GOOD_STEPS; i++) o.clip(&o, &s, 1);
        CHECK(s.scaler.scale == SCALER_MOST, "past its limit: %g", s.scaler.scale);
        ops_cpu_close(&o);
    }
}

/* 16-bit types are widened and rounded as nsa.h does it: each of their values, the middle between
   it and the next, and a bit to both sides of that. -0 is added to what is widened. */
static void test_halves(nsa_dtype dtype) {
    enum { ALL = 1 << 16 };
    static uint16_t halves[ALL], zero[ALL], rounded[3 * ALL];
    static float middles[3 * ALL];
    int wide = 0, narrow = 0;
    bool f16 = dtype == NSA_F16;
    ops o = open_ops(1);
    check_case(f16 ? "f16" : "bf16");
    ops_cpu_narrow(&o, dtype);
    for (int i = 0; i < ALL; i++) {
        uint16_t next = (uint16_t)(i + 1);
        double low = (double)(f16 ? nsa_f16_to_f32((uint16_t)i) : nsa_bf16_to_f32((uint16_t)i));
        double high = (double)(f16 ? nsa_f16_to_f32(next) : nsa_bf16_to_f32(next));
        float middle = isinf(high) && f16 ? 65520.0f : (float)((low + high) / 2);
        halves[i] = (uint16_t)i;
        zero[i] = 0x8000;
        middles[3 * i] = nextafterf(middle, -INFINITY);
        middles[3 * i + 1] = middle;
        middles[3 * i + 2] = nextafterf(middle, INFINITY);
    }
    o.bias_forward(&o, halves, zero, 1, ALL);
    o.convert(&o, rounded, middles, 3 * ALL);
    for (int i = 0; i < ALL; i++) {
        float x = f16 ? nsa_f16_to_f32((uint16_t)i) : nsa_bf16_to_f32((uint16_t)i);
        wide += halves[i] != (f16 ? nsa_f32_to_f16(x) : nsa_f32_to_bf16(x));
    }
    for (int i = 0; i < 3 * ALL; i++)
        narrow += rounded[i] != (f16 ? nsa_f32_to_f16(middles[i]) : nsa_f32_to_bf16(middles[i]));
    CHECK(!wide && !narrow, "%d of %d widened, %d of %d rounded differ", wide, ALL, narrow,
          3 * ALL);
    ops_cpu_close(&o);
}

typedef struct linear {
    uint16_t *x, *w, *residual, *dy, *y, *dx; /* (rows, in), (out, in), (rows, out) ... */
    real *dw;
    int rows, in, out;
} linear;

static uint16_t *draw_halves(const ops *o, int64_t count, uint64_t seed) {
    real *x = draw(count, seed);
    uint16_t *to = check_alloc((size_t)count * sizeof *to);
    o->convert(o, to, x, count);
    free(x);
    return to;
}

static void linear_free(linear *l) {
    uint16_t *all[] = {l->x, l->w, l->residual, l->dy, l->y, l->dx};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(l->dw);
}

static linear linear_of(const ops *o, int rows, int in, int out) {
    int64_t x = (int64_t)rows * in, y = (int64_t)rows * out, w = (int64_t)in * out;
    return (linear){draw_halves(o, x, 1),
                    draw_halves(o, w, 2),
                    draw_halves(o, y, 3),
                    draw_halves(o, y, 4),
                    draw_halves(o, y, 5),
                    draw_halves(o, x, 6),
                    draw(w, 7),
                    rows,
                    in,
                    out};
}

static void linear_run(const ops *o, linear *l) {
    o->linear_forward(o, l->y, l->x, l->w, l->residual, l->rows, l->in, l->out);
    o->linear_backward_input(o, l->dx, l->dy, l->w, l->rows, l->in, l->out);
    o->linear_backward_weight(o, l->dw, l->dy, l->x, l->rows, l->in, l->out);
}

/* c (m, n) = c + a b, where a[i][p] lies at i a_row + p a_col, and b likewise. */
static double *f64_product(const uint16_t *a, int a_row, int a_col, const uint16_t *b, int b_row,
                           int b_col, double *c, int m, int n, int k) {
    for (int i = 0; i < m; i++)
        for (int p = 0; p < k; p++) {
            double x = (double)nsa_bf16_to_f32(a[i * a_row + p * a_col]);
            for (int j = 0; j < n; j++)
                c[i * n + j] += x * (double)nsa_bf16_to_f32(b[p * b_row + j * b_col]);
        }
    return c;
}

static double *f64_of(const uint16_t *halves, const real *reals, size_t count) {
    double *x = check_alloc(count * sizeof *x);
    for (size_t i = 0; i < count; i++)
        x[i] = halves ? (double)nsa_bf16_to_f32(halves[i]) : reals ? (double)reals[i] : 0;
    return x;
}

/* Rounding once to 8 bits moves a sum by 2^-8 of itself at most, and by 0.42 of that on average; if
   it were rounded twice, by 0.6. */
static void check_sum(const char *what, double *want, const uint16_t *halves, const real *reals,
                      int rows, int columns) {
    size_t count = (size_t)rows * (size_t)columns;
    double *got = f64_of(halves, reals, count);
    CHECK_NEAR(what, got, want, count, (size_t)columns,
               (reals ? 2e-6 : 0.55 * 0x1p-8) * check_norm(want, count));
    free(got);
    free(want);
}

/* Linear maps of bf16 have sums in f32 that are rounded once, with the weights as they are now. */
static void test_linear(int rows, int in, int out) {
    ops one = open_ops(1), three = open_ops(3);
    ops_cpu_narrow(&one, NSA_BF16);
    ops_cpu_narrow(&three, NSA_BF16);
    linear l = linear_of(&one, rows, in, out), t = linear_of(&three, rows, in, out);
    size_t y = (size_t)rows * (size_t)out, x = (size_t)rows * (size_t)in;
    for (uint64_t step = 0; step < 2; step++) {
        check_case("bf16, %d rows, %d in, %d out, weights %d", rows, in, out, (int)step);
        size_t w = (size_t)in * (size_t)out;
        real *weights = draw((int64_t)w, 8 + step);
        double *dw = f64_of(NULL, l.dw, w);
        one.convert(&one, l.w, weights, (int64_t)w);
        three.convert(&three, t.w, weights, (int64_t)w);
        linear_run(&one, &l);
        linear_run(&three, &t);
        check_sum("y",
                  f64_product(l.x, in, 1, l.w, 1, in, f64_of(l.residual, NULL, y), rows, out, in),
                  l.y, NULL, rows, out);
        check_sum("dx", f64_product(l.dy, out, 1, l.w, in, 1, f64_of(NULL, NULL, x), rows, in, out),
                  l.dx, NULL, rows, in);
        check_sum("dw", f64_product(l.dy, 1, out, l.x, in, 1, dw, out, in, rows), NULL, l.dw, out,
                  in);
        CHECK_BITS("y, 3 threads", t.y, l.y, y * sizeof *l.y, sizeof *l.y);
        CHECK_BITS("dx, 3 threads", t.dx, l.dx, x * sizeof *l.dx, sizeof *l.dx);
        CHECK_BITS("dw, 3 threads", t.dw, l.dw, w * sizeof *l.dw, sizeof *l.dw);
        free(weights);
    }
    CHECK(!one.failed(&one, &why) && !three.failed(&three, &why), "%s", why.text);
    linear_free(&l);
    linear_free(&t);
    ops_cpu_close(&one);
    ops_cpu_close(&three);
}

/* How often each token is drawn; the logits are ln of the weights. */
static void draw_tokens(const double *weights, int vocab, const config_sample *c, int draws,
                        int *counts) {
    real logits[16];
    int32_t order[16];
    memset(counts, 0, (size_t)vocab * sizeof *counts);
    for (int i = 0; i < draws; i++) {
        for (int j = 0; j < vocab; j++) logits[j] = (real)log(weights[j]);
        counts[sample_token(logits, vocab, c, 9, (uint64_t)i, order)]++;
    }
}

static void test_sampling(void) {
    enum { V = 5, DRAWS = 20000 };
    static const double weights[V] = {0.1, 0.4, 0.05, 0.25, 0.2};
    int counts[V];
    config_sample c = {.temperature = 1, .top_p = 1};
    check_case("sampling");
    draw_tokens(weights, V, &c, DRAWS, counts);
    for (int i = 0; i < V; i++) /* five deviations */
        CHECK(fabs(counts[i] - DRAWS * weights[i]) < 5 * sqrt(DRAWS * weights[i]),
              "token %d drawn %d times of %d", i, counts[i], DRAWS);
    c.top_k = 2;
    draw_tokens(weights, V, &c, DRAWS, counts);
    CHECK(counts[1] + counts[3] == DRAWS && counts[3] > 0, "top_k 2: %d and %d of %d", counts[1],
          counts[3], DRAWS);
    c.top_k = 0, c.top_p = 0.8; /* 0.4 + 0.25 + 0.2 is the first sum that reaches it */
    draw_tokens(weights, V, &c, DRAWS, counts);
    CHECK(counts[0] + counts[2] == 0 && counts[4] > 0, "top_p 0.8: %d %d, and %d", counts[0],
          counts[2], counts[4]);
    c.top_p = 1e-9;
    draw_tokens(weights, V, &c, 100, counts);
    CHECK(counts[1] == 100, "a small top_p draws the likeliest, %d of 100", counts[1]);
    c.top_p = 1, c.temperature = 0;
    draw_tokens(weights, V, &c, 100, counts);
    CHECK(counts[1] == 100, "temperature 0 draws the likeliest, %d of 100", counts[1]);
    c.temperature = 0.25; /* weights to the fourth power: 0.4^4 of 0.0314 */
    draw_tokens(weights, V, &c, DRAWS, counts);
    CHECK(fabs(counts[1] / (double)DRAWS - 0.0256 / 0.03121875) < 0.02,
          "temperature 0.25: %d of %d", counts[1], DRAWS);
}

/* What transformers 5.24 makes of these logits by its RepetitionPenaltyLogitsProcessor,
   TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper in its order,
   behind tokens 5 1 1 6 5 2: the probabilities of what may be drawn. */
static void test_as_transformers(void) {
    enum { V = 8, DRAWS = 20000 };
    static const double logits[V] = {2, -1, 0.5, 1.2, -3, 1.9, 0, -0.3};
    static const struct {
        config_sample c;
        double p[V];
    } cases[] = {
        {{.temperature = 1, .top_p = 1, .repetition_penalty = 1.5},
         {0.418228, 0.012629, 0.078993, 0.187922, 0.002818, 0.200877, 0.056601, 0.041931}},
        {{.temperature = 1, .top_p = 1, .repetition_penalty = 0.7},
         {0.245215, 0.01648, 0.067791, 0.110182, 0.001652, 0.500908, 0.033186, 0.024585}},
        {{.temperature = 1, .top_p = 1, .min_p = 0.3, .repetition_penalty = 1},
         {0.424779, 0, 0, 0.190865, 0, 0.384356, 0, 0}},
        {{.temperature = 0.5, .top_p = 1, .min_p = 0.1, .repetition_penalty = 1},
         {0.494896, 0, 0, 0.099918, 0, 0.405186, 0, 0}},
        {{.temperature = 1, .top_k = 4, .top_p = 0.7, .repetition_penalty = 1},
         {0.524979, 0, 0, 0, 0, 0.475021, 0, 0}},
        {{.temperature = 1.2, .top_k = 6, .top_p = 0.9, .min_p = 0.2, .repetition_penalty = 1.3},
         {0.414576, 0, 0.107889, 0.21285, 0, 0.264684, 0, 0}},
    };
    int32_t order[V], said[] = {5, 1, 1, 6, 5, 2};
    token_list text = {.ids = said, .count = 6};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        config_sample c = cases[i].c;
        int counts[V] = {0};
        c.repetition_window = -1;
        check_case("as transformers, %zu", i);
        for (uint64_t draw = 0; draw < DRAWS; draw++) {
            real x[V];
            for (int j = 0; j < V; j++) x[j] = (real)logits[j];
            sample_discourage(x, V, &c, &text, order);
            counts[sample_token(x, V, &c, 3, draw, order)]++;
        }
        for (int j = 0; j < V; j++) { /* five deviations */
            double p = cases[i].p[j];
            CHECK(fabs(counts[j] - DRAWS * p) <= 5 * sqrt(DRAWS * p * (1 - p)),
                  "token %d drawn %d times of %d, by %g", j, counts[j], DRAWS, p);
        }
    }
}

/* Of equal logits the first; what was said in the window is held back once, whatever its sign. */
static void test_choices(void) {
    real logits[] = {2, -2, 3, 3, 1};
    int32_t order[5], said[] = {2, 4, 1, 0, 0};
    config_sample c = {
        .temperature = 0, .top_p = 1, .repetition_penalty = 2, .repetition_window = 3};
    token_list text = {.ids = said, .count = 5};
    check_case("choices");
    CHECK(sample_token(logits, 5, &c, 1, 0, order) == 2, "the first of two likeliest");
    sample_discourage(logits, 5, &c, &text, order);
    CHECK(logits[0] == 1 && logits[1] == -4, "0 and 1 were said: %g %g", (double)logits[0],
          (double)logits[1]);
    CHECK(logits[2] == 3 && logits[3] == 3 && logits[4] == 1, "2 and 4 lie before the window");
}

/* Who asks for bf16 and gets f32 is told what is missing, and what to install where that helps. */
static void test_reasons(void) {
    static const struct {
        bool built, units;
        const char *says;
    } cases[] = {{false, false, "no units"},
                 {true, false, "no units"},
                 {false, true, "libdnnl-dev"},
                 {true, true, "ONEDNN_MAX_CPU_ISA"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *said = gemm_bf16_reason(cases[i].built, cases[i].units);
        CHECK(strstr(said, cases[i].says), "\"%s\" in \"%s\"", cases[i].says, said);
    }
    fault f;
    ops o;
    CHECK(ops_cpu_open(&o, 1, &f), "%s", f.text);
    bool units = nsa_isa_available(NSA_ISA_AVX512_BF16);
    CHECK(!o.missing == (gemm_bf16_built() || !units), "only what would help is missing");
    ops_cpu_narrow(&o, NSA_F16);
    CHECK(strstr(o.speed, "multiplies f16"), "%s", o.speed);
    fallback_restore(FALLBACK_HALF_PRODUCT, 0);
    uint16_t x[4] = {0}, y[4];
    real dw[4] = {0};
    o.linear_forward(&o, y, x, x, NULL, 2, 2, 2);
    o.linear_backward_input(&o, y, x, x, 2, 2, 2);
    o.linear_backward_weight(&o, dw, x, x, 2, 2, 2);
    CHECK(fallback_count(FALLBACK_HALF_PRODUCT) == 3, "each product as f32 counts");
    ops_cpu_close(&o);
}

int main(int argc, char **argv) {
    (void)argc;
    threads_wait_asleep(argv);
    ops o = open_ops(2);
    test_gemm();
    test_silu(&o);
    test_swiglu(&o);
    test_rmsnorm(&o, 1e-6);
    test_rmsnorm(&o, 1e-5);
    test_cross_entropy(&o);
    test_optimizer(&o);
    test_scaler();
    test_halves(NSA_BF16);
    test_halves(NSA_F16);
    test_linear(1, 16, 40);
    test_linear(130, 18, 530);
    test_reasons();
    test_sampling();
    test_as_transformers();
    test_choices();
    ops_cpu_close(&o);
    return check_done("test_ops");
}

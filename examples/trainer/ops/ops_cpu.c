/* ops_cpu.c - the operations on the CPU: loops with OpenMP, products through gemm.h, attention
   through nsa.h. Twin: ops.h. Compiled once with real float and, for the tests, once with double.

   Every loop runs over rows or over columns, and a sum is always taken by one thread in a fixed
   order, so bits do not depend on the number of threads. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/threads.h"
#include "ops/gemm.h"
#include "ops/ops_half.h"

enum { COLUMNS = 16 }; /* of a column sum, that a thread takes at a time: a cache line of f32 */

/* ---- Arithmetic ---------------------------------------------------------------------------- */

/* exp in f32 for loops that must vectorise: 2^k times a polynomial on [-ln2/2, ln2/2], error below
   2 ulp; arguments are clamped to where the result is a normal number. */
static inline float exp_f32(float x) {
    const float shift = 12582912.f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = x < -87.f ? -87.f : x;
    x = x > 88.f ? 88.f : x;
    float k = (x * 1.44269504f + shift) - shift;
    float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.98756915e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345191e-3f;
    p = p * r + 4.16657963e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 5.00000012e-1f;
    p = p * r * r + r + 1.f;
    uint32_t bits = (uint32_t)((int32_t)k + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline real exp_real(real x) {
    return sizeof(real) == sizeof(double) ? (real)exp((double)x) : (real)exp_f32((float)x);
}

/* ---- Memory -------------------------------------------------------------------------------- */

static void *cpu_allocate(const ops *o, size_t bytes) {
    (void)o;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes ? bytes : 64)) return NULL;
    return memset(memory, 0, bytes);
}

static void cpu_release(const ops *o, void *memory) {
    (void)o;
    free(memory);
}

static void cpu_copy(const ops *o, void *to, const void *from, size_t bytes) {
    (void)o;
    memcpy(to, from, bytes);
}

static void cpu_zero(const ops *o, void *x, size_t bytes) {
    (void)o;
    memset(x, 0, bytes);
}

static void cpu_mark(const ops *o, phase p, int layer) {
    (void)o;
    phase_set(p, layer);
}

/* ---- Embedding ----------------------------------------------------------------------------- */

static void cpu_embed_forward(const ops *o, void *x, const void *table, const int32_t *tokens,
                              int64_t rows, int dim) {
    real *to = x;
    const real *from = table;
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        memcpy(to + r * dim, from + (int64_t)tokens[r] * dim, (size_t)dim * sizeof *to);
}

/* One token may stand in many rows, so threads divide the columns. */
static void cpu_embed_backward(const ops *o, real *dtable, const void *dx, const int32_t *tokens,
                               int64_t rows, int dim) {
    const real *from = dx;
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int first = 0; first < dim; first += COLUMNS) {
        int last = first + COLUMNS < dim ? first + COLUMNS : dim;
        for (int64_t r = 0; r < rows; r++) {
            real *to = dtable + (int64_t)tokens[r] * dim;
            for (int c = first; c < last; c++) to[c] += from[r * dim + c];
        }
    }
}

/* ---- RMSNorm ------------------------------------------------------------------------------- */

static void cpu_rmsnorm_forward(const ops *o, void *y, real *rstd, const void *x, const void *w,
                                int64_t rows, int dim, double eps) {
    const real *weight = w;
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const real *in = (const real *)x + r * dim;
        real *out = (real *)y + r * dim, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < dim; c++) sum += in[c] * in[c];
        real scale = (real)(1 / sqrt((double)sum / dim + eps));
        for (int c = 0; c < dim; c++) out[c] = in[c] * scale * weight[c];
        rstd[r] = scale;
    }
}

/* y = x s w with s = (mean(x^2) + eps)^(-1/2):  dx = s (w dy) - s^3 x mean(x w dy),  dw = sum of
   x s dy over the rows. */
static void cpu_rmsnorm_backward(const ops *o, void *dx, real *dw, const void *dy, const void *x,
                                 const void *w, const real *rstd, int64_t rows, int dim) {
    const real *in = x, *grad = dy, *weight = w;
    real *to = dx;
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const real *xr = in + r * dim, *gr = grad + r * dim;
        real *dr = to + r * dim, dot = 0, s = rstd[r];
#pragma omp simd reduction(+ : dot)
        for (int c = 0; c < dim; c++) dot += xr[c] * weight[c] * gr[c];
        real back = s * s * s * dot / (real)dim;
        for (int c = 0; c < dim; c++) dr[c] += s * weight[c] * gr[c] - back * xr[c];
    }
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int first = 0; first < dim; first += COLUMNS) {
        int last = first + COLUMNS < dim ? first + COLUMNS : dim;
        for (int64_t r = 0; r < rows; r++)
            for (int c = first; c < last; c++)
                dw[c] += in[r * dim + c] * rstd[r] * grad[r * dim + c];
    }
}

/* ---- Linear maps --------------------------------------------------------------------------- */

static void cpu_linear_forward(const ops *o, void *y, const void *x, const void *w,
                               const void *residual, int64_t rows, int in, int out) {
    if (residual) cpu_copy(o, y, residual, (size_t)(rows * out) * sizeof(real));
    gemm(GEMM_NT, (int)rows, out, in, x, w, y, residual != NULL, o->threads);
}

static void cpu_linear_backward_input(const ops *o, void *dx, const void *dy, const void *w,
                                      int64_t rows, int in, int out) {
    gemm(GEMM_NN, (int)rows, in, out, dy, w, dx, 0, o->threads);
}

static void cpu_linear_backward_weight(const ops *o, real *dw, const void *dy, const void *x,
                                       int64_t rows, int in, int out) {
    gemm(GEMM_TN, out, in, (int)rows, dy, x, dw, 1, o->threads);
}

static void cpu_bias_forward(const ops *o, void *y, const void *b, int64_t rows, int dim) {
    const real *bias = b;
    real *to = y;
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int c = 0; c < dim; c++) to[r * dim + c] += bias[c];
}

static void cpu_bias_backward(const ops *o, real *db, const void *dy, int64_t rows, int dim) {
    const real *grad = dy;
    (void)o;
    for (int64_t r = 0; r < rows; r++)
        for (int c = 0; c < dim; c++) db[c] += grad[r * dim + c];
}

/* ---- SiLU ---------------------------------------------------------------------------------- */

WIDE static void silu_block(real *y, const real *x, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) y[i] = x[i] / (1 + exp_real(-x[i]));
}

/* silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x) */
WIDE static void silu_backward_block(real *dx, real *y, const real *x, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        real s = 1 / (1 + exp_real(-x[i]));
        y[i] = x[i] * s;
        dx[i] *= s * (1 + x[i] * (1 - s));
    }
}

static void cpu_silu_forward(const ops *o, void *y, const void *x, int64_t count) {
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t i = 0; i < count; i += BLOCK)
        silu_block((real *)y + i, (const real *)x + i, block_length(count, i));
}

static void cpu_silu_backward(const ops *o, void *dx, void *y, const void *x, int64_t count) {
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t i = 0; i < count; i += BLOCK)
        silu_backward_block((real *)dx + i, (real *)y + i, (const real *)x + i,
                            block_length(count, i));
}

static void cpu_swiglu_forward(const ops *o, void *y, const void *x, int64_t rows, int width) {
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const real *a = (const real *)x + r * 2 * width, *b = a + width;
        real *to = (real *)y + r * width;
        silu_block(to, a, width);
        for (int c = 0; c < width; c++) to[c] *= b[c];
    }
}

/* da = dy b silu'(a), db = dy silu(a), y = silu(a) b */
static void cpu_swiglu_backward(const ops *o, void *dx, void *y, const void *x, const void *dy,
                                int64_t rows, int width) {
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const real *a = (const real *)x + r * 2 * width, *b = a + width;
        const real *grad = (const real *)dy + r * width;
        real *da = (real *)dx + r * 2 * width, *db = da + width, *to = (real *)y + r * width;
        for (int c = 0; c < width; c++) da[c] = grad[c] * b[c];
        silu_backward_block(da, to, a, width);
        for (int c = 0; c < width; c++) {
            db[c] = grad[c] * to[c];
            to[c] *= b[c];
        }
    }
}

/* ---- The gate's input ---------------------------------------------------------------------- */

static void cpu_group_mean_forward(const ops *o, void *mean, const void *q, int64_t stride,
                                   int64_t rows, int groups, int per_group, int dim) {
    real share = 1 / (real)per_group;
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) {
            const real *from = (const real *)q + r * stride + (int64_t)g * per_group * dim;
            real *to = (real *)mean + (r * groups + g) * dim;
            for (int c = 0; c < dim; c++) to[c] = from[c] * share;
            for (int h = 1; h < per_group; h++)
                for (int c = 0; c < dim; c++) to[c] += from[h * dim + c] * share;
        }
}

static void cpu_group_mean_backward(const ops *o, void *dq, int64_t stride, const void *dmean,
                                    int64_t rows, int groups, int per_group, int dim) {
    real share = 1 / (real)per_group;
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) {
            const real *from = (const real *)dmean + (r * groups + g) * dim;
            real *to = (real *)dq + r * stride + (int64_t)g * per_group * dim;
            for (int h = 0; h < per_group; h++)
                for (int c = 0; c < dim; c++) to[h * dim + c] += from[c] * share;
        }
}

/* ---- Loss ---------------------------------------------------------------------------------- */

/* Leaves exp(x - max) in x and returns their sum; *top is the maximum. */
WIDE static real exponentials(real *x, int count, real *top) {
    real max = x[0], sum = 0;
#pragma omp simd reduction(max : max)
    for (int i = 1; i < count; i++) max = x[i] > max ? x[i] : max;
    for (int i = 0; i < count; i++) x[i] = exp_real(x[i] - max);
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < count; i++) sum += x[i];
    *top = max;
    return sum;
}

static double row_loss(real *x, int32_t label, int vocab, double scale) {
    real top, at_label = label >= 0 ? x[label] : 0;
    if (label < 0) {
        if (scale != 0) memset(x, 0, (size_t)vocab * sizeof *x);
        return 0;
    }
    real sum = exponentials(x, vocab, &top);
    if (scale != 0) {
        real share = (real)scale / sum;
        for (int i = 0; i < vocab; i++) x[i] *= share;
        x[label] -= (real)scale;
    }
    return log((double)sum) + (double)top - (double)at_label;
}

/* Losses are collected for a block of rows and summed in their order. */
static void cpu_cross_entropy(const ops *o, step_state *s, void *logits, const int32_t *labels,
                              int64_t rows, int vocab, double scale) {
    enum { ROWS = 512 };
    double losses[ROWS];
    scale *= s->scaler.scale;
    for (int64_t first = 0; first < rows; first += ROWS) {
        int count = rows - first < ROWS ? (int)(rows - first) : ROWS;
        real *x = (real *)logits + first * vocab;
#pragma omp parallel for num_threads(o->threads) schedule(static)
        for (int r = 0; r < count; r++)
            losses[r] = row_loss(x + (int64_t)r * vocab, labels[first + r], vocab, scale);
        for (int r = 0; r < count; r++) {
            s->loss += losses[r];
            s->labels += labels[first + r] >= 0;
        }
    }
}

/* ---- Optimizer ----------------------------------------------------------------------------- */

/* Partial sums of fixed blocks, added in their order. */
static double squares_of(const ops *o, const real *grad, int64_t count) {
    enum { PARTS = 256 };
    double part[PARTS], sum = 0;
    int64_t block = count / PARTS + 1;
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int i = 0; i < PARTS; i++) {
        int64_t last = (i + 1) * block < count ? (i + 1) * block : count;
        part[i] = 0;
        for (int64_t j = i * block; j < last; j++) part[i] += (double)grad[j] * (double)grad[j];
    }
    for (int i = 0; i < PARTS; i++) sum += part[i];
    return sum;
}

static void cpu_square_sum(const ops *o, step_state *s, const real *grad, int64_t count) {
    s->squares += squares_of(o, grad, count);
}

static void cpu_clip(const ops *o, step_state *s, double max_norm) {
    loss_scaler *x = &s->scaler;
    s->grad_norm = sqrt(s->squares) / x->scale;
    s->clip = (max_norm > 0 && s->grad_norm > max_norm ? max_norm / s->grad_norm : 1) / x->scale;
    s->overflow = !isfinite(s->squares);
    s->skipped = s->overflow && x->scale > 1 && isfinite(s->loss);
    if (s->skipped) {
        x->scale /= 2;
        x->good_steps = 0;
        x->skipped_steps++;
    } else if (o->dtype == NSA_F16 && ++x->good_steps == SCALER_GOOD_STEPS) {
        x->good_steps = 0;
        if (x->scale < SCALER_MOST) x->scale *= 2;
    }
}

static void cpu_adamw(const ops *o, const adamw_rates *a, bool decay, const step_state *s,
                      real *value, const real *grad, real *m, real *v, int64_t count) {
    real beta1 = a->beta1, beta2 = a->beta2, clip = (real)s->clip, eps = a->eps;
    real rate = a->rate, bias = a->bias, keep = decay ? a->keep : 1;
    if (s->overflow) return;
#pragma omp parallel for simd num_threads(o->threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        real g = grad[i] * clip;
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        real root =
            sizeof(real) == sizeof(double) ? (real)sqrt((double)v[i]) : (real)sqrtf((float)v[i]);
        value[i] = value[i] * keep - rate * m[i] / (root * bias + eps);
    }
}

static void cpu_muon_direction(const ops *o, const adamw_rates *a, const step_state *s, real *grad,
                               real *m, int64_t count) {
    real momentum = a->momentum, clip = (real)s->clip;
    if (s->overflow) return;
#pragma omp parallel for simd num_threads(o->threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        real g = grad[i] * clip;
        m[i] = momentum * m[i] + g;
        grad[i] = g + momentum * m[i];
    }
}

static void cpu_muon_update(const ops *o, const adamw_rates *a, const step_state *s, real *value,
                            const real *x, double scale, int64_t count) {
    real rate = (real)((double)a->lr * scale), keep = a->keep;
    if (s->overflow) return;
#pragma omp parallel for simd num_threads(o->threads) schedule(static)
    for (int64_t i = 0; i < count; i++) value[i] = value[i] * keep - rate * x[i];
}

static void cpu_product(const ops *o, product_form form, real *c, const real *a, const real *b,
                        int m, int n, int k) {
    gemm((gemm_form)form, m, n, k, a, b, c, 0, o->threads);
}

static void cpu_unit(const ops *o, real *x, const real *from, int64_t count) {
    real scale = (real)(1 / (sqrt(squares_of(o, from, count)) + 1e-7));
#pragma omp parallel for simd num_threads(o->threads) schedule(static)
    for (int64_t i = 0; i < count; i++) x[i] = from[i] * scale;
}

static void cpu_mix(const ops *o, real *y, const real *x, double a, double b, int64_t count) {
    real of_x = (real)a, of_y = (real)b;
#pragma omp parallel for simd num_threads(o->threads) schedule(static)
    for (int64_t i = 0; i < count; i++) y[i] = of_x * x[i] + of_y * y[i];
}

/* ---- Statistics ---------------------------------------------------------------------------- */

static float gate_at(const void *gates, nsa_dtype dtype, int64_t i) {
    const uint16_t *half = gates;
    return dtype == NSA_BF16  ? nsa_bf16_to_f32(half[i])
           : dtype == NSA_F16 ? nsa_f16_to_f32(half[i])
                              : (float)((const real *)gates)[i];
}

static void cpu_count_choices(const ops *o, step_state *s, const layer_choices *x) {
    enum { ROWS = 256, GATES = 3 };
    float some[ROWS * GATES];
    stats_sum seen = {0};
    int64_t width = (int64_t)x->gate_heads * GATES, rows = x->rows * x->gate_heads;
    for (int64_t first = 0; first < rows; first += ROWS) {
        int64_t count = rows - first < ROWS ? rows - first : ROWS;
        for (int64_t i = 0; i < count * GATES; i++) {
            int64_t at = first * GATES + i;
            some[i] = gate_at(x->gates, o->dtype, at / width * x->gate_stride + at % width);
        }
        stats_add_gates(&seen, some, count, x->kind);
    }
    int64_t list = (int64_t)x->groups * x->width;
    for (int64_t r = 0; x->places && r < x->rows; r++)
        stats_add_blocks(&seen, x->blocks + r * list, x->places[r], 1, x->groups, x->width,
                         x->slc_block);
    for (int64_t i = 0; !x->places && i < x->sequences; i++) {
        int64_t begin = x->begins ? x->begins[i] : i * x->tokens_each;
        int64_t end = x->begins ? x->begins[i + 1] : begin + x->tokens_each;
        stats_add_blocks(&seen, x->blocks + begin * list, 0, end - begin, x->groups, x->width,
                         x->slc_block);
    }
    stats_add_layer(&s->seen, &seen, x->layer);
    if (x->layer < STATS_LAYERS) stats_of_layer(&seen, &s->layers[x->layer]);
}

/* ---- nsa.h --------------------------------------------------------------------------------- */

static void note(const ops *o, const char *call, nsa_status status) {
    cpu_state *state = o->state;
    if (status == NSA_OK || state->failed) return;
    state->failed = true;
    fault_set(&state->fault, "%s: %s (%s)", call, nsa_status_text(status),
              nsa_status_where(status));
}

static bool cpu_failed(const ops *o, fault *f) {
    const cpu_state *state = o->state;
    if (state->failed) *f = state->fault;
    return state->failed;
}

static void cpu_rope_forward(const ops *o, const nsa_rope *x, const nsa_desc *d) {
    note(o, "nsa_rope_forward", nsa_rope_forward(x, d));
}

static void cpu_rope_backward(const ops *o, const nsa_rope *dx, const nsa_rope *x,
                              const nsa_desc *d) {
    note(o, "nsa_rope_backward", nsa_rope_backward(dx, x, d));
}

static size_t cpu_attention_forward_bytes(const ops *o, const nsa_attention *x, const nsa_desc *d) {
    (void)o;
    return nsa_attention_forward_workspace_size(x, d);
}

static void cpu_attention_forward(const ops *o, const nsa_attention *x, const nsa_desc *d,
                                  void *workspace, size_t bytes) {
    note(o, "nsa_attention_forward", nsa_attention_forward(x, d, workspace, bytes));
}

static void cpu_attention_restore(const ops *o, const nsa_attention *x, const nsa_desc *d,
                                  void *workspace, size_t bytes) {
    const nsa_gate gate = {x->gates, x->out_cmp, x->out_slc, x->out_win, x->out};
    note(o, "nsa_compress_forward", nsa_compress_forward(&x->k_cmp, d, workspace, bytes));
    note(o, "nsa_compress_forward", nsa_compress_forward(&x->v_cmp, d, workspace, bytes));
    note(o, "nsa_gate_forward", nsa_gate_forward(&gate, d));
}

static size_t cpu_attention_backward_bytes(const ops *o, const nsa_attention *dx,
                                           const nsa_attention *x, const nsa_desc *d) {
    (void)o;
    return nsa_attention_backward_workspace_size(dx, x, d);
}

static void cpu_attention_backward(const ops *o, const nsa_attention *dx, const nsa_attention *x,
                                   const nsa_desc *d, void *workspace, size_t bytes) {
    note(o, "nsa_attention_backward", nsa_attention_backward(dx, x, d, workspace, bytes));
}

static size_t cpu_dense_forward_bytes(const ops *o, const nsa_desc *d) {
    (void)o;
    return nsa_attend_dense_forward_workspace_size(d);
}

static void cpu_dense_forward(const ops *o, const nsa_attend *x, const nsa_desc *d, void *workspace,
                              size_t bytes) {
    note(o, "nsa_attend_dense_forward", nsa_attend_dense_forward(x, d, workspace, bytes));
}

static size_t cpu_dense_backward_bytes(const ops *o, const nsa_desc *d) {
    (void)o;
    return nsa_attend_dense_backward_workspace_size(d);
}

static void cpu_dense_backward(const ops *o, const nsa_attend *dx, const nsa_attend *x,
                               const nsa_desc *d, void *workspace, size_t bytes) {
    note(o, "nsa_attend_dense_backward", nsa_attend_dense_backward(dx, x, d, workspace, bytes));
}

static size_t cpu_window_forward_bytes(const ops *o, const nsa_desc *d) {
    (void)o;
    return nsa_attend_win_forward_workspace_size(d);
}

static void cpu_window_forward(const ops *o, const nsa_attend *x, const nsa_desc *d,
                               void *workspace, size_t bytes) {
    note(o, "nsa_attend_win_forward", nsa_attend_win_forward(x, d, workspace, bytes));
}

static size_t cpu_window_backward_bytes(const ops *o, const nsa_desc *d) {
    (void)o;
    return nsa_attend_win_backward_workspace_size(d);
}

static void cpu_window_backward(const ops *o, const nsa_attend *dx, const nsa_attend *x,
                                const nsa_desc *d, void *workspace, size_t bytes) {
    note(o, "nsa_attend_win_backward", nsa_attend_win_backward(dx, x, d, workspace, bytes));
}

static void cpu_copy_columns(const ops *o, void *to, int64_t to_stride, const void *from,
                             int64_t from_stride, int64_t rows, int64_t columns) {
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        memcpy((real *)to + r * to_stride, (const real *)from + r * from_stride,
               (size_t)columns * sizeof(real));
}

static size_t cpu_cache_bytes(const ops *o, const nsa_desc *d, int max_rewind) {
    return nsa_cache_size(d, o->dtype, max_rewind);
}

static void cpu_cache_open(const ops *o, nsa_cache *cache, const nsa_desc *d, int max_rewind,
                           void *memory, size_t bytes) {
    note(o, "nsa_cache_init", nsa_cache_init(cache, d, o->dtype, max_rewind, memory, bytes));
}

static size_t cpu_decode_bytes(const ops *o, const nsa_attention *x, const nsa_cache *cache,
                               int count) {
    (void)o;
    return nsa_decode_workspace_size(x, cache, count);
}

static void cpu_decode(const ops *o, const nsa_attention *x, nsa_cache *cache, int count,
                       nsa_reads *reads, void *workspace, size_t bytes) {
    note(o, "nsa_decode", nsa_decode(x, cache, count, NULL, reads, workspace, bytes));
}

/* ---- The table ----------------------------------------------------------------------------- */

bool ops_cpu_open(ops *o, int threads, fault *f) {
    static const ops table = {
        .name = "cpu",
        .host_memory = true,
        .allocate = cpu_allocate,
        .release = cpu_release,
        .upload = cpu_copy,
        .download = cpu_copy,
        .zero = cpu_zero,
        .copy = cpu_copy,
        .mark = cpu_mark,
        .embed_forward = cpu_embed_forward,
        .embed_backward = cpu_embed_backward,
        .rmsnorm_forward = cpu_rmsnorm_forward,
        .rmsnorm_backward = cpu_rmsnorm_backward,
        .linear_forward = cpu_linear_forward,
        .linear_backward_input = cpu_linear_backward_input,
        .linear_backward_weight = cpu_linear_backward_weight,
        .bias_forward = cpu_bias_forward,
        .bias_backward = cpu_bias_backward,
        .silu_forward = cpu_silu_forward,
        .silu_backward = cpu_silu_backward,
        .swiglu_forward = cpu_swiglu_forward,
        .swiglu_backward = cpu_swiglu_backward,
        .group_mean_forward = cpu_group_mean_forward,
        .group_mean_backward = cpu_group_mean_backward,
        .cross_entropy = cpu_cross_entropy,
        .square_sum = cpu_square_sum,
        .clip = cpu_clip,
        .adamw = cpu_adamw,
        .muon_direction = cpu_muon_direction,
        .muon_update = cpu_muon_update,
        .product = cpu_product,
        .unit = cpu_unit,
        .mix = cpu_mix,
        .count_choices = cpu_count_choices,
        .rope_forward = cpu_rope_forward,
        .rope_backward = cpu_rope_backward,
        .attention_forward_bytes = cpu_attention_forward_bytes,
        .attention_forward = cpu_attention_forward,
        .attention_restore = cpu_attention_restore,
        .attention_backward_bytes = cpu_attention_backward_bytes,
        .attention_backward = cpu_attention_backward,
        .dense_forward_bytes = cpu_dense_forward_bytes,
        .dense_forward = cpu_dense_forward,
        .dense_backward_bytes = cpu_dense_backward_bytes,
        .dense_backward = cpu_dense_backward,
        .window_forward_bytes = cpu_window_forward_bytes,
        .window_forward = cpu_window_forward,
        .window_backward_bytes = cpu_window_backward_bytes,
        .window_backward = cpu_window_backward,
        .copy_columns = cpu_copy_columns,
        .cache_bytes = cpu_cache_bytes,
        .cache_open = cpu_cache_open,
        .decode_bytes = cpu_decode_bytes,
        .decode = cpu_decode,
        .failed = cpu_failed,
    };
    *o = table;
    o->dtype = NSA_REAL_DTYPE;
    o->threads = threads > 0 ? threads : threads_granted(0);
    o->state = calloc(1, sizeof(cpu_state));
    if (!o->state) return fault_set(f, "out of memory");
    o->library = gemm_open();
    if (!gemm_bf16_built() && nsa_isa_available(NSA_ISA_AVX512_BF16))
        o->missing = gemm_bf16_reason(false, true);
    return true;
}

void ops_cpu_close(ops *o) {
    cpu_state *s = o->state;
    for (int i = 0; s && i < HALF_OPERANDS; i++) free(s->wide[i].data);
    if (s) gemm_bf16_close(s->bf16);
    free(o->state);
    o->state = NULL;
}

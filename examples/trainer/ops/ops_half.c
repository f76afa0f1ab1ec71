/* ops_half.c - the CPU's operations on bf16 or f16 activations: operands become reals, ops_cpu.c
   computes, results are rounded. Attention, which nsa.h reads in any dtype, is not here, and
   products of bf16 are gemm_bf16.h's where the processor has units for them. Twin: ops.h. */
#include "ops/ops_half.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fallback.h"

enum { IN = 1, OUT = 2 };

typedef struct operand {
    const void *at; /* halves; NULL: there is none */
    int64_t count;
    int use;
} operand;

static const ops *plain(const ops *o) {
    return &((const cpu_state *)o->state)->plain;
}

/* ---- Conversions --------------------------------------------------------------------------- */

/* As nsa.h's conversions, to the bit; without their branches and calls, so that a compiler takes
   several at once: most of a step's time went there. */

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* `yes` or `no`: a condition that a compiler makes a branch of takes one value at a time. */
static inline uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
    uint32_t mask = 0 - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

static inline float wide(uint16_t x) {
    int32_t magnitude = (x & 0x7fff) << 13;
    uint32_t sign = (uint32_t)(x & 0x8000) << 16;
    uint32_t special = choose(magnitude >= 0x0f800000, 0x7f800000, 0); /* infinity, NaN */
    return float_of(bits_of(float_of((uint32_t)magnitude) * 0x1p112f) | special | sign);
}

static inline uint16_t narrow(float x) {
    uint32_t sign = bits_of(x) >> 16 & 0x8000, bits = bits_of(x) & 0x7fffffff;
    int32_t magnitude = (int32_t)bits;
    uint32_t normal = (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
    /* the last bit of 0.5 counts what the last of a subnormal half does: the sum rounds to it */
    uint32_t small = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
    uint32_t half = choose(magnitude < 0x38800000, small, normal);
    half = choose(magnitude >= 0x477ff000, 0x7c00, half); /* rounds to 65536 or beyond */
    half = choose(magnitude > 0x7f800000, 0x7e00, half);
    return (uint16_t)(sign | half);
}

static inline uint16_t narrow_bf16(float x) {
    uint32_t bits = bits_of(x);
    int32_t magnitude = (int32_t)(bits & 0x7fffffff);
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (uint16_t)(choose(magnitude > 0x7f800000, bits | 0x400000, rounded) >> 16);
}

WIDE static void widen_block(real *to, const uint16_t *from, int64_t count, bool bf16) {
    if (bf16)
        for (int64_t i = 0; i < count; i++) to[i] = (real)float_of((uint32_t)from[i] << 16);
    else
        for (int64_t i = 0; i < count; i++) to[i] = (real)wide(from[i]);
}

WIDE static void narrow_block(uint16_t *to, const real *from, int64_t count, bool bf16) {
    if (bf16)
        for (int64_t i = 0; i < count; i++) to[i] = narrow_bf16((float)from[i]);
    else
        for (int64_t i = 0; i < count; i++) to[i] = narrow((float)from[i]);
}

static void widen(const ops *o, real *to, const uint16_t *from, int64_t count) {
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t i = 0; i < count; i += BLOCK)
        widen_block(to + i, from + i, block_length(count, i), o->dtype == NSA_BF16);
}

static void half_convert(const ops *o, void *to, const real *from, int64_t count) {
    uint16_t *half = to;
    gemm_bf16 *products = ((const cpu_state *)o->state)->bf16;
    if (products) gemm_bf16_changed(products, to, (size_t)count * sizeof *half);
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t i = 0; i < count; i += BLOCK)
        narrow_block(half + i, from + i, block_length(count, i), o->dtype == NSA_BF16);
}

/* Room grows to what the largest operation needs and stays. */
static bool make_room(cpu_state *s, int place, int64_t count) {
    if (count <= s->wide[place].room) return true;
    free(s->wide[place].data);
    s->wide[place].data = malloc((size_t)count * sizeof(real));
    s->wide[place].room = s->wide[place].data ? count : 0;
    if (!s->wide[place].data && !s->failed) {
        s->failed = true;
        fault_set(&s->fault, "out of memory for %lld values as f32", (long long)count);
    }
    return s->wide[place].data != NULL;
}

static bool enter(const ops *o, const operand *x, int count, real **r) {
    cpu_state *s = o->state;
    for (int i = 0; i < count; i++) {
        r[i] = NULL;
        if (!x[i].at) continue;
        if (!make_room(s, i, x[i].count)) return false;
        r[i] = s->wide[i].data;
        if (x[i].use & IN) widen(o, r[i], x[i].at, x[i].count);
    }
    return true;
}

static void leave(const ops *o, const operand *x, int count, real *const *r) {
    for (int i = 0; i < count; i++)
        if (r[i] && (x[i].use & OUT)) half_convert(o, (void *)(uintptr_t)x[i].at, r[i], x[i].count);
}

/* ---- Operations, in the order of ops.h ----------------------------------------------------- */

static void half_embed_forward(const ops *o, void *x, const void *table, const int32_t *tokens,
                               int64_t rows, int dim) {
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        memcpy((uint16_t *)x + r * dim, (const uint16_t *)table + (int64_t)tokens[r] * dim,
               (size_t)dim * sizeof(uint16_t));
}

static void half_embed_backward(const ops *o, real *dtable, const void *dx, const int32_t *tokens,
                                int64_t rows, int dim) {
    const operand x[] = {{dx, rows * dim, IN}};
    real *r[1];
    if (enter(o, x, 1, r)) plain(o)->embed_backward(o, dtable, r[0], tokens, rows, dim);
}

static void half_rmsnorm_forward(const ops *o, void *y, real *rstd, const void *x, const void *w,
                                 int64_t rows, int dim, double eps) {
    const operand a[] = {{y, rows * dim, OUT}, {x, rows * dim, IN}, {w, dim, IN}};
    real *r[3];
    if (!enter(o, a, 3, r)) return;
    plain(o)->rmsnorm_forward(o, r[0], rstd, r[1], r[2], rows, dim, eps);
    leave(o, a, 3, r);
}

static void half_rmsnorm_backward(const ops *o, void *dx, real *dw, const void *dy, const void *x,
                                  const void *w, const real *rstd, int64_t rows, int dim) {
    const operand a[] = {
        {dx, rows * dim, IN | OUT}, {dy, rows * dim, IN}, {x, rows * dim, IN}, {w, dim, IN}};
    real *r[4];
    if (!enter(o, a, 4, r)) return;
    plain(o)->rmsnorm_backward(o, r[0], dw, r[1], r[2], r[3], rstd, rows, dim);
    leave(o, a, 4, r);
}

/* Whether the processor's units computed it; if they failed, nothing else would have memory. */
static bool by_units(const ops *o, gemm_form form, int64_t m, int n, int64_t k, const void *a,
                     const void *b, void *c, bool c_is_f32, bool add) {
    cpu_state *s = o->state;
    if (!s->bf16) return fallback_add(FALLBACK_HALF_PRODUCT), false;
    if (!gemm_bf16_multiply(s->bf16, form, (int)m, n, (int)k, a, b, c, c_is_f32, add) &&
        !s->failed) {
        s->failed = true;
        fault_set(&s->fault, "out of memory for a product of bf16");
    }
    return true;
}

static void half_linear_forward(const ops *o, void *y, const void *x, const void *w,
                                const void *residual, int64_t rows, int in, int out) {
    const operand a[] = {{y, rows * out, OUT},
                         {x, rows * in, IN},
                         {w, (int64_t)in * out, IN},
                         {residual, rows * out, IN}};
    real *r[4];
    if (residual && ((cpu_state *)o->state)->bf16)
        memcpy(y, residual, (size_t)(rows * out) * sizeof(uint16_t));
    if (by_units(o, GEMM_NT, rows, out, in, x, w, y, false, residual != NULL)) return;
    if (!enter(o, a, 4, r)) return;
    plain(o)->linear_forward(o, r[0], r[1], r[2], r[3], rows, in, out);
    leave(o, a, 4, r);
}

static void half_linear_backward_input(const ops *o, void *dx, const void *dy, const void *w,
                                       int64_t rows, int in, int out) {
    const operand a[] = {{dx, rows * in, OUT}, {dy, rows * out, IN}, {w, (int64_t)in * out, IN}};
    real *r[3];
    if (by_units(o, GEMM_NN, rows, in, out, dy, w, dx, false, false)) return;
    if (!enter(o, a, 3, r)) return;
    plain(o)->linear_backward_input(o, r[0], r[1], r[2], rows, in, out);
    leave(o, a, 3, r);
}

static void half_linear_backward_weight(const ops *o, real *dw, const void *dy, const void *x,
                                        int64_t rows, int in, int out) {
    const operand a[] = {{dy, rows * out, IN}, {x, rows * in, IN}};
    real *r[2];
    if (by_units(o, GEMM_TN, out, in, rows, dy, x, dw, true, true)) return;
    if (enter(o, a, 2, r)) plain(o)->linear_backward_weight(o, dw, r[0], r[1], rows, in, out);
}

static void half_bias_forward(const ops *o, void *y, const void *b, int64_t rows, int dim) {
    const operand a[] = {{y, rows * dim, IN | OUT}, {b, dim, IN}};
    real *r[2];
    if (!enter(o, a, 2, r)) return;
    plain(o)->bias_forward(o, r[0], r[1], rows, dim);
    leave(o, a, 2, r);
}

static void half_bias_backward(const ops *o, real *db, const void *dy, int64_t rows, int dim) {
    const operand a[] = {{dy, rows * dim, IN}};
    real *r[1];
    if (enter(o, a, 1, r)) plain(o)->bias_backward(o, db, r[0], rows, dim);
}

static void half_silu_forward(const ops *o, void *y, const void *x, int64_t count) {
    const operand a[] = {{y, count, OUT}, {x, count, IN}};
    real *r[2];
    if (!enter(o, a, 2, r)) return;
    plain(o)->silu_forward(o, r[0], r[1], count);
    leave(o, a, 2, r);
}

static void half_silu_backward(const ops *o, void *dx, void *y, const void *x, int64_t count) {
    const operand a[] = {{dx, count, IN | OUT}, {y, count, OUT}, {x, count, IN}};
    real *r[3];
    if (!enter(o, a, 3, r)) return;
    plain(o)->silu_backward(o, r[0], r[1], r[2], count);
    leave(o, a, 3, r);
}

static void half_swiglu_forward(const ops *o, void *y, const void *x, int64_t rows, int width) {
    const operand a[] = {{y, rows * width, OUT}, {x, 2 * rows * width, IN}};
    real *r[2];
    if (!enter(o, a, 2, r)) return;
    plain(o)->swiglu_forward(o, r[0], r[1], rows, width);
    leave(o, a, 2, r);
}

static void half_swiglu_backward(const ops *o, void *dx, void *y, const void *x, const void *dy,
                                 int64_t rows, int width) {
    const operand a[] = {{dx, 2 * rows * width, OUT},
                         {y, rows * width, OUT},
                         {x, 2 * rows * width, IN},
                         {dy, rows * width, IN}};
    real *r[4];
    if (!enter(o, a, 4, r)) return;
    plain(o)->swiglu_backward(o, r[0], r[1], r[2], r[3], rows, width);
    leave(o, a, 4, r);
}

/* Elements from a row's first to the last row's last. */
static int64_t span(int64_t rows, int64_t stride, int64_t columns) {
    return rows ? (rows - 1) * stride + columns : 0;
}

static void half_group_mean_forward(const ops *o, void *mean, const void *q, int64_t stride,
                                    int64_t rows, int groups, int per_group, int dim) {
    const operand a[] = {{mean, rows * groups * dim, OUT},
                         {q, span(rows, stride, (int64_t)groups * per_group * dim), IN}};
    real *r[2];
    if (!enter(o, a, 2, r)) return;
    plain(o)->group_mean_forward(o, r[0], r[1], stride, rows, groups, per_group, dim);
    leave(o, a, 2, r);
}

static void half_group_mean_backward(const ops *o, void *dq, int64_t stride, const void *dmean,
                                     int64_t rows, int groups, int per_group, int dim) {
    const operand a[] = {{dq, span(rows, stride, (int64_t)groups * per_group * dim), IN | OUT},
                         {dmean, rows * groups * dim, IN}};
    real *r[2];
    if (!enter(o, a, 2, r)) return;
    plain(o)->group_mean_backward(o, r[0], stride, r[1], rows, groups, per_group, dim);
    leave(o, a, 2, r);
}

static void half_cross_entropy(const ops *o, step_state *s, void *logits, const int32_t *labels,
                               int64_t rows, int vocab, double scale) {
    const operand a[] = {{logits, rows * vocab, IN | OUT}};
    real *r[1];
    if (!enter(o, a, 1, r)) return;
    plain(o)->cross_entropy(o, s, r[0], labels, rows, vocab, scale);
    leave(o, a, 1, r);
}

static void half_copy_columns(const ops *o, void *to, int64_t to_stride, const void *from,
                              int64_t from_stride, int64_t rows, int64_t columns) {
#pragma omp parallel for num_threads(o->threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        memcpy((uint16_t *)to + r * to_stride, (const uint16_t *)from + r * from_stride,
               (size_t)columns * sizeof(uint16_t));
}

/* ---- The table ----------------------------------------------------------------------------- */

static const char *say_as_f32(nsa_dtype dtype) {
    static char text[256];
    const char *reason =
        gemm_bf16_reason(gemm_bf16_built(), nsa_isa_available(NSA_ISA_AVX512_BF16));
    if (dtype != NSA_BF16) reason = "no library here multiplies f16";
    snprintf(text, sizeof text, "computed as f32, so fp32 is faster here: %s", reason);
    return text;
}

void ops_cpu_narrow(ops *o, nsa_dtype dtype) {
    cpu_state *s = o->state;
    s->plain = *o;
    if (dtype == NSA_BF16) s->bf16 = gemm_bf16_open(o->threads);
    o->dtype = dtype;
    o->packed_bytes = s->bf16 ? GEMM_BF16_PACKED_BYTES : 0;
    o->speed = "multiplied by this processor's units for bf16";
    if (!s->bf16) o->speed = say_as_f32(dtype);
    o->convert = half_convert;
    o->embed_forward = half_embed_forward;
    o->embed_backward = half_embed_backward;
    o->rmsnorm_forward = half_rmsnorm_forward;
    o->rmsnorm_backward = half_rmsnorm_backward;
    o->linear_forward = half_linear_forward;
    o->linear_backward_input = half_linear_backward_input;
    o->linear_backward_weight = half_linear_backward_weight;
    o->bias_forward = half_bias_forward;
    o->bias_backward = half_bias_backward;
    o->silu_forward = half_silu_forward;
    o->silu_backward = half_silu_backward;
    o->swiglu_forward = half_swiglu_forward;
    o->swiglu_backward = half_swiglu_backward;
    o->group_mean_forward = half_group_mean_forward;
    o->group_mean_backward = half_group_mean_backward;
    o->cross_entropy = half_cross_entropy;
    o->copy_columns = half_copy_columns;
}

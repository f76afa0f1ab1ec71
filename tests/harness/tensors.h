/* tensors.h - nsa.h's views over guarded memory, in every layout and dtype, and the packing of
   sequences. Twin: none. Not here: the inputs (cases.h), and what results must be (the tests).

   A test keeps its numbers as dense doubles, rows of all sequences one after the other, already
   rounded to the dtype under test. A tensor holds the same numbers as nsa.h sees them. */
#ifndef NSA_TESTS_TENSORS_H
#define NSA_TESTS_TENSORS_H

#include "nsa.h"
#include "check.h"
#include "reference.h"

#ifdef CHECK_CUDA
#include "device.h"
#else
#define CHECK_UNIT 1 /* gaps and shifts are multiples of so many elements */
#endif

/* ---- Dtypes ---- */

static inline size_t dtype_size(nsa_dtype t) {
    if (t == NSA_I8 || t == NSA_F8) return 1;
    return t == NSA_F64 ? 8 : t == NSA_BF16 || t == NSA_F16 ? 2 : 4;
}

static inline const char *dtype_name(nsa_dtype t) {
    static const char *const names[] = {"f32", "bf16", "f16", "f64", "i32"};
    return names[t];
}

static inline ref_prec dtype_prec(nsa_dtype t) {
    return t == NSA_F32 ? REF_F32 : t == NSA_BF16 ? REF_BF16 : t == NSA_F16 ? REF_F16 : REF_F64;
}

/* Bits of a double that the dtype holds exactly (or an infinity or NaN). Written apart from
 * nsa.h's. */
static inline uint16_t bf16_bits(double x) {
    float f = (float)x;
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)(u >> 16);
}

static inline uint16_t f16_bits(double x) {
    uint16_t sign = (uint16_t)(signbit(x) ? 0x8000 : 0);
    if (isnan(x)) return 0x7e00;
    if (isinf(x)) return (uint16_t)(sign | 0x7c00);
    if (fabs(x) < ldexp(1, -14)) return (uint16_t)(sign | (int)ldexp(fabs(x), 24));
    int exponent = ilogb(x);
    return (uint16_t)(sign | ((exponent + 15) << 10) | ((int)ldexp(fabs(x), 10 - exponent) - 1024));
}

static inline double bf16_value(uint16_t bits) {
    uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return (double)f;
}

static inline double f16_value(uint16_t bits) {
    int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, -24);
    return sign * ldexp(1024 + mantissa, exponent - 25);
}

/* OCP's fp8 e4m3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; S.1111.111 is NaN. */
static inline double e4m3_value(unsigned char bits) {
    int exponent = (bits >> 3) & 15, mantissa = bits & 7;
    double sign = bits & 0x80 ? -1 : 1;
    if (exponent == 15 && mantissa == 7) return NAN;
    if (exponent == 0) return sign * ldexp(mantissa, -9);
    return sign * ldexp(8 + mantissa, exponent - 10);
}

static inline void element_put(nsa_dtype t, void *at, double x) {
    float f = (float)x;
    int32_t i = t == NSA_I32 ? (int32_t)x : 0;
    uint16_t h = t == NSA_BF16 ? bf16_bits(x) : t == NSA_F16 ? f16_bits(x) : 0;
    switch (t) {
    case NSA_F32:
        memcpy(at, &f, 4);
        break;
    case NSA_F64:
        memcpy(at, &x, 8);
        break;
    case NSA_I32:
        memcpy(at, &i, 4);
        break;
    default:
        memcpy(at, &h, 2);
    }
}

static inline double element_get(nsa_dtype t, const void *at) {
    float f;
    double x;
    int32_t i;
    uint16_t h;
    switch (t) {
    case NSA_F32:
        memcpy(&f, at, 4);
        return (double)f;
    case NSA_F64:
        memcpy(&x, at, 8);
        return x;
    case NSA_I32:
        memcpy(&i, at, 4);
        return i;
    default:
        memcpy(&h, at, 2);
        return t == NSA_BF16 ? bf16_value(h) : f16_value(h);
    }
}

/* ---- Tensors ---- */

typedef enum layout {
    LAYOUT_BTHD,  /* contiguous */
    LAYOUT_BHTD,  /* contiguous, heads outside tokens */
    LAYOUT_FUSED, /* a slice of heads of a wider projection: rows lie apart */
    LAYOUT_GAPS,  /* odd strides everywhere */
    LAYOUTS
} layout;

typedef struct tensor {
    nsa_tensor view;
    guarded *memory;
    int batch, tokens, heads, width;
    int64_t inner; /* elements between the numbers of a row */
} tensor;

/* A poisoned tensor. Every gap of its layout is poison too. `shift` moves it off malloc's
 * alignment. With `apart` the first numbers of all rows are laid out alone, and the second ones
 * that far behind. */
static inline tensor tensor_laid(const char *name, layout form, nsa_dtype dtype, int batch,
                                 int tokens, int heads, int width, size_t shift, int64_t apart) {
    int64_t w = apart ? 1 : width, h = heads, t = tokens, begin = 0, elements;
    tensor x = {0};
    x.batch = batch, x.tokens = tokens, x.heads = heads, x.width = width;
    x.inner = apart ? apart : 1;
    x.view.dtype = dtype;
    switch (form) {
    case LAYOUT_BTHD:
        x.view.head = w, x.view.token = h * w, x.view.batch = t * h * w;
        break;
    case LAYOUT_BHTD:
        x.view.token = w, x.view.head = t * w, x.view.batch = t * h * w;
        break;
    case LAYOUT_FUSED:
        x.view.head = w, x.view.token = (h + 3) * w, x.view.batch = t * (h + 3) * w, begin = 2 * w;
        break;
    default:
        x.view.head = w + 3 * CHECK_UNIT, x.view.token = h * x.view.head + 5 * CHECK_UNIT;
        x.view.batch = t * x.view.token + 7 * CHECK_UNIT, begin = CHECK_UNIT;
    }
    /* Exact: the buffer ends with the last element of the last row. */
    elements = batch && tokens && heads
                   ? begin + (batch - 1) * x.view.batch + (t - 1) * x.view.token +
                         (h - 1) * x.view.head + (width - 1) * x.inner + 1
                   : 0;
    size_t size = dtype_size(dtype);
    x.memory = guarded_filled(name, (size_t)elements * size, shift * size * CHECK_UNIT,
                              dtype == NSA_I32 ? CHECK_POISON_INT : CHECK_POISON);
    x.view.data = elements ? x.memory->data + (size_t)begin * size : x.memory->data;
    return x;
}

static inline tensor tensor_new(const char *name, layout form, nsa_dtype dtype, int batch,
                                int tokens, int heads, int width, size_t shift) {
    return tensor_laid(name, form, dtype, batch, tokens, heads, width, shift, 0);
}

static inline size_t tensor_count(const tensor *x) {
    return (size_t)x->batch * (size_t)x->tokens * (size_t)x->heads * (size_t)x->width;
}

/* Where element c of row (b, t, h) lies. */
static inline unsigned char *tensor_at(const tensor *x, int b, int t, int h, int c) {
    int64_t element = b * x->view.batch + t * x->view.token + h * x->view.head + c * x->inner;
    return (unsigned char *)x->view.data + (size_t)element * dtype_size(x->view.dtype);
}

/* Calls f for every element in (b, t, h, c) order: the order of the dense arrays. */
#define TENSOR_EACH(x, b, t, h, c)               \
    for (int b = 0; b < (x)->batch; b++)         \
        for (int t = 0; t < (x)->tokens; t++)    \
            for (int h = 0; h < (x)->heads; h++) \
                for (int c = 0; c < (x)->width; c++)

static inline void tensor_put(const tensor *x, const double *dense) {
    TENSOR_EACH(x, b, t, h, c) element_put(x->view.dtype, tensor_at(x, b, t, h, c), *dense++);
}

static inline void tensor_get(const tensor *x, double *dense) {
    TENSOR_EACH(x, b, t, h, c) *dense++ = element_get(x->view.dtype, tensor_at(x, b, t, h, c));
}

static inline void tensor_put_i32(const tensor *x, const int32_t *dense) {
    TENSOR_EACH(x, b, t, h, c) memcpy(tensor_at(x, b, t, h, c), dense++, 4);
}

/* The elements' bytes without the gaps, malloced: what bit-for-bit comparisons use. */
static inline unsigned char *tensor_bits(const tensor *x) {
    size_t size = dtype_size(x->view.dtype);
    unsigned char *bits = (unsigned char *)check_alloc(tensor_count(x) * size), *to = bits;
    TENSOR_EACH(x, b, t, h, c) {
        memcpy(to, tensor_at(x, b, t, h, c), size);
        to += size;
    }
    return bits;
}

/* The next call may write rows first .. end - 1 of every sequence (all, where tokens are packed
 * rows). */
static inline void tensor_open_rows(const tensor *x, int first, int end) {
    for (int b = 0; b < x->batch; b++)
        for (int t = first; t < end; t++)
            for (int h = 0; h < x->heads; h++)
                for (int c = 0; c < (x->inner == 1 ? 1 : x->width); c++)
                    guarded_open(x->memory, tensor_at(x, b, t, h, c),
                                 (size_t)(x->inner == 1 ? x->width : 1) *
                                     dtype_size(x->view.dtype));
}

static inline void tensor_no_blocks(const tensor *x) {
    size_t bytes = tensor_count(x) * sizeof(int32_t);
    int32_t *none = (int32_t *)check_alloc(bytes);
    memset(none, 0xff, bytes); /* -1 */
    tensor_put_i32(x, none);
    free(none);
}

static inline void tensor_open(const tensor *x) {
    tensor_open_rows(x, 0, x->tokens);
}

/* The view with row 0 at `first`: what a call for rows first .. first + count is given. */
static inline nsa_tensor view_from(nsa_tensor v, int64_t batch, int64_t first, int64_t head) {
    int64_t element = batch * v.batch + first * v.token + head * v.head;
    if (v.data) v.data = (unsigned char *)v.data + (size_t)element * dtype_size(v.dtype);
    return v;
}

/* ---- Sequences ---- */

enum { PLAN_SEQUENCES = 16 };

/* Where each sequence lies in the dense arrays: rows of tokens, rows of compressed blocks. */
typedef struct plan {
    int sequences, rows, cmp_rows;
    int length[PLAN_SEQUENCES], row[PLAN_SEQUENCES], cmp_row[PLAN_SEQUENCES],
        cmp_count[PLAN_SEQUENCES];
} plan;

/* Heads that have block lists. */
static inline int list_heads_of(const nsa_desc *d) {
    return d->list_heads ? d->list_heads : d->kv_heads;
}

static inline ref_desc ref_desc_of(const nsa_desc *d, int tokens) {
    ref_desc r;
    memset(&r, 0, sizeof r);
    r.tokens = tokens, r.heads = d->heads, r.kv_heads = d->kv_heads;
    r.dim = d->dim, r.dim_v = d->dim_v;
    r.cmp_block = d->cmp_block, r.cmp_stride = d->cmp_stride, r.slc_block = d->slc_block;
    r.slc_count = d->slc_count, r.slc_init = d->slc_init, r.slc_local = d->slc_local;
    r.window = d->window;
    r.forced_on_top = d->forced != NSA_FORCED_INSIDE;
    r.whole_blocks = d->forced == NSA_FORCED_TAIL;
    r.score_max = d->score_map == NSA_SCORE_OVERLAP_MAX;
    r.window_before_self = d->window_rule == NSA_WINDOW_BEFORE_SELF;
    r.not_causal = d->mask == NSA_MASK_NONE;
    r.list_heads = list_heads_of(d);
    r.scale = d->scale != 0 ? d->scale : 1 / sqrt((double)d->dim);
    return r;
}

static inline plan plan_of(const nsa_desc *d) {
    plan p;
    memset(&p, 0, sizeof p);
    p.sequences = d->batch;
    p.rows = d->begins ? d->begins[d->batch] : d->batch * d->tokens;
    for (int b = 0; b < d->batch; b++) {
        ref_desc r = ref_desc_of(d, 0);
        p.row[b] = d->begins ? d->begins[b] : b * d->tokens;
        p.length[b] = d->begins ? d->begins[b + 1] - d->begins[b] : d->tokens;
        p.cmp_count[b] = ref_cmp_count(&r, p.length[b]);
        p.cmp_row[b] = p.cmp_rows;
        p.cmp_rows += p.cmp_count[b];
    }
    return p;
}

/* A tensor for rows of tokens, or of compressed blocks, of the descriptor's batch: packed where its
   sequences are. A packed view's batch stride is one that must not be used. */
static inline tensor tensor_apart(const char *name, layout form, nsa_dtype dtype, const nsa_desc *d,
                                  int compressed, int heads, int width, size_t shift,
                                  int64_t apart) {
    plan p = plan_of(d);
    int rows = compressed ? p.cmp_rows : p.rows, batch = d->begins ? 1 : d->batch;
    tensor x = tensor_laid(name, form, dtype, batch, rows / batch, heads, width, shift, apart);
    if (d->begins) x.view.batch = 12345;
    return x;
}

static inline tensor tensor_of(const char *name, layout form, nsa_dtype dtype, const nsa_desc *d,
                               int compressed, int heads, int width, size_t shift) {
    return tensor_apart(name, form, dtype, d, compressed, heads, width, shift, 0);
}

/* For numbers of a row that lie behind all rows of the numbers before them, in every layout. */
static inline int64_t apart_of(const nsa_desc *d, int heads) {
    const int64_t row = heads * (1 + 3 * CHECK_UNIT) + 5 * CHECK_UNIT;
    return plan_of(d).rows * row + (7 * (int64_t)d->batch + 1) * CHECK_UNIT;
}

/* Opens rows first .. first + count - 1 of every sequence. */
static inline void tensor_open_slice(const tensor *x, const nsa_desc *d) {
    plan p = plan_of(d);
    if (!d->begins) {
        tensor_open_rows(x, d->first, d->first + d->count);
        return;
    }
    for (int b = 0; b < p.sequences; b++) {
        int end = d->first + d->count < p.length[b] ? d->first + d->count : p.length[b];
        if (d->first < end) tensor_open_rows(x, p.row[b] + d->first, p.row[b] + end);
    }
}

/* Zeroes the rows of a dense array that the descriptor's slice does not reach. */
static inline void plan_zero_outside(const nsa_desc *d, double *dense, int row_width) {
    plan p = plan_of(d);
    unsigned char *inside = ref_mask((size_t)p.rows);
    for (int b = 0; b < p.sequences; b++)
        for (int t = d->first; t < d->first + d->count && t < p.length[b]; t++)
            inside[p.row[b] + t] = 1;
    for (int r = 0; r < p.rows; r++)
        for (int c = 0; !inside[r] && c < row_width; c++)
            dense[(size_t)r * (size_t)row_width + (size_t)c] = 0;
    free(inside);
}

/* ---- Workspace ---- */

/* Exactly `bytes`, at an odd address, writable by the next call. A tensor of bytes that is never
 * read. */
static inline guarded *workspace_new(size_t bytes, size_t shift) {
    guarded *g = guarded_new("workspace", bytes, shift);
    guarded_open(g, g->data, bytes);
    return g;
}

/* ---- Allowed errors ---- */

/* The rule of low precision: `factor` times the error of the plain algorithm in the same dtype. The
   plain algorithm may be exact by luck, so a few roundings of a result of size 1 are allowed
   besides. In f64 it is the reference itself: there its own error is allowed. p = exp(score - lse)
   is as exact as its exponent: a score of 256, the largest here, goes through about four roundings
   on either side (the sum of the products, the scale, lse, the change of base), each of 256 units.
 */
static inline double allowed_error(double factor, const double *want, const double *plain,
                                   size_t n) {
    double roundings = sizeof(nsa_real) == 8 ? 8 * 256 * 1.1e-16 : 8 * 6.0e-8;
    double size = check_norm(want, n), unit = sqrt((double)n);
    return factor * check_distance(plain, want, n) + roundings * (size > unit ? size : unit);
}

/* -inf where and only where wanted: then both become 0, so that the rest can be measured. */
static inline void check_empty_rows(double *got, double *want, double *plain, size_t n) {
    size_t wrong = n;
    for (size_t i = 0; i < n; i++) {
        int empty = isinf(want[i]) && want[i] < 0;
        if (empty != (isinf(got[i]) && got[i] < 0) && wrong == n) wrong = i;
        if (empty) got[i] = want[i] = plain[i] = 0;
    }
    CHECK(wrong == n, "lse: row %zu is %g, wanted %g", wrong, got[wrong < n ? wrong : 0],
          want[wrong < n ? wrong : 0]);
}

#endif

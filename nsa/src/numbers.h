/* ---- Rows and numbers: the one place that knows dtypes ------------------------------------------
   Twin: kernels/rows.cuh. Not here: which rows a sequence has (sequences.h). */
#pragma once
#include "system.h"

#define NSA__LOG2E 1.4426950408889634074
/* Stands for "no maximum yet". Finite, so that no difference of two maxima is inf - inf. */
#define NSA__LOWEST ((nsa_real)(sizeof(nsa_real) == sizeof(double) ? -DBL_MAX : -FLT_MAX))

/* Numbers of the widest vector, AVX-512's in f32. Packed rows are padded to multiples of it. */
enum { NSA__LANES = 16 };

/* Integers as wide as nsa_real. Their names are pasted together from the text of NSA_REAL, because
   the preprocessor knows no sizeof. */
#define NSA__BITS_float       32
#define NSA__BITS_double      64
#define NSA__INT_(bits, kind) kind##bits##_t
#define NSA__INT(bits, kind)  NSA__INT_(bits, kind)
#define NSA__REAL_BITS_(real) NSA__BITS_##real
#define NSA__REAL_BITS(real)  NSA__REAL_BITS_(real)
typedef NSA__INT(NSA__REAL_BITS(NSA_REAL), int) nsa__lane;
typedef NSA__INT(NSA__REAL_BITS(NSA_REAL), uint) nsa__bits_t;

#if defined(__GNUC__) || defined(__clang__)
#define NSA__INLINE   static inline __attribute__((__always_inline__))
#define NSA__NOINLINE __attribute__((__noinline__))
#else
#define NSA__INLINE static inline
#define NSA__NOINLINE
#endif

NSA__INLINE float nsa__float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

NSA__INLINE uint32_t nsa__float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Volatile, because under -ffast-math clang 19 takes a function that is known to return one
   of them for one that returns anything. */
static nsa_real nsa__nan(void) {
    const volatile uint32_t bits = 0x7fc00000u;
    return (nsa_real)nsa__float_from_bits(bits);
}
static nsa_real nsa__minus_infinity(void) {
    const volatile uint32_t bits = 0xff800000u;
    return (nsa_real)nsa__float_from_bits(bits);
}

/* What loops call is inlined: a public function that a shared library exports never is. */
NSA__INLINE float nsa__from_bf16(uint16_t x) {
    return nsa__float_from_bits((uint32_t)x << 16);
}

/* bf16 is the upper half of an f32. The code adds 0x7fff, and 1 more if the kept half is odd. That
   carries into the kept half exactly if it must be rounded up: to nearest, ties to even. A carry
   out of the mantissa raises the exponent, at the end to infinity, as it must. The bit 0x40 makes a
   NaN quiet; without it a NaN whose payload lies in the lower half would become infinity. */
NSA__INLINE uint16_t nsa__to_bf16(float x) {
    uint32_t bits = nsa__float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40); /* a quiet NaN */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* f16 has 5 bits of exponent with bias 15 and 10 of mantissa, f32 has 8 with bias 127 and 23: the
   exponent grows by 112, the mantissa moves up by 13 bits. No branches, so that a compiler makes
   vectors of a loop over it. A subnormal number is a difference of normal ones, because -ffast-math
   may take subnormal floats for 0. */
NSA__INLINE float nsa__from_f16(uint16_t x) {
    const uint32_t least = 113u << 23; /* 2^-14, the least normal number */
    uint32_t rest = (uint32_t)(x & 0x7fffu) << 13, exponent = rest >> 23;
    uint32_t subnormal =
        nsa__float_bits(nsa__float_from_bits(rest | least) - nsa__float_from_bits(least));
    uint32_t is_subnormal = 0u - (uint32_t)(exponent == 0),
             is_infinite = 0u - (uint32_t)(exponent == 31);
    uint32_t normal = rest + (112u << 23) + (is_infinite & 112u << 23);
    return nsa__float_from_bits((uint32_t)(x & 0x8000u) << 16 | (is_subnormal & subnormal) |
                                (~is_subnormal & normal));
}

/* The magnitude of an f32 to nearest, ties to even, in a format with `drop` bits less of mantissa
   and a bias that is smaller by `less`. Exponent and mantissa are rounded as one integer, so that a
   carry out of the mantissa raises the exponent. A subnormal number is the lower bits of a sum with
   the number whose last place is the format's smallest step. What is too large for the format is
   the caller's. No branches, as above. */
NSA__INLINE uint32_t nsa__round_to(uint32_t magnitude, int drop, uint32_t less) {
    const uint32_t least = (less + 1) << 23, step = least + ((uint32_t)drop << 23);
    uint32_t subnormal =
        nsa__float_bits(nsa__float_from_bits(magnitude) + nsa__float_from_bits(step)) - step;
    uint32_t normal = magnitude - (less << 23) + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1);
    uint32_t is_subnormal = 0u - (uint32_t)(magnitude < least);
    return (is_subnormal & subnormal) | (~is_subnormal & normal >> drop);
}

/* 0x477ff000 is 65520, halfway between the largest f16 and 65536. */
NSA__INLINE uint16_t nsa__to_f16(float x) {
    uint32_t bits = nsa__float_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t rounded = nsa__round_to(magnitude, 13, 112);
    if (magnitude >= 0x477ff000u) rounded = 0x7c00u; /* rounds to 65536 or beyond */
    if (magnitude > 0x7f800000u) rounded = 0x7e00u;
    return (uint16_t)((bits >> 16 & 0x8000u) | rounded);
}

/* e4m3 as f16, divided by 256: a mantissa that is 7 bits shorter, an exponent whose bias is 7. */
NSA__INLINE float nsa__from_f8(unsigned char x) {
    const int nan = (x & 0x7f) == 0x7f;
    return nsa__from_f16((uint16_t)((x & 0x80) << 8 | (x & 0x7f) << 7 | (nan ? 0x7c00 : 0))) * 256;
}

/* The scale of column c of a row of n numbers of 8 bits. */
NSA__INLINE float nsa__row_scale(const void *row, int n, int c) {
    float scale;
    memcpy(&scale, (const char *)row + n + c / NSA__SCALE_COLUMNS * (int)sizeof scale,
           sizeof scale);
    return scale;
}

NSA_API float nsa_bf16_to_f32(uint16_t x) {
    return nsa__from_bf16(x);
}
NSA_API uint16_t nsa_f32_to_bf16(float x) {
    return nsa__to_bf16(x);
}
NSA_API float nsa_f16_to_f32(uint16_t x) {
    return nsa__from_f16(x);
}
NSA_API uint16_t nsa_f32_to_f16(float x) {
    return nsa__to_f16(x);
}

/* The address of a row: the one place that turns strides, which count elements, into bytes. */
static void *nsa__row(const nsa_tensor *x, int64_t batch, int64_t row, int64_t head) {
    int64_t element = x->batch * batch + x->token * row + x->head * head;
    return (char *)x->data + (ptrdiff_t)element * (ptrdiff_t)nsa__dtype_bytes(x->dtype);
}

static size_t nsa__row_bytes(const nsa_tensor *x, int width) {
    return (size_t)nsa__row_elements(x->dtype, width) * nsa__dtype_bytes(x->dtype);
}

#if defined(__GNUC__) || defined(__clang__)
#define NSA__PREFETCH(at, locality) __builtin_prefetch(at, 0, locality)
#define NSA__HAS_EFFECT             __asm__ __volatile__("")
#else
#define NSA__PREFETCH(at, locality) (void)(at)
#define NSA__HAS_EFFECT             (void)0
#endif

/* malloc's rows begin within a line. A macro, because clang 14 fails at -O0 where the locality is
   no constant. */
#define NSA__FETCH(at, bytes, locality)                                             \
    do {                                                                            \
        const char *from = (const char *)(at);                                      \
        for (size_t i = 0; i < (bytes); i += 64) NSA__PREFETCH(from + i, locality); \
        if (bytes) NSA__PREFETCH(from + (bytes)-1, locality);                       \
    } while (0)

/* Prefetches memory into L1, or into L2. Rows of one head are a row of all heads apart, which is
   further than the hardware prefetches. To GCC a function that only prefetches has no effect, so
   that it removes calls of it; the empty instruction is one. */
static void nsa__fetch(const void *at, size_t bytes) {
    NSA__HAS_EFFECT;
    NSA__FETCH(at, bytes, 3);
}
static void nsa__fetch_l2(const void *at, size_t bytes) {
    NSA__HAS_EFFECT;
    NSA__FETCH(at, bytes, 2);
}

/* A user's -O0, -ffast-math or -std=c99 must not reach what is hot. GCC takes the level and the
   rules of arithmetic by attribute, clang takes the rules by pragma. With clang's `on` a product
   and the sum in the same expression are always one rounding. With `fast` they are so only within
   one block of code; sanitizers split blocks, and bits that must be equal would differ. */
#if defined(__clang__)
#define NSA__COMPILED
#define NSA__ARITHMETIC _Pragma("clang fp reassociate(off) contract(on)")
/* elsewhere clang warns that it cannot */
#if defined(__x86_64__) || (defined(__aarch64__) && __clang_major__ >= 16)
#define NSA__QUOTIENTS _Pragma("float_control(precise, on)")
#endif
#elif defined(__GNUC__)
#define NSA__COMPILED \
    __attribute__((__optimize__("O3", "fp-contract=fast", "no-fast-math", "align-loops=64")))
#define NSA__ARITHMETIC
#else
#define NSA__COMPILED
#define NSA__ARITHMETIC
#endif
#ifndef NSA__QUOTIENTS /* of rows of 8 bits are no products with a reciprocal */
#define NSA__QUOTIENTS
#endif

/* Before a loop of few, known turns over an array that shall become registers. Unless GCC unrolls
   such loops first of all, it keeps the array in memory, as clang does at -O2. With a sanitizer's
   checks between them clang would take minutes. */
#if defined(__clang__) && !defined(__CUDACC__)
#if __has_feature(undefined_behavior_sanitizer)
#define NSA__UNROLL
#else
#define NSA__UNROLL _Pragma("clang loop unroll(full)")
#endif
#elif defined(__GNUC__) && __GNUC__ >= 8 && !defined(__CUDACC__)
#define NSA__UNROLL _Pragma("GCC unroll 16")
#else
#define NSA__UNROLL
#endif

static nsa_real nsa__exp2(nsa_real x) {
    return sizeof x == sizeof(double) ? (nsa_real)exp2((double)x) : (nsa_real)exp2f((float)x);
}

/* Loads numbers i to n - 1 of a row of n as reals. */
NSA__INLINE void nsa__widen(nsa_real *to, nsa_dtype dtype, const void *row, int i, int n) {
    const uint16_t *half = (const uint16_t *)row;
    const signed char *eighth = (const signed char *)row;
    switch (dtype) {
    case NSA_F32:
        for (; i < n; i++) to[i] = (nsa_real)((const float *)row)[i];
        break;
    case NSA_F64:
        for (; i < n; i++) to[i] = (nsa_real)((const double *)row)[i];
        break;
    case NSA_BF16:
        for (; i < n; i++) to[i] = (nsa_real)nsa__from_bf16(half[i]);
        break;
    case NSA_F16:
        for (; i < n; i++) to[i] = (nsa_real)nsa__from_f16(half[i]);
        break;
    case NSA_I8:
    case NSA_F8:
        for (int end; i < n; i = end) { /* the columns of a scale */
            const nsa_real scale = (nsa_real)nsa__row_scale(row, n, i);
            end = (i / NSA__SCALE_COLUMNS + 1) * NSA__SCALE_COLUMNS;
            end = end < n ? end : n;
            for (int j = i; dtype == NSA_I8 && j < end; j++) to[j] = (nsa_real)eighth[j] * scale;
            for (int j = i; dtype == NSA_F8 && j < end; j++)
                to[j] = (nsa_real)nsa__from_f8((unsigned char)eighth[j]) * scale;
        }
        break;
    case NSA_I32:
        break;
    }
}

NSA__COMPILED static void nsa__load(nsa_real *to, nsa_dtype dtype, const void *row, int n) {
    nsa__widen(to, dtype, row, 0, n);
}

/* The scale of n numbers: what the format's largest number is multiplied by to give theirs. Rounded
   down where that product would be infinite; 0 rather than subnormal, which -ffast-math may take
   for 0. NaN where one of the numbers is not finite. */
NSA__COMPILED static float nsa__scale_of(nsa_dtype dtype, const nsa_real *x, int n) {
    NSA__QUOTIENTS
    const float largest = dtype == NSA_I8 ? 127 : 448;
    uint32_t most = 0, bits;
    for (int i = 0; i < n; i++) {
        bits = nsa__float_bits((float)x[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    if (most >= 0x7f800000u) return (float)nsa__nan();
    bits = nsa__float_bits(nsa__float_from_bits(most) / largest);
    if ((double)nsa__float_from_bits(bits) * (double)largest > FLT_MAX) bits--;
    return nsa__float_from_bits(bits < 0x00800000u ? 0 : bits);
}

/* x in units of a scale, |x| <= 127 or 448 of them but for rounding. The sum with 2^23 rounds to
   whole numbers. */
NSA__INLINE unsigned char nsa__to_scaled(nsa_dtype dtype, float x) {
    const uint32_t bits = nsa__float_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t rounded = nsa__float_bits(nsa__float_from_bits(magnitude) + 8388608.0f) & 0xff;
    if (dtype == NSA_I8) return (unsigned char)(bits >> 31 ? 0u - rounded : rounded);
    rounded = nsa__round_to(magnitude, 20, 120);
    return (unsigned char)((bits >> 24 & 0x80) | (rounded < 0x7e ? rounded : 0x7e));
}

/* Writes a row of 8 bits and its scales. Numbers whose scale is 0 or NaN are zeros. */
NSA__COMPILED static void nsa__store_scaled(nsa_dtype dtype, unsigned char *row,
                                            const nsa_real *from, int n) {
    NSA__QUOTIENTS
    for (int begin = 0; begin < n; begin += NSA__SCALE_COLUMNS) {
        const int end = n - begin < NSA__SCALE_COLUMNS ? n : begin + NSA__SCALE_COLUMNS;
        const float scale = nsa__scale_of(dtype, from + begin, end - begin);
        const int none = nsa__float_bits(scale) == 0 || !nsa__is_finite((double)scale);
        memcpy(row + n + begin / NSA__SCALE_COLUMNS * (int)sizeof scale, &scale, sizeof scale);
        for (int i = begin; i < end; i++)
            row[i] = none ? 0 : nsa__to_scaled(dtype, (float)from[i] / scale);
    }
}

/* f64 reaches bf16 and f16 through f32, so it is rounded twice there. */
NSA__COMPILED static void nsa__store(nsa_dtype dtype, void *row, const nsa_real *from, int n) {
    uint16_t *half = (uint16_t *)row;
    switch (dtype) {
    case NSA_F32:
        for (int i = 0; i < n; i++) ((float *)row)[i] = (float)from[i];
        break;
    case NSA_F64:
        for (int i = 0; i < n; i++) ((double *)row)[i] = (double)from[i];
        break;
    case NSA_BF16:
        for (int i = 0; i < n; i++) half[i] = nsa__to_bf16((float)from[i]);
        break;
    case NSA_F16:
        for (int i = 0; i < n; i++) half[i] = nsa__to_f16((float)from[i]);
        break;
    case NSA_I8:
    case NSA_F8:
        nsa__store_scaled(dtype, (unsigned char *)row, from, n);
        break;
    case NSA_I32:
        break;
    }
}

/* row += factor * from, summed in the real dtype and rounded once. Rows of w1 in a compress can be
   longer than NSA__MAX_DIM, so the sum is taken piece by piece. */
NSA__COMPILED static void nsa__add(nsa_dtype dtype, void *row, nsa_real factor,
                                   const nsa_real *from, int n) {
    nsa_real sum[NSA__MAX_DIM];
    for (int at = 0; at < n; at += NSA__MAX_DIM) {
        int part = n - at < NSA__MAX_DIM ? n - at : NSA__MAX_DIM;
        void *to = (char *)row + (size_t)at * nsa__dtype_bytes(dtype);
        nsa__load(sum, dtype, to, part);
        for (int i = 0; i < part; i++) sum[i] += factor * from[at + i];
        nsa__store(dtype, to, sum, part);
    }
}

/* Of the bits of a number, or of many: the exponent plus one, which sets the sign bit if all of the
   exponent is ones: infinity or NaN. So an and, an add and an or find out about many numbers. Every
   vector unit has these three for integers; SSE2 has no integer maximum. */
#define NSA__SIGN                 ((nsa__bits_t)1 << (8 * sizeof(nsa_real) - 1))
#define NSA__EXPONENT             ((nsa__bits_t)1 << (sizeof(nsa_real) == 8 ? 52 : 23))
#define NSA__INFINITY             (NSA__SIGN - NSA__EXPONENT)
#define NSA__EXPONENT_CARRY(bits) (((bits)&NSA__INFINITY) + NSA__EXPONENT)

/* sum += factor * row */
NSA__COMPILED static void nsa__add_to(nsa_real *sum, nsa_real factor, nsa_dtype dtype,
                                      const void *row, int n) {
    nsa_real x[NSA__MAX_DIM];
    nsa__load(x, dtype, row, n);
    for (int i = 0; i < n; i++) sum[i] += factor * x[i];
}

/* Adds up 16 partial sums by halves. The order is written out, so that a compiler's choice of
   vectors changes no bit. */
NSA__INLINE nsa_real nsa__sum_parts(nsa_real part[NSA__LANES]) {
    NSA__ARITHMETIC
    NSA__UNROLL
    for (int half = NSA__LANES / 2; half; half /= 2) {
        NSA__UNROLL
        for (int j = 0; j < half; j++) part[j] += part[j + half];
    }
    return part[0];
}

/* a . b, in 16 partial sums; n is a multiple of 16. */
NSA__COMPILED static nsa_real nsa__dot(const nsa_real *a, const nsa_real *b, int n) {
    nsa_real part[NSA__LANES] = {0};
    for (int i = 0; i < n; i += NSA__LANES)
        for (int j = 0; j < NSA__LANES; j++) part[j] += a[i + j] * b[i + j];
    return nsa__sum_parts(part);
}

/* Copies a row of bf16 as pairs, with zeros up to `wide` numbers. A non-finite row becomes zeros
   and returns 0. */
NSA__COMPILED static int nsa__copy_finite_pairs(nsa_real *to, const void *row, int n, int wide) {
    uint32_t any = 0;
    memset((uint16_t *)to + n, 0, (size_t)(wide - n) * sizeof(uint16_t));
    memcpy(to, row, (size_t)n * sizeof(uint16_t));
    for (int i = 0; i < wide / 2; i++) {
        uint32_t pair;
        memcpy(&pair, to + i, sizeof pair);
        any |= (pair & 0x7f807f80u) + 0x00800080u; /* NSA__EXPONENT_CARRY of two */
    }
    if (!(any & 0x80008000u)) return 1;
    memset(to, 0, (size_t)wide * sizeof(uint16_t));
    return 0;
}

static nsa_real nsa__sigmoid(nsa_real x) {
    return (nsa_real)(1 / (1 + exp(-(double)x)));
}

/* Bytes from one of a head's gates to the next, in a view of that dtype. */
static ptrdiff_t nsa__gates_apart(const nsa_tensor *x, const nsa_desc *d) {
    return (ptrdiff_t)nsa__gate_stride(d) * (ptrdiff_t)nsa__dtype_bytes(x->dtype);
}

static void nsa__load_gates(nsa_real g[3], const nsa_tensor *x, const nsa_desc *d, int64_t batch,
                            int64_t row, int64_t head) {
    const char *at = (const char *)nsa__row(x, batch, row, head);
    ptrdiff_t apart = nsa__gates_apart(x, d);
    for (int i = 0; i < 3; i++) nsa__load(&g[i], x->dtype, at + i * apart, 1);
}

static void nsa__add_gates(const nsa_tensor *x, const nsa_desc *d, int64_t batch, int64_t row,
                           int64_t head, const nsa_real dg[3]) {
    char *at = (char *)nsa__row(x, batch, row, head);
    ptrdiff_t apart = nsa__gates_apart(x, d);
    for (int i = 0; i < 3; i++) nsa__add(x->dtype, at + i * apart, 1, &dg[i], 1);
}

/* Turns three logits into the weights g of Eq. 5; without a gate function the logits are g. Softmax
   subtracts the maximum, so that exp cannot overflow. */
static void nsa__gate_weights(nsa_gate_kind kind, nsa_real g[3]) {
    if (kind == NSA_GATE_SIGMOID)
        for (int i = 0; i < 3; i++) g[i] = nsa__sigmoid(g[i]);
    if (kind == NSA_GATE_SOFTMAX) {
        nsa_real most = g[0] > g[1] ? g[0] : g[1], sum = 0;
        most = most > g[2] ? most : g[2];
        for (int i = 0; i < 3; i++) sum += g[i] = (nsa_real)exp((double)(g[i] - most));
        for (int i = 0; i < 3; i++) g[i] /= sum;
    }
}

/* Arguments are int64_t, so that sums and products are compared before they are narrowed to int. */
static int64_t nsa__min(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static int64_t nsa__max(int64_t a, int64_t b) {
    return a > b ? a : b;
}
static int64_t nsa__ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* Numbers of a row in whole vectors. */
static int nsa__whole_vectors(int width) {
    return (int)nsa__ceil_div(width, NSA__LANES) * NSA__LANES;
}

NSA_API nsa_tensor nsa_tensor_bthd(void *data, nsa_dtype dtype, int tokens, int heads, int width) {
    const int64_t row = nsa__row_elements(dtype, width);
    const nsa_tensor x = {data, dtype, row * heads * tokens, row * heads, row};
    return x;
}

NSA_API nsa_tensor nsa_tensor_bhtd(void *data, nsa_dtype dtype, int tokens, int heads, int width) {
    const int64_t row = nsa__row_elements(dtype, width);
    const nsa_tensor x = {data, dtype, row * tokens * heads, row, row * tokens};
    return x;
}

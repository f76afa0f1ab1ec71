/* peak.h: what this machine's multiply-add units can do, by instruction set and type: chains of
   multiply-adds on registers alone, as many at once as hide their latency. The program includes
   problem.h before, whose instruction sets these are. No test: a rate is no verdict. */
#ifndef BENCH_PEAK_H
#define BENCH_PEAK_H

#include "report.h"

enum { PEAK_CHAINS = 12, PEAK_STEPS = 1 << 20 };

/* CHAINS vectors of so many bytes, each x = x * a + b, PEAK_STEPS times; flops in all. */
#if defined(__GNUC__) || defined(__clang__)
#define PEAK_LOOP(name, bytes, attributes, hold)                              \
    attributes static double peak_##name(void) {                              \
        NSA__ARITHMETIC                                                       \
        typedef float vector __attribute__((vector_size(bytes)));             \
        vector x[PEAK_CHAINS], a, b, zero = {0};                              \
        a = zero + 0.5f;                                                      \
        b = zero + 1.0f;                                                      \
        __asm__("" : "+" hold(a), "+" hold(b));                               \
        for (int i = 0; i < PEAK_CHAINS; i++) x[i] = b;                       \
        for (int n = 0; n < PEAK_STEPS; n++)                                  \
            for (int i = 0; i < PEAK_CHAINS; i++) x[i] = x[i] * a + b;        \
        for (int i = 0; i < PEAK_CHAINS; i++) __asm__("" : : hold(x[i]));     \
        return 2.0 * PEAK_STEPS * PEAK_CHAINS * (bytes / (int)sizeof(float)); \
    }
/* The same of an instruction that adds two products of bf16 to each f32. Its chains are variables
   of their own: GCC keeps an array that asm statements write in memory. */
#define PEAK_EACH(of) of(0) of(1) of(2) of(3) of(4) of(5) of(6) of(7) of(8) of(9) of(10) of(11)
#define PEAK_CHAIN(i) vector x##i = a;
#define PEAK_DOT(bytes, attributes, step)                                     \
    attributes static double peak_bf16(void) {                                \
        typedef float vector __attribute__((vector_size(bytes)));             \
        vector a = {0}, b = {0};                                              \
        PEAK_EACH(PEAK_CHAIN)                                                 \
        for (int n = 0; n < PEAK_STEPS; n++) {                                \
            PEAK_EACH(step)                                                   \
        }                                                                     \
        return 4.0 * PEAK_STEPS * PEAK_CHAINS * (bytes / (int)sizeof(float)); \
    }
#endif

#ifdef NSA__HAS_SSE2
PEAK_LOOP(sse2, 16, NSA__COMPILED, "x")
#endif
#ifdef NSA__HAS_AVX
PEAK_LOOP(avx2, 32, NSA__COMPILED __attribute__((target("avx2,fma"))), "x")
PEAK_LOOP(avx512, 64, NSA__COMPILED __attribute__((target("avx512f"))), "v")
#endif
#ifdef NSA__HAS_AVX512_BF16
#define PEAK_STEP(i) __asm__ volatile("vdpbf16ps %2, %1, %0" : "+v"(x##i) : "v"(a), "v"(b));
PEAK_DOT(64, NSA__COMPILED __attribute__((target("avx512bf16,avx512f"))), PEAK_STEP)
#endif
#ifdef NSA__HAS_NEON_BF16
#define PEAK_STEP(i) __asm__ volatile("bfdot %0.4s, %1.8h, %2.8h" : "+w"(x##i) : "w"(a), "w"(b));
PEAK_DOT(16, NSA__BFDOT NSA__COMPILED, PEAK_STEP)
#endif
#ifdef NSA__HAS_NEON
PEAK_LOOP(neon, 16, NSA__COMPILED, "w")
#endif

static double peak_plain(void) {
    volatile float result;
    float x[PEAK_CHAINS];
    for (int i = 0; i < PEAK_CHAINS; i++) x[i] = 1;
    for (int n = 0; n < PEAK_STEPS; n++)
        for (int i = 0; i < PEAK_CHAINS; i++) x[i] = x[i] * 0.5f + 1;
    for (int i = 0; i < PEAK_CHAINS; i++) result = x[i];
    (void)result;
    return 2.0 * PEAK_STEPS * PEAK_CHAINS;
}

typedef struct peak {
    const char *name; /* "AVX-512, f32" */
    double (*loop)(void);
    double rate; /* GFLOP/s of all threads together */
} peak;

/* The units of the widest instruction set for this type. Rows of f16, and of bf16 where it has no
   units for it, are widened to f32. */
static peak peak_of(nsa_dtype dtype) {
    (void)dtype;
#if defined(NSA__HAS_AVX512_BF16) || defined(NSA__HAS_NEON_BF16)
    nsa_desc d = nsa_desc_default(1, 1, 1, 1, 16);
    if (dtype == NSA_BF16 && nsa__pairs_of(&d)) return (peak){"bf16", peak_bf16, 0};
#endif
#ifdef NSA__HAS_AVX
    if (nsa_isa_available(NSA_ISA_AVX512)) return (peak){"AVX-512, f32", peak_avx512, 0};
    if (nsa_isa_available(NSA_ISA_AVX2)) return (peak){"AVX2, f32", peak_avx2, 0};
#endif
#ifdef NSA__HAS_SSE2
    return (peak){"SSE2, f32", peak_sse2, 0};
#elif defined(NSA__HAS_NEON)
    return (peak){"NEON, f32", peak_neon, 0};
#else
    return (peak){"plain, f32", peak_plain, 0};
#endif
}

/* The best of a few, for it stands for what the machine can do; more than it had before stays. */
static void peak_measure(peak *p, int threads) {
    for (int round = 0; round < 8; round++) {
        double flops = 0, at = seconds();
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) reduction(+ : flops)
#endif
        flops += p->loop();
        double rate = flops / (seconds() - at) * 1e-9;
        p->rate = rate > p->rate ? rate : p->rate;
    }
    (void)threads;
    (void)peak_plain;
}

#endif

/* ---- Instruction sets ---------------------------------------------------------------------------
   Twin: none. Not here: the tiles of each set (tiles.h). */
#pragma once
#include "numbers.h"

#if (defined(__GNUC__) || defined(__clang__)) && !defined(__CUDACC__)
/* The machine too: Emscripten's -msse2 says SSE2, of WebAssembly. */
#if defined(__SSE2__) && (defined(__x86_64__) || defined(__i386__))
#define NSA__HAS_SSE2
/* GCC for Windows spills wide vectors to a stack that is not aligned for them: its PR 54412. */
#if (!defined(_WIN32) || defined(__clang__) || defined(NSA_UNALIGNED_SPILLS)) && \
    !defined(NSA__WITHOUT_AVX) /* a test defines it: the wide tiles take longest to compile */
#define NSA__HAS_AVX
#endif
#elif defined(__ARM_NEON) && defined(__aarch64__) && !defined(__AARCH64EB__)
#define NSA__HAS_NEON /* big-endian, clang hands a vector to asm with its lanes turned */
#elif defined(__wasm_simd128__)
#define NSA__HAS_SIMD128
#endif
/* AVX2's processors convert f16, but not all compilers can ask; without it the loop is plain. */
#if defined(NSA__HAS_AVX) && (defined(__clang__) ? __clang_major__ >= 18 : __GNUC__ >= 11)
#define NSA__HAS_F16C
#endif
/* Products of bf16, for sums in f32. A test defines NSA__BF16_BY_HAND, the name of a file with
   plain code for the one instruction that its machine may lack. */
#if NSA__REAL_BITS(NSA_REAL) == 32 && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 11)
#if defined(NSA__HAS_SSE2) && defined(NSA__BF16_BY_HAND)
#define NSA__HAS_BF16_BY_HAND
#elif defined(NSA__HAS_AVX)
#define NSA__HAS_AVX512_BF16
#elif defined(NSA__HAS_NEON) && \
    (defined(__linux__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define NSA__HAS_NEON_BF16
#endif
#endif
#endif

NSA_API int nsa_isa_available(nsa_isa isa) {
    switch (isa) {
    case NSA_ISA_DETECT:
    case NSA_ISA_PLAIN:
#ifdef NSA__HAS_SSE2
    case NSA_ISA_SSE2:
#endif
#ifdef NSA__HAS_NEON
    case NSA_ISA_NEON:
#endif
#ifdef NSA__HAS_SIMD128
    case NSA_ISA_SIMD128:
#endif
#ifdef NSA__HAS_BF16_BY_HAND
    case NSA_ISA_AVX512_BF16:
#endif
        return 1;
/* A set that the flags promise is not asked for: Zig's runtime says no to every question (0.17). */
#ifdef NSA__HAS_AVX
    case NSA_ISA_AVX2:
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
        return 1;
#else
#ifdef NSA__HAS_F16C
        if (!__builtin_cpu_supports("f16c")) return 0;
#endif
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    case NSA_ISA_AVX512:
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
        return 1;
#else
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#endif
#endif
#ifdef NSA__HAS_AVX512_BF16
    case NSA_ISA_AVX512_BF16:
#ifdef __AVX512BF16__
        return 1;
#else
        return nsa_isa_available(NSA_ISA_AVX512) && __builtin_cpu_supports("avx512bf16");
#endif
#endif
#ifdef NSA__HAS_NEON_BF16
    case NSA_ISA_NEON_BF16: /* BFDOT: the compiler's flags may promise it; Linux says it */
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
        return 1;
#else
        return (getauxval(AT_HWCAP2) >> 14 & 1) != 0; /* HWCAP2_BF16 */
#endif
#endif
    default:
        return 0;
    }
}

NSA_API const char *nsa_isa_name(nsa_isa isa) {
    static const char *const names[] = {"detect", "plain",   "SSE2",         "AVX2",     "AVX-512",
                                        "NEON",   "SIMD128", "AVX-512 BF16", "NEON BF16"};
    return (unsigned)isa < sizeof names / sizeof *names ? names[isa] : "not an instruction set";
}

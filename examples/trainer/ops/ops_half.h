/* ops_half.h - what ops_cpu.c and ops_half.c share: the CPU's state, and how
   its loops are compiled. Others include ops.h. */
#ifndef OPS_HALF_H
#define OPS_HALF_H

#include "ops/gemm_bf16.h"
#include "ops/ops.h"

#ifndef _OPENMP /* then the loops' pragmas are unknown, and what they alone name is unused */
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#endif

/* Loops over numbers alone, so that they are vectors: compiled for wider ones too, and chosen by
   the loader. GCC finds the loader's part (ifunc) on Linux; under a sanitizer it would run before
   the sanitizer is ready. */
#if __GNUC__ >= 12 && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE
#endif

enum { BLOCK = 4096 }; /* elements that a thread takes at a time */

static inline int64_t block_length(int64_t count, int64_t first) {
    return count - first < BLOCK ? count - first : BLOCK;
}

enum { HALF_OPERANDS = 4 }; /* the most that one operation has */

typedef struct cpu_state {
    bool failed;
    fault fault;
    ops plain; /* the operations on reals, under ops_half.c's */
    struct {
        real *data;
        int64_t room;
    } wide[HALF_OPERANDS]; /* operands as reals */
    gemm_bf16 *bf16;       /* NULL: products are of reals, too */
} cpu_state;

#endif

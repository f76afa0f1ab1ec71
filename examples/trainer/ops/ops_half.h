/* ops_half.h - what ops_cpu.c and ops_half.c share: the CPU's state. Others include ops.h. */
#ifndef OPS_HALF_H
#define OPS_HALF_H

#include "ops/gemm_bf16.h"
#include "ops/ops.h"

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

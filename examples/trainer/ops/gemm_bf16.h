/* gemm_bf16.h - matrix products of bf16 with sums in f32, by oneDNN on processors that have units
   for them. Twin: gemm_bf16.c. Elsewhere gemm.h is faster: oneDNN would emulate the units. */
#ifndef GEMM_BF16_H
#define GEMM_BF16_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/gemm.h"

typedef struct gemm_bf16 gemm_bf16;

/* Copies of an element of a weight: one that forward reads, one that backward reads. Layouts in
   blocks add less than a block at each edge. */
enum { GEMM_BF16_PACKED_BYTES = 2 * sizeof(uint16_t) };

/* NULL where there are no such units, no oneDNN, or no memory. */
gemm_bf16 *gemm_bf16_open(int threads);

/* Whether this build has oneDNN; and why there is none, which hangs on that and on whether the
   processor has units. */
bool gemm_bf16_built(void);
const char *gemm_bf16_reason(bool built, bool units);
void gemm_bf16_close(gemm_bf16 *g);

/* c (m, n) becomes the product, or has it added (add). c is f32, or bf16 and rounded once. b of
   GEMM_NN and GEMM_NT is a weight: its copy in oneDNN's layout is kept until gemm_bf16_changed. The
   bits are the same for any number of threads. False: no memory, and c is undefined. */
bool gemm_bf16_multiply(gemm_bf16 *g, gemm_form form, int m, int n, int k, const uint16_t *a,
                        const uint16_t *b, void *c, bool c_is_f32, bool add);

/* The weights in these bytes are no longer what they were. */
void gemm_bf16_changed(gemm_bf16 *g, const void *first, size_t bytes);

#endif

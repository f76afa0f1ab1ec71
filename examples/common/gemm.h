/* gemm.h - matrix products of reals, row-major. Twin: gemm.c, over the system's CBLAS, or plain
   loops where it was built without one. It is not a BLAS: it does what the model needs. */
#ifndef GEMM_H
#define GEMM_H

#include "nsa.h"

typedef enum gemm_form {
    GEMM_NN, /* c = a b      a (m, k), b (k, n) */
    GEMM_NT, /* c = a b^T    a (m, k), b (n, k) */
    GEMM_TN  /* c = a^T b    a (k, m), b (k, n) */
} gemm_form;

/* c (m, n) becomes the product, or has it added (add = 1). All matrices are packed. */
void gemm(gemm_form form, int m, int n, int k, const nsa_real *a, const nsa_real *b, nsa_real *c,
          int add);

/* How many threads a product may use, from now on. */
void gemm_threads(int threads);

/* "OpenBLAS 0.3.21 ..." or "plain loops". */
const char *gemm_name(void);

/* Whether the bits of a product are the same for any number of threads: so with plain loops only. */
int gemm_is_deterministic(void);

#endif

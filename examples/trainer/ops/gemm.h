/* gemm.h - matrix products of reals, row-major. Twin: gemm.c, over the system's oneDNN or CBLAS, or
   plain loops where it was built without one. It is not a BLAS: it does what the model needs. */
#ifndef GEMM_H
#define GEMM_H

#include "nsa.h"

typedef enum gemm_form {
    GEMM_NN, /* c = a b      a (m, k), b (k, n) */
    GEMM_NT, /* c = a b^T    a (m, k), b (n, k) */
    GEMM_TN  /* c = a^T b    a (k, m), b (k, n) */
} gemm_form;

/* Before the first product. What computes them: "oneDNN 2.6.3", "OpenBLAS 0.3.21 ..." or "plain
   loops". */
const char *gemm_open(void);

/* c (m, n) becomes the product, or has it added (add = 1). All matrices are packed. The bits are
   the same for any number of threads. */
void gemm(gemm_form form, int m, int n, int k, const nsa_real *a, const nsa_real *b, nsa_real *c,
          int add, int threads);

/* How c is cut: `rows` by `cols` tiles of `side` by `across`, by the shapes alone. */
typedef struct gemm_tiles {
    int side, across, rows, cols;
} gemm_tiles;

gemm_tiles gemm_cut(int m, int n, int across); /* across 0: as wide as high */

/* For a task that calls oneDNN: outside of a team it would start one of its own. It holds for the
   calling task alone. */
void gemm_stay_alone(void);

#endif

/* gemm_cuda.h - matrix products on a CUDA device, row-major and packed. Twins: gemm_cuda.cu, over
   cuBLASLt; tests/simt/gemm_loops.cpp, plain loops that run under the executor. It is not a BLAS:
   it does what the model needs, and gemm.h does the same on the CPU. */
#ifndef GEMM_CUDA_H
#define GEMM_CUDA_H

#include <stdbool.h>

#include "nsa_cuda.cuh"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gemm_cuda_form {
    GEMM_CUDA_NN, /* d = a b      a (m, k), b (k, n) */
    GEMM_CUDA_NT, /* d = a b^T    a (m, k), b (n, k) */
    GEMM_CUDA_TN  /* d = a^T b    a (k, m), b (k, n) */
} gemm_cuda_form;

/* Sums are f32. `add` (m, n), of d's dtype, is added where it is not NULL; it may be d. */
typedef struct gemm_cuda_product {
    gemm_cuda_form form;
    int m, n, k;
    nsa_dtype in, out; /* of a and b; of add and d */
    const void *a, *b, *add;
    void *d;
} gemm_cuda_product;

typedef struct gemm_cuda gemm_cuda;

/* NULL: there is none, or no memory for it. `library` becomes what computes: "cuBLASLt 13.0.0". */
gemm_cuda *gemm_cuda_open(const char **library);
void gemm_cuda_close(gemm_cuda *g);

/* Launches; false: the library or the runtime refused. */
bool gemm_cuda_run(gemm_cuda *g, const gemm_cuda_product *p, nsa_cuda_stream stream);

#ifdef __cplusplus
}
#endif

#endif

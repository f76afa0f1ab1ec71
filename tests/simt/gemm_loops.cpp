/* gemm_loops.cpp - the matrix products of the CUDA trainer as plain loops, for the executor.
   Twin: examples/trainer/ops/cuda/gemm_cuda.cu. Not here: anything fast. */
#include "ops/cuda/gemm_cuda.h"

#include "kernels/common.cuh"
#include "kernels/rows.cuh"

enum { THREADS = 128 };

struct gemm_cuda {
    int unused;
};
static gemm_cuda the_only_one;

gemm_cuda *gemm_cuda_open(const char **library) {
    *library = "plain loops";
    return &the_only_one;
}
void gemm_cuda_close(gemm_cuda *) {}

static __global__ void gemm_loops_kernel(gemm_cuda_product p) {
    const int64_t item = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    const int64_t i = item / p.n, j = item % p.n;
    if (i >= p.m) return;
    float sum = p.add ? nsa__load1(p.out, p.add, static_cast<int>(item)) : 0.0f;
    for (int64_t e = 0; e < p.k; e++) {
        const int64_t a = p.form == GEMM_CUDA_TN ? e * p.m + i : i * p.k + e;
        const int64_t b = p.form == GEMM_CUDA_NT ? j * p.k + e : e * p.n + j;
        sum = fmaf(nsa__load1(p.in, p.a, static_cast<int>(a)),
                   nsa__load1(p.in, p.b, static_cast<int>(b)), sum);
    }
    nsa__store1(p.out, p.d, static_cast<int>(item), sum);
}

bool gemm_cuda_run(gemm_cuda *, const gemm_cuda_product *p, nsa_cuda_stream stream) {
    const int64_t items = static_cast<int64_t>(p->m) * p->n;
    if (items == 0) return true;
    const dim3 grid(static_cast<unsigned>((items + THREADS - 1) / THREADS));
    return NSA_LAUNCH(gemm_loops_kernel, grid, dim3(THREADS), 0, stream, *p) == cudaSuccess;
}

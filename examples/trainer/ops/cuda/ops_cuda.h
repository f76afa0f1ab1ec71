/* ops_cuda.h - the operations on a CUDA device. Twin: ops_cuda.cu; ops_cpu.c is the same on the
   CPU. */
#ifndef OPS_CUDA_H
#define OPS_CUDA_H

#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The device at hand (the first, unless a link over NCCL chose another): nsa_cuda.cuh, matrix
   products of gemm_cuda.h, kernels of cuda_*.cuh; one stream. False where there is no device, or
   none that these kernels run on. ops_cuda_close takes what ops_cuda_open filled. */
bool ops_cuda_open(ops *o, nsa_dtype dtype, fault *f);
void ops_cuda_close(ops *o);

#ifdef __cplusplus
}
#endif

#endif

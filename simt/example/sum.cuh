/* sum.cuh: a kernel of another project: the sums of blocks of 64 numbers.
   Twin: none. Not here: anything that nvcc would not take as well. */
#include "common.cuh"

static __global__ void sum_kernel(float *sums, const float *x, int count) {
    NSA_SHARED(float, part, [64]);
    const int lane = static_cast<int>(threadIdx.x);
    const int at = static_cast<int>(blockIdx.x) * 64 + lane;
    part[lane] = at < count ? x[at] : 0.0f;
#ifndef WITHOUT_BARRIER
    __syncthreads();
#endif
    if (lane == 0) {
        float sum = 0.0f;
        for (int i = 0; i < 64; i++) sum += part[i];
        sums[blockIdx.x] = sum;
    }
}

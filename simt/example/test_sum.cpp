/* test_sum.cpp: runs the kernel of sum.cuh and looks at its sums. nvcc makes a program for a GPU
   of the same source. Not here: the executor, of which a test need not know. */
#include "sum.cuh"

#include <cstdio>

int main() {
    enum { COUNT = 150, BLOCKS = 3 };
    float x[COUNT], sums[BLOCKS] = {}, *device_x, *device_sums;
    for (int i = 0; i < COUNT; i++) x[i] = static_cast<float>(i);

    cudaError_t e = cudaMalloc(&device_x, sizeof x);
    if (e == cudaSuccess) e = cudaMalloc(&device_sums, sizeof sums);
    if (e == cudaSuccess) e = cudaMemcpy(device_x, x, sizeof x, cudaMemcpyHostToDevice);
    if (e == cudaSuccess)
        e = NSA_LAUNCH(sum_kernel, BLOCKS, 64, 0, nullptr, device_sums, device_x, int{COUNT});
    if (e == cudaSuccess) e = cudaMemcpy(sums, device_sums, sizeof sums, cudaMemcpyDeviceToHost);
    if (e != cudaSuccess) return printf("%s\n", cudaGetErrorString(e)), 1;

    printf("%g %g %g\n", sums[0], sums[1], sums[2]);
    return sums[0] != 2016.0f || sums[1] != 6112.0f || sums[2] != 3047.0f;
}

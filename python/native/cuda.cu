/* cuda.cu - nsa.h and nsa_cuda.cuh as one shared library with plain symbols, for nsa.torch on CUDA.
   Twin: library.c, the same for the CPU alone. */
#define NSA_IMPLEMENTATION
#define NSA_CUDA_IMPLEMENTATION
#include "nsa_cuda.cuh"

extern "C" {
#include "layout.c"
}

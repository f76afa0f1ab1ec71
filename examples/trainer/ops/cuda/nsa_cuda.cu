/* nsa_cuda.cu - the implementation of nsa_cuda.cuh, compiled apart: it takes longer than all the
   rest. Twin: examples/nsa.c. */
#define NSA_CUDA_IMPLEMENTATION
#include "nsa_cuda.cuh"

/* kernels.cpp - nsa_cuda.cuh as its user's one file holds it, for the executor.
   Twin: the .cu file of a program. Not here: tests. */
#define NSA_CUDA_IMPLEMENTATION
#include "nsa_cuda.cuh"

/* ops_cuda.cpp - the trainer's operations on a CUDA device, for the executor. Twin: the .cu file
   that nvcc compiles. Not here: tests. */
#include "ops/cuda/ops_cuda.cu"

/* paths.cu: attention in bf16, heads of 64, for check_paths.cmake to see by which instructions each
   architecture multiplies. Twin: warpgroup.cuh. Not here: anything that is run. */
#define NSA_CUDA_IMPLEMENTATION
#define NSA__CUDA_IMPLEMENTED /* the one branch is enough */
#define NSA_CUDA_NO_F16
#define NSA_CUDA_NO_F32
#define NSA_CUDA_MAX_DIM 64
#include "nsa_cuda.cuh"

#include "kernels/attend_branches.cuh"

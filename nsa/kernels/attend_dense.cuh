/* attend_dense.cuh: causal attention over all tokens: the baseline, from the same tiles.
   Twin: nsa.h, nsa_attend_dense_forward and _backward. The work is attend.cuh's and
   attend_backward.cuh's.
   Not here: kernels. */
#ifndef NSA_ATTEND_DENSE_CUH
#define NSA_ATTEND_DENSE_CUH

#include "attend_backward.cuh"

NSA__CUDA_ATTEND_DOORS(dense, NSA__KEYS_DENSE)

#endif

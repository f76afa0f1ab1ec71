/* attend_cmp.cuh: attention over the compressed blocks that lie at or before the query.
   Twin: nsa.h, nsa_attend_cmp_forward and _backward. The work is attend.cuh's and
   attend_backward.cuh's.
   Not here: kernels, compression (compress.cuh). */
#ifndef NSA_ATTEND_CMP_CUH
#define NSA_ATTEND_CMP_CUH

#include "attend_backward.cuh"

NSA__CUDA_ATTEND_DOORS(cmp, NSA__KEYS_CMP)

#endif

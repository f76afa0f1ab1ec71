/* attend_slc.cuh: attention over the tokens of listed blocks.
   Twin: nsa.h, nsa_attend_slc_forward and _backward. The work is attend.cuh's and
   attend_backward.cuh's.
   Not here: kernels. */
#ifndef NSA_ATTEND_SLC_CUH
#define NSA_ATTEND_SLC_CUH

#include "attend_backward.cuh"

NSA__CUDA_ATTEND_DOORS(slc, NSA__KEYS_SLC)

#endif

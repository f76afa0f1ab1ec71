/* attend_win.cuh: attention over the last w tokens.
   Twin: nsa.h, nsa_attend_win_forward and _backward. The work is attend.cuh's and
   attend_backward.cuh's; a tile of rows reads
   the window of its first query up to its last query.
   Not here: kernels. */
#ifndef NSA_ATTEND_WIN_CUH
#define NSA_ATTEND_WIN_CUH

#include "attend_backward.cuh"

NSA__CUDA_ATTEND_DOORS(win, NSA__KEYS_WIN)

#endif

/* attend_branches.cuh: the entry points of attention over compressed blocks (cmp), listed blocks
   (slc), the last w tokens (win) and all tokens (dense).
   Twin: nsa.h, nsa_attend_cmp_forward, nsa_attend_slc_forward, nsa_attend_win_forward,
   nsa_attend_dense_forward and their _backward.
   Not here: kernels (attend_forward.cuh, attend_backward.cuh), which keys a branch sees
   (attend_keys.cuh). */
#ifndef NSA_ATTEND_BRANCHES_CUH
#define NSA_ATTEND_BRANCHES_CUH

#include "attend_backward.cuh"

/* The four public functions of a branch. */
#define NSA__CUDA_ATTEND_ENTRY_POINTS(name, branch)                                                \
    extern "C" size_t nsa_cuda_attend_##name##_forward_workspace_size(const nsa_desc *d) {         \
        return nsa__cuda_attend_bytes(d, branch, nsa__cuda_forward_plan);                          \
    }                                                                                              \
    extern "C" nsa_status nsa_cuda_attend_##name##_forward(const nsa_attend *x, const nsa_desc *d, \
                                                           void *workspace, size_t bytes,          \
                                                           cudaStream_t stream) {                  \
        return nsa__cuda_attend_forward(x, d, branch, workspace, bytes, stream);                   \
    }                                                                                              \
    extern "C" size_t nsa_cuda_attend_##name##_backward_workspace_size(const nsa_desc *d) {        \
        if (d && d->pages) return 0;                                                               \
        return nsa__cuda_attend_bytes(d, branch, nsa__cuda_backward_plan);                         \
    }                                                                                              \
    extern "C" nsa_status nsa_cuda_attend_##name##_backward(                                       \
        const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d, void *workspace,             \
        size_t bytes, cudaStream_t stream) {                                                       \
        return nsa__cuda_attend_backward(dx, x, d, branch, workspace, bytes, stream);              \
    }

NSA__CUDA_ATTEND_ENTRY_POINTS(cmp, NSA__KEYS_CMP)
NSA__CUDA_ATTEND_ENTRY_POINTS(slc, NSA__KEYS_SLC)
NSA__CUDA_ATTEND_ENTRY_POINTS(win, NSA__KEYS_WIN)
NSA__CUDA_ATTEND_ENTRY_POINTS(dense, NSA__KEYS_DENSE)

#endif

/* load.cuh: loads kernels ahead of their first launch.
   Twin: none; a CPU has nothing to load.
   Not here: launches (common.cuh). */
#ifndef NSA_LOAD_CUH
#define NSA_LOAD_CUH

#include "attention.cuh"
#include "decode.cuh"

/* A call itself runs, with a workspace that it does not touch, so that what is loaded is exactly
   what it launches. */
static void *nsa__cuda_untouched() {
    return reinterpret_cast<void *>(uintptr_t{NSA__CUDA_ALIGN});
}

extern "C" nsa_status nsa_cuda_load(const nsa_attention *dx, const nsa_attention *x,
                                    const nsa_desc *d) {
    nsa__loading = true;
    nsa_status s = nsa_cuda_attention_forward(x, d, nsa__cuda_untouched(), SIZE_MAX, NULL);
    if (s == NSA_OK && dx)
        s = nsa_cuda_attention_backward(dx, x, d, nsa__cuda_untouched(), SIZE_MAX, NULL);
    nsa__loading = false;
    return s;
}

extern "C" nsa_status nsa_cuda_load_decode(const nsa_attention *x, nsa_cache *cache, int count) {
    nsa__loading = true;
    const nsa_status s =
        nsa_cuda_decode(x, cache, count, NULL, NULL, NULL, nsa__cuda_untouched(), SIZE_MAX, NULL);
    nsa__loading = false;
    return s;
}

#endif

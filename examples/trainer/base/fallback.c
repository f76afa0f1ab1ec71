/* fallback.c - see fallback.h. */
#include "base/fallback.h"

static int64_t counts[FALLBACKS];

void fallback_add(fallback kind) {
    __atomic_add_fetch(&counts[kind], 1, __ATOMIC_RELAXED);
}

void fallback_restore(fallback kind, int64_t count) {
    __atomic_store_n(&counts[kind], count, __ATOMIC_RELAXED);
}

int64_t fallback_count(fallback kind) {
    return __atomic_load_n(&counts[kind], __ATOMIC_RELAXED);
}

int64_t fallback_total(void) {
    int64_t sum = 0;
    for (int i = 0; i < FALLBACKS; i++) sum += fallback_count((fallback)i);
    return sum;
}

const char *fallback_name(fallback kind) {
    static const char *const names[FALLBACKS] = {
        "selection_triton_fails", "selection_cuda_fails", "selection_pack_fails",
        "selection_mask_fails",   "compressed_fa2_fails", "sliding_fa2_fails",
        "half_product_fails",     "cuda_mainloop_fails",  "data_source_fails",
    };
    return names[kind];
}

/* fallback.h - counts of the times that a slower path took the place of the one that was meant.
   Twin: fallback.c. Whoever takes such a path counts here, in the line that takes it; a default run
   takes none. Not here: what ends a run. The first six are of trainers that choose between kernels
   while they run: this one does not, and their columns stay 0. */
#ifndef FALLBACK_H
#define FALLBACK_H

#include <stdint.h>

typedef enum fallback {
    FALLBACK_SELECTION_TRITON,
    FALLBACK_SELECTION_CUDA,
    FALLBACK_SELECTION_PACK,
    FALLBACK_SELECTION_MASK,
    FALLBACK_COMPRESSED_FA2,
    FALLBACK_SLIDING_FA2,
    FALLBACK_HALF_PRODUCT,  /* a product of 16 bits that the CPU computes as f32 */
    FALLBACK_CUDA_MAINLOOP, /* attention on sm_90 by code that was compiled without wgmma */
    FALLBACK_DATA_SOURCE,   /* a batch made up for a source that failed */
    FALLBACKS
} fallback;

void fallback_add(fallback kind); /* any thread */
void fallback_restore(fallback kind,
                      int64_t count); /* what a run had counted before it was resumed */
int64_t fallback_count(fallback kind);
int64_t fallback_total(void);
const char *fallback_name(fallback kind); /* "selection_triton_fails" */

#endif

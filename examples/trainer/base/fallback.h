/* fallback.h - counts of the times that a slower path took the place of the one that was meant.
   Twin: fallback.c. Whoever adds such a path counts here, in the line that takes it. There is
   none now: an operation that cannot be done ends the run, so a default run's counts are zero. */
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
    FALLBACKS
} fallback;

void fallback_add(fallback kind); /* any thread */
void fallback_restore(fallback kind,
                      int64_t count); /* what a run had counted before it was resumed */
int64_t fallback_count(fallback kind);
int64_t fallback_total(void);
const char *fallback_name(fallback kind); /* "selection_triton_fails" */

#endif

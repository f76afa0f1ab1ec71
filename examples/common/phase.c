/* phase.c - see phase.h. */
#include "phase.h"

static uint32_t word;

void phase_set(phase p, int layer) {
    uint32_t x = (uint32_t)p << 16 | (uint32_t)(layer + 1);
    __atomic_store_n(&word, x, __ATOMIC_RELAXED);
}

phase phase_get(int *layer) {
    uint32_t x = __atomic_load_n(&word, __ATOMIC_RELAXED);
    *layer = (int)(x & 0xffff) - 1;
    return (phase)(x >> 16);
}

const char *phase_name(phase p) {
    static const char *const names[] = {"boot", "data", "fwd",  "bwd",    "opt",
                                        "comm", "eval", "save", "sample", "end"};
    return p <= PHASE_END ? names[p] : "unknown";
}

uint32_t *phase_word(void) {
    return &word;
}

/* phase.c - see phase.h. */
#include "base/phase.h"

static uint32_t own;
static uint32_t *word = &own;

void phase_set(phase p, int layer) {
    uint32_t x = (uint32_t)p << 16 | (uint32_t)(layer + 1);
    __atomic_store_n(phase_word(), x, __ATOMIC_RELAXED);
}

phase phase_get(int *layer) {
    uint32_t x = __atomic_load_n(phase_word(), __ATOMIC_RELAXED);
    *layer = (int)(x & 0xffff) - 1;
    return (phase)(x >> 16);
}

const char *phase_name(phase p) {
    static const char *const names[] = {"boot", "data", "fwd",  "bwd",    "opt",
                                        "comm", "eval", "save", "sample", "end"};
    return p <= PHASE_END ? names[p] : "unknown";
}

uint32_t *phase_word(void) {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

void phase_use(uint32_t *other) {
    uint32_t x = __atomic_load_n(phase_word(), __ATOMIC_RELAXED);
    if (!other) other = &own;
    __atomic_store_n(other, x, __ATOMIC_RELAXED);
    __atomic_store_n(&word, other, __ATOMIC_RELEASE);
}

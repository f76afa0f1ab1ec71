/* arena.c - handing out and counting. Twin: arena.h. */
#include "base/arena.h"

#include <stdint.h>

enum { ALIGN = 64 };

void *arena_take(arena *a, purpose p, size_t bytes) {
    size_t rounded = (bytes + ALIGN - 1) / ALIGN * ALIGN, at = a->used;
    a->used += rounded;
    a->by_purpose[p] += rounded;
    return a->base ? (void *)(a->base + at) : (void *)(uintptr_t)(ALIGN + at);
}

void arena_note(arena *a, purpose p, size_t bytes) {
    a->used += bytes;
    a->by_purpose[p] += bytes;
}

const char *purpose_name(purpose p) {
    static const char *const names[PURPOSES] = {
        "weights",   "gradients", "moments", "checkpoints",   "activations", "backward", "logits",
        "workspace", "batch",     "cache",   "communication", "snapshot",    "packed",
    };
    return names[p];
}

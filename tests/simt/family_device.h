/* family_device.h - the programs of examples/family on CUDA's kernels: device.h gives them nsa.h's
   names, and copies memory that is guarded.
   Twin: none. Not here: a method, or its check; the programs have both. */
#ifndef NSA_TESTS_SIMT_FAMILY_DEVICE_H
#define NSA_TESTS_SIMT_FAMILY_DEVICE_H

#include "../harness/device.h"

/* Zeros at 16 bytes' alignment, as rows that are read in bulk must lie. */
static inline void *allocate(size_t bytes) {
    guarded *g = guarded_new("memory", bytes, 0);
    guarded_poison(g, 0);
    memset(g->data, 0, bytes);
    return g->data;
}

/* Any buffer goes, not only the newest. */
static inline void release(void *memory) {
    guarded **at = &guards_live, *g;
    while (*at && (*at)->data != memory) at = &(*at)->next;
    if (!(g = *at)) return;
    if (!guarded_zones_intact(g)) exit(printf("a kernel wrote outside its buffer\n") ? 99 : 98);
    *at = g->next, g->next = guards_live, guards_live = g;
    guarded_drop();
}

#endif

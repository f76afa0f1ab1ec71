/* memory.h: device memory and a block's shared memory, with red zones and NaN fill.
   Twin: DRAM and the shared-memory arena. Not here: who may touch which byte when (checker.h). */
#ifndef SIMT_MEMORY_H
#define SIMT_MEMORY_H

#include "machine.h"

namespace simt {

constexpr size_t heap_bytes = size_t(32) << 30; /* address space; pages are taken when touched */
constexpr size_t arena_bytes = 256 * 1024;      /* what a shared-memory descriptor can address */

enum class region { none, global, shared };

/* Device allocations. Addresses are never reused while fresh ones are left. */
void *device_allocate(size_t bytes);                 /* nullptr: none left */
size_t device_live_bytes();                          /* that are allocated now */
bool device_free(void *pointer);                     /* false: not the start of an allocation */
bool device_owns(const void *address, size_t bytes); /* all bytes inside one live allocation */
const unsigned char *heap_start();
const unsigned char *arena_start();
region region_of(const void *address);
void drop_pages(void *start, size_t bytes); /* the whole ones: their bytes become 0 */
phrase describe(const void *address);       /* "12 bytes after the 4096 bytes allocated ..." */

/* Shared memory of the block under way. */
void shared_begin(size_t dynamic_bytes);
bool shared_end(phrase *damage); /* false: a red zone was written */
bool shared_owns(const void *address, size_t bytes);
bool global_red_zones(phrase *damage);

} // namespace simt

#endif

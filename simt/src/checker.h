/* checker.h: what the race, initialisation and bounds checker is told.
   Twin: compute-sanitizer's racecheck, initcheck, memcheck. Not here: plain loads and stores, which
   reach it through __tsan_* (tsan.cpp). In programs without those calls it is off. */
#ifndef SIMT_CHECKER_H
#define SIMT_CHECKER_H

#include "machine.h"

namespace simt {

extern bool checker_on;

/* Where an access stands: a program counter's offset in the program, or a place given by name. */
using code = uint32_t;
code code_of(site at);
code code_of_pc(const void *pc);
site place_of(code where);
site place_of_pc(code where);

enum class access { read, write, atomic };

/* One access by the current thread; ends the launch if it is wrong. */
void check_access(access kind, const void *address, size_t bytes, code where);

/* Order. */
void check_block_begin();
void check_launch_begin();
void check_syncwarp(const warp &w, uint32_t mask);
void check_barrier_arrive(const barrier &b, int id);
void check_barrier_complete(const barrier &b, int id);
/* `clock` has a number for each thread: what is ordered before whoever acquires it. */
void check_release(uint32_t *clock, const thread &t);
void check_acquire(const uint32_t *clock, const thread &t);

/* Memory comes, goes, is written by the host. */
void check_allocate(const void *start, size_t bytes);
void check_free(const void *start, size_t bytes);
void check_host_write(const void *start, size_t bytes);
void check_host_copy(const void *to, const void *from, size_t bytes);

/* cp.async: from issue to landing nobody may touch the target. */
void check_async_issue(const void *to, size_t bytes, const void *from, size_t valid, site at);
void check_async_land(const void *to, size_t bytes, const void *from, size_t valid, site at);

/* Bulk copies and wgmma go another way to memory than loads and stores: what was stored must have
   passed a fence.proxy.async. A bulk copy into shared memory has an epoch of its own. */
void check_fence_async();
void check_async_read(const void *address, size_t bytes, site at);
uint32_t check_bulk_epoch();
void check_bulk_issue(const void *to, const void *from, size_t bytes, site at);
void check_bulk_issued();
void check_bulk_land(const void *to, size_t bytes, int thread, uint32_t epoch, site at);
/* How many asynchronous readers a byte of shared memory has: it must not be written. */
void check_hold(const void *address, size_t bytes, int change, site at);

/* Loads that may be served from a cache which this launch's stores do not reach. */
void check_read_only(const void *address, size_t bytes, site at);

inline void check_access_if_on(access kind, const void *address, size_t bytes, site at) {
    if (checker_on) check_access(kind, address, bytes, code_of(at));
}
inline void check_read(const void *address, size_t bytes, site at) {
    if (checker_on) check_access(access::read, address, bytes, code_of(at));
}
inline void check_atomic(const void *address, size_t bytes, site at) {
    if (checker_on) check_access(access::atomic, address, bytes, code_of(at));
}

} // namespace simt

#endif

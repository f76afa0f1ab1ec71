/* checker.h: what the race, initialisation and bounds checker is told.
   Twin: none. Not here: plain loads and stores, which reach it through __tsan_*. */
#ifndef SIMT_CHECKER_H
#define SIMT_CHECKER_H

#include "machine.h"

namespace simt {

inline void check_syncwarp(const warp &, uint32_t) {}
inline void check_barrier_arrive(const barrier &, int) {}
inline void check_barrier_complete(const barrier &) {}
inline void check_async_issue(void *, size_t, const void *, size_t, site) {}
inline void check_async_land(void *, size_t, site) {}
inline void check_allocate(const void *, size_t) {}
inline void check_free(const void *, size_t) {}
inline void check_shared_begin(const void *, size_t) {}
inline void check_atomic(const void *, size_t, site) {}
inline void check_read(const void *, size_t, site) {}

} // namespace simt

#endif

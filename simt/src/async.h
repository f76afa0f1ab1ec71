/* async.h: what goes on while threads do other things: cp.async, bulk copies, wgmma, and the
   barriers in memory that tell of it. Twin: the asynchronous units of sm_80 and sm_90.
   Not here: what kernels call (nsa_simt.h). */
#ifndef SIMT_ASYNC_H
#define SIMT_ASYNC_H

#include "machine.h"

namespace simt {

void async_begin();    /* a block starts: nothing is under way */
bool async_progress(); /* no thread can run: lands what needs no thread; true if anything did */
void async_chance();   /* a schedule's choice: at random, something lands now */
void async_end();      /* the block is over: what is still under way is an error */

void cp_async_begin();
void cp_async_end();

void mbarrier_begin();
void mbarrier_check(uint64_t *bar, const char *name, site at);
/* Copies bring `bytes`; what `thread` did up to `epoch` is then ordered before those who wait. */
void mbarrier_complete(uint64_t *bar, int64_t bytes, int thread, uint32_t epoch, site at);
phrase mbarrier_describe(const void *bar); /* what it still waits for */

void bulk_begin();
bool bulk_land_one();
void bulk_end();

void wgmma_begin();
void wgmma_end();

} // namespace simt

#endif

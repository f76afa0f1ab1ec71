/* async.h: copies under way: cp.async groups. Twin: the asynchronous copy units.
   Not here: bulk copies and mbarriers (hopper.cpp). */
#ifndef SIMT_ASYNC_H
#define SIMT_ASYNC_H

namespace simt {

void async_begin();    /* a block starts: nothing is under way */
bool async_progress(); /* no thread can run: lands what needs no thread; true if anything did */
void async_end();      /* the block is over: copies still under way are an error */

} // namespace simt

#endif

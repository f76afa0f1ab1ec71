/* all.h - the files of nsa.h in their order; scripts/amalgamate.py writes nsa/nsa.h by it.
   Twin: nsa_cuda.cuh. Not here: code. */
#include "api.h"
#include "shared.h"
#include "views.h"

/* ==== Implementation ============================================================================

   A section is a file of nsa/src, which includes what it uses; so it uses only sections above it.
   Public functions check their arguments; below them every argument is trusted.

   Words, each with one meaning:

     arena         workspace that is handed out from its start; without a base it only counts bytes
     batch         the queries of a task that go through one tile at once
     branch        cmp, slc, win or dense: an attention over its own set of keys
     entry point   a public function: it checks the descriptor and every view once
     group         the query heads that share one kv head
     head job      state of one branch for one (sequence, kv head): packed keys, sums, tiles
     in place      K and V are read from the caller's memory, unpacked
     layout        the function that hands out an arena to head jobs; a size query runs it too
     list          the selection blocks of a query and kv head, ascending, -1 behind the last
     listed        named by at least one list of the queries at hand
     nonfinite     a mask or flag of rows with an infinity or NaN; they are computed as zeros
     packed        copied to workspace by tile, as rows of whole vectors or transposed
     plan          what is constant in a call: geometry, tile sizes, bytes of workspace
     row           the dim or dim_v numbers of one token and head
     sequence      one of the batch; begins gives its rows if lengths vary
     shrink        what earlier sums of a row are multiplied by when its maximum grows
     span          keys begin .. end - 1 that a query sees
     stencil       weights of the compressed blocks around a selection block, Eq. 9
     task          queries of one head that a thread computes from end to end
     task slot     memory of a backward task between its steps
     team          the threads of a call, each with its scratch
     tile          up to 64 neighbouring keys; also the functions that compute with them
     tile queries  the queries of a task that see a key of the current tile */
#if defined(NSA_IMPLEMENTATION) && !defined(NSA__IMPLEMENTED)
#define NSA__IMPLEMENTED

#include "system.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "numbers.h"
#include "index.h"
#include "isa.h"
#include "checks.h"
#include "sequences.h"
#include "threads.h"
#include "index_arrays.h"
#include "tiles.h"
#include "rope.h"
#include "gate.h"
#include "compress.h"
#include "lists.h"
#include "schedule.h"
#include "operand.h"
#include "attend_plan.h"
#include "attend_tiles.h"
#include "prefetch.h"
#include "attend_pack.h"
#include "attend_in_place.h"
#include "attend_rows.h"
#include "select_scores.h"
#include "attend_forward.h"
#include "attend_backward.h"
#include "attend.h"
#include "merge.h"
#include "select.h"
#include "score.h"
#include "score_lists.h"
#include "attention.h"
#include "decode.h"

#ifdef __cplusplus
}
#endif

#endif /* NSA_IMPLEMENTATION */

/* MIT License

   Copyright (c) 2026 The nsa authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute,
   sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or
   substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
   NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */

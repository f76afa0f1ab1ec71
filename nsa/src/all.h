/* all.h - the files of nsa.h in their order; scripts/amalgamate.py writes nsa/nsa.h by it.
   Twin: nsa_cuda.cuh. Not here: code. */
#include "api.h"
#include "shared.h"
#include "views.h"

/* ==== Implementation ============================================================================

   A section is a file of nsa/src, which includes what it uses; so it uses only sections above it.
   Public functions check their arguments; below them every argument is trusted.

   CONTRIBUTING.md has the words, each with one meaning. */
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
#include "attend_split.h"
#include "attend_forward_run.h"
#include "attend_backward.h"
#include "attend.h"
#include "merge.h"
#include "score.h"
#include "score_lists.h"
#include "attention.h"
#include "decode.h"

#ifdef __cplusplus
}
#endif

#endif /* NSA_IMPLEMENTATION */

/* ---- Attention: prefetching ---------------------------------------------------------------------
   Twin: kernels/load.cuh. Not here: how far ahead (schedule.h).
   Rows of one head are a row of all heads apart, which is further than the hardware prefetches. Who
   goes through such rows takes them from a walker, which prefetches the row that comes later. */
#pragma once
#include "attend_tiles.h"

/* Row r of a task's queries in x. */
static void *nsa__query_row(const nsa__head_job *job, const nsa__tile_iter *it, const nsa_tensor *x,
                            int r) {
    const nsa__attend_plan *p = job->plan;
    return nsa__row(x, job->seq.batch, job->seq.row + it->first - job->seq.first + r / p->group,
                    job->head * p->group + r % p->group);
}

/* The same of each r in turn; the row NSA__ROWS_AHEAD behind it is prefetched. */
static void *nsa__walk_queries(const nsa__head_job *job, const nsa__tile_iter *it,
                               const nsa_tensor *x, int width, int r) {
    const int later = r + NSA__ROWS_AHEAD;
    if (later < it->queries * job->plan->group)
        nsa__fetch(nsa__query_row(job, it, x, later), nsa__row_bytes(x, width));
    return nsa__query_row(job, it, x, r);
}

/* The row of x of each key up to end - 1 in turn. */
static void *nsa__walk_keys(const nsa__head_job *job, const nsa_tensor *x, int width, int key,
                            int end) {
    const int later = key + NSA__ROWS_AHEAD;
    if (later < end) nsa__fetch(nsa__key(job, x, later), nsa__row_bytes(x, width));
    return nsa__key(job, x, key);
}

/* Prefetches rows begin .. end - 1 of x, as far as there are keys. They are read in place some
   thousand cycles later, and into L1 they would drive out what is read now. */
static void nsa__fetch_rows(const nsa__head_job *job, const nsa_tensor *x, int begin, int end,
                            int width) {
    const ptrdiff_t bytes = (ptrdiff_t)nsa__dtype_bytes(x->dtype);
    end = (int)nsa__min(end, job->keys);
    for (int some; begin < end; begin += some) {
        const char *at = (const char *)nsa__key(job, x, begin);
        some = (int)nsa__min(end - begin, nsa__rows_together(&job->rows, begin));
        for (int r = 0; r < some; r++) {
            if (r) at += (ptrdiff_t)x->token * bytes; /* of one row it may be anything */
            nsa__fetch_l2(at, nsa__row_bytes(x, width));
        }
    }
}

/* Adds the lines of n rows of x from key `begin` on, as far as there are keys. Returns their end,
   or NULL if less than a piece's rows follow each other. */
static nsa__lines *nsa__add_lines(nsa__lines *to, const nsa__head_job *job, const nsa_tensor *x,
                                  int width, int begin, int n) {
    const ptrdiff_t bytes = (ptrdiff_t)nsa__row_bytes(x, width);
    const int end = (int)nsa__min((int64_t)begin + n, job->keys);
    const ptrdiff_t number = (ptrdiff_t)nsa__dtype_bytes(x->dtype);
    if (end - begin > 1 && (ptrdiff_t)x->token * number != bytes) return NULL;
    for (int some; begin < end; begin += some, to++) {
        some = (int)nsa__min(end - begin, nsa__rows_together(&job->rows, begin));
        if (some < end - begin && some < NSA__KEYS_AT_ONCE) return NULL;
        to->at = (const char *)nsa__key(job, x, begin);
        to->n = (int)nsa__ceil_div(some * bytes, 64);
    }
    return to;
}

/* ---- Attention: prefetching ---------------------------------------------------------------------
   Twin: kernels/load.cuh. Not here: how far ahead (schedule.h), lists (attend_tiles.h), when a
   product asks (tiles.inl). Rows of one head are a row of all heads apart, which is further than
   the hardware prefetches; packed keys of a long sequence are more than the caches hold. */
#pragma once
#include "attend_tiles.h"

/* Row r of a task's queries in x. */
static void *nsa__query_row(const nsa__head_job *job, const nsa__tile_iter *it, const nsa_tensor *x,
                            int r) {
    const nsa__attend_plan *p = job->plan;
    return nsa__row(x, job->seq.batch, job->seq.row + it->first - job->seq.first + r / p->group,
                    job->head * p->group + r % p->group);
}

/* Prefetches the row of x that comes NSA__ROWS_AHEAD behind row r of a task's queries. */
static void nsa__fetch_query(const nsa__head_job *job, const nsa__tile_iter *it,
                             const nsa_tensor *x, int width, int r) {
    const int later = r + NSA__ROWS_AHEAD;
    if (later < it->queries * job->plan->group)
        nsa__fetch(nsa__query_row(job, it, x, later), (size_t)width * nsa__dtype_bytes(x->dtype));
}

/* The same behind row `key` of x, of keys up to end - 1. */
static void nsa__fetch_key(const nsa__head_job *job, const nsa_tensor *x, int width, int key,
                           int end) {
    const int later = key + NSA__ROWS_AHEAD;
    if (later < end)
        nsa__fetch(nsa__key(job, x, later), (size_t)width * nsa__dtype_bytes(x->dtype));
}

/* Prefetches rows begin .. end - 1 of x, as far as there are keys. */
static void nsa__fetch_rows(const nsa__head_job *job, const nsa_tensor *x, int begin, int end,
                            int width) {
    size_t bytes = nsa__dtype_bytes(x->dtype);
    end = (int)nsa__min(end, job->keys);
    for (int some; begin < end; begin += some) {
        const char *at = (const char *)nsa__key(job, x, begin);
        some = (int)nsa__min(end - begin, nsa__rows_together(&job->rows, begin));
        for (int r = 0; r < some; r++) {
            if (r) at += (ptrdiff_t)x->token * (ptrdiff_t)bytes; /* of one row it may be anything */
            nsa__fetch(at, (size_t)width * bytes);
        }
    }
}

/* K or V. */
static const nsa_tensor *nsa__operand_view(const nsa__head_job *job, const nsa__operand *o) {
    return o == &job->plan->k ? &job->plan->x->k : &job->plan->x->v;
}

/* Before row r of a tile of k or v is packed, asks for the row that is packed cut.pack_ahead later:
   of the same, or behind k's last one of v. Negative r ask for the first rows. */
static void nsa__pack_ask(const nsa__head_job *job, const nsa__operand *o, int tile_begin, int r) {
    const nsa__attend_plan *p = job->plan;
    const int ahead = r + p->cut.pack_ahead, later = ahead >= p->cut.tile;
    const int64_t key = (int64_t)tile_begin + ahead - (later ? p->cut.tile : 0);
    if (later && (o == &p->v || !(job->v || job->v_t))) return;
    if (later) o = &p->v;
    if (key >= job->keys) return;
    const nsa_tensor *x = nsa__operand_view(job, o);
    nsa__fetch(nsa__key(job, x, (int)key), (size_t)o->width * nsa__dtype_bytes(x->dtype));
}

/* Pieces that so many numbers take. */
static int nsa__asks_of(int64_t numbers) {
    return (int)nsa__ceil_div(numbers * (int64_t)sizeof(nsa_real), NSA__ASKED);
}

/* Room for what a batch asks for, at most: rows of q and dout of the next one, and three times a
   tile's rows of k and v. */
static void nsa__asks_alloc(nsa__asks *asks, const nsa__attend_plan *p, nsa__arena *a) {
    int64_t rows = (int64_t)p->cut.batch_queries * p->group + 3 * p->cut.tile;
    asks->room = rows * (nsa__asks_of(p->k.wide) + nsa__asks_of(p->v.wide));
    asks->at = (const char **)nsa__alloc(a, asks->room, sizeof *asks->at);
}

/* Notes numbers from x on as needed soon. */
static void nsa__ask(nsa__asks *asks, const nsa_real *x, int64_t numbers) {
    const int most = (int)nsa__min(nsa__asks_of(numbers), asks->room - asks->count);
    for (int i = 0; i < most; i++)
        asks->at[asks->count++] = (const char *)x + (ptrdiff_t)i * NSA__ASKED;
}

/* Whether keys, values and the sums of their gradients, of all heads at once, are more. */
static int nsa__keys_are_far(const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    const int64_t numbers = 3 * (int64_t)p->k.wide + 2 * (int64_t)p->v.wide; /* of a key */
    return job->keys * numbers * (int64_t)sizeof(nsa_real) * p->cut.head_slots > NSA__FAR;
}

/* ---- Attention: keys packed by tile -------------------------------------------------------------
   Twin: none. Not here: keys that are not copied (attend_in_place.h). */
#pragma once
#include "prefetch.h"

/* Workspace that the threads share: packed keys of one sequence and kv head, of k and v alike.
     rows_over  one row a key: element (key, c) at key wide + c
     columns    tile by tile transposed: element (key, c) at (key / tile dim + c) tile + key % tile
       | tile 0: c = 0 of its keys | c = 1 of its keys | ... | tile 1: c = 0 of its keys | ...
   A right operand has contiguous rows, so q k^T reads columns of k and p v reads rows of v.
   Backward reads columns of v for dout v^T and rows of k for ds k. Pairs of bf16 pair the index
   that the product sums over: an element of columns is two neighbouring c of a key, and one of
   rows_over is c of two neighbouring keys. Returns how many keys there is room for. */
static int64_t nsa__alloc_keys(nsa__head_job *job, nsa__arena *a) {
    const nsa__attend_plan *p = job->plan;
    const int64_t tiles = nsa__ceil_div(nsa__max_keys(p), p->cut.tile);
    job->nonfinite = (uint64_t *)nsa__alloc(a, tiles, sizeof *job->nonfinite);
    if (p->is.lists) job->listed = (unsigned char *)nsa__alloc(a, tiles, 1);
    job->columns[NSA__OF_K] = nsa__alloc_reals(a, tiles * p->cut.tile * p->d->dim);
    return tiles * p->cut.tile;
}

/* Clears a tile's sums of the gradient. Heads that share a kv head add to the same ones, one after
   another: the first clears them, the last adds them to dx. */
static void nsa__key_gradient_clear(const nsa__head_job *job, ptrdiff_t tile) {
    const nsa__attend_plan *p = job->plan;
    if (!job->nonfinite_keys || job->head % p->lists_per_kv_head) return;
    job->nonfinite_keys[tile] = 0;
    for (int i = 0; i < 2; i++) {
        const ptrdiff_t numbers = (ptrdiff_t)p->cut.tile * nsa__operand_at(p, i)->wide;
        nsa_real *sum = job->sum[i];
        if (sum) memset(sum + tile * numbers, 0, (size_t)numbers * sizeof *sum);
    }
}

/* Key `key` of packed rows, or the pair that begins with it. */
static nsa__packed *nsa__packed_rows(const nsa__head_job *job, int i, ptrdiff_t key) {
    const nsa__operand *o = nsa__operand_at(job->plan, i);
    return job->rows_over[i] ? job->rows_over[i] + nsa__rows_over(o, key) * o->wide : NULL;
}

/* Column `key` of a transpose. The columns behind it in its tile follow; rows are a tile apart. */
static nsa__packed *nsa__packed_columns(const nsa__head_job *job, int i, ptrdiff_t key) {
    const int tile = job->plan->cut.tile, depth = nsa__operand_at(job->plan, i)->depth;
    return job->columns[i] ? job->columns[i] + key / tile * tile * depth + key % tile : NULL;
}

/* Packs the keys of a tile from key `begin` on, or their values, as the layout has given memory, as
   many rows at a time as a transpose takes. Rows behind the last key, and non-finite ones, are
   zeros: products then need no short tiles. Returns the mask of the non-finite ones. Numbers are
   loaded where they stay; rows that become pairs, or are transposed alone, into `room`, which has
   place for NSA__LANES of them. */
static uint64_t nsa__pack(const nsa__head_job *job, int nth, int begin, nsa_real *room) {
    const nsa__attend_plan *p = job->plan;
    const nsa__operand *o = nsa__operand_at(p, nth);
    const nsa_tensor *x = nth == NSA__OF_K ? &p->x->k : &p->x->v;
    const int tile = p->cut.tile, end = (int)nsa__min((int64_t)begin + tile, job->keys);
    uint64_t nonfinite = 0;
    for (int first = 0; first < tile; first += NSA__LANES) {
        nsa__packed *rows = nsa__packed_rows(job, nth, begin + first);
        nsa__packed *columns = nsa__packed_columns(job, nth, begin + first);
        nsa_real *loaded = rows && nsa__takes_reals(o) ? rows : room;
        const nsa__matrix by_key = {loaded, o->stride, 1, NULL};
        unsigned char bad[NSA__LANES] = {0};
        for (int i = 0, key = begin + first; i < NSA__LANES; i++) {
            nsa_real *row = loaded + (ptrdiff_t)i * o->stride;
            if (key + i >= end)
                memset(row, 0, (size_t)o->stride * sizeof *row);
            else
                bad[i] = !nsa__copy_row(o, row, x, nsa__walk_keys(job, x, o->width, key + i, end));
        }
        nsa__zero_nonfinite(o, NSA__LANES, loaded, bad);
        for (int i = 0; i < NSA__LANES; i++) nonfinite |= (uint64_t)bad[i] << (first + i);
        if (columns) o->tiles->transpose(NSA__LANES, o->depth, o->stride, loaded, tile, columns);
        if (rows) nsa__rows_for_over(o, NSA__LANES, by_key, rows);
        if (job->listed_rows[nth])
            memcpy(job->listed_rows[nth] + ((ptrdiff_t)begin + first) * o->stride, loaded,
                   (size_t)NSA__LANES * (size_t)o->stride * sizeof *loaded);
    }
    return nonfinite;
}

/* A thread's scratch, of which a task takes `task` bytes and packing some rows. */
static size_t nsa__pack_scratch(const nsa__attend_plan *p, size_t task) {
    nsa__arena rows = {NULL, 0};
    nsa__alloc_reals(&rows, (int64_t)NSA__LANES * nsa__max(p->k.wide, p->v.wide));
    return nsa__larger(task, rows.used);
}

/* Packs one tile of one head. Without values there is nothing to pack of them. */
static void nsa__pack_task(const void *context, int64_t nth, void *scratch) {
    const nsa__head_job *job = nsa__job_of(context, &nth);
    const ptrdiff_t tile = job->tile_begin + (ptrdiff_t)nth;
    const int begin = (int)tile * job->plan->cut.tile;
    nsa__key_gradient_clear(job, tile);
    if (job->listed && !job->listed[tile]) return;
    job->nonfinite[tile] = nsa__pack(job, NSA__OF_K, begin, (nsa_real *)scratch);
    if (job->rows_over[NSA__OF_V] || job->columns[NSA__OF_V])
        job->nonfinite[tile] |= nsa__pack(job, NSA__OF_V, begin, (nsa_real *)scratch);
}

/* Marks the tiles that any list names, because a few queries of a long cache read few tiles.
   Every tile is marked, and no list is read, if there are at least as many queries as tiles.
   Every tile is marked too if heads share a kv head, because dk and dv then sum over the lists
   of all of them. */
static void nsa__mark_listed(const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    int begin, end, many = p->lists_per_kv_head > 1 || job->seq.count >= job->tile_end;
    memset(job->listed, many, (size_t)job->tile_end);
    if (many) return;
    for (int query = job->seq.first; query < job->seq.first + job->seq.count; query++) {
        const int32_t *list = nsa__block_list(job, query);
        const int seen = nsa__span_end(job, query);
        for (int i = 0; nsa__span(p, list, seen, i, &begin, &end); i++) {
            int first = begin / p->cut.tile, tiles = (end - 1) / p->cut.tile - first + 1;
            memset(job->listed + first, 1, (size_t)tiles);
        }
    }
}

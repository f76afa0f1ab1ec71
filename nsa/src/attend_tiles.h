/* ---- Attention: tile iteration ------------------------------------------------------------------
   Twin: kernels/attend_keys.cuh. Not here: what is computed with a tile. */
#pragma once
#include "attend_plan.h"

/* Bits begin .. end - 1 of a tile's mask. */
static uint64_t nsa__bits(int begin, int end) {
    int n = end - begin;
    return n <= 0 ? 0 : (n >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1) << begin;
}

/* Ones of a mask, without a builtin: of two bits each, then of four, then of all bytes. */
static int nsa__bit_count(uint64_t mask) {
    const uint64_t two = ~(uint64_t)0 / 3, four = ~(uint64_t)0 / 5, bytes = ~(uint64_t)0 / 255;
    mask -= mask >> 1 & two;
    mask = (mask & four) + (mask >> 2 & four);
    return (int)(((mask + (mask >> 4)) & 15 * bytes) * bytes >> 56);
}

/* The first entry of a list that is `block` or more; -1, as the largest number, is behind all. */
static int nsa__first_listed(const int32_t *list, int n, int block) {
    int low = 0;
    for (int half = n / 2; n > 0; half = n / 2) {
        const int before = (uint32_t)list[low + half] < (uint32_t)block;
        low += before ? half + 1 : 0;
        n = before ? n - half - 1 : half;
    }
    return low;
}

/* The keys tile_begin .. tile_begin + tile - 1 that `query` sees, as a mask. */
static uint64_t nsa__visible(const nsa__head_job *job, int query, int tile_begin) {
    const nsa__attend_plan *p = job->plan;
    const int32_t *list = nsa__block_list(job, query);
    int begin, end;
    int64_t tile_end = (int64_t)tile_begin + p->cut.tile;
    const int first = tile_begin / p->d->slc_block, seen = nsa__span_end(job, query); /* block */
    uint64_t mask = 0;
    for (int i = nsa__first_listed(list, p->list_width, first);
         nsa__span(p, list, seen, i, &begin, &end) && begin < tile_end; i++)
        mask |= nsa__bits((int)nsa__max(begin, tile_begin) - tile_begin,
                          (int)nsa__min(end, tile_end) - tile_begin);
    return mask;
}

/* Makes `own` the job of one query, whose keys are counted along its list. A block is whole but for
   the last one. */
static const nsa__head_job *nsa__gather(nsa__head_job *own, const nsa__head_job *job, int query) {
    const nsa__attend_plan *p = job->plan;
    const int32_t *list = nsa__block_list(job, query);
    const int n = nsa__first_listed(list, p->list_width, INT_MAX);
    int begin = 0, end = 0;
    if (n) nsa__span(p, list, nsa__span_end(job, query), n - 1, &begin, &end);
    *own = *job;
    own->rows.list = list;
    own->rows.list_block = p->d->slc_block;
    own->keys = n ? (n - 1) * p->d->slc_block + end - begin : 0;
    own->tile_end = (int)nsa__ceil_div(own->keys, p->cut.tile);
    return own;
}

/* Whether a tile's queries are found by the lists. */
static int nsa__inverts(const nsa__head_job *job) {
    return job->plan->is.lists && !job->gathers;
}

/* A task iterates over the tiles that any of its queries sees. Queries count from 0 in their task;
   rows are query-major: row a group + g is query head g of query a. */
typedef struct nsa__tile_iter {
    int first, queries; /* positions first .. first + queries - 1 */
    int tile, tile_end; /* the current tile, and the end of those that there are */
    int tile_queries;   /* how many queries see any key of the current tile */
    int *tile_query;    /* these queries, ascending */
    uint64_t *mask;     /* for each of them the keys of the tile that it sees */
    int *row;           /* the rows of a batch of them */
    int *list;          /* slc: the queries of each tile, one tile after the other */
    int *list_begin;    /* slc: those of tile i are list[list_begin[i] .. list_begin[i + 1]) */
} nsa__tile_iter;

/* What holds for one tile comes from `of_tile`, the thread's scratch; the rest from `a`, which
   keeps its content as long as the task lasts. A listed block touches at most l' / tile + 2 tiles,
   or exactly l' / tile if tiles divide blocks. */
static void nsa__tile_iter_alloc(nsa__tile_iter *it, const nsa__attend_plan *p, nsa__arena *a,
                                 nsa__arena *of_tile) {
    it->tile_query = (int *)nsa__alloc(of_tile, p->cut.task_queries, sizeof *it->tile_query);
    it->mask = (uint64_t *)nsa__alloc(of_tile, p->cut.task_queries, sizeof *it->mask);
    it->row = (int *)nsa__alloc(of_tile, (int64_t)p->cut.batch_queries * p->group, sizeof *it->row);
    if (!p->is.lists) return;
    int64_t tiles = nsa__ceil_div(p->d->tokens, p->cut.tile);
    int64_t of_block = p->d->slc_block / p->cut.tile + (p->cut.tile_in_block ? 0 : 2);
    int64_t of_query = nsa__min(p->list_width * of_block, tiles);
    it->list_begin = (int *)nsa__alloc(a, tiles + 2, sizeof *it->list_begin);
    it->list = (int *)nsa__alloc(a, p->cut.task_queries * of_query, sizeof *it->list);
}

/* The list of each query of a task in turn; the one NSA__ROWS_AHEAD behind it is prefetched. */
static const int32_t *nsa__walk_lists(const nsa__head_job *job, const nsa__tile_iter *it, int a) {
    const int later = a + NSA__ROWS_AHEAD;
    if (later < it->queries)
        nsa__fetch(nsa__block_list(job, it->first + later),
                   (size_t)job->plan->list_width * sizeof(int32_t));
    return nsa__block_list(job, it->first + a);
}

/* A pass over the lists: counts the queries of tile i in at[i + 1], or, to fill the tiles, writes
   each query at at[i] and moves that on. Inlined with a constant `fill`, so that the innermost loop
   has no test of it. */
NSA__INLINE void nsa__tile_iter_pass(nsa__tile_iter *it, const nsa__head_job *job, int *at,
                                     int fill) {
    const nsa__attend_plan *p = job->plan;
    const int log2 = p->cut.tile_log2;
    for (int a = 0; a < it->queries; a++) {
        const int32_t *list = nsa__walk_lists(job, it, a);
        const int seen = nsa__span_end(job, it->first + a);
        int begin, end, next = 0; /* the first tile that this query has not been counted for */
        for (int i = 0; nsa__span(p, list, seen, i, &begin, &end); i++) {
            int tile = begin >> log2 > next ? begin >> log2 : next;
            next = ((end - 1) >> log2) + 1;
            for (; tile < next; tile++) {
                if (fill)
                    it->list[at[tile]++] = a;
                else
                    at[tile + 1]++;
            }
        }
    }
}

/* Inverts the block lists: for each tile the queries that list it, ascending. A counting sort in
   two passes over the lists. After the first, sums make at[i] the place where tile i begins; the
   second moves it on, so that list_begin[i + 1], the same number, ends where tile i ends. */
static void nsa__tile_iter_invert(nsa__tile_iter *it, const nsa__head_job *job) {
    int *at = it->list_begin + 1; /* of each tile, its next free place */
    memset(it->list_begin, 0, (size_t)(job->tile_end + 2) * sizeof *at);
    nsa__tile_iter_pass(it, job, at, 0);
    for (int tile = 0; tile < job->tile_end; tile++) at[tile + 1] += at[tile];
    nsa__tile_iter_pass(it, job, at, 1);
}

/* The end of the keys that a query sees, or of those that it gathers. */
static int nsa__keys_end(const nsa__head_job *job, int query) {
    return job->gathers ? job->keys : nsa__span_end(job, query);
}

/* Starts before the first tile of a task. Spans grow with the query (nsa__span_begin,
   nsa__span_end), so the first query's begin and the last query's end bound the tiles of a task
   without lists. A query sees each of them, unless all queries are behind the keys. */
static void nsa__tile_iter_begin(nsa__tile_iter *it, const nsa__head_job *job, int64_t task) {
    const nsa__attend_plan *p = job->plan;
    const int64_t from = task * job->task_queries;
    it->first = job->seq.first + (int)from;
    it->queries = (int)nsa__min(job->task_queries, job->seq.count - from);
    it->tile = job->tile_begin - 1;
    it->tile_end = job->tile_end;
    if (nsa__inverts(job)) {
        nsa__tile_iter_invert(it, job);
        return;
    }
    const int begin = nsa__span_begin(p, it->first);
    const int end = nsa__keys_end(job, it->first + it->queries - 1);
    it->tile = begin / p->cut.tile - 1;
    it->tile_end = begin < end ? (int)nsa__ceil_div(end, p->cut.tile) : 0;
}

/* Finds the queries that see a key of the current tile, and their masks. With lists the inverted
   lists name the queries. Where a tile does not lie in one block, the blocks of a query's list cut
   it; elsewhere only the ends of the query's span do. */
static void nsa__tile_iter_read(nsa__tile_iter *it, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    int begin = it->tile * p->cut.tile, listed = nsa__inverts(job);
    int n = listed ? it->list_begin[it->tile + 1] - it->list_begin[it->tile] : it->queries;
    const int *readers = listed ? it->list + it->list_begin[it->tile] : NULL;
    it->tile_queries = 0;
    for (int i = 0; i < n; i++) {
        int a = listed ? readers[i] : i, query = it->first + a;
        uint64_t mask;
        if (listed && !p->cut.tile_in_block)
            mask = nsa__visible(job, query, begin);
        else
            mask =
                nsa__bits((int)nsa__max(nsa__span_begin(p, query) - begin, 0),
                          (int)nsa__min((int64_t)nsa__keys_end(job, query) - begin, p->cut.tile));
        if (!mask) continue;
        it->tile_query[it->tile_queries] = a;
        it->mask[it->tile_queries++] = mask;
    }
}

/* The next tile that any query of the task sees; tile_end or more if there is none. */
static int nsa__tile_iter_peek(const nsa__tile_iter *it, const nsa__head_job *job) {
    int tile = it->tile + 1;
    if (nsa__inverts(job))
        while (tile < it->tile_end && it->list_begin[tile] == it->list_begin[tile + 1]) tile++;
    return tile;
}

/* Goes up to that tile and reads it. Returns 0 if there is none. */
static int nsa__tile_iter_next(nsa__tile_iter *it, const nsa__head_job *job) {
    it->tile = nsa__tile_iter_peek(it, job);
    if (it->tile >= it->tile_end) return 0;
    nsa__tile_iter_read(it, job);
    return 1;
}

/* Queries that go through a tile at once. In place they are neighbours, because there their rows
   are columns of one matrix. */
typedef struct nsa__batch {
    int queries, rows;
    const int *query;     /* which of the task's queries, ascending */
    const uint64_t *mask; /* for each query the keys of the tile that it sees */
    const int *row;       /* which of the task's rows */
    int begin, end;       /* keys of the tile that any of them sees, in whole vectors */
    int key, present; /* key `begin` of the tile is the sequence's `key`; the keys that there are */
    int next_key;     /* the first of the tile that the task iterates to next; or all keys */
} nsa__batch;

/* The batch that begins with tile query `from`. Keys that none of its queries sees are cut off at
   both ends in whole vectors, because windows and diagonals leave much of a tile unseen. Every mask
   has a bit, so the loops end. Cut keys would add p = 0, and a key keeps its lane of the partial
   sums, so the cut changes no bit. */
static nsa__batch nsa__batch_at(const nsa__tile_iter *it, const nsa__head_job *job, int from) {
    const nsa__attend_plan *p = job->plan;
    nsa__batch b = {0, 0, it->tile_query + from, it->mask + from, it->row, 0, p->cut.tile, 0, 0, 0};
    int most = (int)nsa__min(p->cut.batch_queries, it->tile_queries - from);
    const int next = nsa__tile_iter_peek(it, job);
    uint64_t seen = 0;
    for (; b.queries < most; b.queries++) {
        int a = b.query[b.queries];
        if (job->in_place && a != b.query[0] + b.queries) break;
        for (int g = 0; g < p->group; g++) it->row[b.rows++] = a * p->group + g;
        seen |= b.mask[b.queries];
    }
    while (!(seen >> b.begin & 0xffff)) b.begin += NSA__LANES;
    while (!(seen >> (b.end - NSA__LANES) & 0xffff)) b.end -= NSA__LANES;
    b.key = it->tile * p->cut.tile + b.begin;
    b.present = (int)nsa__min(b.end - b.begin, job->keys - (int64_t)b.key);
    b.next_key = next < it->tile_end ? next * p->cut.tile : job->keys;
    return b;
}

/* The batch as what its scores go to sees it. */
static nsa__scored nsa__batch_scored(const nsa__attend_plan *p, const nsa__batch *b) {
    const nsa__scored x = {b->rows, b->end - b->begin, p->group, b->begin, b->mask, b->row};
    return x;
}

/* ---- Attention: schedule ------------------------------------------------------------------------
   Twin: none. Not here: which keys a query sees (attend_plan.h), who runs tasks (threads.h).
   How the work of a branch is cut: keys into tiles, queries into batches and tasks, heads into
   those that run at once. Tiles, and backward's batches and tasks, decide the order of sums, and
   with it bits; they follow from the geometry alone. No bit depends on what threads decide
   (nsa__shared_tasks). */
#pragma once
#include "sequences.h"

/* The order is that of the gate's three weights. */
typedef enum nsa__branch { NSA__CMP, NSA__SLC, NSA__WIN, NSA__DENSE } nsa__branch;

/* What the branches differ in beside their spans (attend_plan.h). */
typedef struct nsa__traits {
    int uses;       /* of the descriptor's sizes of blocks: NSA__USES_CMP, NSA__USES_SLC */
    int lists;      /* a query's keys are those of a block list; tasks are large, see below */
    int compressed; /* keys are compressed blocks */
    int last_first; /* forward's tasks begin with the last queries */
} nsa__traits;

static const nsa__traits nsa__traits_of[] = {
    {NSA__USES_CMP, 0, 1, 0}, {NSA__USES_SLC, 1, 0, 1}, {0, 0, 0, 0}, {0, 0, 0, 1}};

/* All constants of how attention is cut and of what is prefetched, with the machine and what was
   measured there. Ratios are the time without it over that with it, or the speed of another value
   over that of this one; 12/12/64 are heads, kv heads and their width. bench/NOTES.md has all. */
enum {
    /* keys of a tile at most: a query's mask of it is a uint64_t */
    NSA__TILE = 64,
    /* rows of a batch, which share a tile's loads; Zen 5: 48 rows 0.99, 96 to 192 0.98 to 1.01 */
    NSA__BATCH_ROWS = 64,
    /* backward, of a batch's rows of q and dout; Zen 4, heads of 64: 1.02 */
    NSA__BATCH_NUMBERS = 1 << 14,
    /* of a task's rows of q and v, which L2 holds; Zen 3, 12/12/64: half 0.97, backward 0.94 */
    NSA__TASK_NUMBERS = 1 << 17,
    /* lists: times so many in a long sequence, at most; Zen 5, 64k: slc 1.25, backward 1.12 */
    NSA__GROWTH = 4,
    /* lists: keys that neighbours of a listed block add to what is multiplied, at most */
    NSA__BESIDE = 32,
    /* lists: tasks of NSA__HEADS_NEAR heads, about; 12/12/64: twice as many 0.96 */
    NSA__TASKS = 32,
    /* heads side by side, whose rows share pages; 12/12/64, 8k: cmp 1.23, win 1.20; 12 not more */
    NSA__HEADS_NEAR = 4,
    /* backward: shares of dk and dv that wait their turn; 64 threads, simulated: 0.18 to 0.44 */
    NSA__PENDING = 8,
    /* in place: keys of a product are a piece of its rows or some, and have about so many bytes,
       for what is prefetched before it must not fill the queue of misses; Zen 4, 64k, dense: twice
       the bytes 0.81 to 0.90, half 0.96 to 1.04; Zen 5, 128 wide: a third more 0.88. Of long rows
       they are some, lest a product wait for its own sums */
    NSA__KEYS_AT_ONCE = 8,
    NSA__KEYS_LEAST = 6,
    NSA__BYTES_AT_ONCE = 3072,
    /* a task by several threads: batches that one takes, at most; numbers of their sums, which L2
       holds; masks of the batches at hand; and how often a thread looks for work before it gives
       its core away, which another program may keep for milliseconds: Zen 4, one of two cores
       busy, 64k, none 0.1 */
    NSA__SPLIT_BATCHES = 4,
    NSA__SPLIT_NUMBERS = 1 << 15,
    NSA__SPLIT_MASKS = 256,
    NSA__SPLIT_LOOKS = 4096,
    /* scores of few queries: tiles of a task; see bench/NOTES.md */
    NSA__SCORED_TILES = 32,
    /* rows between a load and its prefetch; Zen 5: 8 rows 0.99, 32 0.95 */
    NSA__ROWS_AHEAD = 16
};

typedef struct nsa__schedule {
    int tile, tile_log2; /* keys of a tile, and its logarithm */
    int tile_in_block;   /* lists: every tile lies in one selection block */
    int batch_queries;   /* queries of a batch */
    int task_queries;    /* queries of a task, at most */
    int l2_queries;      /* the same in a short sequence */
    int in_place_max;    /* forward: of sequences with so many queries K and V are read unpacked */
    int gathers_from;    /* lists: queries that see so many keys are computed from listed ones */
    int head_slots;      /* head jobs that the workspace has packed keys for */
    int least_tasks;     /* of a head job, if its queries are enough */
} nsa__schedule;

/* Numbers in whole vectors of a row of q and one of v, or of k and v. */
static int nsa__row_numbers(const nsa_desc *d) {
    return nsa__whole_vectors(d->dim) + nsa__whole_vectors(d->dim_v);
}

/* Queries of a batch: about NSA__BATCH_ROWS rows. If a sequence has no more queries than one batch,
   its K and V are read in place. */
static int nsa__batch_queries(const nsa_desc *d) {
    return (int)nsa__max(1, (int64_t)NSA__BATCH_ROWS * d->kv_heads / d->heads);
}

/* Tiles of lists divide their blocks if a power of two from 16 to 64 does. A tile then holds keys
   of one block, and a query sees all of a listed tile, up to the end of its span. */
static int nsa__tile_size(const nsa_desc *d, nsa__branch branch) {
    if (nsa__traits_of[branch].lists)
        for (int tile = NSA__TILE; tile >= 16; tile /= 2)
            if (d->slc_block % tile == 0) return tile;
    return NSA__TILE;
}

/* Head jobs at once: as many as make one token's rows some 256 numbers, because rows of
   neighbouring heads share pages. */
static int nsa__heads_near(const nsa_desc *d) {
    int64_t nearby = nsa__max(1, 256 / d->dim);
    return (int)nsa__min(d->kv_heads, nsa__min(nearby, NSA__HEADS_NEAR));
}

/* Queries of a task of lists in a sequence of `tokens`; `nearby` are those of a short one. A block
   of a long sequence is in few lists, so tasks grow there until its readers fill a batch, about:
   that their rows leave L2 costs less than a tile for few of them. */
static int64_t nsa__grown_queries(const nsa_desc *d, int tokens, int64_t nearby, int64_t batch) {
    int64_t wanted = batch * nsa_slc_count(d, tokens) / nsa__max(1, nsa_block_list_width(d));
    return nsa__max(nearby, nsa__min(wanted, NSA__GROWTH * nearby));
}

/* Queries of a task of a sequence that has `tokens` and of which `count` are queries, as at least
   least_tasks. Tasks of lists are large: each K/V tile is then loaded into L2 once for many
   queries. */
static int nsa__task_queries(const nsa__schedule *s, const nsa_desc *d, nsa__branch branch,
                             int tokens, int64_t count) {
    int64_t most = s->l2_queries, shared = nsa__ceil_div(count, s->least_tasks);
    if (nsa__traits_of[branch].lists) most = nsa__grown_queries(d, tokens, most, s->batch_queries);
    return (int)nsa__max(s->batch_queries, nsa__min(most, shared));
}

/* Lists whose blocks are no tiles: how many keys a query sees from where on tiles hold the keys
   that its own list names, and it is computed alone. Below, tiles hold neighbouring keys, which
   queries share. So it pays if a list names few of the keys that lie beside its own. A query alone
   has few rows: its products take as long as those of `lost` more. */
static int nsa__gathers_from(const nsa_desc *d, nsa__branch branch, int group, int lost) {
    const int64_t blocks = nsa_block_list_width(d);
    const int64_t listed = nsa__min(blocks * d->slc_block, INT_MAX);
    const int64_t least = nsa__ceil_div(listed * (group + lost), group);
    if (!nsa__traits_of[branch].lists || d->slc_block % NSA__LANES == 0) return INT_MAX;
    if (blocks * (d->slc_block + NSA__BESIDE) < least || least > INT_MAX) return INT_MAX;
    return (int)least;
}

/* Forward's, for `group` query heads a job. `seats`: nsa__heads_near of the call, of which d may be
   some heads, or 1. */
static nsa__schedule nsa__schedule_of(const nsa_desc *d, nsa__branch branch, int group, int seats) {
    const int lists = nsa__traits_of[branch].lists;
    nsa__schedule s;
    memset(&s, 0, sizeof s);
    s.tile = nsa__tile_size(d, branch);
    while (1 << s.tile_log2 < s.tile) s.tile_log2++;
    s.tile_in_block = lists && d->slc_block % s.tile == 0;
    s.batch_queries = (int)nsa__max(1, NSA__BATCH_ROWS / group);
    s.gathers_from = nsa__gathers_from(d, branch, group, NSA__LANES);
    s.head_slots = seats;
    s.least_tasks = lists ? NSA__TASKS / seats : 1;
    s.l2_queries = lists ? NSA__TASK_NUMBERS / nsa__row_numbers(d) / group : s.batch_queries;
    s.task_queries = nsa__task_queries(&s, d, branch, d->tokens, d->count);
    return s;
}

/* Tasks of a head job in forward, at least, for so many threads: tasks of lists are large, and many
   threads want more of them. */
static int nsa__shared_tasks(const nsa__schedule *s, nsa__branch branch, int threads) {
    const int64_t each = 2; /* tasks for a thread */
    if (!nsa__traits_of[branch].lists) return s->least_tasks;
    return (int)nsa__ceil_div(nsa__max(NSA__TASKS, each * threads), s->head_slots);
}

/* Backward's, from forward's. Its batches have up to twice the rows, because each reads and writes
   its tile's share of dk and dv once. But all its rows of q and dout should be no more than
   NSA__BATCH_NUMBERS numbers. Tasks are large enough that few shares of dk and dv are added; those
   of lists are larger yet. */
static nsa__schedule nsa__backward_schedule(nsa__schedule s, const nsa_desc *d, nsa__branch branch,
                                            int group) {
    const int numbers = nsa__row_numbers(d);
    const int64_t rows = nsa__min(NSA__BATCH_NUMBERS / numbers, 2 * NSA__BATCH_ROWS);
    s.gathers_from = nsa__gathers_from(d, branch, group, 2 * NSA__LANES);
    s.batch_queries = (int)nsa__max(s.batch_queries, rows / group);
    if (!nsa__traits_of[branch].lists)
        s.l2_queries = (int)nsa__min(s.tile, NSA__TASK_NUMBERS / numbers / group);
    s.task_queries = nsa__task_queries(&s, d, branch, d->tokens, d->count);
    s.head_slots = (int)nsa__min(s.head_slots, d->kv_heads); /* of which the call may have some */
    return s;
}

/* ---- Attention: plan and spans ----------------------------------------------------------------
   Twin: kernels/attend_keys.cuh. Not here: packing, products.
   The branches differ in one thing: which spans of key rows a query sees (nsa__span). All else is
   one core. It iterates over tiles of up to 64 keys. Tile i holds keys i tile .. (i + 1) tile - 1
   of the sequence, whatever the queries, so a query's sums do not depend on its neighbours; or, of
   a query that is computed alone, keys of its list, counted along it (nsa__gather). The
   keys of a tile that a query sees are a mask of 64 bits. A tile that it does not see leaves its
   state as it is, to the bit. The core takes one sequence and a few kv heads at a time. It packs
   their keys once, then runs tasks of neighbouring queries and one head side by side. */
#pragma once
#include "gate.h"
#include "operand.h"

/* A branch of a step of decoding, whose threads have just worked. */
typedef struct nsa__step {
    int ring;       /* the cache's window: see nsa__key_layout; 0 if rows are straight */
    int64_t *reads; /* of each query and kv head: how many keys it has read */
} nsa__step;

/* What is the same for all sequences and heads of a call. A size query fills one and returns its
   bytes; a call fills one, checks the workspace against it and runs it. Constant from then on. */
typedef struct nsa__attend_plan {
    const nsa_attend *x, *dx; /* NULL in a size query */
    const nsa_select *select; /* NULL, or lists are written to it: in the chain by cmp too */
    const nsa_desc *d;
    const nsa__tiles *tiles;
    nsa__branch branch;
    nsa__traits is;
    nsa__schedule cut;
    const nsa__step *step;     /* forward: NULL, or it is a step's */
    const nsa__gate_job *gate; /* backward: NULL, or dx.out is the gate's: the branch's dout is its
                                  g times that, and gate->delta_out gets dout . out */
    int heads;             /* head jobs of a sequence: kv heads, or heads with lists of their own */
    int lists_per_kv_head; /* jobs that read one kv head: 1, or list heads of a kv head */
    int group;             /* query heads of a job */
    int list_width;        /* entries of a block list */
    const nsa__pairs *pairs; /* products of bf16 that the machine has and the caller wants */
    nsa__operand k, v;       /* rows of q and k, and of dout and v */
    size_t shared;           /* bytes of workspace that all threads share */
    size_t scratch;          /* bytes of workspace for each thread */
    size_t room;             /* of them, what a thread has for its parts of split tasks */
} nsa__attend_plan;

/* State of one branch's kernel for one (sequence, kv head). The arrays are workspace and serve one
   head after another. */
typedef struct nsa__head_job {
    const nsa__attend_plan *plan;
    const struct nsa__head_job *then; /* of a split task: the job that begins when it has ended */
    int heads;                        /* jobs that run at once, side by side in one array */
    nsa__seq seq;
    int head, kv_head;           /* which of plan->heads, and whose keys */
    int task_queries;            /* queries of a task */
    int keys;                    /* rows of K that the sequence has */
    nsa__key_layout rows;        /* where K and V lie */
    int in_place;                /* K and V are read unpacked; then all queries are one task, */
    int gathers;                 /* or each is, and its keys are those of its list: nsa__gather */
    int tile_begin, tile_end;    /* tiles that any of the queries sees */
    nsa__packed *rows_over[2];   /* of v and k by tile: rows to be summed over; NULL: not needed */
    nsa__packed *columns[2];     /* the same, transposed tile by tile */
    nsa__packed *listed_rows[2]; /* backward of listed keys: rows to be gathered */
    uint64_t *nonfinite;         /* of every tile: keys with a non-finite value, packed as zeros */
    unsigned char *listed;       /* slc: tiles that a list names; the others are not packed */
    nsa_real *sum[2];            /* backward: dv and dk, sums over the queries; or NULL */
    uint64_t *nonfinite_keys;    /* backward, of every tile: keys that get NaN */
    int32_t *progress;           /* backward, of every task of all jobs at hand: see nsa__ordered */
} nsa__head_job;

/* Backward has two of much: of v, dout and p; and of k, q and ds. */
enum { NSA__OF_V, NSA__OF_K };
static const nsa__operand *nsa__operand_at(const nsa__attend_plan *p, int i) {
    return i == NSA__OF_K ? &p->k : &p->v;
}

/* Whether there are queries that see enough keys to be computed alone, from those of their list. */
static int nsa__plan_gathers(const nsa__attend_plan *p) {
    return p->cut.gathers_from < INT_MAX;
}

/* slc's list of a query; NULL for the other branches. */
static const int32_t *nsa__block_list(const nsa__head_job *job, int query) {
    const nsa__attend_plan *p = job->plan;
    if (!p->is.lists) return NULL;
    return (const int32_t *)nsa__row(&p->x->blocks, job->seq.batch,
                                     job->seq.row + query - job->seq.first, job->head);
}

/* Keys begin .. end - 1 are the most that a query sees: all of cmp, win and dense; of slc those of
   them that its list names. Both grow with the query. Keys of cmp count compressed blocks. */
static int nsa__span_begin(const nsa__attend_plan *p, int query) {
    return p->branch == NSA__WIN ? nsa_window_begin(p->d, query) : 0;
}
static int nsa__span_end(const nsa__head_job *job, int query) {
    const nsa__attend_plan *p = job->plan;
    int tokens = job->seq.tokens;
    if (p->branch == NSA__WIN) return nsa__window_end(p->d, tokens, query);
    return p->branch == NSA__CMP ? nsa__cmp_visible(p->d, tokens, query)
                                 : nsa__visible_end(p->d, tokens, query);
}

/* slc (Eq. 12): span `number` of the keys that a query sees, of one listed block; spans ascend. A
   block is cut at `seen`, the query's nsa__span_end, because the one that holds the query goes on
   behind it. Returns 0 if there is none left. */
NSA__INLINE int nsa__span(const nsa__attend_plan *p, const int32_t *list, int seen, int number,
                          int *begin, int *end) {
    if (number >= p->list_width || list[number] < 0) return 0;
    *begin = list[number] * p->d->slc_block;
    *end = (int)nsa__min((int64_t)*begin + p->d->slc_block, seen);
    return 1;
}

/* The queries of a sequence whose keys are gathered, or those before them. */
static nsa__seq nsa__seq_part(const nsa__attend_plan *p, nsa__seq seq, int gathers) {
    const int none = p->d->mask == NSA_MASK_NONE, from = p->cut.gathers_from;
    const int64_t first = none ? (seq.tokens < from ? INT_MAX : 0) : (int64_t)from - 1;
    const int before = (int)nsa__min(nsa__max(0, first - seq.first), seq.count);
    if (gathers) seq.first += before, seq.row += before;
    seq.count = gathers ? seq.count - before : before;
    return seq;
}

/* The most keys that a sequence can have: arrays of tiles are sized by it. */
static int nsa__max_keys(const nsa__attend_plan *p) {
    return p->is.compressed ? nsa_cmp_count(p->d, p->d->tokens) : p->d->tokens;
}

/* The job of the head that task `index` is for; the index becomes the task's among that head's.
   `jobs` points to the first of first->heads jobs. Tasks interleave heads, because rows of
   neighbouring heads share a page: this saves TLB misses. */
static const nsa__head_job *nsa__job_of(const void *jobs, int64_t *nth) {
    const nsa__head_job *first = (const nsa__head_job *)jobs;
    const nsa__head_job *job = first + *nth % first->heads;
    *nth /= first->heads;
    return job;
}

/* The tasks of one head, and of all heads at hand. */
static int64_t nsa__head_tasks(const nsa__head_job *job) {
    return nsa__ceil_div(job->seq.count, job->task_queries);
}
static int64_t nsa__query_tasks(const nsa__head_job *job) {
    return job->heads * nsa__head_tasks(job);
}

/* The row of a key in K or V, or in their gradients. */
static void *nsa__key(const nsa__head_job *job, const nsa_tensor *x, int key) {
    return nsa__key_row(&job->rows, x, key, job->kv_head);
}

/* The part of a plan that does not depend on what is computed. `lists`: blocks are read or written,
   so that each head with a list is a job of its own. `nearby`: nsa__heads_near of the call, of
   which d may be some heads. */
static nsa__attend_plan nsa__attend_plan_of(const nsa_attend *x, const nsa_attend *dx,
                                            const nsa_desc *d, nsa__branch branch, int lists,
                                            int nearby) {
    nsa__attend_plan p;
    memset(&p, 0, sizeof p);
    p.x = x;
    p.dx = dx;
    p.d = d;
    p.tiles = nsa__tiles_of(d->isa);
    p.branch = branch;
    p.heads = lists ? nsa__list_heads(d) : d->kv_heads;
    p.lists_per_kv_head = p.heads / d->kv_heads;
    p.group = d->heads / p.heads;
    p.list_width = nsa_block_list_width(d);
    p.is = nsa__traits_of[branch];
    if (p.lists_per_kv_head > 1) nearby = 1; /* they add to the same dk and dv */
    p.cut = nsa__schedule_of(d, branch, p.group, nearby);
    p.k = nsa__operand_of(p.tiles, d->dim, d->scale != 0 ? d->scale : 1 / sqrt((double)d->dim));
    p.v = nsa__operand_of(p.tiles, d->dim_v, 1);
    p.pairs = nsa__pair_operands(&p.k, &p.v, x, dx, d);
    return p;
}

/* Bytes of workspace for so many threads. */
static size_t nsa__attend_plan_bytes(const nsa__attend_plan *p, int threads) {
    return nsa__bytes_for(p->shared, threads, p->scratch);
}

/* A head job without memory; a layout hands it out. */
static nsa__head_job nsa__job_make(const nsa__attend_plan *p) {
    nsa__head_job job;
    memset(&job, 0, sizeof job);
    job.plan = p;
    return job;
}

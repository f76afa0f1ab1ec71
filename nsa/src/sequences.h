/* ---- Sequences, workspace -----------------------------------------------------------------------
   Twin: none; kernels take views. Not here: who runs (threads.h). */
#pragma once
#include "checks.h"

/* Where the rows of a sequence's keys lie, or of its compressed ones. */
typedef struct nsa__key_layout {
    int64_t batch, row;   /* what batch strides multiply, and the row of key 0 */
    int ring;             /* a decoding cache's: key s lies in row s % ring; 0: straight */
    const int32_t *pages; /* NULL, or where batch and row are found: see nsa__key_row */
    int page_rows, page_offset;
    const int32_t *list; /* NULL, or keys are counted along a block list, from its first on */
    int list_block;
} nsa__key_layout;

/* The sequence's key that is number `at` of a list's. */
static int64_t nsa__key_in_list(const nsa__key_layout *rows, int64_t at) {
    const uint32_t nth = (uint32_t)at, n = (uint32_t)rows->list_block;
    return n == 1 ? rows->list[nth] : (int64_t)rows->list[nth / n] * n + nth % n;
}

/* The row of a key: the one place that knows rings, pages and lists. */
static void *nsa__key_row(const nsa__key_layout *rows, const nsa_tensor *x, int64_t key,
                          int64_t head) {
    if (rows->list) key = nsa__key_in_list(rows, key);
    if (rows->pages) {
        uint32_t at = (uint32_t)(key + rows->page_offset), n = (uint32_t)rows->page_rows;
        return nsa__row(x, rows->pages[at / n], at % n, head);
    }
    return nsa__row(x, rows->batch, rows->row + (rows->ring ? key % rows->ring : key), head);
}

/* Keys from this one on whose rows follow each other by the token stride. */
static int nsa__rows_together(const nsa__key_layout *rows, int key) {
    int most = INT_MAX, next = INT_MAX;
    if (rows->list) {
        most = rows->list_block - (int)((uint32_t)key % (uint32_t)rows->list_block);
        key = (int)nsa__key_in_list(rows, key);
    }
    if (rows->pages)
        next = rows->page_rows -
               (int)((uint32_t)(key + rows->page_offset) % (uint32_t)rows->page_rows);
    else if (rows->ring)
        next = rows->ring - key % rows->ring;
    return (int)nsa__min(most, next);
}

/* One sequence of the batch. Iterate with nsa__seq_begin and nsa__seq_next from the first one on,
   because packed rows are sums over the sequences before. */
typedef struct nsa__seq {
    int nth;            /* b */
    int64_t batch, row; /* on the query's side: what batch strides multiply, and the view's row of
                           query `first` */
    nsa__key_layout keys, cmp;
    int tokens, cmp_tokens; /* its keys, and its compressed keys */
    int first, count; /* the queries to compute that it has: positions first .. first + count - 1 */
} nsa__seq;

/* Fills the fields that follow from `nth`; behind the last sequence they keep their values. */
static void nsa__seq_set(const nsa_desc *d, nsa__seq *s) {
    int b = s->nth;
    if (b >= d->batch) return;
    s->tokens = nsa__tokens_of(d, b);
    s->cmp_tokens = nsa_cmp_count(d, s->tokens);
    s->first = d->firsts ? d->firsts[b] : d->first;
    s->count = d->counts   ? d->counts[b]
               : d->begins ? (int)nsa__max(0, nsa__min(d->count, (int64_t)s->tokens - d->first))
                           : d->count;
    s->keys.batch = s->cmp.batch = d->begins ? 0 : b;
    s->keys.row = d->begins ? d->begins[b] : 0;
    s->batch = d->counts ? 0 : s->keys.batch;
    if (!d->counts) s->row = s->keys.row;
    if (!d->pages) return;
    s->keys.pages = s->cmp.pages = nsa__table(d, b);
    s->keys.page_rows = d->page_tokens;
    s->cmp.page_rows = d->page_tokens / d->cmp_stride;
    s->cmp.page_offset =
        d->cmp_block / d->cmp_stride - 1; /* a block lies where its last token does */
}

/* The first sequence. The loop ends when index reaches d->batch. */
static nsa__seq nsa__seq_begin(const nsa_desc *d) {
    nsa__seq s;
    memset(&s, 0, sizeof s);
    nsa__seq_set(d, &s);
    return s;
}

static void nsa__seq_next(const nsa_desc *d, nsa__seq *s) {
    if (d->begins) s->cmp.row += s->cmp_tokens;
    if (d->counts) s->row += s->count;
    s->nth++;
    nsa__seq_set(d, s);
}

enum { NSA__ALIGN = 64 }; /* bytes: a cache line, and the widest vector */

static void *nsa__alloc(nsa__arena *a, int64_t count, size_t size) {
    return nsa__alloc_aligned(a, count, size, NSA__ALIGN);
}
static nsa_real *nsa__alloc_reals(nsa__arena *a, int64_t count) {
    return (nsa_real *)nsa__alloc(a, count, sizeof(nsa_real));
}
static nsa__arena nsa__arena_at(void *workspace) {
    return nsa__arena_aligned(workspace, NSA__ALIGN);
}

static size_t nsa__larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* Threads that the caller asks for: desc.threads, or what OpenMP offers. */
static int nsa__threads(const nsa_desc *d) {
#ifdef _OPENMP
    return d->threads ? d->threads : omp_get_max_threads();
#else
    (void)d;
    return 1;
#endif
}

/* Threads whose scratch a workspace must hold at least. */
static int nsa__least_threads(const nsa_desc *d) {
    return d->threads ? nsa__threads(d) : 1;
}

/* Bytes of a workspace, whose parts lie in this order:
     | up to 63 bytes to align | shared | scratch of thread 0 | scratch of thread 1 | ... |
   `shared` holds packed keys and sums; a thread's scratch is used by one task after another. */
static size_t nsa__bytes_for(size_t shared, int scratches, size_t scratch) {
    nsa__arena total = {NULL, shared};
    if (scratch) nsa__alloc(&total, scratches, scratch);
    return total.used + NSA__ALIGN;
}

static size_t nsa__workspace_bytes(const nsa_desc *d, size_t shared, size_t scratch) {
    return nsa__bytes_for(shared, nsa__threads(d), scratch);
}

/* The threads of a call. Thread i has scratch_bytes of scratch from scratch + i scratch_bytes. */
typedef struct nsa__team {
    int threads;
    char *scratch;
    size_t scratch_bytes;
} nsa__team;

/* Checks the workspace and splits it into the shared part and each thread's scratch. If `threads`
   is 0, the size of the workspace decides how many threads the call uses. */
static nsa_status nsa__team_make(nsa__team *team, const nsa_desc *d, void *workspace, size_t bytes,
                                 size_t shared, size_t scratch) {
    size_t least = nsa__bytes_for(shared, nsa__least_threads(d), scratch);
    if (!workspace || bytes < least) return nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_workspace);
    size_t room = scratch ? (bytes - NSA__ALIGN - shared) / scratch : (size_t)nsa__threads(d);
    team->threads = (int)nsa__min((int64_t)nsa__min((int64_t)room, INT_MAX), nsa__threads(d));
    team->scratch = nsa__arena_at(workspace).base + shared;
    team->scratch_bytes = scratch;
    return NSA_OK;
}

/* ---- Block lists: ranking, form -----------------------------------------------------------------
   Twin: kernels/select_rank.cuh. Not here: scores of blocks (select_scores.h). */
#pragma once
#include "threads.h"
#include "tiles.h"

static nsa__bits_t nsa__bits_of(nsa_real x) {
    nsa__bits_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Maps a score to an unsigned integer with the same order, NaN below all. Bits of positive floats
   ascend already; the sign bit puts them above the negative ones, whose bits descend and are
   subtracted. -0 equals 0. The function looks at bits, because -ffast-math assumes that there is no
   NaN. */
static nsa__bits_t nsa__score_order(nsa_real score) {
    const nsa__bits_t bits = nsa__bits_of(score), size = bits & ~NSA__SIGN;
    if (size > NSA__INFINITY) return 0; /* NaN */
    return bits == size ? NSA__SIGN + size : NSA__SIGN - size;
}

/* Scores as numbers whose bits, taken for signed integers, are in the scores' order: vector units
   compare signed integers. */
NSA__COMPILED static void nsa__order(nsa_real *scores, int n) {
    for (int j = 0; j < n; j++) {
        nsa__bits_t order = nsa__score_order(scores[j]) ^ NSA__SIGN;
        memcpy(scores + j, &order, sizeof order);
    }
}

/* How many of n scores have an order of at least `least`. With `tiles` they are given as nsa__order
   makes them. */
NSA__COMPILED static int nsa__at_least(const nsa_real *scores, int n, nsa__bits_t least,
                                       const nsa__tiles *tiles) {
    int count = 0;
    if (tiles) return tiles->at_least(n, scores, (nsa__lane)(least ^ NSA__SIGN));
    for (int j = 0; j < n; j++) count += nsa__score_order(scores[j]) >= least;
    return count;
}

/* The largest order that at least `room` of n scores have, room <= n. It is found bit by bit: a bit
   stays set if enough scores are still at or above. */
static nsa__bits_t nsa__order_of_rank(const nsa_real *scores, int n, int room,
                                      const nsa__tiles *tiles) {
    nsa__bits_t order = 0, one_bit = NSA__SIGN;
    for (int reached = n; one_bit && reached != room; one_bit >>= 1) {
        int count = nsa__at_least(scores, n, order | one_bit, tiles);
        if (count < room) continue;
        order |= one_bit;
        reached = count;
    }
    return order;
}

/* Eq. 11: forced blocks, and the `room` best of the rest. Candidates are three ranges:
     | 0 .. begin - 1 forced | begin .. end - 1 the rest | end .. candidates - 1 forced |
   Of the rest, all blocks above the order of rank `room` are taken, and `ties` blocks that have
   this order, the lower indices first. Blocks are visited by index, so the list ascends without a
   sort. NaN has order 0: it is taken only if numbers do not fill the list. */
NSA__COMPILED static void nsa__rank(const nsa_real *scores, int candidates, int local,
                                    const nsa_desc *d, const nsa__tiles *tiles, int32_t *list) {
    int width = nsa_block_list_width(d), n = 0;
    int begin = (int)nsa__min(nsa__forced_first(d), candidates); /* forced: before begin, */
    int end = (int)nsa__max(begin, (int64_t)candidates - local); /* from end on */
    int forced = begin + candidates - end;
    int room = d->forced == NSA_FORCED_INSIDE ? d->slc_count - forced : d->slc_count;
    room = (int)nsa__min(room, end - begin);
    const nsa_real *rest = scores + begin;
    nsa__bits_t order = room > 0 ? nsa__order_of_rank(rest, end - begin, room, tiles) : 0;
    int ties = room - nsa__at_least(rest, end - begin, order + 1, tiles);
    for (; n < begin; n++) list[n] = n;
    for (int j = begin, full = begin + room; n < full; j += NSA__LANES) {
        int lanes = (int)nsa__min(NSA__LANES, end - j);
        if (!nsa__at_least(scores + j, lanes, order, tiles)) continue;
        for (int i = j; i < j + lanes && n < full; i++) {
            nsa__bits_t of_block =
                tiles ? nsa__bits_of(scores[i]) ^ NSA__SIGN : nsa__score_order(scores[i]);
            int ties_in = of_block == order && ties > 0;
            list[n] = i; /* stays if it is taken: a branch would be mispredicted often */
            n += of_block > order || ties_in;
            ties -= ties_in;
        }
    }
    for (int j = end; j < candidates; j++) list[n++] = j;
    while (n < width) list[n++] = -1;
}

NSA_API nsa_status nsa_rank_blocks(const nsa_real *scores, int query, const nsa_desc *d,
                                   int32_t *list) {
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    NSA__CHECK(nsa__check_geometry(d));
    if (!scores || !list) return nsa__error(NSA_ERROR_NULL, scores ? NSA__AT_list : NSA__AT_scores);
    if (query < 0 || (query >= d->tokens && d->mask == NSA_MASK_CAUSAL))
        return nsa__error(NSA_ERROR_RANGE, NSA__AT_query);
    nsa__rank(scores, nsa_slc_candidates(d, query), nsa__forced_local(d, d->tokens, query), d, NULL,
              list);
    return NSA_OK;
}

typedef struct nsa__rank_job {
    const nsa_rank *x;
    const nsa_desc *d;
    const nsa__tiles *tiles;
} nsa__rank_job;

/* The lists of a query: of each its scores as reals, then as ordered integers. */
static void nsa__rank_token(const void *job, const nsa__seq *seq, int64_t t, void *scratch) {
    const nsa__rank_job *p = (const nsa__rank_job *)job;
    const nsa_tensor *x = &p->x->scores, *blocks = &p->x->blocks;
    const int64_t batch = seq->batch, row = seq->row + t;
    const int query = seq->first + (int)t;
    const int n = nsa__slc_candidates(p->d, seq->tokens, query);
    nsa_real *scores = (nsa_real *)scratch;
    for (int head = 0; head < nsa__list_heads(p->d); head++) {
        nsa__load(scores, x->dtype, nsa__row(x, batch, row, head), n);
        nsa__order(scores, n);
        nsa__rank(scores, n, nsa__forced_local(p->d, seq->tokens, query), p->d, p->tiles,
                  (int32_t *)nsa__row(blocks, batch, row, head));
    }
}

/* Scratch of a thread: the scores of one list, in whole vectors. */
static size_t nsa__rank_scratch(const nsa_desc *d) {
    nsa__arena scratch = {NULL, 0};
    nsa__alloc_reals(&scratch, (int64_t)nsa_slc_count(d, d->tokens) + NSA__LANES);
    return scratch.used;
}

NSA_API size_t nsa_rank_queries_workspace_size(const nsa_desc *d) {
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    return nsa_desc_check(d) == NSA_OK ? nsa__workspace_bytes(d, 0, nsa__rank_scratch(d)) : 0;
}

NSA_API nsa_status nsa_rank_queries(const nsa_rank *x, const nsa_desc *d, void *workspace,
                                    size_t bytes) {
    nsa__rank_job p;
    nsa__team team;
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    const nsa__checked c = nsa__checked_of(d, 1, 0);
    NSA__CHECK(nsa__check_call(&c, nsa__rank_views, NSA__RANK_VIEWS, NULL, x));
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, 0, nsa__rank_scratch(d)));
    p.x = x;
    p.d = d;
    p.tiles = nsa__tiles_of(d->isa);
    nsa__run_tokens(&team, d, nsa__rank_token, &p);
    return NSA_OK;
}

/* The first of n slots that breaks the form, or -1: a list ascends, without duplicates, and has
   nothing but -1 behind its last candidate. */
static int nsa__list_fault(int candidates, const int32_t *list, int n, const char **reason) {
    for (int i = 0; i < n; i++) {
        *reason = NULL;
        if (list[i] < -1 || list[i] >= candidates) *reason = "not a candidate of its query";
        if (i > 0 && list[i] >= 0) {
            if (list[i - 1] < 0)
                *reason = "entry behind a -1";
            else if (list[i - 1] == list[i])
                *reason = "duplicate";
            else if (list[i - 1] > list[i])
                *reason = "not ascending";
        }
        if (*reason) return i;
    }
    return -1;
}

/* What an entry for lists looks at first. */
static nsa_status nsa__check_list_view(const nsa_tensor *blocks, const nsa_desc *d, int writes) {
    NSA__CHECK(nsa_desc_check(d));
    if (!blocks) return nsa__error(NSA_ERROR_NULL, NSA__AT_blocks);
    return nsa__check_view(blocks, nsa__query_shape(d, nsa__list_heads(d), nsa_block_list_width(d)),
                           NSA__INTS, writes, NSA__AT_blocks);
}

/* The form of all lists; the first fault goes to *fault, which may be NULL. */
static nsa_status nsa__check_lists(const nsa_tensor *blocks, const nsa_desc *d,
                                   nsa_block_fault *fault) {
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq))
        for (int t = 0; t < seq.count; t++) {
            const int candidates = nsa__slc_candidates(d, seq.tokens, seq.first + t);
            for (int head = 0; head < nsa__list_heads(d); head++) {
                const int32_t *list =
                    (const int32_t *)nsa__row(blocks, seq.batch, seq.row + t, head);
                const char *reason;
                int slot = nsa__list_fault(candidates, list, nsa_block_list_width(d), &reason);
                if (slot < 0) continue;
                if (fault) {
                    fault->batch = seq.nth;
                    fault->query = seq.first + t;
                    fault->kv_head = head;
                    fault->slot = slot;
                    fault->value = list[slot];
                    fault->reason = reason;
                }
                return nsa__error(NSA_ERROR_BLOCKS, NSA__AT_blocks);
            }
        }
    return NSA_OK;
}

NSA_API nsa_status nsa_check_blocks(const nsa_tensor *blocks, const nsa_desc *d,
                                    nsa_block_fault *fault) {
    nsa_desc own;
    d = nsa__desc_using(d, NSA__USES_SLC, &own);
    NSA__CHECK(nsa__check_list_view(blocks, d, 0));
    return nsa__check_lists(blocks, d, fault);
}

/* Sorts by insertion, because lists are short and nearly in order. */
static void nsa__sort_blocks(int32_t *list, int n) {
    for (int i = 1; i < n; i++) {
        int32_t block = list[i];
        int at = i;
        for (; at > 0 && list[at - 1] > block; at--) list[at] = list[at - 1];
        list[at] = block;
    }
}

NSA_API nsa_status nsa_normalize_blocks(const nsa_tensor *blocks, const nsa_desc *d) {
    nsa_desc own;
    d = nsa__desc_using(d, NSA__USES_SLC, &own);
    NSA__CHECK(nsa__check_list_view(blocks, d, 1));
    const int width = nsa_block_list_width(d);
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq))
        for (int t = 0; t < seq.count; t++)
            for (int head = 0; head < nsa__list_heads(d); head++) {
                int32_t *list = (int32_t *)nsa__row(blocks, seq.batch, seq.row + t, head);
                int candidates = nsa__slc_candidates(d, seq.tokens, seq.first + t), n = 0, kept = 0;
                for (int i = 0; i < width; i++)
                    if (list[i] >= 0 && list[i] < candidates) list[n++] = list[i];
                nsa__sort_blocks(list, n);
                for (int i = 0; i < n; i++)
                    if (kept == 0 || list[kept - 1] != list[i]) list[kept++] = list[i];
                while (kept < width) list[kept++] = -1;
            }
    return NSA_OK;
}

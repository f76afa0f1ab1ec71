/* ---- Block index: closed forms ------------------------------------------------------------------
   Twin: kernels/block_index.cuh. Not here: the same as arrays (index_arrays.h). */
#pragma once
#include "numbers.h"

/* N(tokens): compressed block i covers tokens i d .. i d + l - 1 and exists if all of them do, so i
   <= (tokens - l) / d. */
NSA_API int nsa_cmp_count(const nsa_desc *d, int tokens) {
    return tokens < d->cmp_block ? 0 : (tokens - d->cmp_block) / d->cmp_stride + 1;
}

/* Tokens before this one are visible to `query` of a sequence of `tokens`. Causality
   enters here alone: visible compressed blocks, candidates and the end of spans follow from it. */
static int nsa__visible_end(const nsa_desc *d, int tokens, int query) {
    return d->mask == NSA_MASK_NONE ? tokens : query + 1;
}

static int nsa__cmp_visible(const nsa_desc *d, int tokens, int query) {
    return nsa_cmp_count(d, nsa__visible_end(d, tokens, query));
}

NSA_API int nsa_cmp_visible(const nsa_desc *d, int query) {
    return nsa__cmp_visible(d, d->tokens, query);
}

NSA_API int nsa_slc_count(const nsa_desc *d, int tokens) {
    return (int)nsa__ceil_div(tokens, d->slc_block);
}

/* The tokens that t sees of the block at its end, if the block is not whole; only there. */
static int nsa__slc_tail(const nsa_desc *d, int tokens, int query) {
    return nsa__visible_end(d, tokens, query) % d->slc_block;
}

static int nsa__slc_candidates(const nsa_desc *d, int tokens, int query) {
    int without_tail = d->forced == NSA_FORCED_TAIL && !d->slc_local;
    int tail = without_tail ? nsa__slc_tail(d, tokens, query) : 0;
    return nsa_slc_count(d, nsa__visible_end(d, tokens, query) - tail);
}

NSA_API int nsa_slc_candidates(const nsa_desc *d, int query) {
    return nsa__slc_candidates(d, d->tokens, query);
}

NSA_API int nsa_window_begin(const nsa_desc *d, int query) {
    int64_t before = (int64_t)d->window - (d->window_rule == NSA_WINDOW_COUNTS_SELF);
    return (int)nsa__max(0, query - before);
}

/* One behind the window's last token. With a mask that token is the query; without one the window
   reaches as far ahead as back. */
static int nsa__window_end(const nsa_desc *d, int tokens, int query) {
    int64_t ahead = (int64_t)d->window + (d->window_rule == NSA_WINDOW_BEFORE_SELF);
    int end = nsa__visible_end(d, tokens, query);
    return d->mask == NSA_MASK_NONE ? (int)nsa__min(end, query + ahead) : end;
}

/* The weight of p_cmp[cmp] in p_slc[slc], Eq. 9: tokens that both blocks cover, in strides. The
   paper's double sum over (m, n) counts the same, if its indices begin at 1. */
NSA_API int nsa_block_overlap(const nsa_desc *d, int cmp, int slc) {
    int64_t cmp_begin = (int64_t)cmp * d->cmp_stride, slc_begin = (int64_t)slc * d->slc_block;
    int64_t begin = nsa__max(cmp_begin, slc_begin);
    int64_t end = nsa__min(cmp_begin + d->cmp_block, slc_begin + d->slc_block);
    return (int)(nsa__max(0, end - begin) / d->cmp_stride);
}

/* Compressed blocks *begin .. *end - 1 overlap the selection block. All sizes are multiples of d,
   so the block that begins l - d before slc_begin is the first that reaches into it. */
NSA_API void nsa_block_overlap_range(const nsa_desc *d, int tokens, int slc, int *begin, int *end) {
    int64_t slc_begin = (int64_t)slc * d->slc_block, count = nsa_cmp_count(d, tokens);
    /* blocks that start before slc_begin and overlap it */
    int64_t before = d->cmp_block / d->cmp_stride - 1;
    *begin = (int)nsa__min(count, nsa__max(0, slc_begin / d->cmp_stride - before));
    *end = (int)nsa__min(count, (slc_begin + d->slc_block) / d->cmp_stride);
}

/* Forced blocks at the start of the sequence, and at the query. They belong to the causal mask:
   without it neither place is special, so no block is forced. */
static int nsa__forced_first(const nsa_desc *d) {
    return d->mask == NSA_MASK_NONE ? 0 : d->slc_init;
}
static int nsa__forced_local(const nsa_desc *d, int tokens, int query) {
    if (d->forced == NSA_FORCED_TAIL) return nsa__slc_tail(d, tokens, query) ? d->slc_local : 0;
    return d->mask == NSA_MASK_NONE ? 0 : d->slc_local;
}

NSA_API int nsa_block_list_width(const nsa_desc *d) {
    int most_local = d->mask == NSA_MASK_NONE && d->forced == NSA_FORCED_ON_TOP ? 0 : d->slc_local;
    if (d->forced == NSA_FORCED_INSIDE) return d->slc_count;
    return d->slc_count + nsa__forced_first(d) + most_local;
}

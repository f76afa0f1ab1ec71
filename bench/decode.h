/* decode.h: sequences of one length in a decoding cache, and a step from it: sparse, and dense over
   the same k and v. What the cache holds is random, not the trace of a prompt. No test. */
#ifndef BENCH_DECODE_H
#define BENCH_DECODE_H

#include "problem.h"

typedef struct decoding {
    problem
        p; /* owns the memory; d.batch sequences of d.tokens, of which the step appends the last */
    nsa_cache cache;
    nsa_attention x;
    nsa_attend dense;
    nsa_desc dense_desc;
    nsa_reads *reads;
    void *workspace;
    size_t bytes;
} decoding;

/* `count` rows of each sequence, random where there is a seed. */
static nsa_tensor new_rows(decoding *c, int heads, int width, uint64_t seed) {
    nsa_tensor t = take(&c->p, c->p.d.batch, heads, width, seed);
    t.batch = t.token;
    return t;
}

static void fill_cache(decoding *c, int max_rewind) {
    const nsa_desc *d = &c->p.d;
    size_t bytes = nsa_cache_size(d, c->p.dtype, max_rewind);
    int rows = (int)(bytes / (c->p.dtype == NSA_F32 ? 256 : 128)) + 1; /* of 64 numbers */
    void *memory = take(&c->p, rows, 1, 64, 7).data;
    if (!bytes || nsa_cache_init(&c->cache, d, c->p.dtype, max_rewind, memory, bytes) != NSA_OK) {
        fprintf(stderr, "bench: no cache of %d x %d tokens\n", d->batch, d->tokens);
        exit(1);
    }
    for (int b = 0; b < d->batch; b++) c->cache.lengths[b] = c->cache.newest[b] = d->tokens - 1;
}

static void decoding_make(decoding *c, nsa_dtype dtype, int batch, int heads, int kv_heads, int dim,
                          int tokens, int threads) {
    memset(c, 0, sizeof *c);
    c->p.dtype = dtype;
    nsa_desc *d = &c->p.d;
    *d = nsa_desc_default(batch, tokens, heads, kv_heads, dim);
    d->threads = threads;
    fill_cache(c, 1);
    c->x.q = new_rows(c, heads, dim, 1);
    c->x.k_slc = c->x.k_win = new_rows(c, kv_heads, dim, 2);
    c->x.v_slc = c->x.v_win = new_rows(c, kv_heads, dim, 3);
    c->x.k_cmp = mean_of(c->x.k_slc, c->cache.k_cmp, dim);
    c->x.v_cmp = mean_of(c->x.v_slc, c->cache.v_cmp, dim);
    c->x.gates = new_rows(c, heads, 3, 4);
    c->x.blocks = new_rows(c, kv_heads, nsa_block_list_width(d), 0);
    c->x.blocks.dtype = NSA_I32;
    nsa_tensor *outs[] = {&c->x.out_cmp, &c->x.out_slc, &c->x.out_win, &c->x.out, &c->dense.out};
    nsa_tensor *lses[] = {&c->x.lse_cmp, &c->x.lse_slc, &c->x.lse_win, &c->dense.lse};
    for (size_t i = 0; i < sizeof outs / sizeof *outs; i++) *outs[i] = new_rows(c, heads, dim, 0);
    for (size_t i = 0; i < sizeof lses / sizeof *lses; i++) {
        *lses[i] = new_rows(c, heads, 1, 0);
        lses[i]->dtype = NSA_F32;
    }
    c->dense.q = c->x.q;
    c->dense.k = c->cache.k_slc;
    c->dense.v = c->cache.v_slc;
    c->dense_desc = *d;
    c->dense_desc.first = tokens - 1;
    c->dense_desc.count = 1;
    c->reads = (nsa_reads *)allocate((size_t)batch * sizeof *c->reads);
    size_t sparse = nsa_decode_workspace_size(&c->x, &c->cache, 1);
    size_t dense = nsa_attend_dense_forward_workspace_size(&c->dense_desc);
    c->bytes = sparse > dense ? sparse : dense;
    c->workspace = allocate(c->bytes);
}

static void decoding_free(decoding *c) {
    problem_free(&c->p);
    free(c->workspace);
    free(c->reads);
}

/* A step, and back to where it began: k and v of the last token are written anew each time. */
static nsa_status run_decode(decoding *c) {
    nsa_status s = nsa_decode(&c->x, &c->cache, 1, NULL, c->reads, c->workspace, c->bytes);
    for (int b = 0; s == NSA_OK && b < c->p.d.batch; b++)
        s = nsa_cache_rewind(&c->cache, b, c->p.d.tokens - 1);
    return s;
}

static nsa_status run_dense_decode(decoding *c) {
    return nsa_attend_dense_forward(&c->dense, &c->dense_desc, c->workspace, c->bytes);
}

/* Bytes of k and v that a step reads, per sequence: as counted, as the formula has it, and
   dense. */
typedef struct decode_bytes {
    double counted, formula, dense;
} decode_bytes;

static decode_bytes count_bytes(const decoding *c) {
    const nsa_desc *d = &c->p.d;
    double number = c->p.dtype == NSA_F32 ? 4 : 2;
    double of_key = number * (double)(d->dim + d->dim_v), heads = d->kv_heads;
    int last = d->tokens - 1, candidates = nsa_slc_candidates(d, last);
    int blocks = candidates < d->slc_count ? candidates : d->slc_count;
    double slc = (double)(blocks - 1) * d->slc_block + last % d->slc_block + 1;
    double keys = nsa_cmp_visible(d, last) + slc + (last + 1 - nsa_window_begin(d, last));
    nsa_reads r = c->reads[0];
    decode_bytes b = {of_key * (double)(r.cmp + r.slc + r.win), of_key * heads * keys,
                      of_key * heads * (double)d->tokens};
    return b;
}

#endif

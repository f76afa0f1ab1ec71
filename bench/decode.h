/* decode.h: sequences of one length in a decoding cache, and a step from it: sparse, and dense over
   the same k and v. What the cache holds is random, not the trace of a prompt. No test. */
#ifndef BENCH_DECODE_H
#define BENCH_DECODE_H

#include "problem.h"

/* What a step is measured by: NSA's own step; attention over all keys; over the last 16 of the
   blocks of 128 tokens that a list names (as MSA has them); over 2,048 listed tokens (as DSA has
   them); and DSA's indexer, which scores all tokens by 64 heads of 128 numbers and lists the best
   2,048. */
typedef enum method { NSA_STEP, DENSE_STEP, MSA_STEP, DSA_STEP, INDEX_STEP, METHODS } method;
enum { DSA_TOKENS = 2048, INDEX_HEADS = 64, INDEX_WIDTH = 128 };

static const char *const method_names[METHODS] = {"decode", "dense decode", "msa decode",
                                                  "dsa decode", "indexer"};

typedef struct decoding {
    problem
        p; /* owns the memory; d.batch sequences of d.tokens, of which the step appends the last */
    nsa_cache cache;
    nsa_dtype kept; /* of the cache; p's is f32 where that is of 8 bits */
    nsa_attention x;
    nsa_attend over[METHODS]; /* the cache's keys; not of NSA_STEP and INDEX_STEP */
    nsa_score index;
    nsa_desc desc[METHODS];
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

/* Fills the cache's rows of 8 bits with one random row. */
static void convert_rows(decoding *c) {
    const nsa_desc *d = &c->p.d;
    nsa_cache *cache = &c->cache;
    nsa_tensor *parts[] = {&cache->k_slc, &cache->k_win, &cache->k_raw, &cache->k_cmp,
                           &cache->v_slc, &cache->v_win, &cache->v_raw, &cache->v_cmp};
    for (int i = 0; i < 8; i++) {
        const int width = i < 4 ? d->dim : d->dim_v;
        nsa_tensor row = take(&c->p, 1, 1, width, 7);
        row.batch = row.token = row.head = 0;
        const int rows = (int)(parts[i]->batch / parts[i]->token);
        if (nsa_convert_rows(&row, parts[i], d->batch, rows, d->kv_heads, width) == NSA_OK)
            continue;
        fprintf(stderr, "bench: rows of a cache are refused\n");
        exit(1);
    }
}

static void fill_cache(decoding *c, int max_rewind) {
    const nsa_desc *d = &c->p.d;
    size_t bytes = nsa_cache_size(d, c->kept, max_rewind);
    int rows = (int)(bytes / (c->p.dtype == NSA_F32 ? 256 : 128)) + 1; /* of 64 numbers */
    void *memory = take(&c->p, rows, 1, 64, 7).data;
    if (!bytes || nsa_cache_init(&c->cache, d, c->kept, max_rewind, memory, bytes) != NSA_OK) {
        fprintf(stderr, "bench: no cache of %d x %d tokens\n", d->batch, d->tokens);
        exit(1);
    }
    if (c->kept != c->p.dtype) convert_rows(c);
    for (int b = 0; b < d->batch; b++) c->cache.lengths[b] = c->cache.newest[b] = d->tokens - 1;
}

/* Lists of one query: `count` of the `all` blocks, one at random of each of `count` parts; all of
   them where they are fewer. */
static nsa_tensor random_list(decoding *c, int all, int count) {
    nsa_tensor t = take_as(&c->p, NSA_I32, c->p.d.batch, c->p.d.kv_heads, count, 0);
    t.batch = t.token;
    float *random = random_floats((size_t)count, 9);
    int32_t *list = (int32_t *)t.data;
    int listed = all < count ? all : count;
    for (int i = 0; i < count; i++) {
        int64_t begin = (int64_t)all * i / listed, parts = (int64_t)all * (i + 1) / listed - begin;
        float within = random[i] - floorf(random[i]); /* 0 .. 1 */
        int place = (int)(within * (float)parts);
        list[i] = i < listed ? (int32_t)begin + (place < (int)parts ? place : 0) : -1;
    }
    for (int row = 1; row < c->p.d.batch * c->p.d.kv_heads; row++)
        memcpy(list + (size_t)row * (size_t)count, list, (size_t)count * sizeof *list);
    free(random);
    return t;
}

/* Attention of the newest token over the cache's keys, by lists of `count` blocks or over all. */
static size_t attend_make(decoding *c, method m, int block, int count) {
    nsa_desc *d = &c->desc[m];
    nsa_attend *x = &c->over[m];
    *d = c->p.d;
    d->first = d->tokens - 1;
    d->count = 1;
    x->q = c->x.q;
    x->k = c->cache.k_slc;
    x->v = c->cache.v_slc;
    x->out = new_rows(c, d->heads, d->dim_v, 0);
    x->lse = take_as(&c->p, NSA_F32, d->batch, d->heads, 1, 0);
    x->lse.batch = x->lse.token;
    if (!block) return nsa_attend_dense_forward_workspace_size(d);
    d->slc_block = block;
    d->slc_count = count;
    x->blocks = random_list(c, nsa_slc_count(d, d->tokens), count);
    return nsa_attend_slc_forward_workspace_size(d);
}

/* Rows for the cache's dtype: of 8 bits made from p's. */
static nsa_tensor kept_rows(decoding *c, int rows, int width, uint64_t seed) {
    nsa_tensor from = take(&c->p, rows, 1, width, seed), to = from;
    if (c->kept == c->p.dtype) return to;
    to = take_as(&c->p, NSA_F32, rows, 1, width, 0); /* has room for them */
    to = nsa_tensor_bthd(to.data, c->kept, rows, 1, width);
    if (nsa_convert_rows(&from, &to, 1, rows, 1, width) != NSA_OK) exit(1);
    return to;
}

static size_t index_make(decoding *c) {
    nsa_desc *d = &c->desc[INDEX_STEP];
    nsa_score *x = &c->index;
    *d = nsa_desc_default(c->p.d.batch, c->p.d.tokens, INDEX_HEADS, 1, INDEX_WIDTH);
    d->threads = c->p.d.threads;
    d->slc_block = d->slc_local = 1, d->slc_init = 0, d->slc_count = DSA_TOKENS;
    d->first = d->tokens - 1, d->count = 1;
    x->act = NSA_SCORE_RELU;
    x->q = new_rows(c, INDEX_HEADS, INDEX_WIDTH, 5);
    x->weights = new_rows(c, INDEX_HEADS, 1, 6);
    x->k = kept_rows(c, d->batch * d->tokens, INDEX_WIDTH, 8);
    x->k.batch = x->k.token * d->tokens;
    x->blocks = take_as(&c->p, NSA_I32, d->batch, 1, DSA_TOKENS, 0);
    x->blocks.batch = x->blocks.token;
    return nsa_score_blocks_workspace_size(d);
}

static size_t sparse_make(decoding *c) {
    const nsa_desc *d = &c->p.d;
    const int heads = d->heads, kv_heads = d->kv_heads;
    c->x.q = new_rows(c, heads, d->dim, 1);
    c->x.k_slc = c->x.k_win = new_rows(c, kv_heads, d->dim, 2);
    c->x.v_slc = c->x.v_win = new_rows(c, kv_heads, d->dim_v, 3);
    c->x.k_cmp = mean_of(c->x.k_slc, c->cache.k_cmp, d->dim);
    c->x.v_cmp = mean_of(c->x.v_slc, c->cache.v_cmp, d->dim_v);
    c->x.gates = new_rows(c, heads, 3, 4);
    c->x.blocks = new_rows(c, kv_heads, nsa_block_list_width(d), 0);
    c->x.blocks.dtype = NSA_I32;
    nsa_tensor *outs[] = {&c->x.out_cmp, &c->x.out_slc, &c->x.out_win, &c->x.out};
    nsa_tensor *lses[] = {&c->x.lse_cmp, &c->x.lse_slc, &c->x.lse_win};
    for (size_t i = 0; i < sizeof outs / sizeof *outs; i++)
        *outs[i] = new_rows(c, heads, d->dim_v, 0);
    for (size_t i = 0; i < sizeof lses / sizeof *lses; i++) {
        *lses[i] = take_as(&c->p, NSA_F32, d->batch, heads, 1, 0);
        lses[i]->batch = lses[i]->token;
    }
    return nsa_decode_workspace_size(&c->x, &c->cache, 1);
}

static void decoding_make(decoding *c, nsa_dtype dtype, const shape *s, int batch, int threads) {
    memset(c, 0, sizeof *c);
    c->kept = dtype;
    c->p.dtype = dtype == NSA_I8 || dtype == NSA_F8 ? NSA_F32 : dtype;
    nsa_desc *d = &c->p.d;
    *d = nsa_desc_default(batch, s->tokens, s->heads, s->kv_heads, s->dim);
    if (s->dim_v) d->dim_v = s->dim_v;
    d->threads = threads;
    fill_cache(c, 1);
    c->reads = (nsa_reads *)allocate((size_t)batch * sizeof *c->reads);
    const size_t sizes[METHODS] = {sparse_make(c), attend_make(c, DENSE_STEP, 0, 0),
                                   attend_make(c, MSA_STEP, 128, 16),
                                   attend_make(c, DSA_STEP, 1, DSA_TOKENS), index_make(c)};
    for (int m = 0; m < METHODS; m++) c->bytes = sizes[m] > c->bytes ? sizes[m] : c->bytes;
    c->workspace = allocate(c->bytes);
}

static void decoding_free(decoding *c) {
    problem_free(&c->p);
    free(c->workspace);
    free(c->reads);
}

/* A step; NSA's goes back to where it began: k and v of the last token are written anew each time.
   */
static nsa_status run_step(decoding *c, method m) {
    if (m == DENSE_STEP)
        return nsa_attend_dense_forward(&c->over[m], &c->desc[m], c->workspace, c->bytes);
    if (m == INDEX_STEP) return nsa_score_blocks(&c->index, &c->desc[m], c->workspace, c->bytes);
    if (m != NSA_STEP)
        return nsa_attend_slc_forward(&c->over[m], &c->desc[m], c->workspace, c->bytes);
    nsa_status s = nsa_decode(&c->x, &c->cache, 1, NULL, c->reads, c->workspace, c->bytes);
    for (int b = 0; s == NSA_OK && b < c->p.d.batch; b++)
        s = nsa_cache_rewind(&c->cache, b, c->p.d.tokens - 1);
    return s;
}

/* Keys that the query of a sequence sees in all of its kv heads; NSA's by SPEC's formula. */
static double keys_of(const decoding *c, method m) {
    const nsa_desc *d = m == NSA_STEP ? &c->p.d : &c->desc[m];
    int last = d->tokens - 1, all = nsa_slc_candidates(d, last);
    int blocks = all < d->slc_count ? all : d->slc_count;
    double slc = (double)(blocks - 1) * d->slc_block + last % d->slc_block + 1;
    if (m == DENSE_STEP || m == INDEX_STEP) return (double)d->kv_heads * d->tokens;
    if (m != NSA_STEP) return d->kv_heads * (blocks < all ? blocks * d->slc_block : d->tokens);
    return d->kv_heads * (nsa_cmp_visible(d, last) + slc + (last + 1 - nsa_window_begin(d, last)));
}

/* The same as the library has counted it. */
static inline double keys_counted(const decoding *c) {
    nsa_reads r = c->reads[0];
    return (double)(r.cmp + r.slc + r.win);
}

#endif

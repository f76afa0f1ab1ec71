/* bench_rank: the lists of DSA's indexer, each of 2048 candidates that are single tokens, by one
   thread and two, in turns; of each the least time. Ranked scores of 8192 queries in one call of
   nsa_rank_queries; and a step of decoding, one query of 65536 tokens, which nsa_score_blocks
   scores by 64 heads of 128 numbers and ranks. It checks nothing: the tests do that. */
#define _POSIX_C_SOURCE 200809L
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { T = 8192, LIST = 2048, ROUNDS = 9, KEYS = 65536, HEADS = 64, DIM = 128 };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *allocate(size_t bytes) {
    void *data = malloc(bytes);
    if (!data) exit((perror("bench_rank"), 1));
    return data;
}

/* Which of the two is called, and by what. */
typedef struct calling {
    nsa_desc d;
    const nsa_rank *rank; /* or NULL */
    const nsa_score *score;
} calling;

static double call(calling *c, int threads) {
    c->d.threads = threads;
    size_t bytes =
        c->rank ? nsa_rank_queries_workspace_size(&c->d) : nsa_score_blocks_workspace_size(&c->d);
    void *workspace = allocate(bytes);
    memset(workspace, 0, bytes); /* its pages are there before */
    double at = seconds();
    nsa_status s = c->rank ? nsa_rank_queries(c->rank, &c->d, workspace, bytes)
                           : nsa_score_blocks(c->score, &c->d, workspace, bytes);
    at = seconds() - at;
    free(workspace);
    if (s == NSA_OK) return at;
    fprintf(stderr, "bench_rank: %s (%s)\n", nsa_status_text(s), nsa_status_where(s));
    exit(1);
}

static void compare(const char *what, calling *c) {
    double least[2] = {1e9, 1e9};
    for (int i = 0; i < 2 * ROUNDS; i++) {
        double at = call(c, 1 + i % 2);
        if (at < least[i % 2]) least[i % 2] = at;
    }
    printf("%s of %d: one thread %.2f ms, two %.2f ms: %.2f times as fast\n", what, LIST,
           1e3 * least[0], 1e3 * least[1], least[0] / least[1]);
}

/* Single tokens for blocks; the queries are the last ones. */
static nsa_desc desc_of(int tokens, int queries, int heads, int dim) {
    nsa_desc d = nsa_desc_default(1, tokens, heads, 1, dim);
    d.cmp_block = d.cmp_stride = d.slc_block = d.slc_local = 1, d.slc_init = 0, d.slc_count = LIST;
    d.first = tokens - queries, d.count = queries;
    return d;
}

static float *numbers(size_t n, int signs) {
    float *x = (float *)allocate(n * sizeof *x);
    uint32_t seed = 1;
    for (size_t i = 0; i < n; i++)
        x[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 8) - (float)(signs << 23);
    return x;
}

static uint16_t *bf16(const float *x, size_t n) {
    uint16_t *rows = (uint16_t *)allocate(n * sizeof *rows);
    for (size_t i = 0; i < n; i++) rows[i] = nsa_f32_to_bf16(x[i]);
    return rows;
}

static void score(int32_t *lists) {
    const size_t of_k = (size_t)KEYS * DIM, of_q = (size_t)HEADS * DIM;
    float *k = numbers(of_k, 1), *q = numbers(of_q, 1), *weights = numbers(HEADS, 0);
    uint16_t *k16 = bf16(k, of_k), *q16 = bf16(q, of_q);
    nsa_score x = {0};
    calling c = {desc_of(KEYS, 1, HEADS, DIM), NULL, &x};
    x.act = NSA_SCORE_RELU;
    x.weights = nsa_tensor_bthd(weights, NSA_F32, 1, HEADS, 1);
    x.blocks = nsa_tensor_bthd(lists, NSA_I32, 1, 1, LIST);
    x.q = nsa_tensor_bthd(q, NSA_F32, 1, HEADS, DIM);
    x.k = nsa_tensor_bthd(k, NSA_F32, KEYS, 1, DIM);
    compare("a list by f32", &c);
    x.q = nsa_tensor_bthd(q16, NSA_BF16, 1, HEADS, DIM);
    x.k = nsa_tensor_bthd(k16, NSA_BF16, KEYS, 1, DIM);
    compare("a list by bf16", &c);
    free(k), free(q), free(weights), free(k16), free(q16);
}

int main(void) {
    float *scores = numbers((size_t)T * T, 0);
    int32_t *lists = (int32_t *)allocate((size_t)T * LIST * sizeof *lists);
    nsa_rank x = {0};
    calling c = {desc_of(T, T, 1, 64), &x, NULL};
    x.scores = nsa_tensor_bthd(scores, NSA_F32, T, 1, T);
    x.blocks = nsa_tensor_bthd(lists, NSA_I32, T, 1, LIST);
    score(lists);
    compare("8192 lists", &c);
    free(scores), free(lists);
    return 0;
}

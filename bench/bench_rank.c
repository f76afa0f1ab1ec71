/* bench_rank: the lists of 8192 queries, each of 2048 of 8192 candidates that are single tokens, as
   DSA's indexer asks for them, in one call of nsa_rank_queries: one thread and two, in turns; of
   each the least time. It checks nothing: the tests do that. */
#define _POSIX_C_SOURCE 200809L
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { T = 8192, LIST = 2048, ROUNDS = 9 };

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

static double call(const nsa_rank *x, nsa_desc *d, int threads) {
    d->threads = threads;
    size_t bytes = nsa_rank_queries_workspace_size(d);
    void *workspace = allocate(bytes);
    double at = seconds();
    nsa_status s = nsa_rank_queries(x, d, workspace, bytes);
    at = seconds() - at;
    free(workspace);
    if (s == NSA_OK) return at;
    fprintf(stderr, "bench_rank: %s (%s)\n", nsa_status_text(s), nsa_status_where(s));
    exit(1);
}

int main(void) {
    nsa_desc d = nsa_desc_default(1, T, 1, 1, 64);
    d.cmp_block = d.cmp_stride = d.slc_block = d.slc_local = 1, d.slc_init = 0, d.slc_count = LIST;
    float *scores = (float *)allocate((size_t)T * T * sizeof *scores);
    int32_t *lists = (int32_t *)allocate((size_t)T * LIST * sizeof *lists);
    uint32_t seed = 1;
    for (size_t i = 0; i < (size_t)T * T; i++)
        scores[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 8);
    nsa_rank x = {0};
    x.scores = nsa_tensor_bthd(scores, NSA_F32, T, 1, T);
    x.blocks = nsa_tensor_bthd(lists, NSA_I32, T, 1, LIST);
    double least[2] = {1e9, 1e9};
    for (int i = 0; i < 2 * ROUNDS; i++) {
        double at = call(&x, &d, 1 + i % 2);
        if (at < least[i % 2]) least[i % 2] = at;
    }
    printf("%d lists of %d: one thread %.1f ms, two %.1f ms: %.2f times as fast\n", T, LIST,
           1e3 * least[0], 1e3 * least[1], least[0] / least[1]);
    free(scores), free(lists);
    return 0;
}

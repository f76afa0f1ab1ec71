/* bench_rank: the lists of DSA's indexer for a whole prompt, each of 2048 candidates that are
   single tokens: ranked scores of 8192 queries in one call of nsa_rank_queries, by one thread and
   two, in turns; of each the least time. The indexer's own step is a row of bench_decode. It checks
   nothing: the tests do that. */
#define _POSIX_C_SOURCE 200809L
#include "report.h"

enum { TOKENS = 8192, LIST = 2048, ROUNDS = 9 };

static double rank(const nsa_rank *x, nsa_desc *d, int threads) {
    d->threads = threads;
    size_t bytes = nsa_rank_queries_workspace_size(d);
    void *workspace = allocate(bytes);
    memset(workspace, 0, bytes); /* its pages are there before */
    double at = seconds();
    nsa_status s = nsa_rank_queries(x, d, workspace, bytes);
    at = seconds() - at;
    free(workspace);
    if (s == NSA_OK) return at;
    fprintf(stderr, "bench_rank: %s (%s)\n", nsa_status_text(s), nsa_status_where(s));
    exit(1);
}

int main(void) {
    float *scores = random_floats((size_t)TOKENS * TOKENS, 1);
    int32_t *lists = (int32_t *)allocate((size_t)TOKENS * LIST * sizeof *lists);
    nsa_desc d = nsa_desc_default(1, TOKENS, 1, 1, 64);
    d.cmp_block = d.cmp_stride = d.slc_block = d.slc_local = 1, d.slc_init = 0, d.slc_count = LIST;
    nsa_rank x = {nsa_tensor_bthd(scores, NSA_F32, TOKENS, 1, TOKENS),
                  nsa_tensor_bthd(lists, NSA_I32, TOKENS, 1, LIST)};
    double least[2] = {1e9, 1e9};
    for (int i = 0; i < 2 * ROUNDS; i++) {
        double at = rank(&x, &d, 1 + i % 2);
        if (at < least[i % 2]) least[i % 2] = at;
    }
    printf("%d lists of %d: one thread %.2f ms, two %.2f ms: %.2f times as fast\n", TOKENS, LIST,
           1e3 * least[0], 1e3 * least[1], least[0] / least[1]);
    free(scores), free(lists);
    return 0;
}

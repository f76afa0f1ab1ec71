/* infllm2.c - InfLLM-V2 (arXiv 2509.24663; MiniCPM4 and 4.1): mean-pooled keys score, a block has
   the best score of the pooled keys that overlap it, the first block, the query's own and those of
   the window before it are always read, and one softmax runs over all of it. What a score is
   divided by comes from means of four times as many keys, as MiniCPM4.1 has it.
   Twin: none; its definition, computed naively, stands below. */
#include "family.h"

enum { T = 390, H = 8, HK = 2, D = 32, L = 8, STRIDE = 4, BLOCK = 16, COUNT = 8 };
enum {
    WINDOW = 32,
    LOCAL = WINDOW / BLOCK + 1,
    COARSE = 4
}; /* the window's blocks and the own one */
enum { POOLED = (T - L) / STRIDE + 1, BLOCKS = (T + BLOCK - 1) / BLOCK };

/* Means of n times L keys, n times STRIDE apart. */
static nsa_desc pooled_by(int n) {
    nsa_desc d = nsa_desc_default(1, T, H, HK, D);
    d.cmp_block = n * L, d.cmp_stride = n * STRIDE, d.slc_block = n * BLOCK;
    return d;
}

/* The logarithm of sum exp over the coarse means that a query sees: what divides its scores. */
static void normalisers(const problem *p, float *lse) {
    nsa_desc d = pooled_by(COARSE);
    int rows = nsa_cmp_count(&d, T);
    float *pooled = floats((size_t)rows * HK * D), *ignored = floats((size_t)T * H * D);
    nsa_attend x = views_of(p);
    nsa_compress pool = {0};
    pool.phi = NSA_PHI_MEAN, pool.dim = D;
    pool.x = x.k, pool.out = view(pooled, rows, HK, D);
    WITH_WORKSPACE(nsa_compress_forward_workspace_size(&pool, &d),
                   nsa_compress_forward(&pool, &d, workspace, bytes));
    x.k = x.v = pool.out;
    x.out = view(ignored, T, H, D), x.lse = view(lse, T, H, 1);
    WITH_WORKSPACE(nsa_attend_cmp_forward_workspace_size(&d),
                   nsa_attend_cmp_forward(&x, &d, workspace, bytes));
    release(pooled), release(ignored);
}

/* The calls: pool, score, choose, attend; and back. Scores have no gradient. */
static void with_nsa(problem *p, int32_t *lists) {
    nsa_desc d = pooled_by(1);
    d.slc_count = COUNT, d.slc_init = 1, d.slc_local = LOCAL;
    d.score_map = NSA_SCORE_OVERLAP_MAX;
    float *pooled = floats((size_t)POOLED * HK * D), *lse = floats((size_t)T * H);
    nsa_attend x = views_of(p), dx = gradients_of(p);
    nsa_compress pool = {0};
    pool.phi = NSA_PHI_MEAN, pool.dim = D;
    pool.x = x.k, pool.out = view(pooled, POOLED, HK, D);
    WITH_WORKSPACE(nsa_compress_forward_workspace_size(&pool, &d),
                   nsa_compress_forward(&pool, &d, workspace, bytes));
    normalisers(p, lse);
    nsa_select select = {0};
    select.q = x.q, select.k = pool.out, select.lse = view(lse, T, H, 1);
    select.blocks = x.blocks = nsa_tensor_bthd(lists, NSA_I32, T, HK, COUNT);
    WITH_WORKSPACE(nsa_select_blocks_workspace_size(&d),
                   nsa_select_blocks(&select, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&d),
                   nsa_attend_slc_forward(&x, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&d),
                   nsa_attend_slc_backward(&dx, &x, &d, workspace, bytes));
    release(pooled), release(lse);
}

/* Logits of the means of l keys, `stride` apart, that lie wholly at or before t; how many. */
static int logits_naively(const problem *p, int t, int h, int l, int stride, double *logits) {
    int seen = t + 1 < l ? 0 : (t + 1 - l) / stride + 1, hk = h / (H / HK);
    for (int i = 0; i < seen; i++) {
        logits[i] = 0;
        for (int c = 0; c < D; c++) {
            double mean = 0;
            for (int j = 0; j < l; j++)
                mean += (double)p->k[((i * stride + j) * HK + hk) * D + c] / l;
            logits[i] += (double)p->q[(t * H + h) * D + c] * mean / sqrt((double)D);
        }
    }
    return seen;
}

/* exp(logit) of the pooled keys over the sum of it over the coarse ones, summed over the heads of a
   group; a block has the largest sum of the pooled keys that share a token with it. Queries before
   the first coarse mean read all their blocks. */
static void scores_naively(const problem *p, int t, int hk, double *of_block) {
    double group[POOLED] = {0}, fine[POOLED], coarse[POOLED];
    int seen = 0;
    for (int h = hk * (H / HK); h < (hk + 1) * (H / HK); h++) {
        double sum = 0;
        int n = logits_naively(p, t, h, COARSE * L, COARSE * STRIDE, coarse);
        seen = logits_naively(p, t, h, L, STRIDE, fine);
        for (int i = 0; i < n; i++) sum += exp(coarse[i]);
        for (int i = 0; i < seen && n > 0; i++) group[i] += exp(fine[i]) / sum;
    }
    for (int j = 0; j <= t / BLOCK; j++) {
        of_block[j] = 0;
        for (int i = 0; i < seen; i++)
            if (i * STRIDE < (j + 1) * BLOCK && i * STRIDE + L > j * BLOCK &&
                group[i] > of_block[j])
                of_block[j] = group[i];
        if (j < 1 || j > t / BLOCK - LOCAL) of_block[j] = INFINITY; /* always read */
    }
}

int main(void) {
    problem p = problem_new(T, H, HK, D);
    result r = result_new(&p);
    int32_t *lists = (int32_t *)allocate(sizeof *lists * T * HK * COUNT);
    int best = 1;
    printf("InfLLM-V2\n");
    with_nsa(&p, lists);
    for (int row = 0; row < T * HK; row++) {
        double of_block[BLOCKS];
        scores_naively(&p, row / HK, row % HK, of_block);
        best &= is_best(lists + row * COUNT, COUNT, of_block, row / HK / BLOCK + 1);
    }
    check(best, "every list holds the forced blocks and the best of the others");
    mask_of_lists(&p, lists, HK, COUNT, BLOCK);
    attend_naively(&p, NULL, NULL, &r);
    compare_all(&p, &r);
    release(lists);
    return finish(&p, &r);
}

/* infllm2.c - InfLLM-V2 (arXiv 2509.24663; MiniCPM4): mean-pooled keys score, a block has the best
   score of the pooled keys that overlap it, the first block and the latest ones are always read,
   and one softmax runs over all of it.
   Twin: none; its definition, computed naively, stands below. */
#include "family.h"

enum { T = 384, H = 8, HK = 2, D = 32, L = 8, STRIDE = 4, BLOCK = 16, COUNT = 8, LOCAL = 3 };
enum { POOLED = (T - L) / STRIDE + 1, BLOCKS = T / BLOCK };

/* The calls: pool, score, choose, attend; and back. Scores have no gradient. */
static void with_nsa(problem *p, int32_t *lists) {
    nsa_desc d = nsa_desc_default(1, T, H, HK, D);
    d.cmp_block = L, d.cmp_stride = STRIDE, d.slc_block = BLOCK;
    d.slc_count = COUNT, d.slc_init = 1, d.slc_local = LOCAL;
    d.score_map = NSA_SCORE_OVERLAP_MAX;
    float *pooled = floats((size_t)POOLED * HK * D), *ignored = floats((size_t)T * H * D);
    nsa_attend x = views_of(p), dx = gradients_of(p), scorer = x;
    nsa_compress pool = {0};
    pool.phi = NSA_PHI_MEAN, pool.dim = D;
    pool.x = x.k, pool.out = view(pooled, POOLED, HK, D);
    WITH_WORKSPACE(nsa_compress_forward_workspace_size(&pool, &d),
                   nsa_compress_forward(&pool, &d, workspace, bytes));
    scorer.k = scorer.v = pool.out; /* only its lse is wanted */
    scorer.out = view(ignored, T, H, D);
    WITH_WORKSPACE(nsa_attend_cmp_forward_workspace_size(&d),
                   nsa_attend_cmp_forward(&scorer, &d, workspace, bytes));
    nsa_select select = {0};
    select.q = x.q, select.k = pool.out, select.lse = scorer.lse;
    select.blocks = x.blocks = nsa_tensor_bthd(lists, NSA_I32, T, HK, COUNT);
    WITH_WORKSPACE(nsa_select_blocks_workspace_size(&d),
                   nsa_select_blocks(&select, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&d),
                   nsa_attend_slc_forward(&x, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&d),
                   nsa_attend_slc_backward(&dx, &x, &d, workspace, bytes));
    release(pooled), release(ignored);
}

/* softmax over the pooled keys that lie wholly at or before t, summed over the heads of a group; a
   block has the largest sum of the pooled keys that share a token with it. */
static void scores_naively(const problem *p, int t, int hk, double *of_block) {
    double group[POOLED] = {0};
    int seen = t + 1 < L ? 0 : (t + 1 - L) / STRIDE + 1;
    for (int h = hk * (H / HK); h < (hk + 1) * (H / HK); h++) {
        double s[POOLED], most = -INFINITY, sum = 0;
        for (int i = 0; i < seen; i++) {
            s[i] = 0;
            for (int c = 0; c < D; c++) {
                double mean = 0;
                for (int j = 0; j < L; j++)
                    mean += (double)p->k[((i * STRIDE + j) * HK + hk) * D + c] / L;
                s[i] += (double)p->q[(t * H + h) * D + c] * mean / sqrt((double)D);
            }
            most = s[i] > most ? s[i] : most;
        }
        for (int i = 0; i < seen; i++) sum += s[i] = exp(s[i] - most);
        for (int i = 0; i < seen; i++) group[i] += s[i] / sum;
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
    /* lse was the scorer's until slc wrote its own */
    attend_naively(&p, NULL, NULL, &r);
    compare_all(&p, &r);
    release(lists);
    return finish(&p, &r);
}

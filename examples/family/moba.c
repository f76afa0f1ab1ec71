/* moba.c - Mixture of Block Attention (arXiv 2502.13189): a block scores by q . (mean of its keys),
   every query head chooses for itself, its own block is always read, one softmax over all of it.
   Twin: none; its definition, computed naively, stands below. */
#include "family.h"

enum { T = 200, H = 8, HK = 2, D = 32, BLOCK = 16, COUNT = 5, BLOCKS = (T + BLOCK - 1) / BLOCK };

/* One call scores and ranks, one attends, one goes back. */
static void with_nsa(problem *p, int32_t *lists, float *scores) {
    nsa_desc d = nsa_desc_default(1, T, H, HK, D);
    d.cmp_block = d.cmp_stride = d.slc_block = BLOCK; /* nothing is compressed */
    d.slc_count = COUNT, d.slc_init = 0, d.slc_local = 1;
    d.list_heads = H; /* though kv heads are shared */
    nsa_attend x = views_of(p), dx = gradients_of(p);
    nsa_score score = {NSA_SCORE_LINEAR, NSA_POOL_MEAN, x.q, x.k, {0}, {0}, {0}, 0};
    score.blocks = x.blocks = nsa_tensor_bthd(lists, NSA_I32, T, H, COUNT);
    score.scores = view(scores, T, H, BLOCKS);
    WITH_WORKSPACE(nsa_score_blocks_workspace_size(&d),
                   nsa_score_blocks(&score, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&d),
                   nsa_attend_slc_forward(&x, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&d),
                   nsa_attend_slc_backward(&dx, &x, &d, workspace, bytes));
}

/* Of the blocks that end before the query's own: the product with the mean of their keys. */
static void scores_naively(const problem *p, int t, int h, double *of_block) {
    for (int j = 0; j < t / BLOCK; j++) {
        of_block[j] = 0;
        for (int c = 0; c < D; c++) {
            double mean = 0;
            for (int s = j * BLOCK; s < (j + 1) * BLOCK; s++)
                mean += (double)p->k[(s * HK + h / (H / HK)) * D + c] / BLOCK;
            of_block[j] += (double)p->q[(t * H + h) * D + c] * mean;
        }
    }
}

int main(void) {
    problem p = problem_new(T, H, HK, D);
    result r = result_new(&p);
    int32_t *lists = (int32_t *)allocate(sizeof *lists * T * H * COUNT);
    float *scores = floats((size_t)T * H * BLOCKS);
    double *of_block = doubles((size_t)T * H * BLOCKS);
    int best = 1;
    printf("MoBA\n");
    with_nsa(&p, lists, scores);
    for (int row = 0; row < T * H; row++) {
        int t = row / H;
        double *mine = of_block + row * BLOCKS;
        scores_naively(&p, t, row % H, mine);
        mine[t / BLOCK] = INFINITY; /* always read */
        best &= is_best(lists + row * COUNT, COUNT, mine, t / BLOCK + 1);
        for (int j = t / BLOCK; j < BLOCKS; j++) /* the library scores what t sees of its own too */
            mine[j] = (double)scores[row * BLOCKS + j];
    }
    compare("scores", scores, of_block, (size_t)T * H * BLOCKS);
    check(best, "every list holds the query's own block and the best of those before");
    mask_of_lists(&p, lists, H, COUNT, BLOCK);
    attend_naively(&p, NULL, NULL, &r);
    compare_all(&p, &r);
    release(lists), release(scores), release(of_block);
    return finish(&p, &r);
}

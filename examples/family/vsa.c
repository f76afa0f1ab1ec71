/* vsa.c - Video Sparse Attention (arXiv 2505.13389): tokens in cubes of 64, one behind the other; a
   coarse attention between the means of cubes, whose best cubes the tokens of a cube read; both
   outputs gated. Nothing is causal.
   Twin: none; its definition, computed naively, stands below. */
#include "family.h"

enum { T = 512, H = 2, D = 32, CUBE = 64, CUBES = T / CUBE, COUNT = 3, TOKENS = T * H * D };

/* What is computed on the way, and the gates. */
typedef struct video {
    problem cubes;                 /* q, k, v, out and their gradients, of the means of cubes */
    float *gates[2], *dgates[2];   /* coarse, fine: (T, H, D) */
    float *fine, *dfine;           /* out of the fine attention, (T, H, D) */
    int32_t *of_cubes, *of_tokens; /* lists: (CUBES, H, COUNT), (T, H, COUNT) */
} video;

static int cube_of(int i) { /* the element of a cube that element i of the tokens belongs to */
    return i / (CUBE * H * D) * (H * D) + i % (H * D);
}

static nsa_compress mean_of(nsa_tensor x, nsa_tensor out) {
    nsa_compress mean = {0};
    mean.phi = NSA_PHI_MEAN, mean.dim = D, mean.x = x, mean.out = out;
    return mean;
}

/* Pool, attend between cubes, choose cubes, attend to their tokens, gate; and back. */
static void with_nsa(problem *p, video *w) {
    nsa_desc fine = nsa_desc_default(1, T, H, H, D), coarse = nsa_desc_default(1, CUBES, H, H, D);
    fine.mask = coarse.mask = NSA_MASK_NONE;
    fine.cmp_block = fine.cmp_stride = fine.slc_block = CUBE;
    coarse.cmp_block = coarse.cmp_stride = coarse.slc_block = 1; /* a mean is a block */
    fine.slc_count = coarse.slc_count = COUNT;
    nsa_attend x = views_of(p), dx = gradients_of(p);
    nsa_attend c = views_of(&w->cubes), dc = gradients_of(&w->cubes);
    nsa_compress mean[] = {mean_of(x.q, c.q), mean_of(x.k, c.k), mean_of(x.v, c.v)};
    nsa_compress dmean[] = {mean_of(dx.q, dc.q), mean_of(dx.k, dc.k), mean_of(dx.v, dc.v)};
    nsa_select select = {c.q, c.k, c.lse, {0}, {0}};
    select.blocks = nsa_tensor_bthd(w->of_cubes, NSA_I32, CUBES, H, COUNT);
    x.blocks = nsa_tensor_bthd(w->of_tokens, NSA_I32, T, H, COUNT);
    x.out = view(w->fine, T, H, D), dx.out = view(w->dfine, T, H, D);
    for (int i = 0; i < 3; i++)
        WITH_WORKSPACE(nsa_compress_forward_workspace_size(&mean[i], &fine),
                       nsa_compress_forward(&mean[i], &fine, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_dense_forward_workspace_size(&coarse),
                   nsa_attend_dense_forward(&c, &coarse, workspace, bytes));
    WITH_WORKSPACE(nsa_select_blocks_workspace_size(&coarse),
                   nsa_select_blocks(&select, &coarse, workspace, bytes));
    for (int i = 0; i < T * H * COUNT; i++) /* the tokens of a cube share its lists */
        w->of_tokens[i] = w->of_cubes[i / (CUBE * H * COUNT) * (H * COUNT) + i % (H * COUNT)];
    WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&fine),
                   nsa_attend_slc_forward(&x, &fine, workspace, bytes));
    for (int i = 0; i < TOKENS; i++) { /* its gates are by channel; nsa_gate's are by head */
        p->out[i] = w->gates[0][i] * w->cubes.out[cube_of(i)] + w->gates[1][i] * w->fine[i];
        w->dgates[0][i] = p->dout[i] * w->cubes.out[cube_of(i)];
        w->dgates[1][i] = p->dout[i] * w->fine[i];
        w->cubes.dout[cube_of(i)] += p->dout[i] * w->gates[0][i];
        w->dfine[i] = p->dout[i] * w->gates[1][i];
    }
    WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&fine),
                   nsa_attend_slc_backward(&dx, &x, &fine, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_dense_backward_workspace_size(&coarse),
                   nsa_attend_dense_backward(&dc, &c, &coarse, workspace, bytes));
    for (int i = 0; i < 3; i++)
        WITH_WORKSPACE(nsa_compress_backward_workspace_size(&mean[i], &fine),
                       nsa_compress_backward(&dmean[i], &mean[i], &fine, workspace, bytes));
}

/* ---- The definition, with the lists that were found ---- */

typedef struct answer {
    result tokens, cubes;
    double *dgates[2];
} answer;

static definition means_of(const problem *p, const problem *cubes) {
    definition d = definition_of(p), c = definition_of(cubes);
    double *tokens[] = {d.q, d.k, d.v}, *means[] = {c.q, c.k, c.v};
    for (int x = 0; x < 3; x++)
        for (int i = 0; i < CUBES * H * D; i++) {
            means[x][i] = 0;
            for (int s = 0; s < CUBE; s++) {
                int token = i / (H * D) * CUBE + s;
                means[x][i] += tokens[x][token * H * D + i % (H * D)] / CUBE;
            }
        }
    for (int i = 0; i < CUBES * H * D; i++) c.dout[i] = 0;
    definition_free(&d);
    return c;
}

static void naively(const problem *p, const video *w, definition *cubes, answer *a) {
    definition tokens = definition_of(p);
    for (int i = 0; i < TOKENS; i++) {
        double dout = tokens.dout[i];
        cubes->dout[cube_of(i)] += dout * (double)w->gates[0][i];
        tokens.dout[i] = dout * (double)w->gates[1][i];
    }
    attend_defined(cubes, NULL, NULL, &a->cubes);
    attend_defined(&tokens, NULL, NULL, &a->tokens);
    double *gradients[2][3] = {{a->tokens.dq, a->tokens.dk, a->tokens.dv},
                               {a->cubes.dq, a->cubes.dk, a->cubes.dv}};
    for (int i = 0; i < TOKENS; i++) {
        double coarse = a->cubes.out[cube_of(i)], fine = a->tokens.out[i];
        a->tokens.out[i] = (double)w->gates[0][i] * coarse + (double)w->gates[1][i] * fine;
        a->dgates[0][i] = (double)p->dout[i] * coarse, a->dgates[1][i] = (double)p->dout[i] * fine;
        for (int x = 0; x < 3; x++) gradients[0][x][i] += gradients[1][x][cube_of(i)] / CUBE;
    }
    definition_free(&tokens);
}

/* Every cube's list holds the cubes with the largest softmax, which the logits order. */
static int best_cubes(const definition *c, const int32_t *lists) {
    int best = 1;
    for (int row = 0; row < CUBES * H; row++) {
        double logits[CUBES];
        for (int j = 0; j < CUBES; j++)
            logits[j] = dot_wide(c->q + row * D, c->k + (j * H + row % H) * D, D);
        best &= is_best(lists + row * COUNT, COUNT, logits, CUBES);
    }
    return best;
}

int main(void) {
    problem p = problem_new(T, H, H, D);
    video w = {0};
    answer a = {0};
    printf("VSA\n");
    w.cubes = problem_new(CUBES, H, H, D);
    for (int i = 0; i < CUBES * H * D; i++) w.cubes.dout[i] = 0;
    for (int g = 0; g < 2; g++) {
        w.gates[g] = random_floats(21 + (unsigned)g, TOKENS), w.dgates[g] = floats(TOKENS);
        a.dgates[g] = doubles(TOKENS);
    }
    w.fine = floats(TOKENS), w.dfine = floats(TOKENS);
    w.of_cubes = (int32_t *)allocate(sizeof(int32_t) * CUBES * H * COUNT);
    w.of_tokens = (int32_t *)allocate(sizeof(int32_t) * T * H * COUNT);
    with_nsa(&p, &w);

    for (int i = 0; i < CUBES * H * CUBES; i++) w.cubes.mask[i] = 1;
    for (int t = 0; t < T * H; t++)
        for (int i = 0; i < COUNT; i++)
            for (int s = 0; s < CUBE; s++)
                p.mask[t * T + w.of_cubes[(t / H / CUBE * H + t % H) * COUNT + i] * CUBE + s] = 1;
    definition cubes = means_of(&p, &w.cubes);
    a.cubes = result_new(&w.cubes), a.tokens = result_new(&p);
    check(best_cubes(&cubes, w.of_cubes), "every cube's list holds the best cubes");
    naively(&p, &w, &cubes, &a);
    compare_all(&p, &a.tokens);
    compare("dgate c", w.dgates[0], a.dgates[0], TOKENS);
    compare("dgate f", w.dgates[1], a.dgates[1], TOKENS);
    for (int g = 0; g < 2; g++) release(w.gates[g]), release(w.dgates[g]), release(a.dgates[g]);
    release(w.fine), release(w.dfine), release(w.of_cubes), release(w.of_tokens);
    definition_free(&cubes), problem_free(&w.cubes), result_free(&a.cubes);
    return finish(&p, &a.tokens);
}

/* vsa.c - Video Sparse Attention (arXiv 2505.13389): tokens in cubes of 4 x 4 x 4, one behind the
   other, smaller ones at the edges; a coarse attention between the means of cubes, whose best cubes
   the tokens of a cube read; both outputs gated. Nothing is causal.
   Twin: none; its definition, computed naively, stands below. */
#include "family.h"

/* A video of 6 x 6 x 6 tokens: an axis has a piece of 4 and one of 2. All cubes are of whole parts
   of 8 tokens, so parts are the blocks that lists name, and nothing is padded. */
enum { AXIS = 6, T = AXIS * AXIS * AXIS, H = 2, D = 32, CUBES = 8, COUNT = 3 };
enum { TOKENS = T * H * D, ROW = H * D, PART = 8, PARTS = T / PART, LARGEST = 64 / PART };
enum { LIST = COUNT * LARGEST }; /* parts of a list */

/* The tokens of a cube, by the bits of its number: 4 or 2 along each axis. */
static int size_of(int cube) {
    int size = 1;
    for (int axis = 0; axis < 3; axis++) size *= cube >> axis & 1 ? AXIS - 4 : 4;
    return size;
}

static int begin_of(int cube) {
    int begin = 0;
    for (int i = 0; i < cube; i++) begin += size_of(i);
    return begin;
}

static int cube_at(int token) {
    int cube = 0;
    while (begin_of(cube + 1) <= token) cube++;
    return cube;
}

/* What is computed on the way, and the gates. */
typedef struct video {
    problem cubes;                 /* q, k, v, out and their gradients, of the means of cubes */
    float *gates[2], *dgates[2];   /* coarse, fine: (T, H, D) */
    float *fine, *dfine;           /* out of the fine attention, (T, H, D) */
    int32_t *of_cubes, *of_tokens; /* lists: (CUBES, H, COUNT), (T, H, LIST) */
} video;

static int cube_of(int i) { /* the element of a cube that element i of the tokens belongs to */
    return cube_at(i / ROW) * ROW + i % ROW;
}

/* The means of cubes: the average of the means of their parts, which are equally large. */
static void pool(nsa_tensor tokens, float *cubes, const nsa_desc *d) {
    float *parts = floats((size_t)PARTS * ROW);
    nsa_compress mean = {0};
    mean.phi = NSA_PHI_MEAN, mean.dim = D, mean.x = tokens, mean.out = view(parts, PARTS, H, D);
    WITH_WORKSPACE(nsa_compress_forward_workspace_size(&mean, d),
                   nsa_compress_forward(&mean, d, workspace, bytes));
    for (int i = 0; i < CUBES * ROW; i++) cubes[i] = 0;
    for (int i = 0; i < PARTS * ROW; i++) {
        int cube = cube_at(i / ROW * PART);
        cubes[cube * ROW + i % ROW] += parts[i] * PART / (float)size_of(cube);
    }
    release(parts);
}

/* Adds the gradient of the means to that of the tokens. */
static void pool_back(nsa_tensor tokens, nsa_tensor dtokens, const float *dcubes,
                      const nsa_desc *d) {
    float *dparts = floats((size_t)PARTS * ROW);
    nsa_compress mean = {0}, dmean = {0};
    mean.phi = NSA_PHI_MEAN, mean.dim = D, mean.x = tokens;
    mean.out = dmean.out = view(dparts, PARTS, H, D), dmean.x = dtokens;
    for (int i = 0; i < PARTS * ROW; i++) {
        int cube = cube_at(i / ROW * PART);
        dparts[i] = dcubes[cube * ROW + i % ROW] * PART / (float)size_of(cube);
    }
    WITH_WORKSPACE(nsa_compress_backward_workspace_size(&mean, d),
                   nsa_compress_backward(&dmean, &mean, d, workspace, bytes));
    release(dparts);
}

/* The tokens of a cube share its list, as the parts of its cubes, ascending; -1 behind the last. */
static void lists_of_tokens(const video *w) {
    for (int row = 0; row < T * H; row++) {
        const int32_t *cubes = w->of_cubes + (cube_at(row / H) * H + row % H) * COUNT;
        int32_t *list = w->of_tokens + row * LIST;
        int n = 0;
        for (int i = 0; i < COUNT; i++)
            for (int part = 0; part < size_of(cubes[i]) / PART; part++)
                list[n++] = begin_of(cubes[i]) / PART + part;
        while (n < LIST) list[n++] = -1;
    }
}

/* Pool, attend between cubes, choose cubes, attend to their tokens, gate; and back. */
static void with_nsa(problem *p, video *w) {
    nsa_desc fine = nsa_desc_default(1, T, H, H, D), coarse = nsa_desc_default(1, CUBES, H, H, D);
    fine.mask = coarse.mask = NSA_MASK_NONE;
    fine.cmp_block = fine.cmp_stride = fine.slc_block = PART;
    coarse.cmp_block = coarse.cmp_stride = coarse.slc_block = 1; /* a mean is a block */
    fine.slc_count = LIST, coarse.slc_count = COUNT;
    nsa_attend x = views_of(p), dx = gradients_of(p);
    nsa_attend c = views_of(&w->cubes), dc = gradients_of(&w->cubes);
    nsa_select select = {c.q, c.k, c.lse, {0}, {0}, {0}};
    select.blocks = nsa_tensor_bthd(w->of_cubes, NSA_I32, CUBES, H, COUNT);
    x.blocks = nsa_tensor_bthd(w->of_tokens, NSA_I32, T, H, LIST);
    pool(x.q, w->cubes.q, &fine), pool(x.k, w->cubes.k, &fine), pool(x.v, w->cubes.v, &fine);
    x.out = view(w->fine, T, H, D), dx.out = view(w->dfine, T, H, D);
    WITH_WORKSPACE(nsa_attend_dense_forward_workspace_size(&coarse),
                   nsa_attend_dense_forward(&c, &coarse, workspace, bytes));
    WITH_WORKSPACE(nsa_select_blocks_workspace_size(&coarse),
                   nsa_select_blocks(&select, &coarse, workspace, bytes));
    lists_of_tokens(w);
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
    pool_back(x.q, dx.q, w->cubes.dq, &fine);
    pool_back(x.k, dx.k, w->cubes.dk, &fine);
    pool_back(x.v, dx.v, w->cubes.dv, &fine);
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
        for (int i = 0; i < CUBES * ROW; i++) {
            int cube = i / ROW;
            means[x][i] = 0;
            for (int s = begin_of(cube); s < begin_of(cube + 1); s++)
                means[x][i] += tokens[x][s * ROW + i % ROW] / size_of(cube);
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
        for (int x = 0; x < 3; x++)
            gradients[0][x][i] += gradients[1][x][cube_of(i)] / size_of(cube_at(i / ROW));
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
    w.of_tokens = (int32_t *)allocate(sizeof(int32_t) * T * H * LIST);
    with_nsa(&p, &w);

    for (int i = 0; i < CUBES * H * CUBES; i++) w.cubes.mask[i] = 1;
    for (int row = 0; row < T * H; row++)
        for (int i = 0; i < COUNT; i++) {
            int cube = w.of_cubes[(cube_at(row / H) * H + row % H) * COUNT + i];
            for (int s = begin_of(cube); s < begin_of(cube + 1); s++) p.mask[row * T + s] = 1;
        }
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

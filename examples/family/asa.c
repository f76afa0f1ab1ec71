/* asa.c - Alternating Sparse Attention (arXiv 2511.00819): NSA's branches dealt out to layers, one
   with the window alone, the next with compressed and selected keys. Two such layers, the second on
   the output of the first, without projections between them.
   Twin: none; its definition, computed naively, stands below. */
#include "family.h"

enum { T = 333, H = 4, HK = 2, D = 32, L = 16, STRIDE = 8, BLOCK = 32, COUNT = 5, WINDOW = 48 };
enum { G = H / HK, N = (T - L) / STRIDE + 1, BLOCKS = (T + BLOCK - 1) / BLOCK };
enum { ROWS = T * H * D };

/* The second layer: q, out and lse are a problem's; k = v are every G-th head of q. */
typedef struct global_layer {
    problem p;
    float *rows, *drows; /* compressed: (N, HK, D) */
    float *out_cmp, *lse_cmp, *out_slc, *lse_slc, *dout_cmp, *dout_slc;
    float *gates, *dgates; /* (T, H, 3), the third 0 */
    int32_t *lists;        /* (T, HK, COUNT) */
} global_layer;

static void local_layer(problem *p, int backward) {
    nsa_desc d = nsa_desc_default(1, T, H, HK, D);
    nsa_attend x = views_of(p), dx = gradients_of(p);
    d.window = WINDOW;
    if (!backward)
        WITH_WORKSPACE(nsa_attend_win_forward_workspace_size(&d),
                       nsa_attend_win_forward(&x, &d, workspace, bytes));
    else
        WITH_WORKSPACE(nsa_attend_win_backward_workspace_size(&d),
                       nsa_attend_win_backward(&dx, &x, &d, workspace, bytes));
}

/* Compress, attend, choose, attend, gate; and back. */
static void with_nsa(global_layer *g) {
    nsa_desc d = nsa_desc_default(1, T, H, HK, D);
    d.cmp_block = L, d.cmp_stride = STRIDE, d.slc_block = BLOCK, d.slc_count = COUNT;
    d.gate = NSA_GATE_NONE;
    nsa_attend slc = views_of(&g->p), dslc = gradients_of(&g->p), cmp, dcmp;
    slc.blocks = nsa_tensor_bthd(g->lists, NSA_I32, T, HK, COUNT);
    slc.out = view(g->out_slc, T, H, D), slc.lse = view(g->lse_slc, T, H, 1);
    dslc.out = view(g->dout_slc, T, H, D);
    cmp = slc, dcmp = dslc;
    cmp.k = cmp.v = view(g->rows, N, HK, D), dcmp.k = dcmp.v = view(g->drows, N, HK, D);
    cmp.out = view(g->out_cmp, T, H, D), cmp.lse = view(g->lse_cmp, T, H, 1);
    dcmp.out = view(g->dout_cmp, T, H, D);
    slc.v = slc.k, dslc.v = dslc.k; /* one view: both gradients are added to it */
    nsa_compress mean = {0}, dmean = {0};
    mean.phi = NSA_PHI_MEAN, mean.dim = D, mean.x = slc.k, mean.out = cmp.k;
    dmean.x = dslc.k, dmean.out = dcmp.k;
    nsa_select select = {slc.q, cmp.k, cmp.lse, slc.blocks, {0}, {0}};
    nsa_tensor gates = view(g->gates, T, H, 3), out = view(g->p.out, T, H, D);
    nsa_gate gate = {gates, cmp.out, slc.out, cmp.out, out}; /* there is no window: g is 0 */
    nsa_gate dgate = {view(g->dgates, T, H, 3), dcmp.out, dslc.out, {0}, gradients_of(&g->p).out};

    WITH_WORKSPACE(nsa_compress_forward_workspace_size(&mean, &d),
                   nsa_compress_forward(&mean, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_cmp_forward_workspace_size(&d),
                   nsa_attend_cmp_forward(&cmp, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_select_blocks_workspace_size(&d),
                   nsa_select_blocks(&select, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&d),
                   nsa_attend_slc_forward(&slc, &d, workspace, bytes));
    demand(nsa_gate_forward(&gate, &d));
    demand(nsa_gate_backward(&dgate, &gate, &d));
    WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&d),
                   nsa_attend_slc_backward(&dslc, &slc, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_cmp_backward_workspace_size(&d),
                   nsa_attend_cmp_backward(&dcmp, &cmp, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_compress_backward_workspace_size(&mean, &d),
                   nsa_compress_backward(&dmean, &mean, &d, workspace, bytes));
}

/* What stands between the layers: queries are the output, keys and values every G-th head of it. */
static void between(problem *from, problem *to, int backward) {
    for (int i = 0; i < ROWS; i++) {
        int head = i / D % H, key = (i / (H * D) * HK + head / G) * D + i % D;
        if (!backward) to->q[i] = from->out[i];
        if (!backward && head % G == 0) to->k[key] = from->out[i];
        if (backward) from->dout[i] = to->dq[i] + (head % G == 0 ? to->dk[key] : 0);
    }
}

/* ---- The definition of the second layer, with the lists that were found ---- */

/* Attention over compressed keys as over T keys, of which N are there. */
static definition compressed(const definition *d, unsigned char *mask) {
    definition c = *d;
    c.k = doubles((size_t)T * HK * D);
    for (int i = 0; i < N * HK * D; i++)
        for (int s = 0; s < L; s++)
            c.k[i] += d->k[(i / (HK * D) * STRIDE + s) * HK * D + i % (HK * D)] / L;
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++)
            for (int i = 0; i < N; i++) mask[(t * H + h) * T + i] = i * STRIDE + L - 1 <= t;
    c.v = c.k, c.mask = mask;
    return c;
}

/* Eq. 9 and 10: p_cmp of the heads of a group, by the strides that both blocks share. */
static int best_blocks(const definition *c, const int32_t *lists) {
    double *p = doubles(T), lse;
    int best = 1;
    for (int row = 0; row < T * HK; row++) {
        double scores[BLOCKS] = {0};
        int t = row / HK, candidates = t / BLOCK + 1;
        for (int h = row % HK * G; h < (row % HK + 1) * G; h++) {
            softmax_row(c, t, h, NULL, p, &lse);
            for (int i = 0; i < N && i * STRIDE + L - 1 <= t; i++)
                for (int s = 0; s < L; s += STRIDE) scores[(i * STRIDE + s) / BLOCK] += p[i];
        }
        for (int j = 0; j < candidates; j++)
            if (j < 1 || j > candidates - 3) scores[j] = INFINITY;
        best &= is_best(lists + row * COUNT, COUNT, scores, candidates);
    }
    release(p);
    return best;
}

/* Both attentions and the gates; the gradient of what the layer was given, into dx. */
static void second_naively(const global_layer *g, definition *d, result *out, double *dx,
                           double *dgates) {
    unsigned char *mask = (unsigned char *)allocate((size_t)T * H * T);
    definition part[] = {compressed(d, mask), *d};
    result of[] = {result_new(&g->p), result_new(&g->p)};
    double *dout = d->dout;
    check(best_blocks(&part[0], g->lists), "every list holds the forced and the best blocks");
    for (int b = 0; b < 2; b++) {
        part[b].dout = doubles(ROWS);
        for (int i = 0; i < ROWS; i++) part[b].dout[i] = dout[i] * (double)g->gates[i / D * 3 + b];
        attend_defined(&part[b], NULL, NULL, &of[b]);
        for (int i = 0; i < ROWS; i++) {
            out->out[i] += of[b].out[i] * (double)g->gates[i / D * 3 + b];
            dgates[i / D * 3 + b] += of[b].out[i] * dout[i];
            dx[i] += of[b].dq[i];
        }
    }
    for (int i = 0; i < T * HK * D; i++) {
        int t = i / (HK * D), in = (t * H + i / D % HK * G) * D + i % D;
        dx[in] += of[1].dk[i] + of[1].dv[i];
        for (int j = 0; j < N; j++) { /* the means that the row is part of */
            int row = j * HK * D + i % (HK * D);
            if (t >= j * STRIDE && t < j * STRIDE + L)
                dx[in] += (of[0].dk[row] + of[0].dv[row]) / L;
        }
    }
    for (int b = 0; b < 2; b++) release(part[b].dout), result_free(&of[b]);
    release(part[0].k), release(mask);
}

static void naively(const problem *p, const global_layer *g, result *r, result *out,
                    double *dgates) {
    definition first = definition_of(p), second = definition_of(&g->p);
    double *dx = doubles(ROWS);
    attend_defined(&first, NULL, NULL, r);
    for (int i = 0; i < ROWS; i++) {
        int head = i / D % H;
        second.q[i] = r->out[i];
        if (head % G == 0) second.k[(i / (H * D) * HK + head / G) * D + i % D] = r->out[i];
    }
    release(second.v), second.v = second.k;
    second_naively(g, &second, out, dx, dgates);
    result_free(r), *r = result_new(p);
    for (int i = 0; i < ROWS; i++) first.dout[i] = dx[i];
    attend_defined(&first, NULL, NULL, r);
    second.v = NULL;
    release(dx);
    definition_free(&first), definition_free(&second);
}

int main(void) {
    problem p = problem_new(T, H, HK, D);
    result r = result_new(&p), last = result_new(&p);
    global_layer g = {problem_new(T, H, HK, D),
                      NULL,
                      NULL,
                      NULL,
                      NULL,
                      NULL,
                      NULL,
                      NULL,
                      NULL,
                      random_floats(31, (size_t)T * H * 3),
                      floats((size_t)T * H * 3),
                      NULL};
    float **memory[] = {&g.out_cmp, &g.lse_cmp, &g.out_slc,  &g.lse_slc,
                        &g.rows,    &g.drows,   &g.dout_cmp, &g.dout_slc};
    double *dgates = doubles((size_t)T * H * 3);
    printf("ASA\n");
    for (int i = 0; i < 8; i++) *memory[i] = floats(ROWS);
    for (int i = 2; i < T * H * 3; i += 3) g.gates[i] = 0;
    g.lists = (int32_t *)allocate(sizeof(int32_t) * T * HK * COUNT);
    local_layer(&p, 0), between(&p, &g.p, 0);
    with_nsa(&g);
    between(&p, &g.p, 1), local_layer(&p, 1);

    mask_of_lists(&g.p, g.lists, HK, COUNT, BLOCK);
    for (int i = 0; i < T * H * T; i++)
        p.mask[i] = i % T <= i / (H * T) && i % T > i / (H * T) - WINDOW;
    naively(&p, &g, &r, &last, dgates);
    for (int i = 2; i < T * H * 3; i += 3) dgates[i] = (double)g.dgates[i]; /* of no branch */
    compare("out 1", p.out, r.out, ROWS), compare("out 2", g.p.out, last.out, ROWS);
    compare("dgates", g.dgates, dgates, (size_t)T * H * 3);
    compare("dq", p.dq, r.dq, ROWS);
    compare("dk", p.dk, r.dk, (size_t)T * HK * D), compare("dv", p.dv, r.dv, (size_t)T * HK * D);
    for (int i = 0; i < 8; i++) release(*memory[i]);
    release(g.gates), release(g.dgates), release(g.lists), release(dgates);
    problem_free(&g.p), result_free(&last);
    return finish(&p, &r);
}

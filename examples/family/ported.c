/* ported.c - what public implementations of NSA compress and choose by, in this library's terms: a
   linear map, a network with a ReLU, one weight for a row, a mean with a bias, the mean of logits.
   Twin: none; each is computed naively beside it. */
#include "family.h"

enum { T = 96, H = 4, HK = 2, D = 16, L = 8, STRIDE = 4, N = (T - L) / STRIDE + 1 };
enum { FLAT = L * D, HIDDEN = 24, ROWS = T * HK * D, OUT = N * HK * D };

/* A compression as its owner has it: out = of2 act(of1 x + bias), rows of a block side by side. */
typedef struct layer {
    const char *name;
    int hidden;               /* 0: no second layer */
    double *of1, *bias, *of2; /* (hidden or D, FLAT), (hidden or D), (D, hidden) */
    double *dof1, *dbias, *dof2;
} layer;

static layer layer_new(const char *name, int hidden, unsigned seed) {
    int units = hidden ? hidden : D;
    float *a = random_floats(seed, (size_t)units * FLAT),
          *b = random_floats(seed + 1, (size_t)units);
    float *c = random_floats(seed + 2, (size_t)D * HIDDEN);
    layer x = {name,
               hidden,
               widened(a, (size_t)units * FLAT),
               widened(b, (size_t)units),
               widened(c, (size_t)D * HIDDEN),
               doubles((size_t)units * FLAT),
               doubles((size_t)units),
               doubles((size_t)D * HIDDEN)};
    release(a), release(b), release(c);
    return x;
}

static void layer_free(layer *x) {
    double *all[] = {x->of1, x->bias, x->of2, x->dof1, x->dbias, x->dof2};
    for (int i = 0; i < 6; i++) release(all[i]);
}

/* Forward and backward of one block of one head, by the chain rule. */
static void block_naively(layer *w, const float *const rows[L], const float *dout, double *out,
                          double *const drows[L]) {
    int units = w->hidden ? w->hidden : D;
    double z[FLAT], dz[FLAT] = {0};
    for (int u = 0; u < units; u++) {
        z[u] = w->bias[u];
        for (int i = 0; i < FLAT; i++) z[u] += w->of1[u * FLAT + i] * (double)rows[i / D][i % D];
        if (!w->hidden) out[u] = z[u], dz[u] = (double)dout[u];
    }
    for (int c = 0; c < D && w->hidden; c++)
        for (int u = 0; u < units; u++) {
            if (z[u] <= 0) continue; /* ReLU */
            out[c] += w->of2[c * units + u] * z[u];
            w->dof2[c * units + u] += (double)dout[c] * z[u];
            dz[u] += w->of2[c * units + u] * (double)dout[c];
        }
    for (int u = 0; u < units; u++) {
        w->dbias[u] += dz[u];
        for (int i = 0; i < FLAT; i++) {
            w->dof1[u * FLAT + i] += dz[u] * (double)rows[i / D][i % D];
            drows[i / D][i % D] += dz[u] * w->of1[u * FLAT + i];
        }
    }
}

static void naively(layer *w, const float *x, const float *dout, double *out, double *dx) {
    for (int row = 0; row < N * HK; row++) {
        const float *rows[L];
        double *drows[L];
        for (int j = 0; j < L; j++) {
            int at = ((row / HK * STRIDE + j) * HK + row % HK) * D;
            rows[j] = x + at, drows[j] = dx + at;
        }
        block_naively(w, rows, dout + row * D, out + row * D, drows);
    }
}

/* The parameters that nsa.h gets, shared by all heads, and their gradients. */
typedef struct parameters {
    nsa_phi phi;
    int units;
    float *w1, *b1, *w2, *dw1, *db1, *dw2;
} parameters;

static parameters parameters_new(nsa_phi phi, int units) {
    size_t first = phi == NSA_PHI_MLP ? (size_t)units * FLAT : FLAT,
           second = (size_t)D * (size_t)units;
    parameters p = {phi,           units,        floats(first), floats(FLAT), floats(second),
                    floats(first), floats(FLAT), floats(second)};
    return p;
}

static void parameters_free(parameters *p) {
    float *all[] = {p->w1, p->b1, p->w2, p->dw1, p->db1, p->dw2};
    for (int i = 0; i < 6; i++) release(all[i]);
}

static void with_nsa(const parameters *p, float *x, float *dout, float *out, float *dx) {
    nsa_desc d = nsa_desc_default(1, T, H, HK, D);
    d.cmp_block = L, d.cmp_stride = STRIDE;
    nsa_compress c = {0}, dc = {0};
    int mlp = p->phi == NSA_PHI_MLP;
    c.phi = p->phi, c.dim = D, c.hidden = p->units;
    c.x = view(x, T, HK, D), c.out = view(out, N, HK, D);
    dc.x = view(dx, T, HK, D), dc.out = view(dout, N, HK, D);
    c.w1 = view(p->w1, 1, 1, mlp ? FLAT : D), dc.w1 = view(p->dw1, 1, 1, mlp ? FLAT : D);
    c.b1 = view(p->b1, 1, 1, D), dc.b1 = view(p->db1, 1, 1, D);
    c.w2 = view(p->w2, 1, 1, p->units), dc.w2 = view(p->dw2, 1, 1, p->units);
    nsa_tensor *shared[] = {&c.w1, &c.b1, &c.w2, &dc.w1, &dc.b1, &dc.w2};
    for (int i = 0; i < 6; i++) shared[i]->head = 0;
    WITH_WORKSPACE(nsa_compress_forward_workspace_size(&c, &d),
                   nsa_compress_forward(&c, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_compress_backward_workspace_size(&c, &d),
                   nsa_compress_backward(&dc, &c, &d, workspace, bytes));
}

/* silu(z) - silu(-z) = z: a linear map is a network of twice the width. */
static parameters of_linear(const layer *w) {
    parameters p = parameters_new(NSA_PHI_MLP, 2 * D);
    for (int i = 0; i < D * FLAT; i++) p.w1[D * FLAT + i] = -(p.w1[i] = (float)w->of1[i]);
    for (int c = 0; c < D; c++) {
        p.b1[D + c] = -(p.b1[c] = (float)w->bias[c]);
        p.w2[c * 2 * D + c] = 1, p.w2[c * 2 * D + D + c] = -1;
    }
    return p;
}

/* silu(s z) / s is max(z, 0) but for 0.28 / s at most. */
static const float steep = 1 << 20;

static parameters of_relu(const layer *w) {
    parameters p = parameters_new(NSA_PHI_MLP, HIDDEN);
    for (int i = 0; i < HIDDEN * FLAT; i++) p.w1[i] = steep * (float)w->of1[i];
    for (int i = 0; i < HIDDEN; i++) p.b1[i] = steep * (float)w->bias[i];
    for (int i = 0; i < D * HIDDEN; i++) p.w2[i] = (float)w->of2[i] / steep;
    return p;
}

/* One weight for all channels of a row, also the 1 / l of a mean: a convolution of filled rows. */
static parameters of_rows(const layer *w) {
    parameters p = parameters_new(NSA_PHI_CONV, 0);
    for (int i = 0; i < FLAT; i++) p.w1[i] = (float)w->of1[i / D * D];
    for (int c = 0; c < D; c++) p.b1[c] = (float)w->bias[c];
    return p;
}

/* Gradients as the owner has them, from those of nsa.h's parameters. */
static void compare_parameters(const layer *w, const parameters *p) {
    int units = w->hidden ? w->hidden : D, n = p->phi == NSA_PHI_MLP ? units * FLAT : L;
    float *dof1 = floats((size_t)n), *dbias = floats((size_t)units);
    double *rows = doubles((size_t)n);
    for (int i = 0; i < n; i++) rows[i] = w->dof1[i];
    if (p->phi == NSA_PHI_CONV) /* of one weight a row: the sum over its channels */
        for (int i = 0; i < FLAT; i++) {
            dof1[i / D] += p->dw1[i];
            rows[i / D] = (i % D ? rows[i / D] : 0) + w->dof1[i % D * FLAT + i];
        }
    for (int i = 0; i < n && p->phi == NSA_PHI_MLP; i++)
        dof1[i] = w->hidden ? steep * p->dw1[i] : p->dw1[i] - p->dw1[D * FLAT + i];
    for (int i = 0; i < units; i++) {
        float both = p->phi == NSA_PHI_MLP ? p->db1[i] - p->db1[D + i] : p->db1[i];
        dbias[i] = w->hidden ? steep * p->db1[i] : both;
    }
    compare("dw", dof1, rows, (size_t)n), compare("dbias", dbias, w->dbias, (size_t)units);
    for (int i = 0; i < D * HIDDEN && w->hidden; i++) p->dw2[i] /= steep;
    if (w->hidden) compare("dw2", p->dw2, w->dof2, (size_t)D * HIDDEN);
    release(dof1), release(dbias), release(rows);
}

static void compression(layer w, parameters p) {
    float *x = random_floats(3, ROWS), *dout = random_floats(2, OUT);
    float *out = floats(OUT), *dx = floats(ROWS);
    double *wanted = doubles(OUT), *wanted_dx = doubles(ROWS);
    printf("%s\n", w.name);
    with_nsa(&p, x, dout, out, dx);
    naively(&w, x, dout, wanted, wanted_dx);
    compare("out", out, wanted, OUT), compare("dx", dx, wanted_dx, ROWS);
    compare_parameters(&w, &p);
    release(x), release(dout), release(out), release(dx), release(wanted), release(wanted_dx);
    layer_free(&w), parameters_free(&p);
}

/* Blocks by the mean, over the heads of a group, of their logits: the logit of the mean query, and
   softmax keeps the order. */
static void mean_of_logits(void) {
    enum { BLOCK = 8, BLOCKS = T / BLOCK, COUNT = 4 };
    problem p = problem_new(T, H, HK, D);
    nsa_desc d = nsa_desc_default(1, T, HK, HK, D);
    nsa_attend cmp = views_of(&p);
    float *mean = floats(ROWS), *out = floats(ROWS);
    int32_t *lists = (int32_t *)allocate(sizeof *lists * T * HK * COUNT);
    int best = 1;
    d.cmp_block = d.cmp_stride = d.slc_block = BLOCK, d.slc_count = COUNT;
    d.slc_init = 0, d.slc_local = 1;
    for (int i = 0; i < T * H * D; i++) mean[(i / (D * H / HK)) * D + i % D] += p.q[i] / (H / HK);
    cmp.k = cmp.v = view(p.k, BLOCKS, HK, D); /* the first keys stand for compressed ones */
    cmp.q = view(mean, T, HK, D), cmp.out = view(out, T, HK, D), cmp.lse = view(p.lse, T, HK, 1);
    WITH_WORKSPACE(nsa_attend_cmp_forward_workspace_size(&d),
                   nsa_attend_cmp_forward(&cmp, &d, workspace, bytes));
    nsa_select select = {cmp.q, cmp.k, cmp.lse, nsa_tensor_bthd(lists, NSA_I32, T, HK, COUNT),
                         {0},   {0}};
    WITH_WORKSPACE(nsa_select_blocks_workspace_size(&d),
                   nsa_select_blocks(&select, &d, workspace, bytes));
    for (int row = 0; row < T * HK; row++) {
        double logits[BLOCKS] = {0};
        int own = row / HK / BLOCK, hk = row % HK;
        for (int j = 0; j < own; j++)
            for (int h = hk * (H / HK); h < (hk + 1) * (H / HK); h++)
                logits[j] += dot(p.q + (row / HK * H + h) * D, p.k + (j * HK + hk) * D, D);
        logits[own] = INFINITY; /* the query's own is always read */
        best &= is_best(lists + row * COUNT, COUNT, logits, own + 1);
    }
    printf("the mean of logits\n");
    check(best, "every list holds the blocks with the largest mean");
    release(mean), release(out), release(lists);
    problem_free(&p);
}

int main(void) {
    layer linear = layer_new("a linear map", 0, 41), relu = layer_new("a ReLU", HIDDEN, 44);
    layer rows = layer_new("one weight a row", 0, 47),
          mean = layer_new("a mean with a bias", 0, 50);
    for (int i = 0; i < D * FLAT; i++) { /* of a channel its own, the same for all */
        int own = i / FLAT == i % D;
        rows.of1[i] = own ? rows.of1[i % FLAT / D * D] : 0, mean.of1[i] = own ? 1.0 / L : 0;
    }
    parameters of[] = {of_linear(&linear), of_relu(&relu), of_rows(&rows), of_rows(&mean)};
    compression(linear, of[0]), compression(relu, of[1]);
    compression(rows, of[2]), compression(mean, of[3]);
    mean_of_logits();
    return failures;
}

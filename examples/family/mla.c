/* mla.c - multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, equations 9 to 19): a token
   keeps one latent row and one rotated row, which all heads share. With W_UK folded into q and W_UV
   behind the output that is one kv head: K is the latent row and the rotated one, V the latent row,
   the first columns of K. It is computed dense, over a list of single tokens as DeepSeek-V3.2
   chooses them, and, as a decoding step does it, for the last token alone.
   Twin: none; the definition below is the paper's, which folds nothing: every head has keys and
   values of its own, W_UK c and W_UV c. Not here: the projections that make c and q. */
#include "family.h"

#ifdef FAMILY_NSA /* the kernels that the programs are built with end at 64 */
enum { LATENT = 48, ROPE = 16 };
#else
enum { LATENT = 512, ROPE = 64 };
#endif
enum { T = 107, H = 16, NOPE = 24, D = NOPE + ROPE, DV = 24, WIDE = LATENT + ROPE };
enum { COUNT = 30, INDEX_HEADS = 4, INDEX_DIM = 16 };

/* What a layer gives attention: the latent rows, q and the rotated key before their rotation, the
   two matrices of each head; and what comes back. */
typedef struct layer {
    float *c, *k_rope;         /* (T, LATENT), (T, ROPE) */
    float *q_nope, *q_rope;    /* (T, H, NOPE), (T, H, ROPE) */
    float *w_uk, *w_uv, *dout; /* (H, NOPE, LATENT), (H, DV, LATENT), (T, H, DV) */
} layer;

typedef struct gradients {
    double *out, *dc, *dk_rope, *dq_nope, *dq_rope, *dw_uk, *dw_uv;
} gradients;

static layer layer_new(void) {
    layer x = {random_floats(1, T * LATENT),        random_floats(2, T * ROPE),
               random_floats(3, T * H * NOPE),      random_floats(4, T * H * ROPE),
               random_floats(5, H * NOPE * LATENT), random_floats(6, H * DV * LATENT),
               random_floats(7, T * H * DV)};
    for (int i = 0; i < H * NOPE * LATENT; i++) x.w_uk[i] *= 0.05f;
    for (int i = 0; i < H * DV * LATENT; i++) x.w_uv[i] *= 0.05f;
    return x;
}

static void layer_free(layer *x) {
    float *all[] = {x->c, x->k_rope, x->q_nope, x->q_rope, x->w_uk, x->w_uv, x->dout};
    for (int i = 0; i < 7; i++) release(all[i]);
}

static gradients gradients_new(void) {
    gradients g = {doubles(T * H * DV),     doubles(T * LATENT),   doubles(T * ROPE),
                   doubles(T * H * NOPE),   doubles(T * H * ROPE), doubles(H * NOPE * LATENT),
                   doubles(H * DV * LATENT)};
    return g;
}

static void gradients_free(gradients *g) {
    double *all[] = {g->out, g->dc, g->dk_rope, g->dq_nope, g->dq_rope, g->dw_uk, g->dw_uv};
    for (int i = 0; i < 7; i++) release(all[i]);
}

/* ---- The definition ---- */

/* Turns the pairs (2i, 2i + 1) of a row at position t by t 10000^(-2i / ROPE), or back. */
static void turned(const double *x, int t, double sign, double *to) {
    for (int i = 0; i < ROPE / 2; i++) {
        double angle = sign * t * pow(10000, -2.0 * i / ROPE), c = cos(angle), s = sin(angle);
        to[2 * i] = x[2 * i] * c - x[2 * i + 1] * s;
        to[2 * i + 1] = x[2 * i] * s + x[2 * i + 1] * c;
    }
}

/* rows += w c, and back: dc += w^T drows, dw += drows c^T; w is (n, LATENT). */
static void project(const float *w, const float *c, int n, double *rows) {
    for (int i = 0; i < n; i++) rows[i] += dot(w + i * LATENT, c, LATENT);
}
static void project_back(const float *w, const float *c, int n, const double *drows, double *dc,
                         double *dw) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < LATENT; j++) {
            dc[j] += drows[i] * (double)w[i * LATENT + j];
            dw[i * LATENT + j] += drows[i] * (double)c[j];
        }
}

/* k = (W_UK c, RoPE(k_rope)), v = W_UV c, q = (q_nope, RoPE(q_rope)) of one head. */
static void rows_of_head(const layer *x, int h, double *q, double *k, double *v) {
    double row[ROPE];
    for (int t = 0; t < T; t++) {
        project(x->w_uk + h * NOPE * LATENT, x->c + t * LATENT, NOPE, k + t * D);
        project(x->w_uv + h * DV * LATENT, x->c + t * LATENT, DV, v + t * DV);
        for (int i = 0; i < ROPE; i++) row[i] = (double)x->k_rope[t * ROPE + i];
        turned(row, t, 1, k + t * D + NOPE);
        for (int i = 0; i < NOPE; i++) q[t * D + i] = (double)x->q_nope[(t * H + h) * NOPE + i];
        for (int i = 0; i < ROPE; i++) row[i] = (double)x->q_rope[(t * H + h) * ROPE + i];
        turned(row, t, 1, q + t * D + NOPE);
    }
}

/* out = softmax(q k / sqrt(D)) v of one head over the mask, and its gradients. */
static void head_of(const double *q, const double *k, const double *v, const unsigned char *mask,
                    const float *dout, double *out, double *dq, double *dk, double *dv) {
    double p[T], scale = 1 / sqrt((double)D);
    for (int t = 0; t < T; t++, mask += T) {
        double sum = 0, most = -INFINITY, along = 0;
        for (int s = 0; s < T; s++) {
            p[s] = mask[s] ? scale * dot_wide(q + t * D, k + s * D, D) : -INFINITY;
            most = p[s] > most ? p[s] : most;
        }
        for (int s = 0; s < T; s++) sum += p[s] = mask[s] ? exp(p[s] - most) : 0;
        for (int s = 0; s < T; s++) p[s] = mask[s] ? p[s] / sum : 0;
        for (int s = 0; s < T; s++)
            for (int i = 0; i < DV; i++) out[t * H * DV + i] += p[s] * v[s * DV + i];
        for (int i = 0; i < DV; i++) along += (double)dout[t * H * DV + i] * out[t * H * DV + i];
        for (int s = 0; s < T; s++) {
            double dp = 0;
            for (int i = 0; i < DV; i++) {
                dp += (double)dout[t * H * DV + i] * v[s * DV + i];
                dv[s * DV + i] += p[s] * (double)dout[t * H * DV + i];
            }
            for (int i = 0; i < D; i++) {
                dq[t * D + i] += scale * p[s] * (dp - along) * k[s * D + i];
                dk[s * D + i] += scale * p[s] * (dp - along) * q[t * D + i];
            }
        }
    }
}

static void defined(const layer *x, const unsigned char *mask, gradients *g) {
    for (int h = 0; h < H; h++) {
        double *q = doubles(T * D), *k = doubles(T * D), *v = doubles(T * DV), row[ROPE];
        double *dq = doubles(T * D), *dk = doubles(T * D), *dv = doubles(T * DV);
        rows_of_head(x, h, q, k, v);
        head_of(q, k, v, mask, x->dout + h * DV, g->out + h * DV, dq, dk, dv);
        for (int t = 0; t < T; t++) {
            project_back(x->w_uk + h * NOPE * LATENT, x->c + t * LATENT, NOPE, dk + t * D,
                         g->dc + t * LATENT, g->dw_uk + h * NOPE * LATENT);
            project_back(x->w_uv + h * DV * LATENT, x->c + t * LATENT, DV, dv + t * DV,
                         g->dc + t * LATENT, g->dw_uv + h * DV * LATENT);
            for (int i = 0; i < NOPE; i++) g->dq_nope[(t * H + h) * NOPE + i] = dq[t * D + i];
            turned(dq + t * D + NOPE, t, -1, g->dq_rope + (t * H + h) * ROPE);
            turned(dk + t * D + NOPE, t, -1, row);
            for (int i = 0; i < ROPE; i++) g->dk_rope[t * ROPE + i] += row[i];
        }
        double *all[] = {q, k, v, dq, dk, dv};
        for (int i = 0; i < 6; i++) release(all[i]);
    }
}

/* ---- The same with nsa.h ---- */

/* One kv head of LATENT + ROPE, whose first LATENT columns are the values too. */
typedef struct folded {
    float *q, *k, *out, *lse, *dq, *dk, *dout; /* q (T, H, WIDE), k (T, WIDE), out (T, H, LATENT) */
} folded;

static folded folded_new(void) {
    folded f = {floats(T * H * WIDE), floats(T * WIDE), floats(T * H * LATENT), floats(T * H),
                floats(T * H * WIDE), floats(T * WIDE), floats(T * H * LATENT)};
    return f;
}

static void folded_free(folded *f) {
    float *all[] = {f->q, f->k, f->out, f->lse, f->dq, f->dk, f->dout};
    for (int i = 0; i < 7; i++) release(all[i]);
}

/* Rotates rows of `heads` into the last ROPE columns of `to`, or gradients from there back. */
static void rotate(const float *rows, float *to, int heads, int back) {
    nsa_desc d = nsa_desc_default(1, T, H, 1, D);
    nsa_rope x = {0}, dx = {0};
    x.heads = heads, x.dim = ROPE;
    x.x = view(rows, T, heads, ROPE);
    x.out = view(to + LATENT, T, heads, WIDE);
    dx.x = x.x, dx.out = x.out;
    demand(back ? nsa_rope_backward(&dx, &x, &d) : nsa_rope_forward(&x, &d));
}

/* q . (W_UK c) = (W_UK^T q) . c, so W_UK goes into q; and dout . (W_UV c) likewise. */
static void fold(const float *w, const float *row, int n, float *to) {
    for (int j = 0; j < LATENT; j++) {
        double sum = 0;
        for (int i = 0; i < n; i++) sum += (double)row[i] * (double)w[i * LATENT + j];
        to[j] = (float)sum;
    }
}

static void fold_all(const layer *x, folded *f) {
    for (int t = 0; t < T; t++) {
        for (int j = 0; j < LATENT; j++) f->k[t * WIDE + j] = x->c[t * LATENT + j];
        for (int h = 0; h < H; h++) {
            const int row = t * H + h;
            fold(x->w_uk + h * NOPE * LATENT, x->q_nope + row * NOPE, NOPE, f->q + row * WIDE);
            fold(x->w_uv + h * DV * LATENT, x->dout + row * DV, DV, f->dout + row * LATENT);
        }
    }
    rotate(x->k_rope, f->k, 1, 0), rotate(x->q_rope, f->q, H, 0);
}

static nsa_desc desc_of(void) {
    nsa_desc d = nsa_desc_default(1, T, H, 1, WIDE);
    d.dim_v = LATENT;
    d.scale = 1 / sqrt((double)D); /* of the paper's heads */
    d.slc_block = 1, d.slc_count = COUNT;
    return d;
}

static void attend(const folded *f, const int32_t *lists) {
    nsa_desc d = desc_of();
    nsa_attend x = {0}, dx = {0};
    x.q = view(f->q, T, H, WIDE), x.k = x.v = view(f->k, T, 1, WIDE);
    x.out = view(f->out, T, H, LATENT), x.lse = view(f->lse, T, H, 1);
    dx.q = view(f->dq, T, H, WIDE), dx.k = dx.v = view(f->dk, T, 1, WIDE); /* both are added */
    dx.out = view(f->dout, T, H, LATENT);
    if (lists) {
        x.blocks = nsa_tensor_bthd((void *)(uintptr_t)lists, NSA_I32, T, 1, COUNT);
        WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&d),
                       nsa_attend_slc_forward(&x, &d, workspace, bytes));
        WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&d),
                       nsa_attend_slc_backward(&dx, &x, &d, workspace, bytes));
        return;
    }
    WITH_WORKSPACE(nsa_attend_dense_forward_workspace_size(&d),
                   nsa_attend_dense_forward(&x, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_dense_backward_workspace_size(&d),
                   nsa_attend_dense_backward(&dx, &x, &d, workspace, bytes));
}

/* A decoding step: the last query alone, over the rows that are there. */
static void step(const folded *f, const int32_t *lists) {
    nsa_desc d = desc_of();
    nsa_attend x = {0};
    float *out = floats(H * LATENT), *lse = floats(H);
    int same = 1;
    d.first = T - 1, d.count = 1;
    x.q = view(f->q + (T - 1) * H * WIDE, 1, H, WIDE), x.k = x.v = view(f->k, T, 1, WIDE);
    x.out = view(out, 1, H, LATENT), x.lse = view(lse, 1, H, 1);
    if (lists) {
        const int32_t *list = lists + (T - 1) * COUNT;
        x.blocks = nsa_tensor_bthd((void *)(uintptr_t)list, NSA_I32, 1, 1, COUNT);
        WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&d),
                       nsa_attend_slc_forward(&x, &d, workspace, bytes));
    } else {
        WITH_WORKSPACE(nsa_attend_dense_forward_workspace_size(&d),
                       nsa_attend_dense_forward(&x, &d, workspace, bytes));
    }
    for (int i = 0; i < H * LATENT; i++) same &= out[i] == f->out[(T - 1) * H * LATENT + i];
    for (int h = 0; h < H; h++) same &= lse[h] == f->lse[(T - 1) * H + h];
    check(same, "the last token alone has the bits of the whole");
    release(out), release(lse);
}

/* The lists of DeepSeek-V3.2's indexer: the best tokens by sum_h w_h ReLU(q_h . k). */
static void choose(int32_t *lists) {
    nsa_desc d = nsa_desc_default(1, T, INDEX_HEADS, 1, INDEX_DIM);
    float *q = random_floats(11, T * INDEX_HEADS * INDEX_DIM),
          *k = random_floats(12, T * INDEX_DIM);
    float *weights = random_floats(13, T * INDEX_HEADS);
    int best = 1;
    d.cmp_block = d.cmp_stride = d.slc_block = 1, d.slc_count = COUNT;
    d.slc_init = d.slc_local = 0, d.forced = NSA_FORCED_ON_TOP;
    nsa_score score = {NSA_SCORE_RELU, NSA_POOL_MAX, {0}, {0}, {0}, {0}, {0}, 0};
    score.q = view(q, T, INDEX_HEADS, INDEX_DIM), score.k = view(k, T, 1, INDEX_DIM);
    score.weights = view(weights, T, INDEX_HEADS, 1);
    score.blocks = nsa_tensor_bthd(lists, NSA_I32, T, 1, COUNT);
    WITH_WORKSPACE(nsa_score_blocks_workspace_size(&d),
                   nsa_score_blocks(&score, &d, workspace, bytes));
    for (int t = 0; t < T; t++) {
        double of_token[T] = {0};
        for (int s = 0; s <= t; s++)
            for (int h = 0; h < INDEX_HEADS; h++) {
                double product =
                    dot(q + (t * INDEX_HEADS + h) * INDEX_DIM, k + s * INDEX_DIM, INDEX_DIM);
                of_token[s] += product > 0 ? (double)weights[t * INDEX_HEADS + h] * product : 0;
            }
        best &= is_best(lists + t * COUNT, COUNT, of_token, t + 1);
    }
    check(best, "every list holds the best tokens");
    release(q), release(k), release(weights);
}

/* ---- Comparing: the folded gradients, unfolded ---- */

static void compare_layer(const layer *x, const folded *f, const gradients *g) {
    float *out = floats(T * H * DV), *dc = floats(T * LATENT), *dk_rope = floats(T * ROPE);
    float *dq_nope = floats(T * H * NOPE), *dq_rope = floats(T * H * ROPE);
    double *dw_uk = doubles(H * NOPE * LATENT), *dw_uv = doubles(H * DV * LATENT);
    float *narrow_uk = floats(H * NOPE * LATENT), *narrow_uv = floats(H * DV * LATENT);
    for (int r = 0; r < T * H; r++) {
        const int h = r % H;
        for (int i = 0; i < DV; i++) {
            const int at = (h * DV + i) * LATENT;
            out[r * DV + i] = (float)dot(x->w_uv + at, f->out + r * LATENT, LATENT);
            for (int j = 0; j < LATENT; j++)
                dw_uv[at + j] += (double)x->dout[r * DV + i] * (double)f->out[r * LATENT + j];
        }
        for (int i = 0; i < NOPE; i++) {
            const int at = (h * NOPE + i) * LATENT;
            dq_nope[r * NOPE + i] = (float)dot(x->w_uk + at, f->dq + r * WIDE, LATENT);
            for (int j = 0; j < LATENT; j++)
                dw_uk[at + j] += (double)x->q_nope[r * NOPE + i] * (double)f->dq[r * WIDE + j];
        }
    }
    for (int i = 0; i < T * LATENT; i++) dc[i] = f->dk[i / LATENT * WIDE + i % LATENT];
    for (int i = 0; i < H * NOPE * LATENT; i++) narrow_uk[i] = (float)dw_uk[i];
    for (int i = 0; i < H * DV * LATENT; i++) narrow_uv[i] = (float)dw_uv[i];
    rotate(dk_rope, f->dk, 1, 1), rotate(dq_rope, f->dq, H, 1);
    compare("out", out, g->out, T * H * DV), compare("dc", dc, g->dc, T * LATENT);
    compare("dk_r", dk_rope, g->dk_rope, T * ROPE);
    compare("dq_c", dq_nope, g->dq_nope, T * H * NOPE);
    compare("dq_r", dq_rope, g->dq_rope, T * H * ROPE);
    compare("dw_uk", narrow_uk, g->dw_uk, H * NOPE * LATENT);
    compare("dw_uv", narrow_uv, g->dw_uv, H * DV * LATENT);
    void *all[] = {out, dc, dk_rope, dq_nope, dq_rope, dw_uk, dw_uv, narrow_uk, narrow_uv};
    for (int i = 0; i < 9; i++) release(all[i]);
}

static void run(const char *name, int chooses) {
    layer x = layer_new();
    folded f = folded_new();
    gradients g = gradients_new();
    int32_t *lists = (int32_t *)allocate(sizeof *lists * T * COUNT);
    unsigned char *mask = (unsigned char *)allocate(T * T);
    printf("%s\n", name);
    if (chooses) choose(lists);
    for (int t = 0; t < T; t++) {
        for (int s = 0; s <= t; s++) mask[t * T + s] = !chooses;
        for (int i = 0; chooses && i < COUNT && lists[t * COUNT + i] >= 0; i++)
            mask[t * T + lists[t * COUNT + i]] = 1;
    }
    fold_all(&x, &f);
    attend(&f, chooses ? lists : NULL), step(&f, chooses ? lists : NULL);
    defined(&x, mask, &g);
    compare_layer(&x, &f, &g);
    layer_free(&x), folded_free(&f), gradients_free(&g), release(lists), release(mask);
}

int main(void) {
    run("MLA, dense", 0);
    run("MLA, over lists of single tokens", 1);
    return failures;
}

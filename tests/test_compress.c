/* test_compress.c - phi: the mean, the depthwise convolution, the MLP.
   Twin: nsa.h's "Compression". */
#include "harness/compress_slots.h"

typedef struct compress_case {
    const char *name, *shape;
    nsa_phi phi;
    int dim, hidden;
    int shared; /* one set of parameters for all heads */
    int bare;   /* without biases and position embedding */
} compress_case;

/* Units of the hidden layer, as many as the library takes: CUDA in steps of 8. */
#define HIDDEN(n) (CHECKS_CUDA ? ((n) + 7) / 8 * 8 : (n))

/* clang-format off: a table is read in columns. Every fifth, which `little` takes, has each phi. */
static const compress_case compress_cases[] = {
    {"mean", "small", NSA_PHI_MEAN, 16, 0, 0, 0},
    {"conv", "small", NSA_PHI_CONV, 16, 0, 0, 0},
    {"mlp", "small", NSA_PHI_MLP, 16, HIDDEN(24), 0, 0},
    {"conv, shared, bare", "G 2, D 24", NSA_PHI_CONV, 24, 0, 1, 1},
    {"mlp, shared", "G 2, D 24", NSA_PHI_MLP, 24, HIDDEN(10), 1, 0},
    {"mlp, varlen", "varlen empty", NSA_PHI_MLP, 16, HIDDEN(12), 0, 0},
    {"mlp, one hidden", "D 1 / 3", NSA_PHI_MLP, 1, HIDDEN(1), 0, 0},
    {"mean, the paper's", "the paper's blocks", NSA_PHI_MEAN, 64, 0, 0, 0},
    {"mean, T < l", "T < l", NSA_PHI_MEAN, 16, 0, 0, 0},
    {"mlp, T < l", "T < l", NSA_PHI_MLP, 16, HIDDEN(8), 0, 0},
    {"conv, T = l", "T = l", NSA_PHI_CONV, 16, 0, 0, 0},
    {"mlp, overlap of 4", "G 6, D 80", NSA_PHI_MLP, 80, HIDDEN(33), 0, 0},
    {"conv, no multiple", "T no multiple of anything", NSA_PHI_CONV, 32, 0, 0, 0},
    {"mlp, no multiple", "T no multiple of anything", NSA_PHI_MLP, 12, HIDDEN(40), 0, 0},
    {"mean, D 256", "D 256", NSA_PHI_MEAN, 256, 0, 0, 0},
    {"mlp, D 576", "D 576 / 512", NSA_PHI_MLP, 576, 24, 0, 0},
    {"mean, varlen", "varlen l = d", NSA_PHI_MEAN, 16, 0, 0, 0},
    {"conv, varlen, shared", "varlen four", NSA_PHI_CONV, 16, 0, 1, 0},
    {"mlp, bare, D 7", "D 7 / 13", NSA_PHI_MLP, 7, HIDDEN(5), 0, 1},
    {"mlp, bare", "small", NSA_PHI_MLP, 8, HIDDEN(8), 0, 1},
#ifdef CHECK_CUDA
    {"mlp, l D no multiple of a tile", "l' 112", NSA_PHI_MLP, 8, 8, 0, 0},
#endif
};

#ifdef CHECK_F64
static const compress_case tiny_cases[] = {
    {"grad, mean", "grad, G 2", NSA_PHI_MEAN, 3, 0, 0, 0},
    {"grad, conv", "grad, G 1", NSA_PHI_CONV, 3, 0, 0, 0},
    {"grad, conv, shared", "grad, G 1", NSA_PHI_CONV, 3, 0, 1, 1},
    {"grad, mlp", "grad, G 1", NSA_PHI_MLP, 3, 5, 0, 0},
    {"grad, mlp, shared", "grad, G 1", NSA_PHI_MLP, 3, 5, 1, 0},
    {"grad, mlp, bare", "grad, G 3, overlap 4", NSA_PHI_MLP, 2, 4, 0, 1},
    {"grad, mlp, varlen", "grad, varlen", NSA_PHI_MLP, 3, 4, 0, 0},
};
#endif
/* clang-format on */

static nsa_status compress_forward(const void *x, const nsa_desc *d, void *work, size_t bytes) {
    return nsa_compress_forward((const nsa_compress *)x, d, work, bytes);
}

static nsa_status compress_backward(const void *dx, const void *x, const nsa_desc *d, void *work,
                                    size_t bytes) {
    return nsa_compress_backward((const nsa_compress *)dx, (const nsa_compress *)x, d, work, bytes);
}

static size_t compress_forward_size(const void *x, const nsa_desc *d) {
    return nsa_compress_forward_workspace_size((const nsa_compress *)x, d);
}

static size_t compress_backward_size(const void *dx, const void *x, const nsa_desc *d) {
    (void)dx;
    return nsa_compress_backward_workspace_size((const nsa_compress *)x, d);
}

static void compress_configure(const suite *s, void *x) {
    const compress_case *c = (const compress_case *)s->options;
    nsa_compress *to = (nsa_compress *)x;
    to->phi = c->phi, to->dim = c->dim, to->hidden = c->hidden;
}

static phi_case phi_of(const compress_case *c) {
    const geometry *g = shape(c->shape);
    phi_case p = {c->phi, c->dim, c->hidden, c->shared, c->bare, g->Hk, g->l};
    return p;
}

static const char *const names[PHI_TENSORS] = {"x", "out", "pos", "w1", "b1", "w2", "b2"};

static void reference(const suite *s, const nsa_desc *d, int tokens, ref_prec prec, double **x,
                      double **dx) {
    phi_case p = phi_of((const compress_case *)s->options);
    compress_reference r;
    suite unused;
    memset(&unused, 0, sizeof unused);
    compress_slots c = compress_add(&unused, &p, names, 0, 1);
    compress_make(&r, s, &c, &p, d, tokens, prec, x, dx);
    ref_compress_forward(&r.x);
    ref_compress_backward(&r.x, &r.dx);
    compress_done(&r, s, &c, dx);
}

static suite suite_of(const compress_case *c) {
    phi_case p = phi_of(c);
    suite s;
    memset(&s, 0, sizeof s);
    s.name = c->name, s.struct_size = sizeof(nsa_compress), s.options = c;
    s.forward = compress_forward, s.backward = compress_backward;
    s.forward_size = compress_forward_size, s.backward_size = compress_backward_size;
    s.configure = compress_configure, s.reference = reference, s.prepare = compress_weights;
    s.unused = UNUSED_SLC | UNUSED_FORCED;
    compress_add(&s, &p, names, 0, 1);
    return s;
}

/* A convolution of weights 1/l is the mean: how its training starts. l is a power of two: exact
   weights. */
static void test_conv_is_mean(void) {
    nsa_desc d = desc_of(shape("small"));
    suite mean = suite_of(&compress_cases[0]), conv = suite_of(&compress_cases[1]);
    values v = values_random(&mean, &d, NSA_REAL_DTYPE, 4),
           w = values_random(&conv, &d, NSA_REAL_DTYPE, 4);
    plan rows = plan_of(&d);
    check_case("conv of 1 / l is the mean");
    for (size_t j = 0; j < slot_count(&conv.slots[2], &rows); j++) w.x[2][j] = 1.0 / d.cmp_block;
    for (size_t j = 0; j < slot_count(&conv.slots[3], &rows); j++) w.x[3][j] = 0;
    values want = values_reference(&mean, &d, &v, REF_F64), zeros = values_zero(&conv, &d);
    instance p;
    instance_new(&p, &conv, &d, &w, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, &zeros);
    instance_run(&p);
    suite_compare("out", &p.x[1], &d, 0, want.x[1], want.x[1], 1);
    suite_compare("dx.x", &p.dx[0], &d, 0, want.dx[0], want.dx[0], 1);
    values_free(&v), values_free(&w), values_free(&want), values_free(&zeros);
    guards_free();
}

/* Sequences that are all shorter than a block, where CUDA's host knows of no more rows. */
static void test_rows_below_a_block(void) {
    static const int32_t begins[] = {0, 3, 5};
    for (int i = 0; i < 3; i++) {
        nsa_desc d = desc_of(shape("small"));
        suite s = suite_of(&compress_cases[i]);
        d.cmp_stride = d.cmp_block;
        d.batch = 2, d.begins = begins, d.rows = begins[d.batch];
        values v = values_random(&s, &d, NSA_REAL_DTYPE, 5), zeros = values_zero(&s, &d);
        check_case("rows below a block, %s", s.name);
        instance p;
        instance_new(&p, &s, &d, &v, NSA_REAL_DTYPE, NSA_REAL_DTYPE, LAYOUT_GAPS, &zeros);
        instance_run(&p);
        values_free(&v), values_free(&zeros);
        guards_free();
    }
}

static void refuse_both(const spoiled *b, const char *what, int kind, const char *where) {
    refused(&b->forward, what, kind, where);
    refused(&b->backward, what, kind, where);
}

static void test_options(void) {
    suite s = suite_of(&compress_cases[2]);
    nsa_desc d = desc_of(shape(compress_cases[2].shape));
    spoiled b;
    spoiled_new(&b, &s, &d);
    nsa_compress *x = (nsa_compress *)instance_x(&b.p), good = *x;
    x->dim = 0, refuse_both(&b, "no width", NSA_ERROR_SIZE, "dim"), *x = good;
    x->dim = 577, refuse_both(&b, "width 577", NSA_ERROR_SIZE, "dim"), *x = good;
    x->hidden = 0, refuse_both(&b, "no hidden layer", NSA_ERROR_SIZE, "hidden"), *x = good;
    x->hidden = -1, refuse_both(&b, "hidden -1", NSA_ERROR_SIZE, "hidden"), *x = good;
    x->phi = (nsa_phi)3, refuse_both(&b, "no phi", NSA_ERROR_OPTION, "phi"), *x = good;
    guards_free();
}

int main(int argc, char **argv) {
    int step = asked_step(argc, argv, CHECKS_CUDA ? 1 : 3, 5);
    for (int i = 0; i < COUNT(compress_cases); i += step) {
        nsa_desc d = desc_of(shape(compress_cases[i].shape));
        suite s = suite_of(&compress_cases[i]);
        const char *limit = compress_cases[i].dim % 8 ? "dim" : NULL;
        for (int k = 0; k < COUNT(dtypes) && !suite_refused(&s, &d, limit); k++) {
            suite_reference(&s, &d, dtypes[k], (uint64_t)(10 * i + k));
            if ((i / step + k) % COUNT(dtypes)) continue; /* these in one dtype a case */
            suite_bit_tests(&s, &d, dtypes[k]);
            suite_nan(&s, &d, dtypes[k]);
        }
    }
#ifdef CHECK_F64
    for (int i = 0; i < COUNT(tiny_cases); i++) {
        nsa_desc d = desc_of(shape(tiny_cases[i].shape));
        suite s = suite_of(&tiny_cases[i]);
        suite_gradcheck(&s, &d);
    }
#endif
    for (int i = 0; i < 5; i++) {
        nsa_desc d = desc_of(shape("small"));
        compress_case c = compress_cases[i];
        c.shape = "small";
        suite s = suite_of(&c);
        suite_refusals(&s, &d);
    }
    test_options();
    test_conv_is_mean();
    test_rows_below_a_block();
    return check_done("test_compress");
}

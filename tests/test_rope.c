/* test_rope.c - rotary positions.
   Twin: nsa.h's "RoPE". */
#include "harness/suite.h"

typedef struct rope_case {
    const char *name, *shape;
    int keys; /* heads: 0 those of q, 1 those of k */
    int dim, given;
    nsa_rope_pairs pairs;
    nsa_rope_scaling scaling;
    double base, factor, fast, slow;
    int trained_context;
} rope_case;

/* clang-format off: a table is read in columns. */
static const rope_case rope_cases[] = {
    {"interleaved", "small", 0, 16, 0, NSA_ROPE_INTERLEAVED, NSA_ROPE_SCALING_NONE, 0, 0, 0, 0, 0},
    {"halves", "small", 1, 16, 0, NSA_ROPE_HALVES, NSA_ROPE_SCALING_NONE, 0, 0, 0, 0, 0},
    {"positions given", "small", 0, 24, 1, NSA_ROPE_INTERLEAVED, NSA_ROPE_SCALING_NONE, 500000, 0,
     0, 0, 0},
    {"linear", "G 16, D 128", 1, 64, 1, NSA_ROPE_HALVES, NSA_ROPE_SCALING_LINEAR, 0, 4, 0, 0, 0},
    {"ntk", "G 16, D 128", 0, 80, 0, NSA_ROPE_INTERLEAVED, NSA_ROPE_SCALING_NTK, 0, 8, 0, 0, 0},
    {"yarn", "small", 0, 128, 1, NSA_ROPE_HALVES, NSA_ROPE_SCALING_YARN, 0, 16, 0, 0, 4096},
    {"yarn, ramp given", "small", 1, 64, 0, NSA_ROPE_INTERLEAVED, NSA_ROPE_SCALING_YARN, 10000, 2,
     20, 2, 64},
    {"yarn, factor 1", "small", 1, 64, 0, NSA_ROPE_INTERLEAVED, NSA_ROPE_SCALING_YARN, 10000, 1, 0,
     0, 64},
    {"D 2", "small", 1, 2, 1, NSA_ROPE_HALVES, NSA_ROPE_SCALING_NONE, 0, 0, 0, 0, 0},
    {"D 256", "small", 1, 256, 0, NSA_ROPE_INTERLEAVED, NSA_ROPE_SCALING_NONE, 0, 0, 0, 0, 0},
    {"varlen", "varlen empty", 0, 16, 0, NSA_ROPE_INTERLEAVED, NSA_ROPE_SCALING_NONE, 0, 0, 0, 0,
     0},
    {"varlen, given", "varlen four", 1, 32, 1, NSA_ROPE_HALVES, NSA_ROPE_SCALING_NONE, 0, 0, 0, 0,
     0},
    {"16 heads", "scale 1, heads 16", 0, 16, 0, NSA_ROPE_HALVES, NSA_ROPE_SCALING_NONE, 0, 0, 0, 0,
     0},
};
/* clang-format on */

enum { SLOT_X, SLOT_OUT, SLOT_POSITIONS };

static int heads_of(const rope_case *c) {
    return c->keys ? shape(c->shape)->Hk : shape(c->shape)->H;
}

static nsa_status rope_forward(const void *x, const nsa_desc *d, void *work, size_t bytes) {
    (void)work, (void)bytes;
    return nsa_rope_forward((const nsa_rope *)x, d);
}

static nsa_status rope_backward(const void *dx, const void *x, const nsa_desc *d, void *work,
                                size_t bytes) {
    (void)work, (void)bytes;
    return nsa_rope_backward((const nsa_rope *)dx, (const nsa_rope *)x, d);
}

static void rope_configure(const suite *s, void *x) {
    const rope_case *c = (const rope_case *)s->options;
    nsa_rope *r = (nsa_rope *)x;
    r->heads = heads_of(c), r->dim = c->dim;
    r->base = c->base, r->pairs = c->pairs, r->scaling = c->scaling, r->factor = c->factor;
    r->trained_context = c->trained_context, r->fast = c->fast, r->slow = c->slow;
}

static void rope_reference(const suite *s, const nsa_desc *d, int tokens, ref_prec prec, double **x,
                           double **dx) {
    const rope_case *c = (const rope_case *)s->options;
    int32_t *positions = (int32_t *)check_alloc((size_t)tokens * 4);
    for (int t = 0; t < tokens; t++) positions[t] = c->given ? (int32_t)x[SLOT_POSITIONS][t] : t;
    ref_rope r = {prec,
                  tokens,
                  heads_of(c),
                  c->dim,
                  positions,
                  c->base != 0 ? c->base : 10000,
                  c->pairs == NSA_ROPE_HALVES,
                  REF_ROPE_NONE,
                  c->factor,
                  c->trained_context,
                  c->fast != 0 ? c->fast : 32,
                  c->slow != 0 ? c->slow : 1};
    if (c->scaling == NSA_ROPE_SCALING_LINEAR) r.scaling = REF_ROPE_LINEAR;
    if (c->scaling == NSA_ROPE_SCALING_NTK) r.scaling = REF_ROPE_NTK;
    if (c->scaling == NSA_ROPE_SCALING_YARN) r.scaling = REF_ROPE_YARN;
    (void)d;
    ref_rope_rotate(&r, 1, x[SLOT_X], x[SLOT_OUT]);
    ref_rope_rotate(&r, -1, dx[SLOT_OUT], dx[SLOT_X]);
    free(positions);
}

/* Positions out of order, some far out. */
static void rope_positions(const suite *s, const nsa_desc *d, double **x) {
    plan p = plan_of(d);
    if (s->count > SLOT_POSITIONS)
        for (int r = 0; r < p.rows; r++)
            x[SLOT_POSITIONS][r] = check_below(r % 5 ? 300 : 100000, 9, (uint64_t)r);
}

static suite suite_of(const rope_case *c) {
    suite s;
    memset(&s, 0, sizeof s);
    s.name = c->name, s.struct_size = sizeof(nsa_rope), s.options = c;
    s.forward = rope_forward, s.backward = rope_backward;
    s.configure = rope_configure, s.reference = rope_reference, s.prepare = rope_positions;
    slot *x = suite_add(&s, "x", offsetof(nsa_rope, x), ROWS_QUERY, heads_of(c), c->dim);
    x->gradient = x->unread = 1;
    slot *out = suite_add(&s, "out", offsetof(nsa_rope, out), ROWS_QUERY, heads_of(c), c->dim);
    out->output = out->gradient = 1;
    if (!c->given) return s;
    slot *positions = suite_add(&s, "positions", offsetof(nsa_rope, positions), ROWS_QUERY, 1, 1);
    positions->dtype = NSA_I32, positions->optional = positions->no_heads = 1;
    return s;
}

/* out may be x itself. */
static void test_in_place(const rope_case *c, nsa_dtype dtype) {
    nsa_desc d = desc_of(shape(c->shape));
    suite s = suite_of(c);
    values v = values_random(&s, &d, dtype, 3), zeros = values_zero(&s, &d);
    instance p;
    check_case("%s, %s, in place", c->name, dtype_name(dtype));
    instance_new(&p, &s, &d, &v, dtype, dtype, 0, &zeros);
    instance_run(&p);
    unsigned char *apart = tensor_bits(&p.x[SLOT_OUT]);
    nsa_rope *x = (nsa_rope *)instance_x(&p);
    x->out = x->x;
    tensor_open_slice(&p.x[SLOT_X], &d);
    nsa_status status = instance_forward(&p);
    CHECK_OK("forward", status);
    plan rows = plan_of(&d);
    unsigned char *same = tensor_bits(&p.x[SLOT_X]);
    size_t row = (size_t)(heads_of(c) * c->dim) * dtype_size(dtype);
    for (int b = 0; b < rows.sequences; b++)
        CHECK_BITS("out", same + (size_t)rows.row[b] * row, apart + (size_t)rows.row[b] * row,
                   (size_t)rows.length[b] * row, row);
    free(apart), free(same);
    values_free(&v), values_free(&zeros);
    guards_free();
}

static void refuse_option(const spoiled *b, const char *what, int kind, const char *where) {
    refused(&b->forward, what, kind, where);
    refused(&b->backward, what, kind, where);
}

static void test_options(void) {
    const rope_case *c = &rope_cases[6];
    nsa_desc d = desc_of(shape(c->shape));
    suite s = suite_of(c);
    spoiled b;
    spoiled_new(&b, &s, &d);
    nsa_rope *x = (nsa_rope *)instance_x(&b.p), good = *x;
    static const int dims[] = {0, -2, 3, 257, 258};
    for (int i = 0; i < COUNT(dims); i++)
        x->dim = dims[i], refuse_option(&b, "dim", NSA_ERROR_SIZE, "dim"), *x = good;
    x->heads = 0, refuse_option(&b, "no heads", NSA_ERROR_SIZE, "heads"), *x = good;
    x->pairs = (nsa_rope_pairs)2, refuse_option(&b, "pairs", NSA_ERROR_OPTION, "pairs"), *x = good;
    x->scaling = (nsa_rope_scaling)4, refuse_option(&b, "scaling", NSA_ERROR_OPTION, "scaling"),
    *x = good;
    static const double factors[] = {0, 0.5, -1, NAN, INFINITY};
    for (int i = 0; i < COUNT(factors); i++)
        x->factor = factors[i], refuse_option(&b, "factor", NSA_ERROR_SIZE, "factor"), *x = good;
    x->base = -1, refuse_option(&b, "base", NSA_ERROR_SIZE, "base"), *x = good;
    x->base = NAN, refuse_option(&b, "base", NSA_ERROR_SIZE, "base"), *x = good;
    x->trained_context = 0, refuse_option(&b, "context", NSA_ERROR_SIZE, "trained_context"),
    *x = good;
    x->fast = 1, x->slow = 2, refuse_option(&b, "ramp upside down", NSA_ERROR_SIZE, "fast"),
    *x = good;
    guards_free();
}

/* Rotations keep what attention sees when every position moves by the same: q k depends on
   differences. */
static void test_shift(nsa_rope_pairs pairs, int shift) {
    enum { T = 50, D = 32 };
    double *in = random_numbers(11, 2 * T * D, NSA_REAL_DTYPE), *rotated[2], *score[2];
    nsa_desc d = nsa_desc_default(1, T, 1, 1, D);
    check_case("shift by %d, pairs %d", shift, pairs);
    for (int k = 0; k < 2; k++) {
        rotated[k] = ref_zeros(2 * T * D), score[k] = ref_zeros(T * T);
        for (int side = 0; side < 2; side++) {
            tensor x = tensor_new("x", LAYOUT_BTHD, NSA_REAL_DTYPE, 1, T, 1, D, 0);
            tensor y = tensor_new("y", LAYOUT_BTHD, NSA_REAL_DTYPE, 1, T, 1, D, 0);
            tensor at = tensor_new("positions", LAYOUT_BTHD, NSA_I32, 1, T, 1, 1, 0);
            int32_t positions[T];
            for (int t = 0; t < T; t++) positions[t] = t + k * shift;
            tensor_put(&x, in + side * T * D), tensor_put_i32(&at, positions);
            nsa_rope r;
            memset(&r, 0, sizeof r);
            r.x = x.view, r.out = y.view, r.positions = at.view, r.heads = 1, r.dim = D,
            r.pairs = pairs;
            CHECK(nsa_rope_forward(&r, &d) == NSA_OK, "forward");
            tensor_get(&y, rotated[k] + side * T * D);
            guards_free();
        }
        for (int t = 0; t < T; t++)
            for (int u = 0; u < T; u++)
                score[k][t * T + u] =
                    ref_dot(REF_F64, rotated[k] + t * D, rotated[k] + (T + u) * D, D);
    }
    double roundoff = sizeof(nsa_real) == 8 ? 1.1e-16 : 6.0e-8;
    CHECK_NEAR("scores", score[1], score[0], T * T, T,
               (16 + (sizeof(nsa_real) == 8 ? shift : 0)) * roundoff * check_norm(score[0], T * T));
    for (int k = 0; k < 2; k++) free(rotated[k]), free(score[k]);
    free(in);
}

int main(int argc, char **argv) {
    int step = asked_step(argc, argv, CHECKS_CUDA ? 1 : 3, 5);
    for (int i = 0; i < COUNT(rope_cases); i += step) {
        const rope_case *c = &rope_cases[i];
        nsa_desc d = desc_of(shape(c->shape));
        suite s = suite_of(c);
        const char *limit = c->dim % 8 ? "dim" : NULL;
        for (int k = 0; k < COUNT(dtypes) && !suite_refused(&s, &d, limit); k++) {
            suite_reference(&s, &d, dtypes[k], (uint64_t)(10 * i + k));
            if ((i / step + k) % COUNT(dtypes)) continue; /* these in one dtype a case */
            suite_bit_tests(&s, &d, dtypes[k]);
            test_in_place(c, dtypes[k]);
        }
#ifdef CHECK_F64
        rope_case small = *c;
        small.shape = tiny_geometries[i % COUNT(tiny_geometries)].name;
        small.dim = c->dim < 8 ? c->dim : 8;
        d = desc_of(shape(small.shape));
        s = suite_of(&small);
        suite_gradcheck(&s, &d);
#endif
    }
    for (int given = 0; given < 3; given += 2) {
        nsa_desc d = desc_of(shape("small"));
        suite s = suite_of(&rope_cases[given]);
        suite_refusals(&s, &d);
    }
    test_options();
    test_shift(NSA_ROPE_INTERLEAVED, 1000);
    test_shift(NSA_ROPE_HALVES, 100000);
    return check_done("test_rope");
}

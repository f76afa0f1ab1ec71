/* test_rope.c - rotary positions.
   Twin: nsa.h's "RoPE". */
#include "harness/suite.h"
#include "harness/rope_constants.h"

typedef struct rope_case {
    const char *name, *shape;
    int keys; /* heads: 0 those of q, 1 those of k */
    int given;
    nsa_rope options; /* its factors point to those below with LongRoPE */
} rope_case;

enum { MOST_PAIRS = 128 };

/* Dividers of LongRoPE, and frequencies of nobody's; python/tests/rope.py has the dividers too. */
static double short_factors[MOST_PAIRS], long_factors[MOST_PAIRS];
static double own_frequencies[MOST_PAIRS];

static void fill_numbers(void) {
    for (int i = 0; i < MOST_PAIRS; i++) {
        short_factors[i] = 1 + 0.03125 * i, long_factors[i] = 1 + 0.0625 * i * i;
        own_frequencies[i] = i % 3 ? -0.7 / (1 + i) : i % 2 ? 0 : 3.5;
    }
}

/* clang-format off: a table is read in columns. */
static const rope_case rope_cases[] = {
    {"interleaved", "small", 0, 0, {.dim = 16}},
    {"halves", "small", 1, 0, {.dim = 16, .pairs = NSA_ROPE_HALVES}},
    {"positions given", "small", 0, 1, {.dim = 24, .base = 500000}},
    {"linear",
     "G 16, D 128",
     1,
     1,
     {.dim = 64, .pairs = NSA_ROPE_HALVES, .scaling = NSA_ROPE_SCALING_LINEAR, .factor = 4}},
    {"ntk", "G 16, D 128", 0, 0, {.dim = 80, .scaling = NSA_ROPE_SCALING_NTK, .factor = 8}},
    {"yarn",
     "small",
     0,
     1,
     {.dim = 128,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_YARN,
      .factor = 16,
      .trained_context = 4096}},
    {"yarn, ramp given",
     "small",
     1,
     0,
     {.dim = 64,
      .scaling = NSA_ROPE_SCALING_YARN,
      .base = 10000,
      .factor = 2,
      .fast = 20,
      .slow = 2,
      .trained_context = 64}},
    {"yarn, factor 1",
     "small",
     1,
     0,
     {.dim = 64,
      .scaling = NSA_ROPE_SCALING_YARN,
      .base = 10000,
      .factor = 1,
      .trained_context = 64}},
    {"yarn, 3 tokens",
     "small",
     1,
     0,
     {.dim = 64,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_YARN,
      .factor = 32,
      .trained_context = 3}},
    {"yarn, no whole pairs",
     "small",
     0,
     0,
     {.dim = 64,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_YARN,
      .base = 150000,
      .factor = 32,
      .trained_context = 4096,
      .untruncated = 1}},
    {"yarn, mscale",
     "small",
     0,
     1,
     {.dim = 64,
      .scaling = NSA_ROPE_SCALING_YARN,
      .factor = 40,
      .trained_context = 4096,
      .mscale = 0.707,
      .mscale_all_dim = 1}},
    {"yarn, one mscale",
     "small",
     1,
     0,
     {.dim = 64,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_YARN,
      .factor = 40,
      .trained_context = 4096,
      .mscale = 0.707}},
    {"yarn, magnitude",
     "small",
     1,
     0,
     {.dim = 64,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_YARN,
      .factor = 8,
      .fast = 16,
      .slow = 2,
      .trained_context = 2048,
      .magnitude = 1.375,
      .mscale = 0.5,
      .mscale_all_dim = 2}},
    {"dynamic",
     "G 16, D 128",
     1,
     1,
     {.dim = 64,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_DYNAMIC,
      .factor = 2,
      .trained_context = 2048,
      .context = 7000}},
    {"dynamic, as trained",
     "small",
     0,
     0,
     {.dim = 24,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_DYNAMIC,
      .factor = 2,
      .trained_context = 2048,
      .context = 2048}},
    {"llama3",
     "small",
     0,
     1,
     {.dim = 128,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_LLAMA3,
      .base = 500000,
      .factor = 8,
      .trained_context = 8192}},
    {"llama3, ramp given",
     "small",
     1,
     0,
     {.dim = 64,
      .scaling = NSA_ROPE_SCALING_LLAMA3,
      .base = 10000,
      .factor = 32,
      .fast = 9,
      .slow = 0.5,
      .trained_context = 512}},
    {"longrope, short",
     "small",
     0,
     0,
     {.dim = 96,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_LONGROPE,
      .factor = 32,
      .trained_context = 4096,
      .context = 4096}},
    {"longrope, long",
     "small",
     1,
     1,
     {.dim = 96,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_LONGROPE,
      .factor = 32,
      .trained_context = 4096,
      .context = 4097}},
    {"longrope, magnitude",
     "small",
     1,
     0,
     {.dim = 64,
      .pairs = NSA_ROPE_HALVES,
      .scaling = NSA_ROPE_SCALING_LONGROPE,
      .trained_context = 4096,
      .magnitude = 1.25}},
    {"frequencies given",
     "varlen four",
     0,
     1,
     {.dim = 32,
      .pairs = NSA_ROPE_HALVES,
      .scaling = (nsa_rope_scaling)99,
      .base = NAN,
      .factor = NAN,
      .frequencies = own_frequencies}},
    {"frequencies and magnitude",
     "small",
     1,
     0,
     {.dim = 16,
      .scaling = NSA_ROPE_SCALING_YARN,
      .magnitude = 0.75,
      .frequencies = own_frequencies}},
    {"D 2", "small", 1, 1, {.dim = 2, .pairs = NSA_ROPE_HALVES}},
    {"D 256", "small", 1, 0, {.dim = 256}},
#ifndef CHECK_CUDA
    {"D 576", "small", 1, 0, {.dim = 576}},
#endif
    {"varlen", "varlen empty", 0, 0, {.dim = 16}},
    {"varlen, given", "varlen four", 1, 1, {.dim = 32, .pairs = NSA_ROPE_HALVES}},
    {"16 heads", "scale 1, heads 16", 0, 0, {.dim = 64, .pairs = NSA_ROPE_HALVES}},
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

/* The options of a case, and heads, with `own` views. */
static nsa_rope options_of(const nsa_rope *options, int heads, nsa_rope own) {
    nsa_rope r = *options;
    r.x = own.x, r.out = own.out, r.positions = own.positions;
    r.heads = heads, r.short_factors = short_factors, r.long_factors = long_factors;
    return r;
}

static void rope_configure(const suite *s, void *x) {
    const rope_case *c = (const rope_case *)s->options;
    nsa_rope *r = (nsa_rope *)x;
    *r = options_of(&c->options, heads_of(c), *r);
}

static ref_rope reference_of(const nsa_rope *c) {
    ref_rope r;
    memset(&r, 0, sizeof r);
    r.dim = c->dim, r.base = c->base != 0 ? c->base : 10000;
    if (c->scaling == NSA_ROPE_SCALING_LINEAR) r.scaling = REF_ROPE_LINEAR;
    if (c->scaling == NSA_ROPE_SCALING_NTK) r.scaling = REF_ROPE_NTK;
    if (c->scaling == NSA_ROPE_SCALING_YARN) r.scaling = REF_ROPE_YARN;
    if (c->scaling == NSA_ROPE_SCALING_DYNAMIC) r.scaling = REF_ROPE_DYNAMIC;
    if (c->scaling == NSA_ROPE_SCALING_LLAMA3) r.scaling = REF_ROPE_LLAMA3;
    if (c->scaling == NSA_ROPE_SCALING_LONGROPE) r.scaling = REF_ROPE_LONGROPE;
    r.factor = c->factor, r.trained_context = c->trained_context, r.context = c->context;
    r.fast = c->fast != 0 ? c->fast : r.scaling == REF_ROPE_LLAMA3 ? 4 : 32;
    r.slow = c->slow != 0 ? c->slow : 1;
    r.untruncated = c->untruncated, r.magnitude = c->magnitude;
    r.mscale = c->mscale, r.mscale_all_dim = c->mscale_all_dim;
    r.short_factors = short_factors, r.long_factors = long_factors, r.frequencies = c->frequencies;
    return r;
}

static void rope_reference(const suite *s, const nsa_desc *d, int tokens, ref_prec prec, double **x,
                           double **dx) {
    const rope_case *c = (const rope_case *)s->options;
    int32_t *positions = (int32_t *)check_alloc((size_t)tokens * 4);
    for (int t = 0; t < tokens; t++) positions[t] = c->given ? (int32_t)x[SLOT_POSITIONS][t] : t;
    ref_rope r = reference_of(&c->options);
    r.prec = prec, r.rows = tokens, r.heads = heads_of(c), r.positions = positions;
    r.halves = c->options.pairs == NSA_ROPE_HALVES;
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
    slot *x = suite_add(&s, "x", offsetof(nsa_rope, x), ROWS_QUERY, heads_of(c), c->options.dim);
    x->gradient = x->unread = 1;
    slot *out =
        suite_add(&s, "out", offsetof(nsa_rope, out), ROWS_QUERY, heads_of(c), c->options.dim);
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
    size_t row = (size_t)(heads_of(c) * c->options.dim) * dtype_size(dtype);
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

/* Of LongRoPE, dynamic NTK and given frequencies. *x is a good YaRN. */
static void test_given_options(spoiled *b, nsa_rope *x) {
    const nsa_rope yarn = *x;
    static const double bad[] = {0, -1, NAN, INFINITY};
    double numbers[MOST_PAIRS];
    for (int i = 0; i < COUNT(numbers); i++) numbers[i] = 1;
    x->scaling = NSA_ROPE_SCALING_DYNAMIC, x->context = -1;
    refuse_option(b, "context", NSA_ERROR_SIZE, "context"), *x = yarn;
    x->scaling = NSA_ROPE_SCALING_LLAMA3, x->fast = 1;
    refuse_option(b, "Llama 3's ramp", NSA_ERROR_SIZE, "fast"), *x = yarn;
    x->scaling = NSA_ROPE_SCALING_LONGROPE;
    const nsa_rope longrope = *x;
    x->context = -1, refuse_option(b, "context", NSA_ERROR_SIZE, "context"), *x = longrope;
    x->trained_context = 1;
    refuse_option(b, "context", NSA_ERROR_SIZE, "trained_context"), *x = longrope;
    x->factor = 0, refuse_option(b, "factor", NSA_ERROR_SIZE, "factor"), *x = longrope;
    x->short_factors = NULL;
    refuse_option(b, "short_factors", NSA_ERROR_NULL, "short_factors"), *x = longrope;
    x->long_factors = NULL;
    refuse_option(b, "long_factors", NSA_ERROR_NULL, "long_factors"), *x = longrope;
    for (int i = 0; i < COUNT(bad); i++) {
        numbers[x->dim / 2 - 1] = bad[i];
        x->short_factors = numbers;
        refuse_option(b, "short_factors", NSA_ERROR_SIZE, "short_factors"), *x = longrope;
        x->long_factors = numbers;
        refuse_option(b, "long_factors", NSA_ERROR_SIZE, "long_factors"), *x = longrope;
        if (i < 2) continue; /* a frequency may be 0, and below it */
        x->frequencies = numbers;
        refuse_option(b, "frequencies", NSA_ERROR_SIZE, "frequencies"), *x = longrope;
    }
    *x = yarn;
}

static void test_options(void) {
    const rope_case *c = &rope_cases[6];
    nsa_desc d = desc_of(shape(c->shape));
    suite s = suite_of(c);
    spoiled b;
    spoiled_new(&b, &s, &d);
    nsa_rope *x = (nsa_rope *)instance_x(&b.p), good = *x;
    static const int dims[] = {0, -2, 3, 257, 577, 578};
    for (int i = 0; i < COUNT(dims); i++)
        x->dim = dims[i], refuse_option(&b, "dim", NSA_ERROR_SIZE, "dim"), *x = good;
    x->heads = 0, refuse_option(&b, "no heads", NSA_ERROR_SIZE, "heads"), *x = good;
    x->pairs = (nsa_rope_pairs)2, refuse_option(&b, "pairs", NSA_ERROR_OPTION, "pairs"), *x = good;
    x->scaling = (nsa_rope_scaling)7, refuse_option(&b, "scaling", NSA_ERROR_OPTION, "scaling"),
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
    static const double magnitudes[] = {-1, NAN, INFINITY};
    for (int i = 0; i < COUNT(magnitudes); i++) {
        x->magnitude = magnitudes[i];
        refuse_option(&b, "magnitude", NSA_ERROR_SIZE, "magnitude"), *x = good;
        x->mscale = magnitudes[i], refuse_option(&b, "mscale", NSA_ERROR_SIZE, "mscale"), *x = good;
        x->mscale_all_dim = magnitudes[i];
        refuse_option(&b, "mscale_all_dim", NSA_ERROR_SIZE, "mscale"), *x = good;
    }
    test_given_options(&b, x);
    guards_free();
}

/* As transformers has it: the frequencies of models that people use. MODELS of python/tests/rope.py
   are these. */
static void test_constants(void) {
    static const struct {
        const char *name;
        nsa_rope options;
    } models[] = {
        {"default", {.dim = 64, .trained_context = 2048, .context = 100}},
        {"linear",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_LINEAR,
          .factor = 4,
          .trained_context = 8192,
          .context = 100}},
        {"dynamic, short",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_DYNAMIC,
          .factor = 2,
          .trained_context = 2048,
          .context = 2048}},
        {"dynamic, long",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_DYNAMIC,
          .factor = 2,
          .trained_context = 2048,
          .context = 7000}},
        {"yarn",
         {.dim = 128,
          .scaling = NSA_ROPE_SCALING_YARN,
          .base = 1e6,
          .factor = 4,
          .trained_context = 32768}},
        {"yarn, attention_factor",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_YARN,
          .factor = 8,
          .fast = 16,
          .slow = 2,
          .trained_context = 2048,
          .magnitude = 1.375}},
        {"yarn, mscale",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_YARN,
          .factor = 40,
          .trained_context = 4096,
          .mscale = 0.707,
          .mscale_all_dim = 1}},
        {"yarn, one mscale",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_YARN,
          .factor = 40,
          .trained_context = 4096,
          .mscale = 0.707}},
        {"yarn, truncate false",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_YARN,
          .base = 150000,
          .factor = 32,
          .trained_context = 4096,
          .untruncated = 1}},
        {"yarn, 3 tokens",
         {.dim = 64, .scaling = NSA_ROPE_SCALING_YARN, .factor = 32, .trained_context = 3}},
        {"llama3, 3.1",
         {.dim = 128,
          .scaling = NSA_ROPE_SCALING_LLAMA3,
          .base = 500000,
          .factor = 8,
          .fast = 4,
          .slow = 1,
          .trained_context = 8192}},
        {"llama3, 3.2",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_LLAMA3,
          .base = 500000,
          .factor = 32,
          .trained_context = 8192}},
        {"longrope, short",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_LONGROPE,
          .factor = 32,
          .trained_context = 4096,
          .context = 4096}},
        {"longrope, long",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_LONGROPE,
          .factor = 32,
          .trained_context = 4096,
          .context = 4097}},
        {"longrope, attention_factor",
         {.dim = 64,
          .scaling = NSA_ROPE_SCALING_LONGROPE,
          .factor = 32,
          .trained_context = 4096,
          .context = 4097,
          .magnitude = 1.25}},
    };
    CHECK(COUNT(models) == COUNT(rope_constants), "a model each");
    for (int m = 0; m < COUNT(models); m++) {
        const rope_constant *want = &rope_constants[m];
        ref_rope reference = reference_of(&models[m].options);
        nsa_rope r = options_of(&models[m].options, 1, models[m].options);
        double got[MOST_PAIRS], magnitude = 0;
        check_case("as transformers has it: %s", want->name);
        CHECK(!strcmp(want->name, models[m].name), "the table's is %s", models[m].name);
        CHECK_OK("frequencies", nsa_rope_frequencies(&r, got, &magnitude));
        CHECK(fabs(magnitude - want->magnitude) <= 1e-13, "magnitude: %.15g, not %.15g", magnitude,
              want->magnitude);
        for (int i = 0; i < COUNT(rope_constant_pairs); i++) {
            int pair = rope_constant_pairs[i];
            double expected = want->frequency[i], stretch;
            double other = ref_rope_frequency(&reference, pair, &stretch);
            CHECK(fabs(got[pair] - expected) <= 4e-7 * expected, "pair %d: %.9g, not %.9g", pair,
                  got[pair], expected);
            CHECK(fabs(got[pair] - other) <= 1e-13 * other, "pair %d: %.17g, the reference %.17g",
                  pair, got[pair], other);
        }
    }
    nsa_rope r;
    double got[MOST_PAIRS], magnitude;
    memset(&r, 0, sizeof r);
    r.heads = 1, r.dim = 64;
    CHECK(nsa_status_kind(nsa_rope_frequencies(NULL, got, &magnitude)) == NSA_ERROR_NULL, "no x");
    CHECK(nsa_status_kind(nsa_rope_frequencies(&r, NULL, &magnitude)) == NSA_ERROR_NULL, "no room");
    CHECK(nsa_status_kind(nsa_rope_frequencies(&r, got, NULL)) == NSA_ERROR_NULL, "no magnitude");
    r.frequencies = own_frequencies, r.scaling = NSA_ROPE_SCALING_LONGROPE; /* not looked at */
    CHECK_OK("no dividers beside frequencies", nsa_rope_frequencies(&r, got, &magnitude));
    CHECK(!memcmp(got, own_frequencies, 32 * sizeof *got) && magnitude == 1, "are handed back");
    r.dim = 7;
    CHECK(nsa_status_kind(nsa_rope_frequencies(&r, got, &magnitude)) == NSA_ERROR_SIZE, "dim 7");
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
    fill_numbers();
    int step = asked_step(argc, argv, CHECKS_CUDA ? 1 : 3, 5);
    for (int i = 0; i < COUNT(rope_cases); i += step) {
        const rope_case *c = &rope_cases[i];
        nsa_desc d = desc_of(shape(c->shape));
        suite s = suite_of(c);
        const char *limit = c->options.dim % 8 ? "dim" : NULL;
        for (int k = 0; k < COUNT(dtypes) && !suite_refused(&s, &d, limit); k++) {
            suite_reference(&s, &d, dtypes[k], (uint64_t)(10 * i + k));
            if ((i / step + k) % COUNT(dtypes)) continue; /* these in one dtype a case */
            suite_bit_tests(&s, &d, dtypes[k]);
            test_in_place(c, dtypes[k]);
        }
#ifdef CHECK_F64
        rope_case small = *c;
        small.shape = tiny_geometries[i % COUNT(tiny_geometries)].name;
        small.options.dim = c->options.dim < 8 ? c->options.dim : 8;
        d = desc_of(shape(small.shape));
        s = suite_of(&small);
        suite_gradcheck(&s, &d);
#endif
    }
    for (int given = 0; given < 3; given += 2) {
        nsa_desc d = desc_of(shape("small"));
        suite s = suite_of(&rope_cases[given]);
        s.unused = UNUSED_CMP | UNUSED_SLC | UNUSED_FORCED;
        suite_refusals(&s, &d);
    }
    test_options();
    test_constants();
    test_shift(NSA_ROPE_INTERLEAVED, 1000);
    test_shift(NSA_ROPE_HALVES, 100000);
    return check_done("test_rope");
}

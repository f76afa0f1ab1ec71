/* attend_tests.h - the tests that the four attentions share: test_attend_cmp, _slc, _win and _dense
   run them all.
   Twin: nsa.h's "Attention over few keys". Not here: tests of one attention alone (its own file),
   the problem itself (attend.h). */
#ifndef NSA_TESTS_ATTEND_TESTS_H
#define NSA_TESTS_ATTEND_TESTS_H

#include "attend.h"
#include "refusals.h"

/* ---- Question 1 and 3: the dense reference, in every dtype, layout, instruction set, slice
   ---- */

/* A tensor's numbers against the reference's, by the rule of low precision. */
static inline void compare(const char *what, const tensor *x, const double *want,
                           const double *plain, double factor) {
    size_t n = tensor_count(x), width = (size_t)x->width;
    double *got = ref_zeros(n);
    tensor_get(x, got);
    CHECK_NEAR(what, got, want, n, width, allowed_error(factor, want, plain, n));
    free(got);
}

/* Rows outside the slice hold what they held before, which guards_verify saw to; here they count
   as 0. */
static inline void compare_rows(const char *what, const problem *p, const tensor *x, double *want,
                                double *plain, double factor, int row_width, int is_lse) {
    size_t n = tensor_count(x);
    double *got = ref_zeros(n);
    tensor_get(x, got);
    plan_zero_outside(&p->d, got, row_width);
    plan_zero_outside(&p->d, want, row_width);
    plan_zero_outside(&p->d, plain, row_width);
    if (is_lse) check_empty_rows(got, want, plain, n);
    CHECK_NEAR(what, got, want, n, (size_t)x->width, allowed_error(factor, want, plain, n));
    free(got);
}

/* want += start, as the library adds to what a gradient holds; plain likewise, rounded as it
   stores. */
static inline void add_start(double *want, double *plain, const double *start, size_t n,
                             nsa_dtype grad) {
    for (size_t i = 0; i < n; i++) {
        want[i] += start[i];
        plain[i] = ref_store(dtype_prec(grad), plain[i] + start[i]);
    }
}

static inline void reference_one(const branch *br, const nsa_desc *d, const numbers *in,
                                 const numbers *want, const numbers *plain, nsa_dtype dtype,
                                 nsa_dtype grad, int form) {
    size_t most = in->nq > in->nk ? in->nq : in->nk;
    most = most > in->nv ? most : in->nv;
    double *start = random_numbers(77, most, grad);
    problem p = problem_new(br, d, in, dtype, grad, form, start);
    run_both(br, &p);

    numbers w = *want, b = *plain;
    w.out = copy_numbers(want->out, in->nout), b.out = copy_numbers(plain->out, in->nout);
    w.lse = copy_numbers(want->lse, in->nlse), b.lse = copy_numbers(plain->lse, in->nlse);
    w.dq = copy_numbers(want->dq, in->nq), b.dq = copy_numbers(plain->dq, in->nq);
    w.dk = copy_numbers(want->dk, in->nk), b.dk = copy_numbers(plain->dk, in->nk);
    w.dv = copy_numbers(want->dv, in->nv), b.dv = copy_numbers(plain->dv, in->nv);
    add_start(w.dq, b.dq, start, in->nq, grad);
    add_start(w.dk, b.dk, start, in->nk, grad);
    add_start(w.dv, b.dv, start, in->nv, grad);
    compare_rows("out", &p, &p.out, w.out, b.out, 2, d->heads * d->dim_v, 0);
    compare_rows("lse", &p, &p.lse, w.lse, b.lse, 2, d->heads, 1);
    compare_rows("dq", &p, &p.dq, w.dq, b.dq, 3, d->heads * d->dim, 0);
    compare("dk", &p.dk, w.dk, b.dk, 3);
    compare("dv", &p.dv, w.dv, b.dv, 3);
    numbers_free_results(&w);
    numbers_free_results(&b);
    free(start);
    guards_free();
}

/* Changes the numbers of a problem before they are used; NULL leaves them. */
typedef void (*twist)(const nsa_desc *d, numbers *n, nsa_dtype dtype);

/* How much of a table a call of test_reference walks. */
typedef enum thorough {
    ONCE,    /* the whole, once */
    IN_TURN, /* the whole, by the instruction set of the machine and one other */
    ALL      /* the whole and a slice of its queries, by every instruction set */
} thorough;

/* The whole or a slice of its queries, several instruction sets, the layouts in turn. */
static inline void test_rows(const branch *br, const geometry *g, nsa_dtype dtype, uint64_t seed,
                             twist change, const char *rule, int slice, thorough how) {
    nsa_desc d = desc_of(g);
    if (slice) d.first = g->T / 3, d.count = (g->T + 1) / 2;
    numbers in = numbers_new(br, &d, dtype, seed);
    if (change) change(&d, &in, dtype);
    numbers want = numbers_reference(br, &d, &in, REF_F64);
    numbers plain = numbers_plain(br, &d, &in, dtype, &want);
    int turn = 1 + (int)(seed % (COUNT(isas) - 1));
    for (int i = 0; i < COUNT(isas); i++) {
        if (!nsa_isa_available(isas[i]) || (how == ONCE && i) || (how == IN_TURN && i && i != turn))
            continue;
        d.isa = isas[i];
        d.threads = 1 + (i + (int)seed) % 3;
        nsa_dtype grad = (i + slice) % 2 ? NSA_REAL_DTYPE : dtype;
        check_case("%s, %s%s, %s, gradients %s, isa %s, rows %d + %d", br->name, g->name, rule,
                   dtype_name(dtype), dtype_name(grad), nsa_isa_name(d.isa), d.first, d.count);
        reference_one(br, &d, &in, &want, &plain, dtype, grad, i + (int)seed + slice);
    }
    numbers_free_results(&want);
    numbers_free_results(&plain);
    numbers_free(&in);
}

static inline void test_reference(const branch *br, const geometry *g, nsa_dtype dtype,
                                  uint64_t seed, twist change, const char *rule, thorough how) {
    test_rows(br, g, dtype, seed, change, rule, 0, how);
    if (how == ALL) test_rows(br, g, dtype, seed, change, rule, 1, how);
}

/* Scores that grow along the sequence, so that the maximum lies in a later tile than the first. */
static inline void rising_scores(const nsa_desc *d, numbers *n, nsa_dtype dtype) {
    size_t row = (size_t)(d->kv_heads * d->dim), rows = n->nk / row;
    for (size_t i = 0; i < n->nk; i++)
        n->k[i] =
            ref_store(dtype_prec(dtype), n->k[i] * (1 + 20 * (double)(i / row) / (double)rows));
}

static inline void falling_scores(const nsa_desc *d, numbers *n, nsa_dtype dtype) {
    size_t row = (size_t)(d->kv_heads * d->dim), rows = n->nk / row;
    for (size_t i = 0; i < n->nk; i++)
        n->k[i] =
            ref_store(dtype_prec(dtype), n->k[i] * (21 - 20 * (double)(i / row) / (double)rows));
}

/* Every score some hundreds below 0, or above: exp of it alone would be 0, or infinite. */
static inline void low_scores(const nsa_desc *d, numbers *n, nsa_dtype dtype) {
    (void)dtype;
    for (size_t i = 0; i < n->nq; i += (size_t)d->dim) n->q[i] = 64;
    for (size_t i = 0; i < n->nk; i += (size_t)d->dim) n->k[i] = -32;
}

static inline void high_scores(const nsa_desc *d, numbers *n, nsa_dtype dtype) {
    (void)dtype;
    for (size_t i = 0; i < n->nq; i += (size_t)d->dim) n->q[i] = 64;
    for (size_t i = 0; i < n->nk; i += (size_t)d->dim) n->k[i] = 32;
}

/* All keys of a head alike: every score is tied. */
static inline void tied_scores(const nsa_desc *d, numbers *n, nsa_dtype dtype) {
    (void)dtype;
    size_t row = (size_t)(d->kv_heads * d->dim);
    for (size_t i = row; i < n->nk; i++) n->k[i] = n->k[i - row];
}

static inline void test_extremes(const branch *br, const geometry *g, nsa_dtype dtype) {
    test_reference(br, g, dtype, 21, rising_scores, ", maximum in a later tile", ALL);
    test_reference(br, g, dtype, 22, falling_scores, ", maximum in the first tile", ALL);
    test_reference(br, g, dtype, 23, low_scores, ", scores far below 0", ALL);
    test_reference(br, g, dtype, 24, high_scores, ", scores far above 0", ALL);
    test_reference(br, g, dtype, 25, tied_scores, ", tied scores", ALL);
}

/* The largest number, and in *spread the share of p that a row's largest one leaves, at most. */
static inline double logits_of(const nsa_desc *d, const numbers *n, const numbers *want, int slice,
                               double *spread) {
    double largest = 0;
    *spread = 0;
    for (int t = slice ? d->first : 0; t < d->tokens; t++) {
        double q = n->q[(size_t)t * (size_t)(d->heads * d->dim)], most = -1e300;
        for (size_t i = 0; i < n->nk; i += (size_t)d->dim) {
            double s = ref_desc_of(d, d->tokens).scale * q * n->k[i];
            largest = fabs(s) > largest ? fabs(s) : largest;
            most = s <= want->lse[t * d->heads] + 1e-9 && s > most ? s : most;
        }
        double left = 1 - exp(most - want->lse[t * d->heads]);
        if (isfinite(want->lse[t * d->heads]) && left > *spread) *spread = left;
    }
    return largest;
}

/* How far x is from what it should be, against `unit`. */
static inline void check_flat(const char *what, const tensor *x, const double *want, double most,
                              double unit) {
    size_t n = tensor_count(x);
    double *got = ref_zeros(n), worst = 0;
    tensor_get(x, got);
    for (size_t i = 0; i < n; i++) {
        double off = fabs(got[i] - want[i]);
        worst = off <= worst ? worst : isnan(off) ? INFINITY : off;
    }
    CHECK(worst <= most * unit, "%s is off by %.2g of %.3g, allowed %.2g", what, worst / unit, unit,
          most);
    free(got);
}

/* Scores of any size, those of a row far apart or near, each row's largest its own. The error of
   the gradients does not grow with them: where one key has all of p, p is 1 in backward too. Where
   several share it, it is off by the rounding of lse at most. */
static inline void test_logits(const branch *br, nsa_dtype dtype, double size, int slice) {
    /* clang-format off */
    static const geometry g = {"large logits",
                               1, 100, 2, 1, 16, 16, 8, 4, 16, 2, 1, 1, 20, 0, NULL};
    /* clang-format on */
    nsa_desc d = desc_of(&g);
    if (slice) d.first = d.tokens - 1, d.count = 1;
    numbers in = numbers_new(br, &d, dtype, 51);
    for (size_t i = 0; i < in.nq; i++)
        in.q[i] = i % (size_t)d.dim ? 0 : ref_store(dtype_prec(dtype), size);
    for (size_t i = 0; i < in.nk; i++)
        in.k[i] = i % (size_t)d.dim ? 0 : ((int)(i / (size_t)d.dim) - 50) / 16.0;
    numbers want = numbers_reference(br, &d, &in, REF_F64);
    double *zeros = ref_zeros(in.nq + in.nk + in.nv), spread;
    double largest = logits_of(&d, &in, &want, slice, &spread);
    double u = sizeof(nsa_real) == 8 ? 1.1e-16 : 6.0e-8, low = 0;
    if (dtype == NSA_BF16) low = ldexp(1, -9);
    if (dtype == NSA_F16) low = ldexp(1, -11);
    if (dtype == NSA_F32 && sizeof(nsa_real) == 8) low = ldexp(1, -24); /* what is stored */
    double most = 4 * low + 16 * u + fmin(2 * u * largest, 2 * spread), dp = 0;
    for (size_t i = 0; i < in.nv; i++) dp = fabs(in.v[i]) > dp ? fabs(in.v[i]) : dp;
    dp *= check_norm(in.dout, in.nout);
    for (int i = 0; i < COUNT(isas); i++) {
        if (!nsa_isa_available(isas[i])) continue;
        d.isa = isas[i];
        check_case("%s, %s, isa %s, logits up to %.3g, rows %d + %d", br->name, dtype_name(dtype),
                   nsa_isa_name(d.isa), largest, d.first, d.count);
        problem p = problem_new(br, &d, &in, dtype, NSA_REAL_DTYPE, 0, zeros);
        run_both(br, &p);
        double scale = ref_desc_of(&d, d.tokens).scale;
        check_flat("dv", &p.dv, want.dv, most, 4);
        check_flat("dq", &p.dq, want.dq, most, scale * 3.125 * dp);
        check_flat("dk", &p.dk, want.dk, most, scale * size * dp);
        guards_free();
    }
    free(zeros), numbers_free_results(&want), numbers_free(&in);
}

static inline void test_large_logits(const branch *br, nsa_dtype dtype) {
    static const double sizes[] = {1, 30, 300, 1e4, 1e6, 1e9};
    for (int i = 0; i < COUNT(sizes); i++)
        for (int slice = 0; slice < 2; slice++)
            if (dtype != NSA_F16 || sizes[i] < 65504) test_logits(br, dtype, sizes[i], slice);
}

/* Where a run takes long, the tests that run often look at fewer places. */
static inline int is_heavy(const geometry *g) {
    return g->B * g->T * g->H > 1000;
}

/* ---- The bits of a run: what determinism, slices and causality compare ---- */

typedef struct bits {
    unsigned char
        *of[5]; /* out, lse, dq, dk, dv, without gaps; rows outside the slice are poison */
    size_t bytes[5];
} bits;

static const char *const bits_names[] = {"out", "lse", "dq", "dk", "dv"};

static inline bits bits_take(const problem *p) {
    const tensor *x[] = {&p->out, &p->lse, &p->dq, &p->dk, &p->dv};
    bits b;
    for (int i = 0; i < 5; i++) {
        b.of[i] = tensor_bits(x[i]);
        b.bytes[i] = tensor_count(x[i]) * dtype_size(x[i]->view.dtype);
    }
    return b;
}

static inline void bits_free(bits *b) {
    for (int i = 0; i < 5; i++) free(b->of[i]);
}

/* Forward and backward of the numbers, gradients from 0. */
static inline bits bits_of(const branch *br, const nsa_desc *d, const numbers *n, nsa_dtype dtype,
                           int form) {
    double *zeros = ref_zeros(n->nq + n->nk + n->nv);
    problem p = problem_new(br, d, n, dtype, dtype, form, zeros);
    run_both(br, &p);
    bits b = bits_take(&p);
    free(zeros);
    guards_free();
    return b;
}

/* Rows begin .. end - 1 of result i, of `rows` rows in all, have the same bits in both. */
static inline void same_rows(const bits *a, const bits *b, int i, int rows, int begin, int end) {
    size_t row = rows ? a->bytes[i] / (size_t)rows : 0;
    if (begin < end)
        CHECK_BITS(bits_names[i], a->of[i] + (size_t)begin * row, b->of[i] + (size_t)begin * row,
                   (size_t)(end - begin) * row, 1);
}

static inline void same_bits(const bits *a, const bits *b) {
    for (int i = 0; i < 5; i++) CHECK_BITS(bits_names[i], a->of[i], b->of[i], a->bytes[i], 1);
}

/* Run to run, for any number of threads, which CUDA has not, in any layout. Where the call names
   none, they are as many as the workspace has room for, here one. */
static inline void test_deterministic(const branch *br, const geometry *g, nsa_dtype dtype) {
    static const int threads[] = {1, 7, 2, 1, 3, 0};
    const int runs = is_heavy(g) ? 3 : CHECKS_CUDA ? LAYOUTS : COUNT(threads);
    nsa_desc d = desc_of(g);
    numbers n = numbers_new(br, &d, dtype, 5);
    bits first = {{NULL}, {0}};
    for (int i = 0; i < runs; i++) {
        d.threads = threads[i];
        check_case("%s, %s, %s, run %d, threads %d", br->name, g->name, dtype_name(dtype), i,
                   threads[i]);
        room_for = !threads[i];
        bits b = bits_of(br, &d, &n, dtype, i);
        room_for = 0;
        if (i) same_bits(&b, &first);
        if (i)
            bits_free(&b);
        else
            first = b;
    }
    bits_free(&first);
    numbers_free(&n);
}

/* The same numbers for one sequence of the batch, alone: as varlen, batch and truncation tests
   need. */
static inline numbers numbers_of_sequence(const branch *br, const nsa_desc *d, const numbers *n,
                                          int b, int tokens) {
    plan p = plan_of(d);
    ref_desc r = ref_desc_of(d, tokens);
    numbers one = *n;
    int width = nsa_block_list_width(d), cmp = br->keys == BRANCH_CMP;
    size_t row = (size_t)(p.row[b] * d->heads),
           keys = (size_t)((cmp ? ref_cmp_count(&r, tokens) : tokens) * d->kv_heads);
    size_t key = (size_t)((cmp ? p.cmp_row[b] : p.row[b]) * d->kv_heads);
    one.q += row * (size_t)d->dim, one.dout += row * (size_t)d->dim_v;
    if (n->dlse) one.dlse += row;
    one.k += key * (size_t)d->dim, one.v += key * (size_t)d->dim_v;
    if (n->blocks) one.blocks += p.row[b] * list_heads_of(d) * width;
    one.nlse = (size_t)(tokens * d->heads), one.nq = one.nlse * (size_t)d->dim,
    one.nout = one.nlse * (size_t)d->dim_v;
    one.nk = keys * (size_t)d->dim, one.nv = keys * (size_t)d->dim_v;
    return one;
}

/* Each sequence of a batch, packed or not, has the bits of that sequence alone. */
static inline void test_alone(const branch *br, const geometry *g, nsa_dtype dtype) {
    nsa_desc d = desc_of(g);
    plan p = plan_of(&d);
    numbers n = numbers_new(br, &d, dtype, 6);
    check_case("%s, %s, %s, all", br->name, g->name, dtype_name(dtype));
    bits all = bits_of(br, &d, &n, dtype, 1);
    for (int b = 0; b < p.sequences; b++) {
        nsa_desc one = d;
        one.batch = 1, one.begins = NULL, one.tokens = one.count = p.length[b];
        numbers m = numbers_of_sequence(br, &d, &n, b, p.length[b]);
        check_case("%s, %s, %s, sequence %d alone", br->name, g->name, dtype_name(dtype), b);
        bits alone = bits_of(br, &one, &m, dtype, 0);
        for (int i = 0; i < 5; i++) {
            int cmp = i > 2 && br->keys == BRANCH_CMP;
            size_t rows = (size_t)(i > 2 ? key_rows(br, &p) : p.rows),
                   row = rows ? all.bytes[i] / rows : 0;
            CHECK_BITS(bits_names[i], all.of[i] + (size_t)(cmp ? p.cmp_row[b] : p.row[b]) * row,
                       alone.of[i], alone.bytes[i], 1);
        }
        bits_free(&alone);
    }
    bits_free(&all);
    numbers_free(&n);
}

/* Forward and dQ in slices of queries, dK and dV in slices of kv heads: the bits of the whole. out
   has the real dtype where it may, because half precision would round most differences away. */
static inline void test_slices(const branch *br, const geometry *g, nsa_dtype dtype) {
    const int form = CHECKS_CUDA ? 0 : 8 * MIXED;
    nsa_desc d = desc_of(g);
    numbers n = numbers_new(br, &d, dtype, 7);
    double *zeros = ref_zeros(n.nq + n.nk + n.nv);
    check_case("%s, %s, %s, whole", br->name, g->name, dtype_name(dtype));
    bits whole = bits_of(br, &d, &n, dtype, form);
    problem s = problem_new(br, &d, &n, dtype, dtype, form + 2, zeros);
    nsa_attend x = s.x, dx = s.dx;
    int cut[] = {0, g->T / 3, g->T / 3 + 1, g->T - g->T / 4, g->T};
    for (int i = 0; i + 1 < COUNT(cut); i++) {
        s.d.first = cut[i], s.d.count = cut[i + 1] - cut[i];
        s.x.q = view_from(x.q, 0, cut[i], 0), s.x.blocks = view_from(x.blocks, 0, cut[i], 0);
        s.x.out = view_from(x.out, 0, cut[i], 0), s.x.lse = view_from(x.lse, 0, cut[i], 0);
        s.dx.q = view_from(dx.q, 0, cut[i], 0), s.dx.out = view_from(dx.out, 0, cut[i], 0);
        s.dx.lse = view_from(dx.lse, 0, cut[i], 0);
        s.dx.k.data = s.dx.v.data = NULL;
        check_case("%s, %s, %s, rows %d + %d", br->name, g->name, dtype_name(dtype), s.d.first,
                   s.d.count);
        run_both(br, &s);
    }
    for (int hk = 0; hk < d.kv_heads; hk++) {
        int G = d.heads / d.kv_heads;
        int lists = list_heads_of(&d) / d.kv_heads;
        s.d = d, s.d.heads = s.d.gate_heads = G, s.d.kv_heads = 1, s.d.list_heads = lists;
        s.x.q = view_from(x.q, 0, 0, hk * G), s.x.out = view_from(x.out, 0, 0, hk * G);
        s.x.lse = view_from(x.lse, 0, 0, hk * G),
        s.x.blocks = view_from(x.blocks, 0, 0, hk * lists);
        s.x.k = view_from(x.k, 0, 0, hk), s.x.v = view_from(x.v, 0, 0, hk);
        s.dx = dx, s.dx.q.data = NULL, s.dx.out = view_from(dx.out, 0, 0, hk * G);
        s.dx.k = view_from(dx.k, 0, 0, hk), s.dx.v = view_from(dx.v, 0, 0, hk);
        s.dx.lse = view_from(dx.lse, 0, 0, hk * G);
        check_case("%s, %s, %s, kv head %d", br->name, g->name, dtype_name(dtype), hk);
        nsa_status status = run_backward(br, &s);
        CHECK_OK("backward", status);
    }
    bits pieces = bits_take(&s);
    check_case("%s, %s, %s, pieces against the whole", br->name, g->name, dtype_name(dtype));
    same_bits(&pieces, &whole);
    bits_free(&pieces);
    bits_free(&whole);
    free(zeros);
    numbers_free(&n);
    guards_free();
}

/* ---- Question 2: finite differences in every number ---- */

static inline double loss(const branch *br, const problem *p, const numbers *n, void *work,
                          size_t bytes) {
    double *out = ref_zeros(n->nout), sum = 0;
    CHECK(br->forward(&p->x, &p->d, work, bytes) == NSA_OK, "forward");
    tensor_get(&p->out, out);
    plan_zero_outside(&p->d, out, p->d.heads * p->d.dim_v);
    for (size_t i = 0; i < n->nout; i++) sum += out[i] * n->dout[i];
    tensor_get(&p->lse, out);
    plan_zero_outside(&p->d, out, p->d.heads);
    for (size_t i = 0; n->dlse && i < n->nlse; i++) /* a query without keys has lse -inf */
        if (!isinf(out[i])) sum += out[i] * n->dlse[i];
    free(out);
    return sum;
}

static inline void test_gradcheck(const branch *br, const geometry *g) {
    const double h = 1e-5;
    nsa_desc d = desc_of(g);
    numbers n = numbers_new(br, &d, NSA_F64, 8);
    double *zeros = ref_zeros(n.nq + n.nk + n.nv);
    problem p = problem_new(br, &d, &n, NSA_F64, NSA_F64, 3, zeros);
    struct {
        const char *name;
        const tensor *x, *dx;
        double *values;
        size_t count;
    } inputs[] = {{"q", &p.q, &p.dq, n.q, n.nq},
                  {"k", &p.k, &p.dk, n.k, n.nk},
                  {"v", &p.v, &p.dv, n.v, n.nv}};
    check_case("%s, %s, gradcheck", br->name, g->name);
    run_both(br, &p);
    size_t bytes = br->forward_size(&d);
    void *work = check_alloc(bytes);
    for (int i = 0; i < COUNT(inputs); i++) {
        double *analytic = ref_zeros(inputs[i].count), worst = 0;
        tensor_get(inputs[i].dx, analytic);
        for (size_t j = 0; j < inputs[i].count; j++) {
            double x = inputs[i].values[j], up, down;
            inputs[i].values[j] = x + h, tensor_put(inputs[i].x, inputs[i].values);
            up = loss(br, &p, &n, work, bytes);
            inputs[i].values[j] = x - h, tensor_put(inputs[i].x, inputs[i].values);
            down = loss(br, &p, &n, work, bytes);
            inputs[i].values[j] = x, tensor_put(inputs[i].x, inputs[i].values);
            double error = gradient_error(analytic[j], (up - down) / (2 * h));
            worst = error > worst || isnan(error) ? error : worst;
        }
        CHECK(worst <= 1e-7, "gradient of %s: error %.3g > 1e-7", inputs[i].name, worst);
        free(analytic);
    }
    free(work);
    free(zeros);
    numbers_free(&n);
    guards_free();
}

/* ---- Question 5: causality ---- */

/* Everything after token t changed: q, k, v, dout, dlse, block lists. */
static inline numbers numbers_changed_after(const branch *br, const nsa_desc *d, const numbers *n,
                                            int t, nsa_dtype dtype) {
    numbers m = *n, other = numbers_new(br, d, dtype, 99);
    size_t row = (size_t)((t + 1) * d->heads),
           width = (size_t)(list_heads_of(d) * nsa_block_list_width(d));
    size_t key = (size_t)((br->keys == BRANCH_CMP ? nsa_cmp_visible(d, t) : t + 1) * d->kv_heads);
    m.q = copy_numbers(n->q, n->nq), m.dout = copy_numbers(n->dout, n->nout);
    m.k = copy_numbers(n->k, n->nk), m.v = copy_numbers(n->v, n->nv);
    m.dlse = n->dlse ? copy_numbers(n->dlse, n->nlse) : NULL;
    for (size_t i = row; n->dlse && i < n->nlse; i++) m.dlse[i] = -2 * n->dlse[i];
    memcpy(m.q + row * (size_t)d->dim, other.q + row * (size_t)d->dim,
           (n->nq - row * (size_t)d->dim) * 8);
    memcpy(m.dout + row * (size_t)d->dim_v, other.dout + row * (size_t)d->dim_v,
           (n->nout - row * (size_t)d->dim_v) * 8);
    memcpy(m.k + key * (size_t)d->dim, other.k + key * (size_t)d->dim,
           (n->nk - key * (size_t)d->dim) * 8);
    memcpy(m.v + key * (size_t)d->dim_v, other.v + key * (size_t)d->dim_v,
           (n->nv - key * (size_t)d->dim_v) * 8);
    if (n->blocks) {
        m.blocks = other.blocks, other.blocks = NULL;
        memcpy(m.blocks, n->blocks, (size_t)(t + 1) * width * 4);
    }
    numbers_free(&other);
    return m;
}

/* Future tokens changed, then taken away: earlier queries keep the bits of out, lse and dQ. */
static inline void test_causal(const branch *br, const geometry *g, nsa_dtype dtype) {
    nsa_desc d = desc_of(g);
    if (d.begins || d.batch != 1) return;
    numbers n = numbers_new(br, &d, dtype, 9);
    check_case("%s, %s, %s, causal", br->name, g->name, dtype_name(dtype));
    bits all = bits_of(br, &d, &n, dtype, 0);
    int at[] = {g->l - 1, g->slc_block - 1, g->T / 2, 0, g->l - 2, g->slc_block, g->T - 2};
    for (int i = 0; i < (is_heavy(g) ? 3 : COUNT(at)); i++) {
        int t = at[i];
        if (t < 0 || t >= g->T - 1) continue;
        numbers m = numbers_changed_after(br, &d, &n, t, dtype);
        check_case("%s, %s, %s, tokens after %d changed", br->name, g->name, dtype_name(dtype), t);
        bits changed = bits_of(br, &d, &m, dtype, 0);
        for (int k = 0; k < 3; k++) same_rows(&all, &changed, k, g->T, 0, t + 1);
        bits_free(&changed);
        free(m.q), free(m.k), free(m.v), free(m.dout), free(m.dlse), free(m.blocks);

        nsa_desc cut = d;
        cut.tokens = cut.count = t + 1;
        m = numbers_of_sequence(br, &d, &n, 0, t + 1);
        check_case("%s, %s, %s, only %d tokens", br->name, g->name, dtype_name(dtype), t + 1);
        bits shorter = bits_of(br, &cut, &m, dtype, 1);
        for (int k = 0; k < 3; k++)
            CHECK_BITS(bits_names[k], shorter.of[k], all.of[k], shorter.bytes[k], 1);
        bits_free(&shorter);
    }
    bits_free(&all);
    numbers_free(&n);
}

/* ---- Values that are not finite, and exact scaling ---- */

/* mask[T][Hk][keys] of a single sequence. */
static inline unsigned char *mask_of(const branch *br, const nsa_desc *d, const int32_t *blocks) {
    ref_desc r = ref_desc_of(d, d->tokens);
    return br->keys == BRANCH_CMP   ? ref_mask_cmp(&r)
           : br->keys == BRANCH_SLC ? ref_mask_slc(&r, blocks)
           : br->keys == BRANCH_WIN ? ref_mask_win(&r)
                                    : ref_mask_dense(&r);
}

static inline int has_nan(nsa_dtype dtype, const unsigned char *row, int width) {
    for (int c = 0; c < width; c++)
        if (isnan(element_get(dtype, row + (size_t)c * dtype_size(dtype)))) return 1;
    return 0;
}

/* Rows that are touched hold a NaN (if `nan` says so), all others have the bits that they had
   before. */
static inline void check_reach(const char *what, const unsigned char *touched, int rows,
                               const unsigned char *clean, const unsigned char *got,
                               nsa_dtype dtype, int width, int nan) {
    size_t row = (size_t)width * dtype_size(dtype);
    int leaked = -1, missed = -1;
    for (int r = rows - 1; r >= 0; r--) {
        if (!touched[r] && memcmp(clean + (size_t)r * row, got + (size_t)r * row, row)) leaked = r;
        if (touched[r] && nan && !has_nan(dtype, got + (size_t)r * row, width)) missed = r;
    }
    CHECK(leaked < 0, "%s: row %d changed, though it does not read the bad row", what, leaked);
    CHECK(missed < 0, "%s: row %d reads the bad row and holds no NaN", what, missed);
}

/* Which rows a bad value reaches: queries (t, h) that read it, keys (s, hk) that such a query
   reads. */
typedef struct reach {
    unsigned char *queries, *keys;
} reach;

enum { BAD_Q, BAD_K, BAD_V, BAD_DOUT, BAD_DLSE, BAD_DELTA };

static inline reach reach_of(const branch *br, const nsa_desc *d, const numbers *n, int input,
                             int row, int head) {
    int G = d->heads / d->kv_heads,
        keys = br->keys == BRANCH_CMP ? nsa_cmp_count(d, d->tokens) : d->tokens;
    unsigned char *mask = mask_of(br, d, n->blocks);
    reach r = {ref_mask((size_t)(d->tokens * d->heads)), ref_mask((size_t)(keys * d->kv_heads))};
    for (int t = 0; t < d->tokens; t++)
        for (int h = 0; h < d->heads; h++) {
            const unsigned char *sees = mask + (size_t)(t * d->kv_heads + h / G) * (size_t)keys;
            int by_query = input == BAD_Q || input >= BAD_DOUT;
            int reads = by_query ? t == row && h == head : h / G == head && sees[row];
            int any = 0;
            for (int s = 0; s < keys; s++) any |= sees[s];
            if (!reads || !any) continue;
            r.queries[t * d->heads + h] = 1;
            for (int s = 0; s < keys; s++)
                if (sees[s]) r.keys[s * d->kv_heads + h / G] = 1;
        }
    free(mask);
    return r;
}

/* One bad value in one row of q, k, v, dout or dlse: not finite, or so large that products with it
   overflow, also those with what the mask hides. BAD_DELTA: a whole row of dout, with out's signs,
   so that delta = dout . out overflows. */
static inline void test_bad_value(const branch *br, const geometry *g, nsa_dtype dtype, int input,
                                  double value) {
    static const char *const names[] = {"q", "k", "v", "dout", "dlse", "dout along out"};
    nsa_desc d = desc_of(g);
    numbers n = numbers_new(br, &d, dtype, 31);
    int keys = br->keys == BRANCH_CMP ? nsa_cmp_count(&d, g->T) : g->T;
    int by_query = input == BAD_Q || input >= BAD_DOUT;
    /* an infinity where a query sees one key: its one score may be -inf, which is no empty row */
    int alone = br->keys == BRANCH_CMP ? g->l - 1 : 0;
    int row = input == BAD_Q && isinf(value) ? alone : (by_query ? g->T : keys) / 3;
    int heads = by_query ? d.heads : d.kv_heads, head = heads - 1;
    double *into[] = {n.q, n.k, n.v, n.dout, n.dlse, n.dout};
    int width = input == BAD_DLSE ? 1 : input == BAD_Q || input == BAD_K ? d.dim : d.dim_v;
    const int nan = !isfinite(value), column = isnan(value) ? width / 2 : value > 0 ? width - 1 : 0;
    check_case("%s, %s, %s, %g in %s", br->name, g->name, dtype_name(dtype), value, names[input]);
    reach r = reach_of(br, &d, &n, input, row, head);
    bits clean = bits_of(br, &d, &n, dtype, 1);
    const int at = (row * heads + head) * width;
    into[input][at + column] = value;
    for (int c = 0; input == BAD_DELTA && c < width; c++)
        n.dout[at + c] =
            copysign(value, element_get(dtype, clean.of[0] + (size_t)(at + c) * dtype_size(dtype)));
    bits bad = bits_of(br, &d, &n, dtype, 1);
    if (input >= BAD_DOUT)
        CHECK_BITS("out", bad.of[0], clean.of[0], clean.bytes[0], 1);
    else
        check_reach("out", r.queries, g->T * d.heads, clean.of[0], bad.of[0], dtype, d.dim_v, nan);
    check_reach("lse", r.queries, g->T * d.heads, clean.of[1], bad.of[1], NSA_REAL_DTYPE, 1,
                nan && input <= BAD_K);
    check_reach("dq", r.queries, g->T * d.heads, clean.of[2], bad.of[2], dtype, d.dim, nan);
    check_reach("dk", r.keys, keys * d.kv_heads, clean.of[3], bad.of[3], dtype, d.dim, nan);
    check_reach("dv", r.keys, keys * d.kv_heads, clean.of[4], bad.of[4], dtype, d.dim_v,
                nan && input != BAD_V && input != BAD_DLSE);
    free(r.queries);
    free(r.keys);
    bits_free(&clean);
    bits_free(&bad);
    numbers_free(&n);
}

static inline void test_bad_values(const branch *br, const geometry *g, nsa_dtype dtype) {
    static const double values[] = {NAN, INFINITY, -INFINITY};
    nsa_desc d = desc_of(g);
    if (d.begins || d.batch != 1 || !nsa_cmp_count(&d, g->T)) return;
    for (int input = BAD_Q; input <= BAD_DLSE; input++)
        for (int i = 0; i < (is_heavy(g) ? 1 : COUNT(values)); i++)
            test_bad_value(br, g, dtype, input, values[i]);
}

/* Finite values so large that their products overflow, also those that the mask hides: 0 times
   infinity is NaN, and must reach nobody who does not read them. */
static inline void test_overflow(const branch *br) {
    /* clang-format off */
    static const geometry g = {"products that overflow behind the mask",
                               1, 70, 2, 1, 16, 16, 8, 4, 16, 2, 1, 1, 20, 0, NULL};
    /* clang-format on */
    for (int input = BAD_Q; input <= BAD_DELTA; input++)
        for (int k = 0; k < 2; k++)
            test_bad_value(br, &g, dtypes[k], input, dtypes[k] == NSA_F64 ? 1.7e308 : 3e38);
}

/* What is not finite lies in rows that one warp cleans and others multiply, and of slc in those of
   the second consumer. */
static inline void test_shared_rows(const branch *br) {
    /* clang-format off */
    static const geometry g = {"bad rows of several warps",
                               1, 100, 3, 1, 16, 16, 8, 4, 16, 2, 1, 1, 20, 0, NULL};
    /* clang-format on */
    for (int input = BAD_Q; input <= BAD_K; input++) test_bad_value(br, &g, dtypes[1], input, NAN);
}

/* What is not finite lies in the last row of a task, whose window begins within a tile. */
static inline void test_last_row(const branch *br) {
    /* clang-format off */
    static const geometry g = {"a bad row at a task's end",
                               1, 190, 2, 1, 16, 16, 8, 4, 16, 2, 1, 1, 20, 0, NULL};
    /* clang-format on */
    test_bad_value(br, &g, dtypes[0], BAD_Q, NAN);
    test_bad_value(br, &g, dtypes[0], BAD_DOUT, NAN);
}

/* Blocks as long as a tile of keys, which some of a warp's queries read and others do not; and a
   warp's rows of one query, whose keys are one tile. */
static inline void test_whole_tiles(const branch *br) {
    /* clang-format off */
    static const geometry several = {"blocks of a tile",
                                     1, 330, 4, 1, 16, 16, 16, 8, 64, 3, 1, 1, 20, 0, NULL},
                          one = {"a warp of one query",
                                 1, 64, 16, 1, 16, 16, 16, 8, 64, 1, 0, 1, 20, 0, NULL};
    /* clang-format on */
    if (br->keys == BRANCH_SLC) test_rows(br, &several, dtypes[1], 33, NULL, "", 0, ONCE);
    test_rows(br, &one, dtypes[1], 34, NULL, "", 0, ONCE);
}

/* Tensors of two dtypes in one call: only products of bf16 by bf16 take pairs. */
static inline void test_mixed(const branch *br) {
    nsa_desc d = desc_of(shape("small"));
    numbers in = numbers_new(br, &d, dtypes[1], 41);
    numbers want = numbers_reference(br, &d, &in, REF_F64);
    numbers plain = numbers_reference(br, &d, &in, dtype_prec(dtypes[1]));
    for (int wide = 1; wide < 8; wide++) {
        check_case("%s, %s, of the real dtype are q %d, k %d, v %d", br->name,
                   dtype_name(dtypes[1]), wide & 1, wide >> 1 & 1, wide >> 2);
        reference_one(br, &d, &in, &want, &plain, dtypes[1], NSA_REAL_DTYPE, wide * MIXED + 1);
    }
    numbers_free_results(&want);
    numbers_free_results(&plain);
    numbers_free(&in);
}

/* One query, which reads keys where they lie: the same bits in every layout. Between the rows lie
   zeros, since poison would make wrong scores into NaN, and from NaN the call turns to copies. */
static inline void test_rows_in_place(const branch *br, const geometry *g, nsa_dtype dtype) {
    nsa_desc d = desc_of(g);
    numbers n = numbers_new(br, &d, dtype, 34);
    double *zeros = ref_zeros(n.nq + n.nk + n.nv);
    bits first = {{NULL}, {0}};
    d.first = g->T - 1, d.count = 1;
    for (int form = 0; form < LAYOUTS; form++) {
        problem p = problem_new(br, &d, &n, dtype, dtype, form, zeros);
        memset(p.k.memory->data, 0, p.k.memory->bytes), tensor_put(&p.k, n.k);
        memset(p.v.memory->data, 0, p.v.memory->bytes), tensor_put(&p.v, n.v);
        check_case("%s, %s, %s, the last query, layout %d", br->name, g->name, dtype_name(dtype),
                   form);
        nsa_status status = run_forward(br, &p);
        CHECK_OK("forward", status);
        bits b = bits_take(&p);
        if (form) same_bits(&b, &first);
        if (form)
            bits_free(&b);
        else
            first = b;
        guards_free();
    }
    bits_free(&first);
    free(zeros);
    numbers_free(&n);
}

/* K and V are one array, V the first Dv columns of K: the bits of two arrays. Both gradients are
   added to one array too, which then has their sum, or to two. */
static inline void test_one_array(const branch *br, const geometry *g, nsa_dtype dtype) {
    nsa_desc d = desc_of(g);
    numbers n = numbers_new(br, &d, dtype, 36);
    double *zeros = ref_zeros(n.nq + n.nk + n.nv), *of_k = ref_zeros(n.nk), *of_v = ref_zeros(n.nv);
    const size_t dim = (size_t)d.dim, dim_v = (size_t)d.dim_v;
    for (size_t i = 0; i < n.nv; i++) n.v[i] = n.k[i / dim_v * dim + i % dim_v];
    bits of[3];
    for (int one = 0; one < 3; one++) {
        check_case("%s, %s, %s, K and V in %d arrays, their gradients in %d", br->name, g->name,
                   dtype_name(dtype), one ? 1 : 2, one == 2 ? 1 : 2);
        d.threads = 1 + one;
        problem p = problem_new(br, &d, &n, dtype, NSA_REAL_DTYPE, 2 * one, zeros);
        if (one) p.x.v = p.x.k;
        if (one == 2) p.dx.v = p.dx.k;
        run_both(br, &p);
        of[one] = bits_take(&p);
        if (one == 0) tensor_get(&p.dk, of_k), tensor_get(&p.dv, of_v);
        guards_free();
    }
    same_bits(&of[1], &of[0]);
    for (int i = 0; i < 3; i++)
        CHECK_BITS(bits_names[i], of[2].of[i], of[0].of[i], of[0].bytes[i], 1);
    int wrong = 0;
    for (size_t i = 0; i < n.nk; i++) {
        nsa_real both = (nsa_real)of_k[i];
        if (i % dim < dim_v) both += (nsa_real)of_v[i / dim * dim_v + i % dim];
        wrong += ((const nsa_real *)(void *)of[2].of[3])[i] != both;
    }
    CHECK(!wrong, "%d numbers of the gradient are not dk + dv", wrong);
    for (int i = 0; i < 3; i++) bits_free(&of[i]);
    free(zeros), free(of_k), free(of_v);
    numbers_free(&n);
}

/* ---- More queries than keys: the definition, in double ---- */

enum { MANY_Q = 61, MANY_K = 23, MANY_H = 4, MANY_D = 20, MANY_DV = 12, MANY_W = 9, MANY_N = 5 };

typedef struct many {
    double q[MANY_Q * MANY_H * MANY_D], dq[MANY_Q * MANY_H * MANY_D];
    double k[MANY_K * MANY_D], dk[MANY_K * MANY_D], v[MANY_K * MANY_DV], dv[MANY_K * MANY_DV];
    double out[MANY_Q * MANY_H * MANY_DV], dout[MANY_Q * MANY_H * MANY_DV], lse[MANY_Q * MANY_H];
    int32_t lists[MANY_Q * MANY_N];
} many;

static inline int many_sees(const branch *br, const many *m, int t, int s) {
    int listed = 0;
    for (int i = 0; i < MANY_N; i++) listed |= m->lists[t * MANY_N + i] == s;
    if (br->keys == BRANCH_SLC) return listed;
    return br->keys != BRANCH_WIN || abs(t - s) < MANY_W;
}

static inline void many_reference(const branch *br, many *m) {
    for (int r = 0; r < MANY_Q * MANY_H; r++) {
        const double *q = m->q + r * MANY_D, *dout = m->dout + r * MANY_DV;
        double p[MANY_K], *out = m->out + r * MANY_DV, sum = 0, along = 0;
        for (int s = 0; s < MANY_K; s++) {
            double score = 0;
            for (int c = 0; c < MANY_D; c++) score += q[c] * m->k[s * MANY_D + c];
            p[s] = many_sees(br, m, r / MANY_H, s) ? exp(score / sqrt(MANY_D)) : 0;
            sum += p[s];
        }
        m->lse[r] = log(sum);
        for (int s = 0; s < MANY_K; s++) p[s] = sum > 0 ? p[s] / sum : 0;
        for (int i = 0; i < MANY_K * MANY_DV; i++) out[i % MANY_DV] += p[i / MANY_DV] * m->v[i];
        for (int c = 0; c < MANY_DV; c++) along += out[c] * dout[c];
        for (int s = 0; s < MANY_K; s++) {
            double dp = 0;
            for (int c = 0; c < MANY_DV; c++) dp += dout[c] * m->v[s * MANY_DV + c];
            for (int c = 0; c < MANY_DV; c++) m->dv[s * MANY_DV + c] += p[s] * dout[c];
            const double ds = p[s] * (dp - along) / sqrt(MANY_D);
            for (int c = 0; c < MANY_D; c++) {
                m->dq[r * MANY_D + c] += ds * m->k[s * MANY_D + c];
                m->dk[s * MANY_D + c] += ds * q[c];
            }
        }
    }
}

static inline nsa_tensor many_rows(const double *x, int rows, int heads, int width, int filled) {
    const size_t n = (size_t)(rows * heads * width);
    nsa_real *data = (nsa_real *)(void *)guarded_new("rows", n * sizeof(nsa_real), 16)->data;
    for (size_t i = 0; i < n; i++) data[i] = filled ? (nsa_real)x[i] : 0;
    return nsa_tensor_bthd(data, NSA_REAL_DTYPE, rows, heads, width);
}

static inline void many_compare(const char *what, const nsa_tensor *x, const double *want, size_t n,
                                size_t width) {
    double *got = ref_zeros(n), norm = 0;
    for (size_t i = 0; i < n; i++) got[i] = (double)((const nsa_real *)x->data)[i];
    for (size_t i = 0; i < n; i++) norm += isfinite(want[i]) ? want[i] * want[i] : 0;
    for (size_t i = 0; i < n; i++) /* rows without keys */
        if (want[i] == -INFINITY && got[i] == -INFINITY) got[i] = 0;
    double *finite = copy_numbers(want, n);
    for (size_t i = 0; i < n; i++) finite[i] = isfinite(want[i]) ? want[i] : 0;
    CHECK_NEAR(what, got, finite, n, width, (sizeof(nsa_real) == 8 ? 1e-14 : 2e-6) * sqrt(norm));
    free(got), free(finite);
}

/* Not causal: queries have no place among the keys, and may be more. */
static inline void test_more_queries(const branch *br) {
    many *m = (many *)check_alloc(sizeof *m);
    memset(m, 0, sizeof *m);
    double *const filled[] = {m->q, m->k, m->v, m->dout};
    const int sizes[] = {COUNT(m->q), COUNT(m->k), COUNT(m->v), COUNT(m->dout)};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < sizes[i]; j++)
            filled[i][j] = (float)check_normal(90 + (uint64_t)i, (uint64_t)j);
    for (int i = 0; i < MANY_Q * MANY_N; i++) /* ascending; query 7 has none, the next one two */
        m->lists[i] = i / MANY_N == 7 || (i / MANY_N == 8 && i % MANY_N > 1)
                          ? -1
                          : i % MANY_N * 4 + i / MANY_N % 4;
    many_reference(br, m);
    nsa_desc d = nsa_desc_default(1, MANY_K, MANY_H, 1, MANY_D);
    d.count = MANY_Q, d.dim_v = MANY_DV, d.window = MANY_W, d.mask = NSA_MASK_NONE;
    d.cmp_block = d.cmp_stride = d.slc_block = 1, d.slc_count = MANY_N;
    for (int threads = 1; threads < 4; threads++) {
        nsa_attend x, dx;
        memset(&x, 0, sizeof x), memset(&dx, 0, sizeof dx);
        d.threads = threads;
        check_case("%s, more queries than keys, %d threads", br->name, threads);
        x.q = many_rows(m->q, MANY_Q, MANY_H, MANY_D, 1),
        x.k = many_rows(m->k, MANY_K, 1, MANY_D, 1);
        x.v = many_rows(m->v, MANY_K, 1, MANY_DV, 1),
        dx.out = many_rows(m->dout, MANY_Q, MANY_H, MANY_DV, 1);
        x.out = many_rows(NULL, MANY_Q, MANY_H, MANY_DV, 0),
        x.lse = many_rows(NULL, MANY_Q, MANY_H, 1, 0);
        dx.q = many_rows(NULL, MANY_Q, MANY_H, MANY_D, 0),
        dx.k = many_rows(NULL, MANY_K, 1, MANY_D, 0);
        dx.v = many_rows(NULL, MANY_K, 1, MANY_DV, 0);
        x.blocks = nsa_tensor_bthd(m->lists, NSA_I32, MANY_Q, 1, MANY_N);
        guarded *w = guarded_new("workspace", br->forward_size(&d), 1);
        nsa_status s = br->forward(&x, &d, w->data, w->bytes);
        CHECK_OK("forward", s);
        w = guarded_new("workspace", br->backward_size(&d), 1);
        s = br->backward(&dx, &x, &d, w->data, w->bytes);
        CHECK_OK("backward", s);
        many_compare("out", &x.out, m->out, COUNT(m->out), MANY_DV);
        many_compare("lse", &x.lse, m->lse, COUNT(m->lse), 1);
        many_compare("dq", &dx.q, m->dq, COUNT(m->dq), MANY_D);
        many_compare("dk", &dx.k, m->dk, COUNT(m->dk), MANY_D);
        many_compare("dv", &dx.v, m->dv, COUNT(m->dv), MANY_DV);
        nsa_desc causal = d;
        causal.mask = NSA_MASK_CAUSAL;
        s = br->forward(&x, &causal, w->data, w->bytes);
        CHECK(s != NSA_OK && !strcmp(nsa_status_where(s), "count"), "causal: %s",
              nsa_status_where(s));
        guards_free();
    }
    free(m);
}

/* One query of many heads, which threads share: bits of one thread. A key, a value and a head have
   something that is not finite. */
static inline void test_many_heads(const branch *br, int heads, int block) {
    enum { KEYS = 2100, D = 16, DV = 24, MOST = 128 };
    static const int threads[] = {1, 2, 3, 5, 8, 16};
    nsa_desc d = nsa_desc_default(1, KEYS, heads, 1, D);
    d.dim_v = DV, d.first = KEYS - 1, d.count = 1, d.window = KEYS;
    d.cmp_block = d.cmp_stride = 1, d.slc_block = block, d.slc_count = KEYS / block;
    int32_t lists[KEYS];
    for (int i = 0; i < KEYS; i++) lists[i] = i;
    double *q = random_numbers(91, MOST * D, NSA_F32), *k = random_numbers(92, KEYS * D, NSA_F32),
           *v = random_numbers(93, KEYS * DV, NSA_F32);
    for (int bad = 0; bad < 4; bad++) {
        if (bad == 1) q[5] = NAN;
        if (bad == 2) v[7] = INFINITY;
        if (bad == 3) k[9] = -INFINITY;
        nsa_attend x;
        memset(&x, 0, sizeof x);
        x.q = many_rows(q, 1, heads, D, 1), x.k = many_rows(k, KEYS, 1, D, 1);
        x.v = many_rows(v, KEYS, 1, DV, 1);
        x.blocks = nsa_tensor_bthd(lists, NSA_I32, 1, 1, nsa_block_list_width(&d));
        nsa_attend first = x;
        for (int i = 0; i < COUNT(threads); i++) {
            d.threads = threads[i];
            check_case("%s, %d heads of one query, blocks of %d, bad %d, %d threads", br->name,
                       heads, block, bad, d.threads);
            x.out = many_rows(NULL, 1, heads, DV, 0), x.lse = many_rows(NULL, 1, heads, 1, 0);
            guarded *w = guarded_new("workspace", br->forward_size(&d), 1);
            nsa_status s = br->forward(&x, &d, w->data, w->bytes);
            CHECK_OK("forward", s);
            if (!i) first = x;
            CHECK_BITS("out", x.out.data, first.out.data, (size_t)(heads * DV) * sizeof(nsa_real),
                       sizeof(nsa_real));
            CHECK_BITS("lse", x.lse.data, first.lse.data, (size_t)heads * sizeof(nsa_real),
                       sizeof(nsa_real));
        }
        guards_free();
    }
    free(q), free(k), free(v);
}

/* V times 4 is out times 4, exactly, and lse is what it was. */
static inline void test_scaling(const branch *br, const geometry *g, nsa_dtype dtype) {
    nsa_desc d = desc_of(g);
    numbers n = numbers_new(br, &d, dtype, 32);
    double *zeros = ref_zeros(n.nq + n.nk + n.nv), *one = ref_zeros(n.nout),
           *four = ref_zeros(n.nout);
    check_case("%s, %s, %s, V times 4", br->name, g->name, dtype_name(dtype));
    problem p = problem_new(br, &d, &n, dtype, dtype, 0, zeros);
    CHECK(run_forward(br, &p) == NSA_OK, "forward");
    tensor_get(&p.out, one);
    unsigned char *lse = tensor_bits(&p.lse);
    for (size_t i = 0; i < n.nv; i++) n.v[i] *= 4;
    tensor_put(&p.v, n.v);
    CHECK(run_forward(br, &p) == NSA_OK, "forward");
    tensor_get(&p.out, four);
    unsigned char *lse4 = tensor_bits(&p.lse);
    for (size_t i = 0; i < n.nout; i++) {
        if (fabs(one[i]) < ldexp(1, -14)) one[i] = four[i] = 0; /* f16's subnormals lose bits */
        one[i] *= 4;
    }
    plan_zero_outside(&d, one, d.heads * d.dim_v);
    plan_zero_outside(&d, four, d.heads * d.dim_v);
    CHECK_NEAR("out", four, one, n.nout, (size_t)d.dim_v, 0);
    CHECK_BITS("lse", lse4, lse, n.nlse * sizeof(nsa_real), sizeof(nsa_real));
    free(lse), free(lse4), free(zeros), free(one), free(four);
    numbers_free(&n);
    guards_free();
}

/* ---- Question 6: refusals, and calls that have nothing to do ---- */

typedef struct attend_call {
    const branch *br;
    problem *p;
    void *work;
    size_t bytes;
} attend_call;

static inline nsa_status call_forward(void *arguments) {
    attend_call *c = (attend_call *)arguments;
    return c->br->forward(&c->p->x, &c->p->d, c->work, c->bytes);
}

static inline nsa_status call_backward(void *arguments) {
    attend_call *c = (attend_call *)arguments;
    return c->br->backward(&c->p->dx, &c->p->x, &c->p->d, c->work, c->bytes);
}

static inline void refuse_workspace(const refusal *r, attend_call *c) {
    void *work = c->work;
    size_t bytes = c->bytes;
    if (!bytes) return;
    c->bytes = bytes - 1;
    refused(r, "workspace one byte short", NSA_ERROR_WORKSPACE, "workspace");
    c->bytes = 0;
    refused(r, "workspace of 0 bytes", NSA_ERROR_WORKSPACE, "workspace");
    c->bytes = bytes, c->work = NULL;
    refused(r, "workspace null", NSA_ERROR_WORKSPACE, "workspace");
    c->work = work;
}

static inline void refuse_null(const branch *br, const problem *p) {
    const nsa_status s[] = {br->forward(NULL, &p->d, NULL, 0),
                            br->backward(&p->dx, NULL, &p->d, NULL, 0),
                            br->backward(NULL, &p->x, &p->d, NULL, 0)};
    static const char *const where[] = {"arguments", "arguments", "dx.arguments"};
    check_case("%s, refusal: null structs", br->name);
    for (int i = 0; i < COUNT(s); i++)
        CHECK(nsa_status_kind(s[i]) == NSA_ERROR_NULL && !strcmp(nsa_status_where(s[i]), where[i]),
              "%d: %s (%s)", i, nsa_status_name(s[i]), nsa_status_where(s[i]));
}

/* CUDA reads rows 16 bytes at a time: each stride is whole pieces. */
static inline void refuse_strides(const refusal *r, const refused_tensor *t) {
    int64_t *strides[] = {&t->x->batch, &t->x->token, &t->x->head};
    for (int i = 0; CHECKS_CUDA && i < COUNT(strides); i++) {
        *strides[i] += 1;
        refused(r, "a stride of no whole pieces", NSA_ERROR_STRIDE, t->name);
        *strides[i] -= 1;
    }
}

/* The same sizes, and the same bits, whatever fields hold that the branch has no use for. */
static inline void unused_change_nothing(const branch *br, problem *p, const double *zeros,
                                         const refusal *forward, const refusal *backward) {
    const tensor *written[] = {&p->out, &p->lse, &p->dq, &p->dk, &p->dv};
    unsigned char *found[2][COUNT(written)];
    for (int spoilt = 0; spoilt < 2; spoilt++) {
        const nsa_desc good = p->d;
        if (spoilt) spoil_unused(forward);
        size_t sizes[] = {br->forward_size(&good), br->backward_size(&good),
                          br->forward_size(&p->d), br->backward_size(&p->d)};
        check_case("%s, fields without use, spoilt %d", br->name, spoilt);
        CHECK(sizes[0] == sizes[2] && sizes[1] == sizes[3], "the sizes change");
        for (int i = 2; i < COUNT(written); i++) tensor_put(written[i], zeros);
        nsa_status s[] = {forward->call(forward->arguments), backward->call(backward->arguments)};
        CHECK_OK("forward", s[0]);
        CHECK_OK("backward", s[1]);
        for (int i = 0; i < COUNT(written); i++) found[spoilt][i] = tensor_bits(written[i]);
        p->d = good;
    }
    for (int i = 0; i < COUNT(written); i++) {
        size_t size = dtype_size(written[i]->view.dtype);
        CHECK_BITS("with fields without use", found[1][i], found[0][i],
                   tensor_count(written[i]) * size, size);
        free(found[0][i]), free(found[1][i]);
    }
}

/* Without queries the views on their side may be absent, of any dtype; keys and values may not. */
static inline void refuse_no_keys(problem *p, const refusal *forward, const refusal *backward) {
    const nsa_tensor none = {NULL, NSA_I32, 0, 0, 0};
    nsa_tensor *keys[] = {&p->x.k, &p->x.v};
    p->d.count = 0;
    p->x.q = p->x.out = p->x.lse = p->x.blocks = p->dx.q = p->dx.out = p->dx.lse = none;
    check_case("without queries");
    CHECK_OK("forward", forward->call(forward->arguments));
    CHECK_OK("backward", backward->call(backward->arguments));
    for (int i = 0; i < 2; i++) {
        const nsa_tensor good = *keys[i];
        keys[i]->data = NULL;
        refused(forward, "null, without queries", NSA_ERROR_NULL, i ? "v" : "k");
        refused(backward, "null, without queries", NSA_ERROR_NULL, i ? "v" : "k");
        *keys[i] = good;
    }
}

static inline void test_refusals(const branch *br) {
    nsa_desc d = desc_of(shape("small"));
    numbers n = numbers_new(br, &d, NSA_REAL_DTYPE, 41);
    double *zeros = ref_zeros(n.nq + n.nk + n.nv);
    problem p = problem_new(br, &d, &n, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, zeros);
    p.d.threads = 1; /* with more, a short workspace means fewer */
    guarded *w = guarded_new("workspace", br->forward_size(&p.d), 1);
    guarded *w2 = guarded_new("workspace", br->backward_size(&p.d), 1);
    attend_call forward_call = {br, &p, w->data, w->bytes},
                backward_call = {br, &p, w2->data, w2->bytes};
    unsigned unused = UNUSED_FORCED | (br->keys == BRANCH_CMP ? 0 : UNUSED_CMP) |
                      (br->keys == BRANCH_SLC ? 0 : UNUSED_SLC);
    refusal forward = {"forward", call_forward, &forward_call, &p.d, unused};
    refusal backward = {"backward", call_backward, &backward_call, &p.d, unused};
    refused_tensor x[] = {
        {"q", &p.x.q, 1, 0, NSA_I32, 0, 0, 0},     {"k", &p.x.k, 1, 0, NSA_I32, 0, 0, 0},
        {"v", &p.x.v, 1, 0, NSA_I32, 0, 0, 0},     {"out", &p.x.out, 1, 1, NSA_I32, 0, 0, 0},
        {"lse", &p.x.lse, 1, 1, NSA_F16, 0, 0, 0}, {"blocks", &p.x.blocks, 1, 0, NSA_F32, 0, 0, 0}};
    refused_tensor dx[] = {{"dx.q", &p.dx.q, 0, 1, NSA_I32, 0, 0, 0},
                           {"dx.k", &p.dx.k, 0, 1, NSA_I32, 0, 0, 0},
                           {"dx.v", &p.dx.v, 0, 1, NSA_I32, 0, 0, 0},
                           {"dx.out", &p.dx.out, 1, 0, NSA_I32, 0, 0, 0},
                           {"dx.lse", &p.dx.lse, 0, 0, NSA_F16, 0, 0, 0}};
    for (int i = 0; i < COUNT(x) - (br->keys != BRANCH_SLC); i++) {
        refuse_tensor(&forward, &x[i]);
        x[i].output = 0; /* backward reads what forward wrote */
        refuse_tensor(&backward, &x[i]);
    }
    refuse_tensor(&backward, &dx[4]);
    nsa_tensor dlse = p.dx.lse;
    p.dx.lse = p.x.lse;
    refused(&backward, "dx.lse is x.lse", NSA_ERROR_SHARED, "dx.lse");
    p.dx.lse = dlse;
    for (int i = 0; i < 4; i++) {
        refuse_tensor(&backward, &dx[i]);
        refuse_strides(&backward, &dx[i]);
        refuse_strides(&forward, &x[i]); /* q, k, v, out */
    }
    refuse_desc(&forward);
    refuse_desc(&backward);
    refuse_workspace(&forward, &forward_call);
    refuse_workspace(&backward, &backward_call);
    unused_change_nothing(br, &p, zeros, &forward, &backward);
    if (!CHECKS_CUDA) refuse_null(br, &p);
    refuse_no_keys(&p, &forward, &backward);
    free(zeros);
    numbers_free(&n);
    guards_free();
    nsa_desc bad = d;
    bad.dim = 0;
    check_case("%s, sizes for a refused descriptor", br->name);
    CHECK(br->forward_size(&bad) == 0 && br->backward_size(&bad) == 0, "not 0");
}

/* Instruction sets that this machine has not are refused by name. */
static inline void test_absent_isa(const branch *br) {
    nsa_desc d = desc_of(shape("small"));
    numbers n = numbers_new(br, &d, NSA_REAL_DTYPE, 42);
    double *zeros = ref_zeros(n.nq + n.nk + n.nv);
    problem p = problem_new(br, &d, &n, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, zeros);
    guarded *w = guarded_new("workspace", br->forward_size(&d), 1);
    attend_call c = {br, &p, w->data, w->bytes};
    refusal r = {br->name, call_forward, &c, &p.d, 0};
    for (int i = 0; i < COUNT(isas); i++)
        if (!nsa_isa_available(isas[i])) {
            p.d.isa = isas[i];
            refused(&r, nsa_isa_name(isas[i]), NSA_ERROR_ISA, "isa");
        }
    free(zeros);
    numbers_free(&n);
    guards_free();
}

/* How many of the other instruction sets have these bits. */
static inline int sets_with(const bits *b, const branch *br, nsa_desc d, const numbers *n) {
    int found = 0;
    for (int i = 1; i < COUNT(isas); i++) {
        if (!nsa_isa_available(isas[i]) || isas[i] >= NSA_ISA_AVX512_BF16) continue;
        int same = 1;
        d.isa = isas[i];
        bits other = bits_of(br, &d, n, NSA_BF16, 1);
        for (int k = 0; k < 5; k++) same &= !memcmp(other.of[k], b->of[k], b->bytes[k]);
        found += same;
        bits_free(&other);
    }
    return found;
}

/* Rows of bf16: a set that multiplies them as bf16 has bits of its own. Asked for products of f32
   it has those of a set without. Says which of them a call uses here. */
static inline void test_products(const branch *br) {
    nsa_desc d = desc_of(shape("G 2, D 24"));
    numbers n = numbers_new(br, &d, NSA_BF16, 43);
    const char *used = "f32";
    for (int isa = NSA_ISA_AVX512_BF16; isa <= NSA_ISA_NEON_BF16; isa++) {
        if (!nsa_isa_available((nsa_isa)isa)) continue;
        used = nsa_isa_name((nsa_isa)isa);
        check_case("%s, products of %s", br->name, used);
        d.isa = (nsa_isa)isa, d.products = NSA_PRODUCTS_BF16;
        bits own = bits_of(br, &d, &n, NSA_BF16, 1);
        d.products = NSA_PRODUCTS_F32;
        bits asked = bits_of(br, &d, &n, NSA_BF16, 1);
        CHECK(sets_with(&own, br, d, &n) == 0, "the bits of another set");
        CHECK(sets_with(&asked, br, d, &n) > 0, "no other set has these bits");
        bits_free(&own), bits_free(&asked);
    }
    printf("%s: rows of bf16 are multiplied by %s here\n", br->name, used);
    numbers_free(&n);
}

/* p is rounded to nearest: where all values are 1, the mean of out is 1. It would be less by some
   2^-9 if bits were cut off. */
static inline void test_rounded_weights(const branch *br) {
    nsa_desc d = desc_of(shape("the paper's blocks"));
    numbers n = numbers_new(br, &d, dtypes[1], 44);
    double *zeros = ref_zeros(n.nq + n.nk + n.nv), *out = ref_zeros(n.nout), sum = 0, rows = 0;
    for (size_t i = 0; i < n.nv; i++) n.v[i] = 1;
    check_case("%s, %s, values are 1", br->name, dtype_name(dtypes[1]));
    problem p = problem_new(br, &d, &n, dtypes[1], NSA_REAL_DTYPE, 8 * MIXED + 1, zeros);
    CHECK(run_forward(br, &p) == NSA_OK, "forward");
    tensor_get(&p.out, out);
    for (size_t i = 0; i < n.nout; i++) sum += out[i], rows += out[i] != 0;
    CHECK(fabs(sum / rows - 1) < 3e-4, "the mean of out is 1 %+g", sum / rows - 1);
    free(zeros);
    free(out);
    guards_free();
    numbers_free(&n);
}

/* ds that lies half-way between two numbers of bf16 is rounded to the even one. The second query
   sees two keys of score 0, so p = 1/2, and its dout finds 1 and -2^-8 in their values. That makes
   ds = p (dp - delta) = (1 + 2^-8) / 4 for the first key, whose row of k is 1. */
static inline void test_ties(const branch *br) {
    /* clang-format off */
    static const geometry g = {"ties", 1, 2, 1, 1, 16, 16, 8, 4, 8, 1, 1, 1, 4, 1, NULL};
    /* clang-format on */
    const int pairs =
        nsa_isa_available(NSA_ISA_AVX512_BF16) || nsa_isa_available(NSA_ISA_NEON_BF16);
    nsa_desc d = desc_of(&g);
    numbers n = numbers_new(br, &d, NSA_BF16, 45);
    double *zeros = ref_zeros(n.nq + n.nk + n.nv), *dq = ref_zeros(n.nq);
    for (int i = 0; i < 32; i++) n.q[i] = n.k[i] = n.v[i] = n.dout[i] = 0;
    n.k[0] = n.v[0] = n.dout[16] = 1, n.v[16] = -1. / 256;
    if (n.dlse) n.dlse[0] = n.dlse[1] = 0;
    check_case("%s, ties", br->name);
    problem p = problem_new(br, &d, &n, NSA_BF16, NSA_REAL_DTYPE, 1, zeros);
    run_both(br, &p);
    tensor_get(&p.dq, dq);
    CHECK(fabs(dq[16] - (pairs ? .25 : (1 + 1. / 256) / 4)) < 1e-6, "dq is %.10f", dq[16]);
    free(zeros), free(dq);
    numbers_free(&n);
    guards_free();
}

/* No tokens, no rows, only empty sequences: valid, and nothing is written. */
static inline void test_nothing_to_do(const branch *br, nsa_dtype dtype) {
    static const int32_t empty[] = {0, 0, 0}, shifted[] = {4, 4, 4};
    nsa_desc d = desc_of(shape("small"));
    nsa_desc cases[] = {d, d, d, d, d};
    cases[0].tokens = cases[0].count = 0;
    cases[1].count = 0;
    cases[2].first = 70, cases[2].count = 0;
    cases[3].begins = empty;
    cases[4].begins = shifted, cases[4].tokens = cases[4].count = 0;
    for (int i = 0; i < COUNT(cases); i++) {
        /* On CUDA begins lie on the device: the host takes a view of no rows for one whose rows
           overlap. */
        if (CHECKS_CUDA && cases[i].begins == empty) continue;
        numbers n = numbers_new(br, &cases[i], dtype, 43);
        double *zeros = ref_zeros(n.nq + n.nk + n.nv);
        check_case("%s, %s, nothing to do, %d", br->name, dtype_name(dtype), i);
        bits b = bits_of(br, &cases[i], &n, dtype, 0);
        int clean = 1;
        for (int k = 0; k < 5; k++)
            for (size_t j = 0; j < b.bytes[k]; j++)
                clean &= b.of[k][j] == (k < 3 - (k == 2) ? CHECK_POISON : 0);
        CHECK(clean, "something was written");
        bits_free(&b);
        free(zeros);
        numbers_free(&n);
    }
}

/* ---- Lists of others ---- */

/* Lists that may hold anything: numbers out of reach, twice the same, out of order. An entry counts
   if it is a candidate and greater than all that counted before it; `proper` has those alone. */
static inline void any_blocks(const nsa_desc *d, uint64_t seed, int32_t *any, int32_t *proper) {
    plan p = plan_of(d);
    int width = nsa_block_list_width(d);
    for (int b = 0; b < p.sequences; b++)
        for (int i = 0; i < p.length[b] * d->kv_heads; i++) {
            size_t row = (size_t)((p.row[b] * d->kv_heads + i) * width);
            int last = i / d->kv_heads / d->slc_block, most = -1, kept = 0;
            for (int slot = 0; slot < width; slot++) {
                int kind = check_below(8, seed, row + (size_t)slot);
                int32_t j = kind == 0   ? INT32_MIN
                            : kind == 1 ? INT32_MAX
                            : kind == 2 ? -1
                                        : check_below(last + 3, seed + 1, row + (size_t)slot);
                any[row + (size_t)slot] = j;
                if (j > most && j <= last) proper[row + (size_t)kept++] = most = j;
            }
            while (kept < width) proper[row + (size_t)kept++] = -1;
        }
}

/* No list makes a kernel fail; what it reads of one is what the lists of others' comment says. */
static inline void test_any_lists(const branch *br, const geometry *g, nsa_dtype dtype) {
    nsa_desc d = desc_of(g);
    numbers n = numbers_new(br, &d, dtype, 51), m = n;
    size_t lists = (size_t)(plan_of(&d).rows * d.kv_heads * nsa_block_list_width(&d));
    m.blocks = (int32_t *)check_alloc(lists * sizeof *m.blocks);
    any_blocks(&d, 52, n.blocks, m.blocks);
    check_case("%s, %s, %s, lists that hold anything", br->name, g->name, dtype_name(dtype));
    bits any = bits_of(br, &d, &n, dtype, 1), proper = bits_of(br, &d, &m, dtype, 1);
    same_bits(&any, &proper);
    bits_free(&any), bits_free(&proper);
    free(m.blocks);
    numbers_free(&n);
}

/* Begins that hold anything: accepted, and no kernel leaves its memory, which the device sees
   to. */
static inline void test_any_begins(const branch *br, const geometry *g, nsa_dtype dtype) {
    nsa_desc d = desc_of(g);
    if (!d.begins) return;
    d = roomy_desc(&d);
    numbers n = numbers_new(br, &d, dtype, 53);
    double *zeros = ref_zeros(n.nq + n.nk + n.nv);
    for (int trial = 0; trial < ANY_BEGINS; trial++) {
        int32_t begins[5];
        any_begins(trial, &d, begins);
        check_case("%s, %s, any begins, %d %d %d %d", br->name, dtype_name(dtype), begins[0],
                   begins[1], begins[2], begins[3]);
        problem p = problem_new(br, &d, &n, dtype, dtype, trial, zeros);
        p.d.begins = begins;
        guarded *w = workspace_new(br->forward_size(&p.d), 1);
        nsa_status s = br->forward(&p.x, &p.d, w->data, w->bytes);
        CHECK_OK("forward", s);
        w = workspace_new(br->backward_size(&p.d), 1);
        s = br->backward(&p.dx, &p.x, &p.d, w->data, w->bytes);
        CHECK_OK("backward", s);
        guards_free();
    }
    free(zeros);
    numbers_free(&n);
}

/* ---- All of it ---- */

/* A geometry outside of what CUDA takes is refused by the field's name, and asked nothing more. Of
   the branches slc alone looks at the size of selection blocks. */
static inline int attend_refused(const branch *br, const geometry *g) {
    nsa_desc d = desc_of(g);
    nsa_attend x;
    memset(&x, 0, sizeof x);
    const char *limit = refused_by(&d);
    if (!limit || (br->keys != BRANCH_SLC && !strcmp(limit, "slc_block"))) return 0;
    nsa_status s = br->forward(&x, &d, NULL, 0);
    check_case("%s, %s, outside of CUDA's limits", br->name, g->name);
    CHECK(!strcmp(nsa_status_where(s), limit), "blamed \"%s\", wanted \"%s\"", nsa_status_where(s),
          limit);
    return 1;
}

/* Quick runs on CUDA take each geometry in one dtype. */
static inline void test_all(const branch *br, amount a) {
    int quick = a != WHOLE, turn = 0;
    for (int i = 0; i < COUNT(geometries); i++) {
        const geometry *g = &geometries[i];
        if (attend_refused(br, g) || !is_taken(i, a)) continue;
        for (int k = 0; k < COUNT(dtypes); k++) {
            uint64_t seed = (uint64_t)(10 * i + k);
            /* every geometry meets all questions in one dtype */
            int others = (turn + k) % COUNT(dtypes);
            if (CHECKS_CUDA && quick && others) continue;
            test_reference(br, g, dtypes[k], seed, NULL, "",
                           a == LEAST || (a == QUICK && asks_little(g, 1)) ? ONCE
                           : others && !CHECKS_CUDA                        ? IN_TURN
                                                                           : ALL);
            if (a == LEAST) {
                if (CHECKS_CUDA && br->keys == BRANCH_SLC) test_any_lists(br, g, dtypes[k]);
                if (!CHECKS_CUDA && br->keys == BRANCH_WIN && !others)
                    test_deterministic(br, g, dtypes[k]); /* threads share the workspace out */
                test_any_begins(br, g, dtypes[k]);
                continue;
            }
            if (others || asks_little(g, quick)) continue;
            test_slices(br, g, dtypes[k]);
#ifndef CHECK_RACES /* bits are for the other builds: that one looks at accesses, and is slow */
            test_deterministic(br, g, dtypes[k]);
            test_alone(br, g, dtypes[k]);
            test_causal(br, g, dtypes[k]);
            test_scaling(br, g, dtypes[k]);
#endif
            test_bad_values(br, g, dtypes[k]);
            if (CHECKS_CUDA && br->keys == BRANCH_SLC) test_any_lists(br, g, dtypes[k]);
            test_any_begins(br, g, dtypes[k]);
        }
        turn++;
    }
    for (int k = 0; k < COUNT(dtypes); k++) {
        if (CHECKS_CUDA ? !quick : a != LEAST || k == 1)
            test_extremes(br, shape("G 3, D 64"), dtypes[k]);
        else if (k == 1 && a < LITTLE)
            test_reference(br, shape("small"), dtypes[k], 21, rising_scores, ", rising scores",
                           ALL);
        test_nothing_to_do(br, dtypes[k]);
        if (!CHECKS_CUDA || k == 0 || !quick) test_large_logits(br, dtypes[k]);
    }
#ifdef CHECK_F64
    for (int i = 0; i < COUNT(tiny_geometries); i++) test_gradcheck(br, &tiny_geometries[i]);
    test_gradcheck(br, shape("grad, D 576 / 512"));
#endif
    /* a stage of the pipeline of sm_90a is filled a second time only behind its four stages */
    if (a >= LITTLE && br->keys == BRANCH_DENSE)
        test_rows(br, shape("T > w, one block more"), dtypes[1], 31, NULL, ", five tiles", 0,
                  IN_TURN);
    if (a >= LITTLE && (br->keys == BRANCH_DENSE || (br->keys == BRANCH_SLC && a == LITTLE)))
        test_shared_rows(br);
    if (a == LITTLE && (br->keys == BRANCH_DENSE || br->keys == BRANCH_SLC)) test_whole_tiles(br);
#ifndef CHECK_RACES /* what overflows makes no race */
    test_overflow(br);
#endif
    test_refusals(br);
    if (CHECKS_CUDA) return;
    for (int k = 0; k < COUNT(dtypes); k++) test_rows_in_place(br, shape("small"), dtypes[k]);
    for (int k = 0; k < COUNT(dtypes); k++) {
        test_one_array(br, shape("D 576 / 512"), dtypes[k]);
        test_one_array(br, shape("D 192 / 128"), dtypes[k]);
    }
    test_more_queries(br);
    test_many_heads(br, 128, 1), test_many_heads(br, 128, 20), test_many_heads(br, 96, 2);
    test_mixed(br), test_rounded_weights(br), test_absent_isa(br), test_products(br);
    if (br->keys == BRANCH_DENSE || br->keys == BRANCH_WIN) test_ties(br);
    if (br->keys == BRANCH_WIN) test_last_row(br);
}

/* Not causal, lists by query head, the other rule of windows: the same questions, of a few
   geometries each. Under the executor each takes one geometry. */
static inline void test_options(const branch *br, amount a) {
    static const char *const shapes[] = {"small",       "G 2, D 24",   "G 6, D 80",
                                         "D 192 / 128", "varlen four", "varlen empty"};
    static const struct {
        nsa_mask mask;
        int heads_of_list;
        const char *rule, *on_cuda;
    } options[] = {{NSA_MASK_NONE, 0, ", not causal", "small"},
                   {NSA_MASK_CAUSAL, 1, ", lists by head", "small"},
                   {NSA_MASK_NONE, 1, ", not causal, lists by head", "varlen empty"},
                   {NSA_MASK_NONE, 2, ", not causal, a list for two heads", "G 6, D 48"}};
    for (int option = 0; option < COUNT(options); option++) {
        case_options.mask = options[option].mask;
        const int of_list = case_options.heads_of_list = options[option].heads_of_list;
        if (of_list && br->keys != BRANCH_SLC) continue;
        for (int i = 0; i < COUNT(shapes); i += a == WHOLE ? 1 : 2) {
            const int few = CHECKS_CUDA && a != WHOLE;
            const geometry *g = shape(few ? options[option].on_cuda : shapes[i]);
            nsa_dtype dtype = dtypes[(i + option) % COUNT(dtypes)];
            case_options.window_rule = i / 2 % 2 ? NSA_WINDOW_BEFORE_SELF : NSA_WINDOW_COUNTS_SELF;
            if ((few && i) || (of_list && g->H / g->Hk % of_list) || attend_refused(br, g))
                continue;
            test_reference(br, g, dtype, (uint64_t)(1000 + 10 * i + option), NULL,
                           options[option].rule, a == LEAST ? ONCE : ALL);
            if (a == LEAST) continue;
            test_slices(br, g, dtype);
#ifndef CHECK_RACES
            if (!few) test_deterministic(br, g, dtype);
            test_alone(br, g, dtype);
#endif
        }
#ifdef CHECK_F64
        for (int i = 0; of_list < 2 && i < COUNT(tiny_geometries); i++)
            test_gradcheck(br, &tiny_geometries[i]);
#endif
    }
    memset(&case_options, 0, sizeof case_options);
}

/* The geometries that take the reference minutes. */
static inline void test_large(const branch *br) {
    for (int i = 0; i < COUNT(large_geometries); i++)
        test_reference(br, &large_geometries[i], dtypes[i % COUNT(dtypes)], (uint64_t)i, NULL, "",
                       ALL);
}

static inline int attend_main(const branch *br, const char *program, int argc, char **argv) {
    if (asked(argc, argv, "slow")) test_large(br);
    if (asked(argc, argv, "refusals"))
        test_refusals(br);
    else
        test_all(br, asked_amount(argc, argv)), test_options(br, asked_amount(argc, argv));
    return check_done(program);
}

#endif

/* test_merge.c - attention over two sets of keys made one.
   Twin: nsa.h's "Merge". */
#include "harness/suite.h"

typedef struct merge_case {
    const char *name, *shape;
    double apart; /* what lse is multiplied by */
    int full;     /* every row has the keys of one part at least: finite differences need that */
} merge_case;

static const merge_case merge_cases[] = {
    {"two sequences", "small", 1, 0},      {"grouped heads", "G 6, D 80", 1, 0},
    {"lse far apart", "G 2, D 24", 60, 0}, {"Dv 3", "D 1 / 3", 1, 0},
    {"varlen", "varlen empty", 1, 0},      {"varlen, far apart", "varlen four", 60, 0},
    {"Dv 512", "D 576 / 512", 1, 0},
};

enum { SLOT_OUT_A, SLOT_OUT_B, SLOT_LSE_A, SLOT_LSE_B, SLOT_OUT, SLOT_LSE };

static nsa_status merge_forward(const void *x, const nsa_desc *d, void *work, size_t bytes) {
    (void)work, (void)bytes;
    return nsa_merge_forward((const nsa_merge *)x, d);
}

static nsa_status merge_backward(const void *dx, const void *x, const nsa_desc *d, void *work,
                                 size_t bytes) {
    (void)work, (void)bytes;
    return nsa_merge_backward((const nsa_merge *)dx, (const nsa_merge *)x, d);
}

static void merge_reference(const suite *s, const nsa_desc *d, int tokens, ref_prec prec,
                            double **x, double **dx) {
    ref_merge m = {prec,
                   tokens * d->heads,
                   d->dim_v,
                   {x[SLOT_OUT_A], x[SLOT_OUT_B]},
                   {x[SLOT_LSE_A], x[SLOT_LSE_B]},
                   x[SLOT_OUT],
                   x[SLOT_LSE]};
    ref_merge_grad dm = {dx[SLOT_OUT],
                         dx[SLOT_LSE],
                         {dx[SLOT_OUT_A], dx[SLOT_OUT_B]},
                         {dx[SLOT_LSE_A], dx[SLOT_LSE_B]}};
    (void)s;
    ref_merge_forward(&m);
    ref_merge_backward(&m, &dm);
}

/* One row in five lacks the keys of one part, one in twenty-five those of both; such a part's out
   is 0, as the attentions write it. */
static void some_without_keys(const suite *s, const nsa_desc *d, double **x) {
    const merge_case *c = (const merge_case *)s->options;
    plan p = plan_of(d);
    for (int r = 0; r < p.rows * d->heads; r++)
        for (int part = 0; part < 2; part++) {
            double *lse = &x[SLOT_LSE_A + part][r];
            *lse = ref_store(REF_F32, *lse * c->apart);
            if (check_below(5, 900 + (uint64_t)part, (uint64_t)r)) continue;
            if (c->full && part && x[SLOT_LSE_A][r] == -INFINITY) continue;
            *lse = -INFINITY;
            for (int i = 0; i < d->dim_v; i++) x[SLOT_OUT_A + part][r * d->dim_v + i] = 0;
        }
}

static suite suite_of(const merge_case *c, const nsa_desc *d) {
    suite s;
    memset(&s, 0, sizeof s);
    s.name = c->name, s.struct_size = sizeof(nsa_merge), s.options = c;
    s.forward = merge_forward, s.backward = merge_backward, s.reference = merge_reference;
    s.prepare = some_without_keys;
    const struct {
        const char *name;
        size_t at;
        int width, output;
    } slots[] = {
        {"out_a", offsetof(nsa_merge, out_a), d->dim_v, 0},
        {"out_b", offsetof(nsa_merge, out_b), d->dim_v, 0},
        {"lse_a", offsetof(nsa_merge, lse_a), 1, 0},
        {"lse_b", offsetof(nsa_merge, lse_b), 1, 0},
        {"out", offsetof(nsa_merge, out), d->dim_v, 1},
        {"lse", offsetof(nsa_merge, lse), 1, 1},
    };
    for (int i = 0; i < COUNT(slots); i++) {
        slot *t = suite_add(&s, slots[i].name, slots[i].at, ROWS_QUERY, d->heads, slots[i].width);
        t->gradient = 1, t->output = slots[i].output;
        t->sums = !CHECKS_CUDA && !t->output;
        if (slots[i].width == 1 && i != SLOT_OUT_A && i != SLOT_OUT_B && i != SLOT_OUT)
            t->dtype = NSA_REAL_DTYPE;
    }
    s.slots[SLOT_LSE].gradient_optional = 1;
    return s;
}

/* n zeros, where a device finds them too. */
static nsa_real *reals(size_t n) {
    guarded *g = guarded_new("reals", n * sizeof(nsa_real), 16);
    memset(g->data, 0, g->bytes);
    return (nsa_real *)g->data;
}

/* What an attention over both sets of keys gives: slc over the lists' blocks, merged with itself
   over the other blocks, is dense causal attention, with its gradients. */
static void merge_is_one_softmax(void) {
    enum { T = 96, H = 4, D = 16, BLOCK = 16, BLOCKS = T / BLOCK };
    nsa_desc d = nsa_desc_default(1, T, H, 2, D);
    d.cmp_block = 16, d.cmp_stride = 16, d.slc_block = BLOCK, d.slc_count = BLOCKS;
    nsa_real *q = reals(T * H * D), *k = reals(T * 2 * D), *v = reals(T * 2 * D);
    nsa_real *dout = reals(T * H * D), *dlse = reals(T * H);
    nsa_real *out[4], *lse[4]; /* two parts, merged, dense */
    nsa_real *dq[2], *dk[2], *dv[2], *dpart[2], *dlse_part[2];
    int32_t *lists[2];
    for (int i = 0; i < 4; i++) out[i] = reals(T * H * D), lse[i] = reals(T * H);
    for (int i = 0; i < 2; i++) {
        dq[i] = reals(T * H * D), dk[i] = reals(T * 2 * D), dv[i] = reals(T * 2 * D);
        dpart[i] = reals(T * H * D), dlse_part[i] = reals(T * H);
        lists[i] = (int32_t *)reals(T * 2 * BLOCKS);
        for (int j = 0; j < T * 2 * BLOCKS; j++) lists[i][j] = -1;
    }
    const nsa_dtype real = NSA_REAL_DTYPE;
    for (int i = 0; i < T * H * D; i++) {
        q[i] = (nsa_real)check_normal(1, (uint64_t)i);
        dout[i] = (nsa_real)check_normal(2, (uint64_t)i);
    }
    for (int i = 0; i < T * 2 * D; i++) {
        k[i] = (nsa_real)check_normal(3, (uint64_t)i);
        v[i] = (nsa_real)check_normal(4, (uint64_t)i);
    }
    for (int i = 0; i < T * H; i++) dlse[i] = (nsa_real)check_normal(5, (uint64_t)i);
    for (int row = 0; row < T * 2; row++)
        for (int j = 0, n[2] = {0, 0}; j <= row / 2 / BLOCK; j++) {
            int part = check_below(2, 6, (uint64_t)(row * BLOCKS + j));
            lists[part][row * BLOCKS + n[part]++] = j;
        }
    size_t bytes = nsa_attend_slc_backward_workspace_size(&d);
    size_t others[] = {nsa_attend_slc_forward_workspace_size(&d),
                       nsa_attend_dense_forward_workspace_size(&d),
                       nsa_attend_dense_backward_workspace_size(&d)};
    for (int i = 0; i < COUNT(others); i++) bytes = bytes > others[i] ? bytes : others[i];
    void *work = guarded_new("workspace", bytes, 1)->data;
    nsa_attend x[3], dx[3];
    memset(x, 0, sizeof x), memset(dx, 0, sizeof dx);
    for (int i = 0; i < 3; i++) { /* the parts, then dense */
        x[i].q = nsa_tensor_bthd(q, real, T, H, D), x[i].k = nsa_tensor_bthd(k, real, T, 2, D);
        x[i].v = nsa_tensor_bthd(v, real, T, 2, D);
        x[i].out = nsa_tensor_bthd(out[i == 2 ? 3 : i], real, T, H, D);
        x[i].lse = nsa_tensor_bthd(lse[i == 2 ? 3 : i], real, T, H, 1);
        if (i < 2) x[i].blocks = nsa_tensor_bthd(lists[i], NSA_I32, T, 2, BLOCKS);
        dx[i].q = nsa_tensor_bthd(dq[i == 2], real, T, H, D);
        dx[i].k = nsa_tensor_bthd(dk[i == 2], real, T, 2, D);
        dx[i].v = nsa_tensor_bthd(dv[i == 2], real, T, 2, D);
        dx[i].out = nsa_tensor_bthd(i == 2 ? dout : dpart[i], real, T, H, D);
        dx[i].lse = nsa_tensor_bthd(i == 2 ? dlse : dlse_part[i], real, T, H, 1);
    }
    nsa_merge m, dm;
    memset(&m, 0, sizeof m), memset(&dm, 0, sizeof dm);
    m.out_a = x[0].out, m.lse_a = x[0].lse, m.out_b = x[1].out, m.lse_b = x[1].lse;
    m.out = nsa_tensor_bthd(out[2], real, T, H, D), m.lse = nsa_tensor_bthd(lse[2], real, T, H, 1);
    dm.out_a = dx[0].out, dm.out_b = dx[1].out, dm.lse_a = dx[0].lse, dm.lse_b = dx[1].lse;
    dm.out = dx[2].out, dm.lse = dx[2].lse;
    check_case("one softmax over slc of two disjoint lists");
    nsa_status status[8] = {NSA_OK};
    for (int i = 0; i < 2; i++) status[i] = nsa_attend_slc_forward(&x[i], &d, work, bytes);
    status[2] = nsa_merge_forward(&m, &d);
    status[3] = nsa_merge_backward(&dm, &m, &d);
    for (int i = 0; i < 2; i++)
        status[4 + i] = nsa_attend_slc_backward(&dx[i], &x[i], &d, work, bytes);
    status[6] = nsa_attend_dense_forward(&x[2], &d, work, bytes);
    status[7] = nsa_attend_dense_backward(&dx[2], &x[2], &d, work, bytes);
    for (int i = 0; i < COUNT(status); i++) CHECK_OK("a call", status[i]);
    const struct {
        const char *name;
        const nsa_real *got, *want;
        int n, width;
    } pairs[] = {{"out", out[2], out[3], T * H * D, D},
                 {"lse", lse[2], lse[3], T * H, 1},
                 {"dq", dq[0], dq[1], T * H * D, D},
                 {"dk", dk[0], dk[1], T * 2 * D, D},
                 {"dv", dv[0], dv[1], T * 2 * D, D}};
    for (int i = 0; i < COUNT(pairs); i++) {
        double *got = ref_zeros((size_t)pairs[i].n), *want = ref_zeros((size_t)pairs[i].n);
        for (int j = 0; j < pairs[i].n; j++)
            got[j] = (double)pairs[i].got[j], want[j] = (double)pairs[i].want[j];
        double allowed = (real == NSA_F64 ? 1e-13 : 2e-6) * check_norm(want, (size_t)pairs[i].n);
        CHECK_NEAR(pairs[i].name, got, want, (size_t)pairs[i].n, (size_t)pairs[i].width, allowed);
        free(got), free(want);
    }
    guards_free();
}

/* A logarithm that is no number makes its row NaN, in either part and backward too, unless only one
   part has keys. */
static void bad_logarithms(void) {
    static const double pairs[][2] = {{1, NAN},
                                      {NAN, 1},
                                      {1, INFINITY},
                                      {INFINITY, 1},
                                      {-1, -INFINITY},
                                      {-INFINITY, NAN},
                                      {INFINITY, -INFINITY},
                                      {NAN, INFINITY},
                                      {2, 1},
                                      {-INFINITY, -INFINITY}};
    enum { ROWS = COUNT(pairs), D = 8 };
    nsa_desc d = nsa_desc_default(1, ROWS, 1, 1, D);
    nsa_real *out[3], *lse[3], *dout[3], *dlse[3]; /* the parts, merged */
    nsa_merge x, dx;
    memset(&x, 0, sizeof x), memset(&dx, 0, sizeof dx);
    for (int i = 0; i < 3; i++) {
        out[i] = reals(ROWS * D), lse[i] = reals(ROWS);
        dout[i] = reals(ROWS * D), dlse[i] = reals(ROWS);
        for (int r = 0; i < 2 && r < ROWS; r++) lse[i][r] = (nsa_real)pairs[r][i];
        for (int j = 0; j < ROWS * D; j++) out[i][j] = j % D ? (nsa_real)(i + 1) : (nsa_real)-0.0;
    }
    for (int j = 0; j < ROWS * D; j++) dout[2][j] = 1;
    const nsa_dtype real = NSA_REAL_DTYPE;
    nsa_tensor *of_parts[][3] = {{&x.out_a, &x.out_b, &x.out}, {&dx.out_a, &dx.out_b, &dx.out}};
    nsa_tensor *logarithms[][3] = {{&x.lse_a, &x.lse_b, &x.lse}, {&dx.lse_a, &dx.lse_b, &dx.lse}};
    for (int i = 0; i < 3; i++)
        for (int g = 0; g < 2; g++) {
            *of_parts[g][i] = nsa_tensor_bthd(g ? dout[i] : out[i], real, ROWS, 1, D);
            *logarithms[g][i] = nsa_tensor_bthd(g ? dlse[i] : lse[i], real, ROWS, 1, 1);
        }
    check_case("logarithms that are no numbers");
    nsa_status status[2] = {nsa_merge_forward(&x, &d), NSA_OK};
    x.out.data = x.lse.data = NULL; /* backward reads neither */
    status[1] = nsa_merge_backward(&dx, &x, &d);
    CHECK_OK("forward", status[0]);
    CHECK_OK("backward", status[1]);
    for (int r = 0; r < ROWS; r++) {
        const double a = pairs[r][0], b = pairs[r][1];
        int no_a = a == -INFINITY, no_b = b == -INFINITY, numbers = isfinite(a) && isfinite(b);
        double got = (double)out[2][r * D + D - 1], from_a = (double)dout[0][r * D];
        if (no_a || no_b) { /* the other part, bit for bit */
            const double zero = (double)out[2][r * D];
            CHECK(got == (no_a && no_b ? 0 : no_a ? 2 : 1), "row %d: out %g", r, got);
            CHECK((no_a && no_b) || isnan(a) || isnan(b) || (zero == 0 && signbit(zero)),
                  "row %d: -0 became %g", r, zero);
            CHECK(from_a == !no_a, "row %d: dout_a %g", r, from_a);
            CHECK(no_a || dlse[0][r] == 0, "row %d: dlse_a %g", r, (double)dlse[0][r]);
        } else {
            CHECK(numbers == !isnan(got), "row %d: out %g", r, got);
            CHECK(numbers == !isnan((double)lse[2][r]), "row %d: lse %g", r, (double)lse[2][r]);
            CHECK(numbers == !isnan(from_a), "row %d: dout_a %g", r, from_a);
            CHECK(numbers == !isnan((double)dlse[0][r]), "row %d: dlse_a is a number or none", r);
            CHECK(numbers == !isnan((double)dlse[1][r]), "row %d: dlse_b is a number or none", r);
        }
    }
    guards_free();
}

#ifndef CHECK_CUDA
/* A part that many rows share, with a logit and a value: of each head, of all, of each sequence or
   of each place. The rows of its gradient are those of x with strides of 0, and so are sums. */
typedef struct sink {
    const char *name;
    int sequences, heads; /* 1: each has its own */
    nsa_dtype dtype;      /* of its value */
    int tokens;           /* 1: each has its own, and all sequences have the same */
} sink;

enum {
    SINK_B = 3,
    SINK_T = 37,
    SINK_H = 4,
    SINK_D = 24,
    SINK_ROWS = SINK_B * SINK_T * SINK_H,
    SINK_SHARED = SINK_T * SINK_H /* rows of the shared part, at most */
};

/* One part of its own for each row, its logit and value; the other, shared by rows. */
typedef struct sink_problem {
    nsa_desc d;
    nsa_merge x, dx;
    nsa_real *logit, *value, *dlogit, *dvalue; /* of the shared part: (B or T, H) and (.., D) */
    uint16_t *stored;                          /* the value as bf16 */
} sink_problem;

static nsa_tensor sink_rows(const sink *s, void *data, nsa_dtype dtype, int width) {
    nsa_tensor x = {data, dtype, s->sequences ? SINK_H * width : 0, s->tokens ? SINK_H * width : 0,
                    s->heads ? width : 0};
    return x;
}

static nsa_real *normal_reals(uint64_t seed, size_t n) {
    nsa_real *x = reals(n);
    for (size_t i = 0; i < n; i++) x[i] = (nsa_real)check_normal(seed, i);
    return x;
}

static sink_problem sink_problem_of(const sink *s, const int32_t *begins) {
    sink_problem p;
    memset(&p, 0, sizeof p);
    p.d = nsa_desc_default(SINK_B, SINK_T, SINK_H, 1, SINK_D);
    p.d.begins = begins;
    p.stored = (uint16_t *)reals(SINK_SHARED * SINK_D);
    const nsa_dtype real = NSA_REAL_DTYPE;
    nsa_tensor *rows[] = {&p.x.out_a, &p.x.lse_a, &p.x.out,    &p.x.lse,
                          &p.dx.out,  &p.dx.lse,  &p.dx.out_a, &p.dx.lse_a};
    for (int i = 0; i < COUNT(rows); i++) {
        const int width = i % 2 ? 1 : SINK_D;
        nsa_real *data = i < 2 || (i >= 4 && i < 6)
                             ? normal_reals(50 + (uint64_t)i, SINK_ROWS * SINK_D)
                             : reals(SINK_ROWS * SINK_D);
        *rows[i] = nsa_tensor_bthd(data, real, SINK_T, SINK_H, width);
    }
    p.logit = normal_reals(60, SINK_SHARED), p.value = normal_reals(61, SINK_SHARED * SINK_D);
    for (int i = 0; s->dtype == NSA_BF16 && i < SINK_SHARED * SINK_D; i++) {
        const uint16_t half = nsa_f32_to_bf16((float)p.value[i]);
        p.value[i] = (nsa_real)nsa_bf16_to_f32(half), p.stored[i] = half;
    }
    p.dlogit = reals(SINK_SHARED), p.dvalue = reals(SINK_SHARED * SINK_D);
    p.x.lse_b = sink_rows(s, p.logit, real, 1), p.x.out_b = sink_rows(s, p.value, real, SINK_D);
    if (s->dtype == NSA_BF16) p.x.out_b = sink_rows(s, p.stored, NSA_BF16, SINK_D);
    p.dx.lse_b = sink_rows(s, p.dlogit, real, 1);
    p.dx.out_b = sink_rows(s, p.dvalue, s->dtype, SINK_D);
    return p;
}

/* The definition, in double: sums of the gradients of all rows that share one. */
static void sink_reference(const sink *s, const sink_problem *p, double *dlogit, double *dvalue) {
    const nsa_real *out_a = (nsa_real *)p->x.out_a.data, *lse_a = (nsa_real *)p->x.lse_a.data;
    const nsa_real *dout = (nsa_real *)p->dx.out.data, *dlse = (nsa_real *)p->dx.lse.data;
    for (int r = 0; r < SINK_ROWS; r++) {
        const int token = r / SINK_H, of = (s->sequences ? token / SINK_T * SINK_H : 0) +
                                           (s->tokens ? token % SINK_T * SINK_H : 0) +
                                           (s->heads ? r % SINK_H : 0);
        double a = exp((double)lse_a[r]), b = exp((double)p->logit[of]), along = 0;
        for (int c = 0; c < SINK_D; c++) {
            double of_out = (double)dout[r * SINK_D + c];
            along += of_out * ((double)p->value[of * SINK_D + c] - (double)out_a[r * SINK_D + c]);
            dvalue[of * SINK_D + c] += b / (a + b) * of_out;
        }
        dlogit[of] += b / (a + b) * (a / (a + b) * along + (double)dlse[r]);
    }
}

static void sink_run(sink_problem *p) {
    nsa_status s[] = {nsa_merge_forward(&p->x, &p->d), nsa_merge_backward(&p->dx, &p->x, &p->d)};
    CHECK_OK("forward", s[0]);
    CHECK_OK("backward", s[1]);
}

#ifdef CHECK_F64
/* dout . out + dlse . lse */
static double sink_loss(sink_problem *p) {
    double sum = 0;
    const nsa_status s = nsa_merge_forward(&p->x, &p->d);
    CHECK_OK("forward", s);
    for (int i = 0; i < SINK_ROWS * SINK_D; i++)
        sum += ((nsa_real *)p->x.out.data)[i] * ((nsa_real *)p->dx.out.data)[i];
    for (int i = 0; i < SINK_ROWS; i++)
        sum += ((nsa_real *)p->x.lse.data)[i] * ((nsa_real *)p->dx.lse.data)[i];
    return sum;
}

static void sink_gradcheck(sink_problem *p, nsa_real *x, const nsa_real *dx, int n) {
    const double h = 1e-5;
    double worst = 0;
    for (int i = 0; i < n; i++) {
        const double was = x[i];
        x[i] = was + h;
        const double up = sink_loss(p);
        x[i] = was - h;
        const double down = sink_loss(p), error = gradient_error(dx[i], (up - down) / (2 * h));
        x[i] = was;
        worst = error <= worst ? worst : error;
    }
    CHECK(worst <= 1e-7, "finite differences are off by %.3g", worst);
}
#endif

static void shared_sink(const sink *s, const int32_t *begins) {
    const int places = s->sequences ? SINK_B : s->tokens ? SINK_T : 1;
    const int rows = places * SINK_H, width = rows * SINK_D;
    double *dlogit = ref_zeros((size_t)rows), *dvalue = ref_zeros((size_t)width);
    double *got = ref_zeros((size_t)width);
    unsigned char *first[2] = {NULL, NULL};
    for (int threads = 1; threads < 5; threads++) {
        sink_problem p = sink_problem_of(s, begins);
        check_case("a shared sink, %s, packed %d, %d threads", s->name, begins != NULL, threads);
        p.d.threads = threads;
        if (threads == 1) sink_reference(s, &p, dlogit, dvalue);
        sink_run(&p);
        const double unit = NSA_REAL_DTYPE == NSA_F64 ? 1e-14 : 4e-6;
        for (int i = 0; i < rows; i++) got[i] = (double)p.dlogit[i];
        CHECK_NEAR("dx.lse_b", got, dlogit, (size_t)rows, 1,
                   unit * check_norm(dlogit, (size_t)rows));
        for (int i = 0; i < width; i++)
            got[i] = s->dtype == NSA_BF16
                         ? (double)nsa_bf16_to_f32(((uint16_t *)(void *)p.dvalue)[i])
                         : (double)p.dvalue[i];
        CHECK_NEAR("dx.out_b", got, dvalue, (size_t)width, SINK_D,
                   (s->dtype == NSA_BF16 ? ldexp(1, -8) : unit) *
                       check_norm(dvalue, (size_t)width));
#ifdef CHECK_F64
        if (threads == 1 && s->dtype == NSA_F64) {
            sink_gradcheck(&p, p.logit, p.dlogit, s->heads ? rows : 1);
            sink_gradcheck(&p, p.value, p.dvalue, s->heads ? width : SINK_D);
        }
#endif
        const nsa_real *of[] = {p.dlogit, p.dvalue};
        for (int i = 0; i < 2; i++) {
            size_t bytes = (size_t)(i ? width : rows) * sizeof(nsa_real);
            if (first[i]) CHECK_BITS("threads", (const unsigned char *)of[i], first[i], bytes, 1);
            if (!first[i]) first[i] = memcpy(check_alloc(bytes), of[i], bytes);
        }
        guards_free();
    }
    free(first[0]), free(first[1]), free(dlogit), free(dvalue), free(got);
}

static void shared_sinks(void) {
    static const int32_t begins[] = {0, SINK_T, 2 * SINK_T, 3 * SINK_T};
    static const sink sinks[] = {{"one a head", 0, 1, NSA_REAL_DTYPE, 0},
                                 {"one for all", 0, 0, NSA_REAL_DTYPE, 0},
                                 {"one a head and sequence", 1, 1, NSA_REAL_DTYPE, 0},
                                 {"one a head and token", 0, 1, NSA_REAL_DTYPE, 1},
                                 {"one a head, in bf16", 0, 1, NSA_BF16, 0}};
    for (int i = 0; i < COUNT(sinks); i++) {
        shared_sink(&sinks[i], NULL);
        if (!sinks[i].sequences && !sinks[i].tokens) shared_sink(&sinks[i], begins);
    }
}
#endif

/* dx filled by copying x holds forward's lse where the incoming gradient goes. */
static void copied_struct_is_refused(const suite *s, const nsa_desc *d) {
    spoiled b;
    spoiled_new(&b, s, d);
    nsa_merge *x = (nsa_merge *)instance_x(&b.p), *dx = (nsa_merge *)instance_dx(&b.p);
    dx->lse = x->lse;
    refused(&b.backward, "dx.lse is x.lse", NSA_ERROR_SHARED, "dx.lse");
    guards_free();
}

int main(int argc, char **argv) {
    int step = asked_step(argc, argv, CHECKS_CUDA ? 1 : 2, 4);
    for (int i = 0; i < COUNT(merge_cases); i += step) {
        nsa_desc d = desc_of(shape(merge_cases[i].shape));
        suite s = suite_of(&merge_cases[i], &d);
        for (int k = 0; k < COUNT(dtypes) && !suite_refused(&s, &d, NULL); k++) {
            suite_reference(&s, &d, dtypes[k], (uint64_t)(10 * i + k));
            if ((i / step + k) % COUNT(dtypes)) continue; /* these in one dtype a case */
            suite_bit_tests(&s, &d, dtypes[k]);
            suite_nan(&s, &d, dtypes[k]);
        }
    }
#ifdef CHECK_F64
    for (int i = 0; i < COUNT(tiny_geometries); i++) {
        merge_case c = {tiny_geometries[i].name, NULL, 1, 1};
        nsa_desc d = desc_of(&tiny_geometries[i]);
        suite s = suite_of(&c, &d);
        suite_gradcheck(&s, &d);
    }
#endif
    nsa_desc d = desc_of(shape(merge_cases[0].shape));
    suite s = suite_of(&merge_cases[0], &d);
    s.unused = UNUSED_CMP | UNUSED_SLC | UNUSED_FORCED;
    suite_refusals(&s, &d);
    copied_struct_is_refused(&s, &d);
    merge_is_one_softmax();
#ifndef CHECK_CUDA
    shared_sinks();
#endif
    bad_logarithms();
    return check_done("test_merge");
}

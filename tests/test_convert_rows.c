/* test_convert_rows.c - rows of 8 bits with scales: how they are rounded, and that attention over
   them is attention over the numbers that they read as, to the bit, wherever they lie.
   Twin: none. Not here: that each code reads as its number (test_row_formats.c). */
#include <float.h>
#include <math.h>

#include "harness/check.h"
#include "harness/tensors.h"
#include "nsa.h"

enum { WIDTH = 131, ROWS = 96, HEADS = 2, GROUP = 4, CODES = 256 };

static const nsa_dtype formats[] = {NSA_I8, NSA_F8};
static char workspace[1 << 23];

/* ---- Rounding ---- */

static double number_of(nsa_dtype dtype, int code) {
    return dtype == NSA_I8 ? (signed char)code : e4m3_value((unsigned char)code);
}

/* The code of the number nearest to x, of two the even one; -0 of no integer. Tried one by one. */
static int nearest(nsa_dtype dtype, double x) {
    int best = 0;
    for (int code = 0; code < CODES; code++) {
        const double apart = fabs(number_of(dtype, code) - x),
                     least = fabs(number_of(dtype, best) - x);
        if (isnan(apart) || (dtype == NSA_F8 && !signbit(x) != (code < 0x80))) continue;
        if (signbit(x) && best == 0 && dtype == NSA_F8)
            best = code;
        else if (apart < least || (apart == least && !(code & 1) && (best & 1)))
            best = code;
    }
    return best;
}

/* The bound that docs/numerics.md states, of a number of columns whose largest is `most`. */
static double allowed(nsa_dtype dtype, double x, double most) {
    if (most < 448 * 0x1p-126) return most;
    return dtype == NSA_I8 ? most / 253.9 : fmax(fabs(x) / 15.99, most / 458700);
}

/* One row against its definition: scales, codes, what it reads as. */
static void check_row(nsa_dtype dtype, const float *row, const char *what) {
    unsigned char stored[WIDTH + 8];
    nsa_real read[WIDTH];
    const nsa_tensor x = nsa_tensor_bthd((void *)(uintptr_t)row, NSA_F32, 1, 1, WIDTH);
    const nsa_tensor to = nsa_tensor_bthd(stored, dtype, 1, 1, WIDTH),
                     back = nsa_tensor_bthd(read, NSA_REAL_DTYPE, 1, 1, WIDTH);
    CHECK(nsa_convert_rows(&x, &to, 1, 1, 1, WIDTH) == NSA_OK, "%s", what);
    CHECK(nsa_convert_rows(&to, &back, 1, 1, 1, WIDTH) == NSA_OK, "%s back", what);
    int wrong = 0, first = -1;
    for (int begin = 0; begin < WIDTH; begin += 128) {
        const int end = begin + 128 < WIDTH ? begin + 128 : WIDTH;
        double most = 0, sum = 0;
        float scale;
        memcpy(&scale, stored + WIDTH + begin / 32, 4);
        for (int c = begin; c < end; c++) most = fmax(most, fabs((double)row[c]));
        for (int c = begin; c < end; c++) sum += (double)row[c] - (double)row[c];
        for (int c = begin; c < end; c++) {
            const double y = scale > 0 ? (double)(float)((double)row[c] / (double)scale) : 0;
            int ok = isnan(sum) ? isnan(read[c])
                                : fabs((double)read[c] - (double)row[c]) <=
                                      allowed(dtype, (double)row[c], most);
            if (!isnan(sum)) ok &= stored[c] == nearest(dtype, y);
            if (!ok && !wrong++) first = c;
        }
        const float exact = (float)(most / (dtype == NSA_I8 ? 127 : 448));
        const int close = scale == exact || (most > 3e38 && scale == nextafterf(exact, 0));
        CHECK(isnan(sum)          ? isnan(scale)
              : exact < 0x1p-126f ? scale == 0
                                  : close,
              "%s: a scale of %a, wanted %a", what, (double)scale, (double)exact);
    }
    CHECK(!wrong, "%s: %d numbers are wrong, the first is %d: %a became %02x, which reads as %a",
          what, wrong, first, (double)row[first < 0 ? 0 : first], stored[first < 0 ? 0 : first],
          (double)read[first < 0 ? 0 : first]);
}

static void test_rounding(nsa_dtype dtype) {
    static const float most[] = {1, 127, 448, 3e38f, FLT_MAX, 1e-20f, 2e-36f, 1e-38f, 1e-44f, 0};
    check_case("rounding, dtype %d", (int)dtype);
    float row[WIDTH];
    for (int i = 0; i < 10; i++)
        for (int seed = 0; seed < 50; seed++) {
            for (int c = 0; c < WIDTH; c++) {
                const uint64_t h = check_hash((uint64_t)seed, (uint64_t)c);
                const double x = (double)(h >> 12) * 0x1p-52 * (h & 1 ? -1 : 1);
                row[c] = (float)(x * ldexp((double)most[i], -(int)(h >> 1 & 15) * (seed & 1)));
            }
            row[seed] = row[130] = most[i];
            check_row(dtype, row, "a random row");
        }
    /* ties: the scale is 1/8, and every number lies between two codes or is one */
    for (int shift = 0; shift < CODES; shift += 64) {
        for (int c = 0; c < WIDTH; c++) {
            const int code = (shift + c) & 0xff, last = (code & 0x7f) >= 0x7e;
            const double a = number_of(dtype, last ? code & 0x80 : code);
            const double b = number_of(dtype, last ? code & 0x80 : code + 1);
            row[c] = (float)((a + (c % 3 ? b : a)) / 16);
        }
        row[0] = row[130] = dtype == NSA_I8 ? 127.0f / 8 : 448.0f / 8;
        check_row(dtype, row, "a row of ties");
    }
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        row[7] = bad[i];
        check_row(dtype, row, "a row that is not finite");
    }
}

/* ---- Attention ---- */

/* Memory of one test, handed out from its start. */
enum { ROOM = 1 << 26 };
static double memory[ROOM / sizeof(double)];
static char *const room = (char *)memory;
static size_t used;

static nsa_tensor take(nsa_dtype dtype, int batch, int tokens, int heads, int width) {
    nsa_tensor x = nsa_tensor_bthd(room + used, dtype, tokens, heads, width);
    size_t bytes = (size_t)x.batch * (size_t)batch * 8;
    used += (bytes + 63) / 64 * 64;
    if (used > ROOM) abort();
    memset(x.data, 0, bytes);
    return x;
}

static nsa_tensor random_rows(int batch, int tokens, int heads, int width, uint64_t seed) {
    nsa_tensor x = take(NSA_F32, batch, tokens, heads, width);
    for (int64_t i = 0; i < x.batch * batch; i++) {
        const uint64_t h = check_hash(seed, (uint64_t)i);
        ((float *)x.data)[i] = (float)((double)(h >> 11) * 0x1p-53 * 4 - 2);
    }
    return x;
}

static nsa_tensor converted(nsa_tensor x, nsa_dtype dtype, int batch, int tokens, int heads,
                            int width) {
    nsa_tensor to = take(dtype, batch, tokens, heads, width);
    nsa_status s = nsa_convert_rows(&x, &to, batch, tokens, heads, width);
    CHECK(s == NSA_OK, "convert: %s %s", nsa_status_name(s), nsa_status_where(s));
    return to;
}

typedef nsa_status (*attend)(const nsa_attend *, const nsa_desc *, void *, size_t);

/* out and lse of all branches over keys of 8 bits and over what these read as: the same bits. */
static void compare_branches(const nsa_desc *d, nsa_tensor k, nsa_tensor v, nsa_dtype dtype,
                             int batch, int rows) {
    static const attend calls[] = {nsa_attend_slc_forward, nsa_attend_win_forward,
                                   nsa_attend_dense_forward, nsa_attend_cmp_forward};
    const int heads = HEADS * GROUP, width = nsa_block_list_width(d);
    nsa_attend x;
    memset(&x, 0, sizeof x);
    x.q = random_rows(d->batch, d->tokens, heads, d->dim, 5);
    x.blocks = take(NSA_I32, d->batch, d->tokens, HEADS, width);
    for (int64_t i = 0; i < (int64_t)d->batch * d->tokens * HEADS * width; i++)
        ((int32_t *)x.blocks.data)[i] = i % width ? -1 : 0;
    nsa_tensor out[2], lse[2];
    nsa_tensor k8 = converted(k, dtype, batch, rows, HEADS, d->dim),
               v8 = converted(v, dtype, batch, rows, HEADS, d->dim_v);
    nsa_tensor keys[] = {k8, converted(k8, NSA_REAL_DTYPE, batch, rows, HEADS, d->dim)};
    nsa_tensor values[] = {v8, converted(v8, NSA_REAL_DTYPE, batch, rows, HEADS, d->dim_v)};
    for (int call = 0; call < 4; call++) {
        for (int wide = 0; wide < 2; wide++) {
            x.k = keys[wide], x.v = values[wide];
            x.out = out[wide] = take(NSA_F32, d->batch, d->tokens, heads, d->dim_v);
            x.lse = lse[wide] = take(NSA_REAL_DTYPE, d->batch, d->tokens, heads, 1);
            nsa_status s = calls[call](&x, d, workspace, sizeof workspace);
            CHECK(s == NSA_OK, "call %d: %s %s", call, nsa_status_name(s), nsa_status_where(s));
        }
        const size_t n = (size_t)out[0].batch * (size_t)d->batch;
        CHECK_BITS("out", out[0].data, out[1].data, n * sizeof(float), sizeof(float));
        CHECK_BITS("lse", lse[0].data, lse[1].data,
                   (size_t)lse[0].batch * (size_t)d->batch * sizeof(nsa_real), sizeof(nsa_real));
    }
}

/* The same of scores and lists. */
static void compare_scores(const nsa_desc *d, nsa_tensor k, nsa_dtype dtype, int batch, int rows) {
    const int width = nsa_block_list_width(d), count = (int)nsa_slc_count(d, d->tokens);
    const nsa_tensor k8 = converted(k, dtype, batch, rows, HEADS, d->dim);
    nsa_tensor keys[] = {k8, converted(k8, NSA_REAL_DTYPE, batch, rows, HEADS, d->dim)};
    nsa_score x[2];
    memset(x, 0, sizeof x);
    for (int wide = 0; wide < 2; wide++) {
        x[wide].q = random_rows(d->batch, d->tokens, HEADS * GROUP, d->dim, 5);
        x[wide].k = keys[wide];
        x[wide].scores = take(NSA_REAL_DTYPE, d->batch, d->tokens, HEADS, count);
        x[wide].blocks = take(NSA_I32, d->batch, d->tokens, HEADS, width);
        nsa_status s = nsa_score_blocks(&x[wide], d, workspace, sizeof workspace);
        CHECK(s == NSA_OK, "scores: %s %s", nsa_status_name(s), nsa_status_where(s));
    }
    const size_t scores = (size_t)x[0].scores.batch * (size_t)d->batch,
                 lists = (size_t)x[0].blocks.batch * (size_t)d->batch;
    CHECK_BITS("scores", x[0].scores.data, x[1].scores.data, scores * sizeof(nsa_real),
               sizeof(nsa_real));
    CHECK_BITS("lists", x[0].blocks.data, x[1].blocks.data, lists * sizeof(int32_t),
               sizeof(int32_t));
}

/* Straight, packed and paged rows, of few queries and of many; one key has a NaN. */
static void test_branches(nsa_dtype dtype, int dim, int dim_v) {
    static const int32_t begins[] = {0, 33, 33 + ROWS}, pages[] = {5, 0, 3, 4, 1, 2};
    nsa_desc d = nsa_desc_default(2, ROWS, HEADS * GROUP, HEADS, dim);
    d.dim_v = dim_v, d.cmp_block = d.slc_block = 16, d.cmp_stride = 8, d.window = 40;
    d.slc_count = 3, d.threads = 2;
    for (int how = 0; how < 6; how++) {
        nsa_desc of = d;
        const int few = how & 1, batch = how < 2 ? 2 : how < 4 ? 1 : 6;
        const int rows = how < 2 ? ROWS : how < 4 ? 33 + ROWS : 32;
        check_case("dtype %d, %d / %d wide, %s, %s queries", (int)dtype, dim, dim_v,
                   how < 2   ? "straight"
                   : how < 4 ? "packed"
                             : "paged",
                   few ? "few" : "many");
        used = 0;
        if (few) of.first = 20, of.count = 5;
        if (how / 2 == 1) of.begins = begins;
        if (how / 2 == 2)
            of.pages = pages, of.page_tokens = 32, of.page_count = 6, of.table_width = 3;
        nsa_tensor k = random_rows(batch, rows, HEADS, dim, 1),
                   v = random_rows(batch, rows, HEADS, dim_v, 2);
        ((float *)k.data)[k.token * 18 + 3] = NAN;
        ((float *)v.data)[v.token * 9 + 1] = INFINITY;
        compare_branches(&of, k, v, dtype, batch, rows);
        compare_scores(&of, k, dtype, batch, rows);
    }
}

/* ---- Decoding ---- */

enum { LENGTH = 70, DIM = 136, PARTS = 8 };

/* The chain over new rows of f32, or over all rows at once in `dtype`. */
static nsa_attention chain(const nsa_desc *d, nsa_tensor k, nsa_tensor v, nsa_tensor q,
                           nsa_tensor gates, nsa_dtype dtype) {
    const int heads = d->heads, cmp = nsa_cmp_count(d, LENGTH);
    nsa_attention x;
    memset(&x, 0, sizeof x);
    x.q = q, x.gates = gates;
    x.k_slc = x.k_win = x.k_cmp.x = k;
    x.v_slc = x.v_win = x.v_cmp.x = v;
    x.k_cmp.dim = x.v_cmp.dim = DIM;
    x.k_cmp.out = take(dtype, 1, cmp, HEADS, DIM);
    x.v_cmp.out = take(dtype, 1, cmp, HEADS, DIM);
    nsa_tensor *outs[] = {&x.out_cmp, &x.out_slc, &x.out_win, &x.out};
    nsa_tensor *lses[] = {&x.lse_cmp, &x.lse_slc, &x.lse_win};
    for (int i = 0; i < 4; i++) *outs[i] = take(NSA_F32, 1, LENGTH, heads, DIM);
    for (int i = 0; i < 3; i++) *lses[i] = take(NSA_REAL_DTYPE, 1, LENGTH, heads, 1);
    x.blocks = take(NSA_I32, 1, LENGTH, HEADS, nsa_block_list_width(d));
    return x;
}

static nsa_tensor from_row(nsa_tensor x, int row) {
    x.data = (float *)x.data + x.token * row;
    return x;
}

/* Steps and chunks of several tokens, some taken back, give the bits of the whole. */
static void test_decode(nsa_dtype dtype) {
    check_case("a cache of dtype %d", (int)dtype);
    used = 0;
    nsa_desc d = nsa_desc_default(1, LENGTH, HEADS * GROUP, HEADS, DIM);
    d.cmp_block = d.slc_block = 8, d.cmp_stride = 4, d.window = 12, d.slc_count = 3, d.threads = 1;
    nsa_tensor k = random_rows(1, LENGTH, HEADS, DIM, 1), v = random_rows(1, LENGTH, HEADS, DIM, 2);
    nsa_tensor q = random_rows(1, LENGTH, d.heads, DIM, 3);
    nsa_tensor gates = random_rows(1, LENGTH, d.heads, 3, 4);
    ((float *)k.data)[k.token * 11 + 140] = NAN;
    nsa_attention all = chain(&d, converted(k, dtype, 1, LENGTH, HEADS, DIM),
                              converted(v, dtype, 1, LENGTH, HEADS, DIM), q, gates, dtype);
    nsa_status s = nsa_attention_forward(&all, &d, workspace, sizeof workspace);
    CHECK(s == NSA_OK, "whole: %s %s", nsa_status_name(s), nsa_status_where(s));
    nsa_cache caches[2]; /* each step goes on in a fork of the other */
    size_t bytes = nsa_cache_size(&d, dtype, 20);
    CHECK(bytes && bytes < nsa_cache_size(&d, NSA_BF16, 20), "%zu bytes", bytes);
    for (int i = 0; i < 2; i++) {
        void *held = take(NSA_F64, 1, 1, 1, (int)(bytes / sizeof(double) + 1)).data;
        CHECK(nsa_cache_init(&caches[i], &d, dtype, 20, held, bytes) == NSA_OK, "init");
    }
    for (int at = 0, step = 0, more; at < LENGTH; at += more, step++) {
        more = step % 3 == 2 ? 18 : step % 2 ? 2 : 1;
        more = more < LENGTH - at ? more : LENGTH - at;
        const size_t mark = used;
        nsa_cache *cache = &caches[step % 2];
        CHECK(nsa_cache_fork(cache, 0, &caches[!(step % 2)], 0, at) == NSA_OK, "fork at %d", at);
        nsa_attention x = chain(&d, from_row(k, at), from_row(v, at), from_row(q, at),
                                from_row(gates, at), NSA_F32);
        for (int again = 0; again < 2; again++) {
            s = nsa_decode(&x, cache, more, NULL, NULL, workspace, sizeof workspace);
            CHECK(s == NSA_OK, "decode: %s %s", nsa_status_name(s), nsa_status_where(s));
            if (!again) CHECK(nsa_cache_rewind(cache, 0, at) == NSA_OK, "rewind to %d", at);
        }
        CHECK_BITS("out", x.out.data, from_row(all.out, at).data,
                   (size_t)(x.out.token * more) * sizeof(float), DIM * sizeof(float));
        CHECK_BITS("blocks", x.blocks.data, from_row(all.blocks, at).data,
                   (size_t)(x.blocks.token * more) * sizeof(int32_t), sizeof(int32_t));
        used = mark;
    }
    const size_t compressed = (size_t)all.k_cmp.out.token * (size_t)nsa_cmp_count(&d, LENGTH);
    const int last = caches[1].lengths[0] == LENGTH;
    CHECK_BITS("k_cmp", caches[last].k_cmp.data, all.k_cmp.out.data, compressed, 1);
}

/* ---- What is refused ---- */

static void refused(nsa_status s, int kind, const char *where) {
    CHECK(nsa_status_kind(s) == kind && !strcmp(nsa_status_where(s), where), "%s %s, wanted %s",
          nsa_status_name(s), nsa_status_where(s), where);
}

static void test_refusals(nsa_dtype dtype) {
    check_case("what is refused of dtype %d", (int)dtype);
    used = 0;
    nsa_desc d = nsa_desc_default(1, ROWS, HEADS * GROUP, HEADS, 16);
    nsa_tensor q = random_rows(1, ROWS, HEADS * GROUP, 16, 1),
               k = random_rows(1, ROWS, HEADS, 16, 2);
    nsa_tensor k8 = converted(k, dtype, 1, ROWS, HEADS, 16);
    nsa_attend x, dx;
    memset(&x, 0, sizeof x);
    x.q = x.out = q, x.k = x.v = k8;
    x.lse = take(NSA_REAL_DTYPE, 1, ROWS, HEADS * GROUP, 1);
    dx = x;
    dx.lse.data = dx.k.data = dx.v.data = NULL;
    refused(nsa_attend_win_backward(&dx, &x, &d, workspace, sizeof workspace), NSA_ERROR_DTYPE,
            "k");
    x.k = x.v = k;
    dx.k = k8;
    refused(nsa_attend_win_backward(&dx, &x, &d, workspace, sizeof workspace), NSA_ERROR_DTYPE,
            "dx.k");
    x.q.dtype = dtype;
    refused(nsa_attend_win_forward(&x, &d, workspace, sizeof workspace), NSA_ERROR_DTYPE, "q");
    x.q.dtype = NSA_F32, x.out.dtype = dtype;
    refused(nsa_attend_win_forward(&x, &d, workspace, sizeof workspace), NSA_ERROR_DTYPE, "out");
    nsa_tensor tight = k8; /* no room for the scale of each row */
    tight.head = 16;
    refused(nsa_convert_rows(&k, &tight, 1, ROWS, HEADS, 16), NSA_ERROR_STRIDE, "out");
    refused(nsa_convert_rows(&x.lse, &x.blocks, 1, ROWS, 1, 1), NSA_ERROR_NULL, "out");
    x.blocks = take(NSA_I32, 1, ROWS, 1, 1);
    refused(nsa_convert_rows(&x.blocks, &k8, 1, ROWS, 1, 1), NSA_ERROR_DTYPE, "x");
    refused(nsa_convert_rows(&k, &x.blocks, 1, ROWS, 1, 1), NSA_ERROR_DTYPE, "out");
    refused(nsa_convert_rows(NULL, &k8, 1, 1, 1, 1), NSA_ERROR_NULL, "x");
    refused(nsa_convert_rows(&k, NULL, 1, 1, 1, 1), NSA_ERROR_NULL, "out");
    refused(nsa_convert_rows(&k, &k8, -1, 1, 1, 1), NSA_ERROR_SIZE, "batch");
    refused(nsa_convert_rows(&k, &k8, 1, -1, 1, 1), NSA_ERROR_SIZE, "tokens");
    refused(nsa_convert_rows(&k, &k8, 1, 1, -1, 1), NSA_ERROR_SIZE, "heads");
    refused(nsa_convert_rows(&k, &k8, 1, 1, 1, 0), NSA_ERROR_SIZE, "width");
    refused(nsa_convert_rows(&k, &k8, 1, 1, 1, 577), NSA_ERROR_SIZE, "width");
    CHECK(nsa_convert_rows(&k, &k8, 0, 1, 1, 576) == NSA_OK, "no rows");
    nsa_tensor one = k;
    one.token = 0;
    CHECK(nsa_convert_rows(&one, &k8, 1, ROWS, 1, 16) == NSA_OK, "one row for all");
    refused(nsa_convert_rows(&k8, &one, 1, ROWS, 1, 16), NSA_ERROR_STRIDE, "out");
    nsa_compress phi;
    memset(&phi, 0, sizeof phi);
    phi.phi = NSA_PHI_CONV, phi.dim = 16, phi.x = phi.w1 = phi.out = k8;
    refused(nsa_compress_forward(&phi, &d, workspace, sizeof workspace), NSA_ERROR_DTYPE, "w1");
    nsa_cache cache;
    refused(nsa_cache_init(&cache, &d, NSA_I32, 1, room, ROOM), NSA_ERROR_DTYPE, "dtype");
}

int main(void) {
    for (int i = 0; i < 2; i++) {
        test_rounding(formats[i]);
        test_branches(formats[i], 64, 64);
        test_branches(formats[i], 136, 40);
        test_decode(formats[i]);
        test_refusals(formats[i]);
    }
    return check_done("test_convert_rows");
}

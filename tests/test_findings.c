/* test_findings.c - the faults that fuzzing and reviews found in nsa.h, each as the smallest call
   that showed it.
   Twin: tests/fuzz, which found the first, and docs/hardening.md, which describes each. Not here:
   anything that the tests of the primitives check already. */
#include <limits.h>
#include <math.h>

#include "harness/check.h"
#include "nsa.h"

enum { T = 8, D = 4 };

static float q[T * D], k[T * D], v[T * D], out[T * D];
static nsa_real lse[T], grad[T * D];
static char workspace[1 << 20];

static nsa_desc small(void) {
    nsa_desc d = nsa_desc_default(1, T, 1, 1, D);
    d.cmp_block = d.cmp_stride = d.slc_block = 4;
    d.window = 4;
    d.threads = 1;
    return d;
}

static nsa_attend window(void) {
    nsa_attend x;
    memset(&x, 0, sizeof x);
    x.q = nsa_tensor_bthd(q, NSA_F32, T, 1, D);
    x.k = nsa_tensor_bthd(k, NSA_F32, T, 1, D);
    x.v = nsa_tensor_bthd(v, NSA_F32, T, 1, D);
    x.out = nsa_tensor_bthd(out, NSA_F32, T, 1, D);
    x.lse = nsa_tensor_bthd(lse, NSA_REAL_DTYPE, T, 1, 1);
    return x;
}

/* 1e300 is a finite double and no float: every output became NaN. */
static void test_scale_beyond_float(void) {
    check_case("a scale that no float holds");
    nsa_desc d = small();
    nsa_attend x = window();
    static const double refused[] = {1e300, -1e300, 1.1e38};
    for (int i = 0; i < 3; i++) {
        d.scale = refused[i];
        nsa_status s = nsa_attend_win_forward(&x, &d, workspace, sizeof workspace);
        CHECK(nsa_status_kind(s) == NSA_ERROR_SCALE, "scale %g: %s", d.scale, nsa_status_name(s));
    }
    d.scale = 1e38;
    CHECK(nsa_attend_win_forward(&x, &d, workspace, sizeof workspace) == NSA_OK, "1e38");
    CHECK(out[0] == v[0], "its softmax over equal keys: %g", (double)out[0]);
}

/* Two empty sequences that begin at row 5 have no rows; views without memory were refused, and so
   were strides that keep no rows apart. */
static void test_empty_sequences_behind_row_0(void) {
    check_case("empty sequences that do not begin at 0");
    static const int32_t begins[] = {5, 5, 5};
    nsa_desc d = small();
    d.batch = 2;
    d.begins = begins;
    nsa_attend x;
    memset(&x, 0, sizeof x);
    nsa_status s = nsa_attend_win_forward(&x, &d, workspace, sizeof workspace);
    CHECK(s == NSA_OK, "forward: %s %s", nsa_status_name(s), nsa_status_where(s));
    s = nsa_attend_win_backward(&x, &x, &d, workspace, sizeof workspace);
    CHECK(s == NSA_OK, "backward: %s %s", nsa_status_name(s), nsa_status_where(s));
}

/* Backward of the mean does not read x, so nothing had looked at its dtype before a shift by it. */
static void test_dtype_of_an_unread_tensor(void) {
    check_case("dtypes of what backward does not read");
    nsa_desc d = small();
    nsa_compress x, dx;
    memset(&x, 0, sizeof x);
    x.dim = D;
    dx = x;
    dx.x = nsa_tensor_bthd(grad, NSA_F32, T, 1, D);
    dx.out = nsa_tensor_bthd(q, NSA_F32, T / 4, 1, D);
    static const int dtypes[] = {NSA_F32, NSA_I32, 5, 40, -1};
    for (int i = 0; i < 5; i++) {
        x.x.dtype = (nsa_dtype)dtypes[i];
        dx.x.dtype = NSA_REAL_DTYPE;
        nsa_status s = nsa_compress_backward(&dx, &x, &d, workspace, sizeof workspace);
        CHECK(s == NSA_OK, "x of dtype %d: %s", dtypes[i], nsa_status_name(s));
        dx.x.dtype = NSA_I32;
        s = nsa_compress_backward(&dx, &x, &d, workspace, sizeof workspace);
        CHECK(nsa_status_kind(s) == NSA_ERROR_DTYPE, "a gradient in i32: %s", nsa_status_name(s));
    }
}

/* A score far above lse made p negative in the vectors' exponential; ranking takes no score for
   that, and wrote behind the list. So did finite keys whose scores pass 2^30, for lse is
   rounded. */
static void test_lse_of_other_scores(void) {
    check_case("an lse that is not that of the scores");
    enum { TOKENS = 4096, WIDTH = 16, CMP = TOKENS / 16 - 1, BEHIND = 64 };
    static float keys[CMP * D];
    static int32_t list[WIDTH + BEHIND];
    nsa_desc d = nsa_desc_default(1, TOKENS, 1, 1, D);
    d.first = TOKENS - 1;
    d.count = d.threads = 1;
    for (int i = 0; i < D; i++) q[i] = 1;
    nsa_select x;
    memset(&x, 0, sizeof x);
    x.q = nsa_tensor_bthd(q, NSA_F32, 1, 1, D);
    x.k = nsa_tensor_bthd(keys, NSA_F32, CMP, 1, D);
    x.lse = nsa_tensor_bthd(lse, NSA_REAL_DTYPE, 1, 1, 1);
    x.blocks = nsa_tensor_bthd(list, NSA_I32, 1, 1, WIDTH);
    static const float spreads[] = {1, 30, 1000, 1e9f, 3e38f};
    for (int isa = NSA_ISA_PLAIN; isa <= NSA_ISA_NEON_BF16; isa++)
        for (int i = 0; nsa_isa_available((nsa_isa)isa) && i < 5 * 12; i++) {
            d.isa = (nsa_isa)isa;
            lse[0] = (nsa_real)(-100 * (i / 5));
            for (int j = 0; j < CMP * D; j++)
                keys[j] = spreads[i % 5] * ((float)(j * 7919 % 1009) / 1009 - 0.5f);
            for (int j = 0; j < WIDTH + BEHIND; j++) list[j] = -9;
            nsa_status s = nsa_select_blocks(&x, &d, workspace, sizeof workspace);
            int behind = WIDTH;
            while (behind < WIDTH + BEHIND && list[behind] == -9) behind++;
            CHECK(s == NSA_OK && nsa_check_blocks(&x.blocks, &d, NULL) == NSA_OK &&
                      list[WIDTH - 1] >= 0 && behind == WIDTH + BEHIND,
                  "%s, lse %g, spread %g: %s, the last block %d, written behind: %d",
                  nsa_isa_name(d.isa), (double)lse[0], (double)spreads[i % 5], nsa_status_name(s),
                  (int)list[WIDTH - 1], behind < WIDTH + BEHIND);
        }
}

/* A product with what a query does not see may overflow: 0 times infinity made NaN of the query's
   dq, so that finite values of a later token reached earlier ones; and a q that overflows once it
   is scaled made NaN of the dk of keys that its query does not see. */
static void test_overflow_behind_the_mask(void) {
    check_case("products that overflow behind the mask");
    enum { LATE = 6 };
    static nsa_real dq[T * D], dk[T * D];
    static float dout[T * D];
    const float huge =
        sizeof(nsa_real) == 4 ? 3e38f : 0; /* of floats no product overflows a double */
    for (int isa = NSA_ISA_PLAIN; isa <= NSA_ISA_NEON_BF16; isa++)
        for (int of_q = 0; nsa_isa_available((nsa_isa)isa) && of_q < 2; of_q++) {
            nsa_desc d = small();
            d.isa = (nsa_isa)isa;
            d.scale = 4;
            for (int i = 0; i < T * D; i++) {
                q[i] = k[i] = (float)(i % 5) / 5;
                v[i] = dout[i] = 3;
            }
            for (int i = LATE * D; i < LATE * D + D; i++) (of_q ? q : v)[i] = huge;
            nsa_attend x = window(), dx = x;
            memset(dq, 0, sizeof dq);
            memset(dk, 0, sizeof dk);
            dx.q = nsa_tensor_bthd(dq, NSA_REAL_DTYPE, T, 1, D);
            dx.k = nsa_tensor_bthd(dk, NSA_REAL_DTYPE, T, 1, D);
            dx.v.data = dx.lse.data = NULL;
            dx.out = nsa_tensor_bthd(dout, NSA_F32, T, 1, D);
            nsa_status s = nsa_attend_dense_forward(&x, &d, workspace, sizeof workspace);
            if (s == NSA_OK)
                s = nsa_attend_dense_backward(&dx, &x, &d, workspace, sizeof workspace);
            double sum = 0; /* NaN where one of them is */
            for (int i = 0; i < LATE * D; i++) sum += (double)dq[i] + (double)out[i];
            if (of_q)
                for (int i = LATE * D + D; i < T * D; i++) sum += (double)dk[i];
            uint64_t bits;
            memcpy(&bits, &sum, sizeof bits);
            CHECK(s == NSA_OK && (bits >> 52 & 0x7ff) != 0x7ff, "%s, a huge %s: %s, %g",
                  nsa_isa_name(d.isa), of_q ? "q" : "v", nsa_status_name(s), sum);
        }
}

/* GCC that tunes for some machines (-mtune=znver2) makes a lone chain of multiply-adds
   products and sums: a compressed row alone, as in decoding, had other bits than among more. */
static void test_lone_compressed_row(void) {
    check_case("a compressed row alone");
    enum { HIDDEN = 28 }; /* of vectors of 4, 8 and 16 a lone one */
    static float w1[HIDDEN * 4 * D], w2[D * HIDDEN];
    nsa_compress x;
    memset(&x, 0, sizeof x);
    x.phi = NSA_PHI_MLP, x.dim = D, x.hidden = HIDDEN;
    x.x = nsa_tensor_bthd(q, NSA_F32, T, 1, D);
    x.out = nsa_tensor_bthd(grad, NSA_REAL_DTYPE, 2, 1, D);
    x.w1 = nsa_tensor_bthd(w1, NSA_F32, HIDDEN, 1, 4 * D);
    x.w2 = nsa_tensor_bthd(w2, NSA_F32, D, 1, HIDDEN);
    for (int i = 0; i < T * D; i++) q[i] = (float)(i * 37 % 101) / 101;
    for (int i = 0; i < HIDDEN * 4 * D; i++) w1[i] = (float)(i * 53 % 97) / 97 - 0.4f;
    for (int i = 0; i < D * HIDDEN; i++) w2[i] = (float)(i * 71 % 89) / 89 - 0.4f;
    for (int isa = NSA_ISA_PLAIN; isa <= NSA_ISA_NEON_BF16; isa++)
        if (nsa_isa_available((nsa_isa)isa)) {
            nsa_desc d = small();
            d.isa = (nsa_isa)isa;
            nsa_real both[D];
            nsa_status s = nsa_compress_forward(&x, &d, workspace, sizeof workspace);
            memcpy(both, grad, sizeof both);
            d.tokens = d.count = 4;
            if (s == NSA_OK) s = nsa_compress_forward(&x, &d, workspace, sizeof workspace);
            CHECK(s == NSA_OK && !memcmp(both, grad, sizeof both), "%s: %s, %.9g, among more %.9g",
                  nsa_isa_name(d.isa), nsa_status_name(s), (double)grad[0], (double)both[0]);
        }
}

/* The sum of the parts' sizes passed 2^64, and the query returned what was left of it. */
static void test_sizes_that_do_not_add_up(void) {
    check_case("sizes whose sum passes the address space");
    nsa_attention x, dx;
    nsa_desc d = nsa_desc_default(1, 1 << 30, (1 << 22) - 1, (1 << 22) - 1, 256);
    memset(&x, 0, sizeof x);
    x.k_cmp.dim = x.v_cmp.dim = 256;
    dx = x;
    nsa_tensor *views[] = {&dx.q,     &dx.k_cmp.x, &dx.v_cmp.x, &dx.k_slc,
                           &dx.v_slc, &dx.k_win,   &dx.v_win};
    for (int i = 0; i < 7; i++)
        *views[i] = nsa_tensor_bthd(workspace + 2 * i, NSA_BF16, d.tokens, d.heads, 256);
    size_t bytes = nsa_attention_backward_workspace_size(&dx, &x, &d);
    CHECK(sizeof(size_t) < 8 ? bytes == 0 : bytes == SIZE_MAX, "%zu bytes", bytes);
    d = small();
    d.cmp_stride = 1;
    d.cmp_block = d.slc_block = INT_MAX; /* their strides together passed 2^31 */
    CHECK(nsa_status_kind(nsa_desc_check(&d)) == NSA_ERROR_SIZE, "blocks of 2^31 - 1 tokens");
}

/* The heads of a group, rounded up to whole vectors, passed 2^31. */
static void test_heads_near_2_31(void) {
    check_case("heads near 2^31");
    nsa_desc d = nsa_desc_default(1, 1, INT_MAX, 1, 16);
    nsa_status s = nsa_desc_check(&d);
    CHECK(nsa_status_kind(s) == NSA_ERROR_SIZE && !strcmp(nsa_status_where(s), "heads"), "%s (%s)",
          nsa_status_name(s), nsa_status_where(s));
    CHECK(nsa_attend_win_forward_workspace_size(&d) == 0, "a size for what is refused");
    d = nsa_desc_default(1, 1, INT_MAX / 2, 1, 16);
    size_t bytes = nsa_attend_win_forward_workspace_size(&d);
    CHECK(sizeof(size_t) < 8 || bytes / 16 / sizeof(nsa_real) > (size_t)d.heads,
          "%zu bytes do not hold q", bytes);
}

/* Both ends of what NSA_ERROR_SIZE says of a descriptor's fields are taken, and one more is refused
   by the field's name; the ends that no int passes are taken alone. */
static void test_ends_of_ranges(void) {
    enum { HALF = INT_MAX / 2, QUARTER = INT_MAX / 4 };
    static const int32_t table[1] = {0};
    nsa_desc ends[3]; /* the least; the most, without tokens; the most tokens, rows and pages */
    for (int i = 0; i < 3; i++) ends[i] = nsa_desc_default(1, 0, 1, 1, 1);
    nsa_desc *least = &ends[0], *most = &ends[1], *wide = &ends[2];
    least->forced = NSA_FORCED_ON_TOP, least->slc_init = least->slc_local = 0;
    least->cmp_block = least->cmp_stride = least->slc_block = least->slc_count = 1;
    least->window = 1, least->pages = table, least->page_tokens = 1;
    most->batch = most->window = INT_MAX, most->dim = most->dim_v = 576, most->threads = 65536;
    most->heads = most->kv_heads = most->gate_heads = most->list_heads = HALF;
    most->cmp_block = most->cmp_stride = most->slc_block = HALF;
    most->slc_count = most->slc_init = most->slc_local = QUARTER;
    most->forced = NSA_FORCED_ON_TOP;
    most->table_width = most->page_tokens = most->page_count = -1; /* of no pages */
    wide->tokens = wide->count = wide->rows = INT_MAX;
    wide->cmp_block = wide->cmp_stride = 1, wide->slc_block = HALF;
    wide->pages = table, wide->table_width = wide->page_tokens = wide->page_count = INT_MAX;
    for (int i = 0; i < 3; i++) {
        check_case("ends of ranges, %d", i);
        nsa_status s = nsa_desc_check(&ends[i]);
        int fits = sizeof(size_t) >= 8 || i < 2; /* so many tokens do not in 32 bits */
        CHECK(nsa_status_kind(s) == (fits ? NSA_OK : NSA_ERROR_OVERFLOW), "%s (%s)",
              nsa_status_name(s), nsa_status_where(s));
    }
#define AT(f, end) \
    { #f, offsetof(nsa_desc, f), end }
    static const struct {
        const char *name;
        size_t at;
        int end; /* of ends: one less than the least, or one more than the most */
    } beyond[] = {AT(batch, 0),     AT(tokens, 0),      AT(rows, 0),        AT(heads, 0),
                  AT(kv_heads, 0),  AT(gate_heads, 0),  AT(list_heads, 0),  AT(dim, 0),
                  AT(dim_v, 0),     AT(cmp_block, 0),   AT(cmp_stride, 0),  AT(slc_block, 0),
                  AT(slc_count, 0), AT(slc_init, 0),    AT(slc_local, 0),   AT(window, 0),
                  AT(threads, 0),   AT(table_width, 0), AT(page_tokens, 0), AT(page_count, 0),
                  AT(heads, 1),     AT(kv_heads, 1),    AT(gate_heads, 1),  AT(list_heads, 1),
                  AT(dim, 1),       AT(dim_v, 1),       AT(cmp_block, 1),   AT(slc_block, 1),
                  AT(slc_count, 1), AT(slc_init, 1),    AT(slc_local, 1),   AT(threads, 1)};
#undef AT
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++) {
        nsa_desc d = ends[beyond[i].end];
        *(int *)(void *)((char *)&d + beyond[i].at) += beyond[i].end ? 1 : -1;
        nsa_status s = nsa_desc_check(&d);
        check_case("%s, beyond end %d", beyond[i].name, beyond[i].end);
        CHECK(nsa_status_kind(s) == NSA_ERROR_SIZE && !strcmp(nsa_status_where(s), beyond[i].name),
              "%s (%s)", nsa_status_name(s), nsa_status_where(s));
    }
}

/* A cache of zeros is what a refused nsa_cache_init leaves behind: it was divided by its heads. */
static void test_cache_that_was_not_made(void) {
    check_case("a cache that was not made");
    nsa_cache cache;
    nsa_attention x;
    memset(&cache, 0, sizeof cache);
    memset(&x, 0, sizeof x);
    CHECK(nsa_decode_workspace_size(&x, &cache, 1) == 0, "a size");
    nsa_status s = nsa_decode(&x, &cache, 1, NULL, NULL, workspace, sizeof workspace);
    CHECK(s != NSA_OK, "decoding with it");
    CHECK(nsa_cache_rewind(&cache, 0, 0) != NSA_OK, "rewinding it");
    CHECK(nsa_cache_fork(&cache, 0, &cache, 0, 0) != NSA_OK, "forking it");
}

/* What pairs of a row turn by at position 1, with x = (1, 0) in every pair: cos and sin of it. */
static void rope_at_1(const nsa_rope *options, double turned[]) {
    enum { MOST = 16 };
    static const int32_t one[1] = {1};
    static float x[MOST], to[MOST];
    nsa_rope r = *options;
    nsa_desc d = nsa_desc_default(1, 2, 1, 1, 4);
    d.count = 1;
    for (int i = 0; i < MOST; i++) x[i] = i % 2 ? 0 : 1;
    r.heads = 1;
    r.x = nsa_tensor_bthd(x, NSA_F32, 1, 1, r.dim);
    r.out = nsa_tensor_bthd(to, NSA_F32, 1, 1, r.dim);
    r.positions = nsa_tensor_bthd((void *)(uintptr_t)one, NSA_I32, 1, 1, 1);
    nsa_status s = nsa_rope_forward(&r, &d);
    CHECK(s == NSA_OK, "%s %s", nsa_status_name(s), nsa_status_where(s));
    for (int i = 0; i < r.dim / 2; i++) turned[i] = atan2((double)to[2 * i + 1], (double)to[2 * i]);
}

/* YaRN's ramp over pair numbers ends at the last of them, however slowly the base lets them turn;
   and where both of its ends are one pair, that pair is unchanged and those behind it are slowed.
   (NTK's guard for a dim of 2 is there for the division alone: its one pair has frequency 1 by any
   base, so that nothing can see it.) */
static void test_ends_of_the_ramp(void) {
    enum { DIM = 8, PAIRS = DIM / 2 };
    nsa_rope r;
    double turned[PAIRS];
    memset(&r, 0, sizeof r);
    r.dim = DIM;
    r.scaling = NSA_ROPE_SCALING_YARN;
    r.factor = 8;
    for (int alike = 0; alike < 2; alike++) {
        check_case(alike ? "YaRN's ends alike" : "YaRN's upper end behind the last pair");
        r.base = alike ? 1e200 : 1.5;
        r.trained_context = alike ? 1 : 10000;
        r.fast = alike ? 0 : 2000;
        rope_at_1(&r, turned);
        for (int i = 0; i < PAIRS; i++) {
            double frequency = pow(r.base, -2.0 * i / DIM), ramp = i / (DIM - 1.0);
            if (alike) ramp = i > 0;
            frequency += ramp * (frequency / r.factor - frequency);
            CHECK(fabs(turned[i] - frequency) < 1e-5 * frequency + 1e-12,
                  "pair %d turns by %.9g, not %.9g", i, turned[i], frequency);
        }
    }
}

/* Given positions of packed sequences lie where the sequences do. */
static void test_positions_of_packed_sequences(void) {
    check_case("rope's positions of packed sequences");
    static const int32_t begins[] = {0, 3, T}, positions[T] = {5, 1, 9, 70, 2, 33, 4, 8};
    static float alone[D];
    nsa_rope r;
    nsa_desc d = nsa_desc_default(2, T, 1, 1, D), one = nsa_desc_default(1, 1, 1, 1, D);
    d.begins = begins;
    for (int i = 0; i < T * D; i++) q[i] = (float)(i % 7 - 3);
    memset(&r, 0, sizeof r);
    r.heads = 1;
    r.dim = D;
    r.x = nsa_tensor_bthd(q, NSA_F32, T, 1, D);
    r.out = nsa_tensor_bthd(out, NSA_F32, T, 1, D);
    r.positions = nsa_tensor_bthd((void *)(uintptr_t)positions, NSA_I32, T, 1, 1);
    nsa_status s = nsa_rope_forward(&r, &d);
    CHECK(s == NSA_OK, "%s %s", nsa_status_name(s), nsa_status_where(s));
    for (int t = 0; t < T; t++) {
        nsa_rope row = r;
        row.x.data = q + t * D;
        row.out.data = alone;
        row.positions.data = (void *)(uintptr_t)(positions + t);
        s = nsa_rope_forward(&row, &one);
        CHECK(s == NSA_OK, "%s", nsa_status_name(s));
        CHECK_BITS("a row and it alone", out + t * D, alone, sizeof alone, sizeof *alone);
    }
}

/* Sequences that end before row `first` have no rows to compute, so no view is looked at. */
static void test_first_behind_every_sequence(void) {
    check_case("packed sequences that end before `first`");
    static const int32_t begins[] = {0, 3, 5};
    nsa_desc d = small();
    d.batch = 2;
    d.begins = begins;
    d.first = 4;
    d.count = 2;
    nsa_attend x = window();
    x.q.data = x.out.data = x.lse.data = NULL;
    nsa_status s = nsa_attend_win_forward(&x, &d, workspace, sizeof workspace);
    CHECK(s == NSA_OK, "%s %s", nsa_status_name(s), nsa_status_where(s));
    d.first = 2; /* the first sequence has one row there */
    s = nsa_attend_win_forward(&x, &d, workspace, sizeof workspace);
    CHECK(nsa_status_kind(s) == NSA_ERROR_NULL, "%s", nsa_status_name(s));
}

/* Rows of w1's gradient are cmp_block * dim wide, and are added in parts of 576: with one block and
   one hidden unit dw1 is x, times one factor. */
static void test_rows_wider_than_a_part(void) {
    enum { L = 8, WIDE = 80, FLAT = L * WIDE };
    static nsa_real x[FLAT], w1[FLAT], w2[WIDE], dout[WIDE], dw1[FLAT];
    nsa_desc d = nsa_desc_default(1, L, 1, 1, WIDE);
    d.cmp_block = d.cmp_stride = d.slc_block = L;
    d.threads = 1;
    check_case("gradients of rows of %d numbers", FLAT);
    for (int i = 0; i < FLAT; i++) {
        x[i] = (nsa_real)(1 + i % 11);
        w1[i] = (nsa_real)0.001;
        dw1[i] = (nsa_real)i;
    }
    for (int i = 0; i < WIDE; i++) w2[i] = dout[i] = 1;
    nsa_compress c, dc;
    memset(&c, 0, sizeof c);
    c.phi = NSA_PHI_MLP;
    c.dim = WIDE;
    c.hidden = 1;
    c.x = nsa_tensor_bthd(x, NSA_REAL_DTYPE, L, 1, WIDE);
    c.w1 = nsa_tensor_bthd(w1, NSA_REAL_DTYPE, 1, 1, FLAT);
    c.w2 = nsa_tensor_bthd(w2, NSA_REAL_DTYPE, WIDE, 1, 1);
    memset(&dc, 0, sizeof dc);
    dc.out = nsa_tensor_bthd(dout, NSA_REAL_DTYPE, 1, 1, WIDE);
    dc.w1 = nsa_tensor_bthd(dw1, NSA_REAL_DTYPE, 1, 1, FLAT);
    nsa_status s = nsa_compress_backward(&dc, &c, &d, workspace, sizeof workspace);
    CHECK(s == NSA_OK, "%s %s", nsa_status_name(s), nsa_status_where(s));
    double factor = (double)dw1[0] / (double)x[0];
    CHECK(factor > 1, "the factor is %g", factor);
    for (int i = 0; i < FLAT; i++) {
        double want = i + factor * (double)x[i];
        CHECK(fabs((double)dw1[i] - want) < 1e-5 * want, "dw1[%d] is %g, not %g", i, (double)dw1[i],
              want);
    }
}

/* The logarithm of a sum that is NaN would be a number, if only exponent and mantissa were looked
   at: a row with a score of inf - inf would have a lse like any other. With fused multiply-adds the
   score is inf, so instructions without them are asked for. So many queries do not read keys in
   place, where each score is looked at. */
static void test_scores_beyond_float(void) {
    enum { MANY = 96 };
    static float rows[4][MANY * D];
    static nsa_real sums[MANY];
    check_case("scores that no float holds");
    nsa_desc d = small();
    d.tokens = d.count = MANY;
    d.isa = NSA_ISA_PLAIN;
    nsa_attend x = window();
    nsa_tensor *views[4] = {&x.q, &x.k, &x.v, &x.out};
    for (int i = 0; i < 4; i++) *views[i] = nsa_tensor_bthd(rows[i], NSA_F32, MANY, 1, D);
    x.lse = nsa_tensor_bthd(sums, NSA_REAL_DTYPE, MANY, 1, 1);
    for (int c = 0; c < D; c++) {
        rows[0][80 * D + c] = 1e30f;
        rows[1][79 * D + c] = c % 2 ? -1e30f : 1e30f;
    }
    CHECK(nsa_attend_win_forward(&x, &d, workspace, sizeof workspace) == NSA_OK, "forward");
    for (int t = 79; t < 82; t++)
        CHECK(isfinite((double)sums[t]) == (t != 80 || sizeof(nsa_real) == 8),
              "lse of query %d: %g", t, (double)sums[t]);
    /* All scores of a query are -inf (no double is): as if it saw no key, among others or alone. */
    d.window = 1;
    for (int c = 0; c < D; c++) rows[1][80 * D + c] = -1e30f, rows[2][80 * D + c] = 1;
    for (d.first = 0; d.first <= 80; d.first += 80) {
        d.count = d.first ? 1 : MANY;
        sums[80 - d.first] = rows[3][(80 - d.first) * D] = 7;
        x.q.data = &rows[0][d.first * D];
        CHECK(nsa_attend_win_forward(&x, &d, workspace, sizeof workspace) == NSA_OK, "forward");
        const double sum = (double)sums[80 - d.first], first = rows[3][(80 - d.first) * D];
        const int none = sum < 0 && isinf(sum) && first == 0;
        CHECK(sizeof(nsa_real) == 8 ? first == 1 : none, "lse %g, out %g", sum, first);
    }
}

/* ---- A descriptor's sizes that a function has no use for ---- */

/* The structs of every primitive over one set of arrays. dx.lse stays away: it may not be lse. */
static nsa_attend attend, dattend;
static nsa_merge merge, dmerge;
static nsa_gate gate, dgate;
static nsa_rope rope, drope;
static nsa_compress phi, dphi;
static nsa_rank rank;
static nsa_score score;
static nsa_real more[4][T * D], scores[T];
static int32_t list[T * 16]; /* slc_count is 16 */

static void fill_structs(void) {
    const nsa_desc d = small();
    const nsa_tensor row = nsa_tensor_bthd(q, NSA_F32, T, 1, D);
    const nsa_tensor result = nsa_tensor_bthd(out, NSA_F32, T, 1, D);
    const nsa_tensor one = nsa_tensor_bthd(lse, NSA_REAL_DTYPE, T, 1, 1);
    const nsa_tensor gradient = nsa_tensor_bthd(grad, NSA_REAL_DTYPE, T, 1, D);
    for (int i = 0; i < T * D; i++) q[i] = (float)(i * 37 % 11) / 11, k[i] = (float)(i % 7) / 7;
    attend = window();
    attend.blocks = nsa_tensor_bthd(list, NSA_I32, T, 1, nsa_block_list_width(&d));
    attend.blocks.token = 0; /* one list for all: block 0 */
    memset(&dattend, 0, sizeof dattend);
    dattend.out = row, dattend.q = gradient;
    merge.out_a = merge.out_b = row, merge.lse_a = merge.lse_b = one;
    merge.lse_a = nsa_tensor_bthd(more[0], NSA_REAL_DTYPE, T, 1, 1), merge.lse_b = merge.lse_a;
    merge.out = result, merge.lse = one;
    dmerge.out = row, dmerge.out_a = gradient;
    gate.logits = nsa_tensor_bthd(q, NSA_F32, T, 1, 3);
    gate.cmp = gate.slc = gate.win = row, gate.out = result;
    dgate.out = row, dgate.cmp = gradient;
    rope.x = row, rope.out = result, rope.heads = 1, rope.dim = D;
    drope.out = row, drope.x = gradient;
    phi.x = row, phi.out = result, phi.dim = D;
    dphi.out = row, dphi.x = gradient;
    score.q = row, score.k = nsa_tensor_bthd(k, NSA_F32, T, 1, D);
    score.blocks = nsa_tensor_bthd(list, NSA_I32, T, 1, nsa_block_list_width(&d));
    rank.scores = nsa_tensor_bthd(scores, NSA_REAL_DTYPE, T, 1, 1), rank.scores.token = 0;
    rank.blocks = score.blocks;
}

#define ALONE(name, call)                               \
    static nsa_status alone_##name(const nsa_desc *d) { \
        return call;                                    \
    }
ALONE(cmp, nsa_attend_cmp_forward(&attend, d, workspace, sizeof workspace))
ALONE(slc, nsa_attend_slc_forward(&attend, d, workspace, sizeof workspace))
ALONE(win, nsa_attend_win_forward(&attend, d, workspace, sizeof workspace))
ALONE(dense, nsa_attend_dense_forward(&attend, d, workspace, sizeof workspace))
ALONE(dcmp, nsa_attend_cmp_backward(&dattend, &attend, d, workspace, sizeof workspace))
ALONE(dslc, nsa_attend_slc_backward(&dattend, &attend, d, workspace, sizeof workspace))
ALONE(dwin, nsa_attend_win_backward(&dattend, &attend, d, workspace, sizeof workspace))
ALONE(ddense, nsa_attend_dense_backward(&dattend, &attend, d, workspace, sizeof workspace))
ALONE(merge, nsa_merge_forward(&merge, d))
ALONE(dmerge, nsa_merge_backward(&dmerge, &merge, d))
ALONE(gate, nsa_gate_forward(&gate, d))
ALONE(dgate, nsa_gate_backward(&dgate, &gate, d))
ALONE(rope, nsa_rope_forward(&rope, d))
ALONE(drope, nsa_rope_backward(&drope, &rope, d))
ALONE(phi, nsa_compress_forward(&phi, d, workspace, sizeof workspace))
ALONE(dphi, nsa_compress_backward(&dphi, &phi, d, workspace, sizeof workspace))
ALONE(rank, nsa_rank_queries(&rank, d, workspace, sizeof workspace))
ALONE(score, nsa_score_blocks(&score, d, workspace, sizeof workspace))

enum { OF_CMP = 3, OF_SLC = 60, FORCED = 48 }; /* of cmp_block .. slc_local, as bits */

/* What each of cmp_block .. slc_local may be for a function that does not look at it. */
static void test_fields_without_use(void) {
    static const struct {
        const char *name;
        nsa_status (*call)(const nsa_desc *d);
        int looks; /* at these */
    } functions[] = {{"attend_cmp_forward", alone_cmp, OF_CMP},
                     {"attend_cmp_backward", alone_dcmp, OF_CMP},
                     {"attend_slc_forward", alone_slc, OF_SLC & ~FORCED},
                     {"attend_slc_backward", alone_dslc, OF_SLC & ~FORCED},
                     {"attend_win_forward", alone_win, 0},
                     {"attend_win_backward", alone_dwin, 0},
                     {"attend_dense_forward", alone_dense, 0},
                     {"attend_dense_backward", alone_ddense, 0},
                     {"merge_forward", alone_merge, 0},
                     {"merge_backward", alone_dmerge, 0},
                     {"gate_forward", alone_gate, 0},
                     {"gate_backward", alone_dgate, 0},
                     {"rope_forward", alone_rope, 0},
                     {"rope_backward", alone_drope, 0},
                     {"compress_forward", alone_phi, OF_CMP},
                     {"compress_backward", alone_dphi, OF_CMP},
                     {"rank_queries", alone_rank, OF_SLC},
                     {"score_blocks", alone_score, OF_SLC}};
    static const int values[] = {0, -1, INT_MIN, 3, INT_MAX};
    static float want[T * D];
    static nsa_real want_grad[T * D];
    fill_structs();
    for (size_t f = 0; f < sizeof functions / sizeof *functions; f++)
        for (int field = -1; field < 6; field++)
            for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
                nsa_desc d = small();
                int *const fields[] = {&d.cmp_block, &d.cmp_stride, &d.slc_block,
                                       &d.slc_count, &d.slc_init,   &d.slc_local};
                if (field >= 0 && functions[f].looks >> field & 1) continue;
                if (field >= 0) *fields[field] = values[i];
                for (int j = 0; j < T * D; j++) out[j] = -1, grad[j] = 0, more[0][j] = 1;
                memset(lse, 0, sizeof lse), memset(list, 0xff, sizeof list), list[0] = 0;
                check_case("%s, field %d of 6 is %d", functions[f].name, field, values[i]);
                const nsa_status s = functions[f].call(&d);
                CHECK(s == NSA_OK, "%s %s", nsa_status_name(s), nsa_status_where(s));
                if (field < 0) memcpy(want, out, sizeof want);
                if (field < 0) memcpy(want_grad, grad, sizeof want_grad);
                CHECK(!memcmp(want, out, sizeof want), "another result");
                CHECK(!memcmp(want_grad, grad, sizeof want_grad), "another gradient");
            }
}

/* Of 2^31 - 1 sequences without arrays of their own nothing is looked at one by one: these calls
   take a microsecond each, or the test its whole time limit. */
static void test_many_sequences(void) {
    check_case("2^31 - 1 sequences");
    nsa_desc d = small();
    d.batch = INT_MAX, d.tokens = d.count = 0;
    for (int i = 0; i < 3000; i++) CHECK(nsa_desc_check(&d) == NSA_OK, "refused");
}

/* The strides of axes with one entry may be anything: they are multiplied by nothing. */
static void test_strides_without_use(void) {
    check_case("strides of one row");
    nsa_desc d = small();
    d.tokens = d.count = 1;
    d.dim = d.dim_v = 16; /* whole vectors, which are read where they lie */
    nsa_attend x = window(), dx;
    memset(&dx, 0, sizeof dx);
    dx.out = nsa_tensor_bthd(q, NSA_F32, 1, 1, d.dim);
    dx.k = dx.v = nsa_tensor_bthd(grad, NSA_REAL_DTYPE, 1, 1, d.dim);
    nsa_tensor *all[] = {&x.q, &x.k, &x.v, &x.out, &x.lse, &dx.out, &dx.k, &dx.v};
    static const int64_t any[] = {INT64_MAX, (int64_t)1 << 61}; /* of which the bytes overflow */
    for (int n = 0; n < 2; n++) {
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            all[i]->batch = all[i]->token = all[i]->head = any[n];
        CHECK(nsa_attend_dense_forward(&x, &d, workspace, sizeof workspace) == NSA_OK, "forward");
        CHECK(nsa_attend_dense_backward(&dx, &x, &d, workspace, sizeof workspace) == NSA_OK,
              "backward");
        CHECK(nsa_attend_win_forward(&x, &d, workspace, sizeof workspace) == NSA_OK, "win");
    }
}

/* Queries that need no place among the keys are those of whole sequences without a mask. */
static void test_more_queries_than_tokens(void) {
    static const int32_t begins[] = {0, T};
    check_case("more queries than tokens");
    nsa_desc d = small();
    d.mask = NSA_MASK_NONE, d.count = T + 1;
    CHECK(nsa_desc_check(&d) == NSA_OK, "refused");
    d.begins = begins;
    nsa_status s = nsa_desc_check(&d);
    CHECK(nsa_status_kind(s) == NSA_ERROR_RANGE, "packed: %s", nsa_status_name(s));
}

/* A ragged batch has its queries from firsts, and does not look at first. */
static void test_first_beside_firsts(void) {
    static const int32_t firsts[] = {2}, counts[] = {2};
    check_case("first beside firsts");
    nsa_desc d = small();
    fill_structs();
    d.firsts = firsts, d.counts = counts;
    CHECK(nsa_desc_check(&d) == NSA_OK, "refused without first");
    static const int any[] = {1, INT_MAX, -1};
    for (int i = 0; i < 3; i++) {
        d.first = any[i], d.count = 2;
        CHECK(nsa_rope_forward(&rope, &d) == NSA_OK, "refused with first = %d", any[i]);
    }
}

int main(void) {
    for (int i = 0; i < T * D; i++) v[i] = 3;
    test_scale_beyond_float();
    test_scores_beyond_float();
    test_empty_sequences_behind_row_0();
    test_dtype_of_an_unread_tensor();
    test_lse_of_other_scores();
    test_overflow_behind_the_mask();
    test_lone_compressed_row();
    test_sizes_that_do_not_add_up();
    test_heads_near_2_31();
    test_ends_of_ranges();
    test_cache_that_was_not_made();
    test_ends_of_the_ramp();
    test_positions_of_packed_sequences();
    test_first_behind_every_sequence();
    test_rows_wider_than_a_part();
    test_fields_without_use();
    test_many_sequences();
    test_strides_without_use();
    test_more_queries_than_tokens();
    test_first_beside_firsts();
    return check_done("test_findings");
}

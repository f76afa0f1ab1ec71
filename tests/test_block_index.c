/* test_block_index.c - counts, visibility, overlap map, against counting token by token.
   Twin: nsa.h's "Block index". */
#include "harness/refusals.h"

typedef struct block_case {
    int l, d, slc_block;
} block_case;

static const block_case block_cases[] = {
    {32, 16, 64}, {16, 8, 32}, {8, 4, 16}, {16, 16, 16}, {16, 2, 16}, {12, 6, 30},
    {4, 1, 4},    {1, 1, 1},   {7, 7, 49}, {32, 8, 40},  {6, 3, 9},
};

/* The lengths at which others count what is read. */
static const int lengths[] = {0, 1, 15, 16, 31, 32, 33, 63, 64, 1000, 1024};

static nsa_desc desc_for(const block_case *c, int tokens) {
    nsa_desc d = nsa_desc_default(1, tokens, 2, 1, 16);
    d.cmp_block = c->l, d.cmp_stride = c->d, d.slc_block = c->slc_block;
    d.slc_count = 3, d.slc_init = 1, d.slc_local = 1, d.window = 20;
    return d;
}

static void test_counts(const block_case *c, int tokens) {
    nsa_desc d = desc_for(c, tokens);
    ref_desc r = ref_desc_of(&d, tokens);
    check_case("l %d, d %d, l' %d, T %d", c->l, c->d, c->slc_block, tokens);
    CHECK(nsa_desc_check(&d) == NSA_OK, "refused: %s", nsa_status_where(nsa_desc_check(&d)));
    CHECK(nsa_cmp_count(&d, tokens) == ref_cmp_count(&r, tokens), "cmp_count %d, wanted %d",
          nsa_cmp_count(&d, tokens), ref_cmp_count(&r, tokens));
    CHECK(nsa_slc_count(&d, tokens) == ref_slc_count(&r, tokens), "slc_count %d, wanted %d",
          nsa_slc_count(&d, tokens), ref_slc_count(&r, tokens));
    for (int t = 0; t < tokens; t++) {
        int visible = 0, candidates = 0, begin = t;
        for (int i = 0; i < ref_cmp_count(&r, tokens); i++) visible += ref_cmp_sees(&r, t, i);
        for (int j = 0; j < ref_slc_count(&r, tokens); j++) candidates += j * c->slc_block <= t;
        while (begin > 0 && ref_win_sees(&r, t, begin - 1)) begin--;
        CHECK(nsa_cmp_visible(&d, t) == visible, "query %d sees %d compressed blocks, wanted %d", t,
              nsa_cmp_visible(&d, t), visible);
        CHECK(nsa_slc_candidates(&d, t) == candidates, "query %d has %d candidates, wanted %d", t,
              nsa_slc_candidates(&d, t), candidates);
        CHECK(nsa_window_begin(&d, t) == begin, "window of %d begins at %d, wanted %d", t,
              nsa_window_begin(&d, t), begin);
    }
}

/* Both rules of the window, and windows of every relation to the query. */
static void test_window(void) {
    static const int windows[] = {1, 2, 7, 64, 65, INT_MAX};
    for (int i = 0; i < COUNT(windows); i++)
        for (int before = 0; before < 2; before++) {
            nsa_desc d = nsa_desc_default(1, 100, 1, 1, 16);
            d.window = windows[i];
            d.window_rule = before ? NSA_WINDOW_BEFORE_SELF : NSA_WINDOW_COUNTS_SELF;
            check_case("window %d, rule %d", windows[i], before);
            for (int t = 0; t < 100; t++) {
                int64_t keys = (int64_t)windows[i] + before, begin = t + 1 - keys;
                CHECK(nsa_window_begin(&d, t) == (begin > 0 ? begin : 0), "query %d: %d", t,
                      nsa_window_begin(&d, t));
            }
        }
}

/* Closed form and CSR against the token count, entry by entry. */
static void test_map(const block_case *c, int tokens) {
    nsa_desc d = desc_for(c, tokens);
    ref_desc r = ref_desc_of(&d, tokens);
    int N = ref_cmp_count(&r, tokens), J = ref_slc_count(&r, tokens);
    size_t entries = (size_t)nsa_block_map_size(&d, tokens), expected = 0;
    check_case("map, l %d, d %d, l' %d, T %d", c->l, c->d, c->slc_block, tokens);
    if (refused_by(&d)) {
        nsa_status refused = nsa_block_map(&d, tokens, NULL, NULL, NULL);
        CHECK(!strcmp(nsa_status_where(refused), refused_by(&d)), "blamed \"%s\"",
              nsa_status_where(refused));
        return;
    }
    for (int j = 0; j < J; j++)
        for (int i = 0; i < N; i++) expected += ref_overlap(&r, i, j) > 0;
    CHECK(entries == expected, "%zu entries, wanted %zu", entries, expected);

    guarded *indptr = guarded_new("indptr", (size_t)(J + 1) * 4, 4);
    guarded *indices = guarded_new("indices", entries * 4, 4);
    guarded *weights = guarded_new("weights", entries * sizeof(nsa_real), sizeof(nsa_real));
    guarded_open(indptr, indptr->data, indptr->bytes);
    guarded_open(indices, indices->data, indices->bytes);
    guarded_open(weights, weights->data, weights->bytes);
    guards_freeze();
    const int32_t *row = (const int32_t *)(void *)indptr->data,
                  *column = (const int32_t *)(void *)indices->data;
    const nsa_real *weight = (const nsa_real *)(void *)weights->data;
    nsa_status s =
        nsa_block_map(&d, tokens, (int32_t *)(void *)indptr->data, (int32_t *)(void *)indices->data,
                      (nsa_real *)(void *)weights->data);
    CHECK(s == NSA_OK, "%s", nsa_status_name(s));
    guards_verify("nsa_block_map");
    CHECK(row[0] == 0 && (size_t)row[J] == entries, "indptr runs %d .. %d", row[0], row[J]);
    for (int j = 0, at = 0; j < J; j++) {
        int begin = -1, end = -1, first = N, last = -1;
        for (int i = 0; i < N; i++) {
            int overlap = ref_overlap(&r, i, j);
            CHECK(nsa_block_overlap(&d, i, j) == overlap, "overlap(%d, %d) is %d, wanted %d", i, j,
                  nsa_block_overlap(&d, i, j), overlap);
            if (!overlap) continue;
            if (first == N) first = i;
            last = i;
            CHECK(at < row[j + 1] && column[at] == i && weight[at] == (nsa_real)overlap,
                  "entry %d of row %d", at, j);
            at++;
        }
        nsa_block_overlap_range(&d, tokens, j, &begin, &end);
        CHECK(last < 0 ? begin >= end : begin == first && end == last + 1,
              "range of block %d is %d .. %d, wanted %d .. %d", j, begin, end, first, last + 1);
        CHECK(row[j + 1] == at, "row %d ends at %d, wanted %d", j, row[j + 1], at);
    }
    guards_free();
}

/* Eq. 9 read 1-based: for 32/16/64 block j collects p[4j - 1 .. 4j + 3] with weights 1 2 2 2 1. */
static void test_paper_weights(void) {
    static const int weights[] = {1, 2, 2, 2, 1};
    nsa_desc d = nsa_desc_default(1, 1024, 1, 1, 16);
    check_case("the paper's weights");
    for (int j = 1; j < 10; j++)
        for (int i = -2; i < 8; i++) {
            int wanted = i >= -1 && i <= 3 ? weights[i + 1] : 0;
            CHECK(nsa_block_overlap(&d, 4 * j + i, j) == wanted,
                  "block %d, compressed %d: %d, wanted %d", j, 4 * j + i,
                  nsa_block_overlap(&d, 4 * j + i, j), wanted);
        }
}

static void test_begins(void) {
    nsa_desc d = desc_of(shape("small"));
    int32_t got[8];
    const int32_t *begins[] = {NULL, begins_four, begins_empty};
    int batch[] = {2, 4, 6};
    for (int i = 0; i < COUNT(begins); i++) {
        d.begins = begins[i], d.batch = batch[i], d.tokens = d.count = 400;
        plan p = plan_of(&d);
        memset(got, 0x55, sizeof got);
        check_case("cmp_begins %d", i);
        CHECK(nsa_cmp_begins(&d, got) == NSA_OK, "refused");
        for (int b = 0; b < batch[i]; b++)
            CHECK(got[b] == p.cmp_row[b], "sequence %d begins at %d, wanted %d", b, got[b],
                  p.cmp_row[b]);
        CHECK(got[batch[i]] == p.cmp_rows, "ends at %d, wanted %d", got[batch[i]], p.cmp_rows);
        CHECK(got[batch[i] + 1] == 0x55555555, "wrote past the end");
    }
}

/* More sequences than a warp has lanes. */
static void test_many_begins(void) {
    enum { B = 70 };
    nsa_desc d = desc_of(shape("small"));
    int32_t begins[B + 1] = {0}, got[B + 1], want = 0, wrong = -1;
    for (int b = 0; b < B; b++) begins[b + 1] = begins[b] + 5 + b % 7 * 4;
    d.batch = B, d.tokens = d.count = 40, d.begins = begins;
    check_case("cmp_begins, %d sequences", (int)B);
    CHECK(nsa_cmp_begins(&d, got) == NSA_OK, "refused");
    for (int b = 0; b <= B; b++) {
        if (got[b] != want) wrong = b;
        if (b < B) want += nsa_cmp_count(&d, begins[b + 1] - begins[b]);
    }
    CHECK(wrong < 0, "sequence %d begins elsewhere", wrong);
}

/* What a decoder reads at length S: N(S) compressed rows, the tokens of its blocks, min(w, S). */
static void test_read_counts(void) {
    nsa_desc d = nsa_desc_default(1, 1024, 1, 1, 16);
    check_case("keys read");
    for (int i = 0; i < COUNT(lengths); i++) {
        int S = lengths[i], t = S - 1;
        if (!S) continue;
        ref_desc r = ref_desc_of(&d, S);
        int cmp = 0, win = 0;
        for (int b = 0; b < ref_cmp_count(&r, S); b++) cmp += ref_cmp_sees(&r, t, b);
        for (int s = 0; s < S; s++) win += ref_win_sees(&r, t, s);
        CHECK(nsa_cmp_visible(&d, t) == cmp && t - nsa_window_begin(&d, t) + 1 == win, "S %d", S);
    }
}

typedef struct map_call {
    nsa_desc d;
    int tokens;
    int32_t *indptr, *indices;
    nsa_real *weights;
} map_call;

static nsa_status call_map(void *arguments) {
    map_call *c = (map_call *)arguments;
    return nsa_block_map(&c->d, c->tokens, c->indptr, c->indices, c->weights);
}

static nsa_status call_check(void *arguments) {
    return nsa_desc_check((nsa_desc *)arguments);
}

static nsa_status call_begins(void *arguments) {
    map_call *c = (map_call *)arguments;
    return nsa_cmp_begins(&c->d, c->indptr);
}

static void test_refusals(void) {
    nsa_desc d = desc_of(shape("small"));
    guarded *memory = guarded_new("map", 4096, 8);
    map_call c = {d, 70, (int32_t *)(void *)memory->data, (int32_t *)(void *)(memory->data + 1024),
                  (nsa_real *)(void *)(memory->data + 2048)};
    map_call good = c;
    refusal check = {"nsa_desc_check", call_check, &d, &d, 0};
    refusal map = {"nsa_block_map", call_map, &c, &c.d, 0},
            begins = {"nsa_cmp_begins", call_begins, &c, &c.d, 0};
    if (CHECKS_CUDA)
        refuse_desc_sizes(&check); /* the host's function, which takes what the kernels do not */
    else
        refuse_desc(&check);
    refuse_desc_sizes(&map);
    refuse_desc(&begins);
    c.indptr = NULL;
    refused(&map, "null", NSA_ERROR_NULL, "indptr");
    refused(&begins, "null", NSA_ERROR_NULL, "cmp_begins");
    c = good, c.indices = NULL;
    refused(&map, "null", NSA_ERROR_NULL, "indices");
    c = good, c.weights = NULL;
    refused(&map, "null", NSA_ERROR_NULL, "weights");
    c = good, c.tokens = -1;
    refused(&map, "tokens -1", NSA_ERROR_SIZE, "tokens");
    check_case("null descriptor");
    CHECK(nsa_status_kind(nsa_desc_check(NULL)) == NSA_ERROR_NULL, "accepted");
    guards_free();
}

/* Every field that a status may blame has a name, no two share one, and a gradient's says so. */
static void test_fields(void) {
    int n = 0;
    check_case("fields of statuses");
    for (const char *name; *(name = nsa_status_where(NSA_ERROR_SIZE | (n + 1) << 8)); n++) {
        const char *gradient = nsa_status_where(NSA_ERROR_SIZE | (n + 1) << 8 | 1 << 24);
        CHECK(!strncmp(gradient, "dx.", 3) && !strcmp(gradient + 3, name), "%s, its gradient %s",
              name, gradient);
        for (int other = 1; other <= n; other++)
            CHECK(strcmp(name, nsa_status_where(NSA_ERROR_SIZE | other << 8)),
                  "%d and %d are both %s", other, n + 1, name);
    }
    CHECK(!strcmp(nsa_status_where(NSA_ERROR_SIZE | n << 8), "v_cmp.b2"), "the last of %d is %s", n,
          nsa_status_where(NSA_ERROR_SIZE | n << 8));
}

/* Every kind has a name and a text, and no two share one. */
static void test_statuses(void) {
    check_case("statuses");
    CHECK(!strcmp(nsa_status_name(NSA_OK), "NSA_OK") && !*nsa_status_where(NSA_OK), "NSA_OK is %s",
          nsa_status_name(NSA_OK));
    for (int a = NSA_OK; a <= NSA_ERROR_PAGES; a++) {
        CHECK(nsa_status_kind(a) == a, "kind of %d is %d", a, nsa_status_kind(a));
        CHECK(strlen(nsa_status_text(a)) > 1, "no text for %d", a);
        for (int b = NSA_OK; b < a; b++)
            CHECK(strcmp(nsa_status_name(a), nsa_status_name(b)), "%d and %d are both %s", a, b,
                  nsa_status_name(a));
    }
    CHECK(!strcmp(nsa_status_name(NSA_ERROR_WORKSPACE), "NSA_ERROR_WORKSPACE"), "%s",
          nsa_status_name(NSA_ERROR_WORKSPACE));
    CHECK(!strcmp(nsa_status_name(NSA_ERROR_PAGES + 1), "not a status"),
          "a kind that is not tested");
    CHECK(nsa_status_name(-5) && nsa_status_text(-5) && nsa_status_where(INT_MAX),
          "null for a number that is no status");
}

/* bf16 and f16: every bit pattern, and rounding at, beside and between every pair of neighbours. */
static void test_numbers(void) {
    check_case("bf16 and f16");
    for (uint32_t u = 0; u < 65536; u++) {
        uint16_t bits = (uint16_t)u;
        double b = bf16_value(bits), h = f16_value(bits);
        if (isnan(b))
            CHECK(isnan(nsa_bf16_to_f32(bits)) &&
                      isnan(bf16_value(nsa_f32_to_bf16(nsa_bf16_to_f32(bits)))),
                  "bf16 NaN %04x", u);
        else
            CHECK((double)nsa_bf16_to_f32(bits) == b && nsa_f32_to_bf16((float)b) == bits,
                  "bf16 %04x", u);
        if (isnan(h))
            CHECK(isnan(nsa_f16_to_f32(bits)) &&
                      isnan(f16_value(nsa_f32_to_f16(nsa_f16_to_f32(bits)))),
                  "f16 NaN %04x", u);
        else
            CHECK((double)nsa_f16_to_f32(bits) == h && nsa_f32_to_f16((float)h) == bits, "f16 %04x",
                  u);
    }
    for (uint32_t i = 0; i < 400000; i++) {
        uint32_t u = (uint32_t)check_hash(3, i);
        if (i % 4 == 1) u = (u & 0xffff0000u) | 0x8000u; /* halfway between two bf16 */
        if (i % 4 == 2)
            u = (u & 0x8fffe000u) | 0x30001000u; /* near f16's range, halfway or beside */
        if (i % 4 == 3) u = (u & 0x8fffffffu) | 0x30000000u;
        float f;
        memcpy(&f, &u, 4);
        if (isnan(f)) continue;
        double b = ref_store(REF_BF16, (double)f), h = ref_store(REF_F16, (double)f);
        CHECK(nsa_f32_to_bf16(f) == bf16_bits(b), "bf16 of %a is %04x, wanted %a", (double)f,
              nsa_f32_to_bf16(f), b);
        CHECK(nsa_f32_to_f16(f) == f16_bits(h), "f16 of %a is %04x, wanted %a", (double)f,
              nsa_f32_to_f16(f), h);
    }
    for (uint32_t bit = 0; bit < 46; bit++) { /* a NaN of any one bit, of either sign */
        uint32_t u = 0x7f800000u | 1u << bit % 23 | (bit < 23 ? 0 : 0x80000000u);
        float f;
        memcpy(&f, &u, 4);
        uint16_t b = nsa_f32_to_bf16(f), h = nsa_f32_to_f16(f);
        CHECK(isnan(bf16_value(b)) && isnan(f16_value(h)), "NaN %08x: bf16 %04x, f16 %04x", u, b,
              h);
    }
}

/* The views that the header offers, against the strides written out. */
static void test_views(void) {
    float x[1];
    check_case("views");
    nsa_tensor a = nsa_tensor_bthd(x, NSA_F32, 7, 3, 5), b = nsa_tensor_bhtd(x, NSA_BF16, 7, 3, 5);
    CHECK(a.data == x && a.dtype == NSA_F32 && a.batch == 105 && a.token == 15 && a.head == 5,
          "bthd");
    CHECK(b.data == x && b.dtype == NSA_BF16 && b.batch == 105 && b.token == 5 && b.head == 35,
          "bhtd");
    a = nsa_tensor_bthd(x, NSA_F32, INT_MAX, 256, 256);
    CHECK(a.batch == (int64_t)INT_MAX * 65536, "a batch stride past 2^31");
}

int main(void) {
    for (int i = 0; i < COUNT(block_cases); i++)
        for (int k = 0; k < COUNT(lengths); k++) {
            if (lengths[k] < 1000 || i < 2) test_counts(&block_cases[i], lengths[k]);
            if (lengths[k] < 1000 || i < 2) test_map(&block_cases[i], lengths[k]);
        }
    test_window();
    test_paper_weights();
    test_begins();
    test_many_begins();
    test_read_counts();
    test_refusals();
    test_statuses();
    test_fields();
    test_numbers();
    test_views();
    return check_done("test_block_index");
}

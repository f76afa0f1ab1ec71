/* test_select_blocks.c - which blocks a query reads: scores, ranking, forced blocks, lists of
   others.
   Twin: nsa.h's "Selection". */
#include "harness/suite.h"

enum { SLOT_Q, SLOT_K, SLOT_LSE, SLOT_BLOCKS, SLOT_SCORES, SLOT_P_CMP };

/* ---- The primitive as a suite ---- */

static nsa_status select_forward(const void *x, const nsa_desc *d, void *work, size_t bytes) {
    return nsa_select_blocks((const nsa_select *)x, d, work, bytes);
}

static size_t select_size(const void *x, const nsa_desc *d) {
    (void)x;
    return nsa_select_blocks_workspace_size(d);
}

/* lse belongs to q and k: the reference's, rounded. */
static void select_lse(const suite *s, const nsa_desc *d, double **x) {
    plan p = plan_of(d);
    (void)s;
    for (int b = 0; b < p.sequences; b++) {
        ref_desc r = ref_desc_of(d, p.length[b]);
        unsigned char *mask = ref_mask_cmp(&r);
        double *zeros = ref_zeros((size_t)(p.cmp_count[b] * d->kv_heads));
        double *out = ref_zeros((size_t)(p.length[b] * d->heads));
        ref_attend a = {REF_F64,
                        p.length[b],
                        p.cmp_count[b],
                        d->heads,
                        d->kv_heads,
                        d->dim,
                        1,
                        r.scale,
                        mask,
                        x[SLOT_Q] + p.row[b] * d->heads * d->dim,
                        x[SLOT_K] + p.cmp_row[b] * d->kv_heads * d->dim,
                        zeros,
                        out,
                        x[SLOT_LSE] + p.row[b] * d->heads,
                        0};
        ref_attend_forward(&a);
        free(mask), free(zeros), free(out);
    }
    for (int i = 0; i < p.rows * d->heads; i++)
        x[SLOT_LSE][i] = ref_store(dtype_prec(NSA_REAL_DTYPE), x[SLOT_LSE][i]);
}

/* Block lists per sequence; scores may be asked for as well. */
static void select_reference(const suite *s, const nsa_desc *d, int tokens, ref_prec prec,
                             double **x, double **dx) {
    ref_desc r = ref_desc_of(d, tokens);
    int heads = list_heads_of(d);
    size_t lists = (size_t)(tokens * heads * ref_list_width(&r));
    double *scores = ref_zeros((size_t)(tokens * heads * ref_slc_count(&r, tokens)));
    int32_t *blocks = (int32_t *)check_alloc(lists * sizeof *blocks);
    (void)prec, (void)dx;
    ref_scores(&r, x[SLOT_Q], x[SLOT_K], x[SLOT_LSE], scores);
    ref_select(&r, scores, blocks);
    for (size_t i = 0; i < lists; i++) x[SLOT_BLOCKS][i] = blocks[i];
    for (int row = 0; row < tokens * heads && s->slots[SLOT_SCORES].name; row++)
        for (int j = 0, J = ref_slc_count(&r, tokens); j < s->slots[SLOT_SCORES].width; j++)
            x[SLOT_SCORES][row * s->slots[SLOT_SCORES].width + j] =
                j < ref_candidates(&r, row / heads) ? scores[row * J + j] : -INFINITY;
    for (int row = 0; row < tokens * heads && s->slots[SLOT_P_CMP].name; row++) {
        double *p_cmp = x[SLOT_P_CMP] + row * s->slots[SLOT_P_CMP].width;
        int t = row / heads, group = d->heads / heads;
        for (int i = 0; i < s->slots[SLOT_P_CMP].width; i++) p_cmp[i] = 0;
        for (int h = row % heads * group; h < (row % heads + 1) * group; h++)
            ref_p_cmp(&r, t, h, x[SLOT_Q], x[SLOT_K], x[SLOT_LSE], p_cmp);
    }
    free(scores), free(blocks);
}

static suite suite_of(const char *name, const nsa_desc *d) {
    suite s;
    memset(&s, 0, sizeof s);
    s.name = name, s.struct_size = sizeof(nsa_select);
    s.forward = select_forward, s.forward_size = select_size;
    s.reference = select_reference, s.prepare = select_lse;
    suite_add(&s, "q", offsetof(nsa_select, q), ROWS_QUERY, d->heads, d->dim);
    suite_add(&s, "k", offsetof(nsa_select, k), ROWS_CMP, d->kv_heads, d->dim);
    suite_add(&s, "lse", offsetof(nsa_select, lse), ROWS_QUERY, d->heads, 1)->dtype =
        NSA_REAL_DTYPE;
    slot *blocks = suite_add(&s, "blocks", offsetof(nsa_select, blocks), ROWS_QUERY,
                             list_heads_of(d), nsa_block_list_width(d));
    blocks->output = 1, blocks->dtype = NSA_I32;
    return s;
}

/* With the views of scores and p_cmp, whose rows are as wide as the longest sequence. */
static suite suite_with_scores(const char *name, const nsa_desc *d) {
    suite s = suite_of(name, d);
    slot *scores = suite_add(&s, "scores", offsetof(nsa_select, scores), ROWS_QUERY,
                             list_heads_of(d), nsa_slc_count(d, d->tokens));
    scores->output = scores->optional = 1, scores->dtype = NSA_REAL_DTYPE;
    slot *p_cmp = suite_add(&s, "p_cmp", offsetof(nsa_select, p_cmp), ROWS_QUERY, list_heads_of(d),
                            nsa_cmp_count(d, d->tokens));
    p_cmp->output = p_cmp->optional = 1, p_cmp->dtype = NSA_REAL_DTYPE;
    return s;
}

/* ---- Question 1: against the reference ---- */

static int in_list(const double *list, int width, int j) {
    for (int i = 0; i < width; i++)
        if (list[i] == j) return 1;
    return 0;
}

/* May `got` stand for `want`? Both have as many blocks, and a block of one that the other lacks is
   no forced one and scores within rounding of every other such block. */
static int tied_lists(const ref_desc *r, int t, const double *scores, const double *got,
                      const double *want, int width) {
    double low = INFINITY, high = -INFINITY, largest = 0;
    int more = 0, candidates = ref_candidates(r, t);
    for (int j = 0; j < candidates; j++) {
        int a = in_list(got, width, j), b = in_list(want, width, j);
        if (scores[j] > largest) largest = scores[j];
        if (a == b) continue;
        if (ref_forced(r, t, j)) return 0;
        more += a - b;
        low = fmin(low, scores[j]), high = fmax(high, scores[j]);
    }
    double roundoff = sizeof(nsa_real) == 8 ? 1.1e-16 : 6.0e-8;
    return more == 0 && high - low <= 64 * roundoff * largest;
}

/* A list as the manual promises it: ascending candidates, -1 only behind them. */
static int proper_list(const double *list, int width, int candidates) {
    for (int i = 0; i < width; i++) {
        if (list[i] == -1 ? i + 1 < width && list[i + 1] != -1
                          : list[i] < 0 || list[i] >= candidates)
            return 0;
        if (i && list[i] != -1 && list[i] <= list[i - 1]) return 0;
    }
    return 1;
}

/* Every list of a result against the reference's. */
static void compare_lists(const nsa_desc *d, const values *in, const double *got,
                          const double *want, int may_tie) {
    plan p = plan_of(d);
    int width = nsa_block_list_width(d), heads = list_heads_of(d);
    int ties = 0, lists = 0, wrong = -1, improper = -1;
    for (int b = 0; b < p.sequences; b++) {
        ref_desc r = ref_desc_of(d, p.length[b]);
        int J = ref_slc_count(&r, p.length[b]);
        double *scores = ref_zeros((size_t)(p.length[b] * heads * J));
        ref_scores(&r, in->x[SLOT_Q] + p.row[b] * d->heads * d->dim,
                   in->x[SLOT_K] + p.cmp_row[b] * d->kv_heads * d->dim,
                   in->x[SLOT_LSE] + p.row[b] * d->heads, scores);
        for (int t = d->first; t < p.length[b] && t < d->first + d->count; t++)
            for (int list = 0; list < heads; list++, lists++) {
                int row = (p.row[b] + t) * heads + list;
                const double *a = got + row * width, *c = want + row * width;
                if (!proper_list(a, width, ref_candidates(&r, t))) improper = row;
                if (!memcmp(a, c, (size_t)width * sizeof *a)) continue;
                ties++;
                if (!may_tie || !tied_lists(&r, t, scores + (t * heads + list) * J, a, c, width))
                    wrong = row;
            }
        free(scores);
    }
    CHECK(improper < 0, "list %d is not ascending candidates and -1", improper);
    CHECK(wrong < 0, "list %d has other blocks than the reference, and not for a tie", wrong);
    CHECK(ties * 50 <= lists, "%d of %d lists differ by a tie", ties, lists);
}

/* Scores are f32 sums of probabilities: rounding, whatever the dtype of q and k. */
static void compare_scores(const instance *p, const values *want, int at) {
    const tensor *x = &p->x[at];
    size_t n = tensor_count(x);
    double *got = ref_zeros(n), *w = copy_numbers(want->x[at], n), *b = copy_numbers(w, n);
    tensor_get(x, got);
    plan_zero_outside(&p->d, got, x->heads * x->width);
    check_empty_rows(got, w, b, n);
    CHECK_NEAR(p->s->slots[at].name, got, w, n, (size_t)x->width,
               allowed_error(1, w, b, n) + 1e-6 * check_norm(w, n) * (NSA_REAL_DTYPE == NSA_F32));
    free(got), free(w), free(b);
}

static void test_reference(const geometry *g, const nsa_desc *options, nsa_dtype dtype,
                           uint64_t seed) {
    for (int i = 0; i < COUNT(isas); i++) {
        nsa_desc d = *options;
        if (!nsa_isa_available(isas[i])) continue;
        d.isa = isas[i], d.threads = 1 + i % 3;
        if (i % 2) d.first = d.tokens / 3, d.count = (d.tokens + 1) / 2;
        suite s = i % 2 ? suite_of(g->name, &d) : suite_with_scores(g->name, &d);
        values in = values_random(&s, &d, dtype, seed), zeros = values_zero(&s, &d);
        values want = values_reference(&s, &d, &in, REF_F64);
        instance p;
        check_case("select, %s, %s, isa %s, forced %d, map %d, mask %d, lists %d", g->name,
                   dtype_name(dtype), nsa_isa_name(d.isa), (int)d.forced, (int)d.score_map,
                   (int)d.mask, list_heads_of(&d));
        instance_new(&p, &s, &d, &in, dtype, dtype, i, &zeros);
        instance_run(&p);
        size_t n = tensor_count(&p.x[SLOT_BLOCKS]);
        double *got = ref_zeros(n);
        tensor_get(&p.x[SLOT_BLOCKS], got);
        compare_lists(&d, &in, got, want.x[SLOT_BLOCKS], 1);
        free(got);
        if (!(i % 2)) compare_scores(&p, &want, SLOT_SCORES), compare_scores(&p, &want, SLOT_P_CMP);
        values_free(&in), values_free(&zeros), values_free(&want);
        guards_free();
    }
}

/* The paper's rule and the rules of others. */
static int set_option(nsa_desc *d, int option) {
    switch (option) {
    case 0:
        return 1;
    case 1:
        d->score_map = NSA_SCORE_OVERLAP_MAX;
        return 1;
    case 2:
        d->forced = NSA_FORCED_ON_TOP;
        return 1;
    case 3:
        d->forced = NSA_FORCED_ON_TOP, d->slc_local = 0, d->score_map = NSA_SCORE_OVERLAP_MAX;
        return 1;
    case 4:
        d->forced = NSA_FORCED_ON_TOP, d->slc_local = 0, d->slc_init = 0;
        return 1;
    case 5:
        d->slc_init = d->slc_count - d->slc_local;
        return 1; /* nothing left to score */
    case 6:
        d->mask = NSA_MASK_NONE, d->forced = NSA_FORCED_ON_TOP;
        return 1;
    case 7:
        d->list_heads = d->heads;
        return 1;
    case 8:
        d->forced = NSA_FORCED_TAIL, d->slc_local = 1;
        return 1;
    case 9:
        d->forced = NSA_FORCED_TAIL, d->slc_local = 0;
        return 1;
    case 10:
        d->mask = NSA_MASK_NONE, d->list_heads = d->heads, d->score_map = NSA_SCORE_OVERLAP_MAX;
        return 1;
    default:
        return 0;
    }
}

/* ---- Ties ---- */

/* All compressed keys alike: blocks of equal overlap are tied exactly, and the lower index wins. */
static void test_ties(const geometry *g, nsa_dtype dtype, nsa_score_map map, nsa_isa isa) {
    nsa_desc d = desc_of(g);
    d.score_map = map, d.isa = isa;
    suite s = suite_of(g->name, &d);
    if (suite_refused(&s, &d, NULL)) return;
    values v = values_random(&s, &d, dtype, 50), zeros = values_zero(&s, &d);
    plan p = plan_of(&d);
    for (size_t i = (size_t)d.dim; i < slot_count(&s.slots[SLOT_K], &p); i++)
        v.x[SLOT_K][i] = v.x[SLOT_K][i - (size_t)d.dim];
    select_lse(&s, &d, v.x);
    values want = values_reference(&s, &d, &v, REF_F64);
    instance q;
    check_case("select, %s, tied keys, map %d, isa %s", g->name, (int)map, nsa_isa_name(isa));
    instance_new(&q, &s, &d, &v, dtype, dtype, 0, &zeros);
    instance_run(&q);
    double *got = ref_zeros(tensor_count(&q.x[SLOT_BLOCKS]));
    tensor_get(&q.x[SLOT_BLOCKS], got);
    compare_lists(&d, &v, got, want.x[SLOT_BLOCKS], 0);
    free(got);
    values_free(&v), values_free(&zeros), values_free(&want);
    guards_free();
}

/* The ranking alone, over few different scores, zeros of both signs, infinities and NaN. */
static void test_rank(int trials) {
    static const double scores_of[] = {0,        -0.0,      1,   1,   2,     -1,
                                       INFINITY, -INFINITY, NAN, NAN, 1e-30, 0.5};
    for (int trial = 0; trial < trials; trial++) {
        nsa_desc d = nsa_desc_default(1, 1024, 1, 1, 16);
        uint64_t seed = 900 + (uint64_t)trial;
        d.cmp_block = d.cmp_stride = d.slc_block = 16;
        d.slc_count = 1 + check_below(20, seed, 0);
        d.forced = check_below(2, seed, 1) ? NSA_FORCED_ON_TOP : NSA_FORCED_INSIDE;
        int inside = d.forced == NSA_FORCED_INSIDE;
        d.slc_local = inside ? 1 + check_below(d.slc_count, seed, 2) : check_below(4, seed, 2);
        d.slc_init =
            inside ? check_below(d.slc_count - d.slc_local + 1, seed, 3) : check_below(4, seed, 3);
        int query = check_below(1024, seed, 4), candidates = query / 16 + 1,
            width = nsa_block_list_width(&d);
        ref_desc r = ref_desc_of(&d, 1024);
        guarded *scores =
            guarded_new("scores", (size_t)candidates * sizeof(nsa_real), sizeof(nsa_real));
        guarded *list = guarded_new("list", (size_t)width * 4, 4);
        double dense[64];
        int32_t want[64];
        for (int j = 0; j < candidates; j++) {
            dense[j] =
                scores_of[check_below(trial % 3 ? COUNT(scores_of) : 4, seed, 100 + (uint64_t)j)];
            element_put(NSA_REAL_DTYPE, scores->data + (size_t)j * sizeof(nsa_real), dense[j]);
            dense[j] = element_get(NSA_REAL_DTYPE, scores->data + (size_t)j * sizeof(nsa_real));
        }
        check_case("rank, trial %d: query %d, n %d, init %d, local %d, forced %d", trial, query,
                   d.slc_count, d.slc_init, d.slc_local, (int)d.forced);
        guarded_open(list, list->data, list->bytes);
        guards_freeze();
        nsa_status status = nsa_rank_blocks((const nsa_real *)(void *)scores->data, query, &d,
                                            (int32_t *)(void *)list->data);
        guards_verify("nsa_rank_blocks");
        CHECK_OK("nsa_rank_blocks", status);
        ref_rank(&r, query, dense, want);
        CHECK_BITS("list", list->data, want, (size_t)width * 4, 4);
        guards_free();
    }
}

static void test_rank_refusals(void) {
    nsa_desc d = nsa_desc_default(1, 1024, 1, 1, 16);
    nsa_real scores[64] = {0};
    int32_t list[16];
    nsa_status s;
    check_case("rank, refusals");
    s = nsa_rank_blocks(NULL, 5, &d, list);
    CHECK(nsa_status_kind(s) == NSA_ERROR_NULL && !strcmp(nsa_status_where(s), "scores"), "%s",
          nsa_status_where(s));
    s = nsa_rank_blocks(scores, 5, &d, NULL);
    CHECK(nsa_status_kind(s) == NSA_ERROR_NULL && !strcmp(nsa_status_where(s), "list"), "%s",
          nsa_status_where(s));
    s = nsa_rank_blocks(scores, -1, &d, list);
    CHECK(nsa_status_kind(s) != NSA_OK && !strcmp(nsa_status_where(s), "query"), "%s",
          nsa_status_where(s));
    CHECK(strstr(nsa_status_text(s), "query < tokens"), "what is allowed: %s", nsa_status_text(s));
    d.mask = NSA_MASK_NONE; /* where queries need no place among the keys */
    if (!CHECKS_CUDA) CHECK_OK("a query behind all keys", nsa_rank_blocks(scores, 1024, &d, list));
    d.mask = NSA_MASK_CAUSAL;
    s = nsa_rank_blocks(scores, 5, NULL, list);
    CHECK(nsa_status_kind(s) == NSA_ERROR_NULL, "%s", nsa_status_name(s));
    d.cmp_block = -5, d.cmp_stride = 0;
    s = nsa_rank_blocks(scores, 5, &d, list);
    CHECK(s == NSA_OK, "compressed blocks are none of it: %s", nsa_status_name(s));
}

/* ---- Values that are not finite ---- */

/* The list of equal scores: the forced blocks, and the first of the others. */
static int is_list_of_equals(const nsa_desc *d, int query, const unsigned char *list) {
    const int width = nsa_block_list_width(d);
    const size_t bytes = (size_t)nsa_slc_count(d, d->tokens) * sizeof(nsa_real);
    nsa_real *equal = (nsa_real *)check_alloc(bytes);
    int32_t *want = (int32_t *)check_alloc((size_t)width * sizeof *want);
    memset(equal, 0, bytes);
    CHECK_OK("ranking", nsa_rank_blocks(equal, query, d, want));
    const int same = !memcmp(want, list, (size_t)width * sizeof *want);
    free(equal), free(want);
    return same;
}

/* Lists stay valid and keep the forced blocks; queries that do not read the bad row keep their
   bits. A bad query has the list of equal scores. What reads a bad key has no lse either, if it is
   that of the same keys; here it has one, and its list is any. */
static void test_bad_value(const geometry *g, nsa_dtype dtype, int input, double value) {
    nsa_desc d = desc_of(g);
    suite s = suite_of(g->name, &d);
    values v = values_random(&s, &d, dtype, 60), zeros = values_zero(&s, &d);
    plan p = plan_of(&d);
    /* a late query: it has more candidates than it may read */
    int row = slot_rows_of(&s.slots[input], &p) * (input == SLOT_Q ? 5 : 2) / 6,
        heads = s.slots[input].heads, width = s.slots[input].width;
    check_case("select, %s, %s, %g in %s", g->name, dtype_name(dtype), value, s.slots[input].name);
    suite_bits clean = bits_of(&s, &d, &v, dtype, 0);
    v.x[input][(row * heads + heads - 1) * width + width / 2] = value;
    instance q;
    instance_new(&q, &s, &d, &v, dtype, dtype, 0, &zeros);
    instance_run(&q);
    nsa_block_fault fault = {-7, -7, -7, -7, -7, "nothing"};
    CHECK(nsa_check_blocks(&q.x[SLOT_BLOCKS].view, &d, &fault) == NSA_OK, "query %d: %s",
          fault.query, fault.reason);
    suite_bits bad = bits_take(&q);
    int lists = nsa_block_list_width(&d), last = d.kv_heads - 1, changed = -1, dropped = -1,
        chosen = -1;
    for (int t = 0; t < g->T; t++)
        for (int hk = 0; hk < d.kv_heads; hk++) {
            int reads = hk == last && (input == SLOT_K ? nsa_cmp_visible(&d, t) > row : t == row);
            size_t at = (size_t)(t * d.kv_heads + hk) * (size_t)lists * 4;
            if (!reads &&
                memcmp(clean.x[SLOT_BLOCKS] + at, bad.x[SLOT_BLOCKS] + at, (size_t)lists * 4))
                changed = t;
            int own = 0;
            for (int i = 0; i < lists; i++) {
                int32_t j;
                memcpy(&j, bad.x[SLOT_BLOCKS] + at + (size_t)i * 4, 4);
                own |= j == t / d.slc_block;
            }
            if (!own) dropped = t;
            if (reads && input == SLOT_Q && !is_list_of_equals(&d, t, bad.x[SLOT_BLOCKS] + at))
                chosen = t;
        }
    CHECK(changed < 0, "query %d does not read the row, yet its list changed", changed);
    CHECK(dropped < 0, "query %d lost its own block", dropped);
    CHECK(chosen < 0, "query %d reads the row, and chose by something", chosen);
    bits_free(&clean), bits_free(&bad);
    values_free(&v), values_free(&zeros);
    guards_free();
}

/* An lse that is not of these scores: p is far above 1, and no score may become NaN or negative. */
static void test_other_lse(const geometry *g, nsa_dtype dtype, nsa_isa isa) {
    nsa_desc d = desc_of(g);
    d.isa = isa;
    suite s = suite_with_scores(g->name, &d);
    values v = values_random(&s, &d, dtype, 61), zeros = values_zero(&s, &d);
    plan rows = plan_of(&d);
    for (size_t i = 0; i < slot_count(&s.slots[SLOT_LSE], &rows); i++) v.x[SLOT_LSE][i] -= 1000;
    check_case("select, %s, %s, isa %s, an lse that is smaller by 1000", g->name, dtype_name(dtype),
               nsa_isa_name(isa));
    instance q;
    instance_new(&q, &s, &d, &v, dtype, dtype, 0, &zeros);
    instance_run(&q);
    const size_t n = tensor_count(&q.x[SLOT_SCORES]), width = (size_t)q.x[SLOT_SCORES].width;
    double *scores = ref_zeros(n);
    tensor_get(&q.x[SLOT_SCORES], scores);
    size_t wrong = n;
    for (size_t i = 0; i < n; i++) {
        const int query = (int)(i / width) / q.x[SLOT_SCORES].heads, block = (int)(i % width);
        const int seen = nsa_cmp_visible(&d, query) > 0 && block == 0;
        if (block * d.slc_block > query ? scores[i] != -INFINITY : !(scores[i] >= (seen ? 1 : 0)))
            wrong = i;
    }
    CHECK(wrong == n, "score %zu is %g", wrong, scores[wrong % n]);
    free(scores);
    values_free(&v), values_free(&zeros);
    guards_free();
}

/* ---- Lists of others ---- */

/* One list of a tensor of one sequence, one head: what is wrong with it, if anything. */
static void check_list(const int32_t *list, int query, int at, const char *reason) {
    nsa_desc d = nsa_desc_default(1, 64, 1, 1, 16);
    d.cmp_block = d.cmp_stride = d.slc_block = 16, d.slc_count = 4;
    guarded *blocks = guarded_new("blocks", 64 * 4 * sizeof(int32_t), 0); /* full of -1 */
    memcpy(blocks->data + query * 4 * (int)sizeof(int32_t), list, 4 * sizeof(int32_t));
    if (reason && query < 63) /* a later list is wrong too: the first one is to be named */
        memset(blocks->data + 63 * 4 * sizeof(int32_t), 0x7f, 4 * sizeof(int32_t));
    nsa_tensor view = {blocks->data, NSA_I32, 0, 4, 4};
    nsa_block_fault fault = {-7, -7, -7, -7, -7, NULL};
    nsa_status s = nsa_check_blocks(&view, &d, &fault);
    check_case("check_blocks, query %d: %d %d %d %d", query, list[0], list[1], list[2], list[3]);
    if (!reason) {
        CHECK(s == NSA_OK, "refused: %s", fault.reason);
        guards_free();
        return;
    }
    CHECK(nsa_status_kind(s) == NSA_ERROR_BLOCKS, "%s", nsa_status_name(s));
    CHECK(nsa_check_blocks(&view, &d, NULL) == s, "another answer without a fault");
    CHECK(fault.batch == 0 && fault.query == query && fault.kv_head == 0 && fault.slot == at,
          "blamed %d %d %d %d", fault.batch, fault.query, fault.kv_head, fault.slot);
    CHECK(fault.value == list[at] && fault.reason && !strcmp(fault.reason, reason),
          "value %d, \"%s\"", fault.value, fault.reason ? fault.reason : "");
    guards_free();
}

static void test_check(void) {
    static const struct {
        int32_t list[4];
        int query, slot;
        const char *reason;
    } rows[] = {
        {{0, 1, 2, 3}, 63, 0, NULL},
        {{-1, -1, -1, -1}, 0, 0, NULL},
        {{2, -1, -1, -1}, 47, 0, NULL},
        {{3, -1, -1, -1}, 47, 0, "not a candidate of its query"},
        {{0, 4, -1, -1}, 63, 1, "not a candidate of its query"},
        {{-2, -1, -1, -1}, 63, 0, "not a candidate of its query"},
        {{INT32_MAX, -1, -1, -1}, 63, 0, "not a candidate of its query"},
        {{INT32_MIN, 0, -1, -1}, 63, 0, "not a candidate of its query"},
        {{1, 0, -1, -1}, 63, 1, "not ascending"},
        {{0, 2, 1, 3}, 63, 2, "not ascending"},
        {{0, 0, -1, -1}, 63, 1, "duplicate"},
        {{0, 1, 2, 2}, 63, 3, "duplicate"},
        {{0, -1, 2, -1}, 63, 2, "entry behind a -1"},
        {{-1, 0, 1, 2}, 63, 1, "entry behind a -1"},
    };
    for (int i = 0; i < COUNT(rows); i++)
        check_list(rows[i].list, rows[i].query, rows[i].slot, rows[i].reason);
}

/* Any lists at all become proper ones of the same candidates, in every layout, slice and packing.
   */
static void test_normalize(const geometry *g, int form) {
    nsa_desc d = desc_of(g);
    if (form % 2) d.first = d.tokens / 3, d.count = (d.tokens + 1) / 2;
    if (form % 2) d.mask = NSA_MASK_NONE;
    if (form / 2 % 2) d.list_heads = d.heads;
    plan p = plan_of(&d);
    int width = nsa_block_list_width(&d), heads = list_heads_of(&d);
    tensor x = tensor_of("blocks", (layout)form, NSA_I32, &d, 0, heads, width, 1);
    int32_t *lists = (int32_t *)check_alloc((size_t)(p.rows * heads * width) * 4);
    for (int i = 0; i < p.rows * heads * width; i++) {
        int kind = check_below(10, 70, (uint64_t)i);
        lists[i] = kind == 0   ? INT32_MIN
                   : kind == 1 ? INT32_MAX
                   : kind == 2 ? -1
                               : check_below(8, 71, (uint64_t)i);
    }
    tensor_put_i32(&x, lists);
    nsa_tensor view = view_from(x.view, 0, d.first, 0);
    check_case("normalize, %s, layout %d", g->name, form);
    tensor_open_slice(&x, &d);
    guards_freeze();
    nsa_status status = nsa_normalize_blocks(&view, &d);
    guards_verify("nsa_normalize_blocks");
    CHECK_OK("nsa_normalize_blocks", status);
    CHECK(nsa_check_blocks(&view, &d, NULL) == NSA_OK, "not proper");
    for (int b = 0; b < p.sequences; b++) {
        ref_desc of_sequence = ref_desc_of(&d, p.length[b]);
        for (int t = d.first; t < p.length[b] && t < d.first + d.count; t++)
            for (int row = (p.row[b] + t) * heads; row < (p.row[b] + t + 1) * heads; row++) {
                int next = 0, same = 1, r = row / heads, hk = row % heads;
                int32_t got;
                for (int j = 0; j < ref_candidates(&of_sequence, t); j++) {
                    int held = 0;
                    for (int i = 0; i < width; i++) held |= lists[row * width + i] == j;
                    if (!held) continue;
                    memcpy(&got,
                           d.begins ? tensor_at(&x, 0, r, hk, next) : tensor_at(&x, b, t, hk, next),
                           4);
                    same &= got == j;
                    next++;
                }
                for (; next < width; next++) {
                    memcpy(&got,
                           d.begins ? tensor_at(&x, 0, r, hk, next) : tensor_at(&x, b, t, hk, next),
                           4);
                    same &= got == -1;
                }
                if (!same) CHECK(0, "sequence %d, query %d", b, t);
            }
    }
    free(lists);
    guards_free();
}

static void test_list_refusals(void) {
    nsa_desc d = desc_of(shape("small"));
    tensor x =
        tensor_of("blocks", LAYOUT_BTHD, NSA_I32, &d, 0, d.kv_heads, nsa_block_list_width(&d), 0);
    nsa_tensor bad = x.view;
    nsa_status s;
    check_case("lists, refusals");
    guards_freeze();
    s = nsa_check_blocks(NULL, &d, NULL);
    CHECK(nsa_status_kind(s) == NSA_ERROR_NULL, "%s", nsa_status_name(s));
    s = nsa_normalize_blocks(NULL, &d);
    CHECK(nsa_status_kind(s) == NSA_ERROR_NULL, "%s", nsa_status_name(s));
    bad.data = NULL;
    CHECK(nsa_status_kind(nsa_check_blocks(&bad, &d, NULL)) == NSA_ERROR_NULL, "null data");
    bad = x.view, bad.dtype = NSA_F32;
    CHECK(nsa_status_kind(nsa_normalize_blocks(&bad, &d)) == NSA_ERROR_DTYPE, "f32 blocks");
    bad = x.view, bad.token = 0;
    CHECK(nsa_status_kind(nsa_normalize_blocks(&bad, &d)) == NSA_ERROR_STRIDE, "rows at one place");
    bad = x.view, bad.data = (unsigned char *)bad.data + 2;
    CHECK(nsa_status_kind(nsa_check_blocks(&bad, &d, NULL)) == NSA_ERROR_ALIGNMENT, "misaligned");
    guards_verify("refused lists");
    guards_close();
    check_case("lists, fields without use");
    tensor_no_blocks(&x);
    d.cmp_block = -5, d.cmp_stride = 0, d.slc_init = INT_MAX, d.slc_local = -7;
    CHECK_OK("the check", nsa_check_blocks(&x.view, &d, NULL));
    CHECK_OK("the normaliser", nsa_normalize_blocks(&x.view, &d));
    guards_free();
}

/* The width of a list by its definition. */
static void test_width(void) {
    nsa_desc d = desc_of(shape("G 6, D 80"));
    check_case("list width");
    CHECK(nsa_block_list_width(&d) == 5, "%d", nsa_block_list_width(&d));
    d.forced = NSA_FORCED_ON_TOP;
    CHECK(nsa_block_list_width(&d) == 8, "%d", nsa_block_list_width(&d));
}

/* More tiles of keys than any kernel has in flight, by short lists and by lists that no warp has
   lanes for; more lists than shared memory holds. */
static void test_many_tiles(int least) {
    geometry g = *shape("G 12, D 96");
    g.name = "many tiles of keys", g.T = 262, g.H = 9, g.Dk = g.Dv = 16, g.l = 2, g.d = 1,
    g.slc_block = 4;
    for (int n = 6; n <= (least ? 6 : 40); n += 34) {
        g.n = n;
        nsa_desc d = desc_of(&g);
        test_reference(&g, &d, NSA_BF16, 901);
    }
    g.n = 6, g.Dk = 136; /* of sm_90a's stages shared memory holds one less */
    nsa_desc wide = desc_of(&g);
    if (!least && !refused_by(&wide)) test_reference(&g, &wide, NSA_BF16, 904);
    g.Dk = 16;
    if (!least) test_ties(&g, NSA_BF16, NSA_SCORE_OVERLAP_SUM, NSA_ISA_DETECT);
    g = *shape("tokens for blocks");
    g.name = "most of the tokens chosen", g.H = 4, g.n = 100;
    nsa_desc d = desc_of(&g);
    test_reference(&g, &d, NSA_BF16, 902);
}

/* Forward and decoding rank by the same bits, so every kernel adds up the heads of a group in one
   order: over bit 0 of their numbers, bit 3, bit 2, bit 1. A head's own p is the score if no other
   head counts. */
static void test_order_of_heads(int group, nsa_dtype dtype) {
    enum { MOST = 16 };
    static const int order[] = {1, 8, 4, 2};
    geometry g = *shape("small");
    g.name = "the order of heads", g.B = 1, g.T = 40, g.H = group, g.Hk = 1;
    g.l = g.d = g.slc_block = 4;
    nsa_desc d = desc_of(&g);
    suite s = suite_with_scores(g.name, &d);
    values v = values_random(&s, &d, dtype, 903), zeros = values_zero(&s, &d);
    double *lse = copy_numbers(v.x[SLOT_LSE], (size_t)(g.T * group)), *scores[MOST + 1];
    check_case("select, the order of %d heads, %s", group, dtype_name(dtype));
    for (int head = 0; head <= group; head++) {
        instance p;
        for (int i = 0; i < g.T * group; i++)
            v.x[SLOT_LSE][i] = head == group || i % group == head ? lse[i] : 1000;
        instance_new(&p, &s, &d, &v, dtype, dtype, 0, &zeros);
        instance_run(&p);
        scores[head] = ref_zeros(tensor_count(&p.x[SLOT_SCORES]));
        tensor_get(&p.x[SLOT_SCORES], scores[head]);
        guards_free();
    }
    int wrong = -1, blocks = nsa_slc_count(&d, d.tokens);
    for (int i = 0; i < g.T * blocks; i++) {
        float sums[MOST] = {0};
        for (int head = 0; head < group; head++) sums[head] = (float)scores[head][i];
        for (int k = 0; k < COUNT(order); k++)
            for (int head = 0; head < MOST; head++)
                if (!(head & order[k])) sums[head] += sums[head | order[k]];
        if (scores[group][i] != (double)sums[0]) wrong = i;
    }
    CHECK(wrong < 0, "row %d, block %d: %.9g", wrong / blocks, wrong % blocks,
          wrong < 0 ? 0 : scores[group][wrong]);
    for (int head = 0; head <= group; head++) free(scores[head]);
    free(lse);
    values_free(&v), values_free(&zeros);
}

int main(int argc, char **argv) {
    amount a = asked_amount(argc, argv);
    int quick = a != WHOLE, turn = 0;
    for (int i = 0; i < COUNT(geometries); i++) {
        const geometry *g = &geometries[i];
        nsa_desc whole = desc_of(g);
        suite taken = suite_of(g->name, &whole);
        if (!is_taken(i, a) || (a == LEAST && i) || suite_refused(&taken, &whole, NULL)) continue;
        for (int k = 0; k < COUNT(dtypes); k++) {
            nsa_desc d = desc_of(g);
            for (int option = 0; set_option(&d, option); d = desc_of(g), option++)
                if (option == 0 || i < 2 || (option < 6 && (option + turn + k) % 5 == 0))
                    test_reference(g, &d, dtypes[k], (uint64_t)(10 * i + k));
            if ((turn + k) % COUNT(dtypes) || asks_little(g, quick))
                continue; /* these in one dtype a geometry */
            set_option(&d, i % 5);
            suite s = suite_of(g->name, &d);
            suite_bit_tests(&s, &d, dtypes[k]);
            static const double bad[] = {NAN, INFINITY, -INFINITY};
            d = desc_of(g);
            for (int b = 0; b < COUNT(bad) && d.batch == 1 && !d.begins && nsa_cmp_count(&d, g->T);
                 b++) {
                test_bad_value(g, dtypes[k], SLOT_Q, bad[b]);
                test_bad_value(g, dtypes[k], SLOT_K, bad[b]);
            }
        }
        for (int form = 0; form < LAYOUTS; form++) test_normalize(g, form);
        turn++;
    }
    for (int i = 0; i < (CHECKS_CUDA ? 1 : COUNT(isas)); i++)
        for (int map = 0; map < 2 && nsa_isa_available(isas[i]); map++) {
            test_ties(shape("T > w, one block more"), NSA_REAL_DTYPE, (nsa_score_map)map, isas[i]);
            if (a == LEAST) continue;
            test_ties(shape("one head, l' far above l"), NSA_REAL_DTYPE, (nsa_score_map)map,
                      isas[i]); /* three tiles of keys */
            test_ties(shape("G 16, D 128"), NSA_REAL_DTYPE, (nsa_score_map)map, isas[i]);
            test_ties(shape("the paper's blocks"), NSA_REAL_DTYPE, (nsa_score_map)map, isas[i]);
        }
    geometry rows = *shape("G 2, D 24"); /* the bad head is the last of four */
    rows.name = "many blocks for a bad row", rows.B = 1, rows.T = 150, rows.H = 8;
    rows.l = rows.d = rows.slc_block = 1, rows.n = 40;
    /* the least asks what memory is read, which bad values and another lse do not change */
    for (int k = 0; a != LEAST && k < COUNT(dtypes); k++)
        test_bad_value(&rows, dtypes[k], SLOT_Q, INFINITY);
    geometry cut = *shape("one head, l' far above l");
    cut.name = "many chosen of blocks behind several tiles of keys", cut.slc_block = 16, cut.n = 6;
    nsa_desc of_many = desc_of(&cut);
    for (int k = a == LEAST; k < (a == LEAST ? 2 : COUNT(dtypes)); k++)
        test_reference(&cut, &of_many, dtypes[k], 900);
    if (CHECKS_CUDA) test_many_tiles(a == LEAST);
    for (int group = 1; CHECKS_CUDA && a != LEAST && group <= 16; group += group < 4 ? 1 : 4)
        for (int k = 0; k < COUNT(dtypes); k++) test_order_of_heads(group, dtypes[k]);
    for (int i = 0; i < (a == LEAST ? 0 : CHECKS_CUDA ? 1 : COUNT(isas)); i++)
        for (int k = 0; k < COUNT(dtypes) && nsa_isa_available(isas[i]); k++) {
            test_other_lse(shape("T > w, one block more"), dtypes[k], isas[i]);
            test_other_lse(shape("G 3, D 64"), dtypes[k], isas[i]); /* a row of four has no head */
        }
    test_rank(!CHECKS_CUDA ? 3000 : a == LEAST ? 150 : 600); /* under the executor a launch each */
    test_rank_refusals();
    test_check();
    test_list_refusals();
    test_width();
    nsa_desc d = desc_of(shape("small"));
    d.mask = NSA_MASK_NONE, d.forced = NSA_FORCED_ON_TOP;
    suite shown = suite_with_scores("scores, not causal", &d); /* blocks behind the slice too */
    suite_slices(&shown, &d, NSA_REAL_DTYPE);
    d = desc_of(shape("small"));
    suite s = suite_of("refusals", &d);
    suite_refusals(&s, &d);
    return check_done("test_select_blocks");
}

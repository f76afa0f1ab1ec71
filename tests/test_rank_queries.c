/* test_rank_queries.c - lists of the best blocks for every query at once, from any scores.
   Twin: nsa.h's "Selection", nsa_rank_queries. */
#include "harness/suite.h"

enum { SLOT_SCORES, SLOT_BLOCKS };

static nsa_status rank_forward(const void *x, const nsa_desc *d, void *work, size_t bytes) {
    return nsa_rank_queries((const nsa_rank *)x, d, work, bytes);
}

static size_t rank_size(const void *x, const nsa_desc *d) {
    (void)x;
    return nsa_rank_queries_workspace_size(d);
}

/* Few different numbers, so that many scores are equal; zeros of both signs, infinities, NaN. */
static void few_scores(const suite *s, const nsa_desc *d, double **x) {
    static const double scores[] = {0, -0.0, 1, 1, 2, -1, -3, INFINITY, -INFINITY, NAN, NAN, 0.5};
    plan p = plan_of(d);
    for (size_t i = 0; i < slot_count(&s->slots[SLOT_SCORES], &p); i++)
        x[SLOT_SCORES][i] =
            check_below(3, 70, i) ? x[SLOT_SCORES][i] : scores[check_below(COUNT(scores), 71, i)];
}

static void rank_reference(const suite *s, const nsa_desc *d, int tokens, ref_prec prec, double **x,
                           double **dx) {
    ref_desc r = ref_desc_of(d, tokens);
    int width = ref_list_width(&r), row_width = s->slots[SLOT_SCORES].width;
    int32_t *list = (int32_t *)check_alloc((size_t)width * sizeof *list);
    (void)prec, (void)dx;
    for (int row = 0; row < tokens * list_heads_of(d); row++) {
        ref_rank(&r, row / list_heads_of(d), x[SLOT_SCORES] + row * row_width, list);
        for (int i = 0; i < width; i++) x[SLOT_BLOCKS][row * width + i] = list[i];
    }
    free(list);
}

static suite suite_of(const char *name, const nsa_desc *d) {
    suite s;
    memset(&s, 0, sizeof s);
    s.name = name, s.struct_size = sizeof(nsa_rank);
    s.forward = rank_forward, s.forward_size = rank_size;
    s.reference = rank_reference, s.prepare = few_scores;
    suite_add(&s, "scores", offsetof(nsa_rank, scores), ROWS_QUERY, list_heads_of(d),
              nsa_slc_count(d, d->tokens));
    slot *blocks = suite_add(&s, "blocks", offsetof(nsa_rank, blocks), ROWS_QUERY, list_heads_of(d),
                             nsa_block_list_width(d));
    blocks->output = 1, blocks->dtype = NSA_I32;
    return s;
}

/* Equal lists: equal scores leave no choice, so nothing may differ. */
static void test_reference(const char *name, const nsa_desc *options, nsa_dtype dtype,
                           uint64_t seed) {
    for (int i = 0; i < COUNT(isas); i++) {
        nsa_desc d = *options;
        if (!nsa_isa_available(isas[i])) continue;
        d.isa = isas[i], d.threads = 1 + i % 3;
        if (i % 2 && d.count == d.tokens) d.first = d.tokens / 3, d.count = (d.tokens + 1) / 2;
        suite s = suite_of(name, &d);
        values in = values_random(&s, &d, dtype, seed), zeros = values_zero(&s, &d);
        values want = values_reference(&s, &d, &in, REF_F64);
        instance p;
        check_case("rank, %s, %s, isa %s, forced %d, mask %d, rows %d + %d", name,
                   dtype_name(dtype), nsa_isa_name(d.isa), (int)d.forced, (int)d.mask, d.first,
                   d.count);
        instance_new(&p, &s, &d, &in, dtype, dtype, i, &zeros);
        instance_run(&p);
        size_t n = tensor_count(&p.x[SLOT_BLOCKS]);
        double *got = ref_zeros(n);
        tensor_get(&p.x[SLOT_BLOCKS], got);
        plan_zero_outside(&d, got, list_heads_of(&d) * nsa_block_list_width(&d));
        CHECK_BITS("lists", got, want.x[SLOT_BLOCKS], n * sizeof *got, sizeof *got);
        free(got);
        values_free(&in), values_free(&zeros), values_free(&want);
        guards_free();
    }
}

/* Single tokens for blocks, long lists: what a learned scorer hands over. */
static void test_long_lists(int least) {
    /* more than a block of threads of CUDA's looks at in one turn */
    nsa_desc d = nsa_desc_default(1, CHECKS_CUDA ? 320 : 700, 2, 1, 16);
    d.cmp_block = d.cmp_stride = d.slc_block = 1;
    d.slc_count = 200, d.slc_init = 0, d.slc_local = 1;
    if (CHECKS_CUDA) d.count = least ? 6 : 30, d.first = 320 - d.count; /* the executor is slow */
    for (int k = 0; k < (CHECKS_CUDA ? 1 : COUNT(dtypes)); k++)
        test_reference("tokens as blocks", &d, dtypes[k], 80 + (uint64_t)k);
    d.forced = NSA_FORCED_ON_TOP, d.slc_local = 0;
    test_reference("tokens as blocks, none forced", &d, NSA_F32, 90);
}

int main(int argc, char **argv) {
    amount a = asked_amount(argc, argv);
    for (int i = 0; i < COUNT(geometries); i++) {
        nsa_desc d = desc_of(&geometries[i]);
        const char *name = geometries[i].name;
        suite s = suite_of(name, &d);
        if (!is_taken(i, a) || (a == LEAST && i) || suite_refused(&s, &d, NULL)) continue;
        for (int k = 0; k < COUNT(dtypes); k++) {
            int its_turn =
                (i + k) % COUNT(dtypes) == 0; /* one dtype a geometry; the executor is slow */
            if (its_turn || !CHECKS_CUDA)
                test_reference(name, &d, dtypes[k], (uint64_t)(10 * i + k));
            if (its_turn) suite_bit_tests(&s, &d, dtypes[k]);
        }
        d.forced = NSA_FORCED_ON_TOP, d.slc_local = 0;
        test_reference(name, &d, NSA_REAL_DTYPE, (uint64_t)(10 * i + 9));
        d.forced = NSA_FORCED_TAIL, d.slc_local = i % 2;
        test_reference(name, &d, NSA_REAL_DTYPE, (uint64_t)(10 * i + 7));
        d.mask = NSA_MASK_NONE, d.list_heads = d.heads;
        if (a != LEAST) test_reference(name, &d, NSA_REAL_DTYPE, (uint64_t)(10 * i + 8));
    }
    test_long_lists(a == LEAST);
    nsa_desc d = desc_of(shape("small"));
    suite s = suite_of("refusals", &d);
    s.unused = UNUSED_CMP;
    suite_refusals(&s, &d);
    return check_done("test_rank_queries");
}

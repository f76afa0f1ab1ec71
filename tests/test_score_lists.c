/* test_score_lists.c - scores of given block lists, and their gradient: what trains an indexer.
   Twin: nsa.h's "Scores of given lists". Not here: how lists are made (test_score_blocks.c). */
#include "harness/suite.h"

typedef struct list_case {
    const char *shape;
    nsa_score_act act;
    nsa_score_pool pool;
    int weights, stride;
    int block, count; /* 0: the shape's */
    int list_heads;
    nsa_forced forced;
    nsa_mask mask;
} list_case;

static const list_case list_cases[] = {
    {.shape = "small", .act = NSA_SCORE_RELU, .weights = 1},
    {.shape = "small", .pool = NSA_POOL_MEAN},
    {.shape = "small", .act = NSA_SCORE_RELU, .weights = 1, .block = 1, .count = 9},
    {.shape = "G 2, D 24", .weights = 1, .block = 16, .list_heads = 1},
    {.shape = "G 6, D 80", .act = NSA_SCORE_RELU, .pool = NSA_POOL_MEAN, .weights = 1},
    {.shape = "G 6, D 80",
     .act = NSA_SCORE_RELU,
     .weights = 1,
     .stride = 16,
     .block = 16,
     .count = 4,
     .forced = NSA_FORCED_TAIL},
    {.shape = "T > w, one block more", .act = NSA_SCORE_RELU, .weights = 1},
    {.shape = "G 2, D 24", .pool = NSA_POOL_MEAN, .stride = 8, .block = 32, .count = 3},
    {.shape = "varlen four", .weights = 1, .stride = 4, .block = 16, .count = 3},
    {.shape = "varlen four", .act = NSA_SCORE_RELU, .pool = NSA_POOL_MEAN, .weights = 1},
    {.shape = "varlen empty", .act = NSA_SCORE_RELU, .block = 1, .count = 20},
    {.shape = "small", .act = NSA_SCORE_RELU, .weights = 1, .list_heads = 1, .mask = NSA_MASK_NONE},
    {.shape = "D 1 / 3", .act = NSA_SCORE_RELU, .weights = 1},
    {.shape = "few of many", .act = NSA_SCORE_RELU, .weights = 1, .count = 2},
};

enum { SLOT_Q, SLOT_K, SLOT_BLOCKS, SLOT_SCORES, SLOT_WEIGHTS };

static nsa_status list_forward(const void *x, const nsa_desc *d, void *work, size_t bytes) {
    return nsa_score_blocks_forward((const nsa_score *)x, d, work, bytes);
}
static nsa_status list_backward(const void *dx, const void *x, const nsa_desc *d, void *work,
                                size_t bytes) {
    return nsa_score_blocks_backward((const nsa_score *)dx, (const nsa_score *)x, d, work, bytes);
}
static size_t list_size(const void *x, const nsa_desc *d) {
    (void)x;
    return nsa_score_blocks_forward_workspace_size(d);
}
static size_t list_backward_size(const void *dx, const void *x, const nsa_desc *d) {
    (void)dx, (void)x;
    return nsa_score_blocks_backward_workspace_size(d);
}

static void list_configure(const suite *s, void *x) {
    const list_case *c = (const list_case *)s->options;
    ((nsa_score *)x)->act = c->act, ((nsa_score *)x)->pool = c->pool;
    ((nsa_score *)x)->stride = c->stride;
}

/* Lists of some candidates, some full, some short, some empty. */
static void list_prepare(const suite *s, const nsa_desc *d, double **x) {
    plan p = plan_of(d);
    int width = nsa_block_list_width(d), heads = list_heads_of(d);
    (void)s;
    for (int b = 0; b < p.sequences; b++) {
        ref_desc r = ref_desc_of(d, p.length[b]);
        for (int row = 0; row < p.length[b] * heads; row++) {
            int candidates = ref_candidates(&r, row / heads), n = 0;
            double *list = x[SLOT_BLOCKS] + (p.row[b] * heads + row) * width;
            double share = row % 7 == 3 ? 0 : row % 3 ? 1.5 * width / (candidates + 1) : 1;
            for (int j = 0; j < candidates && n < width; j++)
                if (fabs(check_normal(77, (size_t)(row * 1000 + j))) < 1.3 * share) list[n++] = j;
            while (n < width) list[n++] = -1;
        }
    }
}

static void list_reference(const suite *s, const nsa_desc *d, int tokens, ref_prec prec, double **x,
                           double **dx) {
    const list_case *c = (const list_case *)s->options;
    ref_desc r = ref_desc_of(d, tokens);
    ref_scorer scorer = {prec,
                         c->act == NSA_SCORE_RELU,
                         c->pool == NSA_POOL_MEAN,
                         x[SLOT_Q],
                         x[SLOT_K],
                         c->weights ? x[SLOT_WEIGHTS] : NULL,
                         c->stride ? c->stride : 1};
    ref_lists lists = {
        .width = nsa_block_list_width(d), .blocks = x[SLOT_BLOCKS], .listed = x[SLOT_SCORES]};
    if (dx) {
        lists.dlisted = dx[SLOT_SCORES], lists.dq = dx[SLOT_Q], lists.dk = dx[SLOT_K];
        lists.dweights = c->weights ? dx[SLOT_WEIGHTS] : NULL;
    }
    ref_listed_scores(&r, &scorer, &lists);
}

/* A block without keys has no score; in a sum of all it counts as 0. */
static void list_held_forward(instance *p) {
    tensor *scores = &p->x[SLOT_SCORES];
    size_t n = tensor_count(scores);
    double *x = ref_zeros(n);
    CHECK_OK("forward", instance_forward(p));
    tensor_get(scores, x);
    for (size_t i = 0; i < n; i++)
        if (isinf(x[i])) x[i] = 0;
    tensor_put(scores, x);
    free(x);
}

static nsa_desc desc_for(const list_case *c) {
    nsa_desc d = desc_of(shape(c->shape));
    if (c->stride) d.cmp_block = d.cmp_stride = c->stride; /* by which the suite counts rows of k */
    if (c->block) d.slc_block = c->block;
    if (c->block && !c->stride) d.cmp_block = d.cmp_stride = 1;
    if (c->count) d.slc_count = c->count, d.slc_init = 0, d.slc_local = 1;
    if (c->list_heads) d.list_heads = d.heads;
    d.forced = c->forced, d.mask = c->mask;
    return d;
}

static suite suite_of(const list_case *c, const nsa_desc *d) {
    suite s;
    memset(&s, 0, sizeof s);
    s.name = c->shape, s.struct_size = sizeof(nsa_score), s.options = c;
    s.forward = list_forward, s.backward = list_backward;
    s.forward_size = list_size, s.backward_size = list_backward_size;
    s.configure = list_configure, s.reference = list_reference, s.prepare = list_prepare;
    s.held_forward = list_held_forward;
    suite_add(&s, "q", offsetof(nsa_score, q), ROWS_QUERY, d->heads, d->dim)->gradient = 1;
    suite_add(&s, "k", offsetof(nsa_score, k), c->stride ? ROWS_CMP : ROWS_KEY, d->kv_heads, d->dim)
        ->gradient = 1;
    suite_add(&s, "blocks", offsetof(nsa_score, blocks), ROWS_QUERY, list_heads_of(d),
              nsa_block_list_width(d))
        ->dtype = NSA_I32;
    slot *scores = suite_add(&s, "scores", offsetof(nsa_score, scores), ROWS_QUERY,
                             list_heads_of(d), nsa_block_list_width(d));
    scores->output = scores->gradient = 1, scores->dtype = NSA_REAL_DTYPE;
    if (!c->weights) return s;
    slot *weights = suite_add(&s, "weights", offsetof(nsa_score, weights), ROWS_QUERY, d->heads, 1);
    weights->gradient = weights->optional = 1;
    return s;
}

#ifdef CHECK_F64
/* Every head, pool and stride by finite differences. */
static void test_gradients(void) {
    static const char *const shapes[] = {"grad, G 2", "grad, varlen", "grad, G 3, overlap 4"};
    for (int i = 0; i < 16; i++) {
        const list_case c = {.shape = shapes[i % COUNT(shapes)],
                             .act = (nsa_score_act)(i & 1),
                             .pool = (nsa_score_pool)(i >> 1 & 1),
                             .weights = i >> 2 & 1,
                             .stride = i >> 3 & 1 ? 2 : 0,
                             .block = 4,
                             .count = 3,
                             .forced = i >> 3 & 1 ? NSA_FORCED_TAIL : NSA_FORCED_INSIDE};
        nsa_desc d = desc_for(&c);
        suite s = suite_of(&c, &d);
        suite_gradcheck(&s, &d);
    }
}
#endif

/* With some gradients alone the others keep their bits. */
static void test_alone(const list_case *c, nsa_dtype dtype) {
    static const int slots[] = {SLOT_Q, SLOT_K, SLOT_WEIGHTS};
    nsa_desc d = desc_for(c);
    suite s = suite_of(c, &d);
    values v = values_random(&s, &d, dtype, 30), zeros = values_zero(&s, &d);
    suite_bits all = bits_of(&s, &d, &v, dtype, 0);
    for (int i = 0; i < COUNT(slots); i++) {
        instance p;
        check_case("lists, %s, the gradient of %s alone", c->shape, s.slots[slots[i]].name);
        instance_new(&p, &s, &d, &v, dtype, dtype, 0, &zeros);
        for (int k = 0; k < COUNT(slots); k++)
            if (k != i) slot_view(&s.slots[slots[k]], instance_dx(&p))->data = NULL;
        instance_run(&p);
        suite_bits one = bits_take(&p);
        plan rows = plan_of(&d);
        same_rows(&s, slots[i], &one, 0, &all, 0, slot_rows_of(&s.slots[slots[i]], &rows), dtype);
        bits_free(&one);
        guards_free();
    }
    bits_free(&all), values_free(&v), values_free(&zeros);
}

static nsa_status call_list_forward(void *arguments) {
    return call_suite_forward((suite_call *)arguments);
}
static nsa_status call_list_backward(void *arguments) {
    return call_suite_backward((suite_call *)arguments);
}

/* The lists that nsa_score_blocks makes have the scores that it chose them by, to the bit where no
   tile rounds otherwise: here to a rounding. */
static void test_own_lists(const list_case *c) {
    nsa_desc d = desc_for(c);
    suite s = suite_of(c, &d);
    values v = values_random(&s, &d, NSA_REAL_DTYPE, 35), zeros = values_zero(&s, &d);
    instance p;
    int J = nsa_slc_count(&d, d.tokens), width = nsa_block_list_width(&d),
        heads = list_heads_of(&d);
    tensor all = tensor_new("all", 0, NSA_REAL_DTYPE, d.batch, d.tokens, heads, J, 0);
    check_case("lists, %s, its own", c->shape);
    instance_new(&p, &s, &d, &v, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, &zeros);
    nsa_score *x = (nsa_score *)instance_x(&p), score = *x;
    score.scores = all.view;
    size_t bytes = nsa_score_blocks_workspace_size(&d);
    guarded *w = workspace_new(bytes, 1);
    tensor_open(&all), tensor_open(&p.x[SLOT_BLOCKS]);
    CHECK_OK("nsa_score_blocks", nsa_score_blocks(&score, &d, w->data, bytes));
    guards_close();
    CHECK_OK("forward", instance_forward(&p));
    double *of_all = ref_zeros(tensor_count(&all)),
           *listed = ref_zeros(tensor_count(&p.x[SLOT_SCORES]));
    double *lists = ref_zeros(tensor_count(&p.x[SLOT_BLOCKS])), worst = 0;
    tensor_get(&all, of_all), tensor_get(&p.x[SLOT_SCORES], listed);
    tensor_get(&p.x[SLOT_BLOCKS], lists);
    for (int row = 0; row < d.batch * d.tokens * heads; row++)
        for (int i = 0; i < width; i++) {
            double j = lists[row * width + i], got = listed[row * width + i];
            double want = j < 0 ? -INFINITY : of_all[row * J + (int)j];
            if (got != want && !(fabs(got - want) < worst)) worst = fabs(got - want);
        }
    CHECK(worst < 1e-4, "scores of the lists are others: %.3g", worst);
    free(of_all), free(listed), free(lists), values_free(&v), values_free(&zeros);
    guards_free();
}

/* Numbers that a device finds. */
static nsa_real *reals(size_t n, uint64_t seed) {
    guarded *g = guarded_new("numbers", n * sizeof(nsa_real), sizeof(nsa_real) * 4);
    guarded_open(g, g->data, g->bytes);
    for (size_t i = 0; i < n; i++)
        ((nsa_real *)(void *)g->data)[i] = seed ? (nsa_real)check_normal(seed, i) : 0;
    return (nsa_real *)(void *)g->data;
}

/* Sequences at positions of their own: two, 5 queries from the 9th on and 7 from the 20th on of 32
   keys, have the bits of each alone. */
static void test_positions(void) {
    enum { T = 32, H = 4, HK = 2, D = 16, BLOCK = 4, WIDTH = 3, ROWS = 12 };
    static const int32_t firsts[] = {9, 20}, counts[] = {5, 7};
    nsa_real *q = reals(ROWS * H * D, 1), *k = reals(2 * T * HK * D, 2), *w = reals(ROWS * H, 3);
    nsa_real *ds = reals(ROWS * HK * WIDTH, 4), *out[2], *dq[2], *dk[2], *dw[2];
    guarded *g = guarded_new("lists", ROWS * HK * WIDTH * 4, 4);
    int32_t *lists = (int32_t *)(void *)g->data;
    guarded_open(g, g->data, g->bytes);
    for (int i = 0; i < ROWS * HK; i++)
        for (int e = 0; e < WIDTH; e++) lists[i * WIDTH + e] = e + i % 2 < WIDTH ? e + i % 2 : -1;
    check_case("lists, positions of their own");
    for (int way = 0; way < 2; way++) { /* together, each alone */
        out[way] = reals(ROWS * HK * WIDTH, 0), dq[way] = reals(ROWS * H * D, 0);
        dk[way] = reals(2 * T * HK * D, 0), dw[way] = reals(ROWS * H, 0);
        for (int b = 0, row = 0; b < 1 + way; row += counts[b], b++) {
            nsa_desc d = nsa_desc_default(2 - way, T, H, HK, D);
            size_t keys = (size_t)(b * T * HK * D);
            d.cmp_block = d.cmp_stride = 1, d.slc_block = BLOCK, d.slc_count = WIDTH;
            d.count = 7;
            if (way)
                d.first = firsts[b], d.count = counts[b], d.tokens = firsts[b] + counts[b];
            else
                d.firsts = firsts, d.counts = counts, d.rows = 9 + 5 + 20 + 7;
            nsa_score x = {NSA_SCORE_RELU, NSA_POOL_MAX, {0}, {0}, {0}, {0}, {0}, 0}, dx = x;
            x.q = nsa_tensor_bthd(q + row * H * D, NSA_REAL_DTYPE, ROWS, H, D);
            x.k = nsa_tensor_bthd(k + keys, NSA_REAL_DTYPE, T, HK, D);
            x.weights = nsa_tensor_bthd(w + row * H, NSA_REAL_DTYPE, ROWS, H, 1);
            x.blocks = nsa_tensor_bthd(lists + row * HK * WIDTH, NSA_I32, ROWS, HK, WIDTH);
            x.scores =
                nsa_tensor_bthd(out[way] + row * HK * WIDTH, NSA_REAL_DTYPE, ROWS, HK, WIDTH);
            dx.scores = nsa_tensor_bthd(ds + row * HK * WIDTH, NSA_REAL_DTYPE, ROWS, HK, WIDTH);
            dx.q = nsa_tensor_bthd(dq[way] + row * H * D, NSA_REAL_DTYPE, ROWS, H, D);
            dx.k = nsa_tensor_bthd(dk[way] + keys, NSA_REAL_DTYPE, T, HK, D);
            dx.weights = nsa_tensor_bthd(dw[way] + row * H, NSA_REAL_DTYPE, ROWS, H, 1);
            size_t bytes = nsa_score_blocks_forward_workspace_size(&d);
            CHECK_OK("forward",
                     nsa_score_blocks_forward(&x, &d, workspace_new(bytes, 1)->data, bytes));
            bytes = nsa_score_blocks_backward_workspace_size(&d);
            nsa_status status = /* once: it adds */
                nsa_score_blocks_backward(&dx, &x, &d, workspace_new(bytes, 1)->data, bytes);
            CHECK_OK("backward", status);
        }
    }
    size_t size = sizeof(nsa_real);
    CHECK_BITS("scores", out[0], out[1], ROWS * HK * WIDTH * size, size);
    CHECK_BITS("dx.q", dq[0], dq[1], ROWS * H * D * size, size);
    CHECK_BITS("dx.k", dk[0], dk[1], 2 * T * HK * D * size, size);
    CHECK_BITS("dx.weights", dw[0], dw[1], ROWS * H * size, size);
    CHECK(dk[0][T * HK * D] != 0 && dq[0][0] != 0, "nothing was computed");
    guards_free();
}

/* Of equal keys the first of a block has its gradient; one that is not finite is NaN for all that
   the block read. Two blocks of four keys, one query behind them; values, of fewer numbers, have no
   part in it. */
static void test_equal_keys(double dscore) {
    enum { T = 8, D = 64, BLOCK = 4 };
    nsa_real *q = reals(D, 1), *k = reals(T * D, 0), *dq = reals(D, 0), *dk = reals(T * D, 0);
    nsa_real *ds = reals(2, 0);
    guarded *g = guarded_new("lists", 2 * 4, 4);
    int32_t *lists = (int32_t *)(void *)g->data;
    guarded_open(g, g->data, g->bytes);
    for (int i = 0; i < T * D; i++) k[i] = q[i % D];
    lists[0] = 0, lists[1] = 1;
    ds[0] = (nsa_real)dscore, ds[1] = 1;
    check_case("lists, equal keys, a gradient of %g", dscore);
    nsa_desc d = nsa_desc_default(1, T, 1, 1, D);
    d.dim_v = 16, d.first = T - 1, d.count = 1;
    d.cmp_block = d.cmp_stride = 1, d.slc_block = BLOCK, d.slc_count = 2;
    nsa_score x = {NSA_SCORE_LINEAR, NSA_POOL_MAX, {0}, {0}, {0}, {0}, {0}, 0}, dx = x;
    x.q = nsa_tensor_bthd(q, NSA_REAL_DTYPE, 1, 1, D);
    x.k = nsa_tensor_bthd(k, NSA_REAL_DTYPE, T, 1, D);
    x.blocks = nsa_tensor_bthd(lists, NSA_I32, 1, 1, 2);
    dx.scores = nsa_tensor_bthd(ds, NSA_REAL_DTYPE, 1, 1, 2);
    dx.q = nsa_tensor_bthd(dq, NSA_REAL_DTYPE, 1, 1, D);
    dx.k = nsa_tensor_bthd(dk, NSA_REAL_DTYPE, T, 1, D);
    size_t bytes = nsa_score_blocks_backward_workspace_size(&d);
    nsa_status status =
        nsa_score_blocks_backward(&dx, &x, &d, workspace_new(bytes, 1)->data, bytes);
    CHECK_OK("backward", status);
    const int bad = !isfinite(dscore);
    CHECK(!isnan(dq[0]) == !bad, "dq is %g", (double)dq[0]);
    for (int i = 0; i < T * D; i++) {
        const int key = i / D;
        const double got = (double)dk[i];
        if (bad && key < BLOCK)
            CHECK(isnan(got), "dk of key %d is %g, wanted NaN", key, got);
        else
            CHECK(got == (key % BLOCK ? 0 : (double)q[i % D] * (double)ds[key / BLOCK]),
                  "dk of key %d is %g", key, got);
    }
    guards_free();
}

static void test_refused(const suite *s, const nsa_desc *d) {
    static const int32_t table[64] = {0};
    spoiled b;
    spoiled_new(&b, s, d);
    nsa_score *x = (nsa_score *)instance_x(&b.p);
    refusal calls[] = {{"forward", call_list_forward, &b.forward_call, &b.p.d, 0},
                       {"backward", call_list_backward, &b.backward_call, &b.p.d, 0}};
    for (int i = 0; i < COUNT(calls); i++) {
        x->act = (nsa_score_act)7;
        refused(&calls[i], "act 7", NSA_ERROR_OPTION, "act");
        x->act = NSA_SCORE_RELU, x->pool = (nsa_score_pool)-1;
        refused(&calls[i], "pool -1", NSA_ERROR_OPTION, "pool");
        x->pool = NSA_POOL_MAX, x->stride = -1;
        refused(&calls[i], "stride -1", NSA_ERROR_SIZE, "stride");
        x->stride = b.p.d.slc_block - 1;
        refused(&calls[i], "a stride that does not divide slc_block", NSA_ERROR_SLC_BLOCK,
                "slc_block");
        x->stride = 0;
    }
    b.p.d.pages = table, b.p.d.table_width = 32, b.p.d.page_tokens = 16, b.p.d.page_count = 1;
    refused(&calls[1], "pages in backward", NSA_ERROR_OPTION, "pages");
    b.p.d.pages = NULL;
    if (!CHECKS_CUDA) { /* there the lists lie on the device: such an entry is passed over */
        ((int32_t *)x->blocks.data)[0] = -2;
        for (int i = 0; i < COUNT(calls); i++)
            refused(&calls[i], "an entry that is no block", NSA_ERROR_BLOCKS, "blocks");
    }
    guards_free();
}

int main(int argc, char **argv) {
    int step = asked_step(argc, argv, CHECKS_CUDA ? 1 : 2, 4);
    int least = asked_amount(argc, argv) == LEAST;
    for (int i = 0; i < COUNT(list_cases); i += step) {
        const list_case *c = &list_cases[i];
        nsa_desc d = desc_for(c);
        suite s = suite_of(c, &d);
        for (int k = 0; k < COUNT(dtypes) && !suite_refused(&s, &d, NULL); k++) {
            if (CHECKS_CUDA && (i / step + k) % COUNT(dtypes)) continue;
            suite_reference(&s, &d, dtypes[k], (uint64_t)(10 * i + k));
            if ((i / step + k) % COUNT(dtypes) || least) continue;
            suite_bit_tests(&s, &d, dtypes[k]);
            suite_nan(&s, &d, dtypes[k]);
        }
    }
    if (step > 1) { /* more heads than CUDA brings in at once */
        const list_case *c = &list_cases[COUNT(list_cases) - 1];
        nsa_desc d = desc_for(c);
        suite s = suite_of(c, &d);
        suite_reference(&s, &d, NSA_REAL_DTYPE, 90);
    }
    /* Blocks longer than their sequence: a task takes more keys of two tokens than single ones. */
    const list_case longer = {.shape = "grad, D 576 / 512", .stride = 2, .block = 64};
    nsa_desc d = desc_for(&longer);
    suite s = suite_of(&longer, &d);
    if (!suite_refused(&s, &d, NULL)) suite_reference(&s, &d, NSA_REAL_DTYPE, 91);
#ifdef CHECK_F64
    test_gradients();
#endif
    test_alone(&list_cases[0], dtypes[0]);
    if (!least) test_own_lists(&list_cases[0]);
    test_positions();
    test_equal_keys(2), test_equal_keys(INFINITY);
    d = desc_for(&list_cases[0]);
    s = suite_of(&list_cases[0], &d);
    s.unused = UNUSED_CMP | UNUSED_FORCED;
    suite_refusals(&s, &d);
    test_refused(&s, &d);
    return check_done("test_score_lists");
}

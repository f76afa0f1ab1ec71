/* test_score_blocks.c - blocks chosen by scores that are no attention: sums over heads of weighted
   products.
   Twin: nsa.h's "Selection", nsa_score_blocks. */
#include "harness/suite.h"

typedef struct score_case {
    const char *shape;
    nsa_score_act act;
    nsa_score_pool pool;
    int weights, stride;
} score_case;

static const score_case score_cases[] = {
    {"small", NSA_SCORE_RELU, NSA_POOL_MAX, 1, 0},
    {"small", NSA_SCORE_LINEAR, NSA_POOL_MEAN, 0, 0},
    {"G 6, D 80", NSA_SCORE_RELU, NSA_POOL_MEAN, 1, 0},
    {"G 2, D 24", NSA_SCORE_LINEAR, NSA_POOL_MAX, 1, 0},
    {"G 12, D 96", NSA_SCORE_RELU, NSA_POOL_MAX, 0, 0},
    {"G 16, D 128", NSA_SCORE_RELU, NSA_POOL_MAX, 1, 0},
    {"T > w, one block more", NSA_SCORE_LINEAR, NSA_POOL_MEAN, 1, 0},
    {"one head, l' far above l", NSA_SCORE_RELU, NSA_POOL_MAX, 1, 0},
    {"D 1 / 3", NSA_SCORE_LINEAR, NSA_POOL_MAX, 0, 0},
    {"varlen empty", NSA_SCORE_RELU, NSA_POOL_MAX, 1, 0},
    {"varlen four", NSA_SCORE_LINEAR, NSA_POOL_MEAN, 1, 0},
};

enum { SLOT_Q, SLOT_K, SLOT_BLOCKS, SLOT_SCORES, SLOT_WEIGHTS };

static nsa_status score_forward(const void *x, const nsa_desc *d, void *work, size_t bytes) {
    return nsa_score_blocks((const nsa_score *)x, d, work, bytes);
}

static size_t score_size(const void *x, const nsa_desc *d) {
    (void)x;
    return nsa_score_blocks_workspace_size(d);
}

static void score_configure(const suite *s, void *x) {
    const score_case *c = (const score_case *)s->options;
    ((nsa_score *)x)->act = c->act, ((nsa_score *)x)->pool = c->pool;
    ((nsa_score *)x)->stride = c->stride;
}

/* Scores in rows as wide as those of the longest sequence. */
static void score_reference(const suite *s, const nsa_desc *d, int tokens, ref_prec prec,
                            double **x, double **dx) {
    const score_case *c = (const score_case *)s->options;
    ref_desc r = ref_desc_of(d, tokens);
    ref_scorer scorer = {prec,
                         c->act == NSA_SCORE_RELU,
                         c->pool == NSA_POOL_MEAN,
                         x[SLOT_Q],
                         x[SLOT_K],
                         c->weights ? x[SLOT_WEIGHTS] : NULL,
                         c->stride ? c->stride : 1};
    int J = ref_slc_count(&r, tokens), row_width = s->slots[SLOT_SCORES].width;
    double *scores = ref_zeros((size_t)(tokens * list_heads_of(d) * J));
    (void)dx;
    ref_token_scores(&r, &scorer, scores);
    for (int row = 0; row < tokens * list_heads_of(d); row++)
        for (int j = 0; j < row_width; j++)
            x[SLOT_SCORES][row * row_width + j] = j < J ? scores[row * J + j] : -INFINITY;
    free(scores);
}

/* Without scores where rows of sequences alone are compared: a row is as wide as the longest
   sequence. */
static suite suite_with(const score_case *c, const nsa_desc *d, int with_scores) {
    suite s;
    memset(&s, 0, sizeof s);
    s.name = c->shape, s.struct_size = sizeof(nsa_score), s.options = c;
    s.forward = score_forward, s.forward_size = score_size;
    s.configure = score_configure, s.reference = score_reference;
    suite_add(&s, "q", offsetof(nsa_score, q), ROWS_QUERY, d->heads, d->dim);
    suite_add(&s, "k", offsetof(nsa_score, k), c->stride ? ROWS_CMP : ROWS_KEY, d->kv_heads,
              d->dim);
    slot *blocks = suite_add(&s, "blocks", offsetof(nsa_score, blocks), ROWS_QUERY,
                             list_heads_of(d), nsa_block_list_width(d));
    blocks->output = 1, blocks->dtype = NSA_I32;
    slot *scores = suite_add(&s, "scores", offsetof(nsa_score, scores), ROWS_QUERY,
                             list_heads_of(d), nsa_slc_count(d, d->tokens));
    scores->output = scores->optional = 1, scores->dtype = NSA_REAL_DTYPE;
    if (!with_scores) s.count--;
    if (!c->weights) return s;
    slot *weights = suite_add(&s, "weights", offsetof(nsa_score, weights), ROWS_QUERY, d->heads, 1);
    weights->optional = 1;
    return s;
}

static suite suite_of(const score_case *c, const nsa_desc *d) {
    return suite_with(c, d, 1);
}

/* The lists are the reference's ranking of the scores that the call itself wrote, so that no
   rounding stands between them; and without the view of scores they keep their bits. */
static void check_lists(instance *p) {
    const nsa_desc *d = &p->d;
    plan rows = plan_of(d);
    size_t n = tensor_count(&p->x[SLOT_BLOCKS]);
    double *scores = ref_zeros(tensor_count(&p->x[SLOT_SCORES])), *got = ref_zeros(n);
    int width = nsa_block_list_width(d), J = p->x[SLOT_SCORES].width, wrong = -1;
    int32_t *want = (int32_t *)check_alloc((size_t)width * sizeof *want);
    tensor_get(&p->x[SLOT_SCORES], scores);
    tensor_get(&p->x[SLOT_BLOCKS], got);
    for (int b = 0; b < rows.sequences; b++) {
        ref_desc r = ref_desc_of(d, rows.length[b]);
        for (int t = d->first; t < rows.length[b] && t < d->first + d->count; t++)
            for (int list = 0; list < list_heads_of(d); list++) {
                int row = (rows.row[b] + t) * list_heads_of(d) + list;
                ref_rank(&r, t, scores + row * J, want);
                for (int i = 0; i < width; i++)
                    if (got[row * width + i] != want[i]) wrong = row;
            }
    }
    CHECK(wrong < 0, "list %d is not the ranking of its scores", wrong);
    free(scores), free(got), free(want);
    unsigned char *before = tensor_bits(&p->x[SLOT_BLOCKS]);
    ((nsa_score *)instance_x(p))->scores.data = NULL;
    nsa_status status = instance_forward(p);
    CHECK_OK("without scores", status);
    unsigned char *after = tensor_bits(&p->x[SLOT_BLOCKS]);
    CHECK_BITS("lists without scores", after, before, n * 4, 4);
    free(before), free(after);
}

static void test_lists(const score_case *c, const nsa_desc *options, nsa_dtype dtype,
                       uint64_t seed) {
    for (int i = 0; i < COUNT(isas); i++) {
        nsa_desc d = *options;
        if (!nsa_isa_available(isas[i])) continue;
        d.isa = isas[i], d.threads = 1 + i % 3;
        if (i % 2) d.first = d.tokens / 3, d.count = (d.tokens + 1) / 2;
        suite s = suite_of(c, &d);
        values in = values_random(&s, &d, dtype, seed), zeros = values_zero(&s, &d);
        instance p;
        check_case("score, %s, %s, isa %s, act %d, pool %d", c->shape, dtype_name(dtype),
                   nsa_isa_name(d.isa), (int)c->act, (int)c->pool);
        instance_new(&p, &s, &d, &in, dtype, dtype, i, &zeros);
        instance_run(&p);
        check_lists(&p);
        values_free(&in), values_free(&zeros);
        guards_free();
    }
}

/* Single tokens for blocks and one list for all heads: DeepSeek's indexer. */
static void test_indexer(void) {
    static const score_case c = {"tokens as blocks", NSA_SCORE_RELU, NSA_POOL_MAX, 1, 0};
    nsa_desc d = nsa_desc_default(1, CHECKS_CUDA ? 72 : 300, 4, 1, 16);
    d.cmp_block = d.cmp_stride = d.slc_block = 1;
    d.slc_count = CHECKS_CUDA ? 24 : 90, d.slc_init = 0, d.slc_local = 1;
    for (int k = 0; k < (CHECKS_CUDA ? 1 : COUNT(dtypes)); k++) {
        suite s = suite_of(&c, &d);
        suite_reference(&s, &d, dtypes[k], 40 + (uint64_t)k);
        test_lists(&c, &d, dtypes[k], 50 + (uint64_t)k);
    }
}

/* Keys that stand for several tokens; blocks that hold one of them or more; the tail of QSA besides
   the list, no tail at all as in CSA, forced blocks of others; a batch, packed sequences. */
static void test_strides(int least) {
    static const struct {
        score_case c;
        int block;
        nsa_forced forced;
        int init, local;
        nsa_mask mask;
    } cases[] = {
        {{"T > w, one block more", NSA_SCORE_RELU, NSA_POOL_MAX, 0, 16},
         16,
         NSA_FORCED_TAIL,
         0,
         1,
         NSA_MASK_CAUSAL},
        {{"G 6, D 80", NSA_SCORE_RELU, NSA_POOL_MEAN, 1, 16},
         16,
         NSA_FORCED_TAIL,
         0,
         0,
         NSA_MASK_CAUSAL},
        {{"varlen four", NSA_SCORE_LINEAR, NSA_POOL_MAX, 1, 4},
         16,
         NSA_FORCED_TAIL,
         1,
         1,
         NSA_MASK_CAUSAL},
        {{"varlen empty", NSA_SCORE_RELU, NSA_POOL_MEAN, 1, 8},
         32,
         NSA_FORCED_INSIDE,
         1,
         2,
         NSA_MASK_CAUSAL},
        {{"G 2, D 24", NSA_SCORE_RELU, NSA_POOL_MEAN, 1, 8},
         16,
         NSA_FORCED_ON_TOP,
         0,
         0,
         NSA_MASK_CAUSAL},
        {{"G 2, D 24", NSA_SCORE_LINEAR, NSA_POOL_MAX, 0, 16},
         16,
         NSA_FORCED_TAIL,
         0,
         1,
         NSA_MASK_NONE},
    };
    for (int i = 0; i < COUNT(cases); i += least ? 3 : 1) {
        nsa_desc d = desc_of(shape(cases[i].c.shape));
        d.cmp_block = d.cmp_stride = cases[i].c.stride; /* by which the suite counts rows of k */
        d.slc_block = cases[i].block, d.slc_count = 4;
        d.forced = cases[i].forced, d.mask = cases[i].mask;
        d.slc_init = cases[i].init, d.slc_local = cases[i].local;
        suite s = suite_of(&cases[i].c, &d);
        if (suite_refused(&s, &d, NULL)) continue;
        suite_reference(&s, &d, dtypes[i % COUNT(dtypes)], 200 + (uint64_t)i);
        test_lists(&cases[i].c, &d, dtypes[i % COUNT(dtypes)], 210 + (uint64_t)i);
        if (least) continue;
        s = suite_with(&cases[i].c, &d, !d.begins);
        suite_bit_tests(&s, &d, dtypes[i % COUNT(dtypes)]);
    }
}

/* A query with a value that is not finite keeps forced blocks and a proper list; a key with one
   ranks its block last; no other query changes. For q a key stands for a block's tokens: its last
   candidate has no key then. */
static void test_bad_value(int input, double value) {
    const int stride = input == SLOT_Q ? 32 : 0;
    const score_case c = {"T > w, one block more", NSA_SCORE_RELU, NSA_POOL_MAX, 1, stride};
    nsa_desc d = desc_of(shape(c.shape));
    if (stride) d.cmp_block = d.cmp_stride = d.slc_block = stride;
    suite s = suite_of(&c, &d);
    values v = values_random(&s, &d, NSA_REAL_DTYPE, 60), zeros = values_zero(&s, &d);
    int heads = s.slots[input].heads, width = s.slots[input].width, row = d.tokens / 3;
    check_case("score, %g in %s", value, s.slots[input].name);
    suite_bits clean = bits_of(&s, &d, &v, NSA_REAL_DTYPE, 0);
    v.x[input][(row * heads + heads - 1) * width + width / 2] = value;
    instance p;
    instance_new(&p, &s, &d, &v, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, &zeros);
    instance_run(&p);
    nsa_block_fault fault = {-7, -7, -7, -7, -7, "nothing"};
    nsa_tensor lists = ((nsa_score *)instance_x(&p))->blocks;
    CHECK(nsa_check_blocks(&lists, &d, &fault) == NSA_OK, "a list is not proper: %s at query %d",
          fault.reason, fault.query);
    suite_bits bad = bits_take(&p);
    size_t list = (size_t)(d.kv_heads * nsa_block_list_width(&d)) * 4;
    for (int t = 0; t < d.tokens; t++) {
        int reads = input == SLOT_K ? t >= row : t == row;
        if (!reads)
            CHECK_BITS("a list that reads no bad value", bad.x[SLOT_BLOCKS] + (size_t)t * list,
                       clean.x[SLOT_BLOCKS] + (size_t)t * list, list, 4);
    }
    if (input != SLOT_K) { /* its list has scores of 0, -inf where it sees no key */
        int J = p.x[SLOT_SCORES].width, wrong = 0;
        int seen = stride ? (row + 1) / stride : nsa_slc_candidates(&d, row);
        double *scores = ref_zeros(tensor_count(&p.x[SLOT_SCORES]));
        tensor_get(&p.x[SLOT_SCORES], scores);
        for (int j = 0; j < nsa_slc_candidates(&d, row); j++)
            wrong += scores[(row * d.kv_heads + d.kv_heads - 1) * J + j] !=
                     (j < seen ? 0 : -(double)INFINITY);
        CHECK(!wrong, "%d scores of a query with a bad value are not 0, or -inf", wrong);
        free(scores);
    }
    if (input == SLOT_K) { /* its block is chosen only where it is forced, or nothing is left out */
        int block = row / d.slc_block, chosen = 0, head = heads - 1;
        for (int t = 0; t < d.tokens; t++)
            for (int i = 0; i < nsa_block_list_width(&d); i++) {
                int32_t j;
                ref_desc r = ref_desc_of(&d, d.tokens);
                memcpy(&j,
                       bad.x[SLOT_BLOCKS] + (size_t)t * list +
                           (size_t)(head * nsa_block_list_width(&d) + i) * 4,
                       4);
                chosen += j == block && !ref_forced(&r, t, j) &&
                          nsa_slc_candidates(&d, t) > nsa_block_list_width(&d);
            }
        CHECK(!chosen, "the block of a key that is not finite was chosen %d times", chosen);
    }
    bits_free(&clean), bits_free(&bad);
    values_free(&v), values_free(&zeros);
    guards_free();
}

/* ---- Few queries, whose keys are read in place ---- */

/* The last queries of one sequence, and what a call over them has written. */
typedef struct few {
    nsa_desc d;
    nsa_score x;
    int rows; /* of K */
    void *q, *k, *weights, *paged;
    int32_t *table;
} few;

static void *few_rows(nsa_dtype dtype, size_t n, uint64_t seed, int bad) {
    char *rows = (char *)check_alloc(n * dtype_size(dtype));
    double *x = random_numbers(seed, n, dtype);
    static const double not_finite[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < bad; i++)
        x[check_hash(seed, (uint64_t)i) % n] = not_finite[check_below(3, seed, (uint64_t)i + 40)];
    for (size_t i = 0; i < n; i++) element_put(dtype, rows + i * dtype_size(dtype), x[i]);
    free(x);
    return rows;
}

/* The rows of K once more, in pages in an order of chance. */
static void few_pages(few *f, int page, uint64_t seed) {
    const int rows = page / f->d.cmp_stride, pages = (f->d.tokens + page - 1) / page;
    const size_t row = (size_t)(f->d.kv_heads * f->d.dim) * dtype_size(f->x.k.dtype);
    f->paged = check_alloc((size_t)(pages * rows) * row);
    f->table = (int32_t *)check_alloc((size_t)pages * sizeof *f->table);
    for (int i = 0; i < pages; i++) f->table[i] = i;
    for (int i = pages - 1; i > 0; i--) {
        int j = check_below(i + 1, seed, (uint64_t)i), swap = f->table[i];
        f->table[i] = f->table[j], f->table[j] = swap;
    }
    for (int r = 0; r < f->rows; r++)
        memcpy((char *)f->paged + (size_t)(f->table[r / rows] * rows + r % rows) * row,
               (char *)f->k + (size_t)r * row, row);
    f->d.page_tokens = page, f->d.page_count = f->d.table_width = pages;
}

/* Shapes by chance: groups of up to 64 heads, blocks from a token to more than any task has. */
static void few_make(few *f, int nth, uint64_t seed) {
    static const int groups[] = {1, 2, 5, 16, 64}, blocks[] = {1, 3, 16, 48, 64, 100, 4100};
    const int group = groups[nth % 5], lists = 1 + nth % 2, stride = nth % 3 ? 1 : 4;
    const int many = 64 / group + 1 + nth % 3, dim = nth % 4 ? 8 * (1 + nth % 5) : 7;
    const int tokens = nth % 2 ? 4000 + check_below(900, seed, 1) : 70 + check_below(99, seed, 1);
    const nsa_dtype dtype = dtypes[nth % COUNT(dtypes)];
    memset(f, 0, sizeof *f);
    nsa_desc *d = &f->d;
    *d = nsa_desc_default(1, tokens, group * lists, nth % 4 == 1 ? 1 : lists, dim);
    d->list_heads = lists;
    d->cmp_block = d->cmp_stride = stride;
    d->slc_block = blocks[check_below(7, seed, 2)] * stride;
    d->slc_count = 9, d->slc_init = nth % 2, d->slc_local = 1, d->forced = NSA_FORCED_TAIL;
    d->mask = nth % 7 == 6 ? NSA_MASK_NONE : NSA_MASK_CAUSAL;
    d->first = tokens - many, d->count = many, d->threads = 1;
    f->rows = tokens / stride;
    const size_t of_q = (size_t)(d->heads * dim), of_k = (size_t)(d->kv_heads * dim);
    f->q = few_rows(dtype, of_q * (size_t)many, seed + 1, nth % 4 == 0);
    f->k = few_rows(dtype, of_k * (size_t)f->rows, seed + 2, nth % 3 == 0 ? 3 : 0);
    f->weights = few_rows(dtype, (size_t)(d->heads * many), seed + 3, nth % 5 == 0);
    f->x.act = nth % 2 ? NSA_SCORE_RELU : NSA_SCORE_LINEAR;
    f->x.pool = nth / 2 % 2 ? NSA_POOL_MEAN : NSA_POOL_MAX;
    f->x.stride = stride;
    f->x.q = nsa_tensor_bthd(f->q, dtype, many, d->heads, dim);
    f->x.k = nsa_tensor_bthd(f->k, dtype, f->rows, d->kv_heads, dim);
    if (nth % 3) f->x.weights = nsa_tensor_bthd(f->weights, dtype, many, d->heads, 1);
    few_pages(f, 16 * (1 + nth % 4), seed + 4);
}

static void few_free(few *f) {
    free(f->q), free(f->k), free(f->weights), free(f->paged), free(f->table);
}

/* Scores, then lists, of queries `from` .. from + count - 1 of those that there are. */
static unsigned char *few_call(const few *f, int from, int count, int pages, int threads) {
    nsa_desc d = f->d;
    nsa_score x = f->x;
    const int lists = list_heads_of(&d), J = nsa_slc_count(&d, d.tokens);
    const int width = nsa_block_list_width(&d);
    const size_t scores = (size_t)(count * lists * J) * sizeof(nsa_real);
    unsigned char *out =
        (unsigned char *)check_alloc(scores + (size_t)(count * lists * width) * sizeof(int32_t));
    d.first += from, d.count = count, d.threads = threads;
    if (pages) d.pages = f->table, x.k.data = f->paged;
    if (pages) x.k.batch = d.page_tokens / d.cmp_stride * x.k.token;
    x.q = nsa_tensor_bthd((char *)f->q + (size_t)(from * d.heads * d.dim) * dtype_size(x.q.dtype),
                          x.q.dtype, count, d.heads, d.dim);
    if (x.weights.data)
        x.weights =
            nsa_tensor_bthd((char *)f->weights + (size_t)(from * d.heads) * dtype_size(x.q.dtype),
                            x.q.dtype, count, d.heads, 1);
    x.scores = nsa_tensor_bthd(out, NSA_REAL_DTYPE, count, lists, J);
    x.blocks = nsa_tensor_bthd(out + scores, NSA_I32, count, lists, width);
    const size_t bytes = nsa_score_blocks_workspace_size(&d);
    nsa_desc all = d;
    all.first = f->d.first, all.count = f->d.count;
    CHECK(bytes <= nsa_score_blocks_workspace_size(&all), "few queries want more workspace");
    void *work = check_alloc(bytes);
    memset(work, CHECK_POISON, bytes);
    nsa_status status = nsa_score_blocks(&x, &d, work, bytes);
    CHECK_OK("few queries", status);
    free(work);
    return out;
}

/* Scores and lists of few queries, read in place in tasks of some keys, have the bits of the same
   queries among as many as K is packed for; in pages too, and by any number of threads. */
static void test_in_place(int nth, uint64_t seed) {
    few f;
    few_make(&f, nth, seed);
    const int lists = list_heads_of(&f.d), J = nsa_slc_count(&f.d, f.d.tokens), many = f.d.count;
    const size_t score = (size_t)(lists * J) * sizeof(nsa_real);
    const size_t list = (size_t)(lists * nsa_block_list_width(&f.d)) * sizeof(int32_t);
    for (int i = 0; i < COUNT(isas); i++) {
        if (!nsa_isa_available(isas[i])) continue;
        f.d.isa = isas[i];
        unsigned char *want = few_call(&f, 0, many, 0, 2);
        for (int part = 0; part < 4; part++) {
            const int most = 64 / (f.d.heads / lists);
            const int count = part % 2 ? 1 : 1 + check_below(most, seed + 5, (uint64_t)part);
            const int from = part ? check_below(many - count + 1, seed + 6, (uint64_t)part) : 0;
            const int threads = 1 + (nth + 3 * part + i) % 8;
            unsigned char *got = few_call(&f, from, count, part & 1, threads);
            check_case("%d/%d x %d, %d tokens in blocks of %d, stride %d, isa %s, queries %d + %d, "
                       "%d threads",
                       f.d.heads, f.d.kv_heads, f.d.dim, f.d.tokens, f.d.slc_block, f.d.cmp_stride,
                       nsa_isa_name(f.d.isa), from, count, threads);
            CHECK_BITS("scores in place", got, want + (size_t)from * score, (size_t)count * score,
                       sizeof(nsa_real));
            CHECK_BITS("lists in place", got + (size_t)count * score,
                       want + (size_t)many * score + (size_t)from * list, (size_t)count * list, 4);
            free(got);
        }
        free(want);
    }
    few_free(&f);
}

/* On a device packed sequences take as many queries at once as the scores of one sequence of all
   their rows, and of a block more for each, have room for, though most of them are far shorter than
   the longest. */
static void test_packed_workspace(int heads) {
    static const int32_t begins[] = {0, 60, 120, 180, 220};
    nsa_desc d = nsa_desc_default(4, 120, heads, heads, 16), one = d;
    d.cmp_block = d.cmp_stride = d.slc_block = one.cmp_block = one.cmp_stride = one.slc_block = 2;
    d.begins = begins, d.rows = begins[d.batch];
    one.batch = 1, one.tokens = one.count = d.rows;
    const size_t packed = nsa_score_blocks_workspace_size(&d);
    const size_t blocks = (size_t)(d.rows / d.slc_block), ends = (size_t)d.batch;
    const size_t most = nsa_score_blocks_workspace_size(&one) / blocks * (blocks + ends);
    check_case("score, the workspace of packed sequences, %d heads", heads);
    CHECK(packed && packed <= most, "%zu bytes, %zu of one sequence", packed, most);
}

static nsa_status call_score(void *arguments) {
    suite_call *c = (suite_call *)arguments;
    return call_suite_forward(c);
}

static void test_options_refused(const suite *s, const nsa_desc *d) {
    spoiled b;
    spoiled_new(&b, s, d);
    nsa_score *x = (nsa_score *)instance_x(&b.p);
    refusal r = {"forward", call_score, &b.forward_call, &b.p.d, 0};
    x->act = (nsa_score_act)7;
    refused(&r, "act 7", NSA_ERROR_OPTION, "act");
    x->act = NSA_SCORE_RELU, x->pool = (nsa_score_pool)-1;
    refused(&r, "pool -1", NSA_ERROR_OPTION, "pool");
    x->pool = NSA_POOL_MAX, x->stride = -1;
    refused(&r, "stride -1", NSA_ERROR_SIZE, "stride");
    x->stride = b.p.d.slc_block - 1;
    refused(&r, "a stride that does not divide slc_block", NSA_ERROR_SLC_BLOCK, "slc_block");
    guards_free();
}

int main(int argc, char **argv) {
    int step = asked_step(argc, argv, CHECKS_CUDA ? 1 : 2, 4);
    int least = asked_amount(argc, argv) == LEAST; /* the others ask for bits, and inf */
    for (int i = 0; i < COUNT(score_cases); i += step) {
        const score_case *c = &score_cases[i];
        nsa_desc d = desc_of(shape(c->shape));
        suite s = suite_of(c, &d);
        for (int k = 0; k < COUNT(dtypes) && !suite_refused(&s, &d, NULL); k++) {
            int its_turn =
                (i / step + k) % COUNT(dtypes) == 0; /* one dtype a case; the executor is slow */
            if (CHECKS_CUDA && !its_turn) continue;
            suite_reference(&s, &d, dtypes[k], (uint64_t)(10 * i + k));
            test_lists(c, &d, dtypes[k], (uint64_t)(10 * i + k + 5));
            if (!its_turn || least) continue;
            s = suite_with(c, &d, !d.begins);
            suite_bit_tests(&s, &d, dtypes[k]);
            s = suite_of(c, &d);
        }
    }
    test_indexer();
    test_strides(least);
    for (int i = 0; i < (least ? 1 : 2);
         i++) { /* not causal, and every query head with a list of its own */
        nsa_desc d = desc_of(shape(score_cases[i].shape));
        d.mask = NSA_MASK_NONE, d.list_heads = i ? 0 : d.heads;
        suite s = suite_of(&score_cases[i], &d);
        suite_reference(&s, &d, dtypes[1], 70 + (uint64_t)i);
        test_lists(&score_cases[i], &d, dtypes[1], 75 + (uint64_t)i);
    }
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < (least ? 1 : COUNT(bad)); i++) {
        test_bad_value(SLOT_Q, bad[i]);
        test_bad_value(SLOT_K, bad[i]);
        test_bad_value(SLOT_WEIGHTS, bad[i]);
    }
    for (int i = 0; i < (CHECKS_CUDA ? 0 : least ? 4 : 21); i++)
        test_in_place(i, 300 + 10 * (uint64_t)i);
    for (int heads = 16; CHECKS_CUDA && heads <= 32; heads += 16) test_packed_workspace(heads);
    nsa_desc d = desc_of(shape(score_cases[0].shape));
    suite s = suite_of(&score_cases[0], &d);
    s.unused = UNUSED_CMP;
    suite_refusals(&s, &d);
    test_options_refused(&s, &d);
    return check_done("test_score_blocks");
}

/* test_pages.c - batches whose sequences have positions of their own (firsts, counts) and rows in
   pages: each sequence has the bits of it alone over straight rows, and is right by the dense
   reference.
   Twin: nsa.h's nsa_check_pages. Not here: backward over pages, which is refused. */
#include "harness/compress_slots.h"

/* ---- The primitives, as suites without a reference ---- */

#define CALLS(name, type)                                                                    \
    static nsa_status name##_f(const void *x, const nsa_desc *d, void *work, size_t bytes) { \
        return nsa_##name##_forward((const type *)x, d, work, bytes);                        \
    }                                                                                        \
    static nsa_status name##_b(const void *dx, const void *x, const nsa_desc *d, void *work, \
                               size_t bytes) {                                               \
        return nsa_##name##_backward((const type *)dx, (const type *)x, d, work, bytes);     \
    }
#define CALLS_OF_BRANCH(name)                                                   \
    CALLS(attend_##name, nsa_attend)                                            \
    static size_t name##_fs(const void *x, const nsa_desc *d) {                 \
        (void)x;                                                                \
        return nsa_attend_##name##_forward_workspace_size(d);                   \
    }                                                                           \
    static size_t name##_bs(const void *dx, const void *x, const nsa_desc *d) { \
        (void)dx, (void)x;                                                      \
        return nsa_attend_##name##_backward_workspace_size(d);                  \
    }
CALLS_OF_BRANCH(cmp)
CALLS_OF_BRANCH(slc)
CALLS_OF_BRANCH(win)
CALLS_OF_BRANCH(dense)
CALLS(compress, nsa_compress)
CALLS(attention, nsa_attention)

#define CALLS_WITHOUT_WORKSPACE(name)                                                        \
    static nsa_status name##_f(const void *x, const nsa_desc *d, void *work, size_t bytes) { \
        (void)work, (void)bytes;                                                             \
        return nsa_##name##_forward((const nsa_##name *)x, d);                               \
    }                                                                                        \
    static nsa_status name##_b(const void *dx, const void *x, const nsa_desc *d, void *work, \
                               size_t bytes) {                                               \
        (void)work, (void)bytes;                                                             \
        return nsa_##name##_backward((const nsa_##name *)dx, (const nsa_##name *)x, d);      \
    }
CALLS_WITHOUT_WORKSPACE(rope)
CALLS_WITHOUT_WORKSPACE(merge)
CALLS_WITHOUT_WORKSPACE(gate)

#define CALLS_OF_LISTS(name, type)                                                           \
    static nsa_status name##_f(const void *x, const nsa_desc *d, void *work, size_t bytes) { \
        return nsa_##name((const type *)x, d, work, bytes);                                  \
    }                                                                                        \
    static size_t name##_fs(const void *x, const nsa_desc *d) {                              \
        (void)x;                                                                             \
        return nsa_##name##_workspace_size(d);                                               \
    }
CALLS_OF_LISTS(select_blocks, nsa_select)
CALLS_OF_LISTS(score_blocks, nsa_score)
CALLS_OF_LISTS(rank_queries, nsa_rank)
CALLS_OF_LISTS(score_blocks_forward, nsa_score)

static size_t compress_fs(const void *x, const nsa_desc *d) {
    return nsa_compress_forward_workspace_size((const nsa_compress *)x, d);
}

static size_t attention_fs(const void *x, const nsa_desc *d) {
    return nsa_attention_forward_workspace_size((const nsa_attention *)x, d);
}

/* What a suite is about; phi of compression and of the whole is the options'. */
typedef enum kind {
    CMP,
    SLC,
    WIN,
    DENSE,
    COMPRESS,
    WHOLE_CHAIN,
    ROPE,
    MERGE,
    GATE,
    SELECT,
    SCORE,
    RANK,
    LISTED,
    KINDS
} kind;

typedef struct kind_options {
    kind of;
    phi_case k, v;
} kind_options;

static const char *const names[PHI_TENSORS] = {"x", "out", "pos", "w1", "b1", "w2", "b2"};

static void add_in(suite *s, const char *name, size_t at, slot_rows rows, int heads, int width) {
    suite_add(s, name, at, rows, heads, width)->gradient = 1;
}

static void add_out(suite *s, const char *name, size_t at, int heads, int width, int dtype) {
    slot *t = suite_add(s, name, at, ROWS_QUERY, heads, width);
    t->output = 1, t->dtype = dtype, t->gradient = dtype != NSA_I32;
}

/* Block lists as an input, in the place where values are made. */
static void random_lists(const suite *s, const nsa_desc *d, double **x) {
    plan p = plan_of(d);
    for (int i = 0; i < s->count; i++) {
        if (strcmp(s->slots[i].name, "blocks") || s->slots[i].output) continue;
        int32_t *lists = random_blocks(d, 31);
        for (size_t j = 0; j < slot_count(&s->slots[i], &p); j++) x[i][j] = lists[j];
        free(lists);
    }
    compress_weights(s, d, x);
}

static void configure(const suite *s, void *x) {
    const kind_options *o = (const kind_options *)s->options;
    nsa_compress *alone = (nsa_compress *)x;
    nsa_attention *chain = (nsa_attention *)x;
    nsa_rope *rope = (nsa_rope *)x;
    if (o->of == COMPRESS)
        alone->phi = o->k.phi, alone->dim = o->k.dim, alone->hidden = o->k.hidden;
    if (o->of == ROPE) rope->heads = o->k.heads, rope->dim = o->k.dim;
    if (o->of != WHOLE_CHAIN) return;
    chain->k_cmp.phi = o->k.phi, chain->k_cmp.dim = o->k.dim, chain->k_cmp.hidden = o->k.hidden;
    chain->v_cmp.phi = o->v.phi, chain->v_cmp.dim = o->v.dim, chain->v_cmp.hidden = o->v.hidden;
}

static void add_attend(suite *s, const nsa_desc *d, kind of) {
    slot_rows rows = of == CMP ? ROWS_CMP : ROWS_KEY;
    add_in(s, "q", offsetof(nsa_attend, q), ROWS_QUERY, d->heads, d->dim);
    add_in(s, "k", offsetof(nsa_attend, k), rows, d->kv_heads, d->dim);
    add_in(s, "v", offsetof(nsa_attend, v), rows, d->kv_heads, d->dim_v);
    add_out(s, "out", offsetof(nsa_attend, out), d->heads, d->dim_v, DTYPE_UNDER_TEST);
    add_out(s, "lse", offsetof(nsa_attend, lse), d->heads, 1, NSA_REAL_DTYPE);
    if (of == SLC)
        suite_add(s, "blocks", offsetof(nsa_attend, blocks), ROWS_QUERY, list_heads_of(d),
                  nsa_block_list_width(d))
            ->dtype = NSA_I32;
}

#define AT(field) offsetof(nsa_attention, field)

static void add_chain(suite *s, const nsa_desc *d, const kind_options *o) {
    static const char *const outs[] = {"out_cmp", "out_slc", "out_win", "out"};
    static const char *const lses[] = {"lse_cmp", "lse_slc", "lse_win"};
    static const size_t out_at[] = {AT(out_cmp), AT(out_slc), AT(out_win), AT(out)},
                        lse_at[] = {AT(lse_cmp), AT(lse_slc), AT(lse_win)};
    add_in(s, "q", AT(q), ROWS_QUERY, d->heads, d->dim);
    compress_add(s, &o->k, names, AT(k_cmp), 0);
    compress_add(s, &o->v, names, AT(v_cmp), 0);
    add_in(s, "k_slc", AT(k_slc), ROWS_KEY, d->kv_heads, d->dim);
    add_in(s, "v_slc", AT(v_slc), ROWS_KEY, d->kv_heads, d->dim_v);
    add_in(s, "k_win", AT(k_win), ROWS_KEY, d->kv_heads, d->dim);
    add_in(s, "v_win", AT(v_win), ROWS_KEY, d->kv_heads, d->dim_v);
    add_in(s, "gates", AT(gates), ROWS_QUERY, d->gate_heads, 3);
    add_out(s, "blocks", AT(blocks), list_heads_of(d), nsa_block_list_width(d), NSA_I32);
    for (int i = 0; i < 4; i++)
        add_out(s, outs[i], out_at[i], d->heads, d->dim_v, DTYPE_UNDER_TEST);
    for (int i = 0; i < 3; i++) add_out(s, lses[i], lse_at[i], d->heads, 1, NSA_REAL_DTYPE);
}

static void add_merge(suite *s, const nsa_desc *d) {
    slot *part;
    add_in(s, "out_a", offsetof(nsa_merge, out_a), ROWS_QUERY, d->heads, d->dim_v);
    add_in(s, "out_b", offsetof(nsa_merge, out_b), ROWS_QUERY, d->heads, d->dim_v);
    for (int i = 0; i < 2; i++) {
        size_t at = i ? offsetof(nsa_merge, lse_b) : offsetof(nsa_merge, lse_a);
        part = suite_add(s, i ? "lse_b" : "lse_a", at, ROWS_QUERY, d->heads, 1);
        part->gradient = 1, part->dtype = NSA_REAL_DTYPE;
    }
    add_out(s, "out", offsetof(nsa_merge, out), d->heads, d->dim_v, DTYPE_UNDER_TEST);
    add_out(s, "lse", offsetof(nsa_merge, lse), d->heads, 1, NSA_REAL_DTYPE);
}

static void add_gate(suite *s, const nsa_desc *d) {
    add_in(s, "logits", offsetof(nsa_gate, logits), ROWS_QUERY, d->gate_heads, 3);
    add_in(s, "cmp", offsetof(nsa_gate, cmp), ROWS_QUERY, d->heads, d->dim_v);
    add_in(s, "slc", offsetof(nsa_gate, slc), ROWS_QUERY, d->heads, d->dim_v);
    add_in(s, "win", offsetof(nsa_gate, win), ROWS_QUERY, d->heads, d->dim_v);
    add_out(s, "out", offsetof(nsa_gate, out), d->heads, d->dim_v, DTYPE_UNDER_TEST);
}

/* Selection, without scores as an output: their rows are as wide as the longest sequence's. */
static void add_lists(suite *s, const nsa_desc *d, kind of) {
    int lists = list_heads_of(d), width = nsa_block_list_width(d);
    if (of == SELECT) {
        suite_add(s, "q", offsetof(nsa_select, q), ROWS_QUERY, d->heads, d->dim);
        suite_add(s, "k", offsetof(nsa_select, k), ROWS_CMP, d->kv_heads, d->dim);
        suite_add(s, "lse", offsetof(nsa_select, lse), ROWS_QUERY, d->heads, 1)->dtype =
            NSA_REAL_DTYPE;
        add_out(s, "blocks", offsetof(nsa_select, blocks), lists, width, NSA_I32);
    } else if (of == SCORE || of == LISTED) {
        suite_add(s, "q", offsetof(nsa_score, q), ROWS_QUERY, d->heads, d->dim);
        suite_add(s, "k", offsetof(nsa_score, k), ROWS_KEY, d->kv_heads, d->dim);
        suite_add(s, "weights", offsetof(nsa_score, weights), ROWS_QUERY, d->heads, 1);
        if (of == SCORE)
            add_out(s, "blocks", offsetof(nsa_score, blocks), lists, width, NSA_I32);
        else
            suite_add(s, "blocks", offsetof(nsa_score, blocks), ROWS_QUERY, lists, width)->dtype =
                NSA_I32;
        if (of == LISTED)
            add_out(s, "scores", offsetof(nsa_score, scores), lists, width, NSA_REAL_DTYPE);
    } else {
        suite_add(s, "scores", offsetof(nsa_rank, scores), ROWS_QUERY, lists,
                  nsa_slc_count(d, d->tokens));
        add_out(s, "blocks", offsetof(nsa_rank, blocks), lists, width, NSA_I32);
    }
}

static const char *const kind_names[KINDS] = {"cmp",   "slc",  "win",   "dense", "compress",
                                              "whole", "rope", "merge", "gate",  "select",
                                              "score", "rank", "listed"};

static suite suite_of(const nsa_desc *d, const kind_options *o) {
    static const suite calls[KINDS] = {
        {.struct_size = sizeof(nsa_attend),
         .forward = attend_cmp_f,
         .backward = attend_cmp_b,
         .forward_size = cmp_fs,
         .backward_size = cmp_bs},
        {.struct_size = sizeof(nsa_attend),
         .forward = attend_slc_f,
         .backward = attend_slc_b,
         .forward_size = slc_fs,
         .backward_size = slc_bs},
        {.struct_size = sizeof(nsa_attend),
         .forward = attend_win_f,
         .backward = attend_win_b,
         .forward_size = win_fs,
         .backward_size = win_bs},
        {.struct_size = sizeof(nsa_attend),
         .forward = attend_dense_f,
         .backward = attend_dense_b,
         .forward_size = dense_fs,
         .backward_size = dense_bs},
        {.struct_size = sizeof(nsa_compress), .forward = compress_f, .forward_size = compress_fs},
        {.struct_size = sizeof(nsa_attention),
         .forward = attention_f,
         .forward_size = attention_fs},
        {.struct_size = sizeof(nsa_rope), .forward = rope_f, .backward = rope_b},
        {.struct_size = sizeof(nsa_merge), .forward = merge_f, .backward = merge_b},
        {.struct_size = sizeof(nsa_gate), .forward = gate_f, .backward = gate_b},
        {.struct_size = sizeof(nsa_select),
         .forward = select_blocks_f,
         .forward_size = select_blocks_fs},
        {.struct_size = sizeof(nsa_score),
         .forward = score_blocks_f,
         .forward_size = score_blocks_fs},
        {.struct_size = sizeof(nsa_rank),
         .forward = rank_queries_f,
         .forward_size = rank_queries_fs},
        {.struct_size = sizeof(nsa_score),
         .forward = score_blocks_forward_f,
         .forward_size = score_blocks_forward_fs},
    };
    suite s = calls[o->of];
    s.name = kind_names[o->of], s.options = o, s.configure = configure, s.prepare = random_lists;
    if (o->of <= DENSE) add_attend(&s, d, o->of);
    if (o->of == COMPRESS) compress_add(&s, &o->k, names, 0, 0);
    if (o->of == WHOLE_CHAIN) add_chain(&s, d, o);
    if (o->of == MERGE) add_merge(&s, d);
    if (o->of == GATE) add_gate(&s, d);
    if (o->of >= SELECT) add_lists(&s, d, o->of);
    if (o->of == ROPE) {
        add_in(&s, "x", offsetof(nsa_rope, x), ROWS_QUERY, d->heads, d->dim);
        add_out(&s, "out", offsetof(nsa_rope, out), d->heads, d->dim, DTYPE_UNDER_TEST);
    }
    return s;
}

/* ---- A batch: where each sequence is, and where its rows lie ---- */

/* The executor is slow. */
enum { SEQUENCES = CHECKS_CUDA ? 5 : 8, MOST_PAGES = 800 };

/* What is asked of a call; without RAGGED every sequence has the same queries. */
enum { RAGGED = 1, PAGED = 2, PACKED = 4 };

typedef struct batch {
    int mode, sequences, queries, cmp_rows;
    int most;          /* queries of a ragged sequence */
    nsa_desc d, whole; /* of the call; whole: sequences of whole.tokens, straight */
    int32_t firsts[SEQUENCES], counts[SEQUENCES], begins[SEQUENCES + 1];
    int length[SEQUENCES], row[SEQUENCES], cmp_row[SEQUENCES]; /* row: of its first query */
    int prefix; /* tokens that all sequences that have them share */
    int32_t table[SEQUENCES * MOST_PAGES];
} batch;

static int cmp_count(const nsa_desc *d, int tokens) {
    ref_desc r = ref_desc_of(d, tokens);
    return ref_cmp_count(&r, tokens);
}

/* A whole prompt, chunks, single tokens, one without queries, one that is empty. */
static void batch_positions(batch *g) {
    int T = g->whole.tokens;
    const int firsts[8] = {T / 3, T - 1, 0, T / 3, T / 2, 0, T - 3, T / 2},
              counts[8] = {T - T / 3, 1, T - 1, 0, 2, 0, 1, T / 4};
    g->sequences = SEQUENCES;
    for (int b = 0; b < SEQUENCES; b++) {
        int ragged = g->mode & RAGGED;
        g->firsts[b] = ragged ? firsts[b] : T / 3;
        g->counts[b] = ragged ? counts[b] : T / 2;
        g->length[b] = ragged ? firsts[b] + counts[b] : T;
        if (g->counts[b] > g->most) g->firsts[b] += g->counts[b] - g->most, g->counts[b] = g->most;
        if (g->mode & PACKED && g->length[b] && g->length[b] < T) g->length[b]++;
        if (g->mode & PACKED && b == 4) g->length[b] = T; /* many keys behind the last query */
        g->row[b] = ragged ? g->queries : 0;
        g->queries += g->counts[b];
        g->begins[b + 1] = g->begins[b] + g->length[b];
        g->cmp_row[b] = g->cmp_rows;
        g->cmp_rows += cmp_count(&g->whole, g->length[b]);
    }
}

/* Pages in an order of chance, those of the common prefix shared; behind a sequence's last there
   stands what is no page. */
static void batch_pages(batch *g, int page_tokens, uint64_t seed) {
    nsa_desc *d = &g->d;
    int shared = d->tokens / 3 / page_tokens, next = 0;
    d->pages = g->table, d->page_tokens = page_tokens;
    d->table_width = (d->tokens + page_tokens - 1) / page_tokens + 1;
    g->prefix = shared * page_tokens;
    int order[SEQUENCES * MOST_PAGES], n = SEQUENCES * d->table_width;
    for (int i = 0; i < n; i++) order[i] = i;
    for (int i = n - 1; i > 0; i--) {
        int j = check_below(i + 1, seed, (uint64_t)i), swap = order[i];
        order[i] = order[j], order[j] = swap;
    }
    int first_of[MOST_PAGES];
    for (int j = 0; j < shared; j++) first_of[j] = -1;
    for (int b = 0; b < g->sequences; b++)
        for (int j = 0; j < d->table_width; j++) {
            int32_t *to = &g->table[b * d->table_width + j];
            *to = -7;
            if (j * page_tokens >= g->length[b]) continue;
            int whole = j < shared && (j + 1) * page_tokens <= g->length[b];
            *to = whole && first_of[j] >= 0 ? first_of[j] : order[next++];
            if (whole) first_of[j] = *to;
        }
    d->page_count = n;
}

static void batch_make(batch *g, const nsa_desc *of, int mode, int page_tokens, uint64_t seed) {
    memset(g, 0, sizeof *g);
    g->mode = mode;
    g->whole = *of;
    g->whole.batch = SEQUENCES;
    g->d = g->whole;
    g->most = mode & RAGGED && seed % 2 == 0 ? 3 : of->tokens - 1; /* a step, or prompts too */
    if (of->count < g->most) g->most = of->count, g->whole.count = of->tokens;
    batch_positions(g);
    /* of a ragged batch `first` is not used */
    g->d.first = mode & RAGGED ? 1 : g->firsts[0],
    g->d.count = mode & RAGGED ? g->most : g->counts[0];
    if (mode & RAGGED) g->d.firsts = g->firsts, g->d.counts = g->counts;
    if (mode & PACKED) g->d.begins = g->begins;
    if (seed / 2 % 2) g->d.rows = g->begins[g->sequences]; /* known, and elsewhere not */
    if (mode & PAGED) batch_pages(g, page_tokens, seed);
}

/* A tensor on the query's side, or of keys, as the call wants it. */
static tensor batch_tensor(const batch *g, const slot *t, layout form, nsa_dtype dtype) {
    const nsa_desc *d = &g->d;
    int cmp = t->rows == ROWS_CMP, packed = t->rows == ROWS_QUERY ? g->mode & RAGGED : 0;
    if (t->rows == ROWS_PARAMETER) return slot_tensor(t, form, dtype, d, 3);
    if (t->rows != ROWS_QUERY && g->mode & PAGED)
        return tensor_new(t->name, form, dtype, d->page_count,
                          cmp ? d->page_tokens / d->cmp_stride : d->page_tokens, t->heads, t->width,
                          1);
    if (!packed && !(g->mode & PACKED))
        return tensor_new(t->name, form, dtype, d->batch, cmp ? cmp_count(d, d->tokens) : d->tokens,
                          t->heads, t->width, 1);
    int rows = packed ? g->queries : cmp ? g->cmp_rows : g->begins[g->sequences];
    tensor x = tensor_new(t->name, form, dtype, 1, rows, t->heads, t->width, 1);
    x.view.batch = 12345;
    return x;
}

/* Where row `row` of sequence b lies: of the query's side query `row`, else token or block. */
static unsigned char *batch_at(const batch *g, const slot *t, const tensor *x, int b, int row,
                               int head, int c) {
    const nsa_desc *d = &g->d;
    int cmp = t->rows == ROWS_CMP;
    if (t->rows == ROWS_QUERY && g->mode & RAGGED)
        return tensor_at(x, 0, g->row[b] + row - g->firsts[b], head, c);
    if (t->rows != ROWS_QUERY && g->mode & PAGED) {
        int token = cmp ? row * d->cmp_stride + d->cmp_block - 1 : row;
        int page = g->table[b * d->table_width + token / d->page_tokens];
        int in_page = token % d->page_tokens;
        return tensor_at(x, page, cmp ? in_page / d->cmp_stride : in_page, head, c);
    }
    if (!(g->mode & PACKED)) return tensor_at(x, b, row, head, c);
    return tensor_at(x, 0, (cmp ? g->cmp_row[b] : g->begins[b]) + row, head, c);
}

/* Rows of slot t that sequence b has: those computed or, with `all`, those that are there. */
static void batch_rows(const batch *g, const slot *t, int b, int all, int *begin, int *end) {
    int first = g->firsts[b], last = g->length[b];
    *begin = t->rows == ROWS_QUERY ? first : 0;
    *end = t->rows == ROWS_QUERY ? first + g->counts[b] : last;
    if (t->rows != ROWS_CMP) return;
    *end = cmp_count(&g->whole, last);
    if (!all && g->mode & RAGGED) *begin = cmp_count(&g->whole, first);
}

/* ---- Each sequence alone, and all in one call ---- */

typedef struct alone {
    suite_bits of[SEQUENCES];
} alone;

/* The values of one sequence: pointers into those of all. */
static values values_at(const suite *s, const batch *g, const values *v, int b) {
    plan p = plan_of(&g->whole);
    values one;
    memset(&one, 0, sizeof one);
    for (int i = 0; i < s->count; i++) {
        one.x[i] = v->x[i] + slot_begin(&s->slots[i], &p, b);
        if (v->dx[i]) one.dx[i] = v->dx[i] + slot_begin(&s->slots[i], &p, b);
    }
    return one;
}

static nsa_desc desc_alone(const batch *g, int b) {
    nsa_desc d = g->whole;
    d.batch = 1, d.tokens = g->length[b], d.first = g->firsts[b], d.count = g->counts[b];
    return d;
}

#ifndef CHECK_RACES
static alone run_alone(const suite *s, const batch *g, const values *v, nsa_dtype dtype) {
    alone a;
    memset(&a, 0, sizeof a);
    for (int b = 0; b < g->sequences; b++) {
        nsa_desc d = desc_alone(g, b);
        values one = values_at(s, g, v, b);
        if (d.tokens) a.of[b] = bits_of(s, &d, &one, dtype, 0);
    }
    return a;
}
#endif

/* What stands in row `row` of the bits of a sequence alone. */
static const unsigned char *bits_row(const unsigned char *bits, const slot *t, int row, int head,
                                     nsa_dtype dtype) {
    return bits + (size_t)((row * t->heads + head) * t->width) * dtype_size(dtype);
}

/* Inputs, and of compressed rows those of earlier calls. */
static void fill(const suite *s, const batch *g, const slot *t, tensor *x, const double *dense,
                 const alone *a, nsa_dtype dtype) {
    plan p = plan_of(&g->whole);
    int i = (int)(t - s->slots), begin, end, none;
    if (t->rows == ROWS_PARAMETER) {
        tensor_put(x, dense);
        return;
    }
    for (int b = 0; b < g->sequences; b++) {
        const double *of = dense + slot_begin(t, &p, b);
        batch_rows(g, t, b, 1, &begin, &end);
        if (t->output && a) batch_rows(g, t, b, 0, &end, &none);
        for (int row = begin; row < end; row++)
            for (int head = 0; head < t->heads; head++)
                for (int c = 0; c < t->width; c++) {
                    unsigned char *to = batch_at(g, t, x, b, row, head, c);
                    if (t->output && a)
                        memcpy(to,
                               bits_row(a->of[b].x[i], t, row, head, dtype) +
                                   (size_t)c * dtype_size(dtype),
                               dtype_size(dtype));
                    else
                        element_put(dtype, to, of[(row * t->heads + head) * t->width + c]);
                }
    }
}

static void open_rows(const batch *g, const slot *t, const tensor *x, int all) {
    int begin, end;
    for (int b = 0; b < g->sequences; b++) {
        batch_rows(g, t, b, all, &begin, &end);
        for (int row = begin; row < end; row++)
            for (int head = 0; head < t->heads; head++)
                guarded_open(x->memory, batch_at(g, t, x, b, row, head, 0),
                             (size_t)t->width * dtype_size(x->view.dtype));
    }
}

static void compare_rows(const batch *g, const slot *t, const tensor *x, const unsigned char *want,
                         int b) {
    int begin, end, wrong = -1;
    size_t bytes = (size_t)t->width * dtype_size(x->view.dtype);
    batch_rows(g, t, b, !t->output, &begin, &end);
    for (int row = begin; want && row < end; row++)
        for (int head = 0; head < t->heads; head++)
            if (memcmp(batch_at(g, t, x, b, row, head, 0),
                       bits_row(want, t, row, head, x->view.dtype), bytes))
                wrong = row;
    CHECK(wrong < 0, "%s: row %d of sequence %d has other bits than alone", t->name, wrong, b);
}

/* Every tensor in another layout, among poison. */
static void batch_instance(instance *p, const suite *s, const batch *g, const values *v,
                           const alone *a, nsa_dtype dtype, int form) {
    memset(p, 0, sizeof *p);
    p->s = s, p->d = g->d;
    s->configure(s, instance_x(p)), s->configure(s, instance_dx(p));
    values zeros = values_zero(s, &g->whole);
    for (int i = 0; i < s->count; i++) {
        const slot *t = &s->slots[i];
        nsa_dtype own = slot_dtype(t, dtype);
        int first = t->rows == ROWS_QUERY && !(g->mode & RAGGED) ? g->d.first : 0;
        p->x[i] = batch_tensor(g, t, (layout)((form + i) % LAYOUTS), own);
        if (!t->output || t->rows == ROWS_CMP) fill(s, g, t, &p->x[i], v->x[i], a, own);
        *slot_view(t, instance_x(p)) = view_from(p->x[i].view, 0, first, 0);
        if (t->shared) slot_view(t, instance_x(p))->head = 0;
        if (!t->gradient || !s->backward) continue;
        p->dx[i] = batch_tensor(g, t, (layout)((form + i + 1) % LAYOUTS), own);
        fill(s, g, t, &p->dx[i], t->output ? v->dx[i] : zeros.x[i], NULL, own);
        *slot_view(t, instance_dx(p)) = view_from(p->dx[i].view, 0, first, 0);
    }
    values_free(&zeros);
}

/* All sequences in one call. */
static void run_batch(instance *p, const suite *s, const batch *g, const values *v, const alone *a,
                      nsa_dtype dtype, int form) {
    batch_instance(p, s, g, v, a, dtype, form);
    size_t bytes = s->forward_size ? s->forward_size(instance_x(p), &p->d) : 0;
    guarded *w = workspace_new(bytes, 1);
    for (int i = 0; i < s->count; i++)
        if (s->slots[i].output) open_rows(g, &s->slots[i], &p->x[i], 0);
    guards_freeze();
    nsa_status status = s->forward(instance_x(p), &p->d, w->data, bytes);
    guards_verify("forward");
    guards_close();
    guarded_drop(); /* the workspace */
    CHECK_OK("forward", status);
    if (!s->backward || g->mode & PAGED) return;
    bytes = s->backward_size ? s->backward_size(instance_dx(p), instance_x(p), &p->d) : 0;
    w = workspace_new(bytes, 1);
    for (int i = 0; i < s->count; i++)
        if (s->slots[i].gradient && !s->slots[i].output) open_rows(g, &s->slots[i], &p->dx[i], 1);
    guards_freeze();
    status = s->backward(instance_dx(p), instance_x(p), &p->d, w->data, bytes);
    guards_verify("backward");
    guards_close();
    guarded_drop(); /* the workspace */
    CHECK_OK("backward", status);
}

/* Tokens of the common prefix have the rows of the longest sequence. */
static void share_prefix(const suite *s, const batch *g, values *v) {
    plan p = plan_of(&g->whole);
    for (int i = 0; i < s->count; i++) {
        const slot *t = &s->slots[i];
        int rows = t->rows == ROWS_CMP ? cmp_count(&g->whole, g->prefix) : g->prefix;
        if (t->rows != ROWS_KEY && t->rows != ROWS_CMP) continue;
        for (int b = 1; b < g->sequences; b++)
            memcpy(v->x[i] + slot_begin(t, &p, b), v->x[i],
                   (size_t)(rows * t->heads * t->width) * sizeof(double));
    }
}

/* ---- The dense reference, which shares no code ---- */

/* Out and lse of one sequence's queries. */
static void reference_rows(const suite *s, const batch *g, const values *v, int b, kind of,
                           ref_prec prec, double *out, double *lse) {
    nsa_desc d = desc_alone(g, b);
    ref_desc r = ref_desc_of(&d, d.tokens);
    values one = values_at(s, g, v, b);
    int lists = list_heads_of(&d) * nsa_block_list_width(&d);
    int32_t *blocks = (int32_t *)check_alloc((size_t)(d.tokens * lists) * sizeof *blocks);
    for (int i = 0; of == SLC && i < d.tokens * lists; i++) blocks[i] = (int32_t)one.x[5][i];
    unsigned char *mask = of == CMP   ? ref_mask_cmp(&r)
                          : of == SLC ? ref_mask_slc(&r, blocks)
                          : of == WIN ? ref_mask_win(&r)
                                      : ref_mask_dense(&r);
    ref_attend x = {prec,     d.tokens,   of == CMP ? ref_cmp_count(&r, d.tokens) : d.tokens,
                    d.heads,  d.kv_heads, d.dim,
                    d.dim_v,  r.scale,    mask,
                    one.x[0], one.x[1],   one.x[2],
                    out,      lse,        of == SLC ? list_heads_of(&d) : 0};
    ref_attend_forward(&x);
    free(mask), free(blocks);
}

static void check_reference(const instance *p, const batch *g, const values *v, kind of,
                            nsa_dtype dtype) {
    const suite *s = p->s;
    for (int b = 0; b < g->sequences; b++) {
        const slot *t = &s->slots[3];
        size_t all = (size_t)(g->length[b] * t->heads), first = (size_t)(g->firsts[b] * t->heads),
               rows = (size_t)(g->counts[b] * t->heads), wide = (size_t)t->width;
        double *want = ref_zeros(all * wide), *plain = ref_zeros(all * wide),
               *got = ref_zeros(rows * wide), *lse = ref_zeros(all);
        if (rows) reference_rows(s, g, v, b, of, REF_F64, want, lse);
        if (rows) reference_rows(s, g, v, b, of, dtype_prec(dtype), plain, lse);
        for (size_t i = 0; i < rows * wide; i++) {
            int row = (int)(i / wide) / t->heads, head = (int)(i / wide) % t->heads;
            got[i] = element_get(
                dtype, batch_at(g, t, &p->x[3], b, g->firsts[b] + row, head, (int)(i % wide)));
        }
        const double *w = want + first * wide, *f = plain + first * wide;
        CHECK_NEAR("out", got, w, rows * wide, wide, allowed_error(2, w, f, rows * wide));
        free(want), free(plain), free(got), free(lse);
    }
}

static void test_batch(const nsa_desc *of, const kind_options *o, int mode, int page_tokens,
                       nsa_dtype dtype, int turn) {
    static batch g;
    nsa_desc d = *of;
    instance p;
    d.threads = 1 + turn % 3;
    batch_make(&g, &d, mode, page_tokens, 40 + (uint64_t)turn);
    suite s = suite_of(&g.whole, o);
    values v = values_random(&s, &g.whole, dtype, 50 + (uint64_t)turn);
    share_prefix(&s, &g, &v);
    check_case("%s%s%s%s, H %d, D %d, l %d, pages of %d, %s, turn %d", s.name,
               mode & RAGGED ? ", ragged" : "", mode & PAGED ? ", paged" : "",
               mode & PACKED ? ", packed" : "", d.heads, d.dim, d.cmp_block, page_tokens,
               dtype_name(dtype), turn);
#ifdef CHECK_RACES /* bits are for the other builds: that one looks at accesses, and is slow */
    alone a;
    memset(&a, 0, sizeof a);
    run_batch(&p, &s, &g, &v, NULL, dtype, turn);
#else
    alone a = run_alone(&s, &g, &v, dtype);
    /* compression alone reads no row of earlier calls, and leaves them whatever they hold */
    run_batch(&p, &s, &g, &v, o->of == COMPRESS ? NULL : &a, dtype, turn);
#endif
    for (int i = 0; i < s.count; i++)
        for (int b = 0; b < g.sequences; b++) {
            if (s.slots[i].output)
                compare_rows(&g, &s.slots[i], &p.x[i], a.of[b].x[i], b);
            else if (p.dx[i].memory && !(mode & PAGED) && s.slots[i].rows != ROWS_PARAMETER)
                compare_rows(&g, &s.slots[i], &p.dx[i], a.of[b].dx[i], b);
        }
    if (o->of <= DENSE && d.tokens < 300) check_reference(&p, &g, &v, o->of, dtype);
    for (int b = 0; b < g.sequences; b++) bits_free(&a.of[b]);
    values_free(&v);
    guards_free();
}

/* ---- Refusals: which sequence, which slot, why ---- */

typedef struct bad_array {
    const char *field, *reason;
    int kind, at, slot; /* at: of firsts, counts or the table */
    int32_t value;
} bad_array;

static const bad_array bad_arrays[] = {
    {"firsts", "first below 0", NSA_ERROR_RANGE, 2, 0, -1},
    {"firsts", "first below 0", NSA_ERROR_RANGE, 0, 0, INT32_MIN},
    {"counts", "count below 0", NSA_ERROR_RANGE, 1, 0, -1},
    {"counts", "count above desc.count", NSA_ERROR_RANGE, 2, 0, 31},
    {"counts", "count above desc.count", NSA_ERROR_RANGE, 2, 0, INT32_MAX},
    {"counts", "queries behind the last token", NSA_ERROR_RANGE, 1, 0, 30},
    {"pages", "not a page", NSA_ERROR_PAGES, 0, 0, -1},
    {"pages", "not a page", NSA_ERROR_PAGES, 7, 2, 20},
    {"pages", "not a page", NSA_ERROR_PAGES, 7, 2, INT32_MAX},
};

static void expect_fault(const nsa_desc *d, const bad_array *bad, int sequence) {
    nsa_page_fault fault = {-7, -7, -7, "nothing"};
    nsa_status s = nsa_check_pages(d, &fault);
    CHECK(nsa_status_kind(s) == bad->kind && !strcmp(nsa_status_where(s), bad->field),
          "%s at \"%s\"", nsa_status_name(s), nsa_status_where(s));
    CHECK(fault.sequence == sequence && fault.slot == bad->slot && fault.value == bad->value &&
              !strcmp(fault.reason, bad->reason),
          "sequence %d, slot %d, value %d: %s", fault.sequence, fault.slot, fault.value,
          fault.reason);
    CHECK(nsa_desc_check(d) == s, "nsa_desc_check says %s", nsa_status_name(nsa_desc_check(d)));
    if (!CHECKS_CUDA) /* there a size hangs on no array */
        CHECK(nsa_attend_win_forward_workspace_size(d) == 0, "a workspace is sized");
}

/* Three sequences in pages of 16, tables of five slots: 3 + 30, 60 + 1 and 0 + 17 tokens of 64. */
static void test_faults(void) {
    static const int32_t good_table[] = {4, 9, 1, -1, -1, 4, 9, 2, 3, -1, 19, 0, -1, -1, -1};
    int32_t firsts[] = {3, 60, 0}, counts[] = {30, 1, 17}, table[15];
    nsa_desc d = nsa_desc_default(3, 64, 4, 2, 16);
    memcpy(table, good_table, sizeof table);
    d.count = 30;
    d.firsts = firsts, d.counts = counts, d.pages = table;
    d.table_width = 5, d.page_tokens = 16, d.page_count = 20;
    check_case("a table as it should be");
    CHECK(nsa_check_pages(&d, NULL) == NSA_OK, "refused");
    for (int i = 0; i < COUNT(bad_arrays); i++) {
        const bad_array *bad = &bad_arrays[i];
        int32_t *into = bad->field[0] == 'f' ? firsts : bad->field[0] == 'c' ? counts : table;
        int32_t good = into[bad->at];
        check_case("%s[%d] = %d", bad->field, bad->at, bad->value);
        into[bad->at] = bad->value;
        expect_fault(&d, bad, into == table ? bad->at / d.table_width : bad->at);
        into[bad->at] = good;
    }
    const bad_array narrow = {
        "pages", "more tokens than the table has pages for", NSA_ERROR_PAGES, 0, 0, 3};
    check_case("two faults");
    firsts[2] = counts[1] = -1;
    expect_fault(&d, &bad_arrays[2], 1);
    firsts[2] = 0, counts[1] = 1;
    check_case("a table of three slots");
    d.table_width = 3;
    expect_fault(&d, &narrow, 1);
    d.table_width = 5;
    nsa_page_fault untouched = {-7, -7, -7, "nothing"};
    check_case("firsts without counts, and the other way round");
    d.counts = NULL;
    CHECK(nsa_check_pages(&d, &untouched) != NSA_OK && untouched.sequence == -7, "a fault");
    CHECK(!strcmp(nsa_status_where(nsa_desc_check(&d)), "counts"), "blames another field");
    d.counts = counts, d.firsts = NULL;
    CHECK(!strcmp(nsa_status_where(nsa_desc_check(&d)), "firsts"), "blames another field");
}

/* Packed sequences: what is wrong with begins comes before what is wrong with counts. */
static void test_begins(void) {
    static const int32_t begins[][4] = {
        {0, 20, 10, 30}, {-1, 5, 10, 20}, {0, 5, 70, 75}, {0, 5, 40, 60}};
    static const char *const fields[] = {"begins", "begins", "begins", "rows"};
    static const int32_t firsts[] = {-1, 0, 0}, counts[] = {1, 1, 1};
    nsa_desc d = nsa_desc_default(3, 64, 4, 2, 16);
    d.rows = 59, d.count = 1, d.firsts = firsts, d.counts = counts;
    for (int i = 0; i < COUNT(begins); i++) {
        d.begins = begins[i];
        nsa_status s = nsa_check_pages(&d, NULL);
        check_case("begins %d, %d, %d, %d", begins[i][0], begins[i][1], begins[i][2], begins[i][3]);
        CHECK(nsa_status_kind(s) == NSA_ERROR_BEGINS && !strcmp(nsa_status_where(s), fields[i]),
              "%s at \"%s\"", nsa_status_name(s), nsa_status_where(s));
    }
}

/* What has no backward, which is of no size, and a cache, name the field. */
static void test_not_computed(void) {
    static const int32_t zeros[] = {0, 0}, table[] = {0, 0};
    static const struct {
        kind of;
        int ragged;
        const char *field;
    } calls[] = {{CMP, 0, "pages"},       {SLC, 0, "pages"},         {WIN, 0, "pages"},
                 {DENSE, 0, "pages"},     {COMPRESS, 0, "pages"},    {WHOLE_CHAIN, 0, "pages"},
                 {COMPRESS, 1, "firsts"}, {WHOLE_CHAIN, 1, "firsts"}};
    for (int i = 0; i < COUNT(calls); i++) {
        nsa_desc d = nsa_desc_default(2, 0, 4, 2, 16);
        double x[256] = {0};
        nsa_attention *chain = (nsa_attention *)(void *)x;
        nsa_compress *phi = (nsa_compress *)(void *)x;
        d.table_width = 1, d.page_tokens = 16, d.page_count = 0;
        if (calls[i].ragged)
            d.firsts = d.counts = zeros;
        else
            d.pages = table;
        if (calls[i].of == COMPRESS) phi->dim = 16;
        if (calls[i].of == WHOLE_CHAIN) chain->k_cmp.dim = chain->v_cmp.dim = 16;
        nsa_status s = calls[i].of == CMP        ? attend_cmp_b(x, x, &d, x, 0)
                       : calls[i].of == SLC      ? attend_slc_b(x, x, &d, x, 0)
                       : calls[i].of == WIN      ? attend_win_b(x, x, &d, x, 0)
                       : calls[i].of == DENSE    ? attend_dense_b(x, x, &d, x, 0)
                       : calls[i].of == COMPRESS ? compress_b(x, x, &d, x, 0)
                                                 : attention_b(x, x, &d, x, 0);
        check_case("backward of %s with %s", kind_names[calls[i].of], calls[i].field);
        CHECK(nsa_status_kind(s) == NSA_ERROR_OPTION &&
                  !strcmp(nsa_status_where(s), calls[i].field),
              "%s at \"%s\"", nsa_status_name(s), nsa_status_where(s));
        const size_t bytes = calls[i].of == CMP     ? cmp_bs(x, x, &d)
                             : calls[i].of == SLC   ? slc_bs(x, x, &d)
                             : calls[i].of == WIN   ? win_bs(x, x, &d)
                             : calls[i].of == DENSE ? dense_bs(x, x, &d)
                             : calls[i].of == COMPRESS
                                 ? nsa_compress_backward_workspace_size(phi, &d)
                                 : nsa_attention_backward_workspace_size(chain, chain, &d);
        CHECK(bytes == 0, "a workspace of %zu bytes", bytes);
        nsa_cache cache;
        s = nsa_cache_init(&cache, &d, NSA_F32, 0, x, sizeof x);
        CHECK(nsa_status_kind(s) == NSA_ERROR_OPTION &&
                  !strcmp(nsa_status_where(s), calls[i].field),
              "a cache: %s at \"%s\"", nsa_status_name(s), nsa_status_where(s));
    }
}

/* ---- Memory: a ragged batch takes what its longest sequence takes ---- */

static void test_workspace(void) {
    enum { B = 64, ROWS = 65536, LONGEST = 16384, PAGE = 64 };
    static int32_t firsts[B], counts[B], table[B * LONGEST / PAGE];
    nsa_desc one = nsa_desc_default(1, ROWS, 16, 4, 64),
             d = nsa_desc_default(B, LONGEST, 16, 4, 64);
    nsa_attention x;
    memset(&x, 0, sizeof x);
    one.threads = d.threads = 4;
    x.k_cmp.dim = x.v_cmp.dim = 64;
    counts[0] = LONGEST;
    for (int b = 1; b < B; b++) counts[b] = (ROWS - LONGEST) / (B - 1);
    d.firsts = firsts, d.counts = counts, d.rows = ROWS;
    d.pages = table, d.page_tokens = PAGE, d.table_width = LONGEST / PAGE, d.page_count = 1;
    check_case("workspace of %d rows in %d sequences", ROWS, B);
    const struct {
        const char *name;
        size_t ragged, alone;
    } sizes[] = {
        {"whole", nsa_attention_forward_workspace_size(&x, &d),
         nsa_attention_forward_workspace_size(&x, &one)},
        {"cmp", nsa_attend_cmp_forward_workspace_size(&d),
         nsa_attend_cmp_forward_workspace_size(&one)},
        {"slc", nsa_attend_slc_forward_workspace_size(&d),
         nsa_attend_slc_forward_workspace_size(&one)},
        {"win", nsa_attend_win_forward_workspace_size(&d),
         nsa_attend_win_forward_workspace_size(&one)},
        {"dense", nsa_attend_dense_forward_workspace_size(&d),
         nsa_attend_dense_forward_workspace_size(&one)},
        {"select", nsa_select_blocks_workspace_size(&d), nsa_select_blocks_workspace_size(&one)}};
    for (int i = 0; i < COUNT(sizes); i++) {
        /* some kilobytes on CUDA: words of bits that belong to one sequence */
        double room = CHECKS_CUDA && sizes[i].alone < 65536 ? 65536 : 0;
        printf("workspace of %s: %zu bytes, of one sequence of as many rows %zu\n", sizes[i].name,
               sizes[i].ragged, sizes[i].alone);
        CHECK(!sizes[i].ragged == !sizes[i].alone &&
                  (double)sizes[i].ragged <= 1.3 * (double)sizes[i].alone + room,
              "%s: %zu bytes, of one sequence of as many rows %zu", sizes[i].name, sizes[i].ragged,
              sizes[i].alone);
    }
}

/* ---- Arrays that hold anything, on CUDA: no kernel leaves its views for them ---- */

static void test_any_arrays(kind of, int turn) {
    static batch g;
    static int32_t firsts[SEQUENCES], counts[SEQUENCES], table[SEQUENCES * MOST_PAGES];
    nsa_desc d = desc_of(shape("small"));
    kind_options o = {of,
                      {(nsa_phi)(turn % 3), d.dim, 8, 0, 0, d.kv_heads, d.cmp_block},
                      {(nsa_phi)(turn % 3), d.dim_v, 8, 0, 0, d.kv_heads, d.cmp_block}};
    batch_make(&g, &d, RAGGED | PAGED, 3 * d.cmp_stride, 43);
    suite s = suite_of(&g.whole, &o);
    values v = values_random(&s, &g.whole, NSA_F32, 60);
    instance p;
    g.d.rows = g.queries; /* rows end here, whatever counts hold */
    batch_instance(&p, &s, &g, &v, NULL, NSA_F32, turn);
    for (int b = 0; b < SEQUENCES; b++) {
        int32_t wild[] = {INT32_MIN, INT32_MAX, -1, check_below(90, 61, (uint64_t)b)};
        firsts[b] = wild[check_below(4, 62 + (uint64_t)turn, (uint64_t)b)];
        counts[b] = wild[check_below(4, 63 + (uint64_t)turn, (uint64_t)b)];
        if (turn % 2) /* the first sequence's count leaves no rows to the others */
            firsts[b] = 0, counts[b] = b ? 3 : INT32_MAX;
    }
    for (int i = 0; i < SEQUENCES * g.d.table_width; i++)
        table[i] = check_below(2, 64, (uint64_t)i) ? g.table[i] : i % 3 ? INT32_MAX : INT32_MIN;
    g.d.firsts = firsts, g.d.counts = counts, g.d.pages = table;
    if (turn % 2 == 0) g.d.table_width = 1; /* for fewer tokens than there are */
    p.d = g.d;
    check_case("%s, any arrays, turn %d", s.name, turn);
    size_t bytes = s.forward_size ? s.forward_size(instance_x(&p), &p.d) : 0;
    CHECK_OK("forward", s.forward(instance_x(&p), &p.d, workspace_new(bytes, 1)->data, bytes));
    values_free(&v);
    guards_free();
}

/* ---- What runs ---- */

#ifdef CHECK_CUDA
static const char *const shapes[] = {"T 34", "small", "T > w, one block more"};
#else
static const char *const shapes[] = {"small", "T > w, one block more", "D 7 / 13", "T < l",
                                     "blocks of 2"};
#endif

/* phi of k and v, other ones in turn. */
static kind_options options_of(kind of, const nsa_desc *d, int turn) {
    const nsa_phi phi = (nsa_phi)(turn % 3), other = (nsa_phi)((turn + 1) % 3);
    kind_options o = {
        of,
        {phi, d->dim, CHECKS_CUDA ? 8 : 5, turn % 2, 0, d->kv_heads, d->cmp_block},
        {other, d->dim_v, CHECKS_CUDA ? 16 : 6, 0, turn % 2, d->kv_heads, d->cmp_block}};
    if (of == ROPE) o.k.heads = d->heads;
    return o;
}

int main(int argc, char **argv) {
    static const int modes[] = {RAGGED | PAGED, RAGGED, PAGED, RAGGED | PAGED | PACKED,
                                RAGGED | PACKED};
    int step = asked_step(argc, argv, CHECKS_CUDA ? 3 : 2, 4), turn = 0;
    for (int of = 0; CHECKS_CUDA && of < KINDS; of++) /* gate, merge and rope read no page */
        /* compressed rows of two sequences may then be one, which the checker calls a race */
        if (of != MERGE && of != GATE && of != ROPE && (ANY_BEGINS || of <= WIN || of == SELECT))
            test_any_arrays((kind)of, of);
    for (int i = 0; i < COUNT(shapes); i += step)
        for (int of = 0; of < KINDS; of++)
            for (int m = 0; m < COUNT(modes); m++) {
                nsa_desc d = desc_of(shape(shapes[i]));
                int pages[] = {d.cmp_stride, 3 * d.cmp_stride, 16 * d.cmp_stride};
                kind_options o = options_of((kind)of, &d, turn);
                if ((i / step + of + m) % 2 || (of == ROPE && d.dim % 2)) continue;
#ifdef CHECK_RACES /* minutes; ranking has a thread block for each query */
                if (m > 1 || of >= SCORE) continue;
#endif
                if (of == SLC && m % 2) d.list_heads = d.heads;
                test_batch(&d, &o, modes[m], pages[turn / 2 % 3], dtypes[turn % COUNT(dtypes)],
                           turn);
                turn++;
            }
    /* Keys without a query, behind firsts: their blocks are completed too. */
    for (int phi = 0; phi < 3; phi++) {
        nsa_desc d = desc_of(shape(shapes[0]));
        const kind_options o = options_of(COMPRESS, &d, phi);
        d.count = 0;
        test_batch(&d, &o, RAGGED | PACKED, d.cmp_stride, dtypes[0], phi);
    }
    /* Pages that are no parts of a tile, whose rows are read in place. */
    for (int of = SLC; !CHECKS_CUDA && of <= DENSE; of++) {
        nsa_desc d = desc_of(shape("small"));
        kind_options o = options_of((kind)of, &d, 0);
        test_batch(&d, &o, RAGGED | PAGED, 3 * d.cmp_stride, NSA_REAL_DTYPE, 0);
    }
#ifndef CHECK_CUDA
    /* Listed blocks that go on in another page, where keys are counted along a list. */
    nsa_desc listed = desc_of(shape("blocks of 2"));
    listed.slc_block = 6;
    const kind_options slc = options_of(SLC, &listed, 0);
    test_batch(&listed, &slc, RAGGED | PAGED, 8, NSA_REAL_DTYPE, 0);
#endif
#if defined(CHECK_CUDA) && !defined(CHECK_RACES)
    /* Whole tiles of keys, which sm_90a copies otherwise where they are in no pages; selection. */
    nsa_desc whole = desc_of(shape("T > w, one block more"));
    const kind_options dense = options_of(DENSE, &whole, 0);
    test_batch(&whole, &dense, PAGED, 3 * whole.cmp_stride, dtypes[1], 0);
    const kind_options select = options_of(SELECT, &whole, 0);
    test_batch(&whole, &select, PAGED, 3 * whole.cmp_stride, dtypes[1], 0);
#endif
    test_faults();
    test_begins();
    test_not_computed();
    test_workspace();
    return check_done("test_pages");
}

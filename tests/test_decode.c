/* test_decode.c - the decoding cache: random schedules of append, chunk, guess, rewind and fork
   give the bits of the whole sequence's forward.
   Twin: section Decoding of nsa.h; with CHECK_CUDA, kernels/decode.cuh, whose block numbers are
   those of the whole, and whose outputs are sums in another order. With CHECK_INSIDE it calls
   what nsa_decode calls. Not here: whether that forward is right (test_attention.c). */
#ifdef CHECK_INSIDE
#define NSA_IMPLEMENTATION
#define NSA_STATIC
#endif
#include "harness/check.h"
#include "nsa.h"

#ifdef CHECK_CUDA
#include "harness/decode_device.h"
#endif

enum { CONTENTS = 3, SEQUENCES = 3, MOST = 256, INPUTS = 8 };

/* One sequence's rows, and what the whole forward makes of them. */
typedef struct content {
    nsa_attention x;
    void *memory[40];
    int used;
} content;

typedef struct geometry {
    const char *name;
    int heads, kv_heads, dim, dim_v, l, d, slc, n, w, max_rewind;
    nsa_phi phi;
    nsa_dtype dtype;
    nsa_window_rule window_rule;
} geometry;

#ifdef CHECK_CUDA
enum { HIDDEN = 16 };
#ifdef NSA_CUDA_NO_F16
#define OTHER_HALF NSA_BF16
#else
#define OTHER_HALF NSA_F16
#endif
static const geometry geometries[] = {
    {"mean, f32, d 1", 4, 2, 16, 16, 8, 1, 16, 4, 20, 9, NSA_PHI_MEAN, NSA_F32,
     NSA_WINDOW_COUNTS_SELF},
    {"conv, bf16, w + 1", 3, 1, 24, 8, 8, 8, 8, 3, 5, 3, NSA_PHI_CONV, NSA_BF16,
     NSA_WINDOW_BEFORE_SELF},
    {"mlp, f16, l = l', d 1", 2, 2, 8, 16, 16, 1, 16, 3, 33, 17, NSA_PHI_MLP, OTHER_HALF,
     NSA_WINDOW_COUNTS_SELF},
    {"one token at a time, no rewind", 16, 1, 16, 16, 4, 2, 4, 9, 7, 0, NSA_PHI_MLP, NSA_F32,
     NSA_WINDOW_COUNTS_SELF},
    {"window and room beyond all, 12 heads to a group", 12, 1, 16, 16, 16, 1, 64, 9, 1000, 130,
     NSA_PHI_CONV, NSA_F32, NSA_WINDOW_COUNTS_SELF},
    {"80 heads to a group", 80, 1, 8, 8, 8, 2, 8, 4, 40, 3, NSA_PHI_MEAN, NSA_BF16,
     NSA_WINDOW_COUNTS_SELF},
    {"16 heads to a group, bf16", 16, 1, 16, 16, 4, 2, 4, 9, 7, 2, NSA_PHI_MEAN, NSA_BF16,
     NSA_WINDOW_COUNTS_SELF},
};
#else
enum { HIDDEN = 10 };
static const geometry geometries[] = {
    {"mean, f32", 4, 2, 16, 16, 8, 4, 16, 4, 20, 9, NSA_PHI_MEAN, NSA_F32, NSA_WINDOW_COUNTS_SELF},
    {"conv, bf16, w + 1", 3, 1, 24, 8, 8, 8, 8, 3, 5, 3, NSA_PHI_CONV, NSA_BF16,
     NSA_WINDOW_BEFORE_SELF},
    {"mean, bf16, read where it lies", 6, 2, 16, 32, 8, 4, 16, 4, 20, 9, NSA_PHI_MEAN, NSA_BF16,
     NSA_WINDOW_COUNTS_SELF},
    {"mlp, f16, l = l'", 2, 2, 8, 12, 12, 4, 12, 3, 33, 17, NSA_PHI_MLP, NSA_F16,
     NSA_WINDOW_COUNTS_SELF},
    {"one token at a time, no rewind", 16, 1, 16, 16, 4, 2, 8, 5, 7, 0, NSA_PHI_MLP, NSA_F32,
     NSA_WINDOW_COUNTS_SELF},
    {"D 576 / 512, bf16", 5, 1, 576, 512, 8, 4, 16, 3, 20, 4, NSA_PHI_MEAN, NSA_BF16,
     NSA_WINDOW_COUNTS_SELF},
    {"D 320 / 200, f32", 3, 1, 320, 200, 8, 4, 16, 3, 20, 4, NSA_PHI_MEAN, NSA_F32,
     NSA_WINDOW_COUNTS_SELF},
    {"window and room beyond all", 2, 1, 16, 16, 16, 4, 64, 9, 1000, 130, NSA_PHI_CONV, NSA_F32,
     NSA_WINDOW_COUNTS_SELF},
    {"single tokens, bf16", 16, 1, 16, 32, 1, 1, 1, 9, 20, 9, NSA_PHI_MEAN, NSA_BF16,
     NSA_WINDOW_COUNTS_SELF},
};
#endif

enum { TOKENS = 120 };

static nsa_desc describe(const geometry *g, int batch) {
    nsa_desc d = nsa_desc_default(batch, TOKENS, g->heads, g->kv_heads, g->dim);
    d.dim_v = g->dim_v;
    d.cmp_block = g->l;
    d.cmp_stride = g->d;
    d.slc_block = g->slc;
    d.slc_count = g->n;
    d.window = g->w;
    d.window_rule = g->window_rule;
    if (g->window_rule == NSA_WINDOW_BEFORE_SELF) { /* as others trained; no last block is forced */
        d.forced = NSA_FORCED_ON_TOP;
        d.slc_local = 0;
    }
    d.gate_heads = g->kv_heads;
    d.list_heads = g->kv_heads > 1 ? g->kv_heads : 0; /* 0 says the same */
    return d;
}

/* A tensor of the content, random where a seed is given. */
static nsa_tensor rows_of(content *c, nsa_dtype dtype, int rows, int heads, int width,
                          uint64_t seed) {
    size_t n = (size_t)rows * (size_t)heads * (size_t)width;
    void *data = calloc(n ? n : 1, sizeof(double));
    c->memory[c->used++] = data;
    for (size_t i = 0; seed && i < n; i++) {
        float value = (float)check_normal(seed, i);
        if (dtype == NSA_F32) ((float *)data)[i] = value;
        if (dtype == NSA_BF16) ((uint16_t *)data)[i] = nsa_f32_to_bf16(value);
        if (dtype == NSA_F16) ((uint16_t *)data)[i] = nsa_f32_to_f16(value);
    }
    return nsa_tensor_bthd(data, dtype, rows, heads, width);
}

static nsa_compress phi_of(content *c, const geometry *g, int dim, uint64_t seed) {
    nsa_compress x;
    memset(&x, 0, sizeof x);
    x.phi = g->phi;
    x.dim = dim;
    x.hidden = HIDDEN;
    if (g->phi == NSA_PHI_CONV) x.w1 = rows_of(c, g->dtype, g->l, g->kv_heads, dim, seed);
    if (g->phi == NSA_PHI_MLP) {
        x.pos = rows_of(c, g->dtype, g->l, g->kv_heads, dim, seed);
        x.w1 = rows_of(c, g->dtype, x.hidden, g->kv_heads, g->l * dim, seed + 1);
        x.b1 = rows_of(c, g->dtype, 1, g->kv_heads, x.hidden, seed + 2);
        x.w2 = rows_of(c, g->dtype, dim, g->kv_heads, x.hidden, seed + 3);
    }
    return x;
}

/* A NaN in the middle of a row: of bf16's pairs in the first or in the second half. */
static void spoil(const nsa_tensor *x, int row) {
    size_t at = (size_t)row * (size_t)x->token + (size_t)x->token / 2 + (size_t)(row / 10 % 2);
    if (x->dtype == NSA_F32)
        ((float *)x->data)[at] = NAN;
    else
        ((uint16_t *)x->data)[at] = 0x7fff;
}

/* Room for `rows` tokens of everything; inputs random, in the last content with some that are not
   finite. Parameters do not depend on `id`. */
static void make_content(content *c, const geometry *g, const nsa_desc *d, int rows, uint64_t id) {
    nsa_attention *x = &c->x;
    uint64_t seed = 100 * id + 1;
    int cmp = nsa_cmp_count(d, rows);
    memset(c, 0, sizeof *c);
    x->k_cmp = phi_of(c, g, g->dim, 91001);
    x->v_cmp = phi_of(c, g, g->dim_v, 92001);
    x->q = rows_of(c, g->dtype, rows, g->heads, g->dim, seed);
    x->k_slc = rows_of(c, g->dtype, rows, g->kv_heads, g->dim, seed + 1);
    x->v_slc = rows_of(c, g->dtype, rows, g->kv_heads, g->dim_v, seed + 2);
    x->k_win = rows_of(c, g->dtype, rows, g->kv_heads, g->dim, seed + 3);
    x->v_win = rows_of(c, g->dtype, rows, g->kv_heads, g->dim_v, seed + 4);
    x->k_cmp.x = rows_of(c, g->dtype, rows, g->kv_heads, g->dim, seed + 5);
    x->v_cmp.x = rows_of(c, g->dtype, rows, g->kv_heads, g->dim_v, seed + 6);
    x->gates = rows_of(c, NSA_F32, rows, d->gate_heads, 3, seed + 7);
    x->k_cmp.out = rows_of(c, g->dtype, cmp, g->kv_heads, g->dim, 0);
    x->v_cmp.out = rows_of(c, g->dtype, cmp, g->kv_heads, g->dim_v, 0);
    x->out_cmp = rows_of(c, g->dtype, rows, g->heads, g->dim_v, 0);
    x->out_slc = rows_of(c, g->dtype, rows, g->heads, g->dim_v, 0);
    x->out_win = rows_of(c, g->dtype, rows, g->heads, g->dim_v, 0);
    x->out = rows_of(c, g->dtype, rows, g->heads, g->dim_v, 0);
    x->lse_cmp = rows_of(c, NSA_REAL_DTYPE, rows, g->heads, 1, 0);
    x->lse_slc = rows_of(c, NSA_REAL_DTYPE, rows, g->heads, 1, 0);
    x->lse_win = rows_of(c, NSA_REAL_DTYPE, rows, g->heads, 1, 0);
    x->blocks = rows_of(c, NSA_I32, rows, g->kv_heads, nsa_block_list_width(d), 0);
}

enum { EARLY_NAN = 20 };

static void spoil_content(content *c) {
    spoil(&c->x.v_win, EARLY_NAN);
    spoil(&c->x.q, 50);
    spoil(&c->x.k_slc, 70);
    spoil(&c->x.v_win, 90);
    spoil(&c->x.v_cmp.x, 100); /* alone until the key's */
    spoil(&c->x.k_cmp.x, 105);
}

static void free_content(content *c) {
    for (int i = 0; i < c->used; i++) free(c->memory[i]);
}

typedef struct world {
    const geometry *g;
    nsa_desc d;
    content whole[CONTENTS], step;
    nsa_cache cache;
    int sequences;
    int holds[MOST]; /* which content a sequence holds, up to its length */
    void *memory, *workspace;
    size_t bytes;
    uint64_t seed, draws;
} world;

/* What main reports. */
static int schedules_done, actions_done;
static nsa_reads all_reads;

static int draw(world *w, int n) {
    return check_below(n, w->seed, w->draws++);
}

static size_t row_bytes(const nsa_tensor *x) {
    return (size_t)x->token * (x->dtype == NSA_F32 || x->dtype == NSA_I32 ? 4
                               : x->dtype == NSA_F64                      ? 8
                                                                          : 2);
}

static char *row_at(const nsa_tensor *x, int batch_rows, int b, int t) {
    return (char *)x->data + ((size_t)b * (size_t)batch_rows + (size_t)t) * row_bytes(x);
}

/* The input views of an attention in one order. */
static void inputs_of(nsa_attention *x, nsa_tensor *list[INPUTS]) {
    nsa_tensor *all[INPUTS] = {&x->q,     &x->k_slc,   &x->v_slc,   &x->k_win,
                               &x->v_win, &x->k_cmp.x, &x->v_cmp.x, &x->gates};
    memcpy(list, all, sizeof all);
}

/* Keys of the blocks in token t's lists, over the kv heads. */
static int64_t keys_listed(const world *w, const nsa_attention *whole, int t) {
    int width = nsa_block_list_width(&w->d), block = w->d.slc_block;
    const int32_t *list = (const int32_t *)row_at(&whole->blocks, TOKENS, 0, t);
    int64_t keys = 0;
    for (int i = 0; i < w->g->kv_heads * width; i++) {
        int last = (list[i] + 1) * block < t + 1 ? (list[i] + 1) * block : t + 1;
        if (list[i] >= 0) keys += last - list[i] * block;
    }
    return keys;
}

#ifdef CHECK_CUDA
static double number_at(const nsa_tensor *x, const void *rows, size_t e) {
    return x->dtype == NSA_F32    ? (double)((const float *)rows)[e]
           : x->dtype == NSA_BF16 ? (double)nsa_bf16_to_f32(((const uint16_t *)rows)[e])
                                  : (double)nsa_f16_to_f32(((const uint16_t *)rows)[e]);
}

/* The output is the gated sum of the three branches as they are kept, rounded once. */
static void check_gated(const world *w, const nsa_attention *x, int b, int tokens) {
    const nsa_tensor *branches[] = {&x->out_cmp, &x->out_slc, &x->out_win};
    const float *gates = (const float *)row_at(&x->gates, TOKENS, b, 0);
    const double half = x->out.dtype == NSA_F32    ? 0x1p-24
                        : x->out.dtype == NSA_BF16 ? 0x1p-8
                                                   : 0x1p-11;
    const size_t width = (size_t)w->g->dim_v, row = (size_t)w->g->heads * width;
    size_t wrong = 0;
    for (size_t e = 0; e < (size_t)tokens * row; e++) {
        const size_t token = e / row,
                     head = e % row / width / (size_t)(w->g->heads / w->g->kv_heads);
        double sum = 0, size = 0;
        for (size_t i = 0; i < 3; i++) {
            const float gate = gates[(token * 3 + i) * (size_t)w->g->kv_heads + head];
            const double part = number_at(branches[i], row_at(branches[i], TOKENS, b, 0), e) /
                                (1 + exp(-(double)gate));
            sum += part;
            size += fabs(part);
        }
        const double out = number_at(&x->out, row_at(&x->out, TOKENS, b, 0), e);
        wrong += isfinite(sum) && !(fabs(out - sum) <= half * fabs(sum) + 1e-6 * size + 1e-7);
    }
    CHECK(!wrong, "%zu outputs are not the gated sum of the branches", wrong);
}
#endif

/* Decoded rows beside those of the whole: the same bits, or on CUDA, where sums are taken in
   another order, the same block numbers and outputs that differ by rounding alone. */
static void compare_rows(const nsa_tensor *x, const void *got, const void *want, int rows) {
    size_t bytes = (size_t)rows * row_bytes(x);
#ifdef CHECK_CUDA
    size_t n = (size_t)rows * (size_t)x->token;
    double *a = check_alloc(n * sizeof *a), *b = check_alloc(n * sizeof *b);
    /* p and out are each rounded once, here and there */
    double allowed = x->dtype == NSA_BF16 ? 0x1p-7 : x->dtype == NSA_F16 ? 0x1p-10 : 1e-5;
    for (size_t i = 0; x->dtype != NSA_I32 && i < 2 * n; i++) {
        const void *from = i < n ? got : want;
        size_t e = i % n;
        (i < n ? a : b)[e] = number_at(x, from, e);
    }
    size_t wrong = 0; /* lse of no key, and what read a NaN: the same in both, and then no number */
    for (size_t e = 0; x->dtype != NSA_I32 && e < n; e++) {
        if (isfinite(a[e]) && isfinite(b[e])) continue;
        wrong += !(a[e] == b[e] || (isnan(a[e]) && isnan(b[e])));
        a[e] = b[e] = 0;
    }
    CHECK(!wrong, "%zu numbers of a decoded token are finite in one alone", wrong);
    if (x->dtype != NSA_I32)
        CHECK_NEAR("row of a decoded token", a, b, n, (size_t)x->token, allowed * check_norm(b, n));
    free(a);
    free(b);
    if (x->dtype != NSA_I32) return;
#endif
    CHECK_BITS("row of a decoded token", got, want, bytes, row_bytes(x));
}

/* The step has the gates of a token branch by branch, the whole has them head by head. */
static void put_gates(float *to, const float *from, int tokens, int heads) {
    for (int i = 0; i < tokens * heads * 3; i++) {
        const int token = i / (heads * 3), head = i / 3 % heads, branch = i % 3;
        to[(token * 3 + branch) * heads + head] = from[i];
    }
}

/* Appends counts[b] tokens: of the sequence's own content, or of another one as a wrong guess. */
static void append(world *w, const int *counts, int wrong) {
    int most = 0;
    nsa_reads reads[MOST];
    nsa_tensor *from[INPUTS], *to[INPUTS];
    for (int b = 0; b < w->sequences; b++) most = counts[b] > most ? counts[b] : most;
    nsa_attention x = w->step.x;
    inputs_of(&x, to);
    for (int b = 0; b < w->sequences; b++) {
        nsa_attention *whole = &w->whole[(w->holds[b] + wrong) % CONTENTS].x;
        inputs_of(whole, from);
        for (int i = 0; i < INPUTS - 1; i++)
            memcpy(row_at(to[i], TOKENS, b, 0), row_at(from[i], TOKENS, 0, w->cache.lengths[b]),
                   (size_t)counts[b] * row_bytes(to[i]));
        const float *gates = (const float *)row_at(&whole->gates, TOKENS, 0, w->cache.lengths[b]);
        put_gates((float *)row_at(&x.gates, TOKENS, b, 0), gates, counts[b], w->g->kv_heads);
    }
    int before[MOST];
    memcpy(before, w->cache.lengths, (size_t)w->sequences * sizeof *before);
    size_t bytes = nsa_decode_workspace_size(&x, &w->cache, most);
    CHECK(bytes <= w->bytes, "workspace of %d tokens is within that of the most", most);
    nsa_status s = nsa_decode(&x, &w->cache, most, counts, reads, w->workspace, bytes);
    CHECK(s == NSA_OK, "decode: %s %s", nsa_status_name(s), nsa_status_where(s));
    if (wrong) return;
    for (int b = 0; b < w->sequences; b++) {
        nsa_attention *whole = &w->whole[w->holds[b]].x;
        const nsa_tensor *outs[] = {&x.out,     &x.out_cmp, &x.out_slc, &x.out_win,
                                    &x.lse_cmp, &x.lse_slc, &x.lse_win, &x.blocks};
        const nsa_tensor *want[] = {&whole->out,     &whole->out_cmp, &whole->out_slc,
                                    &whole->out_win, &whole->lse_cmp, &whole->lse_slc,
                                    &whole->lse_win, &whole->blocks};
        for (int i = 0; i < 8; i++)
            compare_rows(outs[i], row_at(outs[i], TOKENS, b, 0),
                         row_at(want[i], TOKENS, 0, before[b]), counts[b]);
#ifdef CHECK_CUDA
        check_gated(w, &x, b, counts[b]);
#endif
        int64_t listed = 0;
        for (int t = before[b]; t < before[b] + counts[b]; t++) listed += keys_listed(w, whole, t);
        CHECK(reads[b].slc == listed, "keys read by slc: %lld, not %lld", (long long)reads[b].slc,
              (long long)listed);
        int64_t cmp = 0, win = 0;
        for (int t = before[b]; t < before[b] + counts[b]; t++) {
            cmp += nsa_cmp_visible(&w->d, t);
            win += t + 1 - nsa_window_begin(&w->d, t);
        }
        CHECK(reads[b].cmp == cmp * w->g->kv_heads, "keys read by cmp");
        CHECK(reads[b].win == win * w->g->kv_heads, "keys read by win");
        all_reads.cmp += reads[b].cmp;
        all_reads.slc += reads[b].slc;
        all_reads.win += reads[b].win;
    }
}

static void random_append(world *w, int wrong) {
    int counts[MOST];
    for (int b = 0; b < w->sequences; b++) {
        int room = TOKENS - w->cache.lengths[b], most = w->g->max_rewind + 1 - wrong;
        counts[b] = draw(w, (room < most ? room : most) + 1);
    }
    append(w, counts, wrong);
    for (int b = 0; wrong && b < w->sequences; b++) /* the guesses were wrong: take them back */
        CHECK(nsa_cache_rewind(&w->cache, b, w->cache.lengths[b] - counts[b]) == NSA_OK, "rewind");
}

/* The shortest length that the sequence can be taken back to, 0 apart. */
static int least_length(const world *w, int b) {
    int least = w->cache.newest[b] - w->g->max_rewind;
    return least < 0 ? 0 : least;
}

static void random_rewind(world *w) {
    int b = draw(w, w->sequences), least = least_length(w, b), length = w->cache.lengths[b];
    if (least > 1)
        CHECK(nsa_status_kind(nsa_cache_rewind(&w->cache, b, least - 1)) == NSA_ERROR_REWIND,
              "one further back is refused");
    CHECK(nsa_cache_rewind(&w->cache, b, least + draw(w, length - least + 1)) == NSA_OK, "rewind");
}

static void random_fork(world *w) {
    int from = draw(w, w->sequences), to = draw(w, w->sequences);
    int least = least_length(w, from), length = w->cache.lengths[from];
    int prefix = least + draw(w, length - least + 1);
    CHECK(nsa_cache_fork(&w->cache, to, &w->cache, from, prefix) == NSA_OK, "fork");
    w->holds[to] = w->holds[from];
}

/* The whole sequence at once, by nsa.h. With CHECK_CUDA also by the kernels, whose block numbers
   are demanded of decoding, and are nsa.h's in f32; in 16 bits all of it is the kernels'. */
static void whole_forward(content *c, const nsa_desc *d) {
#ifdef CHECK_CUDA
    size_t lists = (size_t)c->x.blocks.batch * sizeof(int32_t);
    CHECK(device_whole(&c->x, d) == NSA_OK, "whole, on the device");
    if (c->x.q.dtype != NSA_F32) return;
    void *blocks = check_alloc(lists);
    memcpy(blocks, c->x.blocks.data, lists);
#endif
    size_t bytes = nsa_attention_forward_workspace_size(&c->x, d);
    void *workspace = malloc(bytes);
    CHECK(nsa_attention_forward(&c->x, d, workspace, bytes) == NSA_OK, "whole");
    free(workspace);
#ifdef CHECK_CUDA
    CHECK_BITS("block numbers on the device", blocks, c->x.blocks.data, lists, sizeof(int32_t));
    free(blocks);
#endif
}

static void begin(world *w, const geometry *g, int sequences, int threads) {
    memset(w, 0, sizeof *w);
    w->g = g;
    w->sequences = sequences;
    w->d = describe(g, 1);
    w->d.threads = threads;
    for (int i = 0; i < CONTENTS; i++) {
        make_content(&w->whole[i], g, &w->d, TOKENS, (uint64_t)i + 1);
        if (i == CONTENTS - 1) spoil_content(&w->whole[i]);
        whole_forward(&w->whole[i], &w->d);
    }
    nsa_desc d = describe(g, sequences);
    d.threads = threads;
    make_content(&w->step, g, &d, TOKENS * sequences, 0);
    d.gate_stride = d.gate_heads, w->step.x.gates.head = 1;
    nsa_tensor *views[] = {
        &w->step.x.q,       &w->step.x.k_slc,   &w->step.x.v_slc,   &w->step.x.k_win,
        &w->step.x.v_win,   &w->step.x.k_cmp.x, &w->step.x.v_cmp.x, &w->step.x.gates,
        &w->step.x.out,     &w->step.x.out_cmp, &w->step.x.out_slc, &w->step.x.out_win,
        &w->step.x.lse_cmp, &w->step.x.lse_slc, &w->step.x.lse_win, &w->step.x.blocks};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++)
        views[i]->batch = TOKENS * views[i]->token;
    d.first = -1, d.count = d.tokens + 1; /* a cache does not use them */
    size_t size = nsa_cache_size(&d, g->dtype, g->max_rewind);
    w->memory = malloc(size);
    memset(w->memory, 0xff, size); /* NaN in every format: what was not written is not read */
    CHECK(nsa_cache_init(&w->cache, &d, g->dtype, g->max_rewind, w->memory, size - 1) != NSA_OK,
          "a byte too few");
    CHECK(nsa_cache_init(&w->cache, &d, g->dtype, g->max_rewind, w->memory, size) == NSA_OK,
          "cache");
#ifdef CHECK_CUDA
    device_cache_of(&w->cache)->graph = threads == 2; /* there are no threads to vary */
#endif
    w->bytes = nsa_decode_workspace_size(&w->step.x, &w->cache, TOKENS);
    w->workspace = malloc(w->bytes);
    for (int b = 0; b < w->sequences; b++) w->holds[b] = b % CONTENTS;
}

static void end(world *w) {
    for (int i = 0; i < CONTENTS; i++) free_content(&w->whole[i]);
    free_content(&w->step);
    free(w->memory);
    free(w->workspace);
}

static void test_schedules(world *w, int schedules, int actions) {
    for (int s = 0; s < schedules; s++) {
        check_case("%s, schedule %d", w->g->name, s);
        w->seed = (uint64_t)s + 7;
        w->draws = 0;
        for (int b = 0; b < w->sequences; b++) nsa_cache_rewind(&w->cache, b, 0);
        schedules_done++;
        for (int i = 0; i < actions; i++, actions_done++) {
            int kind = draw(w, 8);
            if (kind < 4)
                random_append(w, 0);
            else if (kind < 6)
                random_append(w, 1);
            else if (kind < 7)
                random_rewind(w);
            else
                random_fork(w);
        }
    }
}

#ifndef CHECK_CUDA
/* Each view of a step, with a dtype that is none: blamed by its name. */
static void test_refused_views(const world *w) {
    nsa_attention x = w->step.x;
    const struct {
        nsa_tensor *view;
        const char *name;
    } views[] = {{&x.q, "q"},
                 {&x.k_slc, "k_slc"},
                 {&x.v_slc, "v_slc"},
                 {&x.k_win, "k_win"},
                 {&x.v_win, "v_win"},
                 {&x.k_cmp.x, "k_cmp.x"},
                 {&x.v_cmp.x, "v_cmp.x"},
                 {&x.out_cmp, "out_cmp"},
                 {&x.out_slc, "out_slc"},
                 {&x.lse_win, "lse_win"},
                 {&x.blocks, "blocks"},
                 {&x.gates, "gates"},
                 {&x.out, "out"}};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) {
        const nsa_dtype good = views[i].view->dtype;
        views[i].view->dtype = (nsa_dtype)77;
        nsa_status s =
            nsa_decode(&x, (nsa_cache *)&w->cache, 1, NULL, NULL, w->workspace, w->bytes);
        views[i].view->dtype = good;
        CHECK(nsa_status_kind(s) == NSA_ERROR_DTYPE && !strcmp(nsa_status_where(s), views[i].name),
              "no dtype of %s: %s (%s)", views[i].name, nsa_status_name(s), nsa_status_where(s));
    }
}

/* What a cache's descriptor may not say: it knows positions and rows, and is causal. */
static void test_refused_options(world *w) {
    enum { OPTIONS = 4 };
    static const int32_t some[] = {0};
    nsa_desc bad[OPTIONS];
    const char *const where[] = {"mask", "firsts", "counts", "pages"};
    for (int i = 0; i < OPTIONS; i++) bad[i] = describe(w->g, SEQUENCES);
    bad[0].mask = NSA_MASK_NONE, bad[1].firsts = bad[2].counts = bad[3].pages = some;
    bad[3].page_tokens = bad[3].cmp_stride;
    for (int i = 0; i < OPTIONS; i++) {
        nsa_cache none;
        const nsa_status s = nsa_cache_init(&none, &bad[i], w->g->dtype, 0, NULL, 0);
        CHECK(nsa_status_kind(s) == NSA_ERROR_OPTION && !strcmp(nsa_status_where(s), where[i]),
              "%s: %s (%s)", where[i], nsa_status_name(s), nsa_status_where(s));
        CHECK(nsa_cache_size(&bad[i], w->g->dtype, 0) == 0, "%s has a size", where[i]);
    }
}

/* Caches and sequences that are not there, numbers below 0. */
static void test_refused_caches(world *w) {
    nsa_cache *c = &w->cache, none;
    nsa_desc d = describe(w->g, SEQUENCES);
    const nsa_attention *x = &w->step.x;
    int r = w->g->max_rewind;
    const struct {
        nsa_status s;
        int kind;
        const char *where;
    } calls[] = {
        {nsa_cache_init(NULL, &d, w->g->dtype, r, NULL, 0), NSA_ERROR_NULL, "cache"},
        {nsa_cache_init(&none, &d, w->g->dtype, r, NULL, 0), NSA_ERROR_WORKSPACE, "memory"},
        {nsa_cache_init(&none, &d, w->g->dtype, -1, NULL, 0), NSA_ERROR_SIZE, "max_rewind"},
        {nsa_cache_rewind(NULL, 0, 0), NSA_ERROR_NULL, "cache"},
        {nsa_cache_rewind(c, -1, 0), NSA_ERROR_RANGE, "sequence"},
        {nsa_cache_rewind(c, 0, -1), NSA_ERROR_REWIND, "length"},
        {nsa_cache_fork(NULL, 0, c, 0, 0), NSA_ERROR_NULL, "cache"},
        {nsa_cache_fork(c, 0, NULL, 0, 0), NSA_ERROR_NULL, "cache"},
        {nsa_cache_fork(c, -1, c, 0, 0), NSA_ERROR_RANGE, "sequence"},
        {nsa_cache_fork(c, SEQUENCES, c, 0, 0), NSA_ERROR_RANGE, "sequence"},
        {nsa_cache_fork(c, 0, c, SEQUENCES, 0), NSA_ERROR_RANGE, "sequence"},
        {nsa_decode(x, c, -1, NULL, NULL, w->workspace, w->bytes), NSA_ERROR_RANGE, "count"},
        {nsa_decode(NULL, c, 1, NULL, NULL, w->workspace, w->bytes), NSA_ERROR_NULL, "arguments"},
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        CHECK(nsa_status_kind(calls[i].s) == calls[i].kind &&
                  !strcmp(nsa_status_where(calls[i].s), calls[i].where),
              "call %zu: %s (%s), not of %s", i, nsa_status_name(calls[i].s),
              nsa_status_where(calls[i].s), calls[i].where);
    CHECK(strstr(nsa_status_text(nsa_cache_rewind(c, -1, 0)), "sequence must be in 0"), "its rule");
    CHECK(nsa_decode_workspace_size(x, c, -1) == 0 && nsa_decode_workspace_size(x, NULL, 1) == 0 &&
              nsa_decode_workspace_size(NULL, c, 1) == 0,
          "sizes for what is refused are 0");
}

#endif

static void test_refusals(world *w) {
    check_case("%s, refusals", w->g->name);
    int32_t before[SEQUENCES], counts[SEQUENCES] = {0, 0, 0};
    for (int b = 0; b < w->sequences; b++) nsa_cache_rewind(&w->cache, b, 0);
    memcpy(before, w->cache.lengths, sizeof before);
    const nsa_attention *x = &w->step.x;
    int most = w->g->max_rewind + 1;
    nsa_attention one = *x; /* its views have room for a token of each sequence */
    one.out_cmp.batch = one.out_cmp.token;
    nsa_status s = nsa_decode(&one, &w->cache, most + 1, NULL, NULL, w->workspace, w->bytes);
    CHECK(nsa_status_kind(s) == NSA_ERROR_CACHE, "more at once than max_rewind + 1: %d", s);
    counts[0] = 2;
    s = nsa_decode(x, &w->cache, 1, counts, NULL, w->workspace, w->bytes);
    CHECK(nsa_status_kind(s) == NSA_ERROR_RANGE, "counts beyond count: %d", s);
    counts[0] = 0, counts[1] = -1;
    s = nsa_decode(x, &w->cache, 1, counts, NULL, w->workspace, w->bytes);
    CHECK(nsa_status_kind(s) == NSA_ERROR_RANGE, "a count below 0: %d", s);
    counts[1] = 0, counts[2] = most + 1;
    s = most < TOKENS ? nsa_decode(x, &w->cache, most + 1, counts, NULL, w->workspace, w->bytes)
                      : NSA_ERROR_CACHE;
    CHECK(nsa_status_kind(s) == NSA_ERROR_CACHE, "more of one sequence than max_rewind + 1: %d", s);
    size_t bytes = nsa_decode_workspace_size(x, &w->cache, 1);
    s = nsa_decode(x, &w->cache, 1, NULL, NULL, w->workspace, bytes - 1);
    CHECK(nsa_status_kind(s) == NSA_ERROR_WORKSPACE, "a byte short: %d", s);
    CHECK(nsa_status_kind(nsa_cache_rewind(&w->cache, 0, 1)) == NSA_ERROR_REWIND, "not held yet");
    CHECK(nsa_status_kind(nsa_cache_rewind(&w->cache, 9, 0)) == NSA_ERROR_RANGE, "no sequence 9");
    CHECK(nsa_status_kind(nsa_decode(x, NULL, 1, NULL, NULL, w->workspace, bytes)) ==
              NSA_ERROR_NULL,
          "null cache");
    CHECK(!memcmp(before, w->cache.lengths, sizeof before), "a refused call changes no length");
    nsa_desc d = describe(w->g, SEQUENCES);
    d.dim = w->g->dim > 8 ? w->g->dim - 8 : 16;
    size_t size = nsa_cache_size(&d, w->g->dtype, w->g->max_rewind);
    void *memory = malloc(size);
    nsa_cache other;
    CHECK(nsa_cache_init(&other, &d, w->g->dtype, w->g->max_rewind, memory, size) == NSA_OK, "");
    s = nsa_cache_fork(&other, 0, &w->cache, 0, 0);
    CHECK(nsa_status_kind(s) == NSA_ERROR_CACHE, "a cache of another geometry: %d", s);
    s = nsa_decode(x, &other, 1, NULL, NULL, w->workspace, w->bytes);
    CHECK(nsa_status_kind(s) == NSA_ERROR_SIZE, "views of another geometry: %d", s);
    free(memory);
    /* Another window may have rings of as many rows, where there is no room for more tokens. */
    d = describe(w->g, SEQUENCES);
    d.window = 2 * TOKENS;
    d.tokens = d.count = (int)(w->cache.k_win.batch / w->cache.k_win.token);
    size = nsa_cache_size(&d, w->g->dtype, w->g->max_rewind);
    memory = malloc(size);
    s = nsa_cache_init(&other, &d, w->g->dtype, w->g->max_rewind, memory, size);
    CHECK(s == NSA_OK && other.k_win.batch == w->cache.k_win.batch, "rings of as many rows");
    s = nsa_cache_fork(&other, 0, &w->cache, 0, 0);
    CHECK(nsa_status_kind(s) == NSA_ERROR_CACHE, "a cache of another window: %d", s);
    free(memory);
}

/* From nothing to `tokens`, `at_once` at a time where the cache takes as many. */
static void test_steps(world *w, int at_once, int tokens) {
    check_case("%s, steps from nothing on", w->g->name);
    int counts[MOST];
    for (int b = 0; b < w->sequences; b++) {
        nsa_cache_rewind(&w->cache, b, 0);
        w->holds[b] = b % CONTENTS;
    }
    for (int t = 0; t < tokens; t += counts[0]) {
        int most = w->g->max_rewind < at_once ? w->g->max_rewind + 1 : at_once;
        for (int b = 0; b < w->sequences; b++) counts[b] = tokens - t < most ? tokens - t : most;
        append(w, counts, 0);
    }
}

static void test_full(world *w, int at_once) {
    test_steps(w, at_once, TOKENS);
    check_case("%s, a full cache", w->g->name);
    nsa_status s = nsa_decode(&w->step.x, &w->cache, 1, NULL, NULL, w->workspace, w->bytes);
    CHECK(nsa_status_kind(s) == NSA_ERROR_CACHE, "full: %d", s);
    CHECK(w->cache.lengths[0] == TOKENS, "the cache is unchanged");
    nsa_desc d = describe(w->g, SEQUENCES);
    d.tokens = d.count = TOKENS - 1;
    size_t size = nsa_cache_size(&d, w->g->dtype, w->g->max_rewind);
    void *memory = malloc(size);
    nsa_cache less;
    s = nsa_cache_init(&less, &d, w->g->dtype, w->g->max_rewind, memory, size);
    CHECK(s == NSA_OK, "a token less: %d", s);
    s = nsa_cache_fork(&less, 0, &w->cache, 0, TOKENS);
    CHECK(nsa_status_kind(s) == NSA_ERROR_CACHE, "no room for its last token: %d", s);
    s = nsa_cache_fork(&less, 0, &w->cache, 0, 0);
    CHECK(nsa_status_kind(s) == NSA_ERROR_CACHE || (s == NSA_OK && less.newest[0] == 0),
          "a fork of nothing: %d, newest %d", s, less.newest[0]);
    free(memory);
}

static void append_some(world *w, int a, int b, int c) {
    const int counts[SEQUENCES] = {a, b, c};
    append(w, counts, 0);
}

static void test_not_held(world *w, int b, int length) {
    nsa_status s = nsa_cache_rewind(&w->cache, b, length);
    CHECK(nsa_status_kind(s) == NSA_ERROR_REWIND, "sequence %d back to %d: %d", b, length, s);
}

/* What random schedules seldom reach. Sequence 2 goes beyond its first values that are not finite,
   back, on by a token, and into sequence 0: both still hold what their newest token left in the
   rings, and no more. Sequence 1 begins anew as another. */
static void test_turns(world *w) {
    const int r = w->g->max_rewind;
    int newest = 0;
    check_case("%s, turns", w->g->name);
    for (int b = 0; b < SEQUENCES; b++) {
        nsa_cache_rewind(&w->cache, b, 0);
        w->holds[b] = b % CONTENTS;
    }
    for (; newest + r + 1 <= TOKENS - 10; newest += r + 1)
        append_some(w, newest ? 0 : r + 1, newest ? 0 : r + 1, r + 1);
    CHECK(nsa_cache_rewind(&w->cache, 2, newest - r / 2) == NSA_OK, "back");
    append_some(w, 0, 0, 1);
    test_not_held(w, 2, newest - r - 1);
    CHECK(nsa_cache_fork(&w->cache, 0, &w->cache, 2, newest - r / 2 - 1) == NSA_OK, "fork");
    w->holds[0] = w->holds[2];
    test_not_held(w, 0, newest - r - 1);
    CHECK(nsa_cache_rewind(&w->cache, 1, 0) == NSA_OK, "emptied");
    w->holds[1] = 0;
    append_some(w, r + 1, 2, r / 2);
    CHECK(nsa_cache_rewind(&w->cache, 1, 1) == NSA_OK, "what it held before is forgotten");
    append_some(w, 1, 3, 1);
}

/* The window's ring is shorter than a tile of keys: before the window's first row lies a token that
   was taken back, whose value is not finite. */
static void test_taken_back(world *w) {
    const int r = w->g->max_rewind;
    check_case("%s, a token taken back", w->g->name);
    for (int b = 0; b < SEQUENCES; b++) nsa_cache_rewind(&w->cache, b, 0);
    w->holds[2] = CONTENTS - 1;
    for (int t = 0, more; t <= EARLY_NAN; t += more) {
        more = t + r + 1 <= EARLY_NAN ? r + 1 : EARLY_NAN + 1 - t;
        append_some(w, 0, 0, more);
    }
    CHECK(nsa_cache_rewind(&w->cache, 2, EARLY_NAN - 1) == NSA_OK, "back");
    append_some(w, 0, 0, 1);
}

/* More sequences than two warps have lanes, and more than a block of threads, each of its own
   length. */
static void test_many(const geometry *g, int sequences, int appends) {
    world w;
    int counts[MOST] = {0}, before[MOST];
    begin(&w, g, sequences, 1);
    check_case("%s, %d sequences", g->name, sequences);
    for (int i = 0; i < appends; i++) random_append(&w, 0);
    memcpy(before, w.cache.lengths, (size_t)sequences * sizeof *before);
    counts[0] = 1, counts[sequences - 1] = -1;
    nsa_status s = nsa_decode(&w.step.x, &w.cache, 1, counts, NULL, w.workspace, w.bytes);
    CHECK(nsa_status_kind(s) == NSA_ERROR_RANGE, "a count below 0, of the last: %d", s);
    CHECK(!memcmp(before, w.cache.lengths, (size_t)sequences * sizeof *before),
          "a refused call changes no length");
    end(&w);
}

#ifdef CHECK_INSIDE
/* A task in less workspace than the door lets through: whichever of its parts lacks it, the call
   says so and the sequence stays as it was; with enough it has the bits of the whole. */
static void test_statuses(world *w, int count) {
    check_case("%s, %d tokens, parts that lack workspace", w->g->name, count);
    int counts[SEQUENCES], refused = 0;
    nsa_attention x = w->step.x, *whole = &w->whole[w->holds[0]].x;
    nsa_tensor *from[INPUTS], *to[INPUTS];
    nsa_status s = NSA_ERROR_NULL;
    inputs_of(whole, from);
    inputs_of(&x, to);
    for (int b = 0; b < w->sequences; b++) nsa_cache_rewind(&w->cache, b, 0);
    for (int i = 0, held; i < 100; i += held) { /* as far as any part has work to do */
        held = 100 - i < w->g->max_rewind + 1 ? 100 - i : w->g->max_rewind + 1;
        for (int b = 0; b < w->sequences; b++) counts[b] = b ? 0 : held;
        append(w, counts, 0);
    }
    for (int i = 0; i < INPUTS - 1; i++)
        memcpy(to[i]->data, row_at(from[i], TOKENS, 0, 100), (size_t)count * row_bytes(to[i]));
    put_gates((float *)x.gates.data, (const float *)row_at(&whole->gates, TOKENS, 0, 100), count,
              w->g->kv_heads);
    nsa__decode_job p = nsa__decode_plan(&x, &w->cache, count, 1, 0);
    CHECK(p.sequences == 1 && p.threads == 1,
          "several sequences: threads take one each, not one together");
    nsa__team team = {1, (char *)w->workspace + p.shared, p.bytes};
    p.results = (nsa__decode_result *)w->workspace;
    p.counts = counts;
    for (int b = 0; b < w->sequences; b++) counts[b] = b ? 0 : count;
    size_t enough = p.bytes;
    for (p.bytes = 0; s != NSA_OK && p.bytes <= enough; p.bytes += 64) {
        s = nsa__decode_run(&p, &team, NULL);
        CHECK(s == NSA_OK || s == nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_workspace),
              "%zu bytes: %s", p.bytes, nsa_status_name(s));
        CHECK(w->cache.lengths[0] == 100 + (s == NSA_OK ? count : 0), "%zu bytes: length %d",
              p.bytes, w->cache.lengths[0]);
        refused += s != NSA_OK;
    }
    CHECK(s == NSA_OK && refused > 10, "refused %d times, then %s", refused, nsa_status_name(s));
    compare_rows(&x.out, x.out.data, row_at(&whole->out, TOKENS, 0, 100), count);
    compare_rows(&x.blocks, x.blocks.data, row_at(&whole->blocks, TOKENS, 0, 100), count);
}
#endif

/* Schedules, as many as the argument says. Kernels that run on the CPU take their time: there steps
   that are replayed from a graph have no schedules, and "short" has none at all, one geometry whose
   steps are launched and one whose steps are replayed. "many" is that and many sequences. */
int main(int argc, char **argv) {
    int schedules = argc > 1 ? atoi(argv[1]) : 12;
    int many = argc > 1 && !strcmp(argv[1], "many"), brief = many;
    brief |= argc > 1 && !strcmp(argv[1], "short");
    for (size_t i = 0; i < sizeof geometries / sizeof *geometries; i++)
        for (int threads = 1; threads <= 2; threads++) {
            if (brief && (int)i != threads) continue;
            world w;
            begin(&w, &geometries[i], SEQUENCES, threads);
#ifdef CHECK_CUDA
            test_refusals(&w);
            if (threads == 1)
                test_schedules(&w, schedules, 6);
            else if (brief) /* as many slices, and lists that are not full at first */
                test_steps(&w, 18, 54);
            else if (w.g->max_rewind >= TOKENS / 2)
                test_full(&w, 18);
            if (threads == 2 && w.g->max_rewind >= 9 && w.g->max_rewind < TOKENS / 2)
                test_turns(&w);
            if (threads == 1 && w.g->w < 16 && w.g->max_rewind) test_taken_back(&w);
            /* schedules of few tokens rank nothing; a query that is not finite has finite heads */
            if (threads == 1 && w.g->heads >= 16) test_steps(&w, 4, 52);
#else
            test_schedules(&w, schedules, 24);
            test_refusals(&w);
            test_refused_views(&w);
            test_refused_options(&w), test_refused_caches(&w);
            if (w.g->max_rewind >= 2 && w.g->max_rewind < TOKENS / 2) test_turns(&w);
            if (w.g->w < 16 && w.g->max_rewind) test_taken_back(&w);
            test_full(&w, 1);
#endif
#ifdef CHECK_INSIDE
            for (int count = 1; count <= w.g->max_rewind + 1 && count <= 18; count += 8)
                test_statuses(&w, count);
#endif
            end(&w);
        }
    if (many || !brief) {
        test_many(&geometries[2], 70, 2); /* on CUDA an mlp, whose rows are packed */
        test_many(&geometries[0], MOST, 1);
    }
    printf("%d schedules of %d actions in all; keys read: cmp %lld, slc %lld, win %lld\n",
           schedules_done, actions_done, (long long)all_reads.cmp, (long long)all_reads.slc,
           (long long)all_reads.win);
    return check_done("test_decode");
}

/* web.c - see web.h. The model is the trainers' own, on the trainers' operations for the CPU; what
   is here are its file, the clock beside its attention, and what a query reads. */
#include "web.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "inspect/measure.h"
#include "model/model_inside.h"

enum { MOST_SELECTED = 64, MOST_SIZE = 1 << 24 };

typedef struct web {
    ops table; /* the model's: `inner`, but for attention. First, for that gets only this */
    ops inner;
    model model;
    int sizes[WEB_SIZES];
    int isa;
    double nsa_ms, dense_ms, bits;
    int tokens; /* of the text that was read; 0: none */
    real *dense_out, *dense_lse, *probabilities;
    void *dense_workspace, *workspace;
    size_t dense_bytes, workspace_bytes;
    int32_t reads[BRANCHES];
    double *look; /* all parts, one after another */
    double *keys; /* room for measure.h */
} web;

static web page;
static fault why;

const char *web_fault(void) {
    return why.text;
}

void *web_allocate(int bytes) {
    return malloc(bytes > 0 ? (size_t)bytes : 1);
}

void web_release(void *memory) {
    free(memory);
}

static double milliseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* Memory that grows: *have bytes of it, of which `want` are needed. */
static bool reserve(void **memory, size_t *have, size_t want) {
    if (want <= *have) return true;
    free(*memory);
    *memory = malloc(want);
    *have = *memory ? want : 0;
    return *memory || fault_set(&why, "no memory for %zu bytes", want);
}

/* ---- Attention, timed ------------------------------------------------------------------------ */

static void dense_beside(web *w, const nsa_attention *x, const nsa_desc *d) {
    nsa_attend dense = {.q = x->q, .k = x->k_slc, .v = x->v_slc};
    dense.out = nsa_tensor_bthd(w->dense_out, NSA_REAL_DTYPE, d->tokens, d->heads, d->dim_v);
    dense.lse = nsa_tensor_bthd(w->dense_lse, NSA_REAL_DTYPE, d->tokens, d->heads, 1);
    double start = milliseconds();
    w->inner.dense_forward(&w->inner, &dense, d, w->dense_workspace, w->dense_bytes);
    w->dense_ms += milliseconds() - start;
}

static void timed_attention(const ops *o, const nsa_attention *x, const nsa_desc *d,
                            void *workspace, size_t bytes) {
    web *w = (web *)(uintptr_t)o; /* the table is the page's first field, not const */
    nsa_desc with = *d;
    with.isa = (nsa_isa)w->isa;
    double start = milliseconds();
    w->inner.attention_forward(o, x, &with, workspace, bytes);
    w->nsa_ms += milliseconds() - start;
    dense_beside(w, x, &with);
}

/* ---- The file -------------------------------------------------------------------------------- */

/* What pack.py writes: these numbers, the base of RoPE, then tensors. */
enum {
    FILE_MAGIC,
    FILE_VOCAB,
    FILE_DIM,
    FILE_LAYERS,
    FILE_HEADS,
    FILE_KV_HEADS,
    FILE_DIM_K,
    FILE_DIM_V,
    FILE_CMP_BLOCK,
    FILE_CMP_STRIDE,
    FILE_SLC_BLOCK,
    FILE_SLC_COUNT,
    FILE_WINDOW,
    FILE_PHI,
    FILE_GATE,
    FILE_PAIRS,
    FILE_CONTEXT,
    FILE_STEPS,
    FILE_TENSORS,
    FILE_NUMBERS
};
static const int32_t MAGIC = 0x3161736e; /* "nsa1" */

/* A tensor's head: a name, and how its values follow. */
typedef struct packed {
    char name[PARAM_NAME_BYTES];
    int32_t bits; /* 32: reals; 8: a factor for each row, then rows of signed bytes */
    int32_t rows, columns;
} packed;

typedef struct reader {
    const uint8_t *at, *end;
} reader;

static const uint8_t *take_bytes(reader *r, size_t bytes) {
    size_t whole = (bytes + 3) / 4 * 4; /* every part begins at a multiple of 4 */
    const uint8_t *at = r->at;
    if ((size_t)(r->end - r->at) < whole) return NULL;
    r->at += whole;
    return at;
}

static bool unpack(reader *r, const packed *head, real *to) {
    size_t rows = (size_t)head->rows, columns = (size_t)head->columns;
    const uint8_t *from =
        take_bytes(r, head->bits == 32 ? rows * columns * sizeof(float) : rows * 4);
    if (!from) return false;
    if (head->bits == 32) {
        memcpy(to, from, rows * columns * sizeof(float));
        return true;
    }
    const int8_t *values = (const int8_t *)take_bytes(r, rows * columns);
    for (size_t i = 0; values && i < rows; i++) {
        float factor;
        memcpy(&factor, from + i * sizeof factor, sizeof factor);
        for (size_t j = 0; j < columns; j++) to[i * columns + j] = factor * values[i * columns + j];
    }
    return values != NULL;
}

static bool read_tensor(reader *r, const param *x, real *to) {
    packed head;
    const uint8_t *from = take_bytes(r, sizeof head);
    if (!from) return fault_set(&why, "the model's file ends before %s", x->name);
    memcpy(&head, from, sizeof head);
    if (memcmp(head.name, x->name, sizeof head.name))
        return fault_set(&why, "the model's file has %.63s where %s is expected", head.name,
                         x->name);
    if (head.rows < 1 || head.columns < 1 || head.rows > MOST_SIZE || head.columns > MOST_SIZE ||
        (int64_t)head.rows * head.columns != x->count || (head.bits != 8 && head.bits != 32))
        return fault_set(&why, "the model's file: %s has another shape than the model's", x->name);
    return unpack(r, &head, to) || fault_set(&why, "the model's file ends inside %s", x->name);
}

static model_config config_of(const int32_t *n, double base) {
    model_config c = tinylm(n[FILE_VOCAB], n[FILE_DIM], n[FILE_LAYERS], n[FILE_HEADS],
                            n[FILE_KV_HEADS], n[FILE_DIM_K], n[FILE_DIM_V], n[FILE_CMP_BLOCK],
                            n[FILE_CMP_STRIDE], n[FILE_SLC_BLOCK], MOST_SELECTED, n[FILE_WINDOW]);
    c.phi = (nsa_phi)n[FILE_PHI];
    c.gate = (nsa_gate_kind)n[FILE_GATE];
    c.rope_pairs = (nsa_rope_pairs)n[FILE_PAIRS];
    c.rope_base = base;
    return c;
}

static bool read_numbers(reader *r, int32_t *n, double *base) {
    const uint8_t *from = take_bytes(r, FILE_NUMBERS * sizeof *n);
    const uint8_t *of_base = take_bytes(r, sizeof *base);
    if (!from || !of_base) return fault_set(&why, "the model's file is cut short");
    memcpy(n, from, FILE_NUMBERS * sizeof *n);
    memcpy(base, of_base, sizeof *base);
    if (n[FILE_MAGIC] != MAGIC) return fault_set(&why, "this is no model that pack.py wrote");
    for (int i = FILE_VOCAB; i < FILE_NUMBERS; i++)
        if (n[i] < 0 || n[i] > MOST_SIZE)
            return fault_set(&why, "the model's file: number %d is %d, allowed: 0 to %d", i, n[i],
                             MOST_SIZE);
    if (n[FILE_VOCAB] != UCHAR_MAX + 1)
        return fault_set(&why, "the model knows %d tokens; the page takes models of bytes: 256",
                         n[FILE_VOCAB]);
    return true;
}

/* ---- Opening --------------------------------------------------------------------------------- */

static void close_page(void) {
    if (page.model.o) model_close(&page.model);
    if (page.inner.state) ops_cpu_close(&page.inner);
    free(page.dense_out);
    free(page.dense_lse);
    free(page.probabilities);
    free(page.dense_workspace);
    free(page.workspace);
    free(page.look);
    free(page.keys);
    memset(&page, 0, sizeof page);
}

static void note_sizes(const int32_t *n) {
    const model *m = &page.model;
    const nsa_desc d = model_desc(m, 0, 1, n[FILE_CONTEXT]);
    const int sizes[WEB_SIZES] = {
        n[FILE_LAYERS],       n[FILE_HEADS],     n[FILE_KV_HEADS],  n[FILE_CMP_BLOCK],
        n[FILE_CMP_STRIDE],   n[FILE_SLC_BLOCK], n[FILE_SLC_COUNT], n[FILE_WINDOW],
        d.slc_init,           d.slc_local,       MOST_SELECTED,     n[FILE_CONTEXT],
        (int)m->params.count, n[FILE_STEPS],     n[FILE_VOCAB],     n[FILE_DIM_K]};
    memcpy(page.sizes, sizes, sizeof sizes);
}

/* The parts of web_look, in places for the longest text: blocks, compressed blocks, tokens. */
static size_t longest_look(int context) {
    return BRANCHES + 5 * (size_t)context;
}

static bool open_page(reader *r) {
    int32_t n[FILE_NUMBERS];
    double base;
    if (!read_numbers(r, n, &base) || !ops_cpu_open(&page.inner, 1, &why)) return false;
    page.table = page.inner;
    page.table.attention_forward = timed_attention;
    model_config c = config_of(n, base);
    /* As for training, for then every layer's arrays stay. */
    model_options options = {.batch = 1, .tokens = n[FILE_CONTEXT], .training = true};
    model *m = &page.model;
    if (!model_open(m, &c, &options, &page.table, 0, &why)) return false;
    if (m->params.length != n[FILE_TENSORS])
        return fault_set(&why, "the model's file has %d tensors, the model %d", n[FILE_TENSORS],
                         m->params.length);
    for (int i = 0; i < m->params.length; i++)
        if (!read_tensor(r, &m->params.list[i], m->params.value + m->params.list[i].offset))
            return false;
    if (r->at != r->end) return fault_set(&why, "the model's file goes on behind its tensors");
    size_t context = (size_t)n[FILE_CONTEXT], heads = (size_t)n[FILE_HEADS];
    page.dense_out = malloc(context * heads * (size_t)n[FILE_DIM_V] * sizeof(real));
    page.dense_lse = malloc(context * heads * sizeof(real));
    page.probabilities = malloc(context * (size_t)n[FILE_VOCAB] * sizeof(real));
    page.look = malloc(longest_look(n[FILE_CONTEXT]) * sizeof(double));
    page.keys = malloc(context * sizeof(double));
    if (!page.dense_out || !page.dense_lse || !page.probabilities || !page.look || !page.keys)
        return fault_set(&why, "out of memory");
    note_sizes(n);
    return true;
}

int web_open(const uint8_t *file, int bytes) {
    reader r = {file, file + (bytes > 0 ? bytes : 0)};
    close_page();
    if (open_page(&r)) return 1;
    close_page();
    return 0;
}

int web_size(int which) {
    return which >= 0 && which < WEB_SIZES ? page.sizes[which] : -1;
}

/* ---- Reading --------------------------------------------------------------------------------- */

/* The model was opened for the longest list; what n, w and l' change besides is the workspace. */
static bool set_geometry(int tokens, int slc_count, int window, int slc_block) {
    model *m = &page.model;
    model_config before = m->config;
    m->config.n_sel = slc_count;
    m->config.w = window;
    m->config.l_sel = slc_block;
    nsa_desc d = model_desc(m, 0, 1, tokens);
    const slice text = {.batch = 1, .tokens = tokens, .count = tokens};
    nsa_status status = slc_count <= MOST_SELECTED ? nsa_desc_check(&d) : NSA_ERROR_SIZE;
    bool ok =
        status == NSA_OK &&
        reserve(&page.workspace, &page.workspace_bytes, layer_workspace(m, 0, &text)) &&
        reserve(&page.dense_workspace, &page.dense_bytes, page.inner.dense_forward_bytes(m->o, &d));
    if (!ok) {
        m->config = before;
        if (status == NSA_OK) return false;
        return fault_set(&why, "n %d, w %d, l' %d: %s", slc_count, window, slc_block,
                         nsa_status_text(status));
    }
    m->scratch.workspace = page.workspace;
    m->scratch.workspace_bytes = page.workspace_bytes;
    return true;
}

/* Logits of all rows become probabilities; returns the bits that the text takes. */
static double softmax_rows(real *x, const int32_t *tokens, int rows, int vocab) {
    double bits = 0;
    for (int t = 0; t < rows; t++, x += vocab) {
        double largest = -INFINITY, sum = 0;
        for (int i = 0; i < vocab; i++) largest = fmax(largest, (double)x[i]);
        if (t + 1 < rows) bits -= ((double)x[tokens[t + 1]] - largest) / log(2);
        for (int i = 0; i < vocab; i++) sum += exp((double)x[i] - largest);
        if (t + 1 < rows) bits += log2(sum);
        for (int i = 0; i < vocab; i++) x[i] = (real)(exp((double)x[i] - largest) / sum);
    }
    return bits;
}

static bool run_model(const int32_t *tokens, int count) {
    model *m = &page.model;
    const model_config *c = &m->config;
    if (!model_next(m, tokens, count, page.probabilities, &why)) return false;
    page.inner.linear_forward(&page.inner, page.probabilities, m->scratch.norm,
                              model_weight(m, m->head), NULL, count, c->dim, c->vocab);
    double bits = softmax_rows(page.probabilities, tokens, count, c->vocab);
    page.bits = count > 1 ? bits / (count - 1) : 0;
    return true;
}

int web_read(const uint8_t *text, int bytes, int slc_count, int window, int slc_block, int isa) {
    page.tokens = 0;
    page.nsa_ms = page.dense_ms = page.bits = 0;
    page.isa = isa;
    if (!page.model.o) return fault_set(&why, "no model is open");
    if (bytes < 1 || bytes > page.sizes[WEB_CONTEXT])
        return fault_set(&why, "a text of %d bytes; allowed: 1 to %d", bytes,
                         page.sizes[WEB_CONTEXT]);
    if (!nsa_isa_available((nsa_isa)isa))
        return fault_set(&why, "instruction set %d is not here", isa);
    if (!set_geometry(bytes, slc_count, window, slc_block)) return 0;
    int32_t *tokens = malloc((size_t)bytes * sizeof *tokens);
    if (!tokens) return fault_set(&why, "out of memory");
    for (int i = 0; i < bytes; i++) tokens[i] = text[i];
    if (run_model(tokens, bytes)) page.tokens = bytes;
    free(tokens);
    return page.tokens > 0;
}

double web_nsa_ms(void) {
    return page.nsa_ms;
}

double web_dense_ms(void) {
    return page.dense_ms;
}

double web_bits(void) {
    return page.bits;
}

/* ---- What a query reads ---------------------------------------------------------------------- */

static bool is_there(int layer, int head, int heads, int token) {
    return token >= 0 && token < page.tokens && layer >= 0 && layer < page.model.config.n_layers &&
           head >= 0 && head < heads;
}

static const int32_t *blocks_at(const nsa_attention *x, int token, int kv_head) {
    return (const int32_t *)x->blocks.data + token * x->blocks.token + kv_head * x->blocks.head;
}

/* Tokens of block j that a query reads. */
static int block_tokens(const nsa_desc *d, int token, int j) {
    int begin = j * d->slc_block, end = begin + d->slc_block;
    return (end <= token ? end : token + 1) - begin;
}

const int32_t *web_blocks(int layer, int kv_head, int token) {
    if (!is_there(layer, kv_head, page.model.config.n_kv_groups, token)) return NULL;
    nsa_attention x = layer_views(&page.model, layer);
    return blocks_at(&x, token, kv_head);
}

const int32_t *web_reads(int layer, int kv_head, int token) {
    const int32_t *list = web_blocks(layer, kv_head, token);
    nsa_desc d = layer_desc(&page.model, 0);
    if (!list) return NULL;
    page.reads[0] = nsa_cmp_visible(&d, token);
    page.reads[1] = 0;
    for (int i = 0; i < d.slc_count && list[i] >= 0; i++)
        page.reads[1] += block_tokens(&d, token, list[i]);
    page.reads[2] = token + 1 - nsa_window_begin(&d, token);
    return page.reads;
}

int web_part(int which) {
    nsa_desc d = layer_desc(&page.model, 0);
    const int sizes[WEB_PARTS] = {BRANCHES,
                                  nsa_slc_count(&d, page.tokens),
                                  nsa_slc_count(&d, page.tokens),
                                  nsa_cmp_count(&d, page.tokens),
                                  page.tokens,
                                  page.tokens};
    return page.tokens && which >= 0 && which < WEB_PARTS ? sizes[which] : 0;
}

/* p[s] = exp(scale q k[s] - lse) for keys begin .. end - 1. */
static void softmax_span(const nsa_desc *d, const nsa_tensor *q, const nsa_tensor *k,
                         const nsa_tensor *lse, int head, int token, int begin, int end,
                         double *p) {
    const real *row = (const real *)q->data + token * q->token + head * q->head;
    double log_sum = (double)*((const real *)lse->data + token * lse->token + head * lse->head);
    int kv_head = head / (d->heads / d->kv_heads);
    for (int s = begin; s < end; s++) {
        const real *key = (const real *)k->data + s * k->token + kv_head * k->head;
        double score = 0;
        for (int c = 0; c < d->dim; c++) score += (double)row[c] * (double)key[c];
        p[s] = exp(score / sqrt((double)d->dim) - log_sum);
    }
}

const double *web_look(int layer, int head, int token) {
    double *part[WEB_PARTS], *end = page.look;
    if (!is_there(layer, head, page.model.config.n_heads, token)) return NULL;
    for (int i = 0; i < WEB_PARTS; i++) {
        part[i] = end;
        end += web_part(i);
    }
    memset(page.look, 0, (size_t)(end - page.look) * sizeof *end);
    nsa_desc d = layer_desc(&page.model, 0);
    nsa_attention x = layer_views(&page.model, layer);
    int kv_head = head / (d.heads / d.kv_heads);
    const int32_t *list = blocks_at(&x, token, kv_head);
    measure_gates(&x, &d, token, kv_head, part[WEB_GATES]);
    measure_scores(&x, &d, token, kv_head, part[WEB_SCORES]);
    measure_mass(&x, &d, token, kv_head, page.keys, part[WEB_MASS]);
    softmax_span(&d, &x.q, &x.k_cmp.out, &x.lse_cmp, head, token, 0, nsa_cmp_visible(&d, token),
                 part[WEB_P_CMP]);
    for (int i = 0; i < d.slc_count && list[i] >= 0; i++) {
        int begin = list[i] * d.slc_block;
        softmax_span(&d, &x.q, &x.k_slc, &x.lse_slc, head, token, begin,
                     begin + block_tokens(&d, token, list[i]), part[WEB_P_SLC]);
    }
    softmax_span(&d, &x.q, &x.k_win, &x.lse_win, head, token, nsa_window_begin(&d, token),
                 token + 1, part[WEB_P_WIN]);
    return page.look;
}

const float *web_next(int token) {
    if (token < 0 || token >= page.tokens) return NULL;
    return page.probabilities + (size_t)token * (size_t)page.model.config.vocab;
}

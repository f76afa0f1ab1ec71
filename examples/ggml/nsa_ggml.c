/* nsa_ggml.c - see nsa_ggml.h. Each task takes blocks of query rows or, where there are fewer rows
   than tasks, key-value heads; a slice of either gives the bits of the whole. */
#define NSA_IMPLEMENTATION
#include "nsa_ggml.h"
#include <stdlib.h>

/* A view of ggml's: its dimensions are (width, heads, tokens), its strides bytes. */
static nsa_tensor view(const struct ggml_tensor *t) {
    nsa_tensor x = {t->data, NSA_F32, 0, 0, 0};
    if (t->type == GGML_TYPE_F16) x.dtype = NSA_F16;
    if (t->type == GGML_TYPE_BF16) x.dtype = NSA_BF16;
    int64_t size = (int64_t)ggml_type_size(t->type);
    x.head = (int64_t)t->nb[1] / size;
    x.token = (int64_t)t->nb[2] / size;
    x.batch = (int64_t)t->nb[3] / size;
    return x;
}

static nsa_tensor at(nsa_tensor x, int64_t token, int64_t head) {
    int64_t bytes = x.dtype == NSA_F32 || x.dtype == NSA_I32 ? 4 : 2;
    x.data = (char *)x.data + (x.token * token + x.head * head) * bytes;
    return x;
}

/* ---- One slice of the chain ---------------------------------------------------------------- */

typedef struct chain {
    nsa_attend cmp, slc, win;
    nsa_select select;
    nsa_gate gate;
} chain;

/* Memory that is handed out from the front; without data it only counts. */
typedef struct arena {
    char *data;
    size_t used;
} arena;

static nsa_tensor rows(arena *a, const nsa_desc *d, nsa_dtype dtype, int heads, int width) {
    nsa_tensor x = nsa_tensor_bthd(NULL, dtype, d->count, heads, width);
    if (a->data) x.data = a->data + a->used;
    a->used += ((size_t)d->count * (size_t)heads * (size_t)width * 4 + 63) / 64 * 64;
    return x;
}

/* What the branches leave for one another, for `d`'s rows. */
static void lay_out(chain *c, const nsa_desc *d, arena *a) {
    nsa_attend *branches[] = {&c->cmp, &c->slc, &c->win};
    for (int i = 0; i < 3; i++) {
        branches[i]->out = rows(a, d, NSA_F32, d->heads, d->dim_v);
        branches[i]->lse = rows(a, d, NSA_F32, d->heads, 1);
    }
    c->select.blocks = rows(a, d, NSA_I32, d->kv_heads, nsa_block_list_width(d));
}

static size_t workspace_size(const nsa_desc *d) {
    size_t sizes[] = {nsa_attend_cmp_forward_workspace_size(d), nsa_select_blocks_workspace_size(d),
                      nsa_attend_slc_forward_workspace_size(d),
                      nsa_attend_win_forward_workspace_size(d)};
    size_t most = 0;
    for (int i = 0; i < 4; i++) most = sizes[i] > most ? sizes[i] : most;
    return most;
}

/* Rows d->first .. of kv heads head .. head + d->kv_heads - 1 of the operation's tensors. */
static nsa_status run_slice(const struct ggml_tensor *op, const nsa_ggml *layer, const nsa_desc *d,
                            int head, int ith) {
    const nsa_desc *all = &layer->desc;
    chain c = {0};
    arena a = {layer->memory + (size_t)ith * layer->task_bytes, 0};
    int row = d->first - all->first, query_head = head * (all->heads / all->kv_heads);
    lay_out(&c, d, &a);
    c.cmp.q = c.slc.q = c.win.q = c.select.q = at(view(op->src[0]), row, query_head);
    c.slc.k = c.win.k = at(view(op->src[1]), 0, head);
    c.slc.v = c.win.v = at(view(op->src[2]), 0, head);
    c.cmp.k = c.select.k = at(view(op->src[3]), 0, head);
    c.cmp.v = at(view(op->src[4]), 0, head);
    c.select.lse = c.cmp.lse, c.slc.blocks = c.select.blocks;
    c.gate.logits = at(view(op->src[5]), row, head * (all->gate_heads / all->kv_heads));
    c.gate.cmp = c.cmp.out, c.gate.slc = c.slc.out, c.gate.win = c.win.out;
    c.gate.out = at(view(op), row, query_head);

    char *workspace = a.data + a.used;
    size_t bytes = layer->task_bytes - a.used;
    nsa_status s = nsa_attend_cmp_forward(&c.cmp, d, workspace, bytes);
    if (s == NSA_OK) s = nsa_select_blocks(&c.select, d, workspace, bytes);
    if (s == NSA_OK) s = nsa_attend_slc_forward(&c.slc, d, workspace, bytes);
    if (s == NSA_OK) s = nsa_attend_win_forward(&c.win, d, workspace, bytes);
    if (s == NSA_OK) s = nsa_gate_forward(&c.gate, d);
    return s;
}

/* ---- The operations ------------------------------------------------------------------------ */

/* Rows begin .. end - 1 of the graph's, as many at a time as a task has memory for. */
static nsa_status attend_rows(const struct ggml_tensor *op, const nsa_ggml *layer, int begin,
                              int end, int ith) {
    nsa_status s = NSA_OK;
    for (int row = begin; row < end && s == NSA_OK; row += layer->slice) {
        nsa_desc d = layer->desc;
        d.first += row;
        d.count = end - row < layer->slice ? end - row : layer->slice;
        d.tokens = d.first + d.count; /* no later key is read */
        s = run_slice(op, layer, &d, 0, ith);
    }
    return s;
}

/* Piece i of n of a whole. */
static int piece(int whole, int i, int n) {
    return (int)((int64_t)whole * i / n);
}

static nsa_status attend_heads(const struct ggml_tensor *op, const nsa_ggml *layer, int ith,
                               int nth) {
    nsa_desc d = layer->desc;
    int head = piece(d.kv_heads, ith, nth), heads = piece(d.kv_heads, ith + 1, nth) - head;
    d.heads = d.heads / d.kv_heads * heads;
    d.gate_heads = d.gate_heads / d.kv_heads * heads;
    d.kv_heads = heads;
    return heads ? run_slice(op, layer, &d, head, ith) : NSA_OK;
}

/* Task i of n computes pieces i and 2 n - 1 - i of 2 n: later queries read more keys, so these two
   are as much work as any other two. */
static nsa_status attend(const struct ggml_tensor *op, const nsa_ggml *layer, int ith, int nth) {
    int count = layer->desc.count, n = 2 * nth, last = n - 1 - ith;
    if (count < n) return attend_heads(op, layer, ith, nth);
    nsa_status s = attend_rows(op, layer, piece(count, ith, n), piece(count, ith + 1, n), ith);
    if (s != NSA_OK) return s;
    return attend_rows(op, layer, piece(count, last, n), piece(count, last + 1, n), ith);
}

static void compute_attention(struct ggml_tensor *op, int ith, int nth, void *userdata) {
    nsa_ggml *layer = (nsa_ggml *)userdata;
    if (nth > layer->tasks) nth = layer->tasks; /* there is no memory for more */
    if (ith < nth && layer->status[ith] == NSA_OK) layer->status[ith] = attend(op, layer, ith, nth);
}

static void compute_compress(struct ggml_tensor *op, int ith, int nth, void *userdata) {
    nsa_ggml *layer = (nsa_ggml *)userdata;
    if (nth > layer->tasks) nth = layer->tasks;
    if (ith >= nth || layer->status[ith] != NSA_OK) return;
    nsa_desc d = layer->desc;
    int before = nsa_cmp_count(&d, d.first), blocks = nsa_cmp_count(&d, d.tokens) - before;
    int begin = before + piece(blocks, ith, nth), end = before + piece(blocks, ith + 1, nth);
    if (begin == end) return;
    nsa_compress x = {0};
    x.dim = (int)op->ne[0];
    x.x = at(view(op->src[1]), (int64_t)begin * d.cmp_stride, 0);
    x.out = at(view(op), begin, 0);
    d.tokens = (end - begin - 1) * d.cmp_stride + d.cmp_block;
    d.first = 0, d.count = d.tokens;
    layer->status[ith] = nsa_compress_forward(
        &x, &d, layer->memory + (size_t)ith * layer->task_bytes, layer->task_bytes);
}

struct ggml_tensor *nsa_ggml_compress(struct ggml_context *ctx, struct ggml_tensor *compressed,
                                      struct ggml_tensor *cache, nsa_ggml *layer) {
    return ggml_custom_inplace(ctx, compressed, &cache, 1, compute_compress, GGML_N_TASKS_MAX,
                               layer);
}

struct ggml_tensor *nsa_ggml_attention(struct ggml_context *ctx, struct ggml_tensor *q,
                                       struct ggml_tensor *k, struct ggml_tensor *v,
                                       struct ggml_tensor *k_cmp, struct ggml_tensor *v_cmp,
                                       struct ggml_tensor *gates, nsa_ggml *layer) {
    struct ggml_tensor *args[] = {q, k, v, k_cmp, v_cmp, gates};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, v->ne[0], q->ne[1], q->ne[2], 1, args, 6,
                          compute_attention, GGML_N_TASKS_MAX, layer);
}

/* ---- The layer ----------------------------------------------------------------------------- */

void nsa_ggml_rows(nsa_ggml *layer, int first, int count) {
    layer->desc.first = first, layer->desc.count = count;
    layer->desc.tokens = first + count;
}

nsa_status nsa_ggml_status(nsa_ggml *layer) {
    nsa_status s = NSA_OK;
    for (int i = 0; i < layer->tasks; i++) {
        if (s == NSA_OK) s = layer->status[i];
        layer->status[i] = NSA_OK;
    }
    return s;
}

static size_t task_bytes(const nsa_desc *d) {
    chain c;
    arena a = {NULL, 0};
    lay_out(&c, d, &a);
    size_t most = a.used + workspace_size(d);
    for (int i = 0; i < 2; i++) {
        nsa_compress phi = {0};
        phi.dim = i ? d->dim_v : d->dim;
        size_t bytes = nsa_compress_forward_workspace_size(&phi, d);
        most = bytes > most ? bytes : most;
    }
    return (most + 63) / 64 * 64;
}

nsa_ggml *nsa_ggml_new(const nsa_desc *desc, int rows, int tasks) {
    nsa_ggml *layer = (nsa_ggml *)calloc(1, sizeof *layer);
    if (!layer) return NULL;
    layer->desc = *desc, layer->tasks = tasks;
    layer->desc.threads = 1; /* ggml's own, not OpenMP's */
    nsa_desc d = layer->desc;
    d.first = 0, d.count = rows;
    if (rows > 0 && tasks > 0 && nsa_desc_check(&d) == NSA_OK) {
        int few = rows < 2 * tasks ? rows : 2 * tasks; /* what attend_heads takes at once */
        layer->slice = (rows + 2 * tasks - 1) / (2 * tasks);
        if (layer->slice < few) layer->slice = few;
        d.count = layer->slice;
        layer->task_bytes = task_bytes(&d);
        layer->memory = (char *)malloc((size_t)tasks * layer->task_bytes);
        layer->status = (nsa_status *)calloc((size_t)tasks, sizeof *layer->status);
    }
    if (layer->memory && layer->status) return layer;
    nsa_ggml_free(layer);
    return NULL;
}

void nsa_ggml_free(nsa_ggml *layer) {
    if (!layer) return;
    free(layer->memory);
    free(layer->status);
    free(layer);
}

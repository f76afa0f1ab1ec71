/* model_layer.c - one layer of TinyLM, forward and backward. Twin: model.h. It says what reads and
   writes what; the arithmetic is the back end's. */
#include <string.h>

#include "model/model_inside.h"

/* ---- Views --------------------------------------------------------------------------------- */

static void *at(const model *m, void *base, int64_t elements) {
    return (char *)base + (size_t)elements * m->element;
}

attention_kind layer_kind(const model *m, int layer) {
    return (attention_kind)m->config.attention[layer];
}

static bool is_sparse(const model *m, int layer) {
    return attention_is_sparse(layer_kind(m, layer));
}

int layer_pairs(const model *m, int layer) {
    return m->config.shared_kv ? 1 : attention_pairs(layer_kind(m, layer));
}

bool layer_linear_gate(const model *m, int layer) {
    return m->config.gate_linear && is_sparse(m, layer);
}

int layer_rotated(const model *m, int layer) {
    const model_config *c = &m->config;
    return c->d_k * (c->n_heads + layer_pairs(m, layer) * c->n_kv_groups);
}

int layer_fused(const model *m, int layer) {
    const model_config *c = &m->config;
    int gates = layer_linear_gate(m, layer) ? BRANCHES * c->n_heads : 0;
    return layer_rotated(m, layer) + layer_pairs(m, layer) * c->n_kv_groups * c->d_v + gates;
}

nsa_desc model_desc(const model *m, int layer, int batch, int tokens) {
    const model_config *c = &m->config;
    nsa_desc d = nsa_desc_default(batch, tokens, c->n_heads, c->n_kv_groups, c->d_k);
    d.dim_v = c->d_v;
    d.cmp_block = c->l;
    d.cmp_stride = c->d;
    d.slc_block = c->l_sel;
    d.slc_count = c->n_sel;
    d.slc_init = c->slc_init;
    d.slc_local = c->slc_local;
    d.window = layer_kind(m, layer) == ATTENTION_CMP_SLC ? 1 : c->w;
    d.gate = c->gate;
    d.gate_heads = c->gate_linear ? c->n_heads : c->n_kv_groups;
    d.threads = m->o->threads;
    return d;
}

int layer_keys(const model *m, int layer) {
    const model_config *c = &m->config;
    return layer_pairs(m, layer) * c->n_kv_groups * (c->d_k + c->d_v);
}

static nsa_desc slice_desc(const model *m, int layer, const slice *p) {
    nsa_desc d = model_desc(m, layer, p->batch, p->tokens);
    d.first = p->first;
    d.count = p->count;
    d.begins = p->begins;
    if (p->begins) d.rows = p->rows;
    return d;
}

nsa_desc layer_desc(const model *m, int layer) {
    return slice_desc(m, layer, &m->slices[0]);
}

/* Heads of `width` from column `column` on of a matrix with `stride` columns. */
static nsa_tensor heads(const model *m, void *base, int64_t stride, int64_t column, int width) {
    nsa_tensor t = {at(m, base, column), m->o->dtype, stride * m->tokens_each, stride, width};
    return t;
}

static nsa_tensor packed(const model *m, void *base, int count, int width) {
    return heads(m, base, (int64_t)count * width, 0, width);
}

/* The same from a slice's first query on. */
static nsa_tensor query_heads(const model *m, const slice *p, void *base, int64_t stride,
                              int64_t column, int width) {
    return heads(m, base, stride, p->query_row * stride + column, width);
}

static nsa_tensor query_packed(const model *m, const slice *p, void *base, int count, int width) {
    return query_heads(m, p, base, (int64_t)count * width, 0, width);
}

static nsa_tensor query_reals(const model *m, const slice *p, real *base, int count) {
    nsa_tensor t = packed(m, base + p->query_row * count, count, 1);
    t.dtype = NSA_REAL_DTYPE;
    return t;
}

static nsa_tensor compressed(const model *m, void *base, const nsa_desc *d, int width) {
    nsa_tensor t = packed(m, base, m->config.n_kv_groups, width);
    t.batch = t.token * nsa_cmp_count(d, d->tokens);
    return t;
}

/* A tensor of phi, (groups, rows, columns) or (groups, columns): its values or its gradient. */
static nsa_tensor phi_tensor(const model *m, int place, bool gradient) {
    nsa_tensor t = {0};
    if (place < 0) return t;
    const param *x = &m->params.list[place];
    t.data = gradient ? (void *)model_gradient(m, place) : model_weight(m, place);
    t.dtype = gradient ? NSA_REAL_DTYPE : m->o->dtype;
    t.token = x->shape[x->dims - 1];
    t.head = x->count / x->shape[0];
    return t;
}

static nsa_compress phi(const model *m, const int *slots, int width, bool gradient) {
    nsa_compress p = {.phi = m->config.phi, .dim = width, .hidden = width};
    p.pos = phi_tensor(m, slots[PHI_POS], gradient);
    p.w1 = phi_tensor(m, slots[PHI_W1], gradient);
    p.b1 = phi_tensor(m, slots[PHI_B1], gradient);
    p.w2 = phi_tensor(m, slots[PHI_W2], gradient);
    p.b2 = phi_tensor(m, slots[PHI_B2], gradient);
    return p;
}

/* Columns of qkv and of its gradient: q, k of each branch, v of each branch, a linear gate. A
   branch without a pair of its own reads the last one. */
static int64_t q_columns(const model *m) {
    return (int64_t)m->config.n_heads * m->config.d_k;
}

static int pair_of(const model *m, int layer, int branch) {
    int last = layer_pairs(m, layer) - 1;
    return branch < last ? branch : last;
}

static int64_t k_column(const model *m, int layer, int branch) {
    return q_columns(m) +
           (int64_t)pair_of(m, layer, branch) * m->config.n_kv_groups * m->config.d_k;
}

static int64_t v_column(const model *m, int layer, int branch) {
    return layer_rotated(m, layer) +
           (int64_t)pair_of(m, layer, branch) * m->config.n_kv_groups * m->config.d_v;
}

/* The keys or values of a branch, from a slice's first one on: this process's own columns of qkv,
   or where the sequence is divided those of all processes. */
static nsa_tensor key_heads(const model *m, int layer, const slice *p, int64_t column, int width) {
    int fused = layer_fused(m, layer), keys = layer_keys(m, layer);
    if (!m->split) return heads(m, m->acts[layer].qkv, fused, column, width);
    void *data = at(m, m->scratch.keys, p->key_row * keys + column - q_columns(m));
    return (nsa_tensor){data, m->o->dtype, (int64_t)keys * m->sequence, keys, width};
}

/* Their gradient: of k before the rotation is undone. */
static nsa_tensor dkey_heads(const model *m, int layer, const slice *p, int64_t column, int width) {
    const scratch *s = &m->scratch;
    int rotated = layer_rotated(m, layer), keys = layer_keys(m, layer);
    if (!m->split && column < rotated) return heads(m, s->drotated, rotated, column, width);
    if (!m->split) return heads(m, s->dqkv, layer_fused(m, layer), column, width);
    real *data = s->dkeys + p->key_row * keys + column - q_columns(m);
    return (nsa_tensor){data, NSA_REAL_DTYPE, (int64_t)keys * m->sequence, keys, width};
}

/* The gate's logits or their gradient: those of an MLP in an array of their own, those of a linear
   map the last columns of qkv. */
static nsa_tensor gate_view(const model *m, int layer, const slice *p, void *own, void *qkv) {
    const model_config *c = &m->config;
    int fused = layer_fused(m, layer);
    if (!c->gate_linear) return query_packed(m, p, own, c->n_kv_groups, BRANCHES);
    return query_heads(m, p, qkv, fused, fused - BRANCHES * c->n_heads, BRANCHES);
}

static nsa_attention sparse_views(const model *m, int layer, const slice *p) {
    const model_config *c = &m->config;
    const layer_acts *a = &m->acts[layer];
    const int *slots = m->slots[layer].of;
    nsa_desc d = slice_desc(m, layer, p);
    nsa_attention x = {0};
    x.q = query_heads(m, p, a->qkv, layer_fused(m, layer), 0, c->d_k);
    x.k_cmp = phi(m, slots + PHI_K, c->d_k, false);
    x.v_cmp = phi(m, slots + PHI_V, c->d_v, false);
    x.k_cmp.x = key_heads(m, layer, p, k_column(m, layer, 0), c->d_k);
    x.v_cmp.x = key_heads(m, layer, p, v_column(m, layer, 0), c->d_v);
    x.k_cmp.out = compressed(m, a->k_cmp, &d, c->d_k);
    x.v_cmp.out = compressed(m, a->v_cmp, &d, c->d_v);
    x.k_slc = key_heads(m, layer, p, k_column(m, layer, 1), c->d_k);
    x.v_slc = key_heads(m, layer, p, v_column(m, layer, 1), c->d_v);
    x.k_win = key_heads(m, layer, p, k_column(m, layer, 2), c->d_k);
    x.v_win = key_heads(m, layer, p, v_column(m, layer, 2), c->d_v);
    x.gates = gate_view(m, layer, p, a->gates, a->qkv);
    int64_t lists = (int64_t)c->n_kv_groups * nsa_block_list_width(&d);
    x.blocks = (nsa_tensor){a->blocks + p->query_row * lists, NSA_I32, lists * m->tokens_each,
                            lists, nsa_block_list_width(&d)};
    x.out_cmp = query_packed(m, p, a->branch[0], c->n_heads, c->d_v);
    x.out_slc = query_packed(m, p, a->branch[1], c->n_heads, c->d_v);
    x.out_win = query_packed(m, p, a->branch[2], c->n_heads, c->d_v);
    x.lse_cmp = query_reals(m, p, a->lse[0], c->n_heads);
    x.lse_slc = query_reals(m, p, a->lse[1], c->n_heads);
    x.lse_win = query_reals(m, p, a->lse[2], c->n_heads);
    x.out = query_packed(m, p, a->attention, c->n_heads, c->d_v);
    return x;
}

nsa_attention layer_views(const model *m, int layer) {
    return sparse_views(m, layer, &m->slices[0]);
}

/* Gradients of q and k before the rotation is undone, of v and the gates as they are. */
static nsa_attention sparse_gradients(const model *m, int layer, const slice *p) {
    const model_config *c = &m->config;
    const scratch *s = &m->scratch;
    const int *slots = m->slots[layer].of;
    nsa_attention dx = {0};
    dx.out = query_packed(m, p, s->dattention, c->n_heads, c->d_v);
    dx.q = query_heads(m, p, s->drotated, layer_rotated(m, layer), 0, c->d_k);
    dx.k_cmp = phi(m, slots + PHI_K, c->d_k, true);
    dx.v_cmp = phi(m, slots + PHI_V, c->d_v, true);
    dx.k_cmp.x = dkey_heads(m, layer, p, k_column(m, layer, 0), c->d_k);
    dx.v_cmp.x = dkey_heads(m, layer, p, v_column(m, layer, 0), c->d_v);
    dx.k_slc = dkey_heads(m, layer, p, k_column(m, layer, 1), c->d_k);
    dx.v_slc = dkey_heads(m, layer, p, v_column(m, layer, 1), c->d_v);
    dx.k_win = dkey_heads(m, layer, p, k_column(m, layer, 2), c->d_k);
    dx.v_win = dkey_heads(m, layer, p, v_column(m, layer, 2), c->d_v);
    dx.gates = gate_view(m, layer, p, s->dgates, s->dqkv);
    return dx;
}

static nsa_attend dense_views(const model *m, int layer, const slice *p) {
    const model_config *c = &m->config;
    const layer_acts *a = &m->acts[layer];
    nsa_attend x = {0};
    x.q = query_heads(m, p, a->qkv, layer_fused(m, layer), 0, c->d_k);
    x.k = key_heads(m, layer, p, k_column(m, layer, 0), c->d_k);
    x.v = key_heads(m, layer, p, v_column(m, layer, 0), c->d_v);
    x.out = query_packed(m, p, a->attention, c->n_heads, c->d_v);
    x.lse = query_reals(m, p, a->lse[0], c->n_heads);
    return x;
}

static nsa_attend dense_gradients(const model *m, int layer, const slice *p) {
    const model_config *c = &m->config;
    const scratch *s = &m->scratch;
    nsa_attend dx = {0};
    dx.out = query_packed(m, p, s->dattention, c->n_heads, c->d_v);
    dx.q = query_heads(m, p, s->drotated, layer_rotated(m, layer), 0, c->d_k);
    dx.k = dkey_heads(m, layer, p, k_column(m, layer, 0), c->d_k);
    dx.v = dkey_heads(m, layer, p, v_column(m, layer, 0), c->d_v);
    return dx;
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

size_t layer_workspace(model *m, int layer, const slice *p) {
    const ops *o = m->o;
    bool training = m->options.training;
    nsa_desc d = slice_desc(m, layer, p);
    if (!is_sparse(m, layer)) {
        bool windowed = layer_kind(m, layer) == ATTENTION_WINDOW;
        size_t forward = windowed ? o->window_forward_bytes(o, &d) : o->dense_forward_bytes(o, &d);
        if (!training) return forward;
        return larger(forward,
                      windowed ? o->window_backward_bytes(o, &d) : o->dense_backward_bytes(o, &d));
    }
    nsa_attention x = sparse_views(m, layer, p);
    size_t forward = o->attention_forward_bytes(o, &x, &d);
    if (!training) return forward;
    nsa_attention dx = sparse_gradients(m, layer, p);
    return larger(forward, o->attention_backward_bytes(o, &dx, &x, &d));
}

size_t layer_append_workspace(model *m, int layer, int count) {
    const ops *o = m->o;
    slice p = {.batch = 1, .tokens = m->options.room, .first = m->options.room - count};
    p.count = count;
    nsa_desc d = slice_desc(m, layer, &p);
    if (layer_kind(m, layer) == ATTENTION_WINDOW) return o->window_forward_bytes(o, &d);
    if (layer_kind(m, layer) == ATTENTION_FULL) return o->dense_forward_bytes(o, &d);
    nsa_attention x = sparse_views(m, layer, &p);
    return o->decode_bytes(o, &x, &m->caches[layer].sparse, count);
}

/* ---- Attention ----------------------------------------------------------------------------- */

/* q and each k lie side by side with heads of one width, so one call turns them all. Of a sequence
   that is divided each row's place is given. */
static nsa_rope rotation(const model *m, int layer, void *x, int64_t x_stride, void *out,
                         int64_t out_stride) {
    const model_config *c = &m->config;
    nsa_rope r = {.x = heads(m, x, x_stride, 0, c->d_k),
                  .out = heads(m, out, out_stride, 0, c->d_k),
                  .heads = layer_rotated(m, layer) / c->d_k,
                  .dim = c->d_k,
                  .base = c->rope_base,
                  .pairs = c->rope_pairs,
                  .scaling = c->rope_scaling,
                  .factor = c->rope_factor,
                  .fast = c->rope_fast,
                  .slow = c->rope_slow,
                  .trained_context = c->rope_trained_context};
    if (m->split) r.positions = (nsa_tensor){m->places, NSA_I32, m->tokens_each, 1, 0};
    return r;
}

static nsa_desc rotation_desc(const model *m, int layer) {
    return m->split ? model_desc(m, layer, m->batch, m->tokens_each) : layer_desc(m, layer);
}

/* ---- Norms of heads ------------------------------------------------------------------------ */

/* q's heads, or those of every k: columns of qkv that share a weight. */
typedef struct normed_heads {
    int64_t column, columns;
    int64_t heads; /* rows x heads */
    void *raw, *normed;
    real *rstd;
    int weight;
} normed_heads;

static normed_heads heads_of(const model *m, int layer, bool is_k) {
    const layer_acts *a = &m->acts[layer];
    int64_t q = q_columns(m), d_k = m->config.d_k, before = is_k ? m->rows * q : 0;
    normed_heads x = {.column = is_k ? q : 0,
                      .columns = is_k ? layer_rotated(m, layer) - q : q,
                      .raw = at(m, a->raw, before),
                      .normed = at(m, m->scratch.normed, before),
                      .rstd = a->rstd_heads + before / d_k,
                      .weight = m->slots[layer].of[is_k ? K_NORM : Q_NORM]};
    x.heads = m->rows * x.columns / d_k;
    return x;
}

/* In place on qkv; what was there is kept for backward. */
static void heads_forward(model *m, int layer) {
    const ops *o = m->o;
    void *qkv = m->acts[layer].qkv;
    int fused = layer_fused(m, layer);
    for (int is_k = 0; is_k < 2; is_k++) {
        normed_heads x = heads_of(m, layer, is_k);
        void *columns = at(m, qkv, x.column);
        o->copy_columns(o, x.raw, x.columns, columns, fused, m->rows, x.columns);
        o->rmsnorm_forward(o, x.normed, x.rstd, x.raw, model_weight(m, x.weight), x.heads,
                           m->config.d_k, m->config.norm_eps);
        o->copy_columns(o, columns, fused, x.normed, x.columns, m->rows, x.columns);
    }
}

/* In place on the gradient of qkv; drotated has been read and is free. */
static void heads_backward(model *m, int layer) {
    const ops *o = m->o;
    scratch *s = &m->scratch;
    int fused = layer_fused(m, layer);
    for (int is_k = 0; is_k < 2; is_k++) {
        normed_heads x = heads_of(m, layer, is_k);
        void *columns = at(m, s->dqkv, x.column);
        o->copy_columns(o, x.normed, x.columns, columns, fused, m->rows, x.columns);
        o->zero(o, s->drotated, (size_t)(m->rows * x.columns) * m->element);
        o->rmsnorm_backward(o, s->drotated, model_gradient(m, x.weight), x.normed, x.raw,
                            model_weight(m, x.weight), x.rstd, x.heads, m->config.d_k);
        o->copy_columns(o, columns, fused, s->drotated, x.columns, m->rows, x.columns);
    }
}

/* ---- Attention, forward and backward -------------------------------------------------------- */

/* Pairs of gates become triples, of which the last is shut. */
static void shut_window(const model *m, const layer_acts *a, int64_t rows) {
    const ops *o = m->o;
    o->zero(o, a->gates, (size_t)(rows * BRANCHES) * m->element);
    o->copy_columns(o, a->gates, BRANCHES, m->scratch.gate_pair, 2, rows, 2);
    o->bias_forward(o, a->gates, m->shut, rows, BRANCHES);
}

/* gates = fc2(silu(fc1(mean of q over the group)) */
static void gate_forward(model *m, int layer) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    const layer_acts *a = &m->acts[layer];
    const int *slots = m->slots[layer].of;
    int groups = c->n_kv_groups, width = m->gate_width;
    int pairs = attention_pairs(layer_kind(m, layer));
    int64_t rows = (int64_t)m->rows * groups;
    void *gates = pairs == BRANCHES ? a->gates : m->scratch.gate_pair;
    o->group_mean_forward(o, a->q_mean, a->qkv, layer_fused(m, layer), m->rows, groups,
                          c->n_heads / groups, c->d_k);
    o->linear_forward(o, a->gate_hidden, a->q_mean, model_weight(m, slots[GATE_W1]), NULL, rows,
                      c->d_k, width);
    o->bias_forward(o, a->gate_hidden, model_weight(m, slots[GATE_B1]), rows, width);
    o->silu_forward(o, m->scratch.gate_act, a->gate_hidden, rows * width);
    o->linear_forward(o, gates, m->scratch.gate_act, model_weight(m, slots[GATE_W2]), NULL, rows,
                      width, pairs);
    o->bias_forward(o, gates, model_weight(m, slots[GATE_B2]), rows, pairs);
    if (pairs < BRANCHES) shut_window(m, a, rows);
}

/* Adds the gate's share to the gradient of q. */
static void gate_backward(model *m, int layer) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    const scratch *s = &m->scratch;
    const layer_acts *a = &m->acts[layer];
    const int *slots = m->slots[layer].of;
    int groups = c->n_kv_groups, width = m->gate_width;
    int pairs = attention_pairs(layer_kind(m, layer));
    int64_t rows = (int64_t)m->rows * groups;
    const void *dgates = pairs == BRANCHES ? s->dgates : s->gate_pair;
    if (pairs < BRANCHES) o->copy_columns(o, s->gate_pair, 2, s->dgates, BRANCHES, rows, 2);
    o->linear_backward_input(o, s->dgate_hidden, dgates, model_weight(m, slots[GATE_W2]), rows,
                             width, pairs);
    o->silu_backward(o, s->dgate_hidden, s->gate_act, a->gate_hidden, rows * width);
    o->bias_backward(o, model_gradient(m, slots[GATE_B2]), dgates, rows, pairs);
    o->linear_backward_weight(o, model_gradient(m, slots[GATE_W2]), dgates, s->gate_act, rows,
                              width, pairs);
    o->bias_backward(o, model_gradient(m, slots[GATE_B1]), s->dgate_hidden, rows, width);
    o->linear_backward_weight(o, model_gradient(m, slots[GATE_W1]), s->dgate_hidden, a->q_mean,
                              rows, c->d_k, width);
    o->linear_backward_input(o, s->dq_mean, s->dgate_hidden, model_weight(m, slots[GATE_W1]), rows,
                             c->d_k, width);
    o->group_mean_backward(o, s->dqkv, layer_fused(m, layer), s->dq_mean, m->rows, groups,
                           c->n_heads / groups, c->d_k);
}

/* Puts the new rows behind those that the cache holds, and lets x read all of them. */
static void append_dense(model *m, int layer, nsa_attend *x) {
    const model_config *c = &m->config;
    const layer_cache *cache = &m->caches[layer];
    int fused = layer_fused(m, layer);
    int64_t k = (int64_t)c->n_kv_groups * c->d_k, v = (int64_t)c->n_kv_groups * c->d_v;
    m->o->copy_columns(m->o, at(m, cache->k, m->past * k), k, x->k.data, fused, m->rows, k);
    m->o->copy_columns(m->o, at(m, cache->v, m->past * v), v, x->v.data, fused, m->rows, v);
    x->k = packed(m, cache->k, c->n_kv_groups, c->d_k);
    x->v = packed(m, cache->v, c->n_kv_groups, c->d_v);
}

static void attend_forward(model *m, int layer, const slice *p) {
    const ops *o = m->o;
    scratch *s = &m->scratch;
    nsa_desc d = slice_desc(m, layer, p);
    if (!is_sparse(m, layer)) {
        nsa_attend x = dense_views(m, layer, p);
        bool windowed = layer_kind(m, layer) == ATTENTION_WINDOW;
        if (m->appending) append_dense(m, layer, &x);
        (windowed ? o->window_forward : o->dense_forward)(o, &x, &d, s->workspace,
                                                          s->workspace_bytes);
        return;
    }
    nsa_attention x = sparse_views(m, layer, p);
    if (!m->appending) {
        o->attention_forward(o, &x, &d, s->workspace, s->workspace_bytes);
        return;
    }
    nsa_reads reads = {0};
    o->decode(o, &x, &m->caches[layer].sparse, m->rows, &reads, s->workspace, s->workspace_bytes);
    m->reads.cmp += reads.cmp;
    m->reads.slc += reads.slc;
    if (layer_kind(m, layer) == ATTENTION_NSA) m->reads.win += reads.win;
}

/* Of attention, what follows from branches, lse and lists that are still there. */
static void attend_restore(model *m, int layer, const slice *p) {
    const ops *o = m->o;
    if (!is_sparse(m, layer)) return;
    nsa_desc d = slice_desc(m, layer, p);
    nsa_attention x = sparse_views(m, layer, p);
    o->attention_restore(o, &x, &d, m->scratch.workspace, m->scratch.workspace_bytes);
}

/* mid = x + out(attention(norm1(x))) */
static void attention_forward(model *m, int layer, bool restore) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    const layer_acts *a = &m->acts[layer];
    const int *slots = m->slots[layer].of;
    scratch *s = &m->scratch;
    int fused = layer_fused(m, layer);
    o->rmsnorm_forward(o, s->norm, a->rstd1, m->x[layer], model_weight(m, slots[NORM1]), m->rows,
                       c->dim, c->norm_eps);
    o->linear_forward(o, a->qkv, s->norm, model_weight(m, slots[W_QKV]), NULL, m->rows, c->dim,
                      fused);
    if (c->qk_norm) heads_forward(m, layer);
    if (is_sparse(m, layer) && !c->gate_linear) gate_forward(m, layer);
    nsa_desc d = rotation_desc(m, layer);
    nsa_rope r = rotation(m, layer, a->qkv, fused, a->qkv, fused);
    o->rope_forward(o, &r, &d);
    context_gather(m, layer);
    for (int i = 0; i < m->slice_count; i++)
        (restore ? attend_restore : attend_forward)(m, layer, &m->slices[i]);
    o->linear_forward(o, a->mid, a->attention, model_weight(m, slots[W_OUT]), m->x[layer], m->rows,
                      c->n_heads * c->d_v, c->dim);
}

/* The compressed rows of a sequence that is divided are those of the newest slice. */
static void slice_backward(model *m, int layer, const slice *p) {
    const ops *o = m->o;
    scratch *s = &m->scratch;
    nsa_desc d = slice_desc(m, layer, p);
    if (!is_sparse(m, layer)) {
        nsa_attend x = dense_views(m, layer, p), dx = dense_gradients(m, layer, p);
        bool windowed = layer_kind(m, layer) == ATTENTION_WINDOW;
        (windowed ? o->window_backward : o->dense_backward)(o, &dx, &x, &d, s->workspace,
                                                            s->workspace_bytes);
        return;
    }
    if (m->split) attend_restore(m, layer, p);
    nsa_attention x = sparse_views(m, layer, p), dx = sparse_gradients(m, layer, p);
    o->attention_backward(o, &dx, &x, &d, s->workspace, s->workspace_bytes);
}

/* From the gradient of attention's output to that of qkv. */
static void attend_backward(model *m, int layer) {
    const ops *o = m->o;
    const layer_acts *a = &m->acts[layer];
    scratch *s = &m->scratch;
    size_t rows = (size_t)m->rows;
    int rotated = layer_rotated(m, layer), fused = layer_fused(m, layer);
    o->zero(o, s->dqkv, rows * (size_t)fused * m->element);
    o->zero(o, s->drotated, rows * (size_t)rotated * m->element);
    if (is_sparse(m, layer) && s->dgates)
        o->zero(o, s->dgates, rows * (size_t)m->config.n_kv_groups * BRANCHES * m->element);
    context_begin_backward(m, layer);
    for (int i = 0; i < m->slice_count; i++) slice_backward(m, layer, &m->slices[i]);
    context_reduce(m, layer);
    nsa_desc d = rotation_desc(m, layer);
    nsa_rope x = rotation(m, layer, a->qkv, fused, a->qkv, fused);
    nsa_rope dx = rotation(m, layer, s->dqkv, fused, s->drotated, rotated);
    o->rope_backward(o, &dx, &x, &d);
    if (is_sparse(m, layer) && !m->config.gate_linear) gate_backward(m, layer);
    if (m->config.qk_norm) heads_backward(m, layer);
}

static void attention_backward(model *m, int layer) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    const layer_acts *a = &m->acts[layer];
    const int *slots = m->slots[layer].of;
    scratch *s = &m->scratch;
    int width = c->n_heads * c->d_v, fused = layer_fused(m, layer);
    o->linear_backward_weight(o, model_gradient(m, slots[W_OUT]), s->dx, a->attention, m->rows,
                              width, c->dim);
    o->linear_backward_input(o, s->dattention, s->dx, model_weight(m, slots[W_OUT]), m->rows, width,
                             c->dim);
    attend_backward(m, layer);
    o->rmsnorm_forward(o, s->norm, s->rstd, m->x[layer], model_weight(m, slots[NORM1]), m->rows,
                       c->dim, c->norm_eps);
    o->linear_backward_weight(o, model_gradient(m, slots[W_QKV]), s->dqkv, s->norm, m->rows, c->dim,
                              fused);
    o->linear_backward_input(o, s->dnorm, s->dqkv, model_weight(m, slots[W_QKV]), m->rows, c->dim,
                             fused);
    o->rmsnorm_backward(o, s->dx, model_gradient(m, slots[NORM1]), s->dnorm, m->x[layer],
                        model_weight(m, slots[NORM1]), a->rstd1, m->rows, c->dim);
}

/* ---- MLP ----------------------------------------------------------------------------------- */

/* hidden = fc1(norm2(mid)), of swiglu its gate beside it */
static void mlp_in_forward(model *m, int layer) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    const layer_acts *a = &m->acts[layer];
    const int *slots = m->slots[layer].of;
    o->rmsnorm_forward(o, m->scratch.norm, a->rstd2, a->mid, model_weight(m, slots[NORM2]), m->rows,
                       c->dim, c->norm_eps);
    o->linear_forward(o, a->hidden, m->scratch.norm, model_weight(m, slots[FC1]), NULL, m->rows,
                      c->dim, m->mlp_in);
}

/* x[layer + 1] = mid + fc2(act), act silu(hidden) or swiglu's */
static void mlp_out_forward(model *m, int layer) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    const layer_acts *a = &m->acts[layer];
    if (c->swiglu)
        o->swiglu_forward(o, m->scratch.act, a->hidden, m->rows, c->hidden);
    else
        o->silu_forward(o, m->scratch.act, a->hidden, (int64_t)m->rows * c->hidden);
    o->linear_forward(o, m->x[layer + 1], m->scratch.act, model_weight(m, m->slots[layer].of[FC2]),
                      a->mid, m->rows, c->hidden, c->dim);
}

static void mlp_backward(model *m, int layer) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    const layer_acts *a = &m->acts[layer];
    const int *slots = m->slots[layer].of;
    scratch *s = &m->scratch;
    void *dact = c->swiglu ? s->dact : s->dhidden; /* silu goes back in place */
    o->linear_backward_input(o, dact, s->dx, model_weight(m, slots[FC2]), m->rows, c->hidden,
                             c->dim);
    if (c->swiglu)
        o->swiglu_backward(o, s->dhidden, s->act, a->hidden, dact, m->rows, c->hidden);
    else
        o->silu_backward(o, s->dhidden, s->act, a->hidden, (int64_t)m->rows * c->hidden);
    o->linear_backward_weight(o, model_gradient(m, slots[FC2]), s->dx, s->act, m->rows, c->hidden,
                              c->dim);
    o->rmsnorm_forward(o, s->norm, s->rstd, a->mid, model_weight(m, slots[NORM2]), m->rows, c->dim,
                       c->norm_eps);
    o->linear_backward_weight(o, model_gradient(m, slots[FC1]), s->dhidden, s->norm, m->rows,
                              c->dim, m->mlp_in);
    o->linear_backward_input(o, s->dnorm, s->dhidden, model_weight(m, slots[FC1]), m->rows, c->dim,
                             m->mlp_in);
    o->rmsnorm_backward(o, s->dx, model_gradient(m, slots[NORM2]), s->dnorm, a->mid,
                        model_weight(m, slots[NORM2]), a->rstd2, m->rows, c->dim);
}

/* ---- The layer ----------------------------------------------------------------------------- */

void layer_forward(model *m, int layer) {
    m->o->mark(m->o, m->phase, layer);
    attention_forward(m, layer, false);
    mlp_in_forward(m, layer);
    mlp_out_forward(m, layer);
}

void layer_recompute(model *m, int layer) {
    m->o->mark(m->o, m->phase, layer);
    attention_forward(m, layer, layer_checkpointing(m, layer) == CHECKPOINT_SELECTIVE);
    mlp_in_forward(m, layer);
}

void layer_backward(model *m, int layer) {
    m->o->mark(m->o, m->phase, layer);
    mlp_backward(m, layer);
    attention_backward(m, layer);
}

const int32_t *model_blocks(const model *m, int layer) {
    return m->acts[layer].blocks;
}

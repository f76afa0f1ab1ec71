/* model_layout.c - TinyLM's parameters and memory. Twin: model.h. Nothing here computes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/model_inside.h"

/* Attention's logits and gate stay near their middle at the start, yet every path has a
   gradient. */
static const double INIT_STD = 0.02, GATE_STD = 0.01;

model_config tinylm(int vocab, int dim, int n_layers, int n_heads, int n_kv_groups, int d_k,
                    int d_v, int l, int d, int l_sel, int n_sel, int w) {
    model_config c = {.vocab = vocab,
                      .dim = dim,
                      .n_layers = n_layers,
                      .n_heads = n_heads,
                      .n_kv_groups = n_kv_groups,
                      .d_k = d_k,
                      .d_v = d_v,
                      .l = l,
                      .d = d,
                      .l_sel = l_sel,
                      .n_sel = n_sel,
                      .w = w,
                      .phi = NSA_PHI_MEAN,
                      .gate = NSA_GATE_SIGMOID,
                      .hidden = 4 * dim,
                      .slc_init = 1,
                      .slc_local = 2,
                      .norm_eps = 1e-6,
                      .rope_base = 10000,
                      .rope_factor = 1};
    return c;
}

void model_attend_with(model_config *c, attention_kind kind) {
    memset(c->attention, (int)kind, sizeof c->attention);
}

/* ---- The table of parameters --------------------------------------------------------------- */

typedef struct builder {
    model *m;
    int layer;
    bool ok;
} builder;

static int add(builder *b, param_spec spec) {
    int place = params_add(&b->m->params, b->layer, &spec);
    if (place < 0) b->ok = false;
    return place;
}

static int add_matrix(builder *b, const char *name, int64_t rows, int64_t cols, double std) {
    return add(b, (param_spec){name, {rows, cols}, 0, std, true, false});
}

static int add_constant(builder *b, const char *name, int64_t size, double value) {
    return add(b, (param_spec){name, {size}, value, 0, false, false});
}

/* W_Q, the k and v of each branch, and a linear gate; returns the place of the first, at which all
   of them can be read as one matrix. */
static int add_projections(builder *b) {
    static const char *const sparse[2][BRANCHES] = {
        {"attn.W_K_cmp.weight", "attn.W_K_slc.weight", "attn.W_K_win.weight"},
        {"attn.W_V_cmp.weight", "attn.W_V_slc.weight", "attn.W_V_win.weight"}};
    static const char *const one[2] = {"attn.W_K.weight", "attn.W_V.weight"};
    const model_config *c = &b->m->config;
    int pairs = layer_pairs(b->m, b->layer);
    int first = add_matrix(b, "attn.W_Q.weight", (int64_t)c->n_heads * c->d_k, c->dim, INIT_STD);
    for (int i = 0; i < 2 * pairs; i++) {
        bool is_v = i >= pairs;
        int64_t rows = (int64_t)c->n_kv_groups * (is_v ? c->d_v : c->d_k);
        const char *name = pairs == 1 ? one[is_v] : sparse[is_v][i % pairs];
        add(b, (param_spec){name, {rows, c->dim}, 0, INIT_STD, true, true});
    }
    if (layer_linear_gate(b->m, b->layer))
        add(b, (param_spec){"attn.gate.weight",
                            {(int64_t)BRANCHES * c->n_heads, c->dim},
                            0,
                            GATE_STD,
                            true,
                            true});
    return first;
}

static int add_bias(builder *b, const char *name, int64_t groups, int64_t width) {
    if (!name) return -1;
    return add(b, (param_spec){name, {groups, width}, 0, 0, false, false});
}

/* phi of k or v, per kv group; conv begins as the mean, the MLP's layers keep the variance. names
   are those of pos, w1, b1, w2 and of the output's bias, which k does not have (NULL): added to
   every key alike it would change no softmax. */
static void add_phi(builder *b, int *slots, const char *const names[PHI_TENSORS], int width) {
    const model_config *c = &b->m->config;
    int64_t n = c->n_kv_groups, block = c->l;
    if (c->phi == NSA_PHI_CONV) {
        double mean = 1 / (double)block;
        param_spec w1 = {names[PHI_W1], {n, block, width}, mean, 0, false, false};
        slots[PHI_W1] = add(b, w1);
        slots[PHI_B1] = add_bias(b, names[PHI_B2] ? names[PHI_B1] : NULL, n, width);
    }
    if (c->phi == NSA_PHI_MLP) {
        double std1 = 1 / sqrt((double)block * width), std2 = 1 / sqrt((double)width);
        param_spec pos = {names[PHI_POS], {n, block, width}, 0, INIT_STD, false, false};
        param_spec w1 = {names[PHI_W1], {n, width, block * width}, 0, std1, true, false};
        param_spec w2 = {names[PHI_W2], {n, width, width}, 0, std2, true, false};
        slots[PHI_POS] = add(b, pos);
        slots[PHI_W1] = add(b, w1);
        slots[PHI_B1] = add_bias(b, names[PHI_B1], n, width);
        slots[PHI_W2] = add(b, w2);
        slots[PHI_B2] = add_bias(b, names[PHI_B2], n, width);
    }
}

/* What sparse attention has and dense has not: phi of k and of v, and the gate that is an MLP. */
static void add_phi_and_gate(builder *b, int *slots) {
    static const char *const k_names[] = {"attn.phi_k.pos", "attn.phi_k.w1", "attn.phi_k.b1",
                                          "attn.phi_k.w2", NULL};
    static const char *const v_names[] = {"attn.phi_v.pos", "attn.phi_v.w1", "attn.phi_v.b1",
                                          "attn.phi_v.w2", "attn.phi_v.b2"};
    const model_config *c = &b->m->config;
    int width = b->m->gate_width;
    add_phi(b, slots + PHI_K, k_names, c->d_k);
    add_phi(b, slots + PHI_V, v_names, c->d_v);
    if (c->gate_linear) return;
    slots[GATE_W1] = add_matrix(b, "attn.gate.fc1.weight", width, c->d_k, INIT_STD);
    slots[GATE_B1] = add_constant(b, "attn.gate.fc1.bias", width, 0);
    int pairs = attention_pairs(layer_kind(b->m, b->layer));
    slots[GATE_W2] = add_matrix(b, "attn.gate.fc2.weight", pairs, width, GATE_STD);
    slots[GATE_B2] = add_constant(b, "attn.gate.fc2.bias", pairs, 0);
}

static void add_layer(builder *b, int layer, int *slots) {
    const model_config *c = &b->m->config;
    double residual_std = INIT_STD / sqrt(2.0 * c->n_layers);
    b->layer = layer;
    for (int s = 0; s < SLOTS; s++) slots[s] = -1;
    slots[NORM1] = add_constant(b, "norm1.weight", c->dim, 1);
    slots[W_QKV] = add_projections(b);
    if (c->qk_norm) {
        slots[Q_NORM] = add_constant(b, "attn.q_norm.weight", c->d_k, 1);
        slots[K_NORM] = add_constant(b, "attn.k_norm.weight", c->d_k, 1);
    }
    if (attention_is_sparse(layer_kind(b->m, layer))) add_phi_and_gate(b, slots);
    slots[W_OUT] =
        add_matrix(b, "attn.out.weight", c->dim, (int64_t)c->n_heads * c->d_v, residual_std);
    slots[NORM2] = add_constant(b, "norm2.weight", c->dim, 1);
    if (c->swiglu) slots[FC1] = add_matrix(b, "mlp.gate.weight", c->hidden, c->dim, INIT_STD);
    int fc1 =
        add(b, (param_spec){"mlp.fc1.weight", {c->hidden, c->dim}, 0, INIT_STD, true, c->swiglu});
    if (!c->swiglu) slots[FC1] = fc1;
    slots[FC2] = add_matrix(b, "mlp.fc2.weight", c->dim, c->hidden, residual_std);
}

static bool build_table(model *m, fault *f) {
    const model_config *c = &m->config;
    builder b = {m, -1, true};
    m->slots = calloc((size_t)c->n_layers, sizeof *m->slots);
    m->x = calloc((size_t)c->n_layers + 1, sizeof *m->x);
    m->acts = calloc((size_t)c->n_layers, sizeof *m->acts);
    if (m->options.room) m->caches = calloc((size_t)c->n_layers, sizeof *m->caches);
    if (!m->slots || !m->x || !m->acts || (m->options.room && !m->caches))
        return fault_set(f, "model: out of memory");
    m->embed = add(&b, (param_spec){"embed.weight", {c->vocab, c->dim}, 0, INIT_STD, false, false});
    for (int i = 0; i < c->n_layers; i++) add_layer(&b, i, m->slots[i].of);
    b.layer = -1;
    m->norm = add_constant(&b, "norm.weight", c->dim, 1);
    m->head = m->embed;
    if (!c->tied) m->head = add_matrix(&b, "lm_head.weight", c->vocab, c->dim, INIT_STD);
    const dist one = dist_alone(), *d = m->options.dist ? m->options.dist : &one;
    params_divide(&m->params, dist_multiple(d), d->world);
    return b.ok ? true : fault_set(f, "model: out of memory");
}

/* ---- Memory -------------------------------------------------------------------------------- */

static void *take(model *m, arena *a, purpose p, int64_t elements) {
    return arena_take(a, p, (size_t)elements * m->element);
}

static real *take_reals(arena *a, purpose p, int64_t count) {
    return arena_take(a, p, (size_t)count * sizeof(real));
}

/* Kinds of layers, as bits; and what the arrays of one of them have room for. */
enum { SPARSE = 1 << ATTENTION_NSA | 1 << ATTENTION_CMP_SLC, ANY = (1 << ATTENTION_KINDS) - 1 };

static int widest(const model *m, int kinds, int (*columns)(const model *m, int layer)) {
    int most = 0;
    for (int kind = 0; kind < ATTENTION_KINDS; kind++) {
        int layer = m->first_of[kind];
        if (kinds >> kind & 1 && layer >= 0 && columns(m, layer) > most) most = columns(m, layer);
    }
    return most;
}

/* What attention leaves for backward. */
static void layout_attended(model *m, arena *a, layer_acts *x, int kinds) {
    const model_config *c = &m->config;
    int64_t rows = m->rows, heads = c->n_heads;
    nsa_desc d = model_desc(m, 0, m->options.batch, m->options.tokens);
    x->lse[0] = take_reals(a, FOR_ACTIVATIONS, rows * heads);
    if (!(kinds & SPARSE)) {
        x->attention = take(m, a, FOR_ACTIVATIONS, rows * heads * c->d_v);
        return;
    }
    for (int i = 1; i < BRANCHES; i++) x->lse[i] = take_reals(a, FOR_ACTIVATIONS, rows * heads);
    for (int i = 0; i < BRANCHES; i++)
        x->branch[i] = take(m, a, FOR_ACTIVATIONS, rows * heads * c->d_v);
    int64_t lists = rows * c->n_kv_groups * nsa_block_list_width(&d);
    x->blocks = arena_take(a, FOR_ACTIVATIONS, (size_t)lists * sizeof(int32_t));
}

/* All else, which follows from a layer's input and from the above. */
static void layout_rest(model *m, arena *a, layer_acts *x, int kinds) {
    const model_config *c = &m->config;
    int64_t rows = m->rows, heads = c->n_heads, groups = c->n_kv_groups;
    nsa_desc d = model_desc(m, 0, m->options.batch, m->options.tokens);
    int64_t compressed = (int64_t)m->options.batch * nsa_cmp_count(&d, m->options.tokens);
    bool divided = m->context > 1;
    x->rstd1 = take_reals(a, FOR_ACTIVATIONS, rows);
    x->qkv = take(m, a, FOR_ACTIVATIONS, rows * widest(m, kinds, layer_fused));
    if (c->qk_norm) {
        int64_t columns = widest(m, kinds, layer_rotated);
        x->raw = take(m, a, FOR_ACTIVATIONS, rows * columns);
        x->rstd_heads = take_reals(a, FOR_ACTIVATIONS, rows * columns / c->d_k);
    }
    x->mid = take(m, a, FOR_ACTIVATIONS, rows * c->dim);
    x->rstd2 = take_reals(a, FOR_ACTIVATIONS, rows);
    x->hidden =
        m->scratch.hidden ? m->scratch.hidden : take(m, a, FOR_ACTIVATIONS, rows * m->mlp_in);
    if (!(kinds & SPARSE)) return;
    x->attention = take(m, a, FOR_ACTIVATIONS, rows * heads * c->d_v);
    x->k_cmp =
        divided ? m->scratch.k_cmp : take(m, a, FOR_ACTIVATIONS, compressed * groups * c->d_k);
    x->v_cmp =
        divided ? m->scratch.v_cmp : take(m, a, FOR_ACTIVATIONS, compressed * groups * c->d_v);
    if (c->gate_linear) return;
    x->q_mean = take(m, a, FOR_ACTIVATIONS, rows * groups * c->d_k);
    x->gate_hidden = take(m, a, FOR_ACTIVATIONS, rows * groups * m->gate_width);
    x->gates = take(m, a, FOR_ACTIVATIONS, rows * groups * BRANCHES);
}

checkpointing layer_checkpointing(const model *m, int layer) {
    const model_options *o = &m->options;
    bool inside = !o->end || (layer >= o->first && layer < o->end);
    return inside ? o->checkpointing : CHECKPOINT_NONE;
}

/* How a layer's activations are kept where there is no backward pass: they are not. */
static checkpointing layer_keeps(const model *m, int layer) {
    return m->options.training ? layer_checkpointing(m, layer) : CHECKPOINT_LAYERS;
}

/* The kinds of the layers that are computed again, as bits. */
static int recomputed_kinds(const model *m) {
    int kinds = 0;
    for (int i = 0; i < m->config.n_layers; i++)
        if (layer_keeps(m, i) != CHECKPOINT_NONE) kinds |= 1 << layer_kind(m, i);
    return kinds;
}

static void layout_layers(model *m, arena *a) {
    const model_config *c = &m->config;
    layer_acts shared = {0}; /* of the layers that are computed again: room for any of them */
    bool has_shared = false;
    int64_t size = (int64_t)m->rows * c->dim;
    for (int i = 0; i <= c->n_layers; i++) {
        bool kept = m->options.training || i < 2;
        m->x[i] = kept ? take(m, a, FOR_CHECKPOINTS, size) : m->x[i - 2];
    }
    for (int i = 0; i < c->n_layers; i++) {
        layer_acts *x = &m->acts[i], none = {0};
        checkpointing how = layer_keeps(m, i);
        int kinds = how == CHECKPOINT_NONE ? 1 << layer_kind(m, i) : recomputed_kinds(m);
        layer_acts *rest = how == CHECKPOINT_NONE ? &none : &shared;
        if (how == CHECKPOINT_NONE || !has_shared) {
            layout_rest(m, a, rest, kinds);
            if (how == CHECKPOINT_LAYERS) layout_attended(m, a, rest, kinds);
        }
        *x = *rest;
        if (how != CHECKPOINT_LAYERS) layout_attended(m, a, x, 1 << layer_kind(m, i));
        has_shared = has_shared || how != CHECKPOINT_NONE;
    }
}

/* Whether no layer's activations outlive its own passes. */
static bool recomputes_all(const model *m) {
    for (int i = 0; i < m->config.n_layers; i++)
        if (layer_checkpointing(m, i) == CHECKPOINT_NONE) return false;
    return m->options.training;
}

/* What an MLP needs while it runs, and in the same memory what a divided attention does: its
   gradient of k and v; and k and v too where the MLP's hidden rows are those of one layer alone,
   for they are gathered again once these have been read. */
static void layout_mlp(model *m, arena *a) {
    const model_config *c = &m->config;
    scratch *s = &m->scratch;
    int64_t rows = m->rows;
    size_t before = a->used;
    s->act = take(m, a, FOR_BACKWARD, rows * c->hidden);
    if (m->options.training) {
        s->dhidden = take(m, a, FOR_BACKWARD, rows * m->mlp_in);
        if (c->swiglu) s->dact = take(m, a, FOR_BACKWARD, rows * c->hidden);
        if (m->context > 1 && recomputes_all(m))
            s->hidden = take(m, a, FOR_ACTIVATIONS, rows * m->mlp_in);
    }
    context_layout(m, a, a->used - before);
}

static void layout_scratch(model *m, arena *a) {
    const model_config *c = &m->config;
    scratch *s = &m->scratch;
    int64_t rows = m->rows, gates = rows * c->n_kv_groups;
    layout_mlp(m, a);
    s->norm = take(m, a, FOR_BACKWARD, rows * c->dim);
    s->gate_act = take(m, a, FOR_BACKWARD, gates * m->gate_width);
    if (c->qk_norm) s->normed = take(m, a, FOR_BACKWARD, rows * widest(m, ANY, layer_rotated));
    if (m->first_of[ATTENTION_CMP_SLC] >= 0) s->gate_pair = take(m, a, FOR_BACKWARD, gates * 2);
    s->rstd = take_reals(a, FOR_BACKWARD, rows);
    s->logits = take(m, a, FOR_LOGITS, (int64_t)m->chunk * c->vocab);
    if (!m->options.training) return;
    s->dx = take(m, a, FOR_BACKWARD, rows * c->dim);
    s->dnorm = take(m, a, FOR_BACKWARD, rows * c->dim);
    s->dattention = take(m, a, FOR_BACKWARD, rows * c->n_heads * c->d_v);
    s->dqkv = take(m, a, FOR_BACKWARD, rows * widest(m, ANY, layer_fused));
    s->drotated = take(m, a, FOR_BACKWARD, rows * widest(m, ANY, layer_rotated));
    if (c->gate_linear) return;
    if (m->first_of[ATTENTION_NSA] < 0 && m->first_of[ATTENTION_CMP_SLC] < 0) return;
    s->dgates = take(m, a, FOR_BACKWARD, gates * BRANCHES);
    s->dgate_hidden = take(m, a, FOR_BACKWARD, gates * m->gate_width);
    s->dq_mean = take(m, a, FOR_BACKWARD, gates * c->d_k);
}

static int smaller(int a, int b) {
    return a < b ? a : b;
}

static void layout_caches(model *m, arena *a) {
    const model_config *c = &m->config;
    int64_t rows = (int64_t)m->options.room * c->n_kv_groups;
    for (int i = 0; i < c->n_layers; i++) {
        nsa_desc d = model_desc(m, i, 1, m->options.room);
        layer_cache *x = &m->caches[i];
        if (!attention_is_sparse(layer_kind(m, i))) {
            x->k = take(m, a, FOR_CACHE, rows * c->d_k);
            x->v = take(m, a, FOR_CACHE, rows * c->d_v);
        } else {
            x->sparse.desc = d;
            x->bytes = m->o->cache_bytes(m->o, &d, m->options.tokens - 1);
            x->memory = arena_take(a, FOR_CACHE, x->bytes);
        }
    }
}

static size_t most_of_slices(model *m, int layer) {
    size_t most = 0;
    for (int i = 0; i < m->slice_count; i++) {
        size_t bytes = layer_workspace(m, layer, &m->slices[i]);
        if (bytes > most) most = bytes;
    }
    return most;
}

/* Of the layers of each kind, the largest. */
static size_t workspace_bytes(model *m, bool appending) {
    size_t most = 0;
    for (int kind = 0; kind < ATTENTION_KINDS; kind++) {
        int layer = m->first_of[kind];
        if (layer < 0) continue;
        size_t bytes =
            appending
                ? layer_append_workspace(m, layer, smaller(m->options.tokens, m->options.room))
                : most_of_slices(m, layer);
        if (bytes > most) most = bytes;
    }
    return most;
}

/* The passes of training and evaluation; where they are divided, also a pass that is not. */
static size_t pass_workspace_bytes(model *m) {
    const model_options *o = &m->options;
    const model_batch whole = {.batch = o->batch, .tokens_each = o->tokens}; /* for its shape */
    m->split = m->context > 1;
    context_slices(m, &whole);
    size_t most = workspace_bytes(m, false);
    if (m->split) {
        const model_batch alone = {.batch = 1, .tokens_each = model_longest(m)};
        m->split = false;
        m->batch = 1;
        context_slices(m, &alone);
        size_t bytes = workspace_bytes(m, false);
        if (bytes > most) most = bytes;
        m->batch = o->batch;
    }
    return most;
}

static void layout_workspace(model *m, arena *a) {
    scratch *s = &m->scratch;
    s->workspace_bytes = pass_workspace_bytes(m);
    /* Of packed documents a device keeps where each one begins, in each branch, and where its
       compressed rows do: four numbers a document, of which there are at most as many as rows, in
       whole pieces of workspace. */
    if (!m->o->host_memory)
        s->workspace_bytes += (BRANCHES + 1) * ((size_t)m->rows * sizeof(int32_t) + 512);
    if (m->caches) {
        layout_caches(m, a);
        size_t bytes = workspace_bytes(m, true);
        if (bytes > s->workspace_bytes) s->workspace_bytes = bytes;
    }
    s->workspace = arena_take(a, FOR_WORKSPACE, s->workspace_bytes);
}

static void layout_muon(model *m, arena *a) {
    int64_t largest = 0, square = 0;
    if (!m->options.muon) return;
    for (int i = 0; i < m->params.length; i++) {
        const param *x = &m->params.list[i];
        if (!x->inner) continue;
        int64_t rows = x->shape[x->dims - 2], cols = x->shape[x->dims - 1];
        int64_t side = rows < cols ? rows : cols;
        if (rows * cols > largest) largest = rows * cols;
        if (side * side > square) square = side * side;
    }
    m->muon.x = take_reals(a, FOR_WORKSPACE, largest);
    m->muon.y = take_reals(a, FOR_WORKSPACE, largest);
    m->muon.gram = take_reals(a, FOR_WORKSPACE, square);
    m->muon.square = take_reals(a, FOR_WORKSPACE, square);
}

static void layout(model *m, arena *a) {
    params_layout(&m->params, a, m->options.training, m->element);
    layout_scratch(m, a);
    layout_layers(m, a);
    size_t ids = (size_t)m->rows * sizeof(int32_t);
    size_t lists = m->context > 1 ? 2 * (size_t)m->options.batch : 1; /* each ends with one more */
    m->tokens = arena_take(a, FOR_BATCH, ids);
    m->labels = arena_take(a, FOR_BATCH, ids);
    m->begins = arena_take(a, FOR_BATCH, ids + lists * sizeof(int32_t));
    m->state = arena_take(a, FOR_BATCH, sizeof *m->state);
    m->rates = arena_take(a, FOR_BATCH, sizeof *m->rates);
    if (m->first_of[ATTENTION_CMP_SLC] >= 0)
        m->shut = arena_take(a, FOR_WEIGHTS, BRANCHES * m->element);
    layout_workspace(m, a);
    layout_muon(m, a);
}

/* ---- Opening ------------------------------------------------------------------------------- */

static size_t dtype_bytes(nsa_dtype dtype) {
    return dtype == NSA_F64 ? 8 : dtype == NSA_F32 ? 4 : 2;
}

static bool check_sizes(const model_config *c, const model_options *options, fault *f) {
    const struct {
        const char *name;
        int value;
    } sizes[] = {{"vocab", c->vocab},        {"dim", c->dim},
                 {"n_layers", c->n_layers},  {"d_k", c->d_k},
                 {"hidden", c->hidden},      {"batch", options->batch},
                 {"tokens", options->tokens}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].value < 1)
            return fault_set(f, "model: %s is %d: must be at least 1", sizes[i].name,
                             sizes[i].value);
    if (c->d_k % 2) return fault_set(f, "model: d_k is %d: must be even, RoPE turns pairs", c->d_k);
    if ((int64_t)options->batch * options->tokens > INT32_MAX)
        return fault_set(
            f, "train.batch_size x train.seq_len: %d rows of %d tokens; at most 2147483647",
            options->batch, options->tokens);
    return true;
}

/* All of a model but its memory. */
static bool prepare(model *m, const model_config *c, const model_options *options, const ops *o,
                    fault *f) {
    enum { LOGITS = 1 << 21, FEWEST = 128 }; /* 8 MiB of f32, or as much as 128 rows need */
    memset(m, 0, sizeof *m);
    if (!check_sizes(c, options, f)) return false;
    if (options->room && !o->decode)
        return fault_set(f, "model: the %s does not decode from a cache", o->name);
    m->config = *c;
    m->options = *options;
    m->o = o;
    m->element = dtype_bytes(o->dtype);
    m->context = options->dist ? options->dist->context : 1;
    m->batch = options->batch;
    m->sequence = options->tokens;
    m->tokens_each = options->tokens / m->context;
    m->rows = options->batch * m->tokens_each;
    for (int kind = 0; kind < ATTENTION_KINDS; kind++) m->first_of[kind] = -1;
    for (int i = c->n_layers - 1; i >= 0; i--) m->first_of[c->attention[i]] = i;
    if (c->gate_linear && m->first_of[ATTENTION_CMP_SLC] >= 0)
        return fault_set(f,
                         "nsa.gate_form: linear is a gate of three branches, and model.attention "
                         "has layers of two (cmp+slc); allowed: mlp");
    m->mlp_in = c->swiglu ? 2 * c->hidden : c->hidden;
    m->gate_width = c->d_k / 2;
    m->chunk = LOGITS / c->vocab > FEWEST ? LOGITS / c->vocab : FEWEST;
    if (m->chunk > m->rows) m->chunk = m->rows;
    nsa_desc d = model_desc(m, 0, options->batch, options->tokens);
    nsa_status status = nsa_desc_check(&d);
    if (status != NSA_OK)
        return fault_set(f, "model: %s (%s)", nsa_status_text(status), nsa_status_where(status));
    return context_open(m, f) && build_table(m, f);
}

static void note_communication(const model *m, arena *a) {
    const dist *d = m->options.dist;
    if (!d) return;
    size_t bytes = dist_bytes(d, m->o, m->params.elements) + context_bytes(m);
    arena_note(a, FOR_COMMUNICATION, bytes);
}

/* Of all matrices, an embedding that is no head too is not multiplied. */
static void note_packed(const model *m, arena *a) {
    const params *p = &m->params;
    int64_t elements = 0;
    for (int i = 0; i < p->length; i++)
        if (p->list[i].dims == 2 && (i != m->embed || i == m->head)) elements += p->list[i].count;
    arena_note(a, FOR_PACKED, (size_t)elements * (size_t)m->o->packed_bytes);
}

/* exp of it is 0 in every type, and so is its sigmoid. */
static void shut_gates(model *m) {
    static const real closed[BRANCHES] = {0, 0, -10000};
    uint16_t half[BRANCHES];
    if (!m->shut) return;
    for (int i = 0; i < BRANCHES; i++)
        half[i] = m->o->dtype == NSA_BF16 ? nsa_f32_to_bf16((float)closed[i])
                                          : nsa_f32_to_f16((float)closed[i]);
    bool narrow = m->o->dtype != NSA_REAL_DTYPE;
    m->o->upload(m->o, m->shut, narrow ? (const void *)half : closed, BRANCHES * m->element);
}

bool model_open(model *m, const model_config *c, const model_options *options, const ops *o,
                uint64_t seed, fault *f) {
    static const loss_scaler unscaled = {1, 0, 0};
    arena sizes = {0};
    bool ok = prepare(m, c, options, o, f);
    if (ok) {
        layout(m, &sizes);
        m->memory = o->allocate(o, sizes.used);
        if (!m->memory)
            ok = fault_set(f, "model: no memory for %.1f MiB", (double)sizes.used / (1 << 20));
    }
    if (ok) {
        m->arena.base = m->memory;
        layout(m, &m->arena);
        note_communication(m, &m->arena);
        note_packed(m, &m->arena);
        model_set_scaler(m, &unscaled);
        shut_gates(m);
        ok = context_attach(m, f) && params_init(&m->params, o, seed, f) &&
             (!m->caches || model_restart(m, f));
    }
    if (!ok) model_close(m);
    return ok;
}

bool model_measure(const model_config *c, const model_options *options, const ops *o, arena *sizes,
                   int64_t *parameters, fault *f) {
    model m;
    bool ok = prepare(&m, c, options, o, f);
    memset(sizes, 0, sizeof *sizes);
    if (ok) {
        layout(&m, sizes);
        note_communication(&m, sizes);
        note_packed(&m, sizes);
    }
    *parameters = m.params.count;
    model_close(&m);
    return ok;
}

bool model_describe(model *m, const model_config *c, const ops *o, fault *f) {
    const model_options options = {.batch = 1, .tokens = 1};
    return prepare(m, c, &options, o, f);
}

void model_close(model *m) {
    model_forget_recordings(m);
    if (m->memory) m->o->release(m->o, m->memory);
    params_free(&m->params);
    context_close(m);
    free(m->slots);
    free(m->x);
    free(m->acts);
    free(m->caches);
    memset(m, 0, sizeof *m);
}

void *model_weight(const model *m, int place) {
    const params *p = &m->params;
    char *values = p->narrow ? p->narrow : (char *)p->value;
    return values + (size_t)p->list[place].offset * m->element;
}

real *model_gradient(const model *m, int place) {
    return m->params.grad + m->params.list[place].offset;
}

/* model_layout.c - TinyLM's parameters and memory. Twin: model.h. Nothing here computes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/model.h"

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
                      .rope_base = 10000,
                      .rope_factor = 1};
    return c;
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

/* W_Q and the k and v of each branch; returns the place of the first, at which all of them can be
   read as one matrix. */
static int add_projections(builder *b) {
    static const char *const sparse[] = {"attn.W_K_cmp.weight", "attn.W_K_slc.weight",
                                         "attn.W_K_win.weight", "attn.W_V_cmp.weight",
                                         "attn.W_V_slc.weight", "attn.W_V_win.weight"};
    static const char *const dense[] = {"attn.W_K.weight", "attn.W_V.weight"};
    const model_config *c = &b->m->config;
    const char *const *names = c->full ? dense : sparse;
    int pairs = c->full ? 1 : BRANCHES;
    int first = add_matrix(b, "attn.W_Q.weight", (int64_t)c->n_heads * c->d_k, c->dim, INIT_STD);
    for (int i = 0; i < 2 * pairs; i++) {
        int64_t rows = (int64_t)c->n_kv_groups * (i < pairs ? c->d_k : c->d_v);
        add(b, (param_spec){names[i], {rows, c->dim}, 0, INIT_STD, true, true});
    }
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

/* What sparse attention has and dense has not: phi of k and of v, and the gate. */
static void add_phi_and_gate(builder *b, int *slots) {
    static const char *const k_names[] = {"attn.phi_k.pos", "attn.phi_k.w1", "attn.phi_k.b1",
                                          "attn.phi_k.w2", NULL};
    static const char *const v_names[] = {"attn.phi_v.pos", "attn.phi_v.w1", "attn.phi_v.b1",
                                          "attn.phi_v.w2", "attn.phi_v.b2"};
    const model_config *c = &b->m->config;
    int width = b->m->gate_width;
    add_phi(b, slots + PHI_K, k_names, c->d_k);
    add_phi(b, slots + PHI_V, v_names, c->d_v);
    slots[GATE_W1] = add_matrix(b, "attn.gate.fc1.weight", width, c->d_k, INIT_STD);
    slots[GATE_B1] = add_constant(b, "attn.gate.fc1.bias", width, 0);
    slots[GATE_W2] = add_matrix(b, "attn.gate.fc2.weight", BRANCHES, width, GATE_STD);
    slots[GATE_B2] = add_constant(b, "attn.gate.fc2.bias", BRANCHES, 0);
}

static void add_layer(builder *b, int layer, int *slots) {
    const model_config *c = &b->m->config;
    double residual_std = INIT_STD / sqrt(2.0 * c->n_layers);
    b->layer = layer;
    for (int s = 0; s < SLOTS; s++) slots[s] = -1;
    slots[NORM1] = add_constant(b, "norm1.weight", c->dim, 1);
    slots[W_QKV] = add_projections(b);
    if (!c->full) add_phi_and_gate(b, slots);
    slots[W_OUT] =
        add_matrix(b, "attn.out.weight", c->dim, (int64_t)c->n_heads * c->d_v, residual_std);
    slots[NORM2] = add_constant(b, "norm2.weight", c->dim, 1);
    slots[FC1] = add_matrix(b, "mlp.fc1.weight", 4 * (int64_t)c->dim, c->dim, INIT_STD);
    slots[FC2] = add_matrix(b, "mlp.fc2.weight", c->dim, 4 * (int64_t)c->dim, residual_std);
}

static bool build_table(model *m, fault *f) {
    const model_config *c = &m->config;
    builder b = {m, -1, true};
    m->layer_slots = calloc((size_t)c->n_layers, sizeof *m->layer_slots);
    m->x = calloc((size_t)c->n_layers + 1, sizeof *m->x);
    m->acts = calloc((size_t)c->n_layers, sizeof *m->acts);
    if (m->options.room) m->caches = calloc((size_t)c->n_layers, sizeof *m->caches);
    if (!m->layer_slots || !m->x || !m->acts || (m->options.room && !m->caches))
        return fault_set(f, "model: out of memory");
    m->embed = add(&b, (param_spec){"embed.weight", {c->vocab, c->dim}, 0, INIT_STD, false, false});
    for (int i = 0; i < c->n_layers; i++) add_layer(&b, i, m->layer_slots[i]);
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

/* What attention leaves for backward. */
static void layout_attended(model *m, arena *a, layer_acts *x) {
    const model_config *c = &m->config;
    int64_t rows = m->rows, heads = c->n_heads;
    nsa_desc d = model_desc(m, m->options.batch, m->options.tokens);
    x->lse[0] = take_reals(a, FOR_ACTIVATIONS, rows * heads);
    if (c->full) {
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
static void layout_rest(model *m, arena *a, layer_acts *x) {
    const model_config *c = &m->config;
    int64_t rows = m->rows, heads = c->n_heads, groups = c->n_kv_groups;
    nsa_desc d = model_desc(m, m->options.batch, m->options.tokens);
    int64_t compressed = (int64_t)m->options.batch * nsa_cmp_count(&d, m->options.tokens);
    x->rstd1 = take_reals(a, FOR_ACTIVATIONS, rows);
    x->qkv = take(m, a, FOR_ACTIVATIONS, rows * m->fused);
    x->mid = take(m, a, FOR_ACTIVATIONS, rows * c->dim);
    x->rstd2 = take_reals(a, FOR_ACTIVATIONS, rows);
    x->hidden = take(m, a, FOR_ACTIVATIONS, rows * 4 * c->dim);
    if (c->full) return;
    x->attention = take(m, a, FOR_ACTIVATIONS, rows * heads * c->d_v);
    x->q_mean = take(m, a, FOR_ACTIVATIONS, rows * groups * c->d_k);
    x->gate_hidden = take(m, a, FOR_ACTIVATIONS, rows * groups * m->gate_width);
    x->gates = take(m, a, FOR_ACTIVATIONS, rows * groups * BRANCHES);
    x->k_cmp = take(m, a, FOR_ACTIVATIONS, compressed * groups * c->d_k);
    x->v_cmp = take(m, a, FOR_ACTIVATIONS, compressed * groups * c->d_v);
}

checkpointing layer_checkpointing(const model *m, int layer) {
    const model_options *o = &m->options;
    bool inside = !o->end || (layer >= o->first && layer < o->end);
    return inside ? o->checkpointing : CHECKPOINT_NONE;
}

static void layout_layers(model *m, arena *a) {
    const model_config *c = &m->config;
    const layer_acts *shared = NULL; /* of the layers that are computed again */
    int64_t size = (int64_t)m->rows * c->dim;
    for (int i = 0; i <= c->n_layers; i++) {
        bool kept = m->options.training || i < 2;
        m->x[i] = kept ? take(m, a, FOR_CHECKPOINTS, size) : m->x[i - 2];
    }
    for (int i = 0; i < c->n_layers; i++) {
        layer_acts *x = &m->acts[i];
        checkpointing how = m->options.training ? layer_checkpointing(m, i) : CHECKPOINT_LAYERS;
        if (how != CHECKPOINT_NONE && shared)
            *x = *shared;
        else
            layout_rest(m, a, x);
        if (how != CHECKPOINT_LAYERS || !shared) layout_attended(m, a, x);
        if (how != CHECKPOINT_NONE && !shared) shared = x;
    }
}

static void layout_scratch(model *m, arena *a) {
    const model_config *c = &m->config;
    scratch *s = &m->scratch;
    int64_t rows = m->rows, gates = rows * c->n_kv_groups;
    s->norm = take(m, a, FOR_BACKWARD, rows * c->dim);
    s->act = take(m, a, FOR_BACKWARD, rows * 4 * c->dim);
    s->gate_act = take(m, a, FOR_BACKWARD, gates * m->gate_width);
    s->rstd = take_reals(a, FOR_BACKWARD, rows);
    s->logits = take(m, a, FOR_LOGITS, (int64_t)m->chunk * c->vocab);
    if (!m->options.training) return;
    s->dx = take(m, a, FOR_BACKWARD, rows * c->dim);
    s->dnorm = take(m, a, FOR_BACKWARD, rows * c->dim);
    s->dhidden = take(m, a, FOR_BACKWARD, rows * 4 * c->dim);
    s->dattention = take(m, a, FOR_BACKWARD, rows * c->n_heads * c->d_v);
    s->dqkv = take(m, a, FOR_BACKWARD, rows * m->fused);
    s->drotated = take(m, a, FOR_BACKWARD, rows * m->rotated);
    if (c->full) return;
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
    nsa_desc d = model_desc(m, 1, m->options.room);
    for (int i = 0; i < c->n_layers; i++) {
        layer_cache *x = &m->caches[i];
        if (c->full) {
            x->k = take(m, a, FOR_CACHE, rows * c->d_k);
            x->v = take(m, a, FOR_CACHE, rows * c->d_v);
        } else {
            x->sparse.desc = d;
            x->bytes = m->o->cache_bytes(m->o, &d, m->options.tokens - 1);
            x->memory = arena_take(a, FOR_CACHE, x->bytes);
        }
    }
}

static void layout(model *m, arena *a) {
    params_layout(&m->params, a, m->options.training, m->element);
    layout_layers(m, a);
    layout_scratch(m, a);
    size_t ids = (size_t)m->rows * sizeof(int32_t);
    m->tokens = arena_take(a, FOR_BATCH, ids);
    m->labels = arena_take(a, FOR_BATCH, ids);
    m->begins = arena_take(a, FOR_BATCH, ids + sizeof(int32_t));
    m->state = arena_take(a, FOR_BATCH, sizeof *m->state);
    m->rates = arena_take(a, FOR_BATCH, sizeof *m->rates);
    nsa_desc d = model_desc(m, m->options.batch, m->options.tokens);
    m->scratch.workspace_bytes = layer_workspace(m, &d);
    /* Of packed documents a device keeps where each one's compressed rows begin, too: one number a
       document, of which there are at most as many as rows, in a whole piece of workspace. */
    if (!m->o->host_memory) m->scratch.workspace_bytes += ids + 512;
    if (m->caches) {
        layout_caches(m, a);
        size_t bytes = layer_append_workspace(m, smaller(m->options.tokens, m->options.room));
        if (bytes > m->scratch.workspace_bytes) m->scratch.workspace_bytes = bytes;
    }
    m->scratch.workspace = arena_take(a, FOR_WORKSPACE, m->scratch.workspace_bytes);
}

/* ---- Opening ------------------------------------------------------------------------------- */

static size_t dtype_bytes(nsa_dtype dtype) {
    return dtype == NSA_F64 ? 8 : dtype == NSA_F32 ? 4 : 2;
}

static bool check_sizes(const model_config *c, const model_options *options, fault *f) {
    const struct {
        const char *name;
        int value;
    } sizes[] = {{"vocab", c->vocab}, {"dim", c->dim},           {"n_layers", c->n_layers},
                 {"d_k", c->d_k},     {"batch", options->batch}, {"tokens", options->tokens}};
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
    if (c->windowed && !o->window_forward)
        return fault_set(f, "model.attention: window is not there on the %s; allowed: nsa, full",
                         o->name);
    if (options->room && !o->decode)
        return fault_set(f, "model: the %s does not decode from a cache", o->name);
    m->config = *c;
    m->options = *options;
    m->o = o;
    m->element = dtype_bytes(o->dtype);
    m->batch = options->batch;
    m->tokens_each = options->tokens;
    m->rows = options->batch * options->tokens;
    int pairs = c->full ? 1 : BRANCHES;
    m->rotated = c->d_k * (c->n_heads + pairs * c->n_kv_groups);
    m->fused = m->rotated + pairs * c->n_kv_groups * c->d_v;
    m->gate_width = c->d_k / 2;
    m->chunk = LOGITS / c->vocab > FEWEST ? LOGITS / c->vocab : FEWEST;
    if (m->chunk > m->rows) m->chunk = m->rows;
    nsa_desc d = model_desc(m, options->batch, options->tokens);
    nsa_status status = nsa_desc_check(&d);
    if (status != NSA_OK)
        return fault_set(f, "model: %s (%s)", nsa_status_text(status), nsa_status_where(status));
    return build_table(m, f);
}

static void note_communication(const model *m, arena *a) {
    const dist *d = m->options.dist;
    if (d) arena_note(a, FOR_COMMUNICATION, dist_bytes(d, m->o, m->params.elements));
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
        model_set_scaler(m, &unscaled);
        ok = params_init(&m->params, o, seed, f) && (!m->caches || model_restart(m, f));
    }
    if (!ok) model_close(m);
    return ok;
}

bool model_measure(const model_config *c, const model_options *options, const ops *o, arena *sizes,
                   int64_t *parameters, fault *f) {
    model m;
    bool ok = prepare(&m, c, options, o, f);
    memset(sizes, 0, sizeof *sizes);
    if (ok) layout(&m, sizes);
    if (ok) note_communication(&m, sizes);
    *parameters = m.params.count;
    model_close(&m);
    return ok;
}

void model_close(model *m) {
    model_forget_recordings(m);
    if (m->memory) m->o->release(m->o, m->memory);
    params_free(&m->params);
    free(m->layer_slots);
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

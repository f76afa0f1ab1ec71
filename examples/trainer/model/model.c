/* model.c - TinyLM as a whole: embedding, layers, loss, and back. Twin: model.h. */
#include "model/model_inside.h"

#include <string.h>

/* ---- Passes -------------------------------------------------------------------------------- */

/* The workspace was sized for whole rows; documents inside them read fewer keys. */
static bool documents_fit(model *m, fault *f) {
    size_t bytes = 0;
    for (int kind = 0; kind < ATTENTION_KINDS; kind++) {
        for (int i = 0; m->first_of[kind] >= 0 && i < m->slice_count; i++) {
            size_t needed = layer_workspace(m, m->first_of[kind], &m->slices[i]);
            if (needed > bytes) bytes = needed;
        }
    }
    if (bytes <= m->scratch.workspace_bytes) return true;
    return fault_set(f, "model: %d documents in a batch need %zu bytes of workspace, there are %zu",
                     m->documents, bytes, m->scratch.workspace_bytes);
}

static bool begin_pass(model *m, phase p, const model_batch *b, fault *f) {
    int most = p == PHASE_SAMPLE ? model_longest(m) : m->options.tokens;
    int64_t rows = (int64_t)b->batch * b->tokens_each;
    if (rows < 1 || rows > (int64_t)m->options.batch * most)
        return fault_set(f, "model: a batch of %d x %d tokens: between 1 and %d x %d", b->batch,
                         b->tokens_each, m->options.batch, most);
    m->split = m->context > 1 && p != PHASE_SAMPLE;
    if (m->split && !context_check(m, b, f)) return false;
    int among = m->split ? m->context : 1;
    m->phase = p;
    m->batch = b->batch;
    m->sequence = b->tokens_each;
    m->tokens_each = b->tokens_each / among;
    m->rows = (int)(rows / among);
    m->documents = b->begins ? b->documents : 0;
    m->gathered = -1;
    context_slices(m, b);
    context_upload(m, b);
    return !b->begins || documents_fit(m, f);
}

/* Whether the pass has come to its end. */
static bool passed(const model *m, fault *f) {
    if (m->options.dist && dist_ended(m->options.dist, f)) return false;
    return !m->o->failed(m->o, f);
}

int model_longest(const model *m) {
    return m->options.tokens / m->context;
}

static void forward(model *m) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    o->embed_forward(o, m->x[0], model_weight(m, m->embed), m->tokens, m->rows, c->dim);
    for (int i = 0; i < c->n_layers; i++) layer_forward(m, i);
    o->rmsnorm_forward(o, m->scratch.norm, m->scratch.rstd, m->x[c->n_layers],
                       model_weight(m, m->norm), m->rows, c->dim, c->norm_eps);
}

/* Logits exist for `chunk` rows at a time: loss, their gradient and what follows from it are done
   before the next rows. */
static void head(model *m, double scale) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    scratch *s = &m->scratch;
    const void *w = model_weight(m, m->head);
    for (int first = 0; first < m->rows; first += m->chunk) {
        int rows = m->rows - first < m->chunk ? m->rows - first : m->chunk;
        size_t offset = (size_t)first * (size_t)c->dim * m->element;
        const char *norm = (const char *)s->norm + offset;
        o->linear_forward(o, s->logits, norm, w, NULL, rows, c->dim, c->vocab);
        o->cross_entropy(o, m->state, s->logits, m->labels + first, rows, c->vocab, scale);
        if (scale == 0) continue;
        o->linear_backward_weight(o, model_gradient(m, m->head), s->logits, norm, rows, c->dim,
                                  c->vocab);
        o->linear_backward_input(o, (char *)s->dnorm + offset, s->logits, w, rows, c->dim,
                                 c->vocab);
    }
}

/* Gradients become final from the end of the table on. */
static void final_from(const model *m, int place) {
    if (m->options.dist && m->last_of_step)
        dist_final_from(m->options.dist, m->params.list[place].offset);
}

/* Layers that are computed again share their memory, which holds that of the last of them. */
static void backward(model *m) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    scratch *s = &m->scratch;
    m->phase = PHASE_BWD;
    o->zero(o, s->dx, (size_t)m->rows * (size_t)c->dim * m->element);
    o->rmsnorm_backward(o, s->dx, model_gradient(m, m->norm), s->dnorm, m->x[c->n_layers],
                        model_weight(m, m->norm), s->rstd, m->rows, c->dim);
    final_from(m, m->norm);
    bool held = true;
    for (int i = c->n_layers - 1; i >= 0; i--) {
        if (layer_checkpointing(m, i)) {
            if (!held) layer_recompute(m, i);
            held = false;
        }
        layer_backward(m, i);
        final_from(m, m->slots[i].of[NORM1]);
    }
    o->embed_backward(o, model_gradient(m, m->embed), s->dx, m->tokens, m->rows, c->dim);
    final_from(m, 0);
}

bool model_evaluate(model *m, const model_batch *b, fault *f) {
    if (!begin_pass(m, PHASE_EVAL, b, f)) return false;
    forward(m);
    head(m, 0);
    return passed(m, f);
}

/* What is recorded waits for nothing; what is launched one by one is too much to launch behind a
   step that may never end. */
static void passes(model *m, double scale) {
    dist *d = m->options.dist;
    fault unused;
    if (d && m->last_of_step) dist_begin(d);
    forward(m);
    head(m, scale);
    if (d && !m->recording && !dist_catch_up(d, &unused)) return;
    backward(m);
    if (d && m->last_of_step) dist_join(d);
}

bool model_train(model *m, const model_batch *b, double scale, fault *f) {
    if (!begin_pass(m, PHASE_FWD, b, f)) return false;
    model_launch(m, m->last_of_step ? MODEL_LAST_BATCH : MODEL_BATCH, passes, scale);
    if (m->options.dist && !dist_catch_up(m->options.dist, f)) return false;
    return passed(m, f);
}

/* Halves come in at the end of the reals' array, and are widened from its front on. */
static void download_logits(const model *m, real *logits, size_t count) {
    const ops *o = m->o;
    char *raw = (char *)(logits + count) - count * m->element;
    o->download(o, raw, m->scratch.logits, count * m->element);
    for (size_t i = 0; o->dtype != NSA_REAL_DTYPE && i < count; i++) {
        uint16_t half;
        memcpy(&half, raw + i * sizeof half, sizeof half);
        logits[i] = (real)(o->dtype == NSA_BF16 ? nsa_bf16_to_f32(half) : nsa_f16_to_f32(half));
    }
}

bool model_next(model *m, const int32_t *tokens, int count, real *logits, fault *f) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    model_batch b = {.tokens = tokens, .batch = 1, .tokens_each = count};
    if (!begin_pass(m, PHASE_SAMPLE, &b, f)) return false;
    forward(m);
    size_t last = (size_t)(count - 1) * (size_t)c->dim * m->element;
    o->linear_forward(o, m->scratch.logits, (char *)m->scratch.norm + last,
                      model_weight(m, m->head), NULL, 1, c->dim, c->vocab);
    download_logits(m, logits, (size_t)c->vocab);
    return !o->failed(o, f);
}

/* ---- Appending ----------------------------------------------------------------------------- */

bool model_restart(model *m, fault *f) {
    m->past = 0;
    memset(&m->reads, 0, sizeof m->reads);
    for (int i = 0; i < m->config.n_layers; i++) {
        nsa_desc d = model_desc(m, i, 1, m->options.room);
        if (attention_is_sparse(layer_kind(m, i)))
            m->o->cache_open(m->o, &m->caches[i].sparse, &d, m->options.tokens - 1,
                             m->caches[i].memory, m->caches[i].bytes);
    }
    return !m->o->failed(m->o, f);
}

/* Logits of the rows of this pass from `first` on. */
static void rows_logits(model *m, int first, real *logits) {
    const ops *o = m->o;
    const model_config *c = &m->config;
    for (int rows; first < m->rows; first += rows) {
        rows = m->rows - first < m->chunk ? m->rows - first : m->chunk;
        size_t offset = (size_t)first * (size_t)c->dim * m->element;
        o->linear_forward(o, m->scratch.logits, (char *)m->scratch.norm + offset,
                          model_weight(m, m->head), NULL, rows, c->dim, c->vocab);
        download_logits(m, logits, (size_t)rows * (size_t)c->vocab);
        logits += (size_t)rows * (size_t)c->vocab;
    }
}

bool model_append(model *m, const int32_t *tokens, int count, int wanted, real *logits, fault *f) {
    bool ok = true;
    if (count < 1 || wanted < 0 || wanted > count || count > m->options.room - m->past)
        return fault_set(f,
                         "model: %d tokens after %d, logits of %d: room for %d in all, 1 at least",
                         count, m->past, wanted, m->options.room);
    m->appending = true;
    for (int first = 0, some; ok && first < count; first += some) {
        some = count - first < m->options.tokens ? count - first : m->options.tokens;
        model_batch b = {.tokens = tokens + first, .batch = 1, .tokens_each = some};
        if (!(ok = begin_pass(m, PHASE_SAMPLE, &b, f))) break;
        forward(m);
        m->past += some;
        int silent = count - wanted - first; /* rows of this pass that nobody asked for */
        if (silent < some) {
            rows_logits(m, silent > 0 ? silent : 0, logits);
            logits += (size_t)(some - (silent > 0 ? silent : 0)) * (size_t)m->config.vocab;
        }
        ok = !m->o->failed(m->o, f);
    }
    m->appending = false;
    return ok;
}

/* ---- Recordings ---------------------------------------------------------------------------- */

static void forget(const model *m, recording *r) {
    recording none = {0};
    if (r->graph) m->o->graph_free(m->o, r->graph);
    *r = none;
}

void model_forget_recordings(model *m) {
    for (int i = 0; i < MODEL_PARTS; i++) forget(m, &m->recordings[i]);
}

/* Documents differ from batch to batch, and with them what is launched. */
static bool can_record(const model *m) {
    return m->options.graphs && m->o->graph_begin && !m->documents;
}

void model_launch(model *m, model_part part, void (*run)(model *m, double number), double number) {
    const ops *o = m->o;
    recording *r = &m->recordings[part];
    recording now = {NULL, number, m->batch, m->tokens_each, true};
    if (!can_record(m)) {
        run(m, number);
        return;
    }
    bool same = r->known && r->number == number && r->batch == now.batch &&
                r->tokens_each == now.tokens_each;
    if (!same) {
        forget(m, r);
        *r = now;
        run(m, number);
        return;
    }
    if (!r->graph) {
        o->graph_begin(o);
        m->recording = true;
        run(m, number);
        m->recording = false;
        r->graph = o->graph_end(o);
    }
    if (r->graph) o->graph_run(o, r->graph);
}

/* ---- State --------------------------------------------------------------------------------- */

step_state model_state(const model *m) {
    step_state s;
    m->o->download(m->o, &s, m->state, sizeof s);
    return s;
}

void model_zero_state(model *m) {
    m->o->zero(m->o, m->state, offsetof(step_state, scaler));
}

void model_set_scaler(model *m, const loss_scaler *s) {
    m->o->upload(m->o, &m->state->scaler, s, sizeof *s);
}

void model_post_state(const model *m) {
    if (m->o->post) m->o->post(m->o, m->state);
}

step_state model_fetch_state(const model *m) {
    step_state s;
    if (!m->o->fetch) return model_state(m);
    m->o->fetch(m->o, &s);
    return s;
}

void model_zero_gradients(model *m) {
    m->o->zero(m->o, m->params.grad, (size_t)m->params.elements * sizeof(real));
}

/* observer.c - see observer.h. */
#include "model/observer.h"

#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "model/model_inside.h"

/* ---- Statistics ---------------------------------------------------------------------------- */

static void collect(observer *x, int layer) {
    double begin = clock_ms();
    const model *m = x->model;
    const model_config *c = &m->config;
    if (layer < x->next) return;
    x->next = layer + 1;
    if (!attention_is_sparse(layer_kind(m, layer))) return;
    nsa_desc d = layer_desc(m, layer);
    nsa_attention views = layer_views(m, layer);
    layer_choices seen = {.gates = views.gates.data,
                          .kind = c->gate,
                          .blocks = m->acts[layer].blocks,
                          .rows = m->rows,
                          .groups = c->n_kv_groups,
                          .width = nsa_block_list_width(&d),
                          .slc_block = c->l_sel,
                          .begins = m->documents ? m->begins : NULL,
                          .sequences = m->documents ? m->documents : m->batch,
                          .tokens_each = m->tokens_each,
                          .places = m->split ? m->places : NULL,
                          .gate_heads = d.gate_heads,
                          .gate_stride = views.gates.token,
                          .layer = layer};
    x->inner->count_choices(x->inner, m->state, &seen);
    x->spent += clock_ms() - begin;
}

/* ---- Marks --------------------------------------------------------------------------------- */

static void trace_backward(observer *x, phase p, int layer) {
    bool same = p == x->phase && layer == x->layer; /* recomputing, then going back */
    double now = clock_ms();
    if (!same && x->phase == PHASE_BWD)
        listener_say(&x->trace, "trace: backward of layer %d, %.3f ms", x->layer, now - x->since);
    if (!same) x->since = now;
}

static void mark(const ops *o, phase p, int layer) {
    observer *x = (observer *)(uintptr_t)o; /* the table that observer_wrap filled, not const */
    int last = x->model->config.n_layers - 1;
    if (x->collecting && p == PHASE_FWD && layer > 0) collect(x, layer - 1);
    if (x->collecting && p == PHASE_BWD && layer == last) collect(x, last);
    if (x->trace.say) trace_backward(x, p, layer);
    x->phase = p;
    x->layer = layer;
    x->inner->mark(x->inner, p, layer);
}

void observer_wrap(observer *x, const ops *o, const model *m) {
    observer empty = {.table = *o, .inner = o, .model = m};
    *x = empty;
    x->table.mark = mark;
}

void observer_begin(observer *x) {
    x->spent = 0;
    x->next = 0;
    x->collecting = x->statistics;
}

void observer_end(observer *x) {
    x->collecting = false;
}

/* ---- Gradients ----------------------------------------------------------------------------- */

bool observer_trace_gradients(const observer *x, int64_t step, double scale, const listener *to,
                              fault *f) {
    const model *m = x->model;
    const ops *o = x->inner;
    for (int i = 0; i < m->params.length; i++) {
        const param *p = &m->params.list[i];
        real *g = malloc((size_t)p->count * sizeof *g);
        double sum = 0, most = 0;
        if (!g) return fault_set(f, "out of memory to trace the gradient of %s", p->name);
        o->download(o, g, model_gradient(m, i), (size_t)p->count * sizeof *g);
        for (int64_t e = 0; e < p->count; e++) {
            double value = fabs((double)g[e]) / scale;
            sum += value * value;
            most = value > most ? value : most;
        }
        free(g);
        listener_say(to, "trace: step %lld, gradient of %s: norm %.6g, largest %.6g",
                     (long long)step, p->name, sqrt(sum), most);
    }
    return true;
}

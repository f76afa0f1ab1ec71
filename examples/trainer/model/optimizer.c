/* optimizer.c - clipping, AdamW and Muon over the table. Twin: optimizer.h. */
#include "model/optimizer.h"

#include <math.h>

#include "model/model_inside.h"

/* Of Muon, as published with its coefficients (muon.h). */
static const double MOMENTUM = 0.95;

static int pieces(const model *m) {
    return m->options.dist ? dist_pieces(m->options.dist) : 1;
}

static dist_piece piece_at(const model *m, int i) {
    dist_piece all = {0, m->params.elements, 0};
    return m->options.dist ? dist_piece_at(m->options.dist, i) : all;
}

/* The part of a tensor that lies in a piece. */
static void update(const model *m, const param *x, const dist_piece *p) {
    const params *q = &m->params;
    int64_t first = x->offset > p->first ? x->offset : p->first;
    int64_t last = x->offset + x->count, end = p->first + p->count;
    if (end < last) last = end;
    if (first >= last) return;
    int64_t own = p->own + first - p->first;
    if (m->options.muon && x->inner) {
        m->o->muon_direction(m->o, m->rates, m->state, q->grad + first, q->m + own, last - first);
        return;
    }
    m->o->adamw(m->o, m->rates, x->decay, m->state, q->value + first, q->grad + first, q->m + own,
                q->v + own, last - first);
}

static void send_rates(const model *m, const adamw *a) {
    double step = (double)a->step;
    adamw_rates r = {.beta1 = (real)a->beta1,
                     .beta2 = (real)a->beta2,
                     .eps = (real)a->eps,
                     .rate = (real)(a->lr / (1 - pow(a->beta1, step))),
                     .bias = (real)(1 / sqrt(1 - pow(a->beta2, step))),
                     .keep = (real)(1 - a->lr * a->weight_decay),
                     .momentum = (real)MOMENTUM,
                     .lr = (real)a->lr};
    m->o->upload(m->o, m->rates, &r, sizeof r);
}

static void square_gradients(model *m) {
    for (int i = 0; i < pieces(m); i++) {
        dist_piece p = piece_at(m, i);
        m->o->square_sum(m->o, m->state, m->params.grad + p.first, p.count);
    }
}

static void update_all(model *m, double clip) {
    m->o->clip(m->o, m->state, clip);
    for (int i = 0; i < pieces(m); i++) {
        dist_piece p = piece_at(m, i);
        for (int t = 0; t < m->params.length; t++) update(m, &m->params.list[t], &p);
    }
}

/* Of a tensor's matrices, one after the other: their directions are whole in every process, and
   every one computes all of them. */
static void update_matrices(const model *m, const param *x) {
    const ops *o = m->o;
    int rows = (int)x->shape[x->dims - 2], cols = (int)x->shape[x->dims - 1];
    int64_t each = (int64_t)rows * cols, end = x->offset + x->count;
    for (int64_t at = x->offset; at < end; at += each) {
        const real *direction = muon_orthogonalize(o, &m->muon, m->params.grad + at, rows, cols);
        o->muon_update(o, m->rates, m->state, m->params.value + at, direction,
                       muon_scale(rows, cols), each);
    }
}

static bool muon_step(model *m, fault *f) {
    dist *d = m->options.dist;
    if (!m->options.muon) return true;
    if (d && !dist_spread(d, m->params.grad, f)) return false;
    for (int t = 0; t < m->params.length; t++)
        if (m->params.list[t].inner) update_matrices(m, &m->params.list[t]);
    return true;
}

static bool step(model *m, double clip, fault *f) {
    dist *d = m->options.dist;
    m->o->mark(m->o, PHASE_OPT, -1);
    square_gradients(m);
    if (d && !dist_add(d, m->state, f)) return false;
    update_all(m, clip);
    if (!muon_step(m, f)) return false;
    if (d && !dist_spread(d, m->params.value, f)) return false;
    params_changed(&m->params, m->o);
    return true;
}

/* Where nobody waits, nothing can fail. */
static void launch_step(model *m, double clip) {
    fault unused;
    (void)step(m, clip, &unused);
}

bool optimizer_step(model *m, const adamw *a, double clip, fault *f) {
    dist *d = m->options.dist;
    send_rates(m, a);
    if (d && !dist_reduced(d, f)) return false;
    if (d && !dist_on_stream(d)) return step(m, clip, f);
    model_launch(m, MODEL_UPDATE, launch_step, clip);
    return true;
}

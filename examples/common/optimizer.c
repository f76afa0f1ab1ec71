/* optimizer.c - clipping and AdamW over the table. Twin: optimizer.h. */
#include "optimizer.h"

static int pieces(const model *m) {
    return m->options.dist ? dist_pieces(m->options.dist) : 1;
}

static dist_piece piece_at(const model *m, int i) {
    dist_piece all = {0, m->params.elements, 0};
    return m->options.dist ? dist_piece_at(m->options.dist, i) : all;
}

/* Losses, labels and squares of all processes. */
static bool add_states(model *m, fault *f) {
    dist *d = m->options.dist;
    if (!d || !d->link) return true;
    step_state s = model_state(m);
    double sums[] = {s.loss, (double)s.labels, s.squares};
    if (!dist_sum(d, sums, 3, f)) return false;
    s.loss = sums[0];
    s.labels = (int64_t)sums[1];
    s.squares = sums[2];
    m->o->upload(m->o, m->state, &s, sizeof s);
    return true;
}

/* The part of a tensor that lies in a piece. */
static void update(model *m, const adamw *a, const param *x, const dist_piece *p) {
    const params *q = &m->params;
    int64_t first = x->offset > p->first ? x->offset : p->first;
    int64_t last = x->offset + x->count, end = p->first + p->count;
    if (end < last) last = end;
    if (first >= last) return;
    adamw one = *a;
    int64_t own = p->own + first - p->first;
    if (!x->decay) one.weight_decay = 0;
    m->o->adamw(m->o, &one, m->state, q->value + first, q->grad + first, q->m + own, q->v + own,
                last - first);
}

bool optimizer_step(model *m, const adamw *a, double clip, double scale, fault *f) {
    const ops *o = m->o;
    const params *q = &m->params;
    dist *d = m->options.dist;
    if (d && !dist_reduced(d, f)) return false;
    o->mark(o, PHASE_OPT, -1);
    for (int i = 0; i < pieces(m); i++) {
        dist_piece p = piece_at(m, i);
        o->square_sum(o, m->state, q->grad + p.first, p.count);
    }
    if (!add_states(m, f)) return false;
    o->clip(o, m->state, clip, scale);
    for (int i = 0; i < pieces(m); i++) {
        dist_piece p = piece_at(m, i);
        for (int t = 0; t < q->length; t++) update(m, a, &q->list[t], &p);
    }
    if (d && !dist_spread(d, f)) return false;
    params_changed(q, o);
    return true;
}

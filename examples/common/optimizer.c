/* optimizer.c - clipping and AdamW over the table. Twin: optimizer.h. */
#include "optimizer.h"

void optimizer_step(model *m, const adamw *a, double clip) {
    const ops *o = m->o;
    const params *p = &m->params;
    o->mark(o, PHASE_OPT, -1);
    o->square_sum(o, m->state, p->grad, p->elements);
    o->clip(o, m->state, clip, 1);
    for (int i = 0; i < p->length; i++) {
        const param *x = &p->list[i];
        adamw one = *a;
        if (!x->decay) one.weight_decay = 0;
        o->adamw(o, &one, m->state, p->value + x->offset, p->grad + x->offset, p->m + x->offset,
                 p->v + x->offset, x->count);
    }
}

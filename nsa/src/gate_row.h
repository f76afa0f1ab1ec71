/* ---- Gate: a row --------------------------------------------------------------------------------
   Twin: kernels/gate.cuh. Not here: its tasks and its backward (gate.h). */
#pragma once
#include "tiles.h"

typedef struct nsa__gate_job {
    const nsa_gate *x, *dx;
    const nsa_desc *d;
    const nsa__tiles *tiles;
    const nsa__pairs *pairs; /* NULL, or what stores rows of bf16 */
    const nsa_tensor *dots;  /* NULL, or the chain's backward: dout . out of every row, by branch */
    nsa__seq seq;            /* of the gate's own tasks */
} nsa__gate_job;

/* out = sum_i g[i] branch[i] of query t of a sequence and one head. */
static void nsa__gate_row(const nsa__gate_job *p, const nsa__seq *seq, int64_t t, int head) {
    const nsa_desc *d = p->d;
    const nsa_tensor *branch[3] = {&p->x->cmp, &p->x->slc, &p->x->win}, *out = &p->x->out;
    int64_t batch = seq->batch, at = seq->row + t;
    int dim_v = d->dim_v, wide = (int)nsa__ceil_div(dim_v, NSA__LANES) * NSA__LANES;
    nsa_real g[3], row[4][NSA__MAX_DIM];
    const nsa_real *x[3];
    nsa__load_gates(g, &p->x->logits, d, batch, at, head / (d->heads / d->gate_heads));
    nsa__gate_weights(d->gate, g);
    for (int i = 0; i < 3; i++) {
        x[i] = (const nsa_real *)nsa__row(branch[i], batch, at, head);
        if (nsa__rows_of_reals(branch[i], dim_v)) continue;
        nsa__load(row[i], branch[i]->dtype, x[i], dim_v);
        memset(row[i] + dim_v, 0, (size_t)(wide - dim_v) * sizeof **row);
        x[i] = row[i];
    }
    if (nsa__rows_of_reals(out, dim_v)) {
        p->tiles->gate(wide, g, x, (nsa_real *)nsa__row(out, batch, at, head));
    } else {
        p->tiles->gate(wide, g, x, row[3]);
        nsa__store_by(p->pairs, out->dtype, nsa__row(out, batch, at, head), row[3], dim_v);
    }
}

/* ---- Gate ---------------------------------------------------------------------------------------
   Twin: kernels/gate.cuh. Not here: the gate of backward's dout (attend_backward.h). */
#pragma once
#include "threads.h"
#include "tiles.h"

typedef struct nsa__gate_job {
    const nsa_gate *x, *dx;
    const nsa_desc *d;
    const nsa__tiles *tiles;
    const nsa__pairs *pairs; /* NULL, or what stores rows of bf16 */
    const nsa_tensor
        *delta_out; /* NULL, or the chain's backward: dout . out of every row, by branch */
} nsa__gate_job;

/* out = sum_i g[i] branch[i] of all heads of a token. */
static void nsa__gate_forward_token(const void *job, const nsa__seq *seq, int64_t t,
                                    void *scratch) {
    const nsa__gate_job *p = (const nsa__gate_job *)job;
    const nsa_desc *d = p->d;
    const nsa_tensor *branch[3] = {&p->x->cmp, &p->x->slc, &p->x->win}, *out = &p->x->out;
    int64_t batch = seq->batch, at = seq->row + t;
    int dim_v = d->dim_v, wide = nsa__whole_vectors(dim_v);
    nsa_real g[3], row[4][NSA__MAX_DIM];
    const nsa_real *const x[3] = {row[0], row[1], row[2]};
    (void)scratch;
    for (int h = 0; h < d->heads; h++) {
        nsa__load_gates(g, &p->x->logits, d, batch, at, h / (d->heads / d->gate_heads));
        nsa__gate_weights(d->gate, g);
        for (int i = 0; i < 3; i++) {
            nsa__load(row[i], branch[i]->dtype, nsa__row(branch[i], batch, at, h), dim_v);
            memset(row[i] + dim_v, 0, (size_t)(wide - dim_v) * sizeof **row);
        }
        p->tiles->gate(wide, g, x, row[3]);
        nsa__store_by(p->pairs, out->dtype, nsa__row(out, batch, at, h), row[3], dim_v);
    }
}

/* dg of one token and gate head, and the branches' gradients of its query heads:
   out = sum_i g[i] branch[i]  =>  dbranch[i] = g[i] dout,  dg[i] = sum over heads and c of dout
   branch[i]. */
static void nsa__gate_backward_head(const nsa__gate_job *p, int64_t batch, int64_t at,
                                    int gate_head, const nsa_real g[3], nsa_real dg[3]) {
    const nsa_desc *d = p->d;
    const nsa_tensor *branch[3] = {&p->x->cmp, &p->x->slc, &p->x->win};
    const nsa_tensor *dbranch[3] = {&p->dx->cmp, &p->dx->slc, &p->dx->win};
    int sharers = d->heads / d->gate_heads, wide = nsa__whole_vectors(d->dim_v);
    nsa_real row[NSA__MAX_DIM], dout[NSA__MAX_DIM];
    for (int c = d->dim_v; c < wide; c++) row[c] = dout[c] = 0;
    for (int h = gate_head * sharers; h < (gate_head + 1) * sharers; h++) {
        nsa__load(dout, p->dx->out.dtype, nsa__row(&p->dx->out, batch, at, h), d->dim_v);
        for (int i = 0; i < 3; i++) {
            if (p->dx->logits.data) {
                nsa__load(row, branch[i]->dtype, nsa__row(branch[i], batch, at, h), d->dim_v);
                dg[i] += nsa__dot(dout, row, wide);
            }
            if (dbranch[i]->data)
                nsa__add(dbranch[i]->dtype, nsa__row(dbranch[i], batch, at, h), g[i], dout,
                         d->dim_v);
        }
    }
}

/* The same dg from what the branches' backward leaves. */
static void nsa__gate_add_delta(const nsa__gate_job *p, int64_t batch, int64_t at, int gate_head,
                                nsa_real dg[3]) {
    int sharers = p->d->heads / p->d->gate_heads;
    for (int h = gate_head * sharers; h < (gate_head + 1) * sharers; h++) {
        const nsa_real *delta = (const nsa_real *)nsa__row(p->delta_out, batch, at, h);
        for (int i = 0; i < 3; i++) dg[i] += delta[i];
    }
}

/* The derivative of the gate function: sigmoid dl = dg g (1 - g); softmax dl = g (dg - g . dg);
   without a function dl = dg. A task has all query heads of a gate head, so dg is one sum. */
static void nsa__gate_backward_token(const void *job, const nsa__seq *seq, int64_t t,
                                     void *scratch) {
    const nsa__gate_job *p = (const nsa__gate_job *)job;
    const nsa_desc *d = p->d;
    const int64_t batch = seq->batch, at = seq->row + t;
    (void)scratch;
    for (int h = 0; h < d->gate_heads; h++) {
        nsa_real g[3], dg[3] = {0, 0, 0};
        nsa__load_gates(g, &p->x->logits, d, batch, at, h);
        nsa__gate_weights(d->gate, g);
        if (p->delta_out)
            nsa__gate_add_delta(p, batch, at, h, dg);
        else
            nsa__gate_backward_head(p, batch, at, h, g, dg);
        nsa_real mean = g[0] * dg[0] + g[1] * dg[1] + g[2] * dg[2];
        for (int i = 0; i < 3; i++) {
            if (d->gate == NSA_GATE_SIGMOID) dg[i] *= g[i] * (1 - g[i]);
            if (d->gate == NSA_GATE_SOFTMAX) dg[i] = g[i] * (dg[i] - mean);
        }
        if (p->dx->logits.data) nsa__add_gates(&p->dx->logits, d, batch, at, h, dg);
    }
}

/* Runs the job: backward if it has a dx. */
static void nsa__gate_run(nsa__gate_job p) {
    const nsa__team team = {nsa__threads(p.d), NULL, 0};
    nsa__run_tokens(&team, p.d, p.dx ? nsa__gate_backward_token : nsa__gate_forward_token, &p);
}

/* A job without the chain's parts. */
static nsa__gate_job nsa__gate_job_make(const nsa_gate *dx, const nsa_gate *x, const nsa_desc *d) {
    nsa__gate_job p;
    memset(&p, 0, sizeof p);
    p.dx = dx;
    p.x = x;
    p.d = d;
    p.tiles = nsa__tiles_of(d->isa);
    p.pairs = nsa__pairs_of(d);
    return p;
}

static nsa_status nsa__gate_call(const nsa_gate *dx, const nsa_gate *x, const nsa_desc *d,
                                 int backward) {
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    const nsa__checked c = nsa__checked_of(d, !backward, 0);
    NSA__CHECK(nsa__check_call(&c, nsa__gate_views, NSA__GATE_VIEWS, dx, x));
    nsa__gate_run(nsa__gate_job_make(dx, x, d));
    return NSA_OK;
}

NSA_API nsa_status nsa_gate_forward(const nsa_gate *x, const nsa_desc *d) {
    return nsa__gate_call(NULL, x, d, 0);
}
NSA_API nsa_status nsa_gate_backward(const nsa_gate *dx, const nsa_gate *x, const nsa_desc *d) {
    return nsa__gate_call(dx, x, d, 1);
}

/* ---- The whole -------------------------------------------------------------------------------
   Twin: kernels/attention.cuh. Not here: its primitives.
   Forward runs phi of k and v, then cmp with selection, slc, win, and the gate. Each part may
   overwrite the workspace of the one before, so the largest need serves all.
   Backward runs the branches, the gate's logits from what they leave, then phi of k and v. */
#pragma once
#include "compress.h"
#include "attend.h"
#include "gate.h"

static nsa_status nsa__attention_check_sizes(const nsa_attention *x, const nsa_desc *d) {
    NSA__CHECK(nsa_desc_check(d));
    return nsa__chain_check_sizes(x, d, nsa__compress_check_sizes);
}

/* Views of all parts. Blocks are an output of forward and an input of backward, so lists are
   checked only there. */
static nsa_status nsa__attention_check(const nsa_attention *x, const nsa_desc *d, int forward) {
    const nsa__chain c = nsa__chain_of(x);
    const struct {
        const nsa__view *views;
        int n, compressed;
        const void *x;
        const int *fields;
    } parts[] = {{nsa__attend_views, NSA__ATTEND_VIEWS - 1, 1, &c.cmp, nsa__chain_cmp},
                 {nsa__attend_views, NSA__ATTEND_VIEWS - forward, 0, &c.slc, nsa__chain_slc},
                 {nsa__attend_views, NSA__ATTEND_VIEWS - 1, 0, &c.win, nsa__chain_win},
                 {nsa__gate_views, NSA__GATE_VIEWS, 0, &c.gate, nsa__chain_gate},
                 {nsa__select_views, NSA__SELECT_VIEWS, 1, &c.select, nsa__chain_select}};
    nsa__checked part = nsa__checked_of(d, forward, 0);
    NSA__CHECK(nsa__check_phi(&part, &x->k_cmp, NSA__TO_K_CMP));
    NSA__CHECK(nsa__check_phi(&part, &x->v_cmp, NSA__TO_V_CMP));
    for (int i = 0; i < (forward ? 5 : 4); i++) {
        part.compressed = parts[i].compressed;
        part.fields = parts[i].fields;
        NSA__CHECK(nsa__check_views(&part, parts[i].views, parts[i].n, parts[i].x));
    }
    return forward ? NSA_OK : nsa__check_lists(&x->blocks, d, NULL);
}

/* One call of the chain: its views, and the plans of the branches, which point to the views. */
typedef struct nsa__chain_plan {
    nsa__chain views;
    nsa__attend_plan branch[3];
} nsa__chain_plan;

/* p must not be moved afterwards, because the plans point to its views. `steps`: NULL, or of every
   branch. */
static void nsa__chain_plan_make(nsa__chain_plan *p, const nsa_attention *x, const nsa_desc *d,
                                 const nsa__step *steps) {
    const nsa__chain *c = &p->views;
    const nsa_attend *const views[] = {&c->cmp, &c->slc, &c->win};
    p->views = nsa__chain_of(x);
    for (int i = NSA__CMP; i <= NSA__WIN; i++)
        p->branch[i] =
            nsa__forward_plan(views[i], d, (nsa__branch)i, i == NSA__CMP ? &c->select : NULL,
                              steps ? steps + i : NULL);
}

/* Bytes of phi of k and of v, one after the other. */
static size_t nsa__phi_bytes(const nsa_attention *x, const nsa_desc *d, int backward, int threads) {
    return nsa__larger(nsa__compress_bytes(&x->k_cmp, d, backward, threads),
                       nsa__compress_bytes(&x->v_cmp, d, backward, threads));
}

/* The workspace of the parts one after another. */
static size_t nsa__chain_plan_bytes(const nsa__chain_plan *p, const nsa_attention *x,
                                    const nsa_desc *d, int threads) {
    size_t most = nsa__phi_bytes(x, d, 0, threads);
    for (int i = 0; i < 3; i++)
        most = nsa__larger(most, nsa__attend_plan_bytes(&p->branch[i], threads));
    return most;
}

/* The parts one after another; `ring`: of phi's rows. */
static nsa_status nsa__chain_run(const nsa__chain_plan *p, const nsa_attention *x,
                                 const nsa_desc *d, int ring, void *workspace, size_t bytes) {
    NSA__CHECK(nsa__compress_go(NULL, &x->k_cmp, d, ring, workspace, bytes));
    NSA__CHECK(nsa__compress_go(NULL, &x->v_cmp, d, ring, workspace, bytes));
    for (int i = 0; i < 3; i++) NSA__CHECK(nsa__forward_run(&p->branch[i], workspace, bytes));
    nsa__gate_run(nsa__gate_job_make(NULL, &p->views.gate, d));
    return NSA_OK;
}

NSA_API size_t nsa_attention_forward_workspace_size(const nsa_attention *x, const nsa_desc *d) {
    nsa__chain_plan p;
    if (nsa__attention_check_sizes(x, d) != NSA_OK) return 0;
    nsa__chain_plan_make(&p, x, d, NULL);
    return nsa__chain_plan_bytes(&p, x, d, nsa__threads(d));
}

NSA_API nsa_status nsa_attention_forward(const nsa_attention *x, const nsa_desc *d, void *workspace,
                                         size_t bytes) {
    nsa__chain_plan p;
    NSA__CHECK(nsa__attention_check_sizes(x, d));
    NSA__CHECK(nsa__attention_check(x, d, 1));
    nsa__chain_plan_make(&p, x, d, NULL);
    /* The largest of the parts' least needs, so that no part fails after another has written. */
    if (!workspace || bytes < nsa__chain_plan_bytes(&p, x, d, nsa__least_threads(d)))
        return nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_workspace);
    return nsa__chain_run(&p, x, d, 0, workspace, bytes);
}

/* One of the gradients NSA__SUM_Q to NSA__SUM_V_WIN. */
typedef struct nsa__sum {
    nsa_tensor to;    /* the caller's view */
    nsa_tensor *view; /* what the primitives add to: a copy of *to, or reals in workspace */
    nsa__shape shape;
    int owner; /* 1: the view's memory belongs to this sum, which adds it to *to at the end */
} nsa__sum;

/* The workspace of backward: | sums | delta_out | dk_cmp | dv_cmp | the primitives' own |. The
   branches run for a few kv heads of one sequence at a time, so that the sum of dq and delta_out
   need memory for those heads alone. It must not be moved, because sums point to views of dx. */
typedef struct nsa__chain_gradient {
    nsa_attention dx; /* the gradients as the primitives see them: sums in place of the caller's
                         views, out for every branch; k_cmp.out and v_cmp.out are dk_cmp and dv_cmp,
                         to which cmp adds, and which phi's backward reads */
    nsa__sum sum[NSA__SUMS];
    nsa_tensor delta_out; /* of every row of these heads: dout . out by branch, for the gate */
    void *rest;           /* the primitives' workspace */
    size_t rest_bytes;
    size_t own;   /* bytes before it */
    int kv_heads; /* of a run */
} nsa__chain_gradient;

static nsa_tensor nsa__alloc_tensor(nsa__arena *a, nsa__shape shape) {
    nsa_tensor x;
    x.dtype = NSA_REAL_DTYPE;
    x.head = shape.width;
    x.token = shape.width * shape.heads;
    x.batch = x.token * shape.rows;
    x.data = nsa__alloc(a, x.batch * shape.batch, sizeof(nsa_real));
    return x;
}

/* Rows of a sum in workspace, and the caller's rows that they are added to. */
typedef struct nsa__flush {
    nsa_tensor from, to;
    int64_t rows;
    int heads, width, clear; /* clear: the rows become zeros, and go nowhere */
} nsa__flush;

enum { NSA__FLUSH_ROWS = 64 }; /* of a task */

static void nsa__flush_task(const void *context, int64_t nth, void *scratch) {
    const nsa__flush *f = (const nsa__flush *)context;
    int64_t end = nsa__min(f->rows, (nth + 1) * NSA__FLUSH_ROWS);
    (void)scratch;
    for (int64_t t = nth * NSA__FLUSH_ROWS; t < end; t++)
        for (int h = 0; h < f->heads; h++) {
            nsa_real *row = (nsa_real *)nsa__row(&f->from, 0, t, h);
            if (f->clear)
                memset(row, 0, (size_t)f->width * sizeof *row);
            else
                nsa__add(f->to.dtype, nsa__row(&f->to, 0, t, h), 1, row, f->width);
        }
}

static void nsa__flush_run(const nsa__flush *f, const nsa_desc *d) {
    const int64_t moves = 32; /* multiply-adds in the time in which a number is moved, about */
    nsa__team team = {nsa__threads(d), NULL, 0};
    team.threads = nsa__threads_for(team.threads, moves * f->rows * f->heads * f->width, 0);
    nsa__run(&team, nsa__ceil_div(f->rows, NSA__FLUSH_ROWS), nsa__flush_task, f);
}

/* Of a tensor that nsa__alloc_tensor made: its rows lie side by side. */
static void nsa__zero_tensor(const nsa_tensor *x, nsa__shape shape, const nsa_desc *d) {
    const nsa__flush f = {*x, *x, shape.batch * shape.rows, 1, (int)x->token, 1};
    nsa__flush_run(&f, d);
}

/* kv heads of one run of the branches: about 1024 numbers of q a token, but no more heads than
   attention has jobs at once. */
static int nsa__chain_heads(const nsa_desc *d) {
    int64_t row = (int64_t)d->dim * (d->heads / d->kv_heads);
    return (int)nsa__min(nsa__heads_near(d), nsa__max(1, 1024 / row));
}

/* The geometry of some kv heads of one sequence, as if they were a call of their own. */
static nsa_desc nsa__chain_slice(const nsa_desc *d, const nsa__seq *seq, int kv_heads) {
    nsa_desc slice = *d;
    slice.batch = 1;
    slice.begins = NULL;
    slice.tokens = seq->tokens;
    slice.count = seq->count;
    slice.kv_heads = kv_heads;
    slice.heads = d->heads / d->kv_heads * kv_heads;
    slice.gate_heads = d->gate_heads == d->heads ? slice.heads : kv_heads;
    slice.list_heads = nsa__list_heads(d) / d->kv_heads * kv_heads;
    return slice;
}

/* Finds out which gradients need a sum in workspace, and which of them share one. A gradient of the
   real dtype needs none: the primitives add to the caller's view. */
static void nsa__chain_gradient_layout(nsa__chain_gradient *g, const nsa_attention *dx,
                                       const nsa_desc *d, nsa__arena *a) {
    nsa_attention own = *dx;
    nsa_tensor *to[NSA__SUMS], *view[NSA__SUMS];
    nsa__sum_views(&own, to);
    nsa__sum_views(&g->dx, view);
    g->kv_heads = nsa__chain_heads(d);
    const int heads = d->heads / d->kv_heads * g->kv_heads;
    const nsa__shape of_q = {1, d->count, heads, d->dim}, of_delta = {1, d->count, heads, 3};
    g->dx = *dx;
    g->dx.out_cmp = g->dx.out_slc = g->dx.out_win = dx->out;
    g->dx.blocks = g->dx.lse_cmp = g->dx.lse_slc = g->dx.lse_win = nsa__no_view;
    for (int i = 0; i < NSA__SUMS; i++) {
        nsa__sum *sum = &g->sum[i];
        sum->to = *to[i];
        sum->view = view[i];
        sum->shape = i == NSA__SUM_Q ? of_q : nsa__key_shape(d, 0, nsa__sum_width(d, i));
        const int needed = to[i]->data && to[i]->dtype != NSA_REAL_DTYPE;
        const int same = needed ? nsa__shared_sum(to, d, i) : i;
        sum->owner = needed && same == i;
        if (sum->owner) *view[i] = nsa__alloc_tensor(a, sum->shape);
        if (same < i) *view[i] = *view[same];
    }
    if (dx->gates.data) g->delta_out = nsa__alloc_tensor(a, of_delta);
    g->dx.k_cmp.out = nsa__alloc_tensor(a, nsa__key_shape(d, 1, d->dim));
    g->dx.v_cmp.out = nsa__alloc_tensor(a, nsa__key_shape(d, 1, d->dim_v));
    g->own = a->used;
    g->rest = a->base ? a->base + a->used : NULL;
}

/* The bytes that the call needs. Of a sequence the first run of the branches needs the most,
   because later runs have as many heads or fewer. */
static size_t nsa__chain_backward_bytes(const nsa__chain_gradient *g, const nsa_attention *x,
                                        const nsa_desc *d, int threads) {
    size_t most = nsa__phi_bytes(x, d, 1, threads);
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq)) {
        nsa_desc slice = nsa__chain_slice(d, &seq, g->kv_heads);
        for (int i = NSA__CMP; i <= NSA__WIN; i++) {
            const nsa__attend_plan p = nsa__backward_plan(NULL, NULL, &slice, (nsa__branch)i, d);
            most = nsa__larger(most, nsa__attend_plan_bytes(&p, threads));
        }
        if (!d->begins) break; /* all are alike */
    }
    return nsa__bytes_for(g->own, 1, most);
}

NSA_API size_t nsa_attention_backward_workspace_size(const nsa_attention *dx,
                                                     const nsa_attention *x, const nsa_desc *d) {
    nsa__chain_gradient g;
    nsa__arena a = {NULL, 0};
    if (nsa__attention_check_sizes(x, d) != NSA_OK || !dx) return 0;
    nsa__chain_gradient_layout(&g, dx, d, &a);
    return nsa__chain_backward_bytes(&g, x, d, nsa__threads(d));
}

static nsa_status nsa__attention_gradient_check(const nsa_attention *dx, const nsa_attention *x,
                                                const nsa_desc *d) {
    const nsa__checked c = nsa__checked_of(d, 0, 0);
    NSA__CHECK(nsa__check_gradients(&c, nsa__attention_views, NSA__ATTENTION_VIEWS, dx, x));
    NSA__CHECK(nsa__check_phi_gradient(&nsa__cpu, &dx->k_cmp, &x->k_cmp, d, NSA__TO_K_CMP));
    return nsa__check_phi_gradient(&nsa__cpu, &dx->v_cmp, &x->v_cmp, d, NSA__TO_V_CMP);
}

/* The view x from a row and head on, which become row 0 and head 0. */
static nsa_tensor nsa__view_at(nsa_tensor x, int64_t batch, int64_t row, int64_t head) {
    if (x.data) x.data = nsa__row(&x, batch, row, head);
    return x;
}

/* Where the views of some heads of a sequence begin. */
typedef struct nsa__slice_origin {
    nsa__seq seq;
    int kv_head;
} nsa__slice_origin;

/* The views of a branch from a sequence and kv head on: query heads begin at the group of this
   head, keys of cmp at the sequence's compressed rows. */
static nsa_attend nsa__attend_at(const nsa_attend *x, const nsa_desc *d, nsa__branch branch,
                                 const nsa__slice_origin *at) {
    int64_t batch = at->seq.batch, row = at->seq.row;
    int64_t key_row = nsa__traits_of[branch].compressed ? at->seq.cmp.row : at->seq.keys.row;
    int head = at->kv_head * (d->heads / d->kv_heads);
    nsa_attend part;
    part.q = nsa__view_at(x->q, batch, row, head);
    part.k = nsa__view_at(x->k, batch, key_row, at->kv_head);
    part.v = nsa__view_at(x->v, batch, key_row, at->kv_head);
    part.out = nsa__view_at(x->out, batch, row, head);
    part.lse = nsa__view_at(x->lse, batch, row, head);
    part.blocks =
        nsa__view_at(x->blocks, batch, row, at->kv_head * (nsa__list_heads(d) / d->kv_heads));
    return part;
}

/* The three branches and the gate of some heads of a sequence. Their dq is cleared, each branch
   adds to it, and the sum is added to dx.q with one rounding. dk and dv go to the sums of all
   heads. */
static nsa_status nsa__chain_heads_backward(const nsa__chain_gradient *g, const nsa_attention *x,
                                            const nsa_desc *d, const nsa__slice_origin *at,
                                            int kv_heads) {
    const nsa__sum *q = &g->sum[NSA__SUM_Q];
    const nsa_desc slice = nsa__chain_slice(d, &at->seq, kv_heads);
    const nsa__chain c = nsa__chain_of(x), dc = nsa__chain_of(&g->dx);
    const nsa_attend *of_x[] = {&c.cmp, &c.slc, &c.win}, *of_dx[] = {&dc.cmp, &dc.slc, &dc.win};
    const int64_t batch = at->seq.batch, row = at->seq.row;
    const int head = at->kv_head * (d->heads / d->kv_heads);
    const int gate_head = at->kv_head * (d->gate_heads / d->kv_heads);
    nsa_gate logits = c.gate, dlogits = dc.gate;
    nsa__gate_job gate = nsa__gate_job_make(&dlogits, &logits, &slice);
    nsa__flush dq = {
        g->dx.q, nsa__view_at(q->to, batch, row, head), slice.count, slice.heads, d->dim, 1};
    logits.logits = nsa__view_at(logits.logits, batch, row, gate_head);
    dlogits.logits = nsa__view_at(dlogits.logits, batch, row, gate_head);
    gate.delta_out = dlogits.logits.data ? &g->delta_out : NULL;
    if (q->owner) nsa__flush_run(&dq, d);
    for (int i = NSA__CMP; i <= NSA__WIN; i++) {
        const nsa__branch branch = (nsa__branch)i;
        const nsa_attend views = nsa__attend_at(of_x[i], d, branch, at);
        nsa_attend dviews = nsa__attend_at(of_dx[i], d, branch, at);
        if (q->owner) dviews.q = g->dx.q;
        nsa__attend_plan p = nsa__backward_plan(&dviews, &views, &slice, branch, d);
        p.options.gate = &gate;
        NSA__CHECK(nsa__backward_run(&p, g->rest, g->rest_bytes));
    }
    if (gate.delta_out) nsa__gate_run(gate);
    dq.clear = 0;
    if (q->owner) nsa__flush_run(&dq, d);
    return NSA_OK;
}

/* Adds the sums of keys and values to the caller's views, with one rounding. */
static void nsa__chain_flush(const nsa__chain_gradient *g, const nsa_desc *d) {
    for (int i = NSA__SUM_K_CMP; i < NSA__SUMS; i++) {
        const nsa__sum *sum = &g->sum[i];
        if (!sum->owner) continue;
        for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq)) {
            const nsa__flush f = {nsa__view_at(*sum->view, seq.keys.batch, seq.keys.row, 0),
                                  nsa__view_at(sum->to, seq.keys.batch, seq.keys.row, 0),
                                  seq.tokens,
                                  (int)sum->shape.heads,
                                  (int)sum->shape.width,
                                  0};
            nsa__flush_run(&f, d);
        }
    }
}

/* The branches with the gate's logits, then phi of k and v. phi comes after them because its dout,
   dk_cmp and dv_cmp, sums over all queries. The sums of keys and values reach the caller's views
   last. */
static nsa_status nsa__attention_backward_run(nsa__chain_gradient *g, const nsa_attention *x,
                                              const nsa_desc *d) {
    for (int i = NSA__SUM_K_CMP; i < NSA__SUMS; i++)
        if (g->sum[i].owner) nsa__zero_tensor(g->sum[i].view, g->sum[i].shape, d);
    nsa__zero_tensor(&g->dx.k_cmp.out, nsa__key_shape(d, 1, d->dim), d);
    nsa__zero_tensor(&g->dx.v_cmp.out, nsa__key_shape(d, 1, d->dim_v), d);
    nsa__slice_origin at;
    for (at.seq = nsa__seq_begin(d); at.seq.nth < d->batch; nsa__seq_next(d, &at.seq))
        for (at.kv_head = 0; at.seq.count && at.kv_head < d->kv_heads; at.kv_head += g->kv_heads) {
            int heads = (int)nsa__min(g->kv_heads, d->kv_heads - (int64_t)at.kv_head);
            NSA__CHECK(nsa__chain_heads_backward(g, x, d, &at, heads));
        }
    NSA__CHECK(nsa__compress_go(&g->dx.k_cmp, &x->k_cmp, d, 0, g->rest, g->rest_bytes));
    NSA__CHECK(nsa__compress_go(&g->dx.v_cmp, &x->v_cmp, d, 0, g->rest, g->rest_bytes));
    nsa__chain_flush(g, d);
    return NSA_OK;
}

NSA_API nsa_status nsa_attention_backward(const nsa_attention *dx, const nsa_attention *x,
                                          const nsa_desc *d, void *workspace, size_t bytes) {
    nsa__chain_gradient g;
    NSA__CHECK(nsa__attention_check_sizes(x, d));
    NSA__CHECK(nsa__attention_check(x, d, 0));
    NSA__CHECK(nsa__check_backward(d, 1));
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(nsa__attention_gradient_check(dx, x, d));
    nsa__arena a = {NULL, 0};
    nsa__chain_gradient_layout(&g, dx, d, &a);
    if (!workspace || bytes < nsa__chain_backward_bytes(&g, x, d, nsa__least_threads(d)))
        return nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_workspace);
    a = nsa__arena_at(workspace);
    nsa__chain_gradient_layout(&g, dx, d, &a);
    g.rest_bytes = bytes - (size_t)((char *)g.rest - (char *)workspace);
    return nsa__attention_backward_run(&g, x, d);
}

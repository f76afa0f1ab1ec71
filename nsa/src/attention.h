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

/* Blocks are an output of forward and an input of backward, so lists are checked only there. */
static nsa_status nsa__attention_check(const nsa_attention *x, const nsa_desc *d, int forward) {
    const nsa__checked c = nsa__checked_of(d, forward, 0);
    NSA__CHECK(nsa__check_phi(&c, &x->k_cmp, NSA__TO_K_CMP));
    NSA__CHECK(nsa__check_phi(&c, &x->v_cmp, NSA__TO_V_CMP));
    NSA__CHECK(nsa__check_views(&c, nsa__attention_views, NSA__ATTENTION_VIEWS, x));
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
    size_t most = nsa__phi_bytes(x, d, 0, threads), room;
    const size_t scratch = nsa__split_scratch(p->branch, 3, &room);
    for (int i = 0; i < 3; i++)
        most = nsa__larger(most, nsa__attend_plan_bytes(&p->branch[i], threads));
    if (d->count > p->branch->cut.in_place_max || threads == 1) return most;
    return nsa__larger(most, nsa__bytes_for(p->branch->shared, threads, scratch));
}

/* The parts one after another, but for branches that are split; `ring`: of phi's rows. */
static nsa_status nsa__chain_run(const nsa__chain_plan *p, const nsa_attention *x,
                                 const nsa_desc *d, int ring, void *workspace, size_t bytes) {
    NSA__CHECK(nsa__compress_go(NULL, &x->k_cmp, d, ring, workspace, bytes));
    NSA__CHECK(nsa__compress_go(NULL, &x->v_cmp, d, ring, workspace, bytes));
    if (!nsa__forward_split(p->branch, 3, workspace, bytes))
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

/* One of the gradients NSA__SUM_K_CMP to NSA__SUM_V_WIN. */
typedef struct nsa__sum {
    nsa_tensor to;    /* the caller's view */
    nsa_tensor *view; /* what the primitives add to: a copy of *to, or reals in workspace */
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
    nsa_tensor dq;        /* of these heads, the sum of dq; no data: it goes to dx.q as it is */
    nsa_tensor delta_out; /* of every row of them: dout . out by branch, for the gate */
    void *rest;           /* the primitives' workspace */
    size_t rest_bytes;
    size_t own;   /* bytes before it */
    int kv_heads; /* of a run */
} nsa__chain_gradient;

/* Rows of a sum in workspace, and the caller's rows that they are added to. They become zeros, for
   the next heads. */
typedef struct nsa__flush {
    nsa_tensor from, to;
    int64_t rows;
    int heads, width, clear; /* clear: they become zeros alone */
} nsa__flush;

enum { NSA__FLUSH_ROWS = 64 }; /* of a task */

static void nsa__flush_task(const void *context, int64_t nth, void *scratch) {
    const nsa__flush *f = (const nsa__flush *)context;
    int64_t end = nsa__min(f->rows, (nth + 1) * NSA__FLUSH_ROWS);
    (void)scratch;
    for (int64_t t = nth * NSA__FLUSH_ROWS; t < end; t++)
        for (int h = 0; h < f->heads; h++) {
            nsa_real *row = (nsa_real *)nsa__row(&f->from, 0, t, h);
            if (!f->clear) nsa__add(f->to.dtype, nsa__row(&f->to, 0, t, h), 1, row, f->width);
            memset(row, 0, (size_t)f->width * sizeof *row);
        }
}

static void nsa__flush_run(const nsa__flush *f, const nsa_desc *d) {
    const int64_t moves = 32; /* multiply-adds in the time in which a number is moved, about */
    nsa__team team = {nsa__threads(d), NULL, 0};
    team.threads = nsa__threads_for(team.threads, moves * f->rows * f->heads * f->width);
    nsa__run(&team, nsa__ceil_div(f->rows, NSA__FLUSH_ROWS), nsa__flush_task, f);
}

/* Rows of zeros, side by side. */
static nsa_tensor nsa__alloc_sums(nsa__arena *a, nsa__shape shape, const nsa_desc *d) {
    nsa_tensor x;
    x.dtype = NSA_REAL_DTYPE;
    x.head = shape.width;
    x.token = shape.width * shape.heads;
    x.batch = x.token * shape.rows;
    x.data = nsa__alloc(a, x.batch * shape.batch, sizeof(nsa_real));
    const nsa__flush zeros = {x, x, shape.batch * shape.rows, 1, (int)x.token, 1};
    if (a->base) nsa__flush_run(&zeros, d);
    return x;
}

/* kv heads of one run of the branches: about 1024 numbers of q a token, but no more heads than
   attention has jobs at once. */
static int nsa__chain_heads(const nsa_desc *d) {
    int64_t row = (int64_t)d->dim * (d->heads / d->kv_heads);
    return (int)nsa__min(nsa__heads_near(d), nsa__max(1, 1024 / row));
}

/* The view x from a row and head on, which become row 0 and head 0. */
static nsa_tensor nsa__view_at(nsa_tensor x, int64_t batch, int64_t row, int64_t head) {
    if (x.data) x.data = nsa__row(&x, batch, row, head);
    return x;
}

/* Some kv heads of one sequence, as if they were a call of their own: the geometry. */
static nsa_desc nsa__slice_desc(const nsa_desc *d, int tokens, int count, int kv_heads) {
    nsa_desc slice = *d;
    slice.batch = 1;
    slice.begins = NULL;
    slice.tokens = tokens;
    slice.count = count;
    slice.kv_heads = kv_heads;
    slice.heads = d->heads / d->kv_heads * kv_heads;
    slice.gate_heads = d->gate_heads == d->heads ? slice.heads : kv_heads;
    slice.list_heads = nsa__list_heads(d) / d->kv_heads * kv_heads;
    return slice;
}

/* The same: the branches' views and the gates, from the sequence and its kv head `head` on. */
static nsa_attention nsa__slice_views(const nsa_attention *x, const nsa_desc *d,
                                      const nsa__seq *seq, int head) {
    const int heads[] = {d->heads, d->gate_heads, nsa__list_heads(d), d->kv_heads, d->kv_heads};
    nsa_attention y = *x;
    for (int i = 0; i < NSA__ATTENTION_VIEWS; i++) {
        const nsa__view *v = &nsa__attention_views[i];
        const nsa__key_layout *keys = v->rows == NSA__OF_BLOCKS ? &seq->cmp : &seq->keys;
        const int of_keys = v->rows >= NSA__OF_KEYS;
        nsa_tensor *view = (nsa_tensor *)(void *)((char *)&y + v->offset);
        if (v->use & NSA__FORWARD) continue; /* out: backward's may be anything */
        *view =
            nsa__view_at(*view, of_keys ? keys->batch : seq->batch, of_keys ? keys->row : seq->row,
                         (int64_t)head * (heads[v->rows] / d->kv_heads));
    }
    return y;
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
    g->dq = nsa__no_view;
    if (dx->q.data && dx->q.dtype != NSA_REAL_DTYPE) g->dq = nsa__alloc_sums(a, of_q, d);
    for (int i = NSA__SUM_K_CMP; i < NSA__SUMS; i++) {
        nsa__sum *sum = &g->sum[i];
        sum->to = *to[i];
        sum->view = view[i];
        const int needed = to[i]->data && to[i]->dtype != NSA_REAL_DTYPE;
        const int same = needed ? nsa__shared_sum(to, d, i) : i;
        sum->owner = needed && same == i;
        if (sum->owner)
            *view[i] = nsa__alloc_sums(a, nsa__key_shape(d, 0, nsa__sum_width(d, i)), d);
        if (same < i) *view[i] = *view[same];
    }
    if (dx->gates.data) g->delta_out = nsa__alloc_sums(a, of_delta, d);
    g->dx.k_cmp.out = nsa__alloc_sums(a, nsa__key_shape(d, 1, d->dim), d);
    g->dx.v_cmp.out = nsa__alloc_sums(a, nsa__key_shape(d, 1, d->dim_v), d);
    g->own = a->used;
    g->rest = a->base ? a->base + a->used : NULL;
}

/* The bytes that the call needs. Of a sequence the first run of the branches needs the most,
   because later runs have as many heads or fewer. */
static size_t nsa__chain_backward_bytes(const nsa__chain_gradient *g, const nsa_attention *x,
                                        const nsa_desc *d, int threads) {
    size_t most = nsa__phi_bytes(x, d, 1, threads);
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq)) {
        const nsa_desc slice = nsa__slice_desc(d, seq.tokens, seq.count, g->kv_heads);
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
    if (nsa__attention_check_sizes(x, d) != NSA_OK || !dx || nsa__check_backward(d, 1) != NSA_OK)
        return 0;
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

/* The three branches and the gate of some heads of a sequence. Each branch adds to their dq, and
   the sum is added to dx.q with one rounding. dk and dv go to the sums of all heads. */
static nsa_status nsa__chain_heads_backward(const nsa__chain_gradient *g, const nsa_attention *x,
                                            const nsa_desc *d, const nsa__seq *seq, int head,
                                            int kv_heads) {
    const nsa_desc slice = nsa__slice_desc(d, seq->tokens, seq->count, kv_heads);
    const nsa_attention part = nsa__slice_views(x, d, seq, head);
    nsa_attention dpart = nsa__slice_views(&g->dx, d, seq, head);
    const nsa__flush dq = {g->dq, dpart.q, slice.count, slice.heads, d->dim, 0};
    if (g->dq.data) dpart.q = g->dq;
    const nsa__chain c = nsa__chain_of(&part), dc = nsa__chain_of(&dpart);
    const nsa_attend *views[] = {&c.cmp, &c.slc, &c.win}, *dviews[] = {&dc.cmp, &dc.slc, &dc.win};
    nsa__gate_job gate = nsa__gate_job_make(&dc.gate, &c.gate, &slice);
    gate.delta_out = dpart.gates.data ? &g->delta_out : NULL;
    for (int i = NSA__CMP; i <= NSA__WIN; i++) {
        nsa__attend_plan p = nsa__backward_plan(dviews[i], views[i], &slice, (nsa__branch)i, d);
        p.gate = &gate;
        NSA__CHECK(nsa__backward_run(&p, g->rest, g->rest_bytes));
    }
    if (gate.delta_out) nsa__gate_run(gate);
    if (g->dq.data) nsa__flush_run(&dq, d);
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
                                  d->kv_heads,
                                  nsa__sum_width(d, i),
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
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq))
        for (int head = 0; seq.count && head < d->kv_heads; head += g->kv_heads) {
            int heads = (int)nsa__min(g->kv_heads, d->kv_heads - (int64_t)head);
            NSA__CHECK(nsa__chain_heads_backward(g, x, d, &seq, head, heads));
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

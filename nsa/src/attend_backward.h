/* ---- Attention: backward ---------------------------------------------------------------------
   Twin: kernels/attend_backward.cuh. Not here: the order of its tasks (threads.h).
   With p = exp(scale q k - lse), delta = dout . out and dlse, the incoming gradient of lse:
     dv[s] = sum_t p dout[t]                   because out = sum_s p v[s]
     ds    = p (dout . v[s] - delta + dlse)    because delta = sum_s p (dout . v[s]), dlse / ds = p
     dq[t] = scale sum_s ds k[s],  dk[s] = scale sum_t ds q[t]
   delta comes from out, so no row needs all its p at once; dlse is subtracted from delta when the
   row is loaded. q is loaded times scale, as in forward, so ds^T q has it; dq gets it when it is
   added to the caller's view. A task computes p and ds of a tile once and uses them three times. In
   pairs of bf16 q is as it is, and so is dout: its gate is a factor of p and ds before they are
   rounded, once. dq belongs to the task alone. A tile's dk and dv belong to all tasks that read the
   tile, which add in a fixed order (nsa__ordered). So all sums have the same bits for any number
   of threads. A query that is computed alone is a task, whose tiles hold the keys of its list:
   products gather their rows, and add to rows of dk and dv. */
#pragma once
#include "attend_rows.h"

/* A backward task: p and ds are scratch of the thread, the rest stays in the task's slot. */
typedef struct nsa__backward {
    nsa__tile_iter iter;
    nsa_real *q, *dout, *dq;  /* rows of the task */
    nsa_real *lse, *delta;    /* of every row */
    nsa_real *gate;           /* in pairs, of every row: the gate of its dout */
    nsa_real *p, *ds;         /* rows of a batch: scores and dp of a tile, then p and ds */
    nsa__packed *ds_rows;     /* in pairs: ds by row, while f->ds has pairs of rows */
    nsa__packed *paired;      /* in pairs: rows of dout or q of a batch as pairs of rows */
    unsigned char *nonfinite; /* of every row: what it adds to becomes NaN */
    unsigned char *reads;     /* of every query: 1 if it has seen a key */
    /* Its shares of dk and dv of tiles that it may not enter yet: `pending` of them from `oldest`
       on, around the end. */
    nsa_real *dk, *dv;
    uint64_t nonfinite_keys[NSA__PENDING]; /* keys that get NaN */
    int32_t pending_tile[NSA__PENDING];
    int32_t pending_last[NSA__PENDING]; /* what it enters: the tile, or a list's last key there */
    int pending, oldest;
    /* Of a query that is computed alone: */
    nsa_real *columns[2]; /* dout and q, transposed */
    nsa_real *waiting[2]; /* in place of shares: p and ds of the pending tiles */
    nsa_real *s_t;        /* scores of a tile: a row for each key */
    nsa__packed *rows;    /* in pairs: rows of its keys as pairs of rows */
    int keys[NSA__TILE];  /* of the tile at hand */
} nsa__backward;

static void nsa__alone_alloc(nsa__backward *f, const nsa__attend_plan *p, nsa__arena *a,
                             nsa__arena *of_tile) {
    const int64_t columns = nsa__whole_vectors(p->group);
    f->columns[0] = nsa__alloc_reals(a, p->d->dim_v * columns);
    f->columns[1] = nsa__alloc_reals(a, p->d->dim * columns);
    for (int i = 0; i < 2; i++)
        f->waiting[i] = nsa__alloc_reals(a, (int64_t)NSA__PENDING * p->group * p->stride_p);
    f->s_t = nsa__alloc_reals(of_tile, p->cut.tile * columns);
    f->rows = nsa__alloc_packed(of_tile, (int64_t)p->cut.tile / 2 * p->k.wide);
}

static void nsa__backward_alloc(nsa__backward *f, const nsa__attend_plan *p, nsa__arena *a,
                                nsa__arena *of_tile) {
    int64_t rows = (int64_t)p->cut.task_queries * p->group,
            batch_rows = (int64_t)p->cut.batch_queries * p->group;
    nsa__tile_iter_alloc(&f->iter, p, a, of_tile);
    f->q = nsa__alloc_reals(a, rows * p->k.stride);
    f->dq = nsa__alloc_reals(a, rows * p->k.wide);
    f->dout = nsa__alloc_reals(a, rows * p->v.stride);
    f->lse = nsa__alloc_reals(a, rows);
    f->delta = nsa__alloc_reals(a, rows);
    f->p = nsa__alloc_reals(of_tile, batch_rows * p->stride_p);
    f->ds = nsa__alloc_reals(of_tile, batch_rows * p->stride_p);
    f->nonfinite = (unsigned char *)nsa__alloc(a, rows, 1);
    f->reads = (unsigned char *)nsa__alloc(a, p->cut.task_queries, 1);
    f->dk = nsa__alloc_reals(a, (int64_t)NSA__PENDING * p->cut.tile * p->k.wide);
    f->dv = nsa__alloc_reals(a, (int64_t)NSA__PENDING * p->cut.tile * p->v.wide);
    if (p->cut.gathers_from < INT_MAX) nsa__alone_alloc(f, p, a, of_tile);
    if (!p->pairs) return;
    f->gate = nsa__alloc_reals(a, rows);
    f->ds_rows = nsa__alloc_packed(of_tile, batch_rows * p->stride_p / 2);
    f->paired = nsa__alloc_packed(of_tile, (batch_rows + 1) / 2 * nsa__max(p->k.wide, p->v.wide));
}

/* The gate of a row's dout: out = sum_c g[c] out_c  =>  dout_c = g[c] dout. */
static nsa_real nsa__backward_gate(const nsa__backward *f, const nsa__head_job *job, int r) {
    const nsa__attend_plan *p = job->plan;
    const nsa_desc *d = p->d;
    int query = f->iter.first + r / p->group, head = job->head * p->group + r % p->group;
    nsa_real logits[3];
    nsa__load_gates(logits, &p->options.gate->x->logits, d, job->seq.batch,
                    job->seq.row + query - job->seq.first, head / (d->heads / d->gate_heads));
    return nsa__gate_weight(d->gate, logits, (int)p->branch);
}

/* Scales a row of dout by its gate, which saves the chain a gradient of every branch's output.
   Returns the factor of its delta. In pairs dout and delta stay as they are, and the gate is a
   factor of p and ds later. */
static nsa_real nsa__backward_scale(nsa__backward *f, const nsa__head_job *job, int r) {
    const nsa__attend_plan *p = job->plan;
    nsa_real *dout = f->dout + (ptrdiff_t)r * p->v.stride, g = nsa__backward_gate(f, job, r);
    if (nsa__takes_factor(&p->v)) {
        p->tiles->scale(p->v.wide, g, dout, dout);
        return g;
    }
    const int is_real = nsa__is_finite((double)g);
    f->gate[r] = is_real ? g : 0;
    if (!is_real) f->nonfinite[r] = 1;
    return (nsa_real)is_real;
}

/* dout . out of a row, before the gate. dout is read again, because f->dout may have pairs, and has
   zeros in place of a non-finite row: the gate's gradient of that row is not finite. */
static nsa_real nsa__backward_dot(const nsa__backward *f, const nsa__head_job *job, int r) {
    const nsa__attend_plan *p = job->plan;
    const nsa__tile_iter *it = &f->iter;
    const nsa_tensor *of_out = &p->x->out, *of_dout = &p->dx->out;
    const int dim_v = p->d->dim_v, wide = p->v.wide;
    nsa_real out[NSA__MAX_DIM], dout[NSA__MAX_DIM];
    nsa__load(out, of_out->dtype, nsa__walk_queries(job, it, of_out, dim_v, r), dim_v);
    nsa__load(dout, of_dout->dtype, nsa__query_row(job, it, of_dout, r), dim_v);
    for (int c = dim_v; c < wide; c++) out[c] = dout[c] = 0;
    return nsa__dot(out, dout, wide);
}

/* Loads q, dout and lse, and computes delta = dout . out - dlse of every row. A row that read a
   non-finite key has lse = NaN from forward, so its lse marks it; keys need no second look. */
static void nsa__backward_begin(nsa__backward *f, const nsa__head_job *job, int64_t task) {
    const nsa__attend_plan *p = job->plan;
    const nsa__gate_job *gate = p->options.gate;
    nsa__tile_iter_begin(&f->iter, job, task);
    f->pending = f->oldest = 0;
    int rows = f->iter.queries * p->group;
    memset(f->reads, 0, (size_t)f->iter.queries);
    memset(f->nonfinite, 0, (size_t)rows);
    memset(f->dq, 0, (size_t)rows * (size_t)p->k.wide * sizeof *f->dq);
    nsa__load_queries(job, &f->iter, &p->x->q, &p->k, f->q, f->nonfinite);
    nsa__load_queries(job, &f->iter, &p->dx->out, &p->v, f->dout, f->nonfinite);
    for (int r = 0; r < rows; r++) {
        nsa_real dot = nsa__backward_dot(f, job, r);
        if (gate && gate->delta_out)
            ((nsa_real *)nsa__query_row(job, &f->iter, gate->delta_out, r))[p->branch] = dot;
        if (gate) dot *= nsa__backward_scale(f, job, r);
        f->delta[r] = dot;
    }
    /* a gate may be NaN, and its product with dout too large */
    if (gate && nsa__takes_factor(&p->v)) nsa__zero_nonfinite(&p->v, rows, f->dout, f->nonfinite);
    for (int r = 0; r < rows; r++) {
        f->lse[r] = nsa__load_lse(job, &f->iter, r, f->nonfinite);
        if (p->dx->lse.data)
            f->delta[r] -= nsa__load_number(job, &f->iter, &p->dx->lse, r, f->nonfinite);
        if (f->nonfinite[r]) f->delta[r] = 0;
    }
}

/* The share that the task makes at the moment. */
static int nsa__backward_newest(const nsa__backward *f) {
    return (f->oldest + f->pending - 1) % NSA__PENDING;
}

/* Marks the queries that have read a key, and the keys that a nonfinite row has read: their dk and
   dv become NaN, because each is a sum with that row. */
static void nsa__backward_note(nsa__backward *f, const nsa__head_job *job, const nsa__batch *b) {
    int group = job->plan->group;
    for (int i = 0; i < b->queries; i++) {
        f->reads[b->query[i]] = 1;
        for (int g = 0; g < group; g++)
            if (f->nonfinite[b->query[i] * group + g])
                f->nonfinite_keys[nsa__backward_newest(f)] |= b->mask[i];
    }
}

/* The gradients' products of a batch from p and ds: dv += p^T dout, dk += ds^T q, dq += ds k */
static void nsa__backward_products(nsa__backward *f, const nsa__head_job *job,
                                   const nsa__batch *b) {
    const nsa__attend_plan *p = job->plan;
    const nsa__operand *k = &p->k, *v = &p->v;
    const int ld = p->stride_p, keys = b->end - b->begin;
    const nsa__scored x = nsa__batch_scored(p, b);
    const nsa_real *gate = p->options.gate ? f->gate : NULL;
    const ptrdiff_t share = (ptrdiff_t)nsa__backward_newest(f) * p->cut.tile + b->begin;
    if (job->dv) {
        const nsa__matrix p_t = {f->p, 1, ld, NULL};
        const nsa__result dv = nsa__result_at(f->dv + share * v->wide, v->wide, 1);
        const nsa__matrix by_row = {f->dout, v->stride, 1, b->row};
        nsa__round_left(v, &x, ld, gate, f->p, NULL);
        const nsa__matrix dout = nsa__rows_for_over(v, b->rows, by_row, f->paired);
        nsa__product_over(v, keys, b->rows, &p_t, &dout, &dv);
    }
    const nsa__packed *ds_rows = nsa__round_left(v, &x, ld, gate, f->ds, f->ds_rows);
    if (job->dk) {
        const nsa__matrix ds_t = {f->ds, 1, ld, NULL};
        const nsa__result dk = nsa__result_at(f->dk + share * k->wide, k->wide, 1);
        const nsa__matrix by_row = {f->q, k->stride, 1, b->row};
        const nsa__matrix q = nsa__rows_for_over(k, b->rows, by_row, f->paired);
        nsa__product_over(k, keys, b->rows, &ds_t, &q, &dk);
    }
    if (p->dx->q.data) {
        const nsa__matrix ds = {ds_rows, nsa__rows_over(k, ld), 1, NULL};
        const nsa__matrix rows = {nsa__packed_rows(k, job->k, b->key), k->wide, 1, NULL};
        const nsa__result dq = {f->dq, k->wide, b->row, 1, NULL};
        nsa__product_over(k, b->rows, keys, &ds, &rows, &dq);
    }
}

/* s = q k^T, p = exp(s - lse), dp = dout v^T, ds = p (dp - delta), then the gradients' products */
static void nsa__backward_batch(nsa__backward *f, const nsa__head_job *job, const nsa__batch *b) {
    const nsa__attend_plan *p = job->plan;
    const nsa__operand *k = &p->k, *v = &p->v;
    const nsa__scored x = nsa__batch_scored(p, b);
    const int tile = p->cut.tile, ld = p->stride_p;
    const nsa__matrix q = {f->q, k->stride, 1, b->row}, dout = {f->dout, v->stride, 1, b->row};
    const nsa__matrix k_t = {nsa__key_columns(p, k, job->k_t, b->key), tile, 1, NULL};
    const nsa__matrix v_t = {nsa__key_columns(p, v, job->v_t, b->key), tile, 1, NULL};
    const nsa__result s = nsa__result_at(f->p, ld, 0), dp = nsa__result_at(f->ds, ld, 0);
    nsa__product_along(k, x.rows, x.n, &q, &k_t, &s);
    nsa__product_along(v, x.rows, x.n, &dout, &v_t, &dp);
    p->tiles->gradient(&x, ld, f->lse, f->delta, f->p, f->ds);
    nsa__backward_products(f, job, b);
    nsa__backward_note(f, job, b);
}

/* Adds the task's dq. A row that read a non-finite number gets NaN; one that read nothing stays. */
static void nsa__backward_end(nsa__backward *f, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    const nsa_tensor *to = &p->dx->q;
    int dim = p->d->dim, rows = to->data ? f->iter.queries * p->group : 0;
    for (int r = 0; r < rows; r++) {
        nsa_real *dq = f->dq + (ptrdiff_t)r * p->k.wide;
        void *row = nsa__walk_queries(job, &f->iter, to, dim, r);
        if (!f->reads[r / p->group]) continue;
        for (int c = 0; f->nonfinite[r] && c < dim; c++) dq[c] = nsa__nan();
        nsa__add(to->dtype, row, p->k.scale, dq, dim);
    }
}

/* -- queries that are computed alone -- */

/* dout and q as columns. */
static void nsa__alone_begin(nsa__backward *f, const nsa__attend_plan *p) {
    const nsa__operand *operands[] = {&p->v, &p->k};
    const int columns = nsa__whole_vectors(p->group);
    for (int i = 0; i < 2; i++) {
        const nsa_real *x = i ? f->q : f->dout;
        nsa_real *to = f->columns[i];
        for (int c = 0; c < operands[i]->depth; c++, to += columns)
            for (int r = 0; r < columns; r++)
                to[r] = r < p->group ? x[(ptrdiff_t)r * operands[i]->stride + c] : 0;
    }
}

/* The keys of a tile of its list; returns how many. */
static int nsa__alone_keys(nsa__backward *f, const nsa__head_job *own, int tile) {
    const int size = own->plan->cut.tile, begin = tile * size;
    const int n = (int)nsa__min(size, own->keys - (int64_t)begin);
    for (int i = 0; i < n; i++) f->keys[i] = (int)nsa__key_in_list(&own->rows, begin + i);
    return n;
}

/* Prefetches what products add to for the keys at hand, and the rows of the next tile's keys. */
static void nsa__alone_fetch(const nsa__backward *f, const nsa__head_job *own, int n) {
    const nsa__attend_plan *p = own->plan;
    const nsa__operand *k = &p->k, *v = &p->v;
    const ptrdiff_t along = nsa__along_stride(k), along_v = nsa__along_stride(v);
    const int64_t next = (f->iter.tile + (int64_t)1) * p->cut.tile;
    for (int i = 0; i < n; i++) {
        const ptrdiff_t key = f->keys[i];
        if (own->dv) nsa__fetch(own->dv + key * v->wide, (size_t)v->wide * sizeof(nsa_real));
        if (own->dk) nsa__fetch(own->dk + key * k->wide, (size_t)k->wide * sizeof(nsa_real));
        if (next + i >= own->keys) continue;
        const ptrdiff_t later = (ptrdiff_t)nsa__key_in_list(&own->rows, next + i);
        nsa__fetch(own->k_of + later * along, (size_t)along * sizeof(nsa_real));
        nsa__fetch(own->v_of + later * along_v, (size_t)along_v * sizeof(nsa_real));
    }
}

/* s = q k^T, or dp = dout v^T, of n keys at hand, and zeros behind them. */
static void nsa__alone_product(const nsa__backward *f, const nsa__head_job *own,
                               const nsa__operand *o, int n, nsa_real *s) {
    const nsa__attend_plan *p = own->plan;
    const int is_k = o == &p->k, columns = nsa__whole_vectors(p->group);
    const nsa__matrix rows = {is_k ? own->k_of : own->v_of, nsa__along_stride(o), 1, f->keys};
    const nsa__matrix of_query = {f->columns[is_k], columns, 1, NULL};
    const nsa__result s_t = nsa__result_at(f->s_t, columns, 0);
    nsa__product_along(o, n, columns, &rows, &of_query, &s_t);
    p->tiles->transpose(n, p->group, columns, f->s_t, p->stride_p, s);
    for (int r = 0; r < p->group; r++, s += p->stride_p)
        for (int i = n; i < nsa__whole_vectors(n); i++) s[i] = 0;
}

/* dq += ds k. p and ds of the tile wait for dk and dv. */
static void nsa__alone_tile(nsa__backward *f, const nsa__head_job *own) {
    const nsa__attend_plan *p = own->plan;
    const nsa__operand *k = &p->k, *v = &p->v;
    const nsa__batch b = nsa__batch_at(&f->iter, own, 0);
    const nsa__scored x = nsa__batch_scored(p, &b);
    const nsa_real *gate = p->options.gate ? f->gate : NULL;
    const int ld = p->stride_p, n = nsa__alone_keys(f, own, f->iter.tile);
    f->pending++;
    const int newest = nsa__backward_newest(f);
    nsa_real *s = f->waiting[0] + (ptrdiff_t)newest * p->group * ld;
    nsa_real *ds = f->waiting[1] + (ptrdiff_t)newest * p->group * ld;
    f->pending_tile[newest] = f->iter.tile;
    f->pending_last[newest] = f->keys[n - 1];
    f->nonfinite_keys[newest] = 0;
    nsa__alone_fetch(f, own, n);
    nsa__alone_product(f, own, k, n, s);
    nsa__alone_product(f, own, v, n, ds);
    p->tiles->gradient(&x, ld, f->lse, f->delta, s, ds);
    nsa__round_left(v, &x, ld, gate, s, NULL);
    const nsa__packed *ds_rows = nsa__round_left(v, &x, ld, gate, ds, f->ds_rows);
    nsa__backward_note(f, own, &b);
    if (!p->dx->q.data) return;
    const nsa__matrix gathered = {own->k_of, nsa__along_stride(k), 1, f->keys};
    const nsa__matrix rows = nsa__rows_for_over(k, n, gathered, f->rows);
    const nsa__matrix left = {ds_rows, nsa__rows_over(k, ld), 1, NULL};
    const nsa__result dq = {f->dq, k->wide, b.row, 1, NULL};
    nsa__product_over(k, b.rows, n, &left, &rows, &dq);
}

/* dv += p^T dout and dk += ds^T q, for the tile that has waited longest. */
static void nsa__alone_add(nsa__backward *f, const nsa__head_job *own) {
    const nsa__attend_plan *p = own->plan;
    const nsa__operand *operands[] = {&p->v, &p->k};
    const nsa_real *of_query[] = {f->dout, f->q};
    nsa_real *sums[] = {own->dv, own->dk};
    const int ld = p->stride_p, tile = p->cut.tile;
    const int n = nsa__alone_keys(f, own, f->pending_tile[f->oldest]);
    for (int i = 0; i < 2; i++) {
        const nsa__operand *o = operands[i];
        const nsa__matrix by_row = {of_query[i], o->stride, 1, NULL};
        const nsa__matrix right = nsa__rows_for_over(o, p->group, by_row, f->paired);
        const nsa__matrix left = {f->waiting[i] + (ptrdiff_t)f->oldest * p->group * ld, 1, ld,
                                  NULL};
        const nsa__result sum = {sums[i], o->wide, f->keys, 1, NULL};
        if (sums[i]) nsa__product_over(o, n, p->group, &left, &right, &sum);
    }
    for (int i = 0; i < n; i++)
        if (f->nonfinite_keys[f->oldest] >> i & 1)
            own->nonfinite_keys[f->keys[i] / tile] |= (uint64_t)1 << f->keys[i] % tile;
}

/* A slot of the backward pass: the slot, the task's state, then the arrays of that state. */
typedef struct nsa__backward_slot {
    nsa__task_slot slot;
    nsa__backward task;
} nsa__backward_slot;

/* The state of the task in a slot, with its arrays: those of one tile in `scratch`, the others in
   `own`, behind the slot. Without a slot it only counts the bytes of both arenas. */
static nsa__backward *nsa__backward_at(const nsa__attend_plan *p, void *slot, nsa__arena *scratch,
                                       nsa__arena *own) {
    nsa__backward any, *f = slot ? &((nsa__backward_slot *)slot)->task : NULL;
    own->base = (char *)slot;
    nsa__alloc(own, 1, sizeof(nsa__backward_slot));
    nsa__backward_alloc(f ? f : &any, p, own, scratch);
    return f;
}

/* Task i of a head follows task i - 1 of that head. */
static void nsa__backward_assign(const nsa__ordered *ordered, nsa__task_slot *slot) {
    const nsa__head_job *jobs = (const nsa__head_job *)ordered->context;
    nsa__write(&slot->predecessor, slot->task < jobs->heads ? -1 : slot->task - jobs->heads);
    nsa__write(&slot->wait_tile, -1);
}

/* The share of a tile of dk and dv, summed alone: the order of sums does not depend on when a task
   may add it. */
static void nsa__backward_tile(nsa__backward *f, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    f->pending++;
    const int newest = nsa__backward_newest(f), n = p->cut.tile * p->k.wide,
              n_v = p->cut.tile * p->v.wide;
    f->pending_tile[newest] = f->pending_last[newest] = f->iter.tile;
    f->nonfinite_keys[newest] = 0;
    memset(f->dk + newest * n, 0, (size_t)n * sizeof *f->dk);
    memset(f->dv + newest * n_v, 0, (size_t)n_v * sizeof *f->dv);
    for (int i = 0, queries = f->iter.tile_queries; i < queries;) {
        nsa__batch b = nsa__batch_at(&f->iter, job, i);
        nsa__backward_batch(f, job, &b);
        i += b.queries;
    }
}

NSA__COMPILED static void nsa__sum_up(nsa_real *sum, const nsa_real *x, int n) {
    for (int i = 0; i < n; i++) sum[i] += x[i];
}

/* Adds the oldest share to the tile's sums. */
static void nsa__backward_share(const nsa__backward *f, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    int32_t oldest = f->oldest, tile = f->pending_tile[oldest];
    int n = p->cut.tile * p->k.wide, n_v = p->cut.tile * p->v.wide;
    if (job->dk) nsa__sum_up(job->dk + (ptrdiff_t)tile * n, f->dk + oldest * n, n);
    if (job->dv) nsa__sum_up(job->dv + (ptrdiff_t)tile * n_v, f->dv + oldest * n_v, n_v);
    job->nonfinite_keys[tile] |= f->nonfinite_keys[oldest];
}

/* Adds what has waited longest, and returns what the task has then left. */
static int32_t nsa__backward_add(nsa__backward *f, const nsa__head_job *job) {
    const int32_t last = f->pending_last[f->oldest];
    if (job->gathers)
        nsa__alone_add(f, job);
    else
        nsa__backward_share(f, job);
    f->pending--;
    f->oldest = f->pending ? (f->oldest + 1) % NSA__PENDING : 0;
    return last + 1;
}

/* One step of a task: it loads its rows, computes a tile's share, adds its oldest share, or ends. A
   task may come back in another thread, whose scratch does not have its masks, so it reads its tile
   again. */
static int nsa__backward_step(const nsa__ordered *ordered, nsa__task_slot *slot, void *scratch) {
    int64_t nth = slot->task;
    const nsa__head_job *job = nsa__job_of(ordered->context, &nth);
    nsa__head_job alone;
    nsa__arena of_tile = {(char *)scratch, 0}, own = {NULL, 0};
    nsa__backward *f = nsa__backward_at(job->plan, slot, &of_tile, &own);
    nsa__tile_iter *it = &f->iter;
    /* from the last queries on: they have most to read, which no thread should begin last */
    nth = nsa__head_tasks(job) - 1 - nth;
    if (job->gathers) job = nsa__gather(&alone, job, job->seq.first + (int)nth);
    if (!slot->started) {
        nsa__backward_begin(f, job, nth);
        if (job->gathers) nsa__alone_begin(f, job->plan);
        nsa__tile_iter_next(it, job);
        slot->started = 1;
        slot->migrated = 0;
    } else if (f->pending &&
               nsa__may_enter(ordered, slot->predecessor, f->pending_last[f->oldest])) {
        nsa__write(ordered->progress + slot->task, nsa__backward_add(f, job));
    } else if (it->tile < it->tile_end) {
        if (slot->migrated) nsa__tile_iter_read(it, job);
        slot->migrated = 0;
        (job->gathers ? nsa__alone_tile : nsa__backward_tile)(f, job);
        if (!nsa__tile_iter_next(it, job)) nsa__backward_end(f, job);
    } else {
        nsa__write(ordered->progress + slot->task, INT32_MAX);
        return 1;
    }
    int32_t wait_tile = f->pending ? f->pending_last[f->oldest] : INT32_MAX - 1;
    if (it->tile < it->tile_end && f->pending < NSA__PENDING) wait_tile = -1;
    nsa__write(&slot->wait_tile, wait_tile);
    return 0;
}

/* Adds a tile's sum to dk or dv. Keys that a NaN row has read get NaN. */
static void nsa__key_gradient_add(const nsa__head_job *job, const nsa_tensor *to,
                                  const nsa__operand *o, int tile, nsa_real factor, nsa_real *sum) {
    const nsa__attend_plan *p = job->plan;
    int begin = tile * p->cut.tile, end = (int)nsa__min((int64_t)begin + p->cut.tile, job->keys);
    for (int key = begin; sum && key < end; key++) {
        nsa_real *row = sum + (ptrdiff_t)key * o->wide;
        void *added = nsa__walk_keys(job, to, o->width, key, end);
        for (int c = 0; job->nonfinite_keys[tile] >> (key - begin) & 1 && c < o->width; c++)
            row[c] = nsa__nan();
        nsa__add(to->dtype, added, factor, row, o->width);
    }
}

/* The last step: a tile's sums go to dx.k and dx.v, when all tasks have added to them. q was loaded
   times scale, in pairs as it is. */
static void nsa__key_gradient_task(const void *context, int64_t nth, void *scratch) {
    const nsa__head_job *job = nsa__job_of(context, &nth);
    const nsa__attend_plan *p = job->plan;
    int tile = job->tile_begin + (int)nth;
    (void)scratch;
    if (job->head % p->lists_per_kv_head != p->lists_per_kv_head - 1) return;
    if (job->listed && !job->listed[tile]) return;
    nsa__key_gradient_add(job, &p->dx->k, &p->k, tile, nsa__sum_scale(&p->k), job->dk);
    nsa__key_gradient_add(job, &p->dx->v, &p->v, tile, 1, job->dv);
}

/* The order of these jobs' tasks. nsa__backward_heads sets `tasks` when it knows the queries. */
static nsa__ordered nsa__backward_ordered(const nsa__head_job *jobs) {
    nsa__arena scratch = {NULL, 0}, slot = {NULL, 0};
    nsa__backward_at(jobs->plan, NULL, &scratch, &slot);
    nsa__ordered ordered = {
        0, jobs->progress, jobs, nsa__backward_assign, nsa__backward_step, slot.used, scratch.used};
    return ordered;
}

static void nsa__backward_layout(nsa__head_job *jobs, const nsa__attend_plan *p,
                                 nsa__arena *shared) {
    int64_t tiles = nsa__ceil_div(nsa__max_keys(p), p->cut.tile);
    const int alone = p->cut.gathers_from < INT_MAX, each = alone ? 1 : p->cut.task_queries;
    int64_t tasks = nsa__max(p->cut.least_tasks, nsa__ceil_div(p->d->count, each));
    int32_t *progress = (int32_t *)nsa__alloc(shared, p->cut.head_slots * tasks, sizeof *progress);
    for (int i = 0; i < p->cut.head_slots; i++) {
        nsa__head_job *job = &jobs[i];
        *job = nsa__job_make(p);
        job->progress = progress;
        nsa__alloc_keys(job, shared, 1, 1);
        if (alone) {
            job->k_of = nsa__alloc_packed(shared, tiles * p->cut.tile * nsa__along_stride(&p->k));
            job->v_of = nsa__alloc_packed(shared, tiles * p->cut.tile * nsa__along_stride(&p->v));
        }
        job->dk = nsa__alloc_reals(shared, tiles * p->cut.tile * p->k.wide);
        job->dv = nsa__alloc_reals(shared, tiles * p->cut.tile * p->v.wide);
        job->nonfinite_keys = (uint64_t *)nsa__alloc(shared, tiles, sizeof *job->nonfinite_keys);
        if (p->dx && !p->dx->k.data) job->dk = NULL;
        if (p->dx && !p->dx->v.data) job->dv = NULL;
    }
}

/* Numbers from row to row of an operand whose columns a product walks down. Rows an even number of
   vectors apart would share few sets of the first cache. */
static int nsa__padded_stride(int wide) {
    return wide % (2 * NSA__LANES) ? wide : wide + NSA__LANES;
}

/* Plans for `x` and `dx`, which are NULL in a size query. d has all heads of `whole` or some: a
   head's tasks are the same whichever heads are beside it. */
static nsa__attend_plan nsa__backward_plan(const nsa_attend *dx, const nsa_attend *x,
                                           const nsa_desc *d, nsa__branch branch,
                                           const nsa_desc *whole) {
    const int nearby = nsa__heads_near(whole);
    nsa__attend_plan p =
        nsa__attend_plan_of(x, dx, d, branch, nsa__traits_of[branch].lists, nearby);
    p.cut = nsa__backward_schedule(d, branch, p.group, nsa__slots_near(&p, nearby));
    nsa__plan_pairs(&p);
    p.k.stride = nsa__padded_stride(p.k.stride);
    p.v.stride = nsa__padded_stride(p.v.stride);
    p.stride_p = nsa__padded_stride(p.cut.tile);
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__arena shared = {NULL, 0};
    nsa__backward_layout(jobs, &p, &shared);
    nsa__ordered ordered = nsa__backward_ordered(jobs);
    p.shared = shared.used;
    p.scratch = nsa__pack_scratch(&p, nsa__ordered_scratch(&ordered));
    return p;
}

/* The queries that share tiles, then those that are computed alone. */
static void nsa__backward_heads(nsa__head_job *jobs, const nsa__team *team) {
    nsa__ordered ordered = nsa__backward_ordered(jobs);
    const nsa__seq seq = jobs->seq;
    for (int gathers = 0; gathers < 2; gathers++) {
        const nsa__seq part = nsa__seq_part(jobs->plan, seq, gathers);
        for (int i = 0; i < jobs->heads; i++) {
            jobs[i].seq = part;
            jobs[i].gathers = gathers;
            if (gathers) jobs[i].task_queries = 1;
        }
        ordered.tasks = (int32_t)nsa__query_tasks(jobs);
        if (part.count) nsa__run_ordered(team, &ordered);
    }
    for (int i = 0; i < jobs->heads; i++) jobs[i].seq = seq, jobs[i].gathers = 0;
    nsa__run(team, (int64_t)jobs->heads * (jobs->tile_end - jobs->tile_begin),
             nsa__key_gradient_task, jobs);
}

static nsa_status nsa__backward_run(const nsa__attend_plan *p, void *workspace, size_t bytes) {
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__team team;
    nsa__arena shared = nsa__arena_at(workspace);
    NSA__CHECK(nsa__team_make(&team, p->d, workspace, bytes, p->shared, p->scratch));
    nsa__backward_layout(jobs, p, &shared);
    nsa__each_heads(jobs, &team, 0, nsa__backward_heads);
    return NSA_OK;
}

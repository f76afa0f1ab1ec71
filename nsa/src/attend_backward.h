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

/* A backward task: p and ds are scratch of the thread, the rest stays in the task's slot. Of two
   the first is of v, with dout and p; the second of k, with q and ds. */
typedef struct nsa__backward {
    nsa__tile_iter iter;
    nsa_real *rows[2];        /* dout and q of the task */
    nsa_real *columns[2];     /* the same transposed, if the query is computed alone */
    nsa_real *dq;             /* rows of the task */
    nsa_real *lse, *delta;    /* of every row */
    nsa_real *gate;           /* in pairs, of every row: the gate of its dout */
    nsa_real *left[2];        /* rows of a batch: dp and scores of a tile, then p and ds */
    nsa__packed *ds_rows;     /* in pairs: ds by row, while ds has pairs of rows */
    nsa__packed *paired;      /* in pairs: rows of a batch, or keys, as pairs of rows */
    unsigned char *nonfinite; /* of every row: what it adds to becomes NaN */
    unsigned char *reads;     /* of every query: 1 if it has seen a key */
    /* Its shares of dv and dk of tiles that it may not enter yet: `pending` of them, `oldest` to
       `newest`, around the end. Of a query that is computed alone p and ds wait there. */
    nsa_real *share[2];
    uint64_t nonfinite_keys[NSA__PENDING]; /* keys that get NaN */
    int32_t pending_tile[NSA__PENDING];
    int32_t pending_last[NSA__PENDING]; /* what it enters: the tile, or a list's last key there */
    int pending, oldest, newest;
    int at_once;              /* 1: the newest share is added by its products */
    nsa_real ones[NSA__TILE]; /* factors of the sums that are there */
    int keys[NSA__TILE];      /* of the tile at hand, if the query is computed alone */
} nsa__backward;

/* Share `nth` of dv or dk, and the numbers of each. */
static ptrdiff_t nsa__share_numbers(const nsa__attend_plan *p, int i) {
    const int64_t alone = nsa__plan_gathers(p) ? (int64_t)p->group * p->cut.tile : 0;
    return (ptrdiff_t)nsa__max((int64_t)p->cut.tile * nsa__operand_at(p, i)->wide, alone);
}
static nsa_real *nsa__share(const nsa__backward *f, const nsa__attend_plan *p, int i, int nth) {
    return f->share[i] + nth * nsa__share_numbers(p, i);
}

static void nsa__backward_alloc(nsa__backward *f, const nsa__attend_plan *p, nsa__arena *a,
                                nsa__arena *of_tile) {
    const int64_t rows = (int64_t)p->cut.task_queries * p->group;
    const int batch_rows = p->cut.batch_queries * p->group;
    nsa__tile_iter_alloc(&f->iter, p, a, of_tile);
    f->dq = nsa__alloc_reals(a, rows * p->k.wide);
    f->lse = nsa__alloc_reals(a, rows);
    f->delta = nsa__alloc_reals(a, rows);
    f->nonfinite = (unsigned char *)nsa__alloc(a, rows, 1);
    f->reads = (unsigned char *)nsa__alloc(a, p->cut.task_queries, 1);
    for (int i = 0; i < 2; i++) {
        const nsa__operand *o = nsa__operand_at(p, i);
        f->rows[i] = nsa__alloc_reals(a, (rows + NSA__LANES) * o->stride);
        f->left[i] =
            nsa__alloc_reals(of_tile, (int64_t)nsa__whole_vectors(batch_rows) * p->cut.tile);
        f->share[i] = nsa__alloc_reals(a, NSA__PENDING * nsa__share_numbers(p, i));
        if (!nsa__plan_gathers(p)) continue;
        f->columns[i] = nsa__alloc_reals(a, (int64_t)o->width * nsa__whole_vectors(p->group));
    }
    if (!p->pairs) return;
    const int64_t paired = nsa__max(batch_rows + 1, p->cut.tile) / 2;
    f->gate = nsa__alloc_reals(a, rows);
    f->ds_rows = nsa__alloc_reals(of_tile, (int64_t)batch_rows * p->cut.tile / 2);
    f->paired = nsa__alloc_reals(of_tile, paired * nsa__max(p->k.wide, p->v.wide));
}

/* Scales a row of dout by its gate, which saves the chain a gradient of every branch's output: out
   = sum_c g[c] out_c  =>  dout_c = g[c] dout. Returns the factor of its delta. In pairs dout and
   delta stay as they are, and the gate is a factor of p and ds later. */
static nsa_real nsa__backward_scale(nsa__backward *f, const nsa__head_job *job, int r) {
    const nsa__attend_plan *p = job->plan;
    const nsa_desc *d = p->d;
    int query = f->iter.first + r / p->group, head = job->head * p->group + r % p->group;
    nsa_real gates[3], *dout = f->rows[NSA__OF_V] + (ptrdiff_t)r * p->v.stride;
    nsa__load_gates(gates, &p->gate->x->logits, d, job->seq.batch,
                    job->seq.row + query - job->seq.first, head / (d->heads / d->gate_heads));
    nsa__gate_weights(d->gate, gates);
    const nsa_real g = gates[p->branch];
    if (nsa__takes_reals(&p->v)) {
        p->tiles->scale(p->v.wide, g, dout, dout);
        return g;
    }
    const int is_real = nsa__is_finite((double)g);
    f->gate[r] = is_real ? g : 0;
    if (!is_real) f->nonfinite[r] = 1;
    return (nsa_real)is_real;
}

/* dout . out of a row, before the gate. dout is read again, because the task's may have pairs, and
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
    const nsa__gate_job *gate = p->gate;
    nsa_real *dout = f->rows[NSA__OF_V];
    nsa__tile_iter_begin(&f->iter, job, task);
    f->pending = f->oldest = 0;
    for (int i = 0; i < NSA__TILE; i++) f->ones[i] = 1;
    int rows = f->iter.queries * p->group;
    memset(f->reads, 0, (size_t)f->iter.queries);
    memset(f->nonfinite, 0, (size_t)rows);
    memset(f->dq, 0, (size_t)rows * (size_t)p->k.wide * sizeof *f->dq);
    nsa__load_queries(job, &f->iter, &p->x->q, &p->k, f->rows[NSA__OF_K], f->nonfinite);
    nsa__load_queries(job, &f->iter, &p->dx->out, &p->v, dout, f->nonfinite);
    for (int r = 0; r < rows; r++) {
        nsa_real dot = nsa__backward_dot(f, job, r);
        if (gate && gate->delta_out)
            ((nsa_real *)nsa__query_row(job, &f->iter, gate->delta_out, r))[p->branch] = dot;
        if (gate) dot *= nsa__backward_scale(f, job, r);
        f->delta[r] = dot;
    }
    /* a gate may be NaN, and its product with dout too large */
    if (gate) nsa__zero_nonfinite(&p->v, rows, dout, f->nonfinite);
    for (int r = 0; r < rows; r++) {
        f->lse[r] = nsa__load_number(job, &f->iter, &p->x->lse, r, f->nonfinite);
        if (p->dx->lse.data)
            f->delta[r] -= nsa__load_number(job, &f->iter, &p->dx->lse, r, f->nonfinite);
        if (f->nonfinite[r]) f->delta[r] = 0;
    }
    for (int i = 0; job->gathers && i < 2; i++)
        nsa__rows_to_columns(nsa__operand_at(p, i), rows, f->rows[i], nsa__whole_vectors(rows),
                             f->columns[i]);
}

/* Marks the queries that have read a key, and the keys that a nonfinite row has read: their dk and
   dv become NaN, because each is a sum with that row. */
static void nsa__backward_note(nsa__backward *f, const nsa__head_job *job, const nsa__batch *b) {
    int group = job->plan->group;
    for (int i = 0; i < b->queries; i++) {
        f->reads[b->query[i]] = 1;
        for (int g = 0; g < group; g++)
            if (f->nonfinite[b->query[i] * group + g]) f->nonfinite_keys[f->newest] |= b->mask[i];
    }
}

/* Scores s and dp become p = exp(s - lse) and ds = p (dp - delta), rounded if they are pairs.
   Returns ds by row. */
static const nsa__packed *nsa__backward_weights(const nsa__backward *f, const nsa__attend_plan *p,
                                                const nsa__scored *x, nsa_real *const left[2]) {
    const nsa_real *gate = p->gate ? f->gate : NULL;
    const ptrdiff_t ld = p->cut.tile;
    p->tiles->gradient(x, ld, f->lse, f->delta, left[NSA__OF_V], left[NSA__OF_K]);
    nsa__round_left(&p->v, x, ld, gate, left[NSA__OF_V], NULL);
    return nsa__round_left(&p->v, x, ld, gate, left[NSA__OF_K], f->ds_rows);
}

/* dv += p^T dout, or dk += ds^T q */
static void nsa__backward_keys(const nsa__backward *f, const nsa__attend_plan *p, int i,
                               const nsa__scored *x, const nsa_real *left, const nsa__result *sum) {
    const nsa__operand *o = nsa__operand_at(p, i);
    const nsa__matrix left_t = {left, 1, p->cut.tile, NULL};
    const nsa__matrix by_row = {f->rows[i], o->stride, 1, x->row};
    const nsa__matrix right = nsa__rows_for_over(o, x->rows, by_row, f->paired);
    nsa__product_over(o, x->n, x->rows, &left_t, &right, sum);
}

/* dq += ds k, of n keys */
static void nsa__backward_queries(const nsa__backward *f, const nsa__attend_plan *p,
                                  const nsa__scored *x, const nsa__packed *ds, int n,
                                  const nsa__matrix *keys) {
    const nsa__matrix left = {ds, nsa__rows_over(&p->k, p->cut.tile), 1, NULL};
    const nsa__result dq = {f->dq, p->k.wide, x->row, 1, NULL, NULL};
    if (p->dx->q.data) nsa__product_over(&p->k, x->rows, n, &left, keys, &dq);
}

/* What adds to the sums of dv or dk, from a key on, as a product ends: a share has the same bits
   whether its product adds it or it has waited. */
static nsa__result nsa__backward_sums(const nsa__backward *f, const nsa__head_job *job, int i,
                                      ptrdiff_t key) {
    const int wide = nsa__operand_at(job->plan, i)->wide;
    const nsa__result sums = {job->sum[i] + key * wide, wide, NULL, 1, f->ones, NULL};
    return sums;
}

/* Where a batch adds its part of the newest share. The first one is written there, and what it does
   not reach becomes zeros. */
static nsa__result nsa__backward_part(const nsa__backward *f, const nsa__attend_plan *p, int i,
                                      const nsa__batch *b) {
    const int wide = nsa__operand_at(p, i)->wide, first = b->query == f->iter.tile_query;
    nsa_real *share = nsa__share(f, p, i, f->newest), *end = share + (ptrdiff_t)b->end * wide;
    const size_t row = (size_t)wide * sizeof *share;
    if (first) {
        memset(share, 0, (size_t)b->begin * row);
        memset(end, 0, (size_t)(p->cut.tile - b->end) * row);
    }
    return nsa__result_at(share + (ptrdiff_t)b->begin * wide, wide, !first);
}

/* Adds the lines of so many numbers, if they are there. */
static nsa__lines *nsa__add_numbers(nsa__lines *to, const nsa_real *at, ptrdiff_t numbers) {
    const nsa__lines lines = {(const char *)at, (int)(numbers * (ptrdiff_t)sizeof *at / 64)};
    *to = lines;
    return at ? to + 1 : to;
}

/* What the next tile's products read and add to, which the first batch of a tile prefetches: a
   tile of all heads at once is more than L2 has, and the next one of a list may lie anywhere. */
static nsa__lines *nsa__backward_later(const nsa__backward *f, const nsa__head_job *job,
                                       const nsa__batch *b, nsa__lines *later) {
    const nsa__attend_plan *p = job->plan;
    const ptrdiff_t tile = p->cut.tile, next = b->next_key;
    const nsa__lines no_more = {(const char *)later, INT_MAX};
    nsa__lines *to = later;
    if (next >= job->keys || b->query != f->iter.tile_query) return NULL;
    for (int i = 0; i < 2; i++) {
        const nsa__operand *o = nsa__operand_at(p, i);
        const nsa_real *sum = job->sum[i] ? job->sum[i] + next * o->wide : NULL;
        to = nsa__add_numbers(to, nsa__packed_columns(job, i, next), tile * o->depth);
        to = nsa__add_numbers(to, sum, tile * o->wide);
    }
    to = nsa__add_numbers(to, nsa__packed_rows(job, NSA__OF_K, next),
                          nsa__rows_over(&p->k, tile) * p->k.wide);
    *to = no_more;
    return later;
}

/* s = q k^T, dp = dout v^T, then p and ds, and the gradients' products from these */
static void nsa__backward_batch(nsa__backward *f, const nsa__head_job *job, const nsa__batch *b) {
    const nsa__attend_plan *p = job->plan;
    const nsa__scored x = nsa__batch_scored(p, b);
    nsa__lines room[6], *later = nsa__backward_later(f, job, b, room);
    for (int i = 0; i < 2; i++) {
        const nsa__operand *o = nsa__operand_at(p, i);
        const nsa__matrix rows = {f->rows[i], o->stride, 1, b->row};
        const nsa__matrix columns = {nsa__packed_columns(job, i, b->key), p->cut.tile, 1, NULL};
        const nsa__result scores = {f->left[!i], p->cut.tile, NULL, 0, NULL, later};
        nsa__product_along(o, x.rows, x.n, &rows, &columns, &scores);
    }
    const nsa__packed *ds = nsa__backward_weights(f, p, &x, f->left);
    for (int i = 0; i < 2; i++) {
        if (!job->sum[i]) continue;
        const nsa__result sum =
            f->at_once ? nsa__backward_sums(f, job, i, b->key) : nsa__backward_part(f, p, i, b);
        nsa__backward_keys(f, p, i, &x, f->left[i], &sum);
    }
    const nsa__matrix keys = {nsa__packed_rows(job, NSA__OF_K, b->key), p->k.wide, 1, NULL};
    nsa__backward_queries(f, p, &x, ds, x.n, &keys);
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

/* The keys of a tile of its list; returns how many. */
static int nsa__alone_keys(nsa__backward *f, const nsa__head_job *own, int tile) {
    const int size = own->plan->cut.tile, begin = tile * size;
    const int n = (int)nsa__min(size, own->keys - (int64_t)begin);
    for (int i = 0; i < n; i++) f->keys[i] = (int)nsa__key_in_list(&own->rows, begin + i);
    return n;
}

/* Prefetches what products add to for the keys at hand, and the rows of the next tile's keys. */
static void nsa__alone_fetch(const nsa__backward *f, const nsa__head_job *own, int i, int n) {
    const nsa__operand *o = nsa__operand_at(own->plan, i);
    const ptrdiff_t along = o->stride;
    const int64_t next = (f->iter.tile + (int64_t)1) * own->plan->cut.tile;
    for (int j = 0; j < n; j++) {
        nsa_real *sum = own->sum[i];
        if (sum) nsa__fetch(sum + (ptrdiff_t)f->keys[j] * o->wide, (size_t)o->wide * sizeof *sum);
        if (next + j >= own->keys) continue;
        const ptrdiff_t later = (ptrdiff_t)nsa__key_in_list(&own->rows, next + j);
        nsa__fetch(own->listed_rows[i] + later * along, (size_t)along * sizeof(nsa_real));
    }
}

/* s = q k^T, or dp = dout v^T, of n keys at hand, and zeros behind them. The products are by key,
   where a batch would have p and ds. */
static void nsa__alone_product(const nsa__backward *f, const nsa__head_job *own, int i, int n,
                               nsa_real *s) {
    const nsa__attend_plan *p = own->plan;
    const nsa__operand *o = nsa__operand_at(p, i);
    const int columns = nsa__whole_vectors(p->group);
    const nsa__matrix rows = {own->listed_rows[i], o->stride, 1, f->keys};
    const nsa__matrix of_query = {f->columns[i], columns, 1, NULL};
    const nsa__result s_t = nsa__result_at(f->left[i], columns, 0);
    nsa__product_along(o, n, columns, &rows, &of_query, &s_t);
    p->tiles->transpose(n, p->group, columns, f->left[i], p->cut.tile, s);
    for (int r = 0; r < p->group; r++, s += p->cut.tile)
        for (int j = n; j < nsa__whole_vectors(n); j++) s[j] = 0;
}

/* dq += ds k. p and ds of the tile wait for dk and dv. */
static void nsa__alone_tile(nsa__backward *f, const nsa__head_job *own) {
    const nsa__attend_plan *p = own->plan;
    const nsa__batch b = nsa__batch_at(&f->iter, own, 0);
    const nsa__scored x = nsa__batch_scored(p, &b);
    const int n = nsa__alone_keys(f, own, f->iter.tile);
    nsa_real *const left[] = {nsa__share(f, p, 0, f->newest), nsa__share(f, p, 1, f->newest)};
    f->pending_last[f->newest] = f->keys[n - 1];
    for (int i = 0; i < 2; i++) nsa__alone_fetch(f, own, i, n);
    for (int i = 0; i < 2; i++) nsa__alone_product(f, own, i, n, left[!i]);
    const nsa__packed *ds = nsa__backward_weights(f, p, &x, left);
    const nsa__matrix listed = {own->listed_rows[NSA__OF_K], p->k.stride, 1, f->keys};
    const nsa__matrix keys = nsa__rows_for_over(&p->k, n, listed, f->paired);
    nsa__backward_queries(f, p, &x, ds, n, &keys);
    nsa__backward_note(f, own, &b);
}

/* dv += p^T dout and dk += ds^T q, for the tile that has waited longest. */
static void nsa__alone_add(nsa__backward *f, const nsa__head_job *own) {
    const nsa__attend_plan *p = own->plan;
    const int n = nsa__alone_keys(f, own, f->pending_tile[f->oldest]), tile = p->cut.tile;
    const nsa__scored x = {p->group, n, p->group, 0, NULL, NULL};
    for (int i = 0; i < 2; i++) {
        const nsa__result sum = {own->sum[i], nsa__operand_at(p, i)->wide, f->keys, 1, NULL, NULL};
        if (own->sum[i]) nsa__backward_keys(f, p, i, &x, nsa__share(f, p, i, f->oldest), &sum);
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

/* The share of a tile of dk and dv, summed alone: the order of sums does not depend on when a task
   may add it. If it may enter now, and one batch is all of the share, the batch's products add
   it. */
static void nsa__backward_tile(nsa__backward *f, const nsa__head_job *job, int may_enter) {
    const nsa__attend_plan *p = job->plan;
    f->at_once = may_enter && !f->pending && f->iter.tile_queries <= p->cut.batch_queries;
    f->newest = (f->oldest + f->pending++) % NSA__PENDING;
    f->pending_tile[f->newest] = f->pending_last[f->newest] = f->iter.tile;
    f->nonfinite_keys[f->newest] = 0;
    if (job->gathers) {
        nsa__alone_tile(f, job);
        return;
    }
    for (int i = 0, queries = f->iter.tile_queries; i < queries;) {
        nsa__batch b = nsa__batch_at(&f->iter, job, i);
        nsa__backward_batch(f, job, &b);
        i += b.queries;
    }
}

/* Adds the oldest share to the tile's sums. */
static void nsa__backward_share(const nsa__backward *f, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    const int32_t oldest = f->oldest, tile = f->pending_tile[oldest], keys = p->cut.tile;
    for (int i = 0; i < 2; i++) {
        if (!job->sum[i] || f->at_once) continue;
        const nsa__result sums = nsa__backward_sums(f, job, i, (ptrdiff_t)tile * keys);
        p->tiles->join(keys, nsa__operand_at(p, i)->wide, nsa__share(f, p, i, oldest), &sums);
    }
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
   task may come back in another thread, whose scratch does not have its masks: the step that needs
   them reads the tile. */
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
        it->tile = nsa__tile_iter_peek(it, job);
        slot->started = 1;
    } else if (f->pending && nsa__may_enter(ordered, slot->task, f->pending_last[f->oldest])) {
        nsa__write(ordered->progress + slot->task, nsa__backward_add(f, job));
    } else if (it->tile < it->tile_end) {
        nsa__tile_iter_read(it, job);
        nsa__backward_tile(f, job, nsa__may_enter(ordered, slot->task, it->tile));
        it->tile = nsa__tile_iter_peek(it, job);
        if (it->tile >= it->tile_end) nsa__backward_end(f, job);
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
static void nsa__key_gradient_add(const nsa__head_job *job, int tile, int i) {
    const nsa__attend_plan *p = job->plan;
    const nsa__operand *o = nsa__operand_at(p, i);
    const nsa_tensor *to = i == NSA__OF_K ? &p->dx->k : &p->dx->v;
    int begin = tile * p->cut.tile, end = (int)nsa__min((int64_t)begin + p->cut.tile, job->keys);
    for (int key = begin; job->sum[i] && key < end; key++) {
        nsa_real *row = job->sum[i] + (ptrdiff_t)key * o->wide;
        void *added = nsa__walk_keys(job, to, o->width, key, end);
        for (int c = 0; job->nonfinite_keys[tile] >> (key - begin) & 1 && c < o->width; c++)
            row[c] = nsa__nan();
        nsa__add(to->dtype, added, nsa__sum_scale(o), row, o->width);
    }
}

/* The last step: a tile's sums go to dx.k and dx.v, when all tasks have added to them. */
static void nsa__key_gradient_task(const void *context, int64_t nth, void *scratch) {
    const nsa__head_job *job = nsa__job_of(context, &nth);
    const nsa__attend_plan *p = job->plan;
    int tile = job->tile_begin + (int)nth;
    (void)scratch;
    if (job->head % p->lists_per_kv_head != p->lists_per_kv_head - 1) return;
    if (job->listed && !job->listed[tile]) return;
    for (int i = 0; i < 2; i++) nsa__key_gradient_add(job, tile, i);
}

/* The order of these jobs' tasks. nsa__backward_heads sets `tasks` when it knows the queries. */
static nsa__ordered nsa__backward_ordered(const nsa__head_job *jobs) {
    nsa__arena scratch = {NULL, 0}, slot = {NULL, 0};
    nsa__backward_at(jobs->plan, NULL, &scratch, &slot);
    const nsa__ordered ordered = {0,         jobs->heads, jobs->progress, jobs, nsa__backward_step,
                                  slot.used, scratch.used};
    return ordered;
}

static void nsa__backward_layout(nsa__head_job *jobs, const nsa__attend_plan *p,
                                 nsa__arena *shared) {
    const int gathers = nsa__plan_gathers(p), each = gathers ? 1 : p->cut.task_queries;
    int64_t tasks = nsa__max(p->cut.least_tasks, nsa__ceil_div(p->d->count, each));
    int32_t *progress = (int32_t *)nsa__alloc(shared, p->cut.head_slots * tasks, sizeof *progress);
    for (int i = 0; i < p->cut.head_slots; i++) {
        nsa__head_job *job = &jobs[i];
        *job = nsa__job_make(p);
        job->progress = progress;
        const int64_t keys = nsa__alloc_keys(job, shared);
        job->rows_over[NSA__OF_K] = nsa__alloc_reals(shared, keys * p->k.wide);
        job->columns[NSA__OF_V] = nsa__alloc_reals(shared, keys * p->d->dim_v);
        job->nonfinite_keys =
            (uint64_t *)nsa__alloc(shared, keys / p->cut.tile, sizeof *job->nonfinite_keys);
        for (int j = 0; j < 2; j++) {
            const nsa__operand *o = nsa__operand_at(p, j);
            if (gathers) job->listed_rows[j] = nsa__alloc_reals(shared, keys * o->stride);
            job->sum[j] = nsa__alloc_reals(shared, keys * o->wide);
        }
        if (p->dx && !p->dx->v.data) job->sum[NSA__OF_V] = NULL;
        if (p->dx && !p->dx->k.data) job->sum[NSA__OF_K] = NULL;
    }
}

/* Plans for `x` and `dx`, which are NULL in a size query. d has all heads of `whole` or some: a
   head's tasks are the same whichever heads are beside it. */
static nsa__attend_plan nsa__backward_plan(const nsa_attend *dx, const nsa_attend *x,
                                           const nsa_desc *d, nsa__branch branch,
                                           const nsa_desc *whole) {
    const int lists = nsa__traits_of[branch].lists;
    nsa__attend_plan p = nsa__attend_plan_of(x, dx, d, branch, lists, nsa__heads_near(whole));
    p.cut = nsa__backward_schedule(p.cut, d, branch, p.group);
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

/* ---- Compression --------------------------------------------------------------------------------
   Twin: kernels/compress.cuh. Not here: how many compressed rows there are (index.h). */
#pragma once
#include "threads.h"
#include "tiles.h"

typedef struct nsa__compress_job {
    const nsa_compress *x, *dx;
    const nsa_desc *d;
    const nsa__tiles *tiles;
    nsa__seq seq;
    int head;
    int ring;            /* a decoding cache's raw rows; 0: straight */
    nsa_real *w1, *w1_t; /* mlp, of `head`: (hidden, l D) and its transpose */
    nsa_real *w2, *w2_t; /* mlp, of `head`: (D, hidden) and its transpose */
    nsa_real *act, *dh;  /* mlp backward, of every compressed row of `head`: silu(h) and dh */
    int64_t rows, row;   /* rows of act and dh, and where those of `seq` begin */
    nsa_real *sum[NSA__PARAMETERS]; /* of the gradients, of their parameters' shapes */
    nsa_real *dh_sum; /* mlp backward: (hidden), the sum of dh over all rows of `head` */
} nsa__compress_job;

/* Blocks of a task, and tokens of a task that gathers dx. */
enum { NSA__CMP_ROWS = 64, NSA__CMP_TOKENS = 64 };

/* Row `row` of a parameter of one head; zeros if the parameter is absent: pos, b1 and b2 are
   optional. */
static void nsa__load_parameter(nsa_real *to, const nsa_tensor *x, int head, int64_t row, int n) {
    if (x->data)
        nsa__load(to, x->dtype, nsa__row(x, 0, row, head), n);
    else
        memset(to, 0, (size_t)n * sizeof *to);
}

/* n rows of a task's sums begin with the bias. */
static void nsa__load_bias(nsa_real *to, const nsa_tensor *x, int head, int n, int width) {
    for (int i = 0; i < n; i++, to += width) nsa__load_parameter(to, x, head, 0, width);
}

/* Stores the rows of blocks begin .. end - 1. */
static void nsa__store_blocks(const nsa__compress_job *p, int64_t begin, int64_t end,
                              const nsa_real *from) {
    const nsa_tensor *out = &p->x->out;
    for (int64_t i = begin; i < end; i++, from += p->x->dim)
        nsa__store(out->dtype, nsa__key_row(&p->seq.cmp, out, i, p->head), from, p->x->dim);
}

/* Loads the row of dout of a block. */
static void nsa__load_dout(const nsa__compress_job *p, nsa_real *to, int64_t block) {
    const nsa_tensor *dout = &p->dx->out;
    nsa__load(to, dout->dtype, nsa__key_row(&p->seq.cmp, dout, block, p->head), p->x->dim);
}

/* The row of x of a token, which counts from the start of the sequence. */
static const void *nsa__compress_input(const nsa__compress_job *p, int64_t token) {
    return nsa__key_row(&p->seq.keys, &p->x->x, token, p->head);
}

/* The first block to compute. If tokens have been appended, those before query `first` have their
   blocks. */
static int nsa__compress_begin(const nsa_desc *d, const nsa__seq *seq) {
    return d->firsts ? nsa_cmp_count(d, seq->first) : 0;
}

/* A task's own copy of the job, for the sequence and head of the task. */
static nsa__compress_job nsa__compress_job_of(const nsa__compress_job *all, const nsa__seq *seq,
                                              int head) {
    nsa__compress_job p = *all;
    p.seq = *seq;
    p.seq.keys.ring = p.ring;
    p.head = head;
    return p;
}

/* -- mean and conv: Eq. 7 with phi a weighted sum of the l rows, each channel for itself --
   out[i][c] = sum_j w[j][c] x[i d + j][c] + b[c], w = 1 / l for mean. Tap j of a block is its token
   i d + j. */

/* The weights w[j][c] of tap j for all channels. */
static void nsa__load_taps(const nsa__compress_job *p, nsa_real *w, int j) {
    if (p->x->phi == NSA_PHI_CONV)
        nsa__load_parameter(w, &p->x->w1, p->head, j, p->x->dim);
    else
        for (int c = 0; c < p->x->dim; c++) w[c] = (nsa_real)(1.0 / p->d->cmp_block);
}

/* Taps are the outer loop, because a tap's weights are then loaded once for all blocks of the task.
   A sum still runs over ascending j, so its bits depend on its own block alone. Neighbouring tasks
   are those of neighbouring heads, whose rows share a page. */
static void nsa__filter_task(const void *job, const nsa__seq *seq, int64_t nth, void *scratch) {
    const nsa__compress_job *all = (const nsa__compress_job *)job;
    const int heads = all->d->kv_heads;
    const nsa__compress_job of_head = nsa__compress_job_of(all, seq, (int)(nth % heads));
    const nsa__compress_job *p = &of_head;
    const nsa_compress *x = p->x;
    nsa_real w[NSA__MAX_DIM], row[NSA__MAX_DIM], *out = (nsa_real *)scratch;
    int64_t begin = nsa__compress_begin(p->d, seq) + nth / heads * NSA__CMP_ROWS;
    int64_t end = nsa__min(p->seq.cmp_tokens, begin + NSA__CMP_ROWS);
    nsa__load_bias(out, x->phi == NSA_PHI_CONV ? &x->b1 : &nsa__no_view, p->head,
                   (int)(end - begin), x->dim);
    for (int j = 0; j < p->d->cmp_block; j++) {
        nsa__load_taps(p, w, j);
        for (int64_t i = begin; i < end; i++) {
            nsa__load(row, x->x.dtype, nsa__compress_input(p, i * p->d->cmp_stride + j), x->dim);
            for (int c = 0; c < x->dim; c++) out[(i - begin) * x->dim + c] += w[c] * row[c];
        }
    }
    nsa__store_blocks(p, begin, end, out);
}

/* dx[t][c] = sum over the blocks i that cover t of w[t - i d][c] dout[i][c]: gathered by token, so
   that no two tasks add to one row. i d <= t < i d + l, so (t - l) / d < i <= t / d. The case t < l
   is apart, because C rounds a negative quotient towards 0. */
static void nsa__filter_input_gradient_task(const void *context, int64_t nth, void *scratch) {
    const nsa__compress_job *p = (const nsa__compress_job *)context;
    const nsa_tensor *to = &p->dx->x;
    nsa_real w[NSA__MAX_DIM], row[NSA__MAX_DIM], sum[NSA__MAX_DIM];
    const int dim = p->x->dim, l = p->d->cmp_block, stride = p->d->cmp_stride;
    int64_t last = nsa__min(p->seq.tokens, (nth + 1) * NSA__CMP_TOKENS);
    (void)scratch;
    for (int64_t t = nth * NSA__CMP_TOKENS; t < last; t++) {
        const int64_t begin = t < l ? 0 : (t - l) / stride + 1;
        const int64_t end = nsa__min(p->seq.cmp_tokens, t / stride + 1);
        if (begin >= end) continue;
        memset(sum, 0, sizeof sum);
        for (int64_t i = begin; i < end; i++) {
            nsa__load_taps(p, w, (int)(t - i * stride));
            nsa__load_dout(p, row, i);
            for (int c = 0; c < dim; c++) sum[c] += w[c] * row[c];
        }
        nsa__add(to->dtype, nsa__key_row(&p->seq.keys, to, t, p->head), 1, sum, dim);
    }
}

/* Task j: dw[j][c] += sum_i dout[i][c] x[i d + j][c]; task l: db[c] += sum_i dout[i][c]. */
static void nsa__conv_parameter_gradient_task(const void *context, int64_t j, void *scratch) {
    const nsa__compress_job *p = (const nsa__compress_job *)context;
    nsa_real row[NSA__MAX_DIM], grad[NSA__MAX_DIM];
    int dim = p->x->dim, bias = j == p->d->cmp_block;
    nsa_real *sum = bias ? p->sum[NSA__B1] : p->sum[NSA__W1] + j * dim;
    (void)scratch;
    for (int64_t i = 0; i < p->seq.cmp_tokens; i++) {
        nsa__load_dout(p, grad, i);
        if (!bias)
            nsa__load(row, p->x->x.dtype, nsa__compress_input(p, i * p->d->cmp_stride + j), dim);
        for (int c = 0; c < dim; c++) sum[c] += bias ? grad[c] : grad[c] * row[c];
    }
}

/* -- mlp: h = w1 u + b1, out = w2 silu(h) + b2, u = flatten(x + pos) the l D numbers of a block --
   The u of all blocks would hold every token l / d times, so u is never built. h is a sum over
   the taps j: (x[i d + j] + pos[j]) times columns j D .. (j + 1) D of w1. For n blocks:
     h (n, hidden) = sum_j tap_j (n, D) w1_t[j D ..] (D, hidden) + b1
     out (n, D)    = silu(h) (n, hidden) w2_t (hidden, D) + b2
   Backward, in this order:
     act = silu(h), dh = (dout w2) silu'(h)           nsa__mlp_hidden_gradient_task
     dx[i d + j] += dh[i] w1[:, j]                    nsa__mlp_input_gradient_task
     dw1[:, j] += dh^T tap_j, dw2 += dout^T act       nsa__mlp_parameter_gradient_task
     db1 = sum dh, dpos = (sum dh) w1                 nsa__mlp_finish_sums */

static void nsa__transpose(nsa_real *to, const nsa_real *from, int rows, int columns) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            to[(ptrdiff_t)c * rows + r] = from[(ptrdiff_t)r * columns + c];
}

/* l D: the numbers of a block, and of a row of w1. */
static int nsa__flat(const nsa__compress_job *p) {
    return p->d->cmp_block * p->x->dim;
}

static void nsa__mlp_alloc_weights(nsa__compress_job *p, nsa__arena *a) {
    int64_t w1 = (int64_t)p->x->hidden * nsa__flat(p), w2 = (int64_t)p->x->hidden * p->x->dim;
    p->w1 = nsa__alloc_reals(a, w1);
    p->w1_t = nsa__alloc_reals(a, w1);
    p->w2 = nsa__alloc_reals(a, w2);
    p->w2_t = nsa__alloc_reals(a, w2);
}

/* Packs the parameters of one kv head, as they are and transposed, because the right operand of a
   product has contiguous rows. Forward uses the transposes, backward uses both. */
static void nsa__mlp_load_weights(const nsa__compress_job *p) {
    int flat = nsa__flat(p), hidden = p->x->hidden, dim = p->x->dim;
    for (int r = 0; r < hidden; r++)
        nsa__load_parameter(p->w1 + (ptrdiff_t)r * flat, &p->x->w1, p->head, r, flat);
    for (int r = 0; r < dim; r++)
        nsa__load_parameter(p->w2 + (ptrdiff_t)r * hidden, &p->x->w2, p->head, r, hidden);
    nsa__transpose(p->w1_t, p->w1, hidden, flat);
    nsa__transpose(p->w2_t, p->w2, dim, hidden);
}

/* One tap of the flattened input: row i of `to` is x[(begin + i) d + j] + pos[j]. */
static void nsa__mlp_load_tap(const nsa__compress_job *p, int64_t begin, int n, int j,
                              nsa_real *to) {
    nsa_real pos[NSA__MAX_DIM];
    int dim = p->x->dim;
    nsa__load_parameter(pos, &p->x->pos, p->head, j, dim);
    for (int i = 0; i < n; i++, to += dim) {
        const void *row = nsa__compress_input(p, (begin + i) * p->d->cmp_stride + j);
        nsa__load(to, p->x->x.dtype, row, dim);
        for (int c = 0; c < dim; c++) to[c] += pos[c];
    }
}

/* Blocks begin .. begin + n - 1 of a task, and scratch for NSA__CMP_ROWS of them: one tap of their
   inputs, h, and out or its gradient. */
typedef struct nsa__mlp_rows {
    int64_t begin;
    int n;
    nsa_real *tap, *h, *out;
} nsa__mlp_rows;

static void nsa__mlp_rows_alloc(nsa__mlp_rows *f, const nsa__compress_job *p, nsa__arena *a) {
    f->tap = nsa__alloc_reals(a, NSA__CMP_ROWS * p->x->dim);
    f->h = nsa__alloc_reals(a, (int64_t)NSA__CMP_ROWS * p->x->hidden);
    f->out = nsa__alloc_reals(a, NSA__CMP_ROWS * p->x->dim);
}

/* h of a task's blocks, before the SiLU. The sum begins with b1 and goes through the taps in
   order. */
static nsa__mlp_rows nsa__mlp_hidden(const nsa__compress_job *p, int64_t nth, void *scratch) {
    nsa__arena a = {(char *)scratch, 0};
    nsa__mlp_rows f;
    int hidden = p->x->hidden, dim = p->x->dim;
    nsa__mlp_rows_alloc(&f, p, &a);
    f.begin = nsa__compress_begin(p->d, &p->seq) + nth * NSA__CMP_ROWS;
    f.n = (int)nsa__min(NSA__CMP_ROWS, p->seq.cmp_tokens - f.begin);
    nsa__load_bias(f.h, &p->x->b1, p->head, f.n, hidden);
    const nsa__matrix tap = {f.tap, dim, 1, NULL};
    const nsa__result h = nsa__result_at(f.h, hidden, 1);
    for (int j = 0; j < p->d->cmp_block; j++) {
        const nsa__matrix w1_t = {p->w1_t + (ptrdiff_t)j * dim * hidden, hidden, 1, NULL};
        nsa__mlp_load_tap(p, f.begin, f.n, j, f.tap);
        p->tiles->gemm(f.n, hidden, dim, &tap, &w1_t, &h);
    }
    return f;
}

/* out = w2 silu(h) + b2 for up to NSA__CMP_ROWS blocks; silu(h) = h sigmoid(h). */
static void nsa__mlp_forward_task(const void *job, const nsa__seq *seq, int64_t nth,
                                  void *scratch) {
    const nsa__compress_job *all = (const nsa__compress_job *)job;
    const nsa__compress_job of_seq = nsa__compress_job_of(all, seq, all->head), *p = &of_seq;
    const nsa__mlp_rows f = nsa__mlp_hidden(p, nth, scratch);
    int hidden = p->x->hidden, dim = p->x->dim;
    for (int i = 0; i < f.n * hidden; i++) f.h[i] *= nsa__sigmoid(f.h[i]);
    nsa__load_bias(f.out, &p->x->b2, p->head, f.n, dim);
    const nsa__matrix act = {f.h, hidden, 1, NULL}, w2_t = {p->w2_t, dim, 1, NULL};
    const nsa__result out = nsa__result_at(f.out, dim, 1);
    p->tiles->gemm(f.n, dim, hidden, &act, &w2_t, &out);
    nsa__store_blocks(p, f.begin, f.begin + f.n, f.out);
}

/* act = silu(h), dact = dout w2, dh = dact silu'(h), with
     silu'(h) = sigmoid(h) (1 + h (1 - sigmoid(h))).
   h is computed again, because forward keeps nothing. dact is computed where dh will be. */
static void nsa__mlp_hidden_gradient_task(const void *context, int64_t nth, void *scratch) {
    const nsa__compress_job *p = (const nsa__compress_job *)context;
    const nsa__mlp_rows f = nsa__mlp_hidden(p, nth, scratch);
    int hidden = p->x->hidden, dim = p->x->dim;
    const int64_t first = (p->row + f.begin) * hidden;
    nsa_real *act = p->act + first, *dh = p->dh + first;
    for (int i = 0; i < f.n; i++) nsa__load_dout(p, f.out + (ptrdiff_t)i * dim, f.begin + i);
    const nsa__matrix douts = {f.out, dim, 1, NULL}, w2 = {p->w2, hidden, 1, NULL};
    const nsa__result dact = nsa__result_at(dh, hidden, 0);
    p->tiles->gemm(f.n, hidden, dim, &douts, &w2, &dact);
    for (ptrdiff_t i = 0; i < (ptrdiff_t)f.n * hidden; i++) {
        nsa_real h = f.h[i], sigmoid = nsa__sigmoid(h);
        act[i] = h * sigmoid;
        dh[i] *= sigmoid * (1 + h * (1 - sigmoid));
    }
}

/* dx[i d + j] += dh[i] w1[:, j], gathered by chunks of tokens, because blocks overlap and two tasks
   must not add to one row. For each tap j the task takes the blocks whose token i d + j lies in its
   chunk: ceil((begin - j) / d) <= i < ceil((end - j) / d). Their rows of the sum are d tokens
   apart. */
static void nsa__mlp_input_gradient_task(const void *context, int64_t nth, void *scratch) {
    const nsa__compress_job *p = (const nsa__compress_job *)context;
    nsa_real *sum = (nsa_real *)scratch;
    int hidden = p->x->hidden, dim = p->x->dim, stride = p->d->cmp_stride;
    int64_t chunk = (int64_t)NSA__CMP_ROWS * stride, begin = nth * chunk;
    int64_t end = nsa__min(p->seq.tokens, begin + chunk);
    memset(sum, 0, (size_t)(end - begin) * (size_t)dim * sizeof *sum);
    for (int j = 0; j < p->d->cmp_block; j++) {
        int64_t from = nsa__max(0, nsa__ceil_div(nsa__max(0, begin - j), stride));
        int64_t to = nsa__min(p->seq.cmp_tokens, nsa__ceil_div(nsa__max(0, end - j), stride));
        if (from >= to) continue;
        const nsa__matrix dh = {p->dh + (p->row + from) * hidden, hidden, 1, NULL};
        const nsa__matrix w1 = {p->w1 + (ptrdiff_t)j * dim, nsa__flat(p), 1, NULL};
        nsa_real *first = sum + (from * stride + j - begin) * dim;
        const nsa__result dx = nsa__result_at(first, (ptrdiff_t)stride * dim, 1);
        p->tiles->gemm((int)(to - from), dim, hidden, &dh, &w1, &dx);
    }
    for (int64_t t = begin; t < end; t++)
        nsa__add(p->dx->x.dtype, nsa__key_row(&p->seq.keys, &p->dx->x, t, p->head), 1,
                 sum + (t - begin) * dim, dim);
}

/* Task j < l: dw1[:, j] += dh^T (x + pos)[j], columns that no other task writes. Task l: dw2 +=
   dout^T act, db2 += sum dout, dh_sum += sum dh, of which db1 and dpos are made. */
static void nsa__mlp_parameter_gradient_task(const void *context, int64_t j, void *scratch) {
    const nsa__compress_job *p = (const nsa__compress_job *)context;
    nsa_real *rows = (nsa_real *)scratch;
    int hidden = p->x->hidden, dim = p->x->dim, flat = nsa__flat(p);
    for (int64_t begin = 0; begin < p->seq.cmp_tokens; begin += NSA__CMP_ROWS) {
        int n = (int)nsa__min(NSA__CMP_ROWS, p->seq.cmp_tokens - begin);
        const nsa_real *dh = p->dh + (p->row + begin) * hidden,
                       *act = p->act + (p->row + begin) * hidden;
        if (j < p->d->cmp_block) {
            nsa__mlp_load_tap(p, begin, n, (int)j, rows);
            const nsa__matrix dh_t = {dh, 1, hidden, NULL}, tap = {rows, dim, 1, NULL};
            const nsa__result dw1 = nsa__result_at(p->sum[NSA__W1] + j * dim, flat, 1);
            p->tiles->gemm(hidden, dim, n, &dh_t, &tap, &dw1);
            continue;
        }
        for (int i = 0; i < n; i++) {
            nsa_real *row = rows + (ptrdiff_t)i * dim;
            nsa__load_dout(p, row, begin + i);
            for (int c = 0; c < dim; c++) p->sum[NSA__B2][c] += row[c];
            for (int c = 0; c < hidden; c++) p->dh_sum[c] += dh[(ptrdiff_t)i * hidden + c];
        }
        const nsa__matrix dout_t = {rows, 1, dim, NULL}, acts = {act, hidden, 1, NULL};
        const nsa__result dw2 = nsa__result_at(p->sum[NSA__W2], hidden, 1);
        p->tiles->gemm(dim, hidden, n, &dout_t, &acts, &dw2);
    }
}

/* -- sums of the parameter gradients, and the entry points -- */

/* The sums have the shapes of nsa__parameters for one head. A pointer that a phi does not use stays
   NULL. */
static void nsa__compress_alloc_sums(nsa__compress_job *p, nsa__arena *a) {
    nsa__parameter list[NSA__PARAMETERS];
    for (int i = 0, count = nsa__parameters(NULL, p->x, p->d, list); i < count; i++)
        p->sum[i] = nsa__alloc_reals(a, list[i].rows * list[i].width);
    if (p->x->phi != NSA_PHI_MLP) return;
    p->dh_sum = nsa__alloc_reals(a, p->x->hidden);
    p->act = nsa__alloc_reals(a, p->rows * p->x->hidden);
    p->dh = nsa__alloc_reals(a, p->rows * p->x->hidden);
}

/* The job of a call. In backward act and dh of all compressed rows of a kv head are kept, so that h
   is computed once. Its three steps run one after another, so a thread's scratch is the larger of
   their needs. */
static nsa__compress_job nsa__compress_plan(const nsa_compress *x, const nsa_desc *d, int backward,
                                            nsa__arena *shared, nsa__arena *scratch) {
    const int mlp = x->phi == NSA_PHI_MLP;
    nsa__compress_job p;
    nsa__mlp_rows f;
    memset(&p, 0, sizeof p);
    p.x = x;
    p.d = d;
    p.tiles = nsa__tiles_of(d->isa);
    p.rows = nsa__cmp_rows(d);
    if (backward) nsa__compress_alloc_sums(&p, shared);
    if (mlp) nsa__mlp_alloc_weights(&p, shared);
    if (mlp) nsa__mlp_rows_alloc(&f, &p, scratch);
    if (!mlp && !backward) nsa__alloc_reals(scratch, NSA__CMP_ROWS * x->dim);
    nsa__arena tokens = {NULL, 0};
    if (mlp && backward) nsa__alloc_reals(&tokens, (int64_t)NSA__CMP_ROWS * d->cmp_stride * x->dim);
    scratch->used = nsa__larger(scratch->used, tokens.used);
    return p;
}

/* Tasks of up to NSA__CMP_ROWS blocks of a head and sequence. If tokens are appended, only the
   blocks that they complete are computed. */
static int64_t nsa__compress_tasks(const void *job, const nsa__seq *seq) {
    const nsa_desc *d = ((const nsa__compress_job *)job)->d;
    return nsa__ceil_div(seq->cmp_tokens - nsa__compress_begin(d, seq), NSA__CMP_ROWS);
}

static int64_t nsa__filter_tasks(const void *job, const nsa__seq *seq) {
    return ((const nsa__compress_job *)job)->d->kv_heads * nsa__compress_tasks(job, seq);
}

/* A network's weights are one head's at a time, and not loaded where no block is complete: a step
   of decoding has the earlier rows in its cache, so a token costs 1 / d of one. */
static void nsa__compress_forward_run(nsa__compress_job *p, const nsa__team *team) {
    const nsa__by_seq filters = {p->d, p, nsa__filter_tasks, nsa__filter_task, 1, 0};
    const nsa__by_seq networks = {p->d, p, nsa__compress_tasks, nsa__mlp_forward_task, 1, 0};
    if (p->x->phi != NSA_PHI_MLP)
        nsa__run_by_seq(team, filters);
    else if (nsa__all_tasks(&networks))
        for (p->head = 0; p->head < p->d->kv_heads; p->head++) {
            nsa__mlp_load_weights(p);
            nsa__run_by_seq(team, networks);
        }
}

/* The gradients of one sequence and head, those of the parameters into their sums. */
static void nsa__compress_backward_sequence(nsa__compress_job *p, const nsa__team *team,
                                            int parameters) {
    int mlp = p->x->phi == NSA_PHI_MLP;
    if (p->seq.cmp_tokens == 0) return;
    if (mlp)
        nsa__run(team, nsa__ceil_div(p->seq.cmp_tokens, NSA__CMP_ROWS),
                 nsa__mlp_hidden_gradient_task, p);
    if (p->dx->x.data && mlp)
        nsa__run(team, nsa__ceil_div(p->seq.tokens, (int64_t)NSA__CMP_ROWS * p->d->cmp_stride),
                 nsa__mlp_input_gradient_task, p);
    if (p->dx->x.data && !mlp)
        nsa__run(team, nsa__ceil_div(p->seq.tokens, NSA__CMP_TOKENS),
                 nsa__filter_input_gradient_task, p);
    if (parameters)
        nsa__run(team, p->d->cmp_block + 1,
                 mlp ? nsa__mlp_parameter_gradient_task : nsa__conv_parameter_gradient_task, p);
}

/* db1 = sum dh. pos is added to every block alike, so dpos = sum_i dh[i] w1 = (sum_i dh[i]) w1: one
   row times w1 instead of N rows. */
static void nsa__mlp_finish_sums(const nsa__compress_job *p) {
    const nsa__matrix dh_sum = {p->dh_sum, p->x->hidden, 1, NULL};
    const nsa__matrix w1 = {p->w1, nsa__flat(p), 1, NULL};
    const nsa__result dpos = nsa__result_at(p->sum[NSA__POS], nsa__flat(p), 1);
    p->tiles->gemm(1, nsa__flat(p), p->x->hidden, &dh_sum, &w1, &dpos);
    for (int c = 0; c < p->x->hidden; c++) p->sum[NSA__B1][c] += p->dh_sum[c];
}

/* Heads are the outer loop, because packed weights and sums are those of one head. A gradient with
   head stride 0 belongs to all heads: its sum starts at the first and is added after the last. */
static void nsa__compress_backward_run(nsa__compress_job *p, const nsa__team *team) {
    nsa__parameter list[NSA__PARAMETERS];
    int count = nsa__parameters(p->dx, p->x, p->d, list);
    int parameters = 0; /* 1: the gradient of one is asked for */
    for (int i = 0; i < count; i++) parameters |= list[i].dx->data != NULL;
    for (p->head = 0; p->head < p->d->kv_heads; p->head++) {
        for (int i = 0; i < count; i++) /* a head stride of 0: the sum runs on over the heads */
            if (p->head == 0 || list[i].dx->head != 0)
                memset(p->sum[i], 0,
                       (size_t)list[i].rows * (size_t)list[i].width * sizeof(nsa_real));
        if (p->x->phi == NSA_PHI_MLP) {
            nsa__mlp_load_weights(p);
            memset(p->dh_sum, 0, (size_t)p->x->hidden * sizeof *p->dh_sum);
        }
        p->row = 0;
        for (p->seq = nsa__seq_begin(p->d); p->seq.nth < p->d->batch;
             nsa__seq_next(p->d, &p->seq)) {
            nsa__compress_backward_sequence(p, team, parameters);
            p->row += p->seq.cmp_tokens;
        }
        if (p->x->phi == NSA_PHI_MLP) nsa__mlp_finish_sums(p);
        for (int i = 0; i < count; i++) {
            if (!list[i].dx->data || (p->head + 1 < p->d->kv_heads && list[i].dx->head == 0))
                continue;
            for (int64_t r = 0; r < list[i].rows; r++)
                nsa__add(list[i].dx->dtype, nsa__row(list[i].dx, 0, r, p->head), 1,
                         p->sum[i] + r * list[i].width, list[i].width);
        }
    }
}

/* The limits let NSA__CMP_ROWS rows of l D or hidden numbers be counted by an int. */
static nsa_status nsa__compress_check_sizes(const nsa_compress *x, const nsa_desc *d, int base) {
    if ((unsigned)x->phi > NSA_PHI_MLP) return nsa__error(NSA_ERROR_OPTION, base + NSA__AT_phi);
    if (x->dim < 1 || x->dim > NSA__MAX_DIM) return nsa__error(NSA_ERROR_SIZE, base + NSA__AT_dim);
    if (x->phi == NSA_PHI_MLP && x->hidden < 1)
        return nsa__error(NSA_ERROR_SIZE, base + NSA__AT_hidden);
    int64_t hidden = x->phi == NSA_PHI_MLP ? x->hidden : 1;
    if ((int64_t)d->cmp_block * x->dim > INT_MAX / 64 ||
        !nsa__fits(hidden, d->cmp_block, x->dim, 8) ||
        !nsa__fits(hidden, d->batch, nsa_cmp_count(d, d->tokens), 8) || hidden > INT_MAX / 64)
        return nsa__error(NSA_ERROR_OVERFLOW, base + NSA__AT_hidden);
    return NSA_OK;
}

static nsa_status nsa__compress_check_arguments(const nsa_compress *x, const nsa_desc *d) {
    nsa_desc own;
    NSA__CHECK(nsa_desc_check(nsa__desc_using(d, NSA__USES_CMP, &own)));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    return nsa__compress_check_sizes(x, d, 0);
}

static nsa_status nsa__compress_go(const nsa_compress *dx, const nsa_compress *x, const nsa_desc *d,
                                   int ring, void *workspace, size_t bytes) {
    nsa__team team;
    nsa__arena shared = nsa__arena_at(workspace), scratch = {NULL, 0};
    nsa__compress_job p = nsa__compress_plan(x, d, dx != NULL, &shared, &scratch);
    p.dx = dx;
    p.ring = ring;
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, shared.used, scratch.used));
    (dx ? nsa__compress_backward_run : nsa__compress_forward_run)(&p, &team);
    return NSA_OK;
}

static size_t nsa__compress_bytes(const nsa_compress *x, const nsa_desc *d, int backward,
                                  int threads) {
    nsa__arena shared = {NULL, 0}, scratch = {NULL, 0};
    nsa__compress_plan(x, d, backward, &shared, &scratch);
    return nsa__bytes_for(shared.used, threads, scratch.used);
}

NSA_API size_t nsa_compress_forward_workspace_size(const nsa_compress *x, const nsa_desc *d) {
    if (nsa__compress_check_arguments(x, d) != NSA_OK) return 0;
    return nsa__compress_bytes(x, d, 0, nsa__threads(d));
}

NSA_API nsa_status nsa_compress_forward(const nsa_compress *x, const nsa_desc *d, void *workspace,
                                        size_t bytes) {
    NSA__CHECK(nsa__compress_check_arguments(x, d));
    const nsa__checked c = nsa__checked_of(d, 1, 0);
    NSA__CHECK(nsa__check_phi(&c, x, 0));
    return nsa__compress_go(NULL, x, d, 0, workspace, bytes);
}

NSA_API size_t nsa_compress_backward_workspace_size(const nsa_compress *x, const nsa_desc *d) {
    if (nsa__compress_check_arguments(x, d) != NSA_OK || nsa__check_backward(d, 1) != NSA_OK)
        return 0;
    return nsa__compress_bytes(x, d, 1, nsa__threads(d));
}

NSA_API nsa_status nsa_compress_backward(const nsa_compress *dx, const nsa_compress *x,
                                         const nsa_desc *d, void *workspace, size_t bytes) {
    NSA__CHECK(nsa__compress_check_arguments(x, d));
    NSA__CHECK(nsa__check_backward(d, 1));
    const nsa__checked c = nsa__checked_of(d, 0, 0);
    NSA__CHECK(nsa__check_phi(&c, x, 0));
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(nsa__check_view(&dx->out, nsa__key_shape(d, 1, x->dim), NSA__TENSORS, 0,
                               NSA__AT_out | NSA__GRADIENT));
    NSA__CHECK(nsa__check_phi_gradient(&nsa__cpu, dx, x, d, 0));
    return nsa__compress_go(dx, x, d, 0, workspace, bytes);
}

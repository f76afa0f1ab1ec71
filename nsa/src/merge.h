/* ---- Merge --------------------------------------------------------------------------------------
   Twin: kernels/merge.cuh. Not here: attention. */
#pragma once
#include "threads.h"

typedef struct nsa__merge_job {
    const nsa_merge *x, *dx;
    const nsa_desc *d;
} nsa__merge_job;

/* A row of a gradient that several rows of x may share, and its sum so far. */
typedef struct nsa__merge_sum {
    void *row;
    double *of;
} nsa__merge_sum;

/* Recognised by its bits, because -ffast-math knows no infinity. */
static int nsa__is_minus_infinity(nsa_real x) {
    const nsa_real infinity = nsa__minus_infinity();
    return memcmp(&x, &infinity, sizeof x) == 0;
}

/* The parts' shares w[2] of one row, and lse of both: w_a = exp(lse_a - lse). A part without keys
   leaves w = 1 and lse of the other as they are, to the bit. Returns the parts that count, as bits,
   because under -ffast-math a NaN share may compare equal to 0. */
static int nsa__merge_weights(nsa_real a, nsa_real b, nsa_real w[2], nsa_real *lse) {
    int no_a = nsa__is_minus_infinity(a), no_b = nsa__is_minus_infinity(b);
    w[0] = no_a ? 0 : 1;
    w[1] = no_b ? 0 : 1;
    *lse = no_a ? b : a;
    if (no_a || no_b) return (no_a ? 0 : 1) | (no_b ? 0 : 2);
    if (!nsa__is_finite((double)a) || !nsa__is_finite((double)b)) {
        *lse = w[0] = w[1] = nsa__nan();
        return 3;
    }
    /* lse = max + ln(1 + exp(min - max)): exp of a number <= 0 cannot overflow. a < b is the index
       of the larger part. */
    double least = exp(-fabs((double)a - (double)b)), most = 1 / (1 + least);
    w[a < b] = (nsa_real)most;
    w[a >= b] = (nsa_real)(least * most);
    *lse = (nsa_real)((double)(a < b ? b : a) + log1p(least));
    return (w[0] > 0 ? 1 : 0) | (w[1] > 0 ? 2 : 0);
}

/* One real number of a view. */
static nsa_real nsa__load_real(const nsa_tensor *x, int64_t batch, int64_t row, int64_t head) {
    nsa_real value;
    nsa__load(&value, x->dtype, nsa__row(x, batch, row, head), 1);
    return value;
}

/* out = w_a out_a + w_b out_b, lse = ln(exp lse_a + exp lse_b) */
static void nsa__merge_forward_row(const nsa__merge_job *job, int64_t batch, int64_t row,
                                   int head) {
    const nsa_merge *x = job->x;
    const nsa_tensor *part[2] = {&x->out_a, &x->out_b};
    nsa_real w[2], lse, out[NSA__MAX_DIM];
    int parts = nsa__merge_weights(nsa__load_real(&x->lse_a, batch, row, head),
                                   nsa__load_real(&x->lse_b, batch, row, head), w, &lse);
    memset(out, 0, (size_t)job->d->dim_v * sizeof *out);
    if (parts == 1 || parts == 2) /* as it is: a sum would lose the sign of a 0 */
        nsa__load(out, part[parts / 2]->dtype, nsa__row(part[parts / 2], batch, row, head),
                  job->d->dim_v);
    for (int i = 0; parts == 3 && i < 2; i++)
        nsa__add_to(out, w[i], part[i]->dtype, nsa__row(part[i], batch, row, head), job->d->dim_v);
    nsa__store(x->out.dtype, nsa__row(&x->out, batch, row, head), out, job->d->dim_v);
    nsa__store(x->lse.dtype, nsa__row(&x->lse, batch, row, head), &lse, 1);
}

/* Adds factor * from to a row of a gradient, or to `sum`, which goes to its row, rounded once, when
   another row comes, or none. */
static void nsa__merge_add(nsa__merge_sum *sum, const nsa_tensor *x, void *row, nsa_real factor,
                           const nsa_real *from, int n) {
    if (!sum) {
        nsa__add(x->dtype, row, factor, from, n);
        return;
    }
    if (sum->row && sum->row != row) {
        nsa_real whole[NSA__MAX_DIM];
        for (int c = 0; c < n; c++) whole[c] = (nsa_real)sum->of[c];
        nsa__add(x->dtype, sum->row, 1, whole, n);
    }
    if (sum->row != row) memset(sum->of, 0, (size_t)n * sizeof *sum->of);
    for (int c = 0; from && c < n; c++) sum->of[c] += (double)(factor * from[c]);
    sum->row = row;
}

/* w_a = exp(lse_a - lse), so dw_a / dlse_a = w_a w_b = -dw_b / dlse_a, dlse / dlse_a = w_a:
     dout_a = w_a dout,   dlse_a = w_a (w_b dout . (out_a - out_b) + dlse)
   and the same with a and b exchanged. `sums`: NULL, or of dout_a, dout_b, dlse_a and dlse_b. */
static void nsa__merge_backward_row(const nsa__merge_job *job, int64_t batch, int64_t row, int head,
                                    nsa__merge_sum *sums) {
    const nsa_merge *x = job->x, *dx = job->dx;
    const nsa_tensor *part[2] = {&x->out_a, &x->out_b}, *dpart[2] = {&dx->out_a, &dx->out_b},
                     *dlse_of[2] = {&dx->lse_a, &dx->lse_b};
    int dim_v = job->d->dim_v;
    nsa_real w[2], lse, along = 0, dout[NSA__MAX_DIM], out[2][NSA__MAX_DIM];
    int parts = nsa__merge_weights(nsa__load_real(&x->lse_a, batch, row, head),
                                   nsa__load_real(&x->lse_b, batch, row, head), w, &lse);
    if (!parts) return;
    nsa_real dlse = dx->lse.data ? nsa__load_real(&dx->lse, batch, row, head) : 0;
    nsa__load(dout, dx->out.dtype, nsa__row(&dx->out, batch, row, head), dim_v);
    for (int i = 0; i < 2; i++)
        if (parts >> i & 1)
            nsa__load(out[i], part[i]->dtype, nsa__row(part[i], batch, row, head), dim_v);
        else
            memset(out[i], 0, (size_t)dim_v * sizeof **out);
    for (int c = 0; c < dim_v; c++) along += dout[c] * (out[0][c] - out[1][c]);
    for (int i = 0; i < 2; i++) {
        if (!(parts >> i & 1)) continue;
        nsa_real sum = w[i] * ((i ? -along : along) * w[!i] + dlse);
        if (dpart[i]->data)
            nsa__merge_add(sums ? sums + i : NULL, dpart[i], nsa__row(dpart[i], batch, row, head),
                           w[i], dout, dim_v);
        if (dlse_of[i]->data)
            nsa__merge_add(sums ? sums + 2 + i : NULL, dlse_of[i],
                           nsa__row(dlse_of[i], batch, row, head), 1, &sum, 1);
    }
}

/* All rows of one head, whose gradients may share rows, in order: no bit depends on threads. */
static void nsa__merge_head_task(const void *context, int64_t head, void *scratch) {
    const nsa__merge_job *job = (const nsa__merge_job *)context;
    const nsa_tensor *to[] = {&job->dx->out_a, &job->dx->out_b, &job->dx->lse_a, &job->dx->lse_b};
    double out[2][NSA__MAX_DIM], lse[2];
    nsa__merge_sum sums[] = {{NULL, out[0]}, {NULL, out[1]}, {NULL, lse}, {NULL, lse + 1}};
    (void)scratch;
    for (nsa__seq seq = nsa__seq_begin(job->d); seq.nth < job->d->batch;
         nsa__seq_next(job->d, &seq))
        for (int64_t t = 0; t < seq.count; t++)
            nsa__merge_backward_row(job, seq.batch, seq.row + t, (int)head, sums);
    for (int i = 0; i < 4; i++)
        nsa__merge_add(&sums[i], to[i], NULL, 0, NULL, i < 2 ? job->d->dim_v : 1);
}

/* Rows of x and out are read and written in one step, so a task needs no scratch. */
static void nsa__merge_token(const void *context, const nsa__seq *seq, int64_t t, void *scratch) {
    const nsa__merge_job *job = (const nsa__merge_job *)context;
    (void)scratch;
    for (int h = 0; h < job->d->heads; h++) {
        if (job->dx)
            nsa__merge_backward_row(job, seq->batch, seq->row + t, h, NULL);
        else
            nsa__merge_forward_row(job, seq->batch, seq->row + t, h);
    }
}

/* Whether tokens, or sequences, share a row of a gradient: 0 no, 1 yes, 2 heads share it too. */
static int nsa__merge_sharers(const nsa_merge *dx, const nsa_desc *d) {
    const nsa_tensor *to[] = {&dx->out_a, &dx->out_b, &dx->lse_a, &dx->lse_b};
    const nsa__shape all = nsa__query_shape(d, 1, 1);
    int shared = 0, heads = 0;
    for (int i = 0; i < 4; i++) {
        if (!to[i]->data) continue;
        shared |= (!to[i]->token && all.rows > 1) || (!to[i]->batch && all.batch > 1);
        heads |= !to[i]->head && d->heads > 1;
    }
    return shared ? 1 + heads : 0;
}

static nsa_status nsa__merge_run(const nsa_merge *dx, const nsa_merge *x, const nsa_desc *d,
                                 int backward) {
    nsa__merge_job job;
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    nsa__checked c = nsa__checked_of(d, !backward, 0);
    c.sums = 1;
    NSA__CHECK(nsa__check_call(&c, nsa__merge_views, NSA__MERGE_VIEWS, dx, x));
    nsa__team team = {nsa__threads(d), NULL, 0};
    job.x = x;
    job.dx = dx;
    job.d = d;
    const int shared = backward ? nsa__merge_sharers(dx, d) : 0;
    if (shared > 1) team.threads = 1;
    if (shared)
        nsa__run(&team, d->heads, nsa__merge_head_task, &job);
    else
        nsa__run_tokens(&team, d, nsa__merge_token, &job);
    return NSA_OK;
}

NSA_API nsa_status nsa_merge_forward(const nsa_merge *x, const nsa_desc *d) {
    return nsa__merge_run(NULL, x, d, 0);
}
NSA_API nsa_status nsa_merge_backward(const nsa_merge *dx, const nsa_merge *x, const nsa_desc *d) {
    return nsa__merge_run(dx, x, d, 1);
}

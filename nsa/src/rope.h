/* ---- RoPE ---------------------------------------------------------------------------------------
   Twin: kernels/rope.cuh. Not here: frequencies, which both sides share (shared.h). */
#pragma once
#include "threads.h"

typedef struct nsa__rope_job {
    const nsa_rope *x, *dx; /* dx NULL: forward */
    const nsa_desc *d;
    nsa__seq seq;
    double frequency[NSA__MAX_DIM / 2]; /* of each pair, radians from one position to the next */
    double magnitude;
} nsa__rope_job;

/* Rotates one row: pair (a, b) becomes (a cos - b sin, b cos + a sin). The pair is numbers
   (2i, 2i + 1), or (i, i + dim/2) with NSA_ROPE_HALVES. With sign -1 the matrix is the transpose,
   which backward needs. */
static void nsa__rope_rotate(const nsa_rope *x, const double *cosine, const double *sine,
                             double sign, nsa_real *row) {
    int step = x->pairs == NSA_ROPE_HALVES ? 1 : 2,
        other = x->pairs == NSA_ROPE_HALVES ? x->dim / 2 : 1;
    for (int i = 0; i < x->dim / 2; i++) {
        double a = (double)row[step * i], b = (double)row[step * i + other];
        row[step * i] = (nsa_real)(a * cosine[i] - sign * b * sine[i]);
        row[step * i + other] = (nsa_real)(b * cosine[i] + sign * a * sine[i]);
    }
}

enum { NSA__ROPE_TOKENS = 16 }; /* tokens of a task */

/* Forward rotates x into out; backward rotates dout back and adds it to dx. Angles are computed
   once per token and serve all heads. They are doubles, because f32 has steps of 1/16 near an angle
   of 10^6 radians. */
static void nsa__rope_task(const void *context, int64_t nth, void *scratch) {
    const nsa__rope_job *p = (const nsa__rope_job *)context;
    const nsa_rope *x = p->x;
    double cosine[NSA__MAX_DIM / 2], sine[NSA__MAX_DIM / 2];
    nsa_real row[NSA__MAX_DIM];
    int64_t end = nsa__min(p->seq.count, (nth + 1) * NSA__ROPE_TOKENS);
    (void)scratch;
    for (int64_t t = nth * NSA__ROPE_TOKENS; t < end; t++) {
        double position = (double)(p->seq.first + t);
        if (x->positions.data)
            position = *(const int32_t *)nsa__row(&x->positions, p->seq.batch, p->seq.row + t, 0);
        for (int i = 0; i < x->dim / 2; i++) {
            cosine[i] = p->magnitude * cos(position * p->frequency[i]);
            sine[i] = p->magnitude * sin(position * p->frequency[i]);
        }
        for (int h = 0; h < x->heads; h++) {
            const nsa_tensor *from = p->dx ? &p->dx->out : &x->x;
            nsa__load(row, from->dtype, nsa__row(from, p->seq.batch, p->seq.row + t, h), x->dim);
            nsa__rope_rotate(x, cosine, sine, p->dx ? -1 : 1, row);
            const nsa_tensor *to = p->dx ? &p->dx->x : &x->out;
            void *at = nsa__row(to, p->seq.batch, p->seq.row + t, h);
            if (p->dx)
                nsa__add(to->dtype, at, 1, row, x->dim);
            else
                nsa__store(to->dtype, at, row, x->dim);
        }
    }
}

static nsa_status nsa__rope_check(const nsa_rope *x, const nsa_desc *d) {
    NSA__CHECK(nsa_desc_check(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    NSA__CHECK(nsa__rope_check_options(x));
    if (!nsa__fits(d->batch, d->tokens, x->heads, x->dim))
        return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_heads);
    if (!x->positions.data) return NSA_OK;
    return nsa__check_view(&x->positions, nsa__query_shape(d, 1, 1), NSA__INTS, 0,
                           NSA__AT_positions);
}

/* Frequencies are computed once per call, because pow is slow and they depend on the options alone.
   */
static void nsa__rope_run(const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d) {
    nsa__rope_job p;
    nsa__team team = {nsa__threads(d), NULL, 0};
    p.x = x;
    p.dx = dx;
    p.d = d;
    nsa__rope_frequencies(x, p.frequency, &p.magnitude);
    for (p.seq = nsa__seq_begin(d); p.seq.nth < d->batch; nsa__seq_next(d, &p.seq))
        nsa__run(&team, nsa__ceil_div(p.seq.count, NSA__ROPE_TOKENS), nsa__rope_task, &p);
}

NSA_API nsa_status nsa_rope_frequencies(const nsa_rope *x, double *frequencies, double *magnitude) {
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    NSA__CHECK(nsa__rope_check_options(x));
    if (!frequencies) return nsa__error(NSA_ERROR_NULL, NSA__AT_frequencies);
    if (!magnitude) return nsa__error(NSA_ERROR_NULL, NSA__AT_magnitude);
    nsa__rope_frequencies(x, frequencies, magnitude);
    return NSA_OK;
}

NSA_API nsa_status nsa_rope_forward(const nsa_rope *x, const nsa_desc *d) {
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    NSA__CHECK(nsa__rope_check(x, d));
    nsa__shape shape = nsa__query_shape(d, x->heads, x->dim);
    NSA__CHECK(nsa__check_view(&x->x, shape, NSA__TENSORS, 0, NSA__AT_x));
    NSA__CHECK(nsa__check_view(&x->out, shape, NSA__TENSORS, 1, NSA__AT_out));
    nsa__rope_run(NULL, x, d);
    return NSA_OK;
}

NSA_API nsa_status nsa_rope_backward(const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d) {
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    NSA__CHECK(nsa__rope_check(x, d));
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    nsa__shape shape = nsa__query_shape(d, x->heads, x->dim);
    NSA__CHECK(nsa__check_view(&dx->out, shape, NSA__TENSORS, 0, NSA__AT_out | NSA__GRADIENT));
    NSA__CHECK(nsa__check_gradient(&nsa__cpu, &dx->x, &x->x, shape, NSA__AT_x));
    if (dx->x.data) nsa__rope_run(dx, x, d);
    return NSA_OK;
}

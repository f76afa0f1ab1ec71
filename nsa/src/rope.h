/* ---- RoPE ---------------------------------------------------------------------------------------
   Twin: kernels/rope.cuh. Not here: frequencies, which both sides share (shared.h). */
#pragma once
#include "threads.h"

typedef struct nsa__rope_job {
    const nsa_rope *x, *dx;             /* dx NULL: forward */
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

/* Forward rotates x into out; backward rotates dout back and adds it to dx. Angles are computed
   once per token and serve all heads. They are doubles, because f32 has steps of 1/16 near an angle
   of 10^6 radians. */
static void nsa__rope_token(const void *job, const nsa__seq *seq, int64_t t, void *scratch) {
    const nsa__rope_job *p = (const nsa__rope_job *)job;
    const nsa_rope *x = p->x;
    const nsa_tensor *from = p->dx ? &p->dx->out : &x->x, *to = p->dx ? &p->dx->x : &x->out;
    double cosine[NSA__MAX_DIM / 2], sine[NSA__MAX_DIM / 2];
    double position = (double)(seq->first + t);
    nsa_real row[NSA__MAX_DIM];
    (void)scratch;
    if (x->positions.data)
        position = *(const int32_t *)nsa__row(&x->positions, seq->batch, seq->row + t, 0);
    for (int i = 0; i < x->dim / 2; i++) {
        cosine[i] = p->magnitude * cos(position * p->frequency[i]);
        sine[i] = p->magnitude * sin(position * p->frequency[i]);
    }
    for (int h = 0; h < x->heads; h++) {
        nsa__load(row, from->dtype, nsa__row(from, seq->batch, seq->row + t, h), x->dim);
        nsa__rope_rotate(x, cosine, sine, p->dx ? -1 : 1, row);
        void *at = nsa__row(to, seq->batch, seq->row + t, h);
        if (p->dx)
            nsa__add(to->dtype, at, 1, row, x->dim);
        else
            nsa__store(to->dtype, at, row, x->dim);
    }
}

/* Frequencies are computed once per call, because pow is slow and they depend on the options alone.
   */
static nsa_status nsa__rope_run(const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d,
                                int backward) {
    nsa__rope_job p;
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    NSA__CHECK(nsa__rope_check(&nsa__cpu, dx, x, d, backward));
    if (backward && !dx->x.data) return NSA_OK;
    const nsa__team team = {nsa__threads(d), NULL, 0};
    p.x = x;
    p.dx = dx;
    nsa__rope_frequencies(x, p.frequency, &p.magnitude);
    nsa__run_tokens(&team, d, nsa__rope_token, &p);
    return NSA_OK;
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
    return nsa__rope_run(NULL, x, d, 0);
}
NSA_API nsa_status nsa_rope_backward(const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d) {
    return nsa__rope_run(dx, x, d, 1);
}

/* compress_slots.h - an nsa_compress as slots of a suite, by itself or as a part of an
   nsa_attention.
   Twin: nsa.h's struct nsa_compress. Not here: what is tested (test_compress.c, test_attention.c).
   */
#ifndef NSA_TESTS_COMPRESS_SLOTS_H
#define NSA_TESTS_COMPRESS_SLOTS_H

#include "suite.h"

/* One phi and the sizes of its tensors. */
typedef struct phi_case {
    nsa_phi phi;
    int dim, hidden;
    int shared; /* one set of parameters for all heads */
    int bare;   /* without biases and position embedding */
    int heads, block;
} phi_case;

enum { PHI_X, PHI_OUT, PHI_POS, PHI_W1, PHI_B1, PHI_W2, PHI_B2, PHI_TENSORS };

/* The slot of each tensor; -1 where the case has none. */
typedef struct compress_slots {
    int at[PHI_TENSORS];
} compress_slots;

static const size_t phi_offsets[PHI_TENSORS] = {
    offsetof(nsa_compress, x),  offsetof(nsa_compress, out), offsetof(nsa_compress, pos),
    offsetof(nsa_compress, w1), offsetof(nsa_compress, b1),  offsetof(nsa_compress, w2),
    offsetof(nsa_compress, b2)};

static inline void add_parameter(suite *s, compress_slots *c, const phi_case *p,
                                 const char *const names[], size_t base, int tensor_index, int rows,
                                 int width) {
    slot *t = suite_add(s, names[tensor_index], base + phi_offsets[tensor_index], ROWS_PARAMETER,
                        p->shared ? 1 : p->heads, width);
    t->parameter_rows = rows, t->gradient = 1, t->shared = p->shared;
    t->optional = tensor_index != PHI_W1 && tensor_index != PHI_W2;
    c->at[tensor_index] = s->count - 1;
}

/* Adds the tensors that the case has, `base` bytes into the suite's struct. The output's gradient
   is an input of backward where the struct stands alone. */
static inline compress_slots compress_add(suite *s, const phi_case *p, const char *const names[],
                                          size_t base, int alone) {
    compress_slots c = {{s->count, s->count + 1, -1, -1, -1, -1, -1}};
    int width = p->block * p->dim, mlp = p->phi == NSA_PHI_MLP;
    slot *x = suite_add(s, names[PHI_X], base + phi_offsets[PHI_X], ROWS_KEY, p->heads, p->dim);
    x->gradient = 1, x->unread = p->phi == NSA_PHI_MEAN;
    slot *out =
        suite_add(s, names[PHI_OUT], base + phi_offsets[PHI_OUT], ROWS_CMP, p->heads, p->dim);
    out->output = 1, out->gradient = alone;
    if (p->phi == NSA_PHI_MEAN) return c;
    add_parameter(s, &c, p, names, base, PHI_W1, mlp ? p->hidden : p->block, mlp ? width : p->dim);
    if (!p->bare) add_parameter(s, &c, p, names, base, PHI_B1, 1, mlp ? p->hidden : p->dim);
    if (!mlp) return c;
    add_parameter(s, &c, p, names, base, PHI_W2, p->dim, p->hidden);
    if (p->bare) return c;
    add_parameter(s, &c, p, names, base, PHI_B2, 1, p->dim);
    add_parameter(s, &c, p, names, base, PHI_POS, p->block, p->dim);
    return c;
}

/* The suite's parameters lie as (rows, heads, columns), the reference's as (heads, rows, columns).
   */
static inline void heads_first(const slot *t, double *to, const double *from) {
    for (int r = 0; r < t->parameter_rows; r++)
        for (int h = 0; h < t->heads; h++)
            memcpy(to + (h * t->parameter_rows + r) * t->width,
                   from + (r * t->heads + h) * t->width, (size_t)t->width * sizeof *to);
}

static inline void heads_back(const slot *t, double *to, const double *from) {
    for (int r = 0; r < t->parameter_rows; r++)
        for (int h = 0; h < t->heads; h++)
            memcpy(to + (r * t->heads + h) * t->width,
                   from + (h * t->parameter_rows + r) * t->width, (size_t)t->width * sizeof *to);
}

/* The reference's struct and its gradient, with parameters of their own that compress_done frees.
   */
typedef struct compress_reference {
    ref_compress x;
    ref_compress_grad dx;
    double *parameters[PHI_TENSORS], *gradients[PHI_TENSORS];
} compress_reference;

static inline void compress_make(compress_reference *r, const suite *s, const compress_slots *c,
                                 const phi_case *p, const nsa_desc *d, int tokens, ref_prec prec,
                                 double **x, double **dx) {
    static const int reference_phi[] = {REF_MEAN, REF_CONV, REF_MLP};
    memset(r, 0, sizeof *r);
    for (int i = PHI_POS; i < PHI_TENSORS; i++) {
        if (c->at[i] < 0) continue;
        const slot *t = &s->slots[c->at[i]];
        size_t n = (size_t)(t->parameter_rows * t->heads * t->width);
        r->parameters[i] = ref_zeros(n), r->gradients[i] = ref_zeros(n);
        heads_first(t, r->parameters[i], x[c->at[i]]);
        heads_first(t, r->gradients[i], dx[c->at[i]]);
    }
    r->x.prec = prec, r->x.tokens = tokens, r->x.heads = d->kv_heads;
    memcpy(&r->x.phi, &reference_phi[p->phi], sizeof r->x.phi);
    r->x.dim = p->dim, r->x.hidden = p->hidden, r->x.shared = p->shared;
    r->x.cmp_block = d->cmp_block, r->x.cmp_stride = d->cmp_stride;
    r->x.x = x[c->at[PHI_X]], r->x.out = x[c->at[PHI_OUT]];
    r->x.pos = r->parameters[PHI_POS];
    r->x.w1 = r->parameters[PHI_W1], r->x.b1 = r->parameters[PHI_B1];
    r->x.w2 = r->parameters[PHI_W2], r->x.b2 = r->parameters[PHI_B2];
    r->dx.out = dx[c->at[PHI_OUT]], r->dx.x = dx[c->at[PHI_X]];
    r->dx.pos = r->gradients[PHI_POS];
    r->dx.w1 = r->gradients[PHI_W1], r->dx.b1 = r->gradients[PHI_B1];
    r->dx.w2 = r->gradients[PHI_W2], r->dx.b2 = r->gradients[PHI_B2];
}

static inline void compress_done(compress_reference *r, const suite *s, const compress_slots *c,
                                 double **dx) {
    for (int i = PHI_POS; i < PHI_TENSORS; i++) {
        if (c->at[i] >= 0) heads_back(&s->slots[c->at[i]], dx[c->at[i]], r->gradients[i]);
        free(r->parameters[i]), free(r->gradients[i]);
    }
}

/* Weights of the size that training starts from: sums stay near 1. */
static inline void compress_weights(const suite *s, const nsa_desc *d, double **x) {
    plan p = plan_of(d);
    for (int i = 0; i < s->count; i++)
        if (s->slots[i].rows == ROWS_PARAMETER && s->slots[i].parameter_rows > 1)
            for (size_t j = 0; j < slot_count(&s->slots[i], &p); j++) x[i][j] /= 8;
}

#endif

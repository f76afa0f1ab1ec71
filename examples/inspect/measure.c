/* measure.c - see measure.h. */
#include "measure.h"

#include <math.h>
#include <string.h>

/* Views of a batch of one sequence, in reals: what the CPU's back end has. */
static const nsa_real *row(const nsa_tensor *x, int token, int head) {
    return (const nsa_real *)x->data + token * x->token + head * x->head;
}

static double scaled_dot(const nsa_desc *d, const nsa_real *q, const nsa_real *k) {
    double sum = 0;
    for (int c = 0; c < d->dim; c++) sum += (double)q[c] * (double)k[c];
    return sum * (d->scale != 0 ? d->scale : 1 / sqrt((double)d->dim));
}

/* The gates of one head of gates. */
static void gates_of(const nsa_real *logits, nsa_gate_kind kind, double g[3]) {
    double sum = 0;
    for (int b = 0; b < 3; b++) {
        double z = (double)logits[b];
        g[b] = kind == NSA_GATE_SIGMOID ? 1 / (1 + exp(-z)) : kind == NSA_GATE_NONE ? z : exp(z);
        sum += g[b];
    }
    for (int b = 0; b < 3 && kind == NSA_GATE_SOFTMAX; b++) g[b] /= sum;
}

void measure_gates(const nsa_attention *x, const nsa_desc *d, int token, int kv_head, double g[3]) {
    int heads = d->gate_heads / d->kv_heads;
    double one[3], sum[3] = {0};
    for (int h = 0; h < heads; h++) {
        gates_of(row(&x->gates, token, kv_head * heads + h), d->gate, one);
        for (int b = 0; b < 3; b++) sum[b] += one[b];
    }
    for (int b = 0; b < 3; b++) g[b] = sum[b] / heads;
}

void measure_scores(const nsa_attention *x, const nsa_desc *d, int token, int kv_head,
                    double *score) {
    int G = d->heads / d->kv_heads, candidates = nsa_slc_candidates(d, token);
    memset(score, 0, (size_t)candidates * sizeof *score);
    for (int i = 0; i < nsa_cmp_visible(d, token); i++) {
        double p = 0;
        for (int h = kv_head * G; h < (kv_head + 1) * G; h++)
            p += exp(scaled_dot(d, row(&x->q, token, h), row(&x->k_cmp.out, i, kv_head)) -
                     (double)*row(&x->lse_cmp, token, h));
        int first = i * d->cmp_stride, last = first + d->cmp_block - 1;
        for (int j = first / d->slc_block; j <= last / d->slc_block; j++)
            score[j] += p * nsa_block_overlap(d, i, j) * d->cmp_stride / (d->cmp_block * (double)G);
    }
}

void measure_mass(const nsa_attention *x, const nsa_desc *d, int token, int kv_head, double *p,
                  double *mass) {
    int G = d->heads / d->kv_heads;
    memset(mass, 0, (size_t)nsa_slc_candidates(d, token) * sizeof *mass);
    for (int h = kv_head * G; h < (kv_head + 1) * G; h++) {
        double largest = -INFINITY, sum = 0;
        for (int s = 0; s <= token; s++) {
            p[s] = scaled_dot(d, row(&x->q, token, h), row(&x->k_slc, s, kv_head));
            largest = fmax(largest, p[s]);
        }
        for (int s = 0; s <= token; s++) sum += p[s] = exp(p[s] - largest);
        for (int s = 0; s <= token; s++) mass[s / d->slc_block] += p[s] / (sum * G);
    }
}

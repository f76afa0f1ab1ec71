/* rounding: how far f32 takes one query of dense attention from f64, over more and more keys. Twin:
   docs/numerics.md, "Sums", which says how it is built and what it printed. No measure of time. */
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <stdio.h>
#include <stdlib.h>

enum { D = 16, MOST = 1 << 20 };
static float q[D], k[MOST * D], v[MOST * D], out[D], lse;
static double worst_lse; /* in units of roundoff of itself */

static float uniform(void) {
    static uint32_t x = 1;
    x = x * 1664525u + 1013904223u;
    return (float)(x >> 8) / (1 << 24);
}

/* What out is off by from the formula in f64, as a share of out's length. */
static double off(int tokens) {
    static double p[MOST];
    double most = -1e300, l = 0, distance = 0, size = 0;
    nsa_desc d = nsa_desc_default(1, tokens, 1, 1, D);
    nsa_attend x = {0};
    d.first = tokens - 1, d.count = 1;
    x.q = x.out = nsa_tensor_bthd(q, NSA_F32, 1, 1, D);
    x.k = nsa_tensor_bthd(k, NSA_F32, tokens, 1, D);
    x.v = nsa_tensor_bthd(v, NSA_F32, tokens, 1, D);
    x.out.data = out;
    x.lse = nsa_tensor_bthd(&lse, NSA_F32, 1, 1, 1);
    size_t bytes = nsa_attend_dense_forward_workspace_size(&d);
    void *work = malloc(bytes);
    nsa_attend_dense_forward(&x, &d, work, bytes);
    free(work);
    for (int s = 0; s < tokens; s++) {
        p[s] = 0;
        for (int c = 0; c < D; c++) p[s] += q[c] * (double)k[s * D + c] / 4;
        if (p[s] > most) most = p[s];
    }
    for (int s = 0; s < tokens; s++) l += p[s] = exp(p[s] - most);
    for (int c = 0; c < D; c++) {
        double sum = 0;
        for (int s = 0; s < tokens; s++) sum += p[s] * v[s * D + c];
        distance += (out[c] - sum / l) * (out[c] - sum / l), size += sum / l * (sum / l);
    }
    double want = most + log(l), units = fabs((double)lse - want) / fabs(want) * (1 << 24);
    if (!(units <= worst_lse)) worst_lse = units;
    return sqrt(distance / size);
}

int main(void) {
    double worst = 0;
    for (int tokens = 4096; tokens <= MOST; tokens *= 16) {
        printf("%8d", tokens);
        for (int kind = 0; kind < 3; kind++) { /* scores of deviation 1; equal keys; equal v too */
            for (int c = 0; c < D; c++) q[c] = 3.46f * (uniform() - 0.5f);
            for (int i = 0; i < tokens * D; i++) {
                k[i] = kind == 0 ? 3.46f * (uniform() - 0.5f) : 0.5f;
                v[i] = kind == 2 ? 0.1f : uniform();
            }
            double share = off(tokens);
            if (!(share <= worst)) worst = share;
            printf("  %.1e", share);
        }
        printf("\n");
    }
    printf("lse is off by %.1f u of itself at most\n", worst_lse);
    return !(worst < 1e-3 && worst_lse < 16);
}

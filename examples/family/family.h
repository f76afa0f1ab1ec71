/* family.h - what the programs of this folder share: numbers, views, and attention as its
   definition says it, in double.
   Twin: none. Not here: any method; each has a program of its own.

   A program computes its method with nsa.h and again naively, and returns the number of comparisons
   that failed. Its calls are CUDA's too: FAMILY_NSA names a header that has them on a device under
   nsa.h's names, and allocate and release for memory that a device finds. */
#ifndef FAMILY_H
#define FAMILY_H

#ifdef FAMILY_NSA
#include FAMILY_NSA
#else
#ifndef FAMILY_LINKED /* a build of all programs compiles nsa.h once, in nsa.c */
#define NSA_IMPLEMENTATION
#endif
#include "nsa.h"
#endif

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static int failures;

#ifndef FAMILY_NSA
static inline void *allocate(size_t bytes) {
    void *memory = calloc(bytes ? bytes : 1, 1);
    if (!memory) exit(fprintf(stderr, "out of memory for %zu bytes\n", bytes) != 0);
    return memory;
}
static inline void release(void *memory) {
    free(memory);
}
#endif

static inline float *floats(size_t n) {
    return (float *)allocate(n * sizeof(float));
}
static inline double *doubles(size_t n) {
    return (double *)allocate(n * sizeof(double));
}

/* Numbers around 0 with a deviation near 1: sums of four uniform ones. */
static inline float *random_floats(unsigned seed, size_t n) {
    float *x = floats(n);
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < n; i++)
        for (int k = 0; k < 4; k++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            x[i] += (float)(state >> 40) * (1.0f / 8388608.0f) - 1.0f;
        }
    return x;
}

/* Queries, keys, values of one sequence, all (T, heads, D), and an incoming gradient. */
typedef struct problem {
    int T, H, Hk, D;
    float *q, *k, *v, *dout;         /* inputs */
    float *out, *lse, *dq, *dk, *dv; /* what nsa.h makes of them */
    unsigned char *mask;             /* naive: [T][H][T], 1 where query t of head h reads s */
} problem;

static inline problem problem_new(int T, int H, int Hk, int D) {
    size_t rows = (size_t)T * (size_t)H, keys = (size_t)T * (size_t)Hk, width = (size_t)D;
    problem p = {T, H, Hk, D, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    p.q = random_floats(1, rows * width), p.dout = random_floats(2, rows * width);
    p.k = random_floats(3, keys * width), p.v = random_floats(4, keys * width);
    p.out = floats(rows * width), p.lse = floats(rows);
    p.dq = floats(rows * width), p.dk = floats(keys * width), p.dv = floats(keys * width);
    p.mask = (unsigned char *)allocate(rows * (size_t)T);
    return p;
}

static inline void problem_free(problem *p) {
    void *all[] = {p->q, p->k, p->v, p->dout, p->out, p->lse, p->dq, p->dk, p->dv, p->mask};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) release(all[i]);
}

static inline nsa_tensor view(const float *x, int T, int heads, int width) {
    return nsa_tensor_bthd((void *)(uintptr_t)x, NSA_F32, T, heads, width);
}

static inline nsa_attend views_of(const problem *p) {
    nsa_attend x = {0};
    x.q = view(p->q, p->T, p->H, p->D);
    x.k = view(p->k, p->T, p->Hk, p->D);
    x.v = view(p->v, p->T, p->Hk, p->D);
    x.out = view(p->out, p->T, p->H, p->D);
    x.lse = view(p->lse, p->T, p->H, 1);
    return x;
}

static inline nsa_attend gradients_of(const problem *p) {
    nsa_attend dx = {0};
    dx.q = view(p->dq, p->T, p->H, p->D);
    dx.k = view(p->dk, p->T, p->Hk, p->D);
    dx.v = view(p->dv, p->T, p->Hk, p->D);
    dx.out = view(p->dout, p->T, p->H, p->D);
    return dx;
}

/* Ends the program with the library's words if a call was refused. */
static inline void demand(nsa_status s) {
    if (s == NSA_OK) return;
    fprintf(stderr, "%s: %s\n", nsa_status_where(s), nsa_status_text(s));
    exit(99);
}

/* A call that takes a workspace: its size asked for, the memory taken and given back. */
#define WITH_WORKSPACE(size, call)         \
    do {                                   \
        size_t bytes = (size);             \
        void *workspace = allocate(bytes); \
        demand(call);                      \
        release(workspace);                \
    } while (0)

/* ---- The definition ---- */

/* A problem in double. */
typedef struct definition {
    int T, H, Hk, D;
    double *q, *k, *v, *dout;
    const unsigned char *mask;
} definition;

typedef struct result {
    double *out, *lse, *dq, *dk, *dv;
} result;

static inline result result_new(const problem *p) {
    size_t rows = (size_t)p->T * (size_t)p->H, keys = (size_t)p->T * (size_t)p->Hk;
    size_t width = (size_t)p->D;
    result r = {doubles(rows * width), doubles(rows), doubles(rows * width), doubles(keys * width),
                doubles(keys * width)};
    return r;
}

static inline void result_free(result *r) {
    release(r->out), release(r->lse), release(r->dq), release(r->dk), release(r->dv);
}

static inline double *widened(const float *x, size_t n) {
    double *wide = doubles(n);
    for (size_t i = 0; i < n; i++) wide[i] = (double)x[i];
    return wide;
}

static inline definition definition_of(const problem *p) {
    size_t rows = (size_t)p->T * (size_t)p->H * (size_t)p->D;
    size_t keys = (size_t)p->T * (size_t)p->Hk * (size_t)p->D;
    definition d = {p->T,
                    p->H,
                    p->Hk,
                    p->D,
                    widened(p->q, rows),
                    widened(p->k, keys),
                    widened(p->v, keys),
                    widened(p->dout, rows),
                    p->mask};
    return d;
}

static inline void definition_free(definition *d) {
    release(d->q), release(d->k), release(d->v), release(d->dout);
}

static inline double dot(const float *a, const float *b, int n) {
    double sum = 0;
    for (int c = 0; c < n; c++) sum += (double)a[c] * (double)b[c];
    return sum;
}

static inline double dot_wide(const double *a, const double *b, int n) {
    double sum = 0;
    for (int c = 0; c < n; c++) sum += a[c] * b[c];
    return sum;
}

/* One query of one head: p = softmax over the keys of its mask, and, with `sink`, over one logit
   more that has no value. Returns the share of the sink. */
static inline double softmax_row(const definition *d, int t, int h, const double *sink,
                                 double *of_key, double *lse) {
    const unsigned char *mask = d->mask + ((size_t)t * (size_t)d->H + (size_t)h) * (size_t)d->T;
    const double *q = d->q + ((size_t)t * (size_t)d->H + (size_t)h) * (size_t)d->D;
    double most = sink ? *sink : -INFINITY, sum = 0, scale = 1 / sqrt((double)d->D);
    for (int s = 0; s < d->T; s++) {
        size_t key = (size_t)s * (size_t)d->Hk + (size_t)(h / (d->H / d->Hk));
        if (!mask[s]) continue;
        of_key[s] = scale * dot_wide(q, d->k + key * (size_t)d->D, d->D);
        most = of_key[s] > most ? of_key[s] : most;
    }
    for (int s = 0; s < d->T; s++) sum += of_key[s] = mask[s] ? exp(of_key[s] - most) : 0;
    double rest = sink ? exp(*sink - most) : 0;
    sum += rest;
    for (int s = 0; s < d->T && sum > 0; s++) of_key[s] /= sum;
    *lse = sum > 0 ? most + log(sum) : -INFINITY;
    return sum > 0 ? rest / sum : 0;
}

/* Masked attention and its gradient, the Jacobian of the softmax row by row. `sinks`: NULL, or a
   logit for each head; dsinks is added to. */
static inline void attend_defined(const definition *d, const double *sinks, double *dsinks,
                                  result *r) {
    double *of_key = doubles((size_t)d->T), scale = 1 / sqrt((double)d->D);
    for (int t = 0; t < d->T; t++)
        for (int h = 0; h < d->H; h++) {
            size_t row = (size_t)t * (size_t)d->H + (size_t)h, width = (size_t)d->D;
            const double *q = d->q + row * width, *dout = d->dout + row * width;
            double *out = r->out + row * width;
            double rest = softmax_row(d, t, h, sinks ? &sinks[h] : NULL, of_key, &r->lse[row]);
            for (int s = 0; s < d->T; s++) {
                size_t key = ((size_t)s * (size_t)d->Hk + (size_t)(h / (d->H / d->Hk))) * width;
                for (size_t c = 0; c < width; c++) out[c] += of_key[s] * d->v[key + c];
            }
            double along = dot_wide(out, dout, d->D);
            if (sinks) dsinks[h] -= rest * along;
            for (int s = 0; s < d->T; s++) {
                size_t key = ((size_t)s * (size_t)d->Hk + (size_t)(h / (d->H / d->Hk))) * width;
                double ds = of_key[s] * (dot_wide(dout, d->v + key, d->D) - along);
                for (size_t c = 0; c < width; c++) {
                    r->dv[key + c] += of_key[s] * dout[c];
                    r->dk[key + c] += scale * ds * q[c];
                    r->dq[row * width + c] += scale * ds * d->k[key + c];
                }
            }
        }
    release(of_key);
}

static inline void attend_naively(const problem *p, const double *sinks, double *dsinks,
                                  result *r) {
    definition d = definition_of(p);
    attend_defined(&d, sinks, dsinks, r);
    definition_free(&d);
}

/* ---- Comparing ---- */

/* The relative L2 error of f32 beside the definition: some roundings. */
static inline void compare(const char *what, const float *got, const double *want, size_t n) {
    double error = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        if ((double)got[i] == want[i]) continue; /* equal infinities too */
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += want[i] * want[i];
    }
    error = size > 0 ? sqrt(error / size) : error;
    int bad = !(error < 2e-6);
    failures += bad;
    printf("  %-6s relative error %.1e%s\n", what, error, bad ? "  FAILED" : "");
}

static inline void compare_all(const problem *p, const result *r) {
    size_t rows = (size_t)p->T * (size_t)p->H, keys = (size_t)p->T * (size_t)p->Hk;
    size_t width = (size_t)p->D;
    compare("out", p->out, r->out, rows * width), compare("lse", p->lse, r->lse, rows);
    compare("dq", p->dq, r->dq, rows * width);
    compare("dk", p->dk, r->dk, keys * width), compare("dv", p->dv, r->dv, keys * width);
}

/* Is a list the best `n` of the candidates by scores that were computed naively? Every block in it
   scores at least as much as every candidate that is not, up to rounding; forced ones (negative
   tolerance of the caller's scores: +inf) come by themselves. */
static inline int is_best(const int32_t *list, int n, const double *scores, int candidates) {
    double least = INFINITY, most = -INFINITY, size = 0;
    int held = 0;
    for (int j = 0; j < candidates; j++) {
        int in = 0;
        for (int i = 0; i < n; i++) in |= list[i] == j;
        held += in;
        if (isfinite(scores[j]) && fabs(scores[j]) > size) size = fabs(scores[j]);
        if (in && scores[j] < least) least = scores[j];
        if (!in && scores[j] > most) most = scores[j];
    }
    return held == (n < candidates ? n : candidates) && !(most - least > 1e-5 * size);
}

static inline void check(int ok, const char *what) {
    failures += !ok;
    printf("  %s%s\n", what, ok ? "" : "  FAILED");
}

/* The mask of block lists (T, Hk, n), one for the heads of a group: tokens s <= t of a block. */
static inline void mask_of_lists(const problem *p, const int32_t *lists, int list_heads, int n,
                                 int block) {
    for (int t = 0; t < p->T; t++)
        for (int h = 0; h < p->H; h++) {
            const int32_t *list = lists + (t * list_heads + h / (p->H / list_heads)) * n;
            unsigned char *mask = p->mask + ((size_t)t * (size_t)p->H + (size_t)h) * (size_t)p->T;
            for (int s = 0; s < p->T; s++) mask[s] = 0;
            for (int i = 0; i < n && list[i] >= 0; i++)
                for (int s = list[i] * block; s < (list[i] + 1) * block && s <= t; s++) mask[s] = 1;
        }
}

static inline int finish(problem *p, result *r) {
    problem_free(p);
    result_free(r);
    return failures;
}

#endif

/* problem.h: one NSA problem and what is run on it, for the programs of this folder. The
   implementation of nsa.h is included with it, for they look behind its doors. No test. */
#ifndef BENCH_PROBLEM_H
#define BENCH_PROBLEM_H

#define NSA_IMPLEMENTATION
#define NSA_STATIC
#include "nsa.h"
#include <stdio.h>
#include <stdlib.h>

static void *allocate(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) {
        fprintf(stderr, "bench: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

/* Normally distributed, near enough: the sum of four uniform numbers, variance 1. */
static float *random_floats(size_t n, uint64_t seed) {
    float *x = (float *)allocate(n * sizeof *x);
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int u = 0; u < 4; u++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(state >> 40) / 16777216.0f - 0.5f;
        }
        x[i] = sum * 1.7320508f;
    }
    return x;
}

/* One problem: NSA whose branches share k and v, its gradients, and dense attention on the same. */
typedef struct problem {
    nsa_desc d;
    nsa_attention x, dx;
    nsa_attend dense, ddense;
    nsa_select select;
    nsa_dtype dtype; /* of what the caller stores, but lse */
    void *workspace;
    size_t bytes;
    void *owned[48];
    int owns;
} problem;

static const char *const dtype_names[] = {"f32", "bf16", "f16", "f64", "i32", "i8", "f8"};

/* Those of all tensors, as a command line has them. */
#define DTYPE_WORDS "f32|bf16|f16"

static nsa_tensor take_as(problem *p, nsa_dtype dtype, int rows, int heads, int width,
                          uint64_t seed) {
    size_t n = (size_t)rows * (size_t)heads * (size_t)width;
    float *data = seed ? random_floats(n, seed) : (float *)allocate(n * sizeof *data);
    if (!seed) memset(data, 0, n * sizeof *data);
    uint16_t *half = (uint16_t *)data;
    for (size_t i = 0; seed && dtype != NSA_F32 && i < n; i++)
        half[i] = dtype == NSA_BF16 ? nsa_f32_to_bf16(data[i]) : nsa_f32_to_f16(data[i]);
    p->owned[p->owns++] = data;
    return nsa_tensor_bthd(data, dtype, rows, heads, width);
}

static nsa_tensor take(problem *p, int rows, int heads, int width, uint64_t seed) {
    return take_as(p, p->dtype, rows, heads, width, seed);
}

static nsa_compress mean_of(nsa_tensor x, nsa_tensor out, int dim) {
    nsa_compress c;
    memset(&c, 0, sizeof c);
    c.phi = NSA_PHI_MEAN;
    c.dim = dim;
    c.x = x;
    c.out = out;
    return c;
}

static void problem_gradients(problem *p) {
    const nsa_desc *d = &p->d;
    p->dx = p->x;
    p->dx.q = take(p, d->tokens, d->heads, d->dim, 0);
    p->dx.k_slc = p->dx.k_win = p->dx.k_cmp.x = take(p, d->tokens, d->kv_heads, d->dim, 0);
    p->dx.v_slc = p->dx.v_win = p->dx.v_cmp.x = take(p, d->tokens, d->kv_heads, d->dim_v, 0);
    p->dx.gates = take(p, d->tokens, d->heads, 3, 0);
    p->dx.out = take(p, d->tokens, d->heads, d->dim_v, 5);
    p->ddense.q = p->dx.q;
    p->ddense.k = p->dx.k_slc;
    p->ddense.v = p->dx.v_slc;
    p->ddense.out = p->dx.out;
}

/* What --shape gives: H,Hk,D,T, or H,Hk,Dk/Dv,T. */
typedef struct shape {
    int heads, kv_heads, dim, tokens;
    int dim_v; /* 0: dim */
} shape;

static inline void problem_make_as(problem *p, nsa_dtype dtype, const shape *s, int threads) {
    const int heads = s->heads, kv_heads = s->kv_heads, tokens = s->tokens, dim = s->dim;
    const int dim_v = s->dim_v ? s->dim_v : dim;
    memset(p, 0, sizeof *p);
    p->dtype = dtype;
    nsa_desc *d = &p->d;
    *d = nsa_desc_default(1, tokens, heads, kv_heads, dim);
    d->dim_v = dim_v;
    d->threads = threads;
    nsa_tensor k = take(p, tokens, kv_heads, dim, 2), v = take(p, tokens, kv_heads, dim_v, 3);
    int cmp = nsa_cmp_count(d, tokens);
    p->x.q = take(p, tokens, heads, dim, 1);
    p->x.k_slc = p->x.k_win = k;
    p->x.v_slc = p->x.v_win = v;
    p->x.k_cmp = mean_of(k, take(p, cmp, kv_heads, dim, 0), dim);
    p->x.v_cmp = mean_of(v, take(p, cmp, kv_heads, dim_v, 0), dim_v);
    p->x.gates = take(p, tokens, heads, 3, 4);
    p->x.blocks = take_as(p, NSA_I32, tokens, kv_heads, nsa_block_list_width(d), 0);
    nsa_tensor *outs[] = {&p->x.out_cmp, &p->x.out_slc, &p->x.out_win, &p->x.out, &p->dense.out};
    nsa_tensor *lses[] = {&p->x.lse_cmp, &p->x.lse_slc, &p->x.lse_win, &p->dense.lse};
    for (size_t i = 0; i < sizeof outs / sizeof *outs; i++)
        *outs[i] = take(p, tokens, heads, dim_v, 0);
    for (size_t i = 0; i < sizeof lses / sizeof *lses; i++)
        *lses[i] = take_as(p, NSA_F32, tokens, heads, 1, 0);
    p->dense.q = p->x.q;
    p->dense.k = k;
    p->dense.v = v;
    problem_gradients(p);
    const size_t sizes[] = {nsa_attention_forward_workspace_size(&p->x, d),
                            nsa_attention_backward_workspace_size(&p->dx, &p->x, d),
                            nsa_select_blocks_workspace_size(d),
                            nsa_attend_dense_forward_workspace_size(d),
                            nsa_attend_dense_backward_workspace_size(d),
                            nsa_attend_cmp_forward_workspace_size(d),
                            nsa_attend_cmp_backward_workspace_size(d),
                            nsa_attend_slc_forward_workspace_size(d),
                            nsa_attend_slc_backward_workspace_size(d),
                            nsa_attend_win_forward_workspace_size(d),
                            nsa_attend_win_backward_workspace_size(d)};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        p->bytes = sizes[i] > p->bytes ? sizes[i] : p->bytes;
    p->workspace = allocate(p->bytes);
}

static inline void problem_make(problem *p, int heads, int kv_heads, int dim, int tokens,
                                int threads) {
    const shape s = {heads, kv_heads, dim, tokens, 0};
    problem_make_as(p, NSA_F32, &s, threads);
}

static inline void problem_free(problem *p) {
    for (int i = 0; i < p->owns; i++) free(p->owned[i]);
    free(p->workspace);
}

static nsa_attend branch_of(const nsa_attention *x, nsa__branch branch) {
    nsa__chain c = nsa__chain_of(x);
    return branch == NSA__CMP ? c.cmp : branch == NSA__SLC ? c.slc : c.win;
}

static nsa_gate gate_of(const nsa_attention *x) {
    return nsa__chain_of(x).gate;
}

/* -- what is timed -- */

typedef nsa_status run(problem *p);

static nsa_status run_cmp(problem *p) {
    nsa_attend x = branch_of(&p->x, NSA__CMP);
    return nsa_attend_cmp_forward(&x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_slc(problem *p) {
    nsa_attend x = branch_of(&p->x, NSA__SLC);
    return nsa_attend_slc_forward(&x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_win(problem *p) {
    nsa_attend x = branch_of(&p->x, NSA__WIN);
    return nsa_attend_win_forward(&x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_select(problem *p) {
    nsa_select x = nsa__chain_of(&p->x).select;
    return nsa_select_blocks(&x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_gate(problem *p) {
    nsa_gate x = gate_of(&p->x);
    return nsa_gate_forward(&x, &p->d);
}
static nsa_status run_nsa(problem *p) {
    return nsa_attention_forward(&p->x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_dense(problem *p) {
    return nsa_attend_dense_forward(&p->dense, &p->d, p->workspace, p->bytes);
}

/* A branch's backward by itself: its gradients are those of slc's k and v in every case but cmp. */
static nsa_status branch_backward(problem *p, nsa__branch branch) {
    nsa_attend x = branch_of(&p->x, branch), dx = p->ddense;
    if (branch == NSA__SLC) return nsa_attend_slc_backward(&dx, &x, &p->d, p->workspace, p->bytes);
    if (branch == NSA__WIN) return nsa_attend_win_backward(&dx, &x, &p->d, p->workspace, p->bytes);
    return nsa_attend_cmp_backward(&dx, &x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_cmp_backward(problem *p) {
    return branch_backward(p, NSA__CMP);
}
static nsa_status run_slc_backward(problem *p) {
    return branch_backward(p, NSA__SLC);
}
static nsa_status run_win_backward(problem *p) {
    return branch_backward(p, NSA__WIN);
}
static nsa_status run_gate_backward(problem *p) {
    nsa_gate x = gate_of(&p->x), dx = gate_of(&p->dx);
    dx.cmp = dx.slc = dx.win = p->dense.out; /* any memory of that shape */
    return nsa_gate_backward(&dx, &x, &p->d);
}
static nsa_status run_nsa_backward(problem *p) {
    return nsa_attention_backward(&p->dx, &p->x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_dense_backward(problem *p) {
    return nsa_attend_dense_backward(&p->ddense, &p->dense, &p->d, p->workspace, p->bytes);
}

enum { ROW_CMP, ROW_SELECT, ROW_SLC, ROW_WIN, ROW_GATE, ROW_NSA, ROW_DENSE, ROWS };
static const char *const row_names[ROWS] = {"cmp", "select", "slc", "win", "gate", "nsa", "dense"};
/* Forward in the order that fills what the next one reads. */
static run *const forwards[ROWS] = {run_cmp,  run_select, run_slc,  run_win,
                                    run_gate, run_nsa,    run_dense};
static run *const backwards[ROWS] = {run_cmp_backward,  NULL,
                                     run_slc_backward,  run_win_backward,
                                     run_gate_backward, run_nsa_backward,
                                     run_dense_backward};

/* Query-key pairs of each branch, over all query heads. */
static inline void count_pairs(const problem *p, double pairs[ROWS]) {
    const nsa_desc *d = &p->d;
    memset(pairs, 0, ROWS * sizeof *pairs);
    for (int t = 0; t < d->tokens; t++) {
        pairs[ROW_CMP] += d->heads * (double)nsa_cmp_visible(d, t);
        pairs[ROW_WIN] += d->heads * (double)(t + 1 - nsa_window_begin(d, t));
        pairs[ROW_DENSE] += d->heads * (t + 1.0);
        for (int h = 0; h < d->kv_heads; h++) {
            const int32_t *list = (const int32_t *)nsa__row(&p->x.blocks, 0, t, h);
            for (int i = 0; i < nsa_block_list_width(d) && list[i] >= 0; i++) {
                int begin = list[i] * d->slc_block, end = begin + d->slc_block;
                pairs[ROW_SLC] +=
                    d->heads / d->kv_heads * (double)((end > t ? t + 1 : end) - begin);
            }
        }
    }
    pairs[ROW_NSA] = pairs[ROW_CMP] + pairs[ROW_SLC] + pairs[ROW_WIN];
}

static inline int parse_shape(shape *s, const char *text) {
    char rest;
    s->dim_v = 0;
    int found = sscanf(text, "%d,%d,%d,%d%c", &s->heads, &s->kv_heads, &s->dim, &s->tokens, &rest);
    if (found == 3) /* then a slash follows */
        found = sscanf(text, "%d,%d,%d/%d,%d%c", &s->heads, &s->kv_heads, &s->dim, &s->dim_v,
                       &s->tokens, &rest) == 5
                    ? 4
                    : 0;
    return found == 4 && s->kv_heads > 0 && s->heads > 0 && s->heads % s->kv_heads == 0 &&
           s->dim > 0 && s->dim <= 576 && s->dim_v >= 0 && s->dim_v <= 576 && s->tokens > 0;
}

#endif

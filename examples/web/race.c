/* race.c - web_race: one layer's attention, sparse or dense, over rows of any length, for its time
   and the keys that it reads. Twin: web.h. The rows are random, for no text of the page is that
   long. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nsa.h"
#include "web.h"

enum { LONGEST = 32768, BRANCH_COUNT = 3 };

static double mean_keys;

double web_race_keys(void) {
    return mean_keys;
}

/* One block of memory, handed out from its front; base NULL: it only counts. */
typedef struct memory {
    char *base;
    size_t used;
} memory;

static void *take(memory *m, size_t bytes) {
    size_t at = m->used;
    m->used += (bytes + 63) / 64 * 64;
    return m->base ? m->base + at : NULL;
}

static nsa_tensor take_rows(memory *m, int tokens, int heads, int width) {
    size_t count = (size_t)tokens * (size_t)heads * (size_t)width;
    return nsa_tensor_bthd(take(m, count * sizeof(nsa_real)), NSA_REAL_DTYPE, tokens, heads, width);
}

static nsa_attention lay_out(memory *m, const nsa_desc *d) {
    int T = d->tokens, N = nsa_cmp_count(d, T), width = nsa_block_list_width(d);
    nsa_attention x;
    memset(&x, 0, sizeof x);
    x.q = take_rows(m, T, d->heads, d->dim);
    x.k_cmp.phi = x.v_cmp.phi = NSA_PHI_MEAN;
    x.k_cmp.dim = d->dim;
    x.v_cmp.dim = d->dim_v;
    x.k_cmp.x = x.k_slc = x.k_win = take_rows(m, T, d->kv_heads, d->dim);
    x.v_cmp.x = x.v_slc = x.v_win = take_rows(m, T, d->kv_heads, d->dim_v);
    x.gates = take_rows(m, T, d->gate_heads, BRANCH_COUNT);
    x.k_cmp.out = take_rows(m, N, d->kv_heads, d->dim);
    x.v_cmp.out = take_rows(m, N, d->kv_heads, d->dim_v);
    x.blocks = take_rows(m, T, d->kv_heads, width);
    x.blocks.dtype = NSA_I32;
    x.out_cmp = take_rows(m, T, d->heads, d->dim_v);
    x.out_slc = take_rows(m, T, d->heads, d->dim_v);
    x.out_win = take_rows(m, T, d->heads, d->dim_v);
    x.lse_cmp = take_rows(m, T, d->heads, 1);
    x.lse_slc = take_rows(m, T, d->heads, 1);
    x.lse_win = take_rows(m, T, d->heads, 1);
    x.out = take_rows(m, T, d->heads, d->dim_v);
    return x;
}

/* Numbers in -1 .. 1 by a linear congruence: all rows differ, and that is all that time asks. */
static void fill(const nsa_tensor *from, const nsa_tensor *end) {
    uint32_t state = 1;
    for (nsa_real *x = (nsa_real *)from->data; x < (nsa_real *)end->data; x++) {
        state = state * 1664525u + 1013904223u;
        *x = (nsa_real)((double)(state >> 8) / (1 << 23) - 1);
    }
}

static int64_t keys_of(const nsa_attention *x, const nsa_desc *d, int token, int kv_head) {
    const int32_t *list =
        (const int32_t *)x->blocks.data + token * x->blocks.token + kv_head * x->blocks.head;
    int64_t keys = nsa_cmp_visible(d, token) + token + 1 - nsa_window_begin(d, token);
    for (int i = 0; i < d->slc_count && list[i] >= 0; i++) {
        int end = (list[i] + 1) * d->slc_block;
        keys += (end <= token ? end : token + 1) - list[i] * d->slc_block;
    }
    return keys;
}

static double milliseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static double run(const nsa_attention *x, const nsa_desc *d, int dense, void *workspace,
                  size_t bytes) {
    nsa_attend one = {.q = x->q, .k = x->k_slc, .v = x->v_slc, .out = x->out, .lse = x->lse_slc};
    double start = milliseconds(), sum = 0;
    nsa_status status = dense ? nsa_attend_dense_forward(&one, d, workspace, bytes)
                              : nsa_attention_forward(x, d, workspace, bytes);
    double taken = milliseconds() - start;
    if (status != NSA_OK) return -1;
    for (int t = 0; t < d->tokens; t++)
        for (int h = 0; h < d->kv_heads; h++) sum += dense ? t + 1 : (double)keys_of(x, d, t, h);
    mean_keys = sum / ((double)d->tokens * d->kv_heads);
    return taken;
}

double web_race(int tokens, int heads, int kv_heads, int dim, int cmp_block, int cmp_stride,
                int slc_count, int window, int slc_block, int dense, int isa) {
    nsa_desc d = nsa_desc_default(1, tokens, heads, kv_heads, dim);
    d.cmp_block = cmp_block;
    d.cmp_stride = cmp_stride;
    d.slc_block = slc_block;
    d.slc_count = slc_count;
    d.window = window;
    d.threads = 1;
    d.isa = (nsa_isa)isa;
    mean_keys = 0;
    if (tokens < 1 || tokens > LONGEST || nsa_desc_check(&d) != NSA_OK) return -1;
    memory sizes = {NULL, 0}, all = {NULL, 0};
    nsa_attention x = lay_out(&sizes, &d);
    size_t bytes = dense ? nsa_attend_dense_forward_workspace_size(&d)
                         : nsa_attention_forward_workspace_size(&x, &d);
    all.base = malloc(sizes.used);
    void *workspace = malloc(bytes);
    double taken = -1;
    if (all.base && workspace) {
        x = lay_out(&all, &d);
        fill(&x.q, &x.k_cmp.out);
        taken = run(&x, &d, dense, workspace, bytes);
    }
    free(workspace);
    free(all.base);
    return taken;
}

/* A graph of ggml's with Native Sparse Attention in it: a prompt in pieces and single tokens after
   it, over an f16 cache that is ggml's own, beside the same graph with ggml's flash attention.

     nsa_ggml                   checks: equal bits for any number of threads, and both attentions
                                agree where a window holds every key; exit code: what failed
     nsa_ggml TOKENS THREADS    milliseconds of both

   Not here: a model. Queries, keys, values and gates are numbers of a generator. */
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "nsa_ggml.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 512, SINGLE = 32 }; /* tokens of a graph of the prompt; single tokens after it */

typedef struct problem {
    int tokens, heads, kv_heads, dim;
    float *q, *k, *v, *gates;        /* (T, heads, width) */
    struct ggml_context *ctx;        /* of the cache */
    ggml_backend_buffer_t buffer;    /* of the cache */
    struct ggml_tensor *cache[2];    /* k, v: (D, Hk, T) */
    struct ggml_tensor *squeezed[2]; /* the compressed rows of both: (D, Hk, N) */
} problem;

static void *need(void *p) {
    if (p) return p;
    fprintf(stderr, "out of memory\n");
    exit(1);
}

static float *numbers(int64_t n, uint32_t seed) { /* -2 .. 2 */
    float *x = (float *)need(malloc((size_t)n * sizeof *x));
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 8) / 4194304 - 2;
    return x;
}

static void open_problem(problem *p, const nsa_desc *d, enum ggml_type type,
                         ggml_backend_t backend) {
    int64_t rows = d->tokens, compressed = nsa_cmp_count(d, d->tokens);
    p->tokens = d->tokens, p->heads = d->heads, p->kv_heads = d->kv_heads, p->dim = d->dim;
    p->q = numbers(rows * p->heads * p->dim, 1);
    p->k = numbers(rows * p->kv_heads * p->dim, 2);
    p->v = numbers(rows * p->kv_heads * p->dim, 3);
    p->gates = numbers(rows * p->heads * 3, 4);
    struct ggml_init_params init = {4 * ggml_tensor_overhead(), NULL, true};
    p->ctx = (struct ggml_context *)need(ggml_init(init));
    for (int i = 0; i < 2; i++) {
        p->cache[i] = ggml_new_tensor_3d(p->ctx, type, p->dim, p->kv_heads, rows);
        p->squeezed[i] = ggml_new_tensor_3d(p->ctx, type, p->dim, p->kv_heads, compressed);
    }
    p->buffer = (ggml_backend_buffer_t)need(ggml_backend_alloc_ctx_tensors(p->ctx, backend));
}

static void close_problem(problem *p) {
    ggml_backend_buffer_free(p->buffer);
    ggml_free(p->ctx);
    free(p->q), free(p->k), free(p->v), free(p->gates);
}

/* ---- The graph ----------------------------------------------------------------------------- */

typedef struct graph {
    struct ggml_context *ctx;
    struct ggml_cgraph *nodes;
    struct ggml_tensor *q, *k, *v, *gates, *mask; /* inputs */
    struct ggml_tensor *out;                      /* (Dv, H, count) */
} graph;

/* Rows first .. first + count - 1 of a cache, to be written. */
static struct ggml_tensor *new_rows(graph *g, struct ggml_tensor *cache, int first, int count) {
    return ggml_view_3d(g->ctx, cache, cache->ne[0], cache->ne[1], count, cache->nb[1],
                        cache->nb[2], (size_t)first * cache->nb[2]);
}

/* A cache as flash attention takes it: (D, tokens, Hk). */
static struct ggml_tensor *held(graph *g, struct ggml_tensor *cache, int tokens) {
    return ggml_view_3d(g->ctx, cache, cache->ne[0], tokens, cache->ne[1], cache->nb[2],
                        cache->nb[1], 0);
}

static struct ggml_tensor *input(graph *g, enum ggml_type type, int a, int b, int c) {
    struct ggml_tensor *x = ggml_new_tensor_3d(g->ctx, type, a, b, c);
    ggml_set_input(x);
    return x;
}

/* layer NULL: ggml's flash attention. */
static graph build(const problem *p, nsa_ggml *layer, int first, int count) {
    struct ggml_init_params init = {64 * ggml_tensor_overhead() + ggml_graph_overhead(), NULL,
                                    true};
    graph g = {0};
    g.ctx = (struct ggml_context *)need(ggml_init(init));
    g.nodes = ggml_new_graph(g.ctx);
    g.q = input(&g, GGML_TYPE_F32, p->dim, p->heads, count);
    g.k = input(&g, GGML_TYPE_F32, p->dim, p->kv_heads, count);
    g.v = input(&g, GGML_TYPE_F32, p->dim, p->kv_heads, count);
    ggml_build_forward_expand(g.nodes,
                              ggml_cpy(g.ctx, g.k, new_rows(&g, p->cache[0], first, count)));
    ggml_build_forward_expand(g.nodes,
                              ggml_cpy(g.ctx, g.v, new_rows(&g, p->cache[1], first, count)));
    if (layer) {
        nsa_ggml_rows(layer, first, count);
        g.gates = input(&g, GGML_TYPE_F32, 3, p->heads, count);
        g.out = nsa_ggml_attention(g.ctx, g.q, p->cache[0], p->cache[1],
                                   nsa_ggml_compress(g.ctx, p->squeezed[0], p->cache[0], layer),
                                   nsa_ggml_compress(g.ctx, p->squeezed[1], p->cache[1], layer),
                                   g.gates, layer);
    } else {
        g.mask = input(&g, GGML_TYPE_F16, first + count, count, 1);
        g.out = ggml_flash_attn_ext(
            g.ctx, ggml_permute(g.ctx, g.q, 0, 2, 1, 3), held(&g, p->cache[0], first + count),
            held(&g, p->cache[1], first + count), g.mask, 1 / sqrtf((float)p->dim), 0, 0);
    }
    ggml_set_output(g.out);
    ggml_build_forward_expand(g.nodes, g.out);
    return g;
}

static void set_inputs(const graph *g, const problem *p, int first, int count) {
    struct ggml_tensor *inputs[] = {g->q, g->k, g->v, g->gates};
    const float *rows[] = {p->q, p->k, p->v, p->gates};
    for (int i = 0; i < 4; i++)
        if (inputs[i])
            ggml_backend_tensor_set(inputs[i],
                                    rows[i] + first * inputs[i]->ne[0] * inputs[i]->ne[1], 0,
                                    ggml_nbytes(inputs[i]));
    if (!g->mask) return;
    int keys = first + count;
    ggml_fp16_t *mask = (ggml_fp16_t *)need(calloc((size_t)keys * (size_t)count, sizeof *mask));
    for (int t = 0; t < count; t++)
        for (int s = first + t + 1; s < keys; s++)
            mask[(size_t)t * (size_t)keys + (size_t)s] = ggml_fp32_to_fp16(-INFINITY);
    ggml_backend_tensor_set(g->mask, mask, 0, ggml_nbytes(g->mask));
    free(mask);
}

/* One graph: out's rows first .. are written. Returns the microseconds of its computation alone. */
static int64_t step(const problem *p, nsa_ggml *layer, ggml_backend_t backend, int first, int count,
                    float *out) {
    graph g = build(p, layer, first, count);
    ggml_gallocr_t memory = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
    if (!memory || !ggml_gallocr_alloc_graph(memory, g.nodes)) need(NULL);
    set_inputs(&g, p, first, count);
    int64_t begin = ggml_time_us();
    enum ggml_status done = ggml_backend_graph_compute(backend, g.nodes);
    int64_t end = ggml_time_us();
    nsa_status s = layer ? nsa_ggml_status(layer) : NSA_OK;
    if (done != GGML_STATUS_SUCCESS || s != NSA_OK) {
        fprintf(stderr, "graph: %s; %s: %s\n", ggml_status_to_string(done), nsa_status_where(s),
                nsa_status_text(s));
        exit(1);
    }
    ggml_backend_tensor_get(g.out, out + (size_t)first * (size_t)(p->heads * p->dim), 0,
                            ggml_nbytes(g.out));
    ggml_gallocr_free(memory);
    ggml_free(g.ctx);
    return end - begin;
}

/* The prompt in pieces, then single tokens; us[0] of the prompt, us[1] of a single token. */
static void run(const problem *p, nsa_ggml *layer, int threads, float *out, double us[2]) {
    ggml_backend_t backend = (ggml_backend_t)need(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(backend, threads);
    int prompt = p->tokens - SINGLE;
    us[0] = us[1] = 0;
    for (int first = 0; first < prompt; first += PIECE) {
        int count = prompt - first < PIECE ? prompt - first : PIECE;
        us[0] += (double)step(p, layer, backend, first, count, out);
    }
    for (int first = prompt; first < p->tokens; first++)
        us[1] += (double)step(p, layer, backend, first, 1, out) / SINGLE;
    ggml_backend_free(backend);
}

/* ---- Checks -------------------------------------------------------------------------------- */

static nsa_tensor rows(const void *data, nsa_dtype dtype, const nsa_desc *d, int heads, int width) {
    return nsa_tensor_bthd((void *)(uintptr_t)data, dtype, d->tokens, heads, width);
}

/* The same by one call of the library, without ggml but for its f16 rows. */
static void whole(const problem *p, const nsa_desc *d, float *out) {
    size_t n = (size_t)d->tokens * (size_t)d->heads, width = (size_t)d->dim;
    float *memory = (float *)need(malloc(n * 3 * (width + 1) * sizeof *memory));
    uint16_t *squeezed = (uint16_t *)need(malloc(2 * ggml_nbytes(p->squeezed[0])));
    int32_t *blocks = (int32_t *)need(
        malloc((size_t)d->tokens * (size_t)(d->kv_heads * nsa_block_list_width(d)) * 4));
    nsa_attention x = {0};
    x.q = rows(p->q, NSA_F32, d, d->heads, d->dim);
    x.k_cmp.x = x.k_slc = x.k_win = rows(p->cache[0]->data, NSA_F16, d, d->kv_heads, d->dim);
    x.v_cmp.x = x.v_slc = x.v_win = rows(p->cache[1]->data, NSA_F16, d, d->kv_heads, d->dim);
    x.k_cmp.dim = x.v_cmp.dim = d->dim;
    x.k_cmp.out = rows(squeezed, NSA_F16, d, d->kv_heads, d->dim);
    x.v_cmp.out = rows(squeezed + ggml_nelements(p->squeezed[0]), NSA_F16, d, d->kv_heads, d->dim);
    x.gates = rows(p->gates, NSA_F32, d, d->heads, 3);
    x.blocks = rows(blocks, NSA_I32, d, d->kv_heads, nsa_block_list_width(d));
    x.out_cmp = rows(memory, NSA_F32, d, d->heads, d->dim);
    x.out_slc = rows(memory + n * width, NSA_F32, d, d->heads, d->dim);
    x.out_win = rows(memory + 2 * n * width, NSA_F32, d, d->heads, d->dim);
    x.lse_cmp = rows(memory + 3 * n * width, NSA_F32, d, d->heads, 1);
    x.lse_slc = rows(memory + 3 * n * width + n, NSA_F32, d, d->heads, 1);
    x.lse_win = rows(memory + 3 * n * width + 2 * n, NSA_F32, d, d->heads, 1);
    x.out = rows(out, NSA_F32, d, d->heads, d->dim);
    size_t bytes = nsa_attention_forward_workspace_size(&x, d);
    void *workspace = need(malloc(bytes));
    nsa_status s = nsa_attention_forward(&x, d, workspace, bytes);
    if (s != NSA_OK) {
        fprintf(stderr, "%s: %s\n", nsa_status_where(s), nsa_status_text(s));
        exit(1);
    }
    free(workspace), free(blocks), free(squeezed), free(memory);
}

/* Graphs of any number of threads give the bits of one call. */
static int check_bits(int heads, int kv_heads, int dim) {
    nsa_desc d = nsa_desc_default(1, 1397, heads, kv_heads, dim);
    ggml_backend_t backend = (ggml_backend_t)need(ggml_backend_cpu_init());
    problem p;
    open_problem(&p, &d, GGML_TYPE_F16, backend);
    size_t n = (size_t)d.tokens * (size_t)(heads * dim);
    float *out = (float *)need(malloc(n * sizeof *out));
    float *expected = (float *)need(malloc(n * sizeof *expected));
    const int threads[] = {1, 2, 3, 7};
    int failures = 0;
    for (int i = 0; i < 4; i++) {
        nsa_ggml *layer = (nsa_ggml *)need(nsa_ggml_new(&d, PIECE, 5));
        double us[2];
        run(&p, layer, threads[i], out, us);
        if (i == 0) whole(&p, &d, expected);
        size_t differ = 0;
        for (size_t j = 0; j < n; j++) differ += memcmp(out + j, expected + j, sizeof *out) != 0;
        printf("heads %d/%d, dim %d, %d threads: %zu of %zu numbers differ from one call\n", heads,
               kv_heads, dim, threads[i], differ, n);
        failures += differ != 0;
        nsa_ggml_free(layer);
    }
    free(expected), free(out);
    close_problem(&p);
    ggml_backend_free(backend);
    return failures;
}

/* A window that holds every key, and gates that let only it through: causal attention. The cache is
   f32, because over f16 rows ggml rounds q and its own sums to f16. */
static int check_flash(int heads, int kv_heads, int dim) {
    nsa_desc d = nsa_desc_default(1, 1100, heads, kv_heads, dim);
    d.window = d.tokens;
    d.gate = NSA_GATE_NONE;
    ggml_backend_t backend = (ggml_backend_t)need(ggml_backend_cpu_init());
    problem p;
    open_problem(&p, &d, GGML_TYPE_F32, backend);
    for (int i = 0; i < d.tokens * heads * 3; i++) p.gates[i] = i % 3 == 2;
    size_t n = (size_t)d.tokens * (size_t)(heads * dim);
    float *out[2];
    double worst = 0, us[2];
    nsa_ggml *layer = (nsa_ggml *)need(nsa_ggml_new(&d, PIECE, 2));
    for (int i = 0; i < 2; i++) {
        out[i] = (float *)need(malloc(n * sizeof *out[i]));
        run(&p, i ? NULL : layer, 2, out[i], us);
    }
    int differ = 0; /* a NaN does too */
    for (size_t j = 0; j < n; j++) {
        double error = fabs((double)out[0][j] - (double)out[1][j]);
        worst = fmax(worst, error);
        differ |= !(error < 1e-5);
    }
    printf("heads %d/%d, dim %d: from flash attention by %.1e at most\n", heads, kv_heads, dim,
           worst);
    nsa_ggml_free(layer);
    free(out[0]), free(out[1]);
    close_problem(&p);
    ggml_backend_free(backend);
    return differ;
}

static void measure(int tokens, int threads) {
    nsa_desc d = nsa_desc_default(1, tokens, 16, 1, 64);
    ggml_backend_t backend = (ggml_backend_t)need(ggml_backend_cpu_init());
    problem p;
    open_problem(&p, &d, GGML_TYPE_F16, backend);
    float *out = (float *)need(malloc((size_t)tokens * 16 * 64 * sizeof *out));
    nsa_ggml *layer = (nsa_ggml *)need(nsa_ggml_new(&d, PIECE, threads));
    printf("%d tokens, 16 heads over 1 of 64, f16 cache, %d threads\n", tokens, threads);
    for (int i = 0; i < 2; i++) {
        double us[2];
        run(&p, i ? NULL : layer, threads, out, us);
        printf("%-16s prompt in pieces of %d: %7.0f ms, a token after it: %6.0f us\n",
               i ? "flash attention" : "NSA", PIECE, us[0] / 1000, us[1]);
    }
    nsa_ggml_free(layer);
    free(out);
    close_problem(&p);
    ggml_backend_free(backend);
}

int main(int argc, char **argv) {
    ggml_time_init();
    int tokens = argc == 3 ? atoi(argv[1]) : 0, threads = argc == 3 ? atoi(argv[2]) : 0;
    if (argc != 1 && (tokens <= SINGLE || threads < 1))
        return fprintf(stderr, "nsa_ggml [TOKENS THREADS], more than %d tokens\n", SINGLE), 2;
    if (argc == 3) return measure(tokens, threads), 0;
    return check_bits(4, 1, 64) + check_bits(6, 3, 40) + check_flash(4, 1, 64) +
           check_flash(8, 2, 128);
}

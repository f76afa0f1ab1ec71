/* bench_gpu.c: what each branch, the whole, dense attention and a step of decoding take on a GPU,
   beside the rate of a copy measured in the same run. Steps are of 1, 32 and 128 sequences. A row
   that there is no memory for says so.
   Twin: bench/bench_attention.c. Not here: PyTorch and other libraries (peers.py), a verdict.

   usage: bench_gpu [--json FILE] [--quick] [--count]
   --count prints the work of each row, counted, and runs nothing: it needs no GPU. */
#include "nsa_cuda.cuh"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct shape {
    int heads, kv_heads, dim, dim_v;
} shape;

static const shape shapes[] = {
    {64, 4, 128, 128}, {64, 4, 192, 128}, {16, 1, 64, 64}, {12, 2, 64, 64}, {32, 32, 128, 128}};
static const int tokens_of[] = {2048, 4096, 8192, 16384, 32768, 65536, 131072};

#define COUNT(table) ((int)(sizeof(table) / sizeof(table)[0]))

static void demand(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "bench_gpu: %s: %s\n", what, cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

/* ---- The problem: three branches over one K and V, bf16 ---- */

enum { OWNED = 32 };

typedef struct problem {
    nsa_desc d;
    nsa_attention x, dx;
    nsa_attend dense, ddense;
    nsa_tensor near; /* block lists that neighbours share */
    nsa_cache cache;
    cudaGraphExec_t step; /* of decoding, once it is recorded */
    void *workspace, *owned[OWNED];
    size_t bytes;
    int owns, lacks; /* memory, so that it cannot be timed */
} problem;

/* As many sequences as a step of decoding takes; each is a copy of the problem's. */
typedef struct many {
    nsa_cache cache;
    void *memory, *workspace;
    size_t bytes;
} many;

/* NULL where there is none, or was none before. */
static void *device_memory(problem *p, size_t bytes) {
    void *data = NULL;
    cudaError_t e = p->lacks ? cudaSuccess : cudaMalloc(&data, bytes ? bytes : 1);
    if (e == cudaErrorMemoryAllocation) p->lacks = 1;
    if (p->lacks) {
        (void)cudaGetLastError(); /* or the next call reports it */
        return NULL;
    }
    demand(e == cudaSuccess, "cudaMalloc");
    demand(p->owns < OWNED, "more tensors than room for them");
    return p->owned[p->owns++] = data;
}

/* Numbers of both signs and several sizes, as bf16; where `seed` is 0, zeros. As many of them as a
   prime number says come again and again, so that no two rows are alike: keys that are would tie,
   and all queries would read the first blocks, which stay in cache. */
static void fill(void *to, size_t bytes, uint32_t seed) {
    enum { PERIOD = 1048573 };
    static uint16_t numbers[PERIOD];
    if (!to) return;
    if (!seed) {
        demand(cudaMemset(to, 0, bytes) == cudaSuccess, "cudaMemset");
        return;
    }
    for (int i = 0; i < PERIOD; i++) {
        seed = seed * 1664525u + 1013904223u;
        numbers[i] = nsa_f32_to_bf16(((float)(seed >> 8) / 8388608.0f - 1.0f) * 1.7f);
    }
    for (size_t at = 0; at < bytes; at += sizeof numbers) {
        size_t n = bytes - at < sizeof numbers ? bytes - at : sizeof numbers;
        demand(cudaMemcpy((char *)to + at, numbers, n, cudaMemcpyHostToDevice) == cudaSuccess,
               "cudaMemcpy");
    }
}

static nsa_tensor take(problem *p, nsa_dtype dtype, int rows, int heads, int width, uint32_t seed) {
    size_t bytes = (size_t)rows * (size_t)heads * (size_t)width * (dtype == NSA_BF16 ? 2u : 4u);
    void *data = device_memory(p, bytes);
    fill(data, bytes, seed);
    return nsa_tensor_bthd(data, dtype, rows, heads, width);
}

static nsa_compress mean_of(nsa_tensor x, nsa_tensor out, int dim) {
    nsa_compress c;
    memset(&c, 0, sizeof c);
    c.phi = NSA_PHI_MEAN, c.dim = dim, c.x = x, c.out = out;
    return c;
}

static nsa_desc desc_of(const shape *s, int tokens) {
    nsa_desc d = nsa_desc_default(1, tokens, s->heads, s->kv_heads, s->dim);
    d.dim_v = s->dim_v;
    return d;
}

static void problem_views(problem *p) {
    const nsa_desc *d = &p->d;
    const int T = d->tokens, H = d->heads, Hk = d->kv_heads, cmp = nsa_cmp_count(d, T);
    nsa_tensor k = take(p, NSA_BF16, T, Hk, d->dim, 2), v = take(p, NSA_BF16, T, Hk, d->dim_v, 3);
    nsa_attention *x = &p->x;
    x->q = take(p, NSA_BF16, T, H, d->dim, 1);
    x->k_slc = x->k_win = k, x->v_slc = x->v_win = v;
    x->k_cmp = mean_of(k, take(p, NSA_BF16, cmp, Hk, d->dim, 0), d->dim);
    x->v_cmp = mean_of(v, take(p, NSA_BF16, cmp, Hk, d->dim_v, 0), d->dim_v);
    x->gates = take(p, NSA_BF16, T, H, 3, 4);
    x->blocks = take(p, NSA_I32, T, Hk, nsa_block_list_width(d), 0);
    p->near = take(p, NSA_I32, T, Hk, nsa_block_list_width(d), 0);
    nsa_tensor *outs[] = {&x->out_cmp, &x->out_slc, &x->out_win, &x->out, &p->dense.out};
    nsa_tensor *lses[] = {&x->lse_cmp, &x->lse_slc, &x->lse_win, &p->dense.lse};
    for (int i = 0; i < COUNT(outs); i++) *outs[i] = take(p, NSA_BF16, T, H, d->dim_v, 0);
    for (int i = 0; i < COUNT(lses); i++) *lses[i] = take(p, NSA_F32, T, H, 1, 0);
    p->dense.q = x->q, p->dense.k = k, p->dense.v = v;
    p->dx = *x;
    p->dx.q = take(p, NSA_BF16, T, H, d->dim, 0);
    p->dx.k_slc = p->dx.k_win = p->dx.k_cmp.x = take(p, NSA_BF16, T, Hk, d->dim, 0);
    p->dx.v_slc = p->dx.v_win = p->dx.v_cmp.x = take(p, NSA_BF16, T, Hk, d->dim_v, 0);
    p->dx.gates = take(p, NSA_BF16, T, H, 3, 0);
    p->dx.out = take(p, NSA_BF16, T, H, d->dim_v, 5);
    p->ddense.q = p->dx.q, p->ddense.k = p->dx.k_slc, p->ddense.v = p->dx.v_slc;
    p->ddense.out = p->dx.out;
}

/* A cache that holds the problem's tokens and has room for the steps that are timed. */
enum { CHUNK = 128 };

static void problem_cache(problem *p) {
    nsa_desc d = p->d;
    d.tokens = d.count = p->d.tokens + CHUNK;
    size_t bytes = nsa_cuda_cache_size(&d, NSA_BF16, CHUNK - 1);
    void *memory = device_memory(p, bytes);
    demand(p->lacks || nsa_cuda_cache_init(&p->cache, &d, NSA_BF16, CHUNK - 1, memory, bytes,
                                           NULL) == NSA_OK,
           "a cache");
}

/* The next `count` tokens of each of the cache's sequences are the problem's: the first sequence's
   from `first` on, those of the next behind them. */
static nsa_status decode(const problem *p, nsa_cache *cache, int first, int count, void *workspace,
                         size_t bytes, cudaStream_t stream) {
    nsa_attention x = p->x;
    nsa_tensor *inputs[] = {&x.q,     &x.k_cmp.x, &x.v_cmp.x, &x.k_slc,
                            &x.v_slc, &x.k_win,   &x.v_win,   &x.gates};
    nsa_tensor *outs[] = {&x.out,     &x.out_cmp, &x.out_slc, &x.out_win,
                          &x.lse_cmp, &x.lse_slc, &x.lse_win, &x.blocks};
    for (int i = 0; i < COUNT(inputs); i++) {
        inputs[i]->data = (uint16_t *)inputs[i]->data + inputs[i]->token * first;
        inputs[i]->batch = inputs[i]->token * count;
    }
    for (int i = 0; i < COUNT(outs); i++) outs[i]->batch = outs[i]->token * count;
    return nsa_cuda_decode(&x, cache, count, NULL, NULL, NULL, workspace, bytes, stream);
}

/* 0: there is no memory for it. */
static int problem_make(problem *p, const shape *s, int tokens) {
    memset(p, 0, sizeof *p);
    p->d = desc_of(s, tokens);
    problem_views(p);
    problem_cache(p);
    if (p->lacks) return 0;
    const size_t sizes[] = {nsa_cuda_attention_forward_workspace_size(&p->x, &p->d),
                            nsa_cuda_attention_backward_workspace_size(&p->dx, &p->x, &p->d),
                            nsa_cuda_attend_dense_forward_workspace_size(&p->d),
                            nsa_cuda_attend_dense_backward_workspace_size(&p->d),
                            nsa_cuda_decode_workspace_size(&p->x, &p->cache, CHUNK)};
    for (int i = 0; i < COUNT(sizes); i++) p->bytes = sizes[i] > p->bytes ? sizes[i] : p->bytes;
    p->workspace = device_memory(p, p->bytes);
    for (int t = 0; !p->lacks && t < tokens; t += CHUNK)
        demand(decode(p, &p->cache, t, CHUNK, p->workspace, p->bytes, NULL) == NSA_OK, "a chunk");
    return !p->lacks;
}

/* `batch` copies of the problem's sequence, which has decoded nothing yet; 0: no room for them. */
static int many_make(many *m, const problem *p, int batch) {
    nsa_desc d = p->cache.desc;
    size_t room = 0, all = 0;
    memset(m, 0, sizeof *m);
    d.batch = batch;
    const size_t size = nsa_cuda_cache_size(&d, NSA_BF16, CHUNK - 1);
    m->cache.desc = d;
    m->bytes = nsa_cuda_decode_workspace_size(&p->x, &m->cache, 1);
    demand(cudaMemGetInfo(&room, &all) == cudaSuccess, "cudaMemGetInfo");
    if (size + m->bytes + all / 50 > room) return 0;
    demand(cudaMalloc(&m->memory, size) == cudaSuccess, "a cache of many sequences");
    demand(cudaMalloc(&m->workspace, m->bytes) == cudaSuccess, "its workspace");
    demand(nsa_cuda_cache_init(&m->cache, &d, NSA_BF16, CHUNK - 1, m->memory, size, NULL) == NSA_OK,
           "a cache of many sequences");
    for (int b = 0; b < batch; b++)
        demand(nsa_cuda_cache_fork(&m->cache, b, &p->cache, 0, p->d.tokens, NULL, NULL) == NSA_OK,
               "a copy of a sequence");
    return 1;
}

static void many_free(many *m) {
    demand(cudaFree(m->memory) == cudaSuccess && cudaFree(m->workspace) == cudaSuccess, "cudaFree");
}

/* Once blocks are selected: the queries of a block all get the first one's list. Random rows select
   at random; trained models are somewhere between the two. */
static void problem_near(problem *p) {
    const size_t row = (size_t)p->near.token * sizeof(int32_t);
    const char *from = p->x.blocks.data;
    char *to = p->near.data;
    for (int t = 0; t < p->d.slc_block && t < p->d.tokens; t++) {
        const size_t apart = row * (size_t)p->d.slc_block;
        const size_t blocks = (size_t)((p->d.tokens - 1 - t) / p->d.slc_block + 1);
        demand(cudaMemcpy2D(to + row * (size_t)t, apart, from, apart, row, blocks,
                            cudaMemcpyDeviceToDevice) == cudaSuccess,
               "cudaMemcpy2D");
    }
}

static void problem_free(problem *p) {
    for (int i = 0; i < p->owns; i++) demand(cudaFree(p->owned[i]) == cudaSuccess, "cudaFree");
}

/* ---- What is timed ---- */

typedef nsa_status run(problem *p);

static many sequences; /* of the row that is timed */

static nsa_attend branch_of(const nsa_attention *x, nsa_tensor k, nsa_tensor v, nsa_tensor out,
                            nsa_tensor lse) {
    nsa_attend a = {x->q, k, v, out, lse, x->blocks};
    return a;
}
static nsa_attend cmp_of(const nsa_attention *x) {
    return branch_of(x, x->k_cmp.out, x->v_cmp.out, x->out_cmp, x->lse_cmp);
}
static nsa_attend slc_of(const nsa_attention *x) {
    return branch_of(x, x->k_slc, x->v_slc, x->out_slc, x->lse_slc);
}
static nsa_attend win_of(const nsa_attention *x) {
    return branch_of(x, x->k_win, x->v_win, x->out_win, x->lse_win);
}

static nsa_status run_compress(problem *p) {
    nsa_status s = nsa_cuda_compress_forward(&p->x.k_cmp, &p->d, p->workspace, p->bytes, NULL);
    return s == NSA_OK ? nsa_cuda_compress_forward(&p->x.v_cmp, &p->d, p->workspace, p->bytes, NULL)
                       : s;
}
static nsa_status run_cmp(problem *p) {
    nsa_attend x = cmp_of(&p->x);
    return nsa_cuda_attend_cmp_forward(&x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_select(problem *p) {
    nsa_select x = {p->x.q,      p->x.k_cmp.out,           p->x.lse_cmp,
                    p->x.blocks, {NULL, NSA_F32, 0, 0, 0}, {NULL, NSA_F32, 0, 0, 0}};
    return nsa_cuda_select_blocks(&x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_slc(problem *p) {
    nsa_attend x = slc_of(&p->x);
    return nsa_cuda_attend_slc_forward(&x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_slc_near(problem *p) {
    nsa_attend x = slc_of(&p->x);
    x.blocks = p->near;
    return nsa_cuda_attend_slc_forward(&x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_win(problem *p) {
    nsa_attend x = win_of(&p->x);
    return nsa_cuda_attend_win_forward(&x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_gate(problem *p) {
    nsa_gate x = {p->x.gates, p->x.out_cmp, p->x.out_slc, p->x.out_win, p->x.out};
    return nsa_cuda_gate_forward(&x, &p->d, NULL);
}
static nsa_status run_nsa(problem *p) {
    return nsa_cuda_attention_forward(&p->x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_dense(problem *p) {
    return nsa_cuda_attend_dense_forward(&p->dense, &p->d, p->workspace, p->bytes, NULL);
}
/* A branch's backward adds to the gradients of dense attention, which have its shape. */
static nsa_status run_slc_backward(problem *p) {
    nsa_attend x = slc_of(&p->x);
    return nsa_cuda_attend_slc_backward(&p->ddense, &x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_slc_near_backward(problem *p) {
    nsa_attend x = slc_of(&p->x);
    x.blocks = p->near;
    return nsa_cuda_attend_slc_backward(&p->ddense, &x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_win_backward(problem *p) {
    nsa_attend x = win_of(&p->x);
    return nsa_cuda_attend_win_backward(&p->ddense, &x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_cmp_backward(problem *p) {
    nsa_attend x = cmp_of(&p->x);
    return nsa_cuda_attend_cmp_backward(&p->ddense, &x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_nsa_backward(problem *p) {
    return nsa_cuda_attention_backward(&p->dx, &p->x, &p->d, p->workspace, p->bytes, NULL);
}
static nsa_status run_dense_backward(problem *p) {
    return nsa_cuda_attend_dense_backward(&p->ddense, &p->dense, &p->d, p->workspace, p->bytes,
                                          NULL);
}

static nsa_status run_decode(problem *p) {
    return decode(p, &sequences.cache, 0, 1, sequences.workspace, sequences.bytes, NULL);
}

/* The same step, recorded once: without the time that its launches take the host. */
static nsa_status run_decode_graph(problem *p) {
    cudaStream_t stream;
    cudaGraph_t graph;
    if (p->step) return cudaGraphLaunch(p->step, NULL) == cudaSuccess ? NSA_OK : NSA_ERROR_CUDA;
    demand(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "a stream");
    demand(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
           "a recording");
    nsa_status s = decode(p, &sequences.cache, 0, 1, sequences.workspace, sequences.bytes, stream);
    demand(cudaStreamEndCapture(stream, &graph) == cudaSuccess &&
               cudaGraphInstantiate(&p->step, graph, 0) == cudaSuccess,
           "a graph");
    demand(cudaGraphDestroy(graph) == cudaSuccess && cudaStreamDestroy(stream) == cudaSuccess,
           "a graph's end");
    return s;
}

enum work { WORK_NONE, WORK_CMP, WORK_SLC, WORK_WIN, WORK_NSA, WORK_DENSE, WORK_SELECT };

/* In an order in which each finds what it reads. */
static const struct {
    const char *branch, *pass;
    run *run;
    enum work work;
    int batch; /* of a step; elsewhere 0: one sequence */
} rows[] = {{"compress", "fwd", run_compress, WORK_NONE, 0},
            {"cmp", "fwd", run_cmp, WORK_CMP, 0},
            {"select", "fwd", run_select, WORK_SELECT, 0},
            {"slc", "fwd", run_slc, WORK_SLC, 0},
            {"slc_near", "fwd", run_slc_near, WORK_SLC, 0},
            {"win", "fwd", run_win, WORK_WIN, 0},
            {"gate", "fwd", run_gate, WORK_NONE, 0},
            {"nsa", "fwd", run_nsa, WORK_NSA, 0},
            {"dense", "fwd", run_dense, WORK_DENSE, 0},
            {"cmp", "bwd", run_cmp_backward, WORK_CMP, 0},
            {"slc", "bwd", run_slc_backward, WORK_SLC, 0},
            {"slc_near", "bwd", run_slc_near_backward, WORK_SLC, 0},
            {"win", "bwd", run_win_backward, WORK_WIN, 0},
            {"nsa", "bwd", run_nsa_backward, WORK_NSA, 0},
            {"dense", "bwd", run_dense_backward, WORK_DENSE, 0},
            {"decode", "step", run_decode, WORK_NONE, 1},
            {"decode", "graph", run_decode_graph, WORK_NONE, 1},
            {"decode", "step", run_decode, WORK_NONE, 32},
            {"decode", "graph", run_decode_graph, WORK_NONE, 32},
            {"decode", "step", run_decode, WORK_NONE, 128},
            {"decode", "graph", run_decode_graph, WORK_NONE, 128}};

/* Query-key pairs over all query heads; of slc as many blocks as there are, up to the list's
   width. */
static double pairs_of(const nsa_desc *d, enum work work) {
    double cmp = 0, slc = 0, win = 0, dense = 0;
    for (int t = 0; t < d->tokens; t++) {
        int blocks = nsa_slc_candidates(d, t), width = nsa_block_list_width(d);
        cmp += nsa_cmp_visible(d, t);
        win += t + 1 - nsa_window_begin(d, t);
        dense += t + 1.0;
        slc += ((blocks < width ? blocks : width) - 1.0) * d->slc_block + t % d->slc_block + 1;
    }
    double pairs = work == WORK_CMP || work == WORK_SELECT ? cmp
                   : work == WORK_SLC                      ? slc
                   : work == WORK_WIN                      ? win
                   : work == WORK_NSA                      ? cmp + slc + win
                   : work == WORK_DENSE                    ? dense
                                                           : 0;
    return pairs * d->heads;
}

/* Forward: q k, p v. Backward: q k, dout v, p dout, ds k, ds q. Selection: q k alone. Selection's
   second q k pass is not work of the whole: it is what the whole pays for it. */
static double flops_of(const nsa_desc *d, int i) {
    int backward = !strcmp(rows[i].pass, "bwd");
    double per_pair = rows[i].work == WORK_SELECT ? d->dim
                      : backward                  ? 3 * d->dim + 2 * d->dim_v
                                                  : d->dim + d->dim_v;
    return 2 * per_pair * pairs_of(d, rows[i].work);
}

/* ---- Time ---- */

static int by_size(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The median of up to 50 runs, or as many as half a second holds, three at least; up to three more
   come before, one if it takes long. `spread`: max over min. */
static float milliseconds(run *call, problem *p, float *spread) {
    enum { RUNS = 50, LEAST = 3, WARM = 3, LONG = 100 };
    float ms[RUNS], all = 0;
    int n = 0;
    cudaEvent_t begin, end; /* RUNS and WARM steps of decoding fit the cache */
    demand(cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess, "event");
    for (int warm = WARM; n < RUNS && (n < LEAST || all < 500);) {
        float one = 0;
        demand(cudaEventRecord(begin, NULL) == cudaSuccess, "event");
        demand(call(p) == NSA_OK, "a call");
        demand(cudaEventRecord(end, NULL) == cudaSuccess, "event");
        demand(cudaEventSynchronize(end) == cudaSuccess, "a kernel");
        demand(cudaEventElapsedTime(&one, begin, end) == cudaSuccess, "event");
        if (warm > 0) {
            warm = one < LONG ? warm - 1 : 0;
            continue;
        }
        ms[n++] = one;
        all += one;
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    qsort(ms, (size_t)n, sizeof *ms, by_size);
    *spread = ms[n - 1] / ms[0];
    return ms[n / 2];
}

static nsa_status run_copy(problem *p) {
    return cudaMemcpyAsync(p->owned[1], p->owned[0], p->bytes, cudaMemcpyDeviceToDevice, NULL) ==
                   cudaSuccess
               ? NSA_OK
               : NSA_ERROR_CUDA;
}

/* GB/s of a copy on the device, bytes read and written. */
static double copy_rate(void) {
    problem p;
    float spread;
    memset(&p, 0, sizeof p);
    p.bytes = (size_t)1 << 30;
    for (int i = 0; i < 2; i++) fill(device_memory(&p, p.bytes), p.bytes, 0);
    demand(!p.lacks, "no memory for a copy of 1 GiB");
    double rate = 2e-6 * (double)p.bytes / (double)milliseconds(run_copy, &p, &spread);
    problem_free(&p);
    return rate;
}

/* ---- The report ---- */

typedef struct report {
    FILE *json;
    int rows, count_only;
} report;

static void report_row(report *r, const nsa_desc *d, int i, float ms, float spread) {
    double flops = flops_of(d, i);
    const int batch = rows[i].batch ? rows[i].batch : 1;
    printf("%-8s %-5s %3d  %2d %2d %3d/%3d  %6d  %9.4g TFLOP", rows[i].branch, rows[i].pass, batch,
           d->heads, d->kv_heads, d->dim, d->dim_v, d->tokens, flops * 1e-12);
    if (ms > 0) printf("  %9.3f ms  %7.1f TFLOP/s", (double)ms, flops / (double)ms * 1e-9);
    printf("%s\n", ms > 0 || r->count_only ? "" : "  no memory for it");
    if (!r->json) return;
    fprintf(r->json, "%s\n  {\"branch\": \"%s\", \"pass\": \"%s\", \"batch\": %d, \"heads\": %d, ",
            r->rows++ ? "," : "", rows[i].branch, rows[i].pass, batch, d->heads);
    fprintf(r->json, "\"kv_heads\": %d, \"dim\": %d, \"dim_v\": %d, \"tokens\": %d, ", d->kv_heads,
            d->dim, d->dim_v, d->tokens);
    fprintf(r->json, "\"tflop\": %.6g, ", flops * 1e-12);
    if (ms > 0)
        fprintf(r->json, "\"ms\": %.5g, \"spread\": %.3g, \"tflops\": %.4g}", (double)ms,
                (double)spread, flops / (double)ms * 1e-9);
    else
        fprintf(r->json, "\"ms\": null, \"spread\": null, \"tflops\": null}");
    fflush(r->json); /* what a run that is cut short has measured is told */
}

static void measure(report *r, const shape *s, int tokens) {
    problem p = {.lacks = 0};
    nsa_desc d = desc_of(s, tokens);
    const int made = !r->count_only && problem_make(&p, s, tokens);
    if (made) {
        demand(run_nsa(&p) == NSA_OK && run_dense(&p) == NSA_OK, "the whole");
        problem_near(&p);
    }
    for (int i = 0; i < COUNT(rows); i++) {
        const int steps = rows[i].batch && made;
        float spread = 0, ms = 0;
        if (made && (!steps || many_make(&sequences, &p, rows[i].batch)))
            ms = milliseconds(rows[i].run, &p, &spread);
        report_row(r, &d, i, ms, spread);
        if (steps && sequences.memory) many_free(&sequences);
        if (p.step) {
            demand(cudaGraphExecDestroy(p.step) == cudaSuccess, "cudaGraphExecDestroy");
            p.step = NULL;
        }
    }
    problem_free(&p);
}

/* What tells most goes first: the first shape at two lengths. */
static int is_quick(int s, int t) {
    return s == 0 && (tokens_of[t] == 8192 || tokens_of[t] == 65536);
}

int main(int argc, char **argv) {
    report r = {NULL, 0, 0};
    int quick = 0, devices = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            quick = 1;
        else if (!strcmp(argv[i], "--count"))
            r.count_only = 1;
        else if (!strcmp(argv[i], "--json") && i + 1 < argc && (r.json = fopen(argv[i + 1], "w")))
            i++;
        else {
            fprintf(stderr, "bench_gpu: %s: takes --json FILE (writable), --quick, --count\n",
                    argv[i]);
            return 2;
        }
    }
    if (!r.count_only && (cudaGetDeviceCount(&devices) != cudaSuccess || !devices)) {
        fprintf(stderr, "bench_gpu: no GPU\n");
        return 77;
    }
    double copy = r.count_only ? 0 : copy_rate();
    if (r.json) fprintf(r.json, "{\"copy_gbs\": %.5g, \"rows\": [", copy);
    printf("a copy: %.0f GB/s\n", copy);
    for (int rest = 0; rest < 2 - quick; rest++)
        for (int s = 0; s < COUNT(shapes); s++)
            for (int t = 0; t < COUNT(tokens_of); t++)
                if (is_quick(s, t) != rest) measure(&r, &shapes[s], tokens_of[t]);
    if (r.json) fprintf(r.json, "\n]}\n");
    return r.json && fclose(r.json) ? 1 : 0;
}

/* ops_cuda.cu - the operations on a CUDA device: launches on one stream, attention through
   nsa_cuda.cuh. Twin: ops_cuda.h; ops_cpu.c is the same on the CPU. Here nothing waits for the
   device but download and an upload that finds its staging memory still in use, and nothing is
   allocated but by open and allocate. */
#include "nsa_cuda.cuh"

extern "C" {
#include "base/fallback.h"
#include "ops/ops.h"
}
#include "ops/cuda/ops_cuda.h"
#include "ops/cuda/cuda_loss.cuh"
#include "ops/cuda/cuda_optimizer.cuh"
#include "ops/cuda/cuda_stats.cuh"
#include "ops/cuda/gemm_cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SCRATCH_BYTES = 4 << 20, STAGE_BYTES = 1 << 20, STAGES = 8, POSTS = 2 };

struct cuda_state {
    gemm_cuda *gemm;
    cudaStream_t stream;
    nsa_reads *reads; /* of a decoding step, and whether it was refused */
    nsa_status *verdict;
    void *scratch;  /* sums in parts, and losses */
    uint32_t *word; /* phase and layer, written by the device */
    char *stage;    /* STAGES pieces of pinned memory that uploads pass through */
    cudaEvent_t sent[STAGES];
    int next;
    step_state *posts; /* POSTS of them, pinned: states on their way to the host */
    cudaEvent_t arrived[POSTS];
    int posted, fetched; /* so far, modulo POSTS */
    int64_t allocated;   /* bytes, ever: a run releases nothing before its end */
    bool without_wgmma;  /* a device that has it runs code that was compiled for others */
    bool failed;
    fault why;
};

static cuda_state *state_of(const ops *o) {
    return static_cast<cuda_state *>(o->state);
}

static void note(const ops *o, const char *what, const char *why) {
    cuda_state *s = state_of(o);
    if (s->failed) return;
    s->failed = true;
    fault_set(&s->why, "%s: %s", what, why);
}

static void demand(const ops *o, const char *what, cudaError_t error) {
    if (error != cudaSuccess) note(o, what, cudaGetErrorString(error));
}

static void demand_status(const ops *o, const char *what, nsa_status s) {
    if (s == NSA_OK) return;
    char why[256];
    const char *where = nsa_status_where(s);
    snprintf(why, sizeof why, "%s (%s)%s%s", nsa_status_text(s), where,
             nsa_status_kind(s) == NSA_ERROR_CUDA ? ": " : "",
             nsa_status_kind(s) == NSA_ERROR_CUDA ? cudaGetErrorString(cudaGetLastError()) : "");
    note(o, what, why);
}

static cuda_array array_of(const ops *o, const void *x) {
    return {const_cast<void *>(x), o->dtype};
}

/* A grid of `each` items a block; empty work is no launch. */
#define LAUNCH_ITEMS(o, items, each, kernel, ...)                                           \
    do {                                                                                    \
        const int64_t launch_items = (items);                                               \
        if (launch_items > 0)                                                               \
            demand(o, #kernel,                                                              \
                   NSA_LAUNCH(kernel,                                                       \
                              dim3(static_cast<unsigned>((launch_items - 1) / (each) + 1)), \
                              dim3(ROW_THREADS), 0, state_of(o)->stream, __VA_ARGS__));     \
    } while (0)

/* ---- Memory -------------------------------------------------------------------------------- */

static void *cuda_allocate(const ops *o, size_t bytes) {
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes ? bytes : 64) != cudaSuccess) {
        cudaGetLastError(); /* a refusal is told by NULL */
        return NULL;
    }
    demand(o, "cudaMemset", cudaMemsetAsync(memory, 0, bytes, state_of(o)->stream));
    state_of(o)->allocated += static_cast<int64_t>(bytes);
    return memory;
}

static void cuda_release(const ops *o, void *memory) {
    demand(o, "cudaFree", cudaFree(memory));
}

static void cuda_memory(const ops *o, int64_t *allocated, int64_t *taken) {
    size_t left = 0, total = 0;
    demand(o, "memory", cudaMemGetInfo(&left, &total));
    *allocated = state_of(o)->allocated;
    *taken = static_cast<int64_t>(total - left);
}

/* Small arrays (a batch) pass through pinned memory, so that the host goes on at once. */
static void cuda_upload(const ops *o, void *to, const void *from, size_t bytes) {
    cuda_state *s = state_of(o);
    if (bytes > STAGE_BYTES) {
        demand(o, "upload", cudaStreamSynchronize(s->stream));
        demand(o, "upload", cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
        return;
    }
    char *stage = s->stage + static_cast<size_t>(s->next) * STAGE_BYTES;
    demand(o, "upload", cudaEventSynchronize(s->sent[s->next]));
    memcpy(stage, from, bytes);
    demand(o, "upload", cudaMemcpyAsync(to, stage, bytes, cudaMemcpyHostToDevice, s->stream));
    demand(o, "upload", cudaEventRecord(s->sent[s->next], s->stream));
    s->next = (s->next + 1) % STAGES;
}

static void cuda_download(const ops *o, void *to, const void *from, size_t bytes) {
    demand(o, "download", cudaStreamSynchronize(state_of(o)->stream));
    demand(o, "download", cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

static void cuda_zero(const ops *o, void *x, size_t bytes) {
    demand(o, "cudaMemset", cudaMemsetAsync(x, 0, bytes, state_of(o)->stream));
}

static void cuda_copy(const ops *o, void *to, const void *from, size_t bytes) {
    demand(o, "copy",
           cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, state_of(o)->stream));
}

static void cuda_convert(const ops *o, void *to, const real *from, int64_t count) {
    LAUNCH_ITEMS(o, count, ROW_THREADS, round_kernel, array_of(o, to), from, count);
}

static void cuda_mark(const ops *o, phase p, int layer) {
    const cuda_state *s = state_of(o);
    const uint32_t value = static_cast<uint32_t>(p) << 16 | static_cast<uint32_t>(layer + 1);
    demand(o, "mark", NSA_LAUNCH(mark_kernel, dim3(1), dim3(1), 0, s->stream, s->word, value));
}

/* ---- Rows ---------------------------------------------------------------------------------- */

static void cuda_embed_forward(const ops *o, void *x, const void *table, const int32_t *tokens,
                               int64_t rows, int dim) {
    LAUNCH_ITEMS(o, rows * dim, ROW_THREADS, embed_forward_kernel, array_of(o, x),
                 array_of(o, table), tokens, rows, dim);
}

static void cuda_embed_backward(const ops *o, real *dtable, const void *dx, const int32_t *tokens,
                                int64_t rows, int dim) {
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>((dim - 1) / 32 + 1));
    demand(o, "embed_backward",
           NSA_LAUNCH(embed_backward_kernel, grid, dim3(32), 0, state_of(o)->stream, dtable,
                      array_of(o, dx), tokens, rows, dim));
}

static void cuda_rmsnorm_forward(const ops *o, void *y, real *rstd, const void *x, const void *w,
                                 int64_t rows, int dim, double eps) {
    LAUNCH_ITEMS(o, rows, ROW_WARPS, rmsnorm_forward_kernel, array_of(o, y), rstd, array_of(o, x),
                 array_of(o, w), rows, dim, static_cast<float>(eps));
}

/* to += the sums of dy's columns, times x rstd where there is x. */
static void column_sums(const ops *o, real *to, const void *dy, const void *x, const real *rstd,
                        int64_t rows, int dim) {
    const cuda_state *s = state_of(o);
    float *parts = static_cast<float *>(s->scratch);
    const int64_t room = SCRATCH_BYTES / static_cast<int64_t>(sizeof *parts) / dim;
    const int64_t most = room < COLUMN_PARTS ? room : static_cast<int64_t>(COLUMN_PARTS);
    const int count = static_cast<int>(rows < most ? rows : most);
    const unsigned blocks = static_cast<unsigned>((dim - 1) / ROW_THREADS + 1);
    if (count < 1)
        return note(o, "sum of columns", "more columns than the scratch memory has room for");
    demand(o, "sum of columns",
           NSA_LAUNCH(column_parts_kernel, dim3(blocks, static_cast<unsigned>(count)),
                      dim3(ROW_THREADS), 0, s->stream, parts, array_of(o, dy), array_of(o, x), rstd,
                      rows, dim, count));
    demand(o, "sum of columns",
           NSA_LAUNCH(column_sums_kernel, dim3(blocks), dim3(ROW_THREADS), 0, s->stream, to, parts,
                      dim, count));
}

static void cuda_rmsnorm_backward(const ops *o, void *dx, real *dw, const void *dy, const void *x,
                                  const void *w, const real *rstd, int64_t rows, int dim) {
    LAUNCH_ITEMS(o, rows, ROW_WARPS, rmsnorm_backward_kernel, array_of(o, dx), array_of(o, dy),
                 array_of(o, x), array_of(o, w), rstd, rows, dim);
    column_sums(o, dw, dy, x, rstd, rows, dim);
}

static void cuda_bias_forward(const ops *o, void *y, const void *b, int64_t rows, int dim) {
    LAUNCH_ITEMS(o, rows * dim, ROW_THREADS, bias_forward_kernel, array_of(o, y), array_of(o, b),
                 rows, dim);
}

static void cuda_bias_backward(const ops *o, real *db, const void *dy, int64_t rows, int dim) {
    column_sums(o, db, dy, NULL, NULL, rows, dim);
}

static void cuda_silu_forward(const ops *o, void *y, const void *x, int64_t count) {
    LAUNCH_ITEMS(o, count, ROW_THREADS, silu_forward_kernel, array_of(o, y), array_of(o, x), count);
}

static void cuda_silu_backward(const ops *o, void *dx, void *y, const void *x, int64_t count) {
    LAUNCH_ITEMS(o, count, ROW_THREADS, silu_backward_kernel, array_of(o, dx), array_of(o, y),
                 array_of(o, x), count);
}

static void cuda_swiglu_forward(const ops *o, void *y, const void *x, int64_t rows, int width) {
    LAUNCH_ITEMS(o, rows * width, ROW_THREADS, swiglu_forward_kernel, array_of(o, y),
                 array_of(o, x), rows, width);
}

static void cuda_swiglu_backward(const ops *o, void *dx, void *y, const void *x, const void *dy,
                                 int64_t rows, int width) {
    LAUNCH_ITEMS(o, rows * width, ROW_THREADS, swiglu_backward_kernel, array_of(o, dx),
                 array_of(o, y), array_of(o, x), array_of(o, dy), rows, width);
}

static void cuda_group_mean_forward(const ops *o, void *mean, const void *q, int64_t stride,
                                    int64_t rows, int groups, int per_group, int dim) {
    LAUNCH_ITEMS(o, rows * groups * dim, ROW_THREADS, group_mean_forward_kernel, array_of(o, mean),
                 array_of(o, q), stride, rows, groups, per_group, dim);
}

static void cuda_group_mean_backward(const ops *o, void *dq, int64_t stride, const void *dmean,
                                     int64_t rows, int groups, int per_group, int dim) {
    LAUNCH_ITEMS(o, rows * groups * per_group * dim, ROW_THREADS, group_mean_backward_kernel,
                 array_of(o, dq), stride, array_of(o, dmean), rows, groups, per_group, dim);
}

static void cuda_copy_columns(const ops *o, void *to, int64_t to_stride, const void *from,
                              int64_t from_stride, int64_t rows, int64_t columns) {
    LAUNCH_ITEMS(o, rows * columns, ROW_THREADS, copy_columns_kernel, array_of(o, to), to_stride,
                 array_of(o, from), from_stride, rows, columns);
}

/* ---- Linear maps --------------------------------------------------------------------------- */

static void product(const ops *o, gemm_cuda_product p) {
    const cuda_state *s = state_of(o);
    if (gemm_cuda_run(s->gemm, &p, s->stream)) return;
    char why[96];
    snprintf(why, sizeof why, "no product of %d x %d x %d, form %d", p.m, p.n, p.k,
             static_cast<int>(p.form));
    note(o, o->library, why);
}

static void cuda_linear_forward(const ops *o, void *y, const void *x, const void *w,
                                const void *residual, int64_t rows, int in, int out) {
    product(o,
            {GEMM_CUDA_NT, static_cast<int>(rows), out, in, o->dtype, o->dtype, x, w, residual, y});
}

static void cuda_linear_backward_input(const ops *o, void *dx, const void *dy, const void *w,
                                       int64_t rows, int in, int out) {
    product(o,
            {GEMM_CUDA_NN, static_cast<int>(rows), in, out, o->dtype, o->dtype, dy, w, NULL, dx});
}

static void cuda_linear_backward_weight(const ops *o, real *dw, const void *dy, const void *x,
                                        int64_t rows, int in, int out) {
    product(o, {GEMM_CUDA_TN, out, in, static_cast<int>(rows), o->dtype, NSA_F32, dy, x, dw, dw});
}

/* ---- Loss and optimizer -------------------------------------------------------------------- */

static void cuda_cross_entropy(const ops *o, step_state *s, void *logits, const int32_t *labels,
                               int64_t rows, int vocab, double scale) {
    const cudaStream_t stream = state_of(o)->stream;
    double *losses = static_cast<double *>(state_of(o)->scratch);
    const int64_t element = o->dtype == NSA_F32 ? 4 : 2;
    for (int64_t first = 0; first < rows; first += LOSS_ROWS) {
        const int64_t count =
            rows - first < LOSS_ROWS ? rows - first : static_cast<int64_t>(LOSS_ROWS);
        const cuda_array part = array_of(o, static_cast<char *>(logits) + first * vocab * element);
        demand(o, "cross_entropy",
               NSA_LAUNCH(cross_entropy_kernel, dim3(static_cast<unsigned>(count)),
                          dim3(LOSS_THREADS), 0, stream, losses, part, labels + first, vocab, s,
                          scale));
        demand(o, "cross_entropy",
               NSA_LAUNCH(loss_sum_kernel, dim3(1), dim3(32), 0, stream, s, losses, labels + first,
                          count));
    }
}

static void cuda_square_sum(const ops *o, step_state *s, const real *grad, int64_t count) {
    const cudaStream_t stream = state_of(o)->stream;
    double *parts = static_cast<double *>(state_of(o)->scratch);
    demand(o, "square_sum",
           NSA_LAUNCH(square_parts_kernel, dim3(SQUARE_PARTS), dim3(ROW_THREADS), 0, stream, parts,
                      grad, count));
    demand(o, "square_sum", NSA_LAUNCH(square_sum_kernel, dim3(1), dim3(32), 0, stream, s, parts));
}

static void cuda_clip(const ops *o, step_state *s, double max_norm) {
    demand(o, "clip",
           NSA_LAUNCH(clip_kernel, dim3(1), dim3(1), 0, state_of(o)->stream, s, max_norm,
                      o->dtype == NSA_F16));
}

static void cuda_adamw(const ops *o, const adamw_rates *a, bool decay, const step_state *s,
                       real *value, const real *grad, real *m, real *v, int64_t count) {
    LAUNCH_ITEMS(o, count, ROW_THREADS, adamw_kernel, a, decay, s, value, grad, m, v, count);
}

static void cuda_muon_direction(const ops *o, const adamw_rates *a, const step_state *s, real *grad,
                                real *m, int64_t count) {
    LAUNCH_ITEMS(o, count, ROW_THREADS, muon_direction_kernel, a, s, grad, m, count);
}

static void cuda_muon_update(const ops *o, const adamw_rates *a, const step_state *s, real *value,
                             const real *x, double scale, int64_t count) {
    LAUNCH_ITEMS(o, count, ROW_THREADS, muon_update_kernel, a, s, value, x, scale, count);
}

static void cuda_product(const ops *o, product_form form, real *c, const real *a, const real *b,
                         int m, int n, int k) {
    product(o, {static_cast<gemm_cuda_form>(form), m, n, k, NSA_F32, NSA_F32, a, b, NULL, c});
}

static void cuda_unit(const ops *o, real *x, const real *from, int64_t count) {
    const cudaStream_t stream = state_of(o)->stream;
    double *parts = static_cast<double *>(state_of(o)->scratch);
    demand(o, "unit",
           NSA_LAUNCH(square_parts_kernel, dim3(SQUARE_PARTS), dim3(ROW_THREADS), 0, stream, parts,
                      from, count));
    demand(o, "unit", NSA_LAUNCH(square_total_kernel, dim3(1), dim3(32), 0, stream, parts));
    LAUNCH_ITEMS(o, count, ROW_THREADS, unit_kernel, x, from, parts, count);
}

static void cuda_mix(const ops *o, real *y, const real *x, double a, double b, int64_t count) {
    LAUNCH_ITEMS(o, count, ROW_THREADS, mix_kernel, y, x, static_cast<float>(a),
                 static_cast<float>(b), count);
}

/* ---- What the host learns ------------------------------------------------------------------- */

static void cuda_count_choices(const ops *o, step_state *s, const layer_choices *x) {
    const cudaStream_t stream = state_of(o)->stream;
    stats_sum *parts = static_cast<stats_sum *>(state_of(o)->scratch);
    demand(o, "statistics",
           NSA_LAUNCH(stats_parts_kernel, dim3(STATS_PARTS), dim3(ROW_THREADS), 0, stream, parts,
                      *x, array_of(o, x->gates)));
    demand(o, "statistics",
           NSA_LAUNCH(stats_sum_kernel, dim3(1), dim3(ROW_THREADS), 0, stream, s, parts, x->layer));
}

static void cuda_post(const ops *o, const step_state *state) {
    cuda_state *s = state_of(o);
    demand(o, "post",
           cudaMemcpyAsync(&s->posts[s->posted], state, sizeof *state, cudaMemcpyDeviceToHost,
                           s->stream));
    demand(o, "post", cudaEventRecord(s->arrived[s->posted], s->stream));
    s->posted = (s->posted + 1) % POSTS;
}

static void cuda_fetch(const ops *o, step_state *state) {
    cuda_state *s = state_of(o);
    demand(o, "fetch", cudaEventSynchronize(s->arrived[s->fetched]));
    *state = s->posts[s->fetched];
    s->fetched = (s->fetched + 1) % POSTS;
}

/* Attention of 16 bits without the main loops of sm_90a; calls that were recorded count as one. */
static void count_without_wgmma(const ops *o) {
    if (state_of(o)->without_wgmma && o->dtype != NSA_F32) fallback_add(FALLBACK_CUDA_MAINLOOP);
}

/* ---- Graphs --------------------------------------------------------------------------------- */

static void cuda_graph_begin(const ops *o) {
    demand(o, "graph",
           cudaStreamBeginCapture(state_of(o)->stream, cudaStreamCaptureModeThreadLocal));
}

static void *cuda_graph_end(const ops *o) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    cudaError_t error = cudaStreamEndCapture(state_of(o)->stream, &graph);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&executable, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    demand(o, "graph", error);
    return executable;
}

static void cuda_graph_run(const ops *o, void *graph) {
    count_without_wgmma(o);
    demand(o, "graph", cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), state_of(o)->stream));
}

/* It may still be running. */
static void cuda_graph_free(const ops *o, void *graph) {
    demand(o, "graph", cudaStreamSynchronize(state_of(o)->stream));
    demand(o, "graph", cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
}

/* ---- nsa_cuda.cuh --------------------------------------------------------------------------- */

static void cuda_rope_forward(const ops *o, const nsa_rope *x, const nsa_desc *d) {
    demand_status(o, "rope_forward", nsa_cuda_rope_forward(x, d, state_of(o)->stream));
}

static void cuda_rope_backward(const ops *o, const nsa_rope *dx, const nsa_rope *x,
                               const nsa_desc *d) {
    demand_status(o, "rope_backward", nsa_cuda_rope_backward(dx, x, d, state_of(o)->stream));
}

static size_t cuda_attention_forward_bytes(const ops *, const nsa_attention *x, const nsa_desc *d) {
    return nsa_cuda_attention_forward_workspace_size(x, d);
}

static void cuda_attention_forward(const ops *o, const nsa_attention *x, const nsa_desc *d,
                                   void *workspace, size_t bytes) {
    count_without_wgmma(o);
    demand_status(o, "attention_forward",
                  nsa_cuda_attention_forward(x, d, workspace, bytes, state_of(o)->stream));
}

static void cuda_attention_restore(const ops *o, const nsa_attention *x, const nsa_desc *d,
                                   void *workspace, size_t bytes) {
    const cudaStream_t stream = state_of(o)->stream;
    const nsa_gate gate = {x->gates, x->out_cmp, x->out_slc, x->out_win, x->out};
    const nsa_compress *const phis[] = {&x->k_cmp, &x->v_cmp};
    for (const nsa_compress *phi : phis)
        demand_status(o, "compress_forward",
                      nsa_cuda_compress_forward(phi, d, workspace, bytes, stream));
    demand_status(o, "gate_forward", nsa_cuda_gate_forward(&gate, d, stream));
}

static size_t cuda_attention_backward_bytes(const ops *, const nsa_attention *dx,
                                            const nsa_attention *x, const nsa_desc *d) {
    return nsa_cuda_attention_backward_workspace_size(dx, x, d);
}

static void cuda_attention_backward(const ops *o, const nsa_attention *dx, const nsa_attention *x,
                                    const nsa_desc *d, void *workspace, size_t bytes) {
    count_without_wgmma(o);
    demand_status(o, "attention_backward",
                  nsa_cuda_attention_backward(dx, x, d, workspace, bytes, state_of(o)->stream));
}

/* Dense attention, and the window alone: the four functions of each. */
#define ATTEND(name, branch)                                                                       \
    static size_t cuda_##name##_forward_bytes(const ops *, const nsa_desc *d) {                    \
        return nsa_cuda_attend_##branch##_forward_workspace_size(d);                               \
    }                                                                                              \
    static void cuda_##name##_forward(const ops *o, const nsa_attend *x, const nsa_desc *d,        \
                                      void *workspace, size_t bytes) {                             \
        count_without_wgmma(o);                                                                    \
        demand_status(                                                                             \
            o, #name "_forward",                                                                   \
            nsa_cuda_attend_##branch##_forward(x, d, workspace, bytes, state_of(o)->stream));      \
    }                                                                                              \
    static size_t cuda_##name##_backward_bytes(const ops *, const nsa_desc *d) {                   \
        return nsa_cuda_attend_##branch##_backward_workspace_size(d);                              \
    }                                                                                              \
    static void cuda_##name##_backward(const ops *o, const nsa_attend *dx, const nsa_attend *x,    \
                                       const nsa_desc *d, void *workspace, size_t bytes) {         \
        count_without_wgmma(o);                                                                    \
        demand_status(                                                                             \
            o, #name "_backward",                                                                  \
            nsa_cuda_attend_##branch##_backward(dx, x, d, workspace, bytes, state_of(o)->stream)); \
    }
ATTEND(dense, dense)
ATTEND(window, win)

static size_t cuda_cache_bytes(const ops *o, const nsa_desc *d, int max_rewind) {
    return nsa_cuda_cache_size(d, o->dtype, max_rewind);
}

static void cuda_cache_open(const ops *o, nsa_cache *cache, const nsa_desc *d, int max_rewind,
                            void *memory, size_t bytes) {
    demand_status(
        o, "cache_open",
        nsa_cuda_cache_init(cache, d, o->dtype, max_rewind, memory, bytes, state_of(o)->stream));
}

static size_t cuda_decode_bytes(const ops *, const nsa_attention *x, const nsa_cache *cache,
                                int count) {
    return nsa_cuda_decode_workspace_size(x, cache, count);
}

/* The reads are wanted at once, so this one waits for the device: it is for text, not for
   training. */
static void cuda_decode(const ops *o, const nsa_attention *x, nsa_cache *cache, int count,
                        nsa_reads *reads, void *workspace, size_t bytes) {
    const cuda_state *s = state_of(o);
    nsa_status verdict = NSA_OK;
    demand_status(
        o, "decode",
        nsa_cuda_decode(x, cache, count, NULL, s->reads, s->verdict, workspace, bytes, s->stream));
    o->download(o, &verdict, s->verdict, sizeof verdict);
    o->download(o, reads, s->reads, sizeof *reads);
    demand_status(o, "decode", verdict);
}

/* ---- The table ----------------------------------------------------------------------------- */

static bool cuda_failed(const ops *o, fault *f) {
    const cuda_state *s = state_of(o);
    if (s->failed) *f = s->why;
    return s->failed;
}

static void fill(ops *o) {
    o->name = "cuda";
    o->allocate = cuda_allocate;
    o->release = cuda_release;
    o->upload = cuda_upload;
    o->download = cuda_download;
    o->zero = cuda_zero;
    o->copy = cuda_copy;
    o->convert = cuda_convert;
    o->mark = cuda_mark;
    o->embed_forward = cuda_embed_forward;
    o->embed_backward = cuda_embed_backward;
    o->rmsnorm_forward = cuda_rmsnorm_forward;
    o->rmsnorm_backward = cuda_rmsnorm_backward;
    o->linear_forward = cuda_linear_forward;
    o->linear_backward_input = cuda_linear_backward_input;
    o->linear_backward_weight = cuda_linear_backward_weight;
    o->bias_forward = cuda_bias_forward;
    o->bias_backward = cuda_bias_backward;
    o->silu_forward = cuda_silu_forward;
    o->silu_backward = cuda_silu_backward;
    o->swiglu_forward = cuda_swiglu_forward;
    o->swiglu_backward = cuda_swiglu_backward;
    o->group_mean_forward = cuda_group_mean_forward;
    o->group_mean_backward = cuda_group_mean_backward;
    o->cross_entropy = cuda_cross_entropy;
    o->square_sum = cuda_square_sum;
    o->clip = cuda_clip;
    o->adamw = cuda_adamw;
    o->muon_direction = cuda_muon_direction;
    o->muon_update = cuda_muon_update;
    o->product = cuda_product;
    o->unit = cuda_unit;
    o->mix = cuda_mix;
    o->count_choices = cuda_count_choices;
    o->memory = cuda_memory;
    o->post = cuda_post;
    o->fetch = cuda_fetch;
    o->graph_begin = cuda_graph_begin;
    o->graph_end = cuda_graph_end;
    o->graph_run = cuda_graph_run;
    o->graph_free = cuda_graph_free;
    o->rope_forward = cuda_rope_forward;
    o->rope_backward = cuda_rope_backward;
    o->attention_forward_bytes = cuda_attention_forward_bytes;
    o->attention_forward = cuda_attention_forward;
    o->attention_restore = cuda_attention_restore;
    o->attention_backward_bytes = cuda_attention_backward_bytes;
    o->attention_backward = cuda_attention_backward;
    o->dense_forward_bytes = cuda_dense_forward_bytes;
    o->dense_forward = cuda_dense_forward;
    o->dense_backward_bytes = cuda_dense_backward_bytes;
    o->dense_backward = cuda_dense_backward;
    o->window_forward_bytes = cuda_window_forward_bytes;
    o->window_forward = cuda_window_forward;
    o->window_backward_bytes = cuda_window_backward_bytes;
    o->window_backward = cuda_window_backward;
    o->copy_columns = cuda_copy_columns;
    o->cache_bytes = cuda_cache_bytes;
    o->cache_open = cuda_cache_open;
    o->decode_bytes = cuda_decode_bytes;
    o->decode = cuda_decode;
    o->failed = cuda_failed;
}

/* Its launch bounds tell which code the device runs: that for sm_90a alone multiplies by wgmma. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
enum { PROBE_THREADS = 256 };
#else
enum { PROBE_THREADS = 128 };
#endif
static __global__ void __launch_bounds__(PROBE_THREADS) probe_kernel() {}

static bool lacks_wgmma(int major) {
    cudaFuncAttributes probe;
    return major == 9 && cudaFuncGetAttributes(&probe, probe_kernel) == cudaSuccess &&
           probe.maxThreadsPerBlock != 256;
}

/* Every error means that there is no device to use. */
static bool find_device(bool *without_wgmma, fault *f) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count < 1)
        return fault_set(f, "no CUDA device: %s; --device cpu trains without one",
                         error != cudaSuccess ? cudaGetErrorString(error)
                                              : "the driver lists none");
    cudaDeviceProp device;
    int chosen = 0;
    const bool known = cudaGetDevice(&chosen) == cudaSuccess &&
                       cudaGetDeviceProperties(&device, chosen) == cudaSuccess;
    if (known && device.major < 8)
        return fault_set(f, "%s has compute capability %d.%d: must be 8.0 or later", device.name,
                         device.major, device.minor);
    *without_wgmma = known && lacks_wgmma(device.major);
    return true;
}

bool ops_cuda_open(ops *o, nsa_dtype dtype, fault *f) {
    bool without_wgmma;
    if (!find_device(&without_wgmma, f)) return false;
    cuda_state *s = static_cast<cuda_state *>(calloc(1, sizeof *s));
    if (!s) return fault_set(f, "out of memory");
    memset(o, 0, sizeof *o);
    fill(o);
    s->without_wgmma = without_wgmma;
    o->dtype = dtype;
    o->threads = 1;
    o->state = s;
    bool ok =
        cudaStreamCreate(&s->stream) == cudaSuccess &&
        cudaMalloc(&s->scratch, SCRATCH_BYTES) == cudaSuccess &&
        cudaMalloc(reinterpret_cast<void **>(&s->reads), sizeof *s->reads) == cudaSuccess &&
        cudaMalloc(reinterpret_cast<void **>(&s->verdict), sizeof *s->verdict) == cudaSuccess &&
        cudaHostAlloc(reinterpret_cast<void **>(&s->word), sizeof *s->word, cudaHostAllocMapped) ==
            cudaSuccess &&
        cudaHostAlloc(reinterpret_cast<void **>(&s->stage), STAGES * STAGE_BYTES,
                      cudaHostAllocDefault) == cudaSuccess &&
        cudaHostAlloc(reinterpret_cast<void **>(&s->posts), POSTS * sizeof *s->posts,
                      cudaHostAllocDefault) == cudaSuccess;
    for (int i = 0; ok && i < POSTS; i++)
        ok = cudaEventCreateWithFlags(&s->arrived[i], cudaEventDisableTiming) == cudaSuccess;
    for (int i = 0; ok && i < STAGES; i++)
        ok = cudaEventCreateWithFlags(&s->sent[i], cudaEventDisableTiming) == cudaSuccess;
    if (ok) s->gemm = gemm_cuda_open(&o->library);
    if (ok && s->gemm) {
        o->stream = s->stream;
        phase_use(s->word);
        return true;
    }
    const cudaError_t error = cudaGetLastError();
    ops_cuda_close(o);
    return fault_set(f, "the CUDA device cannot be used: %s",
                     error != cudaSuccess ? cudaGetErrorString(error) : "no cuBLASLt on it");
}

void ops_cuda_close(ops *o) {
    cuda_state *s = state_of(o);
    if (!s) return;
    if (s->stream) cudaStreamSynchronize(s->stream);
    phase_use(NULL);
    gemm_cuda_close(s->gemm);
    for (int i = 0; i < STAGES; i++)
        if (s->sent[i]) cudaEventDestroy(s->sent[i]);
    for (int i = 0; i < POSTS; i++)
        if (s->arrived[i]) cudaEventDestroy(s->arrived[i]);
    if (s->posts) cudaFreeHost(s->posts);
    if (s->stage) cudaFreeHost(s->stage);
    if (s->word) cudaFreeHost(s->word);
    if (s->reads) cudaFree(s->reads);
    if (s->verdict) cudaFree(s->verdict);
    if (s->scratch) cudaFree(s->scratch);
    if (s->stream) cudaStreamDestroy(s->stream);
    free(s);
    o->state = NULL;
}

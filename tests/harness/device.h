/* device.h - the nsa_cuda_ functions under nsa.h's signatures: with CHECK_CUDA a test of nsa_X is
   the test of nsa_cuda_X. A call copies all guarded memory to the device, runs there, waits, and
   copies the memory back.
   Twin: none. Not here: a test; the tables and the tests are the CPU's own.

   Plain C99: the declarations of nsa_cuda.cuh and the runtime's C functions. The kernels are
   another object, made by nvcc for a GPU or by g++ for the executor (simt/). */
#ifndef NSA_TESTS_DEVICE_H
#define NSA_TESTS_DEVICE_H

#include "nsa_cuda.cuh"
#include "check.h"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <unistd.h>

/* Rows read in bulk start at multiples of 16 bytes: so many elements of the smallest dtype. */
#define CHECK_UNIT 8

/* ---- Memory ---- */

enum { DEVICE_BLOCKS = 256, DEVICE_SKEW = 8 };

/* What lies on the device during a call, beside where it lies on the host. */
typedef struct device_block {
    unsigned char *host;
    void *memory; /* as it was allocated; `device` is host's twin */
    unsigned char *device;
    size_t bytes;
    int comes_back;
} device_block;

static device_block device_blocks[DEVICE_BLOCKS];
static int device_count;

/* No GPU: the program ends as skipped, or as failed where NSA_REQUIRE_GPU=1 says that there is
   one. */
static inline void device_there(void) {
    int count = 0;
    const char *demanded = getenv("NSA_REQUIRE_GPU");
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) return;
    printf("device: no GPU: %s\n", cudaGetErrorString(error));
    exit(demanded && !strcmp(demanded, "1") ? 1 : 77);
}

/* Once a call has worked, a failure is no lack of a GPU. */
static inline void device_demand(cudaError_t error, const char *what) {
    static int works;
    works |= error == cudaSuccess;
    if (error == cudaSuccess) return;
    if (!works) device_there();
    printf("device: %s: %s [%s]\n", what, cudaGetErrorString(error), check_where);
    exit(99);
}

/* Whoever ends a run because it takes too long learns which call the device does not come back
   from. */
static void device_ended(int number) {
    static const char begin[] = "\ndevice: ended while at work on [", end[] = "]\n";
    int told =
        write(1, begin, sizeof begin - 1) > 0 && write(1, check_where, strlen(check_where)) >= 0;
    told &= write(1, end, sizeof end - 1) > 0;
    _exit(told ? 128 + number : 99);
}

/* A copy on the device. A workspace may have any alignment, so it gets a bad one. */
static inline void *device_put(const void *host, size_t bytes, int comes_back, size_t skew) {
    device_block *b = &device_blocks[device_count];
    signal(SIGTERM, device_ended);
    if (device_count++ == DEVICE_BLOCKS) {
        printf("device: more than %d buffers\n", DEVICE_BLOCKS);
        exit(99);
    }
    b->host = (unsigned char *)(uintptr_t)host;
    b->bytes = bytes;
    b->comes_back = comes_back;
    device_demand(cudaMalloc(&b->memory, bytes + skew ? bytes + skew : 1), "cudaMalloc");
    b->device = (unsigned char *)b->memory + skew;
    if (bytes) device_demand(cudaMemcpy(b->device, host, bytes, cudaMemcpyHostToDevice), "upload");
    return b->device;
}

/* An array of the descriptor's, or none. */
static inline const int32_t *device_put_numbers(const int32_t *host, size_t count) {
    return host ? (const int32_t *)device_put(host, count * sizeof *host, 0, 0) : NULL;
}

/* The descriptor of the call at hand, its arrays on the device. */
static const nsa_desc *device_d;

static inline void device_begin(const nsa_desc *d) {
    static nsa_desc copy;
    for (guarded *g = guards_live; g; g = g->next)
        device_put(g->data, g->bytes, 1, strcmp(g->name, "workspace") ? 0 : DEVICE_SKEW);
    device_d = d;
    if (!d || d->batch < 1) return;
    copy = *d;
    copy.begins = device_put_numbers(d->begins, (size_t)d->batch + 1);
    copy.firsts = device_put_numbers(d->firsts, (size_t)d->batch);
    copy.counts = device_put_numbers(d->counts, (size_t)d->batch);
    const int width = d->table_width > 0 ? d->table_width : 0;
    copy.pages = device_put_numbers(d->pages, (size_t)d->batch * (size_t)width);
    device_d = &copy;
}

/* The twin of a pointer into what has been copied; another pointer stays as it is: no call may use
   it. */
static inline void *device_of(const void *host) {
    const unsigned char *p = (const unsigned char *)host;
    for (int i = 0; i < device_count; i++) {
        const device_block *b = &device_blocks[i];
        if (p >= b->host && p < b->host + b->bytes) return b->device + (p - b->host);
    }
    return (void *)(uintptr_t)host;
}

/* The twin of an array that may lie in what has been copied or not. */
static inline void *device_array_of(const void *host, size_t bytes) {
    void *twin = device_of(host);
    return twin == host ? device_put(host, bytes, 1, 0) : twin;
}

/* The stream of a call: the default one, or with NSA_TEST_GRAPH=1 one that records the call. */
static cudaStream_t device_recording;

static inline cudaStream_t device_stream(void) {
    const char *graph = getenv("NSA_TEST_GRAPH");
    if (!graph || strcmp(graph, "1")) return NULL;
    device_demand(cudaStreamCreateWithFlags(&device_recording, cudaStreamNonBlocking), "a stream");
    device_demand(cudaStreamBeginCapture(device_recording, cudaStreamCaptureModeGlobal), "capture");
    return device_recording;
}

/* Runs what was recorded. */
static inline void device_replay(void) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    device_demand(cudaStreamEndCapture(device_recording, &graph), "the end of capture");
    device_demand(cudaGraphInstantiate(&exec, graph, 0), "a graph");
    device_demand(cudaGraphLaunch(exec, device_recording), "a graph's launch");
    device_demand(cudaStreamSynchronize(device_recording), "a kernel in a graph");
    device_demand(cudaGraphExecDestroy(exec), "a graph");
    device_demand(cudaGraphDestroy(graph), "a graph");
    device_demand(cudaStreamDestroy(device_recording), "a stream");
    device_recording = NULL;
}

/* Waits, brings everything back, frees it. A fault of a kernel ends the program here. */
static inline nsa_status device_end(nsa_status s) {
    if (device_recording) device_replay();
    device_demand(cudaDeviceSynchronize(), "a kernel");
    while (device_count) {
        device_block *b = &device_blocks[--device_count];
        if (b->comes_back && b->bytes)
            device_demand(cudaMemcpy(b->host, b->device, b->bytes, cudaMemcpyDeviceToHost),
                          "download");
        device_demand(cudaFree(b->memory), "cudaFree");
    }
    return s;
}

/* ---- Structs ---- */

static inline void device_views(nsa_tensor *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i].data = device_of(x[i].data);
}

/* Structs that are nothing but views: attend, select, merge, gate. NULL stays NULL. */
#define DEVICE_COPY(type, name)                                                            \
    type name##_copy, *name##_device = NULL;                                               \
    if (name) {                                                                            \
        name##_copy = *name;                                                               \
        name##_device = &name##_copy;                                                      \
        device_views((nsa_tensor *)&name##_copy, sizeof name##_copy / sizeof(nsa_tensor)); \
    }

static inline void device_compress(nsa_compress *x) {
    device_views(&x->x, 7); /* x, out, pos, w1, b1, w2, b2 */
}

static inline void device_rope(nsa_rope *x) {
    device_views(&x->x, 3); /* x, out, positions */
}

static inline void device_score(nsa_score *x) {
    device_views(&x->q, 5); /* q, k, weights, blocks, scores */
}

static inline void device_attention(nsa_attention *x) {
    x->q.data = device_of(x->q.data);
    device_compress(&x->k_cmp);
    device_compress(&x->v_cmp);
    device_views(&x->k_slc, 13); /* k_slc .. out */
}

#define DEVICE_COPY_BY(type, name, translate) \
    type name##_copy, *name##_device = NULL;  \
    if (name) {                               \
        name##_copy = *name;                  \
        name##_device = &name##_copy;         \
        translate(&name##_copy);              \
    }

/* ---- Calls ---- */

#define DEVICE_ATTEND(branch)                                                              \
    static inline nsa_status device_attend_##branch##_forward(                             \
        const nsa_attend *x, const nsa_desc *d, void *workspace, size_t bytes) {           \
        device_begin(d);                                                                   \
        DEVICE_COPY(nsa_attend, x)                                                         \
        return device_end(nsa_cuda_attend_##branch##_forward(                              \
            x_device, device_d, device_of(workspace), bytes, device_stream()));            \
    }                                                                                      \
    static inline nsa_status device_attend_##branch##_backward(                            \
        const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d, void *workspace,     \
        size_t bytes) {                                                                    \
        device_begin(d);                                                                   \
        DEVICE_COPY(nsa_attend, x)                                                         \
        DEVICE_COPY(nsa_attend, dx)                                                        \
        return device_end(nsa_cuda_attend_##branch##_backward(                             \
            dx_device, x_device, device_d, device_of(workspace), bytes, device_stream())); \
    }
DEVICE_ATTEND(cmp)
DEVICE_ATTEND(slc)
DEVICE_ATTEND(win)
DEVICE_ATTEND(dense)

static inline nsa_status device_select_blocks(const nsa_select *x, const nsa_desc *d,
                                              void *workspace, size_t bytes) {
    device_begin(d);
    DEVICE_COPY(nsa_select, x)
    return device_end(
        nsa_cuda_select_blocks(x_device, device_d, device_of(workspace), bytes, device_stream()));
}

static inline nsa_status device_score_blocks(const nsa_score *x, const nsa_desc *d, void *workspace,
                                             size_t bytes) {
    device_begin(d);
    DEVICE_COPY_BY(nsa_score, x, device_score)
    return device_end(
        nsa_cuda_score_blocks(x_device, device_d, device_of(workspace), bytes, device_stream()));
}

static inline nsa_status device_score_blocks_forward(const nsa_score *x, const nsa_desc *d,
                                                     void *workspace, size_t bytes) {
    device_begin(d);
    DEVICE_COPY_BY(nsa_score, x, device_score)
    return device_end(nsa_cuda_score_blocks_forward(x_device, device_d, device_of(workspace), bytes,
                                                    device_stream()));
}

static inline nsa_status device_score_blocks_backward(const nsa_score *dx, const nsa_score *x,
                                                      const nsa_desc *d, void *workspace,
                                                      size_t bytes) {
    device_begin(d);
    DEVICE_COPY_BY(nsa_score, x, device_score)
    DEVICE_COPY_BY(nsa_score, dx, device_score)
    return device_end(nsa_cuda_score_blocks_backward(
        dx_device, x_device, device_d, device_of(workspace), bytes, device_stream()));
}

static inline nsa_status device_rank_blocks(const float *scores, int query, const nsa_desc *d,
                                            int32_t *list) {
    nsa_desc ranked; /* compressed blocks are none of it */
    memset(&ranked, 0, sizeof ranked);
    if (d) ranked = *d;
    ranked.cmp_block = ranked.cmp_stride = ranked.slc_block;
    const int sound = d && nsa_desc_check(&ranked) == NSA_OK && query >= 0 && query < d->tokens;
    const size_t n = sound ? (size_t)nsa_slc_candidates(d, query) : 0;
    device_begin(d);
    const float *from = sound && scores ? (const float *)device_array_of(scores, n * 4) : scores;
    int32_t *to = list;
    if (sound && list)
        to = (int32_t *)device_array_of(list, (size_t)nsa_block_list_width(d) * sizeof *list);
    return device_end(nsa_cuda_rank_blocks(from, query, d, to, device_stream()));
}

static inline size_t device_rank_queries_workspace_size(const nsa_desc *d) {
    (void)d;
    return 0;
}

static inline nsa_status device_rank_queries(const nsa_rank *x, const nsa_desc *d, void *workspace,
                                             size_t bytes) {
    (void)workspace, (void)bytes;
    device_begin(d);
    DEVICE_COPY(nsa_rank, x)
    return device_end(nsa_cuda_rank_queries(x_device, device_d, device_stream()));
}

static inline nsa_status device_check_blocks(const nsa_tensor *blocks, const nsa_desc *d,
                                             nsa_block_fault *fault) {
    nsa_cuda_block_verdict verdict;
    memset(&verdict, 0xff, sizeof verdict);
    device_begin(d);
    DEVICE_COPY(nsa_tensor, blocks)
    void *to = device_put(&verdict, sizeof verdict, 1, 0);
    nsa_status s = device_end(nsa_cuda_check_blocks(blocks_device, device_d,
                                                    (nsa_cuda_block_verdict *)to, device_stream()));
    if (s != NSA_OK || !verdict.reason) return s;
    if (fault) {
        fault->batch = verdict.batch;
        fault->query = verdict.query;
        fault->kv_head = verdict.kv_head;
        fault->slot = verdict.slot;
        fault->value = verdict.value;
        fault->reason = nsa_cuda_block_reason(verdict.reason);
    }
    return NSA_ERROR_BLOCKS;
}

static inline nsa_status device_check_pages(const nsa_desc *d, nsa_page_fault *fault) {
    nsa_cuda_page_verdict verdict;
    memset(&verdict, 0xff, sizeof verdict);
    device_begin(d);
    void *to = device_put(&verdict, sizeof verdict, 1, 0);
    nsa_status s =
        device_end(nsa_cuda_check_pages(device_d, (nsa_cuda_page_verdict *)to, device_stream()));
    if (s != NSA_OK) return s;
    if (fault && verdict.reason) {
        fault->sequence = verdict.sequence;
        fault->slot = verdict.slot;
        fault->value = verdict.value;
        fault->reason = nsa_cuda_page_reason(verdict.reason);
    }
    return verdict.status;
}

static inline nsa_status device_normalize_blocks(const nsa_tensor *blocks, const nsa_desc *d) {
    device_begin(d);
    DEVICE_COPY(nsa_tensor, blocks)
    return device_end(nsa_cuda_normalize_blocks(blocks_device, device_d, device_stream()));
}

static inline nsa_status device_gate_forward(const nsa_gate *x, const nsa_desc *d) {
    device_begin(d);
    DEVICE_COPY(nsa_gate, x)
    return device_end(nsa_cuda_gate_forward(x_device, device_d, device_stream()));
}

static inline nsa_status device_gate_backward(const nsa_gate *dx, const nsa_gate *x,
                                              const nsa_desc *d) {
    device_begin(d);
    DEVICE_COPY(nsa_gate, x)
    DEVICE_COPY(nsa_gate, dx)
    return device_end(nsa_cuda_gate_backward(dx_device, x_device, device_d, device_stream()));
}

static inline nsa_status device_merge_forward(const nsa_merge *x, const nsa_desc *d) {
    device_begin(d);
    DEVICE_COPY(nsa_merge, x)
    return device_end(nsa_cuda_merge_forward(x_device, device_d, device_stream()));
}

static inline nsa_status device_merge_backward(const nsa_merge *dx, const nsa_merge *x,
                                               const nsa_desc *d) {
    device_begin(d);
    DEVICE_COPY(nsa_merge, x)
    DEVICE_COPY(nsa_merge, dx)
    return device_end(nsa_cuda_merge_backward(dx_device, x_device, device_d, device_stream()));
}

static inline nsa_status device_rope_forward(const nsa_rope *x, const nsa_desc *d) {
    device_begin(d);
    DEVICE_COPY_BY(nsa_rope, x, device_rope)
    return device_end(nsa_cuda_rope_forward(x_device, device_d, device_stream()));
}

static inline nsa_status device_rope_backward(const nsa_rope *dx, const nsa_rope *x,
                                              const nsa_desc *d) {
    device_begin(d);
    DEVICE_COPY_BY(nsa_rope, x, device_rope)
    DEVICE_COPY_BY(nsa_rope, dx, device_rope)
    return device_end(nsa_cuda_rope_backward(dx_device, x_device, device_d, device_stream()));
}

static inline nsa_status device_compress_forward(const nsa_compress *x, const nsa_desc *d,
                                                 void *workspace, size_t bytes) {
    device_begin(d);
    DEVICE_COPY_BY(nsa_compress, x, device_compress)
    return device_end(nsa_cuda_compress_forward(x_device, device_d, device_of(workspace), bytes,
                                                device_stream()));
}

static inline nsa_status device_compress_backward(const nsa_compress *dx, const nsa_compress *x,
                                                  const nsa_desc *d, void *workspace,
                                                  size_t bytes) {
    device_begin(d);
    DEVICE_COPY_BY(nsa_compress, x, device_compress)
    DEVICE_COPY_BY(nsa_compress, dx, device_compress)
    return device_end(nsa_cuda_compress_backward(dx_device, x_device, device_d,
                                                 device_of(workspace), bytes, device_stream()));
}

static inline nsa_status device_attention_forward(const nsa_attention *x, const nsa_desc *d,
                                                  void *workspace, size_t bytes) {
    device_begin(d);
    DEVICE_COPY_BY(nsa_attention, x, device_attention)
    const nsa_status loaded = nsa_cuda_load(NULL, x_device, device_d);
    const nsa_status status = device_end(nsa_cuda_attention_forward(
        x_device, device_d, device_of(workspace), bytes, device_stream()));
    return status == NSA_OK ? loaded : status;
}

static inline nsa_status device_attention_backward(const nsa_attention *dx, const nsa_attention *x,
                                                   const nsa_desc *d, void *workspace,
                                                   size_t bytes) {
    device_begin(d);
    DEVICE_COPY_BY(nsa_attention, x, device_attention)
    DEVICE_COPY_BY(nsa_attention, dx, device_attention)
    const nsa_status loaded = nsa_cuda_load(dx_device, x_device, device_d);
    const nsa_status status = device_end(nsa_cuda_attention_backward(
        dx_device, x_device, device_d, device_of(workspace), bytes, device_stream()));
    return status == NSA_OK ? loaded : status;
}

static inline nsa_status device_cmp_begins(const nsa_desc *d, int32_t *begins) {
    const int sound = d && d->batch >= 1;
    device_begin(d);
    int32_t *to = begins;
    if (sound && begins)
        to = (int32_t *)device_array_of(begins, ((size_t)d->batch + 1) * sizeof *begins);
    return device_end(nsa_cuda_cmp_begins(device_d, to, device_stream()));
}

static inline nsa_status device_block_map(const nsa_desc *d, int tokens, int32_t *indptr,
                                          int32_t *indices, float *weights) {
    const int sound = d && nsa_desc_check(d) == NSA_OK && tokens >= 0;
    const size_t rows = sound ? (size_t)nsa_slc_count(d, tokens) + 1 : 0;
    const size_t entries = sound ? (size_t)nsa_block_map_size(d, tokens) : 0;
    device_begin(d);
    if (sound && indptr) indptr = (int32_t *)device_array_of(indptr, rows * 4);
    if (sound && indices) indices = (int32_t *)device_array_of(indices, entries * 4);
    if (sound && weights) weights = (float *)device_array_of(weights, entries * 4);
    return device_end(nsa_cuda_block_map(d, tokens, indptr, indices, weights, device_stream()));
}

/* ---- The names that tests use ---- */

#define nsa_check_pages                          device_check_pages
#define nsa_block_map                            device_block_map
#define nsa_cmp_begins                           device_cmp_begins
#define nsa_rope_forward                         device_rope_forward
#define nsa_rope_backward                        device_rope_backward
#define nsa_compress_forward_workspace_size      nsa_cuda_compress_forward_workspace_size
#define nsa_compress_forward                     device_compress_forward
#define nsa_compress_backward_workspace_size     nsa_cuda_compress_backward_workspace_size
#define nsa_compress_backward                    device_compress_backward
#define nsa_attend_cmp_forward_workspace_size    nsa_cuda_attend_cmp_forward_workspace_size
#define nsa_attend_cmp_forward                   device_attend_cmp_forward
#define nsa_attend_cmp_backward_workspace_size   nsa_cuda_attend_cmp_backward_workspace_size
#define nsa_attend_cmp_backward                  device_attend_cmp_backward
#define nsa_attend_slc_forward_workspace_size    nsa_cuda_attend_slc_forward_workspace_size
#define nsa_attend_slc_forward                   device_attend_slc_forward
#define nsa_attend_slc_backward_workspace_size   nsa_cuda_attend_slc_backward_workspace_size
#define nsa_attend_slc_backward                  device_attend_slc_backward
#define nsa_attend_win_forward_workspace_size    nsa_cuda_attend_win_forward_workspace_size
#define nsa_attend_win_forward                   device_attend_win_forward
#define nsa_attend_win_backward_workspace_size   nsa_cuda_attend_win_backward_workspace_size
#define nsa_attend_win_backward                  device_attend_win_backward
#define nsa_attend_dense_forward_workspace_size  nsa_cuda_attend_dense_forward_workspace_size
#define nsa_attend_dense_forward                 device_attend_dense_forward
#define nsa_attend_dense_backward_workspace_size nsa_cuda_attend_dense_backward_workspace_size
#define nsa_attend_dense_backward                device_attend_dense_backward
#define nsa_select_blocks_workspace_size         nsa_cuda_select_blocks_workspace_size
#define nsa_select_blocks                        device_select_blocks
#define nsa_score_blocks_workspace_size          nsa_cuda_score_blocks_workspace_size
#define nsa_score_blocks                         device_score_blocks
#define nsa_score_blocks_forward_workspace_size  nsa_cuda_score_blocks_forward_workspace_size
#define nsa_score_blocks_forward                 device_score_blocks_forward
#define nsa_score_blocks_backward_workspace_size nsa_cuda_score_blocks_backward_workspace_size
#define nsa_score_blocks_backward                device_score_blocks_backward
#define nsa_rank_blocks                          device_rank_blocks
#define nsa_rank_queries_workspace_size          device_rank_queries_workspace_size
#define nsa_rank_queries                         device_rank_queries
#define nsa_check_blocks                         device_check_blocks
#define nsa_normalize_blocks                     device_normalize_blocks
#define nsa_merge_forward                        device_merge_forward
#define nsa_merge_backward                       device_merge_backward
#define nsa_gate_forward                         device_gate_forward
#define nsa_gate_backward                        device_gate_backward
#define nsa_attention_forward_workspace_size     nsa_cuda_attention_forward_workspace_size
#define nsa_attention_forward                    device_attention_forward
#define nsa_attention_backward_workspace_size    nsa_cuda_attention_backward_workspace_size
#define nsa_attention_backward                   device_attention_backward

#endif

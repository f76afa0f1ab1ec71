/* decode_device.h - the decoding cache of nsa_cuda.cuh under nsa.h's signatures: with CHECK_CUDA
   the test of nsa_decode is the test of nsa_cuda_decode. A cache's rows stay on the device between
   calls. The test holds a copy of its lengths, brought back after every call.
   Twin: device.h, for calls that keep nothing. Not here: a test. */
#ifndef NSA_TESTS_DECODE_DEVICE_H
#define NSA_TESTS_DECODE_DEVICE_H

#include "device.h"

enum { DEVICE_CACHES = 8 };

static struct device_cache {
    const nsa_cache *host;
    nsa_cache device;
    void *memory;
    int graph; /* replay steps from a captured graph instead of launching them */
} device_caches[DEVICE_CACHES];

/* A cache's entry, or a free one. */
static inline struct device_cache *device_cache_of(const nsa_cache *host) {
    for (int i = 0; i < DEVICE_CACHES; i++)
        if (device_caches[i].host == host) return &device_caches[i];
    for (int i = 0; i < DEVICE_CACHES; i++)
        if (!device_caches[i].host) return &device_caches[i];
    printf("device: more than %d caches\n", DEVICE_CACHES);
    exit(99);
}

static inline void device_cache_free(const nsa_cache *host) {
    struct device_cache *c = device_cache_of(host);
    if (c->host) device_demand(cudaFree(c->memory), "cudaFree");
    memset(c, 0, sizeof *c);
}

/* The lengths as they are on the device, after everything before has ended. */
static inline void device_cache_look(nsa_cache *host) {
    const nsa_cache *device = &device_cache_of(host)->device;
    const size_t bytes = (size_t)host->desc.batch * sizeof(int32_t);
    device_demand(cudaDeviceSynchronize(), "a kernel");
    device_demand(cudaMemcpy(host->lengths, device->lengths, bytes, cudaMemcpyDeviceToHost),
                  "look");
    device_demand(cudaMemcpy(host->newest, device->newest, bytes, cudaMemcpyDeviceToHost), "look");
}

/* `memory` is the caller's on the host: its bytes become the device's, so that what it is filled
   with is what the kernels find; the lengths' twins lie in it. */
static inline nsa_status device_cache_init(nsa_cache *host, const nsa_desc *d, nsa_dtype dtype,
                                           int max_rewind, void *memory, size_t bytes) {
    device_cache_free(host);
    struct device_cache *c = device_cache_of(host);
    device_demand(cudaMalloc(&c->memory, bytes + DEVICE_SKEW), "cudaMalloc");
    unsigned char *at = (unsigned char *)c->memory + DEVICE_SKEW;
    device_demand(cudaMemcpy(at, memory, bytes, cudaMemcpyHostToDevice), "upload");
    nsa_status s = nsa_cuda_cache_init(&c->device, d, dtype, max_rewind, at, bytes, NULL);
    if (s != NSA_OK) {
        device_demand(cudaFree(c->memory), "cudaFree");
        return s;
    }
    c->host = host;
    *host = c->device;
    host->lengths = (int32_t *)memory;
    host->newest = host->lengths + d->batch;
    device_cache_look(host);
    return NSA_OK;
}

/* A status in device memory, for the calls of device_verdict_of. */
static inline nsa_status *device_verdict(void) {
    static nsa_status *verdict;
    if (!verdict) device_demand(cudaMalloc((void **)&verdict, sizeof *verdict), "cudaMalloc");
    device_demand(cudaMemset(verdict, 0xff, sizeof *verdict), "cudaMemset");
    return verdict;
}

/* What a call came to: the host's refusal, or the device's. */
static inline nsa_status device_verdict_of(nsa_status s, const nsa_status *verdict) {
    nsa_status found = s;
    device_demand(cudaDeviceSynchronize(), "a kernel");
    if (s == NSA_OK)
        device_demand(cudaMemcpy(&found, verdict, sizeof found, cudaMemcpyDeviceToHost), "verdict");
    return found;
}

static inline nsa_status device_cache_rewind(nsa_cache *host, int sequence, int length) {
    nsa_status *verdict = device_verdict();
    nsa_status s =
        device_verdict_of(nsa_cuda_cache_rewind(host ? &device_cache_of(host)->device : NULL,
                                                sequence, length, verdict, NULL),
                          verdict);
    if (host) device_cache_look(host);
    return s;
}

static inline nsa_status device_cache_fork(nsa_cache *to, int to_sequence, const nsa_cache *from,
                                           int from_sequence, int length) {
    nsa_status *verdict = device_verdict();
    nsa_status s = device_verdict_of(nsa_cuda_cache_fork(&device_cache_of(to)->device, to_sequence,
                                                         &device_cache_of(from)->device,
                                                         from_sequence, length, verdict, NULL),
                                     verdict);
    device_cache_look(to);
    return s;
}

/* The views of an attention, parameters of phi behind the rest: `outs` come back. */
enum { DEVICE_STEP_ROWS = 8, DEVICE_STEP_OUTS = 8, DEVICE_STEP_PARAMETERS = 10 };

static inline void device_put_step(const nsa_attention *x, int batch) {
    const nsa_tensor *rows[DEVICE_STEP_ROWS] = {&x->q,     &x->k_slc,   &x->v_slc,   &x->k_win,
                                                &x->v_win, &x->k_cmp.x, &x->v_cmp.x, &x->gates};
    const nsa_tensor *outs[DEVICE_STEP_OUTS] = {&x->out,     &x->out_cmp, &x->out_slc, &x->out_win,
                                                &x->lse_cmp, &x->lse_slc, &x->lse_win, &x->blocks};
    const nsa_tensor *parameters[DEVICE_STEP_PARAMETERS] = {
        &x->k_cmp.pos, &x->k_cmp.w1, &x->k_cmp.b1, &x->k_cmp.w2, &x->k_cmp.b2,
        &x->v_cmp.pos, &x->v_cmp.w1, &x->v_cmp.b1, &x->v_cmp.w2, &x->v_cmp.b2};
    for (int i = 0; i < DEVICE_STEP_ROWS; i++)
        device_put(rows[i]->data,
                   (size_t)(rows[i]->batch * batch) * (rows[i]->dtype == NSA_F32 ? 4 : 2), 0, 0);
    for (int i = 0; i < DEVICE_STEP_OUTS; i++)
        device_put(outs[i]->data,
                   (size_t)(outs[i]->batch * batch) *
                       (outs[i]->dtype == NSA_F32 || outs[i]->dtype == NSA_I32 ? 4 : 2),
                   1, 0);
    for (int i = 0; i < DEVICE_STEP_PARAMETERS; i++)
        if (parameters[i]->data)
            device_put(parameters[i]->data,
                       (size_t)parameters[i]->batch * (parameters[i]->dtype == NSA_F32 ? 4 : 2), 0,
                       0);
}

/* Launches a step, or records it and plays the recording: the same kernels on the same memory. */
static inline nsa_status device_decode_run(const nsa_attention *x, nsa_cache *cache, int count,
                                           const int32_t *counts, nsa_reads *reads,
                                           nsa_status *verdict, void *workspace, size_t bytes,
                                           int graph) {
    if (!graph) {
        const nsa_status loaded = nsa_cuda_load_decode(x, cache, count);
        const nsa_status ran =
            nsa_cuda_decode(x, cache, count, counts, reads, verdict, workspace, bytes, NULL);
        return ran == NSA_OK && !counts ? loaded : ran;
    }
    cudaStream_t stream;
    cudaGraph_t recorded;
    cudaGraphExec_t step;
    device_demand(cudaStreamCreate(&stream), "cudaStreamCreate");
    device_demand(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    nsa_status s =
        nsa_cuda_decode(x, cache, count, counts, reads, verdict, workspace, bytes, stream);
    device_demand(cudaStreamEndCapture(stream, &recorded), "capture");
    if (s == NSA_OK) {
        device_demand(cudaGraphInstantiate(&step, recorded, 0), "cudaGraphInstantiate");
        device_demand(cudaGraphLaunch(step, stream), "cudaGraphLaunch");
        device_demand(cudaStreamSynchronize(stream), "a step");
        device_demand(cudaGraphExecDestroy(step), "cudaGraphExecDestroy");
    }
    device_demand(cudaGraphDestroy(recorded), "cudaGraphDestroy");
    device_demand(cudaStreamDestroy(stream), "cudaStreamDestroy");
    return s;
}

static inline nsa_status device_decode(const nsa_attention *x, nsa_cache *host, int count,
                                       const int32_t *counts, nsa_reads *reads, void *workspace,
                                       size_t bytes) {
    nsa_status *verdict = device_verdict();
    if (!host)
        return nsa_cuda_decode(x, NULL, count, counts, reads, verdict, workspace, bytes, NULL);
    struct device_cache *c = device_cache_of(host);
    const size_t batch = (size_t)host->desc.batch;
    device_put_step(x, host->desc.batch);
    DEVICE_COPY_BY(nsa_attention, x, device_attention)
    int32_t *counts_device =
        counts ? (int32_t *)device_put(counts, batch * sizeof *counts, 0, 0) : NULL;
    nsa_reads *reads_device =
        reads ? (nsa_reads *)device_put(reads, batch * sizeof *reads, 1, 0) : NULL;
    void *workspace_device = device_put(workspace, bytes, 0, DEVICE_SKEW);
    nsa_status s = device_verdict_of(device_decode_run(x_device, &c->device, count, counts_device,
                                                       reads_device, verdict, workspace_device,
                                                       bytes, c->graph),
                                     verdict);
    s = device_end(s);
    device_cache_look(host);
    return s;
}

/* nsa_cuda_attention_forward over one whole sequence, whose outputs come back. */
static inline nsa_status device_whole(const nsa_attention *x, const nsa_desc *d) {
    const size_t bytes = nsa_cuda_attention_forward_workspace_size(x, d);
    void *workspace;
    device_demand(cudaMalloc(&workspace, bytes), "cudaMalloc");
    device_put_step(x, 1);
    device_put(x->k_cmp.out.data, (size_t)x->k_cmp.out.batch * sizeof(float), 0, 0);
    device_put(x->v_cmp.out.data, (size_t)x->v_cmp.out.batch * sizeof(float), 0, 0);
    DEVICE_COPY_BY(nsa_attention, x, device_attention)
    nsa_status s = device_end(nsa_cuda_attention_forward(x_device, d, workspace, bytes, NULL));
    device_demand(cudaFree(workspace), "cudaFree");
    return s;
}

/* The whole stays nsa.h's: it is what decoding is compared with. */
#undef nsa_attention_forward_workspace_size
#undef nsa_attention_forward
#define nsa_cache_size            nsa_cuda_cache_size
#define nsa_cache_init            device_cache_init
#define nsa_cache_rewind          device_cache_rewind
#define nsa_cache_fork            device_cache_fork
#define nsa_decode_workspace_size nsa_cuda_decode_workspace_size
#define nsa_decode                device_decode

#endif

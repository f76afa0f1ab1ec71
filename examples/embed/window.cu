/* window.c on a GPU: the same numbers, with the data in device memory and the call on a stream. A
   step that comes again and again is recorded once as a graph. */
#define NSA_CUDA_IMPLEMENTATION
/* Narrow heads of f32 are all that this program has: no other kernels are compiled. */
#define NSA_CUDA_MAX_DIM 64
#define NSA_CUDA_NO_BF16
#define NSA_CUDA_NO_F16
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include "nsa_cuda.cuh"
#include <stdio.h>
#include <stdlib.h>

/* Ends the program where CUDA refuses a call. */
static void demand(cudaError_t e, const char *what) {
    if (e == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}

static float *on_device(const float *from, size_t count) {
    void *to = NULL;
    demand(cudaMalloc(&to, count * sizeof(float)), "cudaMalloc");
    if (from)
        demand(cudaMemcpy(to, from, count * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
    return static_cast<float *>(to);
}

int main(void) {
    enum { T = 256, H = 4, D = 32 };
    static float q[T * H * D], k[T * D], v[T * D], out[T * H * D];
    for (int i = 0; i < T * H * D; i++) q[i] = (float)(i * 37 % 101) / 101;
    for (int i = 0; i < T * D; i++) k[i] = v[i] = (float)(i * 53 % 97) / 97;

    nsa_desc d = nsa_desc_default(1, T, H, 1, D);
    d.window = 64;
    nsa_attend x = {};
    x.q = nsa_tensor_bthd(on_device(q, T * H * D), NSA_F32, T, H, D);
    x.k = nsa_tensor_bthd(on_device(k, T * D), NSA_F32, T, 1, D);
    x.v = nsa_tensor_bthd(on_device(v, T * D), NSA_F32, T, 1, D);
    x.out = nsa_tensor_bthd(on_device(NULL, T * H * D), NSA_F32, T, H, D);
    x.lse = nsa_tensor_bthd(on_device(NULL, T * H), NSA_F32, T, H, 1);

    cudaStream_t stream;
    demand(cudaStreamCreate(&stream), "cudaStreamCreate");
    size_t bytes = nsa_cuda_attend_win_forward_workspace_size(&d);
    void *workspace = on_device(NULL, bytes / sizeof(float) + 1);

    /* The first call loads its kernels, which a recording may not do. */
    nsa_status s = nsa_cuda_attend_win_forward(&x, &d, workspace, bytes, stream);
    cudaGraph_t graph;
    cudaGraphExec_t step;
    demand(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    if (s == NSA_OK) s = nsa_cuda_attend_win_forward(&x, &d, workspace, bytes, stream);
    demand(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    demand(cudaGraphInstantiate(&step, graph, 0), "cudaGraphInstantiate");
    demand(cudaGraphLaunch(step, stream), "cudaGraphLaunch");

    demand(cudaMemcpyAsync(out, x.out.data, sizeof out, cudaMemcpyDeviceToHost, stream), "copy");
    demand(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    printf("%s: %.4f\n", nsa_status_name(s), (double)out[(255 * H + 3) * D]);
    if (s != NSA_OK) printf("%s: %s\n", nsa_status_where(s), nsa_status_text(s));
    for (void *p : {x.q.data, x.k.data, x.v.data, x.out.data, x.lse.data, workspace}) cudaFree(p);
    cudaGraphExecDestroy(step);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return s != NSA_OK;
}

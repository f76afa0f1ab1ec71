/* cuda_double.c - streams whose work is done when it is launched, or, where the environment has
   NCCL_DOUBLE_LATE, not before somebody waits for it: what is right does not depend on when. Twin:
   cuda_runtime_api.h beside it. The operations themselves are the CPU's, and done at once;
   dist_nccl.c's own stream is the only one that is created here. */
#include "cuda_runtime_api.h"

#include <stdlib.h>

enum { WORK = 256 };

static struct {
    cudaHostFn_t function;
    void *data;
} work[WORK];
static int count;
static char own, event;

static void do_all(void) {
    for (int i = 0; i < count; i++) work[i].function(work[i].data);
    count = 0;
}

cudaError_t cudaSetDevice(int device) {
    (void)device;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    (void)flags;
    *stream = (cudaStream_t)(void *)&own;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned int flags) {
    (void)e, (void)flags;
    if ((void *)stream != (void *)&own) do_all();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned int flags) {
    (void)flags;
    *e = (cudaEvent_t)(void *)&event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream) {
    (void)e, (void)stream;
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
    (void)e;
    do_all();
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    (void)stream;
    if (count == WORK) abort();
    work[count].function = function;
    work[count++].data = data;
    if (!getenv("NCCL_DOUBLE_LATE")) do_all();
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : "an error";
}

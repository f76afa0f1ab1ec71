/* cuda_runtime_api.h - what dist_nccl.c needs of CUDA's runtime, on a machine without one. Twin:
   cuda_double.c. Nothing else can be tested with it. */
#ifndef CUDA_RUNTIME_API_DOUBLE_H
#define CUDA_RUNTIME_API_DOUBLE_H

typedef enum cudaError { cudaSuccess = 0, cudaErrorNotReady = 600 } cudaError_t;
typedef struct cudaStream *cudaStream_t;
typedef struct cudaEvent *cudaEvent_t;
typedef void (*cudaHostFn_t)(void *data);
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

cudaError_t cudaSetDevice(int device);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data);
const char *cudaGetErrorString(cudaError_t error);

#endif

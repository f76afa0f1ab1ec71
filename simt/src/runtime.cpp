/* runtime.cpp: the part of the CUDA runtime that hosts of kernels use, under its own names.
   Twin: libcudart; its documentation says what each returns. Streams run at once and in order.
   Not here: kernels (launch.cpp), graphs (graph.cpp), peers, textures. */
#include "runtime.h"

#include "checker.h"
#include "graph.h"
#include "kernel.h"
#include "machine.h"
#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <set>

namespace simt {
namespace {

/* CUDA C++ Programming Guide, table of technical specifications by compute capability. */
constexpr size_t kib = 1024, mib = 1024 * 1024;
const architecture architectures[] = {
    {80, "simt, limits of an A100", 108, 163 * kib, 164 * kib, 2048, 32, 40 * mib},
    {86, "simt, limits of an RTX 3090", 82, 99 * kib, 100 * kib, 1536, 16, 6 * mib},
    {89, "simt, limits of an RTX 4090", 128, 99 * kib, 100 * kib, 1536, 24, 72 * mib},
    {90, "simt, limits of an H200", 132, 227 * kib, 228 * kib, 2048, 32, 50 * mib},
    {100, "simt, limits of a B200", 148, 227 * kib, 228 * kib, 2048, 32, 126 * mib},
    {120, "simt, limits of an RTX 5090", 170, 99 * kib, 100 * kib, 1536, 24, 96 * mib},
};

cudaError_t last = cudaSuccess, sticky = cudaSuccess;

std::set<const void *> &handles() { /* streams and events alive */
    static std::set<const void *> all;
    return all;
}

template <typename T> cudaError_t make_handle(T *handle) {
    if (!handle) return remember(cudaErrorInvalidValue);
    void *p = malloc(1);
    handles().insert(p);
    *handle = static_cast<T>(p);
    return sticky;
}

cudaError_t drop_handle(void *handle) {
    if (!handles().erase(handle)) return remember(cudaErrorInvalidResourceHandle);
    free(handle);
    return sticky;
}

bool known_event(cudaEvent_t e) {
    return handles().count(e) != 0;
}

/* A copy's device sides lie inside one allocation each; `kind` says which side is which. */
cudaError_t copy_bytes(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    if (sticky != cudaSuccess) return sticky;
    if (bytes == 0) return cudaSuccess;
    const bool to_device = region_of(to) == region::global;
    const bool from_device = region_of(from) == region::global;
    if (to_device && !device_owns(to, bytes)) return remember(cudaErrorInvalidValue);
    if (from_device && !device_owns(from, bytes)) return remember(cudaErrorInvalidValue);
    const cudaMemcpyKind is =
        to_device ? (from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                  : (from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
    if (!to || !from || (kind != cudaMemcpyDefault && kind != is))
        return remember(cudaErrorInvalidValue);
    if (to_device && from_device)
        check_host_copy(to, from, bytes);
    else if (to_device)
        check_host_write(to, bytes);
    memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t set(void *to, int value, size_t bytes) {
    if (sticky != cudaSuccess) return sticky;
    if (bytes == 0) return cudaSuccess;
    if (!device_owns(to, bytes)) return remember(cudaErrorInvalidValue);
    check_host_write(to, bytes);
    memset(to, value, bytes);
    return cudaSuccess;
}

void fill_properties(cudaDeviceProp *p, const architecture &a) {
    *p = {};
    snprintf(p->name, sizeof p->name, "%s", a.name);
    p->totalGlobalMem = size_t(16) << 30;
    p->sharedMemPerBlock = shared_without_leave;
    p->sharedMemPerBlockOptin = a.shared_per_block_optin;
    p->sharedMemPerMultiprocessor = a.shared_per_multiprocessor;
    p->reservedSharedMemPerBlock = kib;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = a.threads_per_multiprocessor;
    p->maxBlocksPerMultiProcessor = a.blocks_per_multiprocessor;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 64 * kib;
    p->major = a.number / 10;
    p->minor = a.number % 10;
    p->multiProcessorCount = a.multiprocessors;
    p->l2CacheSize = static_cast<int>(a.l2_bytes);
    p->unifiedAddressing = p->concurrentKernels = p->memoryPoolsSupported = 1;
}

} // namespace

const architecture *find_architecture(int number) {
    for (const architecture &a : architectures)
        if (a.number == number) return &a;
    return nullptr;
}

const architecture &chosen_architecture() {
    return *find_architecture(config().architecture);
}

cudaError_t remember(cudaError_t e) {
    if (e != cudaSuccess) last = e;
    return e;
}
void set_sticky(cudaError_t e) {
    sticky = last = e;
}
cudaError_t sticky_error() {
    return sticky;
}
bool known_stream(cudaStream_t s) {
    return !s || s == cudaStreamLegacy || s == cudaStreamPerThread || handles().count(s) != 0;
}

void clear_report() {
    clear_last_report();
    sticky = last = cudaSuccess;
}

} // namespace simt

using namespace simt;

extern "C" {

/* ---- Errors ------------------------------------------------------------------------------- */

cudaError_t cudaGetLastError() {
    const cudaError_t e = last;
    last = sticky;
    return e;
}
cudaError_t cudaPeekAtLastError() {
    return last;
}

static const struct {
    cudaError_t code;
    const char *name, *text;
} error_names[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure",
     "unspecified launch failure (the executor has reported it)"},
};

const char *cudaGetErrorName(cudaError_t e) {
    for (const auto &n : error_names)
        if (n.code == e) return n.name;
    return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t e) {
    for (const auto &n : error_names)
        if (n.code == e) return n.text;
    return "unrecognized error code";
}

/* ---- Device ------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return sticky;
}
cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return sticky;
}
cudaError_t cudaSetDevice(int device) {
    return device == 0 ? sticky : remember(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceSynchronize() {
    return refused_by_capture() != cudaSuccess ? last : sticky;
}
cudaError_t cudaDeviceReset() {
    forget_leave();
    sticky = last = cudaSuccess;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    if (!p || device != 0) return remember(device ? cudaErrorInvalidDevice : cudaErrorInvalidValue);
    fill_properties(p, chosen_architecture());
    return sticky;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    if (device != 0) return remember(cudaErrorInvalidDevice);
    const architecture &a = chosen_architecture();
    switch (static_cast<int>(attribute)) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        break;
    case cudaDevAttrWarpSize:
        *value = 32;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = static_cast<int>(shared_without_leave);
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = static_cast<int>(a.shared_per_block_optin);
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = static_cast<int>(a.shared_per_multiprocessor);
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = a.multiprocessors;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = a.number / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = a.number % 10;
        break;
    case cudaDevAttrL2CacheSize:
        *value = static_cast<int>(a.l2_bytes);
        break;
    default:
        return remember(cudaErrorInvalidValue);
    }
    return sticky;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = size_t(16) << 30;
    *available = *total - std::min(*total, device_live_bytes());
    return sticky;
}

/* ---- Memory ------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    if (sticky != cudaSuccess) return sticky;
    if (!pointer) return remember(cudaErrorInvalidValue);
    if (refused_by_capture() != cudaSuccess) return last;
    *pointer = bytes ? device_allocate(bytes) : nullptr;
    return bytes && !*pointer ? remember(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t) {
    return cudaMalloc(pointer, bytes);
}
cudaError_t cudaFree(void *pointer) {
    if (pointer && !device_free(pointer)) return remember(cudaErrorInvalidValue);
    return sticky;
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) {
    return cudaFree(pointer);
}
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) {
    *pointer = malloc(bytes ? bytes : 1);
    return *pointer ? sticky : remember(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    return cudaHostAlloc(pointer, bytes, 0);
}
cudaError_t cudaFreeHost(void *pointer) {
    free(pointer);
    return sticky;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return refused_by_capture() != cudaSuccess ? last : copy_bytes(to, from, bytes, kind);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    if (!known_stream(stream)) return remember(cudaErrorInvalidResourceHandle);
    if (refused_on_stream(stream) != cudaSuccess) return last;
    if (config().ask) return sticky;
    if (capture(stream, [=] { copy_bytes(to, from, bytes, kind); })) return cudaSuccess;
    return copy_bytes(to, from, bytes, kind);
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return refused_by_capture() != cudaSuccess ? last : set(to, value, bytes);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    if (!known_stream(stream)) return remember(cudaErrorInvalidResourceHandle);
    if (refused_on_stream(stream) != cudaSuccess) return last;
    if (config().ask) return sticky;
    if (capture(stream, [=] { set(to, value, bytes); })) return cudaSuccess;
    return set(to, value, bytes);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    *attributes = {};
    const bool device = region_of(pointer) == region::global;
    attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    attributes->device = device ? 0 : -2;
    attributes->devicePointer = device ? const_cast<void *>(pointer) : nullptr;
    attributes->hostPointer = device ? nullptr : const_cast<void *>(pointer);
    return sticky;
}

/* ---- Streams and events ------------------------------------------------------------------- */

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return make_handle(stream);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    return make_handle(stream);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    return make_handle(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return drop_handle(stream);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (refused_by_capture() != cudaSuccess) return last;
    return known_stream(stream) ? sticky : remember(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return cudaStreamSynchronize(stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (!known_stream(stream) || !known_event(event))
        return remember(cudaErrorInvalidResourceHandle);
    capture_wait(stream, event);
    return sticky;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return make_handle(event);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    return make_handle(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return drop_handle(event);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (!known_stream(stream) || !known_event(event))
        return remember(cudaErrorInvalidResourceHandle);
    capture_event(event, stream);
    return sticky;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    return known_event(event) ? sticky : remember(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return cudaEventQuery(event);
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (!known_event(start) || !known_event(end)) return remember(cudaErrorInvalidResourceHandle);
    *milliseconds = 0.0f; /* time is not modelled */
    return sticky;
}

/* A function of the host, called in the stream's order. */
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    if (!known_stream(stream)) return remember(cudaErrorInvalidResourceHandle);
    if (refused_on_stream(stream) != cudaSuccess) return last;
    if (!capture(stream, [=] { function(data); })) function(data);
    return sticky;
}

/* ---- Functions ---------------------------------------------------------------------------- */

/* Leave is for dynamic bytes that the device has beside the static ones. */
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    if (!kernel) return remember(cudaErrorInvalidDeviceFunction);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return sticky;
    kernel_facts &k = facts_of(kernel);
    const size_t most = chosen_architecture().shared_per_block_optin;
    if (value < 0 || static_cast<size_t>(value) + k.static_bytes > most)
        return remember(cudaErrorInvalidValue);
    k.leave = value;
    return sticky;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
    if (!attributes) return remember(cudaErrorInvalidValue);
    if (!kernel) return remember(cudaErrorInvalidDeviceFunction);
    const kernel_facts &k = facts_of(kernel);
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->sharedSizeBytes = k.static_bytes;
    attributes->maxDynamicSharedSizeBytes = static_cast<int>(dynamic_limit(k));
    attributes->binaryVersion = attributes->ptxVersion = config().architecture;
    return sticky;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel,
                                                          int threads, size_t shared_bytes) {
    const architecture &a = chosen_architecture();
    if (!blocks || threads < 1 || threads > 1024) return remember(cudaErrorInvalidValue);
    if (!kernel) return remember(cudaErrorInvalidDeviceFunction);
    const size_t shared = facts_of(kernel).static_bytes + shared_bytes;
    const int warps = (threads + 31) / 32;
    const int by_threads = a.threads_per_multiprocessor / (32 * warps);
    const int by_shared = static_cast<int>(a.shared_per_multiprocessor / (shared + kib));
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    if (*blocks > a.blocks_per_multiprocessor) *blocks = a.blocks_per_multiprocessor;
    if (shared > a.shared_per_block_optin) *blocks = 0;
    return sticky;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    const bool found = !strcmp(symbol, "cuTensorMapEncodeTiled");
    *function = found ? reinterpret_cast<void *>(cuTensorMapEncodeTiled) : nullptr;
    if (result) *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return sticky;
}

} /* extern "C" */

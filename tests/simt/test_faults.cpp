/* test_faults.cpp: kernels that are wrong on purpose, and the words and line with which the
   executor says so. Not here: faults in real kernels (mutate/), races and bounds
   (test_checker.cpp). */
#include "expect.h"

constexpr unsigned all = 0xffffffffu;

/* ---- Warp operations ---------------------------------------------------------------------- */

static __global__ void mask_without_caller_kernel(int *out) {
    FAULT(out[threadIdx.x] = __shfl_sync(0x0000fffeu, 1, 1));
}
static __global__ void half_warp_missing_kernel(int *out) {
    int v = 0;
    if (threadIdx.x < 16) FAULT(v = __shfl_sync(all, 1, 0));
    out[threadIdx.x] = v;
}
static __global__ void exited_lane_kernel(int *out) {
    if (threadIdx.x == 31) return;
    FAULT(out[threadIdx.x] = __shfl_down_sync(all, 1, 1));
}
static __global__ void two_places_kernel(int *out) {
    if (threadIdx.x % 2)
        out[threadIdx.x] = __shfl_xor_sync(all, 1, 2);
    else
        out[threadIdx.x] = __shfl_xor_sync(all, 2, 2);
}
static __global__ void overlapping_masks_kernel(int *out) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_xor_sync(0x0001ffffu, 1, 1);
    else
        out[threadIdx.x] = __shfl_xor_sync(0xffff8000u, 1, 1);
}
static __global__ void mixed_operations_kernel(int *out) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __any_sync(all, 1);
    else
        out[threadIdx.x] = __all_sync(all, 1);
}
static __global__ void partial_warp_kernel(float *out) {
    float c[4] = {};
    const uint32_t a[4] = {};
    FAULT(nsa__mma_m16n8k16<__half>(c, a, 0u, 0u));
    out[threadIdx.x] = c[0];
}
static __global__ void divergent_mma_kernel(float *out) {
    float c[4] = {};
    const uint32_t a[4] = {};
    if (threadIdx.x != 7) FAULT(nsa__mma_m16n8k16<__half>(c, a, 0u, 0u));
    out[threadIdx.x] = c[0];
}
static __global__ void reads_outside_mask_kernel(int *out) {
    int v = 0;
    if (threadIdx.x < 8) FAULT(v = __shfl_sync(0xffu, 1, 9));
    out[threadIdx.x] = v;
}
static __global__ void width_kernel(int *out) {
    FAULT(out[threadIdx.x] = __shfl_xor_sync(all, 1, 1, 12));
}
static __global__ void lanes_that_are_not_kernel(int *out) {
    FAULT(out[threadIdx.x] = __ballot_sync(all, 1) != 0);
}

/* ---- Barriers ----------------------------------------------------------------------------- */

static __global__ void barrier_in_branch_kernel(int *out) {
    if (threadIdx.x < 32) FAULT(__syncthreads());
    out[threadIdx.x] = 1;
}
static __global__ void two_barriers_kernel(int *out) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}
static __global__ void exited_before_barrier_kernel(int *out) {
    if (threadIdx.x == 40) return;
    FAULT(__syncthreads());
    out[threadIdx.x] = 1;
}
static __global__ void named_count_kernel(int *out) {
    if (threadIdx.x < 32)
        nsa__barrier_sync(1, 64);
    else
        nsa__barrier_sync(1, 96);
    out[threadIdx.x] = 1;
}
static __global__ void named_partial_kernel(int *out) {
    FAULT(nsa__barrier_sync(1, 40));
    out[threadIdx.x] = 1;
}
static __global__ void named_zero_kernel(int *out) {
    FAULT(nsa__barrier_sync(16, 64));
    out[threadIdx.x] = 1;
}
static __global__ void nobody_comes_kernel(int *out) {
    if (threadIdx.x < 32) FAULT(nsa__barrier_sync(3, 64));
    out[threadIdx.x] = 1;
}

/* ---- Copies ------------------------------------------------------------------------------- */

static __global__ void misaligned_source_kernel(const char *in) {
    NSA_SHARED(uint4, tile, [32]);
    FAULT(nsa__cp_async<16>(&tile[threadIdx.x], in + 16 * threadIdx.x + 8));
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
}
static __global__ void source_past_end_kernel(const char *in) {
    NSA_SHARED(uint4, tile, [33]);
    FAULT(nsa__cp_async<16>(&tile[threadIdx.x], in + 16 * threadIdx.x + 16));
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
}
static __global__ void target_past_end_kernel(const char *in) {
    NSA_SHARED(uint4, tile, [31]);
    FAULT(nsa__cp_async<16>(&tile[threadIdx.x], in + 16 * threadIdx.x));
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
}
static __global__ void never_waited_kernel(const char *in) {
    NSA_SHARED(uint4, tile, [32]);
    FAULT(nsa__cp_async<16>(&tile[threadIdx.x], in + 16 * threadIdx.x));
    nsa__cp_async_commit();
}
static __global__ void never_committed_kernel(const char *in) {
    NSA_SHARED(uint4, tile, [32]);
    FAULT(nsa__cp_async<16>(&tile[threadIdx.x], in + 16 * threadIdx.x));
    nsa__cp_async_wait<0>();
}
static __global__ void misaligned_row_kernel(uint32_t *out) {
    NSA_SHARED(uint4, tile, [34]);
    for (int i = static_cast<int>(threadIdx.x); i < 34; i += 32) tile[i] = uint4{0, 0, 0, 0};
    __syncthreads();
    uint32_t r[4];
    FAULT(nsa__ldmatrix_x4(r, reinterpret_cast<char *>(&tile[threadIdx.x]) + 8));
    out[threadIdx.x] = r[0];
}

/* ---- The rest ----------------------------------------------------------------------------- */

static __global__ void trap_kernel(int *out) {
    if (threadIdx.x == 3) FAULT(__trap());
    out[threadIdx.x] = 1;
}
NSA__DEVICE int shared_elsewhere(int x) {
    NSA_SHARED(int, one, [1]);
    FAULT(void(0)), one[0] = x;
    return one[0];
}
static __global__ void shared_elsewhere_kernel(int *out) {
    out[0] = shared_elsewhere(1);
}
static __global__ void too_much_static_kernel(int *out) {
    NSA_SHARED(int, big, [12 * 1024 + 1]);
    big[threadIdx.x] = 1;
    out[threadIdx.x] = big[threadIdx.x];
}
/* 1000 static bytes, which fill up to 1024. One for each architecture: a kernel asks for leave
   once. */
template <int ARCH> static __global__ void limits_kernel(int *out) {
    NSA_SHARED(char, some, [1000]);
    NSA_SHARED_ALL(bytes);
    some[threadIdx.x] = bytes[threadIdx.x] = 1;
    out[threadIdx.x] = some[threadIdx.x];
}
static __global__ void fine_kernel(int *out) {
    out[threadIdx.x] = 1;
}

#define PLANTED(threads, words, kernel, ...)                                            \
    do {                                                                                \
        plant();                                                                        \
        EXPECT(NSA_LAUNCH(kernel, 1, threads, 0, nullptr, __VA_ARGS__) == cudaSuccess); \
        EXPECT_REPORT(words);                                                           \
    } while (0)

static void test_warp_faults() {
    device_array<int> out(64);
    device_array<float> floats(64);
    PLANTED(32, "leaves out the calling lane", mask_without_caller_kernel, out.data);
    PLANTED(32, "exited", half_warp_missing_kernel, out.data);
    PLANTED(32, "exited", exited_lane_kernel, out.data);
    PLANTED(32, "of it wait in __shfl_xor_sync", two_places_kernel, out.data);
    PLANTED(32, "wait", overlapping_masks_kernel, out.data);
    PLANTED(32, "of it wait in __a", mixed_operations_kernel, out.data);
    PLANTED(24, "in a warp of 24 lanes: all 32 must take part", partial_warp_kernel, floats.data);
    PLANTED(32, "exited", divergent_mma_kernel, floats.data);
    PLANTED(32, "reads lane 9", reads_outside_mask_kernel, out.data);
    PLANTED(32, "must be a power of two", width_kernel, out.data);
    PLANTED(48, "has only 16 lanes", lanes_that_are_not_kernel, out.data);
}

static void test_barrier_faults() {
    device_array<int> out(64);
    PLANTED(64, "exited", barrier_in_branch_kernel, out.data);
    PLANTED(64, "other threads of the block wait in __syncthreads", two_barriers_kernel, out.data);
    PLANTED(64, "exited", exited_before_barrier_kernel, out.data);
    PLANTED(96, "has begun with", named_count_kernel, out.data);
    PLANTED(64, "must be whole warps", named_partial_kernel, out.data);
    PLANTED(64, "allowed are 1 to 15", named_zero_kernel, out.data);
    PLANTED(64, "deadlock", nobody_comes_kernel, out.data);
}

/* The report of a deadlock says who waits where and who is gone. */
static void test_deadlock_report() {
    device_array<int> out(64);
    plant();
    EXPECT(NSA_LAUNCH(nobody_comes_kernel, dim3(2, 3), 64, 0, nullptr, out.data) == cudaSuccess);
    const std::string r = simt::report();
    const std::string place = "test_faults.cpp:" + std::to_string(fault_line);
    for (const std::string &words :
         {std::string("warp 0 lanes 0xffffffff: wait in barrier.sync at "), place,
          std::string("warp 1 lanes 0xffffffff: exited"), std::string("kernel nobody_comes_kernel"),
          std::string("grid (2,3,1), block of (64,1,1)"), std::string("launched at ")})
        EXPECT(r.find(words) != std::string::npos);
    EXPECT_REPORT("deadlock");
}

static void test_copy_faults() {
    const device_array<char> in(std::vector<char>(512, 1));
    device_array<uint32_t> words(64);
    PLANTED(32, "is not a multiple of 16", misaligned_source_kernel, in.data);
    PLANTED(32, "reads outside device memory", source_past_end_kernel, in.data);
    PLANTED(32, "writes outside shared memory", target_past_end_kernel, in.data);
    PLANTED(32, "never waited for", never_waited_kernel, in.data);
    PLANTED(32, "never committed", never_committed_kernel, in.data);
    PLANTED(32, "must be a multiple of 16", misaligned_row_kernel, words.data);
}

static void test_other_faults() {
    device_array<int> out(64);
    PLANTED(32, "__trap", trap_kernel, out.data);
    PLANTED(1, "NSA_SHARED(one) stands in a function that the kernel calls",
            shared_elsewhere_kernel, out.data);
}

/* ---- What the runtime refuses -------------------------------------------------------------- */

static void expect_refused(cudaError_t got, cudaError_t want) {
    EXPECT_EQUAL(got, want);
    EXPECT_EQUAL(cudaPeekAtLastError(), want);
    EXPECT_EQUAL(cudaGetLastError(), want);
    EXPECT_EQUAL(cudaGetLastError(), cudaSuccess); /* a refused launch leaves nothing behind */
}

/* Without leave static and dynamic bytes have 48 KB together, with leave what the device has. Leave
   is for what lies beside the static bytes, and is lost with a reset. */
template <int ARCH> static void test_shared_limit(size_t most) {
    device_array<int> out(32);
    const auto kernel = limits_kernel<ARCH>;
    const auto launch = [&](size_t bytes) {
        return simt::launch(simt::site{__FILE__, __LINE__}, "limits_kernel", kernel, 1, 32, bytes,
                            nullptr, out.data);
    };
    const auto allow = [&](size_t bytes) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes));
    };
    const size_t beside = most - 1024, without = 47 * 1024;
    simt::config().architecture = ARCH;
    simt::config().quiet = true;
    EXPECT(launch(without) == cudaSuccess);
    expect_refused(launch(without + 1), cudaErrorInvalidValue);
    expect_refused(launch(48 * 1024), cudaErrorInvalidValue);
    expect_refused(allow(beside + 1), cudaErrorInvalidValue);
    expect_refused(allow(most), cudaErrorInvalidValue);
    cudaFuncAttributes has;
    EXPECT(cudaFuncGetAttributes(&has, kernel) == cudaSuccess);
    EXPECT_EQUAL(has.sharedSizeBytes, 1024);
    EXPECT_EQUAL(has.maxDynamicSharedSizeBytes, without);
    EXPECT(allow(without + 1) == cudaSuccess && launch(without + 1) == cudaSuccess);
    expect_refused(launch(without + 2), cudaErrorInvalidValue);
    EXPECT(allow(beside) == cudaSuccess && launch(beside) == cudaSuccess);
    EXPECT(cudaDeviceReset() == cudaSuccess);
    expect_refused(launch(without + 1), cudaErrorInvalidValue);
    EXPECT(NSA_LAUNCH(kernel, 1, 32, beside, nullptr, out.data) == cudaSuccess); /* it asks */
    expect_refused(NSA_LAUNCH(kernel, 1, 32, beside + 1, nullptr, out.data), cudaErrorInvalidValue);
    expect_refused(NSA_LAUNCH(too_much_static_kernel, 1, 32, 0, nullptr, out.data),
                   cudaErrorInvalidValue);
    int has_most = 0;
    EXPECT(cudaDeviceGetAttribute(&has_most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) ==
           cudaSuccess);
    EXPECT_EQUAL(has_most, most);
    simt::config().quiet = false;
    simt::config().architecture = 90;
}

/* CUDA C++ Programming Guide, technical specifications by compute capability. */
static void test_shared_limits() {
    test_shared_limit<80>(163 * 1024);
    test_shared_limit<86>(99 * 1024);
    test_shared_limit<89>(99 * 1024);
    test_shared_limit<90>(227 * 1024);
    test_shared_limit<100>(227 * 1024);
    test_shared_limit<120>(99 * 1024);
}

/* Launches that are only asked for are refused as others are, and do not run; nor do copies. */
static void test_asked_launches() {
    device_array<int> out(std::vector<int>(32, 7));
    simt::config().ask = true;
    EXPECT(NSA_LAUNCH(fine_kernel, 1, 32, 0, nullptr, out.data) == cudaSuccess);
    EXPECT(cudaMemsetAsync(out.data, 0, 128, nullptr) == cudaSuccess);
    expect_refused(NSA_LAUNCH(fine_kernel, 1, 1025, 0, nullptr, out.data),
                   cudaErrorInvalidConfiguration);
    simt::config().ask = false;
    EXPECT_EQUAL(out.read()[5], 7);
}

static void test_launch_errors() {
    device_array<int> out(64);
    int *p = out.data;
    expect_refused(simt::launch(simt::site{__FILE__, __LINE__}, "fine_kernel", fine_kernel, 0, 32,
                                0, nullptr, p),
                   cudaErrorInvalidConfiguration);
    EXPECT(NSA_LAUNCH(fine_kernel, 0, 32, 0, nullptr, p) == cudaSuccess); /* nothing to do */
    expect_refused(NSA_LAUNCH(fine_kernel, 1, 0, 0, nullptr, p), cudaErrorInvalidConfiguration);
    expect_refused(NSA_LAUNCH(fine_kernel, 1, 1025, 0, nullptr, p), cudaErrorInvalidConfiguration);
    expect_refused(NSA_LAUNCH(fine_kernel, 1, dim3(64, 32), 0, nullptr, p),
                   cudaErrorInvalidConfiguration);
    expect_refused(NSA_LAUNCH(fine_kernel, 1, dim3(1, 1, 65), 0, nullptr, p),
                   cudaErrorInvalidConfiguration);
    expect_refused(NSA_LAUNCH(fine_kernel, dim3(1, 65536), 32, 0, nullptr, p),
                   cudaErrorInvalidConfiguration);
    cudaStream_t stream = nullptr;
    EXPECT(cudaStreamCreate(&stream) == cudaSuccess);
    EXPECT(NSA_LAUNCH(fine_kernel, 1, 32, 0, stream, p) == cudaSuccess);
    EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
    expect_refused(NSA_LAUNCH(fine_kernel, 1, 32, 0, stream, p), cudaErrorInvalidResourceHandle);
}

/* After a fault every call says so, until the device is reset. */
static void test_sticky() {
    device_array<int> out(64);
    plant();
    EXPECT(NSA_LAUNCH(trap_kernel, 1, 32, 0, nullptr, out.data) == cudaSuccess);
    EXPECT_EQUAL(cudaGetLastError(), cudaErrorLaunchFailure);
    EXPECT_EQUAL(cudaGetLastError(), cudaErrorLaunchFailure);
    EXPECT_EQUAL(cudaStreamSynchronize(nullptr), cudaErrorLaunchFailure);
    EXPECT_EQUAL(cudaMemset(out.data, 0, 4), cudaErrorLaunchFailure);
    EXPECT_EQUAL(NSA_LAUNCH(fine_kernel, 1, 32, 0, nullptr, out.data), cudaErrorLaunchFailure);
    EXPECT(cudaDeviceReset() == cudaSuccess);
    EXPECT(NSA_LAUNCH(fine_kernel, 1, 32, 0, nullptr, out.data) == cudaSuccess);
    EXPECT_EQUAL(cudaGetLastError(), cudaSuccess);
    simt::clear_report();
    simt::config().quiet = false;
}

static __global__ void add_kernel(int *out, int x) {
    out[threadIdx.x] += x;
}

/* Launches, memsets and copies on a stream that records run when the graph does, as often as it
   does, with the parameters they had. */
static void test_capture() {
    cudaStream_t stream = nullptr, other = nullptr;
    cudaEvent_t fork = nullptr, join = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    EXPECT(cudaStreamCreate(&stream) == cudaSuccess && cudaStreamCreate(&other) == cudaSuccess);
    EXPECT(cudaEventCreate(&fork) == cudaSuccess && cudaEventCreate(&join) == cudaSuccess);
    device_array<int> out(std::vector<int>(32, 7));
    EXPECT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    EXPECT(cudaMemsetAsync(out.data, 0, 128, stream) == cudaSuccess);
    for (int x = 1; x <= 2; x++)
        EXPECT(NSA_LAUNCH(add_kernel, 1, 32, 0, stream, out.data, x) == cudaSuccess);
    EXPECT(cudaEventRecord(fork, stream) == cudaSuccess);
    EXPECT(cudaStreamWaitEvent(other, fork, 0) == cudaSuccess);
    EXPECT(NSA_LAUNCH(add_kernel, 1, 32, 0, other, out.data, 10) == cudaSuccess);
    EXPECT(cudaEventRecord(join, other) == cudaSuccess);
    EXPECT(cudaStreamWaitEvent(stream, join, 0) == cudaSuccess);
    EXPECT(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    EXPECT(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    EXPECT_EQUAL(out.read()[5], 7);
    for (int i = 0; i < 2; i++) {
        EXPECT(cudaGraphLaunch(exec, stream) == cudaSuccess);
        EXPECT_EQUAL(out.read()[5], 13);
    }
    EXPECT(cudaGraphExecDestroy(exec) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
    EXPECT(cudaEventDestroy(fork) == cudaSuccess && cudaEventDestroy(join) == cudaSuccess);
    EXPECT(cudaStreamDestroy(stream) == cudaSuccess && cudaStreamDestroy(other) == cudaSuccess);
}

/* What a joined stream does last, the stream that began must wait for. */
static void test_unjoined_capture() {
    device_array<int> out(32);
    cudaStream_t stream = nullptr, other = nullptr;
    cudaEvent_t event = nullptr;
    cudaGraph_t graph = nullptr;
    EXPECT(cudaStreamCreate(&stream) == cudaSuccess && cudaStreamCreate(&other) == cudaSuccess);
    EXPECT(cudaEventCreate(&event) == cudaSuccess);
    for (int waits = 0; waits < 2; waits++) {
        EXPECT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
        EXPECT(cudaEventRecord(event, stream) == cudaSuccess);
        EXPECT(cudaStreamWaitEvent(other, event, 0) == cudaSuccess);
        EXPECT(cudaEventRecord(event, other) == cudaSuccess);
        EXPECT(NSA_LAUNCH(fine_kernel, 1, 32, 0, other, out.data) == cudaSuccess);
        if (waits) EXPECT(cudaStreamWaitEvent(stream, event, 0) == cudaSuccess); /* too early */
        EXPECT_EQUAL(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureUnjoined);
    }
    cudaGetLastError();
    EXPECT(cudaEventDestroy(event) == cudaSuccess && cudaStreamDestroy(stream) == cudaSuccess);
    EXPECT(cudaStreamDestroy(other) == cudaSuccess);
}

/* What waits or allocates, or uses the default stream, spoils the recording. */
static void test_spoiled_capture() {
    device_array<int> out(32);
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    void *p = nullptr;
    EXPECT(cudaStreamCreate(&stream) == cudaSuccess);
    for (int what = 0; what < 4; what++) {
        EXPECT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
        const cudaError_t e = what == 0   ? cudaMalloc(&p, 16)
                              : what == 1 ? cudaStreamSynchronize(stream)
                              : what == 2 ? cudaDeviceSynchronize()
                                          : NSA_LAUNCH(fine_kernel, 1, 32, 0, nullptr, out.data);
        EXPECT_EQUAL(e,
                     what < 3 ? cudaErrorStreamCaptureUnsupported : cudaErrorStreamCaptureImplicit);
        EXPECT_EQUAL(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
        EXPECT(graph == nullptr);
    }
    EXPECT_EQUAL(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
                 cudaErrorStreamCaptureUnsupported);
    cudaGetLastError();
    EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
}

static void test_memory_errors() {
    device_array<char> d(100);
    char host[200] = {};
    EXPECT_EQUAL(cudaMemcpy(d.data, host, 101, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    EXPECT_EQUAL(cudaMemcpy(host, d.data + 1, 100, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    EXPECT_EQUAL(cudaMemcpy(d.data, host, 10, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    EXPECT_EQUAL(cudaMemcpy(host, d.data, 100, cudaMemcpyDefault), cudaSuccess);
    EXPECT_EQUAL(cudaMemset(d.data + 50, 0, 51), cudaErrorInvalidValue);
    EXPECT_EQUAL(cudaFree(host), cudaErrorInvalidValue);
    void *p = nullptr;
    EXPECT_EQUAL(cudaMalloc(&p, size_t(1) << 50), cudaErrorMemoryAllocation);
    EXPECT_EQUAL(cudaMalloc(&p, 0), cudaSuccess);
    EXPECT(p == nullptr);
    EXPECT_EQUAL(cudaMalloc(&p, 16), cudaSuccess);
    EXPECT_EQUAL(cudaFree(p), cudaSuccess);
    EXPECT_EQUAL(cudaFree(p), cudaErrorInvalidValue);
    cudaGetLastError();
}

int main() {
    test_shared_limits();
    test_asked_launches();
    for (const simt::order o :
         {simt::order::in_order, simt::order::reversed, simt::order::random}) {
        simt::config().schedule = o;
        test_warp_faults();
        test_barrier_faults();
        test_deadlock_report();
        test_copy_faults();
        test_other_faults();
        test_launch_errors();
        test_sticky();
        test_memory_errors();
        test_capture();
        test_unjoined_capture();
        test_spoiled_capture();
    }
    return expect_result("test_faults");
}

/* test_red_zones.cpp: writes just outside an array, in the modes that do not see each access.
   Plain: they are found when the block ends, and the report says whose end it was.
   AddressSanitizer: the program ends there and then, so each fault is a run of its own
   (`red_zones_asan NAME`).
   Not here: the checker, which names line and thread (test_checker.cpp). */
#include "expect.h"

static __global__ void past_device_kernel(int *out) {
    out[threadIdx.x + 1] = 1;
}
static __global__ void before_device_kernel(int *out) {
    if (threadIdx.x == 0) out[-1] = 1;
}
static __global__ void past_shared_kernel(int *out) {
    NSA_SHARED(int, box, [63]);
    int *p = box;
    p[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = box[0];
}
static __global__ void past_dynamic_kernel(int *out) {
    NSA_SHARED_ALL(bytes);
    bytes[threadIdx.x + 1] = 1;
    __syncthreads();
    out[threadIdx.x] = bytes[1];
}
static __global__ void freed_kernel(int *out) {
    out[threadIdx.x] += 1;
}
static __global__ void nan_kernel(float *out) {
    NSA_SHARED(float, box, [64]);
    out[threadIdx.x] = box[threadIdx.x] + out[threadIdx.x + 64];
}

struct planted {
    const char *name, *words;
    void (*kernel)(int *);
    size_t shared;
};
static const planted faults[] = {
    {"past_device", "0 bytes after the end of the 256 bytes of a device", past_device_kernel, 0},
    {"before_device", "4 bytes before the 256 bytes of a device", before_device_kernel, 0},
    {"past_shared", "0 bytes after the end of the 252 bytes of box", past_shared_kernel, 0},
    {"past_dynamic", "0 bytes after the end of the 64 bytes of the block's dynamic",
     past_dynamic_kernel, 64},
};

static void launch_planted(const planted &f) {
    device_array<int> out(64);
    EXPECT(NSA_LAUNCH(f.kernel, 1, 64, f.shared, nullptr, out.data) == cudaSuccess);
}

static void test_planted() {
    for (const planted &f : faults) {
        plant();
        launch_planted(f);
        EXPECT_REPORT(f.words);
    }
}

/* What nobody wrote is NaN, so that it reaches a result. */
static void test_nan() {
    device_array<float> out(128);
    EXPECT(NSA_LAUNCH(nan_kernel, 1, 64, 0, nullptr, out.data) == cudaSuccess);
    for (const float x : out.read()) EXPECT(x != x);
}

int main(int count, char **names) {
    if (count == 2) {
        for (const planted &f : faults)
            if (!strcmp(names[1], f.name)) launch_planted(f);
        if (!strcmp(names[1], "freed")) {
            int *gone = nullptr;
            if (cudaMalloc(&gone, 256) != cudaSuccess || cudaFree(gone) != cudaSuccess) return 2;
            EXPECT(NSA_LAUNCH(freed_kernel, 1, 64, 0, nullptr, gone) == cudaSuccess);
        }
        return expect_result(names[1]);
    }
    test_planted();
    test_nan();
    return expect_result("test_red_zones");
}

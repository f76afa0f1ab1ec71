/* test_checker.cpp: races, uninitialised reads and stray accesses planted in small kernels, and
   kernels that come close to them and are right. Runs in the checker alone.
   Not here: misuse of warp operations and barriers, which every mode finds (test_faults.cpp). */
#include "expect.h"

constexpr unsigned all = 0xffffffffu;

/* ---- Races in shared memory --------------------------------------------------------------- */

static __global__ void read_after_write_kernel(int *out) {
    NSA_SHARED(int, box, [64]);
    box[threadIdx.x] = 1;
    FAULT(out[threadIdx.x] = box[63 - threadIdx.x]); /* no barrier */
}
static __global__ void write_after_read_kernel(int *out) {
    NSA_SHARED(int, box, [64]);
    box[threadIdx.x] = 1;
    __syncthreads();
    const int v = box[63 - threadIdx.x];
    FAULT(box[threadIdx.x] = v + 1); /* somebody may not have read it yet */
    out[threadIdx.x] = v;
}
static __global__ void write_after_write_kernel(int *out) {
    NSA_SHARED(int, box, [64]);
    FAULT(box[threadIdx.x / 2] = 1); /* two lanes, one place */
    __syncthreads();
    out[threadIdx.x] = box[threadIdx.x / 2];
}
static __global__ void shuffle_is_no_barrier_kernel(int *out) {
    NSA_SHARED(int, box, [32]);
    box[threadIdx.x] = 1;
    __shfl_sync(all, 1, 0);
    FAULT(out[threadIdx.x] = box[31 - threadIdx.x]);
}
static __global__ void syncwarp_is_one_warp_kernel(int *out) {
    NSA_SHARED(int, box, [64]);
    box[threadIdx.x] = 1;
    __syncwarp();
    FAULT(out[threadIdx.x] = box[63 - threadIdx.x]);
}
static __global__ void syncwarp_mask_kernel(int *out) {
    NSA_SHARED(int, box, [32]);
    box[threadIdx.x] = 1;
    if (threadIdx.x < 16)
        __syncwarp(0x0000ffffu);
    else
        __syncwarp(0xffff0000u);
    FAULT(out[threadIdx.x] = box[31 - threadIdx.x]);
}
static __global__ void one_byte_kernel(unsigned char *out) {
    NSA_SHARED(unsigned char, bytes, [64]);
    bytes[threadIdx.x] = 1; /* neighbours are no race */
    __syncwarp();
    if (threadIdx.x == 5) FAULT(bytes[38] = 2);
    out[threadIdx.x] = bytes[threadIdx.x];
}
static __global__ void named_barrier_is_its_members_kernel(int *out) {
    NSA_SHARED(int, box, [96]);
    box[threadIdx.x] = 1;
    if (threadIdx.x < 64) nsa__barrier_sync(1, 64);
    if (threadIdx.x < 32) FAULT(out[threadIdx.x] = box[threadIdx.x + 64]);
}
static __global__ void arrive_does_not_wait_kernel(int *out) {
    NSA_SHARED(int, box, [32]);
    if (threadIdx.x < 32) {
        box[threadIdx.x] = 1;
        nsa__barrier_sync(1, 64);
    } else {
        nsa__barrier_arrive(1, 64);
        FAULT(out[threadIdx.x] = box[threadIdx.x - 32]);
    }
}

/* Structs that a call returns are stored where the compiler puts no call of its own. */
struct triple {
    int x, y, z;
};
static __device__ triple make_triple(int x) {
    return {x, 2 * x, 3 * x};
}
template <typename T> __device__ T convert(float x) {
    return T(x);
}
static __global__ void struct_kernel(int *out) {
    NSA_SHARED(triple, box, [64]);
    FAULT(box[threadIdx.x / 2] = make_triple(static_cast<int>(threadIdx.x)));
    __syncthreads();
    out[threadIdx.x] = box[threadIdx.x / 2].z;
}
static __global__ void half_kernel(int *out) {
    NSA_SHARED(__half, box, [64]);
    FAULT(box[threadIdx.x / 2] = convert<__half>(2.0f));
    __syncthreads();
    out[threadIdx.x] = static_cast<int>(__half2float(box[threadIdx.x / 2]));
}

/* ---- Races in device memory, atomics ------------------------------------------------------ */

static __global__ void two_blocks_write_kernel(int *out) {
    FAULT(out[threadIdx.x] = static_cast<int>(blockIdx.x));
}
static __global__ void block_reads_block_kernel(int *out) {
    if (blockIdx.x == 0)
        out[threadIdx.x] = 1;
    else
        FAULT(out[threadIdx.x + 64] = out[threadIdx.x]);
}
static __global__ void lost_update_kernel(int *out) {
    FAULT(out[0] = out[0] + 1);
}
static __global__ void atomic_and_plain_kernel(int *out) {
    atomicAdd(out, 1);
    if (threadIdx.x == 9) FAULT(out[1] = out[0]);
}
static __global__ void plain_then_atomic_kernel(int *out) {
    if (threadIdx.x == 0) out[0] = 0;
    __syncwarp();
    atomicAdd(out, 1); /* lanes of the other warp do not know that it is 0 */
}
static __global__ void read_only_kernel(int *out) {
    out[threadIdx.x] = 1;
    __syncthreads();
    FAULT(out[threadIdx.x + 64] = __ldg(out + 63 - threadIdx.x));
}

/* ---- Copies under way --------------------------------------------------------------------- */

static __global__ void early_read_kernel(const int *in, int *out) {
    NSA_SHARED(int4, tile, [32]);
    nsa__cp_async<16>(&tile[threadIdx.x], in + 4 * threadIdx.x);
    nsa__cp_async_commit();
    FAULT(out[threadIdx.x] = tile[threadIdx.x].x);
    nsa__cp_async_wait<0>();
}
static __global__ void wrong_group_kernel(const int *in, int *out) {
    NSA_SHARED(int4, tile, [2][32]);
    for (int i = 0; i < 2; i++) {
        nsa__cp_async<16>(&tile[i][threadIdx.x], in + 4 * threadIdx.x);
        nsa__cp_async_commit();
    }
    nsa__cp_async_wait<1>();
    __syncthreads();
    FAULT(out[threadIdx.x] = tile[1][threadIdx.x].x);
    nsa__cp_async_wait<0>();
}
static __global__ void wait_without_barrier_kernel(const int *in, int *out) {
    NSA_SHARED(int4, tile, [32]);
    nsa__cp_async<16>(&tile[threadIdx.x], in + 4 * threadIdx.x);
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
    FAULT(out[threadIdx.x] = tile[31 - threadIdx.x].x);
}
static __global__ void overwrites_what_is_read_kernel(const int *in, int *out) {
    NSA_SHARED(int4, tile, [64]);
    tile[threadIdx.x] = int4{1, 2, 3, 4};
    __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x].x;
    FAULT(nsa__cp_async<16>(&tile[threadIdx.x], in + 4 * threadIdx.x));
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
}
static __global__ void ldmatrix_without_barrier_kernel(uint32_t *out) {
    NSA_SHARED(uint4, tile, [64]);
    tile[threadIdx.x] = uint4{1, 2, 3, 4};
    uint32_t r[4];
    FAULT(nsa__ldmatrix_x4(r, &tile[63 - threadIdx.x]));
    out[threadIdx.x] = r[0];
}

/* ---- What nobody wrote, what is nobody's -------------------------------------------------- */

static __global__ void unwritten_shared_kernel(int *out) {
    NSA_SHARED(int, box, [64]);
    if (threadIdx.x != 3) box[threadIdx.x] = 1;
    __syncthreads();
    FAULT(out[threadIdx.x] = box[threadIdx.x]);
}
static __global__ void unwritten_device_kernel(int *out) {
    if (threadIdx.x == 0) FAULT(out[1] = out[2]);
}
static __global__ void past_device_kernel(int *out) {
    FAULT(out[threadIdx.x + 1] = 1);
}
static __global__ void before_device_kernel(int *out) {
    if (threadIdx.x == 0) FAULT(out[0] = out[-1]);
}
static __global__ void past_shared_kernel(int *out) {
    NSA_SHARED(int, box, [63]);
    FAULT(box[threadIdx.x] = 1);
    out[threadIdx.x] = 1;
}
static __global__ void past_dynamic_kernel(int *out) {
    NSA_SHARED_ALL(bytes);
    FAULT(bytes[threadIdx.x + 1] = 1);
    out[threadIdx.x] = 1;
}
static __global__ void host_pointer_kernel(const int *host, int *out) {
    FAULT(out[threadIdx.x] = host[threadIdx.x]);
}
static int host_variable = 5;
static __global__ void host_variable_kernel(int *out) {
    FAULT(out[threadIdx.x] = host_variable);
}
static __global__ void misaligned_kernel(int *out) {
    NSA_SHARED(int, box, [64]);
    FAULT(*reinterpret_cast<double *>(&box[1]) = 1.0);
    out[threadIdx.x] = 1;
}

#define PLANTED(blocks, threads, shared, words, kernel, ...)                                      \
    do {                                                                                          \
        plant();                                                                                  \
        EXPECT(NSA_LAUNCH(kernel, blocks, threads, shared, nullptr, __VA_ARGS__) == cudaSuccess); \
        EXPECT_REPORT(words);                                                                     \
    } while (0)

static void test_shared_races() {
    device_array<int> out(96);
    device_array<unsigned char> bytes(64);
    PLANTED(1, 64, 0, "read of 4 bytes", read_after_write_kernel, out.data);
    PLANTED(1, 64, 0, "race: ", write_after_read_kernel, out.data);
    PLANTED(1, 64, 0, "race: write of 4 bytes", write_after_write_kernel, out.data);
    PLANTED(1, 64, 0, "race: write of 4 bytes", struct_kernel, out.data);
    PLANTED(1, 64, 0, "race: write of 2 bytes", half_kernel, out.data);
    PLANTED(1, 32, 0, "read of 4 bytes", shuffle_is_no_barrier_kernel, out.data);
    PLANTED(1, 64, 0, "read of 4 bytes", syncwarp_is_one_warp_kernel, out.data);
    PLANTED(1, 32, 0, "read of 4 bytes", syncwarp_mask_kernel, out.data);
    PLANTED(1, 64, 0, "byte 38 of the 64 of bytes", one_byte_kernel, bytes.data);
    PLANTED(1, 96, 0, "read of 4 bytes", named_barrier_is_its_members_kernel, out.data);
    PLANTED(1, 64, 0, "read of 4 bytes", arrive_does_not_wait_kernel, out.data);
}

static void test_device_races() {
    device_array<int> out(128);
    EXPECT(cudaMemset(out.data, 0, 512) == cudaSuccess);
    PLANTED(2, 64, 0, "write by another block", two_blocks_write_kernel, out.data);
    PLANTED(2, 64, 0, "another block", block_reads_block_kernel, out.data);
    PLANTED(1, 64, 0, "race: ", lost_update_kernel, out.data);
    PLANTED(2, 1, 0, "another block", lost_update_kernel, out.data);
    PLANTED(1, 64, 0, "race: ", atomic_and_plain_kernel, out.data);
    fault_line = 0;
    PLANTED(1, 64, 0, "race: ", plain_then_atomic_kernel, out.data);
    PLANTED(1, 64, 0, "a read-only load of 4 bytes that this launch wrote", read_only_kernel,
            out.data);
}

static void test_copies() {
    const device_array<int> in(std::vector<int>(256, 3));
    device_array<int> out(64);
    device_array<uint32_t> words(64);
    const char *under_way = "into which an asynchronous copy is under way";
    PLANTED(1, 32, 0, under_way, early_read_kernel, in.data, out.data);
    PLANTED(1, 32, 0, under_way, wrong_group_kernel, in.data, out.data);
    PLANTED(1, 64, 0, "race: ", overwrites_what_is_read_kernel, in.data, out.data);
    PLANTED(1, 64, 0, "read of 16 bytes", ldmatrix_without_barrier_kernel, words.data);
    plant(); /* under way or just landed, as the schedule has it */
    EXPECT(NSA_LAUNCH(wait_without_barrier_kernel, 1, 32, 0, nullptr, in.data, out.data) ==
           cudaSuccess);
    EXPECT_REPORT("read of 4 bytes");
}

static void test_bounds() {
    device_array<int> out(64);
    const int host[64] = {};
    device_array<int> fresh(64);
    host_variable++;
    PLANTED(1, 64, 0, "of which byte 0 was never written", unwritten_shared_kernel, out.data);
    PLANTED(1, 64, 0, "of which byte 0 was never written", unwritten_device_kernel, fresh.data);
    PLANTED(1, 64, 0, "0 bytes after the end of the 256 bytes of a device allocation",
            past_device_kernel, out.data);
    PLANTED(1, 64, 0, "4 bytes before the 256 bytes of a device allocation", before_device_kernel,
            out.data);
    PLANTED(1, 64, 0, "0 bytes after the end of the 252 bytes of box", past_shared_kernel,
            out.data);
    PLANTED(1, 64, 64, "0 bytes after the end of the 64 bytes of the block's dynamic",
            past_dynamic_kernel, out.data);
    PLANTED(1, 64, 0, "is neither device nor shared memory", host_pointer_kernel, host, out.data);
    PLANTED(1, 64, 0, "is neither device nor shared memory", host_variable_kernel, out.data);
    PLANTED(1, 64, 0, "at an address that is no multiple of 8", misaligned_kernel, out.data);
    int *gone = nullptr;
    EXPECT(cudaMalloc(&gone, 256) == cudaSuccess && cudaFree(gone) == cudaSuccess);
    plant();
    EXPECT(NSA_LAUNCH(two_blocks_write_kernel, 1, 64, 0, nullptr, gone) == cudaSuccess);
    EXPECT_REPORT("a freed device allocation");
}

/* ---- Right, though it looks much the same -------------------------------------------------- */

static __global__ void right_kernel(const int *in, int *out, int *sums) {
    NSA_SHARED(int, box, [128]);
    NSA_SHARED(int4, tile, [2][128]);
    const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32;
    box[t] = in[t];
    __syncwarp();
    int v = box[32 * warp + 31 - lane]; /* within the warp */
    __syncwarp();
    box[t] = v;
    __syncthreads();
    v += box[127 - t];
    nsa__cp_async<16>(&tile[0][t], in + 4 * t);
    nsa__cp_async_commit();
    for (int i = 0; i < 4; i++) { /* two buffers in turns */
        if (i < 3) nsa__cp_async<16>(&tile[(i + 1) % 2][t], in + 4 * t);
        nsa__cp_async_commit();
        nsa__cp_async_wait<1>();
        __syncthreads();
        v += tile[i % 2][127 - t].y;
        __syncthreads();
    }
    if (warp < 2) nsa__barrier_sync(1, 64);
    if (warp == 0) box[lane] = 1;
    if (warp < 2) nsa__barrier_sync(1, 64);
    if (warp == 1) v += box[lane];
    atomicAdd(&sums[0], v);
    atomicMax(&sums[1 + blockIdx.x], v);
    out[blockIdx.x * 128 + threadIdx.x] = v;
}

static void test_right() {
    std::vector<int> in(512);
    for (size_t i = 0; i < in.size(); i++) in[i] = static_cast<int>(i * 37 % 101);
    const device_array<int> given(in);
    std::vector<int> first;
    for (unsigned seed = 1; seed <= 10; seed++) {
        device_array<int> out(3 * 128), sums(std::vector<int>(4, 0));
        simt::config().seed = seed;
        EXPECT(NSA_LAUNCH(right_kernel, 3, 128, 0, nullptr, given.data, out.data, sums.data) ==
               cudaSuccess);
        EXPECT(cudaDeviceSynchronize() == cudaSuccess);
        const std::vector<int> got = out.read();
        if (first.empty()) first = got;
        EXPECT(got == first);
        int sum = 0;
        for (int x : got) sum += x;
        EXPECT_EQUAL(sums.read()[0], sum);
    }
}

static __global__ void count_kernel(const float *in, float *out) {
    out[threadIdx.x] = in[threadIdx.x] + in[threadIdx.x + 64];
}

static void test_counters() {
    const device_array<float> in(std::vector<float>(128, 1.0f));
    device_array<float> out(64);
    simt::reset_counters();
    EXPECT(NSA_LAUNCH(count_kernel, 1, 64, 0, nullptr, in.data, out.data) == cudaSuccess);
    EXPECT_EQUAL(simt::count().global_read_bytes, 512);
    EXPECT_EQUAL(simt::count().global_write_bytes, 256);
    EXPECT_EQUAL(simt::count().launches, 1);
}

/* ---- The checker's own memory ------------------------------------------------------------- */

static __global__ void first_kernel(const int *in, int *out) {
    FAULT(out[threadIdx.x] = in[threadIdx.x]);
}

static size_t resident_bytes() {
    unsigned long pages = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    EXPECT(f && fscanf(f, "%lu %lu", &pages, &resident) == 2);
    if (f) fclose(f);
    return resident * 4096;
}

/* What is known of freed memory goes with it, and what is known of its neighbours stays. */
static void test_memory() {
    const device_array<int> written(std::vector<int>(64, 7));
    device_array<int> out(64);
    const size_t before = resident_bytes();
    for (int i = 0; i < 100; i++) {
        const device_array<char> large(200000), small(700), other(3000);
        EXPECT(cudaMemset(large.data, i, large.count) == cudaSuccess);
    }
    EXPECT(resident_bytes() < before + (size_t(8) << 20));
    /* all share a page, and their cells some; each is freed between two that live */
    for (int freed = 0; freed < 3; freed++) {
        device_array<char> below(700);
        device_array<int> fresh(64);
        device_array<char> above(700);
        device_array<int> kept(std::vector<int>(64, 9));
        device_array<char> last(700);
        char *&gone = freed == 0 ? below.data : freed == 1 ? above.data : last.data;
        EXPECT(cudaFree(gone) == cudaSuccess);
        gone = nullptr;
        EXPECT(NSA_LAUNCH(first_kernel, 1, 64, 0, nullptr, kept.data, out.data) == cudaSuccess);
        EXPECT(out.read() == std::vector<int>(64, 9));
        PLANTED(1, 64, 0, "of which byte 0 was never written", first_kernel, fresh.data, out.data);
    }
    EXPECT(NSA_LAUNCH(first_kernel, 1, 64, 0, nullptr, written.data, out.data) == cudaSuccess);
    EXPECT(out.read() == std::vector<int>(64, 7));
}

int main() {
    EXPECT(simt::checking());
    test_memory();
    for (const simt::order o : {simt::order::in_order, simt::order::reversed, simt::order::random})
        for (const bool early : {false, true})
            for (const unsigned preempt : {0u, 7u, 1u}) {
                simt::config().schedule = o;
                simt::config().early = early;
                simt::config().preempt = preempt;
                test_shared_races();
                test_device_races();
                test_copies();
                test_bounds();
                test_right();
                test_counters();
            }
    return expect_result("test_checker");
}

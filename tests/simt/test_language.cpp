/* test_language.cpp: what kernels say: indices, shared memory, barriers, shuffles, votes, atomics.
   Not here: tensor cores (test_fragments.cpp), faults (test_faults.cpp). */
#include "expect.h"

static __global__ void index_kernel(unsigned *out) {
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned per_block = blockDim.x * blockDim.y * blockDim.z;
    out[block * per_block + thread] =
        block << 16 | threadIdx.z << 12 | threadIdx.y << 8 | threadIdx.x;
}

static void test_indices() {
    const dim3 grid(3, 2, 2), block(5, 3, 4);
    device_array<unsigned> out(12 * 60);
    EXPECT(NSA_LAUNCH(index_kernel, grid, block, 0, nullptr, out.data) == cudaSuccess);
    const std::vector<unsigned> v = out.read();
    for (unsigned b = 0; b < 12; b++)
        for (unsigned t = 0; t < 60; t++)
            EXPECT_EQUAL(v[b * 60 + t], b << 16 | t / 15 << 12 | t / 5 % 3 << 8 | t % 5);
}

/* Static and dynamic arrays of one block, which a function that the kernel calls works on. */
template <int N> __device__ float through_shared(float (&row)[N][2], float x) {
    row[threadIdx.x][1] = x;
    if (threadIdx.x + 64 < N) row[threadIdx.x + 64][1] = x;
    __syncthreads();
    return row[(threadIdx.x + 1) % N][1];
}
static __global__ void shared_kernel(float *out, int n) {
    NSA_SHARED_ALL(bytes);
    float *all = reinterpret_cast<float *>(bytes);
    NSA_SHARED(int, one, [1]);
    NSA_SHARED(float, short_row, [64][2]);
    NSA_SHARED(float, long_row, [65][2]);
    if (threadIdx.x == 0) one[0] = 7;
    all[threadIdx.x] = static_cast<float>(threadIdx.x);
    const float a = through_shared(short_row, static_cast<float>(threadIdx.x) + 0.5f);
    const float b = through_shared(long_row, static_cast<float>(threadIdx.x) - 0.5f);
    const int first = static_cast<int>(threadIdx.x);
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum += all[(first + i) % 64];
    out[threadIdx.x] = a + (first < 63 ? b : 0.0f) + sum + static_cast<float>(one[0]);
}

static void test_shared() {
    device_array<float> out(64);
    EXPECT(NSA_LAUNCH(shared_kernel, 1, 64, 64 * sizeof(float), nullptr, out.data, 3) ==
           cudaSuccess);
    const std::vector<float> v = out.read();
    for (int t = 0; t < 64; t++) {
        const int sum = t + (t + 1) % 64 + (t + 2) % 64;
        EXPECT_EQUAL(v[static_cast<size_t>(t)],
                     ((t + 1) % 64 + 0.5) + (t < 63 ? t + 0.5 : 0.0) + sum + 7);
    }
}

/* A tree sum over the block, again and again in one array: every barrier counts. */
static __global__ void sum_kernel(const int *in, int *out, int n) {
    NSA_SHARED(int, part, [32]);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    int sum = 0;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x))
        sum += in[i];
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) part[warp] = sum;
    __syncthreads();
    const int warps = static_cast<int>(blockDim.x) / 32;
    if (warp == 0) {
        int all = lane < warps ? part[lane] : 0;
        for (int step = 16; step; step /= 2) all += __shfl_down_sync(0xffffffffu, all, step);
        if (lane == 0) out[blockIdx.x] = all;
    }
}

static void test_sum() {
    std::vector<int> in(1000);
    for (int i = 0; i < 1000; i++) in[static_cast<size_t>(i)] = i * i % 97;
    int want = 0;
    for (int x : in) want += x;
    const device_array<int> given(in);
    for (unsigned threads : {32u, 64u, 256u, 1024u}) {
        device_array<int> out(2);
        EXPECT(NSA_LAUNCH(sum_kernel, 2, threads, 0, nullptr, given.data, out.data, 1000) ==
               cudaSuccess);
        for (int x : out.read()) EXPECT_EQUAL(x, want);
    }
}

static __global__ void shuffle_kernel(int *out) {
    const int lane = static_cast<int>(threadIdx.x), v = 100 + lane;
    int r[8];
    r[0] = __shfl_sync(0xffffffffu, v, 5);
    r[1] = __shfl_sync(0xffffffffu, v, lane + 3, 8); /* wraps within 8 */
    r[2] = __shfl_up_sync(0xffffffffu, v, 2);
    r[3] = __shfl_up_sync(0xffffffffu, v, 2, 16);
    r[4] = __shfl_down_sync(0xffffffffu, v, 3);
    r[5] = __shfl_down_sync(0xffffffffu, v, 3, 4);
    r[6] = __shfl_xor_sync(0xffffffffu, v, 17);
    const double d = __shfl_sync(0xffffffffu, 0.25 * v, 31 - lane);
    r[7] = static_cast<int>(4.0 * d);
    for (int i = 0; i < 8; i++) out[lane * 8 + i] = r[i];
}

static void test_shuffles() {
    device_array<int> out(256);
    EXPECT(NSA_LAUNCH(shuffle_kernel, 1, 32, 0, nullptr, out.data) == cudaSuccess);
    const std::vector<int> v = out.read();
    for (int l = 0; l < 32; l++) {
        const int want[8] = {5,
                             l / 8 * 8 + (l + 3) % 8,
                             l < 2 ? l : l - 2,
                             l % 16 < 2 ? l : l - 2,
                             l > 28 ? l : l + 3,
                             l % 4 > 0 ? l : l + 3,
                             l ^ 17,
                             31 - l};
        for (int i = 0; i < 8; i++) EXPECT_EQUAL(v[static_cast<size_t>(l * 8 + i)], 100 + want[i]);
    }
}

static __global__ void vote_kernel(unsigned *out) {
    const unsigned lane = threadIdx.x, all = 0xffffffffu;
    unsigned r[12] = {};
    r[0] = __ballot_sync(all, lane % 3 == 0);
    r[1] = static_cast<unsigned>(__any_sync(all, lane == 40));
    r[2] = static_cast<unsigned>(__all_sync(all, lane < 32));
    r[3] = __match_any_sync(all, lane / 5);
    int same = 0;
    r[4] = __match_all_sync(all, 3.5f, &same) + static_cast<unsigned>(same);
    r[5] = __reduce_add_sync(all, lane);
    r[6] = static_cast<unsigned>(__reduce_min_sync(all, 5 - static_cast<int>(lane)));
    r[7] = __reduce_or_sync(all, lane << 3);
    r[8] = static_cast<unsigned>(__syncthreads_count(lane < 7));
    r[9] = static_cast<unsigned>(__syncthreads_and(lane < 31) + 2 * __syncthreads_or(lane == 31));
    if (lane < 10)
        r[10] = __ballot_sync(0x3ffu, lane & 1u); /* two groups of one warp at once */
    else
        r[10] = __ballot_sync(~0x3ffu, lane & 1u);
    __syncwarp();
    r[11] = __activemask() >> lane & 1u;
    for (unsigned i = 0; i < 12; i++) out[lane * 12 + i] = r[i];
}

static void test_votes() {
    device_array<unsigned> out(32 * 12);
    EXPECT(NSA_LAUNCH(vote_kernel, 1, 32, 0, nullptr, out.data) == cudaSuccess);
    const std::vector<unsigned> v = out.read();
    for (unsigned l = 0; l < 32; l++) {
        const unsigned match = (l < 30 ? 31u << (l / 5 * 5) : 3u << 30);
        const unsigned want[12] = {0x49249249u,
                                   0,
                                   1,
                                   match,
                                   0u /* all ones + 1 */,
                                   496,
                                   static_cast<unsigned>(-26),
                                   0xf8u,
                                   7,
                                   2,
                                   l < 10 ? 0x2aau : 0xaaaaa800u,
                                   1};
        for (unsigned i = 0; i < 12; i++) EXPECT_EQUAL(v[l * 12 + i], want[i]);
    }
}

static __global__ void atomic_kernel(int *i, unsigned *u, float *f, unsigned long long *l) {
    const int t = static_cast<int>(threadIdx.x + blockIdx.x * blockDim.x);
    atomicAdd(&i[0], t);
    atomicSub(&i[1], 1);
    atomicMin(&i[2], -t);
    atomicMax(&i[3], t);
    atomicOr(&u[0], 1u << (t % 32));
    atomicXor(&u[1], 1u << (t % 7));
    atomicAnd(&u[2], ~(1u << (t % 5)));
    atomicInc(&u[3], 9u);
    atomicAdd(f, 0.5f);
    atomicAdd(l, 1ull << 33);
    if (t == 5) atomicExch(&i[4], 77);
    for (int seen = atomicAdd(&i[5], 0);;) { /* a counter by compare and swap */
        const int old = atomicCAS(&i[5], seen, seen + 1);
        if (old == seen) break;
        seen = old;
    }
}

static void test_atomics() {
    device_array<int> i(std::vector<int>(6, 0));
    device_array<unsigned> u(std::vector<unsigned>{0, 0, ~0u, 0});
    device_array<float> f(std::vector<float>{0.0f});
    device_array<unsigned long long> l(std::vector<unsigned long long>{0});
    EXPECT(NSA_LAUNCH(atomic_kernel, 3, 70, 0, nullptr, i.data, u.data, f.data, l.data) ==
           cudaSuccess);
    const std::vector<int> want = {209 * 210 / 2, -210, -209, 209, 77, 210};
    EXPECT(i.read() == want);
    EXPECT((u.read() == std::vector<unsigned>{~0u, 0u, ~31u, 0u}));
    EXPECT_EQUAL(f.read()[0], 105);
    EXPECT_EQUAL(l.read()[0], 210.0 * 8589934592.0);
}

/* Two warps fill, two drain, in turns: named barriers with arrive and sync. */
static __global__ void named_barrier_kernel(int *out) {
    NSA_SHARED(int, box, [64]);
    const int t = static_cast<int>(threadIdx.x) % 64;
    if (threadIdx.x < 64) {
        for (int round = 0; round < 4; round++) {
            nsa__barrier_sync(2, 128); /* empty */
            box[t] = 10 * round + t;
            nsa__barrier_arrive(1, 128); /* full */
        }
    } else {
        int sum = 0;
        for (int round = 0; round < 4; round++) {
            nsa__barrier_arrive(2, 128);
            nsa__barrier_sync(1, 128);
            sum += box[63 - t];
        }
        out[t] = sum;
    }
}

static void test_named_barriers() {
    device_array<int> out(64);
    EXPECT(NSA_LAUNCH(named_barrier_kernel, 1, 128, 0, nullptr, out.data) == cudaSuccess);
    const std::vector<int> v = out.read();
    for (int t = 0; t < 64; t++) EXPECT_EQUAL(v[static_cast<size_t>(t)], 60 + 4 * (63 - t));
}

/* 4, 8 and 16 bytes, part of them valid, three groups of which the newest stays under way. */
static __global__ void copy_kernel(const unsigned char *in, unsigned char *out) {
    NSA_SHARED(uint4, rows, [3][32]);
    const int lane = static_cast<int>(threadIdx.x);
    nsa__cp_async<16>(&rows[0][lane], in + 16 * lane, lane % 17);
    nsa__cp_async_commit();
    unsigned char *second = reinterpret_cast<unsigned char *>(&rows[1][lane]);
    nsa__cp_async<8>(second, in + 16 * lane);
    nsa__cp_async<4>(second + 8, in + 16 * lane + 8, 3);
    nsa__cp_async<4>(second + 12, nullptr, 0);
    nsa__cp_async_commit();
    nsa__cp_async<16>(&rows[2][lane], in + 16 * (31 - lane));
    nsa__cp_async_commit();
    nsa__cp_async_wait<1>();
    __syncthreads();
    const uint4 a = rows[0][31 - lane], b = rows[1][31 - lane];
    nsa__cp_async_wait<0>();
    __syncthreads();
    const uint4 c = rows[2][31 - lane];
    uint4 *to = reinterpret_cast<uint4 *>(out);
    to[3 * lane] = a;
    to[3 * lane + 1] = b;
    to[3 * lane + 2] = c;
}

static void test_copies() {
    std::vector<unsigned char> in(512);
    for (size_t i = 0; i < in.size(); i++) in[i] = static_cast<unsigned char>(i * 7 + i / 256 + 1);
    const device_array<unsigned char> given(in);
    device_array<unsigned char> out(3 * 512);
    EXPECT(NSA_LAUNCH(copy_kernel, 1, 32, 0, nullptr, given.data, out.data) == cudaSuccess);
    const std::vector<unsigned char> v = out.read();
    for (size_t l = 0; l < 32; l++)
        for (size_t i = 0; i < 16; i++) {
            const size_t from = 31 - l;
            EXPECT_EQUAL(v[48 * l + i], i < from % 17 ? in[16 * from + i] : 0);
            EXPECT_EQUAL(v[48 * l + 16 + i], i < 11 ? in[16 * from + i] : 0);
            EXPECT_EQUAL(v[48 * l + 32 + i], in[16 * l + i]);
        }
}

static __global__ void math_kernel(float *out) {
    out[0] = nsa__ex2(-3.0f);
    out[1] = nsa__ex2(-__uint_as_float(0x7f800000u));
    out[2] = nsa__ex2(-130.0f);
    out[3] = nsa__log2(8.0f);
    out[4] = rsqrtf(16.0f) + __fdividef(1.0f, 4.0f);
    out[5] = static_cast<float>(__clz(1) + __ffs(8) + __popc(0xf0u));
    out[6] = __uint_as_float(nsa__pack<__nv_bfloat16>(1.0f, -2.0f));
    out[7] = __uint_as_float(nsa__pack<__half>(1.0f, -2.0f));
}

static void test_math() {
    device_array<float> out(8);
    EXPECT(NSA_LAUNCH(math_kernel, 1, 1, 0, nullptr, out.data) == cudaSuccess);
    const std::vector<float> v = out.read();
    const float want[6] = {0.125f, 0.0f, 0.0f, 3.0f, 0.5f, 39.0f};
    for (size_t i = 0; i < 6; i++) EXPECT_EQUAL(v[i], want[i]);
    EXPECT(__float_as_uint(v[6]) == 0xc0003f80u);
    EXPECT(__float_as_uint(v[7]) == 0xc0003c00u);
}

int main() {
    for (const simt::order o : {simt::order::in_order, simt::order::reversed, simt::order::random})
        for (const bool early : {false, true}) {
            simt::config().schedule = o;
            simt::config().early = early;
            test_indices();
            test_shared();
            test_sum();
            test_shuffles();
            test_votes();
            test_atomics();
            test_named_barriers();
            test_copies();
            test_math();
        }
    return expect_result("test_language");
}

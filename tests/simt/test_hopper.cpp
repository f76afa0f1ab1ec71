/* test_hopper.cpp: barriers in memory, bulk copies, tensor maps, wgmma.
   Layouts are compared with what is published: the (thread, value) strides of CUTLASS
   (include/cute/atom/mma_traits_sm90_gmma.hpp) and the canonical operand layouts of the PTX manual.
   Not here: mma.sync (test_fragments.cpp). */
#include "expect.h"

using bf16 = __nv_bfloat16;
constexpr int warpgroup = 128;

/* ---- Tensor maps -------------------------------------------------------------------------- */

/* A packed tensor of `dims`, innermost first, read in boxes of `box`. */
static CUtensorMap make_map(const void *data, std::vector<cuuint64_t> dims,
                            std::vector<cuuint32_t> box, CUtensorMapSwizzle swizzle,
                            CUresult want = CUDA_SUCCESS) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    EXPECT(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                            cudaEnableDefault, &found) == cudaSuccess);
    alignas(64) CUtensorMap map = {};
    std::vector<cuuint64_t> strides;
    cuuint64_t bytes = 2;
    for (size_t d = 0; d + 1 < dims.size(); d++) strides.push_back(bytes *= dims[d]);
    const std::vector<cuuint32_t> ones(dims.size(), 1);
    const CUresult got = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, static_cast<cuuint32_t>(dims.size()),
        const_cast<void *>(data), dims.data(), strides.data(), box.data(), ones.data(),
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    EXPECT(got == want);
    return map;
}

static void test_map_limits() {
    const device_array<bf16> x(64 * 64);
    const CUresult bad = CUDA_ERROR_INVALID_VALUE;
    make_map(x.data, {64, 64}, {64, 64}, CU_TENSOR_MAP_SWIZZLE_128B);
    make_map(x.data, {64, 64}, {72, 64}, CU_TENSOR_MAP_SWIZZLE_128B, bad); /* over the pattern */
    make_map(x.data, {64, 64}, {64, 257}, CU_TENSOR_MAP_SWIZZLE_NONE, bad);
    make_map(x.data, {64, 64}, {4, 8}, CU_TENSOR_MAP_SWIZZLE_NONE, bad); /* row of 8 bytes */
    make_map(x.data, {60, 64}, {8, 8}, CU_TENSOR_MAP_SWIZZLE_NONE, bad); /* stride of 120 bytes */
    make_map(x.data + 4, {64, 64}, {8, 8}, CU_TENSOR_MAP_SWIZZLE_NONE, bad);
    make_map(x.data, {64, 0}, {8, 8}, CU_TENSOR_MAP_SWIZZLE_NONE, bad);
}

/* A box comes in and goes to another tensor; `out` shows shared memory as it lay. */
template <int RANK>
static __global__ void box_kernel(const __grid_constant__ CUtensorMap from,
                                  const __grid_constant__ CUtensorMap to, int4 at, int bytes,
                                  unsigned char *out) {
    NSA_SHARED_ALL(box);
    NSA_SHARED(uint64_t, bar, [1]);
    if (threadIdx.x == 0) {
        nsa__mbarrier_init(bar, 1);
        nsa__fence_async();
    }
    __syncthreads();
    int c[RANK];
    const int all[4] = {at.x, at.y, at.z, at.w};
    for (int d = 0; d < RANK; d++) c[d] = all[d];
    if (threadIdx.x == 0) {
        nsa__mbarrier_arrive_expect(bar, bytes);
        nsa__tensor_load(box, &from, c, bar);
    }
    nsa__mbarrier_wait(bar, 0);
    for (int i = static_cast<int>(threadIdx.x); i < bytes; i += 32) out[i] = box[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        nsa__tensor_store(&to, c, box);
        nsa__bulk_commit();
        nsa__bulk_wait<0>();
    }
}

/* Element `k` of the box of `shape`, counted innermost first, as coordinates; and its place in a
   packed tensor of `dims`, or -1 outside. */
static long place_in(const std::vector<long> &dims, const std::vector<long> &at,
                     const std::vector<long> &shape, long k) {
    long place = 0, step = 1;
    for (size_t d = 0; d < dims.size(); d++) {
        const long x = at[d] + k % shape[d];
        k /= shape[d];
        if (x < 0 || x >= dims[d]) return -1;
        place += x * step;
        step *= dims[d];
    }
    return place;
}

template <int RANK>
static void test_box(std::vector<long> dims, std::vector<long> shape, std::vector<long> at,
                     CUtensorMapSwizzle swizzle) {
    size_t count = 1, box = 1;
    for (const long d : dims) count *= size_t(d);
    for (const long d : shape) box *= size_t(d);
    std::vector<uint16_t> in(count);
    for (size_t i = 0; i < count; i++) in[i] = static_cast<uint16_t>(i * 31 + 7);
    const device_array<uint16_t> given(in);
    device_array<uint16_t> back(std::vector<uint16_t>(count, 0)), lain(box);
    const std::vector<cuuint64_t> d(dims.begin(), dims.end());
    const std::vector<cuuint32_t> b(shape.begin(), shape.end());
    at.resize(4);
    EXPECT(NSA_LAUNCH(box_kernel<RANK>, 1, 32, 2 * box, nullptr,
                      make_map(given.data, d, b, swizzle), make_map(back.data, d, b, swizzle),
                      int4{int(at[0]), int(at[1]), int(at[2]), int(at[3])}, int(2 * box),
                      reinterpret_cast<unsigned char *>(lain.data)) == cudaSuccess);
    const std::vector<uint16_t> got = lain.read(), stored = back.read();
    std::vector<uint16_t> want(count, 0);
    const size_t bits = (size_t(1) << swizzle) - 1;
    for (size_t k = 0; k < box; k++) {
        const long place = place_in(dims, at, shape, long(k));
        const size_t byte = 2 * k ^ (2 * k >> 7 & bits) << 4;
        EXPECT_EQUAL(got[byte / 2], place < 0 ? 0 : in[size_t(place)]);
        if (place >= 0) want[size_t(place)] = in[size_t(place)];
    }
    EXPECT(stored == want);
}

static void test_boxes() {
    test_box<2>({64, 40}, {64, 8}, {0, 16}, CU_TENSOR_MAP_SWIZZLE_128B);
    test_box<2>({64, 40}, {64, 16}, {0, 32}, CU_TENSOR_MAP_SWIZZLE_128B); /* rows run out */
    test_box<2>({72, 40}, {64, 16}, {-5, -3}, CU_TENSOR_MAP_SWIZZLE_128B);
    test_box<2>({72, 40}, {32, 16}, {50, 3}, CU_TENSOR_MAP_SWIZZLE_64B);
    test_box<2>({72, 40}, {16, 16}, {61, 3}, CU_TENSOR_MAP_SWIZZLE_32B);
    test_box<2>({72, 40}, {8, 16}, {69, 30}, CU_TENSOR_MAP_SWIZZLE_NONE);
    test_box<3>({64, 3, 20}, {64, 1, 8}, {0, 2, 15}, CU_TENSOR_MAP_SWIZZLE_128B);
    test_box<4>({64, 3, 20, 2}, {64, 2, 4, 1}, {0, 2, 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
}

/* ---- wgmma: registers and operands --------------------------------------------------------- */

/* As in test_fragments.cpp, with three digits of the thread. */
struct layout {
    int thread_stride[3], value_stride[3]; /* shapes (4, 8, 4) and (2, 2, ...) */
    int operator()(int t, int v) const {
        return t % 4 * thread_stride[0] + t / 4 % 8 * thread_stride[1] + t / 32 * thread_stride[2] +
               v % 2 * value_stride[0] + v / 2 % 2 * value_stride[1] + v / 4 * value_stride[2];
    }
};
static const layout c_layout = {{128, 1, 16}, {64, 8, 512}}; /* CLayout_64xN: 64 rows x N columns */
static const layout a_layout = {{128, 1, 16}, {64, 8, 512}}; /* ALayout_64x16: 64 rows x 16 k */

/* Where the PTX manual's canonical layouts put element (m, k) of a 16-bit operand, in bytes: T = 8
   elements of 16 bytes, w = 16-byte chunks of a swizzled row (1: plain). */
static int canonical(bool mn, int w, int leading, int stride, int m, int k) {
    if (mn && w == 1) return m % 8 * 2 + m / 8 * stride + k % 8 * 16 + k / 8 * leading;
    if (mn)
        return m % 8 * 2 + m / 8 % w * 16 + m / (8 * w) * leading + k % 8 * (16 * w) +
               k / 8 * stride;
    if (w == 1) return m % 8 * 16 + m / 8 * stride + k % 8 * 2 + k / 8 * leading;
    return m % 8 * (16 * w) + m / 8 * stride + k * 2;
}

struct operand_case {
    bool mn;
    int w; /* 1, 2, 4, 8 chunks */
    int leading, stride;
};

/* All of its descriptor but the address. */
static uint64_t form_of(const operand_case &o) {
    const uint64_t modes[9] = {0, 0, 3, 0, 2, 0, 0, 0, 1};
    return uint64_t(o.leading / 16) << 16 | uint64_t(o.stride / 16) << 32 | modes[o.w] << 62;
}

/* a and b as shared memory holds them; registers of A or its tile; c in and out by
   [thread][value]. */
template <typename T, int N, int A_MN, int B_MN, bool FROM_REGISTERS>
static __global__ void product_kernel(const T *a, const T *b, const uint32_t *registers, float *c,
                                      uint64_t form_a, uint64_t form_b) {
    NSA_SHARED_ALL(shared);
    const int t = static_cast<int>(threadIdx.x);
    unsigned char *const tile_b = shared + 16384;
    for (int i = t; i < 8192; i += warpgroup) {
        reinterpret_cast<T *>(shared)[i] = a[i];
        reinterpret_cast<T *>(tile_b)[i] = b[i];
    }
    nsa__fence_async();
    __syncthreads();
    float sums[N / 2];
    uint32_t ra[4];
    for (int i = 0; i < N / 2; i++) sums[i] = c[t * (N / 2) + i];
    for (int i = 0; i < 4; i++) ra[i] = registers[4 * t + i];
    const uint64_t da = nsa__wgmma_descriptor(shared, 0, 0, NSA__SWIZZLE_NONE) | form_a;
    const uint64_t db = nsa__wgmma_descriptor(tile_b, 0, 0, NSA__SWIZZLE_NONE) | form_b;
    nsa__wgmma_fence(sums);
    if constexpr (FROM_REGISTERS)
        nsa__wgmma<T, N, B_MN>(sums, ra, db, 1);
    else
        nsa__wgmma<T, N, A_MN, B_MN>(sums, da, db, 1);
    nsa__wgmma_commit();
    nsa__wgmma_wait<0>(sums);
    for (int i = 0; i < N / 2; i++) c[t * (N / 2) + i] = sums[i];
}

static float small_integer(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int>(*state >> 16) % 9 - 4);
}

template <typename T>
static std::vector<T> lay(const std::vector<T> &tile, int rows, operand_case o) {
    std::vector<T> bytes(8192, T(0.0f));
    for (int m = 0; m < rows; m++)
        for (int k = 0; k < 16; k++) {
            int at = canonical(o.mn, o.w, o.leading, o.stride, m, k);
            at ^= (at >> 7 & (o.w - 1)) << 4;
            bytes[size_t(at / 2)] = tile[size_t(m + rows * k)];
        }
    return bytes;
}

template <typename T, int N, int A_MN, int B_MN, bool FROM_REGISTERS>
static void test_product(operand_case oa, operand_case ob) {
    unsigned state = 77;
    std::vector<T> a(64 * 16), b(N * 16);
    for (T &x : a) x = T(small_integer(&state));
    for (T &x : b) x = T(small_integer(&state));
    std::vector<float> c(64 * N), want(64 * N);
    std::vector<uint32_t> registers(4 * warpgroup);
    for (int t = 0; t < warpgroup; t++) {
        for (int v = 0; v < N / 2; v++) {
            const float x = small_integer(&state);
            c[size_t(t * (N / 2) + v)] = want[size_t(c_layout(t, v))] = x;
        }
        for (int v = 0; v < 8; v++)
            registers[size_t(4 * t + v / 2)] |=
                uint32_t(simt::from_bits<uint16_t>(simt::to_bits(a[size_t(a_layout(t, v))])))
                << (16 * (v % 2));
    }
    for (int m = 0; m < 64; m++)
        for (int n = 0; n < N; n++)
            for (int k = 0; k < 16; k++)
                want[size_t(m + 64 * n)] +=
                    float(a[size_t(m + 64 * k)]) * float(b[size_t(n + N * k)]);
    const device_array<T> da(lay(a, 64, oa)), db(lay(b, N, ob));
    const device_array<uint32_t> dr(registers);
    device_array<float> dc(c);
    EXPECT(NSA_LAUNCH((product_kernel<T, N, A_MN, B_MN, FROM_REGISTERS>), 1, warpgroup, 32768,
                      nullptr, da.data, db.data, dr.data, dc.data, form_of(oa),
                      form_of(ob)) == cudaSuccess);
    const std::vector<float> got = dc.read();
    for (int t = 0; t < warpgroup; t++)
        for (int v = 0; v < N / 2; v++)
            EXPECT_EQUAL(got[size_t(t * (N / 2) + v)], want[size_t(c_layout(t, v))]);
}

static void test_products() {
    /* K innermost: distance of 8 rows; plain: of cores along K and along M or N. */
    const operand_case k_major[] = {{false, 8, 16, 1024},
                                    {false, 4, 16, 512},
                                    {false, 2, 16, 256},
                                    {false, 1, 128, 256},
                                    {false, 1, 2048, 128}};
    for (const operand_case &o : k_major) {
        test_product<bf16, 64, 0, 0, false>(o, k_major[0]);
        test_product<bf16, 64, 0, 0, false>(k_major[0], o);
        test_product<bf16, 64, 0, 0, true>(k_major[0], o);
    }
    /* M or N innermost: patterns of 64, 32, 16 along it (`leading` apart), 8 rows along K. */
    const operand_case mn_major[] = {
        {true, 8, 2048, 1024}, {true, 4, 1024, 512}, {true, 2, 512, 256}, {true, 1, 128, 256}};
    for (const operand_case &o : mn_major) {
        test_product<__half, 64, 1, 1, false>(o, mn_major[0]);
        test_product<__half, 64, 0, 1, false>(k_major[0], o);
        test_product<__half, 128, 0, 1, true>(k_major[0], o);
    }
    test_product<bf16, 32, 0, 0, false>(k_major[0], k_major[0]);
    test_product<bf16, 96, 0, 1, false>(k_major[0], mn_major[1]);
    test_product<bf16, 256, 0, 0, false>(k_major[0], k_major[2]);
}

/* ---- A matrix product with a producer warp and two stages ----------------------------------- */

constexpr int stages = 2, tile_k = 64;

/* c (m x n, f32) = a (m x k) b^T (n x k); blocks of 64 x 64; warps 0..3 multiply, warp 4 loads. */
static __global__ void gemm_kernel(const __grid_constant__ CUtensorMap map_a,
                                   const __grid_constant__ CUtensorMap map_b, float *c, int n,
                                   int k) {
    NSA_SHARED_ALL(tiles);
    NSA_SHARED(uint64_t, full, [stages]);
    NSA_SHARED(uint64_t, empty, [stages]);
    const int t = static_cast<int>(threadIdx.x), steps = (k + tile_k - 1) / tile_k;
    const int row = 64 * static_cast<int>(blockIdx.y), column = 64 * static_cast<int>(blockIdx.x);
    if (t == 0) {
        for (int s = 0; s < stages; s++) {
            nsa__mbarrier_init(&full[s], 1);
            nsa__mbarrier_init(&empty[s], 4);
        }
        nsa__fence_async();
    }
    __syncthreads();
    if (t >= warpgroup) {
        if (t > warpgroup) return;
        for (int i = 0; i < steps; i++) {
            const int s = i % stages;
            if (i >= stages) nsa__mbarrier_wait(&empty[s], (i / stages - 1) % 2);
            nsa__mbarrier_arrive_expect(&full[s], 16384);
            nsa__tensor_load(tiles + 16384 * s, &map_a, {i * tile_k, row}, &full[s]);
            nsa__tensor_load(tiles + 16384 * s + 8192, &map_b, {i * tile_k, column}, &full[s]);
        }
        return;
    }
    float sums[32];
    for (float &x : sums) x = 0.0f;
    for (int i = 0; i < steps; i++) {
        const int s = i % stages;
        nsa__mbarrier_wait(&full[s], i / stages % 2);
        nsa__wgmma_fence(sums);
        for (int j = 0; j < tile_k / 16; j++) {
            unsigned char *a = tiles + 16384 * s + 32 * j;
            nsa__wgmma<bf16, 64, 0, 0>(sums, nsa__wgmma_descriptor(a, 16, 1024, NSA__SWIZZLE_128),
                                       nsa__wgmma_descriptor(a + 8192, 16, 1024, NSA__SWIZZLE_128),
                                       i + j > 0);
        }
        nsa__wgmma_commit();
        nsa__wgmma_wait<0>(sums);
        __syncwarp();
        if (t % 32 == 0) nsa__mbarrier_arrive(&empty[s]);
    }
    for (int v = 0; v < 32; v++) {
        const int m = row + t / 32 * 16 + t % 32 / 4 + v / 2 % 2 * 8;
        const int j = column + v / 4 * 8 + t % 4 * 2 + v % 2;
        c[static_cast<int64_t>(m) * n + j] = sums[v];
    }
}

static void test_gemm() {
    const int m = 128, n = 64, k = 200;
    unsigned state = 3;
    std::vector<bf16> a(size_t(m * k)), b(size_t(n * k));
    for (bf16 &x : a) x = bf16(small_integer(&state));
    for (bf16 &x : b) x = bf16(small_integer(&state));
    const device_array<bf16> da(a), db(b);
    device_array<float> dc(size_t(m * n));
    simt::reset_counters();
    EXPECT(NSA_LAUNCH(gemm_kernel, dim3(1, 2), 160, stages * 16384, nullptr,
                      make_map(da.data, {cuuint64_t(k), cuuint64_t(m)}, {tile_k, 64},
                               CU_TENSOR_MAP_SWIZZLE_128B),
                      make_map(db.data, {cuuint64_t(k), cuuint64_t(n)}, {tile_k, 64},
                               CU_TENSOR_MAP_SWIZZLE_128B),
                      dc.data, n, k) == cudaSuccess);
    EXPECT_EQUAL(simt::count().wgmma, 2 * 4 * 4 * 4); /* blocks, warps, steps, products */
    const std::vector<float> c = dc.read();
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float want = 0.0f;
            for (int x = 0; x < k; x++)
                want += float(a[size_t(i * k + x)]) * float(b[size_t(j * k + x)]);
            EXPECT_EQUAL(c[size_t(i * n + j)], want);
        }
}

/* ---- Faults ------------------------------------------------------------------------------- */

/* One load, one reader; `fault` says what is left out or wrong. */
enum fault {
    none,
    no_wait,
    wrong_parity,
    short_count,
    long_count,
    no_expect,
    past_end,
    odd_size,
    twice
};

static __global__ void faulty_load_kernel(const int *in, int *out, int fault) {
    NSA_SHARED(int4, tile, [32]);
    NSA_SHARED(uint64_t, bar, [1]);
    if (threadIdx.x == 0) {
        nsa__mbarrier_init(bar, 1);
        if (fault == twice) nsa__mbarrier_init(bar, 1);
        nsa__fence_async();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const int expected = fault == short_count ? 256 : fault == long_count ? 1024 : 512;
        if (fault == no_expect)
            nsa__mbarrier_arrive(bar);
        else
            nsa__mbarrier_arrive_expect(bar, expected);
        nsa__bulk_load(tile, in + (fault == past_end ? 4 : 0), fault == odd_size ? 500 : 512, bar);
    }
    if (fault != no_wait) nsa__mbarrier_wait(bar, fault == wrong_parity);
    out[threadIdx.x] = tile[threadIdx.x].y;
}

static void test_faulty_loads() {
    const device_array<int> in(std::vector<int>(128, 4));
    device_array<int> out(32);
    const char *checked = simt::checking() ? "" : nullptr;
    const struct {
        int fault;
        const char *words; /* nullptr: only the checker can tell */
    } cases[] = {
        {wrong_parity, checked},
        {no_expect, checked},
        {short_count, "the phase waits for 256"},
        {long_count, "lacks 0 of 1 arrivals and 512 bytes"},
        {past_end, "outside device memory"},
        {odd_size, "must be multiples of 16"},
        {twice, "there is an mbarrier here already"},
        {no_wait, checked},
    };
    for (const auto &c : cases) {
        if (!c.words) continue;
        plant();
        EXPECT(NSA_LAUNCH(faulty_load_kernel, 1, 32, 0, nullptr, in.data, out.data, c.fault) ==
               cudaSuccess);
        EXPECT_REPORT(c.words);
    }
    EXPECT(NSA_LAUNCH(faulty_load_kernel, 1, 32, 0, nullptr, in.data, out.data, int(none)) ==
           cudaSuccess);
    for (const int x : out.read()) EXPECT_EQUAL(x, 4);
}

/* wgmma with steps left out. */
enum wgmma_fault {
    fine,
    no_async_fence,
    no_wgmma_fence,
    no_commit,
    early_use,
    early_write,
    three_warps,
    other_operand,
    unordered_rows
};

static __global__ void faulty_product_kernel(float *out, int fault) {
    NSA_SHARED_ALL(tiles);
    const int t = static_cast<int>(threadIdx.x);
    bf16 *values = reinterpret_cast<bf16 *>(tiles);
    for (int i = t; i < 8192; i += warpgroup) values[i] = __float2bfloat16(1.0f);
    if (fault != no_async_fence) nsa__fence_async();
    __syncthreads();
    if (fault == three_warps && t >= 96) return;
    if (fault == unordered_rows &&
        t >= 96) { /* rows of the last warp, which the group multiplies */
        values[48 * 64 + t - 96] = __float2bfloat16(1.0f);
        nsa__fence_async();
    }
    float c[32];
    for (float &x : c) x = 0.0f;
    const unsigned char *a = tiles + (fault == other_operand && t >= 64 ? 32 : 0);
    if (fault != no_wgmma_fence) nsa__wgmma_fence(c);
    nsa__wgmma<bf16, 64, 0, 0>(c, nsa__wgmma_descriptor(a, 16, 1024, NSA__SWIZZLE_128),
                               nsa__wgmma_descriptor(tiles + 8192, 16, 1024, NSA__SWIZZLE_128), 1);
    if (fault != no_commit) nsa__wgmma_commit();
    if (fault == early_use) out[t] = c[3];
    if (fault == early_write) {
        __syncthreads(); /* does not wait for wgmma */
        values[8 * t] = __float2bfloat16(2.0f);
    }
    nsa__wgmma_wait<0>(c);
    if (fault != early_use) out[t] = c[3];
}

static void test_faulty_products() {
    device_array<float> out(warpgroup);
    const struct {
        int fault;
        const char *words;
        bool checker;
    } cases[] = {
        {no_async_fence, "without a fence.proxy.async", true},
        {no_wgmma_fence, "wgmma without a wgmma.fence", false},
        {no_commit, "belong to a group still under way", false},
        {early_write, "still being read asynchronously", true},
        {three_warps, "warp 3 issued 0", false},
        {other_operand, "has issued another one", false},
        {unordered_rows, "is not ordered with the", true},
    };
    for (const auto &c : cases) {
        if (c.checker && !simt::checking()) continue;
        plant();
        EXPECT(NSA_LAUNCH(faulty_product_kernel, 1, warpgroup, 16384, nullptr, out.data, c.fault) ==
               cudaSuccess);
        EXPECT_REPORT(c.words);
    }
    EXPECT(NSA_LAUNCH(faulty_product_kernel, 1, warpgroup, 16384, nullptr, out.data, int(fine)) ==
           cudaSuccess);
    for (const float x : out.read()) EXPECT_EQUAL(x, 16);
    EXPECT(NSA_LAUNCH(faulty_product_kernel, 1, warpgroup, 16384, nullptr, out.data,
                      int(early_use)) == cudaSuccess);
    for (const float x : out.read()) EXPECT(x != x);
}

int main() {
    test_map_limits();
    for (const simt::order o : {simt::order::in_order, simt::order::reversed, simt::order::random})
        for (const bool early : {false, true}) {
            simt::config().schedule = o;
            simt::config().early = early;
            test_boxes();
            test_gemm();
            test_faulty_loads();
            test_faulty_products();
        }
    test_products();
    return expect_result("test_hopper");
}

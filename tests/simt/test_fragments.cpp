/* test_fragments.cpp: which value of a tile each lane holds in which register.
   The tables are the (thread, value) strides that CUTLASS publishes for these instructions
   (include/cute/atom/mma_traits_sm80.hpp): an index into the tile, column by column. A product
   alone would not do: it comes out right under any consistent permutation.
   Not here: wgmma (test_hopper.cpp). */
#include "expect.h"

#include <cmath>

/* Element of the tile that value v of lane t is: sum of digit times stride, digits taken from t and
   v by the mixed radices given. */
struct layout {
    int thread_shape[2], thread_stride[2];
    int value_shape[3], value_stride[3];
    int operator()(int t, int v) const {
        int at = 0;
        for (int i = 0; i < 2; i++) {
            at += t % thread_shape[i] * thread_stride[i];
            t /= thread_shape[i];
        }
        for (int i = 0; i < 3; i++) {
            at += v % value_shape[i] * value_stride[i];
            v /= value_shape[i];
        }
        return at;
    }
};
static const layout a_layout = {{4, 8}, {32, 1}, {2, 2, 2}, {16, 8, 128}}; /* of 16 rows x 16 k */
static const layout b_layout = {{4, 8}, {16, 1}, {2, 2, 1}, {8, 64, 0}};   /* of 8 columns x 16 k */
static const layout c_layout = {
    {4, 8}, {32, 1}, {2, 2, 1}, {16, 8, 0}}; /* of 16 rows x 8 columns */

/* a, b, c as the registers hold them: [lane][value]. */
template <typename T>
static __global__ void mma_kernel(const T *a, const T *b, const float *c, float *out, int count) {
    const int lane = static_cast<int>(threadIdx.x);
    for (int n = 0; n < count; n++) {
        uint32_t ra[4], rb[2];
        float rc[4];
        for (int r = 0; r < 4; r++) {
            const T *pair = a + 256 * n + 8 * lane + 2 * r;
            ra[r] = nsa__pack<T>(static_cast<float>(pair[0]), static_cast<float>(pair[1]));
            rc[r] = c[128 * n + 4 * lane + r];
        }
        for (int r = 0; r < 2; r++) {
            const T *pair = b + 128 * n + 4 * lane + 2 * r;
            rb[r] = nsa__pack<T>(static_cast<float>(pair[0]), static_cast<float>(pair[1]));
        }
        nsa__mma_m16n8k16<T>(rc, ra, rb[0], rb[1]);
        for (int r = 0; r < 4; r++) out[128 * n + 4 * lane + r] = rc[r];
    }
}

static float small_integer(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int>(*state >> 16) % 17 - 8);
}

/* Small integers: every sum is exact, so the tile product compares by ==. */
template <typename T> static void test_mma() {
    const int count = 20;
    std::vector<T> a(256 * count), b(128 * count);
    std::vector<float> c(128 * count);
    unsigned state = 5;
    for (T &x : a) x = T(small_integer(&state));
    for (T &x : b) x = T(small_integer(&state));
    for (float &x : c) x = 64.0f * small_integer(&state);
    const device_array<T> da(a), db(b);
    const device_array<float> dc(c);
    device_array<float> out(c.size());
    EXPECT(NSA_LAUNCH(mma_kernel<T>, 1, 32, 0, nullptr, da.data, db.data, dc.data, out.data,
                      count) == cudaSuccess);
    const std::vector<float> got = out.read();
    for (int n = 0; n < count; n++) {
        float ta[16 * 16], tb[8 * 16], tc[16 * 8];
        for (int t = 0; t < 32; t++) {
            for (int v = 0; v < 8; v++) ta[a_layout(t, v)] = float(a[size_t(256 * n + 8 * t + v)]);
            for (int v = 0; v < 4; v++) tb[b_layout(t, v)] = float(b[size_t(128 * n + 4 * t + v)]);
            for (int v = 0; v < 4; v++) tc[c_layout(t, v)] = c[size_t(128 * n + 4 * t + v)];
        }
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < 8; column++)
                for (int k = 0; k < 16; k++)
                    tc[row + 16 * column] += ta[row + 16 * k] * tb[column + 8 * k];
        for (int t = 0; t < 32; t++)
            for (int v = 0; v < 4; v++)
                EXPECT_EQUAL(got[size_t(128 * n + 4 * t + v)], tc[c_layout(t, v)]);
    }
}

/* Row r of matrix m lies at 16-byte slot order[8 m + r]; word (row, column) holds its own
   number. */
static __global__ void ldmatrix_kernel(uint32_t *out, int transposed) {
    NSA_SHARED(uint16_t, words, [64][8]);
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < 512; i += 32) words[i / 8][i % 8] = static_cast<uint16_t>(i);
    __syncthreads();
    uint32_t r[4];
    if (transposed)
        nsa__ldmatrix_x4_trans(r, words[(lane * 5 + 3) % 64]);
    else
        nsa__ldmatrix_x4(r, words[(lane * 5 + 3) % 64]);
    for (int m = 0; m < 4; m++) out[4 * lane + m] = r[m];
}

static void test_ldmatrix() {
    for (int transposed = 0; transposed < 2; transposed++) {
        device_array<uint32_t> out(128);
        EXPECT(NSA_LAUNCH(ldmatrix_kernel, 1, 32, 0, nullptr, out.data, transposed) == cudaSuccess);
        const std::vector<uint32_t> got = out.read();
        /* PTX manual, ldmatrix: thread t holds elements 2 (t % 4) and the next of row t / 4. */
        for (int t = 0; t < 32; t++)
            for (int m = 0; m < 4; m++)
                for (int h = 0; h < 2; h++) {
                    const int major = t / 4, minor = 2 * (t % 4) + h;
                    const int row = transposed ? minor : major, column = transposed ? major : minor;
                    const int slot = ((8 * m + row) * 5 + 3) % 64;
                    EXPECT_EQUAL(got[size_t(4 * t + m)] >> (16 * h) & 0xffffu, 8 * slot + column);
                }
    }
}

/* Rows of 64 halves: packed, they all start in one bank; with the 16-byte chunk xor-ed by the row,
   or with 8 halves of padding, no two of a phase meet. */
static __global__ void conflict_kernel(int pitch, int swizzle) {
    NSA_SHARED(uint16_t, tile, [16 * 72]);
    const int lane = static_cast<int>(threadIdx.x), row = lane % 16;
    for (int i = lane; i < 16 * 72; i += 32) tile[i] = 0;
    __syncthreads();
    for (int k = 0; k < 8; k += 2) {
        const int chunk = k + lane / 16;
        uint32_t r[4];
        nsa__ldmatrix_x4(r, tile + row * pitch + 8 * (swizzle ? chunk ^ (row % 8) : chunk));
    }
}

static void test_conflicts() {
    const struct {
        int pitch, swizzle;
        double cycles;
    } cases[] = {{64, 0, 8}, {64, 1, 1}, {72, 0, 1}, {0, 0, 1}};
    for (const auto &c : cases) {
        simt::reset_counters();
        EXPECT(NSA_LAUNCH(conflict_kernel, 1, 32, 0, nullptr, c.pitch, c.swizzle) == cudaSuccess);
        const simt::counters &n = simt::count();
        EXPECT_EQUAL(n.ldmatrix, 4);
        EXPECT_EQUAL(n.ldmatrix_phases, 16);
        EXPECT_EQUAL(n.ldmatrix_cycles, 16 * c.cycles);
    }
}

/* The conversions at their edges, through a product with one. */
template <typename T> static void test_values() {
    const float values[] = {1.0f, -0.0f, 65504.0f, 6.0e-8f, -6.1e-5f, 3.0e-5f, INFINITY, 0.333f};
    std::vector<T> a(256, T(0.0f)), b(128, T(0.0f));
    for (int t = 0; t < 32; t++)
        for (int v = 0; v < 8; v++)
            if (a_layout(t, v) / 16 == 0) a[size_t(8 * t + v)] = T(values[a_layout(t, v) % 8]);
    for (int t = 0; t < 32; t++)
        for (int v = 0; v < 4; v++)
            if (b_layout(t, v) == 0) b[size_t(4 * t + v)] = T(1.0f);
    const device_array<T> da(a), db(b);
    const device_array<float> dc(std::vector<float>(128, 0.0f));
    device_array<float> out(128);
    EXPECT(NSA_LAUNCH(mma_kernel<T>, 1, 32, 0, nullptr, da.data, db.data, dc.data, out.data, 1) ==
           cudaSuccess);
    const std::vector<float> got = out.read();
    for (int t = 0; t < 32; t++)
        for (int v = 0; v < 4; v++)
            if (c_layout(t, v) < 16) {
                const float want = float(T(values[c_layout(t, v) % 8]));
                EXPECT_EQUAL(got[size_t(4 * t + v)], want);
            }
}

static __global__ void approximations_kernel(const float *x, float *ex2, float *lg2) {
    ex2[threadIdx.x] = nsa__ex2(x[threadIdx.x]);
    lg2[threadIdx.x] = nsa__log2(x[threadIdx.x]);
}

/* NSA_SIMT_ROUNDING=device: sums lose what lies 24 bits below their largest term, which exact ones
   do not feel; ex2 and lg2 err, but by no more than the PTX manual allows. */
static void test_coarse() {
    std::vector<__nv_bfloat16> a(256, __nv_bfloat16(0.0f)), b(128, __nv_bfloat16(0.0f));
    a[0] = __nv_bfloat16(1.5f), b[0] = __nv_bfloat16(0.5f);
    const device_array<__nv_bfloat16> da(a), db(b);
    const device_array<float> dc(std::vector<float>(128, 8388608.0f));
    device_array<float> sum(128), ex2(64), lg2(64);
    std::vector<float> x(64);
    for (size_t i = 0; i < 64; i++) x[i] = 1.0f + 0.37f * static_cast<float>(i);
    const device_array<float> dx(x);
    int off = 0, beyond = 0;
    for (int coarse = 0; coarse < 2; coarse++) {
        simt::config().coarse = coarse != 0;
        EXPECT(NSA_LAUNCH(mma_kernel<__nv_bfloat16>, 1, 32, 0, nullptr, da.data, db.data, dc.data,
                          sum.data, 1) == cudaSuccess);
        EXPECT_EQUAL(sum.read()[0], coarse ? 8388608.0f : 8388609.0f);
        test_mma<__nv_bfloat16>();
    }
    EXPECT(NSA_LAUNCH(approximations_kernel, 1, 64, 0, nullptr, dx.data, ex2.data, lg2.data) ==
           cudaSuccess);
    for (size_t i = 0; i < 64; i++) {
        const double error = fabs(double(ex2.read()[i]) / exp2(double(x[i])) - 1),
                     error2 = fabs(double(lg2.read()[i]) - log2(double(x[i])));
        off += (error > 0x1p-24) + (error2 > 0x1p-24 * fmax(1, log2(double(x[i]))));
        beyond += error > 0x1.8p-22 || error2 > 0x1.8p-22 * fmax(1, log2(double(x[i])));
    }
    simt::config().coarse = false;
    EXPECT(off > 32);
    EXPECT_EQUAL(beyond, 0);
}

int main() {
    test_mma<__nv_bfloat16>();
    test_mma<__half>();
    test_values<__nv_bfloat16>();
    test_values<__half>();
    test_ldmatrix();
    test_conflicts();
    test_coarse();
    return expect_result("test_fragments");
}

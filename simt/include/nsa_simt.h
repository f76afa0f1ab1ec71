/* nsa_simt.h: the CUDA language as kernels see it when a plain C++17 compiler reads them.
   Twin: what nvcc builds in (thread indices, intrinsics, atomics, launch). common.cuh includes it
   under NSA_SIMT; tests include simt.h for the executor's settings and reports.
   Not here: how any of it works; everything with a body worth reading is in src/. */
#ifndef NSA_SIMT_H
#define NSA_SIMT_H

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include <cuda.h>
#include <cuda_runtime_api.h>

/* The checker does not see `*p = f()` where f returns a struct: the compiler has no call for the
   store that a call does. So there everything is inlined: the conversions of CUDA's headers, and
   below each __device__ function. */
#ifdef __SANITIZE_THREAD__
#define unused unused, always_inline /* how those headers mark their functions */
#define __inline__ inline __attribute__((always_inline))
#endif
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#ifdef __SANITIZE_THREAD__
#undef unused
#undef __inline__
#undef __device__
#define __device__ __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wattributes" /* it asks for `inline` beside the attribute */
#endif

/* The toolkit's headers make __shared__ an empty word outside nvcc: each thread would get its own
   copy, silently. */
#undef __shared__
#define __shared__ NSA_SHARED_is_how_shared_memory_is_declared
#define __launch_bounds__(...)

/* ---- Where a thread is -------------------------------------------------------------------- */

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace simt {

struct site {
    const char *file;
    int line;
};

/* ---- Launch and shared memory ------------------------------------------------------------- */

struct launch_request {
    site at;
    const char *text; /* the macro's arguments; the kernel's name is what stands before a comma */
    const void *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    void (*call)(const void *params);
    const void *params;
    size_t params_bytes;
};
cudaError_t launch_checked(const launch_request &request);

template <typename... Params> struct launcher {
    void (*kernel)(Params...);
    std::tuple<std::decay_t<Params>...> values;
    static void call(const void *self) {
        const launcher &l = *static_cast<const launcher *>(self);
        std::apply(l.kernel, l.values);
    }
};

template <typename... Params, typename... Args>
cudaError_t launch(site at, const char *text, void (*kernel)(Params...), dim3 grid, dim3 block,
                   size_t shared_bytes, cudaStream_t stream, Args &&...args) {
    static_assert(sizeof...(Params) == sizeof...(Args), "NSA_LAUNCH: wrong number of arguments");
    static_assert((std::is_trivially_copyable_v<std::decay_t<Params>> && ...),
                  "NSA_LAUNCH: a kernel's parameters are copied as bytes");
    const launcher<Params...> l{kernel, {std::forward<Args>(args)...}};
    return launch_checked({at, text, reinterpret_cast<const void *>(kernel), grid, block,
                           shared_bytes, stream, &launcher<Params...>::call, &l, sizeof l});
}

/* A launch has to know the kernel's static bytes before anything runs. So each array has a type of
   the kernel's own, whose name holds the kernel's, and which is noted before main. Dynamic memory
   is noted as an array of no bytes, for its alignment. */
bool declare_shared(const char *type_name, size_t bytes, size_t align);
template <typename Array> struct declared_array { static const bool declared; };
template <typename Array>
const bool declared_array<Array>::declared = declare_shared(typeid(Array).name(), Array::bytes,
                                                            Array::align);

void *shared_static(const char *type_name, const char *name, size_t bytes, size_t align, site at);
unsigned char *shared_dynamic();
template <typename Array> void *shared_static(const char *name, site at) {
    static_cast<void>(&declared_array<Array>::declared);
    return shared_static(typeid(Array).name(), name, Array::bytes, Array::align, at);
}
template <typename Array> unsigned char *shared_dynamic() {
    static_cast<void>(&declared_array<Array>::declared);
    return shared_dynamic();
}

/* ---- Barriers and warp operations --------------------------------------------------------- */

enum class vote { ballot, any, all, count, bit_and, bit_or, match_any, match_all };
enum class move { index, up, down, exclusive };
enum class reduce { add, min, max, bit_and, bit_or, bit_xor };

int barrier_all(vote kind, int value, const char *name, site at);
void barrier_sync(int id, int threads, site at);
void barrier_arrive(int id, int threads, site at);
void syncwarp(unsigned mask, site at);
unsigned activemask(site at);
unsigned warp_vote(vote kind, unsigned mask, uint64_t value, int *all_same, const char *name,
                   site at);
uint64_t warp_move(move kind, unsigned mask, uint64_t value, int lane, int width, const char *name,
                   site at);
uint64_t warp_reduce(reduce kind, unsigned mask, int64_t value, const char *name, site at);
void fence(int scope, site at);
void pause(site at);
[[noreturn]] void trap(const char *text, site at);

template <typename T> uint64_t to_bits(T v) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "not a register value");
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    return bits;
}
template <typename T> T from_bits(uint64_t bits) {
    T v;
    memcpy(static_cast<void *>(&v), &bits, sizeof v);
    return v;
}

/* ---- Memory ------------------------------------------------------------------------------- */

void read_only(const void *address, size_t bytes, site at); /* announces such a load */

/* An atomic is an indivisible read and a write; no thread is scheduled between the two. */
void atomic_read(const void *address, void *old, size_t bytes, site at);
void atomic_write(void *address, const void *value, size_t bytes, site at);

template <typename T, typename F> T atomic(T *address, F next, site at) {
    T old, value;
    atomic_read(address, &old, sizeof(T), at);
    value = next(old);
    atomic_write(address, &value, sizeof(T), at);
    return old;
}

/* ---- What the PTX wrappers of common.cuh call --------------------------------------------- */

void exp2_approx(float *y, float x, site at);
void log2_approx(float *y, float x, site at);
void pack_bf16(uint32_t *r, float low, float high, site at);
void pack_f16(uint32_t *r, float low, float high, site at);
void mma_m16n8k16_bf16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1, site at);
void mma_m16n8k16_f16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1, site at);
void ldmatrix_x4(uint32_t *r, const void *row, bool transposed, site at);
void cp_async(void *shared, const void *global, int bytes, int valid, site at);
void cp_async_commit(site at);
void cp_async_wait(int pending, site at);
uint32_t shared_offset(const void *shared); /* within the block's shared memory, as PTX has it */
void mbarrier_init(uint64_t *bar, int arrivals, site at);
void mbarrier_arrive(uint64_t *bar, int expect_bytes, site at);
void mbarrier_wait(uint64_t *bar, int parity, site at);
void fence_async(site at);
void bulk_load(void *shared, const void *global, int bytes, uint64_t *bar, site at);
void tensor_load(void *shared, const CUtensorMap *map, const int *coordinates, int rank,
                 uint64_t *bar, site at);
void tensor_store(const CUtensorMap *map, const int *coordinates, int rank, const void *shared,
                  site at);
void bulk_commit(site at);
void bulk_wait(int pending, site at);
void wgmma_fence(const float *c, site at);
void wgmma_commit(site at);
void wgmma_wait(int pending, const float *c, site at);
struct wgmma_request {
    float *c;
    int n;
    bool half; /* else bf16 */
    int a_mn, b_mn, accumulate;
    const uint32_t *a_registers; /* or nullptr, and a_tile */
    uint64_t a_tile, b_tile;
    site at;
};
void wgmma(const wgmma_request &request);
void registers(int count, site at);

} // namespace simt

/* ---- CUDA's intrinsics -------------------------------------------------------------------- */

#define SIMT_AT const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SIMT_HERE  \
    simt::site {   \
        file, line \
    }

inline void __syncthreads(SIMT_AT) {
    simt::barrier_all(simt::vote::count, 0, "__syncthreads", SIMT_HERE);
}
inline int __syncthreads_count(int p, SIMT_AT) {
    return simt::barrier_all(simt::vote::count, p, "__syncthreads_count", SIMT_HERE);
}
inline int __syncthreads_and(int p, SIMT_AT) {
    return simt::barrier_all(simt::vote::bit_and, p, "__syncthreads_and", SIMT_HERE);
}
inline int __syncthreads_or(int p, SIMT_AT) {
    return simt::barrier_all(simt::vote::bit_or, p, "__syncthreads_or", SIMT_HERE);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_AT) {
    simt::syncwarp(mask, SIMT_HERE);
}
inline unsigned __activemask(SIMT_AT) {
    return simt::activemask(SIMT_HERE);
}
inline unsigned __ballot_sync(unsigned mask, int p, SIMT_AT) {
    return simt::warp_vote(simt::vote::ballot, mask, p != 0, nullptr, "__ballot_sync", SIMT_HERE);
}
inline int __any_sync(unsigned mask, int p, SIMT_AT) {
    return simt::warp_vote(simt::vote::any, mask, p != 0, nullptr, "__any_sync", SIMT_HERE) != 0;
}
inline int __all_sync(unsigned mask, int p, SIMT_AT) {
    return simt::warp_vote(simt::vote::all, mask, p != 0, nullptr, "__all_sync", SIMT_HERE) != 0;
}
template <typename T> unsigned __match_any_sync(unsigned mask, T v, SIMT_AT) {
    return simt::warp_vote(simt::vote::match_any, mask, simt::to_bits(v), nullptr,
                           "__match_any_sync", SIMT_HERE);
}
template <typename T> unsigned __match_all_sync(unsigned mask, T v, int *all_same, SIMT_AT) {
    return simt::warp_vote(simt::vote::match_all, mask, simt::to_bits(v), all_same,
                           "__match_all_sync", SIMT_HERE);
}

#define SIMT_SHUFFLE(name, kind, type)                                                      \
    template <typename T> T name(unsigned mask, T v, type lane, int width = 32, SIMT_AT) {  \
        static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8,                   \
                      #name ": 2, 4, 8 bytes");                                             \
        return simt::from_bits<T>(simt::warp_move(simt::move::kind, mask, simt::to_bits(v), \
                                                  static_cast<int>(lane), width, #name,     \
                                                  SIMT_HERE));                              \
    }
SIMT_SHUFFLE(__shfl_sync, index, int)
SIMT_SHUFFLE(__shfl_up_sync, up, unsigned)
SIMT_SHUFFLE(__shfl_down_sync, down, unsigned)
SIMT_SHUFFLE(__shfl_xor_sync, exclusive, int)
#undef SIMT_SHUFFLE

#define SIMT_REDUCE(name, kind, type)                                          \
    inline type name(unsigned mask, type v, SIMT_AT) {                         \
        return static_cast<type>(                                              \
            simt::warp_reduce(simt::reduce::kind, mask, v, #name, SIMT_HERE)); \
    }
SIMT_REDUCE(__reduce_add_sync, add, unsigned)
SIMT_REDUCE(__reduce_add_sync, add, int)
SIMT_REDUCE(__reduce_min_sync, min, unsigned)
SIMT_REDUCE(__reduce_min_sync, min, int)
SIMT_REDUCE(__reduce_max_sync, max, unsigned)
SIMT_REDUCE(__reduce_max_sync, max, int)
SIMT_REDUCE(__reduce_and_sync, bit_and, unsigned)
SIMT_REDUCE(__reduce_or_sync, bit_or, unsigned)
SIMT_REDUCE(__reduce_xor_sync, bit_xor, unsigned)
#undef SIMT_REDUCE

inline void __threadfence_block(SIMT_AT) {
    simt::fence(0, SIMT_HERE);
}
inline void __threadfence(SIMT_AT) {
    simt::fence(1, SIMT_HERE);
}
inline void __threadfence_system(SIMT_AT) {
    simt::fence(2, SIMT_HERE);
}
inline void __nanosleep(unsigned, SIMT_AT) {
    simt::pause(SIMT_HERE);
}
[[noreturn]] inline void __trap(SIMT_AT) {
    simt::trap("__trap", SIMT_HERE);
}

#define SIMT_ATOMIC(name, expression)                                            \
    template <typename T> T name(T *address, std::common_type_t<T> v, SIMT_AT) { \
        return simt::atomic(                                                     \
            address, [&](T old) -> T { return expression; }, SIMT_HERE);         \
    }
SIMT_ATOMIC(atomicAdd, static_cast<T>(old + v))
SIMT_ATOMIC(atomicSub, static_cast<T>(old - v))
SIMT_ATOMIC(atomicMin, v < old ? v : old)
SIMT_ATOMIC(atomicMax, old < v ? v : old)
SIMT_ATOMIC(atomicExch, (static_cast<void>(old), v))
SIMT_ATOMIC(atomicAnd, static_cast<T>(old &v))
SIMT_ATOMIC(atomicOr, static_cast<T>(old | v))
SIMT_ATOMIC(atomicXor, static_cast<T>(old ^ v))
SIMT_ATOMIC(atomicInc, old >= v ? T(0) : static_cast<T>(old + 1))
SIMT_ATOMIC(atomicDec, old == T(0) || old > v ? v : static_cast<T>(old - 1))
#undef SIMT_ATOMIC
template <typename T>
T atomicCAS(T *address, std::common_type_t<T> compare, std::common_type_t<T> v, SIMT_AT) {
    return simt::atomic(
        address, [&](T old) -> T { return old == compare ? v : old; }, SIMT_HERE);
}

/* Loads and stores with cache hints are loads and stores; inlined, so that they count as the
   kernel's own. __ldg may read what an earlier launch wrote, never what this one does. */
#define SIMT_INLINE inline __attribute__((always_inline))
template <typename T> SIMT_INLINE T __ldg(const T *address, SIMT_AT) {
    simt::read_only(address, sizeof(T), SIMT_HERE);
    return *address;
}
#define SIMT_LOAD(name)                                          \
    template <typename T> SIMT_INLINE T name(const T *address) { \
        return *address;                                         \
    }
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldlu)
SIMT_LOAD(__ldcv)
#undef SIMT_LOAD
#define SIMT_STORE(name)                                                               \
    template <typename T> SIMT_INLINE void name(T *address, std::common_type_t<T> v) { \
        *address = v;                                                                  \
    }
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
SIMT_STORE(__stwb)
SIMT_STORE(__stwt)
#undef SIMT_STORE
#undef SIMT_INLINE

inline size_t __cvta_generic_to_shared(const void *p) {
    return reinterpret_cast<size_t>(p);
}
inline size_t __cvta_generic_to_global(const void *p) {
    return reinterpret_cast<size_t>(p);
}

inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}
inline int __clz(int x) {
    return x ? __builtin_clz(static_cast<unsigned>(x)) : 32;
}
inline int __clzll(long long x) {
    return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= ((x >> i) & 1u) << (31 - i);
    return r;
}
inline int __mulhi(int a, int b) {
    return static_cast<int>((int64_t(a) * b) >> 32);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((uint64_t(a) * b) >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    const uint64_t bytes = a | uint64_t(b) << 32;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned pick = s >> (4 * i) & 15u;
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7u))) & 255u;
        if (pick & 8u) byte = byte & 128u ? 255u : 0u;
        r |= byte << (8 * i);
    }
    return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(((uint64_t(high) << 32 | low) << (shift & 31u)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((uint64_t(high) << 32 | low) >> (shift & 31u));
}

inline float __uint_as_float(unsigned x) {
    return simt::from_bits<float>(x);
}
inline float __int_as_float(int x) {
    return simt::from_bits<float>(simt::to_bits(x));
}
inline unsigned __float_as_uint(float x) {
    return simt::from_bits<unsigned>(simt::to_bits(x));
}
inline int __float_as_int(float x) {
    return simt::from_bits<int>(simt::to_bits(x));
}
inline long long __double_as_longlong(double x) {
    return simt::from_bits<long long>(simt::to_bits(x));
}
inline double __longlong_as_double(long long x) {
    return simt::from_bits<double>(simt::to_bits(x));
}

inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __frcp_rn(float a) {
    return 1.0f / a;
}
inline float __fsqrt_rn(float a) {
    return sqrtf(a);
}
inline float __frsqrt_rn(float a) {
    return static_cast<float>(1.0 / std::sqrt(double(a)));
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float __saturatef(float a) {
    return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f;
}
inline float rsqrtf(float a) {
    return static_cast<float>(1.0 / std::sqrt(double(a)));
}
inline void sincospif(float a, float *s, float *c) {
    *s = static_cast<float>(std::sin(3.14159265358979324 * double(a)));
    *c = static_cast<float>(std::cos(3.14159265358979324 * double(a)));
}
inline float exp10f(float a) {
    return static_cast<float>(std::pow(10.0, double(a)));
}
inline int __float2int_rn(float a) {
    return static_cast<int>(nearbyintf(a));
}
inline int __float2int_rd(float a) {
    return static_cast<int>(floorf(a));
}
inline int __float2int_ru(float a) {
    return static_cast<int>(ceilf(a));
}
inline int __float2int_rz(float a) {
    return static_cast<int>(a);
}
inline float __int2float_rn(int a) {
    return static_cast<float>(a);
}
inline float __uint2float_rn(unsigned a) {
    return static_cast<float>(a);
}

/* glibc declares functions of these names. */
#define __expf(x)    expf(x)
#define __exp10f(x)  exp10f(x)
#define __logf(x)    logf(x)
#define __log2f(x)   log2f(x)
#define __log10f(x)  log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x)    sinf(x)
#define __cosf(x)    cosf(x)

/* CUDA's min and max take two of a kind, or mixed ones by the usual conversions. */
template <typename A, typename B>
constexpr std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value,
                           std::common_type_t<A, B>>
min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
constexpr std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value,
                           std::common_type_t<A, B>>
max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

#undef SIMT_AT
#undef SIMT_HERE

/* ---- The runtime's C++ side: typed forms of its C functions ------------------------------- */

template <typename T> cudaError_t cudaMalloc(T **pointer, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void **>(pointer), bytes);
}
template <typename T> cudaError_t cudaMallocAsync(T **pointer, size_t bytes, cudaStream_t stream) {
    return cudaMallocAsync(reinterpret_cast<void **>(pointer), bytes, stream);
}
template <typename T> cudaError_t cudaMallocHost(T **pointer, size_t bytes, unsigned flags = 0) {
    return cudaHostAlloc(reinterpret_cast<void **>(pointer), bytes, flags);
}
template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute,
                                 int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}
template <typename... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void (*kernel)(Params...)) {
    return cudaFuncGetAttributes(attributes, reinterpret_cast<const void *>(kernel));
}
template <typename... Params>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void (*kernel)(Params...),
                                                          int threads, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks, reinterpret_cast<const void *>(kernel), threads, shared_bytes);
}

#endif

/* common.cuh: the one place where kernels meet the compiler: launch, shared memory, PTX.
   Twin: none; every kernels/X.cuh includes this file and no other CUDA header, and holds no asm.
   Not here: anything about attention. A wrapper is one instruction, under its PTX name.

   Two readers: nvcc (sm_80 and up), and a plain C++17 compiler with -DNSA_SIMT, whose include
   path then supplies nsa_simt.h: CUDA's thread indices, intrinsics and an executor on the CPU.
   There each call carries the place it stands at, so that a report names the kernel's own line. */
#ifndef NSA_COMMON_CUH
#define NSA_COMMON_CUH

#include <stddef.h>
#include <stdint.h>

#include <atomic>

/* Dynamic shared memory begins at a multiple of it: the pattern of a swizzle repeats there. */
enum { NSA__SHARED_ALIGN = 1024 };

/* While a host thread loads kernels (nsa_cuda_load), its launches load the kernel and do nothing
   else. */
static thread_local bool nsa__loading = false;

#ifdef NSA_SIMT

#include "nsa_simt.h"

/* Last parameters of every wrapper, and how it passes them on. */
#define NSA__AT                  , const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NSA__AT_ONLY             const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NSA__HERE                (::simt::site{file, line})
#define NSA__PTX(host, ...)      (::simt::host)
#define NSA__PTX_PURE(host, ...) (::simt::host)

/* Shared memory. NSA_SHARED(float, scores, [4][64]) declares a static array; raw __shared__ does
   not compile. NSA_SHARED_ALL(smem) names the launch's dynamic bytes. */
#define NSA_SHARED(type, name, ...)                                                            \
    typedef type nsa__type_##name __VA_ARGS__;                                                 \
    struct nsa__array_##name {                                                                 \
        enum : size_t { bytes = sizeof(nsa__type_##name), align = alignof(nsa__type_##name) }; \
    };                                                                                         \
    nsa__type_##name &name = *static_cast<nsa__type_##name *>(                                 \
        ::simt::shared_static<nsa__array_##name>(#name, ::simt::site{__FILE__, __LINE__}))
#define NSA_SHARED_ALL(name)                                    \
    struct nsa__array_##name {                                  \
        enum : size_t { bytes = 0, align = NSA__SHARED_ALIGN }; \
    };                                                          \
    unsigned char *name = ::simt::shared_dynamic<nsa__array_##name>()
#define NSA_GRID_CONSTANT

/* NSA_LAUNCH(kernel<T, 64>, grid, block, shared_bytes, stream, arguments...) -> cudaError_t */
#define NSA_LAUNCH(...)  nsa__launch(::simt::site{__FILE__, __LINE__}, #__VA_ARGS__, __VA_ARGS__)
#define NSA__LAUNCHED_AT ::simt::site at, const char *text,

#else

#if defined(__cplusplus) && __cplusplus < 201703L && !(defined(_MSVC_LANG) && _MSVC_LANG >= 201703L)
#error "nsa kernels are C++17, nvcc's default: leave -std=c++14 out"
#endif

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "nsa kernels need compute capability 8.0 or later: name one, for instance nvcc -arch=sm_80"
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL) && \
    !defined(NSA_CUDA_QUIET)
#pragma message("nsa: plain sm_90 has no wgmma, so attention is slower on H100 and H200: name " \
                "sm_90a; NSA_CUDA_QUIET turns this message off")
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && __CUDACC_VER_MAJOR__ == 12 && \
    __CUDACC_VER_MINOR__ < 6 && !defined(NSA_CUDA_QUIET)
#pragma message("nsa: ptxas of CUDA 12.5 waits for each wgmma (C7518), so attention is slower: " \
                "take 12.6 or later; NSA_CUDA_QUIET turns this message off")
#endif

#define NSA__AT
#define NSA__AT_ONLY
/* NSA__PTX(executor call, asm): what touches memory or order. NSA__PTX_PURE: values in, values out,
   so the compiler may move it or drop it. */
#define NSA__PTX(host, ...)      asm volatile(__VA_ARGS__)
#define NSA__PTX_PURE(host, ...) asm(__VA_ARGS__)

#define NSA_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#define NSA_SHARED_ALL(name)        unsigned char *name = nsa__shared_all
/* A kernel's parameter that is read where it lies, not copied, even by an index. */
#define NSA_GRID_CONSTANT           __grid_constant__
extern __shared__ unsigned char __align__(NSA__SHARED_ALIGN) nsa__shared_all[];

#define NSA_LAUNCH(...) nsa__launch(__VA_ARGS__)
#define NSA__LAUNCHED_AT

#endif

/* ---- Launch ------------------------------------------------------------------------------- */

/* On which devices a kernel has asked for leave: bit d for device d. NULL if the table is full.
   Slots are found by the kernel's address and never freed. */
struct nsa__shared_slot {
    std::atomic<const void *> kernel;
    std::atomic<uint64_t> devices;
};
static inline std::atomic<uint64_t> *nsa__shared_devices(const void *kernel) {
    enum { SLOTS = 512 };
    static nsa__shared_slot slots[SLOTS];
    size_t at = reinterpret_cast<uintptr_t>(kernel) / 16 % SLOTS;
    for (int i = 0; i < SLOTS; i++, at = (at + 1) % SLOTS) {
        const void *owner = NULL;
        if (slots[at].kernel.compare_exchange_strong(owner, kernel) || owner == kernel)
            return &slots[at].devices;
    }
    return NULL;
}

/* Dynamic and static shared bytes together may be 48 KB; for more a kernel needs leave, on each
   device once. It asks for all that the device has beside its static bytes: then launches that
   differ in size ask for the same, and no host thread takes back what another has asked for.
   Asking costs microseconds and loads the kernel, so a second launch does not ask again. */
static inline cudaError_t nsa__allow_shared(const void *kernel) {
    int device = 0, most = 0;
    cudaFuncAttributes has;
    cudaError_t e = cudaGetDevice(&device);
    if (e != cudaSuccess) return e;
    std::atomic<uint64_t> *devices = device < 64 ? nsa__shared_devices(kernel) : NULL;
    const uint64_t bit = uint64_t(1) << device % 64;
    if (devices && devices->load() & bit) return cudaSuccess;
    e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e != cudaSuccess) return e;
    e = cudaFuncGetAttributes(&has, kernel);
    if (e != cudaSuccess) return e;
    /* up to where dynamic bytes begin, whether or not sharedSizeBytes counts as far */
    const int before = (static_cast<int>(has.sharedSizeBytes) + NSA__SHARED_ALIGN - 1) /
                       NSA__SHARED_ALIGN * NSA__SHARED_ALIGN;
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - before);
    if (e == cudaSuccess && devices) devices->fetch_or(bit);
    return e;
}

/* The bytes of a kernel's parameters, each at a multiple of its alignment. */
template <typename... Params> constexpr size_t nsa__parameter_bytes() {
    size_t bytes = 0;
    ((bytes = (bytes + alignof(Params) - 1) / alignof(Params) * alignof(Params) + sizeof(Params)),
     ...);
    return bytes;
}

template <typename... Params, typename... Args>
static inline cudaError_t nsa__launch(NSA__LAUNCHED_AT void (*kernel)(Params...), dim3 grid,
                                      dim3 block, size_t shared_bytes, cudaStream_t stream,
                                      Args &&...args) {
    static_assert(nsa__parameter_bytes<Params...>() <= 4096,
                  "drivers before CUDA 12.1 take no more");
    const void *const address = reinterpret_cast<const void *>(kernel);
    if (grid.x == 0) return cudaSuccess; /* nothing to do, which the runtime calls an error */
    if (shared_bytes > 0) {
        const cudaError_t e = nsa__allow_shared(address);
        if (e != cudaSuccess) return e;
    }
    if (nsa__loading) {
        cudaFuncAttributes loaded;
        return cudaFuncGetAttributes(&loaded, address);
    }
#ifdef NSA_SIMT
    return ::simt::launch(at, text, kernel, grid, block, shared_bytes, stream,
                          static_cast<Args &&>(args)...);
#else
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Args &&>(args)...);
#endif
}

/* Bytes of device memory, set on the stream. */
static inline cudaError_t nsa__memset(void *to, int value, size_t bytes, cudaStream_t stream) {
    return nsa__loading ? cudaSuccess : cudaMemsetAsync(to, value, bytes, stream);
}

#define NSA__DEVICE static __device__ __forceinline__

/* The address of shared memory as PTX wants it. */
#ifdef NSA_SIMT
#define NSA__SHARED(pointer) (::simt::shared_offset(pointer))
#else
#define NSA__SHARED(pointer) static_cast<uint32_t>(__cvta_generic_to_shared(pointer))
#endif

/* ---- Arithmetic --------------------------------------------------------------------------- */

/* 2^x to about 2 ulp; subnormal results are 0. */
NSA__DEVICE float nsa__ex2(float x NSA__AT) {
    float y;
    NSA__PTX_PURE(exp2_approx(&y, x, NSA__HERE), "ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* e^x of the difference of two scores, or of a score and lse: exactly 1 of what is alike, however
   large it is. Scores in base 2 would lose that when lse changes its base. */
NSA__DEVICE float nsa__exp(float x) {
    return nsa__ex2(1.44269504f * x);
}

/* log2 x to about 1e-7 absolute near 1; subnormal x counts as 0. */
NSA__DEVICE float nsa__log2(float x NSA__AT) {
    float y;
    NSA__PTX_PURE(log2_approx(&y, x, NSA__HERE), "lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The two types of the tensor cores here; T is one of them wherever a wrapper is a template on
   it. */
template <typename T> struct nsa__is_half {};
template <> struct nsa__is_half<__half> { static constexpr bool value = true; };
template <> struct nsa__is_half<__nv_bfloat16> { static constexpr bool value = false; };

/* Two floats, each rounded to the nearest (even), as one register; `low` has the lower address. */
template <typename T> NSA__DEVICE uint32_t nsa__pack(float low, float high NSA__AT) {
    uint32_t r;
    if constexpr (nsa__is_half<T>::value)
        NSA__PTX_PURE(pack_f16(&r, low, high, NSA__HERE), "cvt.rn.f16x2.f32 %0, %1, %2;"
                      : "=r"(r)
                      : "f"(high), "f"(low));
    else
        NSA__PTX_PURE(pack_bf16(&r, low, high, NSA__HERE), "cvt.rn.bf16x2.f32 %0, %1, %2;"
                      : "=r"(r)
                      : "f"(high), "f"(low));
    return r;
}

/* ---- Tensor cores, sm_80 ------------------------------------------------------------------ */

/* c += a b, one 16x8 tile, k = 16, f32 sums; all 32 lanes. With g = lane / 4, i = lane % 4:
   c[0..1] row g, c[2..3] row g + 8, columns 2i, 2i + 1; a[0], a[2] row g, a[1], a[3] row g + 8,
   columns 2i, 2i + 1 of the k halves 0 (a[0], a[1]) and 1; b[0], b[1] rows 2i, 2i + 1 of the k
   halves, column g. */
template <typename T>
NSA__DEVICE void nsa__mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                   uint32_t b1 NSA__AT) {
    if constexpr (nsa__is_half<T>::value)
        NSA__PTX_PURE(mma_m16n8k16_f16(c, a, b0, b1, NSA__HERE),
                      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        NSA__PTX_PURE(mma_m16n8k16_bf16(c, a, b0, b1, NSA__HERE),
                      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Four 8x8 matrices of 16-bit values from shared memory; all 32 lanes. Lane 8m + r points at row r
   of matrix m (16 bytes, aligned to 16); r[m] of lane l holds columns 2(l % 4), +1 of row l / 4. */
NSA__DEVICE void nsa__ldmatrix_x4(uint32_t (&r)[4], const void *row NSA__AT) {
    NSA__PTX(ldmatrix_x4(r, row, false, NSA__HERE),
             "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
             : "r"(NSA__SHARED(row))
             : "memory");
}

/* The same, each matrix transposed on the way: r[m] holds rows 2(l % 4), +1 of column l / 4. */
NSA__DEVICE void nsa__ldmatrix_x4_trans(uint32_t (&r)[4], const void *row NSA__AT) {
    NSA__PTX(ldmatrix_x4(r, row, true, NSA__HERE),
             "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
             : "r"(NSA__SHARED(row))
             : "memory");
}

/* ---- Asynchronous copies, sm_80 ----------------------------------------------------------- */

/* BYTES (4, 8 or 16) from global to shared memory, both aligned to BYTES, of which the first
   `valid` are read and the rest become 0; valid = 0 reads nothing, whatever the address. There when
   the thread that asked has waited; other threads need a barrier after that. */
template <int BYTES>
NSA__DEVICE void nsa__cp_async(void *shared, const void *global, int valid = BYTES NSA__AT) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (BYTES == 16)
        NSA__PTX(cp_async(shared, global, BYTES, valid, NSA__HERE),
                 "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(NSA__SHARED(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid)
                 : "memory");
    else
        NSA__PTX(cp_async(shared, global, BYTES, valid, NSA__HERE),
                 "cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(NSA__SHARED(shared)),
                 "l"(__cvta_generic_to_global(global)), "n"(BYTES), "r"(valid)
                 : "memory");
}

/* Closes this thread's group of copies; an empty one counts too. */
NSA__DEVICE void nsa__cp_async_commit(NSA__AT_ONLY) {
    NSA__PTX(cp_async_commit(NSA__HERE), "cp.async.commit_group;" ::: "memory");
}

/* Waits until at most PENDING of this thread's newest groups are still under way. */
template <int PENDING> NSA__DEVICE void nsa__cp_async_wait(NSA__AT_ONLY) {
    NSA__PTX(cp_async_wait(PENDING, NSA__HERE), "cp.async.wait_group %0;" ::"n"(PENDING)
             : "memory");
}

/* ---- Named barriers ----------------------------------------------------------------------- */

/* Barrier `id` (1..15; 0 is __syncthreads) of `threads` threads, whole warps: waits for the
   rest. */
NSA__DEVICE void nsa__barrier_sync(int id, int threads NSA__AT) {
    NSA__PTX(barrier_sync(id, threads, NSA__HERE), "barrier.sync.aligned %0, %1;" ::"r"(id),
             "r"(threads)
             : "memory");
}

/* Counts for barrier `id` as sync does, but goes on at once. */
NSA__DEVICE void nsa__barrier_arrive(int id, int threads NSA__AT) {
    NSA__PTX(barrier_arrive(id, threads, NSA__HERE), "barrier.arrive.aligned %0, %1;" ::"r"(id),
             "r"(threads)
             : "memory");
}

/* ---- Hopper: barriers in memory, bulk copies, sm_90 and up ---------------------------------- */

#if defined(NSA_SIMT) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define NSA__HAS_TMA 1
#endif
#if defined(NSA_SIMT) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define NSA__HAS_WGMMA 1 /* sm_90a alone: a plain sm_90 build takes the mma.sync path */
#endif

#ifdef NSA__HAS_TMA

/* A barrier of `arrivals` in shared memory, by one thread; then nsa__fence_async and a block
   barrier before anybody uses it. */
NSA__DEVICE void nsa__mbarrier_init(uint64_t *bar, int arrivals NSA__AT) {
    NSA__PTX(mbarrier_init(bar, arrivals, NSA__HERE),
             "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(NSA__SHARED(bar)), "r"(arrivals)
             : "memory");
}

/* One arrival; what the thread did before is seen by whoever waits. */
NSA__DEVICE void nsa__mbarrier_arrive(uint64_t *bar NSA__AT) {
    NSA__PTX(mbarrier_arrive(bar, 0, NSA__HERE),
             "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(NSA__SHARED(bar))
             : "memory");
}

/* One arrival, and `bytes` more that copies must bring before the phase ends. */
NSA__DEVICE void nsa__mbarrier_arrive_expect(uint64_t *bar, int bytes NSA__AT) {
    NSA__PTX(mbarrier_arrive(bar, bytes, NSA__HERE),
             "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(NSA__SHARED(bar)),
             "r"(bytes)
             : "memory");
}

/* Waits for the end of the phase of that parity: 0 for the first, 1 for the second, and so on. */
NSA__DEVICE void nsa__mbarrier_wait(uint64_t *bar, int parity NSA__AT) {
    NSA__PTX(mbarrier_wait(bar, parity, NSA__HERE),
             "{\n.reg .pred done;\n"
             "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
             "@!done bra again;\n}" ::"r"(NSA__SHARED(bar)),
             "r"(parity)
             : "memory");
}

/* Makes this thread's ordinary shared-memory stores visible to bulk copies and wgmma: between the
   stores and the barrier that announces them. */
NSA__DEVICE void nsa__fence_async(NSA__AT_ONLY) {
    NSA__PTX(fence_async(NSA__HERE), "fence.proxy.async.shared::cta;" ::: "memory");
}

/* `bytes` from global to shared memory, all multiples of 16, counted by `bar`; by one thread. */
NSA__DEVICE void nsa__bulk_load(void *shared, const void *global, int bytes,
                                uint64_t *bar NSA__AT) {
    NSA__PTX(bulk_load(shared, global, bytes, bar, NSA__HERE),
             "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
             "[%0], [%1], %2, [%3];" ::"r"(NSA__SHARED(shared)),
             "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(NSA__SHARED(bar))
             : "memory");
}

/* The box of `map` at element coordinates `at`, innermost first, which may reach outside of the
   tensor: there it brings zeros. `shared` is aligned to 128 bytes, or to the swizzle's pattern of
   256, 512, 1024. Counts the whole box on `bar`; by one thread. */
template <int RANK>
NSA__DEVICE void nsa__tensor_load(void *shared, const CUtensorMap *map, const int (&at)[RANK],
                                  uint64_t *bar NSA__AT) {
    static_assert(RANK >= 2 && RANK <= 4, "tensor maps of 2 to 4 dimensions");
    if constexpr (RANK == 2)
        NSA__PTX(tensor_load(shared, map, at, RANK, bar, NSA__HERE),
                 "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(NSA__SHARED(shared)),
                 "l"(map), "r"(at[0]), "r"(at[1]), "r"(NSA__SHARED(bar))
                 : "memory");
    else if constexpr (RANK == 3)
        NSA__PTX(tensor_load(shared, map, at, RANK, bar, NSA__HERE),
                 "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(NSA__SHARED(shared)),
                 "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(NSA__SHARED(bar))
                 : "memory");
    else
        NSA__PTX(tensor_load(shared, map, at, RANK, bar, NSA__HERE),
                 "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(NSA__SHARED(shared)),
                 "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(NSA__SHARED(bar))
                 : "memory");
}

/* The way back; what lies outside of the tensor is not written. After nsa__fence_async by the
   threads that wrote `shared`, and a barrier; by one thread, who commits and waits. */
template <int RANK>
NSA__DEVICE void nsa__tensor_store(const CUtensorMap *map, const int (&at)[RANK],
                                   const void *shared NSA__AT) {
    static_assert(RANK >= 2 && RANK <= 4, "tensor maps of 2 to 4 dimensions");
    if constexpr (RANK == 2)
        NSA__PTX(
            tensor_store(map, at, RANK, shared, NSA__HERE),
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                map),
            "r"(at[0]), "r"(at[1]), "r"(NSA__SHARED(shared))
            : "memory");
    else if constexpr (RANK == 3)
        NSA__PTX(
            tensor_store(map, at, RANK, shared, NSA__HERE),
            "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
                map),
            "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(NSA__SHARED(shared))
            : "memory");
    else
        NSA__PTX(tensor_store(map, at, RANK, shared, NSA__HERE),
                 "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
                 "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
                 "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(NSA__SHARED(shared))
                 : "memory");
}

/* Closes this thread's group of bulk stores. */
NSA__DEVICE void nsa__bulk_commit(NSA__AT_ONLY) {
    NSA__PTX(bulk_commit(NSA__HERE), "cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until all but the newest PENDING groups have read their shared memory, so that it may be
   written again or the block may end. */
template <int PENDING> NSA__DEVICE void nsa__bulk_wait(NSA__AT_ONLY) {
    NSA__PTX(bulk_wait(PENDING, NSA__HERE), "cp.async.bulk.wait_group.read %0;" ::"n"(PENDING)
             : "memory");
}

#endif /* NSA__HAS_TMA */

/* ---- Hopper: wgmma, sm_90a ------------------------------------------------------------------ */

#ifdef NSA__HAS_WGMMA

/* How the 16-byte chunks of a tile lie in shared memory: rows of 128, 64 or 32 bytes whose
   chunks are xor-ed with the row number within the pattern (as a tensor map of that swizzle
   leaves them), or plain 8x8 cores. */
enum nsa__swizzle { NSA__SWIZZLE_NONE, NSA__SWIZZLE_128, NSA__SWIZZLE_64, NSA__SWIZZLE_32 };

/* A 16-bit operand in shared memory. Swizzled, K innermost: `stride` is the distance of 8 rows,
   `leading` is not used. Swizzled, M or N innermost: `leading` is the distance of patterns along
   it, `stride` of 8 rows along K. Plain: the distance of 8x8 cores along K (`leading`) and along
   M or N. */
NSA__DEVICE uint64_t nsa__wgmma_descriptor(const void *tile, int leading, int stride,
                                           nsa__swizzle swizzle) {
    return static_cast<uint64_t>(NSA__SHARED(tile) >> 4 & 0x3fffu) |
           static_cast<uint64_t>(leading >> 4 & 0x3fff) << 16 |
           static_cast<uint64_t>(stride >> 4 & 0x3fff) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

/* The compiler must keep the registers where they are across fence and wait: accumulators ("+f")
   and an operand ("+r"). */
#ifdef NSA_SIMT
#define NSA__IN_PLACE(kind, x, count) static_cast<void>(x)
#else
#define NSA__IN_PLACE(kind, x, count) \
    _Pragma("unroll") for (int i = 0; i < (count); i++) asm volatile("" : kind((x)[i])::"memory")
#endif

/* Before the first wgmma of a group: ordinary code may have written its registers. */
template <int COUNT> NSA__DEVICE void nsa__wgmma_fence(float (&c)[COUNT] NSA__AT) {
    NSA__IN_PLACE("+f", c, COUNT);
    NSA__PTX(wgmma_fence(c, NSA__HERE), "wgmma.fence.sync.aligned;" ::: "memory");
}
/* The same where the group takes a from registers: they are written before the fence, too. */
template <int COUNT, int STEPS>
NSA__DEVICE void nsa__wgmma_fence(float (&c)[COUNT], uint32_t (&a)[STEPS][4] NSA__AT) {
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        NSA__IN_PLACE("+r", a[k], 4);
    }
    NSA__IN_PLACE("+f", c, COUNT);
    NSA__PTX(wgmma_fence(c, NSA__HERE), "wgmma.fence.sync.aligned;" ::: "memory");
}

NSA__DEVICE void nsa__wgmma_commit(NSA__AT_ONLY) {
    NSA__PTX(wgmma_commit(NSA__HERE), "wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most PENDING of the newest groups are under way; `c` belongs to one that is
   not. */
template <int PENDING, int COUNT> NSA__DEVICE void nsa__wgmma_wait(float (&c)[COUNT] NSA__AT) {
    NSA__PTX(wgmma_wait(PENDING, c, NSA__HERE), "wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING)
             : "memory");
    NSA__IN_PLACE("+f", c, COUNT);
}

#ifndef NSA_SIMT
#define NSA__TEXT0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NSA__TEXT1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NSA__TEXT2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NSA__TEXT3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NSA__TEXT4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NSA__TEXT5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NSA__TEXT6 \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NSA__TEXT7                                                                               \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
    "%127"
#define NSA__OUT4(c, i) "+f"(c[i]), "+f"(c[(i) + 1]), "+f"(c[(i) + 2]), "+f"(c[(i) + 3])
#define NSA__OUT16(c, i) \
    NSA__OUT4(c, i), NSA__OUT4(c, (i) + 4), NSA__OUT4(c, (i) + 8), NSA__OUT4(c, (i) + 12)
#define NSA__TEXT_32    NSA__TEXT0
#define NSA__TEXT_64    NSA__TEXT_32 ", " NSA__TEXT1
#define NSA__TEXT_96    NSA__TEXT_64 ", " NSA__TEXT2
#define NSA__TEXT_128   NSA__TEXT_96 ", " NSA__TEXT3
#define NSA__TEXT_192   NSA__TEXT_128 ", " NSA__TEXT4 ", " NSA__TEXT5
#define NSA__TEXT_256   NSA__TEXT_192 ", " NSA__TEXT6 ", " NSA__TEXT7
#define NSA__OUT_32(c)  NSA__OUT16(c, 0)
#define NSA__OUT_64(c)  NSA__OUT_32(c), NSA__OUT16(c, 16)
#define NSA__OUT_96(c)  NSA__OUT_64(c), NSA__OUT16(c, 32)
#define NSA__OUT_128(c) NSA__OUT_96(c), NSA__OUT16(c, 48)
#define NSA__OUT_192(c) NSA__OUT_128(c), NSA__OUT16(c, 64), NSA__OUT16(c, 80)
#define NSA__OUT_256(c) NSA__OUT_192(c), NSA__OUT16(c, 96), NSA__OUT16(c, 112)
/* Operands after the accumulators: a, b, accumulate?, transpositions; p, q, r, s, t number them. */
#define NSA__WGMMA_SS(N, type, p, q, r, s, t)                                               \
    asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, %" #r ", 0;\n"                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type            \
                 " {" NSA__TEXT_##N "}, %" #p ", %" #q ", more, 1, 1, %" #s ", %" #t ";\n}" \
                 : NSA__OUT_##N(c)                                                          \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(A_MN), "n"(B_MN))
#define NSA__WGMMA_RS(N, type, p, q, r, s, t, u, v)                                 \
    asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, %" #u ", 0;\n"             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type    \
                 " {" NSA__TEXT_##N "}, {%" #p ", %" #q ", %" #r ", %" #s "}, %" #t \
                                    ", more, 1, 1, %" #v ";\n}"                     \
                 : NSA__OUT_##N(c)                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(B_MN))
#define NSA__WGMMA_N(form, type) \
    if constexpr (N == 32)       \
        form##_32(type);         \
    else if constexpr (N == 64)  \
        form##_64(type);         \
    else if constexpr (N == 96)  \
        form##_96(type);         \
    else if constexpr (N == 128) \
        form##_128(type);        \
    else if constexpr (N == 192) \
        form##_192(type);        \
    else                         \
        form##_256(type)
#define NSA__WGMMA_SS_32(type)  NSA__WGMMA_SS(32, type, 16, 17, 18, 19, 20)
#define NSA__WGMMA_SS_64(type)  NSA__WGMMA_SS(64, type, 32, 33, 34, 35, 36)
#define NSA__WGMMA_SS_96(type)  NSA__WGMMA_SS(96, type, 48, 49, 50, 51, 52)
#define NSA__WGMMA_SS_128(type) NSA__WGMMA_SS(128, type, 64, 65, 66, 67, 68)
#define NSA__WGMMA_SS_192(type) NSA__WGMMA_SS(192, type, 96, 97, 98, 99, 100)
#define NSA__WGMMA_SS_256(type) NSA__WGMMA_SS(256, type, 128, 129, 130, 131, 132)
#define NSA__WGMMA_RS_32(type)  NSA__WGMMA_RS(32, type, 16, 17, 18, 19, 20, 21, 22)
#define NSA__WGMMA_RS_64(type)  NSA__WGMMA_RS(64, type, 32, 33, 34, 35, 36, 37, 38)
#define NSA__WGMMA_RS_96(type)  NSA__WGMMA_RS(96, type, 48, 49, 50, 51, 52, 53, 54)
#define NSA__WGMMA_RS_128(type) NSA__WGMMA_RS(128, type, 64, 65, 66, 67, 68, 69, 70)
#define NSA__WGMMA_RS_192(type) NSA__WGMMA_RS(192, type, 96, 97, 98, 99, 100, 101, 102)
#define NSA__WGMMA_RS_256(type) NSA__WGMMA_RS(256, type, 128, 129, 130, 131, 132, 133, 134)
#endif

/* c = a b, or c += a b, one 64xN tile, k = 16, by four warps from a multiple of 4. Warp w of
   them has rows 16w ..: c[4j + 2h + e] is row l / 4 + 8h, column 8j + 2 (l % 4) + e of lane l. a
   and b are descriptors; A_MN, B_MN: 1 where M or N is innermost, 0 where K is. c is there after
   the wait. */
template <typename T, int N, int A_MN, int B_MN>
NSA__DEVICE void nsa__wgmma(float (&c)[N / 2], uint64_t a, uint64_t b, int accumulate NSA__AT) {
    static_assert(N == 32 || N == 64 || N == 96 || N == 128 || N == 192 || N == 256, "wgmma: N");
#ifdef NSA_SIMT
    ::simt::wgmma({c, N, nsa__is_half<T>::value, A_MN, B_MN, accumulate, nullptr, a, b, NSA__HERE});
#else
    if constexpr (nsa__is_half<T>::value) {
        NSA__WGMMA_N(NSA__WGMMA_SS, "f16");
    } else {
        NSA__WGMMA_N(NSA__WGMMA_SS, "bf16");
    }
#endif
}

/* The same with a in registers, laid out as in nsa__mma_m16n8k16 within each warp's 16 rows. */
template <typename T, int N, int B_MN>
NSA__DEVICE void nsa__wgmma(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b,
                            int accumulate NSA__AT) {
    static_assert(N == 32 || N == 64 || N == 96 || N == 128 || N == 192 || N == 256, "wgmma: N");
#ifdef NSA_SIMT
    ::simt::wgmma({c, N, nsa__is_half<T>::value, 0, B_MN, accumulate, a, 0, b, NSA__HERE});
#else
    if constexpr (nsa__is_half<T>::value) {
        NSA__WGMMA_N(NSA__WGMMA_RS, "f16");
    } else {
        NSA__WGMMA_N(NSA__WGMMA_RS, "bf16");
    }
#endif
}

/* Hands registers over between warpgroups: the caller's four warps have COUNT each from here on. */
template <int COUNT, bool MORE> NSA__DEVICE void nsa__registers(NSA__AT_ONLY) {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "setmaxnreg: multiples of 8");
    if constexpr (MORE)
        NSA__PTX(registers(COUNT, NSA__HERE), "setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
    else
        NSA__PTX(registers(COUNT, NSA__HERE), "setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

#endif /* NSA__HAS_WGMMA */

#endif

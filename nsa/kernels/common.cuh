/* common.cuh: the one place where kernels meet the compiler: launch, shared memory, PTX.
   Twin: none; every kernels/X.cuh includes this file and no other CUDA header, and holds no asm.
   Not here: anything about attention. A wrapper is one instruction, under its PTX name.

   Two readers: nvcc (sm_80 and up), and a plain C++17 compiler with -DNSA_SIMT, whose include path
   then supplies nsa_simt.h: CUDA's thread indices, intrinsics and an executor on the CPU. There each
   call carries the place it stands at, so that a report names the kernel's own line. */
#ifndef NSA_COMMON_CUH
#define NSA_COMMON_CUH

#include <stddef.h>
#include <stdint.h>

#ifdef NSA_SIMT

#include "nsa_simt.h"

/* Last parameters of every wrapper, and how it passes them on. */
#define NSA__AT                  , const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NSA__AT_ONLY             const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NSA__HERE                (::simt::site{file, line})
#define NSA__PTX(host, ...)      (::simt::host)
#define NSA__PTX_PURE(host, ...) (::simt::host)

/* Shared memory. NSA_SHARED(float, scores, [4][64]) declares a static array; raw __shared__ does not
   compile. NSA_SHARED_ALL(smem) names the launch's dynamic bytes, aligned to 1024. */
#define NSA_SHARED(type, name, ...)                                              \
    typedef type nsa__type_##name __VA_ARGS__;                                   \
    static const char nsa__key_##name = 0;                                       \
    nsa__type_##name &name = *static_cast<nsa__type_##name *>(                   \
        ::simt::shared_static(&nsa__key_##name, #name, sizeof(nsa__type_##name), \
                              alignof(nsa__type_##name), ::simt::site{__FILE__, __LINE__}))
#define NSA_SHARED_ALL(name) unsigned char *name = ::simt::shared_dynamic()

/* NSA_LAUNCH(kernel<T, 64>, grid, block, shared_bytes, stream, arguments...) -> cudaError_t */
#define NSA_LAUNCH(...) ::simt::launch(::simt::site{__FILE__, __LINE__}, #__VA_ARGS__, __VA_ARGS__)

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "nsa kernels need compute capability 8.0 or later: name one, for instance nvcc -arch=sm_80"
#endif

#define NSA__AT
#define NSA__AT_ONLY
/* NSA__PTX(executor call, asm): what touches memory or order. NSA__PTX_PURE: values in, values out,
   so the compiler may move it or drop it. */
#define NSA__PTX(host, ...)      asm volatile(__VA_ARGS__)
#define NSA__PTX_PURE(host, ...) asm(__VA_ARGS__)

#define NSA_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#define NSA_SHARED_ALL(name)        unsigned char *name = nsa__shared_all
extern __shared__ __align__(1024) unsigned char nsa__shared_all[];

#define NSA_LAUNCH(...) nsa__launch(__VA_ARGS__)

/* More than 48 KB of dynamic shared memory must be asked for by name; the call is host-side only. */
template <typename... Params, typename... Args>
static inline cudaError_t nsa__launch(void (*kernel)(Params...), dim3 grid, dim3 block,
                                      size_t shared_bytes, cudaStream_t stream, Args &&...args) {
    if (shared_bytes > 48 * 1024) {
        const cudaError_t e = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
        if (e != cudaSuccess) return e;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Args &&>(args)...);
}

#endif

#define NSA__DEVICE static __device__ __forceinline__

/* The address of shared memory as PTX wants it. */
#ifdef NSA_SIMT
#define NSA__SHARED(pointer) 0u
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

/* log2 x to about 1e-7 absolute near 1; subnormal x counts as 0. */
NSA__DEVICE float nsa__log2(float x NSA__AT) {
    float y;
    NSA__PTX_PURE(log2_approx(&y, x, NSA__HERE), "lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The two types of the tensor cores here; T is one of them wherever a wrapper is a template on it. */
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

/* Barrier `id` (1..15; 0 is __syncthreads) of `threads` threads, whole warps: waits for the rest. */
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

#endif

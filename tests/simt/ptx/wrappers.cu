/* wrappers.cu: each wrapper of common.cuh used once, for check_ptx.cmake to see what nvcc makes of
   it: the executor never reads the asm. Not here: anything that is run. */
#include "common.cuh"

template <typename T> static __global__ void base_kernel(float *out, const T *in, int valid) {
    NSA_SHARED(float, row, [32]);
    NSA_SHARED_ALL(bytes);
    const unsigned t = threadIdx.x;
    nsa__cp_async<16>(bytes + 16 * t, in + 8 * t, valid);
    nsa__cp_async<8>(bytes + 1024 + 8 * t, in + 8 * t);
    nsa__cp_async<4>(bytes + 2048 + 4 * t, in + 8 * t);
    nsa__cp_async_commit();
    nsa__cp_async_wait<1>();
    __syncthreads();
    uint32_t a[4], b[4];
    float c[4] = {};
    nsa__ldmatrix_x4(a, bytes + 16 * t);
    nsa__ldmatrix_x4_trans(b, bytes + 16 * t);
    nsa__mma_m16n8k16<T>(c, a, b[0], b[1]);
    nsa__barrier_arrive(1, 64);
    nsa__barrier_sync(2, 64);
    row[t] = nsa__ex2(c[0]) + nsa__log2(c[1]);
    out[t] = row[31 - t] + __uint_as_float(nsa__pack<T>(c[2], c[3]));
}

#ifdef NSA__HAS_TMA
static __device__ void copies(const CUtensorMap *map, const void *in, unsigned char *bytes,
                              uint64_t *bar) {
    if (threadIdx.x == 0) {
        nsa__mbarrier_init(bar, 2);
        nsa__fence_async();
        nsa__mbarrier_arrive(bar);
        nsa__mbarrier_arrive_expect(bar, 4096);
        nsa__bulk_load(bytes, in, 1024, bar);
        nsa__tensor_load(bytes + 1024, map, {0, 1}, bar);
        nsa__tensor_load(bytes + 2048, map, {0, 1, 2}, bar);
        nsa__tensor_load(bytes + 3072, map, {0, 1, 2, 3}, bar);
    }
    nsa__mbarrier_wait(bar, 0);
    if (threadIdx.x == 0) {
        nsa__tensor_store(map, {0, 1}, bytes + 1024);
        nsa__tensor_store(map, {0, 1, 2}, bytes + 2048);
        nsa__tensor_store(map, {0, 1, 2, 3}, bytes + 3072);
        nsa__bulk_commit();
        nsa__bulk_wait<0>();
    }
}
#endif

#ifdef NSA__HAS_WGMMA
template <typename T, int N>
static __device__ void products(float *out, const unsigned char *bytes) {
    float c[N / 2];
    uint32_t a[4];
    for (int i = 0; i < N / 2; i++) c[i] = out[threadIdx.x + 128 * i];
    for (int i = 0; i < 4; i++) a[i] = threadIdx.x + static_cast<unsigned>(i);
    const uint64_t tile_a = nsa__wgmma_descriptor(bytes, 16, 1024, NSA__SWIZZLE_128);
    const uint64_t tile_b = nsa__wgmma_descriptor(bytes + 8192, 2048, 1024, NSA__SWIZZLE_128);
    nsa__wgmma_fence(c);
    nsa__wgmma<T, N, 0, 0>(c, tile_a, tile_b, 0);
    nsa__wgmma<T, N, 1, 1>(c, tile_a, tile_b, 1);
    nsa__wgmma<T, N, 1>(c, a, tile_b, 1);
    nsa__wgmma_commit();
    nsa__wgmma_wait<0>(c);
    for (int i = 0; i < N / 2; i++) out[threadIdx.x + 128 * i] = c[i];
}
#endif

template <typename T>
static __global__ void __launch_bounds__(256, 1)
    hopper_kernel(float *out, const T *in, const __grid_constant__ CUtensorMap map) {
    NSA_SHARED_ALL(bytes);
    NSA_SHARED(uint64_t, bar, [1]);
    bytes[threadIdx.x] = 0;
#ifdef NSA__HAS_TMA
    copies(&map, in, bytes, bar);
#endif
#ifdef NSA__HAS_WGMMA
    if (threadIdx.x < 128) {
        nsa__registers<240, true>();
        products<T, 32>(out, bytes);
        products<T, 64>(out, bytes);
        products<T, 96>(out, bytes);
        products<T, 128>(out, bytes);
        products<T, 192>(out, bytes);
        products<T, 256>(out, bytes);
    } else {
        nsa__registers<24, false>();
    }
#endif
    out[threadIdx.x] += static_cast<float>(bytes[threadIdx.x]) + static_cast<float>(bar[0]);
}

template <typename T>
static cudaError_t launch_both(float *out, const T *in, const CUtensorMap &map,
                               cudaStream_t stream) {
    const cudaError_t e = NSA_LAUNCH(base_kernel<T>, 1, 32, 4096, stream, out, in, 3);
    return e ? e : NSA_LAUNCH(hopper_kernel<T>, 1, 256, 65536, stream, out, in, map);
}

cudaError_t launch_all(float *out, const void *in, const CUtensorMap &map, cudaStream_t stream) {
    const cudaError_t e = launch_both(out, static_cast<const __half *>(in), map, stream);
    return e ? e : launch_both(out, static_cast<const __nv_bfloat16 *>(in), map, stream);
}

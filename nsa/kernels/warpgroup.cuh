/* warpgroup.cuh: the products of tiles.cuh as sm_90a makes them: four warps, 64 rows, by wgmma.
   Twin: tiles.cuh, "Products"; a value has the same owner in both.
   Not here: which rows (attend_forward.cuh), how tiles lie (tiles.cuh).

   An operand in shared memory is read once for 64 rows, where warps on their own read it once
   for 16. What the rows hold was written by ordinary stores and copies: nsa__cuda_tiles_written
   stands between them and a product. All warps of a group take part in a product, or none. */
#ifndef NSA_WARPGROUP_CUH
#define NSA_WARPGROUP_CUH

#include "rows.cuh"

/* Under the executor tests say which path they run; NSA__SIMT_WGMMA is this one. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(NSA__SIMT_WGMMA)
#define NSA__USES_WGMMA 1
#else
#define NSA__USES_WGMMA 0
#endif

/* Whether four warps multiply together: 16-bit elements against tiles of N rows, 32 at least. */
template <typename T, int N> struct nsa__cuda_uses_warpgroup {
    static constexpr bool value = NSA__USES_WGMMA && sizeof(T) == 2 && N >= 32;
};

/* A barrier behind which all see what threads have written to tiles, products of N too. */
template <typename T, int N> NSA__DEVICE void nsa__cuda_tiles_written() {
#if NSA__USES_WGMMA
    if constexpr (nsa__cuda_uses_warpgroup<T, N>::value) nsa__fence_async();
#endif
    __syncthreads();
}

/* The same for what they copy. */
template <typename T, int N> NSA__DEVICE void nsa__cuda_tiles_wait() {
    nsa__cp_async_wait<0>();
    nsa__cuda_tiles_written<T, N>();
}

/* Whether a warp takes part in a product: on its own, if one of its rows sees something;
   together, if the group may, which all of it must know alike. */
template <typename T, int N> NSA__DEVICE bool nsa__cuda_takes_part(bool sees, bool group_may_see) {
    return nsa__cuda_uses_warpgroup<T, N>::value ? group_may_see : __any_sync(0xffffffffu, sees);
}

/* Columns 0 .. 7 and 8 .. 15 of a product as the operand of the next one. */
template <typename T>
NSA__DEVICE void nsa__cuda_pack_product(uint32_t (&a)[4], const float (&low)[4],
                                        const float (&high)[4]) {
    a[0] = nsa__pack<T>(low[0], low[1]);
    a[1] = nsa__pack<T>(low[2], low[3]);
    a[2] = nsa__pack<T>(high[0], high[1]);
    a[3] = nsa__pack<T>(high[2], high[3]);
}

/* The start of nsa__cuda_product_nt for the 64 rows that a_row is one of, or of two, and of
   nsa__cuda_product_nn, whose operand `a` stays untouched until the product has been awaited. */
template <typename T, int D, int N, int ROWS>
NSA__DEVICE void nsa__cuda_warpgroup_begin_nt(float (&c)[N / 8][4], T *a, int a_row, T *b);
template <typename T, int DK, int DV, int N, int ROWS>
NSA__DEVICE void nsa__cuda_warpgroup_begin_two(float (&c)[N / 8][4], float (&d)[N / 8][4], T *a,
                                               int a_row, T *b);
template <int N, int PENDING> NSA__DEVICE void nsa__cuda_warpgroup_await(float (&c)[N / 8][4]);
template <typename T, int K, int N>
NSA__DEVICE void nsa__cuda_warpgroup_begin_nn(float (&c)[N / 8][4], uint32_t (&a)[K / 16][4],
                                              const float (&p)[K / 8][4], T *b);

#if NSA__USES_WGMMA

/* The descriptor of a tile from the chunk that `at` points at. `panels`: bytes from one panel to
   the next, if a product goes across them. The shuffle tells the compiler that all lanes have the
   same value: then it lies in a uniform register, and a step along the tile is one addition of
   elements / 8, the descriptor's unit of 16 bytes. `moved` adds to a descriptor what only the
   program knows to be the same in all lanes. */
NSA__DEVICE uint64_t nsa__cuda_warpgroup_moved(uint64_t d, uint32_t units) {
    const uint32_t low = static_cast<uint32_t>(d) + units;
    return (d & 0xffffffff00000000u) | __shfl_sync(0xffffffffu, low, 0);
}
template <typename T> NSA__DEVICE uint64_t nsa__cuda_warpgroup_operand(const T *at, int panels) {
    return nsa__cuda_warpgroup_moved(nsa__wgmma_descriptor(at, panels, 1024, NSA__SWIZZLE_128), 0);
}

/* nsa__cuda_warpgroup_begin_nt of operands whose descriptors are known. */
template <typename T, int D, int N, int ROWS>
NSA__DEVICE void nsa__cuda_warpgroup_start_nt(float (&c)[N / 8][4], uint64_t a, uint64_t b) {
    float(&sums)[N / 2] = reinterpret_cast<float(&)[N / 2]>(c);
    nsa__wgmma_fence(sums);
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        nsa__wgmma<T, N, 0, 0>(sums, a + (k / 4 * ROWS * 8 + k % 4 * 2),
                               b + (k / 4 * N * 8 + k % 4 * 2), k > 0);
    nsa__wgmma_commit();
}

template <typename T, int D, int N, int ROWS>
NSA__DEVICE void nsa__cuda_warpgroup_begin_nt(float (&c)[N / 8][4], T *a, int a_row, T *b) {
    static_assert(ROWS % 64 == 0, "whole warpgroups");
    const uint64_t da = nsa__cuda_warpgroup_operand(a + a_row / 64 * 64 * 64, 16);
    nsa__cuda_warpgroup_start_nt<T, D, N, ROWS>(c, da, nsa__cuda_warpgroup_operand(b, 16));
}

template <typename T, int DK, int DV, int N, int ROWS>
NSA__DEVICE void nsa__cuda_warpgroup_begin_two(float (&c)[N / 8][4], float (&d)[N / 8][4], T *a,
                                               int a_row, T *b) {
    static_assert(ROWS % 64 == 0, "whole warpgroups");
    const uint64_t da = nsa__cuda_warpgroup_operand(a + a_row / 64 * 64 * 64, 16),
                   db = nsa__cuda_warpgroup_operand(b, 16);
    nsa__cuda_warpgroup_start_nt<T, DK, N, ROWS>(c, da, db);
    nsa__cuda_warpgroup_start_nt<T, DV, N, ROWS>(d, da + ROWS * DK / 8, db + N * DK / 8);
}

template <int N, int PENDING> NSA__DEVICE void nsa__cuda_warpgroup_await(float (&c)[N / 8][4]) {
    nsa__wgmma_wait<PENDING>(reinterpret_cast<float(&)[N / 2]>(c));
}

/* nsa__cuda_warpgroup_begin_nn of p that is packed already, and of a descriptor. */
template <typename T, int K, int N>
NSA__DEVICE void nsa__cuda_warpgroup_start_nn(float (&c)[N / 8][4], uint32_t (&a)[K / 16][4],
                                              uint64_t b) {
    float(&sums)[N / 2] = reinterpret_cast<float(&)[N / 2]>(c);
    nsa__wgmma_fence(sums, a);
#pragma unroll
    for (int k = 0; k < K / 16; k++) nsa__wgmma<T, N, 1>(sums, a[k], b + k * 128, 1);
    nsa__wgmma_commit();
}

template <typename T, int K, int N>
NSA__DEVICE void nsa__cuda_warpgroup_begin_nn(float (&c)[N / 8][4], uint32_t (&a)[K / 16][4],
                                              const float (&p)[K / 8][4], T *b) {
#pragma unroll
    for (int k = 0; k < K / 16; k++) nsa__cuda_pack_product<T>(a[k], p[2 * k], p[2 * k + 1]);
    nsa__cuda_warpgroup_start_nn<T, K, N>(c, a, nsa__cuda_warpgroup_operand(b, K * 128));
}

#endif

#endif

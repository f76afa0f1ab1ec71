/* tiles.cuh: what a warp does with tiles of rows in shared memory: bring them in, multiply them.
   Twin: nsa.h, "Tiles".
   Not here: which rows, and what the products mean (attend_forward.cuh).

   A product is 16 rows of one warp. Its values lie as an m16n8 tensor-core product lies: with
   g = lane / 4 and i = lane % 4, c[n][0], c[n][1] are row g and c[n][2], c[n][3] row g + 8, columns
   8n + 2i and 8n + 2i + 1. There are two products, each for tensor cores (bf16, f16) and for plain
   f32, and all of attention, forward and backward, is made of them. On sm_90a four warps multiply
   their 64 rows together (warpgroup.cuh); who owns which value stays the same. */
#ifndef NSA_TILES_CUH
#define NSA_TILES_CUH

#include "warpgroup.cuh"

/* Elements of the 16 bytes that move at once. */
template <typename T> struct nsa__cuda_piece { static constexpr int size = 16 / sizeof(T); };

/* Where chunk `chunk` of row `row` lies in a tile of ROWS rows: in panels of 128 bytes of every
   row, one after the other. Chunks change places with the row, so that eight rows of one column
   of chunks, which one ldmatrix phase reads, lie in eight banks; wgmma knows this layout as a
   swizzle of 128 bytes, if the tile starts at a multiple of 1024. */
template <typename T, int ROWS> NSA__DEVICE int nsa__cuda_tile_offset(int row, int chunk) {
    static_assert(ROWS % 8 == 0, "a panel is whole patterns");
    return ((chunk / 8 * ROWS + row) * 8 + ((chunk ^ row) & 7)) * nsa__cuda_piece<T>::size;
}
template <typename T, int ROWS> NSA__DEVICE T *nsa__cuda_tile_at(T *tile, int row, int chunk) {
    return tile + nsa__cuda_tile_offset<T, ROWS>(row, chunk);
}

/* From the offset of chunk 0 or 1 of a row to that of the chunk `chunks` (even, or from chunk 0)
   behind it: an exclusive or and a constant, where nsa__cuda_tile_at would keep an address for
   each. */
template <typename T, int ROWS> NSA__DEVICE int nsa__cuda_tile_step(int offset, int chunks) {
    constexpr int size = nsa__cuda_piece<T>::size;
    return (offset ^ chunks % 8 * size) + chunks / 8 * 8 * size * ROWS;
}

/* Whether 16 bytes hold an infinity or a NaN, by their bits: an exponent of all ones. */
template <typename T> NSA__DEVICE bool nsa__cuda_not_finite(uint4 x) {
    uint32_t high = 0x7f800000u, low = 0x7f800000u;
    if constexpr (sizeof(T) == 2) {
        if constexpr (nsa__is_half<T>::value) high = 0x7c000000u;
        low = high >> 16;
    }
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    bool found = false;
#pragma unroll
    for (int i = 0; i < 4; i++) found |= (words[i] & high) == high || (words[i] & low) == low;
    return found;
}

/* ---- Bringing rows in --------------------------------------------------------------------- */

/* How the threads of a block share a tile: each has one column of chunks and every STEP-th row. */
template <typename T, int D, int THREADS> struct nsa__cuda_tile_share {
    static constexpr int CHUNKS = D / nsa__cuda_piece<T>::size, STEP = THREADS / CHUNKS;
    static_assert(STEP >= 1, "a row has at most a chunk for each thread");
};

/* Starts copying ROWS rows of `width` <= D elements: row r from source(r), zeros where that is null
   and behind `width`. By all THREADS threads. The loops stay rolled: unrolled, the rows' addresses
   would live in registers all through the caller's main loop. */
template <typename T, int D, int ROWS, int THREADS, typename Source>
NSA__DEVICE void nsa__cuda_tile_copy(T *tile, int width, const T *any, Source source) {
    using share = nsa__cuda_tile_share<T, D, THREADS>;
    const int thread = static_cast<int>(threadIdx.x % THREADS), chunk = thread % share::CHUNKS;
    if (thread >= share::STEP * share::CHUNKS) return;
#pragma unroll 1
    for (int row = thread / share::CHUNKS; row < ROWS; row += share::STEP) {
        const T *from = source(row);
        const bool there = from != nullptr && chunk * nsa__cuda_piece<T>::size < width;
        nsa__cp_async<16>(nsa__cuda_tile_at<T, ROWS>(tile, row, chunk),
                          there ? from + chunk * nsa__cuda_piece<T>::size : any, there ? 16 : 0);
    }
}

/* The same from rows that lie `stride` elements apart: `count` of them, zeros behind. Keys take
   this way, tile after tile, so a step carries its addresses along instead of making them anew. */
template <typename T, int D, int ROWS, int THREADS>
NSA__DEVICE void nsa__cuda_tile_copy_rows(T *tile, int width, const T *from, int64_t stride,
                                          int count) {
    using share = nsa__cuda_tile_share<T, D, THREADS>;
    constexpr int size = nsa__cuda_piece<T>::size;
    const int thread = static_cast<int>(threadIdx.x % THREADS), chunk = thread % share::CHUNKS;
    const int first = thread / share::CHUNKS;
    const int there = chunk * size < width ? count : 0;
    if (thread >= share::STEP * share::CHUNKS) return;
    const T *at = from + stride * first + chunk * size;
    T *to = nsa__cuda_tile_at<T, ROWS>(tile, first, chunk);
#pragma unroll 1
    for (int row = first; row < ROWS; row += share::STEP) {
        nsa__cp_async<16>(to, row < there ? at : from, row < there ? 16 : 0);
        at += stride * share::STEP;
        to = share::STEP % 8 == 0 ? to + share::STEP * 8 * size
                                  : nsa__cuda_tile_at<T, ROWS>(tile, row + share::STEP, chunk);
    }
}

/* The same if all rows are there, unrolled: 16 bytes take three instructions, not thirteen. For
   producers, whose registers hold no sums. */
template <typename T, int D, int ROWS, int THREADS>
NSA__DEVICE void nsa__cuda_tile_copy_all(T *tile, int width, const T *from, int64_t stride) {
    using share = nsa__cuda_tile_share<T, D, THREADS>;
    constexpr int size = nsa__cuda_piece<T>::size, STEP = share::STEP;
    static_assert(STEP % 8 == 0 && STEP * share::CHUNKS == THREADS, "places differ by constants");
    const int thread = static_cast<int>(threadIdx.x % THREADS), chunk = thread % share::CHUNKS;
    const int first = thread / share::CHUNKS;
    const bool there = chunk * size < width;
    const T *at = from + stride * first + (there ? chunk * size : 0);
    T *const to = nsa__cuda_tile_at<T, ROWS>(tile, first, chunk);
#pragma unroll
    for (int row = 0; row < ROWS; row += STEP, at += stride * STEP)
        nsa__cp_async<16>(to + row * 8 * size, at, there ? 16 : 0);
}

/* The same from rows of another dtype, which are rounded to T on the way; done when it returns. */
template <typename T, int D, int ROWS, int THREADS, typename Source>
NSA__DEVICE void nsa__cuda_tile_round(T *tile, int width, nsa_dtype dtype, Source source) {
    using share = nsa__cuda_tile_share<T, D, THREADS>;
    constexpr int size = nsa__cuda_piece<T>::size;
    const int thread = static_cast<int>(threadIdx.x % THREADS), chunk = thread % share::CHUNKS;
    if (thread >= share::STEP * share::CHUNKS) return;
#pragma unroll 1
    for (int row = thread / share::CHUNKS; row < ROWS; row += share::STEP) {
        const void *from = source(row);
        const bool there = from != nullptr && chunk * size < width;
        T *to = nsa__cuda_tile_at<T, ROWS>(tile, row, chunk);
#pragma unroll
        for (int e = 0; e < size; e += 4) {
            float x[4] = {0, 0, 0, 0};
            if (there) nsa__load4(x, dtype, from, chunk * size + e);
            nsa__store_pair(to + e, x[0], x[1]);
            nsa__store_pair(to + e + 2, x[2], x[3]);
        }
    }
}

/* Zeros the rows of `mask`, by all THREADS threads. Rare: rows with a non-finite value. */
template <typename T, int D, int ROWS, int THREADS>
NSA__DEVICE void nsa__cuda_tile_zero(T *tile, uint64_t mask) {
    constexpr int chunks = D / nsa__cuda_piece<T>::size;
#if NSA__USES_WGMMA /* where it would take a main loop's registers; others have them to spare */
#pragma unroll 1
#endif
    for (int i = static_cast<int>(threadIdx.x % THREADS); i < ROWS * chunks; i += THREADS)
        if (mask >> (i / chunks) & 1)
            *reinterpret_cast<uint4 *>(nsa__cuda_tile_at<T, ROWS>(tile, i / chunks, i % chunks)) =
                make_uint4(0, 0, 0, 0);
}

/* Which of a warp's own 16 rows hold a non-finite value; bit r of the result: row r. */
template <typename T, int D, int ROWS>
NSA__DEVICE uint32_t nsa__cuda_tile_bad_rows(T *tile, int first_row) {
    constexpr int chunks = D / nsa__cuda_piece<T>::size;
    const int lane = threadIdx.x % 32, row = first_row + lane % 16;
    bool bad = false;
    for (int chunk = lane / 16; chunk < chunks; chunk += 2)
        bad |= nsa__cuda_not_finite<T>(
            *reinterpret_cast<const uint4 *>(nsa__cuda_tile_at<T, ROWS>(tile, row, chunk)));
    const uint32_t rows = __ballot_sync(0xffffffffu, bad);
    return (rows | rows >> 16) & 0xffffu;
}

/* Zeros them. */
template <typename T, int D, int ROWS>
NSA__DEVICE uint32_t nsa__cuda_tile_clean(T *tile, int first_row) {
    constexpr int chunks = D / nsa__cuda_piece<T>::size;
    const int lane = threadIdx.x % 32, row = first_row + lane % 16;
    const uint32_t rows = nsa__cuda_tile_bad_rows<T, D, ROWS>(tile, first_row);
    for (int chunk = lane / 16; chunk < chunks && (rows >> lane % 16 & 1); chunk += 2)
        *reinterpret_cast<uint4 *>(nsa__cuda_tile_at<T, ROWS>(tile, row, chunk)) =
            make_uint4(0, 0, 0, 0);
    __syncwarp();
    return rows;
}

NSA__DEVICE float4 nsa__cuda_float4_at(const float *x) {
    return *reinterpret_cast<const float4 *>(x);
}
NSA__DEVICE float nsa__cuda_dot4(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

/* ---- Products ----------------------------------------------------------------------------- */

template <int N> NSA__DEVICE void nsa__cuda_clear(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[n][e] = 0;
}

/* c[16][N] = a b^T over D columns: the warp's rows of `a` (a tile of ROWS) from a_row on, all N
   rows of b. In three steps, so that other work runs while the tensor cores multiply: begin starts
   the product on a warpgroup, await waits until at most PENDING later products are under way. Both
   do nothing elsewhere: there finish is the product. begin_two starts c over DK columns and d over
   DV, of the tiles that lie behind a and b: what it takes for both is computed before either. */
template <typename T, int D, int N, int ROWS>
NSA__DEVICE void nsa__cuda_product_nt_begin(float (&c)[N / 8][4], T *a, int a_row, T *b) {
    if constexpr (nsa__cuda_uses_warpgroup<T, N>::value)
        nsa__cuda_warpgroup_begin_nt<T, D, N, ROWS>(c, a, a_row, b);
}
template <typename T, int DK, int DV, int N, int ROWS>
NSA__DEVICE void nsa__cuda_product_nt_begin_two(float (&c)[N / 8][4], float (&d)[N / 8][4], T *a,
                                                int a_row, T *b) {
    if constexpr (nsa__cuda_uses_warpgroup<T, N>::value)
        nsa__cuda_warpgroup_begin_two<T, DK, DV, N, ROWS>(c, d, a, a_row, b);
}
template <typename T, int N, int PENDING>
NSA__DEVICE void nsa__cuda_product_nt_await(float (&c)[N / 8][4]) {
    if constexpr (nsa__cuda_uses_warpgroup<T, N>::value) nsa__cuda_warpgroup_await<N, PENDING>(c);
}
template <typename T, int D, int N, int ROWS>
NSA__DEVICE void nsa__cuda_product_nt_finish(float (&c)[N / 8][4], T *a, int a_row, T *b) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (nsa__cuda_uses_warpgroup<T, N>::value) {
        /* awaited: c is the product */
    } else if constexpr (sizeof(T) == 2) {
        nsa__cuda_clear(c);
        const int a_at = nsa__cuda_tile_offset<T, ROWS>(a_row + lane % 16, lane / 16);
        const int b_at = nsa__cuda_tile_offset<T, N>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t fa[4], fb[4];
            nsa__ldmatrix_x4(fa, a + nsa__cuda_tile_step<T, ROWS>(a_at, 2 * k));
#pragma unroll
            for (int n = 0; n < N / 16; n++) {
                nsa__ldmatrix_x4(fb, b + nsa__cuda_tile_step<T, N>(b_at, 2 * k) + 16 * n * 64);
                nsa__mma_m16n8k16<T>(c[2 * n], fa, fb[0], fb[1]);
                nsa__mma_m16n8k16<T>(c[2 * n + 1], fa, fb[2], fb[3]);
            }
        }
    } else {
        nsa__cuda_clear(c);
        const int g = lane / 4, i = lane % 4;
#pragma unroll 2
        for (int k = 0; k < D / 4; k++) {
            const float4 a0 = nsa__cuda_float4_at(nsa__cuda_tile_at<T, ROWS>(a, a_row + g, k)),
                         a1 = nsa__cuda_float4_at(nsa__cuda_tile_at<T, ROWS>(a, a_row + g + 8, k));
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float4 x =
                        nsa__cuda_float4_at(nsa__cuda_tile_at<T, N>(b, 8 * n + 2 * i + e, k));
                    c[n][e] = nsa__cuda_dot4(a0, x, c[n][e]);
                    c[n][2 + e] = nsa__cuda_dot4(a1, x, c[n][2 + e]);
                }
        }
    }
}

/* The three steps in one. */
template <typename T, int D, int N, int ROWS>
NSA__DEVICE void nsa__cuda_product_nt(float (&c)[N / 8][4], T *a, int a_row, T *b) {
    nsa__cuda_product_nt_begin<T, D, N, ROWS>(c, a, a_row, b);
    nsa__cuda_product_nt_await<T, N, 0>(c);
    nsa__cuda_product_nt_finish<T, D, N, ROWS>(c, a, a_row, b);
}

/* c[16][N] += p b: p[16][K] is a product as it lies, b's all K rows and columns
   `column` .. column + N - 1, from a panel's begin. For tensor cores p is rounded to T. */
template <typename T, int K, int N>
NSA__DEVICE void nsa__cuda_product_nn(float (&c)[N / 8][4], const float (&p)[K / 8][4], T *b,
                                      int column) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    T *const from = b + column * K;
    if constexpr (nsa__cuda_uses_warpgroup<T, K>::value) {
        uint32_t a[K / 16][4];
        nsa__cuda_warpgroup_begin_nn<T, K, N>(c, a, p, from);
        nsa__cuda_warpgroup_await<N, 0>(c);
    } else if constexpr (sizeof(T) == 2) {
        const int b_at = nsa__cuda_tile_offset<T, K>(lane % 16, lane / 16);
#pragma unroll
        for (int k = 0; k < K / 16; k++) {
            uint32_t fa[4];
            nsa__cuda_pack_product<T>(fa, p[2 * k], p[2 * k + 1]);
#pragma unroll
            for (int n = 0; n < N / 16; n++) {
                uint32_t fb[4];
                nsa__ldmatrix_x4_trans(fb,
                                       from + nsa__cuda_tile_step<T, K>(b_at, 2 * n) + 16 * k * 64);
                nsa__mma_m16n8k16<T>(c[2 * n], fa, fb[0], fb[1]);
                nsa__mma_m16n8k16<T>(c[2 * n + 1], fa, fb[2], fb[3]);
            }
        }
    } else {
        /* lane i of a quad holds keys 8t + 2i and 8t + 2i + 1 of its rows */
#pragma unroll
        for (int t = 0; t < K / 8; t++)
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll 1
                for (int i = 0; i < 4; i++) {
                    const float low = __shfl_sync(0xffffffffu, p[t][e], lane / 4 * 4 + i),
                                high = __shfl_sync(0xffffffffu, p[t][2 + e], lane / 4 * 4 + i);
                    const int b_at =
                        nsa__cuda_tile_offset<T, K>(8 * t + 2 * i + e, lane / 2 % 2) + lane % 2 * 2;
#pragma unroll
                    for (int n = 0; n < N / 8; n++) {
                        const float2 x = *reinterpret_cast<const float2 *>(
                            from + nsa__cuda_tile_step<T, K>(b_at, 2 * n));
                        c[n][0] = fmaf(low, x.x, c[n][0]);
                        c[n][1] = fmaf(low, x.y, c[n][1]);
                        c[n][2] = fmaf(high, x.x, c[n][2]);
                        c[n][3] = fmaf(high, x.y, c[n][3]);
                    }
                }
    }
}

#endif

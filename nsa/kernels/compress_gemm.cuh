/* compress_gemm.cuh: the matrix product that mlp compression is made of, c = a b on tiles of 64 x
   64.
   Twin: nsa.h, "Tiles" as "Compression" uses them.
   Not here: a general BLAS. Operands are what an mlp over strided windows needs: rows gathered
   through a table, columns that continue in another row; any of k and v's strides. */
#ifndef NSA_COMPRESS_GEMM_CUH
#define NSA_COMPRESS_GEMM_CUH

#include "block_index.cuh"

/* Pages of `rows` rows, each sequence's in a line of the table; NULL: none. */
struct nsa__cuda_operand_pages {
    const int32_t *table;
    int width, rows, count;
};

/* A matrix in memory. Row r starts at the gathered token's row, or at r % modulus * stride +
   r / modulus * jump; column c of it lies c / width * outer + c % width further on, so that pieces
   of 16 bytes are always whole. With pages token c / width behind the gathered one has the row that
   its page says, and outer is 1. */
struct nsa__cuda_operand {
    const void *data;
    int64_t head;
    /* NULL, or of each row: batch, row of its first token, compressed row or -1, tokens left; with
       pages: the page and row of the compressed row around its first token's number, sequence */
    const int4 *gather;
    int64_t batch, stride;
    int modulus;
    int64_t jump;
    int width;
    int64_t outer;
    int columns;
    nsa__cuda_operand_pages pages;
};

/* Where row r starts; with pages its sequence and token, in one number. */
NSA__DEVICE int64_t nsa__cuda_operand_row(const nsa__cuda_operand &x, int r) {
    if (x.gather) {
        const int4 at = x.gather[r];
        if (at.z < 0) return -1;
        if (x.pages.table) return static_cast<int64_t>(at.w) << 32 | at.y;
        return x.batch * at.x + x.stride * at.y;
    }
    if (r < x.modulus) return x.stride * r;
    return x.stride * (r % x.modulus) + x.jump * (r / x.modulus);
}

/* Where the row of the token `further` behind that of `start` lies. */
NSA__DEVICE int64_t nsa__cuda_operand_token(const nsa__cuda_operand &x, int64_t start,
                                            int64_t further) {
    if (!x.pages.table) return start + further;
    const nsa__cuda_page_row at =
        nsa__cuda_page_row_of(x.pages.table + (start >> 32) * x.pages.width, x.pages.rows,
                              x.pages.count, static_cast<int>(start + further));
    return x.batch * at.page + x.stride * at.row;
}

/* c of m x n = sum over k, cut into `splits` slices of k; `limit` in device memory, where it is not
   NULL, is the number of rows that there are: of m, or of k where both operands run along k. */
struct nsa__cuda_gemm_shape {
    int m, n, k, splits, heads;
    const int32_t *limit;
};

enum { NSA__GEMM_TILE = 64, NSA__GEMM_THREADS = 128, NSA__GEMM_STAGES = 3 };

/* A tile holds 64 bytes of k. ALONG_K: 64 rows of those 64 bytes; else a row for each k, of 64
   elements. Pieces of 16 bytes change places so that ldmatrix reads eight banks. */
template <typename T, bool ALONG_K> struct nsa__cuda_gemm_tile {
    static constexpr int piece = 16 / sizeof(T);
    static constexpr int block_k = 64 / sizeof(T);
    static constexpr int pieces = ALONG_K ? 4 : 64 / piece; /* of a row */
    static constexpr int step =
        NSA__GEMM_THREADS / pieces; /* rows that one round of copies brings */

    static __device__ __forceinline__ T *at(T *tile, int row, int p) {
        const int turn = ALONG_K ? row >> 1 & 3 : sizeof(T) == 2 ? row & 7 : 0;
        return tile + (row * pieces + (p ^ turn)) * piece;
    }
};

/* One thread's share in bringing tiles of an operand: two pieces a tile, in the same column. */
template <typename T, bool ALONG_K> struct nsa__cuda_gemm_loader {
    typedef nsa__cuda_gemm_tile<T, ALONG_K> tile;
    const T *data;
    int row, p;        /* its first row of the tile, its piece */
    int64_t row_at[2]; /* ALONG_K: where its rows start, -1 outside */
    int64_t column_at; /* else: where its column lies, -1 outside */
    int column;        /* ALONG_K: the column's place in `width` */

    __device__ __forceinline__ void begin(const nsa__cuda_operand &x, int head, int outside,
                                          int rows, int k) {
        data = static_cast<const T *>(x.data) + x.head * head;
        row = static_cast<int>(threadIdx.x) / tile::pieces;
        p = static_cast<int>(threadIdx.x) % tile::pieces;
        const int c = (ALONG_K ? k : outside) + p * tile::piece;
        column_at = c / x.width * x.outer;
        column = c % x.width;
        if (!ALONG_K) column_at = c < x.columns ? column_at + column : -1;
#pragma unroll
        for (int i = 0; ALONG_K && i < 2; i++) {
            const int r = outside + row + i * tile::step;
            row_at[i] = r < rows ? nsa__cuda_operand_row(x, r) : -1;
        }
    }

    /* Starts the copies of the tile at k, of which k .. end - 1 exist, and moves to the next. */
    __device__ __forceinline__ void copy(const nsa__cuda_operand &x, T *to, int k, int end) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int64_t at = -1;
            if (ALONG_K) {
                if (row_at[i] >= 0 && k + p * tile::piece < end)
                    at = nsa__cuda_operand_token(x, row_at[i], column_at) + column;
            } else if (column_at >= 0 && k + row + i * tile::step < end) {
                const int64_t start = nsa__cuda_operand_row(x, k + row + i * tile::step);
                if (start >= 0) at = start + column_at;
            }
            nsa__cp_async<16>(tile::at(to, row + i * tile::step, p), at < 0 ? data : data + at,
                              at < 0 ? 0 : 16);
        }
        column += ALONG_K ? tile::block_k : 0;
        while (ALONG_K && column >= x.width) {
            column -= x.width;
            column_at += x.outer;
        }
    }
};

/* A warp's 32 x 32 values, as m16n8 products lie: acc[i][j] is rows 16 i, columns 8 j. */
template <typename T, bool A_ALONG_K, bool B_ALONG_K>
NSA__DEVICE void nsa__cuda_gemm_multiply(float (&acc)[2][4][4], T *a, T *b, int m, int n) {
    typedef nsa__cuda_gemm_tile<T, A_ALONG_K> a_tile;
    typedef nsa__cuda_gemm_tile<T, B_ALONG_K> b_tile;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int k = 0; k < a_tile::block_k; k += 16) {
        uint32_t fa[2][4], fb[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int ma = m + 16 * i, nb = n + 16 * i;
            if (A_ALONG_K)
                nsa__ldmatrix_x4(fa[i], a_tile::at(a, ma + lane % 16, k / 8 + lane / 16));
            else
                nsa__ldmatrix_x4_trans(
                    fa[i], a_tile::at(a, k + lane / 16 * 8 + lane % 8, ma / 8 + lane / 8 % 2));
            if (B_ALONG_K)
                nsa__ldmatrix_x4(
                    fb[i], b_tile::at(b, nb + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2));
            else
                nsa__ldmatrix_x4_trans(fb[i], b_tile::at(b, k + lane % 16, nb / 8 + lane / 16));
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                nsa__mma_m16n8k16<T>(acc[i][j], fa[i], fb[j / 2][j % 2 * 2],
                                     fb[j / 2][j % 2 * 2 + 1]);
    }
}

/* The same in exact f32, one k after the other. */
template <bool ALONG_K> NSA__DEVICE float nsa__cuda_gemm_element(float *tile, int outside, int k) {
    return ALONG_K ? nsa__cuda_gemm_tile<float, true>::at(tile, outside, k / 4)[k % 4]
                   : nsa__cuda_gemm_tile<float, false>::at(tile, k, outside / 4)[outside % 4];
}
template <bool A_ALONG_K, bool B_ALONG_K>
NSA__DEVICE void nsa__cuda_gemm_multiply_f32(float (&acc)[2][4][4], float *a, float *b, int m,
                                             int n) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4,
              i2 = static_cast<int>(threadIdx.x) % 4 * 2;
    for (int k = 0; k < nsa__cuda_gemm_tile<float, true>::block_k; k++) {
        float fa[4], fb[8];
#pragma unroll
        for (int i = 0; i < 4; i++) fa[i] = nsa__cuda_gemm_element<A_ALONG_K>(a, m + 8 * i + g, k);
#pragma unroll
        for (int j = 0; j < 8; j++)
            fb[j] = nsa__cuda_gemm_element<B_ALONG_K>(b, n + j / 2 * 8 + i2 + j % 2, k);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    acc[i][j][e] = fmaf(fa[2 * i + e / 2], fb[2 * j + e % 2], acc[i][j][e]);
    }
}

/* done(head, split, row, column, x, y) takes the values of two neighbouring columns. Left to itself
   ptxas takes 72 registers for sm_100 and spills; four blocks leave room for 128. */
template <typename T, bool A_ALONG_K, bool B_ALONG_K, typename Done>
static __global__ void __launch_bounds__(NSA__GEMM_THREADS, 4)
    nsa__cuda_gemm_kernel(nsa__cuda_operand a, nsa__cuda_operand b, nsa__cuda_gemm_shape s,
                          Done done) {
    NSA_SHARED(uint4, tiles, [NSA__GEMM_STAGES][2][NSA__GEMM_TILE * 4]);
    constexpr int block_k = nsa__cuda_gemm_tile<T, true>::block_k;
    const int n_tiles = (s.n - 1) / NSA__GEMM_TILE + 1, m_tiles = (s.m - 1) / NSA__GEMM_TILE + 1;
    int block = static_cast<int>(blockIdx.x);
    const int n0 = block % n_tiles * NSA__GEMM_TILE;
    const int m0 = (block /= n_tiles) % m_tiles * NSA__GEMM_TILE;
    const int head = (block /= m_tiles) % s.heads, split = block / s.heads;

    const int m_end = A_ALONG_K && s.limit ? min(s.m, *s.limit) : s.m;
    const int k_end = !A_ALONG_K && s.limit ? min(s.k, *s.limit) : s.k;
    if (m0 >= m_end) return;
    const int slice = ((s.k - 1) / block_k / s.splits + 1) * block_k;
    const int begin = split * slice, end = min(k_end, begin + slice);

    nsa__cuda_gemm_loader<T, A_ALONG_K> from_a;
    nsa__cuda_gemm_loader<T, B_ALONG_K> from_b;
    from_a.begin(a, head, m0, m_end, begin);
    from_b.begin(b, head, n0, s.n, begin);
    auto copy = [&](int stage, int k) {
        if (k < end) {
            from_a.copy(a, reinterpret_cast<T *>(tiles[stage][0]), k, end);
            from_b.copy(b, reinterpret_cast<T *>(tiles[stage][1]), k, end);
        }
        nsa__cp_async_commit();
    };
    copy(0, begin);
    copy(1, begin + block_k);

    float acc[2][4][4] = {};
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int m = warp / 2 * 32, n = warp % 2 * 32;
    int stage = 0;
    for (int k = begin; k < end; k += block_k) {
        nsa__cp_async_wait<1>();
        __syncthreads();
        copy((stage + 2) % NSA__GEMM_STAGES, k + 2 * block_k);
        T *ta = reinterpret_cast<T *>(tiles[stage][0]),
          *tb = reinterpret_cast<T *>(tiles[stage][1]);
        if constexpr (sizeof(T) == 4)
            nsa__cuda_gemm_multiply_f32<A_ALONG_K, B_ALONG_K>(acc, ta, tb, m, n);
        else
            nsa__cuda_gemm_multiply<T, A_ALONG_K, B_ALONG_K>(acc, ta, tb, m, n);
        stage = (stage + 1) % NSA__GEMM_STAGES;
    }

#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const int row = m0 + m + 16 * i + 8 * part + lane / 4;
                const int column = n0 + n + 8 * j + lane % 4 * 2;
                if (row < m_end && column < s.n)
                    done(head, split, row, column, acc[i][j][2 * part], acc[i][j][2 * part + 1]);
            }
}

template <typename T, bool A_ALONG_K, bool B_ALONG_K, typename Done>
static nsa_status nsa__cuda_gemm_run(const nsa__cuda_operand &a, const nsa__cuda_operand &b,
                                     const nsa__cuda_gemm_shape &s, const Done &done,
                                     cudaStream_t stream) {
    const int64_t blocks = nsa__cuda_ceil_div(s.m, NSA__GEMM_TILE) *
                           nsa__cuda_ceil_div(s.n, NSA__GEMM_TILE) * s.heads * s.splits;
    dim3 grid;
    const nsa_status status = nsa__cuda_grid(blocks, &grid);
    if (status != NSA_OK) return status;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_gemm_kernel<T, A_ALONG_K, B_ALONG_K, Done>, grid,
                                       dim3(NSA__GEMM_THREADS), 0, stream, a, b, s, done));
}

#endif

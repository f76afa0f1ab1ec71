/* compress_parts.cuh: the second stage of parameter gradients: parts, summed in order, are added.
   Twin: nsa.h, "Compression", its sums of parameter gradients. Always the same order, so always the
   same bits; no atomics.
   Not here: how parts come to be. */
#ifndef NSA_COMPRESS_PARTS_CUH
#define NSA_COMPRESS_PARTS_CUH

#include "block_index.cuh"

/* Partial sums of a gradient of `rows` x `width` and each head: part p, head h, element e lies at
   data[(p * heads + h) * stride + e]. */
struct nsa__cuda_parts {
    const float *data;
    int count, heads;
    int64_t stride;
    int64_t rows;
    int width;
};

/* What is added besides, of each head: column[r] row[c], `row` the rows of `dim` of a view one
   behind the other. None where column is NULL. */
struct nsa__cuda_outer_product {
    const float *column;
    nsa_tensor row;
    int dim;
};

enum { NSA__PARTS_THREADS = 128 };

/* A head stride of 0 in `to` sums over the heads. */
static __global__ void nsa__cuda_add_parts_kernel(nsa__cuda_parts p, nsa__cuda_outer_product outer,
                                                  nsa_tensor to) {
    const int64_t units = p.rows * (p.width / 8);
    const int64_t item = static_cast<int64_t>(blockIdx.x) * NSA__PARTS_THREADS + threadIdx.x;
    const int first = static_cast<int>(item / units), heads = to.head ? 1 : p.heads;
    if (first >= (to.head ? p.heads : 1)) return;
    const int64_t r = item % units / (p.width / 8);
    const int c = static_cast<int>(item % units % (p.width / 8)) * 8;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, value[8];
    for (int h = first; h < first + heads; h++) {
        for (int part = 0; part < p.count; part++) {
            const int64_t at = (static_cast<int64_t>(part) * p.heads + h) * p.stride;
            nsa__load8(value, NSA_F32, p.data + at + r * p.width, c);
#pragma unroll
            for (int e = 0; e < 8; e++) sum[e] += value[e];
        }
        if (!outer.column) continue;
        nsa__load8(value, outer.row.dtype, nsa__row_at(outer.row, 0, c / outer.dim, h),
                   c % outer.dim);
#pragma unroll
        for (int e = 0; e < 8; e++) sum[e] += outer.column[h * p.rows + r] * value[e];
    }
    nsa__add8(to.dtype, nsa__row_at(to, 0, r, first), c, 1.0f, sum);
}

/* to += sum of parts (+ outer); nothing where the gradient is not asked for. */
static nsa_status nsa__cuda_add_parts(const nsa__cuda_parts *p,
                                      const nsa__cuda_outer_product *outer, const nsa_tensor *to,
                                      cudaStream_t stream) {
    if (!to->data) return NSA_OK;
    const nsa__cuda_outer_product none = {};
    const int64_t units = p->rows * (p->width / 8) * (to->head ? p->heads : 1);
    dim3 grid;
    NSA__CHECK(nsa__cuda_grid(nsa__cuda_ceil_div(units, NSA__PARTS_THREADS), &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_add_parts_kernel, grid, dim3(NSA__PARTS_THREADS),
                                       0, stream, *p, outer ? *outer : none, *to));
}

#endif

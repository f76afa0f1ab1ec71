/* rope.cuh: rotary positions.
   Twin: nsa.h, "RoPE". Frequencies come from nsa.h itself.
   Not here: a fusion with attention; q and each branch's k are rotated once, before all else. */
#ifndef NSA_ROPE_CUH
#define NSA_ROPE_CUH

#include "block_index.cuh"

/* Turns (of 2 pi) that pair i makes from one position to the next, and what the result is scaled
   by. */
struct nsa__cuda_rope_table {
    double turns[NSA__CUDA_MAX_ROW / 2];
    float magnitude;
};

enum { NSA__ROPE_THREADS = 128, NSA__ROPE_HEADS = 8 };

/* A thread takes four pairs of a token, finds their angles once and turns up to NSA__ROPE_HEADS
   heads by them. Whole turns are taken off in f64: a late position keeps its angle's precision.
   Backward turns the other way and adds. */
template <bool BACKWARD>
static __global__ void nsa__cuda_rope_kernel(nsa_desc d, nsa_rope x, nsa_tensor from, nsa_tensor to,
                                             nsa__cuda_extent row_blocks,
                                             nsa__cuda_rope_table table) {
    const int units = x.dim / 8, head_blocks = (x.heads - 1) / NSA__ROPE_HEADS + 1;
    const int block = static_cast<int>(blockIdx.x);
    const nsa__cuda_item rows = nsa__cuda_item_at(d, row_blocks, block / head_blocks);
    const nsa__sequence s = nsa__sequence_of(d, rows.b);
    const int64_t item = rows.local * blockDim.x + threadIdx.x;
    const int64_t row = item / units;
    const int unit = static_cast<int>(item % units);
    if (row >= s.count) return;

    int position = s.first + static_cast<int>(row);
    if (x.positions.data)
        position = *nsa__row_of<const int32_t>(x.positions, s.batch, s.row + row, 0);
    float cosine[4], sine[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const double turns = position * table.turns[4 * unit + i];
        sincospif(static_cast<float>(2 * (turns - rint(turns))), &sine[i], &cosine[i]);
        cosine[i] *= table.magnitude;
        sine[i] *= BACKWARD ? -table.magnitude : table.magnitude;
    }

    const bool halves = x.pairs == NSA_ROPE_HALVES;
    const int low = halves ? 4 * unit : 8 * unit, high = halves ? x.dim / 2 + 4 * unit : low + 4;
    const int first_head = block % head_blocks * NSA__ROPE_HEADS;
    for (int h = first_head; h < min(first_head + NSA__ROPE_HEADS, x.heads); h++) {
        const void *in = nsa__row_at(from, s.batch, s.row + row, h);
        void *out = nsa__row_at(to, s.batch, s.row + row, h);
        float a[4], b[4], u[4] = {0, 0, 0, 0}, v[4] = {0, 0, 0, 0};
        nsa__load4(a, from.dtype, in, low);
        nsa__load4(b, from.dtype, in, high);
        if (BACKWARD) {
            nsa__load4(u, to.dtype, out, low);
            nsa__load4(v, to.dtype, out, high);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            /* pair i: (a[i], b[i]) in halves; (a[0], a[1]) .. (b[2], b[3]) interleaved */
            const float even = halves ? a[i] : i < 2 ? a[2 * i] : b[2 * i - 4];
            const float odd = halves ? b[i] : i < 2 ? a[2 * i + 1] : b[2 * i - 3];
            const float turned_even = even * cosine[i] - odd * sine[i];
            const float turned_odd = odd * cosine[i] + even * sine[i];
            (halves ? u[i] : i < 2 ? u[2 * i] : v[2 * i - 4]) += turned_even;
            (halves ? v[i] : i < 2 ? u[2 * i + 1] : v[2 * i - 3]) += turned_odd;
        }
        nsa__store4(to.dtype, out, low, u);
        nsa__store4(to.dtype, out, high, v);
    }
}

static nsa_status nsa__cuda_rope_check(const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d,
                                       int backward) {
    if (x && (x->dim % 8 || x->dim > NSA__CUDA_MAX_ROW))
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_dim);
    return nsa__rope_check(&nsa__cuda_side, dx, x, d, backward);
}

template <bool BACKWARD>
static nsa_status nsa__cuda_rope_run(const nsa_rope *x, const nsa_desc *d, const nsa_tensor *from,
                                     const nsa_tensor *to, cudaStream_t stream) {
    if (d->count == 0) return NSA_OK;
    nsa__cuda_rope_table table;
    double magnitude;
    nsa__rope_frequencies(x, table.turns, &magnitude);
    for (int i = 0; i < x->dim / 2; i++) table.turns[i] /= 6.283185307179586;
    table.magnitude = static_cast<float>(magnitude);
    const int64_t head_blocks = nsa__cuda_ceil_div(x->heads, NSA__ROPE_HEADS);
    nsa__cuda_extent row_blocks;
    dim3 grid;
    NSA__CHECK(nsa__cuda_row_grid(d, d->count, x->dim / 8, NSA__ROPE_THREADS, &row_blocks, &grid));
    NSA__CHECK(nsa__cuda_grid(row_blocks.total * head_blocks, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_rope_kernel<BACKWARD>, grid,
                                       dim3(NSA__ROPE_THREADS), 0, stream, nsa__cuda_all_queries(d),
                                       *x, *from, *to, row_blocks, table));
}

extern "C" nsa_status nsa_cuda_rope_forward(const nsa_rope *x, const nsa_desc *d,
                                            cudaStream_t stream) {
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    NSA__CHECK(nsa__cuda_rope_check(NULL, x, d, 0));
    return nsa__cuda_rope_run<false>(x, d, &x->x, &x->out, stream);
}

/* dx.x += R^T dx.out */
extern "C" nsa_status nsa_cuda_rope_backward(const nsa_rope *dx, const nsa_rope *x,
                                             const nsa_desc *d, cudaStream_t stream) {
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    NSA__CHECK(nsa__cuda_rope_check(dx, x, d, 1));
    return dx->x.data ? nsa__cuda_rope_run<true>(x, d, &dx->out, &dx->x, stream) : NSA_OK;
}

#endif

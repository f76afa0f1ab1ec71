/* compress.cuh: phi, which makes one row of every l: mean and conv, and the entry points of all
   three.
   Twin: nsa.h, "Compression". Gradients are gathered, never scattered: a thread owns what it adds
   to.
   Not here: mlp (compress_mlp.cuh). */
#ifndef NSA_COMPRESS_CUH
#define NSA_COMPRESS_CUH

#include "compress_mlp.cuh"

enum { NSA__FILTER_THREADS = 128, NSA__FILTER_CHUNK = 64 };

/* Eight channels of row `row` and one kv head; `rows` of a sequence at most. */
struct nsa__cuda_filter_place {
    nsa__sequence s;
    int b, head, c;
    int64_t row;
};

NSA__DEVICE nsa__cuda_filter_place nsa__cuda_filter_place_of(const nsa_desc &d,
                                                             const nsa__cuda_extent &blocks,
                                                             int dim) {
    const int units = dim / 8;
    const nsa__cuda_item block = nsa__cuda_item_at(d, blocks, blockIdx.x);
    const int64_t item = block.local * blockDim.x + threadIdx.x;
    nsa__cuda_filter_place p;
    p.b = block.b;
    p.s = nsa__sequence_of(d, p.b);
    p.c = static_cast<int>(item % units) * 8;
    p.head = static_cast<int>(item / units % d.kv_heads);
    p.row = item / units / d.kv_heads;
    return p;
}

/* out[c] = sum_j w[j][c] x[j][c] + b[c] of eight channels, w = 1 / l for mean; row(j) is where row
   j of the block's l rows lies. Decoding takes the same sum, so its rows have the same bits. */
template <typename Row>
NSA__DEVICE void nsa__cuda_filter_row(float (&out)[8], const nsa_desc &d, const nsa_compress &x,
                                      int head, int channel, Row row) {
    const bool conv = x.phi == NSA_PHI_CONV;
    float w[8], of_x[8];
#pragma unroll
    for (int c = 0; c < 8; c++) out[c] = 0, w[c] = 1.0f / static_cast<float>(d.cmp_block);
    if (conv && x.b1.data) nsa__load8(out, x.b1.dtype, nsa__row_at(x.b1, 0, 0, head), channel);
    for (int j = 0; j < d.cmp_block; j++) {
        if (conv) nsa__load8(w, x.w1.dtype, nsa__row_at(x.w1, 0, j, head), channel);
        nsa__load8(of_x, x.x.dtype, row(j), channel);
#pragma unroll
        for (int c = 0; c < 8; c++) out[c] += w[c] * of_x[c];
    }
}

/* One compressed row: the block of rows i d .. i d + l - 1. */
static __global__ void nsa__cuda_filter_forward_kernel(nsa_desc d, nsa_compress x,
                                                       nsa__cuda_extent blocks,
                                                       const int32_t *cmp_begins) {
    const nsa__cuda_filter_place p = nsa__cuda_filter_place_of(d, blocks, x.dim);
    const nsa__cmp_span made = nsa__cmp_made(d, p.s);
    if (p.row >= made.end - made.begin) return;
    const int i = made.begin + static_cast<int>(p.row);
    float out[8];
    nsa__cuda_filter_row(out, d, x, p.head, p.c, [&](int j) {
        const int64_t at = nsa__cuda_key_offset(d, x.x, p.s, p.b, false, p.s.key_row,
                                                i * d.cmp_stride + j, p.head);
        return nsa__element_at(x.x, at);
    });
    const int64_t to =
        nsa__cuda_key_offset(d, x.out, p.s, p.b, true, nsa__cmp_row(d, cmp_begins, p.b), i, p.head);
    nsa__store8(x.out.dtype, nsa__element_at(x.out, to), p.c, out);
}

/* dx[t][c] += sum over the blocks i that cover t of w[t - i d][c] dout[i][c]. */
static __global__ void nsa__cuda_filter_input_gradient_kernel(nsa_desc d, nsa_compress x,
                                                              nsa_compress dx, bool is_sum,
                                                              nsa__cuda_extent blocks,
                                                              const int32_t *cmp_begins) {
    const nsa__cuda_filter_place p = nsa__cuda_filter_place_of(d, blocks, x.dim);
    if (p.row >= p.s.tokens) return;
    const int t = static_cast<int>(p.row), count = nsa__cmp_count(d, p.s.tokens);
    const int begin = t < d.cmp_block ? 0 : (t - d.cmp_block) / d.cmp_stride + 1;
    const int64_t first = nsa__cmp_row(d, cmp_begins, p.b);
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, w[8], row[8];
#pragma unroll
    for (int c = 0; c < 8; c++) w[c] = 1.0f / static_cast<float>(d.cmp_block);
    for (int i = begin; i < min(count, t / d.cmp_stride + 1); i++) {
        if (x.phi == NSA_PHI_CONV)
            nsa__load8(w, x.w1.dtype, nsa__row_at(x.w1, 0, t - i * d.cmp_stride, p.head), p.c);
        nsa__load8(row, dx.out.dtype, nsa__row_at(dx.out, p.s.batch, first + i, p.head), p.c);
#pragma unroll
        for (int c = 0; c < 8; c++) sum[c] += w[c] * row[c];
    }
    const int64_t to = is_sum ? nsa__cuda_sum_row(d, p.s.row + t) : p.s.row + t;
    nsa__add8(dx.x.dtype, nsa__row_at(dx.x, p.s.batch, to, p.head), p.c, 1.0f, sum);
}

/* Part `part` of dw[j][c] = sum_i dout[i][c] x[i d + j][c] and, as row l, of db[c] = sum_i
   dout[i][c]: of all chunks of NSA__FILTER_CHUNK blocks, every parts-th. parts[part][head][l +
   1][D]. */
static __global__ void nsa__cuda_conv_parameter_gradient_kernel(nsa_desc d, nsa_compress x,
                                                                nsa_tensor dout, float *parts,
                                                                int part_count,
                                                                nsa__cuda_extent chunks,
                                                                const int32_t *cmp_begins) {
    const int units = x.dim / 8, items = (d.cmp_block + 1) * units;
    const int blocks = (items - 1) / NSA__FILTER_THREADS + 1, block = static_cast<int>(blockIdx.x);
    const int item = block % blocks * NSA__FILTER_THREADS + static_cast<int>(threadIdx.x);
    const int head = block / blocks % d.kv_heads, part = block / blocks / d.kv_heads;
    const int j = item / units, c = item % units * 8;
    if (item >= items) return;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, grad[8], row[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int64_t at = part; at < chunks.total; at += part_count) {
        const nsa__cuda_item chunk = nsa__cuda_item_at(d, chunks, at);
        const nsa__sequence s = nsa__sequence_of(d, chunk.b);
        const int64_t first = nsa__cmp_row(d, cmp_begins, chunk.b);
        const int begin = static_cast<int>(chunk.local) * NSA__FILTER_CHUNK;
        const int end = min(begin + NSA__FILTER_CHUNK, nsa__cmp_count(d, s.tokens));
        for (int i = begin; i < end; i++) {
            const int64_t token = s.row + static_cast<int64_t>(i) * d.cmp_stride + j;
            nsa__load8(grad, dout.dtype, nsa__row_at(dout, s.batch, first + i, head), c);
            if (j < d.cmp_block)
                nsa__load8(row, x.x.dtype, nsa__row_at(x.x, s.batch, token, head), c);
#pragma unroll
            for (int e = 0; e < 8; e++) sum[e] += grad[e] * row[e];
        }
    }
    const int64_t at = static_cast<int64_t>(part * d.kv_heads + head) * (d.cmp_block + 1) + j;
    nsa__store8(NSA_F32, parts + at * x.dim, c, sum);
}

/* ---- What a call needs of the workspace, and its launches ------------------------------------ */

struct nsa__cuda_filter_plan {
    int32_t *cmp_begins;
    float *parts;
    int part_count;
    nsa__cuda_extent chunks; /* of compressed rows */
};

static nsa__cuda_filter_plan nsa__cuda_filter_plan_of(const nsa_compress *x, const nsa_desc *d,
                                                      int backward, nsa__arena *a) {
    nsa__cuda_filter_plan p;
    p.cmp_begins = nsa__cuda_take<int32_t>(a, d->begins ? d->batch + int64_t(1) : 0);
    p.chunks =
        nsa__cuda_extent_of(d, nsa__cuda_ceil_div(nsa_cmp_count(d, d->tokens), NSA__FILTER_CHUNK),
                            1, static_cast<int64_t>(d->cmp_stride) * NSA__FILTER_CHUNK, 1);
    /* as many as of one sequence of all the rows */
    const int64_t full = p.chunks.total - (p.chunks.packed ? d->batch : 0);
    p.part_count = static_cast<int>(full < 1 ? 1 : full < 128 ? full : 128);
    const bool sums = backward && x->phi == NSA_PHI_CONV;
    p.parts = nsa__cuda_take<float>(a, sums ? static_cast<int64_t>(p.part_count) * d->kv_heads *
                                                  (d->cmp_block + 1) * x->dim
                                            : 0);
    return p;
}

/* Threads for `rows` rows of a sequence, one for every `stride` of its tokens. Those that a ragged
   batch makes may be one more. */
static nsa_status nsa__cuda_filter_grid(const nsa_desc *d, int64_t rows, int stride, int dim,
                                        nsa__cuda_extent *blocks, dim3 *grid) {
    const int64_t of_row = static_cast<int64_t>(d->kv_heads) * (dim / 8);
    const int64_t more = d->counts ? of_row / NSA__FILTER_THREADS + 1 : 0;
    *blocks = nsa__cuda_cmp_made_extent(d, nsa__cuda_ceil_div(rows * of_row, NSA__FILTER_THREADS),
                                        of_row, static_cast<int64_t>(NSA__FILTER_THREADS) * stride,
                                        static_cast<int>(more + 1));
    return nsa__cuda_grid(blocks->total, grid);
}

static nsa_status nsa__cuda_filter_forward(const nsa_compress *x, const nsa_desc *d,
                                           void *workspace, cudaStream_t stream) {
    nsa__arena a = nsa__cuda_arena_at(workspace);
    const nsa__cuda_filter_plan p = nsa__cuda_filter_plan_of(x, d, 0, &a);
    nsa__cuda_extent blocks;
    dim3 grid;
    NSA__CHECK(nsa__cuda_filter_grid(d, nsa__cuda_cmp_made_most(d), d->cmp_stride, x->dim, &blocks,
                                     &grid));
    if (d->begins) NSA__CHECK(nsa__cuda_cmp_begins(d, p.cmp_begins, stream));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_filter_forward_kernel, grid,
                                       dim3(NSA__FILTER_THREADS), 0, stream,
                                       nsa__cuda_all_queries(d), *x, blocks, p.cmp_begins));
}

static nsa_status nsa__cuda_filter_backward(const nsa_compress *dx, const nsa_compress *x,
                                            const nsa_desc *d, bool is_sum, void *workspace,
                                            cudaStream_t stream) {
    nsa__arena a = nsa__cuda_arena_at(workspace);
    const nsa__cuda_filter_plan p = nsa__cuda_filter_plan_of(x, d, 1, &a);
    nsa_status s = d->begins ? nsa__cuda_cmp_begins(d, p.cmp_begins, stream) : NSA_OK;
    nsa__cuda_extent blocks;
    dim3 grid;
    if (s == NSA_OK && dx->x.data) {
        NSA__CHECK(nsa__cuda_filter_grid(d, d->tokens, 1, x->dim, &blocks, &grid));
        s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_filter_input_gradient_kernel, grid,
                                        dim3(NSA__FILTER_THREADS), 0, stream, *d, *x, *dx, is_sum,
                                        blocks, p.cmp_begins));
    }
    if (s != NSA_OK || x->phi != NSA_PHI_CONV || (!dx->w1.data && !dx->b1.data)) return s;
    const int64_t rows = d->cmp_block + int64_t(1), part = rows * x->dim;
    NSA__CHECK(nsa__cuda_grid(p.part_count * d->kv_heads *
                                  nsa__cuda_ceil_div(rows * (x->dim / 8), NSA__FILTER_THREADS),
                              &grid));
    s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_conv_parameter_gradient_kernel, grid,
                                    dim3(NSA__FILTER_THREADS), 0, stream, *d, *x, dx->out, p.parts,
                                    p.part_count, p.chunks, p.cmp_begins));
    const nsa__cuda_parts w1 = {p.parts, p.part_count, d->kv_heads, part, d->cmp_block, x->dim};
    const nsa__cuda_parts b1 = {
        p.parts + part - x->dim, p.part_count, d->kv_heads, part, 1, x->dim};
    if (s == NSA_OK) s = nsa__cuda_add_parts(&w1, NULL, &dx->w1, stream);
    return s == NSA_OK ? nsa__cuda_add_parts(&b1, NULL, &dx->b1, stream) : s;
}

/* ---- Doors ---------------------------------------------------------------------------------- */

static nsa_status nsa__cuda_compress_check_sizes(const nsa_compress *x, const nsa_desc *d,
                                                 int base) {
    nsa_desc own;
    NSA__CHECK(nsa__cuda_check_desc(nsa__desc_using(d, NSA__USES_CMP, &own)));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    if (static_cast<unsigned>(x->phi) > NSA_PHI_MLP)
        return nsa__error(NSA_ERROR_OPTION, base + NSA__AT_phi);
    if (x->dim < 8 || x->dim > NSA__CUDA_MAX_ROW || x->dim % 8)
        return nsa__error(NSA_ERROR_SIZE, base + NSA__AT_dim);
    const bool mlp = x->phi == NSA_PHI_MLP;
    if (mlp && (x->hidden < 8 || x->hidden % 8))
        return nsa__error(NSA_ERROR_SIZE, base + NSA__AT_hidden);
    const int64_t rows = nsa__cuda_mlp_rows(d), flat = static_cast<int64_t>(d->cmp_block) * x->dim;
    if (flat > INT32_MAX / 64 || (mlp && (x->hidden > INT32_MAX / 64 || rows > INT32_MAX / 64)) ||
        (mlp && !nsa__fits(x->hidden, d->kv_heads, rows > flat ? rows : flat, 8)))
        return nsa__error(NSA_ERROR_OVERFLOW, base + NSA__AT_hidden);
    return NSA_OK;
}

/* `base` is what the chain adds to the names of the fields. */
static nsa_status nsa__cuda_compress_check(const nsa_compress *x, const nsa_desc *d, int forward,
                                           int base) {
    NSA__CHECK(nsa__cuda_compress_check_sizes(x, d, base));
    const bool one = x->phi == NSA_PHI_MLP && d->tokens; /* without rows x may have any dtype */
    const unsigned dtypes =
        one ? nsa__cuda_one_dtype(x->x.dtype) : static_cast<unsigned>(NSA__FLOATS);
    const nsa__checked c = nsa__cuda_checked_of(d, dtypes, forward, 0);
    return nsa__check_phi(&c, x, base);
}

static size_t nsa__cuda_compress_bytes(const nsa_compress *x, const nsa_desc *d, int backward) {
    nsa__arena a = {NULL, 0};
    if (x->phi == NSA_PHI_MLP)
        nsa__cuda_mlp_plan_of(x, d, backward, &a);
    else
        nsa__cuda_filter_plan_of(x, d, backward, &a);
    return nsa__cuda_arena_bytes(&a);
}

extern "C" size_t nsa_cuda_compress_forward_workspace_size(const nsa_compress *x,
                                                           const nsa_desc *d) {
    return nsa__cuda_compress_check_sizes(x, d, 0) == NSA_OK ? nsa__cuda_compress_bytes(x, d, 0)
                                                             : 0;
}
extern "C" size_t nsa_cuda_compress_backward_workspace_size(const nsa_compress *x,
                                                            const nsa_desc *d) {
    if (nsa__cuda_compress_check_sizes(x, d, 0) != NSA_OK || nsa__check_backward(d, 1) != NSA_OK)
        return 0;
    return nsa__cuda_compress_bytes(x, d, 1);
}

/* The launches alone, for the entry point and for the chain, where dx.x may be a sum. */
static nsa_status nsa__cuda_compress_forward_run(const nsa_compress *x, const nsa_desc *d,
                                                 void *workspace, cudaStream_t stream) {
    if (nsa_cmp_count(d, d->tokens) == 0) return NSA_OK;
    if (d->counts && !d->begins && d->count == 0) return NSA_OK; /* begins may end behind firsts */
    return x->phi == NSA_PHI_MLP ? nsa__cuda_mlp_forward(x, d, workspace, stream)
                                 : nsa__cuda_filter_forward(x, d, workspace, stream);
}
static nsa_status nsa__cuda_compress_backward_run(const nsa_compress *dx, const nsa_compress *x,
                                                  const nsa_desc *d, bool is_sum, void *workspace,
                                                  cudaStream_t stream) {
    if (nsa_cmp_count(d, d->tokens) == 0) return NSA_OK;
    return x->phi == NSA_PHI_MLP ? nsa__cuda_mlp_backward(dx, x, d, is_sum, workspace, stream)
                                 : nsa__cuda_filter_backward(dx, x, d, is_sum, workspace, stream);
}

extern "C" nsa_status nsa_cuda_compress_forward(const nsa_compress *x, const nsa_desc *d,
                                                void *workspace, size_t bytes,
                                                cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_compress_check(x, d, 1, 0));
    nsa_status s = nsa__cuda_check_workspace(nsa__cuda_compress_bytes(x, d, 0), workspace, bytes);
    return s == NSA_OK ? nsa__cuda_compress_forward_run(x, d, workspace, stream) : s;
}

extern "C" nsa_status nsa_cuda_compress_backward(const nsa_compress *dx, const nsa_compress *x,
                                                 const nsa_desc *d, void *workspace, size_t bytes,
                                                 cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_compress_check(x, d, 0, 0));
    NSA__CHECK(nsa__check_backward(d, 1));
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(nsa__cuda_check_rows(&dx->out, nsa__cuda_key_shape(d, 1, x->dim), NSA__FLOATS, 0,
                                    NSA__AT_out | NSA__GRADIENT));
    NSA__CHECK(nsa__check_phi_gradient(&nsa__cuda_side, dx, x, d, 0));
    nsa_status s = nsa__cuda_check_workspace(nsa__cuda_compress_bytes(x, d, 1), workspace, bytes);
    return s == NSA_OK ? nsa__cuda_compress_backward_run(dx, x, d, false, workspace, stream) : s;
}

#endif

/* compress_mlp.cuh: phi = mlp, h = w1 flatten(x + pos) + b1, out = w2 silu(h) + b2, as six
   products.
   Twin: nsa.h, "Compression", its mlp.
   Not here: the product itself (compress_gemm.cuh).

   pos is the same for every block, so w1 pos joins b1 as one f32 bias, and the gathered rows of x
   enter the product as they lie. Backward, with s = the sum of dh over all blocks: db1 = s, dpos =
   w1^T s, and pos adds s pos^T to dw1.

   Rows of the products are the compressed rows of all sequences, with `lead` = l / d - 1 empty
   rows before the first, between two and behind the last. Row r and the lead rows before it are
   then the blocks that cover the d tokens at r, and dx of those tokens is one product over them. */
#ifndef NSA_COMPRESS_MLP_CUH
#define NSA_COMPRESS_MLP_CUH

#include "compress_gemm.cuh"
#include "compress_parts.cuh"

/* The fewest rows of a slice of a product; tests define it small. */
#ifndef NSA__MLP_SPLIT_ROWS
#define NSA__MLP_SPLIT_ROWS 256
#endif

/* How many rows, at most. */
static int64_t nsa__cuda_mlp_rows(const nsa_desc *d) {
    const int64_t lead = d->cmp_block / d->cmp_stride - 1;
    return nsa__cuda_cmp_made_extent(d, nsa__cuda_cmp_made_most(d), 1, d->cmp_stride,
                                     d->counts != NULL)
               .total +
           (d->batch + 1) * lead;
}

enum { NSA__MLP_THREADS = 128, NSA__MLP_COLUMN_PARTS = 64, NSA__MLP_BLOCKS = 512 };

/* What a call takes of the workspace. */
struct nsa__cuda_mlp_plan {
    int lead, rows, flat; /* flat: l D */
    int32_t *cmp_begins;
    int32_t *count; /* rows there are; and less `lead` */
    int4 *gather;   /* nsa__cuda_operand says of what */
    float *bias;    /* (Hk, hidden) */
    void *act;      /* (Hk, rows, hidden): silu(h), rounded */
    float *slope;   /* likewise: silu'(h) */
    void *dh;       /* likewise, rounded; rows that are no block are zeros */
    void *dout;     /* (Hk, rows, D), likewise */
    float *dh_sum;  /* (Hk, hidden) */
    float *parts;
    int splits_w1, splits_w2, column_parts;
};

/* Slices of the rows, so that a product with few tiles still fills the device. */
static int nsa__cuda_mlp_splits(int64_t m, int64_t n, int heads, int rows) {
    const int64_t tiles =
        nsa__cuda_ceil_div(m, NSA__GEMM_TILE) * nsa__cuda_ceil_div(n, NSA__GEMM_TILE) * heads;
    const int64_t most = nsa__cuda_ceil_div(rows, NSA__MLP_SPLIT_ROWS);
    const int64_t wanted = nsa__cuda_ceil_div(NSA__MLP_BLOCKS, tiles);
    return static_cast<int>(wanted < most ? wanted : most);
}

static nsa__cuda_mlp_plan nsa__cuda_mlp_plan_of(const nsa_compress *x, const nsa_desc *d,
                                                int backward, nsa__arena *a) {
    const int64_t heads = d->kv_heads, hidden = x->hidden, dim = x->dim;
    const int64_t element = static_cast<int64_t>(nsa__dtype_bytes(x->x.dtype));
    nsa__cuda_mlp_plan p;
    p.lead = d->cmp_block / d->cmp_stride - 1;
    p.rows = static_cast<int>(nsa__cuda_mlp_rows(d));
    p.flat = d->cmp_block * x->dim;
    p.cmp_begins = nsa__cuda_take<int32_t>(a, d->begins ? d->batch + int64_t(1) : 0);
    p.count = nsa__cuda_take<int32_t>(a, 2);
    p.gather = nsa__cuda_take<int4>(a, p.rows);
    p.bias = nsa__cuda_take<float>(a, heads * hidden);
    p.act = nsa__cuda_take<char>(a, heads * p.rows * hidden * element);
    if (!backward) return p;
    p.slope = nsa__cuda_take<float>(a, heads * p.rows * hidden);
    p.dh = nsa__cuda_take<char>(a, heads * p.rows * hidden * element);
    p.dout = nsa__cuda_take<char>(a, heads * p.rows * dim * element);
    p.dh_sum = nsa__cuda_take<float>(a, heads * hidden);
    p.splits_w1 = nsa__cuda_mlp_splits(hidden, p.flat, d->kv_heads, p.rows);
    p.splits_w2 = nsa__cuda_mlp_splits(dim, hidden, d->kv_heads, p.rows);
    p.column_parts = p.rows < NSA__MLP_COLUMN_PARTS ? p.rows : NSA__MLP_COLUMN_PARTS;
    const int64_t w1 = p.splits_w1 * heads * hidden * p.flat;
    const int64_t w2 = p.splits_w2 * heads * hidden * dim;
    const int64_t columns = p.column_parts * heads * (hidden > dim ? hidden : dim);
    p.parts = nsa__cuda_take<float>(a, w1 > w2 ? (w1 > columns ? w1 : columns)
                                               : (w2 > columns ? w2 : columns));
    return p;
}

/* ---- Kernels beside the products ------------------------------------------------------------- */

/* Compressed rows that are made of the sequences before b. */
NSA__DEVICE int nsa__cuda_mlp_before(const nsa_desc &d, const int32_t *cmp_begins, int b) {
    if (!d.counts) return d.begins ? cmp_begins[b] : b * nsa__cmp_count(d, d.tokens);
    nsa__cuda_ragged_walk walk = {0, 0};
    int rows = 0;
    for (int i = 0; i < b; i++) {
        const nsa__sequence s = nsa__sequence_ragged(d, i, walk.row, walk.place);
        const nsa__cmp_span made = nsa__cmp_made(d, s);
        rows += made.end - made.begin;
        nsa__cuda_ragged_next(walk, d, s, i);
    }
    return rows;
}

/* Fills `gather` for the rows of a sequence; the rest of it was set to -1 before. */
static __global__ void nsa__cuda_mlp_gather_kernel(nsa_desc d, const int32_t *cmp_begins, int lead,
                                                   nsa__cuda_extent blocks, int4 *gather,
                                                   int32_t *count) {
    const nsa__cuda_item block = nsa__cuda_item_at(d, blocks, blockIdx.x);
    const int b = block.b;
    const int i = static_cast<int>(block.local * blockDim.x + threadIdx.x);
    const nsa__sequence s = nsa__sequence_of(d, b);
    const nsa__cmp_span made = nsa__cmp_made(d, s);
    const int n = made.end - made.begin, token = (made.begin + i) * d.cmp_stride;
    const int row = nsa__cuda_mlp_before(d, cmp_begins, b) + (b + 1) * lead + i;
    if (i < n + lead) {
        int4 at = make_int4(static_cast<int>(s.key_batch), static_cast<int>(s.key_row) + token,
                            static_cast<int>(nsa__cmp_row(d, cmp_begins, b)) + made.begin + i,
                            s.tokens - token);
        if (d.pages && i < n) {
            const nsa__cuda_page_row out = nsa__cuda_key_page(d, b, true, made.begin + i);
            at = make_int4(out.page, token, out.row, b);
        }
        if (i >= n) at.z = -1;
        gather[row] = at;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        count[0] = nsa__cuda_mlp_before(d, cmp_begins, d.batch) + (d.batch + 1) * lead;
        count[1] = count[0] - lead;
    }
}

/* bias[h][n] = b1[n] + sum_k w1[n][k] pos[k]: a warp for each. */
static __global__ void nsa__cuda_mlp_bias_kernel(nsa_compress x, int heads, int flat, float *bias) {
    const int item =
        static_cast<int>(blockIdx.x) * (NSA__MLP_THREADS / 32) + static_cast<int>(threadIdx.x) / 32;
    const int head = item / x.hidden, n = item % x.hidden,
              lane = static_cast<int>(threadIdx.x) % 32;
    if (head >= heads) return;
    float sum = 0, w[8], pos[8];
    for (int k = lane * 8; x.pos.data && k < flat; k += 32 * 8) {
        nsa__load8(w, x.w1.dtype, nsa__row_at(x.w1, 0, n, head), k);
        nsa__load8(pos, x.pos.dtype, nsa__row_at(x.pos, 0, k / x.dim, head), k % x.dim);
#pragma unroll
        for (int e = 0; e < 8; e++) sum += w[e] * pos[e];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane != 0) return;
    if (x.b1.data) sum += nsa__load1(x.b1.dtype, nsa__row_at(x.b1, 0, 0, head), n);
    bias[item] = sum;
}

/* dout by rows of the products, rounded to the dtype of the products; zeros where there is no
   block. */
static __global__ void nsa__cuda_mlp_dout_kernel(nsa_tensor dout, nsa_dtype dtype, int heads,
                                                 int dim, int rows, const int4 *gather,
                                                 const int32_t *count, void *to) {
    const int units = dim / 8;
    const int64_t item = static_cast<int64_t>(blockIdx.x) * NSA__MLP_THREADS + threadIdx.x;
    const int row = static_cast<int>(item / units % rows),
              head = static_cast<int>(item / units / rows);
    const int c = static_cast<int>(item % units) * 8;
    if (head >= heads || row >= *count) return;
    const int4 at = gather[row];
    float value[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (at.z >= 0) nsa__load8(value, dout.dtype, nsa__row_at(dout, at.x, at.z, head), c);
    const nsa_tensor packed = {to, dtype, 0, dim, static_cast<int64_t>(rows) * dim};
    nsa__store8(dtype, nsa__row_at(packed, 0, row, head), c, value);
}

/* parts[part][head][width]: sums over a slice of the rows of (heads, rows, width). */
static __global__ void nsa__cuda_mlp_column_sums_kernel(const void *x, nsa_dtype dtype, int heads,
                                                        int rows, int width, int part_count,
                                                        const int32_t *count, float *parts) {
    const int64_t item = static_cast<int64_t>(blockIdx.x) * NSA__MLP_THREADS + threadIdx.x;
    const int units = width / 8, c = static_cast<int>(item % units) * 8;
    const int head = static_cast<int>(item / units % heads),
              part = static_cast<int>(item / units / heads);
    if (part >= part_count) return;
    const nsa_tensor view = {const_cast<void *>(x), dtype, 0, width,
                             static_cast<int64_t>(rows) * width};
    const int slice = (rows - 1) / part_count + 1, end = min(min(rows, *count), (part + 1) * slice);
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, value[8];
    for (int row = part * slice; row < end; row++) {
        nsa__load8(value, dtype, nsa__row_at(view, 0, row, head), c);
#pragma unroll
        for (int e = 0; e < 8; e++) sum[e] += value[e];
    }
    nsa__store8(NSA_F32, parts + (static_cast<int64_t>(part) * heads + head) * width, c, sum);
}

/* dpos[k] += sum_n dh_sum[n] w1[n][k], over the heads too where they share dpos. */
static __global__ void nsa__cuda_mlp_dpos_kernel(nsa_compress x, nsa_tensor dpos, int heads,
                                                 int flat, const float *dh_sum) {
    const int item =
        static_cast<int>(blockIdx.x) * NSA__MLP_THREADS + static_cast<int>(threadIdx.x);
    const int k = item % (flat / 8) * 8, first = item / (flat / 8), shared = dpos.head ? 1 : heads;
    if (first >= (dpos.head ? heads : 1)) return;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, w[8];
    for (int h = first; h < first + shared; h++)
        for (int n = 0; n < x.hidden; n++) {
            nsa__load8(w, x.w1.dtype, nsa__row_at(x.w1, 0, n, h), k);
#pragma unroll
            for (int e = 0; e < 8; e++) sum[e] += dh_sum[h * x.hidden + n] * w[e];
        }
    nsa__add8(dpos.dtype, nsa__row_at(dpos, 0, k / x.dim, first), k % x.dim, 1.0f, sum);
}

/* ---- What becomes of the products' values ---------------------------------------------------- */

/* act = silu(h), slope = silu'(h) = sigmoid(h) (1 + h (1 - sigmoid(h))) */
template <typename T> struct nsa__cuda_mlp_hidden_done {
    const float *bias;
    T *act;
    float *slope; /* NULL in forward */
    int rows, hidden;
    __device__ __forceinline__ void operator()(int head, int, int row, int n, float x,
                                               float y) const {
        const int64_t at = (static_cast<int64_t>(head) * rows + row) * hidden + n;
        const float h[2] = {x + bias[head * hidden + n], y + bias[head * hidden + n + 1]};
        const float s[2] = {1.0f / (1.0f + expf(-h[0])), 1.0f / (1.0f + expf(-h[1]))};
        nsa__store_pair(act + at, h[0] * s[0], h[1] * s[1]);
        if (slope)
            nsa__store_pair(slope + at, s[0] * (1.0f + h[0] * (1.0f - s[0])),
                            s[1] * (1.0f + h[1] * (1.0f - s[1])));
    }
};

/* out = w2 act + b2, to the compressed rows */
template <typename T> struct nsa__cuda_mlp_out_done {
    nsa_tensor out, b2;
    const int4 *gather;
    __device__ __forceinline__ void operator()(int head, int, int row, int c, float x,
                                               float y) const {
        const int4 at = gather[row];
        if (at.z < 0) return;
        if (b2.data) {
            x += nsa__load1(b2.dtype, nsa__row_at(b2, 0, 0, head), c);
            y += nsa__load1(b2.dtype, nsa__row_at(b2, 0, 0, head), c + 1);
        }
        nsa__store_pair(nsa__row_of<T>(out, at.x, at.z, head) + c, x, y);
    }
};

/* dh = (w2^T dout) slope */
template <typename T> struct nsa__cuda_mlp_dh_done {
    const float *slope;
    T *dh;
    int rows, hidden;
    __device__ __forceinline__ void operator()(int head, int, int row, int n, float x,
                                               float y) const {
        const int64_t at = (static_cast<int64_t>(head) * rows + row) * hidden + n;
        nsa__store_pair(dh + at, x * slope[at], y * slope[at + 1]);
    }
};

/* dx of token u of the d tokens at a row, u = column / D */
struct nsa__cuda_mlp_dx_done {
    nsa_tensor dx;
    const int4 *gather; /* of row 0 of the product */
    int dim;
    nsa_desc d;
    bool is_sum;
    __device__ __forceinline__ void operator()(int head, int, int row, int column, float x,
                                               float y) const {
        const int4 at = gather[row];
        const int u = column / dim, c = column % dim;
        if (u >= at.w) return;
        const int64_t nth = is_sum ? nsa__cuda_sum_row(d, at.y + u) : at.y + u;
        void *to = nsa__row_at(dx, at.x, nth, head);
        nsa__store1(dx.dtype, to, c, nsa__load1(dx.dtype, to, c) + x);
        nsa__store1(dx.dtype, to, c + 1, nsa__load1(dx.dtype, to, c + 1) + y);
    }
};

struct nsa__cuda_mlp_parts_done {
    float *parts;
    int heads, m, n;
    __device__ __forceinline__ void operator()(int head, int split, int row, int column, float x,
                                               float y) const {
        const int64_t at = (static_cast<int64_t>(split) * heads + head) * m + row;
        nsa__store_pair(parts + at * n + column, x, y);
    }
};

/* ---- Launches -------------------------------------------------------------------------------- */

/* (heads, rows, columns), packed. */
static nsa__cuda_operand nsa__cuda_packed_operand(const void *data, int64_t rows, int columns) {
    const nsa__cuda_operand x = {data, rows * columns, NULL, 0,       columns, INT32_MAX,
                                 0,    columns,        0,    columns, {}};
    return x;
}

/* A parameter: (Hk, rows, columns). */
static nsa__cuda_operand nsa__cuda_parameter_operand(const nsa_tensor *w, int columns) {
    const nsa__cuda_operand x = {w->data, w->head, NULL, 0,       w->token, INT32_MAX,
                                 0,       columns, 0,    columns, {}};
    return x;
}

/* The flattened windows of x: row r is l rows of D from the gathered token on. */
static nsa__cuda_operand nsa__cuda_window_operand(const nsa_compress *x, const nsa_desc *d,
                                                  const nsa__cuda_mlp_plan *p) {
    nsa__cuda_operand o = {x->x.data, x->x.head, p->gather,  x->x.batch, x->x.token, INT32_MAX,
                           0,         x->dim,    x->x.token, p->flat,    {}};
    if (d->pages) {
        o.pages = {d->pages, d->table_width, d->page_tokens, d->page_count};
        o.outer = 1;
    }
    return o;
}

static nsa_status nsa__cuda_mlp_prepare(const nsa_compress *x, const nsa_desc *d,
                                        const nsa__cuda_mlp_plan *p, cudaStream_t stream) {
    nsa_status s = d->begins ? nsa__cuda_cmp_begins(d, p->cmp_begins, stream) : NSA_OK;
    if (s == NSA_OK)
        s = nsa__cuda_status(
            nsa__memset(p->gather, 0xff, sizeof(int4) * static_cast<size_t>(p->rows), stream));
    /* `lead` rows more than the compressed ones */
    const int64_t most = nsa__cuda_cmp_made_most(d) + p->lead;
    const nsa__cuda_extent blocks =
        nsa__cuda_cmp_made_extent(d, nsa__cuda_ceil_div(most, NSA__MLP_THREADS), 1,
                                  static_cast<int64_t>(d->cmp_stride) * NSA__MLP_THREADS,
                                  (p->lead + 1) / NSA__MLP_THREADS + 2);
    dim3 grid;
    if (s == NSA_OK) s = nsa__cuda_grid(blocks.total, &grid);
    if (s == NSA_OK)
        s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_mlp_gather_kernel, grid, dim3(NSA__MLP_THREADS),
                                        0, stream, nsa__cuda_all_queries(d), p->cmp_begins, p->lead,
                                        blocks, p->gather, p->count));
    if (s == NSA_OK)
        s = nsa__cuda_grid(nsa__cuda_ceil_div(static_cast<int64_t>(d->kv_heads) * x->hidden,
                                              NSA__MLP_THREADS / 32),
                           &grid);
    if (s == NSA_OK)
        s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_mlp_bias_kernel, grid, dim3(NSA__MLP_THREADS), 0,
                                        stream, *x, d->kv_heads, p->flat, p->bias));
    return s;
}

/* act, and in backward slope */
template <typename T>
static nsa_status nsa__cuda_mlp_hidden(const nsa_compress *x, const nsa_desc *d,
                                       const nsa__cuda_mlp_plan *p, float *slope,
                                       cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_mlp_prepare(x, d, p, stream));
    const nsa__cuda_gemm_shape shape = {p->rows, x->hidden, p->flat, 1, d->kv_heads, p->count};
    const nsa__cuda_mlp_hidden_done<T> done = {p->bias, static_cast<T *>(p->act), slope, p->rows,
                                               x->hidden};
    return nsa__cuda_gemm_run<T, true, true>(nsa__cuda_window_operand(x, d, p),
                                             nsa__cuda_parameter_operand(&x->w1, p->flat), shape,
                                             done, stream);
}

template <typename T>
static nsa_status nsa__cuda_mlp_forward_as(const nsa_compress *x, const nsa_desc *d,
                                           void *workspace, cudaStream_t stream) {
    nsa__arena a = nsa__cuda_arena_at(workspace);
    const nsa__cuda_mlp_plan p = nsa__cuda_mlp_plan_of(x, d, 0, &a);
    NSA__CHECK(nsa__cuda_mlp_hidden<T>(x, d, &p, NULL, stream));
    const nsa__cuda_gemm_shape shape = {p.rows, x->dim, x->hidden, 1, d->kv_heads, p.count};
    const nsa__cuda_mlp_out_done<T> done = {x->out, x->b2, p.gather};
    return nsa__cuda_gemm_run<T, true, true>(nsa__cuda_packed_operand(p.act, p.rows, x->hidden),
                                             nsa__cuda_parameter_operand(&x->w2, x->hidden), shape,
                                             done, stream);
}

/* dh of every block, by rows of the products */
template <typename T>
static nsa_status nsa__cuda_mlp_dh(const nsa_compress *dx, const nsa_compress *x, const nsa_desc *d,
                                   const nsa__cuda_mlp_plan *p, cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_mlp_hidden<T>(x, d, p, p->slope, stream));
    dim3 grid;
    const int64_t items = static_cast<int64_t>(d->kv_heads) * p->rows * (x->dim / 8);
    NSA__CHECK(nsa__cuda_grid(nsa__cuda_ceil_div(items, NSA__MLP_THREADS), &grid));
    NSA__CHECK(nsa__cuda_status(NSA_LAUNCH(nsa__cuda_mlp_dout_kernel, grid, dim3(NSA__MLP_THREADS),
                                           0, stream, dx->out, x->x.dtype, d->kv_heads, x->dim,
                                           p->rows, p->gather, p->count, p->dout)));
    const nsa__cuda_gemm_shape shape = {p->rows, x->hidden, x->dim, 1, d->kv_heads, p->count};
    const nsa__cuda_mlp_dh_done<T> done = {p->slope, static_cast<T *>(p->dh), p->rows, x->hidden};
    return nsa__cuda_gemm_run<T, true, false>(nsa__cuda_packed_operand(p->dout, p->rows, x->dim),
                                              nsa__cuda_parameter_operand(&x->w2, x->hidden), shape,
                                              done, stream);
}

/* dx[i d + u] += sum over m, n of dh[i - m][n] w1[n][u + m d]: one product over (m, n) */
template <typename T>
static nsa_status nsa__cuda_mlp_dx(const nsa_compress *dx, const nsa_compress *x, const nsa_desc *d,
                                   bool is_sum, const nsa__cuda_mlp_plan *p, cudaStream_t stream) {
    if (!dx->x.data) return NSA_OK;
    const int columns = d->cmp_stride * x->dim, k_length = (p->lead + 1) * x->hidden,
              rows = p->rows - p->lead;
    nsa__cuda_operand dh = nsa__cuda_packed_operand(
        static_cast<T *>(p->dh) + static_cast<int64_t>(p->lead) * x->hidden, p->rows, x->hidden);
    dh.outer = -x->hidden;
    dh.columns = k_length;
    nsa__cuda_operand w1 = nsa__cuda_parameter_operand(&x->w1, columns);
    w1.modulus = x->hidden;
    w1.jump = columns;
    const nsa__cuda_gemm_shape shape = {rows, columns, k_length, 1, d->kv_heads, p->count + 1};
    const nsa__cuda_mlp_dx_done done = {dx->x, p->gather + p->lead, x->dim, *d, is_sum};
    return nsa__cuda_gemm_run<T, true, false>(dh, w1, shape, done, stream);
}

/* Sums over all rows of (heads, rows, width), into parts. */
static nsa_status nsa__cuda_mlp_column_sums(const void *rows, int width, const nsa_compress *x,
                                            const nsa_desc *d, const nsa__cuda_mlp_plan *p,
                                            cudaStream_t stream) {
    dim3 grid;
    const int64_t items = static_cast<int64_t>(p->column_parts) * d->kv_heads * (width / 8);
    NSA__CHECK(nsa__cuda_grid(nsa__cuda_ceil_div(items, NSA__MLP_THREADS), &grid));
    return nsa__cuda_status(
        NSA_LAUNCH(nsa__cuda_mlp_column_sums_kernel, grid, dim3(NSA__MLP_THREADS), 0, stream, rows,
                   x->x.dtype, d->kv_heads, p->rows, width, p->column_parts, p->count, p->parts));
}

/* db2 = sum dout; s = sum dh; db1 = s; dpos = w1^T s */
static nsa_status nsa__cuda_mlp_biases(const nsa_compress *dx, const nsa_compress *x,
                                       const nsa_desc *d, const nsa__cuda_mlp_plan *p,
                                       cudaStream_t stream) {
    const nsa__cuda_parts columns = {p->parts, p->column_parts, d->kv_heads, x->dim, 1, x->dim};
    nsa_status s = nsa__cuda_mlp_column_sums(p->dout, x->dim, x, d, p, stream);
    if (s == NSA_OK) s = nsa__cuda_add_parts(&columns, NULL, &dx->b2, stream);
    const nsa__cuda_parts hidden = {p->parts, p->column_parts, d->kv_heads, x->hidden,
                                    1,        x->hidden};
    const nsa_tensor sum = {p->dh_sum, NSA_F32, 0, x->hidden, x->hidden};
    const size_t bytes =
        sizeof(float) * static_cast<size_t>(d->kv_heads) * static_cast<size_t>(x->hidden);
    if (s == NSA_OK) s = nsa__cuda_status(nsa__memset(p->dh_sum, 0, bytes, stream));
    if (s == NSA_OK) s = nsa__cuda_mlp_column_sums(p->dh, x->hidden, x, d, p, stream);
    if (s == NSA_OK) s = nsa__cuda_add_parts(&hidden, NULL, &sum, stream);
    const nsa__cuda_parts whole = {p->dh_sum, 1, d->kv_heads, x->hidden, 1, x->hidden};
    if (s == NSA_OK) s = nsa__cuda_add_parts(&whole, NULL, &dx->b1, stream);
    dim3 grid;
    if (s == NSA_OK && dx->pos.data) {
        const int64_t items = static_cast<int64_t>(dx->pos.head ? d->kv_heads : 1) * (p->flat / 8);
        NSA__CHECK(nsa__cuda_grid(nsa__cuda_ceil_div(items, NSA__MLP_THREADS), &grid));
        s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_mlp_dpos_kernel, grid, dim3(NSA__MLP_THREADS), 0,
                                        stream, *x, dx->pos, d->kv_heads, p->flat, p->dh_sum));
    }
    return s;
}

/* dw1 = dh^T (x + pos), dw2 = dout^T act */
template <typename T>
static nsa_status nsa__cuda_mlp_weights(const nsa_compress *dx, const nsa_compress *x,
                                        const nsa_desc *d, const nsa__cuda_mlp_plan *p,
                                        cudaStream_t stream) {
    nsa_status s = NSA_OK;
    if (dx->w1.data) {
        const nsa__cuda_gemm_shape shape = {x->hidden,    p->flat,     p->rows,
                                            p->splits_w1, d->kv_heads, p->count};
        const nsa__cuda_mlp_parts_done done = {p->parts, d->kv_heads, x->hidden, p->flat};
        s = nsa__cuda_gemm_run<T, false, false>(nsa__cuda_packed_operand(p->dh, p->rows, x->hidden),
                                                nsa__cuda_window_operand(x, d, p), shape, done,
                                                stream);
        const nsa__cuda_parts parts = {p->parts,    p->splits_w1,
                                       d->kv_heads, static_cast<int64_t>(x->hidden) * p->flat,
                                       x->hidden,   p->flat};
        const nsa__cuda_outer_product outer = {x->pos.data ? p->dh_sum : NULL, x->pos, x->dim};
        if (s == NSA_OK) s = nsa__cuda_add_parts(&parts, &outer, &dx->w1, stream);
    }
    if (s == NSA_OK && dx->w2.data) {
        const nsa__cuda_gemm_shape shape = {x->dim,       x->hidden,   p->rows,
                                            p->splits_w2, d->kv_heads, p->count};
        const nsa__cuda_mlp_parts_done done = {p->parts, d->kv_heads, x->dim, x->hidden};
        s = nsa__cuda_gemm_run<T, false, false>(
            nsa__cuda_packed_operand(p->dout, p->rows, x->dim),
            nsa__cuda_packed_operand(p->act, p->rows, x->hidden), shape, done, stream);
        const nsa__cuda_parts parts = {p->parts,    p->splits_w2,
                                       d->kv_heads, static_cast<int64_t>(x->dim) * x->hidden,
                                       x->dim,      x->hidden};
        if (s == NSA_OK) s = nsa__cuda_add_parts(&parts, NULL, &dx->w2, stream);
    }
    return s;
}

template <typename T>
static nsa_status nsa__cuda_mlp_backward_as(const nsa_compress *dx, const nsa_compress *x,
                                            const nsa_desc *d, bool is_sum, void *workspace,
                                            cudaStream_t stream) {
    nsa__arena a = nsa__cuda_arena_at(workspace);
    const nsa__cuda_mlp_plan p = nsa__cuda_mlp_plan_of(x, d, 1, &a);
    nsa_status s = nsa__cuda_mlp_dh<T>(dx, x, d, &p, stream);
    if (s == NSA_OK) s = nsa__cuda_mlp_dx<T>(dx, x, d, is_sum, &p, stream);
    if (s == NSA_OK) s = nsa__cuda_mlp_biases(dx, x, d, &p, stream);
    return s == NSA_OK ? nsa__cuda_mlp_weights<T>(dx, x, d, &p, stream) : s;
}

static nsa_status nsa__cuda_mlp_forward(const nsa_compress *x, const nsa_desc *d, void *workspace,
                                        cudaStream_t stream) {
    NSA__CUDA_BY_DTYPE(x->x.dtype, T, return nsa__cuda_mlp_forward_as<T>(x, d, workspace, stream);)
    return nsa__error(NSA_ERROR_DTYPE, NSA__AT_x);
}

static nsa_status nsa__cuda_mlp_backward(const nsa_compress *dx, const nsa_compress *x,
                                         const nsa_desc *d, bool is_sum, void *workspace,
                                         cudaStream_t stream) {
    NSA__CUDA_BY_DTYPE(x->x.dtype, T,
                       return nsa__cuda_mlp_backward_as<T>(dx, x, d, is_sum, workspace, stream);)
    return nsa__error(NSA_ERROR_DTYPE, NSA__AT_x);
}

#endif

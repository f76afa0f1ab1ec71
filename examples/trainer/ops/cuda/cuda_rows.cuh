/* cuda_rows.cuh: the trainer's kernels that go through rows: embedding, norm, bias, SiLU, group
   mean. Twin: ops_cpu.c. Bound by memory: each element is read once. A sum is always taken in one
   order. Not here: loss (cuda_loss.cuh), optimizer (cuda_optimizer.cuh), launches (ops_cuda.cu). */
#ifndef CUDA_ROWS_CUH
#define CUDA_ROWS_CUH

#include "kernels/rows.cuh"

enum { ROW_THREADS = 128, ROW_WARPS = ROW_THREADS / 32, COLUMN_PARTS = 64 };

/* An activation array; elements count from its start. */
struct cuda_array {
    void *data;
    nsa_dtype dtype;
};

NSA__DEVICE float cuda_load(const cuda_array &x, int64_t i) {
    return x.dtype == NSA_F32 ? static_cast<const float *>(x.data)[i]
                              : nsa__load1(x.dtype, static_cast<const uint16_t *>(x.data) + i, 0);
}
NSA__DEVICE void cuda_store(const cuda_array &x, int64_t i, float value) {
    if (x.dtype == NSA_F32)
        static_cast<float *>(x.data)[i] = value;
    else
        nsa__store1(x.dtype, static_cast<uint16_t *>(x.data) + i, 0, value);
}

/* The thread's item; grids of one dimension. */
NSA__DEVICE int64_t cuda_item() {
    return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
/* The warp's item, and the lane. */
NSA__DEVICE int64_t cuda_warp_item() {
    return static_cast<int64_t>(blockIdx.x) * ROW_WARPS + static_cast<int>(threadIdx.x) / 32;
}
NSA__DEVICE int cuda_lane() {
    return static_cast<int>(threadIdx.x) % 32;
}
template <typename T> NSA__DEVICE T cuda_warp_sum(T x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* ---- Embedding ------------------------------------------------------------------------------ */

/* x[r] = table[tokens[r]] */
static __global__ void embed_forward_kernel(cuda_array x, cuda_array table, const int32_t *tokens,
                                            int64_t rows, int dim) {
    const int64_t i = cuda_item();
    if (i >= rows * dim) return;
    cuda_store(x, i, cuda_load(table, tokens[i / dim] * static_cast<int64_t>(dim) + i % dim));
}

/* dtable[token] += the sum of dx over the token's rows: the block of the token's first row takes
   all of them, in ascending order, 32 at a look. One warp, a lane to a column; blockIdx.y: which
   columns. */
static __global__ void embed_backward_kernel(float *dtable, cuda_array dx, const int32_t *tokens,
                                             int64_t rows, int dim) {
    const int lane = cuda_lane();
    const int64_t first = blockIdx.x;
    const int32_t token = tokens[first];
    for (int64_t base = 0; base < first; base += 32) {
        const int64_t r = base + lane;
        if (__any_sync(0xffffffffu, r < first && tokens[r < first ? r : first] == token)) return;
    }
    const int c = static_cast<int>(blockIdx.y) * 32 + lane;
    float sum = 0;
    for (int64_t base = first; base < rows; base += 32) {
        const int64_t r = base + lane;
        unsigned hits =
            __ballot_sync(0xffffffffu, r < rows && tokens[r < rows ? r : first] == token);
        for (; hits; hits &= hits - 1) {
            const int64_t hit = base + __ffs(static_cast<int>(hits)) - 1;
            if (c < dim) sum += cuda_load(dx, hit * dim + c);
        }
    }
    if (c < dim) dtable[token * static_cast<int64_t>(dim) + c] += sum;
}

/* ---- RMSNorm -------------------------------------------------------------------------------- */

/* A warp to a row: y = x s w, s = (mean(x^2) + eps)^(-1/2) */
static __global__ void rmsnorm_forward_kernel(cuda_array y, float *rstd, cuda_array x, cuda_array w,
                                              int64_t rows, int dim, float eps) {
    const int64_t r = cuda_warp_item();
    if (r >= rows) return;
    float sum = 0;
    for (int c = cuda_lane(); c < dim; c += 32) {
        const float value = cuda_load(x, r * dim + c);
        sum = fmaf(value, value, sum);
    }
    sum = cuda_warp_sum(sum);
    const float scale = 1.0f / sqrtf(sum / static_cast<float>(dim) + eps);
    for (int c = cuda_lane(); c < dim; c += 32)
        cuda_store(y, r * dim + c, cuda_load(x, r * dim + c) * scale * cuda_load(w, c));
    if (cuda_lane() == 0) rstd[r] = scale;
}

/* dx += s (w dy) - s^3 x mean(x w dy) */
static __global__ void rmsnorm_backward_kernel(cuda_array dx, cuda_array dy, cuda_array x,
                                               cuda_array w, const float *rstd, int64_t rows,
                                               int dim) {
    const int64_t r = cuda_warp_item();
    if (r >= rows) return;
    float dot = 0;
    for (int c = cuda_lane(); c < dim; c += 32)
        dot = fmaf(cuda_load(x, r * dim + c) * cuda_load(w, c), cuda_load(dy, r * dim + c), dot);
    const float s = rstd[r], back = s * s * s * cuda_warp_sum(dot) / static_cast<float>(dim);
    for (int c = cuda_lane(); c < dim; c += 32) {
        const int64_t i = r * dim + c;
        cuda_store(dx, i,
                   cuda_load(dx, i) + s * cuda_load(w, c) * cuda_load(dy, i) -
                       back * cuda_load(x, i));
    }
}

/* ---- Sums of columns ------------------------------------------------------------------------ */

/* parts[part][c] = the sum of dy[r][c] (x[r][c] rstd[r], where there is x) over a slice of the
   rows */
static __global__ void column_parts_kernel(float *parts, cuda_array dy, cuda_array x,
                                           const float *rstd, int64_t rows, int dim,
                                           int part_count) {
    const int64_t c = cuda_item();
    const int part = static_cast<int>(blockIdx.y);
    const int64_t slice = (rows - 1) / part_count + 1;
    const int64_t end = (part + 1) * slice < rows ? (part + 1) * slice : rows;
    if (c >= dim) return;
    float sum = 0;
    for (int64_t r = part * slice; r < end; r++) {
        const float grad = cuda_load(dy, r * dim + c);
        sum += x.data ? cuda_load(x, r * dim + c) * rstd[r] * grad : grad;
    }
    parts[part * static_cast<int64_t>(dim) + c] = sum;
}

/* to[c] += the parts in their order */
static __global__ void column_sums_kernel(float *to, const float *parts, int dim, int part_count) {
    const int64_t c = cuda_item();
    if (c >= dim) return;
    float sum = 0;
    for (int part = 0; part < part_count; part++)
        sum += parts[part * static_cast<int64_t>(dim) + c];
    to[c] += sum;
}

/* y += b, each row */
static __global__ void bias_forward_kernel(cuda_array y, cuda_array b, int64_t rows, int dim) {
    const int64_t i = cuda_item();
    if (i < rows * dim) cuda_store(y, i, cuda_load(y, i) + cuda_load(b, i % dim));
}

/* ---- SiLU ----------------------------------------------------------------------------------- */

static __global__ void silu_forward_kernel(cuda_array y, cuda_array x, int64_t count) {
    const int64_t i = cuda_item();
    if (i >= count) return;
    const float value = cuda_load(x, i);
    cuda_store(y, i, value / (1.0f + expf(-value)));
}

/* silu'(x) = s (1 + x (1 - s)), s = sigmoid(x) */
static __global__ void silu_backward_kernel(cuda_array dx, cuda_array y, cuda_array x,
                                            int64_t count) {
    const int64_t i = cuda_item();
    if (i >= count) return;
    const float value = cuda_load(x, i), s = 1.0f / (1.0f + expf(-value));
    cuda_store(y, i, value * s);
    cuda_store(dx, i, cuda_load(dx, i) * s * (1.0f + value * (1.0f - s)));
}

/* Rows of x hold a and b: y = silu(a) b */
static __global__ void swiglu_forward_kernel(cuda_array y, cuda_array x, int64_t rows, int width) {
    const int64_t i = cuda_item();
    if (i >= rows * width) return;
    const int64_t at = i / width * 2 * width + i % width;
    const float a = cuda_load(x, at), b = cuda_load(x, at + width);
    cuda_store(y, i, a / (1.0f + expf(-a)) * b);
}

/* da = dy b silu'(a), db = dy silu(a), y = silu(a) b */
static __global__ void swiglu_backward_kernel(cuda_array dx, cuda_array y, cuda_array x,
                                              cuda_array dy, int64_t rows, int width) {
    const int64_t i = cuda_item();
    if (i >= rows * width) return;
    const int64_t at = i / width * 2 * width + i % width;
    const float a = cuda_load(x, at), b = cuda_load(x, at + width), grad = cuda_load(dy, i);
    const float s = 1.0f / (1.0f + expf(-a));
    cuda_store(y, i, a * s * b);
    cuda_store(dx, at, grad * b * s * (1.0f + a * (1.0f - s)));
    cuda_store(dx, at + width, grad * a * s);
}

/* ---- The gate's input ----------------------------------------------------------------------- */

/* mean[r][g] = the average of a group's heads of q[r], whose rows lie `stride` apart */
static __global__ void group_mean_forward_kernel(cuda_array mean, cuda_array q, int64_t stride,
                                                 int64_t rows, int groups, int per_group, int dim) {
    const int64_t i = cuda_item(), r = i / dim / groups;
    if (r >= rows) return;
    const int64_t from = r * stride + i / dim % groups * per_group * dim + i % dim;
    const float share = 1.0f / static_cast<float>(per_group);
    float sum = 0;
    for (int h = 0; h < per_group; h++)
        sum += cuda_load(q, from + h * static_cast<int64_t>(dim)) * share;
    cuda_store(mean, i, sum);
}

/* dq of each of a group's heads += dmean / heads */
static __global__ void group_mean_backward_kernel(cuda_array dq, int64_t stride, cuda_array dmean,
                                                  int64_t rows, int groups, int per_group,
                                                  int dim) {
    const int64_t i = cuda_item(), width = static_cast<int64_t>(groups) * per_group * dim;
    const int64_t r = i / width, c = i % width;
    if (r >= rows) return;
    const int64_t from = (r * groups + c / dim / per_group) * dim + c % dim;
    const int64_t to = r * stride + c;
    cuda_store(dq, to,
               cuda_load(dq, to) + cuda_load(dmean, from) * (1.0f / static_cast<float>(per_group)));
}

/* to[r][c] = from[r][c], rows `to_stride` and `from_stride` elements apart */
static __global__ void copy_columns_kernel(cuda_array to, int64_t to_stride, cuda_array from,
                                           int64_t from_stride, int64_t rows, int64_t columns) {
    const int64_t i = cuda_item(), r = i / columns, c = i % columns;
    if (r < rows) cuda_store(to, r * to_stride + c, cuda_load(from, r * from_stride + c));
}

/* to = from, rounded to to's dtype */
static __global__ void round_kernel(cuda_array to, const float *from, int64_t count) {
    const int64_t i = cuda_item();
    if (i < count) cuda_store(to, i, from[i]);
}

/* Where the device is, for whoever watches: host memory that the device sees. */
static __global__ void mark_kernel(volatile uint32_t *word, uint32_t value) {
    *word = value;
}

#endif

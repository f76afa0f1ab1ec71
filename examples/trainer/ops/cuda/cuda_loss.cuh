/* cuda_loss.cuh: cross entropy and its gradient, a block to a row of logits.
   Twin: ops_cpu.c. Not here: the product that makes the logits. */
#ifndef CUDA_LOSS_CUH
#define CUDA_LOSS_CUH

#include "ops/cuda/cuda_rows.cuh"

enum { LOSS_THREADS = 256, LOSS_WARPS = LOSS_THREADS / 32, LOSS_ROWS = 1 << 16 };

/* Over the block, every thread gets the result: `most`: the largest, else the sum. */
NSA__DEVICE float loss_reduce(float x, float *shared, bool most) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, x, step);
        x = most ? fmaxf(x, other) : x + other;
    }
    __syncthreads(); /* the last reduction has been read */
    if (cuda_lane() == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
    for (int warp = 1; warp < LOSS_WARPS; warp++)
        x = most ? fmaxf(x, shared[warp]) : x + shared[warp];
    return x;
}

/* losses[r] = ln sum exp(logits) - logits[label], 0 without a label; with scale != 0 the logits
   become scale s->scaler.scale (p - onehot). */
static __global__ void cross_entropy_kernel(double *losses, cuda_array logits,
                                            const int32_t *labels, int vocab, const step_state *s,
                                            double scale_alone) {
    NSA_SHARED(float, shared, [LOSS_WARPS]);
    const float scale = static_cast<float>(scale_alone * s->scaler.scale);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * vocab;
    const int32_t label = labels[blockIdx.x];
    const int thread = static_cast<int>(threadIdx.x);
    if (label < 0) {
        for (int c = thread; c < vocab && scale != 0; c += LOSS_THREADS)
            cuda_store(logits, row + c, 0);
        if (thread == 0) losses[blockIdx.x] = 0;
        return;
    }
    float top = -INFINITY, sum = 0;
    for (int c = thread; c < vocab; c += LOSS_THREADS) top = fmaxf(top, cuda_load(logits, row + c));
    top = loss_reduce(top, shared, true);
    const float at_label = cuda_load(logits, row + label);
    for (int c = thread; c < vocab; c += LOSS_THREADS)
        sum += expf(cuda_load(logits, row + c) - top);
    sum = loss_reduce(sum, shared, false);
    if (thread == 0)
        losses[blockIdx.x] = log(static_cast<double>(sum)) + static_cast<double>(top) -
                             static_cast<double>(at_label);
    const float share = scale / sum;
    for (int c = thread; c < vocab && scale != 0; c += LOSS_THREADS) {
        const float p = expf(cuda_load(logits, row + c) - top) * share;
        cuda_store(logits, row + c, c == label ? p - scale : p);
    }
}

/* One warp adds the rows' losses and counts their labels, in one order. */
static __global__ void loss_sum_kernel(step_state *s, const double *losses, const int32_t *labels,
                                       int64_t rows) {
    double loss = 0;
    int64_t count = 0;
    for (int64_t r = cuda_lane(); r < rows; r += 32) {
        loss += losses[r];
        count += labels[r] >= 0;
    }
    loss = cuda_warp_sum(loss);
    count = cuda_warp_sum(count);
    if (threadIdx.x != 0) return;
    s->loss += loss;
    s->labels += count;
}

#endif

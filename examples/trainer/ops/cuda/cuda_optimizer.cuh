/* cuda_optimizer.cuh: the gradients' norm, clipping and AdamW; what they decide stays on the
   device. Twin: ops_cpu.c. Not here: which tensors decay (optimizer.c). */
#ifndef CUDA_OPTIMIZER_CUH
#define CUDA_OPTIMIZER_CUH

#include "ops/cuda/cuda_rows.cuh"

enum { SQUARE_PARTS = 256 };

/* parts[block] = the sum of squares of every SQUARE_PARTS-th stretch */
static __global__ void square_parts_kernel(double *parts, const float *grad, int64_t count) {
    NSA_SHARED(double, shared, [ROW_WARPS]);
    double sum = 0;
    for (int64_t i = cuda_item(); i < count; i += static_cast<int64_t>(SQUARE_PARTS) * ROW_THREADS)
        sum += static_cast<double>(grad[i]) * static_cast<double>(grad[i]);
    sum = cuda_warp_sum(sum);
    if (cuda_lane() == 0) shared[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < ROW_WARPS; warp++) sum += shared[warp];
    parts[blockIdx.x] = sum;
}

/* parts[0] = the sum of all parts */
static __global__ void square_total_kernel(double *parts) {
    double sum = 0;
    for (int part = cuda_lane(); part < SQUARE_PARTS; part += 32) sum += parts[part];
    sum = cuda_warp_sum(sum);
    __syncwarp();
    if (threadIdx.x == 0) parts[0] = sum;
}

static __global__ void square_sum_kernel(step_state *s, const double *parts) {
    double sum = 0;
    for (int part = cuda_lane(); part < SQUARE_PARTS; part += 32) sum += parts[part];
    sum = cuda_warp_sum(sum);
    if (threadIdx.x == 0) s->squares += sum;
}

NSA__DEVICE bool cuda_finite(double x) {
    return fabs(x) <= 1.7976931348623157e308;
}

static __global__ void clip_kernel(step_state *s, double max_norm, bool is_f16) {
    loss_scaler *x = &s->scaler;
    const double norm = sqrt(s->squares) / x->scale;
    s->grad_norm = norm;
    s->clip = (max_norm > 0 && norm > max_norm ? max_norm / norm : 1) / x->scale;
    s->overflow = !cuda_finite(s->squares);
    s->skipped = s->overflow && x->scale > 1 && cuda_finite(s->loss);
    if (s->skipped) {
        x->scale /= 2;
        x->good_steps = 0;
        x->skipped_steps++;
    } else if (is_f16 && ++x->good_steps == SCALER_GOOD_STEPS) {
        x->good_steps = 0;
        if (x->scale < SCALER_MOST) x->scale *= 2;
    }
}

static __global__ void adamw_kernel(const adamw_rates *rates, bool decay, const step_state *s,
                                    float *value, const float *grad, float *m, float *v,
                                    int64_t count) {
    const int64_t i = cuda_item();
    if (i >= count || s->overflow) return;
    adamw_rates a = *rates;
    if (!decay) a.keep = 1;
    const float g = grad[i] * static_cast<float>(s->clip);
    m[i] = a.beta1 * m[i] + (1.0f - a.beta1) * g;
    v[i] = a.beta2 * v[i] + (1.0f - a.beta2) * g * g;
    value[i] = value[i] * a.keep - a.rate * m[i] / (sqrtf(v[i]) * a.bias + a.eps);
}

static __global__ void muon_direction_kernel(const adamw_rates *rates, const step_state *s,
                                             float *grad, float *m, int64_t count) {
    const int64_t i = cuda_item();
    if (i >= count || s->overflow) return;
    const float g = grad[i] * static_cast<float>(s->clip);
    m[i] = rates->momentum * m[i] + g;
    grad[i] = g + rates->momentum * m[i];
}

static __global__ void muon_update_kernel(const adamw_rates *rates, const step_state *s,
                                          float *value, const float *x, double scale,
                                          int64_t count) {
    const int64_t i = cuda_item();
    if (i >= count || s->overflow) return;
    const float rate = static_cast<float>(static_cast<double>(rates->lr) * scale);
    value[i] = value[i] * rates->keep - rate * x[i];
}

static __global__ void unit_kernel(float *x, const float *from, const double *squares,
                                   int64_t count) {
    const int64_t i = cuda_item();
    if (i < count) x[i] = from[i] * static_cast<float>(1 / (sqrt(squares[0]) + 1e-7));
}

static __global__ void mix_kernel(float *y, const float *x, float a, float b, int64_t count) {
    const int64_t i = cuda_item();
    if (i < count) y[i] = a * x[i] + b * y[i];
}

#endif

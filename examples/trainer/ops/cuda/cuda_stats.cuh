/* cuda_stats.cuh: what stats.h counts of a layer's gates and block lists, on the device: parts,
   then their sum, each in one order. Twin: stats.c. Not here: what is made of the counts. */
#ifndef CUDA_STATS_CUH
#define CUDA_STATS_CUH

#include "ops/cuda/cuda_rows.cuh"

enum { STATS_PARTS = ROW_THREADS }; /* so that one block adds them up */

/* a += b */
NSA__DEVICE void stats_merge(stats_sum *a, const stats_sum &b) {
    a->entropy += b.entropy;
    a->largest += b.largest;
    a->gates += b.gates;
    for (int i = 0; i < 3; i++) a->shares[i] += b.shares[i];
    a->gate_rows += b.gate_rows;
    a->collapsed += b.collapsed;
    a->k += b.k;
    a->k_rows += b.k_rows;
    if (b.k_max > a->k_max) {
        a->k_max = b.k_max;
        a->at_max = b.at_max;
    } else if (b.k_max == a->k_max) {
        a->at_max += b.at_max;
    }
}

/* Of the block's threads; the first one gets it. */
NSA__DEVICE void stats_reduce(stats_sum *mine, stats_sum *shared) {
    const int thread = static_cast<int>(threadIdx.x);
    shared[thread] = *mine;
    for (int step = ROW_THREADS / 2; step > 0; step /= 2) {
        __syncthreads();
        if (thread < step) stats_merge(&shared[thread], shared[thread + step]);
    }
    if (thread == 0) *mine = shared[0];
}

NSA__DEVICE void stats_add_gate_row(stats_sum *s, const cuda_array &logits, int64_t at,
                                    nsa_gate_kind kind) {
    float g[3], all = 0, entropy = 0, largest = 0;
    for (int b = 0; b < 3; b++) g[b] = cuda_load(logits, at + b);
    const float most = fmaxf(fmaxf(g[0], g[1]), g[2]);
    for (int b = 0; b < 3; b++) {
        if (kind == NSA_GATE_SIGMOID) g[b] = 1.0f / (1.0f + expf(-g[b]));
        if (kind == NSA_GATE_SOFTMAX) g[b] = expf(g[b] - most);
        all += g[b];
    }
    for (int b = 0; b < 3; b++) {
        const float p = all > 0 ? g[b] * (1.0f / all) : 1.0f / 3;
        if (p > 0) entropy -= p * logf(p);
        largest = fmaxf(largest, p);
        s->shares[b] += static_cast<double>(p);
    }
    s->gates += kind == NSA_GATE_SOFTMAX ? 1 : static_cast<double>(all);
    s->entropy += static_cast<double>(entropy);
    s->largest += static_cast<double>(largest);
    s->collapsed += entropy < 0.1f && largest > 0.95f;
    s->gate_rows++;
}

/* The token's place in its sequence. */
NSA__DEVICE int64_t stats_place(const layer_choices &x, int64_t token) {
    if (x.places) return x.places[token];
    if (!x.begins) return token % x.tokens_each;
    int low = 0, high = x.sequences; /* begins[low] <= token < begins[high] */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (x.begins[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    return token - x.begins[low];
}

NSA__DEVICE void stats_add_list(stats_sum *s, const layer_choices &x, int64_t row) {
    const int32_t *list = x.blocks + row * x.width;
    const int64_t end = stats_place(x, row / x.groups) + 1;
    int64_t k = 0;
    for (int i = 0; i < x.width && list[i] >= 0; i++) {
        const int64_t begin = static_cast<int64_t>(list[i]) * x.slc_block;
        const int64_t last = begin + x.slc_block < end ? begin + x.slc_block : end;
        if (last > begin) k += last - begin;
    }
    stats_sum one = {};
    one.k = static_cast<double>(k);
    one.k_rows = 1;
    one.k_max = k;
    one.at_max = 1;
    stats_merge(s, one);
}

/* A thread takes every so many'th row. */
static __global__ void stats_parts_kernel(stats_sum *parts, layer_choices x, cuda_array gates) {
    NSA_SHARED(stats_sum, shared, [ROW_THREADS]);
    const int64_t rows = x.rows * x.groups, gate_rows = x.rows * x.gate_heads;
    const int64_t step = static_cast<int64_t>(STATS_PARTS) * ROW_THREADS;
    stats_sum mine = {};
    for (int64_t row = cuda_item(); row < gate_rows; row += step)
        stats_add_gate_row(&mine, gates,
                           row / x.gate_heads * x.gate_stride + row % x.gate_heads * 3, x.kind);
    for (int64_t row = cuda_item(); row < rows; row += step) stats_add_list(&mine, x, row);
    stats_reduce(&mine, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = mine;
}

/* What a layer's sum says of the layer, as in stats.c. */
NSA__DEVICE void stats_add_layer_sum(stats_sum *s, const stats_sum &layer, int number) {
    const double rows = static_cast<double>(layer.gate_rows);
    const bool collapsed = layer.entropy < 0.2 * rows || layer.largest > 0.9 * rows ||
                           2 * layer.collapsed >= layer.gate_rows;
    const bool shut = layer.gates < 0.01 * rows;
    stats_merge(s, layer);
    if (!layer.gate_rows) return;
    if (collapsed && !s->layers_collapsed++) s->first_collapsed = number + 1;
    if (shut && !s->layers_shut++) s->first_shut = number + 1;
}

NSA__DEVICE void stats_means_of_layer(stats_layer *means, const stats_sum &layer) {
    const double rows = static_cast<double>(layer.gate_rows);
    if (!layer.gate_rows) return;
    means->entropy = static_cast<float>(layer.entropy / rows);
    for (int b = 0; b < 3; b++) means->shares[b] = static_cast<float>(layer.shares[b] / rows);
    means->gate_sum = static_cast<float>(layer.gates / rows);
}

static __global__ void stats_sum_kernel(step_state *s, const stats_sum *parts, int layer) {
    NSA_SHARED(stats_sum, shared, [ROW_THREADS]);
    stats_sum mine = parts[threadIdx.x];
    stats_reduce(&mine, shared);
    if (threadIdx.x != 0) return;
    stats_add_layer_sum(&s->seen, mine, layer);
    if (layer < STATS_LAYERS) stats_means_of_layer(&s->layers[layer], mine);
}

#endif

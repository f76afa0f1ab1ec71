/* stats.c - see stats.h. */
#include "base/stats.h"

#include <math.h>

static void gates_of(const float *logits, nsa_gate_kind kind, float g[3]) {
    float most = fmaxf(fmaxf(logits[0], logits[1]), logits[2]);
    for (int b = 0; b < 3; b++)
        g[b] = kind == NSA_GATE_SIGMOID   ? 1 / (1 + expf(-logits[b]))
               : kind == NSA_GATE_SOFTMAX ? expf(logits[b] - most)
                                          : logits[b];
}

void stats_add_gates(stats_sum *s, const float *logits, int64_t rows, nsa_gate_kind kind) {
    double entropy_sum = 0, largest_sum = 0, gates = 0, sums[3] = {0};
    for (int64_t r = 0; r < rows; r++) {
        float g[3], entropy = 0, largest = 0;
        gates_of(logits + 3 * r, kind, g);
        float all = g[0] + g[1] + g[2], scale = 1 / all;
        gates += kind == NSA_GATE_SOFTMAX ? 1 : (double)all;
        for (int b = 0; b < 3; b++) {
            float p = all > 0 ? g[b] * scale : 1.f / 3;
            if (p > 0) entropy -= p * logf(p);
            if (p > largest) largest = p;
            sums[b] += (double)p;
        }
        entropy_sum += (double)entropy;
        largest_sum += (double)largest;
        s->collapsed += entropy < 0.1f && largest > 0.95f;
    }
    for (int b = 0; b < 3; b++) s->shares[b] += sums[b];
    s->entropy += entropy_sum;
    s->gates += gates;
    s->largest += largest_sum;
    s->gate_rows += rows;
}

static int64_t visible(const int32_t *list, int width, int64_t slc_block, int64_t end) {
    int64_t k = 0;
    for (int i = 0; i < width && list[i] >= 0; i++) {
        int64_t begin = list[i] * slc_block, last = begin + slc_block;
        if (last > end) last = end;
        if (last > begin) k += last - begin;
    }
    return k;
}

void stats_add_blocks(stats_sum *s, const int32_t *lists, int64_t first, int64_t count, int groups,
                      int width, int slc_block) {
    int64_t sum = 0;
    for (int64_t r = 0; r < count * groups; r++) {
        int64_t k = visible(lists + r * width, width, slc_block, first + r / groups + 1);
        sum += k;
        if (k > s->k_max) {
            s->k_max = k;
            s->at_max = 0;
        }
        s->at_max += k == s->k_max;
    }
    s->k += (double)sum;
    s->k_rows += count * groups;
}

static void merge(stats_sum *s, const stats_sum *x) {
    s->entropy += x->entropy;
    s->largest += x->largest;
    s->gates += x->gates;
    for (int b = 0; b < 3; b++) s->shares[b] += x->shares[b];
    s->gate_rows += x->gate_rows;
    s->collapsed += x->collapsed;
    s->k += x->k;
    s->k_rows += x->k_rows;
    if (x->k_max > s->k_max) s->at_max = 0;
    if (x->k_max >= s->k_max) s->at_max += x->at_max;
    if (x->k_max > s->k_max) s->k_max = x->k_max;
}

void stats_add_layer(stats_sum *s, const stats_sum *layer, int number) {
    double rows = (double)layer->gate_rows;
    bool collapsed = layer->entropy < 0.2 * rows || layer->largest > 0.9 * rows ||
                     2 * layer->collapsed >= layer->gate_rows;
    bool shut = layer->gates < 0.01 * rows;
    merge(s, layer);
    if (!layer->gate_rows) return;
    if (collapsed && !s->layers_collapsed++) s->first_collapsed = number + 1;
    if (shut && !s->layers_shut++) s->first_shut = number + 1;
}

void stats_of_layer(const stats_sum *layer, stats_layer *means) {
    double rows = (double)layer->gate_rows;
    if (!layer->gate_rows) return;
    means->entropy = (float)(layer->entropy / rows);
    for (int b = 0; b < 3; b++) means->shares[b] = (float)(layer->shares[b] / rows);
    means->gate_sum = (float)(layer->gates / rows);
}

bool stats_finish(const stats_sum *s, stats *result) {
    stats none = {0};
    *result = none;
    if (!s->gate_rows || !s->k_rows) return false;
    double gates = (double)s->gate_rows, lists = (double)s->k_rows;
    result->entropy_mean = s->entropy / gates;
    result->max_gate = s->largest / gates;
    result->collapse_frac = (double)s->collapsed / gates;
    for (int b = 0; b < 3; b++) result->shares[b] = s->shares[b] / gates;
    result->k_mean = s->k / lists;
    result->pct_at_max = (double)s->at_max / lists;
    result->gate_rows = s->gate_rows;
    result->k_rows = s->k_rows;
    result->k_max = s->k_max;
    result->gate_sum = s->gates / gates;
    result->layers_collapsed = s->layers_collapsed;
    result->layers_shut = s->layers_shut;
    result->first_collapsed = s->first_collapsed - 1;
    result->first_shut = s->first_shut - 1;
    return true;
}

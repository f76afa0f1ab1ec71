/* stats.h - what the gates and the block lists of a step look like, counted from the arrays that
   the step computed with. Twin: stats.c. Who brings the arrays is observer.c's; it draws no
   conclusion.

   A row is one token, one gate or kv group, one layer. A row's shares are g_b / (g_cmp + g_slc +
   g_win); its entropy is theirs, with the natural logarithm (ln 3 = 1.0986 where all are equal).
   It is collapsed if its entropy is below 0.1 and its largest share above 0.95. Its k is the
   number of tokens at or before it that its selected blocks hold.

   A layer has collapsed if the mean entropy of its rows is below 0.2, the mean of their largest
   shares above 0.9, or half of them are collapsed. It is shut if g_cmp + g_slc + g_win is below
   0.01 in the mean: its shares may look healthy, and nothing passes. */
#ifndef STATS_H
#define STATS_H

#include <stdbool.h>
#include <stdint.h>

#include "nsa.h"

typedef struct stats_sum {
    double entropy, largest, shares[3], gates, k; /* gates: g_cmp + g_slc + g_win */
    int64_t gate_rows, collapsed;
    int64_t k_rows, k_max, at_max;
    int64_t layers_collapsed, layers_shut;
    int64_t first_collapsed, first_shut; /* the layer's number, counted from 1; 0: none */
} stats_sum;

/* Means over a layer's rows, of the first STATS_LAYERS layers; a layer without gates has shares of
   0. */
enum { STATS_LAYERS = 64 };

typedef struct stats_layer {
    float entropy, shares[3], gate_sum;
} stats_layer;

typedef struct stats {
    double entropy_mean, max_gate, collapse_frac, shares[3]; /* max_gate: mean of largest shares */
    double k_mean, pct_at_max; /* pct_at_max: share of the rows whose k is k_max, 0 .. 1 */
    int64_t gate_rows, k_rows, k_max;
    double gate_sum; /* mean of g_cmp + g_slc + g_win */
    int64_t layers_collapsed, layers_shut, first_collapsed, first_shut; /* counted from 0; -1 */
} stats;

/* `rows` triples of gate logits; with NSA_GATE_NONE of gates. */
void stats_add_gates(stats_sum *s, const float *logits, int64_t rows, nsa_gate_kind kind);

/* Block lists (count, groups, width) of the tokens first .. first + count - 1 of one sequence. */
void stats_add_blocks(stats_sum *s, const int32_t *lists, int64_t first, int64_t count, int groups,
                      int width, int slc_block);

/* Adds what was counted of a layer, and what follows from it for the layer as a whole. */
void stats_add_layer(stats_sum *s, const stats_sum *layer, int number);

/* What was counted of a layer as its means; nothing where it has no gates. */
void stats_of_layer(const stats_sum *layer, stats_layer *means);

/* False where nothing was added. */
bool stats_finish(const stats_sum *s, stats *result);

#endif

/* measure.h - of one query of a layer: the scores that its blocks were chosen by, the share of
   dense attention that each block would get, its gates. Twin: measure.c. Plain loops over the views
   that the layer's forward pass has left; it computes nothing that the model uses. */
#ifndef MEASURE_H
#define MEASURE_H

#include "nsa.h"

/* The three gates of a token and kv head, after the sigmoid or softmax; where each query head has
   its own, their mean. */
void measure_gates(const nsa_attention *x, const nsa_desc *d, int token, int kv_head, double g[3]);

/* score[j] of candidates j = 0 .. nsa_slc_candidates(d, token) - 1: Eq. 9, mean over the group's
   heads, divided by the strides in a compressed block, so that all p_cmp together count 1. */
void measure_scores(const nsa_attention *x, const nsa_desc *d, int token, int kv_head,
                    double *score);

/* mass[j]: what softmax over all keys 0 .. token, with q and k of slc, gives to the keys of block
   j; mean over the group's heads. Sums to 1. `p` is room for token + 1 numbers. */
void measure_mass(const nsa_attention *x, const nsa_desc *d, int token, int kv_head, double *p,
                  double *mass);

#endif

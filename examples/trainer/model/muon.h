/* muon.h - the direction of Muon's step: the nearest matrix whose singular values are all about 1,
   by Newton and Schulz's iteration. Twins: muon.c; optimizer.c, which takes the step. After
   K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks", 2024. */
#ifndef MUON_H
#define MUON_H

#include "ops/ops.h"

/* In the back end's memory: two matrices as large as the largest, and two squares as wide as the
   widest of their shorter sides. */
typedef struct muon_room {
    real *x, *y, *gram, *square;
} muon_room;

/* Five steps of X <- a X + (b G + c G^2) X with G = X X^T (or from the right, where that is
   smaller), from X = from / |from|; a, b, c are that publication's 3.4445, -4.7750, 2.0315. They
   take singular values of 0.002 and more to between 0.68 and 1.21, not to 1. The result is in one
   of the room's matrices. */
const real *muon_orthogonalize(const ops *o, const muon_room *room, const real *from, int rows,
                               int cols);

/* What a step multiplies it with beside the learning rate: 0.2 sqrt(the longer side), so that an
   element moves by 0.2 of the rate in the root of the mean square, about as AdamW's do. Rate and
   decay then mean the same for both (J. Liu and others, arXiv 2502.16982). */
double muon_scale(int rows, int cols);

#endif

/* optimizer.h - one step over the table of parameters, behind clipping by the global norm: AdamW,
   or with model_options.muon Muon for the matrices inside blocks and AdamW for all else. Twin:
   optimizer.c. The learning rate's course is config_lr's.

   Muon keeps one moment, m; v of its matrices stays 0. Over several processes each holds the m of
   its own pieces and makes their directions; these are gathered, for a matrix is orthogonalised as
   a whole. */
#ifndef OPTIMIZER_H
#define OPTIMIZER_H

#include "model/model.h"

typedef struct adamw {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step; /* 1-based */
} adamw;

/* Gradients are state->scaler.scale times those of the loss that the step minimises, accumulation
   included; with several processes their sum is that, and each updates its own pieces. Afterwards
   the state is that of all processes, state->grad_norm their norm before clipping. clip 0: none. */
bool optimizer_step(model *m, const adamw *a, double clip, fault *f);

#endif

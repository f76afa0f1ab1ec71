/* optimizer.h - one step of AdamW over the table of parameters, behind clipping by the global norm.
   Twin: optimizer.c. The learning rate's course is config_lr's. */
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

/* optimizer.h - one step of AdamW over the table of parameters, behind clipping by the global norm.
   Twin: optimizer.c. The learning rate's course is config_lr's. */
#ifndef OPTIMIZER_H
#define OPTIMIZER_H

#include "model.h"

/* Gradients are those of the loss that the step minimises, accumulation included. Afterwards
   state->grad_norm holds their norm before clipping; gradients are left as they are. clip 0: none. */
void optimizer_step(model *m, const adamw *a, double clip);

#endif

/* train.h - a training run from its settings to its last artefact, on any back end. Twins: train.c
   (steps), train_check.c (--check), train_agree.c (several processes), train_inside.h (the rest).
   Programs choose the back end and what they print of it; what a step computes is the model's. */
#ifndef TRAIN_H
#define TRAIN_H

#include "config/config.h"
#include "model/model.h"

/* Trains. Returns the program's exit code: 0, 2 for settings that cannot be used, 128 + the signal
   that ended the run, TELEMETRY_HALTED for an anomaly, else 1; what is not 0 has been said on
   stderr. */
int train_run(const config *c, const ops *o, dist *d);

/* What --check prints: each setting, parameters, memory by purpose, keys read by a token. Returns
   the exit code. */
int train_check(const config *c, const ops *o, dist *d);

/* For config_program.recall: those of the checkpoint that a run goes on from, or begins with. */
bool train_recall(const config *asked, config *kept, fault *f);

/* What runtime.precision names. */
nsa_dtype train_dtype(const config *c);

/* The CPU's operations, in the precision that the command line asks for; what a file asks for is
   for a GPU, and the CPU computes in fp32. */
bool train_open_cpu(ops *o, const config *c, fault *f);

/* The model that the settings describe; vocab is the tokenizer's unless they name one. */
model_config train_model_config(const config *c, int vocab);

/* The largest exit code of all processes; prints the fault of the lowest rank that has it. */
int train_worst(dist *d, int code, const fault *f);

#endif

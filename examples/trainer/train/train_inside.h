/* train_inside.h - what the files of a run share. Twins: train.c (steps), train_open.c (what a run
   stands on), train_save.c (checkpoints), train_carry.c (those of other attention), train_agree.c
   (several processes), train_report.c (what it is and takes). Programs include train.h, not
   this. */
#ifndef TRAIN_INSIDE_H
#define TRAIN_INSIDE_H

#include "checkpoint/checkpoint.h"
#include "checkpoint/saver.h"
#include "data/data.h"
#include "data/tokenizer.h"
#include "model/observer.h"
#include "telemetry/telemetry.h"
#include "train/train.h"

/* The parameters and moments as a checkpoint names them. */
typedef struct train_tensors {
    safetensors_tensor *weights; /* one a tensor */
    safetensors_tensor *moments; /* "m.NAME" of each, and "v.NAME" but of Muon's */
    real *flat[3];               /* values, m and v, all of them, as the host has them */
    size_t weight_count, moment_count;
    char (*names)[PARAM_NAME_BYTES + 2]; /* of the moments */
} train_tensors;

/* A step that was started and is not done (train.c). */
typedef struct train_pending {
    bool is;
    int64_t step;
    double lr, began, stats_ms;
    data_position data; /* behind it */
} train_pending;

typedef struct trainer {
    const config *config;
    const ops *o; /* the observer's, before the back end's */
    observer observer;
    dist *dist;
    model model;
    train_tensors tensors;
    tokenizer *tokenizer;
    token_list prompt;
    data *data;
    telemetry *telemetry;
    checkpoint_part parts[2];
    saver *saver;           /* NULL: nothing is saved while it trains */
    checkpoint_state state; /* as of the last whole step: what a checkpoint holds */
    train_pending pending;  /* the step after that */
    double settled;         /* when a step was last done */
    bool spoilt;            /* memory holds what must not be saved */
    bool starved; /* data that stay wrong, or that failed before a step, or processes differ */
    bool follows; /* cannot start because another process cannot */
    int64_t first_step; /* that this run does */
    int64_t saved_step; /* of the newest checkpoint, be it still under way; -1: none yet */
    real *copy;         /* values, m and v, where the host cannot read the back end's */
    real *moments;      /* several processes, rank 0: all of m, then all of v, to be saved */
    int held;           /* the folder's lock, until telemetry has it; 0: none */
    int fresh;          /* tensors that the checkpoint, of other attention, has nothing for */
    int stopped_by;     /* the signal that a process was sent, as all of them know it */
} trainer;

bool train_open(trainer *t, const config *c, const ops *o, dist *d, fault *f);
void train_close(trainer *t);
safetensors_tensor train_tensor(const param *p, const char *name, real *values);
/* Fills both lists, with room for two moments each, from x->flat. */
void train_list_tensors(train_tensors *x, const params *p, bool muon);
bool train_describe_tensors(trainer *t, fault *f);
/* Counts what the checkpoints beside the steps take. */
void train_note_snapshot(const config *c, const dist *d, int64_t parameters, arena *a);
bool train_load(trainer *t, const checkpoint *k, fault *f);
/* The weights alone. */
bool train_load_weights(trainer *t, const checkpoint *k, fault *f);
/* The same of a checkpoint with other attention, into the host's view of the tensors. */
bool train_carry(trainer *t, const checkpoint *k, bool moments, fault *f);
void train_say_attention(const trainer *t, const config_model *old);
/* Whether the run attends otherwise than the checkpoint that it goes on from. */
bool train_other_attention(const trainer *t, const checkpoint *k);
/* A checkpoint of what train_carry made, at once; the one that it was made of keeps its files. */
bool train_save_carried(trainer *t, const checkpoint *k, fault *f);
/* A checkpoint of t->state, unless there is one; beside the steps, or before it returns. */
bool train_save(trainer *t, bool beside, fault *f);
bool train_open_saver(trainer *t, fault *f);

const char *train_dtype_name(nsa_dtype dtype); /* "bf16" */

/* Of a run from its start; resume, stop and notes are the caller's. */
data_options train_data_options(const config *c, tokenizer *t, int64_t vocab, const dist *d);

/* A heartbeat fineweb_loader_..., where the data are such a stream. */
void train_note_loader(const trainer *t, const char *what);

/* env.json, mem_boot.json, opt_state_mb.txt, dtypes_report.txt, a line of history.jsonl; and one of
   memory's files alone. `k` is what the run goes on from, or NULL. */
bool train_report_start(const trainer *t, const checkpoint *k, fault *f);
bool train_report_memory(const trainer *t, const char *name, fault *f);
/* For heartbeats and metrics.json, where there is a device. */
void train_note_memory(const trainer *t);
/* The model's options for one of these processes. */
model_options train_model_options(const config *c, dist *d);

/* Whether all processes have the same settings; the same parameters; the same data and vocabulary,
   to go on with after the same step. */
bool train_same_settings(const config *c, dist *d, fault *f);
bool train_same_parameters(trainer *t, fault *f);
bool train_same_start(trainer *t, fault *f);
/* Prints why this process fails, with its rank where there are several. */
void train_complain(const dist *d, const char *why);

#endif

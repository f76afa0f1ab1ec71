/* checkpoint.h - a checkpoint is one folder, step_00000200, of safetensors files and a state.json,
   written aside, flushed, and renamed into place last. Twin: checkpoint.c. It does not know the
   model: it takes lists of named tensors. checkpoint_write touches no global state, so a thread may
   run it on a snapshot. */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "checkpoint/safetensors.h"
#include "config/config.h"
#include "data/data.h"

/* One file of a checkpoint: "model" (weights) or "optimizer" (moments), each a .safetensors. */
typedef struct checkpoint_part {
    const char *name;
    const safetensors_tensor *tensors;
    size_t count;
} checkpoint_part;

typedef struct checkpoint_state {
    int64_t step;  /* optimizer steps done */
    uint64_t seed; /* every random number is a function of it and of counters kept here */
    data_position data;
    double loss_scale; /* fp16: the scaler; 1 where there is none */
    int64_t scaler_good_steps, skipped_steps;
    double loss_first;  /* of step 1, for metrics.json */
    double val_loss;    /* of this step; NaN: it was not evaluated */
    double seconds;     /* trained so far */
    int64_t tokens;     /* trained on so far */
    int64_t vocabulary; /* its size and 24 bits of tokenizer_spelling; 0 or -1: not known */
} checkpoint_state;

/* Writes out_dir/checkpoints/step_N, points `latest` at it, and `best` where its validation loss is
   the lowest so far. Then removes of the steps up to N all but the highest `keep` (0: keeps all),
   the best, and the multiples of c's train.keep_every. On failure the older ones are as they
   were. */
bool checkpoint_write(const char *out_dir, const config *c, const checkpoint_state *state,
                      const checkpoint_part *parts, size_t count, int64_t keep, fault *f);

/* A checkpoint that has been found and whose state.json has been read and verified. */
typedef struct checkpoint {
    char path[CONFIG_PATH_BYTES]; /* the folder itself */
    checkpoint_state state;
    config config; /* the settings it was trained with; the tokenizer that lies beside the
                      checkpoints, out_dir/tokenizer, where they name none */
    struct json_t *files;
} checkpoint;

/* `path` is a checkpoint, or an out_dir (or its checkpoints folder), of which the newest is taken:
   the one `latest` names, or the highest whole step where that is missing. */
bool checkpoint_open(checkpoint *k, const char *path, fault *f);

/* From here on `k` is the newest checkpoint of out_dir, with these settings: it is linked or copied
   there where it is not there yet, or has others. Whoever resumes out_dir after a kill goes on from
   it. Its tensors must have been loaded. */
bool checkpoint_adopt(const checkpoint *k, const char *out_dir, const config *c, fault *f);

/* Where `k` is out_dir's own, its files also get a name under which nothing replaces them:
   step_00000060.left. */
bool checkpoint_set_aside(const checkpoint *k, const char *out_dir, const listener *notes,
                          fault *f);

/* Later checkpoints of out_dir, of a future that was given up, get names that nothing takes for
   newer ones: step_00000060.left. `best` is one of the others. */
bool checkpoint_leave_later(const char *out_dir, int64_t step, const listener *notes, fault *f);

/* Every file that the checkpoint lists is there, with its checksum. */
bool checkpoint_verify(const checkpoint *k, fault *f);

/* Whether an out_dir has a checkpoint, or the remains of one. */
bool checkpoint_exists(const char *out_dir);

/* Verifies the file's checksum, then fills the tensors (see safetensors_load). */
bool checkpoint_load(const checkpoint *k, const checkpoint_part *part, fault *f);
void checkpoint_close(checkpoint *k);

#endif

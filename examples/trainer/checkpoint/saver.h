/* saver.h - checkpoints beside the steps: a copy is taken between two steps, a thread writes it
   while the run goes on. Twin: saver.c. What is written, and in what order, is checkpoint.c's. */
#ifndef SAVER_H
#define SAVER_H

#include "checkpoint/checkpoint.h"

typedef struct saver saver;

typedef struct saver_options {
    const char *out_dir;
    const config *config;
    const checkpoint_part *parts; /* where the tensors live; the list is kept, not copied */
    size_t count;
    int64_t keep;
    int limit_s; /* how long a wait lasts; 0: an hour */
    /* Copies `bytes` bytes of a tensor to the host. */
    void (*copy)(const void *user, void *to, const void *from, size_t bytes);
    /* From the thread, once a checkpoint is in place. */
    void (*done)(const void *user, int64_t step);
    const void *user;
} saver_options;

/* Takes the memory of a copy, as much as the tensors, and starts the thread. */
saver *saver_open(const saver_options *o, fault *f);

/* Takes a copy and returns; the copy before must be written, for which it waits. False: that
   one, or an earlier one, could not be written. */
bool saver_write(saver *s, const checkpoint_state *state, fault *f);

/* False: a checkpoint could not be written. Does not wait. NULL: true, as below. */
bool saver_check(saver *s, fault *f);
/* Until nothing is under way any more, or a disk answers no more: then no wait lasts again. */
bool saver_wait(saver *s, fault *f);

/* Whether a wait has ended while the thread still writes: nobody else may write in out_dir. */
bool saver_is_stuck(saver *s);

/* Of one that is stuck only the thread goes on, and its memory stays. */
void saver_close(saver *s);

#endif

/* dist.h - several processes that train one model: how their gradients become one, where the
   optimizer's moments lie, and how a process that dies, stops or disagrees ends all of them. Twins:
   dist.c (what is sent when), dist_link.h (how). One process is a world of 1, in which every call
   is free.

   The flat array of gradients is cut into buckets, each bucket into one block a process. While
   backward still runs, buckets whose gradients are final are reduced, from the end of the array on,
   so that each process holds the sum of its own blocks. It keeps the moments of these blocks alone
   (ZeRO-1), updates their parameters, and then all blocks go to all processes. A sum is taken in an
   order that the layout decides, so one layout always gives the same bits.

   Processes may also divide sequences (context parallelism, model/context.c): groups of neighbours
   take the same rows of a batch, and exchange blocks inside their group.

   Over a link on the device's streams (NCCL) all of that is launched, and may be recorded in a
   graph: the device waits for the other processes, the host only for the step before. Else the host
   waits, and moves what is exchanged. */
#ifndef DIST_H
#define DIST_H

#include "config/config.h"
#include "dist/dist_link.h"

typedef struct dist {
    int rank, world;
    int context, part; /* neighbours that divide each sequence; which of them this one is */
    dist_link *link;   /* NULL: one process */
    bool compress;
    double timeout;       /* seconds that another process may keep this one waiting */
    int64_t bucket_bytes; /* at most */

    /* NULL, or called while this process waits and was told to end: for so long, and for whom:
       "rank 1, rank 3". */
    void (*waiting)(const struct dist *d, double seconds, const char *missing);

    const ops *o;
    real *value, *grad;
    int64_t elements, bucket;  /* of the flat arrays; of a bucket */
    int buckets, next, oldest; /* to be started next, and under way, counting down */
    void *memory[LINK_LANES];
    void *rows_memory; /* of the lane of rows */
    real *blocks;      /* one bucket, on the host */
    bool timed;        /* the host waits for each bucket, to say what its exchange took */
    double *times;     /* of each bucket, started and done, s since dist_begin; NULL: not wanted */
    double began;
    bool timing;
    bool unjoined,
        posted; /* on the stream: something was started; a step is not yet known to be done */
    unsigned char *shared; /* SHARE_BYTES of each process */
    bool ended;            /* by a timeout or another's last words; `why` says it */
    fault why;
} dist;

/* One process. */
dist dist_alone(void);

/* link NULL: one process. */
bool dist_open(dist *d, dist_link *link, fault *f);
/* Takes the settings of runtime.ddp_* and runtime.context_parallel; refuses those that contradict
   how the program was started. */
bool dist_settle(dist *d, const config *c, fault *f);
/* Groups of `context` neighbouring ranks, a divisor of world, take sequences together; all
   processes call it, and only then can blocks be exchanged. */
bool dist_divide(dist *d, int context, fault *f);
/* How many groups there are, and which one this process is in: what data are shared out among. */
int dist_groups(const dist *d);
int dist_group(const dist *d);
/* After a run that ended for all processes alike. */
void dist_close(dist *d);
/* After one that did not: tells the others why, if they did not tell us, and ends all. */
void dist_end(dist *d, const char *why, int code);

/* What the flat arrays must be a multiple of, and the memory that buckets take, and on rank 0 all
   moments while a checkpoint is written. */
int64_t dist_multiple(const dist *d);
size_t dist_bytes(const dist *d, const ops *o, int64_t elements);

/* The arrays of one model, until detach or close. */
bool dist_attach(dist *d, const ops *o, real *value, real *grad, int64_t elements, fault *f);
void dist_detach(dist *d);

/* What this process updates: elements first .. first + count - 1 of the flat arrays, whose moments
   begin at `own` in its own. */
typedef struct dist_piece {
    int64_t first, count, own;
} dist_piece;

int dist_pieces(const dist *d);
dist_piece dist_piece_at(const dist *d, int i);

/* A step: begin before the backward pass whose gradients are the last to be added; whenever all
   gradients from an element on are final; wait for the sums; add up the losses, labels and squares
   of the state; after the update, send it round, or any other array like it of which each process
   has its own pieces. */
void dist_begin(dist *d);
void dist_final_from(dist *d, int64_t first);
bool dist_reduced(dist *d, fault *f);
bool dist_add(dist *d, step_state *s, fault *f);
bool dist_spread(dist *d, real *array, fault *f);

/* Whether nobody waits in these, so that they may be recorded: one process, or a link on the
   stream. */
bool dist_on_stream(const dist *d);
/* There, a wait that is launched: what comes after it finds the sums. Elsewhere nothing. */
void dist_join(dist *d);
/* There, the host's wait for the step before: posted when all of that was launched, and caught up
   with before the host has launched more than a pass of the next, for a device that waits for a
   dead process takes only so much. Elsewhere it is done. */
void dist_post(dist *d);
bool dist_catch_up(dist *d, fault *f);

/* Among the processes that divide a sequence: a block of `each` reals of each of them; their own
   come to all of them, or each gets the sum of those of its number. Memory for at most so many
   reals; what it takes. */
bool dist_attach_blocks(dist *d, const ops *o, int64_t each, fault *f);
size_t dist_blocks_bytes(const dist *d, const ops *o, int64_t each);
void dist_gather_blocks(dist *d, real *blocks, int64_t each);
void dist_reduce_blocks(dist *d, real *blocks, int64_t each);
/* Whether the run has ended: then what a call left is not what it should be. */
bool dist_ended(const dist *d, fault *f);

/* Rank 0's `whole`, on the host, becomes an array of which each process has the pieces in `own`;
   and back, without a message: every process has read `whole`. */
bool dist_collect(dist *d, const real *own, real *whole, fault *f);
void dist_pick(const dist *d, real *own, const real *whole);

/* Each of `count` numbers becomes the sum over the processes. */
bool dist_sum(dist *d, double *x, int count, fault *f);
/* The largest of the processes' numbers, and the lowest rank that has it. */
bool dist_largest(dist *d, int64_t *x, int *rank, fault *f);
/* Whether all processes have the same `count` checksums. If not: the rank that stands alone, or the
   highest of those that differ from most, and the first checksum in which it does. */
bool dist_same(dist *d, const uint64_t *sums, int count, int *rank, int *which, fault *f);

#endif

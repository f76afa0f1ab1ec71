/* dist_link.h - how processes reach each other: what dist.c needs of MPI or of NCCL, as a table of
   functions. Twins: dist_mpi.c, dist_nccl.c. It knows no buckets and no timeouts; what is started
   here ends when `test` says so. Only the training thread calls it. */
#ifndef DIST_LINK_H
#define DIST_LINK_H

#include "ops/ops.h"

/* Exchanges that can be under way at once; each has a lane of its own: buckets, a few bytes, rows
   of a divided sequence. A link on the stream also tests LINK_STEP: whether the device has done
   what it was given before `post`. */
enum { LINK_LANES = 4, LINK_SMALL = LINK_LANES, LINK_ROWS, LINK_ALL, LINK_STEP = LINK_ALL };

typedef enum link_progress {
    LINK_WAITING,
    LINK_DONE,
    LINK_ENDED /* another process said why it ends: the fault holds its words */
} link_progress;

/* A bucket: a block of `each` reals for each process, in the back end's memory. */
typedef struct link_bucket {
    const ops *o;
    real *blocks;
    int64_t each;
    bool inside;   /* of this one's group alone (split): the first block is its first process's */
    bool compress; /* values travel as bf16 */
    void *memory;  /* lane_bytes of them */
} link_bucket;

typedef struct dist_link dist_link;

struct dist_link {
    const char *name, *launcher; /* "mpi", "mpirun -n 2" */
    int rank, world;
    int group;         /* ranks of a group, neighbours; 0: there are no groups */
    bool needs_device; /* blocks are a GPU's, and travel as they are */
    void *state;

    /* Makes groups of `size` ranks, a divisor of world, instead of those that there are. */
    bool (*split)(dist_link *l, int size, fault *f);

    /* Host memory that a lane needs for buckets of `each` reals for each of `processes`. */
    size_t (*lane_bytes)(const ops *o, int processes, int64_t each, bool compress);

    /* This process's block becomes the sum of all processes' blocks of its number, added in an
       order that the layout decides (over MPI that of the ranks); what the other blocks become is
       undefined. */
    void (*reduce_start)(dist_link *l, int lane, const link_bucket *b);
    /* Each process's own block comes to all others. */
    void (*gather_start)(dist_link *l, int lane, const link_bucket *b);
    /* The same for a few bytes of the host. */
    void (*share_start)(dist_link *l, int lane, void *blocks, size_t bytes_each);

    /* Links whose exchanges lie on the device's streams, in the order in which they were started;
       NULL elsewhere. What the operations launch after join comes behind all that was started. */
    void (*join)(dist_link *l, const ops *o);
    /* Losses, labels and squares become sums over all processes. */
    void (*add_start)(dist_link *l, const ops *o, step_state *s);
    void (*post)(dist_link *l, const ops *o);

    link_progress (*test)(dist_link *l, int lane, fault *f);
    bool (*is_missing)(const dist_link *l, int lane, int rank); /* while `test` says WAITING */

    void (*tell)(dist_link *l, const char *text); /* last words, to all others */
    void (*end)(dist_link *l, int code);          /* ends all processes; does not return */
    void (*close)(dist_link *l);                  /* all of them are about to */
};

#endif

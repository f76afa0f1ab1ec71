/* dist_meet.h - how the processes of a run find each other: rank 0 listens, the others come, and
   each shows that it is of the run. Twin: dist_meet.c. What they say then is dist_tcp.c's. Nothing
   is secret that goes over the wire: who can read the network can come in. */
#ifndef DIST_MEET_H
#define DIST_MEET_H

#include "base/fault.h"

typedef struct meeting {
    const char *address; /* rank 0's: it listens on the interface that has it, and no other */
    int port, rank, world;
    const char *token; /* what the processes of this run have in common, and others do not */
    double timeout;    /* seconds until all must be there */
} meeting;

/* MASTER_TOKEN, or what the launcher calls the run (TORCHELASTIC_RUN_ID, SLURM_JOB_ID), or "". */
const char *meeting_token(void);

/* Rank 0 gets a socket for each of the others, by rank, and they get one at 0; all else is -1. What
   a stranger sends, or does not send, costs nobody anything. */
bool meeting_hold(const meeting *m, int *sockets, fault *f);

#endif

/* dist_nccl.h - processes, one a GPU, that NCCL connects. Twin: dist_nccl.c, which is built where
   NCCL is found. */
#ifndef DIST_NCCL_H
#define DIST_NCCL_H

#include "dist/dist_link.h"

/* First in main. Reads what torchrun sets: WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT,
   and makes LOCAL_RANK's GPU the process's. NULL with an empty fault: WORLD_SIZE is not set, or
   1. */
dist_link *dist_nccl_open(fault *f);

#endif

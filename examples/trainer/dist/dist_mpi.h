/* dist_mpi.h - processes that MPI connects. Twin: dist_mpi.c, which is built where MPI is found. */
#ifndef DIST_MPI_H
#define DIST_MPI_H

#include "dist/dist_link.h"

/* First in main. NULL: no launcher has started several processes, and MPI is left
   alone. */
dist_link *dist_mpi_open(void);

#endif

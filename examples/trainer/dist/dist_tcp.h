/* dist_tcp.h - a few bytes between processes that nothing but variables of the environment connects
   (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE): all talk to rank 0. Twin: dist_tcp.c. How they find
   each other is dist_meet.c's; what is large goes over NCCL (dist_nccl.c). */
#ifndef DIST_TCP_H
#define DIST_TCP_H

#include "dist/dist_link.h"
#include "dist/dist_meet.h"

typedef struct dist_tcp dist_tcp;

/* Rank 0 waits for the others, which keep trying. */
dist_tcp *tcp_open(const meeting *m, fault *f);
void tcp_close(dist_tcp *t);

/* As the functions of dist_link.h. */
void tcp_share_start(dist_tcp *t, void *blocks, size_t bytes_each);
link_progress tcp_test(dist_tcp *t, fault *f);
bool tcp_is_missing(const dist_tcp *t, int rank);
void tcp_tell(dist_tcp *t, const char *text);

/* Whether another process has said its last words, or is gone. */
bool tcp_ended(dist_tcp *t, fault *f);

#endif

/* heartbeat.h - heartbeat_rank{r}.jsonl: one JSON object a line, each with every field, null
   where a field says nothing at that moment. Twin: heartbeat.c. It is appended to, by a resumed
   run too; a line is in the file, not only in memory, when the call returns. Callers see to it
   that one thread writes at a time. */
#ifndef HEARTBEAT_H
#define HEARTBEAT_H

#include <stdint.h>

#include "base/fault.h"
#include "base/stats.h"

typedef struct heartbeat {
    bool on; /* false: switched off, lines go nowhere */
    int fd;
    int64_t bytes; /* of whole lines in the file */
    int64_t rank;
    char path[1280];
} heartbeat;

typedef struct heartbeat_line {
    const char *msg; /* boot, beat, progress, step_end, watchdog_dump, fineweb_loader_... */
    int64_t step;    /* done */
    double gpu_mem_alloc, gpu_mem_reserved; /* MiB; 0 where there is no GPU */
    double loss, toks_per_s, grad_norm;     /* NaN: not known */
    const stats *stats;                     /* NULL: not known */
} heartbeat_line;

bool heartbeat_open(heartbeat *h, const char *folder, int64_t rank, fault *f);
void heartbeat_close(heartbeat *h);

/* The time, the process, the phase, the layer and the counts of fallbacks are added here. */
bool heartbeat_write(heartbeat *h, const heartbeat_line *line, fault *f);

#endif

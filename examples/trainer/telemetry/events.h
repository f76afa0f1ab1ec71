/* events.h - scalars in the file format that TensorBoard reads: records framed by masked
   CRC-32C, each an Event message of protocol buffers. Twin: events.c. Only what scalars need of
   the format. */
#ifndef EVENTS_H
#define EVENTS_H

#include <stdint.h>
#include <stdio.h>

#include "base/fault.h"

typedef struct events {
    FILE *file; /* NULL: switched off, scalars go nowhere */
    char path[1600];
} events;

typedef struct events_scalar {
    const char *tag; /* "train/loss" */
    double value;
} events_scalar;

/* A new file in folder/tb; a resumed run adds its own beside those of the runs before, and says
   that what those have of `first_step` and later is void. */
bool events_open(events *e, const char *folder, int64_t first_step, fault *f);
void events_close(events *e);

/* All scalars of one step, as one record, in the file when this returns. */
bool events_write(events *e, int64_t step, const events_scalar *scalars, int count, fault *f);

#endif

/* terminal.h - lines on the standard output from a thread of their own, so that a reader that
   stalls (a full pipe, a terminal that was stopped) stops neither a step nor the watch. Twin:
   terminal.c. What nobody reads for long is dropped, and counted. */
#ifndef TERMINAL_H
#define TERMINAL_H

#include <stddef.h>

#include "base/fault.h"

typedef struct terminal terminal;

terminal *terminal_open(int fd, fault *f);

/* Any thread; returns at once. Dropped where too much waits already. */
void terminal_put(terminal *t, const char *text, size_t bytes);

/* Waits until all is written, for so many seconds at most. */
void terminal_flush(terminal *t, double seconds);

/* After a flush of two seconds; a thread that is stuck in a write is left behind. */
void terminal_close(terminal *t);

#endif

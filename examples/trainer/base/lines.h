/* lines.h - lines from a file or a pipe, one at a time, that another thread can interrupt.
   Twin: lines.c. */
#ifndef LINES_H
#define LINES_H

#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"

enum { LINES_LONGEST = 1 << 28 };

typedef struct lines {
    int fd, cancel;   /* a read ends once `cancel` is readable */
    const char *name; /* for messages */
    char *buffer;
    size_t begin, end, room;
    int64_t offset; /* of buffer[begin] */
    bool ended;
} lines;

typedef enum lines_result { LINES_ONE, LINES_END, LINES_FAULT } lines_result;

/* Takes over fd, which stands at `offset`. */
void lines_open(lines *l, int fd, const char *name, int64_t offset, int cancel);
void lines_close(lines *l);

/* The next line without its newline, valid until the next call. */
lines_result lines_next(lines *l, const char **text, size_t *bytes, fault *f);

/* The next byte without taking it; LINES_END at the end. */
lines_result lines_peek(lines *l, char *byte, fault *f);

#endif

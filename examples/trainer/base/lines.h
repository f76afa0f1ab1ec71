/* lines.h - lines from a file or a pipe, one at a time, that another thread can interrupt; or any
   other pieces of them. Twin: lines.c. How packed bytes are unpacked is data/unpack.c's. */
#ifndef LINES_H
#define LINES_H

#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"

enum { LINES_LONGEST = 1 << 28 };

/* One step of a filter: it takes some of `from` and puts at most `room` bytes at `to`. */
typedef struct lines_piece {
    const char *from;
    size_t bytes, taken;
    bool ended; /* no more come behind these */
    char *to;
    size_t room, made;
    bool done; /* nothing more is made */
} lines_piece;

/* Stands between the descriptor and the lines. */
typedef struct lines_filter lines_filter;
struct lines_filter {
    void *state;
    bool (*step)(lines_filter *filter, lines_piece *piece, const char *name, fault *f);
    void (*close)(lines_filter *filter);
};

typedef struct lines {
    int fd, cancel;   /* a read ends once `cancel` is readable */
    const char *name; /* for messages */
    char *buffer;
    size_t begin, end, room;
    int64_t offset; /* of buffer[begin] */
    bool ended;
    int64_t arrived; /* bytes that the descriptor has given */
    lines_filter filter;
    char *packed; /* what the filter has not taken */
    size_t packed_begin, packed_end;
    bool packed_ended;
} lines;

typedef enum lines_result { LINES_ONE, LINES_END, LINES_FAULT } lines_result;

/* Takes over fd, which stands at `offset`. */
void lines_open(lines *l, int fd, const char *name, int64_t offset, int cancel);
void lines_close(lines *l);

/* The next line without its newline, valid until the next call. */
lines_result lines_next(lines *l, const char **text, size_t *bytes, fault *f);

/* At least `want` of the next bytes, without taking them; fewer only at the end. */
bool lines_head(lines *l, size_t want, const char **text, size_t *bytes, fault *f);

/* Passes over bytes that lines_head has shown. */
void lines_take(lines *l, size_t bytes);

/* Goes to this byte of what is read: of a plain file by a seek, else by reading up to it. */
bool lines_seek(lines *l, int64_t offset, fault *f);

/* From the next byte on, lines are of what the filter makes; closes it with the lines. */
bool lines_unpack(lines *l, lines_filter filter, fault *f);

#endif

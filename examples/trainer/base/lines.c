/* lines.c - see lines.h. */
#include "base/lines.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void lines_open(lines *l, int fd, const char *name, int64_t offset, int cancel) {
    memset(l, 0, sizeof *l);
    l->fd = fd;
    l->name = name;
    l->offset = offset;
    l->cancel = cancel;
}

void lines_close(lines *l) {
    free(l->buffer);
    l->buffer = NULL;
    if (l->fd >= 0) close(l->fd);
    l->fd = -1;
}

static bool make_room(lines *l, fault *f) {
    if (l->begin) {
        memmove(l->buffer, l->buffer + l->begin, l->end - l->begin);
        l->end -= l->begin;
        l->begin = 0;
    }
    if (l->end < l->room) return true;
    if (l->room >= LINES_LONGEST)
        return fault_set(f, "%s: the line at byte %lld is longer than %d bytes", l->name,
                         (long long)l->offset, LINES_LONGEST);
    size_t room = l->room ? l->room * 2 : 1 << 16;
    char *more = realloc(l->buffer, room);
    if (!more) return fault_set(f, "%s: out of memory for a line", l->name);
    l->buffer = more;
    l->room = room;
    return true;
}

static bool wait_readable(lines *l, fault *f) {
    struct pollfd fds[2] = {{.fd = l->fd, .events = POLLIN}, {.fd = l->cancel, .events = POLLIN}};
    for (;;) {
        int ready = poll(fds, 2, -1);
        if (ready < 0 && errno == EINTR) continue;
        if (ready < 0) return fault_errno(f, "%s: cannot wait for data", l->name);
        if (fds[1].revents) return fault_set(f, "%s: reading was stopped", l->name);
        return true;
    }
}

/* Adds what the descriptor has to the buffer, or sets `ended`. */
static bool fill(lines *l, fault *f) {
    if (!make_room(l, f)) return false;
    for (;;) {
        if (!wait_readable(l, f)) return false;
        ssize_t got = read(l->fd, l->buffer + l->end, l->room - l->end);
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (got < 0)
            return fault_errno(f, "%s: cannot read at byte %lld", l->name,
                               (long long)(l->offset + (int64_t)(l->end - l->begin)));
        l->ended = got == 0;
        l->end += (size_t)got;
        return true;
    }
}

lines_result lines_peek(lines *l, char *byte, fault *f) {
    while (l->begin == l->end && !l->ended)
        if (!fill(l, f)) return LINES_FAULT;
    if (l->begin == l->end) return LINES_END;
    *byte = l->buffer[l->begin];
    return LINES_ONE;
}

lines_result lines_next(lines *l, const char **text, size_t *bytes, fault *f) {
    size_t searched = 0;
    for (;;) {
        size_t have = l->end - l->begin;
        const char *newline =
            have > searched ? memchr(l->buffer + l->begin + searched, '\n', have - searched) : NULL;
        if (newline || (l->ended && have)) {
            *text = l->buffer + l->begin;
            *bytes = newline ? (size_t)(newline - *text) : have;
            size_t taken = *bytes + (newline != NULL);
            l->begin += taken;
            l->offset += (int64_t)taken;
            return LINES_ONE;
        }
        if (l->ended) return LINES_END;
        searched = have;
        if (!fill(l, f)) return LINES_FAULT;
    }
}

/* lines.c - see lines.h. */
#include "base/lines.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PACKED = 1 << 16 }; /* bytes that a filter is given at once */

void lines_open(lines *l, int fd, const char *name, int64_t offset, int cancel) {
    memset(l, 0, sizeof *l);
    l->fd = fd;
    l->name = name;
    l->offset = l->arrived = offset;
    l->cancel = cancel;
}

void lines_close(lines *l) {
    free(l->buffer);
    free(l->packed);
    if (l->filter.close) l->filter.close(&l->filter);
    l->filter.close = NULL;
    l->buffer = l->packed = NULL;
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
        return fault_in_data(f, "%s: the line at byte %lld is longer than %d bytes", l->name,
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

/* What the descriptor has; nothing at its end. */
static bool read_some(lines *l, char *to, size_t room, size_t *got, fault *f) {
    for (;;) {
        if (!wait_readable(l, f)) return false;
        ssize_t count = read(l->fd, to, room);
        if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (count < 0)
            return fault_errno(f, "%s: cannot read at byte %lld", l->name, (long long)l->arrived);
        *got = (size_t)count;
        l->arrived += count;
        return true;
    }
}

/* One step of the filter, with more packed bytes where it has taken all. */
static bool fill_packed(lines *l, size_t *got, fault *f) {
    lines_piece p = {.to = l->buffer + l->end, .room = l->room - l->end};
    if (l->packed_begin == l->packed_end && !l->packed_ended) {
        l->packed_begin = l->packed_end = 0;
        if (!read_some(l, l->packed, PACKED, &l->packed_end, f)) return false;
        l->packed_ended = !l->packed_end;
    }
    p.from = l->packed + l->packed_begin;
    p.bytes = l->packed_end - l->packed_begin;
    p.ended = l->packed_ended;
    if (!l->filter.step(&l->filter, &p, l->name, f)) return false;
    l->packed_begin += p.taken;
    l->ended = p.done;
    *got = p.made;
    return true;
}

/* Adds what comes next to the buffer, or sets `ended`. */
static bool fill(lines *l, fault *f) {
    size_t got = 0;
    if (!make_room(l, f)) return false;
    if (!l->filter.step) {
        if (!read_some(l, l->buffer + l->end, l->room - l->end, &got, f)) return false;
        l->ended = !got;
    } else {
        do {
            if (!fill_packed(l, &got, f)) return false;
        } while (!got && !l->ended);
    }
    l->end += got;
    return true;
}

bool lines_head(lines *l, size_t want, const char **text, size_t *bytes, fault *f) {
    while (l->end - l->begin < want && !l->ended)
        if (!fill(l, f)) return false;
    *text = l->buffer + l->begin;
    *bytes = l->end - l->begin;
    return true;
}

void lines_take(lines *l, size_t bytes) {
    l->begin += bytes;
    l->offset += (int64_t)bytes;
}

bool lines_seek(lines *l, int64_t offset, fault *f) {
    const char *text;
    size_t bytes;
    if (!l->filter.step && lseek(l->fd, (off_t)offset, SEEK_SET) >= 0) {
        l->begin = l->end = 0;
        l->offset = l->arrived = offset;
        l->ended = false;
        return true;
    }
    while (l->offset < offset) {
        if (!lines_head(l, 1, &text, &bytes, f)) return false;
        if (!bytes)
            return fault_set(f, "%s: has %lld bytes; cannot go to byte %lld", l->name,
                             (long long)l->offset, (long long)offset);
        int64_t left = offset - l->offset;
        lines_take(l, (int64_t)bytes < left ? bytes : (size_t)left);
    }
    return l->offset == offset ||
           fault_set(f, "%s: cannot go back to byte %lld", l->name, (long long)offset);
}

bool lines_unpack(lines *l, lines_filter filter, fault *f) {
    l->filter = filter;
    l->packed_end = l->end - l->begin;
    l->packed = malloc(l->packed_end > PACKED ? l->packed_end : PACKED);
    if (!l->packed) return fault_set(f, "%s: out of memory", l->name);
    if (l->packed_end) memcpy(l->packed, l->buffer + l->begin, l->packed_end);
    l->packed_ended = l->ended;
    l->ended = false;
    l->begin = l->end = 0;
    return true;
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

/* stop.c - see stop.h. */
#include "stop.h"

#include <stdlib.h>
#include <string.h>

/* Whether one of the texts begins here, wholly or as far as there are bytes. */
static bool begins(const stop_printer *p, size_t at, bool *whole) {
    size_t left = p->count - at;
    bool some = false;
    *whole = false;
    for (int i = 0; i < p->stops->count; i++) {
        size_t length = strlen(p->stops->at[i]);
        if (memcmp(p->stops->at[i], p->held + at, length < left ? length : left)) continue;
        some = true;
        *whole = *whole || length <= left;
    }
    return some;
}

static bool hold(stop_printer *p, const char *bytes, size_t count, fault *f) {
    if (p->count + count > p->room) {
        size_t room = 2 * (p->count + count);
        char *more = realloc(p->held, room);
        if (!more) return fault_set(f, "out of memory");
        p->held = more;
        p->room = room;
    }
    if (count) memcpy(p->held + p->count, bytes, count);
    p->count += count;
    return true;
}

/* Bytes from the first that may begin a text stay; a whole one ends all. */
bool stop_put(stop_printer *p, const char *bytes, size_t count, fault *f) {
    size_t at = 0;
    if (p->found) return true;
    if (!hold(p, bytes, count, f)) return false;
    while (at < p->count && !begins(p, at, &p->found)) at++;
    sample_put_bytes(&p->out, p->held, at);
    p->count -= at;
    memmove(p->held, p->held + at, p->count);
    return true;
}

void stop_flush(stop_printer *p) {
    if (!p->found) sample_put_bytes(&p->out, p->held, p->count);
    p->count = 0;
    sample_flush(&p->out);
}

void stop_close(stop_printer *p) {
    free(p->held);
}

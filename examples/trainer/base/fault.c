/* fault.c - formatting of messages. Twin: fault.h. */
#include "base/fault.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

static bool fill(fault *f, const char *format, va_list args, bool stays) {
    vsnprintf(f->text, sizeof f->text, format, args);
    text_keep_printable(f->text);
    f->stays = stays;
    return false;
}

bool fault_set(fault *f, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fill(f, format, args, false);
    va_end(args);
    return false;
}

bool fault_in_data(fault *f, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fill(f, format, args, true);
    va_end(args);
    return false;
}

bool fault_errno(fault *f, const char *format, ...) {
    int error = errno;
    char reason[128] = "unknown error";
    va_list args;
    va_start(args, format);
    int used = vsnprintf(f->text, sizeof f->text, format, args);
    va_end(args);
    (void)strerror_r(error, reason, sizeof reason);
    if (used >= 0 && (size_t)used < sizeof f->text)
        snprintf(f->text + used, sizeof f->text - (size_t)used, ": %s", reason);
    text_keep_printable(f->text);
    f->stays = false;
    return false;
}

void listener_say(const listener *to, const char *format, ...) {
    char line[FAULT_BYTES];
    va_list args;
    if (!to || !to->say) return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    text_keep_printable(line);
    to->say(to->user, line);
}

static void print_line(void *user, const char *line) {
    (void)user;
    fprintf(stderr, "%s\n", line);
}

listener listener_stderr(void) {
    listener l = {print_line, NULL};
    return l;
}

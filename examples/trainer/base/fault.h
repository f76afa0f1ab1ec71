/* fault.h - one error message, filled where it happens and printed where the program ends.
   Twin: fault.c. It is not a log: a fault that is set is the reason why a call returned false. */
#ifndef FAULT_H
#define FAULT_H

#include <stdbool.h>

#define FAULT_BYTES 1024

typedef struct fault {
    char text[FAULT_BYTES]; /* what, where, and what is allowed; without a newline or other control
                               bytes */
    bool stays;             /* in what was read: to read it again would find the same */
} fault;

/* Fills the message and returns false, so that a caller can write `return fault_set(f, ...)`. */
bool fault_set(fault *f, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same of what was read, and will be no better when it is read again. */
bool fault_in_data(fault *f, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same with ": " and the text of errno behind it. */
bool fault_errno(fault *f, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Where a module says what is no error: a shard opened, a new epoch, a line skipped. Any thread. */
typedef struct listener {
    void (*say)(void *user, const char *line);
    void *user;
} listener;

/* Formats one line for the listener; without one (say is NULL) it is dropped. */
void listener_say(const listener *to, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* A listener that prints each line to stderr. */
listener listener_stderr(void);

#endif

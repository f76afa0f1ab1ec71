/* memory.h - whether memory that is asked for is there: where a machine or a control group has
   less, the kernel hands it out, and kills whoever touches it. Twin: memory.c. It hands out
   nothing. */
#ifndef MEMORY_H
#define MEMORY_H

#include <stddef.h>

#include "base/fault.h"

/* Bytes, swap included, that a process may have: those of the machine, and no more than its control
   groups allow (memory.max, or version 1's memory.limit_in_bytes). */
double memory_limit(void);

/* What a group's folder allows of a machine with so much swap, in version 2 and 1; INFINITY. */
double memory_of_group(const char *folder);
double memory_of_group_1(const char *folder);

/* The bytes that an array of `used` bytes, which is full, grows to for `more`: twice as many, of a
   large one an eighth more. 0, and a fault, where these would pass the limit. */
size_t memory_grow(const char *what, size_t used, size_t more, fault *f);

/* Whether that suffices for so many bytes more than this process has; `what` they are for is what
   the message begins with. */
bool memory_fits(const char *what, size_t bytes, fault *f);

#endif

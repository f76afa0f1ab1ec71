/* dump.h - on SIGUSR1, where the training thread is: phase, layer, step and a backtrace,
   appended to stack_rank{r}.txt at once, whatever the thread is doing. Twin: dump.c. */
#ifndef DUMP_H
#define DUMP_H

#include <stdint.h>

#include "base/fault.h"

/* SIGUSR1 does nothing until a dump can be written; by itself it would end the process. */
void dump_prepare(void);

/* Called by the training thread. */
bool dump_install(const char *folder, int64_t rank, fault *f);

/* What a dump says of the step; any thread. */
void dump_step(int64_t step);

/* Asks for one, from another thread. */
void dump_ask(void);

int dump_count(void); /* written so far */
const char *dump_path(void);

#endif

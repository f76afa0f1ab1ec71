/* signals.h - what signals do to a run. SIGTERM, SIGINT, SIGHUP, SIGUSR2 and SIGXCPU ask it to save
   and end, which it looks at after each step; a second one ends it at once. SIGPIPE and SIGXFSZ are
   ignored, so that a write that cannot be done fails with a message. Twin: signals.c.

   No handler may run on the stack of a thread that computes: a library's compiled kernels may point
   the stack pointer into their workspace (oneDNN's f32 products do), and what a handler puts below
   it would then overwrite the heap. */
#ifndef SIGNALS_H
#define SIGNALS_H

#include <pthread.h>

#include "base/fault.h"

/* From here on those that ask, and SIGUSR1, reach a thread of their own, and neither the calling
   thread nor those that it starts. Called before OpenMP starts any. */
bool signals_begin(fault *f);

/* Also for signals that a program dies of (a second SIGTERM, SIGSEGV, SIGALRM and the like): `last`
   is called first, and may do only what is safe in a signal handler. NULL: nothing. What whoever
   started the program lets it ignore stays so, and what a profiler handles; not SIGINT, SIGTERM. */
void signals_install(void (*last)(int number));

void signals_ask(int number);     /* as if this signal had come, once */
int signals_stop_requested(void); /* the signal's number, or 0 */
const char *signals_name(int number);

/* Starts a thread to which none of them goes, but those that it dies of: the others are for the
   training thread. `what` it does is for the message, "watches the run". */
bool signals_start_thread(pthread_t *thread, void *(*run)(void *), void *user, const char *what,
                          fault *f);

#endif

/* threads.c - see threads.h. */
#include "threads.h"

#include <stdlib.h>
#include <unistd.h>

void threads_wait_asleep(char **argv) {
#ifdef _OPENMP
    if (getenv("OMP_WAIT_POLICY") || setenv("OMP_WAIT_POLICY", "passive", 0)) return;
    execv("/proc/self/exe", argv); /* returns only where it cannot be done: then threads spin */
#else
    (void)argv;
#endif
}

/* threads.c - see threads.h. */
#include "base/threads.h"

#include <stdlib.h>
#include <unistd.h>

void threads_wait_asleep(char **argv) {
#ifdef _OPENMP
    if (getenv("OMP_WAIT_POLICY") || setenv("OMP_WAIT_POLICY", "passive", 0)) return;
    setenv("GOMP_SPINCOUNT", "10000", 0); /* some 100 us: most waits of a small model are shorter */
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;  /* the program's own name, for that is what `ps` will show */
    execv(path, argv); /* returns only where it cannot be done: then threads spin */
#else
    (void)argv;
#endif
}

/* threads.c - see threads.h. */
#include "base/threads.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/cgroup.h"

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

/* "max 100000", or microseconds of processors in each period. */
static double quota_in(const char *folder) {
    char path[PATH_MAX];
    double quota, period;
    if (snprintf(path, sizeof path, "%s/cpu.max", folder) >= (int)sizeof path) return INFINITY;
    FILE *file = fopen(path, "r");
    int known = file && fscanf(file, "%lf %lf", &quota, &period) == 2 && quota > 0 && period > 0;
    if (file) fclose(file);
    return known ? ceil(quota / period) : INFINITY;
}

int threads_of_quota(const char *root, const char *group) {
    double least = cgroup_least(root, group, quota_in);
    return least < INT_MAX ? (int)least : INT_MAX;
}

int threads_available(void) {
#ifdef _OPENMP
    int processors = omp_get_num_procs(); /* of the affinity */
#else
    int processors = 1;
#endif
    double quota = cgroup_here(quota_in, NULL, NULL);
    return quota < processors ? (int)quota : processors;
}

/* Not OpenMP's own word: a BLAS that is told to use one thread changes that. */
int threads_asked(int setting) {
    const char *given = getenv("OMP_NUM_THREADS");
    return setting || !given ? setting : atoi(given);
}

int threads_granted(int setting) {
    int threads = 1, available = threads_available();
#ifdef _OPENMP
    threads = setting ? setting : omp_get_max_threads();
#else
    (void)setting;
#endif
    return threads < available ? threads : available;
}

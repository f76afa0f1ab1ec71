/* threads.c - see threads.h. */
#include "base/threads.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

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
static int quota_in(const char *folder) {
    char path[PATH_MAX];
    double quota, period;
    if (snprintf(path, sizeof path, "%s/cpu.max", folder) >= (int)sizeof path) return INT_MAX;
    FILE *file = fopen(path, "r");
    int known = file && fscanf(file, "%lf %lf", &quota, &period) == 2 && quota > 0 && period > 0;
    if (file) fclose(file);
    if (!known || quota / period >= INT_MAX) return INT_MAX;
    int whole = (int)(quota / period);
    return whole + (whole * period < quota);
}

int threads_of_quota(const char *root, const char *group) {
    char folder[PATH_MAX];
    int least = INT_MAX, length = snprintf(folder, sizeof folder, "%s%s", root, group);
    if (length < 0 || length >= (int)sizeof folder) return INT_MAX;
    for (size_t end = (size_t)length;; end--) {
        if (folder[end] && folder[end] != '/') continue;
        folder[end] = 0;
        int here = quota_in(folder);
        least = here < least ? here : least;
        if (end <= strlen(root)) return least;
    }
}

int threads_available(void) {
#ifdef _OPENMP
    int processors = omp_get_num_procs(); /* of the affinity */
#else
    int processors = 1;
#endif
    char line[PATH_MAX];
    int quota = INT_MAX;
    FILE *file = fopen("/proc/self/cgroup", "r");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "0::", 3)) quota = threads_of_quota("/sys/fs/cgroup", line + 3);
    }
    if (file) fclose(file);
    return quota < processors ? quota : processors;
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

/* report.h: what the programs of this folder time and report with: a clock, a median, a file's
   first lines. The program defines _POSIX_C_SOURCE. No test. */
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H

#include "origin.h"
#include "problem.h"

static inline double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct timing {
    double median, spread; /* seconds; (slowest - fastest) / median */
} timing;

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline timing summarise(double *times, int n) {
    timing t;
    qsort(times, (size_t)n, sizeof *times, compare_doubles);
    t.median = times[n / 2];
    t.spread = (times[n - 1] - times[0]) / t.median;
    return t;
}

/* What NSA_ISA_DETECT finds. */
static const char *widest_isa(void) {
    int isa = NSA_ISA_NEON_BF16;
    while (!nsa_isa_available((nsa_isa)isa)) isa--;
    return nsa_isa_name((nsa_isa)isa);
}

/* The object's first lines. */
static void report_origin(FILE *json) {
    origin o = origin_here();
    fprintf(json, "{\n  \"machine\": \"%s, %s\",\n  \"date\": \"%s\",\n  \"commit\": \"%s\",\n",
            o.machine, widest_isa(), o.date, o.commit);
}

#endif

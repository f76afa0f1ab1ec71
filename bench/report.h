/* report.h: what the programs of this folder time and report with: a clock, a median, where and
   when a file of figures was made. The program defines _POSIX_C_SOURCE. No test. */
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H

#include "problem.h"
#include <time.h>

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

static timing summarise(double *times, int n) {
    timing t;
    qsort(times, (size_t)n, sizeof *times, compare_doubles);
    t.median = times[n / 2];
    t.spread = (times[n - 1] - times[0]) / t.median;
    return t;
}

/* What NSA_ISA_DETECT finds. */
static const char *widest_isa(void) {
    int isa = NSA_ISA_NEON;
    while (!nsa_isa_available((nsa_isa)isa)) isa--;
    return nsa_isa_name((nsa_isa)isa);
}

/* The first line of a command's output, as a JSON string's inside. */
static void first_line(const char *command, char *to, size_t size) {
    FILE *f = popen(command, "r");
    size_t n = 0;
    int c;
    while (f && (c = fgetc(f)) != EOF && c != '\n')
        if (n + 1 < size && c >= 32 && c != '"' && c != '\\') to[n++] = (char)c;
    to[n] = 0;
    if (f) pclose(f);
}

/* The object's first lines. */
static void report_origin(FILE *json) {
    char machine[200], commit[64], date[16];
    time_t now = time(NULL);
    first_line("lscpu | sed -n 's/^Model name: *//p'", machine, sizeof machine);
    first_line("git rev-parse --short HEAD 2>/dev/null", commit, sizeof commit);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    fprintf(json, "{\n  \"machine\": \"%s, %s\",\n  \"date\": \"%s\",\n  \"commit\": \"%s\",\n",
            machine, widest_isa(), date, commit);
}

#endif

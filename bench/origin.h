/* origin.h: where and when a file of figures was made: machine, commit, date. The program defines
   _POSIX_C_SOURCE. Twin: machine and commit of scripts/record_runs.py. No test. */
#ifndef BENCH_ORIGIN_H
#define BENCH_ORIGIN_H

#include <stdio.h>
#include <time.h>

typedef struct origin {
    char machine[200], commit[64], date[16];
} origin;

/* The first line of a command's output, as a JSON string's inside. */
static inline void first_line(const char *command, char *to, size_t size) {
    FILE *f = popen(command, "r");
    size_t n = 0;
    int c;
    while (f && (c = fgetc(f)) != EOF && c != '\n')
        if (n + 1 < size && c >= 32 && c != '"' && c != '\\') to[n++] = (char)c;
    to[n] = 0;
    if (f) pclose(f);
}

/* A commit ends in -dirty where files differ from it: what was measured is then not that commit.
   Tables and the pages that show them do not count, for they change while a series is measured. */
static inline origin origin_here(void) {
    origin o;
    time_t now = time(NULL);
    first_line("lscpu | sed -n 's/^Model name: *//p'", o.machine, sizeof o.machine);
    first_line("c=$(git rev-parse --short HEAD 2>/dev/null) && "
               "if git diff --quiet HEAD -- ':!bench/results' ':!*.md'; then echo $c; "
               "else echo $c-dirty; fi",
               o.commit, sizeof o.commit);
    strftime(o.date, sizeof o.date, "%Y-%m-%d", gmtime(&now));
    return o;
}

#endif

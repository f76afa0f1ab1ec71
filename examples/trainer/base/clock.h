/* clock.h - a clock that no one sets: what it says, waiting by it, the middle of times. Twin: none.
   Not here: the date and the time of day (heartbeat.c). */
#ifndef CLOCK_H
#define CLOCK_H

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

static inline double clock_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double clock_ms(void) {
    return 1e3 * clock_seconds();
}

/* So many seconds from now, for waits on a condition of clock_condition. */
static inline struct timespec clock_in(double seconds) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    double end = (double)t.tv_nsec * 1e-9 + seconds;
    t.tv_sec += (time_t)end;
    t.tv_nsec = (long)((end - (double)(time_t)end) * 1e9);
    return t;
}

static inline void clock_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

static inline int clock_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The time that `percent` of them do not pass, the lower of two; sorts them. 0 where there are
   none. */
static inline double clock_percentile(double *times, size_t count, size_t percent) {
    qsort(times, count, sizeof *times, clock_compare);
    return count ? times[(count - 1) * percent / 100] : 0;
}

#endif

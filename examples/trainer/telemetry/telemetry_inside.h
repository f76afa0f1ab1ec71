/* telemetry_inside.h - a run's telemetry, as its two files have it. Twins: telemetry.c (what is
   opened, watched, closed), telemetry_step.c (a step: its rows, its line, its verdict). Programs
   include telemetry.h, not this. */
#ifndef TELEMETRY_INSIDE_H
#define TELEMETRY_INSIDE_H

#include <pthread.h>

#include "telemetry/anomaly.h"
#include "telemetry/csv.h"
#include "telemetry/events.h"
#include "telemetry/heartbeat.h"
#include "telemetry/metrics.h"
#include "telemetry/telemetry.h"
#include "telemetry/terminal.h"

enum { TELEMETRY_RATES = 1024 };

struct telemetry {
    const config *config;
    terminal *log; /* NULL: silent */
    int held;      /* descriptor of the folder's lock; -1: none */
    bool is_first_rank, resumed;
    csv training, val, k_stats, fallbacks;
    bool displaced; /* the first of them: it has been said */
    events events;
    char metrics_path[CONFIG_PATH_BYTES + 32];
    metrics metrics;
    double rates[TELEMETRY_RATES]; /* tokens/s of the newest steps, one after the other in a ring */
    int64_t rate_count;
    int64_t last_eval;                   /* of the rows of val.csv that a resumed run found */
    double line_tokens, line_seconds;    /* of the steps since the last log line */
    double step_seconds;                 /* running mean, for the time left */
    double beside;                       /* s, beside the steps of this start */
    int64_t tokens, first_step;          /* trained on in all; first step of this start */
    double steps_ms, stats_ms, files_ms; /* of all steps: in all, for statistics, for files */

    pthread_t thread;
    pthread_mutex_t lock; /* guards what follows, and log */
    pthread_cond_t changed;
    bool stop;
    double last_line, last_step, last_beat; /* ms: of a printed line, a step's end, a heartbeat */
    heartbeat heartbeat;
    heartbeat_line state; /* what a heartbeat says at this moment */
    stats stats;          /* that `state` points to, once there are any */
    anomaly_watch watch;
    bool halted;       /* by an anomaly of this process, or a .HALT that came up */
    int dumps;         /* that have been said */
    double last_curve; /* ms */
};

/* Writes a heartbeat; the caller holds the lock. */
bool telemetry_beat_locked(telemetry *t, const char *msg, fault *f);
/* tokens/s: the median of the newest steps. */
double telemetry_median_rate(const telemetry *t);
/* Memory of this moment, for metrics.json. */
void telemetry_refresh_memory(telemetry *t);

#endif

/* anomaly.h - what makes a run not worth going on with: a stall, gates that have collapsed, a
   gradient of zero, a loss that is no number. Twin: anomaly.c. It looks at numbers and at a clock
   that it is given; who watches, and what then happens, is telemetry.c's.

   A slow run is none of it: a machine that is busy for a day costs a run that day and no more. A
   throughput that falls is told, once for each fall, and halts nothing. Progress is a change of the
   phase word or of the step, however long the step takes; a rate is compared with the run's own,
   and only once it has been low for as long as a stall may last. */
#ifndef ANOMALY_H
#define ANOMALY_H

#include <stdint.h>

#include "base/fault.h"
#include "base/phase.h"
#include "base/stats.h"

typedef enum anomaly {
    ANOMALY_NONE,
    ANOMALY_STALL, /* no progress inside a step for the time allowed */
    ANOMALY_FLAT,  /* below a twentieth of the run's own rate, 3 steps and that long: told */
    ANOMALY_GATES, /* entropy < 0.2, largest > 0.9, half collapsed or all shut, 3 times in a row */
    ANOMALY_LAYER, /* the gates of more layers than before have collapsed or are shut: told */
    ANOMALY_ZERO_GRADIENT, /* exactly, and the loss is not */
    ANOMALY_NAN            /* loss or gradient norm */
} anomaly;

const char *anomaly_name(anomaly a); /* "flat_throughput" */

typedef struct anomaly_watch {
    double timeout; /* s; 0: neither stalls nor rates are judged */
    int collapsed;  /* statistics in a row */
    int64_t layers; /* whose gates were told of */
    int steps, slow;
    double rate, slow_seconds; /* running mean of rates that were not slow */
    uint32_t word;             /* the phase word, and the step, when they last changed */
    int64_t step;
    double last_look, still; /* s: when it was looked at last, and how long nothing has changed */
} anomaly_watch;

typedef struct anomaly_step {
    double loss, grad_norm, seconds, toks_per_s;
    bool skipped;
    const stats *stats; /* NULL: none */
} anomaly_step;

/* The step's verdict; the fault holds what was seen and what is allowed. */
anomaly anomaly_of_step(anomaly_watch *w, const anomaly_step *s, fault *f);

/* To be called every second or so, with a clock in seconds. Time in which nobody looked (the
   process was stopped, the machine slept) counts as one second at most. */
anomaly anomaly_of_time(anomaly_watch *w, double now, uint32_t word, int64_t step, fault *f);

/* Writes .anomaly_type (the name), then .HALT (the reason) into the folder. A .HALT that is there
   already, another process's, stays as it is. */
bool anomaly_write(const char *folder, anomaly a, const char *reason, fault *f);

#endif

/* telemetry.h - what a run writes into out_dir and says on the terminal: training.csv, val.csv,
   metrics.json, the log line, a sign of life at least every 10 s. Twin: telemetry.c. It judges nothing
   and never stops a run. */
#ifndef TELEMETRY_H
#define TELEMETRY_H

#include <stdio.h>

#include "config.h"
#include "phase.h"
#include "signals.h"

typedef struct telemetry telemetry;

typedef struct telemetry_options {
    const config *config;       /* must outlive the run */
    const char *device, *dtype; /* as they run: "cpu", "f32" */
    int64_t rank, world;        /* only rank 0 prints, and writes CSVs and metrics.json */
    bool resumed;               /* false: a used out_dir is refused */
    int64_t resume_step;        /* steps done before; 0 for a new run */
    double loss_first, seconds; /* of a resumed run, from its checkpoint */
    FILE *log;                  /* the terminal; NULL: silent */
} telemetry_options;

/* Makes out_dir, refuses one that is used (or that holds a .HALT), cuts CSVs back to resume_step,
   installs the signal handlers, starts the thread that gives the signs of life, and arms metrics.json
   for every exit. One at a time in a process. */
telemetry *telemetry_open(const telemetry_options *o, fault *f);

typedef struct telemetry_step {
    int64_t step;      /* 1-based: the step that was just done */
    double loss;       /* mean over accumulation and ranks */
    double lr;         /* that the step used */
    double grad_norm;  /* before clipping */
    double seconds;    /* that the step took, evaluation and saving not counted */
    int64_t tokens;    /* of this step, over all ranks */
    bool skipped;      /* fp16 overflow: counted, and said */
    const char *extra; /* more for the log line, "name value | name value"; or NULL */
} telemetry_step;

/* After each optimizer step: a row of training.csv; a log line every log_every steps, on the first
   and the last one, and where there was none for a while. False: the disk refused the row. */
bool telemetry_step_end(telemetry *t, const telemetry_step *s, fault *f);

/* After an evaluation: a row of val.csv and a line. bytes_per_token turns nats into bits per byte (1
   for bytes; 0: not known). */
bool telemetry_eval(telemetry *t, int64_t step, double val_loss, double bytes_per_token, fault *f);

/* One line on the terminal; any thread. */
void telemetry_say(telemetry *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
listener telemetry_listener(telemetry *t);

/* The peak that the program knows of (of a GPU); without it the process's own is taken. */
void telemetry_peak_memory(telemetry *t, int64_t bytes);

double telemetry_seconds(const telemetry *t);    /* trained so far, earlier runs included */
double telemetry_loss_first(const telemetry *t); /* of step 1 */

/* Writes metrics.json with this verdict ("completed", "stopped by SIGTERM", "failed: ...") and frees
   all. Where the program ends without it (exit, abort, a fatal signal) metrics.json says so. */
bool telemetry_close(telemetry *t, const char *verdict, int exit_code, fault *f);

#endif

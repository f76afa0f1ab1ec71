/* telemetry.h - what a run writes into out_dir while it goes, and says on the terminal: the CSVs,
   heartbeats, TensorBoard's files, metrics.json, the log line, a sign of life at least every 10 s.
   Twins: telemetry.c (the run), telemetry_step.c (a step). What is written once at the start is
   train_report.c's. */
#ifndef TELEMETRY_H
#define TELEMETRY_H

#include <stdio.h>

#include "base/phase.h"
#include "base/signals.h"
#include "base/stats.h"
#include "config/config.h"
#include "telemetry/anomaly.h"

/* The exit code of a run that was halted. */
enum { TELEMETRY_HALTED = 3 };

typedef struct telemetry telemetry;

typedef struct telemetry_options {
    const config *config;       /* must outlive the run */
    const char *device, *dtype; /* as they run: "cpu", "f32" */
    int64_t rank, world;        /* only rank 0 prints, and writes what is not its heartbeat */
    bool resumed;               /* false: a used out_dir is refused */
    int64_t resume_step;        /* steps done before; 0 for a new run */
    double loss_first, seconds; /* of a resumed run, from its checkpoint */
    int64_t tokens;             /* so are these: trained on before */
    int held;                   /* telemetry_hold's; 0: the folder is not held yet */
    FILE *log;                  /* the terminal; NULL: silent */
} telemetry_options;

/* Holds the out_dir of a run that goes on, before it looks for what it goes on from: a run that is
   still there may save once more. The descriptor is telemetry_open's to close; -1: another run has
   it. */
int telemetry_hold(const config *c, fault *f);

/* Makes out_dir, refuses one that is used (by another process at this moment, by an earlier run, or
   that holds a .HALT), removes what a killed run left half written,
   installs the signal handlers, starts the thread that watches the run, and arms metrics.json for
   every exit. The thread that calls is the one that trains. One at a time in a process.

   The thread gives a sign of life at least every 10 s, looks for a stall, which ends the process
   with exit code TELEMETRY_HALTED, and for a .HALT that comes up, which is taken as a SIGTERM. */
telemetry *telemetry_open(const telemetry_options *o, fault *f);

/* Opens the tables and the events, of which the rows up to resume_step stay. Before a kill here the
   run must have become one that goes on from resume_step (checkpoint_adopt): rows of steps that
   nobody will do again would be lost. */
bool telemetry_go_on(telemetry *t, fault *f);

/* Whether a run with these settings would be let into its out_dir, and could make it; nothing is
   made. */
bool telemetry_check_folder(const config *c, fault *f);

/* Whether this run has no statistics of gates and selection: switched off, or nothing to count. */
bool telemetry_without_stats(const config *c);

typedef struct telemetry_step {
    int64_t step;       /* 1-based: the step that was just done */
    double loss;        /* mean over accumulation and ranks */
    double lr;          /* that the step used */
    double grad_norm;   /* before clipping */
    double seconds;     /* that the step took, evaluation and saving not counted: see below */
    int64_t tokens;     /* of this step, over all ranks */
    bool skipped;       /* fp16 overflow: counted, and said */
    const stats *stats; /* of its gates and block lists; NULL: none were taken */
    const stats_layer *layers; /* with stats: of the first STATS_LAYERS layers */
    double stats_ms;           /* of `seconds`, what they took */
    const char *extra;         /* more for the log line, "name value | name value"; or NULL */
} telemetry_step;

/* After each optimizer step: a row of the CSVs, a heartbeat, TensorBoard's scalars; a log line
   every log_every steps, on the first and the last one, and where there was none for a while.
   False: the disk refused one of them, or the step shows an anomaly: then the run is halted. */
bool telemetry_step_end(telemetry *t, const telemetry_step *s, fault *f);

/* What the run has spent beside its steps, on evaluation, samples and saving. */
void telemetry_beside(telemetry *t, double seconds);

/* The rows of the CSVs are on the disk, so that a checkpoint finds them after a power failure. */
bool telemetry_sync(telemetry *t, fault *f);

/* After an evaluation: a row of val.csv and a line. bytes_per_token turns nats into bits per
   byte (1 for bytes; 0: not known). */
bool telemetry_eval(telemetry *t, int64_t step, double val_loss, double bytes_per_token, fault *f);

/* Whether the tables that a resumed run found have no evaluation of this step, its newest. */
bool telemetry_lacks_eval(const telemetry *t, int64_t step);

/* Writes .anomaly_type and .HALT; returns false, with the reason in the fault. */
bool telemetry_halt(telemetry *t, anomaly a, const char *reason, fault *f);
bool telemetry_halted(telemetry *t);

/* A heartbeat apart from the steps: "boot", "progress", "fineweb_loader_ready". */
bool telemetry_note(telemetry *t, const char *msg, fault *f);

/* One line on the terminal; any thread. */
void telemetry_say(telemetry *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
listener telemetry_listener(telemetry *t);
/* Text as it is. */
void telemetry_print(telemetry *t, const char *text, size_t bytes);

/* What the run reads, and the first sample that was made up for a source that failed, or -1. */
void telemetry_data(telemetry *t, const char *description, int64_t synthetic_from);

/* What a GPU holds for this process, and the most it held; without it memory is the process's
   own. */
void telemetry_gpu_memory(telemetry *t, int64_t allocated, int64_t reserved, int64_t peak);

double telemetry_seconds(const telemetry *t);    /* of the run so far, earlier starts included */
double telemetry_loss_first(const telemetry *t); /* of step 1 */

/* Writes metrics.json with this verdict ("completed", "stopped by SIGTERM", "failed: ...") and
   frees all. Rank 0 writes it; another rank that fails does where rank 0 has not, for it may be
   dead. Where the program ends without it (exit, abort, a fatal signal) metrics.json says
   so. */
bool telemetry_close(telemetry *t, const char *verdict, int exit_code, fault *f);

#endif

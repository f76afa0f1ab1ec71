/* telemetry.h - what a run writes into out_dir and says on the terminal: training.csv, val.csv,
   metrics.json, the log line, a sign of life at least every 10 s. Twin: telemetry.c, signals.c.
   It judges nothing and never stops a run. */
#ifndef TELEMETRY_H
#define TELEMETRY_H

#include "config.h"

/* The phase and layer that a run is in: one word, set by the training thread, read by any other.
   On CUDA the device writes a word of the same form to mapped memory. */
typedef enum phase {
    PHASE_BOOT,
    PHASE_DATA,
    PHASE_FWD,
    PHASE_BWD,
    PHASE_OPT,
    PHASE_COMM,
    PHASE_EVAL,
    PHASE_SAVE,
    PHASE_SAMPLE,
    PHASE_END
} phase;

void phase_set(phase p, int layer); /* layer -1: none */
phase phase_get(int *layer);
const char *phase_name(phase p);

/* Signals. SIGTERM, SIGINT and SIGHUP ask the run to save and end: it asks at each step. A second
   one ends it at once. SIGPIPE and SIGXFSZ are ignored, so that writes fail with a message. */
void signals_install(void);
int signals_stop_requested(void); /* the signal's number, or 0 */

typedef struct telemetry telemetry;

typedef struct telemetry_options {
    const config *config;
    const char *device, *dtype; /* as they run: "cpu", "f32" */
    int64_t rank, world;        /* only rank 0 prints and writes CSVs */
    int64_t resume_step;        /* 0: a new run, and a used out_dir is refused */
    double loss_first, seconds; /* of the resumed run */
    FILE *log;                  /* the terminal; NULL: silent */
} telemetry_options;

/* Makes out_dir, refuses one that is used (or that holds a .HALT), cuts CSVs back to resume_step,
   starts the thread that gives the signs of life, and arms metrics.json for every exit. */
telemetry *telemetry_open(const telemetry_options *o, fault *f);

typedef struct telemetry_step {
    int64_t step; /* 1-based: the step that was just done */
    double loss;  /* mean over accumulation and ranks */
    double lr;
    double grad_norm;  /* before clipping */
    int64_t tokens;    /* of this step, over all ranks */
    bool skipped;      /* fp16 overflow: counted, and said */
    const char *extra; /* more for the log line, "name value | name value"; or NULL */
} telemetry_step;

/* After each optimizer step: a row of training.csv; a log line every log_every steps, on the first,
   the last, and where none was printed for 10 s. False: the disk refused the row. */
bool telemetry_step_end(telemetry *t, const telemetry_step *s, fault *f);

/* After an evaluation: a row of val.csv and a line. bytes_per_token turns nats into bits per byte
   (1 for bytes; 0: not known). */
bool telemetry_eval(telemetry *t, int64_t step, double val_loss, double bytes_per_token, fault *f);

/* One line on the terminal. */
void telemetry_say(telemetry *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
listener telemetry_listener(telemetry *t);

/* What the program knows of its memory, for metrics.json; 0: the process's own peak is taken. */
void telemetry_peak_memory(telemetry *t, int64_t bytes);

/* Writes metrics.json with this verdict ("completed", "stopped by SIGTERM", "failed: ...") and ends
   the thread. Without it an exit, an abort or a fatal signal writes what was known. */
bool telemetry_close(telemetry *t, const char *verdict, int exit_code, fault *f);

#endif

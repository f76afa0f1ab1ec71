/* metrics.h - metrics.json: what a run was and how it ended, written on every exit that can be
   caught. Twin: metrics.c. */
#ifndef METRICS_H
#define METRICS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/fault.h"

typedef struct metrics {
    const char *device, *dtype;
    int64_t steps, steps_done, seq_len, batch_global;
    double lr, loss_first, loss_last, toks_per_s_p50, peak_memory_mib, seconds;
    double sel_pct_at_max; /* the largest of the run; NaN: no statistics */
    int64_t gate_layers_collapsed, gate_layers_shut; /* at the last step */
    int64_t total_fallbacks, tokens;
    double val_loss, val_loss_best; /* of the last evaluation, of the best; NaN: none */
    char data[192];                 /* what was read */
    int64_t synthetic_from; /* first sample that was made up for a source that failed; or -1 */
} metrics;

/* Keeps what the last words of a signal would be; cheap enough for each step. */
void metrics_prepare(const char *path, const metrics *m);

/* Writes the file in a signal handler, from what was prepared. */
void metrics_last_words(int signal_number);

/* Writes it now, from what was prepared, for an end that may come before the next line of code;
   `unless_there`: not where there is one. */
void metrics_foretell(const char *verdict, int exit_code, bool unless_there);

/* Nothing is prepared any more: the file is written, or the run is not one that writes it. */
void metrics_disarm(void);

bool metrics_write(const char *path, const metrics *m, const char *verdict, int exit_code,
                   fault *f);

#endif

/* observer.h - looks at a pass while it runs: statistics of its gates and block lists, and
   traces. Twin: observer.c. It is a table of operations like the one it stands before; only
   `mark` is its own: where a layer begins, what the layer before it left is still in memory,
   with gradient checkpointing too. It changes no number of the run. */
#ifndef OBSERVER_H
#define OBSERVER_H

#include "model.h"
#include "stats.h"

typedef struct observer {
    ops table; /* first: what the model is given */
    const ops *inner;
    const model *model;
    listener trace; /* a line for each layer's backward; say NULL: none */
    bool collecting;
    stats_sum sum;
    double spent;    /* ms that collecting took, since observer_begin */
    float *gates;    /* rows x groups x 3, of the host */
    int32_t *blocks; /* rows x groups x width */
    int32_t *begins; /* of documents */
    void *raw;       /* gates as the back end has them */
    phase phase;     /* of the mark before this one, and when it was */
    int layer;
    double since;
} observer;

/* Before model_open: what `o` was is behind &observer->table. */
void observer_wrap(observer *x, const ops *o, const model *m);
/* After model_open; with `statistics` false nothing is ever collected. */
bool observer_open(observer *x, bool statistics, fault *f);
void observer_close(observer *x);

/* Around the passes whose gates and lists are wanted. */
void observer_begin(observer *x);
bool observer_end(observer *x, stats *result); /* false: nothing was seen */

/* A line for each parameter's gradient: its norm and its largest element, divided by `scale`. */
bool observer_trace_gradients(const observer *x, int64_t step, double scale, const listener *to,
                              fault *f);

#endif

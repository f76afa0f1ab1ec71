/* observer.h - looks at a pass while it runs: statistics of its gates and block lists, and
   traces. Twin: observer.c. It is a table of operations like the one it stands before; only
   `mark` is its own: where a layer begins, what the layer before it left is still in memory,
   with gradient checkpointing too. It changes no number of the run. */
#ifndef OBSERVER_H
#define OBSERVER_H

#include "base/stats.h"
#include "model/model.h"

typedef struct observer {
    ops table; /* first: what the model is given */
    const ops *inner;
    const model *model;
    listener trace;  /* a line for each layer's backward; say NULL: none */
    bool statistics; /* are wanted */
    bool collecting;
    double spent; /* ms that the host was busy with it, since observer_begin */
    int next;     /* the layer to look at next: a layer that waits is marked again */
    phase phase;  /* of the mark before this one, and when it was */
    int layer;
    double since;
} observer;

/* Before model_open: what `o` was is behind &observer->table. */
void observer_wrap(observer *x, const ops *o, const model *m);

/* Around the passes whose gates and lists are wanted; what is counted goes into the model's
   state. */
void observer_begin(observer *x);
void observer_end(observer *x);

/* A line for each parameter's gradient: its norm and its largest element, divided by `scale`. */
bool observer_trace_gradients(const observer *x, int64_t step, double scale, const listener *to,
                              fault *f);

#endif

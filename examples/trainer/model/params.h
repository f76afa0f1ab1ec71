/* params.h - the parameters of a model as one table: name, shape, place, how it is initialised and
   whether it decays. Twin: params.c. Init, AdamW, clipping, checkpoints and tests walk this table;
   what a tensor means is model.c's. */
#ifndef PARAMS_H
#define PARAMS_H

#include "base/arena.h"
#include "base/fault.h"
#include "ops/ops.h"

enum { PARAM_DIMS = 3, PARAM_NAME_BYTES = 64 };

typedef struct param {
    char name[PARAM_NAME_BYTES]; /* "blocks.0.attn.W_Q.weight" */
    int layer;                   /* -1: of none */
    int dims;
    int64_t shape[PARAM_DIMS];
    int64_t offset, count;      /* in elements of the flat arrays */
    double init_mean, init_std; /* normal; std 0: a constant */
    bool decay;                 /* weight decay: matrices only */
    bool inner; /* a matrix inside a block, or several of them: Muon's where that is wanted */
} param;

/* value, grad, m and v are flat arrays of `elements` reals that hold every tensor at its offset;
   between tensors, and behind the last, there may be zeros that stay zero. Where the moments are
   divided among processes, m and v hold this one's pieces alone (dist.h). */
typedef struct params {
    param *list;
    int length, room;
    int64_t elements; /* of the flat arrays */
    int64_t moments;  /* of m and of v */
    int64_t count;    /* parameters, what the tensors hold together */
    real *value, *grad, *m, *v;
    void *narrow; /* value in the back end's dtype, for forward to read; NULL where that is reals */
} params;

/* The rows that describe one tensor; shape ends at its first 0. */
typedef struct param_spec {
    const char *name;
    int64_t shape[PARAM_DIMS];
    double mean, std;
    bool decay;
    bool joined; /* lies right behind the tensor before it, so that both are one matrix */
} param_spec;

/* Appends a tensor and returns its place in the list; -1: out of memory. layer < 0: the name stands
   as it is, else "blocks.<layer>." before it. */
int params_add(params *p, int layer, const param_spec *spec);
void params_free(params *p); /* the list; the arrays are the arena's */

/* After the last tensor: the arrays become a multiple of so many elements, and of m and v each of
   so many processes has an equal share. */
void params_divide(params *p, int64_t multiple, int processes);

/* Takes the flat arrays; those of training only where asked; `element`: bytes of a value in the
   back end's dtype. */
void params_layout(params *p, arena *a, bool training, size_t element);

/* After each change of value. */
void params_changed(const params *p, const ops *o);

/* Draws the values: element e of tensor i is a function of (seed, name, e) alone. */
bool params_init(const params *p, const ops *o, uint64_t seed, fault *f);

#endif

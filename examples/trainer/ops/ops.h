/* ops.h - the operations that the model is made of, as one table of functions, so that the model is
   written once for every back end. Twin: ops_cpu.c. It owns no memory and knows no layer: sizes and
   pointers come with each call.

   Activations, their gradients and the weights that forward reads are arrays of `dtype`, row-major
   and packed unless a stride is given. Gradients of parameters, moments and 1 / rms are `real`. A
   "weight" of a linear map is (out, in). Backward ADDS to gradients of parameters; what it does to
   gradients of activations is said at each operation. An operation that fails (a launch error, a
   status of nsa.h) says nothing at once: ops_failed() tells at the end of a pass. */
#ifndef OPS_H
#define OPS_H

#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"
#include "base/phase.h"
#include "base/stats.h"
#include "nsa.h"

typedef nsa_real real;

/* What f16 needs so that small gradients do not vanish: they are `scale` times too large. A step
   that overflowed halves it; after many that did not it doubles. Other types keep 1. */
typedef struct loss_scaler {
    double scale;
    int64_t good_steps, skipped_steps; /* since it changed; in all */
} loss_scaler;

enum { SCALER_GOOD_STEPS = 1000, SCALER_MOST = 1 << 24 };

/* What a step leaves for the host to read; it lives in the back end's memory, where it also decides
   what the host would learn too late: clipping, overflow, the next step's scale. */
typedef struct step_state {
    double loss;      /* sum over the labels since it was zeroed */
    int64_t labels;   /* how many they were */
    double squares;   /* sum of the gradients' squares, as they were summed up so far */
    double grad_norm; /* of all gradients, before clipping */
    double clip;      /* what adamw multiplies gradients with */
    int64_t overflow; /* 1: a gradient is not finite, and adamw leaves everything as it is */
    int64_t skipped;  /* 1: and a smaller scale will help */
    stats_sum seen;   /* of the passes that were looked at (observer.h) */
    stats_layer layers[STATS_LAYERS]; /* of the last of them */
    /* What follows outlives the step. */
    loss_scaler scaler;
} step_state;

/* What a step of the optimizer multiplies with, in the back end's memory. */
typedef struct adamw_rates {
    real beta1, beta2, eps;
    real rate;         /* lr / (1 - beta1^step) */
    real bias;         /* 1 / sqrt(1 - beta2^step) */
    real keep;         /* 1 - lr weight_decay, for tensors that decay */
    real momentum, lr; /* Muon's */
} adamw_rates;

/* The gates and block lists of a layer's pass, of which statistics are wanted. */
typedef struct layer_choices {
    const void *gates; /* (rows, gate_heads, 3), logits, rows gate_stride elements apart */
    nsa_gate_kind kind;
    const int32_t *blocks; /* (rows, groups, width) */
    int64_t rows;          /* tokens */
    int groups, width, slc_block;
    const int32_t *begins; /* NULL, or sequences + 1 offsets; else each has tokens_each */
    int sequences, tokens_each;
    int gate_heads;
    int64_t gate_stride;
    int layer;
    const int32_t *places; /* NULL, or of each row its place in its sequence, whatever begins say */
} layer_choices;

/* Matrix products of reals: c (m, n) = a b, a b^T or a^T b, as gemm_form has them. */
typedef enum product_form { PRODUCT_NN, PRODUCT_NT, PRODUCT_TN } product_form;

typedef struct ops ops;

struct ops {
    const char *name;    /* "cpu" */
    const char *library; /* what multiplies matrices */
    nsa_dtype dtype;
    const char *speed;   /* how linear maps of this dtype are computed; NULL: there is no choice */
    const char *missing; /* NULL, or what would make them faster here */
    int packed_bytes;    /* that products keep beside an element of a linear map's weight */
    int threads;         /* for nsa_desc.threads */
    bool host_memory;    /* the host may read and write what allocate gives */
    void *state;         /* the back end's own */
    void *stream;        /* CUDA: what the operations are launched on */

    /* Memory. allocate gives zeroed, 64-byte aligned bytes or NULL. */
    void *(*allocate)(const ops *o, size_t bytes);
    void (*release)(const ops *o, void *memory);
    void (*upload)(const ops *o, void *to, const void *from, size_t bytes);
    void (*download)(const ops *o, void *to, const void *from, size_t bytes);
    void (*zero)(const ops *o, void *x, size_t bytes);
    void (*copy)(const ops *o, void *to, const void *from, size_t bytes); /* inside it */
    /* to, an array of dtype, becomes these reals, rounded. Only where dtype is not the reals'. */
    void (*convert)(const ops *o, void *to, const real *from, int64_t count);

    /* Where the run is, for whoever watches it. */
    void (*mark)(const ops *o, phase p, int layer);

    /* x[r] = table[tokens[r]];  dtable[tokens[r]] += dx[r] */
    void (*embed_forward)(const ops *o, void *x, const void *table, const int32_t *tokens,
                          int64_t rows, int dim);
    void (*embed_backward)(const ops *o, real *dtable, const void *dx, const int32_t *tokens,
                           int64_t rows, int dim);

    /* y = x w / rms(x), rms with eps under the root; backward adds to dx. */
    void (*rmsnorm_forward)(const ops *o, void *y, real *rstd, const void *x, const void *w,
                            int64_t rows, int dim, double eps);
    void (*rmsnorm_backward)(const ops *o, void *dx, real *dw, const void *dy, const void *x,
                             const void *w, const real *rstd, int64_t rows, int dim);

    /* y = x w^T (+ residual, where it is not NULL);  dx = dy w, overwritten;  dw += dy^T x */
    void (*linear_forward)(const ops *o, void *y, const void *x, const void *w,
                           const void *residual, int64_t rows, int in, int out);
    void (*linear_backward_input)(const ops *o, void *dx, const void *dy, const void *w,
                                  int64_t rows, int in, int out);
    void (*linear_backward_weight)(const ops *o, real *dw, const void *dy, const void *x,
                                   int64_t rows, int in, int out);

    /* y += b, each row;  db += the sum of dy's rows */
    void (*bias_forward)(const ops *o, void *y, const void *b, int64_t rows, int dim);
    void (*bias_backward)(const ops *o, real *db, const void *dy, int64_t rows, int dim);

    /* y = x sigmoid(x);  dx = dx * silu'(x), in place, and y once more */
    void (*silu_forward)(const ops *o, void *y, const void *x, int64_t count);
    void (*silu_backward)(const ops *o, void *dx, void *y, const void *x, int64_t count);

    /* Rows of x hold a and b, `width` each: y = silu(a) b;  dx from dy, and y once more */
    void (*swiglu_forward)(const ops *o, void *y, const void *x, int64_t rows, int width);
    void (*swiglu_backward)(const ops *o, void *dx, void *y, const void *x, const void *dy,
                            int64_t rows, int width);

    /* mean[r][g] = the average of a group's heads of q[r], rows of q `stride` apart; backward adds
       to dq. */
    void (*group_mean_forward)(const ops *o, void *mean, const void *q, int64_t stride,
                               int64_t rows, int groups, int per_group, int dim);
    void (*group_mean_backward)(const ops *o, void *dq, int64_t stride, const void *dmean,
                                int64_t rows, int groups, int per_group, int dim);

    /* Adds the losses -ln softmax(logits)[label] to s, labels below 0 apart; with scale != 0 the
       logits become their own gradient, scale s->scaler.scale (p - onehot). */
    void (*cross_entropy)(const ops *o, step_state *s, void *logits, const int32_t *labels,
                          int64_t rows, int vocab, double scale);

    /* s->squares += |grad|^2 */
    void (*square_sum)(const ops *o, step_state *s, const real *grad, int64_t count);
    /* For gradients that are s->scaler.scale times what they stand for: s->grad_norm =
       sqrt(squares) / scale, s->clip = min(1, max_norm / grad_norm) / scale; max_norm 0: no
       clipping. Sets s->overflow and s->skipped, and the scaler for the next step. */
    void (*clip)(const ops *o, step_state *s, double max_norm);
    /* One step of AdamW on one tensor, with gradients s->clip * grad; nothing after an overflow. */
    void (*adamw)(const ops *o, const adamw_rates *a, bool decay, const step_state *s, real *value,
                  const real *grad, real *m, real *v, int64_t count);
    /* Muon, in reals. The direction of some elements, in place of their gradient g = s->clip *
       grad: m = momentum m + g, then g + momentum m. And value = keep value - lr scale x for a
       matrix x that was made of such directions. Both nothing after an overflow. */
    void (*muon_direction)(const ops *o, const adamw_rates *a, const step_state *s, real *grad,
                           real *m, int64_t count);
    void (*muon_update)(const ops *o, const adamw_rates *a, const step_state *s, real *value,
                        const real *x, double scale, int64_t count);
    /* What directions become matrices with: a product; x = from / (|from| + 1e-7);
       y = a x + b y. */
    void (*product)(const ops *o, product_form form, real *c, const real *a, const real *b, int m,
                    int n, int k);
    void (*unit)(const ops *o, real *x, const real *from, int64_t count);
    void (*mix)(const ops *o, real *y, const real *x, double a, double b, int64_t count);

    /* Adds to s->seen what stats.h counts of a layer. */
    void (*count_choices)(const ops *o, step_state *s, const layer_choices *x);

    /* nsa.h's functions of the same names, on views of this back end's memory. */
    void (*rope_forward)(const ops *o, const nsa_rope *x, const nsa_desc *d);
    void (*rope_backward)(const ops *o, const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d);
    size_t (*attention_forward_bytes)(const ops *o, const nsa_attention *x, const nsa_desc *d);
    void (*attention_forward)(const ops *o, const nsa_attention *x, const nsa_desc *d,
                              void *workspace, size_t bytes);
    /* Of attention_forward's outputs, those that follow from the branches, their lse and the block
       lists, which are there: the compressed rows, and out. The workspace is
       attention_forward's. */
    void (*attention_restore)(const ops *o, const nsa_attention *x, const nsa_desc *d,
                              void *workspace, size_t bytes);
    size_t (*attention_backward_bytes)(const ops *o, const nsa_attention *dx,
                                       const nsa_attention *x, const nsa_desc *d);
    void (*attention_backward)(const ops *o, const nsa_attention *dx, const nsa_attention *x,
                               const nsa_desc *d, void *workspace, size_t bytes);
    size_t (*dense_forward_bytes)(const ops *o, const nsa_desc *d);
    void (*dense_forward)(const ops *o, const nsa_attend *x, const nsa_desc *d, void *workspace,
                          size_t bytes);
    size_t (*dense_backward_bytes)(const ops *o, const nsa_desc *d);
    void (*dense_backward)(const ops *o, const nsa_attend *dx, const nsa_attend *x,
                           const nsa_desc *d, void *workspace, size_t bytes);

    /* The same over desc.window's keys. */
    size_t (*window_forward_bytes)(const ops *o, const nsa_desc *d);
    void (*window_forward)(const ops *o, const nsa_attend *x, const nsa_desc *d, void *workspace,
                           size_t bytes);
    size_t (*window_backward_bytes)(const ops *o, const nsa_desc *d);
    void (*window_backward)(const ops *o, const nsa_attend *dx, const nsa_attend *x,
                            const nsa_desc *d, void *workspace, size_t bytes);

    /* to[r][c] = from[r][c], rows `to_stride` and `from_stride` elements apart. */
    void (*copy_columns)(const ops *o, void *to, int64_t to_stride, const void *from,
                         int64_t from_stride, int64_t rows, int64_t columns);

    /* nsa.h's cache of one sequence, of this back end's dtype, and decoding from it. NULL, and with
       them copy_columns, where the back end does not decode: model_open says so. */
    size_t (*cache_bytes)(const ops *o, const nsa_desc *d, int max_rewind);
    void (*cache_open)(const ops *o, nsa_cache *cache, const nsa_desc *d, int max_rewind,
                       void *memory, size_t bytes);
    size_t (*decode_bytes)(const ops *o, const nsa_attention *x, const nsa_cache *cache, int count);
    void (*decode)(const ops *o, const nsa_attention *x, nsa_cache *cache, int count,
                   nsa_reads *reads, void *workspace, size_t bytes);

    /* Bytes of the device: what allocate has given, and what is taken of it in all. NULL: the
       memory is the process's own. */
    void (*memory)(const ops *o, int64_t *allocated, int64_t *taken);

    /* For a device that computes while the host goes on; both NULL where calls return when they are
       done. post starts a copy of the state as it then is, fetch waits for the oldest that was not
       fetched; two may be under way. */
    void (*post)(const ops *o, const step_state *s);
    void (*fetch)(const ops *o, step_state *s);

    /* CUDA graphs, NULL elsewhere: what is launched between begin and end is recorded and not run;
       graph_end gives it, NULL after a failure, to be run any number of times. */
    void (*graph_begin)(const ops *o);
    void *(*graph_end)(const ops *o);
    void (*graph_run)(const ops *o, void *graph);
    void (*graph_free)(const ops *o, void *graph);

    /* The first failure since the table was opened; forgets nothing. */
    bool (*failed)(const ops *o, fault *f);
};

/* The CPU: nsa.h, products through gemm.h, OpenMP. threads 0: all that OpenMP offers and the
   process may use; otherwise as many as are asked for, processors or not. ops_cpu_close takes what
   ops_cpu_open filled. */
bool ops_cpu_open(ops *o, int threads, fault *f);
/* After ops_cpu_open: activations, and the weights that forward reads, are bf16 or f16. */
void ops_cpu_narrow(ops *o, nsa_dtype dtype);
void ops_cpu_close(ops *o);

#endif

/* model_inside.h - what the files of a model share: a layer's tensors and what its passes leave,
   one layer's passes, a sequence that is divided. Twins: model.c, model_layer.c, model_layout.c,
   context.c. Programs include model.h, not this. */
#ifndef MODEL_INSIDE_H
#define MODEL_INSIDE_H

#include "model/model.h"

/* A layer's tensors in the table of parameters; phi's five follow one another. */
typedef enum slot {
    NORM1,
    W_QKV, /* W_Q, then the k of each branch, then the v of each, then a linear gate: one matrix */
    W_OUT,
    GATE_W1,
    GATE_B1,
    GATE_W2,
    GATE_B2,
    PHI_K,
    PHI_V = PHI_K + 5,
    Q_NORM = PHI_V + 5,
    K_NORM,
    NORM2,
    FC1, /* of swiglu its gate, then fc1: one matrix */
    FC2,
    SLOTS
} slot;

enum { PHI_POS, PHI_W1, PHI_B1, PHI_W2, PHI_B2, PHI_TENSORS };

/* Their places in the table; -1: this model has no such tensor. */
typedef struct layer_slots {
    int of[SLOTS];
} layer_slots;

/* What forward leaves of a layer for backward. */
typedef struct layer_acts {
    real *rstd1, *rstd2;
    void *raw;              /* (rows, heads of q and k, d_k): before qk_norm, q's rows first */
    real *rstd_heads;       /* of these */
    void *qkv;              /* (rows, layer_fused), rotated */
    void *q_mean;           /* (rows, groups, d_k), before RoPE */
    void *gate_hidden;      /* (rows, groups, d_k / 2), before SiLU */
    void *gates;            /* (rows, groups, 3), logits */
    void *k_cmp, *v_cmp;    /* compressed rows */
    void *branch[BRANCHES]; /* (rows, heads, d_v) */
    real *lse[BRANCHES];    /* (rows, heads) */
    int32_t *blocks;        /* (rows, groups, n_sel) */
    void *attention;        /* (rows, heads, d_v): the branches gated and added */
    void *mid;              /* (rows, dim): x after attention */
    void *hidden;           /* (rows, mlp_in), before SiLU */
} layer_acts;

/* What model_append keeps of a layer. */
typedef struct layer_cache {
    nsa_cache sparse;
    void *k, *v;  /* dense: (room, groups, d_k), (room, groups, d_v) */
    void *memory; /* of sparse */
    size_t bytes;
} layer_cache;

/* Columns of qkv: q and each k; all. */
int layer_rotated(const model *m, int layer);
/* Its pairs of k and v, and whether its gate is a linear map of x. */
int layer_pairs(const model *m, int layer);
bool layer_linear_gate(const model *m, int layer);
int layer_fused(const model *m, int layer);
/* Columns of all k and v, which lie behind those of q. */
int layer_keys(const model *m, int layer);

/* Launches a part: run(m, number). With options.graphs its second time with these numbers is
   recorded (the first may still load and choose), and from then on the recording is run. */
void model_launch(model *m, model_part part, void (*run)(model *m, double number), double number);
void model_forget_recordings(model *m);
/* One layer, for model.c: forward from x[layer] to x[layer + 1]; what of it backward needs again;
   and backward, in place on scratch.dx. */
void layer_forward(model *m, int layer);
void layer_recompute(model *m, int layer);
checkpointing layer_checkpointing(const model *m, int layer);
void layer_backward(model *m, int layer);

/* Bytes of workspace that a layer's attention needs from the caches, for `count` tokens at once. */
size_t layer_append_workspace(model *m, int layer, int count);

/* context.c. The host's memory for slices; the arrays, of which one may lie in `free_bytes` from
   scratch.act on; memory for exchanges, which is dist's. */
bool context_open(model *m, fault *f);
void context_layout(model *m, arena *a, size_t free_bytes);
size_t context_bytes(const model *m);
bool context_attach(model *m, fault *f);
void context_close(model *m);
/* Whether a batch can be divided; the slices of a pass; the batch, or this process's rows of it,
   for the back end. */
bool context_check(const model *m, const model_batch *b, fault *f);
void context_slices(model *m, const model_batch *b);
void context_upload(model *m, const model_batch *b);
/* All rows of a layer's k and v, rotated, come to scratch.keys. Before backward, they and zeros in
   scratch.dkeys; after it the sums of dkeys over the processes come to this one's rows, k to
   drotated and v to dqkv. Where nothing is divided none does anything. */
void context_gather(model *m, int layer);
void context_begin_backward(model *m, int layer);
void context_reduce(model *m, int layer);

/* A tensor's gradient. */
real *model_gradient(const model *m, int place);

#endif

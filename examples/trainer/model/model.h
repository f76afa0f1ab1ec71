/* model.h - TinyLM: a decoder over Native Sparse Attention, forward and backward, for any back end.
   Twins: model_layout.c (parameters, memory), model_layer.c (one layer), model.c (the whole),
   context.c (a sequence divided among processes); what these share is model_inside.h's. It knows no
   files, no data and no optimizer.

     x = embed[token]
     each layer:  x = x + attention(rmsnorm(x));  x = x + fc2(silu(fc1(rmsnorm(x))))
                  or, swiglu, x + fc2(silu(gate(n)) * fc1(n)), n = rmsnorm(x)
     logits = head(rmsnorm(x))

   attention:   q, and a pair of k and v for each branch, are linear maps of x; with qk_norm q and k
   of each head go through rmsnorm, with one weight for q and one for k; the gate is an MLP
   of the group mean of q, or a linear map of x; then RoPE turns q and each k, nsa.h attends, a
   linear map returns to dim. Dense layers have one pair and no gate. cmp+slc is nsa.h's whole with
   two pairs: its window is one token wide, reads slc's pair, and has a gate that is shut, so it
   adds 0. */
#ifndef MODEL_H
#define MODEL_H

#include "base/arena.h"
#include "base/attention.h"
#include "dist/dist.h"
#include "model/muon.h"
#include "model/params.h"

enum { BRANCHES = 3 }; /* cmp, slc, win, in this order */

typedef struct model_config {
    int vocab, dim, n_layers, n_heads, n_kv_groups, d_k, d_v;
    int l, d, l_sel, n_sel, w;
    unsigned char attention[LAYERS_MOST]; /* of each layer: attention_kind */
    bool tied;                            /* the head is the embedding */
    bool qk_norm;                         /* each head's q and k through RMSNorm */
    bool shared_kv;                       /* sparse layers: one k and one v for all branches */
    bool gate_linear;                     /* nsa: the gate is a linear map of x, by query head */
    bool swiglu;                          /* fc2(silu(gate) * fc1) */
    int hidden;                           /* width of the MLP */
    int slc_init, slc_local;              /* blocks that are always selected: first, last ones */
    double norm_eps;
    nsa_phi phi;
    nsa_gate_kind gate;
    double rope_base, rope_factor, rope_fast, rope_slow;
    nsa_rope_pairs rope_pairs;
    nsa_rope_scaling rope_scaling;
    int rope_trained_context;
} model_config;

/* The arguments of TinyLM in their order; what is not among them has its default: sparse, untied,
   phi mean, sigmoid gate, RoPE of base 10000, interleaved, an MLP of 4 dim. */
model_config tinylm(int vocab, int dim, int n_layers, int n_heads, int n_kv_groups, int d_k,
                    int d_v, int l, int d, int l_sel, int n_sel, int w);

/* All layers attend alike. */
void model_attend_with(model_config *c, attention_kind kind);

/* What backward computes again rather than keep. */
typedef enum checkpointing {
    CHECKPOINT_NONE,
    CHECKPOINT_LAYERS,   /* all of a layer, from its input */
    CHECKPOINT_SELECTIVE /* all but attention: its branches, their lse and block lists are kept */
} checkpointing;

typedef struct model_options {
    int batch, tokens; /* the most rows, and tokens of a row, that a call may bring; of a row that
                          is divided (dist_divide) this process holds its share alone */
    bool training;     /* room for gradients and moments */
    checkpointing checkpointing;
    int first, end; /* of layers first .. end - 1; 0, 0: of all */
    int room;       /* tokens that model_append may append in all; 0: no cache */
    dist *dist;     /* NULL: one process */
    bool muon;      /* room for Muon's products; matrices inside blocks take its steps */
    bool graphs;    /* CUDA: what a step launches is recorded once (model_launch) */
} model_options;

/* What a call brings; arrays of the host. */
typedef struct model_batch {
    const int32_t *tokens; /* (batch, tokens_each) */
    const int32_t *labels; /* the same; below 0: no loss here. Forward alone needs none */
    int batch, tokens_each;
    const int32_t *begins; /* NULL, or documents + 1 offsets: attention stays inside a document */
    int documents, longest;
} model_batch;

/* What a layer's pass needs only while it runs, shared by all layers. */
typedef struct scratch {
    void *norm, *act, *gate_act;
    void *dx, *dnorm, *dhidden, *dact, *dattention, *dqkv, *drotated;
    void *normed;    /* (rows, layer_rotated): what qk_norm makes, or its gradient */
    void *gate_pair; /* (rows, groups, 2): gates of cmp+slc, or their gradient */
    void *dgates, *dgate_hidden, *dq_mean;
    real *rstd;
    void *logits;
    void *workspace;
    size_t workspace_bytes;
    /* Of a sequence that is divided (context.c): */
    void *keys;          /* (batch, sequence, layer_keys): k and v of all processes' rows */
    real *dkeys;         /* their gradient, in the memory of act, dhidden and dact */
    void *hidden;        /* NULL, or of every layer; keys then lie behind dkeys, up to its end */
    void *k_cmp, *v_cmp; /* compressed rows of one slice */
    real *exchange;      /* what the processes exchange at once: a block of each */
} scratch;

/* Queries that one call of nsa.h takes, and their keys. */
typedef struct slice {
    int batch, tokens, first, count; /* as nsa_desc has them */
    const int32_t *begins;           /* likewise; or NULL */
    int rows;                        /* with begins: those of all its sequences */
    int64_t query_row, key_row;      /* where its queries, and its keys, begin */
} slice;

/* What a step launches: the passes over a micro-batch, over the last of a step, and the update. */
typedef enum model_part { MODEL_BATCH, MODEL_LAST_BATCH, MODEL_UPDATE, MODEL_PARTS } model_part;

/* A part as it was recorded. What is launched depends on nothing but these numbers and the
   model. */
typedef struct recording {
    void *graph;
    double number; /* the gradients' scale, the largest norm */
    int batch, tokens_each;
    bool known; /* launched once with these */
} recording;

typedef struct model {
    model_config config;
    model_options options;
    const ops *o;
    params params;
    int embed, norm, head;         /* places in the table */
    struct layer_slots *slots;     /* of each layer, its tensors' places */
    size_t element;                /* bytes of an activation */
    int first_of[ATTENTION_KINDS]; /* the first layer of each kind; -1: none */
    int gate_width, chunk;         /* d_k / 2; rows of logits at a time */
    int mlp_in;                    /* columns of an MLP's first matrix */
    void *shut;                    /* (3): what is added to the gates of cmp+slc */
    void *memory;
    arena arena;
    void **x; /* n_layers + 1 inputs of layers; the last is the head's */
    struct layer_acts
        *acts; /* of each layer; what is computed again is in the same memory for all */
    scratch scratch;
    int32_t *tokens, *labels, *begins; /* the batch, in the back end's memory */
    step_state *state;                 /* likewise */
    adamw_rates *rates;                /* likewise */
    muon_room muon;                    /* with options.muon */
    recording recordings[MODEL_PARTS];
    bool recording;                          /* what is launched now is kept and not run */
    phase phase;                             /* of the pass that runs, for ops.mark */
    bool last_of_step;                       /* dist hears of each gradient that is final, and
                                          observers look */
    int batch, tokens_each, rows, documents; /* of the pass that runs */
    int sequence;  /* tokens of a row of the batch, of which this process has tokens_each */
    slice *slices; /* of the pass that runs */
    int slice_count;
    int context;                /* processes that divide a sequence; 1: none do */
    bool split;                 /* the pass that runs is divided */
    int32_t *places;            /* split: of each row in its document, in the back end's memory */
    int32_t *ids;               /* numbers of the host on their way there */
    int begins_used;            /* of these, begins */
    int gathered;               /* the layer whose k and v scratch.keys holds, or -1 */
    struct layer_cache *caches; /* of each layer; NULL without room */
    bool appending;             /* the pass attends from the caches */
    int past;                   /* tokens that they hold */
    nsa_reads reads; /* counted by nsa_decode since model_restart, summed over layers and groups */
} model;

/* Lays out the table, takes the memory, draws the weights. Keep `o` open until model_close. */
bool model_open(model *m, const model_config *c, const model_options *options, const ops *o,
                uint64_t seed, fault *f);
void model_close(model *m);

/* The table of parameters alone; model_close frees it. */
bool model_describe(model *m, const model_config *c, const ops *o, fault *f);

/* The sizes that model_open would take, without taking them, and the number of parameters. */
bool model_measure(const model_config *c, const model_options *options, const ops *o, arena *sizes,
                   int64_t *parameters, fault *f);

/* The geometry that a layer gives to nsa.h, for a batch of this shape. */
nsa_desc model_desc(const model *m, int layer, int batch, int tokens);
attention_kind layer_kind(const model *m, int layer);
/* Adds a batch's losses to the state. model_train also adds the gradients of their sum, `scale`
   times the scaler's scale times too large; a caller sets last_of_step before those of a step's
   last batch. It zeroes state and gradients. */
bool model_evaluate(model *m, const model_batch *b, fault *f);
bool model_train(model *m, const model_batch *b, double scale, fault *f);

/* Logits of the token after tokens[count - 1]; `logits` holds vocab reals of the host. It is never
   divided, so count ends where this process's share of a row does (model_longest). */
int model_longest(const model *m);
bool model_next(model *m, const int32_t *tokens, int count, real *logits, fault *f);

/* Appends tokens to the caches, options.tokens at a time, and attends from these: the result is
   that of the whole sequence. `logits` holds wanted x vocab reals of the host: those that follow
   the last `wanted` tokens. Refused, with nothing appended, where options.room is too small. */
bool model_append(model *m, const int32_t *tokens, int count, int wanted, real *logits, fault *f);
/* Empties the caches. */
bool model_restart(model *m, fault *f);

step_state model_state(const model *m);
void model_zero_state(model *m); /* all but the scaler */
void model_set_scaler(model *m, const loss_scaler *s);

/* The state as it is when everything launched so far is done, without waiting for that; and later,
   once for each. Where the back end cannot do that, fetch gives the state as it is. */
void model_post_state(const model *m);
step_state model_fetch_state(const model *m);

void model_zero_gradients(model *m);

/* The geometry of the pass that runs, of its first slice. */
nsa_desc layer_desc(const model *m, int layer);
/* What its attention reads and writes in a layer; where attention is sparse. */
nsa_attention layer_views(const model *m, int layer);
/* Bytes of workspace that a layer's attention needs for this slice. */
size_t layer_workspace(model *m, int layer, const slice *p);
/* The block lists that the last pass left of a sparse layer: (rows, groups, n_sel). */
const int32_t *model_blocks(const model *m, int layer);

/* A tensor of the table. */
void *model_weight(const model *m, int place);

#endif

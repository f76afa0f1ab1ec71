/* config.h - every setting of both trainers: one struct, read from a YAML file, the environment and
   the command line by one table. Twins: config_table.c (the table), config.c, config_yaml.c,
   config_print.c. What depends on the machine (device auto, a world size) the program settles. */
#ifndef CONFIG_H
#define CONFIG_H

#include <stdint.h>
#include <stdio.h>

#include "base/attention.h"
#include "base/fault.h"
#include "base/option.h"

#define CONFIG_PATH_BYTES  OPTION_BYTES
#define CONFIG_ENTRIES_MAX 104

/* Values of the settings that are words. Gate, phi and RoPE settings hold nsa.h's enums. */
enum { CONFIG_SILU, CONFIG_SWIGLU };          /* model.mlp */
enum { CONFIG_GATE_MLP, CONFIG_GATE_LINEAR }; /* nsa.gate_form */
enum {                                        /* model.rope_scaling */
       CONFIG_ROPE_NONE,
       CONFIG_ROPE_LINEAR,
       CONFIG_ROPE_NTK,
       CONFIG_ROPE_YARN,
       CONFIG_ROPE_LLAMA3
};
enum { CONFIG_AUTO, CONFIG_CPU, CONFIG_CUDA };       /* runtime.device */
enum { CONFIG_FP32, CONFIG_BF16, CONFIG_FP16 };      /* runtime.precision */
enum { CONFIG_COSINE, CONFIG_CONSTANT, CONFIG_WSD }; /* train.lr_schedule */
enum { CONFIG_ADAMW, CONFIG_MUON };                  /* train.optimizer */
enum { CONFIG_BYTE, CONFIG_GPT2 };                   /* data.tokenizer */
enum {                                               /* data.dataset */
       CONFIG_DATASET_AUTO,                          /* by what lies at data.path */
       CONFIG_SYNTHETIC,
       CONFIG_TEXT,
       CONFIG_FINEWEB,       /* JSONL or lines, from standard input unless data.path is given */
       CONFIG_FINEWEB_LOCAL, /* JSONL or lines, from data.path */
       CONFIG_BIN,
       CONFIG_RETRIEVAL
};

/* Where a value in force came from, later ones above earlier ones. */
typedef enum config_layer {
    CONFIG_FROM_DEFAULT,
    CONFIG_FROM_FILE,
    CONFIG_FROM_CHECKPOINT, /* config_from_json, or a program's preset */
    CONFIG_FROM_ENVIRONMENT,
    CONFIG_FROM_COMMAND_LINE
} config_layer;

typedef struct config_model {
    int64_t vocab_size; /* 0: the tokenizer's */
    int64_t dim, n_layers, n_heads, n_kv_groups, d_k, d_v;
    char attention[CONFIG_PATH_BYTES]; /* kinds, which the layers take in turn: "window,nsa" */
    int64_t tied_embeddings, qk_norm, shared_kv;
    int64_t mlp, mlp_hidden; /* 0: 4 dim */
    double norm_eps;
    int64_t rope_pairs, rope_scaling, rope_trained_context; /* nsa_rope_pairs, CONFIG_ROPE_ */
    double rope_base, rope_factor;
    double rope_fast, rope_slow; /* 0: as nsa_rope has it */
} config_model;

typedef struct config_nsa {
    int64_t l, d, l_sel, n_sel, w;
    int64_t n_init, n_local;      /* of n_sel */
    int64_t phi, gate, gate_form; /* nsa_phi, nsa_gate_kind */
} config_nsa;

typedef struct config_data {
    int64_t dataset, tokenizer, isolate_documents, synthetic_on_fail, report_docs;
    double val_fraction, loader_timeout;    /* of the data; seconds */
    char path[CONFIG_PATH_BYTES];           /* file, folder, or "-" for standard input */
    char tokenizer_path[CONFIG_PATH_BYTES]; /* folder with vocab.json and merges.txt */
} config_data;

typedef struct config_runtime {
    int64_t device, precision, use_flash, use_triton_sel, gradient_checkpointing;
    int64_t threads; /* 0: all that the process may use */
    int64_t cuda_graph;
    int64_t ddp, ddp_bucket_mb, ddp_compress, ddp_check_every;
    int64_t context_parallel;                          /* processes that divide a sequence */
    double ddp_timeout;                                /* seconds */
    int64_t world_size, rank, local_rank, master_port; /* environment only */
    char master_addr[CONFIG_PATH_BYTES];
} config_runtime;

typedef struct config_train {
    int64_t steps, seq_len, batch_size, accumulate_grad_batches;
    int64_t optimizer, lr_schedule, warmup_steps, log_every, eval_every, eval_batches, save_every;
    int64_t keep_checkpoints, keep_every, seed;
    double lr, decay_fraction, weight_decay, grad_clip;
    char out_dir[CONFIG_PATH_BYTES];
    char save[CONFIG_PATH_BYTES];      /* "": no copy of the final weights */
    char resume[CONFIG_PATH_BYTES];    /* "": a new run; "latest": out_dir's; else a checkpoint */
    char init_from[CONFIG_PATH_BYTES]; /* "": random weights; else a checkpoint's */
} config_train;

typedef struct config_telemetry {
    int64_t heartbeat_every, tb_disable, disable_csv_logs, disable_aux_stats;
    int64_t trace_grads, trace_module_bwd, trace_ddp_buckets;
    double stall_timeout; /* seconds; 0: none */
} config_telemetry;

typedef struct config_sample {
    int64_t length, top_k; /* tokens, 0: no sample; 0: all */
    int64_t repetition_window;
    double temperature, top_p, min_p, repetition_penalty;
    char prompt[CONFIG_PATH_BYTES];
} config_sample;

typedef struct config_origin {
    config_layer layer;
    int line;          /* in the file, where layer is CONFIG_FROM_FILE */
    const char *given; /* what the command line calls it, up to its "="; a preset's name */
} config_origin;

typedef struct config {
    config_model model;
    config_nsa nsa;
    config_data data;
    config_runtime runtime;
    config_train train;
    config_telemetry telemetry;
    config_sample sample;
    int64_t check;                /* --check: validate, print, end */
    char file[CONFIG_PATH_BYTES]; /* --config or CONFIG; "": built-in values */
    config_origin origin[CONFIG_ENTRIES_MAX];
} config;

typedef struct config_program {
    const char *name, *summary;   /* "train_tiny", one line for --help */
    const char *const *no_effect; /* keys that this program accepts without using; NULL ends it */
    /* NULL, or what gives the settings of the checkpoint that train.resume names, or else
       train.init_from, of which the model and the tokenizer are taken; those that it does not know
       have CONFIG_FROM_DEFAULT as their origin. */
    bool (*recall)(const struct config *asked, struct config *kept, fault *f);
    const char *words;  /* what is given beside options, as in option.h; NULL: nothing */
    const char **given; /* and where it goes */
    /* NULL, or what gives settings that stand above the file's, by these words: "--dim=768" and so
       on, a NULL behind them, and in `name` who says so. NULL: the fault says why not. */
    const char *const *(*preset)(const char *const *words, const char **name, fault *f);
} config_program;

/* Defaults, then the file, then a resumed run's checkpoint, then the environment, then the command
   line; then every range and every rule that ties settings together. The file's settings of a
   model are not replaced by the checkpoint's. Warnings, and what differs from the checkpoint, go to
   `notes`, --help to stdout. */
option_outcome config_load(config *c, const config_program *program, int argc, char **argv,
                           const listener *notes, fault *f);

/* What was given has no effect beside the other settings: refused where it was typed, else said. */
bool config_check_effects(const config *c, const listener *notes, fault *f);

/* Says what was given for several processes, of which there is one. */
void config_say_alone(const config *c, const listener *notes);

/* The rules that tie the settings of a model to each other; config_load has applied them. */
bool config_check_model(const config *c, fault *f);

/* For a program with a command line of its own: stores one setting, by its key. On failure the
   message is what is allowed, without a place. */
bool config_put(config *c, const char *key, const char *text, fault *f);

/* The same as if a trainer's command line had given it by `flag`; and all that stand so in `given`,
   in the place of c's. */
bool config_give(config *c, const char *key, const char *flag, const char *text, fault *f);
void config_take(config *c, const config *given);

/* A setting's row, for a program that has an option for it. */
option config_option(const char *key);

/* The settings by number, from 0: their keys (NULL behind the last) and their values in force, as
   they would be written in a file. */
const char *config_key(size_t i);
void config_text(const config *c, size_t i, char *text, size_t bytes);

/* What --check prints of the settings: each key, its value, where it came from. */
void config_print(const config *c, FILE *out);

/* Where a key's value came from; the key must exist ("runtime.precision"). */
config_layer config_from(const config *c, const char *key);

/* What a layer attends with. */
attention_kind config_attention(const config_model *m, int64_t layer);
const char *config_attention_name(attention_kind kind);

/* Steps of warm-up, then the schedule: cosine down to a tenth of lr; constant; or wsd, which stays
   and then falls in even steps, the first behind the last one to 0. step is 1-based: the first step
   of a warm-up of n runs at lr / n. */
double config_lr(const config_train *t, int64_t step);

/* The settings as a JSON object, "model.dim": 128 and so on, for checkpoints; and back. Keys of
   launch and telemetry are left out. `json` is a json_t of jansson. */
struct json_t;
struct json_t *config_to_json(const config *c);
bool config_from_json(config *c, const struct json_t *json, fault *f);

/* Whether every layer attends alike in both. */
bool config_same_attention(const config_model *a, const config_model *b);

/* The saved settings in which b differs from a: {"train.lr": [0.001, 0.0001]}, a's first; NULL: out
   of memory. */
struct json_t *config_changes(const config *a, const config *b);

/* Whether weights trained with b mean the same with a: every model. and nsa. setting is equal, but
   for nsa.n_sel, how many blocks are read, and model.attention where the command line changes it.
   The fault names the first that differs. */
bool config_same_model(const config *a, const config *b, fault *f);

/* Whether the settings that config_load took from a checkpoint are those of `kept`. */
bool config_recalled(const config *c, const config *kept, fault *f);

#endif

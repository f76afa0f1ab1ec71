/* config_table.c - every setting: its key, type, range, default, flag and one line of help. Twin:
   config_table.h. A new setting is one row here and one field in config.h; option.c reads and
   writes the values. */
#include "config/config_table.h"

#include <string.h>

#define AT(field) offsetof(config, field)
#define LAUNCH    (OPTION_NOT_IN_FILE | CONFIG_NOT_SAVED)
#define MILLION   1048576.0
#define EXACT     9007199254740992.0 /* 2^53: every integer up to it is a double */

/* In the order of attention_kind. */
#define ATTENTIONS "nsa|full|window|cmp+slc"

#define INTEGER(key, field, min, max, initial, flag, env, traits, help) \
    { key, OPTION_INTEGER, AT(field), min, max, NULL, initial, flag, env, traits, help }
#define NUMBER(key, field, min, max, initial, flag, traits, help) \
    { key, OPTION_NUMBER, AT(field), min, max, NULL, initial, flag, NULL, traits, help }
#define SWITCH(key, field, initial, flag, env, traits, help) \
    { key, OPTION_SWITCH, AT(field), 0, 1, NULL, initial, flag, env, traits, help }
#define LAYERS(key, field, initial, flag, env, traits, help) \
    { key, OPTION_LAYERS, AT(field), 0, 0, NULL, initial, flag, env, traits, help }
#define WORD(key, field, words, initial, flag, env, traits, help) \
    { key, OPTION_WORD, AT(field), 0, 0, words, initial, flag, env, traits, help }
#define PATTERN(key, field, words, initial, flag, help) \
    { key, OPTION_PATTERN, AT(field), 0, 0, words, initial, flag, NULL, 0, help }
#define STRING(key, field, initial, flag, env, traits, words, help) \
    { key, OPTION_STRING, AT(field), 0, 0, words, initial, flag, env, traits, help }

const option config_entries[] = {
    INTEGER("model.vocab_size", model.vocab_size, 0, INT32_MAX, "0", "--vocab-size", NULL, 0,
            "rows of the embedding; 0: as many as the tokenizer has"),
    INTEGER("model.dim", model.dim, 1, 65536, "128", "--dim", NULL, 0,
            "width of the residual stream"),
    INTEGER("model.n_layers", model.n_layers, 1, 1024, "1", "--layers", NULL, 0, "blocks"),
    INTEGER("model.n_heads", model.n_heads, 1, 1024, "8", "--heads", NULL, 0, "query heads"),
    INTEGER("model.n_kv_groups", model.n_kv_groups, 1, 1024, "2", "--kv-groups", NULL, 0,
            "key-value heads; divides n_heads"),
    INTEGER("model.d_k", model.d_k, 2, 256, "16", "--d-k", NULL, 0,
            "width of q and k of a head; even"),
    INTEGER("model.d_v", model.d_v, 1, 256, "16", "--d-v", NULL, 0, "width of v of a head"),
    PATTERN("model.attention", model.attention, ATTENTIONS, "nsa", "--attention",
            "native sparse attention, or the baselines: dense, and the last nsa.w tokens alone;\n"
            "cmp+slc is nsa without its window. A list is taken in turn by the layers, again\n"
            "and again: window,cmp+slc alternates"),
    SWITCH("model.tied_embeddings", model.tied_embeddings, "false", "--tied-embeddings", NULL, 0,
           "lm_head is the embedding"),
    SWITCH("model.qk_norm", model.qk_norm, "false", "--qk-norm", NULL, 0,
           "RMSNorm of each head's q and k, before the gate and RoPE"),
    SWITCH("model.shared_kv", model.shared_kv, "false", "--shared-kv", NULL, 0,
           "one k and one v for the three branches"),
    WORD("model.mlp", model.mlp, "silu|swiglu", "silu", "--mlp", NULL, 0,
         "fc2(silu(fc1)), or fc2(silu(gate) * fc1)"),
    INTEGER("model.mlp_hidden", model.mlp_hidden, 0, 1048576, "0", "--mlp-hidden", NULL, 0,
            "width inside the MLP; 0: 4 dim"),
    NUMBER("model.norm_eps", model.norm_eps, 0, 1, "1e-6", "--norm-eps", OPTION_ABOVE_MIN,
           "what RMSNorm adds below its root"),
    WORD("model.rope_pairs", model.rope_pairs, "interleaved|halves", "interleaved", "--rope-pairs",
         NULL, 0, "which elements RoPE rotates together"),
    NUMBER("model.rope_base", model.rope_base, 1, 1e12, "10000", "--rope-base", OPTION_ABOVE_MIN,
           "base of RoPE's frequencies"),
    WORD("model.rope_scaling", model.rope_scaling, "none|linear|ntk|yarn|llama3", "none",
         "--rope-scaling", NULL, 0, "how RoPE stretches past the context trained with"),
    NUMBER("model.rope_factor", model.rope_factor, 1, 65536, "1", "--rope-factor", 0,
           "context now over context trained with"),
    INTEGER("model.rope_trained_context", model.rope_trained_context, 0, MILLION, "0",
            "--rope-trained-context", NULL, 0, "tokens trained with; needed by yarn and llama3"),
    NUMBER("model.rope_fast", model.rope_fast, 0, 65536, "0", "--rope-fast", 0,
           "yarn, llama3: turns over these tokens from which on a pair is left as it is; 0: 32\n"
           "(yarn) or 4 (llama3)"),
    NUMBER("model.rope_slow", model.rope_slow, 0, 65536, "0", "--rope-slow", 0,
           "yarn, llama3: turns up to which a pair is slowed by all of the factor; 0: 1"),

    INTEGER("nsa.l", nsa.l, 1, 65536, "16", "--nsa-l", NULL, 0, "tokens of a compression block"),
    INTEGER("nsa.d", nsa.d, 1, 65536, "8", "--nsa-d", NULL, 0, "its stride; divides l and l_sel"),
    INTEGER("nsa.l_sel", nsa.l_sel, 1, 65536, "32", "--nsa-l-sel", NULL, 0,
            "tokens of a selection block; at least l"),
    INTEGER("nsa.n_sel", nsa.n_sel, 1, 65536, "8", "--nsa-n-sel", NULL, 0,
            "selected blocks, n_init and n_local of them always the same"),
    INTEGER("nsa.n_init", nsa.n_init, 0, 65535, "1", "--nsa-n-init", NULL, 0,
            "first blocks that are always selected"),
    INTEGER("nsa.n_local", nsa.n_local, 1, 65536, "2", "--nsa-n-local", NULL, 0,
            "latest blocks that are always selected"),
    INTEGER("nsa.w", nsa.w, 1, MILLION, "64", "--nsa-w", NULL, 0, "tokens of the sliding window"),
    WORD("nsa.phi", nsa.phi, "avg|conv|mlp", "avg", "--nsa-phi", NULL, 0,
         "how a block is compressed"),
    WORD("nsa.gate", nsa.gate, "sigmoid|softmax", "sigmoid", "--nsa-gate", NULL, 0,
         "how the gate mixes the three branches"),
    WORD("nsa.gate_form", nsa.gate_form, "mlp|linear", "mlp", "--nsa-gate-form", NULL, 0,
         "what the gate is: an MLP of a group's mean query, or a linear map of x, by query head"),

    WORD("data.dataset", data.dataset,
         "auto|synthetic|text|fineweb_edu|fineweb_edu_local|bin|retrieval", "auto", "--dataset",
         NULL, 0,
         "auto: by what lies at data.path; synthetic: uniformly random tokens;\n"
         "fineweb_edu: JSONL or lines, from standard input unless data.path is given;\n"
         "bin: token shards in llm.c's format;\n"
         "retrieval: needles hidden in noise, asked for at the end (vocab_size 512)"),
    STRING("data.path", data.path, "", "--data", NULL, 0, "PATH",
           "a file, a folder with those below it, or - for standard input"),
    WORD("data.tokenizer", data.tokenizer, "byte|gpt2", "byte", "--tokenizer", NULL, 0,
         "what a token is"),
    STRING("data.tokenizer_path", data.tokenizer_path, "", "--tokenizer-path", NULL, 0, "DIR",
           "gpt2: the folder that holds tokenizer.json, or vocab.json and merges.txt"),
    SWITCH("data.isolate_documents", data.isolate_documents, "false", "--isolate-documents", NULL,
           0, "keep attention and loss inside a document"),
    NUMBER("data.val_fraction", data.val_fraction, 0, 0.5, "0.05", "--val-fraction", 0,
           "share of the data set aside for validation"),
    NUMBER("data.loader_timeout", data.loader_timeout, 0, 86400, "60", "--loader-timeout",
           OPTION_ABOVE_MIN | CONFIG_NOT_SAVED, "seconds that a batch may keep the run waiting"),
    SWITCH("data.synthetic_on_fail", data.synthetic_on_fail, "false", "--synthetic-on-fail", NULL,
           CONFIG_NOT_SAVED, "go on with synthetic data where the source fails, and say so"),
    INTEGER("data.fwe_report_docs", data.report_docs, 0, EXACT, "1000", "--fwe-report-docs",
            "NSA_FWE_REPORT_DOCS", CONFIG_NOT_SAVED,
            "a line every so many documents of a stream; 0: none"),

    WORD("runtime.device", runtime.device, "auto|cpu|cuda", "auto", "--device", NULL,
         CONFIG_NOT_SAVED, "auto: cuda where the program and the machine have it"),
    WORD("runtime.precision", runtime.precision, "fp32|bf16|fp16", "fp32", "--precision", NULL,
         CONFIG_NOT_SAVED, "of activations; a CPU runs f32 unless the command line forces another"),
    SWITCH("runtime.use_flash", runtime.use_flash, "false", NULL, NULL,
           CONFIG_NO_EFFECT | CONFIG_NOT_SAVED, "accepted, no effect"),
    SWITCH("runtime.use_triton_sel", runtime.use_triton_sel, "false", NULL, NULL,
           CONFIG_NO_EFFECT | CONFIG_NOT_SAVED, "accepted, no effect"),
    LAYERS("runtime.gradient_checkpointing", runtime.gradient_checkpointing, "false", "--gc",
           "NSA_NO_GC", CONFIG_NOT_SAVED | CONFIG_NEGATED,
           "recompute activations in backward: of every layer (true), of some (2..8),\n"
           "or of every layer all but attention (--gc=selective)"),
    INTEGER("runtime.threads", runtime.threads, 0, 1024, "0", "--threads", NULL, CONFIG_NOT_SAVED,
            "CPU threads; 0: all that the process may use, which is also the most"),
    SWITCH("runtime.cuda_graph", runtime.cuda_graph, "false", "--cuda-graph", NULL,
           CONFIG_NOT_SAVED, "GPU: record what a step launches, and run the recording"),
    INTEGER("runtime.ddp", runtime.ddp, -1, 1, "-1", "--ddp", NULL, LAUNCH,
            "several processes: 1 yes, 0 no, -1 where the launcher says so"),
    INTEGER("runtime.context_parallel", runtime.context_parallel, 1, 65536, "1",
            "--context-parallel", NULL, CONFIG_NOT_SAVED,
            "processes that divide each sequence; divides their number"),
    INTEGER("runtime.ddp_bucket_mb", runtime.ddp_bucket_mb, 1, 1024, "25", "--ddp-bucket-mb",
            "NSA_DDP_BUCKET_MB", CONFIG_NOT_SAVED, "MiB of gradients reduced at once"),
    WORD("runtime.ddp_compress", runtime.ddp_compress, "off|bf16", "off", "--ddp-compress",
         "NSA_DDP_COMPRESS", CONFIG_NOT_SAVED, "dtype in which gradients travel"),
    INTEGER("runtime.ddp_check_every", runtime.ddp_check_every, 0, 1e9, "100", "--ddp-check-every",
            NULL, CONFIG_NOT_SAVED,
            "steps between two comparisons of all processes' parameters; 0: none"),
    NUMBER("runtime.ddp_timeout", runtime.ddp_timeout, 0, 86400, "120", "--ddp-timeout",
           OPTION_ABOVE_MIN | CONFIG_NOT_SAVED,
           "seconds that a process may keep the others waiting before all of them end"),
    INTEGER("runtime.world_size", runtime.world_size, 1, 65536, "1", NULL, "WORLD_SIZE", LAUNCH,
            "processes"),
    INTEGER("runtime.rank", runtime.rank, 0, 65535, "0", NULL, "RANK", LAUNCH, "this process"),
    INTEGER("runtime.local_rank", runtime.local_rank, 0, 65535, "0", NULL, "LOCAL_RANK", LAUNCH,
            "this process on its machine"),
    STRING("runtime.master_addr", runtime.master_addr, "127.0.0.1", NULL, "MASTER_ADDR", LAUNCH,
           NULL, "where rank 0 is"),
    INTEGER("runtime.master_port", runtime.master_port, 1, 65535, "29500", NULL, "MASTER_PORT",
            LAUNCH, "and its port"),

    INTEGER("train.steps", train.steps, 1, 1e9, "200", "--steps", NULL, 0,
            "optimizer steps in all"),
    INTEGER("train.seq_len", train.seq_len, 1, MILLION, "128", "--seq-len", "NSA_SEQ_LEN", 0,
            "tokens of a row"),
    INTEGER("train.batch_size", train.batch_size, 1, 65536, "8", "--batch-size", "NSA_BATCH_SIZE",
            0, "rows of a micro-batch over all processes"),
    INTEGER("train.accumulate_grad_batches", train.accumulate_grad_batches, 1, 65536, "1",
            "--accum-batches", "NSA_ACCUM", 0, "micro-batches of a step"),
    {"train.lr", OPTION_NUMBER, AT(train.lr), 0, 1, NULL, "3e-4", "--lr", "NSA_LR",
     OPTION_ABOVE_MIN, "largest learning rate"},
    WORD("train.optimizer", train.optimizer, "adamw|muon", "adamw", "--optimizer", NULL, 0,
         "muon: of the matrices inside blocks; AdamW of all else"),
    WORD("train.lr_schedule", train.lr_schedule, "cosine|constant|wsd", "cosine", "--lr-schedule",
         NULL, 0,
         "after the warm-up; cosine ends at a tenth of lr, wsd stays and then\n"
         "falls to 0"),
    NUMBER("train.decay_fraction", train.decay_fraction, 0, 1, "0.2", "--decay-fraction", 0,
           "wsd: share of the steps in which the rate falls, the last ones"),
    INTEGER("train.warmup_steps", train.warmup_steps, 0, 1e9, "0", "--warmup-steps", NULL, 0,
            "steps over which the rate rises"),
    NUMBER("train.weight_decay", train.weight_decay, 0, 1, "0", "--weight-decay", 0,
           "on matrices only"),
    NUMBER("train.grad_clip", train.grad_clip, 0, 1e9, "1", "--grad-clip", 0,
           "largest gradient norm; 0: none"),
    INTEGER("train.log_every", train.log_every, 1, 1e9, "20", "--log-every", NULL, 0,
            "steps between two log lines"),
    INTEGER("train.eval_every", train.eval_every, 0, 1e9, "100", "--eval-every", NULL, 0,
            "steps between two evaluations; 0: none"),
    INTEGER("train.eval_batches", train.eval_batches, 1, 1e6, "8", "--eval-batches", NULL, 0,
            "micro-batches of an evaluation"),
    INTEGER("train.save_every", train.save_every, 0, 1e9, "1000", "--save-every", NULL, 0,
            "steps between two checkpoints; 0: only where the run ends"),
    INTEGER("train.keep_checkpoints", train.keep_checkpoints, 0, 1e6, "3", "--keep-checkpoints",
            NULL, 0, "how many to keep; 0: all"),
    INTEGER("train.keep_every", train.keep_every, 0, 1e9, "0", "--keep-every", NULL, 0,
            "steps whose multiples are kept beside these; 0: none"),
    INTEGER("train.seed", train.seed, 0, EXACT, "1337", "--seed", NULL, 0,
            "of parameters, data order and samples"),
    STRING("train.out_dir", train.out_dir, "artifacts/train_showcase", "--out-dir", NULL,
           CONFIG_NOT_SAVED, "DIR", "folder for everything that the run writes"),
    STRING("train.save", train.save, "", "--save", NULL, LAUNCH, "FILE",
           "also write the final weights to this .safetensors file"),
    STRING("train.resume", train.resume, "", "--resume", NULL, LAUNCH | OPTION_OPTIONAL_VALUE,
           "latest",
           "go on from a checkpoint, with its settings; without a path from the newest in out_dir"),
    STRING("train.init_from", train.init_from, "", "--init-from", NULL, LAUNCH, "DIR",
           "begin at step 1 with the weights of this checkpoint"),

    INTEGER("telemetry.heartbeat_every", telemetry.heartbeat_every, 0, 1e9, "1", NULL,
            "NSA_HEARTBEAT_EVERY", CONFIG_NOT_SAVED, "steps between two heartbeats; 0: none"),
    NUMBER("telemetry.stall_timeout", telemetry.stall_timeout, 0, 86400, "180", "--stall-timeout",
           CONFIG_NOT_SAVED, "seconds without progress inside a step that halt the run; 0: never"),
    SWITCH("telemetry.tb_disable", telemetry.tb_disable, "false", NULL, "NSA_TB_DISABLE",
           CONFIG_NOT_SAVED, "no TensorBoard files"),
    SWITCH("telemetry.disable_csv_logs", telemetry.disable_csv_logs, "false", NULL,
           "NSA_DISABLE_CSV_LOGS", CONFIG_NOT_SAVED, "no CSV files"),
    SWITCH("telemetry.disable_aux_stats", telemetry.disable_aux_stats, "false", NULL,
           "NSA_DISABLE_AUX_STATS", CONFIG_NOT_SAVED, "no gate and selection statistics"),
    SWITCH("telemetry.trace_grads", telemetry.trace_grads, "false", NULL, "NSA_TRACE_GRADS",
           CONFIG_NOT_SAVED, "a line for each parameter's gradient"),
    SWITCH("telemetry.trace_module_bwd", telemetry.trace_module_bwd, "false", NULL,
           "NSA_TRACE_MODULE_BWD", CONFIG_NOT_SAVED, "a line for each layer's backward"),
    SWITCH("telemetry.trace_ddp_buckets", telemetry.trace_ddp_buckets, "false", NULL,
           "NSA_TRACE_DDP_BUCKETS", CONFIG_NOT_SAVED, "a line for each bucket reduced"),

    INTEGER("sample.length", sample.length, 0, MILLION, "0", "--sample", NULL, CONFIG_NOT_SAVED,
            "tokens of the text written before and after training; 0: none"),
    STRING("sample.prompt", sample.prompt, "", "--prompt", NULL, CONFIG_NOT_SAVED, NULL,
           "what that text goes on from"),
    NUMBER("sample.temperature", sample.temperature, 0, 100, "0.8", "--temperature",
           CONFIG_NOT_SAVED, "0: always the likeliest token"),
    INTEGER("sample.top_k", sample.top_k, 0, INT32_MAX, "0", "--top-k", NULL, CONFIG_NOT_SAVED,
            "draw from the k likeliest; 0: from all"),
    NUMBER("sample.top_p", sample.top_p, 0, 1, "0.95", "--top-p",
           OPTION_ABOVE_MIN | CONFIG_NOT_SAVED,
           "draw from the likeliest tokens that make up this probability"),
    NUMBER("sample.min_p", sample.min_p, 0, 1, "0", "--min-p", CONFIG_NOT_SAVED,
           "draw from tokens that have this share of the likeliest one's probability"),
    NUMBER("sample.repetition_penalty", sample.repetition_penalty, 0, 100, "1",
           "--repetition-penalty", OPTION_ABOVE_MIN | CONFIG_NOT_SAVED,
           "what the logits of recent tokens are divided by; 1: nothing"),
    INTEGER("sample.repetition_window", sample.repetition_window, -1, MILLION, "-1",
            "--repetition-window", NULL, CONFIG_NOT_SAVED,
            "how many tokens are recent; -1: prompt and text"),

    SWITCH("check", check, "false", "--check", NULL, LAUNCH,
           "validate, print every value in force, parameters and memory; train nothing"),
    STRING("config", file, "", "--config", "CONFIG", LAUNCH, "FILE",
           "the YAML file with these keys"),
};

const size_t config_entry_count = sizeof config_entries / sizeof config_entries[0];

/* The table must fit the origins that config.h has room for. */
typedef char
    entries_fit[sizeof config_entries / sizeof config_entries[0] <= CONFIG_ENTRIES_MAX ? 1 : -1];

const option *config_find(const char *key) {
    for (size_t i = 0; i < config_entry_count; i++)
        if (!strcmp(config_entries[i].key, key)) return &config_entries[i];
    return NULL;
}

static const char *const attention_names[] = {"nsa", "full", "window", "cmp+slc"};

attention_kind config_attention(const config_model *m, int64_t layer) {
    const char *at = m->attention;
    int64_t count = 1;
    int kind = sizeof attention_names / sizeof attention_names[0] - 1;
    char word[32];
    for (const char *c = at; *c; c++) count += *c == ',';
    for (int64_t i = layer % count; i > 0; i--) at = strchr(at, ',') + 1;
    snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at);
    while (kind && strcmp(word, attention_names[kind])) kind--;
    return (attention_kind)kind;
}

const char *config_attention_name(attention_kind kind) {
    return attention_names[kind];
}

void config_place(const config *c, const option *e, char *text, size_t bytes) {
    const config_origin *o = &c->origin[e - config_entries];
    switch (o->layer) {
    case CONFIG_FROM_DEFAULT:
        snprintf(text, bytes, "default");
        break;
    case CONFIG_FROM_CHECKPOINT:
        snprintf(text, bytes, "%s", o->given ? o->given : "checkpoint");
        break;
    case CONFIG_FROM_FILE:
        snprintf(text, bytes, "%s:%d", c->file, o->line);
        break;
    case CONFIG_FROM_ENVIRONMENT:
        snprintf(text, bytes, "environment %s", e->environment);
        break;
    case CONFIG_FROM_COMMAND_LINE:
        snprintf(text, bytes, "command line %.*s", (int)strcspn(o->given, "="), o->given);
        break;
    }
}

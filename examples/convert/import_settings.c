/* import_settings.c - what a folder's config.json says, as settings of the trainers. Twin:
   import.h. A kind of model is known or refused, and so is every key: what is neither read nor
   known to change nothing must be absent, null or false. */
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "import.h"

enum { PATH_ROOM = CONFIG_PATH_BYTES + 256, CONTEXT_MOST = 1 << 20 };

/* Models of Llama's shape. What an absent key means is what transformers' class takes it for. */
typedef struct family {
    const char *type;
    int kv_heads;    /* num_key_value_heads; 0: as many as there are heads */
    int head_dim;    /* 0: hidden_size over heads */
    bool qk_norm;    /* each head's q and k through RMSNorm */
    bool sparse;     /* block_size, block_counts and window_size may say so */
    bool needs_null; /* sliding_window, which absent is a window */
} family;

static const family families[] = {
    {"llama", 0, 0, false, true, false},
    {"llama-nsa", 0, 0, false, true, false},
    {"mistral", 8, 0, false, false, true},
    {"qwen3", 32, 128, true, false, false},
};
#define FAMILIES "llama, llama-nsa, mistral, qwen3 or nsa_decoder"

/* Near relatives, and what they compute that the trainers' model does not. */
static const struct {
    const char *type, *why;
} relatives[] = {
    {"qwen2", "q, k and v have biases"},
    {"smollm3", "some layers have no RoPE"},
    {"granite", "embeddings, residuals, scores and logits are multiplied"},
    {"gemma", "norms and embeddings are scaled otherwise"},
    {"gemma2", "scores and logits are capped"},
    {"gemma3_text", "layers have windows and RoPE of two kinds"},
    {"olmo2", "norms stand behind attention and MLP"},
    {"phi3", "projections are fused, and RoPE may be partial"},
    {"mixtral", "the MLP is a mixture of experts"},
    {"qwen3_moe", "the MLP is a mixture of experts"},
};

/* ---- Keys ---------------------------------------------------------------------------------- */

/* Of Llama's shape: read below. */
static const char *const llama_keys[] = {"model_type",
                                         "vocab_size",
                                         "hidden_size",
                                         "num_hidden_layers",
                                         "num_attention_heads",
                                         "num_key_value_heads",
                                         "intermediate_size",
                                         "rms_norm_eps",
                                         "head_dim",
                                         "hidden_act",
                                         "max_position_embeddings",
                                         "tie_word_embeddings",
                                         "rope_theta",
                                         "rope_scaling",
                                         "rope_parameters",
                                         "partial_rotary_factor",
                                         "sliding_window",
                                         "layer_types",
                                         "block_size",
                                         "block_counts",
                                         "window_size",
                                         "use_sliding_window",
                                         "is_causal",
                                         NULL};

/* Of what export wrote. */
static const char *const own_keys[] = {"model_type",
                                       "vocab_size",
                                       "hidden_size",
                                       "num_hidden_layers",
                                       "num_attention_heads",
                                       "num_key_value_heads",
                                       "head_dim",
                                       "v_head_dim",
                                       "intermediate_size",
                                       "mlp",
                                       "rms_norm_eps",
                                       "tie_word_embeddings",
                                       "max_position_embeddings",
                                       "rope",
                                       "attention",
                                       "shared_kv",
                                       "qk_norm",
                                       "cmp_block",
                                       "cmp_stride",
                                       "slc_block",
                                       "slc_count",
                                       "slc_init",
                                       "slc_local",
                                       "window",
                                       "phi",
                                       "gate",
                                       "gate_form",
                                       NULL};

/* Names, tokens, how weights are stored or drawn, what generate does, dropout and losses of
   training: none of it changes a logit. */
static const char *const idle_keys[] = {"architectures",
                                        "auto_map",
                                        "transformers_version",
                                        "_name_or_path",
                                        "name_or_path",
                                        "torch_dtype",
                                        "dtype",
                                        "use_cache",
                                        "initializer_range",
                                        "attention_dropout",
                                        "bos_token_id",
                                        "eos_token_id",
                                        "pad_token_id",
                                        "unk_token_id",
                                        "sep_token_id",
                                        "decoder_start_token_id",
                                        "pretraining_tp",
                                        "max_window_layers",
                                        "is_llama_config",
                                        "transformers.js_config",
                                        "unsloth_fixed",
                                        "unsloth_version",
                                        "_attn_implementation",
                                        "attn_implementation",
                                        "_attn_implementation_autoset",
                                        "id2label",
                                        "label2id",
                                        "num_labels",
                                        "problem_type",
                                        "tokenizer_class",
                                        "task_specific_params",
                                        "finetuning_task",
                                        "prefix",
                                        "return_dict",
                                        "use_return_dict",
                                        "chunk_size_feed_forward",
                                        "pruned_heads",
                                        "max_length",
                                        "min_length",
                                        "do_sample",
                                        "early_stopping",
                                        "num_beams",
                                        "num_beam_groups",
                                        "diversity_penalty",
                                        "temperature",
                                        "top_k",
                                        "top_p",
                                        "typical_p",
                                        "repetition_penalty",
                                        "length_penalty",
                                        "no_repeat_ngram_size",
                                        "encoder_no_repeat_ngram_size",
                                        "bad_words_ids",
                                        "num_return_sequences",
                                        "max_new_tokens",
                                        "keys_to_ignore_at_inference",
                                        NULL};

static bool among(const char *const *list, const char *key) {
    while (*list && strcmp(*list, key)) list++;
    return *list != NULL;
}

static bool is_off(const json_t *x) {
    return !x || json_is_null(x) || json_is_false(x);
}

/* `where` is "" or "rope_scaling: ". */
static bool check_keys(const json_t *object, const char *const *known, const char *const *idle,
                       const char *where, fault *f) {
    const char *key;
    const json_t *value;
    json_object_foreach((json_t *)object, key, value) {
        if (is_off(value) || among(known, key) || (idle && among(idle, key))) continue;
        return fault_set(f,
                         "config.json: %s%.80s: not known here, and it may change what the model "
                         "computes; must be absent, null or false",
                         where, key);
    }
    return true;
}

/* ---- Settings ------------------------------------------------------------------------------ */

bool import_has_settings(const char *folder) {
    char path[PATH_ROOM];
    fault unused;
    return files_join(path, sizeof path, folder, "config.json", &unused) && files_exist(path);
}

/* "--dim=768"; the tables below stay far below IMPORT_FLAGS. */
static void add_word(import_flags *x, const char *flag, const char *word) {
    snprintf(x->text[x->count++], IMPORT_TEXT, "%s=%.*s", flag, CONFIG_PATH_BYTES, word);
}

static void add_number(import_flags *x, const char *flag, double value) {
    char word[64];
    snprintf(word, sizeof word, value == floor(value) && fabs(value) < 1e15 ? "%.0f" : "%.17g",
             value);
    add_word(x, flag, word);
}

static void add_switch(import_flags *x, const char *flag, bool on) {
    add_word(x, flag, on ? "true" : "false");
}

enum kind { INTEGER, NUMBER, SWITCH, WORD };

/* A key and the flag that takes it. Where it is missing, `other` stands for it; NULL: it must be
   there. A null is a switch that is off, and nothing else: Python computes with no other. */
typedef struct row {
    const char *key, *flag;
    enum kind kind;
    const char *other;
} row;

static bool add_row(import_flags *x, const json_t *root, const row *r, fault *f) {
    static const char *const kinds[] = {"an integer", "a number", "true or false", "a word"};
    const json_t *v = json_object_get(root, r->key);
    if (r->other && (!v || (json_is_null(v) && r->kind == SWITCH))) {
        add_word(x, r->flag, r->other);
        return true;
    }
    bool fits = r->kind == INTEGER  ? json_is_integer(v)
                : r->kind == NUMBER ? json_is_number(v)
                : r->kind == SWITCH ? json_is_boolean(v)
                                    : json_is_string(v);
    if (!fits) return fault_set(f, "config.json: %s: must be %s", r->key, kinds[r->kind]);
    if (r->kind == WORD)
        add_word(x, r->flag, json_string_value(v));
    else if (r->kind == SWITCH)
        add_switch(x, r->flag, json_is_true(v));
    else
        add_number(x, r->flag, json_number_value(v));
    return true;
}

static bool add_rows(import_flags *x, const json_t *root, const row *rows, size_t count, fault *f) {
    for (size_t i = 0; i < count; i++)
        if (!add_row(x, root, &rows[i], f)) return false;
    return true;
}

#define ADD_ROWS(x, root, rows, f) add_rows(x, root, rows, sizeof(rows) / sizeof *(rows), f)

/* A key that must be a number where it is there, and may be null if transformers takes null for
   absent there. */
static bool number_or(const json_t *object, const char *key, double other, double *to, fault *f) {
    const json_t *v = json_object_get(object, key);
    *to = json_is_number(v) ? json_number_value(v) : other;
    return !v || json_is_null(v) || json_is_number(v) ||
           fault_set(f, "config.json: %s: must be a number", key);
}

static bool add_context(import_flags *x, const json_t *root, fault *f) {
    double context;
    if (!number_or(root, "max_position_embeddings", 2048, &context, f)) return false;
    if (context < 1) return fault_set(f, "config.json: max_position_embeddings: must be 1 or more");
    add_number(x, "--seq-len", context < CONTEXT_MOST ? context : CONTEXT_MOST);
    return true;
}

/* ---- RoPE ---------------------------------------------------------------------------------- */

/* What a kind of scaling reads beside its name and base. */
static const struct {
    const char *kind, *word;
    const char *keys[9];
} scalings[] = {
    {"default", "none", {NULL}},
    {"linear", "linear", {"factor", NULL}},
    {"llama3",
     "llama3",
     {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", NULL}},
    {"yarn",
     "yarn",
     {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate",
      "attention_factor", NULL}},
};

/* YaRN as the trainers have it: rounded ramps, and the magnitude that follows from the factor. */
static bool check_yarn(const json_t *scaling, double factor, fault *f) {
    double usual = 0.1 * log(factor) + 1, given;
    const json_t *truncate = json_object_get(scaling, "truncate"); /* of null Python makes false */
    if (truncate && !json_is_true(truncate))
        return fault_set(f, "config.json: rope_scaling: truncate: must be true, or absent");
    if (!number_or(scaling, "attention_factor", usual, &given, f)) return false;
    return fabs(given - usual) <= 1e-6 ||
           fault_set(f, "config.json: rope_scaling: attention_factor: must be null, or %.9g",
                     usual);
}

/* The ramp between channels that turn as they did and those that turn more slowly. YaRN's has ends
   of its own where none are given; Llama's has none. */
static bool add_ramp(import_flags *x, const json_t *root, const json_t *scaling, double factor,
                     fault *f) {
    static const char *const names[2][2] = {{"beta_fast", "beta_slow"},
                                            {"high_freq_factor", "low_freq_factor"}};
    bool llama3 = !strcmp(x->text[x->count - 2], "--rope-scaling=llama3");
    double trained, fast, slow;
    if (!number_or(root, "max_position_embeddings", 0, &trained, f) ||
        !number_or(scaling, "original_max_position_embeddings", llama3 ? 0 : trained, &trained,
                   f) ||
        !number_or(scaling, names[llama3][0], 0, &fast, f) ||
        !number_or(scaling, names[llama3][1], 0, &slow, f))
        return false;
    if (trained < 1)
        return fault_set(f, "config.json: rope_scaling: original_max_position_embeddings: must be "
                            "1 or more");
    if (llama3 && (fast <= 0 || slow <= 0))
        return fault_set(f, "config.json: rope_scaling: %s: must be a number above 0",
                         names[1][fast > 0]);
    add_number(x, "--rope-trained-context", trained);
    add_number(x, "--rope-fast", fast);
    add_number(x, "--rope-slow", slow);
    return llama3 || check_yarn(scaling, factor, f);
}

/* Its name, under either key, of which one may be null; "default" where it has none. */
static bool scaling_kind(const json_t *scaling, const char **kind, fault *f) {
    static const char *const names[] = {"rope_type", "type"};
    const json_t *given[] = {json_object_get(scaling, names[0]),
                             json_object_get(scaling, names[1])};
    const char *word = json_string_value(given[0]), *older = json_string_value(given[1]);
    *kind = word ? word : older ? older : "default";
    for (int i = 0; i < 2; i++)
        if (given[i] && !json_is_string(given[i]) &&
            !(json_is_null(given[i]) && json_is_string(given[!i])))
            return fault_set(f, "config.json: rope_scaling: %s: must be a word", names[i]);
    if (!word && !older && json_object_get(scaling, "factor"))
        return fault_set(f, "config.json: rope_scaling: rope_type: must be a word");
    return !word || !older || !strcmp(word, older) ||
           fault_set(f,
                     "config.json: rope_scaling: rope_type is %.60s and type is %.60s: must be "
                     "the same",
                     word, older);
}

static bool add_scaling(import_flags *x, const json_t *root, const json_t *scaling, fault *f) {
    static const char *const common[] = {"rope_type", "type", "rope_theta", "partial_rotary_factor",
                                         NULL};
    const char *kind;
    double factor;
    size_t i = 0, count = sizeof scalings / sizeof *scalings;
    if (!scaling_kind(scaling, &kind, f)) return false;
    while (i < count && strcmp(scalings[i].kind, kind)) i++;
    if (i == count)
        return fault_set(f,
                         "config.json: rope_scaling: %.60s; must be default, linear, llama3 or "
                         "yarn",
                         kind);
    if (!check_keys(scaling, common, scalings[i].keys, "rope_scaling: ", f)) return false;
    add_word(x, "--rope-scaling", scalings[i].word);
    if (!i) return true;
    if (!number_or(scaling, "factor", 0, &factor, f)) return false;
    if (factor < 1) return fault_set(f, "config.json: rope_scaling: factor: must be 1 or more");
    add_number(x, "--rope-factor", factor);
    return !strcmp(kind, "linear") || add_ramp(x, root, scaling, factor, f);
}

/* rope_theta and rope_scaling, or both in rope_parameters, as newer files have them. Where a file
   has both, versions of transformers differ in which one counts. */
static bool add_rope(import_flags *x, const json_t *root, fault *f) {
    static const char *const names[] = {"rope_scaling", "rope_parameters"};
    const json_t *found[2], *scaling = NULL;
    double base, inner, partial, share;
    for (int i = 0; i < 2; i++) {
        found[i] = json_object_get(root, names[i]);
        if (found[i] && !json_is_null(found[i]) && !json_is_object(found[i]))
            return fault_set(f, "config.json: %s: must be an object, or null", names[i]);
        if (!json_is_object(found[i])) continue;
        if (scaling && !json_equal(scaling, found[i]))
            return fault_set(f, "config.json: rope_scaling and rope_parameters: must be the same, "
                                "or one of them absent");
        scaling = found[i];
    }
    if (json_is_null(json_object_get(root, "rope_theta")) ||
        json_is_null(json_object_get(scaling, "rope_theta")))
        return fault_set(f, "config.json: rope_theta: must be a number, or absent");
    if (!number_or(root, "rope_theta", 0, &base, f) ||
        !number_or(scaling, "rope_theta", base, &inner, f) ||
        !number_or(root, "partial_rotary_factor", 1, &partial, f) ||
        !number_or(scaling, "partial_rotary_factor", partial, &share, f))
        return false;
    if (json_is_number(json_object_get(root, "rope_theta")) && inner != base)
        return fault_set(f, "config.json: rope_theta: is there twice, and not the same");
    if (partial != 1 || share != 1)
        return fault_set(f, "config.json: partial_rotary_factor: must be 1");
    bool given = json_is_number(json_object_get(root, "rope_theta")) ||
                 json_is_number(json_object_get(scaling, "rope_theta"));
    add_number(x, "--rope-base", given ? inner : 10000);
    return add_scaling(x, root, scaling, f);
}

/* ---- Models of Llama's shape --------------------------------------------------------------- */

/* What a model may say and the trainers' model cannot do. */
static bool check_plain(const family *m, const json_t *root, fault *f) {
    const json_t *window = json_object_get(root, "sliding_window"), *kind;
    const json_t *uses = json_object_get(root, "use_sliding_window");
    const json_t *act = json_object_get(root, "hidden_act");
    const json_t *causal = json_object_get(root, "is_causal"), *types;
    const char *word = json_string_value(act);
    size_t i;
    if (act && (!word || (strcmp(word, "silu") && strcmp(word, "swish"))))
        return fault_set(f, "config.json: hidden_act: %.60s; must be silu",
                         word ? word : "no word");
    if (causal && !json_is_true(causal))
        return fault_set(f, "config.json: is_causal: must be true, or absent");
    if (!is_off(uses)) return fault_set(f, "config.json: use_sliding_window: must be false");
    bool unused = !m->needs_null && (uses || !strcmp(m->type, "qwen3")); /* by a switch */
    if (window ? !json_is_null(window) && !unused : m->needs_null)
        return fault_set(f, "config.json: sliding_window: must be null%s",
                         window ? "" : ", absent it is a window of 4096");
    types = json_object_get(root, "layer_types");
    if (!is_off(types) && !json_is_array(types))
        return fault_set(f, "config.json: layer_types: must be a list, or null");
    json_array_foreach(types, i, kind) {
        word = json_string_value(kind);
        if (!word || strcmp(word, "full_attention"))
            return fault_set(f, "config.json: layer_types: %.60s; all must be full_attention",
                             word ? word : "no word");
    }
    return true;
}

/* Heads of a width of their own, or of an equal share. */
static bool add_heads(import_flags *x, const family *m, const json_t *root, fault *f) {
    const json_t *width = json_object_get(root, "head_dim");
    const json_t *kv = json_object_get(root, "num_key_value_heads");
    json_int_t dim = json_integer_value(json_object_get(root, "hidden_size"));
    json_int_t heads = json_integer_value(json_object_get(root, "num_attention_heads"));
    json_int_t share = heads > 0 && dim % heads == 0 ? dim / heads : 0, groups = heads;
    if (!width && m->head_dim) share = m->head_dim;
    if (json_is_integer(width)) share = json_integer_value(width);
    bool none = json_is_null(width) && !m->head_dim; /* null is a share where absent is one too */
    if (share < 1 || (width && !json_is_integer(width) && !none))
        return fault_set(f, "config.json: head_dim: must be an integer, or hidden_size a multiple "
                            "of num_attention_heads");
    if (!kv && m->kv_heads) groups = m->kv_heads;
    if (json_is_integer(kv)) groups = json_integer_value(kv);
    if (kv && !json_is_integer(kv) && !json_is_null(kv))
        return fault_set(f, "config.json: num_key_value_heads: must be an integer");
    add_number(x, "--d-k", (double)share);
    add_number(x, "--d-v", (double)share);
    add_number(x, "--kv-groups", (double)groups);
    return true;
}

static bool add_llama(import_flags *x, const family *m, const json_t *root, fault *f) {
    static const row rows[] = {
        {"vocab_size", "--vocab-size", INTEGER, NULL},
        {"hidden_size", "--dim", INTEGER, NULL},
        {"num_hidden_layers", "--layers", INTEGER, NULL},
        {"num_attention_heads", "--heads", INTEGER, NULL},
        {"intermediate_size", "--mlp-hidden", INTEGER, NULL},
        {"rms_norm_eps", "--norm-eps", NUMBER, "1e-6"},
        {"tie_word_embeddings", "--tied-embeddings", SWITCH, "false"},
    };
    static const row blocks[] = {
        {"block_size", "--nsa-l", INTEGER, NULL},
        {"block_size", "--nsa-d", INTEGER, NULL},
        {"block_size", "--nsa-l-sel", INTEGER, NULL},
        {"block_counts", "--nsa-n-sel", INTEGER, NULL},
        {"window_size", "--nsa-w", INTEGER, NULL},
    };
    bool sparse = json_object_get(root, "block_size") != NULL;
    if (sparse && !m->sparse)
        return fault_set(f, "config.json: block_size: must be absent with model_type %s", m->type);
    for (size_t i = 3; i < sizeof blocks / sizeof *blocks; i++)
        if (!sparse && !is_off(json_object_get(root, blocks[i].key)))
            return fault_set(f, "config.json: %s: must be absent without block_size",
                             blocks[i].key);
    if (!check_keys(root, llama_keys, idle_keys, "", f) || !check_plain(m, root, f) ||
        !ADD_ROWS(x, root, rows, f) || !add_heads(x, m, root, f) || !add_rope(x, root, f) ||
        (sparse && !ADD_ROWS(x, root, blocks, f)))
        return false;
    if (!add_context(x, root, f)) return false;
    add_word(x, "--mlp", "swiglu");
    add_word(x, "--rope-pairs", "halves");
    add_word(x, "--attention", sparse ? "nsa" : "full");
    add_switch(x, "--qk-norm", m->qk_norm);
    add_switch(x, "--shared-kv", true);
    add_word(x, "--nsa-gate-form", sparse ? "linear" : "mlp");
    add_word(x, "--nsa-n-init", sparse ? "0" : "1");
    add_word(x, "--nsa-n-local", sparse ? "1" : "2");
    return true;
}

/* ---- What export made ---------------------------------------------------------------------- */

/* One word, or one for each layer: the shortest list that the layers take again and again. */
static bool add_attention(import_flags *x, const json_t *v, fault *f) {
    char text[CONFIG_PATH_BYTES] = "";
    size_t count = json_is_string(v) ? 1 : json_array_size(v), period = 1;
    for (bool again = false; count && !again; period += !again) {
        again = true;
        for (size_t i = period; json_is_array(v) && i < count; i++)
            again = again && json_equal(json_array_get(v, i), json_array_get(v, i - period));
    }
    for (size_t i = 0; i < period && i < count; i++) {
        const char *word = json_string_value(json_is_string(v) ? v : json_array_get(v, i));
        size_t used = strlen(text);
        if (!word || used + strlen(word) + 2 > sizeof text)
            return fault_set(f, "config.json: attention: must be a word, or a list of words");
        snprintf(text + used, sizeof text - used, "%s%s", i ? "," : "", word);
    }
    if (!count) return fault_set(f, "config.json: attention: must be a word, or a list of words");
    add_word(x, "--attention", text);
    return true;
}

static bool add_own(import_flags *x, const json_t *root, fault *f) {
    static const row rows[] = {
        {"vocab_size", "--vocab-size", INTEGER, NULL},
        {"hidden_size", "--dim", INTEGER, NULL},
        {"num_hidden_layers", "--layers", INTEGER, NULL},
        {"num_attention_heads", "--heads", INTEGER, NULL},
        {"num_key_value_heads", "--kv-groups", INTEGER, NULL},
        {"head_dim", "--d-k", INTEGER, NULL},
        {"v_head_dim", "--d-v", INTEGER, NULL},
        {"intermediate_size", "--mlp-hidden", INTEGER, NULL},
        {"mlp", "--mlp", WORD, "silu"},
        {"rms_norm_eps", "--norm-eps", NUMBER, "1e-6"},
        {"tie_word_embeddings", "--tied-embeddings", SWITCH, "false"},
        {"shared_kv", "--shared-kv", SWITCH, "false"},
        {"qk_norm", "--qk-norm", SWITCH, "false"},
        {"cmp_block", "--nsa-l", INTEGER, NULL},
        {"cmp_stride", "--nsa-d", INTEGER, NULL},
        {"slc_block", "--nsa-l-sel", INTEGER, NULL},
        {"slc_count", "--nsa-n-sel", INTEGER, NULL},
        {"slc_init", "--nsa-n-init", INTEGER, "1"},
        {"slc_local", "--nsa-n-local", INTEGER, "2"},
        {"window", "--nsa-w", INTEGER, NULL},
        {"gate", "--nsa-gate", WORD, NULL},
        {"gate_form", "--nsa-gate-form", WORD, "mlp"},
    };
    static const row turns[] = {
        {"base", "--rope-base", NUMBER, NULL},
        {"pairs", "--rope-pairs", WORD, NULL},
        {"scaling", "--rope-scaling", WORD, NULL},
        {"factor", "--rope-factor", NUMBER, NULL},
        {"trained_context", "--rope-trained-context", INTEGER, NULL},
        {"fast", "--rope-fast", NUMBER, "0"},
        {"slow", "--rope-slow", NUMBER, "0"},
    };
    static const char *const rope_keys[] = {"base", "pairs", "scaling", "factor", "trained_context",
                                            "fast", "slow",  NULL};
    const json_t *rope = json_object_get(root, "rope");
    const char *phi = json_string_value(json_object_get(root, "phi"));
    if (!phi) return fault_set(f, "config.json: phi: must be a word");
    if (!json_is_object(rope)) return fault_set(f, "config.json: rope: must be an object");
    if (!add_context(x, root, f)) return false;
    add_word(x, "--nsa-phi", strcmp(phi, "mean") ? phi : "avg");
    return check_keys(root, own_keys, idle_keys, "", f) &&
           check_keys(rope, rope_keys, NULL, "rope: ", f) && ADD_ROWS(x, root, rows, f) &&
           ADD_ROWS(x, rope, turns, f) && add_attention(x, json_object_get(root, "attention"), f);
}

/* ---- The whole ----------------------------------------------------------------------------- */

static bool refuse_type(const char *type, fault *f) {
    for (size_t i = 0; i < sizeof relatives / sizeof *relatives; i++)
        if (!strcmp(relatives[i].type, type))
            return fault_set(f, "config.json: model_type: %s: %s; must be " FAMILIES, type,
                             relatives[i].why);
    return fault_set(f, "config.json: model_type: %.60s; must be " FAMILIES, type);
}

bool import_settings(import_flags *x, const char *folder, fault *f) {
    json_t *root = import_json(folder, "config.json", &json_of_settings, f);
    if (!root) return false;
    memset(x, 0, sizeof *x);
    const char *type = json_string_value(json_object_get(root, "model_type"));
    const family *m = NULL;
    for (size_t i = 0; type && i < sizeof families / sizeof *families; i++)
        if (!strcmp(families[i].type, type)) m = &families[i];
    bool ok = m                                      ? add_llama(x, m, root, f)
              : type && !strcmp(type, "nsa_decoder") ? add_own(x, root, f)
                                                     : refuse_type(type ? type : "none", f);
    json_decref(root);
    return ok;
}

/* config_effects.c - settings that do nothing beside others: a table of which, and what is said.
   Twin: config_table.h. What is wrong, and not only idle, config.c refuses. */
#include "config/config_table.h"

#include <stdlib.h>
#include <string.h>

/* `key` has an effect where the setting `other` has one of `values`, or none of those behind "!".
   `asked`: a file describes a model for either value, and a checkpoint keeps it for another kind of
   attention: such a setting is spoken of where it was typed, and never refused. */
typedef struct effect {
    const char *key, *other, *values;
    bool asked;
} effect;

#define READ    "data.dataset", "!synthetic|retrieval", false
#define SPARSE  "model.attention", "!full|window|full,window|window,full", true
#define SAMPLED "sample.length", "!0", false
#define DRAWN   "sample.temperature", "!0", false

static const effect effects[] = {
    {"data.tokenizer_path", "data.tokenizer", "gpt2", false},
    {"data.path", READ},
    {"data.val_fraction", READ},
    {"data.isolate_documents", READ},
    {"data.synthetic_on_fail", READ},
    {"data.fwe_report_docs", "data.dataset", "!synthetic|retrieval|bin", false},
    {"train.decay_fraction", "train.lr_schedule", "wsd", false},
    {"train.keep_every", "train.keep_checkpoints", "!0", false},
    {"model.rope_factor", "model.rope_scaling", "!none", false},
    {"model.rope_trained_context", "model.rope_scaling", "yarn|llama3", false},
    {"model.rope_fast", "model.rope_scaling", "yarn|llama3", false},
    {"model.rope_slow", "model.rope_scaling", "yarn|llama3", false},
    {"model.shared_kv", SPARSE},
    {"nsa.l", SPARSE},
    {"nsa.d", SPARSE},
    {"nsa.l_sel", SPARSE},
    {"nsa.n_sel", SPARSE},
    {"nsa.n_init", SPARSE},
    {"nsa.n_local", SPARSE},
    {"nsa.phi", SPARSE},
    {"nsa.gate", SPARSE},
    {"nsa.gate_form", SPARSE},
    {"nsa.w", "model.attention", "!full|cmp+slc", true},
    {"sample.prompt", SAMPLED},
    {"sample.temperature", SAMPLED},
    {"sample.top_k", SAMPLED},
    {"sample.top_p", SAMPLED},
    {"sample.min_p", SAMPLED},
    {"sample.repetition_penalty", SAMPLED},
    {"sample.repetition_window", SAMPLED},
    {"sample.top_k", DRAWN},
    {"sample.top_p", DRAWN},
    {"sample.min_p", DRAWN},
    {"sample.repetition_window", "sample.repetition_penalty", "!1", false},
};

/* Whether a list with bars between has the word. */
static bool has_word(const char *list, const char *word) {
    size_t length = strlen(word);
    for (; list; list = strchr(list, '|') ? strchr(list, '|') + 1 : NULL)
        if (strcspn(list, "|") == length && !strncmp(list, word, length)) return true;
    return false;
}

/* The default is written as a person would: "3e-4". */
static bool is_default(const option *e, const char *value) {
    char *end;
    double number = strtod(e->initial, &end);
    return !strcmp(value, e->initial) ||
           (e->kind == OPTION_NUMBER && !*end && number == strtod(value, NULL));
}

static bool is_idle(const config *c, const effect *e, const option *entry, char *value) {
    char mine[CONFIG_PATH_BYTES];
    config_layer layer = c->origin[entry - config_entries].layer;
    if (layer == CONFIG_FROM_DEFAULT || layer == CONFIG_FROM_CHECKPOINT) return false;
    if (e->asked && layer != CONFIG_FROM_COMMAND_LINE) return false;
    option_value(c, entry, mine, sizeof mine);
    if (is_default(entry, mine)) return false; /* which asks for nothing */
    option_value(c, config_find(e->other), value, CONFIG_PATH_BYTES);
    bool is_none_of = e->values[0] == '!';
    return has_word(e->values + is_none_of, value) == is_none_of;
}

void config_say_alone(const config *c, const listener *notes) {
    static const char *const keys[] = {"runtime.ddp_bucket_mb", "runtime.ddp_compress",
                                       "runtime.ddp_check_every", "runtime.ddp_timeout",
                                       "telemetry.trace_ddp_buckets"};
    char mine[CONFIG_PATH_BYTES], place[CONFIG_PATH_BYTES + 32];
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const option *entry = config_find(keys[i]);
        config_layer layer = config_from(c, keys[i]);
        option_value(c, entry, mine, sizeof mine);
        if (layer == CONFIG_FROM_DEFAULT || layer == CONFIG_FROM_CHECKPOINT ||
            is_default(entry, mine))
            continue;
        config_place(c, entry, place, sizeof place);
        listener_say(notes, "%s = %.200s (%.200s): no effect: this is the only process", keys[i],
                     mine, place);
    }
}

bool config_check_effects(const config *c, const listener *notes, fault *f) {
    char value[CONFIG_PATH_BYTES], mine[CONFIG_PATH_BYTES], place[CONFIG_PATH_BYTES + 32];
    for (size_t i = 0; i < sizeof effects / sizeof *effects; i++) {
        const effect *e = &effects[i];
        const option *entry = config_find(e->key);
        if (!is_idle(c, e, entry, value)) continue;
        option_value(c, entry, mine, sizeof mine);
        config_place(c, entry, place, sizeof place);
        if (c->origin[entry - config_entries].layer == CONFIG_FROM_COMMAND_LINE && !e->asked)
            return fault_set(f, "%s = %.200s (%.200s): has no effect with %s = %.200s", e->key,
                             mine, place, e->other, value);
        listener_say(notes, "warning: %s = %.200s (%.200s): has no effect with %s = %.200s", e->key,
                     mine, place, e->other, value);
    }
    return true;
}

/* config.c - puts the settings together: defaults, file, environment, command line, then the rules
   that tie settings to each other. Twin: config.h. */
#include "config/config_table.h"

#include "nsa.h"

#include <math.h>
#include <string.h>

#include "base/files.h"

extern char **environ;

static const char *environment_of(const option *e) {
    return e->environment;
}

static config_origin *origin_of(config *c, const option *e) {
    return &c->origin[e - config_entries];
}

static void set_defaults(config *c) {
    memset(c, 0, sizeof *c);
    option_defaults(config_entries, config_entry_count, c);
}

/* ---- The environment ---- */

/* An NSA_ name that means nothing here is most likely a slip that the user wants to hear of; one
   that changed a result elsewhere must not be passed over. */
static bool check_strange_name(const char *variable, const listener *notes, fault *f) {
    char name[128];
    const char *instead;
    size_t length = strcspn(variable, "=");
    snprintf(name, sizeof name, "%.*s", (int)(length < 127 ? length : 127), variable);
    for (size_t i = 0; i < config_entry_count; i++)
        if (config_entries[i].environment && !strcmp(config_entries[i].environment, name))
            return true;
    if (!config_other_variable(name, &instead)) {
        const option *near =
            option_nearest(config_entries, config_entry_count, name, environment_of);
        listener_say(notes, "warning: environment %s: unknown name, not used%s%s%s", name,
                     near ? "; did you mean " : "", near ? near->environment : "", near ? "?" : "");
        return true;
    }
    bool is_off = !variable[length] || !variable[length + 1] || !strcmp(variable + length, "=0");
    if (instead && !is_off)
        return fault_set(f, "environment %.100s: not a setting here; instead of it: %s", variable,
                         instead);
    listener_say(notes, "environment %s: accepted, has no effect", name);
    return true;
}

static const char *environment_value(const char *name) {
    size_t length = strlen(name);
    for (char **v = environ; v && *v; v++)
        if (!strncmp(*v, name, length) && (*v)[length] == '=') return *v + length + 1;
    return NULL;
}

static bool read_environment(config *c, const listener *notes, fault *f) {
    fault reason;
    for (char **v = environ; v && *v; v++)
        if (!strncmp(*v, "NSA_", 4) && !check_strange_name(*v, notes, f)) return false;
    for (size_t i = 0; i < config_entry_count; i++) {
        const option *e = &config_entries[i];
        const char *value = e->environment ? environment_value(e->environment) : NULL;
        if (!value || !*value || !strcmp(e->key, "config")) continue;
        if (e->traits & CONFIG_NEGATED) {
            if (!strcmp(value, "0") || !strcmp(value, "false") || !strcmp(value, "no")) continue;
            if (!strcmp(value, "1") || !strcmp(value, "true") || !strcmp(value, "yes"))
                value = "false";
            else
                return fault_set(f, "environment %s=%.200s: must be 1 or 0", e->environment, value);
        }
        if (!option_set(c, e, value, &reason))
            return fault_set(f, "environment %s=%.200s: %.256s", e->environment, value,
                             reason.text);
        origin_of(c, e)->layer = CONFIG_FROM_ENVIRONMENT;
    }
    return true;
}

/* ---- The command line ---- */

/* A file whose option was left out. */
static const char *meant_by(const char *word) {
    const char *dot = strrchr(word, '.');
    if (dot && (!strcmp(dot, ".yaml") || !strcmp(dot, ".yml"))) return "--config";
    return dot || strchr(word, '/') ? "--data" : NULL;
}

static option_command command_of(const config_program *program) {
    return (option_command){
        .name = program->name,
        .summary = program->summary,
        .notes = "A value comes from the command line, else from the environment, else from the "
                 "file of\n--config, else it is the default. Exit codes: 0 done, 1 failed, 2 wrong "
                 "settings, 3 halted by the\nwatchdog, 128 + n ended by signal n.\n",
        .words = program->words ? program->words : "",
        .rows = config_entries,
        .count = config_entry_count,
        .alias = {"--local-path", "--data"},
        .meant = meant_by,
    };
}

static bool take_setting(void *to, const option *e, const char *flag, const char *value, fault *f) {
    config *c = to;
    if (!option_set(c, e, value, f)) return false;
    *origin_of(c, e) = (config_origin){.layer = CONFIG_FROM_COMMAND_LINE, .given = flag};
    return true;
}

/* The file lies below the command line that names it, so its name is looked for first. */
static bool take_file(void *to, const option *e, const char *flag, const char *value, fault *f) {
    return strcmp(e->key, "config") || take_setting(to, e, flag, value, f);
}

static option_outcome find_file(config *c, const config_program *program, int argc, char **argv,
                                const listener *notes, fault *f) {
    const option *e = config_find("config");
    const char *path = environment_value(e->environment);
    option_command command = command_of(program);
    fault reason;
    command.hears = notes; /* once: the same words are read again below */
    if (path && *path && !option_set(c, e, path, &reason)) {
        fault_set(f, "environment %s=%.200s: %.256s", e->environment, path, reason.text);
        return OPTION_ERROR;
    }
    if (path && *path) origin_of(c, e)->layer = CONFIG_FROM_ENVIRONMENT;
    return option_parse(&command, argc, argv, take_file, c, program->given, f);
}

static bool read_command_line(config *c, const config_program *program, int argc, char **argv,
                              fault *f) {
    option_command command = command_of(program);
    return option_parse(&command, argc, argv, take_setting, c, program->given, f) == OPTION_OK;
}

/* What a program knows of its own accord: nobody gave a flag of it, so none is named. */
static bool read_preset(config *c, const config_program *program, fault *f) {
    const option_command command = command_of(program);
    const char *name;
    fault reason;
    if (!program->preset) return true;
    const char *const *word = program->preset(program->given, &name, f);
    for (; word && *word; word++) {
        const option *e = option_find(&command, *word);
        const char *value = strchr(*word, '=') + 1;
        if (!option_set(c, e, value, &reason))
            return fault_set(f, "%.300s: %s = %.200s: %.256s", name, e->key, value, reason.text);
        *origin_of(c, e) = (config_origin){.layer = CONFIG_FROM_CHECKPOINT, .given = name};
    }
    return word != NULL;
}

/* ---- A resumed run's checkpoint ---- */

/* A file's settings of a model must agree with the checkpoint, so that a wrong one is found. */
static bool stands_in_file(const config *c, const option *e) {
    return c->origin[e - config_entries].layer == CONFIG_FROM_FILE &&
           (!strncmp(e->key, "model.", 6) || !strncmp(e->key, "nsa.", 4));
}

/* A new run on weights that are there (train.init_from) takes what they mean from where they lie,
   unless somebody says otherwise: the model, and the tokenizer. */
static bool of_weights(const config *c, const option *e) {
    return c->origin[e - config_entries].layer == CONFIG_FROM_DEFAULT &&
           (!strncmp(e->key, "model.", 6) || !strncmp(e->key, "nsa.", 4) ||
            !strncmp(e->key, "data.tokenizer", 14));
}

/* One setting of the checkpoint: below the environment and the command line, above the file. */
static void take_kept(config *c, const config *kept, const option *e, const listener *notes) {
    char mine[CONFIG_PATH_BYTES], theirs[CONFIG_PATH_BYTES], place[CONFIG_PATH_BYTES + 32];
    fault unused;
    config_layer layer = origin_of(c, e)->layer;
    option_value(c, e, mine, sizeof mine);
    option_value(kept, e, theirs, sizeof theirs);
    config_place(c, e, place, sizeof place);
    if (layer == CONFIG_FROM_ENVIRONMENT || layer == CONFIG_FROM_COMMAND_LINE) {
        if (strcmp(mine, theirs))
            listener_say(notes, "%s = %.250s (%.250s); in the checkpoint it is %.250s", e->key,
                         mine, place, theirs[0] ? theirs : "none");
        return;
    }
    if (layer == CONFIG_FROM_FILE && strcmp(mine, theirs))
        listener_say(notes, "%s = %.250s, from the checkpoint; %.250s says %.250s, and is not used",
                     e->key, theirs, place, mine);
    option_set(c, e, theirs, &unused);
    origin_of(c, e)->layer = CONFIG_FROM_CHECKPOINT;
}

static bool recall(config *c, const config_program *program, const listener *notes, fault *f) {
    config kept;
    bool whole = c->train.resume[0] != 0;
    if (!program->recall || (!whole && !c->train.init_from[0])) return true;
    memset(&kept, 0, sizeof kept);
    if (!program->recall(c, &kept, f)) return false;
    for (size_t i = 0; i < config_entry_count; i++)
        if (kept.origin[i].layer == CONFIG_FROM_CHECKPOINT &&
            !stands_in_file(c, &config_entries[i]) && (whole || of_weights(c, &config_entries[i])))
            take_kept(c, &kept, &config_entries[i], notes);
    return true;
}

/* ---- Rules between settings ---- */

/* "nsa.d = 5 (x.yaml:9) RULE nsa.l = 16 (default)" */
static bool rule(const config *c, bool holds, const char *key, const char *text, const char *other,
                 fault *f) {
    char value[2][128], place[2][CONFIG_PATH_BYTES + 32];
    if (holds) return true;
    const option *a = config_find(key), *b = config_find(other);
    option_value(c, a, value[0], sizeof value[0]);
    option_value(c, b, value[1], sizeof value[1]);
    config_place(c, a, place[0], sizeof place[0]);
    config_place(c, b, place[1], sizeof place[1]);
    return fault_set(f, "%s = %s (%.300s): %s %s = %s (%.300s)", key, value[0], place[0], text,
                     other, value[1], place[1]);
}

static int64_t config_kinds(const config_model *m) {
    int64_t count = 1;
    for (const char *c = m->attention; *c; c++) count += *c == ',';
    return count;
}

static double rope_fast(const config_model *m) {
    return m->rope_fast > 0 ? m->rope_fast : m->rope_scaling == CONFIG_ROPE_YARN ? 32 : 4;
}

static double rope_slow(const config_model *m) {
    return m->rope_slow > 0 ? m->rope_slow : 1;
}

bool config_check_model(const config *c, fault *f) {
    const config_model *m = &c->model;
    const config_nsa *n = &c->nsa;
    return rule(c, m->n_heads % m->n_kv_groups == 0, "model.n_kv_groups", "must divide",
                "model.n_heads", f) &&
           rule(c, m->d_k % 2 == 0, "model.d_k", "must be even: RoPE takes pairs, by",
                "model.rope_pairs", f) &&
           rule(c, m->rope_scaling < CONFIG_ROPE_YARN || m->rope_trained_context > 0,
                "model.rope_trained_context", "must be above 0 with", "model.rope_scaling", f) &&
           rule(c, m->rope_scaling < CONFIG_ROPE_YARN || rope_slow(m) < rope_fast(m),
                "model.rope_slow", "must be below (0: 1; 0: 32 with yarn, 4 with llama3)",
                "model.rope_fast", f) &&
           rule(c, config_kinds(m) <= m->n_layers, "model.attention",
                "must name at most as many kinds as there are layers,", "model.n_layers", f) &&
           rule(c, n->l % n->d == 0, "nsa.d", "must divide", "nsa.l", f) &&
           rule(c, n->l_sel % n->d == 0, "nsa.d", "must divide", "nsa.l_sel", f) &&
           rule(c, n->l <= n->l_sel, "nsa.l", "must be at most", "nsa.l_sel", f) &&
           rule(c, n->n_init + n->n_local <= n->n_sel, "nsa.n_sel",
                "must have room for nsa.n_init and", "nsa.n_local", f);
}

/* A rate that falls before it has risen is none that anybody means. */
static bool check_schedule(const config *c, fault *f) {
    const config_train *t = &c->train;
    double rising = (double)t->warmup_steps / (double)t->steps;
    return rule(c, t->lr_schedule != CONFIG_WSD || rising + t->decay_fraction <= 1,
                "train.decay_fraction", "must leave the warm-up its share of train.steps, by",
                "train.warmup_steps", f);
}

static bool check_data(const config *c, fault *f) {
    int64_t set = c->data.dataset;
    bool needs_path = set != CONFIG_SYNTHETIC && set != CONFIG_RETRIEVAL && set != CONFIG_FINEWEB;
    return rule(c, !needs_path || c->data.path[0], "data.path",
                set == CONFIG_DATASET_AUTO
                    ? "must name a file or a folder (--data PATH; random tokens are --dataset "
                      "synthetic) with"
                    : "must name a file or a folder (--data PATH) with",
                "data.dataset", f) &&
           rule(c, !files_same(c->data.path, c->train.out_dir), "data.path",
                "must be another folder than that of the run's own files,", "train.out_dir", f) &&
           rule(c, option_layers_of(c->runtime.gradient_checkpointing).last < c->model.n_layers,
                "runtime.gradient_checkpointing", "must name layers, from 0, below",
                "model.n_layers", f) &&
           rule(c, c->runtime.rank < c->runtime.world_size, "runtime.rank", "must be below",
                "runtime.world_size", f) &&
           rule(c, c->train.out_dir[0], "train.out_dir", "must name a folder, with", "train.steps",
                f);
}

/* ---- What is said, and the whole ---- */

static void note_no_effect(const config *c, const option *e, const char *program,
                           const listener *notes) {
    char place[CONFIG_PATH_BYTES + 32];
    if (c->origin[e - config_entries].layer == CONFIG_FROM_DEFAULT) return;
    config_place(c, e, place, sizeof place);
    listener_say(notes, "%s (%s): accepted, has no effect in %s", e->key, place, program);
}

static void say_notes(const config *c, const config_program *program, const listener *notes) {
    for (size_t i = 0; i < config_entry_count; i++)
        if (config_entries[i].traits & CONFIG_NO_EFFECT)
            note_no_effect(c, &config_entries[i], program->name, notes);
    for (const char *const *key = program->no_effect; key && *key; key++)
        note_no_effect(c, config_find(*key), program->name, notes);
    if (c->train.warmup_steps >= c->train.steps)
        listener_say(notes,
                     "warning: train.warmup_steps = %lld with train.steps = %lld: the run ends "
                     "before it has reached its learning rate",
                     (long long)c->train.warmup_steps, (long long)c->train.steps);
    if (c->train.steps < 5000) return;
    if (!c->train.save_every)
        listener_say(notes,
                     "warning: train.save_every = 0 with train.steps = %lld: a run that is killed "
                     "loses everything",
                     (long long)c->train.steps);
    if (c->runtime.device == CONFIG_CUDA && c->runtime.precision == CONFIG_FP32)
        listener_say(notes,
                     "warning: runtime.precision = fp32 with train.steps = %lld on a GPU: bf16 is "
                     "several times faster",
                     (long long)c->train.steps);
}

/* A CONFIG that was meant for another program should be found at once. */
static bool read_file(config *c, const listener *notes, fault *f) {
    fault reason;
    if (!c->file[0] || config_read_yaml(c, c->file, notes, &reason)) return true;
    bool surprising = config_from(c, "config") == CONFIG_FROM_ENVIRONMENT;
    return fault_set(f, "%.900s%s", reason.text, surprising ? " (environment CONFIG)" : "");
}

option_outcome config_load(config *c, const config_program *program, int argc, char **argv,
                           const listener *notes, fault *f) {
    set_defaults(c);
    option_outcome outcome = find_file(c, program, argc, argv, notes, f);
    if (outcome != OPTION_OK) return outcome;
    bool ok = read_file(c, notes, f) && read_preset(c, program, f) &&
              read_environment(c, notes, f) && read_command_line(c, program, argc, argv, f) &&
              recall(c, program, notes, f) && config_check_model(c, f) && check_data(c, f) &&
              check_schedule(c, f) && config_check_effects(c, notes, f);
    if (!ok) return OPTION_ERROR;
    say_notes(c, program, notes);
    return OPTION_OK;
}

config_layer config_from(const config *c, const char *key) {
    return c->origin[config_find(key) - config_entries].layer;
}

bool config_put(config *c, const char *key, const char *text, fault *f) {
    return option_set(c, config_find(key), text, f);
}

bool config_give(config *c, const char *key, const char *flag, const char *text, fault *f) {
    return take_setting(c, config_find(key), flag, text, f);
}

void config_take(config *c, const config *given) {
    char text[CONFIG_PATH_BYTES];
    fault unused;
    for (size_t i = 0; i < config_entry_count; i++) {
        if (given->origin[i].layer != CONFIG_FROM_COMMAND_LINE) continue;
        option_value(given, &config_entries[i], text, sizeof text);
        option_set(c, &config_entries[i], text, &unused);
        c->origin[i] = given->origin[i];
    }
}

option config_option(const char *key) {
    return *config_find(key);
}

const char *config_key(size_t i) {
    return i < config_entry_count ? config_entries[i].key : NULL;
}

void config_text(const config *c, size_t i, char *text, size_t bytes) {
    option_value(c, &config_entries[i], text, bytes);
}

double config_lr(const config_train *t, int64_t step) {
    if (step <= t->warmup_steps) return t->lr * (double)step / (double)t->warmup_steps;
    if (t->lr_schedule == CONFIG_CONSTANT) return t->lr;
    if (t->lr_schedule == CONFIG_WSD) {
        double falling = floor(t->decay_fraction * (double)t->steps + 0.5);
        double ahead = (double)(t->steps + 1 - step); /* steps until it is 0 */
        if (ahead < 0) ahead = 0;
        return ahead > falling ? t->lr : t->lr * ahead / (falling + 1);
    }
    double left = (double)(t->steps - t->warmup_steps);
    double done = left > 0 ? (double)(step - t->warmup_steps) / left : 1;
    if (done > 1) done = 1;
    return t->lr * (0.1 + 0.9 * 0.5 * (1 + cos(3.14159265358979323846 * done)));
}

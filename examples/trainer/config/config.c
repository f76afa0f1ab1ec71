/* config.c - puts the settings together: defaults, file, environment, command line, then the rules
   that tie settings to each other. Twin: config.h. */
#include "config/config_table.h"

#include "nsa.h"

#include <math.h>
#include <string.h>

extern char **environ;

static const char *flag_of(const config_entry *e) {
    return e->flag;
}

static const char *environment_of(const config_entry *e) {
    return e->environment;
}

static config_origin *origin_of(config *c, const config_entry *e) {
    return &c->origin[e - config_entries];
}

static void set_defaults(config *c) {
    fault unused;
    memset(c, 0, sizeof *c);
    for (size_t i = 0; i < config_entry_count; i++)
        config_set(c, &config_entries[i], config_entries[i].initial, &unused);
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
        const config_entry *near = config_nearest(name, environment_of);
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
        const config_entry *e = &config_entries[i];
        const char *value = e->environment ? environment_value(e->environment) : NULL;
        if (!value || !*value || !strcmp(e->key, "config")) continue;
        if (e->traits & CONFIG_NEGATED) {
            if (!strcmp(value, "0") || !strcmp(value, "false") || !strcmp(value, "no")) continue;
            if (!strcmp(value, "1") || !strcmp(value, "true") || !strcmp(value, "yes"))
                value = "false";
            else
                return fault_set(f, "environment %s=%.200s: must be 1 or 0", e->environment, value);
        }
        if (!config_set(c, e, value, &reason))
            return fault_set(f, "environment %s=%.200s: %.256s", e->environment, value,
                             reason.text);
        origin_of(c, e)->layer = CONFIG_FROM_ENVIRONMENT;
    }
    return true;
}

/* ---- The command line ---- */

typedef struct argument {
    const config_entry *entry;
    const char *value; /* NULL: none was given */
    bool negated;      /* --no-x */
} argument;

static const config_entry *find_flag(const char *name, size_t length) {
    if (length == strlen("--local-path") && !strncmp(name, "--local-path", length)) {
        name = "--data";
        length = strlen(name);
    }
    for (size_t i = 0; i < config_entry_count; i++) {
        const char *flag = config_entries[i].flag;
        if (flag && strlen(flag) == length && !strncmp(flag, name, length))
            return &config_entries[i];
    }
    return NULL;
}

/* Takes a value only after "=". */
static bool is_switch(const config_entry *e) {
    return e->kind == CONFIG_SWITCH || e->kind == CONFIG_LAYERS;
}

static const config_entry *find_negated(const char *name, size_t length) {
    char flag[64] = "--";
    if (length < 6 || length >= sizeof flag || strncmp(name, "--no-", 5)) return NULL;
    memcpy(flag + 2, name + 5, length - 5);
    const config_entry *e = find_flag(flag, length - 3);
    return e && is_switch(e) ? e : NULL;
}

static bool flag_fault(const char *text, size_t length, fault *f) {
    char name[96];
    snprintf(name, sizeof name, "%.*s", (int)(length < 95 ? length : 95), text);
    const config_entry *near = config_nearest(name, flag_of);
    return fault_set(f, "%s: unknown option%s%s%s (--help lists all)", name,
                     near ? "; did you mean " : "", near ? near->flag : "", near ? "?" : "");
}

/* Takes one option, with its value, off the arguments; *i ends on its last word. */
static bool take_argument(int argc, char **argv, int *i, argument *a, fault *f) {
    const char *text = argv[*i];
    size_t length = strcspn(text, "=");
    a->entry = find_flag(text, length);
    a->negated = false;
    a->value = text[length] ? text + length + 1 : NULL;
    if (!a->entry) {
        a->entry = find_negated(text, length);
        a->negated = true;
    }
    if (!a->entry) return flag_fault(text, length, f);
    if (a->negated && a->value) return fault_set(f, "%.100s: takes no value", text);
    if (a->value || is_switch(a->entry)) return true;
    bool last = *i + 1 == argc;
    if (a->entry->traits & CONFIG_OPTIONAL_ARGUMENT) {
        if (last || !strncmp(argv[*i + 1], "--", 2))
            a->value = a->entry->words;
        else
            a->value = argv[++*i];
        return true;
    }
    if (last || !strncmp(argv[*i + 1], "--", 2)) {
        char allowed[256];
        config_allowed(a->entry, allowed, sizeof allowed);
        return fault_set(f, "%s: its value is missing; it %s", text, allowed);
    }
    a->value = argv[++*i];
    return true;
}

static bool read_command_line(config *c, int argc, char **argv, fault *f) {
    argument a;
    fault reason;
    for (int i = 1; i < argc; i++) {
        if (!take_argument(argc, argv, &i, &a, f)) return false;
        const char *value = a.negated ? "false" : a.value ? a.value : "true";
        if (!config_set(c, a.entry, value, &reason))
            return fault_set(f, "%s %.200s: %.256s", a.entry->flag, value, reason.text);
        origin_of(c, a.entry)->layer = CONFIG_FROM_COMMAND_LINE;
    }
    return true;
}

/* The file lies below the command line that names it, so its name is looked for first. */
static bool find_file(config *c, int argc, char **argv, fault *f) {
    argument a;
    const config_entry *e = config_find("config");
    const char *path = environment_value(e->environment);
    config_layer layer = CONFIG_FROM_ENVIRONMENT;
    for (int i = 1; i < argc; i++) {
        if (!take_argument(argc, argv, &i, &a, f)) return false;
        if (a.entry != e) continue;
        path = a.value;
        layer = CONFIG_FROM_COMMAND_LINE;
    }
    if (!path || !*path) return true;
    if (strlen(path) >= CONFIG_PATH_BYTES)
        return fault_set(f, "--config: the path is longer than %d bytes", CONFIG_PATH_BYTES - 1);
    memcpy(c->file, path, strlen(path) + 1);
    origin_of(c, e)->layer = layer;
    return true;
}

/* ---- A resumed run's checkpoint ---- */

/* A file's settings of a model must agree with the checkpoint, so that a wrong one is found. */
static bool stands_in_file(const config *c, const config_entry *e) {
    return c->origin[e - config_entries].layer == CONFIG_FROM_FILE &&
           (!strncmp(e->key, "model.", 6) || !strncmp(e->key, "nsa.", 4));
}

/* One setting of the checkpoint: below the environment and the command line, above the file. */
static void take_kept(config *c, const config *kept, const config_entry *e, const listener *notes) {
    char mine[CONFIG_PATH_BYTES], theirs[CONFIG_PATH_BYTES], place[CONFIG_PATH_BYTES + 32];
    fault unused;
    config_layer layer = origin_of(c, e)->layer;
    config_value(c, e, mine, sizeof mine);
    config_value(kept, e, theirs, sizeof theirs);
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
    config_set(c, e, theirs, &unused);
    origin_of(c, e)->layer = CONFIG_FROM_CHECKPOINT;
}

static bool recall(config *c, const config_program *program, const listener *notes, fault *f) {
    config kept;
    if (!c->train.resume[0] || !program->recall) return true;
    memset(&kept, 0, sizeof kept);
    if (!program->recall(c, &kept, f)) return false;
    for (size_t i = 0; i < config_entry_count; i++)
        if (kept.origin[i].layer == CONFIG_FROM_CHECKPOINT &&
            !stands_in_file(c, &config_entries[i]))
            take_kept(c, &kept, &config_entries[i], notes);
    return true;
}

/* ---- Rules between settings ---- */

/* "nsa.d = 5 (x.yaml:9) RULE nsa.l = 16 (default)" */
static bool rule(const config *c, bool holds, const char *key, const char *text, const char *other,
                 fault *f) {
    char value[2][128], place[2][CONFIG_PATH_BYTES + 32];
    if (holds) return true;
    const config_entry *a = config_find(key), *b = config_find(other);
    config_value(c, a, value[0], sizeof value[0]);
    config_value(c, b, value[1], sizeof value[1]);
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

bool config_check_model(const config *c, fault *f) {
    const config_model *m = &c->model;
    const config_nsa *n = &c->nsa;
    return rule(c, m->n_heads % m->n_kv_groups == 0, "model.n_kv_groups", "must divide",
                "model.n_heads", f) &&
           rule(c, m->d_k % 2 == 0, "model.d_k", "must be even: RoPE takes pairs, by",
                "model.rope_pairs", f) &&
           rule(c, m->rope_scaling != NSA_ROPE_SCALING_YARN || m->rope_trained_context > 0,
                "model.rope_trained_context", "must be above 0 with", "model.rope_scaling", f) &&
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
           rule(c, config_gc_of(c->runtime.gradient_checkpointing).last < c->model.n_layers,
                "runtime.gradient_checkpointing", "must name layers, from 0, below",
                "model.n_layers", f) &&
           rule(c, c->runtime.rank < c->runtime.world_size, "runtime.rank", "must be below",
                "runtime.world_size", f) &&
           rule(c, c->train.out_dir[0], "train.out_dir", "must name a folder, with", "train.steps",
                f);
}

/* ---- What is said, and the whole ---- */

static void note_no_effect(const config *c, const config_entry *e, const char *program,
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

config_outcome config_load(config *c, const config_program *program, int argc, char **argv,
                           const listener *notes, fault *f) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") && strcmp(argv[i], "-h")) continue;
        config_print_help(program);
        return CONFIG_HELP;
    }
    set_defaults(c);
    bool ok = find_file(c, argc, argv, f) && read_file(c, notes, f) &&
              read_environment(c, notes, f) && read_command_line(c, argc, argv, f) &&
              recall(c, program, notes, f) && config_check_model(c, f) && check_data(c, f) &&
              check_schedule(c, f) && config_check_effects(c, notes, f);
    if (!ok) return CONFIG_ERROR;
    say_notes(c, program, notes);
    return CONFIG_OK;
}

config_layer config_from(const config *c, const char *key) {
    return c->origin[config_find(key) - config_entries].layer;
}

bool config_put(config *c, const char *key, const char *text, fault *f) {
    return config_set(c, config_find(key), text, f);
}

const char *config_describe(const char *key, char *allowed, size_t bytes) {
    const config_entry *e = config_find(key);
    config_allowed(e, allowed, bytes);
    return e->help;
}

const char *config_key(size_t i) {
    return i < config_entry_count ? config_entries[i].key : NULL;
}

void config_text(const config *c, size_t i, char *text, size_t bytes) {
    config_value(c, &config_entries[i], text, bytes);
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

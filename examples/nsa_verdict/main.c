/* main.c - nsa_verdict: judges a finished run by what it left in its folder. GO only if every
   criterion holds; each is printed with its figure, and each artefact with its size. It trusts
   no log line and trains nothing. */
#include <dirent.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fallback.h"
#include "base/files.h"
#include "base/json_file.h"
#include "base/lines.h"
#include "base/text.h"
#include "checkpoint/checkpoint.h"
#include "config/config.h"
#include "telemetry/csv.h"

enum { GO, NO_GO, UNUSABLE }; /* exit codes */

static const double MEMORY_GB = 40, TOKENS_PER_S = 50, PCT_AT_MAX = 0.3, FALLBACKS_BELOW = 10;

/* What a loss must at least have fallen to, for the run to have learnt something. */
static const double LEARNT = 0.99;

typedef struct run {
    const char *folder;
    char latest[CONFIG_PATH_BYTES]; /* what checkpoints/latest names where it is no link, or "" */
    json_t *metrics, *env;          /* NULL: missing or unreadable */
    double most_asked, began_after; /* steps */
    int starts, unread;             /* lines of history.jsonl that can be read, that cannot */
    bool go;
} run;

static void judge(run *r, const char *criterion, bool holds, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void judge(run *r, const char *criterion, bool holds, const char *format, ...) {
    char found[FAULT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(found, sizeof found, format, args);
    va_end(args);
    text_print_line(stdout, "%-12s %-5s %s", criterion, holds ? "ok" : "NO", found);
    r->go = r->go && holds;
}

static bool path_of(const run *r, const char *name, char path[CONFIG_PATH_BYTES + 64]) {
    static const char latest[] = "checkpoints/latest/";
    const size_t length = sizeof latest - 1;
    fault unused;
    bool named = r->latest[0] && !strncmp(name, latest, length);
    return files_join(path, CONFIG_PATH_BYTES + 64, named ? r->latest : r->folder,
                      name + (named ? length : 0), &unused);
}

static json_t *read_json(const run *r, const char *name) {
    char path[CONFIG_PATH_BYTES + 64];
    fault unused;
    return path_of(r, name, path) ? json_file_read(path, &json_of_settings, &unused) : NULL;
}

/* NaN where the run did not write the number. */
static double number(const run *r, const char *key) {
    const json_t *v = json_object_get(r->metrics, key);
    return json_is_number(v) ? json_number_value(v) : (double)NAN;
}

static bool is_off(const run *r, const char *part) {
    const json_t *list = json_object_get(r->env, "switched_off");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        if (name && !strcmp(name, part)) return true;
    }
    return false;
}

/* ---- Criteria ---- */

static void judge_exit(run *r) {
    char path[CONFIG_PATH_BYTES + 64];
    const char *verdict = json_string_value(json_object_get(r->metrics, "verdict"));
    double code = number(r, "exit_code");
    bool halted = path_of(r, ".HALT", path) && files_exist(path);
    if (!r->metrics) {
        judge(r, "exit", false,
              "metrics.json is missing or no JSON: the run was killed, or goes on");
        return;
    }
    judge(r, "exit", verdict && !strcmp(verdict, "completed") && code == 0 && !halted,
          "%s, exit code %g%s", verdict ? verdict : "no verdict", code,
          halted ? ", and there is a .HALT" : "");
}

/* ---- What was asked for, by history.jsonl: each start of the run ---- */

/* The most steps that a start asked for, less is a run that was cut short; and the step after which
   the folder's first start began, for a run that goes on from another folder's checkpoint. */
static void read_history(run *r) {
    char path[CONFIG_PATH_BYTES + 64];
    const char *line;
    size_t bytes;
    fault unused;
    int fd = path_of(r, "history.jsonl", path) ? files_open(path, &unused) : -1;
    lines l;
    if (fd < 0) return;
    lines_open(&l, fd, path, 0, -1);
    while (lines_next(&l, &line, &bytes, &unused) == LINES_ONE) {
        json_t *start =
            json_file_parse(path, line, bytes, &json_of_settings, JSON_REJECT_DUPLICATES, &unused);
        json_t *settings = json_object_get(start, "config");
        double steps = json_number_value(json_object_get(settings, "train.steps"));
        double step = json_number_value(json_object_get(start, "step"));
        if (steps > r->most_asked) r->most_asked = steps;
        if (start && !r->starts) r->began_after = step;
        r->starts += start != NULL;
        r->unread += !start;
        json_decref(start);
    }
    lines_close(&l);
}

static void judge_steps(run *r) {
    double done = number(r, "steps_done"), asked = number(r, "steps");
    bool all = asked >= r->most_asked;
    char more[96] = "";
    if (r->unread) /* of a start that a full disk ended, say */
        snprintf(more, sizeof more, "; lines of history.jsonl that cannot be read: %d of %d",
                 r->unread, r->unread + r->starts);
    judge(r, "steps", done == asked && asked > 0 && all && (r->starts || !r->unread),
          all ? "%.0f of %.0f done%s" : "%.0f of %.0f done%s, but the run was started for %.0f",
          done, asked, more, r->most_asked);
}

/* ---- The losses ---- */

typedef struct table {
    double *steps, *losses;
    size_t count, room;
    int64_t unread; /* the first line that is no row, 0: none; -1: the file cannot be read */
} table;

static void add_row(void *user, const double *values) {
    table *t = user;
    if (t->count == t->room) {
        size_t room = t->room ? 2 * t->room : 1024;
        double *steps = realloc(t->steps, room * sizeof *steps);
        double *losses = steps ? realloc(t->losses, room * sizeof *losses) : NULL;
        if (steps) t->steps = steps;
        if (losses) t->losses = losses;
        if (!losses) {
            fprintf(stderr, "nsa_verdict: out of memory\n");
            exit(UNUSABLE);
        }
        t->room = room;
    }
    t->steps[t->count] = values[0];
    t->losses[t->count++] = values[1];
}

static table read_table(const run *r, const char *name, int columns) {
    table t = {.count = 0};
    fault unused;
    t.unread = csv_read(r->folder, name, columns, add_row, &t, &unused);
    return t;
}

/* Whether a line of it is no row, which is told. */
static bool judge_unread(run *r, const char *criterion, const char *name, int64_t unread) {
    if (unread > 0)
        judge(r, criterion, false, "%s: line %lld is no row of numbers", name, (long long)unread);
    if (unread < 0) judge(r, criterion, false, "%s: cannot be read", name);
    return unread != 0;
}

static void free_table(table *t) {
    free(t->steps);
    free(t->losses);
}

/* A row for each step, none twice, none missing. */
static void judge_rows(run *r, const table *t) {
    double first = r->began_after + 1, done = number(r, "steps_done"), want = first;
    size_t i = 0;
    if (is_off(r, "csv")) {
        judge(r, "rows", true, "CSVs were switched off");
        return;
    }
    if (judge_unread(r, "rows", "training.csv", t->unread)) return;
    while (i < t->count && t->steps[i] == want) i++, want++;
    if (i < t->count)
        judge(r, "rows", false, "training.csv has step %.0f where %.0f is due", t->steps[i], want);
    else
        judge(r, "rows", want == done + 1 && t->count > 0,
              "training.csv: steps %.0f to %.0f, each once", first, want - 1);
}

static double mean_of(const double *x, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += x[i];
    return count ? sum / (double)count : (double)NAN;
}

/* Random tokens, where they were asked for, cannot be learnt. */
static bool is_synthetic(const run *r) {
    const char *set =
        json_string_value(json_object_get(json_object_get(r->env, "config"), "data.dataset"));
    return set && !strcmp(set, "synthetic");
}

/* The mean loss of the last tenth of the steps against that of the first. */
static void judge_loss(run *r, const table *t) {
    size_t part = t->count / 10 ? t->count / 10 : 1;
    if (is_off(r, "csv") || t->count < 2) {
        judge(r, "loss", true,
              is_off(r, "csv") ? "not judged: CSVs were switched off"
                               : "not judged: fewer than two steps");
        return;
    }
    double first = mean_of(t->losses, part), last = mean_of(t->losses + t->count - part, part);
    if (is_synthetic(r))
        judge(r, "loss", isfinite(last), "%.4f to %.4f; not judged: random tokens were asked for",
              first, last);
    else
        judge(r, "loss", last < LEARNT * first, "%.4f at first, %.4f at last (below %g of it)",
              first, last, LEARNT);
}

static void judge_evaluations(run *r, const table *t, const table *v) {
    double last = v->count ? v->losses[v->count - 1] : (double)NAN;
    if (!v->count)
        judge(r, "validation", false, "val.csv has no evaluation");
    else if (t->count < 2 || is_synthetic(r))
        judge(r, "validation", isfinite(last), "%.4f; not judged, as the loss", last);
    else
        judge(r, "validation", last < t->losses[0],
              "%.4f at last (below the first step's %.4f), %zu evaluations", last, t->losses[0],
              v->count);
}

static void judge_validation(run *r, const table *t) {
    table v = read_table(r, "val.csv", 3);
    if (is_off(r, "evaluation") || is_off(r, "csv"))
        judge(r, "validation", true, "not judged: %s switched off",
              is_off(r, "csv") ? "CSVs were" : "evaluation was");
    else if (!judge_unread(r, "validation", "val.csv", v.unread))
        judge_evaluations(r, t, &v);
    free_table(&v);
}

static void judge_data(run *r) {
    double made_up = number(r, "synthetic_from");
    const char *what = json_string_value(json_object_get(r->metrics, "data"));
    if (made_up >= 0)
        judge(r, "data", false, "made up from sample %.0f on: the source failed", made_up);
    else
        judge(r, "data", what && *what, "%s", what && *what ? what : "not known");
}

static void judge_losses(run *r) {
    table t = read_table(r, "training.csv", 5);
    judge_rows(r, &t);
    judge_loss(r, &t);
    judge_validation(r, &t);
    free_table(&t);
    judge_data(r);
}

/* ---- What it cost ---- */

/* Of the last step: a layer of which nothing passes, or which reads one branch alone, is no layer
   that was asked for. */
static void judge_gates(run *r) {
    double collapsed = number(r, "gate_layers_collapsed"), shut = number(r, "gate_layers_shut");
    if (is_off(r, "statistics"))
        judge(r, "gates", true, "not looked at: there are none, or statistics were switched off");
    else
        judge(r, "gates", collapsed == 0 && shut == 0,
              "of %.0f layers collapsed, of %.0f shut, at the last step", collapsed, shut);
}

static void keep_last(void *user, const double *values) {
    memcpy(user, values, (FALLBACKS + 1) * sizeof *values);
}

/* Which they were, as the last step's row has them. */
static void judge_fallbacks(run *r) {
    double total = number(r, "total_fallbacks"), last[FALLBACKS + 1] = {0};
    char which[FAULT_BYTES] = "";
    fault unused;
    int64_t unread =
        csv_read(r->folder, "fallback_counters.csv", FALLBACKS + 2, keep_last, last, &unused);
    if (judge_unread(r, "fallbacks", "fallback_counters.csv", unread)) return;
    for (int i = 0; i < FALLBACKS; i++) {
        size_t used = strlen(which);
        if (last[i + 1] > 0)
            snprintf(which + used, sizeof which - used, ", %s %.0f", fallback_name((fallback)i),
                     last[i + 1]);
    }
    judge(r, "fallbacks", total < FALLBACKS_BELOW, "%.0f (below %g)%s", total, FALLBACKS_BELOW,
          which);
}

static void judge_figures(run *r) {
    double memory = number(r, "peak_memory_mib") * 1048576 / 1e9;
    double rate = number(r, "toks_per_s_p50");
    double pct = number(r, "sel_pct_at_max");
    const char *attention =
        json_string_value(json_object_get(json_object_get(r->env, "config"), "model.attention"));
    judge(r, "memory", memory < MEMORY_GB, "%.3f GB at most (below %g)", memory, MEMORY_GB);
    judge(r, "throughput", rate > TOKENS_PER_S, "%.1f tokens/s, median (above %g)", rate,
          TOKENS_PER_S);
    if (attention && !strstr(attention, "nsa") && !strstr(attention, "slc"))
        judge(r, "pct_at_max", true, "attention %s selects nothing", attention);
    else if (isnan(pct))
        judge(r, "pct_at_max", false, "not known%s",
              is_off(r, "statistics") ? ": statistics were switched off" : "");
    else
        judge(r, "pct_at_max", pct < PCT_AT_MAX, "%.4f at most (below %g)", pct, PCT_AT_MAX);
    judge_gates(r);
    judge_fallbacks(r);
}

/* ---- The checkpoint ---- */

/* The newest one is that of the last step, and every byte of it is what was written. */
static void judge_checkpoint(run *r) {
    checkpoint k;
    fault why;
    struct stat s;
    char path[CONFIG_PATH_BYTES + 64];
    double done = number(r, "steps_done");
    if (!checkpoint_open(&k, r->folder, &why)) {
        judge(r, "checkpoint", false, "%s", why.text);
        return;
    }
    if (!checkpoint_verify(&k, &why))
        judge(r, "checkpoint", false, "%s", why.text);
    else
        judge(r, "checkpoint", (double)k.state.step == done, "of step %lld, whole (%.0f were done)",
              (long long)k.state.step, done);
    if (path_of(r, "checkpoints/latest", path) && !lstat(path, &s) && S_ISREG(s.st_mode))
        memcpy(r->latest, k.path, sizeof r->latest);
    checkpoint_close(&k);
}

/* ---- Artefacts ---- */

/* Bytes of a file, or of the files in a folder; -1: there is none, 0: it is empty. */
static long long size_of(const char *path) {
    struct stat s;
    files_list list;
    fault unused;
    char inner[CONFIG_PATH_BYTES + 512];
    long long sum = 0;
    if (stat(path, &s)) return -1;
    if (!S_ISDIR(s.st_mode)) return (long long)s.st_size;
    if (!files_list_open(&list, path, &unused)) return -1;
    for (size_t i = 0; i < list.count; i++)
        if (files_join(inner, sizeof inner, path, list.names[i], &unused) && !stat(inner, &s))
            sum += (long long)s.st_size;
    files_list_close(&list);
    return sum;
}

/* A name that ends so is that of an object. */
static bool is_spoilt_json(const run *r, const char *name) {
    size_t length = strlen(name);
    if (length < 5 || strcmp(name + length - 5, ".json")) return false;
    json_t *root = read_json(r, name);
    bool is_object = json_is_object(root);
    json_decref(root);
    return !is_object;
}

static void judge_artefact(run *r, const char *name, const char *part) {
    char path[CONFIG_PATH_BYTES + 64];
    long long size = path_of(r, name, path) ? size_of(path) : -1;
    if (part && size < 0 && is_off(r, part))
        judge(r, "artefact", true, "%-28s switched off", name);
    else if (size < 0)
        judge(r, "artefact", false, "%-28s is missing", name);
    else if (size > 0 && is_spoilt_json(r, name))
        judge(r, "artefact", false, "%-28s is no JSON object", name);
    else
        judge(r, "artefact", size > 0, "%-28s %lld bytes", name, size);
}

static void judge_artefacts(run *r) {
    static const struct {
        const char *name, *part; /* what it is switched off with, or NULL */
    } always[] = {
        {"metrics.json", NULL},
        {"env.json", NULL},
        {"history.jsonl", NULL},
        {"mem_boot.json", NULL},
        {"mem_step1.json", NULL},
        {"opt_state_mb.txt", NULL},
        {"dtypes_report.txt", NULL},
        {"training.csv", "csv"},
        {"val.csv", "csv"},
        {"fallback_counters.csv", "csv"},
        {"loss.svg", "csv"},
        {"tb", "tensorboard"},
        {"checkpoints/latest/state.json", NULL},
        {"checkpoints/latest/model.safetensors", NULL},
        {"checkpoints/latest/optimizer.safetensors", NULL},
    };
    char name[64];
    enum { WORLD_MOST = 65536 }; /* WORLD_SIZE; env.json may be anybody's */
    json_int_t world = json_integer_value(json_object_get(r->env, "world"));
    for (size_t i = 0; i < sizeof always / sizeof *always; i++)
        judge_artefact(r, always[i].name, always[i].part);
    if (world > WORLD_MOST) {
        judge(r, "artefact", false, "%-28s world is %lld; must be at most %d", "env.json",
              (long long)world, WORLD_MOST);
        world = 1;
    }
    judge_artefact(r, "k_stats.csv", is_off(r, "csv") ? "csv" : "statistics");
    for (json_int_t rank = 0; rank < (world > 1 ? world : 1); rank++) {
        snprintf(name, sizeof name, "heartbeat_rank%lld.jsonl", (long long)rank);
        judge_artefact(r, name, "heartbeat");
    }
}

int main(int argc, char **argv) {
    static const option_command command = {
        .name = "nsa_verdict",
        .summary = "judges the run whose out_dir is DIR.\n\nExit code 0: GO; 1: NO-GO; 2: no such "
                   "folder, or nowhere to write to.",
        .words = "DIR",
    };
    struct stat s;
    fault f;
    const char *words[2];
    option_outcome outcome = option_read(&command, argc, argv, NULL, words, &f);
    if (outcome == OPTION_HELP) return GO;
    if (outcome == OPTION_OK && (stat(words[0], &s) || !S_ISDIR(s.st_mode))) {
        fault_set(&f, "%s: no folder; must be the out_dir of a run", words[0]);
        outcome = OPTION_ERROR;
    }
    if (outcome == OPTION_ERROR) {
        fprintf(stderr, "nsa_verdict: %s\n", f.text);
        return UNUSABLE;
    }
    run r = {.folder = words[0], .go = true};
    r.metrics = read_json(&r, "metrics.json");
    r.env = read_json(&r, "env.json");
    read_history(&r);
    judge_exit(&r);
    judge_steps(&r);
    judge_losses(&r);
    judge_figures(&r);
    judge_checkpoint(&r);
    judge_artefacts(&r);
    printf("%s\n", r.go ? "GO" : "NO-GO");
    json_decref(r.metrics);
    json_decref(r.env);
    if (files_end_output(&f)) return r.go ? GO : NO_GO;
    fprintf(stderr, "nsa_verdict: %s\n", f.text);
    return UNUSABLE; /* a verdict that nobody has read */
}

/* main.c - nsa_verdict: judges a finished run by what it left in its folder. GO only if every
   criterion holds; each is printed with its figure, and each artefact with its size. It trusts
   no log line and trains nothing. */
#include <dirent.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"
#include "config/config.h"

enum { GO, NO_GO, UNUSABLE }; /* exit codes */

static const double MEMORY_GB = 40, TOKENS_PER_S = 50, PCT_AT_MAX = 0.3, FALLBACKS_BELOW = 10;

typedef struct run {
    const char *folder;
    json_t *metrics, *env; /* NULL: missing or unreadable */
    bool go;
} run;

static void judge(run *r, const char *criterion, bool holds, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void judge(run *r, const char *criterion, bool holds, const char *format, ...) {
    va_list args;
    printf("%-12s %-5s ", criterion, holds ? "ok" : "NO");
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    r->go = r->go && holds;
}

static bool path_of(const run *r, const char *name, char path[CONFIG_PATH_BYTES + 64]) {
    fault unused;
    return files_join(path, CONFIG_PATH_BYTES + 64, r->folder, name, &unused);
}

static json_t *read_json(const run *r, const char *name) {
    char path[CONFIG_PATH_BYTES + 64];
    size_t bytes;
    fault unused;
    char *text = path_of(r, name, path) ? files_read(path, 1 << 28, &bytes, &unused) : NULL;
    json_t *v = text ? json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL) : NULL;
    free(text);
    return v;
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

/* The step of the last row of training.csv, or -1. */
static long long last_row(const run *r) {
    char path[CONFIG_PATH_BYTES + 64];
    size_t bytes;
    fault unused;
    long long step = -1;
    if (!path_of(r, "training.csv", path)) return -1;
    char *text = files_read(path, SIZE_MAX / 4, &bytes, &unused);
    while (text && bytes && text[bytes - 1] == '\n') text[--bytes] = 0;
    const char *row = text ? strrchr(text, '\n') : NULL;
    if (row) step = atoll(row + 1);
    free(text);
    return step;
}

static void judge_steps(run *r) {
    double done = number(r, "steps_done"), asked = number(r, "steps");
    long long row = is_off(r, "csv") ? (long long)done : last_row(r);
    judge(r, "steps", done == asked && asked > 0 && row == (long long)asked,
          "%.0f of %.0f done; training.csv ends with step %lld", done, asked, row);
}

static void judge_figures(run *r) {
    double memory = number(r, "peak_memory_mib") * 1048576 / 1e9;
    double rate = number(r, "toks_per_s_p50"), fallbacks = number(r, "total_fallbacks");
    double pct = number(r, "sel_pct_at_max");
    const char *attention =
        json_string_value(json_object_get(json_object_get(r->env, "config"), "model.attention"));
    judge(r, "memory", memory < MEMORY_GB, "%.3f GB at most (below %g)", memory, MEMORY_GB);
    judge(r, "throughput", rate > TOKENS_PER_S, "%.1f tokens/s, median (above %g)", rate,
          TOKENS_PER_S);
    if (attention && strcmp(attention, "nsa"))
        judge(r, "pct_at_max", true, "attention %s selects nothing", attention);
    else if (isnan(pct))
        judge(r, "pct_at_max", false, "not known%s",
              is_off(r, "statistics") ? ": statistics were switched off" : "");
    else
        judge(r, "pct_at_max", pct < PCT_AT_MAX, "%.4f at most (below %g)", pct, PCT_AT_MAX);
    judge(r, "fallbacks", fallbacks < FALLBACKS_BELOW, "%.0f (below %g)", fallbacks,
          FALLBACKS_BELOW);
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

static void judge_artefact(run *r, const char *name, const char *part) {
    char path[CONFIG_PATH_BYTES + 64];
    long long size = path_of(r, name, path) ? size_of(path) : -1;
    if (part && size < 0 && is_off(r, part))
        judge(r, "artefact", true, "%-28s switched off", name);
    else if (size < 0)
        judge(r, "artefact", false, "%-28s is missing", name);
    else
        judge(r, "artefact", size > 0, "%-28s %lld bytes", name, size);
}

static void judge_artefacts(run *r) {
    static const struct {
        const char *name, *part; /* what it is switched off with, or NULL */
    } always[] = {
        {"metrics.json", NULL},
        {"env.json", NULL},
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
    json_int_t world = json_integer_value(json_object_get(r->env, "world"));
    for (size_t i = 0; i < sizeof always / sizeof *always; i++)
        judge_artefact(r, always[i].name, always[i].part);
    judge_artefact(r, "k_stats.csv", is_off(r, "csv") ? "csv" : "statistics");
    for (json_int_t rank = 0; rank < (world > 1 ? world : 1); rank++) {
        snprintf(name, sizeof name, "heartbeat_rank%lld.jsonl", (long long)rank);
        judge_artefact(r, name, "heartbeat");
    }
}

int main(int argc, char **argv) {
    struct stat s;
    if (argc != 2 || argv[1][0] == '-') {
        bool help = argc == 2 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"));
        fprintf(
            help ? stdout : stderr,
            "usage: nsa_verdict DIR\n"
            "Judges the run whose out_dir is DIR. Exit code 0: GO; 1: NO-GO; 2: no such folder.\n");
        return help ? GO : UNUSABLE;
    }
    if (stat(argv[1], &s) || !S_ISDIR(s.st_mode)) {
        fprintf(stderr, "%s: no folder; must be the out_dir of a run\n", argv[1]);
        return UNUSABLE;
    }
    run r = {.folder = argv[1], .go = true};
    r.metrics = read_json(&r, "metrics.json");
    r.env = read_json(&r, "env.json");
    judge_exit(&r);
    judge_steps(&r);
    judge_figures(&r);
    judge_artefacts(&r);
    printf("%s\n", r.go ? "GO" : "NO-GO");
    json_decref(r.metrics);
    json_decref(r.env);
    return r.go ? GO : NO_GO;
}

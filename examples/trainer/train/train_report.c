/* train_report.c - what a run is and what it takes, written when it starts and after its first
   step: env.json, mem_boot.json, mem_step1.json, opt_state_mb.txt, dtypes_report.txt,
   history.jsonl. Twin: train_inside.h. What it writes while it goes is telemetry.c's. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "base/files.h"
#include "train/train_inside.h"

extern char **environ;

/* Takes the text. */
static bool write_text(const trainer *t, const char *name, char *text, fault *f) {
    char path[CONFIG_PATH_BYTES + 32];
    bool ok = text ? files_join(path, sizeof path, t->config->train.out_dir, name, f) &&
                         files_replace(path, text, strlen(text), f)
                   : fault_set(f, "%s: out of memory", name);
    free(text);
    return ok;
}

/* Takes the object. */
static bool write_json(const trainer *t, const char *name, json_t *o, fault *f) {
    char *text = o ? json_dumps(o, JSON_INDENT(2) | JSON_REAL_PRECISION(15)) : NULL;
    json_decref(o);
    return write_text(t, name, text, f);
}

/* ---- Memory -------------------------------------------------------------------------------- */

/* "VmRSS" in bytes; 0 where the system does not say. */
static int64_t status_bytes(const char *key) {
    size_t bytes;
    fault unused;
    char *text = files_read("/proc/self/status", 1 << 20, &bytes, &unused), name[32];
    snprintf(name, sizeof name, "\n%s:", key);
    const char *at = text ? strstr(text, name) : NULL;
    long long kib = at ? atoll(at + strlen(name)) : 0;
    free(text);
    return (int64_t)kib * 1024;
}

/* What a device holds does not grow after the first step, which makes the last choices. */
void train_note_memory(const trainer *t) {
    int64_t allocated, taken;
    if (!t->o->memory) return;
    t->o->memory(t->o, &allocated, &taken);
    telemetry_gpu_memory(t->telemetry, allocated, taken, taken);
}

/* allocated: what the model took from the back end, which does not grow; reserved: what the system
   has given the process, or what is taken of the device. */
bool train_report_memory(const trainer *t, const char *name, fault *f) {
    const arena *a = &t->model.arena;
    json_t *o = json_object(), *purposes = json_object();
    int64_t own = (int64_t)a->used, now = status_bytes("VmRSS"), most = status_bytes("VmHWM");
    if (t->o->memory) {
        t->o->memory(t->o, &own, &now);
        most = now;
    }
    const struct {
        const char *key;
        int64_t bytes;
    } fields[] = {{"allocated_bytes.all.current", own},
                  {"allocated_bytes.all.peak", own},
                  {"reserved_bytes.all.current", now},
                  {"reserved_bytes.all.peak", most}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        json_object_set_new(o, fields[i].key, json_integer(fields[i].bytes));
    for (int i = 0; i < PURPOSES; i++)
        json_object_set_new(purposes, purpose_name((purpose)i),
                            json_integer((json_int_t)a->by_purpose[i]));
    json_object_set_new(o, "device", json_string(t->o->name));
    json_object_set_new(o, "step", json_integer(t->state.step));
    json_object_set_new(o, "bytes_by_purpose", purposes);
    return write_json(t, name, o, f);
}

static bool write_optimizer_size(const trainer *t, fault *f) {
    char *text = malloc(64);
    if (text)
        snprintf(text, 64, "%.3f\n", (double)t->model.arena.by_purpose[FOR_MOMENTS] / (1 << 20));
    return write_text(t, "opt_state_mb.txt", text, f);
}

const char *train_dtype_name(nsa_dtype dtype) {
    return dtype == NSA_F64 ? "f64" : dtype == NSA_F32 ? "f32" : dtype == NSA_BF16 ? "bf16" : "f16";
}

static bool write_dtypes(const trainer *t, fault *f) {
    const params *p = &t->model.params;
    const char *held = train_dtype_name(NSA_REAL_DTYPE), *read = train_dtype_name(t->o->dtype);
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) return fault_set(f, "dtypes_report.txt: out of memory");
    fprintf(out, "activations %s\nparameter shape weight forward gradient moments\n", read);
    for (int i = 0; i < p->length; i++) {
        const param *x = &p->list[i];
        fprintf(out, "%s ", x->name);
        for (int k = 0; k < x->dims; k++)
            fprintf(out, k ? "x%lld" : "%lld", (long long)x->shape[k]);
        fprintf(out, " %s %s %s %s\n", held, read, held, held);
    }
    return (fclose(out) == 0 && write_text(t, "dtypes_report.txt", text, f));
}

/* ---- The environment ----------------------------------------------------------------------- */

/* Only names that say how the run is launched: an environment holds secrets too. */
static bool is_telling(const char *variable) {
    static const char *const begins[] = {"NSA_",
                                         "OMP_",
                                         "OPENBLAS_",
                                         "DNNL_",
                                         "ONEDNN_",
                                         "WORLD_SIZE=",
                                         "RANK=",
                                         "LOCAL_RANK=",
                                         "MASTER_ADDR=",
                                         "MASTER_PORT=",
                                         "CONFIG=",
                                         "NCCL_",
                                         "CUDA_VISIBLE_DEVICES=",
                                         "SLURM_JOB_ID=",
                                         "SLURM_NTASKS=",
                                         "SLURM_PROCID=",
                                         "SLURM_JOB_NODELIST="};
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++)
        if (!strncmp(variable, begins[i], strlen(begins[i]))) return true;
    return false;
}

/* As it is, or with \\xNN for what is no ASCII where it is not UTF-8. */
static json_t *readable(const char *text) {
    char escaped[4 * CONFIG_PATH_BYTES] = "";
    size_t n = 0;
    json_t *plain = json_string(text);
    if (plain) return plain;
    for (; *text && n + 5 < sizeof escaped; text++) {
        unsigned char byte = (unsigned char)*text;
        n += (size_t)snprintf(escaped + n, sizeof escaped - n,
                              byte < 32 || byte > 126 ? "\\x%02x" : "%c", byte);
    }
    return json_string(escaped);
}

static json_t *environment(void) {
    char name[128];
    json_t *o = json_object();
    for (char **v = environ; v && *v; v++) {
        size_t length = strcspn(*v, "=");
        if (!is_telling(*v) || length >= sizeof name || !(*v)[length]) continue;
        snprintf(name, sizeof name, "%.*s", (int)length, *v);
        json_object_set_new(o, name, readable(*v + length + 1));
    }
    return o;
}

/* Words of the command line; empty where the system does not keep them. */
static json_t *command(void) {
    size_t bytes;
    fault unused;
    json_t *words = json_array();
    char *text = files_read("/proc/self/cmdline", 1 << 20, &bytes, &unused);
    for (size_t i = 0; text && i < bytes; i += strlen(text + i) + 1)
        json_array_append_new(words, readable(text + i));
    free(text);
    return words;
}

/* The rest of the line "model name : ..." */
static json_t *processor(void) {
    size_t bytes;
    fault unused;
    char *text = files_read("/proc/cpuinfo", 1 << 24, &bytes, &unused);
    char *at = text ? strstr(text, "model name") : NULL;
    at = at ? strchr(at, ':') : NULL;
    json_t *name = json_null();
    if (at) name = json_stringn(at + 2, strcspn(at + 2, "\n"));
    free(text);
    return name;
}

static json_t *switched_off(const config *c) {
    const struct {
        const char *name;
        bool off;
    } parts[] = {{"tensorboard", c->telemetry.tb_disable},
                 {"csv", c->telemetry.disable_csv_logs},
                 {"statistics", telemetry_without_stats(c)},
                 {"heartbeat", !c->telemetry.heartbeat_every},
                 {"evaluation", !c->train.eval_every}};
    json_t *list = json_array();
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i].off) json_array_append_new(list, json_string(parts[i].name));
    return list;
}

static bool write_environment(const trainer *t, fault *f) {
    struct utsname u;
    char version[32];
    uname(&u);
    snprintf(version, sizeof version, "%d.%d.%d", NSA_VERSION_MAJOR, NSA_VERSION_MINOR,
             NSA_VERSION_PATCH);
    json_t *o =
        json_pack("{s:s, s:o, s:s, s:s, s:s, s:s, s:o, s:I, s:s, s:s, s:s, s:i, s:i, s:i, s:s, "
                  "s:o, s:o, s:o}",
                  "nsa_version", version, "command", command(), "host", u.nodename, "system",
                  u.sysname, "release", u.release, "machine", u.machine, "processor", processor(),
                  "cores", (json_int_t)sysconf(_SC_NPROCESSORS_ONLN), "device", t->o->name, "dtype",
                  train_dtype_name(t->o->dtype), "library", t->o->library, "world", t->dist->world,
                  "context_parallel", t->dist->context, "threads", t->o->threads, "compiler",
                  __VERSION__, "environment", environment(), "switched_off",
                  switched_off(t->config), "config", config_to_json(t->config));
    return write_json(t, "env.json", o, f);
}

/* ---- What was started here ----------------------------------------------------------------- */

static json_t *time_of_day(void) {
    time_t now = time(NULL);
    struct tm utc;
    char text[32];
    gmtime_r(&now, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
    return json_string(text);
}

/* Each start adds a line to history.jsonl: env.json is of the newest alone. */
static bool write_history(const trainer *t, const checkpoint *k, fault *f) {
    char path[CONFIG_PATH_BYTES + 32];
    const config *c = t->config;
    json_t *o = json_pack("{s:o, s:I, s:I, s:o, s:o, s:o, s:o, s:o}", "iso", time_of_day(), "pid",
                          (json_int_t)getpid(), "step", (json_int_t)t->state.step, "from",
                          k ? readable(k->path) : json_null(), "init_from",
                          c->train.init_from[0] ? readable(c->train.init_from) : json_null(),
                          "changed", k ? config_changes(&k->config, c) : json_object(), "command",
                          command(), "config", config_to_json(c));
    char *text = o ? json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(15)) : NULL;
    json_decref(o);
    bool ok = text ? files_join(path, sizeof path, c->train.out_dir, "history.jsonl", f) &&
                         files_append_line(path, text, f)
                   : fault_set(f, "history.jsonl: out of memory");
    free(text);
    return ok;
}

bool train_report_start(const trainer *t, const checkpoint *k, fault *f) {
    return write_environment(t, f) && write_history(t, k, f) &&
           train_report_memory(t, "mem_boot.json", f) && write_optimizer_size(t, f) &&
           write_dtypes(t, f);
}

/* heartbeat.c - see heartbeat.h. */
#include "telemetry/heartbeat.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/fallback.h"
#include "base/files.h"
#include "base/phase.h"

bool heartbeat_open(heartbeat *h, const char *folder, int64_t rank, fault *f) {
    char name[64];
    snprintf(name, sizeof name, "heartbeat_rank%lld.jsonl", (long long)rank);
    struct stat s;
    h->rank = rank;
    h->on = false;
    if (!files_join(h->path, sizeof h->path, folder, name, f) ||
        !files_drop_partial_line(h->path, f)) /* a kill cut it short */
        return false;
    h->fd = files_open_end(h->path, f);
    if (h->fd < 0) return false;
    h->on = !fstat(h->fd, &s) || fault_errno(f, "%s: cannot read", h->path);
    h->bytes = (int64_t)s.st_size;
    if (!h->on) close(h->fd);
    return h->on;
}

void heartbeat_close(heartbeat *h) {
    if (h->on) close(h->fd);
    h->on = false;
}

static json_t *number(double x) {
    return isfinite(x) ? json_real(x) : json_null(); /* JSON has no NaN */
}

static void add_time(json_t *o) {
    struct timespec now;
    struct tm utc;
    char iso[40], day[32];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(iso, sizeof iso, "%s.%03dZ", day, (int)(now.tv_nsec / 1000000));
    json_object_set_new(o, "ts", json_real((double)now.tv_sec + 1e-9 * (double)now.tv_nsec));
    json_object_set_new(o, "iso", json_string(iso));
}

static void add_place(json_t *o, int64_t rank, const heartbeat_line *line) {
    int layer;
    phase p = phase_get(&layer);
    json_object_set_new(o, "pid", json_integer(getpid()));
    json_object_set_new(o, "rank", json_integer(rank));
    json_object_set_new(o, "step", json_integer(line->step));
    json_object_set_new(o, "msg", json_string(line->msg));
    json_object_set_new(o, "phase", json_string(phase_name(p)));
    json_object_set_new(o, "layer", layer < 0 ? json_null() : json_integer(layer));
}

static void add_stats(json_t *o, const stats *s) {
    const struct {
        const char *name;
        double value;
    } fields[] = {
        {"gate_entropy_mean", s ? s->entropy_mean : (double)NAN},
        {"gate_max_gate", s ? s->max_gate : (double)NAN},
        {"gate_collapse_frac", s ? s->collapse_frac : (double)NAN},
        {"gate_sum_mean", s ? s->gate_sum : (double)NAN},
        {"sel_k_mean", s ? s->k_mean : (double)NAN},
        {"sel_pct_at_max", s ? s->pct_at_max : (double)NAN},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        json_object_set_new(o, fields[i].name, number(fields[i].value));
    json_object_set_new(o, "gate_layers_collapsed",
                        s ? json_integer(s->layers_collapsed) : json_null());
    json_object_set_new(o, "gate_layers_shut", s ? json_integer(s->layers_shut) : json_null());
    json_object_set_new(o, "sel_k_max", s ? json_integer(s->k_max) : json_null());
    json_object_set_new(o, "sel_rows", s ? json_integer(s->k_rows) : json_null());
    json_t *shares = s ? json_array() : json_null();
    for (int b = 0; s && b < 3; b++) json_array_append_new(shares, number(s->shares[b]));
    json_object_set_new(o, "gate_branch_shares", shares);
}

static void add_fallbacks(json_t *o) {
    char name[64];
    for (int i = 0; i < FALLBACKS; i++) {
        snprintf(name, sizeof name, "fb_%s", fallback_name((fallback)i));
        json_object_set_new(o, name, json_integer(fallback_count((fallback)i)));
    }
    json_object_set_new(o, "fb_total_fallbacks", json_integer(fallback_total()));
}

bool heartbeat_write(heartbeat *h, const heartbeat_line *line, fault *f) {
    fault why;
    if (!h->on) return true;
    json_t *o = json_object();
    add_time(o);
    add_place(o, h->rank, line);
    json_object_set_new(o, "gpu_mem_alloc", number(line->gpu_mem_alloc));
    json_object_set_new(o, "gpu_mem_reserved", number(line->gpu_mem_reserved));
    json_object_set_new(o, "loss", number(line->loss));
    json_object_set_new(o, "toks_per_s", number(line->toks_per_s));
    json_object_set_new(o, "grad_norm", number(line->grad_norm));
    add_stats(o, line->stats);
    add_fallbacks(o);
    char *text = json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(15));
    json_decref(o);
    if (!text) return fault_set(f, "%s: out of memory", h->path);
    size_t bytes = strlen(text) + 1;
    text[bytes - 1] = '\n'; /* in place of its end */
    bool ok = files_write_all(h->fd, h->path, text, bytes, &why);
    if (ok)
        h->bytes += (int64_t)bytes;
    else
        fault_errno(f, "%s: cannot write the line of step %lld", h->path, (long long)line->step);
    if (!ok) (void)!ftruncate(h->fd, (off_t)h->bytes); /* no part of a line stays before the next */
    free(text);
    return ok;
}

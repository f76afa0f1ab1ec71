/* telemetry_step.c - a step's line, rows and verdict. Twins: telemetry.h, telemetry.c (the run). */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/fallback.h"
#include "telemetry/dump.h"
#include "telemetry/telemetry_inside.h"

/* A step that ends after so long a silence speaks for itself; a heartbeat at most so often. */
enum { STEP_SILENCE_MS = 5000, BEAT_MS = 1000 };

/* "1h02m", "3m20s", "7s" */
static void duration_text(char *text, size_t bytes, double seconds) {
    long long s = (long long)(seconds + 0.5);
    if (s >= 3600)
        snprintf(text, bytes, "%lldh%02lldm", s / 3600, s / 60 % 60);
    else if (s >= 60)
        snprintf(text, bytes, "%lldm%02llds", s / 60, s % 60);
    else
        snprintf(text, bytes, "%llds", s);
}

/* "512", "81.9k", "1.64M", "3.28B" */
static void count_text(char *text, size_t bytes, double count) {
    static const char units[] = " kMBT";
    int unit = 0;
    for (; count >= 999.5 && units[unit + 1]; unit++) count /= 1000;
    snprintf(text, bytes, unit ? "%.3g%c" : "%.0f", count, units[unit]);
}

static void print_step(telemetry *t, const telemetry_step *s) {
    char line[1024], left[32] = "", tokens[32];
    double beside = t->beside / (double)(s->step - t->first_step + 1);
    duration_text(left, sizeof left,
                  (t->step_seconds + beside) * (double)(t->config->train.steps - s->step));
    count_text(tokens, sizeof tokens, (double)t->tokens);
    snprintf(line, sizeof line,
             "step %04lld | loss %.4f | lr %.2e | toks/s %.0f | grad_norm %.2f%s%s%s | tokens %s | "
             "eta %s",
             (long long)s->step, s->loss, s->lr,
             t->line_seconds > 0 ? t->line_tokens / t->line_seconds : 0.0, s->grad_norm,
             s->skipped ? " | overflow: step skipped" : "", s->extra ? " | " : "",
             s->extra ? s->extra : "", tokens, left);
    t->line_tokens = t->line_seconds = 0;
    telemetry_say(t, "%s", line);
}

/* What heartbeats say from now on. */
static void set_state(telemetry *t, const telemetry_step *s, double rate) {
    t->state.loss = s->loss;
    t->state.toks_per_s = rate;
    t->state.grad_norm = s->grad_norm;
    t->state.stats = s->stats ? &t->stats : NULL;
    if (s->stats) t->stats = *s->stats;
}

/* Of each layer that has gates, where the step also has a line: a record each. */
static bool write_layers(telemetry *t, const telemetry_step *s, fault *f) {
    static const char *const what[] = {"share_cmp", "share_slc", "share_win", "entropy", "sum"};
    enum { EACH = sizeof what / sizeof *what };
    char names[EACH][32];
    events_scalar list[EACH];
    for (int i = 0; s->stats && s->layers && i < STATS_LAYERS; i++) {
        const stats_layer *x = &s->layers[i];
        const float values[] = {x->shares[0], x->shares[1], x->shares[2], x->entropy, x->gate_sum};
        if (x->shares[0] + x->shares[1] + x->shares[2] <= 0) continue;
        for (int k = 0; k < EACH; k++) {
            snprintf(names[k], sizeof names[k], "layer_%02d/%s", i, what[k]);
            list[k] = (events_scalar){names[k], (double)values[k]};
        }
        if (!events_write(&t->events, s->step, list, EACH, f)) return false;
    }
    return true;
}

/* The rows and the scalars of a step. */
static bool write_step(telemetry *t, const telemetry_step *s, double rate, fault *f) {
    fault unused;
    double training[] = {s->loss, s->lr, rate, s->grad_norm}, fallbacks[FALLBACKS + 1];
    for (int i = 0; i < FALLBACKS; i++) fallbacks[i] = (double)fallback_count((fallback)i);
    fallbacks[FALLBACKS] = (double)fallback_total();
    events_scalar scalars[16] = {{"train/loss", s->loss},
                                 {"train/toks_per_s", rate},
                                 {"train/lr", s->lr},
                                 {"train/grad_norm", s->grad_norm}};
    int count = 4;
    bool ok = csv_row(&t->training, s->step, training, 4, f); /* every table gets its row */
    ok = csv_row(&t->fallbacks, s->step, fallbacks, FALLBACKS + 1, ok ? f : &unused) && ok;
    if (s->stats) {
        const stats *x = s->stats;
        double k[] = {x->k_mean, (double)x->k_max, (double)x->k_rows, x->pct_at_max};
        const events_scalar more[] = {
            {"gates/entropy_mean", x->entropy_mean},   {"gates/max_gate", x->max_gate},
            {"gates/collapse_frac", x->collapse_frac}, {"gates/share_cmp", x->shares[0]},
            {"gates/share_slc", x->shares[1]},         {"gates/share_win", x->shares[2]},
            {"selection/k_mean", x->k_mean},           {"selection/k_max", (double)x->k_max},
            {"selection/pct_at_max", x->pct_at_max}};
        memcpy(scalars + count, more, sizeof more);
        count += (int)(sizeof more / sizeof *more);
        ok = csv_row(&t->k_stats, s->step, k, 4, ok ? f : &unused) && ok;
    }
    return ok && events_write(&t->events, s->step, scalars, count, f);
}

bool telemetry_halt(telemetry *t, anomaly a, const char *reason, fault *f) {
    fault unused;
    pthread_mutex_lock(&t->lock);
    t->halted = true;
    pthread_mutex_unlock(&t->lock);
    fault_set(f, "%s: %.800s", anomaly_name(a), reason);
    if (!anomaly_write(t->config->train.out_dir, a, reason, &unused))
        telemetry_say(t, "%s", unused.text);
    return false;
}

bool telemetry_halted(telemetry *t) {
    pthread_mutex_lock(&t->lock);
    bool halted = t->halted;
    pthread_mutex_unlock(&t->lock);
    return halted;
}

static bool judge_step(telemetry *t, const telemetry_step *s, double rate, fault *f) {
    anomaly_step x = {.loss = s->loss,
                      .grad_norm = s->grad_norm,
                      .seconds = s->seconds,
                      .toks_per_s = rate,
                      .skipped = s->skipped,
                      .stats = s->stats};
    char reason[FAULT_BYTES + 32];
    fault why;
    anomaly a = anomaly_of_step(&t->watch, &x, &why);
    if (!a) return true;
    if (a == ANOMALY_FLAT || a == ANOMALY_LAYER) {
        telemetry_say(t, "warning: step %lld: %s", (long long)s->step, why.text);
        return true;
    }
    snprintf(reason, sizeof reason, "step %lld: %s", (long long)s->step, why.text);
    return telemetry_halt(t, a, reason, f);
}

static bool is_due(int64_t every, int64_t step) {
    return every > 0 && step % every == 0;
}

/* Every heartbeat_every steps where that was asked for; else once a second, for a model of
   milliseconds would write gigabytes. */
static bool beats(const telemetry *t, int64_t step, double now) {
    const config *c = t->config;
    if (!is_due(c->telemetry.heartbeat_every, step)) return false;
    return config_from(c, "telemetry.heartbeat_every") != CONFIG_FROM_DEFAULT ||
           step == t->first_step || now - t->last_beat >= BEAT_MS;
}

static bool end_step(telemetry *t, const telemetry_step *s, fault *f) {
    const config *c = t->config;
    fault unused;
    double rate = s->seconds > 0 ? (double)s->tokens / s->seconds : 0;
    bool ok = true, last = s->step == c->train.steps;
    bool wanted = is_due(c->train.log_every, s->step) || t->step_seconds == 0 || s->skipped || last;
    pthread_mutex_lock(&t->lock);
    t->metrics.steps_done = s->step;
    t->last_step = clock_ms();
    wanted = wanted || t->last_step - t->last_line >= STEP_SILENCE_MS;
    set_state(t, s, rate);
    if (last || beats(t, s->step, t->last_step)) ok = telemetry_beat_locked(t, "step_end", f);
    pthread_mutex_unlock(&t->lock);
    t->rates[t->rate_count++ % TELEMETRY_RATES] = rate;
    t->line_tokens += (double)s->tokens;
    t->tokens += s->tokens;
    t->line_seconds += s->seconds;
    t->step_seconds = t->step_seconds > 0 ? 0.9 * t->step_seconds + 0.1 * s->seconds : s->seconds;
    t->metrics.lr = s->lr;
    t->metrics.loss_last = s->loss;
    t->metrics.seconds += s->seconds;
    t->metrics.total_fallbacks = fallback_total();
    if (s->stats) t->metrics.sel_pct_at_max = fmax(t->metrics.sel_pct_at_max, s->stats->pct_at_max);
    if (s->stats) {
        t->metrics.gate_layers_collapsed = s->stats->layers_collapsed;
        t->metrics.gate_layers_shut = s->stats->layers_shut;
    }
    if (s->step == 1) t->metrics.loss_first = s->loss;
    if (wanted) {
        t->metrics.toks_per_s_p50 = telemetry_median_rate(t);
        telemetry_refresh_memory(t);
        print_step(t, s);
    }
    t->metrics.tokens = t->tokens;
    metrics_prepare(t->metrics_path, &t->metrics);
    dump_step(s->step + 1);
    ok = write_step(t, s, rate, ok ? f : &unused) && ok; /* a row waits for no heartbeat */
    return ok && (!wanted || write_layers(t, s, f)) && judge_step(t, s, rate, f);
}

bool telemetry_step_end(telemetry *t, const telemetry_step *s, fault *f) {
    double begin = clock_ms();
    bool ok = end_step(t, s, f);
    double files = clock_ms() - begin;
    t->files_ms += files;
    t->stats_ms += s->stats_ms;
    t->steps_ms += s->seconds * 1e3 + files;
    return ok;
}

/* anomaly.c - see anomaly.h. */
#include "telemetry/anomaly.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/files.h"

enum { IN_A_ROW = 3, WARM_UP = 10, SLOWER = 20 };

const char *anomaly_name(anomaly a) {
    static const char *const names[] = {
        "none", "stall", "flat_throughput", "gate_collapse", "gate_layer", "zero_gradient", "nan"};
    return names[a];
}

/* ---- Steps ---- */

/* A layer may do without a branch, and a run without a layer: that is told, and halts nothing. */
static anomaly look_at_layers(anomaly_watch *w, const stats *s, fault *f) {
    int64_t layers = s->layers_collapsed + s->layers_shut;
    if (layers <= w->layers) return ANOMALY_NONE;
    w->layers = layers;
    fault_set(f,
              "gates: %lld layers have collapsed (the first: %lld), %lld are shut (the first: "
              "%lld); -1 is none",
              (long long)s->layers_collapsed, (long long)s->first_collapsed,
              (long long)s->layers_shut, (long long)s->first_shut);
    return ANOMALY_LAYER;
}

static anomaly look_at_gates(anomaly_watch *w, const stats *s, fault *f) {
    if (!s) return ANOMALY_NONE;
    bool collapsed = s->entropy_mean < 0.2 || s->max_gate > 0.9 || s->collapse_frac >= 0.5;
    bool shut = s->gate_sum < 0.01;
    w->collapsed = collapsed || shut ? w->collapsed + 1 : 0;
    if (w->collapsed < IN_A_ROW) return look_at_layers(w, s, f);
    fault_set(
        f,
        "gates, %d steps in a row: mean entropy %.3g (least 0.2), mean of the largest share "
        "%.3g (most 0.9), collapsed %.3g (less than 0.5), mean of their sum %.3g (least 0.01)",
        IN_A_ROW, s->entropy_mean, s->max_gate, s->collapse_frac, s->gate_sum);
    return ANOMALY_GATES;
}

static anomaly look_at_rate(anomaly_watch *w, const anomaly_step *s, fault *f) {
    bool slow = w->steps >= WARM_UP && s->toks_per_s < w->rate / SLOWER;
    if (!slow) {
        w->rate = w->steps ? 0.9 * w->rate + 0.1 * s->toks_per_s : s->toks_per_s;
        w->steps++;
        w->slow = 0;
        w->slow_seconds = 0;
        return ANOMALY_NONE;
    }
    w->slow++;
    w->slow_seconds += s->seconds;
    if (w->timeout == 0 || w->slow < IN_A_ROW || w->slow_seconds < w->timeout) return ANOMALY_NONE;
    fault_set(f, "throughput: %.3g tokens/s in the last %d steps, %.0f s; before that %.3g",
              s->toks_per_s, w->slow, w->slow_seconds, w->rate);
    w->rate = s->toks_per_s; /* told once: from here on this is its rate */
    w->slow = 0;
    w->slow_seconds = 0;
    return ANOMALY_FLAT;
}

anomaly anomaly_of_step(anomaly_watch *w, const anomaly_step *s, fault *f) {
    if (s->skipped) return ANOMALY_NONE; /* an overflow of fp16 is expected now and then */
    if (!isfinite(s->loss) || !isfinite(s->grad_norm)) {
        fault_set(f, "loss %g, gradient norm %g: no numbers", s->loss, s->grad_norm);
        return ANOMALY_NAN;
    }
    if (s->loss != 0 && s->grad_norm == 0) { /* both are 0 where there is no label */
        fault_set(f, "the gradient is zero, the loss %g", s->loss);
        return ANOMALY_ZERO_GRADIENT;
    }
    anomaly a = look_at_gates(w, s->stats, f);
    return a ? a : look_at_rate(w, s, f);
}

/* ---- Time ---- */

/* Waiting for data has a limit of its own, and so have files; a step is what lies between. */
static bool is_watched(phase p) {
    return p == PHASE_FWD || p == PHASE_BWD || p == PHASE_OPT || p == PHASE_COMM ||
           p == PHASE_EVAL || p == PHASE_SAMPLE;
}

anomaly anomaly_of_time(anomaly_watch *w, double now, uint32_t word, int64_t step, fault *f) {
    phase p = (phase)(word >> 16);
    bool moved = word != w->word || step != w->step || !is_watched(p);
    w->still = moved ? 0 : w->still + fmin(now - w->last_look, 1);
    w->last_look = now;
    w->word = word;
    w->step = step;
    if (w->timeout == 0 || w->still < w->timeout) return ANOMALY_NONE;
    fault_set(f, "step %lld: no progress for %.0f s in phase %s, layer %d", (long long)step + 1,
              w->still, phase_name(p), (int)(word & 0xffff) - 1);
    return ANOMALY_STALL;
}

/* ---- Files ---- */

bool anomaly_write(const char *folder, anomaly a, const char *reason, fault *f) {
    char path[1280], text[FAULT_BYTES + 64];
    snprintf(text, sizeof text, "%s\n", anomaly_name(a));
    if (!files_join(path, sizeof path, folder, ".anomaly_type", f) ||
        !files_replace(path, text, strlen(text), f) ||
        !files_join(path, sizeof path, folder, ".HALT", f))
        return false;
    if (files_exist(path)) return true;
    snprintf(text, sizeof text, "%s: %s\n", anomaly_name(a), reason);
    return files_replace(path, text, strlen(text), f);
}

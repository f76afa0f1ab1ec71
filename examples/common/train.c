/* train.c - the steps of a run, and how it ends. Twin: train.h. */
#include "train.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "dump.h"
#include "optimizer.h"
#include "sample.h"

/* What a step came to. */
typedef enum outcome { STEP_DONE, STEP_STOPPED, STEP_FAILED } outcome;

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static model_batch batch_of(const data_batch *b) {
    model_batch m = {.tokens = b->tokens,
                     .labels = b->labels,
                     .batch = (int)b->rows,
                     .tokens_each = (int)b->seq_len,
                     .begins = b->begins,
                     .documents = (int)b->documents,
                     .longest = (int)b->max_document};
    return m;
}

/* ---- Evaluation and samples ---------------------------------------------------------------- */

/* Text that the labels of a batch stand for, so that a loss can be given per byte. */
static int64_t label_bytes(const tokenizer *t, const data_batch *b) {
    int64_t sum = 0;
    size_t bytes;
    for (int64_t i = 0; i < b->rows * b->seq_len; i++) {
        if (b->labels[i] < 0) continue;
        tokenizer_bytes(t, b->labels[i], &bytes);
        sum += (int64_t)bytes;
    }
    return sum;
}

static bool evaluate(trainer *t, fault *f) {
    int64_t count = data_val_batches(t->data), bytes = 0;
    data_batch b;
    if (!count) return true;
    t->o->mark(t->o, PHASE_EVAL, -1);
    model_zero_state(&t->model);
    for (int64_t k = 0; k < count; k++) {
        if (!data_val(t->data, k, &b, f)) return false;
        model_batch batch = batch_of(&b);
        if (!model_evaluate(&t->model, &batch, f)) return false;
        bytes += label_bytes(t->tokenizer, &b);
    }
    step_state s = model_state(&t->model);
    return telemetry_eval(t->telemetry, t->state.step, s.loss / (double)s.labels,
                          (double)bytes / (double)s.labels, f);
}

static bool print_sample(trainer *t, const char *when, fault *f) {
    const config_sample *c = &t->config->sample;
    token_list text = {0};
    bool ok = true;
    if (!c->length) return true;
    t->o->mark(t->o, PHASE_SAMPLE, -1);
    for (size_t i = 0; ok && i < t->prompt.count; i++)
        if (!token_list_push(&text, t->prompt.ids[i])) ok = fault_set(f, "out of memory");
    ok = ok && sample_text(&t->model, c, t->state.seed, &text, f);
    if (ok) {
        telemetry_say(t->telemetry, "---- sample %s training ----", when);
        sample_print(t->tokenizer, &text, stdout);
        telemetry_say(t->telemetry, "\n----");
    }
    token_list_free(&text);
    return ok;
}

/* ---- Steps --------------------------------------------------------------------------------- */

/* The gradient of the mean loss over the step's micro-batches. A signal leaves the step undone: the
   state is still that of the one before. */
static outcome accumulate(trainer *t, data_position *next, fault *f) {
    int64_t count = t->config->train.accumulate_grad_batches;
    data_batch b;
    model_zero_gradients(&t->model);
    model_zero_state(&t->model);
    for (int64_t i = 0; i < count; i++) {
        if (signals_stop_requested()) return STEP_STOPPED;
        t->o->mark(t->o, PHASE_DATA, -1);
        if (!data_next(t->data, &b, f)) {
            if (signals_stop_requested()) return STEP_STOPPED;
            train_note_loader(t, "error");
            return STEP_FAILED;
        }
        if (i == count - 1) observer_begin(&t->observer);
        model_batch batch = batch_of(&b);
        double scale = b.labelled ? 1 / ((double)b.labelled * (double)count) : 0;
        if (scale != 0 && !model_train(&t->model, &batch, scale, f)) return STEP_FAILED;
        *next = b.next;
    }
    return signals_stop_requested() ? STEP_STOPPED : STEP_DONE;
}

static bool trace_gradients(const trainer *t, fault *f) {
    listener notes = telemetry_listener(t->telemetry);
    return observer_trace_gradients(&t->observer, t->state.step + 1, &notes, f);
}

static outcome step(trainer *t, fault *f) {
    const config_train *c = &t->config->train;
    const config_telemetry *watch = &t->config->telemetry;
    double begin = now_seconds();
    data_position next;
    outcome o = accumulate(t, &next, f);
    if (o != STEP_DONE) return o;
    stats seen;
    bool counted = observer_end(&t->observer, &seen);
    if (watch->trace_grads && !trace_gradients(t, f)) return STEP_FAILED;
    adamw a = {.lr = config_lr(c, t->state.step + 1),
               .beta1 = 0.9,
               .beta2 = 0.95,
               .eps = 1e-8,
               .weight_decay = c->weight_decay,
               .step = t->state.step + 1};
    optimizer_step(&t->model, &a, c->grad_clip);
    step_state s = model_state(&t->model);
    double loss = s.labels ? s.loss / (double)s.labels : 0;
    if (!isfinite(loss) || !isfinite(s.grad_norm)) {
        fault why;
        fault_set(&why, "step %lld: loss %g, gradient norm %g; checkpoints stay as they are",
                  (long long)a.step, loss, s.grad_norm);
        telemetry_halt(t->telemetry, ANOMALY_NAN, why.text, f);
        t->spoilt = true;
        return STEP_FAILED;
    }
    int64_t tokens = c->batch_size * c->seq_len * c->accumulate_grad_batches;
    t->state.step = a.step;
    t->state.data = next;
    t->state.tokens += tokens;
    telemetry_step done = {.step = a.step,
                           .loss = loss,
                           .lr = a.lr,
                           .grad_norm = s.grad_norm,
                           .tokens = tokens,
                           .seconds = now_seconds() - begin,
                           .stats = counted ? &seen : NULL};
    bool ok = telemetry_step_end(t->telemetry, &done, f);
    if (ok && t->first_step == a.step) ok = train_report_memory(t, "mem_step1.json", f);
    return ok ? STEP_DONE : STEP_FAILED;
}

static bool due(int64_t every, int64_t step) {
    return every > 0 && step % every == 0;
}

static outcome steps(trainer *t, fault *f) {
    const config_train *c = &t->config->train;
    while (t->state.step < c->steps) {
        outcome o = step(t, f);
        if (o != STEP_DONE) return o;
        bool last = t->state.step == c->steps;
        if ((due(c->eval_every, t->state.step) || (last && c->eval_every)) && !evaluate(t, f))
            return STEP_FAILED;
        if (!last && due(c->save_every, t->state.step) && !train_save(t, true, f))
            return STEP_FAILED;
        if (!saver_check(t->saver, f)) return STEP_FAILED;
    }
    return STEP_DONE;
}

/* ---- The end ------------------------------------------------------------------------------- */

static void say_data(const trainer *t) {
    data_stats s = data_statistics(t->data);
    telemetry_say(t->telemetry,
                  "data: fetch p50 %.2f ms, p95 %.2f ms; waited p50 %.2f ms, p95 %.2f ms",
                  s.fetch_p50_ms, s.fetch_p95_ms, s.wait_p50_ms, s.wait_p95_ms);
}

static bool write_weights(const trainer *t, fault *f) {
    const train_tensors *x = &t->tensors;
    uint64_t bytes, sum;
    if (!t->config->train.save[0]) return true;
    return safetensors_write(t->config->train.save, x->weights, x->weight_count, &bytes, &sum, f);
}

/* Whatever ended the steps, the last whole one is saved. */
static int finish(trainer *t, outcome o, fault *f) {
    char verdict[FAULT_BYTES + 16] = "completed";
    int signal = signals_stop_requested(), code = o == STEP_FAILED;
    fault save;
    if (o != STEP_FAILED) say_data(t);
    if (t->state.step > 0 && !train_save(t, false, &save)) {
        if (code == 0) *f = save;
        code = 1;
    }
    if (!code && o == STEP_DONE && (!write_weights(t, f) || !print_sample(t, "after", f))) code = 1;
    if (!code && o == STEP_STOPPED) {
        snprintf(verdict, sizeof verdict, "stopped by %s", signals_name(signal));
        code = 128 + signal;
        fprintf(stderr, "%s after step %lld; go on with --resume\n", verdict,
                (long long)t->state.step);
    }
    if (code == 1) {
        bool halted = telemetry_halted(t->telemetry);
        snprintf(verdict, sizeof verdict, "%s: %s", halted ? "halted" : "failed", f->text);
        fprintf(stderr, "%s\n", halted ? verdict : f->text);
        if (halted) code = TELEMETRY_HALTED;
    }
    t->o->mark(t->o, PHASE_END, -1);
    if (!telemetry_close(t->telemetry, verdict, code, f)) {
        fprintf(stderr, "%s\n", f->text);
        if (!code) code = 1;
    }
    return code;
}

int train_run(const config *c, const ops *o) {
    trainer t;
    fault f;
    int code;
    dump_prepare();
    bool opened = train_open(&t, c, o, &f);
    if (opened) {
        outcome end = print_sample(&t, "before", &f) ? steps(&t, &f) : STEP_FAILED;
        code = finish(&t, end, &f);
    } else {
        fault unused;
        fprintf(stderr, "%s\n", f.text);
        code = signals_stop_requested() ? 128 + signals_stop_requested() : 2;
        if (t.telemetry) telemetry_close(t.telemetry, f.text, code, &unused);
    }
    train_close(&t);
    return code;
}

/* train.c - the steps of a run, and how it ends. Twin: train.h. */
#include "train/train_inside.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "model/optimizer.h"
#include "telemetry/dump.h"
#include "telemetry/metrics.h"
#include "train/sample.h"

/* What a step came to. */
typedef enum outcome { STEP_DONE, STEP_STOPPED, STEP_FAILED } outcome;

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
        if (!t->dist->part) bytes += label_bytes(t->tokenizer, &b); /* all of a group have them */
    }
    step_state s = model_state(&t->model);
    double sums[] = {s.loss, (double)s.labels, (double)bytes};
    if (!dist_sum(t->dist, sums, 3, f)) return false;
    t->state.val_loss = sums[0] / sums[1];
    return telemetry_eval(t->telemetry, t->state.step, t->state.val_loss, sums[2] / sums[1], f);
}

static bool print_text(trainer *t, const token_list *list, const char *when, fault *f) {
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) return fault_set(f, "out of memory");
    sample_print(t->tokenizer, list, sample_unseen(t->tokenizer, t->prompt.ids, t->prompt.count),
                 out);
    bool ok = !fclose(out) || fault_set(f, "out of memory");
    if (ok) {
        telemetry_say(t->telemetry, "---- sample %s training ----", when);
        telemetry_print(t->telemetry, text, bytes);
        telemetry_print(t->telemetry, "\n", 1); /* which a line may not hold */
        telemetry_say(t->telemetry, "----");
    }
    free(text);
    return ok;
}

/* Every process writes it, and rank 0 prints it: so nobody waits for another. */
static bool print_sample(trainer *t, const char *when, fault *f) {
    const config_sample *c = &t->config->sample;
    token_list text = {0};
    bool ok = true;
    if (!c->length) return true;
    t->o->mark(t->o, PHASE_SAMPLE, -1);
    for (size_t i = 0; ok && i < t->prompt.count; i++)
        if (!token_list_push(&text, t->prompt.ids[i])) ok = fault_set(f, "out of memory");
    int32_t end = tokenizer_end(t->tokenizer);
    ok = ok && sample_text(&t->model, c, t->state.seed, end, &text, f);
    if (ok && t->dist->rank == 0) ok = print_text(t, &text, when, f);
    token_list_free(&text);
    return ok;
}

/* ---- Steps --------------------------------------------------------------------------------- */

/* The newest step that was computed, or is still being computed. */
static int64_t train_computed(const trainer *t) {
    return t->pending.is ? t->pending.step : t->state.step;
}

static bool halt_for_nan(trainer *t, double loss, double norm, fault *f) {
    fault why;
    fault_set(&why, "step %lld: loss %g, gradient norm %g; checkpoints stay as they are",
              (long long)t->pending.step, loss, norm);
    telemetry_halt(t->telemetry, ANOMALY_NAN, why.text, f);
    return false;
}

/* Waits for what the pending step came to, and reports it: from here on it is done. A device may
   have begun the next one. Until it is done nothing may be saved. */
static bool settle(trainer *t, fault *f) {
    const config_train *c = &t->config->train;
    const train_pending p = t->pending;
    t->spoilt = true;
    if (!dist_catch_up(t->dist, f)) return false;
    step_state s = model_fetch_state(&t->model);
    if (t->o->failed(t->o, f)) return false;
    double loss = s.labels ? s.loss / (double)s.labels : 0, now = clock_seconds();
    stats seen;
    if (!s.skipped && !(isfinite(loss) && isfinite(s.grad_norm)))
        return halt_for_nan(t, loss, s.grad_norm, f);
    t->spoilt = t->pending.is = false;
    int64_t tokens = c->batch_size * c->seq_len * c->accumulate_grad_batches;
    t->state.step = p.step;
    t->state.val_loss = (double)NAN;
    t->state.data = p.data;
    t->state.tokens += tokens;
    t->state.loss_scale = s.scaler.scale;
    t->state.scaler_good_steps = s.scaler.good_steps;
    t->state.skipped_steps = s.scaler.skipped_steps;
    telemetry_step done = {.step = p.step,
                           .loss = loss,
                           .lr = p.lr,
                           .grad_norm = s.grad_norm,
                           .tokens = tokens,
                           .seconds = now - (p.began > t->settled ? p.began : t->settled),
                           .skipped = s.skipped,
                           .stats = stats_finish(&s.seen, &seen) ? &seen : NULL,
                           .layers = s.layers,
                           .stats_ms = p.stats_ms};
    t->settled = now;
    if (t->first_step == p.step) train_note_memory(t);
    bool ok = telemetry_step_end(t->telemetry, &done, f);
    if (ok && t->first_step == p.step && !t->dist->rank)
        ok = train_report_memory(t, "mem_step1.json", f);
    return ok;
}

/* Labels of a micro-batch over all processes; where documents are isolated they differ. Those who
   divide a sequence have the same. */
static bool count_labels(trainer *t, const data_batch *b, double *labels, fault *f) {
    *labels = (double)b->labelled * dist_groups(t->dist);
    if (!b->begins) return true;
    *labels = t->dist->part ? 0 : (double)b->labelled;
    return dist_sum(t->dist, labels, 1, f);
}

static bool train_batch(trainer *t, const data_batch *b, bool last, fault *f) {
    double labels, count = (double)t->config->train.accumulate_grad_batches;
    model_batch batch = batch_of(b);
    if (!count_labels(t, b, &labels, f)) return false;
    t->model.last_of_step = last;
    if (b->labelled) return model_train(&t->model, &batch, 1 / (labels * count), f);
    if (last) dist_begin(t->dist);
    return true;
}

/* One process may end in the middle of a step; of several none can know what the others do. */
static bool stops_now(const trainer *t) {
    return t->dist->world == 1 && signals_stop_requested();
}

/* The gradient of the mean loss over the step's micro-batches. A signal leaves the step undone: the
   state is still that of the one before. */
static outcome accumulate(trainer *t, data_position *next, fault *f) {
    int64_t count = t->config->train.accumulate_grad_batches;
    data_batch b;
    model_zero_gradients(&t->model);
    model_zero_state(&t->model);
    for (int64_t i = 0; i < count; i++) {
        if (stops_now(t)) return STEP_STOPPED;
        t->o->mark(t->o, PHASE_DATA, -1);
        if (!data_next(t->data, &b, f)) {
            if (stops_now(t)) return STEP_STOPPED;
            train_note_loader(t, "error");
            t->starved = f->stays || train_computed(t) < t->first_step;
            return STEP_FAILED;
        }
        if (i == count - 1) observer_begin(&t->observer);
        if (!train_batch(t, &b, i == count - 1, f)) return STEP_FAILED;
        *next = b.next;
    }
    return stops_now(t) ? STEP_STOPPED : STEP_DONE;
}

static bool trace_gradients(const trainer *t, fault *f) {
    listener notes = telemetry_listener(t->telemetry);
    return observer_trace_gradients(&t->observer, t->state.step + 1, t->state.loss_scale, &notes,
                                    f);
}

/* Starts the step after the newest one; what came of it is settle's to learn. */
static outcome step(trainer *t, fault *f) {
    const config_train *c = &t->config->train;
    train_pending p = {.is = true, .step = train_computed(t) + 1, .began = clock_seconds()};
    outcome o = accumulate(t, &p.data, f);
    if (o != STEP_DONE) return o;
    observer_end(&t->observer);
    p.stats_ms = t->observer.spent;
    if (t->config->telemetry.trace_grads && t->dist->world == 1 && !trace_gradients(t, f))
        return STEP_FAILED;
    adamw a = {.lr = config_lr(c, p.step),
               .beta1 = 0.9,
               .beta2 = 0.95,
               .eps = 1e-8,
               .weight_decay = c->weight_decay,
               .step = p.step};
    if (!optimizer_step(&t->model, &a, c->grad_clip, f)) return STEP_FAILED;
    p.lr = a.lr;
    bool settled = !t->pending.is || settle(t, f);
    model_post_state(&t->model);
    dist_post(t->dist);
    t->pending = p;
    return settled ? STEP_DONE : STEP_FAILED;
}

/* What each bucket's exchange took, for NSA_TRACE_DDP_BUCKETS. */
static void trace_buckets(trainer *t) {
    const dist *d = t->dist;
    for (int i = d->buckets - 1; d->times && i >= 0; i--)
        telemetry_say(t->telemetry, "step %04lld | bucket %d | started %.1f ms | reduced %.1f ms",
                      (long long)t->state.step, i, 1e3 * d->times[2 * i],
                      1e3 * d->times[2 * i + 1]);
}

/* A signal to one process stops all of them after the same step. */
static bool agree_to_stop(trainer *t, fault *f) {
    int64_t number = signals_stop_requested();
    int rank;
    if (t->dist->world == 1) return true;
    if (!dist_largest(t->dist, &number, &rank, f)) return false;
    t->stopped_by = (int)number;
    return true;
}

static bool due(int64_t every, int64_t step) {
    return every > 0 && step % every == 0;
}

/* Whether something wants the step to be done: work that is due, the end, a host that moves what
   the processes exchange. */
static bool wanted(const trainer *t) {
    const config_train *c = &t->config->train;
    int64_t step = train_computed(t);
    bool compares = t->dist->world > 1 && due(t->config->runtime.ddp_check_every, step);
    return !t->o->post || !dist_on_stream(t->dist) || t->config->telemetry.trace_grads ||
           step == c->steps || due(c->eval_every, step) || due(c->save_every, step) || compares ||
           t->stopped_by || stops_now(t);
}

/* What is due after a step that is done. */
static outcome after_step(trainer *t, fault *f) {
    const config_train *c = &t->config->train;
    bool last = t->state.step == c->steps;
    double begin = clock_seconds();
    trace_buckets(t);
    if (due(t->config->runtime.ddp_check_every, t->state.step) && !train_same_parameters(t, f))
        return STEP_FAILED;
    if ((due(c->eval_every, t->state.step) || (last && c->eval_every)) && !evaluate(t, f))
        return STEP_FAILED;
    if (!last && due(c->save_every, t->state.step) && !train_save(t, true, f)) return STEP_FAILED;
    telemetry_beside(t->telemetry, clock_seconds() - begin);
    if (!saver_check(t->saver, f)) return STEP_FAILED;
    return t->stopped_by && !last ? STEP_STOPPED : STEP_DONE;
}

static outcome steps(trainer *t, fault *f) {
    outcome o = STEP_DONE;
    fault late;
    while (o == STEP_DONE && train_computed(t) < t->config->train.steps) {
        o = step(t, f);
        if (o == STEP_DONE && !agree_to_stop(t, f)) o = STEP_FAILED;
        if (o == STEP_DONE && wanted(t))
            o = settle(t, f) ? after_step(t, f) : STEP_FAILED;
        else if (o == STEP_DONE && !saver_check(t->saver, f))
            o = STEP_FAILED;
    }
    /* What ended the run need not concern the step before it. */
    if (t->pending.is && !t->spoilt && !settle(t, o == STEP_FAILED ? &late : f)) return STEP_FAILED;
    return o;
}

/* ---- The end ------------------------------------------------------------------------------- */

static void say_data(const trainer *t) {
    data_stats s = data_statistics(t->data);
    telemetry_data(t->telemetry, data_describe(t->data), s.synthetic_from);
    if (s.skipped)
        telemetry_say(t->telemetry,
                      "data: %lld documents read, %lld lines or values that are none passed over",
                      (long long)s.documents, (long long)s.skipped);
    telemetry_say(t->telemetry,
                  "data: fetch p50 %.2f ms, p95 %.2f ms; waited p50 %.2f ms, p95 %.2f ms",
                  s.fetch_p50_ms, s.fetch_p95_ms, s.wait_p50_ms, s.wait_p95_ms);
}

static bool write_weights(const trainer *t, fault *f) {
    const train_tensors *x = &t->tensors;
    uint64_t bytes, sum;
    if (!t->config->train.save[0] || t->dist->rank) return true;
    return safetensors_write(t->config->train.save, x->weights, x->weight_count, &bytes, &sum, f);
}

/* Whatever ended the steps, the last whole one is saved; not where one of several processes failed,
   for the others are not here. */
static bool save_end(trainer *t, outcome o, fault *f) {
    bool together = t->dist->world == 1 || o != STEP_FAILED;
    return !together || t->state.step == 0 || train_save(t, false, f);
}

/* The program's exit code, and the verdict that metrics.json gets. */
static int judge(trainer *t, outcome o, fault *f, char *verdict, size_t bytes) {
    int code = o == STEP_FAILED;
    fault save;
    say_data(t);
    if (!save_end(t, o, &save)) {
        if (code == 0) *f = save;
        code = 1;
    }
    if (!code && o == STEP_DONE && (!write_weights(t, f) || !print_sample(t, "after", f))) code = 1;
    if (o != STEP_FAILED) code = train_worst(t->dist, code, f);
    snprintf(verdict, bytes, "completed");
    if (!code && o == STEP_STOPPED) {
        code = 128 + t->stopped_by;
        snprintf(verdict, bytes, "stopped by %s", signals_name(t->stopped_by));
        if (t->dist->rank == 0)
            fprintf(stderr, "%s after step %lld; %sgo on with --resume\n", verdict,
                    (long long)t->state.step,
                    telemetry_halted(t->telemetry) ? "remove the .HALT, then " : "");
    }
    if (code != 1) return code;
    bool halted = telemetry_halted(t->telemetry);
    snprintf(verdict, bytes, "%s: %s", halted ? "halted" : "failed", f->text);
    if (o == STEP_FAILED) train_complain(t->dist, halted ? verdict : f->text);
    /* Data, or machines, that cannot be used: to start again would find the same. */
    return halted ? TELEMETRY_HALTED : t->starved ? 2 : code;
}

static int finish(trainer *t, outcome o, fault *f) {
    char verdict[FAULT_BYTES + 16];
    if (t->dist->world == 1) t->stopped_by = signals_stop_requested();
    int code = judge(t, o, f, verdict, sizeof verdict);
    t->o->mark(t->o, PHASE_END, -1);
    if (!telemetry_close(t->telemetry, verdict, code, f)) {
        train_complain(t->dist, f->text);
        if (!code) code = 1;
    }
    return code;
}

/* A launcher that has lost a process asks the others to end and kills them a second later: what
   they wait for will not come. metrics.json is written for that case, by another rank where rank 0
   is the one that is lost; a run that goes on writes it anew. */
static void foresee_end(const dist *d, double waited, const char *missing) {
    static const double patience = 0.3;
    int number = signals_stop_requested();
    char verdict[320];
    static bool done;
    if (done || waited < patience) return;
    done = true;
    snprintf(verdict, sizeof verdict, "ended by %s while waiting for %s", signals_name(number),
             missing[0] ? missing : "another process");
    bool is_first = strncmp(missing, "rank 0", 6) == 0 && !(missing[6] >= '0' && missing[6] <= '9');
    if (!d->rank || is_first) metrics_foretell(verdict, 128 + number, d->rank != 0);
}

/* A run that failed between a step and its evaluation, of a full disk say, has saved the step. */
static bool make_up_evaluation(trainer *t, fault *f) {
    const config_train *c = &t->config->train;
    int64_t step = t->state.step;
    bool is_due = due(c->eval_every, step) || (step == c->steps && c->eval_every);
    int64_t lacks =
        isnan(t->state.val_loss) && !t->dist->rank && telemetry_lacks_eval(t->telemetry, step);
    int rank;
    if (!step || !is_due) return true;
    return dist_largest(t->dist, &lacks, &rank, f) && (!lacks || evaluate(t, f));
}

/* From here on the processes are at one. */
static outcome run(trainer *t, fault *f) {
    t->dist->waiting = foresee_end;
    if (!train_same_start(t, f) || !train_same_parameters(t, f) || !make_up_evaluation(t, f) ||
        !print_sample(t, "before", f))
        return STEP_FAILED;
    return steps(t, f);
}

int train_run(const config *c, const ops *o, dist *d) {
    trainer t;
    fault f, reason;
    outcome end = STEP_DONE;
    dump_prepare();
    bool opened = train_open(&t, c, o, d, &f);
    int signal = signals_stop_requested(); /* the reason is told by a process that has it */
    int code = train_worst(d, opened ? 0 : signal ? 128 + signal : t.follows ? 1 : 2, &f);
    if (!code) {
        end = run(&t, &f);
        reason = f;
        code = finish(&t, end, &f);
    } else if (t.telemetry) {
        telemetry_close(t.telemetry, opened ? "another process could not start" : f.text, code,
                        &reason);
    }
    if (end == STEP_FAILED) {
        /* Before anything is released: that would wait for a device which waits for another
           process. */
        (void)saver_wait(t.saver, &f);
        dist_end(d, reason.text, code);
    }
    train_close(&t);
    return code;
}

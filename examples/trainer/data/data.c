/* data.c - the loader: a thread that opens a source, sets the validation split aside and keeps a
   few batches ahead of the training. Twin: data.h; what is read lies in source_*.c. */
#include "data/data.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fallback.h"
#include "base/signals.h"
#include "data/source.h"

enum { DEPTH = 4, TIMES = 1024, PARTING_SECONDS = 2, LOOKS_A_SECOND = 5 };

typedef struct slot {
    int32_t *tokens, *labels, *begins;
    data_batch batch; /* its pointers are the three above */
} slot;

typedef struct times {
    double ms[TIMES];
    size_t count; /* ever; the last TIMES are kept */
} times;

typedef enum loader_state { LOADER_OPENING, LOADER_RUNNING, LOADER_FAILED } loader_state;

struct data {
    data_options options;
    config_data config;
    data_position resume;
    int64_t rows, first; /* of this rank; sample of the first batch */

    pthread_t thread;
    pthread_mutex_t lock; /* guards the fields up to `failure` */
    pthread_cond_t changed;
    loader_state state;
    bool stop, finished;
    size_t head, filled; /* slots that are full, from head; the one in use is among them */
    times fetch;
    int64_t documents, skipped;
    fault failure;

    bool holding, parted; /* the caller uses slots[head]; the thread is joined or given up */
    bool lost;            /* given up: its memory cannot be freed */
    int cancel[2];
    source *source;  /* the thread's */
    source *standby; /* synthetic data, once the source has failed */
    slot slots[DEPTH], spare, *val;
    int64_t val_batches, next_sample, epoch, epoch_said, epoch_said_at, synthetic_from;
    data_position last;
    times wait;
    char description[512];
};

static void add_time(times *t, double ms) {
    t->ms[t->count++ % TIMES] = ms;
}

/* ---- Slots ---- */

static void slot_close(slot *s) {
    slot empty = {.tokens = NULL};
    free(s->tokens);
    free(s->labels);
    free(s->begins);
    *s = empty;
}

static bool slot_open(slot *s, const data *d, fault *f) {
    size_t tokens = (size_t)d->rows * (size_t)d->options.seq_len;
    s->tokens = malloc(tokens * sizeof *s->tokens);
    s->labels = malloc(tokens * sizeof *s->labels);
    if (d->config.isolate_documents) s->begins = malloc((tokens + 1) * sizeof *s->begins);
    if (s->tokens && s->labels && (s->begins || !d->config.isolate_documents)) return true;
    slot_close(s);
    fault_set(f, "out of memory for a batch of %zu tokens", tokens);
    return false;
}

/* One row: labels are the tokens one further on; isolated documents end where the next begins. */
static void fill_row(const data *d, slot *s, int64_t row, const source_window *w) {
    int64_t seq_len = d->options.seq_len;
    data_batch *b = &s->batch;
    for (int64_t i = 0; i < seq_len; i++) {
        bool ends = s->begins && w->starts[i + 1];
        s->tokens[row * seq_len + i] = w->tokens[i];
        bool silent = ends || w->given[i + 1];
        s->labels[row * seq_len + i] = silent ? DATA_NO_LABEL : w->tokens[i + 1];
        b->labelled += !silent;
        if (s->begins && (i == 0 || w->starts[i]))
            s->begins[b->documents++] = (int32_t)(row * seq_len + i);
    }
}

static void close_documents(const data *d, slot *s) {
    data_batch *b = &s->batch;
    if (!s->begins) return;
    s->begins[b->documents] = (int32_t)(d->rows * d->options.seq_len);
    for (int64_t i = 0; i < b->documents; i++)
        if (s->begins[i + 1] - s->begins[i] > b->max_document)
            b->max_document = s->begins[i + 1] - s->begins[i];
}

/* Where there are too few rows of validation: one that asks for nothing. */
static void fill_empty_row(const data *d, slot *s, int64_t row) {
    int64_t seq_len = d->options.seq_len;
    for (int64_t i = row * seq_len; i < (row + 1) * seq_len; i++) {
        s->tokens[i] = 0;
        s->labels[i] = DATA_NO_LABEL;
    }
    if (s->begins) s->begins[s->batch.documents++] = (int32_t)(row * seq_len);
}

/* This rank's rows of the micro-batch that begins with window `first`, of those below `end`. */
static bool fill_slot(const data *d, source *from, source_read read, int64_t first, int64_t end,
                      slot *s, fault *f) {
    int64_t seq_len = d->options.seq_len, mine = first + d->options.rank * d->rows;
    source_window w = {.epoch = 0};
    data_batch b = {.rows = d->rows,
                    .seq_len = seq_len,
                    .tokens = s->tokens,
                    .labels = s->labels,
                    .begins = s->begins,
                    .sample = first};
    bool ok = true;
    s->batch = b;
    w.tokens = malloc((size_t)(seq_len + 1) * sizeof *w.tokens);
    w.starts = malloc((size_t)seq_len + 1);
    w.given = calloc((size_t)seq_len + 1, 1);
    if (!w.tokens || !w.starts || !w.given) ok = fault_set(f, "out of memory for a row");
    for (int64_t row = 0; ok && row < d->rows; row++) {
        if (mine + row >= end) {
            fill_empty_row(d, s, row);
            continue;
        }
        ok = read(from, mine + row, &w, f);
        if (ok) fill_row(d, s, row, &w);
        if (row == 0) s->batch.epoch = w.epoch;
    }
    if (ok) close_documents(d, s);
    free(w.tokens);
    free(w.starts);
    free(w.given);
    return ok;
}

static bool fill_training(data *d, source *from, int64_t first, slot *s, fault *f) {
    data_position *next = &s->batch.next;
    if (!fill_slot(d, from, from->read, first, INT64_MAX, s, f) ||
        !from->position(from, first + d->options.batch_size, next, f))
        return false;
    next->split_parts = from->split_parts;
    next->split_size = from->split_size;
    return true;
}

static bool fill_validation(data *d, source *from, fault *f) {
    int64_t size = d->options.batch_size, batches = (from->val_windows + size - 1) / size;
    if (!d->val) d->val = calloc((size_t)d->options.val_batches + 1, sizeof *d->val);
    if (!d->val) return fault_set(f, "out of memory");
    for (int64_t k = 0; k < batches; k++) {
        slot *s = &d->val[k];
        if (!s->tokens && !slot_open(s, d, f)) return false;
        if (!fill_slot(d, from, from->read_val, k * size, from->val_windows, s, f)) return false;
    }
    d->val_batches = batches;
    return true;
}

/* ---- The thread ---- */

static void set_state(data *d, loader_state state) {
    pthread_mutex_lock(&d->lock);
    d->state = state;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

static bool open_source(data *d) {
    int64_t wanted = d->options.val_batches * d->options.batch_size;
    d->source = source_open(&d->options, wanted, d->cancel[0], &d->failure);
    return d->source && fill_validation(d, d->source, &d->failure);
}

/* The slot after the full ones, once there is one; NULL: stop. */
static slot *free_slot(data *d) {
    pthread_mutex_lock(&d->lock);
    while (d->filled == DEPTH && !d->stop) pthread_cond_wait(&d->changed, &d->lock);
    slot *s = d->stop ? NULL : &d->slots[(d->head + d->filled) % DEPTH];
    pthread_mutex_unlock(&d->lock);
    return s;
}

static void hand_over(data *d, double ms) {
    pthread_mutex_lock(&d->lock);
    d->filled++;
    d->documents = d->source->documents;
    d->skipped = d->source->skipped;
    add_time(&d->fetch, ms);
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

static void *run(void *user) {
    data *d = user;
    bool ok = open_source(d);
    int64_t sample = d->first;
    set_state(d, ok ? LOADER_RUNNING : LOADER_FAILED);
    for (slot *s; ok && (s = free_slot(d)); sample += d->options.batch_size) {
        double begin = clock_ms();
        ok = fill_training(d, d->source, sample, s, &d->failure);
        if (ok)
            hand_over(d, clock_ms() - begin);
        else
            set_state(d, LOADER_FAILED);
    }
    pthread_mutex_lock(&d->lock);
    d->finished = true;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* Ends the thread; one that is stuck in a read that cannot be interrupted is left behind. */
static void part(data *d) {
    struct timespec deadline = clock_in(PARTING_SECONDS);
    if (d->parted) return;
    d->parted = true;
    pthread_mutex_lock(&d->lock);
    d->stop = true;
    pthread_cond_broadcast(&d->changed);
    while (write(d->cancel[1], "", 1) < 0 && errno == EINTR) continue;
    while (!d->finished && pthread_cond_timedwait(&d->changed, &d->lock, &deadline) != ETIMEDOUT)
        continue;
    d->lost = !d->finished;
    pthread_mutex_unlock(&d->lock);
    if (d->lost)
        pthread_detach(d->thread);
    else
        pthread_join(d->thread, NULL);
}

/* ---- Falling back ---- */

static bool is_stopped(const data *d) {
    return d->options.stop && d->options.stop();
}

static bool fall_back(data *d, int64_t sample, fault *f) {
    fault reason = *f;
    if (!d->config.synthetic_on_fail || is_stopped(d)) return false;
    part(d);
    int64_t wanted = d->options.val_batches * d->options.batch_size;
    d->standby = source_synthetic_open(&d->options, wanted, f);
    if (!d->standby || !slot_open(&d->spare, d, f)) return false;
    if (!d->lost && !d->val_batches && !fill_validation(d, d->standby, f)) return false;
    d->synthetic_from = sample;
    listener_say(&d->options.notes,
                 "warning: SYNTHETIC DATA from sample %lld on (data.synthetic_on_fail): %.700s",
                 (long long)sample, reason.text);
    return true;
}

/* ---- Opening and closing ---- */

static bool check_options(const data_options *o, fault *f) {
    int64_t vocab = tokenizer_vocab_size(o->tokenizer);
    if (o->vocab_size < vocab)
        return fault_set(f, "model.vocab_size = %lld: must be at least the tokenizer's %lld",
                         (long long)o->vocab_size, (long long)vocab);
    if (o->batch_size % o->world)
        return fault_set(f, "train.batch_size = %lld: must be a multiple of the %lld processes",
                         (long long)o->batch_size, (long long)o->world);
    if (o->batch_size / o->world > INT32_MAX / o->seq_len)
        return fault_set(f,
                         "train.batch_size x train.seq_len: %lld x %lld tokens a process; must "
                         "be below 2^31",
                         (long long)(o->batch_size / o->world), (long long)o->seq_len);
    return true;
}

static bool start_thread(data *d, fault *f) {
    if (pipe(d->cancel)) return fault_errno(f, "the loader needs a pipe");
    clock_condition(&d->changed);
    pthread_mutex_init(&d->lock, NULL);
    if (signals_start_thread(&d->thread, run, d, "reads the data", f)) return true;
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    close(d->cancel[0]);
    close(d->cancel[1]);
    return false;
}

static void free_memory(data *d) {
    for (int i = 0; i < DEPTH; i++) slot_close(&d->slots[i]);
    for (int64_t k = 0; d->val && k < d->options.val_batches; k++) slot_close(&d->val[k]);
    slot_close(&d->spare);
    free(d->val);
    free(d);
}

static bool timed_out(const data *d, fault *f) {
    const char *path = d->config.path[0] ? d->config.path : "-";
    return fault_set(f, "%.700s: no data for %g s (data.loader_timeout, --loader-timeout)",
                     d->description[0] ? d->description : path, d->config.loader_timeout);
}

/* Waits a moment for the thread, with the lock held. False: no patience is left, or the run is to
   stop. A process that was stopped itself (Ctrl-Z, a machine that slept) has not waited. */
static bool wait_on(data *d, double *patience) {
    double moment = fmin(1.0 / LOOKS_A_SECOND, *patience), begin = clock_seconds();
    struct timespec look = clock_in(moment);
    if (is_stopped(d)) return false;
    (void)pthread_cond_timedwait(&d->changed, &d->lock, &look);
    *patience -= fmin(clock_seconds() - begin, 2 * moment);
    return *patience > 0;
}

static bool nothing_came(const data *d, fault *f) {
    if (is_stopped(d)) return fault_set(f, "stopped while waiting for data");
    return timed_out(d, f);
}

/* Waits until the first batch is there, or the source has failed, or time is up: data that cannot
   be trained on are found here, and never once in a step. */
static bool wait_opened(data *d, fault *f) {
    double patience = d->config.loader_timeout;
    pthread_mutex_lock(&d->lock);
    while (!d->filled && d->state != LOADER_FAILED && wait_on(d, &patience)) continue;
    bool ready = d->filled > 0, failed = d->state == LOADER_FAILED;
    pthread_mutex_unlock(&d->lock);
    if (ready) return true;
    if (!failed) return nothing_came(d, f);
    *f = d->failure;
    return false;
}

static void note_resume(const data *d) {
    const data_position *p = d->options.resume;
    const source *s = d->source;
    if (!p) return;
    if (p->fingerprint != s->fingerprint)
        listener_say(
            &d->options.notes,
            "warning: the data are not those of the checkpoint (tokenizer, names, sizes or "
            "contents differ); going on at sample %lld of what is here, and validation may be on "
            "text that was trained on",
            (long long)p->sample);
    else if (p->split_parts != s->split_parts || p->split_size != s->split_size)
        listener_say(&d->options.notes,
                     "warning: the checkpoint does not say what was set aside for validation; it "
                     "may be text that was trained on");
    else if (d->options.other_fraction)
        listener_say(
            &d->options.notes,
            "warning: data.val_fraction = %g: has no effect: a run that goes on keeps what "
            "it has set aside",
            d->config.val_fraction);
}

/* Evaluations that cannot be made, or only on less than was asked for. */
static void note_validation(const data *d) {
    const data_options *o = &d->options;
    int64_t wanted = o->val_batches * o->batch_size, have = d->source->val_windows;
    if (have >= wanted) return;
    if (!have)
        listener_say(&o->notes,
                     "warning: no evaluation: what is set aside (data.val_fraction = %g) holds no "
                     "row of train.seq_len = %lld",
                     d->config.val_fraction, (long long)o->seq_len);
    else
        listener_say(&o->notes,
                     "evaluation on %lld rows, not the %lld of train.eval_batches: more "
                     "is not set aside",
                     (long long)have, (long long)wanted);
}

data *data_open(const data_options *o, fault *f) {
    if (!check_options(o, f)) return NULL;
    data *d = calloc(1, sizeof *d);
    if (!d) {
        fault_set(f, "out of memory");
        return NULL;
    }
    d->options = *o;
    d->config = *o->config;
    d->options.config = &d->config;
    if (o->resume) {
        d->resume = *o->resume;
        d->options.resume = &d->resume;
        d->first = o->resume->sample;
    }
    d->next_sample = d->first;
    d->last.split_parts = -1;
    if (o->resume) d->last = *o->resume;
    d->rows = o->batch_size / o->world;
    d->epoch = d->epoch_said = o->resume ? o->resume->epoch : 0;
    d->epoch_said_at = o->resume ? o->resume->sample : 0;
    d->synthetic_from = -1;
    bool ok = true;
    for (int i = 0; ok && i < DEPTH; i++) ok = slot_open(&d->slots[i], d, f);
    if (!ok || !start_thread(d, f)) {
        free_memory(d);
        return NULL;
    }
    if (wait_opened(d, f)) {
        memcpy(d->description, d->source->description, sizeof d->description);
        note_resume(d);
        note_validation(d);
        return d;
    }
    if (fall_back(d, d->first, f)) {
        memcpy(d->description, d->standby->description, sizeof d->description);
        return d;
    }
    data_close(d);
    return NULL;
}

void data_close(data *d) {
    if (!d) return;
    part(d);
    if (d->standby) d->standby->close(d->standby);
    if (d->lost) return; /* the thread may still write into all of it */
    if (d->source) d->source->close(d->source);
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    close(d->cancel[0]);
    close(d->cancel[1]);
    free_memory(d);
}

/* ---- Use ---- */

/* Gives the slot in use back and takes the next one. */
static slot *take_slot(data *d, fault *f) {
    double patience = d->config.loader_timeout;
    pthread_mutex_lock(&d->lock);
    if (d->holding) {
        d->head = (d->head + 1) % DEPTH;
        d->filled--;
        pthread_cond_broadcast(&d->changed);
    }
    while (!d->filled && d->state == LOADER_RUNNING && wait_on(d, &patience)) continue;
    d->holding = d->filled > 0;
    bool failed = d->state == LOADER_FAILED;
    pthread_mutex_unlock(&d->lock);
    if (d->holding) return &d->slots[d->head];
    if (failed)
        *f = d->failure;
    else
        nothing_came(d, f);
    return NULL;
}

static slot *make_slot(data *d, fault *f) {
    data_position next = d->last;
    fallback_add(FALLBACK_DATA_SOURCE);
    if (!fill_training(d, d->standby, d->next_sample, &d->spare, f)) return NULL;
    next.sample = d->spare.batch.next.sample;
    d->spare.batch.next = next; /* a resume may find the source well again */
    return &d->spare;
}

/* The first epochs, then fewer and fewer: a small text has thousands in one run. */
static void note_epoch(data *d, const data_batch *b) {
    enum { MANY = 65536 }; /* rows, after which a line is none too many */
    if (b->epoch == d->epoch) return;
    d->epoch = b->epoch;
    bool doubled = b->epoch >= 2 * d->epoch_said;
    if (!doubled && b->sample - d->epoch_said_at < MANY) return;
    d->epoch_said = b->epoch;
    d->epoch_said_at = b->sample;
    listener_say(
        &d->options.notes,
        "data: epoch %lld begins near sample %lld: all of the data has been used %lld time%s",
        (long long)b->epoch, (long long)b->sample, (long long)b->epoch, b->epoch == 1 ? "" : "s");
}

bool data_next(data *d, data_batch *batch, fault *f) {
    double begin = clock_ms();
    slot *s = d->standby ? make_slot(d, f) : take_slot(d, f);
    if (!s && !d->standby && fall_back(d, d->next_sample, f)) s = make_slot(d, f);
    if (!s) return false;
    add_time(&d->wait, clock_ms() - begin);
    *batch = s->batch;
    d->last = s->batch.next;
    d->next_sample = s->batch.next.sample;
    if (!d->standby) note_epoch(d, batch);
    return true;
}

int64_t data_val_batches(const data *d) {
    return d->val_batches;
}

bool data_val(data *d, int64_t k, data_batch *batch, fault *f) {
    if (k < 0 || k >= d->val_batches)
        return fault_set(f, "validation batch %lld of %lld", (long long)k,
                         (long long)d->val_batches);
    *batch = d->val[k].batch;
    return true;
}

static void percentiles(const times *t, double *p50, double *p95) {
    double sorted[TIMES];
    size_t n = t->count < TIMES ? t->count : TIMES;
    memcpy(sorted, t->ms, n * sizeof *sorted);
    *p50 = clock_percentile(sorted, n, 50);
    *p95 = clock_percentile(sorted, n, 95);
}

data_stats data_statistics(data *d) {
    data_stats s = {.synthetic_from = d->synthetic_from};
    pthread_mutex_lock(&d->lock);
    times fetch = d->fetch;
    s.documents = d->documents;
    s.skipped = d->skipped;
    pthread_mutex_unlock(&d->lock);
    percentiles(&fetch, &s.fetch_p50_ms, &s.fetch_p95_ms);
    percentiles(&d->wait, &s.wait_p50_ms, &s.wait_p95_ms);
    return s;
}

uint64_t data_fingerprint(const data *d) {
    return d->standby ? 0 : d->source->fingerprint;
}

const char *data_describe(const data *d) {
    return d->description;
}

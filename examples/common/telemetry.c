/* telemetry.c - see telemetry.h. */
#include "telemetry.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "csv.h"
#include "files.h"
#include "metrics.h"

/* A line at least every 10 s: the thread looks twice a second and speaks up after 9. A step that ends
   after 5 s of silence speaks for itself. */
enum { TICK_MS = 500, SILENCE_MS = 9000, STEP_SILENCE_MS = 5000 };

struct telemetry {
    const config *config;
    FILE *log;
    bool is_first_rank;
    csv training, val;
    char metrics_path[CONFIG_PATH_BYTES + 32];
    metrics metrics;
    double *rates; /* tokens/s of each step */
    size_t rate_count, rate_room;
    double line_tokens, line_seconds; /* of the steps since the last log line */
    double step_seconds;              /* running mean, for the time left */

    pthread_t thread;
    pthread_mutex_t lock; /* guards log, last_line, last_step, stop */
    pthread_cond_t changed;
    bool stop;
    double last_line, last_step; /* ms: when a line was printed, when a step ended */
};

static telemetry *the_one; /* for exit() */

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- Lines ---- */

static void print_locked(telemetry *t, const char *line) {
    t->last_line = now_ms();
    if (!t->log) return;
    fprintf(t->log, "%s\n", line);
    fflush(t->log);
}

static void print(telemetry *t, const char *line) {
    pthread_mutex_lock(&t->lock);
    print_locked(t, line);
    pthread_mutex_unlock(&t->lock);
}

void telemetry_say(telemetry *t, const char *format, ...) {
    char line[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    print(t, line);
}

static void say_line(void *user, const char *line) {
    print(user, line);
}

listener telemetry_listener(telemetry *t) {
    listener l = {say_line, t};
    return l;
}

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

/* ---- Signs of life ---- */

static void sign_of_life(telemetry *t, double now) {
    char line[256], where[32] = "";
    int layer;
    phase p = phase_get(&layer);
    if (layer >= 0) snprintf(where, sizeof where, ", layer %d", layer);
    snprintf(line, sizeof line, "step %04lld | running for %.0f s | phase %s%s",
             (long long)t->metrics.steps_done + 1, (now - t->last_step) / 1e3, phase_name(p),
             where);
    print_locked(t, line);
}

static void *watch(void *user) {
    telemetry *t = user;
    pthread_mutex_lock(&t->lock);
    while (!t->stop) {
        struct timespec tick;
        clock_gettime(CLOCK_MONOTONIC, &tick);
        tick.tv_nsec += TICK_MS * 1000000L;
        if (tick.tv_nsec >= 1000000000L) {
            tick.tv_sec++;
            tick.tv_nsec -= 1000000000L;
        }
        pthread_cond_timedwait(&t->changed, &t->lock, &tick);
        double now = now_ms();
        if (!t->stop && now - t->last_line >= SILENCE_MS) sign_of_life(t, now);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* Signals are for the training thread. */
static bool start_watch(telemetry *t, fault *f) {
    sigset_t all, before;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&t->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&t->lock, NULL);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&t->thread, NULL, watch, t);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return !error ||
           fault_set(f, "cannot start the thread that watches the run: %s", strerror(error));
}

static void stop_watch(telemetry *t) {
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_signal(&t->changed);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->thread, NULL);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
}

/* ---- The folder ---- */

/* What is in the way of a run in this folder. A .HALT is, even when resuming. */
static bool check_folder(const telemetry_options *o, fault *f) {
    static const char *const used[] = {"training.csv", "metrics.json", "checkpoints"};
    char path[CONFIG_PATH_BYTES + 32];
    const char *folder = o->config->train.out_dir;
    if (!files_make_folder(folder, f) || !files_join(path, sizeof path, folder, ".HALT", f))
        return false;
    if (files_exist(path))
        return fault_set(f,
                         "%s: an earlier run was halted (see .anomaly_type beside it); remove "
                         "the file to run here again",
                         path);
    for (size_t i = 0; !o->resumed && i < sizeof used / sizeof used[0]; i++) {
        if (!files_join(path, sizeof path, folder, used[i], f)) return false;
        if (files_exist(path))
            return fault_set(f,
                             "%s: an earlier run is in this folder: go on with --resume, or give "
                             "another --out-dir",
                             path);
    }
    return true;
}

static bool open_files(telemetry *t, const telemetry_options *o, fault *f) {
    const char *folder = o->config->train.out_dir;
    int64_t last = o->resumed ? o->resume_step : -1;
    if (!files_join(t->metrics_path, sizeof t->metrics_path, folder, "metrics.json", f))
        return false;
    /* What an earlier run came to must not pass for this one's end, should it be killed. */
    if (unlink(t->metrics_path) && errno != ENOENT)
        return fault_errno(f, "%s: cannot be removed", t->metrics_path);
    if (o->config->telemetry.disable_csv_logs) return true;
    return csv_open(&t->training, folder, "training.csv", "step,loss,lr,toks_per_s,grad_norm", last,
                    f) &&
           csv_open(&t->val, folder, "val.csv", "step,val_loss,ppl", last, f);
}

/* ---- metrics.json ---- */

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_rate(const telemetry *t) {
    if (!t->rate_count) return 0;
    double *sorted = malloc(t->rate_count * sizeof *sorted), median = 0;
    if (!sorted) return 0;
    memcpy(sorted, t->rates, t->rate_count * sizeof *sorted);
    qsort(sorted, t->rate_count, sizeof *sorted, by_size);
    median = sorted[(t->rate_count - 1) / 2];
    free(sorted);
    return median;
}

static void refresh_memory(telemetry *t) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double own = (double)usage.ru_maxrss / 1024;
    if (!strcmp(t->metrics.device, "cpu") || t->metrics.peak_memory_mib <= 0)
        t->metrics.peak_memory_mib = own;
}

/* A program that ends by exit() has not told how it went. */
static void at_exit(void) {
    fault unused;
    telemetry *t = the_one;
    if (!t || !t->is_first_rank) return;
    the_one = NULL;
    metrics_disarm();
    metrics_write(t->metrics_path, &t->metrics, "ended early, without a reason", 1, &unused);
}

static void arm_metrics(telemetry *t) {
    static bool registered;
    the_one = t;
    if (!registered) atexit(at_exit);
    registered = true;
    refresh_memory(t);
    if (t->is_first_rank) metrics_prepare(t->metrics_path, &t->metrics);
    signals_install(metrics_last_words);
}

/* ---- The whole ---- */

telemetry *telemetry_open(const telemetry_options *o, fault *f) {
    telemetry *t = calloc(1, sizeof *t);
    const config_train *train = &o->config->train;
    metrics m = {.device = o->device,
                 .dtype = o->dtype,
                 .steps = train->steps,
                 .steps_done = o->resume_step,
                 .seq_len = train->seq_len,
                 .batch_global = train->batch_size * train->accumulate_grad_batches,
                 .lr = train->lr,
                 .loss_first = o->resume_step ? o->loss_first : (double)NAN,
                 .loss_last = (double)NAN,
                 .seconds = o->seconds};
    if (!t) {
        fault_set(f, "out of memory");
        return NULL;
    }
    t->config = o->config;
    t->is_first_rank = o->rank == 0;
    t->log = t->is_first_rank ? o->log : NULL;
    t->metrics = m;
    t->last_line = t->last_step = now_ms();
    bool ok = !t->is_first_rank || (check_folder(o, f) && open_files(t, o, f));
    if (!ok || !start_watch(t, f)) {
        csv_close(&t->training);
        csv_close(&t->val);
        free(t);
        return NULL;
    }
    arm_metrics(t);
    return t;
}

static void add_rate(telemetry *t, double rate) {
    if (t->rate_count == t->rate_room) {
        size_t room = t->rate_room ? t->rate_room * 2 : 1024;
        double *more = realloc(t->rates, room * sizeof *more);
        if (!more) return; /* the median is then that of the steps so far */
        t->rates = more;
        t->rate_room = room;
    }
    t->rates[t->rate_count++] = rate;
}

static void print_step(telemetry *t, const telemetry_step *s) {
    char line[1024], left[32] = "";
    int64_t steps = t->config->train.steps;
    duration_text(left, sizeof left, t->step_seconds * (double)(steps - s->step));
    snprintf(line, sizeof line,
             "step %04lld | loss %.4f | lr %.2e | toks/s %.0f | grad_norm %.2f%s%s%s | eta %s",
             (long long)s->step, s->loss, s->lr,
             t->line_seconds > 0 ? t->line_tokens / t->line_seconds : 0.0, s->grad_norm,
             s->skipped ? " | overflow: step skipped" : "", s->extra ? " | " : "",
             s->extra ? s->extra : "", left);
    t->line_tokens = t->line_seconds = 0;
    print(t, line);
}

bool telemetry_step_end(telemetry *t, const telemetry_step *s, fault *f) {
    double rate = s->seconds > 0 ? (double)s->tokens / s->seconds : 0;
    double row[] = {s->loss, s->lr, rate, s->grad_norm};
    bool wanted = s->step % t->config->train.log_every == 0 || !t->rate_count || s->skipped ||
                  s->step == t->config->train.steps;
    pthread_mutex_lock(&t->lock);
    t->metrics.steps_done = s->step;
    t->last_step = now_ms();
    wanted = wanted || t->last_step - t->last_line >= STEP_SILENCE_MS;
    pthread_mutex_unlock(&t->lock);
    add_rate(t, rate);
    t->line_tokens += (double)s->tokens;
    t->line_seconds += s->seconds;
    t->step_seconds = t->step_seconds > 0 ? 0.9 * t->step_seconds + 0.1 * s->seconds : s->seconds;
    t->metrics.lr = s->lr;
    t->metrics.loss_last = s->loss;
    t->metrics.seconds += s->seconds;
    if (s->step == 1) t->metrics.loss_first = s->loss;
    if (wanted) {
        t->metrics.toks_per_s_p50 = median_rate(t);
        refresh_memory(t);
        print_step(t, s);
    }
    if (t->is_first_rank) metrics_prepare(t->metrics_path, &t->metrics);
    return csv_row(&t->training, s->step, row, 4, f);
}

bool telemetry_eval(telemetry *t, int64_t step, double val_loss, double bytes_per_token, fault *f) {
    char bits[64] = "";
    double row[] = {val_loss, exp(val_loss)};
    if (bytes_per_token > 0)
        snprintf(bits, sizeof bits, " | bits/byte %.4f",
                 val_loss / 0.69314718055994530942 / bytes_per_token);
    telemetry_say(t, "step %04lld | val_loss %.4f | ppl %.2f%s", (long long)step, val_loss, row[1],
                  bits);
    return csv_row(&t->val, step, row, 2, f);
}

void telemetry_peak_memory(telemetry *t, int64_t bytes) {
    t->metrics.peak_memory_mib = (double)bytes / 1048576;
}

double telemetry_seconds(const telemetry *t) {
    return t->metrics.seconds;
}

double telemetry_loss_first(const telemetry *t) {
    return t->metrics.loss_first;
}

bool telemetry_close(telemetry *t, const char *verdict, int exit_code, fault *f) {
    bool ok = true;
    if (!t) return true;
    stop_watch(t);
    the_one = NULL;
    metrics_disarm();
    refresh_memory(t);
    t->metrics.toks_per_s_p50 = median_rate(t);
    if (t->is_first_rank) ok = metrics_write(t->metrics_path, &t->metrics, verdict, exit_code, f);
    csv_close(&t->training);
    csv_close(&t->val);
    free(t->rates);
    free(t);
    return ok;
}

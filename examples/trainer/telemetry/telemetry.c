/* telemetry.c - a run's telemetry: what is opened, watched and closed. Twins: telemetry.h,
   telemetry_step.c (a step). */
#include "telemetry/telemetry_inside.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fallback.h"
#include "base/files.h"
#include "base/text.h"
#include "telemetry/curve.h"
#include "telemetry/dump.h"

/* A line at least every 10 s: the thread looks twice a second and speaks up after 9. */
enum { TICK_MS = 500, SILENCE_MS = 9000, DUMP_MS = 1000 };

/* When a run draws its curve first, and how often anew. */
enum { FIRST_CURVE_MS = 2000, CURVE_MS = 60000 };

static telemetry *the_one; /* for exit() */

/* ---- Lines ---- */

static void print_locked(telemetry *t, const char *line) {
    char text[2056];
    t->last_line = clock_ms();
    if (!t->log) return;
    snprintf(text, sizeof text - 1, "%s", line);
    text_keep_printable(text);
    size_t n = strlen(text);
    text[n] = '\n';
    terminal_put(t->log, text, n + 1);
}

void telemetry_print(telemetry *t, const char *text, size_t bytes) {
    if (t->log) terminal_put(t->log, text, bytes);
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

/* ---- Heartbeats ---- */

bool telemetry_beat_locked(telemetry *t, const char *msg, fault *f) {
    t->last_beat = clock_ms();
    t->state.msg = msg;
    t->state.step = t->metrics.steps_done;
    return heartbeat_write(&t->heartbeat, &t->state, f);
}

bool telemetry_note(telemetry *t, const char *msg, fault *f) {
    pthread_mutex_lock(&t->lock);
    bool ok = telemetry_beat_locked(t, msg, f);
    pthread_mutex_unlock(&t->lock);
    return ok;
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

/* Says that a dump was written. */
static void look_for_dumps(telemetry *t) {
    char line[1536];
    fault unused;
    int dumps = dump_count();
    if (dumps == t->dumps) return;
    t->dumps = dumps;
    snprintf(line, sizeof line, "SIGUSR1: phase, layer and stack written to %s", dump_path());
    print_locked(t, line);
    (void)telemetry_beat_locked(t, "watchdog_dump", &unused);
}

/* The training thread is stuck: what is left to do is done here, and the process ends. */
static void end_stalled(telemetry *t, const char *reason) {
    struct timespec nap = {0, 10000000};
    char verdict[FAULT_BYTES + 16];
    fault f;
    int dumps = dump_count();
    dump_ask();
    for (int ms = 0; ms < DUMP_MS && dump_count() == dumps; ms += 10) nanosleep(&nap, NULL);
    look_for_dumps(t);
    snprintf(verdict, sizeof verdict, "halted: %s", reason);
    fprintf(stderr, "%s; see %s and .HALT beside it\n", verdict, dump_path());
    if (!anomaly_write(t->config->train.out_dir, ANOMALY_STALL, reason, &f))
        fprintf(stderr, "%s\n", f.text);
    metrics_disarm();
    if (t->is_first_rank &&
        !metrics_write(t->metrics_path, &t->metrics, verdict, TELEMETRY_HALTED, &f))
        fprintf(stderr, "%s\n", f.text);
    if (t->log) terminal_flush(t->log, 1);
    _exit(TELEMETRY_HALTED);
}

/* A .HALT that came up while the run goes, another process's or the user's, ends it as SIGTERM
   does. */
static void look_for_halt(telemetry *t) {
    char path[CONFIG_PATH_BYTES + 32], line[CONFIG_PATH_BYTES + 64];
    fault unused;
    if (t->halted || !files_join(path, sizeof path, t->config->train.out_dir, ".HALT", &unused) ||
        !files_exist(path))
        return;
    t->halted = true;
    snprintf(line, sizeof line, "%s came up: the run saves and ends", path);
    print_locked(t, line);
    signals_ask(SIGTERM);
}

/* From what is on the disk, so that a step waits for nothing. */
static void draw_curve(telemetry *t, double now) {
    fault unused;
    t->last_curve = now;
    if (!t->training.on) return;
    pthread_mutex_unlock(&t->lock);
    (void)curve_write(t->config->train.out_dir, &unused);
    pthread_mutex_lock(&t->lock);
}

static void *watch(void *user) {
    telemetry *t = user;
    fault why, unused;
    pthread_mutex_lock(&t->lock);
    while (!t->stop) {
        struct timespec tick = clock_in(1e-3 * TICK_MS);
        pthread_cond_timedwait(&t->changed, &t->lock, &tick);
        double now = clock_ms();
        if (t->stop) break;
        uint32_t word = __atomic_load_n(phase_word(), __ATOMIC_RELAXED);
        if (anomaly_of_time(&t->watch, now * 1e-3, word, t->metrics.steps_done, &why))
            end_stalled(t, why.text);
        if (now - t->last_line >= SILENCE_MS) sign_of_life(t, now);
        if (now - t->last_beat >= SILENCE_MS)
            (void)telemetry_beat_locked(t, "beat",
                                        &unused); /* a full disk is for the next step to say */
        look_for_dumps(t);
        look_for_halt(t);
        if (now - t->last_curve >= CURVE_MS) draw_curve(t, now);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

static bool start_watch(telemetry *t, fault *f) {
    clock_condition(&t->changed);
    pthread_mutex_init(&t->lock, NULL);
    return signals_start_thread(&t->thread, watch, t, "watches the run", f);
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

/* Whether the file tells of a step: a row below the header, a heartbeat of one. It may be long. */
static bool tells_of_a_step(const char *path, const char *sign) {
    char *line = NULL;
    size_t room = 0;
    bool told = false;
    fault unused;
    int fd = files_exist(path) ? files_open(path, &unused) : -1;
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    for (int lines = 0; file && !told && getline(&line, &room, file) > 0; lines++)
        told = sign ? strstr(line, sign) != NULL : lines > 0;
    free(line);
    if (file)
        fclose(file);
    else if (fd >= 0)
        close(fd);
    return told;
}

/* NAME.PID.tmp, which a killed process was writing: nobody else is here now. */
static void sweep(const char *folder) {
    char path[CONFIG_PATH_BYTES + 300];
    fault unused;
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        size_t length = strlen(e->d_name), digits = 0;
        if (length < 6 || strcmp(e->d_name + length - 4, ".tmp")) continue;
        while (digits < length - 5 && isdigit((unsigned char)e->d_name[length - 5 - digits]))
            digits++;
        if (!digits || e->d_name[length - 5 - digits] != '.') continue;
        if (files_join(path, sizeof path, folder, e->d_name, &unused)) files_remove_partial(path);
    }
    if (d) closedir(d);
}

/* What is in the way of a run in this folder. A .HALT is, even when resuming; a run that failed
   before its first step is not. */
static bool check_folder(const config *c, bool resumed, fault *f) {
    static const struct {
        const char *name, *sign; /* NULL: a second line */
        bool alone;              /* that it is there is enough */
    } used[] = {{"training.csv", NULL, false},
                {"checkpoints", NULL, true},
                {"heartbeat_rank0.jsonl", "\"step_end\"", false}};
    char path[CONFIG_PATH_BYTES + 32];
    const char *folder = c->train.out_dir;
    if (!files_join(path, sizeof path, folder, ".HALT", f)) return false;
    if (files_exist(path))
        return fault_set(f,
                         "%s: an earlier run was halted (see .anomaly_type beside it); remove "
                         "the file to run here again",
                         path);
    for (size_t i = 0; !resumed && i < sizeof used / sizeof used[0]; i++) {
        if (!files_join(path, sizeof path, folder, used[i].name, f)) return false;
        if (used[i].alone ? files_exist(path) : tells_of_a_step(path, used[i].sign))
            return fault_set(f,
                             "%s: an earlier run is in this folder: go on with --resume, or give "
                             "another --out-dir",
                             path);
    }
    return true;
}

bool telemetry_check_folder(const config *c, fault *f) {
    return files_may_make_folder(c->train.out_dir, f) &&
           check_folder(c, c->train.resume[0] != 0, f);
}

static bool open_csvs(telemetry *t, fault *f) {
    const char *folder = t->config->train.out_dir;
    int64_t last = t->resumed ? t->first_step - 1 : -1;
    char header[512] = "step";
    if (t->config->telemetry.disable_csv_logs) return true;
    for (int i = 0; i <= FALLBACKS; i++) {
        const char *name = i < FALLBACKS ? fallback_name((fallback)i) : "total_fallbacks";
        size_t used = strlen(header);
        snprintf(header + used, sizeof header - used, ",%s", name);
    }
    return csv_open(&t->training, folder, "training.csv", "step,loss,lr,toks_per_s,grad_norm", last,
                    f) &&
           csv_open(&t->val, folder, "val.csv", "step,val_loss,ppl", last, f) &&
           csv_open(&t->fallbacks, folder, "fallback_counters.csv", header, last, f) &&
           (telemetry_without_stats(t->config) ||
            csv_open(&t->k_stats, folder, "k_stats.csv", "step,k_mean,k_max,rows,pct_at_max", last,
                     f));
}

static void recall_step(void *user, const double *values) {
    telemetry *t = user;
    t->metrics.loss_last = values[1];
    t->rates[t->rate_count++ % TELEMETRY_RATES] = values[3];
}

static void recall_statistics(void *user, const double *values) {
    telemetry *t = user;
    t->metrics.sel_pct_at_max = fmax(t->metrics.sel_pct_at_max, values[4]);
}

static void recall_validation(void *user, const double *values) {
    telemetry *t = user;
    t->last_eval = (int64_t)values[0];
    t->metrics.val_loss = values[1];
    t->metrics.val_loss_best = fmin(t->metrics.val_loss_best, values[1]);
}

static void recall_fallbacks(void *user, const double *values) {
    (void)user;
    for (int i = 0; i < FALLBACKS; i++) /* an infinity is no int64_t */
        fallback_restore((fallback)i, (int64_t)fmin(fmax(values[i + 1], 0), CSV_STEP_MOST));
}

/* metrics.json is of the whole run: what its steps before came to is in the CSVs. */
static bool recall(telemetry *t, const char *folder, fault *f) {
    if (t->config->telemetry.disable_csv_logs) return true;
    bool ok = csv_read(folder, "training.csv", 5, recall_step, t, f) >= 0 &&
              csv_read(folder, "val.csv", 3, recall_validation, t, f) >= 0 &&
              csv_read(folder, "k_stats.csv", 5, recall_statistics, t, f) >= 0 &&
              csv_read(folder, "fallback_counters.csv", FALLBACKS + 2, recall_fallbacks, t, f) >= 0;
    t->metrics.total_fallbacks = fallback_total();
    return ok;
}

bool telemetry_go_on(telemetry *t, fault *f) {
    const char *folder = t->config->train.out_dir;
    if (!t->is_first_rank) return true;
    pthread_mutex_lock(&t->lock);
    bool ok =
        open_csvs(t, f) && recall(t, folder, f) &&
        (t->config->telemetry.tb_disable || events_open(&t->events, folder, t->first_step, f));
    pthread_mutex_unlock(&t->lock);
    metrics_prepare(t->metrics_path, &t->metrics);
    return ok;
}

static bool open_heartbeat(telemetry *t, const telemetry_options *o, fault *f) {
    const char *folder = o->config->train.out_dir;
    return !o->config->telemetry.heartbeat_every ||
           (files_make_folder(folder, f) && heartbeat_open(&t->heartbeat, folder, o->rank, f));
}

static void close_files(telemetry *t) {
    csv *const csvs[] = {&t->training, &t->val, &t->k_stats, &t->fallbacks};
    for (size_t i = 0; i < sizeof csvs / sizeof *csvs; i++) csv_close(csvs[i]);
    events_close(&t->events);
    heartbeat_close(&t->heartbeat);
    if (t->held >= 0) close(t->held);
}

bool telemetry_without_stats(const config *c) {
    bool sparse = false; /* gates and lists are in sparse layers alone */
    for (int64_t i = 0; i < c->model.n_layers; i++)
        sparse |= attention_is_sparse(config_attention(&c->model, i));
    return c->telemetry.disable_aux_stats || !sparse;
}

/* ---- metrics.json ---- */

/* Of the newest steps: a run of any length takes the same memory. */
double telemetry_median_rate(const telemetry *t) {
    double sorted[TELEMETRY_RATES];
    size_t count = t->rate_count < TELEMETRY_RATES ? (size_t)t->rate_count : TELEMETRY_RATES;
    memcpy(sorted, t->rates, count * sizeof *sorted);
    return clock_percentile(sorted, count, 50);
}

void telemetry_refresh_memory(telemetry *t) {
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
    telemetry_refresh_memory(t);
    metrics_prepare(t->metrics_path, &t->metrics);
    signals_install(t->is_first_rank ? metrics_last_words : NULL);
}

/* ---- The whole ---- */

int telemetry_hold(const config *c, fault *f) {
    return files_lock(c->train.out_dir, FILES_CLAIM, f);
}

static bool enter_folder(telemetry *t, const telemetry_options *o, fault *f) {
    const char *folder = o->config->train.out_dir;
    if (!files_join(t->metrics_path, sizeof t->metrics_path, folder, "metrics.json", f))
        return false;
    if (!t->is_first_rank) return true;
    if (!files_make_folder(folder, f)) return false;
    if (t->held < 0) t->held = telemetry_hold(o->config, f);
    if (t->held < 0 || !check_folder(o->config, o->resumed, f)) return false;
    sweep(folder);
    /* What an earlier run came to must not pass for this one's end, should it be killed. */
    return !unlink(t->metrics_path) || errno == ENOENT ||
           fault_errno(f, "%s: cannot be removed", t->metrics_path);
}

static bool open_terminal(telemetry *t, FILE *log, fault *f) {
    if (!t->is_first_rank || !log) return true;
    fflush(log);
    t->log = terminal_open(fileno(log), f);
    return t->log != NULL;
}

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
                 .sel_pct_at_max = (double)NAN,
                 .val_loss = (double)NAN,
                 .val_loss_best = (double)NAN,
                 .tokens = o->tokens,
                 .synthetic_from = -1,
                 .seconds = o->seconds};
    if (!t) {
        fault_set(f, "out of memory");
        return NULL;
    }
    t->config = o->config;
    t->is_first_rank = o->rank == 0;
    t->resumed = o->resumed;
    t->held = o->held > 0 ? o->held : -1;
    t->tokens = o->tokens;
    t->first_step = o->resume_step + 1;
    t->metrics = m;
    t->state.loss = t->state.toks_per_s = t->state.grad_norm = (double)NAN;
    t->last_line = t->last_step = t->last_beat = clock_ms();
    t->last_curve = t->last_line + FIRST_CURVE_MS - CURVE_MS;
    bool ok = enter_folder(t, o, f) && open_heartbeat(t, o, f) &&
              dump_install(train->out_dir, o->rank, f) && open_terminal(t, o->log, f);
    t->watch.timeout = o->config->telemetry.stall_timeout;
    t->dumps = dump_count();
    dump_step(o->resume_step + 1);
    if (!ok || !start_watch(t, f)) {
        close_files(t);
        terminal_close(t->log);
        free(t);
        return NULL;
    }
    arm_metrics(t);
    return t;
}

void telemetry_beside(telemetry *t, double seconds) {
    t->beside += seconds;
    t->metrics.seconds += seconds;
}

/* A run whose folder is renamed would go on in two, and nobody would know before its end. */
static void look_for_folder(telemetry *t) {
    if (t->displaced || csv_in_place(&t->training)) return;
    t->displaced = true;
    telemetry_say(t,
                  "warning: %s: renamed or removed while the run goes on: its rows go where it is "
                  "now, checkpoints to %s",
                  t->training.path, t->config->train.out_dir);
}

bool telemetry_sync(telemetry *t, fault *f) {
    look_for_folder(t);
    return csv_sync(&t->training, f) && csv_sync(&t->val, f) && csv_sync(&t->k_stats, f) &&
           csv_sync(&t->fallbacks, f);
}

/* What watching has cost the run; it must be little, so the run says it. */
static void say_cost(telemetry *t) {
    if (t->steps_ms > 0)
        telemetry_say(t, "telemetry: statistics %.2f %%, files %.2f %% of the steps' time",
                      100 * t->stats_ms / t->steps_ms, 100 * t->files_ms / t->steps_ms);
}

bool telemetry_eval(telemetry *t, int64_t step, double val_loss, double bytes_per_token, fault *f) {
    char bits[64] = "";
    double row[] = {val_loss, exp(val_loss)};
    if (bytes_per_token > 0)
        snprintf(bits, sizeof bits, " | bits/byte %.4f",
                 val_loss / 0.69314718055994530942 / bytes_per_token);
    telemetry_say(t, "step %04lld | val_loss %.4f | ppl %.2f%s", (long long)step, val_loss, row[1],
                  bits);
    t->metrics.val_loss = val_loss;
    t->metrics.val_loss_best = fmin(t->metrics.val_loss_best, val_loss);
    const events_scalar scalars[] = {{"val/loss", val_loss}, {"val/ppl", row[1]}};
    return csv_row(&t->val, step, row, 2, f) && events_write(&t->events, step, scalars, 2, f) &&
           telemetry_note(t, "progress", f);
}

bool telemetry_lacks_eval(const telemetry *t, int64_t step) {
    return t->val.on && t->last_eval != step;
}

void telemetry_gpu_memory(telemetry *t, int64_t allocated, int64_t reserved, int64_t peak) {
    pthread_mutex_lock(&t->lock);
    t->state.gpu_mem_alloc = (double)allocated / 1048576;
    t->state.gpu_mem_reserved = (double)reserved / 1048576;
    pthread_mutex_unlock(&t->lock);
    t->metrics.peak_memory_mib = (double)peak / 1048576;
}

void telemetry_data(telemetry *t, const char *description, int64_t synthetic_from) {
    snprintf(t->metrics.data, sizeof t->metrics.data, "%s", description);
    t->metrics.synthetic_from = synthetic_from;
}

double telemetry_seconds(const telemetry *t) {
    return t->metrics.seconds;
}

double telemetry_loss_first(const telemetry *t) {
    return t->metrics.loss_first;
}

bool telemetry_close(telemetry *t, const char *verdict, int exit_code, fault *f) {
    bool ok = true;
    fault unused;
    if (!t) return true;
    say_cost(t);
    stop_watch(t);
    the_one = NULL;
    metrics_disarm();
    telemetry_refresh_memory(t);
    t->metrics.toks_per_s_p50 = telemetry_median_rate(t);
    if (t->is_first_rank || (exit_code == 1 && !files_exist(t->metrics_path)))
        ok = metrics_write(t->metrics_path, &t->metrics, verdict, exit_code, f);
    if (t->training.on && !curve_write(t->config->train.out_dir, ok ? f : &unused)) ok = false;
    close_files(t);
    terminal_close(t->log);
    free(t);
    return ok;
}

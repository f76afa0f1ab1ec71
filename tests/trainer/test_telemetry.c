/* test_telemetry.c - what a run leaves behind: CSVs that a resume cuts back, log lines,
   metrics.json on every kind of exit, refusals of folders that are in use. */
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "base/fallback.h"
#include "base/files.h"
#include "telemetry/curve.h"
#include "telemetry/telemetry.h"
#include "trainer_test.h"

static fault why;
static config settings;
static char log_path[1024];

static void load_settings(const char *out_dir, const char *steps) {
    char *argv[] = {"test",
                    "--out-dir",
                    (char *)(uintptr_t)out_dir,
                    "--steps",
                    (char *)(uintptr_t)steps,
                    "--log-every",
                    "5",
                    "--dataset",
                    "synthetic"};
    config_program program = {.name = "test", .summary = ""};
    listener notes = test_notes();
    CHECK(config_load(&settings, &program, 9, argv, &notes, &why) == OPTION_OK, "%s", why.text);
}

static telemetry *open_run(int64_t resume_step, bool resumed) {
    telemetry_options o = {.config = &settings,
                           .device = "cpu",
                           .dtype = "f32",
                           .world = 1,
                           .resumed = resumed,
                           .resume_step = resume_step,
                           .loss_first = 5.5,
                           .seconds = 2,
                           .log = fopen(log_path, "w")};
    telemetry *t = telemetry_open(&o, &why);
    if (!t || telemetry_go_on(t, &why)) return t;
    fault unused;
    telemetry_close(t, why.text, 1, &unused);
    return NULL;
}

static void do_step(telemetry *t, int64_t step) {
    telemetry_step s = {.step = step,
                        .loss = 6.0 - 0.1 * (double)step,
                        .lr = 1e-3,
                        .grad_norm = 0.5,
                        .seconds = 0.25,
                        .tokens = 1000};
    CHECK(telemetry_step_end(t, &s, &why), "%s", why.text);
}

/* A run of steps first .. last in one call. */
static void run(int64_t first, int64_t last, bool resumed) {
    telemetry *t = open_run(first - 1, resumed);
    if (!CHECK(t != NULL, "open: %s", why.text)) return;
    for (int64_t step = first; step <= last; step++) do_step(t, step);
    CHECK(telemetry_eval(t, last, 2.0, 1, &why), "%s", why.text);
    CHECK(telemetry_close(t, "completed", 0, &why), "close: %s", why.text);
}

static json_t *read_metrics(const char *folder) {
    char path[1200];
    json_error_t e;
    snprintf(path, sizeof path, "%s/metrics.json", folder);
    json_t *m = json_load_file(path, JSON_REJECT_DUPLICATES, &e);
    CHECK(m != NULL, "%s: %s", path, e.text);
    return m;
}

static double metric(const json_t *m, const char *key) {
    const json_t *v = json_object_get(m, key);
    CHECK(v != NULL, "metrics lack %s", key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static void expect_verdict(const json_t *m, const char *want) {
    const char *got = json_string_value(json_object_get(m, "verdict"));
    CHECK(got && !strcmp(got, want), "verdict \"%s\", must be \"%s\"", got ? got : "none", want);
}

/* ---- A run, and one that goes on ---- */

static void expect_csv(const char *name, const char *want) {
    size_t bytes;
    char *got = test_read(test_path(name), &bytes);
    CHECK(!strcmp(got, want), "%s:\n%smust be:\n%s", name, got, want);
    free(got);
}

static void test_run(void) {
    check_case("a run");
    load_settings(test_path("run"), "3");
    run(1, 3, false);
    expect_csv("run/training.csv", "step,loss,lr,toks_per_s,grad_norm\n1,5.9,0.001,4000,0.5\n"
                                   "2,5.8,0.001,4000,0.5\n3,5.7,0.001,4000,0.5\n");
    expect_csv("run/val.csv", "step,val_loss,ppl\n3,2,7.3890561\n");
    json_t *m = read_metrics(test_path("run"));
    CHECK(metric(m, "steps") == 3 && metric(m, "steps_done") == 3, "steps");
    CHECK(metric(m, "loss_first") == 5.9 && metric(m, "loss_last") == 5.7, "losses");
    CHECK(metric(m, "toks_per_s_p50") == 4000 && metric(m, "seq_len") == 128, "rate");
    CHECK(metric(m, "batch_global") == 8 && metric(m, "lr") == 0.001, "batch, lr");
    CHECK(metric(m, "peak_memory_mib") > 0.5 && metric(m, "exit_code") == 0, "memory, exit code");
    CHECK(!strcmp(json_string_value(json_object_get(m, "device")), "cpu") &&
              !strcmp(json_string_value(json_object_get(m, "dtype")), "f32"),
          "device, dtype");
    expect_verdict(m, "completed");
    json_decref(m);

    check_case("a run that goes on");
    load_settings(test_path("run"), "4");
    size_t bytes;
    char *text = test_read(test_path("run/training.csv"), &bytes);
    strcat(text, "4,1,2"); /* a row that a kill cut short */
    test_write_text(test_path("run/training.csv"), text);
    free(text);
    telemetry *t = open_run(2, true);
    CHECK(t && access(test_path("run/metrics.json"), F_OK), "the earlier run's end still stands");
    CHECK(telemetry_close(t, "completed", 0, &why), "%s", why.text);
    run(3, 4, true);
    expect_csv("run/training.csv", "step,loss,lr,toks_per_s,grad_norm\n1,5.9,0.001,4000,0.5\n"
                                   "2,5.8,0.001,4000,0.5\n3,5.7,0.001,4000,0.5\n"
                                   "4,5.6,0.001,4000,0.5\n");
    expect_csv("run/val.csv", "step,val_loss,ppl\n4,2,7.3890561\n");
    m = read_metrics(test_path("run"));
    CHECK(metric(m, "loss_first") == 5.5 && metric(m, "seconds") == 2.5, "what came before counts");
    json_decref(m);
}

static void test_lines(void) {
    size_t bytes;
    check_case("log lines");
    load_settings(test_path("lines"), "12");
    run(1, 12, false);
    char *log = test_read(log_path, &bytes);
    CHECK(strstr(log, "step 0001 | loss 5.9000 | lr 1.00e-03 | toks/s 4000 | grad_norm 0.50 | "
                      "tokens 1k | eta 3s"),
          "first step: %s", log);
    CHECK(strstr(log, "step 0005 |") && strstr(log, "step 0010 |") && strstr(log, "step 0012 |"),
          "every fifth, and the last: %s", log);
    CHECK(!strstr(log, "step 0004 |") && !strstr(log, "step 0011 |"), "no others: %s", log);
    CHECK(strstr(log, "step 0012 | val_loss 2.0000 | ppl 7.39 | bits/byte 2.8854"), "%s", log);
    free(log);
    check_case("no CSVs");
    load_settings(test_path("silent"), "2");
    settings.telemetry.disable_csv_logs = 1;
    run(1, 2, false);
    CHECK(access(test_path("silent/training.csv"), F_OK), "a CSV was written");
}

/* Evaluation and saving are time of the run: in the time left, and in what it has taken. */
static void test_time_beside(void) {
    size_t bytes;
    check_case("time beside the steps");
    load_settings(test_path("beside"), "20");
    telemetry *t = open_run(0, false);
    for (int step = 1; step <= 10; step++) {
        telemetry_step s = {.step = step, .loss = 1, .grad_norm = 1, .seconds = 1, .tokens = 1000};
        CHECK(telemetry_step_end(t, &s, &why), "%s", why.text);
        telemetry_beside(t, 9);
    }
    CHECK(fabs(telemetry_seconds(t) - 102) < 1e-9, "%g s", telemetry_seconds(t)); /* 2 before */
    CHECK(telemetry_close(t, "completed", 0, &why), "%s", why.text);
    char *log = test_read(log_path, &bytes);
    CHECK(strstr(log, "step 0010 |") && strstr(log, "| tokens 10k | eta 1m31s"), "%s", log);
    free(log);
}

/* Slower than ever for minutes: told once, and the run goes on. */
static void test_slow_is_told(void) {
    size_t bytes;
    int told = 0;
    check_case("a busy machine");
    load_settings(test_path("busy"), "60");
    telemetry *t = open_run(0, false);
    for (int step = 1; step <= 40; step++) {
        telemetry_step s = {.step = step,
                            .loss = 1,
                            .grad_norm = 1,
                            .seconds = step > 15 ? 100 : 0.1,
                            .tokens = 1000};
        CHECK(telemetry_step_end(t, &s, &why), "step %d: %s", step, why.text);
    }
    CHECK(!telemetry_halted(t) && telemetry_close(t, "completed", 0, &why), "it was halted");
    CHECK(access(test_path("busy/.HALT"), F_OK), "there is a .HALT");
    char *log = test_read(log_path, &bytes);
    for (char *at = log; (at = strstr(at, "throughput:")); at++) told++;
    CHECK(told == 1, "told %d times: %s", told, log);
    free(log);
}

/* Heartbeats: once a second where nobody asked for more; and a file of any length is not read. */
static void test_heartbeats(void) {
    enum { STEPS = 2000 };
    char steps[16];
    size_t bytes;
    int lines = 0;
    check_case("heartbeats of fast steps");
    snprintf(steps, sizeof steps, "%d", STEPS);
    unsetenv("NSA_HEARTBEAT_EVERY");
    load_settings(test_path("fast"), steps);
    run(1, STEPS, false);
    setenv("NSA_HEARTBEAT_EVERY", "1", 1);
    char *text = test_read(test_path("fast/heartbeat_rank0.jsonl"), &bytes);
    for (char *at = text; (at = strstr(at, "\"step_end\"")); at++) lines++;
    CHECK(lines >= 2 && lines < STEPS / 4, "%d lines of %d steps", lines, STEPS);
    free(text);
    check_case("a long heartbeat file");
    FILE *file = fopen(test_path("long.jsonl"), "w");
    for (int i = 0; i < 100000; i++) fprintf(file, "{\"step\": %d}\n", i);
    fprintf(file, "{\"step\": 1"); /* a kill cut it short */
    long long whole = ftell(file) - 10;
    fclose(file);
    CHECK(files_drop_partial_line(test_path("long.jsonl"), &why), "%s", why.text);
    struct stat s;
    CHECK(!stat(test_path("long.jsonl"), &s) && s.st_size == whole, "%lld bytes, not %lld",
          (long long)s.st_size, whole);
    CHECK(files_drop_partial_line(test_path("none.jsonl"), &why), "%s", why.text);
}

/* What a killed process was writing is removed; what is named like it is not. */
static void test_sweep(void) {
    check_case("what a kill left");
    load_settings(test_path("swept"), "2");
    test_mkdir("swept");
    test_write_text(test_path("swept/loss.svg.12345.tmp"), "half");
    test_write_text(test_path("swept/my.tmp"), "mine");
    test_write_text(test_path("swept/notes.12a.tmp"), "mine");
    run(1, 2, false);
    CHECK(access(test_path("swept/loss.svg.12345.tmp"), F_OK), "it is still there");
    CHECK(!access(test_path("swept/my.tmp"), F_OK) &&
              !access(test_path("swept/notes.12a.tmp"), F_OK),
          "somebody's own files are gone");
}

/* Two runs in one folder: the second is refused, the first goes on. */
static void test_two_at_once(void) {
    check_case("two runs at once");
    load_settings(test_path("twice"), "2");
    telemetry *t = open_run(0, false);
    pid_t child = fork();
    if (!child) {
        fault f;
        int fd = files_lock(test_path("twice"), ".lock", &f);
        _exit(fd < 0 && strstr(f.text, "another run is in this folder (process") ? 7 : 8);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7, "it was let in");
    CHECK(telemetry_close(t, "completed", 0, &why), "%s", why.text);
    child = fork();
    if (!child) _exit(files_lock(test_path("twice"), ".lock", &why) < 0);
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the folder stays locked");
}

/* metrics.json has the largest share of any step, and the median of the rates, of the whole run. */
static void test_largest_share(void) {
    static const double shares[] = {0.1, 0.4, 0.2, 0.3};
    check_case("pct_at_max");
    load_settings(test_path("shares"), "4");
    for (int half = 0; half < 2; half++) {
        telemetry *t = open_run(2 * half, half);
        if (!CHECK(t != NULL, "%s", why.text)) return;
        for (int step = 2 * half + 1; step <= 2 * half + 2; step++) {
            stats seen = {
                .entropy_mean = 1, .max_gate = 0.4, .gate_sum = 1, .pct_at_max = shares[step - 1]};
            telemetry_step s = {.step = step,
                                .loss = 1,
                                .grad_norm = 1,
                                .seconds = 1,
                                .tokens = (int64_t)(1000 * shares[step - 1]),
                                .stats = &seen};
            CHECK(telemetry_step_end(t, &s, &why), "%s", why.text);
        }
        CHECK(telemetry_close(t, "completed", 0, &why), "%s", why.text);
        json_t *m = read_metrics(test_path("shares"));
        CHECK(metric(m, "sel_pct_at_max") == 0.4, "%g", metric(m, "sel_pct_at_max"));
        double rate = metric(m, "toks_per_s_p50"); /* the lower of the two in the middle */
        CHECK(rate == (half ? 200 : 100), "the median is %g", rate);
        json_decref(m);
    }
}

/* NaN is a number in CSVs and null in JSON, which has none. */
static void test_nan(void) {
    check_case("NaN");
    load_settings(test_path("nan"), "1");
    telemetry *t = open_run(0, false);
    telemetry_step s = {.step = 1, .loss = NAN, .lr = 1e-3, .grad_norm = INFINITY, .seconds = 1};
    TEST_FAULT(telemetry_step_end(t, &s, &why), &why, "nan: step 1: loss nan, gradient norm inf");
    CHECK(telemetry_halted(t), "the run goes on");
    CHECK(telemetry_close(t, "failed: \"loss\" is not finite\n", 1, &why), "%s", why.text);
    expect_csv("nan/training.csv", "step,loss,lr,toks_per_s,grad_norm\n1,nan,0.001,0,inf\n");
    json_t *m = read_metrics(test_path("nan"));
    CHECK(json_is_null(json_object_get(m, "loss_last")), "null");
    expect_verdict(m, "failed: \"loss\" is not finite?");
    json_decref(m);
}

/* ---- Folders that are in the way ---- */

static void refuse(int64_t resume_step, bool resumed, const char *words) {
    check_case("%s", words);
    telemetry *t = open_run(resume_step, resumed);
    TEST_FAULT(t != NULL, &why, words);
    telemetry_close(t, "", 0, &why);
}

static void test_refusals(void) {
    load_settings(test_path("run"), "9");
    refuse(0, false, "run/training.csv: an earlier run is in this folder&--resume&--out-dir");
    test_write_text(test_path("run/.HALT"), "");
    refuse(0, false, "run/.HALT: an earlier run was halted&remove the file");
    refuse(4, true, "run/.HALT: an earlier run was halted");
    unlink(test_path("run/.HALT"));
    test_write_text(test_path("run/val.csv"), "a,b\n");
    refuse(4, true, "run/val.csv: its first line must be step,val_loss,ppl");
    test_write_text(test_path("file"), "");
    load_settings(test_path("file"), "9");
    refuse(0, false, "file: is a file, must be a folder");
    load_settings(test_path("file/below"), "9");
    refuse(0, false, "file/below");
}

/* The first file that a step cannot be written to is the one that is named. */
static void test_full_disk(int64_t heartbeat_every, const char *words) {
    struct rlimit before, small;
    char folder[32];
    check_case("full disk, %s", words);
    snprintf(folder, sizeof folder, "full%d", (int)heartbeat_every);
    load_settings(test_path(folder), "9");
    settings.telemetry.heartbeat_every = heartbeat_every;
    telemetry *t = open_run(0, false);
    if (!CHECK(t != NULL, "%s", why.text)) return;
    do_step(t, 1);
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 60;
    setrlimit(RLIMIT_FSIZE, &small);
    telemetry_step s = {.step = 2, .loss = 1, .seconds = 1};
    bool ok = telemetry_step_end(t, &s, &why);
    setrlimit(RLIMIT_FSIZE, &before);
    TEST_FAULT(ok, &why, words);
    CHECK(telemetry_close(t, "failed", 1, &why), "%s", why.text);
}

/* ---- Ends of every kind, each in a process of its own ---- */

/* No thread of a busy machine stands still for so long. It is noticed within another second. */
enum { STALL_S = 5 };

typedef enum ending {
    END_SIGNAL_TWICE,
    END_SIGNAL_ONCE,
    END_FATAL,
    END_EXIT,
    END_STACK,
    END_STALL
} ending;

static volatile int depth;

static int overflow(int n) {
    volatile char room[4096];
    if (n < 0) return 0; /* never */
    room[0] = (char)n;
    depth = n;
    return overflow(n + 1) + room[0];
}

static void end_somehow(ending how, int number) {
    telemetry *t = open_run(0, false);
    if (!t) _exit(99);
    do_step(t, 1);
    do_step(t, 2);
    if (how == END_EXIT) exit(3);
    if (how == END_STACK) _exit(overflow(0));
    if (how == END_STALL) {
        phase_set(PHASE_BWD, 7);
        for (;;) pause();
    }
    raise(number);
    if (how == END_FATAL) _exit(98);
    if (signals_stop_requested() != number) _exit(97);
    if (how == END_SIGNAL_TWICE) raise(number);
    telemetry_close(t, "stopped by SIGTERM", 0, &why);
    _exit(0);
}

/* The text holds the words and says for how long nothing moved. */
static void expect_stall(const char *text, const char *words) {
    const char *at = text ? strstr(text, words) : NULL;
    int seconds = 0, end = 0;
    if (at) sscanf(at + strlen(words), "%d s in phase bwd, layer 7%n", &seconds, &end);
    CHECK(end && seconds >= STALL_S, "\"%s\" lacks \"%s\" and %d s or more", text ? text : "none",
          words, STALL_S);
}

/* The status of the child, whose metrics are then read. */
static int end_child(ending how, int number, const char *folder, const char *verdict) {
    int status = 0;
    check_case("%s", verdict);
    load_settings(test_path(folder), "9");
    pid_t child = fork();
    if (!child) {
        int nothing = open("/dev/null", O_WRONLY);
        dup2(nothing, 1);
        dup2(nothing, 2); /* a sanitizer's report of the fault that is meant */
        settings.telemetry.stall_timeout = how == END_STALL ? STALL_S : 180;
        end_somehow(how, number);
    }
    waitpid(child, &status, 0);
    json_t *m = read_metrics(test_path(folder));
    CHECK(metric(m, "steps_done") == 2 && metric(m, "steps") == 9, "steps");
    CHECK(metric(m, "loss_last") == 5.8, "loss %g", metric(m, "loss_last"));
    if (how == END_STALL)
        expect_stall(json_string_value(json_object_get(m, "verdict")), verdict);
    else
        expect_verdict(m, verdict);
    json_decref(m);
    return status;
}

static void test_endings(void) {
    static const struct {
        int number;
        const char *name;
    } fatal[] = {{SIGABRT, "SIGABRT"}, {SIGSEGV, "SIGSEGV"}, {SIGBUS, "SIGBUS"},
                 {SIGFPE, "SIGFPE"},   {SIGILL, "SIGILL"},   {SIGQUIT, "SIGQUIT"},
                 {SIGTRAP, "SIGTRAP"}, {SIGSYS, "SIGSYS"},   {SIGALRM, "SIGALRM"},
                 {SIGPROF, "SIGPROF"}};
    char folder[32], verdict[64];
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; i++) {
        snprintf(folder, sizeof folder, "end_%s", fatal[i].name);
        snprintf(verdict, sizeof verdict, "killed by %s", fatal[i].name);
        int status = end_child(END_FATAL, fatal[i].number, folder, verdict);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == fatal[i].number, "status %d", status);
    }
    int status = end_child(END_SIGNAL_ONCE, SIGTERM, "end_once", "stopped by SIGTERM");
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status), "status %d", status);
    status = end_child(END_SIGNAL_TWICE, SIGINT, "end_twice", "killed by SIGINT");
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT, "status %d", status);
    status = end_child(END_EXIT, 0, "end_exit", "ended early, without a reason");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3, "status %d", status);
    status = end_child(END_STACK, 0, "end_stack", "killed by SIGSEGV");
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV, "status %d", status);
}

/* A thread that stands still in a backward pass: its stack is written, and the process ends. */
static void test_stall(void) {
    static const struct {
        const char *file, *words;
    } left[] = {{".anomaly_type", "stall\n"},
                {".HALT", NULL},
                {"stack_rank0.txt", " step 3 phase bwd layer 7\n"},
                {"heartbeat_rank0.jsonl", "\"watchdog_dump\""}};
    int status = end_child(END_STALL, 0, "end_stall", "halted: step 3: no progress for ");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == TELEMETRY_HALTED, "status %d", status);
    for (size_t i = 0; i < sizeof left / sizeof *left; i++) {
        char path[1200];
        size_t bytes;
        snprintf(path, sizeof path, "%s/%s", test_path("end_stall"), left[i].file);
        char *text = test_read(path, &bytes);
        if (left[i].words)
            CHECK(text && strstr(text, left[i].words), "%s: %s", left[i].file, text);
        else
            expect_stall(text, "stall: step 3: no progress for ");
        free(text);
    }
    TEST_FAULT(open_run(2, true) != NULL, &why, "end_stall/.HALT: an earlier run was halted");
}

/* Counts are real, go on in a resumed run, and reach every file that has them. */
static void test_counters(void) {
    size_t bytes;
    check_case("fallbacks and a GPU's memory");
    load_settings(test_path("counters"), "3");
    telemetry *t = open_run(0, false);
    telemetry_gpu_memory(t, 3 << 20, 5 << 20, 7 << 20);
    do_step(t, 1);
    fallback_add(FALLBACK_SELECTION_PACK);
    fallback_add(FALLBACK_SELECTION_PACK);
    fallback_add(FALLBACK_SLIDING_FA2);
    for (int i = 0; i < 4; i++) fallback_add(FALLBACK_DATA_SOURCE);
    do_step(t, 2);
    CHECK(telemetry_close(t, "completed", 0, &why), "%s", why.text);
    expect_csv("counters/fallback_counters.csv",
               "step,selection_triton_fails,selection_cuda_fails,selection_pack_fails,"
               "selection_mask_fails,compressed_fa2_fails,sliding_fa2_fails,half_product_fails,"
               "cuda_mainloop_fails,data_source_fails,total_fallbacks\n"
               "1,0,0,0,0,0,0,0,0,0,0\n2,0,0,2,0,0,1,0,0,4,7\n");
    char *beats = test_read(test_path("counters/heartbeat_rank0.jsonl"), &bytes);
    CHECK(strstr(beats, "\"fb_selection_pack_fails\":2") &&
              strstr(beats, "\"fb_total_fallbacks\":7"),
          "%s", beats);
    CHECK(strstr(beats, "\"gpu_mem_alloc\":3.0,\"gpu_mem_reserved\":5.0"), "%s", beats);
    free(beats);
    for (int i = 0; i < FALLBACKS; i++) fallback_restore((fallback)i, 0);
    t = open_run(2, true);
    CHECK(telemetry_close(t, "completed", 0, &why), "%s", why.text);
    json_t *m = read_metrics(test_path("counters"));
    CHECK(metric(m, "total_fallbacks") == 7 && metric(m, "loss_last") == 5.8 &&
              metric(m, "toks_per_s_p50") == 4000,
          "a resumed run that has nothing to do tells of the steps before");
    json_decref(m);
    for (int i = 0; i < FALLBACKS; i++) fallback_restore((fallback)i, 0);
}

static int count_of(const char *text, const char *word) {
    int n = 0;
    for (; text && (text = strstr(text, word)); text++) n++;
    return n;
}

/* A long run's picture is no larger than its columns ask for; its ends are there, a NaN is not. */
static void test_curve(void) {
    enum { STEPS = 50000, ROW = 32 };
    static char rows[STEPS * ROW];
    size_t used = (size_t)sprintf(rows, "step,loss,lr,toks_per_s,grad_norm\n"), bytes;
    check_case("curve");
    for (int i = 1; i <= STEPS; i++)
        used += (size_t)sprintf(rows + used, i == 777 ? "%d,nan,1,1,1\n" : "%d,%.4f,1,1,1\n", i,
                                2 + 3 * exp(-i / 9000.0) + 0.1 * sin(i));
    test_mkdir("curve");
    CHECK(curve_write(test_path("curve"), &why), "no rows: %s", why.text);
    CHECK(access(test_path("curve/loss.svg"), F_OK), "a picture of nothing");
    test_write(test_path("curve/training.csv"), rows, used);
    CHECK(curve_write(test_path("curve"), &why), "%s", why.text);
    char *svg = test_read(test_path("curve/loss.svg"), &bytes);
    const char *points = strstr(svg, "class=\"training\" points=\"");
    CHECK(bytes < 60000 && points, "%zu bytes", bytes);
    int columns = count_of(points, " ") - count_of(strstr(points, "/>"), " ");
    CHECK(columns > 700 && columns <= 724, "%d points", columns);
    CHECK(strstr(svg, "training to step 50000") && !strstr(svg, "nan"), "%.300s", svg);
    free(svg);
    test_write_text(test_path("curve/training.csv"), "step,loss\n1,2\n");
    CHECK(curve_write(test_path("curve"), &why), "one step: %s", why.text);
    svg = test_read(test_path("curve/loss.svg"), &bytes);
    CHECK(!strstr(svg, "nan") && !strstr(svg, "inf"), "one step: %s", svg);
    free(svg);
}

static void test_phase(void) {
    int layer;
    check_case("phase");
    for (int p = PHASE_BOOT; p <= PHASE_END; p++)
        for (int l = -1; l < 70; l += 23) {
            phase_set((phase)p, l);
            CHECK(phase_get(&layer) == (phase)p && layer == l, "phase %d, layer %d", p, l);
        }
    CHECK(!strcmp(phase_name(PHASE_BWD), "bwd"), "names");
    CHECK(*phase_word() == ((uint32_t)PHASE_END << 16 | 69), "the word");
}

/* A step that does not end: the run says where it is. Waits for the line, however long that takes;
   a run that never says it ends by the test's time limit. */
static void test_sign_of_life(void) {
    struct timespec nap = {0, 100000000};
    size_t bytes;
    load_settings(test_path("life"), "9");
    telemetry *t = open_run(0, false);
    if (!CHECK(t != NULL, "%s", why.text)) return;
    do_step(t, 1);
    phase_set(PHASE_BWD, 7);
    for (bool said = false; !said; nanosleep(&nap, NULL)) {
        char *log = test_read(log_path, &bytes);
        said = strstr(log, "step 0002 | running for ") && strstr(log, " s | phase bwd, layer 7\n");
        free(log);
    }
    CHECK(telemetry_close(t, "completed", 0, &why), "%s", why.text);
}

/* Without an argument the tests that are over at once; "slow": the one that has to wait. */
int main(int argc, char **argv) {
    test_begin();
    setenv("NSA_HEARTBEAT_EVERY", "1", 1); /* each step */
    snprintf(log_path, sizeof log_path, "%s/log", test_root);
    if (argc == 2 && !strcmp(argv[1], "slow")) {
        test_sign_of_life();
        return test_end("test_telemetry");
    }
    test_endings(); /* first: later tests leave threads' traces that a fork would copy */
    test_stall();
    test_run();
    test_lines();
    test_time_beside();
    test_slow_is_told();
    test_heartbeats();
    test_sweep();
    test_two_at_once();
    test_largest_share();
    test_nan();
    test_refusals();
    test_full_disk(0, "full0/training.csv: cannot write the row of step 2&File too large");
    test_full_disk(1,
                   "full1/heartbeat_rank0.jsonl: cannot write the line of step 2&File too large");
    test_phase();
    test_curve();
    test_counters();
    return test_end("test_telemetry");
}

/* program_test.h - what the tests of whole trainers share: starting a program, what it said, what
   it logged. Twin: none. Folders and files are trainer_test.h's. */
#ifndef PROGRAM_TEST_H
#define PROGRAM_TEST_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "trainer_test.h"

enum { ARGUMENTS = 64, PATIENCE = 300000 }; /* ms, for what must come sooner or later */

static const char *program;  /* that is tested */
static char output[1 << 20]; /* of the last program that ended */
static rlim_t file_limit = RLIM_INFINITY;
static const char *launcher[8]; /* NULL, or what starts the program and its arguments */

/* A model that takes a millisecond or two a step; rows are longer than its window. */
static const char *const small[] = {
    "--dim",        "32", "--layers",    "2",    "--heads",     "4",  "--kv-groups", "2",
    "--d-k",        "8",  "--d-v",       "8",    "--nsa-l",     "8",  "--nsa-d",     "4",
    "--nsa-l-sel",  "16", "--nsa-n-sel", "4",    "--nsa-w",     "16", "--seq-len",   "64",
    "--batch-size", "4",  "--lr",        "3e-3", "--log-every", "1",  NULL};

static inline pid_t start(const char *const *first, const char *const *second) {
    const char *argv[ARGUMENTS];
    int count = 0;
    for (const char *const *word = launcher; *word; word++) argv[count++] = *word;
    argv[count++] = program;
    for (; first && *first; first++) argv[count++] = *first;
    for (; *second; second++) argv[count++] = *second;
    pid_t child = fork();
    if (child) return child;
    struct rlimit limit = {file_limit, file_limit};
    int out = open(test_path("output"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(out, 1);
    dup2(out, 2);
    setrlimit(RLIMIT_FSIZE, &limit);
    argv[count] = NULL;
    execv(argv[0], (char *const *)argv);
    _exit(99);
}

/* The exit code, or 128 + the signal that it died of. */
static inline int await(pid_t child) {
    int status = 0;
    size_t bytes;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    char *text = test_read(test_path("output"), &bytes);
    snprintf(output, sizeof output, "%.*s", (int)(sizeof output - 1), text ? text : "");
    free(text);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Runs the small model with these options, which end with NULL. */
static inline int train(const char *first, ...) {
    const char *options[ARGUMENTS] = {first};
    int count = 1;
    va_list args;
    va_start(args, first);
    while ((options[count] = va_arg(args, const char *))) count++;
    va_end(args);
    return await(start(small, options));
}

/* Runs a shell's command line; what it printed, and where it failed its errors too; its exit
   code. */
static inline int shell(const char *format, ...) {
    char command[4096];
    size_t bytes;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(command, sizeof command, format, args);
    va_end(args);
    snprintf(command + n, sizeof command - (size_t)n, " > %s 2> %s", test_path("output"),
             test_path("errors"));
    int status = system(command);
    char *text = test_read(test_path("output"), &bytes);
    char *errors = test_read(test_path("errors"), &bytes);
    snprintf(output, sizeof output, "%s%s", text ? text : "", status && errors ? errors : "");
    free(text);
    free(errors);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static inline void expect(int code, int want, const char *word) {
    CHECK(code == want, "exit code %d, not %d: %s", code, want, output);
    CHECK(strstr(output, word) != NULL, "the output lacks \"%s\": %s", word, output);
}

/* Column `column` of the row of `step` in out_dir's training.csv, as text. */
static inline const char *logged(const char *out_dir, int step, int column) {
    static char values[4][64];
    static int next;
    char path[1200], row[32], *value = values[next++ % 4];
    size_t bytes;
    snprintf(path, sizeof path, "%s/training.csv", out_dir);
    snprintf(row, sizeof row, "\n%d,", step);
    char *text = test_read(path, &bytes), *at = text ? strstr(text, row) : NULL;
    snprintf(value, sizeof values[0], "none");
    for (int i = 0; at && i < column; i++) at = strchr(at + 1, ',');
    if (at) snprintf(value, sizeof values[0], "%.*s", (int)strcspn(at + 1, ",\n"), at + 1);
    free(text);
    return value;
}

static inline void write_english(const char *path) {
    static const char *const words[] = {"the", "cat", "sat", "on", "a", "mat", "and", "dog"};
    static char text[60000];
    size_t used = 0;
    for (uint64_t i = 0; used < sizeof text - 16; i++)
        used += (size_t)sprintf(text + used, "%s%s", words[check_below(8, 1, i)],
                                i % 9 == 8 ? ".\n" : " ");
    test_write(path, text, used);
}

static inline void check_same_run(const char *a, const char *b, int first, int last) {
    for (int step = first; step <= last; step++) {
        CHECK(!strcmp(logged(a, step, 1), logged(b, step, 1)), "step %d: loss %s and %s", step,
              logged(a, step, 1), logged(b, step, 1));
        CHECK(!strcmp(logged(a, step, 4), logged(b, step, 4)), "step %d: gradient norm %s and %s",
              step, logged(a, step, 4), logged(b, step, 4));
    }
}

static inline void check_same_file(const char *a, const char *b) {
    size_t left, right;
    char *x = test_read(a, &left), *y = test_read(b, &right);
    CHECK(left > 1000 && left == right, "%s has %zu bytes, %s %zu", a, left, b, right);
    if (left == right) CHECK_BITS("final weights", y, x, left, 1);
    free(x);
    free(y);
}

static inline void sleep_ms(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, NULL);
}

#endif

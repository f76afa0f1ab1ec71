/* test_train.c - train_tiny as its users run it: a run that learns, one that is resumed to the same
   bits, one that is told to stop, the configs, and what is refused. Arguments: the program, the
   folder of the configs. Twins: train.c, train_tiny's main.c. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "trainer_test.h"

enum { ARGUMENTS = 64, MINUTE = 60000 };

static const char *program, *configs;
static char output[1 << 20]; /* of the last program that ended */
static rlim_t file_limit = RLIM_INFINITY;

/* A model that takes a millisecond or two a step; rows are longer than its window. */
static const char *const small[] = {
    "--dim",        "32", "--layers",    "2",    "--heads",     "4",  "--kv-groups", "2",
    "--d-k",        "8",  "--d-v",       "8",    "--nsa-l",     "8",  "--nsa-d",     "4",
    "--nsa-l-sel",  "16", "--nsa-n-sel", "4",    "--nsa-w",     "16", "--seq-len",   "64",
    "--batch-size", "4",  "--lr",        "3e-3", "--log-every", "1",  NULL};

static pid_t start(const char *const *first, const char *const *second) {
    const char *argv[ARGUMENTS] = {program};
    int count = 1;
    for (; first && *first; first++) argv[count++] = *first;
    for (; *second; second++) argv[count++] = *second;
    pid_t child = fork();
    if (child) return child;
    struct rlimit limit = {file_limit, file_limit};
    int out = open(test_path("output"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(out, 1);
    dup2(out, 2);
    setrlimit(RLIMIT_FSIZE, &limit);
    execv(program, (char *const *)argv);
    _exit(99);
}

/* The exit code, or 128 + the signal that it died of. */
static int await(pid_t child) {
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
static int train(const char *first, ...) {
    const char *options[ARGUMENTS] = {first};
    int count = 1;
    va_list args;
    va_start(args, first);
    while ((options[count] = va_arg(args, const char *))) count++;
    va_end(args);
    return await(start(small, options));
}

static void expect(int code, int want, const char *word) {
    CHECK(code == want, "exit code %d, not %d: %s", code, want, output);
    CHECK(strstr(output, word) != NULL, "the output lacks \"%s\": %s", word, output);
}

/* Column `column` of the row of `step` in out_dir's training.csv, as text. */
static const char *logged(const char *out_dir, int step, int column) {
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

static void write_english(const char *path) {
    static const char *const words[] = {"the", "cat", "sat", "on", "a", "mat", "and", "dog"};
    static char text[60000];
    size_t used = 0;
    for (uint64_t i = 0; used < sizeof text - 16; i++)
        used += (size_t)sprintf(text + used, "%s%s", words[check_below(8, 1, i)],
                                i % 9 == 8 ? ".\n" : " ");
    test_write(path, text, used);
}

/* ---- Runs ---------------------------------------------------------------------------------- */

static void test_learning(void) {
    const char *out = test_path("learns"), *text = test_path("text");
    check_case("learning");
    int code = train("--data", text, "--out-dir", out, "--steps", "60", "--eval-every", "30",
                     "--sample", "40", "--prompt", "the ", NULL);
    expect(code, 0, "bits/byte");
    expect(code, 0, "---- sample after training ----\nthe ");
    double first = atof(logged(out, 1, 1)), last = atof(logged(out, 60, 1));
    CHECK(first > 5.4 && first < 5.7, "the first loss is %g, ln 256 is 5.545", first);
    CHECK(last < 2.6, "after 60 steps the loss is %g", last);
    expect(train("--data", text, "--out-dir", out, "--steps", "2", NULL), 2, "--resume");
}

static void check_same_run(const char *a, const char *b, int first, int last) {
    for (int step = first; step <= last; step++) {
        CHECK(!strcmp(logged(a, step, 1), logged(b, step, 1)), "step %d: loss %s and %s", step,
              logged(a, step, 1), logged(b, step, 1));
        CHECK(!strcmp(logged(a, step, 4), logged(b, step, 4)), "step %d: gradient norm %s and %s",
              step, logged(a, step, 4), logged(b, step, 4));
    }
}

static void check_same_file(const char *a, const char *b) {
    size_t left, right;
    char *x = test_read(a, &left), *y = test_read(b, &right);
    CHECK(left > 1000 && left == right, "%s has %zu bytes, %s %zu", a, left, b, right);
    if (left == right) CHECK_BITS("final weights", y, x, left, 1);
    free(x);
    free(y);
}

/* A run of 8 steps, and one that goes on from its fourth with other threads and checkpointing. */
static void test_resume(void) {
    const char *whole = test_path("whole"), *rest = test_path("rest"), *text = test_path("text");
    const char *a = test_path("a.safetensors"), *b = test_path("b.safetensors");
    char fourth[1200];
    check_case("resume");
    snprintf(fourth, sizeof fourth, "%s/checkpoints/step_00000004", whole);
    expect(train("--data", text, "--out-dir", whole, "--steps", "8", "--save-every", "4",
                 "--threads", "1", "--save", a, NULL),
           0, "step 0008");
    expect(train("--data", text, "--out-dir", rest, "--steps", "8", "--resume", fourth, "--threads",
                 "2", "--gc", "--save", b, NULL),
           0, "resumed after step 4 of 8");
    check_same_run(whole, rest, 5, 8);
    check_same_file(a, b);
    CHECK(!strcmp(logged(rest, 4, 1), "none"), "the resumed run logged step 4");
    expect(train("--data", text, "--out-dir", rest, "--resume", fourth, "--dim", "64", NULL), 2,
           "model.dim");
}

/* Two micro-batches of 2 rows are one of 4. */
static void test_accumulation(void) {
    const char *one = test_path("one"), *two = test_path("two"), *text = test_path("text");
    check_case("accumulation");
    expect(train("--data", text, "--out-dir", one, "--steps", "3", NULL), 0, "step 0003");
    expect(train("--data", text, "--out-dir", two, "--steps", "3", "--batch-size", "2",
                 "--accum-batches", "2", NULL),
           0, "step 0003");
    for (int step = 1; step <= 3; step++) {
        double x = atof(logged(one, step, 1)), y = atof(logged(two, step, 1));
        double nx = atof(logged(one, step, 4)), ny = atof(logged(two, step, 4));
        CHECK(x > 0 && fabs(x - y) < 2e-5 * x, "step %d: loss %g and %g", step, x, y);
        CHECK(fabs(nx - ny) < 1e-3 * nx, "step %d: gradient norm %g and %g", step, nx, ny);
    }
}

static void test_kinds(void) {
    static const char *const kinds[][4] = {{"--attention", "full"},
                                           {"--nsa-phi", "conv"},
                                           {"--nsa-phi", "mlp"},
                                           {"--nsa-gate", "softmax"},
                                           {"--tied-embeddings", "--isolate-documents"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        char name[16];
        snprintf(name, sizeof name, "kind%zu", i);
        check_case("%s %s", kinds[i][0], kinds[i][1]);
        expect(train("--data", test_path("text"), "--out-dir", test_path(name), "--steps", "30",
                     kinds[i][0], kinds[i][1], NULL),
               0, "step 0030");
        double last = atof(logged(test_path(name), 30, 1));
        CHECK(last > 0.5 && last < 3.6, "after 30 steps the loss is %g", last);
    }
}

/* ---- Ends ---------------------------------------------------------------------------------- */

static void sleep_ms(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, NULL);
}

static void test_stop(void) {
    const char *out = test_path("stopped"), *text = test_path("text");
    const char *options[] = {"--data", text, "--out-dir", out, "--steps", "1000000", NULL};
    char path[1200], steps[32];
    int waited = 0, code, done = 0;
    size_t bytes;
    check_case("SIGTERM");
    pid_t child = start(small, options);
    for (; waited < MINUTE && !strcmp(logged(out, 3, 1), "none"); waited += 20) sleep_ms(20);
    kill(child, SIGTERM);
    code = await(child);
    expect(code, 128 + SIGTERM, "stopped by SIGTERM after step");
    const char *at = strstr(output, "SIGTERM after step ");
    if (at) done = atoi(at + 19);
    CHECK(done >= 3, "stopped after step %d", done);
    snprintf(path, sizeof path, "%s/metrics.json", out);
    char *metrics = test_read(path, &bytes);
    CHECK(metrics && strstr(metrics, "stopped by SIGTERM"), "metrics.json: %s", metrics);
    free(metrics);
    snprintf(steps, sizeof steps, "%d", done + 2);
    expect(train("--data", text, "--out-dir", out, "--steps", steps, "--resume", NULL), 0,
           "resumed after step");
    CHECK(strcmp(logged(out, done + 2, 1), "none"), "the resumed run has no step %d", done + 2);
}

/* A disk that takes the CSVs but no checkpoint: a message, and the older checkpoint as it was. */
static void test_full_disk(void) {
    const char *out = test_path("full"), *text = test_path("text");
    check_case("full disk");
    expect(train("--data", text, "--out-dir", out, "--steps", "2", NULL), 0, "step 0002");
    file_limit = 60000;
    expect(train("--data", text, "--out-dir", out, "--steps", "4", "--resume", NULL), 1,
           "File too large");
    file_limit = RLIM_INFINITY;
    expect(train("--data", text, "--out-dir", out, "--steps", "4", "--resume", NULL), 0,
           "resumed after step 2 of 4");
}

/* ---- Settings ------------------------------------------------------------------------------ */

static void test_configs(void) {
    static const struct {
        const char *file, *parameters;
    } known[] = {{"train_showcase.yaml", "parameters: 254499\n"},
                 {"m7c_3090_smoke.yaml", "parameters: 4659858\n"},
                 {"m7c_125m_2k_test.yaml", "parameters: 78295332\n"},
                 {"m7c_125m_2xa100_production.yaml", "parameters: 78295332\n"},
                 {"gpt2_125m.yaml", "parameters: 116499492\n"},
                 {"quickstart.yaml", "parameters: 443334\n"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        char path[1200];
        snprintf(path, sizeof path, "%s/%s", configs, known[i].file);
        const char *options[] = {"--config", path, "--data", test_path("text"), "--check", NULL};
        check_case("%s --check", known[i].file);
        int code = await(start(NULL, options));
        expect(code, 0, known[i].parameters);
        expect(code, 0, "keys read by the last token");
        expect(code, 0, "train.lr_schedule");
    }
}

static void test_refusals(void) {
    const char *out = test_path("refused"), *text = test_path("text");
    const char *empty = test_path("empty"), *yaml = test_path("bad.yaml");
    check_case("refusals");
    test_write_text(empty, "");
    test_write_text(yaml, "nsa:\n  l: 16\n  windows: 3\n");
    expect(train("--data", empty, "--out-dir", out, "--steps", "2", NULL), 2, empty);
    expect(train("--data", test_path("nowhere"), "--out-dir", out, NULL), 2, "nowhere");
    expect(train("--data", text, "--out-dir", out, "--steps", "2", NULL), 0, "step 0002");
    expect(train("--config", yaml, "--data", text, NULL), 2, "bad.yaml:3");
    expect(train("--frobnicate", NULL), 2, "--frobnicate");
    expect(train("--data", text, "--nsa-d", "3", NULL), 2, "nsa.d");
    expect(train("--data", text, "--device", "cuda", NULL), 2, "--device cpu");
    expect(train("--data", text, "--precision", "bf16", NULL), 2, "fp32");
    expect(train("--data", text, "--out-dir", "/proc/nowhere", NULL), 2, "/proc/nowhere");
    expect(train("--data", text, "--out-dir", test_path("new"), "--resume", NULL), 2, "new");
    expect(train("--help", NULL), 0, "--accum-batches");
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s train_tiny configs\n", argv[0]);
        return 2;
    }
    program = argv[1];
    configs = argv[2];
    test_begin();
    write_english(test_path("text"));
    test_learning();
    test_resume();
    test_accumulation();
    test_kinds();
    test_stop();
    test_full_disk();
    test_configs();
    test_refusals();
    return test_end("test_train");
}

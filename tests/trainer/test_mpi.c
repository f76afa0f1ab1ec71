/* test_mpi.c - train_125m in several processes as its users run it: the losses of one process, the
   same bits twice, resumed in another number of processes, sequences that processes divide, a
   process that is told to stop, stopped or killed, settings that differ, launches that are refused.
   Arguments: "trains", "context" or "ends", the program, and what starts it in two processes. Twin:
   dist.c. */
#include <ctype.h>

#include "program_test.h"

/* --ddp-timeout, s. No process of a busy machine, whose disk is slow, stands still for the first;
   the second is for who must not be given up. */
#define SHORT "15"
#define LONG  "300"

static const char *text; /* to train on */
static const char *two[8], *four[8], *const one[] = {NULL};

static void processes(const char *const *how) {
    memset(launcher, 0, sizeof launcher);
    for (int i = 0; how[i]; i++) launcher[i] = how[i];
}

/* A path that stays, as test_path()'s do not. */
static const char *folder(const char *name) {
    static char paths[32][600];
    static int next;
    char *path = paths[next++];
    snprintf(path, sizeof paths[0], "%s", test_path(name));
    return path;
}

/* ---- Runs ---------------------------------------------------------------------------------- */

/* What evaluations came to, over all processes' rows. */
static void check_near_val(const char *a, const char *b) {
    const char *names[] = {a, b};
    double x[2][2] = {{0}};
    for (int i = 0; i < 2; i++) {
        char path[1200];
        size_t bytes;
        snprintf(path, sizeof path, "%s/val.csv", names[i]);
        char *rows = test_read(path, &bytes), *at = rows ? strstr(rows, "\n4,") : NULL;
        CHECK(at && sscanf(at, "\n4,%lf,%*f\n8,%lf,", &x[i][0], &x[i][1]) == 2, "%s: %s", path,
              rows);
        free(rows);
    }
    for (int k = 0; k < 2; k++)
        CHECK(x[0][k] > 0 && fabs(x[0][k] - x[1][k]) <= 1e-5 * x[1][k], "evaluation %d: %g and %g",
              k, x[0][k], x[1][k]);
}

static void check_near_run(const char *a, const char *b, int last) {
    check_near_val(a, b);
    for (int step = 1; step <= last; step++) {
        double x = atof(logged(a, step, 1)), y = atof(logged(b, step, 1));
        double nx = atof(logged(a, step, 4)), ny = atof(logged(b, step, 4));
        CHECK(x > 0 && fabs(x - y) <= 1e-5 * y, "step %d: loss %g and %g", step, x, y);
        CHECK(fabs(nx - ny) <= 1e-4 * ny, "step %d: gradient norm %g and %g", step, nx, ny);
    }
}

static int train_to(const char *out, const char *steps, const char *more, const char *value) {
    return train("--data", text, "--out-dir", out, "--steps", steps, "--eval-every", "4", more,
                 value, NULL);
}

static void test_same(void) {
    const char *alone = folder("alone"), *pair = folder("pair"), *again = folder("again");
    const char *a = folder("a.safetensors"), *b = folder("b.safetensors");
    const char *quad = folder("quad");
    check_case("two processes and one");
    processes(one);
    expect(train_to(alone, "8", "--accum-batches", "2"), 0, "step 0008 | val_loss");
    processes(two);
    expect(train("--data", text, "--out-dir", pair, "--steps", "8", "--eval-every", "4",
                 "--accum-batches", "2", "--save", a, "--ddp-check-every", "2", NULL),
           0, "processes: 2 over mpi");
    check_near_run(pair, alone, 8);
    check_case("bits of two runs");
    expect(train("--data", text, "--out-dir", again, "--steps", "8", "--eval-every", "4",
                 "--accum-batches", "2", "--save", b, NULL),
           0, "step 0008");
    check_same_run(pair, again, 1, 8);
    check_same_file(a, b);
    check_case("four processes");
    processes(four);
    expect(train_to(quad, "8", "--accum-batches", "2"), 0, "processes: 4 over mpi");
    check_near_run(quad, alone, 8);
}

/* A run of two processes goes on in one, and the other way round; and in two to the same bits. */
static void test_resume(void) {
    const char *pair = folder("pair8"), *rest = folder("rest"), *to_one = folder("to_one");
    const char *alone = folder("alone8"), *to_two = folder("to_two");
    char fourth[1200], of_one[1200];
    snprintf(fourth, sizeof fourth, "%s/checkpoints/step_00000004", pair);
    snprintf(of_one, sizeof of_one, "%s/checkpoints/step_00000004", alone);
    check_case("resume in two processes");
    processes(two);
    expect(train_to(pair, "8", "--save-every", "4"), 0, "step 0008");
    expect(train_to(rest, "8", "--resume", fourth), 0, "resumed after step 4 of 8");
    check_same_run(pair, rest, 5, 8);
    check_case("resume of two processes in one");
    processes(one);
    expect(train_to(to_one, "8", "--resume", fourth), 0, "resumed after step 4 of 8");
    expect(train_to(alone, "8", "--save-every", "4"), 0, "step 0008");
    for (int step = 5; step <= 8; step++) {
        double x = atof(logged(to_one, step, 1)), y = atof(logged(pair, step, 1));
        CHECK(x > 0 && fabs(x - y) <= 1e-5 * y, "step %d: loss %g and %g", step, x, y);
    }
    check_case("resume of one process in two");
    processes(two);
    expect(train_to(to_two, "8", "--resume", of_one), 0, "resumed after step 4 of 8");
    for (int step = 5; step <= 8; step++) {
        double x = atof(logged(to_two, step, 1)), y = atof(logged(alone, step, 1));
        CHECK(x > 0 && fabs(x - y) <= 1e-5 * y, "step %d: loss %g and %g", step, x, y);
    }
}

/* Layers that differ have parameters of different sizes to share, and k and v of their own. */
static void test_pattern(void) {
    const char *out[] = {folder("pattern"), folder("pattern1"), folder("pattern_divided")};
    static const char list[] = "cmp+slc,window";
    check_case("layers that differ");
    processes(one);
    expect(train_to(out[1], "8", "--attention", list), 0, "attention cmp+slc,window");
    processes(two);
    expect(train_to(out[0], "8", "--attention", list), 0, "processes: 2 over mpi");
    check_near_run(out[0], out[1], 8);
    expect(train("--data", text, "--out-dir", out[2], "--steps", "8", "--eval-every", "4",
                 "--attention", list, "--context-parallel", "2", NULL),
           0, "processes: 2 over mpi, 4 rows for each 2");
    check_near_run(out[2], out[1], 8);
}

/* Where documents are isolated the processes have different numbers of labels. */
static void test_options(void) {
    const char *out[] = {folder("options"), folder("options1")};
    check_case("bf16, documents, traces");
    for (int i = 0; i < 2; i++) {
        processes(i ? one : two);
        if (!i) setenv("NSA_TRACE_DDP_BUCKETS", "1", 1);
        expect(train("--data", text, "--out-dir", out[i], "--steps", "3", "--ddp-compress", "bf16",
                     "--isolate-documents", "--ddp", i ? "0" : "1", NULL),
               0, i ? "step 0003" : "| bucket 0 | started");
        unsetenv("NSA_TRACE_DDP_BUCKETS");
        CHECK(i || strstr(output, "as bf16"), "nothing said of bf16: %s", output);
    }
    double x = atof(logged(out[0], 1, 1)), y = atof(logged(out[1], 1, 1));
    double nx = atof(logged(out[0], 1, 4)), ny = atof(logged(out[1], 1, 4));
    CHECK(x > 0 && fabs(x - y) <= 1e-5 * y, "loss %g and %g", x, y);
    CHECK(ny > 0 && fabs(nx - ny) <= 0x1p-8 * ny, "gradient norm %g and %g", nx, ny);
}

/* ---- Divided sequences --------------------------------------------------------------------- */

static int divide(const char *out, const char *by, const char *more, const char *value,
                  const char *also) {
    return train("--data", text, "--out-dir", out, "--steps", "8", "--eval-every", "4",
                 "--context-parallel", by, more, value, also, NULL);
}

static void check_near_steps(const char *a, const char *b, int first) {
    for (int step = first; step <= 8; step++) {
        double x = atof(logged(a, step, 1)), y = atof(logged(b, step, 1));
        CHECK(x > 0 && fabs(x - y) <= 1e-5 * y, "step %d: loss %g and %g", step, x, y);
    }
}

/* A checkpoint knows nothing of how its run was divided. */
static void test_divided_resume(const char *alone) {
    const char *quad = folder("divided4"), *to_one = folder("divided_to_one");
    const char *to_two = folder("one_to_divided");
    char fourth[1200], of_one[1200];
    snprintf(fourth, sizeof fourth, "%s/checkpoints/step_00000004", quad);
    snprintf(of_one, sizeof of_one, "%s/checkpoints/step_00000004", alone);
    check_case("sequences over four processes, then one");
    processes(four);
    expect(divide(quad, "4", "--save-every", "4", NULL), 0,
           "processes: 4 over mpi, 4 rows for each 4, and of a row 16 tokens each");
    check_near_run(quad, alone, 8);
    processes(one);
    expect(train_to(to_one, "8", "--resume", fourth), 0, "resumed after step 4 of 8");
    check_near_steps(to_one, alone, 5);
    check_case("one process, then sequences over two");
    processes(two);
    expect(divide(to_two, "2", "--resume", of_one, NULL), 0, "resumed after step 4 of 8");
    check_near_steps(to_two, alone, 5);
}

static void test_divided(void) {
    const char *alone = folder("whole"), *pair = folder("divided"), *again = folder("divided2");
    const char *a = folder("da.safetensors"), *b = folder("db.safetensors");
    const char *both = folder("divided_twice");
    check_case("sequences over two processes");
    processes(one);
    expect(train_to(alone, "8", "--save-every", "4"), 0, "step 0008");
    processes(two);
    expect(divide(pair, "2", "--save", a, NULL), 0, "processes: 2 over mpi, 4 rows for each 2");
    check_near_run(pair, alone, 8);
    check_case("bits of two divided runs");
    expect(divide(again, "2", "--save", b, NULL), 0, "step 0008");
    check_same_run(pair, again, 1, 8);
    check_same_file(a, b);
    check_case("sequences over two of four processes, checkpointing");
    processes(four);
    expect(divide(both, "2", "--gc", "--sample", "4"), 0,
           "processes: 4 over mpi, 2 rows for each 2");
    check_near_run(both, alone, 8);
    test_divided_resume(alone);
}

/* MiB that a process of `count` holds beside parameters, for a sequence of 131,072 tokens. */
static double planned(const char *count, const char *gc, const char *out) {
    const char *const words[] = {"\n  all ", "\n  weights ", "\n  gradients ", "\n  moments "};
    double held = 0;
    int code =
        train("--dataset", "synthetic", "--out-dir", out, "--context-parallel", count, gc,
              "--check", "--dim", "64", "--layers", "4", "--kv-groups", "1", "--d-k", "16", "--d-v",
              "16", "--nsa-l", "32", "--nsa-d", "16", "--nsa-l-sel", "64", "--nsa-n-sel", "16",
              "--nsa-w", "512", "--batch-size", "1", "--seq-len", "131072", "--threads", "1", NULL);
    for (int i = 0; i < 4; i++) {
        const char *at = strstr(output, words[i]);
        if (CHECK(code == 0 && at, "exit code %d, no %s: %s", code, words[i] + 3, output))
            held += (i ? -1 : 1) * atof(at + strlen(words[i]));
    }
    return held;
}

/* Of one process's memory, four that divide its sequence hold little more than a quarter each. */
static void test_share(void) {
    static const char *const how[] = {"--no-gc", "--gc", "--gc=selective"};
    const char *out = folder("planned");
    for (int i = 0; i < 3; i++) {
        check_case("memory of a divided sequence, %s", how[i]);
        processes(one);
        double whole = planned("1", how[i], out);
        processes(four);
        double part = planned("4", how[i], out);
        CHECK(part > whole / 4 && part <= 0.30 * whole, "%g of %g MiB, %g", part, whole,
              part / whole);
    }
}

/* Where documents are isolated, and labels differ; and statistics, of rank 0's tokens. */
static void test_divided_documents(void) {
    const char *pair = folder("divided_documents"), *alone = folder("documents");
    check_case("documents over two processes");
    processes(two);
    expect(divide(pair, "2", "--isolate-documents", "--gc=selective", NULL), 0, "step 0008");
    processes(one);
    expect(train_to(alone, "8", "--isolate-documents", NULL), 0, "step 0008");
    check_near_run(pair, alone, 8);
}

static void test_divided_refusals(void) {
    const char *out = folder("undivided");
    check_case("what cannot be divided");
    processes(one);
    expect(divide(out, "2", NULL, NULL, NULL), 2,
           "runtime.context_parallel = 2: must divide the number of processes, and there is 1");
    processes(four);
    expect(divide(out, "3", NULL, NULL, NULL), 2, "runtime.context_parallel = 3: must divide");
    expect(divide(out, "4", "--seq-len", "60", NULL), 2,
           "train.seq_len = 60: must be a multiple of 8, twice runtime.context_parallel");
    expect(divide(out, "2", "--batch-size", "3", NULL), 2,
           "train.batch_size = 3: must be a multiple of 2: 4 processes in groups of");
    expect(divide(out, "0", NULL, NULL, NULL), 2, "--context-parallel 0: must be an integer");
}

/* ---- Ends ---------------------------------------------------------------------------------- */

static bool has_rank(const char *pid, const char *rank) {
    char path[300], words[1 << 16];
    snprintf(path, sizeof path, "/proc/%s/environ", pid);
    FILE *file = fopen(path, "rb");
    size_t bytes = file ? fread(words, 1, sizeof words - 1, file) : 0;
    if (file) fclose(file);
    words[bytes] = 0;
    for (size_t i = 0; i < bytes; i += strlen(words + i) + 1) {
        const char *at = strstr(words + i, "_RANK=");
        if (at && (at - (words + i) == 3 || !strncmp(words + i, "OMPI_COMM_WORLD_RANK=", 21)) &&
            !strcmp(at + 6, rank))
            return true;
    }
    return false;
}

static bool descends(const char *pid, pid_t from) {
    char path[300], line[1024];
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    FILE *file = fopen(path, "r");
    const char *at = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    if (file) fclose(file);
    if (at) sscanf(at + 1, " %*c %d", &parent);
    return parent == from;
}

/* The process of this rank, a child of the launcher. */
static pid_t find_rank(pid_t from, const char *rank) {
    pid_t found = 0;
    DIR *d = opendir("/proc");
    for (struct dirent *e; d && !found && (e = readdir(d));)
        if (isdigit((unsigned char)e->d_name[0]) && descends(e->d_name, from) &&
            has_rank(e->d_name, rank))
            found = (pid_t)atoi(e->d_name);
    if (d) closedir(d);
    return found;
}

/* Starts a run that has no end, and gives a process of it a signal after its third step. */
static int signal_rank(const char *out, const char *rank, int number, const char *timeout) {
    const char *options[] = {"--data",        text,    "--out-dir", out, "--steps", "1000000",
                             "--ddp-timeout", timeout, NULL};
    pid_t child = start(small, options);
    int waited = 0;
    for (; waited < PATIENCE && !strcmp(logged(out, 3, 1), "none"); waited += 20) sleep_ms(20);
    pid_t process = find_rank(child, rank);
    CHECK(process > 0, "no process of rank %s below %d", rank, (int)child);
    kill(process > 0 ? process : child, process > 0 ? number : SIGTERM);
    return await(child);
}

/* One word or the other. */
static void expect_verdict(const char *out, const char *word, const char *other) {
    char path[1200];
    size_t bytes;
    snprintf(path, sizeof path, "%s/metrics.json", out);
    char *metrics = test_read(path, &bytes);
    CHECK(metrics && (strstr(metrics, word) || strstr(metrics, other)),
          "metrics.json lacks \"%s\" and \"%s\": %s", word, other, metrics);
    free(metrics);
}

static void test_told(void) {
    const char *out = folder("told");
    check_case("SIGTERM to rank 1");
    expect(signal_rank(out, "1", SIGTERM, LONG), 128 + SIGTERM, "stopped by SIGTERM after step");
    expect_verdict(out, "stopped by SIGTERM", "\"stopped by SIGTERM");
    const char *at = strstr(output, "SIGTERM after step ");
    char steps[32];
    snprintf(steps, sizeof steps, "%d", at ? atoi(at + 19) + 1 : 0);
    expect(train("--data", text, "--out-dir", out, "--steps", steps, "--resume", NULL), 0,
           "resumed after step");
}

static void test_stopped(void) {
    const char *out = folder("halted");
    check_case("SIGSTOP to rank 1");
    int code = signal_rank(out, "1", SIGSTOP, SHORT);
    CHECK(code != 0, "exit code 0");
    expect(code, code, "rank 0: rank 1: no answer for " SHORT " s");
    expect_verdict(out, "rank 1: no answer for " SHORT " s", "rank 1 ends the run");
}

static void test_first_stopped(void) {
    check_case("SIGSTOP to rank 0");
    int code = signal_rank(folder("halted0"), "0", SIGSTOP, SHORT);
    CHECK(code != 0, "exit code 0");
    expect(code, code, "rank 1: rank 0: no answer for " SHORT " s");
}

static void test_killed(void) {
    const char *out = folder("killed");
    check_case("SIGKILL to rank 1");
    int code = signal_rank(out, "1", SIGKILL, SHORT);
    CHECK(code != 0, "exit code 0");
    expect(code, code, "rank 1"); /* the launcher says it */
    /* Whether the launcher is faster than the timeout. */
    expect_verdict(out, "ended by SIGTERM while waiting for rank 1",
                   "rank 1: no answer for " SHORT " s");
}

/* A shard with one token that is none: the process that comes to it says so, the other hears of
   it. */
static void test_failure(void) {
    enum { HEADER = 512, TOKENS = 6000, BAD = 2500 }; /* in uint16; in the 68th row that is read */
    static uint16_t words[HEADER + TOKENS];
    const int32_t head[] = {20240520, 1, TOKENS};
    const char *bin = folder("one.bin"), *out = folder("failed");
    check_case("a process that fails");
    memcpy(words, head, sizeof head);
    for (int i = 0; i < TOKENS; i++) words[HEADER + i] = (uint16_t)(i * 7 % 251);
    words[HEADER + BAD] = 60000;
    test_write(bin, words, sizeof words);
    int code = train("--data", bin, "--dataset", "bin", "--out-dir", out, "--steps", "100", NULL);
    CHECK(code != 0, "exit code 0");
    expect(code, code, "one.bin: token 60000");
    expect(code, code, "ends the run: ");
    expect_verdict(out, "failed: ", "one.bin");
}

/* ---- Refusals ------------------------------------------------------------------------------ */

/* Two programs in one launch, of which the second has another seed. */
static void test_differing(void) {
    const char *yaml = folder("small.yaml"), *out = folder("differ");
    const char *single[] = {two[0], two[1], "1", NULL};
    const char *options[] = {"--config",  yaml, "--data", text,       "--out-dir", out,      ":",
                             two[1],      "1",  program,  "--config", yaml,        "--data", text,
                             "--out-dir", out,  "--seed", "5",        NULL};
    check_case("settings that differ");
    test_write_text(yaml, "train:\n  steps: 3\n");
    processes(single);
    expect(await(start(NULL, options)), 2, "train.seed of rank 1 is not that of the other");
}

static void test_refusals(void) {
    const char *out = folder("refused");
    char three[] = "3";
    const char *odd[] = {two[0], two[1], three, NULL};
    processes(odd);
    check_case("refusals");
    expect(train_to(out, "3", "--ddp", "-1"), 2, "must be a multiple of the 3 processes");
    processes(two);
    expect(train_to(out, "3", "--ddp", "0"), 2, "--ddp 0, but there are 2 processes");
    expect(train_to(folder("used"), "3", "--seed", "1"), 0, "step 0003");
    expect(train_to(folder("used"), "3", "--seed", "1"), 2, "an earlier run is in this folder");
    expect(train_to(out, "3", "--nsa-d", "3"), 2, "nsa.d");
    processes(one);
    expect(train_to(out, "3", "--ddp", "1"), 2, "mpirun");
    setenv("WORLD_SIZE", "2", 1);
    setenv("RANK", "0", 1);
    expect(train_to(out, "3", "--ddp", "-1"), 2, "mpirun");
    unsetenv("WORLD_SIZE");
    unsetenv("RANK");
}

/* Nearly all of their time passes in waiting: each in a process and a folder of its own. */
static void test_ends(void) {
    static void (*const ends[])(void) = {test_told,   test_stopped, test_first_stopped,
                                         test_killed, test_failure, test_differing};
    enum { ENDS = sizeof ends / sizeof *ends };
    pid_t children[ENDS];
    char name[16];
    fflush(stdout);
    for (int i = 0; i < ENDS; i++) {
        snprintf(name, sizeof name, "end%d", i);
        test_mkdir(name);
        if ((children[i] = fork())) continue;
        const char *own = folder(name);
        snprintf(test_root, sizeof test_root, "%s", own);
        processes(two);
        ends[i]();
        int failures = check_done("test_mpi");
        fflush(stdout);
        _exit(failures);
    }
    for (int i = 0; i < ENDS; i++) {
        int status = 1;
        waitpid(children[i], &status, 0);
        CHECK(status == 0, "end %d: status %d", i, status);
    }
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s trains|context|ends train_125m mpirun -n\n", argv[0]);
        return 2;
    }
    program = argv[2];
    two[0] = four[0] = argv[3];
    two[1] = four[1] = argv[4];
    two[2] = "2";
    four[2] = "4";
    test_begin();
    text = folder("text");
    write_english(text);
    if (!strcmp(argv[1], "trains")) {
        test_same();
        test_pattern();
        test_resume();
        test_options();
        test_refusals();
    } else if (!strcmp(argv[1], "context")) {
        test_divided();
        test_share();
        test_divided_documents();
        test_divided_refusals();
    } else {
        test_ends();
    }
    return test_end("test_mpi");
}

/* test_train.c - train_tiny as its users run it: a run that learns, one that is resumed to the same
   bits, one that is told to stop, the configs, and what is refused. Arguments: the program, the
   folder of the configs. Twins: train.c, train_tiny's main.c. */
#include "program_test.h"

static const char *configs;

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

/* The number behind a word of a text; -1: it is not there. */
static double number_after(const char *text, const char *word) {
    const char *at = text ? strstr(text, word) : NULL;
    return at ? atof(at + strlen(word)) : -1;
}

/* ---- Precision ----------------------------------------------------------------------------- */

static int train_in(const char *precision, const char *out, const char *more, const char *value) {
    return train("--data", test_path("text"), "--steps", "30", "--out-dir", out, "--precision",
                 precision, more, value, NULL);
}

static void test_precision(void) {
    static const char *const names[] = {"fp32", "bf16", "fp16"};
    double last[3];
    for (int i = 0; i < 3; i++) {
        const char *out = test_path(names[i]);
        check_case("--precision %s", names[i]);
        expect(train_in(names[i], out, "--seed", "3"), 0, "step 0030");
        last[i] = atof(logged(out, 30, 1));
        CHECK(last[i] > 1 && fabs(last[i] - last[0]) < 0.02, "the last loss is %g, in fp32 %g",
              last[i], last[0]);
        CHECK(i == 0 || last[i] != last[0], "the precision changes nothing");
    }
    check_case("precision of a file");
    test_write_text(test_path("half.yaml"), "runtime:\n  precision: bf16\ntrain:\n  steps: 2\n");
    expect(train("--config", test_path("half.yaml"), "--data", test_path("text"), "--out-dir",
                 test_path("half"), NULL),
           0, "computes in fp32");
}

/* The last of the first steps that the output says was skipped. */
static int last_skipped(int steps) {
    int last = 0, step;
    const char *line = strstr(output, "\nstep 0001 |");
    for (; line; line = strchr(line + 1, '\n')) {
        const char *skipped = strstr(line, "step skipped");
        if (sscanf(line, "\nstep %d | loss", &step) != 1 || step > steps || !skipped) continue;
        if (skipped < strchr(line + 1, '\n')) last = step;
    }
    return last;
}

/* Few tokens make large gradients: some overflow at the first scale. Such a step leaves everything
   but the scale as it was, and a run that goes on knows the scale. */
static void test_overflow(void) {
    const char *out = test_path("overflow"), *rest = test_path("more"), *text = test_path("text");
    char tenth[1200];
    size_t bytes;
    check_case("fp16 overflow");
    snprintf(tenth, sizeof tenth, "%s/checkpoints/step_00000010", out);
    expect(train("--data", text, "--out-dir", out, "--precision", "fp16", "--batch-size", "1",
                 "--seq-len", "2", "--steps", "40", "--save-every", "10", "--keep-checkpoints", "0",
                 NULL),
           0, "overflow: step skipped");
    int last = last_skipped(10);
    expect(train("--data", text, "--out-dir", rest, "--precision", "fp16", "--batch-size", "1",
                 "--seq-len", "2", "--steps", "40", "--resume", tenth, NULL),
           0, "resumed after step 10");
    check_same_run(out, rest, 11, 40);
    strcat(tenth, "/state.json");
    char *state = test_read(tenth, &bytes);
    double skipped = number_after(state, "\"skipped_steps\":");
    CHECK(skipped >= 1 && skipped < 10, "%g steps skipped", skipped);
    CHECK(number_after(state, "\"loss_scale\":") == 65536 / pow(2, skipped), "the scale is %g",
          number_after(state, "\"loss_scale\":"));
    CHECK(number_after(state, "\"scaler_good_steps\":") == 10 - last, "%g good steps after step %d",
          number_after(state, "\"scaler_good_steps\":"), last);
    free(state);
}

/* ---- Memory -------------------------------------------------------------------------------- */

typedef struct megabytes {
    double table, measured; /* that --check prints; the most that the process held */
} megabytes;

static megabytes memory_of(const char *name, const char *const *options) {
    const char *out = test_path(name), *more[ARGUMENTS] = {"--out-dir", out, "--data"};
    char path[1200];
    size_t bytes;
    int count = 3;
    megabytes m;
    more[count++] = test_path("text");
    for (; *options; options++) more[count++] = *options;
    more[count] = "--check";
    expect(await(start(small, more)), 0, "memory, MiB");
    m.table = number_after(output, "\n  all ");
    more[count] = NULL;
    expect(await(start(small, more)), 0, "step 0002");
    snprintf(path, sizeof path, "%s/metrics.json", out);
    char *metrics = test_read(path, &bytes);
    m.measured = number_after(metrics, "\"peak_memory_mib\":");
    free(metrics);
    return m;
}

/* A range of all layers is all layers. */
static void test_range(void) {
    static const char *const forms[] = {"--gc=true", "--gc=0..1", "--gc=0..0"};
    double table[3];
    check_case("a range of layers");
    for (int i = 0; i < 3; i++) {
        const char *options[] = {"--data", test_path("text"), forms[i], "--check", NULL};
        expect(await(start(small, options)), 0, "memory, MiB");
        table[i] = number_after(output, "\n  activations ");
    }
    CHECK(table[1] == table[0] && table[2] > table[0],
          "activations: %g MiB, %g of both layers, %g of one", table[0], table[1], table[2]);
}

/* What a large model takes more than a small one: the program itself is in both. One thread: each
   takes a MiB or two more while a library multiplies, and of a small product less. */
static void test_memory(void) {
    static const char *const forms[] = {"--gc=false", "--gc=true", "--gc=selective", "--gc=1..2"};
    const char *least[] = {"--steps", "2", "--threads", "1", NULL};
    megabytes base = memory_of("least", least);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const char *large[] = {"--dim",   "256",    "--layers",     "4",           "--heads",
                               "8",       "--d-k",  "32",           "--d-v",       "32",
                               "--steps", "2",      "--seq-len",    "256",         "--threads",
                               "1",       forms[i], "--save-every", i ? "0" : "1", NULL};
        char name[16];
        snprintf(name, sizeof name, "large%zu", i);
        check_case("memory, %s", forms[i]);
        megabytes x = memory_of(name, large);
        double table = x.table - base.table, measured = x.measured - base.measured;
        CHECK(table > 40 && fabs(table - measured) <= 0.05 * measured,
              "the table says %.1f MiB more than for a small model, measured are %.1f", table,
              measured);
    }
}

/* ---- Ends ---------------------------------------------------------------------------------- */

static void test_stop(void) {
    const char *out = test_path("stopped"), *text = test_path("text");
    const char *options[] = {"--data", text, "--out-dir", out, "--steps", "1000000", NULL};
    char path[1200], steps[32];
    int waited = 0, code, done = 0;
    size_t bytes;
    check_case("SIGTERM");
    pid_t child = start(small, options);
    for (; waited < PATIENCE && !strcmp(logged(out, 3, 1), "none"); waited += 20) sleep_ms(20);
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

static void write_shard(const char *path) {
    enum { HEADER = 512, TOKENS = 20000 }; /* in uint16 */
    static uint16_t words[HEADER + TOKENS];
    const int32_t head[] = {20240520, 1, TOKENS};
    memcpy(words, head, sizeof head);
    for (int i = 0; i < TOKENS; i++) words[HEADER + i] = (uint16_t)(i * 7 % 50257);
    test_write(path, words, sizeof words);
}

static void test_configs(void) {
    static const struct {
        const char *file, *parameters, *keys;
    } known[] = {{"train_showcase.yaml", "parameters: 254499\n", "keys read by the last token"},
                 {"m7c_3090_smoke.yaml", "parameters: 4659858\n",
                  "of 1024: 127 compressed + 256 selected + 256 window = 639 (62 % of dense)\n"},
                 {"m7c_125m_2k_test.yaml", "parameters: 78295332\n", "keys read by the last token"},
                 {"m7c_125m_2xa100_production.yaml", "parameters: 78295332\n",
                  "of 2048: 127 compressed + 1024 selected + 512 window = 1663 (81 % of dense)\n"},
                 {"gpt2_125m.yaml", "parameters: 116499492\n", "keys read by the last token"},
                 {"quickstart.yaml", "parameters: 443334\n", "keys read by the last token"}};
    write_shard(test_path("shard.bin"));
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        char path[1200];
        snprintf(path, sizeof path, "%s/%s", configs, known[i].file);
        const char *data = strstr(path, "gpt2") ? test_path("shard.bin") : test_path("text");
        const char *options[] = {"--config", path, "--data", data, "--check", NULL};
        check_case("%s --check", known[i].file);
        int code = await(start(NULL, options));
        expect(code, 0, known[i].parameters);
        expect(code, 0, known[i].keys);
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
    expect(train("--data", text, "--out-dir", "/proc/nowhere", NULL), 2, "/proc/nowhere");
    expect(
        train("--data", text, "--out-dir", test_path("unsaved"), "--save", test_path("no/x"), NULL),
        2, "train.save: ");
    expect(train("--data", text, "--out-dir", test_path("unsaved too"), "--save", test_path("."),
                 NULL),
           2, "is a folder, must be a file");
    expect(train("--data", text, "--out-dir", test_path("new"), "--resume", NULL), 2, "new");
    expect(train("--help", NULL), 0, "--accum-batches");
    check_case("refusals of --check");
    expect(train("--data", text, "--check", "--vocab-size", "100", NULL), 2,
           "model.vocab_size = 100");
    expect(train("--data", test_path("nowhere"), "--check", NULL), 2, "nowhere");
    expect(train("--check", NULL), 2, "--dataset synthetic");
    expect(train("--data", text, "--check", "--out-dir", test_path("refused"), NULL), 2,
           "an earlier run is in");
    if (geteuid()) /* root may write anywhere, as far as access() can tell */
        expect(train("--data", text, "--check", "--out-dir", "/proc/nowhere/x", NULL), 2, "/proc");
    test_write_text(test_path("plain"), "no folder");
    expect(train("--data", text, "--check", "--out-dir", test_path("plain"), NULL), 2,
           "is a file, must be a folder");
    expect(train("--data", text, "--check", "--batch-size", "65536", "--seq-len", "1048576", NULL),
           2, "train.batch_size x train.seq_len");
    expect(train("--data", text, "--check", "--out-dir", test_path("unmade/x"), NULL), 0, "data: ");
    CHECK(access(test_path("unmade"), F_OK), "--check made a folder");
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
    test_precision();
    test_overflow();
    test_memory();
    test_range();
    test_stop();
    test_full_disk();
    test_configs();
    test_refusals();
    return test_end("test_train");
}

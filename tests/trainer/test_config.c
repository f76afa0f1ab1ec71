/* test_config.c - settings: the four published configs, the order of sources, every kind of error
   with its file, line and key, help and JSON from the same table. */
#include <jansson.h>

#include "config/config.h"
#include "config/config_table.h"
#include "nsa.h"
#include "trainer_test.h"

static config settings;
static fault why;

/* What a checkpoint would give. */
static config kept_settings;
static const char *no_checkpoint; /* not NULL: why there is none */

static bool recall(const config *asked, config *kept, fault *f) {
    (void)asked;
    if (no_checkpoint) return fault_set(f, "%s", no_checkpoint);
    *kept = kept_settings;
    return true;
}

/* config_load with the words of `line` as arguments. */
static option_outcome load(const char *line) {
    static const char *const no_effect[] = {"runtime.gradient_checkpointing", NULL};
    static char words[4096];
    config_program program = {
        .name = "test", .summary = "a test", .no_effect = no_effect, .recall = recall};
    listener notes = test_notes();
    char *argv[64] = {"test", "--dataset", "synthetic"};
    int argc = strstr(line, "--dataset") || strstr(line, "--data") ? 1 : 3;
    snprintf(words, sizeof words, "%s", line);
    for (char *word = strtok(words, " "); word && argc < 63; word = strtok(NULL, " "))
        argv[argc++] = word;
    return config_load(&settings, &program, argc, argv, &notes, &why);
}

static void refuse(const char *line, const char *words) {
    check_case("%s", line);
    TEST_FAULT(load(line) != OPTION_ERROR, &why, words);
}

static void accept(const char *line) {
    check_case("%s", line);
    option_outcome outcome = load(line);
    CHECK(outcome == OPTION_OK, "refused: %s", why.text);
}

/* A config file of this text, as "--config PATH". */
static const char *file(const char *text) {
    static char line[1100];
    test_write_text(test_path("c.yaml"), text);
    snprintf(line, sizeof line, "--config %s", test_path("c.yaml"));
    return line;
}

/* ---- The published configs ---- */

typedef struct expected {
    const char *key, *value[4];
} expected;

/* Columns: train_showcase, m7c_3090_smoke, m7c_125m_2k_test, m7c_125m_2xa100_production. */
static const expected published[] = {
    {"model.dim", {"128", "256", "768", "768"}},
    {"model.n_layers", {"1", "6", "12", "12"}},
    {"model.n_heads", {"8", "8", "12", "12"}},
    {"model.n_kv_groups", {"2", "2", "2", "2"}},
    {"model.d_k", {"16", "32", "64", "64"}},
    {"model.d_v", {"16", "32", "64", "64"}},
    {"nsa.l", {"16", "16", "32", "32"}},
    {"nsa.d", {"8", "8", "16", "16"}},
    {"nsa.l_sel", {"32", "32", "64", "64"}},
    {"nsa.n_sel", {"8", "8", "16", "16"}},
    {"nsa.w", {"64", "256", "512", "512"}},
    {"nsa.phi", {"avg", "avg", "avg", "avg"}},
    {"nsa.gate", {"sigmoid", "sigmoid", "sigmoid", "sigmoid"}},
    {"model.attention", {"nsa", "nsa", "nsa", "nsa"}},
    {"data.tokenizer", {"byte", "byte", "byte", "byte"}},
    {"runtime.device", {"auto", "cuda", "cuda", "cuda"}},
    {"runtime.precision", {"fp32", "fp16", "bf16", "bf16"}},
    {"runtime.use_flash", {"false", "true", "true", "true"}},
    {"runtime.use_triton_sel", {"false", "false", "false", "false"}},
    {"runtime.gradient_checkpointing", {"false", "false", "true", "true"}},
    {"train.steps", {"200", "200", "100", "50000"}},
    {"train.seq_len", {"128", "1024", "2048", "2048"}},
    {"train.batch_size", {"8", "1", "4", "2"}},
    {"train.accumulate_grad_batches", {"1", "8", "1", "2"}},
    {"train.lr", {"0.0003", "0.0002", "0.0002", "0.0002"}},
    {"train.lr_schedule", {"cosine", "cosine", "cosine", "cosine"}},
    {"train.warmup_steps", {"0", "20", "10", "2000"}},
    {"train.weight_decay", {"0", "0.01", "0.01", "0.01"}},
    {"train.grad_clip", {"1", "1", "1", "1"}},
    {"train.log_every", {"20", "20", "5", "20"}},
    {"train.eval_every", {"100", "0", "50", "1000"}},
    {"train.save_every", {"1000", "0", "0", "5000"}},
    {"train.seed", {"1337", "1337", "1337", "1337"}},
    {"train.out_dir",
     {"artifacts/train_showcase", "artifacts/3090_smoke", "artifacts/m7c_125m_2k_test",
      "artifacts/m7c_125m_2xa100_prod"}},
};

static void test_published(const char *folder) {
    static const char *const names[] = {"train_showcase", "m7c_3090_smoke", "m7c_125m_2k_test",
                                        "m7c_125m_2xa100_production"};
    char line[1024], value[1024];
    for (int n = 0; n < 4; n++) {
        snprintf(line, sizeof line, "--config %s/%s.yaml", folder, names[n]);
        accept(line);
        for (size_t i = 0; i < sizeof published / sizeof published[0]; i++) {
            option_value(&settings, config_find(published[i].key), value, sizeof value);
            CHECK(!strcmp(value, published[i].value[n]), "%s is %s, must be %s", published[i].key,
                  value, published[i].value[n]);
        }
        CHECK(strstr(test_said, "runtime.use_flash") && strstr(test_said, "has no effect"),
              "nothing said of use_flash: %s", test_said);
    }
}

/* At the end of a row NSA reads at most a third of the keys that dense attention reads. */
static void test_quickstart(const char *folder) {
    char line[1024];
    snprintf(line, sizeof line, "--config %s/quickstart.yaml --data x", folder);
    accept(line);
    const config_nsa *n = &settings.nsa;
    int64_t tokens = settings.train.seq_len;
    int64_t keys = (tokens - n->l) / n->d + 1 + n->n_sel * n->l_sel + n->w;
    CHECK(tokens >= 512 && 3 * keys <= tokens, "%lld keys of %lld", (long long)keys,
          (long long)tokens);
}

/* ---- A resumed run ---- */

/* Saved and read, as a checkpoint's settings are. */
static void keep(const char *line) {
    accept(line);
    json_t *json = config_to_json(&settings);
    CHECK(json && config_from_json(&kept_settings, json, &why), "%s", why.text);
    json_decref(json);
}

static void test_recall(void) {
    char line[1300];
    check_case("settings of a checkpoint");
    keep("--lr 1e-3 --batch-size 6 --weight-decay 0.1 --eval-every 7 --data my/text --dim 64");
    accept("--resume");
    CHECK(settings.train.lr == 1e-3 && settings.train.batch_size == 6 &&
              settings.train.weight_decay == 0.1 && settings.train.eval_every == 7 &&
              settings.model.dim == 64 && !strcmp(settings.data.path, "my/text"),
          "what was not given is the checkpoint's");
    CHECK(config_from(&settings, "train.lr") == CONFIG_FROM_CHECKPOINT, "origin");
    accept("--resume --lr 2e-3");
    CHECK(settings.train.lr == 2e-3 && settings.train.batch_size == 6, "the command line changes");
    CHECK(strstr(test_said, "train.lr = 0.002 (command line --lr); in the checkpoint it is 0.001"),
          "a change is said: %s", test_said);
    CHECK(!strstr(test_said, "train.batch_size"), "only what changes: %s", test_said);
    snprintf(line, sizeof line, "%s --resume", file("train:\n  lr: 3e-3\n  log_every: 9\n"));
    accept(line);
    CHECK(settings.train.lr == 1e-3, "a file does not change a run that goes on");
    CHECK(strstr(test_said, "train.lr = 0.001, from the checkpoint;") &&
              strstr(test_said, "c.yaml:2 says 0.003, and is not used"),
          "that is said: %s", test_said);
    snprintf(line, sizeof line, "%s --resume", file("model:\n  dim: 32\n"));
    accept(line);
    CHECK(settings.model.dim == 32, "a file's model stands, to be refused");
    accept("--lr 5e-4");
    CHECK(settings.train.lr == 5e-4 && settings.train.batch_size == 8, "a new run recalls nothing");
    no_checkpoint = "nowhere: no checkpoint";
    refuse("--resume nowhere", "nowhere: no checkpoint");
    no_checkpoint = NULL;
    check_case("what changes");
    keep("--lr 1e-3 --data a");
    config before = kept_settings;
    accept("--lr 2e-3 --data b --threads 3");
    json_t *changes = config_changes(&before, &settings);
    char *text = json_dumps(changes, JSON_COMPACT | JSON_SORT_KEYS);
    CHECK(text && !strcmp(text, "{\"data.path\":[\"a\",\"b\"],\"train.lr\":[0.001,0.002]}"), "%s",
          text ? text : "none");
    free(text);
    json_decref(changes);
    check_case("text that is not UTF-8");
    keep("--data caf\xe9");
    CHECK(!strcmp(kept_settings.data.path, "caf\xe9"), "%s", kept_settings.data.path);
}

/* ---- Order and provenance ---- */

static void test_order(void) {
    const char *line = file("train:\n  steps: 7\n  lr: 1e-2\ntelemetry:\n  heartbeat_every: 5\n");
    char more[1200];
    accept(line);
    CHECK(settings.train.steps == 7 && settings.telemetry.heartbeat_every == 5, "file");
    CHECK(config_from(&settings, "train.steps") == CONFIG_FROM_FILE, "origin of steps");
    CHECK(config_from(&settings, "train.seed") == CONFIG_FROM_DEFAULT, "origin of seed");
    setenv("NSA_HEARTBEAT_EVERY", "9", 1);
    snprintf(more, sizeof more, "%s --steps 8 --lr=2e-2", line);
    accept(more);
    CHECK(settings.telemetry.heartbeat_every == 9, "environment above file");
    CHECK(settings.train.steps == 8 && settings.train.lr == 2e-2, "command line above file");
    CHECK(config_from(&settings, "train.lr") == CONFIG_FROM_COMMAND_LINE, "origin of lr");
    unsetenv("NSA_HEARTBEAT_EVERY");
    setenv("NSA_DDP_BUCKET_MB", "50", 1);
    accept("--ddp-bucket-mb 60");
    CHECK(settings.runtime.ddp_bucket_mb == 60, "command line above environment");
    unsetenv("NSA_DDP_BUCKET_MB");
    setenv("CONFIG", test_path("c.yaml"), 1);
    accept("");
    CHECK(settings.train.steps == 7, "CONFIG names the file");
    setenv("CONFIG", "Release", 1);
    refuse("", "Release: cannot open&(environment CONFIG)");
    refuse("--config nowhere.yaml", "nowhere.yaml: cannot open&No such file");
    unsetenv("CONFIG");
}

static void test_flags(void) {
    accept("--local-path a.jsonl --dataset fineweb_edu_local --no-gc --accum-batches 3 --ddp -1");
    CHECK(!strcmp(settings.data.path, "a.jsonl") && !settings.runtime.gradient_checkpointing &&
              settings.train.accumulate_grad_batches == 3 && settings.runtime.ddp == -1,
          "flags of the reports");
    CHECK(strstr(test_said, "runtime.gradient_checkpointing (command line --no-gc)"),
          "the program's own list of no effect: %s", test_said);
    accept("--data x --gc --synthetic-on-fail --resume --steps 3");
    CHECK(settings.runtime.gradient_checkpointing && settings.data.synthetic_on_fail &&
              settings.train.steps == 3 && !strcmp(settings.train.resume, "latest"),
          "switches, and --resume alone");
    accept("--resume a/b --save m.safetensors --data -");
    CHECK(!strcmp(settings.train.resume, "a/b") && !strcmp(settings.data.path, "-"), "paths");
    accept("--resume");
    CHECK(!strcmp(settings.train.resume, "latest"), "--resume as the last word");
    refuse("--stesp 4", "--stesp: unknown option&did you mean --steps");
    refuse("--no-steps", "--no-steps: unknown option");
    refuse("stray", "stray: belongs to no option");
    refuse("--lr", "--lr: its value is missing&a number above 0, at most 1");
    refuse("--no-gc=1", "--no-gc=1: takes no value");
    refuse("--prompt --check", "--prompt: its value is missing");
    accept("--sample 9 --prompt=--check");
    CHECK(!strcmp(settings.sample.prompt, "--check") && !settings.check, "a value behind =");
    refuse("--ddp 2", "--ddp 2: must be an integer in -1 .. 1");
    refuse("--precision fp8", "--precision fp8: must be one of: fp32, bf16, fp16");
    refuse("--steps 1e3", "--steps 1e3: must be an integer in 1 .. 1000000000");
    refuse("--steps 99999999999999999999", "must be an integer");
    refuse("--lr nan", "--lr nan: must be a number above 0");
    refuse("--lr 0x1p-3", "must be a number");
    refuse("--lr 0", "must be a number above 0, at most 1");
    refuse("--gc=maybe", "--gc maybe: must be true or false");
    accept("--gc=selective");
    CHECK(option_layers_of(settings.runtime.gradient_checkpointing).kind == OPTION_LAYERS_SELECTIVE,
          "selective");
    accept(file("model:\n  n_layers: 9\nruntime:\n  gradient_checkpointing: 2..8\n"));
    option_layers gc = option_layers_of(settings.runtime.gradient_checkpointing);
    CHECK(gc.kind == OPTION_LAYERS_RANGE && gc.first == 2 && gc.last == 8, "layers %d..%d",
          gc.first, gc.last);
    refuse("--gc=8..2", "--gc 8..2: must be true or false, selective, or layers");
    refuse("--gc=2..8x", "--gc 2..8x: must be");
    refuse("--layers 8 --gc=2..8", "gradient_checkpointing = 2..8&must name layers&model.n_layers");
}

static void test_environment(void) {
    setenv("NSA_HEARTBEAT", "1", 1);
    setenv("NSA_USE_FA2", "1", 1);
    setenv("NSA_PREFILL_BATCHED", "1", 1);
    setenv("NSA_TB_DISABLE", "1", 1);
    accept("");
    CHECK(strstr(test_said, "warning: environment NSA_HEARTBEAT: unknown name") &&
              strstr(test_said, "did you mean NSA_HEARTBEAT_EVERY"),
          "unknown name: %s", test_said);
    CHECK(strstr(test_said, "environment NSA_USE_FA2: accepted, has no effect") &&
              strstr(test_said, "environment NSA_PREFILL_BATCHED: accepted, has no effect"),
          "work-arounds: %s", test_said);
    CHECK(!strstr(test_said, "NSA_TB_DISABLE") && settings.telemetry.tb_disable, "known name");
    setenv("NSA_HEARTBEAT_EVERY", "often", 1);
    refuse("", "environment NSA_HEARTBEAT_EVERY=often: must be an integer in 0 ..");
    unsetenv("NSA_HEARTBEAT_EVERY");
    unsetenv("NSA_HEARTBEAT");
    unsetenv("NSA_USE_FA2");
    unsetenv("NSA_PREFILL_BATCHED");
    unsetenv("NSA_TB_DISABLE");
    setenv("WORLD_SIZE", "2", 1);
    setenv("RANK", "2", 1);
    refuse("", "runtime.rank = 2 (environment RANK): must be below runtime.world_size = 2");
    unsetenv("WORLD_SIZE");
    unsetenv("RANK");
}

/* ---- Names of nsa-vibe, and settings without effect ---- */

/* Its keys that choose fast paths are of kinds, not a list; the others are read, or named. */
static void test_other_keys(void) {
    accept(file("runtime:\n  use_flash: True\n  fa2_enabled: false\n  fa2_min_len_win: -1\n"
                "  fa2_min_len_cmp: 32\n  sel_triton_min_L: 4096\n  compile_cmp_win: false\n"
                "  sel_triton_group: true\n  compile_all: 1\ntrain:\n  max_grad_norm: 0.5\n"));
    CHECK(settings.train.grad_clip == 0.5, "max_grad_norm is grad_clip, %g",
          settings.train.grad_clip);
    CHECK(strstr(test_said, "runtime.sel_triton_min_L") &&
              strstr(test_said, "c.yaml:6): accepted, has no effect") &&
              strstr(test_said, "train.max_grad_norm") &&
              strstr(test_said, "c.yaml:11): accepted, read as train.grad_clip"),
          "each is said: %s", test_said);
    refuse(file("train:\n  grad_clip: 1\n  max_grad_norm: 0.5\n"),
           "c.yaml:3: train.max_grad_norm: given twice&line 2");
    refuse(file("train:\n  max_grad_norm: -1\n"), "c.yaml:2: train.max_grad_norm = -1: must be");
    refuse(file("runtime:\n  fa3: true\n"), "c.yaml:2: runtime.fa3: unknown key");
}

static void with(const char *variable, const char *value, const char *words) {
    setenv(variable, value, 1);
    if (words)
        refuse("", words);
    else
        accept("");
    unsetenv(variable);
}

static void test_other_variables(void) {
    check_case("variables of nsa-vibe");
    with("NSA_LR", "0.25", NULL);
    CHECK(settings.train.lr == 0.25, "lr %g", settings.train.lr);
    with("NSA_BATCH_SIZE", "6", NULL);
    CHECK(settings.train.batch_size == 6, "batch");
    with("NSA_SEQ_LEN", "96", NULL);
    CHECK(settings.train.seq_len == 96, "row");
    with("NSA_ACCUM", "3", NULL);
    CHECK(settings.train.accumulate_grad_batches == 3, "micro-batches");
    with("NSA_FWE_REPORT_DOCS", "7", NULL);
    CHECK(settings.data.report_docs == 7, "documents");
    with("NSA_LR", "fast", "environment NSA_LR=fast: must be a number above 0");
    setenv("NSA_NO_GC", "1", 1);
    accept(file("runtime:\n  gradient_checkpointing: true\n"));
    CHECK(!settings.runtime.gradient_checkpointing, "off by the environment");
    setenv("NSA_NO_GC", "0", 1);
    accept(file("runtime:\n  gradient_checkpointing: true\n"));
    CHECK(settings.runtime.gradient_checkpointing, "a variable that is off changes nothing");
    with("NSA_NO_GC", "perhaps", "environment NSA_NO_GC=perhaps: must be 1 or 0");
    with("NSA_GC_RANGE", "0:6", "NSA_GC_RANGE=0:6: not a setting here; instead of it: --gc=FIRST");
    with("NSA_ROPE_SCALE", "8.0", "--rope-scaling linear");
    with("NSA_STOPGRAD_GATES", "1", "gates are trained");
    with("NSA_STOPGRAD_GATES", "0", NULL);
    with("NSA_DTYPE", "bf16", "--precision");
    with("NSA_SEL_TRITON_BLOCK_DV", "64", NULL);
    CHECK(strstr(test_said, "NSA_SEL_TRITON_BLOCK_DV: accepted, has no effect"), "%s", test_said);
    with("NSA_SDPA_NO_FLASH", "1", NULL);
    CHECK(strstr(test_said, "NSA_SDPA_NO_FLASH: accepted, has no effect"), "%s", test_said);
}

/* Typed: refused. In a file, where it may wait for another command line: said. */
static void test_effects(void) {
    refuse("--tokenizer-path gpt2", "data.tokenizer_path = gpt2 (command line --tokenizer-path): "
                                    "has no effect with data.tokenizer = byte");
    accept("--tokenizer-path gpt2 --tokenizer gpt2");
    refuse("--rope-factor 4", "has no effect with model.rope_scaling = none");
    accept("--rope-factor 4 --rope-scaling linear");
    refuse("--rope-trained-context 512 --rope-scaling ntk", "with model.rope_scaling = ntk");
    refuse("--decay-fraction 0.1", "has no effect with train.lr_schedule = cosine");
    accept("--decay-fraction 0.2"); /* the default */
    accept("--decay-fraction 0.1 --lr-schedule wsd");
    refuse("--dataset synthetic --data x", "data.path = x&with data.dataset = synthetic");
    refuse("--dataset retrieval --fwe-report-docs 9", "data.fwe_report_docs = 9&retrieval");
    refuse("--dataset synthetic --isolate-documents",
           "data.isolate_documents = true&with data.dataset = synthetic");
    refuse("--dataset retrieval --synthetic-on-fail",
           "data.synthetic_on_fail = true&with data.dataset = retrieval");
    accept("--dataset synthetic --no-isolate-documents --no-synthetic-on-fail");
    accept("--data x --isolate-documents --synthetic-on-fail");
    accept("--ddp-compress bf16 --ddp-bucket-mb 25");
    listener notes = test_notes();
    config_say_alone(&settings, &notes);
    CHECK(!strcmp(test_said,
                  "runtime.ddp_compress = bf16 (command line --ddp-compress): no effect: "
                  "this is the only process\n"),
          "%s", test_said);
    refuse("--keep-every 5 --keep-checkpoints 0", "with train.keep_checkpoints = 0");
    accept("--data x --eval-every 0 --val-fraction 0.1"); /* is set aside for later evaluations */
    refuse("--temperature 0.5", "sample.temperature = 0.5&with sample.length = 0");
    refuse("--sample 9 --temperature 0 --top-k 4", "sample.top_k = 4&sample.temperature = 0");
    refuse("--sample 9 --repetition-window 4", "with sample.repetition_penalty = 1");
    accept("--attention full --nsa-n-sel 4"); /* which a checkpoint keeps */
    CHECK(strstr(test_said, "nsa.n_sel = 4 (command line --nsa-n-sel): has no effect with"), "%s",
          test_said);
    accept("--attention window --nsa-w 32");
    accept(file("model:\n  attention: full\n  rope_factor: 4\nnsa:\n  n_sel: 4\n"));
    CHECK(strstr(test_said, "warning: model.rope_factor = 4") &&
              strstr(test_said, "has no effect with model.rope_scaling = none") &&
              !strstr(test_said, "nsa.n_sel"),
          "a file's: %s", test_said);
}

/* ---- Files that are wrong ---- */

static void test_files(void) {
    refuse(file("train:\n  steps: 7\n  setps: 8\n"),
           "c.yaml:3: train.setps: unknown key&train.steps");
    refuse(file("trian:\n  steps: 7\n"), "c.yaml:1: trian: unknown section&model, nsa, data");
    refuse(file("train:\n\n  steps: many\n"),
           "c.yaml:3: train.steps = many: must be an integer in 1 .. 1000000000");
    refuse(file("train:\n  lr: 2\n"),
           "c.yaml:2: train.lr = 2: must be a number above 0, at most 1");
    refuse(file("train:\n  steps: '7'\n"),
           "c.yaml:2: train.steps is quoted text: must be an integer");
    refuse(file("data:\n  path: !env CORPUS\n"), "c.yaml:2: data.path has a tag, as !env: ");
    refuse(file("train:\n  steps:\n"), "c.yaml:2: train.steps is empty: must be an integer");
    refuse(file("train:\n  steps: [1]\n"), "c.yaml:2: train.steps is a list or a section");
    refuse(file("train:\n  steps: 7\n  steps: 8\n"), "c.yaml:3: train.steps: given twice&line 2");
    refuse(file("train:\n  steps: 7\nnsa:\n  l: 16\ntrain:\n  lr: 1e-3\n"),
           "c.yaml:5: train: given twice, first in line 1");
    refuse(file("train:\n  steps: 010\n"), "c.yaml:2: train.steps = 010: must be an integer");
    static char nested[40000];
    memset(nested, '[', sizeof nested - 1);
    refuse(file(nested), "c.yaml: longer than the 16384 bytes that are allowed");
    refuse(file("runtime:\n  use_flash: 2\n"),
           "c.yaml:2: runtime.use_flash = 2: must be true or false");
    refuse(file("nsa:\n  phi: mean\n"), "c.yaml:2: nsa.phi = mean: must be one of: avg, conv, mlp");
    refuse(file("runtime:\n  world_size: 2\n"), "c.yaml:2: runtime.world_size: unknown key");
    refuse(file("train: 7\n"), "c.yaml:1: train: must be a section");
    refuse(file("- a\n"), "c.yaml:1: must be sections");
    refuse(file("train:\n  steps: 7\n bad: [\n"), "c.yaml:&not YAML");
    refuse(file("train: {steps: 7}\n---\ntrain: {steps: 8}\n"), "a second document");
    refuse(file(""), "c.yaml:1: the file has no settings");
    refuse(file("? [a]\n: b\n"), "c.yaml:1:&unknown section");
    refuse(file("train:\n  out_dir: \"a\\0b\"\n"), "c.yaml:2: train.out_dir contains a zero byte");
    test_write(test_path("c.yaml"), "train:\n  steps: \xff\n", 18);
    char line[1100];
    snprintf(line, sizeof line, "--config %s", test_path("c.yaml"));
    refuse(line, "c.yaml:&not YAML");
    snprintf(line, sizeof line, "--config %s", test_root);
    refuse(line, "must be a plain file");
    char longest[2200];
    snprintf(longest, sizeof longest, "train:\n  out_dir: %01100d\n", 1);
    refuse(file(longest), "c.yaml:2: train.out_dir&text of at most 1023 bytes");
    accept(file("train: {steps: 7, out_dir: x y}\nsample:\n"));
    CHECK(settings.train.steps == 7 && !strcmp(settings.train.out_dir, "x y"), "flow style");
}

static void test_rules(void) {
    char place[1200];
    refuse(file("nsa:\n  l: 16\n  d: 5\n"),
           "nsa.d = 5 (&c.yaml:3): must divide nsa.l = 16 (&c.yaml:2)");
    refuse("--nsa-l-sel 36 --nsa-l 16 --nsa-d 8",
           "nsa.d = 8 (command line --nsa-d): must divide nsa.l_sel");
    refuse("--nsa-l 64 --nsa-d 8", "nsa.l = 64&must be at most nsa.l_sel = 32 (default)");
    refuse("--heads 7", "model.n_kv_groups = 2 (default): must divide model.n_heads = 7");
    refuse("--d-k 15", "model.d_k = 15&must be even");
    refuse("--rope-scaling yarn", "model.rope_trained_context = 0 (default): must be above 0");
    refuse("--dataset bin", "data.path = &must name a file or a folder&data.dataset = bin");
    refuse("--dataset auto", "data.path = &must name a file or a folder&--dataset synthetic&auto");
    snprintf(place, sizeof place, "--data %s --out-dir %s/.", test_root, test_root);
    refuse(place,
           "data.path = &must be another folder than that of the run's own files, train.out_dir");
    accept("--steps 10 --warmup-steps 10");
    CHECK(strstr(test_said, "train.warmup_steps = 10 with train.steps = 10"), "%s", test_said);
    accept("--steps 10 --warmup-steps 9");
    CHECK(!strstr(test_said, "warmup"), "%s", test_said);
    refuse("--nsa-n-sel 0", "--nsa-n-sel 0: must be an integer in 1 .. 65536");
    refuse("--nsa-n-sel 2", "nsa.n_sel = 2 (command line --nsa-n-sel): must have room for "
                            "nsa.n_init and nsa.n_local = 2");
    accept("--steps 6000 --device cuda --save-every 0");
    CHECK(strstr(test_said, "train.save_every = 0") &&
              strstr(test_said, "runtime.precision = fp32"),
          "warnings for long runs: %s", test_said);
    accept("--steps 4999 --device cuda");
    CHECK(!strstr(test_said, "warning"), "no warning for short runs: %s", test_said);
    config_place(&settings, config_find("train.steps"), place, sizeof place);
    CHECK(!strcmp(place, "command line --steps"), "%s", place);
}

/* ---- What is made from the table ---- */

/* Sends stdout to a file while `what` prints. */
static char *printed(void (*what)(void)) {
    size_t bytes;
    fflush(stdout);
    int before = dup(1);
    CHECK(freopen(test_path("out"), "w", stdout) != NULL, "redirect");
    what();
    fflush(stdout);
    dup2(before, 1);
    close(before);
    return test_read(test_path("out"), &bytes);
}

static void print_help(void) {
    CHECK(load("--help --nonsense") == OPTION_HELP, "--help wins");
}

static void print_settings(void) {
    config_print(&settings, stdout);
}

static void test_table(void) {
    char *help = printed(print_help);
    accept("--steps 12 --lr 1.5e-4");
    char *check = printed(print_settings);
    for (size_t i = 0; i < config_entry_count; i++) {
        const option *e = &config_entries[i];
        CHECK(!e->flag || strstr(help, e->flag + 2), "help lacks %s", e->flag);
        CHECK(!e->environment || strstr(help, e->environment), "help lacks %s", e->environment);
        CHECK(!strchr(e->key, '.') || strstr(check, e->key), "--check lacks %s", e->key);
        for (size_t j = 0; j < i; j++)
            CHECK(strcmp(e->key, config_entries[j].key) && e->offset != config_entries[j].offset,
                  "%s is in the table twice", e->key);
    }
    CHECK(strstr(check, "train.lr") && strstr(check, "0.00015") &&
              strstr(check, "command line --lr"),
          "--check: %s", check);
    free(help);
    free(check);
}

static void test_json(void) {
    config back;
    char a[1200], b[1200];
    accept("--steps 12 --lr 1.7e-4 --attention full --nsa-phi mlp --rope-scaling ntk --rope-factor "
           "3.3 "
           "--tied-embeddings --data some/where --seed 9007199254740991");
    config first = settings;
    json_t *json = config_to_json(&settings);
    CHECK(json && config_from_json(&back, json, &why), "back from JSON: %s", why.text);
    for (size_t i = 0; i < config_entry_count; i++) {
        const option *e = &config_entries[i];
        if (e->traits & CONFIG_NOT_SAVED) continue;
        option_value(&settings, e, a, sizeof a);
        option_value(&back, e, b, sizeof b);
        CHECK(!strcmp(a, b), "%s: %s became %s", e->key, a, b);
    }
    CHECK(config_same_model(&settings, &back, &why), "same model: %s", why.text);
    back.nsa.n_sel++;
    CHECK(config_same_model(&settings, &back, &why), "same weights, more blocks: %s", why.text);
    accept("--attention full --nsa-phi mlp --rope-scaling ntk --rope-factor 3.3 --tied-embeddings "
           "--nsa-w 65");
    TEST_FAULT(config_same_model(&settings, &first, &why), &why, "nsa.w is 65 here and 64 in");
    json_object_set_new(json, "model.dim", json_string("128"));
    TEST_FAULT(config_from_json(&back, json, &why), &why, "model.dim must be an integer in 1 ..");
    json_object_set_new(json, "model.dim", json_integer(-1));
    TEST_FAULT(config_from_json(&back, json, &why), &why, "model.dim must be an integer in 1 ..");
    json_object_set_new(json, "model.dim", json_integer(128));
    json_object_set_new(json, "model.n_heads", json_integer(7));
    TEST_FAULT(config_from_json(&back, json, &why), &why,
               "model.n_kv_groups = 2 (checkpoint): must divide model.n_heads = 7 (checkpoint)");
    json_object_set_new(json, "model.size", json_integer(1));
    TEST_FAULT(config_from_json(&back, json, &why), &why, "unknown setting model.size");
    TEST_FAULT(config_from_json(&back, NULL, &why), &why, "must be an object");
    json_decref(json);
}

/* The words of the table are nsa.h's enums, in their order. */
static void test_enums(void) {
    accept("--nsa-phi mlp --nsa-gate softmax --rope-pairs halves --rope-scaling yarn "
           "--rope-trained-context 9");
    CHECK(settings.nsa.phi == NSA_PHI_MLP && settings.nsa.gate == NSA_GATE_SOFTMAX, "phi, gate");
    CHECK(settings.model.rope_pairs == NSA_ROPE_HALVES, "pairs");
    CHECK(settings.model.rope_scaling == NSA_ROPE_SCALING_YARN, "scaling");
    accept("--nsa-phi conv --rope-scaling ntk");
    CHECK(settings.nsa.phi == NSA_PHI_CONV, "conv");
    CHECK(settings.model.rope_scaling == NSA_ROPE_SCALING_NTK, "ntk");
}

static void test_schedule(void) {
    accept("--steps 110 --warmup-steps 10 --lr 0.5");
    const config_train *t = &settings.train;
    CHECK(config_lr(t, 1) == 0.05 && config_lr(t, 10) == 0.5, "warm-up");
    CHECK(fabs(config_lr(t, 60) - 0.275) < 1e-15, "half way: %g", config_lr(t, 60));
    CHECK(fabs(config_lr(t, 110) - 0.05) < 1e-15, "the end: %g", config_lr(t, 110));
    for (int64_t s = 11; s < 110; s++) CHECK(config_lr(t, s) > config_lr(t, s + 1), "falls");
    accept("--steps 4 --warmup-steps 10 --lr 0.5");
    CHECK(config_lr(t, 4) == 0.2, "a run that ends in its warm-up");
    accept("--lr-schedule constant --lr 0.5");
    CHECK(config_lr(t, 1) == 0.5 && config_lr(t, 200) == 0.5, "constant");
}

int main(int argc, char **argv) {
    if (argc != 2) {
        printf("usage: test_config FOLDER_OF_CONFIGS\n");
        return 2;
    }
    test_begin();
    test_published(argv[1]);
    test_quickstart(argv[1]);
    test_recall();
    test_order();
    test_flags();
    test_environment();
    test_other_keys();
    test_other_variables();
    test_effects();
    test_files();
    test_rules();
    test_table();
    test_json();
    test_enums();
    test_schedule();
    return test_end("test_config");
}

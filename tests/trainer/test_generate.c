/* test_generate.c - generate as its users run it: the same text whatever the chunks and wherever
   the prompt comes from, options that do what they say, what is refused; and what retrieval counts.
   Arguments: the programs train_tiny, generate and retrieval. Twins: their main.c, restore.c,
   sample.c. */
#include <sys/wait.h>

#include "model_test.h"
#include "restore.h"
#include "sample.h"
#include "source.h"
#include "trainer_test.h"

enum { OUTPUT = 1 << 16 };

static const char *trainer, *generator, *examiner;
static char output[OUTPUT]; /* of the last program that ended */

/* Runs a shell's command line with both outputs in one file; the exit code. */
static int shell(const char *format, ...) {
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

static void expect(int code, int want, const char *word) {
    CHECK(code == want, "exit code %d, not %d: %s", code, want, output);
    CHECK(strstr(output, word) != NULL, "the output lacks \"%s\": %s", word, output);
}

static void train(const char *name, const char *options) {
    check_case("training %s", name);
    expect(shell("%s --dataset text --data %s --dim 32 --layers 2 --heads 4 --kv-groups 2 --d-k 8 "
                 "--d-v 8 --nsa-l 8 --nsa-d 4 --nsa-l-sel 16 --nsa-n-sel 4 --nsa-w 16 --seq-len 64 "
                 "--batch-size 4 --steps 30 --lr 1e-2 --threads 1 --out-dir %s %s",
                 trainer, test_path("text"), test_path(name), options),
           0, "saved");
}

/* What generate prints with these options. */
static const char *text_of(const char *name, const char *options) {
    static char texts[16][OUTPUT];
    static int next;
    char *text = texts[next++ % 16];
    expect(shell("%s %s --threads 1 --length 40 %s", generator, test_path(name), options), 0, "");
    return memcpy(text, output, OUTPUT);
}

static void same(const char *what, const char *a, const char *b) {
    CHECK(!strcmp(a, b), "%s: \"%s\" and \"%s\"", what, a, b);
}

static void differ(const char *what, const char *a, const char *b) {
    CHECK(strcmp(a, b), "%s: both \"%s\"", what, a);
}

static void test_texts(const char *name) {
    char options[2048];
    check_case("texts of %s", name);
    const char *text = text_of(name, "--prompt 'the quick'");
    CHECK(!strncmp(text, "the quick", 9) && strlen(text) > 45, "\"%s\"", text);
    same("chunks of 1 and of 256", text, text_of(name, "--prompt 'the quick' --chunk 1"));
    test_write_text(test_path("prompt"), "the quick");
    snprintf(options, sizeof options, "--prompt-file %s", test_path("prompt"));
    same("from a file", text, text_of(name, options));
    snprintf(options, sizeof options, "--prompt-file - < %s", test_path("prompt"));
    same("from standard input", text, text_of(name, options));
    differ("another seed", text, text_of(name, "--prompt 'the quick' --seed 5"));
    const char *greedy = text_of(name, "--prompt 'the quick' --temperature 0");
    same("top-k of 1", greedy, text_of(name, "--prompt 'the quick' --top-k 1"));
    same("top-p of next to nothing", greedy, text_of(name, "--prompt 'the quick' --top-p 1e-9"));
    same("temperature 0 knows no seed", greedy,
         text_of(name, "--prompt 'the quick' --temperature 0 --seed 5"));
    const char *fresh = text_of(name, "--prompt 'the quick' --temperature 0 "
                                      "--repetition-penalty 100 --repetition-window 4");
    for (const char *p = fresh + 9; p[0] && p[1] && p[2] && p[2] != '\n'; p++)
        CHECK(p[0] != p[1] && p[0] != p[2], "repeats in a window of 4: \"%s\"", fresh);
}

/* A longer context than the model was trained with. */
static void test_scaling(const char *name) {
    static const char *const scalings[] = {"linear", "ntk", "yarn"};
    char options[512], texts[3][OUTPUT];
    check_case("scalings of %s", name);
    for (int i = 0; i < 3; i++) {
        snprintf(options, sizeof options,
                 "--prompt 'the quick' --length 120 --rope-scaling %s --rope-factor 4 "
                 "--rope-trained-context 64",
                 scalings[i]);
        memcpy(texts[i], text_of(name, options), OUTPUT);
        for (int j = 0; j < i; j++) differ("two scalings", texts[i], texts[j]);
    }
    expect(shell("%s %s --length 250 --rope-scaling linear --rope-factor 4 --prompt 1234567",
                 generator, test_path(name)),
           2, "the context is 256");
    expect(shell("%s %s --rope-scaling yarn", generator, test_path(name)), 2,
           "model.rope_trained_context");
}

/* A model that was trained with scaled angles: they come with it, and its context is its rows'. */
static void test_stretched(void) {
    check_case("trained with yarn");
    const char *text = text_of("stretched", "--prompt 'the quick' --length 55");
    same("its own angles, said again", text,
         text_of("stretched", "--prompt 'the quick' --length 55 --rope-scaling yarn "
                              "--rope-factor 4 --rope-trained-context 16"));
    differ(
        "no scaling", text,
        text_of("stretched", "--prompt 'the quick' --length 55 --rope-scaling none --context 64"));
    expect(shell("%s %s --length 64", generator, test_path("stretched")), 2, "the context is 64");
}

static void test_bench(const char *name) {
    check_case("bench of %s", name);
    expect(shell("%s %s --bench --context 1024 --threads 1", generator, test_path(name)), 0,
           "    1024 ");
    expect(shell("%s %s --bench --context 40", generator, test_path(name)), 2, "at least 64");
}

static void test_refusals(void) {
    char at[1024];
    snprintf(at, sizeof at, "%s", test_path("sparse"));
    check_case("refusals");
    expect(shell("%s", generator), 2, "which checkpoint?");
    expect(shell("%s /nowhere", generator), 2, "/nowhere: no checkpoint");
    expect(shell("%s %s --foo 1", generator, at), 2, "--foo: unknown option");
    expect(shell("%s %s --length", generator, at), 2, "its value is missing");
    expect(shell("%s %s --top-p 2", generator, at), 2, "--top-p 2: must be a number above 0");
    expect(shell("%s %s --chunk 0", generator, at), 2, "must be an integer in 1 ..");
    expect(shell("%s %s another", generator, at), 2, "one checkpoint at a time");
    expect(shell("%s %s --prompt-file /nowhere", generator, at), 2, "/nowhere: cannot open");
    expect(shell("%s %s --length 65", generator, at), 2, "the context is 64");
    expect(shell("head -c 100 %s | %s %s --prompt-file -", test_path("text"), generator, at), 2,
           "a prompt of 100 tokens");
    expect(shell("%s %s --context 66 --length 65", generator, at), 0, "");
}

/* Without --length the text fills the context, which is shorter than 200 tokens here. */
static void test_length(const char *name) {
    check_case("no length");
    const char *at = test_path(name), *prompt = "--prompt 'the quick' --temperature 0 --threads 1";
    char whole[OUTPUT];
    expect(shell("%s %s %s", generator, at, prompt), 0, "the quick");
    memcpy(whole, output, OUTPUT);
    expect(shell("%s %s %s --length 55", generator, at, prompt), 0, "the quick");
    same("the default and what fits", whole, output);
    differ("one token less", whole,
           shell("%s %s %s --length 54", generator, at, prompt) ? "failed" : output);
}

/* A checkpoint whose settings and tensors tell of two geometries. */
static void test_geometry(void) {
    static const struct {
        const char *name, *words;
        int64_t dim, layers;
        bool full;
    } cases[] = {{"wider", "embed.weight&48", 48, 2, false},
                 {"deeper", "blocks.2.", 32, 3, false},
                 {"dense", "W_K", 32, 2, true}};
    ops o = open_ops(1);
    checkpoint k;
    model m;
    if (!CHECK(checkpoint_open(&k, test_path("sparse"), &why), "%s", why.text)) return;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        checkpoint other = k;
        check_case("another geometry: %s", cases[i].name);
        other.config.model.dim = cases[i].dim;
        other.config.model.n_layers = cases[i].layers;
        if (cases[i].full) other.config.model.attention = CONFIG_FULL;
        TEST_FAULT(restore_model(&m, &other, 256, 8, 64, &o, &why), &why, cases[i].words);
    }
    check_case("its own geometry");
    CHECK(restore_model(&m, &k, 256, 8, 64, &o, &why), "%s", why.text);
    model_close(&m);
    checkpoint_close(&k);
    ops_cpu_close(&o);
}

/* Characters that come in several tokens, and bytes that are none. */
static void test_printing(void) {
    static const unsigned char bytes[] = {'a',  0xc3, 0xa4, 0xe2, 0x82, 0xac, 0xff, 0xe2,
                                          0x82, 'b',  0x1b, 0xc2, 0x85, '\n', 0xf0, 0x9f,
                                          0x98, 0x80, 0xc3, 0xc3, 0xa4, 0xe2};
    char got[256] = "";
    check_case("printing");
    tokenizer *t = tokenizer_open(CONFIG_BYTE, "", &why);
    FILE *file = fopen(test_path("printed"), "wb");
    sample_printer p = {.out = file};
    for (size_t i = 0; i < sizeof bytes; i++) sample_put(&p, t, bytes[i]);
    sample_flush(&p);
    fclose(file);
    size_t n;
    char *text = test_read(test_path("printed"), &n);
    snprintf(got, sizeof got, "%s", text);
    CHECK(!strcmp(got, "a\xc3\xa4\xe2\x82\xac\\xff\\xe2\\x82"
                       "b\\x1b\\xc2\\x85\n\xf0\x9f\x98\x80\\xc3\xc3\xa4\\xe2"),
          "printed \"%s\"", got);
    free(text);
    tokenizer_close(t);
}

/* What the program counts, by the whole sequence's forward of each prefix: answers that are right,
   questions that read the needle, and both. */
static void answer(const model *m, const source_window *w, const int64_t *places, int length,
                   int count, int want[3]) {
    static real logits[RETRIEVAL_VOCAB];
    const model_config *c = &m->config;
    int first = length + 1 - 2 * count;
    model whole = *m;
    for (int q = 0; q < count; q++) {
        int best = 0, at = first + 2 * q;
        bool reached = places[q] > at - c->w;
        CHECK(model_next(&whole, w->tokens, first + 2 * q + 1, logits, &why), "%s", why.text);
        for (int i = 1; i < RETRIEVAL_VOCAB; i++)
            if (logits[i] > logits[best]) best = i;
        for (int i = 0; i < c->n_kv_groups * c->n_sel; i++) {
            int block = m->acts[c->n_layers - 1].blocks[at * c->n_kv_groups * c->n_sel + i];
            reached |= places[q] >= block * c->l_sel && places[q] < (block + 1) * c->l_sel;
        }
        want[0] += best == w->tokens[at + 1];
        want[1] += reached;
        want[2] += reached && best == w->tokens[at + 1];
    }
}

static void test_examination(void) {
    enum { LENGTH = 100, ROWS = 5 };
    int32_t tokens[LENGTH + 1];
    unsigned char starts[LENGTH + 1], given[LENGTH + 1];
    source_window w = {tokens, starts, given, 0};
    int64_t places[RETRIEVAL_NEEDLES];
    checkpoint k;
    model m;
    ops o = open_ops(1);
    int want[3] = {0}, got[3] = {0}, asked = 0, lines = 0, length, tenth, some, n[3];
    int depths[10] = {0}; /* where the needles lie */
    check_case("retrieval");
    if (!CHECK(checkpoint_open(&k, test_path("needles"), &why), "%s", why.text)) return;
    CHECK(restore_model(&m, &k, RETRIEVAL_VOCAB, LENGTH, 0, &o, &why), "%s", why.text);
    for (int row = 0; row < ROWS; row++) {
        int count = source_retrieval_row((uint64_t)k.config.train.seed, RNG_RETRIEVAL_VAL, row,
                                         LENGTH, &w, places);
        answer(&m, &w, places, LENGTH, count, want);
        for (int q = 0; q < count; q++) depths[places[q] * 10 / (LENGTH + 1 - 2 * count)]++;
    }
    expect(shell("%s %s %d %d", examiner, test_path("needles"), ROWS, LENGTH), 0, "length,tenth");
    for (char *at = strchr(output, '\n'); at && at[1]; at = strchr(at + 1, '\n'), lines++)
        if (CHECK(sscanf(at, "%d,%d,%d,%d,%d,%d", &length, &tenth, &some, n, n + 1, n + 2) == 6,
                  "%s", at)) {
            CHECK(length == LENGTH && tenth == lines && some == depths[lines] && n[0] <= some, "%s",
                  at);
            asked += some;
            for (int i = 0; i < 3; i++) got[i] += n[i];
        }
    CHECK(lines == 10 && asked == ROWS * (LENGTH / 8), "%d questions in %d lines", asked, lines);
    for (int i = 0; i < 3; i++)
        CHECK(got[i] == want[i], "count %d: %d, not %d", i, got[i], want[i]);
    CHECK(got[1] > 0 && got[1] < asked, "%d of %d questions reach the needle", got[1], asked);
    expect(shell("%s %s 1 64", examiner, test_path("sparse")), 2, "retrieval needs 512");
    expect(shell("%s %s 0 64", examiner, test_path("needles")), 2, "rows 0: must be an integer");
    expect(shell("%s %s 1 15", examiner, test_path("needles")), 2, "in 16 ..");
    expect(shell("%s %s 1 64 --n-sel 2", examiner, test_path("needles")), 2, "--n-sel 2: must be");
    expect(shell("%s %s 1 %d --n-sel 8", examiner, test_path("needles"), LENGTH), 0, "100,9,");
    for (char *at = strchr(output, '\n'); at && at[1]; at = strchr(at + 1, '\n'))
        CHECK(sscanf(at, "%d,%d,%d,%d,%d,%d", &length, &tenth, &some, n, n + 1, n + 2) == 6 &&
                  n[1] == some,
              "all %d blocks are selected: %s", 8, at);
    expect(shell("%s", examiner), 2, "usage");
    model_close(&m);
    checkpoint_close(&k);
    ops_cpu_close(&o);
}

int main(int argc, char **argv) {
    if (argc != 4)
        return fprintf(stderr, "usage: test_generate TRAIN_TINY GENERATE RETRIEVAL\n"), 2;
    trainer = argv[1];
    generator = argv[2];
    examiner = argv[3];
    test_begin();
    FILE *file = fopen(test_path("text"), "wb");
    for (int i = 0; file && i < 400; i++)
        fprintf(file, "%d the quick brown fox jumps over %d lazy dogs\n", i, i % 7);
    if (file) fclose(file);
    train("sparse", "");
    train("dense", "--attention full");
    test_texts("sparse");
    test_texts("dense");
    train("stretched", "--rope-scaling yarn --rope-factor 4 --rope-trained-context 16");
    test_stretched();
    test_scaling("sparse");
    test_scaling("dense");
    test_bench("sparse");
    test_refusals();
    test_length("sparse");
    test_geometry();
    test_printing();
    train("needles", "--dataset retrieval --vocab-size 512 --data ''");
    test_examination();
    return test_end("test_generate");
}

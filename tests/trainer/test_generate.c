/* test_generate.c - generate as its users run it: its text against the whole sequence's forward for
   each token, its figures, its options, what it refuses. Arguments: the programs train_tiny and
   generate. Twins: its main.c and options.c, restore.c, sample.c. Single draws are test_ops.c's. */
#include <fcntl.h>
#include <sys/stat.h>

#include "model_test.h"
#include "program_test.h"
#include "train/restore.h"
#include "train/sample.h"

enum { OUTPUT = 1 << 16 };

static const char *generator;

/* Trains the small model on text, or on what the options say. */
static void train_as(const char *name, const char *options) {
    char words[1024] = "";
    check_case("training %s", name);
    for (const char *const *word = small; *word; word++)
        snprintf(words + strlen(words), sizeof words - strlen(words), " %s", *word);
    expect(shell("%s%s --data %s --steps 30 --lr 1e-2 --threads 1 --out-dir %s %s", program, words,
                 test_path("text"), test_path(name), options),
           0, "saved");
}

/* GPT-2's tokens, whose text nobody needs for training. */
static void train_on_shard(void) {
    static const int32_t header[256] = {20240520, 1, 2000}, tokens[1000];
    FILE *file = fopen(test_path("shard.bin"), "wb");
    if (!CHECK(file != NULL, "cannot write the shard")) return;
    fwrite(header, sizeof header, 1, file);
    fwrite(tokens, sizeof tokens, 1, file);
    fclose(file);
    char options[1024];
    snprintf(options, sizeof options, "--tokenizer gpt2 --data %s --dim 8 --layers 1 --steps 1",
             test_path("shard.bin"));
    train_as("shards", options);
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
    test_write_text(test_path("prompt"), "\xef\xbb\xbfthe quick");
    same("behind a byte order mark", text, text_of(name, options));
    test_write_text(test_path("prompt"), "\n");
    same("no prompt is what separates documents", text_of(name, options), text_of(name, ""));
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

/* The prompt and what follows, from the forward of the whole text for each token. */
static token_list whole_text(model *m, tokenizer *t, const config_sample *c, uint64_t seed) {
    token_list text;
    CHECK(sample_prompt(t, "the quick", 9, 256, &text, &why), "%s", why.text);
    CHECK(sample_text(m, c, seed, tokenizer_end(t), &text, &why), "%s", why.text);
    return text;
}

static void compare_whole(const char *name, tokenizer *t, const token_list *text,
                          const char *options) {
    char command[512];
    size_t bytes;
    FILE *file = fopen(test_path("whole"), "wb");
    sample_print(t, text, 0, file);
    fputc('\n', file);
    fclose(file);
    char *want = test_read(test_path("whole"), &bytes);
    snprintf(command, sizeof command, "--prompt 'the quick' %s", options);
    same("text", want, text_of(name, command));
    free(want);
}

/* A text whose last token begins a character: the seed that gives it. */
static uint64_t cut_short(model *m, tokenizer *t, const config_sample *c, token_list *text) {
    for (uint64_t seed = 1;; seed++) {
        *text = whole_text(m, t, c, seed);
        int32_t last = text->ids[text->count - 1];
        if ((last >= 0xc2 && last < 0xf5) || !CHECK(seed < 200, "no such text")) return seed;
        token_list_free(text);
    }
}

static void test_against_whole(const char *name) {
    static const struct {
        const char *options;
        config_sample c;
        uint64_t seed;
    } cases[] = {
        {"--temperature 0", {.length = 40, .top_p = 1}, 1},
        {"--temperature 1.5 --top-p 1 --seed 3", {.length = 40, .temperature = 1.5, .top_p = 1}, 3},
        {"--temperature 0 --repetition-penalty 3 --repetition-window 24",
         {.length = 40, .top_p = 1, .repetition_penalty = 3, .repetition_window = 24},
         1},
    };
    ops o = open_ops(1);
    checkpoint k;
    model m;
    char options[128];
    if (!CHECK(checkpoint_open(&k, test_path(name), &why), "%s", why.text)) return;
    CHECK(restore_model(&m, &k, 256, 64, 0, &o, &why), "%s", why.text);
    tokenizer *t = tokenizer_open(CONFIG_BYTE, "", &why);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_case("%s against the whole: %s", name, cases[i].options);
        token_list text = whole_text(&m, t, &cases[i].c, cases[i].seed);
        compare_whole(name, t, &text, cases[i].options);
        token_list_free(&text);
    }
    check_case("%s against the whole: what no option says is the checkpoint's", name);
    config_sample c = k.config.sample;
    c.length = 40;
    token_list text = whole_text(&m, t, &c, (uint64_t)k.config.train.seed);
    compare_whole(name, t, &text, "");
    token_list_free(&text);
    check_case("%s against the whole: the text ends within a character", name);
    c = (config_sample){.length = 16, .temperature = 100, .top_p = 1};
    snprintf(options, sizeof options, "--temperature 100 --top-p 1 --length 16 --seed %d",
             (int)cut_short(&m, t, &c, &text));
    compare_whole(name, t, &text, options);
    token_list_free(&text);
    tokenizer_close(t);
    model_close(&m);
    checkpoint_close(&k);
    ops_cpu_close(&o);
}

/* Keys that the token at `place` reads, by formula: blocks of 8 every 4, 4 blocks of 16, of which
   its own is one, and a window of 16. */
static double keys_at(int place) {
    int compressed = place < 7 ? 0 : (place - 7) / 4 + 1, blocks = place / 16 + 1;
    int selected = blocks <= 4 ? place + 1 : 3 * 16 + place % 16 + 1;
    return compressed + selected + (place < 15 ? place + 1 : 16);
}

static double mean_keys(int first, int end) {
    double sum = 0;
    for (int place = first; place < end; place++) sum += keys_at(place);
    return sum / (end - first);
}

/* The last token drawn is not read. */
static void test_figures(const char *name, bool sparse) {
    int prompt = 0, tokens = 0;
    double keys = 0, dense = 0, share = 0;
    size_t bytes;
    check_case("figures of %s", name);
    expect(shell("%s %s --prompt 'the quick' --length 100 --context 128 --threads 1", generator,
                 test_path(name)),
           0, "the quick");
    char *errors = test_read(test_path("errors"), &bytes), *at = strstr(errors, "text: ");
    CHECK(sscanf(errors, "prompt: %d tokens", &prompt) == 1 && at &&
              sscanf(at,
                     "text: %d tokens, %*f tokens/s; a token read %lf keys, dense attention reads "
                     "%lf (%lf %%)",
                     &tokens, &keys, &dense, &share) == 4,
          "\"%s\"", errors);
    double want = sparse ? mean_keys(9, 108) : 59;
    CHECK(prompt == 9 && tokens == 100, "%d and %d tokens", prompt, tokens);
    CHECK(fabs(keys - want) < 0.06, "%g keys, not %g", keys, want);
    CHECK(fabs(dense - 59) < 0.06, "%g keys of dense attention, not 59", dense);
    CHECK(fabs(share - 100 * want / 59) < 0.6, "%g %%, not %g", share, 100 * want / 59);
    free(errors);
}

/* A longer context than the model was trained with. */
static void test_scaling(const char *name) {
    static const char *const scalings[] = {"linear", "ntk", "yarn"};
    char options[512], texts[3][OUTPUT];
    check_case("scalings of %s", name);
    for (int i = 0; i < 3; i++) {
        snprintf(options, sizeof options,
                 "--prompt 'the quick' --length 120 --rope-scaling %s --rope-factor 4 %s",
                 scalings[i], i == 2 ? "--rope-trained-context 64" : "");
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

/* Rows of the table; 32 tokens are read one by one up to each length. */
static void test_bench(const char *name, bool sparse) {
    int length = 256, got = 0;
    double keys, dense, fewer;
    check_case("bench of %s", name);
    expect(shell("%s %s --bench --context 1024 --threads 1", generator, test_path(name)), 0,
           "keys read");
    for (char *at = strchr(output, '\n'); at && at[1]; at = strchr(at + 1, '\n'), length *= 2) {
        double want = sparse ? mean_keys(length - 32, length) : length - 15.5;
        CHECK(sscanf(at, "%d %*f %*f %*f %lf %lf %lf", &got, &keys, &dense, &fewer) == 4, "%s", at);
        CHECK(got == length && fabs(keys - want) < 0.06 && fabs(dense - (length - 15.5)) < 0.06 &&
                  fabs(fewer - (length - 15.5) / want) < 0.06,
              "%d tokens, %g keys: %s", length, want, at);
    }
    CHECK(length == 2048, "the table ends before %d", length);
    expect(shell("%s %s --bench --context 40", generator, test_path(name)), 2, "at least 64");
}

static void test_refusals(void) {
    static const char zeros[70000];
    char at[1024];
    snprintf(at, sizeof at, "%s", test_path("sparse"));
    check_case("refusals");
    expect(shell("%s", generator), 2, "CHECKPOINT: none was given");
    expect(shell("%s /nowhere", generator), 2, "/nowhere: no checkpoint");
    expect(shell("%s %s --foo 1", generator, at), 2, "--foo: unknown option");
    expect(shell("%s %s --length", generator, at), 2, "its value is missing");
    expect(shell("%s %s --top-p 2", generator, at), 2, "--top-p 2: must be a number above 0");
    expect(shell("%s %s --chunk 0", generator, at), 2, "must be an integer in 1 ..");
    expect(shell("%s %s another", generator, at), 2, "one too many, after");
    expect(shell("%s %s --prompt-file /nowhere", generator, at), 2, "/nowhere: cannot open");
    expect(shell("%s %s --length 65", generator, at), 2, "the context is 64");
    expect(shell("{ %s %s --length 3 >/dev/full; }", generator, at), 1,
           "standard output: cannot write: No space left");
    expect(shell("{ %s %s --bench --context 64 >&-; }", generator, at), 1,
           "standard output: cannot write: Bad file");
    expect(shell("head -c 100 %s | %s %s --prompt-file -", test_path("text"), generator, at), 2,
           "a prompt of 100 tokens");
    CHECK(!mkfifo(test_path("late"), 0600), "a pipe"); /* non-blocking, and empty when it is read */
    int late = open(test_path("late"), O_RDONLY | O_NONBLOCK);
    expect(shell("{ exec 9>%s; { sleep 1; head -c 100 %s >&9; } & exec 9>&-; "
                 "%s %s --prompt-file - <&%d; }",
                 test_path("late"), test_path("text"), generator, at, late),
           2, "a prompt of 100 tokens");
    close(late);
    test_write(test_path("long"), zeros, sizeof zeros);
    expect(shell("%s %s --prompt-file %s", generator, at, test_path("long")), 2,
           "a prompt of 70000 tokens");
    expect(shell("printf '\\377\\376T\\000' | %s %s --prompt-file -", generator, at), 2,
           "-: text in UTF-16: convert it to UTF-8");
    expect(shell("gzip < %s | %s %s --prompt-file -", test_path("text"), generator, at), 2,
           "-: packed by gzip or zstd: unpack it first");
    expect(shell("%s %s --context 66 --length 65", generator, at), 0, "");
    expect(shell("%s %s --threads 1 --length 1", generator, test_path("shards")), 2,
           "data.tokenizer_path: must name the folder");
    expect(shell("%s %s --tokenizer-path /nowhere", generator, test_path("shards")), 2,
           "/nowhere: must be a folder that has tokenizer.json");
    token_list prompt;
    tokenizer *t = tokenizer_open(CONFIG_BYTE, "", &why);
    TEST_FAULT(sample_prompt(t, "aba", 3, 'b', &prompt, &why), &why, "token 98&knows 0 to 97");
    CHECK(sample_prompt(t, "aba", 3, 'b' + 1, &prompt, &why), "%s", why.text);
    token_list_free(&prompt);
    tokenizer_close(t);
}

/* Without --length the text fills the context, and ends with 200 tokens. */
static void test_length(const char *name) {
    static const char *const pairs[][2] = {{"", "--length 55"},
                                           {"--context 300", "--context 300 --length 200"}};
    const char *prompt = "--prompt 'the quick' --temperature 0 --threads 1";
    char whole[OUTPUT], at[1024];
    snprintf(at, sizeof at, "%s", test_path(name));
    check_case("no length");
    for (int i = 0; i < 2; i++) {
        expect(shell("%s %s %s %s", generator, at, prompt, pairs[i][0]), 0, "the quick");
        memcpy(whole, output, OUTPUT);
        expect(shell("%s %s %s %s", generator, at, prompt, pairs[i][1]), 0, "the quick");
        same("the default and what fits", whole, output);
    }
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
        if (cases[i].full) strcpy(other.config.model.attention, "full");
        TEST_FAULT(restore_model(&m, &other, 256, 8, 64, &o, &why), &why, cases[i].words);
    }
    check_case("its own geometry");
    CHECK(restore_model(&m, &k, 256, 8, 64, &o, &why), "%s", why.text);
    model_close(&m);
    checkpoint_close(&k);
    ops_cpu_close(&o);
}

/* Characters that come in several tokens, and bytes that are none: also an overlong one, a
   surrogate, and what is beyond the last. */
static void test_printing(void) {
    static const unsigned char bytes[] = {'a',  0xc3, 0xa4, 0xe2, 0x82, 0xac, 0xff, 0xe2,
                                          0x82, 'b',  0x1b, 0xc2, 0x85, '\n', 0xf0, 0x9f,
                                          0x98, 0x80, 0xe0, 0x8b, 0xa4, 0xed, 0xa0, 0x80,
                                          0xf4, 0x90, 0x80, 0x80, 0xc3, 0xc3, 0xa4, 0xe2};
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
                       "b\\x1b\\xc2\\x85\n\xf0\x9f\x98\x80\\xe0\\x8b\\xa4\\xed\\xa0\\x80"
                       "\\xf4\\x90\\x80\\x80\\xc3\xc3\xa4\\xe2"),
          "printed \"%s\"", got);
    free(text);
    tokenizer_close(t);
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: test_generate TRAIN_TINY GENERATE\n"), 2;
    program = argv[1];
    generator = argv[2];
    test_begin();
    FILE *file = fopen(test_path("text"), "wb");
    for (int i = 0; file && i < 400; i++)
        fprintf(file, "%d the quick brown fox jumps over %d lazy dogs\n", i, i % 7);
    if (file) fclose(file);
    train_as("sparse", "");
    train_as("dense", "--attention full");
    train_as("stretched", "--rope-scaling yarn --rope-factor 4 --rope-trained-context 16");
    train_on_shard();
    for (int dense = 0; dense < 2; dense++) {
        const char *name = dense ? "dense" : "sparse";
        test_texts(name);
        test_against_whole(name);
        test_figures(name, !dense);
        test_scaling(name);
        test_bench(name, !dense);
    }
    test_stretched();
    test_refusals();
    test_length("sparse");
    test_geometry();
    test_printing();
    return test_end("test_generate");
}

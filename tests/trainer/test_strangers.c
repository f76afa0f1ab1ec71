/* test_strangers.c - files, names and texts that strangers wrote: what may be a name, what is
   printed, how much JSON is taken, pipes and links where files are due. Arguments: the programs
   train_tiny, generate, nsa_verdict, convert. Twins: base/files.c, text.c, json_file.c. Not here:
   the formats, which have their own tests. */
#include <jansson.h>
#include <stdlib.h>

#include "base/files.h"
#include "base/json_file.h"
#include "base/text.h"
#include "program_test.h"

static fault why;
static const char *generator, *judge, *converter;

static void test_names(void) {
    static const struct {
        const char *name;
        bool plain;
    } cases[] = {{"model.safetensors", true},
                 {"model-00001-of-00002.safetensors", true},
                 {"a b", true},
                 {"\xc3\xa9", true},
                 {"a..b", true},
                 {"", false},
                 {".", false},
                 {"..", false},
                 {".ssh", false},
                 {"/etc/passwd", false},
                 {"a/b", false},
                 {"a/", false},
                 {"../a", false},
                 {"a\n", false},
                 {"\033[31m", false},
                 {"a\x7f", false},
                 {"a\xc2\x85", false},
                 {"a\xff", false}};
    char longest[300];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_case("name %d", (int)i);
        CHECK(files_plain_name(cases[i].name) == cases[i].plain, "must be %d", cases[i].plain);
    }
    check_case("long names");
    memset(longest, 'a', sizeof longest);
    longest[255] = 0;
    CHECK(files_plain_name(longest), "255 bytes");
    longest[255] = 'a', longest[256] = 0;
    CHECK(!files_plain_name(longest), "256 bytes");
}

/* U+0080 .. U+009F as UTF-8 and as bytes, U+2028, U+202E, U+2066; all else stays. */
static void test_printing(void) {
    static const char *const cases[][2] = {
        {"plain", "plain"},
        {"a\nb\r\tc\033[2Jd\x7f", "a?b??c?[2Jd?"},
        {"\xc2\x9b"
         "31m",
         "??31m"},
        {"\x9b"
         "31m",
         "?31m"},
        {"\xc2\x80\xc2\x9f\xc2\xa0", "????\xc2\xa0"},
        {"caf\xc3\xa9 \xe6\xbc\xa2 \xf0\x9f\x98\x80", "caf\xc3\xa9 \xe6\xbc\xa2 \xf0\x9f\x98\x80"},
        {"\xe2\x80\xa8|\xe2\x80\xae|\xe2\x81\xa6|\xe2\x80\x94", "???|???|???|\xe2\x80\x94"},
        {"cut \xe6\xbc", "cut ??"},
        {"\xc0\x9b\xed\xa0\x80", "?????"}};
    char text[64];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_case("printing %d", (int)i);
        snprintf(text, sizeof text, "%s", cases[i][0]);
        text_keep_printable(text);
        CHECK(!strcmp(text, cases[i][1]), "\"%s\"", text);
    }
    check_case("messages");
    fault_set(&why, "%s", "a\xc2\x9b\n");
    CHECK(!strcmp(why.text, "a???"), "\"%s\"", why.text);
}

static bool parses(const char *text, size_t bytes, const json_limit *limit) {
    json_t *root = json_file_parse("x.json", text, bytes, limit, JSON_REJECT_DUPLICATES, &why);
    json_decref(root);
    return root != NULL;
}

static void test_json(void) {
    static const json_limit limit = {4000, 20, 100};
    static char text[5000];
    static const struct {
        const char *unit, *words;
        int count;
    } much[] = {{"[],", "objects and arrays", 21},
                {"{},", "objects and arrays", 21},
                {"1,", "values", 100},
                {"\"\",", "values", 100},
                {"[", "nested more than 64", 65},
                {"{\"a\":", "nested more than 64", 65}};
    for (size_t i = 0; i < sizeof much / sizeof *much; i++) {
        size_t n = (size_t)sprintf(text, "[");
        check_case("JSON of many %s", much[i].unit);
        for (int k = 0; k < much[i].count; k++) n += (size_t)sprintf(text + n, "%s", much[i].unit);
        n += (size_t)sprintf(text + n, "0]");
        TEST_FAULT(parses(text, n, &limit), &why, much[i].words);
    }
    check_case("JSON as much as is allowed");
    size_t n = (size_t)sprintf(text, "[\"[[[[,,,,\\\"[[[[\\\\\"");
    for (int k = 0; k < 19; k++) n += (size_t)sprintf(text + n, ",[]");
    n += (size_t)sprintf(text + n, "]");
    CHECK(parses(text, n, &limit), "%s", why.text);
    check_case("JSON that is none");
    TEST_FAULT(parses("[1e999]", 7, &limit), &why, "x.json:1: not JSON");
    TEST_FAULT(parses("[99999999999999999999]", 22, &limit), &why, "x.json:1: not JSON");
    TEST_FAULT(parses("{\"a\":1,\n\"a\":2}", 15, &limit), &why, "x.json:2: not JSON: duplicate");
    TEST_FAULT(parses("[\"\\u0000\"]", 10, &limit), &why, "not JSON");
    TEST_FAULT(parses("[\"\xff\"]", 5, &limit), &why, "not JSON");
    TEST_FAULT(parses("]]]]", 4, &limit), &why, "not JSON");
    memset(text, ' ', sizeof text);
    TEST_FAULT(parses(text, sizeof text, &limit), &why, "JSON of 5000 bytes&4000");
}

/* Opening a pipe without a writer waits for ever, and so does reading a device. */
static void test_pipes(void) {
    check_case("pipes and devices");
    CHECK(!mkfifo(test_path("pipe"), 0666), "pipe");
    static const char *const refused[] = {"pipe", "zero"};
    CHECK(!symlink("/dev/zero", test_path("zero")), "device");
    for (size_t i = 0; i < 2; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", test_root, refused[i]);
        expect(shell("timeout 300 %s --config %s", program, path), 2, "must be a plain file");
        expect(shell("CONFIG=%s timeout 300 %s --check", path, program), 2, "must be a plain file");
        expect(shell("timeout 300 %s %s --prompt-file %s", generator, test_path("run"), path), 2,
               "must be a plain file");
    }
    test_mkdir("judged");
    CHECK(!mkfifo(test_path("judged/history.jsonl"), 0666) &&
              !mkfifo(test_path("judged/training.csv"), 0666) &&
              !mkfifo(test_path("judged/metrics.json"), 0666),
          "pipes");
    expect(shell("timeout 300 %s %s", judge, test_path("judged")), 1, "NO-GO");
    test_mkdir("model");
    CHECK(!mkfifo(test_path("model/config.json"), 0666), "pipe");
    expect(shell("timeout 300 %s import %s %s", converter, test_path("model"), test_path("in")), 2,
           "must be a plain file");
}

/* A link in a run's folder, where the run appends: what it leads to is not the run's. */
static void test_links(void) {
    static const char *const names[] = {"training.csv",  "heartbeat_rank0.jsonl",
                                        "history.jsonl", "stack_rank0.txt",
                                        "loss.svg",      ".loss.svg",
                                        "val.csv"};
    char line[256];
    size_t bytes;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        check_case("a link %s", names[i]);
        test_write_text(test_path("precious"), "step,loss,lr,toks_per_s,grad_norm\n");
        CHECK(shell("rm -rf %s; cp -a %s %s", test_path("linked"), test_path("run"),
                    test_path("linked")) == 0,
              "copy");
        snprintf(line, sizeof line, "linked/%s", names[i]);
        unlink(test_path(line));
        CHECK(!symlink("../precious", test_path(line)), "link");
        (void)train("--steps", "6", "--resume", "--out-dir", test_path("linked"), NULL);
        char *text = test_read(test_path("precious"), &bytes);
        CHECK(bytes == 34, "%zu bytes: %.60s", bytes, text);
        free(text);
    }
}

/* Names and texts of the user's or a stranger's that reach a terminal by any of the programs. */
static void test_terminal(void) {
    static const char odd[] = "x\xc2\x9b"
                              "31m\n\033[2J";
    char path[1200];
    check_case("odd names");
    snprintf(path, sizeof path, "%s/%s", test_root, odd);
    const char *const options[] = {"--dataset", "synthetic", "--steps", "2",
                                   "--out-dir", path,        NULL};
    CHECK(await(start(small, options)) == 0, "%s", output);
    CHECK(!strstr(output, "\xc2\x9b") && !strchr(output, '\033') && strstr(output, "x??31m??[2J"),
          "%s", output);
    expect(shell("%s '%s'", judge, path), 0, "checkpoint");
    CHECK(!strstr(output, "\xc2\x9b") && !strchr(output, '\033'), "%s", output);
    expect(shell("%s --dataset synthetic --check --out-dir '%s'", program, path), 2, "x??31m??[2J");
    CHECK(!strstr(output, "\xc2\x9b") && !strchr(output, '\033'), "%s", output);
    check_case("odd texts in a run's files");
    CHECK(shell("cp -a %s %s", test_path("run"), test_path("odd")) == 0, "copy");
    test_write_text(test_path("odd/metrics.json"),
                    "{\"verdict\": \"\\u009b31m\\nGO\\u001b\", \"data\": \"\\u009b\\n\"}");
    expect(shell("%s %s", judge, test_path("odd")), 1, "??31m?GO?");
    CHECK(!strstr(output, "\xc2\x9b") && !strchr(output, '\033'), "%s", output);
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    program = argv[1], generator = argv[2], judge = argv[3], converter = argv[4];
    test_begin();
    test_names();
    test_printing();
    test_json();
    CHECK(train("--dataset", "synthetic", "--steps", "4", "--out-dir", test_path("run"), NULL) == 0,
          "%s", output);
    test_pipes();
    test_links();
    test_terminal();
    return test_end("test_strangers");
}

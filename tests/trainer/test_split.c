/* test_split.c - how a tokenizer.json splits text into the pieces that are encoded one by one:
   patterns that match nothing, that leave text between matches, that look around, against the
   pieces of the package tokenizers; patterns that are not read, and that take too long; added
   tokens. Twins: data/bpe.c, bpe_pattern.c, split_values.h. Joining is test_tokenizer.c's. */
#include <jansson.h>

#include "config/config.h"
#include "data/tokenizer.h"
#include "split_values.h"
#include "trainer_test.h"

static fault why;

/* GPT-2's alphabet, once more from its definition: a byte as a character of UTF-8. */
static int spell(int byte, char *to) {
    int character = byte, hidden = 0;
    for (int b = 0; b <= byte; b++) {
        bool plain = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        if (b == byte && plain) break;
        if (b == byte) character = 256 + hidden;
        hidden += !plain;
    }
    if (character < 0x80) return to[0] = (char)character, 1;
    to[0] = (char)(0xc0 | character >> 6);
    to[1] = (char)(0x80 | (character & 0x3f));
    return 2;
}

/* A vocabulary that has every part of the text as a token, and takes a whole piece for one: tokens
   are then the pieces. */
static json_t *parts_of(const char *text) {
    json_t *vocab = json_object();
    char name[256];
    int id = 0;
    for (int byte = 0; byte < 256; byte++) {
        name[spell(byte, name)] = 0;
        json_object_set_new(vocab, name, json_integer(id++));
    }
    for (size_t i = 0; text[i]; i++) {
        size_t n = 0;
        for (size_t k = i; text[k] && n + 3 < sizeof name; k++) {
            n += (size_t)spell((unsigned char)text[k], name + n);
            name[n] = 0;
            if (!json_object_get(vocab, name)) json_object_set_new(vocab, name, json_integer(id++));
        }
    }
    json_object_set_new(vocab, "<|endoftext|>", json_integer(id));
    return vocab;
}

/* A tokenizer that splits by this pattern; NULL: the fault says why. */
static tokenizer *open_split(const char *pattern, const char *text, json_t *added) {
    json_t *root = json_pack(
        "{s:o, s:n, s:{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b}]}, s:{s:s, s:o, s:[], "
        "s:b}}",
        "added_tokens", added ? added : json_array(), "normalizer", "pre_tokenizer", "type",
        "Sequence", "pretokenizers", "type", "Split", "pattern", "Regex", pattern, "behavior",
        "Isolated", "invert", 0, "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0,
        "model", "type", "BPE", "vocab", parts_of(text), "merges", "ignore_merges", 1);
    CHECK(root && !json_dump_file(root, test_path("split/tokenizer.json"), 0), "no tokenizer.json");
    json_decref(root);
    return tokenizer_open(CONFIG_GPT2, test_path("split"), &why);
}

static void test_pieces(void) {
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
        const char *pattern = splits[i].pattern, *text = splits[i].text;
        token_list list = {NULL, 0, 0};
        size_t count = 0, bytes;
        check_case("\"%s\" splits \"%s\"", pattern, text);
        tokenizer *t = open_split(pattern, text, NULL);
        if (!CHECK(t != NULL, "%s", why.text)) continue;
        CHECK(tokenizer_encode(t, text, strlen(text), &list, &why), "%s", why.text);
        while (splits[i].pieces[count]) count++;
        CHECK(list.count == count, "%zu pieces, must be %zu", list.count, count);
        for (size_t k = 0; k < list.count && k < count; k++) {
            const char *piece = tokenizer_bytes(t, list.ids[k], &bytes), *due = splits[i].pieces[k];
            CHECK(bytes == strlen(due) && !memcmp(piece, due, bytes), "piece %zu is \"%.*s\"", k,
                  (int)bytes, piece);
        }
        token_list_free(&list);
        tokenizer_close(t);
    }
}

/* What PCRE2 reads otherwise than Oniguruma, or not at all. */
static void test_refused(void) {
    static const char *const patterns[] = {
        "\\h",      "\\w+",    "\\b",    "\\X",     "\\R",          "\\v",
        "\\N",      "\\K",     "\\C",    "\\Qa\\E", "\\pL",         "\\1",
        "(?m).",    "(?s).",   "(?x)a",  "(?<n>a)", "(?P<n>a)",     "(?C1)a",
        "(*FAIL)a", "(*UTF)a", "(?R)",   "(?~a)",   "(?#a)",        "[a-c&&b]",
        "[[:w:]]",  "[a[b]]",  "[]a]",   "[\\w]",   "a{,2}",        "(?>a|\\h)",
        "a{1,3}+",  "a{2}+",   "a{1,}+", "a{2}?",   "(?i)[\\P{L}]", "(?i:(a)[^\\p{Lu}])"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        check_case("pattern %s", patterns[i]);
        tokenizer *t = open_split(patterns[i], "a", NULL);
        TEST_FAULT(t != NULL, &why, "split: pre_tokenizer: the pattern \"&at \"");
        tokenizer_close(t);
    }
    static const char *const broken[] = {"(", "a)", "[a", "*", "a**", "\\p{Nope}", "(?<=a*)b"};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        check_case("pattern %s", broken[i]);
        tokenizer *t = open_split(broken[i], "a", NULL);
        TEST_FAULT(t != NULL, &why, "split");
        tokenizer_close(t);
    }
}

/* Each would take longer than anybody lives: it ends, with a message that names the file, or with
   tokens. */
static void test_endless(void) {
    static const char *const patterns[] = {
        "(a+)+b", "(a|a)*b", "(a*)*b", "(?:a?){60}a{60}b", "(?=(a+)+b)", "(?:(?:a|b|ab)(?:c|))*d"};
    static char text[20000];
    memset(text, 'a', sizeof text - 1);
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        token_list list = {NULL, 0, 0};
        check_case("endless %s", patterns[i]);
        tokenizer *t = open_split(patterns[i], "a", NULL);
        if (!CHECK(t != NULL, "%s", why.text)) continue;
        alarm(120);
        bool ok = tokenizer_encode(t, text, 10000, &list, &why);
        alarm(0);
        CHECK(ok || strstr(why.text, "/split: "), "%s", why.text);
        token_list_free(&list);
        tokenizer_close(t);
    }
}

/* Bytes that are no UTF-8 are pieces of their own, and never seen by a pattern. */
static void test_no_utf8(void) {
    static const char text[] = "ab\xff\xe2\x82 b\xc3";
    static const char *const due[] = {"ab", "\xff", "\xe2", "\x82", " b", "\xc3"};
    size_t bytes;
    check_case("bytes that are no UTF-8");
    token_list list = {NULL, 0, 0};
    tokenizer *t = open_split(" ?\\p{L}+|(?s-i:x)", "ab b", NULL);
    CHECK(!t, "a group of flags that is not read");
    t = open_split(" ?\\p{L}+", "ab b", NULL);
    if (!CHECK(t != NULL, "%s", why.text)) return;
    CHECK(tokenizer_encode(t, text, sizeof text - 1, &list, &why), "%s", why.text);
    CHECK(list.count == 6, "%zu pieces", list.count);
    for (size_t k = 0; k < list.count && k < 6; k++) {
        const char *piece = tokenizer_bytes(t, list.ids[k], &bytes);
        CHECK(bytes == strlen(due[k]) && !memcmp(piece, due[k], bytes), "piece %zu", k);
    }
    token_list_free(&list);
    tokenizer_close(t);
}

/* The longest one counts, and their number costs no time at each byte: 50,000 that begin alike,
   before a text of as many bytes, were 2.5 billion comparisons. */
static void test_added(void) {
    enum { MANY = 50000, FIRST = 257 };
    json_t *added = json_array();
    char name[64];
    size_t bytes;
    check_case("many added tokens");
    for (int i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "<|%d|>", i);
        json_array_append_new(added, json_pack("{s:i, s:s}", "id", FIRST + i, "content", name));
    }
    json_array_append_new(added, json_pack("{s:i, s:s}", "id", FIRST + MANY, "content", "<|7"));
    json_array_append_new(added,
                          json_pack("{s:i, s:s}", "id", FIRST + MANY + 1, "content", "<|7|>more"));
    tokenizer *t = open_split("a", "a", added);
    if (!CHECK(t != NULL, "%s", why.text)) return;
    static char text[MANY + 64];
    memset(text, '<', MANY);
    snprintf(text + MANY, 64, "<|77|><|7|><|7|>more<|7!<|99999|>");
    token_list list = {NULL, 0, 0};
    alarm(60);
    CHECK(tokenizer_encode(t, text, strlen(text), &list, &why), "%s", why.text);
    alarm(0);
    static const int32_t due[] = {FIRST + 77, FIRST + 7, FIRST + MANY + 1, FIRST + MANY};
    for (int i = 0; i < 4 && list.count > MANY + 4; i++)
        CHECK(list.ids[MANY + i] == due[i], "token %d is %d", i, list.ids[MANY + i]);
    CHECK(list.count > MANY + 4, "%zu tokens", list.count);
    (void)tokenizer_bytes(t, list.ids[MANY], &bytes);
    CHECK(bytes == 6, "%zu bytes", bytes);
    token_list_free(&list);
    tokenizer_close(t);
    check_case("a long added token");
    static char longest[5000];
    memset(longest, '<', sizeof longest - 1);
    added = json_array();
    json_array_append_new(added, json_pack("{s:i, s:s}", "id", 257, "content", longest));
    TEST_FAULT(open_split("a", "a", added) != NULL, &why,
               "split: added_tokens, number 0: 4999 bytes");
}

int main(void) {
    test_begin();
    test_mkdir("split");
    test_pieces();
    test_refused();
    test_endless();
    test_no_utf8();
    test_added();
    return test_end("test_split");
}

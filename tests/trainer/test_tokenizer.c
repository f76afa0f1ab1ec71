/* test_tokenizer.c - bytes, and GPT-2's BPE with a small vocabulary made here, against a plain
   implementation that joins one pair at a time; files that are wrong. */
#include "config/config.h"
#include "data/tokenizer.h"
#include "trainer_test.h"

/* Merges of the test's vocabulary, best first. Spelled as in merges.txt, so "\xc4\xa0" is a space,
   "\xc4\x8a" a newline and "\xc5\x82" the byte 0xa0. */
#define SPACE   "\xc4\xa0"
#define NEWLINE "\xc4\x8a"
static const char *const merges[][2] = {
    {"t", "h"},
    {"th", "e"},
    {SPACE, "t"},
    {SPACE "t", "he"},
    {"a", "a"},
    {"aa", "aa"},
    {"h", "e"},
    {"e", "r"},
    {SPACE, "a"},
    {"1", "2"},
    {NEWLINE, NEWLINE},
    {SPACE, SPACE},
    {"\xc3\x83", "\xc2\xa9"},
    {"'", "s"},
    {"l", "l"},
    {"'", "ll"},
    {SPACE "a", "a"},
    {"e", "l"},
    {"el", "lo"},
    {"l", "o"},
    {"\xc5\x82", "!"},
};
enum { MERGES = sizeof merges / sizeof merges[0], VOCAB = 256 + MERGES + 1 };

/* GPT-2's alphabet: byte to character, written out again from its definition. */
static int spell(int byte, char *to) {
    int character = byte, hidden = 0;
    bool plain = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    for (int b = 0; b < byte; b++)
        hidden += !((b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae);
    if (!plain) character = 256 + hidden;
    if (character < 0x80) {
        to[0] = (char)character;
        return 1;
    }
    to[0] = (char)(0xc0 | character >> 6);
    to[1] = (char)(0x80 | (character & 0x3f));
    return 2;
}

/* Ids are shuffled, so that a mix-up of id and byte is seen. */
static int id_of(int token) {
    return (token * 31 + 7) % VOCAB;
}

static char plain_bytes[VOCAB][16];
static int plain_length[VOCAB];

static int unspell(const char *text, char *to) {
    int n = 0;
    while (*text)
        for (int byte = 0; byte < 256; byte++) {
            char c[3] = "";
            int length = spell(byte, c);
            if (strncmp(text, c, (size_t)length)) continue;
            to[n++] = (char)byte;
            text += length;
            break;
        }
    return n;
}

static void write_vocabulary(const char *folder) {
    char path[1024], c[3];
    snprintf(path, sizeof path, "%s/vocab.json", folder);
    FILE *vocab = fopen(path, "w");
    snprintf(path, sizeof path, "%s/merges.txt", folder);
    FILE *list = fopen(path, "w");
    if (!CHECK(vocab && list, "cannot write the vocabulary")) exit(1);
    fprintf(vocab, "{\"<|endoftext|>\": %d", id_of(VOCAB - 1));
    fprintf(list, "#version: 0.2\n");
    for (int byte = 0; byte < 256; byte++) {
        int n = spell(byte, c);
        bool escape = byte == '"' || byte == '\\';
        fprintf(vocab, ", \"%s%.*s\": %d", escape ? "\\" : "", n, c, id_of(byte));
        plain_bytes[id_of(byte)][0] = (char)byte;
        plain_length[id_of(byte)] = 1;
    }
    for (int i = 0; i < MERGES; i++) {
        char both[32];
        snprintf(both, sizeof both, "%s%s", merges[i][0], merges[i][1]);
        fprintf(vocab, ", \"%s\": %d", both, id_of(256 + i));
        fprintf(list, "%s %s\n", merges[i][0], merges[i][1]);
        plain_length[id_of(256 + i)] = unspell(both, plain_bytes[id_of(256 + i)]);
    }
    fprintf(vocab, "}");
    fclose(vocab);
    fclose(list);
}

/* ---- The plain encoder: joins the best pair, leftmost first, until none is left ---- */

static int find_plain(const char *bytes, int length) {
    for (int id = 0; id < VOCAB; id++)
        if (plain_length[id] == length && !memcmp(plain_bytes[id], bytes, (size_t)length))
            return id;
    return -1;
}

static int merge_ids[MERGES][2];

static void prepare_merges(void) {
    char bytes[16];
    for (int i = 0; i < MERGES; i++)
        for (int side = 0; side < 2; side++) {
            int n = unspell(merges[i][side], bytes);
            merge_ids[i][side] = find_plain(bytes, n);
        }
}

static int merge_rank(int left, int right) {
    for (int i = 0; i < MERGES; i++)
        if (merge_ids[i][0] == left && merge_ids[i][1] == right) return i;
    return MERGES;
}

static size_t plain_encode(const char *word, size_t bytes, int32_t *ids) {
    size_t n = bytes;
    for (size_t i = 0; i < n; i++) ids[i] = id_of((unsigned char)word[i]);
    for (;;) {
        int best = MERGES;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            int rank = merge_rank(ids[i], ids[i + 1]);
            if (rank >= best) continue;
            best = rank;
            at = i;
        }
        if (best == MERGES) return n;
        ids[at] = id_of(256 + best);
        memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof *ids);
        n--;
    }
}

/* ---- Tests ---- */

static fault why;

static void round_trip(tokenizer *t, const char *text, size_t bytes) {
    token_list list = {NULL, 0, 0};
    size_t at = 0, n;
    CHECK(tokenizer_encode(t, text, bytes, &list, &why), "encode: %s", why.text);
    for (size_t i = 0; i < list.count; i++) {
        const char *piece = tokenizer_bytes(t, list.ids[i], &n);
        if (!CHECK(n && at + n <= bytes && !memcmp(piece, text + at, n),
                   "token %zu is another text", i))
            break;
        at += n;
    }
    CHECK(at == bytes, "%zu bytes of %zu came back", at, bytes);
    token_list_free(&list);
}

static void random_round_trips(tokenizer *t) {
    static const char *const parts[] = {"the", " the", "aaaa",  "é",       "\n\n",     "  ",
                                        "'s",  "'ll",  "12",    "\xff",    "\xe2\x82", "漢",
                                        "\t",  "Ω",    "hello", "\xc2\x85"};
    static char text[4096];
    for (uint64_t round = 0; round < 300; round++) {
        size_t n = 0;
        check_case("round trip %d", (int)round);
        for (uint64_t i = 0; n < 3000 && i < round; i++) {
            const char *part = parts[check_below(16, round, 2 * i)];
            if (check_below(3, round, 2 * i + 1))
                n += (size_t)sprintf(text + n, "%s", part);
            else
                text[n++] = (char)check_below(256, round + 1000, i);
        }
        round_trip(t, text, n);
    }
}

static void test_bytes(void) {
    char all[256];
    tokenizer *t = tokenizer_open(CONFIG_BYTE, "", &why);
    check_case("bytes");
    for (int i = 0; i < 256; i++) all[i] = (char)i;
    CHECK(t && tokenizer_vocab_size(t) == 256 && tokenizer_separator(t) == '\n', "bytes");
    token_list list = {NULL, 0, 0};
    CHECK(tokenizer_encode(t, all, 256, &list, &why) && list.count == 256, "a token a byte");
    for (int i = 0; i < 256; i++) CHECK(list.ids[i] == i, "byte %d is token %d", i, list.ids[i]);
    token_list_free(&list);
    round_trip(t, all, 256);
    random_round_trips(t);
    size_t n;
    tokenizer_bytes(t, 256, &n);
    CHECK(!n, "token 256 has no bytes");
    tokenizer_bytes(t, -1, &n);
    CHECK(!n, "token -1 has no bytes");
    tokenizer_close(t);
}

/* Words, as the published splitter cuts them; each is encoded by itself. */
static void test_words(tokenizer *t) {
    static const struct {
        const char *text, *words[12];
    } cases[] = {
        {"the the", {"the", " the"}},
        {"it's we'll", {"it", "'s", " we", "'ll"}},
        {"a  b", {"a", " ", " b"}},
        {"a \n\n b", {"a", " \n\n", " b"}},
        {"end  ", {"end", "  "}},
        {"x12y!! ?", {"x", "12", "y", "!!", " ?"}},
        {" 12\xc2\xbd", {" 12\xc2\xbd"}},
        {"h\xc3\xa9llo w\xc3\xb6rld", {"h\xc3\xa9llo", " w\xc3\xb6rld"}},
        {"a\xc2\xa0\xc2\xa0"
         "b",
         {"a", "\xc2\xa0", "\xc2\xa0", "b"}},
        {"a\xc2\xa0!", {"a", "\xc2\xa0", "!"}},
        {"aa\xff"
         "aa",
         {"aa", "\xff", "aa"}},
        {"\xe2\x82\xac"
         "5",
         {"\xe2\x82\xac", "5"}},
        {"'S", {"'", "S"}},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        int32_t want[64];
        size_t n = 0;
        token_list list = {NULL, 0, 0};
        check_case("words of \"%s\"", cases[c].text);
        for (int w = 0; cases[c].words[w]; w++)
            n += plain_encode(cases[c].words[w], strlen(cases[c].words[w]), want + n);
        CHECK(tokenizer_encode(t, cases[c].text, strlen(cases[c].text), &list, &why), "%s",
              why.text);
        if (CHECK(list.count == n, "%zu tokens, must be %zu", list.count, n))
            CHECK_BITS("tokens", list.ids, want, n * sizeof *want, sizeof *want);
        token_list_free(&list);
    }
}

/* One word at a time of letters that all merge with each other in some way. */
static void test_joining(tokenizer *t) {
    static const char letters[] = "aathelo";
    char word[64];
    for (uint64_t round = 0; round < 2000; round++) {
        int32_t want[64];
        token_list list = {NULL, 0, 0};
        int n = 1 + check_below(40, round, 0);
        for (int i = 0; i < n; i++) word[i] = letters[check_below(7, round, (uint64_t)i + 1)];
        word[n] = 0;
        check_case("joining %s", word);
        size_t count = plain_encode(word, (size_t)n, want);
        CHECK(tokenizer_encode(t, word, (size_t)n, &list, &why), "%s", why.text);
        if (CHECK(list.count == count, "%zu tokens, must be %zu", list.count, count))
            CHECK_BITS("tokens", list.ids, want, count * sizeof *want, sizeof *want);
        token_list_free(&list);
    }
}

/* A word of a megabyte must not take a time that grows with its square: it would not end. */
static void test_long_word(tokenizer *t) {
    enum { N = 1 << 20 };
    char *word = malloc(N);
    if (!word) exit(1);
    memset(word, 'a', N);
    token_list list = {NULL, 0, 0};
    check_case("a long word");
    CHECK(tokenizer_encode(t, word, N, &list, &why) && list.count == N / 4, "%zu tokens",
          list.count);
    token_list_free(&list);
    free(word);
}

static void test_bpe(void) {
    test_mkdir("gpt2");
    write_vocabulary(test_path("gpt2"));
    prepare_merges();
    tokenizer *t = tokenizer_open(CONFIG_GPT2, test_path("gpt2"), &why);
    if (!CHECK(t != NULL, "open: %s", why.text)) return;
    CHECK(tokenizer_vocab_size(t) == VOCAB, "%d tokens", tokenizer_vocab_size(t));
    CHECK(tokenizer_separator(t) == id_of(VOCAB - 1), "separator %d", tokenizer_separator(t));
    test_words(t);
    test_joining(t);
    random_round_trips(t);
    test_long_word(t);
    tokenizer_close(t);
}

/* Without its files GPT-2's vocabulary has its size, which is enough for ready-made tokens. */
static void test_without_files(void) {
    token_list list = {NULL, 0, 0};
    size_t n;
    tokenizer *t = tokenizer_open(CONFIG_GPT2, "", &why);
    check_case("gpt2 without files");
    CHECK(t && tokenizer_vocab_size(t) == 50257 && tokenizer_separator(t) == 50256, "sizes");
    TEST_FAULT(tokenizer_encode(t, "a", 1, &list, &why), &why, "data.tokenizer_path&vocab.json");
    tokenizer_bytes(t, 5, &n);
    CHECK(!n, "no bytes");
    tokenizer_close(t);
}

static void refuse(const char *vocab, const char *list, const char *words) {
    check_case("%s", words);
    if (vocab) test_write_text(test_path("bad/vocab.json"), vocab);
    if (list) test_write_text(test_path("bad/merges.txt"), list);
    tokenizer *t = tokenizer_open(CONFIG_GPT2, test_path("bad"), &why);
    TEST_FAULT(t != NULL, &why, words);
    tokenizer_close(t);
}

static void test_bad_files(void) {
    size_t bytes;
    test_mkdir("bad");
    refuse(NULL, NULL, "bad: must be a folder that has tokenizer.json, or vocab.json");
    refuse("", NULL, "vocab.json:1: not JSON");
    refuse("[1]", NULL, "must be a JSON object");
    refuse("{}", NULL, "must be a JSON object");
    refuse("{\"a\": 1, \"a\": 2}", NULL, "not JSON&duplicate");
    refuse("{\"a\": -1}", NULL, "token \"a\"&an integer in 0 ..");
    refuse("{\"a\": 16777216}", NULL, "token \"a\"&an integer in 0 ..");
    refuse("{\"a\": \"b\"}", NULL, "token \"a\"&an integer in 0 ..");
    refuse("{\"a\": 0, \"b\": 0}", NULL, "id 0 is given twice");
    refuse("version https://git-lfs.github.com/spec/v1\n", NULL,
           "vocab.json: a pointer of Git LFS");
    refuse("{\"a b\": 0}", NULL, "not spelled in GPT-2's byte alphabet");
    refuse("{\"\xe6\xbc\xa2\": 0}", NULL, "not spelled in GPT-2's byte alphabet");
    refuse("{\"a\": 0}", NULL, "no token for byte 0; all 256 are needed");
    char *vocab = test_read(test_path("gpt2/vocab.json"), &bytes);
    char *end = strstr(vocab, "endoftext");
    end[0] = 'E';
    refuse(vocab, NULL, "no token <|endoftext|>");
    end[0] = 'e';
    refuse(vocab, NULL, "merges.txt: cannot open");
    refuse(vocab, "#version: 0.2\nt h\nth\n", "merges.txt:3: \"th\" must be two tokens");
    refuse(vocab, "t h e\n", "merges.txt:1: \"t h e\" must be two tokens");
    refuse(vocab, "t zz\n", "merges.txt:1: \"t zz\" names a token that vocab.json lacks");
    refuse(vocab, "t e\n", "merges.txt:1: \"t e\" makes a token that vocab.json lacks");
    refuse(vocab, "t h\nt h\n", "merges.txt:2: \"t h\" is given twice");
    refuse(vocab, "t \xc3\n", "merges.txt:1:&names a token that vocab.json lacks");
    refuse(vocab, "t \xff\xff\n", "merges.txt:1:&names a token that vocab.json lacks");
    free(vocab);
}

int main(void) {
    test_begin();
    test_bytes();
    test_bpe();
    test_without_files();
    test_bad_files();
    return test_end("test_tokenizer");
}

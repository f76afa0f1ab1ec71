/* fuzz_tokenizer.c - tokenizer.json as anybody may have written it, and texts of any bytes. Twin:
   examples/trainer/data/bpe.c, bpe_load.c, bpe_pattern.c. vocab.json and merges.txt are
   fuzz_checkpoint.c's.

   The first byte says which. 0: the rest is the file. 1: up to a zero byte it is a pattern, behind
   it a text. 2: the same with the text between added tokens. 3: parts of the file, up to a zero
   byte, stand where the pre_tokenizer does. */
#include "files.h"

#include <jansson.h>

#include "config/config.h"
#include "data/tokenizer.h"

static const char words[] = "the cat\nsat on\t\xc3\xa9 \xff mats <|a|>";

/* {"a": 0, ...} of all bytes, as GPT-2 spells them, and the end of text. */
static json_t *vocabulary(void) {
    json_t *vocab = json_object();
    for (int b = 0, other = 256; b < 256; b++) {
        int plain = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        int c = plain ? b : other++;
        char name[3] = {(char)c, 0, 0};
        if (c >= 128) name[0] = (char)(0xc0 | c >> 6), name[1] = (char)(0x80 | (c & 63));
        json_object_set_new(vocab, name, json_integer(b));
    }
    json_object_set_new(vocab, "<|endoftext|>", json_integer(256));
    json_object_set_new(vocab, "th", json_integer(257));
    json_object_set_new(vocab, "the", json_integer(258));
    return vocab;
}

/* Writes a sound file with this splitter and these added tokens, which it takes over. */
static void write_file(json_t *splitter, json_t *added) {
    json_t *root =
        json_pack("{s:o, s:o, s:{s:s, s:o, s:[s, s]}}", "added_tokens", added, "pre_tokenizer",
                  splitter, "model", "type", "BPE", "vocab", vocabulary(), "merges", "t h", "th e");
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    fuzz_write("tokenizer.json", text ? text : "", text ? strlen(text) : 0);
    free(text);
    json_decref(root);
}

static json_t *split_by(const char *pattern) {
    return json_pack("{s:s, s:[{s:s, s:{s:s}, s:s}, {s:s, s:b}]}", "type", "Sequence",
                     "pretokenizers", "type", "Split", "pattern", "Regex", pattern, "behavior",
                     "Isolated", "type", "ByteLevel", "use_regex", 0);
}

/* Tokens spell the text, or a message says why there are none. A normal form may be another
   text. */
static void encode(tokenizer *t, const char *text, size_t bytes, int changed) {
    fault why;
    token_list list = {NULL, 0, 0};
    size_t at = 0, n;
    if (!tokenizer_encode(t, text, bytes, &list, &why)) {
        FUZZ_ASSERT(strstr(why.text, fuzz_folder), "no file is named: %s", why.text);
        token_list_free(&list);
        return;
    }
    for (size_t i = 0; i < list.count; i++) {
        const char *piece = tokenizer_bytes(t, list.ids[i], &n);
        FUZZ_ASSERT(n, "token %zu has no bytes", i);
        if (changed) continue;
        FUZZ_ASSERT(at + n <= bytes && !memcmp(text + at, piece, n), "token %zu", i);
        at += n;
    }
    FUZZ_ASSERT(changed || at == bytes, "%zu bytes of %zu come back", at, bytes);
    token_list_free(&list);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static char copy[1 << 16];
    fault why;
    if (!size || size > sizeof copy) return -1;
    int kind = input[0] % 4;
    memcpy(copy, input + 1, size - 1);
    copy[size - 1] = 0;
    size_t first = strlen(copy), rest = first + 1 < size ? first + 1 : first;
    const char *text = copy + rest;
    size_t bytes = size - 1 - rest;
    if (kind == 0) {
        fuzz_write("tokenizer.json", copy, size - 1);
    } else if (kind == 3) {
        json_t *splitter = json_loadb(copy, first, 0, NULL);
        if (!splitter) return -1;
        write_file(splitter, json_array());
    } else {
        json_t *splitter = split_by(copy);
        if (!splitter) return -1; /* a pattern that is no UTF-8 */
        json_t *added = json_array();
        if (kind == 2) {
            json_array_append_new(added, json_pack("{s:i, s:s}", "id", 300, "content", "<|a|>"));
            json_array_append_new(added, json_pack("{s:i, s:s}", "id", 301, "content", "<|a"));
            json_array_append_new(added, json_pack("{s:i, s:s}", "id", 302, "content", "a"));
        }
        write_file(splitter, added);
    }
    tokenizer *t = tokenizer_open(CONFIG_GPT2, fuzz_folder, &why);
    if (!t) {
        FUZZ_ASSERT(why.text[0] && !strpbrk(why.text, "\n\033"), "message: %s", why.text);
        return 0;
    }
    int changed = strstr(copy, "NFC") != NULL;
    encode(t, words, sizeof words - 1, changed);
    encode(t, text, bytes, changed);
    tokenizer_close(t);
    return 0;
}

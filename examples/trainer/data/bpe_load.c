/* bpe_load.c - vocabularies of byte-level BPE: vocab.json maps a token, its bytes spelled in
   printable characters, to its id; merges.txt lists the pairs to join, first come first joined; or
   tokenizer.json has both, and how a text is split. Twin: bpe_vocab.h. */
#include "data/bpe_vocab.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/files.h"
#include "base/json_file.h"

/* A table has a row for each id, so that one large number would ask for any amount of memory; files
   of FILE_LIMIT hold no more tokens than TOKEN_LIMIT. */
enum { FILE_LIMIT = 1 << 26, TOKEN_LIMIT = 1 << 24, PATH_ROOM = 2048 };

/* GPT-2 spells a byte as the character of that number where it is printable in Latin-1, and the
   others, in order, as the characters from 256 on. */
static int byte_of_character(uint32_t character) {
    if ((character >= 33 && character <= 126) || (character >= 161 && character <= 172) ||
        (character >= 174 && character <= 255))
        return (int)character;
    if (character < 256) return -1;
    uint32_t n = character - 256;
    if (n <= 32) return (int)n;
    if (n <= 66) return (int)(127 + n - 33);
    return n == 67 ? 173 : -1;
}

/* One character of UTF-8 up to U+07FF; the alphabet ends at U+0143. What is malformed spells
   nothing; the zero byte behind the text bounds the read. */
static uint32_t next_character(const char **text) {
    const unsigned char *s = (const unsigned char *)*text;
    *text += s[0] < 0x80 ? 1 : 2;
    if (s[0] < 0x80) return s[0];
    bool two = (s[0] & 0xe0) == 0xc0 && (s[1] & 0xc0) == 0x80;
    return two ? (uint32_t)(s[0] & 0x1f) << 6 | (s[1] & 0x3f) : UINT32_MAX;
}

/* Spelled characters to bytes; -1: a character that spells none. `to` has room for strlen(from). */
static int64_t unspell(const char *from, const char *end, char *to) {
    int64_t n = 0;
    while (from < end) {
        int byte = byte_of_character(next_character(&from));
        if (byte < 0) return -1;
        to[n++] = (char)byte;
    }
    return n;
}

bool bpe_vocab_spells(const char *token, int64_t byte) {
    return byte_of_character(next_character(&token)) == byte && !*token;
}

static const char *bytes_of(const bpe_vocab *v, int32_t id) {
    return v->arena + v->tokens[id].begin;
}

static size_t id_slot(const bpe_vocab *v, const char *bytes, size_t count) {
    size_t slot = (size_t)XXH64(bytes, count, 0) & (v->id_slots - 1);
    for (;; slot = (slot + 1) & (v->id_slots - 1)) {
        int32_t id = v->ids[slot];
        if (id < 0) return slot;
        if (v->tokens[id].bytes == count && !memcmp(bytes_of(v, id), bytes, count)) return slot;
    }
}

int32_t bpe_vocab_id(const bpe_vocab *v, const char *bytes, size_t count) {
    return v->ids[id_slot(v, bytes, count)];
}

static size_t merge_slot(const bpe_vocab *v, int32_t left, int32_t right) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t slot = (size_t)((key * 0x9E3779B97F4A7C15u) >> 20) & (v->merge_slots - 1);
    for (;; slot = (slot + 1) & (v->merge_slots - 1)) {
        const bpe_merge *m = &v->merges[slot];
        if (m->left < 0 || (m->left == left && m->right == right)) return slot;
    }
}

const bpe_merge *bpe_vocab_merge(const bpe_vocab *v, int32_t left, int32_t right) {
    const bpe_merge *m = &v->merges[merge_slot(v, left, right)];
    return m->left < 0 ? NULL : m;
}

static size_t slots_for(size_t count) {
    size_t slots = 16;
    while (slots < count * 2) slots *= 2;
    return slots;
}

/* ---- vocab.json ---- */

static const char gpt2_end[] = "<|endoftext|>";

/* Sizes of the vocabulary: ids must be distinct integers from 0. */
static bool measure(bpe_vocab *v, json_t *root, const char *path, size_t *bytes, fault *f) {
    const char *token;
    json_t *id;
    json_int_t largest = -1;
    *bytes = 0;
    if (!json_is_object(root) || !json_object_size(root))
        return fault_set(f, "%s: must be a JSON object of tokens and their ids", path);
    json_object_foreach(root, token, id) {
        json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
        if (value < 0 || value >= TOKEN_LIMIT)
            return fault_set(
                f,
                "%s: token \"%.60s\": its id must be an integer in 0 .. %d: there is a "
                "table of all ids",
                path, token, TOKEN_LIMIT - 1);
        if (value > largest) largest = value;
        *bytes += strlen(token);
    }
    v->size = (int32_t)(largest + 1);
    v->id_slots = slots_for(json_object_size(root));
    return true;
}

/* The contents of added tokens, as the keys of an object. */
static json_t *contents_of(const json_t *added) {
    json_t *all = json_object();
    for (size_t i = 0; i < json_array_size(added); i++) {
        const char *one = json_string_value(json_object_get(json_array_get(added, i), "content"));
        if (one && *one) (void)json_object_set_new(all, one, json_true());
    }
    return all;
}

/* `special`: whoever makes a tokenizer.json may list its added tokens among the others, spelled as
   they are: no bytes are joined to these. */
static bool fill_vocab(bpe_vocab *v, json_t *root, const json_t *special, const char *path,
                       fault *f) {
    const char *token;
    json_t *value;
    size_t used = 0;
    json_object_foreach(root, token, value) {
        int32_t id = (int32_t)json_integer_value(value);
        int64_t n = unspell(token, token + strlen(token), v->arena + used);
        bool whole = n <= 0 && json_object_get(special, token);
        if (whole) memcpy(v->arena + used, token, (size_t)(n = (int64_t)strlen(token)));
        if (n <= 0)
            return fault_set(f, "%s: token \"%.60s\" is not spelled in GPT-2's byte alphabet", path,
                             token);
        if (v->tokens[id].bytes)
            return fault_set(f, "%s: id %d is given twice, the second time to \"%.60s\"", path, id,
                             token);
        v->tokens[id].begin = used;
        v->tokens[id].bytes = (size_t)n;
        if (!whole) v->ids[id_slot(v, v->arena + used, (size_t)n)] = id;
        used += (size_t)n;
    }
    return true;
}

static bool find_bytes(bpe_vocab *v, const char *path, fault *f) {
    for (int byte = 0; byte < 256; byte++) {
        char c = (char)byte;
        v->of_byte[byte] = bpe_vocab_id(v, &c, 1);
        if (v->of_byte[byte] < 0)
            return fault_set(f, "%s: no token for byte %d; all 256 are needed", path, byte);
    }
    return true;
}

/* The tokens of root, in an arena of so many bytes. */
static bool take_tokens(bpe_vocab *v, json_t *root, const json_t *special, size_t bytes,
                        const char *path, fault *f) {
    v->tokens = calloc((size_t)v->size, sizeof *v->tokens);
    v->arena = malloc(bytes + 1);
    v->ids = malloc(v->id_slots * sizeof *v->ids);
    if (!v->tokens || !v->arena || !v->ids) return fault_set(f, "%s: out of memory", path);
    memset(v->ids, 0xff, v->id_slots * sizeof *v->ids); /* all -1 */
    return fill_vocab(v, root, special, path, f);
}

static bool load_vocab(bpe_vocab *v, const char *path, fault *f) {
    size_t bytes;
    json_t *root = json_file_read(path, &json_of_tokens, f);
    bool ok = root && measure(v, root, path, &bytes, f) &&
              take_tokens(v, root, NULL, bytes, path, f) && find_bytes(v, path, f);
    if (ok) v->end_of_text = bpe_vocab_id(v, gpt2_end, sizeof gpt2_end - 1);
    if (ok && v->end_of_text < 0) ok = fault_set(f, "%s: no token %s", path, gpt2_end);
    if (ok) ok = (v->added = malloc(sizeof *v->added)) || fault_set(f, "%s: out of memory", path);
    if (ok) { /* taken out of a text as it stands, as tokenizer.json of the same vocabulary says */
        v->added[v->added_count++] = v->end_of_text;
        v->added_first = 1;
        v->starts[(unsigned char)gpt2_end[0]] = true;
    }
    json_decref(root);
    return ok;
}

/* ---- merges.txt ---- */

/* The id of a spelled token, or -1. `bytes` has room for its spelling. */
static int32_t spelled_id(const bpe_vocab *v, const char *from, const char *end, char *bytes,
                          size_t *count) {
    int64_t n = unspell(from, end, bytes);
    if (n <= 0) return -1;
    *count = (size_t)n;
    return bpe_vocab_id(v, bytes, *count);
}

static bool add_merge(bpe_vocab *v, const char *line, size_t length, int32_t rank, char *bytes,
                      const char **why) {
    const char *space = memchr(line, ' ', length), *end = line + length;
    size_t a = 0, b = 0;
    *why = "must be two tokens with one space between";
    if (!space || memchr(space + 1, ' ', (size_t)(end - space - 1))) return false;
    *why = "names a token that vocab.json lacks";
    int32_t left = spelled_id(v, line, space, bytes, &a);
    if (left < 0) return false;
    int32_t right = spelled_id(v, space + 1, end, bytes + a, &b);
    if (right < 0) return false;
    *why = "makes a token that vocab.json lacks";
    int32_t merged = bpe_vocab_id(v, bytes, a + b);
    if (merged < 0) return false;
    *why = "is given twice";
    bpe_merge *m = &v->merges[merge_slot(v, left, right)];
    if (m->left >= 0) return false;
    m->left = left;
    m->right = right;
    m->rank = rank;
    m->merged = merged;
    v->sum = XXH64(m, sizeof *m, v->sum);
    return true;
}

static size_t count_lines(const char *text, size_t bytes) {
    size_t lines = 1;
    for (size_t i = 0; i < bytes; i++) lines += text[i] == '\n';
    return lines;
}

static bool fill_merges(bpe_vocab *v, const char *path, const char *text, char *room, fault *f) {
    const char *why;
    int32_t rank = 0, number = 1;
    for (const char *line = text; *line; number++) {
        size_t length = strcspn(line, "\n");
        const char *next = line + length + (line[length] == '\n');
        if (length && line[length - 1] == '\r') length--;
        bool skip = !length || (number == 1 && !strncmp(line, "#version", 8));
        if (!skip && !add_merge(v, line, length, rank++, room, &why))
            return fault_set(f, "%s:%d: \"%.*s\" %s", path, number,
                             (int)(length < 80 ? length : 80), line, why);
        line = next;
    }
    return true;
}

static bool load_merges(bpe_vocab *v, const char *path, fault *f) {
    size_t bytes;
    char *text = files_read(path, FILE_LIMIT, &bytes, f);
    if (!text) return false;
    v->merge_slots = slots_for(count_lines(text, bytes));
    v->merges = malloc(v->merge_slots * sizeof *v->merges);
    char *room = malloc(bytes + 1);
    bool ok = v->merges && room;
    if (!ok) fault_set(f, "%s: out of memory", path);
    for (size_t i = 0; ok && i < v->merge_slots; i++) v->merges[i].left = -1;
    ok = ok && fill_merges(v, path, text, room, f);
    free(room);
    free(text);
    return ok;
}

/* ---- tokenizer.json ---- */

/* The splitter of GPT-2, as its authors published it. */
static const char gpt2_words[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+|"
                                 " ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static bool add_pattern(bpe_vocab *v, const char *text, fault *f) {
    if (v->pattern_count == BPE_PATTERNS)
        return fault_set(f, "more than %d splitters", BPE_PATTERNS);
    size_t bytes = strlen(text) + 1;
    char *copy = malloc(bytes);
    if (!copy) return fault_set(f, "out of memory");
    memcpy(copy, text, bytes);
    v->patterns[v->pattern_count++] = copy;
    return true;
}

static bool is_word(const json_t *object, const char *key, const char *word) {
    const char *text = json_string_value(json_object_get(object, key));
    return text && !strcmp(text, word);
}

/* ByteLevel that says that it adds no space and, as `splits` says, splits by GPT-2's pattern or not
   at all. */
static bool is_byte_level(const json_t *x, bool splits) {
    return is_word(x, "type", "ByteLevel") &&
           json_is_false(json_object_get(x, "add_prefix_space")) &&
           !json_is_false(json_object_get(x, "use_regex")) == splits;
}

/* One of these splits a text of its own; ByteLevel is the last of them. */
static bool read_splitter(bpe_vocab *v, const json_t *x, bool *last, fault *f) {
    const json_t *list = json_object_get(x, "pretokenizers"), *regex;
    if (*last) return fault_set(f, "ByteLevel must be the last of them");
    if (is_word(x, "type", "Sequence")) {
        bool ok = true;
        for (size_t i = 0; ok && i < json_array_size(list); i++)
            ok = !json_object_get(json_array_get(list, i), "pretokenizers") &&
                 read_splitter(v, json_array_get(list, i), last, f);
        return ok || fault_set(f, "a Sequence must be of Split, Digits and ByteLevel");
    }
    if (is_word(x, "type", "Digits")) {
        const json_t *said = json_object_get(x, "individual_digits");
        bool each = json_is_true(said);
        return json_is_boolean(said) && add_pattern(v, each ? "\\p{N}" : "\\p{N}+", f);
    }
    regex = json_object_get(json_object_get(x, "pattern"), "Regex");
    if (is_word(x, "type", "Split") && is_word(x, "behavior", "Isolated") && json_is_string(regex))
        return add_pattern(v, json_string_value(regex),
                           f); /* `invert` leaves the pieces as they are */
    *last = is_byte_level(x, true) || is_byte_level(x, false);
    return *last && (is_byte_level(x, false) || add_pattern(v, gpt2_words, f));
}

static bool read_splitters(bpe_vocab *v, const json_t *x, const char *path, fault *f) {
    bool last = false;
    fault unused;
    return (read_splitter(v, x, &last, &unused) && last) ||
           fault_set(f,
                     "%s: pre_tokenizer: must be ByteLevel, or a Sequence of Split by a Regex "
                     "(Isolated), Digits, and ByteLevel at its end, without add_prefix_space",
                     path);
}

/* Text as it is, or in Unicode's form C. */
static bool read_normalizer(bpe_vocab *v, const json_t *x, const char *path, fault *f) {
    const json_t *list = json_object_get(x, "normalizers");
    if (is_word(x, "type", "Sequence") && json_array_size(list) == 1) x = json_array_get(list, 0);
    bool none = !x || json_is_null(x) || (is_word(x, "type", "Sequence") && !json_array_size(list));
    v->nfc = is_word(x, "type", "NFC");
    if (!none && !v->nfc) return fault_set(f, "%s: normalizer: must be null or NFC", path);
#if !NSA_HAVE_UTF8PROC
    if (v->nfc)
        return fault_set(f,
                         "%s: normalizer: NFC needs utf8proc (Debian's libutf8proc-dev), and this "
                         "program was built without it",
                         path);
#endif
    return true;
}

/* What would give other tokens must not be there: null, an empty word or 0. */
static bool check_kind(const json_t *model, const char *path, fault *f) {
    static const char *const off[] = {"byte_fallback", "dropout", "continuing_subword_prefix",
                                      "end_of_word_suffix"};
    if (!is_word(model, "type", "BPE"))
        return fault_set(f, "%s: model: must be BPE over bytes", path);
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        const json_t *x = json_object_get(model, off[i]);
        bool is_off = !x || json_is_null(x) || json_is_false(x) ||
                      (json_is_number(x) && json_number_value(x) == 0) ||
                      (json_is_string(x) && !json_string_length(x));
        if (!is_off) return fault_set(f, "%s: model: %s: must be absent or null", path, off[i]);
    }
    return true;
}

/* Of an added token its id, -1 where it is none that is taken as it stands. The package knows a
   token that the vocabulary spells so by the vocabulary's id, whatever its own is. One may ask to
   be looked for in normalized text, which spells ASCII as it is. */
static json_int_t added_id(const bpe_vocab *v, const json_t *vocab, const json_t *x) {
    static const char *const off[] = {"lstrip", "rstrip", "single_word"};
    const char *content = json_string_value(json_object_get(x, "content"));
    const json_t *known = content ? json_object_get(vocab, content) : NULL;
    const json_t *id = known ? known : json_object_get(x, "id");
    bool normal = v->nfc && json_is_true(json_object_get(x, "normalized"));
    for (size_t i = 0; i < sizeof off / sizeof *off; i++)
        if (json_is_true(json_object_get(x, off[i]))) return -1;
    for (const char *c = content; normal && c && *c; c++)
        if ((unsigned char)*c >= 0x80) return -1;
    json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
    return value < TOKEN_LIMIT && json_string_length(json_object_get(x, "content")) ? value : -1;
}

/* The package numbers added tokens that the vocabulary lacks itself, one by one from the number of
   its tokens on, whatever their ids in the file: ids with gaps would be others there. `numbers` has
   those of the tokens before, by content. */
static bool check_number(const json_t *vocab, json_t *numbers, const json_t *x, json_int_t id,
                         json_int_t *largest, fault *f) {
    const char *content = json_string_value(json_object_get(x, "content"));
    const json_t *before = json_object_get(numbers, content);
    json_int_t tokens = (json_int_t)json_object_size(vocab), number = *largest + 1;
    if (json_object_get(vocab, content)) return true;
    if (before)
        number = json_integer_value(before);
    else if (number < tokens)
        number = tokens;
    if (id != number)
        return fault_set(f,
                         "\"%.60s\": its id is %lld; it must be %lld, for the package tokenizers "
                         "numbers these without gaps behind the vocabulary's %lld tokens",
                         content, (long long)id, (long long)number, (long long)tokens);
    *largest = number > *largest ? number : *largest;
    return !json_object_set_new(numbers, content, json_integer(number)) ||
           fault_set(f, "out of memory");
}

/* How many tokens and bytes the added ones need. */
static bool measure_added(bpe_vocab *v, const json_t *vocab, const json_t *list, size_t *bytes,
                          const char *path, fault *f) {
    json_t *numbers = json_object();
    json_int_t largest = -1;
    fault why;
    bool ok = true;
    if (list && !json_is_null(list) && !json_is_array(list))
        ok = fault_set(f, "%s: added_tokens: must be a list", path);
    for (size_t i = 0; ok && i < json_array_size(list); i++) {
        const json_t *x = json_array_get(list, i);
        json_int_t id = added_id(v, vocab, x);
        if (id < 0)
            ok = fault_set(f,
                           "%s: added_tokens, number %zu: must have an id in 0 .. %d and a "
                           "content; lstrip, rstrip and single_word must be false, and with NFC "
                           "normalized too where it is not ASCII",
                           path, i, TOKEN_LIMIT - 1);
        else if (!check_number(vocab, numbers, x, id, &largest, &why))
            ok = fault_set(f, "%s: added_tokens, number %zu: %.400s", path, i, why.text);
        if (id >= v->size) v->size = (int32_t)id + 1;
        *bytes += json_string_length(json_object_get(x, "content"));
    }
    json_decref(numbers);
    return ok;
}

/* The added tokens behind those of the vocabulary; `used` is where the arena is free. First those
   that are looked for in the text as it is, then those that are in what lies between. */
static bool fill_added(bpe_vocab *v, const json_t *vocab, const json_t *list, size_t used,
                       const char *path, fault *f) {
    size_t count = json_array_size(list), own = used;
    v->added = malloc((count + 1) * sizeof *v->added);
    if (!v->added) return fault_set(f, "%s: out of memory", path);
    for (size_t i = 0; i < 2 * count; i++) {
        const json_t *x = json_array_get(list, i % count), *content = json_object_get(x, "content");
        if (json_is_true(json_object_get(x, "normalized")) != (i >= count)) continue;
        int32_t id = (int32_t)added_id(v, vocab, x);
        bpe_span span = {used, json_string_length(content)};
        bool taken = v->tokens[id].bytes && v->tokens[id].begin < own;
        if (taken && !json_object_get(vocab, json_string_value(content)))
            return fault_set(f, "%s: added_tokens: id %d is that of another token", path, (int)id);
        memcpy(v->arena + used, json_string_value(content), span.bytes);
        used += span.bytes;
        v->tokens[id] = span;
        v->added[v->added_count++] = id;
        v->added_first += i < count;
        v->starts[(unsigned char)v->arena[span.begin]] = true;
    }
    return true;
}

/* What ends a document, by one of its usual names: an added token, or one of the vocabulary. */
static bool find_end(bpe_vocab *v, const char *path, fault *f) {
    static const char *const ends[] = {"<|endoftext|>", "<|end_of_text|>", "</s>"};
    if (v->end_of_text >= 0) return true; /* a template has said it */
    for (size_t e = 0; e < sizeof ends / sizeof *ends; e++) {
        size_t bytes = strlen(ends[e]);
        v->end_of_text = bpe_vocab_id(v, ends[e], bytes);
        for (size_t i = 0; v->end_of_text < 0 && i < v->added_count; i++) {
            bpe_span span = v->tokens[v->added[i]];
            if (span.bytes == bytes && !memcmp(v->arena + span.begin, ends[e], bytes))
                v->end_of_text = v->added[i];
        }
        if (v->end_of_text >= 0) return true;
    }
    return fault_set(f, "%s: no token %s, %s or %s", path, ends[0], ends[1], ends[2]);
}

/* "a b", or ["a", "b"]; `room` has room for both, and for their bytes. */
static bool fill_merge_list(bpe_vocab *v, const json_t *list, char *room, size_t bytes,
                            const char *path, fault *f) {
    const char *why;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *x = json_array_get(list, i);
        const char *a = json_string_value(json_is_array(x) ? json_array_get(x, 0) : x);
        const char *b = json_string_value(json_array_get(x, 1));
        int n = !a || (json_is_array(x) && (!b || json_array_size(x) != 2)) ? -1
                : b ? snprintf(room, bytes, "%s %s", a, b)
                    : snprintf(room, bytes, "%s", a);
        if (n < 0 || !add_merge(v, room, (size_t)n, (int32_t)i, room + bytes, &why))
            return fault_set(f, "%s: merges, number %zu: %s", path, i,
                             n < 0 ? "must be two tokens" : why);
    }
    return true;
}

static bool load_merge_list(bpe_vocab *v, const json_t *list, const char *path, fault *f) {
    size_t longest = 0;
    for (int32_t i = 0; i < v->size; i++)
        if (v->tokens[i].bytes > longest) longest = v->tokens[i].bytes;
    size_t bytes = 8 * longest + 64; /* two tokens, spelled by two bytes a byte, and more */
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *x = json_array_get(list, i);
        size_t a = json_string_length(json_is_array(x) ? json_array_get(x, 0) : x);
        size_t b = json_string_length(json_array_get(x, 1));
        if (a + b + 2 > bytes) bytes = a + b + 2;
    }
    v->merge_slots = slots_for(json_array_size(list) + 1);
    v->merges = malloc(v->merge_slots * sizeof *v->merges);
    char *room = malloc(2 * bytes);
    bool ok = (v->merges && room) || fault_set(f, "%s: out of memory", path);
    for (size_t i = 0; ok && i < v->merge_slots; i++) v->merges[i].left = -1;
    ok = ok && (json_is_array(list) || fault_set(f, "%s: merges: must be a list", path)) &&
         fill_merge_list(v, list, room, bytes, path, f);
    free(room);
    return ok;
}

/* ---- What stands around a text ---- */

static bool take_special(const bpe_vocab *v, const json_t *id, int32_t *to, const char *path,
                         fault *f) {
    json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
    if (value < 0 || value >= v->size)
        return fault_set(f, "%s: post_processor: names a token that the vocabulary lacks", path);
    *to = (int32_t)value;
    return true;
}

/* The one token of a piece of a template. */
static bool take_piece(const bpe_vocab *v, const json_t *x, const json_t *piece, int32_t *to,
                       const char *path, fault *f) {
    const char *name =
        json_string_value(json_object_get(json_object_get(piece, "SpecialToken"), "id"));
    const json_t *token = name ? json_object_get(json_object_get(x, "special_tokens"), name) : NULL;
    const json_t *ids = json_object_get(token, "ids");
    if (json_array_size(ids) != 1)
        return fault_set(f, "%s: post_processor: each special token must be one token", path);
    return take_special(v, json_array_get(ids, 0), to, path, f);
}

/* At most one token before a text, and one behind it. */
static bool read_template(bpe_vocab *v, const json_t *x, const char *path, fault *f) {
    const json_t *single = json_object_get(x, "single");
    size_t count = json_array_size(single), text = 0;
    while (text < count && !json_object_get(json_array_get(single, text), "Sequence")) text++;
    const json_t *whole = json_object_get(json_array_get(single, text), "Sequence");
    if (text == count || !is_word(whole, "id", "A") || text > 1 || count - text > 2)
        return fault_set(f,
                         "%s: post_processor: its template must be the text, with one token before "
                         "and one behind it at most",
                         path);
    return (!text || take_piece(v, x, json_array_get(single, 0), &v->prefix, path, f)) &&
           (count - text == 1 ||
            take_piece(v, x, json_array_get(single, text + 1), &v->end_of_text, path, f));
}

/* What a text begins with, and where it says so, what it ends with. Of two that add tokens the
   package lets the second see the first's as a text of their own. */
static bool read_around(bpe_vocab *v, const json_t *x, bool *adds, const char *path, fault *f) {
    const json_t *list = json_object_get(x, "processors");
    const char *type = json_string_value(json_object_get(x, "type"));
    if (!x || json_is_null(x) || is_word(x, "type", "ByteLevel")) return true;
    bool is_list = is_word(x, "type", "Sequence");
    if (!is_list && *adds)
        return fault_set(f, "%s: post_processor: at most one of them may add tokens", path);
    *adds = !is_list;
    if (is_word(x, "type", "TemplateProcessing")) return read_template(v, x, path, f);
    if (is_word(x, "type", "RobertaProcessing") || is_word(x, "type", "BertProcessing"))
        return take_special(v, json_array_get(json_object_get(x, "cls"), 1), &v->prefix, path, f) &&
               take_special(v, json_array_get(json_object_get(x, "sep"), 1), &v->end_of_text, path,
                            f);
    if (!is_list)
        return fault_set(f, "%s: post_processor: %.60s: unknown", path, type ? type : "of no type");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *inner = json_array_get(list, i);
        if (json_object_get(inner, "processors"))
            return fault_set(f, "%s: post_processor: a sequence within a sequence", path);
        if (!read_around(v, inner, adds, path, f)) return false;
    }
    return true;
}

/* ---- Files of transformers beside it ---- */

/* A token, or a list of tokens, each as its content or in an object with that. */
static bool check_named(const json_t *special, const char *path, const json_t *x, fault *f) {
    const json_t *inner = json_is_object(x) ? json_object_get(x, "content") : x;
    const char *token = json_string_value(inner);
    for (size_t i = 0; i < json_array_size(x); i++)
        if (!check_named(special, path, json_array_get(x, i), f)) return false;
    return !token || json_object_get(special, token) ||
           fault_set(f, "%s: token \"%.60s\": must be an added token of tokenizer.json too", path,
                     token);
}

/* What names tokens: "bos_token" and its like, and lists of others. */
static bool check_settings(const json_t *special, const char *path, json_t *root, fault *f) {
    const char *key;
    json_t *x;
    bool ok = true;
    if (json_is_true(json_object_get(root, "add_prefix_space")))
        ok = fault_set(f, "%s: add_prefix_space: must be false", path);
    json_object_foreach(json_object_get(root, "added_tokens_decoder"), key, x) {
        ok = ok && check_named(special, path, x, f);
    }
    json_object_foreach(root, key, x) {
        const char *end = strstr(key, "_token");
        ok = ok && (!end || (strcmp(end, "_token") && strcmp(end, "_tokens")) ||
                    check_named(special, path, x, f));
    }
    return ok;
}

/* They may add tokens, or a space: a text would have other tokens there. Their integers may be of
   any length. */
static bool check_beside(const json_t *special, const char *folder, fault *f) {
    static const char *const names[] = {"added_tokens.json", "special_tokens_map.json",
                                        "tokenizer_config.json"};
    char path[PATH_ROOM];
    bool ok = true;
    for (int i = 0; ok && i < 3; i++) {
        size_t bytes;
        const char *key;
        json_t *id, *root;
        if (!files_join(path, sizeof path, folder, names[i], f)) return false;
        if (!files_exist(path)) continue;
        char *text = files_read(path, FILE_LIMIT, &bytes, f);
        if (!text) return false;
        root = json_file_parse(path, text, bytes, &json_of_tokens, JSON_DECODE_INT_AS_REAL, f);
        free(text);
        ok = root && (i == 0 || check_settings(special, path, root, f));
        json_object_foreach(i ? NULL : root, key, id) {
            json_t *token = json_string(key);
            ok = ok && check_named(special, path, token, f);
            json_decref(token);
        }
        json_decref(root);
    }
    return ok;
}

static bool load_tokenizer(bpe_vocab *v, const char *folder, const char *path, fault *f) {
    size_t bytes, vocab_bytes;
    bool adds = false;
    json_t *root = json_file_read(path, &json_of_tokens, f);
    json_t *model = json_object_get(root, "model"), *vocab = json_object_get(model, "vocab");
    const json_t *added = json_object_get(root, "added_tokens");
    json_t *special = contents_of(added);
    const json_t *version = json_object_get(root, "version");
    bool ok = root && (!version || is_word(root, "version", "1.0") ||
                       fault_set(f, "%s: version: must be \"1.0\"", path));
    ok = ok && check_kind(model, path, f) &&
         read_normalizer(v, json_object_get(root, "normalizer"), path, f) &&
         read_splitters(v, json_object_get(root, "pre_tokenizer"), path, f) &&
         measure(v, vocab, path, &vocab_bytes, f);
    bytes = ok ? vocab_bytes : 0;
    ok = ok && measure_added(v, vocab, added, &bytes, path, f) &&
         take_tokens(v, vocab, special, bytes, path, f) &&
         fill_added(v, vocab, added, vocab_bytes, path, f) && find_bytes(v, path, f) &&
         read_around(v, json_object_get(root, "post_processor"), &adds, path, f) &&
         find_end(v, path, f) && load_merge_list(v, json_object_get(model, "merges"), path, f);
    ok = ok && check_beside(special, folder, f);
    if (ok) v->whole = json_is_true(json_object_get(model, "ignore_merges"));
    json_decref(special);
    json_decref(root);
    return ok;
}

/* Two forms of one vocabulary have the same sum. */
static void sum_up(bpe_vocab *v) {
    int32_t numbers[] = {v->size, v->end_of_text, v->prefix, v->nfc, v->whole};
    v->sum = XXH64(numbers, sizeof numbers, v->sum);
    v->sum = XXH64(v->added, v->added_count * sizeof *v->added, v->sum);
    for (int i = 0; i < v->pattern_count; i++)
        v->sum = XXH64(v->patterns[i], strlen(v->patterns[i]) + 1, v->sum);
    for (int32_t id = 0; id < v->size; id++) {
        size_t bytes = v->tokens[id].bytes;
        v->sum = XXH64(bytes_of(v, id), bytes, v->sum + bytes);
    }
}

/* The one added token of vocab.json. */
static bool check_end_alone(const char *folder, fault *f) {
    json_t *special = json_pack("{s:b}", gpt2_end, 1);
    bool ok = check_beside(special, folder, f);
    json_decref(special);
    return ok;
}

static bool load_folder(bpe_vocab *v, const char *folder, fault *f) {
    char path[PATH_ROOM];
    memset(v, 0, sizeof *v);
    v->prefix = v->end_of_text = -1;
    if (!files_join(path, sizeof path, folder, "tokenizer.json", f)) return false;
    if (files_exist(path)) return load_tokenizer(v, folder, path, f);
    if (!files_join(path, sizeof path, folder, "vocab.json", f)) return false;
    if (!files_exist(path))
        return fault_set(
            f, "%s: must be a folder that has tokenizer.json, or vocab.json and merges.txt",
            folder);
    return add_pattern(v, gpt2_words, f) && load_vocab(v, path, f) &&
           files_join(path, sizeof path, folder, "merges.txt", f) && load_merges(v, path, f) &&
           check_end_alone(folder, f);
}

bool bpe_vocab_load(bpe_vocab *v, const char *folder, fault *f) {
    if (!load_folder(v, folder, f)) return false;
    sum_up(v);
    return true;
}

void bpe_vocab_free(bpe_vocab *v) {
    free(v->tokens);
    free(v->arena);
    free(v->ids);
    free(v->merges);
    free(v->added);
    for (int i = 0; i < v->pattern_count; i++) free(v->patterns[i]);
}

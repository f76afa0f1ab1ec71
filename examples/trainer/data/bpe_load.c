/* bpe_load.c - GPT-2's vocabulary files: vocab.json maps a token, its bytes spelled in printable
   characters, to its id; merges.txt lists the pairs to join, first come first joined. Twin:
   bpe_vocab.h. */
#include "data/bpe_vocab.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/files.h"

enum { FILE_LIMIT = 1 << 28, TOKEN_LIMIT = 1 << 24, PATH_ROOM = 2048 };

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

static int32_t find_id(const bpe_vocab *v, const char *bytes, size_t count) {
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
            return fault_set(f, "%s: token \"%.60s\": its id must be an integer in 0 .. %d", path,
                             token, TOKEN_LIMIT - 1);
        if (value > largest) largest = value;
        *bytes += strlen(token);
    }
    v->size = (int32_t)(largest + 1);
    v->id_slots = slots_for(json_object_size(root));
    return true;
}

static bool fill_vocab(bpe_vocab *v, json_t *root, const char *path, fault *f) {
    const char *token;
    json_t *value;
    size_t used = 0;
    json_object_foreach(root, token, value) {
        int32_t id = (int32_t)json_integer_value(value);
        int64_t n = unspell(token, token + strlen(token), v->arena + used);
        if (n <= 0)
            return fault_set(f, "%s: token \"%.60s\" is not spelled in GPT-2's byte alphabet", path,
                             token);
        if (v->tokens[id].bytes)
            return fault_set(f, "%s: id %d is given twice, the second time to \"%.60s\"", path, id,
                             token);
        v->tokens[id].begin = used;
        v->tokens[id].bytes = (size_t)n;
        v->ids[id_slot(v, v->arena + used, (size_t)n)] = id;
        used += (size_t)n;
    }
    return true;
}

static bool find_special(bpe_vocab *v, const char *path, fault *f) {
    static const char end[] = "<|endoftext|>";
    for (int byte = 0; byte < 256; byte++) {
        char c = (char)byte;
        v->of_byte[byte] = find_id(v, &c, 1);
        if (v->of_byte[byte] < 0)
            return fault_set(f, "%s: no token for byte %d; all 256 are needed", path, byte);
    }
    v->end_of_text = find_id(v, end, sizeof end - 1);
    if (v->end_of_text < 0) return fault_set(f, "%s: no token %s", path, end);
    return true;
}

static bool load_vocab(bpe_vocab *v, const char *path, fault *f) {
    json_error_t e;
    size_t bytes;
    char *text = files_read(path, FILE_LIMIT, &bytes, f);
    if (!text) return false;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &e);
    free(text);
    if (!root) return fault_set(f, "%s:%d: not JSON: %s", path, e.line, e.text);
    bool ok = measure(v, root, path, &bytes, f);
    if (ok) {
        v->tokens = calloc((size_t)v->size, sizeof *v->tokens);
        v->arena = malloc(bytes + 1);
        v->ids = malloc(v->id_slots * sizeof *v->ids);
        ok = v->tokens && v->arena && v->ids;
        if (!ok) fault_set(f, "%s: out of memory", path);
    }
    if (ok) {
        memset(v->ids, 0xff, v->id_slots * sizeof *v->ids); /* all -1 */
        ok = fill_vocab(v, root, path, f) && find_special(v, path, f);
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
    return find_id(v, bytes, *count);
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
    int32_t merged = find_id(v, bytes, a + b);
    if (merged < 0) return false;
    *why = "is given twice";
    bpe_merge *m = &v->merges[merge_slot(v, left, right)];
    if (m->left >= 0) return false;
    m->left = left;
    m->right = right;
    m->rank = rank;
    m->merged = merged;
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

bool bpe_vocab_load(bpe_vocab *v, const char *folder, fault *f) {
    char path[PATH_ROOM];
    memset(v, 0, sizeof *v);
    return files_join(path, sizeof path, folder, "vocab.json", f) && load_vocab(v, path, f) &&
           files_join(path, sizeof path, folder, "merges.txt", f) && load_merges(v, path, f);
}

void bpe_vocab_free(bpe_vocab *v) {
    free(v->tokens);
    free(v->arena);
    free(v->ids);
    free(v->merges);
}

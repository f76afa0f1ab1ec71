/* tokenizer.c - bytes as tokens, and the door to GPT-2's BPE (bpe.c). Twin: tokenizer.h. */
#include "data/tokenizer.h"

#include <stdlib.h>
#include <xxhash.h>

#include "config/config.h"
#include "data/bpe.h"
#include "data/bpe_vocab.h"

/* Of the published GPT-2 vocabulary: enough to train on ready-made tokens without its files. */
enum { GPT2_VOCAB_SIZE = 50257, GPT2_END_OF_TEXT = 50256 };

struct tokenizer {
    bool is_byte;
    bpe *bpe; /* NULL: bytes, or GPT-2 without its files */
};

tokenizer *tokenizer_open(int64_t kind, const char *folder, fault *f) {
    tokenizer *t = calloc(1, sizeof *t);
    if (!t) {
        fault_set(f, "out of memory");
        return NULL;
    }
    t->is_byte = kind == CONFIG_BYTE;
    if (t->is_byte || !folder[0]) return t;
    t->bpe = bpe_open(folder, f);
    if (t->bpe) return t;
    tokenizer_close(t);
    return NULL;
}

void tokenizer_close(tokenizer *t) {
    if (!t) return;
    bpe_close(t->bpe);
    free(t);
}

int32_t tokenizer_vocab_size(const tokenizer *t) {
    if (t->is_byte) return 256;
    return t->bpe ? bpe_vocab_size(t->bpe) : GPT2_VOCAB_SIZE;
}

int32_t tokenizer_separator(const tokenizer *t) {
    if (t->is_byte) return '\n';
    return t->bpe ? bpe_end_of_text(t->bpe) : GPT2_END_OF_TEXT;
}

int32_t tokenizer_end(const tokenizer *t) {
    return t->is_byte ? -1 : tokenizer_separator(t);
}

bool tokenizer_spells(const char *token, int64_t byte) {
    return bpe_vocab_spells(token, byte);
}

int32_t tokenizer_prefix(const tokenizer *t) {
    return t->bpe ? bpe_prefix(t->bpe) : -1;
}

uint64_t tokenizer_sum(const tokenizer *t) {
    return t->bpe ? bpe_sum(t->bpe) : 0;
}

uint64_t tokenizer_spelling(const tokenizer *t, int32_t count) {
    uint64_t sum = 0;
    size_t bytes;
    if (count > tokenizer_vocab_size(t)) count = tokenizer_vocab_size(t);
    for (int32_t id = 0; (t->is_byte || t->bpe) && id < count; id++) {
        const char *text = tokenizer_bytes(t, id, &bytes);
        sum = XXH64(text, bytes, sum + bytes);
    }
    return sum;
}

bool tokenizer_is_byte(const tokenizer *t) {
    return t->is_byte;
}

bool tokenizer_encode(tokenizer *t, const char *text, size_t bytes, token_list *out, fault *f) {
    if (t->bpe) return bpe_encode(t->bpe, text, bytes, out, f);
    if (!t->is_byte)
        return fault_set(f, "data.tokenizer_path: must name the folder that holds vocab.json and "
                            "merges.txt before text can be encoded");
    for (size_t i = 0; i < bytes; i++)
        if (!token_list_push(out, (unsigned char)text[i]))
            return fault_set(f, "out of memory for tokens");
    return true;
}

bool tokenizer_encode_document(tokenizer *t, const char *text, size_t bytes, token_list *out,
                               fault *f) {
    int32_t prefix = tokenizer_prefix(t);
    if (!bytes) return true;
    return (prefix < 0 || token_list_push(out, prefix) ||
            fault_set(f, "out of memory for tokens")) &&
           tokenizer_encode(t, text, bytes, out, f) &&
           (token_list_push(out, tokenizer_separator(t)) ||
            fault_set(f, "out of memory for tokens"));
}

const char *tokenizer_bytes(const tokenizer *t, int32_t id, size_t *bytes) {
    static const char all[] = {
#define FOUR(n)       (char)(n), (char)((n) + 1), (char)((n) + 2), (char)((n) + 3)
#define SIXTEEN(n)    FOUR(n), FOUR((n) + 4), FOUR((n) + 8), FOUR((n) + 12)
#define SIXTY_FOUR(n) SIXTEEN(n), SIXTEEN((n) + 16), SIXTEEN((n) + 32), SIXTEEN((n) + 48)
        SIXTY_FOUR(0), SIXTY_FOUR(64), SIXTY_FOUR(128), SIXTY_FOUR(192)};
    if (t->bpe) return bpe_bytes(t->bpe, id, bytes);
    *bytes = t->is_byte && id >= 0 && id < 256;
    return *bytes ? all + id : "";
}

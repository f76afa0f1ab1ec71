/* bpe_vocab.h - what bpe_load.c reads and bpe.c encodes with: the bytes of each token, the token of
   some bytes, the merge of two tokens. Twin: bpe_load.c. */
#ifndef BPE_VOCAB_H
#define BPE_VOCAB_H

#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"

enum { BPE_PATTERNS = 16 };

typedef struct bpe_span {
    size_t begin, bytes; /* in arena; bytes 0: no such token */
} bpe_span;

typedef struct bpe_merge {
    int32_t left, right; /* left -1: an empty slot */
    int32_t rank, merged;
} bpe_merge;

typedef struct bpe_vocab {
    int32_t size, end_of_text;
    int32_t prefix; /* what a text begins with; -1: nothing */
    int32_t *added; /* tokens that are taken out of a text before it is split into words */
    size_t added_count, added_first; /* those that are looked for first, before the others */
    bool starts[256];                /* whether one of them begins with this byte */
    char *patterns[BPE_PATTERNS]; /* that split a text into words, each what the one before left */
    int pattern_count;
    bool nfc;     /* text is brought to Unicode's form C first */
    bool whole;   /* a word that is a token is not taken apart first */
    uint64_t sum; /* of all that tells which tokens a text becomes */
    int32_t of_byte[256];
    bpe_span *tokens; /* by id */
    char *arena;
    int32_t *ids; /* hash table: bytes to id, -1 empty */
    bpe_merge *merges;
    size_t id_slots, merge_slots; /* powers of two, at most half full */
} bpe_vocab;

/* From tokenizer.json, where the folder has one, else from vocab.json and merges.txt. */
bool bpe_vocab_load(bpe_vocab *v, const char *folder, fault *f);
void bpe_vocab_free(bpe_vocab *v);

/* The token of these bytes, or -1. */
int32_t bpe_vocab_id(const bpe_vocab *v, const char *bytes, size_t count);

/* Whether a token of one byte is spelled so. */
bool bpe_vocab_spells(const char *token, int64_t byte);

/* Whether PCRE2 reads a pattern as the package tokenizers does; if not, *where is what it reads
   otherwise. */
bool bpe_pattern_is_known(const char *pattern, const char **where);

/* One that is known, as PCRE2 is to have it, to be freed; NULL: out of memory. */
char *bpe_pattern_written_out(const char *pattern);

/* The merge of two neighbours, or NULL. */
const bpe_merge *bpe_vocab_merge(const bpe_vocab *v, int32_t left, int32_t right);

#endif

/* tokenizer.h - text to tokens and back: bytes, or GPT-2's byte-level BPE from a vocabulary that
   the user supplies. Twin: tokenizer.c, bpe.c. It neither ships nor trains a vocabulary. */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"
#include "data/token_list.h"

typedef struct tokenizer tokenizer;

/* kind is CONFIG_BYTE or CONFIG_GPT2; folder holds tokenizer.json, or
   vocab.json and merges.txt (GPT-2 only). */
tokenizer *tokenizer_open(int64_t kind, const char *folder, fault *f);
void tokenizer_close(tokenizer *t);

int32_t tokenizer_vocab_size(const tokenizer *t);

/* What ends a document: newline for bytes, <|endoftext|> for GPT-2. */
int32_t tokenizer_separator(const tokenizer *t);
/* Of what decides which tokens a text becomes, whatever files it is in; 0: bytes, or none. */
uint64_t tokenizer_sum(const tokenizer *t);

/* Of what each of the first `count` tokens stands for: what shards must agree in. 0: that is not
   known. */
uint64_t tokenizer_spelling(const tokenizer *t, int32_t count);

bool tokenizer_is_byte(const tokenizer *t);

/* Whether byte-level vocabularies spell this byte so. */
bool tokenizer_spells(const char *token, int64_t byte);

/* What ends a text where a model writes one: that token; -1 for bytes, of which a newline may be
   anywhere. */
int32_t tokenizer_end(const tokenizer *t);

/* What a text begins with, in training and as a prompt, by the template of tokenizer.json; -1:
   nothing. */
int32_t tokenizer_prefix(const tokenizer *t);

/* Appends the tokens of `text`, without a separator. Every byte string encodes, and decodes to
   itself. Not for two threads at once on one tokenizer. */
bool tokenizer_encode(tokenizer *t, const char *text, size_t bytes, token_list *out, fault *f);

/* A document of training: what a text begins with, its tokens, what ends it. Nothing where it is
   empty. */
bool tokenizer_encode_document(tokenizer *t, const char *text, size_t bytes, token_list *out,
                               fault *f);

/* The bytes of one token, not zero-terminated; ids outside the vocabulary give none. */
const char *tokenizer_bytes(const tokenizer *t, int32_t id, size_t *bytes);

#endif

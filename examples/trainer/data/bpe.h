/* bpe.h - GPT-2's byte-level byte-pair encoding: a vocabulary, merges in order of rank, a splitter
   into words. Twin: bpe.c (encoding), bpe_load.c (the files). Programs include tokenizer.h. */
#ifndef BPE_H
#define BPE_H

#include "base/fault.h"
#include "data/token_list.h"

typedef struct bpe bpe;

/* Reads tokenizer.json in `folder`, or vocab.json and merges.txt. */
bpe *bpe_open(const char *folder, fault *f);
void bpe_close(bpe *b);

int32_t bpe_vocab_size(const bpe *b);
int32_t bpe_end_of_text(const bpe *b);
int32_t bpe_prefix(const bpe *b);
uint64_t bpe_sum(const bpe *b);
bool bpe_encode(bpe *b, const char *text, size_t bytes, token_list *out, fault *f);
const char *bpe_bytes(const bpe *b, int32_t id, size_t *bytes);

#endif

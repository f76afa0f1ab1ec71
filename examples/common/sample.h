/* sample.h - text from a model: one token after another, each drawn from the last logits. Twin:
   sample.c. It computes the whole context for every token; it has no cache. */
#ifndef SAMPLE_H
#define SAMPLE_H

#include <stdio.h>

#include "config.h"
#include "model.h"
#include "tokenizer.h"

/* Draws a token from softmax(logits / temperature), restricted to the top_k likeliest (0: all) and
   of these to the fewest that hold top_p of the probability. temperature 0: the likeliest. The
   number `index` of stream RNG_SAMPLE of the seed decides. `order` is room for vocab ints; logits
   are overwritten. */
int32_t sample_token(real *logits, int vocab, const config_sample *c, uint64_t seed, uint64_t index,
                     int32_t *order);

/* Appends c->length tokens to `text`, which holds the prompt: at least one token. The context is the
   last m->options.tokens tokens. */
bool sample_text(model *m, const config_sample *c, uint64_t seed, token_list *text, fault *f);

/* The prompt as tokens, to be freed; where it is empty, what separates documents. */
bool sample_prompt(tokenizer *t, const config_sample *c, int vocab, token_list *prompt, fault *f);

/* Writes tokens as text: control bytes other than newline and tab, and what is no UTF-8, as
   escapes, so that a terminal stays in order. */
void sample_print(const tokenizer *t, const token_list *text, FILE *out);

#endif

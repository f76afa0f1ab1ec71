/* sample.h - text from a model: one token after another, each drawn from the last logits. Twin:
   sample.c. It computes the whole context for every token; it has no cache. */
#ifndef SAMPLE_H
#define SAMPLE_H

#include <stdio.h>

#include "config/config.h"
#include "data/tokenizer.h"
#include "model/model.h"

/* Draws a token from softmax(logits / temperature), restricted to the top_k likeliest (0: all), of
   these to the fewest that hold top_p of their probability, and of these to those that have min_p
   of the likeliest one's: what transformers and vLLM mean by these names, in their order.
   temperature 0: the likeliest. The number `index` of stream RNG_SAMPLE of the seed decides.
   `order` is room for vocab ints; logits are overwritten. */
int32_t sample_token(real *logits, int vocab, const config_sample *c, uint64_t seed, uint64_t index,
                     int32_t *order);

/* Refuses logits that are no numbers, as weights that are none, or too large, give: any token could
   be drawn. They follow `count` tokens; `path` is where the weights are from. */
bool sample_check(const real *logits, int vocab, const char *path, size_t count, fault *f);

/* Makes each token of the last c->repetition_window of the text (-1: of all of it, the prompt too)
   less likely, once: its logit is divided by c->repetition_penalty where it is above 0, else
   multiplied, as in CTRL (arXiv 1909.05858), transformers and llama.cpp. Below 1: more likely.
   `order` is room for vocab ints. */
void sample_discourage(real *logits, int vocab, const config_sample *c, const token_list *text,
                       int32_t *order);

/* Appends c->length tokens to `text`, which holds the prompt: at least one token; fewer where `end`
   is drawn, which ends a text and is not appended (-1: none does). The context is the last
   m->options.tokens tokens. */
bool sample_text(model *m, const config_sample *c, uint64_t seed, int32_t end, token_list *text,
                 fault *f);

/* The prompt as tokens, to be freed: as a document of training begins, so behind what the tokenizer
   puts before one; where it is empty, what separates documents. */
bool sample_prompt(tokenizer *t, const char *text, size_t bytes, int vocab, token_list *prompt,
                   fault *f);

/* How many tokens of a prompt are not printed: what stands before a text, or for none. */
size_t sample_unseen(const tokenizer *t, const int32_t *prompt, size_t count);

/* Writes tokens as text, one after another: control bytes other than newline and tab, and what is
   no UTF-8, as escapes, so that a terminal stays in order. A character whose bytes are in several
   tokens is held back until it is whole. Start from {.out = file}. */
typedef struct sample_printer {
    FILE *out;
    unsigned char held[4];
    size_t count;
} sample_printer;

void sample_put(sample_printer *p, const tokenizer *t, int32_t token);
void sample_put_bytes(sample_printer *p, const char *bytes, size_t count);
void sample_flush(sample_printer *p);

/* The tokens from the one numbered `first` on. */
void sample_print(const tokenizer *t, const token_list *text, size_t first, FILE *out);

#endif

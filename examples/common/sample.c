/* sample.c - drawing tokens and writing them out. Twin: sample.h. */
#include "sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "rng.h"

/* ---- One token ----------------------------------------------------------------------------- */

/* A heap whose root is the likeliest token: top-k and top-p take only as many as they need. Equal
   logits: the lower token first. */
static bool before(const real *x, int32_t a, int32_t b) {
    return x[a] > x[b] || (!(x[a] < x[b]) && a < b);
}

static void sift(const real *x, int32_t *heap, int root, int count) {
    for (int child; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count && before(x, heap[child + 1], heap[child])) child++;
        if (!before(x, heap[child], heap[root])) return;
        int32_t held = heap[root];
        heap[root] = heap[child];
        heap[child] = held;
    }
}

int32_t sample_token(real *logits, int vocab, const config_sample *c, uint64_t seed, uint64_t index,
                     int32_t *order) {
    for (int i = 0; i < vocab; i++) order[i] = i;
    for (int i = vocab / 2; i >= 0; i--) sift(logits, order, i, vocab);
    real top = logits[order[0]];
    if (c->temperature <= 0) return order[0];
    double sum = 0;
    for (int i = 0; i < vocab; i++) {
        logits[i] = (real)exp((double)(logits[i] - top) / c->temperature);
        sum += (double)logits[i];
    }
    /* The likeliest go to the end of `order`, one by one, until enough of them are there. */
    int taken = 0, most = c->top_k > 0 && c->top_k < vocab ? (int)c->top_k : vocab;
    double held = 0, enough = c->top_p < 1 ? c->top_p * sum : INFINITY;
    while (taken < most && (taken == 0 || held < enough)) {
        int last = vocab - 1 - taken++;
        int32_t best = order[0];
        order[0] = order[last];
        order[last] = best;
        held += (double)logits[best];
        sift(logits, order, 0, last);
    }
    double point = rng_uniform(seed, RNG_SAMPLE, index) * held;
    for (int i = 0; i < taken - 1; i++) {
        point -= (double)logits[order[vocab - 1 - i]];
        if (point < 0) return order[vocab - 1 - i];
    }
    return order[vocab - taken];
}

/* ---- Text ---------------------------------------------------------------------------------- */

static bool extend(model *m, const config_sample *c, uint64_t seed, token_list *text, real *logits,
                   int32_t *order, fault *f) {
    size_t most = (size_t)m->options.tokens;
    for (int64_t i = 0; i < c->length; i++) {
        size_t count = text->count < most ? text->count : most;
        if (!model_next(m, text->ids + text->count - count, (int)count, logits, f)) return false;
        int32_t next = sample_token(logits, m->config.vocab, c, seed, (uint64_t)i, order);
        if (!token_list_push(text, next)) return fault_set(f, "sample: out of memory");
    }
    return true;
}

bool sample_text(model *m, const config_sample *c, uint64_t seed, token_list *text, fault *f) {
    real *logits = malloc((size_t)m->config.vocab * sizeof *logits);
    int32_t *order = malloc((size_t)m->config.vocab * sizeof *order);
    bool ok = logits && order ? extend(m, c, seed, text, logits, order, f)
                              : fault_set(f, "sample: out of memory");
    free(logits);
    free(order);
    return ok;
}

bool sample_prompt(tokenizer *t, const config_sample *c, int vocab, token_list *prompt, fault *f) {
    *prompt = (token_list){0};
    bool ok = tokenizer_encode(t, c->prompt, strlen(c->prompt), prompt, f);
    if (ok && !prompt->count && !token_list_push(prompt, tokenizer_separator(t)))
        ok = fault_set(f, "sample: out of memory");
    for (size_t i = 0; ok && i < prompt->count; i++)
        if (prompt->ids[i] >= vocab)
            ok = fault_set(f, "sample.prompt: token %d; the model knows 0 to %d", prompt->ids[i],
                           vocab - 1);
    if (!ok) token_list_free(prompt);
    return ok;
}

/* Length of the UTF-8 character at p, 0 where there is none. Overlong forms and surrogates are a
   terminal's own business: they do it no harm. */
static size_t utf8_length(const unsigned char *p, size_t left) {
    size_t length = p[0] < 0x80   ? 1
                    : p[0] < 0xc2 ? 0
                    : p[0] < 0xe0 ? 2
                    : p[0] < 0xf0 ? 3
                    : p[0] < 0xf5 ? 4
                                  : 0;
    if (length > left) return 0;
    for (size_t i = 1; i < length; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return length;
}

static void print_bytes(const unsigned char *p, size_t bytes, FILE *out) {
    for (size_t i = 0, length; i < bytes; i += length ? length : 1) {
        length = utf8_length(p + i, bytes - i);
        bool control = length == 1 && (p[i] < 0x20 || p[i] == 0x7f) && p[i] != '\n' && p[i] != '\t';
        bool c1 = length == 2 && p[i] == 0xc2 && p[i + 1] < 0xa0;
        if (!length || control || c1)
            for (size_t j = 0; j < (length ? length : 1); j++) fprintf(out, "\\x%02x", p[i + j]);
        else
            fwrite(p + i, 1, length, out);
    }
}

void sample_print(const tokenizer *t, const token_list *text, FILE *out) {
    unsigned char *all = NULL;
    size_t used = 0, room = 0, bytes;
    for (size_t i = 0; i < text->count; i++) {
        const char *piece = tokenizer_bytes(t, text->ids[i], &bytes);
        if (used + bytes > room) {
            room = 2 * (used + bytes) + 256;
            unsigned char *more = realloc(all, room);
            if (!more) break;
            all = more;
        }
        for (size_t j = 0; j < bytes; j++) all[used++] = (unsigned char)piece[j];
    }
    if (all) print_bytes(all, used, out);
    free(all);
}

/* sample.c - drawing tokens and writing them out. Twin: sample.h. */
#include "train/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/signals.h"

/* ---- One token ----------------------------------------------------------------------------- */

/* A heap whose root is the likeliest token: top-k and top-p take only as many as they need. Equal
   logits: the lower token first. */
static bool before(const real *x, int32_t a, int32_t b) {
    return x[a] > x[b] || (!(x[a] < x[b]) && a < b);
}

static void sift(const real *x, int32_t *heap, int64_t root, int64_t count) {
    for (int64_t child; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count && before(x, heap[child + 1], heap[child])) child++;
        if (!before(x, heap[child], heap[root])) return;
        int32_t held = heap[root];
        heap[root] = heap[child];
        heap[child] = held;
    }
}

/* The likeliest of the first last + 1 goes to the end of them. */
static int32_t take_best(const real *x, int32_t *order, int last) {
    int32_t best = order[0];
    order[0] = order[last];
    order[last] = best;
    sift(x, order, 0, last);
    return best;
}

int32_t sample_token(real *logits, int vocab, const config_sample *c, uint64_t seed, uint64_t index,
                     int32_t *order) {
    for (int i = 0; i < vocab; i++) order[i] = i;
    for (int i = vocab / 2; i >= 0; i--) sift(logits, order, i, vocab);
    real top = logits[order[0]]; /* NOLINT: a vocabulary is not empty */
    if (c->temperature <= 0) return order[0];
    double sum = 0;
    for (int i = 0; i < vocab; i++) {
        logits[i] = (real)exp((double)(logits[i] - top) / c->temperature);
        sum += (double)logits[i];
    }
    /* The likeliest go to the end of `order`, one by one, until enough of them are there. */
    int taken = 0, most = c->top_k > 0 && c->top_k < vocab ? (int)c->top_k : vocab;
    double held = 0, least = c->min_p, enough = INFINITY; /* the likeliest one has 1 */
    if (c->top_p < 1) enough = c->top_p * (most < vocab ? INFINITY : sum);
    for (; taken < most && (taken == 0 || held < enough); taken++) {
        int32_t best = take_best(logits, order, vocab - 1 - taken);
        held += (double)logits[best];
    }
    if (most < vocab) { /* of these alone top_p is a share */
        enough = c->top_p < 1 ? c->top_p * held : INFINITY;
        held = 0;
        for (most = taken, taken = 0; taken < most && (taken == 0 || held < enough); taken++)
            held += (double)logits[order[vocab - 1 - taken]];
    }
    while (taken > 1 && (double)logits[order[vocab - taken]] < least)
        held -= (double)logits[order[vocab - taken--]];
    double point = rng_uniform(seed, RNG_SAMPLE, index) * held;
    for (int i = 0; i < taken - 1; i++) {
        point -= (double)logits[order[vocab - 1 - i]];
        if (point < 0) return order[vocab - 1 - i];
    }
    return order[vocab - taken];
}

bool sample_check(const real *logits, int vocab, const char *path, size_t count, fault *f) {
    for (int i = 0; i < vocab; i++)
        if (!isfinite(logits[i]))
            return fault_set(
                f,
                "%s: the model gives %g for the token behind the first %zu: its weights "
                "are not finite, or too large",
                path, (double)logits[i], count);
    return true;
}

void sample_discourage(real *logits, int vocab, const config_sample *c, const token_list *text,
                       int32_t *order) {
    size_t window = c->repetition_window < 0 ? text->count : (size_t)c->repetition_window;
    size_t first = text->count > window ? text->count - window : 0;
    if (c->repetition_penalty == 1 || c->repetition_penalty <= 0) return;
    memset(order, 0, (size_t)vocab * sizeof *order); /* 1: held back already */
    for (size_t i = first; i < text->count; i++) {
        int32_t token = text->ids[i];
        if (token < 0 || token >= vocab || order[token]++) continue;
        double x = (double)logits[token], p = c->repetition_penalty;
        logits[token] = (real)(x > 0 ? x / p : x * p);
    }
}

/* ---- Text ---------------------------------------------------------------------------------- */

static bool extend(model *m, const config_sample *c, uint64_t seed, int32_t end, token_list *text,
                   real *logits, int32_t *order, fault *f) {
    size_t most = (size_t)model_longest(m);
    for (int64_t i = 0; i < c->length && !signals_stop_requested(); i++) {
        size_t count = text->count < most ? text->count : most;
        if (!model_next(m, text->ids + text->count - count, (int)count, logits, f)) return false;
        sample_discourage(logits, m->config.vocab, c, text, order);
        int32_t next = sample_token(logits, m->config.vocab, c, seed, (uint64_t)i, order);
        if (next == end) return true;
        if (!token_list_push(text, next)) return fault_set(f, "sample: out of memory");
    }
    return true;
}

bool sample_text(model *m, const config_sample *c, uint64_t seed, int32_t end, token_list *text,
                 fault *f) {
    real *logits = malloc((size_t)m->config.vocab * sizeof *logits);
    int32_t *order = malloc((size_t)m->config.vocab * sizeof *order);
    bool ok = logits && order ? extend(m, c, seed, end, text, logits, order, f)
                              : fault_set(f, "sample: out of memory");
    free(logits);
    free(order);
    return ok;
}

bool sample_prompt(tokenizer *t, const char *text, size_t bytes, int vocab, token_list *prompt,
                   fault *f) {
    *prompt = (token_list){0};
    int32_t first = tokenizer_prefix(t);
    bool ok = first < 0 || token_list_push(prompt, first) || fault_set(f, "sample: out of memory");
    ok = ok && tokenizer_encode(t, text, bytes, prompt, f);
    if (ok && !prompt->count && !token_list_push(prompt, tokenizer_separator(t)))
        ok = fault_set(f, "sample: out of memory");
    for (size_t i = 0; ok && i < prompt->count; i++)
        if (prompt->ids[i] >= vocab)
            ok = fault_set(f, "the prompt has token %d; the model knows 0 to %d", prompt->ids[i],
                           vocab - 1);
    if (!ok) token_list_free(prompt);
    return ok;
}

size_t sample_unseen(const tokenizer *t, const int32_t *prompt, size_t count) {
    return tokenizer_prefix(t) >= 0 || (count == 1 && prompt[0] == tokenizer_end(t));
}

/* ---- Writing ------------------------------------------------------------------------------- */

/* Bytes of the UTF-8 character that begins with `first`, 0 where none does. */
static size_t utf8_length(unsigned char first) {
    return first < 0x80   ? 1
           : first < 0xc2 ? 0
           : first < 0xe0 ? 2
           : first < 0xf0 ? 3
           : first < 0xf5 ? 4
                          : 0;
}

/* Whether byte `at` of a character goes on with it. The second one's range leaves out overlong
   forms, surrogates and what is beyond U+10FFFF (Unicode's table 3-7). */
static bool utf8_goes_on(const unsigned char *c, size_t at) {
    int least = at > 1 ? 0x80 : c[0] == 0xe0 ? 0xa0 : c[0] == 0xf0 ? 0x90 : 0x80;
    int most = at > 1 ? 0xbf : c[0] == 0xed ? 0x9f : c[0] == 0xf4 ? 0x8f : 0xbf;
    return c[at] >= least && c[at] <= most;
}

/* Takes one character, or one byte that is none, from the front; false: more bytes are needed. */
static bool put_front(sample_printer *p) {
    unsigned char *held = p->held;
    size_t length = utf8_length(held[0]), whole = 1;
    while (whole < length && whole < p->count && utf8_goes_on(held, whole)) whole++;
    if (whole < length && whole == p->count) return false;
    bool control =
        length == 1 && (held[0] < 0x20 || held[0] == 0x7f) && held[0] != '\n' && held[0] != '\t';
    bool c1 = length == 2 && held[0] == 0xc2 && held[1] < 0xa0;
    bool plain = length == whole && !control && !c1;
    if (length != whole) whole = 1; /* a character cut short: its first byte is none */
    for (size_t i = 0; i < whole; i++)
        if (plain)
            fputc(held[i], p->out);
        else
            fprintf(p->out, "\\x%02x", held[i]);
    p->count -= whole;
    memmove(held, held + whole, p->count);
    return p->count > 0;
}

void sample_put_bytes(sample_printer *p, const char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        p->held[p->count++] = (unsigned char)bytes[i];
        while (put_front(p)) continue;
    }
}

void sample_put(sample_printer *p, const tokenizer *t, int32_t token) {
    size_t bytes;
    const char *piece = tokenizer_bytes(t, token, &bytes);
    sample_put_bytes(p, piece, bytes);
}

void sample_flush(sample_printer *p) {
    for (size_t i = 0; i < p->count; i++) fprintf(p->out, "\\x%02x", p->held[i]);
    p->count = 0;
    fflush(p->out);
}

void sample_print(const tokenizer *t, const token_list *text, size_t first, FILE *out) {
    sample_printer p = {.out = out};
    for (size_t i = first; i < text->count; i++) sample_put(&p, t, text->ids[i]);
    sample_flush(&p);
}

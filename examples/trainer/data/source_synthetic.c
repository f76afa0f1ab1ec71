/* source_synthetic.c - uniformly random tokens: token i of sample s is a function of (seed, s, i),
   so nothing is ever repeated and nothing can be learnt. Twin: source.h. */
#include "data/source.h"

#include <stdio.h>

#include "base/rng.h"

static void fill(const source *s, uint64_t stream, int64_t sample, source_window *w) {
    const data_options *o = s->options;
    uint32_t bits[4];
    for (int64_t i = 0; i <= o->seq_len; i++) {
        if (i % 4 == 0) rng_bits(o->seed, stream | (uint64_t)sample << 8, (uint64_t)i / 4, bits);
        w->tokens[i] = (int32_t)((uint64_t)bits[i % 4] * (uint64_t)o->vocab_size >> 32);
        w->starts[i] = i == 0;
    }
    w->epoch = 0;
}

static bool read_train(source *s, int64_t sample, source_window *w, fault *f) {
    (void)f;
    fill(s, RNG_SYNTHETIC, sample, w);
    return true;
}

static bool read_val(source *s, int64_t window, source_window *w, fault *f) {
    (void)f;
    fill(s, RNG_SYNTHETIC_VAL, window, w);
    return true;
}

source *source_synthetic_open(const data_options *o, int64_t val_rows, fault *f) {
    source *s = source_numbered_open(o, val_rows, read_train, read_val, f);
    if (!s) return NULL;
    snprintf(s->description, sizeof s->description,
             "synthetic: uniformly random tokens of a vocabulary of %lld, seed %llu",
             (long long)o->vocab_size, (unsigned long long)o->seed);
    return s;
}

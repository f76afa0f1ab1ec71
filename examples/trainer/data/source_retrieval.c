/* source_retrieval.c - associative recall: needles lie at random places of a long noise, each a
   token that names a key and a value, and at the end of the row every key is asked for once. Only
   the answers have a loss. Row s is a function of (seed, s), so nothing is ever repeated. Twin:
   source.h.

   Tokens 0 .. 127 are noise, 128 .. 143 keys, 144 .. 159 values, 256 .. 511 needles. A row's keys
   differ, its values are drawn one by one: nothing but the needle itself tells an answer, and a
   guess is right one time in 16. The needles that a question does not ask for are its
   distractors. */
#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "data/source.h"

enum { NOISE = 128, FIRST_KEY = 128, FIRST_VALUE = 144, FIRST_NEEDLE = 256, SHORTEST = 16 };

/* What the random numbers of a row are for. */
typedef enum use { USE_NOISE, USE_PLACE, USE_KEY, USE_VALUE, USE_ORDER, USES } use;

static uint64_t stream_of(uint64_t stream, int64_t sample, use u) {
    return stream | ((uint64_t)sample * USES + (uint64_t)u) << 8;
}

static void fill_noise(uint64_t seed, uint64_t stream, int64_t count, int32_t *tokens) {
    uint32_t bits[4];
    for (int64_t i = 0; i < count; i++) {
        if (i % 4 == 0) rng_bits(seed, stream, (uint64_t)i / 4, bits);
        tokens[i] = (int32_t)(bits[i % 4] % NOISE);
    }
}

int source_retrieval_row(uint64_t seed, uint64_t stream, int64_t sample, int64_t seq_len,
                         source_window *w, int64_t *places) {
    int count = seq_len / 8 < RETRIEVAL_NEEDLES ? (int)(seq_len / 8) : RETRIEVAL_NEEDLES;
    int64_t asked = seq_len + 1 - 2 * count;
    memset(w->starts, 0, (size_t)seq_len + 1);
    memset(w->given, 1, (size_t)seq_len + 1);
    w->starts[0] = 1;
    w->epoch = 0;
    fill_noise(seed, stream_of(stream, sample, USE_NOISE), asked, w->tokens);
    for (uint64_t i = 0; i < (uint64_t)count; i++) {
        uint64_t place =
            rng_permute(seed, stream_of(stream, sample, USE_PLACE), i, (uint64_t)asked);
        uint64_t key = rng_permute(seed, stream_of(stream, sample, USE_KEY), i, RETRIEVAL_KEYS);
        uint64_t value = rng_below(seed, stream_of(stream, sample, USE_VALUE), i, RETRIEVAL_VALUES);
        uint64_t turn = rng_permute(seed, stream_of(stream, sample, USE_ORDER), i, (uint64_t)count);
        int64_t question = asked + 2 * (int64_t)turn;
        w->tokens[place] = FIRST_NEEDLE + (int32_t)(key * RETRIEVAL_VALUES + value);
        w->tokens[question] = FIRST_KEY + (int32_t)key;
        w->tokens[question + 1] = FIRST_VALUE + (int32_t)value;
        w->given[question + 1] = 0;
        if (places) places[turn] = (int64_t)place;
    }
    return count;
}

static bool read_train(source *s, int64_t sample, source_window *w, fault *f) {
    (void)f;
    source_retrieval_row(s->options->seed, RNG_RETRIEVAL, sample, s->options->seq_len, w, NULL);
    return true;
}

static bool read_val(source *s, int64_t window, source_window *w, fault *f) {
    (void)f;
    source_retrieval_row(s->options->seed, RNG_RETRIEVAL_VAL, window, s->options->seq_len, w, NULL);
    return true;
}

static bool check(const data_options *o, fault *f) {
    if (o->seq_len < SHORTEST)
        return fault_set(
            f, "train.seq_len = %lld: data.dataset = retrieval needs at least %d tokens a row",
            (long long)o->seq_len, SHORTEST);
    if (o->vocab_size < RETRIEVAL_VOCAB)
        return fault_set(f, "model.vocab_size = %lld: data.dataset = retrieval needs at least %d",
                         (long long)o->vocab_size, RETRIEVAL_VOCAB);
    return true;
}

source *source_retrieval_open(const data_options *o, int64_t val_rows, fault *f) {
    if (!check(o, f)) return NULL;
    source *s = source_numbered_open(o, val_rows, read_train, read_val, f);
    if (!s) return NULL;
    snprintf(s->description, sizeof s->description,
             "retrieval: needles in noise, asked for at the end of rows of %lld, seed %llu",
             (long long)o->seq_len, (unsigned long long)o->seed);
    return s;
}

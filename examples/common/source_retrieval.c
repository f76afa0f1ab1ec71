/* source_retrieval.c - associative recall: pairs of a value and its key lie at random places of a long
   noise, and at the end of the row every key is asked for once. Only the answers have a loss. Row s
   is a function of (seed, s), so nothing is ever repeated. Twin: source.h.

   The value stands before its key: who finds the key again needs to know only what stood beside it.
   With the key first, dense attention of two layers takes several times as long to learn this.

   Tokens 0 .. 127 are noise, 128 .. 191 keys, 192 .. 255 values. A row's keys differ, its values are
   drawn one by one: nothing but the pair itself tells an answer, and a guess is right one time in
   64. What a question does not ask for is a distractor. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rng.h"
#include "source.h"

enum { NOISE = 128, FIRST_KEY = 128, FIRST_VALUE = 192, SLOT = 4, SHORTEST = 16 };

/* What the random numbers of a row are for. */
typedef enum use { USE_NOISE, USE_SLOT, USE_SHIFT, USE_KEY, USE_VALUE, USE_ORDER, USES } use;

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
    int pairs = seq_len / 8 < RETRIEVAL_PAIRS ? (int)(seq_len / 8) : RETRIEVAL_PAIRS;
    int64_t asked = seq_len + 1 - 2 * pairs, slots = asked / SLOT;
    memset(w->starts, 0, (size_t)seq_len + 1);
    memset(w->given, 1, (size_t)seq_len + 1);
    w->starts[0] = 1;
    w->epoch = 0;
    fill_noise(seed, stream_of(stream, sample, USE_NOISE), asked, w->tokens);
    for (int i = 0; i < pairs; i++) {
        uint64_t slot =
            rng_permute(seed, stream_of(stream, sample, USE_SLOT), (uint64_t)i, (uint64_t)slots);
        uint64_t shift =
            rng_below(seed, stream_of(stream, sample, USE_SHIFT), (uint64_t)i, SLOT - 1);
        uint64_t key =
            rng_permute(seed, stream_of(stream, sample, USE_KEY), (uint64_t)i, RETRIEVAL_KEYS);
        uint64_t value =
            rng_below(seed, stream_of(stream, sample, USE_VALUE), (uint64_t)i, RETRIEVAL_VALUES);
        uint64_t turn =
            rng_permute(seed, stream_of(stream, sample, USE_ORDER), (uint64_t)i, (uint64_t)pairs);
        int64_t place = (int64_t)(slot * SLOT + shift), question = asked + 2 * (int64_t)turn;
        w->tokens[place] = w->tokens[question + 1] = FIRST_VALUE + (int32_t)value;
        w->tokens[place + 1] = w->tokens[question] = FIRST_KEY + (int32_t)key;
        w->given[question + 1] = 0;
        if (places) places[turn] = place;
    }
    return pairs;
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

static void close_source(source *s) {
    free(s);
}

source *source_retrieval_open(const data_options *o, int64_t val_rows, fault *f) {
    if (o->seq_len < SHORTEST) {
        fault_set(f,
                  "train.seq_len = %lld: data.dataset = retrieval needs at least %d tokens a row",
                  (long long)o->seq_len, SHORTEST);
        return NULL;
    }
    source *s = calloc(1, sizeof *s);
    if (!s) {
        fault_set(f, "out of memory");
        return NULL;
    }
    s->options = o;
    s->val_windows = val_rows;
    s->read = read_train;
    s->read_val = read_val;
    s->position = source_position_by_number;
    s->close = close_source;
    snprintf(s->description, sizeof s->description,
             "retrieval: keys and values in noise, asked for at the end of rows of %lld, seed %llu",
             (long long)o->seq_len, (unsigned long long)o->seed);
    return s;
}

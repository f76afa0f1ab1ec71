/* data_test.h - what the tests of data share: rows as several ranks see them, what every source
   keeps, what is refused. Twin: none. Folders, files and faults are trainer_test.h's. */
#ifndef DATA_TEST_H
#define DATA_TEST_H

#include "base/rng.h"
#include "data/data.h"
#include "data/source.h"
#include "trainer_test.h"

enum { SEQ = 32, BATCH = 4, VAL = 2 };

static fault why;
static config_data data_config;
static tokenizer *bytes_tokenizer;

static inline data_options options_for(int64_t dataset, const char *path) {
    config_data c = {.dataset = dataset, .val_fraction = 0.1, .loader_timeout = 60};
    data_options o = {.config = &data_config,
                      .tokenizer = bytes_tokenizer,
                      .vocab_size = 256,
                      .seq_len = SEQ,
                      .batch_size = BATCH,
                      .seed = 11,
                      .world = 1,
                      .val_batches = VAL,
                      .input = -1};
    data_config = c;
    snprintf(data_config.path, sizeof data_config.path, "%s", path);
    o.notes = test_notes();
    return o;
}

/* ---- Rows ---- */

/* Rows in the order of their global samples, seq_len tokens and then seq_len labels each. */
typedef struct rows {
    int32_t *values;
    int64_t count;
    data_position *at; /* after each batch */
} rows;

static inline void free_rows(rows *r) {
    free(r->values);
    free(r->at);
}

static inline bool next_rows(data *d, int64_t rank, int64_t world, int64_t batch, rows *to) {
    data_batch b;
    if (!CHECK(data_next(d, &b, &why), "batch %d: %s", (int)batch, why.text)) return false;
    CHECK(b.rows == BATCH / world && b.seq_len == SEQ, "%d rows", (int)b.rows);
    for (int64_t row = 0; row < b.rows; row++) {
        int64_t global = batch * BATCH + rank * b.rows + row;
        int32_t *into = to->values + global * 2 * SEQ;
        memcpy(into, b.tokens + row * SEQ, SEQ * sizeof *into);
        memcpy(into + SEQ, b.labels + row * SEQ, SEQ * sizeof *into);
    }
    to->at[batch] = b.next;
    return true;
}

/* `batches` batches as `world` ranks see them, put together. */
static inline rows collect(data_options o, int64_t world, int64_t batches) {
    rows r = {.values = calloc((size_t)(batches * BATCH * 2 * SEQ), sizeof *r.values),
              .at = calloc((size_t)batches, sizeof *r.at),
              .count = batches * BATCH};
    o.world = world;
    for (o.rank = 0; o.rank < world; o.rank++) {
        data *d = data_open(&o, &why);
        if (!CHECK(d != NULL, "open: %s", why.text)) break;
        for (int64_t k = 0; k < batches; k++)
            if (!next_rows(d, o.rank, world, k, &r)) break;
        data_close(d);
    }
    return r;
}

static inline void same_rows(const char *what, const rows *a, const int32_t *b, int64_t from) {
    CHECK_BITS(what, b, a->values + from * 2 * SEQ,
               (size_t)((a->count - from) * 2 * SEQ) * sizeof *b, sizeof *b);
}

/* What every source must keep. */
static inline void test_invariants(const char *name, data_options o, int64_t batches) {
    check_case("%s", name);
    rows one = collect(o, 1, batches);
    for (int64_t world = 2; world <= 4; world *= 2) {
        rows many = collect(o, world, batches);
        same_rows("ranks see other samples", &one, many.values, 0);
        CHECK_BITS("ranks stand elsewhere", many.at, one.at, (size_t)batches * sizeof one.at[0],
                   sizeof one.at[0]);
        free_rows(&many);
    }
    for (int64_t cut = 1; cut < batches; cut += batches / 5 + 1) {
        o.resume = &one.at[cut - 1];
        for (int64_t world = 1; world <= 2; world++) {
            rows rest = collect(o, world, batches - cut);
            same_rows("a resume sees other samples", &one, rest.values, cut * BATCH);
            CHECK_BITS("a resume stands elsewhere", rest.at, one.at + cut,
                       (size_t)(batches - cut) * sizeof one.at[0], sizeof one.at[0]);
            free_rows(&rest);
        }
        CHECK(!strstr(test_said, "warning"), "a resume warns: %s", test_said);
    }
    for (int64_t row = 0; row < one.count; row++) {
        const int32_t *t = one.values + row * 2 * SEQ;
        for (int i = 0; i + 1 < SEQ; i++) {
            bool silent = t[SEQ + i] == DATA_NO_LABEL && data_config.dataset == CONFIG_RETRIEVAL;
            CHECK(silent || t[SEQ + i] == t[i + 1], "row %d: label %d is %d, the next token %d",
                  (int)row, i, (int)t[SEQ + i], (int)t[i + 1]);
        }
    }
    free_rows(&one);
}

/* Validation: the same at each call and for each number of ranks. */
static inline rows collect_val(data_options o, int64_t world) {
    rows r = {.values = calloc(VAL * BATCH * 2 * SEQ, sizeof *r.values), .count = VAL * BATCH};
    o.world = world;
    for (o.rank = 0; o.rank < world; o.rank++) {
        data *d = data_open(&o, &why);
        data_batch b;
        if (!CHECK(d != NULL, "open: %s", why.text)) break;
        CHECK(data_val_batches(d) == VAL, "%d validation batches", (int)data_val_batches(d));
        for (int64_t k = 0; k < data_val_batches(d); k++) {
            CHECK(data_val(d, k, &b, &why), "%s", why.text);
            for (int64_t row = 0; row < b.rows; row++) {
                int32_t *into = r.values + (k * BATCH + o.rank * b.rows + row) * 2 * SEQ;
                memcpy(into, b.tokens + row * SEQ, SEQ * sizeof *into);
                memcpy(into + SEQ, b.labels + row * SEQ, SEQ * sizeof *into);
            }
        }
        CHECK(!data_val(d, VAL, &b, &why), "one validation batch too many");
        data_close(d);
    }
    return r;
}

/* What is wrong with a source shows when it is opened or when it is first read. */
static inline void refuse_path(int64_t dataset, const char *path, const char *words) {
    data_batch b;
    check_case("%s", words);
    data_options o = options_for(dataset, path);
    data *d = data_open(&o, &why);
    TEST_FAULT(d && data_next(d, &b, &why), &why, words);
    data_close(d);
}

#endif

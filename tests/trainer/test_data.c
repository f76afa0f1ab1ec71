/* test_data.c - sources that are computed: synthetic tokens, rows with needles; what is refused of
   all. Twins: data.c, source_synthetic.c, source_retrieval.c. Files are test_corpus.c's, streams
   test_stream.c's. */
#include "data_test.h"

/* ---- Synthetic ---- */

static void test_synthetic(void) {
    data_options o = options_for(CONFIG_SYNTHETIC, "");
    test_invariants("synthetic", o, 20);
    rows r = collect(o, 1, 200), val = collect_val(o, 1);
    int seen[256] = {0};
    int64_t tokens = r.count * SEQ;
    double chi = 0;
    for (int64_t row = 0; row < r.count; row++) {
        for (int i = 0; i < SEQ; i++) seen[r.values[row * 2 * SEQ + i]]++;
        for (int64_t other = 0; other < row; other++)
            CHECK(memcmp(r.values + row * 2 * SEQ, r.values + other * 2 * SEQ, 16),
                  "a row repeats");
        for (int64_t v = 0; v < val.count; v++)
            CHECK(memcmp(r.values + row * 2 * SEQ, val.values + v * 2 * SEQ, 16),
                  "a row is in validation too");
    }
    for (int i = 0; i < 256; i++) {
        double e = (double)tokens / 256, x = seen[i] - e;
        chi += x * x / e;
    }
    CHECK(chi > 255 - 5 * 22.6 && chi < 255 + 5 * 22.6, "chi^2 %g of 255 degrees", chi);
    free_rows(&r);
    free_rows(&val);
}

/* ---- Retrieval ---- */

/* A row by another way than the source's: of the needles before the questions, exactly one names a
   question's key and its answer; answers alone have a loss; the rest is noise. */
static void check_questions(const source_window *w, int64_t seq_len, int count,
                            const int64_t *places, int tenths[10]) {
    int64_t asked = seq_len + 1 - 2 * count;
    int needles = 0;
    for (int64_t i = 0; i <= seq_len; i++) {
        bool answer = i >= asked && (i - asked) % 2;
        CHECK(w->given[i] == !answer, "token %d: given %d", (int)i, w->given[i]);
        if (i >= asked) continue;
        needles += w->tokens[i] >= 256;
        CHECK((w->tokens[i] >= 0 && w->tokens[i] < 128) ||
                  (w->tokens[i] >= 256 && w->tokens[i] < 512),
              "token %d is %d", (int)i, (int)w->tokens[i]);
    }
    CHECK(needles == count, "%d needles for %d questions", needles, count);
    for (int q = 0; q < count; q++) {
        int32_t key = w->tokens[asked + 2 * q] - 128, value = w->tokens[asked + 2 * q + 1] - 144;
        int fitting = 0;
        CHECK(key >= 0 && key < 16 && value >= 0 && value < 16, "question %d: %d %d", q, (int)key,
              (int)value);
        for (int64_t i = 0; i < asked; i++)
            fitting += w->tokens[i] >= 256 && (w->tokens[i] - 256) / 16 == key;
        CHECK(fitting == 1, "question %d has %d needles", q, fitting);
        CHECK(places[q] >= 0 && places[q] < asked && w->tokens[places[q]] == 256 + key * 16 + value,
              "question %d: not at place %d", q, (int)places[q]);
        tenths[places[q] * 10 / asked]++;
    }
}

static void test_retrieval(void) {
    enum { LONGEST = 1024, SAMPLES = 60 };
    static const int64_t lengths[] = {16, 17, 64, 250, LONGEST};
    int32_t tokens[LONGEST + 1];
    unsigned char starts[LONGEST + 1], given[LONGEST + 1];
    int64_t places[RETRIEVAL_NEEDLES];
    source_window w = {tokens, starts, given, 0};
    data_options o = options_for(CONFIG_RETRIEVAL, "");
    TEST_FAULT(data_open(&o, &why), &why, "model.vocab_size = 256&at least 512");
    o.vocab_size = 512;
    test_invariants("retrieval", o, 20);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        int tenths[10] = {0}, count = 0;
        check_case("retrieval, rows of %d", (int)lengths[i]);
        for (int64_t sample = 0; sample < SAMPLES; sample++) {
            count = source_retrieval_row(3, RNG_RETRIEVAL, sample, lengths[i], &w, places);
            check_questions(&w, lengths[i], count, places, tenths);
        }
        CHECK(count == (lengths[i] < 128 ? lengths[i] / 8 : 16), "%d needles", count);
        for (int tenth = 0; lengths[i] == LONGEST && tenth < 10; tenth++)
            CHECK(tenths[tenth] > SAMPLES * 16 / 10 - 60 && tenths[tenth] < SAMPLES * 16 / 10 + 60,
                  "tenth %d holds %d needles of %d", tenth, tenths[tenth], SAMPLES * 16);
    }
    o.seq_len = 15;
    CHECK(!data_open(&o, &why) && strstr(why.text, "at least 16 tokens"), "short rows: %s",
          why.text);
}

/* ---- Refusals ---- */

static void test_refusals(void) {
    data_options o = options_for(CONFIG_SYNTHETIC, "");
    check_case("refusals");
    o.world = 3;
    TEST_FAULT(data_open(&o, &why) != NULL, &why,
               "train.batch_size = 4: must be a multiple of the 3");
    o.world = 1;
    o.vocab_size = 255;
    TEST_FAULT(data_open(&o, &why) != NULL, &why, "model.vocab_size = 255: must be at least&256");
}

int main(void) {
    bytes_tokenizer = tokenizer_open(CONFIG_BYTE, "", &why);
    test_begin();
    test_synthetic();
    test_retrieval();
    test_refusals();
    tokenizer_close(bytes_tokenizer);
    return test_end("test_data");
}

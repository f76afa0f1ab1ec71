/* test_retrieval.c - what the program retrieval counts, beside the whole sequence's forward of each
   prefix; and what it refuses. Arguments: the programs train_tiny and retrieval. Twins: its main.c,
   source_retrieval.c. The rows themselves are test_data.c's. */
#include "data/source.h"
#include "model_test.h"
#include "program_test.h"
#include "train/restore.h"

static const char *examiner;

/* Answers that are right, questions that read the needle, and both. */
static void answer(const model *m, const source_window *w, const int64_t *places, int length,
                   int count, int want[3]) {
    static real logits[RETRIEVAL_VOCAB];
    const model_config *c = &m->config;
    int first = length + 1 - 2 * count;
    model whole = *m;
    for (int q = 0; q < count; q++) {
        int best = 0, at = first + 2 * q;
        bool reached = places[q] > at - c->w;
        CHECK(model_next(&whole, w->tokens, first + 2 * q + 1, logits, &why), "%s", why.text);
        for (int i = 1; i < RETRIEVAL_VOCAB; i++)
            if (logits[i] > logits[best]) best = i;
        for (int i = 0; i < c->n_kv_groups * c->n_sel; i++) {
            int block = m->acts[c->n_layers - 1].blocks[at * c->n_kv_groups * c->n_sel + i];
            reached |= places[q] >= block * c->l_sel && places[q] < (block + 1) * c->l_sel;
        }
        want[0] += best == w->tokens[at + 1];
        want[1] += reached;
        want[2] += reached && best == w->tokens[at + 1];
    }
}

static void test_examination(void) {
    enum { LENGTH = 100, ROWS = 5 };
    int32_t tokens[LENGTH + 1];
    unsigned char starts[LENGTH + 1], given[LENGTH + 1];
    source_window w = {tokens, starts, given, 0};
    int64_t places[RETRIEVAL_NEEDLES];
    checkpoint k;
    model m;
    ops o = open_ops(1);
    int want[3] = {0}, got[3] = {0}, asked = 0, lines = 0, length, tenth, some, n[3];
    int depths[10] = {0}; /* where the needles lie */
    check_case("retrieval");
    if (!CHECK(checkpoint_open(&k, test_path("needles"), &why), "%s", why.text)) return;
    CHECK(restore_model(&m, &k, RETRIEVAL_VOCAB, LENGTH, 0, &o, &why), "%s", why.text);
    for (int row = 0; row < ROWS; row++) {
        int count = source_retrieval_row((uint64_t)k.config.train.seed, RNG_RETRIEVAL_VAL, row,
                                         LENGTH, &w, places);
        answer(&m, &w, places, LENGTH, count, want);
        for (int q = 0; q < count; q++) depths[places[q] * 10 / (LENGTH + 1 - 2 * count)]++;
    }
    expect(shell("%s %s %d %d", examiner, test_path("needles"), ROWS, LENGTH), 0, "length,tenth");
    for (char *at = strchr(output, '\n'); at && at[1]; at = strchr(at + 1, '\n'), lines++)
        if (CHECK(sscanf(at, "%d,%d,%d,%d,%d,%d", &length, &tenth, &some, n, n + 1, n + 2) == 6,
                  "%s", at)) {
            CHECK(length == LENGTH && tenth == lines && some == depths[lines] && n[0] <= some, "%s",
                  at);
            asked += some;
            for (int i = 0; i < 3; i++) got[i] += n[i];
        }
    CHECK(lines == 10 && asked == ROWS * (LENGTH / 8), "%d questions in %d lines", asked, lines);
    for (int i = 0; i < 3; i++)
        CHECK(got[i] == want[i], "count %d: %d, not %d", i, got[i], want[i]);
    CHECK(got[1] > 0 && got[1] < asked, "%d of %d questions reach the needle", got[1], asked);
    expect(shell("%s %s 1 64", examiner, test_path("sparse")), 2, "retrieval needs 512");
    expect(shell("%s %s 0 64", examiner, test_path("needles")), 2, "ROWS 0: must be an integer");
    expect(shell("%s %s 1 15", examiner, test_path("needles")), 2, "in 16 ..");
    expect(shell("%s %s 1 64 --n-sel 2", examiner, test_path("needles")), 2, "--n-sel 2: must be");
    expect(shell("%s %s 1 64 --n-sel 8", examiner, test_path("dense")), 2,
           "--n-sel: has no effect: no layer of");
    expect(shell("%s %s 1 64", examiner, test_path("dense")), 0, "64,9,");
    expect(shell("%s %s 1 %d --n-sel 8", examiner, test_path("needles"), LENGTH), 0, "100,9,");
    for (char *at = strchr(output, '\n'); at && at[1]; at = strchr(at + 1, '\n'))
        CHECK(sscanf(at, "%d,%d,%d,%d,%d,%d", &length, &tenth, &some, n, n + 1, n + 2) == 6 &&
                  n[1] == some,
              "all %d blocks are selected: %s", 8, at);
    expect(shell("{ %s %s 1 64 >/dev/full; }", examiner, test_path("needles")), 1,
           "standard output: cannot write: No space left");
    expect(shell("%s", examiner), 2, "CHECKPOINT: none was given");
    model_close(&m);
    checkpoint_close(&k);
    ops_cpu_close(&o);
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: test_retrieval TRAIN_TINY RETRIEVAL\n"), 2;
    program = argv[1];
    examiner = argv[2];
    test_begin();
    check_case("training");
    expect(train("--dataset", "synthetic", "--steps", "1", "--threads", "1", "--out-dir",
                 test_path("sparse"), NULL),
           0, "saved");
    expect(train("--dataset", "retrieval", "--vocab-size", "512", "--steps", "1", "--attention",
                 "full", "--threads", "1", "--out-dir", test_path("dense"), NULL),
           0, "saved");
    expect(train("--dataset", "retrieval", "--vocab-size", "512", "--steps", "30", "--lr", "1e-2",
                 "--threads", "1", "--out-dir", test_path("needles"), NULL),
           0, "saved");
    test_examination();
    return test_end("test_retrieval");
}

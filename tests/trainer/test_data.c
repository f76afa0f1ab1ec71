/* test_data.c - what holds for every source: the same samples for 1, 2 and 4 ranks, a resume that
   goes on where it stopped, labels one token on, a validation split that training never sees; and
   what each source refuses. */
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "data.h"
#include "rng.h"
#include "source.h"
#include "trainer_test.h"

enum { SEQ = 32, BATCH = 4, VAL = 2, MOST = 400000 };

static fault why;
static config_data data_config;
static tokenizer *bytes_tokenizer;

static data_options options_for(int64_t dataset, const char *path) {
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

/* ---- Running ---- */

/* Rows in the order of their global samples, seq_len tokens and then seq_len labels each. */
typedef struct rows {
    int32_t *values;
    int64_t count;
    data_position *at; /* after each batch */
} rows;

static void free_rows(rows *r) {
    free(r->values);
    free(r->at);
}

static bool next_rows(data *d, int64_t rank, int64_t world, int64_t batch, rows *to) {
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
static rows collect(data_options o, int64_t world, int64_t batches) {
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

static void same_rows(const char *what, const rows *a, const int32_t *b, int64_t from) {
    CHECK_BITS(what, b, a->values + from * 2 * SEQ,
               (size_t)((a->count - from) * 2 * SEQ) * sizeof *b, sizeof *b);
}

/* What every source must keep. */
static void test_invariants(const char *name, data_options o, int64_t batches) {
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
static rows collect_val(data_options o, int64_t world) {
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

/* ---- Text whose records are numbered, so that it shows where a row came from ---- */

enum { RECORD = 8 }; /* number in five hex digits, a check of two, a newline */

static unsigned check_digits(unsigned number) {
    return (unsigned)(check_hash(77, number) & 0xff);
}

static void write_records(const char *path, int first, int count) {
    FILE *file = fopen(path, "wb");
    if (!CHECK(file != NULL, "cannot write %s", path)) exit(1);
    for (int i = first; i < first + count; i++)
        fprintf(file, "%05x%02x\n", (unsigned)i, check_digits((unsigned)i));
    fclose(file);
}

/* The number of a whole record, or -1: where a row leaps over validation two halves may meet. */
static int record_number(const char *line) {
    unsigned number, check;
    if (strcspn(line, "\n") != RECORD - 1 || sscanf(line, "%5x%2x", &number, &check) != 2)
        return -1;
    return check == check_digits(number) ? (int)number : -1;
}

/* Counts the whole records in rows of tokens followed by their last label. */
static void count_records(const rows *r, int64_t from, int64_t to, int *seen, int records) {
    int64_t whole = 0;
    for (int64_t row = from; row < to; row++) {
        char text[SEQ + 2] = "";
        const int32_t *t = r->values + row * 2 * SEQ;
        for (int i = 0; i < SEQ; i++) text[i] = (char)t[i];
        text[SEQ] = (char)t[2 * SEQ - 1];
        for (char *at = text; (at = strchr(at, '\n')) && strchr(at + 1, '\n'); at++) {
            int number = record_number(at + 1);
            if (number < 0) continue;
            CHECK(number < records, "record %d of %d", number, records);
            seen[number]++;
            whole++;
        }
    }
    CHECK(whole > (to - from) * (SEQ / RECORD - 2), "only %d whole records", (int)whole);
}

static void test_split_and_epochs(const char *name, data_options o, int records, int64_t batches) {
    int *val_seen = calloc((size_t)records, sizeof *val_seen), both = 0, missed = 0, set_aside = 0;
    int *seen = calloc((size_t)records, sizeof *seen);
    check_case("%s", name);
    rows val = collect_val(o, 1), two = collect_val(o, 2);
    same_rows("ranks validate on other rows", &val, two.values, 0);
    count_records(&val, 0, val.count, val_seen, records);
    rows r = collect(o, 1, batches);
    count_records(&r, 0, r.count, seen, records);
    for (int i = 0; i < records; i++) {
        both += val_seen[i] && seen[i];
        missed += !seen[i] && !val_seen[i];
        set_aside += val_seen[i] != 0;
    }
    CHECK(!both, "%d records are in validation and in training", both);
    CHECK(set_aside > VAL * BATCH * (SEQ / RECORD - 2), "validation has %d records", set_aside);
    CHECK(missed < records / 4, "%d of %d records are never seen", missed, records);
    CHECK(strstr(test_said, "data: epoch 1 begins"), "a new epoch is not said: %s", test_said);
    free_rows(&val);
    free_rows(&two);
    free_rows(&r);
    free(val_seen);
    free(seen);
}

static void test_text(void) {
    enum { RECORDS = 2000 };
    write_records(test_path("one.txt"), 0, RECORDS);
    data_options o = options_for(CONFIG_TEXT, test_path("one.txt"));
    test_invariants("a text file", o, 60);
    test_split_and_epochs("a text file's split", o, RECORDS, 3 * RECORDS * RECORD / SEQ / BATCH);
    test_mkdir("texts");
    write_records(test_path("texts/a"), 0, 700);
    write_records(test_path("texts/b"), 700, 1);
    test_mkdir("texts/d");
    test_mkdir("texts/d/deeper");
    test_mkdir("texts/.not");
    write_records(test_path("texts/d/a"), 701, 500);
    write_records(test_path("texts/d/deeper/a"), 1201, RECORDS - 1201);
    test_write_text(test_path("texts/.not/a"), "not for training");
    CHECK(!symlink("..", test_path("texts/d/up")), "a link that would go round in circles");
    test_write_text(test_path("texts/c"), "");
    test_write_text(test_path("texts/.hidden"), "not for training");
    o = options_for(CONFIG_DATASET_AUTO, test_path("texts"));
    test_invariants("a folder of texts", o, 60);
    test_split_and_epochs("a folder's split", o, RECORDS, 3 * RECORDS * RECORD / SEQ / BATCH);
    CHECK(strstr(test_said, "texts/c: empty, passed over"), "empty file: %s", test_said);
}

/* Within an epoch no window comes twice; two epochs differ in order. */
static void test_epoch_order(void) {
    enum { RECORDS = 2000 };
    static int first[2][512];
    data_options o = options_for(CONFIG_TEXT, test_path("one.txt"));
    check_case("order of an epoch");
    data *d = data_open(&o, &why);
    data_batch b = {.epoch = 0};
    int64_t counts[2] = {0, 0};
    while (d && data_next(d, &b, &why) && b.epoch < 2)
        for (int64_t row = 0; row < b.rows && counts[b.epoch] < 512; row++) {
            char text[SEQ + 1] = "";
            for (int i = 0; i < SEQ; i++) text[i] = (char)b.tokens[row * SEQ + i];
            int number = record_number(strchr(text, '\n') + 1);
            if (number >= 0) first[b.epoch][counts[b.epoch]++] = number;
        }
    int same = 0, again = 0;
    for (int64_t i = 0; i < counts[0]; i++) {
        same += i < counts[1] && abs(first[0][i] - first[1][i]) <= SEQ / RECORD;
        for (int64_t j = 0; j < i; j++) again += first[0][i] == first[0][j];
    }
    CHECK(counts[0] > 400 && counts[1] > 400, "%d and %d rows", (int)counts[0], (int)counts[1]);
    CHECK(same < 20, "%d rows are where they were in the epoch before", same);
    CHECK(again <= BATCH, "%d rows come twice in an epoch", again); /* its last batch may overlap */
    data_close(d);
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

/* ---- .bin shards ---- */

typedef struct shard_header {
    int32_t magic, version, count;
} shard_header;

static void write_shard(const char *path, shard_header h, const uint16_t *tokens, size_t count) {
    static const unsigned char rest[1024 - sizeof h];
    FILE *file = fopen(path, "wb");
    if (!CHECK(file != NULL, "cannot write %s", path)) exit(1);
    fwrite(&h, sizeof h, 1, file);
    fwrite(rest, sizeof rest, 1, file);
    fwrite(tokens, sizeof *tokens, count, file);
    fclose(file);
}

static void refuse_shard(shard_header h, size_t count, const char *words) {
    static const uint16_t tokens[1000];
    check_case("%s", words);
    write_shard(test_path("bad.bin"), h, tokens, count);
    data_options o = options_for(CONFIG_BIN, test_path("bad.bin"));
    data *d = data_open(&o, &why);
    TEST_FAULT(d != NULL, &why, words);
    data_close(d);
}

/* What is wrong with a source shows when it is opened or when it is first read. */
static void refuse_path(int64_t dataset, const char *path, const char *words) {
    data_batch b;
    check_case("%s", words);
    data_options o = options_for(dataset, path);
    data *d = data_open(&o, &why);
    TEST_FAULT(d && data_next(d, &b, &why), &why, words);
    data_close(d);
}

static void test_bad_shards(void) {
    static uint16_t tokens[1000];
    shard_header good = {20240520, 1, 1000};
    refuse_shard((shard_header){20240521, 1, 1000}, 1000, "bad.bin: not a token shard&20240521");
    refuse_shard((shard_header){20240520, 2, 1000}, 1000, "bad.bin: a token shard of version 2");
    refuse_shard((shard_header){20240520, 1, 0}, 0, "bad.bin: its header says 0 tokens");
    refuse_shard((shard_header){20240520, 1, -1}, 1000, "bad.bin: its header says -1 tokens");
    refuse_shard((shard_header){20240520, 1, INT32_MAX}, 1000,
                 "says 2147483647 tokens&the file has 3024");
    refuse_shard(good, 999,
                 "bad.bin: its header says 1000 tokens, that is 3024 bytes; the file has 3022");
    refuse_shard((shard_header){20240520, 1, 999}, 1000, "says 999 tokens");
    test_write_text(test_path("bad.bin"), "");
    refuse_path(CONFIG_BIN, test_path("bad.bin"),
                "bad.bin: 0 bytes; a token shard begins with a header");
    refuse_path(CONFIG_BIN, test_path("texts"), "texts: a folder without .bin files");
    refuse_path(CONFIG_TEXT, test_path("bad.bin"), "token shards (.bin), but data.dataset = text");
    check_case("a token outside the vocabulary");
    tokens[500] = 256;
    write_shard(test_path("bad.bin"), good, tokens, 1000);
    data_options o = options_for(CONFIG_BIN, test_path("bad.bin"));
    data_batch b;
    data *d = data_open(&o, &why);
    bool ok = d != NULL;
    for (int i = 0; i < 20 && ok; i++) ok = data_next(d, &b, &why);
    TEST_FAULT(ok, &why, "bad.bin: token 256 at byte 2024: must be below the vocabulary's 256");
    data_close(d);
}

/* Whether a row, with its last label, is a stretch of the tokens, or two: rows leap over
   validation. */
static bool is_in_shard(const int32_t *row, const uint16_t *tokens, int count) {
    int prefix = 0, suffix = 0, n;
    int32_t all[SEQ + 1];
    memcpy(all, row, SEQ * sizeof *row);
    all[SEQ] = row[2 * SEQ - 1];
    for (int at = 0; at < count; at++) {
        for (n = 0; n <= SEQ && at + n < count && tokens[at + n] == all[n]; n++) continue;
        if (n > prefix) prefix = n;
        for (n = 0; n <= SEQ && at - n >= 0 && tokens[at - n] == all[SEQ - n]; n++) continue;
        if (n > suffix) suffix = n;
    }
    return prefix + suffix >= SEQ + 1;
}

static void test_bin(void) {
    enum { TOKENS = 20000 };
    static uint16_t tokens[TOKENS];
    shard_header h = {20240520, 1, TOKENS};
    for (uint64_t i = 0; i < TOKENS; i++) tokens[i] = (uint16_t)check_below(256, 5, i);
    test_mkdir("shards");
    write_shard(test_path("shards/a.bin"), h, tokens, TOKENS);
    h.count = 777;
    write_shard(test_path("shards/b.bin"), h, tokens + 99, 777);
    test_write_text(test_path("shards/readme.txt"), "not a shard");
    data_options o = options_for(CONFIG_DATASET_AUTO, test_path("shards"));
    test_invariants("shards", o, 60);
    o = options_for(CONFIG_BIN, test_path("shards/a.bin"));
    test_invariants("one shard", o, 60);
    rows r = collect(o, 1, 60);
    for (int64_t row = 0; row < r.count; row++)
        CHECK(is_in_shard(r.values + row * 2 * SEQ, tokens, TOKENS), "row %d is not in the shard",
              (int)row);
    free_rows(&r);
    test_bad_shards();
}

/* ---- Streams ---- */

/* Documents "d%05d" and padding of varying length, as JSON or as lines. */
static int document_text(int number, char *text) {
    int n = sprintf(text, "d%05d", number);
    for (int i = 0; i < number % 37; i++) n += sprintf(text + n, " w%d", (number * 7 + i) % 10);
    return n;
}

static void write_documents(const char *path, int first, int count, bool json) {
    char text[512];
    FILE *file = fopen(path, "wb");
    if (!CHECK(file != NULL, "cannot write %s", path)) exit(1);
    for (int i = first; i < first + count; i++) {
        document_text(i, text);
        fprintf(file, json ? "{\"id\": 1, \"text\": \"%s\", \"n\": {}}\n" : "%s\n", text);
    }
    fclose(file);
}

/* The rows of an epoch are its documents, each with a newline, without a gap; validation before. */
static void test_continuity(const char *name, data_options o, int documents, int64_t batches) {
    char *want = malloc(1 << 20), text[512];
    size_t n = 0;
    check_case("%s", name);
    for (int i = 0; i < documents; i++) {
        n += (size_t)document_text(i, want + n);
        want[n++] = '\n';
    }
    rows val = collect_val(o, 1), r = collect(o, 1, batches);
    for (int64_t row = 0; row < val.count; row++)
        for (int i = 0; i < SEQ; i++)
            if (!CHECK(val.values[row * 2 * SEQ + i] == want[row * SEQ + i], "validation differs"))
                break;
    snprintf(text, sizeof text, "%.6s", want);
    /* Training begins with the first document after those of validation. */
    char first[8] = "";
    for (int i = 0; i < 6; i++) first[i] = (char)r.values[i];
    char *at = strstr(want, first);
    if (CHECK(at && at >= want + VAL * BATCH * SEQ && at[-1] == '\n', "begins with %s", first))
        for (int64_t k = 0; k < r.count * SEQ; k++)
            if (!CHECK(r.values[k / SEQ * 2 * SEQ + k % SEQ] == at[k], "token %d differs", (int)k))
                break;
    free_rows(&val);
    free_rows(&r);
    free(want);
}

static void test_streams(void) {
    write_documents(test_path("one.jsonl"), 0, 500, true);
    write_documents(test_path("lines.txt"), 0, 500, false);
    test_mkdir("many");
    for (int i = 0; i < 5; i++) {
        char name[64];
        snprintf(name, sizeof name, "many/shard%d.jsonl", i);
        write_documents(test_path(name), i * 100, 100, true);
    }
    data_options o = options_for(CONFIG_DATASET_AUTO, test_path("one.jsonl"));
    test_continuity("JSONL", o, 500, 150);
    test_invariants("JSONL", o, 1200); /* far enough that used tokens are dropped */
    CHECK(strstr(test_said, "data: epoch 1 begins"), "a new epoch is not said: %s", test_said);
    o = options_for(CONFIG_FINEWEB_LOCAL, test_path("lines.txt"));
    test_continuity("lines", o, 500, 150);
    test_invariants("lines", o, 400);
    o = options_for(CONFIG_FINEWEB_LOCAL, test_path("many"));
    test_invariants("a folder of shards", o, 400);
}

/* No document of validation is ever trained on, in any epoch; the others are, in each. */
static void test_stream_split(void) {
    static int seen[500], val_seen[500];
    data_options o = options_for(CONFIG_FINEWEB_LOCAL, test_path("many"));
    data_batch b = {.epoch = 0};
    char text[BATCH * SEQ + 1] = "";
    check_case("a stream's split");
    data *d = data_open(&o, &why);
    if (!CHECK(d != NULL, "%s", why.text)) return;
    for (int64_t k = 0; k < data_val_batches(d); k++) {
        data_val(d, k, &b, &why);
        for (int i = 0; i < BATCH * SEQ; i++) text[i] = (char)b.tokens[i];
        for (char *at = strchr(text, 'd'); at; at = strchr(at + 1, 'd')) val_seen[atoi(at + 1)]++;
    }
    /* Rows join up, so a number cut by a row's end is whole in the next; those are left out. */
    while (data_next(d, &b, &why) && b.epoch < 3)
        for (int64_t row = 0; row < b.rows; row++) {
            for (int i = 0; i < SEQ; i++) text[i] = (char)b.tokens[row * SEQ + i];
            text[SEQ] = 0;
            for (char *at = strchr(text, 'd'); at && at + 6 < text + SEQ; at = strchr(at + 1, 'd'))
                seen[atoi(at + 1)]++;
        }
    int both = 0, missed = 0;
    for (int i = 0; i < 500; i++) {
        both += seen[i] && val_seen[i];
        missed += !seen[i] && !val_seen[i];
    }
    CHECK(!both, "%d documents are in validation and in training", both);
    CHECK(missed < 25, "%d documents are never seen", missed);
    data_close(d);
}

static void test_bad_lines(void) {
    data_batch b;
    char *text = malloc(1 << 20);
    size_t n = 0;
    check_case("bad lines");
    for (int i = 0; i < 300; i++) {
        n += (size_t)sprintf(text + n, "{\"text\": \"document %d \\u00e9 \\u0000\"}\n", i);
        if (i % 30 == 7) n += (size_t)sprintf(text + n, "{\"text\": broken\n");
        if (i % 30 == 9) n += (size_t)sprintf(text + n, "{\"txt\": \"no text\"}\n\n[1]\n");
        if (i % 30 == 11) n += (size_t)sprintf(text + n, "{\"text\": 5}\n{\"text\": \"\"}\n");
        if (i % 30 == 13) n += (size_t)sprintf(text + n, "{\"text\": \"\xff\"}\n");
    }
    test_write(test_path("bad.jsonl"), text, n);
    data_options o = options_for(CONFIG_DATASET_AUTO, test_path("bad.jsonl"));
    data *d = data_open(&o, &why);
    if (CHECK(d != NULL, "open: %s", why.text))
        for (int i = 0; i < 40; i++) CHECK(data_next(d, &b, &why), "batch %d: %s", i, why.text);
    CHECK(data_statistics(d).skipped >= 30, "%d lines passed over",
          (int)data_statistics(d).skipped);
    data_close(d);
    CHECK(strstr(test_said, "is not JSON: passed over") &&
              strstr(test_said, "has no \"text\" that is a string: passed over") &&
              strstr(test_said, "counted, not named"),
          "what was passed over: %s", test_said);
    n = 0;
    for (int i = 0; i < 1002; i++) n += (size_t)sprintf(text + n, "{\"txt\": 1}\n");
    test_write(test_path("bad.jsonl"), text, n);
    refuse_path(CONFIG_DATASET_AUTO, test_path("bad.jsonl"),
                "1000 lines in a row are no documents");
    test_write_text(test_path("bad.jsonl"), "{\"text\": \"\"}\n\n");
    refuse_path(CONFIG_DATASET_AUTO, test_path("bad.jsonl"), "no documents to train on");
    test_write_text(test_path("bad.jsonl"), "");
    refuse_path(CONFIG_DATASET_AUTO, test_path("bad.jsonl"), "bad.jsonl: empty");
    free(text);
}

/* ---- Pipes ---- */

typedef struct feeder {
    int fd;
    int documents;
} feeder;

static void *feed(void *user) {
    feeder *f = user;
    char line[600], text[512];
    for (int i = 0; i < f->documents; i++) {
        document_text(i, text);
        int n = snprintf(line, sizeof line, "{\"text\": \"%s\"}\n", text);
        if (write(f->fd, line, (size_t)n) < n) break;
    }
    close(f->fd);
    return NULL;
}

/* The same batches from a pipe as from the file; its end is a fault that says so. */
static void test_pipe(void) {
    int fds[2];
    pthread_t thread;
    data_batch b;
    data_options o = options_for(CONFIG_DATASET_AUTO, test_path("one.jsonl"));
    rows want = collect(o, 1, 100), got = {.count = want.count};
    check_case("a pipe");
    got.values = calloc((size_t)(want.count * 2 * SEQ), sizeof *got.values);
    got.at = calloc((size_t)want.count, sizeof *got.at);
    CHECK(!pipe(fds), "pipe");
    feeder f = {fds[1], 500};
    pthread_create(&thread, NULL, feed, &f);
    o = options_for(CONFIG_FINEWEB, "");
    o.input = fds[0];
    data *d = data_open(&o, &why);
    if (!CHECK(d != NULL, "open: %s", why.text)) exit(1);
    for (int64_t k = 0; k < 100; k++)
        if (!next_rows(d, 0, 1, k, &got)) break;
    same_rows("a pipe gives other rows than the file", &want, got.values, 0);
    bool ok = true;
    for (int i = 0; i < 2000 && ok; i++) ok = data_next(d, &b, &why);
    TEST_FAULT(ok, &why, "standard input: ended after&at sample&a pipe cannot start over");
    data_close(d);
    pthread_join(thread, NULL);
    close(fds[0]);

    check_case("a resumed pipe");
    CHECK(!pipe(fds), "pipe");
    f.fd = fds[1];
    pthread_create(&thread, NULL, feed, &f);
    o.input = fds[0];
    o.resume = &got.at[39];
    rows rest = collect(o, 1, 60);
    same_rows("a resumed pipe goes on elsewhere", &want, rest.values, 40 * BATCH);
    CHECK(strstr(test_said, "standard input: passing over the first 160 samples"), "%s", test_said);
    close(fds[0]);
    pthread_join(thread, NULL);
    free_rows(&want);
    free_rows(&got);
    free_rows(&rest);
    o.resume = NULL;
    o.world = 2;
    d = data_open(&o, &why);
    TEST_FAULT(d != NULL, &why, "a pipe feeds one process, not 2");
    data_close(d);
}

/* A pipe that nobody writes to: a timeout that says so, or synthetic data where that was asked for.
   Closing does not wait for the pipe. */
static void test_timeout(void) {
    int fds[2];
    data_batch b;
    check_case("timeout");
    CHECK(!pipe(fds), "pipe");
    data_options o = options_for(CONFIG_FINEWEB, "-");
    o.input = fds[0];
    data_config.loader_timeout = 0.05;
    data *d = data_open(&o, &why);
    TEST_FAULT(d != NULL, &why, "no data for 0.05 s (data.loader_timeout, --loader-timeout)");
    data_close(d);
    data_config.synthetic_on_fail = 1;
    d = data_open(&o, &why);
    if (CHECK(d != NULL, "synthetic on fail: %s", why.text)) {
        CHECK(data_next(d, &b, &why), "synthetic batch: %s", why.text);
        CHECK(data_statistics(d).synthetic_from == 0, "said where it begins");
        CHECK(data_val_batches(d) == VAL, "synthetic validation");
    }
    CHECK(strstr(test_said, "SYNTHETIC DATA from sample 0"), "not said: %s", test_said);
    data_close(d);
    close(fds[0]);
    close(fds[1]);
}

/* A run that is told to stop does not wait for data that do not come, nor make any up. */
static int told_to_stop(void) {
    return 15;
}

static void test_stop(void) {
    int fds[2];
    check_case("stop");
    CHECK(!pipe(fds), "pipe");
    data_options o = options_for(CONFIG_FINEWEB, "-");
    o.input = fds[0];
    o.stop = told_to_stop;
    data_config.loader_timeout = 3600;
    data_config.synthetic_on_fail = 1;
    data *d = data_open(&o, &why);
    TEST_FAULT(d != NULL, &why, "stopped while waiting for data");
    data_close(d);
    close(fds[0]);
    close(fds[1]);
}

/* A stall in the middle of a run; what had been read ahead is still handed out. */
static void test_stall(void) {
    int fds[2];
    pthread_t thread;
    data_batch b;
    check_case("stall");
    CHECK(!pipe(fds), "pipe");
    int keep = dup(fds[1]);
    feeder f = {fds[1], 100};
    pthread_create(&thread, NULL, feed, &f);
    data_options o = options_for(CONFIG_FINEWEB, "-");
    o.input = fds[0];
    data_config.loader_timeout = 0.2;
    data_config.synthetic_on_fail = 1;
    data *d = data_open(&o, &why);
    pthread_join(thread, NULL);
    if (!CHECK(d != NULL, "%s", why.text)) exit(1);
    for (int i = 0; i < 60; i++) CHECK(data_next(d, &b, &why), "batch %d: %s", i, why.text);
    data_stats s = data_statistics(d);
    CHECK(s.synthetic_from > 0 && s.synthetic_from < 60 * BATCH, "from %d", (int)s.synthetic_from);
    CHECK(b.next.sample == 60 * BATCH, "samples go on: %d", (int)b.next.sample);
    data_close(d);
    close(keep);
    close(fds[0]);
}

/* ---- Documents of their own ---- */

static void test_isolation(void) {
    enum { DOCUMENTS = 200 };
    data_batch b;
    int64_t documents = 0, unlabelled = 0;
    write_documents(test_path("docs.jsonl"), 0, DOCUMENTS, true);
    data_options o = options_for(CONFIG_DATASET_AUTO, test_path("docs.jsonl"));
    data_config.isolate_documents = 1;
    check_case("isolated documents");
    data *d = data_open(&o, &why);
    if (!CHECK(d != NULL, "%s", why.text)) return;
    for (int k = 0; k < 40 && data_next(d, &b, &why); k++) {
        CHECK(b.begins[0] == 0 && b.begins[b.documents] == BATCH * SEQ, "ends of the list");
        int64_t longest = 0, labelled = 0;
        for (int64_t i = 0; i < b.documents; i++) {
            int32_t begin = b.begins[i], end = b.begins[i + 1];
            CHECK(end > begin, "document %d is empty", (int)i);
            if (end - begin > longest) longest = end - begin;
            /* A document begins where a row does or with its 'd', after a newline without a
               label. */
            if (begin % SEQ == 0) continue;
            documents++;
            CHECK(b.tokens[begin] == 'd' && b.tokens[begin - 1] == '\n' &&
                      b.labels[begin - 1] == DATA_NO_LABEL,
                  "document %d begins with %c", (int)i, b.tokens[begin]);
        }
        for (int i = 0; i < BATCH * SEQ; i++) {
            labelled += b.labels[i] != DATA_NO_LABEL;
            unlabelled += b.labels[i] == DATA_NO_LABEL;
            bool ends = b.tokens[i] == '\n';
            CHECK((b.labels[i] == DATA_NO_LABEL) == ends, "label of token %d", i);
        }
        CHECK(b.max_document == longest && b.labelled == labelled, "counts");
    }
    CHECK(documents > 20 && unlabelled >= documents, "%d documents", (int)documents);
    data_close(d);
    data_config.isolate_documents = 0;
    d = data_open(&o, &why);
    CHECK(d && data_next(d, &b, &why) && !b.begins && !b.documents && b.labelled == BATCH * SEQ,
          "not isolated");
    data_close(d);
}

/* Shards end a document at each <|endoftext|>. */
static void test_isolated_shards(void) {
    enum { TOKENS = 4000, END = 50256 };
    static uint16_t tokens[TOKENS];
    data_batch b;
    for (uint64_t i = 0; i < TOKENS; i++)
        tokens[i] = i % 21 == 20 ? END : (uint16_t)check_below(50000, 6, i);
    write_shard(test_path("ends.bin"), (shard_header){20240520, 1, TOKENS}, tokens, TOKENS);
    tokenizer *gpt2 = tokenizer_open(CONFIG_GPT2, "", &why);
    data_options o = options_for(CONFIG_BIN, test_path("ends.bin"));
    o.tokenizer = gpt2;
    o.vocab_size = 50257;
    data_config.isolate_documents = 1;
    check_case("isolated shards");
    data *d = data_open(&o, &why);
    if (!CHECK(d && data_next(d, &b, &why), "%s", why.text)) exit(1);
    for (int i = 0; i < BATCH * SEQ; i++)
        if (b.tokens[i] == END)
            CHECK(b.labels[i] == DATA_NO_LABEL, "the end of a document has a label");
    for (int64_t i = 0; i < b.documents; i++)
        if (b.begins[i] % SEQ)
            CHECK(b.tokens[b.begins[i] - 1] == END || b.documents > 8, "begins after an end");
    CHECK(b.documents >= BATCH, "%d documents", (int)b.documents);
    data_close(d);
    tokenizer_close(gpt2);
}

/* A row that leaps over what validation has set aside: a document ends there, and nowhere else.
   Token i is i, so that a leap shows. */
static void test_leaps(void) {
    enum { TOKENS = 6000 };
    static uint16_t tokens[TOKENS];
    data_batch b;
    int leaps = 0;
    for (int i = 0; i < TOKENS; i++) tokens[i] = (uint16_t)i;
    write_shard(test_path("leaps.bin"), (shard_header){20240520, 1, TOKENS}, tokens, TOKENS);
    tokenizer *gpt2 = tokenizer_open(CONFIG_GPT2, "", &why);
    data_options o = options_for(CONFIG_BIN, test_path("leaps.bin"));
    o.tokenizer = gpt2;
    o.vocab_size = 50257;
    data_config.isolate_documents = 1;
    check_case("leaps over validation");
    data *d = data_open(&o, &why);
    if (!CHECK(d != NULL, "%s", why.text)) exit(1);
    for (int k = 0; k < TOKENS / SEQ / BATCH && data_next(d, &b, &why); k++) {
        int64_t next = 0;
        for (int i = 0; i < BATCH * SEQ; i++) {
            bool leap = i % SEQ && b.tokens[i] != b.tokens[i - 1] + 1;
            bool begins = next < b.documents && b.begins[next] == i;
            next += begins;
            leaps += leap;
            CHECK(begins == (leap || i % SEQ == 0), "token %d after %d", (int)b.tokens[i],
                  i ? (int)b.tokens[i - 1] : -1);
            CHECK(b.labels[i] == b.tokens[i] + 1 || b.labels[i] == DATA_NO_LABEL, "label %d of %d",
                  (int)b.labels[i], (int)b.tokens[i]);
        }
    }
    CHECK(leaps > 1, "%d leaps", leaps);
    data_close(d);
    tokenizer_close(gpt2);
}

/* ---- Other refusals ---- */

static void test_refusals(void) {
    data_batch b;
    refuse_path(CONFIG_TEXT, test_path("nowhere"), "nowhere: cannot read the data&No such file");
    test_write_text(test_path("empty.txt"), "");
    refuse_path(CONFIG_TEXT, test_path("empty.txt"), "empty.txt: an empty file");
    test_write_text(test_path("short.txt"), "hello");
    refuse_path(CONFIG_TEXT, test_path("short.txt"), "short.txt: 6 tokens to train on&needs 33");
    test_mkdir("nothing");
    refuse_path(CONFIG_TEXT, test_path("nothing"), "nothing: a folder without text");
    refuse_path(CONFIG_FINEWEB_LOCAL, test_path("nothing"), "nothing: a folder without files");
    refuse_path(CONFIG_BIN, "-", "shards cannot come from standard input");
    data_options o = options_for(CONFIG_SYNTHETIC, "");
    o.world = 3;
    TEST_FAULT(data_open(&o, &why) != NULL, &why,
               "train.batch_size = 4: must be a multiple of the 3");
    o.world = 1;
    o.vocab_size = 255;
    TEST_FAULT(data_open(&o, &why) != NULL, &why, "model.vocab_size = 255: must be at least&256");
    check_case("a file that shrinks");
    write_records(test_path("shrinks.txt"), 0, 20000);
    o = options_for(CONFIG_TEXT, test_path("shrinks.txt"));
    data *d = data_open(&o, &why);
    CHECK(!truncate(test_path("shrinks.txt"), 100), "truncate");
    bool ok = d != NULL;
    for (int i = 0; i < 100 && ok; i++) ok = data_next(d, &b, &why);
    TEST_FAULT(ok, &why, "shrinks.txt: &bytes were expected at byte&the file has 100");
    data_close(d);
    check_case("other data than before");
    write_records(test_path("other.txt"), 0, 1000);
    o = options_for(CONFIG_TEXT, test_path("other.txt"));
    rows r = collect(o, 1, 3);
    write_records(test_path("other.txt"), 0, 1001);
    o.resume = &r.at[2];
    d = data_open(&o, &why);
    CHECK(d && strstr(test_said, "warning: the data are not those of the checkpoint"), "%s",
          test_said);
    data_close(d);
    free_rows(&r);
}

/* ---- Data and checkpoints that somebody else made ---- */

static void test_hostile(void) {
    enum { LEVELS = 80 };
    char folder[3 * LEVELS] = "deep";
    shard_header shard = {20240520, 1, 1000};
    static uint16_t tokens[1000];
    check_case("folders in folders");
    for (int level = 0; level < LEVELS; level++) {
        test_mkdir(folder);
        strcat(folder, "/d");
    }
    refuse_path(CONFIG_TEXT, test_path("deep"), "folders in folders, more than 64 deep");
    check_case("a shard that becomes a pipe");
    write_shard(test_path("turns.bin"), shard, tokens, 1000);
    data_options o = options_for(CONFIG_BIN, test_path("turns.bin"));
    fault unused;
    source *s = source_open(&o, 0, -1, &unused);
    int32_t window[SEQ + 1];
    unsigned char starts[SEQ + 1], given[SEQ + 1];
    source_window w = {window, starts, given, 0};
    unlink(test_path("turns.bin"));
    CHECK(s && !mkfifo(test_path("turns.bin"), 0666), "pipe");
    TEST_FAULT(s->read(s, 0, &w, &why), &why, "turns.bin: must be a plain file");
    s->close(s);
    check_case("a checkpoint that has used more of a document than there is");
    test_write_text(test_path("lines.jsonl"), "{\"text\":\"four\"}\n{\"text\":\"five\"}\n");
    o = options_for(CONFIG_FINEWEB_LOCAL, test_path("lines.jsonl"));
    data_position p = {.used = (int64_t)1 << 48};
    o.resume = &p;
    TEST_FAULT(data_open(&o, &why) != NULL, &why,
               "has used 281474976710656 tokens of the document at byte 0, which has 5");
}

/* ---- Percentiles ---- */

static void test_statistics(void) {
    data_batch b;
    data_options o = options_for(CONFIG_TEXT, test_path("one.txt"));
    check_case("statistics");
    data *d = data_open(&o, &why);
    for (int i = 0; i < 50; i++) CHECK(data_next(d, &b, &why), "%s", why.text);
    data_stats s = data_statistics(d);
    CHECK(s.fetch_p50_ms > 0 && s.fetch_p95_ms >= s.fetch_p50_ms, "fetch %g %g", s.fetch_p50_ms,
          s.fetch_p95_ms);
    CHECK(s.wait_p95_ms >= s.wait_p50_ms && s.wait_p50_ms >= 0, "wait");
    CHECK(s.synthetic_from == -1, "not synthetic");
    CHECK(strstr(data_describe(d), "one.txt: 1 text file, 16000 tokens"), "%s", data_describe(d));
    data_close(d);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    bytes_tokenizer = tokenizer_open(CONFIG_BYTE, "", &why);
    test_begin();
    test_synthetic();
    test_retrieval();
    test_text();
    test_epoch_order();
    test_bin();
    test_streams();
    test_stream_split();
    test_bad_lines();
    test_pipe();
    test_timeout();
    test_stop();
    test_stall();
    test_isolation();
    test_isolated_shards();
    test_leaps();
    test_refusals();
    test_hostile();
    test_statistics();
    tokenizer_close(bytes_tokenizer);
    return test_end("test_data");
}

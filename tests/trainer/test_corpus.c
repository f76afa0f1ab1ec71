/* test_corpus.c - data that lie in files: text, folders of it, .bin shards; their split, epochs and
   documents, what is refused. Twin: source_corpus.c. */
#include "data_test.h"

static tokenizer *gpt2_tokenizer;

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
    CHECK(strstr(test_said,
                 "texts: passed over: c (empty), .hidden, .not, d/up (a link to a folder)"),
          "what is no data is said, once: %s", test_said);
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

/* Records in rows of any length, of training or of validation. */
static void mark_records(const data_batch *b, int *seen, int records) {
    char text[4096];
    for (int64_t row = 0; row < b->rows; row++) {
        for (int64_t i = 0; i < b->seq_len; i++) text[i] = (char)b->tokens[row * b->seq_len + i];
        text[b->seq_len] = 0;
        for (char *at = text; (at = strchr(at, '\n')) && strchr(at + 1, '\n'); at++) {
            int number = record_number(at + 1);
            if (number >= 0 && number < records) seen[number]++;
        }
    }
}

/* Validation records of a run that goes on from `at`, among those that `seen` counts. */
static int overlap(data_options o, const data_position *at, const int *seen, int records,
                   int *validated) {
    int *val = calloc((size_t)records, sizeof *val), both = 0;
    data_batch b;
    o.resume = at;
    data *d = data_open(&o, &why);
    if (!CHECK(d != NULL, "%s", why.text)) exit(1);
    for (int64_t k = 0; k < data_val_batches(d); k++)
        if (CHECK(data_val(d, k, &b, &why), "%s", why.text)) mark_records(&b, val, records);
    data_close(d);
    *validated = 0;
    for (int i = 0; i < records; i++) {
        both += val[i] && seen[i];
        *validated += val[i] > 0;
    }
    free(val);
    return both;
}

/* What was set aside when a run began stays so, whatever is asked of evaluation later. */
static void test_split_stays(void) {
    enum { RECORDS = 2000 };
    static int seen[RECORDS];
    data_batch b = {.epoch = 0};
    int validated;
    data_options o = options_for(CONFIG_TEXT, test_path("one.txt"));
    check_case("the split of a run that goes on");
    data *d = data_open(&o, &why);
    while (d && data_next(d, &b, &why) && b.epoch < 1) mark_records(&b, seen, RECORDS);
    data_position at = b.next;
    data_close(d);
    CHECK(at.split_parts > 0 && at.split_size > 0, "%d parts", (int)at.split_parts);
    static const struct {
        int64_t batches, batch_size, seq_len;
        double fraction;
    } later[] = {{40, BATCH, SEQ, 0.1},
                 {VAL, BATCH, SEQ, 0.5},
                 {VAL, BATCH, 2 * SEQ, 0.1},
                 {1, 2 * BATCH, SEQ, 0.01}};
    for (size_t i = 0; i < sizeof later / sizeof *later; i++) {
        check_case("the split with other settings, %zu", i);
        o.val_batches = later[i].batches;
        o.batch_size = later[i].batch_size;
        o.seq_len = later[i].seq_len;
        data_config.val_fraction = later[i].fraction;
        int both = overlap(o, &at, seen, RECORDS, &validated);
        CHECK(both == 0 && validated > 5, "%d of %d validated records were trained on", both,
              validated);
    }
    check_case("a checkpoint that does not know its split");
    at.split_parts = -1;
    (void)overlap(o, &at, seen, RECORDS, &validated);
    CHECK(strstr(test_said, "does not say what was set aside"), "%s", test_said);
}

/* Fewer rows than a batch has: the rest of it asks for nothing. None at all is said. */
static void test_little_validation(void) {
    data_batch b;
    int full = 0;
    check_case("few rows of validation");
    write_records(test_path("little.txt"), 0, 100); /* 800 tokens */
    data_options o = options_for(CONFIG_TEXT, test_path("little.txt"));
    o.batch_size = 16;
    data *d = data_open(&o, &why);
    if (!CHECK(d && data_val_batches(d) == 1 && data_val(d, 0, &b, &why), "%s", why.text)) return;
    for (int64_t row = 0; row < b.rows; row++) full += b.labels[row * SEQ] != DATA_NO_LABEL;
    CHECK(full > 0 && full < 16 && b.labelled == full * SEQ, "%d rows, %d labels", full,
          (int)b.labelled);
    CHECK(strstr(test_said, "evaluation on") && strstr(test_said, "not the 32"), "%s", test_said);
    data_close(d);
    check_case("no validation");
    o = options_for(CONFIG_TEXT, test_path("little.txt"));
    o.seq_len = 256;
    d = data_open(&o, &why);
    CHECK(d && data_val_batches(d) == 0, "%s", why.text);
    CHECK(strstr(test_said, "warning: no evaluation: what is set aside"), "%s", test_said);
    data_close(d);
}

static uint64_t print_of(const char *path, int64_t times, uint64_t seed) {
    data_options o = options_for(CONFIG_DATASET_AUTO, path);
    o.seq_len = times * SEQ;
    o.seed = seed;
    data *d = data_open(&o, &why);
    uint64_t print = d ? data_fingerprint(d) : 0;
    CHECK(d != NULL, "%s: %s", path, why.text);
    data_close(d);
    return print;
}

/* Processes that have other contents under one path must notice; data that were moved are the same,
   of which the order of a folder's files is a part. */
static void test_fingerprint(void) {
    enum { RECORDS = 300000 };
    check_case("contents");
    write_records(test_path("print.txt"), 0, RECORDS);
    uint64_t before = print_of(test_path("print.txt"), 1, 11);
    write_records(test_path("print.txt"), 1, RECORDS);
    uint64_t after = print_of(test_path("print.txt"), 1, 11);
    CHECK(before && after && before != after, "the same size, other contents: the same print");
    CHECK(print_of(test_path("print.txt"), 2, 99) == after, "settings are not contents");
    CHECK(!rename(test_path("print.txt"), test_path("moved.txt")), "rename");
    CHECK(print_of(test_path("moved.txt"), 1, 11) == after, "a file of another name");
    static const char *const names[] = {"a.txt", "a.jsonl"};
    char text[4096] = "";
    while (strlen(text) < sizeof text - 64) strcat(text, "{\"text\": \"some words of it\"}\n");
    for (int i = 0; i < 2; i++) {
        char here[32], there[32], other[32];
        snprintf(here, sizeof here, "here%d", i);
        snprintf(there, sizeof there, "there%d/%s", i, names[i]);
        snprintf(other, sizeof other, "there%d/b%s", i, names[i] + 1);
        test_mkdir(here);
        snprintf(here, sizeof here, "here%d/%s", i, names[i]);
        test_write_text(test_path(here), text);
        here[5] = there[6] = 0;
        before = print_of(test_path(here), 1, 11);
        CHECK(!rename(test_path(here), test_path(there)), "rename");
        CHECK(print_of(test_path(there), 1, 11) == before, "%s in another folder", names[i]);
        there[6] = '/';
        CHECK(!rename(test_path(there), test_path(other)), "rename");
        there[6] = 0;
        CHECK(print_of(test_path(there), 1, 11) != before, "%s of another name", names[i]);
    }
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
    write_shard(test_path("bad.bin"), good, tokens, 1000);
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

/* Tokens of 32 bits: each is what the file says, up to the last that a vocabulary may have. */
static void test_wide_bin(void) {
    enum { TOKENS = 4000 };
    static const int32_t first[] = {0, 65536, (1 << 24) - 5, 1 << 30, INT32_MAX - TOKENS};
    static uint32_t tokens[TOKENS];
    for (size_t i = 0; i < sizeof first / sizeof *first; i++) {
        check_case("tokens from %d on", first[i]);
        for (uint32_t k = 0; k < TOKENS; k++) tokens[k] = (uint32_t)first[i] + k;
        write_shard(test_path("wide.bin"), (shard_header){20240801, 7, TOKENS},
                    (const uint16_t *)(const void *)tokens, 2 * (size_t)TOKENS);
        data_options o = options_for(CONFIG_DATASET_AUTO, test_path("wide.bin"));
        o.vocab_size = INT32_MAX;
        data_config.val_fraction = 0;
        o.val_batches = 0;
        rows r = collect(o, 1, 20);
        for (int64_t k = 0; k < r.count * 2 * SEQ; k++)
            CHECK(r.values[k] >= first[i] && r.values[k] - first[i] < TOKENS, "token %d",
                  r.values[k]);
        free_rows(&r);
    }
    check_case("beyond what a vocabulary may have");
    for (int k = 0; k < TOKENS; k++) tokens[k] = 1u << 31;
    write_shard(test_path("wide.bin"), (shard_header){20240801, 7, TOKENS},
                (const uint16_t *)(const void *)tokens, 2 * (size_t)TOKENS);
    data_options o = options_for(CONFIG_BIN, test_path("wide.bin"));
    o.vocab_size = INT32_MAX;
    data_batch b;
    data *d = data_open(&o, &why);
    TEST_FAULT(d && data_next(d, &b, &why), &why,
               "wide.bin: token 2147483648 at byte &must be below the vocabulary's 2147483647 "
               "(model.vocab_size); a vocabulary has 2147483647 at most, for a token is an int32");
    data_close(d);
}

/* ---- Documents of their own ---- */

/* A shard of GPT-2's tokens, each document by itself. */
static data *open_isolated(const uint16_t *tokens, int count, double val_fraction) {
    write_shard(test_path("isolated.bin"), (shard_header){20240520, 1, count}, tokens,
                (size_t)count);
    data_options o = options_for(CONFIG_BIN, test_path("isolated.bin"));
    o.tokenizer = gpt2_tokenizer;
    o.vocab_size = 50257;
    data_config.isolate_documents = 1;
    data_config.val_fraction = val_fraction;
    if (val_fraction == 0) o.val_batches = 0;
    data *d = data_open(&o, &why);
    if (!CHECK(d != NULL, "%s", why.text)) exit(1);
    return d;
}

/* Shards end a document at each <|endoftext|>, and nowhere else. */
static void test_isolated_shards(void) {
    enum { TOKENS = 4000, END = 50256 };
    static uint16_t tokens[TOKENS];
    data_batch b;
    int ends = 0;
    for (uint64_t i = 0; i < TOKENS; i++)
        tokens[i] = i % 21 == 20 ? END : (uint16_t)check_below(50000, 6, i);
    check_case("isolated shards");
    data *d = open_isolated(tokens, TOKENS, 0);
    for (int k = 0; k < TOKENS / SEQ / BATCH && data_next(d, &b, &why); k++) {
        int64_t next = 0;
        for (int i = 0; i < BATCH * SEQ; i++) {
            bool begins = next < b.documents && b.begins[next] == i;
            bool ended = i % SEQ && b.tokens[i - 1] == END;
            next += begins;
            ends += ended;
            CHECK(begins == (ended || i % SEQ == 0), "token %d: a document begins: %d", i, begins);
            CHECK((b.labels[i] == DATA_NO_LABEL) == (b.tokens[i] == END), "label %d of %d",
                  (int)b.labels[i], (int)b.tokens[i]);
        }
    }
    CHECK(ends > 100, "%d ends", ends);
    data_close(d);
}

/* A row that leaps over what validation has set aside: a document ends there, and nowhere else.
   Token i is i, so that a leap shows. */
static void test_leaps(void) {
    enum { TOKENS = 6000 };
    static uint16_t tokens[TOKENS];
    data_batch b;
    int leaps = 0;
    for (int i = 0; i < TOKENS; i++) tokens[i] = (uint16_t)i;
    check_case("leaps over validation");
    data *d = open_isolated(tokens, TOKENS, 0.1);
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
}

/* ---- Files that are wrong, that change, or that somebody else made ---- */

static void test_refusals(void) {
    refuse_path(CONFIG_TEXT, test_path("nowhere"), "nowhere: cannot read the data&No such file");
    refuse_path(CONFIG_TEXT, test_path("train_*.bin"),
                "train_*.bin: cannot read the data (no pattern: give the folder): No such file");
    test_write_text(test_path("empty.txt"), "");
    refuse_path(CONFIG_TEXT, test_path("empty.txt"), "empty.txt: an empty file");
    test_write_text(test_path("short.txt"), "hello");
    refuse_path(CONFIG_TEXT, test_path("short.txt"), "short.txt: 6 tokens to train on&needs 33");
    test_mkdir("nothing");
    refuse_path(CONFIG_TEXT, test_path("nothing"), "nothing: a folder without text");
    refuse_path(CONFIG_BIN, "-", "shards cannot come from standard input");
}

static void test_changes(void) {
    data_batch b;
    check_case("a file that shrinks");
    write_records(test_path("shrinks.txt"), 0, 20000);
    data_options o = options_for(CONFIG_TEXT, test_path("shrinks.txt"));
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
}

/* ---- Statistics ---- */

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
    bytes_tokenizer = tokenizer_open(CONFIG_BYTE, "", &why);
    gpt2_tokenizer = tokenizer_open(CONFIG_GPT2, "", &why);
    test_begin();
    test_text();
    test_epoch_order();
    test_split_stays();
    test_little_validation();
    test_fingerprint();
    test_bin();
    test_wide_bin();
    test_isolated_shards();
    test_leaps();
    test_refusals();
    test_changes();
    test_hostile();
    test_statistics();
    tokenizer_close(gpt2_tokenizer);
    tokenizer_close(bytes_tokenizer);
    return test_end("test_corpus");
}

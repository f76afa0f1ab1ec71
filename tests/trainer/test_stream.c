/* test_stream.c - data that come as documents: JSON lines, plain lines, folders of them, pipes that
   stall, end or never begin. Twins: source_stream.c, data.c, which waits for them. */
#include <pthread.h>
#include <signal.h>

#include "base/fallback.h"
#include "data_test.h"

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

/* ---- Other forms of the same documents ---- */

static void put_little(FILE *file, uint32_t x, int bytes) {
    for (int i = 0; i < bytes; i++) fputc((int)(x >> 8 * i & 255), file);
}

/* CRC-32 of RFC 1952, bit by bit. */
static uint32_t check_sum(const char *text, size_t bytes) {
    uint32_t sum = ~(uint32_t)0;
    for (size_t i = 0; i < bytes; i++) {
        sum ^= (unsigned char)text[i];
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320u : 0);
    }
    return ~sum;
}

/* A gzip file (RFC 1952) of members that are one stored block each (RFC 1951). */
static void write_gzip(const char *path, const char *text, size_t bytes) {
    static const char head[10] = "\x1f\x8b\x08\0\0\0\0\0\0\xff";
    FILE *file = fopen(path, "wb");
    if (!CHECK(file != NULL, "cannot write %s", path)) exit(1);
    for (size_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < 7000 ? bytes - at : 7000;
        fwrite(head, sizeof head, 1, file);
        put_little(file, 1, 1);
        put_little(file, (uint32_t)n, 2);
        put_little(file, ~(uint32_t)n, 2);
        fwrite(text + at, 1, n, file);
        put_little(file, check_sum(text + at, n), 4);
        put_little(file, (uint32_t)n, 4);
    }
    fclose(file);
}

/* The lines of a file as an array over several lines, behind a byte order mark. */
static void write_array(const char *path, const char *lines) {
    FILE *file = fopen(path, "wb");
    if (!CHECK(file != NULL, "cannot write %s", path)) exit(1);
    fprintf(file, "\xef\xbb\xbf\r\n[ ");
    for (; *lines; lines += strcspn(lines, "\n") + 1)
        fprintf(file, "%.*s%s", (int)strcspn(lines, "\n"), lines,
                lines[strcspn(lines, "\n") + 1] ? "\r\n,  " : "\n]\n");
    fclose(file);
}

/* Rows do not depend on how the documents are written, nor on where a run goes on in them. */
static void test_forms(void) {
    size_t bytes;
    char *text = test_read(test_path("one.jsonl"), &bytes);
    data_options o = options_for(CONFIG_DATASET_AUTO, test_path("one.jsonl"));
    rows want = collect(o, 1, 150);
    write_array(test_path("array.json"), text);
    write_gzip(test_path("packed.jsonl.gz"), text, bytes);
    static const char *const names[] = {"array.json", "packed.jsonl.gz"};
    for (int i = 0; i < 2; i++) {
#ifndef NSA_HAVE_ZLIB
        if (i == 1) continue;
#endif
        o = options_for(CONFIG_DATASET_AUTO, test_path(names[i]));
        check_case("%s", names[i]);
        /* What val_fraction sets aside is counted in bytes, of which an array has others. */
        rows got = collect(o, 1, 150);
        if (i == 1) same_rows("packed documents are others", &want, got.values, 0);
        test_invariants(names[i], o, 300);
        free_rows(&got);
    }
    free_rows(&want);
    free(text);
    test_mkdir("forms");
    write_documents(test_path("forms/a.jsonl"), 0, 100, true);
    write_documents(test_path("forms/b.txt"), 100, 30, false);
    text = test_read(test_path("forms/a.jsonl"), &bytes);
    write_array(test_path("forms/c.json"), text);
    free(text);
    o = options_for(CONFIG_DATASET_AUTO, test_path("forms"));
    test_invariants("a folder of several forms", o, 200);
}

/* As of a text: what is not there any more is not passed over. */
static void test_shrinking(void) {
    data_batch b;
    check_case("documents that shrink");
    write_documents(test_path("shrinks.jsonl"), 0, 5000, true);
    data_options o = options_for(CONFIG_DATASET_AUTO, test_path("shrinks.jsonl"));
    data *d = data_open(&o, &why);
    if (!CHECK(d != NULL, "%s", why.text)) return;
    CHECK(!truncate(test_path("shrinks.jsonl"), 150000), "truncate");
    bool ok = true;
    for (int i = 0; i < 5000 && ok; i++) ok = data_next(d, &b, &why);
    TEST_FAULT(ok, &why, "shrinks.jsonl: ends at byte&when the run began");
    data_close(d);
}

/* Data that cannot be trained on are found when they are opened, however fast the thread is. */
static void test_found_early(void) {
    check_case("found when opened");
    test_write_text(test_path("short.jsonl"), "{\"text\": \"a few\"}\n{\"txt\": 1}\n");
    data_options o = options_for(CONFIG_DATASET_AUTO, test_path("short.jsonl"));
    o.val_batches = 0;
    data_config.val_fraction = 0;
    for (int i = 0; i < 20; i++) {
        data *d = data_open(&o, &why);
        CHECK(d != NULL, "some documents are enough: %s", why.text);
        data_close(d);
    }
    test_write_text(test_path("short.jsonl"), "{\"txt\": \"a few\"}\n");
    for (int i = 0; i < 50; i++)
        TEST_FAULT(data_open(&o, &why) != NULL, &why,
                   "no documents to train on&the line at byte 0 has no \"text\"&but \"txt\"");
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

/* What was set aside when a run began stays so, whatever is asked of evaluation later. */
static void test_split_stays(void) {
    static const struct {
        int64_t batches, seq_len;
        double fraction;
    } later[] = {{20, SEQ, 0.1}, {VAL, SEQ, 0.5}, {VAL, 2 * SEQ, 0.1}, {1, SEQ, 0.001}};
    static int seen[500];
    data_options o = options_for(CONFIG_FINEWEB_LOCAL, test_path("one.jsonl"));
    data_batch b = {.epoch = 0};
    check_case("the split of a stream that goes on");
    data *d = data_open(&o, &why);
    while (d && data_next(d, &b, &why) && b.epoch < 1)
        for (int64_t row = 0; row < b.rows; row++) {
            char text[SEQ + 1] = "";
            for (int i = 0; i < SEQ; i++) text[i] = (char)b.tokens[row * SEQ + i];
            for (char *at = strchr(text, 'd'); at && at + 6 < text + SEQ; at = strchr(at + 1, 'd'))
                seen[atoi(at + 1)]++;
        }
    data_position at = b.next;
    data_close(d);
    CHECK(at.split_parts > 0, "%d documents", (int)at.split_parts);
    for (size_t i = 0; i < sizeof later / sizeof *later; i++) {
        char text[8 * SEQ * BATCH] = "";
        int both = 0, validated = 0;
        check_case("the split of a stream with other settings, %zu", i);
        o.resume = &at;
        o.val_batches = later[i].batches;
        o.seq_len = later[i].seq_len;
        data_config.val_fraction = later[i].fraction;
        d = data_open(&o, &why);
        if (!CHECK(d != NULL, "%s", why.text)) return;
        for (int64_t k = 0; k < data_val_batches(d); k++) {
            data_val(d, k, &b, &why);
            int n = 0;
            for (int64_t t = 0; t < b.rows * b.seq_len; t++)
                if (b.labels[t] != DATA_NO_LABEL) text[n++] = (char)b.tokens[t];
            text[n] = 0;
            for (char *p = strchr(text, 'd'); p; p = strchr(p + 1, 'd')) {
                validated++;
                both += atoi(p + 1) < 500 && seen[atoi(p + 1)] > 0;
            }
        }
        data_close(d);
        CHECK(validated > 3 && both <= 1, "%d of %d validated documents were trained on", both,
              validated); /* one whose number is cut short */
    }
}

/* One document, or a first one that is most of the data: it is trained on. One of a fifth of them
   is set aside, though more than val_fraction. */
static void test_large_first(void) {
    static const struct {
        int first, others; /* characters */
        bool set_aside;
    } cases[] = {{4000, 0, false}, {4000, 400, false}, {1000, 4000, true}};
    char text[8192];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        data_options o = options_for(CONFIG_DATASET_AUTO, test_path("first.jsonl"));
        data_batch b;
        check_case("a large first document, %zu", i);
        int n = sprintf(text, "{\"text\": \"%0*d\"}\n", cases[i].first, 0);
        if (cases[i].others) sprintf(text + n, "{\"text\": \"%0*d\"}\n", cases[i].others, 1);
        test_write_text(test_path("first.jsonl"), text);
        data *d = data_open(&o, &why);
        if (!CHECK(d && data_next(d, &b, &why), "%s", why.text)) continue;
        CHECK((data_val_batches(d) > 0) == cases[i].set_aside, "%lld batches of validation",
              (long long)data_val_batches(d));
        CHECK(b.tokens[0] == '0' && b.tokens[SEQ - 1] == '0', "what is trained on first");
        data_close(d);
    }
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
    CHECK(strstr(test_said, "is not JSON: invalid token near 'broken': passed over") &&
              strstr(test_said, "is a string, but a number: passed over") &&
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
    o.processes = 2;
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
        CHECK(fallback_count(FALLBACK_DATA_SOURCE) == 1, "a batch was made up");
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
    data_batch b;
    check_case("stall");
    CHECK(!pipe(fds), "pipe");
    int keep = dup(fds[1]);
    feeder f = {fds[1], 100};
    feed(&f); /* the pipe holds all of it: nothing is late but what never comes */
    data_options o = options_for(CONFIG_FINEWEB, "-");
    o.input = fds[0];
    data_config.loader_timeout = 2;
    data_config.synthetic_on_fail = 1;
    data *d = data_open(&o, &why);
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

/* ---- Refusals ---- */

static void test_refusals(void) {
    test_mkdir("nothing");
    refuse_path(CONFIG_FINEWEB_LOCAL, test_path("nothing"), "nothing: a folder without files");
    check_case("a checkpoint that has used more of a document than there is");
    test_write_text(test_path("lines.jsonl"), "{\"text\":\"four\"}\n{\"text\":\"five\"}\n");
    data_options o = options_for(CONFIG_FINEWEB_LOCAL, test_path("lines.jsonl"));
    data_position p = {.used = (int64_t)1 << 48};
    o.resume = &p;
    TEST_FAULT(data_open(&o, &why) != NULL, &why,
               "has used 281474976710656 tokens of the document at byte 0, which has 5");
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    bytes_tokenizer = tokenizer_open(CONFIG_BYTE, "", &why);
    test_begin();
    test_streams();
    test_forms();
    test_shrinking();
    test_found_early();
    test_stream_split();
    test_split_stays();
    test_large_first();
    test_bad_lines();
    test_pipe();
    test_timeout();
    test_stop();
    test_stall();
    test_isolation();
    test_refusals();
    tokenizer_close(bytes_tokenizer);
    return test_end("test_stream");
}

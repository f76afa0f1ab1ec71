/* fuzz_shards.c - training data that somebody else made: token shards of both widths, text, JSON
   lines and arrays, packed or not, and the place in them that a checkpoint gives. Twins:
   examples/trainer/data/source*.c, format.c, unpack.c, documents.c. Not here: the
   thread that reads ahead (tests/trainer/test_stream.c).

   Windows must hold tokens of the vocabulary, and where a source stood must be where it goes on. */
#include "files.h"

#include "config/config.h"
#include "data/source.h"

enum { SEQ = 8, WINDOWS = 6, VOCAB = 300 };

static config_data settings;
static tokenizer *bytes_tokenizer;

/* What begins packed data, so that not all of them is refused at once. */
static size_t write_head(fuzz_input *in, uint8_t *file) {
    static const char gzip[] = "\x1f\x8b\x08\0\0\0\0\0\0\xff", zstd[] = "\x28\xb5\x2f\xfd";
    int which = (int)fuzz_below(in, 6);
    size_t bytes = which == 0 ? 10 : which == 1 ? 4 : 0;
    if (bytes) memcpy(file, which ? zstd : gzip, bytes);
    return bytes;
}

static const char *write_input(fuzz_input *in, int kind) {
    static const char *const names[] = {"data.jsonl", "data.json", "data.txt", "data.jsonl.gz"};
    static uint8_t file[1 << 16];
    const char *name = kind == CONFIG_BIN ? "data.bin" : names[fuzz_below(in, 4)];
    size_t n = 0;
    if (kind == CONFIG_BIN && fuzz_below(in, 8)) {
        /* A header that fits, or says another number of tokens. */
        int width = fuzz_below(in, 4) ? 2 : 4;
        int64_t other = fuzz_below(in, 8) ? 0 : fuzz_number(in);
        n = 1024;
        size_t bytes = (size_t)(in->end - in->at);
        int32_t header[3] = {width == 2 ? 20240520 : 20240801, width == 2 ? 1 : 7,
                             other ? (int32_t)other : (int32_t)(bytes / (size_t)width)};
        memset(file, 0, n);
        memcpy(file, header, sizeof header);
        if (!other) in->end -= bytes % (size_t)width;
    }
    if (kind != CONFIG_BIN) n = write_head(in, file);
    size_t left = (size_t)(in->end - in->at), room = sizeof file - n;
    if (left > room) left = room;
    memcpy(file + n, in->at, left);
    in->at += left;
    return fuzz_write(name, file, n + left);
}

static void check_window(const source_window *w) {
    for (int i = 0; i <= SEQ; i++)
        FUZZ_ASSERT(w->tokens[i] >= 0 && w->tokens[i] < VOCAB && w->starts[i] <= 1,
                    "token %d at %d", w->tokens[i], i);
}

/* A few windows from `sample` on, the place after each, and the same windows from there. */
static void read_windows(source *s, const data_options *o, int64_t sample, int again) {
    int32_t tokens[SEQ + 1], same[SEQ + 1];
    unsigned char starts[SEQ + 1], given[SEQ + 1] = {0};
    source_window w = {tokens, starts, given, 0};
    data_position p;
    fault why;
    for (int64_t i = 0; i < s->val_windows && i < WINDOWS; i++)
        if (s->read_val(s, i, &w, &why)) check_window(&w);
    for (int i = 0; i < WINDOWS; i++, sample++) {
        if (!s->position(s, sample, &p, &why) || !s->read(s, sample, &w, &why)) return;
        check_window(&w);
        if (!again) continue;
        data_options later = *o;
        p.split_parts = s->split_parts, p.split_size = s->split_size; /* as data.c saves them */
        later.resume = &p;
        source *other = source_open(&later, 2, -1, &why);
        FUZZ_ASSERT(other, "from its own place: %s", why.text);
        source_window copy = {same, starts, given, 0};
        FUZZ_ASSERT(other->read(other, sample, &copy, &why), "at sample %lld: %s",
                    (long long)sample, why.text);
        FUZZ_ASSERT(!memcmp(tokens, same, sizeof same), "other tokens at sample %lld",
                    (long long)sample);
        other->close(other);
    }
}

static void draw_position(fuzz_input *in, data_position *p) {
    int64_t *fields[] = {&p->sample, &p->epoch, &p->shard, &p->offset, &p->document, &p->used};
    memset(p, 0, sizeof *p);
    p->split_parts = -1; /* not known */
    /* What checkpoint.c lets through: 0 .. 2^48. */
    for (int i = 0; i < 6; i++)
        *fields[i] = fuzz_below(in, 2) ? 0 : (int64_t)(fuzz_number(in) & (((int64_t)1 << 48) - 1));
    if (p->sample > 64 && fuzz_below(in, 4)) p->sample %= 64;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    static const int kinds[] = {CONFIG_BIN, CONFIG_TEXT, CONFIG_FINEWEB_LOCAL, CONFIG_DATASET_AUTO};
    fuzz_input in = {input, input + size};
    fault why;
    data_position p;
    if (!bytes_tokenizer) bytes_tokenizer = tokenizer_open(CONFIG_BYTE, "", &why);
    int kind = kinds[fuzz_below(&in, 4)], resumed = !fuzz_below(&in, 3);
    settings.dataset = kind;
    settings.val_fraction = fuzz_below(&in, 2) ? 0.2 : 0;
    data_options o = {.config = &settings,
                      .tokenizer = bytes_tokenizer,
                      .vocab_size = VOCAB,
                      .seq_len = SEQ,
                      .batch_size = 1,
                      .world = 1,
                      .input = -1};
    o.seed = fuzz_take(&in, 1);
    draw_position(&in, &p);
    if (resumed) o.resume = &p;
    const char *path = write_input(&in, kind);
    snprintf(settings.path, sizeof settings.path, "%.1000s", path);
    source *s = source_open(&o, 2, -1, &why);
    if (!s) {
        FUZZ_ASSERT(strstr(why.text, "data."), "a message without the file: %s", why.text);
        return 0;
    }
    /* A sample further on than a stream has come is reached by reading: keep that short. */
    read_windows(s, &o, resumed ? p.sample : 0, !resumed);
    s->close(s);
    return 0;
}

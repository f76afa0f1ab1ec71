/* source_corpus.c - tokens that can be read in any order: llm.c's .bin shards and text files, laid
   end to end. Twin: source.h. Files are read as they are needed, never mapped: one that shrinks
   during a run is a message, not a signal.

   The validation split is up to 16 stretches of tokens at equal distances, so that it is like the
   rest; training sees what is left between them. Each epoch is cut into windows from another
   offset, and takes them in another order. */
#include "data/source.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/files.h"
#include "base/rng.h"
#include "data/documents.h"

enum { STRETCHES = 16, TELL_BYTES = 1 << 26, WIDEST = 4 };

/* Files may be sparse, so that their sizes are not to be trusted to add up. */
#define MOST_TOKENS ((int64_t)1 << 48)

typedef struct piece {
    int64_t begin, count; /* place among all tokens; the separator included */
    const char *path;
    int width;       /* bytes of a token on the disk or in `text`; 0: in `tokens` */
    int64_t header;  /* bytes before the first token */
    bool separator;  /* the last token is one that the file does not hold */
    char *text;      /* of bytes that were packed: all of them */
    int32_t *tokens; /* where width is 0 */
} piece;

typedef struct corpus {
    source base;
    format_files files;
    piece *pieces;
    size_t count;
    int64_t tokens;
    int64_t held;               /* of them, the last ones: of files for validation */
    int64_t stretches, stretch; /* of validation, and tokens of each */
    int64_t windows, slack;     /* of an epoch, and how far its offset may go */
    int fd;                     /* of the file read last, or -1 */
    size_t fd_piece;
    unsigned char *bytes; /* a window as it is on the disk */
} corpus;

static corpus *corpus_of(source *s) {
    return (corpus *)(void *)s;
}

/* ---- Reading ---- */

static bool open_piece(corpus *c, size_t i, fault *f) {
    if (c->fd >= 0 && c->fd_piece == i) return true;
    if (c->fd >= 0) close(c->fd);
    c->fd_piece = i;
    c->fd = files_open(c->pieces[i].path, f);
    return c->fd >= 0;
}

/* A token of llm.c's formats, or a byte; below 2^32. */
static int64_t token_at(const unsigned char *at, int width) {
    int64_t token = 0;
    for (int i = 0; i < width; i++) token |= (int64_t)at[i] << 8 * i;
    return token;
}

static bool read_stored(corpus *c, size_t i, int64_t first, int64_t count, int32_t *tokens,
                        fault *f) {
    const piece *p = &c->pieces[i];
    int64_t offset = p->header + first * p->width, vocab = c->base.options->vocab_size;
    const unsigned char *at = p->text ? (unsigned char *)p->text + offset : c->bytes;
    if (!p->text && (!open_piece(c, i, f) || !files_read_at(c->fd, p->path, c->bytes,
                                                            (size_t)(count * p->width), offset, f)))
        return false;
    if (c->files.files[i].format.no_zeros &&
        !format_check_rest(p->path, (const char *)at, (size_t)count, offset, f))
        return false;
    for (int64_t k = 0; k < count; k++) {
        int64_t token = token_at(at + k * p->width, p->width);
        if (token >= vocab)
            return fault_in_data(f,
                                 "%s: token %lld at byte %lld: must be below the vocabulary's %lld "
                                 "(model.vocab_size)%s",
                                 p->path, (long long)token, (long long)(offset + k * p->width),
                                 (long long)vocab,
                                 token < INT32_MAX ? ""
                                                   : "; a vocabulary has 2147483647 at most, for a "
                                                     "token is an int32 where it is used");
        tokens[k] = (int32_t)token;
    }
    return true;
}

/* Tokens first .. first + count of one piece. */
static bool read_piece(corpus *c, size_t i, int64_t first, int64_t count, int32_t *tokens,
                       fault *f) {
    const piece *p = &c->pieces[i];
    int64_t stored = p->count - p->separator;
    int64_t from_file = first + count > stored ? stored - first : count;
    if (from_file < count) tokens[count - 1] = tokenizer_separator(c->base.options->tokenizer);
    if (from_file <= 0) return true;
    if (p->width) return read_stored(c, i, first, from_file, tokens, f);
    memcpy(tokens, p->tokens + first, (size_t)from_file * sizeof *tokens);
    return true;
}

static size_t piece_at(const corpus *c, int64_t token) {
    size_t low = 0, high = c->count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (c->pieces[middle].begin <= token)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Tokens `from` .. of the whole; a piece starts a document, and so does what follows a separator
   in shards and in GPT-2's vocabulary. (A newline separates bytes, but not every one does.) */
static bool read_run(corpus *c, int64_t from, int64_t count, source_window *w, int64_t to,
                     fault *f) {
    tokenizer *t = c->base.options->tokenizer;
    size_t i = piece_at(c, from);
    while (count) {
        const piece *p = &c->pieces[i];
        int64_t first = from - p->begin, n = p->count - first < count ? p->count - first : count;
        if (!read_piece(c, i, first, n, w->tokens + to, f)) return false;
        for (int64_t k = 0; k < n; k++)
            w->starts[to + k] = first + k == 0 || (!tokenizer_is_byte(t) && to + k > 0 &&
                                                   w->tokens[to + k - 1] == tokenizer_separator(t));
        from += n;
        to += n;
        count -= n;
        i++;
    }
    return true;
}

/* ---- The split ---- */

static int64_t part_begin(const corpus *c, int64_t part) {
    return c->tokens / c->stretches * part +
           (part < c->tokens % c->stretches ? part : c->tokens % c->stretches);
}

static int64_t train_tokens(const corpus *c) {
    return c->tokens - c->stretches * c->stretch;
}

/* A training window by its place among the tokens that are left; it may leap over a stretch of
   validation, which then counts as a document's end. */
static bool read_training(corpus *c, int64_t from, source_window *w, fault *f) {
    int64_t done = 0, want = c->base.options->seq_len + 1;
    for (int64_t part = 0; part < c->stretches && done < want; part++) {
        int64_t begin = part_begin(c, part), end = part_begin(c, part + 1) - c->stretch;
        if (from >= end - begin) {
            from -= end - begin;
            continue;
        }
        int64_t n = end - begin - from < want - done ? end - begin - from : want - done;
        if (!read_run(c, begin + from, n, w, done, f)) return false;
        if (done) w->starts[done] = 1;
        done += n;
        from = 0;
    }
    return true;
}

static bool read_train(source *s, int64_t sample, source_window *w, fault *f) {
    corpus *c = corpus_of(s);
    const data_options *o = s->options;
    uint64_t epoch = (uint64_t)(sample / c->windows), place = (uint64_t)(sample % c->windows);
    uint64_t window = rng_permute(o->seed, RNG_SHUFFLE | epoch << 8, place, (uint64_t)c->windows);
    uint64_t phase = rng_below(o->seed, RNG_PHASE, epoch, (uint64_t)c->slack + 1);
    w->epoch = (int64_t)epoch;
    return read_training(c, (int64_t)phase + (int64_t)window * o->seq_len, w, f);
}

static int64_t windows_in(int64_t tokens, int64_t seq_len) {
    return tokens > seq_len ? (tokens - 1) / seq_len : 0;
}

static bool position(source *s, int64_t sample, data_position *p, fault *f) {
    source_position_by_number(s, sample, p, f);
    p->epoch = sample / corpus_of(s)->windows;
    return true;
}

/* The wanted windows are spread evenly over all that the stretches hold. */
static bool read_val(source *s, int64_t window, source_window *w, fault *f) {
    corpus *c = corpus_of(s);
    int64_t seq_len = s->options->seq_len, each = windows_in(c->stretch, seq_len);
    int64_t all = each * c->stretches, chosen = window * (all / s->val_windows) +
                                                window * (all % s->val_windows) / s->val_windows;
    int64_t part = chosen / each; /* NOLINT: `each` is 0 where there are no windows to ask for */
    w->epoch = 0;
    return read_run(c, part_begin(c, part + 1) - c->stretch + chosen % each * seq_len, seq_len + 1,
                    w, 0, f);
}

/* What a resumed run had set aside; false: it does not fit the data, or is not known. */
static bool split_as_before(corpus *c, const data_position *p) {
    if (!p || p->split_parts < 0) return false;
    if (p->split_parts > STRETCHES || p->split_size < 0 ||
        (p->split_parts && p->split_size > c->tokens / 2 / p->split_parts))
        return false;
    c->stretches = p->split_parts ? p->split_parts : 1;
    c->stretch = p->split_parts ? p->split_size : 0;
    return true;
}

/* Sets aside the share that was asked for, and at least the windows that are wanted where that
   takes no more than a quarter. */
static void split_anew(corpus *c, int64_t val_rows) {
    const data_options *o = c->base.options;
    if (c->held) { /* the last pieces, as one stretch */
        c->stretches = 1;
        c->stretch = c->held;
        return;
    }
    int64_t share = (int64_t)(o->config->val_fraction * (double)c->tokens);
    int64_t need = val_rows * o->seq_len + 1, window = o->seq_len + 1;
    c->stretches = 1;
    if (o->config->val_fraction <= 0 || !val_rows) return;
    if (share < need) share = need;
    if (share > c->tokens / 4) share = c->tokens / 4;
    if (share < window) return;
    c->stretches = share / (4 * window) < STRETCHES ? share / (4 * window) : STRETCHES;
    if (c->stretches < 1) c->stretches = 1;
    c->stretch = share / c->stretches;
}

static void split(corpus *c, int64_t val_rows) {
    if (!split_as_before(c, c->base.options->resume)) split_anew(c, val_rows);
    int64_t all = windows_in(c->stretch, c->base.options->seq_len) * c->stretches;
    c->base.val_windows = all < val_rows ? all : val_rows;
    c->base.split_parts = c->stretch ? c->stretches : 0;
    c->base.split_size = c->stretch;
}

/* A large corpus gives up one window, so that the offset of an epoch's windows is free. */
static bool lay_windows(corpus *c, const char *path, fault *f) {
    int64_t seq_len = c->base.options->seq_len, tokens = train_tokens(c);
    c->windows = windows_in(tokens, seq_len);
    if (!c->windows)
        return fault_set(f,
                         "%s: %lld tokens to train on; a window of train.seq_len = %lld needs %lld",
                         path, (long long)tokens, (long long)seq_len, (long long)seq_len + 1);
    if (c->windows > 8) c->windows--;
    c->slack = tokens - 1 - c->windows * seq_len;
    if (c->slack >= seq_len) c->slack = seq_len - 1;
    return true;
}

/* ---- Opening ---- */

static bool ends_with_newline(const char *path, int fd, int64_t bytes, bool *yes, fault *f) {
    char last = 0;
    if (!files_read_at(fd, path, &last, 1, bytes - 1, f)) return false;
    *yes = last == '\n';
    return true;
}

/* Of bytes, what separates documents is a newline, which a text may have. */
static void lay_bytes(piece *p, int64_t bytes, bool newline) {
    p->width = 1;
    p->separator = !newline;
    p->count = bytes + p->separator;
}

/* Text that is not bytes is encoded whole. */
static bool encode_text(corpus *c, char *text, size_t bytes, piece *p, fault *f) {
    token_list list = {NULL, 0, 0};
    tokenizer *t = c->base.options->tokenizer;
    if (bytes > TELL_BYTES)
        listener_say(&c->base.options->notes,
                     "%s: encoding %zu MB before the first step; shards "
                     "(.bin) open at once",
                     p->path, bytes / 1000000);
    bool ok = tokenizer_encode_document(t, text, bytes, &list, f);
    free(text);
    if (ok && !list.count && !token_list_push(&list, tokenizer_separator(t)))
        ok = fault_set(f, "%s: out of memory for tokens", p->path);
    p->tokens = list.ids;
    p->count = (int64_t)list.count;
    return ok;
}

static bool open_text(corpus *c, const format_file *file, int fd, piece *p, fault *f) {
    bool newline, is_byte = tokenizer_is_byte(c->base.options->tokenizer);
    size_t bytes;
    if (is_byte && file->format.packing == FORMAT_PLAIN) {
        if (!ends_with_newline(file->path, fd, file->size, &newline, f)) return false;
        p->header = file->format.begin;
        lay_bytes(p, file->size - p->header, newline);
        return true;
    }
    uint64_t *sum = &c->base.fingerprint, own = tokenizer_sum(c->base.options->tokenizer);
    if (own) *sum = XXH64(&own, sizeof own, *sum);
    char *text = documents_read_text(file, &bytes, f);
    if (!text || !is_byte) return text && encode_text(c, text, bytes, p, f);
    p->text = text;
    lay_bytes(p, (int64_t)bytes, bytes && text[bytes - 1] == '\n');
    return true;
}

static bool open_shard(const data_options *o, const format_file *file, piece *p, fault *f) {
    if (file->format.kind != FORMAT_SHARD)
        return fault_set(f, "%s: no token shard, but data.dataset = bin; allowed: auto, text",
                         file->path);
    if (o->config->dataset != CONFIG_DATASET_AUTO && o->config->dataset != CONFIG_BIN)
        return fault_set(f, "%s: token shards (.bin), but data.dataset = text; allowed: bin",
                         file->path);
    int32_t words = file->format.words; /* a vocabulary may have got more since */
    uint64_t own = words ? tokenizer_spelling(o->tokenizer, words) : 0;
    if (own && (own != file->format.spelling || words > tokenizer_vocab_size(o->tokenizer)))
        return fault_set(f,
                         "%s: its tokens are not those of %.300s: data.tokenizer and "
                         "data.tokenizer_path must name the vocabulary that `shards` made it with",
                         file->path,
                         tokenizer_is_byte(o->tokenizer) ? "bytes" : o->config->tokenizer_path);
    p->width = file->format.width;
    p->header = file->format.begin;
    p->count = file->format.tokens;
    return true;
}

static bool add_file(corpus *c, const format_file *file, fault *f) {
    const data_options *o = c->base.options;
    piece p = {.begin = c->tokens, .path = file->path};
    int fd = files_open(file->path, f);
    if (fd < 0) return false;
    bool shard = file->format.kind == FORMAT_SHARD || o->config->dataset == CONFIG_BIN;
    bool ok = (shard ? open_shard(o, file, &p, f) : open_text(c, file, fd, &p, f)) &&
              source_add_file(&c->base.fingerprint, fd, &c->files, file, f);
    close(fd);
    if (ok && p.count > MOST_TOKENS - c->tokens)
        ok = fault_set(f, "%s: more than %lld tokens with those before it", file->path,
                       (long long)MOST_TOKENS);
    if (!ok) {
        free(p.text);
        free(p.tokens);
        return false;
    }
    c->pieces[c->count++] = p;
    c->tokens += p.count;
    if (file->use == FORMAT_VALIDATE) c->held += p.count;
    return true;
}

static bool add_files(corpus *c, const char *path, fault *f) {
    bool is_bin = c->base.options->config->dataset == CONFIG_BIN;
    c->pieces = calloc(c->files.count + 1, sizeof *c->pieces);
    if (!c->pieces) return fault_set(f, "out of memory");
    if (!c->files.is_folder && c->files.files[0].format.is_empty)
        return fault_set(f, "%s: an empty file; data.path must hold text or tokens", path);
    for (size_t i = 0; i < c->files.count; i++)
        if (!add_file(c, &c->files.files[i], f)) return false;
    return c->tokens || fault_set(f, "%s: %s", path,
                                  is_bin ? "a folder without .bin files" : "a folder without text");
}

static void close_corpus(source *s) {
    corpus *c = corpus_of(s);
    for (size_t i = 0; i < c->count; i++) {
        free(c->pieces[i].text);
        free(c->pieces[i].tokens);
    }
    if (c->fd >= 0) close(c->fd);
    format_files_close(&c->files);
    free(c->pieces);
    free(c->bytes);
    free(c);
}

static void describe(corpus *c, const char *path) {
    const data_options *o = c->base.options;
    bool is_bin = c->files.files[0].format.kind == FORMAT_SHARD;
    c->base.documents = (int64_t)c->count;
    snprintf(c->base.description, sizeof c->base.description,
             "%.250s: %zu %s%s, %lld tokens; %lld windows of %lld an epoch; %lld tokens in %lld "
             "stretches "
             "set aside for validation",
             path, c->count, is_bin ? "shard" : "text file", c->count == 1 ? "" : "s",
             (long long)c->tokens, (long long)c->windows, (long long)o->seq_len,
             (long long)(c->stretch * c->stretches), (long long)(c->stretch ? c->stretches : 0));
}

source *source_corpus_open(const data_options *o, const char *path, format_files *files,
                           int64_t val_rows, fault *f) {
    corpus *c = calloc(1, sizeof *c);
    if (!c) {
        format_files_close(files);
        fault_set(f, "out of memory");
        return NULL;
    }
    c->fd = -1;
    c->files = *files;
    c->base.options = o;
    c->base.read = read_train;
    c->base.read_val = read_val;
    c->base.position = position;
    c->base.close = close_corpus;
    bool ok = add_files(c, path, f);
    if (ok) split(c, val_rows);
    ok = ok && lay_windows(c, path, f);
    if (ok) {
        c->bytes = malloc((size_t)(o->seq_len + 1) * WIDEST);
        ok = c->bytes || fault_set(f, "out of memory");
    }
    if (!ok) {
        close_corpus(&c->base);
        return NULL;
    }
    describe(c, path);
    return &c->base;
}

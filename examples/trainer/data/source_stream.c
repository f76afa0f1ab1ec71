/* source_stream.c - documents in the order in which the data hold them: JSON lines, JSON arrays,
   plain lines, texts, from a file, a folder of shards, or a pipe. Twin: source.h; documents.c reads
   them. Documents run on across windows.

   The first documents of the first shard (or of the pipe) are the validation split, or those of
   the files that are named so: training never reads them. Files start over at their end, the shards
   in a new order; a pipe that ends is a fault. */
#include "data/source.h"

#include <errno.h>
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

enum { SKIPS_NAMED = 10, SKIPS_IN_A_ROW = 1000 };

/* Where a document lies, and where its tokens begin among those that wait. */
typedef struct mark {
    int64_t epoch, shard, offset, document;
    int64_t begin; /* may be negative: tokens already used */
} mark;

typedef struct stream {
    source base;
    char *path;
    bool is_pipe, is_open;
    format_files files;         /* empty for a pipe */
    int64_t shards, file_bytes; /* to train on */

    documents documents;  /* of the open shard */
    const char *name;     /* its path */
    int64_t size;         /* its bytes when the run began */
    char first_why[256];  /* the first record that was none */
    int64_t epoch, shard; /* that is open, by place in the epoch's order */
    int64_t document;     /* that comes next, counted from the start of the data */
    int64_t epoch_documents, skips_in_a_row;
    int64_t val_end; /* first byte of the first shard that training may read */

    token_list waiting;
    size_t used; /* of waiting */
    mark *marks;
    size_t mark_count, mark_room;
    int64_t next; /* sample that waiting[used] begins */

    token_list val;
    unsigned char *val_starts;
    int64_t val_documents;
} stream;

static stream *stream_of(source *s) {
    return (stream *)(void *)s;
}

/* ---- Shards ---- */

static int64_t shard_number(const stream *s, int64_t place) {
    uint64_t seed = s->base.options->seed;
    return (int64_t)rng_permute(seed, RNG_SHUFFLE | (uint64_t)s->epoch << 8, (uint64_t)place,
                                (uint64_t)s->shards);
}

static void close_shard(stream *s) {
    if (s->is_open) documents_close(&s->documents);
    s->is_open = false;
}

static format_wish wish_of(const stream *s) {
    int64_t set = s->base.options->config->dataset;
    if (s->is_pipe || set == CONFIG_FINEWEB || set == CONFIG_FINEWEB_LOCAL) return FORMAT_RECORDS;
    return set == CONFIG_TEXT ? FORMAT_BYTES : FORMAT_BY_CONTENT;
}

/* Opens a shard by its number, at a document's first byte; those behind the ones to train on are of
   validation. A pipe is handed over once. */
static bool open_shard(stream *s, int64_t number, int64_t offset, fault *f) {
    int fd;
    s->size = -1;
    if (s->is_pipe && !strcmp(s->path, "-")) {
        s->name = "standard input";
        fd = dup(s->base.options->input);
    } else if (s->is_pipe) {
        /* Without O_NONBLOCK, opening a named pipe waits for its writer, deaf to `cancel`. */
        s->name = s->path;
        fd = open(s->name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    } else {
        s->name = s->files.files[number].path;
        s->size = s->files.files[number].size;
        fd = open(s->name, O_RDONLY | O_CLOEXEC);
    }
    if (fd < 0) return fault_errno(f, "%s: cannot open", s->name);
    s->is_open = true;
    return documents_open(&s->documents, fd, s->name, s->size, wish_of(s), offset, s->base.cancel,
                          f);
}

/* ---- Documents ---- */

static bool skip_record(stream *s, const char *why, int64_t offset, fault *f) {
    const listener *notes = &s->base.options->notes;
    const char *what = s->documents.format.kind == FORMAT_JSON_ARRAY ? "value" : "line";
    if (!s->first_why[0])
        snprintf(s->first_why, sizeof s->first_why, "; the %s at byte %lld %s", what,
                 (long long)offset, why);
    if (++s->skips_in_a_row > SKIPS_IN_A_ROW)
        return fault_in_data(f, "%s: %d %ss in a row are no documents; the one at byte %lld %s",
                             s->name, SKIPS_IN_A_ROW, what, (long long)offset, why);
    if (++s->base.skipped <= SKIPS_NAMED)
        listener_say(
            notes, "%s: the %s at byte %lld %s: passed over%s", s->name, what, (long long)offset,
            why, s->base.skipped == SKIPS_NAMED ? " (further ones are counted, not named)" : "");
    return true;
}

/* Appends the next document of the open shard to `to`; LINES_END at the shard's end. */
static lines_result read_document(stream *s, token_list *to, int64_t *offset, fault *f) {
    tokenizer *t = s->base.options->tokenizer;
    size_t before = to->count;
    do {
        lines_result r = documents_next(&s->documents, t, to, offset, f);
        if (r != LINES_ONE) return r;
        const char *why = s->documents.why;
        if (why[0] && !skip_record(s, why, *offset, f)) return LINES_FAULT;
    } while (to->count == before);
    s->skips_in_a_row = 0;
    return LINES_ONE;
}

static bool pipe_ended(stream *s, fault *f) {
    if (!s->document) return fault_set(f, "%s: ended before the first document", s->name);
    return fault_set(f, "%s: ended after %lld documents, at sample %lld; a pipe cannot start over",
                     s->name, (long long)s->document, (long long)s->next);
}

/* Goes on to the next shard, after the last one to the next epoch. */
static bool next_shard(stream *s, fault *f) {
    close_shard(s);
    if (s->is_pipe) return pipe_ended(s, f);
    if (++s->shard == s->shards) {
        if (!s->epoch_documents)
            return fault_set(f,
                             "%s: no documents to train on: none that is not empty or set aside "
                             "for validation%s",
                             s->path, s->first_why);
        s->epoch_documents = 0;
        s->shard = 0;
        s->epoch++;
    }
    int64_t number = shard_number(s, s->shard);
    return open_shard(s, number, number ? 0 : s->val_end, f);
}

static bool add_mark(stream *s, int64_t offset) {
    if (s->mark_count == s->mark_room) {
        size_t room = s->mark_room ? s->mark_room * 2 : 64;
        mark *more = realloc(s->marks, room * sizeof *more);
        if (!more) return false;
        s->marks = more;
        s->mark_room = room;
    }
    mark m = {s->epoch, s->shard, offset, s->document, (int64_t)s->waiting.count};
    s->marks[s->mark_count++] = m;
    return true;
}

/* Appends one training document to those that wait. */
static bool take_document(stream *s, fault *f) {
    const data_options *o = s->base.options;
    int64_t offset;
    size_t begin = s->waiting.count;
    for (;;) {
        lines_result r = read_document(s, &s->waiting, &offset, f);
        if (r == LINES_FAULT) return false;
        if (r == LINES_ONE) break;
        if (!next_shard(s, f)) return false;
    }
    size_t end = s->waiting.count;
    s->waiting.count = begin; /* a mark begins where its document does */
    if (!add_mark(s, offset)) return fault_set(f, "%s: out of memory", s->name);
    s->waiting.count = end;
    s->document++;
    s->epoch_documents++;
    s->base.documents = s->document;
    if (o->config->report_docs && s->document % o->config->report_docs == 0)
        listener_say(&o->notes, "%s: %lld documents read", s->path, (long long)s->document);
    return true;
}

/* ---- Windows ---- */

/* Drops what is used, once that is worth the copy. */
static void compact(stream *s) {
    size_t gone = 0;
    if (s->used < 65536 || s->used < s->waiting.count / 2) return;
    memmove(s->waiting.ids, s->waiting.ids + s->used,
            (s->waiting.count - s->used) * sizeof *s->waiting.ids);
    while (gone + 1 < s->mark_count && s->marks[gone + 1].begin <= (int64_t)s->used) gone++;
    s->mark_count -= gone;
    memmove(s->marks, s->marks + gone, s->mark_count * sizeof *s->marks);
    for (size_t i = 0; i < s->mark_count; i++) s->marks[i].begin -= (int64_t)s->used;
    s->waiting.count -= s->used;
    s->used = 0;
}

static bool have(stream *s, size_t tokens, fault *f) {
    while (s->waiting.count - s->used < tokens)
        if (!take_document(s, f)) return false;
    return true;
}

static bool advance(stream *s, int64_t sample, fault *f) {
    size_t seq_len = (size_t)s->base.options->seq_len;
    if (sample < s->next)
        return fault_set(f, "%s: sample %lld asked for after %lld: a stream only goes forward",
                         s->path, (long long)sample, (long long)s->next);
    for (; s->next < sample; s->next++) {
        if (!have(s, seq_len, f)) return false;
        s->used += seq_len;
        compact(s);
    }
    return true;
}

/* The mark of the document that waiting[used] belongs to. */
static const mark *current_mark(const stream *s) {
    size_t low = 0, high = s->mark_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (s->marks[middle].begin <= (int64_t)s->used)
            low = middle;
        else
            high = middle;
    }
    return &s->marks[low];
}

static bool read_train(source *base, int64_t sample, source_window *w, fault *f) {
    stream *s = stream_of(base);
    size_t count = (size_t)base->options->seq_len + 1;
    if (!advance(s, sample, f) || !have(s, count, f)) return false;
    memcpy(w->tokens, s->waiting.ids + s->used, count * sizeof *w->tokens);
    memset(w->starts, 0, count);
    const mark *m = current_mark(s);
    w->epoch = m->epoch;
    for (; m < s->marks + s->mark_count; m++) {
        int64_t at = m->begin - (int64_t)s->used;
        if (at >= 0 && at < (int64_t)count) w->starts[at] = 1;
    }
    return true;
}

static bool position(source *base, int64_t sample, data_position *p, fault *f) {
    stream *s = stream_of(base);
    if (!advance(s, sample, f)) return false;
    memset(p, 0, sizeof *p);
    p->sample = sample;
    p->fingerprint = base->fingerprint;
    p->epoch = s->epoch;
    p->shard = s->shard;
    p->offset = s->documents.lines.offset;
    p->document = s->document;
    if (s->used == s->waiting.count) return true;
    const mark *m = current_mark(s);
    p->epoch = m->epoch;
    p->shard = m->shard;
    p->offset = m->offset;
    p->document = m->document;
    p->used = (int64_t)s->used - m->begin;
    return true;
}

/* ---- The validation split ---- */

static bool read_val(source *base, int64_t window, source_window *w, fault *f) {
    stream *s = stream_of(base);
    size_t seq_len = (size_t)base->options->seq_len;
    (void)f;
    memcpy(w->tokens, s->val.ids + (size_t)window * seq_len, (seq_len + 1) * sizeof *w->tokens);
    memcpy(w->starts, s->val_starts + (size_t)window * seq_len, seq_len + 1);
    w->epoch = 0;
    return true;
}

/* Whether one more document is set aside: as many as when the run began; then as many as fill the
   rows that are wanted, from at most val_fraction of the bytes there are (a pipe has no such
   limit). */
static bool sets_aside(const stream *s, int64_t val_rows) {
    const data_options *o = s->base.options;
    int64_t most = (int64_t)(o->config->val_fraction * (double)s->file_bytes);
    if (o->resume && o->resume->split_parts >= 0) return s->val_documents < o->resume->split_parts;
    return o->config->val_fraction > 0 && val_rows &&
           s->val.count < (size_t)(val_rows * o->seq_len + 1) &&
           (s->is_pipe || s->files.validate || s->documents.lines.offset < most);
}

/* Whether what has been read so far may be: a first document may be more than val_fraction, but not
   most of what there is to train on. */
static bool leaves_enough(const stream *s) {
    const data_options *o = s->base.options;
    double share = o->config->val_fraction > 0.25 ? o->config->val_fraction : 0.25;
    return s->is_pipe || s->files.validate || (o->resume && o->resume->split_parts >= 0) ||
           (double)s->documents.lines.offset <= share * (double)s->file_bytes;
}

/* Marks where the document begins that the next token of validation belongs to. */
static bool mark_start(stream *s, size_t begin) {
    unsigned char *more = realloc(s->val_starts, s->val.count + 1);
    if (!more) return false;
    s->val_starts = more;
    memset(more + begin, 0, s->val.count - begin);
    more[begin] = 1;
    return true;
}

/* Documents of the open shard. */
static bool set_aside_from(stream *s, int64_t val_rows, fault *f) {
    int64_t offset;
    s->val_end = s->documents.lines.offset;
    while (sets_aside(s, val_rows)) {
        size_t begin = s->val.count;
        lines_result r = read_document(s, &s->val, &offset, f);
        if (r == LINES_FAULT) return false;
        if (r == LINES_END) break;
        if (!leaves_enough(s)) {
            s->val.count = begin;
            break;
        }
        if (!mark_start(s, begin)) return fault_set(f, "out of memory");
        s->val_documents++;
        s->val_end = s->documents.lines.offset;
    }
    return true;
}

static bool set_aside(stream *s, int64_t val_rows, fault *f) {
    int64_t seq_len = s->base.options->seq_len, held = (int64_t)s->files.validate;
    for (int64_t i = 0; i < held && sets_aside(s, val_rows); i++) {
        if (!open_shard(s, s->shards + i, 0, f) || !set_aside_from(s, val_rows, f)) return false;
        close_shard(s);
    }
    if (!held && (!open_shard(s, 0, 0, f) || !set_aside_from(s, val_rows, f))) return false;
    if (held) s->val_end = 0;
    if ((int64_t)s->val.count > seq_len)
        s->base.val_windows = ((int64_t)s->val.count - 1) / seq_len;
    if (s->base.val_windows > val_rows) s->base.val_windows = val_rows;
    s->base.split_parts = s->val_documents;
    return true;
}

/* ---- Opening ---- */

static bool count_shards(stream *s, fault *f) {
    uint64_t h = tokenizer_sum(s->base.options->tokenizer);
    s->base.fingerprint = h;
    s->is_pipe = !s->files.count && !s->files.is_folder;
    s->shards = s->is_pipe ? 1 : (int64_t)(s->files.count - s->files.validate);
    if (s->is_pipe) return true;
    if (!s->shards) return fault_set(f, "%s: a folder without files to train on", s->path);
    for (size_t i = 0; i < s->files.count; i++) {
        const format_file *file = &s->files.files[i];
        if (file->use == FORMAT_TRAIN) s->file_bytes += file->size;
        int fd = files_open(file->path, f);
        bool ok = fd >= 0 && source_add_file(&h, fd, &s->files, file, f);
        if (fd >= 0) close(fd);
        if (!ok) return false;
    }
    s->base.fingerprint = h;
    return s->file_bytes || fault_set(f, "%s: empty; data.path must hold documents", s->path);
}

/* A resumed pipe has been started anew by its owner: what was used is read again and dropped. */
static bool resume_pipe(stream *s, const data_position *p, fault *f) {
    listener_say(&s->base.options->notes, "%s: passing over the first %lld samples, used before",
                 s->name, (long long)p->sample);
    return advance(s, p->sample, f);
}

static bool resume_files(stream *s, const data_position *p, fault *f) {
    if (p->epoch < 0 || p->shard < 0 || p->shard >= s->shards || p->offset < 0 || p->used < 0)
        return fault_set(f,
                         "%s: the checkpoint stands in shard %lld, at byte %lld; there are %lld "
                         "shards",
                         s->path, (long long)p->shard, (long long)p->offset, (long long)s->shards);
    close_shard(s);
    s->epoch = p->epoch;
    s->shard = p->shard;
    s->document = p->document;
    s->epoch_documents = 1; /* enough to know that there are some */
    s->next = p->sample;
    if (!open_shard(s, shard_number(s, p->shard), p->offset, f)) return false;
    if (!p->used) return true;
    if (!take_document(s, f)) return false;
    if (p->used > (int64_t)s->waiting.count)
        return fault_set(f,
                         "%s: the checkpoint has used %lld tokens of the document at byte %lld, "
                         "which has %zu",
                         s->name, (long long)p->used, (long long)p->offset, s->waiting.count);
    s->used = (size_t)p->used;
    return true;
}

static bool begin(stream *s, const data_position *resume, fault *f) {
    if (s->is_pipe) return !resume || resume_pipe(s, resume, f);
    if (resume) return resume_files(s, resume, f);
    close_shard(s);
    int64_t number = shard_number(s, 0);
    return open_shard(s, number, number ? 0 : s->val_end, f);
}

static void close_stream(source *base) {
    stream *s = stream_of(base);
    close_shard(s);
    format_files_close(&s->files);
    token_list_free(&s->waiting);
    token_list_free(&s->val);
    free(s->val_starts);
    free(s->marks);
    free(s->path);
    free(s);
}

/* What the files hold, where that is one thing. */
static const char *kind_name(const stream *s) {
    static const char *const names[] = {"texts", "JSON lines", "JSON arrays"};
    format_kind kind = s->documents.format.kind;
    for (size_t i = 0; i < s->files.count; i++)
        if (s->files.files[i].format.kind != kind) return "documents";
    return kind == FORMAT_TEXT && s->documents.by_line ? "lines" : names[kind];
}

static void describe(stream *s) {
    snprintf(s->base.description, sizeof s->base.description,
             "%.300s: a stream of %s, %lld %s; %zu tokens set aside for validation",
             s->is_pipe ? s->name : s->path, kind_name(s), (long long)s->shards,
             s->is_pipe       ? "pipe"
             : s->shards == 1 ? "file"
                              : "files",
             s->val.count);
}

source *source_stream_open(const data_options *o, const char *path, format_files *files,
                           int64_t val_rows, int cancel, fault *f) {
    stream *s = calloc(1, sizeof *s);
    size_t length = strlen(path) + 1;
    if (!s || !(s->path = malloc(length))) {
        format_files_close(files);
        free(s);
        fault_set(f, "out of memory");
        return NULL;
    }
    memcpy(s->path, path, length);
    s->files = *files;
    s->base.options = o;
    s->base.cancel = cancel;
    s->base.read = read_train;
    s->base.read_val = read_val;
    s->base.position = position;
    s->base.close = close_stream;
    bool ok = count_shards(s, f);
    if (ok && s->is_pipe && o->processes > 1)
        ok = fault_set(f, "%s: a pipe feeds one process, not %lld; give a file or a folder", path,
                       (long long)o->processes);
    if (ok && set_aside(s, val_rows, f) && begin(s, o->resume, f)) {
        describe(s);
        return &s->base;
    }
    close_stream(&s->base);
    return NULL;
}

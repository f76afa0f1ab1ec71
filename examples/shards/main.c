/* main.c - shards: text as .bin shards of tokens, encoded once instead of at each start of a run.
   Twins: README.md; data/source_corpus.c and data/source_stream.c, which encode the same text to
   the same tokens. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/text.h"
#include "config/config.h"
#include "data/documents.h"
#include "data/tokenizer.h"

enum { MOST_IDS_16 = 1 << 16, PATH_ROOM = 4096 };

enum { UNWRITTEN = 1, UNUSABLE = 2 };

typedef struct job {
    const char *folder;
    char part[PATH_ROOM]; /* where the shards are until all of them are there */
    const char *vocabulary;
    const char **words; /* the folder, then texts */
    int64_t most;       /* tokens of a shard */
    tokenizer *tokenizer;
    token_list waiting;
    int64_t shards, tokens, documents;
    int code; /* of a fault here: UNUSABLE what was given, UNWRITTEN what is made */
} job;

/* ---- Shards -------------------------------------------------------------------------------- */

static void put_32(unsigned char *to, uint32_t x) {
    for (int i = 0; i < 4; i++) to[i] = (unsigned char)(x >> 8 * i);
}

/* uint16 where the vocabulary allows it, else uint32: llm.c's magic numbers and versions. */
static bool put_shard(job *j, size_t count, fault *f) {
    char path[PATH_ROOM], name[32];
    int32_t words = tokenizer_vocab_size(j->tokenizer);
    int width = words > MOST_IDS_16 ? 4 : 2;
    size_t bytes = FORMAT_HEADER + (size_t)width * count;
    uint64_t spelling = tokenizer_spelling(j->tokenizer, words);
    snprintf(name, sizeof name, "shard_%06" PRId64 ".bin", j->shards);
    if (!files_join(path, sizeof path, j->part, name, f)) return false;
    unsigned char *all = calloc(bytes, 1);
    if (!all) return fault_set(f, "%s: out of memory", path);
    put_32(all, width == 2 ? FORMAT_MAGIC_16 : FORMAT_MAGIC_32);
    put_32(all + 4, width == 2 ? 1 : 7);
    put_32(all + 8, (uint32_t)count);
    put_32(all + 12, FORMAT_STAMP);
    put_32(all + 16, (uint32_t)words);
    put_32(all + 20, (uint32_t)spelling);
    put_32(all + 24, (uint32_t)(spelling >> 32));
    for (size_t i = 0; i < count * (size_t)width; i++)
        all[FORMAT_HEADER + i] =
            (unsigned char)(j->waiting.ids[i / (size_t)width] >> 8 * (i % (size_t)width));
    bool ok = files_replace(path, all, bytes, f);
    free(all);
    j->shards++;
    j->tokens += (int64_t)count;
    j->waiting.count -= count;
    memmove(j->waiting.ids, j->waiting.ids + count, j->waiting.count * sizeof *j->waiting.ids);
    return ok;
}

static bool write_shard(job *j, size_t count, fault *f) {
    bool ok = put_shard(j, count, f);
    if (!ok) j->code = UNWRITTEN;
    return ok;
}

/* Counts a document, and writes the shards that are full by now. */
static bool end_document(job *j, fault *f) {
    j->documents++;
    while (j->waiting.count >= (size_t)j->most)
        if (!write_shard(j, (size_t)j->most, f)) return false;
    return true;
}

/* ---- Text ---------------------------------------------------------------------------------- */

/* The documents of an open file or pipe. What a trainer would pass over ends it: shards are made
   once. */
static bool add_documents(job *j, int fd, const char *path, int64_t size, format_wish wish,
                          fault *f) {
    documents d;
    int64_t offset;
    lines_result r = LINES_FAULT;
    bool ok = documents_open(&d, fd, path, size, wish, 0, -1, f);
    while (ok) {
        size_t before = j->waiting.count;
        r = documents_next(&d, j->tokenizer, &j->waiting, &offset, f);
        ok = r != LINES_FAULT;
        if (r != LINES_ONE) break;
        if (d.why[0])
            ok = fault_set(f, "%s: the %s that ends at byte %lld %s", path,
                           d.format.kind == FORMAT_JSON_ARRAY ? "value" : "line",
                           (long long)d.lines.offset, d.why);
        if (ok && j->waiting.count > before) ok = end_document(j, f);
    }
    documents_close(&d);
    return ok;
}

static bool add_input(job *j, fault *f) {
    int fd = dup(STDIN_FILENO);
    if (fd < 0) return fault_errno(f, "-: cannot read");
    return add_documents(j, fd, "-", -1, FORMAT_RECORDS, f);
}

/* A file, or those of a folder that are data. */
static bool add(job *j, const char *path, fault *f) {
    format_files list;
    struct stat s;
    if (!strcmp(path, "-")) return add_input(j, f);
    if (!stat(path, &s) && !S_ISDIR(s.st_mode) && !S_ISREG(s.st_mode)) {
        int pipe = open(path, O_RDONLY | O_CLOEXEC);
        if (pipe < 0) return fault_errno(f, "%s: cannot open", path);
        return add_documents(j, pipe, path, -1, FORMAT_RECORDS, f);
    }
    listener notes = listener_stderr();
    if (!format_files_open(&list, path, CONFIG_DATASET_AUTO, &notes, f)) return false;
    bool ok = true;
    for (size_t i = 0; ok && i < list.count; i++) {
        const format_file *file = &list.files[i];
        int fd = file->use == FORMAT_TRAIN ? files_open(file->path, f) : -2;
        if (fd == -2) continue;
        ok = fd >= 0 && add_documents(j, fd, file->path, file->size, FORMAT_BY_CONTENT, f);
    }
    format_files_close(&list);
    return ok;
}

/* ---- The whole ----------------------------------------------------------------------------- */

/* "shard_000000.bin", or that with what files_replace puts behind it. */
static bool is_shard(const char *name) {
    size_t digits = strncmp(name, "shard_", 6) ? 0 : strspn(name + 6, "0123456789");
    return digits >= 6 && !strncmp(name + 6 + digits, ".bin", 4) && !strchr(name, '/');
}

/* Whether all that is there already is what a call that was killed leaves, and may be cleared. */
static bool check_part(const job *j, fault *f) {
    struct stat s;
    files_list list;
    const char *other = NULL;
    if (lstat(j->part, &s)) return true;
    if (!S_ISDIR(s.st_mode)) return fault_set(f, "%s: is there, and no folder", j->part);
    if (!files_list_open(&list, j->part, f)) return false;
    for (size_t i = 0; i < list.count; i++)
        if (!is_shard(list.names[i])) other = list.names[i];
    for (size_t i = 0; i < list.passed_count; i++)
        if (strcmp(list.passed[i], FILES_CLAIM)) other = list.passed[i];
    if (other)
        fault_set(
            f,
            "%s/%.200s: not of a call that was killed: the folder must hold shards alone, for "
            "they are replaced",
            j->part, other);
    files_list_close(&list);
    return !other;
}

/* Half of a corpus must not look like one: the folder gets its name when all is there. */
static bool put_in_place(const job *j, fault *f) {
    char path[PATH_ROOM]; /* a part without a lock would be cleared by the next call */
    if (!files_sync_folder(j->part, f)) return false;
    if (rename(j->part, j->folder)) return fault_errno(f, "%s: cannot be put in place", j->folder);
    return files_join(path, sizeof path, j->folder, FILES_CLAIM, f) &&
           (!unlink(path) || fault_errno(f, "%s: cannot remove", path));
}

static bool make(job *j, fault *f) {
    j->code = UNUSABLE;
    if (!files_join(j->part, sizeof j->part - 8, "", j->folder, f)) return false;
    size_t length = strlen(j->part); /* the part is beside "data/", not in it */
    while (length > 1 && j->part[length - 1] == '/') j->part[--length] = 0;
    if (files_exist(j->part)) return fault_set(f, "%s: is there; must be a new folder", j->folder);
    strcat(j->part, ".part");
    if (!check_part(j, f)) return false;
    j->code = UNWRITTEN;
    int held = files_claim_folder(j->part, f);
    if (held < 0) return false;
    bool ok = !files_exist(j->folder) ||
              fault_set(f, "%s: another call has made it meanwhile", j->folder);
    if (ok) j->code = UNUSABLE;
    for (int i = 1; ok && j->words[i]; i++) ok = add(j, j->words[i], f);
    if (ok && j->waiting.count) ok = write_shard(j, j->waiting.count, f);
    if (ok && !j->shards) ok = fault_set(f, "no text in what was given");
    if (ok) j->code = UNWRITTEN;
    ok = ok && put_in_place(j, f);
    if (ok)
        close(held);
    else
        files_remove_claimed(j->part, held);
    return ok;
}

static const option own[] = {
    {.flag = "--tokenizer-path",
     .kind = OPTION_TEXT,
     .offset = offsetof(job, vocabulary),
     .words = "DIR",
     .help = "tokens of the vocabulary in DIR, which has tokenizer.json, or vocab.json and "
             "merges.txt;\n"
             "default: bytes"},
    {.flag = "--shard-tokens",
     .kind = OPTION_INTEGER,
     .offset = offsetof(job, most),
     .min = 1,
     .max = INT32_MAX,
     .initial = "100000000",
     .help = "tokens of a shard; the last one has what is left"},
};

static const option_command command = {
    .name = "shards",
    .summary =
        "text as token shards in llm.c's format.\n\nMakes FOLDER, which the trainers take as "
        "--dataset bin --data FOLDER. A TEXT is a file, or a folder\nwith those below it: text, "
        "one "
        "document a file; JSON lines or an array of objects with a \"text\"; these\npacked by "
        "gzip or zstd. Of - (standard input) each line is a document, or a JSON value.",
    .words = "FOLDER TEXT...",
    .rows = own,
    .count = sizeof own / sizeof own[0],
};

static int run(job *j, fault *f) {
    j->folder = j->words[0];
    j->tokenizer = tokenizer_open(j->vocabulary ? CONFIG_GPT2 : CONFIG_BYTE,
                                  j->vocabulary ? j->vocabulary : "", f);
    if (!j->tokenizer) return UNUSABLE;
    if (!make(j, f)) return j->code;
    text_print_line(
        stdout,
        "%s: %" PRId64 " tokens of %" PRId64 " documents in %" PRId64 " shards, vocabulary of %d",
        j->folder, j->tokens, j->documents, j->shards, tokenizer_vocab_size(j->tokenizer));
    return files_end_output(f) ? 0 : UNWRITTEN;
}

int main(int argc, char **argv) {
    files_claim_standard();
    fault f;
    job j = {.words = calloc((size_t)argc, sizeof *j.words)};
    option_outcome outcome = OPTION_ERROR;
    if (j.words)
        outcome = option_read(&command, argc, argv, &j, j.words, &f);
    else
        fault_set(&f, "out of memory");
    int code = outcome == OPTION_HELP ? 0 : outcome == OPTION_ERROR ? UNUSABLE : run(&j, &f);
    if (code) fprintf(stderr, "shards: %s\n", f.text);
    tokenizer_close(j.tokenizer);
    token_list_free(&j.waiting);
    free(j.words);
    return code;
}

/* main.c - shards: text as .bin shards of tokens, encoded once instead of at each start of a run.
   Twins: README.md; data/source_corpus.c and data/source_stream.c, which encode the same text to
   the same tokens. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/json_file.h"
#include "base/lines.h"
#include "config/config.h"
#include "data/tokenizer.h"

enum { HEADER_BYTES = 1024, MAGIC = 20240520, VERSION = 1, MOST_IDS = 1 << 16, PATH_ROOM = 4096 };

typedef struct job {
    const char *folder;
    char part[PATH_ROOM]; /* where the shards are until all of them are there */
    const char *vocabulary;
    const char **words; /* the folder, then texts */
    int64_t most;       /* tokens of a shard */
    tokenizer *tokenizer;
    token_list waiting;
    int64_t shards, tokens, documents;
} job;

/* ---- Shards -------------------------------------------------------------------------------- */

static void put_32(unsigned char *to, uint32_t x) {
    for (int i = 0; i < 4; i++) to[i] = (unsigned char)(x >> 8 * i);
}

static bool write_shard(job *j, size_t count, fault *f) {
    char path[PATH_ROOM], name[32];
    size_t bytes = HEADER_BYTES + 2 * count;
    snprintf(name, sizeof name, "shard_%06" PRId64 ".bin", j->shards);
    if (!files_join(path, sizeof path, j->part, name, f)) return false;
    unsigned char *all = calloc(bytes, 1);
    if (!all) return fault_set(f, "%s: out of memory", path);
    put_32(all, MAGIC);
    put_32(all + 4, VERSION);
    put_32(all + 8, (uint32_t)count);
    for (size_t i = 0; i < count; i++) {
        all[HEADER_BYTES + 2 * i] = (unsigned char)j->waiting.ids[i];
        all[HEADER_BYTES + 2 * i + 1] = (unsigned char)(j->waiting.ids[i] >> 8);
    }
    bool ok = files_replace(path, all, bytes, f);
    free(all);
    j->shards++;
    j->tokens += (int64_t)count;
    j->waiting.count -= count;
    memmove(j->waiting.ids, j->waiting.ids + count, j->waiting.count * sizeof *j->waiting.ids);
    return ok;
}

/* What ends a document, and the shards that are full by now. */
static bool end_document(job *j, bool separate, fault *f) {
    if (separate && !token_list_push(&j->waiting, tokenizer_separator(j->tokenizer)))
        return fault_set(f, "out of memory for tokens");
    j->documents++;
    while (j->waiting.count >= (size_t)j->most)
        if (!write_shard(j, (size_t)j->most, f)) return false;
    return true;
}

/* ---- Text ---------------------------------------------------------------------------------- */

static bool add_text(job *j, const char *path, fault *f) {
    size_t bytes;
    char *text = files_read(path, SIZE_MAX / 2, &bytes, f);
    if (!text) return false;
    bool ended = tokenizer_is_byte(j->tokenizer) && bytes && text[bytes - 1] == '\n';
    bool ok = !bytes || (tokenizer_encode(j->tokenizer, text, bytes, &j->waiting, f) &&
                         end_document(j, !ended, f));
    free(text);
    return ok;
}

static bool add_line(job *j, const lines *l, const char *line, size_t bytes, fault *f) {
    fault unused;
    json_t *root =
               json_file_parse(l->name, line, bytes, &json_of_document, JSON_ALLOW_NUL, &unused),
           *text = json_object_get(root, "text");
    long long end = (long long)l->offset;
    bool ok = json_is_string(text) ||
              fault_set(f, "%s: the line that ends at byte %lld %s", l->name, end,
                        root ? "has no \"text\" that is a string" : "is not JSON");
    size_t length = json_string_length(text);
    ok = ok && (!length ||
                (tokenizer_encode(j->tokenizer, json_string_value(text), length, &j->waiting, f) &&
                 end_document(j, true, f)));
    json_decref(root);
    return ok;
}

static bool add_lines(job *j, const char *path, fault *f) {
    lines l;
    const char *line;
    size_t bytes;
    bool is_input = !strcmp(path, "-");
    int fd = is_input ? dup(STDIN_FILENO) : files_open(path, f);
    if (fd < 0) return is_input ? fault_errno(f, "-: cannot read") : false;
    lines_open(&l, fd, path, 0, -1);
    lines_result r;
    bool ok = true;
    while (ok && (r = lines_next(&l, &line, &bytes, f)) != LINES_END)
        ok = r == LINES_ONE &&
             (!bytes || (bytes == 1 && line[0] == '\r') || add_line(j, &l, line, bytes, f));
    lines_close(&l);
    return ok;
}

static bool has_lines(const char *path) {
    const char *dot = strrchr(path, '.');
    return !strcmp(path, "-") ||
           (dot && (!strcmp(dot, ".jsonl") || !strcmp(dot, ".ndjson") || !strcmp(dot, ".json")));
}

static bool add_folder(job *j, const char *folder, fault *f) {
    char path[PATH_ROOM];
    files_list list;
    if (!files_list_open(&list, folder, f)) return false;
    bool ok = true;
    for (size_t i = 0; ok && i < list.count; i++)
        ok = files_join(path, sizeof path, folder, list.names[i], f) &&
             (has_lines(path) ? add_lines(j, path, f) : add_text(j, path, f));
    files_list_close(&list);
    return ok;
}

static bool add(job *j, const char *path, fault *f) {
    struct stat s;
    if (has_lines(path)) return add_lines(j, path, f);
    if (stat(path, &s)) return fault_errno(f, "%s: cannot read", path);
    return S_ISDIR(s.st_mode) ? add_folder(j, path, f) : add_text(j, path, f);
}

/* ---- The whole ----------------------------------------------------------------------------- */

/* Half of a corpus must not look like one: the folder gets its name when all is there. */
static bool make(job *j, fault *f) {
    if (files_exist(j->folder))
        return fault_set(f, "%s: is there; must be a new folder", j->folder);
    if (!files_join(j->part, sizeof j->part - 8, "", j->folder, f)) return false;
    strcat(j->part, ".part");
    if (!files_remove_folder(j->part, f) || !files_make_folder(j->part, f)) return false;
    bool ok = true;
    for (int i = 1; ok && j->words[i]; i++) ok = add(j, j->words[i], f);
    if (ok && j->waiting.count) ok = write_shard(j, j->waiting.count, f);
    if (ok && !j->shards) ok = fault_set(f, "no text in what was given");
    if (ok && (!files_sync_folder(j->part, f) || rename(j->part, j->folder)))
        ok = fault_errno(f, "%s: cannot be put in place", j->folder);
    fault unused;
    if (!ok) files_remove_folder(j->part, &unused);
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
        "--dataset bin --data FOLDER. A TEXT is a file, or a folder\nwith those below it. A file "
        "is one document; of .jsonl, .ndjson and .json, and of - (standard\ninput) each line is "
        "one: an object with a \"text\".",
    .words = "FOLDER TEXT...",
    .rows = own,
    .count = sizeof own / sizeof own[0],
};

static int run(job *j, fault *f) {
    j->folder = j->words[0];
    j->tokenizer = tokenizer_open(j->vocabulary ? CONFIG_GPT2 : CONFIG_BYTE,
                                  j->vocabulary ? j->vocabulary : "", f);
    if (!j->tokenizer) return 2;
    if (tokenizer_vocab_size(j->tokenizer) > MOST_IDS) {
        fault_set(f, "%s: %d tokens; a shard's are of 16 bits, at most %d", j->vocabulary,
                  tokenizer_vocab_size(j->tokenizer), MOST_IDS);
        return 2;
    }
    if (!make(j, f)) return 1;
    printf("%s: %" PRId64 " tokens of %" PRId64 " documents in %" PRId64
           " shards, vocabulary of %d\n",
           j->folder, j->tokens, j->documents, j->shards, tokenizer_vocab_size(j->tokenizer));
    return files_end_output(f) ? 0 : 1;
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
    int code = outcome == OPTION_HELP ? 0 : outcome == OPTION_ERROR ? 2 : run(&j, &f);
    if (code) fprintf(stderr, "shards: %s\n", f.text);
    tokenizer_close(j.tokenizer);
    token_list_free(&j.waiting);
    free(j.words);
    return code;
}

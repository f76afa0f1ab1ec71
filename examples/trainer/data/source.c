/* source.c - decides what kind of data a path holds. Twin: source.h. */
#include "data/source.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "base/files.h"

/* Not a folder, nor a plain file: "-", a named pipe. */
static bool is_pipe(const char *path) {
    struct stat s;
    if (!strcmp(path, "-")) return true;
    return !stat(path, &s) && !S_ISDIR(s.st_mode) && !S_ISREG(s.st_mode);
}

static bool is_stream(const config_data *c, const format_files *files) {
    if (c->dataset == CONFIG_FINEWEB || c->dataset == CONFIG_FINEWEB_LOCAL) return true;
    for (size_t i = 0; i < files->count; i++)
        if (files->files[i].format.kind == FORMAT_JSON_LINES ||
            files->files[i].format.kind == FORMAT_JSON_ARRAY)
            return true;
    return false;
}

static source *open_pipe(const data_options *o, const char *path, int64_t val_rows, int cancel,
                         fault *f) {
    format_files none = {.count = 0};
    if (o->config->dataset != CONFIG_BIN)
        return source_stream_open(o, path, &none, val_rows, cancel, f);
    fault_set(f,
              "data.path = %s: shards cannot come from standard input or a pipe; data.dataset may "
              "be auto, text or "
              "fineweb_edu there",
              path);
    return NULL;
}

/* The one list of what is read: what a file is, and whether it is read at all, is format.c's. */
static source *open_files(const data_options *o, const char *path, int64_t val_rows, int cancel,
                          fault *f) {
    const config_data *c = o->config;
    format_files files;
    if (!format_files_open(&files, path, c->dataset, &o->notes, f)) return NULL;
    if (is_stream(c, &files) && c->dataset != CONFIG_BIN)
        return source_stream_open(o, path, &files, val_rows, cancel, f);
    return source_corpus_open(o, path, &files, val_rows, f);
}

source *source_open(const data_options *o, int64_t val_rows, int cancel, fault *f) {
    const config_data *c = o->config;
    const char *path = c->dataset == CONFIG_FINEWEB && !c->path[0] ? "-" : c->path;
    if (c->dataset == CONFIG_RETRIEVAL) return source_retrieval_open(o, val_rows, f);
    if (c->dataset == CONFIG_SYNTHETIC || (c->dataset == CONFIG_DATASET_AUTO && !path[0]))
        return source_synthetic_open(o, val_rows, f);
    if (is_pipe(path)) return open_pipe(o, path, val_rows, cancel, f);
    return open_files(o, path, val_rows, cancel, f);
}

bool source_add_file(uint64_t *sum, int fd, const format_files *all, const format_file *file,
                     fault *f) {
    enum { BLOCK = 16384, MOST = 64, FEWEST = 4, ALL_FILES = 4096 };
    unsigned char block[BLOCK];
    int64_t size = file->size, most = (int64_t)(ALL_FILES / (all->count ? all->count : 1));
    if (most > MOST) most = MOST;
    if (most < FEWEST) most = FEWEST;
    int64_t blocks = (size + BLOCK - 1) / BLOCK, count = blocks < most ? blocks : most;
    *sum = XXH64(&size, sizeof size, *sum);
    for (int64_t i = 0; i < count; i++) {
        int64_t at = count == blocks ? i * BLOCK : (size - BLOCK) / (count - 1) * i;
        int64_t bytes = size - at < BLOCK ? size - at : BLOCK;
        if (!files_read_at(fd, file->path, block, (size_t)bytes, at, f)) return false;
        *sum = XXH64(block, (size_t)bytes, *sum);
    }
    if (all->is_folder) *sum = XXH64(file->name, strlen(file->name), *sum);
    return true;
}

bool source_position_by_number(source *s, int64_t sample, data_position *p, fault *f) {
    (void)f;
    memset(p, 0, sizeof *p);
    p->sample = sample;
    p->fingerprint = s->fingerprint;
    return true;
}

static void close_numbered(source *s) {
    free(s);
}

source *source_numbered_open(const data_options *o, int64_t val_rows, source_read read,
                             source_read read_val, fault *f) {
    source *s = calloc(1, sizeof *s);
    if (!s) {
        fault_set(f, "out of memory");
        return NULL;
    }
    s->options = o;
    s->val_windows = val_rows;
    s->split_parts = val_rows; /* they are made, and never those of training */
    s->read = read;
    s->read_val = read_val;
    s->position = source_position_by_number;
    s->close = close_numbered;
    return s;
}

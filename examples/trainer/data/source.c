/* source.c - decides what kind of data a path holds. Twin: source.h. */
#include "data/source.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "base/files.h"

static bool ends_with(const char *name, const char *ending) {
    size_t a = strlen(name), b = strlen(ending);
    return a >= b && !strcmp(name + a - b, ending);
}

static bool is_json(const char *name) {
    return ends_with(name, ".jsonl") || ends_with(name, ".json") || ends_with(name, ".ndjson");
}

/* What a name promises; a folder promises what the first telling name in it does. */
static bool kind_of_path(const char *path, bool is_folder, int64_t *kind, fault *f) {
    files_list list;
    *kind = is_json(path)             ? CONFIG_FINEWEB_LOCAL
            : ends_with(path, ".bin") ? CONFIG_BIN
                                      : CONFIG_TEXT;
    if (!is_folder) return true;
    *kind = CONFIG_TEXT;
    if (!files_list_open(&list, path, f)) return false;
    for (size_t i = 0; i < list.count && *kind == CONFIG_TEXT; i++)
        if (!kind_of_path(list.names[i], false, kind, f)) break;
    files_list_close(&list);
    return true;
}

static bool find_kind(const config_data *c, const char *path, int64_t *kind, fault *f) {
    struct stat s;
    int64_t found;
    *kind = c->dataset;
    if (*kind == CONFIG_RETRIEVAL) return true;
    if (*kind == CONFIG_SYNTHETIC || (*kind == CONFIG_DATASET_AUTO && !path[0])) {
        *kind = CONFIG_SYNTHETIC;
        return true;
    }
    if (!strcmp(path, "-")) {
        if (*kind == CONFIG_BIN)
            return fault_set(f,
                             "data.path = -: shards cannot come from standard input; data.dataset "
                             "may be auto, text or fineweb_edu there");
        *kind = CONFIG_FINEWEB;
        return true;
    }
    if (stat(path, &s)) return fault_errno(f, "%s: cannot read the data", path);
    if (!S_ISDIR(s.st_mode) && !S_ISREG(s.st_mode)) {
        *kind = CONFIG_FINEWEB; /* a named pipe or the like */
        return true;
    }
    if (*kind == CONFIG_BIN || *kind == CONFIG_FINEWEB || *kind == CONFIG_FINEWEB_LOCAL)
        return true;
    if (!kind_of_path(path, S_ISDIR(s.st_mode), &found, f)) return false;
    if (*kind == CONFIG_TEXT && found == CONFIG_BIN)
        return fault_set(f, "%s: token shards (.bin), but data.dataset = text; allowed: bin", path);
    *kind = found;
    return true;
}

source *source_open(const data_options *o, int64_t val_rows, int cancel, fault *f) {
    const config_data *c = o->config;
    const char *path = c->dataset == CONFIG_FINEWEB && !c->path[0] ? "-" : c->path;
    int64_t kind;
    if (!find_kind(c, path, &kind, f)) return NULL;
    if (kind == CONFIG_SYNTHETIC) return source_synthetic_open(o, val_rows, f);
    if (kind == CONFIG_RETRIEVAL) return source_retrieval_open(o, val_rows, f);
    if (kind == CONFIG_BIN || kind == CONFIG_TEXT)
        return source_corpus_open(o, path, kind == CONFIG_BIN, val_rows, f);
    return source_stream_open(o, path, val_rows, cancel, f);
}

bool source_add_contents(uint64_t *sum, int fd, const char *path, int64_t size, size_t files,
                         fault *f) {
    enum { BLOCK = 16384, MOST = 64, FEWEST = 4, ALL_FILES = 4096 };
    unsigned char block[BLOCK];
    int64_t most = (int64_t)(ALL_FILES / (files ? files : 1));
    if (most > MOST) most = MOST;
    if (most < FEWEST) most = FEWEST;
    int64_t blocks = (size + BLOCK - 1) / BLOCK, count = blocks < most ? blocks : most;
    *sum = XXH64(&size, sizeof size, *sum);
    for (int64_t i = 0; i < count; i++) {
        int64_t at = count == blocks ? i * BLOCK : (size - BLOCK) / (count - 1) * i;
        int64_t bytes = size - at < BLOCK ? size - at : BLOCK;
        if (!files_read_at(fd, path, block, (size_t)bytes, at, f)) return false;
        *sum = XXH64(block, (size_t)bytes, *sum);
    }
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

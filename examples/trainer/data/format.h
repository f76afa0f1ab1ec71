/* format.h - what a file of data is, by its first bytes and then by its name: text, JSON lines, a
   JSON array, a shard of tokens, each plain or packed; and which files of a folder are data. The
   trainers and `shards` ask here alone. Twin: format.c. It reads no documents (documents.h). */
#ifndef FORMAT_H
#define FORMAT_H

#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"

typedef enum format_kind {
    FORMAT_TEXT,
    FORMAT_JSON_LINES, /* a value a line */
    FORMAT_JSON_ARRAY, /* of values */
    FORMAT_SHARD       /* llm.c's tokens */
} format_kind;

typedef enum format_packing { FORMAT_PLAIN, FORMAT_GZIP, FORMAT_ZSTD } format_packing;

typedef struct file_format {
    format_kind kind;
    format_packing packing;
    int64_t begin; /* bytes before the first: a byte order mark, a shard's header */
    int width;     /* a shard's: bytes of a token */
    int64_t tokens;
    int32_t words;       /* of the vocabulary that made it; 0: the shard does not say */
    uint64_t spelling;   /* of these: tokenizer_spelling */
    bool is_empty;       /* nothing behind the mark */
    bool no_zeros;       /* text, and nobody asked for its bytes whatever they are */
    const char *no_data; /* beside a fault: what it is, where no data are ever in such a file */
} file_format;

/* How a name and first bytes that may be either are read. */
typedef enum format_wish {
    FORMAT_BY_CONTENT,
    FORMAT_BYTES,  /* text, whatever its bytes, where no name says otherwise */
    FORMAT_RECORDS /* documents: what begins with { or [ is JSON */
} format_wish;

enum { FORMAT_HEAD = 65536, FORMAT_HEADER = 1024 };
enum { FORMAT_MAGIC_16 = 20240520, FORMAT_MAGIC_32 = 20240801 };

/* What `shards` adds to llm.c's header, where that has zeros from byte 12 on: this mark, "nsa", how
   many words its vocabulary has, and in 8 bytes tokenizer_spelling of them. */
enum { FORMAT_STAMP = 0x61736e };

/* By `bytes` first bytes, all there are where `size` says so (-1: a pipe). Packed data give
   `packing` alone, and their contents are judged by another call with `inside`. What no trainer
   reads is a fault that says what it is, and what to do. */
bool format_judge(file_format *to, const char *name, const char *head, size_t bytes, int64_t size,
                  format_wish wish, bool inside, fault *f);

/* The same of a plain file, with what is inside. */
bool format_of(file_format *to, const char *path, format_wish wish, fault *f);

/* Of what stands behind the head that was judged, at byte `offset`: a text that goes on as
   something else is a fault. */
bool format_check_rest(const char *name, const char *text, size_t bytes, int64_t offset, fault *f);

/* A file that is one text, as a prompt is: without its mark; what is none is a fault. */
bool format_prompt(const char *name, const char **text, size_t *bytes, fault *f);

/* Whether a line ends with an object, {"key": ... or {'key': ..., behind a prefix or none. */
bool format_holds_object(const char *line, size_t bytes);

/* Whether lines of which so many hold objects were meant as these, and no text; that as a fault. */
static inline bool format_are_objects(size_t seen, size_t objects) {
    return objects >= 2 && 2 * objects >= seen;
}
bool format_refuse_objects(const char *name, bool inside, fault *f);

/* ---- Folders ---- */

typedef enum format_use {
    FORMAT_TRAIN,
    FORMAT_VALIDATE /* by its name, beside files that are to be trained on */
} format_use;

typedef struct format_file {
    char *path;       /* to open */
    const char *name; /* in the folder; the path where that is a file */
    int64_t size;
    file_format format;
    format_use use;
} format_file;

typedef struct format_files {
    format_file *files; /* those of FORMAT_VALIDATE are the last; else in the order of names */
    size_t count, validate;
    bool is_folder;
} format_files;

/* `dataset` is data.dataset, CONFIG_DATASET_AUTO for programs that take what is there. A folder's
   files that are no data are passed over, with one line for all. */
bool format_files_open(format_files *to, const char *path, int64_t dataset, const listener *notes,
                       fault *f);
void format_files_close(format_files *files);

#endif

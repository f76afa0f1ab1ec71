/* source.h - what data.c reads windows from; one implementation for each kind of data. Twin:
   source.c (which kind it is), source_synthetic.c, source_retrieval.c, source_corpus.c,
   source_stream.c. A source belongs to the thread that opened it. */
#ifndef SOURCE_H
#define SOURCE_H

#include "data/data.h"
#include "data/format.h"

/* seq_len + 1 tokens: a row and the label of its last token. */
typedef struct source_window {
    int32_t *tokens;
    unsigned char *starts; /* 1 where a document begins */
    unsigned char *given;  /* 1 for tokens without loss; all 0 unless the source says otherwise */
    int64_t epoch;
} source_window;

typedef struct source source;

typedef bool (*source_read)(source *s, int64_t number, source_window *w, fault *f);

struct source {
    const data_options *options;
    int cancel; /* readable once the owner wants blocked reads to end */
    uint64_t fingerprint;
    int64_t val_windows;             /* set aside; numbered from 0 */
    int64_t split_parts, split_size; /* see data_position */
    int64_t documents, skipped;
    char description[512];

    /* A training window by its sample, which a stream takes in ascending order only; a window of
       validation. */
    source_read read, read_val;
    /* Where the data stand once all windows before `sample` are used. */
    bool (*position)(source *s, int64_t sample, data_position *p, fault *f);
    void (*close)(source *s);
};

/* `val_rows`: validation windows that are wanted. */
source *source_open(const data_options *o, int64_t val_rows, int cancel, fault *f);

source *source_synthetic_open(const data_options *o, int64_t val_rows, fault *f);
source *source_retrieval_open(const data_options *o, int64_t val_rows, fault *f);

/* A row of the retrieval task. Returns its number of needles; question q, of which the last token
   of w answers the last, asks for the needle at places[q], where places is not NULL. */
enum { RETRIEVAL_NEEDLES = 16, RETRIEVAL_KEYS = 16, RETRIEVAL_VALUES = 16, RETRIEVAL_VOCAB = 512 };
int source_retrieval_row(uint64_t seed, uint64_t stream, int64_t sample, int64_t seq_len,
                         source_window *w, int64_t *places);

/* Random access: .bin shards, or text files whose tokens fit in memory (bytes stay on the disk).
   Takes the files over, also where it fails. */
source *source_corpus_open(const data_options *o, const char *path, format_files *files,
                           int64_t val_rows, fault *f);

/* Documents in the order of the data: JSON, lines or texts, from files, or where there are none
   from the pipe that the path names. */
source *source_stream_open(const data_options *o, const char *path, format_files *files,
                           int64_t val_rows, int cancel, fault *f);

/* Adds a file's size and contents to a sum: all of a small one, of a large one blocks at equal
   distances, fewer where there are many files; and its name in the folder, where it is in one: data
   may be moved. */
bool source_add_file(uint64_t *sum, int fd, const format_files *all, const format_file *file,
                     fault *f);

/* The position of a source that needs no more than the number of the sample. */
bool source_position_by_number(source *s, int64_t sample, data_position *p, fault *f);

/* A source whose windows are functions of their numbers alone; the caller describes it. */
source *source_numbered_open(const data_options *o, int64_t val_rows, source_read read,
                             source_read read_val, fault *f);

#endif

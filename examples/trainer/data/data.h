/* data.h - batches of tokens: synthetic, text, JSON, lines, .bin shards, a pipe; read ahead by a
   thread. Twin: data.c (the loader), source_*.c (what is read), format.c (what a file is). It does
   not shuffle inside a stream, and it never makes up data unless it was asked to, and then says
   so.

   Every row is a function of (seed, global sample index): micro-batch m is the samples
   m batch_size .. (m + 1) batch_size - 1, of which a rank takes its slice. So 1, 2 and 4 ranks see
   the same data, and a resumed run may change their number. */
#ifndef DATA_H
#define DATA_H

#include <stddef.h>
#include <stdint.h>

#include "config/config.h"
#include "data/tokenizer.h"

/* A label without loss: the next token belongs to another document (isolate_documents), or is no
   answer (retrieval). */
#define DATA_NO_LABEL (-1)

/* Where the data of a run stand: all that a resume needs. Goes into a checkpoint as it is. */
typedef struct data_position {
    int64_t sample;       /* the next global sample */
    uint64_t fingerprint; /* of the data: names, sizes, contents, and what makes tokens of them */
    int64_t epoch;        /* streams: which pass, which shard of it, where in the shard the next */
    int64_t shard, offset, document; /* document begins, its number, how many of its tokens are */
    int64_t used;                    /* in earlier windows */
    /* What is set aside for validation: decided when a run begins, for the settings of evaluation
       may change, and what was trained on must not be validated on. Stretches and tokens of each;
       of a stream documents, and 0. Parts -1: not known. */
    int64_t split_parts, split_size;
} data_position;

typedef struct data_batch {
    int64_t rows, seq_len; /* rows of this rank */
    const int32_t *tokens; /* (rows, seq_len) */
    const int32_t *labels; /* (rows, seq_len): the token after, or DATA_NO_LABEL */
    const int32_t
        *begins;          /* isolate_documents: documents + 1 offsets into rows * seq_len tokens, */
    int64_t documents;    /* a row's start always among them; else NULL and 0 */
    int64_t max_document; /* tokens of the longest */
    int64_t labelled;     /* labels that are tokens */
    int64_t sample, epoch; /* of the first row of the global micro-batch */
    data_position next;    /* where the data stand once this batch is used */
} data_batch;

typedef struct data_options {
    const config_data *config;
    tokenizer *tokenizer;        /* used by the loader's thread from data_open to data_close */
    int64_t vocab_size;          /* the model's: tokens at or above it are refused */
    int64_t seq_len, batch_size; /* batch_size: the global micro-batch, a multiple of world */
    uint64_t seed;
    int64_t rank, world; /* of those who share the rows out: a slice of each batch is `rank`'s */
    int64_t processes;   /* that read at all: several may want the same slice */
    int64_t val_batches; /* wanted for an evaluation; 0: nothing is set aside */
    int input;           /* the descriptor that "-" reads: 0 in a program */
    const data_position *resume; /* NULL: from the start */
    bool other_fraction;         /* resume: val_fraction is not that of the checkpoint */
    int (*stop)(void); /* not NULL: once it is not 0, waiting for data ends with a fault */
    listener notes;
} data_options;

typedef struct data data;

/* Opens the source, sets the validation split aside and starts the thread. */
data *data_open(const data_options *o, fault *f);
void data_close(data *d);

/* The next training batch, valid until the next call. False: a timeout, an unreadable source or the
   end of a pipe, unless synthetic_on_fail; the fault says which. */
bool data_next(data *d, data_batch *batch, fault *f);

/* Validation micro-batch k of data_val_batches (0: the data are too short for a row), the same at
   each call, spread over all that is set aside. Its tokens never appear in training. Where there
   are too few rows for the last batch, the rest of it has no labels. */
int64_t data_val_batches(const data *d);
bool data_val(data *d, int64_t k, data_batch *batch, fault *f);

typedef struct data_stats {
    double fetch_p50_ms, fetch_p95_ms; /* to make a batch, over the last 1024 */
    double wait_p50_ms, wait_p95_ms;   /* that data_next made its caller wait */
    int64_t documents, skipped;        /* read; unreadable lines passed over */
    int64_t synthetic_from;            /* first sample that synthetic_on_fail made up, or -1 */
} data_stats;

data_stats data_statistics(data *d);

/* Of what is read, names, sizes, contents, tokenizer: processes of one run must have the same. */
uint64_t data_fingerprint(const data *d);

/* One line: what is read, how much of it, how it is split. */
const char *data_describe(const data *d);

#endif

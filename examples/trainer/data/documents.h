/* documents.h - one document after another from a file or a pipe: of JSON lines, of a JSON array,
   of plain lines, or a text as one. Twin: documents.c. What a file is, format.h decides; what
   happens to a record that is no document, the caller. */
#ifndef DOCUMENTS_H
#define DOCUMENTS_H

#include "base/lines.h"
#include "data/format.h"
#include "data/tokenizer.h"

/* Of a whole text: what is packed may unpack to any size. */
#define DOCUMENTS_TEXT_BYTES ((int64_t)1 << 33)

typedef struct documents {
    lines lines; /* lines.offset: where the next document is looked for */
    file_format format;
    bool by_line;         /* each line of a text is a document; else it is one */
    bool is_first;        /* of an array: nothing has been read */
    bool closed;          /* of an array: its ] is read */
    int64_t size;         /* of the file when the run began; -1: a pipe */
    size_t seen, objects; /* of text by line: lines, and those that hold objects (format.h) */
    char why[200];        /* the last record is no document, "" where it is one */
} documents;

/* Takes over fd, the descriptor of a plain file or (size -1) of a pipe, at a document's first byte:
   0 or a place that lines.offset has had. */
bool documents_open(documents *d, int fd, const char *name, int64_t size, format_wish wish,
                    int64_t offset, int cancel, fault *f);
void documents_close(documents *d);

/* Appends the next record to `to` as a document of training; nothing where it is empty, or where
   `why` says what is wrong with it. *offset becomes the place of its first byte or of white
   space before it. */
lines_result documents_next(documents *d, tokenizer *t, token_list *to, int64_t *offset, fault *f);

/* All of a text file that was judged, unpacked, without a byte order mark, to be freed. */
char *documents_read_text(const format_file *file, size_t *bytes, fault *f);

#endif

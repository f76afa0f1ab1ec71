/* json_file.h - JSON that anybody may have written, within limits that are looked at before it is
   parsed: a parser takes up to 45 bytes for one of "[],[],[]". Twin: json_file.c. It knows no
   format. */
#ifndef JSON_FILE_H
#define JSON_FILE_H

#include <stddef.h>

#include "base/fault.h"

/* What a document may have, by what it is for; no document is nested deeper than JSON_DEPTH. */
enum { JSON_DEPTH = 64 };
typedef struct json_limit {
    size_t bytes, containers, values; /* objects and arrays; all values, these among them */
} json_limit;

extern const json_limit json_of_settings; /* state.json, config.json, metrics.json */
extern const json_limit json_of_tensors;  /* a header of safetensors, an index of such files */
extern const json_limit json_of_tokens;   /* tokenizer.json, vocab.json */
extern const json_limit json_of_document; /* a line of a data set */

/* NULL and a message that begins with `name`, and has the line, where it is too much or no JSON;
   without a name the message alone. `flags` are jansson's. */
struct json_t *json_file_parse(const char *name, const char *text, size_t bytes,
                               const json_limit *limit, size_t flags, fault *f);

/* The same of a plain file; a key that is given twice is refused. */
struct json_t *json_file_read(const char *path, const json_limit *limit, fault *f);

#endif

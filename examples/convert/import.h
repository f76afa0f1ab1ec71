/* import.h - a folder that transformers opens as a checkpoint of the trainers: models of Llama's
   shape, with sparse attention or dense, what export made, and models whose settings are a file of
   the trainers'. Twins: import.c, import_settings.c. What a setting of theirs means here stands in
   one table, what a tensor is called in another. */
#ifndef IMPORT_H
#define IMPORT_H

#include "base/json_file.h"
#include "checkpoint/checkpoint.h"

enum { IMPORT_FLAGS = 40, IMPORT_TEXT = CONFIG_PATH_BYTES + 32 };

/* Settings, as they would stand on the trainers' command line. */
typedef struct import_flags {
    int count;
    char text[IMPORT_FLAGS][IMPORT_TEXT];
} import_flags;

struct json_t;

/* A file of the folder, which must be a JSON object; NULL: it is none. */
struct json_t *import_json(const char *folder, const char *name, const json_limit *limit, fault *f);

bool import_has_settings(const char *folder);

/* Those of folder/config.json. Where it says what the trainers' model cannot do, the fault names
   it. */
bool import_settings(import_flags *x, const char *folder, fault *f);

/* The tensors of folder/model.safetensors, or of the files that model.safetensors.index.json names,
   become step 0 in out_dir. f32, bf16 and f16 are read; f32 is written. At a fault *code is the
   exit code: 2, what is given cannot be used; 1, out_dir not be written. */
bool import_model(const config *c, const char *folder, const char *out_dir, int *code, fault *f);

/* Copies the tokenizer's files to out_dir/tokenizer and lets c name them. Where the command line
   names a tokenizer, that is it; a kind that the trainers do not read is a fault, with its
   *code as above. */
bool import_tokenizer(config *c, const char *folder, const char *out_dir, const listener *notes,
                      int *code, fault *f);

#endif

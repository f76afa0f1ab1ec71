/* import.h - a folder that transformers opens as a checkpoint of the trainers: models of Llama's
   shape, with sparse attention or dense, and models whose settings are a file of the trainers'.
   Twin: import.c. What a setting of theirs means here stands in one table, what a tensor is called
   in another. */
#ifndef IMPORT_H
#define IMPORT_H

#include "checkpoint/checkpoint.h"

enum { IMPORT_FLAGS = 40, IMPORT_TEXT = 96 };

/* Settings, as they would stand on the trainers' command line. */
typedef struct import_flags {
    int count;
    char text[IMPORT_FLAGS][IMPORT_TEXT];
} import_flags;

bool import_has_settings(const char *folder);

/* Those of folder/config.json. Where it says what the trainers' model cannot do, the fault names
   it. */
bool import_settings(import_flags *x, const char *folder, fault *f);

/* The tensors of folder/model.safetensors, or of the files that model.safetensors.index.json names,
   become step 0 in out_dir. f32, bf16 and f16 are read; f32 is written. */
bool import_model(const config *c, const char *folder, const char *out_dir, fault *f);

/* Copies the tokenizer's files to out_dir/tokenizer and lets c name them; without such files tokens
   stay what c says. */
bool import_tokenizer(config *c, const char *folder, const char *out_dir, const listener *notes,
                      fault *f);

#endif

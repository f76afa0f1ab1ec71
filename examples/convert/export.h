/* export.h - a checkpoint as a folder that transformers opens: config.json, generation_config.json,
   model.safetensors, modeling_nsa.py and, where its files are known, a tokenizer. Twin: export.c.
   Tensors keep the names that the trainers give them. */
#ifndef EXPORT_H
#define EXPORT_H

#include "checkpoint/checkpoint.h"

/* modeling_nsa.py, put into the program when it is built. */
extern const unsigned char modeling_nsa[];
extern const size_t modeling_nsa_bytes;

/* Whether the file has a counterpart for each setting of the model; the fault names the first that
   it has not. */
bool export_check(const config *c, fault *f);

/* `folder` is made; files of these names in it are replaced. What was left out goes to `notes`.
   At a fault *code is the exit code: 2, what is given cannot be used; 1, the folder not written. */
bool export_folder(const checkpoint *k, const char *folder, const listener *notes, int *code,
                   fault *f);

#endif

/* safetensors.h - the safetensors format: 8 bytes of header length, a JSON header, raw tensors.
   Twin: safetensors.c. Reading takes the file as hostile: every length and offset is checked before
   it is used. It does not convert between dtypes. */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"

#define SAFETENSORS_DIMS 8

typedef enum safetensors_dtype {
    SAFETENSORS_F32,
    SAFETENSORS_BF16,
    SAFETENSORS_F16,
    SAFETENSORS_F64,
    SAFETENSORS_I32,
    SAFETENSORS_I64
} safetensors_dtype;

/* A named array. Writing reads `data`, loading fills it. */
typedef struct safetensors_tensor {
    const char *name;
    safetensors_dtype dtype;
    int dims;
    int64_t shape[SAFETENSORS_DIMS];
    void *data;
} safetensors_tensor;

size_t safetensors_tensor_bytes(const safetensors_tensor *t);

/* Writes the tensors in the order given and flushes them to the disk; on failure the file that
   bears the name, if there is one, stays as it is. `bytes` and `xxh64` describe what was
   written. */
bool safetensors_write(const char *path, const safetensors_tensor *list, size_t count,
                       uint64_t *bytes, uint64_t *xxh64, fault *f);

typedef struct safetensors_file safetensors_file;

safetensors_file *safetensors_open(const char *path, fault *f);
void safetensors_close(safetensors_file *file);
size_t safetensors_count(const safetensors_file *file);

/* Tensor i of the file, in the order of its bytes, without data. */
safetensors_tensor safetensors_info(const safetensors_file *file, size_t i);

/* Fills every tensor of the list. One that is missing, of another shape or dtype, or one in the
   file that the list lacks, is refused by name before anything is read. */
bool safetensors_load(safetensors_file *file, const safetensors_tensor *list, size_t count,
                      fault *f);

/* Whether the f32 tensors of a model have no NaN and no infinity: one that has any computes nothing
   else. `path` is for the message. */
bool safetensors_check_finite(const char *path, const safetensors_tensor *list, size_t count,
                              fault *f);

#endif

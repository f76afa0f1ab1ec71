/* safetensors.c - writes and reads the safetensors format, as published by its authors: an 8-byte
   little-endian length, a JSON header of that length, then the tensors without gaps. Twin:
   safetensors.h. */
#include "checkpoint/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/files.h"
#include "base/json_file.h"

enum { WRITE_BYTES = 1 << 24 };

typedef struct entry {
    safetensors_tensor tensor; /* name points into the header */
    int64_t begin, end;        /* in the data */
} entry;

struct safetensors_file {
    int fd;
    char *path;
    json_t *header;
    entry *entries; /* by their place in the data */
    entry *by_name;
    size_t count;
    int64_t data; /* where the data begin */
};

static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {[SAFETENSORS_F32] = {"F32", 4}, [SAFETENSORS_BF16] = {"BF16", 2},
              [SAFETENSORS_F16] = {"F16", 2}, [SAFETENSORS_F64] = {"F64", 8},
              [SAFETENSORS_I32] = {"I32", 4}, [SAFETENSORS_I64] = {"I64", 8}};

size_t safetensors_tensor_bytes(const safetensors_tensor *t) {
    size_t bytes = dtypes[t->dtype].bytes;
    for (int i = 0; i < t->dims; i++) bytes *= (size_t)t->shape[i];
    return bytes;
}

/* ---- Writing ---- */

typedef struct writer {
    int fd;
    const char *path;
    XXH64_state_t *hash;
    uint64_t bytes;
} writer;

static bool put(writer *w, const void *from, size_t bytes, fault *f) {
    const char *at = from;
    while (bytes) {
        size_t n = bytes < WRITE_BYTES ? bytes : WRITE_BYTES;
        if (!files_write_all(w->fd, w->path, at, n, f)) return false;
        XXH64_update(w->hash, at, n);
        w->bytes += n;
        at += n;
        bytes -= n;
    }
    return true;
}

static json_t *describe(const safetensors_tensor *t, json_int_t begin) {
    json_t *shape = json_array();
    for (int i = 0; i < t->dims; i++) json_array_append_new(shape, json_integer(t->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtypes[t->dtype].name, "shape", shape,
                     "data_offsets", begin, begin + (json_int_t)safetensors_tensor_bytes(t));
}

/* The header, padded with spaces so that the data are aligned to 8 bytes. Its metadata are what
   transformers asks for: matrices are (out, in), as PyTorch has them. */
static char *header_text(const char *path, const safetensors_tensor *list, size_t count,
                         size_t *bytes, fault *f) {
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    json_int_t at = 0;
    for (size_t i = 0; header && i < count; i++) {
        bool twice = json_object_get(header, list[i].name);
        if (!twice && !json_object_set_new(header, list[i].name, describe(&list[i], at))) {
            at += (json_int_t)safetensors_tensor_bytes(&list[i]);
            continue;
        }
        fault_set(f, "%s: tensor %s: %s", path, list[i].name,
                  twice ? "its name is given twice" : "its name must be UTF-8");
        json_decref(header);
        return NULL;
    }
    char *json = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    size_t length = json ? strlen(json) : 0;
    *bytes = (length + 7) / 8 * 8;
    char *text = json ? malloc(*bytes + 1) : NULL;
    if (text) snprintf(text, *bytes + 1, "%-*s", (int)*bytes, json);
    free(json);
    if (!text) fault_set(f, "%s: out of memory for the header", path);
    return text;
}

static bool put_all(writer *w, const safetensors_tensor *list, size_t count, fault *f) {
    size_t bytes;
    unsigned char length[8];
    char *header = header_text(w->path, list, count, &bytes, f);
    if (!header) return false;
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)bytes >> (8 * i));
    bool ok = put(w, length, 8, f) && put(w, header, bytes, f);
    free(header);
    for (size_t i = 0; ok && i < count; i++)
        ok = put(w, list[i].data, safetensors_tensor_bytes(&list[i]), f);
    return ok;
}

bool safetensors_write(const char *path, const safetensors_tensor *list, size_t count,
                       uint64_t *bytes, uint64_t *xxh64, fault *f) {
    writer w = {.path = path, .hash = XXH64_createState()};
    if (!w.hash) return fault_set(f, "%s: out of memory", path);
    XXH64_reset(w.hash, 0);
    files_draft draft;
    bool ok = files_draft_open(&draft, path, f);
    if (ok) {
        w.fd = draft.fd;
        ok = files_draft_close(&draft, put_all(&w, list, count, f), f);
    }
    *bytes = w.bytes;
    *xxh64 = XXH64_digest(w.hash);
    XXH64_freeState(w.hash);
    return ok;
}

/* ---- Reading ---- */

static bool read_dtype(const json_t *v, safetensors_dtype *dtype) {
    const char *name = json_string_value(v);
    for (size_t i = 0; name && i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(name, dtypes[i].name)) continue;
        *dtype = (safetensors_dtype)i;
        return true;
    }
    return false;
}

/* The shape, and the bytes it makes, which must not pass what an int64 holds. */
static bool read_shape(const json_t *v, safetensors_tensor *t, int64_t *bytes) {
    int64_t total = (int64_t)dtypes[t->dtype].bytes;
    if (!json_is_array(v) || json_array_size(v) > SAFETENSORS_DIMS) return false;
    t->dims = (int)json_array_size(v);
    for (int i = 0; i < t->dims; i++) {
        const json_t *n = json_array_get(v, (size_t)i);
        if (!json_is_integer(n) || json_integer_value(n) < 0) return false;
        t->shape[i] = json_integer_value(n);
        if (t->shape[i] && total > INT64_MAX / t->shape[i]) return false;
        total *= t->shape[i];
    }
    *bytes = total;
    return true;
}

static bool read_entry(const char *path, const char *name, const json_t *v, int64_t data_bytes,
                       entry *e, fault *f) {
    int64_t bytes;
    const json_t *offsets = json_object_get(v, "data_offsets");
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    e->tensor.name = name;
    if (!read_dtype(json_object_get(v, "dtype"), &e->tensor.dtype))
        return fault_set(f, "%s: tensor %.100s: dtype must be one of F32, BF16, F16, F64, I32, I64",
                         path, name);
    if (!read_shape(json_object_get(v, "shape"), &e->tensor, &bytes))
        return fault_set(f,
                         "%s: tensor %.100s: shape must be a list of at most %d sizes whose "
                         "product is below 2^63",
                         path, name, SAFETENSORS_DIMS);
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return fault_set(f, "%s: tensor %.100s: data_offsets must be two integers", path, name);
    e->begin = json_integer_value(begin);
    e->end = json_integer_value(end);
    if (e->begin < 0 || e->end < e->begin || e->end > data_bytes)
        return fault_set(f,
                         "%s: tensor %.100s: data_offsets %" PRId64 " .. %" PRId64
                         " must lie in the file's %" PRId64 " bytes of data",
                         path, name, e->begin, e->end, data_bytes);
    if (e->end - e->begin != bytes)
        return fault_set(f,
                         "%s: tensor %.100s: %" PRId64 " bytes of data; its shape needs %" PRId64,
                         path, name, e->end - e->begin, bytes);
    return true;
}

static int by_begin(const void *a, const void *b) {
    const entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static int entry_by_name(const void *a, const void *b) {
    return strcmp(((const entry *)a)->tensor.name, ((const entry *)b)->tensor.name);
}

/* The tensors must fill the data without gap or overlap. */
static bool check_cover(const safetensors_file *file, int64_t data_bytes, fault *f) {
    int64_t at = 0;
    for (size_t i = 0; i < file->count; i++) {
        const entry *e = &file->entries[i];
        if (e->begin != at)
            return fault_set(f,
                             "%s: tensor %.100s: begins at byte %" PRId64 " of the data, must "
                             "begin where the one before ends, at %" PRId64,
                             file->path, e->tensor.name, e->begin, at);
        at = e->end;
    }
    if (at == data_bytes) return true;
    return fault_set(f, "%s: %" PRId64 " bytes of data, of which the tensors cover %" PRId64,
                     file->path, data_bytes, at);
}

static bool read_entries(safetensors_file *file, int64_t data_bytes, fault *f) {
    const char *name;
    json_t *v;
    if (!json_is_object(file->header))
        return fault_set(f, "%s: the header must be a JSON object", file->path);
    file->entries = calloc(json_object_size(file->header) + 1, sizeof *file->entries);
    file->by_name = calloc(json_object_size(file->header) + 1, sizeof *file->by_name);
    if (!file->entries || !file->by_name) return fault_set(f, "%s: out of memory", file->path);
    json_object_foreach(file->header, name, v) {
        if (!strcmp(name, "__metadata__")) continue;
        if (!read_entry(file->path, name, v, data_bytes, &file->entries[file->count++], f))
            return false;
    }
    memcpy(file->by_name, file->entries, file->count * sizeof *file->entries);
    qsort(file->entries, file->count, sizeof *file->entries, by_begin);
    qsort(file->by_name, file->count, sizeof *file->by_name, entry_by_name);
    return check_cover(file, data_bytes, f);
}

static bool read_header(safetensors_file *file, fault *f) {
    struct stat s;
    char head[64];
    uint64_t length = 0;
    if (fstat(file->fd, &s)) return fault_errno(f, "%s: cannot read", file->path);
    if (s.st_size < 8)
        return fault_set(f, "%s: not a safetensors file: shorter than 8 bytes", file->path);
    size_t bytes = s.st_size < (off_t)sizeof head ? (size_t)s.st_size : sizeof head;
    if (!files_read_at(file->fd, file->path, head, bytes, 0, f) ||
        !files_check_fetched(file->path, head, bytes, f))
        return false;
    for (int i = 7; i >= 0; i--) length = length << 8 | (unsigned char)head[i];
    if (length > json_of_tensors.bytes || length > (uint64_t)s.st_size - 8)
        return fault_set(f,
                         "%s: its header is said to be %" PRIu64 " bytes; the file has %lld, and "
                         "at most %zu are allowed",
                         file->path, length, (long long)s.st_size, json_of_tensors.bytes);
    char *text = malloc((size_t)length + 1);
    if (!text) return fault_set(f, "%s: out of memory for the header", file->path);
    bool ok = files_read_at(file->fd, file->path, text, (size_t)length, 8, f);
    if (ok) {
        file->header = json_file_parse(file->path, text, (size_t)length, &json_of_tensors,
                                       JSON_REJECT_DUPLICATES, f);
        ok = file->header != NULL;
    }
    free(text);
    file->data = (int64_t)length + 8;
    return ok && read_entries(file, s.st_size - file->data, f);
}

safetensors_file *safetensors_open(const char *path, fault *f) {
    safetensors_file *file = calloc(1, sizeof *file);
    size_t length = strlen(path) + 1;
    if (!file || !(file->path = malloc(length))) {
        free(file);
        fault_set(f, "out of memory");
        return NULL;
    }
    memcpy(file->path, path, length);
    file->fd = files_open(path, f);
    if (file->fd >= 0 && read_header(file, f)) return file;
    safetensors_close(file);
    return NULL;
}

void safetensors_close(safetensors_file *file) {
    if (!file) return;
    if (file->fd >= 0) close(file->fd);
    json_decref(file->header);
    free(file->entries);
    free(file->by_name);
    free(file->path);
    free(file);
}

size_t safetensors_count(const safetensors_file *file) {
    return file->count;
}

safetensors_tensor safetensors_info(const safetensors_file *file, size_t i) {
    return file->entries[i].tensor;
}

/* ---- Loading ---- */

static void shape_text(const safetensors_tensor *t, char *text, size_t bytes) {
    size_t n = (size_t)snprintf(text, bytes, "%s [", dtypes[t->dtype].name);
    for (int i = 0; i < t->dims && n < bytes; i++)
        n += (size_t)snprintf(text + n, bytes - n, "%s%" PRId64, i ? ", " : "", t->shape[i]);
    if (n < bytes) snprintf(text + n, bytes - n, "]");
}

static bool same_form(const safetensors_tensor *a, const safetensors_tensor *b) {
    bool same = a->dtype == b->dtype && a->dims == b->dims;
    for (int i = 0; same && i < a->dims; i++) same = a->shape[i] == b->shape[i];
    return same;
}

static const entry *find_entry(const safetensors_file *file, const char *name) {
    entry wanted = {.tensor.name = name};
    return bsearch(&wanted, file->by_name, file->count, sizeof wanted, entry_by_name);
}

static bool is_listed(const safetensors_tensor *list, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (!strcmp(list[i].name, name)) return true;
    return false;
}

static bool check_names(const safetensors_file *file, const safetensors_tensor *list, size_t count,
                        fault *f) {
    char have[256], want[256];
    for (size_t i = 0; i < count; i++) {
        const entry *e = find_entry(file, list[i].name);
        if (!e) return fault_set(f, "%s: tensor %s is missing", file->path, list[i].name);
        if (same_form(&e->tensor, &list[i])) continue;
        shape_text(&e->tensor, have, sizeof have);
        shape_text(&list[i], want, sizeof want);
        return fault_set(f, "%s: tensor %s is %s; the model's is %s", file->path, list[i].name,
                         have, want);
    }
    if (file->count == count) return true;
    for (size_t i = 0; i < file->count; i++)
        if (!is_listed(list, count, file->entries[i].tensor.name))
            return fault_set(f, "%s: tensor %.100s is none of the model's", file->path,
                             file->entries[i].tensor.name);
    return true;
}

bool safetensors_load(safetensors_file *file, const safetensors_tensor *list, size_t count,
                      fault *f) {
    if (!check_names(file, list, count, f)) return false;
    for (size_t i = 0; i < count; i++) {
        const entry *e = find_entry(file, list[i].name);
        if (!files_read_at(file->fd, file->path, list[i].data, (size_t)(e->end - e->begin),
                           file->data + e->begin, f))
            return false;
    }
    return true;
}

bool safetensors_check_finite(const char *path, const safetensors_tensor *list, size_t count,
                              fault *f) {
    for (size_t i = 0; i < count; i++) {
        const float *values = list[i].data;
        size_t numbers = safetensors_tensor_bytes(&list[i]) / sizeof *values;
        for (size_t n = 0; list[i].dtype == SAFETENSORS_F32 && n < numbers; n++)
            if (!isfinite(values[n]))
                return fault_set(f, "%s: tensor %.100s: number %zu is %g; must be finite in f32",
                                 path, list[i].name, n, (double)values[n]);
    }
    return true;
}

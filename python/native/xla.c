/* xla.c - the functions of nsa.h as one handler of XLA's foreign functions, for JAX on the CPU.
   Twin: src/nsa/jax.py, which packs the structs. Not here: shapes, gradients; nsa.h itself, whose
   shared libraries nsa_xla_open is told.

   A call's attributes: `layout`, a number for the package's version and the layout of its structs, because
   programs are exported and called by another; `function`, without its nsa_; `f64`; `structs`, the bytes of its structs one
   after the other, the descriptor last, `sizes` of each; `counted`, how many of them the size query
   takes (-1: there is no workspace); `places`, where in `structs` the address of each buffer
   goes (-1: nowhere), arguments first, then results; `items`, bytes of each buffer for one call;
   `zero`, whether results are zeroed first, and `nothing`, whether that is all, for no sequence;
   `cleared`, behind a 0 for each result on the queries' side of packed sequences the offset of its
   view in `structs`, its rows, heads, width, and whether rows of no query are -inf; `counted_by`, the argument that holds the descriptor's
   counts (-1: none), and `rows`, what they must add up to. Buffers of more than one item are vmap's:
   that many calls, each with the next items. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

enum { BUFFERS_MAX = 64, STRUCTS_MAX = 3, NAME_BYTES = 96 };

static void *libraries[2]; /* f32, f64 */
static int64_t layout_here;

/* 1 if both libraries are there. */
int nsa_xla_open(const char *f32, const char *f64, int64_t layout);
int nsa_xla_open(const char *f32, const char *f64, int64_t layout) {
    layout_here = layout;
    libraries[0] = dlopen(f32, RTLD_NOW | RTLD_LOCAL);
    libraries[1] = dlopen(f64, RTLD_NOW | RTLD_LOCAL);
    return libraries[0] && libraries[1];
}

/* ISO C has no conversion from an object pointer to a function's; POSIX promises their bits. */
typedef void (*any_function)(void);
static any_function find(int64_t f64, const char *name) {
    void *found = dlsym(libraries[f64 != 0], name);
    any_function function;
    memcpy(&function, &found, sizeof function);
    return function;
}

static XLA_FFI_Error *refuse(const XLA_FFI_CallFrame *frame, const char *message) {
    XLA_FFI_Error_Create_Args args;
    memset(&args, 0, sizeof args);
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = message;
    args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
    return frame->api->XLA_FFI_Error_Create(&args);
}

/* ---- Attributes ---------------------------------------------------------------------------- */

typedef struct call {
    char function[NAME_BYTES];
    int64_t layout, f64, counted, zero, nothing, counted_by, rows;
    const XLA_FFI_Array *structs, *sizes, *places, *items, *cleared;
} call;

static int named(const XLA_FFI_ByteSpan *name, const char *text) {
    return name->len == strlen(text) && !memcmp(name->ptr, text, name->len);
}

static int read_scalar(void *attribute, int64_t *value) {
    const XLA_FFI_Scalar *scalar = attribute;
    if (scalar->dtype != XLA_FFI_DataType_S64) return 0;
    memcpy(value, scalar->value, sizeof *value);
    return 1;
}

static int read_name(void *attribute, char *name) {
    const XLA_FFI_ByteSpan *text = attribute;
    if (text->len >= NAME_BYTES) return 0;
    memcpy(name, text->ptr, text->len);
    name[text->len] = 0;
    return 1;
}

static int read_attributes(const XLA_FFI_CallFrame *frame, call *c) {
    int found = 0;
    memset(c, 0, sizeof *c);
    for (int64_t i = 0; i < frame->attrs.size; i++) {
        const XLA_FFI_ByteSpan *name = frame->attrs.names[i];
        XLA_FFI_AttrType type = frame->attrs.types[i];
        void *attribute = frame->attrs.attrs[i];
        if (type == XLA_FFI_AttrType_STRING && named(name, "function"))
            found += read_name(attribute, c->function);
        else if (type == XLA_FFI_AttrType_SCALAR && named(name, "layout"))
            found += read_scalar(attribute, &c->layout);
        else if (type == XLA_FFI_AttrType_SCALAR && named(name, "f64"))
            found += read_scalar(attribute, &c->f64);
        else if (type == XLA_FFI_AttrType_SCALAR && named(name, "counted"))
            found += read_scalar(attribute, &c->counted);
        else if (type == XLA_FFI_AttrType_SCALAR && named(name, "zero"))
            found += read_scalar(attribute, &c->zero);
        else if (type == XLA_FFI_AttrType_SCALAR && named(name, "nothing"))
            found += read_scalar(attribute, &c->nothing);
        else if (type == XLA_FFI_AttrType_SCALAR && named(name, "counted_by"))
            found += read_scalar(attribute, &c->counted_by);
        else if (type == XLA_FFI_AttrType_SCALAR && named(name, "rows"))
            found += read_scalar(attribute, &c->rows);
        else if (type == XLA_FFI_AttrType_ARRAY && named(name, "structs"))
            c->structs = attribute;
        else if (type == XLA_FFI_AttrType_ARRAY && named(name, "sizes"))
            c->sizes = attribute;
        else if (type == XLA_FFI_AttrType_ARRAY && named(name, "places"))
            c->places = attribute;
        else if (type == XLA_FFI_AttrType_ARRAY && named(name, "items"))
            c->items = attribute;
        else if (type == XLA_FFI_AttrType_ARRAY && named(name, "cleared"))
            c->cleared = attribute;
    }
    return found == 8 && c->structs && c->sizes && c->places && c->items && c->cleared;
}

/* ---- Buffers ------------------------------------------------------------------------------- */

static int64_t element_bytes(XLA_FFI_DataType dtype) {
    switch (dtype) {
    case XLA_FFI_DataType_BF16:
    case XLA_FFI_DataType_F16:
        return 2;
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_S32:
        return 4;
    case XLA_FFI_DataType_F64:
        return 8;
    default:
        return 0;
    }
}

static int64_t buffer_bytes(const XLA_FFI_Buffer *b) {
    int64_t bytes = element_bytes(b->dtype);
    for (int64_t i = 0; i < b->rank; i++) bytes *= b->dims[i];
    return bytes;
}

static const XLA_FFI_Buffer *buffer_at(const XLA_FFI_CallFrame *frame, int64_t i) {
    return i < frame->args.size ? frame->args.args[i] : frame->rets.rets[i - frame->args.size];
}

/* How many calls the buffers hold, the same for all; -1 if they disagree. */
static int64_t calls_in(const XLA_FFI_CallFrame *frame, const call *c) {
    const int64_t *items = c->items->data;
    int64_t calls = -1;
    for (int64_t i = 0; i < frame->args.size + frame->rets.size; i++) {
        int64_t bytes = buffer_bytes(buffer_at(frame, i));
        if (items[i] == 0) continue; /* without rows in any call */
        if (bytes % items[i] || (calls >= 0 && bytes / items[i] != calls)) return -1;
        calls = bytes / items[i];
    }
    return calls < 0 ? 1 : calls;
}

/* ---- Calling -------------------------------------------------------------------------------- */

/* The functions of nsa.h take pointers to structs; here these are bytes of which only Python knows
   the kind. */
typedef size_t size_1(const void *);
typedef size_t size_2(const void *, const void *);
typedef size_t size_3(const void *, const void *, const void *);
typedef int run_2(const void *, const void *);
typedef int run_3(const void *, const void *, const void *);
typedef int run_2w(const void *, const void *, void *, size_t);
typedef int run_3w(const void *, const void *, const void *, void *, size_t);

static size_t workspace_size(any_function f, int64_t counted, void *const *s, int64_t n) {
    if (counted == 1) return ((size_1 *)f)(s[n - 1]);
    if (counted == 2) return ((size_2 *)f)(s[n - 2], s[n - 1]);
    return ((size_3 *)f)(s[0], s[1], s[2]);
}

static int run(any_function f, void *const *s, int64_t n, int with, void *workspace, size_t bytes) {
    if (with && n == 2) return ((run_2w *)f)(s[0], s[1], workspace, bytes);
    if (with) return ((run_3w *)f)(s[0], s[1], s[2], workspace, bytes);
    return n == 2 ? ((run_2 *)f)(s[0], s[1]) : ((run_3 *)f)(s[0], s[1], s[2]);
}

typedef const char *words(int status);

static XLA_FFI_Error *refuse_status(const XLA_FFI_CallFrame *frame, int64_t f64, int status) {
    char message[512];
    const char *where = ((words *)find(f64, "nsa_status_where"))(status);
    snprintf(message, sizeof message, "%s%s%s: %s", where, *where ? ": " : "",
             ((words *)find(f64, "nsa_status_name"))(status),
             ((words *)find(f64, "nsa_status_text"))(status));
    return refuse(frame, message);
}

static void place_buffers(const XLA_FFI_CallFrame *frame, const call *c, char *bytes,
                          int64_t item) {
    const int64_t *items = c->items->data, *places = c->places->data;
    for (int64_t i = 0; i < frame->args.size + frame->rets.size; i++) {
        if (places[i] < 0) continue;
        char *data = (char *)buffer_at(frame, i)->data + item * items[i];
        memcpy(bytes + places[i], &data, sizeof data);
    }
}

/* Whether the queries of all sequences are as many as there are rows of them: nsa.h, which has
   pointers, must not read or write more. */
static int counts_fit(const XLA_FFI_CallFrame *frame, const call *c, int64_t item) {
    if (c->counted_by < 0) return 1;
    const int64_t *items = c->items->data;
    const char *data = buffer_at(frame, c->counted_by)->data;
    int64_t bytes = items[c->counted_by], total = 0;
    for (int64_t i = 0; i < bytes; i += (int64_t)sizeof(int32_t)) {
        int32_t count;
        memcpy(&count, data + item * bytes + i, sizeof count);
        if (count < 0) return 0;
        total += count;
    }
    return total == c->rows;
}

static void zero_results(const XLA_FFI_CallFrame *frame) {
    for (int64_t i = 0; i < frame->rets.size; i++) {
        const XLA_FFI_Buffer *b = frame->rets.rets[i];
        memset(b->data, 0, (size_t)buffer_bytes(b));
    }
}

typedef void clear_rows(const void *desc, const void *view, int64_t rows, int64_t heads,
                        int64_t width, int infinite);

/* Rows of packed sequences that no query has written. */
static void clear(const call *c, char *bytes, void *desc) {
    const int64_t *of = (const int64_t *)c->cleared->data + 1, *end = of + c->cleared->size - 1;
    any_function f = find(c->f64, "nsa_python_clear");
    for (; of + 5 <= end; of += 5)
        ((clear_rows *)f)(desc, bytes + of[0], of[1], of[2], of[3], of[4] != 0);
}

/* `bytes` holds the structs, and is aligned as malloc aligns. */
static XLA_FFI_Error *run_all(const XLA_FFI_CallFrame *frame, const call *c, char *bytes) {
    const int64_t *sizes = c->sizes->data;
    int64_t n = (int64_t)c->sizes->size, calls = calls_in(frame, c), used = 0;
    void *structs[STRUCTS_MAX];
    char name[NAME_BYTES + 32];
    for (int64_t i = 0; i < n; used += sizes[i++]) structs[i] = bytes + used;
    if (calls < 0) return refuse(frame, "nsa: buffers of different batches");
    snprintf(name, sizeof name, "nsa_%s", c->function);
    any_function f = find(c->f64, name);
    snprintf(name, sizeof name, "nsa_%s_workspace_size", c->function);
    any_function size = c->counted < 0 ? NULL : find(c->f64, name);
    if (!f || (c->counted >= 0 && !size)) return refuse(frame, "nsa: no such function");
    if (c->zero) zero_results(frame);
    if (c->nothing) return NULL;
    int status = 0;
    void *workspace = NULL;
    size_t room = 0;
    for (int64_t i = 0; i < calls && !status; i++) {
        if (!counts_fit(frame, c, i)) {
            free(workspace);
            return refuse(frame, "counts: in all they must be the rows of queries");
        }
        place_buffers(frame, c, bytes, i);
        if (size && !workspace) {
            room = workspace_size(size, c->counted, structs, n);
            workspace = malloc(room ? room : 1);
            if (!workspace) return refuse(frame, "nsa: no memory for the workspace");
        }
        status = run(f, structs, n, size != NULL, workspace, room);
        if (!status) clear(c, bytes, structs[n - 1]);
    }
    free(workspace);
    return status ? refuse_status(frame, c->f64, status) : NULL;
}

/* XLA's first call asks for the version alone, and brings no data. */
static int answers_metadata(XLA_FFI_CallFrame *frame) {
    /* Its type has been called XLA_FFI_Extension_Base and XLA_FFI_Extension; the members stayed. */
    if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata)
        return 0;
    XLA_FFI_Metadata *metadata =
        ((XLA_FFI_Metadata_Extension *)(void *)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return 1;
}

XLA_FFI_Error *nsa_xla_call(XLA_FFI_CallFrame *frame);
XLA_FFI_Error *nsa_xla_call(XLA_FFI_CallFrame *frame) {
    call c;
    if (answers_metadata(frame)) return NULL;
    if (!read_attributes(frame, &c)) return refuse(frame, "nsa: attributes are missing");
    if (c.layout != layout_here)
        return refuse(frame, "nsa: a program that another version of the package has written: must "
                             "be exported again");
    int64_t buffers = frame->args.size + frame->rets.size;
    if (buffers > BUFFERS_MAX || (int64_t)c.places->size != buffers ||
        (int64_t)c.items->size != buffers || c.sizes->size < 2 || c.sizes->size > STRUCTS_MAX ||
        c.counted_by >= frame->args.size)
        return refuse(frame, "nsa: attributes do not fit the buffers");
    char *bytes = malloc(c.structs->size);
    if (!bytes) return refuse(frame, "nsa: no memory");
    memcpy(bytes, c.structs->data, c.structs->size);
    XLA_FFI_Error *error = run_all(frame, &c, bytes);
    free(bytes);
    return error;
}

/* dlpack.c - window attention over DLPack's tensors, for a host that hands them over as DLTensor *
   (nsa_dlpack_win) or by the calling convention of TVM-FFI (__tvm_ffi_nsa_win), which FlashInfer,
   TileLang and CuTe DSL share. dlpack.py calls both. Not here: the other functions, which take the
   same views; ownership, for the tensors stay the caller's.

       cc -O2 -shared -fPIC examples/embed/dlpack.c -Insa -o libnsa_dlpack.so -lm */
#define NSA_STATIC
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <stdlib.h>

/* ---- The parts of two published ABIs that are used --------------------------------------------
   DLPack 1.x, dlpack/dlpack.h (Apache 2.0), and TVM-FFI 0.1, tvm/ffi/c_api.h (Apache 2.0): layouts
   and numbers, in declarations of our own. */
enum { DL_CPU = 1, DL_CUDA_HOST = 3, DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4 };

typedef struct dl_tensor {
    void *data;
    int32_t device, device_index;
    int32_t ndim;
    uint8_t code, bits; /* of an element */
    uint16_t lanes;
    int64_t *shape, *strides; /* in elements; strides NULL: packed */
    uint64_t byte_offset;
} dl_tensor;

enum { TVM_NONE = 0, TVM_INT = 1, TVM_DLTENSOR = 7, TVM_TENSOR = 70, TVM_OBJECT_BYTES = 24 };

typedef struct tvm_any {
    int32_t type;
    uint32_t zero;
    union {
        int64_t integer;
        void *pointer; /* a dl_tensor, or an object whose dl_tensor follows its header */
    } value;
} tvm_any;

/* From the library of the host that loads this one; without TVM-FFI there is none. */
extern void __attribute__((weak))
TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);

/* ---- The view ------------------------------------------------------------------------------ */

/* The view of a (B, T, heads, width) tensor whose rows are packed. Returns what is wrong, or
   NULL. */
static const char *view_of(nsa_tensor *x, const dl_tensor *t) {
    if (t->device != DL_CPU && t->device != DL_CUDA_HOST) return "a tensor is not in host memory";
    if (t->ndim != 4) return "a tensor is not of four dimensions (batch, token, head, channel)";
    if (t->lanes != 1) return "a tensor's elements have several lanes";
    if (t->code == DL_FLOAT && t->bits == 32)
        x->dtype = NSA_F32;
    else if (t->code == DL_FLOAT && t->bits == 16)
        x->dtype = NSA_F16;
    else if (t->code == DL_FLOAT && t->bits == 64)
        x->dtype = NSA_F64;
    else if (t->code == DL_BFLOAT && t->bits == 16)
        x->dtype = NSA_BF16;
    else if (t->code == DL_INT && t->bits == 32)
        x->dtype = NSA_I32;
    else
        return "a tensor's elements are none of float32, float16, float64, bfloat16, int32";
    int64_t packed[4] = {0, 0, 0, 1};
    for (int i = 2; i >= 0; i--) packed[i] = packed[i + 1] * t->shape[i + 1];
    const int64_t *strides = t->strides ? t->strides : packed;
    if (strides[3] != 1 && t->shape[3] != 1) return "a tensor's last dimension is not packed";
    x->data = (char *)t->data + t->byte_offset;
    x->batch = strides[0], x->token = strides[1], x->head = strides[2];
    return NULL;
}

static int same(const dl_tensor *t, int64_t batch, int64_t tokens, int64_t heads, int64_t width) {
    return t->shape[0] == batch && t->shape[1] == tokens && t->shape[2] == heads &&
           t->shape[3] == width;
}

/* ---- Window attention ---------------------------------------------------------------------- */

static const char *attend(nsa_attend *x, const nsa_desc *d) {
    nsa_status s = nsa_desc_check(d);
    if (s != NSA_OK) return nsa_status_text(s);
    size_t bytes = nsa_attend_win_forward_workspace_size(d);
    size_t rows = (size_t)d->batch * (size_t)d->tokens * (size_t)d->heads;
    void *workspace = malloc(bytes ? bytes : 1);
    x->lse = nsa_tensor_bthd(malloc((rows ? rows : 1) * sizeof(nsa_real)), NSA_REAL_DTYPE,
                             d->tokens, d->heads, 1);
    const char *error = "no memory";
    if (workspace && x->lse.data) {
        s = nsa_attend_win_forward(x, d, workspace, bytes);
        error = s == NSA_OK ? NULL : nsa_status_text(s);
    }
    free(workspace);
    free(x->lse.data);
    return error;
}

/* out = window attention of q, k and v: (B, T, H, Dk), (B, T, Hk, Dk), (B, T, Hk, Dv) and
   (B, T, H, Dv). Returns what is wrong, or NULL. */
const char *nsa_dlpack_win(const dl_tensor *q, const dl_tensor *k, const dl_tensor *v,
                           const dl_tensor *out, int64_t window);
const char *nsa_dlpack_win(const dl_tensor *q, const dl_tensor *k, const dl_tensor *v,
                           const dl_tensor *out, int64_t window) {
    const dl_tensor *tensors[] = {q, k, v, out};
    nsa_attend x = {0};
    nsa_tensor *views[] = {&x.q, &x.k, &x.v, &x.out};
    for (int i = 0; i < 4; i++) {
        const char *error = view_of(views[i], tensors[i]);
        if (error) return error;
        for (int j = 0; j < 4; j++)
            if (tensors[i]->shape[j] < 0 || tensors[i]->shape[j] > INT32_MAX)
                return "a dimension is not within 0 .. 2^31 - 1";
    }
    const int64_t *n = q->shape;
    if (!same(k, n[0], n[1], k->shape[2], n[3]) || !same(v, n[0], n[1], k->shape[2], v->shape[3]) ||
        !same(out, n[0], n[1], n[2], v->shape[3]))
        return "the shapes of q, k, v and out do not fit: (B,T,H,Dk), (B,T,Hk,Dk), (B,T,Hk,Dv) and "
               "(B,T,H,Dv)";
    nsa_desc d = nsa_desc_default((int)n[0], (int)n[1], (int)n[2], (int)k->shape[2], (int)n[3]);
    d.dim_v = (int)v->shape[3];
    d.window = window < 0 ? 0 : window > INT32_MAX ? INT32_MAX : (int)window;
    return attend(&x, &d);
}

static const dl_tensor *tensor_of(const tvm_any *a) {
    if (a->type == TVM_DLTENSOR) return (const dl_tensor *)a->value.pointer;
    if (a->type != TVM_TENSOR) return NULL;
    return (const dl_tensor *)(const void *)((const char *)a->value.pointer + TVM_OBJECT_BYTES);
}

/* TVM-FFI's convention: 0, or -1 behind an error that the host has been told. */
int __tvm_ffi_nsa_win(void *self, const tvm_any *args, int32_t count, tvm_any *result);
int __tvm_ffi_nsa_win(void *self, const tvm_any *args, int32_t count, tvm_any *result) {
    (void)self;
    const dl_tensor *t[4] = {0};
    const char *error = NULL;
    for (int i = 0; i < 4 && count == 5; i++) t[i] = tensor_of(&args[i]);
    if (!t[0] || !t[1] || !t[2] || !t[3] || args[4].type != TVM_INT)
        error = "nsa_win takes the tensors q, k, v and out, and an integer, the window";
    else
        error = nsa_dlpack_win(t[0], t[1], t[2], t[3], args[4].value.integer);
    if (error) {
        if (TVMFFIErrorSetRaisedFromCStr) TVMFFIErrorSetRaisedFromCStr("ValueError", error);
        return -1;
    }
    result->type = TVM_NONE, result->zero = 0, result->value.integer = 0;
    return 0;
}

/* call.c - a call of an operator of nsa.torch on the CPU in one step: from the tuple of its arguments
   to the function of nsa.h. In Python that takes three times the instructions, in memory that the
   function before has driven out of the caches. A call is done here only if a Plan of _native.py has
   done one of the same form; else the answer is None. Twin: src/nsa/torch/_call.py. Not here: rules
   for arguments.

   It is compiled without headers of Python and of PyTorch, so that one wheel serves all of them. What
   stands here of Python is its stable ABI, and tensors are read through the functions for exchange
   that DLPack 1.2 has (PyTorch 2.10). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- Python's stable ABI --------------------------------------------------------------------- */

typedef struct PyObject PyObject;
typedef PyObject *(*PyCFunction)(PyObject *self, PyObject *argument);
typedef struct {
    const char *name;
    PyCFunction function;
    int flags;
    const char *doc;
} PyMethodDef;
enum { METH_O = 0x0008, PY_EQ = 2 };

PyObject *PyCFunction_NewEx(PyMethodDef *method, PyObject *self, PyObject *module);
PyObject *PyLong_FromVoidPtr(void *pointer);
void *PyLong_AsVoidPtr(PyObject *x);
long PyLong_AsLong(PyObject *x);
intptr_t PyTuple_Size(PyObject *x);
PyObject *PyTuple_GetItem(PyObject *x, intptr_t i);
PyObject *PyTuple_New(intptr_t size);
int PyTuple_SetItem(PyObject *x, intptr_t i, PyObject *stolen);
PyObject *PyObject_Type(PyObject *x);
PyObject *PyObject_GetAttr(PyObject *x, PyObject *name);
PyObject *PyObject_Call(PyObject *called, PyObject *arguments, PyObject *keywords);
PyObject *PyObject_CallObject(PyObject *called, PyObject *arguments);
PyObject *PyObject_CallFunctionObjArgs(PyObject *called, ...);
int PyObject_IsTrue(PyObject *x);
int PyObject_RichCompareBool(PyObject *x, PyObject *y, int how);
void PyErr_Clear(void);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *state);
void Py_IncRef(PyObject *x);
void Py_DecRef(PyObject *x);

/* ---- DLPack ---------------------------------------------------------------------------------- */

typedef struct {
    char *data;
    int32_t device, device_id, axes;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
enum { ON_CPU = 1 };

/* ---- Forms ----------------------------------------------------------------------------------- */

enum { AXES = 8, PLACES = 32, TENSORS = 48, STRUCTS = 3, STRUCT_BYTES = 8192, FORMS = 16 };
enum { WORDS_OF_A_TENSOR = 1 + 2 * AXES };

/* What of tensors makes a form: of each a word for dtype and axes, shape and strides; -1 for None. */
typedef struct {
    int64_t words[PLACES * WORDS_OF_A_TENSOR];
    int64_t count;
    char *address[TENSORS]; /* of those that are there; then of what is returned */
    int64_t tensors;
} Described;

typedef struct {
    int64_t word, tensor,
        offset; /* the address of a tensor goes there; tensor is 0 for scratch memory */
} Slot;

/* Twin: _call.py's _Form, which fills it, and has the memory of arrays and objects. */
typedef struct {
    void (*function)(void);
    const char *structs; /* their bytes, but for the addresses */
    int64_t bytes, count, begins[STRUCTS];
    const Slot *slots, *scratch_slots;
    int64_t slot_count, scratch_slot_count;
    int64_t workspace, workspace_at, workspace_bytes; /* workspace: 0 if the function takes none */
    PyObject *scratch_arguments; /* of the function that gives scratch memory */
    PyObject *empty_arguments;   /* for each tensor that is returned the arguments of empty_like */
    const int64_t *zeroed;       /* for each its bytes, if it must be zeros */
    int64_t returned;
    int64_t threads;
    PyObject *rest; /* arguments that are no tensors, and None for those that are */
} Form;

typedef struct {
    const Form *form;
    PyObject *owner;        /* of the form's memory */
    int64_t count, words[]; /* as in Described */
} Kept;

typedef struct {
    int64_t arguments;
    char is_tensor[PLACES];
    int64_t single;    /* one tensor is returned, not a tuple */
    Kept *kept[FORMS]; /* used last comes first */
    int64_t forms;
} Site;

/* Twin: _call.py's _World. */
typedef struct {
    int (*describe)(void *tensor, DLTensor *to); /* dltensor_from_py_object_no_sync */
    PyObject *none, *no, *tensor, *parameter, *looks, *level_of, *level, *grad_enabled,
        *requires_grad;
    PyObject *is_neg, *threads, *empty_like, *contiguous, *scratch, *keep, *address, *recorded;
} World;
static World world;

/* ---- Looking --------------------------------------------------------------------------------- */

static int is_plain(PyObject *x) {
    PyObject *type = PyObject_Type(x);
    Py_DecRef(type); /* x has it too */
    return type == world.tensor || type == world.parameter;
}

/* A number that a function returns, or -1. */
static long number_of(PyObject *called) {
    PyObject *found = PyObject_CallObject(called, NULL);
    if (!found) return -1;
    long number = found == world.no ? 0 : PyLong_AsLong(found);
    Py_DecRef(found);
    return number;
}

/* Whether an operator would do no more than its kernel and its gradient. */
static int at_rest(void) {
    for (intptr_t i = 0, n = PyTuple_Size(world.looks); i < n; i++)
        if (number_of(PyTuple_GetItem(world.looks, i)) != 0) return 0;
    PyObject *level = PyObject_GetAttr(world.level_of, world.level);
    if (!level) return 0;
    long number = PyLong_AsLong(level);
    Py_DecRef(level);
    return number < 0;
}

/* 1, 0, or -1 for what is none of ours. */
static int wants_gradient(const Site *site, PyObject *given) {
    int asks = number_of(world.grad_enabled) != 0;
    for (int64_t i = 0; i < site->arguments; i++) {
        PyObject *x = PyTuple_GetItem(given, i);
        if (site->is_tensor[i] && x != world.none && !is_plain(x)) return -1;
    }
    for (int64_t i = 0; asks && i < site->arguments; i++) {
        PyObject *x = PyTuple_GetItem(given, i);
        if (!site->is_tensor[i] || x == world.none) continue;
        PyObject *found = PyObject_GetAttr(x, world.requires_grad);
        if (!found) return -1;
        Py_DecRef(found); /* True and False stay */
        if (found != world.no) return 1;
    }
    return 0;
}

/* ---- Describing ------------------------------------------------------------------------------ */

static int read_tensor(PyObject *x, DLTensor *to) {
    return !world.describe(x, to) && to->device == ON_CPU && to->axes <= AXES && to->strides;
}

/* Negatives that are not computed yet are not in the memory; zeros may have none (ZeroTensor). */
static int holds_its_values(PyObject *x) {
    PyObject *found = PyObject_CallFunctionObjArgs(world.is_neg, x, NULL);
    if (found) Py_DecRef(found);
    return found == world.no;
}

static int describe(const Site *site, PyObject *given, Described *d) {
    d->count = d->tensors = 0;
    for (int64_t i = 0; i < site->arguments; i++) {
        if (!site->is_tensor[i]) continue;
        PyObject *x = PyTuple_GetItem(given, i);
        if (x == world.none) {
            d->words[d->count++] = -1;
            continue;
        }
        DLTensor t;
        if (!is_plain(x) || !read_tensor(x, &t) || !t.data || !holds_its_values(x)) return 0;
        d->words[d->count++] =
            (int64_t)t.axes << 32 | (int64_t)t.lanes << 16 | t.code << 8 | t.bits;
        for (int32_t a = 0; a < t.axes; a++) {
            d->words[d->count++] = t.shape[a];
            d->words[d->count++] = t.strides[a];
        }
        d->address[d->tensors++] = t.data + t.byte_offset;
    }
    return 1;
}

static int same_rest(const Site *site, PyObject *given, PyObject *rest) {
    for (int64_t i = 0; i < site->arguments; i++) {
        PyObject *x = PyTuple_GetItem(given, i), *y = PyTuple_GetItem(rest, i);
        if (site->is_tensor[i] || x == y) continue;
        PyObject *of_x = PyObject_Type(x), *of_y = PyObject_Type(y);
        Py_DecRef(of_x);
        Py_DecRef(of_y);
        if (of_x != of_y || PyObject_RichCompareBool(x, y, PY_EQ) != 1) return 0;
    }
    return 1;
}

static const Kept *find(Site *site, PyObject *given, const Described *d) {
    long threads = number_of(world.threads);
    for (int64_t i = 0; i < site->forms; i++) {
        Kept *kept = site->kept[i];
        if (kept->count != d->count || kept->form->threads != threads) continue;
        if (memcmp(kept->words, d->words, (size_t)d->count * sizeof *d->words)) continue;
        if (!same_rest(site, given, kept->form->rest)) continue;
        memmove(site->kept + 1, site->kept, (size_t)i * sizeof *site->kept);
        site->kept[0] = kept;
        return kept;
    }
    return NULL;
}

/* ---- Calling --------------------------------------------------------------------------------- */

static PyObject *nothing(void) {
    PyErr_Clear();
    Py_IncRef(world.none);
    return world.none;
}

/* The tensors that are returned, whose addresses follow those of the arguments. */
static PyObject *allocated(const Form *form, Described *d) {
    PyObject *found = PyTuple_New(form->returned);
    for (intptr_t i = 0; found && i < form->returned; i++) {
        DLTensor t;
        PyObject *x = PyObject_Call(world.empty_like, PyTuple_GetItem(form->empty_arguments, i),
                                    world.contiguous);
        if (!x || !read_tensor(x, &t)) {
            if (x) Py_DecRef(x);
            Py_DecRef(found);
            return NULL;
        }
        PyTuple_SetItem(found, i, x);
        d->address[d->tensors + i] = t.data + t.byte_offset;
    }
    return found;
}

static int call_function(const Form *form, char *structs, char *workspace) {
    void *s[STRUCTS] = {0};
    for (int64_t i = 0; i < form->count; i++) s[i] = structs + form->begins[i];
    size_t bytes = (size_t)form->workspace_bytes;
    if (form->workspace && form->count == 2)
        return ((int (*)(void *, void *, void *, size_t))form->function)(s[0], s[1], workspace,
                                                                         bytes);
    if (form->workspace)
        return ((int (*)(void *, void *, void *, void *, size_t))form->function)(s[0], s[1], s[2],
                                                                                 workspace, bytes);
    if (form->count == 2) return ((int (*)(void *, void *))form->function)(s[0], s[1]);
    return ((int (*)(void *, void *, void *))form->function)(s[0], s[1], s[2]);
}

/* The function's status, which computes while other threads have Python. */
static int compute(const Form *form, const Described *d, char *scratch) {
    int64_t structs[STRUCT_BYTES / 8];
    void *state = PyEval_SaveThread();
    memcpy(structs, form->structs, (size_t)form->bytes);
    for (const Slot *s = form->slots, *end = s + form->slot_count; s < end; s++)
        structs[s->word] = (int64_t)(intptr_t)(d->address[s->tensor] + s->offset);
    for (const Slot *s = form->scratch_slots, *end = s + form->scratch_slot_count; s < end; s++)
        structs[s->word] = (int64_t)(intptr_t)(scratch + s->offset);
    for (int64_t i = 0; i < form->returned; i++)
        if (form->zeroed[i]) memset(d->address[d->tensors + i], 0, (size_t)form->zeroed[i]);
    int status = call_function(form, (char *)structs, scratch + form->workspace_at);
    PyEval_RestoreThread(state);
    return status;
}

static PyObject *run_form(const Form *form, Described *d) {
    PyObject *scratch = PyObject_CallObject(world.scratch, form->scratch_arguments);
    PyObject *address = scratch ? PyObject_GetAttr(scratch, world.address) : NULL;
    PyObject *found = address ? allocated(form, d) : NULL;
    int status = found ? compute(form, d, PyLong_AsVoidPtr(address)) : 0;
    PyObject *kept = found ? PyObject_CallFunctionObjArgs(world.keep, scratch, NULL) : NULL;
    PyObject *done = kept && !status ? found : NULL;
    if (kept && status) done = nothing(); /* the Plan has the words for what is refused */
    if (kept) Py_DecRef(kept);
    if (found && done != found) Py_DecRef(found);
    if (address) Py_DecRef(address);
    if (scratch) Py_DecRef(scratch);
    return done;
}

static PyObject *run(Site *site, PyObject *given) {
    Described d;
    const Kept *kept = describe(site, given, &d) ? find(site, given, &d) : NULL;
    if (!kept) return nothing();
    PyObject *owner = kept->owner; /* another thread may drop the form meanwhile */
    Py_IncRef(owner);
    PyObject *found = run_form(kept->form, &d);
    Py_DecRef(owner);
    if (!found || found == world.none || !site->single) return found;
    PyObject *x = PyTuple_GetItem(found, 0);
    Py_IncRef(x);
    Py_DecRef(found);
    return x;
}

/* ---- What Python calls ----------------------------------------------------------------------- */

/* What the operator returns; `recorded` if the call must be recorded for backward; or None. */
static PyObject *call_at_rest(PyObject *self, PyObject *given) {
    Site *site = PyLong_AsVoidPtr(self);
    if (PyTuple_Size(given) != site->arguments || !at_rest()) return nothing();
    int asks = wants_gradient(site, given);
    if (asks < 0) return nothing();
    if (!asks) return run(site, given);
    Py_IncRef(world.recorded);
    return world.recorded;
}

/* The same for who has looked. */
static PyObject *call(PyObject *self, PyObject *given) {
    Site *site = PyLong_AsVoidPtr(self);
    return PyTuple_Size(given) == site->arguments ? run(site, given) : nothing();
}

static PyMethodDef methods[] = {{"call_at_rest", call_at_rest, METH_O, NULL},
                                {"call", call, METH_O, NULL}};

void nsa_call_world(const World *given) {
    world = *given;
}

/* The places of an operator's arguments, some for tensors. It lives as long as the process. */
Site *nsa_call_site(int64_t arguments, const char *is_tensor, int64_t single) {
    Site *site = arguments <= PLACES ? calloc(1, sizeof *site) : NULL;
    if (!site) return NULL;
    site->arguments = arguments;
    site->single = single;
    memcpy(site->is_tensor, is_tensor, (size_t)arguments);
    return site;
}

/* call_at_rest or call for a site. */
PyObject *nsa_call_method(Site *site, int64_t which) {
    PyObject *self = PyLong_FromVoidPtr(site);
    PyObject *method = self ? PyCFunction_NewEx(methods + which, self, NULL) : NULL;
    if (self) Py_DecRef(self);
    return method;
}

static void drop(Site *site, int64_t from) {
    while (site->forms > from) {
        Kept *kept = site->kept[--site->forms];
        Py_DecRef(kept->owner);
        free(kept);
    }
}

void nsa_call_forget(Site *site) {
    drop(site, 0);
}

/* Adds the form of a call that was done. Its memory is that of `owner`, which is kept. */
void nsa_call_add(Site *site, PyObject *given, const Form *form, PyObject *owner) {
    Described d;
    if (!describe(site, given, &d) || d.tensors + form->returned > TENSORS ||
        find(site, given, &d)) {
        PyErr_Clear();
        return;
    }
    Kept *kept = malloc(sizeof *kept + (size_t)d.count * sizeof *kept->words);
    if (!kept) return; /* it is not needed */
    kept->form = form;
    kept->owner = owner;
    kept->count = d.count;
    memcpy(kept->words, d.words, (size_t)d.count * sizeof *kept->words);
    Py_IncRef(owner);
    drop(site, FORMS - 1);
    memmove(site->kept + 1, site->kept, (size_t)site->forms * sizeof *site->kept);
    site->kept[0] = kept;
    site->forms++;
}

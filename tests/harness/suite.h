/* suite.h - the six questions asked of any primitive that is a struct of tensors, forward and
   backward.
   Twin: none. Used by rope, compress, gate, select and the whole; the attentions ask more of their
   own (attend_tests.h). Not here: formulas; a suite brings its reference along. */
#ifndef NSA_TESTS_SUITE_H
#define NSA_TESTS_SUITE_H

#include "refusals.h"

enum { SLOTS = 40 };

/* What a tensor's rows are: query rows (views start at row `first`), all tokens, compressed blocks,
   or rows of a parameter. */
typedef enum slot_rows { ROWS_QUERY, ROWS_KEY, ROWS_CMP, ROWS_PARAMETER } slot_rows;

enum { DTYPE_UNDER_TEST = -1 };

/* One tensor of a primitive's struct. Its gradient lies at the same place in the gradient struct:
   added to by backward for an input, read by it for an output. */
typedef struct slot {
    const char *name; /* as nsa_status_where says it */
    size_t at;        /* offset of the nsa_tensor */
    slot_rows rows;
    int parameter_rows, heads, width;
    int output;            /* forward writes it */
    int gradient;          /* it has one */
    int optional;          /* NULL is allowed */
    int gradient_optional; /* an output's incoming gradient may be NULL */
    int dtype;             /* DTYPE_UNDER_TEST, or the only one allowed */
    int shared;            /* head stride 0: `heads` is 1, the library sees it under every head */
    int unread;            /* backward does not read it */
    int no_heads;          /* its head stride is not used */
    int sums;              /* a gradient whose strides may be 0: it is summed over */
    int apart;             /* its rows' numbers are desc.gate_stride apart */
    int steers;            /* a NaN in it changes which rows others read: suite_nan leaves it out */
} slot;

typedef struct suite suite;
typedef struct instance instance;

struct suite {
    const char *name;
    size_t struct_size;
    slot slots[SLOTS];
    int count;
    nsa_status (*forward)(const void *x, const nsa_desc *d, void *work, size_t bytes);
    nsa_status (*backward)(const void *dx, const void *x, const nsa_desc *d, void *work,
                           size_t bytes);
    size_t (*forward_size)(const void *x, const nsa_desc *d); /* NULL: takes no workspace */
    size_t (*backward_size)(const void *dx, const void *x, const nsa_desc *d);
    void (*configure)(const suite *s, void *x); /* sets what is no tensor */
    /* One sequence: x[slot] are its rows, outputs are written; with dx not NULL the gradients too,
       those of inputs added to. */
    void (*reference)(const suite *s, const nsa_desc *d, int tokens, ref_prec prec, double **x,
                      double **dx);
    /* Makes inputs that depend on others; may be NULL. */
    void (*prepare)(const suite *s, const nsa_desc *d, double **x);
    /* The forward that finite differences go through, where it is not the primitive's own: one that
       holds the block lists. NULL: forward. */
    void (*held_forward)(instance *p);
    const void *options; /* the primitive's own */
    unsigned unused;     /* fields of the descriptor that it does not look at */
};

static inline slot *suite_add(suite *s, const char *name, size_t at, slot_rows rows, int heads,
                              int width) {
    slot *t = &s->slots[s->count++];
    memset(t, 0, sizeof *t);
    t->name = name, t->at = at, t->rows = rows, t->heads = heads, t->width = width;
    t->dtype = DTYPE_UNDER_TEST;
    return t;
}

static inline nsa_tensor *slot_view(const slot *t, void *x) {
    return (nsa_tensor *)(void *)((unsigned char *)x + t->at);
}

static inline nsa_dtype slot_dtype(const slot *t, nsa_dtype under_test) {
    return t->dtype == DTYPE_UNDER_TEST ? under_test : (nsa_dtype)t->dtype;
}

/* Of the slot's gradient, where those of inputs are asked for in `grad`: a tensor of one dtype has
   a gradient of that. */
static inline nsa_dtype slot_gradient_dtype(const slot *t, nsa_dtype under_test, nsa_dtype grad) {
    return t->output || t->dtype != DTYPE_UNDER_TEST ? slot_dtype(t, under_test) : grad;
}

/* Rows of the slot's dense array, and where those of sequence b begin. */
static inline int slot_rows_of(const slot *t, const plan *p) {
    return t->rows == ROWS_PARAMETER ? t->parameter_rows
           : t->rows == ROWS_CMP     ? p->cmp_rows
                                     : p->rows;
}

static inline size_t slot_begin(const slot *t, const plan *p, int b) {
    int row = t->rows == ROWS_PARAMETER ? 0 : t->rows == ROWS_CMP ? p->cmp_row[b] : p->row[b];
    return (size_t)row * (size_t)t->heads * (size_t)t->width;
}

static inline size_t slot_count(const slot *t, const plan *p) {
    return (size_t)slot_rows_of(t, p) * (size_t)t->heads * (size_t)t->width;
}

/* ---- Values: dense arrays, one for each slot ---- */

typedef struct values {
    double *x[SLOTS], *dx[SLOTS];
} values;

/* Parameters are laid out by the library as (heads, rows, columns); dense arrays here too. */
static inline values values_zero(const suite *s, const nsa_desc *d) {
    plan p = plan_of(d);
    values v;
    memset(&v, 0, sizeof v);
    for (int i = 0; i < s->count; i++) {
        v.x[i] = ref_zeros(slot_count(&s->slots[i], &p));
        v.dx[i] = s->slots[i].gradient ? ref_zeros(slot_count(&s->slots[i], &p)) : NULL;
    }
    return v;
}

/* Inputs, and incoming gradients of outputs, random; the rest 0. */
static inline values values_random(const suite *s, const nsa_desc *d, nsa_dtype dtype,
                                   uint64_t seed) {
    plan p = plan_of(d);
    values v = values_zero(s, d);
    for (int i = 0; i < s->count; i++) {
        const slot *t = &s->slots[i];
        double *to = t->output ? v.dx[i] : v.x[i];
        for (size_t j = 0; to && j < slot_count(t, &p); j++)
            to[j] =
                ref_store(dtype_prec(slot_dtype(t, dtype)), check_normal(seed + (uint64_t)i, j));
    }
    if (s->prepare) s->prepare(s, d, v.x);
    return v;
}

static inline void values_free(values *v) {
    for (int i = 0; i < SLOTS; i++) free(v->x[i]), free(v->dx[i]);
}

static inline values values_copy(const suite *s, const nsa_desc *d, const values *v) {
    plan p = plan_of(d);
    values c = values_zero(s, d);
    for (int i = 0; i < s->count; i++) {
        memcpy(c.x[i], v->x[i], slot_count(&s->slots[i], &p) * sizeof(double));
        if (c.dx[i]) memcpy(c.dx[i], v->dx[i], slot_count(&s->slots[i], &p) * sizeof(double));
    }
    return c;
}

/* Outputs and gradients by the reference. Rows outside the slice bring no gradient and count as
   0. */
static inline values values_reference(const suite *s, const nsa_desc *d, const values *in,
                                      ref_prec prec) {
    plan p = plan_of(d);
    values v = values_copy(s, d, in);
    for (int i = 0; i < s->count; i++)
        if (s->slots[i].output && s->slots[i].gradient && s->slots[i].rows == ROWS_QUERY)
            plan_zero_outside(d, v.dx[i], s->slots[i].heads * s->slots[i].width);
    for (int b = 0; b < p.sequences; b++) {
        double *x[SLOTS] = {NULL}, *dx[SLOTS] = {NULL};
        for (int i = 0; i < s->count; i++) {
            x[i] = v.x[i] + slot_begin(&s->slots[i], &p, b);
            dx[i] = v.dx[i] ? v.dx[i] + slot_begin(&s->slots[i], &p, b) : NULL;
        }
        s->reference(s, d, p.length[b], prec, x, s->backward ? dx : NULL);
    }
    for (int i = 0; i < s->count; i++)
        if (s->slots[i].output && s->slots[i].rows == ROWS_QUERY)
            plan_zero_outside(d, v.x[i], s->slots[i].heads * s->slots[i].width);
    return v;
}

/* By the plain algorithm in the dtype; in f64 that is the reference, which took long enough. */
static inline values values_plain(const suite *s, const nsa_desc *d, const values *in,
                                  nsa_dtype dtype, const values *reference) {
    return dtype_prec(dtype) == REF_F64 ? values_copy(s, d, reference)
                                        : values_reference(s, d, in, dtype_prec(dtype));
}

/* ---- The same as nsa.h's structs ---- */

struct instance {
    const suite *s;
    nsa_desc d;
    tensor x[SLOTS], dx[SLOTS];
    double memory_x[256], memory_dx[256]; /* the structs, and room for the largest of them */
};

static inline void *instance_x(instance *p) {
    return p->memory_x;
}
static inline void *instance_dx(instance *p) {
    return p->memory_dx;
}

static inline tensor slot_tensor(const slot *t, layout form, nsa_dtype dtype, const nsa_desc *d,
                                 size_t shift) {
    if (t->rows != ROWS_PARAMETER)
        return tensor_apart(t->name, form, dtype, d, t->rows == ROWS_CMP, t->heads, t->width, shift,
                            t->apart ? d->gate_stride : 0);
    tensor x = tensor_new(t->name, form, dtype, 1, t->parameter_rows, t->heads, t->width, shift);
    x.view.batch = 54321;
    return x;
}

/* Gradients of inputs begin at `start`'s numbers; outputs are poisoned. */
static inline void instance_new(instance *p, const suite *s, const nsa_desc *d, const values *v,
                                nsa_dtype dtype, nsa_dtype grad, int form, const values *start) {
    memset(p, 0, sizeof *p);
    p->s = s, p->d = *d;
    if (s->struct_size > sizeof p->memory_x) exit(99);
    if (s->configure) s->configure(s, instance_x(p)), s->configure(s, instance_dx(p));
    for (int i = 0; i < s->count; i++) {
        const slot *t = &s->slots[i];
        int64_t first = t->rows == ROWS_QUERY ? d->first : 0;
        nsa_tensor *x = slot_view(t, instance_x(p)), *dx = slot_view(t, instance_dx(p));
        p->x[i] =
            slot_tensor(t, (layout)((form + i) % LAYOUTS), slot_dtype(t, dtype), d, (size_t)i % 7);
        if (!t->output) tensor_put(&p->x[i], v->x[i]);
        *x = view_from(p->x[i].view, 0, first, 0);
        if (t->shared) x->head = 0;
        if (!t->gradient) continue;
        nsa_dtype type = slot_gradient_dtype(t, dtype, grad);
        p->dx[i] = slot_tensor(t, (layout)((form + i + 1) % LAYOUTS), type, d, (size_t)i % 5);
        tensor_put(&p->dx[i], t->output ? v->dx[i] : start->x[i]);
        *dx = view_from(p->dx[i].view, 0, first, 0);
        if (t->shared) dx->head = 0;
    }
}

static inline void instance_open(const tensor *x, slot_rows rows, const nsa_desc *d) {
    if (rows == ROWS_QUERY)
        tensor_open_slice(x, d);
    else
        tensor_open(x);
}

static inline nsa_status instance_forward(instance *p) {
    const suite *s = p->s;
    size_t bytes = s->forward_size ? s->forward_size(instance_x(p), &p->d) : 0;
    guarded *w = workspace_new(bytes, 1);
    for (int i = 0; i < s->count; i++)
        if (s->slots[i].output) instance_open(&p->x[i], s->slots[i].rows, &p->d);
    guards_freeze();
    nsa_status status = s->forward(instance_x(p), &p->d, w->data, bytes);
    guards_verify("forward");
    guards_close();
    guarded_drop(); /* the workspace */
    return status;
}

static inline nsa_status instance_backward(instance *p) {
    const suite *s = p->s;
    size_t bytes = s->backward_size ? s->backward_size(instance_dx(p), instance_x(p), &p->d) : 0;
    guarded *w = workspace_new(bytes, 1);
    for (int i = 0; i < s->count; i++)
        if (s->slots[i].gradient && !s->slots[i].output &&
            slot_view(&s->slots[i], instance_dx(p))->data)
            instance_open(&p->dx[i], s->slots[i].rows, &p->d);
    guards_freeze();
    nsa_status status = s->backward(instance_dx(p), instance_x(p), &p->d, w->data, bytes);
    guards_verify("backward");
    guards_close();
    guarded_drop(); /* the workspace */
    return status;
}

#define CHECK_OK(call, status)                                              \
    CHECK((status) == NSA_OK, "%s: %s (%s)", call, nsa_status_name(status), \
          nsa_status_where(status))

static inline void instance_run(instance *p) {
    nsa_status status = instance_forward(p);
    CHECK_OK("forward", status);
    if (!p->s->backward) return;
    status = instance_backward(p);
    CHECK_OK("backward", status);
}

/* ---- Questions 1 and 3: the reference, in every dtype, layout, slice ---- */

static inline void suite_compare(const char *name, const tensor *x, const nsa_desc *d,
                                 int query_rows, const double *want, const double *plain,
                                 double factor) {
    size_t n = tensor_count(x);
    double *got = ref_zeros(n), *w = copy_numbers(want, n), *b = copy_numbers(plain, n);
    tensor_get(x, got);
    if (query_rows) {
        plan_zero_outside(d, got, x->heads * x->width);
        plan_zero_outside(d, w, x->heads * x->width);
        plan_zero_outside(d, b, x->heads * x->width);
    }
    check_empty_rows(got, w, b, n);
    CHECK_NEAR(name, got, w, n, (size_t)x->width, allowed_error(factor, w, b, n));
    free(got), free(w), free(b);
}

/* Gradients in a low precision begin at 0, so that one rounding is compared with one. */
static inline values values_start(const suite *s, const nsa_desc *d, nsa_dtype dtype,
                                  nsa_dtype grad) {
    values start = values_zero(s, d);
    plan p = plan_of(d);
    for (int i = 0; i < s->count; i++)
        for (size_t j = 0;
             (dtype == NSA_REAL_DTYPE || grad != dtype) && j < slot_count(&s->slots[i], &p); j++)
            start.x[i][j] = ref_store(dtype_prec(grad), check_normal(500 + (uint64_t)i, j));
    return start;
}

/* Every float output and gradient of an instance that has run. Gradients began at `start`. */
static inline void suite_compare_all(const instance *p, const values *want, const values *plain,
                                     const values *start, nsa_dtype grad) {
    const suite *s = p->s;
    plan rows = plan_of(&p->d);
    for (int i = 0; i < s->count; i++) {
        const slot *t = &s->slots[i];
        int query = t->rows == ROWS_QUERY;
        size_t n = slot_count(t, &rows);
        if (t->output && t->dtype != NSA_I32)
            suite_compare(t->name, &p->x[i], &p->d, query, want->x[i], plain->x[i], 2);
        if (t->output || !t->gradient || !s->backward) continue;
        char name[64];
        double *w = copy_numbers(want->dx[i], n), *b = copy_numbers(plain->dx[i], n);
        for (size_t j = 0; j < n; j++) {
            w[j] += start->x[i][j];
            nsa_dtype type = slot_gradient_dtype(t, grad, grad);
            b[j] = ref_store(dtype_prec(type), b[j] + start->x[i][j]);
        }
        snprintf(name, sizeof name, "dx.%s", t->name);
        suite_compare(name, &p->dx[i], &p->d, query, w, b, 3);
        free(w), free(b);
    }
}

static inline void suite_reference_one(const suite *s, const nsa_desc *d, const values *in,
                                       const values *want, const values *plain, nsa_dtype dtype,
                                       nsa_dtype grad, int form) {
    instance p;
    values start = values_start(s, d, dtype, grad);
    instance_new(&p, s, d, in, dtype, grad, form, &start);
    instance_run(&p);
    suite_compare_all(&p, want, plain, &start, grad);
    values_free(&start);
    guards_free();
}

/* The whole and a slice, for each instruction set, each with other layouts, threads, gradient
   dtypes. */
static inline void suite_reference(const suite *s, const nsa_desc *whole, nsa_dtype dtype,
                                   uint64_t seed) {
    for (int slice = 0; slice < 2; slice++) {
        nsa_desc d = *whole;
        if (slice) d.first = d.tokens / 3, d.count = (d.tokens + 1) / 2;
        values in = values_random(s, &d, dtype, seed);
        values want = values_reference(s, &d, &in, REF_F64);
        values plain = values_plain(s, &d, &in, dtype, &want);
        for (int i = 0; i < COUNT(isas); i++) {
            if (!nsa_isa_available(isas[i])) continue;
            d.isa = isas[i];
            d.threads = 1 + (i + (int)seed) % 3;
            nsa_dtype grad = (i + slice) % 2 ? NSA_REAL_DTYPE : dtype;
            check_case("%s, %s, gradients %s, isa %s, rows %d + %d", s->name, dtype_name(dtype),
                       dtype_name(grad), nsa_isa_name(d.isa), d.first, d.count);
            suite_reference_one(s, &d, &in, &want, &plain, dtype, grad, i + (int)seed + slice);
        }
        values_free(&in), values_free(&want), values_free(&plain);
    }
}

/* ---- Bits: run to run, threads, layouts, slices, sequences alone, causality ---- */

typedef struct suite_bits {
    unsigned char *x[SLOTS], *dx[SLOTS]; /* outputs, and gradients of inputs */
} suite_bits;

static inline suite_bits bits_take(const instance *p) {
    suite_bits b;
    memset(&b, 0, sizeof b);
    for (int i = 0; i < p->s->count; i++) {
        const slot *t = &p->s->slots[i];
        if (t->output)
            b.x[i] = tensor_bits(&p->x[i]);
        else if (t->gradient && p->s->backward)
            b.dx[i] = tensor_bits(&p->dx[i]);
    }
    return b;
}

static inline void bits_free(suite_bits *b) {
    for (int i = 0; i < SLOTS; i++) free(b->x[i]), free(b->dx[i]);
}

static inline suite_bits bits_of(const suite *s, const nsa_desc *d, const values *v,
                                 nsa_dtype dtype, int form) {
    instance p;
    values zeros = values_zero(s, d);
    instance_new(&p, s, d, v, dtype, dtype, form, &zeros);
    instance_run(&p);
    suite_bits b = bits_take(&p);
    values_free(&zeros);
    guards_free();
    return b;
}

/* Rows a_row.. of a are rows b_row.. of b, `rows` of them, in slot i. Parameters are skipped:
   they sum over rows. */
static inline void same_rows(const suite *s, int i, const suite_bits *a, int a_row,
                             const suite_bits *b, int b_row, int rows, nsa_dtype dtype) {
    const slot *t = &s->slots[i];
    size_t row = (size_t)(t->heads * t->width) * dtype_size(slot_dtype(t, dtype));
    if (rows <= 0) return;
    if (a->x[i])
        CHECK_BITS(t->name, a->x[i] + (size_t)a_row * row, b->x[i] + (size_t)b_row * row,
                   (size_t)rows * row, row);
    if (a->dx[i])
        CHECK_BITS(t->name, a->dx[i] + (size_t)a_row * row, b->dx[i] + (size_t)b_row * row,
                   (size_t)rows * row, row);
}

static inline void same_bits(const suite *s, const nsa_desc *d, const suite_bits *a,
                             const suite_bits *b, nsa_dtype dtype) {
    plan p = plan_of(d);
    for (int i = 0; i < s->count; i++)
        same_rows(s, i, a, 0, b, 0, slot_rows_of(&s->slots[i], &p), dtype);
}

static inline void suite_deterministic(const suite *s, const nsa_desc *whole, nsa_dtype dtype) {
    static const int threads[] = {1, 1, 2, 3, 7, 0};
    nsa_desc d = *whole;
    values v = values_random(s, &d, dtype, 600);
    suite_bits first = {{NULL}, {NULL}};
    for (int i = 0; i < COUNT(threads); i++) {
        d.threads = threads[i];
        check_case("%s, %s, run %d, threads %d", s->name, dtype_name(dtype), i, threads[i]);
        suite_bits b = bits_of(s, &d, &v, dtype, i);
        if (i)
            same_bits(s, &d, &b, &first, dtype), bits_free(&b);
        else
            first = b;
    }
    bits_free(&first);
    values_free(&v);
}

/* Rows in slices of queries have the bits of the whole, and so have the gradients of query rows. */
static inline void suite_slices(const suite *s, const nsa_desc *d, nsa_dtype dtype) {
    int T = d->tokens, cut[] = {0, T / 3, T / 3 + 1, T - T / 4, T - T / 20, T};
    values v = values_random(s, d, dtype, 610), zeros = values_zero(s, d);
    instance p;
    suite_bits whole = bits_of(s, d, &v, dtype, 0);
    instance_new(&p, s, d, &v, dtype, dtype, 2, &zeros);
    for (int k = 0; k + 1 < COUNT(cut); k++) {
        p.d.first = cut[k], p.d.count = cut[k + 1] - cut[k];
        check_case("%s, %s, rows %d + %d", s->name, dtype_name(dtype), p.d.first, p.d.count);
        for (int i = 0; i < s->count; i++) {
            const slot *t = &s->slots[i];
            nsa_tensor *dx = slot_view(t, instance_dx(&p));
            if (t->rows == ROWS_QUERY)
                *slot_view(t, instance_x(&p)) = view_from(p.x[i].view, 0, cut[k], 0);
            if (t->rows == ROWS_QUERY && t->gradient) *dx = view_from(p.dx[i].view, 0, cut[k], 0);
            if (t->rows != ROWS_QUERY && t->gradient && !t->output) dx->data = NULL;
        }
        instance_run(&p);
    }
    suite_bits pieces = bits_take(&p);
    plan rows = plan_of(d);
    check_case("%s, %s, slices against the whole", s->name, dtype_name(dtype));
    for (int i = 0; i < s->count; i++)
        if (s->slots[i].rows == ROWS_QUERY || s->slots[i].output)
            same_rows(s, i, &pieces, 0, &whole, 0, slot_rows_of(&s->slots[i], &rows), dtype);
    bits_free(&whole), bits_free(&pieces);
    values_free(&v), values_free(&zeros);
    guards_free();
}

/* The values of one sequence, cut to `tokens`, as borrowed pointers. */
static inline values values_of_sequence(const suite *s, const nsa_desc *d, const values *v, int b) {
    plan p = plan_of(d);
    values one = *v;
    for (int i = 0; i < s->count; i++) {
        one.x[i] += slot_begin(&s->slots[i], &p, b);
        if (one.dx[i]) one.dx[i] += slot_begin(&s->slots[i], &p, b);
    }
    return one;
}

/* Each sequence of a batch has the bits of that sequence alone. */
static inline void suite_alone(const suite *s, const nsa_desc *d, nsa_dtype dtype) {
    plan p = plan_of(d);
    values v = values_random(s, d, dtype, 620);
    check_case("%s, %s, the batch", s->name, dtype_name(dtype));
    suite_bits all = bits_of(s, d, &v, dtype, 1);
    for (int b = 0; b < p.sequences; b++) {
        nsa_desc one = *d;
        one.batch = 1, one.begins = NULL, one.tokens = one.count = p.length[b];
        values w = values_of_sequence(s, d, &v, b);
        check_case("%s, %s, sequence %d alone", s->name, dtype_name(dtype), b);
        suite_bits alone = bits_of(s, &one, &w, dtype, 0);
        for (int i = 0; i < s->count; i++) {
            slot_rows rows = s->slots[i].rows;
            if (rows == ROWS_PARAMETER) continue;
            same_rows(s, i, &alone, 0, &all, rows == ROWS_CMP ? p.cmp_row[b] : p.row[b],
                      rows == ROWS_CMP ? p.cmp_count[b] : p.length[b], dtype);
        }
        bits_free(&alone);
    }
    bits_free(&all);
    values_free(&v);
}

/* How many rows of a slot no token after t reaches. */
static inline int rows_until(const slot *t, const nsa_desc *d, int token) {
    return t->rows == ROWS_PARAMETER ? t->parameter_rows
           : t->rows == ROWS_CMP     ? nsa_cmp_visible(d, token)
                                     : token + 1;
}

/* Tokens after t changed, gradients too: what belongs to earlier queries keeps its bits. */
static inline void suite_causal(const suite *s, const nsa_desc *d, nsa_dtype dtype) {
    if (d->begins || d->batch != 1) return;
    int at[] = {d->cmp_block - 1, d->slc_block - 1, d->tokens / 2, 0,
                d->cmp_block - 2, d->slc_block,     d->tokens - 2};
    plan p = plan_of(d);
    values v = values_random(s, d, dtype, 630), other = values_random(s, d, dtype, 640);
    suite_bits all = bits_of(s, d, &v, dtype, 0);
    for (int k = 0; k < COUNT(at); k++) {
        if (at[k] < 0 || at[k] >= d->tokens - 1) continue;
        values w = values_copy(s, d, &v);
        for (int i = 0; i < s->count; i++) {
            const slot *t = &s->slots[i];
            size_t keep = (size_t)(rows_until(t, d, at[k]) * t->heads * t->width),
                   n = slot_count(t, &p);
            if (t->rows == ROWS_PARAMETER || keep >= n) continue;
            memcpy(w.x[i] + keep, other.x[i] + keep, (n - keep) * sizeof(double));
            if (w.dx[i]) memcpy(w.dx[i] + keep, other.dx[i] + keep, (n - keep) * sizeof(double));
        }
        check_case("%s, %s, tokens after %d changed", s->name, dtype_name(dtype), at[k]);
        suite_bits changed = bits_of(s, d, &w, dtype, 0);
        for (int i = 0; i < s->count; i++)
            if (s->slots[i].output || s->slots[i].rows == ROWS_QUERY)
                same_rows(s, i, &changed, 0, &all, 0, rows_until(&s->slots[i], d, at[k]), dtype);
        bits_free(&changed);
        values_free(&w);
    }
    bits_free(&all);
    values_free(&v), values_free(&other);
}

/* ---- Values that are not finite ---- */

static inline int row_has_nan(const double *row, int width) {
    for (int c = 0; c < width; c++)
        if (isnan(row[c])) return 1;
    return 0;
}

/* Rows of a result hold a NaN exactly where the reference's do; every other row has the bits
   that it had. */
static inline void check_nan_rows(const char *name, const tensor *x, const double *want,
                                  const unsigned char *clean, const unsigned char *bad) {
    size_t n = tensor_count(x), row = (size_t)x->width * dtype_size(x->view.dtype);
    double *got = ref_zeros(n);
    tensor_get(x, got);
    const char *wrong = NULL;
    size_t r = 0;
    for (; x->width && r < n / (size_t)x->width; r++) {
        int wanted = row_has_nan(want + r * (size_t)x->width, x->width);
        int nan = row_has_nan(got + r * (size_t)x->width, x->width);
        if (nan && !wanted)
            wrong = "has a NaN that it never read";
        else if (wanted && !nan)
            wrong = "lost its NaN";
        else if (!wanted && memcmp(clean + r * row, bad + r * row, row))
            wrong = "changed";
        if (wrong) break;
    }
    CHECK(!wrong, "%s: row %zu %s", name, r, wrong);
    free(got);
}

/* A NaN in one row of one input reaches what the formulas say and nothing else. i32 outputs stay
   valid, which the suite's own test sees to. */
static inline void suite_nan(const suite *s, const nsa_desc *d, nsa_dtype dtype) {
    if (d->begins) return; /* packed rows that belong to no sequence are poison, which is NaN */
    plan p = plan_of(d);
    values v = values_random(s, d, dtype, 650);
    for (int bad = 0; bad < s->count; bad++) {
        const slot *t = &s->slots[bad];
        int rows = slot_rows_of(t, &p);
        if (t->dtype != DTYPE_UNDER_TEST || (t->output && !t->gradient) || !rows ||
            t->rows == ROWS_PARAMETER || t->steers)
            continue;
        values w = values_copy(s, d, &v);
        double *into = t->output ? w.dx[bad] : w.x[bad];
        instance clean, dirty;
        into[(rows / 3 * t->heads + t->heads - 1) * t->width + t->width / 2] = NAN;
        check_case("%s, %s, NaN in %s%s", s->name, dtype_name(dtype), t->output ? "dx." : "",
                   t->name);
        values zeros = values_zero(s, d);
        instance_new(&clean, s, d, &v, dtype, dtype, 0, &zeros);
        instance_new(&dirty, s, d, &w, dtype, dtype, 0, &zeros);
        instance_run(&clean), instance_run(&dirty);
        suite_bits a = bits_take(&clean), b = bits_take(&dirty);
        for (int i = 0; i < s->count; i++) /* the reference goes on with the block lists found */
            if (s->slots[i].output && s->slots[i].dtype == NSA_I32) tensor_get(&dirty.x[i], w.x[i]);
        values want = values_reference(s, d, &w, REF_F64);
        for (int i = 0; i < s->count; i++) {
            if (a.x[i] && s->slots[i].dtype != NSA_I32)
                check_nan_rows(s->slots[i].name, &dirty.x[i], want.x[i], a.x[i], b.x[i]);
            if (a.dx[i] && s->slots[i].rows != ROWS_PARAMETER)
                check_nan_rows(s->slots[i].name, &dirty.dx[i], want.dx[i], a.dx[i], b.dx[i]);
        }
        bits_free(&a), bits_free(&b);
        values_free(&w), values_free(&zeros), values_free(&want);
        guards_free();
    }
    values_free(&v);
}

/* ---- Question 2: finite differences in every number of every input ---- */

static inline double suite_loss(instance *p, const values *v, void *work, size_t bytes) {
    const suite *s = p->s;
    double sum = 0;
    if (s->held_forward)
        s->held_forward(p);
    else
        CHECK(s->forward(instance_x(p), &p->d, work, bytes) == NSA_OK, "forward");
    for (int i = 0; i < s->count; i++) {
        if (!s->slots[i].output || !s->slots[i].gradient) continue;
        size_t n = tensor_count(&p->x[i]);
        double *out = ref_zeros(n);
        tensor_get(&p->x[i], out);
        if (s->slots[i].rows == ROWS_QUERY)
            plan_zero_outside(&p->d, out, p->x[i].heads * p->x[i].width);
        for (size_t j = 0; j < n; j++) sum += out[j] * v->dx[i][j];
        free(out);
    }
    return sum;
}

static inline void suite_gradcheck(const suite *s, const nsa_desc *d) {
    const double h = 1e-5;
    values v = values_random(s, d, NSA_F64, 700), zeros = values_zero(s, d);
    instance p;
    instance_new(&p, s, d, &v, NSA_F64, NSA_F64, 3, &zeros);
    instance_run(&p);
    size_t bytes = s->forward_size ? s->forward_size(instance_x(&p), d) : 0;
    void *work = check_alloc(bytes);
    for (int i = 0; i < s->count; i++) {
        const slot *t = &s->slots[i];
        if (t->output || !t->gradient) continue;
        size_t n = tensor_count(&p.x[i]), at = 0;
        double *analytic = ref_zeros(n), worst = 0;
        tensor_get(&p.dx[i], analytic);
        for (size_t j = 0; j < n; j++) {
            double x = v.x[i][j], up, down;
            v.x[i][j] = x + h, tensor_put(&p.x[i], v.x[i]);
            up = suite_loss(&p, &v, work, bytes);
            v.x[i][j] = x - h, tensor_put(&p.x[i], v.x[i]);
            down = suite_loss(&p, &v, work, bytes);
            v.x[i][j] = x, tensor_put(&p.x[i], v.x[i]);
            double error = gradient_error(analytic[j], (up - down) / (2 * h));
            if (error > worst || isnan(error)) worst = error, at = j;
        }
        check_case("%s, gradcheck", s->name);
        CHECK(worst <= 1e-7, "gradient of %s: error %.3g > 1e-7 at %zu", t->name, worst, at);
        free(analytic);
    }
    free(work);
    values_free(&v), values_free(&zeros);
    guards_free();
}

/* ---- Question 6: refusals, and calls that have nothing to do ---- */

typedef struct suite_call {
    instance *p;
    void *work;
    size_t bytes;
    int null_x, null_dx;
} suite_call;

static inline nsa_status call_suite_forward(void *arguments) {
    suite_call *c = (suite_call *)arguments;
    return c->p->s->forward(c->null_x ? NULL : instance_x(c->p), &c->p->d, c->work, c->bytes);
}

static inline nsa_status call_suite_backward(void *arguments) {
    suite_call *c = (suite_call *)arguments;
    return c->p->s->backward(c->null_dx ? NULL : instance_dx(c->p),
                             c->null_x ? NULL : instance_x(c->p), &c->p->d, c->work, c->bytes);
}

static inline void refuse_call(const refusal *r, suite_call *c, int is_backward) {
    c->null_x = 1;
    refused(r, "null struct", NSA_ERROR_NULL, "arguments");
    c->null_x = 0, c->null_dx = is_backward;
    if (is_backward) refused(r, "null gradient struct", NSA_ERROR_NULL, "dx.arguments");
    c->null_dx = 0;
    if (!c->bytes) return;
    const suite_call good = *c;
    c->bytes = good.bytes - 1;
    refused(r, "workspace one byte short", NSA_ERROR_WORKSPACE, "workspace");
    *c = good, c->work = NULL;
    refused(r, "workspace null", NSA_ERROR_WORKSPACE, "workspace");
    *c = good;
}

/* An instance of the geometry that refused_fields speaks of, ready to be spoiled. */
typedef struct spoiled {
    instance p;
    suite_call forward_call, backward_call;
    refusal forward, backward;
} spoiled;

static inline void spoiled_new(spoiled *b, const suite *s, const nsa_desc *d) {
    values v = values_random(s, d, NSA_REAL_DTYPE, 710), zeros = values_zero(s, d);
    instance_new(&b->p, s, d, &v, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, &zeros);
    b->p.d.threads = 1;                /* with more, a short workspace means fewer */
    for (int i = 0; i < s->count; i++) /* empty lists, which backward takes */
        if (s->slots[i].output && slot_dtype(&s->slots[i], NSA_REAL_DTYPE) == NSA_I32)
            tensor_no_blocks(&b->p.x[i]);
    void *x = instance_x(&b->p), *dx = instance_dx(&b->p);
    guarded *w = guarded_new("workspace", s->forward_size ? s->forward_size(x, &b->p.d) : 0, 1);
    guarded *w2 =
        guarded_new("workspace", s->backward_size ? s->backward_size(dx, x, &b->p.d) : 0, 1);
    suite_call forward_call = {&b->p, w->data, w->bytes, 0, 0},
               backward_call = {&b->p, w2->data, w2->bytes, 0, 0};
    b->forward_call = forward_call, b->backward_call = backward_call;
    refusal forward = {"forward", call_suite_forward, &b->forward_call, &b->p.d, s->unused};
    refusal backward = {"backward", call_suite_backward, &b->backward_call, &b->p.d, s->unused};
    b->forward = forward, b->backward = backward;
    values_free(&v), values_free(&zeros);
}

/* Fields that the call does not look at may hold anything, and change no bit. */
static inline void suite_unused(spoiled *b) {
    const suite *s = b->p.s;
    CHECK_OK("forward", call_suite_forward(&b->forward_call));
    suite_bits clean = bits_take(&b->p);
    unused_hold_anything(&b->forward);
    suite_bits spoilt = bits_take(&b->p);
    same_bits(s, &b->p.d, &clean, &spoilt, NSA_REAL_DTYPE);
    bits_free(&clean), bits_free(&spoilt);
    if (s->backward) unused_hold_anything(&b->backward);
}

/* Without queries the views on their side may be absent, of any dtype; those of keys may not. */
static inline void suite_no_queries(spoiled *b) {
    const suite *s = b->p.s;
    const nsa_tensor none = {NULL, NSA_I32, 0, 0, 0};
    void *x = instance_x(&b->p), *dx = instance_dx(&b->p);
    b->p.d.count = 0;
    for (int i = 0; i < s->count; i++)
        if (s->slots[i].rows == ROWS_QUERY)
            *slot_view(&s->slots[i], x) = *slot_view(&s->slots[i], dx) = none;
    check_case("%s without queries", s->name);
    CHECK_OK("forward", call_suite_forward(&b->forward_call));
    if (s->backward) CHECK_OK("backward", call_suite_backward(&b->backward_call));
    for (int i = 0; i < s->count; i++) {
        const slot *t = &s->slots[i];
        if (t->rows == ROWS_QUERY || t->optional) continue;
        nsa_tensor *view = slot_view(t, x), good = *view;
        view->data = NULL;
        refused(&b->forward, "null, without queries", NSA_ERROR_NULL, t->name);
        if (s->backward && !t->output && !t->unread)
            refused(&b->backward, "null, without queries", NSA_ERROR_NULL, t->name);
        *view = good;
    }
}

static inline void suite_refusals(const suite *s, const nsa_desc *d) {
    spoiled b;
    spoiled_new(&b, s, d);
    refuse_call(&b.forward, &b.forward_call, 0);
    refuse_desc(&b.forward);
    if (s->backward) refuse_call(&b.backward, &b.backward_call, 1);
    if (s->backward) refuse_desc(&b.backward);
    if (s->unused) suite_unused(&b);
    for (int i = 0; i < s->count; i++) {
        const slot *t = &s->slots[i];
        char name[64];
        int one_row = t->rows == ROWS_PARAMETER && t->parameter_rows == 1;
        nsa_dtype wrong = t->dtype == NSA_I32 ? NSA_F32 : NSA_I32;
        refused_tensor x = {t->name,      slot_view(t, instance_x(&b.p)),
                            !t->optional, t->output,
                            wrong,        t->no_heads,
                            one_row,      0};
        refuse_tensor(&b.forward, &x);
        if (!t->gradient || !s->backward) continue;
        snprintf(name, sizeof name, "dx.%s", t->name);
        refused_tensor dx = {name,
                             slot_view(t, instance_dx(&b.p)),
                             t->output && !t->gradient_optional,
                             !t->output && !t->shared,
                             wrong,
                             t->no_heads,
                             one_row,
                             t->sums};
        refuse_tensor(&b.backward, &dx);
        x.output = 0;
        if (!t->output && !t->unread) refuse_tensor(&b.backward, &x);
    }
    suite_no_queries(&b);
    guards_free();
}

/* Gradients of gates that share elements with those of other heads are refused. */
static inline void suite_refuse_gates(const suite *s, const nsa_desc *d, const char *where) {
    spoiled b;
    spoiled_new(&b, s, d);
    b.p.d.gate_stride = 2;
    refused(&b.backward, "gates of neighbouring heads interleaved", NSA_ERROR_STRIDE, where);
    guards_free();
}

/* No tokens, no rows, only empty sequences: valid, and nothing is written. */
static inline void suite_nothing_to_do(const suite *s, const nsa_desc *d, nsa_dtype dtype) {
    static const int32_t empty[] = {0, 0, 0}, shifted[] = {4, 4, 4};
    if (d->begins || d->batch != 2) return;
    nsa_desc cases[] = {*d, *d, *d};
    cases[0].tokens = cases[0].count = 0;
    cases[1].begins = empty;
    cases[2].begins = shifted, cases[2].tokens = cases[2].count = 0;
    for (int k = 0; k < COUNT(cases); k++) {
        /* On CUDA begins lie on the device: the host takes a view of no rows for one whose rows
           overlap. */
        if (CHECKS_CUDA && cases[k].begins == empty) continue;
        values v = values_random(s, &cases[k], dtype, 720), zeros = values_zero(s, &cases[k]);
        plan p = plan_of(&cases[k]);
        instance q;
        check_case("%s, %s, nothing to do, %d", s->name, dtype_name(dtype), k);
        instance_new(&q, s, &cases[k], &v, dtype, dtype, 0, &zeros);
        instance_run(&q);
        suite_bits b = bits_take(&q);
        int clean = 1;
        for (int i = 0; i < s->count; i++) {
            nsa_dtype its = slot_dtype(&s->slots[i], dtype);
            size_t bytes = slot_count(&s->slots[i], &p) * dtype_size(its);
            int poison = its == NSA_I32 ? CHECK_POISON_INT : CHECK_POISON;
            for (size_t j = 0; j < bytes; j++)
                clean &= (!b.x[i] || b.x[i][j] == poison) && (!b.dx[i] || b.dx[i][j] == 0);
        }
        CHECK(clean, "something was written");
        bits_free(&b);
        values_free(&v), values_free(&zeros);
        guards_free();
    }
}

/* A case outside of what CUDA takes is refused by the field's name, and not asked anything more.
   `where` is a field of the struct, or NULL if that is within. */
static inline int suite_refused(const suite *s, const nsa_desc *d, const char *where) {
    double x[256] = {0};
    if (!CHECKS_CUDA || !(where = refused_by(d) ? refused_by(d) : where)) return 0;
    if (s->configure) s->configure(s, x);
    nsa_status status = s->forward(x, d, NULL, 0);
    check_case("%s, outside of CUDA's limits", s->name);
    CHECK(!strcmp(nsa_status_where(status), where), "blamed \"%s\", wanted \"%s\"",
          nsa_status_where(status), where);
    return 1;
}

/* Begins that hold anything: accepted, and no kernel leaves its memory, which the device sees
   to. */
static inline void suite_any_begins(const suite *s, const nsa_desc *of, nsa_dtype dtype) {
    nsa_desc d = roomy_desc(of);
    if (!ANY_BEGINS || !of->begins) return;
    values v = values_random(s, &d, dtype, 730), zeros = values_zero(s, &d);
    for (int trial = 0; trial < ANY_BEGINS; trial++) {
        int32_t begins[5];
        instance p;
        any_begins(trial, &d, begins);
        check_case("%s, %s, any begins, %d %d %d %d", s->name, dtype_name(dtype), begins[0],
                   begins[1], begins[2], begins[3]);
        instance_new(&p, s, &d, &v, dtype, dtype, trial, &zeros);
        p.d.begins = begins;
        void *x = instance_x(&p), *dx = instance_dx(&p);
        size_t bytes = s->forward_size ? s->forward_size(x, &p.d) : 0;
        nsa_status status = s->forward(x, &p.d, workspace_new(bytes, 1)->data, bytes);
        CHECK_OK("forward", status);
        bytes = s->backward_size ? s->backward_size(dx, x, &p.d) : 0;
        if (s->backward) status = s->backward(dx, x, &p.d, workspace_new(bytes, 1)->data, bytes);
        CHECK_OK("backward", status);
        guards_free();
    }
    values_free(&v), values_free(&zeros);
}

/* Everything but the reference and the refusals, which the programs ask for one by one. */
static inline void suite_bit_tests(const suite *s, const nsa_desc *d, nsa_dtype dtype) {
    suite_slices(s, d, dtype);
#ifndef CHECK_RACES /* bits are for the other builds: that one looks at accesses, and is slow */
    suite_deterministic(s, d, dtype);
    suite_alone(s, d, dtype);
    suite_causal(s, d, dtype);
    suite_nothing_to_do(s, d, dtype);
    suite_any_begins(s, d, dtype);
#endif
}

/* Every how many-th case is asked for; of `least` the first alone. */
static inline int asked_step(int argc, char **argv, int quick, int little) {
    const amount a = asked_amount(argc, argv);
    return a == LEAST ? 1000 : a == LITTLE ? little : a == WHOLE ? 1 : quick;
}

#endif

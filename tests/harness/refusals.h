/* refusals.h - bad input, by table: every field of a descriptor and every tensor of a struct.
   Twin: nsa.h's nsa_status. A refused call must say the right kind and field, and touch nothing. */
#ifndef NSA_TESTS_REFUSALS_H
#define NSA_TESTS_REFUSALS_H

#include <limits.h>
#include <stddef.h>

#include "cases.h"

/* A call to be refused; the fields that a test spoils lie behind `arguments`. */
typedef struct refusal {
    const char *name;
    nsa_status (*call)(void *arguments);
    void *arguments;
    nsa_desc *d;
    unsigned unused; /* fields that the call does not look at */
} refusal;

enum {
    UNUSED_CMP = 1,   /* cmp_block, cmp_stride */
    UNUSED_SLC = 2,   /* slc_block, slc_count */
    UNUSED_FORCED = 4 /* slc_init, slc_local */
};

/* Little runs leave refusals to the others: they are host code, the same in every mode of the
   executor, and each copies all buffers to the device and back. */
static int refusals_left_out;

/* The argument of a test program: nothing, "quick", "least", "little" and "broad" (under the
   executor); of attention alone "slow", and "refusals", which takes the shortest. */
static inline int asked(int argc, char **argv, const char *what) {
    return argc > 1 && !strcmp(argv[1], what);
}

static inline amount asked_amount(int argc, char **argv) {
    refusals_left_out = asked(argc, argv, "little") || asked(argc, argv, "least");
    if (refusals_left_out) return asked(argc, argv, "least") ? LEAST : LITTLE;
    return asked(argc, argv, "quick") ? QUICK : asked(argc, argv, "broad") ? BROAD : WHOLE;
}

static inline void refused(const refusal *r, const char *what, int kind, const char *where) {
    if (refusals_left_out) return;
    check_case("%s, refusal: %s", r->name, what);
    guards_freeze();
    nsa_status s = r->call(r->arguments);
    guards_verify("a refused call");
    CHECK(nsa_status_kind(s) == kind, "returned %s (%s), wanted kind %d", nsa_status_name(s),
          nsa_status_where(s), kind);
    CHECK(!strcmp(nsa_status_where(s), where), "blamed \"%s\", wanted \"%s\" (%s)",
          nsa_status_where(s), where, nsa_status_name(s));
    CHECK(strlen(nsa_status_text(s)) > 10, "no text for %s", nsa_status_name(s));
}

/* What is required of one tensor of a struct. */
typedef struct refused_tensor {
    const char *name;
    nsa_tensor *x;
    int needed; /* NULL is refused */
    int output; /* its rows may not overlap */
    nsa_dtype wrong;
    int no_heads; /* its head stride is not used */
    int one_row;  /* nor its token stride */
    int sums;     /* a token stride of 0 is a sum over the tokens */
} refused_tensor;

static inline void refuse_tensor(const refusal *r, const refused_tensor *t) {
    const nsa_tensor good = *t->x;
    if (t->needed) {
        t->x->data = NULL;
        refused(r, "null", NSA_ERROR_NULL, t->name);
        *t->x = good;
    }
    t->x->data = (unsigned char *)good.data + 1;
    refused(r, "one byte off", NSA_ERROR_ALIGNMENT, t->name);
    *t->x = good;
    t->x->dtype = t->wrong;
    refused(r, "wrong dtype", NSA_ERROR_DTYPE, t->name);
    t->x->dtype = (nsa_dtype)77;
    refused(r, "no dtype", NSA_ERROR_DTYPE, t->name);
    *t->x = good;
    t->x->head = -1;
    if (!t->no_heads) refused(r, "negative head stride", NSA_ERROR_STRIDE, t->name);
    *t->x = good;
    if (t->one_row) return;
    t->x->token = -good.token;
    refused(r, "negative token stride", NSA_ERROR_STRIDE, t->name);
    *t->x = good;
    t->x->token = INT64_MAX / 2;
    refused(r, "token stride past the address space", NSA_ERROR_OVERFLOW, t->name);
    *t->x = good;
    if (t->output) {
        t->x->token = 0;
        if (!t->sums) refused(r, "all rows at one place", NSA_ERROR_STRIDE, t->name);
        *t->x = good;
        t->x->token = t->x->head = 1;
        refused(r, "rows one element apart", NSA_ERROR_STRIDE, t->name);
        *t->x = good;
    }
}

/* One wrong value of one int field of a descriptor. */
typedef struct refused_field {
    const char *name;
    size_t at;
    int value, kind;
} refused_field;

#define FIELD(f, value, kind) \
    { #f, offsetof(nsa_desc, f), value, kind }
/* clang-format off: a table is read in columns. */
/* For a descriptor with l 8, d 4, l' 16, n 3 (1 first, 1 local), H 4, Hk 2, one of the small
   geometry. */
static const refused_field refused_fields[] = {
    FIELD(batch, 0, NSA_ERROR_SIZE),
    FIELD(batch, -1, NSA_ERROR_SIZE),
    FIELD(batch, INT_MIN, NSA_ERROR_SIZE),
    FIELD(tokens, -1, NSA_ERROR_SIZE),
    FIELD(tokens, INT_MIN, NSA_ERROR_SIZE),
    FIELD(rows, -1, NSA_ERROR_SIZE),
    FIELD(heads, 0, NSA_ERROR_SIZE),
    FIELD(heads, -4, NSA_ERROR_SIZE),
    FIELD(heads, 5, NSA_ERROR_HEADS),
    FIELD(kv_heads, 0, NSA_ERROR_SIZE),
    FIELD(kv_heads, -2, NSA_ERROR_SIZE),
    FIELD(dim, 0, NSA_ERROR_SIZE),
    FIELD(dim, -16, NSA_ERROR_SIZE),
    FIELD(dim, 577, NSA_ERROR_SIZE),
    FIELD(dim_v, 0, NSA_ERROR_SIZE),
    FIELD(dim_v, 577, NSA_ERROR_SIZE),
    FIELD(first, -1, NSA_ERROR_RANGE),
    FIELD(first, INT_MAX, NSA_ERROR_RANGE),
    FIELD(first, 1, NSA_ERROR_RANGE),
    FIELD(count, -1, NSA_ERROR_RANGE),
    FIELD(count, 71, NSA_ERROR_RANGE),
    FIELD(count, INT_MAX, NSA_ERROR_RANGE),
    FIELD(cmp_block, 0, NSA_ERROR_SIZE),
    FIELD(cmp_block, -8, NSA_ERROR_SIZE),
    FIELD(cmp_block, 10, NSA_ERROR_CMP_STRIDE),
    FIELD(cmp_block, 32, NSA_ERROR_SLC_BLOCK),
    FIELD(cmp_stride, 0, NSA_ERROR_SIZE),
    FIELD(cmp_stride, -4, NSA_ERROR_SIZE),
    FIELD(cmp_stride, 3, NSA_ERROR_CMP_STRIDE),
    FIELD(slc_block, 0, NSA_ERROR_SIZE),
    FIELD(slc_block, -16, NSA_ERROR_SIZE),
    FIELD(slc_block, 18, NSA_ERROR_SLC_BLOCK),
    FIELD(slc_block, 4, NSA_ERROR_SLC_BLOCK),
    FIELD(slc_count, 0, NSA_ERROR_SIZE),
    FIELD(slc_count, -3, NSA_ERROR_SIZE),
    FIELD(slc_count, 1, NSA_ERROR_SLC_COUNT),
    FIELD(slc_init, -1, NSA_ERROR_SIZE),
    FIELD(slc_init, 3, NSA_ERROR_SLC_COUNT),
    FIELD(slc_init, INT_MAX, NSA_ERROR_SIZE),
    FIELD(slc_local, -1, NSA_ERROR_SIZE),
    FIELD(slc_local, 0, NSA_ERROR_SLC_LOCAL),
    FIELD(slc_local, 3, NSA_ERROR_SLC_COUNT),
    FIELD(window, 0, NSA_ERROR_SIZE),
    FIELD(window, -20, NSA_ERROR_SIZE),
    FIELD(forced, 3, NSA_ERROR_OPTION),
    FIELD(score_map, -1, NSA_ERROR_OPTION),
    FIELD(window_rule, 2, NSA_ERROR_OPTION),
    FIELD(gate, 3, NSA_ERROR_OPTION),
    FIELD(gate_heads, 0, NSA_ERROR_SIZE),
    FIELD(gate_heads, 3, NSA_ERROR_HEADS),
    FIELD(threads, -1, NSA_ERROR_SIZE),
    FIELD(isa, 77, NSA_ERROR_OPTION),
    FIELD(isa, -1, NSA_ERROR_OPTION),
    FIELD(products, 2, NSA_ERROR_OPTION),
};
/* clang-format on */

/* The rules that speak of two fields are blamed on one of them; which is the library's to say, but
   it must be one that the rule names. */
static inline void refused_somewhere(const refusal *r, const char *what, int kind) {
    if (refusals_left_out) return;
    guards_freeze();
    nsa_status s = r->call(r->arguments);
    guards_verify("a refused call");
    check_case("%s, refusal: %s", r->name, what);
    CHECK(nsa_status_kind(s) == kind, "returned %s (%s), wanted kind %d", nsa_status_name(s),
          nsa_status_where(s), kind);
    CHECK(strlen(nsa_status_where(s)) > 2, "blamed nothing for %s", nsa_status_name(s));
}

/* Whether a field, or a rule between two of them, is none of the call's. */
static inline int is_unused(const refusal *r, const refused_field *f) {
    unsigned rule = f->kind == NSA_ERROR_SLC_BLOCK   ? UNUSED_CMP | UNUSED_SLC
                    : f->kind == NSA_ERROR_SLC_COUNT ? UNUSED_FORCED
                                                     : 0;
    unsigned field = !strncmp(f->name, "cmp_", 4)                                     ? UNUSED_CMP
                     : !strcmp(f->name, "slc_block") || !strcmp(f->name, "slc_count") ? UNUSED_SLC
                     : !strncmp(f->name, "slc_", 4) ? UNUSED_FORCED
                                                    : 0;
    return (r->unused & (field | rule)) != 0;
}

static inline void spoil_unused(const refusal *r) {
    nsa_desc *d = r->d;
    if (r->unused & UNUSED_CMP) d->cmp_block = -5, d->cmp_stride = 0;
    if (r->unused & UNUSED_SLC) d->slc_block = -1, d->slc_count = INT_MAX;
    if (r->unused & UNUSED_FORCED) d->slc_init = INT_MAX, d->slc_local = -7;
}

static inline void unused_hold_anything(const refusal *r) {
    const nsa_desc good = *r->d;
    spoil_unused(r);
    check_case("%s, fields without use", r->name);
    nsa_status s = r->call(r->arguments);
    CHECK(s == NSA_OK, "returned %s (%s)", nsa_status_name(s), nsa_status_where(s));
    *r->d = good;
}

/* Everything but begins, which a function that needs no rows does not read. */
static inline void refuse_desc_sizes(const refusal *r) {
    nsa_desc *d = r->d;
    const nsa_desc good = *d;
    for (int i = 0; i < COUNT(refused_fields); i++) {
        const refused_field *f = &refused_fields[i];
        char what[64];
        if (CHECKS_CUDA && f->at == offsetof(nsa_desc, isa)) continue; /* not used there */
        if (is_unused(r, f)) continue;
        snprintf(what, sizeof what, "%s = %d", f->name, f->value);
        memcpy((unsigned char *)d + f->at, &f->value, sizeof f->value);
        /* 5 heads over 2 break the rule of list_heads too, which nobody has set. */
        if (f->kind == NSA_ERROR_SIZE || f->kind == NSA_ERROR_OPTION || !strcmp(f->name, "heads"))
            refused(r, what, f->kind, f->name);
        else
            refused_somewhere(r, what, f->kind);
        *d = good;
    }
    static const double scales[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < COUNT(scales); i++) {
        d->scale = scales[i];
        refused(r, "scale not finite", NSA_ERROR_SCALE, "scale");
        *d = good;
    }
    d->gate_stride = -1;
    refused(r, "gate_stride -1", NSA_ERROR_STRIDE, "gate_stride");
    d->gate_stride = INT64_MAX / 2;
    refused(r, "gate_stride past the address space", NSA_ERROR_OVERFLOW, "gate_stride");
    *d = good;
    d->batch = d->tokens = d->count = INT_MAX, d->heads = d->gate_heads = INT_MAX / 4 * 2,
    d->kv_heads = 2;
    refused_somewhere(r, "sizes past the address space", NSA_ERROR_OVERFLOW);
    *d = good;
}

/* Positions by sequence and pages. Sequences of 71 tokens, a page that there is not, a table too
   narrow, which lie on the device for CUDA and are not looked at; test_pages.c has the rest. */
static inline void refuse_ragged(const refusal *r) {
    static const int32_t zeros[] = {0, 0}, many[] = {70, 71}, pages[] = {0, 7};
    nsa_desc *d = r->d;
    const nsa_desc good = *d;
    d->firsts = zeros;
    refused(r, "firsts alone", NSA_ERROR_NULL, "counts");
    d->counts = many;
    if (!CHECKS_CUDA) refused(r, "counts past the last token", NSA_ERROR_RANGE, "counts");
    d->firsts = NULL;
    refused(r, "counts alone", NSA_ERROR_NULL, "firsts");
    *d = good;
    d->pages = pages, d->table_width = 1, d->page_tokens = 72, d->page_count = 7;
    if (!CHECKS_CUDA) refused(r, "a page that there is not", NSA_ERROR_PAGES, "pages");
    d->page_count = 8, d->page_tokens = 68;
    if (!CHECKS_CUDA) refused(r, "a table too narrow", NSA_ERROR_PAGES, "pages");
    d->page_tokens = 74;
    if (!(r->unused & UNUSED_CMP)) /* whole strides to a page */
        refused(r, "page_tokens 74", NSA_ERROR_CMP_STRIDE, "page_tokens");
    d->page_tokens = 0;
    refused(r, "page_tokens 0", NSA_ERROR_SIZE, "page_tokens");
    d->page_tokens = 72, d->page_count = -1;
    refused(r, "page_count -1", NSA_ERROR_SIZE, "page_count");
    d->page_count = 8, d->table_width = -1;
    refused(r, "table_width -1", NSA_ERROR_SIZE, "table_width");
    *d = good;
}

static inline void refuse_desc(const refusal *r) {
    nsa_desc *d = r->d;
    const nsa_desc good = *d;
    refuse_desc_sizes(r);
    refuse_ragged(r);
    if (CHECKS_CUDA) { /* begins lie on the device: no call looks at them */
        d->tokens = (1 << 30) - 63;
        refused(r, "2^30 tokens", NSA_ERROR_OVERFLOW, "tokens");
        *d = good;
        return;
    }
    /* B 2, T 70: an offset that descends, one below 0, a sequence of 71 tokens. */
    static const int32_t begins[][3] = {
        {0, 50, 40}, {-1, 20, 40}, {0, 71, 80}, {10, 5, 5}, {INT32_MIN, 0, INT32_MAX}};
    for (int i = 0; i < COUNT(begins); i++) {
        d->begins = begins[i];
        refused(r, "begins", NSA_ERROR_BEGINS, "begins");
        *d = good;
    }
}

#endif

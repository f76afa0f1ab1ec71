/* problem.h - a call of nsa.h drawn from a fuzzer's bytes: a descriptor, a struct of views over
   guarded memory, some of them spoilt. Twin: fuzz_api.c, which makes the calls. Not here: what a
   result must be. */
#ifndef NSA_TESTS_FUZZ_PROBLEM_H
#define NSA_TESTS_FUZZ_PROBLEM_H

#include "fuzz.h"

#include "harness/tensors.h"

/* What a view's axes run over. PARAMETER rows stand under every width that is one. */
typedef enum problem_rows { ROWS_QUERY, ROWS_KEY, ROWS_CMP, ROWS_PARAMETER } problem_rows;
typedef enum problem_heads { HEADS_Q, HEADS_KV, HEADS_GATE, HEADS_ROPE, HEADS_ONE } problem_heads;
typedef enum problem_width {
    WIDTH_DK,
    WIDTH_DV,
    WIDTH_ROPE,
    WIDTH_ONE,
    WIDTH_GATES,
    WIDTH_LIST,
    WIDTH_PHI, /* a compress's own dim, and what follows from it */
    WIDTH_POS,
    WIDTH_W1,
    WIDTH_B1,
    WIDTH_W2
} problem_width;

typedef enum problem_kind { KIND_FLOAT, KIND_REAL, KIND_LIST, KIND_POSITION } problem_kind;

enum { OUTPUT = 1, GRADIENT = 2, OPTIONAL = 4 };

typedef struct slot {
    const char *name;
    size_t offset; /* of the view in the struct */
    problem_rows rows;
    problem_heads heads;
    problem_width width;
    problem_kind kind;
    int traits;
    size_t phi; /* of the compress that it belongs to; 0 where that is the struct itself */
} slot;

enum { SLOTS = 40, MOST_BATCH = 3, MOST_ELEMENTS = 1 << 16 };

/* The structs that calls take; `bytes` of memset start them. */
typedef union arguments {
    nsa_attend attend;
    nsa_gate gate;
    nsa_compress compress;
    nsa_rope rope;
    nsa_select select;
    nsa_attention attention;
} arguments;

typedef struct problem {
    nsa_desc d;
    int32_t begins[MOST_BATCH + 1];
    const slot *slots;
    int count;
    arguments x, dx;
    guarded *memory[2 * SLOTS];        /* of x's views, then of dx's */
    unsigned char unusable[2 * SLOTS]; /* a view that no call may read or write */
    int spoilt, odd_values, lists_spoilt;
    uint64_t seed;
} problem;

static inline nsa_tensor *view_of(arguments *a, const slot *s) {
    return (nsa_tensor *)(void *)((char *)a + s->offset);
}

static inline const nsa_compress *phi_of(const problem *p, const slot *s) {
    return (const nsa_compress *)(const void *)((const char *)&p->x + s->phi);
}

/* ---- Shapes ---- */

typedef struct shape {
    int64_t batch, rows, heads, width;
} shape;

static inline int64_t slot_width(const problem *p, const slot *s) {
    const nsa_compress *c = phi_of(p, s);
    int64_t l = p->d.cmp_block;
    switch (s->width) {
    case WIDTH_DK:
        return p->d.dim;
    case WIDTH_DV:
        return p->d.dim_v;
    case WIDTH_ROPE:
        return p->x.rope.dim;
    case WIDTH_ONE:
        return 1;
    case WIDTH_GATES:
        return 3;
    case WIDTH_LIST:
        return nsa_block_list_width(&p->d);
    case WIDTH_W1:
        return c->phi == NSA_PHI_MLP ? l * c->dim : c->dim;
    case WIDTH_B1:
        return c->phi == NSA_PHI_MLP ? c->hidden : c->dim;
    case WIDTH_W2:
        return c->hidden;
    default:
        return c->dim;
    }
}

static inline int64_t parameter_rows(const problem *p, const slot *s) {
    const nsa_compress *c = phi_of(p, s);
    switch (s->width) {
    case WIDTH_POS:
        return p->d.cmp_block;
    case WIDTH_W1:
        return c->phi == NSA_PHI_MLP ? c->hidden : p->d.cmp_block;
    case WIDTH_W2:
        return c->dim;
    default:
        return 1;
    }
}

/* Tokens of sequence b, and how many of the queries to compute it has. */
static inline int length_of(const nsa_desc *d, int b) {
    return d->begins ? d->begins[b + 1] - d->begins[b] : d->tokens;
}

static inline int queries_of(const nsa_desc *d, int b) {
    int n = length_of(d, b) - d->first;
    return n < 0 ? 0 : n < d->count ? n : d->count;
}

/* Rows of sequence b in a view, and the first of them. */
static inline int rows_of(const problem *p, const slot *s, int b) {
    if (s->rows == ROWS_PARAMETER) return (int)parameter_rows(p, s);
    if (s->rows == ROWS_QUERY) return queries_of(&p->d, b);
    int length = length_of(&p->d, b);
    return s->rows == ROWS_KEY ? length : nsa_cmp_count(&p->d, length);
}

static inline int64_t first_row_of(const problem *p, const slot *s, int b) {
    int64_t row = 0;
    if (!p->d.begins || s->rows == ROWS_PARAMETER) return 0;
    if (s->rows != ROWS_CMP) return p->d.begins[b];
    for (int i = 0; i < b; i++) row += nsa_cmp_count(&p->d, length_of(&p->d, i));
    return row;
}

static inline shape shape_of(const problem *p, const slot *s) {
    shape z = {p->d.batch, 0, 1, slot_width(p, s)};
    if (s->heads == HEADS_Q) z.heads = p->d.heads;
    if (s->heads == HEADS_KV) z.heads = p->d.kv_heads;
    if (s->heads == HEADS_GATE) z.heads = p->d.gate_heads;
    if (s->heads == HEADS_ROPE) z.heads = p->x.rope.heads;
    if (s->rows == ROWS_PARAMETER || p->d.begins) z.batch = 1;
    if (s->rows == ROWS_PARAMETER || !p->d.begins) {
        z.rows = rows_of(p, s, 0);
        return z;
    }
    for (int b = 0; b < p->d.batch; b++)
        if (rows_of(p, s, b)) z.rows = first_row_of(p, s, b) + rows_of(p, s, b);
    return z;
}

static inline void *element_of(const problem *p, const slot *s, const nsa_tensor *x, int b, int row,
                               int head, int c) {
    int64_t batch = p->d.begins || s->rows == ROWS_PARAMETER ? 0 : b;
    int64_t at = batch * x->batch + (first_row_of(p, s, b) + row) * x->token + head * x->head + c;
    return (char *)x->data + at * (int64_t)dtype_size(x->dtype);
}

/* ---- Drawing ---- */

static inline void draw_begins(fuzz_input *in, problem *p) {
    int at = fuzz_below(in, 4) ? 0 : fuzz_below(in, 5);
    for (int b = 0; b <= p->d.batch; b++) {
        p->begins[b] = at;
        at += fuzz_below(in, p->d.tokens + 1);
    }
    p->d.begins = p->begins;
}

/* A small problem without a fault. */
static inline void draw_desc(fuzz_input *in, problem *p) {
    int kv = 1 + fuzz_below(in, 2), heads = kv * (1 + fuzz_below(in, 3));
    int batch = 1 + fuzz_below(in, MOST_BATCH), tokens = fuzz_below(in, 48);
    p->d = nsa_desc_default(batch, tokens, heads, kv, 1 + fuzz_below(in, 20));
    nsa_desc *d = &p->d;
    d->dim_v = 1 + fuzz_below(in, 20);
    d->cmp_stride = 1 + fuzz_below(in, 4);
    d->cmp_block = d->cmp_stride * (1 + fuzz_below(in, 3));
    d->slc_block = d->cmp_block + d->cmp_stride * fuzz_below(in, 3);
    d->forced = (nsa_forced)fuzz_below(in, 2);
    d->slc_init = fuzz_below(in, 3);
    d->slc_local = fuzz_below(in, 3) + (d->forced == NSA_FORCED_INSIDE);
    d->slc_count = 1 + fuzz_below(in, 5);
    if (d->forced == NSA_FORCED_INSIDE) d->slc_count += d->slc_init + d->slc_local - 1;
    d->window = 1 + fuzz_below(in, 50);
    d->scale = fuzz_below(in, 4) ? 0 : 0.5;
    d->score_map = (nsa_score_map)fuzz_below(in, 2);
    d->window_rule = (nsa_window_rule)fuzz_below(in, 2);
    d->gate = (nsa_gate_kind)fuzz_below(in, 3);
    d->gate_heads = fuzz_below(in, 2) ? kv : heads;
    nsa_isa isa = (nsa_isa)fuzz_below(in, NSA_ISA_NEON_BF16 + 1);
    d->isa = nsa_isa_available(isa) ? isa : NSA_ISA_DETECT;
    d->first = fuzz_below(in, 3) ? 0 : fuzz_below(in, d->tokens + 1);
    d->count = d->tokens - d->first;
    if (!fuzz_below(in, 3)) d->count = fuzz_below(in, d->count + 1);
    d->threads = 1;
    if (fuzz_below(in, 2)) draw_begins(in, p);
}

/* One field becomes any number. */
static inline void spoil_desc(fuzz_input *in, problem *p) {
    static const size_t fields[] = {
        offsetof(nsa_desc, batch),     offsetof(nsa_desc, tokens),
        offsetof(nsa_desc, heads),     offsetof(nsa_desc, kv_heads),
        offsetof(nsa_desc, dim),       offsetof(nsa_desc, dim_v),
        offsetof(nsa_desc, first),     offsetof(nsa_desc, count),
        offsetof(nsa_desc, cmp_block), offsetof(nsa_desc, cmp_stride),
        offsetof(nsa_desc, slc_block), offsetof(nsa_desc, slc_count),
        offsetof(nsa_desc, slc_init),  offsetof(nsa_desc, slc_local),
        offsetof(nsa_desc, window),    offsetof(nsa_desc, gate_heads),
        offsetof(nsa_desc, threads),   offsetof(nsa_desc, forced),
        offsetof(nsa_desc, score_map), offsetof(nsa_desc, window_rule),
        offsetof(nsa_desc, gate),      offsetof(nsa_desc, isa),
    };
    enum { FIELDS = sizeof fields / sizeof fields[0] };
    int i = fuzz_below(in, FIELDS + 2);
    int32_t value = (int32_t)fuzz_number(in);
    uint64_t bits = fuzz_take(in, 8);
    p->spoilt = 1;
    if (i < FIELDS)
        memcpy((char *)&p->d + fields[i], &value, sizeof value);
    else if (i == FIELDS)
        memcpy(&p->d.scale, &bits, sizeof bits);
    else
        p->begins[fuzz_below(in, MOST_BATCH + 1)] = value;
    if (p->d.begins && p->d.batch > MOST_BATCH) p->d.batch = MOST_BATCH; /* the array is ours */
}

/* Strides of the axes in any order, with gaps; of an input also 0, and any number once spoilt. */
static inline void draw_strides(fuzz_input *in, problem *p, shape z, int output, int spoil,
                                nsa_tensor *x) {
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                     {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    int64_t *strides[3] = {&x->batch, &x->token, &x->head};
    int64_t extents[3] = {z.batch, z.rows, z.heads}, covered = z.width;
    const int *order = orders[fuzz_below(in, 6)];
    for (int i = 0; i < 3; i++) {
        int64_t *stride = strides[order[i]];
        *stride = covered + (fuzz_below(in, 3) ? 0 : fuzz_below(in, 4));
        if (!output && !fuzz_below(in, 16)) *stride = 0;
        if (extents[order[i]] > 1) covered += *stride * (extents[order[i]] - 1);
    }
    if (p->d.begins) x->batch = fuzz_number(in); /* not used */
    if (spoil == 1) {
        int64_t number = fuzz_number(in);
        *strides[fuzz_below(in, 3)] = number;
        p->spoilt = 1;
    }
}

enum { REFUSED = -1, NOT_TO_BE_HAD = -2 };

/* Elements that the view spans; REFUSED where a stride must be. */
static inline int64_t span_of(shape z, const nsa_tensor *x) {
    int64_t strides[3] = {x->batch, x->token, x->head}, extents[3] = {z.batch, z.rows, z.heads};
    int64_t span = z.width;
    if (!z.batch || !z.rows || !z.heads) return 0;
    for (int i = 0; i < 3; i++)
        if (extents[i] > 1 && (strides[i] < 0 || strides[i] >= INT64_MAX / 8)) return REFUSED;
    for (int i = 0; i < 3; i++) {
        if (extents[i] <= 1) continue;
        if (strides[i] > MOST_ELEMENTS || extents[i] > MOST_ELEMENTS) return NOT_TO_BE_HAD;
        span += strides[i] * (extents[i] - 1);
    }
    return span > MOST_ELEMENTS ? NOT_TO_BE_HAD : span;
}

static inline nsa_dtype draw_dtype(fuzz_input *in, problem_kind kind) {
    static const nsa_dtype floats[] = {NSA_F32, NSA_F32, NSA_BF16, NSA_F16};
    if (kind == KIND_REAL) return NSA_REAL_DTYPE;
    return kind == KIND_FLOAT ? floats[fuzz_below(in, 4)] : NSA_I32;
}

/* A number of an input: mostly tame, and where `odd` now and then none at all. */
static inline double draw_value(const problem *p, uint64_t at) {
    static const double odd[] = {INFINITY, -INFINITY, 3e38, -1e30, 1e-45, 0};
    uint64_t h = check_hash(p->seed, at);
    if (p->odd_values && h % 61 == 0) return h / 61 % 7 == 6 ? (double)NAN : odd[h / 61 % 7];
    return (double)(int64_t)(h % 4096) / 1024 - 2;
}

static inline void fill_rows(problem *p, const nsa_tensor *x, int64_t span, uint64_t salt) {
    for (int64_t i = 0; i < span; i++) {
        double value = draw_value(p, salt << 32 | (uint64_t)i);
        if (x->dtype == NSA_BF16 || x->dtype == NSA_F16)
            value = ref_store(dtype_prec(x->dtype), (double)(float)value);
        if (x->dtype == NSA_I32) value = (double)(check_hash(p->seed, (uint64_t)i) % 5000);
        if (x->dtype <= NSA_I32)
            element_put(x->dtype, (char *)x->data + i * (int64_t)dtype_size(x->dtype), value);
    }
}

/* Lists of blocks as nsa_select_blocks would leave them, or any numbers. */
static inline void fill_lists(fuzz_input *in, problem *p, const slot *s, const nsa_tensor *x) {
    shape z = shape_of(p, s);
    p->lists_spoilt = !fuzz_below(in, 8);
    for (int b = 0; b < p->d.batch; b++)
        for (int t = 0; t < queries_of(&p->d, b); t++)
            for (int h = 0; h < z.heads; h++) {
                int32_t *list = element_of(p, s, x, b, t, h, 0);
                int candidates = (p->d.first + t) / p->d.slc_block + 1, at = 0;
                for (int j = 0; j < candidates && at < z.width; j++)
                    if (check_hash(p->seed, (uint64_t)(b * 64 + t * 8 + h * 4 + j)) % 3)
                        list[at++] = j;
                while (at < z.width) list[at++] = -1;
                if (!p->lists_spoilt || fuzz_below(in, 4) || !z.width) continue;
                int32_t number = (int32_t)fuzz_number(in);
                list[fuzz_below(in, (int)z.width)] = number;
            }
}

/* Elements of a row: of 8 bits its bytes, those of its scales among them. */
static inline int64_t row_elements(nsa_dtype dtype, int64_t width) {
    return dtype == NSA_I8 || dtype == NSA_F8 ? width + (width + 127) / 128 * 4 : width;
}

/* A view over memory of exactly its span. `spoil`: 0 nothing, 1 a stride, 2 null, 3 an odd address,
   4 the dtype. False: the strides ask for more memory than there is, and are no error. */
static inline int draw_view(fuzz_input *in, problem *p, int i, arguments *a, int gradient,
                            int spoil) {
    const slot *s = &p->slots[i];
    nsa_tensor *x = view_of(a, s);
    shape z = shape_of(p, s);
    int output = gradient ? s->traits & GRADIENT : s->traits & OUTPUT;
    x->dtype = gradient && !fuzz_below(in, 3)       ? NSA_REAL_DTYPE
               : gradient && (s->traits & GRADIENT) ? view_of(&p->x, s)->dtype
                                                    : draw_dtype(in, s->kind);
    if (spoil == 4) x->dtype = (nsa_dtype)fuzz_below(in, 8), p->spoilt = 1;
    z.width = row_elements(x->dtype, z.width);
    draw_strides(in, p, z, output || s->kind == KIND_LIST, spoil, x); /* lists do not share */
    int64_t span = span_of(z, x);
    size_t size = dtype_size(x->dtype);
    if (span == NOT_TO_BE_HAD) return 0;
    guarded *g =
        guarded_new(s->name, span < 0 ? 0 : (size_t)span * size, (size_t)fuzz_below(in, 8) * size);
    p->memory[i + gradient * SLOTS] = g;
    x->data = g->data;
    if (span > 0) fill_rows(p, x, span, (uint64_t)(i + gradient * SLOTS + 1));
    if (span > 0 && s->kind == KIND_LIST && !output && x->dtype == NSA_I32) fill_lists(in, p, s, x);
    if (spoil == 2) x->data = NULL, p->spoilt = 1;
    if (spoil == 3 && size > 1) x->data = g->data + 1, p->spoilt = 1;
    p->unusable[i + gradient * SLOTS] = span < 0 || x->data != g->data || x->dtype > NSA_F8;
    return 1;
}

/* All views of a struct. The spoilt ones are drawn last, so that the rest stays the same. */
static inline int draw_views(fuzz_input *in, problem *p, arguments *a, int gradient) {
    int which = fuzz_below(in, 3) ? -1 : fuzz_below(in, p->count), how = 1 + fuzz_below(in, 4);
    for (int i = 0; i < p->count; i++) {
        const slot *s = &p->slots[i];
        int wanted = !gradient || (s->traits & (GRADIENT | OUTPUT)), leave_out = 0;
        if (gradient && (s->traits & GRADIENT)) leave_out = !fuzz_below(in, 6);
        if (!gradient && (s->traits & OPTIONAL)) leave_out = fuzz_below(in, 2);
        if (gradient && !view_of(&p->x, s)->data && (s->traits & OPTIONAL)) leave_out = 1;
        if (!wanted || leave_out) continue;
        if (!draw_view(in, p, i, a, gradient, i == which ? how : 0)) return 0;
    }
    return 1;
}

/* The calls to come may write the rows of these views. */
static inline void open_outputs(problem *p, arguments *a, int gradient) {
    for (int i = 0; i < p->count; i++) {
        const slot *s = &p->slots[i];
        const nsa_tensor *x = view_of(a, s);
        shape z = shape_of(p, s);
        if (!x->data || !(s->traits & (gradient ? GRADIENT : OUTPUT))) continue;
        if (p->unusable[i + gradient * SLOTS]) continue;
        for (int b = 0; b < (s->rows == ROWS_PARAMETER ? 1 : p->d.batch); b++)
            for (int row = 0; row < rows_of(p, s, b); row++)
                for (int h = 0; h < z.heads; h++)
                    guarded_open(p->memory[i + gradient * SLOTS], element_of(p, s, x, b, row, h, 0),
                                 (size_t)row_elements(x->dtype, z.width) * dtype_size(x->dtype));
    }
}

#endif

/* fuzz_api.c - every public call of nsa.h but decoding, on descriptors, views and lists that the
   fuzzer draws. Twin: fuzz_cache.c has the cache. Not here: whether the plain layout's results are
   right beyond the attentions (tests/test_*.c hold them against the dense reference).

   What must hold: a call returns a status and has touched nothing, or it returns NSA_OK and has
   written its outputs' rows and nothing else; a problem without a fault is not refused; the rows
   are to the bit those of each sequence alone in one contiguous array; and attention is that of the
   dense reference. */
#include "problem.h"

/* ---- The calls ---- */

typedef struct call {
    const char *name;
    const slot *slots;
    int count;
    size_t bytes; /* of the struct */
    size_t (*forward_size)(const problem *p);
    nsa_status (*forward)(const problem *p, void *workspace, size_t bytes);
    size_t (*backward_size)(const problem *p);
    nsa_status (*backward)(const problem *p, void *workspace, size_t bytes);
} call;

#define AT(type, field) #field, offsetof(type, field)
#define COUNT(list)     ((int)(sizeof(list) / sizeof(list)[0]))

#define ATTEND_SLOTS(keys)                                                           \
    {AT(nsa_attend, q), ROWS_QUERY, HEADS_Q, WIDTH_DK, KIND_FLOAT, GRADIENT, 0},     \
        {AT(nsa_attend, k), keys, HEADS_KV, WIDTH_DK, KIND_FLOAT, GRADIENT, 0},      \
        {AT(nsa_attend, v), keys, HEADS_KV, WIDTH_DV, KIND_FLOAT, GRADIENT, 0},      \
        {AT(nsa_attend, out), ROWS_QUERY, HEADS_Q, WIDTH_DV, KIND_FLOAT, OUTPUT, 0}, \
        {AT(nsa_attend, lse), ROWS_QUERY, HEADS_Q, WIDTH_ONE, KIND_REAL, OUTPUT, 0},

static const slot attend_slots[] = {ATTEND_SLOTS(ROWS_KEY){AT(nsa_attend, blocks), ROWS_QUERY,
                                                           HEADS_KV, WIDTH_LIST, KIND_LIST, 0, 0}};
static const slot attend_cmp_slots[] = {ATTEND_SLOTS(ROWS_CMP)};
static const slot gate_slots[] = {
    {AT(nsa_gate, logits), ROWS_QUERY, HEADS_GATE, WIDTH_GATES, KIND_FLOAT, GRADIENT, 0},
    {AT(nsa_gate, cmp), ROWS_QUERY, HEADS_Q, WIDTH_DV, KIND_FLOAT, GRADIENT, 0},
    {AT(nsa_gate, slc), ROWS_QUERY, HEADS_Q, WIDTH_DV, KIND_FLOAT, GRADIENT, 0},
    {AT(nsa_gate, win), ROWS_QUERY, HEADS_Q, WIDTH_DV, KIND_FLOAT, GRADIENT, 0},
    {AT(nsa_gate, out), ROWS_QUERY, HEADS_Q, WIDTH_DV, KIND_FLOAT, OUTPUT, 0}};
static const slot rope_slots[] = {
    {AT(nsa_rope, x), ROWS_QUERY, HEADS_ROPE, WIDTH_ROPE, KIND_FLOAT, GRADIENT, 0},
    {AT(nsa_rope, out), ROWS_QUERY, HEADS_ROPE, WIDTH_ROPE, KIND_FLOAT, OUTPUT, 0},
    {AT(nsa_rope, positions), ROWS_QUERY, HEADS_ONE, WIDTH_ONE, KIND_POSITION, OPTIONAL, 0}};
static const slot select_slots[] = {
    {AT(nsa_select, q), ROWS_QUERY, HEADS_Q, WIDTH_DK, KIND_FLOAT, 0, 0},
    {AT(nsa_select, k), ROWS_CMP, HEADS_KV, WIDTH_DK, KIND_FLOAT, 0, 0},
    {AT(nsa_select, lse), ROWS_QUERY, HEADS_Q, WIDTH_ONE, KIND_REAL, 0, 0},
    {AT(nsa_select, blocks), ROWS_QUERY, HEADS_KV, WIDTH_LIST, KIND_LIST, OUTPUT, 0}};

#define PARAMETER(type, path, phi, field, width, traits) \
    { AT(type, path field), ROWS_PARAMETER, HEADS_KV, width, KIND_FLOAT, GRADIENT | (traits), phi }
#define COMPRESS_SLOTS(type, path, phi)                                               \
    {AT(type, path x), ROWS_KEY, HEADS_KV, WIDTH_PHI, KIND_FLOAT, GRADIENT, phi},     \
        {AT(type, path out), ROWS_CMP, HEADS_KV, WIDTH_PHI, KIND_FLOAT, OUTPUT, phi}, \
        PARAMETER(type, path, phi, pos, WIDTH_POS, OPTIONAL),                         \
        PARAMETER(type, path, phi, w1, WIDTH_W1, 0),                                  \
        PARAMETER(type, path, phi, b1, WIDTH_B1, OPTIONAL),                           \
        PARAMETER(type, path, phi, w2, WIDTH_W2, 0),                                  \
        PARAMETER(type, path, phi, b2, WIDTH_PHI, OPTIONAL)

static const slot compress_slots[] = {COMPRESS_SLOTS(nsa_compress, , 0)};
static const slot attention_slots[] = {
    {AT(nsa_attention, q), ROWS_QUERY, HEADS_Q, WIDTH_DK, KIND_FLOAT, GRADIENT, 0},
    COMPRESS_SLOTS(nsa_attention, k_cmp., offsetof(nsa_attention, k_cmp)),
    COMPRESS_SLOTS(nsa_attention, v_cmp., offsetof(nsa_attention, v_cmp)),
    {AT(nsa_attention, k_slc), ROWS_KEY, HEADS_KV, WIDTH_DK, KIND_FLOAT, GRADIENT, 0},
    {AT(nsa_attention, v_slc), ROWS_KEY, HEADS_KV, WIDTH_DV, KIND_FLOAT, GRADIENT, 0},
    {AT(nsa_attention, k_win), ROWS_KEY, HEADS_KV, WIDTH_DK, KIND_FLOAT, GRADIENT, 0},
    {AT(nsa_attention, v_win), ROWS_KEY, HEADS_KV, WIDTH_DV, KIND_FLOAT, GRADIENT, 0},
    {AT(nsa_attention, gates), ROWS_QUERY, HEADS_GATE, WIDTH_GATES, KIND_FLOAT, GRADIENT, 0},
    {AT(nsa_attention, blocks), ROWS_QUERY, HEADS_KV, WIDTH_LIST, KIND_LIST, OUTPUT, 0},
    {AT(nsa_attention, out_cmp), ROWS_QUERY, HEADS_Q, WIDTH_DV, KIND_FLOAT, OUTPUT, 0},
    {AT(nsa_attention, out_slc), ROWS_QUERY, HEADS_Q, WIDTH_DV, KIND_FLOAT, OUTPUT, 0},
    {AT(nsa_attention, out_win), ROWS_QUERY, HEADS_Q, WIDTH_DV, KIND_FLOAT, OUTPUT, 0},
    {AT(nsa_attention, lse_cmp), ROWS_QUERY, HEADS_Q, WIDTH_ONE, KIND_REAL, OUTPUT, 0},
    {AT(nsa_attention, lse_slc), ROWS_QUERY, HEADS_Q, WIDTH_ONE, KIND_REAL, OUTPUT, 0},
    {AT(nsa_attention, lse_win), ROWS_QUERY, HEADS_Q, WIDTH_ONE, KIND_REAL, OUTPUT, 0},
    {AT(nsa_attention, out), ROWS_QUERY, HEADS_Q, WIDTH_DV, KIND_FLOAT, OUTPUT, 0}};

static size_t no_size(const problem *p) {
    (void)p;
    return 0;
}

#define ATTEND_CALLS(branch)                                                                 \
    static size_t branch##_forward_size(const problem *p) {                                  \
        return nsa_attend_##branch##_forward_workspace_size(&p->d);                          \
    }                                                                                        \
    static nsa_status branch##_forward(const problem *p, void *workspace, size_t bytes) {    \
        return nsa_attend_##branch##_forward(&p->x.attend, &p->d, workspace, bytes);         \
    }                                                                                        \
    static size_t branch##_backward_size(const problem *p) {                                 \
        return nsa_attend_##branch##_backward_workspace_size(&p->d);                         \
    }                                                                                        \
    static nsa_status branch##_backward(const problem *p, void *workspace, size_t bytes) {   \
        return nsa_attend_##branch##_backward(&p->dx.attend, &p->x.attend, &p->d, workspace, \
                                              bytes);                                        \
    }
ATTEND_CALLS(cmp)
ATTEND_CALLS(slc)
ATTEND_CALLS(win)
ATTEND_CALLS(dense)

/* Without a workspace. */
#define BARE_CALLS(name)                                                                 \
    static nsa_status name##_forward(const problem *p, void *workspace, size_t bytes) {  \
        (void)workspace, (void)bytes;                                                    \
        return nsa_##name##_forward(&p->x.name, &p->d);                                  \
    }                                                                                    \
    static nsa_status name##_backward(const problem *p, void *workspace, size_t bytes) { \
        (void)workspace, (void)bytes;                                                    \
        return nsa_##name##_backward(&p->dx.name, &p->x.name, &p->d);                    \
    }
BARE_CALLS(gate)
BARE_CALLS(rope)

/* With one whose size depends on the views. */
#define VIEWED_CALLS(name)                                                               \
    static size_t name##_forward_size(const problem *p) {                                \
        return nsa_##name##_forward_workspace_size(&p->x.name, &p->d);                   \
    }                                                                                    \
    static nsa_status name##_forward(const problem *p, void *workspace, size_t bytes) {  \
        return nsa_##name##_forward(&p->x.name, &p->d, workspace, bytes);                \
    }                                                                                    \
    static nsa_status name##_backward(const problem *p, void *workspace, size_t bytes) { \
        return nsa_##name##_backward(&p->dx.name, &p->x.name, &p->d, workspace, bytes);  \
    }
VIEWED_CALLS(compress)
VIEWED_CALLS(attention)

static size_t compress_backward_size(const problem *p) {
    return nsa_compress_backward_workspace_size(&p->x.compress, &p->d);
}
static size_t attention_backward_size(const problem *p) {
    return nsa_attention_backward_workspace_size(&p->dx.attention, &p->x.attention, &p->d);
}
static size_t select_size(const problem *p) {
    return nsa_select_blocks_workspace_size(&p->d);
}
static nsa_status select_forward(const problem *p, void *workspace, size_t bytes) {
    return nsa_select_blocks(&p->x.select, &p->d, workspace, bytes);
}

#define ATTEND(branch, slots, count)                                                        \
    {                                                                                       \
#branch, slots, count, sizeof(nsa_attend), branch##_forward_size, branch##_forward, \
            branch##_backward_size, branch##_backward                                       \
    }

static const call calls[] = {
    ATTEND(cmp, attend_cmp_slots, COUNT(attend_cmp_slots)),
    ATTEND(slc, attend_slots, COUNT(attend_slots)),
    ATTEND(win, attend_slots, COUNT(attend_slots) - 1),
    ATTEND(dense, attend_slots, COUNT(attend_slots) - 1),
    {"gate", gate_slots, COUNT(gate_slots), sizeof(nsa_gate), no_size, gate_forward, no_size,
     gate_backward},
    {"rope", rope_slots, COUNT(rope_slots), sizeof(nsa_rope), no_size, rope_forward, no_size,
     rope_backward},
    {"select", select_slots, COUNT(select_slots), sizeof(nsa_select), select_size, select_forward,
     NULL, NULL},
    {"compress", compress_slots, COUNT(compress_slots), sizeof(nsa_compress), compress_forward_size,
     compress_forward, compress_backward_size, compress_backward},
    {"attention", attention_slots, COUNT(attention_slots), sizeof(nsa_attention),
     attention_forward_size, attention_forward, attention_backward_size, attention_backward},
};

/* ---- Options beside the views ---- */

static void draw_phi(fuzz_input *in, problem *p, nsa_compress *x, int dim) {
    x->phi = (nsa_phi)fuzz_below(in, 3);
    x->dim = dim;
    x->hidden = 1 + fuzz_below(in, 9);
    if (fuzz_below(in, 24)) return;
    int64_t value = fuzz_number(in);
    p->spoilt = 1;
    int which = fuzz_below(in, 3);
    if (which == 0) x->phi = (nsa_phi)value;
    if (which == 1) x->dim = (int)value;
    if (which == 2) x->hidden = (int)value;
}

static void draw_rope(fuzz_input *in, problem *p, nsa_rope *x) {
    static double of_pairs[2][576 / 2];
    double *numbers[] = {&x->base,           &x->factor,      &x->fast,
                         &x->slow,           &x->magnitude,   &x->mscale,
                         &x->mscale_all_dim, &of_pairs[0][0], &of_pairs[1][0]};
    enum { NUMBERS = sizeof numbers / sizeof *numbers };
    uint64_t bits;
    x->heads = 1 + fuzz_below(in, 4);
    x->dim = 2 + 2 * fuzz_below(in, 9);
    x->pairs = (nsa_rope_pairs)fuzz_below(in, 2);
    x->scaling = (nsa_rope_scaling)fuzz_below(in, 7);
    x->factor = 1 + fuzz_below(in, 16);
    x->trained_context = 2 + fuzz_below(in, 4096);
    x->context = fuzz_below(in, 8192);
    x->untruncated = fuzz_below(in, 2);
    for (int i = 0; i < 576 / 2; i++) of_pairs[0][i] = 1 + i, of_pairs[1][i] = 1 / (1.0 + i);
    x->short_factors = of_pairs[0], x->long_factors = of_pairs[1];
    if (fuzz_below(in, 8) == 0) x->frequencies = of_pairs[1];
    if (fuzz_below(in, 3)) return;
    p->spoilt = 1;
    int which = fuzz_below(in, NUMBERS + 5);
    if (which < NUMBERS) {
        bits = fuzz_take(in, 8);
        memcpy(numbers[which], &bits, sizeof bits);
        return;
    }
    int value = (int)fuzz_number(in);
    if (which == NUMBERS) x->heads = value;
    if (which == NUMBERS + 1) x->dim = value;
    if (which == NUMBERS + 2) x->scaling = (nsa_rope_scaling)value;
    if (which == NUMBERS + 3) x->trained_context = value;
    if (which == NUMBERS + 4) x->context = value;
}

static void draw_options(fuzz_input *in, problem *p, const call *c) {
    if (c->slots == rope_slots) draw_rope(in, p, &p->x.rope);
    if (c->slots == compress_slots) draw_phi(in, p, &p->x.compress, 1 + fuzz_below(in, 20));
    if (c->slots != attention_slots) return;
    draw_phi(in, p, &p->x.attention.k_cmp, p->d.dim);
    draw_phi(in, p, &p->x.attention.v_cmp, p->d.dim_v);
}

/* ---- One sequence alone, in contiguous arrays ---- */

static size_t slot_bytes(const problem *p, int i, nsa_dtype dtype) {
    shape z = shape_of(p, &p->slots[i]);
    return (size_t)(z.batch * z.rows * z.heads * row_elements(dtype, z.width)) * dtype_size(dtype);
}

/* The rows of sequence b of every view that is there, copied to a problem of that one alone. */
static problem alone(const problem *p, int b, void *memory[]) {
    problem one = *p;
    one.d.batch = 1;
    one.d.begins = NULL;
    one.d.tokens = length_of(&p->d, b);
    one.d.count = queries_of(&p->d, b);
    if (one.d.first > one.d.tokens) one.d.first = one.d.tokens;
    for (int i = 0; i < 2 * p->count; i++) {
        const slot *s = &p->slots[i % p->count];
        problem *from = (problem *)(uintptr_t)p;
        const nsa_tensor *x = view_of(i < p->count ? &from->x : &from->dx, s);
        nsa_tensor *y = view_of(i < p->count ? &one.x : &one.dx, s);
        memory[i] = NULL;
        y->data = NULL;
        if (!x->data || p->unusable[i < p->count ? i : i - p->count + SLOTS]) continue;
        shape z = shape_of(&one, s);
        size_t bytes = (size_t)row_elements(x->dtype, z.width) * dtype_size(x->dtype);
        memory[i] = calloc(1, slot_bytes(&one, i % p->count, x->dtype) + 1);
        *y = nsa_tensor_bthd(memory[i], x->dtype, (int)z.rows, (int)z.heads, (int)z.width);
        for (int row = 0; row < z.rows; row++)
            for (int h = 0; h < z.heads; h++)
                memcpy(element_of(&one, s, y, 0, row, h, 0), element_of(p, s, x, b, row, h, 0),
                       bytes);
    }
    return one;
}

/* A NaN is a NaN whatever its bits. */
static int same_element(nsa_dtype dtype, const void *a, const void *b) {
    if (!memcmp(a, b, dtype_size(dtype))) return 1;
    return dtype < NSA_I32 && isnan(element_get(dtype, a)) && isnan(element_get(dtype, b));
}

static void compare_alone(const problem *p, const problem *one, int b, int gradient,
                          const char *name) {
    for (int i = 0; i < p->count; i++) {
        const slot *s = &p->slots[i];
        problem *from = (problem *)(uintptr_t)p, *to = (problem *)(uintptr_t)one;
        const nsa_tensor *x = view_of(gradient ? &from->dx : &from->x, s);
        const nsa_tensor *y = view_of(gradient ? &to->dx : &to->x, s);
        if (!y->data || !(s->traits & (gradient ? GRADIENT : OUTPUT))) continue;
        /* Sums over the batch, or over the heads, are another sum than that of one. */
        if (s->rows == ROWS_PARAMETER && (p->d.batch > 1 || x->head == 0)) continue;
        shape z = shape_of(one, s);
        for (int row = 0; row < z.rows; row++)
            for (int h = 0; h < z.heads; h++)
                for (int c = 0; c < row_elements(x->dtype, z.width); c++) {
                    void *got = element_of(p, s, x, b, row, h, c);
                    void *want = element_of(one, s, y, 0, row, h, c);
                    FUZZ_ASSERT(
                        same_element(x->dtype, got, want),
                        "%s.%s%s, sequence %d, row %d, head %d, column %d: %.9g, alone %.9g", name,
                        gradient ? "dx." : "", s->name, b, row, h, c, element_get(x->dtype, got),
                        element_get(x->dtype, want));
                }
    }
}

/* ---- The dense reference, for attention in f32 ---- */

static double *dense_of(const problem *one, int i, int gradient) {
    problem *p = (problem *)(uintptr_t)one;
    const slot *s = &p->slots[i];
    const nsa_tensor *x = view_of(gradient ? &p->dx : &p->x, s);
    shape z = shape_of(p, s);
    double *to = ref_zeros((size_t)(z.rows * z.heads * z.width) + 1), *at = to;
    for (int row = 0; row < z.rows; row++)
        for (int h = 0; h < z.heads; h++)
            for (int c = 0; c < z.width; c++)
                *at++ = element_get(x->dtype, element_of(p, s, x, 0, row, h, c));
    return to;
}

static unsigned char *mask_of(const call *c, const problem *one, const ref_desc *r) {
    if (c->forward == cmp_forward) return ref_mask_cmp(r);
    if (c->forward == win_forward) return ref_mask_win(r);
    if (c->forward == dense_forward) return ref_mask_dense(r);
    /* Lists of the rows before `first` are empty: nobody asks for them. */
    size_t row = (size_t)(r->kv_heads * ref_list_width(r)), n = (size_t)r->tokens * row;
    int32_t *lists = malloc((n + 1) * sizeof *lists);
    memset(lists, 0xff, n * sizeof *lists);
    memcpy(lists + (size_t)one->d.first * row, one->x.attend.blocks.data,
           (size_t)one->d.count * row * sizeof *lists);
    unsigned char *mask = ref_mask_slc(r, lists);
    free(lists);
    return mask;
}

/* How far out may be from the formulas. Where products take pairs of bf16, p is rounded to 8 bits,
   so that each term of the average is off by 1 / 512 of it at most. */
static double tolerance_of(const problem *one, const double *v, size_t n) {
    const nsa_desc *d = &one->d;
    int pairs = d->isa == NSA_ISA_AVX512_BF16 || d->isa == NSA_ISA_NEON_BF16 ||
                (d->isa == NSA_ISA_DETECT &&
                 (nsa_isa_available(NSA_ISA_AVX512_BF16) || nsa_isa_available(NSA_ISA_NEON_BF16)));
    double most = 0;
    if (!pairs || one->x.attend.v.dtype != NSA_BF16 || d->products == NSA_PRODUCTS_F32) return 1e-4;
    for (size_t i = 0; i < n; i++) most = fmax(most, fabs(v[i]));
    return 1e-4 + most / 512;
}

/* out and lse of `one` beside the formulas in f64. */
static void compare_reference(const call *c, const problem *one) {
    if (c->bytes != sizeof(nsa_attend) || one->odd_values || !one->d.count) return;
    if (one->x.attend.out.dtype != NSA_F32 || fabs(one->d.scale) > 4) return;
    if (one->x.attend.k.dtype > NSA_I32 || one->x.attend.v.dtype > NSA_I32) return;
    ref_desc r = ref_desc_of(&one->d, one->d.tokens);
    int keys = c->forward == cmp_forward ? ref_cmp_count(&r, r.tokens) : r.tokens;
    size_t rows = (size_t)(one->d.count * r.heads), n = rows * (size_t)r.dim_v;
    double *q = dense_of(one, 0, 0), *k = dense_of(one, 1, 0), *v = dense_of(one, 2, 0);
    double *got = dense_of(one, 3, 0), *lse = dense_of(one, 4, 0);
    double *out = ref_zeros(n + 1), *want = ref_zeros(rows + 1);
    unsigned char *mask = mask_of(c, one, &r);
    ref_attend x = {REF_F64,
                    one->d.count,
                    keys,
                    r.heads,
                    r.kv_heads,
                    r.dim,
                    r.dim_v,
                    r.scale,
                    mask + (size_t)one->d.first * (size_t)r.kv_heads * (size_t)keys,
                    q,
                    k,
                    v,
                    out,
                    want,
                    0};
    ref_attend_forward(&x);
    double near = tolerance_of(one, v, (size_t)(keys * r.kv_heads * r.dim_v));
    for (size_t i = 0; i < n; i++)
        FUZZ_ASSERT(fabs(got[i] - out[i]) <= near, "%s: out[%zu] %.9g, reference %.9g", c->name, i,
                    got[i], out[i]);
    for (size_t i = 0; i < rows; i++)
        FUZZ_ASSERT(lse[i] == want[i] || fabs(lse[i] - want[i]) <= 1e-4,
                    "%s: lse[%zu] %.9g, reference %.9g", c->name, i, lse[i], want[i]);
    double *all[] = {q, k, v, got, lse, out, want};
    for (int i = 0; i < COUNT(all); i++) free(all[i]);
    free(mask);
}

/* ---- One call ---- */

static nsa_status call_it(const call *c, const problem *p, int backward, void *work, size_t bytes) {
    return (backward ? c->backward : c->forward)(p, work, bytes);
}

static void compare_sequences(const call *c, const problem *p, const problem *before,
                              int backward) {
    for (int b = 0; b < p->d.batch; b++) {
        void *memory[2 * SLOTS];
        problem one = alone(before, b, memory);
        size_t bytes = (backward ? c->backward_size : c->forward_size)(&one);
        void *work = malloc(bytes + 1);
        nsa_status s = call_it(c, &one, backward, work, bytes);
        FUZZ_ASSERT(s == NSA_OK, "%s, sequence %d alone: %s %s", c->name, b, nsa_status_name(s),
                    nsa_status_where(s));
        compare_alone(p, &one, b, backward, c->name);
        if (!backward) compare_reference(c, &one);
        free(work);
        for (int i = 0; i < 2 * p->count; i++) free(memory[i]);
    }
}

/* A copy of the problem whose gradients hold what they held before the call. */
static problem frozen(const problem *p) {
    problem copy = *p;
    for (int i = 0; i < 2 * p->count; i++) {
        int at = i < p->count ? i : i - p->count + SLOTS;
        nsa_tensor *x = view_of(i < p->count ? &copy.x : &copy.dx, &p->slots[i % p->count]);
        const guarded *g = p->memory[at];
        if (x->data && g) x->data = g->copy + ((unsigned char *)x->data - g->data);
    }
    return copy;
}

/* Returns 1 if the call was accepted. */
static int run(fuzz_input *in, const call *c, problem *p, int backward) {
    enum { MOST_WORKSPACE = 1 << 24 };
    size_t bytes = (backward ? c->backward_size : c->forward_size)(p), given = bytes;
    if (bytes > MOST_WORKSPACE) given = 1024; /* must be refused */
    int short_of = bytes > 0 && !fuzz_below(in, 16);
    if (short_of) given--;
    guarded *work = workspace_new(given, (size_t)fuzz_below(in, 64));
    guards_freeze();
    nsa_status s = call_it(c, p, backward, given ? work->data : NULL, given);
    if (s == NSA_OK) open_outputs(p, backward ? &p->dx : &p->x, backward);
    /* With 0 threads the workspace decides how many there are. */
    FUZZ_ASSERT(s != NSA_OK || given == bytes || !p->d.threads,
                "%s: a workspace too small is taken", c->name);
    guards_verify(c->name);
    guards_close();
    FUZZ_ASSERT(!check_failures, "%s: %s", c->name, nsa_status_name(s));
    if (s != NSA_OK) {
        FUZZ_ASSERT(p->spoilt || p->lists_spoilt || given < bytes,
                    "%s: refused without a fault: %s %s", c->name, nsa_status_name(s),
                    nsa_status_where(s));
        FUZZ_ASSERT(*nsa_status_text(s) && nsa_status_where(s), "%s: no words for %d", c->name, s);
        return 0;
    }
    problem before = frozen(p);
    compare_sequences(c, p, &before, backward);
    return 1;
}

/* ---- What has no views ---- */

static void check_index(fuzz_input *in, const nsa_desc *d) {
    enum { MOST = 4096 };
    ref_desc r = ref_desc_of(d, d->tokens);
    if (!d->tokens || d->tokens > MOST || d->cmp_block > MOST) return;
    if (nsa_block_list_width(d) > MOST) return;
    int t = fuzz_below(in, d->tokens), n = nsa_cmp_count(d, d->tokens);
    FUZZ_ASSERT(n == ref_cmp_count(&r, d->tokens), "compressed blocks: %d", n);
    FUZZ_ASSERT(nsa_slc_count(d, d->tokens) == ref_slc_count(&r, d->tokens), "selection blocks");
    FUZZ_ASSERT(nsa_cmp_visible(d, t) == ref_cmp_count(&r, t + 1), "visible of %d", t);
    int64_t entries = nsa_block_map_size(d, d->tokens);
    int rows = nsa_slc_count(d, d->tokens);
    FUZZ_ASSERT(entries >= 0 && entries <= (int64_t)rows * n, "map of %lld", (long long)entries);
    int32_t *indptr = malloc(((size_t)rows + 1) * sizeof *indptr);
    int32_t *indices = malloc((size_t)entries * sizeof *indices + 1);
    nsa_real *weights = malloc((size_t)entries * sizeof *weights + 1);
    nsa_status s = nsa_block_map(d, d->tokens, indptr, indices, weights);
    FUZZ_ASSERT(s == NSA_OK && indptr[rows] == entries, "map: %s", nsa_status_name(s));
    for (int j = 0; j < rows; j++)
        for (int i = indptr[j]; i < indptr[j + 1]; i++)
            FUZZ_ASSERT((int)weights[i] == ref_overlap(&r, indices[i], j) && weights[i] > 0,
                        "overlap of %d and %d", indices[i], j);
    int candidates = nsa_slc_candidates(d, t), width = nsa_block_list_width(d);
    nsa_real *scores = malloc((size_t)candidates * sizeof *scores);
    double *wide = ref_zeros((size_t)candidates);
    int32_t *list = malloc((size_t)width * sizeof *list),
            *want = malloc((size_t)width * sizeof *want);
    for (int j = 0; j < candidates; j++) {
        uint32_t bits = (uint32_t)fuzz_take(in, 4);
        float score;
        memcpy(&score, &bits, sizeof score);
        wide[j] = (double)(scores[j] = (nsa_real)(fuzz_below(in, 3) ? (float)(bits % 4) : score));
    }
    FUZZ_ASSERT(nsa_rank_blocks(scores, t, d, list) == NSA_OK, "rank");
    ref_rank(&r, t, wide, want);
    FUZZ_ASSERT(!memcmp(list, want, (size_t)width * sizeof *list), "ranks of query %d", t);
    void *all[] = {indptr, indices, weights, scores, wide, list, want};
    for (int i = 0; i < COUNT(all); i++) free(all[i]);
}

/* Lists that are mended are in order, and mending them again changes nothing. */
static void check_lists(problem *p) {
    nsa_tensor *x = &p->x.attend.blocks;
    nsa_block_fault fault;
    if (nsa_normalize_blocks(x, &p->d) != NSA_OK) return;
    FUZZ_ASSERT(nsa_check_blocks(x, &p->d, &fault) == NSA_OK, "mended list: %s", fault.reason);
    if (!p->memory[5]) return;
    guarded *g = p->memory[5];
    memcpy(g->copy, g->data, g->bytes);
    FUZZ_ASSERT(nsa_normalize_blocks(x, &p->d) == NSA_OK, "again");
    FUZZ_ASSERT(!memcmp(g->copy, g->data, g->bytes), "mending a mended list changes it");
}

static void check_numbers(fuzz_input *in) {
    uint16_t h = (uint16_t)fuzz_take(in, 2);
    uint32_t bits = (uint32_t)fuzz_take(in, 4);
    float x;
    memcpy(&x, &bits, sizeof x);
    double f = f16_value(h), b = bf16_value(h);
    FUZZ_ASSERT(isnan(f) ? isnan(nsa_f16_to_f32(h)) : (double)nsa_f16_to_f32(h) == f, "f16 %x", h);
    FUZZ_ASSERT(isnan(b) ? isnan(nsa_bf16_to_f32(h)) : (double)nsa_bf16_to_f32(h) == b, "bf16 %x",
                h);
    double narrow = f16_value(nsa_f32_to_f16(x)), rounded = ref_store(REF_F16, (double)x);
    FUZZ_ASSERT(isnan(x) ? isnan(narrow) : narrow == rounded, "f32 %x to f16", bits);
    narrow = bf16_value(nsa_f32_to_bf16(x)), rounded = ref_store(REF_BF16, (double)x);
    FUZZ_ASSERT(isnan(x) ? isnan(narrow) : narrow == rounded, "f32 %x to bf16", bits);
}

/* ---- One input ---- */

/* Whether all views can be had: begins far from 0, or sizes in the millions, ask for memory that
   nobody has here. */
static int is_small(const problem *p) {
    const nsa_desc *d = &p->d;
    if (d->batch > 64 || (d->begins && d->begins[d->batch] > MOST_ELEMENTS)) return 0;
    for (int i = 0; i < p->count; i++) {
        const slot *s = &p->slots[i];
        double elements = (double)d->batch;
        if (slot_width(p, s) < 1 || slot_width(p, s) > MOST_ELEMENTS) return 0;
        if (s->rows == ROWS_PARAMETER && parameter_rows(p, s) > MOST_ELEMENTS) return 0;
        shape z = shape_of(p, s);
        elements *= (double)z.rows * (double)z.heads * (double)z.width;
        if (elements > MOST_ELEMENTS) return 0;
    }
    /* The reference's masks, and the work of a call. */
    return (double)d->tokens * d->batch * d->heads <= 4096;
}

/* Views that point nowhere: a status, or nothing to do. Only a few sequences: each is walked. */
static void call_without_memory(const call *c, problem *p) {
    char workspace[64];
    if (p->d.batch > 65536) return;
    for (int backward = 0; backward < (c->backward ? 2 : 1); backward++) {
        (void)(backward ? c->backward_size : c->forward_size)(p);
        call_it(c, p, backward, workspace, sizeof workspace);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, data + size};
    problem p;
    memset(&p, 0, sizeof p);
    const call *c = &calls[fuzz_below(&in, COUNT(calls))];
    p.slots = c->slots;
    p.count = c->count;
    p.seed = fuzz_take(&in, 2);
    p.odd_values = !fuzz_below(&in, 4);
    draw_desc(&in, &p);
    draw_options(&in, &p, c);
    for (int spoils = fuzz_below(&in, 6) - 2; spoils > 0; spoils--) spoil_desc(&in, &p);
    int valid = nsa_desc_check(&p.d) == NSA_OK;
    FUZZ_ASSERT(valid || p.spoilt, "refused without a fault");
    check_numbers(&in);
    if (valid) check_index(&in, &p.d);
    if (!valid || !is_small(&p)) {
        call_without_memory(c, &p);
        return 0;
    }
    if (draw_views(&in, &p, &p.x, 0) && run(&in, c, &p, 0) && c->backward &&
        draw_views(&in, &p, &p.dx, 1))
        run(&in, c, &p, 1);
    if (c->forward == slc_forward) check_lists(&p);
    guards_free();
    return 0;
}

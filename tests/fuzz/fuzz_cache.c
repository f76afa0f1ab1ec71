/* fuzz_cache.c - schedules of the decoding cache that the fuzzer draws: appends of any size,
   guesses taken back, rewinds, forks within a cache and between two, refused calls. Twin:
   fuzz_api.c has the other calls. Not here: the whole forward itself, which is what decoding is
   held against.

   A sequence is a list of tokens' names; a token's rows are a function of its name. After each
   append the new rows must be, to the bit, those of nsa_attention_forward over the sequence's
   names. */
#include "fuzz.h"

#include "harness/check.h"
#include "nsa.h"

enum {
    CACHES = 2,
    SEQUENCES = 2,
    ROOM = 40,
    INPUTS = 8,
    OUTPUTS = 8,
    MOST_DIM = 8,
    MOST_HEADS = 4
};

typedef struct sequence {
    uint8_t names[ROOM];
    int length, newest;
} sequence;

typedef struct world {
    nsa_desc d;
    nsa_dtype dtype;
    int max_rewind;
    nsa_compress k_phi, v_phi;
    nsa_cache cache[CACHES];
    void *memory[CACHES];
    sequence held[CACHES][SEQUENCES];
} world;

/* A cell is as wide as any element; rows have room for the widest. */
enum { ROW = MOST_HEADS * 32, CELLS = SEQUENCES * ROOM * ROW };
static double step_memory[INPUTS + OUTPUTS][CELLS], whole_memory[INPUTS + OUTPUTS + 2][CELLS];
static double parameters[2][5][MOST_HEADS * 64 * MOST_DIM];

static void put(nsa_tensor *x, int at, double value) {
    if (x->dtype == NSA_F32) ((float *)x->data)[at] = (float)value;
    if (x->dtype == NSA_BF16) ((uint16_t *)x->data)[at] = nsa_f32_to_bf16((float)value);
    if (x->dtype == NSA_F16) ((uint16_t *)x->data)[at] = nsa_f32_to_f16((float)value);
}

/* The views of an attention, inputs first; widths go with them. */
static void lay_out(const world *w, nsa_attention *x, double memory[][CELLS], int rows,
                    nsa_tensor *views[INPUTS + OUTPUTS]) {
    const nsa_desc *d = &w->d;
    int list = nsa_block_list_width(d), h = d->heads, hk = d->kv_heads;
    struct {
        nsa_tensor *view;
        int heads, width;
        nsa_dtype dtype;
    } all[] = {{&x->q, h, d->dim, w->dtype},          {&x->k_slc, hk, d->dim, w->dtype},
               {&x->v_slc, hk, d->dim_v, w->dtype},   {&x->k_win, hk, d->dim, w->dtype},
               {&x->v_win, hk, d->dim_v, w->dtype},   {&x->k_cmp.x, hk, d->dim, w->dtype},
               {&x->v_cmp.x, hk, d->dim_v, w->dtype}, {&x->gates, d->gate_heads, 3, NSA_F32},
               {&x->out, h, d->dim_v, w->dtype},      {&x->out_cmp, h, d->dim_v, w->dtype},
               {&x->out_slc, h, d->dim_v, w->dtype},  {&x->out_win, h, d->dim_v, w->dtype},
               {&x->lse_cmp, h, 1, NSA_REAL_DTYPE},   {&x->lse_slc, h, 1, NSA_REAL_DTYPE},
               {&x->lse_win, h, 1, NSA_REAL_DTYPE},   {&x->blocks, hk, list, NSA_I32}};
    memset(x, 0, sizeof *x);
    x->k_cmp = w->k_phi;
    x->v_cmp = w->v_phi;
    for (int i = 0; i < INPUTS + OUTPUTS; i++) {
        *all[i].view = nsa_tensor_bthd(memory[i], all[i].dtype, rows, all[i].heads, all[i].width);
        views[i] = all[i].view;
    }
}

static void put_token(nsa_tensor *views[], int row, uint8_t name) {
    for (int i = 0; i < INPUTS; i++)
        for (int e = 0; e < views[i]->token; e++) {
            uint64_t h = check_hash((uint64_t)i + 1, (uint64_t)(name * 512 + e));
            double value = (double)(int64_t)(h % 2048) / 512 - 2;
            if (name == 255 && h % 97 == 0) value = (double)NAN;
            put(views[i], row * (int)views[i]->token + e, value);
        }
}

static size_t element_bytes(const nsa_tensor *x) {
    return x->dtype == NSA_BF16 || x->dtype == NSA_F16 ? 2 : 4;
}

/* ---- Drawing ---- */

static void draw_phi(fuzz_input *in, world *w, nsa_compress *x, int dim, int which) {
    const nsa_desc *d = &w->d;
    memset(x, 0, sizeof *x);
    x->phi = (nsa_phi)fuzz_below(in, 3);
    x->dim = dim;
    x->hidden = 1 + fuzz_below(in, 4);
    int mlp = x->phi == NSA_PHI_MLP, l = d->cmp_block;
    struct {
        nsa_tensor *view;
        int rows, width, wanted;
    } all[] = {{&x->pos, l, dim, mlp && fuzz_below(in, 2)},
               {&x->w1, mlp ? x->hidden : l, mlp ? l * dim : dim, x->phi != NSA_PHI_MEAN},
               {&x->b1, 1, mlp ? x->hidden : dim, x->phi != NSA_PHI_MEAN && fuzz_below(in, 2)},
               {&x->w2, dim, x->hidden, mlp},
               {&x->b2, 1, dim, mlp && fuzz_below(in, 2)}};
    for (int i = 0; i < 5; i++) {
        if (!all[i].wanted) continue;
        *all[i].view =
            nsa_tensor_bthd(parameters[which][i], w->dtype, all[i].rows, d->kv_heads, all[i].width);
        for (int e = 0; e < all[i].rows * d->kv_heads * all[i].width; e++)
            put(all[i].view, e, check_normal((uint64_t)(which * 8 + i), (uint64_t)e) / 4);
    }
}

static void draw_world(fuzz_input *in, world *w) {
    static const nsa_dtype dtypes[] = {NSA_F32, NSA_BF16, NSA_F16};
    int kv = 1 + fuzz_below(in, 2), heads = kv * (1 + fuzz_below(in, 2));
    memset(w, 0, sizeof *w);
    w->dtype = dtypes[fuzz_below(in, 3)];
    int room = ROOM - fuzz_below(in, 8);
    w->d = nsa_desc_default(SEQUENCES, room, heads, kv, 1 + fuzz_below(in, MOST_DIM));
    nsa_desc *d = &w->d;
    d->dim_v = 1 + fuzz_below(in, MOST_DIM);
    d->cmp_stride = 1 + fuzz_below(in, 4);
    d->cmp_block = d->cmp_stride * (1 + fuzz_below(in, 2));
    d->slc_block = d->cmp_block + d->cmp_stride * fuzz_below(in, 3);
    d->slc_count = 3 + fuzz_below(in, 4);
    d->forced = (nsa_forced)fuzz_below(in, 2);
    d->score_map = (nsa_score_map)fuzz_below(in, 2);
    d->window = 1 + fuzz_below(in, 50);
    d->window_rule = (nsa_window_rule)fuzz_below(in, 2);
    d->gate = (nsa_gate_kind)fuzz_below(in, 3);
    d->gate_heads = fuzz_below(in, 2) ? kv : heads;
    d->threads = 1;
    w->max_rewind = fuzz_below(in, 24);
    draw_phi(in, w, &w->k_phi, d->dim, 0);
    draw_phi(in, w, &w->v_phi, d->dim_v, 1);
    for (int i = 0; i < CACHES; i++) {
        size_t bytes = nsa_cache_size(d, w->dtype, w->max_rewind);
        FUZZ_ASSERT(bytes > 0, "no size for a geometry without a fault");
        w->memory[i] = malloc(bytes);
        memset(w->memory[i], 0xff, bytes); /* what was not written is not read */
        FUZZ_ASSERT(
            nsa_cache_init(&w->cache[i], d, w->dtype, w->max_rewind, w->memory[i], bytes - 1),
            "a byte too few is taken");
        FUZZ_ASSERT(!nsa_cache_init(&w->cache[i], d, w->dtype, w->max_rewind, w->memory[i], bytes),
                    "cache");
    }
}

/* ---- What may be done ---- */

/* Rows `first` .. of a step beside those of the whole sequence. */
static void compare(const world *w, nsa_tensor *step[], int b, const sequence *q, int first) {
    nsa_attention whole;
    nsa_tensor *views[INPUTS + OUTPUTS];
    lay_out(w, &whole, whole_memory, q->length, views);
    int cmp = nsa_cmp_count(&w->d, q->length);
    whole.k_cmp.out =
        nsa_tensor_bthd(whole_memory[INPUTS + OUTPUTS], w->dtype, cmp, w->d.kv_heads, w->d.dim);
    whole.v_cmp.out = nsa_tensor_bthd(whole_memory[INPUTS + OUTPUTS + 1], w->dtype, cmp,
                                      w->d.kv_heads, w->d.dim_v);
    for (int t = 0; t < q->length; t++) put_token(views, t, q->names[t]);
    nsa_desc d = w->d;
    d.batch = 1;
    d.tokens = d.count = q->length;
    size_t bytes = nsa_attention_forward_workspace_size(&whole, &d);
    void *workspace = malloc(bytes);
    FUZZ_ASSERT(nsa_attention_forward(&whole, &d, workspace, bytes) == NSA_OK, "whole");
    free(workspace);
    for (int i = INPUTS; i < INPUTS + OUTPUTS; i++) {
        size_t row = (size_t)step[i]->token * element_bytes(step[i]);
        const char *got =
            (char *)step[i]->data + (size_t)b * (size_t)step[i]->batch * element_bytes(step[i]);
        const char *want = (char *)views[i]->data + (size_t)first * row;
        FUZZ_ASSERT(!memcmp(got, want, (size_t)(q->length - first) * row),
                    "output %d of sequence %d, tokens %d .. %d", i, b, first, q->length);
    }
}

static int room_of(const world *w, int c, int b) {
    int room = w->d.tokens - w->held[c][b].length;
    return room < w->max_rewind + 1 ? room : w->max_rewind + 1;
}

static void append(fuzz_input *in, world *w, int c) {
    nsa_attention x;
    nsa_tensor *views[INPUTS + OUTPUTS];
    nsa_reads reads[SEQUENCES];
    int32_t counts[SEQUENCES];
    int most = 0, fits = 1, before[SEQUENCES];
    for (int b = 0; b < SEQUENCES; b++) {
        counts[b] = fuzz_below(in, w->max_rewind + 3);
        if (!fuzz_below(in, 32))
            counts[b] = (int32_t)fuzz_number(in);
        else if (fuzz_below(in, 8) && counts[b] > room_of(w, c, b))
            counts[b] = room_of(w, c, b);
        fits = fits && counts[b] >= 0 && counts[b] <= room_of(w, c, b);
        if (counts[b] > most) most = counts[b];
    }
    if (most > ROOM) most = (int)(fuzz_take(in, 1) % ROOM);
    lay_out(w, &x, step_memory, ROOM, views);
    for (int b = 0; fits && b < SEQUENCES; b++) {
        sequence *q = &w->held[c][b];
        before[b] = q->length;
        for (int t = 0; t < counts[b]; t++) {
            uint8_t name = (uint8_t)fuzz_take(in, 1);
            put_token(views, b * ROOM + t, name);
            q->names[q->length++] = name;
        }
        if (q->length > q->newest) q->newest = q->length;
    }
    size_t bytes = nsa_decode_workspace_size(&x, &w->cache[c], most);
    char *workspace = malloc(bytes + 1);
    nsa_status s = nsa_decode(&x, &w->cache[c], most, counts, reads, workspace, bytes);
    free(workspace);
    FUZZ_ASSERT((s == NSA_OK) == fits, "decode: %s %s", nsa_status_name(s), nsa_status_where(s));
    for (int b = 0; fits && b < SEQUENCES; b++)
        if (counts[b]) compare(w, views, b, &w->held[c][b], before[b]);
}

static void take_back(fuzz_input *in, world *w, int c) {
    int b = fuzz_below(in, SEQUENCES);
    sequence *q = &w->held[c][b];
    int length = fuzz_below(in, 8) ? fuzz_below(in, q->length + 2) : (int)fuzz_number(in);
    int ok = !length || (length > 0 && length <= q->length && length >= q->newest - w->max_rewind);
    nsa_status s = nsa_cache_rewind(&w->cache[c], b, length);
    /* Forward again, to what the rings still hold, is not asked for here. */
    if (length > q->length && length <= q->newest) {
        if (s == NSA_OK) nsa_cache_rewind(&w->cache[c], b, q->length);
        return;
    }
    FUZZ_ASSERT((s == NSA_OK) == ok, "rewind from %d (newest %d) to %d: %s", q->length, q->newest,
                length, nsa_status_name(s));
    if (!ok) return;
    q->length = length;
    if (!length) q->newest = 0;
}

static void fork_one(fuzz_input *in, world *w) {
    int from = fuzz_below(in, CACHES), to = fuzz_below(in, CACHES);
    int a = fuzz_below(in, SEQUENCES), b = fuzz_below(in, SEQUENCES);
    sequence *source = &w->held[from][a];
    int length = fuzz_below(in, 8) ? fuzz_below(in, source->length + 1) : (int)fuzz_number(in);
    nsa_status s = nsa_cache_fork(&w->cache[to], b, &w->cache[from], a, length);
    if (s != NSA_OK) {
        int fine = !length || (length > 0 && length <= source->length &&
                               length >= source->newest - w->max_rewind);
        FUZZ_ASSERT(!fine, "fork of %d (newest %d) at %d: %s", source->length, source->newest,
                    length, nsa_status_name(s));
        return;
    }
    FUZZ_ASSERT(length >= 0 && length <= source->newest, "fork at %d is taken", length);
    sequence copy = *source;
    copy.length = length;
    w->held[to][b] = copy;
    w->held[to][b].newest = w->cache[to].newest[b];
}

static void refused_calls(fuzz_input *in, world *w, int c) {
    nsa_desc d = w->d;
    int sequence_number = (int)fuzz_number(in), length = (int)fuzz_number(in);
    if (sequence_number < 0 || sequence_number >= SEQUENCES)
        FUZZ_ASSERT(nsa_cache_rewind(&w->cache[c], sequence_number, length) != NSA_OK,
                    "sequence %d", sequence_number);
    int *fields[] = {&d.batch,     &d.tokens,    &d.heads,  &d.kv_heads,  &d.dim,    &d.dim_v,
                     &d.cmp_block, &d.slc_block, &d.window, &d.slc_count, &d.threads};
    int number = (int)fuzz_number(in);
    *fields[fuzz_below(in, 11)] = number;
    nsa_dtype dtype = (nsa_dtype)fuzz_below(in, 8);
    int max_rewind = fuzz_below(in, 2) ? w->max_rewind : (int)fuzz_number(in);
    size_t bytes = nsa_cache_size(&d, dtype, max_rewind);
    nsa_cache other;
    char *memory = malloc(bytes < 1 << 16 ? bytes + 1 : 64);
    nsa_status s =
        nsa_cache_init(&other, &d, dtype, max_rewind, memory, bytes < 1 << 16 ? bytes : 64);
    FUZZ_ASSERT((s == NSA_OK) == (bytes > 0 && bytes < 1 << 16), "a cache of %zu bytes: %s", bytes,
                nsa_status_name(s));
    if (s == NSA_OK) (void)nsa_cache_fork(&other, 0, &w->cache[c], 0, w->held[c][0].length);
    free(memory);
    /* A size for it, or none: a copy whose descriptor is spoilt is not written to. */
    nsa_attention x;
    nsa_tensor *views[INPUTS + OUTPUTS];
    lay_out(w, &x, step_memory, ROOM, views);
    other = w->cache[c];
    other.desc = d;
    (void)nsa_decode_workspace_size(&x, &other, length);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, data + size};
    world w;
    draw_world(&in, &w);
    for (int i = 0; i < 48 && in.at < in.end; i++) {
        int kind = fuzz_below(&in, 8), c = fuzz_below(&in, CACHES);
        if (kind < 4)
            append(&in, &w, c);
        else if (kind < 6)
            take_back(&in, &w, c);
        else if (kind < 7)
            fork_one(&in, &w);
        else
            refused_calls(&in, &w, c);
    }
    for (int c = 0; c < CACHES; c++)
        for (int b = 0; b < SEQUENCES; b++)
            FUZZ_ASSERT(w.cache[c].lengths[b] == w.held[c][b].length, "length of %d", b);
    for (int c = 0; c < CACHES; c++) free(w.memory[c]);
    return 0;
}

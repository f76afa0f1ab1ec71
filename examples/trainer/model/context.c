/* context.c - a sequence that several processes divide: which rows each has, what nsa.h is asked
   for them, how k and v come to all of them, how the gradients of k and v come back. Twin: model.h.
   It knows no link; dist.h's calls move the blocks.

   Each row of a batch is cut into 2 N chunks, and process r of N has chunks r and 2 N - 1 - r. So
   all have equally many rows, and as many keys to read: those of slc and win are soon as many as
   they will be, and those of cmp grow with a query's place. Everything but attention goes row by
   row. Before attention all processes gather k and v, rotated, and compress them themselves, so
   phi's windows know no borders. A query may select any block, so every process may need every row;
   passing rows round and merging what attention makes of them would move the same bytes.
   Backward adds to the gradients of all rows, and the processes' sums are taken in an order that
   the layout decides. */
#include <stdlib.h>

#include "model/model_inside.h"

enum { HALVES = 2, PIECE = 1 << 18 }; /* reals of a block that is exchanged, about */

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Some rows of the chunks that have one number in all processes; first counts from the chunk's
   begin. */
typedef struct piece {
    int row, half; /* of the batch; of this process's chunks */
    int first, count;
} piece;

static int chunk_tokens(const model *m) {
    return m->tokens_each / HALVES;
}

/* Its first row in a row of the batch, in process r. */
static int place_of(const model *m, const piece *p, int r) {
    int chunk = p->half ? HALVES * m->context - 1 - r : r;
    return chunk * chunk_tokens(m) + p->first;
}

/* The same in the batch; and among the rows that the process itself has. */
static int64_t whole_row(const model *m, const piece *p, int r) {
    return (int64_t)p->row * m->sequence + place_of(m, p, r);
}

static int64_t own_row(const model *m, const piece *p) {
    return (int64_t)p->row * m->tokens_each + p->half * chunk_tokens(m) + p->first;
}

static int own_rank(const model *m) {
    return m->options.dist->part;
}

/* Pieces of at most `most` rows, in the order of this process's rows; begin with {0}. */
static bool next_piece(const model *m, piece *p, int most) {
    int tokens = chunk_tokens(m);
    p->first += p->count;
    if (p->first == tokens) {
        p->first = 0;
        if (++p->half == HALVES) {
            p->half = 0;
            p->row++;
        }
    }
    p->count = tokens - p->first < most ? tokens - p->first : most;
    return p->row < m->batch;
}

/* ---- Slices -------------------------------------------------------------------------------- */

static void add_slice(model *m, slice p) {
    m->slices[m->slice_count++] = p;
}

/* One call for all rows of the batch. */
static void add_whole(model *m, const model_batch *b) {
    slice p = {.batch = m->batch, .tokens = m->tokens_each, .count = m->tokens_each};
    if (m->appending) {
        p.tokens = m->past + m->rows;
        p.first = m->past;
    }
    if (b->begins) {
        p.batch = b->documents;
        p.tokens = p.count = b->longest;
        p.begins = m->begins;
        p.rows = m->rows;
    }
    add_slice(m, p);
}

/* One call for each of the two chunks, with the keys up to its end. */
static void add_chunks(model *m) {
    for (piece p = {0}; p.half < HALVES; p.half++) {
        int first = place_of(m, &p, own_rank(m));
        add_slice(m, (slice){.batch = m->batch,
                             .tokens = first + chunk_tokens(m),
                             .first = first,
                             .count = chunk_tokens(m),
                             .query_row = own_row(m, &p)});
    }
}

/* Of a chunk's documents the one that goes on in it has a call of its own, for all its keys; those
   that begin in it share one. Returns how many begins it has added to those in m->ids. */
static int add_documents(model *m, const piece *p, const int32_t *begins, int used) {
    int64_t at = whole_row(m, p, own_rank(m)), end = at + p->count;
    int32_t *list = m->ids + used;
    int i = 0, count = 0, longest = 0;
    while (begins[i + 1] <= at) i++;
    if (begins[i] < at) {
        int last = (int)(begins[i + 1] < end ? begins[i + 1] : end);
        add_slice(m, (slice){.batch = 1,
                             .tokens = last - begins[i],
                             .first = (int)at - begins[i],
                             .count = last - (int)at,
                             .query_row = own_row(m, p),
                             .key_row = begins[i]});
        i++;
    }
    if (begins[i] >= end) return 0;
    int64_t from = begins[i];
    for (; begins[i] < end; i++) {
        int last = (int)(begins[i + 1] < end ? begins[i + 1] : end);
        list[count++] = (int32_t)(begins[i] - from);
        list[count] = (int32_t)(last - from);
        if (last - begins[i] > longest) longest = last - begins[i];
    }
    add_slice(m, (slice){.batch = count,
                         .tokens = longest,
                         .count = longest,
                         .begins = m->begins + used,
                         .rows = list[count],
                         .query_row = own_row(m, p) + from - at,
                         .key_row = from});
    return count + 1;
}

void context_slices(model *m, const model_batch *b) {
    m->slice_count = 0;
    m->begins_used = 0;
    if (!m->split)
        add_whole(m, b);
    else if (!b->begins)
        add_chunks(m);
    else
        for (piece p = {0}; next_piece(m, &p, chunk_tokens(m));)
            m->begins_used += add_documents(m, &p, b->begins, m->begins_used);
}

/* ---- The batch ----------------------------------------------------------------------------- */

bool context_check(const model *m, const model_batch *b, fault *f) {
    int chunks = HALVES * m->context;
    return b->tokens_each % chunks == 0 ||
           fault_set(f, "model: rows of %d tokens, divided among %d processes: a multiple of %d",
                     b->tokens_each, m->context, chunks);
}

/* The place of each of this process's rows in its document, into m->ids. */
static void find_places(const model *m, const int32_t *begins) {
    int document = 0;
    int32_t *to = m->ids;
    for (piece p = {0}; next_piece(m, &p, chunk_tokens(m));) {
        int64_t row = whole_row(m, &p, own_rank(m));
        for (int i = 0; i < p.count; i++, row++) {
            while (begins && begins[document + 1] <= row) document++;
            *to++ = (int32_t)(begins ? row - begins[document] : place_of(m, &p, own_rank(m)) + i);
        }
    }
}

static void upload_rows(const model *m, int32_t *to, const int32_t *from) {
    const ops *o = m->o;
    if (!m->split) {
        o->upload(o, to, from, (size_t)m->rows * sizeof *to);
        return;
    }
    for (piece p = {0}; next_piece(m, &p, chunk_tokens(m));)
        o->upload(o, to + own_row(m, &p), from + whole_row(m, &p, own_rank(m)),
                  (size_t)p.count * sizeof *to);
}

void context_upload(model *m, const model_batch *b) {
    const ops *o = m->o;
    upload_rows(m, m->tokens, b->tokens);
    if (b->labels) upload_rows(m, m->labels, b->labels);
    if (b->begins && !m->split)
        o->upload(o, m->begins, b->begins, ((size_t)b->documents + 1) * sizeof *b->begins);
    if (!m->split) return;
    if (b->begins) o->upload(o, m->begins, m->ids, (size_t)m->begins_used * sizeof *m->ids);
    find_places(m, b->begins);
    o->upload(o, m->places, m->ids, (size_t)m->rows * sizeof *m->ids);
}

/* ---- Exchanges ----------------------------------------------------------------------------- */

static int widest_keys(const model *m) {
    int most = 0;
    for (int i = 0; i < m->config.n_layers; i++)
        if (layer_keys(m, i) > most) most = layer_keys(m, i);
    return most;
}

/* Rows that are exchanged at once. */
static int exchange_rows(const model *m) {
    int most = m->options.tokens / (HALVES * m->context), rows = PIECE / widest_keys(m);
    return rows < 1 ? 1 : rows < most ? rows : most;
}

static int64_t exchange_reals(const model *m) {
    return (int64_t)exchange_rows(m) * widest_keys(m);
}

static void *element_at(const model *m, void *base, int64_t elements) {
    return (char *)base + (size_t)elements * m->element;
}

static void gather_piece(model *m, int layer, const piece *p) {
    const ops *o = m->o;
    const scratch *s = &m->scratch;
    int width = layer_keys(m, layer), fused = layer_fused(m, layer);
    int64_t q = (int64_t)m->config.n_heads * m->config.d_k;
    size_t bytes = (size_t)p->count * (size_t)width * m->element;
    int64_t each = (int64_t)((bytes + sizeof(real) - 1) / sizeof(real));
    o->copy_columns(o, s->exchange + own_rank(m) * each, width,
                    element_at(m, m->acts[layer].qkv, own_row(m, p) * fused + q), fused, p->count,
                    width);
    dist_gather_blocks(m->options.dist, s->exchange, each);
    for (int r = 0; r < m->context; r++)
        o->copy(o, element_at(m, s->keys, whole_row(m, p, r) * width), s->exchange + r * each,
                bytes);
}

void context_gather(model *m, int layer) {
    if (!m->split || m->gathered == layer) return;
    for (piece p = {0}; next_piece(m, &p, exchange_rows(m));) gather_piece(m, layer, &p);
    m->gathered = layer;
    m->o->mark(m->o, m->phase, layer);
}

void context_begin_backward(model *m, int layer) {
    if (!m->split) return;
    if (m->scratch.hidden) m->gathered = -1; /* the MLP has been where they were */
    context_gather(m, layer);
    m->o->zero(m->o, m->scratch.dkeys,
               (size_t)(m->batch * (int64_t)m->sequence * layer_keys(m, layer)) * sizeof(real));
}

/* The sums of this process's rows, in the back end's dtype. */
static void *rounded(const model *m, real *sums, real *room, int64_t count) {
    if (m->o->dtype == NSA_REAL_DTYPE) return sums;
    m->o->convert(m->o, room, sums, count);
    return room;
}

static void reduce_piece(model *m, int layer, const piece *p) {
    const ops *o = m->o;
    const scratch *s = &m->scratch;
    int width = layer_keys(m, layer), fused = layer_fused(m, layer);
    int rotated = layer_rotated(m, layer), rank = own_rank(m);
    int64_t q = (int64_t)m->config.n_heads * m->config.d_k, each = (int64_t)p->count * width;
    for (int r = 0; r < m->context; r++)
        o->copy(o, s->exchange + r * each, s->dkeys + whole_row(m, p, r) * width,
                (size_t)each * sizeof *s->dkeys);
    dist_reduce_blocks(m->options.dist, s->exchange, each);
    real *other = s->exchange + (rank + 1) % m->context * each; /* nobody reads it any more */
    char *own = rounded(m, s->exchange + rank * each, other, each);
    o->copy_columns(o, element_at(m, s->drotated, own_row(m, p) * rotated + q), rotated, own, width,
                    p->count, rotated - q);
    o->copy_columns(o, element_at(m, s->dqkv, own_row(m, p) * fused + rotated), fused,
                    element_at(m, own, rotated - q), width, p->count, width - (rotated - q));
}

void context_reduce(model *m, int layer) {
    if (!m->split) return;
    for (piece p = {0}; next_piece(m, &p, exchange_rows(m));) reduce_piece(m, layer, &p);
    m->o->mark(m->o, m->phase, layer);
}

/* ---- Opening ------------------------------------------------------------------------------- */

bool context_open(model *m, fault *f) {
    const model_options *o = &m->options;
    int chunks = HALVES * m->context;
    size_t batch = (size_t)o->batch, rows = batch * (size_t)(o->tokens / m->context);
    if (m->context > 1 && o->tokens % chunks)
        return fault_set(f,
                         "model: rows of %d tokens, divided among %d processes: a multiple of %d",
                         o->tokens, m->context, chunks);
    m->slices = calloc(m->context > 1 ? 2 * HALVES * batch : 1, sizeof *m->slices);
    if (m->context > 1) m->ids = calloc(rows + HALVES * batch, sizeof *m->ids);
    return (m->slices && (m->ids || m->context == 1)) || fault_set(f, "model: out of memory");
}

void context_layout(model *m, arena *a, size_t free_bytes) {
    scratch *s = &m->scratch;
    const model_config *c = &m->config;
    if (m->context == 1) return;
    int64_t all = (int64_t)m->options.batch * m->options.tokens, width = widest_keys(m);
    nsa_desc d = model_desc(m, 0, m->options.batch, m->options.tokens);
    int64_t blocks = (int64_t)m->options.batch * nsa_cmp_count(&d, m->options.tokens);
    size_t sums = ((size_t)(all * width) * sizeof(real) + 63) / 64 * 64;
    size_t keys = (size_t)(all * width) * m->element, wide = (size_t)c->n_kv_groups * m->element;
    size_t lent = (m->options.training ? sums : 0) + (s->hidden ? keys : 0);
    if (lent > free_bytes) arena_take(a, FOR_BACKWARD, lent - free_bytes);
    if (m->options.training) s->dkeys = s->act;
    s->keys = s->hidden ? (char *)s->act + sums : arena_take(a, FOR_BACKWARD, keys);
    s->k_cmp = arena_take(a, FOR_BACKWARD, (size_t)blocks * wide * (size_t)c->d_k);
    s->v_cmp = arena_take(a, FOR_BACKWARD, (size_t)blocks * wide * (size_t)c->d_v);
    s->exchange = arena_take(a, FOR_COMMUNICATION,
                             (size_t)(m->context * exchange_reals(m)) * sizeof *s->exchange);
    m->places = arena_take(a, FOR_BATCH, (size_t)m->rows * sizeof *m->places);
}

size_t context_bytes(const model *m) {
    return m->context > 1 ? dist_blocks_bytes(m->options.dist, m->o, exchange_reals(m)) : 0;
}

bool context_attach(model *m, fault *f) {
    return m->context == 1 || dist_attach_blocks(m->options.dist, m->o, exchange_reals(m), f);
}

void context_close(model *m) {
    free(m->slices);
    free(m->ids);
}

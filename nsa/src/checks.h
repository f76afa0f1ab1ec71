/* ---- Checks -------------------------------------------------------------------------------------
   Twin: kernels/checks.cuh. Not here: what only one primitive asks (its own room). */
#pragma once
#include "index.h"
#include "isa.h"
#include "views.h"

/* Every kind of error once: its name and its sentence. */
#define NSA__STATUSES(X)                                                                           \
    X(NSA_OK, "success")                                                                           \
    X(NSA_ERROR_NULL, "a pointer that is needed is null")                                          \
    X(NSA_ERROR_ALIGNMENT, "data must be aligned to the size of its element, on CUDA to 16 bytes") \
    X(NSA_ERROR_DTYPE,                                                                             \
      "this dtype is not allowed here: tensors are f32, bf16 or f16 (f64 where "                   \
      "NSA_REAL is double), of forward's keys and values i8 or f8 too, lse is of NSA_REAL_DTYPE, " \
      "blocks and positions are "                                                                  \
      "i32, a gradient has its tensor's dtype or NSA_REAL_DTYPE; on CUDA all are "                 \
      "of one dtype, lse is f32, and the dtype is one that was compiled in")                       \
    X(NSA_ERROR_STRIDE, "strides must be >= 0, on CUDA multiples of 16 bytes, and those of an "    \
                        "output must keep its rows apart")                                         \
    X(NSA_ERROR_OVERFLOW, "the product of these sizes passes the address space")                   \
    X(NSA_ERROR_SIZE,                                                                              \
      "out of range: batch, strides, window and hidden are >= 1, tokens, rows, list_heads, a "     \
      "score's stride and max_rewind >= 0, "                                                       \
      "heads and blocks 1..2^30-1, slc_count 1..2^29-1, slc_init and slc_local 0..2^29-1, "        \
      "page_tokens >= 1, page_count and table_width >= 0, "                                        \
      "threads 0..65536, dims 1..576; of rope dim is even, base 0 or > 1, factor and "             \
      "trained_context >= 1 (LongRoPE: 2), fast > slow > 0, context, magnitude and mscale >= 0, "  \
      "short_factors and long_factors > 0, and all are numbers; in a chain k_cmp.dim is dim and "  \
      "v_cmp.dim is dim_v; on CUDA dims and hidden are multiples of 8, dim and dim_v at most "     \
      "NSA_CUDA_MAX_DIM, which is at most 256, and those of rope and phi at most 256")             \
    X(NSA_ERROR_HEADS,                                                                             \
      "heads must be a multiple of kv_heads, gate_heads must be heads or kv_heads, list_heads 0 "  \
      "or a multiple of kv_heads that divides heads (on CUDA and in a cache kv_heads)")            \
    X(NSA_ERROR_CMP_STRIDE,                                                                        \
      "cmp_stride must divide cmp_block, and page_tokens if there are pages")                      \
    X(NSA_ERROR_SLC_BLOCK,                                                                         \
      "slc_block must be a multiple of cmp_stride and at least cmp_block, on CUDA at most 128")    \
    X(NSA_ERROR_SLC_COUNT,                                                                         \
      "slc_init + slc_local must not exceed slc_count (or use NSA_FORCED_ON_TOP)")                 \
    X(NSA_ERROR_SLC_LOCAL, "slc_local must be >= 1 (>= 0 with NSA_FORCED_ON_TOP, 0 or 1 with "     \
                           "NSA_FORCED_TAIL)")                                                     \
    X(NSA_ERROR_RANGE,                                                                             \
      "first, count and query must be >= 0, first + count <= tokens and query < tokens (unless "   \
      "mask is NSA_MASK_NONE, without begins and firsts, on the CPU), firsts and counts of every " \
      "sequence too, and no count above desc.count: nsa_check_pages says where; a sequence must "  \
      "be in 0..batch-1")                                                                          \
    X(NSA_ERROR_BEGINS,                                                                            \
      "begins must ascend from 0 or more, and no sequence may be longer than tokens")              \
    X(NSA_ERROR_OPTION, "not a value of this option's enum, or one that is not computed here "     \
                        "(mask in a cache; firsts and pages there and in backward)")               \
    X(NSA_ERROR_SCALE, "must be finite and at most 1e38")                                          \
    X(NSA_ERROR_ISA, "this machine or this build has no such instruction set")                     \
    X(NSA_ERROR_BLOCKS, "a block list must hold candidates of its query, ascending, no "           \
                        "duplicates, -1 behind the last; "                                         \
                        "nsa_check_blocks says which fails, nsa_normalize_blocks mends them")      \
    X(NSA_ERROR_WORKSPACE, "the workspace is null or smaller than its size query says")            \
    X(NSA_ERROR_CUDA, "the CUDA runtime refused; cudaGetLastError says why")                       \
    X(NSA_ERROR_CACHE,                                                                             \
      "the cache has no room for these tokens (its desc.tokens in all, max_rewind + 1 at once), "  \
      "or is of another geometry")                                                                 \
    X(NSA_ERROR_REWIND, "the cache does not hold this length: 0, or at most its length, and at "   \
                        "least its newest length - max_rewind")                                    \
    X(NSA_ERROR_SHARED,                                                                            \
      "the incoming gradient of lse must not be forward's lse: give its own view, or none")        \
    X(NSA_ERROR_PAGES, "every page of a sequence's tokens must be in 0..page_count-1, and its "    \
                       "table long enough; nsa_check_pages says which is not")

NSA_API int nsa_status_kind(nsa_status s) {
    return s & 0xff;
}

/* Of the kind, column 0: its name, column 1: its sentence. */
static const char *nsa__status_says(nsa_status s, int column) {
#define NSA__SAYS(id, text) \
    case id:                \
        return column ? text : #id;
    switch (nsa_status_kind(s)) {
        NSA__STATUSES(NSA__SAYS)
    default:
        return column ? "not a status of this library" : "not a status";
    }
#undef NSA__SAYS
}

NSA_API const char *nsa_status_name(nsa_status s) {
    return nsa__status_says(s, 0);
}

NSA_API const char *nsa_status_text(nsa_status s) {
    return nsa__status_says(s, 1);
}

NSA_API const char *nsa_status_where(nsa_status s) {
#define NSA__NAME(name)       "dx." #name
#define NSA__K_CMP_NAME(name) "dx.k_cmp." #name
#define NSA__V_CMP_NAME(name) "dx.v_cmp." #name
    static const char *const names[] = {
        "dx.", NSA__FIELDS(NSA__NAME), NSA__COMPRESS_FIELDS(NSA__NAME),
        NSA__COMPRESS_FIELDS(NSA__K_CMP_NAME), NSA__COMPRESS_FIELDS(NSA__V_CMP_NAME)};
    const int field = s >> 8, id = field & ~NSA__GRADIENT;
    if ((size_t)id >= sizeof names / sizeof *names) return "";
    return names[id] + (id == field ? sizeof("dx.") - 1 : 0);
}

NSA_API nsa_desc nsa_desc_default(int batch, int tokens, int heads, int kv_heads, int dim) {
    nsa_desc d;
    memset(&d, 0, sizeof d);
    d.batch = batch;
    d.tokens = d.count = tokens;
    d.heads = d.gate_heads = heads;
    d.kv_heads = kv_heads;
    d.dim = d.dim_v = dim;
    d.cmp_block = 32;
    d.cmp_stride = 16;
    d.slc_block = 64;
    d.slc_count = 16;
    d.slc_init = 1;
    d.slc_local = 2;
    d.window = 512;
    return d;
}

/* Limits leave room for sums in int: rows of a query are rounded up to whole vectors, and the width
   of a list is slc_count + slc_init + slc_local. */
static nsa_status nsa__check_ranges(const nsa_desc *d) {
    const struct {
        int value, least, most, field;
    } ranges[] = {
        {d->batch, 1, INT_MAX, NSA__AT_batch},
        {d->tokens, 0, INT_MAX, NSA__AT_tokens},
        {d->heads, 1, INT_MAX / 2, NSA__AT_heads},
        {d->kv_heads, 1, INT_MAX / 2, NSA__AT_kv_heads},
        {d->gate_heads, 1, INT_MAX / 2, NSA__AT_gate_heads},
        {d->list_heads, 0, INT_MAX / 2, NSA__AT_list_heads},
        {d->rows, 0, INT_MAX, NSA__AT_rows},
        {d->dim, 1, NSA__MAX_DIM, NSA__AT_dim},
        {d->dim_v, 1, NSA__MAX_DIM, NSA__AT_dim_v},
        {d->cmp_block, 1, INT_MAX / 2, NSA__AT_cmp_block},
        {d->cmp_stride, 1, INT_MAX, NSA__AT_cmp_stride},
        {d->slc_block, 1, INT_MAX / 2, NSA__AT_slc_block},
        {d->slc_count, 1, INT_MAX / 4, NSA__AT_slc_count},
        {d->slc_init, 0, INT_MAX / 4, NSA__AT_slc_init},
        {d->slc_local, 0, INT_MAX / 4, NSA__AT_slc_local},
        {d->window, 1, INT_MAX, NSA__AT_window},
        {d->threads, 0, 1 << 16, NSA__AT_threads},
        {d->pages ? d->table_width : 0, 0, INT_MAX, NSA__AT_table_width},
        {d->pages ? d->page_tokens : 1, 1, INT_MAX, NSA__AT_page_tokens},
        {d->pages ? d->page_count : 0, 0, INT_MAX, NSA__AT_page_count},
        {(int)d->forced, 0, NSA_FORCED_TAIL, NSA__AT_forced}, /* options from here on */
        {(int)d->score_map, 0, NSA_SCORE_OVERLAP_MAX, NSA__AT_score_map},
        {(int)d->window_rule, 0, NSA_WINDOW_BEFORE_SELF, NSA__AT_window_rule},
        {(int)d->mask, 0, NSA_MASK_NONE, NSA__AT_mask},
        {(int)d->gate, 0, NSA_GATE_NONE, NSA__AT_gate},
        {(int)d->products, 0, NSA_PRODUCTS_F32, NSA__AT_products},
        {(int)d->isa, 0, NSA_ISA_NEON_BF16, NSA__AT_isa},
    };
    int kind = NSA_ERROR_SIZE;
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        if (ranges[i].field == NSA__AT_forced) kind = NSA_ERROR_OPTION;
        if (ranges[i].value < ranges[i].least || ranges[i].value > ranges[i].most)
            return nsa__error(kind, ranges[i].field);
    }
    if (!nsa_isa_available(d->isa)) return nsa__error(NSA_ERROR_ISA, NSA__AT_isa);
    /* it must be finite as a float too */
    if (!nsa__is_finite(d->scale) || fabs(d->scale) > 1e38)
        return nsa__error(NSA_ERROR_SCALE, NSA__AT_scale);
    return NSA_OK;
}

/* `begins` is read here, so this part is the CPU's alone: a CUDA caller's begins lie on the
   device. */
static nsa_status nsa__check_begins(const nsa_desc *d) {
    if (!d->begins) return NSA_OK;
    if (d->begins[0] < 0) return nsa__error(NSA_ERROR_BEGINS, NSA__AT_begins);
    for (int b = 0; b < d->batch; b++) {
        int64_t length = (int64_t)d->begins[b + 1] - d->begins[b];
        if (length < 0 || length > d->tokens) return nsa__error(NSA_ERROR_BEGINS, NSA__AT_begins);
    }
    if (d->rows && d->rows < d->begins[d->batch]) return nsa__error(NSA_ERROR_BEGINS, NSA__AT_rows);
    return NSA_OK;
}

/* Tokens of sequence b. */
static int nsa__tokens_of(const nsa_desc *d, int b) {
    if (d->begins) return d->begins[b + 1] - d->begins[b];
    return d->counts ? d->firsts[b] + d->counts[b] : d->tokens;
}

/* The row of the table that is sequence b's. */
static const int32_t *nsa__table(const nsa_desc *d, int b) {
    return d->pages ? d->pages + (ptrdiff_t)b * d->table_width : NULL;
}

static nsa_status nsa__check_queries(const nsa_desc *d, int b, nsa_page_fault *fault) {
    int64_t first = d->firsts[b], count = d->counts[b];
    int64_t tokens = d->begins ? d->begins[b + 1] - d->begins[b] : d->tokens;
    fault->value = (int32_t)(first < 0 ? first : count);
    fault->reason = first < 0                ? "first below 0"
                    : count < 0              ? "count below 0"
                    : count > d->count       ? "count above desc.count"
                    : first + count > tokens ? "queries behind the last token"
                                             : NULL;
    if (!fault->reason) return NSA_OK;
    return nsa__error(NSA_ERROR_RANGE, first < 0 ? NSA__AT_firsts : NSA__AT_counts);
}

static nsa_status nsa__check_table(const nsa_desc *d, int b, nsa_page_fault *fault) {
    const int32_t *table = nsa__table(d, b);
    int64_t pages = nsa__ceil_div(nsa__tokens_of(d, b), d->page_tokens);
    fault->value = d->table_width;
    fault->reason = "more tokens than the table has pages for";
    if (pages > d->table_width) return nsa__error(NSA_ERROR_PAGES, NSA__AT_pages);
    fault->reason = "not a page";
    for (fault->slot = 0; fault->slot < pages; fault->slot++) {
        fault->value = table[fault->slot];
        if (fault->value < 0 || fault->value >= d->page_count)
            return nsa__error(NSA_ERROR_PAGES, NSA__AT_pages);
    }
    return NSA_OK;
}

/* Like begins, these arrays are read here, so this part is the CPU's alone. */
static nsa_status nsa__check_ragged(const nsa_desc *d, nsa_page_fault *fault) {
    if (!d->firsts != !d->counts)
        return nsa__error(NSA_ERROR_NULL, d->firsts ? NSA__AT_counts : NSA__AT_firsts);
    if (!d->counts && !d->pages) return NSA_OK; /* there may be 2^31 sequences */
    for (fault->sequence = 0; fault->sequence < d->batch; fault->sequence++) {
        fault->slot = 0;
        if (d->counts) NSA__CHECK(nsa__check_queries(d, fault->sequence, fault));
        if (d->pages) NSA__CHECK(nsa__check_table(d, fault->sequence, fault));
    }
    return NSA_OK;
}

/* All rules of a descriptor but those of its arrays. Entry points call it once, through
   nsa_desc_check. */
static nsa_status nsa__check_geometry(const nsa_desc *d) {
    if (!d) return nsa__error(NSA_ERROR_NULL, NSA__AT_desc);
    NSA__CHECK(nsa__check_ranges(d));
    if (d->heads % d->kv_heads) return nsa__error(NSA_ERROR_HEADS, NSA__AT_heads);
    if (d->gate_heads != d->heads && d->gate_heads != d->kv_heads)
        return nsa__error(NSA_ERROR_HEADS, NSA__AT_gate_heads);
    if (d->gate_stride < 0) return nsa__error(NSA_ERROR_STRIDE, NSA__AT_gate_stride);
    if (!nsa__fits(nsa__gate_stride(d), 3, 4, 1))
        return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_gate_stride);
    if (d->heads % nsa__list_heads(d) || nsa__list_heads(d) % d->kv_heads)
        return nsa__error(NSA_ERROR_HEADS, NSA__AT_list_heads);
    if (d->cmp_block % d->cmp_stride) return nsa__error(NSA_ERROR_CMP_STRIDE, NSA__AT_cmp_stride);
    if (d->pages && d->page_tokens % d->cmp_stride)
        return nsa__error(NSA_ERROR_CMP_STRIDE, NSA__AT_page_tokens);
    if (d->slc_block % d->cmp_stride || d->slc_block < d->cmp_block)
        return nsa__error(NSA_ERROR_SLC_BLOCK, NSA__AT_slc_block);
    if (d->forced == NSA_FORCED_INSIDE && d->mask == NSA_MASK_CAUSAL) {
        if (d->slc_local < 1) return nsa__error(NSA_ERROR_SLC_LOCAL, NSA__AT_slc_local);
        if (d->slc_init + d->slc_local > d->slc_count)
            return nsa__error(NSA_ERROR_SLC_COUNT, NSA__AT_slc_count);
    }
    if (d->forced == NSA_FORCED_TAIL && d->slc_local > 1)
        return nsa__error(NSA_ERROR_SLC_LOCAL, NSA__AT_slc_local);
    const int first = d->firsts ? 0 : d->first;
    if (first < 0 || first > d->tokens) return nsa__error(NSA_ERROR_RANGE, NSA__AT_first);
    /* without a mask, of whole sequences, queries need no place among the keys */
    const int apart = d->mask == NSA_MASK_NONE && !d->begins && !d->firsts;
    if (d->count < 0 || d->count > (apart ? INT_MAX : d->tokens) - first)
        return nsa__error(NSA_ERROR_RANGE, NSA__AT_count);
    /* 256: rows of lse, gates and lists are short of it */
    const int64_t widest = nsa__max(256, nsa__max(d->dim, d->dim_v));
    const int64_t rows = nsa__max(d->tokens, d->count);
    if (!nsa__fits(d->batch, rows, d->heads, widest) ||
        !nsa__fits(d->batch, rows, nsa__list_heads(d), nsa_block_list_width(d)))
        return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    return NSA_OK;
}

NSA_API nsa_status nsa_check_pages(const nsa_desc *d, nsa_page_fault *fault) {
    nsa_page_fault found;
    NSA__CHECK(nsa__check_geometry(d));
    NSA__CHECK(nsa__check_begins(d));
    nsa_status s = nsa__check_ragged(d, &found);
    int located = nsa_status_kind(s) == NSA_ERROR_RANGE || nsa_status_kind(s) == NSA_ERROR_PAGES;
    if (fault && located) *fault = found;
    return s;
}

NSA_API nsa_status nsa_desc_check(const nsa_desc *d) {
    return nsa_check_pages(d, NULL);
}

/* A view's shape: (batch, rows, heads, width), or one sequence of all packed rows. */
static nsa__shape nsa__shape_of(const nsa_desc *d, int64_t rows, int64_t packed_rows, int64_t heads,
                                int64_t width) {
    nsa__shape shape = {d->batch, rows, heads, width};
    if (d->begins) {
        shape.batch = 1;
        shape.rows = nsa__max(packed_rows, 0);
    }
    return shape;
}

/* Packed rows up to the last token; a view is addressed from row 0, not from begins[0]. */
static int64_t nsa__packed_tokens(const nsa_desc *d) {
    /* Without any token no row is touched, wherever they would begin. */
    return d->begins && d->begins[d->batch] > d->begins[0] ? d->begins[d->batch] : 0;
}

/* Compressed rows of all sequences. */
static int64_t nsa__cmp_rows(const nsa_desc *d) {
    int64_t rows = d->begins ? 0 : (int64_t)d->batch * nsa_cmp_count(d, d->tokens);
    for (int b = 0; d->begins && b < d->batch; b++)
        rows += nsa_cmp_count(d, d->begins[b + 1] - d->begins[b]);
    return rows;
}

/* The shape of a view on the query's side: row 0 is query `first`. */
static nsa__shape nsa__query_shape(const nsa_desc *d, int64_t heads, int64_t width) {
    /* Query `first` of sequence b is row begins[b] of a packed view. The last sequence that has
       queries has the last row. */
    int64_t in_all = 0;
    if (d->counts) {
        for (int b = 0; b < d->batch; b++) in_all += d->counts[b];
        nsa__shape ragged = {1, in_all, heads, width};
        return ragged;
    }
    for (int b = 0; d->begins && b < d->batch; b++) {
        int64_t length = d->begins[b + 1] - d->begins[b];
        int64_t rows = nsa__min(length - d->first, d->count);
        if (rows > 0) in_all = d->begins[b] + rows;
    }
    return nsa__shape_of(d, d->count, in_all, heads, width);
}

/* The shape of a view of keys: a row for each token, or compressed block. */
static nsa__shape nsa__key_shape(const nsa_desc *d, int compressed, int64_t width) {
    const int64_t rows = compressed ? nsa_cmp_count(d, d->tokens) : d->tokens;
    const int64_t in_all = compressed ? nsa__cmp_rows(d) : nsa__packed_tokens(d);
    const int stride = compressed ? d->cmp_stride : 1;
    const nsa__shape paged = {d->page_count, d->page_tokens / stride, d->kv_heads, width};
    return d->pages ? paged : nsa__shape_of(d, rows, in_all, d->kv_heads, width);
}

/* The dtypes of tensors here. */
enum { NSA__TENSORS = NSA__FLOATS | (NSA_REAL_DTYPE == NSA_F64 ? 1 << NSA_F64 : 0) };

static const nsa__side nsa__cpu = {nsa_desc_check,  nsa__query_shape, nsa__key_shape,
                                   nsa__check_view, NSA__TENSORS,     1u << NSA_REAL_DTYPE};

NSA_API nsa_status nsa_convert_rows(const nsa_tensor *x, const nsa_tensor *out, int batch,
                                    int tokens, int heads, int width) {
    const nsa__shape shape = {batch, tokens, heads, width};
    const unsigned dtypes = (unsigned)NSA__TENSORS | NSA__SCALED;
    nsa_real row[NSA__MAX_DIM];
    if (!x || !out) return nsa__error(NSA_ERROR_NULL, x ? NSA__AT_out : NSA__AT_x);
    if (batch < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_batch);
    if (tokens < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_tokens);
    if (heads < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_heads);
    if (width < 1 || width > NSA__MAX_DIM) return nsa__error(NSA_ERROR_SIZE, NSA__AT_width);
    NSA__CHECK(nsa__check_view(x, shape, dtypes, 0, NSA__AT_x));
    NSA__CHECK(nsa__check_view(out, shape, dtypes, 1, NSA__AT_out));
    for (int b = 0; b < batch; b++)
        for (int t = 0; t < tokens; t++)
            for (int h = 0; h < heads; h++) {
                nsa__load(row, x->dtype, nsa__row(x, b, t, h), width);
                nsa__store(out->dtype, nsa__row(out, b, t, h), row, width);
            }
    return NSA_OK;
}

/* The views of a call under their own names. */
static nsa__checked nsa__checked_of(const nsa_desc *d, int forward, int compressed) {
    const unsigned rows = NSA__TENSORS | (forward ? NSA__SCALED : 0);
    const nsa__checked c = {&nsa__cpu, d, rows, forward, compressed, 0};
    return c;
}

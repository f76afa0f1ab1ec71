/* checks.cuh: what every nsa_cuda_ function asks before it launches; all of it host code.
   Twin: nsa.h, "Checks" and nsa_desc_check. The geometry's rules are nsa_desc_check's; here are
   CUDA's own.
   Not here: anything that reads device memory (begins, block lists). */
#ifndef NSA_CHECKS_CUH
#define NSA_CHECKS_CUH

#include "common.cuh"

#ifndef NSA_CUDA_MAX_DIM
#define NSA_CUDA_MAX_DIM 256
#endif
#if NSA_CUDA_MAX_DIM != 64 && NSA_CUDA_MAX_DIM != 128 && NSA_CUDA_MAX_DIM != 192 && \
    NSA_CUDA_MAX_DIM != 256
#error "NSA_CUDA_MAX_DIM is 64, 128, 192 or 256"
#endif

/* The widest rows that RoPE and phi take, whatever attention is compiled for. */
enum { NSA__CUDA_MAX_ROW = 256 };

/* The dtypes that attention, selection and mlp are compiled for, as a set. */
enum {
    NSA__CUDA_DTYPES = 0
#ifndef NSA_CUDA_NO_F32
                       | 1 << NSA_F32
#endif
#ifndef NSA_CUDA_NO_BF16
                       | 1 << NSA_BF16
#endif
#ifndef NSA_CUDA_NO_F16
                       | 1 << NSA_F16
#endif
};

static inline nsa_status nsa__cuda_status(cudaError_t error) {
    return error == cudaSuccess ? NSA_OK : nsa__error(NSA_ERROR_CUDA, NSA__AT_none);
}

/* The tensors of one call that must all be of `dtype`: that one, if it is compiled in. */
static inline unsigned nsa__cuda_one_dtype(nsa_dtype dtype) {
    return static_cast<unsigned>(dtype) > NSA_I32 ? 0u : NSA__CUDA_DTYPES & 1u << dtype;
}

/* The same where they go with q, which without rows may have any dtype. Then no row of theirs is
   read. */
static inline unsigned nsa__cuda_dtype_of(const nsa_tensor *q, const nsa_desc *d) {
    return d && d->count == 0 ? static_cast<unsigned>(NSA__FLOATS) : nsa__cuda_one_dtype(q->dtype);
}

/* NSA__CUDA_BY_DTYPE(dtype, T, return f<T>(x);): the statement for the element of a dtype. */
#ifdef NSA_CUDA_NO_F32
#define NSA__CUDA_IF_F32(...)
#else
#define NSA__CUDA_IF_F32(...) __VA_ARGS__
#endif
#ifdef NSA_CUDA_NO_BF16
#define NSA__CUDA_IF_BF16(...)
#else
#define NSA__CUDA_IF_BF16(...) __VA_ARGS__
#endif
#ifdef NSA_CUDA_NO_F16
#define NSA__CUDA_IF_F16(...)
#else
#define NSA__CUDA_IF_F16(...) __VA_ARGS__
#endif
#define NSA__CUDA_CASE(id, type, T, ...) \
    case id: {                           \
        typedef type T;                  \
        __VA_ARGS__                      \
    } break;
#define NSA__CUDA_BY_DTYPE(dtype, T, ...)                                          \
    switch (dtype) {                                                               \
        NSA__CUDA_IF_F32(NSA__CUDA_CASE(NSA_F32, float, T, __VA_ARGS__))           \
        NSA__CUDA_IF_BF16(NSA__CUDA_CASE(NSA_BF16, __nv_bfloat16, T, __VA_ARGS__)) \
        NSA__CUDA_IF_F16(NSA__CUDA_CASE(NSA_F16, __half, T, __VA_ARGS__))          \
    default:                                                                       \
        break;                                                                     \
    }

/* The geometry in which every block list has a kv head of its own, for what makes lists and ranks;
   keys are then shared by nsa__cuda_lists_per_kv_head heads. */
static inline nsa_desc nsa__cuda_by_list(const nsa_desc *d) {
    nsa_desc by = *d;
    by.kv_heads = nsa__list_heads(d);
    by.list_heads = 0;
    return by;
}
static inline int nsa__cuda_lists_per_kv_head(const nsa_desc *d) {
    return nsa__list_heads(d) / d->kv_heads;
}

/* The geometry as kernels take it: of a ragged batch `first` counts from each sequence's first
   query, so that a call can be cut into chunks of queries. */
static inline nsa_desc nsa__cuda_all_queries(const nsa_desc *d) {
    nsa_desc all = *d;
    if (d->counts) all.first = 0;
    return all;
}

/* Arrays lie on the device: nsa_desc_check sees a batch of full length instead and, because tables
   are not to be read, one sequence without tokens. */
static inline nsa_status nsa__cuda_check_desc(const nsa_desc *d) {
    static const int32_t no_page = 0;
    if (!d) return nsa__error(NSA_ERROR_NULL, NSA__AT_desc);
    nsa_desc host = *d;
    host.begins = host.firsts = host.counts = host.pages = NULL;
    if (d->firsts) host.first = 0; /* not used there */
    host.isa = NSA_ISA_DETECT;
    NSA__CHECK(nsa_desc_check(&host));
    host.pages = d->pages ? &no_page : NULL;
    host.batch = 1, host.tokens = host.first = host.count = 0;
    NSA__CHECK(nsa_desc_check(&host));
    if (!d->firsts != !d->counts)
        return nsa__error(NSA_ERROR_NULL, d->firsts ? NSA__AT_counts : NSA__AT_firsts);
    if (d->count > d->tokens - (d->firsts ? 0 : d->first))
        return nsa__error(NSA_ERROR_RANGE, NSA__AT_count);
    if (d->dim % 8 || d->dim > NSA_CUDA_MAX_DIM) return nsa__error(NSA_ERROR_SIZE, NSA__AT_dim);
    if (d->dim_v % 8 || d->dim_v > NSA_CUDA_MAX_DIM)
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_dim_v);
    if (d->slc_block > 128) return nsa__error(NSA_ERROR_SLC_BLOCK, NSA__AT_slc_block);
    /* a block's reader is a query and which of its lists, in one int32 (nsa__cuda_reader_of); so is
       a place some tiles behind the last key, and the power of two from the number of keys on */
    if (static_cast<int64_t>(d->tokens) * nsa__cuda_lists_per_kv_head(d) > INT32_MAX / 2 - 63)
        return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    return NSA_OK;
}

/* Of packed sequences the host knows neither the rows in all nor the last: two rows stand for
   them. */
static inline nsa__shape nsa__cuda_shape(const nsa_desc *d, bool packed, int64_t rows,
                                         int64_t heads, int64_t width) {
    nsa__shape shape = {d->batch, rows, heads, width};
    if (packed) {
        shape.rows = rows * d->batch < 2 ? rows * d->batch : 2;
        shape.batch = 1;
    }
    return shape;
}
static inline nsa__shape nsa__cuda_query_shape(const nsa_desc *d, int64_t heads, int64_t width) {
    return nsa__cuda_shape(d, d->begins || d->counts, d->count, heads, width);
}
static inline nsa__shape nsa__cuda_list_shape(const nsa_desc *d, int64_t width) {
    return nsa__cuda_query_shape(d, nsa__list_heads(d), width);
}
/* Of keys: a row for each token, or compressed block. */
static inline nsa__shape nsa__cuda_key_shape(const nsa_desc *d, int compressed, int64_t width) {
    const int64_t rows = compressed ? nsa_cmp_count(d, d->tokens) : d->tokens;
    const int stride = compressed ? d->cmp_stride : 1;
    const nsa__shape paged = {d->page_count, d->page_tokens / stride, d->kv_heads, width};
    return d->pages ? paged : nsa__cuda_shape(d, d->begins != NULL, rows, d->kv_heads, width);
}

/* A view whose rows are read 16 bytes at a time. */
static inline nsa_status nsa__cuda_check_rows(const nsa_tensor *x, nsa__shape shape,
                                              unsigned dtypes, int writes, int field) {
    const nsa_status s = nsa__check_view(x, shape, dtypes, writes, field);
    if (s != NSA_OK || shape.batch == 0 || shape.rows == 0 || shape.heads == 0) return s;
    const int64_t piece = 16 / static_cast<int64_t>(nsa__dtype_bytes(x->dtype));
    if (reinterpret_cast<uintptr_t>(x->data) % 16) return nsa__error(NSA_ERROR_ALIGNMENT, field);
    if ((shape.batch > 1 && x->batch % piece) || (shape.rows > 1 && x->token % piece) ||
        (shape.heads > 1 && x->head % piece))
        return nsa__error(NSA_ERROR_STRIDE, field);
    return NSA_OK;
}

static const nsa__side nsa__cuda_side = {nsa__cuda_check_desc, nsa__cuda_query_shape,
                                         nsa__cuda_key_shape,  nsa__cuda_check_rows,
                                         NSA__FLOATS,          1u << NSA_F32};

/* The views of a call; its rows are of `dtypes`. */
static inline nsa__checked nsa__cuda_checked_of(const nsa_desc *d, unsigned dtypes, int forward,
                                                int compressed) {
    const nsa__checked c = {&nsa__cuda_side, d, dtypes, forward, compressed, 0};
    return c;
}

/* A view on the query's side without its first `rows` rows; none stays none. */
static nsa_tensor nsa__cuda_view_from(nsa_tensor x, int64_t rows) {
    const int64_t bytes = static_cast<int64_t>(nsa__dtype_bytes(x.dtype));
    if (x.data) x.data = static_cast<char *>(x.data) + rows * x.token * bytes;
    return x;
}

/* The caller's workspace. */
enum { NSA__CUDA_ALIGN = 256 };

static inline nsa__arena nsa__cuda_arena_at(void *workspace) {
    return nsa__arena_aligned(workspace, NSA__CUDA_ALIGN);
}
template <typename T> static inline T *nsa__cuda_take(nsa__arena *a, int64_t count) {
    return static_cast<T *>(nsa__alloc_aligned(a, count, sizeof(T), NSA__CUDA_ALIGN));
}

/* What a size query returns for an arena that only counted, and the check of what a caller gave. */
static inline size_t nsa__cuda_arena_bytes(const nsa__arena *a) {
    return a->used ? a->used + NSA__CUDA_ALIGN : 0;
}
static inline nsa_status nsa__cuda_check_workspace(size_t needed, const void *workspace,
                                                   size_t bytes) {
    return needed && (!workspace || bytes < needed)
               ? nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_workspace)
               : NSA_OK;
}

/* A launch's grid of `blocks` in one dimension. */
static inline nsa_status nsa__cuda_grid(int64_t blocks, dim3 *grid) {
    if (blocks > INT32_MAX) return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    *grid = dim3(static_cast<unsigned>(blocks));
    return NSA_OK;
}

static inline int64_t nsa__cuda_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

#endif

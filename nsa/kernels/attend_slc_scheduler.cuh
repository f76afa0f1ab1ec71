/* attend_slc_scheduler.cuh: slc with few heads: tiles of the queries that read one block.
   Twin: nsa.h, nsa_attend_slc_forward and nsa_attend_slc_backward.
   Not here: the kernels that multiply (attend_forward.cuh, attend_backward.cuh), the inversion of
   the lists (attend_readers.cuh).

   A tile of 128 rows has 128 / G neighbouring queries. If G is small, their lists name many
   blocks, and few of the tile's rows read each of them. A gathered tile holds readers of one
   block instead, so all of its rows multiply. The partial result of a query and a block goes to
   memory; partial results are added in the order of the query's list, so a query's bits depend
   on itself alone. Queries are taken in chunks that keep that memory below NSA__GATHER_BYTES. */
#ifndef NSA_ATTEND_SLC_SCHEDULER_CUH
#define NSA_ATTEND_SLC_SCHEDULER_CUH

#include "attend_readers.cuh"

/* Tests define it small. */
#ifndef NSA__GATHER_BYTES
#define NSA__GATHER_BYTES (512 << 20)
#endif
/* Queries with more heads or longer lists are not gathered, because the partial results would be
   more bytes than the blocks themselves (bench/gpu/predict.py). Tests define it small, so that
   short lists go either way. */
#ifndef NSA__GATHER_LIST
#define NSA__GATHER_LIST 64
#endif
enum { NSA__GATHER_HEADS = 4, NSA__GATHER_LEAST = 32, NSA__GATHER_WARPS = 8 };

/* ---- Partial results ----------------------------------------------------------------------- */

/* What a thread block finds of a row's out is kept in f32 if the tensors are f32. Else it is f16 in
   units of a power of two by which the row's largest number is 1 to 2: 11 bits, where outputs have
   8 or 11, in half the bytes. Nothing overflows, and V times a power of two gives the same bits in
   other units. */
template <typename T> struct nsa__cuda_part { using type = __half; };
template <> struct nsa__cuda_part<float> { using type = float; };

static inline __host__ __device__ nsa_dtype nsa__cuda_part_dtype(nsa_dtype dtype) {
    return dtype == NSA_F32 ? NSA_F32 : NSA_F16;
}

/* The unit of the thread's upper (h = 0) or lower row, by the whole warp. */
template <typename T, int N>
NSA__DEVICE float nsa__cuda_part_unit(const float (&out)[N][4], int h) {
    if constexpr (sizeof(T) == 4) return 1.0f;
    float most = 0;
#pragma unroll
    for (int n = 0; n < N; n++)
        most = fmaxf(most, fmaxf(fabsf(out[n][2 * h]), fabsf(out[n][2 * h + 1])));
    /* its reciprocal is a number too */
    const uint32_t exponent = __float_as_uint(nsa__cuda_quad_max(most)) >> 23;
    return __uint_as_float(min(max(exponent, 1u), 253u) << 23);
}

/* The thread's columns of a row to row `index` of partial results. */
template <typename T, int N>
NSA__DEVICE void nsa__cuda_part_store(void *parts, int64_t index, int dim_v, float unit,
                                      const float (&out)[N][4], int h) {
    using part = typename nsa__cuda_part<T>::type;
    part *const to = static_cast<part *>(parts) + index * dim_v + threadIdx.x % 4 * 2;
    const float factor = sizeof(T) == 4 ? 1.0f : 1.0f / unit;
#pragma unroll
    for (int n = 0; n < N; n++)
        if (8 * n < dim_v)
            nsa__store_pair(to + 8 * n, out[n][2 * h] * factor, out[n][2 * h + 1] * factor);
}

/* ---- Gathering ----------------------------------------------------------------------------- */

/* The row whose partial results a warp adds. */
struct nsa__cuda_gather_row {
    int64_t number; /* of (queries of the chunk, H) */
    int64_t batch, row;
    int64_t terms; /* of its query in params.rows */
    int head, query;
    int tokens; /* of its sequence */
    bool there;
    const int32_t *list;
};

NSA__DEVICE nsa__cuda_gather_row nsa__cuda_gather_row_of(const nsa__cuda_attend_params &params) {
    const nsa_desc &d = params.d;
    nsa__cuda_gather_row r;
    r.number =
        static_cast<int64_t>(blockIdx.x) * NSA__GATHER_WARPS + static_cast<int>(threadIdx.x) / 32;
    r.head = static_cast<int>(r.number % d.heads);
    r.there = false;
    if (r.number / d.heads >= params.chunk_rows.total) return r;
    const nsa__cuda_item index = nsa__cuda_item_at(d, params.chunk_rows, r.number / d.heads);
    const nsa__sequence seq = nsa__sequence_of(d, index.b);
    r.there = index.local < seq.count;
    r.batch = seq.batch;
    r.row = seq.row + index.local;
    r.terms = nsa__cuda_place_of(params.rows_of, index.b, seq) + index.local;
    r.query = seq.first + static_cast<int>(index.local);
    r.tokens = seq.tokens;
    r.list = nsa__row_of<const int32_t>(params.x.blocks, r.batch, r.row, r.head / params.group);
    return r;
}

/* The entries of the row's list that count, as nsa__cuda_walk_keys has it: the first from `slot`
   on, list_width if there is none. `before` is the last that counted. */
NSA__DEVICE int nsa__cuda_gather_next(const nsa__cuda_attend_params &params,
                                      const nsa__cuda_gather_row &row, int slot, int &before) {
    const int last = nsa__cuda_last_block(params, row.tokens, row.query);
    for (; slot < params.list_width; slot++)
        if (row.list[slot] > before && row.list[slot] <= last) {
            before = row.list[slot];
            break;
        }
    return slot;
}

/* A warp adds the partial results of one row: out and lse. */
static __global__ void nsa__cuda_gather_forward_kernel(nsa__cuda_attend_params params) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const nsa__cuda_gather_row row = nsa__cuda_gather_row_of(params);
    if (!row.there) return;
    const float2 *sums = params.partial_sums + row.number * params.list_width;
    const float *units = params.partial_units + row.number * params.list_width;
    const nsa_dtype dtype = nsa__cuda_part_dtype(params.x.q.dtype);
    const char *partial =
        reinterpret_cast<const char *>(params.partial_out) +
        row.number * params.list_width * params.d.dim_v * (dtype == NSA_F32 ? 4 : 2);
    const float nan = __uint_as_float(0x7fc00000u), ln2 = 0.693147180559945f;
    float most = -INFINITY, sum = 0;
    int before = -1;
    bool bad = false;
    for (int i = nsa__cuda_gather_next(params, row, 0, before); i < params.list_width;
         i = nsa__cuda_gather_next(params, row, i + 1, before)) {
        const float now = fmaxf(most, sums[i].x);
        bad |= sums[i].x == INFINITY;
        sum = fmaf(sum, nsa__cuda_shrink(most, now), sums[i].y * nsa__cuda_shrink(sums[i].x, now));
        most = now;
    }
    const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    void *to = nsa__row_at(params.x.out, row.batch, row.row, row.head);
    for (int c = 4 * lane; c < params.d.dim_v; c += 128) {
        float out[4] = {};
        before = -1;
        for (int i = nsa__cuda_gather_next(params, row, 0, before); i < params.list_width && !bad;
             i = nsa__cuda_gather_next(params, row, i + 1, before)) {
            const float share = nsa__cuda_shrink(sums[i].x, most) * units[i];
            float x[4];
            nsa__load4(x, dtype, partial, i * params.d.dim_v + c);
#pragma unroll
            for (int e = 0; e < 4; e++) out[e] = fmaf(x[e], share, out[e]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) out[e] = bad ? nan : out[e] * inverse;
        nsa__store4(params.x.out.dtype, to, c, out);
    }
    if (lane == 0)
        *nsa__row_of<float>(params.x.lse, row.batch, row.row, row.head) =
            bad        ? nan
            : sum == 0 ? -INFINITY
                       : most + nsa__log2(sum) * ln2;
}

/* ---- Calls --------------------------------------------------------------------------------- */

/* How many queries are gathered at a time, if one finds `width` floats in a block; 0: they are
   not. */
static int nsa__cuda_gather_chunk(const nsa__cuda_attend_params *params, int width) {
    const nsa_desc *d = &params->d;
    if (params->branch != NSA__KEYS_SLC || params->group > NSA__GATHER_HEADS ||
        params->list_width > NSA__GATHER_LIST)
        return 0;
    const nsa__cuda_extent rows = nsa__cuda_query_extent_of(d, d->count, 1, 1, 0);
    const int64_t of_row = static_cast<int64_t>(d->heads) * params->list_width * width * 4;
    const int64_t all = NSA__GATHER_BYTES / of_row, most = all / d->batch;
    /* packed sequences take no more than one of them all would */
    const int64_t least =
        rows.packed ? nsa__cuda_ceil_div(NSA__GATHER_LEAST, d->batch) : int64_t(NSA__GATHER_LEAST);
    if (all >= rows.total || least >= d->count) return d->count;
    return static_cast<int>(most > least ? most : least);
}

/* Queries that leave partial results at the same time. */
static nsa__cuda_extent nsa__cuda_gather_rows(const nsa__cuda_attend_params *params) {
    return nsa__cuda_query_extent_of(&params->d, params->chunk, 1, 1, 0);
}

static nsa_attend nsa__cuda_queries_from(nsa_attend x, int64_t rows) {
    x.q = nsa__cuda_view_from(x.q, rows);
    x.out = nsa__cuda_view_from(x.out, rows);
    x.lse = nsa__cuda_view_from(x.lse, rows);
    x.blocks = nsa__cuda_view_from(x.blocks, rows);
    return x;
}

/* The grid of a kernel with Q tiles of `tile` rows: neighbouring queries, or gathered ones, for
   which the lists are inverted first. */
static nsa_status nsa__cuda_query_grid(nsa__cuda_attend_params *params, int tile, dim3 *grid,
                                       cudaStream_t stream) {
    params->spread = params->gathered ? 1 : params->lists;
    if (params->gathered) {
        nsa__cuda_plan_reader_parts(params, tile / params->group);
        NSA__CHECK(nsa__cuda_invert_lists(params, stream));
        return nsa__cuda_attend_grid(params, nsa__cuda_reader_tiles(params, 1), grid);
    }
    const int64_t rows = static_cast<int64_t>(params->d.count) * params->group;
    return nsa__cuda_attend_grid(params,
                                 nsa__cuda_query_extent_of(&params->d,
                                                           nsa__cuda_ceil_div(rows, tile),
                                                           params->group, tile, 1),
                                 grid);
}

/* Chunk after chunk of queries: Run for the blocks, then `combine`, a warp to a row. */
template <template <typename, int, int> class Run>
static nsa_status nsa__cuda_gather_run(const nsa__cuda_attend_params *all,
                                       void (*combine)(nsa__cuda_attend_params),
                                       cudaStream_t stream) {
    const nsa_desc *d = &all->d;
    for (int64_t first = 0; first < d->count; first += all->chunk) {
        nsa__cuda_attend_params params = *all;
        dim3 grid;
        params.gathered = true;
        params.d.first = d->first + static_cast<int>(first);
        params.d.count = static_cast<int>(d->count - first);
        if (params.d.count > all->chunk) params.d.count = all->chunk;
        params.x = nsa__cuda_queries_from(all->x, first);
        params.dx = nsa__cuda_queries_from(all->dx, first);
        if (params.rows) params.rows += first * d->heads;
        NSA__CHECK(nsa__cuda_attend_choose<Run>(params, stream));
        const int64_t rows = params.chunk_rows.total * d->heads;
        NSA__CHECK(nsa__cuda_grid(nsa__cuda_ceil_div(rows, NSA__GATHER_WARPS), &grid));
        NSA__CHECK(nsa__cuda_status(
            NSA_LAUNCH(combine, grid, dim3(32 * NSA__GATHER_WARPS), 0, stream, params)));
    }
    return NSA_OK;
}

#endif

/* block_index.cuh: which rows a sequence has, which blocks there are, which of them a query sees.
   Twin: nsa.h, "Block index" and "Sequences". The closed forms stand here again because device code
   cannot call the host's.
   Not here: scores of blocks (select_blocks.cuh). */
#ifndef NSA_BLOCK_INDEX_CUH
#define NSA_BLOCK_INDEX_CUH

#include "checks.cuh"
#include "rows.cuh"

NSA__DEVICE int nsa__cmp_count(const nsa_desc &d, int tokens) {
    return tokens < d.cmp_block ? 0 : (tokens - d.cmp_block) / d.cmp_stride + 1;
}
/* Tokens before this one are visible to `query` of a sequence of `tokens`: all that is causal
   follows from it. It is a branch that all threads take alike, asked once a row and never in a
   product, so no kernel is compiled twice for it. */
NSA__DEVICE int nsa__visible_end(const nsa_desc &d, int tokens, int query) {
    return d.mask == NSA_MASK_NONE ? tokens : query + 1;
}
NSA__DEVICE int nsa__cmp_visible(const nsa_desc &d, int tokens, int query) {
    return nsa__cmp_count(d, nsa__visible_end(d, tokens, query));
}
NSA__DEVICE int nsa__slc_count(const nsa_desc &d, int tokens) {
    return tokens < 1 ? 0 : (tokens - 1) / d.slc_block + 1;
}
NSA__DEVICE int nsa__slc_candidates(const nsa_desc &d, int tokens, int query) {
    return nsa__slc_count(d, nsa__visible_end(d, tokens, query));
}
NSA__DEVICE int nsa__window_begin(const nsa_desc &d, int query) {
    const int before = d.window - (d.window_rule == NSA_WINDOW_COUNTS_SELF);
    return before >= query ? 0 : query - before;
}
/* Behind the last token of the window: without a mask it reaches as far ahead as back. */
NSA__DEVICE int nsa__window_end(const nsa_desc &d, int tokens, int query) {
    const int end = nsa__visible_end(d, tokens, query);
    const int ahead = d.window - (d.window_rule == NSA_WINDOW_COUNTS_SELF);
    return d.mask == NSA_MASK_NONE && ahead < end - query - 1 ? query + ahead + 1 : end;
}

/* The stencil of a selection block: the compressed blocks nsa__stencil_begin(j) + u, u = 0 ..
   nsa__stencil_size - 1, overlap it in nsa__stencil_weight(u) strides. Those below 0 do not
   exist. */
NSA__DEVICE int nsa__stencil_lead(const nsa_desc &d) {
    return d.cmp_block / d.cmp_stride - 1;
}
NSA__DEVICE int nsa__stencil_size(const nsa_desc &d) {
    return d.slc_block / d.cmp_stride + nsa__stencil_lead(d);
}
NSA__DEVICE int nsa__stencil_begin(const nsa_desc &d, int slc) {
    return slc * (d.slc_block / d.cmp_stride) - nsa__stencil_lead(d);
}
NSA__DEVICE int nsa__stencil_weight(const nsa_desc &d, int u) {
    return min(min(u + 1, nsa__stencil_size(d) - u), d.cmp_block / d.cmp_stride);
}

/* One sequence of the batch. */
struct nsa__sequence {
    int64_t batch; /* what batch strides multiply: b, or 0 where sequences are packed */
    int64_t row;   /* the view's row of token 0; on the query's side of query `first` */
    int tokens;
    int first, count; /* the queries to compute that it has */
};

/* Whatever begins holds, rows stay inside 0 .. begins[B] - 1 and lengths inside 0 .. tokens. */
NSA__DEVICE nsa__sequence nsa__sequence_of(const nsa_desc &d, int b) {
    nsa__sequence s = {b, 0, d.tokens, d.first, d.count};
    if (d.begins) {
        int end = max(d.begins[d.batch], 0);
        if (d.rows) end = min(end, d.rows);
        const int begin = min(max(d.begins[b], 0), end);
        s.batch = 0;
        s.row = begin;
        s.tokens = min(min(max(d.begins[b + 1], begin), end) - begin, d.tokens);
        s.count = min(d.count, max(s.tokens - d.first, 0));
    }
    return s;
}

/* ---- Things of packed sequences, one behind the other ----------------------------------------

   What sequences have of a kind (rows of a workspace, tiles, the blocks of a grid) lies in their
   order. A sequence has at most `each` of them, and has them from b * each on. Of packed sequences
   `each` is the longest one's, and batch * each may be many times what there is; so if desc.rows
   tells the host how many rows there are, a sequence that begins at row r has its own from
   r * num / den + b * spare on. A sequence of n rows must have at most n * num / den + spare,
   rounded down: then none reaches into the next, and no begins lead out of `total`. */
struct nsa__cuda_extent {
    int64_t each, total, num, den;
    int spare;
    bool packed;
};

static inline nsa__cuda_extent nsa__cuda_extent_of(const nsa_desc *d, int64_t each, int64_t num,
                                                   int64_t den, int spare) {
    nsa__cuda_extent e = {each, d->batch * each, num, den, spare, false};
    if (!d->begins || !d->rows) return e;
    const int64_t packed = d->rows * num / den + static_cast<int64_t>(spare) * d->batch;
    e.packed = packed < e.total;
    if (e.packed) e.total = packed;
    return e;
}

/* Where the things of sequence b begin, whose row of token 0 is `row`. */
NSA__DEVICE int64_t nsa__cuda_place_of(const nsa__cuda_extent &e, int b, int64_t row) {
    return e.packed ? row * e.num / e.den + static_cast<int64_t>(b) * e.spare : b * e.each;
}

/* Thing `local` of sequence b; `each` if the place is none's. */
struct nsa__cuda_thing {
    int b;
    int64_t local;
};

NSA__DEVICE nsa__cuda_thing nsa__cuda_thing_at(const nsa_desc &d, const nsa__cuda_extent &e,
                                               int64_t place) {
    if (!e.packed) return {static_cast<int>(place / e.each), place % e.each};
    int low = 0, high = d.batch; /* the last sequence that begins at `place` or before it */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (nsa__cuda_place_of(e, middle, nsa__sequence_of(d, middle).row) <= place)
            low = middle;
        else
            high = middle;
    }
    const int64_t local = place - nsa__cuda_place_of(e, low, nsa__sequence_of(d, low).row);
    return {low, local < 0 || local > e.each ? e.each : local};
}

/* A decoding cache's sequences: tokens held before the step, and new tokens, on the device. */
struct nsa__cuda_places {
    const int2 *of; /* NULL: no decoding, the desc says it all */
};

/* Of a step's new tokens those that the desc's first .. first + count - 1 number; in the views of
   the query's side they begin at row 0. */
NSA__DEVICE nsa__sequence nsa__sequence_at(const nsa_desc &d, int b, nsa__cuda_places places) {
    if (!places.of) return nsa__sequence_of(d, b);
    const int2 place = places.of[b];
    nsa__sequence s = {b, 0, place.x + place.y, place.x + d.first, 0};
    s.count = min(d.count, max(place.y - d.first, 0));
    return s;
}

/* The row of a sequence's compressed block 0; cmp_begins is read where sequences are packed. */
NSA__DEVICE int64_t nsa__cmp_row(const nsa_desc &d, const int32_t *cmp_begins, int b) {
    return d.begins ? cmp_begins[b] : 0;
}

/* ---- Rows by teams of threads, for kernels bound by memory ----------------------------------- */

enum { NSA__TEAM_THREADS = 128 };

/* The team of threads that shares a row, eight elements each: a power of two. */
static inline int nsa__cuda_team_of(int width) {
    int team = 1;
    while (team * 8 < width) team *= 2;
    return team;
}

/* How a launch's threads are shared out: `size` of them to a row. */
struct nsa__cuda_teams {
    int size;
    nsa__cuda_extent blocks;
};

/* Which row (t, h) of which sequence a team works on: blocks of teams count through the
   sequences, teams of a block through (t, h). */
struct nsa__cuda_team_place {
    nsa__sequence s;
    int b;
    int64_t row;
    int head, c; /* of `heads`; the thread's first element */
    bool mine;
};

NSA__DEVICE nsa__cuda_team_place nsa__cuda_team_place_of(const nsa_desc &d,
                                                         const nsa__cuda_teams &teams, int heads,
                                                         nsa__cuda_places places = {NULL}) {
    const nsa__cuda_thing block = nsa__cuda_thing_at(d, teams.blocks, blockIdx.x);
    const int64_t item = block.local * (NSA__TEAM_THREADS / teams.size) + threadIdx.x / teams.size;
    nsa__cuda_team_place p;
    p.b = block.b;
    p.s = nsa__sequence_at(d, p.b, places);
    p.row = item / heads;
    p.head = static_cast<int>(item % heads);
    p.c = static_cast<int>(threadIdx.x) % teams.size * 8;
    p.mine = p.row < p.s.count;
    return p;
}

/* Blocks of `threads` for `of_row` threads of each of at most `rows` rows of a sequence, which has
   one for every `stride` of its packed rows. */
static nsa_status nsa__cuda_row_grid(const nsa_desc *d, int64_t rows, int stride, int64_t of_row,
                                     int threads, nsa__cuda_extent *blocks, dim3 *grid) {
    *blocks = nsa__cuda_extent_of(d, nsa__cuda_ceil_div(rows * of_row, threads), of_row,
                                  static_cast<int64_t>(threads) * stride, 1);
    return nsa__cuda_grid(blocks->total, grid);
}

/* A team for each query and each of `heads`, whose rows are `width` wide. */
static nsa_status nsa__cuda_team_grid(const nsa_desc *d, int heads, int width,
                                      nsa__cuda_teams *teams, dim3 *grid) {
    teams->size = nsa__cuda_team_of(width);
    return nsa__cuda_row_grid(d, d->count, 1, heads, NSA__TEAM_THREADS / teams->size,
                              &teams->blocks, grid);
}

/* ---- The map M as CSR ----------------------------------------------------------------------- */

/* Entries of rows 0 .. slc - 1: row j holds blocks max(0, j r - lead) .. (j + 1) r - 1 of `count`,
   r strides to a selection block; both ends are sums of an arithmetic series up to `count`. */
NSA__DEVICE int64_t nsa__block_map_begin(const nsa_desc &d, int64_t count, int64_t slc) {
    const int64_t r = d.slc_block / d.cmp_stride, lead = nsa__stencil_lead(d);
    const int64_t ends = min(slc, count / r);
    const int64_t begins = min(max(slc - 1, int64_t(0)), (count + lead) / r);
    const int64_t sum_ends = r * ends * (ends + 1) / 2 + (slc - ends) * count;
    const int64_t sum_begins =
        r * begins * (begins + 1) / 2 - lead * begins + max(slc - 1 - begins, int64_t(0)) * count;
    return sum_ends - sum_begins;
}

static __global__ void nsa__block_map_kernel(nsa_desc d, int tokens, int32_t *indptr,
                                             int32_t *indices, float *weights) {
    const int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const int rows = nsa__slc_count(d, tokens), count = nsa__cmp_count(d, tokens);
    if (j > rows) return;
    int64_t at = nsa__block_map_begin(d, count, j);
    indptr[j] = static_cast<int32_t>(at);
    if (j == rows) return;
    const int first = nsa__stencil_begin(d, j), size = nsa__stencil_size(d);
    for (int u = max(0, -first); u < size && first + u < count; u++, at++) {
        indices[at] = first + u;
        weights[at] = static_cast<float>(nsa__stencil_weight(d, u));
    }
}

/* ---- Where compressed rows begin ------------------------------------------------------------ */

/* One warp: a running sum over 32 sequences at a time. */
static __global__ void nsa__cmp_begins_kernel(nsa_desc d, int32_t *cmp_begins) {
    const int lane = static_cast<int>(threadIdx.x);
    const int most =
        d.begins && d.rows ? d.rows / d.cmp_stride : INT32_MAX; /* whatever begins holds */
    int sum = 0;
    for (int b0 = 0; b0 < d.batch; b0 += 32) {
        const int b = b0 + lane;
        const int blocks = b < d.batch ? nsa__cmp_count(d, nsa__sequence_of(d, b).tokens) : 0;
        int end = blocks;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int left = __shfl_up_sync(0xffffffffu, end, step);
            if (lane >= step) end += left;
        }
        if (b < d.batch) cmp_begins[b] = min(sum + end, most) - blocks;
        sum += __shfl_sync(0xffffffffu, end, 31);
    }
    if (lane == 0) cmp_begins[d.batch] = min(sum, most);
}

static nsa_status nsa__cuda_cmp_begins(const nsa_desc *d, int32_t *cmp_begins,
                                       cudaStream_t stream) {
    return nsa__cuda_status(
        NSA_LAUNCH(nsa__cmp_begins_kernel, dim3(1), dim3(32), 0, stream, *d, cmp_begins));
}

/* ---- Begins that ascend ----------------------------------------------------------------------

   Packed workspaces of two sequences overlap where begins descends, and numbers in them that say
   where to read would be anybody's. One warp: a running maximum over 32 begins at a time. */
static __global__ void nsa__cuda_ascending_kernel(nsa_desc d, int32_t *begins) {
    const int lane = static_cast<int>(threadIdx.x), end = min(max(d.begins[d.batch], 0), d.rows);
    int most = 0;
    for (int b0 = 0; b0 <= d.batch; b0 += 32) {
        const int b = b0 + lane;
        int begin = b <= d.batch ? min(max(d.begins[b], most), end) : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int left = __shfl_up_sync(0xffffffffu, begin, step);
            if (lane >= step) begin = max(begin, left);
        }
        if (b <= d.batch) begins[b] = begin;
        most = __shfl_sync(0xffffffffu, begin, 31);
    }
}

/* ---- Entry points --------------------------------------------------------------------------- */

extern "C" nsa_status nsa_cuda_block_map(const nsa_desc *d, int tokens, int32_t *indptr,
                                         int32_t *indices, float *weights, cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_check_desc(d));
    if (tokens < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_tokens);
    const int64_t entries = nsa_block_map_size(d, tokens);
    if (entries > INT32_MAX) return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    if (!indptr) return nsa__error(NSA_ERROR_NULL, NSA__AT_indptr);
    if (entries && !indices) return nsa__error(NSA_ERROR_NULL, NSA__AT_indices);
    if (entries && !weights) return nsa__error(NSA_ERROR_NULL, NSA__AT_weights);
    const dim3 grid(static_cast<unsigned>(nsa_slc_count(d, tokens) / 128 + 1));
    return nsa__cuda_status(NSA_LAUNCH(nsa__block_map_kernel, grid, dim3(128), 0, stream, *d,
                                       tokens, indptr, indices, weights));
}

extern "C" nsa_status nsa_cuda_cmp_begins(const nsa_desc *d, int32_t *cmp_begins,
                                          cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_check_desc(d));
    if (!cmp_begins) return nsa__error(NSA_ERROR_NULL, NSA__AT_cmp_begins);
    const int64_t rows = static_cast<int64_t>(d->batch) * nsa_cmp_count(d, d->tokens);
    if (!d->begins && rows > INT32_MAX) return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    return nsa__cuda_cmp_begins(d, cmp_begins, stream);
}

#endif

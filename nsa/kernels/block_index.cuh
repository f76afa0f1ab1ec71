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
/* The tokens that t sees of the block at its end, if the block is not whole; only there. */
NSA__DEVICE int nsa__slc_tail(const nsa_desc &d, int tokens, int query) {
    return nsa__visible_end(d, tokens, query) % d.slc_block;
}
NSA__DEVICE int nsa__slc_candidates(const nsa_desc &d, int tokens, int query) {
    const bool without_tail = d.forced == NSA_FORCED_TAIL && !d.slc_local;
    const int tail = without_tail ? nsa__slc_tail(d, tokens, query) : 0;
    return nsa__slc_count(d, nsa__visible_end(d, tokens, query) - tail);
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
    int64_t batch, row;         /* on the query's side: what batch strides multiply, b or 0 where
                                   rows are packed, and the view's row of query `first` */
    int64_t key_batch, key_row; /* of keys: the same, and the view's row of token 0 */
    int64_t place;              /* keys of the sequences before it, where desc.rows counts them */
    int tokens;
    int first, count; /* the queries to compute that it has */
};

/* Tokens of sequence b that there are rows for. Whatever begins holds, rows stay inside 0 ..
   begins[B] - 1 and lengths inside 0 .. tokens; tables have only so many slots. */
NSA__DEVICE int nsa__tokens_present(const nsa_desc &d, int b, int *begin) {
    int tokens = d.tokens;
    *begin = 0;
    if (d.begins) {
        int end = max(d.begins[d.batch], 0);
        if (d.rows) end = min(end, d.rows);
        *begin = min(max(d.begins[b], 0), end);
        tokens = min(min(max(d.begins[b + 1], *begin), end) - *begin, d.tokens);
    }
    if (d.pages)
        tokens = static_cast<int>(min(
            int64_t(tokens), d.page_count ? int64_t(d.table_width) * d.page_tokens : int64_t(0)));
    return tokens;
}

/* Sequence b of a ragged batch, if those before it have `row` queries and `place` keys. Whatever
   firsts and counts hold, queries are tokens of the sequence, and rows end where desc.rows says. */
NSA__DEVICE nsa__sequence nsa__sequence_ragged(const nsa_desc &d, int b, int64_t row,
                                               int64_t place) {
    int begin;
    const int present = nsa__tokens_present(d, b, &begin),
              first = min(max(d.firsts[b], 0), present);
    int count = min(max(d.counts[b], 0), present - first);
    int tokens = d.begins ? present : first + count;
    if (d.rows) {
        if (!d.begins) tokens = static_cast<int>(min(int64_t(tokens), d.rows - place));
        count = static_cast<int>(min(int64_t(count), d.rows - row));
        count = min(count, max(tokens - first, 0));
    }
    count = min(max(count - d.first, 0), d.count);
    return {0,    row, d.begins ? 0 : b, begin, d.begins ? begin : place, tokens, first + d.first,
            count};
}

/* A ragged batch is gone through from its first sequence on: its rows and keys are sums over the
   sequences before. Rows are the view's, so they count what the caller's counts do. */
struct nsa__cuda_ragged_walk {
    int64_t row, place;
};
NSA__DEVICE void nsa__cuda_ragged_next(nsa__cuda_ragged_walk &walk, const nsa_desc &d,
                                       const nsa__sequence &s, int b) {
    walk.row += max(d.counts[b], 0);
    if (d.rows) walk.row = min(walk.row, static_cast<int64_t>(d.rows));
    walk.place += s.tokens;
}

NSA__DEVICE nsa__sequence nsa__sequence_of(const nsa_desc &d, int b) {
    if (d.counts) {
        nsa__cuda_ragged_walk walk = {0, 0};
        for (int i = 0; i < b; i++)
            nsa__cuda_ragged_next(walk, d, nsa__sequence_ragged(d, i, walk.row, walk.place), i);
        return nsa__sequence_ragged(d, b, walk.row, walk.place);
    }
    nsa__sequence s = {b, 0, b, 0, 0, d.tokens, d.first, d.count};
    int begin;
    s.tokens = nsa__tokens_present(d, b, &begin);
    if (d.begins) {
        s.batch = s.key_batch = 0;
        s.row = s.key_row = s.place = begin;
    }
    if (d.begins || d.pages) s.count = min(d.count, max(s.tokens - d.first, 0));
    return s;
}

/* The row that `row` of the caller's view has in a sum, which lies in workspace. The host has room
   there for batch * tokens packed rows, or desc.rows if that is less, but cannot know begins[0],
   where the first one is: so rows go round. */
NSA__DEVICE int64_t nsa__cuda_sum_row(const nsa_desc &d, int64_t row) {
    const int64_t room = static_cast<int64_t>(d.batch) * d.tokens;
    if (!d.begins || row < room) return row;
    return static_cast<unsigned>(row) % static_cast<unsigned>(room);
}

/* ---- Things of packed sequences, one behind the other ----------------------------------------

   What sequences have of a kind (rows of a workspace, tiles, the blocks of a grid) lies in their
   order. A sequence has at most `each` of them, and has them from b * each on. Of packed sequences
   `each` is the longest one's, and batch * each may be many times what there is; so if desc.rows
   tells the host how many rows there are, a sequence that begins at row r has its own from
   r * num / den + b * spare on. A sequence of n rows must have at most n * num / den + spare,
   rounded down: then none reaches into the next, and no begins lead out of `total`. Rows are
   those of the keys or, of what follows the queries, theirs: only a ragged batch tells them
   apart. */
struct nsa__cuda_extent {
    int64_t each, total, num, den;
    int spare;
    bool packed, queries;
};

static inline nsa__cuda_extent nsa__cuda_extent_of(const nsa_desc *d, int64_t each, int64_t num,
                                                   int64_t den, int spare) {
    nsa__cuda_extent e = {each, d->batch * each, num, den, spare, false, false};
    if ((!d->begins && !d->counts) || !d->rows) return e;
    const int64_t packed = d->rows * num / den + static_cast<int64_t>(spare) * d->batch;
    e.packed = packed < e.total;
    if (e.packed) e.total = packed;
    return e;
}
static inline nsa__cuda_extent nsa__cuda_query_extent_of(const nsa_desc *d, int64_t each,
                                                         int64_t num, int64_t den, int spare) {
    nsa__cuda_extent e = nsa__cuda_extent_of(d, each, num, den, spare);
    e.queries = true;
    return e;
}

/* Where the things of sequence b begin. */
NSA__DEVICE int64_t nsa__cuda_place_of(const nsa__cuda_extent &e, int b, const nsa__sequence &s) {
    if (!e.packed) return b * e.each;
    return (e.queries ? s.row : s.place) * e.num / e.den + static_cast<int64_t>(b) * e.spare;
}

/* Item `local` of sequence b; `each` if the place is none's. */
struct nsa__cuda_item {
    int b;
    int64_t local;
};

NSA__DEVICE nsa__cuda_item nsa__cuda_item_at(const nsa_desc &d, const nsa__cuda_extent &e,
                                             int64_t place) {
    if (!e.packed) return {static_cast<int>(place / e.each), place % e.each};
    int low = 0, high = d.batch; /* the last sequence that begins at `place` or before it */
    nsa__sequence s = {};
    if (d.counts) {
        nsa__cuda_ragged_walk walk = {0, 0};
        s = nsa__sequence_ragged(d, 0, 0, 0);
        while (low + 1 < d.batch) {
            nsa__cuda_ragged_next(walk, d, s, low);
            const nsa__sequence next = nsa__sequence_ragged(d, low + 1, walk.row, walk.place);
            if (nsa__cuda_place_of(e, low + 1, next) > place) break;
            s = next;
            low++;
        }
    } else {
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (nsa__cuda_place_of(e, middle, nsa__sequence_of(d, middle)) <= place)
                low = middle;
            else
                high = middle;
        }
        s = nsa__sequence_of(d, low);
    }
    const int64_t local = place - nsa__cuda_place_of(e, low, s);
    return {low, local < 0 || local > e.each ? e.each : local};
}

/* A decoding cache's sequences: tokens present before the step, and new tokens, on the device. */
struct nsa__cuda_positions {
    const int2 *of; /* NULL: no decoding, the desc says it all */
};

/* Of a step's new tokens those that the desc's first .. first + count - 1 number; in the views of
   the query's side they begin at row 0. */
NSA__DEVICE nsa__sequence nsa__sequence_at(const nsa_desc &d, int b,
                                           nsa__cuda_positions positions) {
    if (!positions.of) return nsa__sequence_of(d, b);
    const int2 place = positions.of[b];
    nsa__sequence s = {b, 0, b, 0, 0, place.x + place.y, place.x + d.first, 0};
    s.count = min(d.count, max(place.y - d.first, 0));
    return s;
}

/* The row of a sequence's compressed block 0; cmp_begins is read where sequences are packed. */
NSA__DEVICE int64_t nsa__cmp_row(const nsa_desc &d, const int32_t *cmp_begins, int b) {
    return d.begins ? cmp_begins[b] : 0;
}

/* The compressed rows that a call makes: all or, of a ragged batch, what tokens from its first
   query on complete. */
struct nsa__cmp_span {
    int begin, end;
};
NSA__DEVICE nsa__cmp_span nsa__cmp_made(const nsa_desc &d, const nsa__sequence &s) {
    return {d.counts ? nsa__cmp_count(d, s.first) : 0, nsa__cmp_count(d, s.tokens)};
}
/* How many they are of one sequence at most, for the host: as its queries amount to, unless begins
   say where it ends. */
static inline int64_t nsa__cuda_cmp_made_most(const nsa_desc *d) {
    const int64_t all = nsa_cmp_count(d, d->tokens), most = d->count / d->cmp_stride + int64_t(1);
    return d->counts && !d->begins && most < all ? most : all;
}
static inline nsa__cuda_extent nsa__cuda_cmp_made_extent(const nsa_desc *d, int64_t each,
                                                         int64_t num, int64_t den, int spare) {
    return d->begins ? nsa__cuda_extent_of(d, each, num, den, spare)
                     : nsa__cuda_query_extent_of(d, each, num, den, spare);
}

/* ---- Pages ----------------------------------------------------------------------------------- */

/* Where row `at` of a sequence lies, counted from its first page on; a page has `rows` of them.
   An entry that is no page is taken for the nearest one: no table leads out of a view. */
struct nsa__cuda_page_row {
    int page, row;
};
NSA__DEVICE nsa__cuda_page_row nsa__cuda_page_row_of(const int32_t *table, int rows, int page_count,
                                                     int at) {
    const unsigned slot = static_cast<unsigned>(at) / static_cast<unsigned>(rows);
    return {min(max(table[slot], 0), page_count - 1), at - static_cast<int>(slot) * rows};
}

/* The same for row `key` of sequence b's tokens or, with cmp, of its compressed blocks, each of
   which lies where its last token does. */
NSA__DEVICE nsa__cuda_page_row nsa__cuda_key_page(const nsa_desc &d, int b, bool cmp, int key) {
    return nsa__cuda_page_row_of(d.pages + static_cast<int64_t>(b) * d.table_width,
                                 cmp ? d.page_tokens / d.cmp_stride : d.page_tokens, d.page_count,
                                 cmp ? key + nsa__stencil_lead(d) : key);
}

/* The element offset of that row; without pages row `first_row` of the view is key 0's. */
NSA__DEVICE int64_t nsa__cuda_key_offset(const nsa_desc &d, const nsa_tensor &x,
                                         const nsa__sequence &s, int b, bool cmp, int64_t first_row,
                                         int key, int head) {
    int64_t batch = s.key_batch, row = first_row + key;
    if (d.pages) {
        const nsa__cuda_page_row at = nsa__cuda_key_page(d, b, cmp, key);
        batch = at.page;
        row = at.row;
    }
    return x.batch * batch + x.token * row + x.head * head;
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
                                                         nsa__cuda_positions positions = {NULL}) {
    const nsa__cuda_item block = nsa__cuda_item_at(d, teams.blocks, blockIdx.x);
    const int64_t item = block.local * (NSA__TEAM_THREADS / teams.size) + threadIdx.x / teams.size;
    nsa__cuda_team_place p;
    p.b = block.b;
    p.s = nsa__sequence_at(d, p.b, positions);
    p.row = item / heads;
    p.head = static_cast<int>(item % heads);
    p.c = static_cast<int>(threadIdx.x) % teams.size * 8;
    p.mine = p.row < p.s.count;
    return p;
}

/* Blocks of `threads` for `of_row` threads of each of at most `rows` rows of a sequence, which has
   one for each of its queries. */
static nsa_status nsa__cuda_row_grid(const nsa_desc *d, int64_t rows, int64_t of_row, int threads,
                                     nsa__cuda_extent *blocks, dim3 *grid) {
    *blocks = nsa__cuda_query_extent_of(d, nsa__cuda_ceil_div(rows * of_row, threads), of_row,
                                        threads, 1);
    return nsa__cuda_grid(blocks->total, grid);
}

/* A team for each query and each of `heads`, whose rows are `width` wide. */
static nsa_status nsa__cuda_team_grid(const nsa_desc *d, int heads, int width,
                                      nsa__cuda_teams *teams, dim3 *grid) {
    teams->size = nsa__cuda_team_of(width);
    return nsa__cuda_row_grid(d, d->count, heads, NSA__TEAM_THREADS / teams->size, &teams->blocks,
                              grid);
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
        int begin;
        const int blocks = b < d.batch ? nsa__cmp_count(d, nsa__tokens_present(d, b, &begin)) : 0;
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

/* ---- What is wrong with begins, firsts, counts and tables ------------------------------------ */

enum {
    NSA__PAGES_FIRST = 1,
    NSA__PAGES_COUNT,
    NSA__PAGES_MOST,
    NSA__PAGES_BEHIND,
    NSA__PAGES_WIDTH,
    NSA__PAGES_ENTRY,
    NSA__PAGES_BEGINS,
    NSA__PAGES_WARPS = 32
};

extern "C" const char *nsa_cuda_page_reason(int reason) {
    static const char *const reasons[] = {"",
                                          "first below 0",
                                          "count below 0",
                                          "count above desc.count",
                                          "queries behind the last token",
                                          "more tokens than the table has pages for",
                                          "not a page",
                                          "begins descends, starts below 0, passes rows, or tokens "
                                          "in a sequence"};
    return reason > 0 && reason <= NSA__PAGES_BEGINS ? reasons[reason] : "";
}

/* Of sequence b: its queries, then its line of the table. By a warp. */
NSA__DEVICE nsa_cuda_page_verdict nsa__cuda_page_fault_of(const nsa_desc &d, int b) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int64_t tokens = d.begins ? int64_t(d.begins[b + 1]) - d.begins[b] : int64_t(d.tokens);
    nsa_cuda_page_verdict v = {NSA_OK, 0, b, 0, 0};
    if (d.counts) {
        const int64_t first = d.firsts[b], count = d.counts[b];
        v.reason = first < 0                ? NSA__PAGES_FIRST
                   : count < 0              ? NSA__PAGES_COUNT
                   : count > d.count        ? NSA__PAGES_MOST
                   : first + count > tokens ? NSA__PAGES_BEHIND
                                            : 0;
        v.value = static_cast<int32_t>(first < 0 ? first : count);
        v.status = NSA_ERROR_RANGE | (first < 0 ? NSA__AT_firsts : NSA__AT_counts) << 8;
        if (v.reason) return v;
        if (!d.begins) tokens = first + count;
    }
    v = {NSA_ERROR_PAGES | NSA__AT_pages << 8, NSA__PAGES_WIDTH, b, 0, d.table_width};
    const int64_t slots = d.pages && tokens > 0 ? (tokens - 1) / d.page_tokens + 1 : 0;
    if (slots > d.table_width) return v;
    const int32_t *table = d.pages + static_cast<int64_t>(b) * d.table_width;
    for (int base = 0; base < slots; base += 32) {
        const bool bad =
            base + lane < slots && (table[base + lane] < 0 || table[base + lane] >= d.page_count);
        const unsigned all = __ballot_sync(0xffffffffu, bad);
        if (!all) continue;
        v.reason = NSA__PAGES_ENTRY;
        v.slot = base + __ffs(static_cast<int>(all)) - 1;
        v.value = table[v.slot];
        return v;
    }
    return {NSA_OK, 0, 0, 0, 0};
}

/* The verdict on begins, which come before all else; its status is NSA_OK if there is no fault. By
   a block. */
NSA__DEVICE nsa_cuda_page_verdict nsa__cuda_begins_fault_of(const nsa_desc &d) {
    nsa_cuda_page_verdict v = {NSA_OK, NSA__PAGES_BEGINS, 0, 0, 0};
    if (!d.begins) return v;
    bool bad = d.begins[0] < 0;
    for (int b = static_cast<int>(threadIdx.x); b < d.batch; b += 32 * NSA__PAGES_WARPS) {
        const int64_t tokens = int64_t(d.begins[b + 1]) - d.begins[b];
        bad |= tokens < 0 || tokens > d.tokens;
    }
    if (__syncthreads_or(bad))
        v.status = NSA_ERROR_BEGINS | NSA__AT_begins << 8;
    else if (d.rows && d.rows < d.begins[d.batch])
        v.status = NSA_ERROR_BEGINS | NSA__AT_rows << 8;
    return v;
}

/* One block: a warp takes a sequence; the first with a fault has the verdict. */
static __global__ void __launch_bounds__(32 * NSA__PAGES_WARPS, 1)
    nsa__cuda_check_pages_kernel(nsa_desc d, nsa_cuda_page_verdict *verdict) {
    NSA_SHARED(int, first, [1]);
    const int thread = static_cast<int>(threadIdx.x);
    const nsa_cuda_page_verdict begins = nsa__cuda_begins_fault_of(d);
    if (begins.status && thread == 0) *verdict = begins;
    if (begins.status) return;
    bool found = false;
    /* Once: it stays so until there is a fault, and with that the loop ends. So it does not matter
       if a compiler reads it before it looks at `found`. */
    if (thread == 0) first[0] = d.batch;
    for (int base = 0; base < d.batch && !found; base += NSA__PAGES_WARPS) {
        const int b = base + thread / 32;
        nsa_cuda_page_verdict mine = {NSA_OK, 0, 0, 0, 0};
        if (b < d.batch) mine = nsa__cuda_page_fault_of(d, b);
        found = __syncthreads_or(mine.reason);
        if (mine.reason && thread % 32 == 0) atomicMin(&first[0], b);
        __syncthreads();
        if (found && thread % 32 == 0 && first[0] == b) *verdict = mine;
    }
    if (!found && thread == 0) *verdict = {NSA_OK, 0, 0, 0, 0};
}

/* ---- Entry points --------------------------------------------------------------------------- */

extern "C" nsa_status nsa_cuda_check_pages(const nsa_desc *d, nsa_cuda_page_verdict *verdict,
                                           cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_check_desc(d));
    if (!verdict) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_check_pages_kernel, dim3(1),
                                       dim3(32 * NSA__PAGES_WARPS), 0, stream, *d, verdict));
}

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

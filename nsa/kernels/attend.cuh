/* attend.cuh: attention over few keys, forward: one core for all branches.
   Twin: nsa.h, "Attention over spans of keys". The branches differ in which keys a query sees,
   which nsa__cuda_keys_of and nsa__walk answer; cmp, slc, win and dense have their doors in files
   of their own.
   Not here: backward (attend_backward.cuh), how blocks are selected (select_blocks.cuh), forward's
   calls (attend_gather.cuh).

   A block holds a tile of query rows: the rows of neighbouring queries and of all heads of a
   group, which read the same keys, so that a key tile is brought in once for all of them. It
   walks key tiles at absolute positions. A warp owns 16 rows and passes over a tile that none of
   them sees; on sm_90a the four warps of a group pass over what none of their queries sees. A
   row that sees nothing of a tile keeps its state to the bit, so a row's bits do not depend on
   the rows beside it. Tiles hold finite numbers only: rows with a non-finite value enter as
   zeros, and what read them is set to NaN at the end. */
#ifndef NSA_ATTEND_CUH
#define NSA_ATTEND_CUH

#include "block_index.cuh"
#include "tiles.cuh"

#include <math.h>
#include <string.h>

enum nsa__cuda_branch_keys { NSA__KEYS_CMP, NSA__KEYS_SLC, NSA__KEYS_WIN, NSA__KEYS_DENSE };

/* The queries that read each block, ascending: those of block j are
   query[begin[j] .. begin[j + 1]). They are worked through in parts of at most `part`; parts are
   counted by part_begin, those of blocks with more than one by slot_begin. */
struct nsa__cuda_block_readers {
    int64_t *begin;
    int32_t *part_begin, *slot_begin, *query;
    int32_t *counts; /* (chunks + 1, blocks): where a chunk of queries puts its readers */
    int blocks, chunks, part;
    int64_t max_readers, max_parts, max_slots; /* of one sequence and kv head */
};

/* A part of a block's readers: query[0] .. query[count - 1], the part-th of `parts`. */
struct nsa__cuda_reader_part {
    int block, part, parts, count;
    const int32_t *query;
};

/* What every kernel of one call is given. */
struct nsa__cuda_attend_job {
    nsa_attend x, dx;
    nsa_desc d;
    nsa__cuda_branch_keys branch;
    int group, list_width;
    int tiles;                 /* what blockIdx counts for one sequence and kv head */
    float scale, scale2;       /* of q k, for e and for 2 as the base */
    const int32_t *cmp_begins; /* cmp of packed sequences */
    uint64_t *bad;             /* a bit for each key: its k or v row has a non-finite value */
    int bad_words;             /* of one sequence and kv head */
    /* backward */
    float2 *rows;   /* (B, rows_of, H): lse in base 2, NaN where the row is not finite, and delta */
    int rows_of;    /* count of the whole call */
    float *partial; /* sums over parts of the readers of keys that have many */
    int max_parts;  /* cmp: parts of the queries */
    /* slc: the lists turned round; for each sequence and kv head an entry a block */
    nsa__cuda_block_readers readers;
    /* slc of few heads: a tile of rows has readers of one block, and leaves for each of them, in
       (B, count, H, list_width), what attend_gather.cuh adds up, chunk by chunk of queries */
    bool gathered;
    int chunk;
    float *found;       /* dim_v wide: the sum of p v; dim wide: of ds k */
    float2 *found_sums; /* the largest score, base 2 (inf: a value was not finite), the sum of p */
};

/* The sequence and kv head of a block, and which of their tiles it has. */
struct nsa__cuda_attend_place {
    nsa__sequence seq;
    int b, kv_head, tile;
    int64_t key_row; /* row of key 0 in k and v */
    int keys;
};

NSA__DEVICE nsa__cuda_attend_place nsa__cuda_attend_place_of(const nsa__cuda_attend_job &job,
                                                             unsigned index) {
    nsa__cuda_attend_place at;
    const int pair = static_cast<int>(index / static_cast<unsigned>(job.tiles));
    at.tile = static_cast<int>(index % static_cast<unsigned>(job.tiles));
    at.b = pair / job.d.kv_heads;
    at.kv_head = pair % job.d.kv_heads;
    at.seq = nsa__sequence_of(job.d, at.b);
    at.key_row = at.seq.row;
    at.keys = at.seq.tokens;
    if (job.branch == NSA__KEYS_CMP) {
        at.key_row = nsa__cmp_row(job.d, job.cmp_begins, at.b);
        at.keys = nsa__cmp_count(job.d, at.seq.tokens);
    }
    return at;
}

NSA__DEVICE int64_t nsa__cuda_attend_pair(const nsa__cuda_attend_job &job,
                                          const nsa__cuda_attend_place &at) {
    return static_cast<int64_t>(at.b) * job.d.kv_heads + at.kv_head;
}

/* The part of readers with number `item`, counted over all blocks; block is -1 behind the last. */
NSA__DEVICE nsa__cuda_reader_part nsa__cuda_reader_part_of(const nsa__cuda_attend_job &job,
                                                           const nsa__cuda_attend_place &at,
                                                           int item) {
    const nsa__cuda_block_readers &r = job.readers;
    const int64_t pair = nsa__cuda_attend_pair(job, at);
    const int32_t *parts = r.part_begin + pair * (r.blocks + 1);
    nsa__cuda_reader_part found = {-1, 0, 0, 0, nullptr};
    if (item >= parts[r.blocks]) return found;
    int low = 0, high = r.blocks; /* parts[low] <= item < parts[high] */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (parts[middle] <= item)
            low = middle;
        else
            high = middle;
    }
    found.block = low;
    found.part = item - parts[low];
    found.parts = parts[low + 1] - parts[low];
    const int64_t begin =
        r.begin[pair * (r.blocks + 1) + low] + static_cast<int64_t>(found.part) * r.part;
    const int64_t end = r.begin[pair * (r.blocks + 1) + low + 1];
    found.query = r.query + pair * r.max_readers + begin;
    found.count = static_cast<int>(min(static_cast<int64_t>(r.part), end - begin));
    return found;
}

/* A grid of `tiles` blocks for each sequence and kv head. */
static inline nsa_status nsa__cuda_attend_grid(nsa__cuda_attend_job *job, int64_t tiles,
                                               dim3 *grid) {
    if (tiles > INT32_MAX) return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    job->tiles = static_cast<int>(tiles);
    return nsa__cuda_grid(tiles * job->d.batch * job->d.kv_heads, grid);
}

/* ---- Which keys a query sees --------------------------------------------------------------- */

/* Keys begin .. end - 1. */
struct nsa__cuda_key_span {
    int begin, end;
};

/* The span that holds all keys of a query; of slc, the listed blocks in it. */
NSA__DEVICE nsa__cuda_key_span nsa__cuda_keys_of(const nsa__cuda_attend_job &job, int query) {
    nsa__cuda_key_span s = {0, query + 1};
    if (job.branch == NSA__KEYS_CMP) s.end = nsa__cmp_visible(job.d, query);
    if (job.branch == NSA__KEYS_WIN) s.begin = nsa__window_begin(job.d, query);
    return s;
}

/* The part of a span in tile keys begin .. end - 1, counted from begin. */
NSA__DEVICE nsa__cuda_key_span nsa__cuda_key_span_in(nsa__cuda_key_span s, int begin, int end) {
    return {max(s.begin, begin) - begin, min(s.end, end) - begin};
}

/* Bits begin .. end - 1. */
NSA__DEVICE uint64_t nsa__cuda_key_span_bits(nsa__cuda_key_span s) {
    const int n = s.end - s.begin;
    return n <= 0 ? 0 : (n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1) << s.begin;
}

/* ---- Tiles of query rows ------------------------------------------------------------------- */

/* Row r is head (skip + r) % G of query first + (skip + r) / G or, gathered, of that one of
   `list`. */
struct nsa__cuda_query_tile {
    int first, skip, end; /* end: behind the last query */
    int block;            /* gathered: what they all read */
    const int32_t *list;  /* NULL: not gathered */
};

struct nsa__cuda_query_row {
    int query, head;
    bool there;
};

NSA__DEVICE nsa__cuda_query_tile nsa__cuda_query_tile_of(const nsa__cuda_attend_job &job,
                                                         const nsa__cuda_attend_place &at,
                                                         int rows) {
    nsa__cuda_query_tile t = {0, 0, 0, -1, nullptr};
    if (job.gathered) {
        const nsa__cuda_reader_part part = nsa__cuda_reader_part_of(job, at, at.tile);
        t.end = part.count;
        t.block = part.block;
        t.list = part.query;
        return t;
    }
    /* late queries see most keys: they go first */
    const int64_t row = static_cast<int64_t>(job.tiles - 1 - at.tile) * rows;
    t.first = at.seq.first + static_cast<int>(row / job.group);
    t.skip = static_cast<int>(row % job.group);
    t.end = at.seq.first + at.seq.count;
    return t;
}

NSA__DEVICE nsa__cuda_query_row nsa__cuda_query_row_of(const nsa__cuda_attend_job &job,
                                                       const nsa__cuda_attend_place &at,
                                                       const nsa__cuda_query_tile &tile, int row) {
    nsa__cuda_query_row r;
    const int place = tile.first + (tile.skip + row) / job.group;
    r.there = place < tile.end;
    r.query = tile.list && r.there ? tile.list[place] : place;
    r.head = at.kv_head * job.group + (tile.skip + row) % job.group;
    return r;
}

/* Of a product's sums a thread has two rows of its warp's 16, eight apart; the number of the
   upper one. */
NSA__DEVICE int nsa__cuda_upper_row() {
    const int thread = static_cast<int>(threadIdx.x);
    return thread / 32 * 16 + thread % 32 / 4;
}

/* Warps go in groups of four, 64 rows. The place, in the tile, of the first query of the warp's
   group, and a bit for each of them. */
NSA__DEVICE int nsa__cuda_group_first(const nsa__cuda_attend_job &job,
                                      const nsa__cuda_query_tile &tile) {
    return (tile.skip + static_cast<int>(threadIdx.x) / 128 * 64) / job.group;
}
NSA__DEVICE uint64_t nsa__cuda_group_bits(const nsa__cuda_attend_job &job,
                                          const nsa__cuda_query_tile &tile) {
    const int end = (tile.skip + static_cast<int>(threadIdx.x) / 128 * 64 + 63) / job.group + 1;
    return nsa__cuda_key_span_bits(
        {0, min(tile.end - tile.first, end) - nsa__cuda_group_first(job, tile)});
}

/* The row of a view on the query's side. */
template <typename T>
NSA__DEVICE T *nsa__cuda_query_at(const nsa_tensor &x, const nsa__cuda_attend_place &at, int query,
                                  int head) {
    return nsa__row_of<T>(x, at.seq.batch, at.seq.row + query - at.seq.first, head);
}

/* Gathered: the number of what a row finds in the tile's block. */
NSA__DEVICE int64_t nsa__cuda_found_at(const nsa__cuda_attend_job &job,
                                       const nsa__cuda_attend_place &at,
                                       const nsa__cuda_query_tile &tile,
                                       const nsa__cuda_query_row &row) {
    const int32_t *list =
        nsa__cuda_query_at<const int32_t>(job.x.blocks, at, row.query, at.kv_head);
    const int64_t place = static_cast<int64_t>(at.b) * job.d.count + row.query - at.seq.first;
    int slot = 0;
    while (list[slot] != tile.block) slot++; /* it is there: the list named the reader */
    return (place * job.d.heads + row.head) * job.list_width + slot;
}

/* ---- Walking key tiles --------------------------------------------------------------------- */

struct nsa__cuda_key_tile {
    int begin, end;   /* at most KEYS */
    uint64_t readers; /* a bit for each query of the warp's group: it may see keys here */
    uint64_t bad;     /* a bit for each key */
};

/* The key tiles that a tile of up to QUERIES queries reads, ascending. slc: the union of the
   lists. Each lane follows the lists of queries lane and lane + 32; an entry counts if it is a
   candidate of its query and greater than those before it, so that any list is harmless. All
   warps walk alike. */
template <int KEYS, int QUERIES> struct nsa__cuda_walk_keys {
    static constexpr int LISTS = (QUERIES + 31) / 32, NONE = INT32_MAX;
    nsa__cuda_key_tile tile;
    int end;      /* no query sees a key from here on */
    int stop;     /* where the block at hand ends, if lists are followed */
    bool follows; /* slc, not gathered */
    int block;
    const int32_t *list[LISTS];
    int slot[LISTS], entry[LISTS], last[LISTS];
};

template <int KEYS, int QUERIES>
NSA__DEVICE void
nsa__cuda_walk_begin(nsa__cuda_walk_keys<KEYS, QUERIES> &w, const nsa__cuda_attend_job &job,
                     const nsa__cuda_attend_place &at, const nsa__cuda_query_tile &rows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int queries = min((rows.skip + QUERIES - 1) / job.group + 1, rows.end - rows.first);
    const int last = rows.first + queries - 1;
    w.end = nsa__cuda_keys_of(job, rows.list ? rows.list[last] : last).end;
    w.tile.begin = nsa__cuda_keys_of(job, rows.first).begin / KEYS * KEYS - KEYS;
    if (rows.list) {
        const int begin = rows.block * job.d.slc_block;
        w.end = begin + min(job.d.slc_block, w.end - begin);
        w.tile.begin = begin - KEYS;
    }
    w.stop = w.end;
    w.tile.readers = nsa__cuda_group_bits(job, rows);
    w.follows = job.branch == NSA__KEYS_SLC && !rows.list;
    if (!w.follows) return;
    w.stop = w.tile.begin;
    w.block = -1;
#pragma unroll
    for (int i = 0; i < w.LISTS; i++) {
        const int query = rows.first + (lane + 32 * i < queries ? lane + 32 * i : 0);
        w.list[i] = nsa__cuda_query_at<const int32_t>(job.x.blocks, at, query, at.kv_head);
        w.slot[i] = lane + 32 * i < queries ? 0 : job.list_width;
        w.last[i] = query / job.d.slc_block;
        w.entry[i] = -1;
    }
}

/* The next entry of list i. A number that happens to be NONE ends no list. */
template <int KEYS, int QUERIES>
NSA__DEVICE int nsa__cuda_walk_entry(nsa__cuda_walk_keys<KEYS, QUERIES> &w,
                                     const nsa__cuda_attend_job &job, int i) {
    return w.slot[i] < job.list_width ? min(w.list[i][w.slot[i]++], w.NONE - 1) : w.NONE;
}

/* 32 bits, each `up` places higher; those that fall off are gone. */
NSA__DEVICE uint64_t nsa__cuda_bits_moved(uint64_t bits, int up) {
    if (up >= 64 || up <= -32) return 0;
    return up >= 0 ? bits << up : bits >> -up;
}

/* Turns to the next block that any list holds. */
template <int KEYS, int QUERIES>
NSA__DEVICE bool nsa__cuda_walk_next_block(nsa__cuda_walk_keys<KEYS, QUERIES> &w,
                                           const nsa__cuda_attend_job &job,
                                           const nsa__cuda_query_tile &rows) {
    int next = w.NONE;
#pragma unroll
    for (int i = 0; i < w.LISTS; i++) {
        while (w.entry[i] != w.NONE && (w.entry[i] <= w.block || w.entry[i] > w.last[i]))
            w.entry[i] = nsa__cuda_walk_entry(w, job, i);
        next = min(next, w.entry[i]);
    }
    next = __reduce_min_sync(0xffffffffu, next);
    if (next == w.NONE) return false;
    w.block = next;
    w.tile.begin = next * job.d.slc_block;
    w.stop = w.tile.begin + min(job.d.slc_block, w.end - w.tile.begin);
    w.tile.readers = 0;
    const int group_first = nsa__cuda_group_first(job, rows);
#pragma unroll
    for (int i = 0; i < w.LISTS; i++) {
        const uint64_t readers = __ballot_sync(0xffffffffu, w.entry[i] == next);
        w.tile.readers |= nsa__cuda_bits_moved(readers, 32 * i - group_first);
        /* asked for now, looked at when the next block is */
        if (w.entry[i] == next) w.entry[i] = nsa__cuda_walk_entry(w, job, i);
    }
    w.tile.readers &= nsa__cuda_group_bits(job, rows);
    return true;
}

/* A bit for each of the KEYS keys from begin on whose k or v row is not finite. */
template <int KEYS>
NSA__DEVICE uint64_t nsa__cuda_bad_keys(const nsa__cuda_attend_job &job,
                                        const nsa__cuda_attend_place &at, int begin) {
    const uint64_t *word = job.bad + nsa__cuda_attend_pair(job, at) * job.bad_words + begin / 64;
    const int shift = begin % 64;
    uint64_t bad = word[0] >> shift;
    if (KEYS + shift > 64) bad |= word[1] << (64 - shift);
    if (KEYS < 64) bad &= (uint64_t(1) << KEYS % 64) - 1;
    return bad;
}

template <int KEYS, int QUERIES>
NSA__DEVICE bool
nsa__cuda_walk_next(nsa__cuda_walk_keys<KEYS, QUERIES> &w, const nsa__cuda_attend_job &job,
                    const nsa__cuda_attend_place &at, const nsa__cuda_query_tile &rows) {
    w.tile.begin += KEYS;
    if (w.tile.begin >= w.stop && (!w.follows || !nsa__cuda_walk_next_block(w, job, rows)))
        return false;
    w.tile.end = w.tile.begin + min(KEYS, w.stop - w.tile.begin);
    w.tile.bad = nsa__cuda_bad_keys<KEYS>(job, at, w.tile.begin);
    return true;
}

/* What of a tile the query at place `number` of the warp's group sees. */
NSA__DEVICE nsa__cuda_key_span nsa__cuda_seen_of(const nsa__cuda_key_tile &tile,
                                                 nsa__cuda_key_span keys, int number) {
    nsa__cuda_key_span s = nsa__cuda_key_span_in(keys, tile.begin, tile.end);
    if (!(tile.readers >> number & 1)) s.end = 0;
    return s;
}

/* ---- Which keys have a non-finite value ---------------------------------------------------- */

enum { NSA__SCAN_WARPS = 8 };

NSA__DEVICE bool nsa__cuda_piece_finite(const nsa_tensor &x, int64_t b, int64_t row, int head,
                                        int c) {
    float v[8];
    bool finite = true;
    nsa__load8(v, x.dtype, nsa__row_at(x, b, row, head), c);
#pragma unroll
    for (int i = 0; i < 8; i++) finite &= nsa__finite(v[i]);
    return finite;
}

/* A warp writes one word: 64 keys, k and v side by side, eight elements to a lane. */
static __global__ void nsa__cuda_attend_scan_kernel(nsa__cuda_attend_job job) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const nsa__cuda_attend_place at = nsa__cuda_attend_place_of(job, blockIdx.x);
    const int word = at.tile * NSA__SCAN_WARPS + static_cast<int>(threadIdx.x) / 32;
    if (word >= job.bad_words) return;
    const int of_k = job.d.dim / 8, pieces = of_k + job.d.dim_v / 8;
    const int count = static_cast<int>(min(int64_t(64), at.keys - int64_t(64) * word));
    uint64_t bad = 0;
#pragma unroll 4
    for (int key = 0; key < count; key++) {
        const int64_t row = at.key_row + int64_t(64) * word + key;
        bool finite = true;
        for (int piece = lane; piece < pieces; piece += 32)
            finite &= piece < of_k ? nsa__cuda_piece_finite(job.x.k, at.seq.batch, row, at.kv_head,
                                                            piece * 8)
                                   : nsa__cuda_piece_finite(job.x.v, at.seq.batch, row, at.kv_head,
                                                            (piece - of_k) * 8);
        if (!__all_sync(0xffffffffu, finite)) bad |= uint64_t(1) << key;
    }
    if (lane == 0) job.bad[nsa__cuda_attend_pair(job, at) * job.bad_words + word] = bad;
}

/* ---- Tiles held and tiles streamed --------------------------------------------------------- */

/* The dynamic shared memory that a block may have on every architecture from 8.0 on. */
enum { NSA__SHARED_MOST = 99 * 1024 - 2048 };

/* A kernel holds one tile of rows, HELD_WIDTH wide, and streams tiles of the other side through
   two stages, STREAM_WIDTH wide: the largest that fit, of at most MOST rows or, in f32,
   MOST_F32, whose products are unrolled over them. A warp owns 16 of the rows held, of which
   there are 64, or HELD_MOST where that leaves the streamed tiles as they are, so that they are
   brought in less often. */
template <typename T, int HELD_WIDTH, int STREAM_WIDTH, int MOST, int MOST_F32, int HELD_MOST = 64>
struct nsa__cuda_tile_shape {
    static constexpr int most = sizeof(T) == 2 ? MOST : MOST_F32;
    static constexpr int bytes(int held, int streamed) {
        return static_cast<int>(sizeof(T)) * (held * HELD_WIDTH + 2 * streamed * STREAM_WIDTH);
    }
    static constexpr int streamed_with(int held) {
        return bytes(held, most) <= NSA__SHARED_MOST       ? most
               : bytes(held, most / 2) <= NSA__SHARED_MOST ? most / 2
               : bytes(held, most / 4) <= NSA__SHARED_MOST ? most / 4
                                                           : 0;
    }
    static constexpr int LEAST = sizeof(T) == 2 ? 16 : 8; /* of a product */
    static constexpr int FEW = streamed_with(64) >= LEAST ? 64 : 32;
    static constexpr int STREAMED = streamed_with(FEW);
    static constexpr int HELD =
        sizeof(T) == 2 && streamed_with(HELD_MOST) == STREAMED ? HELD_MOST : FEW;
    static constexpr int BYTES = bytes(HELD, STREAMED);
    static constexpr int WARPS = HELD / 16;
    static_assert(STREAMED >= LEAST, "does not fit shared memory");
};

/* Starts copying a tile's keys and values, which lie side by side in a stage. */
template <typename T, int DK, int DV, int KEYS, int THREADS>
NSA__DEVICE void nsa__cuda_stage_keys(T *stage, const nsa__cuda_attend_job &job,
                                      const nsa__cuda_attend_place &at,
                                      const nsa__cuda_key_tile &tile) {
    const T *k = nsa__row_of<const T>(job.x.k, at.seq.batch, at.key_row + tile.begin, at.kv_head);
    const T *v = nsa__row_of<const T>(job.x.v, at.seq.batch, at.key_row + tile.begin, at.kv_head);
    const int count = tile.end - tile.begin;
    nsa__cuda_tile_copy_rows<T, DK, KEYS, THREADS>(stage, job.d.dim, k, job.x.k.token, count);
    nsa__cuda_tile_copy_rows<T, DV, KEYS, THREADS>(stage + KEYS * DK, job.d.dim_v, v, job.x.v.token,
                                                   count);
}

/* Zeros the rows of a stage that hold a non-finite value. */
template <typename T, int DK, int DV, int KEYS, int THREADS>
NSA__DEVICE void nsa__cuda_clean_stage(T *stage, uint64_t bad) {
    nsa__cuda_tile_zero<T, DK, KEYS, THREADS>(stage, bad);
    nsa__cuda_tile_zero<T, DV, KEYS, THREADS>(stage + KEYS * DK, bad);
    nsa__cuda_tiles_written<T, KEYS>();
}

/* Turns the lists round, for parts of at most `part` readers (attend_gather.cuh). */
static nsa_status nsa__cuda_gather(nsa__cuda_attend_job *job, int part, cudaStream_t stream);

/* ---- Forward ------------------------------------------------------------------------------- */

template <typename T, int DK, int DV, int HELD_MOST = 128>
struct nsa__cuda_forward_shape
    : nsa__cuda_tile_shape<T, DK, DK + DV, (DV > 192 ? 16 : 64), (DV > 192 ? 8 : 16), HELD_MOST> {};

/* What a thread knows of its two rows, g and g + 8 of its warp. */
struct nsa__cuda_forward_rows {
    nsa__cuda_key_span keys[2];
    int number[2]; /* the query's place in the warp's group */
    float most[2]; /* the largest score so far, in base 2; -inf before the first */
    float sum[2];  /* of this thread's columns */
    bool bad[2];
};

NSA__DEVICE float nsa__cuda_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
NSA__DEVICE float nsa__cuda_quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* What belongs to keys that a row does not see becomes `value`. */
template <int N>
NSA__DEVICE void nsa__cuda_hide(float (&s)[N][4], const nsa__cuda_key_span (&seen)[2],
                                float value) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    bool whole = true;
#pragma unroll
    for (int h = 0; h < 2; h++) whole &= seen[h].begin == 0 && seen[h].end == 8 * N;
    if (__all_sync(0xffffffffu, whole)) return;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int c = 8 * n + column + e % 2;
            if (c < seen[e / 2].begin || c >= seen[e / 2].end) s[n][e] = value;
        }
}

/* Scales the scores; those of keys that a row does not see become -inf. Decoding has to find the
   same bits, so no compiler may join the product with a later sum in one of the two. */
template <int N>
NSA__DEVICE void nsa__cuda_mask_tile(float (&s)[N][4], const nsa__cuda_key_span (&seen)[2],
                                     float scale2) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = __fmul_rn(s[n][e], scale2);
    nsa__cuda_hide(s, seen, -INFINITY);
}

/* What is subtracted from scores whose largest is `most`: never an infinity. */
NSA__DEVICE float nsa__cuda_base(float most) {
    return most == -INFINITY ? 0.0f : most;
}

/* What sums relative to the largest score `before` become relative to `most`: times exactly 1 where
   it stays. Decoding goes through the same steps tile by tile (decode_attend.cuh). */
NSA__DEVICE float nsa__cuda_shrink(float before, float most) {
    return most == before ? 1.0f : nsa__ex2(before - nsa__cuda_base(most));
}

/* s becomes p = 2^(s - most), 0 where masked; shrink is what earlier p of a row are to be
   multiplied by: exactly 1 where the maximum stays. No infinity is subtracted from another. */
template <int N>
NSA__DEVICE void nsa__cuda_softmax_tile(float (&s)[N][4], nsa__cuda_forward_rows &rows,
                                        float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = rows.most[h], sum = 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) most = fmaxf(most, s[n][2 * h + e]);
        most = nsa__cuda_quad_max(most);
        const float base = nsa__cuda_base(most);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = s[n][2 * h + e];
                x = nsa__ex2(x - base);
                sum += x;
            }
        shrink[h] = nsa__cuda_shrink(rows.most[h], most);
        rows.sum[h] = fmaf(rows.sum[h], shrink[h], sum);
        rows.most[h] = most;
    }
}

/* What a gathered tile leaves of the thread's two rows. */
template <int N>
NSA__DEVICE void
nsa__cuda_gathered_end(const nsa__cuda_attend_job &job, const nsa__cuda_attend_place &at,
                       const nsa__cuda_query_tile &tile, const nsa__cuda_forward_rows &rows,
                       const float (&out)[N][4]) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const nsa__cuda_query_row row =
            nsa__cuda_query_row_of(job, at, tile, nsa__cuda_upper_row() + 8 * h);
        const float sum = nsa__cuda_quad_sum(rows.sum[h]);
        if (!row.there) continue;
        const int64_t found = nsa__cuda_found_at(job, at, tile, row);
#pragma unroll
        for (int n = 0; n < N; n++)
            if (8 * n < job.d.dim_v)
                nsa__store_pair(job.found + found * job.d.dim_v + 8 * n + column, out[n][2 * h],
                                out[n][2 * h + 1]);
        if (column == 0)
            job.found_sums[found] = make_float2(rows.bad[h] ? INFINITY : rows.most[h], sum);
    }
}

/* out / sum and lse of the thread's two rows. */
template <typename T, int N>
NSA__DEVICE void nsa__cuda_forward_end(const nsa__cuda_attend_job &job,
                                       const nsa__cuda_attend_place &at,
                                       const nsa__cuda_query_tile &tile,
                                       const nsa__cuda_forward_rows &rows, float (&out)[N][4]) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    const float nan = __uint_as_float(0x7fc00000u), ln2 = 0.693147180559945f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const nsa__cuda_query_row row =
            nsa__cuda_query_row_of(job, at, tile, nsa__cuda_upper_row() + 8 * h);
        const float sum = nsa__cuda_quad_sum(rows.sum[h]);
        if (!row.there) continue;
        const bool empty = sum == 0, bad = rows.bad[h] && !empty;
        const float inverse = empty ? 0.0f : 1.0f / sum;
        T *to = nsa__cuda_query_at<T>(job.x.out, at, row.query, row.head);
#pragma unroll
        for (int n = 0; n < N; n++)
            if (8 * n < job.d.dim_v)
                nsa__store_pair(to + 8 * n + column, bad ? nan : out[n][2 * h] * inverse,
                                bad ? nan : out[n][2 * h + 1] * inverse);
        if (column == 0)
            *nsa__cuda_query_at<float>(job.x.lse, at, row.query, row.head) =
                bad     ? nan
                : empty ? -INFINITY
                        : (rows.most[h] + nsa__log2(sum)) * ln2;
    }
}

NSA__DEVICE void nsa__cuda_forward_begin(nsa__cuda_forward_rows &rows,
                                         const nsa__cuda_attend_job &job,
                                         const nsa__cuda_attend_place &at,
                                         const nsa__cuda_query_tile &tile, uint32_t bad) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = lane / 4 + 8 * h;
        const nsa__cuda_query_row row = nsa__cuda_query_row_of(job, at, tile, 16 * warp + r);
        rows.number[h] = (tile.skip + 16 * warp + r) / job.group - nsa__cuda_group_first(job, tile);
        rows.keys[h] = {0, 0};
        if (row.there) rows.keys[h] = nsa__cuda_keys_of(job, row.query);
        rows.most[h] = -INFINITY;
        rows.sum[h] = 0;
        rows.bad[h] = bad >> r & 1;
    }
}

template <typename T, int DK, int DV>
static __global__ void __launch_bounds__(32 * nsa__cuda_forward_shape<T, DK, DV>::WARPS,
                                         8 / nsa__cuda_forward_shape<T, DK, DV>::WARPS)
    nsa__cuda_attend_forward_kernel(nsa__cuda_attend_job job) {
    using shape = nsa__cuda_forward_shape<T, DK, DV>;
    constexpr int ROWS = shape::HELD, KEYS = shape::STREAMED, THREADS = 32 * shape::WARPS;
    NSA_SHARED_ALL(shared);
    T *const q = reinterpret_cast<T *>(shared), *const stages = q + ROWS * DK;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;

    NSA_SHARED(nsa__cuda_attend_place, at, );
    NSA_SHARED(nsa__cuda_query_tile, tile_rows, );
    if (threadIdx.x == 0) {
        at = nsa__cuda_attend_place_of(job, blockIdx.x);
        tile_rows = nsa__cuda_query_tile_of(job, at, ROWS);
    }
    __syncthreads();
    if (tile_rows.first >= tile_rows.end) return;
    nsa__cuda_walk_keys<KEYS, ROWS> walk = {};
    nsa__cuda_walk_begin(walk, job, at, tile_rows);

    nsa__cuda_tile_copy<T, DK, ROWS, THREADS>(
        q, job.d.dim, static_cast<const T *>(job.x.q.data), [&](int r) {
            const nsa__cuda_query_row row = nsa__cuda_query_row_of(job, at, tile_rows, r);
            return row.there ? nsa__cuda_query_at<const T>(job.x.q, at, row.query, row.head)
                             : nullptr;
        });
    bool more = nsa__cuda_walk_next(walk, job, at, tile_rows);
    if (more) nsa__cuda_stage_keys<T, DK, DV, KEYS, THREADS>(stages, job, at, walk.tile);
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
    __syncthreads();

    nsa__cuda_forward_rows rows;
    nsa__cuda_forward_begin(rows, job, at, tile_rows,
                            nsa__cuda_tile_clean<T, DK, ROWS>(q, warp_row));
    float out[DV / 8][4] = {};
    for (int at_stage = 0; more; at_stage ^= 1) {
        const nsa__cuda_key_tile tile = walk.tile;
        T *const k = stages + at_stage * KEYS * (DK + DV), *const v = k + KEYS * DK;
        /* this stage is there, and nobody reads the other one any more */
        nsa__cuda_tiles_wait<T, KEYS>();
        more = nsa__cuda_walk_next(walk, job, at, tile_rows);
        if (more)
            nsa__cuda_stage_keys<T, DK, DV, KEYS, THREADS>(
                stages + (at_stage ^ 1) * KEYS * (DK + DV), job, at, walk.tile);
        nsa__cp_async_commit();
        if (tile.bad) nsa__cuda_clean_stage<T, DK, DV, KEYS, THREADS>(k, tile.bad);

        const nsa__cuda_key_span seen[2] = {nsa__cuda_seen_of(tile, rows.keys[0], rows.number[0]),
                                            nsa__cuda_seen_of(tile, rows.keys[1], rows.number[1])};
        const bool sees = seen[0].begin < seen[0].end || seen[1].begin < seen[1].end;
        if (!nsa__cuda_takes_part<T, KEYS>(sees, tile.readers != 0)) continue;
        float s[KEYS / 8][4], shrink[2];
        nsa__cuda_product_nt<T, DK, KEYS, ROWS>(s, q, warp_row, k);
        nsa__cuda_mask_tile(s, seen, job.scale2);
        nsa__cuda_softmax_tile(s, rows, shrink);
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
            for (int n = 0; n < DV / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[n][e] *= shrink[e / 2];
        nsa__cuda_product_nn<T, KEYS, DV>(out, s, v, 0);
        if (tile.bad)
#pragma unroll
            for (int h = 0; h < 2; h++)
                rows.bad[h] |= (nsa__cuda_key_span_bits(seen[h]) & tile.bad) != 0;
    }
    if (job.gathered)
        nsa__cuda_gathered_end(job, at, tile_rows, rows, out);
    else
        nsa__cuda_forward_end<T>(job, at, tile_rows, rows, out);
}

/* The blocks of a kernel that holds `held` rows of queries: neighbours, or gathered first. */
static nsa_status nsa__cuda_query_grid(nsa__cuda_attend_job *job, int held, dim3 *grid,
                                       cudaStream_t stream) {
    int64_t tiles = nsa__cuda_ceil_div(static_cast<int64_t>(job->d.count) * job->group, held);
    if (job->gathered) {
        const nsa_status s = nsa__cuda_gather(job, held / job->group, stream);
        if (s != NSA_OK) return s;
        tiles = job->readers.max_parts;
    }
    return nsa__cuda_attend_grid(job, tiles, grid);
}

template <typename T, int DK, int DV> struct nsa__cuda_forward_run {
    static nsa_status launch(nsa__cuda_attend_job job, cudaStream_t stream) {
        using shape = nsa__cuda_forward_shape<T, DK, DV>;
        dim3 grid;
        const nsa_status s = nsa__cuda_query_grid(&job, shape::HELD, &grid, stream);
        if (s != NSA_OK) return s;
        return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_forward_kernel<T, DK, DV>, grid,
                                           dim3(32 * shape::WARPS), shape::BYTES, stream, job));
    }
};

/* ---- Choosing a kernel --------------------------------------------------------------------- */

/* The padded widths that are compiled: 64, 128, 192 with 128 (the paper's), and the largest. */
template <template <typename, int, int> class Run, typename T, typename Job>
static nsa_status nsa__cuda_attend_choose_width(const Job &job, cudaStream_t stream) {
    constexpr int MOST = NSA_CUDA_MAX_DIM;
    const int dim = job.d.dim, dim_v = job.d.dim_v;
    if (dim <= 64 && dim_v <= 64) return Run<T, 64, 64>::launch(job, stream);
    if constexpr (MOST >= 128)
        if (dim <= 128 && dim_v <= 128) return Run<T, 128, 128>::launch(job, stream);
    if constexpr (MOST >= 192) {
        if (dim <= 192 && dim_v <= 128) return Run<T, 192, 128>::launch(job, stream);
        return Run<T, MOST, MOST>::launch(job, stream);
    }
    return nsa__error(NSA_ERROR_SIZE, NSA__AT_dim);
}

template <template <typename, int, int> class Run, typename Job>
static nsa_status nsa__cuda_attend_choose(const Job &job, cudaStream_t stream) {
    switch (job.x.q.dtype) {
#ifndef NSA_CUDA_NO_F32
    case NSA_F32:
        return nsa__cuda_attend_choose_width<Run, float>(job, stream);
#endif
#ifndef NSA_CUDA_NO_BF16
    case NSA_BF16:
        return nsa__cuda_attend_choose_width<Run, __nv_bfloat16>(job, stream);
#endif
#ifndef NSA_CUDA_NO_F16
    case NSA_F16:
        return nsa__cuda_attend_choose_width<Run, __half>(job, stream);
#endif
    default:
        return nsa__error(NSA_ERROR_DTYPE, NSA__AT_q);
    }
}

/* ---- Calls --------------------------------------------------------------------------------- */

/* The workspace that forward and backward share, dealt out; the size query is the same code. */
static void nsa__cuda_attend_plan(nsa__cuda_attend_job *job, const nsa_desc *d,
                                  nsa__cuda_branch_keys branch, nsa__cuda_arena *arena) {
    const int64_t keys = branch == NSA__KEYS_CMP ? nsa_cmp_count(d, d->tokens) : d->tokens;
    const double scale = d->scale != 0 ? d->scale : 1 / sqrt(static_cast<double>(d->dim));
    memset(job, 0, sizeof *job);
    job->d = *d;
    job->branch = branch;
    job->group = d->heads / d->kv_heads;
    job->list_width = nsa_block_list_width(d);
    job->scale = static_cast<float>(scale);
    job->scale2 = static_cast<float>(scale * 1.4426950408889634);
    job->bad_words = static_cast<int>(nsa__cuda_ceil_div(keys, 64) + 1); /* a tile may straddle */
    job->bad = nsa__cuda_take<uint64_t>(arena, static_cast<int64_t>(d->batch) * d->kv_heads *
                                                   job->bad_words);
    if (branch == NSA__KEYS_CMP && d->begins)
        job->cmp_begins = nsa__cuda_take<int32_t>(arena, static_cast<int64_t>(d->batch) + 1);
}

typedef void nsa__cuda_attend_planner(nsa__cuda_attend_job *, const nsa_desc *,
                                      nsa__cuda_branch_keys, nsa__cuda_arena *);

static size_t nsa__cuda_attend_bytes(const nsa_desc *d, nsa__cuda_branch_keys branch,
                                     nsa__cuda_attend_planner *plan) {
    nsa__cuda_attend_job job;
    nsa__cuda_arena arena = nsa__cuda_arena_at(NULL);
    if (nsa__cuda_check_desc(d) != NSA_OK) return 0;
    plan(&job, d, branch, &arena);
    return nsa__cuda_arena_bytes(&arena);
}

/* The job of a call, in the caller's workspace if that is large enough. */
static nsa_status nsa__cuda_attend_open(nsa__cuda_attend_job *job, const nsa_desc *d,
                                        nsa__cuda_branch_keys branch,
                                        nsa__cuda_attend_planner *plan, void *workspace,
                                        size_t bytes) {
    const nsa_status s =
        nsa__cuda_check_workspace(nsa__cuda_attend_bytes(d, branch, plan), workspace, bytes);
    if (s != NSA_OK) return s;
    nsa__cuda_arena arena = nsa__cuda_arena_at(workspace);
    plan(job, d, branch, &arena);
    return NSA_OK;
}

/* What comes before any attention: where compressed rows begin, which keys are not finite. */
static nsa_status nsa__cuda_attend_prepare(const nsa__cuda_attend_job *job, cudaStream_t stream) {
    nsa__cuda_attend_job scan = *job;
    dim3 grid;
    if (job->cmp_begins) {
        const nsa_status s =
            nsa__cuda_cmp_begins(&job->d, const_cast<int32_t *>(job->cmp_begins), stream);
        if (s != NSA_OK) return s;
    }
    const nsa_status s =
        nsa__cuda_attend_grid(&scan, nsa__cuda_ceil_div(job->bad_words, NSA__SCAN_WARPS), &grid);
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_scan_kernel, grid,
                                       dim3(32 * NSA__SCAN_WARPS), 0, stream, scan));
}

struct nsa__cuda_attend_fields {
    int q, k, v, out, lse, blocks;
};

static const nsa__cuda_attend_fields nsa__cuda_attend_names = {
    NSA__AT_q, NSA__AT_k, NSA__AT_v, NSA__AT_out, NSA__AT_lse, NSA__AT_blocks};

static nsa__shape nsa__cuda_branch_shape(const nsa_desc *d, nsa__cuda_branch_keys branch,
                                         int width) {
    return branch == NSA__KEYS_CMP ? nsa__cuda_cmp_shape(d, width) : nsa__cuda_key_shape(d, width);
}

/* One dtype for all; what the lists hold is not looked at. */
static nsa_status nsa__cuda_attend_check(const nsa_attend *x, const nsa_desc *d,
                                         nsa__cuda_branch_keys branch, int forward,
                                         const nsa__cuda_attend_fields *at) {
    const nsa__shape q = nsa__cuda_query_shape(d, d->heads, d->dim);
    const nsa__shape out = nsa__cuda_query_shape(d, d->heads, d->dim_v);
    const nsa__shape lse = nsa__cuda_query_shape(d, d->heads, 1);
    nsa_status s = nsa__cuda_check_rows(&x->q, q, NSA__CUDA_DTYPES, 0, at->q);
    if (s != NSA_OK || d->count == 0) return s;
    const unsigned same = 1u << x->q.dtype;
    s = nsa__cuda_check_rows(&x->k, nsa__cuda_branch_shape(d, branch, d->dim), same, 0, at->k);
    if (s != NSA_OK) return s;
    s = nsa__cuda_check_rows(&x->v, nsa__cuda_branch_shape(d, branch, d->dim_v), same, 0, at->v);
    if (s != NSA_OK) return s;
    if ((s = nsa__cuda_check_rows(&x->out, out, same, forward, at->out)) != NSA_OK) return s;
    if ((s = nsa__check_view(&x->lse, lse, 1u << NSA_F32, forward, at->lse)) != NSA_OK) return s;
    if (branch != NSA__KEYS_SLC) return NSA_OK;
    return nsa__check_view(&x->blocks,
                           nsa__cuda_query_shape(d, d->kv_heads, nsa_block_list_width(d)),
                           NSA__INTS, 0, at->blocks);
}

#endif

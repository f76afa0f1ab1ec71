/* attend_keys.cuh: what the kernels of attention over few keys share: the parameters of a call, the
   keys that a query sees, tiles of query rows, the walk over key tiles.
   Twin: nsa.h, "Attention over few keys".
   Not here: the loops that multiply (attend_forward.cuh, attend_backward.cuh), how blocks are
   selected (select_blocks.cuh).

   The branches differ in which keys a query sees: nsa__cuda_keys_of and nsa__cuda_readers_of say
   so, and slc's block lists. A thread block holds a tile of query rows: the rows of neighbouring
   queries and of all heads of a group, in slc of one list. They read the same keys, so a key tile
   is loaded once for all of them. Key tiles lie at absolute positions. */
#ifndef NSA_ATTEND_KEYS_CUH
#define NSA_ATTEND_KEYS_CUH

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
    int32_t *counts; /* (chunks + 1, entries): where a chunk of queries puts its readers */
    int chunks, part;
    int64_t of_query; /* readers that a query may be */
    /* of one kv head: a sequence's blocks and one more, its readers, its slots */
    nsa__cuda_extent entries, readers, slots;
};

/* A part of a block's readers: query[0] .. query[count - 1], the part-th of `parts`. */
struct nsa__cuda_reader_part {
    int block, part, parts, count;
    const int32_t *query;
};

/* What backward needs of a row. `gate` is the branch's weight in the whole, 1 without a gate: then
   dout of the branch is gate * dout of the whole, and nobody has to write it down. */
struct nsa__cuda_row_terms {
    float lse;   /* NaN if lse, dout or gate is not finite */
    float delta; /* dout . out */
    float gate;
};

/* The parameters of a call: every kernel of it takes them by value. */
struct nsa__cuda_attend_params {
    nsa_attend x, dx;
    nsa_desc d;
    nsa__cuda_branch_keys branch;
    int group;  /* query heads that read the same keys, and lie in one tile */
    int lists;  /* slc: block lists of a kv head */
    int spread; /* a grid's heads for each kv head: 1, or one for each list */
    int list_width;
    nsa__cuda_extent tiles;    /* what blockIdx counts for one kv head */
    float scale;               /* of q k */
    const int32_t *cmp_begins; /* cmp of packed sequences */
    int32_t *ascending;        /* NULL, or what takes the place of begins for this call */
    uint64_t *bad;             /* a bit for each key: its k or v row has a non-finite value */
    nsa__cuda_extent words;    /* of one kv head */
    /* backward */
    nsa__cuda_row_terms *rows; /* (rows_of, H) */
    nsa__cuda_extent rows_of;  /* queries of the whole call */
    float *partial_dkv;        /* sums over parts of the readers of keys that have many */
    nsa__cuda_extent cmp_rows; /* compressed rows of one kv head */
    int max_parts;             /* cmp: parts of the queries */
    /* slc: the lists turned round; for each sequence and kv head an entry a block */
    nsa__cuda_block_readers readers;
    /* slc of few heads: the rows of a Q tile are readers of one block. Each leaves a partial result
       in (queries of the chunk, H, list_width); attend_gather.cuh adds them, chunk by chunk. */
    bool gathered;
    int chunk;
    nsa__cuda_extent chunk_rows;
    float *partial_out; /* dim_v wide: the sum of p v, by nsa__cuda_part_store; dim wide: of ds k */
    float *partial_units; /* of the sums of p v */
    float2
        *partial_sums; /* the largest score, base 2 (inf: a value was not finite), the sum of p */
};

/* The sequence and kv head that a thread block works on, and which of their tiles. */
struct nsa__cuda_attend_head {
    nsa__sequence seq;
    int b, kv_head, tile;
    int list;        /* the first list of its queries; list * group is their first query head */
    int64_t key_row; /* row of key 0 in k and v, if they are in no pages */
    int keys;
    int64_t words; /* where the bits of key 0 lie in params.bad */
    int64_t row;   /* where the rows of query `first` lie in params.rows */
};

/* Where the things of a kv head and sequence begin, all heads' one behind the other. */
NSA__DEVICE int64_t nsa__cuda_place_in(const nsa__cuda_extent &e, const nsa__cuda_attend_head &at) {
    return at.kv_head * e.total + nsa__cuda_place_of(e, at.b, at.seq);
}

NSA__DEVICE nsa__cuda_attend_head nsa__cuda_attend_head_of(const nsa__cuda_attend_params &params,
                                                           unsigned index) {
    nsa__cuda_attend_head at;
    const unsigned total = static_cast<unsigned>(params.tiles.total);
    const int head = static_cast<int>(index / total);
    const nsa__cuda_thing tile = nsa__cuda_thing_at(params.d, params.tiles, index % total);
    at.tile = static_cast<int>(tile.local);
    at.b = tile.b;
    at.kv_head = head / params.spread;
    at.list = head * (params.lists / params.spread);
    at.seq = nsa__sequence_of(params.d, at.b);
    at.key_row = at.seq.key_row;
    at.keys = at.seq.tokens;
    if (params.branch == NSA__KEYS_CMP) {
        at.key_row = nsa__cmp_row(params.d, params.cmp_begins, at.b);
        at.keys = nsa__cmp_count(params.d, at.seq.tokens);
    }
    at.words = nsa__cuda_place_in(params.words, at);
    at.row = nsa__cuda_place_of(params.rows_of, at.b, at.seq);
    return at;
}

/* The part of readers with number `item`, counted over all blocks; block is -1 behind the last. */
NSA__DEVICE nsa__cuda_reader_part nsa__cuda_reader_part_of(const nsa__cuda_attend_params &params,
                                                           const nsa__cuda_attend_head &at,
                                                           int item) {
    const nsa__cuda_block_readers &r = params.readers;
    const int64_t entry = nsa__cuda_place_in(r.entries, at);
    const int32_t *parts = r.part_begin + entry;
    nsa__cuda_reader_part reader = {-1, 0, 0, 0, nullptr};
    int low = 0, high = nsa__slc_count(params.d, at.seq.tokens);
    if (item >= parts[high]) return reader; /* else parts[low] <= item < parts[high] */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (parts[middle] <= item)
            low = middle;
        else
            high = middle;
    }
    reader.block = low;
    reader.part = item - parts[low];
    reader.parts = parts[low + 1] - parts[low];
    const int64_t begin = r.begin[entry + low] + static_cast<int64_t>(reader.part) * r.part;
    const int64_t end = r.begin[entry + low + 1];
    reader.query = r.query + nsa__cuda_place_in(r.readers, at) + begin;
    reader.count = static_cast<int>(min(static_cast<int64_t>(r.part), end - begin));
    return reader;
}

/* An entry of a block's readers names a query and which of the kv head's lists reads the block. */
struct nsa__cuda_reader {
    int query, list;
};

NSA__DEVICE nsa__cuda_reader nsa__cuda_reader_of(const nsa__cuda_attend_params &params, int entry) {
    nsa__cuda_reader r = {entry, 0};
    if (params.lists > 1) r = {entry / params.lists, entry % params.lists};
    return r;
}

/* A grid of so many blocks for each head. */
static inline nsa_status nsa__cuda_attend_grid(nsa__cuda_attend_params *params,
                                               const nsa__cuda_extent &tiles, dim3 *grid) {
    if (tiles.total > INT32_MAX || tiles.each > INT32_MAX)
        return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    params->tiles = tiles;
    return nsa__cuda_grid(tiles.total * params->d.kv_heads * params->spread, grid);
}

/* Tiles of `keys` of the branch's keys, `parts` of each. */
static inline nsa__cuda_extent nsa__cuda_key_tiles(const nsa__cuda_attend_params *params, int keys,
                                                   int parts) {
    const nsa_desc *d = &params->d;
    const bool cmp = params->branch == NSA__KEYS_CMP;
    const int64_t most = cmp ? nsa_cmp_count(d, d->tokens) : d->tokens;
    return nsa__cuda_extent_of(d, nsa__cuda_ceil_div(most, keys) * parts, parts,
                               static_cast<int64_t>(keys) * (cmp ? d->cmp_stride : 1), parts);
}

/* ---- Which keys a query sees ---------------------------------------------------------------

   The only code of the kernels that says what a query may see: nsa__cuda_keys_of, its inverse
   nsa__cuda_readers_of, and nsa__cuda_last_block for the entries of a block list. */

/* Keys begin .. end - 1. */
struct nsa__cuda_key_span {
    int begin, end;
};

/* The span that holds all keys of a query of a sequence of `tokens`; of slc, the listed blocks in
   it. */
NSA__DEVICE nsa__cuda_key_span nsa__cuda_keys_of(const nsa__cuda_attend_params &params, int tokens,
                                                 int query) {
    nsa__cuda_key_span s = {0, nsa__visible_end(params.d, tokens, query)};
    if (params.branch == NSA__KEYS_CMP) s.end = nsa__cmp_visible(params.d, tokens, query);
    if (params.branch == NSA__KEYS_WIN)
        s = {nsa__window_begin(params.d, query), nsa__window_end(params.d, tokens, query)};
    return s;
}

/* The positions of queries that may see keys begin .. end - 1. */
NSA__DEVICE nsa__cuda_key_span nsa__cuda_readers_of(const nsa__cuda_attend_params &params,
                                                    const nsa__cuda_attend_head &at, int begin,
                                                    int end) {
    const bool causal = params.d.mask == NSA_MASK_CAUSAL, win = params.branch == NSA__KEYS_WIN;
    const int64_t reach =
        static_cast<int64_t>(params.d.window) - (params.d.window_rule == NSA_WINDOW_COUNTS_SELF);
    int64_t first = begin, last = at.seq.tokens;
    if (params.branch == NSA__KEYS_CMP)
        first = static_cast<int64_t>(begin) * params.d.cmp_stride + params.d.cmp_block - 1;
    if (!causal) first = win ? begin - reach : 0;
    if (win) last = min(last, end + reach);
    first = max(first, static_cast<int64_t>(at.seq.first));
    last = min(last, static_cast<int64_t>(at.seq.first) + at.seq.count);
    return {static_cast<int>(min(first, last)), static_cast<int>(last)};
}

/* The last block that a list of a query may name: the last that it sees a token of. */
NSA__DEVICE int nsa__cuda_last_block(const nsa__cuda_attend_params &params, int tokens, int query) {
    return nsa__slc_candidates(params.d, tokens, query) - 1;
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
    int query, head, list;
    bool there;
};

NSA__DEVICE nsa__cuda_query_tile nsa__cuda_query_tile_of(const nsa__cuda_attend_params &params,
                                                         const nsa__cuda_attend_head &at,
                                                         int rows) {
    nsa__cuda_query_tile t = {0, 0, 0, -1, nullptr};
    if (params.gathered) {
        const nsa__cuda_reader_part part = nsa__cuda_reader_part_of(params, at, at.tile);
        t.end = part.count;
        t.block = part.block;
        t.list = part.query;
        return t;
    }
    /* late queries see most keys: they go first */
    const int64_t tiles = (static_cast<int64_t>(at.seq.count) * params.group + rows - 1) / rows;
    if (at.tile >= tiles) return t;
    const int64_t row = (tiles - 1 - at.tile) * rows;
    t.first = at.seq.first + static_cast<int>(row / params.group);
    t.skip = static_cast<int>(row % params.group);
    t.end = at.seq.first + at.seq.count;
    return t;
}

NSA__DEVICE nsa__cuda_query_row nsa__cuda_query_row_of(const nsa__cuda_attend_params &params,
                                                       const nsa__cuda_attend_head &at,
                                                       const nsa__cuda_query_tile &tile, int row) {
    nsa__cuda_query_row r;
    const int index = tile.first + (tile.skip + row) / params.group;
    r.there = index < tile.end;
    nsa__cuda_reader reader = {index, 0};
    if (tile.list && r.there) reader = nsa__cuda_reader_of(params, tile.list[index]);
    r.query = reader.query;
    r.list = at.list + reader.list;
    r.head = r.list * params.group + (tile.skip + row) % params.group;
    return r;
}

/* Of a product's sums a thread has two rows of its warp's 16, eight apart; the number of the
   upper one. Unsigned, so cheap that ptxas makes it anew and keeps no register for it. */
NSA__DEVICE int nsa__cuda_upper_row() {
    return static_cast<int>(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4);
}

/* Warps go in groups of four, 64 rows. The place, in the tile, of the first query of a group, the
   warp's own unless another is named, and a bit for each of them. */
NSA__DEVICE int nsa__cuda_warpgroup_first(const nsa__cuda_attend_params &params,
                                          const nsa__cuda_query_tile &tile,
                                          int warpgroup = static_cast<int>(threadIdx.x) / 128) {
    return (tile.skip + warpgroup * 64) / params.group;
}
NSA__DEVICE uint64_t nsa__cuda_warpgroup_bits(const nsa__cuda_attend_params &params,
                                              const nsa__cuda_query_tile &tile,
                                              int warpgroup = static_cast<int>(threadIdx.x) / 128) {
    const int end = (tile.skip + warpgroup * 64 + 63) / params.group + 1;
    return nsa__cuda_key_span_bits(
        {0, min(tile.end - tile.first, end) - nsa__cuda_warpgroup_first(params, tile, warpgroup)});
}

/* The row of a view on the query's side: its element offset, and its address. */
NSA__DEVICE int64_t nsa__cuda_query_offset(const nsa_tensor &x, const nsa__cuda_attend_head &at,
                                           int query, int head) {
    return x.batch * at.seq.batch + x.token * (at.seq.row + query - at.seq.first) + x.head * head;
}
template <typename T>
NSA__DEVICE T *nsa__cuda_query_at(const nsa_tensor &x, const nsa__cuda_attend_head &at, int query,
                                  int head) {
    return nsa__row_of<T>(x, at.seq.batch, at.seq.row + query - at.seq.first, head);
}

/* Gathered: the number of what a row finds in the tile's block. */
NSA__DEVICE int64_t nsa__cuda_partial_out_index(const nsa__cuda_attend_params &params,
                                                const nsa__cuda_attend_head &at,
                                                const nsa__cuda_query_tile &tile,
                                                const nsa__cuda_query_row &row) {
    const int32_t *list =
        nsa__cuda_query_at<const int32_t>(params.x.blocks, at, row.query, row.list);
    const int64_t place =
        nsa__cuda_place_of(params.chunk_rows, at.b, at.seq) + row.query - at.seq.first;
    int slot = 0;
    while (list[slot] != tile.block) slot++; /* it is there: the list named the reader */
    return (place * params.d.heads + row.head) * params.list_width + slot;
}

/* ---- Walking key tiles --------------------------------------------------------------------- */

struct nsa__cuda_key_tile {
    int begin, end;   /* at most KEYS */
    uint64_t readers; /* a bit for each query of the warp's group: it may see keys here */
    uint64_t bad;     /* a bit for each key */
};

/* The words of params.bad that hold the bits of up to 64 keys from begin on. */
struct nsa__cuda_bad_words {
    uint64_t low, high;
};

/* The key tiles that a tile of up to QUERIES queries reads, ascending. LISTS: the union of the
   queries' block lists; else one span, or the block that gathered queries share. Each lane follows
   the lists of queries lane, lane + 32, ...; an entry counts if it is a candidate of its query and
   greater than those before it, so any list is harmless. All warps walk alike. */
template <int KEYS, int QUERIES, bool LISTS> struct nsa__cuda_walk_keys {
    static constexpr int PER_LANE = (QUERIES + 31) / 32, NONE = INT32_MAX;
    nsa__cuda_key_tile tile; /* without `bad`: nsa__cuda_walk_tile adds it */
    nsa__cuda_bad_words bad;
    int end;             /* no query sees a key from here on */
    int stop;            /* end of the current block; of the span if !LISTS */
    int queries;         /* of the tile */
    int block;           /* the current one; -1 before the first */
    const int32_t *list; /* of query `lane`; one pointer, because registers are few */
    int slot[PER_LANE], entry[PER_LANE], last[PER_LANE];
    uint32_t ballots[PER_LANE]; /* bit l of ballots[i]: query 32 i + l reads the block */
};

template <int KEYS, int QUERIES, bool LISTS>
NSA__DEVICE void nsa__cuda_walk_begin(nsa__cuda_walk_keys<KEYS, QUERIES, LISTS> &w,
                                      const nsa__cuda_attend_params &params,
                                      const nsa__cuda_attend_head &at,
                                      const nsa__cuda_query_tile &rows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    w.queries = min((rows.skip + QUERIES - 1) / params.group + 1, rows.end - rows.first);
    int last = rows.first + w.queries - 1;
    if (!LISTS && rows.list) last = nsa__cuda_reader_of(params, rows.list[last]).query;
    w.end = nsa__cuda_keys_of(params, at.seq.tokens, last).end;
    if constexpr (!LISTS) {
        w.tile.begin =
            nsa__cuda_keys_of(params, at.seq.tokens, rows.first).begin / KEYS * KEYS - KEYS;
        if (rows.list) {
            const int begin = rows.block * params.d.slc_block;
            w.end = begin + min(params.d.slc_block, w.end - begin);
            w.tile.begin = begin - KEYS;
        }
        w.stop = w.end;
        w.tile.readers = nsa__cuda_warpgroup_bits(params, rows);
        return;
    }
    w.stop = w.tile.begin = -KEYS;
    w.block = -1;
#pragma unroll
    for (int i = 0; i < w.PER_LANE; i++) {
        const int query = rows.first + (lane + 32 * i < w.queries ? lane + 32 * i : 0);
        if (i == 0) w.list = nsa__cuda_query_at<const int32_t>(params.x.blocks, at, query, at.list);
        w.slot[i] = lane + 32 * i < w.queries ? 0 : params.list_width;
        w.last[i] = nsa__cuda_last_block(params, at.seq.tokens, query);
        w.entry[i] = -1;
    }
}

/* The next entry of list i, of the query 32 i behind the lane's first. A number that happens to be
   NONE ends no list. */
template <int KEYS, int QUERIES, bool LISTS>
NSA__DEVICE int nsa__cuda_walk_entry(nsa__cuda_walk_keys<KEYS, QUERIES, LISTS> &w,
                                     const nsa__cuda_attend_params &params, int i) {
    const int64_t at = 32 * i * params.x.blocks.token;
    return w.slot[i] < params.list_width ? min(w.list[at + w.slot[i]++], w.NONE - 1) : w.NONE;
}

/* 32 bits, each `up` places higher; those that fall off are gone. */
NSA__DEVICE uint64_t nsa__cuda_bits_moved(uint64_t bits, int up) {
    if (up >= 64 || up <= -32) return 0;
    return up >= 0 ? bits << up : bits >> -up;
}

/* The queries of the warp's group, which begin at `first`, among those that ballots name. */
template <int N>
NSA__DEVICE uint64_t nsa__cuda_walk_readers(const uint32_t *ballots, int first, uint64_t group) {
    uint64_t readers = 0;
#pragma unroll
    for (int i = 0; i < N; i++) readers |= nsa__cuda_bits_moved(ballots[i], 32 * i - first);
    return readers & group;
}

/* Turns to the next block that any list holds. */
template <int KEYS, int QUERIES, bool LISTS>
NSA__DEVICE bool nsa__cuda_walk_next_block(nsa__cuda_walk_keys<KEYS, QUERIES, LISTS> &w,
                                           const nsa__cuda_attend_params &params,
                                           const nsa__cuda_query_tile &rows) {
    int next = w.NONE;
#pragma unroll
    for (int i = 0; i < w.PER_LANE; i++) {
        if (32 * i >= w.queries) break;
        while (w.entry[i] != w.NONE && (w.entry[i] <= w.block || w.entry[i] > w.last[i]))
            w.entry[i] = nsa__cuda_walk_entry(w, params, i);
        next = min(next, w.entry[i]);
    }
    next = __reduce_min_sync(0xffffffffu, next);
    if (next == w.NONE) return false;
    w.block = next;
    w.tile.begin = next * params.d.slc_block;
    w.stop = w.tile.begin + min(params.d.slc_block, w.end - w.tile.begin);
#pragma unroll
    for (int i = 0; i < w.PER_LANE; i++) {
        w.ballots[i] = 0;
        if (32 * i >= w.queries) continue;
        w.ballots[i] = __ballot_sync(0xffffffffu, w.entry[i] == next);
        /* asked for now, looked at when the next block is */
        if (w.entry[i] == next) w.entry[i] = nsa__cuda_walk_entry(w, params, i);
    }
    w.tile.readers = nsa__cuda_walk_readers<(QUERIES + 31) / 32>(
        w.ballots, nsa__cuda_warpgroup_first(params, rows), nsa__cuda_warpgroup_bits(params, rows));
    return true;
}

template <int KEYS>
NSA__DEVICE nsa__cuda_bad_words nsa__cuda_load_bad(const nsa__cuda_attend_params &params,
                                                   const nsa__cuda_attend_head &at, int begin) {
    const uint64_t *word = params.bad + at.words + begin / 64;
    return {word[0], KEYS + begin % 64 > 64 ? word[1] : 0};
}

/* A bit for each of the KEYS keys from begin on whose k or v row is not finite. */
template <int KEYS>
NSA__DEVICE uint64_t nsa__cuda_bad_bits(const nsa__cuda_bad_words &words, int begin) {
    const int shift = begin % 64;
    uint64_t bad = words.low >> shift;
    if (shift) bad |= words.high << (64 - shift);
    if (KEYS < 64) bad &= (uint64_t(1) << KEYS % 64) - 1;
    return bad;
}

template <int KEYS>
NSA__DEVICE uint64_t nsa__cuda_bad_keys(const nsa__cuda_attend_params &params,
                                        const nsa__cuda_attend_head &at, int begin) {
    return nsa__cuda_bad_bits<KEYS>(nsa__cuda_load_bad<KEYS>(params, at, begin), begin);
}

template <int KEYS, int QUERIES, bool LISTS>
NSA__DEVICE bool nsa__cuda_walk_next(nsa__cuda_walk_keys<KEYS, QUERIES, LISTS> &w,
                                     const nsa__cuda_attend_params &params,
                                     const nsa__cuda_attend_head &at,
                                     const nsa__cuda_query_tile &rows) {
    w.tile.begin += KEYS;
    if (w.tile.begin >= w.stop && (!LISTS || !nsa__cuda_walk_next_block(w, params, rows)))
        return false;
    w.tile.end = w.tile.begin + min(KEYS, w.stop - w.tile.begin);
    w.bad = nsa__cuda_load_bad<KEYS>(params, at, w.tile.begin);
    return true;
}

/* The tile that nsa__cuda_walk_next has moved to. Its bad keys were loaded then and are looked at
   only now, a tile later, so nothing waits for the load. */
template <int KEYS, int QUERIES, bool LISTS>
NSA__DEVICE nsa__cuda_key_tile
nsa__cuda_walk_tile(const nsa__cuda_walk_keys<KEYS, QUERIES, LISTS> &w) {
    nsa__cuda_key_tile tile = w.tile;
    tile.bad = nsa__cuda_bad_bits<KEYS>(w.bad, tile.begin);
    return tile;
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

/* The element offset of a key's row in k or v. */
NSA__DEVICE int64_t nsa__cuda_row_offset(const nsa__cuda_attend_params &params,
                                         const nsa__cuda_attend_head &at, const nsa_tensor &x,
                                         int key) {
    return nsa__cuda_key_offset(params.d, x, at.seq, at.b, params.branch == NSA__KEYS_CMP,
                                at.key_row, key, at.kv_head);
}

NSA__DEVICE bool nsa__cuda_piece_finite(nsa_dtype dtype, const void *row, int c) {
    float v[8];
    bool finite = true;
    nsa__load8(v, dtype, row, c);
#pragma unroll
    for (int i = 0; i < 8; i++) finite &= nsa__finite(v[i]);
    return finite;
}

/* A warp writes one word: 64 keys, k and v side by side, eight elements to a lane. */
static __global__ void nsa__cuda_attend_scan_kernel(nsa__cuda_attend_params params) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const nsa__cuda_attend_head at = nsa__cuda_attend_head_of(params, blockIdx.x);
    const int word = at.tile * NSA__SCAN_WARPS + static_cast<int>(threadIdx.x) / 32;
    if (word > (at.keys + 63) / 64) return; /* one more than there are keys for */
    const int of_k = params.d.dim / 8, pieces = of_k + params.d.dim_v / 8;
    const int count = static_cast<int>(min(int64_t(64), at.keys - int64_t(64) * word));
    uint64_t bad = 0;
#pragma unroll 4
    for (int key = 0; key < count; key++) {
        const nsa_tensor &of_keys = params.x.k, &of_values = params.x.v;
        const void *k =
            nsa__element_at(of_keys, nsa__cuda_row_offset(params, at, of_keys, 64 * word + key));
        const void *v = nsa__element_at(
            of_values, nsa__cuda_row_offset(params, at, of_values, 64 * word + key));
        bool finite = true;
        for (int piece = lane; piece < pieces; piece += 32)
            finite &= piece < of_k ? nsa__cuda_piece_finite(of_keys.dtype, k, piece * 8)
                                   : nsa__cuda_piece_finite(of_values.dtype, v, (piece - of_k) * 8);
        if (!__all_sync(0xffffffffu, finite)) bad |= uint64_t(1) << key;
    }
    if (lane == 0) params.bad[at.words + word] = bad;
}

/* ---- Tiles in shared memory ---------------------------------------------------------------- */

/* The shared memory that a thread block may have: on every device from 8.0 on (8.6, 8.9 and 12.0
   have the least), and on Hopper. Tiles have 2 KB less, for what is static. */
enum { NSA__SHARED_DEVICE = 99 * 1024, NSA__SHARED_DEVICE_HOPPER = 227 * 1024 };
enum {
    NSA__SHARED_MOST = NSA__SHARED_DEVICE - 2048,
    NSA__SHARED_HOPPER = NSA__SHARED_DEVICE_HOPPER - 2048
};

/* The shapes of tiles differ by architecture. Device code knows its own; the host asks which code
   its device has loaded (nsa__cuda_on_hopper). */
enum { NSA__HOPPER = NSA__USES_WGMMA };

/* For a kernel to assert: its dynamic bytes fit beside those of its arrays, which are filled up
   to a multiple of 1024. */
template <size_t DYNAMIC, size_t ARRAYS> struct nsa__cuda_shared_fits {
    static constexpr size_t most = NSA__HOPPER ? NSA__SHARED_DEVICE_HOPPER : NSA__SHARED_DEVICE;
    static constexpr bool value = (ARRAYS + 1023) / 1024 * 1024 + DYNAMIC <= most;
};

#ifdef NSA_SIMT
static inline nsa_status nsa__cuda_on_hopper(bool *hopper) {
    *hopper = NSA__HOPPER;
    return NSA_OK;
}
#else
/* Its launch bounds tell the host whether this device runs code that multiplies by wgmma. */
static __global__ void __launch_bounds__(NSA__HOPPER ? 256 : 128) nsa__cuda_probe_kernel() {}

static inline nsa_status nsa__cuda_on_hopper(bool *hopper) {
    enum { DEVICES = 64 };
    static std::atomic<int> known[DEVICES]; /* 0: not asked yet; the kernel's threads */
    int device = 0;
    cudaFuncAttributes probe;
    NSA__CHECK(nsa__cuda_status(cudaGetDevice(&device)));
    int threads = device < DEVICES ? known[device].load() : 0;
    if (!threads) {
        NSA__CHECK(nsa__cuda_status(
            cudaFuncGetAttributes(&probe, reinterpret_cast<const void *>(nsa__cuda_probe_kernel))));
        threads = probe.maxThreadsPerBlock;
        if (device < DEVICES) known[device].store(threads);
    }
    *hopper = threads == 256;
    return NSA_OK;
}
#endif

/* A kernel keeps one tile of rows in shared memory, TILE_WIDTH wide, and loads tiles of the other
   side through two stages, STAGE_WIDTH wide: the largest that fit, of at most MOST rows or, in f32,
   MOST_F32, because products are unrolled over them. A warp owns 16 rows of the tile, which has 64,
   or TILE_MOST if the stages keep their size: then they are loaded less often. The field calls the
   two BLOCK_M and BLOCK_N: forward and dq keep queries (BLOCK_M) and load keys (BLOCK_N), dkv keeps
   keys and loads queries. */
template <typename T, int TILE_WIDTH, int STAGE_WIDTH, int MOST, int MOST_F32, int HOPPER,
          int TILE_MOST = 64>
struct nsa__cuda_tile_shape {
    static constexpr int most = sizeof(T) == 2 ? MOST : MOST_F32;
    static constexpr int limit = HOPPER ? NSA__SHARED_HOPPER : NSA__SHARED_MOST;
    static constexpr int bytes(int tile, int stage) {
        return static_cast<int>(sizeof(T)) * (tile * TILE_WIDTH + 2 * stage * STAGE_WIDTH);
    }
    static constexpr int stage_with(int tile) {
        return bytes(tile, most) <= limit       ? most
               : bytes(tile, most / 2) <= limit ? most / 2
               : bytes(tile, most / 4) <= limit ? most / 4
                                                : 0;
    }
    static constexpr int LEAST = sizeof(T) == 2 ? 16 : 8; /* of a product */
    static constexpr int FEW = stage_with(64) >= LEAST ? 64 : 32;
    static constexpr int STAGE = stage_with(FEW);
    static constexpr int TILE = sizeof(T) == 2 && stage_with(TILE_MOST) == STAGE ? TILE_MOST : FEW;
    static constexpr int BYTES = bytes(TILE, STAGE);
    static constexpr int WARPS = TILE / 16;
    static_assert(STAGE >= LEAST, "does not fit shared memory");
};

/* Starts copying a tile's keys or values out of pages, each row from where its page is. */
template <typename T, int D, int KEYS, int THREADS>
NSA__DEVICE void nsa__cuda_stage_pages(T *to, const nsa__cuda_attend_params &params,
                                       const nsa__cuda_attend_head &at, const nsa_tensor &x,
                                       int width, int begin, int end) {
    const T *const data = static_cast<const T *>(x.data);
    nsa__cuda_tile_copy<T, D, KEYS, THREADS>(to, width, data, [&](int r) {
        return begin + r < end ? data + nsa__cuda_row_offset(params, at, x, begin + r) : nullptr;
    });
}

/* Starts copying a tile's keys and values, which lie side by side in a stage. PAGED: they may lie
   in pages. */
template <typename T, int DK, int DV, int KEYS, int THREADS, bool PAGED>
NSA__DEVICE void nsa__cuda_stage_keys(T *stage, const nsa__cuda_attend_params &params,
                                      const nsa__cuda_attend_head &at,
                                      const nsa__cuda_key_tile &tile) {
    if (PAGED && params.d.pages) {
        nsa__cuda_stage_pages<T, DK, KEYS, THREADS>(stage, params, at, params.x.k, params.d.dim,
                                                    tile.begin, tile.end);
        nsa__cuda_stage_pages<T, DV, KEYS, THREADS>(stage + KEYS * DK, params, at, params.x.v,
                                                    params.d.dim_v, tile.begin, tile.end);
        return;
    }
    const T *k =
        nsa__row_of<const T>(params.x.k, at.seq.key_batch, at.key_row + tile.begin, at.kv_head);
    const T *v =
        nsa__row_of<const T>(params.x.v, at.seq.key_batch, at.key_row + tile.begin, at.kv_head);
    const int count = tile.end - tile.begin;
    nsa__cuda_tile_copy_rows<T, DK, KEYS, THREADS>(stage, params.d.dim, k, params.x.k.token, count);
    nsa__cuda_tile_copy_rows<T, DV, KEYS, THREADS>(stage + KEYS * DK, params.d.dim_v, v,
                                                   params.x.v.token, count);
}

/* Zeros the rows of a stage that hold a non-finite value. */
template <typename T, int DK, int DV, int KEYS, int THREADS>
NSA__DEVICE void nsa__cuda_clean_stage(T *stage, uint64_t bad) {
    nsa__cuda_tile_zero<T, DK, KEYS, THREADS>(stage, bad);
    nsa__cuda_tile_zero<T, DV, KEYS, THREADS>(stage + KEYS * DK, bad);
    nsa__cuda_tiles_written<T, KEYS>();
}

/* ---- Scores and softmax -------------------------------------------------------------------- */

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

/* Scales the scores. Decoding has to find the same bits, so no compiler may join the product with a
   later sum in one of the two. */
template <int N> NSA__DEVICE void nsa__cuda_scale_tile(float (&s)[N][4], float scale) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = __fmul_rn(s[n][e], scale);
}

/* And those of keys that a row does not see become -inf. */
template <int N>
NSA__DEVICE void nsa__cuda_mask_tile(float (&s)[N][4], const nsa__cuda_key_span (&seen)[2],
                                     float scale) {
    nsa__cuda_scale_tile(s, scale);
    nsa__cuda_hide(s, seen, -INFINITY);
}

/* p of a product, with the score's bits of nsa__cuda_scale_tile: never above 1. */
NSA__DEVICE float nsa__cuda_p(float product, float scale, float lse) {
    return nsa__exp(fminf(__fmul_rn(product, scale) - lse, 0.0f));
}

/* What is subtracted from scores whose largest is `most`: never an infinity. */
NSA__DEVICE float nsa__cuda_base(float most) {
    return most == -INFINITY ? 0.0f : most;
}

/* What sums relative to the largest score `before` become relative to `most`: times exactly 1 where
   it stays. Decoding goes through the same steps tile by tile (decode_attend.cuh). */
NSA__DEVICE float nsa__cuda_shrink(float before, float most) {
    return most == before ? 1.0f : nsa__exp(before - nsa__cuda_base(most));
}

/* ---- Choosing a kernel --------------------------------------------------------------------- */

/* The padded widths that are compiled: 64, 128, 192 with 128 (the paper's), and the largest. */
template <template <typename, int, int> class Run, typename T, typename Params>
static nsa_status nsa__cuda_attend_choose_width(const Params &params, cudaStream_t stream) {
    constexpr int MOST = NSA_CUDA_MAX_DIM;
    const int dim = params.d.dim, dim_v = params.d.dim_v;
    if (dim <= 64 && dim_v <= 64) return Run<T, 64, 64>::launch(params, stream);
    if constexpr (MOST >= 128)
        if (dim <= 128 && dim_v <= 128) return Run<T, 128, 128>::launch(params, stream);
    if constexpr (MOST >= 192) {
        if (dim <= 192 && dim_v <= 128) return Run<T, 192, 128>::launch(params, stream);
        return Run<T, MOST, MOST>::launch(params, stream);
    }
    return nsa__error(NSA_ERROR_SIZE, NSA__AT_dim);
}

template <template <typename, int, int> class Run, typename Params>
static nsa_status nsa__cuda_attend_choose(const Params &params, cudaStream_t stream) {
    switch (params.x.q.dtype) {
#ifndef NSA_CUDA_NO_F32
    case NSA_F32:
        return nsa__cuda_attend_choose_width<Run, float>(params, stream);
#endif
#ifndef NSA_CUDA_NO_BF16
    case NSA_BF16:
        return nsa__cuda_attend_choose_width<Run, __nv_bfloat16>(params, stream);
#endif
#ifndef NSA_CUDA_NO_F16
    case NSA_F16:
        return nsa__cuda_attend_choose_width<Run, __half>(params, stream);
#endif
    default:
        return nsa__error(NSA_ERROR_DTYPE, NSA__AT_q);
    }
}

/* ---- Calls --------------------------------------------------------------------------------- */

/* The workspace that forward and backward share, dealt out; the size query is the same code. */
static void nsa__cuda_attend_plan(nsa__cuda_attend_params *params, const nsa_desc *d,
                                  nsa__cuda_branch_keys branch, nsa__arena *arena) {
    const int64_t keys = branch == NSA__KEYS_CMP ? nsa_cmp_count(d, d->tokens) : d->tokens;
    const double scale = d->scale != 0 ? d->scale : 1 / sqrt(static_cast<double>(d->dim));
    memset(params, 0, sizeof *params);
    params->d = nsa__cuda_all_queries(d);
    params->branch = branch;
    params->lists = branch == NSA__KEYS_SLC ? nsa__list_heads(d) / d->kv_heads : 1;
    params->spread = 1;
    params->group = d->heads / d->kv_heads / params->lists;
    params->list_width = nsa_block_list_width(d);
    params->scale = static_cast<float>(scale);
    params->words = /* one more, because a tile may straddle */
        nsa__cuda_extent_of(d, nsa__cuda_ceil_div(keys, 64) + 1, 1,
                            64 * (branch == NSA__KEYS_CMP ? d->cmp_stride : int64_t(1)), 2);
    params->bad = nsa__cuda_take<uint64_t>(arena, params->words.total * d->kv_heads);
    if (d->begins && d->rows)
        params->ascending = nsa__cuda_take<int32_t>(arena, static_cast<int64_t>(d->batch) + 1);
    if (branch == NSA__KEYS_CMP && d->begins)
        params->cmp_begins = nsa__cuda_take<int32_t>(arena, static_cast<int64_t>(d->batch) + 1);
}

typedef void nsa__cuda_attend_planner(nsa__cuda_attend_params *, const nsa_desc *,
                                      nsa__cuda_branch_keys, nsa__arena *);

static const nsa_desc *nsa__cuda_branch_desc(const nsa_desc *d, nsa__cuda_branch_keys branch,
                                             nsa_desc *own) {
    return nsa__desc_using(d,
                           branch == NSA__KEYS_CMP   ? NSA__USES_CMP
                           : branch == NSA__KEYS_SLC ? NSA__USES_SLC
                                                     : 0,
                           own);
}

static size_t nsa__cuda_attend_bytes(const nsa_desc *d, nsa__cuda_branch_keys branch,
                                     nsa__cuda_attend_planner *plan) {
    nsa__cuda_attend_params params;
    nsa__arena arena = nsa__cuda_arena_at(NULL);
    nsa_desc own;
    d = nsa__cuda_branch_desc(d, branch, &own);
    if (nsa__cuda_check_desc(d) != NSA_OK) return 0;
    plan(&params, d, branch, &arena);
    return nsa__cuda_arena_bytes(&arena);
}

/* The parameters of a call whose workspace is large enough. */
static nsa__cuda_attend_params nsa__cuda_attend_params_of(const nsa_desc *d,
                                                          nsa__cuda_branch_keys branch,
                                                          nsa__cuda_attend_planner *plan,
                                                          void *workspace) {
    nsa__cuda_attend_params params;
    nsa__arena arena = nsa__cuda_arena_at(workspace);
    plan(&params, d, branch, &arena);
    return params;
}

/* What comes before any attention: begins that ascend, where compressed rows begin, which keys are
   not finite. */
static nsa_status nsa__cuda_attend_prepare(nsa__cuda_attend_params *params, cudaStream_t stream) {
    if (params->ascending) {
        NSA__CHECK(nsa__cuda_status(NSA_LAUNCH(nsa__cuda_ascending_kernel, dim3(1), dim3(32), 0,
                                               stream, params->d, params->ascending)));
        params->d.begins = params->ascending;
    }
    nsa__cuda_attend_params scan = *params;
    dim3 grid;
    if (params->cmp_begins) {
        NSA__CHECK(
            nsa__cuda_cmp_begins(&params->d, const_cast<int32_t *>(params->cmp_begins), stream));
    }
    nsa__cuda_extent tiles = params->words; /* of words; spare is enough for them, too */
    tiles.each = nsa__cuda_ceil_div(tiles.each, NSA__SCAN_WARPS);
    tiles = nsa__cuda_extent_of(&scan.d, tiles.each, 1, tiles.den * NSA__SCAN_WARPS, 2);
    NSA__CHECK(nsa__cuda_attend_grid(&scan, tiles, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_scan_kernel, grid,
                                       dim3(32 * NSA__SCAN_WARPS), 0, stream, scan));
}

/* One dtype for all; what the lists hold is not looked at. */
static nsa__checked nsa__cuda_attend_checked(const nsa_attend *x, const nsa_desc *d,
                                             nsa__cuda_branch_keys branch, int forward) {
    return nsa__cuda_checked_of(d, nsa__cuda_one_dtype(x->q.dtype), forward,
                                branch == NSA__KEYS_CMP);
}
static nsa_status nsa__cuda_attend_check(const nsa_attend *x, const nsa_desc *d,
                                         nsa__cuda_branch_keys branch, int forward,
                                         const int *fields) {
    nsa__checked c = nsa__cuda_attend_checked(x, d, branch, forward);
    const int views = branch == NSA__KEYS_SLC ? NSA__ATTEND_VIEWS : NSA__ATTEND_VIEWS - 1;
    c.fields = fields;
    return d->count ? nsa__check_views(&c, nsa__attend_views, views, x) : NSA_OK;
}

#endif

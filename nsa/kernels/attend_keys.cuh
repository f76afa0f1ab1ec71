/* attend_keys.cuh: what the kernels of attention over few keys share: the parameters of a call, the
   keys that a query sees (the mask), tiles of query rows.
   Twin: nsa.h, "Attention over few keys".
   Not here: which key tiles a block visits (attend_scheduler.cuh), how they get to its memory
   (attend_mainloop.cuh), how blocks are selected (select_blocks.cuh).

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

/* A branch of a call or of a step: its views, and what says which keys a query sees. */
struct nsa__cuda_branch {
    nsa_attend x;
    nsa_desc d;
    nsa__cuda_branch_keys branch;
    int group; /* query heads that read the same keys, and lie in one tile */
    int lists; /* slc: block lists of a kv head */
    int list_width;
    float scale;   /* of q k */
    uint64_t *bad; /* a bit for each key: its k or v row has a non-finite value */
};

enum { NSA__CUDA_SUM_Q = 1, NSA__CUDA_SUM_K = 2, NSA__CUDA_SUM_V = 4 };

/* The parameters of a call: every kernel of it takes them by value. */
struct nsa__cuda_attend_params : nsa__cuda_branch {
    nsa_attend dx;
    int sums;                  /* which of dx's are sums in workspace: NSA__CUDA_SUM_Q, .. */
    int spread;                /* a grid's heads for each kv head: 1, or one for each list */
    nsa__cuda_extent tiles;    /* what blockIdx counts for one kv head */
    const int32_t *cmp_begins; /* cmp of packed sequences */
    int32_t *ascending;        /* NULL, or what takes the place of begins for this call */
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
       in (queries of the chunk, H, list_width), which are added chunk by chunk
       (attend_slc_scheduler.cuh). */
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

/* The row of a gradient: of one of those that NSA__CUDA_SUM_* name. */
NSA__DEVICE int64_t nsa__cuda_gradient_row(const nsa__cuda_attend_params &params, int which,
                                           int64_t row) {
    return params.sums & which ? nsa__cuda_sum_row(params.d, row) : row;
}

/* Where the items of a kv head and sequence begin, all heads' one behind the other. */
NSA__DEVICE int64_t nsa__cuda_place_in(const nsa__cuda_extent &e, const nsa__cuda_attend_head &at) {
    return at.kv_head * e.total + nsa__cuda_place_of(e, at.b, at.seq);
}

NSA__DEVICE nsa__cuda_attend_head nsa__cuda_attend_head_of(const nsa__cuda_attend_params &params,
                                                           unsigned index) {
    nsa__cuda_attend_head at;
    const unsigned total = static_cast<unsigned>(params.tiles.total);
    const int head = static_cast<int>(index / total);
    const nsa__cuda_item tile = nsa__cuda_item_at(params.d, params.tiles, index % total);
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

NSA__DEVICE nsa__cuda_reader nsa__cuda_reader_of(const nsa__cuda_branch &params, int entry) {
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
NSA__DEVICE nsa__cuda_key_span nsa__cuda_keys_of(const nsa__cuda_branch &params, int tokens,
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
    const int64_t before =
        static_cast<int64_t>(params.d.window) - (params.d.window_rule == NSA_WINDOW_COUNTS_SELF);
    int64_t first = begin, last = at.seq.tokens;
    if (params.branch == NSA__KEYS_CMP)
        first = static_cast<int64_t>(begin) * params.d.cmp_stride + params.d.cmp_block - 1;
    if (!causal) first = win ? begin - before : 0;
    if (win) last = min(last, end + before);
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

NSA__DEVICE nsa__cuda_query_row nsa__cuda_query_row_of(const nsa__cuda_branch &params,
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
NSA__DEVICE int nsa__cuda_warpgroup_first(const nsa__cuda_branch &params,
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

#endif

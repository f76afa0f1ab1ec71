/* attend_scheduler.cuh: attention over few keys: the key tiles that a thread block visits, in their
   order, and which of their keys have a value that is not finite.
   Twin: nsa.h, "Attention: tile iteration".
   Not here: what a query sees of a tile (attend_keys.cuh), products (attend_forward.cuh). */
#ifndef NSA_ATTEND_SCHEDULER_CUH
#define NSA_ATTEND_SCHEDULER_CUH

#include "attend_keys.cuh"

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
NSA__DEVICE nsa__cuda_bad_words nsa__cuda_load_bad(const nsa__cuda_branch &params,
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
NSA__DEVICE uint64_t nsa__cuda_bad_keys(const nsa__cuda_branch &params,
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

#endif

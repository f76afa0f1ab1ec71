/* select_score.cuh: what products of q and k_cmp become in selection: sums over the heads of a
   group, scores of blocks, candidates of a warp's lists.
   Twin: nsa.h, "Selection".
   Not here: the products (select_blocks.cuh, select_sm90.cuh), lists (select_rank.cuh).

   Sums over heads go to a ring in shared memory, as long as a tile and a stencil; when all of a
   selection block's stencil has passed, the block is scored and offered to its query's list. A
   query's bits depend on its own rows alone. Heads are added in one order by every kernel:
   over bit 0 of their numbers first, then over bit 3 and those above, bit 2, bit 1.

   SCORER: scores that are no attention (score_blocks.cuh). The keys are tokens, compressed blocks
   of one, or compressed blocks of several; weighed products take the place of p, a maximum or a
   mean that of the stencil, and scores are written, not ranked. */
#ifndef NSA_SELECT_SCORE_CUH
#define NSA_SELECT_SCORE_CUH

#include "select_rank.cuh"
#include "tiles.cuh"

/* The shape of a launch. */
struct nsa__cuda_select_plan {
    int32_t *cmp_begins;
    uint64_t *lists; /* workspace: where lists are too long for shared memory; else NULL */
    int columns;     /* of a query: a power of two >= G, or all of a warp's, `chunks` times */
    int chunks;
    int queries;            /* of a warp */
    int warps;              /* of a block */
    nsa__cuda_extent tiles; /* of queries, of a list head */
    int ring;               /* a power of two */
    int length;             /* of the lists of the best */
    int width;              /* of the lists that are written */
    int strides;            /* l' / d */
    int cmp_strides;        /* l / d */
    int lists_per_kv_head;  /* the desc of a launch counts lists as its kv heads */
    size_t shared_bytes;
    bool own;          /* the scores' rows are counted for each sequence from 0: a workspace */
    nsa_score_act act; /* of a SCORER */
    nsa_score_pool pool;
};

/* A query as its warp ranks for it: keys it sees, with NSA__SELECT_BAD if a value of its own is not
   finite, so that all scores are 0; blocks .init .. .local - 1 to rank, how many of them to take;
   where scores are asked for, its row of them, for that many blocks. */
enum { NSA__SELECT_BAD = INT32_MIN };
struct alignas(16) nsa__cuda_select_query {
    int visible, init, local, room;
    float *scores;
    int candidates;
};

/* What does not hang on a kernel; `most`: the longest list that it keeps. */
static nsa__cuda_select_plan nsa__cuda_select_plan_begin(const nsa_desc *d, int most) {
    nsa__cuda_select_plan p = {};
    p.chunks = 1;
    p.strides = d->slc_block / d->cmp_stride;
    p.cmp_strides = d->cmp_block / d->cmp_stride;
    p.width = nsa_block_list_width(d);
    p.length = most;
    p.lists_per_kv_head = 1;
    return p;
}

/* A ring for the keys between two rankings; the shared memory of a query then, but for its list. */
static size_t nsa__cuda_select_plan_ring(nsa__cuda_select_plan *p, int keys) {
    p->ring = 1;
    while (p->ring < keys + p->strides + p->cmp_strides) p->ring *= 2;
    return sizeof(nsa__cuda_select_query) + sizeof(float) * static_cast<size_t>(p->ring);
}

/* What lies in the workspace; `shared`: lists do not. */
static void nsa__cuda_select_plan_end(nsa__cuda_select_plan *p, const nsa_desc *d, bool shared,
                                      nsa__arena *a) {
    const int tile_queries = p->warps * p->queries;
    p->tiles = nsa__cuda_query_extent_of(d, nsa__cuda_ceil_div(d->count, tile_queries), 1,
                                         tile_queries, 1);
    p->cmp_begins = nsa__cuda_take<int32_t>(a, d->begins ? d->batch + int64_t(1) : 0);
    p->lists = nsa__cuda_take<uint64_t>(
        a, shared ? 0 : p->tiles.total * d->kv_heads * tile_queries * p->length);
    if (shared) p->lists = NULL;
}

/* Sums of V values over a lane and its neighbour across `bit`, V / 2 of them for each of the two:
   the lane whose bit is set keeps those of the upper half. V / 2 shuffles for V sums. */
template <int V> NSA__DEVICE void nsa__cuda_select_fold(float (&v)[V], int bit) {
    const bool upper = threadIdx.x & static_cast<unsigned>(bit);
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        const float mine = upper ? v[i + V / 2] : v[i], theirs = upper ? v[i] : v[i + V / 2];
        v[i] = mine + __shfl_xor_sync(0xffffffffu, theirs, bit);
    }
}

/* Where sums over heads go: ring[query][key]. */
struct nsa__cuda_select_ring {
    float *data;
    int size;
    bool adds; /* a later chunk of heads */
    __device__ __forceinline__ void put(int query, int key, float value) const {
        float &to = data[query * size + (key & (size - 1))];
        to = adds ? to + value : value;
    }
};

/* v[2 q + h] is a lane's part of the sum of query q and key + 8 h; sums over the four lanes of a
   key, as few shuffles as there are sums (V > 2), and puts them. */
template <int V, typename Ring>
NSA__DEVICE void nsa__cuda_select_put(float (&v)[V], const Ring &ring, int key) {
    const int i = static_cast<int>(threadIdx.x) % 4;
    if constexpr (V == 2) {
        nsa__cuda_select_fold(v, 1);
        v[0] += __shfl_xor_sync(0xffffffffu, v[0], 2);
        if (i < 2) ring.put(0, key + i * 8, v[0]);
    } else {
        float part[V / 2];
        nsa__cuda_select_fold(v, 2);
#pragma unroll
        for (int e = 0; e < V / 2; e++) part[e] = v[e];
        nsa__cuda_select_fold(part, 1);
        if constexpr (V == 4) {
            ring.put(i / 2, key + i % 2 * 8, part[0]);
        } else {
            ring.put(i, key, part[0]);
            ring.put(i, key + 8, part[1]);
        }
    }
}

/* The sums of p over the heads of each query, for the keys of one product. key: that of the lane's
   first row. */
template <int NT, typename Ring>
NSA__DEVICE void nsa__cuda_select_sum_heads(const float (&p)[NT][4], const Ring &ring, int columns,
                                            int key) {
    const int i = static_cast<int>(threadIdx.x) % 4;
    float v[2 * NT]; /* (n, row) */
#pragma unroll
    for (int n = 0; n < 2 * NT; n++) v[n] = p[n / 2][n % 2 * 2] + p[n / 2][n % 2 * 2 + 1];
    if constexpr (NT == 1) {
        if (columns == 1) {
#pragma unroll
            for (int e = 0; e < 4; e++) ring.put(2 * i + e % 2, key + e / 2 * 8, p[0][e]);
        } else {
            ring.put(i, key, v[0]);
            ring.put(i, key + 8, v[1]);
        }
    } else if (columns == 4) { /* lanes 0 and 1 are one query, lanes 2 and 3 the next */
        nsa__cuda_select_fold(v, 1);
#pragma unroll
        for (int e = 0; e < NT; e++)
            ring.put((i % 2 * NT + e) / 2 * 2 + i / 2, key + (i % 2 * NT + e) % 2 * 8, v[e]);
    } else if (columns == 8) {
        nsa__cuda_select_put<2 * NT>(v, ring, key);
    } else {
        float w[NT]; /* pairs of n */
#pragma unroll
        for (int e = 0; e < NT; e++) w[e] = v[e / 2 * 4 + e % 2] + v[e / 2 * 4 + 2 + e % 2];
        if (NT == 2 || columns == 16) {
            nsa__cuda_select_put<NT>(w, ring, key);
        } else {
            float u[2] = {w[0] + w[NT - 2], w[1] + w[NT - 1]};
            nsa__cuda_select_put<2>(u, ring, key);
        }
    }
}

/* A warp's queries and what it keeps of them. */
struct nsa__cuda_select_warp {
    int first_query; /* row on the query's side */
    int visible;     /* the most that one of its queries sees */
    int candidates;  /* likewise */
    nsa__cuda_select_query *queries;
    uint64_t *lists;
    float *ring;
    float *lse; /* of its columns */
};

/* Whether a value of a query is not finite: its logarithms or, of scores that are no attention, its
   weights; ROWS: those of q too. By a warp. */
template <bool ROWS>
NSA__DEVICE bool nsa__cuda_select_is_bad(const nsa_select &x, const nsa_desc &d,
                                         const nsa__sequence &s, int row, int kv_head) {
    const int group = d.heads / d.kv_heads, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t first = static_cast<int64_t>(kv_head) * group;
    bool bad = false;
    for (int g = lane; x.lse.data && g < group; g += 32)
        bad |= !nsa__finite(
            nsa__load1(x.lse.dtype, nsa__row_at(x.lse, s.batch, s.row + row, first + g), 0));
    for (int i = lane; ROWS && i < group * (d.dim / 4); i += 32) {
        float q[4];
        nsa__load4(q, x.q.dtype, nsa__row_at(x.q, s.batch, s.row + row, first + i / (d.dim / 4)),
                   i % (d.dim / 4) * 4);
#pragma unroll
        for (int c = 0; c < 4; c++) bad |= !nsa__finite(q[c]);
    }
    return __any_sync(0xffffffffu, bad);
}

/* Looks at a warp's queries: fills w.queries, w.visible and w.candidates, empties its lists. ROWS:
   looks at q too; callers that have it at hand call nsa__cuda_select_mark instead. */
template <bool ROWS>
NSA__DEVICE void nsa__cuda_select_begin(nsa__cuda_select_warp &w, const nsa_select &x,
                                        const nsa_desc &d, const nsa__sequence &s,
                                        const nsa__cuda_select_plan &p, int b, int kv_head) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    w.visible = w.candidates = 0;
    for (int q = 0; q < p.queries; q++) {
        const int row = w.first_query + q, query = s.first + row;
        nsa__cuda_select_query found = {0, 0, 0, 0, nullptr, 0};
        if (row < s.count) {
            const nsa__cuda_forced_blocks f = nsa__cuda_forced_of(d, s.tokens, query);
            const bool bad = nsa__cuda_select_is_bad<ROWS>(x, d, s, row, kv_head);
            w.visible = nsa__cmp_visible(d, s.tokens, query);
            w.candidates = f.candidates;
            const int visible = bad ? w.visible | NSA__SELECT_BAD : w.visible;
            found = {visible, f.init, f.local, f.room, nullptr, f.candidates};
            if (x.scores.data)
                found.scores = nsa__row_of<float>(x.scores, p.own ? b : s.batch,
                                                  p.own ? row : s.row + row, kv_head);
        }
        if (lane == 0) w.queries[q] = found;
    }
    for (int i = lane; i < p.queries * p.length; i += 32) w.lists[i] = 0;
    __syncwarp();
}

/* Query q of a warp is bad if one of bits width q .. width (q + 1) - 1 is set. */
NSA__DEVICE void nsa__cuda_select_mark(const nsa__cuda_select_warp &w, int queries, int width,
                                       uint32_t bad) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < queries && (bad >> lane * width & ~0u >> (32 - width)))
        w.queries[lane].visible |= NSA__SELECT_BAD;
    __syncwarp();
}

/* What the sum over one more key of a block's stencil makes of its score. */
NSA__DEVICE float nsa__cuda_select_more(float score, nsa_score_map map, float weight, float sum) {
    if (map == NSA_SCORE_OVERLAP_SUM) return fmaf(weight, sum, score);
    return sum > score ? sum : score;
}

/* The score of selection block j, from the sums in `ring`. */
NSA__DEVICE float nsa__cuda_select_score(const nsa__cuda_select_plan &p, nsa_score_map map,
                                         const float *ring, int visible, int j) {
    const int first = j * p.strides - (p.cmp_strides - 1), size = p.strides + p.cmp_strides - 1;
    float score = 0.0f;
    if (visible < 0) return score;
    if (p.strides == 4 &&
        p.cmp_strides == 2) { /* the paper's: four of five sums lie side by side */
        const int begin = 4 * j, mask = p.ring - 1;
        if (j > 0 && begin <= visible)
            score = nsa__cuda_select_more(score, map, 1.0f, ring[(begin - 1) & mask]);
        if (begin >= visible) return score;
        const float4 sums = nsa__cuda_float4_at(ring + (begin & mask));
        score = nsa__cuda_select_more(score, map, 2.0f, sums.x);
        if (begin + 1 < visible) score = nsa__cuda_select_more(score, map, 2.0f, sums.y);
        if (begin + 2 < visible) score = nsa__cuda_select_more(score, map, 2.0f, sums.z);
        if (begin + 3 < visible) score = nsa__cuda_select_more(score, map, 1.0f, sums.w);
        return score;
    }
    for (int u = max(0, -first); u < min(size, visible - first); u++)
        score = nsa__cuda_select_more(score, map,
                                      static_cast<float>(min(min(u + 1, size - u), p.cmp_strides)),
                                      ring[(first + u) & (p.ring - 1)]);
    return score;
}

/* The score of block j from its keys' scores in `ring`: a NaN among them makes it one. -inf without
   a key. */
NSA__DEVICE float nsa__cuda_select_pool(const nsa__cuda_select_plan &p, const float *ring,
                                        int visible, int j) {
    const bool mean = p.pool == NSA_POOL_MEAN;
    const int first = j * p.strides, size = min(p.strides, (visible & INT32_MAX) - first);
    if (visible < 0 && size > 0) return 0.0f;
    float score = mean && size > 0 ? 0.0f : __uint_as_float(0xff800000u);
    bool bad = false;
    for (int u = 0; u < size; u++) {
        const float of_key = ring[(first + u) & (p.ring - 1)];
        bad |= nsa__cuda_score_key(of_key) == 0;
        if (mean)
            score += of_key;
        else if (of_key > score)
            score = of_key;
    }
    if (bad) return __uint_as_float(0x7fc00000u);
    return mean && size > 0 ? score / static_cast<float>(size) : score;
}

/* The score of block j as a candidate for the list of `query`, whose sums are in `ring`; 0 if it is
   not ranked. Writes it if it is asked for. */
template <bool SCORER>
NSA__DEVICE uint64_t nsa__cuda_select_candidate(const nsa__cuda_select_plan &p, nsa_score_map map,
                                                const nsa__cuda_select_query &query,
                                                const float *ring, int j) {
    const bool ranked = !SCORER && j >= query.init && j < query.local;
    const bool written = query.scores && j < query.candidates;
    if (!ranked && !written) return 0;
    const float score = SCORER ? nsa__cuda_select_pool(p, ring, query.visible, j)
                               : nsa__cuda_select_score(p, map, ring, query.visible, j);
    if (written) query.scores[j] = score;
    return ranked ? nsa__cuda_candidate(score, j) : 0;
}

/* Scores blocks begin .. end - 1 of the warp's queries, writes the scores that are asked for and
   offers them. */
template <bool SCORER>
NSA__DEVICE void nsa__cuda_select_rank(const nsa__cuda_select_plan &p, nsa_score_map map,
                                       const nsa__cuda_select_warp &w, int begin, int end) {
    const int lane = static_cast<int>(threadIdx.x) % 32, blocks = end - begin;
    for (int base = 0; base < p.queries * blocks; base += 32) {
        const int item = min(base + lane, p.queries * blocks - 1), q = item / blocks;
        const nsa__cuda_select_query query = w.queries[q];
        uint64_t candidate = 0;
        if (base + lane == item)
            candidate = nsa__cuda_select_candidate<SCORER>(p, map, query, w.ring + q * p.ring,
                                                           begin + item % blocks);
        if (!SCORER) nsa__cuda_rank_offer(w.lists, p.length, q, query.room, candidate);
    }
}

/* The same for a warp of one query, whose list is in its lanes. */
NSA__DEVICE void nsa__cuda_select_rank_lanes(nsa__cuda_rank_slot &slot,
                                             const nsa__cuda_select_plan &p, nsa_score_map map,
                                             const nsa__cuda_select_warp &w, int begin, int end) {
    const nsa__cuda_select_query query = *w.queries;
    for (int base = begin; base < end; base += 32) {
        const int j = base + static_cast<int>(threadIdx.x) % 32;
        uint64_t candidate = 0;
        if (j < end) candidate = nsa__cuda_select_candidate<false>(p, map, query, w.ring, j);
        nsa__cuda_rank_offer_lanes(slot, query.room, static_cast<uint32_t>(candidate >> 32), base);
    }
}

/* Behind a query's candidates scores are -inf. */
NSA__DEVICE void nsa__cuda_select_fill(const nsa__cuda_select_plan &p,
                                       const nsa__cuda_select_warp &w, int blocks) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int q = 0; q < p.queries; q++) {
        float *scores = w.queries[q].scores;
        for (int j = w.queries[q].candidates + lane; scores && j < blocks; j += 32)
            scores[j] = __uint_as_float(0xff800000u);
    }
}

/* What a product of a key with a query head adds to the sum over the heads: p or, of a SCORER,
   the weighed product: NaN where it is not finite, for then the key is not, and 0 of a column
   without a head. */
template <bool SCORER>
NSA__DEVICE float nsa__cuda_select_term(const nsa__cuda_select_plan &p, float product, float scale,
                                        float lse) {
    if (!SCORER) return nsa__exp(__fmul_rn(product, scale) - lse);
    if (!nsa__finite(lse)) return 0.0f;
    if (!nsa__finite(product)) return __uint_as_float(0x7fc00000u);
    return lse * (p.act == NSA_SCORE_RELU ? fmaxf(product, 0.0f) : product);
}

/* Where a block's keys lie: key 0's row or, with pages, the head's of page 0 and the table. */
template <typename T> struct nsa__cuda_select_keys {
    const T *first;
    const int32_t *pages;
};

/* Where a block of threads is. In shared memory, because registers hold the queries. */
template <typename T> struct nsa__cuda_select_place {
    nsa__sequence s;
    nsa__cuda_select_keys<T> k;
    int b, kv_head;
    int first; /* of its queries */
    int keys;  /* that one of them sees */
};

template <typename T, bool SCORER>
NSA__DEVICE nsa__cuda_select_place<T>
nsa__cuda_select_place_of(const nsa_desc &d, const nsa_select &x, const nsa__cuda_select_plan &p) {
    nsa__cuda_select_place<T> at;
    const int tile_queries = p.warps * p.queries;
    /* late queries, which see most, go first */
    const int block = static_cast<int>(blockIdx.x);
    const nsa__cuda_item tile_at =
        nsa__cuda_item_at(d, p.tiles, p.tiles.total - 1 - block / d.kv_heads);
    at.kv_head = block % d.kv_heads;
    at.b = tile_at.b;
    at.s = nsa__sequence_of(d, at.b);
    at.first = static_cast<int>(min(tile_at.local * tile_queries, int64_t(at.s.count)));
    const int key_head = at.kv_head / p.lists_per_kv_head;
    if (d.pages)
        at.k = {nsa__row_of<const T>(x.k, 0, 0, key_head),
                d.pages + static_cast<int64_t>(at.b) * d.table_width};
    else
        at.k = {nsa__row_of<const T>(x.k, at.s.key_batch,
                                     SCORER && d.cmp_stride == 1
                                         ? at.s.key_row
                                         : nsa__cmp_row(d, p.cmp_begins, at.b),
                                     key_head),
                nullptr};
    at.keys =
        nsa__cmp_visible(d, at.s.tokens, at.s.first + min(at.first + tile_queries, at.s.count) - 1);
    return at;
}

/* Writes what a warp has found: the scores behind the candidates, its queries' lists. */
template <bool SCORER, typename T>
NSA__DEVICE void nsa__cuda_select_end(const nsa__cuda_select_warp &w, const nsa_select &x,
                                      const nsa_desc &d, const nsa__cuda_select_place<T> &at,
                                      const nsa__cuda_select_plan &p) {
    if (x.scores.data && !p.own) nsa__cuda_select_fill(p, w, nsa__slc_count(d, d.tokens));
    for (int q = 0; !SCORER && q < p.queries && w.first_query + q < at.s.count; q++)
        nsa__cuda_rank_write(
            nsa__cuda_forced_of(d, at.s.tokens, at.s.first + w.first_query + q),
            w.lists + q * p.length,
            nsa__row_of<int32_t>(x.blocks, at.s.batch, at.s.row + w.first_query + q, at.kv_head),
            p.width);
}

#endif

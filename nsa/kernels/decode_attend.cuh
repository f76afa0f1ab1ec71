/* decode_attend.cuh: one new token's attention, its keys shared out among blocks, and the sum of
   what they find.
   Twin: nsa.h, "Decoding", nsa_decode: its three branches. Tiles, scores and softmax are forward's
   (attend_keys.cuh, attend_softmax.cuh).
   Not here: which blocks are selected (decode_select.cuh).

   A block has the heads of one query and kv head and a run of its key tiles. It leaves the
   product with V, the sums of p and the largest score; at the end the runs of a row are added in
   their order. Of slc and win a run starts from nothing. Of cmp the logarithm is what selection
   ranks by, and has to have the very bits of attend_forward.cuh's walk from the first tile to the
   last. So a block first goes through its run's keys and leaves every score and the largest of each
   tile. When the runs before it have published the largest of theirs, it goes through the values,
   from the scores that it has just left, and leaves its sums of p tile by tile, which are added
   just as that walk adds them. Selection reads the same scores.

   | kernel     | block                                | reads          | leaves                  |
   |---|---|---|---|
   | cmp        | a query's heads, a run of keys       | q, k, v of cmp | scores, tile_most,      |
   |            |                                      |                | sums a tile, most, out  |
   | sums, rank | decode_select.cuh                    | scores, sums   | totals, block lists     |
   | keys       | a query's heads, a run of slc or win | q, k, v, lists | sums, most, out         |
   | finish     | a team of threads a row              | what runs left | out, lse, the gated sum |
   */
#ifndef NSA_DECODE_ATTEND_CUH
#define NSA_DECODE_ATTEND_CUH

#include "decode_cache.cuh"

/* Keys of a run, here and in selection; tests define it small. A run has whole tiles, at least
   one. */
#ifndef NSA__DECODE_RUN_KEYS
#define NSA__DECODE_RUN_KEYS 256
#endif

/* All ones: no run has published its largest score, and no block has started. */
enum : uint32_t { NSA__DECODE_UNPUBLISHED = 0xffffffffu };

/* The base's desc has first and count: a slice of the step's tokens. */
struct nsa__cuda_decode_params : nsa__cuda_branch {
    nsa__cuda_positions positions;
    int words; /* of `bad`, of each sequence and kv head */
    int ring;
    int keys;            /* of a tile */
    int key_tiles;       /* of a query, at most */
    int run_tiles;       /* tiles of a run */
    int runs;            /* runs of a query, at most */
    int parts;           /* blocks for the heads of a group */
    int64_t score_row;   /* cmp: from the scores of a row to the next one's */
    float *scores;       /* cmp: (rows, keys), unscaled; a row is (b, query, head) */
    float *tile_most;    /* cmp: (rows, key_tiles); inf: a value was not finite */
    float *sums;         /* cmp: (rows, key_tiles, 4), a quad's four shares; else (rows, runs) */
    float *most;         /* (rows, runs): -inf: no key; inf: a value was not finite */
    void *out;           /* (rows, runs, Dv), by nsa__cuda_part_store, in `units` */
    float *units;        /* (rows, runs) */
    uint32_t *started;   /* cmp: blocks that have started, from NSA__DECODE_UNPUBLISHED on */
    uint32_t *published; /* cmp: behind it, (rows, runs): nsa__cuda_decode_publish */
    float2 *totals;      /* cmp: (rows): the largest score, inf as above, and the sum of p */
    int64_t *reads;      /* of the branch, of sequence 0; NULL: not counted */
};

/* Key tiles of KEYS, at most, and how they are shared out. */
static void nsa__cuda_decode_share(nsa__cuda_decode_params *params, int keys) {
    const nsa_desc *d = &params->d;
    const int window = d->window < d->tokens ? d->window : d->tokens;
    int64_t tiles = nsa__cuda_ceil_div(nsa_cmp_count(d, d->tokens), keys);
    if (params->branch == NSA__KEYS_SLC)
        tiles = static_cast<int64_t>(params->list_width) * nsa__cuda_ceil_div(d->slc_block, keys);
    if (params->branch == NSA__KEYS_WIN) tiles = window / keys + 2;
    params->keys = keys;
    params->key_tiles = static_cast<int>(tiles > 1 ? tiles : 1);
    params->run_tiles = NSA__DECODE_RUN_KEYS > keys ? NSA__DECODE_RUN_KEYS / keys : 1;
    params->runs = static_cast<int>(nsa__cuda_ceil_div(params->key_tiles, params->run_tiles));
}

/* Scores of a row: whole tiles of 64. */
static int64_t nsa__cuda_decode_scores(const nsa_desc *d) {
    return nsa__cuda_ceil_div(nsa_cmp_count(d, d->tokens), 64) * 64;
}

/* The rows' memory, for any KEYS. */
static void nsa__cuda_decode_take(nsa__cuda_decode_params *params, nsa_dtype dtype, nsa__arena *a) {
    const nsa_desc *d = &params->d;
    const int64_t rows = static_cast<int64_t>(d->batch) * d->count * d->heads;
    int64_t tiles = 0, runs = 0;
    for (int keys = 8; keys <= 64; keys *= 2) {
        nsa__cuda_decode_share(params, keys);
        tiles = params->key_tiles > tiles ? params->key_tiles : tiles;
        runs = params->runs > runs ? params->runs : runs;
    }
    const bool cmp = params->branch == NSA__KEYS_CMP;
    params->score_row = cmp ? nsa__cuda_decode_scores(d) : 0;
    params->scores = nsa__cuda_take<float>(a, rows * params->score_row);
    params->tile_most = nsa__cuda_take<float>(a, cmp ? rows * tiles : 0);
    params->totals = cmp ? nsa__cuda_take<float2>(a, rows) : NULL;
    params->sums = nsa__cuda_take<float>(a, rows * (cmp ? 4 * tiles : runs));
    params->most = nsa__cuda_take<float>(a, rows * runs);
    params->units = nsa__cuda_take<float>(a, rows * runs);
    params->out = nsa__cuda_take<char>(
        a, rows * runs * d->dim_v *
               static_cast<int64_t>(nsa__dtype_bytes(nsa__cuda_part_dtype(dtype))));
    params->started = cmp ? nsa__cuda_take<uint32_t>(a, 1 + rows * runs) : NULL;
    params->published = params->started ? params->started + 1 : NULL;
}

/* What a block works on. */
struct nsa__cuda_decode_block {
    nsa__cuda_attend_head at;
    nsa__cuda_query_tile rows;
    nsa__cuda_key_span keys;
    int run, part;
};

/* Run `run_index` of the index-th query's or, of many heads, of a part of them. */
NSA__DEVICE nsa__cuda_decode_block nsa__cuda_decode_block_of(const nsa__cuda_decode_params &params,
                                                             unsigned index, int run_index,
                                                             int row_count) {
    nsa__cuda_decode_block block;
    const nsa_desc &d = params.d;
    block.run = run_index;
    block.part = static_cast<int>(index % static_cast<unsigned>(params.parts));
    index /= static_cast<unsigned>(params.parts);
    const int row = static_cast<int>(index % static_cast<unsigned>(d.count));
    const int pair = static_cast<int>(index / static_cast<unsigned>(d.count));
    nsa__cuda_attend_head &at = block.at;
    at.b = pair / d.kv_heads;
    at.kv_head = at.list = pair % d.kv_heads;
    at.seq = nsa__sequence_at(d, at.b, params.positions);
    at.tile = 0;
    at.key_row = 0;
    at.keys = at.seq.tokens;
    at.words = static_cast<int64_t>(pair) * params.words;
    at.row = 0;
    const int query = at.seq.first + row;
    block.rows = {query, block.part * row_count, row < at.seq.count ? query + 1 : query, -1,
                  nullptr};
    block.keys = nsa__cuda_keys_of(params, at.seq.tokens, block.rows.first);
    return block;
}

/* Key tiles that a query has, empty ones of a list's free slots included. */
NSA__DEVICE int nsa__cuda_decode_tiles(const nsa__cuda_decode_params &params,
                                       nsa__cuda_key_span keys) {
    if (params.branch == NSA__KEYS_SLC) return params.key_tiles;
    return keys.end <= keys.begin ? 0 : (keys.end - 1) / params.keys - keys.begin / params.keys + 1;
}

/* The tiles of a block's run; none if there is no such query. */
NSA__DEVICE nsa__cuda_key_span nsa__cuda_decode_run_of(const nsa__cuda_decode_params &params,
                                                       const nsa__cuda_decode_block &block) {
    const int first = block.run * params.run_tiles;
    if (block.rows.first >= block.rows.end) return {first, first};
    return {first, min(first + params.run_tiles, nsa__cuda_decode_tiles(params, block.keys))};
}

template <int KEYS>
NSA__DEVICE nsa__cuda_key_tile nsa__cuda_decode_tile(const nsa__cuda_decode_params &params,
                                                     const nsa__cuda_decode_block &block,
                                                     const int32_t *list, int n) {
    nsa__cuda_key_tile tile = {0, 0, 1, 0};
    int stop = block.keys.end;
    if (params.branch == NSA__KEYS_SLC) {
        const int of_block = (params.d.slc_block - 1) / KEYS + 1, j = list[n / of_block];
        if (j < 0) return tile;
        tile.begin = j * params.d.slc_block + n % of_block * KEYS;
        stop = min(stop, (j + 1) * params.d.slc_block);
    } else {
        tile.begin = (block.keys.begin / KEYS + n) * KEYS;
    }
    tile.end = max(min(tile.begin + KEYS, stop), tile.begin);
    if (tile.begin < tile.end) tile.bad = nsa__cuda_bad_keys<KEYS>(params, block.at, tile.begin);
    return tile;
}

/* Starts copying a tile's rows of k or v. Rows before the span are left out: a ring may hold a
   later token there, whose NaN would not be masked by p = 0. */
template <typename T, int D, int KEYS, int THREADS>
NSA__DEVICE void nsa__cuda_decode_copy(T *to, const nsa__cuda_decode_params &params,
                                       const nsa__cuda_decode_block &block,
                                       const nsa__cuda_key_tile &tile, const nsa_tensor &x,
                                       int width) {
    const T *const rows = nsa__row_of<const T>(x, block.at.seq.batch, 0, block.at.kv_head);
    const int first = block.keys.begin - tile.begin, count = tile.end - tile.begin;
    nsa__cuda_tile_copy<T, D, KEYS, THREADS>(to, width, rows, [&](int r) {
        return r >= first && r < count
                   ? rows + x.token * nsa__cuda_ring_row(tile.begin + r, params.ring)
                   : nullptr;
    });
}

/* The number of a row in what the runs leave; -1: no row. */
NSA__DEVICE int64_t nsa__cuda_decode_row(const nsa__cuda_decode_params &params,
                                         const nsa__cuda_decode_block &block, int r) {
    const nsa_desc &d = params.d;
    const nsa__cuda_query_row row = nsa__cuda_query_row_of(params, block.at, block.rows, r);
    if (!row.there) return -1;
    return (static_cast<int64_t>(block.at.b) * d.count + row.query - block.at.seq.first) * d.heads +
           row.head;
}

/* A run without keys leaves that there were none. */
template <int ROWS>
NSA__DEVICE void nsa__cuda_decode_leave_none(const nsa__cuda_decode_params &params,
                                             const nsa__cuda_decode_block &block) {
    const int r = static_cast<int>(threadIdx.x);
    const int64_t row = r < ROWS ? nsa__cuda_decode_row(params, block, r) : -1;
    if (row >= 0) params.most[row * params.runs + block.run] = -INFINITY;
}

/* Starts copying the query's rows of q. */
template <typename T, int D, int ROWS, int THREADS>
NSA__DEVICE void nsa__cuda_decode_copy_q(T *q, const nsa__cuda_decode_params &params,
                                         const nsa__cuda_decode_block &block) {
    nsa__cuda_tile_copy<T, D, ROWS, THREADS>(
        q, params.d.dim, static_cast<const T *>(params.x.q.data), [&](int r) {
            const nsa__cuda_query_row row = nsa__cuda_query_row_of(params, block.at, block.rows, r);
            return row.there
                       ? nsa__cuda_query_at<const T>(params.x.q, block.at, row.query, row.head)
                       : nullptr;
        });
}

/* A run's keys, counted by the block of the first heads. */
NSA__DEVICE void nsa__cuda_decode_count(const nsa__cuda_decode_params &params,
                                        const nsa__cuda_decode_block &block, int64_t keys) {
    if (threadIdx.x == 0 && block.part == 0 && params.reads)
        atomicAdd(reinterpret_cast<unsigned long long *>(
                      params.reads + block.at.b * (sizeof(nsa_reads) / sizeof(int64_t))),
                  static_cast<unsigned long long>(keys));
}

/* Forward's tiles of keys, fewer rows: those of one query. */
template <typename T, int DK, int DV, int HOPPER>
struct nsa__cuda_decode_shape : nsa__cuda_forward_shape<T, DK, DV, HOPPER, 64> {
    using shape = nsa__cuda_forward_shape<T, DK, DV, HOPPER, 64>;
    static constexpr int THREADS = 32 * shape::WARPS;
};

/* The shared memory of cmp, where a stage has keys or values. */
template <typename T, int DK, int DV, int HOPPER = NSA__HOPPER> struct nsa__cuda_decode_memory {
    using shape = nsa__cuda_decode_shape<T, DK, DV, HOPPER>;
    T q[shape::TILE * DK];
    T stage[2][shape::STAGE * (DK > DV ? DK : DV)];
};

/* ---- cmp: scores, then values ---------------------------------------------------------------- */

/* The largest score of a tile, inf where a value is not finite; `most` is that of the run. */
template <int N>
NSA__DEVICE void nsa__cuda_decode_leave_most(float (&most)[2], const float (&s)[N][4],
                                             const nsa__cuda_decode_params &params,
                                             const int64_t (&row)[2], const bool (&bad)[2],
                                             int tile) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float here = -INFINITY;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) here = fmaxf(here, s[n][2 * h + e]);
        here = nsa__cuda_quad_max(here);
        if (bad[h]) here = INFINITY;
        most[h] = fmaxf(most[h], here);
        if (row[h] >= 0 && threadIdx.x % 4 == 0)
            params.tile_most[row[h] * params.key_tiles + tile] = here;
    }
}

/* Where the thread's scores of a tile lie, of its upper or its lower row. */
template <int KEYS>
NSA__DEVICE float *nsa__cuda_decode_scores_at(const nsa__cuda_decode_params &params, int64_t row,
                                              int tile) {
    return params.scores + row * params.score_row + tile * KEYS +
           static_cast<int>(threadIdx.x) % 4 * 2;
}

/* A run's walk over rows of k or v: what it turns to next. */
struct nsa__cuda_decode_walk {
    nsa__cuda_key_tile next;
    int stage; /* that `next` is copied to */
};

/* Starts copying tile n. */
template <typename T, int DK, int DV, bool OF_V>
NSA__DEVICE void nsa__cuda_decode_walk_to(nsa__cuda_decode_walk &walk,
                                          nsa__cuda_decode_memory<T, DK, DV> &memory,
                                          const nsa__cuda_decode_params &params,
                                          const nsa__cuda_decode_block &block, int n) {
    using shape = nsa__cuda_decode_shape<T, DK, DV, NSA__HOPPER>;
    walk.next = nsa__cuda_decode_tile<shape::STAGE>(params, block, nullptr, n);
    nsa__cuda_decode_copy<T, (OF_V ? DV : DK), shape::STAGE, shape::THREADS>(
        memory.stage[walk.stage], params, block, walk.next, OF_V ? params.x.v : params.x.k,
        OF_V ? params.d.dim_v : params.d.dim);
}

/* Waits for tile n of a run that ends with tile end - 1, and starts copying the one behind it. Keys
   that are not finite stay as they are, because all rows of the block see them and end as NaN. */
template <typename T, int DK, int DV, bool OF_V>
NSA__DEVICE T *nsa__cuda_decode_advance(nsa__cuda_decode_walk &walk,
                                        nsa__cuda_decode_memory<T, DK, DV> &memory,
                                        const nsa__cuda_decode_params &params,
                                        const nsa__cuda_decode_block &block, int n, int end) {
    using shape = nsa__cuda_decode_shape<T, DK, DV, NSA__HOPPER>;
    T *const rows = memory.stage[walk.stage];
    /* this stage is there, and nobody reads the other one any more */
    nsa__cuda_tiles_wait<T, shape::STAGE>();
    walk.stage ^= 1;
    if (n + 1 < end) nsa__cuda_decode_walk_to<T, DK, DV, OF_V>(walk, memory, params, block, n + 1);
    nsa__cp_async_commit();
    return rows;
}

/* The scores of a run, and in `most` the largest of each of the thread's rows. */
template <typename T, int DK, int DV>
NSA__DEVICE void nsa__cuda_decode_scan(float (&most)[2], nsa__cuda_decode_walk &walk,
                                       nsa__cuda_decode_memory<T, DK, DV> &memory,
                                       const nsa__cuda_decode_params &params,
                                       const nsa__cuda_decode_block &block,
                                       const nsa__cuda_key_span &run, const int64_t (&row)[2]) {
    using shape = nsa__cuda_decode_shape<T, DK, DV, NSA__HOPPER>;
    constexpr int ROWS = shape::TILE, KEYS = shape::STAGE;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16, lane = threadIdx.x % 32;
    const uint32_t bad_rows = nsa__cuda_tile_clean<T, DK, ROWS>(memory.q, warp_row);
    for (int n = run.begin; n < run.end; n++) {
        const nsa__cuda_key_tile tile = walk.next;
        T *const k =
            nsa__cuda_decode_advance<T, DK, DV, false>(walk, memory, params, block, n, run.end);
        if (!nsa__cuda_takes_part<T, KEYS>(row[0] >= 0 || row[1] >= 0, true)) continue;
        const nsa__cuda_key_span span = nsa__cuda_key_span_in(block.keys, tile.begin, tile.end);
        const nsa__cuda_key_span seen[2] = {span, span};
        const bool bad_key = (nsa__cuda_key_span_bits(span) & tile.bad) != 0;
        float s[KEYS / 8][4];
        nsa__cuda_product_nt<T, DK, KEYS, ROWS>(s, memory.q, warp_row, k);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int c = 0; c < KEYS / 8; c++)
                if (row[h] >= 0)
                    nsa__store_pair(nsa__cuda_decode_scores_at<KEYS>(params, row[h], n) + 8 * c,
                                    s[c][2 * h], s[c][2 * h + 1]);
        nsa__cuda_mask_tile(s, seen, params.scale);
        const bool bad[2] = {bad_key || (bad_rows >> lane / 4 & 1),
                             bad_key || (bad_rows >> (lane / 4 + 8) & 1)};
        nsa__cuda_decode_leave_most(most, s, params, row, bad, n);
    }
}

/* What a run tells those behind it, and hears from those before it, in one word: its largest score.
   The word is the message, so no other memory has to be ordered with it. A run waits for none
   that begins later, because blocks take their runs in the order in which they begin. */
NSA__DEVICE void nsa__cuda_decode_publish(const nsa__cuda_decode_params &params, int64_t row,
                                          int run_index, float most) {
    if (row >= 0 && threadIdx.x % 4 == 0)
        atomicExch(params.published + row * params.runs + run_index, __float_as_uint(most));
}
NSA__DEVICE float nsa__cuda_decode_most_before(const nsa__cuda_decode_params &params, int64_t row,
                                               int run_index) {
    float most = -INFINITY;
    for (int r = static_cast<int>(threadIdx.x) % 4; r < run_index && row >= 0; r += 4) {
        uint32_t word;
        do word = atomicOr(params.published + row * params.runs + r, 0u);
        while (word == NSA__DECODE_UNPUBLISHED);
        most = fmaxf(most, __uint_as_float(word));
    }
    return nsa__cuda_quad_max(most);
}

/* What a run leaves of its rows. */
template <typename T, int N>
NSA__DEVICE void nsa__cuda_decode_leave(const nsa__cuda_decode_params &params, int run_index,
                                        const nsa__cuda_forward_rows &rows,
                                        const float (&out)[N][4], const int64_t (&row)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float unit = nsa__cuda_part_unit<T>(out, h);
        if (row[h] < 0) continue;
        const int64_t run = row[h] * params.runs + run_index;
        nsa__cuda_part_store<T>(params.out, run, params.d.dim_v, unit, out, h);
        if (threadIdx.x % 4 == 0) {
            params.most[run] = rows.bad[h] && rows.most[h] != -INFINITY ? INFINITY : rows.most[h];
            params.units[run] = unit;
        }
    }
}

/* p v of a tile, to the sums of those before it. */
template <typename T, int KEYS, int DV>
NSA__DEVICE void nsa__cuda_decode_add(float (&out)[DV / 8][4], const float (&p)[KEYS / 8][4],
                                      const float (&shrink)[2], T *v) {
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
        for (int c = 0; c < DV / 8; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) out[c][e] *= shrink[e / 2];
    nsa__cuda_product_nn<T, KEYS, DV>(out, p, v, 0);
}

/* p v of a run, from the scores that the same threads left; rows.most is the largest before it. */
template <typename T, int DK, int DV>
NSA__DEVICE void
nsa__cuda_decode_values(nsa__cuda_forward_rows &rows, float (&out)[DV / 8][4],
                        nsa__cuda_decode_walk &walk, nsa__cuda_decode_memory<T, DK, DV> &memory,
                        const nsa__cuda_decode_params &params, const nsa__cuda_decode_block &block,
                        const nsa__cuda_key_span &run, const int64_t (&row)[2]) {
    constexpr int KEYS = nsa__cuda_decode_shape<T, DK, DV, NSA__HOPPER>::STAGE;
    for (int n = run.begin; n < run.end; n++) {
        const nsa__cuda_key_tile tile = walk.next;
        float s[KEYS / 8][4] = {}, shrink[2];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int c = 0; c < KEYS / 8; c++)
                if (row[h] >= 0) {
                    const float2 pair = *reinterpret_cast<const float2 *>(
                        nsa__cuda_decode_scores_at<KEYS>(params, row[h], n) + 8 * c);
                    s[c][2 * h] = pair.x;
                    s[c][2 * h + 1] = pair.y;
                }
        T *const v =
            nsa__cuda_decode_advance<T, DK, DV, true>(walk, memory, params, block, n, run.end);
        if (!nsa__cuda_takes_part<T, KEYS>(row[0] >= 0 || row[1] >= 0, true)) continue;
        const nsa__cuda_key_span span = nsa__cuda_key_span_in(block.keys, tile.begin, tile.end);
        const nsa__cuda_key_span none = {0, 0};
        const nsa__cuda_key_span seen[2] = {row[0] >= 0 ? span : none, row[1] >= 0 ? span : none};
        nsa__cuda_mask_tile(s, seen, params.scale);
        rows.sum[0] = rows.sum[1] = 0;
        nsa__cuda_softmax_tile(s, rows, shrink);
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (row[h] >= 0)
                params.sums[4 * (row[h] * params.key_tiles + n) + threadIdx.x % 4] = rows.sum[h];
        nsa__cuda_decode_add<T, KEYS, DV>(out, s, shrink, v);
    }
}

template <typename T, int DK, int DV>
static __global__ void __launch_bounds__(nsa__cuda_decode_shape<T, DK, DV, NSA__HOPPER>::THREADS, 2)
    nsa__cuda_decode_cmp_kernel(const NSA_GRID_CONSTANT nsa__cuda_decode_params params) {
    using shape = nsa__cuda_decode_shape<T, DK, DV, NSA__HOPPER>;
    constexpr int ROWS = shape::TILE;
    NSA_SHARED_ALL(shared);
    auto &memory = *reinterpret_cast<nsa__cuda_decode_memory<T, DK, DV> *>(shared);
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16, lane = threadIdx.x % 32;

    NSA_SHARED(nsa__cuda_decode_block, block, );
    static_assert(
        nsa__cuda_shared_fits<sizeof(nsa__cuda_decode_memory<T, DK, DV>), sizeof block>::value);
    if (threadIdx.x == 0) {
        const unsigned runs = static_cast<unsigned>(params.runs);
        const unsigned number = atomicAdd(params.started, 1u) - NSA__DECODE_UNPUBLISHED;
        block =
            nsa__cuda_decode_block_of(params, number / runs, static_cast<int>(number % runs), ROWS);
    }
    __syncthreads();
    const nsa__cuda_key_span run = nsa__cuda_decode_run_of(params, block);
    if (run.begin >= run.end) {
        nsa__cuda_decode_leave_none<ROWS>(params, block);
        return;
    }
    nsa__cuda_decode_walk walk = {};
    nsa__cuda_decode_copy_q<T, DK, ROWS, shape::THREADS>(memory.q, params, block);
    nsa__cuda_decode_walk_to<T, DK, DV, false>(walk, memory, params, block, run.begin);
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
    __syncthreads();
    const int64_t row[2] = {nsa__cuda_decode_row(params, block, warp_row + lane / 4),
                            nsa__cuda_decode_row(params, block, warp_row + lane / 4 + 8)};
    nsa__cuda_forward_rows rows = {};
    float most[2] = {-INFINITY, -INFINITY}, out[DV / 8][4] = {};
    nsa__cuda_decode_scan<T, DK, DV>(most, walk, memory, params, block, run, row);
    nsa__cuda_decode_walk_to<T, DK, DV, true>(walk, memory, params, block, run.begin);
    nsa__cp_async_commit();
#pragma unroll
    for (int h = 0; h < 2; h++) nsa__cuda_decode_publish(params, row[h], block.run, most[h]);
#pragma unroll
    for (int h = 0; h < 2; h++)
        rows.most[h] = nsa__cuda_decode_most_before(params, row[h], block.run);
    nsa__cuda_decode_values<T, DK, DV>(rows, out, walk, memory, params, block, run, row);
    nsa__cuda_decode_leave<T>(params, block.run, rows, out, row);
    nsa__cuda_decode_count(params, block,
                           min(run.end * shape::STAGE, block.keys.end) - run.begin * shape::STAGE);
}

/* The largest score of a row and its sum of p, by a quad: each lane adds the shares of one lane of
   the quads that left them, tile by tile, as attend_forward.cuh adds them. */
NSA__DEVICE float2 nsa__cuda_decode_total(const nsa__cuda_decode_params &params, int64_t row,
                                          int tiles) {
    const float *each = params.tile_most + row * params.key_tiles;
    const float *sums =
        params.sums + 4 * row * params.key_tiles + static_cast<int>(threadIdx.x) % 4;
    float sum = 0, reached = -INFINITY;
    for (int n = 0; n < tiles; n++) {
        const float now = fmaxf(reached, each[n]);
        /* the tile's sum is relative to the largest score so far */
        sum = fmaf(sum, nsa__cuda_shrink(reached, now), sums[4 * n]);
        reached = now;
    }
    return make_float2(reached, nsa__cuda_quad_sum(sum));
}

/* lse of what a row amounts to: NaN where a value was not finite. */
NSA__DEVICE float nsa__cuda_decode_lse(float2 total) {
    const float ln2 = 0.693147180559945f;
    if (total.x == INFINITY) return __uint_as_float(0x7fc00000u);
    return total.y == 0 ? -INFINITY : total.x + nsa__log2(total.y) * ln2;
}

/* ---- slc and win ----------------------------------------------------------------------------- */

/* Both in one launch, because neither waits for the other and each is short. */
struct nsa__cuda_decode_pair {
    nsa__cuda_decode_params of[2];
};

template <typename T, int DK, int DV>
static __global__ void __launch_bounds__(nsa__cuda_decode_shape<T, DK, DV, NSA__HOPPER>::THREADS, 2)
    nsa__cuda_decode_keys_kernel(const NSA_GRID_CONSTANT nsa__cuda_decode_pair both) {
    using shape = nsa__cuda_decode_shape<T, DK, DV, NSA__HOPPER>;
    constexpr int ROWS = shape::TILE, KEYS = shape::STAGE, THREADS = shape::THREADS;
    NSA_SHARED_ALL(shared);
    T *const q = reinterpret_cast<T *>(shared), *const stages = q + ROWS * DK;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16, lane = threadIdx.x % 32;
    const int runs = both.of[0].runs + both.of[1].runs;
    const int run_index = static_cast<int>(blockIdx.x) % runs,
              second = run_index >= both.of[0].runs;
    const nsa__cuda_decode_params &params = both.of[second];

    NSA_SHARED(nsa__cuda_decode_block, block, );
    static_assert(nsa__cuda_shared_fits<shape::BYTES, sizeof block>::value);
    if (threadIdx.x == 0)
        block = nsa__cuda_decode_block_of(params, blockIdx.x / static_cast<unsigned>(runs),
                                          run_index - second * both.of[0].runs, ROWS);
    __syncthreads();
    const nsa__cuda_key_span run = nsa__cuda_decode_run_of(params, block);
    if (run.begin >= run.end) {
        nsa__cuda_decode_leave_none<ROWS>(params, block);
        return;
    }
    const int32_t *list = nullptr;
    if (params.branch == NSA__KEYS_SLC)
        list = nsa__cuda_query_at<const int32_t>(params.x.blocks, block.at, block.rows.first,
                                                 block.at.kv_head);
    const auto stage_tile = [&](T *k, const nsa__cuda_key_tile &tile) {
        nsa__cuda_decode_copy<T, DK, KEYS, THREADS>(k, params, block, tile, params.x.k,
                                                    params.d.dim);
        nsa__cuda_decode_copy<T, DV, KEYS, THREADS>(k + KEYS * DK, params, block, tile, params.x.v,
                                                    params.d.dim_v);
    };
    nsa__cuda_decode_copy_q<T, DK, ROWS, THREADS>(q, params, block);
    nsa__cuda_key_tile next = nsa__cuda_decode_tile<KEYS>(params, block, list, run.begin);
    stage_tile(stages, next);
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
    __syncthreads();

    nsa__cuda_forward_rows rows;
    nsa__cuda_forward_begin(rows, params, block.at, block.rows,
                            nsa__cuda_tile_clean<T, DK, ROWS>(q, warp_row));
    const int64_t row[2] = {nsa__cuda_decode_row(params, block, warp_row + lane / 4),
                            nsa__cuda_decode_row(params, block, warp_row + lane / 4 + 8)};
    float out[DV / 8][4] = {};
    int64_t read = 0;
    for (int n = run.begin, stage = 0; n < run.end; n++, stage ^= 1) {
        const nsa__cuda_key_tile tile = next;
        T *const k = stages + stage * KEYS * (DK + DV), *const v = k + KEYS * DK;
        /* this stage is there, and nobody reads the other one any more */
        nsa__cuda_tiles_wait<T, KEYS>();
        if (n + 1 < run.end) {
            next = nsa__cuda_decode_tile<KEYS>(params, block, list, n + 1);
            stage_tile(stages + (stage ^ 1) * KEYS * (DK + DV), next);
        }
        nsa__cp_async_commit();
        if (tile.bad) nsa__cuda_clean_stage<T, DK, DV, KEYS, THREADS>(k, tile.bad);
        const nsa__cuda_key_span span = nsa__cuda_key_span_in(block.keys, tile.begin, tile.end);
        read += max(span.end - span.begin, 0);
        if (span.begin >= span.end ||
            !nsa__cuda_takes_part<T, KEYS>(row[0] >= 0 || row[1] >= 0, true))
            continue;
        const nsa__cuda_key_span none = {0, 0};
        const nsa__cuda_key_span seen[2] = {row[0] >= 0 ? span : none, row[1] >= 0 ? span : none};
        float s[KEYS / 8][4], shrink[2];
        nsa__cuda_product_nt<T, DK, KEYS, ROWS>(s, q, warp_row, k);
        nsa__cuda_mask_tile(s, seen, params.scale);
        nsa__cuda_softmax_tile(s, rows, shrink);
        nsa__cuda_decode_add<T, KEYS, DV>(out, s, shrink, v);
#pragma unroll
        for (int h = 0; h < 2; h++)
            rows.bad[h] |= (nsa__cuda_key_span_bits(seen[h]) & tile.bad) != 0;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float sum = nsa__cuda_quad_sum(rows.sum[h]);
        if (row[h] >= 0 && lane % 4 == 0) params.sums[row[h] * params.runs + block.run] = sum;
    }
    nsa__cuda_decode_leave<T>(params, block.run, rows, out, row);
    nsa__cuda_decode_count(params, block, read);
}

#endif

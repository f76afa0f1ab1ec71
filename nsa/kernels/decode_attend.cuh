/* decode_attend.cuh: one new token's attention, its keys shared out among blocks, and the sum of
   what they find.
   Twin: nsa.h, "Decoding", nsa_decode: its three branches. Tiles, scores and softmax are forward's
   (attend_keys.cuh, attend_forward.cuh).
   Not here: which blocks are selected (decode_select.cuh).

   A block has the heads of one query and kv head and a run of its key tiles. It leaves the
   product with V, the sums of p and the largest score; a warp to a row adds the runs in their
   order. Of slc and win a run starts from nothing. Of cmp the logarithm is what selection ranks
   by, and has to have the very bits of attend_forward.cuh's walk from the first tile to the
   last: so a first pass leaves the largest score of each tile, a run starts from the largest
   before it, and leaves its sums tile by tile, which are added just as that walk adds them. */
#ifndef NSA_DECODE_ATTEND_CUH
#define NSA_DECODE_ATTEND_CUH

#include "decode_cache.cuh"

/* Keys of a run, here and in selection; tests define it small. A run has whole tiles, at least
   one. */
#ifndef NSA__DECODE_RUN_KEYS
#define NSA__DECODE_RUN_KEYS 256
#endif
enum { NSA__DECODE_COMBINE_WARPS = 4 };

/* Views, desc (first, count: a slice of the step's tokens), branch and bits are the base's. */
struct nsa__cuda_decode_params : nsa__cuda_attend_params {
    nsa__cuda_places places;
    int ring;
    int keys;         /* of a tile */
    int key_tiles;    /* of a query, at most */
    int per_split;    /* tiles of a run */
    int splits;       /* runs of a query, at most */
    int parts;        /* blocks for the heads of a group */
    bool scan;        /* cmp: the pass that leaves tile_most */
    float *tile_most; /* cmp: (rows, key_tiles); a row is (b, query, head) */
    float *sums;      /* (rows, key_tiles of cmp or runs, 4): a quad's four shares */
    float *most;      /* (rows, runs): -inf: no key; inf: a value was not finite */
    float *out;       /* (rows, runs, Dv) */
    int64_t *reads;   /* of the branch, of sequence 0; NULL: not counted */
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
    params->per_split = NSA__DECODE_RUN_KEYS > keys ? NSA__DECODE_RUN_KEYS / keys : 1;
    params->splits = static_cast<int>(nsa__cuda_ceil_div(params->key_tiles, params->per_split));
}

/* The rows' memory, for any KEYS. */
static void nsa__cuda_decode_take(nsa__cuda_decode_params *params, nsa__cuda_arena *a) {
    const nsa_desc *d = &params->d;
    const int64_t rows = static_cast<int64_t>(d->batch) * d->count * d->heads;
    int64_t tiles = 0, splits = 0;
    for (int keys = 8; keys <= 64; keys *= 2) {
        nsa__cuda_decode_share(params, keys);
        tiles = params->key_tiles > tiles ? params->key_tiles : tiles;
        splits = params->splits > splits ? params->splits : splits;
    }
    const bool cmp = params->branch == NSA__KEYS_CMP;
    params->tile_most = nsa__cuda_take<float>(a, cmp ? rows * tiles : 0);
    params->sums = nsa__cuda_take<float>(a, 4 * rows * (cmp ? tiles : splits));
    params->most = nsa__cuda_take<float>(a, rows * splits);
    params->out = nsa__cuda_take<float>(a, rows * splits * d->dim_v);
}

/* What a block works on. */
struct nsa__cuda_decode_block {
    nsa__cuda_attend_head at;
    nsa__cuda_query_tile rows;
    nsa__cuda_key_span keys;
    int split, part;
};

NSA__DEVICE nsa__cuda_decode_block nsa__cuda_decode_block_of(const nsa__cuda_decode_params &params,
                                                             unsigned index, int held) {
    nsa__cuda_decode_block block;
    const nsa_desc &d = params.d;
    block.split = static_cast<int>(index % static_cast<unsigned>(params.splits));
    index /= static_cast<unsigned>(params.splits);
    block.part = static_cast<int>(index % static_cast<unsigned>(params.parts));
    index /= static_cast<unsigned>(params.parts);
    const int row = static_cast<int>(index % static_cast<unsigned>(d.count));
    const int pair = static_cast<int>(index / static_cast<unsigned>(d.count));
    nsa__cuda_attend_head &at = block.at;
    at.b = pair / d.kv_heads;
    at.kv_head = at.list = pair % d.kv_heads;
    at.seq = nsa__sequence_at(d, at.b, params.places);
    at.tile = 0;
    at.key_row = 0;
    at.keys = at.seq.tokens;
    at.words = pair * params.words.each;
    at.row = 0;
    const int query = at.seq.first + row;
    block.rows = {query, block.part * held, row < at.seq.count ? query + 1 : query, -1, nullptr};
    block.keys = nsa__cuda_keys_of(params, at.seq.tokens, block.rows.first);
    return block;
}

/* Key tiles that a query has, empty ones of a list's free slots included. */
NSA__DEVICE int nsa__cuda_decode_tiles(const nsa__cuda_decode_params &params,
                                       nsa__cuda_key_span keys) {
    if (params.branch == NSA__KEYS_SLC) return params.key_tiles;
    return keys.end <= keys.begin ? 0 : (keys.end - 1) / params.keys - keys.begin / params.keys + 1;
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

/* Starts copying a tile's keys and, unless only scores are asked for, values. Rows before the span
   are left out: a ring may hold a later token there, whose NaN would not be masked by p = 0. */
template <typename T, int DK, int DV, int KEYS, int THREADS>
NSA__DEVICE void nsa__cuda_decode_stage(T *stage, const nsa__cuda_decode_params &params,
                                        const nsa__cuda_decode_block &block,
                                        const nsa__cuda_key_tile &tile) {
    const nsa_attend &x = params.x;
    const T *k = nsa__row_of<const T>(x.k, block.at.seq.batch, 0, block.at.kv_head);
    const T *v = nsa__row_of<const T>(x.v, block.at.seq.batch, 0, block.at.kv_head);
    const int first = block.keys.begin - tile.begin, count = tile.end - tile.begin;
    const auto row = [&](int r) { return nsa__cuda_ring_row(tile.begin + r, params.ring); };
    nsa__cuda_tile_copy<T, DK, KEYS, THREADS>(stage, params.d.dim, k, [&](int r) {
        return r >= first && r < count ? k + x.k.token * row(r) : nullptr;
    });
    if (params.scan) return;
    nsa__cuda_tile_copy<T, DV, KEYS, THREADS>(stage + KEYS * DK, params.d.dim_v, v, [&](int r) {
        return r >= first && r < count ? v + x.v.token * row(r) : nullptr;
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

/* The largest score in the tiles before a run. */
NSA__DEVICE void nsa__cuda_decode_most_before(nsa__cuda_forward_rows &rows,
                                              const nsa__cuda_decode_params &params,
                                              const int64_t (&row)[2], int tiles) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        for (int n = static_cast<int>(threadIdx.x) % 4; n < tiles && row[h] >= 0; n += 4)
            rows.most[h] = fmaxf(rows.most[h], params.tile_most[row[h] * params.key_tiles + n]);
        rows.most[h] = nsa__cuda_quad_max(rows.most[h]);
    }
}

/* The largest score of a tile. */
template <int N>
NSA__DEVICE void nsa__cuda_decode_leave_most(const float (&s)[N][4],
                                             const nsa__cuda_decode_params &params,
                                             const int64_t (&row)[2], int tile) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = -INFINITY;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) most = fmaxf(most, s[n][2 * h + e]);
        most = nsa__cuda_quad_max(most);
        if (row[h] >= 0 && threadIdx.x % 4 == 0)
            params.tile_most[row[h] * params.key_tiles + tile] = most;
    }
}

NSA__DEVICE void nsa__cuda_decode_leave_sums(const nsa__cuda_forward_rows &rows,
                                             const nsa__cuda_decode_params &params,
                                             const int64_t (&row)[2], int units, int unit) {
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (row[h] >= 0)
            params.sums[4 * (row[h] * units + unit) + static_cast<int>(threadIdx.x) % 4] =
                rows.sum[h];
}

/* What a run leaves of its rows. */
template <int N>
NSA__DEVICE void nsa__cuda_decode_leave(const nsa__cuda_decode_params &params,
                                        const nsa__cuda_decode_block &block,
                                        const nsa__cuda_forward_rows &rows,
                                        const float (&out)[N][4], const int64_t (&row)[2]) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    if (params.branch != NSA__KEYS_CMP)
        nsa__cuda_decode_leave_sums(rows, params, row, params.splits, block.split);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (row[h] < 0) continue;
        const int64_t run = row[h] * params.splits + block.split;
        if (column == 0)
            params.most[run] = rows.bad[h] && rows.most[h] != -INFINITY ? INFINITY : rows.most[h];
#pragma unroll
        for (int n = 0; n < N; n++)
            if (8 * n < params.d.dim_v)
                nsa__store_pair(params.out + run * params.d.dim_v + 8 * n + column, out[n][2 * h],
                                out[n][2 * h + 1]);
    }
}

/* Forward's tiles of keys, fewer rows: those of one query. */
template <typename T, int DK, int DV, int HOPPER>
struct nsa__cuda_decode_shape : nsa__cuda_forward_shape<T, DK, DV, HOPPER, 64> {};

template <typename T, int DK, int DV>
static __global__ void __launch_bounds__(32 * nsa__cuda_decode_shape<T, DK, DV, NSA__HOPPER>::WARPS,
                                         2)
    nsa__cuda_decode_attend_kernel(nsa__cuda_decode_params params) {
    using shape = nsa__cuda_decode_shape<T, DK, DV, NSA__HOPPER>;
    constexpr int ROWS = shape::TILE, KEYS = shape::STAGE, THREADS = 32 * shape::WARPS;
    NSA_SHARED_ALL(shared);
    T *const q = reinterpret_cast<T *>(shared), *const stages = q + ROWS * DK;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16, lane = threadIdx.x % 32;

    NSA_SHARED(nsa__cuda_decode_block, block, );
    if (threadIdx.x == 0) block = nsa__cuda_decode_block_of(params, blockIdx.x, ROWS);
    __syncthreads();
    const int first = block.split * params.per_split;
    const int last = min(first + params.per_split, nsa__cuda_decode_tiles(params, block.keys));
    if (block.rows.first >= block.rows.end || first >= last) return;
    const int32_t *list = nullptr;
    if (params.branch == NSA__KEYS_SLC)
        list = nsa__cuda_query_at<const int32_t>(params.x.blocks, block.at, block.rows.first,
                                                 block.at.kv_head);

    nsa__cuda_tile_copy<T, DK, ROWS, THREADS>(
        q, params.d.dim, static_cast<const T *>(params.x.q.data), [&](int r) {
            const nsa__cuda_query_row row = nsa__cuda_query_row_of(params, block.at, block.rows, r);
            return nsa__cuda_decode_row(params, block, r) >= 0
                       ? nsa__cuda_query_at<const T>(params.x.q, block.at, row.query, row.head)
                       : nullptr;
        });
    nsa__cuda_key_tile next = nsa__cuda_decode_tile<KEYS>(params, block, list, first);
    nsa__cuda_decode_stage<T, DK, DV, KEYS, THREADS>(stages, params, block, next);
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
    __syncthreads();

    nsa__cuda_forward_rows rows;
    nsa__cuda_forward_begin(rows, params, block.at, block.rows,
                            nsa__cuda_tile_clean<T, DK, ROWS>(q, warp_row));
    const bool cmp = params.branch == NSA__KEYS_CMP;
    const int64_t row[2] = {nsa__cuda_decode_row(params, block, warp_row + lane / 4),
                            nsa__cuda_decode_row(params, block, warp_row + lane / 4 + 8)};
    if (cmp && !params.scan) nsa__cuda_decode_most_before(rows, params, row, first);
    float out[DV / 8][4] = {};
    int64_t read = 0;
    for (int n = first, stage = 0; n < last; n++, stage ^= 1) {
        const nsa__cuda_key_tile tile = next;
        T *const k = stages + stage * KEYS * (DK + DV), *const v = k + KEYS * DK;
        /* this stage is there, and nobody reads the other one any more */
        nsa__cuda_tiles_wait<T, KEYS>();
        if (n + 1 < last) {
            next = nsa__cuda_decode_tile<KEYS>(params, block, list, n + 1);
            nsa__cuda_decode_stage<T, DK, DV, KEYS, THREADS>(
                stages + (stage ^ 1) * KEYS * (DK + DV), params, block, next);
        }
        nsa__cp_async_commit();
        if (tile.bad) {
            nsa__cuda_tile_zero<T, DK, KEYS, THREADS>(k, tile.bad);
            if (!params.scan) nsa__cuda_tile_zero<T, DV, KEYS, THREADS>(v, tile.bad);
            nsa__cuda_tiles_written<T, KEYS>();
        }
        const nsa__cuda_key_span span = nsa__cuda_key_span_in(block.keys, tile.begin, tile.end);
        read += max(span.end - span.begin, 0);
        if (span.begin >= span.end ||
            !nsa__cuda_takes_part<T, KEYS>(row[0] >= 0 || row[1] >= 0, true))
            continue;
        const nsa__cuda_key_span none = {0, 0};
        const nsa__cuda_key_span seen[2] = {row[0] >= 0 ? span : none, row[1] >= 0 ? span : none};
        float s[KEYS / 8][4], shrink[2];
        nsa__cuda_product_nt<T, DK, KEYS, ROWS>(s, q, warp_row, k);
        nsa__cuda_mask_tile(s, seen, params.scale2);
        if (params.scan) {
            nsa__cuda_decode_leave_most(s, params, row, n);
            continue;
        }
        if (cmp) rows.sum[0] = rows.sum[1] = 0;
        nsa__cuda_softmax_tile(s, rows, shrink);
        if (cmp) nsa__cuda_decode_leave_sums(rows, params, row, params.key_tiles, n);
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
            for (int c = 0; c < DV / 8; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[c][e] *= shrink[e / 2];
        nsa__cuda_product_nn<T, KEYS, DV>(out, s, v, 0);
        if (tile.bad)
#pragma unroll
            for (int h = 0; h < 2; h++)
                rows.bad[h] |= (nsa__cuda_key_span_bits(seen[h]) & tile.bad) != 0;
    }
    if (params.scan) return;
    nsa__cuda_decode_leave(params, block, rows, out, row);
    if (threadIdx.x == 0 && block.part == 0 && params.reads)
        atomicAdd(reinterpret_cast<unsigned long long *>(
                      params.reads + block.at.b * (sizeof(nsa_reads) / sizeof(int64_t))),
                  static_cast<unsigned long long>(read));
}

/* The sum of p relative to `most`, the largest score: a warp, each quad for itself. */
NSA__DEVICE float nsa__cuda_decode_sum(const nsa__cuda_decode_params &params, int64_t row,
                                       int units, float *most) {
    const bool cmp = params.branch == NSA__KEYS_CMP;
    const float *each =
        cmp ? params.tile_most + row * params.key_tiles : params.most + row * params.splits;
    const float *sums =
        params.sums + 4 * row * (cmp ? params.key_tiles : params.splits) + threadIdx.x % 4;
    float sum = 0, reached = -INFINITY;
    for (int u = 0; u < units; u++) {
        const float mine = each[u], now = fmaxf(reached, mine);
        /* cmp: the tile's sum is relative to the largest score so far, as in attend_forward.cuh */
        const float share = cmp ? sums[4 * u] : sums[4 * u] * nsa__cuda_shrink(mine, now);
        sum = fmaf(sum, nsa__cuda_shrink(reached, now), share);
        reached = now;
    }
    *most = reached;
    return nsa__cuda_quad_sum(sum);
}

/* A warp adds the runs of one row: out and lse. */
static __global__ void nsa__cuda_decode_combine_kernel(nsa__cuda_decode_params params) {
    const nsa_desc &d = params.d;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * NSA__DECODE_COMBINE_WARPS +
                        static_cast<int>(threadIdx.x) / 32;
    const int head = static_cast<int>(row % d.heads);
    const int i = static_cast<int>(row / d.heads % d.count);
    const int64_t b = row / d.heads / d.count;
    if (b >= d.batch) return;
    const nsa__sequence seq = nsa__sequence_at(d, static_cast<int>(b), params.places);
    if (i >= seq.count) return;
    const int tiles =
        nsa__cuda_decode_tiles(params, nsa__cuda_keys_of(params, seq.tokens, seq.first + i));
    const int runs = (tiles + params.per_split - 1) / params.per_split;
    const float nan = __uint_as_float(0x7fc00000u), ln2 = 0.693147180559945f;
    bool bad = false;
    for (int r = 0; r < runs; r++) bad |= params.most[row * params.splits + r] == INFINITY;
    float most = -INFINITY, sum = 1;
    if (!bad)
        sum =
            nsa__cuda_decode_sum(params, row, params.branch == NSA__KEYS_CMP ? tiles : runs, &most);
    const bool empty = sum == 0;
    const float inverse = empty ? 0.0f : 1.0f / sum;
    void *to = nsa__row_at(params.x.out, b, i, head);
    for (int c = lane; c < d.dim_v; c += 32) {
        float value = 0;
        for (int r = 0; r < runs && !bad; r++)
            value = fmaf(params.out[(row * params.splits + r) * d.dim_v + c],
                         nsa__cuda_shrink(params.most[row * params.splits + r], most), value);
        nsa__store1(params.x.out.dtype, to, c, bad ? nan : value * inverse);
    }
    if (lane == 0)
        *nsa__row_of<float>(params.x.lse, b, i, head) = bad     ? nan
                                                        : empty ? -INFINITY
                                                                : (most + nsa__log2(sum)) * ln2;
}

/* ---- Launches -------------------------------------------------------------------------------- */

template <typename T, int DK, int DV> struct nsa__cuda_decode_run {
    template <int HOPPER>
    static nsa_status launch_as(nsa__cuda_decode_params params, cudaStream_t stream) {
        using shape = nsa__cuda_decode_shape<T, DK, DV, HOPPER>;
        nsa__cuda_decode_share(&params, shape::STAGE);
        params.parts = (params.group - 1) / shape::TILE + 1;
        const int64_t rows = static_cast<int64_t>(params.d.batch) * params.d.count;
        dim3 grid, combine;
        nsa_status s =
            nsa__cuda_grid(rows * params.d.kv_heads * params.parts * params.splits, &grid);
        if (s == NSA_OK)
            s = nsa__cuda_grid(nsa__cuda_ceil_div(rows * params.d.heads, NSA__DECODE_COMBINE_WARPS),
                               &combine);
        for (int scan = params.branch == NSA__KEYS_CMP; s == NSA_OK && scan >= 0; scan--) {
            params.scan = scan;
            s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_attend_kernel<T, DK, DV>, grid,
                                            dim3(32 * shape::WARPS), shape::BYTES, stream, params));
        }
        if (s != NSA_OK) return s;
        return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_combine_kernel, combine,
                                           dim3(32 * NSA__DECODE_COMBINE_WARPS), 0, stream,
                                           params));
    }
    static nsa_status launch(const nsa__cuda_decode_params &params, cudaStream_t stream) {
        bool hopper;
        NSA__CHECK(nsa__cuda_on_hopper(&hopper));
        return hopper ? launch_as<1>(params, stream) : launch_as<0>(params, stream);
    }
};

#endif

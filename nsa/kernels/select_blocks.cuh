/* select_blocks.cuh: the blocks that each query reads: a second pass over q k_cmp, from the
   softmax's logarithms to a list, with nothing of size queries x blocks in memory.
   Twin: nsa.h, "Selection".
   Not here: sums and scores (select_score.cuh), ranking (select_rank.cuh), lists from elsewhere
   (select_lists.cuh).

   A block of threads takes neighbouring queries of one kv head and walks the compressed keys in
   tiles. A warp owns some of the queries. Its product has a row for each key and a column for each
   query head (the transpose of attention's), so that the sum over the heads of a group is a sum
   over a thread's own values and its three neighbours. select_score.cuh does the rest.

   On sm_90a select_sm90.cuh takes the place of this kernel. It leaves to it f32, heads of more than
   192 or values of more than 128, more than 16 heads to a kv head, scores that are no attention.
   Those products are mma.sync's there too. */
#ifndef NSA_SELECT_BLOCKS_CUH
#define NSA_SELECT_BLOCKS_CUH

#include "select_sm90.cuh"

/* Keys of a tile, and how far apart its two copies lie. */
template <typename T, int D> struct nsa__cuda_select_tile {
    static constexpr int keys = sizeof(T) == 2 ? 64 : 32;
    static constexpr int piece = 16 / sizeof(T), pieces = D / piece;

    /* Pieces of 16 bytes change places, so that eight rows of one column lie in eight banks. */
    static __device__ __forceinline__ T *at(T *tile, int row, int p) {
        return tile + row * D + (p ^ (row & 7)) * piece;
    }
};

/* Starts the copies of keys first .. first + keys - 1, of which `count` exist. */
template <typename T, int D>
NSA__DEVICE void nsa__cuda_select_copy(T *tile, const nsa__cuda_select_keys<T> &k,
                                       const nsa_tensor &x, const nsa_desc &d, int first,
                                       int count) {
    typedef nsa__cuda_select_tile<T, D> shape;
#pragma unroll 1 /* registers hold the queries meanwhile */
    for (int i = static_cast<int>(threadIdx.x); i < shape::keys * shape::pieces;
         i += static_cast<int>(blockDim.x)) {
        const int row = i / shape::pieces, p = i % shape::pieces;
        const bool there = first + row < count && p * shape::piece < d.dim;
        int64_t offset = (first + row) * x.token;
        if (d.pages && there) {
            const nsa__cuda_page_row at =
                nsa__cuda_page_row_of(k.pages, d.page_tokens / d.cmp_stride, d.page_count,
                                      first + row + nsa__stencil_lead(d));
            offset = x.batch * at.page + x.token * at.row;
        }
        nsa__cp_async<16>(shape::at(tile, row, p),
                          there ? k.first + offset + p * shape::piece : k.first, there ? 16 : 0);
    }
}

/* What a warp keeps of its columns in registers. Column c is head c % columns of query c /
   columns. */
template <typename T, int D, int NT> struct nsa__cuda_select_columns {
    uint32_t q[D / 16][NT][2]; /* as tensor cores take them */
};
template <int D, int NT> struct nsa__cuda_select_columns<float, D, NT> {
    const float
        *q[NT][2]; /* rows of the thread's columns 8 n + 2 i + e; NULL where there is none */
};

/* Row of a column's query head, NULL where there is none. */
NSA__DEVICE const void *nsa__cuda_select_row(const nsa_tensor &x, const nsa__sequence &s,
                                             const nsa__cuda_select_plan &p, int group, int kv_head,
                                             int first_query, int chunk, int column) {
    const int query = first_query + column / p.columns, g = chunk * p.columns + column % p.columns;
    if (query >= s.count || g >= group) return nullptr;
    return nsa__row_at(x, s.batch, s.row + query, static_cast<int64_t>(kv_head) * group + g);
}

/* Brings in a warp's columns. lse[column]: their logarithms, of a SCORER their weights;
   inf where there is none, and where it is not finite. */
template <typename T, int D, int NT, bool SCORER>
NSA__DEVICE void nsa__cuda_select_load(nsa__cuda_select_columns<T, D, NT> &c, float *lse,
                                       const nsa_select &x, const nsa_desc &d,
                                       const nsa__sequence &s, const nsa__cuda_select_plan &p,
                                       int kv_head, int first_query, int chunk) {
    const int group = d.heads / d.kv_heads, lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < 8 * NT) {
        const bool given = !SCORER || x.lse.data; /* without weights every head weighs 1 */
        const void *row = nsa__cuda_select_row(given ? x.lse : x.q, s, p, group, kv_head,
                                               first_query, chunk, lane);
        float value = __uint_as_float(0x7f800000u);
        if (row) {
            const float found = given ? nsa__load1(x.lse.dtype, row, 0) : 1.0f;
            if (nsa__finite(found)) value = found;
        }
        lse[lane] = value;
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int e = 0; e < 2; e++)
                c.q[n][e] = static_cast<const float *>(nsa__cuda_select_row(
                    x.q, s, p, group, kv_head, first_query, chunk, 8 * n + lane % 4 * 2 + e));
        } else {
            const T *q = static_cast<const T *>(nsa__cuda_select_row(
                x.q, s, p, group, kv_head, first_query, chunk, 8 * n + lane / 4));
            const int width = q ? d.dim : 0; /* a multiple of 8: parts are there or not */
#pragma unroll
            for (int k = 0; k < D / 16; k++)
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const int at = 16 * k + 8 * part;
                    c.q[k][n][part] =
                        at < width ? *reinterpret_cast<const uint32_t *>(q + at + lane % 4 * 2)
                                   : 0u;
                }
        }
    }
    __syncwarp();
}

/* A bit for each column with a value that is not finite. */
template <typename T, int D, int NT>
NSA__DEVICE uint32_t nsa__cuda_select_bad_columns(const nsa__cuda_select_columns<T, D, NT> &c) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    bool mine = false; /* of column `lane` */
#pragma unroll
    for (int n = 0; n < NT; n++) {
        bool bad = false;
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            bad |= nsa__cuda_not_finite<T>(make_uint4(c.q[k][n][0], c.q[k][n][1], 0, 0));
        const uint32_t lanes = __ballot_sync(0xffffffffu, bad); /* four of a column */
        if (lane / 8 == n) mine = lanes >> lane % 8 * 4 & 15;
    }
    return __ballot_sync(0xffffffffu, mine);
}

/* acc[n] = 16 keys from `row` on, times columns 8 n .. 8 n + 7. */
template <typename T, int D, int NT>
NSA__DEVICE void nsa__cuda_select_product(float (&acc)[NT][4],
                                          const nsa__cuda_select_columns<T, D, NT> &c, T *tile,
                                          int row, int dim) {
    typedef nsa__cuda_select_tile<T, D> shape;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
    if constexpr (sizeof(T) == 2) {
        const int first = static_cast<int>(shape::at(tile, row + lane % 16, lane / 16) - tile);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t a[4];
            nsa__ldmatrix_x4(a, tile + (first ^ 16 * k % 64) + 16 * k / 64 * 64);
#pragma unroll
            for (int n = 0; n < NT; n++)
                nsa__mma_m16n8k16<T>(acc[n], a, c.q[k][n][0], c.q[k][n][1]);
        }
    } else {
        for (int k = 0; k < dim; k += 4) {
            float a[2][4];
#pragma unroll
            for (int part = 0; part < 2; part++)
                nsa__load4(a[part], NSA_F32, shape::at(tile, row + 8 * part + lane / 4, k / 4), 0);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float b[4] = {0, 0, 0, 0};
                    if (c.q[n][e]) nsa__load4(b, NSA_F32, c.q[n][e], k);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        acc[n][e] = fmaf(a[0][i], b[i], acc[n][e]);
                        acc[n][2 + e] = fmaf(a[1][i], b[i], acc[n][2 + e]);
                    }
                }
        }
    }
}

/* The warp's sums for the keys of one tile. */
template <typename T, int D, int NT, bool CHUNKS, bool SCORER>
NSA__DEVICE void nsa__cuda_select_sums(nsa__cuda_select_columns<T, D, NT> &c, const nsa_select &x,
                                       const nsa_desc &d, const nsa__sequence &s,
                                       const nsa__cuda_select_plan &p,
                                       const nsa__cuda_select_warp &w, int kv_head, float scale,
                                       T *tile, int first_key) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int chunk = 0; chunk < (CHUNKS ? p.chunks : 1); chunk++) {
        if (CHUNKS) __syncwarp(); /* the last chunk has been read */
        if (CHUNKS)
            nsa__cuda_select_load<T, D, NT, SCORER>(c, w.lse, x, d, s, p, kv_head, w.first_query,
                                                    chunk);
        const nsa__cuda_select_ring ring = {w.ring, p.ring, chunk > 0};
#pragma unroll 1
        for (int row = 0; row < nsa__cuda_select_tile<T, D>::keys; row += 16) {
            float acc[NT][4];
            if (first_key + row >= w.visible) break;
            nsa__cuda_select_product<T, D, NT>(acc, c, tile, row, d.dim);
            /* what a query does not see may be anything: nsa__cuda_select_score does not read it */
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const float2 lse = *reinterpret_cast<float2 *>(w.lse + 8 * n + lane % 4 * 2);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    acc[n][e] =
                        nsa__cuda_select_term<SCORER>(p, acc[n][e], scale, e % 2 ? lse.y : lse.x);
            }
            nsa__cuda_select_sum_heads<NT>(acc, ring, p.columns, first_key + row + lane / 4);
        }
    }
}

enum { NSA__SELECT_WARPS = 8 };

template <typename T, int D, int NT, bool CHUNKS, bool SCORER>
static __global__ void __launch_bounds__(32 * NSA__SELECT_WARPS, D <= 128 && sizeof(T) == 2 ? 2 : 1)
    nsa__cuda_select_blocks_kernel(nsa_desc d, nsa_select x, nsa__cuda_select_plan p, float scale) {
    typedef nsa__cuda_select_tile<T, D> shape;
    NSA_SHARED_ALL(bytes);
    const int warp = static_cast<int>(threadIdx.x) / 32, tile_queries = p.warps * p.queries;
    T *tiles = reinterpret_cast<T *>(bytes);
    auto *queries = reinterpret_cast<nsa__cuda_select_query *>(tiles + 2 * shape::keys * D);
    float *rings = reinterpret_cast<float *>(queries + tile_queries);
    float *lse = rings + tile_queries * p.ring;
    auto *lists = reinterpret_cast<uint64_t *>(lse + p.warps * 8 * NT);

    NSA_SHARED(nsa__cuda_select_place<T>, at, );
    static_assert(nsa__cuda_shared_fits<NSA__SHARED_MOST, sizeof at>::value);
    if (threadIdx.x == 0) at = nsa__cuda_select_place_of<T, SCORER>(d, x, p);
    __syncthreads();
    if (at.first >= at.s.count) return;

    nsa__cuda_select_warp w;
    w.first_query = at.first + warp * p.queries;
    w.queries = queries + warp * p.queries;
    w.ring = rings + warp * p.queries * p.ring;
    w.lse = lse + warp * 8 * NT;
    if (p.lists) lists = p.lists + static_cast<int64_t>(blockIdx.x) * tile_queries * p.length;
    w.lists = lists + warp * p.queries * p.length;
    nsa__cuda_select_begin<SCORER || CHUNKS>(w, x, d, at.s, p, at.b, at.kv_head);

    nsa__cuda_select_columns<T, D, NT> c;
    if (!CHUNKS)
        nsa__cuda_select_load<T, D, NT, SCORER>(c, w.lse, x, d, at.s, p, at.kv_head, w.first_query,
                                                0);
    if constexpr (!SCORER && !CHUNKS)
        nsa__cuda_select_mark(w, p.queries, p.columns, nsa__cuda_select_bad_columns(c));
    int key = 0;
    if (at.keys > 0) nsa__cuda_select_copy<T, D>(tiles, at.k, x.k, d, 0, at.keys);
    nsa__cp_async_commit();
    do { /* once at least: forced blocks need no key */
        T *tile = tiles + key / shape::keys % 2 * shape::keys * D;
        T *next = tiles + (key / shape::keys + 1) % 2 * shape::keys * D;
        if (key + shape::keys < at.keys)
            nsa__cuda_select_copy<T, D>(next, at.k, x.k, d, key + shape::keys, at.keys);
        nsa__cp_async_commit();
        nsa__cp_async_wait<1>();
        __syncthreads();
        const bool sees = key < w.visible;
        if (sees)
            nsa__cuda_select_sums<T, D, NT, CHUNKS, SCORER>(c, x, d, at.s, p, w, at.kv_head, scale,
                                                            tile, key);
        key += shape::keys;
        if (sees || key >= at.keys) { /* one place for both, because it is much code */
            const int end = key < at.keys ? min(key / p.strides, w.candidates) : w.candidates;
            /* behind the last tile that the warp saw: found once more, for lack of a register */
            const int seen = (w.visible + shape::keys - 1) / shape::keys * shape::keys;
            const int ranked = min(min(key - shape::keys, seen) / p.strides, w.candidates);
            __syncwarp();
            nsa__cuda_select_rank<SCORER>(p, d.score_map, w, ranked, end);
        }
        __syncthreads();
    } while (key < at.keys);
    nsa__cuda_select_end<SCORER>(w, x, d, at, p);
}

/* ---- Launch --------------------------------------------------------------------------------- */

/* The element's size and a padded width are all that a plan needs to know of a kernel. `most`: the
   longest list that it keeps. */
static nsa__cuda_select_plan nsa__cuda_select_plan_of(const nsa_desc *d, size_t element, int padded,
                                                      int wide, int most, nsa__arena *a) {
    const int group = d->heads / d->kv_heads;
    const int keys = element == 2 ? 64 : 32;
    nsa__cuda_select_plan p = nsa__cuda_select_plan_begin(d, most);
    p.columns = 1;
    while (p.columns < group && p.columns < wide) p.columns *= 2;
    p.chunks = (group - 1) / p.columns + 1;
    p.queries = wide / p.columns;

    const size_t tiles = 2 * static_cast<size_t>(keys) * static_cast<size_t>(padded) * element;
    const size_t sums = nsa__cuda_select_plan_ring(&p, keys);
    const size_t list = sizeof(uint64_t) * static_cast<size_t>(p.length);
    const size_t room = NSA__SHARED_MOST - tiles;
    const size_t queries = static_cast<size_t>(p.queries);
    const size_t warp = queries * sums + sizeof(float) * static_cast<size_t>(wide);
    p.warps = NSA__SELECT_WARPS;
    while (p.warps > 1 && static_cast<size_t>(p.warps) * (warp + queries * list) > room)
        p.warps /= 2;
    const bool shared = static_cast<size_t>(p.warps) * (warp + queries * list) <= room;
    p.shared_bytes = tiles + static_cast<size_t>(p.warps) * (warp + (shared ? queries * list : 0));
    nsa__cuda_select_plan_end(&p, d, shared, a);
    return p;
}

/* The longest list of selection. */
static int nsa__cuda_select_length(const nsa_desc *d) {
    const int blocks = nsa_slc_count(d, d->tokens);
    const int length = d->slc_count < blocks ? d->slc_count : blocks;
    return length < 1 ? 1 : length;
}

/* The pipeline's launch, of which `p` is the plan. */
template <typename T, int D>
static nsa_status nsa__cuda_select_launch_pipe(const nsa_select *x, const nsa_desc *d,
                                               const nsa__cuda_select_plan &p, float scale,
                                               cudaStream_t stream) {
    using shape = nsa__cuda_select_pipe<T, D>;
    constexpr int LEAST = D > 128 ? 4 : 2; /* two columns of 192 have no room for their sums */
    const auto kernel = p.columns == 16  ? nsa__cuda_select_blocks_sm90_kernel<T, D, 16>
                        : p.columns == 8 ? nsa__cuda_select_blocks_sm90_kernel<T, D, 8>
                        : p.columns == 4 ? nsa__cuda_select_blocks_sm90_kernel<T, D, 4>
                                         : nsa__cuda_select_blocks_sm90_kernel<T, D, LEAST>;
    dim3 grid;
    NSA__CHECK(nsa__cuda_grid(p.tiles.total * d->kv_heads, &grid));
    return nsa__cuda_status(NSA_LAUNCH(kernel, grid, dim3(shape::CONSUMERS + shape::PRODUCERS),
                                       p.shared_bytes, stream, *d, *x, p, scale));
}

/* NT: a warp's columns over 8. */
template <typename T, int D, int NT, bool CHUNKS>
static nsa_status nsa__cuda_select_launch(const nsa_select *x, const nsa_desc *d,
                                          int lists_per_kv_head, void *workspace,
                                          cudaStream_t stream) {
    const double given = d->scale != 0 ? d->scale : 1 / sqrt(static_cast<double>(d->dim));
    const float scale = static_cast<float>(given);
    const int most = nsa__cuda_select_length(d);
    bool hopper = false;
    if (sizeof(T) == 2) NSA__CHECK(nsa__cuda_on_hopper(&hopper));
    hopper = hopper && nsa__cuda_select_pipe_serves(d, D);
    nsa__arena a = nsa__cuda_arena_at(workspace);
    nsa__cuda_select_plan p = hopper ? nsa__cuda_select_pipe_plan(d, D, most, &a)
                                     : nsa__cuda_select_plan_of(d, sizeof(T), D, 8 * NT, most, &a);
    p.lists_per_kv_head = lists_per_kv_head;
    if (d->begins) NSA__CHECK(nsa__cuda_cmp_begins(d, p.cmp_begins, stream));
    if constexpr (nsa__cuda_select_pipe<T, D>::value)
        if (hopper) return nsa__cuda_select_launch_pipe<T, D>(x, d, p, scale, stream);
    dim3 grid;
    NSA__CHECK(nsa__cuda_grid(p.tiles.total * d->kv_heads, &grid));
    return nsa__cuda_status(NSA_LAUNCH((nsa__cuda_select_blocks_kernel<T, D, NT, CHUNKS, false>),
                                       grid, dim3(32u * static_cast<unsigned>(p.warps)),
                                       p.shared_bytes, stream, *d, *x, p, scale));
}

/* Registers decide: a warp keeps its queries in them, up to 32 columns of 192 or 16 of 256. */
template <int D> static constexpr int nsa__cuda_select_wide() {
    return D > 192 ? 2 : 4;
}

/* Which kernel a geometry takes: call.run<T, D, NT, CHUNKS>(). The one choice, which decoding
   shares: on it hang the bits of the scores. */
template <typename T, int D, typename Call>
static nsa_status nsa__cuda_select_choose_columns(const nsa_desc *d, const Call &call) {
    const int group = d->heads / d->kv_heads;
    if (group <= 2) return call.template run<T, D, 1, sizeof(T) == 4>();
    if (sizeof(T) == 4 || group <= 8 * nsa__cuda_select_wide<D>())
        return call.template run<T, D, nsa__cuda_select_wide<D>(), sizeof(T) == 4>();
    return call.template run<T, NSA_CUDA_MAX_DIM, 2, true>();
}

template <typename T, typename Call>
static nsa_status nsa__cuda_select_choose_width(const nsa_desc *d, const Call &call) {
    if constexpr (sizeof(T) == 2 || NSA_CUDA_MAX_DIM == 64)
        if (d->dim <= 64) return nsa__cuda_select_choose_columns<T, 64>(d, call);
    if constexpr (NSA_CUDA_MAX_DIM >= 128)
        if (d->dim <= 128) return nsa__cuda_select_choose_columns<T, 128>(d, call);
    if constexpr (NSA_CUDA_MAX_DIM == 192 || (NSA_CUDA_MAX_DIM > 192 && sizeof(T) == 2))
        if (d->dim <= 192) return nsa__cuda_select_choose_columns<T, 192>(d, call);
    if constexpr (NSA_CUDA_MAX_DIM > 192) return nsa__cuda_select_choose_columns<T, 256>(d, call);
    return nsa__error(NSA_ERROR_SIZE, NSA__AT_dim);
}

template <typename Call>
static nsa_status nsa__cuda_select_choose(nsa_dtype dtype, const nsa_desc *d, const Call &call) {
    NSA__CUDA_BY_DTYPE(dtype, T, return nsa__cuda_select_choose_width<T>(d, call);)
    return nsa__error(NSA_ERROR_DTYPE, NSA__AT_q);
}

struct nsa__cuda_select_call {
    const nsa_select *x;
    const nsa_desc *d; /* by list */
    int lists_per_kv_head;
    void *workspace;
    cudaStream_t stream;
    template <typename T, int D, int NT, bool CHUNKS> nsa_status run() const {
        return nsa__cuda_select_launch<T, D, NT, CHUNKS>(x, d, lists_per_kv_head, workspace,
                                                         stream);
    }
};

enum { NSA__P_CMP_THREADS = 128 };

/* p_cmp where it is asked for: of one query and list, a thread to a key. The kernels above keep
   sums of few keys at a time, and write none. */
static __global__ void __launch_bounds__(NSA__P_CMP_THREADS)
    nsa__cuda_p_cmp_kernel(nsa_desc d, nsa_select x, nsa__cuda_extent rows,
                           const int32_t *cmp_begins, int lists_per_kv_head, float scale) {
    const int list = static_cast<int>(blockIdx.x) % d.kv_heads, group = d.heads / d.kv_heads;
    const nsa__cuda_item at = nsa__cuda_item_at(d, rows, static_cast<int>(blockIdx.x) / d.kv_heads);
    const nsa__sequence s = nsa__sequence_of(d, at.b);
    const int row = static_cast<int>(at.local);
    if (row >= s.count) return;
    const bool bad = nsa__cuda_select_is_bad<true>(x, d, s, row, list);
    const int visible = bad ? 0 : nsa__cmp_visible(d, s.tokens, s.first + row);
    float *const to = nsa__row_of<float>(x.p_cmp, s.batch, s.row + row, list);
    for (int i = static_cast<int>(threadIdx.x); i < nsa__cmp_count(d, d.tokens);
         i += NSA__P_CMP_THREADS) {
        float sum = 0.0f;
        for (int g = 0; i < visible && g < group; g++) {
            const int64_t head = static_cast<int64_t>(list) * group + g;
            const void *const q = nsa__row_at(x.q, s.batch, s.row + row, head);
            const void *const k = nsa__element_at(
                x.k, nsa__cuda_key_offset(d, x.k, s, at.b, true, nsa__cmp_row(d, cmp_begins, at.b),
                                          i, list / lists_per_kv_head));
            float product = 0.0f;
            for (int c = 0; c < d.dim; c += 8) {
                float a[8], b[8];
                nsa__load8(a, x.q.dtype, q, c);
                nsa__load8(b, x.k.dtype, k, c);
#pragma unroll
                for (int e = 0; e < 8; e++) product = fmaf(a[e], b[e], product);
            }
            sum += nsa__exp(__fmul_rn(product, scale) -
                            *nsa__row_of<const float>(x.lse, s.batch, s.row + row, head));
        }
        to[i] = sum;
    }
}

/* Behind the selection, whose workspace begins with where compressed rows do. */
static nsa_status nsa__cuda_p_cmp_run(const nsa_select *x, const nsa_desc *d, int lists_per_kv_head,
                                      void *workspace, cudaStream_t stream) {
    dim3 grid;
    const double scale = d->scale != 0 ? d->scale : 1 / sqrt(static_cast<double>(d->dim));
    const nsa__cuda_extent rows = nsa__cuda_query_extent_of(d, d->count, 1, 1, 0);
    nsa__arena a = nsa__cuda_arena_at(workspace);
    const int32_t *const cmp_begins = nsa__cuda_take<int32_t>(&a, 0);
    const nsa_status s = nsa__cuda_grid(rows.total * d->kv_heads, &grid);
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_p_cmp_kernel, grid, dim3(NSA__P_CMP_THREADS), 0,
                                       stream, *d, *x, rows, cmp_begins, lists_per_kv_head,
                                       static_cast<float>(scale)));
}

/* The launches alone, for the entry point and for the chain. */
static nsa_status nsa__cuda_select_run(const nsa_select *x, const nsa_desc *d, void *workspace,
                                       cudaStream_t stream) {
    if (d->count == 0) return NSA_OK;
    const nsa_desc all = nsa__cuda_all_queries(d), by = nsa__cuda_by_list(&all);
    const nsa__cuda_select_call call = {x, &by, nsa__cuda_lists_per_kv_head(d), workspace, stream};
    const nsa_status s = nsa__cuda_select_choose(x->q.dtype, &by, call);
    if (s != NSA_OK || !x->p_cmp.data) return s;
    return nsa__cuda_p_cmp_run(x, &by, nsa__cuda_lists_per_kv_head(d), workspace, stream);
}

/* A caller's workspace serves every dtype: of all kernels' needs, the largest. */
static size_t nsa__cuda_select_bytes(const nsa_desc *d) {
    const nsa_desc by = nsa__cuda_by_list(d);
    const int length = nsa__cuda_select_length(&by);
    size_t most = 0;
    for (size_t element = 2; element <= 4; element += 2)
        for (int wide = 8; wide <= 32; wide *= 2) {
            nsa__arena a = {NULL, 0};
            nsa__cuda_select_plan_of(&by, element, NSA_CUDA_MAX_DIM, wide, length, &a);
            const size_t bytes = nsa__cuda_arena_bytes(&a);
            most = bytes > most ? bytes : most;
        }
    for (int dim = 64; dim <= 192; dim += 64) {
        nsa__arena a = {NULL, 0};
        nsa__cuda_select_pipe_plan(&by, dim, length, &a);
        const size_t bytes = nsa__cuda_arena_bytes(&a);
        most = bytes > most ? bytes : most;
    }
    return most;
}

extern "C" size_t nsa_cuda_select_blocks_workspace_size(const nsa_desc *d) {
    return nsa__cuda_check_desc(d) == NSA_OK ? nsa__cuda_select_bytes(d) : 0;
}

extern "C" nsa_status nsa_cuda_select_blocks(const nsa_select *x, const nsa_desc *d,
                                             void *workspace, size_t bytes, cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_check_desc(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    const nsa__checked c = nsa__cuda_checked_of(d, nsa__cuda_dtype_of(&x->q, d), 1, 1);
    NSA__CHECK(nsa__check_views(&c, nsa__select_views, NSA__SELECT_VIEWS, x));
    NSA__CHECK(nsa__cuda_check_workspace(nsa__cuda_select_bytes(d), workspace, bytes));
    return nsa__cuda_select_run(x, d, workspace, stream);
}

#endif

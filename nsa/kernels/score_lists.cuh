/* score_lists.cuh: scores of given block lists, and their gradient: what trains an indexer.
   Twin: nsa.h, "Scores of given lists, and their gradient". A block of threads takes one list: a
   thread scores a key against some heads at a time, then each block's scores are pooled. Backward
   goes through the keys that have a gradient once more for dq and dweights. dk is a warp's: it goes
   through the readers of its key's block (attend_readers.cuh), in their order. Bound by loads, not
   by products: no tensor cores.
   Not here: scores of all blocks (score_blocks.cuh), ranking (select_lists.cuh). */
#ifndef NSA_SCORE_LISTS_CUH
#define NSA_SCORE_LISTS_CUH

#include "attend_readers.cuh"
#include "score_blocks.cuh"

enum { NSA__LISTED_THREADS = 128, NSA__LISTED_HEADS = 8, NSA__LISTED_WARPS = 4 };

/* What `best` says of an entry: a key of its block (of a maximum, the first that has it), or: */
enum { NSA__LISTED_NONE = -1 /* no key */, NSA__LISTED_BAD = -2 /* not finite */ };

struct nsa__cuda_listed_params {
    nsa__cuda_attend_params at; /* the lists, and backward their readers */
    nsa_score x, dx;
    bool backward;
    int block;             /* keys of a block */
    int32_t *cmp_begins;   /* of packed sequences, if keys stand for several tokens */
    nsa__cuda_extent rows; /* queries */
    int32_t *best;         /* (rows, list heads, list_width); backward */
};

/* A list at hand. */
struct nsa__cuda_listed_list {
    nsa__sequence s;
    int b, list, kv_head;
    int visible, last; /* keys that the query sees; the last block that it may name */
    int64_t row, place, key_row;
    const int32_t *blocks;
};

struct nsa__cuda_listed_memory {
    float q[NSA__LISTED_HEADS][256], weights[NSA__LISTED_HEADS];
    float grads[NSA__LISTED_HEADS][NSA__LISTED_THREADS];
    float of_key[NSA__LISTED_THREADS];
    int64_t at[NSA__LISTED_THREADS]; /* the offset of a thread's key, or -1 */
    bool bad[NSA__LISTED_THREADS];
};

/* Keys are tokens, or rows of several. */
NSA__DEVICE int64_t nsa__cuda_listed_key_row(const nsa__cuda_listed_params &params,
                                             const nsa__sequence &s, int b) {
    return params.at.d.cmp_stride > 1 ? nsa__cmp_row(params.at.d, params.cmp_begins, b) : s.key_row;
}
NSA__DEVICE int64_t nsa__cuda_listed_key(const nsa__cuda_listed_params &params, const nsa_tensor &k,
                                         const nsa__cuda_listed_list &l, int key) {
    return nsa__cuda_key_offset(params.at.d, k, l.s, l.b, params.at.d.cmp_stride > 1, l.key_row,
                                key, l.kv_head);
}

/* Brings in heads first .. of a list, zeros behind the last. Whether something is not finite. */
NSA__DEVICE bool nsa__cuda_listed_load(nsa__cuda_listed_memory &m,
                                       const nsa__cuda_listed_params &params,
                                       const nsa__cuda_listed_list &l, int first) {
    const int thread = static_cast<int>(threadIdx.x), group = params.at.group;
    bool bad = false;
    for (int i = thread; i < NSA__LISTED_HEADS * 32; i += NSA__LISTED_THREADS) {
        const int g = i / 32, c = i % 32 * 8, head = l.list * group + first + g;
        float q[8] = {};
        if (c >= params.at.d.dim) continue;
        if (first + g < group)
            nsa__load8(q, params.x.q.dtype, nsa__row_at(params.x.q, l.s.batch, l.row, head), c);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            bad |= !nsa__finite(q[e]);
            m.q[g][c + e] = q[e];
        }
    }
    if (thread < NSA__LISTED_HEADS) {
        const nsa_tensor &w = params.x.weights;
        const bool there = first + thread < group;
        float weight = there ? 1.0f : 0.0f;
        if (there && w.data)
            weight = nsa__load1(
                w.dtype, nsa__row_at(w, l.s.batch, l.row, l.list * group + first + thread), 0);
        bad |= !nsa__finite(weight);
        m.weights[thread] = weight;
    }
    return bad;
}

/* Products of a key with the heads in shared memory. Whether the key is finite. */
NSA__DEVICE bool nsa__cuda_listed_products(float (&s)[NSA__LISTED_HEADS],
                                           const nsa__cuda_listed_memory &m, const nsa_tensor &k,
                                           int64_t at, int dim) {
    const void *row = nsa__element_at(k, at);
    bool finite = true;
#pragma unroll
    for (int g = 0; g < NSA__LISTED_HEADS; g++) s[g] = 0.0f;
#pragma unroll 1 /* a key's numbers are many, the registers few */
    for (int c = 0; c < dim; c += 8) {
        float key[8];
        nsa__load8(key, k.dtype, row, c);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            finite &= nsa__finite(key[e]);
#pragma unroll
            for (int g = 0; g < NSA__LISTED_HEADS; g++) s[g] = fmaf(key[e], m.q[g][c + e], s[g]);
        }
    }
    return finite;
}

NSA__DEVICE int32_t *nsa__cuda_listed_best(const nsa__cuda_listed_params &params, int64_t place,
                                           int list) {
    const int64_t lists = static_cast<int64_t>(params.at.d.kv_heads) * params.at.lists;
    return params.best + (place * lists + list) * params.at.list_width;
}

/* Entry i, whose keys are those of threads first .. first + block - 1. By one thread. */
NSA__DEVICE void nsa__cuda_listed_pool(const nsa__cuda_listed_memory &m,
                                       const nsa__cuda_listed_params &params,
                                       const nsa__cuda_listed_list &l, bool bad, int i, int first) {
    const bool mean = params.x.pool == NSA_POOL_MEAN;
    int n = 0, best = 0;
    float score = 0.0f;
    for (int key = 0; key < params.block && m.at[first + key] >= 0; key++, n++) {
        const float of_key = m.of_key[first + key];
        bad |= m.bad[first + key];
        if (mean)
            score += of_key;
        else if (n == 0 || of_key > score)
            score = of_key, best = key;
    }
    if (mean) score /= static_cast<float>(n);
    if (bad) score = __uint_as_float(0x7fc00000u);
    if (n == 0) score = __uint_as_float(0xff800000u);
    if (!params.backward)
        nsa__row_of<float>(params.x.scores, l.s.batch, l.row, l.list)[i] = score;
    else
        nsa__cuda_listed_best(params, l.place, l.list)[i] = n == 0 ? NSA__LISTED_NONE
                                                            : bad
                                                                ? NSA__LISTED_BAD
                                                                : l.blocks[i] * params.block + best;
}

/* The scores of a list, or backward its best keys. */
NSA__DEVICE void nsa__cuda_listed_scores(nsa__cuda_listed_memory &m,
                                         const nsa__cuda_listed_params &params,
                                         const nsa__cuda_listed_list &l) {
    const int thread = static_cast<int>(threadIdx.x), width = params.at.list_width;
    const int turn = NSA__LISTED_THREADS / params.block, slot = thread / params.block;
    const int group = params.at.group;
    bool bad = false; /* something of the query */
    for (int first = 0; first < group; first += NSA__LISTED_HEADS)
        bad |= nsa__cuda_listed_load(m, params, l, first);
    bad = __syncthreads_or(bad);
    for (int base = 0; base < width; base += turn) {
        const int block = slot < turn && base + slot < width ? l.blocks[base + slot] : -1;
        const bool named = block >= 0 && block <= l.last;
        const int key = named ? block * params.block + thread % params.block : 0;
        const int64_t at =
            named && key < l.visible ? nsa__cuda_listed_key(params, params.x.k, l, key) : -1;
        float of_key = 0.0f, s[NSA__LISTED_HEADS];
        bool finite = true;
        for (int first = 0; first < group; first += NSA__LISTED_HEADS) {
            if (group > NSA__LISTED_HEADS) { /* else they have been there all along */
                __syncthreads();
                nsa__cuda_listed_load(m, params, l, first);
                __syncthreads();
            }
            if (at < 0) continue;
            finite &= nsa__cuda_listed_products(s, m, params.x.k, at, params.at.d.dim);
#pragma unroll
            for (int g = 0; g < NSA__LISTED_HEADS; g++)
                of_key +=
                    m.weights[g] * (params.x.act == NSA_SCORE_RELU ? fmaxf(s[g], 0.0f) : s[g]);
        }
        m.at[thread] = at;
        m.of_key[thread] = of_key;
        m.bad[thread] = !finite;
        __syncthreads();
        if (thread < turn && base + thread < width)
            nsa__cuda_listed_pool(m, params, l, bad, base + thread, thread * params.block);
        __syncthreads();
    }
}

/* What an entry's gradient is for each of its keys that have one. NaN reaches all of them. */
struct nsa__cuda_listed_gradient {
    float each;
    bool bad;
};
NSA__DEVICE nsa__cuda_listed_gradient
nsa__cuda_listed_gradient_of(const nsa__cuda_listed_params &params, const nsa__sequence &s,
                             int64_t row, int list, int i, int best, int seen) {
    const float dscore = nsa__row_of<const float>(params.dx.scores, s.batch, row, list)[i];
    nsa__cuda_listed_gradient g = {dscore, best == NSA__LISTED_BAD || !nsa__finite(dscore)};
    if (params.x.pool == NSA_POOL_MEAN) g.each /= static_cast<float>(min(params.block, seen));
    if (g.bad) g.each = __uint_as_float(0x7fc00000u);
    return g;
}

/* score = mean or maximum over keys of sum_g w_g act(s_g), s_g = q_g . k:
     dw_g += dscore act(s_g),   dq_g += dscore w_g act'(s_g) k */
NSA__DEVICE void nsa__cuda_listed_queries(nsa__cuda_listed_memory &m,
                                          const nsa__cuda_listed_params &params,
                                          const nsa__cuda_listed_list &l, int first) {
    const int thread = static_cast<int>(threadIdx.x), dim = params.at.d.dim;
    const bool mean = params.x.pool == NSA_POOL_MEAN, linear = params.x.act == NSA_SCORE_LINEAR;
    const int of_entry = mean ? params.block : 1, keys = params.at.list_width * of_entry;
    const int32_t *best = nsa__cuda_listed_best(params, l.place, l.list);
    float dq[NSA__LISTED_HEADS][2] = {}, dw[NSA__LISTED_HEADS] = {}, s[NSA__LISTED_HEADS];
    __syncthreads();
    nsa__cuda_listed_load(m, params, l, first);
    __syncthreads();
    for (int base = 0; base < keys; base += NSA__LISTED_THREADS) {
        const int i = (base + thread) / of_entry, of = i < params.at.list_width ? best[i] : -1;
        int64_t at = -1;
        nsa__cuda_listed_gradient grad = {0.0f, false};
        if (of != NSA__LISTED_NONE) {
            const int begin = l.blocks[i] * params.block;
            grad =
                nsa__cuda_listed_gradient_of(params, l.s, l.row, l.list, i, of, l.visible - begin);
            const int key = mean ? begin + (base + thread) % of_entry : grad.bad ? begin : of;
            if (key < l.visible) at = nsa__cuda_listed_key(params, params.x.k, l, key);
        }
        if (at >= 0) nsa__cuda_listed_products(s, m, params.x.k, at, dim);
#pragma unroll
        for (int g = 0; g < NSA__LISTED_HEADS; g++) {
            const bool passes = at >= 0 && (grad.bad || linear || s[g] > 0.0f);
            if (passes) dw[g] += grad.each * s[g];
            m.grads[g][thread] = passes ? grad.each * m.weights[g] : 0.0f;
        }
        m.at[thread] = at;
        __syncthreads();
        for (int n = 0; n < min(keys - base, int{NSA__LISTED_THREADS}); n++)
            for (int part = 0; part < 2 && m.at[n] >= 0; part++) {
                const int c = thread + part * NSA__LISTED_THREADS;
                if (c >= dim) break;
                const float k =
                    nsa__load1(params.x.k.dtype, nsa__element_at(params.x.k, m.at[n]), c);
#pragma unroll
                for (int g = 0; g < NSA__LISTED_HEADS; g++)
                    dq[g][part] = fmaf(m.grads[g][n], k, dq[g][part]);
            }
        __syncthreads();
    }
#pragma unroll
    for (int g = 0; g < NSA__LISTED_HEADS; g++) m.grads[g][thread] = dw[g];
    __syncthreads();
#pragma unroll
    for (int g = 0; g < NSA__LISTED_HEADS; g++) {
        const int64_t head = static_cast<int64_t>(l.list) * params.at.group + first + g;
        const nsa_tensor &dweights = params.dx.weights;
        if (first + g >= params.at.group) break;
        if (dweights.data && thread == g) {
            void *row = nsa__row_at(dweights, l.s.batch, l.row, head);
            float sum = nsa__load1(dweights.dtype, row, 0);
            float all = 0.0f;
            for (int n = 0; n < NSA__LISTED_THREADS; n++) all += m.grads[g][n];
            nsa__store1(dweights.dtype, row, 0, sum + all);
        }
        for (int part = 0; params.dx.q.data && part < 2; part++) {
            const int c = thread + part * NSA__LISTED_THREADS;
            if (c >= dim) break;
            void *row = nsa__row_at(params.dx.q, l.s.batch, l.row, head);
            nsa__store1(params.dx.q.dtype, row, c,
                        nsa__load1(params.dx.q.dtype, row, c) + dq[g][part]);
        }
    }
}

static __global__ void __launch_bounds__(NSA__LISTED_THREADS)
    nsa__cuda_listed_kernel(const NSA_GRID_CONSTANT nsa__cuda_listed_params params) {
    NSA_SHARED(nsa__cuda_listed_memory, memory, [1]);
    const nsa_desc &d = params.at.d;
    const int lists = d.kv_heads * params.at.lists;
    const nsa__cuda_item at =
        nsa__cuda_item_at(d, params.rows, static_cast<int>(blockIdx.x) / lists);
    nsa__cuda_listed_list l;
    l.s = nsa__sequence_of(d, at.b);
    if (at.local >= l.s.count) return;
    const int query = l.s.first + static_cast<int>(at.local);
    l.b = at.b;
    l.list = static_cast<int>(blockIdx.x) % lists;
    l.kv_head = l.list / params.at.lists;
    l.visible = nsa__cmp_visible(d, l.s.tokens, query);
    l.last = nsa__cuda_last_block(params.at, l.s.tokens, query);
    l.row = l.s.row + at.local;
    l.place = nsa__cuda_place_of(params.rows, at.b, l.s) + at.local;
    l.key_row = nsa__cuda_listed_key_row(params, l.s, at.b);
    l.blocks = nsa__row_of<const int32_t>(params.x.blocks, l.s.batch, l.row, l.list);
    nsa__cuda_listed_scores(memory[0], params, l);
    if (!params.backward || (!params.dx.q.data && !params.dx.weights.data)) return;
    for (int first = 0; first < params.at.group; first += NSA__LISTED_HEADS)
        nsa__cuda_listed_queries(memory[0], params, l, first);
}

/* The entry of an ascending list that is `block`, or -1. */
NSA__DEVICE int nsa__cuda_listed_find(const int32_t *list, int width, int block) {
    int low = 0, high = width;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (static_cast<uint32_t>(list[middle]) < static_cast<uint32_t>(block))
            low = middle + 1;
        else
            high = middle;
    }
    return low < width && list[low] == block ? low : -1;
}

/* What a reader's entry gives a key: nothing, or the gradient of its score. */
struct nsa__cuda_listed_reader {
    int query, list;
    nsa__cuda_listed_gradient gradient;
    bool there;
};
NSA__DEVICE nsa__cuda_listed_reader nsa__cuda_listed_reader_of(
    const nsa__cuda_listed_params &params, const nsa__cuda_attend_head &at, int key, int reader) {
    const nsa__cuda_reader of = nsa__cuda_reader_of(params.at, reader);
    const int block = key / params.block, list = at.list + of.list;
    const int visible = nsa__cmp_visible(params.at.d, at.seq.tokens, of.query);
    const int row = of.query - at.seq.first;
    const int i = nsa__cuda_listed_find(
        nsa__cuda_query_at<const int32_t>(params.x.blocks, at, of.query, list),
        params.at.list_width, block);
    nsa__cuda_listed_reader r = {of.query, list, {0.0f, false}, false};
    if (i < 0 || key >= visible) return r;
    const int64_t place = nsa__cuda_place_of(params.rows, at.b, at.seq) + row;
    const int best = nsa__cuda_listed_best(params, place, list)[i];
    if (best == NSA__LISTED_NONE) return r;
    r.gradient = nsa__cuda_listed_gradient_of(params, at.seq, at.seq.row + row, list, i, best,
                                              visible - block * params.block);
    r.there = r.gradient.bad || params.x.pool == NSA_POOL_MEAN || best == key;
    return r;
}

/* dk += dscore w_g act'(s_g) q_g, of the heads of one list. Lanes have eight numbers each. */
NSA__DEVICE void nsa__cuda_listed_add(float (&dk)[8], const float (&k)[8],
                                      const nsa__cuda_listed_params &params,
                                      const nsa__cuda_attend_head &at,
                                      const nsa__cuda_listed_reader &r) {
    const int c = static_cast<int>(threadIdx.x) % 32 * 8;
    const int64_t row = at.seq.row + r.query - at.seq.first;
    for (int g = 0; g < params.at.group; g++) {
        const int64_t head = static_cast<int64_t>(r.list) * params.at.group + g;
        const nsa_tensor &w = params.x.weights;
        float q[8] = {}, s = 0.0f;
        if (c < params.at.d.dim)
            nsa__load8(q, params.x.q.dtype, nsa__row_at(params.x.q, at.seq.batch, row, head), c);
        if (params.x.act == NSA_SCORE_RELU && !r.gradient.bad) {
#pragma unroll
            for (int e = 0; e < 8; e++) s = fmaf(k[e], q[e], s);
#pragma unroll
            for (int step = 16; step > 0; step /= 2) s += __shfl_xor_sync(0xffffffffu, s, step);
            if (!(s > 0.0f)) continue;
        }
        float ds = r.gradient.each;
        if (w.data) ds *= nsa__load1(w.dtype, nsa__row_at(w, at.seq.batch, row, head), 0);
#pragma unroll
        for (int e = 0; e < 8; e++) dk[e] = fmaf(ds, q[e], dk[e]);
    }
}

/* A warp for each key: the readers of its block, 32 looked at together, then one after another. */
static __global__ void __launch_bounds__(32 * NSA__LISTED_WARPS)
    nsa__cuda_listed_keys_kernel(const NSA_GRID_CONSTANT nsa__cuda_listed_params params) {
    const nsa__cuda_attend_head at = nsa__cuda_attend_head_of(params.at, blockIdx.x);
    const nsa__cuda_block_readers &readers = params.at.readers;
    const int lane = static_cast<int>(threadIdx.x) % 32, c = lane * 8;
    const int key = at.tile * NSA__LISTED_WARPS + static_cast<int>(threadIdx.x) / 32;
    if (key >= nsa__cmp_count(params.at.d, at.seq.tokens)) return;
    const int64_t *begin =
        readers.begin + nsa__cuda_place_in(readers.entries, at) + key / params.block;
    const int32_t *queries = readers.query + nsa__cuda_place_in(readers.readers, at);
    const int64_t row = nsa__cuda_listed_key_row(params, at.seq, at.b) + key;
    float k[8] = {}, dk[8] = {};
    if (c < params.at.d.dim)
        nsa__load8(k, params.x.k.dtype, nsa__row_at(params.x.k, at.seq.key_batch, row, at.kv_head),
                   c);
    for (int64_t base = begin[0]; base < begin[1]; base += 32) {
        nsa__cuda_listed_reader mine = {0, 0, {0.0f, false}, false};
        if (base + lane < begin[1])
            mine = nsa__cuda_listed_reader_of(params, at, key, queries[base + lane]);
        for (unsigned all = __ballot_sync(0xffffffffu, mine.there); all; all &= all - 1) {
            const int of = __ffs(static_cast<int>(all)) - 1;
            nsa__cuda_listed_reader r;
            r.query = __shfl_sync(0xffffffffu, mine.query, of);
            r.list = __shfl_sync(0xffffffffu, mine.list, of);
            r.gradient.each = __shfl_sync(0xffffffffu, mine.gradient.each, of);
            r.gradient.bad = __shfl_sync(0xffffffffu, static_cast<int>(mine.gradient.bad), of);
            r.there = true;
            nsa__cuda_listed_add(dk, k, params, at, r);
        }
    }
    if (c < params.at.d.dim)
        nsa__add8(params.dx.k.dtype, nsa__row_at(params.dx.k, at.seq.key_batch, row, at.kv_head), c,
                  1.0f, dk);
}

/* ---- Calls --------------------------------------------------------------------------------- */

static nsa__cuda_listed_params nsa__cuda_listed_plan(const nsa_desc *d, bool backward,
                                                     nsa__arena *arena) {
    nsa__cuda_listed_params p;
    memset(&p, 0, sizeof p);
    nsa__cuda_attend_plan(&p.at, d, NSA__KEYS_SLC, arena);
    p.backward = backward;
    p.block = d->slc_block / d->cmp_stride;
    p.rows = nsa__cuda_query_extent_of(d, d->count, 1, 1, 0);
    p.cmp_begins = nsa__cuda_score_begins(d, arena);
    if (!backward) return p;
    nsa__cuda_plan_readers(&p.at, d->count, arena);
    nsa__cuda_plan_reader_parts(&p.at, INT32_MAX);
    p.best = nsa__cuda_take<int32_t>(arena, p.rows.total * nsa__list_heads(d) * p.at.list_width);
    return p;
}

/* For keys of one token, whose blocks have most. */
static size_t nsa__cuda_listed_bytes(const nsa_desc *d, bool backward) {
    nsa_desc own;
    nsa__arena arena = nsa__cuda_arena_at(NULL);
    d = nsa__desc_using(d, NSA__USES_SLC, &own);
    if (nsa__cuda_check_desc(d) != NSA_OK || (backward && d->pages)) return 0;
    nsa__cuda_listed_plan(d, backward, &arena);
    return nsa__cuda_arena_bytes(&arena);
}

static nsa_status nsa__cuda_listed_launch(nsa__cuda_listed_params *p, cudaStream_t stream) {
    const nsa_desc *d = &p->at.d;
    dim3 grid;
    if (p->at.ascending) {
        NSA__CHECK(nsa__cuda_status(NSA_LAUNCH(nsa__cuda_ascending_kernel, dim3(1), dim3(32), 0,
                                               stream, *d, p->at.ascending)));
        p->at.d.begins = p->at.ascending;
    }
    if (d->begins && d->cmp_stride > 1) NSA__CHECK(nsa__cuda_cmp_begins(d, p->cmp_begins, stream));
    NSA__CHECK(nsa__cuda_grid(p->rows.total * d->kv_heads * p->at.lists, &grid));
    NSA__CHECK(nsa__cuda_status(
        NSA_LAUNCH(nsa__cuda_listed_kernel, grid, dim3(NSA__LISTED_THREADS), 0, stream, *p)));
    if (!p->backward || !p->dx.k.data || d->tokens < d->cmp_stride) return NSA_OK;
    NSA__CHECK(nsa__cuda_invert_lists(&p->at, stream));
    const nsa__cuda_extent tiles =
        nsa__cuda_extent_of(d, nsa__cuda_ceil_div(nsa_cmp_count(d, d->tokens), NSA__LISTED_WARPS),
                            1, static_cast<int64_t>(NSA__LISTED_WARPS) * d->cmp_stride, 1);
    NSA__CHECK(nsa__cuda_attend_grid(&p->at, tiles, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_listed_keys_kernel, grid,
                                       dim3(32 * NSA__LISTED_WARPS), 0, stream, *p));
}

struct nsa__cuda_room {
    void *memory;
    size_t bytes;
};

static nsa_status nsa__cuda_listed_run(const nsa_score *dx, const nsa_score *x, const nsa_desc *d,
                                       bool backward, nsa__cuda_room room, cudaStream_t stream) {
    nsa_desc own;
    NSA__CHECK(nsa__score_options(x, NSA__USES_SLC, &d, &own));
    const nsa__checked c =
        nsa__cuda_checked_of(d, nsa__cuda_dtype_of(&x->q, d), !backward, x->stride > 1);
    NSA__CHECK(nsa__check_call(&c, nsa__listed_views, NSA__SCORE_VIEWS, dx, x));
    NSA__CHECK(
        nsa__cuda_check_workspace(nsa__cuda_listed_bytes(d, backward), room.memory, room.bytes));
    if (d->count == 0) return NSA_OK;
    nsa__arena arena = nsa__cuda_arena_at(room.memory);
    nsa__cuda_listed_params p = nsa__cuda_listed_plan(d, backward, &arena);
    p.x = *x;
    p.at.x.blocks = x->blocks;
    if (backward) p.dx = *dx;
    return nsa__cuda_listed_launch(&p, stream);
}

extern "C" size_t nsa_cuda_score_blocks_forward_workspace_size(const nsa_desc *d) {
    return nsa__cuda_listed_bytes(d, false);
}
extern "C" nsa_status nsa_cuda_score_blocks_forward(const nsa_score *x, const nsa_desc *d,
                                                    void *workspace, size_t bytes,
                                                    cudaStream_t stream) {
    return nsa__cuda_listed_run(NULL, x, d, false, {workspace, bytes}, stream);
}
extern "C" size_t nsa_cuda_score_blocks_backward_workspace_size(const nsa_desc *d) {
    return nsa__cuda_listed_bytes(d, true);
}
extern "C" nsa_status nsa_cuda_score_blocks_backward(const nsa_score *dx, const nsa_score *x,
                                                     const nsa_desc *d, void *workspace,
                                                     size_t bytes, cudaStream_t stream) {
    return nsa__cuda_listed_run(dx, x, d, true, {workspace, bytes}, stream);
}

#endif

/* decode_cache.cuh: the decoding cache on the device: layout, appending rows, compressing what they
   complete, rewinding, forking.
   Twin: nsa.h, "Decoding", nsa_cache_size to nsa_cache_fork.
   Not here: attention from the cache (decode_attend.cuh), the step (decode.cuh).

   Lengths live on the device alone, so that a captured step can be replayed: the host knows how
   many tokens a step may bring, the device how many it brings. The first kernel of a step decides
   and leaves it as `positions`; refused, a step has no tokens and the kernels behind it nothing to
   do. */
#ifndef NSA_DECODE_CACHE_CUH
#define NSA_DECODE_CACHE_CUH

#include "attention.cuh"

enum { NSA__DECODE_THREADS = 128 };

/* Whether rows are finite, a bit for each key, as attention wants it: kept, because a step must not
   look at every key again. (B, Hk, words); of slc and win by token, of cmp by compressed row. */
struct nsa__cuda_cache_bits {
    uint64_t *slc, *win, *cmp;
    int words, cmp_words;
};

/* Sets every pointer of the cache and says where the bits are; with a base of NULL only counts. */
static nsa__cuda_cache_bits nsa__cuda_cache_lay_out(nsa_cache *c, nsa_dtype dtype, nsa__arena *a) {
    nsa__cache_part parts[NSA__PARTS];
    const nsa_desc *d = &c->desc;
    const int64_t pairs = static_cast<int64_t>(d->batch) * d->kv_heads;
    const int64_t element = static_cast<int64_t>(nsa__dtype_bytes(dtype));
    c->lengths = nsa__cuda_take<int32_t>(a, d->batch);
    c->newest = nsa__cuda_take<int32_t>(a, d->batch);
    nsa__cache_parts(c, parts);
    for (int i = 0; i < NSA__PARTS; i++) {
        nsa_tensor *x = parts[i].rows;
        *x = nsa_tensor_bthd(NULL, dtype, static_cast<int>(parts[i].count), d->kv_heads,
                             parts[i].width);
        x->data = nsa__cuda_take<char>(a, x->batch * d->batch * element);
    }
    nsa__cuda_cache_bits bits;
    bits.words = d->tokens / 64 + 2; /* a tile may straddle two words */
    bits.cmp_words = nsa_cmp_count(d, d->tokens) / 64 + 2;
    bits.slc = nsa__cuda_take<uint64_t>(a, pairs * bits.words);
    bits.win = nsa__cuda_take<uint64_t>(a, pairs * bits.words);
    bits.cmp = nsa__cuda_take<uint64_t>(a, pairs * bits.cmp_words);
    return bits;
}

/* The bits of a cache that was laid out: lengths are its first array. */
static nsa__cuda_cache_bits nsa__cuda_cache_bits_of(const nsa_cache *cache) {
    nsa_cache copy = *cache;
    nsa__arena a = nsa__cuda_arena_at(cache->lengths);
    return nsa__cuda_cache_lay_out(&copy, cache->k_slc.dtype, &a);
}

static nsa_status nsa__cuda_cache_check(const nsa_desc *d, nsa_dtype dtype, int max_rewind) {
    if (!d) return nsa__error(NSA_ERROR_NULL, NSA__AT_desc);
    nsa_desc room = *d;
    room.first = room.count = 0;
    room.begins = NULL;
    const nsa_status s = nsa__cuda_check_desc(&room);
    if (s != NSA_OK) return s;
    NSA__CHECK(nsa__check_decodes(d));
    if (!nsa__cuda_one_dtype(dtype)) return nsa__error(NSA_ERROR_DTYPE, NSA__AT_dtype);
    if (max_rewind < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_max_rewind);
    const int64_t rows = static_cast<int64_t>(d->batch) * d->kv_heads;
    return nsa__fits(rows, d->tokens, d->dim > d->dim_v ? d->dim : d->dim_v, 64)
               ? NSA_OK
               : nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
}

extern "C" size_t nsa_cuda_cache_size(const nsa_desc *d, nsa_dtype dtype, int max_rewind) {
    if (nsa__cuda_cache_check(d, dtype, max_rewind) != NSA_OK) return 0;
    nsa_cache cache;
    nsa__arena a = nsa__cuda_arena_at(NULL);
    cache.desc = *d;
    cache.max_rewind = max_rewind;
    nsa__cuda_cache_lay_out(&cache, dtype, &a);
    return nsa__cuda_arena_bytes(&a);
}

extern "C" nsa_status nsa_cuda_cache_init(nsa_cache *cache, const nsa_desc *d, nsa_dtype dtype,
                                          int max_rewind, void *memory, size_t bytes,
                                          cudaStream_t stream) {
    nsa_status s = nsa__cuda_cache_check(d, dtype, max_rewind);
    if (s != NSA_OK) return s;
    if (!cache) return nsa__error(NSA_ERROR_NULL, NSA__AT_cache);
    if (!memory || bytes < nsa_cuda_cache_size(d, dtype, max_rewind))
        return nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_memory);
    nsa__arena a = nsa__cuda_arena_at(memory);
    cache->desc = *d;
    cache->desc.first = cache->desc.count = 0;
    cache->desc.begins = NULL;
    cache->max_rewind = max_rewind;
    const nsa__cuda_cache_bits bits = nsa__cuda_cache_lay_out(cache, dtype, &a);
    const size_t pairs = static_cast<size_t>(d->batch) * static_cast<size_t>(d->kv_heads);
    const size_t words = pairs * sizeof(uint64_t);
    const struct {
        void *at;
        size_t bytes;
    } zeros[] = {{cache->lengths, static_cast<size_t>(d->batch) * sizeof(int32_t)},
                 {cache->newest, static_cast<size_t>(d->batch) * sizeof(int32_t)},
                 {bits.slc, words * static_cast<size_t>(bits.words)},
                 {bits.win, words * static_cast<size_t>(bits.words)},
                 {bits.cmp, words * static_cast<size_t>(bits.cmp_words)}};
    for (size_t i = 0; s == NSA_OK && i < sizeof zeros / sizeof *zeros; i++)
        s = nsa__cuda_status(nsa__memset(zeros[i].at, 0, zeros[i].bytes, stream));
    return s;
}

/* ---- Rewind and fork ------------------------------------------------------------------------ */

enum {
    NSA__REFUSED_REWIND = NSA_ERROR_REWIND | NSA__AT_length << 8,
    NSA__REFUSED_COUNTS = NSA_ERROR_RANGE | NSA__AT_counts << 8,
    NSA__REFUSED_CACHE = NSA_ERROR_CACHE | NSA__AT_cache << 8
};

/* Whether the rings still hold what leads to `length`. */
NSA__DEVICE bool nsa__cuda_cache_holds(int newest, int present, int max_rewind, int length) {
    return length <= present &&
           (length == 0 || length >= static_cast<int64_t>(newest) - max_rewind);
}

static __global__ void nsa__cuda_cache_rewind_kernel(nsa_cache cache, int sequence, int length,
                                                     nsa_status *verdict) {
    const bool holds = nsa__cuda_cache_holds(cache.newest[sequence], cache.lengths[sequence],
                                             cache.max_rewind, length);
    if (verdict) *verdict = holds ? 0 : static_cast<nsa_status>(NSA__REFUSED_REWIND);
    if (!holds) return;
    cache.lengths[sequence] = length;
    if (length == 0) cache.newest[sequence] = 0;
}

static nsa_status nsa__cuda_check_length(const nsa_cache *cache, int sequence, int length) {
    if (!cache) return nsa__error(NSA_ERROR_NULL, NSA__AT_cache);
    if (sequence < 0 || sequence >= cache->desc.batch)
        return nsa__error(NSA_ERROR_RANGE, NSA__AT_sequence);
    return length < 0 || length > cache->desc.tokens ? nsa__error(NSA_ERROR_REWIND, NSA__AT_length)
                                                     : NSA_OK;
}

extern "C" nsa_status nsa_cuda_cache_rewind(nsa_cache *cache, int sequence, int length,
                                            nsa_status *verdict, cudaStream_t stream) {
    const nsa_status s = nsa__cuda_check_length(cache, sequence, length);
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_cache_rewind_kernel, dim3(1), dim3(1), 0, stream,
                                       *cache, sequence, length, verdict));
}

/* Pieces of memory: `rows` rows of so many words of 8 bytes. */
struct nsa__cuda_cache_copy {
    const uint64_t *from;
    uint64_t *to;
    int64_t words, rows, from_stride, to_stride;
};
struct nsa__cuda_cache_copies {
    nsa__cuda_cache_copy of[NSA__PARTS + 3];
};

static __global__ void nsa__cuda_cache_fork_kernel(nsa_cache from, int from_sequence, int length,
                                                   nsa__cuda_cache_copies copies) {
    const nsa__cuda_cache_copy copy = copies.of[blockIdx.y];
    if (!nsa__cuda_cache_holds(from.newest[from_sequence], from.lengths[from_sequence],
                               from.max_rewind, length))
        return;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
         i < copy.words * copy.rows; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const int64_t row = i / copy.words, word = i % copy.words;
        copy.to[row * copy.to_stride + word] = copy.from[row * copy.from_stride + word];
    }
}

static __global__ void nsa__cuda_cache_forked_kernel(nsa_cache to, int to_sequence, nsa_cache from,
                                                     int from_sequence, int length,
                                                     nsa_status *verdict) {
    const int newest = from.newest[from_sequence];
    const bool holds =
        nsa__cuda_cache_holds(newest, from.lengths[from_sequence], from.max_rewind, length);
    if (verdict) *verdict = holds ? 0 : static_cast<nsa_status>(NSA__REFUSED_REWIND);
    if (!holds) return;
    to.newest[to_sequence] = length ? newest : 0;
    to.lengths[to_sequence] = length;
}

/* What makes a sequence the copy of another's first `length` tokens. */
static nsa__cuda_cache_copies nsa__cuda_cache_copies_of(nsa_cache *to, int to_sequence,
                                                        const nsa_cache *from, int from_sequence,
                                                        int length) {
    nsa__cuda_cache_copies copies;
    nsa__cache_part source[NSA__PARTS], target[NSA__PARTS];
    nsa_cache copy = *from;
    nsa__cache_parts(&copy, source);
    nsa__cache_parts(to, target);
    const int cmp = nsa_cmp_count(&from->desc, length);
    for (int i = 0; i < NSA__PARTS; i++) {
        const nsa_tensor *x = source[i].rows, *y = target[i].rows;
        const int64_t rows = source[i].ring ? source[i].count : i < NSA__INPUTS ? length : cmp;
        const int64_t element = static_cast<int64_t>(nsa__dtype_bytes(x->dtype));
        copies.of[i] = {reinterpret_cast<const uint64_t *>(static_cast<const char *>(x->data) +
                                                           x->batch * from_sequence * element),
                        reinterpret_cast<uint64_t *>(static_cast<char *>(y->data) +
                                                     y->batch * to_sequence * element),
                        rows * x->token * element / 8,
                        1,
                        0,
                        0};
    }
    const nsa__cuda_cache_bits a = nsa__cuda_cache_bits_of(from), b = nsa__cuda_cache_bits_of(to);
    const int64_t heads = from->desc.kv_heads;
    const struct {
        const uint64_t *from;
        uint64_t *to;
        int64_t from_words, to_words;
    } bits[3] = {{a.slc, b.slc, a.words, b.words},
                 {a.win, b.win, a.words, b.words},
                 {a.cmp, b.cmp, a.cmp_words, b.cmp_words}};
    for (int i = 0; i < 3; i++)
        copies.of[NSA__PARTS + i] = {bits[i].from + from_sequence * heads * bits[i].from_words,
                                     bits[i].to + to_sequence * heads * bits[i].to_words,
                                     bits[i].from_words < bits[i].to_words ? bits[i].from_words
                                                                           : bits[i].to_words,
                                     heads,
                                     bits[i].from_words,
                                     bits[i].to_words};
    return copies;
}

extern "C" nsa_status nsa_cuda_cache_fork(nsa_cache *to, int to_sequence, const nsa_cache *from,
                                          int from_sequence, int length, nsa_status *verdict,
                                          cudaStream_t stream) {
    nsa_status s = nsa__cuda_check_length(from, from_sequence, length);
    if (s != NSA_OK) return s;
    NSA__CHECK(nsa__cuda_check_length(to, to_sequence, 0));
    if (!nsa__same_geometry(to, from) || length > to->desc.tokens)
        return nsa__error(NSA_ERROR_CACHE, NSA__AT_cache);
    if (to->lengths + to_sequence != from->lengths + from_sequence)
        s = nsa__cuda_status(
            NSA_LAUNCH(nsa__cuda_cache_fork_kernel, dim3(64, NSA__PARTS + 3),
                       dim3(NSA__DECODE_THREADS), 0, stream, *from, from_sequence, length,
                       nsa__cuda_cache_copies_of(to, to_sequence, from, from_sequence, length)));
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_cache_forked_kernel, dim3(1), dim3(1), 0, stream,
                                       *to, to_sequence, *from, from_sequence, length, verdict));
}

/* ---- A step: positions ---------------------------------------------------------------------- */

/* What a step knows of its sequences, on the device. Blocks that it completes are compressed from
   a copy of their rows that has no ring: packed sequences, as compress.cuh takes them. */
struct nsa__cuda_decode_step {
    int2 *positions;     /* B: tokens present before, new tokens; all 0 where the step is refused */
    int32_t *begins;     /* B + 1: where a sequence's rows begin in the copy */
    int32_t *cmp_begins; /* B + 1: likewise its compressed rows */
};

/* Compressed blocks of a sequence before a step, and how many the step completes. */
struct nsa__cuda_new_blocks {
    int first, count;
};

NSA__DEVICE nsa__cuda_new_blocks nsa__cuda_new_blocks_of(const nsa_desc &d, int2 position) {
    const int first = nsa__cmp_count(d, position.x);
    return {first, nsa__cmp_count(d, position.x + position.y) - first};
}

/* Why the sequence cannot take its new tokens; 0: it can. */
NSA__DEVICE nsa_status nsa__cuda_refusal(const nsa_cache &cache, int b, int more, int most) {
    if (more < 0 || more > most) return NSA__REFUSED_COUNTS;
    if (static_cast<int64_t>(cache.lengths[b]) + more > cache.desc.tokens ||
        more - 1 > cache.max_rewind)
        return NSA__REFUSED_CACHE;
    return NSA_OK;
}

/* The first refusal of any sequence, which is the step's; by each warp on its own. */
NSA__DEVICE nsa_status nsa__cuda_step_refusal(const nsa_cache &cache, int count,
                                              const int32_t *counts) {
    const int lane = static_cast<int>(threadIdx.x) % 32, batch = cache.desc.batch;
    for (int base = 0; base < batch; base += 32) {
        const int b = min(base + lane, batch - 1);
        const nsa_status mine = nsa__cuda_refusal(cache, b, counts ? counts[b] : count, count);
        const unsigned found = __ballot_sync(0xffffffffu, mine != 0);
        if (found) return __shfl_sync(0xffffffffu, mine, __ffs(static_cast<int>(found)) - 1);
    }
    return NSA_OK;
}

NSA__DEVICE int2 nsa__cuda_step_position(const nsa_cache &cache, int b, int count,
                                         const int32_t *counts, nsa_status refused) {
    return refused ? make_int2(0, 0) : make_int2(cache.lengths[b], counts ? counts[b] : count);
}

/* Positions, begins and zeroed reads, for the kernels behind. By one warp. */
NSA__DEVICE void nsa__cuda_step_positions(const nsa_cache &cache, int count, const int32_t *counts,
                                          nsa_status refused, const nsa__cuda_decode_step &step,
                                          nsa_reads *reads) {
    const int lane = static_cast<int>(threadIdx.x), batch = cache.desc.batch;
    const nsa_desc &d = cache.desc;
    int rows = 0, blocks = 0;
    for (int base = 0; base < batch; base += 32) {
        const int b = base + lane;
        int2 position = make_int2(0, 0);
        if (b < batch) position = nsa__cuda_step_position(cache, b, count, counts, refused);
        const int made = nsa__cuda_new_blocks_of(d, position).count;
        const int staged = made ? (made - 1) * d.cmp_stride + d.cmp_block : 0;
        const int rows_end = rows + nsa__cuda_inclusive_sum(staged);
        const int blocks_end = blocks + nsa__cuda_inclusive_sum(made);
        if (b < batch) {
            step.positions[b] = position;
            step.begins[b + 1] = rows_end;
            step.cmp_begins[b + 1] = blocks_end;
            if (reads && !refused) reads[b].cmp = reads[b].slc = reads[b].win = 0;
        }
        rows = __shfl_sync(0xffffffffu, rows_end, 31);
        blocks = __shfl_sync(0xffffffffu, blocks_end, 31);
    }
    if (lane == 0) step.begins[0] = step.cmp_begins[0] = 0;
}

/* ---- A step: rows --------------------------------------------------------------------------- */

NSA__DEVICE int nsa__cuda_ring_row(int64_t token, int ring) {
    return static_cast<int>(ring ? token % ring : token);
}

/* Rows of k and of v that a step adds to the cache, and where it says which are finite. */
struct nsa__cuda_new_rows {
    nsa_tensor to[2];
    int ring;
    uint64_t *bits; /* NULL: nobody asks */
    int words;
};

/* New rows begin .. end - 1 of one kv head, those of the block's word of 64, a warp to a row:
   make(which, key, c, value) makes eight elements. Bits of older keys stay. By a block, which
   shares `bad`. */
template <typename Make>
NSA__DEVICE void nsa__cuda_decode_put(const nsa_desc &d, const nsa__cuda_new_rows &rows, int pair,
                                      int begin, int end, unsigned (&bad)[2], Make make) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int b = pair / d.kv_heads, head = pair % d.kv_heads;
    const int word = begin / 64 + static_cast<int>(blockIdx.x) / (d.batch * d.kv_heads);
    const int first = max(begin, 64 * word), last = min(end, 64 * word + 64);
    if (first >= last) return;
    if (thread < 2) bad[thread] = 0;
    __syncthreads();
    const int of_k = d.dim / 8, pieces = of_k + d.dim_v / 8;
    for (int key = first + thread / 32; key < last; key += NSA__DECODE_THREADS / 32) {
        const int row = nsa__cuda_ring_row(key, rows.ring);
        bool finite = true;
        for (int piece = lane; piece < pieces; piece += 32) {
            const int which = piece >= of_k, c = (piece - which * of_k) * 8;
            void *const to = nsa__row_at(rows.to[which], b, row, head);
            float value[8];
            make(which, key, c, value);
            nsa__store8(rows.to[which].dtype, to, c, value);
            finite &= nsa__cuda_piece_finite(rows.to[which].dtype, to, c); /* once rounded */
        }
        if (!__all_sync(0xffffffffu, finite) && lane == 0)
            atomicOr(&bad[key / 32 % 2], 1u << key % 32);
    }
    __syncthreads();
    if (thread > 0 || !rows.bits) return;
    uint64_t *const to = rows.bits + static_cast<int64_t>(pair) * rows.words + word;
    const uint64_t older = first > 64 * word ? (uint64_t(1) << (first - 64 * word)) - 1 : 0;
    *to = (*to & older) | static_cast<uint64_t>(bad[1]) << 32 | bad[0];
}

/* Blocks of threads for a word of the new keys of each sequence and kv head. */
static nsa_status nsa__cuda_decode_put_grid(const nsa_desc *d, int count, int kinds, dim3 *grid) {
    const int64_t words = count > 0 ? (count - 1) / 64 + 2 : 1;
    const nsa_status s = nsa__cuda_grid(words * d->batch * static_cast<int64_t>(d->kv_heads), grid);
    grid->y = static_cast<unsigned>(kinds);
    return s;
}

/* What a step brings: k and v of slc, of win and of the rows that phi still needs. */
struct nsa__cuda_decode_inputs {
    struct {
        nsa_tensor from[2];
        nsa__cuda_new_rows rows;
    } of[NSA__INPUTS / 2];
};

/* The first kernel of a step: whether it is refused, its positions, its rows into the cache. Only
   the last kernel changes lengths, so all blocks of this one find the same. */
static __global__ void
nsa__cuda_decode_append_kernel(const NSA_GRID_CONSTANT nsa_cache cache,
                               const NSA_GRID_CONSTANT nsa__cuda_decode_inputs inputs, int count,
                               const int32_t *counts, nsa__cuda_decode_step step, nsa_reads *reads,
                               nsa_status *verdict) {
    NSA_SHARED(unsigned, bad, [2]);
    const nsa_desc &d = cache.desc;
    const auto &input = inputs.of[blockIdx.y];
    const int pair = static_cast<int>(blockIdx.x) % (d.batch * d.kv_heads);
    const int b = pair / d.kv_heads, head = pair % d.kv_heads;
    const nsa_status refused = nsa__cuda_step_refusal(cache, count, counts);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 32) {
        nsa__cuda_step_positions(cache, count, counts, refused, step, reads);
        if (verdict && threadIdx.x == 0) *verdict = refused;
    }
    const int2 position = nsa__cuda_step_position(cache, b, count, counts, refused);
    nsa__cuda_decode_put(d, input.rows, pair, position.x, position.x + position.y, bad,
                         [&](int which, int key, int c, float(&value)[8]) {
                             const nsa_tensor &from = input.from[which];
                             nsa__load8(value, from.dtype,
                                        nsa__row_at(from, b, key - position.x, head), c);
                         });
}

/* ---- A step: compressed rows ---------------------------------------------------------------- */

/* Eight elements of one of `rows` rows of every sequence and kv head. */
struct nsa__cuda_decode_place {
    int b, row, head, c;
};

NSA__DEVICE nsa__cuda_decode_place nsa__cuda_decode_place_of(const nsa_desc &d, int width) {
    const int units = width / 8, blocks = static_cast<int>(gridDim.x) / d.batch;
    const int64_t item = static_cast<int64_t>(blockIdx.x % blocks) * blockDim.x + threadIdx.x;
    nsa__cuda_decode_place p;
    p.b = static_cast<int>(blockIdx.x) / blocks;
    p.c = static_cast<int>(item % units) * 8;
    p.head = static_cast<int>(item / units % d.kv_heads);
    p.row = static_cast<int>(item / units / d.kv_heads);
    return p;
}

static nsa_status nsa__cuda_decode_rows_grid(const nsa_desc *d, int64_t rows, int width,
                                             dim3 *grid) {
    return nsa__cuda_grid(
        d->batch * nsa__cuda_ceil_div(rows * d->kv_heads * (width / 8), NSA__DECODE_THREADS), grid);
}

/* The raw rows of the blocks that a step completes, out of the ring into packed sequences, which
   mlp wants. */
static __global__ void nsa__cuda_decode_stage_kernel(nsa_desc d, nsa_tensor from, nsa_tensor to,
                                                     int width, int ring,
                                                     nsa__cuda_decode_step step) {
    const nsa__cuda_decode_place p = nsa__cuda_decode_place_of(d, width);
    const int begin = step.begins[p.b];
    if (p.row >= step.begins[p.b + 1] - begin) return;
    const int64_t token =
        static_cast<int64_t>(nsa__cuda_new_blocks_of(d, step.positions[p.b]).first) * d.cmp_stride +
        p.row;
    float value[8];
    nsa__load8(value, from.dtype, nsa__row_at(from, p.b, nsa__cuda_ring_row(token, ring), p.head),
               p.c);
    nsa__store8(to.dtype, nsa__row_at(to, 0, begin + p.row, p.head), p.c, value);
}

/* Where new compressed rows of k and v come from: phi over the ring or, of mlp, what it made. */
struct nsa__cuda_decode_made {
    nsa_compress phi[2]; /* of mlp: `out` is packed */
    int ring;
    nsa__cuda_new_rows rows;
};

static __global__ void
nsa__cuda_decode_blocks_kernel(nsa_desc d, const NSA_GRID_CONSTANT nsa__cuda_decode_made made,
                               nsa__cuda_decode_step step) {
    NSA_SHARED(unsigned, bad, [2]);
    const int pair = static_cast<int>(blockIdx.x) % (d.batch * d.kv_heads);
    const int b = pair / d.kv_heads, head = pair % d.kv_heads;
    const nsa__cuda_new_blocks blocks = nsa__cuda_new_blocks_of(d, step.positions[b]);
    nsa__cuda_decode_put(
        d, made.rows, pair, blocks.first, blocks.first + blocks.count, bad,
        [&](int which, int key, int c, float(&value)[8]) {
            const nsa_compress &x = made.phi[which];
            if (x.phi == NSA_PHI_MLP) {
                const int row = step.cmp_begins[b] + key - blocks.first;
                nsa__load8(value, x.out.dtype, nsa__row_at(x.out, 0, row, head), c);
                return;
            }
            const int64_t first = static_cast<int64_t>(key) * d.cmp_stride;
            nsa__cuda_filter_row(value, d, x, head, c, [&](int j) {
                return nsa__row_at(x.x, b, nsa__cuda_ring_row(first + j, made.ring), head);
            });
        });
}

#endif

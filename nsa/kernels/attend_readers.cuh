/* attend_readers.cuh: block lists inverted: which queries read each block.
   Twin: nsa.h, nsa_attend_slc_backward. A counting sort over chunks of queries: each chunk counts
   its readers of every block, prefix sums make offsets of the counts, each chunk writes its readers
   there. Nothing is atomic, so the readers of a block always ascend.
   Not here: the kernels that use them (attend_slc_scheduler.cuh, attend_backward.cuh). */
#ifndef NSA_ATTEND_READERS_CUH
#define NSA_ATTEND_READERS_CUH

#include "attend_mainloop.cuh"

/* Rows that one block of threads works through before others share the readers of a selection
   block, and warps that share the queries of a sequence; tests define them small. */
#ifndef NSA__SLC_PART_ROWS
#define NSA__SLC_PART_ROWS 32768
#endif
#ifndef NSA__READERS_CHUNKS
#define NSA__READERS_CHUNKS 512
#endif
enum { NSA__READERS_COLUMNS = 128 };

NSA__DEVICE int nsa__cuda_inclusive_max(int x) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x = max(x, left);
    }
    return x;
}

template <typename T> NSA__DEVICE T nsa__cuda_inclusive_sum(T x) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T left = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += left;
    }
    return x;
}

/* A lane's entry of a list if it counts, as nsa__cuda_walk_keys says: a candidate (at most `last`),
   greater than all before it; else -1. `most` goes on to the next 32 entries. */
NSA__DEVICE int nsa__cuda_listed(int entry, int last, int &most) {
    const int top = nsa__cuda_inclusive_max(entry <= last ? entry : -1);
    const int left = __shfl_up_sync(0xffffffffu, top, 1);
    const int before = threadIdx.x % 32 ? max(most, left) : most;
    most = max(most, __shfl_sync(0xffffffffu, top, 31));
    return entry <= last && entry > before ? entry : -1;
}

/* What chunk `chunk` of the queries counts, block by block. */
NSA__DEVICE int32_t *nsa__cuda_reader_counts(const nsa__cuda_attend_params &params,
                                             const nsa__cuda_attend_head &at, int chunk) {
    const nsa__cuda_block_readers &r = params.readers;
    const int64_t line = static_cast<int64_t>(at.kv_head) * (r.chunks + 1) + chunk;
    return r.counts + line * r.entries.total + nsa__cuda_place_of(r.entries, at.b, at.seq);
}

/* A warp takes a chunk of queries, one after the other, a lane to a list entry. place false: counts
   the readers of every block; true: puts them where the counts, by now places, say. Blocks of one
   list differ, so that lanes never meet. */
static __global__ void nsa__cuda_readers_kernel(nsa__cuda_attend_params params, bool place) {
    const nsa__cuda_attend_head at = nsa__cuda_attend_head_of(params, blockIdx.x);
    const nsa__cuda_block_readers &r = params.readers;
    const int lane = static_cast<int>(threadIdx.x),
              size = (params.d.count + r.chunks - 1) / r.chunks;
    const int64_t *begin = r.begin + nsa__cuda_place_in(r.entries, at);
    int32_t *counts = nsa__cuda_reader_counts(params, at, at.tile);
    int32_t *const queries = r.query + nsa__cuda_place_in(r.readers, at);
    if (!place)
        for (int j = lane; j < nsa__slc_count(params.d, at.seq.tokens); j += 32) counts[j] = 0;
    __syncwarp();
    const int first = at.seq.first + at.tile * size;
    const int end = min(first + size, at.seq.first + at.seq.count);
    for (int reader = first * params.lists; reader < end * params.lists; reader++) {
        const nsa__cuda_reader of = nsa__cuda_reader_of(params, reader);
        const int32_t *list =
            nsa__cuda_query_at<const int32_t>(params.x.blocks, at, of.query, at.list + of.list);
        const int last = nsa__cuda_last_block(params, at.seq.tokens, of.query);
        int most = -1;
        for (int slot = lane; slot - lane < params.list_width; slot += 32) {
            const int entry = slot < params.list_width ? list[slot] : -1;
            const int j = nsa__cuda_listed(entry, last, most);
            if (j >= 0) {
                if (place) queries[begin[j] + counts[j]] = reader;
                counts[j]++;
            }
            __syncwarp(); /* the next entry of this block is another lane's */
        }
    }
}

/* Counts of a block become the places of its chunks, their sum stands behind them. */
static __global__ void nsa__cuda_readers_columns_kernel(nsa__cuda_attend_params params) {
    const nsa__cuda_attend_head at = nsa__cuda_attend_head_of(params, blockIdx.x);
    const nsa__cuda_block_readers &r = params.readers;
    const int j = at.tile * NSA__READERS_COLUMNS + static_cast<int>(threadIdx.x);
    if (j >= nsa__slc_count(params.d, at.seq.tokens)) return;
    int32_t *count = nsa__cuda_reader_counts(params, at, 0) + j;
    int sum = 0, chunk = 0;
    for (; chunk + 8 <= r.chunks; chunk += 8) { /* eight loads at a time, which wait together */
        int n[8];
#pragma unroll
        for (int i = 0; i < 8; i++) n[i] = count[i * r.entries.total];
#pragma unroll
        for (int i = 0; i < 8; i++, count += r.entries.total) {
            *count = sum;
            sum += n[i];
        }
    }
    for (; chunk < r.chunks; chunk++, count += r.entries.total) {
        const int n = *count;
        *count = sum;
        sum += n;
    }
    *count = sum;
}

/* One warp: where the readers, the parts and the slots for partial sums of each block begin. */
static __global__ void nsa__cuda_readers_begins_kernel(nsa__cuda_attend_params params) {
    const nsa__cuda_attend_head at = nsa__cuda_attend_head_of(params, blockIdx.x);
    const nsa__cuda_block_readers &r = params.readers;
    const int64_t entry = nsa__cuda_place_in(r.entries, at);
    const int32_t *sums = nsa__cuda_reader_counts(params, at, r.chunks);
    const int blocks = nsa__slc_count(params.d, at.seq.tokens);
    int64_t readers = 0, parts = 0, slots = 0;
    for (int first = 0; first < blocks; first += 32) {
        const int j = first + static_cast<int>(threadIdx.x);
        const int n = j < blocks ? sums[j] : 0, n_parts = n / r.part + (n % r.part > 0);
        const int64_t readers_end = readers + nsa__cuda_inclusive_sum<int64_t>(n);
        const int64_t parts_end = parts + nsa__cuda_inclusive_sum<int64_t>(n_parts);
        const int64_t slots_end =
            slots + nsa__cuda_inclusive_sum<int64_t>(n_parts > 1 ? n_parts : 0);
        if (j < blocks) {
            r.begin[entry + j + 1] = readers_end;
            r.part_begin[entry + j + 1] = static_cast<int32_t>(parts_end);
            r.slot_begin[entry + j + 1] = static_cast<int32_t>(slots_end);
        }
        readers = __shfl_sync(0xffffffffu, readers_end, 31);
        parts = __shfl_sync(0xffffffffu, parts_end, 31);
        slots = __shfl_sync(0xffffffffu, slots_end, 31);
    }
    if (threadIdx.x == 0) r.begin[entry] = r.part_begin[entry] = r.slot_begin[entry] = 0;
}

/* Room for the readers among `count` queries. A list has at most an entry for each block. */
static void nsa__cuda_plan_readers(nsa__cuda_attend_params *params, int count, nsa__arena *arena) {
    const nsa_desc *d = &params->d;
    nsa__cuda_block_readers *r = &params->readers;
    const int blocks = nsa_slc_count(d, d->tokens);
    r->chunks = count < NSA__READERS_CHUNKS ? count : NSA__READERS_CHUNKS;
    r->of_query = static_cast<int64_t>(params->lists) *
                  (params->list_width < blocks ? params->list_width : blocks);
    r->entries = nsa__cuda_extent_of(d, blocks + int64_t(1), 1, d->slc_block, 2);
    r->readers = nsa__cuda_query_extent_of(d, count * r->of_query, r->of_query, 1, 0);
    const int64_t entries = r->entries.total * d->kv_heads;
    r->begin = nsa__cuda_take<int64_t>(arena, entries);
    r->part_begin = nsa__cuda_take<int32_t>(arena, entries);
    r->slot_begin = nsa__cuda_take<int32_t>(arena, entries);
    r->query = nsa__cuda_take<int32_t>(arena, r->readers.total * d->kv_heads);
    r->counts = nsa__cuda_take<int32_t>(arena, (r->chunks + 1) * entries);
}

/* k parts of a block, k > 1, hold more than k - 1 whole ones, so that there are at most twice as
   many slots as whole parts. */
static void nsa__cuda_plan_reader_parts(nsa__cuda_attend_params *params, int part) {
    nsa__cuda_block_readers *r = &params->readers;
    r->part = part > 1 ? part : 1;
    r->slots = nsa__cuda_query_extent_of(&params->d, 2 * r->readers.each / r->part, 2 * r->of_query,
                                         r->part, 0);
}

/* `pieces` for every part of every block of a sequence. */
static nsa__cuda_extent nsa__cuda_reader_tiles(const nsa__cuda_attend_params *params,
                                               int64_t pieces) {
    const nsa__cuda_block_readers &r = params->readers;
    const nsa_desc *d = &params->d;
    return nsa__cuda_extent_of(d, pieces * (nsa_slc_count(d, d->tokens) + r.readers.each / r.part),
                               pieces * (r.part + r.of_query * d->slc_block),
                               static_cast<int64_t>(r.part) * d->slc_block,
                               static_cast<int>(pieces));
}

/* Where the parts of blocks that have more than one leave their sums. */
static void nsa__cuda_plan_slots(nsa__cuda_attend_params *params, nsa__arena *arena) {
    const nsa_desc *d = &params->d;
    if (params->readers.slots.total)
        params->partial_dkv = nsa__cuda_take<float>(
            arena, params->readers.slots.total * d->kv_heads * d->slc_block * (d->dim + d->dim_v));
}

static nsa_status nsa__cuda_invert_lists(const nsa__cuda_attend_params *params,
                                         cudaStream_t stream) {
    nsa__cuda_attend_params by_chunk = *params, by_column = *params, by_pair = *params;
    dim3 chunks, columns, pairs;
    const nsa_desc *d = &params->d;
    const int64_t chunks_of = params->readers.chunks;
    const nsa__cuda_extent of_sequence = {chunks_of, d->batch * chunks_of, 0, 1, 0, false, false};
    NSA__CHECK(nsa__cuda_attend_grid(&by_chunk, of_sequence, &chunks));
    NSA__CHECK(nsa__cuda_attend_grid(
        &by_column,
        nsa__cuda_extent_of(d,
                            nsa__cuda_ceil_div(nsa_slc_count(d, d->tokens), NSA__READERS_COLUMNS),
                            1, static_cast<int64_t>(d->slc_block) * NSA__READERS_COLUMNS, 1),
        &columns));
    NSA__CHECK(nsa__cuda_attend_grid(&by_pair, {1, d->batch, 0, 1, 0, false, false}, &pairs));
    NSA__CHECK(nsa__cuda_status(
        NSA_LAUNCH(nsa__cuda_readers_kernel, chunks, dim3(32), 0, stream, by_chunk, false)));
    NSA__CHECK(nsa__cuda_status(NSA_LAUNCH(nsa__cuda_readers_columns_kernel, columns,
                                           dim3(NSA__READERS_COLUMNS), 0, stream, by_column)));
    NSA__CHECK(nsa__cuda_status(
        NSA_LAUNCH(nsa__cuda_readers_begins_kernel, pairs, dim3(32), 0, stream, by_pair)));
    return nsa__cuda_status(
        NSA_LAUNCH(nsa__cuda_readers_kernel, chunks, dim3(32), 0, stream, by_chunk, true));
}

#endif

/* attend_readers.cuh: block lists inverted: which queries read each block.
   Twin: nsa.h, nsa_attend_slc_backward. A counting sort over chunks of queries: each chunk counts
   its readers of every block, prefix sums make offsets of the counts, each chunk writes its readers
   there. Nothing is atomic, so the readers of a block always ascend.
   Not here: the kernels that use them (attend_gather.cuh, attend_backward.cuh). */
#ifndef NSA_ATTEND_READERS_CUH
#define NSA_ATTEND_READERS_CUH

#include "attend_keys.cuh"

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

template <typename I> NSA__DEVICE I nsa__cuda_inclusive_sum(I x) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const I left = __shfl_up_sync(0xffffffffu, x, step);
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

/* A warp takes a chunk of queries, one after the other, a lane to a list entry. place false: counts
   the readers of every block; true: puts them where the counts, by now places, say. Blocks of one
   list differ, so that lanes never meet. */
static __global__ void nsa__cuda_readers_kernel(nsa__cuda_attend_params params, bool place) {
    const nsa__cuda_attend_head at = nsa__cuda_attend_head_of(params, blockIdx.x);
    const nsa__cuda_block_readers &r = params.readers;
    const int lane = static_cast<int>(threadIdx.x),
              size = (params.d.count + r.chunks - 1) / r.chunks;
    const int64_t pair = nsa__cuda_attend_pair(params, at);
    const int64_t *begin = r.begin + pair * (r.blocks + 1);
    int32_t *counts = r.counts + (pair * (r.chunks + 1) + at.tile) * r.blocks;
    if (!place)
        for (int j = lane; j < r.blocks; j += 32) counts[j] = 0;
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
                if (place) r.query[pair * r.max_readers + begin[j] + counts[j]] = reader;
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
    if (j >= r.blocks) return;
    int32_t *count = r.counts + nsa__cuda_attend_pair(params, at) * (r.chunks + 1) * r.blocks + j;
    int sum = 0, chunk = 0;
    for (; chunk + 8 <= r.chunks; chunk += 8) { /* eight loads at a time, which wait together */
        int n[8];
#pragma unroll
        for (int i = 0; i < 8; i++) n[i] = count[static_cast<int64_t>(i) * r.blocks];
#pragma unroll
        for (int i = 0; i < 8; i++, count += r.blocks) {
            *count = sum;
            sum += n[i];
        }
    }
    for (; chunk < r.chunks; chunk++, count += r.blocks) {
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
    const int64_t pair = nsa__cuda_attend_pair(params, at), entry = pair * (r.blocks + 1);
    const int32_t *sums = r.counts + (pair * (r.chunks + 1) + r.chunks) * r.blocks;
    int64_t readers = 0, parts = 0, slots = 0;
    for (int first = 0; first < r.blocks; first += 32) {
        const int j = first + static_cast<int>(threadIdx.x);
        const int n = j < r.blocks ? sums[j] : 0, n_parts = (n + r.part - 1) / r.part;
        const int64_t readers_end = readers + nsa__cuda_inclusive_sum<int64_t>(n);
        const int64_t parts_end = parts + nsa__cuda_inclusive_sum<int64_t>(n_parts);
        const int64_t slots_end =
            slots + nsa__cuda_inclusive_sum<int64_t>(n_parts > 1 ? n_parts : 0);
        if (j < r.blocks) {
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
static void nsa__cuda_plan_readers(nsa__cuda_attend_params *params, int count,
                                   nsa__cuda_arena *arena) {
    const nsa_desc *d = &params->d;
    nsa__cuda_block_readers *r = &params->readers;
    const int64_t pairs = static_cast<int64_t>(d->batch) * d->kv_heads;
    r->blocks = nsa_slc_count(d, d->tokens);
    r->chunks = count < NSA__READERS_CHUNKS ? count : NSA__READERS_CHUNKS;
    r->max_readers = static_cast<int64_t>(count) * params->lists *
                     (params->list_width < r->blocks ? params->list_width : r->blocks);
    r->begin = nsa__cuda_take<int64_t>(arena, pairs * (r->blocks + 1));
    r->part_begin = nsa__cuda_take<int32_t>(arena, pairs * (r->blocks + 1));
    r->slot_begin = nsa__cuda_take<int32_t>(arena, pairs * (r->blocks + 1));
    r->query = nsa__cuda_take<int32_t>(arena, pairs * r->max_readers);
    r->counts = nsa__cuda_take<int32_t>(arena, pairs * (r->chunks + 1) * r->blocks);
}

/* k parts of a block, k > 1, hold more than k - 1 whole ones, so that there are at most twice as
   many slots as whole parts. */
static void nsa__cuda_plan_reader_parts(nsa__cuda_attend_params *params, int part) {
    nsa__cuda_block_readers *r = &params->readers;
    r->part = part > 1 ? part : 1;
    r->max_parts = r->blocks + r->max_readers / r->part;
    r->max_slots = 2 * r->max_readers / r->part;
}

/* Where the parts of blocks that have more than one leave their sums. */
static void nsa__cuda_plan_slots(nsa__cuda_attend_params *params, nsa__cuda_arena *arena) {
    const nsa_desc *d = &params->d;
    if (params->readers.max_slots)
        params->partial_dkv = nsa__cuda_take<float>(
            arena, static_cast<int64_t>(d->batch) * d->kv_heads * params->readers.max_slots *
                       d->slc_block * (d->dim + d->dim_v));
}

static nsa_status nsa__cuda_invert_lists(const nsa__cuda_attend_params *params,
                                         cudaStream_t stream) {
    nsa__cuda_attend_params by_chunk = *params, by_column = *params, by_pair = *params;
    dim3 chunks, columns, pairs;
    NSA__CHECK(nsa__cuda_attend_grid(&by_chunk, params->readers.chunks, &chunks));
    NSA__CHECK(nsa__cuda_attend_grid(
        &by_column, nsa__cuda_ceil_div(params->readers.blocks, NSA__READERS_COLUMNS), &columns));
    NSA__CHECK(nsa__cuda_attend_grid(&by_pair, 1, &pairs));
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

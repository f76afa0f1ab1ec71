/* select_lists.cuh: block lists from elsewhere: ranking of given scores, the check, the normaliser.
   Twin: nsa.h, "Selection", nsa_rank_blocks, nsa_check_blocks, nsa_normalize_blocks.
   Not here: select_blocks itself. */
#ifndef NSA_SELECT_LISTS_CUH
#define NSA_SELECT_LISTS_CUH

#include "select_rank.cuh"

/* ---- Ranking alone --------------------------------------------------------------------------- */

enum { NSA__RANK_BEST = 1024 };

/* One warp. Where more are wanted than a list in shared memory holds, it is filled again with the
   next best; what counts in the end is the last of them: everything as good is taken. */
static __global__ void nsa__cuda_rank_blocks_kernel(nsa_desc d, const float *scores, int query,
                                                    int32_t *list, int width) {
    NSA_SHARED(uint64_t, best, [NSA__RANK_BEST]);
    const int lane = static_cast<int>(threadIdx.x);
    const nsa__cuda_forced_blocks f = nsa__cuda_forced_of(d, query);
    uint64_t least = ~uint64_t(0); /* the last one taken */
    for (int room = f.room; room > 0; room -= NSA__RANK_BEST) {
        const int length = min(room, static_cast<int>(NSA__RANK_BEST));
        for (int i = lane; i < length; i += 32) best[i] = 0;
        __syncwarp();
        for (int base = f.init; base < f.local; base += 32) {
            const int j = base + lane;
            uint64_t candidate = j < f.local ? nsa__cuda_candidate(scores[j], j) : 0;
            if (candidate >= least) candidate = 0;
            nsa__cuda_rank_offer(best, length, 0, length, candidate);
        }
        least = best[length - 1];
        __syncwarp();
    }
    int n = 0;
    for (int base = 0; base < f.candidates; base += 32) {
        const int j = base + lane;
        const bool forced = j < f.init || j >= f.local;
        const bool taken =
            j < f.candidates && (forced || nsa__cuda_candidate(scores[j], j) >= least);
        const unsigned all = __ballot_sync(0xffffffffu, taken);
        if (taken) list[n + __popc(all & ((1u << lane) - 1))] = j;
        n += __popc(all);
    }
    for (int i = n + lane; i < width; i += 32) list[i] = -1;
}

extern "C" nsa_status nsa_cuda_rank_blocks(const float *scores, int query, const nsa_desc *d,
                                           int32_t *list, cudaStream_t stream) {
    const nsa_status s = nsa__cuda_check_desc(d);
    if (s != NSA_OK) return s;
    if (!scores || !list)
        return nsa__error(NSA_ERROR_NULL, scores ? NSA__AT_blocks : NSA__AT_scores);
    if (query < 0 || query >= d->tokens) return nsa__error(NSA_ERROR_RANGE, NSA__AT_query);
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_rank_blocks_kernel, dim3(1), dim3(32), 0, stream,
                                       *d, scores, query, list, nsa_block_list_width(d)));
}

/* ---- What is wrong with lists ---------------------------------------------------------------- */

enum { NSA__FAULT_CANDIDATE = 1, NSA__FAULT_BEHIND, NSA__FAULT_TWICE, NSA__FAULT_ORDER };

extern "C" const char *nsa_cuda_block_reason(int reason) {
    static const char *const reasons[] = {"", "not a candidate of its query", "entry behind a -1",
                                          "duplicate", "not ascending"};
    return reason > 0 && reason <= NSA__FAULT_ORDER ? reasons[reason] : "";
}

/* The first slot of a list that breaks the form, and why; -1 for none. */
NSA__DEVICE int nsa__cuda_list_fault(const int32_t *list, int width, int candidates, int *reason) {
    for (int i = 0; i < width; i++) {
        *reason = list[i] < -1 || list[i] >= candidates ? NSA__FAULT_CANDIDATE : 0;
        if (i > 0 && list[i] >= 0) {
            if (list[i - 1] < 0)
                *reason = NSA__FAULT_BEHIND;
            else if (list[i - 1] == list[i])
                *reason = NSA__FAULT_TWICE;
            else if (list[i - 1] > list[i])
                *reason = NSA__FAULT_ORDER;
        }
        if (*reason) return i;
    }
    return -1;
}

enum { NSA__CHECK_THREADS = 1024, NSA__NORMALIZE_WARPS = 4 };

/* One block of threads, which goes through the lists in order and stops at the first fault. */
static __global__ void __launch_bounds__(NSA__CHECK_THREADS, 1)
    nsa__cuda_check_blocks_kernel(nsa_desc d, nsa_tensor blocks, int width,
                                  nsa_cuda_block_verdict *verdict) {
    NSA_SHARED(int, first, [1]);
    const int thread = static_cast<int>(threadIdx.x);
    nsa_cuda_block_verdict mine = {};
    bool found = false;
    for (int b = 0; b < d.batch && !found; b++) {
        const nsa__sequence s = nsa__sequence_of(d, b);
        const int64_t lists = static_cast<int64_t>(s.count) * d.kv_heads;
        for (int64_t base = 0; base < lists && !found; base += NSA__CHECK_THREADS) {
            const int64_t row = (base + thread) / d.kv_heads;
            const int head = static_cast<int>((base + thread) % d.kv_heads);
            const int query = s.first + static_cast<int>(row);
            int slot = -1;
            if (base + thread < lists) {
                const int32_t *list =
                    nsa__row_of<const int32_t>(blocks, s.batch, s.row + row, head);
                slot =
                    nsa__cuda_list_fault(list, width, nsa__slc_candidates(d, query), &mine.reason);
                if (slot >= 0) mine = {mine.reason, b, query, head, slot, list[slot]};
            }
            if (thread == 0) first[0] = NSA__CHECK_THREADS;
            found = __syncthreads_or(slot >= 0);
            if (slot >= 0) atomicMin(&first[0], thread);
            __syncthreads();
            if (found && first[0] == thread) *verdict = mine;
        }
    }
    if (!found && thread == 0) *verdict = nsa_cuda_block_verdict{};
}

/* Brings a list into the form, a warp for each: what is no candidate becomes the largest number,
   then neighbours are exchanged until all ascend, then what stands twice is left out. */
static __global__ void nsa__cuda_normalize_blocks_kernel(nsa_desc d, nsa_tensor blocks, int width,
                                                         int per_sequence) {
    const int warp = static_cast<int>(blockIdx.x) % per_sequence * NSA__NORMALIZE_WARPS +
                     static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32,
              b = static_cast<int>(blockIdx.x) / per_sequence;
    const nsa__sequence s = nsa__sequence_of(d, b);
    const int row = warp / d.kv_heads, candidates = nsa__slc_candidates(d, s.first + row);
    if (row >= s.count) return;
    int32_t *list = nsa__row_of<int32_t>(blocks, s.batch, s.row + row, warp % d.kv_heads);
    for (int i = lane; i < width; i += 32)
        if (list[i] < 0 || list[i] >= candidates) list[i] = INT32_MAX;
    __syncwarp();
    for (int round = 0; round < width; round++) {
        for (int i = round % 2 + 2 * lane; i + 1 < width; i += 64) {
            const int32_t low = min(list[i], list[i + 1]), high = max(list[i], list[i + 1]);
            list[i] = low;
            list[i + 1] = high;
        }
        __syncwarp();
    }
    int n = 0;
    for (int base = 0; base < width; base += 32) {
        const int i = base + lane;
        const int32_t block = i < width ? list[i] : INT32_MAX;
        const bool kept = block != INT32_MAX && (i == 0 || list[i - 1] != block);
        const unsigned all = __ballot_sync(0xffffffffu, kept);
        __syncwarp();
        if (kept) list[n + __popc(all & ((1u << lane) - 1))] = block;
        n += __popc(all);
        __syncwarp();
    }
    for (int i = n + lane; i < width; i += 32) list[i] = -1;
}

static nsa_status nsa__cuda_check_lists(const nsa_tensor *blocks, const nsa_desc *d, int writes) {
    const nsa_status s = nsa__cuda_check_desc(d);
    if (s != NSA_OK) return s;
    if (!blocks) return nsa__error(NSA_ERROR_NULL, NSA__AT_blocks);
    return nsa__check_view(blocks, nsa__cuda_query_shape(d, d->kv_heads, nsa_block_list_width(d)),
                           NSA__INTS, writes, NSA__AT_blocks);
}

extern "C" nsa_status nsa_cuda_check_blocks(const nsa_tensor *blocks, const nsa_desc *d,
                                            nsa_cuda_block_verdict *verdict, cudaStream_t stream) {
    const nsa_status s = nsa__cuda_check_lists(blocks, d, 0);
    if (s != NSA_OK) return s;
    if (!verdict) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_check_blocks_kernel, dim3(1),
                                       dim3(NSA__CHECK_THREADS), 0, stream, *d, *blocks,
                                       nsa_block_list_width(d), verdict));
}

extern "C" nsa_status nsa_cuda_normalize_blocks(const nsa_tensor *blocks, const nsa_desc *d,
                                                cudaStream_t stream) {
    nsa_status s = nsa__cuda_check_lists(blocks, d, 1);
    if (s != NSA_OK || d->count == 0) return s;
    const int64_t per_sequence =
        nsa__cuda_ceil_div(static_cast<int64_t>(d->count) * d->kv_heads, NSA__NORMALIZE_WARPS);
    dim3 grid;
    if ((s = nsa__cuda_grid(per_sequence * d->batch, &grid)) != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_normalize_blocks_kernel, grid,
                                       dim3(32 * NSA__NORMALIZE_WARPS), 0, stream, *d, *blocks,
                                       nsa_block_list_width(d), static_cast<int>(per_sequence)));
}

#endif

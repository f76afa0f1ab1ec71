/* select_lists.cuh: block lists from elsewhere: ranking of given scores, the check, the normaliser.
   Twin: nsa.h, "Selection", nsa_rank_blocks, nsa_rank_queries, nsa_check_blocks,
   nsa_normalize_blocks.
   Not here: select_blocks itself. */
#ifndef NSA_SELECT_LISTS_CUH
#define NSA_SELECT_LISTS_CUH

#include "select_rank.cuh"

/* ---- Ranking alone --------------------------------------------------------------------------- */

enum { NSA__RANK_THREADS = 256 }; /* one for each value of a digit of 8 bits */

/* What the ranking of a row keeps in shared memory. */
struct nsa__cuda_rank_memory {
    int bins[NSA__RANK_THREADS];
    int sums[NSA__RANK_THREADS / 32];     /* of warps */
    int taken[2][NSA__RANK_THREADS / 32]; /* sure ones and ties of warps, a turn and the next */
    int ties[2][NSA__RANK_THREADS / 32];
    uint32_t digit;
    int room;
};

/* Of scores whose key is above `key` all are taken, of those equal to it the first `ties`. */
struct nsa__cuda_rank_limit {
    uint32_t key;
    int ties;
};

/* Among bins counted from the last down: the one with the room-th entry, and the room that those
   above leave. By a block. */
NSA__DEVICE void nsa__cuda_rank_find_digit(nsa__cuda_rank_memory &m, int room) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int bin = NSA__RANK_THREADS - 1 - thread, count = m.bins[bin];
    int up_to = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(0xffffffffu, up_to, step);
        if (lane >= step) up_to += left;
    }
    if (lane == 31) m.sums[warp] = up_to;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < NSA__RANK_THREADS / 32; w++)
        if (w < warp) up_to += m.sums[w];
    const int above = up_to - count;
    if (above >= room || up_to < room) return;
    m.digit = static_cast<uint32_t>(bin);
    m.room = room - above;
}

/* The key of the room-th best of scores begin .. end - 1, 1 <= room <= end - begin, digit by digit
   from the highest: each pass counts the scores that agree in the digits before. */
NSA__DEVICE nsa__cuda_rank_limit nsa__cuda_rank_find(nsa__cuda_rank_memory &m, nsa_dtype dtype,
                                                     const void *scores, int begin, int end,
                                                     int room) {
    nsa__cuda_rank_limit limit = {0, room};
    uint32_t known = 0; /* the bits of the digits before */
    for (int shift = 24; shift >= 0; shift -= 8) {
        m.bins[threadIdx.x] = 0;
        __syncthreads();
        uint32_t digit = 0;
        int same = 0; /* many scores may be equal: those in a row are counted at once */
        for (int j = begin + static_cast<int>(threadIdx.x); j < end; j += NSA__RANK_THREADS) {
            const uint32_t key = nsa__cuda_score_key(nsa__load1(dtype, scores, j));
            const uint32_t of_key = key >> shift & 255;
            if ((key ^ limit.key) & known) continue;
            if (same && of_key != digit) {
                atomicAdd(&m.bins[digit], same);
                same = 0;
            }
            digit = of_key;
            same++;
        }
        if (same) atomicAdd(&m.bins[digit], same);
        __syncthreads();
        nsa__cuda_rank_find_digit(m, limit.ties);
        __syncthreads();
        limit.key |= m.digit << shift;
        limit.ties = m.room;
        known |= 255u << shift;
    }
    return limit;
}

/* Ranks one row of scores into one list: forced blocks and the best of the rest, ascending, -1
   behind the last. By a block. */
NSA__DEVICE void nsa__cuda_rank_row(nsa__cuda_rank_memory &m, nsa_dtype dtype, const void *scores,
                                    const nsa__cuda_forced_blocks &f, int32_t *list, int width) {
    constexpr int WARPS = NSA__RANK_THREADS / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const bool chooses = f.room > 0 && f.room < f.local - f.init; /* else all of the rest or none */
    nsa__cuda_rank_limit limit = {0, max(f.room, 0)};
    if (chooses) limit = nsa__cuda_rank_find(m, dtype, scores, f.init, f.local, f.room);
    int taken = 0, ties = 0; /* of the turns before: without a tie, and ties */
    for (int base = 0, turn = 0; base < f.candidates; base += NSA__RANK_THREADS, turn ^= 1) {
        const int j = base + static_cast<int>(threadIdx.x);
        bool sure = j < f.init || (j >= f.local && j < f.candidates), tie = false;
        if (j >= f.init && j < f.local) {
            const uint32_t key =
                chooses ? nsa__cuda_score_key(nsa__load1(dtype, scores, j)) : limit.key;
            sure = key > limit.key;
            tie = key == limit.key;
        }
        const unsigned all_sure = __ballot_sync(0xffffffffu, sure);
        const unsigned all_ties = __ballot_sync(0xffffffffu, tie), before = (1u << lane) - 1;
        if (lane == 0) m.taken[turn][warp] = __popc(all_sure);
        if (lane == 0) m.ties[turn][warp] = __popc(all_ties);
        __syncthreads();
        int my_taken = taken + __popc(all_sure & before),
            my_ties = ties + __popc(all_ties & before);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) my_taken += m.taken[turn][w], my_ties += m.ties[turn][w];
            taken += m.taken[turn][w];
            ties += m.ties[turn][w];
        }
        if (sure || (tie && my_ties < limit.ties)) list[my_taken + min(my_ties, limit.ties)] = j;
    }
    for (int i = taken + min(ties, limit.ties) + static_cast<int>(threadIdx.x); i < width;
         i += NSA__RANK_THREADS)
        list[i] = -1;
}

static __global__ void __launch_bounds__(NSA__RANK_THREADS)
    nsa__cuda_rank_blocks_kernel(nsa_desc d, const float *scores, int query, int32_t *list,
                                 int width) {
    NSA_SHARED(nsa__cuda_rank_memory, memory, [1]);
    nsa__cuda_rank_row(memory[0], NSA_F32, scores, nsa__cuda_forced_of(d, d.tokens, query), list,
                       width);
}

extern "C" nsa_status nsa_cuda_rank_blocks(const float *scores, int query, const nsa_desc *d,
                                           int32_t *list, cudaStream_t stream) {
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    const nsa_status s = nsa__cuda_check_desc(d);
    if (s != NSA_OK) return s;
    if (!scores || !list) return nsa__error(NSA_ERROR_NULL, scores ? NSA__AT_list : NSA__AT_scores);
    if (query < 0 || query >= d->tokens) return nsa__error(NSA_ERROR_RANGE, NSA__AT_query);
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_rank_blocks_kernel, dim3(1),
                                       dim3(NSA__RANK_THREADS), 0, stream, *d, scores, query, list,
                                       nsa_block_list_width(d)));
}

/* A block ranks one row. `own`: rows of the scores are counted for each sequence from 0, because
   they lie in a workspace. With a sixth block to a multiprocessor ptxas spills for sm_80. */
static __global__ void __launch_bounds__(NSA__RANK_THREADS, 5)
    nsa__cuda_rank_queries_kernel(nsa_desc d, nsa_rank x, nsa__cuda_extent rows, int width,
                                  bool own) {
    NSA_SHARED(nsa__cuda_rank_memory, memory, [1]);
    const int head = static_cast<int>(blockIdx.x) % d.kv_heads;
    const nsa__cuda_item at = nsa__cuda_item_at(d, rows, static_cast<int>(blockIdx.x) / d.kv_heads);
    const int b = at.b, row = static_cast<int>(at.local);
    const nsa__sequence s = nsa__sequence_of(d, b);
    if (row >= s.count) return;
    nsa__cuda_rank_row(memory[0], x.scores.dtype,
                       nsa__row_at(x.scores, own ? b : s.batch, own ? row : s.row + row, head),
                       nsa__cuda_forced_of(d, s.tokens, s.first + row),
                       nsa__row_of<int32_t>(x.blocks, s.batch, s.row + row, head), width);
}

/* The launch alone, for the entry point and for scores that are no attention. */
static nsa_status nsa__cuda_rank_queries_run(const nsa_rank *x, const nsa_desc *d, bool own,
                                             cudaStream_t stream) {
    dim3 grid;
    if (d->count == 0) return NSA_OK;
    const nsa_desc by = nsa__cuda_by_list(d);
    const nsa__cuda_extent rows = nsa__cuda_query_extent_of(d, d->count, 1, 1, 0);
    const nsa_status s = nsa__cuda_grid(rows.total * by.kv_heads, &grid);
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_rank_queries_kernel, grid, dim3(NSA__RANK_THREADS),
                                       0, stream, by, *x, rows, nsa_block_list_width(d), own));
}

extern "C" nsa_status nsa_cuda_rank_queries(const nsa_rank *x, const nsa_desc *d,
                                            cudaStream_t stream) {
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    const nsa__checked c = nsa__cuda_checked_of(d, 0, 1, 0);
    NSA__CHECK(nsa__check_call(&c, nsa__rank_views, NSA__RANK_VIEWS, NULL, x));
    const nsa_desc all = nsa__cuda_all_queries(d);
    return nsa__cuda_rank_queries_run(x, &all, false, stream);
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
    /* Once: it stays so until there is a fault, and with that the loops end. So it does not matter
       if a compiler reads it before it looks at `found`. */
    if (thread == 0) first[0] = NSA__CHECK_THREADS;
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
                slot = nsa__cuda_list_fault(list, width, nsa__slc_candidates(d, s.tokens, query),
                                            &mine.reason);
                if (slot >= 0) mine = {mine.reason, b, query, head, slot, list[slot]};
            }
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
                                                         nsa__cuda_extent thread_blocks) {
    const nsa__cuda_item at = nsa__cuda_item_at(d, thread_blocks, blockIdx.x);
    const int warp =
        static_cast<int>(at.local) * NSA__NORMALIZE_WARPS + static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const nsa__sequence s = nsa__sequence_of(d, at.b);
    const int row = warp / d.kv_heads;
    const int candidates = nsa__slc_candidates(d, s.tokens, s.first + row);
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
    return nsa__check_view(blocks, nsa__cuda_list_shape(d, nsa_block_list_width(d)), NSA__INTS,
                           writes, NSA__AT_blocks);
}

extern "C" nsa_status nsa_cuda_check_blocks(const nsa_tensor *blocks, const nsa_desc *d,
                                            nsa_cuda_block_verdict *verdict, cudaStream_t stream) {
    nsa_desc own;
    d = nsa__desc_using(d, NSA__USES_SLC, &own);
    const nsa_status s = nsa__cuda_check_lists(blocks, d, 0);
    if (s != NSA_OK) return s;
    if (!verdict) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    const nsa_desc all = nsa__cuda_all_queries(d);
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_check_blocks_kernel, dim3(1),
                                       dim3(NSA__CHECK_THREADS), 0, stream, nsa__cuda_by_list(&all),
                                       *blocks, nsa_block_list_width(d), verdict));
}

extern "C" nsa_status nsa_cuda_normalize_blocks(const nsa_tensor *blocks, const nsa_desc *d,
                                                cudaStream_t stream) {
    nsa_desc own;
    d = nsa__desc_using(d, NSA__USES_SLC, &own);
    nsa_status s = nsa__cuda_check_lists(blocks, d, 1);
    if (s != NSA_OK || d->count == 0) return s;
    const nsa_desc all = nsa__cuda_all_queries(d), by = nsa__cuda_by_list(&all);
    nsa__cuda_extent blocks_of;
    dim3 grid;
    s = nsa__cuda_row_grid(d, d->count, by.kv_heads, NSA__NORMALIZE_WARPS, &blocks_of, &grid);
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_normalize_blocks_kernel, grid,
                                       dim3(32 * NSA__NORMALIZE_WARPS), 0, stream, by, *blocks,
                                       nsa_block_list_width(d), blocks_of));
}

#endif

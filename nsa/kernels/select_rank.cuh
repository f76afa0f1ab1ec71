/* select_rank.cuh: the n best of a stream of scores, kept sorted by a warp in memory of its own.
   Twin: nsa.h, "Selection", nsa_rank_blocks.
   Not here: where scores come from (select_blocks.cuh).

   A candidate is one number: its score in the upper half, as an integer above 0 that orders as
   scores do, and the complement of its index in the lower. A larger number is better, so that of
   equal scores the lower index wins, and no two candidates are equal. 0 is no candidate. */
#ifndef NSA_SELECT_RANK_CUH
#define NSA_SELECT_RANK_CUH

#include "block_index.cuh"

/* NaN below all, -0 equals 0; by bits, for fast-math knows neither NaN nor its order. */
NSA__DEVICE uint32_t nsa__cuda_score_key(float score) {
    const uint32_t bits = __float_as_uint(score), sign = 0x80000000u;
    if ((bits & ~sign) > 0x7f800000u) return 0;
    if (bits == sign) return sign;
    return bits & sign ? ~bits : bits | sign;
}
NSA__DEVICE uint64_t nsa__cuda_candidate(float score, int block) {
    return (nsa__cuda_score_key(score) + uint64_t(1)) << 32 | ~static_cast<uint32_t>(block);
}
NSA__DEVICE int nsa__cuda_candidate_block(uint64_t candidate) {
    return static_cast<int>(~static_cast<uint32_t>(candidate));
}

/* Which blocks a query takes unasked: 0 .. init - 1 and local .. candidates - 1; and how many of
   the rest it may take. */
struct nsa__cuda_forced_blocks {
    int init, local, candidates, room;
};

NSA__DEVICE nsa__cuda_forced_blocks nsa__cuda_forced_of(const nsa_desc &d, int tokens, int query) {
    const bool by_place = d.mask == NSA_MASK_CAUSAL; /* else no block is forced for its place */
    int local = by_place ? d.slc_local : 0;
    if (d.forced == NSA_FORCED_TAIL) local = nsa__slc_tail(d, tokens, query) ? d.slc_local : 0;
    nsa__cuda_forced_blocks f;
    f.candidates = nsa__slc_candidates(d, tokens, query);
    f.init = by_place ? min(d.slc_init, f.candidates) : 0;
    f.local = max(f.candidates - local, f.init);
    f.room = d.slc_count;
    if (d.forced == NSA_FORCED_INSIDE) f.room -= f.init + f.candidates - f.local;
    f.room = min(f.room, f.local - f.init);
    return f;
}

/* Puts a candidate in its place in best[0 .. length - 1], which descends; the last one drops out.
   By a whole warp; the caller has synchronised it after the last write. */
NSA__DEVICE void nsa__cuda_rank_insert(uint64_t *best, int length, uint64_t candidate) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int base = (length - 1) / 32 * 32; base >= 0; base -= 32) {
        const int slot = base + lane;
        uint64_t value = 0;
        if (slot < length) {
            const uint64_t before = slot > 0 ? best[slot - 1] : ~uint64_t(0);
            value = best[slot];
            if (value < candidate) value = before < candidate ? before : candidate;
        }
        __syncwarp();
        if (slot < length) best[slot] = value;
        __syncwarp();
    }
}

/* Every lane may offer a candidate to the list that it names; lists are `length` apart, and the
   first `room` of a list count. Lower lanes come first. */
NSA__DEVICE void nsa__cuda_rank_offer(uint64_t *lists, int length, int list, int room,
                                      uint64_t candidate) {
    const bool better = candidate && room > 0 && lists[list * length + room - 1] < candidate;
    unsigned offers = __ballot_sync(0xffffffffu, better);
    while (offers) {
        const int lane = __ffs(static_cast<int>(offers)) - 1;
        offers &= offers - 1;
        uint64_t *best = lists + __shfl_sync(0xffffffffu, list, lane) * length;
        const int last = __shfl_sync(0xffffffffu, room, lane) - 1;
        const uint64_t offer = __shfl_sync(0xffffffffu, candidate, lane);
        if (best[last] < offer) nsa__cuda_rank_insert(best, length, offer);
    }
}

/* The list of a warp that has one of at most 32: a slot in each lane. An insertion touches no
   memory, and compares scores alone: blocks are offered in their order, so of equal ones the
   earlier is ahead. score: a candidate's upper half. */
struct nsa__cuda_rank_slot {
    uint32_t score;
    int block;
};

/* Every lane may offer its block, `first` + its number, by a score above 0. */
NSA__DEVICE void nsa__cuda_rank_offer_lanes(nsa__cuda_rank_slot &slot, int room, uint32_t score,
                                            int first) {
    if (room <= 0) return;
    uint32_t last = __shfl_sync(0xffffffffu, slot.score, room - 1);
    unsigned offers = __ballot_sync(0xffffffffu, last < score);
    while (offers) {
        const int lane = __ffs(static_cast<int>(offers)) - 1;
        offers &= offers - 1;
        const uint32_t offer = __shfl_sync(0xffffffffu, score, lane);
        if (last >= offer) continue;
        const uint32_t ahead = __shfl_up_sync(0xffffffffu, slot.score, 1);
        const int block = __shfl_up_sync(0xffffffffu, slot.block, 1);
        if (slot.score < offer) {
            const bool moves = threadIdx.x % 32 > 0 && ahead < offer;
            slot = {moves ? ahead : offer, moves ? block : first + lane};
        }
        last = __shfl_sync(0xffffffffu, slot.score, room - 1);
    }
}

/* Writes it as a list in memory; as many of its slots as count have been filled. */
NSA__DEVICE void nsa__cuda_rank_leave_lanes(const nsa__cuda_rank_slot &slot, uint64_t *best,
                                            int length) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < length)
        best[lane] = static_cast<uint64_t>(slot.score) << 32 | ~static_cast<uint32_t>(slot.block);
    __syncwarp();
}

/* Writes a list: forced blocks and the best of the rest, ascending, -1 behind the last. A warp. */
NSA__DEVICE void nsa__cuda_rank_write(const nsa__cuda_forced_blocks &f, const uint64_t *best,
                                      int32_t *to, int width) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int taken = 0;
    for (int base = 0; base < f.room; base += 32) {
        const int slot = base + lane;
        taken += __popc(__ballot_sync(0xffffffffu, slot < f.room && best[slot] != 0));
    }
    for (int slot = lane; slot < width; slot += 32) {
        const int local = f.local + slot - f.init - taken;
        if (slot < f.init) to[slot] = slot;
        if (slot >= f.init + taken) to[slot] = local < f.candidates ? local : -1;
    }
    for (int slot = lane; slot < taken; slot += 32) {
        const int block = nsa__cuda_candidate_block(best[slot]);
        int place = f.init;
        for (int other = 0; other < taken; other++)
            place += nsa__cuda_candidate_block(best[other]) < block;
        to[place] = block;
    }
}

#endif

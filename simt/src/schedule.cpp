/* schedule.cpp: which thread of the block runs next, from a block's start to its end.
   Twin: the warp schedulers. Not here: why a thread waits (collective.cpp, async copies,
   mbarriers).

   A thread runs until it waits; the switch goes straight to the next thread. In order: the lanes
   of a warp, then the next warp. At random: any ready warp, any ready lane of it. */
#include "async.h"
#include "checker.h"
#include "machine.h"
#include "memory.h"

#include <algorithm>
#include <unordered_map>

namespace simt {

machine the;

uint64_t random_number() {
    the.random ^= the.random << 13;
    the.random ^= the.random >> 7;
    the.random ^= the.random << 17;
    return the.random * 0x2545f4914f6cdd1dull;
}

namespace {

int lowest(uint32_t bits) {
    return __builtin_ctz(bits);
}

/* The first set bit at or after `from`, cyclically. */
int next_bit(uint32_t bits, int from) {
    const uint32_t after = from < 32 ? bits >> from << from : 0;
    return lowest(after ? after : bits);
}

int random_bit(uint32_t bits) {
    int skip =
        static_cast<int>((random_number() >> 33) % static_cast<unsigned>(__builtin_popcount(bits)));
    while (skip--) bits &= bits - 1;
    return lowest(bits);
}

thread *choose() {
    if (!the.warps_ready) return nullptr;
    const thread *was = the.current;
    if (the.schedule == order::random) {
        const warp &w = the.warps[random_bit(the.warps_ready)];
        return &lane_of(w, random_bit(w.ready));
    }
    if (the.schedule == order::reversed) {
        const warp &w = the.warps[31 - __builtin_clz(the.warps_ready)];
        return &lane_of(w, 31 - __builtin_clz(w.ready));
    }
    const int near = was ? was->warp : 0;
    const warp &w = the.warps[next_bit(the.warps_ready, near)];
    return &lane_of(w,
                    was && was->warp == near ? next_bit(w.ready, was->lane + 1) : lowest(w.ready));
}

void enter(fiber &from, thread &t, bool gone) {
    the.current = &t;
    threadIdx = t.index;
    the.counted.switches++;
    fiber_switch(from, t.run, gone);
}

void leave_to_main(bool gone) {
    thread &me = *the.current;
    the.current = nullptr;
    fiber_switch(me.run, the.main, gone);
}

/* Where the first thread stands that has not exited. */
site first_waiting() {
    for (int i = 0; i < the.thread_count; i++)
        if (the.threads[i].now != state::exited) return the.threads[i].waits_at;
    return the.request.at;
}

void thread_main() {
    fiber_started();
    the.request.call(the.request.params);
    thread &me = *the.current;
    me.now = state::exited;
    warp &w = the.warps[me.warp];
    w.ready &= ~(1u << me.lane);
    w.exited |= 1u << me.lane;
    if (!w.ready) the.warps_ready &= ~(1u << me.warp);
    the.live--;
    thread_exits(me);
    if (!the.live) leave_to_main(true);
    wait_for_turn();
    __builtin_unreachable();
}

/* Bytes of stack that a kernel's threads use: of its first block, with an eighth and a margin more;
   a block that comes into the margin makes it twice as much. What is filled for each thread of
   each block is a fifth of some tests' time. */
constexpr size_t depth_margin = 256;
std::unordered_map<const void *, size_t> depths;

size_t depth_of_kernel() {
    const auto known = depths.find(the.request.kernel);
    return known == depths.end() ? fiber_filled : known->second;
}

size_t deepest_thread(size_t filled, size_t watched) {
    size_t deepest = 0;
    for (int i = 0; i < the.thread_count; i++)
        deepest = std::max(deepest, fiber_depth(the.threads[i].run, filled, watched));
    return deepest;
}

void note_depth() {
    const auto known = depths.find(the.request.kernel);
    if (known == depths.end()) {
        const size_t deepest = deepest_thread(fiber_filled, fiber_filled);
        const size_t depth = (deepest + deepest / 8 + depth_margin + 63) / 64 * 64;
        depths[the.request.kernel] = std::min(depth, fiber_filled);
    } else if (deepest_thread(known->second, depth_margin)) {
        known->second = std::min(2 * known->second, fiber_filled);
    }
}

void prepare_threads() {
    const size_t depth = depth_of_kernel();
    const dim3 &b = the.request.block;
    the.thread_count = static_cast<int>(b.x * b.y * b.z);
    the.warp_count = (the.thread_count + 31) / 32;
    the.live = the.thread_count;
    the.warps_ready = 0;
    for (int w = 0; w < the.warp_count; w++) {
        const int lanes = the.thread_count - 32 * w < 32 ? the.thread_count - 32 * w : 32;
        warp &it = the.warps[w];
        it.present = lanes == 32 ? ~0u : (1u << lanes) - 1;
        it.ready = it.present;
        it.exited = 0;
        it.first = 32 * w;
        it.pending_count = 0;
        the.warps_ready |= 1u << w;
    }
    for (int i = 0; i < the.thread_count; i++) {
        thread &t = the.threads[i];
        const unsigned u = static_cast<unsigned>(i);
        t.index = {u % b.x, u / b.x % b.y, u / (b.x * b.y)};
        t.number = i;
        t.warp = i / 32;
        t.lane = i % 32;
        t.now = state::ready;
        t.waits_in = nullptr;
        fiber_prepare(t.run, depth, thread_main);
    }
}

} // namespace

void wake(thread &t) {
    t.now = state::ready;
    warp &w = the.warps[t.warp];
    w.ready |= 1u << t.lane;
    the.warps_ready |= 1u << t.warp;
}

void wait_for_turn() {
    thread &me = *the.current;
    warp &w = the.warps[me.warp];
    const bool gone = me.now == state::exited;
    if (me.now != state::ready) {
        w.ready &= ~(1u << me.lane);
        if (!w.ready) the.warps_ready &= ~(1u << me.warp);
    }
    async_chance();
    thread *next = choose();
    while (!next && async_progress()) next = choose();
    if (!next) deadlock(first_waiting());
    if (next != &me) enter(me.run, *next, gone);
}

void let_others_run() {
    wait_for_turn();
}

bool run_block(dim3 index) {
    blockIdx = {index.x, index.y, index.z};
    the.counted.blocks++;
    forget_barriers();
    async_begin();
    shared_begin(the.request.shared_bytes);
    prepare_threads();
    check_block_begin();
    the.current = nullptr;
    enter(the.main, *choose(), false);
    if (the.failed) {
        for (int i = 0; i < the.thread_count; i++) fiber_abandon(the.threads[i].run);
        return false;
    }
    note_depth();
    return true;
}

[[noreturn]] void leave_failed() {
    the.failed = true;
    leave_to_main(true);
    __builtin_unreachable();
}

} // namespace simt

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

/* collective.cpp: where threads meet: warp operations with their masks, block and named barriers.
   Twin: the hardware's convergence rules, held to the letter: a mask that names a lane which has
   exited, overlapping masks, two places meeting in one operation are errors here, though some
   devices let them pass. Not here: mbarriers (mbarrier.cpp), the schedule. */
#include "checker.h"
#include "machine.h"

namespace simt {
namespace {

phrase hex(uint32_t mask) {
    return text("0x%08x", mask);
}

/* Names are literals: mostly one and the same. */
bool same_text(const char *a, const char *b) {
    return a == b || !strcmp(a, b);
}

bool same_place(site a, site b) {
    return a.line == b.line && same_text(a.file, b.file);
}

/* Two groups of lanes are in each other's way only if each waits for a lane of the other; a group
   that merely names a lane which is elsewhere waits until that one comes. */
gathering *find_gathering(warp &w, const thread &me, uint32_t mask, const char *name, site at) {
    for (int i = 0; i < w.pending_count; i++) {
        gathering &g = w.pending[i];
        if (!(g.mask >> me.lane & 1u) || !(g.arrived & mask)) continue;
        if (g.mask != mask)
            fail(at, text("%s with mask %s: lanes %s wait for this one in %s with mask %s at ",
                          name, hex(mask).c_str(), hex(g.arrived & mask).c_str(), g.name,
                          hex(g.mask).c_str()) +
                         place(g.at));
        if (!same_text(g.name, name) || !same_place(g.at, at))
            fail(at, text("%s with mask %s: lanes %s of it wait in %s at ", name, hex(mask).c_str(),
                          hex(g.arrived).c_str(), g.name) +
                         place(g.at));
        return &g;
    }
    gathering &g = w.pending[w.pending_count++];
    g = {mask, 0, name, at};
    return &g;
}

void check_mask(const thread &me, const warp &w, uint32_t mask, const char *name, site at) {
    if (!(mask >> me.lane & 1u))
        fail(at, text("%s with mask %s, which leaves out the calling lane %d", name,
                      hex(mask).c_str(), me.lane));
    if (mask & ~w.present)
        fail(at, text("%s with mask %s: this warp has only %d lanes", name, hex(mask).c_str(),
                      __builtin_popcount(w.present)));
    if (mask & w.exited)
        fail(at, text("%s with mask %s: lanes %s of it have exited", name, hex(mask).c_str(),
                      hex(mask & w.exited).c_str()));
}

} // namespace

void warp_operation(uint32_t mask, const char *name, site at, void *argument,
                    void (*all)(const warp &, uint32_t)) {
    require_thread(name, at);
    thread &me = *the.current;
    warp &w = the.warps[me.warp];
    check_mask(me, w, mask, name, at);
    gathering *g = find_gathering(w, me, mask, name, at);
    me.argument = argument;
    g->arrived |= 1u << me.lane;
    if (g->arrived != mask) {
        me.now = state::in_warp_op;
        me.waits_in = name;
        me.waits_at = at;
        me.waits_mask = mask;
        wait_for_turn();
        return;
    }
    *g = w.pending[--w.pending_count];
    if (all) all(w, mask);
    for (uint32_t rest = mask & ~(1u << me.lane); rest; rest &= rest - 1)
        wake(lane_of(w, __builtin_ctz(rest)));
    if (the.schedule == order::random) let_others_run();
}

void aligned_operation(const char *name, site at, void *argument,
                       void (*all)(const warp &, uint32_t)) {
    require_thread(name, at);
    const warp &w = the.warps[the.current->warp];
    if (w.present != ~0u)
        fail(at, text("%s in a warp of %d lanes: all 32 must take part", name,
                      __builtin_popcount(w.present)));
    warp_operation(~0u, name, at, argument, all);
}

/* ---- Block barriers ----------------------------------------------------------------------- */

void forget_barriers() {
    for (barrier &b : the.barriers) b = {};
}

namespace {

void check_arrival(const barrier &b, int id, int threads, bool whole_block, const char *name,
                   site at) {
    if (!b.arrived) return;
    if (b.expected != threads)
        fail(at, text("%s expects %d threads, but barrier %d has begun with %d at ", name, threads,
                      id, b.expected) +
                     place(b.at));
    if (whole_block && (!same_text(b.name, name) || !same_place(b.at, at)))
        fail(at, text("%s: other threads of the block wait in %s at ", name, b.name) + place(b.at));
}

void check_whole_warps(const barrier &b, int id, site at) {
    for (int w = 0; w < the.warp_count; w++)
        if (b.lanes[w] && b.lanes[w] != the.warps[w].present)
            fail(at, text("barrier %d counts whole warps, but only lanes %s of warp %d arrived", id,
                          hex(b.lanes[w]).c_str(), w));
}

void release(barrier &b, int id, site at) {
    check_whole_warps(b, id, at);
    check_barrier_complete(b, id);
    for (int w = 0; w < the.warp_count; w++)
        for (uint32_t rest = b.waiting[w]; rest; rest &= rest - 1) {
            thread &t = lane_of(the.warps[w], __builtin_ctz(rest));
            t.result = b.result;
            if (&t != the.current) wake(t);
        }
    b = {};
}

void arrive(int id, int threads, bool whole_block, bool waits, int value, const char *name,
            site at) {
    require_thread(name, at);
    thread &me = *the.current;
    barrier &b = the.barriers[id];
    check_arrival(b, id, threads, whole_block, name, at);
    if (the.live != the.thread_count && whole_block)
        fail(at,
             text("%s: %d threads of the block have exited", name, the.thread_count - the.live));
    if (b.lanes[me.warp] >> me.lane & 1u)
        fail(at, text("%s: this thread has already arrived at barrier %d", name, id));
    if (!b.arrived) b.result.all = 1;
    b.expected = threads;
    b.at = at;
    b.name = name;
    b.whole_block = whole_block;
    b.arrived++;
    b.result.sum += value != 0;
    b.result.all = b.result.all && value != 0;
    b.result.any = b.result.any || value != 0;
    b.lanes[me.warp] |= 1u << me.lane;
    if (waits) b.waiting[me.warp] |= 1u << me.lane;
    check_barrier_arrive(b, id);
    if (b.arrived == b.expected) {
        release(b, id, at);
        if (the.schedule == order::random) let_others_run();
        return;
    }
    if (!waits) return;
    me.now = state::at_barrier;
    me.waits_in = name;
    me.waits_at = at;
    me.waits_for = &b;
    wait_for_turn();
}

void check_named(int id, int threads, const char *name, site at) {
    require_thread(name, at);
    if (id < 1 || id >= named_barriers)
        fail(at, text("%s: barrier %d; allowed are 1 to %d (0 is __syncthreads)", name, id,
                      named_barriers - 1));
    if (threads <= 0 || threads % 32 != 0 || threads > 32 * the.warp_count)
        fail(at, text("%s of %d threads: must be whole warps, at most the block's %d", name,
                      threads, the.thread_count));
}

} // namespace

int barrier_all(vote kind, int value, const char *name, site at) {
    arrive(0, the.thread_count, true, true, value, name, at);
    const barrier_result &r = the.current->result;
    return kind == vote::count ? r.sum : kind == vote::bit_and ? r.all : r.any;
}

void barrier_sync(int id, int threads, site at) {
    check_named(id, threads, "barrier.sync", at);
    arrive(id, threads, false, true, 0, "barrier.sync", at);
}

void barrier_arrive(int id, int threads, site at) {
    check_named(id, threads, "barrier.arrive", at);
    arrive(id, threads, false, false, 0, "barrier.arrive", at);
}

void thread_exits(thread &t) {
    const warp &w = the.warps[t.warp];
    for (int i = 0; i < w.pending_count; i++)
        if (w.pending[i].mask >> t.lane & 1u)
            fail(w.pending[i].at, text("%s with mask %s waits for lane %d of the same warp, which "
                                       "has exited",
                                       w.pending[i].name, hex(w.pending[i].mask).c_str(), t.lane));
    const barrier &b = the.barriers[0];
    if (b.arrived) fail(b.at, text("%s waits for %s, which has exited", b.name, who(t).c_str()));
}

/* ---- Votes, shuffles, reductions ---------------------------------------------------------- */

namespace {

struct vote_argument {
    vote kind;
    uint64_t value;
    unsigned result;
    int all_same;
};

vote_argument &vote_of(const warp &w, uint32_t bits) {
    return *static_cast<vote_argument *>(lane_of(w, __builtin_ctz(bits)).argument);
}

void match_all(const warp &w, uint32_t mask) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        vote_argument &mine = vote_of(w, rest);
        unsigned same = 0;
        for (uint32_t others = mask; others; others &= others - 1)
            if (vote_of(w, others).value == mine.value) same |= others & -others;
        mine.all_same = same == mask;
        mine.result = mine.kind == vote::match_any ? same : (same == mask ? mask : 0u);
    }
}

void vote_all(const warp &w, uint32_t mask) {
    unsigned set = 0;
    for (uint32_t rest = mask; rest; rest &= rest - 1)
        if (vote_of(w, rest).value) set |= rest & -rest;
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        vote_argument &mine = vote_of(w, rest);
        mine.result = mine.kind == vote::ballot ? set
                      : mine.kind == vote::any  ? set != 0
                                                : set == mask;
    }
}

struct move_argument {
    move kind;
    uint64_t value, result;
    int lane, width;
    site at;
};

/* Where lane `self` of a segment reads from; outside the segment it keeps its own. */
int source_lane(const move_argument &m, int self) {
    const int first = self & ~(m.width - 1), last = first + m.width - 1;
    switch (m.kind) {
    case move::index:
        return first + (m.lane & (m.width - 1));
    case move::up:
        return self - m.lane < first ? self : self - m.lane;
    case move::down:
        return self + m.lane > last ? self : self + m.lane;
    case move::exclusive:
        break;
    }
    return (self ^ m.lane) > last ? self : (self ^ m.lane);
}

void move_all(const warp &w, uint32_t mask) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const int self = __builtin_ctz(rest);
        move_argument &mine = *static_cast<move_argument *>(lane_of(w, self).argument);
        const int from = source_lane(mine, self);
        if (!(mask >> from & 1u))
            fail(mine.at, text("shuffle: lane %d reads lane %d, which mask %s leaves out", self,
                               from, hex(mask).c_str()));
        mine.result = static_cast<move_argument *>(lane_of(w, from).argument)->value;
    }
}

struct reduce_argument {
    reduce kind;
    int64_t value;
    int64_t result;
};

int64_t combine(reduce kind, int64_t a, int64_t b) {
    switch (kind) {
    case reduce::add:
        return a + b;
    case reduce::min:
        return a < b ? a : b;
    case reduce::max:
        return a < b ? b : a;
    case reduce::bit_and:
        return a & b;
    case reduce::bit_or:
        return a | b;
    case reduce::bit_xor:
        break;
    }
    return a ^ b;
}

void reduce_all(const warp &w, uint32_t mask) {
    auto argument = [&](uint32_t bits) -> reduce_argument & {
        return *static_cast<reduce_argument *>(lane_of(w, __builtin_ctz(bits)).argument);
    };
    int64_t total = argument(mask).value;
    for (uint32_t rest = mask & (mask - 1); rest; rest &= rest - 1)
        total = combine(argument(rest).kind, total, argument(rest).value);
    for (uint32_t rest = mask; rest; rest &= rest - 1) argument(rest).result = total;
}

} // namespace

void syncwarp(unsigned mask, site at) {
    warp_operation(mask, "__syncwarp", at, nullptr, check_syncwarp);
}

unsigned activemask(site at) {
    require_thread("__activemask", at);
    return 1u << the.current->lane; /* what a device may answer: only the caller is sure */
}

unsigned warp_vote(vote kind, unsigned mask, uint64_t value, int *all_same, const char *name,
                   site at) {
    vote_argument v = {kind, value, 0, 0};
    const bool match = kind == vote::match_any || kind == vote::match_all;
    warp_operation(mask, name, at, &v, match ? match_all : vote_all);
    if (all_same) *all_same = v.all_same;
    return v.result;
}

uint64_t warp_move(move kind, unsigned mask, uint64_t value, int lane, int width, const char *name,
                   site at) {
    require_thread(name, at);
    if (width < 1 || width > 32 || (width & (width - 1)) != 0)
        fail(at, text("%s with width %d: must be a power of two up to 32", name, width));
    if (lane < 0 && kind != move::index)
        fail(at, text("%s by %d lanes: must not be negative", name, lane));
    move_argument m = {kind, value, 0, lane, width, at};
    warp_operation(mask, name, at, &m, move_all);
    return m.result;
}

uint64_t warp_reduce(reduce kind, unsigned mask, int64_t value, const char *name, site at) {
    reduce_argument r = {kind, value, 0};
    warp_operation(mask, name, at, &r, reduce_all);
    return static_cast<uint64_t>(r.result);
}

} // namespace simt

/* mbarrier.cpp: barriers in shared memory that count arrivals and bytes.
   Twin: mbarrier objects (PTX manual, "Parallel Synchronization and Communication
   Instructions").
   Not here: the copies that bring the bytes (bulk.cpp).

   A barrier's state lies here, found by its address; its eight bytes in shared memory are
   touched by nothing but these functions, and the checker treats each use as an atomic. */
#include "async.h"
#include "checker.h"
#include "memory.h"

namespace simt {
namespace {

constexpr int most_barriers = 128;
constexpr int64_t most_bytes = (1 << 20) - 1;

struct mbarrier {
    const uint64_t *address;
    int count, missing; /* arrivals of a phase, and those still to come */
    int64_t bytes;      /* still to come; copies may be ahead of the announcement */
    uint32_t phase;
    uint32_t pending_clock[max_threads], complete_clock[max_threads];
};
mbarrier barriers[most_barriers];
int barrier_count;

mbarrier *find(const void *address) {
    for (int i = 0; i < barrier_count; i++)
        if (barriers[i].address == address) return &barriers[i];
    return nullptr;
}

mbarrier &existing(const uint64_t *bar, const char *name, site at) {
    require_thread(name, at);
    mbarrier *b = find(bar);
    if (!b) fail(at, text("%s: no mbarrier was initialised here: ", name) + describe(bar));
    check_atomic(bar, sizeof *bar, at);
    return *b;
}

void wake_waiting(const mbarrier &b) {
    for (int i = 0; i < the.thread_count; i++) {
        thread &t = the.threads[i];
        if (t.now == state::at_mbarrier && t.waits_for == b.address) wake(t);
    }
}

void end_phase(mbarrier &b) {
    if (b.missing || b.bytes) return;
    b.phase++;
    b.missing = b.count;
    memcpy(b.complete_clock, b.pending_clock, sizeof b.complete_clock);
    memset(b.pending_clock, 0, sizeof b.pending_clock);
    wake_waiting(b);
}

} // namespace

void mbarrier_begin() {
    barrier_count = 0;
}

void mbarrier_check(uint64_t *bar, const char *name, site at) {
    existing(bar, name, at);
}

void mbarrier_init(uint64_t *bar, int arrivals, site at) {
    require_thread("mbarrier.init", at);
    if (!shared_owns(bar, sizeof *bar) || reinterpret_cast<size_t>(bar) % 8 != 0)
        fail(at, "mbarrier.init: needs 8 bytes of shared memory, aligned to 8: " + describe(bar));
    if (arrivals < 1 || arrivals > most_bytes)
        fail(at, text("mbarrier.init of %d arrivals: allowed are 1 to %d", arrivals, 1048575));
    if (find(bar)) fail(at, "mbarrier.init: there is an mbarrier here already");
    if (barrier_count == most_barriers)
        fail(at, text("more than %d mbarriers in one block", most_barriers));
    check_access_if_on(access::write, bar, sizeof *bar, at);
    mbarrier &b = barriers[barrier_count++];
    b.address = bar;
    b.count = b.missing = arrivals;
    b.bytes = 0;
    b.phase = 0;
    memset(b.pending_clock, 0, sizeof b.pending_clock);
    memset(b.complete_clock, 0, sizeof b.complete_clock);
}

void mbarrier_arrive(uint64_t *bar, int expect_bytes, site at) {
    mbarrier &b = existing(bar, "mbarrier.arrive", at);
    if (expect_bytes < 0 || b.bytes + expect_bytes > most_bytes)
        fail(at, text("mbarrier.arrive.expect_tx of %d bytes: a phase counts up to %d",
                      expect_bytes, 1048575));
    if (!b.missing)
        fail(at, text("mbarrier.arrive: all %d arrivals of this phase have come, it waits for %ld "
                      "bytes",
                      b.count, static_cast<long>(b.bytes)));
    if (checker_on) check_release(b.pending_clock, *the.current);
    b.bytes += expect_bytes;
    b.missing--;
    end_phase(b);
}

void mbarrier_complete(uint64_t *bar, int64_t bytes, int thread, uint32_t epoch, site at) {
    mbarrier &b = *find(bar);
    b.bytes -= bytes;
    if (b.bytes < -most_bytes) fail(at, "bulk copies bring more bytes than the mbarrier can count");
    if (b.bytes < 0 && !b.missing)
        fail(at, text("bulk copy of %ld bytes: the phase waits for %ld", static_cast<long>(bytes),
                      static_cast<long>(b.bytes + bytes)));
    if (b.pending_clock[thread] < epoch) b.pending_clock[thread] = epoch;
    end_phase(b);
}

void mbarrier_wait(uint64_t *bar, int parity, site at) {
    mbarrier &b = existing(bar, "mbarrier.try_wait", at);
    if (parity != 0 && parity != 1) fail(at, text("mbarrier.try_wait of parity %d", parity));
    thread &me = *the.current;
    while ((b.phase & 1u) == static_cast<unsigned>(parity)) {
        me.now = state::at_mbarrier;
        me.waits_in = "mbarrier.try_wait";
        me.waits_at = at;
        me.waits_for = bar;
        wait_for_turn();
    }
    if (checker_on) check_acquire(b.complete_clock, me);
}

phrase mbarrier_describe(const void *bar) {
    const mbarrier *b = find(bar);
    if (!b) return text(" (no mbarrier there)");
    return text(" (phase %u lacks %d of %d arrivals and %ld bytes)", b->phase, b->missing, b->count,
                static_cast<long>(b->bytes));
}

} // namespace simt

/* checker.cpp: races, reads of what nobody wrote, accesses outside of every array.
   Twin: compute-sanitizer. Not here: where the calls come from (tsan.cpp), weak memory.

   Each byte of device and shared memory has a cell: who wrote it last, who has read it since.
   "Who" is a stamp, thread and epoch: a thread's epoch grows with everything that orders it
   before others. A thread knows of every other up to which epoch it is ordered before itself:

   - the floor: all that came before the last barrier of the whole block, the same for everybody;
   - the lanes of its own warp, through __syncwarp;
   - the rest, through named barriers and mbarriers, once it has used one.

   Shuffles, votes, ldmatrix and mma order nothing. Blocks of one launch are never ordered. */
#include "checker.h"

#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace simt {

bool checker_on;
bool checking() {
    return checker_on;
}

namespace {

/* A stamp is thread << 20 | epoch, with a bit for atomics; or the number of a set of stamps, with
   that bit if there is an atomic in it and one more if there is a read. */
using stamp = uint32_t;
constexpr stamp is_set = 1u << 31, is_atomic = 1u << 30, set_reads = 1u << 29,
                epoch_mask = (1u << 20) - 1;
/* Not stamps: no thread has so small an epoch. */
constexpr stamp nothing = 0, uninitialised = 1, by_host = 2, in_flight = 3;
constexpr uint32_t first_epoch = 8;

/* The last plain write; the reads and atomics since then that no later one of their kind makes
   superfluous. */
struct cell {
    stamp write, others;
    code write_at, others_at;
    uint32_t write_block, others_block; /* number of the block, counted over all launches */
};
/* others_block where there were several: this | number of the launch's first block. Then
   `others` is one of their stamps: all are reads or all are atomics. */
constexpr uint32_t several_blocks = 1u << 31;

cell *global_cells, *shared_cells;
uint32_t block_now = 1, launch_first = 1;

uint32_t epoch[max_threads], floor_epoch[max_threads];
uint32_t lanes_known[max_threads][32];
uint32_t others_known[max_threads][max_threads];
bool knows_others[max_threads];
uint32_t barrier_known[named_barriers][max_threads];
uint32_t fenced[max_threads]; /* stores up to that epoch can be seen by bulk copies and wgmma */
uint8_t held[arena_bytes];    /* asynchronous readers of each byte of shared memory */
code held_by;                 /* the last that began to */
bool any_held;                /* since `held` was cleared */

unsigned thread_of(stamp s) {
    return s >> 20 & 1023u;
}
uint32_t epoch_of(stamp s) {
    return s & epoch_mask;
}

/* ---- Sets of stamps: interned, for many bytes have the same readers ----------------------- */

/* Forgotten at every barrier of the block: all that is in them is ordered before what follows. */
struct stamp_set {
    size_t first, count; /* of `members`, in order */
    uint64_t hash;
};
std::vector<stamp_set> sets;
std::vector<stamp> members;
uint32_t first_set = 0;

/* What was found last under a key of this place. What another key drove out is found anew, so that
   a set may have two numbers. */
struct found {
    uint64_t key;
    uint32_t value, era;
};
constexpr size_t places_found = 1 << 14;
found joined[places_found];     /* (set or stamp, stamp) -> set */
found by_content[places_found]; /* hash of the members -> number of the set */
uint32_t era = 1;
bool any_joined;

found &found_at(found *table, uint64_t key) {
    return table[key * 0x9e3779b97f4a7c15ull >> 50];
}

void forget_sets() {
    if (!any_joined) return; /* sets come of joins alone */
    any_joined = false;
    first_set += static_cast<uint32_t>(sets.size());
    sets.clear();
    members.clear();
    era++;
}

bool known(unsigned me, stamp s) {
    const unsigned other = thread_of(s);
    const uint32_t e = epoch_of(s);
    return other == me || e <= floor_epoch[other] ||
           (other / 32 == me / 32 && e <= lanes_known[me][other % 32]) ||
           (knows_others[me] && e <= others_known[me][other]);
}

/* The stamps that `s` stands for, in order: itself, or a set's members. Of a forgotten set none. */
struct stamps {
    const stamp *first, *last;
    const stamp *begin() const { return first; }
    const stamp *end() const { return last; }
};
const stamp_set *set_of(stamp s) {
    const uint32_t number = s & ~(is_set | is_atomic | set_reads);
    return s & is_set && number >= first_set ? &sets[number - first_set] : nullptr;
}
stamps stamps_of(const stamp &s) {
    if (const stamp_set *set = set_of(s)) {
        const stamp *const first = members.data() + set->first;
        return {first, first + set->count};
    }
    return {&s, &s + (s >= first_epoch && !(s & is_set))};
}

/* A set's hash is the sum of its members'. */
uint64_t hash_of(stamp s) {
    const uint64_t x = s * 0x9e3779b97f4a7c15ull;
    return (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull;
}

stamp flags_of(stamp s) {
    return s & is_set ? s & (is_set | is_atomic | set_reads)
                      : is_set | (s & is_atomic ? is_atomic : set_reads);
}

/* The number of the set of all members from `first` on. They become its own unless there is such
   a set already. */
uint32_t intern(size_t first, uint64_t hash) {
    const size_t count = members.size() - first;
    found &at = found_at(by_content, hash);
    if (at.era == era && at.key == hash) {
        const stamp_set other = sets[at.value - first_set];
        if (other.count == count &&
            !memcmp(&members[other.first], &members[first], count * sizeof(stamp))) {
            members.resize(first);
            return at.value;
        }
    }
    const uint32_t number = first_set + static_cast<uint32_t>(sets.size());
    sets.push_back({first, count, hash});
    at = {hash, number, era};
    return number;
}

/* Appends to `members` those of `old` and mine, but none of my kind that is ordered before mine:
   who is ordered after mine is ordered after it. Such are in my own warp, unless I know of others,
   because a barrier of the block forgets all sets. Returns the hash of what was appended. */
uint64_t append_joined(const stamp &old, stamp mine, unsigned me) {
    static stamp before[2 * max_threads]; /* `members` moves; a thread has one of each kind */
    const stamp_set *const set = set_of(old);
    uint64_t hash = (set ? set->hash : hash_of(old)) + hash_of(mine);
    const stamps joined_to = stamps_of(old);
    const stamp *const end = std::copy(joined_to.begin(), joined_to.end(), before);
    const bool all = knows_others[me];
    const stamp kind = mine & is_atomic, from = all ? kind : kind | me / 32 << 25;
    const stamp *const low = std::lower_bound<const stamp *>(before, end, from),
                       *const high =
                           std::lower_bound(low, end, from + (all ? is_atomic : 1u << 25));
    members.insert(members.end(), static_cast<const stamp *>(before), low);
    const size_t of_kind = members.size();
    for (const stamp *s = low; s < high; s++) {
        if (known(me, *s))
            hash -= hash_of(*s);
        else
            members.push_back(*s);
    }
    const auto at = members.begin() + static_cast<std::ptrdiff_t>(of_kind);
    members.insert(std::lower_bound(at, members.end(), mine), mine);
    members.insert(members.end(), high, end);
    return hash;
}

stamp join(stamp old, stamp mine, unsigned me) {
    if (old < first_epoch || old == mine) return mine;
    if (!(old & is_set) && (old & is_atomic) == (mine & is_atomic) && known(me, old)) return mine;
    const uint64_t key = uint64_t(old) << 32 | mine;
    found &at = found_at(joined, key);
    if (at.era == era && at.key == key) return at.value;
    const size_t first = members.size();
    const uint64_t hash = append_joined(old, mine, me);
    stamp result = mine;
    if (members.size() - first == 1)
        members.resize(first);
    else
        result = flags_of(old) | flags_of(mine) | intern(first, hash);
    at = {key, result, era};
    any_joined = true;
    return result;
}

/* ---- Places ------------------------------------------------------------------------------- */

std::vector<site> places;
constexpr code is_place = 1u << 31;

phrase thread_name(stamp s) {
    return who(the.threads[thread_of(s)]);
}

[[noreturn]] void fail_at(code where, const phrase &what) {
    fail(place_of(where), what);
}

const char *name_of(access kind) {
    return kind == access::read ? "read" : kind == access::write ? "write" : "atomic";
}

/* ---- One byte ----------------------------------------------------------------------------- */

struct request {
    access kind;
    const unsigned char *address;
    size_t bytes;
    code where;
    unsigned me;
    stamp mine;
};

const char *verb(stamp s) {
    return s & is_atomic ? "atomic" : "read";
}

[[noreturn]] void race(const request &r, const void *address, const phrase &other, code where) {
    fail_at(r.where, text("race: %s of %zu bytes, %s,\n    is not ordered with the ",
                          name_of(r.kind), r.bytes, describe(address).c_str()) +
                         other + "\n    at " + place(place_of(where)));
}

/* In `cell.write` the bit of atomics marks what a bulk copy wrote: even the thread that asked
   for it must have waited. */
bool known_write(unsigned me, stamp s) {
    if (!(s & is_atomic) || thread_of(s) != me) return known(me, s);
    const uint32_t e = epoch_of(s);
    return e <= floor_epoch[me] || e <= lanes_known[me][me % 32] ||
           (knows_others[me] && e <= others_known[me][me]);
}

void against_writer(const request &r, const cell &c, const unsigned char *at) {
    if (c.write < first_epoch || c.write_block < launch_first) return;
    if (c.write_block != block_now) race(r, at, text("write by another block"), c.write_at);
    if (!known_write(r.me, c.write))
        race(r, at, (c.write & is_atomic ? "bulk copy of " : "write by ") + thread_name(c.write),
             c.write_at);
}

/* Reads go with reads, atomics with atomics; a write with neither. */
bool conflict(access kind, stamp other) {
    const bool atomics = other & is_atomic, reads = other & is_set ? other & set_reads : !atomics;
    return kind == access::read ? atomics : kind == access::write || reads;
}

void against_others(const request &r, const cell &c, const unsigned char *at) {
    if (c.others == nothing || (c.others_block & ~several_blocks) < launch_first) return;
    if (c.others_block != block_now) {
        if (conflict(r.kind, c.others))
            race(r, at, text("%s by another block", verb(c.others)), c.others_at);
        return;
    }
    if (!conflict(r.kind, c.others)) return; /* none of the set's */
    for (stamp s : stamps_of(c.others))
        if (conflict(r.kind, s) && !known(r.me, s))
            race(r, at, text("%s by ", verb(s)) + thread_name(s), c.others_at);
}

[[noreturn]] void fail_under_way(const request &r, const cell &c, const unsigned char *at) {
    fail_at(r.where, text("%s of %zu bytes, %s,\n    into which an asynchronous copy is under way, "
                          "issued at ",
                          name_of(r.kind), r.bytes, describe(at).c_str()) +
                         place(place_of(c.write_at)));
}

void check_state(const request &r, const cell &c, const unsigned char *at) {
    if (c.write == in_flight) fail_under_way(r, c, at);
    if (c.write == uninitialised && r.kind != access::write)
        fail_at(r.where, text("%s of %zu bytes, of which byte %ld was never written: ",
                              name_of(r.kind), r.bytes, static_cast<long>(at - r.address)) +
                             describe(at));
}

void note_other(const request &r, cell &c) {
    const bool of_launch =
        c.others != nothing && (c.others_block & ~several_blocks) >= launch_first;
    if (of_launch && c.others_block != block_now) {
        c.others = r.mine;
        c.others_block = several_blocks | launch_first;
    } else {
        c.others = of_launch ? join(c.others, r.mine, r.me) : r.mine;
        c.others_block = block_now;
    }
    c.others_at = r.where;
}

void note_write(const request &r, cell &c) {
    c.write = r.mine;
    c.write_block = block_now;
    c.write_at = r.where;
    c.others = nothing;
}

void one_byte(const request &r, cell &c, const unsigned char *at) {
    check_state(r, c, at);
    against_writer(r, c, at);
    against_others(r, c, at);
    if (r.kind == access::write)
        note_write(r, c);
    else
        note_other(r, c);
}

/* A number's bytes mostly are: what holds for the first holds for the rest. */
bool same(const cell &a, const cell &b) {
    return !memcmp(&a, &b, sizeof a);
}

cell *global_cell(const void *address) {
    return global_cells + (static_cast<const unsigned char *>(address) - heap_start());
}
cell *shared_cell(const void *address) {
    return shared_cells + (static_cast<const unsigned char *>(address) - arena_start());
}

/* A shared byte that this block has not touched yet: its cell still tells of an earlier block. */
void refresh(cell &c) {
    if (c.write_block == block_now) return;
    c = {uninitialised, nothing, 0, 0, block_now, block_now};
}

void *new_cells(size_t count) {
    void *p = mmap(nullptr, count * sizeof(cell), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("simt: no address space for the checker");
        abort();
    }
    return p;
}

void prepare() {
    if (!shared_cells) shared_cells = static_cast<cell *>(new_cells(arena_bytes));
    if (!global_cells) global_cells = static_cast<cell *>(new_cells(heap_bytes));
}

void against_holders(const request &r, const unsigned char *at) {
    if (any_held && held[at - arena_start()])
        fail_at(r.where,
                text("%s of %zu bytes, %s,\n    which are still being read asynchronously, "
                     "last asked for at ",
                     name_of(r.kind), r.bytes, describe(at).c_str()) +
                    place(place_of(held_by)));
}

request make_request(access kind, const void *address, size_t bytes, code where) {
    const unsigned me = static_cast<unsigned>(the.current->number);
    const stamp mine = me << 20 | epoch[me] | (kind == access::atomic ? is_atomic : 0u);
    return {kind, static_cast<const unsigned char *>(address), bytes, where, me, mine};
}

void next_epoch(unsigned thread) {
    if (++epoch[thread] > epoch_mask) {
        fprintf(stderr, "simt: a thread of %s passes more barriers than the checker can count\n",
                the.kernel.c_str());
        abort();
    }
}

} // namespace

code code_of(site at) {
    static std::unordered_map<uint64_t, code> numbers;
    const uint64_t key =
        reinterpret_cast<uint64_t>(at.file) * 0x10001u + static_cast<uint64_t>(at.line);
    const auto found = numbers.emplace(key, is_place | static_cast<code>(places.size()));
    if (found.second) places.push_back(at);
    return found.first->second;
}

site place_of(code where) {
    return where & is_place ? places[where & ~is_place] : place_of_pc(where);
}

void check_access(access kind, const void *address, size_t bytes, code where) {
    const region in = region_of(address);
    const request r = make_request(kind, address, bytes, where);
    if (in == region::none)
        fail_at(where, text("%s of %zu bytes: ", name_of(kind), bytes) + describe(address));
    if (in == region::shared ? !shared_owns(address, bytes) : !device_owns(address, bytes))
        fail_at(where,
                text("%s of %zu bytes out of bounds: ", name_of(kind), bytes) + describe(address));
    cell *c = in == region::shared ? shared_cell(address) : global_cell(address);
    for (size_t i = 0; in == region::shared && i < bytes; i++) {
        refresh(c[i]);
        if (kind != access::read) against_holders(r, r.address + i);
    }
    for (size_t i = 0, next; i < bytes; i = next) {
        const cell before = c[i];
        one_byte(r, c[i], r.address + i);
        for (next = i + 1; next < bytes && same(c[next], before); next++) c[next] = c[i];
    }
}

/* ---- Order -------------------------------------------------------------------------------- */

void check_launch_begin() {
    if (!checker_on) return;
    prepare();
    launch_first = block_now + 1;
}

void check_block_begin() {
    if (!checker_on) return;
    block_now++;
    forget_sets();
    if (any_held) memset(held, 0, sizeof held);
    any_held = false;
    for (int t = 0; t < the.thread_count; t++) {
        fenced[t] = 0;
        epoch[t] = first_epoch;
        floor_epoch[t] = 0;
        knows_others[t] = false;
        memset(lanes_known[t], 0, sizeof lanes_known[t]);
    }
}

void check_syncwarp(const warp &w, uint32_t mask) {
    if (!checker_on) return;
    const unsigned first = static_cast<unsigned>(w.first);
    uint32_t all[32] = {};
    bool others = false;
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest)), t = first + lane;
        for (int i = 0; i < 32; i++) all[i] = std::max(all[i], lanes_known[t][i]);
        all[lane] = std::max(all[lane], epoch[t]);
        others = others || knows_others[t];
    }
    static uint32_t joint[max_threads];
    if (others) memset(joint, 0, sizeof joint);
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const unsigned t = first + static_cast<unsigned>(__builtin_ctz(rest));
        memcpy(lanes_known[t], all, sizeof all);
        next_epoch(t);
        if (knows_others[t])
            for (int i = 0; i < the.thread_count; i++)
                joint[i] = std::max(joint[i], others_known[t][i]);
    }
    for (uint32_t rest = others ? mask : 0; rest; rest &= rest - 1) {
        const unsigned t = first + static_cast<unsigned>(__builtin_ctz(rest));
        memcpy(others_known[t], joint, sizeof joint);
        knows_others[t] = true;
    }
}

void check_release(uint32_t *clock, const thread &t) {
    const unsigned me = static_cast<unsigned>(t.number), first = me / 32 * 32;
    for (unsigned i = 0; i < static_cast<unsigned>(the.thread_count); i++) {
        uint32_t e = floor_epoch[i];
        if (knows_others[me]) e = std::max(e, others_known[me][i]);
        if (i / 32 == me / 32) e = std::max(e, lanes_known[me][i - first]);
        if (i == me) e = epoch[me];
        clock[i] = std::max(clock[i], e);
    }
    next_epoch(me);
}

void check_acquire(const uint32_t *clock, const thread &t) {
    const int me = t.number;
    if (!knows_others[me]) memset(others_known[me], 0, sizeof others_known[me]);
    knows_others[me] = true;
    for (int i = 0; i < the.thread_count; i++)
        others_known[me][i] = std::max(others_known[me][i], clock[i]);
}

void check_barrier_arrive(const barrier &b, int id) {
    if (!checker_on || b.whole_block) return;
    if (b.arrived == 1) memset(barrier_known[id], 0, sizeof barrier_known[id]);
    check_release(barrier_known[id], *the.current);
}

void check_barrier_complete(const barrier &b, int id) {
    if (!checker_on) return;
    if (!b.whole_block) {
        for (int w = 0; w < the.warp_count; w++)
            for (uint32_t rest = b.waiting[w]; rest; rest &= rest - 1)
                check_acquire(barrier_known[id], lane_of(the.warps[w], __builtin_ctz(rest)));
        return;
    }
    for (int t = 0; t < the.thread_count; t++) {
        floor_epoch[t] = epoch[t];
        knows_others[t] = false;
        next_epoch(static_cast<unsigned>(t));
    }
    forget_sets();
}

/* ---- Memory that comes and goes, and the host's hand in it -------------------------------- */

static void set_cells(const void *start, size_t bytes, stamp state) {
    if (!checker_on) return;
    prepare();
    cell *c = global_cell(start);
    for (size_t i = 0; i < bytes; i++) c[i] = {state, nothing, 0, 0, 0, 0};
}

void check_allocate(const void *start, size_t bytes) {
    set_cells(start, bytes, uninitialised);
}
/* No allocation owns these bytes, so nobody asks for their cells: two dozen bytes for each of
   them. */
void check_free(const void *start, size_t bytes) {
    if (global_cells) drop_pages(global_cell(start), bytes * sizeof(cell));
}
void check_host_write(const void *start, size_t bytes) {
    set_cells(start, bytes, by_host);
}

void check_host_copy(const void *to, const void *from, size_t bytes) {
    if (!checker_on) return;
    prepare();
    for (size_t i = 0; i < bytes; i++) {
        const stamp state = global_cell(from)[i].write;
        global_cell(to)[i] = {
            state == uninitialised ? uninitialised : by_host, nothing, 0, 0, 0, 0};
    }
}

/* ---- Asynchronous copies ------------------------------------------------------------------ */

/* The copy writes from now on, at some moment up to the wait: it must be ordered after all that
   came before, and all else must stay away. */
void check_async_issue(const void *to, size_t bytes, const void *from, size_t valid, site at) {
    if (!checker_on) return;
    const code where = code_of(at);
    if (valid) check_access(access::read, from, valid, where);
    check_access(access::write, to, bytes, where);
    for (size_t i = 0; i < bytes; i++) shared_cell(to)[i].write = in_flight;
}

void check_async_land(const void *to, size_t bytes, const void *from, size_t valid, site at) {
    if (!checker_on) return;
    for (size_t i = 0; i < bytes; i++) {
        cell &c = shared_cell(to)[i];
        if (c.write == in_flight) c.write = by_host; /* the issuing thread was ordered then */
    }
    const code where = code_of(at);
    if (valid) check_access(access::read, from, valid, where);
    check_access(access::write, to, bytes, where);
}

/* ---- Bulk copies and wgmma ----------------------------------------------------------------- */

void check_fence_async() {
    if (!checker_on) return;
    const unsigned me = static_cast<unsigned>(the.current->number);
    fenced[me] = epoch[me];
    next_epoch(me);
}

void check_async_read(const void *address, size_t bytes, site at) {
    if (!checker_on) return;
    check_access(access::read, address, bytes, code_of(at));
    if (region_of(address) != region::shared) return;
    for (size_t i = 0; i < bytes; i++) {
        const cell &c = shared_cell(address)[i];
        if (c.write & is_atomic || epoch_of(c.write) <= fenced[thread_of(c.write)]) continue;
        fail(at, text("an asynchronous read of shared memory, %s,\n    written by ordinary stores "
                      "without a fence.proxy.async after it, by ",
                      describe(static_cast<const unsigned char *>(address) + i).c_str()) +
                     thread_name(c.write) + "\n    at " + place(place_of(c.write_at)));
    }
}

uint32_t check_bulk_epoch() {
    if (!checker_on) return 0;
    const unsigned me = static_cast<unsigned>(the.current->number);
    next_epoch(me);
    return epoch[me];
}

void check_bulk_issued() {
    if (checker_on) next_epoch(static_cast<unsigned>(the.current->number));
}

void check_bulk_issue(const void *to, const void *from, size_t bytes, site at) {
    check_async_issue(to, bytes, from, from ? bytes : 0, at);
}

void check_bulk_land(const void *to, size_t bytes, int thread, uint32_t when, site at) {
    if (!checker_on) return;
    const stamp mine = static_cast<stamp>(thread) << 20 | when | is_atomic;
    for (size_t i = 0; i < bytes; i++)
        shared_cell(to)[i] = {mine, nothing, code_of(at), 0, block_now, block_now};
}

void check_hold(const void *address, size_t bytes, int change, site at) {
    if (!checker_on) return;
    any_held = true;
    if (change > 0) held_by = code_of(at);
    uint8_t *n = held + (static_cast<const unsigned char *>(address) - arena_start());
    for (size_t i = 0; i < bytes; i++) n[i] = static_cast<uint8_t>(n[i] + change);
}

void check_read_only(const void *address, size_t bytes, site at) {
    if (!checker_on || region_of(address) != region::global || !device_owns(address, bytes)) return;
    const cell *c = global_cell(address);
    for (size_t i = 0; i < bytes; i++)
        if (c[i].write_block >= launch_first && c[i].write >= first_epoch)
            fail(at, text("a read-only load of %zu bytes that this launch wrote, %s,\n    at ",
                          bytes, describe(address).c_str()) +
                         place(place_of(c[i].write_at)));
}

} // namespace simt

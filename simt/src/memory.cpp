/* memory.cpp: where device and shared memory lie on the host, what surrounds them, what they hold
   before anybody wrote. Twin: the device's memory. Not here: races and reads of what nobody wrote
   (checker.cpp).

   Device allocations come from one reserved range, each between two red zones, never at an address
   used before while fresh ones are left. Pages of freed ones are given back. Both kinds start as
   all ones: NaN in every float type. */
#include "memory.h"

#include "checker.h"
#include "kernel.h"
#include "machine.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <sys/mman.h>

extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(void const volatile *address, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(void const volatile *address,
                                                         size_t bytes);
}

namespace simt {
namespace {

constexpr size_t red_zone = 512;     /* before and after each device allocation */
constexpr size_t align_device = 256; /* what cudaMalloc promises */
constexpr size_t shared_red_zone = 256;
constexpr unsigned char red_byte = 0xa5;
constexpr size_t page = 4096;

struct allocation {
    size_t bytes;
    bool live;
};

unsigned char *heap, *heap_next;
std::map<unsigned char *, allocation> &allocations() {
    static std::map<unsigned char *, allocation> all;
    return all;
}

/* Those that are not freed, and their bytes: looked at after every block. */
std::map<unsigned char *, size_t> &live() {
    static std::map<unsigned char *, size_t> all;
    return all;
}

struct shared_array {
    const void *key;
    const char *name;
    unsigned char *start;
    size_t bytes;
};

unsigned char *arena, *arena_next;
size_t dynamic_bytes;
shared_array statics[64];
int static_count;

void poison(const void *p, size_t bytes) {
    if (__asan_poison_memory_region) __asan_poison_memory_region(p, bytes);
}
void unpoison(const void *p, size_t bytes) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(p, bytes);
}

/* `align` may be more than a page's: the base of shared memory is aligned to the arena's size. */
unsigned char *reserve(size_t bytes, size_t align) {
    void *p = mmap(nullptr, bytes + align, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("simt: no address space for the device's memory");
        abort();
    }
    const size_t at = (reinterpret_cast<size_t>(p) + align - 1) / align * align;
    return reinterpret_cast<unsigned char *>(at);
}

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}
size_t round_down(size_t n, size_t to) {
    return n / to * to;
}

bool intact(const unsigned char *p, size_t bytes, const unsigned char **where) {
    if (p[0] == red_byte && !memcmp(p, p + 1, bytes - 1)) return true;
    for (size_t i = 0; i < bytes; i++)
        if (p[i] != red_byte) {
            *where = p + i;
            return false;
        }
    return true;
}

/* A red zone that AddressSanitizer guards needs no bytes of its own to compare. */
void lay_red_zone(unsigned char *p, size_t bytes) {
    if (__asan_poison_memory_region)
        poison(p, bytes);
    else
        memset(p, red_byte, bytes);
}

} // namespace

void drop_pages(void *start, size_t bytes) {
    const size_t at = reinterpret_cast<size_t>(start), first = round_up(at, page),
                 end = round_down(at + bytes, page);
    if (end > first) madvise(reinterpret_cast<void *>(first), end - first, MADV_DONTNEED);
}

const unsigned char *heap_start() {
    if (!heap) heap = heap_next = reserve(heap_bytes, align_device);
    return heap;
}

const unsigned char *arena_start() {
    if (!arena) arena = reserve(arena_bytes, 1 << 20);
    return arena;
}

/* ---- Device memory ------------------------------------------------------------------------ */

void *device_allocate(size_t bytes) {
    heap_start();
    const size_t room = round_up(bytes, align_device) + 2 * red_zone;
    if (room < bytes || room > heap_bytes - static_cast<size_t>(heap_next - heap)) return nullptr;
    unsigned char *start = heap_next + red_zone;
    heap_next += room;
    lay_red_zone(start - red_zone, red_zone);
    memset(start, 0xff, bytes);
    lay_red_zone(start + bytes, red_zone);
    allocations()[start] = {bytes, true};
    live()[start] = bytes;
    check_allocate(start, bytes);
    return start;
}

size_t device_live_bytes() {
    size_t sum = 0;
    for (const auto &it : live()) sum += it.second;
    return sum;
}

/* Gives back what nobody will look at again of an allocation's room: all up to the whole pages
   around it, and to its neighbours that live. The pages that it shares with neighbours go with the
   last of these. */
static void give_back(unsigned char *start, size_t bytes) {
    const size_t offset = static_cast<size_t>(start - heap);
    size_t from = round_down(offset - red_zone, page),
           to = round_up(offset + bytes + red_zone, page);
    const auto after = live().upper_bound(start);
    if (after != live().end())
        to = std::min(to, static_cast<size_t>(after->first - heap) - red_zone);
    if (after != live().begin()) {
        const auto before = std::prev(after);
        from =
            std::max(from, static_cast<size_t>(before->first - heap) + before->second + red_zone);
    }
    to = std::min(to, static_cast<size_t>(heap_next - heap));
    drop_pages(heap + from, to - from);
    check_free(heap + from, to - from);
}

bool device_free(void *pointer) {
    const auto it = allocations().find(static_cast<unsigned char *>(pointer));
    if (it == allocations().end() || !it->second.live) return false;
    it->second.live = false;
    live().erase(it->first);
    poison(it->first, it->second.bytes);
    give_back(it->first, it->second.bytes);
    return true;
}

/* The allocation at or before `address`; end() if none. */
static std::map<unsigned char *, allocation>::iterator find_allocation(const void *address) {
    auto &all = allocations();
    auto it = all.upper_bound(static_cast<unsigned char *>(const_cast<void *>(address)));
    return it == all.begin() ? all.end() : --it;
}

region region_of(const void *address) {
    const unsigned char *p = static_cast<const unsigned char *>(address);
    if (heap && p >= heap && p < heap_next) return region::global;
    if (arena && p >= arena && p < arena + arena_bytes) return region::shared;
    return region::none;
}

bool device_owns(const void *address, size_t bytes) {
    const unsigned char *p = static_cast<const unsigned char *>(address);
    if (region_of(p) != region::global) return false;
    const auto it = find_allocation(p);
    if (it == allocations().end() || !it->second.live) return false;
    const size_t from = static_cast<size_t>(p - it->first);
    return from <= it->second.bytes && bytes <= it->second.bytes - from;
}

bool global_red_zones(phrase *damage) {
    if (__asan_poison_memory_region) return true;
    for (const auto &[start, bytes] : live()) {
        const unsigned char *where = nullptr;
        if (!intact(start - red_zone, red_zone, &where) ||
            !intact(start + bytes, red_zone, &where)) {
            *damage = "a write outside device memory: " + describe(where);
            return false;
        }
    }
    return true;
}

/* ---- Shared memory ------------------------------------------------------------------------ */

void shared_begin(size_t bytes) {
    arena_start();
    unpoison(arena, arena_bytes);
    dynamic_bytes = bytes;
    static_count = 0;
    unsigned char *start = arena + 1024;
    lay_red_zone(start - shared_red_zone, shared_red_zone);
    memset(start, 0xff, bytes);
    arena_next = start + bytes;
    lay_red_zone(arena_next, shared_red_zone);
    arena_next += shared_red_zone;
}

unsigned char *shared_dynamic() {
    return arena + 1024;
}

void *shared_static(const char *type_name, const char *name, size_t bytes, size_t align, site at) {
    require_thread("NSA_SHARED", at);
    for (int i = 0; i < static_count; i++)
        if (statics[i].key == type_name) return statics[i].start;
    unsigned char *start =
        arena + round_up(static_cast<size_t>(arena_next - arena), align < 16 ? 16 : align);
    if (static_count == 64) fail(at, text("NSA_SHARED(%s): one of more than 64 arrays", name));
    if (!declares(the.request.kernel, type_name))
        fail(at, text("NSA_SHARED(%s) stands in a function that the kernel calls: a launch would "
                      "not know of its %zu bytes; declare it in the kernel",
                      name, bytes));
    statics[static_count++] = {type_name, name, start, bytes};
    memset(start, 0xff, bytes);
    arena_next = start + bytes;
    lay_red_zone(arena_next, shared_red_zone);
    arena_next += shared_red_zone;
    return start;
}

bool shared_owns(const void *address, size_t bytes) {
    const unsigned char *p = static_cast<const unsigned char *>(address);
    if (region_of(p) != region::shared) return false;
    const unsigned char *start = arena + 1024;
    if (p >= start && p <= start + dynamic_bytes)
        return bytes <= dynamic_bytes - static_cast<size_t>(p - start);
    for (int i = 0; i < static_count; i++) {
        const shared_array &s = statics[i];
        if (p >= s.start && p <= s.start + s.bytes)
            return bytes <= s.bytes - static_cast<size_t>(p - s.start);
    }
    return false;
}

bool shared_end(phrase *damage) {
    if (__asan_poison_memory_region) return true;
    const unsigned char *where = nullptr, *start = arena + 1024;
    bool whole = intact(start - shared_red_zone, shared_red_zone, &where) &&
                 intact(start + dynamic_bytes, shared_red_zone, &where);
    for (int i = 0; whole && i < static_count; i++)
        whole = intact(statics[i].start + statics[i].bytes, shared_red_zone, &where);
    if (!whole) *damage = "a write outside shared memory: " + describe(where);
    return whole;
}

uint32_t shared_offset(const void *shared) {
    return static_cast<uint32_t>(static_cast<const unsigned char *>(shared) - arena_start());
}

/* ---- In words ----------------------------------------------------------------------------- */

static phrase against(const char *what, const unsigned char *start, size_t bytes,
                      const unsigned char *p) {
    const long from = p - start, past = from - static_cast<long>(bytes);
    if (from < 0) return text("%ld bytes before the %zu bytes of %s", -from, bytes, what);
    if (past >= 0) return text("%ld bytes after the end of the %zu bytes of %s", past, bytes, what);
    return text("byte %ld of the %zu of %s", from, bytes, what);
}

phrase describe(const void *address) {
    const unsigned char *p = static_cast<const unsigned char *>(address);
    if (region_of(p) == region::global) {
        auto it = find_allocation(p + red_zone); /* its own left red zone belongs to it */
        if (it == allocations().end())
            return text("address %p, before all of device memory", address);
        if (p < it->first - red_zone) --it;
        return against(it->second.live ? "a device allocation" : "a freed device allocation",
                       it->first, it->second.bytes, p);
    }
    if (region_of(p) == region::shared) {
        const shared_array *near = nullptr;
        for (int i = 0; i < static_count; i++)
            if (p >= statics[i].start) near = &statics[i];
        if (near) return against(near->name, near->start, near->bytes, p);
        return against("the block's dynamic shared memory", arena + 1024, dynamic_bytes, p);
    }
    return text("address %p is neither device nor shared memory", address);
}

} // namespace simt

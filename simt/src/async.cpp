/* async.cpp: cp.async. A copy lands at the wait that demands it and not before, or at once where
   settings.early says so; a right kernel cannot tell. Twin: the sm_80 copy unit.
   Not here: bulk copies (bulk.cpp). */
#include "async.h"

#include "checker.h"
#include "groups.h"
#include "machine.h"
#include "memory.h"

namespace simt {
namespace {

struct copy {
    void *to;
    const void *from;
    int bytes, valid;
    site at;
};

thread_groups<copy> copies;

void move_bytes(const copy &c) {
    memcpy(c.to, c.from, static_cast<size_t>(c.valid));
    memset(static_cast<unsigned char *>(c.to) + c.valid, 0, static_cast<size_t>(c.bytes - c.valid));
}

void land(const copy &c) {
    check_async_land(c.to, static_cast<size_t>(c.bytes), c.from, static_cast<size_t>(c.valid),
                     c.at);
    if (!config().early) move_bytes(c);
}

phrase hex_address(const void *p) {
    return text("%p", p);
}

void check_copy(const copy &c) {
    const size_t bytes = static_cast<size_t>(c.bytes), valid = static_cast<size_t>(c.valid);
    if (c.valid < 0 || c.valid > c.bytes)
        fail(c.at, text("cp.async of %d bytes, %d of them valid", c.bytes, c.valid));
    if (reinterpret_cast<size_t>(c.to) % bytes != 0)
        fail(c.at, text("cp.async: shared address is not a multiple of %d", c.bytes));
    if (!shared_owns(c.to, bytes))
        fail(c.at, "cp.async writes outside shared memory: " + describe(c.to));
    if (valid == 0) return;
    if (reinterpret_cast<size_t>(c.from) % bytes != 0)
        fail(c.at, text("cp.async: global address %s is not a multiple of %d",
                        hex_address(c.from).c_str(), c.bytes));
    if (!device_owns(c.from, valid))
        fail(c.at, "cp.async reads outside device memory: " + describe(c.from));
}

} // namespace

void cp_async(void *shared, const void *global, int bytes, int valid, site at) {
    require_thread("cp.async", at);
    const copy c = {shared, global, bytes, valid, at};
    check_copy(c);
    check_async_issue(shared, static_cast<size_t>(bytes), global, static_cast<size_t>(valid), at);
    the.counted.async_bytes += static_cast<uint64_t>(valid);
    if (config().early) move_bytes(c);
    copies.add(c);
}

void cp_async_commit(site at) {
    require_thread("cp.async.commit_group", at);
    copies.commit();
}

void cp_async_wait(int pending, site at) {
    require_thread("cp.async.wait_group", at);
    copies.wait(pending, land);
}

void cp_async_begin() {
    copies.begin();
}

void cp_async_end() {
    copies.end("cp.async");
}

/* ---- All that is asynchronous -------------------------------------------------------------- */

void async_begin() {
    cp_async_begin();
    mbarrier_begin();
    bulk_begin();
    wgmma_begin();
}

bool async_progress() {
    return bulk_land_one();
}

void async_chance() {
    if (the.schedule == order::random && random_number() % 16 == 0) bulk_land_one();
}

void async_end() {
    cp_async_end();
    bulk_end();
    wgmma_end();
}

} // namespace simt

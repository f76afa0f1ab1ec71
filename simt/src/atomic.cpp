/* atomic.cpp: atomics, fences and pauses. Twin: the memory system's order, which is not modelled:
   every access takes effect at once and in program order; what the checker makes of it is in
   checker.cpp. */
#include "checker.h"
#include "machine.h"
#include "memory.h"

namespace simt {

void read_only(const void *address, size_t bytes, site at) {
    require_thread("__ldg", at);
    check_read_only(address, bytes, at);
}

void atomic_read(const void *address, void *old, size_t bytes, site at) {
    require_thread("an atomic", at);
    if (reinterpret_cast<size_t>(address) % bytes != 0)
        fail(at, text("atomic: the address is not a multiple of %zu", bytes));
    if (!device_owns(address, bytes) && !shared_owns(address, bytes))
        fail(at, "atomic outside device and shared memory: " + describe(address));
    check_atomic(address, bytes, at);
    memcpy(old, address, bytes);
}

void atomic_write(void *address, const void *value, size_t bytes, site) {
    memcpy(address, value, bytes);
}

void fence(int, site at) {
    require_thread("a fence", at);
}

void fence_async(site at) {
    require_thread("fence.proxy.async", at);
    check_fence_async();
}

void pause(site at) {
    require_thread("__nanosleep", at);
    let_others_run();
}

} // namespace simt

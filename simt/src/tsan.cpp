/* tsan.cpp: the calls that `-fsanitize=thread` puts before each load and store, and from an address
   in the program to its line. Twin: libtsan, which is not linked. Not here: what is right or wrong
   (checker.cpp). */
#include "checker.h"
#include "memory.h"

#include <atomic>
#include <cstdlib>
#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <unordered_map>

extern "C" char __executable_start, __data_start;

namespace simt {
namespace {

uintptr_t load_address() {
    static const uintptr_t base = [] {
        uintptr_t first = 0;
        dl_iterate_phdr(
            [](dl_phdr_info *info, size_t, void *out) {
                *static_cast<uintptr_t *>(out) = info->dlpi_addr;
                return 1; /* the program itself comes first */
            },
            &first);
        return first;
    }();
    return base;
}

template <typename T> bool within(uintptr_t p, const T &object) {
    return p - reinterpret_cast<uintptr_t>(&object) < sizeof object;
}

/* Constants of the program, the kernel's parameters, the built-in indices. */
bool readable(uintptr_t p) {
    const uintptr_t params = reinterpret_cast<uintptr_t>(the.request.params);
    return p - params < the.request.params_bytes || within(p, threadIdx) || within(p, blockIdx) ||
           within(p, blockDim) || within(p, gridDim) ||
           (p >= reinterpret_cast<uintptr_t>(&__executable_start) &&
            p < reinterpret_cast<uintptr_t>(&__data_start));
}

__attribute__((noinline)) void shared_or_global(access kind, const void *address, size_t bytes,
                                                const void *pc) {
    if (kind == access::read && region_of(address) == region::none &&
        readable(reinterpret_cast<uintptr_t>(address)))
        return;
    if (config().preempt && random_number() % config().preempt == 0) let_others_run();
    if (region_of(address) == region::global)
        (kind == access::read ? the.counted.global_read_bytes : the.counted.global_write_bytes) +=
            bytes;
    check_access(kind, address, bytes, code_of_pc(pc));
}

inline void seen(access kind, const void *address, size_t bytes, const void *pc) {
    if (!the.current) return; /* host code */
    const fiber &f = the.current->run;
    if (static_cast<size_t>(static_cast<const unsigned char *>(address) - f.stack) < f.stack_bytes)
        return; /* its own local variables */
    shared_or_global(kind, address, bytes, pc);
}

void misaligned(const void *address, size_t bytes, const void *pc) {
    if (!the.current || region_of(address) == region::none) return;
    if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
        fail(place_of(code_of_pc(pc)),
             text("an access of %zu bytes at an address that is no multiple "
                  "of %zu: ",
                  bytes, bytes) +
                 describe(address));
}

} // namespace

code code_of_pc(const void *pc) {
    return static_cast<code>(reinterpret_cast<uintptr_t>(pc) - 1 - load_address());
}

/* addr2line prints the inlined frames from the inside out; a kernel's line is the first one outside
   the language's own headers. */
site place_of_pc(code where) {
    static std::unordered_map<code, site> known;
    const auto found = known.find(where);
    if (found != known.end()) return found->second;
    char program[4096];
    const ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    program[n > 0 ? n : 0] = 0;
    FILE *p = popen(text("addr2line -i -e '%s' 0x%x 2>/dev/null", program, where).c_str(), "r");
    static std::unordered_map<std::string, int> names;
    site at = {"(unknown place)", static_cast<int>(where)};
    char line[4096];
    while (p && fgets(line, sizeof line, p)) {
        const std::string frame(line, strcspn(line, " \n"));
        const size_t colon = frame.rfind(':');
        if (colon == std::string::npos || frame[0] == '?') continue;
        const size_t mark = frame.rfind("/./"); /* the build puts it before what is its own */
        const size_t start = mark == std::string::npos ? 0 : mark + 3;
        at = {names.emplace(frame.substr(start, colon - start), 0).first->first.c_str(),
              atoi(frame.c_str() + colon + 1)};
        if (frame.find("nsa_simt.h") == std::string::npos &&
            frame.find("/c++/") == std::string::npos)
            break;
    }
    if (p) pclose(p);
    return known.emplace(where, at).first->second;
}

} // namespace simt

using namespace simt;

#define PC __builtin_return_address(0)

extern "C" {

void __tsan_init() {
    checker_on = true;
}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}

#define SIZE(n)                               \
    void __tsan_read##n(void *p) {            \
        misaligned(p, n, PC);                 \
        seen(access::read, p, n, PC);         \
    }                                         \
    void __tsan_write##n(void *p) {           \
        misaligned(p, n, PC);                 \
        seen(access::write, p, n, PC);        \
    }                                         \
    void __tsan_unaligned_read##n(void *p) {  \
        seen(access::read, p, n, PC);         \
    }                                         \
    void __tsan_unaligned_write##n(void *p) { \
        seen(access::write, p, n, PC);        \
    }
SIZE(1)
SIZE(2)
SIZE(4)
SIZE(8)
SIZE(16)
#undef SIZE

void __tsan_read_range(void *p, size_t bytes) {
    seen(access::read, p, bytes, PC);
}
void __tsan_write_range(void *p, size_t bytes) {
    seen(access::write, p, bytes, PC);
}

/* Host code alone has these (reference counts, guards of static variables). */
#define ATOMIC(bits, type)                                                                      \
    type __tsan_atomic##bits##_load(const volatile type *p, int) {                              \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                            \
    }                                                                                           \
    void __tsan_atomic##bits##_store(volatile type *p, type v, int) {                           \
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                               \
    }                                                                                           \
    type __tsan_atomic##bits##_exchange(volatile type *p, type v, int) {                        \
        return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                     \
    }                                                                                           \
    type __tsan_atomic##bits##_fetch_add(volatile type *p, type v, int) {                       \
        return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                      \
    }                                                                                           \
    type __tsan_atomic##bits##_fetch_sub(volatile type *p, type v, int) {                       \
        return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                      \
    }                                                                                           \
    type __tsan_atomic##bits##_fetch_or(volatile type *p, type v, int) {                        \
        return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);                                       \
    }                                                                                           \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile type *p, type *old, type v, int, \
                                                      int) {                                    \
        return __atomic_compare_exchange_n(p, old, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);   \
    }                                                                                           \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile type *p, type *old, type v, int,   \
                                                    int) {                                      \
        return __atomic_compare_exchange_n(p, old, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);   \
    }
ATOMIC(8, unsigned char)
ATOMIC(16, unsigned short)
ATOMIC(32, unsigned)
ATOMIC(64, unsigned long)
#undef ATOMIC
void __tsan_atomic_thread_fence(int) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

} /* extern "C" */

/* fiber.cpp: one stack a thread, switched in assembly on x86-64 (ucontext's system calls cost ten
   times as much) and by ucontext elsewhere. Twin: none. Not here: the schedule. */
#include "fiber.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

/* Present only in programs built with AddressSanitizer. */
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void **save, const void *bottom,
                                                          size_t bytes);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void *save, const void **bottom,
                                                           size_t *bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(void const volatile *address,
                                                         size_t bytes);
}

namespace simt {
namespace {

constexpr size_t stack_bytes = 256 * 1024; /* address space; memory is taken page by page */

unsigned char *new_stack() {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void *p = mmap(nullptr, stack_bytes + page, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (p == MAP_FAILED || mprotect(p, page, PROT_NONE) != 0) {
        perror("simt: no memory for a thread's stack");
        abort();
    }
    return static_cast<unsigned char *>(p) + page;
}

} // namespace

#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)

/* A fiber's context is made once and lives as long as the program. */
static ucontext_t &context_of(fiber &f) {
    if (!f.state) f.state = new ucontext_t;
    return *static_cast<ucontext_t *>(f.state);
}
static void arrange(fiber &f, void (*entry)()) {
    ucontext_t &c = context_of(f);
    getcontext(&c);
    c.uc_stack.ss_sp = f.stack;
    c.uc_stack.ss_size = f.stack_bytes;
    c.uc_link = nullptr;
    makecontext(&c, entry, 0);
}
static void exchange(fiber &from, fiber &to) {
    swapcontext(&context_of(from), &context_of(to));
}

#else

/* What a function must preserve is rbx, rbp, r12-r15 (nothing here changes the control words). */
asm(R"(
.text
.p2align 4
.type simt_exchange, @function
simt_exchange:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_exchange, .-simt_exchange
)");
extern "C" void simt_exchange(void **save_top, void **load_top);

static void arrange(fiber &f, void (*entry)()) {
    /* Entered by `ret`: the stack then is what a call leaves, 8 below a multiple of 16. */
    void **top = reinterpret_cast<void **>(f.stack + f.stack_bytes - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f.state = top;
}
static void exchange(fiber &from, fiber &to) {
    simt_exchange(&from.state, &to.state);
}

#endif

void fiber_prepare(fiber &f, size_t depth, void (*entry)()) {
    if (!f.stack) {
        static size_t made;
        f.stack = new_stack();
        /* Tops at one place of their pages would be in the same few sets of the cache. */
        f.stack_bytes = stack_bytes - 192 * (made++ % 21);
    }
    f.fake_stack = nullptr;
    /* Local variables that nobody initialised are NaN, where the first frames lie. */
    memset(f.stack + f.stack_bytes - depth, 0xff, depth);
    arrange(f, entry);
}

__attribute__((no_sanitize("address"))) size_t fiber_depth(const fiber &f, size_t filled,
                                                           size_t watched) {
    const uint64_t *const lowest =
        reinterpret_cast<const uint64_t *>(f.stack + f.stack_bytes - filled);
    size_t untouched = 0;
    while (untouched < watched / 8 && lowest[untouched] == ~uint64_t(0)) untouched++;
    return untouched < watched / 8 ? filled - 8 * untouched : 0;
}

void fiber_abandon(fiber &f) {
    if (f.stack && __asan_unpoison_memory_region)
        __asan_unpoison_memory_region(f.stack, f.stack_bytes);
}

void fiber_switch(fiber &from, fiber &to, bool gone) {
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(gone ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
    exchange(from, to);
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
}

void fiber_started() {
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}

void fiber_adopt_main(fiber &f) {
    if (f.stack) return;
    pthread_attr_t attributes;
    void *bottom = nullptr;
    size_t bytes = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &bottom, &bytes);
    pthread_attr_destroy(&attributes);
    f.stack = static_cast<unsigned char *>(bottom);
    f.stack_bytes = bytes;
}

} // namespace simt

/* fiber.h: stacks and the switch between them.
   Twin: none. Not here: which fiber runs next (schedule.cpp). */
#ifndef SIMT_FIBER_H
#define SIMT_FIBER_H

#include <cstddef>
#include <cstdint>

namespace simt {

struct fiber {
    unsigned char *stack = nullptr; /* lowest address; the page below is inaccessible */
    size_t stack_bytes = 0;
    void *fake_stack = nullptr; /* AddressSanitizer's */
    void *state = nullptr;      /* saved stack pointer, or a ucontext_t */
};

/* Bytes of a stack that may hold what an earlier run left. */
constexpr size_t fiber_filled = 16 * 1024;

/* Gives `f` a stack (kept for later use), fills `depth` bytes of it with ones, and makes `entry`
   what it runs when first switched to. */
void fiber_prepare(fiber &f, size_t depth, void (*entry)());

/* How many of the `filled` bytes its run has used, which fiber_prepare had filled; 0 if it has left
   the lowest `watched` of them alone. Both are multiples of 64. */
size_t fiber_depth(const fiber &f, size_t filled, size_t watched);

/* Leaves `from`, enters `to`. `gone`: `from` will never be entered again as it stands. */
void fiber_switch(fiber &from, fiber &to, bool gone);

/* The first thing a fresh fiber does. */
void fiber_started();

/* `f` was left in the middle of its run: wipes what AddressSanitizer remembers of its frames. */
void fiber_abandon(fiber &f);

/* The stack that the caller runs on becomes `f`, to switch back to. */
void fiber_adopt_main(fiber &f);

} // namespace simt

#endif

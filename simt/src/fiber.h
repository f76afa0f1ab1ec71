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

/* Gives `f` a stack (kept for later use) and makes `entry` what it runs when first switched to. */
void fiber_prepare(fiber &f, void (*entry)());

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

/* machine.h: the state of a launch: threads, warps, the block under way, and what runs them.
   Twin: the streaming multiprocessor. Blocks run one after another, so there is one of each.
   Not here: memory (memory.h), the checker (checker.h). */
#ifndef SIMT_MACHINE_H
#define SIMT_MACHINE_H

#include "fiber.h"
#include "nsa_simt.h"
#include "simt.h"

#include <string>
#include <vector>

namespace simt {

constexpr int max_threads = 1024, max_warps = 32, named_barriers = 16;

enum class state { ready, in_warp_op, at_barrier, at_mbarrier, exited };

struct barrier_result {
    int sum, all, any;
};

struct thread {
    fiber run;
    uint3 index;
    int number, warp, lane;
    state now;
    const char *waits_in; /* name and place of what it waits for */
    site waits_at;
    uint32_t waits_mask;
    const void *waits_for; /* the mbarrier, or the named barrier */
    void *argument;        /* of the warp operation it has arrived at */
    barrier_result result; /* of the last block barrier */
};

/* Lanes that have arrived at one warp operation; the last of `mask` carries it out. */
struct gathering {
    uint32_t mask, arrived;
    const char *name;
    site at;
};

struct warp {
    uint32_t present, exited, ready;
    int first; /* number of its lane 0's thread */
    gathering pending[32];
    int pending_count;
};

struct barrier {
    int expected, arrived;
    bool whole_block;
    site at; /* of the first to arrive */
    const char *name;
    barrier_result result;
    uint32_t lanes[max_warps];   /* arrived, a bit a lane */
    uint32_t waiting[max_warps]; /* those of them that wait */
};

struct machine {
    launch_request request;
    std::string kernel;
    bool running = false;
    int thread_count = 0, warp_count = 0;
    uint32_t warps_ready = 0; /* a bit a warp that has a ready lane */
    int live = 0;             /* threads that have not exited */
    thread threads[max_threads];
    warp warps[max_warps];
    barrier barriers[named_barriers];
    fiber main;
    thread *current = nullptr;
    order schedule = order::in_order; /* config()'s, for as long as the launch takes */
    uint64_t random = 0;
    bool failed = false;
    counters counted = {};
};
extern machine the;

inline thread &lane_of(const warp &w, int lane) {
    return the.threads[w.first + lane];
}

/* schedule.cpp */
uint64_t random_number();
void wait_for_turn();  /* the current thread stays as it is marked; returns when it is ready */
void let_others_run(); /* the current thread stays ready */
void wake(thread &t);
bool run_block(dim3 index); /* false: the launch failed */

/* collective.cpp */
void thread_exits(thread &t);
void forget_barriers();

/* A warp operation: arrives with `argument`; the last lane of `mask` to come runs `all(warp,
   mask)`. */
void warp_operation(uint32_t mask, const char *name, site at, void *argument,
                    void (*all)(const warp &w, uint32_t mask));
/* One that PTX marks .aligned: all 32 lanes, or it is undefined. */
void aligned_operation(const char *name, site at, void *argument,
                       void (*all)(const warp &w, uint32_t mask));

/* report.cpp. A phrase owns no memory: a thread that fails is left where it stands. */
struct phrase {
    char chars[640];
    const char *c_str() const { return chars; }
};
phrase operator+(const phrase &a, const phrase &b);
phrase operator+(const char *a, const phrase &b);
phrase operator+(const phrase &a, const char *b);
phrase text(const char *format, ...) __attribute__((format(printf, 1, 2)));
phrase place(site at);
phrase who(const thread &t);
void note(const phrase &message);                    /* records and prints */
[[noreturn]] void fail(site at, const phrase &what); /* ends the launch from a thread */
[[noreturn]] void fail(site at, const char *what);
[[noreturn]] void deadlock(site at); /* names who waits where */
[[noreturn]] void leave_failed();
void require_thread(const char *name, site at); /* aborts if called outside a kernel */
void clear_last_report();

} // namespace simt

#endif

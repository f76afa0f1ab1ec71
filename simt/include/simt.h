/* simt.h: the executor seen from a test: settings, counters, the last report.
   Twin: none; on a GPU nothing of it exists, so shared tests use it only under NSA_SIMT.
   Not here: the CUDA runtime's functions, which the executor defines under their own names. */
#ifndef SIMT_H
#define SIMT_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace simt {

enum class order { in_order, reversed, random };

/* Read from the environment before the first launch (names in simt/README.md); a test may
   change them between launches. */
struct settings {
    order schedule;   /* threads, warps and blocks of a launch */
    uint64_t seed;    /* of `random`, and of preemption */
    bool early;       /* asynchronous copies land when they are issued, not when waited for */
    unsigned preempt; /* checker only: one access in so many yields; 0: never */
    int architecture; /* 80, 86, 89, 90, 100 or 120: the limits that launches are held to */
    bool coarse;      /* tensor cores cut sums off, ex2 and lg2 err, as far as a device's may */
    bool ask;   /* launches are held to the limits, but neither they nor sets and copies run */
    bool quiet; /* no report on stderr: for tests that plant a fault */
};
settings &config();

/* What happened since the last reset_counters(). */
struct counters {
    uint64_t launches, blocks, switches;
    uint64_t mma, ldmatrix, wgmma;
    uint64_t ldmatrix_phases,
        ldmatrix_cycles;  /* 8 rows a phase; 1 cycle a phase is free of conflicts */
    uint64_t async_bytes; /* global to shared by cp.async and bulk copies */
    uint64_t global_read_bytes, global_write_bytes; /* checker only: plain loads and stores */
};
const counters &count();
void reset_counters();

/* The functions of the objects that hold launched kernels. */
struct function {
    std::string symbol;
    size_t static_bytes; /* of shared memory, up to where dynamic memory begins */
    bool launched;       /* or asked for a launch that was not refused */
};
std::vector<function> functions();

/* The checker's calls are compiled into this program. */
bool checking();

/* The text of the last error in a launch, "" if none since clear_report(). An error is sticky, as
   on a device: every later call returns it until cudaDeviceReset() or clear_report(). */
const std::string &report();
void clear_report();

} // namespace simt

#endif

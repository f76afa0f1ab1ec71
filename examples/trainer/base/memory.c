/* memory.c - see memory.h. */
#include "base/memory.h"

#include <math.h>
#include <stdio.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "base/cgroup.h"

static double swap_of_machine(void) {
    struct sysinfo s;
    return sysinfo(&s) ? 0 : (double)s.totalswap * s.mem_unit;
}

double memory_of_group(const char *folder) {
    double swap = cgroup_number(folder, "memory.swap.max");
    return cgroup_number(folder, "memory.max") + fmin(swap, swap_of_machine());
}

/* Version 1 counts swap with memory, where it counts it. No limit is a number near 2^63. */
double memory_of_group_1(const char *folder) {
    double both = cgroup_number(folder, "memory.memsw.limit_in_bytes");
    double memory = cgroup_number(folder, "memory.limit_in_bytes") + swap_of_machine();
    double least = fmin(both, memory);
    return least < 0x1p62 ? least : INFINITY;
}

double memory_limit(void) {
    struct sysinfo s;
    double machine = sysinfo(&s) ? INFINITY : (double)s.totalram * s.mem_unit + swap_of_machine();
    return fmin(machine, cgroup_here(memory_of_group, "memory", memory_of_group_1));
}

static double held_now(void) {
    long all, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%ld %ld", &all, &resident) != 2) resident = 0;
    if (file) fclose(file);
    return (double)resident * (double)sysconf(_SC_PAGESIZE);
}

bool memory_fits(const char *what, size_t bytes, fault *f) {
    double limit = memory_limit(), held = held_now();
    if ((double)bytes + held <= limit) return true;
    return fault_set(f,
                     "%s: no memory for %.1f MiB beside the %.1f MiB in use: this process may have "
                     "%.1f MiB (the machine's memory, or its control group's)",
                     what, (double)bytes / (1 << 20), held / (1 << 20), limit / (1 << 20));
}

size_t memory_grow(const char *what, size_t used, size_t more, fault *f) {
    enum { LARGE = 1 << 25 }; /* below it the limit is not asked for: that reads files */
    size_t need = used + more, room = need < LARGE ? 2 * need : need + need / 8;
    return need < LARGE || memory_fits(what, room - used, f) ? room : 0;
}

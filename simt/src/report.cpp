/* report.cpp: what went wrong, in one text: kernel, block, thread, file and line.
   Twin: compute-sanitizer's reports. Not here: finding it out. */
#include "async.h"
#include "machine.h"

#include <cstdarg>
#include <cstdlib>

namespace simt {

static std::string first_error;

phrase text(const char *format, ...) {
    va_list list;
    va_start(list, format);
    phrase p;
    vsnprintf(p.chars, sizeof p.chars, format, list);
    va_end(list);
    return p;
}

phrase operator+(const phrase &a, const phrase &b) {
    return text("%s%s", a.chars, b.chars);
}
phrase operator+(const char *a, const phrase &b) {
    return text("%s%s", a, b.chars);
}
phrase operator+(const phrase &a, const char *b) {
    return text("%s%s", a.chars, b);
}

phrase place(site at) {
    return text("%s:%d", at.file, at.line);
}

phrase who(const thread &t) {
    return text("thread (%u,%u,%u), warp %d lane %d", t.index.x, t.index.y, t.index.z, t.warp,
                t.lane);
}

const std::string &report() {
    return first_error;
}

static void record(const char *message, const char *details) {
    static std::string full;
    full = message;
    full += details;
    full += text("\n    kernel %s, grid (%u,%u,%u), block of (%u,%u,%u), block (%u,%u,%u)",
                 the.kernel.c_str(), gridDim.x, gridDim.y, gridDim.z, blockDim.x, blockDim.y,
                 blockDim.z, blockIdx.x, blockIdx.y, blockIdx.z)
                .c_str();
    full += "\n    launched at ";
    full += place(the.request.at).c_str();
    full += "\n";
    if (!config().quiet) fprintf(stderr, "simt: %s", full.c_str());
    if (first_error.empty()) first_error = full; /* the first error is the one to read */
    the.failed = true;
}

void note(const phrase &message) {
    record(message.c_str(), "");
}

void fail(site at, const char *what) {
    record((place(at) + ": " + what).c_str(), ("\n    " + who(*the.current)).c_str());
    leave_failed();
}

void fail(site at, const phrase &what) {
    fail(at, what.c_str());
}

void trap(const char *name, site at) {
    require_thread(name, at);
    fail(at, name);
}

void require_thread(const char *name, site at) {
    if (the.current) return;
    fprintf(stderr, "simt: %s: %s is called outside a kernel\n", place(at).c_str(), name);
    abort();
}

static bool wait_alike(const thread &a, const thread &b) {
    if (a.now != b.now) return false;
    if (a.now == state::exited) return true;
    return a.waits_at.line == b.waits_at.line && !strcmp(a.waits_in, b.waits_in) &&
           (a.now != state::in_warp_op || a.waits_mask == b.waits_mask);
}

/* One line for each warp and thing waited for, lanes as a mask. */
void deadlock(site at) {
    static std::string all;
    all.clear();
    for (int w = 0; w < the.warp_count; w++) {
        const warp &it = the.warps[w];
        for (uint32_t left = it.present; left;) {
            const thread &t = lane_of(it, __builtin_ctz(left));
            uint32_t lanes = 0;
            for (uint32_t rest = left; rest; rest &= rest - 1)
                if (wait_alike(lane_of(it, __builtin_ctz(rest)), t)) lanes |= rest & -rest;
            left &= ~lanes;
            all += text("\n    warp %d lanes 0x%08x: ", w, lanes).c_str();
            if (t.now == state::exited)
                all += "exited";
            else if (t.now == state::in_warp_op)
                all += text("wait in %s with mask 0x%08x at ", t.waits_in, t.waits_mask).c_str();
            else
                all += text("wait in %s at ", t.waits_in).c_str();
            if (t.now != state::exited) all += place(t.waits_at).c_str();
            if (t.now == state::at_mbarrier) all += mbarrier_describe(t.waits_for).c_str();
        }
    }
    record((place(at) + ": deadlock: no thread of the block can go on").c_str(), all.c_str());
    leave_failed();
}

void clear_last_report() {
    first_error.clear();
}

} // namespace simt

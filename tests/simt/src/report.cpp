/* report.cpp: what went wrong, in one text: kernel, block, thread, file and line.
   Twin: compute-sanitizer's reports. Not here: finding it out. */
#include "machine.h"

#include <cstdarg>
#include <cstdlib>

namespace simt {

static std::string last;

std::string text(const char *format, ...) {
    va_list list;
    va_start(list, format);
    char buffer[1024];
    vsnprintf(buffer, sizeof buffer, format, list);
    va_end(list);
    return buffer;
}

std::string place(site at) {
    return text("%s:%d", at.file, at.line);
}

std::string who(const thread &t) {
    return text("thread (%u,%u,%u), warp %d lane %d", t.index.x, t.index.y, t.index.z, t.warp,
                t.lane);
}

const std::string &report() {
    return last;
}

void note(const std::string &message) {
    std::string full =
        message + "\n    kernel " + the.kernel +
        text(", grid (%u,%u,%u), block of (%u,%u,%u), block (%u,%u,%u)", gridDim.x, gridDim.y,
             gridDim.z, blockDim.x, blockDim.y, blockDim.z, blockIdx.x, blockIdx.y, blockIdx.z);
    full += "\n    launched at " + place(the.request.at) + "\n";
    if (!config().quiet) fprintf(stderr, "simt: %s", full.c_str());
    if (last.empty()) last = full; /* the first error is the one to read */
    the.failed = true;
}

void fail(site at, const std::string &what) {
    note(place(at) + ": " + what + "\n    " + who(*the.current));
    leave_failed();
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

/* One line for each warp and thing waited for, lanes as a mask. */
std::string waiting_threads() {
    std::string all;
    for (int w = 0; w < the.warp_count; w++) {
        const warp &it = the.warps[w];
        uint32_t left = it.present;
        while (left) {
            const thread &t = lane_of(it, __builtin_ctz(left));
            uint32_t lanes = 0;
            for (uint32_t rest = left; rest; rest &= rest - 1) {
                const thread &u = lane_of(it, __builtin_ctz(rest));
                if (u.now == t.now &&
                    (t.now == state::exited ||
                     (u.waits_at.line == t.waits_at.line && u.waits_mask == t.waits_mask)))
                    lanes |= 1u << u.lane;
            }
            all += text("    warp %d lanes 0x%08x: ", w, lanes);
            if (t.now == state::exited)
                all += "exited\n";
            else {
                all += text("wait in %s", t.waits_in);
                if (t.now == state::in_warp_op) all += text(" with mask 0x%08x", t.waits_mask);
                all += " at " + place(t.waits_at) + "\n";
            }
            left &= ~lanes;
        }
    }
    if (!all.empty()) all.pop_back();
    return all;
}

void clear_last_report() {
    last.clear();
}

} // namespace simt

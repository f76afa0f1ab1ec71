/* graph.cpp: stream capture and the graphs it makes, run in the order of recording. Twin: the CUDA
   runtime's graphs, as far as captured streams go. Not here: graphs built node by node, updates,
   conditional nodes. */
#include "graph.h"

#include "machine.h"
#include "runtime.h"

#include <map>
#include <set>
#include <utility>
#include <vector>

namespace {

using work_list = std::vector<std::function<void()>>;

/* One recording at a time; streams join it by waiting for one of its events. */
struct recording {
    bool active = false, spoiled = false;
    cudaStream_t origin = nullptr;
    std::set<cudaStream_t> streams, unjoined; /* unjoined: with work that no other waits for */
    std::map<cudaEvent_t, std::pair<cudaStream_t, size_t>> events; /* recorded where, behind what */
    std::map<cudaStream_t, size_t> last; /* a stream's newest work, counted from 1 */
    work_list work;
} now;

bool default_stream(cudaStream_t s) {
    return !s || s == cudaStreamLegacy;
}

} // namespace

struct CUgraph_st {
    work_list work;
};
struct CUgraphExec_st {
    work_list work;
};

namespace simt {

bool capture(cudaStream_t stream, std::function<void()> work) {
    if (!now.active || !now.streams.count(stream)) return false;
    now.work.push_back(std::move(work));
    now.last[stream] = now.work.size();
    if (stream != now.origin) now.unjoined.insert(stream);
    return true;
}

cudaError_t refused_by_capture() {
    if (!now.active) return cudaSuccess;
    now.spoiled = true;
    return remember(cudaErrorStreamCaptureUnsupported);
}

cudaError_t refused_on_stream(cudaStream_t stream) {
    if (!now.active || !default_stream(stream)) return cudaSuccess;
    now.spoiled = true;
    return remember(cudaErrorStreamCaptureImplicit);
}

void capture_event(cudaEvent_t event, cudaStream_t stream) {
    if (now.active && now.streams.count(stream))
        now.events[event] = {stream, now.last[stream]};
    else
        now.events.erase(event);
}

void capture_wait(cudaStream_t stream, cudaEvent_t event) {
    if (!now.active || !now.events.count(event)) return;
    const auto [from, work] = now.events[event];
    now.streams.insert(stream);
    if (from == stream || work != now.last[from] || !now.unjoined.erase(from)) return;
    if (stream != now.origin) now.unjoined.insert(stream);
}

} // namespace simt

using namespace simt;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (sticky_error() != cudaSuccess) return sticky_error();
    if (default_stream(stream)) return remember(cudaErrorStreamCaptureUnsupported);
    if (!known_stream(stream)) return remember(cudaErrorInvalidResourceHandle);
    if (now.active) return remember(cudaErrorIllegalState);
    now = {};
    now.active = true;
    now.origin = stream;
    now.streams.insert(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (!now.active) return remember(cudaErrorIllegalState);
    if (stream != now.origin) return remember(cudaErrorStreamCaptureWrongThread);
    now.active = false;
    *graph = nullptr;
    if (now.spoiled) return remember(cudaErrorStreamCaptureInvalidated);
    if (!now.unjoined.empty()) return remember(cudaErrorStreamCaptureUnjoined);
    *graph = new CUgraph_st{std::move(now.work)};
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    *status = !now.active || !now.streams.count(stream) ? cudaStreamCaptureStatusNone
              : now.spoiled                             ? cudaStreamCaptureStatusInvalidated
                                                        : cudaStreamCaptureStatusActive;
    return sticky_error();
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    if (!exec || !graph) return remember(cudaErrorInvalidValue);
    *exec = new CUgraphExec_st{graph->work};
    return sticky_error();
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    if (sticky_error() != cudaSuccess) return sticky_error();
    if (!exec || !known_stream(stream)) return remember(cudaErrorInvalidValue);
    for (const auto &work : exec->work) work();
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return sticky_error();
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return sticky_error();
}

} /* extern "C" */

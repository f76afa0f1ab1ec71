/* graph.h: streams that record instead of running. Twin: stream capture (cudaStreamBeginCapture).
   Not here: running what was recorded (launch.cpp). */
#ifndef SIMT_GRAPH_H
#define SIMT_GRAPH_H

#include "nsa_simt.h"

#include <functional>

namespace simt {

/* The stream records: keeps `work` for the graph and returns true. */
bool capture(cudaStream_t stream, std::function<void()> work);

/* What a call that waits or allocates returns while any stream records; it spoils the recording. */
cudaError_t refused_by_capture();

/* A launch or copy on the default stream is such a call too. */
cudaError_t refused_on_stream(cudaStream_t stream);

void capture_event(cudaEvent_t event, cudaStream_t stream);
void capture_wait(cudaStream_t stream, cudaEvent_t event);

} // namespace simt

#endif

/* runtime.h: the runtime's state that a launch needs: errors, streams, the architecture's limits.
   Twin: libcudart. Not here: the launch itself (launch.cpp). */
#ifndef SIMT_RUNTIME_H
#define SIMT_RUNTIME_H

#include "nsa_simt.h"

namespace simt {

struct architecture {
    int number;                    /* 80, 86, ... */
    const char *name;              /* of a device that has it */
    int multiprocessors;           /* of that device */
    size_t shared_per_block_optin; /* bytes */
    size_t shared_per_multiprocessor;
    int threads_per_multiprocessor, blocks_per_multiprocessor;
    size_t l2_bytes;
};
const architecture *find_architecture(int number); /* nullptr: not one of them */
const architecture &chosen_architecture();

cudaError_t remember(cudaError_t e); /* what cudaGetLastError returns next; returns e */
void set_sticky(cudaError_t e);      /* what every call returns from now on */
cudaError_t sticky_error();
bool known_stream(cudaStream_t stream);

} // namespace simt

#endif

/* kernel.h: what is known of a kernel before it runs. Twin: cudaFuncAttributes.
   Not here: what a launch does with it (launch.cpp). */
#ifndef SIMT_KERNEL_H
#define SIMT_KERNEL_H

#include <cstddef>
#include <string>

namespace simt {

/* Static and dynamic bytes together, for a kernel that has not asked for more. */
constexpr size_t shared_without_leave = 48 * 1024;

struct kernel_facts {
    std::string symbol;
    size_t static_bytes = 0; /* up to where dynamic ones begin, if the kernel has any */
    long leave = -1;         /* cudaFuncAttributeMaxDynamicSharedMemorySize; -1: never set */
    bool known = false, launched = false;
};
kernel_facts &facts_of(const void *kernel);
bool declares(const void *kernel, const char *type_name); /* it has such an array */
size_t dynamic_limit(const kernel_facts &k);
void forget_leave(); /* of all kernels */

} // namespace simt

#endif

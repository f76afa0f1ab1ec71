/* expect.h: what the executor's own tests share: checks, device arrays, planted faults.
   Twin: tests/harness/check.h for the C tests. Not here: kernels. */
#ifndef SIMT_EXPECT_H
#define SIMT_EXPECT_H

#include "common.cuh"
#include "simt.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

static int expect_failures;

/* Counts a failure; true while there are few enough to print. */
static inline bool expect_failed() {
    return ++expect_failures <= 20;
}

#define EXPECT(condition)                                                  \
    do {                                                                   \
        if (!(condition) && expect_failed())                               \
            printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
    } while (0)

#define EXPECT_EQUAL(a, b)                                                                  \
    do {                                                                                    \
        const double expect_a = static_cast<double>(a), expect_b = static_cast<double>(b);  \
        if (!(expect_a == expect_b) && expect_failed())                                     \
            printf("%s:%d: %s is %.9g, should be %.9g\n", __FILE__, __LINE__, #a, expect_a, \
                   expect_b);                                                               \
    } while (0)

/* Memory on the device, freed at the end of its scope. */
template <typename T> struct device_array {
    T *data = nullptr;
    size_t count;
    explicit device_array(size_t n) : count(n) {
        if (cudaMalloc(&data, n * sizeof(T)) != cudaSuccess) expect_failures++;
    }
    explicit device_array(const std::vector<T> &v) : device_array(v.size()) {
        if (cudaMemcpy(data, v.data(), count * sizeof(T), cudaMemcpyHostToDevice) != cudaSuccess)
            expect_failures++;
    }
    device_array(const device_array &) = delete;
    device_array &operator=(const device_array &) = delete;
    ~device_array() { cudaFree(data); }
    std::vector<T> read() const {
        std::vector<T> v(count);
        if (cudaMemcpy(v.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost) != cudaSuccess)
            expect_failures++;
        return v;
    }
};

/* A planted fault: FAULT(statement) notes its line, which the report must name. */
static int fault_line;
__attribute__((noinline, unused, no_sanitize("thread"))) static void fault_here(int line) {
    fault_line = line;
}
#define FAULT(...) fault_here(__LINE__), __VA_ARGS__

/* Whatever is launched between the two is meant to fail, with a report that holds `words` and the
   line of FAULT (if one was met). */
static inline void plant() {
    simt::clear_report();
    simt::config().quiet = true;
    fault_line = 0;
}
static inline void expect_report(int line, const char *words) {
    simt::config().quiet = false;
    const std::string r = simt::report();
    const std::string place = fault_line ? ":" + std::to_string(fault_line) : "";
    const bool sticky = cudaDeviceSynchronize() != cudaSuccess && cudaGetLastError() != cudaSuccess;
    if ((r.find(words) == std::string::npos || r.find(place) == std::string::npos || !sticky) &&
        expect_failed())
        printf("line %d: the report should hold '%s' and '%s', but is:\n%s\n", line, words,
               place.c_str(), r.empty() ? "(none)" : r.c_str());
    simt::clear_report();
}
#define EXPECT_REPORT(words) expect_report(__LINE__, words)

/* What a program's main returns. */
static inline int expect_result(const char *name) {
    EXPECT(cudaGetLastError() == cudaSuccess);
    printf("%s: %s\n", name, expect_failures ? "FAILED" : "ok");
    return expect_failures != 0;
}

#endif

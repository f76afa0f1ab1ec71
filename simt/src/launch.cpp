/* launch.cpp: from NSA_LAUNCH to the end of the grid; the settings and counters.
   Twin: the driver's launch path with its limits. Not here: what happens within a block. */
#include "async.h"
#include "checker.h"
#include "graph.h"
#include "kernel.h"
#include "machine.h"
#include "memory.h"
#include "runtime.h"

#include <cstdlib>
#include <memory>
#include <numeric>
#include <vector>

namespace simt {

/* ---- Settings ----------------------------------------------------------------------------- */

namespace {

unsigned long environment_number(const char *name, unsigned long fallback) {
    const char *value = getenv(name);
    if (!value) return fallback;
    char *end = nullptr;
    const unsigned long n = strtoul(value, &end, 10);
    if (end != value && !*end) return n;
    fprintf(stderr, "simt: %s=%s: must be a number\n", name, value);
    exit(2);
}

/* The position of the variable's value in `words` (ended by nullptr); 0 if it is not set. */
int environment_word(const char *name, const char *const *words) {
    const char *value = getenv(name);
    if (!value) return 0;
    for (int i = 0; words[i]; i++)
        if (!strcmp(value, words[i])) return i;
    fprintf(stderr, "simt: %s=%s: allowed are", name, value);
    for (int i = 0; words[i]; i++) fprintf(stderr, " %s", words[i]);
    fprintf(stderr, "\n");
    exit(2);
}

settings from_environment() {
    static const char *const orders[] = {"in_order", "reversed", "random", nullptr};
    static const char *const landings[] = {"late", "early", nullptr};
    static const char *const launches[] = {"run", "ask", nullptr};
    static const char *const roundings[] = {"nearest", "device", nullptr};
    settings s = {};
    s.schedule = static_cast<order>(environment_word("NSA_SIMT_SCHEDULE", orders));
    s.early = environment_word("NSA_SIMT_ASYNC", landings) == 1;
    s.ask = environment_word("NSA_SIMT_LAUNCHES", launches) == 1;
    s.coarse = environment_word("NSA_SIMT_ROUNDING", roundings) == 1;
    s.seed = environment_number("NSA_SIMT_SEED", 1);
    s.preempt = static_cast<unsigned>(environment_number("NSA_SIMT_PREEMPT", 0));
    s.architecture = static_cast<int>(environment_number("NSA_SIMT_ARCH", 90));
    if (!find_architecture(s.architecture)) {
        fprintf(stderr, "simt: NSA_SIMT_ARCH=%d: allowed are 80 86 89 90 100 120\n",
                s.architecture);
        exit(2);
    }
    return s;
}

} // namespace

settings &config() {
    static settings s = from_environment();
    return s;
}

const counters &count() {
    return the.counted;
}
void reset_counters() {
    the.counted = {};
}

/* ---- A launch ----------------------------------------------------------------------------- */

namespace {

/* "kernel<T, 64>, dim3(1), ..." -> "kernel<T, 64>" */
std::string kernel_name(const char *arguments) {
    int depth = 0;
    const char *p = arguments;
    for (; *p && !(depth == 0 && *p == ','); p++) {
        depth += *p == '<' || *p == '(';
        depth -= *p == '>' || *p == ')';
    }
    return std::string(arguments, p);
}

/* Static and dynamic bytes have 48 KB together, or what the kernel has leave for, if the device has
   it. ptxas refuses more static ones. */
bool shared_fits(const launch_request &r) {
    const kernel_facts &k = facts_of(r.kernel);
    const size_t limit = dynamic_limit(k), most = chosen_architecture().shared_per_block_optin;
    const bool fits = k.static_bytes <= shared_without_leave && r.shared_bytes <= limit &&
                      k.static_bytes + r.shared_bytes <= most;
    if (!fits && !config().quiet)
        fprintf(stderr,
                "simt: refused: %s asks for %zu dynamic bytes of shared memory beside %zu static "
                "ones; it has leave for %zu, sm_%d has %zu a block; launched at %s:%d\n",
                kernel_name(r.text).c_str(), r.shared_bytes, k.static_bytes, limit,
                config().architecture, most, r.at.file, r.at.line);
    return fits;
}

cudaError_t check_limits(const launch_request &r) {
    const uint64_t threads = uint64_t(r.block.x) * r.block.y * r.block.z;
    if (r.grid.x == 0 || r.grid.y == 0 || r.grid.z == 0 || threads == 0)
        return cudaErrorInvalidConfiguration;
    if (threads > 1024 || r.block.x > 1024 || r.block.y > 1024 || r.block.z > 64)
        return cudaErrorInvalidConfiguration;
    if (r.grid.x > 2147483647u || r.grid.y > 65535 || r.grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    if (!shared_fits(r)) return cudaErrorInvalidValue;
    if (!known_stream(r.stream)) return cudaErrorInvalidResourceHandle;
    return cudaSuccess;
}

/* Numbers of the blocks in the order in which they run. */
std::vector<uint64_t> block_order(uint64_t blocks) {
    std::vector<uint64_t> numbers(blocks);
    std::iota(numbers.begin(), numbers.end(), uint64_t(0));
    if (the.schedule == order::reversed)
        for (uint64_t i = 0; i < blocks; i++) numbers[i] = blocks - 1 - i;
    if (the.schedule == order::random)
        for (uint64_t i = blocks; i > 1; i--)
            std::swap(numbers[i - 1], numbers[random_number() % i]);
    return numbers;
}

void run_grid() {
    const dim3 &g = the.request.grid;
    for (const uint64_t n : block_order(uint64_t(g.x) * g.y * g.z)) {
        const dim3 index(static_cast<unsigned>(n % g.x), static_cast<unsigned>(n / g.x % g.y),
                         static_cast<unsigned>(n / g.x / g.y));
        if (!run_block(index)) return;
        phrase damage;
        if (!shared_end(&damage) || !global_red_zones(&damage)) note(damage);
        async_end();
        if (the.failed) return;
    }
}

} // namespace

namespace {

void run_launch(const launch_request &request) {
    if (sticky_error() != cudaSuccess) return;
    the.request = request;
    the.kernel = kernel_name(request.text);
    the.failed = false;
    the.schedule = config().schedule;
    the.random = config().seed * 0x9e3779b97f4a7c15ull | 1;
    the.counted.launches++;
    blockDim = request.block;
    gridDim = request.grid;
    check_launch_begin();
    fiber_adopt_main(the.main);
    run_grid();
    /* As on a device: the launch itself was accepted, what follows learns that it failed. */
    if (the.failed) set_sticky(cudaErrorLaunchFailure);
}

/* The request with parameters of its own, for later. */
std::function<void()> kept_launch(const launch_request &request) {
    struct bytes {
        alignas(128) unsigned char of_tensor_map[128];
    };
    const size_t units = (request.params_bytes + sizeof(bytes) - 1) / sizeof(bytes);
    const auto kept = std::make_shared<std::vector<bytes>>(units);
    memcpy(kept->data(), request.params, request.params_bytes);
    launch_request later = request;
    later.params = kept->data();
    return [later, kept] { run_launch(later); };
}

} // namespace

cudaError_t launch_checked(const launch_request &request) {
    if (the.current) fail(request.at, "NSA_LAUNCH inside a kernel");
    if (sticky_error() != cudaSuccess) return sticky_error();
    const cudaError_t e = check_limits(request);
    if (e != cudaSuccess) return remember(e);
    const cudaError_t refused = refused_on_stream(request.stream);
    if (refused != cudaSuccess) return refused;
    facts_of(request.kernel).launched = true;
    if (config().ask) return cudaSuccess;
    if (!capture(request.stream, kept_launch(request))) run_launch(request);
    return cudaSuccess;
}

} // namespace simt

/* fuzz.h - what the harnesses share: numbers drawn from the fuzzer's bytes, and how they fail.
   Twin: replay.c, which gives a harness its inputs where there is no fuzzer. Not here: the code
   that is fuzzed. */
#ifndef NSA_TESTS_FUZZ_H
#define NSA_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* A harness is this function; 0: it took the input, -1: not worth keeping in a corpus. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What is left of the input. Past its end everything drawn is 0. Two draws are never in one call,
   nor on both sides of an assignment: compilers differ in which comes first, and an input is to
   mean the same to the fuzzer and to every replay. */
typedef struct fuzz_input {
    const uint8_t *at, *end;
} fuzz_input;

static inline uint64_t fuzz_take(fuzz_input *in, int bytes) {
    uint64_t x = 0;
    for (int i = 0; i < bytes && in->at < in->end; i++) x |= (uint64_t)*in->at++ << (8 * i);
    return x;
}

/* 0 .. n - 1 */
static inline int fuzz_below(fuzz_input *in, int n) {
    return (int)(fuzz_take(in, n > 256 ? 2 : 1) % (uint64_t)n);
}

/* Numbers where code breaks, or any. */
static inline int64_t fuzz_number(fuzz_input *in) {
    static const int64_t odd[] = {0,          -1,         1,         2,         3,
                                  7,          16,         64,        255,       256,
                                  257,        1000,       65535,     65536,     65537,
                                  0x1fffffff, 0x20000000, INT32_MAX, INT32_MIN, INT32_MAX - 1,
                                  1LL << 32,  1LL << 40,  INT64_MAX, INT64_MIN, INT64_MAX / 8};
    enum { ODD = sizeof odd / sizeof odd[0] };
    int i = fuzz_below(in, ODD + 1);
    return i < ODD ? odd[i] : (int64_t)fuzz_take(in, 4);
}

#define FUZZ_ASSERT(ok, ...)                                     \
    do {                                                         \
        if (ok) break;                                           \
        fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #ok); \
        fprintf(stderr, __VA_ARGS__);                            \
        fprintf(stderr, "\n");                                   \
        abort();                                                 \
    } while (0)

#endif

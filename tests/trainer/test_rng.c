/* test_rng.c - random numbers of the trainers: known answers, moments, permutations. */
#include "base/rng.h"
#include "harness/check.h"

/* The authors' published answers for Philox 4x32-10: counter, key, result. */
static void test_known_answers(void) {
    static const struct {
        uint64_t seed, stream, index;
        uint32_t want[4];
    } cases[] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x299f31d0a4093822u,
         0x0370734413198a2eu,
         0x85a308d3243f6a88u,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t got[4];
        rng_bits(cases[i].seed, cases[i].stream, cases[i].index, got);
        CHECK_BITS("philox", got, cases[i].want, sizeof got, sizeof got[0]);
    }
}

static void test_moments(void) {
    enum { N = 100000 };
    double mean = 0, square = 0, cube = 0, fourth = 0, uniform = 0, low = 1, high = 0;
    for (uint64_t i = 0; i < N; i++) {
        double x = rng_normal(7, RNG_INIT, i), u = rng_uniform(7, RNG_INIT, i);
        mean += x / N;
        square += x * x / N;
        cube += x * x * x / N;
        fourth += x * x * x * x / N;
        uniform += u / N;
        if (u < low) low = u;
        if (u > high) high = u;
    }
    /* Five standard errors each. */
    CHECK(fabs(mean) < 5 / sqrt(N), "mean %g", mean);
    CHECK(fabs(square - 1) < 5 * sqrt(2.0 / N), "variance %g", square);
    CHECK(fabs(cube) < 5 * sqrt(15.0 / N), "third moment %g", cube);
    CHECK(fabs(fourth - 3) < 5 * sqrt(96.0 / N), "fourth moment %g", fourth);
    CHECK(fabs(uniform - 0.5) < 5 * sqrt(1.0 / 12 / N), "mean of uniform %g", uniform);
    CHECK(low >= 0 && low < 1e-3 && high < 1 && high > 0.999, "range %g .. %g", low, high);
}

static void test_below(void) {
    int seen[7] = {0};
    for (uint64_t i = 0; i < 70000; i++) {
        uint64_t x = rng_below(3, RNG_SAMPLE, i, 7);
        if (CHECK(x < 7, "%llu of 7", (unsigned long long)x)) seen[x]++;
    }
    for (int i = 0; i < 7; i++) CHECK(abs(seen[i] - 10000) < 500, "%d comes %d times", i, seen[i]);
    CHECK(rng_below(3, RNG_SAMPLE, 5, 1) == 0, "below 1");
    uint64_t big = rng_below(3, RNG_SAMPLE, 5, (uint64_t)1 << 63);
    CHECK(big < (uint64_t)1 << 63, "below 2^63");
    CHECK(rng_below(3, RNG_SAMPLE, 5, UINT64_MAX) ==
              rng_u64(3, RNG_SAMPLE, 5) - (rng_u64(3, RNG_SAMPLE, 5) != 0),
          "below 2^64 - 1 keeps the number, less one");
}

/* Each number once, another order for another seed and stream. */
static void test_permutations(void) {
    static unsigned char seen[5000];
    static const uint64_t counts[] = {1, 2, 3, 4, 5, 16, 17, 1000, 4096, 4097, 5000};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        uint64_t n = counts[c], same = 0;
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t to = rng_permute(1, RNG_SHUFFLE, i, n);
            if (CHECK(to < n && !seen[to], "%llu of %llu", (unsigned long long)to,
                      (unsigned long long)n))
                seen[to] = 1;
            same += to == rng_permute(1, RNG_SHUFFLE | 1 << 8, i, n);
        }
        CHECK(n < 1000 || same < 10, "%llu of %llu stay in place in another epoch",
              (unsigned long long)same, (unsigned long long)n);
    }
}

int main(void) {
    test_known_answers();
    test_moments();
    test_below();
    test_permutations();
    return check_done("test_rng");
}

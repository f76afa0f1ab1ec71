/* rng.c - Philox 4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy
   as 1, 2, 3", 2011), and what is drawn from it. Twin: rng.h. */
#include "base/rng.h"

#include <math.h>

void rng_bits(uint64_t seed, uint64_t stream, uint64_t index, uint32_t bits[4]) {
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t x[4] = {(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream,
                     (uint32_t)(stream >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * x[0], b = (uint64_t)0xCD9E8D57u * x[2];
        uint32_t y[4] = {(uint32_t)(b >> 32) ^ x[1] ^ key[0], (uint32_t)b,
                         (uint32_t)(a >> 32) ^ x[3] ^ key[1], (uint32_t)a};
        for (int i = 0; i < 4; i++) x[i] = y[i];
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    for (int i = 0; i < 4; i++) bits[i] = x[i];
}

uint64_t rng_u64(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t bits[4];
    rng_bits(seed, stream, index, bits);
    return (uint64_t)bits[1] << 32 | bits[0];
}

double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    return (double)(rng_u64(seed, stream, index) >> 11) * 0x1p-53;
}

/* High half of value * bound, from four 32-bit products. */
static uint64_t scale_down(uint64_t value, uint64_t bound) {
    uint64_t vl = value & 0xffffffffu, vh = value >> 32, bl = bound & 0xffffffffu, bh = bound >> 32;
    uint64_t middle = vh * bl + ((vl * bl) >> 32);
    uint64_t other = vl * bh + (middle & 0xffffffffu);
    return vh * bh + (middle >> 32) + (other >> 32);
}

/* The bias is below bound / 2^64. */
uint64_t rng_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t bound) {
    return scale_down(rng_u64(seed, stream, index), bound);
}

double rng_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t bits[4];
    rng_bits(seed, stream, index, bits);
    uint64_t a = (uint64_t)bits[1] << 32 | bits[0], b = (uint64_t)bits[3] << 32 | bits[2];
    double u = (double)((a >> 11) + 1) * 0x1p-53; /* (0, 1]: log is finite */
    double v = (double)(b >> 11) * 0x1p-53;
    return sqrt(-2 * log(u)) * cos(6.283185307179586477 * v);
}

/* A balanced Feistel network over the next power of four, walked until it lands inside: a
   permutation of 0 .. count - 1, since each step of the walk is one of a larger set. */
uint64_t rng_permute(uint64_t seed, uint64_t stream, uint64_t index, uint64_t count) {
    int half = 1;
    while (half < 32 && ((uint64_t)1 << (2 * half)) < count) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint64_t next = left ^ (rng_u64(seed, stream, round << 32 | right) & mask);
            left = right;
            right = next;
        }
        index = left << half | right;
    } while (index >= count);
    return index;
}

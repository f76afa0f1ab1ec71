/* rng.h - random numbers as a function of (seed, stream, index), by Philox 4x32-10.
   Twin: rng.c. It keeps no state: what a run needs to go on is a seed and a counter, and any rank
   can compute any number. Not for cryptography. */
#ifndef RNG_H
#define RNG_H

#include <stdint.h>

/* Streams keep the uses of one seed apart; the bits above the lowest 8 may hold a number. */
enum {
    RNG_INIT = 1,
    RNG_SYNTHETIC,
    RNG_SYNTHETIC_VAL,
    RNG_SHUFFLE,
    RNG_PHASE,
    RNG_SAMPLE,
    RNG_RETRIEVAL,
    RNG_RETRIEVAL_VAL
};

/* 128 random bits of (seed, stream, index). */
void rng_bits(uint64_t seed, uint64_t stream, uint64_t index, uint32_t bits[4]);

uint64_t rng_u64(uint64_t seed, uint64_t stream, uint64_t index);

/* Uniform in [0, 1), 53 bits. */
double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index);

/* Uniform in 0 .. bound - 1; bound >= 1. */
uint64_t rng_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t bound);

/* Mean 0, variance 1 (Box and Muller). */
double rng_normal(uint64_t seed, uint64_t stream, uint64_t index);

/* Where `index` goes in a permutation of 0 .. count - 1 that (seed, stream) chooses; O(1) memory.
 */
uint64_t rng_permute(uint64_t seed, uint64_t stream, uint64_t index, uint64_t count);

#endif

/* numbers.h: 16-bit floats as bits, made wide; sums as tensor cores may cut them off. Twin: what
   tensor cores do with single numbers.
   Not here: the way back, which is cuda_bf16.h's and cuda_fp16.h's. */
#ifndef SIMT_NUMBERS_H
#define SIMT_NUMBERS_H

#include "nsa_simt.h"

namespace simt {

inline float from_bf16(unsigned bits) {
    return from_bits<float>(uint64_t(bits & 0xffffu) << 16);
}

inline float from_f16(unsigned bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u,
                   fraction = bits & 1023u;
    if (exponent == 31) return from_bits<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent) return from_bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = static_cast<float>(fraction) * (1.0f / 16777216.0f);
    return sign ? -small : small;
}

/* c + the products, as a tensor core with short sums adds them: every term, and the sum, is cut off
   to the 24 bits below the exponent of the largest. Devices were found to keep a bit or two more
   (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, 2021). */
inline float coarse_sum(float c, const float (&products)[16]) {
    float plain = c, largest = fabsf(c);
    for (const float x : products) {
        plain += x;
        largest = fmaxf(largest, fabsf(x));
    }
    if (!(fabsf(plain) < INFINITY) || largest == 0) return plain;
    const double unit = ldexp(1.0, ilogbf(largest) - 23);
    double sum = trunc(static_cast<double>(c) / unit);
    for (const float x : products) sum += trunc(static_cast<double>(x) / unit);
    const float rounded = static_cast<float>(sum);
    const bool outward = fabs(static_cast<double>(rounded)) > fabs(sum);
    return static_cast<float>(static_cast<double>(outward ? nextafterf(rounded, 0) : rounded) *
                              unit);
}

/* A row of a product: c[column] += a b[.][column]. */
template <int N>
void add_coarsely(float *c, const float (&a)[16], const float (&b)[16][N], int columns) {
    for (int column = 0; column < columns; column++) {
        float products[16];
        for (int k = 0; k < 16; k++) products[k] = a[k] * b[k][column];
        c[column] = coarse_sum(c[column], products);
    }
}

} // namespace simt

#endif

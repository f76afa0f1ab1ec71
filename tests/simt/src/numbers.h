/* numbers.h: 16-bit floats as bits, made wide. Twin: the tensor cores' input conversion.
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

} // namespace simt

#endif

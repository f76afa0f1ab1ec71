/* rows.cuh: rows of views as kernels read and write them, eight or four elements at a time.
   Twin: nsa.h, "Rows and numbers". The dtype is a value here, not a type: a kernel that is bound by
   memory loses nothing by a branch that all its threads take alike. Where a dtype decides which
   instructions run (tensor cores), kernels are templates on the element instead.
   Not here: which rows a sequence has (block_index.cuh). */
#ifndef NSA_ROWS_CUH
#define NSA_ROWS_CUH

#include "common.cuh"

/* The element of a dtype, for kernels that are templates on it. */
template <typename T> struct nsa__dtype_of;
template <> struct nsa__dtype_of<float> { static constexpr nsa_dtype value = NSA_F32; };
template <> struct nsa__dtype_of<__nv_bfloat16> { static constexpr nsa_dtype value = NSA_BF16; };
template <> struct nsa__dtype_of<__half> { static constexpr nsa_dtype value = NSA_F16; };

/* Row (b, t, h) of a view whose elements have 4 or 2 bytes. */
template <typename T>
NSA__DEVICE T *nsa__row_of(const nsa_tensor &x, int64_t b, int64_t t, int64_t h) {
    return static_cast<T *>(x.data) + (x.batch * b + x.token * t + x.head * h);
}
/* The element of a view at an offset in elements. */
NSA__DEVICE void *nsa__element_at(const nsa_tensor &x, int64_t offset) {
    return static_cast<char *>(x.data) +
           offset * (x.dtype == NSA_F32 || x.dtype == NSA_I32 ? 4 : 2);
}
NSA__DEVICE void *nsa__row_at(const nsa_tensor &x, int64_t b, int64_t t, int64_t h) {
    return nsa__element_at(x, x.batch * b + x.token * t + x.head * h);
}

NSA__DEVICE float2 nsa__unpack_bf16(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
NSA__DEVICE float2 nsa__unpack_f16(uint32_t pair) {
    return make_float2(__half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xffffu))),
                       __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16))));
}
NSA__DEVICE float2 nsa__unpack(nsa_dtype dtype, uint32_t pair) {
    return dtype == NSA_BF16 ? nsa__unpack_bf16(pair) : nsa__unpack_f16(pair);
}
NSA__DEVICE uint32_t nsa__pack_as(nsa_dtype dtype, float low, float high) {
    return dtype == NSA_BF16 ? nsa__pack<__nv_bfloat16>(low, high) : nsa__pack<__half>(low, high);
}

/* Two neighbours as they lie in memory. */
template <typename T> NSA__DEVICE void nsa__store_pair(T *to, float low, float high) {
    if constexpr (sizeof(T) == 4)
        *reinterpret_cast<float2 *>(to) = make_float2(low, high);
    else
        *reinterpret_cast<uint32_t *>(to) = nsa__pack<T>(low, high);
}

/* Elements c .. c + 3 of a row, c a multiple of 4; the row starts at a multiple of 16 bytes. */
NSA__DEVICE void nsa__load4(float (&to)[4], nsa_dtype dtype, const void *row, int c) {
    if (dtype == NSA_F32) {
        const float4 v = *reinterpret_cast<const float4 *>(static_cast<const float *>(row) + c);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        return;
    }
    const uint2 v = *reinterpret_cast<const uint2 *>(static_cast<const uint16_t *>(row) + c);
    const float2 a = nsa__unpack(dtype, v.x), b = nsa__unpack(dtype, v.y);
    to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
}
NSA__DEVICE void nsa__store4(nsa_dtype dtype, void *row, int c, const float (&from)[4]) {
    if (dtype == NSA_F32)
        *reinterpret_cast<float4 *>(static_cast<float *>(row) + c) =
            make_float4(from[0], from[1], from[2], from[3]);
    else
        *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(row) + c) = make_uint2(
            nsa__pack_as(dtype, from[0], from[1]), nsa__pack_as(dtype, from[2], from[3]));
}

/* Elements c .. c + 7, c a multiple of 8. */
NSA__DEVICE void nsa__load8(float (&to)[8], nsa_dtype dtype, const void *row, int c) {
    if (dtype == NSA_F32) {
        float low[4], high[4];
        nsa__load4(low, dtype, row, c);
        nsa__load4(high, dtype, row, c + 4);
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = low[i], to[i + 4] = high[i];
        return;
    }
    const uint4 v = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(row) + c);
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = nsa__unpack(dtype, pairs[i]);
        to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
}
NSA__DEVICE void nsa__store8(nsa_dtype dtype, void *row, int c, const float (&from)[8]) {
    if (dtype == NSA_F32) {
        const float low[4] = {from[0], from[1], from[2], from[3]};
        const float high[4] = {from[4], from[5], from[6], from[7]};
        nsa__store4(dtype, row, c, low);
        nsa__store4(dtype, row, c + 4, high);
        return;
    }
    *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(row) + c) =
        make_uint4(nsa__pack_as(dtype, from[0], from[1]), nsa__pack_as(dtype, from[2], from[3]),
                   nsa__pack_as(dtype, from[4], from[5]), nsa__pack_as(dtype, from[6], from[7]));
}

/* row[c ..] += factor * from, rounded once. */
NSA__DEVICE void nsa__add8(nsa_dtype dtype, void *row, int c, float factor,
                           const float (&from)[8]) {
    float sum[8];
    nsa__load8(sum, dtype, row, c);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += factor * from[i];
    nsa__store8(dtype, row, c, sum);
}

/* One element, for rows that are shorter than a piece (lse, gate logits). */
NSA__DEVICE float nsa__load1(nsa_dtype dtype, const void *row, int c) {
    if (dtype == NSA_F32) return static_cast<const float *>(row)[c];
    const uint32_t bits = static_cast<const uint16_t *>(row)[c];
    return nsa__unpack(dtype, bits).x;
}
NSA__DEVICE void nsa__store1(nsa_dtype dtype, void *row, int c, float value) {
    if (dtype == NSA_F32)
        static_cast<float *>(row)[c] = value;
    else
        static_cast<uint16_t *>(row)[c] = static_cast<uint16_t>(nsa__pack_as(dtype, value, 0.0f));
}

/* By their bits: --use_fast_math and -ffast-math fold isnan and isinf to 0. */
NSA__DEVICE bool nsa__finite(float x) {
    return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

#endif

/* bf16_by_hand.h: the set of tiles AVX512-BF16 for any x86, with plain code in place of VDPBF16PS.
   nsa.h includes it if NSA__BF16_BY_HAND names it, so that all around that instruction runs as it
   is. Twin: none. Not here: the f32 tiles beside the set, which are SSE2's. */
typedef float nsa__by_hand __attribute__((vector_size(16)));
typedef uint32_t nsa__by_hand_bits __attribute__((vector_size(16)));
typedef uint64_t nsa__by_hand_halves __attribute__((vector_size(16)));

/* Subnormal numbers become 0 and keep their sign. */
NSA__INLINE NSA__COMPILED nsa__by_hand_bits nsa__by_hand_flushed(nsa__by_hand_bits x) {
    return x & ((nsa__by_hand_bits)((x & 0x7f800000u) != 0) | 0x80000000u);
}

/* sum + x y with one rounding in the lanes of `beyond`. A function of its own, because lanes taken
   by index keep the vectors in memory, which sanitizers then watch. */
static NSA__COMPILED __attribute__((noinline)) nsa__by_hand
nsa__by_hand_rare(nsa__by_hand sum, nsa__by_hand a, nsa__by_hand b, nsa__by_hand_bits beyond) {
    nsa__by_hand result = sum + a * b;
    for (int i = 0; i < 4; i++)
        if (beyond[i]) result[i] = fmaf(a[i], b[i], sum[i]);
    return result;
}

/* sum + x y with one rounding, before the result is flushed. The product of two numbers of bf16 is
   exact in f32 unless it leaves the range; then it takes fmaf. */
NSA__INLINE NSA__COMPILED nsa__by_hand nsa__by_hand_add(nsa__by_hand sum, nsa__by_hand_bits x,
                                                        nsa__by_hand_bits y) {
    const nsa__by_hand a = (nsa__by_hand)x, b = (nsa__by_hand)y, product = a * b;
    const nsa__by_hand_bits exponent = (nsa__by_hand_bits)product & 0x7f800000u;
    const nsa__by_hand_bits beyond =
        (nsa__by_hand_bits)(exponent == 0x7f800000u) |
        (nsa__by_hand_bits)((exponent == 0) & ((x << 1) != 0) & ((y << 1) != 0));
    const nsa__by_hand_halves any = (nsa__by_hand_halves)beyond;
    nsa__by_hand result = sum + product;
    if (any[0] | any[1]) result = nsa__by_hand_rare(sum, a, b, beyond);
    return (nsa__by_hand)nsa__by_hand_flushed((nsa__by_hand_bits)result);
}

/* Intel's description of VDPBF16PS: the odd products first, no rounding between a product and its
   sum, to nearest, subnormals are zeros on both sides, no flags. */
NSA__INLINE NSA__COMPILED nsa__by_hand nsa__dot_by_hand(nsa__by_hand sum, nsa__by_hand a,
                                                        nsa__by_hand b) {
    const nsa__by_hand_bits x = (nsa__by_hand_bits)a, y = (nsa__by_hand_bits)b;
    sum = nsa__by_hand_add(sum, nsa__by_hand_flushed(x & 0xffff0000u),
                           nsa__by_hand_flushed(y & 0xffff0000u));
    return nsa__by_hand_add(sum, nsa__by_hand_flushed(x << 16), nsa__by_hand_flushed(y << 16));
}

#define NSA__ISA                 bf16
#define NSA__BYTES               16
#define NSA__ROWS                4
#define NSA__VECTORS             2
#define NSA__TARGET              NSA__COMPILED
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+x"(x))
#define NSA__DOT(sum, a, b)      (sum) = nsa__dot_by_hand(sum, a, b)

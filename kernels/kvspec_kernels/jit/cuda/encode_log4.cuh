// The log codec with a linear law, as reference/log4.py rounds it. Needs the define TOP.
#pragma once
#include "pairs.cuh"

constexpr int SCALE_SHIFT = 19;
constexpr int LARGEST_SCALE = 0x7f7fffff >> SCALE_SHIFT;
constexpr int LARGEST_OFFSET = 255;
// Adding this rounds a float below 2^22 to an integer, ties to even, in the low bits of the sum.
constexpr float MAGIC = 12582912.0f;
// Integers I from 0 to TOP are kept as INVERTED - I. Bits 4 to 6 are then the inverted bits of the
// magnitude (I + 7) / 16. Bits 0 to 3 are those of the correction, with its highest bit inverted.
// INVERTED is even, so that the subtraction does not change how ties round.
constexpr int INVERTED = 120;

// Metadata of a channel in a chunk: its centre, a bf16 number, and the leading 12 bits of the
// smallest scale that no value exceeds. These bits may exceed LARGEST_SCALE.
struct Metadata {
    float centre;
    int reach;
};

__device__ __forceinline__ Metadata metadata_of(float low, float high) {
    // Both halves are exact.
    float centre = rounded_to_bf16(__fmaf_rn(low, 0.5f, __fmul_rn(high, 0.5f)));
    float reach = fmaxf(__fsub_rn(high, centre), __fsub_rn(centre, low));
    u32 bits = __float_as_uint(reach) & 0x7fffffffu;
    return {centre, (int)((bits + ((1u << SCALE_SHIFT) - 1)) >> SCALE_SHIFT)};
}

// Numbers that turn a value x into a quotient: c = factor * x + offset is the difference to the
// centre, rounded once, times a power of two. c * inverse + c * rest is c over the scale.
struct alignas(16) Prepared {
    float factor, offset, inverse, rest;
};

__device__ __forceinline__ Prepared prepared_of(Metadata chunk, int scale) {
    u32 bits = (u32)scale << SCALE_SHIFT;
    int exponent = min(max((int)(bits >> 23), 1), 253);
    float factor = __uint_as_float((u32)(254 - exponent) << 23);
    // The divisor is below 4, and at least 1 unless the scale is a denormal.
    float divisor = __fmul_rn(__uint_as_float(bits), factor);
    // inverse + rest is 1 / divisor to 2^-46, because the remainder is exact: divisor has 5 bits.
    // A 24-bit number over a number of up to 8 bits is at least 2^-33 from the middle of two fp32
    // numbers. So the quotient is rounded as in IEEE arithmetic.
    float inverse = reciprocal(divisor);
    float rest = __fmul_rn(__fmaf_rn(-divisor, inverse, 1.0f), inverse);
    // If no value reaches 2^-10 of the scale, all integers are 0 and only signs matter. The factor
    // might lose signs. A scale of 0 is such a case.
    bool flat = chunk.reach < max(scale - 160, 1);
    factor = flat ? 1.0f : factor;
    // Do not negate: 0 must stay +0, so that no difference is -0.
    float offset = __fmaf_rn(-chunk.centre, factor, 0.0f);
    return {factor, offset, flat ? 0.0f : inverse, flat ? 0.0f : rest};
}

// Encodes the 8 values of a lane in a tile as a word of codes and a word of corrections. m: numbers
// of rows g and g+8, or of columns 2t, 2t+1, 2t+8, 2t+9. CLAMPED: values may exceed the largest
// scale.
template <bool BY_ROW, bool CORRECTIONS, bool CLAMPED>
__device__ __forceinline__ void encode_word(const Words<4>& values, const Prepared* m, u32& codes,
                                            u32& corrections) {
    u32 integers[4], signs[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        u32 c[2], n[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const Prepared& p = m[BY_ROW ? r & 1 : r & 2 | e];
            float x = e ? high_of(values.w[r]) : low_of(values.w[r]);
            float difference = __fmaf_rn(x, p.factor, p.offset);
            float quotient = __fmaf_rn(difference, p.inverse, __fmul_rn(difference, p.rest));
            float magnitude = __fmul_rn(fabsf(quotient), (float)TOP);
            c[e] = __float_as_uint(difference);
            n[e] = __float_as_uint(__fsub_rn(MAGIC + INVERTED, magnitude));
        }
        // Each word holds two 16-bit halves.
        integers[r] = prmt(n[0], n[1], 0x5410);
        if constexpr (CLAMPED)
            integers[r] = greater_of(integers[r], (INVERTED - TOP) * 0x10001u);
        signs[r] = prmt(c[0], c[1], 0x7632);
    }
    // Bytes are those of codes 2, 7, 3, 6 and 0, 5, 1, 4: an anchor word has the magnitudes of the
    // first four in low nibbles and of the others in high nibbles.
    u32 low = prmt(integers[1], integers[3], 0x4260);
    u32 high = prmt(integers[0], integers[2], 0x4260);
    // Low nibbles take the signs of codes 6, 2, 7, 3, high nibbles those of 4, 0, 5, 1. Here each
    // sign fills a byte.
    u32 low_signs = prmt(signs[3], signs[1], 0xfbd9), high_signs = prmt(signs[2], signs[0], 0xfbd9);
    u32 sign = (low_signs & 0x0f0f0f0fu) | (high_signs & 0xf0f0f0f0u);
    u32 inverted = ((low >> 4) & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
    codes = (sign & 0x88888888u) | (~inverted & 0x77777777u);
    if constexpr (CORRECTIONS) {
        // Corrections have the order 0, 2, 4, 6, then 1, 3, 5, 7: exchange bytes 1 and 3.
        u32 nibbles = (high & 0x0f0f0f0fu) | ((low << 4) & 0xf0f0f0f0u);
        corrections = prmt(nibbles ^ 0x88888888u, 0, 0x1230);
    }
}

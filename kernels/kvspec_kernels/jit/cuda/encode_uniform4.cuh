// The uniform codec, with the rounding of reference/uniform4.py.
#pragma once
#include "pairs.cuh"

// Adding this rounds a float below 2^22 to an integer, ties to even, in the low bits of the sum.
constexpr float MAGIC = 12582912.0f;

// Metadata of a group, both bf16 numbers.
struct Metadata {
    float scale, zero;
};

// Returns x / 15 in IEEE arithmetic. Checked for every finite fp32 number.
__device__ __forceinline__ float fifteenth(float x) {
    constexpr float FIFTEENTH = 0.06666667014360428f;
    float guess = __fmul_rn(x, FIFTEENTH);
    return __fmaf_rn(__fmaf_rn(guess, -15.0f, x), FIFTEENTH, guess);
}

__device__ __forceinline__ Metadata metadata_of(float low, float high) {
    float zero = rounded_to_bf16(low);
    float span = __fsub_rn(fifteenth(high), fifteenth(zero));
    return {rounded_to_bf16(fmaxf(span, 0.0f)), zero};
}

// Numbers that turn a value x into a quotient: c = factor * x + offset is the difference to the
// zero, rounded once, times a power of two. c * inverse + c * rest is c over the scale. `step` is
// the scale times -factor.
struct alignas(16) Prepared {
    float factor, offset, inverse, rest;
};

__device__ __forceinline__ Prepared prepared_of(Metadata group, float& step) {
    float divisor = group.scale > 0.0f ? group.scale : 1.0f;
    int exponent = min(max((int)(__float_as_uint(divisor) >> 23), 1), 253);
    float factor = __uint_as_float((u32)(254 - exponent) << 23);
    // -step is below 4, and at least 1 unless the scale is a denormal.
    step = -__fmul_rn(divisor, factor);
    // inverse + rest is 1 / -step to 2^-46, because the remainder is exact: the scale has 8 bits.
    // A 24-bit number over a number of up to 8 bits is at least 2^-33 from the middle of two fp32
    // numbers. So the quotient is rounded as in IEEE arithmetic.
    float inverse = reciprocal(-step);
    float rest = __fmul_rn(__fmaf_rn(step, inverse, 1.0f), inverse);
    return {factor, __fmaf_rn(-group.zero, factor, 0.0f), inverse, rest};
}

// Returns true if codes may fall outside 0 .. 15. That happens if the zero exceeds the least value,
// which is impossible in bf16. It also happens if the scale is so small that rounding it moves a
// value by more than half a code.
__device__ __forceinline__ bool needs_clamp(Metadata group) {
    return !KV_BF16 || __float_as_uint(group.scale) - 1 < 0x007fffffu;
}

// Encodes the 8 values of a lane in a tile as a word of codes and a word of corrections. m, steps:
// numbers of columns 2t, 2t+1, 2t+8, 2t+9; steps are read only for corrections. CLAMPED: codes may
// be out of range.
template <bool CORRECTIONS, bool CLAMPED>
__device__ __forceinline__ void encode_word(const Words<4>& values, const Prepared* m,
                                            const float* steps, u32& codes, u32& corrections) {
    u32 upper[4], lower[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        u32 n[2], l[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const Prepared& p = m[r & 2 | e];
            float x = e ? high_of(values.w[r]) : low_of(values.w[r]);
            float difference = __fmaf_rn(x, p.factor, p.offset);
            float code = __fmaf_rn(difference, p.inverse, __fmul_rn(difference, p.rest));
            if constexpr (CORRECTIONS && CLAMPED) code = fminf(fmaxf(code, 0.0f), 15.0f);
            float rounded = __fadd_rn(code, MAGIC);
            n[e] = __float_as_uint(rounded);
            if constexpr (CORRECTIONS) {
                // A code times a scale has at most 12 bits: the product is exact, fused or not.
                float anchor = __fmaf_rn(__fsub_rn(rounded, MAGIC), steps[r & 2 | e], p.offset);
                float error = __fmaf_rn(x, p.factor, anchor);
                float ratio = __fmaf_rn(error, p.inverse, __fmul_rn(error, p.rest));
                l[e] = __float_as_uint(__fmaf_rn(ratio, 16.0f, MAGIC + 8.0f));
            }
        }
        // Each word holds two 16-bit halves.
        upper[r] = prmt(n[0], n[1], 0x5410);
        if constexpr (!CORRECTIONS && CLAMPED) upper[r] = clamped_to(upper[r], 0x000f000fu);
        if constexpr (CORRECTIONS)
            lower[r] = clamped_to(prmt(l[0], l[1], 0x5410), 0x000f000fu);
    }
    codes = upper[0] + (upper[1] << 4) + (upper[2] << 8) + (upper[3] << 12);
    if constexpr (CORRECTIONS) {
        // Nibbles are the correction + 8. Flipping their highest bit gives two's complement.
        u32 nibbles = lower[0] + (lower[1] << 4) + (lower[2] << 8) + (lower[3] << 12);
        corrections = nibbles ^ 0x88888888u;
    }
}

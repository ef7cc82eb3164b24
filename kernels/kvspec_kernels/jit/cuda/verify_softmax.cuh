// Probabilities in fp16, and the running maxima that they are relative to.
#pragma once
#include "hopper.cuh"

// Probabilities, relative to the running maximum when it was last taken, may grow to 2^10, as fp16.
constexpr u32 LARGEST_PROB = 0x6400;

__device__ __forceinline__ u32 weights_of(float score, float next) {
    return to_half2(exp2_approx(score), exp2_approx(next));
}

// A running maximum as halves whose sum, weighted with 32768, 32 and 1, is minus it, exactly.
__device__ __forceinline__ void store_top(u8* parts, float top) {
    float rest = -top, weight = 32768.0f;
    u32 halves[3];
#pragma unroll
    for (int i = 0; i < 3; ++i, weight = i == 1 ? 32.0f : 1.0f) {
        halves[i] = to_half2(rest * (1.0f / weight), 0.0f) & 0xffff;
        rest -= half_to_float((u16)halves[i]) * weight;
    }
    *reinterpret_cast<uint2*>(parts) = make_uint2(halves[0] | halves[1] << 16, halves[2]);
}

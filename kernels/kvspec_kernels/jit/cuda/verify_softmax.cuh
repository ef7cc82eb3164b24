// Probabilities in fp16, relative to running maxima.
#pragma once
#include "hopper.cuh"

// fp16 bits of 2^10. Probabilities, relative to the running maximum, may grow up to this before the
// maximum moves.
constexpr u32 LARGEST_PROB = 0x6400;

__device__ __forceinline__ u32 weights_of(float score, float next) {
    return to_half2(exp2_approx(score), exp2_approx(next));
}

// Stores minus a running maximum, exactly, as three fp16 parts with weights 32768, 32 and 1.
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

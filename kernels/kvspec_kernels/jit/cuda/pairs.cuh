// Instructions of encode.cu: pairs of 16-bit values, and loads of a warp. Needs the define KV_BF16.
// Apart from these functions, encoding is portable C++.
#pragma once
#define Q_BF16 KV_BF16
#include "hopper.cuh"

// The codecs do not depend on the order of -0 and +0, nor on results for NaN.
__device__ __forceinline__ u32 pair_min(u32 a, u32 b) {
    u32 r;
#if KV_BF16
    asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#endif
    return r;
}

__device__ __forceinline__ u32 pair_max(u32 a, u32 b) {
    u32 r;
#if KV_BF16
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#endif
    return r;
}

__device__ __forceinline__ float low_of(u32 pair) {
#if KV_BF16
    return low_bf16(pair);
#else
    return half_to_float((u16)pair);
#endif
}

__device__ __forceinline__ float high_of(u32 pair) {
#if KV_BF16
    return high_bf16(pair);
#else
    return half_to_float((u16)(pair >> 16));
#endif
}

// Returns the greater of each two signed 16-bit integers.
__device__ __forceinline__ u32 greater_of(u32 a, u32 b) {
    u32 r;
    asm("max.s16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Returns signed 16-bit integers a, clamped to 0 .. b.
__device__ __forceinline__ u32 clamped_to(u32 a, u32 b) {
    u32 r;
    asm("min.relu.s16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Returns the fp32 value of the nearest bf16; zeros become +0.
__device__ __forceinline__ float rounded_to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return __uint_as_float((u32)bits << 16) + 0.0f;
}

// Returns 1 / x to a few units in the last place, for 1 <= |x| < about 2^20.
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Loads 16 bytes that are not read again.
__device__ __forceinline__ uint4 load_once(const u8* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Loads four 8 x 8 matrices of 16-bit values, transposed if TRANSPOSED. Lane 8 m + i gives the
// address of row i of matrix m. Lane 4 g + t gets values 2t, 2t+1 of row g of each matrix.
template <bool TRANSPOSED>
__device__ __forceinline__ Words<4> load_matrices(const u8* p) {
    Words<4> r;
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
                     : "r"(shared_address(p)) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
                     : "r"(shared_address(p)) : "memory");
    }
    return r;
}

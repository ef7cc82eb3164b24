// Turns codes, corrections and metadata of a page's half in shared memory into fp16 operands. Does
// not depend on how warps share a page. Needs the defines of verify_page.cuh, Q_BF16 and TOP.
#pragma once
#include "verify_page.cuh"

__device__ __forceinline__ u32 nibbles(u32 x) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(r) : "r"(x), "r"(0x77777777u), "r"(0x0f0f0f0fu));
    return r;
}

// Loads codes of TILES tiles in a row from tile `index` on, a multiple of TILES, as words for
// restore(). codes, rest: the fields. With 2-bit anchors TILES may be 8, whose halves fill 16-byte
// loads.
template <int TILES>
__device__ __forceinline__ Words<TILES> load_codes(
    const u8* codes, const u8* rest, int index, int lane) {
#if ANCHOR_BITS == 4
    static_assert(TILES == 4);
    return load_shared<4>(codes + (index / 4 * 32 + lane) * 16);
#else
    constexpr int PAIRS = TILES / 2;
    int at = (index / 8 * 32 + lane) * 16 + index / 2 % 4 * 4;
    Words<PAIRS> upper = load_shared<PAIRS>(codes + at), lower = load_shared<PAIRS>(rest + at);
    Words<TILES> r;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
#if LOG4
        // Positive codes, 8 + m, become 15 - m; negative codes are 7 - m already.
        u32 positive = upper.w[i] & 0xaaaaaaaau, next = positive >> 1;
        upper.w[i] ^= next;
        lower.w[i] ^= positive | next;
#endif
        r.w[2 * i] = select(0xccccccccu, upper.w[i] << 2, lower.w[i]);
        r.w[2 * i + 1] = select(0xccccccccu, upper.w[i], lower.w[i] >> 2);
    }
    return r;
#endif
}

// Restores the exact 8-bit codes of two words, as two fp16 numbers a register. uniform4's codes are
// multiples of 1 / 16.
__device__ __forceinline__ void restore(u32 word, u32 correction, u32 (&x)[4]) {
#if LOG4
    // The integer I = 16 m - r is byte (m, r ^ 7) minus 7; then the sign is applied.
    u32 turned = word << 4;
#if ANCHOR_BITS == 4
    // Bytes are those of codes 0, 5, 1, 4 and 2, 7, 3, 6, in the order of the magnitudes.
    u32 swapped = prmt(correction, correction, 0x1230);
    u32 even = and_or(word, 0x70707070u, nibbles(swapped));
    u32 odd = and_or(turned, 0x70707070u, nibbles(swapped >> 4));
    u32 codes[4] = {prmt(even, 0x64646464u, 0x4240), prmt(odd, 0x64646464u, 0x4240),
                    prmt(even, 0x64646464u, 0x4143), prmt(odd, 0x64646464u, 0x4143)};
    u32 signs[4] = {word, turned, word << 8, word << 12};
#else
    // Sign and m are both inverted. Bytes are those of codes 0, 4, 1, 5 and 2, 6, 3, 7.
    u32 even = ~turned & 0x70707070u | nibbles(correction);
    u32 odd = ~word & 0x70707070u | nibbles(correction >> 4);
    u32 codes[4] = {prmt(even, 0x64646464u, 0x4240), prmt(odd, 0x64646464u, 0x4240),
                    prmt(even, 0x64646464u, 0x4341), prmt(odd, 0x64646464u, 0x4341)};
    u32 signs[4] = {word << 12, word << 8, turned, word};
#endif
#pragma unroll
    for (int r = 0; r < 4; ++r)
        asm("lop3.b32 %0, %1, %2, %3, %4;"  // (a & b) ^ c, or (~a & b) ^ c
            : "=r"(x[r]) : "r"(signs[r]), "r"(0x80008000u), "r"(half2_add(codes[r], 0xe407e407u)),
              "n"(ANCHOR_BITS == 4 ? 0x6A : 0xA6));
#else
    // 16 u + l is byte (u, l ^ 8) minus 8. Bytes are those of codes 0, 4, 1, 5 and 2, 6, 3, 7.
    u32 lower = correction ^ 0x88888888u;
    u32 even = select(0xf0f0f0f0u, word << 4, lower);
    u32 odd = select(0xf0f0f0f0u, word, lower >> 4);
    u32 codes[4] = {prmt(even, 0x64646464u, 0x4240), prmt(odd, 0x64646464u, 0x4240),
                    prmt(even, 0x64646464u, 0x4341), prmt(odd, 0x64646464u, 0x4341)};
#pragma unroll
    for (int r = 0; r < 4; ++r) x[r] = half2_fma(codes[r], 0x2c002c00u, 0xd408d408u);
#endif
}

__device__ __forceinline__ float log_scale(int base, u32 offset) {
    return __uint_as_float((u32)(base + (int)offset) << 19) * (1.0f / TOP);
}

// Writes scale and zero of a warp's 16 tokens of K: [channel tile][t] {s 2t 2t+1, z, s 2t+8 2t+9,
// z}.
__device__ __forceinline__ void convert_k(uint4* meta, const u8* part, int row_tile, int lane) {
    int chunk = row_tile / K_CHUNK_TILES;
    for (int e = lane; e < CHANNEL_TILES * 4; e += 32) {
        int at = chunk * HEAD_DIM + (e % 4 * CHANNEL_TILES + e / 4) * 4;
        uint4 r;
#if LOG4
        int base = *reinterpret_cast<const short*>(part);
        Words<2> zero = load_shared<2>(part + K_META + at * 2);
        u32 offset = load_shared<1>(part + K_META2 + at).w[0];
        r.x = to_half2(log_scale(base, offset & 255), log_scale(base, offset >> 8 & 255));
        r.z = to_half2(log_scale(base, offset >> 16 & 255), log_scale(base, offset >> 24));
#else
        Words<2> scale = load_shared<2>(part + K_META + at * 2);
        Words<2> zero = load_shared<2>(part + K_META2 + at * 2);
        r.x = to_half2(low_bf16(scale.w[0]), high_bf16(scale.w[0]));
        r.z = to_half2(low_bf16(scale.w[1]), high_bf16(scale.w[1]));
#endif
        r.y = to_half2(low_bf16(zero.w[0]), high_bf16(zero.w[0]));
        r.w = to_half2(low_bf16(zero.w[1]), high_bf16(zero.w[1]));
        meta[e] = r;
    }
}

// Writes scale and zero of V. uniform4: of 64 tokens, [token tile][t] {s 2t 2t+1, s 2t+8 2t+9,
// zeros likewise}, 0 from token `valid` on. log4: of channel tiles first + i, [i][g][row g, g + 8]
// {s twice, z twice}.
template <int TILES>
__device__ __forceinline__ void convert_v(
    uint2* meta, const u8* part, int base, int step, int valid, int first, int lane) {
#if LOG4
    int chunk = step * STEP_TILES / V_CHUNK_TILES;
    for (int e = lane; e < TILES * 16; e += 32) {
        int at = chunk * HEAD_DIM +
                 (e / 2 % 8 * CHANNEL_TILES + e / 16 + first) * 2 + e % 2;
        float s = log_scale(base, part[V_META2 + at]);
        float z = low_bf16(*reinterpret_cast<const u16*>(part + V_META + at * 2));
        meta[e] = make_uint2(to_half2(s, s), to_half2(z, z));
    }
#else
    int of_zero = lane / 16, tile = lane / 4 % 4, t = lane % 4;
    const u8* word = part + (of_zero ? V_META2 : V_META) +
                     (2 * t * TOKEN_TILES + step * STEP_TILES + tile) * 4;
    u32 even = load_shared<1>(word).w[0], odd = load_shared<1>(word + TOKEN_TILES * 4).w[0];
    u32 low = to_half2(low_bf16(even), low_bf16(odd));
    u32 high = to_half2(high_bf16(even), high_bf16(odd));
    if (valid < PAGE_SIZE) {
        int left = valid - (step * STEP_TILES + tile) * 16 - 2 * t;
        low &= left > 1 ? 0xffffffffu : left > 0 ? 0xffffu : 0;
        high &= left > 9 ? 0xffffffffu : left > 8 ? 0xffffu : 0;
    }
    meta[(tile * 4 + t) * 2 + of_zero] = make_uint2(low, high);
#endif
}

// Returns x s + z. For an fp16 model, a value beyond fp16 becomes the largest fp16 number.
__device__ __forceinline__ u32 scaled(u32 x, u32 s, u32 z) {
    u32 r = half2_fma(x, s, z);
#if !Q_BF16
    asm("min.f16x2 %0, %0, %1;" : "+r"(r) : "r"(0x7bff7bffu));
    asm("max.f16x2 %0, %0, %1;" : "+r"(r) : "r"(0xfbfffbffu));
#endif
    return r;
}

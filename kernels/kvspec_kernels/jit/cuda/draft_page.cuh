// Sizes of a page and byte offsets in its record (formats.py), for drafts in fp16 and in INT8.
#pragma once
#include "warp_states.cuh"

constexpr int CHANNEL_TILES = HEAD_DIM / 16;
constexpr int TOKEN_TILES = PAGE_SIZE / 16;
constexpr int K_CHUNK_TILES = TOKEN_TILES / K_ROWS;
constexpr int V_CHUNK_TILES = TOKEN_TILES / V_ROWS;
// A score may exceed the running maximum by this, in log2, before the maximum moves. The slack
// saves rescalings.
constexpr float SLACK = 6.0f;

constexpr int CODE_BYTES = PAGE_SIZE * HEAD_DIM * ANCHOR_BITS / 8;
constexpr int K_CODES = LOG4 ? 16 : 0;
constexpr int K_META = K_CODES + CODE_BYTES;
constexpr int K_META2 = K_META + K_ROWS * HEAD_DIM * 2;  // log4: scales (u8); uniform4: zeros (bf16)
constexpr int V_CODES = 0;  // within the V part
constexpr int V_META = CODE_BYTES;
constexpr int V_META2 = V_META + (LOG4 ? V_ROWS * HEAD_DIM * 2 : PAGE_SIZE * 2);

__device__ __forceinline__ u32 transposed(u32 x) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

// Returns two values of q times `scale`, as fp16.
__device__ __forceinline__ u32 scaled_query(u32 pair, float scale) {
#if Q_BF16
    float low = low_bf16(pair), high = high_bf16(pair);
#else
    float low = half_to_float((u16)pair), high = half_to_float((u16)(pair >> 16));
#endif
    return to_half2(low * scale, high * scale);
}

// Products of q with a row of numbers, one for each channel.
struct RowProduct {
    float low[4], high[4];

    __device__ __forceinline__ void clear() {
        for (int i = 0; i < 4; ++i) low[i] = high[i] = 0.0f;
    }

    // words: columns 2t, 2t+1 and 2t+8, 2t+9 of two channel tiles, as metadata holds them. q: the
    // query's columns 2t, 2t+1 of both tiles, then columns 2t+8, 2t+9. The words serve unchanged as
    // a left operand, but its rows g have the first columns of both tiles and its rows g + 8 the
    // other columns. So only half of each product is used.
    __device__ __forceinline__ void add(const Words<4>& words, const uint4& q) {
        mma_bf16(low, words, q.x, q.y);
        mma_bf16(high, words, q.z, q.w);
    }

    // Returns the product of column 2 t + j.
    __device__ __forceinline__ float operator[](int j) const { return low[j] + high[2 + j]; }
};

// Returns what KeyNumbers adds to scales of log4. base: of the page.
__device__ __forceinline__ u32 key_bias(int base) { return (u32)(16 + (base & 15)) * 0x00400040u; }

// Numbers of a chunk of K for the columns of two channel tiles that a lane has.
struct KeyNumbers {
    Words<4> offset;  // bf16: centres in log4, zeros in uniform4
#if !LOG4
    Words<4> scale;  // bf16
#endif
    u32 factor[4];  // scales in fp16, in log4 relative to the page's base

    // bias: key_bias() of the page.
    __device__ __forceinline__ KeyNumbers(
        const u8* page, u32 bias, int chunk, int tile, int t) {
        int at = (chunk * HEAD_DIM + t * (HEAD_DIM / 4) + tile * 4);
        offset = load_shared<4>(page + (LOG4 ? K_META : K_META2) + at * 2);
#if LOG4
        Words<2> scale = load_shared<2>(page + K_META2 + at);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            factor[i] = prmt(scale.w[i / 2], 0, i % 2 ? 0x4342 : 0x4140) * 64u + bias;
#else
        scale = load_shared<4>(page + K_META + at * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            factor[i] = to_half2(low_bf16(scale.w[i]), high_bf16(scale.w[i]));
#endif
    }

    // Multiplies fragments of the query by the scales, for tiles `tile` and tile + 1.
    __device__ __forceinline__ void fold(
        u32 (&folded)[CHANNEL_TILES][2], int tile, const uint4& scaled) const {
        folded[tile][0] = half2_mul(factor[0], scaled.x);
        folded[tile][1] = half2_mul(factor[1], scaled.y);
        folded[tile + 1][0] = half2_mul(factor[2], scaled.z);
        folded[tile + 1][1] = half2_mul(factor[3], scaled.w);
    }
};

#if !LOG4
// Clears V's scales and zeros of tokens past the request's last one: they may be NaN.
__device__ __forceinline__ void clear_tokens(u8* page, int valid, int lane) {
    for (int i = valid + lane; i < PAGE_SIZE; i += 32) {
        int at = (i % 8 * TOKEN_TILES + i / 16) * 4 + i / 8 % 2 * 2;
        *reinterpret_cast<u16*>(page + V_META + at) = 0;
        *reinterpret_cast<u16*>(page + V_META2 + at) = 0;
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncwarp();
}
#endif

// A page's codes as left operands of INT8 products (mma.m16n8k32). A value is offset + scale UNIT
// (code - ZERO).
#pragma once
#include "draft_page.cuh"

// The middle of uniform4's 4-bit codes, part of the offset z + MIDDLE s.
constexpr float MIDDLE = 7.5f;
#if ANCHOR_BITS == 2
constexpr float UNIT = LOG4 ? 2.0f * TWO_BIT_STEP / TOP : 4.0f, ZERO = 1.5f;
#else
static_assert(!LOG4, "codes of log4 are signs and magnitudes: int8 products need ordered integers");
constexpr float UNIT = 1.0f, ZERO = MIDDLE;
#endif

// A product takes codes of 16 rows x 32 columns: STEP_WORDS words a lane.
constexpr int STEP_WORDS = ANCHOR_BITS / 2;
constexpr int CHANNEL_STEPS = CHANNEL_TILES / 2, TOKEN_STEPS = TOKEN_TILES / 2;
constexpr int V_CHUNK_STEPS = V_CHUNK_TILES / 2;
constexpr int PAGE_WORDS = CHANNEL_STEPS * TOKEN_TILES * STEP_WORDS;
constexpr int WORD_GROUP = PAGE_WORDS % 4 == 0 ? 4 : 2;

// Codes of rows g + 8 count this much more than those of rows g.
constexpr float UPPER = 16.0f;
constexpr u32 ONES = 0x01010101u;

__device__ constexpr int vector_of(int words) {
    int v = words % 4 == 0 ? 4 : words % 2 == 0 ? 2 : 1;
    return v < WORD_GROUP ? v : WORD_GROUP;
}

template <int N>
__device__ __forceinline__ Words<N> load_codes(const u8* codes, int index, int lane) {
    return load_shared<N>(
        codes + ((index / WORD_GROUP * 32 + lane) * WORD_GROUP + index % WORD_GROUP) * 4);
}

__device__ __forceinline__ void mma_codes(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 half2_largest(u32 a, u32 b) {
    u32 r;
    asm("{\n.reg .b32 x, y;\nabs.f16x2 x, %1;\nabs.f16x2 y, %2;\nmax.f16x2 %0, x, y;\n}"
        : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Makes the left operand of a product from its words. Codes of rows g + 8 are not shifted down, and
// so count UPPER times as much as those of rows g.
__device__ __forceinline__ void unpack(const u32* word, u32 (&a)[4]) {
#if ANCHOR_BITS == 2
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = word[0] >> (i / 2 * 2) & (i % 2 ? 0x30303030u : 0x03030303u);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = word[i / 2] & (i % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu);
#endif
}

// Adds the products of K's codes, of token tiles `first` and first + 1, and of right operands.
template <int COLUMNS>
__device__ __forceinline__ void add_key_products(
    int (&acc)[COLUMNS][2][4], const u32 (&bytes)[COLUMNS][CHANNEL_TILES], const u8* page,
    int first, int lane) {
    constexpr int VECTOR = vector_of(CHANNEL_STEPS * STEP_WORDS);
    static_assert(VECTOR % STEP_WORDS == 0, "one load must bring all words of a product");
#pragma unroll
    for (int at = 0; at < CHANNEL_STEPS * STEP_WORDS; at += VECTOR) {
        Words<VECTOR> word[2];
#pragma unroll
        for (int k = 0; k < 2; ++k)
            word[k] = load_codes<VECTOR>(
                page + K_CODES, (first + k) * CHANNEL_STEPS * STEP_WORDS + at, lane);
#pragma unroll
        for (int i = 0; i < VECTOR; i += STEP_WORDS)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                u32 a[4];
                unpack(word[k].w + i, a);
                int tile = (at + i) / STEP_WORDS * 2;
#pragma unroll
                for (int column = 0; column < COLUMNS; ++column)
                    mma_codes(acc[column][k], a, bytes[column][tile], bytes[column][tile + 1]);
            }
    }
}

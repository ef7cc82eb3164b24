// Full-precision tokens after a request's encoded pages, as the same operands as pages. The tokens
// are few and read once, so lanes load them straight from global memory. Needs the define Q_BF16.
#pragma once
#include "tail.cuh"

__device__ __forceinline__ u32 as_half2(u32 pair) {
#if Q_BF16
    return to_half2(low_bf16(pair), high_bf16(pair));
#else
    return pair;
#endif
}

// Loads 4 channel tiles from `tile` on, of the 16 tokens of a row tile of the request's page.
__device__ __forceinline__ void load_tail_k(
    u32 (*x)[4], const Tail& tail, int b, int head, int page, int row_tile, int tile, int lane) {
    i64 id = tail.indices[tail.indptr[b] + page];
    const u16* first = tail.k + id * tail.k_page + head * tail.k_head +
                       (row_tile * 16 + lane / 4) * tail.k_token + tile * 16 + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const u16* pair = first + (r & 1) * 8 * tail.k_token + k * 16 + (r >> 1) * 8;
            x[k][r] = as_half2(*reinterpret_cast<const u32*>(pair));
        }
}

// Loads 4 token tiles from `token_tile` on, of the 16 channels of a tile. Tokens from `valid` on
// become 0, for any contents of memory.
__device__ __forceinline__ void load_tail_v(
    u32 (*x)[4], const Tail& tail, int b, int head, int page, int tile, int token_tile, int valid,
    int lane) {
    i64 id = tail.indices[tail.indptr[b] + page];
    const u16* first = tail.v + id * tail.v_page + head * tail.v_head + tile * 16 + lane / 4;
#pragma unroll
    for (int row = 0; row < 4; ++row)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            int token = (token_tile + row) * 16 + (r >> 1) * 8 + lane % 4 * 2;
            const u16* value = first + token * tail.v_token + (r & 1) * 8;
            u32 even = token < valid ? value[0] : 0;
            u32 odd = token + 1 < valid ? value[tail.v_token] : 0;
            x[row][r] = as_half2(even | odd << 16);
        }
}

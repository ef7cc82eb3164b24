// A page at the int8 target: sizes, byte offsets in the halves of its records (formats.py), and how
// they lie in shared memory. Needs the defines HEAD_DIM PAGE_SIZE LOG4 K_ROWS V_ROWS K_BYTES and
// V_BYTES.
#pragma once
#include "hopper.cuh"

constexpr int CHANNEL_TILES = HEAD_DIM / 16, TOKEN_TILES = PAGE_SIZE / 16;
constexpr int K_CHUNK_TILES = TOKEN_TILES / K_ROWS, V_CHUNK_TILES = TOKEN_TILES / V_ROWS;
constexpr int STEP_TILES = 4;  // token tiles that V is restored for at a time: 64 tokens

constexpr int CODE_BYTES = PAGE_SIZE * HEAD_DIM / 2;
constexpr int K_CODES = LOG4 ? 16 : 0;
constexpr int K_META = K_CODES + CODE_BYTES;
constexpr int K_META2 = K_META + K_ROWS * HEAD_DIM * 2;
constexpr int V_META = CODE_BYTES;
constexpr int V_META2 = V_META + (LOG4 ? V_ROWS * HEAD_DIM * 2 : PAGE_SIZE * 2);
// Halves of a page in shared memory, K and V by turns: the anchor's part, the correction's codes.
constexpr int PAGE_BYTES = K_BYTES + V_BYTES + 2 * CODE_BYTES;
__device__ __forceinline__ u32 half_offset(u32 slot) {
    return slot / 2 * PAGE_BYTES + (slot % 2 ? K_BYTES + CODE_BYTES : 0);
}

// Enqueues the copy of a half of a page (0: K, 1: V) to shared memory; called by one lane.
__device__ __forceinline__ void fetch_half(
    u32 target, const u8* anchor, const u8* residual, int which, u32 barrier) {
    u32 bytes = which ? V_BYTES : K_BYTES;
    expect(barrier, bytes + CODE_BYTES);
    copy_bulk(target, anchor + (which ? K_BYTES : 0), bytes, barrier);
    copy_bulk(target + bytes, residual + which * CODE_BYTES, CODE_BYTES, barrier);
}

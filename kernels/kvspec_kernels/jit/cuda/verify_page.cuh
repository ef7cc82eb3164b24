// A page at the int8 target: sizes, byte offsets in the halves of its records (formats.py), and the
// places of these halves in shared memory. Needs the defines HEAD_DIM PAGE_SIZE LOG4 ANCHOR_BITS
// K_ROWS V_ROWS K_BYTES V_BYTES and RESIDUAL_BYTES.
#pragma once
#include "hopper.cuh"

constexpr int CHANNEL_TILES = HEAD_DIM / 16, TOKEN_TILES = PAGE_SIZE / 16;
constexpr int K_CHUNK_TILES = TOKEN_TILES / K_ROWS, V_CHUNK_TILES = TOKEN_TILES / V_ROWS;
constexpr int STEP_TILES = 4;  // token tiles that V is restored for at a time: 64 tokens

constexpr int CODE_BYTES = PAGE_SIZE * HEAD_DIM * ANCHOR_BITS / 8;
constexpr int K_CODES = LOG4 ? 16 : 0;
constexpr int K_META = K_CODES + CODE_BYTES;
constexpr int K_META2 = K_META + K_ROWS * HEAD_DIM * 2;
constexpr int V_META = CODE_BYTES;
constexpr int V_META2 = V_META + (LOG4 ? V_ROWS * HEAD_DIM * 2 : PAGE_SIZE * 2);
// Halves of a page in shared memory, K and V in turn. A half is the anchor's part, then the
// residual's part: corrections and, for 2-bit anchors, the rest of the codes.
constexpr int PAGE_BYTES = K_BYTES + V_BYTES + RESIDUAL_BYTES, RESIDUAL_HALF = RESIDUAL_BYTES / 2;
constexpr int CORRECTION_BYTES = PAGE_SIZE * HEAD_DIM / 2;
constexpr int K_REST = K_BYTES + CORRECTION_BYTES, V_REST = V_BYTES + CORRECTION_BYTES;
static_assert(RESIDUAL_HALF == CORRECTION_BYTES + (ANCHOR_BITS == 2 ? CODE_BYTES : 0));
static_assert(K_BYTES % 16 == 0 && V_BYTES % 16 == 0 && RESIDUAL_HALF % 16 == 0);
__device__ __forceinline__ u32 half_offset(u32 slot) {
    return slot / 2 * PAGE_BYTES + (slot % 2 ? K_BYTES + RESIDUAL_HALF : 0);
}

// Enqueues the copy of a half of a page (0: K, 1: V) to shared memory. One lane calls it.
__device__ __forceinline__ void fetch_half(
    u32 target, const u8* anchor, const u8* residual, int which, u32 barrier) {
    u32 bytes = which ? V_BYTES : K_BYTES;
    expect(barrier, bytes + RESIDUAL_HALF);
    copy_bulk(target, anchor + (which ? K_BYTES : 0), bytes, barrier);
    copy_bulk(target + bytes, residual + which * RESIDUAL_HALF, RESIDUAL_HALF, barrier);
}

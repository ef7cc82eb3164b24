// Encodes pages into anchor records with 4-bit codes, and residual records, for sm_90a.
//
// A block encodes K or V of one page and head. Warps load it 16 bytes a lane, and keep the least
// and greatest value of each channel. ldmatrix reads the values back from shared memory, in the
// order of the records (formats.py). Lane 4 g + t of a warp then holds all 8 values of its word in
// a tile, and stores its words of 4 tiles at once. Numbers of a channel or token are computed once
// and read from shared memory.
//
// Defines: LOG4 (else uniform4), EXACT (else int8), KV_BF16 (else fp16), PAGE_SIZE, HEAD_DIM,
// K_CHUNK, V_CHUNK (tokens that share a channel's metadata; for V of uniform4, which has none,
// tokens that are loaded together), TOP, WARPS, BLOCKS (a multiprocessor), SHARED_BYTES, and
// offsets of the parts' fields in an anchor record: K_CODES, K_METADATA, V_CODES, V_METADATA.
#include "encode_prepare.cuh"

// Stores words of neighbouring tiles from `tile` on. In a group of 4, a lane's words are adjacent.
template <int N>
__device__ __forceinline__ void store_words(u8* codes, int tile, const u32* words) {
    u8* p = codes + tile / 4 * 512 + threadIdx.x % 32 * 16 + tile % 4 * 4;
    if constexpr (N == 4) {
        *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
        *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
    }
}

// Encodes the tiles of unit `unit`.
template <bool IS_V, bool CLAMPED>
__device__ __forceinline__ void encode_unit(int unit, const Shared& shared, u8* codes,
                                            u8* corrections) {
    using P = Part<IS_V>;
    constexpr int ROWS = P::UNIT_ROWS, COLS = P::UNIT_COLS, UNITS_WIDE = P::COL_TILES / COLS;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row0 = unit / UNITS_WIDE * ROWS, col0 = unit % UNITS_WIDE * COLS;
    // Lane 8 m + i points to row i of matrix m.
    const int down = 16 * row0 + (lane & 8), right = 16 * col0 + (lane & 16) / 2;
    const u8* start = shared.values + (IS_V ? (right + lane % 8) * PITCH + down * 2
                                            : (down + lane % 8) * PITCH + right * 2);
    const int chunk = P::BY_TOKEN ? 0 : 16 * (IS_V ? col0 : row0) / P::CHUNK * HEAD_DIM;
    // entry is a multiple of 8 and within is less than 8, so that their slots add up.
    const int entry = chunk + 16 * (P::BY_ROW ? row0 : col0), within = P::BY_ROW ? g : 2 * t;
    const int slot = slot_of(entry) + within;
    u32 upper[ROWS * COLS], lower[ROWS * COLS];
    Prepared m[4];
    float steps[4];
    // The inner loop runs in the direction that shares metadata.
    constexpr int OUTER = P::BY_ROW ? ROWS : COLS, INNER = P::BY_ROW ? COLS : ROWS;
#pragma unroll
    for (int i = 0; i < OUTER; i++) {
#pragma unroll
        for (int k = 0; k < (P::BY_ROW ? 2 : 4); k++) {
            const int eights = 2 * i + (P::BY_ROW ? k : k / 2), odd = P::BY_ROW ? 0 : k % 2;
            m[k] = shared.prepared[slot + slot_of(8 * eights) + odd];
            if constexpr (WITH_STEPS) steps[k] = shared.steps[entry + within + 8 * eights + odd];
        }
#pragma unroll
        for (int j = 0; j < INNER; j++) {
            const int row = P::BY_ROW ? i : j, col = P::BY_ROW ? j : i;
            const int rows_down = 16 * (IS_V ? col : row), bytes_right = 32 * (IS_V ? row : col);
            auto values = load_matrices<IS_V>(start + rows_down * PITCH + bytes_right);
            u32 &code = upper[row * COLS + col], &correction = lower[row * COLS + col];
#if LOG4
            encode_word<P::BY_ROW, !EXACT, CLAMPED>(values, m, code, correction);
#else
            encode_word<!EXACT, CLAMPED>(values, m, steps, code, correction);
#endif
        }
    }
    // If a row has only two tiles, the words of two rows are adjacent.
    constexpr int WIDTH = P::COL_TILES == 2 && ROWS == 2 ? 4 : COLS;
#pragma unroll
    for (int i = 0; i < ROWS * COLS; i += WIDTH) {
        const int tile = (row0 + i / COLS) * P::COL_TILES + col0;
        store_words<WIDTH>(codes, tile, upper + i);
        if constexpr (!EXACT) store_words<WIDTH>(corrections, tile, lower + i);
    }
}

template <bool IS_V, bool CLAMPED>
__device__ __forceinline__ void encode_units(const Shared& shared, u8* codes, u8* corrections) {
#pragma unroll 1
    for (int unit = threadIdx.x / 32; unit < Part<IS_V>::UNITS; unit += WARPS)
        encode_unit<IS_V, CLAMPED>(unit, shared, codes, corrections);
}

template <bool IS_V>
__device__ __forceinline__ void encode_part(const u8* page, i64 stride_token, u8* anchor,
                                            u8* residual, Shared& shared) {
    using P = Part<IS_V>;
    // K and V each take half of the residual record.
    constexpr int PART_BYTES = EXACT ? PAGE_SIZE * ROW_BYTES : PAGE_SIZE * HEAD_DIM / 2;
    u8* part = residual + (IS_V ? PART_BYTES : 0);
    const bool clamped = prepare<IS_V>(page, stride_token, anchor, part, shared);
    u8* metadata = anchor + (IS_V ? V_METADATA : K_METADATA);
#pragma unroll 1
    for (int i = threadIdx.x * 16; i < P::IMAGE_BYTES; i += THREADS * 16)
        *reinterpret_cast<uint4*>(metadata + i) = *reinterpret_cast<uint4*>(shared.image + i);
    u8* codes = anchor + (IS_V ? V_CODES : K_CODES);
    constexpr bool ALWAYS = !LOG4 && !KV_BF16, NEVER = LOG4 && !KV_BF16;
    if (ALWAYS || (clamped && !NEVER)) {
        encode_units<IS_V, true>(shared, codes, part);
    } else {
        encode_units<IS_V, false>(shared, codes, part);
    }
}

__device__ __forceinline__ i64 index_at(const void* indices, int entry, bool wide) {
    return wide ? static_cast<const i64*>(indices)[entry] : static_cast<const int*>(indices)[entry];
}

// Grid: (entries * 2 * num_heads). Strides are in bytes; `wide` has bit 0 set if `source` is int64,
// bit 1 for anchor_slots, bit 2 for residual_slots; else they are int32.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
encode_pages(const u8* k, const u8* v, i64 stride_page, i64 stride_token, i64 stride_head,
             const void* source, const void* anchor_slots, const void* residual_slots, int wide,
             u8* anchors, i64 stride_anchor, i64 stride_anchor_head, u8* residuals,
             i64 stride_residual, i64 stride_residual_head, int num_heads) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int head = blockIdx.x % num_heads, rest = blockIdx.x / num_heads, entry = rest / 2;
    const i64 page = index_at(source, entry, wide & 1);
    const i64 anchor = index_at(anchor_slots, entry, wide & 2);
    const i64 residual = index_at(residual_slots, entry, wide & 4);
    if (page < 0) return;
    const i64 offset = page * stride_page + head * stride_head;
    u8* to_anchor = anchors + anchor * stride_anchor + head * stride_anchor_head;
    u8* to_residual = residuals + residual * stride_residual + head * stride_residual_head;
    if (rest % 2) {
        encode_part<true>(v + offset, stride_token, to_anchor, to_residual, shared);
    } else {
        encode_part<false>(k + offset, stride_token, to_anchor, to_residual, shared);
    }
}

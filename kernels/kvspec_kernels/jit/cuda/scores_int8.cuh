// Scores of a page by INT8 products on the codes. To choose pages, 8 bits of a query suffice.
//
// S^T = K Q^T with mma.m16n8k32, where K's codes are the left operand and the 8 columns are query
// rows. The right operand, q times K's scales, is rounded to 1 / 126 of a row's largest product.
// Sums over codes are exact. ZERO times the sum of the rounded operand is subtracted afterwards.
#pragma once
#include "int8_codes.cuh"

constexpr int COLUMN_TILES = GROUP / 8;
constexpr int QUERY_BYTES = COLUMN_TILES * CHANNEL_TILES * 256;
// The largest operand, below 127 also after rounding.
constexpr float LARGEST = 126.0f;
// The bits of MAGIC plus n are those of MAGIC + n as a float, for |n| < 2^22.
constexpr float MAGIC = 12582912.0f;
constexpr bool FITS_MAGIC = 127 * 15 * 16 * HEAD_DIM < 1 << 22;
#if !LOG4
constexpr u32 MIDDLE_PAIR = 0x47804780u;  // MIDDLE in fp16
#endif

typedef float Scores[COLUMN_TILES][TOKEN_TILES][4];

// Writes fragments of query rows to shared memory, for each column tile, pair of channel tiles and
// lane: fp16 times sm_scale * log2(e). address_of: of a row, null for none.
template <class AddressOf>
__device__ __forceinline__ void load_query_rows(
    uint4* query, int column_tiles, float scale_log2, AddressOf address_of) {
    for (int i = threadIdx.x; i < column_tiles * CHANNEL_TILES * 16; i += WARPS * 32) {
        int lane = i % 32, tile = i / 32 * 2 % CHANNEL_TILES, column = i / 16 / CHANNEL_TILES;
        const u16* row = address_of(column * 8 + (lane >> 2));
        u32 scaled[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 pair = 0;
            if (row)
                pair = *reinterpret_cast<const u32*>(
                    row + (tile + k / 2) * 16 + k % 2 * 8 + 2 * (lane & 3));
            scaled[k] = scaled_query(pair, scale_log2);
        }
        query[i] = make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]);
    }
}

// Rounds q times K's scales, the right operand. Returns the step of the lane's row.
__device__ __forceinline__ float quantise_rows(
    u32 (&bytes)[CHANNEL_TILES], const u32 (&folded)[CHANNEL_TILES][2]) {
    u32 most = 0;
#pragma unroll
    for (int tile = 0; tile < CHANNEL_TILES; ++tile)
        most = half2_largest(most, half2_largest(folded[tile][0], folded[tile][1]));
    most = half2_largest(most, __shfl_xor_sync(FULL, most, 1));
    most = half2_largest(most, __shfl_xor_sync(FULL, most, 2));
    most = half2_largest(most, prmt(most, most, 0x1032));
    // Steps below 2^-16 would gain nothing, and their inverse would exceed fp16.
    float wanted = LARGEST / fmaxf(half_to_float((u16)most), LARGEST / 65504.0f);
    u32 factor = to_half2(wanted, wanted);
#pragma unroll
    for (int tile = 0; tile < CHANNEL_TILES; ++tile) {
        // Adding 1536 in fp16 leaves the rounded integer in the low byte.
        u32 low = half2_fma(folded[tile][0], factor, 0x66006600u);
        u32 high = half2_fma(folded[tile][1], factor, 0x66006600u);
        bytes[tile] = prmt(low, high, 0x6240);
    }
    return __fdividef(1.0f, half_to_float((u16)factor));
}

__device__ __forceinline__ float sum_of_codes(int bits) {
    if constexpr (FITS_MAGIC)
        return __int_as_float(bits) - MAGIC;
    else
        return __int2float_rn(bits);
}

// Computes S^T of a page in units of log2: scores[column][token tile][row g, g+8 x col. 2t, 2t+1].
__device__ __forceinline__ void score_page(
    Scores& scores, const uint4* query, const u8* page, float, int lane) {
    int t = lane & 3;
    const int none = FITS_MAGIC ? __float_as_int(MAGIC) : 0;
#if LOG4
    int base = *reinterpret_cast<const short*>(page);
    u32 bias = key_bias(base);
    float unit = __uint_as_float((u32)((base >> 4) + 14) << 23) * UNIT;
#else
    constexpr u32 bias = 0;
    constexpr float unit = UNIT;
#endif
#pragma unroll
    for (int chunk = 0; chunk < K_ROWS; ++chunk) {
        RowProduct offsets[COLUMN_TILES];
        u32 folded[COLUMN_TILES][CHANNEL_TILES][2], bytes[COLUMN_TILES][CHANNEL_TILES];
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) offsets[column].clear();
#pragma unroll
        for (int tile = 0; tile < CHANNEL_TILES; tile += 2) {
            const KeyNumbers key(page, bias, chunk, tile, t);
            u32 offset[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                offset[i] = to_half2(low_bf16(key.offset.w[i]), high_bf16(key.offset.w[i]));
#if !LOG4
                offset[i] = half2_fma(key.factor[i], MIDDLE_PAIR, offset[i]);
#endif
            }
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column) {
                uint4 scaled = query[(column * CHANNEL_TILES + tile) * 16 + lane];
                mma_f16(offsets[column].low, offset, scaled.x, scaled.z);
                mma_f16(offsets[column].high, offset, scaled.y, scaled.w);
                key.fold(folded[column], tile, scaled);
            }
        }
        float step[COLUMN_TILES][2], start[COLUMN_TILES][2];
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            float own = quantise_rows(bytes[column], folded[column]) * unit;
            int total[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < CHANNEL_TILES; k += 2)
                mma_codes(total, {ONES, ONES, ONES, ONES}, bytes[column][k], bytes[column][k + 1]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                // Lanes from 4 g on have row g.
                step[column][j] = __shfl_sync(FULL, own, t * 8 + j * 4);
                start[column][j] = offsets[column][j] -
                                   __int2float_rn(total[j]) * (ZERO * step[column][j]);
            }
        }
#pragma unroll
        for (int row = 0; row < K_CHUNK_TILES; row += 2) {
            int first = chunk * K_CHUNK_TILES + row;
            int acc[COLUMN_TILES][2][4];
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                for (int i = 0; i < 8; ++i) acc[column][i / 4][i % 4] = none;
            add_key_products(acc, bytes, page, first, lane);
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float weight = step[column][i % 2] / (i % 4 < 2 ? 1.0f : UPPER);
                    scores[column][first + i / 4][i % 4] =
                        sum_of_codes(acc[column][i / 4][i % 4]) * weight + start[column][i % 2];
                }
        }
    }
}

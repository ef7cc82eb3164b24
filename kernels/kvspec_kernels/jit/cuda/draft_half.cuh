// Draft attention to a page by fp16 products: codes become matrix operands in registers.
//
// S^T = K Q^T and O^T += V^T P^T with mma.m16n8k16, where K and V^T are the left operands and the 8
// columns are the query heads of one KV head.
//   log4:     K = centre + scale L[code]: scale is folded into Q, and q . centre is a separate
//             matrix product. V = centre + scale L[code] per channel, applied once a page.
//   uniform4: K = (u - 8) s + (z + 8 s) likewise. V the same per token: s is folded into P, and the
//             sum of P (z + 8 s) is kept separately.
#pragma once
#include "draft_page.cuh"

constexpr int COLUMN_TILES = (GROUP + 7) / 8;
constexpr int QUERY_BYTES = COLUMN_TILES * CHANNEL_TILES * 512;
#if LOG4
// Unit of the denormals that codes become, relative to the scale.
constexpr float LEVEL_UNIT = 16777216.0f / TOP;
#endif

// Returns the 8 codes of a word in `a`, as the left operand of one 16 x 16 tile.
__device__ __forceinline__ void unpack(u32 word, u32 (&a)[4]) {
#if LOG4
    // Sign, 16 m and 1: the fp16 denormals (16 m + 1) * 2^-24.
    u32 rotated = prmt(word, word, 0x2103);
    a[0] = and_or(word, 0x80708070u, 0x00010001u);
    a[1] = and_or(word << 4, 0x80708070u, 0x00010001u);
    a[2] = and_or(rotated, 0x80708070u, 0x00010001u);
    a[3] = and_or(rotated << 4, 0x80708070u, 0x00010001u);
#else
    // Codes minus 8, so that rounding errors of their weights cancel. 0x6400 is 1024 in fp16: a
    // nibble in the low mantissa bits adds its value, a nibble in the next four bits 16 times that.
    u32 upper = word >> 8;
    a[0] = half2_add(and_or(word, 0x000f000fu, 0x64006400u), 0xe408e408u);
    a[1] = half2_fma(and_or(word, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u);
    a[2] = half2_add(and_or(upper, 0x000f000fu, 0x64006400u), 0xe408e408u);
    a[3] = half2_fma(and_or(upper, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u);
#endif
}

typedef float Scores[COLUMN_TILES][TOKEN_TILES][4];

// State of one warp over the pages of one request and KV head.
struct State {
    float out[COLUMN_TILES][CHANNEL_TILES][4];
    float max[COLUMN_TILES][2];
    float sum[COLUMN_TILES][2];
    float zero[COLUMN_TILES][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            for (int j = 0; j < 2; ++j) {
                max[column][j] = NEG_INF;
                sum[column][j] = 0.0f;
                zero[column][j] = 0.0f;
            }
            for (int i = 0; i < CHANNEL_TILES * 4; ++i) out[column][i / 4][i % 4] = 0.0f;
        }
    }

    // Writes the warp's rows of states.
    __device__ __forceinline__ void store(
        const WarpStates<GROUP>& states, int warp, int lane) const {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float all = sum[column][j], shift = zero[column][j];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) {
                    // log4's sums come from a matrix product: every row has the same sum.
                    if (!LOG4) all += __shfl_xor_sync(FULL, all, step);
                    shift += __shfl_xor_sync(FULL, shift, step);
                }
                int in_group = column * 8 + 2 * t + j;
                if (in_group >= GROUP) continue;
                int at = warp * GROUP + in_group;
                if (g == 0) {
                    states.tops[at] = max[column][j];
                    states.sums[at] = all;
                }
#pragma unroll
                for (int tile = 0; tile < CHANNEL_TILES; ++tile)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        states.outs[at * HEAD_DIM + tile * 16 + half * 8 + g] =
                            out[column][tile][2 * half + j] + shift;
            }
    }
};

// Writes fragments of query rows to shared memory, for each column tile, pair of channel tiles and
// lane: first unchanged, then fp16 times sm_scale * log2(e). address_of: of a row, null for none.
template <class AddressOf>
__device__ __forceinline__ void load_query_rows(
    uint4* query, int column_tiles, float scale_log2, AddressOf address_of) {
    for (int i = threadIdx.x; i < column_tiles * CHANNEL_TILES * 16; i += WARPS * 32) {
        int lane = i % 32, tile = i / 32 * 2 % CHANNEL_TILES, column = i / 16 / CHANNEL_TILES;
        const u16* row = address_of(column * 8 + (lane >> 2));
        u32 raw[4], scaled[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 pair = 0;
            if (row)
                pair = *reinterpret_cast<const u32*>(
                    row + (tile + k / 2) * 16 + k % 2 * 8 + 2 * (lane & 3));
            raw[k] = pair;
            scaled[k] = scaled_query(pair, scale_log2);
        }
        uint4* fragments = query + (column * CHANNEL_TILES + tile) * 32 + lane;
        fragments[0] = make_uint4(raw[0], raw[2], raw[1], raw[3]);
        fragments[32] = make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]);
    }
}

template <class AddressOf>
__device__ __forceinline__ void load_query(uint4* query, float scale_log2, AddressOf address_of) {
    load_query_rows(query, COLUMN_TILES, scale_log2, address_of);
}

// Computes S^T of a page in units of log2: scores[column][token tile][row g, g+8 x col. 2t, 2t+1].
__device__ __forceinline__ void score_page(
    Scores& scores, const uint4* query, const u8* page,
    float scale_log2, int lane) {
    int t = lane & 3;
    constexpr int VECTOR = CHANNEL_TILES % 4 == 0 ? 4 : 2;
#if LOG4
    int base = *reinterpret_cast<const short*>(page);
    u32 bias = key_bias(base);
    float factor = __uint_as_float((u32)((base >> 4) + 14) << 23) * LEVEL_UNIT;
#else
    constexpr u32 bias = 0;
#endif
#pragma unroll
    for (int chunk = 0; chunk < K_ROWS; ++chunk) {
        RowProduct offsets[COLUMN_TILES], scales[COLUMN_TILES];
        u32 folded[COLUMN_TILES][CHANNEL_TILES][2];
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            offsets[column].clear();
            scales[column].clear();
        }
#pragma unroll
        for (int tile = 0; tile < CHANNEL_TILES; tile += 2) {
            const KeyNumbers key(page, bias, chunk, tile, t);
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column) {
                const uint4* fragments = query + (column * CHANNEL_TILES + tile) * 32 + lane;
                uint4 raw = fragments[0], scaled = fragments[32];
                offsets[column].add(key.offset, raw);
#if !LOG4
                scales[column].add(key.scale, raw);
#endif
                key.fold(folded[column], tile, scaled);
            }
        }
        float shift[COLUMN_TILES][2];
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column)
            for (int j = 0; j < 2; ++j)
                shift[column][j] =
                    (offsets[column][j] + (LOG4 ? 0.0f : 8.0f * scales[column][j])) * scale_log2;
#pragma unroll
        for (int row = 0; row < K_CHUNK_TILES; row += 2) {
            int first = chunk * K_CHUNK_TILES + row;
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                for (int i = 0; i < 4; ++i) {
                    float start = LOG4 ? 0.0f : shift[column][i & 1];
                    scores[column][first][i] = start;
                    scores[column][first + 1][i] = start;
                }
#pragma unroll
            for (int tile = 0; tile < CHANNEL_TILES; tile += VECTOR) {
                Words<VECTOR> word[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    int index = (first + k) * CHANNEL_TILES + tile;
                    word[k] = load_shared<VECTOR>(
                        page + K_CODES + ((index / 4 * 32 + lane) * 4 + index % 4) * 4);
                }
#pragma unroll
                for (int i = 0; i < VECTOR; ++i)
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        u32 a[4];
                        unpack(word[k].w[i], a);
#pragma unroll
                        for (int column = 0; column < COLUMN_TILES; ++column)
                            mma_f16(scores[column][first + k], a, folded[column][tile + i][0],
                                    folded[column][tile + i][1]);
                    }
            }
#if LOG4
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                for (int i = 0; i < 4; ++i) {
                    float start = shift[column][i & 1];
                    scores[column][first][i] = scores[column][first][i] * factor + start;
                    scores[column][first + 1][i] = scores[column][first + 1][i] * factor + start;
                }
#endif
        }
    }
}

// Turns scores into probabilities. Rescales sum and output of the state if its maximum grows.
__device__ __forceinline__ void softmax_page(
    State& state, Scores& scores, int valid, int lane) {
    int g = lane >> 2;
    if (valid < PAGE_SIZE) {
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column)
            for (int row = 0; row < TOKEN_TILES; ++row)
                for (int i = 0; i < 4; ++i)
                    if (row * 16 + g + (i >> 1) * 8 >= valid) scores[column][row][i] = NEG_INF;
    }
    float top[COLUMN_TILES][2];
    bool grew = false;
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float m = scores[column][0][j];
#pragma unroll
            for (int row = 0; row < TOKEN_TILES; ++row)
                m = fmaxf(m, fmaxf(scores[column][row][j], scores[column][row][j + 2]));
            top[column][j] = m;
            grew |= m > state.max[column][j] + SLACK;
        }
    if (__any_sync(FULL, grew)) {
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            float shrink[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float m = top[column][j];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) m = fmaxf(m, __shfl_xor_sync(FULL, m, step));
                m = fmaxf(m, state.max[column][j]);
                shrink[j] = exp2_approx(state.max[column][j] - m);
                state.max[column][j] = m;
                state.sum[column][j] *= shrink[j];
                state.zero[column][j] *= shrink[j];
            }
#pragma unroll
            for (int tile = 0; tile < CHANNEL_TILES; ++tile)
                for (int i = 0; i < 4; ++i) state.out[column][tile][i] *= shrink[i & 1];
        }
    }
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column)
        for (int row = 0; row < TOKEN_TILES; ++row)
            for (int i = 0; i < 4; ++i)
                scores[column][row][i] = exp2_approx(scores[column][row][i] - state.max[column][i & 1]);
}

__device__ __forceinline__ void weigh_page(
    State& state, Scores& scores, const u8* page, int base, int lane) {
    int g = lane >> 2;
    constexpr int VECTOR = V_CHUNK_TILES % 4 == 0 ? 4 : 2;
    u32 p[COLUMN_TILES][TOKEN_TILES][2];
#if !LOG4
    // Per token: scale and zero of tokens g and g + 8 of each tile.
#pragma unroll
    for (int row = 0; row < TOKEN_TILES; row += 2) {
        int at = (g * TOKEN_TILES + row) * 4;
        Words<2> scale = load_shared<2>(page + V_META + at);
        Words<2> zero = load_shared<2>(page + V_META2 + at);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float scale0 = low_bf16(scale.w[k]), scale1 = high_bf16(scale.w[k]);
            float zero0 = low_bf16(zero.w[k]) + 8.0f * scale0;
            float zero1 = high_bf16(zero.w[k]) + 8.0f * scale1;
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column) {
                float* s = scores[column][row + k];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    state.sum[column][j] += s[j] + s[j + 2];
                    state.zero[column][j] += s[j] * zero0 + s[j + 2] * zero1;
                }
                p[column][row + k][0] = transposed(to_half2(s[0] * scale0, s[1] * scale0));
                p[column][row + k][1] = transposed(to_half2(s[2] * scale1, s[3] * scale1));
            }
        }
    }
#else
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column)
        for (int row = 0; row < TOKEN_TILES; ++row) {
            float* s = scores[column][row];
            p[column][row][0] = transposed(to_half2(s[0], s[1]));
            p[column][row][1] = transposed(to_half2(s[2], s[3]));
        }
#endif
#pragma unroll
    for (int chunk = 0; chunk < V_ROWS; ++chunk) {
#if LOG4
        // Sums of the rounded probabilities, the weights of the centres.
        float mass[COLUMN_TILES][4];
        const u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            for (int i = 0; i < 4; ++i) mass[column][i] = 0.0f;
#pragma unroll
            for (int row = 0; row < V_CHUNK_TILES; ++row)
                mma_f16(mass[column], ones, p[column][chunk * V_CHUNK_TILES + row][0],
                        p[column][chunk * V_CHUNK_TILES + row][1]);
            state.sum[column][0] += mass[column][0];
            state.sum[column][1] += mass[column][1];
        }
#endif
#pragma unroll
        for (int tile = 0; tile < CHANNEL_TILES; tile += 2) {
            float part[COLUMN_TILES][2][4];
#if LOG4
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                for (int i = 0; i < 8; ++i) part[column][i / 4][i % 4] = 0.0f;
#else
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                for (int i = 0; i < 8; ++i)
                    part[column][i / 4][i % 4] = state.out[column][tile + i / 4][i % 4];
#endif
#pragma unroll
            for (int row = 0; row < V_CHUNK_TILES; row += VECTOR) {
                Words<VECTOR> word[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    int index = (tile + k) * TOKEN_TILES + chunk * V_CHUNK_TILES + row;
                    word[k] = load_shared<VECTOR>(
                        page + V_CODES + ((index / 4 * 32 + lane) * 4 + index % 4) * 4);
                }
#pragma unroll
                for (int i = 0; i < VECTOR; ++i)
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        u32 a[4];
                        unpack(word[k].w[i], a);
#pragma unroll
                        for (int column = 0; column < COLUMN_TILES; ++column) {
                            u32* b = p[column][chunk * V_CHUNK_TILES + row + i];
                            mma_f16(part[column][k], a, b[0], b[1]);
                        }
                    }
            }
#if LOG4
            // Per channel: scale and centre of rows g and g + 8 of two tiles.
            int at = chunk * HEAD_DIM + (g * CHANNEL_TILES + tile) * 2;
            Words<2> centre = load_shared<2>(page + V_META + at * 2);
            u32 offsets = load_shared<1>(page + V_META2 + at).w[0];
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 offset = (offsets >> (16 * k + 8 * half)) & 0xffu;
                    float scale = __uint_as_float((offset + (u32)base) << 19) * LEVEL_UNIT;
                    float middle = half ? high_bf16(centre.w[k]) : low_bf16(centre.w[k]);
#pragma unroll
                    for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            float* out = &state.out[column][tile + k][2 * half + j];
                            *out += part[column][k][2 * half + j] * scale;
                            *out += mass[column][j] * middle;
                        }
                }
#else
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                for (int i = 0; i < 8; ++i)
                    state.out[column][tile + i / 4][i % 4] = part[column][i / 4][i % 4];
#endif
        }
    }
}

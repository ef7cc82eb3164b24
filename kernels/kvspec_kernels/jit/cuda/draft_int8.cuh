// Integer draft attention to a page (HACK, section 4): INT8 products on codes, which become bytes
// in few instructions. A value is offset + scale UNIT (code - ZERO).
//
// S^T = K Q^T and O^T += V^T P^T with mma.m16n8k32, where K's and V^T's codes are the left
// operands. The right operands, q times K's scales and p times V's, are rounded to 12-bit multiples
// of a power of two. Of the 8 columns, column 2 h has those of head h divided by 16 and rounded,
// and column 2 h + 1 the remainder. So 4 heads share a product, with errors as small as those of
// fp16. Sums over codes are exact. ZERO times the sum of the rounded operands is subtracted
// afterwards (HACK's summation elimination).
#pragma once
#include "int8_codes.cuh"

constexpr int COLUMN_TILES = (GROUP + 3) / 4;
constexpr int QUERY_BYTES = COLUMN_TILES * CHANNEL_TILES * 512;
// Adding MAGIC to a float leaves its rounded integer in the low byte of the sum.
constexpr float MAGIC = 12582912.0f;
typedef float Scores[COLUMN_TILES][TOKEN_TILES][2];

// Returns the sum that a head's two columns of a product hold, exact below 2^24.
__device__ __forceinline__ float joined(int coarse, int fine) {
    return __int2float_rn(coarse * 16 + fine);
}

// State of one warp over the pages of one request and KV head, with head 4 c + t in column tile c.
struct State {
    float out[COLUMN_TILES][CHANNEL_TILES][2];
    float max[COLUMN_TILES];
    float sum[COLUMN_TILES];    // uniform4: over the lane's tokens; log4: over all tokens
    float zero[COLUMN_TILES];   // uniform4: added to all channels, over the lane's tokens
    float shift[COLUMN_TILES];  // uniform4: added to all channels, over all tokens

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            max[column] = NEG_INF;
            sum[column] = zero[column] = shift[column] = 0.0f;
            for (int i = 0; i < CHANNEL_TILES * 2; ++i) out[column][i / 2][i % 2] = 0.0f;
        }
    }

    // Writes the warp's rows of states.
    __device__ __forceinline__ void store(
        const WarpStates<GROUP>& states, int warp, int lane) const {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            float all = sum[column], more = zero[column];
#if !LOG4
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                all += __shfl_xor_sync(FULL, all, step);
                more += __shfl_xor_sync(FULL, more, step);
            }
#endif
            int in_group = column * 4 + t;
            if (in_group >= GROUP) continue;
            int at = warp * GROUP + in_group;
            if (g == 0) {
                states.tops[at] = max[column];
                states.sums[at] = all;
            }
#pragma unroll
            for (int i = 0; i < CHANNEL_TILES * 2; ++i)
                states.outs[at * HEAD_DIM + i * 8 + g] =
                    out[column][i / 2][i % 2] + (more + shift[column]);
        }
    }
};

// Writes query fragments to shared memory, for each column tile, pair of channel tiles and lane:
// first unchanged, in even columns only, then fp16 times sm_scale * log2(e) in both columns of a
// head. address_of: of a row, null for none.
template <class AddressOf>
__device__ __forceinline__ void load_query(uint4* query, float scale_log2, AddressOf address_of) {
    for (int i = threadIdx.x; i < COLUMN_TILES * CHANNEL_TILES * 16; i += WARPS * 32) {
        int lane = i % 32, tile = i / 32 * 2 % CHANNEL_TILES, column = i / 16 / CHANNEL_TILES;
        const u16* row = address_of(column * 4 + (lane >> 3));
        u32 raw[4], scaled[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 pair = 0;
            if (row)
                pair = *reinterpret_cast<const u32*>(
                    row + (tile + k / 2) * 16 + k % 2 * 8 + 2 * (lane & 3));
            raw[k] = lane & 4 ? 0 : pair;
            scaled[k] = scaled_query(pair, scale_log2);
        }
        uint4* fragments = query + (column * CHANNEL_TILES + tile) * 32 + lane;
        fragments[0] = make_uint4(raw[0], raw[2], raw[1], raw[3]);
        fragments[32] = make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]);
    }
}

// Rounds q times K's scales to steps of a power of two, for right operands of products. Even
// columns take the rounded numbers, odd columns 16 times the remainder. Returns the step of head t,
// over 16.
__device__ __forceinline__ float quantise_query(
    u32 (&bytes)[CHANNEL_TILES], const u32 (&folded)[CHANNEL_TILES][2], int lane) {
    u32 most = 0;
#pragma unroll
    for (int tile = 0; tile < CHANNEL_TILES; ++tile)
        most = half2_largest(most, half2_largest(folded[tile][0], folded[tile][1]));
    most = half2_largest(most, __shfl_xor_sync(FULL, most, 1));
    most = half2_largest(most, __shfl_xor_sync(FULL, most, 2));
    most = half2_largest(most, prmt(most, most, 0x1032));
    // Slightly enlarged, so that nothing rounds to 128. Steps below 2^-15 would gain nothing.
    u32 exponent = half2_mul(most, 0x3c083c08u) >> 10 & 31;
    u32 power = min(30u, 36u - exponent);
    u32 factor = power * 0x04000400u;
    bool is_odd = lane & 4;
    u32 minus = is_odd ? 0xbc00bc00u : 0, back = is_odd ? 0x66006600u : 0;
    u32 finer = is_odd ? 0x4c004c00u : 0x3c003c00u;
#pragma unroll
    for (int tile = 0; tile < CHANNEL_TILES; ++tile) {
        u32 x[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Adding 1536 in fp16 leaves the rounded integer in the low byte.
            u32 rounded = half2_fma(folded[tile][half], factor, 0x66006600u);
            u32 rest = half2_fma(folded[tile][half], factor, half2_fma(rounded, minus, back));
            x[half] = half2_fma(rest, finer, 0x66006600u);
        }
        bytes[tile] = prmt(x[0], x[1], 0x6240);
    }
    // A number beyond fp16 makes all scores NaN. Lanes from 8 t on have prepared head t.
    float step = exponent == 31 ? __int_as_float(0x7fc00000) : __uint_as_float((138 - power) << 23);
    return __shfl_sync(FULL, step, (lane & 3) * 8);
}

// Computes S^T of a page in units of log2: scores[column][token tile][row g, g + 8].
__device__ __forceinline__ void score_page(
    Scores& scores, const uint4* query, const u8* page, float scale_log2, int lane) {
    int t = lane & 3;
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
        RowProduct offsets[COLUMN_TILES], scales[COLUMN_TILES];
        u32 folded[COLUMN_TILES][CHANNEL_TILES][2], bytes[COLUMN_TILES][CHANNEL_TILES];
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
        float step[COLUMN_TILES], start[COLUMN_TILES];
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            step[column] = quantise_query(bytes[column], folded[column], lane) * unit;
            int total[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < CHANNEL_TILES; k += 2)
                mma_codes(total, {ONES, ONES, ONES, ONES}, bytes[column][k], bytes[column][k + 1]);
            float offset = offsets[column][0] + (LOG4 ? 0.0f : MIDDLE * scales[column][0]);
            start[column] = offset * scale_log2 -
                            joined(total[0], total[1]) * (ZERO * step[column]);
        }
#pragma unroll
        for (int row = 0; row < K_CHUNK_TILES; row += 2) {
            int first = chunk * K_CHUNK_TILES + row;
            int acc[COLUMN_TILES][2][4];
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                for (int i = 0; i < 8; ++i) acc[column][i / 4][i % 4] = 0;
            add_key_products(acc, bytes, page, first, lane);
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int* pair = acc[column][i / 2] + i % 2 * 2;
                    scores[column][first + i / 2][i % 2] =
                        joined(pair[0], pair[1]) * (i % 2 ? step[column] / UPPER : step[column]) +
                        start[column];
                }
        }
    }
}

// Turns scores into probabilities. Rescales sums and output of the state if its maximum grows.
__device__ __forceinline__ void softmax_page(State& state, Scores& scores, int valid, int lane) {
    int g = lane >> 2;
    if (valid < PAGE_SIZE) {
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column)
            for (int i = 0; i < TOKEN_TILES * 2; ++i)
                if (i * 8 + g >= valid) scores[column][i / 2][i % 2] = NEG_INF;
    }
    float top[COLUMN_TILES];
    bool grew = false;
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column) {
        float m = scores[column][0][0];
#pragma unroll
        for (int i = 1; i < TOKEN_TILES * 2; ++i) m = fmaxf(m, scores[column][i / 2][i % 2]);
        top[column] = m;
        grew |= m > state.max[column] + SLACK;
    }
    if (__any_sync(FULL, grew)) {
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            float m = top[column];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) m = fmaxf(m, __shfl_xor_sync(FULL, m, step));
            m = fmaxf(m, state.max[column]);
            float shrink = exp2_approx(state.max[column] - m);
            state.max[column] = m;
            state.sum[column] *= shrink;
            state.zero[column] *= shrink;
            state.shift[column] *= shrink;
#pragma unroll
            for (int i = 0; i < CHANNEL_TILES * 2; ++i) state.out[column][i / 2][i % 2] *= shrink;
        }
    }
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column)
        for (int i = 0; i < TOKEN_TILES * 2; ++i)
            scores[column][i / 2][i % 2] =
                exp2_approx(scores[column][i / 2][i % 2] - state.max[column]);
}

// Rounds the weights of a column tile to steps of a power of two, for right operands of products.
// Returns the step, over 16.
__device__ __forceinline__ float quantise_weights(
    u32 (&bytes)[TOKEN_TILES], const float (&weights)[TOKEN_TILES][2]) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < TOKEN_TILES * 2; ++i) most = fmaxf(most, weights[i / 2][i % 2]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
        most = fmaxf(most, __shfl_xor_sync(FULL, most, step));
    u32 exponent = __float_as_uint(most * 1.0078125f) >> 23;
    u32 power = min(249u, 260u - exponent);
    float factor = __uint_as_float(power << 23);
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
        u32 coarse[2], fine[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float w = weights[tile][half];
            float rounded = __fmaf_rn(w, factor, MAGIC);
            float rest = __fmaf_rn(w, factor, -(rounded - MAGIC));
            coarse[half] = __float_as_uint(rounded);
            fine[half] = __float_as_uint(__fmaf_rn(rest, 16.0f, MAGIC));
        }
        // A lane has tokens g and g + 8 of both columns. Transposed, it has tokens 2t, 2t+8, 2t+1
        // and 2t+9 of column g.
        u32 pair = prmt(prmt(coarse[0], coarse[1], 0x0040), prmt(fine[0], fine[1], 0x0040), 0x5410);
        bytes[tile] = transposed(pair);
    }
    return __uint_as_float((250 - power) << 23);
}

__device__ __forceinline__ void weigh_page(
    State& state, Scores& scores, const u8* page, int base, int lane) {
    int g = lane >> 2;
    u32 bytes[COLUMN_TILES][TOKEN_TILES];
    float step[COLUMN_TILES];
#if !LOG4
    // Per token: scale and zero of tokens g and g + 8 of each tile.
#pragma unroll
    for (int row = 0; row < TOKEN_TILES; row += 2) {
        int at = (g * TOKEN_TILES + row) * 4;
        Words<2> scale = load_shared<2>(page + V_META + at);
        Words<2> zero = load_shared<2>(page + V_META2 + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float s = i % 2 ? high_bf16(scale.w[i / 2]) : low_bf16(scale.w[i / 2]);
            float z = i % 2 ? high_bf16(zero.w[i / 2]) : low_bf16(zero.w[i / 2]);
            float offset = z + MIDDLE * s;
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column) {
                float* p = &scores[column][row + i / 2][i % 2];
                state.sum[column] += *p;
                state.zero[column] += *p * offset;
                *p *= s;
            }
        }
    }
#endif
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column)
        step[column] = quantise_weights(bytes[column], scores[column]);
#pragma unroll
    for (int chunk = 0; chunk < V_ROWS; ++chunk) {
        constexpr int VECTOR = vector_of(V_CHUNK_STEPS * STEP_WORDS);
        float total[COLUMN_TILES];
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            int acc[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < V_CHUNK_TILES; k += 2) {
                const u32* b = bytes[column] + chunk * V_CHUNK_TILES + k;
                mma_codes(acc, {ONES, ONES, ONES, ONES}, b[0], b[1]);
            }
            total[column] = joined(acc[0], acc[1]);
#if LOG4
            state.sum[column] += total[column] * step[column];
#else
            state.shift[column] -= total[column] * (step[column] * (UNIT * ZERO));
#endif
        }
#pragma unroll
        for (int tile = 0; tile < CHANNEL_TILES; tile += 2) {
            int acc[COLUMN_TILES][2][4];
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                for (int i = 0; i < 8; ++i) acc[column][i / 4][i % 4] = 0;
#pragma unroll
            for (int at = 0; at < V_CHUNK_STEPS * STEP_WORDS; at += VECTOR) {
                Words<VECTOR> word[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    int row = ((tile + k) * TOKEN_STEPS + chunk * V_CHUNK_STEPS) * STEP_WORDS;
                    word[k] = load_codes<VECTOR>(page + V_CODES, row + at, lane);
                }
#pragma unroll
                for (int i = 0; i < VECTOR; i += STEP_WORDS)
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        u32 a[4];
                        unpack(word[k].w + i, a);
#pragma unroll
                        for (int column = 0; column < COLUMN_TILES; ++column) {
                            const u32* b = bytes[column] + chunk * V_CHUNK_TILES +
                                           (at + i) / STEP_WORDS * 2;
                            mma_codes(acc[column][k], a, b[0], b[1]);
                        }
                    }
            }
#if LOG4
            // Per channel: scale and centre of rows g and g + 8 of two tiles.
            int at = chunk * HEAD_DIM + (g * CHANNEL_TILES + tile) * 2;
            Words<2> centre = load_shared<2>(page + V_META + at * 2);
            u32 offsets = load_shared<1>(page + V_META2 + at).w[0];
#endif
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#if LOG4
                u32 offset = offsets >> (8 * i) & 0xffu;
                float scale = __uint_as_float((offset + (u32)base) << 19) * UNIT;
                float middle = i % 2 ? high_bf16(centre.w[i / 2]) : low_bf16(centre.w[i / 2]);
#endif
#pragma unroll
                for (int column = 0; column < COLUMN_TILES; ++column) {
                    const int* pair = acc[column][i / 2] + i % 2 * 2;
                    float x = joined(pair[0], pair[1]);
                    if (LOG4 && i % 2) x /= UPPER;
                    float* out = &state.out[column][tile + i / 2][i % 2];
#if LOG4
                    *out += ((x - ZERO * total[column]) * scale + total[column] * middle) * step[column];
#else
                    *out += x * (i % 2 ? step[column] * (UNIT / UPPER) : step[column] * UNIT);
#endif
                }
            }
        }
    }
}

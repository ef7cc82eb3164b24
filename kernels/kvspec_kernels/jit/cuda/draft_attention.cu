// Decode attention over anchor pages, for Hopper: codes go from memory to matrix registers without
// a shuffle. Blocks share the pages of all requests and KV heads equally, whatever the lengths; of a
// request that was cut, the block that ends last merges the parts. The warps of a block take pages
// in turn; bulk copies fill a ring of each warp ahead of it, K and V apart.
//
// Per page and warp: S^T = K Q^T and O^T += V^T P^T with mma.m16n8k16, where K and V^T are the left
// operands, unpacked in registers, and the 8 columns are the query heads of one KV head.
//   log4:     K = centre + scale L[code]: scale is folded into Q, q . centre is a matrix product of
//             its own; V = centre + scale L[code] per channel: folded in once a page.
//   uniform4: K = (u - 8) s + (z + 8 s) likewise; V so per token: s is folded into P, and the sum of
//             P (z + 8 s) kept apart.
//
// Compiled by jit/nvrtc.py, which defines: HEAD_DIM PAGE_SIZE GROUP HEAD_SPLIT K_ROWS V_ROWS LOG4
// Q_BF16 WARPS HALVES BLOCKS K_BYTES V_BYTES RECORD_BYTES TOP.

#include "hopper.cuh"

constexpr int CHANNEL_TILES = HEAD_DIM / 16;
constexpr int TOKEN_TILES = PAGE_SIZE / 16;
constexpr int K_CHUNK_TILES = TOKEN_TILES / K_ROWS;
constexpr int V_CHUNK_TILES = TOKEN_TILES / V_ROWS;
constexpr int COLUMN_TILES = (GROUP + 7) / 8;
constexpr int THREADS = WARPS * 32;
constexpr int HALF_BYTES = K_BYTES > V_BYTES ? K_BYTES : V_BYTES;
constexpr int QUERY_BYTES = COLUMN_TILES * CHANNEL_TILES * 512;
// A score may exceed the running maximum by this, in log2, before that moves: fewer rescalings.
constexpr float SLACK = 6.0f;
#if LOG4
// Of the denormals that codes become, in units of the scale.
constexpr float LEVEL_UNIT = 16777216.0f / TOP;
#endif

// Byte offsets within a record, from formats.py.
constexpr int CODE_BYTES = PAGE_SIZE * HEAD_DIM / 2;
constexpr int K_CODES = LOG4 ? 16 : 0;
constexpr int K_META = K_CODES + CODE_BYTES;
constexpr int K_META2 = K_META + K_ROWS * HEAD_DIM * 2;  // log4: scales (u8); uniform4: zeros (bf16)
constexpr int V_CODES = 0;  // within the V part
constexpr int V_META = CODE_BYTES;
constexpr int V_META2 = V_META + (LOG4 ? V_ROWS * HEAD_DIM * 2 : PAGE_SIZE * 2);

// The 8 codes of a word as the left operand of one 16 x 16 tile.
__device__ __forceinline__ void unpack(u32 word, u32 (&a)[4]) {
#if LOG4
    // Sign, 16 m and 1: the fp16 denormals (16 m + 1) * 2^-24.
    u32 rotated = prmt(word, word, 0x2103);
    a[0] = and_or(word, 0x80708070u, 0x00010001u);
    a[1] = and_or(word << 4, 0x80708070u, 0x00010001u);
    a[2] = and_or(rotated, 0x80708070u, 0x00010001u);
    a[3] = and_or(rotated << 4, 0x80708070u, 0x00010001u);
#else
    // Codes minus 8, so that roundings of what they are weighed with cancel. 0x6400 is 1024 in
    // fp16: a nibble in the low mantissa bits adds its value, one in the next four bits 16 times it.
    u32 upper = word >> 8;
    a[0] = half2_add(and_or(word, 0x000f000fu, 0x64006400u), 0xe408e408u);
    a[1] = half2_fma(and_or(word, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u);
    a[2] = half2_add(and_or(upper, 0x000f000fu, 0x64006400u), 0xe408e408u);
    a[3] = half2_fma(and_or(upper, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u);
#endif
}

// State of one warp over the pages of one request and KV head.
struct State {
    float out[COLUMN_TILES][CHANNEL_TILES][4];
    float max[COLUMN_TILES][2];
    float sum[COLUMN_TILES][2];
    float zero[COLUMN_TILES][2];
};

// Query fragments in shared memory, for each column tile, channel tile and lane: as they are,
// then fp16 times sm_scale * log2(e).
__device__ __forceinline__ void load_query(
    uint4* query, const u16* q, i64 head_stride, float scale_log2) {
    for (int i = threadIdx.x; i < COLUMN_TILES * CHANNEL_TILES * 32; i += THREADS) {
        int lane = i % 32, tile = i / 32 % CHANNEL_TILES, column = i / 32 / CHANNEL_TILES;
        int row = column * 8 + (lane >> 2);
        u32 raw[2], scaled[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 pair = 0;
            if (row < GROUP)
                pair = *reinterpret_cast<const u32*>(
                    q + row * head_stride + tile * 16 + half * 8 + 2 * (lane & 3));
            raw[half] = pair;
#if Q_BF16
            float low = low_bf16(pair), high = high_bf16(pair);
#else
            float low = half_to_float((u16)pair), high = half_to_float((u16)(pair >> 16));
#endif
            scaled[half] = to_half2(low * scale_log2, high * scale_log2);
        }
        query[i] = make_uint4(raw[0], raw[1], scaled[0], scaled[1]);
    }
}

// S^T of a page, in units of log2: scores[column][token tile][row g, g+8 x column 2t, 2t+1].
__device__ __forceinline__ void score_page(
    float (&scores)[COLUMN_TILES][TOKEN_TILES][4], const uint4* query, const u8* page,
    float scale_log2, int lane) {
    int t = lane & 3;
    constexpr int VECTOR = CHANNEL_TILES % 4 == 0 ? 4 : 2;
#if LOG4
    int base = *reinterpret_cast<const short*>(page);
    u32 bias = (u32)(16 + (base & 15)) * 0x00400040u;
    float factor = __uint_as_float((u32)((base >> 4) + 14) << 23) * LEVEL_UNIT;
#endif
#pragma unroll
    for (int chunk = 0; chunk < K_ROWS; ++chunk) {
        float shift[COLUMN_TILES][4];
        u32 folded[COLUMN_TILES][CHANNEL_TILES][2];
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column)
            for (int i = 0; i < 4; ++i) shift[column][i] = 0.0f;
#pragma unroll
        for (int tile = 0; tile < CHANNEL_TILES; tile += 2) {
            // log4: centre, else zero | log4: nothing, else scale (bf16).
            int at = (chunk * HEAD_DIM + t * (HEAD_DIM / 4) + tile * 4);
            Words<4> offset = load_shared<4>(page + (LOG4 ? K_META : K_META2) + at * 2);
#if LOG4
            Words<2> scale = load_shared<2>(page + K_META2 + at);
#else
            Words<4> scale = load_shared<4>(page + K_META + at * 2);
#endif
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#if LOG4
                u32 low = prmt(scale.w[i], 0, 0x4140) * 64u + bias;
                u32 high = prmt(scale.w[i], 0, 0x4342) * 64u + bias;
#else
                u32 low = to_half2(low_bf16(scale.w[2 * i]), high_bf16(scale.w[2 * i]));
                u32 high = to_half2(low_bf16(scale.w[2 * i + 1]), high_bf16(scale.w[2 * i + 1]));
#endif
#pragma unroll
                for (int column = 0; column < COLUMN_TILES; ++column) {
                    uint4 b = query[(column * CHANNEL_TILES + tile + i) * 32 + lane];
                    mma_row(shift[column], offset.w[2 * i], offset.w[2 * i + 1], b.x, b.y);
#if !LOG4
                    mma_row(shift[column], times_8(scale.w[2 * i]), times_8(scale.w[2 * i + 1]),
                            b.x, b.y);
#endif
                    folded[column][tile + i][0] = half2_mul(low, b.z);
                    folded[column][tile + i][1] = half2_mul(high, b.w);
                }
            }
        }
#pragma unroll
        for (int row = 0; row < K_CHUNK_TILES; row += 2) {
            int first = chunk * K_CHUNK_TILES + row;
#pragma unroll
            for (int column = 0; column < COLUMN_TILES; ++column)
                for (int i = 0; i < 4; ++i) {
                    float start = LOG4 ? 0.0f : shift[column][i] * scale_log2;
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
                    float start = shift[column][i] * scale_log2;
                    scores[column][first][i] = scores[column][first][i] * factor + start;
                    scores[column][first + 1][i] = scores[column][first + 1][i] * factor + start;
                }
#endif
        }
    }
}

// Turns scores into probabilities and keeps maximum, sum and output of the state in step.
__device__ __forceinline__ void softmax_page(
    State& state, float (&scores)[COLUMN_TILES][TOKEN_TILES][4], int valid, int lane) {
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

// Zeroes V's scales and zeros of tokens that are not there: they may be NaN.
__device__ __forceinline__ void clear_tokens(u8* page, int valid, int lane) {
    for (int i = valid + lane; i < PAGE_SIZE; i += 32) {
        int at = (i % 8 * TOKEN_TILES + i / 16) * 4 + i / 8 % 2 * 2;
        *reinterpret_cast<u16*>(page + V_META + at) = 0;
        *reinterpret_cast<u16*>(page + V_META2 + at) = 0;
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncwarp();
}

__device__ __forceinline__ void weigh_page(
    State& state, float (&scores)[COLUMN_TILES][TOKEN_TILES][4], const u8* page, int base, int lane) {
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
        // Sums of the rounded probabilities, which the centres are weighed with.
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

// Blocks that share the work: each has a page for every warp.
__device__ __forceinline__ int active_workers(i64 total, int workers) {
    i64 most = (total + WARPS - 1) / WARPS;
    return most < workers ? (int)most : workers;
}

// Combines the parts of a request that several blocks shared. Parts: [GROUP][HEAD_DIM] sums of
// weighed V, and (max, sum) for each head.
__device__ __forceinline__ void merge_parts(
    float* scratch, const float* partial_out, const float* partial_stat, int first, int last,
    int first_slot, i64 row, void* out, float* lse) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // A warp has one head of up to WARPS at a time, or shares it with others if there are fewer.
    constexpr int SHARES = GROUP >= WARPS ? 1 : WARPS / GROUP;
    float* sums = scratch;                   // [SHARES][GROUP]
    float* tops = sums + SHARES * GROUP;     // [GROUP]
    float* outs = tops + GROUP;              // [SHARES][GROUP][HEAD_DIM]
    auto part_of = [&](int worker) {
        return (i64)(2 * worker + (worker == first ? first_slot : 0)) * GROUP;
    };
    int share = warp / GROUP;
    for (int h = warp % GROUP; h < GROUP && share < SHARES; h += WARPS) {
        float top = NEG_INF;
        for (int w = first + lane; w <= last; w += 32)
            top = fmaxf(top, __ldcg(partial_stat + (part_of(w) + h) * 2));
        for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, step));
        float sum = 0.0f, x[HEAD_DIM / 32];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i) x[i] = 0.0f;
#pragma unroll 8
        for (int w = first + share; w <= last; w += SHARES) {
            i64 part = part_of(w) + h;
            float weight = exp2_approx(__ldcg(partial_stat + part * 2) - top);
            sum += weight * __ldcg(partial_stat + part * 2 + 1);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 32; ++i)
                x[i] += weight * __ldcg(partial_out + part * HEAD_DIM + i * 32 + lane);
        }
        if (lane == 0) {
            sums[share * GROUP + h] = sum;
            tops[h] = top;
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i)
            outs[(share * GROUP + h) * HEAD_DIM + i * 32 + lane] = x[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        int h = i / HEAD_DIM;
        float sum = 0.0f, x = 0.0f;
#pragma unroll
        for (int w = 0; w < SHARES; ++w) {
            sum += sums[w * GROUP + h];
            x += outs[w * GROUP * HEAD_DIM + i];
        }
        store_output(out, row * HEAD_DIM + i, x / sum);
        if (i % HEAD_DIM == 0) lse[row + h] = tops[h] + log2f(sum);
    }
}

// A KV head with more query heads than fit is met HEAD_SPLIT times; num_kv_heads counts each time.
// q, out: [batch, num_kv_heads * GROUP, HEAD_DIM]; lse: [batch, num_kv_heads * GROUP], base 2.
// partial_out: [2 * grid, GROUP, HEAD_DIM], partial_stat: [2 * grid, GROUP, 2] (max, sum).
// arrived: [batch * num_kv_heads], zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) draft_attention(
    const u16* __restrict__ q, i64 q_stride, i64 q_head_stride, const u8* __restrict__ anchors,
    i64 page_stride, const int* __restrict__ indptr, const int* __restrict__ indices,
    const int* __restrict__ last_page_len, int batch, int num_kv_heads, float scale_log2,
    float* __restrict__ partial_out, float* __restrict__ partial_stat, int* __restrict__ arrived,
    void* __restrict__ out, float* __restrict__ lse) {
    extern __shared__ __align__(128) u8 memory[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int g = lane >> 2, t = lane & 3;
    uint4* query = reinterpret_cast<uint4*>(memory);
    u8* scratch = memory + QUERY_BYTES;  // the rings, between requests
    u8* ring = scratch + warp * HALVES * HALF_BYTES;
    u32 barrier = shared_address(scratch + WARPS * HALVES * HALF_BYTES) + warp * HALVES * 8;
    int* is_last = reinterpret_cast<int*>(scratch + WARPS * HALVES * (HALF_BYTES + 8));
    if (lane == 0) {
        for (int i = 0; i < HALVES; ++i) barrier_init(barrier + 8 * i);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncwarp();

    i64 total = (i64)indptr[batch] * num_kv_heads;
    int workers = active_workers(total, gridDim.x);
    int worker = blockIdx.x;
    i64 begin = 0, end = 0;
    if (worker < workers) {
        begin = first_unit(total, worker, workers);
        end = first_unit(total, worker + 1, workers);
    }
    u32 sequence = 0;  // parts, K or V, this warp has consumed
    bool is_first = true;

    while (begin < end) {
        int b = request_of(indptr, batch, (int)(begin / num_kv_heads));
        int first_index = indptr[b], num_pages = indptr[b + 1] - first_index;
        i64 within = begin - (i64)first_index * num_kv_heads;
        int head = (int)(within / num_pages), page = (int)(within % num_pages);
        int count = (int)min((i64)(num_pages - page), end - begin);
        const int* pages = indices + first_index + page;
        int tail = page + count == num_pages ? last_page_len[b] : PAGE_SIZE;
        const u8* records = anchors + (i64)(head / HEAD_SPLIT) * RECORD_BYTES;
        // The n-th part of this request that the warp reads: K or V of a page.
        auto fetch_part = [&](int n, int id) {
            u32 slot = (sequence + n) % HALVES;
            if (lane == 0) {
                expect(barrier + 8 * slot, n & 1 ? V_BYTES : K_BYTES);
                copy_bulk(shared_address(ring) + slot * HALF_BYTES,
                          records + id * page_stride + (n & 1 ? K_BYTES : 0),
                          n & 1 ? V_BYTES : K_BYTES, barrier + 8 * slot);
            }
        };
        auto page_of = [&](int n) { return warp + (n >> 1) * WARPS; };
#pragma unroll
        for (int n = 0; n < HALVES; ++n)
            if (page_of(n) < count) fetch_part(n, pages[page_of(n)]);
        load_query(query, q + b * q_stride + (i64)head * GROUP * q_head_stride, q_head_stride,
                   scale_log2);
        __syncthreads();
        State state;
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column) {
            for (int j = 0; j < 2; ++j) {
                state.max[column][j] = NEG_INF;
                state.sum[column][j] = 0.0f;
                state.zero[column][j] = 0.0f;
            }
            for (int i = 0; i < CHANNEL_TILES * 4; ++i) state.out[column][i / 4][i % 4] = 0.0f;
        }
        int n = 0;
#pragma unroll 1
        for (int i = warp; i < count; i += WARPS, n += 2) {
            int next[2] = {pages[min(page_of(n + HALVES), count - 1)],
                           pages[min(page_of(n + 1 + HALVES), count - 1)]};
            const u8* part = ring + (sequence + n) % HALVES * HALF_BYTES;
            float scores[COLUMN_TILES][TOKEN_TILES][4];
            barrier_wait(barrier + (sequence + n) % HALVES * 8, (sequence + n) / HALVES & 1);
#if LOG4
            int v_base = *reinterpret_cast<const short*>(part + 2);
#else
            int v_base = 0;
#endif
            score_page(scores, query, part, scale_log2, lane);
            __syncwarp();
            if (page_of(n + HALVES) < count) fetch_part(n + HALVES, next[0]);
            softmax_page(state, scores, i + 1 == count ? tail : PAGE_SIZE, lane);
            part = ring + (sequence + n + 1) % HALVES * HALF_BYTES;
            barrier_wait(barrier + (sequence + n + 1) % HALVES * 8, (sequence + n + 1) / HALVES & 1);
            if (!LOG4 && i + 1 == count && tail < PAGE_SIZE)
                clear_tokens(ring + (sequence + n + 1) % HALVES * HALF_BYTES, tail, lane);
            weigh_page(state, scores, part, v_base, lane);
            __syncwarp();
            if (page_of(n + 1 + HALVES) < count) fetch_part(n + 1 + HALVES, next[1]);
        }
        sequence += n;

        // The warps' states become the block's: the rings are empty now and serve as scratch.
        float* tops = reinterpret_cast<float*>(scratch);  // [WARPS][GROUP]
        float* sums = tops + WARPS * GROUP;            // [WARPS][GROUP]
        float* outs = sums + WARPS * GROUP;            // [WARPS][GROUP][HEAD_DIM]
        __syncthreads();
#pragma unroll
        for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float sum = state.sum[column][j], zero = state.zero[column][j];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) {
                    // log4's sums came out of a matrix product: every row has the same.
                    if (!LOG4) sum += __shfl_xor_sync(FULL, sum, step);
                    zero += __shfl_xor_sync(FULL, zero, step);
                }
                int in_group = column * 8 + 2 * t + j;
                if (in_group >= GROUP) continue;
                int at = warp * GROUP + in_group;
                if (g == 0) {
                    tops[at] = state.max[column][j];
                    sums[at] = sum;
                }
#pragma unroll
                for (int tile = 0; tile < CHANNEL_TILES; ++tile)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        outs[at * HEAD_DIM + tile * 16 + half * 8 + g] =
                            state.out[column][tile][2 * half + j] + zero;
            }
        __syncthreads();
        bool whole = count == num_pages;
        i64 row = ((i64)b * num_kv_heads + head) * GROUP;
        i64 part = (2 * (i64)worker + (is_first ? 0 : 1)) * GROUP;
        for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
            int h = i / HEAD_DIM;
            float top = tops[h], sum = 0.0f, x = 0.0f;
#pragma unroll
            for (int w = 1; w < WARPS; ++w) top = fmaxf(top, tops[w * GROUP + h]);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                float weight = exp2_approx(tops[w * GROUP + h] - top);
                sum += weight * sums[w * GROUP + h];
                x += weight * outs[w * GROUP * HEAD_DIM + i];
            }
            if (whole) {
                store_output(out, row * HEAD_DIM + i, x / sum);
                if (i % HEAD_DIM == 0) lse[row + h] = top + log2f(sum);
            } else {
                __stcg(partial_out + part * HEAD_DIM + i, x);
                if (i % HEAD_DIM == 0) {
                    __stcg(partial_stat + (part + h) * 2, top);
                    __stcg(partial_stat + (part + h) * 2 + 1, sum);
                }
            }
        }
        if (!whole) {
            i64 first_page = (i64)first_index * num_kv_heads + (i64)head * num_pages;
            int first = worker_of(first_page, total, workers);
            int last = worker_of(first_page + num_pages - 1, total, workers);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                int* counter = arrived + b * num_kv_heads + head;
                *is_last = atomicAdd(counter, 1) == last - first;
                if (*is_last) *counter = 0;
            }
            __syncthreads();
            if (*is_last) {
                __threadfence();
                int first_slot = first_unit(total, first, workers) < first_page ? 1 : 0;
                merge_parts(tops, partial_out, partial_stat, first, last, first_slot, row, out, lse);
            }
        }
        begin += count;
        is_first = false;
        // Ordinary writes to the ring come before the next bulk copies into it.
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();
    }

    // Requests without pages belong to no block's share.
    for (int b = blockIdx.x; b < batch; b += gridDim.x)
        if (indptr[b] == indptr[b + 1]) {
            i64 row = (i64)b * num_kv_heads * GROUP;
            for (int i = threadIdx.x; i < num_kv_heads * GROUP * HEAD_DIM; i += THREADS)
                store_output(out, row * HEAD_DIM + i, 0.0f);
            for (int i = threadIdx.x; i < num_kv_heads * GROUP; i += THREADS) lse[row + i] = NEG_INF;
        }
}

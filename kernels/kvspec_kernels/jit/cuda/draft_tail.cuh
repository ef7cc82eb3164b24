// Attention over a request's newest tokens, in full precision. The tokens are few, so separate
// blocks do it in plain arithmetic. These blocks start when the first blocks with pages have ended,
// which costs less than another kernel. Needs the defines HEAD_DIM PAGE_SIZE GROUP HEAD_SPLIT ROWS
// QUERY_HEADS WARPS TAIL_HEADS Q_BF16.
#pragma once
#include "draft_rows.cuh"
#include "tail.cuh"
#include "warp_states.cuh"

// A lane has every 32nd channel of TAIL_HEADS query rows at a time, as many as registers allow.
constexpr int LANE_CHANNELS = HEAD_DIM / 32;
// Blocks of a KV head.
constexpr int TAIL_PARTS = (GROUP + TAIL_HEADS - 1) / TAIL_HEADS;
// Tokens whose loads are in flight at a time.
constexpr int TAIL_TOKENS = 4;

// Loads tokens[i][j]: channel lane + 32 j of token first + i, or of the last of `count` tokens.
// memory: start of a KV head in page 0, token 0.
__device__ __forceinline__ void load_tokens(
    float (&tokens)[TAIL_TOKENS][LANE_CHANNELS], const u16* memory, i64 page_stride,
    i64 token_stride, const int* pages, int first, int count, int lane) {
#pragma unroll
    for (int i = 0; i < TAIL_TOKENS; ++i) {
        int token = min(first + i, count - 1);
        const u16* row = memory + pages[token / PAGE_SIZE] * page_stride +
                         token % PAGE_SIZE * token_stride + lane;
#pragma unroll
        for (int j = 0; j < LANE_CHANNELS; ++j) tokens[i][j] = value_of(row[32 * j]);
    }
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(FULL, x, step);
    return x;
}

// Attends to one request's tail with query rows part * TAIL_HEADS .. of one KV head, which is read
// HEAD_SPLIT times. index: number of the block among the tail's blocks. q, num_kv_heads: as in
// draft_attention. scratch: shared memory. Writes rows of out and lse, 0 and -inf where a
// row sees no token of the tail.
__device__ __forceinline__ void attend_to_tail(
    int index, const u16* q, i64 q_stride, i64 q_head_stride, const Tail& tail, int num_kv_heads,
    float scale_log2, u8* scratch, void* out, float* lse) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int part = index % TAIL_PARTS, head = index / TAIL_PARTS % num_kv_heads;
    int b = index / TAIL_PARTS / num_kv_heads;
    int first_head = part * TAIL_HEADS, kv_head = head / HEAD_SPLIT;
    int count = tail.lens[b];
    const int* pages = tail.indices + tail.indptr[b];
    const u16* k = tail.k + kv_head * tail.k_head;
    const u16* v = tail.v + kv_head * tail.v_head;
    const QueryRows own(q, q_stride, q_head_stride, b, head, lane);
    float query[TAIL_HEADS][LANE_CHANNELS], weighed[TAIL_HEADS][LANE_CHANNELS];
    float top[TAIL_HEADS], sum[TAIL_HEADS];
    int seen[TAIL_HEADS];
#pragma unroll
    for (int h = 0; h < TAIL_HEADS; ++h) {
        // Past the group's last row, the last row is computed again and ignored.
        int in_group = min(first_head + h, GROUP - 1);
        const u16* row = own[in_group];
        seen[h] = ROWS == 1 ? count : num_seen(count, head, in_group);
        top[h] = NEG_INF;
        sum[h] = 0.0f;
#pragma unroll
        for (int j = 0; j < LANE_CHANNELS; ++j) {
            query[h][j] = value_of(row[32 * j]) * scale_log2;
            weighed[h][j] = 0.0f;
        }
    }
#pragma unroll 1
    for (int first = warp * TAIL_TOKENS; first < count; first += WARPS * TAIL_TOKENS) {
        float keys[TAIL_TOKENS][LANE_CHANNELS], values[TAIL_TOKENS][LANE_CHANNELS];
        load_tokens(keys, k, tail.k_page, tail.k_token, pages, first, count, lane);
        load_tokens(values, v, tail.v_page, tail.v_token, pages, first, count, lane);
#pragma unroll
        for (int h = 0; h < TAIL_HEADS; ++h) {
            float score[TAIL_TOKENS], before = top[h];
#pragma unroll
            for (int i = 0; i < TAIL_TOKENS; ++i) {
                float x = 0.0f;
#pragma unroll
                for (int j = 0; j < LANE_CHANNELS; ++j) x += query[h][j] * keys[i][j];
                x = sum_of_warp(x);
                score[i] = first + i < seen[h] ? x : NEG_INF;
                top[h] = fmaxf(top[h], score[i]);
            }
            // Of several rows, some may have seen no token yet; -inf minus -inf would be NaN.
            float base = ROWS > 1 && top[h] == NEG_INF ? 0.0f : top[h];
            float shrink = exp2_approx(before - base);
            sum[h] *= shrink;
#pragma unroll
            for (int j = 0; j < LANE_CHANNELS; ++j) weighed[h][j] *= shrink;
#pragma unroll
            for (int i = 0; i < TAIL_TOKENS; ++i) {
                float weight = exp2_approx(score[i] - base);
                sum[h] += weight;
#pragma unroll
                for (int j = 0; j < LANE_CHANNELS; ++j) weighed[h][j] += weight * values[i][j];
            }
        }
    }
    WarpStates<TAIL_HEADS> states(scratch);
#pragma unroll
    for (int h = 0; h < TAIL_HEADS; ++h) {
        int at = warp * TAIL_HEADS + h;
        if (lane == 0) {
            states.tops[at] = top[h];
            states.sums[at] = sum[h];
        }
#pragma unroll
        for (int j = 0; j < LANE_CHANNELS; ++j)
            states.outs[at * HEAD_DIM + lane + 32 * j] = weighed[h][j];
    }
    __syncthreads();
    i64 row = ((i64)b * num_kv_heads + head) * GROUP + first_head;
    states.join([&](int h, int channel, float top, float sum, float x) {
        if (first_head + h >= GROUP) return;
        store_output(out, (row + h) * HEAD_DIM + channel, sum > 0.0f ? x / sum : 0.0f);
        if (channel == 0) lse[row + h] = top + log2f(sum);
    });
}

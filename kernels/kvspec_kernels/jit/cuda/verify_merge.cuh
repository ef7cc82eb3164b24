// Which queries a block attends for, and the merge of a request's parts that blocks left behind.
// Needs the defines HEAD_DIM GROUP COLUMNS and Q_BF16.
#pragma once
#include "hopper.cuh"

constexpr int COLS = COLUMNS * 8;

struct Segment {
    int b, head, block, first_query, num_queries, num_columns;  // of this column block
};

__device__ __forceinline__ i64 out_row(const Segment& s, int column, int num_kv_heads) {
    int global = s.block * COLS + column;
    return (i64)(s.first_query + global / GROUP) * num_kv_heads * GROUP + s.head * GROUP +
           global % GROUP;
}

template <int WARPS>
__device__ __forceinline__ void merge_parts(
    const float* partial_out, const float* partial_stat, int first, int last, int first_slot,
    const Segment& segment, int num_kv_heads, void* out, float* lse) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto part_of = [&](int worker) {
        return (i64)(2 * worker + (worker == first ? first_slot : 0)) * COLS;
    };
    for (int c = warp; c < segment.num_columns; c += WARPS) {
        float top = NEG_INF;
        for (int w = first + lane; w <= last; w += 32)
            top = fmaxf(top, __ldcg(partial_stat + (part_of(w) + c) * 2));
        for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, step));
        float sum = 0.0f, x[HEAD_DIM / 32];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i) x[i] = 0.0f;
#pragma unroll 4
        for (int w = first; w <= last; ++w) {
            i64 part = part_of(w) + c;
            float weight = exp2_approx(__ldcg(partial_stat + part * 2) - top);
            sum += weight * __ldcg(partial_stat + part * 2 + 1);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 32; ++i)
                x[i] += weight * __ldcg(partial_out + part * HEAD_DIM + i * 32 + lane);
        }
        i64 row = out_row(segment, c, num_kv_heads);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i)
            store_output(out, row * HEAD_DIM + i * 32 + lane, x[i] / sum);
        if (lane == 0) lse[row] = top + log2f(sum);
    }
}

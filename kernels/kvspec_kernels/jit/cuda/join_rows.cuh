// Joins the parts of a query row that workers wrote. The warps of a block share them. Needs the
// defines HEAD_DIM JOIN_WARPS PARTS_AT_ONCE and Q_BF16.
#pragma once
#include "hopper.cuh"

constexpr int JOIN_THREADS = 32 * JOIN_WARPS;
// Vectors of 4 channels that a lane takes of each part.
constexpr int VECTORS = HEAD_DIM > 128 ? HEAD_DIM / 128 : 1;

// A further state to join with a row: the output of other tokens, shaped like out, and their lse.
// Null pointers mean no such state.
struct OtherState {
    const u16* out;
    const float* lse;

    __device__ __forceinline__ float lse_of(i64 index) const { return out ? lse[index] : NEG_INF; }

    __device__ __forceinline__ float value(i64 at) const {
        return out ? value_of(out[at]) : 0.0f;
    }
};

// Writes row `place` of out [rows, HEAD_DIM] and lse [rows]. Joins rows row_of(worker) of
// partial_out [.., HEAD_DIM] and partial_stat [.., 2] (max, sum) for workers first .. last, if any,
// and row `index` of two further states. A row without any tokens becomes 0 and -inf.
template <class RowOf>
__device__ __forceinline__ void join_row(
    const float* partial_out, const float* partial_stat, int first, int last, RowOf row_of,
    OtherState one, OtherState other, i64 index, i64 place, void* out, float* lse) {
    // Aligned, because four values are written at a time.
    __shared__ __align__(16) float outs[JOIN_WARPS][HEAD_DIM];
    __shared__ float tops[JOIN_WARPS], sums[JOIN_WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float top = NEG_INF, sum = 0.0f;
    float4 x[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) x[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    bool has_channels = lane * 4 < HEAD_DIM;
#pragma unroll 1
    for (int w = first + warp; w <= last; w += JOIN_WARPS * PARTS_AT_ONCE) {
        float2 stat[PARTS_AT_ONCE];
        float4 y[PARTS_AT_ONCE][VECTORS];
#pragma unroll
        for (int k = 0; k < PARTS_AT_ONCE; ++k) {
            // Past the last part, the last part is read again and ignored.
            i64 row = row_of(min(w + k * JOIN_WARPS, last));
            stat[k] = __ldcg(reinterpret_cast<const float2*>(partial_stat) + row);
            if (w + k * JOIN_WARPS > last) stat[k].x = NEG_INF;
            const float4* vectors = reinterpret_cast<const float4*>(partial_out + row * HEAD_DIM);
#pragma unroll
            for (int v = 0; v < VECTORS; ++v)
                y[k][v] = __ldcg(vectors + v * 32 + (has_channels ? lane : 0));
        }
        float before = top;
#pragma unroll
        for (int k = 0; k < PARTS_AT_ONCE; ++k) top = fmaxf(top, stat[k].x);
        // A query may have seen no token yet; -inf minus -inf would be NaN.
        float base = top == NEG_INF ? 0.0f : top, shrink = exp2_approx(before - base);
        sum *= shrink;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            x[v] = make_float4(x[v].x * shrink, x[v].y * shrink, x[v].z * shrink, x[v].w * shrink);
#pragma unroll
        for (int k = 0; k < PARTS_AT_ONCE; ++k) {
            float share = exp2_approx(stat[k].x - base);
            sum += share * stat[k].y;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                x[v].x += share * y[k][v].x;
                x[v].y += share * y[k][v].y;
                x[v].z += share * y[k][v].z;
                x[v].w += share * y[k][v].w;
            }
        }
    }
    if (has_channels)
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            *reinterpret_cast<float4*>(&outs[warp][(v * 32 + lane) * 4]) = x[v];
    if (lane == 0) {
        tops[warp] = top;
        sums[warp] = sum;
    }
    __syncthreads();
    float one_lse = one.lse_of(index), other_lse = other.lse_of(index);
    float highest = fmaxf(one_lse, other_lse);
#pragma unroll
    for (int w = 0; w < JOIN_WARPS; ++w) highest = fmaxf(highest, tops[w]);
    highest = highest == NEG_INF ? 0.0f : highest;
    float one_share = exp2_approx(one_lse - highest);
    float other_share = exp2_approx(other_lse - highest);
#pragma unroll 1
    for (int i = threadIdx.x; i < HEAD_DIM; i += JOIN_THREADS) {
        float all = one_share + other_share;
        float value = one_share * one.value(index * HEAD_DIM + i) +
                      other_share * other.value(index * HEAD_DIM + i);
#pragma unroll
        for (int w = 0; w < JOIN_WARPS; ++w) {
            float share = exp2_approx(tops[w] - highest);
            all += share * sums[w];
            value += share * outs[w][i];
        }
        store_output(out, place * HEAD_DIM + i, all > 0.0f ? value / all : 0.0f);
        if (i == 0) lse[place] = highest + log2f(all);
    }
}

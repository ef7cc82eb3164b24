// Joins what blocks of verify_attention.cu left of a query, where these are so many that the last of
// them would be long about it: a block for each query row, whose warps share the parts.
//
// Compiled by jit/nvrtc.py, which defines: HEAD_DIM GROUP COLUMNS and Q_BF16.

#include "verify_merge.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
// Parts that a warp loads at a time, and vectors of 4 channels of each that a lane takes.
constexpr int AT_ONCE = 8, VECTORS = HEAD_DIM > 128 ? HEAD_DIM / 128 : 1;

// shares: what one request more than its pages costs, then units before each request, as that kernel
// left them; workers: at most. A row of out and lse is written unless a single block wrote it.
extern "C" __global__ void __launch_bounds__(THREADS) verify_join(
    const float* __restrict__ partial_out, const float* __restrict__ partial_stat,
    const int* __restrict__ shares, const int* __restrict__ qo_indptr, int batch,
    int num_kv_heads, int max_workers, void* __restrict__ out, float* __restrict__ lse) {
    __shared__ float outs[WARPS][HEAD_DIM], tops[WARPS], sums[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int num_heads = num_kv_heads * GROUP;
    int token = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
    if (token >= qo_indptr[batch]) return;
    int b = request_of(qo_indptr, batch, token);
    const int* starts = shares + 1;
    int rest = shares[0], total = starts[batch], units = starts[b + 1] - starts[b];
    if (units == 0) return;
    int first_query = qo_indptr[b], row = (token - first_query) * GROUP + head % GROUP;
    int num_blocks = ((qo_indptr[b + 1] - first_query) * GROUP + COLS - 1) / COLS;
    int num_units = units / (num_kv_heads * num_blocks), column = row % COLS;
    i64 begin = starts[b] + (i64)(head / GROUP * num_blocks + row / COLS) * num_units;
    Owners owners(begin, rest, num_units - rest, total, min(total, max_workers));
    if (owners.first == owners.last) return;

    float top = NEG_INF, sum = 0.0f;
    float4 x[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) x[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    bool has_channels = lane * 4 < HEAD_DIM;
#pragma unroll 1
    for (int w = owners.first + warp; w <= owners.last; w += WARPS * AT_ONCE) {
        float2 stat[AT_ONCE];
        float4 y[AT_ONCE][VECTORS];
        float least = top;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            // Past the last one it is read again, for nothing.
            int worker = min(w + k * WARPS, owners.last);
            i64 part = owners.row_of(worker) + column;
            stat[k] = __ldcg(reinterpret_cast<const float2*>(partial_stat) + part);
            if (w + k * WARPS > owners.last) stat[k].x = NEG_INF;
            const float4* vectors = reinterpret_cast<const float4*>(partial_out + part * HEAD_DIM);
#pragma unroll
            for (int v = 0; v < VECTORS; ++v)
                y[k][v] = __ldcg(vectors + v * 32 + (has_channels ? lane : 0));
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) least = fmaxf(least, stat[k].x);
        float base = least == NEG_INF ? 0.0f : least, shrink = exp2_approx(top - base);
        top = least;
        sum *= shrink;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            x[v] = make_float4(x[v].x * shrink, x[v].y * shrink, x[v].z * shrink, x[v].w * shrink);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
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
    if (threadIdx.x >= HEAD_DIM) return;
    float highest = tops[0], all = 0.0f, value = 0.0f;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) highest = fmaxf(highest, tops[w]);
    highest = highest == NEG_INF ? 0.0f : highest;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        float share = exp2_approx(tops[w] - highest);
        all += share * sums[w];
        value += share * outs[w][threadIdx.x];
    }
    i64 index = (i64)token * num_heads + head;
    store_output(out, index * HEAD_DIM + threadIdx.x, all > 0.0f ? value / all : 0.0f);
    if (threadIdx.x == 0) lse[index] = highest + log2f(all);
}

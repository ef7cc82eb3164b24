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

// Merges the parts of workers first .. last. scales: [2][COLS] in shared memory, overwritten.
template <int THREADS>
__device__ __forceinline__ void merge_parts(
    const float* partial_out, const float* partial_stat, int first, int last, int first_slot,
    const Segment& segment, int num_kv_heads, float* scales, void* out, float* lse) {
    // Latency is all that counts here: many loads are under way at a time.
    constexpr int VECTORS = HEAD_DIM / 4, AT_ONCE = 4;
    float *tops = scales, *inverses = scales + COLS;
    auto part_of = [&](int worker) {
        return (i64)(2 * worker + (worker == first ? first_slot : 0)) * COLS;
    };
    for (int c = threadIdx.x; c < segment.num_columns; c += THREADS) {
        float top = NEG_INF, sum = 0.0f;
#pragma unroll 4
        for (int w = first; w <= last; ++w)
            top = fmaxf(top, __ldcg(partial_stat + (part_of(w) + c) * 2));
        top = top == NEG_INF ? 0.0f : top;
#pragma unroll 4
        for (int w = first; w <= last; ++w) {
            const float* stat = partial_stat + (part_of(w) + c) * 2;
            sum += exp2_approx(__ldcg(stat) - top) * __ldcg(stat + 1);
        }
        tops[c] = top;
        inverses[c] = sum > 0.0f ? 1.0f / sum : 0.0f;
        lse[out_row(segment, c, num_kv_heads)] = top + log2f(sum);
    }
    __syncthreads();
    int num_vectors = segment.num_columns * VECTORS;
#pragma unroll 1
    for (int begin = threadIdx.x; begin < num_vectors; begin += AT_ONCE * THREADS) {
        float4 x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 2
        for (int w = first; w <= last; ++w) {
            i64 part = part_of(w);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                int at = min(begin + i * THREADS, num_vectors - 1), c = at / VECTORS;
                float weight = exp2_approx(__ldcg(partial_stat + (part + c) * 2) - tops[c]);
                float4 y = __ldcg(reinterpret_cast<const float4*>(partial_out + part * HEAD_DIM) + at);
                x[i].x += weight * y.x;
                x[i].y += weight * y.y;
                x[i].z += weight * y.z;
                x[i].w += weight * y.w;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            int at = begin + i * THREADS, c = at / VECTORS;
            if (at >= num_vectors) break;
            i64 index = out_row(segment, c, num_kv_heads) * HEAD_DIM + at % VECTORS * 4;
            float inverse = inverses[c];
            store_output(out, index, x[i].x * inverse);
            store_output(out, index + 1, x[i].y * inverse);
            store_output(out, index + 2, x[i].z * inverse);
            store_output(out, index + 3, x[i].w * inverse);
        }
    }
}

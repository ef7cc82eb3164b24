// Which queries a block attends for, the units that work is shared by, and the merge of a request's
// parts that blocks left behind.
// Needs the defines HEAD_DIM GROUP COLUMNS and Q_BF16.
#pragma once
#include "hopper.cuh"

constexpr int COLS = COLUMNS * 8;

// Columns of 8 whose scores are in registers at a time, in passes, of which a segment makes as many
// as it has queries for.
constexpr int PASS_COLUMNS = COLUMNS < 8 ? COLUMNS : 8, PASSES = COLUMNS / PASS_COLUMNS;
// Work is shared by units. What a page counts, by the time it takes: of segments with so many
// queries, and of the widest.
__device__ constexpr int page_units(int num_columns) {
    int passes = (num_columns + PASS_COLUMNS * 8 - 1) / (PASS_COLUMNS * 8);
    return PASSES > 1 ? passes + 2 : 1;
}
constexpr int WIDEST_UNITS = page_units(COLS);

// Blocks that share all units. Each has as many as the widest page counts, so that all between the
// first and the last one of a segment have a page of it.
__device__ __forceinline__ int num_workers(int total, int max_workers) {
    return max(min(total / WIDEST_UNITS, max_workers), 1);
}

// Units of a KV head of a request with num_columns queries (at least 1), `rest` for each segment
// besides its pages.
struct HeadUnits {
    int wide, all;  // of each column block but the last one, and of all

    __device__ __forceinline__ HeadUnits(int num_columns, int num_pages, int rest) {
        int num_blocks = (num_columns + COLS - 1) / COLS;
        int last = num_columns - (num_blocks - 1) * COLS;
        wide = rest + num_pages * WIDEST_UNITS;
        all = (num_blocks - 1) * wide + rest + num_pages * page_units(last);
    }
};

// Pages of a request whose heads have so many units.
__device__ __forceinline__ int pages_of_units(int num_columns, int units, int rest) {
    HeadUnits none(num_columns, 0, rest), one(num_columns, 1, rest);
    return (units - none.all) / (one.all - none.all);
}

struct Segment {
    int b, head, block, first_query, num_queries, num_columns;  // of this column block
};

__device__ __forceinline__ i64 out_row(const Segment& s, int column, int num_kv_heads) {
    int global = s.block * COLS + column;
    return (i64)(s.first_query + global / GROUP) * num_kv_heads * GROUP + s.head * GROUP +
           global % GROUP;
}

// Who attended to a segment's pages, workers first .. last, each of which left a part; the first one
// may have left one of an earlier segment, too.
struct Owners {
    int first, last, first_slot;

    // begin: the segment's first unit, of which `rest` come before its pages, of `each` units.
    __device__ __forceinline__ Owners(
        i64 begin, int rest, int num_pages, int each, i64 total, int workers) {
        first = worker_of(begin + rest, total, workers);
        last = worker_of(begin + rest + (num_pages - 1) * each, total, workers);
        first_slot = first_unit(total, first, workers) < begin ? 1 : 0;
    }

    // Row of the first column of a worker's part: there is room for two of each worker.
    __device__ __forceinline__ i64 row_of(int worker) const {
        return (2 * (i64)worker + (worker == first ? first_slot : 0)) * COLS;
    }
};

// Adds up AT_ONCE vectors of 4 channels a thread, and more in turn, over workers first .. last.
// weight(w, c): of worker w's part in column c. finish(c, i, x): takes vector i of column c.
template <int THREADS, int AT_ONCE, class Part, class Weight, class Finish>
__device__ __forceinline__ void add_parts(
    const float* partial_out, int first, int last, int num_vectors, Part part_of, Weight weight,
    Finish finish) {
    // Loads under way at a time, of 16 bytes each.
    constexpr int VECTORS = HEAD_DIM / 4, UNROLL = 8 / AT_ONCE;
#pragma unroll 1
    for (int begin = threadIdx.x; begin < num_vectors; begin += AT_ONCE * THREADS) {
        float4 x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll UNROLL
        for (int w = first; w <= last; ++w) {
            const float* part = partial_out + part_of(w) * HEAD_DIM;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                int at = min(begin + i * THREADS, num_vectors - 1);
                float share = weight(w, at / VECTORS);
                float4 y = __ldcg(reinterpret_cast<const float4*>(part) + at);
                x[i].x += share * y.x;
                x[i].y += share * y.y;
                x[i].z += share * y.z;
                x[i].w += share * y.w;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            int at = begin + i * THREADS;
            if (at < num_vectors) finish(at / VECTORS, at % VECTORS, x[i]);
        }
    }
}

// Merges the parts of a segment. scales: [2][COLS] in shared memory, overwritten.
template <int THREADS>
__device__ __forceinline__ void merge_parts(
    const float* partial_out, const float* partial_stat, const Owners& owners,
    const Segment& segment, int num_kv_heads, float* scales, void* out, float* lse) {
    // Latency is all that counts here: many loads are under way at a time.
    float *tops = scales, *inverses = scales + COLS;
    int first = owners.first, last = owners.last;
    auto part_of = [&](int worker) { return owners.row_of(worker); };
    // Threads that share a column, of one warp.
    int sharing = 32;
    while (sharing > 1 && sharing * segment.num_columns > THREADS) sharing /= 2;
#pragma unroll 1
    for (int begin = 0; begin < segment.num_columns; begin += THREADS / sharing) {
        int c = begin + threadIdx.x / sharing;
        bool is_column = c < segment.num_columns;
        int from = first + (int)(threadIdx.x % sharing), to = is_column ? last : from - 1;
        float top = NEG_INF, sum = 0.0f;
#pragma unroll 4
        for (int w = from; w <= to; w += sharing)
            top = fmaxf(top, __ldcg(partial_stat + (part_of(w) + c) * 2));
        for (int hop = 1; hop < sharing; hop *= 2)
            top = fmaxf(top, __shfl_xor_sync(FULL, top, hop));
        top = top == NEG_INF ? 0.0f : top;
#pragma unroll 4
        for (int w = from; w <= to; w += sharing) {
            float2 stat = __ldcg(reinterpret_cast<const float2*>(partial_stat) + part_of(w) + c);
            sum += exp2_approx(stat.x - top) * stat.y;
        }
        for (int hop = 1; hop < sharing; hop *= 2) sum += __shfl_xor_sync(FULL, sum, hop);
        if (is_column && threadIdx.x % sharing == 0) {
            tops[c] = top;
            inverses[c] = sum > 0.0f ? 1.0f / sum : 0.0f;
            lse[out_row(segment, c, num_kv_heads)] = top + log2f(sum);
        }
    }
    __syncthreads();
    auto weight = [&](int worker, int c) {
        return exp2_approx(__ldcg(partial_stat + (part_of(worker) + c) * 2) - tops[c]);
    };
    auto finish = [&](int c, int vector, float4 x) {
        i64 index = out_row(segment, c, num_kv_heads) * HEAD_DIM + vector * 4;
        float inverse = inverses[c];
        store_output(out, index, x.x * inverse);
        store_output(out, index + 1, x.y * inverse);
        store_output(out, index + 2, x.z * inverse);
        store_output(out, index + 3, x.w * inverse);
    };
    int num_vectors = segment.num_columns * (HEAD_DIM / 4);
    if (num_vectors <= THREADS)
        add_parts<THREADS, 1>(partial_out, first, last, num_vectors, part_of, weight, finish);
    else if (COLUMNS > 1 && num_vectors > 2 * THREADS)
        add_parts<THREADS, 4>(partial_out, first, last, num_vectors, part_of, weight, finish);
    else
        add_parts<THREADS, 2>(partial_out, first, last, num_vectors, part_of, weight, finish);
}

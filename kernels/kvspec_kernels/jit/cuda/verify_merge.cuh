// Queries of a block, units of work that blocks share, and the merge of a request's parts. Needs
// the defines HEAD_DIM GROUP COLUMNS CHUNK_PAGES and Q_BF16.
#pragma once
#include "hopper.cuh"

constexpr int COLS = COLUMNS * 8;

// Columns of 8 queries whose scores are in registers at a time. A segment makes as many passes as
// its queries need.
constexpr int PASS_COLUMNS = COLUMNS < 8 ? COLUMNS : 8, PASSES = COLUMNS / PASS_COLUMNS;
// Blocks share work in units. Returns the units of a page, proportional to its time, in a segment
// of num_columns queries. WIDEST_UNITS: those in the widest segment.
__device__ constexpr int page_units(int num_columns) {
    int passes = (num_columns + PASS_COLUMNS * 8 - 1) / (PASS_COLUMNS * 8);
    return PASSES > 1 ? passes + 2 : 1;
}
constexpr int WIDEST_UNITS = page_units(COLS);

// Returns the number of blocks that share all units. Each block has at least the units of the
// widest page, so that every block from the first to the last of a segment has a page of it.
__device__ __forceinline__ int num_workers(int total, int max_workers) {
    return max(min(total / WIDEST_UNITS, max_workers), 1);
}

// Units of a KV head of a request with num_columns queries (at least 1). Each segment counts `rest`
// units in addition to those of its pages.
struct HeadUnits {
    int wide, all;  // units of each column block except the last, and of all together

    __device__ __forceinline__ HeadUnits(int num_columns, int num_pages, int rest) {
        int num_blocks = (num_columns + COLS - 1) / COLS;
        int last = num_columns - (num_blocks - 1) * COLS;
        wide = rest + num_pages * WIDEST_UNITS;
        all = (num_blocks - 1) * wide + rest + num_pages * page_units(last);
    }
};

// Items of a KV head of a request with num_columns queries (at least 1), if work is not shared in
// units: a chunk of CHUNK_PAGES pages for a block of columns each, chunk after chunk.
struct HeadItems {
    int chunks, all;  // items of each column block, and of all together

    __device__ __forceinline__ HeadItems(int num_columns, int num_pages) {
        chunks = (num_pages + max(CHUNK_PAGES, 1) - 1) / max(CHUNK_PAGES, 1);
        all = chunks * ((num_columns + COLS - 1) / COLS);
    }
};

// Returns the number of pages of a request whose KV heads each have `units` units.
__device__ __forceinline__ int pages_of_units(int num_columns, int units, int rest) {
    HeadUnits none(num_columns, 0, rest), one(num_columns, 1, rest);
    return (units - none.all) / (one.all - none.all);
}

struct Segment {
    int b, head, block, first_query, num_queries, num_columns;  // num_columns: of block
};

__device__ __forceinline__ i64 out_row(const Segment& s, int column, int num_kv_heads) {
    int global = s.block * COLS + column;
    return (i64)(s.first_query + global / GROUP) * num_kv_heads * GROUP + s.head * GROUP +
           global % GROUP;
}

// Workers first .. last, which attended to a segment's pages. Each wrote a part. The first worker
// may also have written a part of an earlier segment.
struct Owners {
    int first, last, first_slot;

    // begin: the segment's first unit. `rest` units come before its pages, which have `each` units.
    __device__ __forceinline__ Owners(
        i64 begin, int rest, int num_pages, int each, i64 total, int workers) {
        first = worker_of(begin + rest, total, workers);
        last = worker_of(begin + rest + (num_pages - 1) * each, total, workers);
        first_slot = first_unit(total, first, workers) < begin ? 1 : 0;
    }

    // Returns the row of the first column of a worker's part. Each worker has room for two parts.
    __device__ __forceinline__ i64 row_of(int worker) const {
        return (2 * (i64)worker + (worker == first ? first_slot : 0)) * COLS;
    }
};

// Adds up num_vectors vectors of 4 channels over workers first .. last, AT_ONCE for each thread at
// a time. weight(w, c): weight of worker w's part in column c. finish(c, i, x): takes vector i of
// column c.
template <int THREADS, int AT_ONCE, class Part, class Weight, class Finish>
__device__ __forceinline__ void add_parts(
    const float* partial_out, int first, int last, int num_vectors, Part part_of, Weight weight,
    Finish finish) {
    // UNROLL * AT_ONCE loads of 16 bytes are in flight at a time.
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
    // Latency dominates here, so many loads are in flight at a time.
    float *tops = scales, *inverses = scales + COLS;
    int first = owners.first, last = owners.last;
    auto part_of = [&](int worker) { return owners.row_of(worker); };
    // Threads of one warp that share a column.
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

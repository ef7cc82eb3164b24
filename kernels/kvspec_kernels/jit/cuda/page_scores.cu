// Scores of pages, for Hopper: the log-sum-exp, base 2, of query rows over each page. Rows are the
// queries of a request times the query heads of a KV head. Only the K parts of anchors are read.
// Blocks share the pages of all requests and KV heads equally, as in draft_attention.cu, and the
// warps of a block take pages in turn. A warp handles GROUP rows at once, in PASSES passes.
//
// Compiled by jit/nvrtc.py, which defines: HEAD_DIM PAGE_SIZE GROUP PASSES QUERY_HEADS NUM_ROWS
// K_ROWS V_ROWS LOG4 ANCHOR_BITS Q_BF16 WARPS HALVES BLOCKS K_BYTES RECORD_BYTES TOP.

#include "draft_shares.cuh"
#include "draft_half.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int PASS_WORDS = COLUMN_TILES * CHANNEL_TILES * 32;
constexpr int ALL_QUERY_BYTES = PASSES * QUERY_BYTES;
constexpr int RING_BYTES = WARPS * HALVES * K_BYTES;

// Writes the log-sum-exps of a page's scores to lse, [GROUP].
__device__ __forceinline__ void store_sums(
    const Scores& scores, float* __restrict__ lse, int num_rows, int lane) {
    int t = lane & 3;
#pragma unroll
    for (int column = 0; column < COLUMN_TILES; ++column)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float top = NEG_INF, sum = 0.0f;
#pragma unroll
            for (int row = 0; row < TOKEN_TILES; ++row)
                top = fmaxf(top, fmaxf(scores[column][row][j], scores[column][row][j + 2]));
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                top = fmaxf(top, __shfl_xor_sync(FULL, top, step));
#pragma unroll
            for (int row = 0; row < TOKEN_TILES; ++row)
                sum += exp2_approx(scores[column][row][j] - top) +
                       exp2_approx(scores[column][row][j + 2] - top);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(FULL, sum, step);
            int row = column * 8 + 2 * t + j;
            if (lane < 4 && row < num_rows) lse[row] = top + log2f(sum);
        }
}

// q: [tokens, num_kv_heads * QUERY_HEADS, HEAD_DIM]; request b's queries are the num_queries[b]
// tokens from q_begin[b] on. lse: [indices, num_kv_heads, NUM_ROWS]; rows of queries that a request
// does not have are not written.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) page_scores(
    const u16* __restrict__ q, i64 q_stride, i64 q_head_stride, const u8* __restrict__ anchors,
    i64 page_stride, const int* __restrict__ indptr, const int* __restrict__ indices,
    const int* __restrict__ q_begin, const int* __restrict__ num_queries, int batch,
    int num_kv_heads, float scale_log2, float* __restrict__ lse) {
    extern __shared__ __align__(128) u8 memory[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint4* query = reinterpret_cast<uint4*>(memory);
    u8* ring = memory + ALL_QUERY_BYTES + warp * HALVES * K_BYTES;
    u32 barrier = shared_address(memory + ALL_QUERY_BYTES + RING_BYTES) + warp * HALVES * 8;
    init_ring(barrier, HALVES, lane);

    i64 total = (i64)indptr[batch] * num_kv_heads;
    int worker = blockIdx.x, workers = active_workers(total, gridDim.x);
    i64 begin = 0, end = 0;
    if (worker < workers) {
        begin = first_unit(total, worker, workers);
        end = first_unit(total, worker + 1, workers);
    }
    u32 sequence = 0;  // pages that this warp has consumed

    while (begin < end) {
        auto [b, head, first_index, num_pages, page, count] =
            run_of(indptr, batch, num_kv_heads, begin, end);
        int num_rows = num_queries[b] * QUERY_HEADS;
        begin += count;
        if (num_rows == 0) continue;
        const int* pages = indices + first_index + page;
        const u8* records = anchors + (i64)head * RECORD_BYTES;
        auto fetch = [&](int n, int id) {
            u32 slot = (sequence + n) % HALVES;
            if (lane == 0) {
                expect(barrier + 8 * slot, K_BYTES);
                copy_bulk(shared_address(ring) + slot * K_BYTES, records + id * page_stride,
                          K_BYTES, barrier + 8 * slot);
            }
        };
        auto page_of = [&](int n) { return warp + n * WARPS; };
#pragma unroll
        for (int n = 0; n < HALVES; ++n)
            if (page_of(n) < count) fetch(n, pages[page_of(n)]);
        const u16* own = q + (i64)q_begin[b] * q_stride + (i64)head * QUERY_HEADS * q_head_stride;
        load_query_rows(query, PASSES * COLUMN_TILES, scale_log2, [&](int row) -> const u16* {
            if (row >= num_rows) return nullptr;
            return own + row / QUERY_HEADS * q_stride + row % QUERY_HEADS * q_head_stride;
        });
        __syncthreads();
        int n = 0;
#pragma unroll 1
        for (int i = warp; i < count; i += WARPS, ++n) {
            int next = pages[min(page_of(n + HALVES), count - 1)];
            u32 slot = (sequence + n) % HALVES;
            const u8* part = ring + slot * K_BYTES;
            barrier_wait(barrier + slot * 8, (sequence + n) / HALVES & 1);
            float* row = lse + ((i64)(first_index + page + i) * num_kv_heads + head) * NUM_ROWS;
#pragma unroll 1
            for (int pass = 0; pass < PASSES && pass * GROUP < num_rows; ++pass) {
                Scores scores;
                score_page(scores, query + pass * PASS_WORDS, part, scale_log2, lane);
                store_sums(scores, row + pass * GROUP, num_rows - pass * GROUP, lane);
            }
            __syncwarp();
            if (page_of(n + HALVES) < count) fetch(n + HALVES, next);
        }
        sequence += n;
        // The next request's queries replace these.
        __syncthreads();
    }
}

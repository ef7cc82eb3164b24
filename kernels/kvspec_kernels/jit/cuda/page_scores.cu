// Scores of pages, for Hopper: the log-sum-exp, base 2, of query rows over each page. Rows are the
// queries of a request times the query heads of a KV head. Only the K parts of anchors are read.
// Blocks share the pages of all requests and KV heads equally, as in draft_attention.cu, and the
// warps of a block take pages in turn. A warp handles GROUP rows at once, in PASSES passes.
//
// Compiled by jit/nvrtc.py, which defines: HEAD_DIM PAGE_SIZE GROUP PASSES QUERY_HEADS NUM_ROWS
// K_ROWS V_ROWS LOG4 ANCHOR_BITS INT8 Q_BF16 WARPS HALVES BLOCKS K_BYTES RECORD_BYTES TOP.

#include "draft_shares.cuh"
#if INT8
#include "scores_int8.cuh"
#else
#include "draft_half.cuh"
#endif

constexpr int THREADS = WARPS * 32;
constexpr int PASS_WORDS = QUERY_BYTES / 16;
constexpr int ALL_QUERY_BYTES = PASSES * QUERY_BYTES;
constexpr int RING_BYTES = WARPS * HALVES * K_BYTES;
// Rows that a lane has a part of: 2 in each column tile. Lanes with equal t share them.
constexpr int LANE_ROWS = 2 * COLUMN_TILES;

// References of the rows' scores: no score of an earlier page exceeded its reference by more than
// SLACK. A page whose scores are far below counts as nothing beside the page that set it.
struct References {
    float value[PASSES][LANE_ROWS];
    bool is_set;
};

// Halves the number of values by exchange with the lane `hop` away, from COUNT to COUNT / 2 sums.
template <int COUNT>
__device__ __forceinline__ void fold_sums(float* sums, float* references, int lane, int hop) {
    bool upper = lane & hop;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        float sent = upper ? sums[i] : sums[i + COUNT / 2];
        float kept = upper ? sums[i + COUNT / 2] : sums[i];
        sums[i] = kept + __shfl_xor_sync(FULL, sent, hop);
        references[i] = upper ? references[i + COUNT / 2] : references[i];
    }
}

// Writes the log-sum-exps of a page's scores to lse, [GROUP].
__device__ __forceinline__ void store_sums(
    Scores& scores, float (&reference)[LANE_ROWS], bool is_set, float* __restrict__ lse,
    int num_rows, int lane) {
    float top[LANE_ROWS];
    bool grew = !is_set;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
        top[i] = NEG_INF;
#pragma unroll
        for (int row = 0; row < TOKEN_TILES; ++row)
            top[i] = fmaxf(top[i], fmaxf(scores[i / 2][row][i % 2], scores[i / 2][row][i % 2 + 2]));
        grew |= top[i] > reference[i] + SLACK;
    }
    if (__any_sync(FULL, grew)) {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                top[i] = fmaxf(top[i], __shfl_xor_sync(FULL, top[i], step));
            reference[i] = is_set ? fmaxf(top[i], reference[i]) : top[i];
        }
    }
    // Room for a power of two.
    constexpr int COUNT = LANE_ROWS > 4 ? 8 : LANE_ROWS > 2 ? 4 : 2;
    float sums[COUNT], references[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        sums[i] = references[i] = 0.0f;
        if (i >= LANE_ROWS) continue;
        references[i] = reference[i];
#pragma unroll
        for (int row = 0; row < TOKEN_TILES; ++row)
            sums[i] += exp2_approx(scores[i / 2][row][i % 2] - reference[i]) +
                       exp2_approx(scores[i / 2][row][i % 2 + 2] - reference[i]);
    }
    // Of COUNT sums over the lane's tokens, one over all tokens remains, that of value g / (8 /
    // COUNT).
    int g = lane >> 2, t = lane & 3;
    fold_sums<COUNT>(sums, references, lane, 16);
    if constexpr (COUNT >= 4) fold_sums<COUNT / 2>(sums, references, lane, 8);
    if constexpr (COUNT >= 8) fold_sums<COUNT / 4>(sums, references, lane, 4);
    if constexpr (COUNT == 2) sums[0] += __shfl_xor_sync(FULL, sums[0], 8);
    if constexpr (COUNT <= 4) sums[0] += __shfl_xor_sync(FULL, sums[0], 4);
    int value = g / (8 / COUNT), row = value / 2 * 8 + 2 * t + value % 2;
    if (g % (8 / COUNT) == 0 && value < LANE_ROWS && row < num_rows)
        lse[row] = references[0] + log2f(sums[0]);
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
        References references;
        references.is_set = false;
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
                store_sums(scores, references.value[pass], references.is_set, row + pass * GROUP,
                           num_rows - pass * GROUP, lane);
            }
            references.is_set = true;
            __syncwarp();
            if (page_of(n + HALVES) < count) fetch(n + HALVES, next);
        }
        sequence += n;
        // The next request's queries replace these.
        __syncthreads();
    }
}

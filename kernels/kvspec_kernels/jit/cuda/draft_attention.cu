// Draft attention over anchors, for Hopper: codes go from memory to matrix registers without a
// shuffle. Blocks share the pages of all requests and KV heads equally, for any lengths. Further
// blocks attend to the requests' newest tokens (draft_tail.cuh). draft_join.cu joins the parts of a
// request. The warps of a block take pages in turn. Bulk copies fill a ring for each warp in
// advance, K and V separately. draft_half.cuh or draft_int8.cuh has the work of a warp on a page.
//
// Compiled by jit/nvrtc.py, which defines: HEAD_DIM PAGE_SIZE GROUP HEAD_SPLIT ROWS QUERY_HEADS
// LISTS_BY_HEAD K_ROWS V_ROWS LOG4 ANCHOR_BITS INT8 Q_BF16 WARPS HALVES BLOCKS TAIL_HEADS K_BYTES
// V_BYTES RECORD_BYTES TOP.

#include "draft_shares.cuh"
#include "draft_tail.cuh"
#if INT8
#include "draft_int8.cuh"
#else
#include "draft_half.cuh"
#endif

constexpr int THREADS = WARPS * 32;
constexpr int HALF_BYTES = K_BYTES > V_BYTES ? K_BYTES : V_BYTES;
// Memory of the rings and, between requests, of the warps' states.
constexpr int RING_BYTES = WARPS * HALVES * HALF_BYTES;
constexpr int STATE_BYTES = WarpStates<GROUP>::BYTES;
constexpr int SCRATCH_BYTES = ((RING_BYTES > STATE_BYTES ? RING_BYTES : STATE_BYTES) + 7) / 8 * 8;

// A KV head with more query rows than fit is read HEAD_SPLIT times; num_kv_heads counts each time.
// With LISTS_BY_HEAD, index i of KV head h is indices[i * index_stride + h], and -1 for no page at
// the end of a list.
// q: [batch * ROWS, query heads, HEAD_DIM], see draft_rows.cuh for GROUP. The first max_workers blocks have the pages. If there
// is a tail, batch * num_kv_heads * TAIL_PARTS blocks follow. partial_out: [2 * max_workers, GROUP,
// HEAD_DIM], sums of weighted V. partial_stat: [2 * max_workers, GROUP, 2], (max, base 2, and sum).
// past_out: [batch, num_kv_heads * GROUP, HEAD_DIM]; past_lse: the same without HEAD_DIM, base 2.
// Their rows are written only if one block has all of a head's pages. Rows of tail_out and tail_lse
// are written if there is a tail.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) draft_attention(
    const u16* __restrict__ q, i64 q_stride, i64 q_head_stride, const u8* __restrict__ anchors,
    i64 page_stride, const int* __restrict__ indptr, const int* __restrict__ indices,
    int index_stride, const int* __restrict__ last_page_len, Tail tail, int batch,
    int num_kv_heads, int max_workers, float scale_log2, float* __restrict__ partial_out, float* __restrict__ partial_stat,
    void* __restrict__ past_out, float* __restrict__ past_lse, void* __restrict__ tail_out,
    float* __restrict__ tail_lse) {
    extern __shared__ __align__(128) u8 memory[];
    int worker = blockIdx.x;
    if (worker >= max_workers) {
        attend_to_tail(worker - max_workers, q, q_stride, q_head_stride, tail, num_kv_heads,
                       scale_log2, memory, tail_out, tail_lse);
        return;
    }
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint4* query = reinterpret_cast<uint4*>(memory);
    u8* scratch = memory + QUERY_BYTES;
    u8* ring = scratch + warp * HALVES * HALF_BYTES;
    u32 barrier = shared_address(scratch + SCRATCH_BYTES) + warp * HALVES * 8;
    init_ring(barrier, HALVES, lane);

    i64 total = (i64)indptr[batch] * num_kv_heads;
    int workers = active_workers(total, max_workers);
    i64 begin = 0, end = 0;
    if (worker < workers) {
        begin = first_unit(total, worker, workers);
        end = first_unit(total, worker + 1, workers);
    }
    u32 sequence = 0;  // halves of pages, K or V, that this warp has consumed
    bool is_first = true;

    while (begin < end) {
        auto [b, head, first_index, num_pages, page, count] =
            run_of(indptr, batch, num_kv_heads, begin, end);
#if LISTS_BY_HEAD
        const int* pages = indices + (i64)(first_index + page) * index_stride + head / HEAD_SPLIT;
        auto id_of = [&](int i) { return pages[(i64)i * index_stride]; };
#else
        const int* pages = indices + first_index + page;
        auto id_of = [&](int i) { return pages[i]; };
#endif
        int last_len = page + count == num_pages ? last_page_len[b] : PAGE_SIZE;
        const u8* records = anchors + (i64)(head / HEAD_SPLIT) * RECORD_BYTES;
        // Fetches the n-th half that the warp reads of this request: K or V of a page.
        auto fetch_part = [&](int n, int id) {
            u32 slot = (sequence + n) % HALVES;
            if (lane == 0) {
                expect(barrier + 8 * slot, n & 1 ? V_BYTES : K_BYTES);
                copy_bulk(shared_address(ring) + slot * HALF_BYTES,
                          records + max(id, 0) * page_stride + (n & 1 ? K_BYTES : 0),
                          n & 1 ? V_BYTES : K_BYTES, barrier + 8 * slot);
            }
        };
        auto page_of = [&](int n) { return warp + (n >> 1) * WARPS; };
#pragma unroll
        for (int n = 0; n < HALVES; ++n)
            if (page_of(n) < count) fetch_part(n, id_of(page_of(n)));
        const QueryRows own(q, q_stride, q_head_stride, b, head);
        load_query(query, scale_log2,
                   [&](int row) -> const u16* { return row < GROUP ? own[row] : nullptr; });
        __syncthreads();
        State state;
        state.clear();
        int n = 0;
#pragma unroll 1
        for (int i = warp; i < count; i += WARPS, n += 2) {
            int next[2] = {id_of(min(page_of(n + HALVES), count - 1)),
                           id_of(min(page_of(n + 1 + HALVES), count - 1))};
            const u8* part = ring + (sequence + n) % HALVES * HALF_BYTES;
            // Lists of other heads may be longer than this one.
            bool is_page = !LISTS_BY_HEAD || id_of(i) >= 0;
            Scores scores;
            barrier_wait(barrier + (sequence + n) % HALVES * 8, (sequence + n) / HALVES & 1);
#if LOG4
            int v_base = *reinterpret_cast<const short*>(part + 2);
#else
            int v_base = 0;
#endif
            if (is_page) score_page(scores, query, part, scale_log2, lane);
            __syncwarp();
            if (page_of(n + HALVES) < count) fetch_part(n + HALVES, next[0]);
            if (is_page)
                softmax_page(state, scores, i + 1 == count ? last_len : PAGE_SIZE, lane);
            part = ring + (sequence + n + 1) % HALVES * HALF_BYTES;
            barrier_wait(barrier + (sequence + n + 1) % HALVES * 8, (sequence + n + 1) / HALVES & 1);
#if !LOG4
            if (i + 1 == count && last_len < PAGE_SIZE)
                clear_tokens(ring + (sequence + n + 1) % HALVES * HALF_BYTES, last_len, lane);
#endif
            if (is_page) weigh_page(state, scores, part, v_base, lane);
            __syncwarp();
            if (page_of(n + 1 + HALVES) < count) fetch_part(n + 1 + HALVES, next[1]);
        }
        sequence += n;

        // Join the warps' states. The rings are empty and serve as scratch memory.
        WarpStates<GROUP> states(scratch);
        __syncthreads();
        state.store(states, warp, lane);
        __syncthreads();
        bool whole = count == num_pages;
        i64 row = ((i64)b * num_kv_heads + head) * GROUP, part = part_row(worker, is_first);
        states.join([&](int h, int channel, float top, float sum, float x) {
            if (whole) {
                // A head's own list may have no page.
                float value = LISTS_BY_HEAD && sum == 0.0f ? 0.0f : x / sum;
                store_output(past_out, (row + h) * HEAD_DIM + channel, value);
                if (channel == 0) past_lse[row + h] = top + log2f(sum);
            } else {
                __stcg(partial_out + (part + h) * HEAD_DIM + channel, x);
                if (channel == 0) {
                    __stcg(partial_stat + (part + h) * 2, top);
                    __stcg(partial_stat + (part + h) * 2 + 1, sum);
                }
            }
        });
        begin += count;
        is_first = false;
        // Order ordinary writes to the ring before the next bulk copies into it.
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();
    }
}

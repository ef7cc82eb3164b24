// Joins the parts of a query row that blocks of draft_attention.cu wrote, and the state of the
// request's tail if there is one. Each query row has a block.
//
// Compiled by jit/nvrtc.py, which defines: HEAD_DIM GROUP HEAD_SPLIT ROWS QUERY_HEADS WARPS
// JOIN_WARPS PARTS_AT_ONCE and Q_BF16.

#include "draft_rows.cuh"
#include "draft_shares.cuh"
#include "join_rows.cuh"

// indptr, num_kv_heads, max_workers, past_out, past_lse: the arguments of draft_attention.
// tail_out, tail_lse: like past_out and past_lse, or null. Writes every row of out [batch * ROWS,
// query heads, HEAD_DIM] and lse.
extern "C" __global__ void __launch_bounds__(JOIN_THREADS) draft_join(
    const float* __restrict__ partial_out, const float* __restrict__ partial_stat,
    const int* __restrict__ indptr, int batch, int num_kv_heads, int max_workers,
    const u16* __restrict__ past_out, const float* __restrict__ past_lse,
    const u16* __restrict__ tail_out, const float* __restrict__ tail_lse, void* __restrict__ out,
    float* __restrict__ lse) {
    int num_heads = num_kv_heads * GROUP;
    int b = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
    i64 total = (i64)indptr[batch] * num_kv_heads;
    int num_pages = indptr[b + 1] - indptr[b], workers = active_workers(total, max_workers);
    i64 begin = (i64)indptr[b] * num_kv_heads + (i64)(head / GROUP) * num_pages;
    int first = 0, last = -1;
    bool first_had_other = false;
    if (num_pages > 0) {
        first = worker_of(begin, total, workers);
        last = worker_of(begin + num_pages - 1, total, workers);
        first_had_other = first_unit(total, first, workers) < begin;
    }
    auto row_of = [&](int worker) {
        return part_row(worker, worker != first || !first_had_other) + head % GROUP;
    };
    OtherState past = {nullptr, nullptr}, tail = {tail_out, tail_lse};
    if (first == last) {
        past = {past_out, past_lse};
        last = first - 1;
    }
    join_row(partial_out, partial_stat, first, last, row_of, past, tail, blockIdx.x,
             place_of(blockIdx.x, num_kv_heads), out, lse);
}

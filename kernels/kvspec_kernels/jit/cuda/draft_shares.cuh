// Shares of pages among blocks of draft_attention.cu, and places of their parts. Needs the defines
// GROUP and WARPS.
#pragma once
#include "hopper.cuh"

// Returns the number of blocks that share the work: each has a page for every warp.
__device__ __forceinline__ int active_workers(i64 total, int workers) {
    i64 most = (total + WARPS - 1) / WARPS;
    return most < workers ? (int)most : workers;
}

// Pages of one request and KV head that follow one another in its list: pages page .. page + count -
// 1 of num_pages, whose indices begin at first_index.
struct Run {
    int b, head, first_index, num_pages, page, count;
};

// Returns the run at unit `begin`, up to unit `end` at most. The whole warp must call it.
__device__ __forceinline__ Run run_of(
    const int* indptr, int batch, int num_kv_heads, i64 begin, i64 end) {
    int b = request_of(indptr, batch, (int)(begin / num_kv_heads));
    int first_index = indptr[b], num_pages = indptr[b + 1] - first_index;
    i64 within = begin - (i64)first_index * num_kv_heads;
    int head = (int)(within / num_pages), page = (int)(within % num_pages);
    int count = (int)min((i64)(num_pages - page), end - begin);
    return {b, head, first_index, num_pages, page, count};
}

// Returns the row of the first head of a worker's part. Each worker has room for two parts; the
// second is for heads after its first.
__device__ __forceinline__ i64 part_row(int worker, bool is_first) {
    return (2 * (i64)worker + (is_first ? 0 : 1)) * GROUP;
}

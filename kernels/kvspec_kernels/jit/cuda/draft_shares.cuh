// Shares of pages among blocks of draft_attention.cu, and places of their parts. Needs the defines
// GROUP and WARPS.
#pragma once
#include "hopper.cuh"

// Returns the number of blocks that share the work: each has a page for every warp.
__device__ __forceinline__ int active_workers(i64 total, int workers) {
    i64 most = (total + WARPS - 1) / WARPS;
    return most < workers ? (int)most : workers;
}

// Returns the row of the first head of a worker's part. Each worker has room for two parts; the
// second is for heads after its first.
__device__ __forceinline__ i64 part_row(int worker, bool is_first) {
    return (2 * (i64)worker + (is_first ? 0 : 1)) * GROUP;
}

// How blocks of draft_attention.cu share pages, and where they leave what they make of them. Needs the
// defines GROUP and WARPS.
#pragma once
#include "hopper.cuh"

// Blocks that share the work: each has a page for every warp.
__device__ __forceinline__ int active_workers(i64 total, int workers) {
    i64 most = (total + WARPS - 1) / WARPS;
    return most < workers ? (int)most : workers;
}

// Row of the first head of a worker's part: there is room for two of each worker, of which the second
// is for heads that it began later.
__device__ __forceinline__ i64 part_row(int worker, bool is_first) {
    return (2 * (i64)worker + (is_first ? 0 : 1)) * GROUP;
}

// Query rows of a request and KV head. They are the request's ROWS query tokens times the KV head's
// QUERY_HEADS query heads, heads of a token together. A KV head that is read HEAD_SPLIT times counts
// as so many heads, each with the next GROUP of these rows. Needs the defines GROUP HEAD_SPLIT ROWS
// QUERY_HEADS.
#pragma once
#include "hopper.cuh"

static_assert(GROUP * HEAD_SPLIT == ROWS * QUERY_HEADS, "rows are shared out evenly");

// Returns the number of a row among all rows of its KV head. row: of the GROUP rows of `head`.
__device__ __forceinline__ int row_of_head(int head, int row) {
    return head % HEAD_SPLIT * GROUP + row;
}

// Queries of the GROUP rows of request b and `head`, from `channel` on. q: [batch * ROWS, query heads, HEAD_DIM].
struct QueryRows {
    const u16* first;
    i64 stride, head_stride;
    int begin;

    __device__ __forceinline__ QueryRows(
        const u16* q, i64 q_stride, i64 q_head_stride, int b, int head, int channel = 0)
        : stride(q_stride), head_stride(q_head_stride), begin(row_of_head(head, 0)) {
#if ROWS == 1
        first = q + b * q_stride + (i64)head * GROUP * q_head_stride + channel;
#else
        first = q + (i64)b * ROWS * q_stride +
                (i64)(head / HEAD_SPLIT) * QUERY_HEADS * q_head_stride + channel;
#endif
    }

    __device__ __forceinline__ const u16* operator[](int row) const {
#if ROWS == 1
        return first + row * head_stride;
#else
        int index = begin + row;
        return first + index / QUERY_HEADS * stride + index % QUERY_HEADS * head_stride;
#endif
    }
};

// Returns how many of the tail's `count` tokens a row sees: query tokens are the tail's last tokens.
__device__ __forceinline__ int num_seen(int count, int head, int row) {
    return count - (ROWS - 1 - row_of_head(head, row) / QUERY_HEADS);
}

// Returns the row of [batch * ROWS, query heads] for row `index` of [batch, num_kv_heads * GROUP].
__device__ __forceinline__ i64 place_of(i64 index, int num_kv_heads) {
#if ROWS == 1
    return index;
#else
    int num_heads = num_kv_heads * GROUP / ROWS, of_kv_head = ROWS * QUERY_HEADS;
    int within = (int)(index % of_kv_head);
    i64 kv_head = index / of_kv_head, num_kept = num_kv_heads / HEAD_SPLIT;
    return (kv_head / num_kept * ROWS + within / QUERY_HEADS) * num_heads +
           kv_head % num_kept * QUERY_HEADS + within % QUERY_HEADS;
#endif
}

"""Attention to encoded pages of uniform4 with their corrections, decoded to bf16 a word at a time
(`refined_tiles.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.pages import find_page
from kvspec_kernels.jit.refined_tiles import (
    OPERAND_UNIT,
    decode_k,
    decode_v,
    load_k,
    load_v,
    thread_column,
    token_masks,
)
from kvspec_kernels.jit.rounding import rounded
from kvspec_kernels.jit.softmax import attend_by_scores


@triton.jit
def attend_to_refined(
    q_rows_ptr,
    mask_m,
    anchors_ptr,
    residuals_ptr,
    residual_slots_ptr,
    page_list_ptr,
    unit_begin,
    unit_end,
    past_len,
    scale_log2,
    stride_anchor_page,
    stride_residual_slot,
    acc,
    top,
    total,
    ANCHOR_BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_CODES: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_CODES: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_CORRECTIONS: tl.constexpr,
    V_CORRECTIONS: tl.constexpr,
    DTYPE: tl.constexpr,
    FINITE_MAX: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return (acc, top, total) of an online softmax over units unit_begin .. unit_end - 1 of a
    request's past. q_rows_ptr, mask_m: [M, 1]. anchors_ptr, residuals_ptr: records of the KV head.
    scale_log2 must be positive. DTYPE is bf16, BLOCK_N is code_tiles.TILE_TOKENS. STAGES: stages of
    the loop over units."""
    channels = thread_column(tl.arange(0, HEAD_DIM))
    q = tl.load(q_rows_ptr + channels[None, :], mask=mask_m, other=0.0)
    q = rounded(q.to(tl.float32), DTYPE, INTERPRET)
    tokens = thread_column(tl.arange(0, BLOCK_N))
    scale = scale_log2 * OPERAND_UNIT
    # Only the last unit of a past may have tokens that are not seen.
    near_mask, far_mask = token_masks((past_len - 1) % BLOCK_N + 1)
    for unit in tl.range(unit_begin, unit_end, num_stages=STAGES):
        page, num_seen = find_page(
            page_list_ptr, unit * BLOCK_N, past_len, 1, LISTS_BY_HEAD=False, PAGE_SIZE=PAGE_SIZE
        )
        slot = tl.load(residual_slots_ptr + page).to(tl.int64)
        anchor_ptr = anchors_ptr + page * stride_anchor_page
        residual_ptr = residuals_ptr + slot * stride_residual_slot
        first = unit % (PAGE_SIZE // BLOCK_N) * BLOCK_N
        k_fields = load_k(
            anchor_ptr,
            residual_ptr,
            first,
            ANCHOR_BITS=ANCHOR_BITS,
            PAGE_SIZE=PAGE_SIZE,
            HEAD_DIM=HEAD_DIM,
            CHUNK=K_CHUNK,
            CODES=K_CODES,
            OFFSET=K_OFFSET,
            SCALE=K_SCALE,
            CORRECTIONS=K_CORRECTIONS,
        )
        all_seen = tl.where(num_seen < BLOCK_N, 0, -1)
        v_fields = load_v(
            anchor_ptr,
            residual_ptr,
            first,
            (near_mask | all_seen, far_mask | all_seen),
            ANCHOR_BITS=ANCHOR_BITS,
            PAGE_SIZE=PAGE_SIZE,
            HEAD_DIM=HEAD_DIM,
            CODES=V_CODES,
            OFFSET=V_OFFSET,
            SCALE=V_SCALE,
            CORRECTIONS=V_CORRECTIONS,
        )
        k = decode_k(k_fields, HEAD_DIM, INTERPRET)
        # Rows without a query have scores of 0, and nothing reads what becomes of them.
        scores = tl.dot(q, k, input_precision="ieee")
        v = decode_v(v_fields, HEAD_DIM, INTERPRET)
        if num_seen < BLOCK_N:
            scores = tl.where((tokens < num_seen)[None, :], scores, float("-inf"))
        # Scaled after the maximum, so that scaling and subtracting it are one operation.
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        acc, top, total = attend_by_scores(
            scores, v, scale, acc, top, new_top, total, DTYPE=DTYPE, INTERPRET=INTERPRET
        )
    # Values may be a little more than DTYPE has, as scales are rounded.
    most = (total * FINITE_MAX)[:, None]
    return tl.minimum(tl.maximum(acc * OPERAND_UNIT, -most), most), top, total

"""Triton kernel that joins two attention states over disjoint keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_states_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Row of state a and b, contiguous, into out and lse, base 2. Grid: (tokens, heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token * NUM_HEADS + head
    lse_a, lse_b = tl.load(lse_a_ptr + row), tl.load(lse_b_ptr + row)
    top = tl.maximum(lse_a, lse_b)
    # Without any token both are -inf; their difference would be NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp2(lse_a - base), tl.exp2(lse_b - base)
    total = weight_a + weight_b
    scale = tl.where(total > 0, 1.0 / total, 0.0)
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    a = tl.load(out_a_ptr + row * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(out_b_ptr + row * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)
    merged = (a * weight_a + b * weight_b) * scale
    out_row = out_ptr + token * stride_out_token + head * stride_out_head
    tl.store(out_row + d, merged.to(out_ptr.dtype.element_ty), mask=inside)
    lse_row = lse_ptr + token * stride_lse_token + head * stride_lse_head
    tl.store(lse_row, tl.where(total > 0, base + tl.log2(total), float("-inf")))

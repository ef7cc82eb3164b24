"""Triton kernel that writes the newest tokens into the recent window."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.sizes import next_power_of_2


@triton.jit
def append_kernel(
    k_new_ptr,
    v_new_ptr,
    window_k_ptr,
    window_v_ptr,
    slots_ptr,
    offsets_ptr,
    num_heads,
    stride_new,
    stride_new_head,
    stride_page,
    stride_token,
    stride_head,
    HEAD_DIM: tl.constexpr,
):
    """Write one row, head and part a program: grid (rows * 2 * num_heads,).

    Tokens and window are pairs of channels; their strides count pairs.
    """
    pid = tl.program_id(0)
    head = pid % num_heads
    is_v = pid // num_heads % 2 == 1
    row = pid // (2 * num_heads)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    token = tl.load(offsets_ptr + row).to(tl.int64)
    new_ptr = v_new_ptr if is_v else k_new_ptr
    window_ptr = window_v_ptr if is_v else window_k_ptr
    if slot >= 0:
        pair = tl.arange(0, next_power_of_2(HEAD_DIM // 2))
        mask = pair < HEAD_DIM // 2
        start = row.to(tl.int64) * stride_new + head * stride_new_head
        pairs = tl.load(new_ptr + start + pair, mask, other=0)
        target = slot * stride_page + token * stride_token + head * stride_head
        tl.store(window_ptr + target + pair, pairs, mask)

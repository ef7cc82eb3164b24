"""The newest tokens into the recent window, and pages of the window into records."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.encode import encode_page
from kvspec_kernels.jit.sizes import next_power_of_2


@triton.jit(do_not_specialize=["one"])
def append_kernel(
    k_new_ptr,
    v_new_ptr,
    window_k_ptr,
    window_v_ptr,
    slots_ptr,
    offsets_ptr,
    encode_source_ptr,
    anchors_ptr,
    anchor_slots_ptr,
    residuals_ptr,
    residual_slots_ptr,
    edges_ptr,
    one,
    num_heads,
    stride_new,
    stride_new_head,
    stride_page,
    stride_head,
    stride_anchor,
    stride_anchor_head,
    stride_residual,
    stride_residual_head,
    stride_token: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    PART_WORDS: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    CODEC: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    EXACT: tl.constexpr,
    K_CHUNK: tl.constexpr,
    V_CHUNK: tl.constexpr,
    K_FIELDS: tl.constexpr,
    V_FIELDS: tl.constexpr,
    LAW: tl.constexpr,
):
    """One row, head and part a program: grid (rows * 2 * num_heads,).

    Tokens and window are pairs of channels, their strides in pairs; the rest as in `encode.py`.
    """
    pid = tl.program_id(0)
    head = pid % num_heads
    is_v = pid // num_heads % 2 == 1
    row = pid // (2 * num_heads)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    token = tl.load(offsets_ptr + row).to(tl.int64)
    page = tl.load(encode_source_ptr + row).to(tl.int64)
    new_ptr = v_new_ptr if is_v else k_new_ptr
    window_ptr = window_v_ptr if is_v else window_k_ptr
    if slot >= 0:
        pair = tl.arange(0, next_power_of_2(HEAD_DIM // 2))
        mask = pair < HEAD_DIM // 2
        start = row.to(tl.int64) * stride_new + head * stride_new_head
        pairs = tl.load(new_ptr + start + pair, mask, other=0)
        target = slot * stride_page + token * stride_token + head * stride_head
        tl.store(window_ptr + target + pair, pairs, mask)
    if page >= 0:
        # The page may be the one that other threads of this program have just written to.
        tl.debug_barrier()
        encode_page(
            window_k_ptr,
            window_v_ptr,
            page,
            anchors_ptr,
            tl.load(anchor_slots_ptr + row).to(tl.int64),
            residuals_ptr,
            tl.load(residual_slots_ptr + row).to(tl.int64),
            edges_ptr,
            one,
            head,
            is_v,
            stride_page,
            stride_head,
            stride_anchor,
            stride_anchor_head,
            stride_residual,
            stride_residual_head,
            stride_token,
            PAGE_SIZE,
            HEAD_DIM,
            TILE_GROUP,
            PART_WORDS,
            KV_DTYPE,
            CODEC,
            ANCHOR_BITS,
            EXACT,
            K_CHUNK,
            V_CHUNK,
            K_FIELDS,
            V_FIELDS,
            LAW,
        )

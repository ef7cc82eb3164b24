"""Triton kernel that encodes a layer's pages: a program takes K or V of one page and head."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit import page_pairs


@triton.jit
def _encode_part(
    page_ptr,
    anchor_ptr,
    part_ptr,
    edges_ptr,
    one,
    ENCODE: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    stride_token: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    EXACT: tl.constexpr,
    LAW: tl.constexpr,
):
    """Write one part of the two records. Arguments are those of `records.py`. ENCODE: the
    codec's function for the part."""
    if EXACT:
        # Copy first: the reads below take half sectors, and then hit the L1 cache.
        bits_ptr = part_ptr.to(page_ptr.dtype)
        page_pairs.copy_page(page_ptr, bits_ptr, stride_token, HEAD_DIM // 2, PAGE_SIZE)
    ENCODE(
        page_ptr,
        anchor_ptr,
        part_ptr,
        edges_ptr,
        one,
        stride_token,
        PAGE_SIZE,
        HEAD_DIM,
        CHUNK,
        FIELDS,
        TILE_GROUP,
        KV_DTYPE,
        ANCHOR_BITS,
        not EXACT,
        LAW,
    )


@triton.jit(do_not_specialize=["one"])
def encode_kernel(
    k_ptr,
    v_ptr,
    source_ptr,
    anchors_ptr,
    anchor_slots_ptr,
    residuals_ptr,
    residual_slots_ptr,
    edges_ptr,
    one,
    num_heads,
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
    ENCODE_K: tl.constexpr,
    ENCODE_V: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    EXACT: tl.constexpr,
    K_CHUNK: tl.constexpr,
    V_CHUNK: tl.constexpr,
    K_FIELDS: tl.constexpr,
    V_FIELDS: tl.constexpr,
    LAW: tl.constexpr,
):
    """Encode one page, head and part a program: grid (entries * 2 * num_heads,).

    one: 1, but unknown to the compiler, which would otherwise give every thread 16 contiguous
    bytes. A thread with fewer channels and more tokens prepares less metadata.

    k_ptr, v_ptr: pairs of channels, int32 or int64; strides in pairs. anchors_ptr, residuals_ptr:
    int32; strides in words. PART_WORDS: words of one part of the residual record. ENCODE_K,
    ENCODE_V: the codec's functions for a part, with the arguments of `records.py`. EXACT: True for
    the target exact, False for int8. K_CHUNK to V_FIELDS: CHUNK and FIELDS of `records.py`. LAW: as
    in `encode_log4.py`, else empty.
    """
    pid = tl.program_id(0)
    entry = pid // (2 * num_heads)
    page = tl.load(source_ptr + entry).to(tl.int64)
    if page >= 0:
        head = pid % num_heads
        is_v = pid // num_heads % 2 == 1
        anchor = tl.load(anchor_slots_ptr + entry).to(tl.int64)
        residual = tl.load(residual_slots_ptr + entry).to(tl.int64)
        offset = page * stride_page + head * stride_head
        anchor_ptr = anchors_ptr + anchor * stride_anchor + head * stride_anchor_head
        residual_ptr = residuals_ptr + residual * stride_residual + head * stride_residual_head
        if is_v:
            _encode_part(
                v_ptr + offset,
                anchor_ptr,
                residual_ptr + PART_WORDS,
                edges_ptr,
                one,
                ENCODE_V,
                V_CHUNK,
                V_FIELDS,
                stride_token,
                PAGE_SIZE,
                HEAD_DIM,
                TILE_GROUP,
                KV_DTYPE,
                ANCHOR_BITS,
                EXACT,
                LAW,
            )
        else:
            _encode_part(
                k_ptr + offset,
                anchor_ptr,
                residual_ptr,
                edges_ptr,
                one,
                ENCODE_K,
                K_CHUNK,
                K_FIELDS,
                stride_token,
                PAGE_SIZE,
                HEAD_DIM,
                TILE_GROUP,
                KV_DTYPE,
                ANCHOR_BITS,
                EXACT,
                LAW,
            )

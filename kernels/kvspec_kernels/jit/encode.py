"""Encoding of a layer's pages: a program takes K or V of one page and head."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit import pages, records


@triton.jit
def encode_part(
    page_ptr,
    anchor_ptr,
    residual_ptr,
    edges_ptr,
    one,
    IS_V: tl.constexpr,
    stride_token: tl.constexpr,
    SHAPE: tl.constexpr,
    CODEC: tl.constexpr,
    KV_DTYPE: tl.constexpr,
):
    """Write one part of the two records of a page and head.

    page_ptr: pairs of the page's first token. anchor_ptr, residual_ptr, int32: the records.
    SHAPE, CODEC, KV_DTYPE: see `encode_kernel`.
    """
    PAGE_SIZE: tl.constexpr = SHAPE[0]
    HEAD_DIM: tl.constexpr = SHAPE[1]
    TILE_GROUP: tl.constexpr = SHAPE[2]
    PART_WORDS: tl.constexpr = SHAPE[3]
    CHUNK: tl.constexpr = CODEC[1][IS_V]
    FIELDS: tl.constexpr = CODEC[2][IS_V]
    EXACT: tl.constexpr = CODEC[3]
    part_ptr = residual_ptr + PART_WORDS * IS_V
    if EXACT:
        # First, so that the reads below, which have no whole sectors, hit the L1.
        target_ptr = part_ptr.to(page_ptr.dtype)
        pages.copy_page(page_ptr, target_ptr, stride_token, HEAD_DIM // 2, PAGE_SIZE)
    if CODEC[0] == "log4":
        EDGES: tl.constexpr = CODEC[4]
        LAW: tl.constexpr = CODEC[5]
        encode: tl.constexpr = records.log4_v if IS_V else records.log4_k
        encode(
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
            EDGES,
            LAW,
        )
    elif IS_V:
        records.uniform4_v(
            page_ptr,
            anchor_ptr,
            part_ptr,
            stride_token,
            PAGE_SIZE,
            HEAD_DIM,
            FIELDS,
            TILE_GROUP,
            KV_DTYPE,
            not EXACT,
        )
    else:
        records.uniform4_k(
            page_ptr,
            anchor_ptr,
            part_ptr,
            one,
            stride_token,
            PAGE_SIZE,
            HEAD_DIM,
            CHUNK,
            FIELDS,
            TILE_GROUP,
            KV_DTYPE,
            not EXACT,
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
    SHAPE: tl.constexpr,
    CODEC: tl.constexpr,
    KV_DTYPE: tl.constexpr,
):
    """One page, head and part a program: grid (entries * 2 * num_heads,).

    k_ptr, v_ptr: pairs of channels, int32 or int64; strides in pairs. anchors_ptr, residuals_ptr:
    int32; strides in words. SHAPE: (page size, head size, tiles of a group, words of a part of the
    residual record). CODEC: (name, tokens of a chunk of K and of V, FIELDS of K and of V, target is
    exact, and for log4 EDGES and LAW), as `records.py` has them; EDGES are empty for the target
    int8. one: 1, unknown to the compiler, which would otherwise give every thread 16 contiguous
    bytes; a thread with fewer channels and more tokens prepares less metadata.
    """
    pid = tl.program_id(0)
    head = pid % num_heads
    is_v = pid // num_heads % 2
    entry = pid // (2 * num_heads)
    page = tl.load(source_ptr + entry).to(tl.int64)
    if page >= 0:
        offset = page * stride_page + head * stride_head
        anchor = tl.load(anchor_slots_ptr + entry).to(tl.int64)
        residual = tl.load(residual_slots_ptr + entry).to(tl.int64)
        anchor_ptr = anchors_ptr + anchor * stride_anchor + head * stride_anchor_head
        residual_ptr = residuals_ptr + residual * stride_residual + head * stride_residual_head
        if is_v:
            encode_part(
                v_ptr + offset,
                anchor_ptr,
                residual_ptr,
                edges_ptr,
                one,
                True,
                stride_token,
                SHAPE,
                CODEC,
                KV_DTYPE,
            )
        else:
            encode_part(
                k_ptr + offset,
                anchor_ptr,
                residual_ptr,
                edges_ptr,
                one,
                False,
                stride_token,
                SHAPE,
                CODEC,
                KV_DTYPE,
            )

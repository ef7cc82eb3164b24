"""Kernels that score pages by the queries of verified tokens, and select pages for drafts.
Semantics: `reference/page_selection.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.hadamard import load_signs, rotate
from kvspec_kernels.jit.pages import load_keys
from kvspec_kernels.jit.rounding import rounded

# Bits of the largest fp32 value that a mass is ranked by: infinity.
MOST_BITS = tl.constexpr(0x7F800000)


@triton.jit
def page_lse_kernel(
    q_ptr,
    anchors_ptr,
    table_ptr,
    indptr_ptr,
    indices_ptr,
    q_begin_ptr,
    num_queries_ptr,
    lse_ptr,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_anchor_page,
    stride_anchor_head,
    DECODE: tl.constexpr,
    ROTATES: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_CODES: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    FINITE_MAX: tl.constexpr,
    INTERPRET: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the log-sum-exp, to base 2, of each query row over each page of a request and KV head:
    lse [num_indices, NUM_KV_HEADS, NUM_ROWS] fp32. Rows are queries times query heads of the KV
    head. A program takes the rows of one KV head, and one of NUM_SPLITS parts of the pages."""
    request = tl.program_id(0)
    split = tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(indptr_ptr + request)
    num_pages = tl.load(indptr_ptr + request + 1) - begin
    part = (num_pages + NUM_SPLITS - 1) // NUM_SPLITS
    first = split * part
    end = tl.minimum(first + part, num_pages)
    num_rows = tl.load(num_queries_ptr + request) * GROUP
    if first >= end or num_rows == 0:
        return

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = offs_m < num_rows
    q_begin = tl.load(q_begin_ptr + request)
    q_rows = (q_begin + offs_m // GROUP).to(tl.int64) * stride_q_token
    q_rows += (head * GROUP + offs_m % GROUP) * stride_q_head
    q = tl.load(
        q_ptr + q_rows[:, None] + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    if ROTATES:
        q = rotate(q, load_signs(table_ptr, offs_d, ANCHOR_BITS, HEAD_DIM), HEAD_DIM)
    q = rounded(q, DTYPE, INTERPRET)
    for index in range(first, end):
        page = tl.load(indices_ptr + begin + index).to(tl.int64)
        anchor_ptr = anchors_ptr + page * stride_anchor_page + head * stride_anchor_head
        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        for block in tl.static_range(0, PAGE_SIZE, BLOCK_N):
            k = load_keys(
                anchor_ptr,
                table_ptr,
                block,
                offs_d,
                DECODE=DECODE,
                ANCHOR_BITS=ANCHOR_BITS,
                PAGE_SIZE=PAGE_SIZE,
                HEAD_DIM=HEAD_DIM,
                K_CHUNK=K_CHUNK,
                K_CODES=K_CODES,
                K_OFFSET=K_OFFSET,
                K_SCALE=K_SCALE,
                DTYPE=DTYPE,
                FINITE_MAX=FINITE_MAX,
                INTERPRET=INTERPRET,
                BLOCK_N=BLOCK_N,
            )
            scores = tl.dot(q, k, input_precision="ieee") * scale_log2
            if BLOCK_N > PAGE_SIZE:
                scores = tl.where((offs_n < PAGE_SIZE)[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            total = total * tl.exp2(top - new_top)
            total += tl.sum(tl.exp2(scores - new_top[:, None]), axis=1)
            top = new_top
        row = ((begin + index).to(tl.int64) * NUM_KV_HEADS + head) * NUM_ROWS + offs_m
        tl.store(lse_ptr + row, top + tl.log2(total), mask=mask_m)


@triton.jit
def page_mass_kernel(
    lse_ptr,
    indptr_ptr,
    num_queries_ptr,
    slots_ptr,
    num_known_ptr,
    mass_ptr,
    stride_mass_slot,
    stride_mass_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Update the mass of the pages of one request and KV head. The first num_known pages have a
    mass already. A full set of NUM_ROWS rows replaces it, and fewer rows replace as large a share.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(indptr_ptr + request)
    end = tl.load(indptr_ptr + request + 1)
    num_rows = tl.load(num_queries_ptr + request) * GROUP
    if begin >= end or num_rows == 0:
        return
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < num_rows
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for first in range(begin, end, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        row = (offs_p.to(tl.int64) * NUM_KV_HEADS + head) * NUM_ROWS
        lse = tl.load(
            lse_ptr + row[:, None] + offs_m[None, :],
            mask=(offs_p < end)[:, None] & mask_m[None, :],
            other=float("-inf"),
        )
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        # Rows without a query stay at -inf; -inf minus -inf would be NaN.
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - finite_top)
        total += tl.sum(tl.exp2(lse - finite_top[None, :]), axis=0)
        top = new_top
    # A total of 1, where there is no row, only avoids the logarithm of 0.
    whole = tl.where(mask_m, top + tl.log2(tl.where(mask_m, total, 1.0)), float("inf"))
    num_known = tl.load(num_known_ptr + request)
    weight = num_rows.to(tl.float32) / NUM_ROWS
    own_ptr = mass_ptr + tl.load(slots_ptr + request).to(tl.int64) * stride_mass_slot
    own_ptr += head * stride_mass_head
    for first in range(begin, end, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        row = (offs_p.to(tl.int64) * NUM_KV_HEADS + head) * NUM_ROWS
        lse = tl.load(
            lse_ptr + row[:, None] + offs_m[None, :],
            mask=(offs_p < end)[:, None] & mask_m[None, :],
            other=float("-inf"),
        )
        mass = tl.sum(tl.exp2(lse - whole[None, :]), axis=1) / num_rows
        place = offs_p - begin
        is_known = (place < num_known) & (offs_p < end)
        known = tl.load(own_ptr + place, mask=is_known, other=0.0)
        mass = tl.where(is_known, known + weight * (mass - known), mass)
        tl.store(own_ptr + place, mass, mask=offs_p < end)


@triton.jit
def select_kernel(
    mass_ptr,
    indptr_ptr,
    indices_ptr,
    slots_ptr,
    out_ptr,
    out_indptr_ptr,
    num_last_ptr,
    unread_ptr,
    stride_mass_layer,
    stride_mass_slot,
    stride_mass_head,
    stride_out_index,
    stride_out_layer,
    NUM_FIRST: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write the ids of the selected pages of one request, KV head and layer, in order, and the mass
    of the pages that are not selected: unread [max_batch, num_layers, num_kv_heads] fp32. -1 fills
    a list that is longer than the request has pages."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    layer = tl.program_id(2)
    begin = tl.load(indptr_ptr + request)
    num_pages = tl.load(indptr_ptr + request + 1) - begin
    out_begin = tl.load(out_indptr_ptr + request)
    num_out = tl.load(out_indptr_ptr + request + 1) - out_begin
    if num_out == 0:
        return
    num_last = tl.load(num_last_ptr + request)
    count = tl.minimum(num_out, num_pages)
    offs = tl.arange(0, BLOCK_P)
    is_page = offs < num_pages
    own_ptr = mass_ptr + layer.to(tl.int64) * stride_mass_layer + head * stride_mass_head
    own_ptr += tl.load(slots_ptr + request).to(tl.int64) * stride_mass_slot
    mass = tl.load(own_ptr + offs, mask=is_page, other=0.0)
    # Values of fp32 that are not negative are in the order of their bits.
    bits = mass.to(tl.int32, bitcast=True)
    bits = tl.where((offs < NUM_FIRST) | (offs >= num_pages - num_last), MOST_BITS, bits)
    bits = tl.where(is_page, bits, -1)
    # The largest threshold that `count` pages reach, bit by bit.
    threshold = 0
    for step in tl.static_range(0, 31):
        larger = threshold | (1 << (30 - step))
        reached = tl.sum((bits >= larger).to(tl.int32), axis=0)
        threshold = tl.where(reached >= count, larger, threshold)
    above = bits > threshold
    at = bits == threshold
    num_above = tl.sum(above.to(tl.int32), axis=0)
    rank = tl.cumsum(at.to(tl.int32), axis=0)
    chosen = above | (at & (rank <= count - num_above))
    unread = tl.sum(tl.where(is_page & (chosen == 0), mass, 0.0), axis=0)
    this_list = (request * tl.num_programs(2) + layer) * tl.num_programs(1) + head
    tl.store(unread_ptr + this_list, unread)
    place = out_begin + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    pages = tl.load(indices_ptr + begin + offs, mask=is_page, other=-1)
    row = out_ptr + layer * stride_out_layer + head
    tl.store(row + place.to(tl.int64) * stride_out_index, pages, mask=chosen)
    spare = out_begin + offs
    tl.store(
        row + spare.to(tl.int64) * stride_out_index,
        tl.full([BLOCK_P], -1, dtype=tl.int32),
        mask=(offs >= count) & (offs < num_out),
    )


@triton.jit
def mean_unread_kernel(
    unread_ptr,
    slots_ptr,
    out_indptr_ptr,
    mean_ptr,
    NUM_LISTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the mean of a request's unread [NUM_LISTS], of all layers and KV heads, to its slot in
    mean, which may be pinned host memory."""
    request = tl.program_id(0)
    if tl.load(out_indptr_ptr + request) == tl.load(out_indptr_ptr + request + 1):
        return
    offs = tl.arange(0, BLOCK)
    unread = tl.load(unread_ptr + request * NUM_LISTS + offs, mask=offs < NUM_LISTS, other=0.0)
    slot = tl.load(slots_ptr + request)
    tl.store(mean_ptr + slot, tl.sum(unread, axis=0) / NUM_LISTS)

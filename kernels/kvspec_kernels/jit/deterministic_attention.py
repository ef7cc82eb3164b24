"""Triton kernel of deterministic attention: pages in one order, independent of the batch."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.attention import attend
from kvspec_kernels.jit.rounding import operand, rounded


@triton.jit(do_not_specialize=["stride_q_token", "stride_tail_slot"])
def deterministic_attention_kernel(
    q_ptr,
    out_ptr,
    qo_indptr_ptr,
    past_indptr_ptr,
    past_slots_ptr,
    tail_indptr_ptr,
    tail_slots_ptr,
    tail_lens_ptr,
    past_pages_ptr,
    past_k_ptr,
    past_v_ptr,
    tail_k_ptr,
    tail_v_ptr,
    scale,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_past_slot,
    stride_past_head,
    stride_past_token,
    stride_tail_slot,
    stride_tail_head,
    stride_tail_token,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attend for rows of one request and KV head a program: grid (row blocks, requests,
    num_kv_heads).

    A row is a query token and one of the GROUP heads that share the KV head. Past and tail go
    through the same instructions, page after page. A page that a row does not see adds exactly
    nothing to that row. So the bits of a row depend neither on the border between past and tail nor
    on other rows or their number. scale: factor of scores, to base 2.
    """
    request = tl.program_id(1)
    head = tl.program_id(2)
    first_query = tl.load(qo_indptr_ptr + request).to(tl.int64)
    num_queries = (tl.load(qo_indptr_ptr + request + 1) - first_query).to(tl.int32)
    first_row = tl.program_id(0) * BLOCK_ROWS
    if first_row < num_queries * GROUP:
        row = first_row + tl.arange(0, BLOCK_ROWS)
        token = row // GROUP
        mask_row = token < num_queries
        offs_dim = tl.arange(0, BLOCK_DIM)
        mask_dim = offs_dim < HEAD_DIM
        q_head = head * GROUP + row % GROUP
        query = first_query + token
        q_place = query[:, None] * stride_q_token + q_head[:, None] * stride_q_head
        mask_q = mask_row[:, None] & mask_dim[None, :]
        q = tl.load(q_ptr + q_place + offs_dim[None, :], mask=mask_q, other=0.0)
        q = operand(q, INTERPRET)

        first_past = tl.load(past_indptr_ptr + request)
        num_past = tl.load(past_indptr_ptr + request + 1) - first_past
        first_tail = tl.load(tail_indptr_ptr + request) - num_past
        num_tokens = num_past * PAGE_SIZE + tl.load(tail_lens_ptr + request)
        # Row r sees the tokens before num_seen[r].
        num_seen = num_tokens - num_queries + token + 1
        last = tl.minimum((first_row + BLOCK_ROWS - 1) // GROUP, num_queries - 1)
        num_pages = tl.cdiv(num_tokens - num_queries + last + 1, PAGE_SIZE)

        offs_page = tl.arange(0, PAGE_SIZE)
        acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
        top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        for i in range(num_pages):
            is_past = i < num_past
            page = tl.load(past_pages_ptr + first_past + i, mask=is_past, other=0)
            past_slot = tl.load(past_slots_ptr + page, mask=is_past, other=0).to(tl.int64)
            tail_slot = tl.load(tail_slots_ptr + first_tail + i, mask=i >= num_past, other=0)
            past_place = past_slot * stride_past_slot + head * stride_past_head
            tail_place = tail_slot.to(tl.int64) * stride_tail_slot + head * stride_tail_head
            stride_token = tl.where(is_past, stride_past_token, stride_tail_token)
            k_ptr = tl.where(is_past, past_k_ptr + past_place, tail_k_ptr + tail_place)
            v_ptr = tl.where(is_past, past_v_ptr + past_place, tail_v_ptr + tail_place)
            position = i * PAGE_SIZE + offs_page
            # Memory behind a request's last token may hold anything.
            mask_kv = (position < num_tokens)[:, None] & mask_dim[None, :]
            place = offs_page[:, None] * stride_token + offs_dim[None, :]
            k = operand(tl.load(k_ptr + place, mask=mask_kv, other=0.0), INTERPRET)
            v = operand(tl.load(v_ptr + place, mask=mask_kv, other=0.0), INTERPRET)
            visible = position[None, :] < num_seen[:, None]
            acc, top, total = attend(
                q, tl.trans(k), v, visible, scale, acc, top, total, DTYPE=DTYPE, INTERPRET=INTERPRET
            )
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_place = query[:, None] * stride_out_token + q_head[:, None] * stride_out_head
        out = rounded(out, DTYPE, INTERPRET)
        tl.store(out_ptr + out_place + offs_dim[None, :], out, mask=mask_q)

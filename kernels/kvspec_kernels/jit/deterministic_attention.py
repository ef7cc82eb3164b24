"""Triton kernels of deterministic attention: pages in one order, independent of the batch."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.rounding import operand, rounded
from kvspec_kernels.jit.softmax import attend


@triton.jit
def merge(acc, top, total, part_acc, part_top, part_total):
    """Add the state of a chunk to that of the chunks before it. The multiply-adds are explicit, so
    that every kernel rounds alike. A chunk that a row does not see changes no bit of it."""
    new_top = tl.maximum(top, part_top)
    # For rows that have seen no token yet, -inf minus -inf would be NaN.
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    before = tl.exp2(top - finite_top)
    after = tl.exp2(part_top - finite_top)
    acc = tl.fma(acc, tl.broadcast_to(before[:, None], acc.shape), part_acc * after[:, None])
    return acc, new_top, tl.fma(total, before, part_total * after)


@triton.jit
def store_output(out_ptr, place, acc, total, mask, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Store weighted means. Rows without a token are 0."""
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + place, rounded(out, DTYPE, INTERPRET), mask=mask)


@triton.jit(do_not_specialize=["stride_q_token", "stride_tail_slot", "max_chunks"])
def deterministic_attention_kernel(
    q_ptr,
    out_ptr,
    parts_ptr,
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
    max_chunks,
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
    SPLIT: tl.constexpr,
    CHUNK_PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NUM_QO_HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attend for rows of one request and KV head a program: grid (row blocks, requests,
    num_kv_heads).

    A row is a query token and one of the GROUP heads that share the KV head. Past and tail go
    through the same instructions, page after page. Chunks of CHUNK_PAGES pages, counted from the
    request's first token, are attended to on their own and merged in order. A page or chunk that a
    row does not see adds exactly nothing to that row. So the bits of a row depend neither on the
    border between past and tail nor on other rows or their number. scale: factor of scores, to base
    2.

    SPLIT: a program has one chunk: grid (row blocks, requests * max_chunks, num_kv_heads). It
    writes its part to parts_ptr [tokens, max_chunks, NUM_QO_HEADS, HEAD_DIM + 2] fp32, which
    merge_chunks_kernel merges.
    """
    head = tl.program_id(2)
    request = tl.program_id(1)
    first_chunk = 0
    if SPLIT:
        request = tl.program_id(1) // max_chunks
        first_chunk = tl.program_id(1) % max_chunks
    first_query = tl.load(qo_indptr_ptr + request).to(tl.int64)
    num_queries = (tl.load(qo_indptr_ptr + request + 1) - first_query).to(tl.int32)
    first_row = tl.program_id(0) * BLOCK_ROWS
    first_past = tl.load(past_indptr_ptr + request)
    num_past = tl.load(past_indptr_ptr + request + 1) - first_past
    num_tokens = num_past * PAGE_SIZE + tl.load(tail_lens_ptr + request)
    last = tl.minimum((first_row + BLOCK_ROWS - 1) // GROUP, num_queries - 1)
    num_pages = tl.cdiv(num_tokens - num_queries + last + 1, PAGE_SIZE)
    num_chunks = tl.cdiv(num_pages, CHUNK_PAGES)
    if (first_row < num_queries * GROUP) & ((first_chunk < num_chunks) | (not SPLIT)):
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
        first_tail = tl.load(tail_indptr_ptr + request) - num_past
        # Row r sees the tokens before num_seen[r].
        num_seen = num_tokens - num_queries + token + 1

        offs_page = tl.arange(0, PAGE_SIZE)
        whole_acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
        whole_top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        whole_total = tl.zeros((BLOCK_ROWS,), tl.float32)
        last_chunk = num_chunks
        if SPLIT:
            last_chunk = first_chunk + 1
        for chunk in range(first_chunk, last_chunk):
            acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
            top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_ROWS,), tl.float32)
            end = tl.minimum((chunk + 1) * CHUNK_PAGES, num_pages)
            for i in range(chunk * CHUNK_PAGES, end):
                is_past = i < num_past
                page = tl.load(past_pages_ptr + first_past + i, mask=is_past, other=0)
                past_slot = tl.load(past_slots_ptr + page, mask=is_past, other=0).to(tl.int64)
                tail_slot = tl.load(tail_slots_ptr + first_tail + i, mask=i >= num_past, other=0)
                past_place = past_slot * stride_past_slot + head * stride_past_head
                tail_place = tail_slot.to(tl.int64) * stride_tail_slot + head * stride_tail_head
                # The compiler does not see that either choice allows loads of 16 bytes.
                stride_token = tl.where(is_past, stride_past_token, stride_tail_token)
                stride_token = tl.multiple_of(stride_token, 16)
                k_ptr = tl.where(is_past, past_k_ptr + past_place, tail_k_ptr + tail_place)
                v_ptr = tl.where(is_past, past_v_ptr + past_place, tail_v_ptr + tail_place)
                k_ptr, v_ptr = tl.multiple_of(k_ptr, 16), tl.multiple_of(v_ptr, 16)
                position = i * PAGE_SIZE + offs_page
                # Memory behind a request's last token may hold anything.
                mask_kv = (position < num_tokens)[:, None] & mask_dim[None, :]
                place = offs_page[:, None] * stride_token + offs_dim[None, :]
                k = operand(tl.load(k_ptr + place, mask=mask_kv, other=0.0), INTERPRET)
                v = operand(tl.load(v_ptr + place, mask=mask_kv, other=0.0), INTERPRET)
                visible = position[None, :] < num_seen[:, None]
                acc, top, total = attend(
                    q,
                    tl.trans(k),
                    v,
                    visible,
                    scale,
                    acc,
                    top,
                    total,
                    DTYPE=DTYPE,
                    INTERPRET=INTERPRET,
                )
            if SPLIT:
                whole_acc, whole_top, whole_total = acc, top, total
            else:
                whole_acc, whole_top, whole_total = merge(
                    whole_acc, whole_top, whole_total, acc, top, total
                )
        if SPLIT:
            part = (query * max_chunks + first_chunk) * NUM_QO_HEADS + q_head
            part_ptr = parts_ptr + part * (HEAD_DIM + 2)
            tl.store(part_ptr[:, None] + offs_dim[None, :], whole_acc, mask=mask_q)
            tl.store(part_ptr + HEAD_DIM, whole_top, mask=mask_row)
            tl.store(part_ptr + HEAD_DIM + 1, whole_total, mask=mask_row)
        else:
            out_place = query[:, None] * stride_out_token + q_head[:, None] * stride_out_head
            out_place += offs_dim[None, :]
            store_output(out_ptr, out_place, whole_acc, whole_total, mask_q, DTYPE, INTERPRET)


@triton.jit(do_not_specialize=["max_chunks"])
def merge_chunks_kernel(
    out_ptr,
    parts_ptr,
    qo_indptr_ptr,
    past_indptr_ptr,
    tail_lens_ptr,
    max_chunks,
    stride_out_token,
    stride_out_head,
    CHUNK_PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NUM_QO_HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Merge the parts of a token's GROUP rows, in order: grid (tokens of a request, requests,
    num_kv_heads). BLOCK_ROWS: at least GROUP."""
    token = tl.program_id(0)
    request = tl.program_id(1)
    head = tl.program_id(2)
    first_query = tl.load(qo_indptr_ptr + request).to(tl.int64)
    num_queries = (tl.load(qo_indptr_ptr + request + 1) - first_query).to(tl.int32)
    if token < num_queries:
        num_past = tl.load(past_indptr_ptr + request + 1) - tl.load(past_indptr_ptr + request)
        num_tokens = num_past * PAGE_SIZE + tl.load(tail_lens_ptr + request)
        num_seen = num_tokens - num_queries + token + 1
        num_chunks = tl.cdiv(tl.cdiv(num_seen, PAGE_SIZE), CHUNK_PAGES)
        in_group = tl.arange(0, BLOCK_ROWS)
        offs_dim = tl.arange(0, BLOCK_DIM)
        mask_row = in_group < GROUP
        mask = mask_row[:, None] & (offs_dim < HEAD_DIM)[None, :]
        acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
        top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        for chunk in range(num_chunks):
            part = ((first_query + token) * max_chunks + chunk) * NUM_QO_HEADS
            part_ptr = parts_ptr + (part + head * GROUP + in_group) * (HEAD_DIM + 2)
            part_acc = tl.load(part_ptr[:, None] + offs_dim[None, :], mask=mask, other=0.0)
            part_top = tl.load(part_ptr + HEAD_DIM, mask=mask_row, other=float("-inf"))
            part_total = tl.load(part_ptr + HEAD_DIM + 1, mask=mask_row, other=0.0)
            acc, top, total = merge(acc, top, total, part_acc, part_top, part_total)
        place = (first_query + token) * stride_out_token
        place += (head * GROUP + in_group)[:, None] * stride_out_head + offs_dim[None, :]
        store_output(out_ptr, place, acc, total, mask, DTYPE, INTERPRET)

"""Attention over encoded pages, split over work items (`work_items.py`), and the merge of the
parts. Semantics: `reference/attention.py`. This portable path loads every code separately, for any
codec and head size. Drafts of few query rows from 4-bit uniform4 run `word_attention.py`, and
verifications of uniform4 at the target int8 attend to pages as in `refined_attention.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.hadamard import load_signs, rotate, rotate_back
from kvspec_kernels.jit.pages import (
    find_page,
    find_page_list,
    load_encoded,
    load_exact,
    load_rows,
)
from kvspec_kernels.jit.refined_attention import attend_to_refined
from kvspec_kernels.jit.rounding import rounded
from kvspec_kernels.jit.softmax import attend, concluded
from kvspec_kernels.jit.work_items import find_item, find_queries, split_batch

# Not specialised, so that another batch size needs no other kernel.
SIZES = ("batch_size", "num_items", "num_rows")


@triton.jit(do_not_specialize=SIZES)
def attention_kernel(
    q_ptr,
    anchors_ptr,
    residuals_ptr,
    residual_slots_ptr,
    table_ptr,
    indptr_ptr,
    indices_ptr,
    last_page_len_ptr,
    qo_indptr_ptr,
    tail_k_ptr,
    tail_v_ptr,
    tail_indptr_ptr,
    tail_indices_ptr,
    tail_lens_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    batch_size,
    num_items,
    num_rows,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_anchor_page,
    stride_anchor_head,
    stride_residual_slot,
    stride_residual_head,
    stride_k_slot,
    stride_k_token,
    stride_k_head,
    stride_v_slot,
    stride_v_token,
    stride_v_head,
    stride_index: tl.constexpr,
    LISTS_BY_HEAD: tl.constexpr,
    DECODE: tl.constexpr,
    ROTATES: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    SOURCE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    K_CHUNK: tl.constexpr,
    V_CHUNK: tl.constexpr,
    K_CODES: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_CODES: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_RESIDUAL: tl.constexpr,
    V_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
    FINITE_MAX: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ITEM_UNITS: tl.constexpr,
    REFINED_STAGES: tl.constexpr,
):
    """Attend for one work item, KV head and block of BLOCK_M rows (query tokens times query heads
    of the KV head). Writes partial_out [num_items, NUM_KV_HEADS, num_rows, HEAD_DIM] fp32 and
    partial_lse.

    Pointers to the tail are None if there is no tail. qo_indptr_ptr is None if every request has
    ROWS query tokens. LISTS_BY_HEAD: indices are [num_indices, NUM_KV_HEADS], -1 for no page.
    DECODE: as in `pages.py`. ROTATES: DECODE gives rotated values, so pages are read with a rotated
    query, and the sum over pages is rotated back before the tail is added. K_CODES to
    V_RESIDUAL: byte offsets of fields. REFINED_STAGES: STAGES of `refined_attention.py`, or 0 to
    load codes one by one.
    """
    pid_item = tl.program_id(0)
    pid_head = tl.program_id(1)
    pid_block = tl.program_id(2)

    request, unit_begin, unit_end, past_len, tail_len, past_units = find_item(
        pid_item,
        batch_size,
        num_items,
        indptr_ptr,
        last_page_len_ptr,
        tail_lens_ptr,
        PAGE_SIZE=PAGE_SIZE,
        BLOCK_N=BLOCK_N,
        BLOCK_B=BLOCK_B,
        ITEM_UNITS=ITEM_UNITS,
    )
    if request >= batch_size:
        return
    q_begin, q_len = find_queries(request, qo_indptr_ptr, ROWS)
    if pid_block * BLOCK_M >= q_len * GROUP:
        return

    offs_m = pid_block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = offs_m < q_len * GROUP
    mask_d = offs_d < HEAD_DIM
    q_rows = (q_begin + offs_m // GROUP).to(tl.int64) * stride_q_token
    q_rows += (pid_head * GROUP + offs_m % GROUP) * stride_q_head
    mask_q = mask_m[:, None] & mask_d[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)

    page_list_ptr = find_page_list(
        indices_ptr, tl.load(indptr_ptr + request), pid_head, stride_index, LISTS_BY_HEAD
    )
    past_end = tl.minimum(unit_end, past_units)
    if REFINED_STAGES:
        acc, top, total = attend_to_refined(
            q_ptr + q_rows[:, None],
            mask_m[:, None],
            anchors_ptr + pid_head * stride_anchor_head,
            residuals_ptr + pid_head * stride_residual_head,
            residual_slots_ptr,
            page_list_ptr,
            unit_begin,
            past_end,
            past_len,
            scale_log2,
            stride_anchor_page,
            stride_residual_slot,
            acc,
            top,
            total,
            ANCHOR_BITS=ANCHOR_BITS,
            PAGE_SIZE=PAGE_SIZE,
            HEAD_DIM=HEAD_DIM,
            K_CHUNK=K_CHUNK,
            K_CODES=K_CODES,
            K_OFFSET=K_OFFSET,
            K_SCALE=K_SCALE,
            V_CODES=V_CODES,
            V_OFFSET=V_OFFSET,
            V_SCALE=V_SCALE,
            K_CORRECTIONS=K_RESIDUAL,
            V_CORRECTIONS=V_RESIDUAL,
            DTYPE=DTYPE,
            FINITE_MAX=FINITE_MAX,
            INTERPRET=INTERPRET,
            BLOCK_N=BLOCK_N,
            STAGES=REFINED_STAGES,
        )

    # In the order of channels that the tail and all other loads of pages have.
    q = tl.load(q_ptr + q_rows[:, None] + offs_d[None, :], mask=mask_q, other=0.0)
    q = q.to(tl.float32)
    q_of_pages = rounded(q, DTYPE, INTERPRET)
    if ROTATES:
        signs = load_signs(table_ptr, offs_d, ANCHOR_BITS, HEAD_DIM)
        q_of_pages = rounded(rotate(q, signs, HEAD_DIM), DTYPE, INTERPRET)
    q = rounded(q, DTYPE, INTERPRET)
    if not REFINED_STAGES:
        for unit in range(unit_begin, past_end):
            first = unit * BLOCK_N % PAGE_SIZE
            page, num_seen = find_page(
                page_list_ptr, unit * BLOCK_N, past_len, stride_index, LISTS_BY_HEAD, PAGE_SIZE
            )
            mask_n = offs_n < num_seen
            anchor_ptr = anchors_ptr
            if SOURCE != "exact":
                anchor_ptr += page * stride_anchor_page + pid_head * stride_anchor_head
            residual_ptr = residuals_ptr
            if SOURCE != "anchor":
                slot = tl.load(residual_slots_ptr + page).to(tl.int64)
                residual_ptr += slot * stride_residual_slot + pid_head * stride_residual_head
            if SOURCE == "exact":
                k, v = load_exact(
                    residual_ptr,
                    first + offs_n,
                    mask_n,
                    offs_d,
                    HEAD_DIM=HEAD_DIM,
                    K_BITS=K_RESIDUAL,
                    V_BITS=V_RESIDUAL,
                    DTYPE=DTYPE,
                    INTERPRET=INTERPRET,
                )
            else:
                k, v = load_encoded(
                    anchor_ptr,
                    residual_ptr,
                    table_ptr,
                    first,
                    mask_n,
                    offs_d,
                    DECODE=DECODE,
                    ANCHOR_BITS=ANCHOR_BITS,
                    REFINED=SOURCE == "int8",
                    PAGE_SIZE=PAGE_SIZE,
                    HEAD_DIM=HEAD_DIM,
                    K_CHUNK=K_CHUNK,
                    V_CHUNK=V_CHUNK,
                    K_CODES=K_CODES,
                    K_OFFSET=K_OFFSET,
                    K_SCALE=K_SCALE,
                    V_CODES=V_CODES,
                    V_OFFSET=V_OFFSET,
                    V_SCALE=V_SCALE,
                    K_CORRECTIONS=K_RESIDUAL,
                    V_CORRECTIONS=V_RESIDUAL,
                    DTYPE=DTYPE,
                    FINITE_MAX=FINITE_MAX,
                    INTERPRET=INTERPRET,
                    BLOCK_N=BLOCK_N,
                )
            visible = mask_n[None, :] & mask_m[:, None]
            acc, top, total = attend(
                q_of_pages,
                k,
                v,
                visible,
                scale_log2,
                acc,
                top,
                total,
                DTYPE=DTYPE,
                INTERPRET=INTERPRET,
            )
    if ROTATES:
        acc = rotate_back(acc, signs, HEAD_DIM)

    if tail_lens_ptr is not None:
        slot_list_ptr = tail_indices_ptr + tl.load(tail_indptr_ptr + request)
        num_seen = tail_len - q_len + offs_m // GROUP + 1
        for unit in range(tl.maximum(unit_begin, past_units), unit_end):
            token = (unit - past_units) * BLOCK_N
            slot = tl.load(slot_list_ptr + token // PAGE_SIZE).to(tl.int64)
            mask_n = token + offs_n < tail_len
            k, v = load_rows(
                tail_k_ptr + slot * stride_k_slot + pid_head * stride_k_head,
                tail_v_ptr + slot * stride_v_slot + pid_head * stride_v_head,
                token % PAGE_SIZE + offs_n,
                mask_n,
                offs_d,
                stride_k_token,
                stride_v_token,
                HEAD_DIM=HEAD_DIM,
                DTYPE=DTYPE,
                INTERPRET=INTERPRET,
            )
            visible = (token + offs_n)[None, :] < num_seen[:, None]
            visible = visible & mask_m[:, None]
            acc, top, total = attend(
                q, k, v, visible, scale_log2, acc, top, total, DTYPE=DTYPE, INTERPRET=INTERPRET
            )

    divisor, lse = concluded(top, total)
    row = (pid_item.to(tl.int64) * NUM_KV_HEADS + pid_head) * num_rows + offs_m
    tl.store(partial_lse_ptr + row, lse, mask=mask_m)
    tl.store(
        partial_out_ptr + row[:, None] * HEAD_DIM + offs_d[None, :],
        acc / divisor[:, None],
        mask=mask_q,
    )


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    indptr_ptr,
    last_page_len_ptr,
    qo_indptr_ptr,
    tail_lens_ptr,
    batch_size,
    num_items,
    num_rows,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ITEM_UNITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Merge the items of one query token and KV head into out and lse, BLOCK_S at a time. Query
    tokens that belong to no request, or see no token, become 0 and -inf."""
    token = tl.program_id(0)
    pid_head = tl.program_id(1)
    requests = tl.arange(0, BLOCK_B)

    request = token // ROWS if qo_indptr_ptr is None else token
    q_begin = request * ROWS
    if qo_indptr_ptr is not None:
        mask_b = requests < batch_size
        q_ends = tl.load(qo_indptr_ptr + 1 + requests, mask=mask_b, other=0x7FFFFFFF)
        request = tl.sum((q_ends <= token).to(tl.int32), axis=0)
        q_begin = tl.load(qo_indptr_ptr + request)
    _, items = split_batch(
        batch_size,
        num_items,
        indptr_ptr,
        last_page_len_ptr,
        tail_lens_ptr,
        PAGE_SIZE=PAGE_SIZE,
        BLOCK_N=BLOCK_N,
        BLOCK_B=BLOCK_B,
        ITEM_UNITS=ITEM_UNITS,
    )
    first_item = tl.sum(tl.where(requests < request, items, 0), axis=0)
    end_item = tl.sum(tl.where(requests <= request, items, 0), axis=0)

    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    mask_g = offs_g < GROUP
    mask_gd = mask_g[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs_row = (token - q_begin) * GROUP + offs_g
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    for begin in range(first_item, end_item, BLOCK_S):
        offs_s = begin + tl.arange(0, BLOCK_S)
        mask_s = offs_s < end_item
        row = (offs_s.to(tl.int64) * NUM_KV_HEADS + pid_head) * num_rows
        row = row[:, None] + offs_row[None, :]
        lse = tl.load(
            partial_lse_ptr + row, mask=mask_s[:, None] & mask_g[None, :], other=float("-inf")
        )
        part = tl.load(
            partial_out_ptr + row[:, :, None] * HEAD_DIM + offs_d[None, None, :],
            mask=mask_s[:, None, None] & mask_gd[None, :, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - finite_top[None, :])
        shrink = tl.exp2(top - finite_top)
        acc = acc * shrink[:, None] + tl.sum(part * weights[:, :, None], axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        top = new_top

    divisor, lse = concluded(top, total)
    head = pid_head * GROUP + offs_g
    tl.store(
        lse_ptr + token.to(tl.int64) * stride_lse_token + head * stride_lse_head, lse, mask=mask_g
    )
    row_ptr = out_ptr + token.to(tl.int64) * stride_out_token
    tl.store(
        row_ptr + head[:, None] * stride_out_head + offs_d[None, :],
        rounded(acc / divisor[:, None], DTYPE, INTERPRET),
        mask=mask_gd,
    )

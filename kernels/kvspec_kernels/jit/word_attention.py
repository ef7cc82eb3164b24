"""Draft attention over 4-bit anchors of uniform4 for few query rows, with codes as operands of
products (`code_tiles.py`). Work items, states and semantics are those of `attention.py`.

K is offset + scale * code with a scale for each channel, V with one for each token. So queries are
scaled instead of K, and weights instead of V, and the offsets add the same to all tokens of a chunk
or to all channels. A program is one warp, whose threads decode what they multiply. Tokens and
channels are in the rows of matrices and query rows in the columns, of which 8 suffice.

The unit of V is the largest scale of an item so far. Of tokens whose weight times scale is below
2 to the power of -24 of it, low bits are lost, whatever the weight of the largest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit import code_tiles
from kvspec_kernels.jit.attention import SIZES
from kvspec_kernels.jit.pages import find_page, find_page_list, load_rows
from kvspec_kernels.jit.rounding import operand, rounded
from kvspec_kernels.jit.softmax import concluded
from kvspec_kernels.jit.work_items import find_item, find_queries

# Weights of at most 1 are this much larger as fp16, in which small ones lose precision.
WEIGHT_UNIT = tl.constexpr(1024.0)


@triton.jit
def product(rows, columns, INTERPRET: tl.constexpr):
    return tl.dot(operand(rows, INTERPRET), operand(columns, INTERPRET), input_precision="ieee")


@triton.jit
def weigh(scores, top):
    """Return the weights of scores [N, M], the factor of earlier sums, and the new top [M] of the
    online softmax. top: finite also if no token was seen."""
    new_top = tl.maximum(top, tl.max(scores, axis=0))
    return tl.exp2(scores - new_top[None, :]), tl.exp2(top - new_top), new_top


@triton.jit
def partly_summed(weights):
    """Return sums [8, M] of every eighth token of weights [N, M]: those that a thread holds."""
    parts: tl.constexpr = weights.shape[0] // 8
    return tl.sum(tl.reshape(weights, [parts, 8, weights.shape[1]]), axis=0)


@triton.jit
def in_column_order(weights):
    """Return weights [N, M] with their tokens in the order of code_tiles.column()."""
    tiles: tl.constexpr = weights.shape[0] // 16
    # Token 8 h + 2 t + r of a tile stands at 4 t + 2 h + r.
    halves = tl.reshape(weights, [tiles, 2, 4, 2, weights.shape[1]])
    return tl.reshape(tl.permute(halves, (0, 2, 1, 3, 4)), weights.shape)


@triton.jit(do_not_specialize=SIZES)
def word_attention_kernel(
    q_ptr,
    anchors_ptr,
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
    stride_k_slot,
    stride_k_token,
    stride_k_head,
    stride_v_slot,
    stride_v_token,
    stride_v_head,
    stride_index: tl.constexpr,
    LISTS_BY_HEAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_CODES: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_CODES: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    FINITE_MAX: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ITEM_UNITS: tl.constexpr,
    STAGES: tl.constexpr,
    TAIL_N: tl.constexpr,
):
    """Attend as attention_kernel() does, whose arguments these are. BLOCK_N is
    code_tiles.TILE_TOKENS, BLOCK_D is HEAD_DIM. STAGES: pages in flight, through shared memory.
    TAIL_N: tokens of the tail that a step takes."""
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
    q_rows = (q_begin + offs_m // GROUP).to(tl.int64) * stride_q_token
    q_rows += (pid_head * GROUP + offs_m % GROUP) * stride_q_head
    q_rows_ptr = q_ptr + q_rows[None, :]
    mask_q = mask_m[None, :]
    columns = code_tiles.column(offs_d)
    wide_q = tl.load(q_rows_ptr + columns[:, None], mask=mask_q, other=0.0)
    wide_q = wide_q.to(tl.float32)
    unit_q, factor_q = code_tiles.unit_of(tl.max(tl.abs(wide_q), axis=0))
    q = (wide_q * factor_q[None, :]).to(tl.float16)
    ones = tl.full([16, BLOCK_D], 1.0, tl.float16)
    # Scales are in units of 16 codes, so products of queries and scales stay below 4 in fp16.
    score_units = 0.0625 / code_tiles.row_units(offs_n)
    out_units = 1.0 / (WEIGHT_UNIT * code_tiles.row_units(offs_d))

    # Sums of weights times codes, in units of unit_v, and of weights and weights times offsets.
    acc = tl.zeros([BLOCK_D, BLOCK_M], dtype=tl.float32)
    total = tl.zeros([8, BLOCK_M], dtype=tl.float32)
    offsets = tl.zeros([8, BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
    largest_v = tl.full((), 0.0, tl.float32)
    unit_v, _ = code_tiles.unit_of(largest_v)

    page_list_ptr = find_page_list(
        indices_ptr, tl.load(indptr_ptr + request), pid_head, stride_index, LISTS_BY_HEAD
    )
    for unit in tl.range(unit_begin, tl.minimum(unit_end, past_units), num_stages=STAGES):
        first = unit * BLOCK_N % PAGE_SIZE
        page, num_seen = find_page(
            page_list_ptr, unit * BLOCK_N, past_len, stride_index, LISTS_BY_HEAD, PAGE_SIZE
        )
        anchor_ptr = anchors_ptr + page * stride_anchor_page + pid_head * stride_anchor_head
        k_words = code_tiles.load_words(
            anchor_ptr + K_CODES,
            first * BLOCK_D // 1024,
            BLOCK_D // 64,
            GROUPS=BLOCK_D // 64,
            ROWS=BLOCK_N,
            COLUMNS=BLOCK_D,
        )
        v_words = code_tiles.load_words(
            anchor_ptr + V_CODES,
            first // 64,
            PAGE_SIZE // 64,
            GROUPS=1,
            ROWS=BLOCK_D,
            COLUMNS=BLOCK_N,
        )
        # Metadata of tokens that were never written may be NaN, and a weight of 0 times NaN is NaN.
        mask_n = offs_n < num_seen
        chunk = first // K_CHUNK * (BLOCK_D * 2)
        k_scale = code_tiles.load_columns(anchor_ptr + K_SCALE + chunk, BLOCK_D, num_seen > 0)
        k_offset = code_tiles.load_columns(anchor_ptr + K_OFFSET + chunk, BLOCK_D, num_seen > 0)
        v_scale = code_tiles.load_rows_between(anchor_ptr + V_SCALE, first, PAGE_SIZE)
        v_offset = code_tiles.load_rows_between(anchor_ptr + V_OFFSET, first, PAGE_SIZE)
        v_scale = tl.where(mask_n, v_scale, 0.0)
        v_offset = tl.where(mask_n, v_offset, 0.0)
        reach = tl.maximum(16.0 * tl.abs(k_scale), tl.abs(k_offset))
        unit_k, factor_k = code_tiles.unit_of(tl.max(reach, axis=0))
        small_scale = (k_scale * (factor_k * 16.0)).to(tl.float16)
        small_offset = (k_offset * factor_k).to(tl.float16)
        k = code_tiles.codes_of(k_words, BLOCK_N, BLOCK_D)
        scores = product(k, q * small_scale[:, None], INTERPRET)
        # 16 equal rows of q times offsets.
        shift = tl.max(product(ones, q * small_offset[:, None], INTERPRET), axis=0)
        factor = scale_log2 * unit_q * unit_k
        scores = scores * (score_units[:, None] * factor[None, :]) + (shift * factor)[None, :]
        weights, shrink, top = weigh(tl.where(mask_n[:, None], scores, float("-inf")), top)
        total = total * shrink[None, :] + partly_summed(weights)
        offsets = offsets * shrink[None, :] + partly_summed(weights * v_offset[:, None])

        largest_v = tl.maximum(largest_v, tl.max(tl.abs(v_scale), axis=0))
        old_unit = unit_v
        unit_v, factor_v = code_tiles.unit_of(largest_v)
        weights *= (v_scale * (factor_v * WEIGHT_UNIT))[:, None]
        acc *= (shrink * (old_unit * factor_v))[None, :]
        v = code_tiles.codes_of(v_words, BLOCK_D, BLOCK_N)
        acc += product(v, in_column_order(weights.to(tl.float16)), INTERPRET)
    acc = acc * out_units[:, None] * unit_v + tl.sum(offsets, axis=0)[None, :]
    total_m = tl.sum(total, axis=0)
    # An offset may round up to more than DTYPE has.
    most = (total_m * FINITE_MAX)[None, :]
    acc = tl.minimum(tl.maximum(acc, -most), most)

    if tail_lens_ptr is not None:
        model_q = tl.load(q_rows_ptr + offs_d[:, None], mask=mask_q, other=0.0)
        model_q = rounded(model_q.to(tl.float32), DTYPE, INTERPRET)
        slot_list_ptr = tail_indices_ptr + tl.load(tail_indptr_ptr + request)
        num_seen = tail_len - q_len + offs_m // GROUP + 1
        offs_tail = tl.arange(0, TAIL_N)
        begin = (tl.maximum(unit_begin, past_units) - past_units) * BLOCK_N
        end = tl.minimum((unit_end - past_units) * BLOCK_N, tail_len)
        for token in range(begin, end, TAIL_N):
            slot = tl.load(slot_list_ptr + token // PAGE_SIZE).to(tl.int64)
            k, v = load_rows(
                tail_k_ptr + slot * stride_k_slot + pid_head * stride_k_head,
                tail_v_ptr + slot * stride_v_slot + pid_head * stride_v_head,
                token % PAGE_SIZE + offs_tail,
                token + offs_tail < tail_len,
                offs_d,
                stride_k_token,
                stride_v_token,
                HEAD_DIM=HEAD_DIM,
                DTYPE=DTYPE,
                INTERPRET=INTERPRET,
            )
            scores = product(tl.trans(k), model_q, INTERPRET) * scale_log2
            visible = (token + offs_tail)[:, None] < num_seen[None, :]
            weights, shrink, top = weigh(tl.where(visible, scores, float("-inf")), top)
            total_m = total_m * shrink + tl.sum(weights, axis=0)
            weights = rounded(weights, DTYPE, INTERPRET)
            acc *= shrink[None, :]
            acc += product(tl.trans(v), weights, INTERPRET)

    divisor, lse = concluded(top, total_m)
    row = (pid_item.to(tl.int64) * NUM_KV_HEADS + pid_head) * num_rows + offs_m
    tl.store(partial_lse_ptr + row, lse, mask=mask_m)
    tl.store(
        partial_out_ptr + row[None, :] * HEAD_DIM + offs_d[:, None],
        acc / divisor[None, :],
        mask=mask_q,
    )

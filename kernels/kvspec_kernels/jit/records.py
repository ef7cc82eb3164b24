"""Encode the K part or the V part of one page and head as fields of its two records.

Arguments that the functions share: page_ptr, pairs of the page's first token (`page_pairs.py`);
anchor_ptr, int32, start of the anchor record; corrections_ptr, int32, start of the part's
corrections in the residual record; FIELDS, offsets in the anchor record, in words, of the part's
codes and of its arrays of metadata; edges_ptr, 0 and the codec's encode_table(); LAW, the rest of
log4's law (`encode_log4.py`), else empty; one, the number 1 (see `encode.py`); CHUNK, tokens that
share metadata.
Corrections are written only for the target int8. With 2-bit anchors, the rest of the codes follows
the corrections.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit import arithmetic, code_words, encode_log4, encode_uniform4, page_pairs


@triton.jit
def _ranges_of_k(x):
    """Return the ranges over rows of channels (d, e)."""
    low = (
        tl.minimum(x[0], x[2]),
        tl.minimum(x[1], x[3]),
        tl.minimum(x[4], x[6]),
        tl.minimum(x[5], x[7]),
    )
    high = (
        tl.maximum(x[0], x[2]),
        tl.maximum(x[1], x[3]),
        tl.maximum(x[4], x[6]),
        tl.maximum(x[5], x[7]),
    )
    return page_pairs.ranges(low, high, 1)


@triton.jit
def _ranges_of_v_channels(x, y):
    """Return the ranges over rows of channels (h, b). x, y: values of h = 0 and h = 1."""
    low = (
        page_pairs.least(x[0], x[1], x[4], x[5]),
        page_pairs.least(x[2], x[3], x[6], x[7]),
        page_pairs.least(y[0], y[1], y[4], y[5]),
        page_pairs.least(y[2], y[3], y[6], y[7]),
    )
    high = (
        page_pairs.most(x[0], x[1], x[4], x[5]),
        page_pairs.most(x[2], x[3], x[6], x[7]),
        page_pairs.most(y[0], y[1], y[4], y[5]),
        page_pairs.most(y[2], y[3], y[6], y[7]),
    )
    return page_pairs.ranges(low, high, 1)


@triton.jit
def _ranges_of_v_tokens(x, y):
    """Return the ranges over columns of tokens (d, e). x, y: values of h = 0 and h = 1."""
    low = (
        page_pairs.least(x[0], x[2], y[0], y[2]),
        page_pairs.least(x[1], x[3], y[1], y[3]),
        page_pairs.least(x[4], x[6], y[4], y[6]),
        page_pairs.least(x[5], x[7], y[5], y[7]),
    )
    high = (
        page_pairs.most(x[0], x[2], y[0], y[2]),
        page_pairs.most(x[1], x[3], y[1], y[3]),
        page_pairs.most(x[4], x[6], y[4], y[6]),
        page_pairs.most(x[5], x[7], y[5], y[7]),
    )
    return page_pairs.ranges(low, high, 0)


@triton.jit
def _store_k_metadata(ptr, bits, chunk, col, mask, NUM_COLS: tl.constexpr):
    """Store bf16 metadata of channels (d, e), given as fp32 bits."""
    index = chunk * (2 * NUM_COLS) + 2 * (col % 4 * (NUM_COLS // 4) + col // 4)
    tl.store(ptr + index, arithmetic.bf16_pair(bits[0], bits[1]), mask=mask)
    tl.store(ptr + index + 1, arithmetic.bf16_pair(bits[2], bits[3]), mask=mask)


@triton.jit
def log4_k(
    page_ptr,
    anchor_ptr,
    corrections_ptr,
    edges_ptr,
    one,
    stride_token: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    WITH_CORRECTIONS: tl.constexpr,
    LAW: tl.constexpr,
):
    NUM_COLS: tl.constexpr = HEAD_DIM // 4
    chunk, row, col, mask, mask_chunk, _ = page_pairs.positions(
        PAGE_SIZE // CHUNK, CHUNK // 2, NUM_COLS
    )
    token = chunk * CHUNK + row // 8 * 16 + row % 8
    x = page_pairs.load_k(page_ptr, token, (col // 4 * 8 + col % 4) * one, stride_token, KV_DTYPE)
    low, high = _ranges_of_k(x)
    centre, offset, base, p = encode_log4.metadata(low, high)
    by_code = (p[0], p[1], p[0], p[1], p[2], p[3], p[2], p[3])
    codes, corrections = encode_log4.words(x, by_code, edges_ptr, ANCHOR_BITS, LAW)

    tl.store(anchor_ptr.to(tl.pointer_type(tl.int16)), base.to(tl.int16))
    for word in tl.static_range(1, 4):
        tl.store(anchor_ptr + word, 0)
    _store_k_metadata(anchor_ptr + FIELDS[1], centre, chunk, col, mask_chunk, NUM_COLS)
    scales = (offset[0] | offset[1] << 8) | (offset[2] << 16 | offset[3] << 24)
    index = chunk * NUM_COLS + col % 4 * (NUM_COLS // 4) + col // 4
    tl.store(anchor_ptr + FIELDS[2] + index, scales, mask=mask_chunk)
    code_words.store_k(
        anchor_ptr + FIELDS[0],
        corrections_ptr,
        codes,
        corrections,
        chunk,
        row,
        col,
        mask,
        CHUNK,
        PAGE_SIZE,
        HEAD_DIM,
        TILE_GROUP,
        ANCHOR_BITS,
        WITH_CORRECTIONS,
    )


@triton.jit
def log4_v(
    page_ptr,
    anchor_ptr,
    corrections_ptr,
    edges_ptr,
    one,
    stride_token: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    WITH_CORRECTIONS: tl.constexpr,
    LAW: tl.constexpr,
):
    NUM_COLS: tl.constexpr = HEAD_DIM // 4
    ROW_TILES: tl.constexpr = HEAD_DIM // 16
    chunk, row, col, mask, mask_chunk, _ = page_pairs.positions(
        PAGE_SIZE // CHUNK, CHUNK // 4, NUM_COLS
    )
    token = chunk * CHUNK + row // 4 * 16 + row % 4 * 2
    x, y = page_pairs.load_v(
        page_ptr, token, (col // 4 * 8 + col % 4) * one, stride_token, KV_DTYPE
    )
    low, high = _ranges_of_v_channels(x, y)
    centre, offset, base, p = encode_log4.metadata(low, high)
    by_code = (p[0], p[0], p[1], p[1], p[0], p[0], p[1], p[1])
    codes0, corrections0 = encode_log4.words(x, by_code, edges_ptr, ANCHOR_BITS, LAW)
    by_code = (p[2], p[2], p[3], p[3], p[2], p[2], p[3], p[3])
    codes1, corrections1 = encode_log4.words(y, by_code, edges_ptr, ANCHOR_BITS, LAW)

    tl.store(anchor_ptr.to(tl.pointer_type(tl.int16)) + 1, base.to(tl.int16))
    scales_ptr = (anchor_ptr + FIELDS[2]).to(tl.pointer_type(tl.int16))
    for h in tl.static_range(2):
        index = chunk * (2 * NUM_COLS) + (col % 4 * 2 + h) * ROW_TILES + col // 4
        centres = arithmetic.bf16_pair(centre[2 * h], centre[2 * h + 1])
        tl.store(anchor_ptr + FIELDS[1] + index, centres, mask=mask_chunk)
        scales = offset[2 * h] | offset[2 * h + 1] << 8
        tl.store(scales_ptr + index, scales.to(tl.int16), mask=mask_chunk)
    code_words.store_v(
        anchor_ptr + FIELDS[0],
        corrections_ptr,
        (codes0, codes1),
        (corrections0, corrections1),
        chunk,
        row,
        col,
        mask,
        CHUNK,
        PAGE_SIZE,
        HEAD_DIM,
        TILE_GROUP,
        ANCHOR_BITS,
        WITH_CORRECTIONS,
    )


@triton.jit
def uniform4_k(
    page_ptr,
    anchor_ptr,
    corrections_ptr,
    edges_ptr,
    one,
    stride_token: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    WITH_CORRECTIONS: tl.constexpr,
    LAW: tl.constexpr,
):
    NUM_COLS: tl.constexpr = HEAD_DIM // 4
    chunk, row, col, mask, mask_chunk, _ = page_pairs.positions(
        PAGE_SIZE // CHUNK, CHUNK // 2, NUM_COLS
    )
    token = chunk * CHUNK + row // 8 * 16 + row % 8
    x = page_pairs.load_k(page_ptr, token, (col // 4 * 8 + col % 4) * one, stride_token, KV_DTYPE)
    low, high = _ranges_of_k(x)
    scale, zero, p = encode_uniform4.metadata(low, high)
    by_code = (p[0], p[1], p[0], p[1], p[2], p[3], p[2], p[3])
    codes, corrections = encode_uniform4.words(x, by_code, WITH_CORRECTIONS)

    _store_k_metadata(anchor_ptr + FIELDS[1], scale, chunk, col, mask_chunk, NUM_COLS)
    _store_k_metadata(anchor_ptr + FIELDS[2], zero, chunk, col, mask_chunk, NUM_COLS)
    code_words.store_k(
        anchor_ptr + FIELDS[0],
        corrections_ptr,
        codes,
        corrections,
        chunk,
        row,
        col,
        mask,
        CHUNK,
        PAGE_SIZE,
        HEAD_DIM,
        TILE_GROUP,
        ANCHOR_BITS,
        WITH_CORRECTIONS,
    )


@triton.jit
def uniform4_v(
    page_ptr,
    anchor_ptr,
    corrections_ptr,
    edges_ptr,
    one,
    stride_token: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    WITH_CORRECTIONS: tl.constexpr,
    LAW: tl.constexpr,
):
    COL_TILES: tl.constexpr = PAGE_SIZE // 16
    chunk, row, col, mask, _, mask_row = page_pairs.positions(1, PAGE_SIZE // 4, HEAD_DIM // 4)
    token = row // 4 * 16 + row % 4 * 2
    # Without `one`: metadata belongs to tokens, so a thread should take many channels, few tokens.
    x, y = page_pairs.load_v(page_ptr, token, col // 4 * 8 + col % 4, stride_token, KV_DTYPE)
    low, high = _ranges_of_v_tokens(x, y)
    scale, zero, p = encode_uniform4.metadata(low, high)
    by_code = (p[0], p[1], p[0], p[1], p[2], p[3], p[2], p[3])
    codes0, corrections0 = encode_uniform4.words(x, by_code, WITH_CORRECTIONS)
    codes1, corrections1 = encode_uniform4.words(y, by_code, WITH_CORRECTIONS)

    for e in tl.static_range(2):
        index = (row % 4 * 2 + e) * COL_TILES + row // 4
        scales = arithmetic.bf16_pair(scale[e], scale[2 + e])
        tl.store(anchor_ptr + FIELDS[1] + index, scales, mask=mask_row)
        zeros = arithmetic.bf16_pair(zero[e], zero[2 + e])
        tl.store(anchor_ptr + FIELDS[2] + index, zeros, mask=mask_row)
    code_words.store_v(
        anchor_ptr + FIELDS[0],
        corrections_ptr,
        (codes0, codes1),
        (corrections0, corrections1),
        chunk,
        row,
        col,
        mask,
        PAGE_SIZE,
        PAGE_SIZE,
        HEAD_DIM,
        TILE_GROUP,
        ANCHOR_BITS,
        WITH_CORRECTIONS,
    )

"""Decode TurboQuant's codes inside a kernel, with the formulas of `reference/turboquant.py`.

Values stay rotated: the kernels rotate the query and the sum of values instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.sizes import hadamard_block


@triton.jit
def decode_turboquant(
    anchor_ptr,
    residual_ptr,
    table_ptr,
    tokens,
    channels,
    chunk,
    mask_channels,
    PART: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    REFINED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODES: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    CORRECTIONS: tl.constexpr,
):
    """Return rotated fp32 values of `tokens` and `channels`. Arguments are those of decode_log4.
    SCALE: of the norms. table_ptr: levels, then signs."""
    BLOCK: tl.constexpr = hadamard_block(HEAD_DIM)
    ROW: tl.constexpr = HEAD_DIM * ANCHOR_BITS // 8
    codes_ptr = anchor_ptr + CODES
    if ANCHOR_BITS == 3:
        # A code may straddle two bytes of its row.
        shift = channels * 3 & 7
        bytes_ptr = codes_ptr + tokens * ROW + (channels * 3 >> 3)
        low = tl.load(bytes_ptr, mask=mask_channels, other=0).to(tl.int32)
        high = tl.load(bytes_ptr + 1, mask=mask_channels & (shift > 5), other=0).to(tl.int32)
        code = (low | high << 8) >> shift & 7
    else:
        words_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
        place = channels * ANCHOR_BITS
        word = tl.load(words_ptr + tokens * (ROW // 4) + (place >> 5), mask=mask_channels, other=0)
        code = word >> (place & 31) & ((1 << ANCHOR_BITS) - 1)
    norms_ptr = (anchor_ptr + SCALE).to(tl.pointer_type(tl.bfloat16))
    place_of_norm = tokens * (HEAD_DIM // BLOCK) + channels // BLOCK
    norm = tl.load(norms_ptr + place_of_norm, mask=mask_channels, other=0.0).to(tl.float32)
    return tl.where(mask_channels, tl.load(table_ptr + code) * norm, 0.0)

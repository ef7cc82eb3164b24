"""Decode uniform4 codes inside a kernel, with the formulas of `reference/uniform4.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels import formats
from kvspec_kernels.jit.fragments import (
    load_ordered,
    locate_code,
    locate_column,
    locate_row,
)

TWO_BIT_MIDDLE = tl.constexpr(formats.TWO_BIT_MIDDLE)


@triton.jit
def decode_uniform4(
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
    """Return fp32 values of `tokens` and `channels`. Arguments are those of decode_log4; table_ptr
    is None. V, whose metadata belongs to tokens, needs no chunk."""
    if PART == 0:
        word, code = locate_code(tokens, channels, PAGE_SIZE, HEAD_DIM)
        place = chunk * HEAD_DIM + locate_column(channels, HEAD_DIM)
        mask_place = mask_channels
    else:
        word, code = locate_code(channels, tokens, HEAD_DIM, PAGE_SIZE)
        place = locate_row(tokens, PAGE_SIZE)
        mask_place = place >= 0
    # Even codes fill nibbles 0 to 3, odd codes nibbles 4 to 7.
    shift = ((code >> 1) << 2) + ((code & 1) << 4)
    if ANCHOR_BITS == 4:
        words_ptr = (anchor_ptr + CODES).to(tl.pointer_type(tl.int32))
        integer = tl.load(words_ptr + word, mask=mask_channels, other=0) >> shift & 15
    else:
        integer = load_ordered(
            anchor_ptr,
            residual_ptr,
            tokens,
            channels,
            mask_channels,
            PART=PART,
            REFINED=REFINED,
            PAGE_SIZE=PAGE_SIZE,
            HEAD_DIM=HEAD_DIM,
            CODES=CODES,
            CORRECTIONS=CORRECTIONS,
        )
    if REFINED:
        words_ptr = (residual_ptr + CORRECTIONS).to(tl.pointer_type(tl.int32))
        lower = tl.load(words_ptr + word, mask=mask_channels, other=0) >> shift & 15
        integer = (integer << 4) + ((lower ^ 8) - 8)
    scale_ptr = (anchor_ptr + SCALE).to(tl.pointer_type(tl.bfloat16))
    zero_ptr = (anchor_ptr + OFFSET).to(tl.pointer_type(tl.bfloat16))
    scale = tl.load(scale_ptr + place, mask=mask_place, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + place, mask=mask_place, other=0.0).to(tl.float32)
    if REFINED:
        scale *= 0.0625
    value = integer.to(tl.float32)
    if ANCHOR_BITS == 2 and not REFINED:
        value = value * 4.0 + TWO_BIT_MIDDLE
    return tl.where(mask_channels, value * scale + zero, 0.0)

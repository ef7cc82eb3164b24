"""Decodes uniform4 codes inside a kernel; the formulas are those of `reference/uniform4.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.fragments import locate_code, locate_column, locate_row


@triton.jit
def decode_uniform4(
    anchor_ptr,
    residual_ptr,
    tokens,
    channels,
    chunk,
    mask_channels,
    PART: tl.constexpr,
    REFINED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODES: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE: tl.constexpr,
    CORRECTIONS: tl.constexpr,
):
    """Values fp32 of `tokens` and `channels`; arguments as in decode_log4. V, whose metadata
    belongs to tokens, needs no chunk."""
    if PART == 0:
        word, code = locate_code(tokens, channels, PAGE_SIZE, HEAD_DIM)
        place = chunk * HEAD_DIM + locate_column(channels, HEAD_DIM)
        mask_place = mask_channels
    else:
        word, code = locate_code(channels, tokens, HEAD_DIM, PAGE_SIZE)
        place = locate_row(tokens, PAGE_SIZE)
        mask_place = place >= 0
    # Even codes fill nibbles 0 to 3, odd ones 4 to 7.
    shift = ((code >> 1) << 2) + ((code & 1) << 4)
    words_ptr = (anchor_ptr + CODES).to(tl.pointer_type(tl.int32))
    integer = tl.load(words_ptr + word, mask=mask_channels, other=0) >> shift & 15
    if REFINED:
        words_ptr = (residual_ptr + CORRECTIONS).to(tl.pointer_type(tl.int32))
        lower = tl.load(words_ptr + word, mask=mask_channels, other=0) >> shift & 15
        integer = (integer << 4) + ((lower ^ 8) - 8)
    scale_ptr = (anchor_ptr + SCALE).to(tl.pointer_type(tl.bfloat16))
    zero_ptr = (anchor_ptr + ZERO).to(tl.pointer_type(tl.bfloat16))
    scale = tl.load(scale_ptr + place, mask=mask_place, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + place, mask=mask_place, other=0.0).to(tl.float32)
    if REFINED:
        scale *= 0.0625
    return tl.where(mask_channels, integer.to(tl.float32) * scale + zero, 0.0)

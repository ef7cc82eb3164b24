"""Decode log4 codes inside a kernel, with the formulas of `reference/log4.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.fragments import (
    load_ordered,
    locate_code,
    locate_column,
    locate_row,
)


@triton.jit
def decode_log4(
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
    """Return fp32 values of `tokens` and `channels` (int32 positions that broadcast against each
    other) of a record; 0 where mask_channels is false.

    PART: 0 for K, 1 for V. chunk: row of metadata, a scalar or shaped like tokens. CODES, OFFSET,
    SCALE, CORRECTIONS: byte offsets of the part's fields. table_ptr: the codec's code_values.
    """
    if PART == 0:
        word, code = locate_code(tokens, channels, PAGE_SIZE, HEAD_DIM)
        place = chunk * HEAD_DIM + locate_column(channels, HEAD_DIM)
    else:
        word, code = locate_code(channels, tokens, HEAD_DIM, PAGE_SIZE)
        place = chunk * HEAD_DIM + locate_row(channels, HEAD_DIM)
    if ANCHOR_BITS == 4:
        words_ptr = (anchor_ptr + CODES).to(tl.pointer_type(tl.int32))
        packed = tl.load(words_ptr + word, mask=mask_channels, other=0)
        # The sign of code 2 r + h is bit 15 - 4 r + 16 h. Its magnitude is the 3 bits from bit
        # (4 - 4 r + 16 h) mod 32 on. Shifts are arithmetic; the masks drop the copies of bit 31.
        place_in_word = ((code & 1) << 4) - ((code >> 1) << 2)
        sign = packed >> (place_in_word + 15) & 1
        index = (packed >> (place_in_word + 4 & 31) & 7) | sign << 3
    else:
        index = load_ordered(
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
            index ^= tl.where(index < 8, 15, 8)
    if REFINED:
        words_ptr = (residual_ptr + CORRECTIONS).to(tl.pointer_type(tl.int32))
        corrections = tl.load(words_ptr + word, mask=mask_channels, other=0)
        # Even codes fill nibbles 0 to 3, odd codes nibbles 4 to 7.
        nibble = (code >> 1) + ((code & 1) << 2)
        index |= (corrections >> (nibble << 2) & 15) << 4
    value = tl.load(table_ptr + index)
    base = tl.load(anchor_ptr.to(tl.pointer_type(tl.int16)) + PART).to(tl.int32)
    exponent = tl.load(anchor_ptr + SCALE + place, mask=mask_channels, other=0).to(tl.int32)
    scale = ((base + exponent) << 19).to(tl.float32, bitcast=True)
    centre_ptr = (anchor_ptr + OFFSET).to(tl.pointer_type(tl.bfloat16))
    centre = tl.load(centre_ptr + place, mask=mask_channels, other=0.0).to(tl.float32)
    return tl.where(mask_channels, value * scale + centre, 0.0)

"""Codes of TILE_TOKENS tokens as matrix operands [rows, columns] in fp16, a word of eight codes at
a time.

Codes are stored in the order in which a warp's threads hold the left operand of a product
(`reference/fragments.py`), so that a thread loads words of its own elements. Rows of operands, K's
tokens and V's channels, stand in their own order, columns in that of `column()`, in which products
sum as well as in any other.

A code is the bits of an fp16 number below the smallest normal one: in the low bits of a half of a
register it is CODE_UNIT times itself, so a mask is all that decodes it. Products take such numbers
exactly. Scales and offsets belong to the other operand, or to the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_TOKENS = tl.constexpr(64)
# Value of the fp16 number whose bits are those of the integer 1.
CODE_UNIT = tl.constexpr(2.0**-24)
# Smaller values lose precision. Units of two operands multiply, and fp32 must hold the product.
LEAST_UNIT = tl.constexpr(2.0**-60)
LOW = tl.constexpr(0x000F000F)
HIGH = tl.constexpr(0x00F000F0)


@triton.jit
def column(place):
    """Return the number of the column that stands at a place of an operand."""
    return place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2


@triton.jit
def unit_of(largest):
    """Return (unit, 1 / unit): a power of two in which numbers up to `largest` are numbers of fp16,
    up to 2. A power of two rounds nothing."""
    # The exponent alone, which a reciprocal has with the other sign.
    bits = tl.minimum(tl.maximum(largest, LEAST_UNIT), 1e38).to(tl.int32, bitcast=True)
    bits = bits & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def load_words(
    ptr,
    first_group,
    stride_group: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load words [tiles / 4, 8 rows, 4 columns, 4 tiles] of an operand. Groups of 4 tiles follow
    one another in memory, of which GROUPS belong to a row of tiles of this operand. first_group:
    its first. stride_group: groups from one row of tiles to the next."""
    words_ptr = ptr.to(tl.pointer_type(tl.int32))
    # One contiguous dimension, so that each thread loads its 4 words at once.
    if stride_group == GROUPS:
        words = tl.load(words_ptr + first_group * 128 + tl.arange(0, ROWS * COLUMNS // 8))
    else:
        group = tl.arange(0, ROWS * COLUMNS // 1024)
        group = first_group + group // GROUPS * stride_group + group % GROUPS
        words = tl.load(words_ptr + group[:, None] * 128 + tl.arange(0, 128)[None, :])
    return tl.reshape(words, [ROWS * COLUMNS // 1024, 8, 4, 4])


@triton.jit
def halves(bits, DTYPE: tl.constexpr):
    """Return both halves of each word as numbers of 16 bits, in a new last dimension."""
    left = bits.to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(left, (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True))


@triton.jit
def _operand(near, near_below, far, far_below, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the operand of words that hold two elements each. near: those of columns 0 to 7 of
    each tile. below: those of rows 8 to 15."""
    upper = tl.join(halves(near, tl.float16), halves(far, tl.float16))
    lower = tl.join(halves(near_below, tl.float16), halves(far_below, tl.float16))
    values = tl.join(upper, lower)
    row_tiles: tl.constexpr = ROWS // 16
    groups: tl.constexpr = COLUMNS // 64
    # [row tiles, groups, 8 rows, 4 columns, 4 tiles, left or right, near or far, upper or lower]
    values = tl.reshape(values, [row_tiles, groups, 8, 4, 4, 2, 2, 2])
    values = tl.permute(values, (0, 7, 2, 1, 4, 3, 6, 5))
    return tl.reshape(values, [ROWS, COLUMNS])


@triton.jit
def codes_of(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return 4-bit codes. Rows 8 to 15 of each tile are 16 times as large, which saves a shift:
    row_units() says by how much."""
    far = words >> 8
    return _operand(words & LOW, words & HIGH, far & LOW, far & HIGH, ROWS, COLUMNS)


@triton.jit
def row_units(rows):
    """Return the value of code 1 in each row of codes_of()."""
    return tl.where(rows // 8 % 2 == 0, CODE_UNIT, 16.0 * CODE_UNIT)


@triton.jit
def load_columns(ptr, COLUMNS: tl.constexpr, is_seen):
    """Load bf16 metadata of all columns as fp32, in the order of column(). Where not is_seen, 0."""
    place = tl.arange(0, COLUMNS)
    values = tl.load(ptr.to(tl.pointer_type(tl.bfloat16)) + place, mask=is_seen, other=0.0)
    values = tl.permute(tl.reshape(values, [4, COLUMNS // 16, 4]), (1, 0, 2))
    return tl.reshape(values, [COLUMNS]).to(tl.float32)


@triton.jit
def load_rows_between(ptr, first, PAGE_SIZE: tl.constexpr):
    """Load bf16 metadata of TILE_TOKENS tokens from `first` on, a multiple of TILE_TOKENS, as
    fp32."""
    tiles: tl.constexpr = TILE_TOKENS // 16
    row = tl.arange(0, 8)[:, None] * (PAGE_SIZE // 8)
    # Without this hint the compiler loads each value separately, and such loads cannot run ahead.
    start = tl.multiple_of(first // 8, 8)
    place = row + start + tl.arange(0, TILE_TOKENS // 8)[None, :]
    values = tl.load(ptr.to(tl.pointer_type(tl.bfloat16)) + place)
    values = tl.permute(tl.reshape(values, [8, tiles, 2]), (1, 2, 0))
    return tl.reshape(values, [TILE_TOKENS]).to(tl.float32)

"""Widths of codes of a packed exact residual (`packed_format.py`) and what the codes count from, by
the anchor, with the bits of `reference/packed_exact.py`.

A *run* is 16 values that follow each other in a segment: two of a lane's words of codes. A thread
has a run. Tensors are [runs], one for each value of a run, so sums over the values of a run cost an
addition each. They have one dimension, so that Triton gives neighbours in a segment to neighbours
in a warp.

Devices agree on every bit, because kernels with these functions are launched with
`enable_fp_fusion=False`. A code times a scale has at most 12 bits, so this product is exact unless
it overflows. One sum and one conversion round, both to nearest even. Everything else is integer
arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels import packed_format
from kvspec_kernels.jit.rounding import rounded

BF16_MAX = tl.constexpr(3.3895313892515355e38)
FP16_MAX = tl.constexpr(65504.0)
# fp32 bits of infinity: this and all above is not finite.
INFINITY_BITS = tl.constexpr(0x7F800000)
# By how much exponents of fp16 are smaller than those of fp32.
FP16_BIAS = tl.constexpr(112)
# An integer as the low mantissa bits of this fp32 number becomes a float by one subtraction.
MAGIC, MAGIC_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)
# Limits of half the steps from the scale. The width grows as they fall, and stays the same outside.
NEAREST = tl.constexpr(packed_format.FIRST_BITS - packed_format.NEAR_BITS)
FARTHEST = tl.constexpr(packed_format.FIRST_BITS - packed_format.FAR_BITS)
NEAR_BITS = tl.constexpr(packed_format.NEAR_BITS)
FIRST_BITS = tl.constexpr(packed_format.FIRST_BITS)
# Steps of a scale that is not finite: they put every anchor value near zero.
NO_SCALE = tl.constexpr(4096)
# Steps of a scale with a sign bit, or fewer: all finite values are far from it.
LEAST_SCALE = tl.constexpr(-16)


@triton.jit
def load_metadata(
    field_ptr,
    tile_row,
    tile_column,
    lane,
    PART: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K_GROUP: tl.constexpr,
):
    """Return the fp32 bits, int32, of one field of metadata for a lane's columns 2t, 2t+1, 2t+8 and
    2t+9 of a tile. field_ptr: int32, start of the field in each record."""
    t = lane & 3
    if PART == 0:
        # One word has columns 2t, 2t+1, and the next one 2t+8, 2t+9.
        place = t * (HEAD_DIM // 8) + tile_column * 2
        place += tile_row * 16 // K_GROUP * (HEAD_DIM // 2)
        first = tl.load(field_ptr + place)
        second = tl.load(field_ptr + place + 1)
        return first << 16, first & -65536, second << 16, second & -65536
    else:
        # One word has columns 2t, 2t+8, and another one 2t+1, 2t+9.
        place = t * (PAGE_SIZE // 8) + tile_column
        first = tl.load(field_ptr + place)
        second = tl.load(field_ptr + place + PAGE_SIZE // 16)
        return first << 16, second << 16, first & -65536, second & -65536


@triton.jit
def prepare(scale_bits, zero_bits, DTYPE: tl.constexpr):
    """Return what all values of a scale and zero share: (scale, zero, steps of the scale + 2, top).

    The 2 is for the exponent of 1 that `value_rule` adds to values.
    """
    steps = tl.maximum(scale_bits >> 22, LEAST_SCALE)
    steps = tl.where(scale_bits >= INFINITY_BITS, NO_SCALE, steps)
    positive = tl.maximum(scale_bits, 0)
    if tl.bfloat16 == DTYPE:
        top = positive >> 16 | 0x7F
    else:
        exponent = tl.maximum((positive >> 23) - FP16_BIAS, 0)
        top = tl.minimum(exponent << 10 | 0x3FF, 0x7FFF)
    scale = scale_bits.to(tl.float32, bitcast=True)
    return scale, zero_bits.to(tl.float32, bitcast=True), steps + 2, top


@triton.jit
def locate_tile(
    segment,
    run,
    i: tl.constexpr,
    PART: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILES: tl.constexpr,
):
    """Return row and column, in tiles, of the tile of a run's i-th word, i = 0 or 1."""
    COLUMNS: tl.constexpr = (HEAD_DIM if PART == 0 else PAGE_SIZE) // 16
    tile = segment * TILES + run % (TILES // 2) * 2 + i
    return tile // COLUMNS, tile % COLUMNS


@triton.jit
def prepare_tile(
    anchor_ptr,
    tile_row,
    tile_column,
    lane,
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K_GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return `prepare` of a lane's columns 2t, 2t+1, 2t+8 and 2t+9 of a tile."""
    s0, s1, s2, s3 = load_metadata(
        anchor_ptr + FIELDS[1], tile_row, tile_column, lane, PART, PAGE_SIZE, HEAD_DIM, K_GROUP
    )
    z0, z1, z2, z3 = load_metadata(
        anchor_ptr + FIELDS[2], tile_row, tile_column, lane, PART, PAGE_SIZE, HEAD_DIM, K_GROUP
    )
    return (
        prepare(s0, z0, DTYPE),
        prepare(s1, z1, DTYPE),
        prepare(s2, z2, DTYPE),
        prepare(s3, z3, DTYPE),
    )


@triton.jit
def value_rule(
    word,
    SHIFT: tl.constexpr,
    prepared,
    DTYPE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return (width, near, order) of the value whose anchor code begins at bit SHIFT of a word."""
    scale, zero, scale_steps, _ = prepared
    code = (word >> SHIFT & 15 | MAGIC_BITS).to(tl.float32, bitcast=True) - MAGIC
    value = code * scale + zero
    if tl.bfloat16 == DTYPE:
        value = tl.clamp(value, -BF16_MAX, BF16_MAX, propagate_nan=tl.PropagateNan.ALL)
    else:
        value = tl.clamp(value, -FP16_MAX, FP16_MAX, propagate_nan=tl.PropagateNan.ALL)
    value = rounded(value, DTYPE, INTERPRET)
    float_bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    if tl.bfloat16 == DTYPE:
        bits = float_bits >> 16
    else:
        bits = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    # With 1 more in the exponent, NaN becomes negative: nearer to zero than all numbers.
    steps = ((float_bits & 0x7FFFFFFF) + 0x00800000 >> 22) - scale_steps
    half_steps = tl.minimum(tl.minimum(steps, steps >> 1), FARTHEST)
    half_steps = tl.maximum(half_steps, NEAREST)
    width = -(half_steps - (MANTISSA_BITS + FIRST_BITS))
    return width, half_steps == NEAREST, order_of(bits)


@triton.jit
def order_of(bits):
    """Return the place among all numbers of a value of 16 bits, which are sign-extended to int32.
    The function is its own inverse."""
    return bits ^ (bits >> 31 & 0x7FFF)


@triton.jit
def code_of(bits, width, near, order, top):
    """Return (code, escaped) of a value of 16 bits, which are sign-extended to int32."""
    last = (1 << width - 1) - 1
    far_code = order_of(bits) - order + last
    near_code = (top - (bits & 0x7FFF) << 1) - (bits >> 31)
    # As unsigned numbers, codes below zero are above all others.
    code = tl.where(near, near_code, far_code)
    least_escape = tl.where(near, 2 * last, 2 * last + 1)
    escaped = code.to(tl.uint32, bitcast=True) >= least_escape.to(tl.uint32, bitcast=True)
    return tl.where(escaped, 2 * last + 1, code), escaped


@triton.jit
def bits_of(code, width, base, MANTISSA_BITS: tl.constexpr):
    """Return an int32 whose lower half has the bits of a value that did not escape. base: top of a
    value near zero, and otherwise the order of the value of the code 0."""
    near_bits = base - (code >> 1) & 0x7FFF | code << 15
    # Only values near zero have this width.
    return tl.where(width == MANTISSA_BITS + NEAR_BITS, near_bits, order_of(code + base))


@triton.jit
def for_each(x, THREADS: tl.constexpr):
    """Return [n * THREADS]: each number of x [n] THREADS times."""
    return tl.broadcast_to(x[:, None], (x.numel, THREADS)).reshape(x.numel * THREADS)

"""Decode 4-bit anchors of TILE_TOKENS tokens to matrix operands in fp16, a word of eight codes at a
time.

Tokens and channels of operands stand in the order of `ordered`, in which codes need no moves
between threads. Products do not depend on the order in which they sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.fragments import locate_column, locate_row

TILE_TOKENS = tl.constexpr(64)
# An fp16 number from 1024 on whose low bits are an integer, in each half of a register.
MAGIC = tl.constexpr(0x64006400)
PAIRS = tl.constexpr(0x000F000F)


@triton.jit
def ordered(place):
    """Return the number of the row or column that stands at a place of an operand."""
    word = place // 4
    tile = word // 16 * 4 + word % 4
    return tile * 16 + word % 16 // 4 * 2 + place % 2 + place % 4 // 2 * 8


@triton.jit
def first_half(place):
    """Return the row that stands at a place among rows 0 to 7 of each tile. Row 8 of a tile is the
    first of the second half."""
    return ordered(place // 2 * 4 + place % 2)


@triton.jit
def halves_joined(first, second):
    """Return columns of the first and of the second half, each [n, m], as [n, 2 m] in the order of
    ordered()."""
    pairs: tl.constexpr = first.shape[1] // 2
    both = tl.reshape(tl.join(first, second), [first.shape[0], pairs, 2, 2])
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), [first.shape[0], 4 * pairs])


@triton.jit
def _load_words(
    ptr,
    row_tile,
    first_group,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Load words [NUM_ROWS / 2, NUM_COLUMNS / 4] of an operand. row_tile: first tile of rows.
    first_group: first group of 4 tiles of columns, of GROUPS."""
    row = first_half(tl.arange(0, NUM_ROWS // 2))
    column = tl.arange(0, NUM_COLUMNS // 4)
    start = (row_tile + row // 16) * (GROUPS * 128) + row % 8 * 16 + first_group * 128
    # Written so that the compiler sees neighbours in memory.
    words_ptr = ptr.to(tl.pointer_type(tl.int32))
    return tl.load(words_ptr + start[:, None] + (column // 16 * 128 + column % 16)[None, :])


@triton.jit
def _affine(half, scale, offset):
    """Return what the instructions of _pair() make of one half of a register, rounded once."""
    code = half.to(tl.float16, bitcast=True).to(tl.float32) - 1024.0
    return (code * scale.to(tl.float32) + offset.to(tl.float32)).to(tl.float16)


@triton.jit
def _pair(words, scale, offset, PAIR: tl.constexpr, INTERPRET: tl.constexpr):
    """Return the values of codes 2 PAIR and 2 PAIR + 1 of each word, [rows, words, 2] in fp16.
    scale, offset: of the two, [1, words] fp16 each."""
    bits = words >> (4 * PAIR) & PAIRS | MAGIC
    left_scale, right_scale = scale
    left_offset, right_offset = offset
    if INTERPRET:
        left = _affine(bits.to(tl.int16), left_scale, left_offset)
        right = _affine((bits >> 16).to(tl.int16), right_scale, right_offset)
    else:
        # The compiler would pair values of different words, and move each half first.
        left, right = tl.inline_asm_elementwise(
            """{
            .reg .b32 value, scale, offset, start;
            mov.b32 scale, {$3, $4};
            mov.b32 offset, {$5, $6};
            mov.b32 start, 0x64006400;
            sub.f16x2 value, $2, start;
            fma.rn.f16x2 value, value, scale, offset;
            mov.b32 {$0, $1}, value;
            }""",
            "=h,=h,r,h,h,h,h",
            [bits, left_scale, right_scale, left_offset, right_offset],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    return tl.join(left, right)


@triton.jit
def _half(words, near, far, HALF: tl.constexpr, INTERPRET: tl.constexpr):
    """Return values of rows 0 to 7 (HALF 0) or 8 to 15 (1) of each tile, transposed: [columns,
    rows / 2]. near, far: of _in_units()."""
    values = tl.join(
        _pair(words, near[0], near[1], HALF, INTERPRET),
        _pair(words, far[0], far[1], HALF + 2, INTERPRET),
    )
    # [rows, words, left or right, near or far]
    values = tl.permute(values, (0, 1, 3, 2))
    return tl.trans(tl.reshape(values, [words.shape[0], 4 * words.shape[1]]))


@triton.jit
def _load(ptr, place, is_seen):
    value = tl.load(ptr.to(tl.pointer_type(tl.bfloat16)) + place).to(tl.float32)
    # Metadata of tokens that were never written may be NaN, and a weight of 0 times NaN is NaN.
    return tl.where(is_seen, value, 0.0)


@triton.jit
def _metadata(anchor_ptr, left, right, left_seen, right_seen, SCALE, OFFSET):
    """Return scales and offsets, a pair each, of the left and the right codes of words, [words]
    fp32. left, right: places in a row of metadata. Where these are not seen, 0."""
    return (
        (
            _load(anchor_ptr + SCALE, left, left_seen),
            _load(anchor_ptr + SCALE, right, right_seen),
        ),
        (
            _load(anchor_ptr + OFFSET, left, left_seen),
            _load(anchor_ptr + OFFSET, right, right_seen),
        ),
    )


@triton.jit
def _reach(metadata):
    """Return the most that codes of each word can be."""
    scale, offset = metadata
    return tl.maximum(
        tl.abs(offset[0]) + 15.0 * scale[0],
        tl.abs(offset[1]) + 15.0 * scale[1],
    )


@triton.jit
def unit_of(largest):
    """Return (unit, 1 / unit): a power of two in which numbers up to `largest` are numbers of fp16,
    up to 2. A power of two rounds nothing."""
    # The exponent alone, which a reciprocal has with the other sign.
    bits = tl.minimum(tl.maximum(largest, 1e-30), 1e38).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _in_units(metadata, factor):
    """Return scales and offsets times a factor, as fp16 [1, words]."""
    scale, offset = metadata
    return (
        (
            (scale[0] * factor).to(tl.float16)[None, :],
            (scale[1] * factor).to(tl.float16)[None, :],
        ),
        (
            (offset[0] * factor).to(tl.float16)[None, :],
            (offset[1] * factor).to(tl.float16)[None, :],
        ),
    )


@triton.jit
def _of_channels(
    anchor_ptr,
    chunk,
    FAR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Return _metadata() of K, of the near codes (FAR 0) or of those 8 channels farther (2)."""
    place = tl.arange(0, HEAD_DIM // 4) * 4 + FAR
    left = chunk * HEAD_DIM + locate_column(ordered(place), HEAD_DIM)
    right = chunk * HEAD_DIM + locate_column(ordered(place + 1), HEAD_DIM)
    return _metadata(anchor_ptr, left, right, place >= 0, place >= 0, SCALE, OFFSET)


@triton.jit
def _of_tokens(
    anchor_ptr,
    first,
    num_seen,
    FAR: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Return _metadata() of V, like _of_channels(). num_seen: as for load_v()."""
    place = tl.arange(0, TILE_TOKENS // 4) * 4 + FAR
    left, right = ordered(place), ordered(place + 1)
    return _metadata(
        anchor_ptr,
        locate_row(first + left, PAGE_SIZE),
        locate_row(first + right, PAGE_SIZE),
        left < num_seen,
        right < num_seen,
        SCALE,
        OFFSET,
    )


@triton.jit
def load_k(
    anchor_ptr,
    first,
    HEAD_DIM: tl.constexpr,
    K_CHUNK: tl.constexpr,
    CODES: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return K of TILE_TOKENS tokens from `first` on, a multiple of TILE_TOKENS, in two halves
    [HEAD_DIM, TILE_TOKENS / 2] of tokens first_half() and 8 more, and the unit in which they are.
    CODES to SCALE: byte offsets of fields."""
    words = _load_words(anchor_ptr + CODES, first // 16, 0, TILE_TOKENS, HEAD_DIM, HEAD_DIM // 64)
    near = _of_channels(anchor_ptr, first // K_CHUNK, 0, HEAD_DIM, SCALE, OFFSET)
    far = _of_channels(anchor_ptr, first // K_CHUNK, 2, HEAD_DIM, SCALE, OFFSET)
    unit, factor = unit_of(tl.max(tl.maximum(_reach(near), _reach(far)), axis=0))
    near, far = _in_units(near, factor), _in_units(far, factor)
    half = _half(words, near, far, 0, INTERPRET)
    return half, _half(words, near, far, 1, INTERPRET), unit


@triton.jit
def load_v(
    anchor_ptr,
    first,
    num_seen,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODES: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return V of tokens as load_k() takes them, in two halves [TILE_TOKENS, HEAD_DIM / 2] of
    channels first_half() and 8 more, and the unit in which they are. Tokens are in the order of
    ordered(). Those from num_seen on, counted from `first`, are 0."""
    group = first // TILE_TOKENS
    words = _load_words(anchor_ptr + CODES, 0, group, HEAD_DIM, TILE_TOKENS, PAGE_SIZE // 64)
    near = _of_tokens(anchor_ptr, first, num_seen, 0, PAGE_SIZE, SCALE, OFFSET)
    far = _of_tokens(anchor_ptr, first, num_seen, 2, PAGE_SIZE, SCALE, OFFSET)
    unit, factor = unit_of(tl.max(tl.maximum(_reach(near), _reach(far)), axis=0))
    near, far = _in_units(near, factor), _in_units(far, factor)
    half = _half(words, near, far, 0, INTERPRET)
    return half, _half(words, near, far, 1, INTERPRET), unit

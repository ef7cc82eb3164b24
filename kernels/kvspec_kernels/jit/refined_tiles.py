"""Decode words of uniform4 codes and their corrections to bf16 operands of products.

The byte of a value is 16 * code + correction + 8. In the low bits of a bf16 number, a byte is
itself times 2 to the power of -133. Two fused operations decode two values: the first makes
(byte - 8) / 64 exactly, the second a fourth of the value, rounded once. A fourth never overflows.
Anchors of 2 bits give the same bytes.

Columns of operands stand in the order of `thread_column()`. In this order, values that a thread
decodes are neighbours, and go to shared memory 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.code_tiles import TILE_TOKENS, halves, load_words

# Unit of operands: they hold a fourth of the values.
OPERAND_UNIT = tl.constexpr(4.0)
LOW_NIBBLES = tl.constexpr(0x0F0F0F0F)
HIGH_NIBBLES = tl.constexpr(-0x0F0F0F10)
# Selectors of prmt: bytes 0 and 2 of a word, and 1 and 3, as the low ones of two halves.
EVEN_BYTES = tl.constexpr(0x4240)
ODD_BYTES = tl.constexpr(0x4341)
SIGNS = tl.constexpr(-0x77777778)
LEFT_CODES = tl.constexpr(0x33333333)
RIGHT_CODES = tl.constexpr(-0x33333334)
LOW_HALF = tl.constexpr(0xFFFF)
HIGH_HALF = tl.constexpr(-0x10000)


@triton.jit
def thread_column(place):
    """Return the number of the column that stands at a place of an operand here."""
    of_tile = place % 4 // 2 * 8 + place % 64 // 16 * 2 + place % 2
    return place // 64 * 64 + place % 16 // 4 * 16 + of_tile


@triton.jit
def _load_pairs(ptr, first_pair, PAIRS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load words [rows of tiles, 8 rows, 4 columns, COLUMNS / 32] of pairs of 2-bit codes. PAIRS:
    those of a row of tiles in memory, 2 or a multiple of 4. first_pair: the operand's first."""
    words_ptr = ptr.to(tl.pointer_type(tl.int32))
    pairs: tl.constexpr = COLUMNS // 32
    if PAIRS == 2:
        # A group of 4 pairs has those of two rows of tiles.
        group = tl.arange(0, ROWS // 32)[:, None] * 128
        words = tl.load(words_ptr + group + tl.arange(0, 128)[None, :])
        words = tl.permute(tl.reshape(words, [ROWS // 32, 8, 4, 2, 2]), (0, 3, 1, 2, 4))
    else:
        row = tl.arange(0, ROWS // 16)[:, None] * (PAIRS * 32)
        place = tl.arange(0, 32 * pairs)[None, :]
        place = place // pairs * 4 + place % pairs
        words = tl.load(words_ptr + row + first_pair // 4 * 128 + first_pair % 4 + place)
    return tl.reshape(words, [ROWS // 16, 8, 4, pairs])


@triton.jit
def _words_of_pairs(codes, rest, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return words of 4-bit codes, as of load_words(), of words of _load_pairs()."""
    left = (codes & LEFT_CODES) << 2 | (rest & LEFT_CODES)
    right = (codes & RIGHT_CODES) | (rest >> 2 & LEFT_CODES)
    words = tl.reshape(tl.join(left, right), [ROWS // 16, 8, 4, COLUMNS // 64, 4])
    return tl.reshape(tl.permute(words, (0, 3, 1, 2, 4)), [ROWS * COLUMNS // 1024, 8, 4, 4])


@triton.jit
def _load_part(
    ptr,
    first_row,
    first_column,
    ALL_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load words [tiles / 4, 8 rows, 4 columns, 4 tiles] of an operand, which is a part of a matrix
    of ALL_COLUMNS columns."""
    return load_words(
        ptr,
        (first_row // 16 * ALL_COLUMNS // 16 + first_column // 16) // 4,
        ALL_COLUMNS // 64,
        GROUPS=COLUMNS // 64,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )


@triton.jit
def _load_codes(
    codes_ptr,
    rest_ptr,
    first_row,
    first_column,
    ANCHOR_BITS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load words [tiles / 4, 8 rows, 4 columns, 4 tiles] of 4-bit codes of an operand, which is a
    part of a matrix of ALL_COLUMNS columns."""
    if ANCHOR_BITS == 4:
        return _load_part(codes_ptr, first_row, first_column, ALL_COLUMNS, ROWS, COLUMNS)
    else:
        first = first_row * ALL_COLUMNS // 4
        first_pair = first_column // 32
        codes = _load_pairs(codes_ptr + first, first_pair, ALL_COLUMNS // 32, ROWS, COLUMNS)
        rest = _load_pairs(rest_ptr + first, first_pair, ALL_COLUMNS // 32, ROWS, COLUMNS)
        return _words_of_pairs(codes, rest, ROWS, COLUMNS)


@triton.jit
def _quarter(pairs):
    """Return a fourth of bf16 pairs."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 factor, shift;
        mov.b32 factor, 0x3E803E80;
        mov.b32 shift, 0x80008000;
        fma.rn.bf16x2 $0, $1, factor, shift;
        }""",
        "=r,r",
        [pairs],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _value_pairs(bytes, selector: tl.constexpr, scales, offsets, INTERPRET: tl.constexpr):
    """Return a fourth of the values of two of the four bytes of words, in a new last dimension.
    bytes: [rows of tiles, groups, 8 rows, 4 columns, 4 tiles, upper or lower]. selector: a byte and
    a zero for each half, as of prmt. scales, offsets: bf16 pairs of columns."""
    words = tl.inline_asm_elementwise(
        """{
        .reg .b32 pair, factor, shift, whole;
        prmt.b32 pair, $1, 0, $4;
        mov.b32 factor, 0x7F007F00;
        mov.b32 shift, 0xBE00BE00;
        fma.rn.bf16x2 whole, pair, factor, shift;
        fma.rn.bf16x2 $0, whole, $2, $3;
        }""",
        "=r,r,r,r,r",
        [
            bytes,
            scales[None, :, :, :, :, None],
            _quarter(offsets)[None, :, :, :, :, None],
            tl.full(bytes.shape, selector, tl.int32),
        ],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    if INTERPRET:
        left = (words << 16).to(tl.float32, bitcast=True)
        return tl.join(left, (words & HIGH_HALF).to(tl.float32, bitcast=True))
    else:
        return halves(words, tl.bfloat16)


@triton.jit
def _of_columns(pairs, COLUMNS: tl.constexpr):
    """Return pairs [4, COLUMNS / 16] of columns' metadata as [groups, 1, 4, 4 tiles]."""
    pairs = tl.permute(tl.reshape(pairs, [4, COLUMNS // 64, 4]), (1, 0, 2))
    return tl.expand_dims(pairs, 1)


@triton.jit
def _decoded(loaded, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRET: tl.constexpr):
    """Return values [rows of tiles, upper or lower, 8 rows, COLUMNS], columns in the order of
    thread_column(). loaded: (codes, corrections, scales, offsets). Scales and offsets are (pairs of
    columns 0 to 7 of tiles, pairs of the others)."""
    codes, corrections, scales, offsets = loaded
    rows: tl.constexpr = ROWS // 16
    groups: tl.constexpr = COLUMNS // 64
    lower = corrections ^ SIGNS
    upper_rows = ((codes << 4) & HIGH_NIBBLES) | (lower & LOW_NIBBLES)
    lower_rows = (codes & HIGH_NIBBLES) | ((lower >> 4) & LOW_NIBBLES)
    both = tl.join(upper_rows, lower_rows)
    # [rows of tiles, groups, 8 rows, 4 columns, 4 tiles, upper or lower]
    both = tl.reshape(both, [rows, groups, 8, 4, 4, 2])
    near = _value_pairs(both, EVEN_BYTES, scales[0], offsets[0], INTERPRET)
    far = _value_pairs(both, ODD_BYTES, scales[1], offsets[1], INTERPRET)
    values = tl.join(near, far)
    # [rows of tiles, upper or lower, 8 rows, groups, 4 columns, 4 tiles, near or far, pair]
    values = tl.permute(values, (0, 5, 2, 1, 3, 4, 7, 6))
    return tl.reshape(values, [rows, 2, 8, COLUMNS])


@triton.jit
def _load_channel_pairs(ptr, COLUMNS: tl.constexpr):
    """Load bf16 metadata of all channels as (pairs of channels 0 to 7 of tiles, of the others),
    each [groups, 1, 4, 4 tiles]."""
    place = tl.arange(0, COLUMNS // 2)
    pairs = tl.load(ptr.to(tl.pointer_type(tl.int32)) + place)
    near, far = tl.split(tl.reshape(pairs, [4, COLUMNS // 16, 2]))
    return _of_columns(near, COLUMNS), _of_columns(far, COLUMNS)


@triton.jit
def token_masks(num_seen):
    """Return the masks [4, 4 tiles] of pairs of tokens 0 to 7 of tiles, and of the others, that
    keep metadata of the first num_seen tokens."""
    first = tl.arange(0, TILE_TOKENS // 16)[None, :] * 16 + tl.arange(0, 4)[:, None] * 2
    return _pair_mask(first, num_seen), _pair_mask(first + 8, num_seen)


@triton.jit
def _pair_mask(token, num_seen):
    mask = tl.where(token < num_seen, LOW_HALF, 0)
    return tl.where(token + 1 < num_seen, -1, mask)


@triton.jit
def _load_token_words(ptr, first, ODD: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Load bf16 metadata of tokens 2 t + ODD and 2 t + ODD + 8 of each tile as words [4, 4]."""
    row = tl.arange(0, 4)[:, None] * 2 + ODD
    tile = tl.arange(0, TILE_TOKENS // 16)[None, :]
    # Without this hint the compiler loads each word separately.
    start = tl.multiple_of(first // 16, 4)
    return tl.load(ptr.to(tl.pointer_type(tl.int32)) + start + (row * (PAGE_SIZE // 16) + tile))


@triton.jit
def _load_token_pairs(ptr, first, masks, PAGE_SIZE: tl.constexpr):
    """Load bf16 metadata of TILE_TOKENS tokens from `first` on as (pairs of tokens 0 to 7 of tiles,
    pairs of the others), each [1, 1, 4, 4 tiles]. masks: as of token_masks(), applied to both."""
    even = _load_token_words(ptr, first, 0, PAGE_SIZE)
    odd = _load_token_words(ptr, first, 1, PAGE_SIZE)
    near = (even & LOW_HALF) | (odd << 16)
    far = ((even >> 16) & LOW_HALF) | (odd & HIGH_HALF)
    return _of_columns(near & masks[0], TILE_TOKENS), _of_columns(far & masks[1], TILE_TOKENS)


@triton.jit
def load_k(
    anchor_ptr,
    residual_ptr,
    first,
    ANCHOR_BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    CODES: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    CORRECTIONS: tl.constexpr,
):
    """Load what decode_k() takes of TILE_TOKENS tokens from `first` on."""
    words = _load_codes(
        anchor_ptr + CODES,
        residual_ptr + (CORRECTIONS + PAGE_SIZE * HEAD_DIM // 2),
        first,
        0,
        ANCHOR_BITS,
        ALL_COLUMNS=HEAD_DIM,
        ROWS=TILE_TOKENS,
        COLUMNS=HEAD_DIM,
    )
    corrections = _load_part(residual_ptr + CORRECTIONS, first, 0, HEAD_DIM, TILE_TOKENS, HEAD_DIM)
    chunk = first // CHUNK * (HEAD_DIM * 2)
    scales = _load_channel_pairs(anchor_ptr + (chunk + SCALE), HEAD_DIM)
    offsets = _load_channel_pairs(anchor_ptr + (chunk + OFFSET), HEAD_DIM)
    return words, corrections, scales, offsets


@triton.jit
def load_v(
    anchor_ptr,
    residual_ptr,
    first,
    masks,
    ANCHOR_BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODES: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    CORRECTIONS: tl.constexpr,
):
    """Load what decode_v() takes of TILE_TOKENS tokens from `first` on. masks: as of token_masks().
    Metadata of tokens that were never written may be NaN, and NaN times a weight of 0 is NaN."""
    words = _load_codes(
        anchor_ptr + CODES,
        residual_ptr + (CORRECTIONS + PAGE_SIZE * HEAD_DIM // 2),
        0,
        first,
        ANCHOR_BITS,
        ALL_COLUMNS=PAGE_SIZE,
        ROWS=HEAD_DIM,
        COLUMNS=TILE_TOKENS,
    )
    corrections = _load_part(residual_ptr + CORRECTIONS, 0, first, PAGE_SIZE, HEAD_DIM, TILE_TOKENS)
    scales = _load_token_pairs(anchor_ptr + SCALE, first, masks, PAGE_SIZE)
    offsets = _load_token_pairs(anchor_ptr + OFFSET, first, masks, PAGE_SIZE)
    return words, corrections, scales, offsets


@triton.jit
def decode_k(loaded, HEAD_DIM: tl.constexpr, INTERPRET: tl.constexpr):
    """Return K [HEAD_DIM, TILE_TOKENS] of load_k(), in units of OPERAND_UNIT. Tokens and channels
    stand in the order of thread_column(). Values of tokens that are not seen are finite."""
    k = _decoded(loaded, TILE_TOKENS, HEAD_DIM, INTERPRET)
    # Token 16 a + 8 b + 2 c + d stands at 16 c + 4 a + 2 b + d.
    k = tl.reshape(k, [TILE_TOKENS // 16, 2, 4, 2, HEAD_DIM])
    return tl.trans(tl.reshape(tl.permute(k, (2, 0, 1, 3, 4)), [TILE_TOKENS, HEAD_DIM]))


@triton.jit
def decode_v(loaded, HEAD_DIM: tl.constexpr, INTERPRET: tl.constexpr):
    """Return V [TILE_TOKENS, HEAD_DIM] of load_v(), in units of OPERAND_UNIT. Tokens stand in the
    order of thread_column(), channels in their own. Values of tokens that masks hide are 0."""
    v = _decoded(loaded, HEAD_DIM, TILE_TOKENS, INTERPRET)
    return tl.trans(tl.reshape(v, [HEAD_DIM, TILE_TOKENS]))

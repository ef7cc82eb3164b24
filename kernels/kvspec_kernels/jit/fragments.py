"""Places of codes and metadata in a record: the permutations of `reference/fragments.py` as index
arithmetic. Rows and columns are those of the stored matrix operand: K [tokens, channels], V
transposed [channels, tokens]."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_code(row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (word, code): the code of `row` and `column` is number `code` of the 8 codes in 32-bit
    word `word` of a part."""
    tile = (row >> 4) * (COLUMNS // 16) + (column >> 4)
    lane = ((row & 7) << 2) + ((column & 7) >> 1)
    if (ROWS // 16) * (COLUMNS // 16) % 4 == 0:
        word = ((tile >> 2) << 7) + (lane << 2) + (tile & 3)
    else:
        word = ((tile >> 1) << 6) + (lane << 1) + (tile & 1)
    code = ((column & 8) >> 1) + ((row & 8) >> 2) + (column & 1)
    return word, code


@triton.jit
def locate_pair_code(row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (word, shift): the 2-bit code of `row` and `column` starts at bit `shift` of 32-bit
    word `word` of a part."""
    # Nibbles of pairs have the places of codes of an operand with half the columns.
    word, code = locate_code(row, ((column >> 5) << 4) + (column & 15), ROWS, COLUMNS // 2)
    # Even codes fill nibbles 0 to 3, odd codes nibbles 4 to 7.
    return word, ((code >> 1) << 2) + ((code & 1) << 4) + ((column & 16) >> 3)


@triton.jit
def load_two_bits(
    codes_ptr,
    tokens,
    channels,
    mask,
    PART: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Return 2-bit codes, int32, of `tokens` and `channels` of part K (PART 0) or V (1); 0 where
    mask is false."""
    if PART == 0:
        word, shift = locate_pair_code(tokens, channels, PAGE_SIZE, HEAD_DIM)
    else:
        word, shift = locate_pair_code(channels, tokens, HEAD_DIM, PAGE_SIZE)
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    return tl.load(words_ptr + word, mask=mask, other=0) >> shift & 3


@triton.jit
def load_ordered(
    anchor_ptr,
    residual_ptr,
    tokens,
    channels,
    mask,
    PART: tl.constexpr,
    REFINED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODES: tl.constexpr,
    CORRECTIONS: tl.constexpr,
):
    """Return load_two_bits of an anchor record. If REFINED, append the rest from a residual record:
    4-bit codes numbered in the order of values. CODES, CORRECTIONS: byte offsets of the part's
    fields."""
    codes_ptr = anchor_ptr + CODES
    code = load_two_bits(codes_ptr, tokens, channels, mask, PART, PAGE_SIZE, HEAD_DIM)
    if REFINED:
        # The rest follows the corrections.
        rest_ptr = residual_ptr + (CORRECTIONS + PAGE_SIZE * HEAD_DIM // 2)
        rest = load_two_bits(rest_ptr, tokens, channels, mask, PART, PAGE_SIZE, HEAD_DIM)
        code = code << 2 | rest
    return code


@triton.jit
def locate_column(column, COLUMNS: tl.constexpr):
    """Return the place of a column's metadata within one row of metadata."""
    lane = (column & 7) >> 1
    return lane * (COLUMNS // 4) + ((column >> 4) << 2) + ((column & 8) >> 2) + (column & 1)


@triton.jit
def locate_row(row, ROWS: tl.constexpr):
    """Return the place of a row's metadata within one row of metadata."""
    return (row & 7) * (ROWS // 8) + ((row >> 4) << 1) + ((row & 8) >> 3)

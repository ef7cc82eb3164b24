"""Where a code or a piece of metadata lies in a record: the permutations of
`reference/fragments.py` as index arithmetic. Rows and columns are those of the stored matrix
operand: K [tokens, channels], V transposed [channels, tokens]."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_code(row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(word, code): the code of `row` and `column` is number `code` of 8 in 32-bit word `word` of
    a part's codes."""
    tile = (row >> 4) * (COLUMNS // 16) + (column >> 4)
    lane = ((row & 7) << 2) + ((column & 7) >> 1)
    if (ROWS // 16) * (COLUMNS // 16) % 4 == 0:
        word = ((tile >> 2) << 7) + (lane << 2) + (tile & 3)
    else:
        word = ((tile >> 1) << 6) + (lane << 1) + (tile & 1)
    code = ((column & 8) >> 1) + ((row & 8) >> 2) + (column & 1)
    return word, code


@triton.jit
def locate_column(column, COLUMNS: tl.constexpr):
    """Place of a column's metadata among those of one row of metadata."""
    lane = (column & 7) >> 1
    return lane * (COLUMNS // 4) + ((column >> 4) << 2) + ((column & 8) >> 2) + (column & 1)


@triton.jit
def locate_row(row, ROWS: tl.constexpr):
    """Place of a row's metadata among those of one row of metadata."""
    return (row & 7) * (ROWS // 8) + ((row >> 4) << 1) + ((row & 8) >> 3)

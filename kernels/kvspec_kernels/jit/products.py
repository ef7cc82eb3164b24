"""Triton kernels of products with weights, whose rows do not depend on the number of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.rounding import operand, rounded


@triton.jit
def place_of(
    tile, num_rows, num_columns, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the row and the column of output where a tile begins. GROUP blocks of rows share the
    columns that they read, while these are in the L2 cache."""
    row_blocks = tl.cdiv(num_rows, ROWS)
    tiles_of_group = GROUP * tl.cdiv(num_columns, COLUMNS)
    first = tile // tiles_of_group * GROUP
    size = tl.minimum(row_blocks - first, GROUP)
    row_block = first + tile % tiles_of_group % size
    return row_block * ROWS, tile % tiles_of_group // size * COLUMNS


@triton.jit
def store_tile(
    out_ptr,
    bias_ptr,
    acc,
    row,
    column,
    num_rows,
    num_columns,
    stride_out,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    place = rows[:, None].to(tl.int64) * stride_out + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(out_ptr + place, rounded(acc, DTYPE, INTERPRET), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,
    stride_rows,
    stride_weight,
    stride_out,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE_DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Multiply a tile of rows by a tile of weight, a program for each tile.

    The sum over depth runs in one order, from first to last, in the accumulator of the matrix
    instruction. WHOLE_DEPTH: depth is a multiple of DEPTH.
    """
    row, column = place_of(tl.program_id(0), num_rows, num_columns, GROUP, ROWS, COLUMNS)
    # Rows past the end would read nothing of use, and cost as much bandwidth as rows that exist.
    row_index = row + tl.arange(0, ROWS)
    column_index = (column + tl.arange(0, COLUMNS)) % num_columns
    depths = tl.arange(0, DEPTH)
    rows = rows_ptr + row_index[:, None].to(tl.int64) * stride_rows + depths[None, :]
    weight = weight_ptr + column_index[:, None].to(tl.int64) * stride_weight + depths[None, :]
    exists = (row_index < num_rows)[:, None]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        if WHOLE_DEPTH:
            a = tl.load(rows, mask=exists & (depths < DEPTH)[None, :], other=0.0)
            b = tl.load(weight)
        else:
            inside = (depths < depth - start)[None, :]
            a = tl.load(rows, mask=exists & inside, other=0.0)
            b = tl.load(weight, mask=inside, other=0.0)
        acc = tl.dot(operand(a, INTERPRET), tl.trans(operand(b, INTERPRET)), acc)
        rows += DEPTH
        weight += DEPTH
    store_tile(
        out_ptr,
        bias_ptr,
        acc,
        row,
        column,
        num_rows,
        num_columns,
        stride_out,
        HAS_BIAS,
        ROWS,
        COLUMNS,
        DTYPE,
        INTERPRET,
    )


@triton.jit(do_not_specialize=["num_rows"])
def wide_product_kernel(
    rows_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,
    stride_out,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """As product_kernel, for many rows: bulk copies fetch the tiles, and a program computes every
    NUM_PROGRAMS-th one. The copies fill what lies past the end with zeros."""
    num_tiles = tl.cdiv(num_rows, ROWS) * tl.cdiv(num_columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=True):
        row, column = place_of(tile, num_rows, num_columns, GROUP, ROWS, COLUMNS)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            a = operand(rows_desc.load([row, start]), INTERPRET)
            b = operand(weight_desc.load([column, start]), INTERPRET)
            acc = tl.dot(a, tl.trans(b), acc)
        store_tile(
            out_ptr,
            bias_ptr,
            acc,
            row,
            column,
            num_rows,
            num_columns,
            stride_out,
            HAS_BIAS,
            ROWS,
            COLUMNS,
            DTYPE,
            INTERPRET,
        )

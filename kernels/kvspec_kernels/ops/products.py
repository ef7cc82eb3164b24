"""Products with weights at full precision: the bits of a row do not depend on the other rows.

torch.mm selects a kernel by the number of rows, and for few rows one that splits the sum. Here the
tile follows from the number of rows, but no tile splits the sum, and all use the same instruction,
which adds depth after depth. So all tiles give the same bits. equal_tiles() asks the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kvspec_kernels.jit.products import product_kernel, wide_product_kernel
from kvspec_kernels.ops.device import is_large, num_multiprocessors
from kvspec_kernels.ops.triton_attention import INTERPRETED, TRITON_DTYPES

# Blocks of rows that read the same columns, one after the other.
GROUP = 8
# Bytes that the address and the strides of an operand of bulk copies are multiples of.
ALIGNMENT = 16
# Depth of the sums that equal_tiles() compares.
DEPTH_OF_CHECK = 4096
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tile:
    """Size of a program's output, and of the step in which it reads its operands.

    microseconds: time of one tile a multiprocessor, for a depth of 4096. Only ratios count.
    bulk: bulk copies fetch the operands.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    microseconds: float = 0.0
    bulk: bool = True


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a GPU. narrow, plain: for up to FEW_ROWS rows, where reading the weight takes the
    time; narrow if each multiprocessor gets one tile at most. wide: for more rows."""

    narrow: Tile
    plain: Tile
    wide: tuple[Tile, ...]

    @property
    def all(self) -> tuple[Tile, ...]:
        return (self.narrow, self.plain, *self.wide)


FEW_ROWS = 64
# Tiles of Hopper, with times of an H100.
LARGE = Tiles(
    narrow=Tile(64, 32, 256, num_warps=4, num_stages=4, bulk=False),
    plain=Tile(64, 64, 128, num_warps=4, num_stages=4, bulk=False),
    wide=(
        Tile(64, 64, 128, num_warps=4, num_stages=4, microseconds=17),
        Tile(64, 128, 64, num_warps=4, num_stages=5, microseconds=21),
        Tile(128, 128, 64, num_warps=8, num_stages=5, microseconds=23),
        Tile(128, 256, 64, num_warps=8, num_stages=3, microseconds=44),
    ),
)
# Tiles that fit 99 KiB without bulk copies. No such GPU was measured: the times are those of LARGE.
SMALL = Tiles(
    narrow=Tile(64, 32, 256, num_warps=4, num_stages=3, bulk=False),
    plain=Tile(64, 64, 128, num_warps=4, num_stages=3, bulk=False),
    wide=(
        Tile(64, 128, 64, num_warps=4, num_stages=3, microseconds=21, bulk=False),
        Tile(128, 128, 64, num_warps=8, num_stages=3, microseconds=23, bulk=False),
        Tile(128, 256, 64, num_warps=8, num_stages=2, microseconds=44, bulk=False),
    ),
)


def tiles_of(device: torch.device) -> Tiles:
    return LARGE if is_large(device) else SMALL


def takes(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if product() can multiply [M, K] rows by an [N, K] weight. The answer does not
    depend on M."""
    return (
        rows.dtype == weight.dtype
        and rows.dtype in DTYPES
        and weight.stride(1) == 1
        and _is_aligned(weight)
        and weight.shape[1] * weight.element_size() % ALIGNMENT == 0
    )


def product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return rows @ weight.T + bias, [M, N] of the dtype of rows, summed in fp32 and rounded once.

    rows: [M, K] bf16 or fp16. weight: [N, K] of the same dtype, its last dimension contiguous.
    bias: [N]. Allocates the output, and a copy of rows if they are not aligned. Raises ValueError
    for tensors that takes() refuses, and for shapes that do not fit.
    """
    if not takes(rows, weight):
        raise ValueError(
            f"rows {list(rows.shape)} of {rows.dtype} and weight {list(weight.shape)} of "
            f"{weight.dtype} must be both bf16 or both fp16, with rows of the weight that are "
            f"contiguous and begin at multiples of {ALIGNMENT} bytes"
        )
    if rows.ndim != 2 or rows.shape[1] != weight.shape[1]:
        raise ValueError(f"rows {list(rows.shape)} do not fit the weight {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} does not fit the weight {list(weight.shape)}")
    device = rows.device
    sizes = (len(rows), len(weight), num_multiprocessors(device))
    tile = choose_tile(tiles_of(device), *sizes)
    return multiply(rows, weight, bias, tile)


def choose_tile(tiles: Tiles, num_rows: int, num_columns: int, num_sms: int) -> Tile:
    """Return the tile that is expected to be the fastest."""
    if num_rows <= FEW_ROWS:
        fits = triton.cdiv(num_columns, tiles.narrow.columns) <= num_sms
        return tiles.narrow if fits else tiles.plain

    def time_of(tile: Tile) -> float:
        count = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
        return float(triton.cdiv(count, num_sms) * tile.microseconds)

    return min(tiles.wide, key=time_of)


def equal_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if all tiles give the same bits on a device. Compiles all of them."""
    draw = torch.Generator(device).manual_seed(0)
    # Several tiles each, of which the last are not full.
    rows, weight = (
        torch.randn(count, DEPTH_OF_CHECK, generator=draw, device=device).to(dtype)
        for count in (300, 328)
    )
    outs = [multiply(rows, weight, None, tile) for tile in tiles_of(device).all]
    return all(torch.equal(out, outs[0]) for out in outs[1:])


def multiply(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    """Multiply as product() does, with a given tile and without its checks."""
    (num_rows, depth), num_columns = rows.shape, len(weight)
    out = rows.new_empty(num_rows, num_columns)
    if not out.numel():
        return out
    if rows.stride(1) != 1 or not _is_aligned(rows):
        rows = rows.clone(memory_format=torch.contiguous_format)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    common: dict[str, Any] = {
        "bias_ptr": out if bias is None else bias,
        "out_ptr": out,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "depth": depth,
        "stride_out": out.stride(0),
        "HAS_BIAS": bias is not None,
        "GROUP": GROUP,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "DTYPE": TRITON_DTYPES[rows.dtype],
        "INTERPRET": INTERPRETED,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    if tile.bulk:
        programs = num_multiprocessors(rows.device)
        wide_product_kernel[(min(num_tiles, programs),)](
            rows_desc=_described(rows, tile.rows, tile.depth),
            weight_desc=_described(weight, tile.columns, tile.depth),
            NUM_PROGRAMS=programs,
            **common,
        )
    else:
        product_kernel[(num_tiles,)](
            rows_ptr=rows,
            weight_ptr=weight,
            stride_rows=rows.stride(0),
            stride_weight=weight.stride(0),
            WHOLE_DEPTH=depth % tile.depth == 0,
            **common,
        )
    return out


def _described(matrix: torch.Tensor, rows: int, depth: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, depth])


def _is_aligned(matrix: torch.Tensor) -> bool:
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % ALIGNMENT == 0 and row_bytes % ALIGNMENT == 0

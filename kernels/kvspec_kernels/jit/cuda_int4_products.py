"""Launch cuda/int4_product.cu: products of a few rows with weights in 4 bits on Hopper."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from kvspec_kernels.jit import nvrtc

# Inputs of a stage.
CHUNK = 256
# Rows and columns of one matrix instruction, whose left operand is the weight.
TILE_ROWS, TILE_COLUMNS = 8, 16
# Inputs of a row that are read at once, 16 bytes, and columns that a lane has.
ROW_STEP, COLUMN_STEP = 8, 2


@dataclass(frozen=True, slots=True)
class CudaTile:
    """Size of a block's output. row_tiles: eights of rows. strips: 16 columns each, of each warp.
    stages: chunks of rows in shared memory, at least 3. programs: blocks of a multiprocessor."""

    row_tiles: int
    strips: int
    warps: int
    stages: int
    programs: int

    @property
    def rows(self) -> int:
        return TILE_ROWS * self.row_tiles

    @property
    def columns(self) -> int:
        return TILE_COLUMNS * self.strips * self.warps

    @property
    def shared_bytes(self) -> int:
        """Bytes of all stages: rows of a chunk, each with 64 bytes that keep banks apart."""
        return self.stages * self.rows * (2 * CHUNK + 64)


def supported(x: torch.Tensor, num_columns: int, bias: torch.Tensor | None = None) -> bool:
    """Return True if the kernel covers rows x [M, K], a weight of so many columns, and its bias."""
    has_pairs = bias is None or (
        bias.dtype == torch.bfloat16 and bias.is_contiguous() and bias.data_ptr() % 4 == 0
    )
    return (
        has_pairs
        and nvrtc.is_hopper(x.device)
        and x.dtype == torch.bfloat16
        and x.shape[1] % ROW_STEP == 0
        and num_columns % COLUMN_STEP == 0
    )


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy of x whose rows start at multiples of 16 bytes."""
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % ROW_STEP == 0
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def product_defines(tile: CudaTile) -> dict[str, int | str]:
    """Return the constants that cuda/int4_product.cu is compiled with."""
    return {
        "ROW_TILES": tile.row_tiles,
        "STRIPS": tile.strips,
        "WARPS": tile.warps,
        "STAGES": tile.stages,
        "BLOCKS": tile.programs,
        "Q_BF16": 1,
    }


@functools.lru_cache(maxsize=64)
def product_kernel(tile: CudaTile, device: torch.device) -> nvrtc.Kernel:
    """Return the kernel of a tile, compiled once for each process and device."""
    (kernel,) = nvrtc.load("int4_product.cu", ("int4_product",), product_defines(tile), device)
    kernel.allow_shared_memory(tile.shared_bytes)
    return kernel


def multiply(
    x: torch.Tensor,
    words: torch.Tensor,
    affine: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor,
    arrived: torch.Tensor,
    tile: CudaTile,
    programs: int,
) -> None:
    """Enqueue out = x @ weight.T + bias on the current stream, by so many programs.

    x: [M, K] bf16 as aligned() returns it, M at most the tile's rows. words, affine, arrived: parts
    of a packed weight (ops/int4_products.py). out: [M, N] bf16, contiguous. partial: fp32 [2 *
    programs, the tile's columns * rows].
    """
    num_chunks, num_columns, _ = words.shape
    arguments = (
        x,
        words,
        affine,
        ctypes.c_void_p(None) if bias is None else bias,
        out,
        partial,
        arrived,
        ctypes.c_int(len(x)),
        ctypes.c_int(num_columns),
        ctypes.c_int(x.shape[1]),
        ctypes.c_int(num_chunks),
        ctypes.c_int64(x.stride(0)),
    )
    kernel = product_kernel(tile, x.device)
    kernel.launch(programs, 32 * tile.warps, arguments, tile.shared_bytes)

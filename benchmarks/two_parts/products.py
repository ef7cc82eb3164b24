"""Products of a few rows with weights in two parts, and the weight in bf16 for prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from kvspec_kernels.ops.device import num_multiprocessors
from kvspec_kernels.ops.int4_products import MOST_REGISTERS, REGISTERS, num_programs
from kvspec_kernels.reference import nibbles
from two_parts import kernels
from two_parts.parts import TwoParts

# Inputs of a plane, and of a chunk of 4 planes.
PLANE, CHUNK = 64, 256
LEAST_COLUMNS = 64
INTERPRETED = not isinstance(kernels.product_kernel, triton.runtime.JITFunction)
RECONSTRUCT_COLUMNS, LISTED_BLOCK = 32, 1024


class PackedParts(NamedTuple):
    """A weight [N, K] for the kernels, with K rounded up to C chunks.

    first: int16 [C, 2, N, 64], two inputs a word that lie a plane apart, the first one in the low
    bits. second: int16 [C, N, 64], four inputs a word. scale, small_at, small, num_inputs: as in
    TwoParts. arrived: int32 zeros, one a tile, which each product leaves at zero, so products with
    one weight must not run at the same time.
    """

    first: torch.Tensor
    second: torch.Tensor
    scale: torch.Tensor
    small_at: torch.Tensor
    small: torch.Tensor
    arrived: torch.Tensor
    num_inputs: int

    @property
    def num_columns(self) -> int:
        return self.first.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self[:6])


@dataclass(frozen=True, slots=True)
class Tile:
    """Size of a program's output, and how many programs a multiprocessor has."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    programs: int

    @property
    def most_registers(self) -> int:
        """Registers of a thread that let these programs run at once."""
        num_threads = self.programs * self.num_warps * 32
        return min(REGISTERS // num_threads // 8 * 8, MOST_REGISTERS)


TILES = (
    Tile(16, 64, num_warps=4, num_stages=3, programs=2),
    Tile(16, 64, num_warps=4, num_stages=3, programs=3),
    Tile(16, 64, num_warps=4, num_stages=2, programs=3),
    Tile(16, 128, num_warps=8, num_stages=3, programs=1),
    Tile(16, 128, num_warps=8, num_stages=4, programs=1),
    Tile(64, 64, num_warps=4, num_stages=2, programs=2),
    Tile(64, 128, num_warps=8, num_stages=2, programs=1),
    Tile(64, 128, num_warps=8, num_stages=3, programs=1),
    Tile(128, 128, num_warps=8, num_stages=2, programs=1),
)


def packed(parts: TwoParts) -> PackedParts:
    """Return a weight in the order of the kernels, on the same device."""
    num_columns = len(parts.first)
    missing = -parts.num_inputs % CHUNK

    def planes(values: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(values[:, : parts.num_inputs], (0, missing))
        return padded.view(num_columns, -1, 4, PLANE).permute(1, 2, 0, 3).short().contiguous()

    first = planes(parts.first)
    second = planes(nibbles.unpack(parts.second))
    return PackedParts(
        first[:, 0::2] | first[:, 1::2] << 8,
        second[:, 0] | second[:, 1] << 4 | second[:, 2] << 8 | second[:, 3] << 12,
        parts.scale,
        parts.small_at,
        parts.small,
        torch.zeros(
            triton.cdiv(num_columns, LEAST_COLUMNS), dtype=torch.int32, device=first.device
        ),
        parts.num_inputs,
    )


def multiply(x: torch.Tensor, weight: PackedParts, *, both: bool, tile: Tile) -> torch.Tensor:
    """Return x @ weight.T, bf16 [M, N], summed in fp32.

    x: bf16 [M, K]. both: multiply with the exact weight, otherwise with the first part alone.
    Allocates the output and partial sums, and does not wait for the device. Raises ValueError for
    other dtypes and for shapes that do not fit.
    """
    if x.dtype != torch.bfloat16 or x.ndim != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(
            f"x {list(x.shape)} is {x.dtype}, must be bf16 [rows, {weight.num_inputs}]"
        )
    num_rows, num_columns, num_chunks = len(x), weight.num_columns, len(weight.first)
    out = x.new_empty(num_rows, num_columns)
    if not out.numel():
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    # `arrived` has a count for each tile of columns.
    is_shared = num_rows <= tile.rows
    programs, partial = num_tiles, out
    if is_shared:
        most = tile.programs * num_multiprocessors(x.device)
        programs = num_programs(most, num_tiles, num_chunks)
        partial = x.new_empty((2 * programs, tile.columns, tile.rows), dtype=torch.float32)
    kernels.product_kernel[(programs,)](
        rows_ptr=x,
        first_ptr=weight.first,
        second_ptr=weight.second,
        scale_ptr=weight.scale,
        small_at_ptr=weight.small_at,
        small_ptr=weight.small,
        out_ptr=out,
        partial_ptr=partial,
        arrived_ptr=weight.arrived,
        num_rows=num_rows,
        num_columns=num_columns,
        depth=weight.num_inputs,
        num_chunks=num_chunks,
        num_small=len(weight.small),
        stride_rows=x.stride(0),
        WHOLE_DEPTH=weight.num_inputs % CHUNK == 0,
        SHARED=is_shared,
        BOTH=both,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        INTERPRET=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.most_registers,
    )
    return out


def reconstruct(weight: PackedParts, out: torch.Tensor) -> torch.Tensor:
    """Write the exact weight to `out`, contiguous bf16 [N, K], and return it. Enqueues on the
    current stream. Raises ValueError for another shape or dtype."""
    size = (weight.num_columns, weight.num_inputs)
    if out.shape != size or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(f"out {list(out.shape)} is {out.dtype}, must be contiguous bf16 {size}")
    bits = out.view(torch.int16)
    grid = (len(weight.first), triton.cdiv(weight.num_columns, RECONSTRUCT_COLUMNS))
    kernels.reconstruct_kernel[grid](
        first_ptr=weight.first,
        second_ptr=weight.second,
        scale_ptr=weight.scale,
        out_ptr=bits,
        num_columns=weight.num_columns,
        depth=weight.num_inputs,
        COLUMNS=RECONSTRUCT_COLUMNS,
    )
    num_listed = weight.small.numel()
    if num_listed:
        kernels.store_small_kernel[(triton.cdiv(num_listed, LISTED_BLOCK),)](
            small_at_ptr=weight.small_at,
            small_ptr=weight.small.view(torch.int16),
            out_ptr=bits,
            num_listed=num_listed,
            num_columns=weight.num_columns,
            depth=weight.num_inputs,
            BLOCK=LISTED_BLOCK,
        )
    return out

"""Products of a few rows with weights in 4 bits, for draft steps.

Products of up to 16 rows have a kernel in CUDA C++ on Hopper. All others run in Triton. Both read
the same packed weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from kvspec_kernels.jit import cuda_int4_products
from kvspec_kernels.jit.cuda_int4_products import CudaTile
from kvspec_kernels.jit.int4_products import int4_product_kernel
from kvspec_kernels.ops.attention_plan import Backend, check_backend
from kvspec_kernels.ops.device import is_large, num_multiprocessors
from kvspec_kernels.ops.triton_attention import INTERPRETED, TRITON_DTYPES
from kvspec_kernels.reference import nibbles
from kvspec_kernels.reference.int4_weights import GROUP, Int4Weight

# Groups whose codes share a 16-bit word.
PLANES = 4
CHUNK = PLANES * GROUP
# Chunks that a program of a part of a tile has at least, in Triton and in CUDA.
LEAST_CHUNKS, LEAST_CUDA_CHUNKS = 4, 1
# Registers of a multiprocessor, and most of a thread.
REGISTERS, MOST_REGISTERS = 65536, 255
# Most rows of a tile. More rows take several tiles, which read the weight once each.
MOST_ROWS = 64


class PackedWeight(NamedTuple):
    """A weight [N, K] for the kernel, with K rounded up to C chunks of CHUNK inputs.

    words: int16 [C, N, GROUP], codes of inputs that lie a group apart, the first group in the
    lowest bits. affine: int32 [PLANES * C, N], the bits of scale (low half) and of zero (high
    half). arrived: int32 zeros, one a tile, which each product leaves at zero. So products with one
    weight must not run at the same time. num_inputs: K.
    """

    words: torch.Tensor
    affine: torch.Tensor
    arrived: torch.Tensor
    num_inputs: int

    @property
    def num_columns(self) -> int:
        return self.words.shape[1]

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.affine.nbytes + self.arrived.nbytes


@dataclass(frozen=True, slots=True)
class Tile:
    """Size of a program's output, and how many programs a multiprocessor has.

    decoded: weights are rounded to bf16 before the product. Otherwise sums of a group are scaled.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    decoded: bool
    programs: int

    @property
    def most_registers(self) -> int:
        """Registers of a thread that let these programs run at once."""
        num_threads = self.programs * self.num_warps * 32
        return min(REGISTERS // num_threads // 8 * 8, MOST_REGISTERS)


# Programs by the shared memory that they take, and so that registers spill little (Triton 3.6,
# Hopper).
TILES = (
    Tile(16, 64, num_warps=4, num_stages=4, decoded=False, programs=2),
    Tile(16, 64, num_warps=4, num_stages=4, decoded=True, programs=3),
    Tile(16, 128, num_warps=8, num_stages=4, decoded=False, programs=1),
    Tile(32, 64, num_warps=4, num_stages=4, decoded=True, programs=2),
    Tile(32, 128, num_warps=8, num_stages=3, decoded=True, programs=1),
    Tile(64, 64, num_warps=4, num_stages=2, decoded=True, programs=2),
    Tile(64, 128, num_warps=8, num_stages=3, decoded=True, programs=1),
)
# Tiles that choose_tile() takes, by rows: the fastest for each product of an 8B layer.
CHOSEN = {16: TILES[0], 32: TILES[4], 64: TILES[6]}
# The same for GPUs of 99 KiB of shared memory a block. None was measured.
CHOSEN_SMALL = CHOSEN | {64: replace(TILES[6], num_stages=2)}
LEAST_COLUMNS = min(tile.columns for tile in TILES)
# Tiles in CUDA. More rows are faster in Triton.
CUDA_TILES = (
    CudaTile(1, strips=2, warps=4, stages=4, programs=2),
    CudaTile(2, strips=2, warps=4, stages=4, programs=2),
)


def empty(num_columns: int, num_inputs: int, device: torch.device) -> PackedWeight:
    """Return a weight [num_columns, num_inputs] for write_rows(), all codes zero."""
    num_chunks = triton.cdiv(num_inputs, CHUNK)
    return PackedWeight(
        torch.zeros(num_chunks, num_columns, GROUP, dtype=torch.int16, device=device),
        torch.zeros(PLANES * num_chunks, num_columns, dtype=torch.int32, device=device),
        torch.zeros(triton.cdiv(num_columns, LEAST_COLUMNS), dtype=torch.int32, device=device),
        num_inputs,
    )


def bytes_of(num_columns: int, num_inputs: int) -> int:
    """Return the bytes of a packed weight."""
    num_chunks = triton.cdiv(num_inputs, CHUNK)
    words, affine = num_chunks * num_columns * GROUP * 2, PLANES * num_chunks * num_columns * 4
    return int(words + affine + triton.cdiv(num_columns, LEAST_COLUMNS) * 4)


def write_rows(packed: PackedWeight, begin: int, rows: Int4Weight) -> None:
    """Replace rows of a packed weight, from row `begin` on, in place: captured graphs that hold its
    addresses multiply with the new ones. rows: [n, K], on the same device. Enqueues on the current
    stream. Raises ValueError for rows that do not fit."""
    count, end = len(rows.codes), begin + len(rows.codes)
    if rows.num_inputs != packed.num_inputs or not 0 <= begin <= end <= packed.num_columns:
        raise ValueError(
            f"rows {begin} to {end} of {rows.num_inputs} inputs do not fit a weight "
            f"[{packed.num_columns}, {packed.num_inputs}]"
        )
    codes = nibbles.unpack(rows.codes)
    missing = -codes.shape[1] % CHUNK
    # Scale and zero of groups that do not exist are zero, and so are their inputs.
    codes = torch.nn.functional.pad(codes, (0, missing))
    planes = codes.view(count, -1, PLANES, GROUP).to(torch.int32)
    words = sum(planes[:, :, plane] << 4 * plane for plane in range(PLANES))
    assert isinstance(words, torch.Tensor)
    scale, zero = (
        torch.nn.functional.pad(part, (0, missing // GROUP)).view(torch.int16).to(torch.int32)
        for part in (rows.scale.contiguous(), rows.zero.contiguous())
    )
    affine = (scale & 0xFFFF) | (zero << 16)
    packed.words[:, begin:end] = words.to(torch.int16).transpose(0, 1)
    packed.affine[:, begin:end] = affine.t()


def repacked(weight: Int4Weight) -> PackedWeight:
    """Return a weight in the kernel's order, on the same device."""
    packed = empty(len(weight.codes), weight.num_inputs, weight.codes.device)
    write_rows(packed, 0, weight)
    return packed


def product(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return x @ weight.T + bias, bf16 [M, N], summed in fp32.

    x: bf16 [M, K]. bias: [N]. backend: "auto" takes "cuda" for the products that
    choose_cuda_tile() covers. Allocates the output and partial sums, and does not wait for the
    device. The bits of a row depend on the number of rows. Raises ValueError for other dtypes, for
    shapes that do not fit, and for products that the back end does not cover.
    """
    check_backend(backend)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}, and must be bf16")
    if x.ndim != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {weight.num_inputs} inputs")
    if bias is not None and bias.shape != (weight.num_columns,):
        raise ValueError(f"bias {list(bias.shape)} does not fit {weight.num_columns} columns")
    tile = None if backend == "triton" else choose_cuda_tile(x, weight.num_columns, bias)
    if tile is not None:
        return multiply_in_cuda(x, weight, bias, tile)
    if backend == "cuda":
        raise ValueError(
            "backend 'cuda' needs a device of compute capability 9.0, at most "
            f"{CUDA_TILES[-1].rows} rows, inputs in multiples of 8, an even number of columns and "
            f"a contiguous bf16 bias, got x {list(x.shape)} on {x.device} and {weight.num_columns} "
            "columns"
        )
    return multiply(x, weight, bias, choose_tile(chosen_tiles(x.device), len(x)))


def chosen_tiles(device: torch.device) -> Mapping[int, Tile]:
    """Return the tiles of a device by their rows, as measured on Hopper
    (benchmarks/bench_int4_products.py)."""
    return CHOSEN if is_large(device) else CHOSEN_SMALL


def choose_tile(chosen: Mapping[int, Tile], num_rows: int) -> Tile:
    """Return the tile for a product of so many rows."""
    return chosen[next((rows for rows in chosen if num_rows <= rows), MOST_ROWS)]


def choose_cuda_tile(
    x: torch.Tensor, num_columns: int, bias: torch.Tensor | None = None
) -> CudaTile | None:
    """Return the tile in CUDA for a product with rows x [M, K], or None if Triton is faster, or the
    kernel does not cover the product."""
    if not cuda_int4_products.supported(x, num_columns, bias):
        return None
    return next((tile for tile in CUDA_TILES if len(x) <= tile.rows), None)


def num_programs(most: int, num_tiles: int, num_chunks: int, least: int = LEAST_CHUNKS) -> int:
    """Return how many programs share out the chunks of all tiles, of at most this many. least:
    chunks that a program of a part of a tile has at least.

    A program of several tiles is good for any number of them. But it may leave two partial sums, so
    if there are enough programs for all tiles, each tile gets the same number of them.
    """
    if num_tiles > most:
        return most
    parts = 1
    while 2 * parts * num_tiles <= most and 2 * parts * least <= num_chunks:
        parts *= 2
    return parts * num_tiles


def multiply(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    """Multiply as product() does, with a given tile and without its checks."""
    num_rows, num_columns = len(x), weight.num_columns
    out = x.new_empty(num_rows, num_columns)
    if not out.numel():
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    num_chunks = len(weight.words)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    # `arrived` has a count for each tile of columns.
    is_shared = num_rows <= tile.rows
    programs, partial = num_tiles, out
    if is_shared:
        most = tile.programs * num_multiprocessors(x.device)
        programs = num_programs(most, num_tiles, num_chunks)
        partial = x.new_empty((2 * programs, tile.columns, tile.rows), dtype=torch.float32)
    int4_product_kernel[(programs,)](
        rows_ptr=x,
        words_ptr=weight.words,
        affine_ptr=weight.affine,
        bias_ptr=out if bias is None else bias,
        out_ptr=out,
        partial_ptr=partial,
        arrived_ptr=weight.arrived,
        num_rows=num_rows,
        num_columns=num_columns,
        depth=weight.num_inputs,
        num_chunks=num_chunks,
        stride_rows=x.stride(0),
        HAS_BIAS=bias is not None,
        WHOLE_DEPTH=weight.num_inputs % CHUNK == 0,
        SHARED=is_shared,
        DECODED=tile.decoded,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DTYPE=TRITON_DTYPES[x.dtype],
        INTERPRET=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.most_registers,
    )
    return out


def multiply_in_cuda(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, tile: CudaTile
) -> torch.Tensor:
    """Multiply as product() does, with a given tile and without its checks. The tile must have as
    many rows as x."""
    out = x.new_empty(len(x), weight.num_columns)
    if not out.numel():
        return out
    num_tiles = triton.cdiv(weight.num_columns, tile.columns)
    most = tile.programs * num_multiprocessors(x.device)
    programs = num_programs(most, num_tiles, len(weight.words), LEAST_CUDA_CHUNKS)
    cuda_int4_products.multiply(
        cuda_int4_products.aligned(x),
        weight.words,
        weight.affine,
        bias,
        out,
        x.new_empty((2 * programs, tile.columns * tile.rows), dtype=torch.float32),
        weight.arrived,
        tile,
        programs,
    )
    return out

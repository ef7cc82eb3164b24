"""Encoding by TurboQuant's codec, with the bits of reference/turboquant.py."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit import arithmetic
from kvspec_kernels.jit.hadamard import MOST_STAGES, load_signs, rotate
from kvspec_kernels.jit.sizes import hadamard_block, next_power_of_2

# Tokens of a step of a program. Squares in fp64 of more would not fit registers.
TOKENS = tl.constexpr(16)
# Codes that are packed together: a multiple of whole bytes for any width.
UNIT = tl.constexpr(8)


@triton.jit
def turboquant_part(
    page_ptr,
    anchor_ptr,
    corrections_ptr,
    edges_ptr,
    one,
    stride_token: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    ANCHOR_BITS: tl.constexpr,
    WITH_CORRECTIONS: tl.constexpr,
    LAW: tl.constexpr,
):
    """Write K or V of a page. Arguments are those of records.py. edges_ptr: an unused number, the
    edges between levels in order, then the signs of the rotation."""
    BLOCK: tl.constexpr = hadamard_block(HEAD_DIM)
    WIDTH: tl.constexpr = next_power_of_2(HEAD_DIM)
    BLOCKS: tl.constexpr = WIDTH // BLOCK
    channels = tl.arange(0, WIDTH)
    signs = load_signs(edges_ptr, channels, ANCHOR_BITS, HEAD_DIM)
    if KV_DTYPE == "bf16":
        # Loaded as integers: the interpreter's conversion rounds denormal numbers to 0.
        values_ptr = page_ptr.to(tl.pointer_type(tl.int16))
    elif KV_DTYPE == "fp16":
        values_ptr = page_ptr.to(tl.pointer_type(tl.float16))
    else:
        values_ptr = page_ptr.to(tl.pointer_type(tl.float32))
    blocks = tl.arange(0, BLOCKS)
    units = tl.arange(0, WIDTH // UNIT)
    for first in range(0, PAGE_SIZE, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        # Strides are in pairs.
        x = tl.load(
            values_ptr + tokens[:, None] * (2 * stride_token) + channels[None, :],
            mask=channels[None, :] < HEAD_DIM,
            other=0,
        )
        if KV_DTYPE == "bf16":
            x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            x = x.to(tl.float32)
        norm_bits = _norm_bits(x, BLOCK)
        tl.store(
            (anchor_ptr + FIELDS[1]).to(tl.pointer_type(tl.int16))
            + tokens[:, None] * (HEAD_DIM // BLOCK)
            + blocks[None, :],
            (norm_bits >> 16).to(tl.int16),
            mask=blocks[None, :] < HEAD_DIM // BLOCK,
        )
        norm = norm_bits.to(tl.float32, bitcast=True)
        # A zero norm means that all values of the block are 0.
        divisor = tl.where(norm > 0.0, norm, 1.0)[:, :, None]
        by_block = x.reshape(TOKENS, BLOCKS, BLOCK)
        unit = tl.div_rn(by_block, divisor.broadcast_to(TOKENS, BLOCKS, BLOCK))
        rotated = rotate(unit.reshape(TOKENS, WIDTH), signs, HEAD_DIM)
        codes = tl.zeros([TOKENS, WIDTH], dtype=tl.int32)
        for level in tl.static_range(1, 1 << ANCHOR_BITS):
            codes += (rotated > tl.load(edges_ptr + level)).to(tl.int32)
        shifts = tl.arange(0, UNIT) * ANCHOR_BITS
        shifted = codes.reshape(TOKENS, WIDTH // UNIT, UNIT) << shifts[None, None, :]
        words = tl.sum(shifted, axis=2)
        bytes_ptr = (anchor_ptr + FIELDS[0]).to(tl.pointer_type(tl.uint8))
        bytes_ptr += tokens[:, None] * (HEAD_DIM * ANCHOR_BITS // 8) + units[None, :] * ANCHOR_BITS
        for byte in tl.static_range(ANCHOR_BITS):
            tl.store(
                bytes_ptr + byte,
                (words >> 8 * byte).to(tl.uint8),
                mask=units[None, :] < HEAD_DIM // UNIT,
            )


@triton.jit
def _norm_bits(x, BLOCK: tl.constexpr):
    """Return the norms of blocks of rows x [M, D] as bf16, in the upper halves of int32
    [M, D / BLOCK]."""
    M: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = x.shape[1] // BLOCK
    wide = x.to(tl.float64).reshape(M, BLOCKS, BLOCK)
    squares = wide * wide
    # Added in pairs, in the order of the reference.
    for stage in tl.static_range(MOST_STAGES):
        if BLOCK >> stage > 1:
            halves = squares.reshape(M, BLOCKS, 2, BLOCK >> (stage + 1)).permute(0, 1, 3, 2)
            first, second = tl.split(halves)
            squares = first + second
    norm = tl.sqrt(squares.reshape(M, BLOCKS))
    return arithmetic.to_bf16_bits(arithmetic.clamp_to_bf16(norm).to(tl.float32))

"""Rotation of rows inside a kernel: random signs, then a Hadamard matrix, with the formulas and the
order of additions of `reference/hadamard.py`.

Rows [M, D] have a power of two of channels. Those behind a head's size must be 0, and stay 0, since
blocks divide the head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.sizes import hadamard_block

# The largest block has 2^8 channels.
MOST_STAGES = tl.constexpr(8)


@triton.jit
def rotate(rows, signs, HEAD_DIM: tl.constexpr):
    """Return rows [M, D] fp32 rotated. signs: [D] fp32."""
    return _hadamard(rows * signs[None, :], hadamard_block(HEAD_DIM))


@triton.jit
def rotate_back(rows, signs, HEAD_DIM: tl.constexpr):
    """Invert rotate."""
    return _hadamard(rows, hadamard_block(HEAD_DIM)) * signs[None, :]


@triton.jit
def load_signs(table_ptr, channels, ANCHOR_BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the signs of channels, 0 behind the head. table_ptr: one number for each code, then
    the signs."""
    return tl.load(table_ptr + (1 << ANCHOR_BITS) + channels, mask=channels < HEAD_DIM, other=0.0)


@triton.jit
def _hadamard(rows, BLOCK: tl.constexpr):
    M: tl.constexpr = rows.shape[0]
    D: tl.constexpr = rows.shape[1]
    rows = rows * BLOCK**-0.5
    for stage in tl.static_range(MOST_STAGES):
        if (1 << stage) < BLOCK:
            pairs = rows.reshape(M, D // (2 << stage), 2, 1 << stage).permute(0, 1, 3, 2)
            first, second = tl.split(pairs)
            both = tl.join(first + second, first - second)
            rows = both.permute(0, 1, 3, 2).reshape(M, D)
    return rows

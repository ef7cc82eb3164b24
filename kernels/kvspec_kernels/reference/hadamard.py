"""Hadamard rotation of heads: orthonormal, symmetric and its own inverse.

A head whose size is no power of two is rotated in blocks (`codecs.fields.hadamard_block`), since
a Sylvester matrix exists for powers of two only. Heads of 80 and 112 have blocks of 16, heads of
96 blocks of 32. Shorter blocks spread an outlier over fewer channels.

For orthonormal R, a kernel needs no inverse: q . k = (R q) . (R k), and the sum of p_i v_i is R
times the sum of p_i (R v_i). It rotates the query and the output, one vector each for a query head,
instead of every K and V that it reads.
"""

from __future__ import annotations

import torch

from kvspec_kernels.codecs.fields import hadamard_block


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Return values [..., D] fp32 rotated block by block, as a new tensor. Magnitudes grow by the
    root of the block at most, and must leave room for that."""
    block = hadamard_block(values.shape[-1])
    # Scaled first: sums of values near the dtype's maximum would overflow.
    rotated: torch.Tensor = values * block**-0.5
    width = 1
    while width < block:
        first, second = torch.unflatten(rotated, -1, (-1, 2, width)).unbind(-2)
        rotated = torch.stack((first + second, first - second), -2).flatten(-3)
        width *= 2
    return rotated

"""Triton kernel that runs only the divisions of encoding, for their tests."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit import arithmetic


@triton.jit
def divide_kernel(value_ptr, scale_ptr, ratio_ptr, clamped_ptr, fifteenth_ptr, BLOCK: tl.constexpr):
    """Divide fp32 values by scales with `jit/arithmetic.py`, without and with a clamp to [0, 1],
    and by fifteen. Grid (elements / BLOCK,)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(value_ptr + index)
    norm = arithmetic.normalised(tl.zeros_like(value), tl.load(scale_ptr + index))
    numerator = arithmetic.difference(value, norm)
    tl.store(ratio_ptr + index, arithmetic.quotient(numerator, norm))
    tl.store(clamped_ptr + index, arithmetic.quotient_to_one(numerator, norm))
    tl.store(fifteenth_ptr + index, arithmetic.fifteenth(value))

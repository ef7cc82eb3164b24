"""Conversions that round to nearest even, also in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Round fp32 x to DTYPE. In the interpreter the rounded value stays in fp32, because bf16
    conversions truncate there and bf16 products multiply bit patterns."""
    if not INTERPRET:
        return x.to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + (bits >> 16 & 1)
        return (bits & -0x10000).to(tl.float32, bitcast=True)
    else:
        return x.to(DTYPE).to(tl.float32)


@triton.jit
def operand(x, INTERPRET: tl.constexpr):
    """Return x as an operand. In the interpreter it becomes fp32, because bf16 products multiply
    bit patterns there."""
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return x

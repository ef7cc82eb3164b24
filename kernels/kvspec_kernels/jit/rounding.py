"""Conversions that round to nearest even, in the interpreter too."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 x in DTYPE. In the interpreter, whose bf16 conversion truncates and whose bf16 products
    multiply bit patterns, the rounded value stays in fp32."""
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
    """x for a product; in the interpreter, whose bf16 products multiply bit patterns, in fp32."""
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return x

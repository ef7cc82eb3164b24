"""Arithmetic that rounds as the references do.

Launch kernels that use these functions with `enable_fp_fusion=False`, so that only operations
written as fused are fused. Triton's interpreter has neither fused operations nor assembly; the test
kit adds both.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Adding this rounds a float below 2^22 to an integer, ties to even, in the low bits of the sum.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
BF16_MAX = tl.constexpr(3.3895313892515355e38)
FP32_MAX = tl.constexpr(3.4028234663852886e38)
# The fp32 number next to 1 / 15.
FIFTEENTH = tl.constexpr(0.06666667014360428)


@triton.jit
def negative(value):
    # Triton's minus costs a subtraction from zero; this product costs nothing.
    return value * -1.0


@triton.jit
def integer_of(value):
    """Return the integer, as int32, of an integer + MAGIC."""
    return value.to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def to_bf16_bits(value):
    """Return the fp32 bits, int32, of finite `value` rounded to bf16: the upper half is the bf16.
    Zeros become +0, as in the references."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(bits == -2147483648, 0, bits)


@triton.jit
def clamp_to_bf16(value):
    return tl.minimum(tl.maximum(value, -BF16_MAX), BF16_MAX)


@triton.jit
def bf16_pair(low_bits, high_bits):
    """Return two results of to_bf16_bits as one int32, the first in the lower half."""
    return ((low_bits >> 16) & 0xFFFF) | high_bits


@triton.jit
def fifteenth(value):
    """Return value / 15 in IEEE arithmetic. Checked for every finite fp32 number."""
    guess = value * FIFTEENTH
    return tl.fma(tl.fma(guess, -15.0, value), FIFTEENTH, guess)


@triton.jit
def normalised(offset, scale):
    """Return the argument of `difference` and `quotient` for an offset and a scale >= 0:
    (factor, -offset * factor, -divisor * factor, 1 / (divisor * factor)).

    divisor is scale, or 1 where scale is 0. factor is a power of two that brings divisor into
    [1, 4): nothing overflows, and nothing that matters underflows. factor is 0 where
    offset * factor would be infinite; all values then equal the offset.
    """
    divisor = tl.where(scale > 0.0, scale, 1.0)
    exponent = divisor.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = divisor * factor
    # One Newton step gives the correctly rounded reciprocal of all 128 bf16 significands.
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scaled], dtype=tl.float32, is_pure=True, pack=1
    )
    inverse = tl.fma(tl.fma(negative(scaled), inverse, 1.0), inverse, inverse)
    fits = tl.abs(offset) * factor <= FP32_MAX
    factor = tl.where(fits, factor, 0.0)
    # Subtract from zero rather than negate: 0 must stay +0, so that `difference` is never -0.
    return factor, 0.0 - offset * factor, negative(scaled), inverse


@triton.jit
def difference(value, norm):
    """Return value - offset, rounded once, times factor. Zero is +0; even the smallest negative
    difference keeps its sign."""
    return tl.fma(value, norm[0], norm[1])


@triton.jit
def quotient(numerator, norm):
    """Return the IEEE quotient of a `difference`, for quotients of 2^-20 or more.

    The exact remainder corrects a guess by the rounded reciprocal. The result is right for every
    fp32 numerator and every divisor of up to 8 significant bits (checked for all).
    """
    guess = numerator * norm[3]
    return tl.fma(tl.fma(guess, norm[2], numerator), norm[3], guess)


@triton.jit
def quotient_to_one(numerator, norm):
    """Return `quotient` clamped to [0, 1], or 0 for NaN."""
    guess = numerator * norm[3]
    return fma_to_one(tl.fma(guess, norm[2], numerator), norm[3], guess)


@triton.jit
def fma_to_one(a, b, c):
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [a, b, c],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def log2_roughly(value):
    """Return log2 of value in [1, 65], with an error of 2^-22 absolute (relative, above 2)."""
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def swap_odd_bytes(word):
    """Return the int32 with bytes 1 and 3 exchanged."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0x1230;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def sign_bytes(a, b, c, d):
    """Return an int32 whose bytes, lowest first, have the signs of a, b, c, d as highest bits."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x, y;
        prmt.b32 x, $1, $2, 0x0073;
        prmt.b32 y, $3, $4, 0x7300;
        prmt.b32 x, x, y, 0x7610;
        and.b32 $0, x, 0x80808080;
        }""",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )

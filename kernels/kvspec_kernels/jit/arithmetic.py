"""Arithmetic that rounds as the references do.

Launch kernels that use it with `enable_fp_fusion=False`: only the fused operations written here are
meant. Triton's interpreter fuses nothing and knows no assembly; the test kit adds both.
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
    # Triton's minus subtracts from zero, an instruction; this one costs nothing.
    return value * -1.0


@triton.jit
def integer_of(value):
    """Of an integer + MAGIC, the integer as int32."""
    return value.to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def to_bf16_bits(value):
    """fp32 bits, int32, of finite `value` rounded to bf16: the upper half is the bf16. Zeros are
    +0, as in the references."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(bits == -2147483648, 0, bits)


@triton.jit
def clamp_to_bf16(value):
    return tl.minimum(tl.maximum(value, -BF16_MAX), BF16_MAX)


@triton.jit
def bf16_pair(low_bits, high_bits):
    """Two results of to_bf16_bits as one int32, the first in the lower half."""
    return ((low_bits >> 16) & 0xFFFF) | high_bits


@triton.jit
def fifteenth(value):
    """value / 15 in IEEE arithmetic; tried for every finite fp32 number."""
    guess = value * FIFTEENTH
    return tl.fma(tl.fma(guess, -15.0, value), FIFTEENTH, guess)


@triton.jit
def normalised(offset, scale):
    """What `difference` and `quotient` need to subtract offset and divide by scale >= 0, or by 1
    where it is 0: (factor, -offset * factor, -divisor * factor, 1 / (divisor * factor)).

    factor is a power of two that brings the divisor into [1, 4), so that nothing overflows and
    nothing that matters underflows. Offsets that it would make infinite belong to values that all
    equal it; there factor is 0.
    """
    divisor = tl.where(scale > 0.0, scale, 1.0)
    exponent = divisor.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = divisor * factor
    # One Newton step gives the rounded reciprocal of all 128 bf16 significands.
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scaled], dtype=tl.float32, is_pure=True, pack=1
    )
    inverse = tl.fma(tl.fma(negative(scaled), inverse, 1.0), inverse, inverse)
    fits = tl.abs(offset) * factor <= FP32_MAX
    factor = tl.where(fits, factor, 0.0)
    # From zero, not negated: 0 must stay +0, so that no -0 comes out of `difference`.
    return factor, 0.0 - offset * factor, negative(scaled), inverse


@triton.jit
def difference(value, norm):
    """value - offset, rounded once, times factor. Zero is +0; a negative difference keeps its sign
    however small it is."""
    return tl.fma(value, norm[0], norm[1])


@triton.jit
def quotient(numerator, norm):
    """The IEEE quotient of a `difference`, wherever it is 2^-20 or more.

    A guess by the rounded reciprocal and one correction by the exact remainder: right for every
    fp32 numerator and every divisor of up to 8 significant bits (tried for all of them).
    """
    guess = numerator * norm[3]
    return tl.fma(tl.fma(guess, norm[2], numerator), norm[3], guess)


@triton.jit
def quotient_to_one(numerator, norm):
    """`quotient`, clamped to [0, 1]; 0 for NaN."""
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
    """log2 of value in [1, 65], to 2^-22 absolute (relative, above 2)."""
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def swap_odd_bytes(word):
    """The int32 with its bytes 1 and 3 exchanged."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0x1230;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def sign_bytes(a, b, c, d):
    """int32 whose bytes, lowest first, have the signs of a, b, c and d in their highest bits."""
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

"""Arithmetic that rounds as the references do, on a GPU and in Triton's interpreter.

Launch kernels that use it with `enable_fp_fusion=False`: the references round products before they
add. The interpreter has neither fused multiply-add nor inline assembly, so it takes plain branches.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Adding this rounds a float below 2^22 to an integer, ties to even, in the low bits of the sum.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
BF16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def magic_bits(value):
    """The integer of `value + MAGIC`, int32."""
    return value.to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def to_bf16_bits(value):
    """fp32 bits, int32, of finite `value` rounded to bf16: the upper half is the bf16. -0 becomes 0,
    because references leave open which of two zeros is the smaller one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
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
def divisor_of(scale):
    """What `normalised` and `quotient` need for divisions by scale >= 0 (by 1 where it is 0): the
    divisor, a power of two that brings it near 2, their product, and the product's reciprocal."""
    divisor = tl.where(scale > 0.0, scale, 1.0)
    exponent = tl.maximum(divisor.to(tl.int32, bitcast=True) >> 23, 1)
    factor = ((255 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = divisor * factor
    if INTERPRETED:
        inverse = 1.0 / scaled
    else:
        # One Newton step gives the rounded reciprocal of all 128 bf16 significands.
        guess = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scaled], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.fma(tl.fma(-scaled, guess, 1.0), guess, guess)
    return divisor, factor, scaled, inverse


@triton.jit
def normalised(value, divisor):
    """A numerator in the units of `quotient`; -0 becomes 0."""
    if INTERPRETED:
        return value + 0.0
    return tl.fma(value, divisor[1], 0.0)


@triton.jit
def quotient(numerator, divisor):
    """The IEEE quotient of a `normalised` numerator, wherever it is 2^-20 or more; NaN instead of
    an infinity.

    Rounded reciprocal, then one correction by the exact remainder: right for every fp32 numerator
    and every divisor of up to 8 significant bits (tried for all of them), which bf16 scales have.
    """
    if INTERPRETED:
        return tl.div_rn(numerator, divisor[0])
    guess = numerator * divisor[3]
    return tl.fma(tl.fma(-guess, divisor[2], numerator), divisor[3], guess)


@triton.jit
def count_reached(value, EDGES: tl.constexpr):
    """MAGIC + the number of EDGES <= value >= 0. EDGES: fp32 numbers in [2^-20, 1], and -2^100
    times the fp32 number before each, alternating: a multiply-add that saturates at 0 and 1 is then
    1 where the edge is reached and 0 where it is not."""
    count = tl.zeros_like(value) + MAGIC
    for i in tl.static_range(len(EDGES) // 2):
        if INTERPRETED:
            reached = tl.where(value >= EDGES[2 * i], 1.0, 0.0)
        else:
            reached = tl.inline_asm_elementwise(
                "fma.rn.sat.f32 $0, $1, 0f71800000, $2;",
                "=f,f,f",
                [value, EDGES[2 * i + 1]],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        count += reached
    return count


@triton.jit
def log2_roughly(value):
    """log2 of value in [1, 65], to 2^-22 absolute (relative, above 2)."""
    if INTERPRETED:
        return tl.log2(value)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )

"""Encoding by the uniform codec, with the bits of reference/uniform4.py."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit import arithmetic


@triton.jit
def _scale_and_zero(low, high):
    """Return scale and zero of a group as stored (fp32 bits of bf16 values), and the numbers that
    `words` takes."""
    zero_bits = arithmetic.to_bf16_bits(arithmetic.clamp_to_bf16(low))
    zero = zero_bits.to(tl.float32, bitcast=True)
    span = arithmetic.fifteenth(high) - arithmetic.fifteenth(zero)
    scale_bits = arithmetic.to_bf16_bits(tl.maximum(span, 0.0))
    scale = scale_bits.to(tl.float32, bitcast=True)
    norm = arithmetic.normalised(zero, scale)
    # `words` multiplies codes by the scale itself, which is 0 where the divisor may be 1.
    return scale_bits, zero_bits, (norm, tl.where(scale > 0.0, norm[2], 0.0))


@triton.jit
def metadata(low, high):
    """Return, for four tensors of groups: fp32 bits of scales and of zeros, and the numbers that
    `words` takes."""
    s0, z0, p0 = _scale_and_zero(low[0], high[0])
    s1, z1, p1 = _scale_and_zero(low[1], high[1])
    s2, z2, p2 = _scale_and_zero(low[2], high[2])
    s3, z3, p3 = _scale_and_zero(low[3], high[3])
    return (s0, s1, s2, s3), (z0, z1, z2, z3), (p0, p1, p2, p3)


@triton.jit
def _element(x, prepared, SHIFT: tl.constexpr, WITH_CORRECTIONS: tl.constexpr):
    """Return the code and the correction + 8 of a value, each at bit SHIFT of an int32."""
    norm, minus_scale = prepared
    ratio = arithmetic.quotient(arithmetic.difference(x, norm), norm)
    rounded = tl.minimum(tl.maximum(ratio, 0.0), 15.0) + arithmetic.MAGIC
    code = arithmetic.integer_of(rounded) << SHIFT
    if not WITH_CORRECTIONS:
        return code, code
    # A code times a scale has at most 12 bits: the product is exact, fused or not.
    minus_anchor = tl.fma(rounded - arithmetic.MAGIC, minus_scale, norm[1])
    ratio = arithmetic.quotient(tl.fma(x, norm[0], minus_anchor), norm)
    clamped = tl.minimum(tl.maximum(ratio, -0.5), 0.4375)
    correction = tl.fma(clamped, 16.0, arithmetic.MAGIC + 8.0)
    return code, arithmetic.integer_of(correction) << SHIFT


@triton.jit
def words(x, prepared, WITH_CORRECTIONS: tl.constexpr):
    """Return (codes, corrections), int32: one word per position, from 8 values x and their groups'
    metadata. Corrections are meaningless unless WITH_CORRECTIONS."""
    c0, l0 = _element(x[0], prepared[0], 4, WITH_CORRECTIONS)
    c1, l1 = _element(x[1], prepared[1], 16, WITH_CORRECTIONS)
    c2, l2 = _element(x[2], prepared[2], 8, WITH_CORRECTIONS)
    c3, l3 = _element(x[3], prepared[3], 20, WITH_CORRECTIONS)
    c4, l4 = _element(x[4], prepared[4], 12, WITH_CORRECTIONS)
    c5, l5 = _element(x[5], prepared[5], 24, WITH_CORRECTIONS)
    c6, l6 = _element(x[6], prepared[6], 16, WITH_CORRECTIONS)
    c7, l7 = _element(x[7], prepared[7], 28, WITH_CORRECTIONS)
    # Even ones are shifted 4 bits too far: Triton 3.7.1 aborts where one of several numbers is not
    # shifted, and the others are.
    codes = (((c0 + c2) + (c4 + c6)) >> 4) + ((c1 + c3) + (c5 + c7))
    corrections = (((l0 + l2) + (l4 + l6)) >> 4) + ((l1 + l3) + (l5 + l7))
    # Flipping the highest bit of each nibble turns l + 8 into two's complement.
    return codes, corrections ^ -2004318072

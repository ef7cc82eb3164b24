"""Encoding by the log codec, with the bits of reference/log4.py."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit import arithmetic

SCALE_SHIFT = tl.constexpr(19)
ROUND_UP = tl.constexpr((1 << 19) - 1)
LARGEST_FP32 = tl.constexpr(0x7F7FFFFF)
LARGEST_SCALE = tl.constexpr(0x7F7FFFFF >> 19)
LARGEST_OFFSET = tl.constexpr(255)


@triton.jit
def centre_and_reach(low, high):
    """Return, for a chunk, the centre's fp32 bits as stored, and the leading 12 bits of the
    smallest scale that no value exceeds."""
    bits = arithmetic.to_bf16_bits(arithmetic.clamp_to_bf16(low * 0.5 + high * 0.5))
    centre = bits.to(tl.float32, bitcast=True)
    reach = tl.maximum(high - centre, centre - low).to(tl.int32, bitcast=True)
    reach = tl.minimum(tl.maximum(reach, 0), LARGEST_FP32)
    rounded_up = (reach + ROUND_UP) >> SCALE_SHIFT
    return bits, tl.minimum(rounded_up, LARGEST_SCALE)


@triton.jit
def scale_base(reach0, reach1, reach2, reach3):
    """Return the base of a record, a scalar int32, from all its reaches."""
    largest = tl.maximum(tl.maximum(reach0, reach1), tl.maximum(reach2, reach3))
    return tl.maximum(tl.max(tl.max(tl.max(largest, 2), 1), 0) - LARGEST_OFFSET, 0)


@triton.jit
def metadata(low, high):
    """Return, for four tensors of chunks: centres' fp32 bits, 8-bit scale offsets, the base, and
    norms for `words`. All but the base are tuples of four."""
    c0, r0 = centre_and_reach(low[0], high[0])
    c1, r1 = centre_and_reach(low[1], high[1])
    c2, r2 = centre_and_reach(low[2], high[2])
    c3, r3 = centre_and_reach(low[3], high[3])
    base = scale_base(r0, r1, r2, r3)
    o0, p0 = _prepare(c0, r0, base)
    o1, p1 = _prepare(c1, r1, base)
    o2, p2 = _prepare(c2, r2, base)
    o3, p3 = _prepare(c3, r3, base)
    return (c0, c1, c2, c3), (o0, o1, o2, o3), base, (p0, p1, p2, p3)


@triton.jit
def _prepare(centre_bits, reach, base):
    offset = tl.maximum(reach - base, 0)
    scale = ((base + offset) << SCALE_SHIFT).to(tl.float32, bitcast=True)
    return offset, arithmetic.normalised(centre_bits.to(tl.float32, bitcast=True), scale)


@triton.jit
def _integer(magnitude, edges_ptr, LAW: tl.constexpr):
    """Return MAGIC + the number of integer edges <= magnitude in [0, 1].

    edges_ptr: fp32 [128], a number below all edges, the edges in order, infinities. LAW: (top,) for
    the linear law, which has no edges; the number is then top * magnitude, rounded. (alpha, a
    little more than 1, slope) otherwise: slope * log2(LAW[1] + alpha * magnitude) rounds to the
    number or to one more, and one comparison decides. Empty: a binary search.
    """
    if len(LAW) == 1:
        return magnitude * LAW[0] + arithmetic.MAGIC
    elif len(LAW) == 0:
        found = tl.zeros_like(magnitude).to(tl.int32)
        for bit in tl.static_range(7):
            candidate = found + (64 >> bit)
            edge = tl.load(edges_ptr + candidate)
            found = tl.where(magnitude >= edge, candidate, found)
        return found.to(tl.float32) + arithmetic.MAGIC
    else:
        warped = arithmetic.log2_roughly(tl.fma(magnitude, LAW[0], LAW[1]))
        guess = tl.fma(warped, LAW[2], arithmetic.MAGIC)
        # With an unsigned index, one multiply-add makes the address.
        index = guess.to(tl.uint32, bitcast=True).to(tl.int64)
        edge = tl.load((edges_ptr - arithmetic.MAGIC_BITS) + index)
        return guess - tl.where(magnitude < edge, 1.0, 0.0)


@triton.jit
def _element(x, norm, edges_ptr, LAW: tl.constexpr):
    """Return MAGIC + the integer of a value, and the centred value, whose sign the code takes."""
    centred = arithmetic.difference(x, norm)
    magnitude = arithmetic.quotient_to_one(tl.abs(centred), norm)
    return _integer(magnitude, edges_ptr, LAW), centred


@triton.jit
def _four_bytes(a, b, c, d):
    """Return four integers 0 to 127, each given as MAGIC + integer, as the bytes of an int32."""
    low = arithmetic.integer_of(a) + (arithmetic.integer_of(b) << 8)
    return low + ((arithmetic.integer_of(c) << 16) + (arithmetic.integer_of(d) << 24))


@triton.jit
def _in_order(integers, signs):
    """Return four codes, numbered in the order of values, as the bytes of an int32: 8 + m, or 7 - m
    if negative. integers: from `_four_bytes`; signs: from `sign_bytes`."""
    magnitudes = ((integers + 0x07070707) >> 4) & 0x07070707
    return magnitudes ^ 0x08080808 ^ (((signs >> 7) & 0x01010101) * 15)


@triton.jit
def words(x, norms, edges_ptr, ANCHOR_BITS: tl.constexpr, LAW: tl.constexpr):
    """Return (codes, corrections), int32: one word per position, from 8 values x and their chunks'
    norms. Codes are those of 4-bit anchors. For 2 bits they are numbered in the order of values,
    even codes in nibbles 0 to 3 and odd codes in nibbles 4 to 7."""
    i0, s0 = _element(x[0], norms[0], edges_ptr, LAW)
    i1, s1 = _element(x[1], norms[1], edges_ptr, LAW)
    i2, s2 = _element(x[2], norms[2], edges_ptr, LAW)
    i3, s3 = _element(x[3], norms[3], edges_ptr, LAW)
    i4, s4 = _element(x[4], norms[4], edges_ptr, LAW)
    i5, s5 = _element(x[5], norms[5], edges_ptr, LAW)
    i6, s6 = _element(x[6], norms[6], edges_ptr, LAW)
    i7, s7 = _element(x[7], norms[7], edges_ptr, LAW)
    # An anchor word has magnitudes 2, 7, 3, 6 in low nibbles and 0, 5, 1, 4 in high nibbles. Signs
    # 6, 2, 7, 3 are in low nibbles and 4, 0, 5, 1 in high nibbles.
    low = _four_bytes(i2, i7, i3, i6)
    high = _four_bytes(i0, i5, i1, i4)
    if ANCHOR_BITS == 4:
        signs = (arithmetic.sign_bytes(s6, s2, s7, s3) >> 4) & 0x08080808
        signs = signs | arithmetic.sign_bytes(s4, s0, s5, s1)
        # Four nibbles at a time: magnitude (I + 7) >> 4, correction -I modulo 16, and I <= 120.
        lower = ((low + 0x07070707) >> 4) & 0x07070707
        codes = lower | ((high + 0x07070707) & 0x70707070) | signs
    else:
        lower = _in_order(low, arithmetic.sign_bytes(s2, s7, s3, s6))
        upper = _in_order(high, arithmetic.sign_bytes(s0, s5, s1, s4))
        codes = arithmetic.swap_odd_bytes(upper | (lower << 4))
    # Corrections lie in order: 0, 2, 4, 6, then 1, 3, 5, 7.
    low = ((0x78787878 - low) ^ 0x08080808) & 0x0F0F0F0F
    high = ((0x78787878 - high) ^ 0x08080808) & 0x0F0F0F0F
    return codes, arithmetic.swap_odd_bytes(high | (low << 4))

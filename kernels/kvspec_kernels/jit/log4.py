"""Encoding by the log codec, as reference/log4.py does it, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit import arithmetic, pages

SCALE_SHIFT = tl.constexpr(19)
ROUND_UP = tl.constexpr((1 << 19) - 1)
LARGEST_FP32 = tl.constexpr(0x7F7FFFFF)
LARGEST_SCALE = tl.constexpr(0x7F7FFFFF >> 19)
LARGEST_OFFSET = tl.constexpr(255)


@triton.jit
def centre_and_reach(low, high):
    """Of a chunk: the centre's fp32 bits as stored, and the leading 12 bits of the smallest scale
    that no value exceeds."""
    bits = arithmetic.to_bf16_bits(arithmetic.clamp_to_bf16(low * 0.5 + high * 0.5))
    centre = bits.to(tl.float32, bitcast=True)
    reach = tl.maximum(high - centre, centre - low).to(tl.int32, bitcast=True)
    reach = tl.minimum(tl.maximum(reach, 0), LARGEST_FP32)
    rounded_up = (reach + ROUND_UP) >> SCALE_SHIFT
    return bits, tl.minimum(rounded_up, LARGEST_SCALE)


@triton.jit
def scale_base(reach0, reach1, reach2, reach3):
    """The base of a record, a scalar int32, of all its reaches."""
    largest = tl.maximum(tl.maximum(reach0, reach1), tl.maximum(reach2, reach3))
    return tl.maximum(tl.max(tl.max(tl.max(largest, 2), 1), 0) - LARGEST_OFFSET, 0)


@triton.jit
def metadata(low, high):
    """Of four tensors of chunks: centres' fp32 bits, 8-bit scale offsets, the base, and what
    `quantise` takes per chunk, all but the base in fours."""
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
    return offset, (centre_bits.to(tl.float32, bitcast=True), arithmetic.divisor_of(scale))


@triton.jit
def integer_of(magnitude, edges_ptr, LAW: tl.constexpr):
    """MAGIC + the number of integer edges <= magnitude.

    edges_ptr: fp32 [128], a number below all edges, the edges in order, infinities. LAW: empty for
    a binary search; else (alpha, 1 pushed up, slope), so that slope * log2(pushed + alpha * x)
    rounds to the number wanted or to one more, and one comparison settles it.
    """
    # No edge is above 1, and NaN must not become an address.
    magnitude = tl.minimum(magnitude, 1.0)
    if len(LAW) == 0:
        found = tl.zeros_like(magnitude).to(tl.int32)
        for bit in tl.static_range(7):
            candidate = found + (64 >> bit)
            edge = tl.load(edges_ptr + candidate)
            found = tl.where(magnitude >= edge, candidate, found)
        return found.to(tl.float32) + arithmetic.MAGIC
    else:
        warped = arithmetic.log2_roughly(tl.fma(magnitude, LAW[0], LAW[1]))
        guess = warped * LAW[2] + arithmetic.MAGIC
        edge = tl.load(edges_ptr + arithmetic.magic_bits(guess))
        return guess - tl.where(magnitude < edge, 1.0, 0.0)


@triton.jit
def _sign(numerator, centred, TO: tl.constexpr):
    """Bit TO of an int32: whether centred is negative."""
    if arithmetic.INTERPRETED:
        # NumPy's multiply-add loses the sign of what underflows.
        return tl.where(centred < 0.0, 1, 0) << TO
    return (numerator.to(tl.int32, bitcast=True) >> (31 - TO)) & (1 << TO)


@triton.jit
def _four_bytes(a, b, c, d):
    """MAGIC + integers 0 to 127 as the bytes of an int32."""
    a, b = arithmetic.magic_bits(a), arithmetic.magic_bits(b)
    c, d = arithmetic.magic_bits(c), arithmetic.magic_bits(d)
    return a + (b << 8) + ((c << 16) + (d << 24))


@triton.jit
def _element(x, prepared, edges_ptr, EDGES: tl.constexpr, LAW: tl.constexpr, SIGN: tl.constexpr):
    """MAGIC + the magnitude (or the integer, where EDGES is empty), and the sign at bit SIGN."""
    centred = x - prepared[0]
    numerator = arithmetic.normalised(centred, prepared[1])
    magnitude = arithmetic.quotient(tl.abs(numerator), prepared[1])
    if len(EDGES) == 0:
        level = integer_of(magnitude, edges_ptr, LAW)
    else:
        level = arithmetic.count_reached(magnitude, EDGES)
    return level, _sign(numerator, centred, SIGN)


@triton.jit
def words(x, prepared, edges_ptr, EDGES: tl.constexpr, LAW: tl.constexpr):
    """One word per position of 8 values and their chunks' metadata: (codes, corrections), int32.
    Corrections are meaningless where EDGES, the anchor's own thresholds, are given."""
    l0, s0 = _element(x[0], prepared[0], edges_ptr, EDGES, LAW, 3)
    l1, s1 = _element(x[1], prepared[1], edges_ptr, EDGES, LAW, 11)
    l2, s2 = _element(x[2], prepared[2], edges_ptr, EDGES, LAW, 19)
    l3, s3 = _element(x[3], prepared[3], edges_ptr, EDGES, LAW, 27)
    l4, s4 = _element(x[4], prepared[4], edges_ptr, EDGES, LAW, 7)
    l5, s5 = _element(x[5], prepared[5], edges_ptr, EDGES, LAW, 15)
    l6, s6 = _element(x[6], prepared[6], edges_ptr, EDGES, LAW, 23)
    l7, s7 = _element(x[7], prepared[7], edges_ptr, EDGES, LAW, 31)
    signs = (s0 | s1 | s2) | (s3 | s4 | s5) | (s6 | s7)
    even = _four_bytes(l0, l2, l4, l6)
    odd = _four_bytes(l1, l3, l5, l7)
    if len(EDGES) > 0:
        return even | (odd << 4) | signs, signs
    # Four nibbles at a time: magnitude (I + 7) >> 4, correction -I modulo 16, and I <= 120.
    codes = (((even + 0x07070707) >> 4) & 0x07070707) | ((odd + 0x07070707) & 0x70707070) | signs
    low = ((0x78787878 - even) ^ 0x08080808) & 0x0F0F0F0F
    high = ((0x78787878 - odd) ^ 0x08080808) & 0x0F0F0F0F
    return codes, low | (high << 4)

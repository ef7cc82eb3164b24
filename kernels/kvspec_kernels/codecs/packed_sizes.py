"""Sizes of packed residual records (`packed_format.py`), without torch."""

from __future__ import annotations

from kvspec_kernels.codecs.fields import RECORD_ALIGNMENT

# Bits an element that a body has room for, by the bits of the KV dtype's mantissa. On the models of
# benchmarks/results/exact_residual.json, less than 1 of 100 records needs more.
BODY_BITS = {7: 8.125, 10: 11.125}
TILE_VALUES = 256
HEADER_BYTES = 4


def segment_values(num_values: int) -> int:
    """Return the values of a segment. num_values: of K of a page and head, and as many of V."""
    return TILE_VALUES * (4 if num_values // TILE_VALUES % 4 == 0 else 2)


def body_offset(num_values: int) -> int:
    """Return the offset of the body in bytes, a multiple of 4: both parts have as many starts."""
    return HEADER_BYTES + 4 * (num_values // segment_values(num_values))


def record_bytes(num_values: int, mantissa_bits: int) -> int:
    """Return the bytes of a record: room for BODY_BITS an element, and so for raw K."""
    body_bits = BODY_BITS[mantissa_bits] * 2 * num_values
    used = body_offset(num_values) + int(body_bits) // 8
    return -(-used // RECORD_ALIGNMENT) * RECORD_ALIGNMENT

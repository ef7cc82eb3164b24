"""Bits of encoded pages, padding and metadata included."""

from __future__ import annotations

from kvspec_kernels.formats import RecordLayout


def bits_per_element(layout: RecordLayout, page_size: int, head_dim: int) -> float:
    """Bits that a record spends on each of the K and V elements of its page."""
    return layout.nbytes * 8 / (2 * page_size * head_dim)

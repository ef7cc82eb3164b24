"""Memo of decoded anchors, for the CPU reference backend.

A GPU kernel decodes anchors as it reads them. In plain torch that costs more than the attention
itself, so the reference backend keeps decoded anchors. A stale entry can only spoil drafts, which a
verification then rejects.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_kvspec.core.units import GIB
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.memo_slots import MemoSlots

Decode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

LIMIT_BYTES = 2 * GIB


class DecodedAnchors:
    """Memo with full-precision slots for the pages that were read most recently, in limit_bytes.
    A page is decoded once a layer while it has a slot. Memory is touched only as it is filled."""

    def __init__(
        self, geometry: KVGeometry, num_pages: int, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._slots = MemoSlots(num_pages + 1, limit_bytes // geometry.plain_page_bytes)
        num_slots = self._slots.num_slots
        shape = (num_slots, *geometry.page_shape)
        self._k, self._v = (
            [torch.empty(shape, dtype=geometry.dtype) for _ in range(geometry.num_layers)]
            for _ in range(2)
        )
        self._filled = torch.zeros((geometry.num_layers, num_slots), dtype=torch.bool)

    def read(
        self,
        layer: int,
        pages: torch.Tensor,
        decode: Decode,
        into: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Copy distinct pages [N] of a layer into (k, v), each
        [N, page_size, num_kv_heads, head_dim], contiguous.

        decode: takes pages [M] that are not decoded, and returns their (k, v). It is called for all
        pages of a read that has more pages than there are slots.
        """
        placed = self._slots.place(pages)
        if placed is None:
            for part, decoded in zip(into, decode(pages), strict=True):
                part.copy_(decoded)
            return
        slots, changed = placed
        self._filled[:, changed] = False
        missing = ~self._filled[layer, slots]
        if bool(missing.any()):
            fresh = slots[missing]
            k, v = decode(pages[missing])
            self._k[layer][fresh] = k
            self._v[layer][fresh] = v
            self._filled[layer, fresh] = True
        for part, kept in zip(into, (self._k, self._v), strict=True):
            torch.index_select(kept[layer], 0, slots, out=part)

    def forget(self, page: int) -> None:
        """Drop a page whose id may be reused."""
        self._slots.forget(page)

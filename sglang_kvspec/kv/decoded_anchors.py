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

Decode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

LIMIT_BYTES = 2 * GIB


class DecodedAnchors:
    """Memo with a full-precision slot per page and layer, filled on first read. Memory is touched
    only as it is filled. A pool too large for limit_bytes is decoded anew at every read."""

    def __init__(
        self, geometry: KVGeometry, num_pages: int, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.enabled = (num_pages + 1) * geometry.plain_page_bytes <= limit_bytes
        slots = num_pages + 1 if self.enabled else 0
        shape = (slots, geometry.page_size, geometry.num_kv_heads, geometry.head_dim)
        self._k, self._v = (
            [torch.empty(shape, dtype=geometry.dtype) for _ in range(geometry.num_layers)]
            for _ in range(2)
        )
        self._filled = torch.zeros((geometry.num_layers, slots), dtype=torch.bool)

    def read(
        self, layer: int, pages: torch.Tensor, decode: Decode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pages [N] of a layer: (k, v), each [N, page_size, num_kv_heads, head_dim].

        decode: takes pages [M] that were not decoded yet, and returns their (k, v).
        """
        if not self.enabled:
            return decode(pages)
        fresh = pages[~self._filled[layer, pages]]
        if len(fresh):
            k, v = decode(fresh)
            self._k[layer][fresh] = k
            self._v[layer][fresh] = v
            self._filled[layer, fresh] = True
        return self._k[layer].index_select(0, pages), self._v[layer].index_select(0, pages)

    def forget(self, page: int) -> None:
        if self.enabled:
            self._filled[:, page] = False

"""Full-precision pages of the newest tokens (QuantSpec section 4.3, HACK's last block)."""

from __future__ import annotations

import torch

from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.page_slots import PageSlots


class RecentWindow:
    """Full-precision pages, in the model's KV dtype. KV of drafts is stored here only.

    A page is mutable until all its positions are committed. After that it may be encoded at any
    time, without changing what the target reads.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_pages: int,
        num_slots: int,
        device: torch.device,
        table_device: torch.device | None = None,
    ) -> None:
        """table_device: device of the slot table, by default `device`."""
        self.geometry = geometry
        self.slots = PageSlots(num_pages, num_slots, table_device or device)
        self._committed: set[int] = set()
        shape = (num_slots, *geometry.page_shape)
        self._k, self._v = (
            [
                torch.empty(shape, dtype=geometry.dtype, device=device)
                for _ in range(geometry.num_layers)
            ]
            for _ in range(2)
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._k, *self._v))

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All slots of a layer: (k, v), each [num_slots, page_size, num_kv_heads, head_dim]."""
        return self._k[layer], self._v[layer]

    def write(
        self,
        layer: int,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Store tokens k, v [T, num_kv_heads, head_dim] at offsets [T] int64 of pages [T]
        int64."""
        slots = self.slots.table[pages]
        self._k[layer][slots, offsets] = k
        self._v[layer][slots, offsets] = v

    def read(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return window pages [N]: (k, v), each [N, page_size, num_kv_heads, head_dim]."""
        slots = self.slots.table[pages]
        return self._k[layer].index_select(0, slots), self._v[layer].index_select(0, slots)

    def read_into(
        self, layer: int, pages: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Copy window pages [N] into contiguous (k, v), shaped as those of read()."""
        slots = self.slots.table[pages]
        for part, kept in zip(into, self.layer(layer), strict=True):
            torch.index_select(kept, 0, slots, out=part)

    def mark_committed(self, page: int) -> None:
        """Mark a window page whose positions all hold verified values."""
        assert page in self.slots, f"page {page} is not in the recent window"
        self._committed.add(page)

    def is_committed(self, page: int) -> bool:
        return page in self._committed

    def committed_pages(self) -> list[int]:
        """Return the pages that may be encoded, in the order in which they entered the window."""
        return [page for page in self.slots if page in self._committed]

    def release(self, page: int) -> bool:
        self._committed.discard(page)
        return self.slots.release(page)

    def check_integrity(self) -> None:
        self.slots.check_integrity()
        assert all(page in self.slots for page in self._committed), (
            "a committed page is not in the recent window"
        )

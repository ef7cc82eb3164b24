"""Byte records of encoded pages, one per page, layer and KV head."""

from __future__ import annotations

import torch


class RecordPool:
    """Fixed-size records in one tensor a layer: [num_slots, num_kv_heads, record_bytes] uint8.

    Serves as AnchorPool (slot = page), as the slots of the residual cache, and, in host memory,
    as those of the residual store.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        record_bytes: int,
        device: torch.device,
        *,
        pinned: bool = False,
    ) -> None:
        shape = (num_slots, num_kv_heads, record_bytes)
        self._layers = [
            torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
            for _ in range(num_layers)
        ]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def layer(self, layer: int) -> torch.Tensor:
        """All records of a layer: [num_slots, num_kv_heads, record_bytes] uint8."""
        return self._layers[layer]

    def write(self, layer: int, slots: torch.Tensor, records: torch.Tensor) -> None:
        """Store records [N, num_kv_heads, record_bytes] at slots [N] of a layer."""
        self._layers[layer].index_copy_(0, slots, records)

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Records of slots [N] of a layer: a new [N, num_kv_heads, record_bytes]."""
        return self._layers[layer].index_select(0, slots)

"""The shape of one rank's KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Sizes of one rank's KV cache. num_kv_heads: KV heads of this rank. dtype: the model's KV
    dtype."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Shape of K or V of one page and layer."""
        return self.page_size, self.num_kv_heads, self.head_dim

    @property
    def plain_page_bytes(self) -> int:
        """Bytes of K and V of one page in the model's KV dtype, all layers."""
        elements = 2 * self.page_size * self.num_kv_heads * self.head_dim * self.num_layers
        return elements * self.dtype.itemsize

    def part(self, num_parts: int) -> KVGeometry:
        """Return the geometry of one of num_parts equal shares of the KV heads."""
        assert self.num_kv_heads % num_parts == 0, (self.num_kv_heads, num_parts)
        return replace(self, num_kv_heads=self.num_kv_heads // num_parts)

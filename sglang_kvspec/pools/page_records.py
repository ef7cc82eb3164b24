"""Records of encoded pages as plain bytes, to keep outside of a KV cache and to bring back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.pools.geometry import KVGeometry
from sglang_kvspec.pools.tiered_kv import TieredKV


class PageRecords(NamedTuple):
    """anchors and residuals: contiguous [num_pages, num_layers, num_kv_heads, record_bytes] uint8
    on the CPU."""

    anchors: torch.Tensor
    residuals: torch.Tensor

    def __len__(self) -> int:
        return len(self.anchors)

    @classmethod
    def empty(cls, geometry: KVGeometry, codec: Codec, num_pages: int) -> PageRecords:
        shape = (num_pages, geometry.num_layers, geometry.num_kv_heads)
        return cls(
            torch.empty((*shape, codec.anchor_bytes), dtype=torch.uint8),
            torch.empty((*shape, codec.residual_bytes), dtype=torch.uint8),
        )

    @classmethod
    def of_bytes(cls, geometry: KVGeometry, codec: Codec, data: torch.Tensor) -> PageRecords:
        """One page's anchors and, behind them, residuals, as 1-D uint8."""
        shape = (1, geometry.num_layers, geometry.num_kv_heads, -1)
        num_records = geometry.num_layers * geometry.num_kv_heads
        end = num_records * codec.anchor_bytes
        anchors, residuals = data[:end], data[end:]
        return cls(anchors.view(shape), residuals.view(shape))


def copy_out(kv: TieredKV, pages: Sequence[int]) -> PageRecords:
    """The records of encoded pages, wherever their residuals are."""
    assert all(map(kv.is_encoded, pages)), "only an encoded page has records"
    ids = torch.tensor(pages, dtype=torch.int64)
    records = PageRecords.empty(kv.geometry, kv.codec, len(pages))
    for layer in range(kv.geometry.num_layers):
        records.anchors[:, layer] = kv.anchors.read(layer, ids)
        records.residuals[:, layer] = kv.residuals.peek(layer, ids)
    return records


def copy_in(kv: TieredKV, pages: Sequence[int], records: PageRecords) -> None:
    """Make free pages encoded ones, with records that copy_out() gave of pages of this geometry and
    codec. Their residuals are born in the cache while it has room."""
    ids = torch.tensor(pages, dtype=torch.int64)
    kv.begin_encode(pages)
    for layer in range(kv.geometry.num_layers):
        kv.anchors.write(layer, ids, records.anchors[:, layer])
        kv.residuals.write(layer, ids, records.residuals[:, layer])
    kv.finish_encode(pages)

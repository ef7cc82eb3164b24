"""Records of encoded pages as plain bytes, to keep outside of a KV cache and to load again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.geometry import KVGeometry


class PageRecords(NamedTuple):
    """Records of pages. anchors, residuals: contiguous [num_pages, num_layers, num_kv_heads,
    record_bytes] uint8 on the CPU."""

    anchors: torch.Tensor
    residuals: torch.Tensor

    def __len__(self) -> int:
        return len(self.anchors)

    @classmethod
    def of_bytes(cls, geometry: KVGeometry, codec: Codec, data: torch.Tensor) -> PageRecords:
        """Return views of one page's records. data: its anchors, then its residuals, 1-D uint8."""
        shape = (1, geometry.num_layers, geometry.num_kv_heads, -1)
        num_records = geometry.num_layers * geometry.num_kv_heads
        end = num_records * codec.anchor_bytes
        anchors, residuals = data[:end], data[end:]
        return cls(anchors.view(shape), residuals.view(shape))

    def parts(self, num_parts: int) -> list[PageRecords]:
        """Return the records of equal shares of the KV heads, in order; not contiguous."""
        chunks = (records.chunk(num_parts, dim=2) for records in self)
        return [PageRecords(*pair) for pair in zip(*chunks, strict=True)]

    @classmethod
    def joined(cls, parts: Sequence[PageRecords]) -> PageRecords:
        """Return the records of pages, joined from parts with some of their KV heads, in order."""
        anchors, residuals = (torch.cat(of_parts, dim=2) for of_parts in zip(*parts, strict=True))
        return cls(anchors, residuals)


def copy_out(kv: PagedKVCache, pages: Sequence[int]) -> PageRecords:
    """Return a copy of the records of encoded pages. Block the CPU until a device has copied."""
    assert all(map(kv.is_encoded, pages)), "only an encoded page has records"
    return PageRecords(kv.records.read_anchors(pages), kv.records.read_residuals(pages))


def copy_in(kv: PagedKVCache, pages: Sequence[int], records: PageRecords) -> None:
    """Fill free pages with records that copy_out() gave for pages of this geometry and codec. The
    caller must not change the records afterwards. Residuals enter the cache while it has room; on a
    GPU with a store they enter the store only.
    """
    kv.begin_landing(pages)
    kv.records.write_anchors(pages, records.anchors)
    kv.records.write_residuals(pages, records.residuals)
    kv.finish_encode(pages)

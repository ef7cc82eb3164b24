"""Records of encoded pages as plain bytes, to keep outside of a KV cache and to bring back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.geometry import KVGeometry

# Pages copied at once: what a copy needs of memory beside pools and tiers.
BATCH_PAGES = 16


class PageRecords(NamedTuple):
    """anchors and residuals: contiguous [num_pages, num_layers, num_kv_heads, record_bytes] uint8
    on the CPU."""

    anchors: torch.Tensor
    residuals: torch.Tensor

    def __len__(self) -> int:
        return len(self.anchors)

    @classmethod
    def empty(
        cls, geometry: KVGeometry, codec: Codec, num_pages: int, *, pinned: bool = False
    ) -> PageRecords:
        """pinned: a GPU copies from there by itself."""
        shape = (num_pages, geometry.num_layers, geometry.num_kv_heads)
        anchors, residuals = (
            torch.empty((*shape, num_bytes), dtype=torch.uint8, pin_memory=pinned)
            for num_bytes in (codec.anchor_bytes, codec.residual_bytes)
        )
        return cls(anchors, residuals)

    @classmethod
    def of_bytes(cls, geometry: KVGeometry, codec: Codec, data: torch.Tensor) -> PageRecords:
        """One page's anchors and, behind them, residuals, as 1-D uint8."""
        shape = (1, geometry.num_layers, geometry.num_kv_heads, -1)
        num_records = geometry.num_layers * geometry.num_kv_heads
        end = num_records * codec.anchor_bytes
        anchors, residuals = data[:end], data[end:]
        return cls(anchors.view(shape), residuals.view(shape))

    def parts(self, num_parts: int) -> list[PageRecords]:
        """Of equal shares of the KV heads, in order; not contiguous."""
        chunks = (records.chunk(num_parts, dim=2) for records in self)
        return [PageRecords(*pair) for pair in zip(*chunks, strict=True)]

    @classmethod
    def joined(cls, parts: Sequence[PageRecords]) -> PageRecords:
        """Of parts of pages, each with some of their KV heads, in order."""
        anchors, residuals = (torch.cat(of_parts, dim=2) for of_parts in zip(*parts, strict=True))
        return cls(anchors, residuals)


def copy_out(kv: PagedKVCache, pages: Sequence[int]) -> PageRecords:
    """The records of encoded pages, wherever their residuals are. Waits for those of a device."""
    assert all(map(kv.is_encoded, pages)), "only an encoded page has records"
    return PageRecords(kv.records.read_anchors(pages), kv.records.read_residuals(pages))


def copy_in(
    kv: PagedKVCache,
    pages: Sequence[int],
    records: PageRecords,
    kept_slots: Mapping[int, int] | None = None,
) -> None:
    """Make free pages encoded ones, with records that copy_out() gave of pages of this geometry and
    codec, and that are not to change any more. Their residuals are in the cache while it has room,
    on a GPU with a store in that.

    kept_slots: of pages[i] by i, slots of kept anchors, which are taken in place of records'.
    """
    kv.begin_landing(pages)
    if kept_slots:
        lacking = [i for i in range(len(pages)) if i not in kept_slots]
        kv.records.write_anchors([pages[i] for i in lacking], records.anchors[lacking])
        kv.records.restore_anchors(list(kept_slots.values()), [pages[i] for i in kept_slots])
    else:
        kv.records.write_anchors(pages, records.anchors)
    kv.records.write_residuals(pages, records.residuals)
    kv.finish_encode(pages)

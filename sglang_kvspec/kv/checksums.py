"""Checksums of the residual store's records, which show a page that changed there."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch


class Checksums:
    """CRC-32 of every layer of every page, as last written."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[dict[int, int]] = [{} for _ in range(num_layers)]

    def note(self, layer: int, pages: Sequence[int], records: torch.Tensor) -> None:
        """Note records [N, num_kv_heads, record_bytes] uint8 in host memory as they are written."""
        for page, record in zip(pages, records, strict=True):
            self._layers[layer][page] = _sum_of(record)

    def wrong(self, layer: int, pages: Sequence[int], records: torch.Tensor) -> list[int]:
        """Return the pages whose record, as read, is not as written. Records as for note()."""
        sums = self._layers[layer]
        pairs = zip(pages, records, strict=True)
        return [page for page, record in pairs if sums[page] != _sum_of(record)]


def _sum_of(record: torch.Tensor) -> int:
    return crc32(record.contiguous().numpy().data)

"""Pinned host memory that holds the residuals of all pages, in the form of the residual cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from sglang_kvspec.kv.copy_streams import CopyStream
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.transfers import sent_together


class HostStore(Protocol):
    """Rows of pages in pinned host memory, beside a residual cache on the device.

    Methods that take a stream enqueue work there and do not block the CPU; their caller orders
    streams. `slots` are cache slots, one for each of `pages`.
    """

    def link_bytes(self, pages: Sequence[int]) -> int:
        """Return the bytes that get() moves over the link."""
        ...

    def put(self, stream: CopyStream, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Write pages of the cache to the store."""
        ...

    def doubtful(self, pages: Iterable[int]) -> list[int]:
        """Return the pages that settle() must be given, once their put() is done, before they lose
        their slot or are read."""
        ...

    def settle(self, stream: CopyStream, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Take from the cache what the rows of doubtful pages have no room for. Their put() is
        done. Block the CPU until `stream` has copied it, which is rare."""
        ...

    def forget(self, page: int) -> None:
        """Give up what a freed page has besides its row."""
        ...

    def get(self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Write pages of the store to the cache. None is doubtful."""
        ...

    def get_by_layer(
        self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]
    ) -> Iterator[None]:
        """Do the work of get() layer by layer, and yield after each."""
        ...

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """Return records of pages, [N, num_layers, num_kv_heads, record_bytes] uint8 on the CPU.
        None is doubtful, and no put() is under way."""
        ...

    def write(self, pages: Sequence[int], records: torch.Tensor) -> None:
        """Store records as read() gives them."""
        ...


class RawStore:
    """HostStore of records as they are in the cache."""

    def __init__(self, cache: RecordPool, rows: RecordPool) -> None:
        """cache, rows: by page."""
        self._cache, self._rows = cache, rows

    def link_bytes(self, pages: Sequence[int]) -> int:
        return len(pages) * self._cache.page(0).nbytes

    def put(self, stream: CopyStream, pages: Sequence[int], slots: Sequence[int]) -> None:
        stream.copy_pages(self._rows.pages, pages, self._cache.pages, slots)

    def doubtful(self, pages: Iterable[int]) -> list[int]:
        return []

    def settle(self, stream: CopyStream, pages: Sequence[int], slots: Sequence[int]) -> None:
        assert not pages, "raw pages are never doubtful"

    def forget(self, page: int) -> None:
        pass

    def get(self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]) -> None:
        stream.copy_pages(self._cache.pages, slots, self._rows.pages, pages)

    def get_by_layer(
        self, stream: CopyStream, slots: Sequence[int], pages: Sequence[int]
    ) -> Iterator[None]:
        numbers = [torch.tensor(ids, dtype=torch.int32) for ids in (slots, pages)]
        with stream.current():
            targets, sources = sent_together(self._cache.layer(0).device, numbers)
        for layer in range(self._cache.num_layers):
            stream.copy_rows(self._cache.layer(layer), targets, self._rows.layer(layer), sources)
            yield

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        return self._rows.read_pages(torch.tensor(pages, dtype=torch.int64))

    def write(self, pages: Sequence[int], records: torch.Tensor) -> None:
        self._rows.write_pages(torch.tensor(pages, dtype=torch.int64), records)

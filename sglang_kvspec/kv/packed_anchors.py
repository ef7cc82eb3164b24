"""Anchors with which a packed store packs and unpacks: those of the KV cache, or its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvspec_kernels.ops.attention_plan import Backend
from sglang_kvspec.codecs.packed_residual import PackedResidual, Unpack
from sglang_kvspec.kv.copy_streams import CopyStream
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.transfers import to_device


class PackedAnchors(Protocol):
    """Anchors beside a packed store. Pages are rows of the store. Raw residuals and anchors are
    [N, num_layers, num_kv_heads, bytes] uint8, on the device unless it says otherwise."""

    @property
    def comes_by_layer(self) -> bool:
        """Return True if a fetch may unpack layer by layer."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes that bring() moves for a page."""
        ...

    def of(self, pages: Sequence[int], raw: torch.Tensor) -> torch.Tensor:
        """Return the anchors with which raw residuals are packed. Do not wait for the device."""
        ...

    def put(self, stream: CopyStream, pages: Sequence[int], anchors: torch.Tensor) -> None:
        """Store anchors of rows that are put on `stream`."""
        ...

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """Return the anchors of rows that the CPU reads."""
        ...

    def bring(self, link: CopyStream, buffer: int, pages: Sequence[int]) -> None:
        """Copy anchors of rows to the buffer of this number, 0 or 1, which nothing reads."""
        ...

    def unpack(self, buffer: int) -> Unpack:
        """Return the function that unpacks into the cache with the anchors of a buffer."""
        ...

    def rows(self, pages: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows of anchors that unpack() takes for the pages brought last. pages: their
        ids, numbers: from 0 on, both [N] int64."""
        ...


class PooledAnchors:
    """Anchors of a KV cache that has those of all pages."""

    comes_by_layer = True
    page_bytes = 0

    def __init__(
        self, pool: Callable[[], RecordPool], packed: PackedResidual, cache: RecordPool
    ) -> None:
        """pool: returns the pool of anchors by page, which is made after the store. cache: of raw
        residuals."""
        self._pool, self._packed, self._cache = pool, packed, cache
        self._unpack: Unpack | None = None

    def of(self, pages: Sequence[int], raw: torch.Tensor) -> torch.Tensor:
        return self.read(pages)

    def put(self, stream: CopyStream, pages: Sequence[int], anchors: torch.Tensor) -> None:
        """Store nothing."""

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        pool = self._pool()
        index = to_device(pool.by_slot.device, torch.tensor(pages, dtype=torch.int64))
        return pool.read_pages(index)

    def bring(self, link: CopyStream, buffer: int, pages: Sequence[int]) -> None:
        """Bring nothing."""

    def unpack(self, buffer: int) -> Unpack:
        if self._unpack is None:
            self._unpack = self._packed.unpacker(self._cache.by_slot, self._pool().by_slot)
        return self._unpack

    def rows(self, pages: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return pages


class StoredAnchors:
    """Anchors in rows of their own beside packed residuals, for a KV cache that frees those which
    drafts do not read. They are encoded anew from raw residuals, with the same bits."""

    comes_by_layer = False

    def __init__(
        self,
        packed: PackedResidual,
        cache: RecordPool,
        num_rows: int,
        most_pages: int,
        *,
        pinned: bool,
        kernels: Backend,
    ) -> None:
        """cache: of raw residuals. most_pages: that come at once. kernels: that encode."""
        self._packed, self._kernels, device = packed, kernels, cache.by_slot.device
        layers, heads = cache.page_shape[:2]
        sizes = (heads, packed.anchor_layout.nbytes)
        cpu = torch.device("cpu")
        self._pool = RecordPool(layers, num_rows, *sizes, cpu, pinned=pinned, by_page=True)
        shape = (2, most_pages, layers, *sizes)
        self._buffers = torch.empty(shape, dtype=torch.uint8, device=device)
        self._unpack = [packed.unpacker(cache.by_slot, buffer) for buffer in self._buffers]

    @property
    def page_bytes(self) -> int:
        return self._pool.page(0).nbytes

    def of(self, pages: Sequence[int], raw: torch.Tensor) -> torch.Tensor:
        anchors = self._packed.anchors_of(raw.flatten(0, 1), self._kernels)
        return torch.unflatten(anchors, 0, raw.shape[:2])

    def put(self, stream: CopyStream, pages: Sequence[int], anchors: torch.Tensor) -> None:
        stream.copy_pages(self._pool.pages, pages, anchors, range(len(pages)))

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        rows = self._pool.read_pages(torch.tensor(pages, dtype=torch.int64))
        return to_device(self._buffers.device, rows)

    def bring(self, link: CopyStream, buffer: int, pages: Sequence[int]) -> None:
        link.copy_pages(self._buffers[buffer], range(len(pages)), self._pool.pages, pages)

    def unpack(self, buffer: int) -> Unpack:
        return self._unpack[buffer]

    def rows(self, pages: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

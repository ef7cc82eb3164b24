"""Prefix store in host memory. It evicts and pairs records as on disk. A restart loses it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_kvspec.kv.prefix_store.budget import StoreLimits
from sglang_kvspec.kv.prefix_store.catalogue import Catalogue
from sglang_kvspec.kv.prefix_store.committer import Committer, PagePut
from sglang_kvspec.kv.prefix_store.disk_file import Bytes
from sglang_kvspec.kv.prefix_store.entries import HEADER_BYTES, EntryFormat
from sglang_kvspec.kv.prefix_store.identity import StoreIdentity
from sglang_kvspec.kv.prefix_store.page_keys import PageLink
from sglang_kvspec.kv.prefix_store.reader import PrefixReader
from sglang_kvspec.kv.prefix_store.slab import Slab
from sglang_kvspec.kv.prefix_store.state import StoreState


class MemoryFile:
    """StoreFile in memory, of at most num_bytes. Memory is touched only as it is written."""

    def __init__(self, num_bytes: int) -> None:
        self._content = np.zeros(num_bytes, dtype=np.uint8)
        self._size = 0

    def size(self) -> int:
        return self._size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        start = offset
        for buffer in buffers:
            part = self._content[offset : min(offset + len(buffer), self._size)]
            np.frombuffer(buffer, dtype=np.uint8)[: len(part)] = part
            offset += len(part)
        return offset - start

    def write(self, offset: int, content: Bytes) -> None:
        given = np.frombuffer(content, dtype=np.uint8)
        self._content[offset : offset + len(given)] = given
        self._size = max(self._size, offset + len(given))

    def truncate(self, num_bytes: int) -> None:
        self._size = min(self._size, num_bytes)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryStore(PrefixReader):
    """Prefix store in host memory, written and read by one thread."""

    def __init__(self, state: StoreState) -> None:
        super().__init__(state, lambda: None)
        self._committer = Committer(state)

    def put(self, link: PageLink, anchor: Bytes, residual: Bytes) -> bool:
        """Keep a copy of a page's records, all layers and heads. Return False if there is no room
        even for its anchor, or if the page before it is not stored. Put the pages of a prefix in
        order."""
        self._committer.commit(PagePut(link, anchor, residual))
        with self._state.lock:
            return self._state.catalogue.page(link) is not None


def open_memory_store(identity: StoreIdentity, limits: StoreLimits) -> MemoryStore:
    """Open an empty store of limits.disk_bytes of memory. Raises ConfigError if no page fits."""
    layouts = EntryFormat.of_anchors(identity), EntryFormat.of_residuals(identity)
    num_slots = limits.slots(
        anchor_bytes=layouts[0].record_bytes + layouts[0].nbytes,
        residual_bytes=layouts[1].record_bytes + layouts[1].nbytes,
        fixed_bytes=2 * HEADER_BYTES,
    )
    anchors, residuals = (
        Slab(
            MemoryFile(count * layout.record_bytes),
            MemoryFile(HEADER_BYTES + count * layout.nbytes),
            layout,
        )
        for layout, count in zip(layouts, num_slots, strict=True)
    )
    for slab in (anchors, residuals):
        slab.start_empty()
    state = StoreState(identity, Catalogue(*num_slots), (anchors, residuals), writable=True)
    return MemoryStore(state)

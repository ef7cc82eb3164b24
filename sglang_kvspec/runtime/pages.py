"""When pages of running requests leave the recent window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_kvspec.kv.reference_cache import ReferenceKVCache

if TYPE_CHECKING:
    # It imports Triton, which the CPU does without.
    from sglang_kvspec.kv.gpu_cache import GpuKVCache


class PageKeeper:
    """Marks pages committed as requests advance and encodes those no longer among the newest."""

    def __init__(self, kv: ReferenceKVCache, recent_pages: int) -> None:
        self._kv = kv
        self._recent_pages = recent_pages

    def commit(self, pages: torch.Tensor, before: int, after: int) -> None:
        """A request's verified length grew from `before` to `after` tokens.

        pages: its page ids from position 0 on. Its newest recent_pages full pages stay.
        """
        size = self._kv.geometry.page_size
        num_full = after // size
        ids = pages[:num_full].tolist()
        for index in range(before // size, num_full):
            if ids[index] in self._kv.window.slots:
                self._kv.window.mark_committed(ids[index])
        # Pages further back were encoded when the request passed them.
        first = max(0, before // size - self._recent_pages)
        self._encode(ids[first : max(0, num_full - self._recent_pages)])

    def flush(self) -> None:
        """Pages were encoded as they came."""

    def retire(self, pages: torch.Tensor) -> None:
        """A request is done with these pages; SGLang frees some and caches the others."""
        self._encode(pages.tolist())

    def _encode(self, pages: list[int]) -> None:
        self._kv.encode_window_pages([p for p in pages if self._kv.window.is_committed(p)])


class DevicePageKeeper:
    """The same for a GpuKVCache: full pages are published together, once an iteration."""

    def __init__(self, kv: GpuKVCache, recent_pages: int) -> None:
        self._kv = kv
        self._recent_pages = recent_pages
        self._full: dict[int, None] = {}
        self._leaving: dict[int, None] = {}

    def commit(self, pages: torch.Tensor, before: int, after: int) -> None:
        """As PageKeeper.commit; takes effect with flush()."""
        size, window = self._kv.geometry.page_size, self._kv.window.slots
        num_full = after // size
        first = max(0, before // size - self._recent_pages)
        for index, page in enumerate(pages[first:num_full].tolist(), first):
            if page not in window:
                continue
            if not self._kv.is_encoded(page):
                self._full[page] = None
            if index < num_full - self._recent_pages:
                self._leaving[page] = None

    def flush(self) -> None:
        """Encode the pages that became full and free the window slots of those that left."""
        self._kv.publish(list(self._full))
        self._kv.move_out_of_window(list(self._leaving))
        self._full, self._leaving = {}, {}

    def retire(self, pages: torch.Tensor) -> None:
        """A request is done with these pages; SGLang frees some and caches the others."""
        window = self._kv.window.slots
        ids = pages.tolist()
        self._kv.move_out_of_window([p for p in ids if p in window and self._kv.is_encoded(p)])

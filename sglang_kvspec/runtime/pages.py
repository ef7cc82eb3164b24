"""Movement of running requests' pages out of the recent window."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_kvspec.kv.cache import PagedKVCache


class PageKeeper:
    """Keeper of running requests' pages: commits full pages, and moves pages that are not among a
    request's newest out of the recent window. flush() does both together, once a round."""

    def __init__(self, kv: PagedKVCache, recent_pages: int) -> None:
        """recent_pages: full pages of a request that stay in the window."""
        self._kv = kv
        self._recent_pages = recent_pages
        self._full: dict[int, None] = {}
        self._leaving: dict[int, None] = {}

    def commit(self, pages: torch.Tensor, before: int, after: int) -> None:
        """Note that a request's verified length grew from `before` to `after` tokens.

        pages: the request's page ids from position 0 on.
        """
        size, window = self._kv.geometry.page_size, self._kv.window
        num_full = after // size
        # Previous calls noted the pages before `first`.
        first = max(0, before // size - self._recent_pages)
        for index, page in enumerate(pages[first:num_full].tolist(), first):
            if page not in window.slots:
                continue
            if not window.is_committed(page):
                self._full[page] = None
            if index < num_full - self._recent_pages:
                self._leaving[page] = None

    def note_use(self, requests: Iterable[torch.Tensor]) -> None:
        """Note a round or a prefill, so that pages of running requests keep their anchors.
        requests: pages of each request that takes part, int64 on the CPU."""
        self._kv.anchor_places.note_use(requests)

    def flush(self) -> None:
        """Commit the pages that became full, and free the window slots of pages that leave the
        window."""
        self._kv.commit_pages(list(self._full))
        # Another request may have evicted a page from the window since it was noted.
        self._move_out(self._leaving)
        self._full, self._leaving = {}, {}

    def retire(self, pages: torch.Tensor) -> None:
        """Move the committed pages of a finished request out of the window. SGLang frees some of
        these pages and caches the others. pages: [N] page ids."""
        self._move_out(pages.tolist())

    def _move_out(self, pages: Iterable[int]) -> None:
        window = self._kv.window
        self._kv.move_out_of_window([page for page in pages if window.is_committed(page)])

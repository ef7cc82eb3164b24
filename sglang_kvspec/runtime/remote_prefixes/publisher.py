"""Publishing: the pages that a store does not have yet, and how many may wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_kvspec.kv.prefix_store import PageLink

# Most pages remembered as stored. A forgotten page may be published again.
_MAX_KNOWN = 1 << 16


class Publisher:
    def __init__(self, queue_bytes: int) -> None:
        self._queue_bytes = queue_bytes
        # Keys of stored pages, in the order of their last mention.
        self._known: dict[bytes, None] = {}
        self._uploads: dict[int, tuple[bytes, int]] = {}
        self._pending: set[bytes] = set()
        self._last_number = 0
        self.waiting_bytes = 0

    def num_known(self, links: Sequence[PageLink]) -> int:
        """Return how many of these pages, from the first on, are in the store or on their way
        there."""
        known, pending = self._known, self._pending
        there = (link.key in known or link.key in pending for link in links)
        return next((i for i, is_there in enumerate(there) if not is_there), len(links))

    def is_known(self, link: PageLink) -> bool:
        return link.key in self._known or link.key in self._pending

    def begin(self, link: PageLink, num_bytes: int) -> int | None:
        """Return the number of a new upload; None if too many bytes wait already."""
        if self.waiting_bytes + num_bytes > self._queue_bytes:
            return None
        self._last_number += 1
        self._uploads[self._last_number] = (link.key, num_bytes)
        self._pending.add(link.key)
        self.waiting_bytes += num_bytes
        return self._last_number

    def end(self, upload: int, is_kept: bool) -> None:
        key, num_bytes = self._uploads.pop(upload)
        self._pending.discard(key)
        self.waiting_bytes -= num_bytes
        if is_kept:
            self.learn([key])

    def learn(self, keys: Iterable[bytes]) -> None:
        """Record that the store has these pages."""
        for key in keys:
            self._known.pop(key, None)
            self._known[key] = None
        while len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def unlearn(self, keys: Iterable[bytes]) -> None:
        """Record that the store does not have these pages."""
        for key in keys:
            self._known.pop(key, None)

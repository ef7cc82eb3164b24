"""Tiers from which the pages of a loaded prefix came."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import takewhile
from typing import NamedTuple


class PageSource(IntEnum):
    """Source of a page's residual, the farthest first. KEPT: the page had a kept anchor."""

    NOWHERE = 0
    REMOTE = 1
    DISK = 2
    KEPT_DISK = 3
    HOST = 4
    KEPT_HOST = 5


class Loaded(NamedTuple):
    """Numbers of loaded pages. num_from_disk, num_from_remote: pages whose residual came from disk,
    or from another machine. kept_host, kept_disk: pages with a kept anchor in GPU memory whose
    residual came from host memory, or from disk."""

    num_pages: int
    num_from_disk: int
    num_from_remote: int = 0
    kept_host: int = 0
    kept_disk: int = 0

    def and_from_remote(self, num_pages: int) -> Loaded:
        """Return these numbers with num_pages more pages from another machine."""
        return self._replace(
            num_pages=self.num_pages + num_pages,
            num_from_remote=self.num_from_remote + num_pages,
        )

    def plus(self, other: Loaded) -> Loaded:
        """Return the numbers of both together."""
        return Loaded(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @classmethod
    def of(cls, sources: Sequence[int]) -> Loaded:
        """Count the pages of a prefix by source, up to the first page that came from none."""
        found = list(takewhile(lambda source: source != PageSource.NOWHERE, sources))
        kept_disk = found.count(PageSource.KEPT_DISK)
        return cls(
            num_pages=len(found),
            num_from_disk=found.count(PageSource.DISK) + kept_disk,
            num_from_remote=found.count(PageSource.REMOTE),
            kept_host=found.count(PageSource.KEPT_HOST),
            kept_disk=kept_disk,
        )

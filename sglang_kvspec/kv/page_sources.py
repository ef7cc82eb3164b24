"""Where pages of a prefix came from that were brought back."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import takewhile
from typing import NamedTuple


class PageSource(IntEnum):
    """Of a page's residual, the farthest first. KEPT: its anchor was in GPU memory still."""

    NOWHERE = 0
    REMOTE = 1
    DISK = 2
    KEPT_DISK = 3
    HOST = 4
    KEPT_HOST = 5


class Loaded(NamedTuple):
    """num_pages were brought back; the residuals of num_from_disk of them from disk, and
    num_from_remote of them from another machine. kept_host, kept_disk: of how many the anchors were
    in GPU memory still, while residuals came from there."""

    num_pages: int
    num_from_disk: int
    num_from_remote: int = 0
    kept_host: int = 0
    kept_disk: int = 0

    def and_from_remote(self, num_pages: int) -> Loaded:
        """With so many pages more."""
        return self._replace(
            num_pages=self.num_pages + num_pages,
            num_from_remote=self.num_from_remote + num_pages,
        )

    @classmethod
    def of(cls, sources: Sequence[int]) -> Loaded:
        """Of a prefix whose pages came from these sources, up to the first that came from none."""
        found = list(takewhile(lambda source: source != PageSource.NOWHERE, sources))
        kept_disk = found.count(PageSource.KEPT_DISK)
        return cls(
            num_pages=len(found),
            num_from_disk=found.count(PageSource.DISK) + kept_disk,
            num_from_remote=found.count(PageSource.REMOTE),
            kept_host=found.count(PageSource.KEPT_HOST),
            kept_disk=kept_disk,
        )

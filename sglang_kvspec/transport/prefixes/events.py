"""Events of a link to a prefix server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnchorFetched:
    """Event of a lookup with anchors first: a page's anchor has arrived and is the one that was
    found. PageFetched follows with the residual."""

    lookup: int
    page: int
    anchor: bytearray


@dataclass(frozen=True, slots=True)
class PageFetched:
    """Event: a page of a lookup has arrived: the anchor that was found, and its residual."""

    lookup: int
    page: int
    anchor: bytearray
    residual: bytearray


@dataclass(frozen=True, slots=True)
class LookupEnded:
    """Event: a lookup has ended. num_found: pages with residuals that the prefix server has, from
    the first on without a gap. reason: why fewer were fetched, else None."""

    lookup: int
    num_found: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class PublishEnded:
    """Event: an upload has ended and its memory is free. is_kept: the page is in the store."""

    upload: int
    is_kept: bool


StoreEvent = AnchorFetched | PageFetched | LookupEnded | PublishEnded

"""What a link to a store of prefixes tells its owner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnchorFetched:
    """Of a lookup whose anchors come first: a page's anchor is here, the one that was looked up.
    Its PageFetched follows once the residual is, too."""

    lookup: int
    page: int
    anchor: bytearray


@dataclass(frozen=True, slots=True)
class PageFetched:
    """A page of a lookup is here, whole: the anchor that was looked up, and its residual."""

    lookup: int
    page: int
    anchor: bytearray
    residual: bytearray


@dataclass(frozen=True, slots=True)
class LookupEnded:
    """Nothing more comes of a lookup. num_found: pages that the store said it has, from the first
    on. reason: why fewer were fetched, if so."""

    lookup: int
    num_found: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class PublishEnded:
    """A page was published, or will not be: its memory is free."""

    upload: int
    is_kept: bool


StoreEvent = AnchorFetched | PageFetched | LookupEnded | PublishEnded

"""Requests that wait for pages of their prompts, and pages that have arrived. Callers pass the
time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_kvspec.kv.prefix_store import PageLink


class LandedAnchor(NamedTuple):
    """Anchor of a page whose residual may arrive later."""

    link: PageLink
    anchor: bytearray


class LandedPage(NamedTuple):
    link: PageLink
    anchor: bytearray
    residual: bytearray


@dataclass(slots=True)
class Lookup:
    """Lookup in the store. Requests whose first missing page is the same share a lookup."""

    number: int
    links: Sequence[PageLink]
    rids: set[str] = field(default_factory=set)
    anchors: dict[bytes, LandedAnchor] = field(default_factory=dict)
    landed: dict[bytes, LandedPage] = field(default_factory=dict)
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    lookup: Lookup
    until_s: float


class Dropped(NamedTuple):
    """Lookup that lost its last request before it ended. is_late: the request waited until its
    limit."""

    lookup: Lookup
    is_late: bool


class Lookups:
    """Lookups by request. Pages of a lookup are kept until the last of its requests is
    forgotten."""

    def __init__(self, max_pages: int) -> None:
        """max_pages: most pages in all lookups together, whether they have landed or not."""
        self._max_pages = max_pages
        self._waiting: dict[str, _Waiting | None] = {}
        self._lookups: dict[int, Lookup] = {}
        self._last_number = 0

    def __contains__(self, rid: str) -> bool:
        """Return True if a lookup for the request was begun, joined or skipped."""
        return rid in self._waiting

    @property
    def num_landed(self) -> int:
        return sum(len(lookup.landed) for lookup in self._lookups.values())

    @property
    def rids(self) -> list[str]:
        return list(self._waiting)

    def skip(self, rid: str) -> None:
        """Record that nothing is looked up for this request."""
        self._waiting[rid] = None

    def join(self, rid: str, links: Sequence[PageLink], until_s: float) -> bool:
        """Wait for another request's lookup that begins with the same page. Returns False without
        one."""
        for lookup in self._lookups.values():
            if not lookup.is_over and lookup.links[0] == links[0]:
                lookup.rids.add(rid)
                self._waiting[rid] = _Waiting(lookup, until_s)
                return True
        return False

    def begin(self, rid: str, links: Sequence[PageLink], until_s: float) -> Lookup | None:
        """Begin a lookup of as many pages as there is room for. Returns None without room."""
        room = self._max_pages - sum(len(lookup.links) for lookup in self._lookups.values())
        if room < 1:
            return None
        self._last_number += 1
        lookup = Lookup(self._last_number, links[:room], {rid})
        self._lookups[lookup.number] = lookup
        self._waiting[rid] = _Waiting(lookup, until_s)
        return lookup

    def of(self, number: int) -> Lookup | None:
        return self._lookups.get(number)

    def is_awaited(self, rid: str, now_s: float) -> bool:
        """Return True if more pages may arrive for a request before its time is up."""
        waiting = self._waiting.get(rid)
        return waiting is not None and not waiting.lookup.is_over and now_s < waiting.until_s

    def is_anchored(self, rid: str, besides: Collection[str] = ()) -> bool:
        """Return True if all anchors of a request's lookup have arrived, the lookup has not ended,
        and no request in `besides` shares it."""
        waiting = self._waiting.get(rid)
        if waiting is None or waiting.lookup.is_over:
            return False
        lookup = waiting.lookup
        return len(lookup.anchors) == len(lookup.links) and lookup.rids.isdisjoint(besides)

    def find_anchor(self, link: PageLink) -> bytearray | None:
        for lookup in self._lookups.values():
            found = lookup.anchors.get(link.key)
            if found is not None and found.link == link:
                return found.anchor
        return None

    def find(self, link: PageLink) -> LandedPage | None:
        for lookup in self._lookups.values():
            page = lookup.landed.get(link.key)
            if page is not None and page.link == link:
                return page
        return None

    def forget(self, rid: str, now_s: float) -> Dropped | None:
        """Forget a request that has started or is gone. Returns the lookup that is dropped with it,
        if that has not ended."""
        waiting = self._waiting.pop(rid, None)
        if waiting is None:
            return None
        lookup = waiting.lookup
        lookup.rids.discard(rid)
        if lookup.rids:
            return None
        del self._lookups[lookup.number]
        return None if lookup.is_over else Dropped(lookup, now_s >= waiting.until_s)

"""Slots of kept anchors, and which are evicted. Touches no anchor memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_kvspec.kv.prefix_store import PageLink, StoredPage
from sglang_kvspec.kv.prefix_store.catalogue import Catalogue, Held, Tier


@dataclass(slots=True)
class AnchorCounters:
    """Numbers of pages since the server started. kept: pages whose anchors got a slot. reused:
    pages that were loaded with their kept anchors. dropped: pages that were evicted, or replaced
    by another version of the same tokens."""

    kept: int = 0
    reused: int = 0
    dropped: int = 0


class AnchorSlots:
    """Slots of at most num_slots pages, each with the checksum of its anchors. A residual of the
    same tokens that was encoded with other anchors does not match.

    The least recently used leaf is evicted, so that the beginning of a prefix stays longest. The
    page before another need not have a slot: it is usually still in the KV cache.
    """

    def __init__(self, num_slots: int) -> None:
        self._catalogue = Catalogue(num_slots, 0)
        self.num_slots = num_slots
        self.counters = AnchorCounters()

    def __len__(self) -> int:
        return len(self._catalogue)

    def slot_of(self, page: StoredPage) -> int | None:
        """Return the slot of the anchors that a tier's residual of this page was encoded with."""
        held = self._catalogue.locate(Tier.ANCHOR, page)
        return None if held is None else held.slot

    def touch(self, links: Iterable[PageLink]) -> None:
        """Mark the pages of a prefix that was looked up as used."""
        self._catalogue.touch(link.key for link in links)

    def claim(self, link: PageLink, stamp: int) -> int | None:
        """Return a slot to copy a page's anchors into, whose checksum is `stamp`. None if they are
        kept already, or if no page may be evicted."""
        known = self._catalogue.page(link)
        if known is not None and known.stamp == stamp:
            self.touch([link])
            return None
        self.counters.dropped += self._forget(link.key)
        place = self._catalogue.reserve(Tier.ANCHOR, link)
        if place is None:
            vacated = self._catalogue.evict(Tier.ANCHOR, link)
            if not vacated:
                return None
            self._catalogue.release(vacated)
            self.counters.dropped += len(vacated)
            place = self._catalogue.reserve(Tier.ANCHOR, link)
            assert place is not None, "the slot of an evicted page must be free"
        self._catalogue.install(Tier.ANCHOR, link, Held(place.slot, stamp, sequence=0))
        self.counters.kept += 1
        return place.slot

    def release(self, links: Iterable[PageLink]) -> None:
        """Free the slots of pages that are in the KV cache again, with their kept anchors."""
        self.counters.reused += sum(self._forget(link.key) for link in links)

    def _forget(self, key: bytes) -> int:
        vacated = self._catalogue.forget(Tier.ANCHOR, key)
        self._catalogue.release(vacated)
        return len(vacated)

    def check_integrity(self) -> None:
        self._catalogue.check_integrity()
        assert len(self) <= self.num_slots, "there are more kept anchors than slots"

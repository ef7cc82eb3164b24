"""Pages of a prefix store, their places, and which of them are evicted. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from sglang_kvspec.kv.prefix_store.free_slots import FreeSlots
from sglang_kvspec.kv.prefix_store.leaf_order import LeafOrder
from sglang_kvspec.kv.prefix_store.page_keys import PageLink, StoredPage


class Tier(IntEnum):
    ANCHOR = 0
    RESIDUAL = 1


class Held(NamedTuple):
    """Record in a store. sequence: larger than that of every record that was written before it and
    is still there."""

    slot: int
    checksum: int
    sequence: int


class Place(NamedTuple):
    tier: Tier
    slot: int


# A store has a hundred thousand pages. Their entries are plain tuples of plain values: the garbage
# collector untracks those, but would visit named tuples in every full collection.
_PlainHeld = tuple[int, int, int]
_PlainLink = tuple[bytes, bytes, int, bytes]


class _Shelf:
    """The records of one tier."""

    def __init__(self, num_slots: int) -> None:
        self.held: dict[bytes, _PlainHeld] = {}
        self.keys: dict[int, bytes] = {}
        self.order = LeafOrder()
        self.free = FreeSlots(num_slots)


class Catalogue:
    """Links and places of all pages. A residual belongs to the anchor of its page, and is forgotten
    with it.

    Slots pass from free to reserved (`reserve`) to held (`install`) to vacated (`evict`, `forget`)
    and back to free (`release`). The caller clears a vacated slot on disk before its release.
    """

    def __init__(self, num_anchor_slots: int, num_residual_slots: int) -> None:
        self._shelves = (_Shelf(num_anchor_slots), _Shelf(num_residual_slots))
        self._links: dict[bytes, _PlainLink] = {}
        self._now = 0

    def __len__(self) -> int:
        return len(self._links)

    def num_held(self, tier: Tier) -> int:
        return len(self._shelves[tier].held)

    def page(self, link: PageLink) -> StoredPage | None:
        """Return the stored page of exactly these tokens and exactly these parents, or None."""
        if self._links.get(link.key) != link:
            return None
        _, checksum, _ = self._shelves[Tier.ANCHOR].held[link.key]
        return StoredPage(link.key, checksum)

    def link(self, key: bytes) -> PageLink | None:
        found = self._links.get(key)
        return None if found is None else PageLink(*found)

    def locate(self, tier: Tier, page: StoredPage) -> Held | None:
        """Return the page's record; None if it is gone or replaced since the page was looked up."""
        anchor = self.held(Tier.ANCHOR, page.key)
        if anchor is None or anchor.checksum != page.stamp:
            return None
        return self.held(tier, page.key)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark these pages as used, all at the same time."""
        self._now += 1
        for key in keys:
            for shelf in self._shelves:
                if key in shelf.held:
                    shelf.order.touch(key, self._now)

    def reserve(self, tier: Tier, link: PageLink) -> Place | None:
        """Reserve a slot for the page's record, if possible right after its parent's. Return None
        if no slot is free; see `evict`."""
        shelf = self._shelves[tier]
        parent = self.held(tier, link.parent)
        slot = shelf.free.take_near(parent.slot if parent else None)
        return None if slot is None else Place(tier, slot)

    def evict(self, tier: Tier, coming: PageLink) -> list[Place]:
        """Forget the least recently used leaf of a tier, to make room for `coming`, whose parent
        stays. Return the vacated slots; none if no record may be evicted."""
        oldest = self._shelves[tier].order.oldest_leaf(protected=coming.parent)
        return [] if oldest is None else self.forget(tier, oldest)

    def claim(self, place: Place) -> None:
        """Reserve this very slot, in which a record is written already."""
        self._shelves[place.tier].free.take(place.slot)

    def install(self, tier: Tier, link: PageLink, held: Held) -> None:
        """List a record that was written to a slot reserved for it."""
        shelf = self._shelves[tier]
        assert held.slot not in shelf.free, f"slot {held.slot} is free"
        assert held.slot not in shelf.keys, f"slot {held.slot} belongs to another page"
        if tier is Tier.ANCHOR:
            self._links[link.key] = (link.key, link.parent, link.position, link.tokens)
        else:
            assert link.key in self._links, "a residual needs its anchor in the store"
        shelf.held[link.key] = (held.slot, held.checksum, held.sequence)
        shelf.keys[held.slot] = link.key
        self._now += 1
        shelf.order.add(link.key, link.parent, self._now)

    def forget(self, tier: Tier, key: bytes) -> list[Place]:
        """Forget a page's record; with its anchor, the whole page. Return the vacated slots."""
        tiers = (Tier.ANCHOR, Tier.RESIDUAL) if tier is Tier.ANCHOR else (Tier.RESIDUAL,)
        vacated = []
        for each in tiers:
            shelf = self._shelves[each]
            held = shelf.held.pop(key, None)
            if held is not None:
                slot, _, _ = held
                del shelf.keys[slot]
                shelf.order.remove(key)
                vacated.append(Place(each, slot))
        if tier is Tier.ANCHOR:
            self._links.pop(key, None)
        return vacated

    def release(self, places: Iterable[Place]) -> None:
        """Make slots that were reserved or vacated free again."""
        for place in places:
            self._shelves[place.tier].free.give_back(place.slot)

    def is_reachable(self, link: PageLink) -> bool:
        """Return True if a lookup can get past the page's parent."""
        return link.position == 0 or link.parent in self._links

    def has(self, tier: Tier, key: bytes) -> bool:
        return key in self._shelves[tier].held

    def held(self, tier: Tier, key: bytes) -> Held | None:
        found = self._shelves[tier].held.get(key)
        return None if found is None else Held(*found)

    def check_integrity(self) -> None:
        anchors, residuals = self._shelves
        assert self._links.keys() == anchors.held.keys(), "links and anchors disagree"
        assert residuals.held.keys() <= anchors.held.keys(), "a residual has no anchor"
        for shelf in self._shelves:
            keys = {slot: key for key, (slot, _, _) in shelf.held.items()}
            assert len(keys) == len(shelf.held), "a slot belongs to two pages"
            assert keys == shelf.keys, "keys and slots disagree"
            assert not any(slot in shelf.free for slot in keys), "a free slot belongs to a page"
            assert len(shelf.order) == len(keys), "the eviction order and the pages disagree"

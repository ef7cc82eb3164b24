"""What the reading and the writing side of an open store share, and how it follows its files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from sglang_kvspec.kv.prefix_store.catalogue import Catalogue, Held, Place, Tier
from sglang_kvspec.kv.prefix_store.entries import Entry, unpack_link, unpack_stamp
from sglang_kvspec.kv.prefix_store.identity import StoreIdentity
from sglang_kvspec.kv.prefix_store.page_keys import PageLink, StoredPage
from sglang_kvspec.kv.prefix_store.slab import Slab


@dataclass(slots=True)
class StoreCounters:
    """Since the store was opened. refused: not queued, the queue was full or closed. orphans: not
    written, the page before them is not in the store. no_room: not written, nothing could go.
    damaged: records whose checksum was wrong, removed. stale: looked up, gone before they were
    read. torn: entries that a dying writer left; unpaired: residuals whose anchor is gone."""

    anchors_written: int = 0
    residuals_written: int = 0
    anchors_evicted: int = 0
    residuals_evicted: int = 0
    refused: int = 0
    orphans: int = 0
    no_room: int = 0
    damaged_anchors: int = 0
    damaged_residuals: int = 0
    stale: int = 0
    torn: int = 0
    unpaired: int = 0
    index_resets: int = 0
    read_errors: int = 0
    write_errors: int = 0


@dataclass(slots=True)
class StoreState:
    """`lock` guards catalogue and counters and is never held while files are read or written."""

    identity: StoreIdentity
    catalogue: Catalogue
    slabs: tuple[Slab, Slab]
    writable: bool
    counters: StoreCounters = field(default_factory=StoreCounters)
    lock: Lock = field(default_factory=Lock)
    # The next record's; larger than that of any record in the store.
    sequence: int = 1

    def load(self) -> None:
        """Fill the empty catalogue with what the index files say. Raises OSError."""
        # Residuals first: another process may be writing, and a residual that was read before its
        # anchor was would be taken for a leftover.
        residuals = self.slabs[Tier.RESIDUAL].load_index()
        anchors = self.slabs[Tier.ANCHOR].load_index()
        with self.lock:
            useless = [*self._add(Tier.ANCHOR, anchors), *self._add(Tier.RESIDUAL, residuals)]
        self._clear(useless)

    def vacate(self, places: Sequence[Place]) -> None:
        """Free slots that the catalogue has just forgotten."""
        self._clear(places)
        with self.lock:
            self.catalogue.release(places)

    def _clear(self, places: Sequence[Place]) -> None:
        if not self.writable:
            return
        for place in places:
            try:
                self.slabs[place.tier].clear(place.slot)
            except OSError:
                # Whatever overwrites the record will not match the entry that stays.
                with self.lock:
                    self.counters.write_errors += 1

    def _add(self, tier: Tier, written: Iterable[tuple[int, Entry | None]]) -> list[Place]:
        """Returns slots whose record is of no use."""
        useless = []
        for slot, entry in written:
            if entry is None:
                self.counters.torn += 1
                continue
            place = Place(tier, slot)
            self.sequence = max(self.sequence, entry.sequence + 1)
            link = self._partner(tier, entry)
            if link is None:
                self.counters.unpaired += 1
                useless.append(place)
                continue
            if self.catalogue.has(tier, entry.key):
                # A crash of the whole machine may bring back what had been replaced.
                older = self.catalogue.forget(tier, entry.key)
                self.catalogue.release(older)
                useless.extend(older)
            self.catalogue.claim(place)
            self.catalogue.install(tier, link, Held(slot, entry.checksum, entry.sequence))
        return useless

    def _partner(self, tier: Tier, entry: Entry) -> PageLink | None:
        if tier is Tier.ANCHOR:
            return unpack_link(entry)
        page = StoredPage(entry.key, unpack_stamp(entry))
        if self.catalogue.locate(Tier.ANCHOR, page) is None:
            return None
        return self.catalogue.link(entry.key)

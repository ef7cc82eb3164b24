"""State that the reader and the writer of an open store share, loaded from its index files."""

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
    """Counts since the store was opened. refused: pages not queued: the queue was full or closed.
    orphans: pages not written: the page before them is not in the store. no_room: records not
    written: none could be evicted. damaged: records with a wrong checksum, removed. stale: records
    that were looked up, but were gone before they were read. torn: entries that a dying writer
    left. unpaired: residuals whose anchor is gone."""

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
    """State of an open store. `lock` guards catalogue and counters. It is never held while files
    are read or written."""

    identity: StoreIdentity
    catalogue: Catalogue
    slabs: tuple[Slab, Slab]
    writable: bool
    counters: StoreCounters = field(default_factory=StoreCounters)
    lock: Lock = field(default_factory=Lock)
    # Sequence of the next record, larger than that of any record in the store.
    sequence: int = 1

    def load(self) -> None:
        """Fill the empty catalogue from the index files. Raises OSError."""
        # Residuals first: another process may be writing. With anchors first, a page written in
        # between would show its residual without its anchor, and be taken for a leftover.
        residuals = self.slabs[Tier.RESIDUAL].load_index()
        anchors = self.slabs[Tier.ANCHOR].load_index()
        with self.lock:
            useless = [*self._add(Tier.ANCHOR, anchors), *self._add(Tier.RESIDUAL, residuals)]
        self._clear(useless)

    def vacate(self, places: Sequence[Place]) -> None:
        """Clear and free slots that the catalogue has just forgotten."""
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
                # The entry stays, but a record that overwrites this one will not match it.
                with self.lock:
                    self.counters.write_errors += 1

    def _add(self, tier: Tier, written: Iterable[tuple[int, Entry | None]]) -> list[Place]:
        """Add written entries to the catalogue. Return the slots whose record is of no use."""
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
                # A crash of the whole machine may bring back a record that had been replaced.
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

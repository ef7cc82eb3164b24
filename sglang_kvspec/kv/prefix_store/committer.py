"""Writes of one page to disk: make room, write its records, then list it in the catalogue."""

from __future__ import annotations

from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from sglang_kvspec.kv.prefix_store.catalogue import Held, Place, Tier
from sglang_kvspec.kv.prefix_store.disk_file import Bytes
from sglang_kvspec.kv.prefix_store.entries import Entry, pack_link, pack_stamp
from sglang_kvspec.kv.prefix_store.page_keys import PageLink
from sglang_kvspec.kv.prefix_store.state import StoreState
from sglang_kvspec.kv.prefix_store.write_health import WriteHealth


class PagePut(NamedTuple):
    """Page to be stored. Its memory must not change until the page is stored."""

    link: PageLink
    anchor: Bytes
    residual: Bytes | None

    @property
    def nbytes(self) -> int:
        return len(self.anchor) + len(self.residual or b"")


class Committer:
    """Writer of single pages, used by one thread. A page whose write fails is not stored."""

    def __init__(self, state: StoreState, health: WriteHealth | None = None) -> None:
        """health: logs failures of the disk; None for a store in memory."""
        self._state, self._health = state, health

    def commit(self, put: PagePut) -> None:
        state, link = self._state, put.link
        stamp = xxh3_64_intdigest(put.anchor)
        with state.lock:
            if not state.catalogue.is_reachable(link):
                state.counters.orphans += 1
                return
            if state.catalogue.link(link.key) not in (None, link):
                return
            needs_anchor = self._needs_anchor(put, stamp)
        if needs_anchor and not self._store(Tier.ANCHOR, put, stamp):
            return
        with state.lock:
            needs_residual = put.residual is not None and self._takes_residual(link, stamp)
        if needs_residual:
            self._store(Tier.RESIDUAL, put, stamp)

    def _needs_anchor(self, put: PagePut, stamp: int) -> bool:
        """Return True if the anchor must be written, also if another version of it is stored
        without residual. Equal tokens may have been computed in other batches, and a residual
        only fits the anchor it was encoded with."""
        held = self._state.catalogue.held(Tier.ANCHOR, put.link.key)
        if held is None:
            return True
        differs = held.checksum != stamp and put.residual is not None
        return differs and self._takes_residual(put.link, held.checksum)

    def _takes_residual(self, link: PageLink, stamp: int) -> bool:
        """Return True if the page lacks a residual and its parent has one: after a gap, a residual
        is of no use."""
        catalogue = self._state.catalogue
        anchor = catalogue.held(Tier.ANCHOR, link.key)
        if anchor is None or anchor.checksum != stamp or catalogue.has(Tier.RESIDUAL, link.key):
            return False
        return link.position == 0 or catalogue.has(Tier.RESIDUAL, link.parent)

    def _store(self, tier: Tier, put: PagePut, stamp: int) -> bool:
        state, link = self._state, put.link
        place = self._make_room(tier, link)
        if place is None:
            with state.lock:
                state.counters.no_room += 1
            return False
        if tier is Tier.ANCHOR:
            record, meta, checksum = put.anchor, pack_link(link), stamp
        else:
            record, meta = put.residual or b"", pack_stamp(stamp)
            checksum = xxh3_64_intdigest(record)
        held = Held(place.slot, checksum, state.sequence)
        state.sequence += 1
        try:
            entry = Entry(held.sequence, checksum, link.key, meta)
            state.slabs[tier].write(place.slot, entry, record)
        except OSError as error:
            if self._health is not None:
                self._health.note_failure(error)
            with state.lock:
                state.counters.write_errors += 1
            # The entry may have been written, whole or in part, so clear it.
            state.vacate([place])
            return False
        if self._health is not None:
            self._health.note_success()
        with state.lock:
            # A reader may have found the anchor damaged meanwhile, and forgotten it.
            is_wanted = tier is Tier.ANCHOR or self._takes_residual(link, stamp)
            if is_wanted:
                vacated = state.catalogue.forget(tier, link.key)
                state.catalogue.install(tier, link, held)
                state.counters.anchors_written += tier is Tier.ANCHOR
                state.counters.residuals_written += tier is Tier.RESIDUAL
            else:
                vacated = [place]
        state.vacate(vacated)
        return is_wanted

    def _make_room(self, tier: Tier, link: PageLink) -> Place | None:
        state = self._state
        while True:
            with state.lock:
                place = state.catalogue.reserve(tier, link)
                if place is not None:
                    return place
                evicted = state.catalogue.evict(tier, link)
                for vacated in evicted:
                    state.counters.anchors_evicted += vacated.tier is Tier.ANCHOR
                    state.counters.residuals_evicted += vacated.tier is Tier.RESIDUAL
            if not evicted:
                return None
            state.vacate(evicted)

"""Putting one page on disk: room for it, its records, then its place in the catalogue."""

from __future__ import annotations

from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from sglang_kvspec.pools.prefix_store.catalogue import Held, Place, Tier
from sglang_kvspec.pools.prefix_store.entries import Entry, pack_link, pack_stamp
from sglang_kvspec.pools.prefix_store.page_keys import PageLink
from sglang_kvspec.pools.prefix_store.state import StoreState


class PagePut(NamedTuple):
    """A page that is to be stored, in memory that belongs to the store."""

    link: PageLink
    anchor: bytes
    residual: bytes | None

    @property
    def nbytes(self) -> int:
        return len(self.anchor) + len(self.residual or b"")


class Committer:
    """Used by one thread. A page whose write fails is not stored, and that is all."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def commit(self, put: PagePut) -> None:
        state, link = self._state, put.link
        stamp = xxh3_64_intdigest(put.anchor)
        self._forget_other_version(put, stamp)
        with state.lock:
            if not state.catalogue.is_reachable(link):
                state.counters.orphans += 1
                return
            has_anchor = state.catalogue.has(Tier.ANCHOR, link.key)
            collides = has_anchor and state.catalogue.link(link.key) != link
        if collides:
            return
        if not has_anchor and not self._store(Tier.ANCHOR, put, put.anchor, pack_link(link)):
            return
        if put.residual is not None and self._takes_residual(link):
            self._store(Tier.RESIDUAL, put, put.residual, pack_stamp(stamp))

    def _forget_other_version(self, put: PagePut, stamp: int) -> None:
        """An anchor without residual gives way to a pair whose anchor differs: equal tokens may
        have been computed in other batches, and a residual only fits its own anchor."""
        with self._state.lock:
            catalogue, key = self._state.catalogue, put.link.key
            held = catalogue.held(Tier.ANCHOR, key)
            if (
                put.residual is None
                or held is None
                or held.checksum == stamp
                or catalogue.has(Tier.RESIDUAL, key)
                or catalogue.link(key) != put.link
                or not self._takes_residual_locked(put.link)
            ):
                return
            vacated = catalogue.forget(Tier.ANCHOR, key)
        self._state.vacate(vacated)

    def _takes_residual(self, link: PageLink) -> bool:
        with self._state.lock:
            return self._takes_residual_locked(link)

    def _takes_residual_locked(self, link: PageLink) -> bool:
        """Residuals are of use from the first page on without a gap."""
        catalogue = self._state.catalogue
        if catalogue.has(Tier.RESIDUAL, link.key):
            return False
        return link.position == 0 or catalogue.has(Tier.RESIDUAL, link.parent)

    def _store(self, tier: Tier, put: PagePut, record: bytes, meta: bytes) -> bool:
        state = self._state
        place = self._make_room(tier, put.link)
        if place is None:
            with state.lock:
                state.counters.no_room += 1
            return False
        entry = Entry(state.sequence, xxh3_64_intdigest(record), put.link.key, meta)
        state.sequence += 1
        try:
            state.slabs[tier].write(place.slot, entry, record)
        except OSError:
            with state.lock:
                state.counters.write_errors += 1
                state.catalogue.release([place])
            return False
        with state.lock:
            if tier is Tier.RESIDUAL and not state.catalogue.has(Tier.ANCHOR, put.link.key):
                # A reader has just found the anchor damaged.
                lost = [place]
            else:
                held = Held(place.slot, entry.checksum, entry.sequence)
                state.catalogue.install(tier, put.link, held)
                lost = []
                if tier is Tier.ANCHOR:
                    state.counters.anchors_written += 1
                else:
                    state.counters.residuals_written += 1
        state.vacate(lost)
        return not lost

    def _make_room(self, tier: Tier, link: PageLink) -> Place | None:
        state = self._state
        while True:
            with state.lock:
                place = state.catalogue.reserve(tier, link)
                if place is not None:
                    return place
                evicted = state.catalogue.evict(tier, link)
                for vacated in evicted:
                    if vacated.tier is Tier.ANCHOR:
                        state.counters.anchors_evicted += 1
                    else:
                        state.counters.residuals_evicted += 1
            if not evicted:
                return None
            state.vacate(evicted)

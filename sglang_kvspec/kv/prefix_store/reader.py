"""Lookups of prefixes in a store, and reads of their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from sglang_kvspec.kv.prefix_store.catalogue import Held, Tier
from sglang_kvspec.kv.prefix_store.page_keys import PageLink, StoredPage, chain_links
from sglang_kvspec.kv.prefix_store.state import StoreCounters, StoreState


class PrefixHit(NamedTuple):
    """Result of a lookup. pages: the longest prefix whose anchors are stored. num_complete: how
    many of these pages, from the first on, have their residuals too."""

    pages: list[StoredPage]
    num_complete: int


class PrefixReader:
    """Store as it was when it was opened; another process may be writing it. All methods but
    `close` may be called from any thread."""

    def __init__(self, state: StoreState, close_files: Callable[[], None]) -> None:
        self._state = state
        self._close_files = close_files
        self._closed = False

    @property
    def counters(self) -> StoreCounters:
        """Copy of the present counters."""
        with self._state.lock:
            return replace(self._state.counters)

    @property
    def num_pages(self) -> int:
        with self._state.lock:
            return len(self._state.catalogue)

    @property
    def num_residuals(self) -> int:
        with self._state.lock:
            return self._state.catalogue.num_held(Tier.RESIDUAL)

    def lookup(self, tokens: Sequence[int], namespace: bytes = b"") -> PrefixHit:
        """Return the longest stored prefix of `tokens`, and count it as used."""
        return self.lookup_links(chain_links(tokens, self._state.identity.page_size, namespace))

    def lookup_links(self, links: Iterable[PageLink]) -> PrefixHit:
        catalogue = self._state.catalogue
        pages: list[StoredPage] = []
        num_complete = 0
        with self._state.lock:
            for link in links:
                page = catalogue.page(link)
                if page is None:
                    break
                if num_complete == len(pages) and catalogue.has(Tier.RESIDUAL, link.key):
                    num_complete += 1
                pages.append(page)
            catalogue.touch(page.key for page in pages)
        return PrefixHit(pages, num_complete)

    def read_anchors(self, pages: Sequence[StoredPage], out: Sequence[memoryview]) -> list[bool]:
        """Read the anchors of pages[i], all layers and heads, into out[i] of anchor_page_bytes.
        Return False for a page whose anchors are gone, damaged or unreadable; out[i] is then
        zero."""
        return self._read(Tier.ANCHOR, pages, out)

    def read_residuals(self, pages: Sequence[StoredPage], out: Sequence[memoryview]) -> list[bool]:
        """Read residuals likewise: those that were encoded together with the looked-up anchors."""
        return self._read(Tier.RESIDUAL, pages, out)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._close_files()

    def _read(
        self, tier: Tier, pages: Sequence[StoredPage], out: Sequence[memoryview]
    ) -> list[bool]:
        identity = self._state.identity
        record_bytes = (identity.anchor_page_bytes, identity.residual_page_bytes)[tier]
        rows = [row.cast("B") for row in out[: len(pages)]]
        for row in rows:
            if row.nbytes != record_bytes or row.readonly:
                raise ValueError(
                    f"a page's {tier.name.lower()} takes {record_bytes} writable bytes, "
                    f"got {row.nbytes}"
                )
        if len(rows) < len(pages):
            raise ValueError(f"{len(pages)} pages do not fit in {len(rows)} buffers")
        with self._state.lock:
            places = [self._state.catalogue.locate(tier, page) for page in pages]
        found = [(i, held) for i, held in enumerate(places) if held is not None]
        failures = self._state.slabs[tier].read(
            [held.slot for _, held in found], [rows[i] for i, _ in found]
        )
        done = [False] * len(pages)
        for (i, held), failure in zip(found, failures, strict=True):
            if failure is None and xxh3_64_intdigest(rows[i]) == held.checksum:
                done[i] = True
            elif failure is None:
                self._drop(tier, pages[i].key, held)
            else:
                with self._state.lock:
                    self._state.counters.read_errors += 1
        for row, good in zip(rows, done, strict=True):
            if not good:
                row[:] = bytes(len(row))
        return done

    def _drop(self, tier: Tier, key: bytes, held: Held) -> None:
        """Forget a record that did not match: it was replaced while being read, or is damaged."""
        state = self._state
        replaced = not state.writable and self._entry_has_changed(tier, key, held)
        with state.lock:
            is_listed = state.catalogue.held(tier, key) == held
            if replaced or not is_listed:
                state.counters.stale += 1
            else:
                state.counters.damaged_anchors += tier is Tier.ANCHOR
                state.counters.damaged_residuals += tier is Tier.RESIDUAL
            vacated = state.catalogue.forget(tier, key) if is_listed else []
        state.vacate(vacated)

    def _entry_has_changed(self, tier: Tier, key: bytes, held: Held) -> bool:
        try:
            entry = self._state.slabs[tier].entry(held.slot)
        except OSError:
            return True
        return entry is None or (entry.key, entry.sequence) != (key, held.sequence)

"""Anchors that stay in KV memory when their pages go: only residuals have to come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from xxhash import xxh3_64_intdigest

from sglang_kvspec.kv.anchor_slots import AnchorSlots
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.page_records import BATCH_PAGES
from sglang_kvspec.kv.prefix_store import PageLink, PrefixHit, page_rows
from sglang_kvspec.kv.residual_table import PageRef


class KeptAnchors:
    """A page of the KV cache is an anchor and a place for a residual, in the residual store or
    cache. Where places run out an idle prefix gives its pages to others, and its anchors move to
    slots of their own, in the same memory, as long as a tier below has the residuals that were
    encoded with them. Which those are, checksums of anchors say.
    """

    def __init__(self, kv: PagedKVCache) -> None:
        """kv: with slots for kept anchors."""
        self._kv = kv
        self._slots = AnchorSlots(kv.plan.kept_anchor_pages)
        # Checksum of a page's anchors, by page, with the generation that had them.
        self._stamps: dict[int, tuple[PageRef, int]] = {}

    def note(self, stamps: Mapping[int, int]) -> None:
        """Checksums of the anchors of encoded pages, so that nobody has to read them again."""
        ref = self._kv.residuals.table.ref
        self._stamps |= {page: (ref(page), stamp) for page, stamp in stamps.items()}

    def note_rows(self, pages: Iterable[int], anchors: Iterable[memoryview]) -> None:
        """The same of anchors that were just copied out."""
        known = zip(pages, anchors, strict=True)
        self.note({page: xxh3_64_intdigest(row) for page, row in known})

    def keep(
        self, links: Sequence[PageLink], pages: Sequence[int], stored: Sequence[PrefixHit]
    ) -> None:
        """Pages that are about to be freed, encoded; pages[i] holds links[i]. stored: what each
        tier below has of them; where all have other versions, anchors are of no use."""
        stamps = self._stamps_of(pages)
        sources: dict[int, int] = {}
        for i, (link, page, stamp) in enumerate(zip(links, pages, stamps, strict=True)):
            theirs = {hit.pages[i].stamp for hit in stored if i < len(hit.pages)}
            if theirs and stamp not in theirs:
                continue
            slot = self._slots.claim(link, stamp)
            if slot is not None:
                # Of a page that has made room already for a later one this is the later one's.
                sources[slot] = page
        self._kv.records.keep_anchors(list(sources.values()), list(sources))

    def find(self, hit: PrefixHit, wanted: Iterable[int]) -> dict[int, int]:
        """Slots of the anchors of hit.pages[i], by i, where the very same are kept."""
        slots = {i: self._slots.slot_of(hit.pages[i]) for i in wanted}
        return {i: slot for i, slot in slots.items() if slot is not None}

    def touch(self, links: Iterable[PageLink]) -> None:
        """A prefix was looked up."""
        self._slots.touch(links)

    def release(self, links: Iterable[PageLink]) -> None:
        """The anchors of these pages were restored."""
        self._slots.release(links)

    def forget(self) -> None:
        """The prefix cache was flushed."""
        counters = self._slots.counters
        self._slots = AnchorSlots(self._slots.num_slots)
        self._slots.counters = counters

    def report(self) -> dict[str, Any]:
        return {
            "pages": len(self._slots),
            "slots": self._slots.num_slots,
            "counters": asdict(self._slots.counters),
        }

    def _stamps_of(self, pages: Sequence[int]) -> list[int]:
        unknown = [page for page in pages if not self._is_known(page)]
        for first in range(0, len(unknown), BATCH_PAGES):
            batch = unknown[first : first + BATCH_PAGES]
            self.note_rows(batch, page_rows(self._kv.records.read_anchors(batch)))
        return [self._stamps[page][1] for page in pages]

    def _is_known(self, page: int) -> bool:
        known = self._stamps.get(page)
        return known is not None and self._kv.residuals.table.is_current(known[0])

    def check_integrity(self) -> None:
        self._slots.check_integrity()

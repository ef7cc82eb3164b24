"""Anchors that stay in GPU memory after their pages are freed: only residuals must be loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from xxhash import xxh3_64_intdigest

from sglang_kvspec.kv.anchor_slots import AnchorSlots
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.prefix_store import PageLink, PrefixHit, page_rows
from sglang_kvspec.kv.residual_table import PageRef
from sglang_kvspec.kv.stored_pages import BATCH_PAGES


class KeptAnchors:
    """Kept anchors of a KV cache. A page of the cache is an anchor and a place for a residual, in
    the residual store or cache. Where places run out, an idle prefix gives up its pages. Its
    anchors then move to slots of their own, in the same memory, if a tier below has the residuals
    that were encoded with them. Checksums of anchors tell which residuals those are.
    """

    def __init__(self, kv: PagedKVCache) -> None:
        """kv: a cache with slots for kept anchors."""
        self._kv = kv
        self._slots = AnchorSlots(kv.plan.kept_anchor_pages)
        # By page: the generation whose anchors were read, and their checksum.
        self._stamps: dict[int, tuple[PageRef, int]] = {}

    def note(self, stamps: Mapping[int, int]) -> None:
        """Note checksums of the anchors of encoded pages, which need not be read again then."""
        ref = self._kv.residuals.table.ref
        self._stamps |= {page: (ref(page), stamp) for page, stamp in stamps.items()}

    def note_rows(self, pages: Iterable[int], anchors: Iterable[memoryview]) -> None:
        """Note checksums of anchors that were just copied out."""
        known = zip(pages, anchors, strict=True)
        self.note({page: xxh3_64_intdigest(row) for page, row in known})

    def keep(
        self, links: Sequence[PageLink], pages: Sequence[int], stored: Sequence[PrefixHit]
    ) -> None:
        """Keep the anchors of encoded pages that are about to be freed; pages[i] holds links[i].
        stored: the pages that each tier below has of them. Anchors of which all tiers have other
        versions are of no use, and not kept."""
        stamps = self._stamps_of(pages)
        sources: dict[int, int] = {}
        for i, (link, page, stamp) in enumerate(zip(links, pages, stamps, strict=True)):
            theirs = {hit.pages[i].stamp for hit in stored if i < len(hit.pages)}
            if theirs and stamp not in theirs:
                continue
            slot = self._slots.claim(link, stamp)
            if slot is not None:
                # claim() may have evicted a page of this loop: its slot then belongs to this page.
                sources[slot] = page
        self._kv.records.keep_anchors(list(sources.values()), list(sources))

    def find(self, hit: PrefixHit, wanted: Iterable[int]) -> dict[int, int]:
        """Return by i the slots of kept anchors that are the very anchors of hit.pages[i]."""
        slots = {i: self._slots.slot_of(hit.pages[i]) for i in wanted}
        return {i: slot for i, slot in slots.items() if slot is not None}

    def touch(self, links: Iterable[PageLink]) -> None:
        """Mark the pages of a prefix that was looked up as used."""
        self._slots.touch(links)

    def release(self, links: Iterable[PageLink]) -> None:
        """Free the slots of pages whose anchors were restored."""
        self._slots.release(links)

    def forget(self) -> None:
        """Forget all kept anchors, because the prefix cache was flushed. Counters stay."""
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

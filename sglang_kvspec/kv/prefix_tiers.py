"""Cached prefixes below the KV cache: in host memory, on disk, at a prefix server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.kept_anchors import KeptAnchors
from sglang_kvspec.kv.page_sources import Loaded, PageSource
from sglang_kvspec.kv.prefix_reads import Found, read_prefix
from sglang_kvspec.kv.prefix_store import (
    MemoryStore,
    PageLink,
    PrefixHit,
    PrefixReader,
    PrefixStore,
    page_rows,
)
from sglang_kvspec.kv.remote_tier import RemoteTier
from sglang_kvspec.kv.residual_forms import residual_form
from sglang_kvspec.kv.stored_pages import BATCH_PAGES, write_stored

_NO_HIT = PrefixHit([], 0)


# Puts a page, given its link, anchor and residual. Returns False if the tier takes no more for now.
_Put = Callable[[PageLink, memoryview, memoryview], bool]


class PrefixTiers:
    """Tiers of cached prefixes: host memory, disk, and a remote tier.

    Tiers store anchors and residuals apart. A tier without room for a residual evicts residuals of
    the least recently used prefix, and keeps the anchors. A page can be loaded if host memory and
    disk together have an anchor and the residual encoded with it. A prefix ends before the first
    page that cannot be loaded; the rest is computed. Pages that have arrived from the remote tier
    continue the prefix where host memory and disk end.
    """

    def __init__(
        self,
        kv: PagedKVCache,
        make_host: Callable[[], MemoryStore] | None = None,
        disk: PrefixStore | None = None,
        remote: RemoteTier | None = None,
        kept: KeptAnchors | None = None,
    ) -> None:
        """make_host: opens an empty tier in host memory; None for no such tier. kept: anchors that
        stay in GPU memory, of prefixes that host memory or disk hold."""
        self._kv = kv
        self._form = residual_form(kv.codec, kv.geometry)
        self._kept = kept
        self._make_host = make_host
        self._host = make_host() if make_host else None
        self._disk = disk
        self._remote = remote
        # True once weights change: the disk holds prefixes of the weights at the start.
        self._disk_is_stale = False
        self._loaded_bytes = {"anchors": 0, "residuals": 0}
        # Times that a page needed more than a slot has, where a prefix then ends.
        self._num_too_large = 0

    @property
    def is_empty(self) -> bool:
        return self._host is None and self._disk is None and self._remote is None

    @property
    def disk(self) -> PrefixStore | None:
        """The tier on disk; None once the weights have changed."""
        return None if self._disk_is_stale else self._disk

    # Loading

    def num_loadable(self, links: Sequence[PageLink]) -> int:
        """Return how many of these pages, from the first on, can be loaded. Counts as their use."""
        num_local = self.num_local(links)
        if self._remote is None:
            return num_local
        return num_local + self._remote.num_landed(links[num_local:])

    def num_local(self, links: Sequence[PageLink]) -> int:
        """Return how many of these pages, from the first on, can be loaded from host memory and
        disk. Counts as their use."""
        if self._kept is not None:
            self._kept.touch(links)
        return max(hit.num_complete for hit in self._hits(links))

    def load(
        self,
        links: Sequence[PageLink],
        pages: Sequence[int],
        agree: Callable[[list[int]], Sequence[int]] = list,
    ) -> Loaded:
        """Load links[i] into free pages[i], up to the first page that is missing or damaged.

        agree: turns this rank's PageSources, one per page, into those that count, where several
        ranks must load the same pages. Afterwards the first num_pages of `pages` are encoded, and
        the others are free.
        """
        sources: list[int] = []
        for first in range(0, len(pages), BATCH_PAGES):
            batch = slice(first, min(first + BATCH_PAGES, len(pages)))
            found = self._read(links[batch])
            own = pages[first : first + len(found)]
            write_stored(self._kv, self._form, own, found.stored, found.kept_slots)
            self._note_loaded(links[first : first + len(found)], own, found)
            sources += self._sources(found)
            if len(found) < batch.stop - batch.start:
                break
        num_mine = len(sources)
        loaded = Loaded.of(agree(sources + [PageSource.NOWHERE] * (len(pages) - num_mine)))
        if loaded.num_pages < num_mine:
            # Another rank lacks these pages, so that no forward can read them.
            self._kv.free_pages(pages[loaded.num_pages : num_mine])
        return loaded

    def _read(self, links: Sequence[PageLink]) -> Found:
        hits = self._hits(links)
        tiers = (self._host, self.disk)
        return read_prefix(self._kv, self._form, links, hits, tiers, self._remote, self._kept)

    def _sources(self, found: Found) -> list[int]:
        def source_of(place: int) -> PageSource:
            tier, is_kept = found.sources[place], place in found.kept_slots
            if tier is self._remote:
                return PageSource.REMOTE
            if tier is self._disk:
                return PageSource.KEPT_DISK if is_kept else PageSource.DISK
            return PageSource.KEPT_HOST if is_kept else PageSource.HOST

        return [source_of(place) for place in range(len(found))]

    def _note_loaded(self, links: Sequence[PageLink], pages: Sequence[int], found: Found) -> None:
        self.count_loaded(len(found) - len(found.kept_slots), len(found))
        if self._kept is not None:
            self._kept.note({pages[i]: stamp for i, stamp in found.stamps.items()})
            self._kept.release(links[i] for i in found.kept_slots)

    def count_loaded(self, num_anchors: int, num_residuals: int) -> None:
        """Count the pages whose anchors, and whose residuals, load() or an early start loaded."""
        page = self._kv.plan.page_bytes
        self._loaded_bytes["anchors"] += num_anchors * page.anchor
        self._loaded_bytes["residuals"] += num_residuals * self._form.slot_bytes

    def _hits(self, links: Sequence[PageLink]) -> tuple[PrefixHit, PrefixHit]:
        host, disk = self._host, self.disk
        return (
            host.lookup_links(links) if host else _NO_HIT,
            disk.lookup_links(links) if disk else _NO_HIT,
        )

    # Copying to lower tiers

    def spill(self, links: Sequence[PageLink], pages: Sequence[int]) -> int:
        """Copy pages of a prefix that the disk or the remote tier lacks. The prefix stays in the KV
        cache: pages[i], encoded, holds links[i]. Copies, but waits for no tier: a tier that is
        behind misses the rest. Return how many of these pages the disk has, or will have."""
        num_on_disk = 0
        if self.disk is not None:
            first = self.disk.lookup_links(links).num_complete
            num_on_disk = self._put(first, self.disk.put, links, pages)
        if self._remote is not None:
            self._put(self._remote.first_to_publish(links), self._remote.put, links, pages)
        return num_on_disk

    def demote(self, links: Sequence[PageLink], pages: Sequence[int], num_staying: int = 0) -> None:
        """Copy a prefix as spill() does, and to host memory, before the KV cache drops all but its
        first num_staying pages. Keep anchors of dropped pages whose residuals a tier has."""
        num_below = self.spill(links, pages)
        if self._host is not None:
            first = self._host.lookup_links(links).num_complete
            self._put(first, self._host.put, links, pages)
        if self._kept is not None:
            found = self._hits(links)
            # Anchors without a residual in some tier are of no use: a prefill reads both.
            going = slice(num_staying, max(num_below, found[0].num_complete))
            hits = [hit._replace(pages=hit.pages[going]) for hit in found]
            self._kept.keep(links[going], pages[going], hits)

    def _put(self, first: int, put: _Put, links: Sequence[PageLink], pages: Sequence[int]) -> int:
        """Put pages from index `first` on. Return how many pages the tier then has."""
        for start in range(first, len(pages), BATCH_PAGES):
            batch = slice(start, start + BATCH_PAGES)
            own = pages[batch]
            assert all(map(self._kv.is_encoded, own)), "only an encoded page has records"
            anchors = page_rows(self._kv.records.read_anchors(own))
            residuals = page_rows(self._form.read_slots(self._kv.records, own))
            if self._kept is not None:
                self._kept.note_rows(own, anchors)
            for i, residual in enumerate(residuals):
                if not put(links[start + i], anchors[i], residual):
                    return start + i
            if len(residuals) < len(own):
                self._num_too_large += 1
                return start + len(residuals)
        return len(pages)

    # Control plane

    def forget_memory(self) -> None:
        """Forget kept anchors and host memory, because the prefix cache was flushed. Prefixes on
        disk stay: they outlive the server."""
        if self._kept is not None:
            self._kept.forget()
        if self._make_host is not None:
            # Free the memory of the old tier before the new one is allocated.
            self._host = None
            self._host = self._make_host()

    def weights_will_change(self) -> None:
        """Stop the use of the disk and of the remote tier: both were opened for the weights that
        will be replaced."""
        self._disk_is_stale = True
        if self._remote is not None:
            self._remote.weights_will_change()

    def close(self, timeout_s: float) -> None:
        """Write pages that are queued for disk, for at most timeout_s, and close the tiers."""
        if self._disk is not None:
            self._disk.flush(timeout_s)
            self._disk.close(timeout_s)
        if self._remote is not None:
            self._remote.close()

    def report(self) -> dict[str, Any]:
        """Return for each tier the number of pages, the number of residuals, and counters.
        loaded_bytes: bytes that were loaded into the KV cache from all tiers together."""
        tiers: dict[str, PrefixReader | None] = {"host": self._host, "disk": self._disk}
        report: dict[str, Any] = {name: _describe(tier) for name, tier in tiers.items() if tier}
        report["loaded_bytes"] = dict(self._loaded_bytes)
        report["too_large"] = self._num_too_large
        if self._kept is not None:
            report["kept_anchors"] = self._kept.report()
        if self._disk is not None:
            report["disk"] |= {
                "is_stale": self._disk_is_stale,
                "waiting_bytes": self._disk.waiting_bytes,
            }
        if self._remote is not None:
            report["remote"] = self.remote_report()
        return report

    def remote_report(self) -> dict[str, Any]:
        assert self._remote is not None, "there is no remote tier"
        return self._remote.report()


def _describe(tier: PrefixReader) -> dict[str, Any]:
    return {
        "pages": tier.num_pages,
        "residuals": tier.num_residuals,
        "counters": asdict(tier.counters),
    }

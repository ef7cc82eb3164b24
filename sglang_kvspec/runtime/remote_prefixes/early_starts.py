"""Early starts: requests that draft on anchors from a prefix server before residuals arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from xxhash import xxh3_128_digest

from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.prefix_store import PageLink, page_rows
from sglang_kvspec.kv.residual_forms import residual_form
from sglang_kvspec.runtime.common_prefixes import names_of
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.remote_prefixes.lookups import LandedPage
from sglang_kvspec.runtime.remote_prefixes.remote import RemotePrefixes


@dataclass(slots=True)
class _Start:
    """Early start of a running request. pages: pages that the request was given. pending: by page
    whose residual has not arrived on this rank, its link and a digest of its anchor."""

    pages: Sequence[int]
    pending: dict[int, tuple[PageLink, bytes]]


class EarlyStarts:
    """Early starts by request, alike on all ranks of a server. An early start ends when all
    residuals have landed, or when its pages are freed: the request is gone, or must start again.

    Each rank receives its own records. A request starts once all ranks have its anchors, and its
    residuals have landed once all ranks have theirs. All ranks must make the same calls with the
    same requests, in the same order.
    """

    def __init__(
        self,
        kv: PagedKVCache,
        remote: RemotePrefixes,
        on_loaded: Callable[[int, int], None],
        ranks: Ranks | None = None,
    ) -> None:
        """on_loaded: called with the numbers of anchors and residuals that were written to the KV
        cache. ranks: None for one rank."""
        self._kv, self._remote, self._on_loaded = kv, remote, on_loaded
        self._form = residual_form(kv.codec, kv.geometry)
        self._ranks = ranks or Ranks()
        self._starts: dict[str, _Start] = {}

    @property
    def rids(self) -> list[str]:
        return list(self._starts)

    def has_pending_residuals(self, rid: str) -> bool:
        return rid in self._starts

    def may_begin(self, links: Sequence[PageLink]) -> bool:
        """Return True if every rank has the anchors of all these pages. Sends at most one
        message."""
        if not links:
            return True
        are_mine = all(self._remote.anchor_of(link) is not None for link in links)
        (are_from_all,) = self._ranks.least([are_mine], about=("may begin", *names_of([links])))
        return bool(are_from_all)

    def begin(self, rid: str, links: Sequence[PageLink], pages: Sequence[int]) -> None:
        """Start a request: write the anchor of links[i], which must have arrived, to the free
        pages[i]. Residuals land later, in land()."""
        assert rid not in self._starts, f"request {rid} has already started"
        kv = self._kv
        anchors = torch.empty((len(pages), *kv.anchors.page_shape), dtype=torch.uint8)
        pending = {}
        for row, page, link in zip(page_rows(anchors), pages, links, strict=True):
            anchor = self._remote.anchor_of(link)
            assert anchor is not None, "the anchor has not arrived"
            row[:] = anchor
            pending[page] = (link, xxh3_128_digest(anchor))
        kv.begin_landing(pages)
        kv.records.write_anchors(pages, anchors)
        kv.finish_anchors(pages)
        self._on_loaded(len(pages), 0)
        self._starts[rid] = _Start(list(pages), pending)
        self._remote.counters.early += 1

    def land(self) -> tuple[list[str], list[str]]:
        """Write arrived residuals to the KV cache. Returns the requests that are complete since the
        last call, and those whose residuals will not arrive, or not in time. Sends at most one
        message."""
        if not self._starts:
            return [], []
        # Check this first: if a lookup ended between landing and a later check, its request would
        # count as lost.
        awaited = {rid: self._remote.is_awaited(rid) for rid in self._starts}
        for start in self._starts.values():
            landed = self._landed(start)
            if landed:
                self._write(landed)
                for page in landed:
                    del start.pending[page]
        rids = self.rids
        are_here = [not self._starts[rid].pending for rid in rids]
        may_come = [is_here or awaited[rid] for rid, is_here in zip(rids, are_here, strict=True)]
        common = self._ranks.least([*are_here, *may_come], about=("land", rids))
        complete = [rid for rid, is_here in zip(rids, common[: len(rids)], strict=True) if is_here]
        lost = [rid for rid, may in zip(rids, common[len(rids) :], strict=True) if not may]
        for rid in complete:
            self._kv.residuals.finish(self._starts.pop(rid).pages)
        return complete, lost

    def _landed(self, start: _Start) -> dict[int, LandedPage]:
        """Return records that have arrived, by page. A record may be of a newer version of the
        page, from another lookup. Its residual does not match the anchor that was written, and is
        left out."""
        found = {}
        for page, (link, digest) in start.pending.items():
            record = self._remote.find(link)
            if record is not None and xxh3_128_digest(record.anchor) == digest:
                found[page] = record
        return found

    def _write(self, landed: dict[int, LandedPage]) -> None:
        kv, pages = self._kv, list(landed)
        slots = torch.empty((len(pages), self._form.slot_bytes), dtype=torch.uint8)
        for row, record in zip(page_rows(slots), landed.values(), strict=True):
            row[:] = record.residual
        self._form.write_slots(kv.records, pages, slots)
        self._on_loaded(0, len(pages))

    def release(self, pages: Collection[int]) -> None:
        """End the early starts that have some of these pages, which are about to be freed."""
        freed = set(pages)
        over = [rid for rid, start in self._starts.items() if not freed.isdisjoint(start.pages)]
        for rid in over:
            del self._starts[rid]

    # Counters

    def note_drafts(self, count: int) -> None:
        """Count the tokens that a request drafted before its residuals arrived."""
        self._remote.counters.drafts_on_anchors += count

    def note_returned(self) -> None:
        """Count a request that starts again because its residuals did not arrive."""
        self._remote.counters.returned += 1

    def wait_for_news(self, timeout_s: float) -> None:
        self._remote.wait_for_news(timeout_s)

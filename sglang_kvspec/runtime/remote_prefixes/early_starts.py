"""Requests that draft on anchors from a prefix server while the residuals are on their way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from sglang_kvspec.pools.kv_tiers import KVTiers
from sglang_kvspec.pools.page_records import PageRecords
from sglang_kvspec.pools.prefix_store import PageLink, page_rows
from sglang_kvspec.runtime.remote_prefixes.lookups import LandedPage
from sglang_kvspec.runtime.remote_prefixes.remote import RemotePrefixes


@dataclass(slots=True)
class _Start:
    """A running request. lacking: its pages whose residuals have not come, and a digest of the
    anchor that each has."""

    lacking: dict[int, tuple[PageLink, bytes]]


class EarlyStarts:
    """Of one rank, by request. It is over when all residuals are here, or when pages of it are
    freed: the request is gone, or must start anew."""

    def __init__(
        self, kv: KVTiers, remote: RemotePrefixes, on_loaded: Callable[[int, int], None]
    ) -> None:
        """on_loaded: told how many anchors and residuals have been put into place."""
        self._kv, self._remote, self._on_loaded = kv, remote, on_loaded
        self._starts: dict[str, _Start] = {}

    @property
    def rids(self) -> list[str]:
        return list(self._starts)

    def lacks_residuals(self, rid: str) -> bool:
        start = self._starts.get(rid)
        return start is not None and bool(start.lacking)

    def may_begin(self, links: Sequence[PageLink]) -> bool:
        """Whether the anchors of all these pages are here."""
        return all(self._remote.anchor_of(link) is not None for link in links)

    def begin(self, rid: str, links: Sequence[PageLink], pages: Sequence[int]) -> None:
        """A request starts: free pages[i] get the anchor of links[i], which is here, and their
        residuals once they come."""
        assert rid not in self._starts, f"request {rid} has started"
        kv = self._kv
        records = PageRecords.empty(kv.geometry, kv.codec, len(pages))
        lacking = {}
        for row, page, link in zip(page_rows(records.anchors), pages, links, strict=True):
            anchor = self._remote.anchor_of(link)
            assert anchor is not None, "its anchor is not here"
            row[:] = anchor
            lacking[page] = (link, xxh3_128_digest(anchor))
        kv.begin_landing(pages)
        kv.write_anchors(pages, records.anchors)
        kv.finish_anchors(pages)
        self._on_loaded(len(pages), 0)
        self._starts[rid] = _Start(lacking)
        self._remote.counters.early += 1

    def land(self) -> list[str]:
        """Put residuals that have come into place. Returns requests whose residuals will not come,
        or not in time."""
        # Asked before: what comes in between ends a wait, too.
        given_up = [rid for rid in self._starts if not self._remote.is_awaited(rid)]
        for start in self._starts.values():
            landed = self._landed(start)
            if landed:
                self._write(landed)
                for page in landed:
                    del start.lacking[page]
        return [rid for rid in given_up if self._starts[rid].lacking]

    def _landed(self, start: _Start) -> dict[int, LandedPage]:
        """By page. Another lookup may have brought another version of a page, which the store has
        had since: its residual does not go with the anchor that is here."""
        found = {}
        for page, (link, digest) in start.lacking.items():
            record = self._remote.find(link)
            if record is not None and xxh3_128_digest(record.anchor) == digest:
                found[page] = record
        return found

    def _write(self, landed: dict[int, LandedPage]) -> None:
        kv, pages = self._kv, list(landed)
        records = PageRecords.empty(kv.geometry, kv.codec, len(pages))
        for row, record in zip(page_rows(records.residuals), landed.values(), strict=True):
            row[:] = record.residual
        kv.write_residuals(pages, records.residuals)
        kv.residuals.finish(pages)
        self._on_loaded(0, len(pages))

    def take_complete(self) -> list[str]:
        """Requests whose residuals are all here since the last call."""
        complete = [rid for rid, start in self._starts.items() if not start.lacking]
        for rid in complete:
            del self._starts[rid]
        return complete

    def release(self, pages: Collection[int]) -> None:
        """These pages are about to be freed."""
        freed = set(pages)
        for rid in [rid for rid, start in self._starts.items() if start.lacking.keys() & freed]:
            del self._starts[rid]

    # What they did

    def note_drafts(self, count: int) -> None:
        """A request has drafted so many tokens while it lacked residuals."""
        self._remote.counters.drafts_on_anchors += count

    def note_returned(self) -> None:
        """A request whose residuals did not come starts anew."""
        self._remote.counters.returned += 1

    def wait_for_news(self, timeout_s: float) -> None:
        self._remote.wait_for_news(timeout_s)

"""Prefixes that are not in the KV cache, or will outlive it: in host memory, on disk, elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from sglang_kvspec.pools.kv_tiers import KVTiers
from sglang_kvspec.pools.page_records import PageRecords, copy_in, copy_out
from sglang_kvspec.pools.prefix_store import (
    MemoryStore,
    PageLink,
    PrefixHit,
    PrefixReader,
    PrefixStore,
    page_rows,
)
from sglang_kvspec.pools.remote_tier import RemoteTier

# Pages copied at once: what a copy needs of memory beside the tiers.
BATCH_PAGES = 16

_NO_HIT = PrefixHit([], 0)


class Loaded(NamedTuple):
    """num_pages were brought back; the residuals of num_from_disk of them from disk, and
    num_from_remote of them from another machine."""

    num_pages: int
    num_from_disk: int
    num_from_remote: int = 0


_Source = PrefixReader | RemoteTier
# Takes a page's link, anchor and residual; False where it takes no more for now.
_Put = Callable[[PageLink, memoryview, memoryview], bool]


class PrefixTiers:
    """Anchors and residuals live apart below the KV cache: a tier that is short of room for
    residuals gives up those first, of the prefix used longest ago, and keeps the anchors. A page
    counts as there once an anchor and the residual encoded with it can be had, from either tier;
    a prefix ends before the first page of which that is not so, and the rest is computed. What a
    remote tier has sent here goes on where these two end.
    """

    def __init__(
        self,
        kv: KVTiers,
        make_host: Callable[[], MemoryStore] | None = None,
        disk: PrefixStore | None = None,
        remote: RemoteTier | None = None,
    ) -> None:
        """make_host: opens an empty tier in host memory; None for no such tier."""
        self._kv = kv
        self._make_host = make_host
        self._host = make_host() if make_host else None
        self._disk = disk
        self._remote = remote
        # What the present weights compute no longer belongs there.
        self._disk_is_stale = False

    @property
    def are_none(self) -> bool:
        return self._host is None and self._disk is None and self._remote is None

    @property
    def disk(self) -> PrefixStore | None:
        """The tier on disk as long as it is that of the present weights."""
        return None if self._disk_is_stale else self._disk

    # Coming back

    def num_loadable(self, links: Sequence[PageLink]) -> int:
        """How many of these pages, from the first on, can be brought back. Counts as their use."""
        num_local = self.num_local(links)
        if self._remote is None:
            return num_local
        return num_local + self._remote.num_landed(links[num_local:])

    def num_local(self, links: Sequence[PageLink]) -> int:
        """The same without what came from another machine."""
        return max(hit.num_complete for hit in self._hits(links))

    def load(self, links: Sequence[PageLink], pages: Sequence[int]) -> Loaded:
        """Fill free pages with what is kept of links[i], as far as records are there and whole.

        Of `pages` the first num_pages are encoded afterwards, the others still free.
        """
        num_pages = num_from_disk = num_from_remote = 0
        for first in range(0, len(pages), BATCH_PAGES):
            batch = slice(first, min(first + BATCH_PAGES, len(pages)))
            records, sources = self._read(links[batch])
            copy_in(self._kv, pages[first : first + len(records)], records)
            num_pages += len(records)
            num_from_disk += sum(source is self._disk for source in sources)
            num_from_remote += sum(source is self._remote for source in sources)
            if len(records) < batch.stop - batch.start:
                break
        return Loaded(num_pages, num_from_disk, num_from_remote)

    def _hits(self, links: Sequence[PageLink]) -> tuple[PrefixHit, PrefixHit]:
        host, disk = self._host, self.disk
        return (
            host.lookup_links(links) if host else _NO_HIT,
            disk.lookup_links(links) if disk else _NO_HIT,
        )

    def _read(self, links: Sequence[PageLink]) -> tuple[PageRecords, list[_Source]]:
        """The longest whole run of these pages, and which tier each residual came from."""
        kv = self._kv
        is_pinned = kv.device.type == "cuda"
        records = PageRecords.empty(kv.geometry, kv.codec, len(links), pinned=is_pinned)
        anchors, residuals = page_rows(records.anchors), page_rows(records.residuals)
        in_host, on_disk = self._hits(links)
        sources: dict[int, _Source] = {}
        if self._host is not None:
            wanted = range(in_host.num_complete)
            whole = _read_whole(self._host, in_host, wanted, anchors, residuals)
            sources = dict.fromkeys(whole, self._host)
        if self.disk is not None:
            wanted_from_disk = [i for i in range(on_disk.num_complete) if i not in sources]
            paired = self._read_host_anchors(in_host, on_disk, wanted_from_disk, anchors)
            whole = _read_whole(self.disk, on_disk, wanted_from_disk, anchors, residuals, paired)
            sources |= dict.fromkeys(whole, self.disk)
        if self._remote is not None:
            for i in (i for i in range(len(links)) if i not in sources):
                if not self._remote.read(links[i], anchors[i], residuals[i]):
                    break
                sources[i] = self._remote
        length = next((i for i in range(len(links)) if i not in sources), len(links))
        found = PageRecords(records.anchors[:length], records.residuals[:length])
        return found, [sources[i] for i in range(length)]

    def _read_host_anchors(
        self,
        in_host: PrefixHit,
        on_disk: PrefixHit,
        wanted: Sequence[int],
        anchors: Sequence[memoryview],
    ) -> set[int]:
        """Of pages whose residuals are on disk: those whose very anchors are in host memory."""
        if self._host is None:
            return set()
        same = [i for i in wanted if in_host.pages[i : i + 1] == on_disk.pages[i : i + 1]]
        done = self._host.read_anchors([in_host.pages[i] for i in same], [anchors[i] for i in same])
        return {i for i, good in zip(same, done, strict=True) if good}

    # Leaving

    def spill(self, links: Sequence[PageLink], pages: Sequence[int]) -> None:
        """Copy what the disk and the remote tier lack of a prefix that stays in the KV cache: page
        i, encoded, holds links[i]. Takes no longer than copying; where one of them is behind, the
        rest is left out."""
        if self.disk is not None:
            first = self.disk.lookup_links(links).num_complete
            self._keep(first, self.disk.put, links, pages)
        if self._remote is not None:
            self._keep(self._remote.first_to_publish(links), self._remote.put, links, pages)

    def demote(self, links: Sequence[PageLink], pages: Sequence[int]) -> None:
        """The same for a prefix of which the KV cache is about to drop a part."""
        self.spill(links, pages)
        if self._host is not None:
            first = self._host.lookup_links(links).num_complete
            self._keep(first, self._host.put, links, pages)

    def _keep(self, first: int, put: _Put, links: Sequence[PageLink], pages: Sequence[int]) -> None:
        for start in range(first, len(pages), BATCH_PAGES):
            batch = slice(start, start + BATCH_PAGES)
            records = copy_out(self._kv, pages[batch])
            rows = zip(page_rows(records.anchors), page_rows(records.residuals), strict=True)
            for link, (anchor, residual) in zip(links[batch], rows, strict=True):
                if not put(link, anchor, residual):
                    return

    # Control plane

    def forget_host(self) -> None:
        """The prefix cache was flushed. What is on disk stays: it outlives the server."""
        if self._make_host is not None:
            # One at a time: the old one's memory is given back first.
            self._host = None
            self._host = self._make_host()

    def weights_will_change(self) -> None:
        """The disk and the remote tier were opened for the weights so far, and have nothing for the
        next ones."""
        self._disk_is_stale = True
        if self._remote is not None:
            self._remote.weights_will_change()

    def close(self, timeout_s: float) -> None:
        """Finish what is on its way to disk, for at most this long."""
        if self._disk is not None:
            self._disk.flush(timeout_s)
            self._disk.close(timeout_s)
        if self._remote is not None:
            self._remote.close()

    def report(self) -> dict[str, Any]:
        """By tier: pages, and of how many the residual is there; counters."""
        tiers: dict[str, PrefixReader | None] = {"host": self._host, "disk": self._disk}
        report: dict[str, Any] = {name: _describe(tier) for name, tier in tiers.items() if tier}
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


def _read_whole(
    tier: PrefixReader,
    hit: PrefixHit,
    wanted: Sequence[int],
    anchors: Sequence[memoryview],
    residuals: Sequence[memoryview],
    have_anchors: set[int] | frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Read pages `wanted` of a hit into their rows; those of which both parts are there and
    undamaged."""
    lacking = [i for i in wanted if i not in have_anchors]
    done = tier.read_anchors([hit.pages[i] for i in lacking], [anchors[i] for i in lacking])
    good = have_anchors | {i for i, whole in zip(lacking, done, strict=True) if whole}
    both = [i for i in wanted if i in good]
    done = tier.read_residuals([hit.pages[i] for i in both], [residuals[i] for i in both])
    return (i for i, whole in zip(both, done, strict=True) if whole)

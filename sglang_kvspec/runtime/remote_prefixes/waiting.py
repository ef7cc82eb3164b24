"""Requests that wait for pages from a prefix server, alike on all ranks of a server.

Each rank looks up its own heads, with its own clock and circuit breaker. Pages are looked up if all
ranks would do so, from the first page on that any rank is missing. A request starts once no rank
would have it wait longer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sglang_kvspec.kv.prefix_store import PageLink
from sglang_kvspec.runtime.common_prefixes import CommonPrefixes
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.remote_prefixes.remote import RemotePrefixes


class WaitingRequests:
    """Requests that wait for pages. All ranks must make the same calls with the same requests, in
    the same order."""

    def __init__(self, remote: RemotePrefixes, common: CommonPrefixes, ranks: Ranks) -> None:
        self._remote, self._common, self._ranks = remote, common, ranks
        # Requests that will not wait any more.
        self._settled: set[str] = set()
        # Requests that cannot start on the anchors that were looked up.
        self._need_whole_pages: set[str] = set()

    def has_asked(self, rid: str) -> bool:
        return self._remote.has_asked(rid)

    def ask(
        self, wanted: Mapping[str, Sequence[PageLink]], anchors_first: Collection[str] = ()
    ) -> None:
        """Look up pages for requests that are new in the queue. wanted: pages of each prompt that
        the KV cache is missing; pages that a local tier has are not looked up. anchors_first:
        requests that may start on anchors. Sends at most one message."""
        asking = {rid: links for rid, links in wanted.items() if links}
        for rid in wanted:
            if rid not in asking:
                self._remote.ask(rid, [])
                self._settled.add(rid)
        if not asking:
            return
        nums, all_ask = self._common.num_local(list(asking.values()), self._remote.would_ask)
        for (rid, links), num in zip(asking.items(), nums, strict=True):
            comes_first = rid in anchors_first
            self._remote.ask(rid, links[num:], others_ask=all_ask, anchors_first=comes_first)

    def awaited(self, rids: Sequence[str]) -> set[str]:
        """Return those of these requests that should wait longer for pages. All have been passed to
        ask(). Sends at most one message, none if no request waits."""
        open_rids = [rid for rid in rids if rid not in self._settled]
        if not open_rids:
            return set()
        done = [int(not self._remote.is_awaited(rid)) for rid in open_rids]
        common = self._ranks.least(done, about=open_rids)
        waiting = {rid for rid, is_done in zip(open_rids, common, strict=True) if not is_done}
        self._settled.update(rid for rid in open_rids if rid not in waiting)
        return waiting

    def anchored(self, rids: Sequence[str], besides: Collection[str]) -> set[str]:
        """Return those of these awaited requests whose anchors have all arrived, on every rank. A
        lookup shared with one of the requests `besides` does not count. Sends at most one
        message."""
        asking = [rid for rid in rids if rid not in self._need_whole_pages]
        if not asking:
            return set()
        mine = [int(self._remote.is_anchored(rid, besides)) for rid in asking]
        common = self._ranks.least(mine, about=("anchored", asking))
        return {rid for rid, is_anchored in zip(asking, common, strict=True) if is_anchored}

    def await_whole_pages(self, rid: str) -> None:
        """Exclude a request from anchored(): it cannot start on anchors."""
        self._need_whole_pages.add(rid)

    def retain(self, rids: Collection[str]) -> None:
        """Forget all requests but these: the others have started, or are gone."""
        self._settled.intersection_update(rids)
        self._need_whole_pages.intersection_update(rids)
        self._remote.retain(rids)

    def wait_for_news(self, timeout_s: float) -> None:
        self._remote.wait_for_news(timeout_s)

"""Prefix hits of waiting requests as SGLang sees them, equal on all ranks of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from sglang_kvspec.kv.prefix_store import PageLink
from sglang_kvspec.runtime.common_prefixes import CommonPrefixes


class PrefixLookup(NamedTuple):
    """Prefix lookup of one prompt. num_resident: pages in the KV cache. all_links: links of all
    pages that the KV cache or a tier may hold."""

    num_resident: int
    all_links: list[PageLink]

    @property
    def links(self) -> list[PageLink]:
        """Return the links of the pages that the KV cache lacks and a tier may hold."""
        return self.all_links[self.num_resident :]


# Requests in one message between ranks. Each costs a lookup in the tree and in every tier, and
# SGLang may look at only a few requests of a long queue.
AT_ONCE = 16


class CommonHits:
    """Prefix hits that all ranks agree on, once a pass for each request.

    In each pass of its scheduler, SGLang looks waiting requests up, some of them several times. The
    first lookup of a request makes the ranks exchange one message, about this request and the next
    ones in the queue. All ranks reach that lookup together: the decisions before it are equal.
    """

    def __init__(
        self, common: CommonPrefixes, look_up: Callable[[Any, Sequence[PageLink]], PrefixLookup]
    ) -> None:
        """look_up: looks a request up in SGLang's tree, given its links from the last lookup."""
        self._common, self._look_up = common, look_up
        self._queue: Callable[[], Sequence[Any]] | None = None
        self._ends: dict[str, int] = {}
        # Links of waiting requests, kept from pass to pass: making links takes longer than lookups.
        self._links: dict[str, list[PageLink]] = {}

    @contextmanager
    def in_pass(self, queue: Callable[[], Sequence[Any]]) -> Iterator[None]:
        """Enclose a pass of the scheduler. queue: returns the requests that the scheduler may look
        up, in order."""
        self._queue = queue
        try:
            yield
        finally:
            waiting = {req.rid for req in queue()}
            self._links = {rid: links for rid, links in self._links.items() if rid in waiting}
            self._queue, self._ends = None, {}

    def end_of(self, req: Any) -> int:
        """Return the pages of a request's prefix that every rank has, in the KV cache or a tier.

        0 outside of a pass, where ranks need not make the same lookups.
        """
        if self._queue is None:
            return 0
        if req.rid not in self._ends:
            self._agree_on(self._next(req, self._queue()))
        return self._ends[req.rid]

    def _next(self, req: Any, queue: Sequence[Any]) -> list[Any]:
        """Return a request and the next ones behind it that ranks have not agreed on yet."""
        place = next((i for i, each in enumerate(queue) if each is req), len(queue))
        behind = (each for each in queue[place + 1 :] if each.rid not in self._ends)
        return [req, *islice(behind, AT_ONCE - 1)]

    def look_up(self, req: Any) -> PrefixLookup:
        """Look up a request of the queue."""
        found = self._look_up(req, self._links.get(req.rid, ()))
        self._links[req.rid] = found.all_links
        return found

    def _agree_on(self, reqs: Sequence[Any]) -> None:
        lookups = [self.look_up(req) for req in reqs]
        nums = self._common.num_loadable([each.links for each in lookups])
        for req, each, num in zip(reqs, lookups, nums, strict=True):
            self._ends[req.rid] = each.num_resident + num

"""What SGLang is told of waiting requests' prefixes, equal on all ranks of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from sglang_kvspec.kv.prefix_store import PageLink
from sglang_kvspec.runtime.agreed_prefixes import AgreedPrefixes


class Lacking(NamedTuple):
    """Of a request's prompt, num_resident pages are in the KV cache. all_links: of those that could
    be there, or below it."""

    num_resident: int
    all_links: list[PageLink]

    @property
    def links(self) -> list[PageLink]:
        """Of those that could be below."""
        return self.all_links[self.num_resident :]


# Requests that ranks agree on at a time: each is looked up in the tree and in every tier, and of a
# long queue SGLang may go on to a few only.
AT_ONCE = 16


class AgreedHits:
    """SGLang looks waiting requests up, and some of them again, in each pass of its scheduler. With
    several ranks all of them agree, once a pass for each request and for many requests in one
    message, when the first of these is looked up: they do so at the same place, since what leads
    there is equal on all of them."""

    def __init__(
        self, agreed: AgreedPrefixes, lacking: Callable[[Any, Sequence[PageLink]], Lacking]
    ) -> None:
        """lacking: looks a request up in SGLang's tree, given links that it once had, or none."""
        self._agreed, self._lacking = agreed, lacking
        self._queue: Callable[[], Sequence[Any]] | None = None
        self._ends: dict[str, int] = {}
        # Of requests that wait on; names of pages take longer to make than to look up.
        self._links: dict[str, list[PageLink]] = {}

    @contextmanager
    def in_pass(self, queue: Callable[[], Sequence[Any]]) -> Iterator[None]:
        """A pass of the scheduler. queue: requests that it may look up, in its order."""
        self._queue = queue
        try:
            yield
        finally:
            waiting = {req.rid for req in queue()}
            self._links = {rid: links for rid, links in self._links.items() if rid in waiting}
            self._queue, self._ends = None, {}

    def end_of(self, req: Any) -> int:
        """Where a request's prefix ends, in pages: in the KV cache or below it on every rank.

        0 outside of a pass: ranks need not look up alike there.
        """
        if self._queue is None:
            return 0
        if req.rid not in self._ends:
            self._agree_on(self._next(req, self._queue()))
        return self._ends[req.rid]

    def _next(self, req: Any, queue: Sequence[Any]) -> list[Any]:
        """A request and those behind it that are not agreed on."""
        place = next((i for i, each in enumerate(queue) if each is req), len(queue))
        behind = (each for each in queue[place + 1 :] if each.rid not in self._ends)
        return [req, *islice(behind, AT_ONCE - 1)]

    def lacking(self, req: Any) -> Lacking:
        """Of a request in the queue."""
        lacking = self._lacking(req, self._links.get(req.rid, ()))
        self._links[req.rid] = lacking.all_links
        return lacking

    def _agree_on(self, reqs: Sequence[Any]) -> None:
        lacking = [self.lacking(req) for req in reqs]
        nums = self._agreed.num_loadable([each.links for each in lacking])
        for req, each, num in zip(reqs, lacking, nums, strict=True):
            self._ends[req.rid] = each.num_resident + num

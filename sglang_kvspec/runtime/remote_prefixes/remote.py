"""Remote tier of the prefix cache, on a prefix server: looked up ahead, never waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.kv.prefix_store import PageLink
from sglang_kvspec.runtime.remote_prefixes.circuit_breaker import CircuitBreaker
from sglang_kvspec.runtime.remote_prefixes.counters import RemoteCounters
from sglang_kvspec.runtime.remote_prefixes.link import StoreLink, link_report
from sglang_kvspec.runtime.remote_prefixes.lookups import (
    LandedAnchor,
    LandedPage,
    Lookup,
    Lookups,
)
from sglang_kvspec.runtime.remote_prefixes.publisher import Publisher
from sglang_kvspec.transport.prefixes import (
    AnchorFetched,
    Chain,
    LookupEnded,
    PageFetched,
    PublishEnded,
    StoreEvent,
)
from sglang_kvspec.transport.prefixes.frames import MAX_SEEK_PAGES, MAX_SEEK_TOKENS, TOKEN_BYTES

logger = logging.getLogger(__name__)


class RemotePrefixes:
    """Remote tier of the prefix cache, owned by the scheduler's thread, which it never blocks. A
    request's pages are looked up when it is first seen in the queue. The request stays there until
    they have arrived or wait_s have passed, then loads them as from any tier. A circuit breaker
    stops lookups after a request has waited in vain. Without a link there are no lookups."""

    def __init__(
        self,
        link: StoreLink,
        *,
        page_bytes: int,
        wait_s: float,
        landing_bytes: int,
        queue_bytes: int,
        news: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """page_bytes: bytes of an anchor and a residual. landing_bytes: most bytes of pages looked
        up for requests that have not started. queue_bytes: most bytes of pages that wait to be
        published; 0 publishes nothing. news: set by the link whenever there are events to take."""
        self._link, self._wait_s, self._clock = link, wait_s, clock
        self._news = news or threading.Event()
        self._lookups = Lookups(max(1, landing_bytes // page_bytes))
        self._publisher = Publisher(max(queue_bytes, page_bytes)) if queue_bytes else None
        self._breaker = CircuitBreaker()
        self._is_stale = False
        self._failure: str | None = None
        self.counters = RemoteCounters()

    # Requests in the queue

    def has_asked(self, rid: str) -> bool:
        return rid in self._lookups

    @property
    def would_ask(self) -> bool:
        """Return True if pages of a new request would be looked up."""
        return self._is_usable and self._breaker.allows(self._clock())

    def ask(
        self,
        rid: str,
        links: Sequence[PageLink],
        others_ask: bool = True,
        *,
        anchors_first: bool = False,
    ) -> None:
        """Look up the pages that a new request is missing. others_ask: all other ranks would look
        them up; if not, only a lookup under way is joined. anchors_first: the request may start
        before its residuals are here."""
        if not links:
            self._lookups.skip(rid)
            return
        now_s = self._clock()
        until_s = now_s + self._wait_s
        if self._lookups.join(rid, links, until_s):
            return
        lookup = None
        if others_ask and self.would_ask:
            room = min(MAX_SEEK_PAGES, MAX_SEEK_TOKENS * TOKEN_BYTES // len(links[0].tokens))
            lookup = self._lookups.begin(rid, links[:room], until_s)
        if lookup is None:
            self.counters.unasked += 1
            self._lookups.skip(rid)
            return
        self.counters.lookups += 1
        keys = [link.key for link in lookup.links]
        seek = partial(self._link.seek, anchors_first=anchors_first)
        self._tell(seek, lookup.number, _chain(lookup.links), keys)

    def is_awaited(self, rid: str) -> bool:
        """Return True if a request should wait longer for pages."""
        self.pump()
        return self._lookups.is_awaited(rid, self._clock())

    def is_anchored(self, rid: str, besides: Collection[str] = ()) -> bool:
        """Return True if an awaited request could draft on what has arrived. That needs all anchors
        of its lookup, which no request in `besides` may share."""
        return not self._is_stale and self._lookups.is_anchored(rid, besides)

    def retain(self, rids: Collection[str]) -> None:
        """Forget all requests but these: the others have started, or are gone."""
        now_s = self._clock()
        for rid in self._lookups.rids:
            dropped = None if rid in rids else self._lookups.forget(rid, now_s)
            if dropped is None:
                continue
            self.counters.expired += dropped.is_late
            if dropped.is_late and not dropped.lookup.landed:
                self._breaker.record_failure(now_s)
            if self._failure is None:
                self._tell(self._link.cancel, dropped.lookup.number)

    def wait_for_news(self, timeout_s: float) -> None:
        """Block an idle caller until something has arrived since the last call, or timeout_s have
        passed."""
        self._news.wait(timeout_s)
        self._news.clear()

    # Methods of a RemoteTier

    def num_landed(self, links: Sequence[PageLink]) -> int:
        self.pump()
        return next((i for i, link in enumerate(links) if not self.find(link)), len(links))

    def read(self, link: PageLink, anchor: memoryview, residual: memoryview) -> bool:
        page = self.find(link)
        if page is None:
            return False
        anchor[:], residual[:] = page.anchor, page.residual
        return True

    def anchor_of(self, link: PageLink) -> bytearray | None:
        """Return the anchor of a page whose residual may not have arrived; None if it is not
        here."""
        return None if self._is_stale else self._lookups.find_anchor(link)

    def first_to_publish(self, links: Sequence[PageLink]) -> int:
        self.pump()
        if self._publisher is None or not self._is_usable:
            return len(links)
        return self._publisher.num_known(links)

    def put(self, link: PageLink, anchor: memoryview, residual: memoryview) -> bool:
        if self._publisher is None or not self._is_usable:
            return False
        if self._publisher.is_known(link):
            return True
        upload = self._publisher.begin(link, len(anchor) + len(residual))
        if upload is None:
            self.counters.pages_dropped += 1
            return False
        content = memoryview(b"".join((anchor, residual)))
        self._tell(self._link.publish, upload, _chain([link]), content)
        return True

    def find(self, link: PageLink) -> LandedPage | None:
        """Return a page of which both parts have arrived; None if it is not here."""
        return None if self._is_stale else self._lookups.find(link)

    # The link

    @property
    def _is_usable(self) -> bool:
        if self._is_stale or self._failure is not None:
            return False
        try:
            return self._link.is_live
        except TransportError as error:
            self._fail(error)
            return False

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except TransportError as error:
            self._fail(error)

    def pump(self) -> None:
        """Process the events of the link."""
        if self._failure is not None:
            return
        try:
            events = self._link.take_events()
        except TransportError as error:
            self._fail(error)
            return
        for event in events:
            self._note(event)

    def _note(self, event: StoreEvent) -> None:
        if isinstance(event, PublishEnded):
            assert self._publisher is not None
            self._publisher.end(event.upload, event.is_kept)
            self.counters.pages_published += event.is_kept
            self.counters.pages_unkept += not event.is_kept
            return
        lookup = self._lookups.of(event.lookup)
        if lookup is None:
            return
        if isinstance(event, AnchorFetched):
            link = lookup.links[event.page]
            lookup.anchors[link.key] = LandedAnchor(link, event.anchor)
        elif isinstance(event, PageFetched):
            link = lookup.links[event.page]
            lookup.landed[link.key] = LandedPage(link, event.anchor, event.residual)
            self.counters.pages_fetched += 1
            self._breaker.record_success()
        elif isinstance(event, LookupEnded):
            lookup.is_over = True
            self.counters.hits += event.num_found > 0
            self.counters.pages_found += event.num_found
            self._learn(lookup, event)

    def _learn(self, lookup: Lookup, ended: LookupEnded) -> None:
        if self._publisher is None:
            return
        if ended.reason is not None:
            self._publisher.learn(lookup.landed)
            return
        keys = [link.key for link in lookup.links]
        self._publisher.learn(keys[: ended.num_found])
        self._publisher.unlearn(keys[ended.num_found :])

    def _fail(self, error: TransportError) -> None:
        """Give up the link, whose thread has ended. The server continues without it."""
        logger.error(
            "KVSpec: %s; until a restart, prompts are computed without the prefix server", error
        )
        self._failure = str(error)
        for rid in self._lookups.rids:
            self._lookups.forget(rid, self._clock())
            self._lookups.skip(rid)

    # Control plane

    def weights_will_change(self) -> None:
        """Stop using the store, whose pages belong to the old weights. Pages that wait to be
        published belong to them too, and are published as such."""
        self._is_stale = True

    def close(self) -> None:
        if self._failure is None:
            self._failure = "closed"
            self._link.close()

    def report(self) -> dict[str, Any]:
        """Return state and counters, for /server_info."""
        self.pump()
        report: dict[str, Any] = {
            "is_live": self._is_usable,
            "is_stale": self._is_stale,
            "failure": self._failure,
            "landed_pages": self._lookups.num_landed,
            "waiting_bytes": 0 if self._publisher is None else self._publisher.waiting_bytes,
            "counters": asdict(self.counters),
        }
        try:
            return report | link_report(self._link)
        except TransportError:
            return report


def _chain(links: Sequence[PageLink]) -> Chain:
    first = links[0]
    return Chain(first.parent, first.position, b"".join(link.tokens for link in links))

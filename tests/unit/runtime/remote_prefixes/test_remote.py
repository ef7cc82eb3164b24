"""A tier on another machine: requests wait for it for a bounded time, and no other part waits."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.kv.prefix_store import PageLink, chain_links
from sglang_kvspec.runtime.remote_prefixes import RemotePrefixes
from sglang_kvspec.runtime.remote_prefixes.circuit_breaker import FIRST_PAUSE_S
from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.prefixes import (
    AnchorFetched,
    LookupEnded,
    PageFetched,
    PublishEnded,
    StoreEvent,
)

SIZE = 4
PAGE_BYTES = 10
WAIT_S = 1.0
# Longer than a test may take.
NEVER_S = 3600.0


def links_of(*pages: int) -> list[PageLink]:
    return list(chain_links([page for page in pages for _ in range(SIZE)], SIZE))


def anchor_of(link: PageLink) -> bytes:
    return link.key[:4]


def residual_of(link: PageLink) -> bytes:
    return link.key[-6:]


@dataclass
class Link:
    """Link to a prefix server, with its calls and the events that it will report."""

    is_live: bool = True
    denial: str | None = None
    published_bytes: int = 0
    calls: list[tuple[object, ...]] = field(default_factory=list)
    events: list[StoreEvent] = field(default_factory=list)
    is_broken: bool = False
    # Lookups whose anchors come first.
    anchors_first: list[object] = field(default_factory=list)

    def seek(self, lookup: int, *args: object, anchors_first: bool = False) -> None:
        self._call("seek", lookup, *args)
        if anchors_first:
            self.anchors_first.append(lookup)

    def cancel(self, *args: object) -> None:
        self._call("cancel", *args)

    def publish(self, *args: object) -> None:
        self._call("publish", *args)

    def take_events(self, timeout_s: float = 0.0) -> list[StoreEvent]:
        self._check()
        events, self.events = self.events, []
        return events

    def counters(self) -> LinkCounters:
        self._check()
        return LinkCounters()

    def close(self) -> None:
        self.calls.append(("close",))

    def lands(self, lookup: int, links: list[PageLink], pages: range) -> None:
        self.events += [
            PageFetched(lookup, i, bytearray(anchor_of(links[i])), bytearray(residual_of(links[i])))
            for i in pages
        ]

    def anchors_land(self, lookup: int, links: list[PageLink], pages: range) -> None:
        self.events += [AnchorFetched(lookup, i, bytearray(anchor_of(links[i]))) for i in pages]

    def names(self) -> list[object]:
        return [name for name, *_ in self.calls]

    def _call(self, *call: object) -> None:
        self._check()
        self.calls.append(call)

    def _check(self) -> None:
        if self.is_broken:
            raise TransportError("the link's loop has failed")


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def time() -> SimpleNamespace:
    return SimpleNamespace(now_s=50.0)


@pytest.fixture
def news() -> threading.Event:
    return threading.Event()


@pytest.fixture
def remote(link: Link, time: SimpleNamespace, news: threading.Event) -> RemotePrefixes:
    return RemotePrefixes(
        link,
        page_bytes=PAGE_BYTES,
        wait_s=WAIT_S,
        landing_bytes=8 * PAGE_BYTES,
        queue_bytes=3 * PAGE_BYTES,
        news=news,
        clock=lambda: time.now_s,
    )


def reads(remote: RemotePrefixes, link: PageLink) -> bool:
    anchor, residual = memoryview(bytearray(4)), memoryview(bytearray(6))
    found = remote.read(link, anchor, residual)
    if found:
        assert anchor == anchor_of(link)
        assert residual == residual_of(link)
    return found


def put(remote: RemotePrefixes, link: PageLink) -> bool:
    return remote.put(link, memoryview(anchor_of(link)), memoryview(residual_of(link)))


def test_a_request_waits_until_its_pages_are_here(remote: RemotePrefixes, link: Link) -> None:
    links = links_of(1, 2, 3)
    remote.ask("r", links)
    assert remote.has_asked("r")
    ((name, number, chain, keys),) = link.calls
    assert (name, keys) == ("seek", [each.key for each in links])
    assert chain == (links[0].parent, 0, b"".join(each.tokens for each in links))
    assert remote.is_awaited("r")
    link.lands(number, links, range(2))
    assert remote.is_awaited("r")
    assert remote.num_landed(links) == 2
    link.events.append(LookupEnded(number, 2, None))
    assert not remote.is_awaited("r")
    assert [reads(remote, each) for each in links] == [True, True, False]
    # A page with the same key but other tokens is another page.
    assert not reads(remote, links[0]._replace(tokens=b"x" * 32))
    remote.retain(set())
    assert not remote.has_asked("r")
    assert remote.num_landed(links) == 0
    assert link.names() == ["seek"]
    assert (
        remote.report()["counters"] | {"hits": 1, "pages_fetched": 2, "expired": 0}
        == (remote.report()["counters"])
    )


def test_requests_wait_no_longer_than_the_limit_and_then_not_at_all_for_a_while(
    remote: RemotePrefixes, link: Link, time: SimpleNamespace
) -> None:
    links = links_of(1, 2)
    remote.ask("r", links)
    time.now_s += WAIT_S - 0.01
    assert remote.is_awaited("r")
    time.now_s += 0.01
    assert not remote.is_awaited("r")
    remote.retain(set())
    assert link.names() == ["seek", "cancel"]
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S):
        time.now_s += pause_s - 0.01
        remote.ask("s", links)
        assert not remote.is_awaited("s")
        remote.retain(set())
        time.now_s += 0.01
        remote.ask("t", links)
        assert remote.is_awaited("t")
        time.now_s += WAIT_S
        remote.retain(set())
    assert remote.counters.expired == 3
    # One page that arrives in time closes the circuit breaker.
    time.now_s += 8 * FIRST_PAUSE_S
    remote.ask("u", links)
    _, number, *_ = link.calls[-1]
    link.lands(number, links, range(1))
    assert remote.is_awaited("u")
    time.now_s += WAIT_S
    remote.retain(set())
    remote.ask("v", links)
    assert remote.is_awaited("v")


def test_an_aborted_request_says_nothing_about_the_store(
    remote: RemotePrefixes, link: Link
) -> None:
    remote.ask("r", links_of(1))
    remote.retain(set())
    assert link.names() == ["seek", "cancel"]
    assert remote.counters.expired == 0
    remote.ask("s", links_of(1))
    assert remote.is_awaited("s")


def test_no_request_waits_without_a_link(remote: RemotePrefixes, link: Link) -> None:
    link.is_live = False
    remote.ask("r", links_of(1))
    assert not remote.is_awaited("r")
    assert remote.has_asked("r")
    assert not put(remote, links_of(1)[0])
    # Without a link pages are not even copied.
    assert remote.first_to_publish(links_of(1, 2)) == 2
    assert not link.calls
    assert remote.counters.unasked == 1


def test_requests_of_one_prefix_share_a_lookup(
    remote: RemotePrefixes, link: Link, time: SimpleNamespace
) -> None:
    remote.ask("a", links_of(1, 2, 3))
    remote.ask("b", links_of(1, 2, 4))
    remote.ask("c", links_of(2))
    assert link.names() == ["seek", "seek"]
    assert all(map(remote.is_awaited, "abc"))
    link.lands(1, links_of(1, 2, 3), range(3))
    link.events.append(LookupEnded(1, 3, None))
    assert [remote.is_awaited(rid) for rid in "abc"] == [False, False, True]
    remote.retain({"b"})
    assert remote.num_landed(links_of(1, 2, 4)) == 2
    remote.retain(set())
    assert remote.num_landed(links_of(1, 2, 4)) == 0


def test_all_anchors_of_a_prompt_are_here_before_its_residuals(
    remote: RemotePrefixes, link: Link
) -> None:
    links = links_of(1, 2, 3)
    remote.ask("r", links, anchors_first=True)
    remote.ask("s", links)
    remote.ask("t", links_of(4))
    assert link.anchors_first == [1]
    link.anchors_land(1, links, range(2))
    assert remote.is_awaited("r")
    assert not remote.is_anchored("r")
    link.anchors_land(1, links, range(2, 3))
    assert remote.is_awaited("r")
    assert [remote.is_anchored(rid) for rid in "rstu"] == [True, True, False, False]
    # A request that shares the lookup has started.
    assert not remote.is_anchored("s", besides={"r"})
    assert remote.is_anchored("s", besides={"t"})
    assert [remote.anchor_of(each) for each in links] == [anchor_of(each) for each in links]
    assert remote.anchor_of(links_of(4)[0]) is None
    assert remote.anchor_of(links[0]._replace(tokens=b"x" * 32)) is None
    assert remote.num_landed(links) == 0
    link.lands(1, links, range(1))
    assert remote.is_awaited("r")
    assert remote.find(links[0]) is not None
    assert remote.find(links[1]) is None
    link.events.append(LookupEnded(1, 3, "a page was evicted"))
    assert not remote.is_awaited("r")
    assert not remote.is_anchored("r")


def test_anchors_of_other_weights_are_not_used(remote: RemotePrefixes, link: Link) -> None:
    links = links_of(1)
    remote.ask("r", links, anchors_first=True)
    link.anchors_land(1, links, range(1))
    assert remote.is_awaited("r")
    assert remote.is_anchored("r")
    remote.weights_will_change()
    assert not remote.is_anchored("r")
    assert remote.anchor_of(links[0]) is None


def test_what_may_land_is_bounded(remote: RemotePrefixes, link: Link) -> None:
    remote.ask("a", links_of(*range(5)))
    remote.ask("b", links_of(*range(10, 15)))
    remote.ask("c", links_of(20))
    assert [len(call[3]) for call in link.calls] == [5, 3]
    assert not remote.is_awaited("c")
    remote.retain({"b"})
    remote.ask("d", links_of(*range(30, 40)))
    assert len(link.calls[-1][3]) == 5


def test_pages_are_published_once_and_never_more_than_may_wait(
    remote: RemotePrefixes, link: Link
) -> None:
    links = links_of(1, 2, 3, 4)
    assert [put(remote, each) for each in links] == [True, True, True, False]
    assert put(remote, links[0])
    assert link.names() == ["publish"] * 3
    assert remote.first_to_publish(links) == 3
    assert bytes(link.calls[1][3]) == anchor_of(links[1]) + residual_of(links[1])
    link.events += [PublishEnded(1, True), PublishEnded(2, False)]
    assert remote.first_to_publish(links) == 1
    assert put(remote, links[1])
    assert remote.report()["waiting_bytes"] == 2 * PAGE_BYTES
    counters = remote.counters
    assert (counters.pages_published, counters.pages_unkept, counters.pages_dropped) == (1, 1, 1)


def test_pages_that_a_lookup_missed_are_published_and_found_ones_are_not(
    remote: RemotePrefixes, link: Link
) -> None:
    links = links_of(1, 2, 3)
    assert put(remote, links[2])
    link.events.append(PublishEnded(1, True))
    remote.ask("r", links)
    # The store has evicted the last page since.
    link.events.append(LookupEnded(1, 2, None))
    assert remote.first_to_publish(links) == 2
    # An incomplete answer says nothing about the pages that it does not name.
    remote.ask("s", links)
    link.events.append(LookupEnded(2, 0, "the prefix server does not answer"))
    assert remote.first_to_publish(links) == 2


def test_other_weights_do_not_use_the_store(remote: RemotePrefixes, link: Link) -> None:
    links = links_of(1)
    remote.ask("r", links)
    link.lands(1, links, range(1))
    assert remote.num_landed(links) == 1
    remote.weights_will_change()
    assert remote.num_landed(links) == 0
    assert not reads(remote, links[0])
    assert not put(remote, links[0])
    remote.ask("s", links_of(2))
    assert not remote.is_awaited("s")


@pytest.mark.parametrize("call", ["ask", "pump", "put", "report", "retain"])
def test_a_link_that_fails_costs_nothing_but_hits(
    remote: RemotePrefixes, link: Link, call: str
) -> None:
    links = links_of(1)
    remote.ask("r", links)
    link.lands(1, links, range(1))
    remote.pump()
    link.is_broken = True
    {
        "ask": lambda: remote.ask("s", links_of(2)),
        "pump": remote.pump,
        "put": lambda: put(remote, links_of(3)[0]),
        "report": remote.report,
        "retain": lambda: remote.retain(set()),
    }[call]()
    assert not remote.is_awaited("r")
    assert not remote.is_awaited("s")
    assert not put(remote, links[0])
    assert "failed" in remote.report()["failure"]


def test_news_end_one_wait(remote: RemotePrefixes, news: threading.Event) -> None:
    """A wait that news do not end runs into the time limit of the test."""
    news.set()
    remote.wait_for_news(NEVER_S)
    assert not news.is_set()

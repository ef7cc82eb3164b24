"""Requests that start on anchors: residuals land with the anchors they belong to, or the request
starts again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvspec_testkit.runtime.rank_exchange import BOTH, ExchangingRanks, RankExchange
from sglang_kvspec.kv.page_records import copy_out
from sglang_kvspec.kv.prefix_store import chain_links, page_rows
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.runtime.remote_prefixes import EarlyStarts
from sglang_kvspec.runtime.remote_prefixes.counters import RemoteCounters
from sglang_kvspec.runtime.remote_prefixes.lookups import LandedPage

SIZE = 32
PAGES = [4, 2, 5]


class Remote:
    """Remote tier with records of pages. num_anchors and num_whole: how many of the first pages
    have arrived."""

    def __init__(self, links, records):
        self.links = links
        self.rows = list(zip(page_rows(records.anchors), page_rows(records.residuals), strict=True))
        self.num_anchors = self.num_whole = 0
        # Anchors of pages that the store has replaced since their first anchors arrived.
        self.replaced = {}
        self.waited_for = {"r", "s"}
        self.counters = RemoteCounters()

    def is_awaited(self, rid):
        return rid in self.waited_for

    def anchor_of(self, link):
        place = self.links.index(link)
        return bytearray(self.rows[place][0]) if place < self.num_anchors else None

    def find(self, link):
        place = self.links.index(link)
        if place >= self.num_whole:
            return None
        anchor, residual = map(bytearray, self.rows[place])
        return LandedPage(link, self.replaced.get(place, anchor), residual)


@pytest.fixture
def links():
    return list(chain_links(range(3 * SIZE), SIZE))


@pytest.fixture
def computed(encoded):
    """KV cache of the server that published pages 1 to 3 of the prompt."""
    return encoded(3)


@pytest.fixture
def remote(links, computed):
    return Remote(links, copy_out(computed, [1, 2, 3]))


@pytest.fixture(params=[{}, {"store": False}, {"cache_pages": 1}])
def kv(request, make_kv):
    return make_kv(num_pages=8, **request.param)


@pytest.fixture
def loaded():
    """Counts of loaded anchors and residuals."""
    return [0, 0]


@pytest.fixture
def early(kv, remote, loaded):
    def count(num_anchors, num_residuals):
        loaded[0] += num_anchors
        loaded[1] += num_residuals

    return EarlyStarts(kv, remote, count)


def states(kv):
    return [kv.residuals.table.state(page) for page in PAGES]


def reads_as_computed(kv, computed, read):
    here, there = (
        torch.stack(getattr(each, read)(0, torch.tensor(pages)))
        for each, pages in ((kv, PAGES), (computed, [1, 2, 3]))
    )
    return torch.equal(here, there)


def test_drafts_read_anchors_and_verifications_residuals(
    early, remote, kv, computed, links, loaded
):
    remote.num_anchors = 2
    assert early.may_begin(links[:2])
    assert not early.may_begin(links)
    remote.num_anchors = 3
    early.begin("r", links, PAGES)
    assert early.rids == ["r"]
    assert reads_as_computed(kv, computed, "read_draft")
    assert states(kv) == [ResidualState.IN_FLIGHT] * 3
    with pytest.raises(AssertionError, match="without a residual"):
        kv.read_target(0, torch.tensor(PAGES))
    for remote.num_whole in (0, 2, 3):
        assert early.has_pending_residuals("r")
        is_complete = remote.num_whole == 3
        assert early.land() == (["r"] * is_complete, [])
        # The request cannot verify before all residuals have landed.
        pending = [state is ResidualState.IN_FLIGHT for state in states(kv)]
        assert pending == [not is_complete] * 3
        assert loaded == [3, remote.num_whole]
        kv.check_integrity()
    assert not early.has_pending_residuals("r")
    assert early.land() == ([], [])
    assert early.rids == []
    assert reads_as_computed(kv, computed, "read_target")
    assert remote.counters.early == 1


def test_a_request_that_waits_in_vain_is_named_until_its_pages_are_freed(early, remote, kv, links):
    remote.num_anchors = 3
    early.begin("r", links, PAGES)
    remote.waited_for.clear()
    remote.num_whole = 2
    assert early.land() == ([], ["r"])
    assert early.land() == ([], ["r"])
    early.release([7])
    assert early.rids == ["r"]
    early.release(PAGES)
    kv.free_pages(PAGES)
    assert early.land() == ([], [])
    assert early.rids == []
    kv.check_integrity()
    # Another request may use the same pages at once.
    remote.waited_for = {"s"}
    early.begin("s", links, PAGES)
    remote.num_whole = 3
    assert early.land() == (["s"], [])


def test_residuals_that_arrive_as_the_wait_ends_are_not_lost(early, remote, links):
    remote.num_anchors = remote.num_whole = 3
    early.begin("r", links, PAGES)
    remote.waited_for.clear()
    assert early.land() == (["r"], [])


def test_a_residual_of_another_anchor_is_not_taken(kv, early, remote, links):
    """The store has replaced the page, and another lookup has fetched the new one."""
    remote.num_anchors = 3
    early.begin("r", links, PAGES)
    remote.num_whole = 3
    remote.replaced[1] = bytearray(len(remote.rows[1][0]))
    assert early.land() == ([], [])
    assert early.has_pending_residuals("r")
    assert states(kv)[1] is ResidualState.IN_FLIGHT
    remote.waited_for.discard("r")
    assert early.land() == ([], ["r"])
    # The right residual arrives in the end.
    remote.replaced.clear()
    assert early.land() == (["r"], [])


@pytest.fixture
def both_ranks(make_kv, links, computed):
    """Two ranks with a remote tier and a KV cache each."""
    exchange = RankExchange()
    records = copy_out(computed, [1, 2, 3])
    remotes = [Remote(links, records) for _ in BOTH]
    kvs = [make_kv(num_pages=8) for _ in BOTH]
    starts = [
        EarlyStarts(kvs[rank], remotes[rank], lambda *_: None, ExchangingRanks(rank, exchange))
        for rank in BOTH
    ]
    yield SimpleNamespace(rank_exchange=exchange, remotes=remotes, kvs=kvs, starts=starts)
    exchange.close()


def on_both(ranks, call):
    """Return the result of a call, and check that it is the same on both ranks."""
    given = [None, None]

    def act(rank):
        given[rank] = call(ranks.starts[rank])

    ranks.rank_exchange.act(act)
    assert given[0] == given[1]
    return given[0]


def test_ranks_start_and_verify_together(both_ranks, links):
    first, second = both_ranks.remotes
    first.num_anchors, second.num_anchors = 3, 2
    assert not on_both(both_ranks, lambda early: early.may_begin(links))
    second.num_anchors = 3
    assert on_both(both_ranks, lambda early: early.may_begin(links))
    on_both(both_ranks, lambda early: early.begin("r", links, PAGES))
    for first.num_whole, second.num_whole in ((3, 0), (3, 2)):
        assert on_both(both_ranks, EarlyStarts.land) == ([], [])
        for kv in both_ranks.kvs:
            assert states(kv) == [ResidualState.IN_FLIGHT] * 3
    # A rank that has all its residuals waits as long as the other rank may still receive some.
    first.waited_for.clear()
    assert on_both(both_ranks, EarlyStarts.land) == ([], [])
    second.num_whole = 3
    assert on_both(both_ranks, EarlyStarts.land) == (["r"], [])
    assert not on_both(both_ranks, lambda early: early.has_pending_residuals("r"))


def test_residuals_that_one_rank_lacks_are_lost_to_both(both_ranks, links):
    first, second = both_ranks.remotes
    first.num_anchors = second.num_anchors = 3
    on_both(both_ranks, lambda early: early.begin("r", links, PAGES))
    first.num_whole = 3
    second.waited_for.clear()
    assert on_both(both_ranks, EarlyStarts.land) == ([], ["r"])
    on_both(both_ranks, lambda early: early.release(PAGES))
    assert on_both(both_ranks, EarlyStarts.land) == ([], [])


def test_ranks_send_no_message_where_no_request_has_started(both_ranks):
    on_both(both_ranks, EarlyStarts.land)
    on_both(both_ranks, lambda early: early.may_begin([]))
    assert both_ranks.rank_exchange.num_messages == 0

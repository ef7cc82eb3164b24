"""SGLang's queue hides requests that wait for their prefix, and loses none of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvspec.adapters import prefix_queue
from sglang_kvspec.adapters.common_hits import PrefixLookup
from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache


class Waiting:
    """Stand-in for WaitingRequests."""

    def __init__(self):
        self.asked, self.still, self.retained, self.waits = [], set(), None, 0

    def has_asked(self, rid):
        return rid in self.asked

    def ask(self, wanted, anchors_first):
        assert not anchors_first
        assert all(links == f"links of {rid}" for rid, links in wanted.items())
        self.asked += wanted

    def awaited(self, rids):
        assert set(rids) <= set(self.asked)
        return self.still & set(rids)

    def retain(self, rids):
        self.retained = set(rids)

    def wait_for_news(self, timeout_s):
        self.waits += 1


@pytest.fixture
def waiting():
    return Waiting()


@pytest.fixture
def scheduler(waiting):
    cache = object.__new__(KVSpecRadixCache)
    cache.waiting, cache._common_hits = waiting, None
    cache.look_up = lambda req: PrefixLookup(0, f"links of {req.rid}")
    queue = [SimpleNamespace(rid=rid) for rid in "abcd"]
    return SimpleNamespace(tree_cache=cache, waiting_queue=queue)


def rids(reqs):
    return [req.rid for req in reqs]


def test_waiting_requests_are_hidden_and_keep_their_places(scheduler, waiting):
    waiting.still = {"a", "c"}
    seen = []

    def take_first(scheduler, running_batch, *, limit):
        seen.append(rids(scheduler.waiting_queue))
        scheduler.waiting_queue = scheduler.waiting_queue[1:]
        scheduler.waiting_queue.append(SimpleNamespace(rid="new"))
        return (running_batch, limit)

    result = prefix_queue.new_batch(take_first, scheduler, ("running",), {"limit": 3})
    assert result == ("running", 3)
    assert seen == [["b", "d"]]
    assert rids(scheduler.waiting_queue) == ["a", "c", "d", "new"]
    assert waiting.retained == {"a", "c", "d", "new"}
    assert waiting.asked == list("abcd")
    waiting.still = set()
    prefix_queue.new_batch(take_first, scheduler, ("running",), {"limit": 3})
    # Each request is asked for once.
    assert waiting.asked == [*"abcd", "new"]
    assert seen[1] == ["a", "c", "d", "new"]


def test_a_queue_that_fails_is_whole_again(scheduler, waiting):
    waiting.still = {"b"}

    def fail(scheduler):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        prefix_queue.new_batch(fail, scheduler, (), {})
    assert rids(scheduler.waiting_queue) == list("abcd")


@pytest.mark.parametrize("cache", ["other", "without"])
def test_without_a_prefix_server_sglang_is_left_alone(scheduler, waiting, cache):
    if cache == "other":
        scheduler.tree_cache = object()
    else:
        scheduler.tree_cache.waiting = None
    queue = scheduler.waiting_queue
    assert prefix_queue.new_batch(lambda s: s.waiting_queue, scheduler, (), {}) is queue
    prefix_queue.wait_when_idle(scheduler)
    assert waiting.waits == 0


def test_an_idle_server_waits_for_the_link_only_if_a_request_waits(scheduler, waiting):
    prefix_queue.wait_when_idle(scheduler)
    assert waiting.waits == 1
    scheduler.waiting_queue = []
    prefix_queue.wait_when_idle(scheduler)
    assert waiting.waits == 1

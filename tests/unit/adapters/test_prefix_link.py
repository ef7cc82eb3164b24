"""SGLang's queue does not see requests that wait for their prefix, and loses none of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvspec.adapters import prefix_link
from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache


class Remote:
    def __init__(self):
        self.asked, self.awaited, self.retained, self.waits = [], set(), None, 0

    def has_asked(self, rid):
        return rid in self.asked

    def is_awaited(self, rid):
        return rid in self.awaited

    def retain(self, rids):
        self.retained = set(rids)

    def wait_for_news(self, timeout_s):
        self.waits += 1


@pytest.fixture
def remote():
    return Remote()


@pytest.fixture
def scheduler(remote):
    cache = object.__new__(KVSpecRadixCache)
    cache.remote = remote
    cache.ask_remote = lambda req: remote.asked.append(req.rid)
    queue = [SimpleNamespace(rid=rid) for rid in "abcd"]
    return SimpleNamespace(tree_cache=cache, waiting_queue=queue)


def rids(reqs):
    return [req.rid for req in reqs]


def test_who_waits_is_held_back_in_its_place(scheduler, remote):
    remote.awaited = {"a", "c"}
    seen = []

    def take_first(scheduler, running_batch, *, limit):
        seen.append(rids(scheduler.waiting_queue))
        scheduler.waiting_queue = scheduler.waiting_queue[1:]
        scheduler.waiting_queue.append(SimpleNamespace(rid="new"))
        return (running_batch, limit)

    result = prefix_link.new_batch(take_first, scheduler, ("running",), {"limit": 3})
    assert result == ("running", 3)
    assert seen == [["b", "d"]]
    assert rids(scheduler.waiting_queue) == ["a", "c", "d", "new"]
    assert remote.retained == {"a", "c", "d", "new"}
    assert remote.asked == list("abcd")
    remote.awaited = set()
    prefix_link.new_batch(take_first, scheduler, ("running",), {"limit": 3})
    # Each is asked for once.
    assert remote.asked == [*"abcd", "new"]
    assert seen[1] == ["a", "c", "d", "new"]


def test_a_queue_that_fails_is_whole_again(scheduler, remote):
    remote.awaited = {"b"}

    def fail(scheduler):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        prefix_link.new_batch(fail, scheduler, (), {})
    assert rids(scheduler.waiting_queue) == list("abcd")


@pytest.mark.parametrize("cache", ["other", "without"])
def test_without_a_prefix_server_sglang_is_left_alone(scheduler, remote, cache):
    if cache == "other":
        scheduler.tree_cache = object()
    else:
        scheduler.tree_cache.remote = None
    queue = scheduler.waiting_queue
    assert prefix_link.new_batch(lambda s: s.waiting_queue, scheduler, (), {}) is queue
    prefix_link.wait_when_idle(scheduler)
    assert remote.waits == 0


def test_an_idle_server_waits_for_the_link_only_where_somebody_waits(scheduler, remote):
    prefix_link.wait_when_idle(scheduler)
    assert remote.waits == 1
    scheduler.waiting_queue = []
    prefix_link.wait_when_idle(scheduler)
    assert remote.waits == 1

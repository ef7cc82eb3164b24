"""Requests that start on anchors, and requests that must start again, in SGLang's queue and running
batch."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from sglang_kvspec.adapters import prefix_queue
from sglang_kvspec.adapters.common_hits import PrefixLookup
from sglang_kvspec.adapters.early_start import may_start_early
from sglang_kvspec.adapters.prefix_cache import KVSpecRadixCache


class Waiting:
    """Stand-in for WaitingRequests, in which all requests wait and have been asked for."""

    def __init__(self):
        self.still, self.with_anchors = set("abcd"), set()
        self.asked_first, self.retained = [], None
        self.need_whole_pages = set()

    def has_asked(self, rid):
        return False

    def ask(self, wanted, anchors_first):
        self.asked_first += anchors_first

    def awaited(self, rids):
        return self.still & set(rids)

    def anchored(self, rids, besides):
        return set(rids) & self.with_anchors - besides - self.need_whole_pages

    def await_whole_pages(self, rid):
        self.need_whole_pages.add(rid)

    def retain(self, rids):
        self.retained = set(rids)


class Early:
    """Stand-in for EarlyStarts."""

    def __init__(self):
        self.rids, self.lost, self.complete, self.num_returned = [], [], [], 0

    def land(self):
        return self.complete, self.lost

    def note_returned(self):
        self.num_returned += 1


class Cache(KVSpecRadixCache):
    def __init__(self):
        self.waiting, self._common_hits, self.early = Waiting(), None, Early()
        self.lacks_anchors, self.calls, self.was_loaded = set(), [], False

    def look_up(self, req):
        return PrefixLookup(0, [req.rid])

    def could_start(self, links):
        return not self.lacks_anchors & set(links)

    def detach(self, req):
        self.calls.append(("apart", req.rid, self._starting))

    def cancel_start(self):
        self.calls.append(("cancel", self._starting))
        return self.was_loaded

    def adopt(self, req):
        self.calls.append(("adopt", req.rid))


class Batch:
    """Stand-in for SGLang's running batch."""

    def __init__(self, reqs):
        self.reqs, self.released, self.batch_is_full = reqs, [], False

    def release_req(self, place, num_left, server_args):
        self.released.append((self.reqs[place].rid, num_left))

    def filter_batch(self, keep_indices):
        self.reqs = [self.reqs[i] for i in keep_indices]


def request(rid, **changes):
    req = SimpleNamespace(
        rid=rid,
        output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=9),
        grammar=None,
        return_logprob=False,
        to_finish=None,
        finished=lambda: False,
        time_stats=Mock(),
    )
    vars(req).update(changes)
    return req


@pytest.fixture
def cache():
    return Cache()


@pytest.fixture
def scheduler(cache):
    queue = [request(rid) for rid in "abcd"]
    made = SimpleNamespace(
        tree_cache=cache, waiting_queue=queue, chunked_req=None, server_args="args"
    )
    made._add_request_to_queue = lambda req, is_retracted: made.waiting_queue.append(req)
    return made


def rids(reqs):
    return [req.rid for req in reqs]


class Original:
    """Stand-in for Scheduler.get_new_batch_prefill, which starts all requests in the queue, or
    none."""

    def __init__(self, *, starts=True):
        self.starts, self.seen = starts, []

    def __call__(self, scheduler, running):
        queue = scheduler.waiting_queue
        self.seen.append((rids(queue), scheduler.tree_cache._starting))
        if not (queue and self.starts):
            return SimpleNamespace(batch_to_run=None)
        scheduler.waiting_queue = []
        return SimpleNamespace(batch_to_run=SimpleNamespace(reqs=queue))


def a_pass(scheduler, original=None, running=(), *, is_full=False):
    original, batch = original or Original(), Batch(list(running))
    batch.batch_is_full = is_full
    prefix_queue.new_batch(original, scheduler, (batch,), {})
    return original, batch


def test_a_request_whose_anchors_are_here_is_admitted_alone(scheduler, cache):
    cache.waiting.with_anchors = {"b", "c"}
    first = scheduler.waiting_queue[1]
    original, _ = a_pass(scheduler)
    assert original.seen == [(["b"], first)]
    assert cache.calls == [("apart", "b", None)]
    assert rids(scheduler.waiting_queue) == ["a", "c", "d"]
    # Residuals of the request have not arrived yet.
    cache.early.rids = ["b"]
    a_pass(scheduler)
    assert rids(scheduler.waiting_queue) == ["a", "d"]
    assert cache.waiting.retained == {"a", "b", "d"}


@pytest.mark.parametrize("was_loaded", [False, True])
def test_a_request_without_room_keeps_its_place_in_the_queue(scheduler, cache, was_loaded):
    cache.waiting.with_anchors = {"b"}
    cache.was_loaded = was_loaded
    a_pass(scheduler, Original(starts=False))
    assert cache.calls == [("cancel", None)]
    # The request does not try to start early again.
    assert cache.waiting.need_whole_pages == ({"b"} if was_loaded else set())
    assert rids(scheduler.waiting_queue) == list("abcd")
    assert cache.waiting.retained == set("abcd")


@pytest.mark.parametrize(
    "reason", ["others", "chunk", "full", "anchors", "shared", "tokens", "grammar"]
)
def test_no_request_starts_early_where(scheduler, cache, reason):
    cache.waiting.with_anchors = {"b"}
    if reason == "others":
        # Request d does not wait for pages, and may start.
        cache.waiting.still.discard("d")
    elif reason == "chunk":
        scheduler.chunked_req = object()
    elif reason == "anchors":
        cache.lacks_anchors = {"b"}
    elif reason == "shared":
        cache.early.rids = ["b"]
    elif reason == "tokens":
        scheduler.waiting_queue[1].sampling_params.max_new_tokens = 1
    else:
        scheduler.waiting_queue[1].grammar = object()
    original, _ = a_pass(scheduler, is_full=reason == "full")
    assert cache.waiting.need_whole_pages == cache.lacks_anchors
    assert original.seen == [(["d"] if reason == "others" else [], None)]
    assert not cache.calls


def test_anchors_come_first_for_requests_that_may_use_them(scheduler, cache):
    for req, change in zip(
        scheduler.waiting_queue, ("grammar", "return_logprob", "output_ids", "rid"), strict=True
    ):
        setattr(req, change, req.rid)
    assert [may_start_early(req) for req in scheduler.waiting_queue] == [False] * 3 + [True]
    a_pass(scheduler)
    assert cache.waiting.asked_first == ["d"]


def test_a_request_is_cached_once_its_residuals_are_here_unless_it_has_left(scheduler, cache):
    cache.early.rids = cache.early.complete = ["x", "y", "z"]
    gone = request("y", finished=lambda: True)
    ending = request("z", to_finish=object())
    here = request("x")
    _, batch = a_pass(scheduler, running=[request("w"), here, gone, ending])
    assert cache.calls == [("adopt", "x")]
    here.time_stats.set_prefill_finished_time.assert_called_once_with()
    assert not batch.released


def test_a_request_whose_residuals_are_lost_returns_to_the_queue(scheduler, cache):
    cache.early.rids = cache.early.lost = ["x", "y", "z"]
    ending = request("z", to_finish=object())
    reqs = [request("x"), request("w"), request("y"), ending]
    original, batch = a_pass(scheduler, running=reqs, is_full=True)
    assert rids(batch.reqs) == ["w", "z"]
    assert batch.released == [("x", 4), ("y", 3)]
    assert not batch.batch_is_full
    # The requests return in time for this pass.
    assert original.seen == [(["x", "y"], None)]
    assert cache.early.num_returned == 2
    # The requests do not start on the same anchors again.
    assert cache.waiting.need_whole_pages == {"x", "y"}

"""The step planner in a loop with a toy cache: nobody starves, nothing overflows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.planning.step import (
    MAX_LATE_ITERATIONS,
    CacheView,
    RequestView,
    StepPlan,
    StepPlanner,
)

MAX_DRAFTS = 16


@dataclass
class ToyRequest:
    pages: tuple[int, ...]
    best_len: int
    cap_len: int
    num_drafts: int = 0
    priority: int = 0


@dataclass
class ToyServer:
    """Applies plans the way the stepper does: a fetch of one iteration is there in the next.

    `stuck` pages are never delivered, as by a link that hangs.
    """

    requests: dict[str, ToyRequest]
    cache_pages: int
    link_pages: int
    stuck: frozenset[int] = frozenset()
    # Verified requests get a page more each time, born in the cache where it has room.
    grows_to: int = 0
    resident: set[int] = field(default_factory=set)
    arriving: set[int] = field(default_factory=set)
    streamed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self):
        self.planner = StepPlanner(MAX_DRAFTS, self.link_pages)

    def view(self, key: str) -> RequestView:
        request = self.requests[key]
        return RequestView(
            key=key,
            num_drafts=request.num_drafts,
            best_len=min(request.best_len, request.cap_len),
            cap_len=request.cap_len,
            missing=tuple(p for p in request.pages if p not in self.resident | self.arriving),
            resident=tuple(p for p in request.pages if p in self.resident),
            arriving=tuple(p for p in request.pages if p in self.arriving),
            priority=request.priority,
        )

    def step(self) -> StepPlan:
        self.resident |= self.arriving - self.stuck
        self.arriving &= self.stuck
        keys = list(self.requests)
        free = self.cache_pages - len(self.resident) - len(self.arriving)
        cache = CacheView(self.cache_pages, free, tuple(sorted(self.resident)))
        plan = self.planner.plan([self.view(key) for key in keys], cache)
        assert sorted(plan.draft + plan.verify + plan.wait) == list(range(len(keys)))
        assert set(plan.evict) <= self.resident
        # What was fetched for a verification to come stays until then.
        for known in self.planner._known.values():
            assert known.held.isdisjoint(plan.evict)
        assert not set(plan.fetch) & (self.resident | self.arriving)
        self.resident -= set(plan.evict)
        self.arriving |= set(plan.fetch)
        assert len(self.resident) + len(self.arriving) <= self.cache_pages
        for index in plan.draft:
            request = self.requests[keys[index]]
            request.num_drafts += 1
            assert request.num_drafts <= request.cap_len
        for index in plan.verify:
            request = self.requests[keys[index]]
            self.streamed[keys[index]] += not set(request.pages) <= self.resident
            request.num_drafts = 0
            if len(request.pages) < self.grows_to:
                born = 10_000 + 100 * index + len(request.pages)
                request.pages = (*request.pages, born)
                if len(self.resident) + len(self.arriving) < self.cache_pages:
                    self.resident.add(born)
        return plan

    def verified(self, plan: StepPlan) -> list[str]:
        keys = list(self.requests)
        return [keys[index] for index in plan.verify]


def serve(requests, cache_pages, link_pages, **options):
    named = {f"r{index}": request for index, request in enumerate(requests)}
    return ToyServer(named, cache_pages, link_pages, **options)


@st.composite
def servers(draw: st.DrawFn) -> ToyServer:
    shared = tuple(range(draw(st.integers(0, 4))))
    requests = []
    for index in range(draw(st.integers(1, 6))):
        own = range(100 * (index + 1), 100 * (index + 1) + draw(st.integers(0, 8)))
        requests.append(
            ToyRequest(
                (*shared, *own),
                best_len=draw(st.integers(1, MAX_DRAFTS)),
                cap_len=draw(st.integers(0, MAX_DRAFTS)),
                priority=draw(st.integers(-1, 1)),
            )
        )
    return serve(requests, draw(st.integers(0, 20)), draw(st.integers(1, 6)))


@settings(max_examples=120, deadline=None)
@given(servers(), st.sampled_from([0, 12]))
def test_everyone_verifies_again_and_again(server, grows_to):
    server.grows_to = grows_to
    bound = server.planner.wait_bound(len(server.requests))
    last = dict.fromkeys(server.requests, 0)
    for now in range(1, 150):
        for key in server.verified(server.step()):
            last[key] = now
        assert now - min(last.values()) <= bound


@settings(max_examples=60, deadline=None)
@given(servers(), st.data())
def test_a_request_that_goes_leaves_nothing_behind(server, data):
    """Requests come and go, pages leave the cache behind the planner's back; in the end every
    reservation is released."""
    for index in range(60):
        server.step()
        if server.requests and data.draw(st.integers(0, 9)) == 0:
            del server.requests[data.draw(st.sampled_from(sorted(server.requests)))]
        if data.draw(st.integers(0, 9)) == 0:
            pages = tuple(
                range(1000 + 10 * index, 1000 + 10 * index + data.draw(st.integers(0, 8)))
            )
            server.requests[f"new{index}"] = ToyRequest(pages, 4, 8)
        if server.resident and data.draw(st.integers(0, 9)) == 0:
            server.resident.discard(data.draw(st.sampled_from(sorted(server.resident))))
    server.requests.clear()
    server.step()
    rings = server.planner._planner.rings
    assert not any(any(ring.amounts()) for ring in rings.each())


@settings(max_examples=40, deadline=None)
@given(servers(), st.data())
def test_pages_that_never_arrive_hold_up_nobody_for_good(server, data):
    hung = data.draw(st.sampled_from(sorted(server.requests)))
    server.stuck = frozenset(p for p in server.requests[hung].pages if p >= 100)
    bound = server.planner.wait_bound(len(server.requests))
    last = dict.fromkeys(server.requests, 0)
    for now in range(1, 250):
        for key in server.verified(server.step()):
            last[key] = now
        assert now - min(last.values()) <= bound + len(server.requests) * MAX_LATE_ITERATIONS


@pytest.mark.parametrize("best_len", [2, 5, 8])
def test_alone_a_request_verifies_at_its_best_length(best_len):
    server = serve([ToyRequest((1, 2), best_len, MAX_DRAFTS)], cache_pages=4, link_pages=2)
    plans = [server.step() for _ in range(60)]
    verified = [now for now, plan in enumerate(plans) if plan.verify]
    assert {after - before for before, after in pairwise(verified)} == {best_len + 1}
    assert not any(plan.wait for plan in plans)


def test_requests_that_come_together_are_staggered():
    server = serve([ToyRequest((), 8, 16) for _ in range(9)], cache_pages=4, link_pages=2)
    plans = [server.step() for _ in range(100)]
    assert max(len(plan.verify) for plan in plans) <= 2
    assert not any(plan.wait for plan in plans)


def test_with_room_for_all_nothing_is_streamed_and_nothing_moves_twice():
    requests = [ToyRequest(tuple(range(10 * i, 10 * i + 5)), 6, 12) for i in range(4)]
    server = serve(requests, cache_pages=20, link_pages=4)
    plans = [server.step() for _ in range(80)]
    fetched = [page for plan in plans for page in plan.fetch]
    assert sorted(fetched) == sorted(p for r in requests for p in r.pages)
    assert not any(plan.evict or plan.wait for plan in plans)
    assert not server.streamed.total()


def test_staggered_requests_share_a_cache_that_holds_half_of_them():
    """What the planner is for: each one's pages come while the others draft."""
    requests = [ToyRequest(tuple(range(10 * i, 10 * i + 4)), 7, 16) for i in range(4)]
    server = serve(requests, cache_pages=8, link_pages=2)
    for _ in range(20):
        server.step()
    server.streamed.clear()
    plans = [server.step() for _ in range(160)]
    verified = Counter(i for plan in plans for i in plan.verify)
    assert min(verified.values()) >= 160 // 17
    assert not any(plan.wait for plan in plans)
    assert not server.streamed.total()


def test_some_residuals_stay_where_not_all_can():
    """Two requests fill half of the cache for good; what the others need moves every time."""
    requests = [ToyRequest(tuple(range(10 * i, 10 * i + 4)), 7, 16) for i in range(6)]
    server = serve(requests, cache_pages=16, link_pages=4)
    for _ in range(60):
        server.step()
    plans = [server.step() for _ in range(160)]
    moved = Counter(page // 10 for plan in plans for page in plan.fetch)
    stayed = [index for index in range(6) if moved[index] <= 4]
    assert 1 <= len(stayed) <= 3
    assert not any(plan.wait for plan in plans)


def test_a_request_larger_than_the_cache_never_waits():
    server = serve([ToyRequest(tuple(range(9)), 3, 6)], cache_pages=8, link_pages=4)
    plans = [server.step() for _ in range(40)]
    verified = [now for now, plan in enumerate(plans) if plan.verify]
    assert all(after - before == 4 for before, after in pairwise(verified))
    assert not any(plan.wait or plan.fetch for plan in plans)
    assert server.streamed["r0"] == len(verified)


def test_without_drafting_everybody_verifies_in_every_iteration():
    requests = [ToyRequest((1, 2), 0, 0), ToyRequest((3, 4), 0, 0)]
    server = serve(requests, cache_pages=3, link_pages=4)
    assert all(server.step().verify == (0, 1) for _ in range(20))


def test_the_urgent_go_first_where_the_link_is_short():
    def waits(priority):
        requests = [ToyRequest(tuple(range(10 * i, 10 * i + 8)), 4, 8) for i in range(6)]
        requests[5].priority = priority
        server = serve(requests, cache_pages=17, link_pages=2)
        plans = [server.step() for _ in range(300)]
        return sum(5 in plan.wait for plan in plans)

    assert waits(priority=1) < waits(priority=0)


def test_the_same_start_gives_the_same_plans():
    def run():
        requests = [ToyRequest(tuple(range(5 * i, 5 * i + 7)), 3 + i, 9) for i in range(4)]
        server = serve(requests, cache_pages=10, link_pages=3)
        return [server.step() for _ in range(60)]

    assert run() == run()

"""The planner in a loop with a toy cache: nobody starves, nothing overflows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.planning.step import (
    MAX_WAIT_ITERATIONS,
    RequestView,
    StepBudget,
    StepPlan,
    plan_step,
)


@dataclass
class ToyRequest:
    pages: tuple[int, ...]
    due_len: int
    cap_len: int
    num_drafts: int = 0
    waited: int = 0


@dataclass
class ToyServer:
    """Applies plans the way the stepper does: a fetch of one iteration is there in the next.

    `stuck` pages are never delivered, as by a link that hangs.
    """

    requests: list[ToyRequest]
    cache_pages: int
    fetch_pages: int
    stuck: frozenset[int] = frozenset()
    resident: set[int] = field(default_factory=set)
    arriving: set[int] = field(default_factory=set)
    streamed: Counter[int] = field(default_factory=Counter)

    def view(self, index: int) -> RequestView:
        request = self.requests[index]
        return RequestView(
            index=index,
            num_drafts=request.num_drafts,
            due_len=request.due_len,
            cap_len=request.cap_len,
            waited=request.waited,
            missing=tuple(p for p in request.pages if p not in self.resident | self.arriving),
            resident=tuple(p for p in request.pages if p in self.resident),
            num_arriving=sum(p in self.arriving for p in request.pages),
        )

    def step(self) -> StepPlan:
        self.resident |= self.arriving - self.stuck
        self.arriving &= self.stuck
        views = [self.view(i) for i in range(len(self.requests))]
        used = {page for view in views for page in view.resident}
        free = self.cache_pages - len(self.resident) - len(self.arriving)
        idle = tuple(sorted(self.resident - used))
        plan = plan_step(views, StepBudget(self.fetch_pages, free, self.cache_pages, idle))
        assert set(plan.evict) <= self.resident
        assert not set(plan.fetch) & (self.resident | self.arriving)
        self.resident -= set(plan.evict)
        self.arriving |= set(plan.fetch)
        assert len(self.resident) + len(self.arriving) <= self.cache_pages
        for index in plan.draft:
            self.requests[index].num_drafts += 1
            assert self.requests[index].num_drafts <= self.requests[index].cap_len
        for index in plan.verify:
            self.streamed[index] += not set(self.requests[index].pages) <= self.resident
            self.requests[index].num_drafts = self.requests[index].waited = 0
        for index in plan.wait:
            self.requests[index].waited += 1
            assert self.requests[index].waited <= MAX_WAIT_ITERATIONS
        return plan


@st.composite
def servers(draw: st.DrawFn) -> ToyServer:
    shared = tuple(range(draw(st.integers(0, 4))))
    requests = []
    for index in range(draw(st.integers(1, 6))):
        own = range(100 * (index + 1), 100 * (index + 1) + draw(st.integers(0, 8)))
        due_len = draw(st.integers(0, 8))
        cap_len = draw(st.integers(0, 12))
        requests.append(ToyRequest((*shared, *own), due_len, cap_len))
    return ToyServer(requests, draw(st.integers(0, 20)), draw(st.integers(1, 6)))


@settings(max_examples=80)
@given(servers())
def test_everyone_verifies_again_and_again(server):
    last = dict.fromkeys(range(len(server.requests)), 0)
    for now in range(1, 120):
        for index in server.step().verify:
            last[index] = now
        for index, request in enumerate(server.requests):
            assert now - last[index] <= request.cap_len + MAX_WAIT_ITERATIONS + 1


@settings(max_examples=40)
@given(servers(), st.data())
def test_pages_that_never_arrive_delay_their_own_request_only(server, data):
    hung = data.draw(st.integers(0, len(server.requests) - 1))
    server.stuck = frozenset(p for p in server.requests[hung].pages if p >= 100)
    last = dict.fromkeys(range(len(server.requests)), 0)
    for now in range(1, 80):
        for index in server.step().verify:
            last[index] = now
    bounds = [r.cap_len + MAX_WAIT_ITERATIONS + 1 for r in server.requests]
    assert all(79 - last[index] <= bound for index, bound in enumerate(bounds))


@pytest.mark.parametrize("due_len", [1, 3, 6])
def test_others_keep_their_rhythm_beside_a_late_request(due_len):
    def rhythm(with_late):
        requests = [ToyRequest((i,), due_len + i, 12) for i in range(3)]
        if with_late:
            requests.append(ToyRequest(tuple(range(50, 60)), 2, 4))
        server = ToyServer(requests, cache_pages=20, fetch_pages=4)
        server.stuck = frozenset(range(50, 60))
        server.resident = {0, 1, 2}
        plans = [server.step() for _ in range(60)]
        return [[(i in p.draft, i in p.verify) for i in range(3)] for p in plans]

    assert rhythm(with_late=True) == rhythm(with_late=False)


def test_with_room_for_all_nothing_is_streamed_and_nothing_moves_twice():
    requests = [ToyRequest(tuple(range(10 * i, 10 * i + 5)), 6, 12) for i in range(4)]
    server = ToyServer(requests, cache_pages=20, fetch_pages=4)
    plans = [server.step() for _ in range(80)]
    fetched = [page for plan in plans for page in plan.fetch]
    assert sorted(fetched) == sorted(p for r in requests for p in r.pages)
    assert not any(plan.evict or plan.wait for plan in plans)
    assert not server.streamed.total()


def test_staggered_requests_share_a_cache_that_holds_half_of_them():
    """What the planner is for: each one's pages come while the others draft."""
    requests = [
        ToyRequest(tuple(range(10 * i, 10 * i + 4)), 7, 16, num_drafts=2 * i) for i in range(4)
    ]
    server = ToyServer(requests, cache_pages=8, fetch_pages=2)
    for _ in range(20):
        server.step()
    server.streamed.clear()
    plans = [server.step() for _ in range(160)]
    verified = Counter(i for plan in plans for i in plan.verify)
    assert min(verified.values()) >= 160 // 17
    assert not any(plan.wait for plan in plans)
    assert not server.streamed.total()


def test_a_request_larger_than_the_cache_never_waits():
    server = ToyServer([ToyRequest(tuple(range(9)), 3, 6)], cache_pages=8, fetch_pages=4)
    plans = [server.step() for _ in range(40)]
    verifications = [now for now, plan in enumerate(plans) if plan.verify]
    assert all(after - before == 4 for before, after in pairwise(verifications))
    assert not any(plan.wait or plan.fetch for plan in plans)
    assert server.streamed[0] == len(verifications)


def test_nobody_waits_for_pages_that_cannot_come():
    """Without drafting everybody is due in every iteration, so nobody's pages can make way."""
    requests = [ToyRequest((1, 2), 0, 0), ToyRequest((3, 4), 0, 0)]
    server = ToyServer(requests, cache_pages=3, fetch_pages=4)
    plans = [server.step() for _ in range(90)]
    assert sum(1 in plan.verify for plan in plans) >= 45


def test_the_same_start_gives_the_same_plans():
    def run():
        requests = [ToyRequest(tuple(range(5 * i, 5 * i + 7)), 3 + i, 9) for i in range(4)]
        server = ToyServer(requests, cache_pages=10, fetch_pages=3)
        return [server.step() for _ in range(60)]

    assert run() == run()

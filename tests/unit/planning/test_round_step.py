"""Requests that verify at the end of a round, played against a cache and a link."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.planning import round_step
from sglang_kvspec.planning.round_plan import CacheView
from sglang_kvspec.planning.round_step import (
    PATIENCE,
    RoundBudget,
    RoundPlanner,
    RoundView,
)

PLENTY = RoundBudget(10**6, 10**6)
NOTHING = RoundBudget(0, 0)


@dataclass
class ToyRequest:
    pages: tuple[int, ...]
    spill: int = 0
    priority: int = 0
    waited: int = 0


@dataclass
class Toy:
    """A server reduced to the planner's view. Each plan is checked and applied."""

    num_slots: int
    requests: dict[str, ToyRequest]
    cached: set[int] = field(default_factory=set)
    planner: RoundPlanner = field(default_factory=RoundPlanner)
    log: list[tuple[str, ...]] = field(default_factory=list)
    fetched: int = 0

    def views(self):
        return [
            RoundView(
                key,
                missing=tuple(p for p in r.pages if p not in self.cached),
                cached=tuple(p for p in r.pages if p in self.cached),
                spill=r.spill,
                priority=r.priority,
            )
            for key, r in self.requests.items()
        ]

    def round(self, budget=PLENTY, *, drafts=True, is_cancelled=False):
        """Plan and play a round. is_cancelled: a prefill interrupts the round, after the pages that
        the round waits for have moved."""
        views = self.views()
        free = self.num_slots - len(self.cached)
        cache = CacheView(self.num_slots, free, tuple(sorted(self.cached)))
        plan = self.planner.plan(views, cache, budget, drafts=drafts)
        self.check(plan, views, budget, drafts)
        self.cached -= set(plan.evict)
        moved = plan.fetch if is_cancelled else (*plan.fetch, *plan.ahead)
        self.cached |= set(moved)
        self.fetched += len(moved)
        if is_cancelled:
            self.planner.cancel()
            return plan
        keys = list(self.requests)
        self.log.append(tuple(keys[i] for i in plan.verify))
        for i, request in enumerate(self.requests.values()):
            request.waited = 0 if i in plan.verify else request.waited + 1
        return plan

    def check(self, plan, views, budget, drafts):
        fits = [view for view in views if view.num_slots <= self.num_slots]
        verifying = [views[i] for i in plan.verify if views[i] in fits]
        read = {page for view in verifying for page in view.pages}
        missing = {page for view in views for page in view.missing}
        moved = [*plan.fetch, *plan.ahead]
        assert len(moved) == len(set(moved))
        assert set(moved) <= missing
        assert set(plan.evict) <= self.cached
        assert len(set(plan.evict)) == len(plan.evict)
        after = (self.cached - set(plan.evict)) | set(moved)
        assert len(after) <= self.num_slots, "the cache is over-committed"
        assert read <= after, "a verification lacks residuals"
        assert len(read) + sum(view.spill for view in verifying) <= self.num_slots
        # Only a request that must verify now may delay the others.
        forced = any(self.requests[view.key].waited >= PATIENCE for view in verifying)
        if not forced and (drafts or len(plan.verify) > 1):
            assert len(plan.fetch) <= budget.drafting_pages
        assert len(moved) <= max(budget.round_pages, len(plan.fetch))
        spill = sum(view.spill for view in verifying)
        if plan.ahead:
            assert len(read | set(plan.ahead)) + spill <= self.num_slots


sizes = st.integers(0, 12)
budgets = st.builds(RoundBudget, st.integers(0, 20), st.integers(0, 40))


@st.composite
def toys(draw):
    num_slots = draw(st.integers(1, 40))
    requests, first = {}, 1
    shared = tuple(range(1000, 1000 + draw(st.integers(0, 3))))
    for index in range(draw(st.integers(1, 7))):
        size = draw(sizes)
        own = tuple(range(first, first + size))
        first += size
        pages = (*shared, *own) if draw(st.booleans()) else own
        requests[f"r{index}"] = ToyRequest(pages, draw(st.integers(0, 2)), draw(st.integers(0, 1)))
    toy = Toy(num_slots, requests)
    everything = sorted({page for r in requests.values() for page in r.pages})
    toy.cached = set(draw(st.permutations(everything))[: draw(st.integers(0, num_slots))])
    return toy


@given(num=st.integers(1, 6), size=sizes, spare=st.integers(0, 9), drafts=st.booleans())
def test_where_everything_is_cached_all_requests_verify_and_nothing_moves(num, size, spare, drafts):
    requests = {
        f"r{i}": ToyRequest(tuple(range(20 * i, 20 * i + size)), spill=1) for i in range(num)
    }
    toy = Toy(num * (size + 1) + spare, requests)
    toy.cached = {page for r in requests.values() for page in r.pages}
    for _ in range(3):
        plan = toy.round(NOTHING, drafts=drafts)
        assert plan.verify == tuple(range(num))
        assert (plan.fetch, plan.ahead, plan.evict) == ((), (), ())


@settings(max_examples=150, deadline=None)
@given(toys(), st.data())
def test_no_request_waits_longer_than_the_bound(toy, data):
    """Pages are added and leave the cache at random, and requests join."""
    for index in range(40):
        toy.round(data.draw(budgets), drafts=data.draw(st.booleans()))
        bound = RoundPlanner.wait_bound(len(toy.requests))
        assert all(request.waited <= bound for request in toy.requests.values())
        if toy.cached and data.draw(st.integers(0, 4)) == 0:
            toy.cached.discard(data.draw(st.sampled_from(sorted(toy.cached))))
        grows = data.draw(st.sampled_from(sorted(toy.requests)))
        request = toy.requests[grows]
        if len(request.pages) + request.spill < toy.num_slots:
            request.pages = (*request.pages, 2000 + index)
        if data.draw(st.integers(0, 9)) == 0:
            toy.requests[f"new{index}"] = ToyRequest((3000 + index,), 0, 1)


def test_some_requests_keep_residuals_and_verify_in_every_round_while_others_take_turns():
    requests = {f"r{i}": ToyRequest(tuple(range(10 * i, 10 * i + 10))) for i in range(6)}
    toy = Toy(40, requests)
    for _ in range(24):
        toy.round(RoundBudget(10, 12))
    counts = {key: sum(key in keys for keys in toy.log[4:]) for key in requests}
    assert sorted(counts.values())[-2:] == [20, 20], counts
    assert min(counts.values()) >= 4, counts
    # Residuals that stay are not fetched again: about one request is fetched in a round.
    assert toy.fetched <= 40 + 24 * 12


def test_pages_beyond_one_round_of_the_link_are_fetched_ahead():
    toy = Toy(20, {"a": ToyRequest(tuple(range(10)))})
    plans = [toy.round(RoundBudget(3, 5)) for _ in range(3)]
    assert [len(plan.ahead) for plan in plans] == [5, 5, 0]
    assert [plan.verify for plan in plans] == [(), (), (0,)]


def test_a_request_that_can_verify_does_not_wait_for_one_that_cannot():
    toy = Toy(20, {"long": ToyRequest(tuple(range(10))), "short": ToyRequest((100,))})
    toy.cached = {100}
    assert toy.round(RoundBudget(3, 5)).verify == (1,)


def test_with_nothing_to_draft_a_request_verifies():
    toy = Toy(10, {"a": ToyRequest(tuple(range(10))), "b": ToyRequest(tuple(range(20, 30)))})
    assert toy.round(NOTHING, drafts=True).verify == ()
    plan = toy.round(NOTHING, drafts=False)
    assert plan.verify == (0,)
    assert len(plan.fetch) == 10


def test_an_overdue_request_verifies_whatever_its_fetch_takes():
    toy = Toy(10, {"a": ToyRequest(tuple(range(10)))})
    for _ in range(PATIENCE):
        assert toy.round(NOTHING).verify == ()
    assert toy.round(NOTHING).verify == (0,)


def test_a_request_larger_than_the_cache_reads_the_store_and_takes_no_room():
    toy = Toy(5, {"huge": ToyRequest(tuple(range(9))), "small": ToyRequest((50, 51))})
    plan = toy.round()
    assert plan.verify == (0, 1)
    assert plan.fetch == (50, 51)


@pytest.mark.parametrize("every", [1, 3])
def test_rounds_that_are_planned_again_need_as_much_of_the_link(every):
    found = []
    for is_redone in (False, True):
        pages = [tuple(range(50 * i, 50 * i + 50)) for i in range(16)]
        toy = Toy(210, {str(i): ToyRequest(own, 2) for i, own in enumerate(pages)})
        for number in range(120):
            # Cancel once, and twice in a row.
            for _ in range((1 + number % 2) * (is_redone and number % every == 0)):
                toy.round(RoundBudget(120, 140), is_cancelled=True)
            toy.round(RoundBudget(120, 140))
        verified = sum(len(keys) for keys in toy.log)
        turns = toy.planner.turns(1.0)
        found.append((turns.fetch_s, turns.staying, toy.fetched / verified))
    (once, staying, moved), (again, still_staying, moved_again) = found
    assert staying == still_staying
    # A plan that is made twice may move more pages, and then the estimate must say so.
    assert again == pytest.approx(once * moved_again / moved, rel=0.15)


def test_verifications_of_a_cancelled_round_are_planned_again(toy_of_four):
    first = toy_of_four.round(RoundBudget(4, 4), is_cancelled=True)
    assert set(first.verify) <= set(toy_of_four.round(RoundBudget(4, 4)).verify)


@pytest.fixture
def toy_of_four():
    return Toy(
        8, {name: ToyRequest(tuple(range(9 * i, 9 * i + 4))) for i, name in enumerate("abcd")}
    )


def test_pages_of_no_request_are_evicted_first():
    toy = Toy(
        12,
        {
            "a": ToyRequest((1, 2, 3, 4)),
            "b": ToyRequest((11, 12, 13, 14)),
            "c": ToyRequest((21, 22, 23, 24)),
            "d": ToyRequest((31, 32, 33, 34)),
        },
    )
    toy.cached = {91, 92}
    plan = toy.round(RoundBudget(4, 4))
    assert plan.evict == ()
    toy.round(RoundBudget(4, 4))
    plan = toy.round(RoundBudget(4, 4))
    assert set(plan.evict) == {91, 92}


def test_a_higher_priority_goes_first():
    toy = Toy(4, {"a": ToyRequest((1, 2)), "b": ToyRequest((3, 4), priority=1)})
    assert toy.round(RoundBudget(2, 2)).verify == (1,)


def test_without_patience_the_bound_breaks(monkeypatch):
    """Shows that the test of the bound can fail."""
    monkeypatch.setattr(RoundPlanner, "_is_forced", lambda *args: False)
    toy = Toy(10, {"a": ToyRequest(tuple(range(10)))})
    for _ in range(RoundPlanner.wait_bound(1) + 1):
        toy.round(NOTHING)
    assert toy.requests["a"].waited > round_step.RoundPlanner.wait_bound(1)

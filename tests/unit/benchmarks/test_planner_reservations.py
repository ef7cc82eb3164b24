"""Random schedules through the planner, against accounts that the tests keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.placement import Ask, Outcome, Place
from planner.reservations import (
    IterationBudget,
    IterationPlan,
    VerificationPlanner,
)

from sglang_kvspec.core.errors import ConfigError

MAX_DRAFT_LEN = 8


@dataclass
class Accounts:
    """Bytes moved, bytes in HBM, verifications and the place of each request, as an engine would
    see them.

    Built from plans and their places only, never from the planner's rings.
    """

    planner: VerificationPlanner
    places: dict[int, Place] = field(default_factory=dict)
    asked_at: dict[int, int] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)
    verified: Counter[int] = field(default_factory=Counter)
    plans: list[IterationPlan] = field(default_factory=list)

    def submit(self, ask: Ask) -> None:
        self.planner.submit(ask)
        self.asked_at[ask.request_id] = self.planner.now

    def cancel(self, request_id: int) -> None:
        known = request_id in self.asked_at
        assert self.planner.cancel(request_id) == known
        for of_request in (self.places, self.asked_at, self.started):
            of_request.pop(request_id, None)

    def advance(self, late: Iterable[int] = ()) -> IterationPlan:
        now = self.planner.now
        late = frozenset(late)
        plan = self.planner.advance(late)
        self.plans.append(plan)
        assert plan.iteration == now
        # Late fetches may have moved or displaced places, so read them again.
        for request_id in set(self.places) - {p.request_id for p in self.planner.placed}:
            if request_id not in plan.verify:
                del self.places[request_id]
        self.places.update({p.request_id: p for p in self.planner.placed})
        for decision in plan.decisions:
            if decision.outcome is Outcome.PLACED:
                assert decision.place is not None
                self.places.setdefault(decision.request_id, decision.place)
                self.waits.append(now - self.asked_at[decision.request_id])
            elif decision.outcome is Outcome.TOO_LARGE:
                del self.asked_at[decision.request_id]
        self._check_budgets(now)
        for start in plan.starts:
            place = self.places[start.request_id]
            assert (start.num_bytes, start.due) == (place.fetch_bytes, place.verify_at)
            self.started[start.request_id] = now
        assert plan.release == tuple(r for r in plan.verify if self.places[r].fetch_bytes)
        for request_id in plan.verify:
            place = self.places.pop(request_id)
            assert request_id not in late
            assert sum(amount for _, amount in place.moves) == place.fetch_bytes
            assert all(when < now for when, _ in place.moves)
            if place.fetch_bytes:
                assert self.started.pop(request_id) == place.first
            self.verified[request_id] += 1
            del self.asked_at[request_id]
        return plan

    def _check_budgets(self, now: int) -> None:
        link: Counter[int] = Counter()
        hbm: Counter[int] = Counter()
        slots: Counter[int] = Counter()
        for place in self.places.values():
            slots[place.verify_at] += 1
            for when, amount in place.moves:
                assert amount > 0
                link[when] += amount
            if place.moves:
                for when in range(place.first, place.verify_at + 1):
                    hbm[when] += place.fetch_bytes
        rings = self.planner.rings
        for used, ring in ((link, rings.link), (hbm, rings.hbm), (slots, rings.slots)):
            coming = {when: amount for when, amount in used.items() if when >= now}
            assert all(amount <= ring.capacity for amount in coming.values())

    def is_empty(self) -> bool:
        return not any(any(ring.amounts()) for ring in self.planner.rings.each())


budgets = st.builds(
    IterationBudget,
    link_bytes=st.integers(1, 30),
    hbm_bytes=st.integers(0, 120),
    verifications=st.integers(1, 4),
)


asks = st.builds(
    Ask,
    request_id=st.just(0),
    fetch_bytes=st.sampled_from([0, 1, 7, 20, 45, 100]),
    best_len=st.integers(1, MAX_DRAFT_LEN),
    num_drafts=st.integers(0, 3),
    priority=st.integers(0, 2),
    deadline=st.none() | st.integers(0, 12),
)


def make_planner(budget: IterationBudget, horizon: int | None = None) -> VerificationPlanner:
    return VerificationPlanner(budget, max_draft_len=MAX_DRAFT_LEN, horizon=horizon, patience=4)


def random_ask(rng: Random, request_id: int, now: int) -> Ask:
    return Ask(
        request_id=request_id,
        fetch_bytes=rng.choice([0, 1, 7, 20, 45, 100]),
        best_len=rng.randint(1, MAX_DRAFT_LEN),
        num_drafts=rng.randint(0, 3),
        priority=rng.randint(0, 2),
        deadline=rng.choice([None, now + rng.randint(0, 12)]),
    )


def run_schedule(seed: int) -> Accounts:
    """Return the accounts after up to 40 iterations of requests that arrive, return and leave.

    A seed decides them, because drawing every choice takes longer than running the schedule.
    """
    rng = Random(seed)
    budget = IterationBudget(rng.randint(1, 30), rng.randint(0, 120), rng.randint(1, 4))
    accounts = Accounts(make_planner(budget, rng.choice([MAX_DRAFT_LEN + 1, 16])))
    for _ in range(rng.randint(1, 40)):
        for request_id in rng.sample(range(10), rng.randint(0, 4)):
            if request_id not in accounts.asked_at:
                accounts.submit(random_ask(rng, request_id, accounts.planner.now))
            elif rng.randrange(4) == 0:
                accounts.cancel(request_id)
        accounts.advance()
    return accounts


schedules = st.integers(0, 2**32 - 1).map(run_schedule)


@settings(max_examples=1000)
@given(schedules)
def test_budgets_hold_and_verifications_follow_their_fetches(accounts):
    # Accounts.advance checks every iteration of the schedule.
    assert accounts.plans


@settings(max_examples=400)
@given(schedules)
def test_every_reservation_is_released(accounts):
    for request_id in list(accounts.asked_at)[::2]:
        accounts.cancel(request_id)
    horizon = accounts.planner.rings.horizon
    for _ in range(accounts.planner.wait_bound(10) + horizon):
        accounts.advance()
    assert not accounts.asked_at
    assert not accounts.planner.placed
    assert accounts.is_empty()


@settings(max_examples=400)
@given(schedules)
def test_cancelling_all_empties_the_rings_at_once(accounts):
    for request_id in list(accounts.asked_at):
        accounts.cancel(request_id)
    assert accounts.is_empty()


@settings(max_examples=150)
@given(schedule=st.data(), budget=budgets)
def test_is_deterministic(schedule, budget):
    steps = schedule.draw(
        st.lists(st.lists(asks, max_size=3), min_size=1, max_size=15), label="asks"
    )

    def run() -> list[IterationPlan]:
        planner, plans, known = make_planner(budget), [], 0
        for step in steps:
            for ask in step:
                known += 1
                planner.submit(
                    Ask(known, ask.fetch_bytes, ask.best_len, ask.num_drafts, ask.priority)
                )
            plans.append(planner.advance())
        return plans

    assert run() == run()


@settings(max_examples=500)
@given(data=st.data(), budget=budgets, victim_bytes=st.sampled_from([0, 7, 20, 45, 100]))
def test_no_request_waits_longer_than_the_bound(data, budget, victim_bytes):
    """A request of low priority without a deadline competes with a continuous flow of small and
    urgent requests."""
    accounts = Accounts(make_planner(budget, 12))
    rivals = data.draw(st.lists(asks, min_size=1, max_size=9), label="rivals")
    victim = Ask(99, victim_bytes, best_len=8, priority=-1)
    for index, ask in enumerate(rivals):
        accounts.submit(Ask(index, ask.fetch_bytes, ask.best_len, 0, ask.priority, ask.deadline))
    for _ in range(data.draw(st.integers(0, 12), label="head start")):
        resubmit(accounts, rivals)
        accounts.advance()
    accounts.submit(victim)
    bound = accounts.planner.wait_bound(len(rivals) + 1)
    for _ in range(bound + accounts.planner.rings.horizon):
        resubmit(accounts, rivals)
        plan = accounts.advance()
        if victim.request_id not in accounts.asked_at:
            break
    # The request verified, or was too large for any ring.
    assert victim.request_id in plan.verify or any(
        d.request_id == 99 and d.outcome is Outcome.TOO_LARGE for d in plan.decisions
    )
    assert max(accounts.waits, default=0) <= bound


def resubmit(accounts: Accounts, rivals: list[Ask]) -> None:
    """Submit each rival that has verified or was cancelled again."""
    for index, ask in enumerate(rivals):
        if index not in accounts.asked_at:
            accounts.submit(Ask(index, ask.fetch_bytes, ask.best_len, 0, ask.priority))


@settings(max_examples=400)
@given(seed=st.integers(0, 2**32 - 1), budget=budgets)
def test_late_fetches_never_verify_nor_overfill_hbm(seed, budget):
    rng = Random(seed)
    # Slots only smooth the work, and late fetches may exceed them.
    budget = IterationBudget(budget.link_bytes, budget.hbm_bytes, 100)
    accounts = Accounts(make_planner(budget))
    for step in range(25):
        if step not in accounts.asked_at and step < 12:
            accounts.submit(random_ask(rng, step, step))
        due = accounts.planner.due
        late = [request_id for request_id in due if rng.random() < 0.5]
        plan = accounts.advance(late)
        assert set(due) - set(late) <= set(plan.verify)


@settings(max_examples=400)
@given(accounts=schedules, budget=budgets)
def test_smaller_budgets_hold_from_the_next_iteration_on(accounts, budget):
    planner = accounts.planner
    running = {p.request_id for p in planner.placed if p.first < planner.now}
    dropped = planner.resize(budget)
    assert set(dropped) <= running
    rings = planner.rings
    assert not rings.hbm.is_over()
    assert {p.request_id for p in planner.placed} | set(planner.waiting) == set(accounts.asked_at)
    # Only fetches under way may exceed a smaller link, and only verifications after them may exceed
    # the slots.
    if not any(p.first < planner.now for p in planner.placed):
        assert not rings.is_over()
    for request_id in list(accounts.asked_at):
        accounts.cancel(request_id)
    assert accounts.is_empty()


def places_of(planner: VerificationPlanner) -> dict[int, int]:
    plan = planner.advance()
    return {d.request_id: d.place.verify_at for d in plan.decisions if d.place is not None}


def test_places_are_tried_around_the_best_length_shorter_first():
    planner = make_planner(IterationBudget(0, 0, 1))
    for request_id in range(4):
        planner.submit(Ask(request_id, fetch_bytes=0, best_len=4))
    assert places_of(planner) == {0: 4, 1: 3, 2: 5, 3: 2}


def test_a_fetch_takes_what_the_link_has_left():
    planner = make_planner(IterationBudget(link_bytes=10, hbm_bytes=100, verifications=4))
    planner.submit(Ask(0, fetch_bytes=15, best_len=5))
    planner.submit(Ask(1, fetch_bytes=15, best_len=5))
    first, second = (d.place for d in planner.advance().decisions)
    assert first is not None
    assert first.moves == ((3, 5), (4, 10))
    assert second is not None
    assert second.moves == ((2, 10), (3, 5))


def test_priority_then_deadline_then_age_decide_the_order():
    planner = make_planner(IterationBudget(0, 0, 1))
    planner.submit(Ask(0, 0, best_len=3))
    planner.submit(Ask(1, 0, best_len=3, deadline=3))
    planner.submit(Ask(2, 0, best_len=3, priority=1))
    assert [d.request_id for d in planner.advance().decisions] == [2, 1, 0]


def test_a_request_that_loses_its_place_keeps_its_age():
    budget = IterationBudget(link_bytes=10, hbm_bytes=20, verifications=1)
    planner = make_planner(budget)
    planner.submit(Ask(0, fetch_bytes=10, best_len=8))
    for _ in range(planner.patience):
        planner.advance()
    assert planner.resize(IterationBudget(10, 0, 1)) == ()
    planner.resize(budget)
    planner.submit(Ask(1, fetch_bytes=10, best_len=8, priority=1))
    assert [d.request_id for d in planner.advance().decisions] == [0, 1]


def test_a_late_fetch_moves_later_fetches_and_costs_no_turn():
    # HBM holds the residuals of one request at a time.
    planner = make_planner(IterationBudget(link_bytes=10, hbm_bytes=20, verifications=4), 16)
    for request_id, best_len in enumerate((2, 5, 8)):
        planner.submit(Ask(request_id, fetch_bytes=20, best_len=best_len))
    assert places_of(planner) == {0: 2, 1: 5, 2: 8}
    planner.advance()
    planner.advance(late=[0])
    moved = {p.request_id: (p.first, p.verify_at) for p in planner.placed}
    assert moved == {0: (0, 3), 1: (4, 6), 2: (7, 9)}


def test_a_slower_link_keeps_the_order_of_turns():
    planner = make_planner(IterationBudget(link_bytes=20, hbm_bytes=20, verifications=4), 16)
    planner.submit(Ask(0, fetch_bytes=20, best_len=8, priority=1))
    planner.submit(Ask(1, fetch_bytes=20, best_len=4))
    assert places_of(planner) == {0: 8, 1: 4}
    planner.resize(IterationBudget(link_bytes=4, hbm_bytes=20, verifications=4))
    # Each fetch takes five iterations instead of one, so the requests' own 4th and 8th iterations
    # are too early. The second fetch begins after the first verification.
    assert {p.request_id: (p.first, p.verify_at) for p in planner.placed} == {
        1: (1, 6),
        0: (7, 12),
    }
    assert not planner.waiting


def test_a_deadline_brings_the_verification_forward():
    planner = make_planner(IterationBudget(0, 0, 1))
    planner.submit(Ask(0, 0, best_len=8, deadline=2))
    assert places_of(planner) == {0: 2}


def test_a_request_that_waited_verifies_as_soon_as_its_fetch_allows():
    planner = make_planner(IterationBudget(link_bytes=10, hbm_bytes=20, verifications=1))
    planner.submit(Ask(0, fetch_bytes=20, best_len=8))
    planner.submit(Ask(1, fetch_bytes=20, best_len=2, num_drafts=6))
    assert places_of(planner)[1] == 2


@pytest.mark.parametrize(
    ("fetch_bytes", "budget"),
    [(101, IterationBudget(100, 100, 1)), (90, IterationBudget(10, 100, 1))],
    ids=["more than HBM holds", "longer than the horizon"],
)
def test_a_request_that_can_never_fit_is_reported_at_once(fetch_bytes, budget):
    planner = make_planner(budget)
    planner.submit(Ask(0, fetch_bytes, best_len=4))
    (decision,) = planner.advance().decisions
    assert decision.outcome is Outcome.TOO_LARGE
    assert not planner.waiting


def test_asking_twice_is_refused():
    planner = make_planner(IterationBudget(1, 1, 1))
    planner.submit(Ask(0, 0, best_len=4))
    with pytest.raises(ConfigError, match="has already asked"):
        planner.submit(Ask(0, 0, best_len=4))


def test_lateness_of_a_request_that_is_not_due_is_refused():
    with pytest.raises(ConfigError, match="not due"):
        make_planner(IterationBudget(1, 1, 1)).advance(late=[3])

"""Conformance tests of every VerifyScheduler. Another package can run this file with its own
scheduler in SCHEDULERS."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.engine.checked_scheduler import CheckedScheduler
from sglang_kvspec.engine.ports import SchedulerParts
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.round_scheduler import RoundScheduler
from sglang_kvspec.engine.staggered_scheduler import StaggeredScheduler
from sglang_kvspec.planning.draft_length import DraftCost
from sglang_kvspec.planning.rounds import RoundCost
from sglang_kvspec.runtime.ranks import Ranks

PLUGINS = Path(__file__).parents[2] / "plugins"
COST = RoundCost(step=4e-3, row=0.3e-3, request=1.2e-3, token=0.02e-3)


def toy_scheduler(parts):
    spec = importlib.util.spec_from_file_location("toy_scheduler", PLUGINS / "toy_scheduler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return CheckedScheduler("toy", module.FixedLengths(parts), parts.config.max_draft_len)


SCHEDULERS = {
    "rounds": RoundScheduler,
    "staggered": StaggeredScheduler,
    "fixed lengths": toy_scheduler,
}
every_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)


@pytest.fixture(scope="module")
def new_scheduler(make_kv):
    kv = make_kv()

    def new(make, draft_len="auto", stream="paced", ranks=None, planner=None):
        config = KVSpecConfig(draft_len=draft_len, stream=stream)
        parts = SchedulerParts(
            config=config,
            round_costs=SimpleNamespace(has_measured=True, cost=lambda *_: COST),
            planner=planner or ResidualPlanner(kv),
            ranks=ranks or Ranks(),
            draft_cost=DraftCost(),
        )
        return make(parts), config.max_draft_len

    return new


@st.composite
def batches(draw):
    """Draw a seed, a number of requests from one to eight, and the late ones among them."""
    seed = draw(st.integers(0, 10**6))
    count = draw(st.integers(1, 8))
    late = draw(st.sets(st.integers(0, count - 1)))
    return seed, count, late


def make_states(seed, count, max_draft_len):
    rng = random.Random(seed)
    states = []
    for i in range(count):
        state = request_state(str(i), remaining=rng.choice([1, 2, 5, 30, 200]))
        state.drafts = [0] * rng.randint(0, state.cap_len(max_draft_len))
        state.priority = rng.choice([0, 0, 0, 1])
        state.is_streamed, state.last_emitted = rng.random() < 0.5, rng.randint(1, 20)
        state.has_waited = rng.random() < 0.3
        if state.has_waited and rng.random() < 0.5:
            state.tail = [0]
        for _ in range(rng.randint(0, 5)):
            state.acceptance.observe(8, rng.randint(0, 8))
        states.append(state)
    return states


def facts(schedule):
    return (schedule.lens, schedule.budget, schedule.held, schedule.may_advance, schedule.alone)


@every_scheduler
@pytest.mark.parametrize("draft_len", ["auto", 0, 3, 16])
@given(batch=batches())
def test_drafts_stay_within_each_requests_room(new_scheduler, make, draft_len, batch):
    seed, count, late = batch
    scheduler, most = new_scheduler(make, draft_len)
    states = make_states(seed, count, most)
    schedule = scheduler.plan(states, late)
    rooms = [state.cap_len(most) - len(state.drafts) for state in states]
    assert len(schedule.lens) == count
    assert len(schedule.alone) in (0, count)
    for lens in (schedule.lens, schedule.alone or [0] * count):
        assert all(0 <= n <= room for n, room in zip(lens, rooms, strict=True))
    for state, room in zip(states, rooms, strict=True):
        if scheduler.piggybacks(state, len(state.drafts)):
            assert room > 0
        assert not scheduler.piggybacks(state, state.cap_len(most))


@every_scheduler
@given(batch=batches())
def test_held_requests_are_of_the_batch_and_the_budget_is_one(new_scheduler, make, batch):
    seed, count, late = batch
    scheduler, most = new_scheduler(make)
    schedule = scheduler.plan(make_states(seed, count, most), late)
    assert schedule.held <= set(range(count))
    assert 0 <= schedule.budget.drafting_pages <= schedule.budget.round_pages


@every_scheduler
@given(batch=batches())
def test_late_requests_take_no_turn_from_others(new_scheduler, make, batch):
    """If any request is ready, at least one ready request verifies, whichever requests are late."""
    seed, count, late = batch
    scheduler, most = new_scheduler(make)
    states = make_states(seed, count, most)
    for state in states:
        state.drafts = [0] * state.cap_len(most)
    ready = set(range(count)) - late
    verify = ready - scheduler.plan(states, late).held
    assert bool(verify) == bool(ready)


@every_scheduler
@given(batch=batches())
def test_equal_inputs_give_equal_schedules(new_scheduler, make, batch):
    seed, count, late = batch
    plans = []
    for _ in range(2):
        scheduler, most = new_scheduler(make)
        states = make_states(seed, count, most)
        plans.append(facts(scheduler.plan(states, late)))
        told = [len(state.drafts) for state in states]
        assert facts(scheduler.plan(states, late, told)) == plans[-1]
        assert [len(state.drafts) for state in states] == told, "states must be left alone"
    assert plans[0] == plans[1]


@every_scheduler
def test_ranks_that_measure_differently_plan_what_the_first_one_does(new_scheduler, make, make_kv):
    """The second rank uses the numbers of the first one, for the same requests."""
    sent = []

    class First(Ranks):
        def numbers(self, mine, about):
            sent.append((list(mine), about))
            return list(mine)

    class Second(Ranks):
        def numbers(self, mine, about):
            theirs, same = sent[-1]
            assert about == same
            assert len(mine) == len(theirs)
            return list(theirs)

    first, most = new_scheduler(make, ranks=First())
    planner = ResidualPlanner(make_kv())
    for _ in range(50):
        planner.speeds.note_iteration(3.0)
    second, _ = new_scheduler(make, ranks=Second(1, 2), planner=planner)
    states, others = make_states(1, 6, most), make_states(1, 6, most)
    others[0].acceptance.observe(8, 0)
    assert facts(first.plan(states)) == facts(second.plan(others))


@every_scheduler
@pytest.mark.parametrize("schedule_first", [False, True])
def test_times_to_the_next_tokens_are_known_for_every_request(new_scheduler, make, schedule_first):
    scheduler, most = new_scheduler(make)
    states = make_states(3, 5, most)
    schedule = scheduler.plan(states) if schedule_first else None
    seconds = scheduler.seconds_to_next(states, schedule)
    assert len(seconds) == len(states)
    assert min(seconds) >= 0


class Simulated:
    """Rounds of requests whose residuals are all in the cache."""

    def __init__(self, scheduler, states, accept, most_piggyback):
        self.scheduler, self.states, self.accept = scheduler, states, accept
        self.most_piggyback = most_piggyback
        self.waited = [0] * len(states)
        self.longest_wait = 0

    def round(self, late=()):
        states, scheduler = self.states, self.scheduler
        schedule = scheduler.plan(states, late)
        verify = [i for i in range(len(states)) if i not in schedule.held and i not in late]
        lens = schedule.alone if schedule.alone and not verify else schedule.lens
        for state, count in zip(states, lens, strict=True):
            state.drafts.extend([0] * count)
        if verify:
            others = [
                (len(state.drafts), i)
                for i, state in enumerate(states)
                if i not in verify and scheduler.piggybacks(state, len(state.drafts))
            ]
            for _, i in sorted(others)[: self.most_piggyback]:
                states[i].drafts.append(0)
        for i, state in enumerate(states):
            self.waited[i] += i not in late
            if i in verify:
                state.commit([0] * (self.accept(i, len(state.drafts)) + 1))
                # The requests never end.
                state.remaining = 1000
                self.waited[i] = 0
        self.longest_wait = max(self.longest_wait, *self.waited)


def bound_of(count, most):
    """Return the rounds to reach the cap, plus a turn of every request before this one's."""
    return most + count + 5


@every_scheduler
@pytest.mark.parametrize("draft_len", ["auto", 0, 5])
@pytest.mark.parametrize("count", [1, 3, 8, 20])
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_every_request_verifies_within_a_bounded_number_of_rounds(
    new_scheduler, make, draft_len, count, seed
):
    rng = random.Random(seed)
    scheduler, most = new_scheduler(make, draft_len)
    states = make_states(seed, count, most)
    for state in states:
        state.priority = 0
    odds = [rng.choice([0.1, 0.6, 0.95]) for _ in states]

    def accept(i, num_drafts):
        return next((n for n in range(num_drafts) if rng.random() > odds[i]), num_drafts)

    simulated = Simulated(scheduler, states, accept, most_piggyback=64)
    late_for = rng.randint(0, 10)
    for now in range(4 * bound_of(count, most)):
        simulated.round(late={0} if now < late_for and count > 1 else ())
    assert simulated.longest_wait <= bound_of(count, most)


@every_scheduler
@pytest.mark.parametrize(("num_short", "num_long"), [(8, 1), (4, 4)])
def test_requests_that_draft_far_verify_among_requests_that_verify_often(
    new_scheduler, make, num_short, num_long
):
    """Streams whose drafts are all rejected verify every other round. The other requests accept all
    of their drafts, and are due at their caps."""
    scheduler, most = new_scheduler(make)
    states = [request_state(str(i), remaining=1000) for i in range(num_short + num_long)]
    for i, state in enumerate(states):
        state.is_streamed = i < num_short
        for _ in range(20):
            state.acceptance.observe(30, 0 if i < num_short else 30)

    def accept(i, num_drafts):
        return 0 if i < num_short else num_drafts

    simulated = Simulated(scheduler, states, accept, most_piggyback=64)
    for _ in range(4 * bound_of(len(states), most)):
        simulated.round()
    assert simulated.longest_wait <= bound_of(len(states), most)

"""CheckedScheduler: plans of other packages that would harm requests are refused."""

from __future__ import annotations

import pytest

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.core.errors import SchedulerError
from sglang_kvspec.engine.checked_scheduler import CheckedScheduler
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.planning.round_plan import RoundBudget

MOST = 8
NO_PAGES = RoundBudget(0, 0)


class Planned:
    """Plans the same schedule for every batch, and lets all requests piggyback."""

    piggybacks_sampled = True
    link_share = None

    def __init__(self, schedule):
        self.schedule = schedule

    def plan(self, states, late=(), num_drafts=None):
        return self.schedule

    def piggybacks(self, state, num_drafts):
        return True

    def seconds_to_next(self, states, schedule):
        return [1.0]


@pytest.fixture
def states():
    """Room for 6 more drafts, and for 1."""
    return [request_state("a", num_drafts=2), request_state("b", num_drafts=2, remaining=4)]


def checked(*lens, budget=NO_PAGES, **fields):
    return CheckedScheduler("other", Planned(RoundSchedule(list(lens), budget, **fields)), MOST)


def test_a_plan_within_its_bounds_is_passed_on(states):
    scheduler = checked(6, 1, budget=RoundBudget(1, 2), held=frozenset({1}), alone=[1, 1])
    assert scheduler.plan(states) is scheduler.plan(states, late=[0])
    assert scheduler.piggybacks_sampled
    assert scheduler.link_share is None
    assert scheduler.piggybacks(states[0], 7)


@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        (checked(7, 0), "asked for 7 drafts for request a, which has room for 6"),
        (checked(0, 2), "asked for 2 drafts for request b, which has room for 1"),
        (checked(-1, 0), "asked for -1 drafts for request a"),
        (checked(0), "gave 1 draft lengths for a batch of 2"),
        (checked(0, 0, alone=[0, 2]), "asked for 2 drafts for request b"),
        (checked(0, 0, alone=[1]), "gave 1 draft lengths for a batch of 2"),
        (checked(0, 0, held=frozenset({0, 2})), "held request 2 of a batch of 2"),
        (checked(0, 0, budget=RoundBudget(3, 2)), "gave a round 2 pages, and 3 of them"),
    ],
)
def test_a_plan_beyond_its_bounds_is_refused(states, scheduler, told):
    with pytest.raises(SchedulerError, match=f"^--kvspec-schedule other {told}"):
        scheduler.plan(states)


def test_told_numbers_of_drafts_count_in_place_of_those_of_the_states(states):
    assert checked(8, 3).plan(states, num_drafts=[0, 0]).lens == [8, 3]
    with pytest.raises(SchedulerError, match="which has room for 0"):
        checked(1, 0).plan(states, num_drafts=[8, 0])


def test_a_piggyback_draft_beyond_the_cap_is_refused(states):
    with pytest.raises(SchedulerError, match="asked for 1 drafts for request b"):
        checked(0, 0).piggybacks(states[1], 3)


def test_times_of_another_batch_are_refused(states):
    with pytest.raises(SchedulerError, match="gave 1 times for a batch of 2"):
        checked(0, 0).seconds_to_next(states, None)

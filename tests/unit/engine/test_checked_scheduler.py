"""CheckedScheduler refuses plans of other packages that would harm requests."""

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
    """Scheduler that plans the same schedule for every batch, and lets all requests piggyback."""

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
    """Two requests with room for 6 more drafts, and for 1."""
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
        (checked(7, 0), r"planned 7 more drafts for request a \(allowed: 0 to 6\)"),
        (checked(0, 2), r"planned 2 more drafts for request b \(allowed: 0 to 1\)"),
        (checked(-1, 0), "planned -1 more drafts for request a"),
        (checked(0), "returned 1 draft lengths for a batch of 2"),
        (checked(0, 0, alone=[0, 2]), "planned 2 more drafts for request b"),
        (checked(0, 0, alone=[1]), "returned 1 draft lengths for a batch of 2"),
        (checked(0, 0, held=frozenset({0, 2})), "held the request at index 2 of a batch of 2"),
        (
            checked(0, 0, budget=RoundBudget(3, 2)),
            r"planned 3 residual pages for the draft steps of a round \(allowed: 0 to the 2 pages",
        ),
    ],
)
def test_a_plan_beyond_its_bounds_is_refused(states, scheduler, told):
    with pytest.raises(SchedulerError, match=f"^--kvspec-schedule other {told}"):
        scheduler.plan(states)


def test_told_numbers_of_drafts_count_in_place_of_those_of_the_states(states):
    assert checked(8, 3).plan(states, num_drafts=[0, 0]).lens == [8, 3]
    with pytest.raises(SchedulerError, match=r"\(allowed: 0 to 0\)"):
        checked(1, 0).plan(states, num_drafts=[8, 0])


def test_a_piggyback_draft_beyond_the_cap_is_refused(states):
    with pytest.raises(SchedulerError, match="planned 1 more drafts for request b"):
        checked(0, 0).piggybacks(states[1], 3)


def test_times_of_another_batch_are_refused(states):
    with pytest.raises(SchedulerError, match="returned 1 times for a batch of 2"):
        checked(0, 0).seconds_to_next(states, None)

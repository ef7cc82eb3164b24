"""StaggeredScheduler: the requests that verify in a round, and the others that draft."""

from __future__ import annotations

from math import ceil

import pytest

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.engine import staggered_scheduler
from sglang_kvspec.engine.ports import SchedulerParts
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.staggered_scheduler import MOST_STREAMED_DRAFTS, SLACK, StaggeredScheduler
from sglang_kvspec.planning.draft_length import DraftCost, best_draft_len
from sglang_kvspec.planning.round_cost_model import RoundCostModel
from sglang_kvspec.planning.round_plan import RoundBudget
from sglang_kvspec.runtime.ranks import Ranks


@pytest.fixture
def make_scheduler(make_kv):
    def make(draft_len="auto", *, stream="burst", ranks=None, kv=None):
        config = KVSpecConfig(draft_len=draft_len, stream=stream)
        planner = ResidualPlanner(make_kv() if kv is None else kv)
        costs = RoundCostModel(1e-3, 4.0)
        parts = SchedulerParts(config, costs, planner, ranks or Ranks(), DraftCost())
        return StaggeredScheduler(parts)

    return make


def with_drafts(*counts, **fields):
    return [request_state(str(i), num_drafts=n, **fields) for i, n in enumerate(counts)]


def verifying(schedule):
    return [i for i in range(len(schedule.lens)) if i not in schedule.held]


def drafts_to_verify(scheduler, state, most=100):
    """Return the number of drafts with which the request, alone, verifies."""
    for _ in range(most):
        schedule = scheduler.plan([state])
        if not schedule.held:
            return len(state.drafts)
        assert schedule.alone == [1]
        state.drafts.append(0)
    raise AssertionError("the request never verifies")


def poor(state):
    """Record that the target rejected all drafts of the request."""
    for _ in range(20):
        state.acceptance.observe(8, 0)
    return state


def good(state):
    """Record that the target accepted all drafts of the request."""
    for _ in range(20):
        state.acceptance.observe(30, 30)
    return state


# Due requests


@pytest.mark.parametrize("draft_len", ["auto", 1, 5, 64])
@pytest.mark.parametrize("remaining", [100, 6, 3, 2])
def test_a_request_verifies_within_its_cap(make_scheduler, draft_len, remaining):
    scheduler = make_scheduler(draft_len)
    most = min(KVSpecConfig(draft_len=draft_len).max_draft_len, remaining - 1)
    num_drafts = drafts_to_verify(scheduler, request_state(remaining=remaining))
    assert 1 <= num_drafts <= most
    if draft_len != "auto":
        assert num_drafts == most


@pytest.mark.parametrize(("draft_len", "remaining"), [(0, 100), ("auto", 1), (8, 1)])
def test_a_request_without_drafts_to_make_verifies_at_once(make_scheduler, draft_len, remaining):
    schedule = make_scheduler(draft_len).plan([request_state(remaining=remaining)])
    assert not schedule.held
    assert schedule.alone == [0]


def test_a_poor_drafter_verifies_sooner(make_scheduler):
    scheduler = make_scheduler()
    lens = [drafts_to_verify(scheduler, kind(request_state())) for kind in (good, poor)]
    assert lens[1] < lens[0]


def test_requests_are_due_once_they_have_their_best_number_of_drafts(make_scheduler):
    schedule = make_scheduler(8).plan(with_drafts(7, 8, 0, 3))
    assert verifying(schedule) == [1]


def test_given_numbers_of_drafts_count_in_place_of_those_of_the_states(make_scheduler):
    scheduler = make_scheduler(8)
    schedule = scheduler.plan(with_drafts(8, 0), num_drafts=[0, 8])
    assert verifying(schedule) == [1]
    assert schedule.alone == [1, 0]


def test_drafts_are_left_to_verifications_and_rounds_without_one(make_scheduler):
    schedule = make_scheduler(8).plan(with_drafts(8, 3, 0))
    assert schedule.lens == [0, 0, 0]
    assert not schedule.may_advance
    assert schedule.budget.drafting_pages == 0


# Shares and priorities


@pytest.mark.parametrize(
    ("num_requests", "draft_len"), [(1, 8), (4, 8), (9, 8), (10, 8), (40, 8), (9, 0), (7, 1)]
)
def test_an_even_share_of_the_requests_verifies_in_a_round(make_scheduler, num_requests, draft_len):
    states = with_drafts(*[draft_len] * num_requests)
    schedule = make_scheduler(draft_len).plan(states)
    share = ceil(SLACK * num_requests / (draft_len + 1))
    assert len(verifying(schedule)) == min(share, num_requests)
    assert share > num_requests / (draft_len + 1), "verifications must keep up with drafts"


def test_the_most_overdue_requests_verify_first(make_scheduler):
    scheduler = make_scheduler()
    best = drafts_to_verify(scheduler, request_state())
    states = with_drafts(*[best + i % 4 for i in range(6)])
    schedule = scheduler.plan(states)
    assert len(verifying(schedule)) == ceil(SLACK * 6 / (best + 1)) == 1
    assert verifying(schedule) == [3]


def test_the_urgent_verify_before_the_overdue(make_scheduler):
    states = with_drafts(*[8] * 6)
    assert verifying(make_scheduler(8).plan(states)) == [0]
    states[4].priority = 1
    assert verifying(make_scheduler(8).plan(states)) == [4]


def test_requests_that_begin_together_are_staggered(make_scheduler):
    scheduler, states = make_scheduler(8), with_drafts(*[0] * 9)
    sizes = []
    for _ in range(60):
        schedule = scheduler.plan(states)
        turn = verifying(schedule)
        for i, state in enumerate(states):
            if i in turn:
                state.commit([0])
            elif schedule.alone[i]:
                state.drafts.append(0)
        sizes.append(len(turn))
    assert max(sizes) <= ceil(SLACK * 9 / 9) == 2
    assert sum(sizes) >= 9 * (60 // (8 + 1 + 4))


# Late requests, requests that have waited, and tails


def test_late_requests_do_not_verify_and_draft_up_to_their_caps(make_scheduler):
    scheduler = make_scheduler(8)
    schedule = scheduler.plan(with_drafts(8, 8, 3), late=[0, 2])
    assert verifying(schedule) == [1]
    assert schedule.alone == [0, 0, 1]
    assert scheduler.plan(with_drafts(8), late=[0]).held == {0}


@pytest.mark.parametrize("num_drafts", [1, 5, 8])
def test_a_request_that_has_waited_verifies_the_drafts_it_has(make_scheduler, num_drafts):
    (state,) = with_drafts(num_drafts)
    state.has_waited = True
    scheduler = make_scheduler(8)
    assert scheduler.plan([state], late=[0]).held == {0}
    assert not scheduler.plan([state]).held
    # From then on the request drafts as any other.
    state.commit([0])
    assert drafts_to_verify(scheduler, state) == 8


def test_a_request_that_has_waited_without_drafts_makes_one_first(make_scheduler):
    (state,) = with_drafts(0)
    state.has_waited = True
    assert drafts_to_verify(make_scheduler(8), state) == 1


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_a_request_that_started_on_anchors_verifies_once_residuals_have_come(
    make_scheduler, num_drafts
):
    (state,) = with_drafts(num_drafts)
    state.tail, state.has_waited = [0], True
    scheduler = make_scheduler(8)
    late = scheduler.plan([state], late=[0])
    assert (late.held, late.alone) == ({0}, [1])
    assert not scheduler.plan([state]).held


# Piggyback drafts


def test_requests_piggyback_as_long_as_they_have_room(make_scheduler):
    scheduler = make_scheduler(8)
    (state,) = with_drafts(0)
    assert [n for n in range(12) if scheduler.piggybacks(state, n)] == list(range(8))
    state.remaining = 4
    assert [n for n in range(12) if scheduler.piggybacks(state, n)] == [0, 1, 2]
    assert scheduler.piggybacks_sampled


def test_requests_draft_alone_only_with_room(make_scheduler):
    states = with_drafts(8, 7, 0)
    states[2].remaining = 1
    assert make_scheduler(8).plan(states, late=range(3)).alone == [0, 1, 0]


# Paced streams


@pytest.mark.parametrize(("last_emitted", "longest"), [(1, 1), (2, 2), (4, 5), (5, 6), (20, 6)])
def test_paced_tokens_fill_the_time_until_the_next_verification(
    make_scheduler, last_emitted, longest
):
    lens = {}
    for stream in ("paced", "burst"):
        state = good(request_state())
        state.is_streamed, state.last_emitted = True, last_emitted
        lens[stream] = drafts_to_verify(make_scheduler(stream=stream), state)
    assert lens["paced"] == longest < lens["burst"]
    assert longest <= MOST_STREAMED_DRAFTS


@pytest.mark.parametrize(("is_streamed", "draft_len"), [(False, "auto"), (True, 16)])
def test_only_streamed_requests_with_automatic_lengths_are_paced(
    make_scheduler, is_streamed, draft_len
):
    paced, burst = (good(request_state()) for _ in range(2))
    for state in (paced, burst):
        state.is_streamed = is_streamed
    assert drafts_to_verify(make_scheduler(draft_len, stream="paced"), paced) == drafts_to_verify(
        make_scheduler(draft_len), burst
    )


def test_a_request_is_expected_again_after_its_drafts_and_a_verification(make_scheduler):
    scheduler = make_scheduler(5)
    round_s = scheduler._planner.speeds.iteration_s
    states = with_drafts(3, 0)
    states[1].remaining = 3
    expected = [6 * round_s, 3 * round_s]
    assert scheduler.seconds_to_next(states, None) == pytest.approx(expected)


def test_a_best_length_is_searched_once_until_the_request_verifies(make_scheduler, monkeypatch):
    searched = []

    def search(probability, most, cost):
        searched.append(most)
        return best_draft_len(probability, most, cost)

    monkeypatch.setattr(staggered_scheduler, "best_draft_len", search)
    scheduler, (state,) = make_scheduler(stream="paced"), with_drafts(0)
    state.is_streamed = True
    for _ in range(2):
        scheduler.seconds_to_next([state], scheduler.plan([state]))
        state.drafts.append(0)
    assert len(searched) == 1
    state.commit([0, 0, 0])
    scheduler.seconds_to_next([state], scheduler.plan([state]))
    assert len(searched) == 2


# Ranks


def test_verifications_and_the_budget_are_those_of_the_first_rank(make_scheduler, make_kv):
    sent = []

    class Second(Ranks):
        def numbers(self, mine, about):
            sent.append((list(mine), list(about)))
            return [0, 1, 1, 7]

    scheduler = make_scheduler(8, ranks=Second(1, 2))
    states = with_drafts(8, 8, 0)
    schedule = scheduler.plan(states)
    assert schedule.held == {0}
    assert schedule.budget == RoundBudget(0, 7)
    pages = scheduler._planner.pages_in(scheduler._planner.speeds.iteration_s)
    assert sent == [([1, 0, 0, pages], [(str(i), 64) for i in range(3)])]


def test_the_link_moves_what_it_was_seen_to_move_in_a_round(make_scheduler, make_kv, monkeypatch):
    kv = make_kv()
    # The link moved ten pages a second, in rounds of two seconds.
    fetches = [(1000 * kv.plan.page_bytes.residual, 100.0)] * 3
    monkeypatch.setattr(kv.residuals, "take_fetch_times", lambda: fetches)
    scheduler = make_scheduler(8, kv=kv)
    for _ in range(200):
        scheduler._planner.speeds.note_iteration(2.05)
    assert scheduler.plan(with_drafts(0)).budget == RoundBudget(0, 20)

"""RoundScheduler: draft lengths of a round, late requests, and piggyback drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.engine.ports import SchedulerParts
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.round_scheduler import FIRST_DRAFT_LEN, LATE_STEPS, RoundScheduler
from sglang_kvspec.planning.draft_length import DraftCost
from sglang_kvspec.planning.link_rounds import Turns
from sglang_kvspec.planning.rounds import RoundCost
from sglang_kvspec.runtime.ranks import Ranks

SIZE = 32


def of_pages(rid, num_pages, num_drafts=0):
    return request_state(rid, committed_len=num_pages * SIZE, num_drafts=num_drafts)


def make_scheduler(kv, measured, draft_len="auto", host_gb=None, **limits):
    # Costs where verifying reads much more than drafting.
    cost = RoundCost(step=4e-3, row=0.3e-3, request=1.2e-3, token=0.02e-3)
    clock = SimpleNamespace(has_measured=measured, cost=lambda *_: cost)
    config = KVSpecConfig(draft_len=draft_len, host_gb=host_gb)
    planner = ResidualPlanner(kv)
    return RoundScheduler(SchedulerParts(config, clock, planner, Ranks(), DraftCost(), **limits))


def test_a_late_request_has_no_say_in_what_others_draft(encoded):
    scheduler = make_scheduler(encoded(1), measured=True)
    states = [of_pages("a", 4), of_pages("b", 4)]
    alone = scheduler.plan(states).lens
    assert 0 < max(alone) < 32
    many = [of_pages(str(n), 4) for n in range(6)]
    crowded = scheduler.plan([*states, *many], range(2, 8)).lens
    assert crowded[:2] == alone
    assert crowded[2:] == [max(*alone, LATE_STEPS)] * 6


@pytest.mark.parametrize("measured", [True, False])
def test_auto_drafts_no_more_than_one_pass_verifies(encoded, measured):
    states = [of_pages("a", 4), of_pages("b", 4)]
    free = make_scheduler(encoded(1), measured).plan(states).lens
    assert min(free) > 2
    assert make_scheduler(encoded(1), measured, most_auto_drafts=2).plan(states).lens == [2, 2]
    # An asked length is kept.
    asked = make_scheduler(encoded(1), measured, draft_len=9, most_auto_drafts=2)
    assert asked.plan(states).lens == [9, 9]


def test_a_late_request_drafts_up_to_its_cap(encoded):
    scheduler = make_scheduler(encoded(1), measured=True)
    nearly, at_cap = of_pages("a", 4, num_drafts=29), of_pages("b", 4, num_drafts=31)
    near_its_end = request_state("c", committed_len=64, remaining=3)
    assert scheduler.plan([nearly, at_cap, near_its_end], range(3)).lens == [2, 0, 2]
    assert scheduler.plan([of_pages("d", 4)], [0]).lens == [LATE_STEPS]


def test_requests_draft_longer_only_while_residuals_move(encoded, monkeypatch):
    scheduler = make_scheduler(encoded(1), measured=True, host_gb=1)
    waiting = [of_pages("a", 4, num_drafts=29), of_pages("b", 4, num_drafts=61)]
    assert scheduler.plan(waiting, range(2)).lens == [2, 0]
    assert not scheduler.piggybacks(waiting[0], 31)
    monkeypatch.setattr(scheduler._planner, "turns", lambda: Turns(0, 2.0, 1e-3))
    assert scheduler.plan(waiting, range(2)).lens == [LATE_STEPS, 2]
    assert scheduler.piggybacks(waiting[0], 31)


@pytest.mark.parametrize(("measured", "draft_len"), [(True, "auto"), (False, "auto"), (True, 16)])
def test_a_request_whose_residuals_have_come_verifies_the_drafts_it_has(
    encoded, measured, draft_len
):
    scheduler = make_scheduler(encoded(1), measured, draft_len)
    states = [of_pages("a", 4, num_drafts=5), of_pages("b", 4)]
    for state in states:
        state.has_waited = True
    assert scheduler.plan(states).lens[0] == 0
    # From then on the request drafts as any other.
    states[0].commit([1])
    assert min(scheduler.plan(states).lens) > 0


@pytest.mark.parametrize("draft_len", ["auto", 8])
def test_lengths_chosen_before_drafts_are_verified_are_those_of_after(encoded, draft_len):
    scheduler = make_scheduler(encoded(1), True, draft_len)
    states = [of_pages("a", 4, num_drafts=30), of_pages("b", 4)]
    before = scheduler.plan(states, num_drafts=[0, 0]).lens
    assert before != scheduler.plan(states).lens
    states[0].drafts.clear()
    assert before == scheduler.plan(states).lens


def test_a_waiting_request_drafts_on_where_requests_take_turns(encoded, monkeypatch):
    """The residuals of the request have arrived, but not all of them are in the cache."""
    scheduler = make_scheduler(encoded(1), measured=False)
    state = of_pages("a", 4, num_drafts=5)
    state.has_waited = True
    assert scheduler.plan([state]).lens == [0]
    monkeypatch.setattr(ResidualPlanner, "turns", lambda self: Turns(0, 1.0, 1.0))
    assert scheduler.plan([state]).lens == [FIRST_DRAFT_LEN]


def test_a_late_request_drafts_as_others_do_before_anything_was_measured(encoded):
    scheduler = make_scheduler(encoded(1), measured=False)
    states = [of_pages("a", 4), of_pages("b", 4)]
    assert scheduler.plan(states, [1]).lens == [FIRST_DRAFT_LEN] * 2

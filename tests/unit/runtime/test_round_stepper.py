"""RoundStepper: what the planner of rounds is told about requests and pools, and moves applied."""

from __future__ import annotations

import pytest
import torch

from kvspec_testkit.runtime.states import request_state
from sglang_kvspec.planning.link_estimate import GUESSED_BYTES_PER_S
from sglang_kvspec.planning.round_step import RoundBudget
from sglang_kvspec.planning.rounds import RoundCost
from sglang_kvspec.pools.residual_table import ResidualState
from sglang_kvspec.runtime.round_stepper import RoundStepper

SIZE = 32
PLENTY = RoundBudget(100, 100)


def of_pages(rid, num_pages, num_drafts=0):
    return request_state(rid, committed_len=num_pages * SIZE, num_drafts=num_drafts)


def pages(*ids):
    return torch.tensor(ids, dtype=torch.int64)


@pytest.mark.parametrize("pools", [{"store": False}, {"cache_pages": 0}, {"cache_pages": 12}])
def test_everybody_verifies_where_nothing_moves(encoded, pools):
    kv = encoded(6, **pools)
    states = [of_pages("a", 3), of_pages("b", 3)]
    plan = RoundStepper(kv).plan(states, [pages(1, 2, 3, 7), pages(4, 5, 6, 8)], [4, 4], PLENTY)
    assert plan.verify == (0, 1)
    assert kv.residuals.bytes_fetched == 0


def test_pages_are_fetched_and_others_make_room(encoded):
    kv = encoded(6, cache_pages=4)
    stepper, ids = RoundStepper(kv), [pages(5, 6, 7), pages(1, 2, 3, 4, 8)]
    states = [of_pages("a", 2), of_pages("b", 4)]
    # Four slots hold one of both at a time. Only verified pages count: 7 and 8 have no residual.
    plan = stepper.plan(states, ids, [4, 4], PLENTY)
    assert len(plan.verify) == 1
    stepper.await_fetches(plan, ids)
    read = ids[plan.verify[0]][: len(ids[plan.verify[0]]) - 1].tolist()
    assert all(kv.residuals.table.state(page) is ResidualState.RESIDENT for page in read)
    other = stepper.plan(states, ids, [0, 0], PLENTY)
    assert other.verify != plan.verify
    kv.check_integrity()


def test_who_is_about_to_leave_is_not_planned_for(encoded):
    kv = encoded(6, cache_pages=3)
    stepper, ids = RoundStepper(kv), [pages(1, 2, 7), pages(3, 4, 8), pages(5, 6, 9)]
    states = [of_pages("a", 2), of_pages("b", 2), of_pages("c", 2)]
    states[0].remaining = 0
    kv.residuals.evict(kv.residuals.table.pages_in(range(1, 7), ResidualState.RESIDENT))
    plan = stepper.plan_ahead(states, ids, [4, 4, 4], PLENTY)
    # Their indices are those of the batch.
    assert plan.verify == (1,)
    assert set(plan.fetch) == {3, 4}
    kv.check_integrity()


def test_what_comes_ahead_is_fetched_once_it_is_known_that_nobody_has_come(encoded):
    kv = encoded(6, cache_pages=5)
    stepper, ids = RoundStepper(kv), [pages(1, 2, 7), pages(3, 4, 8), pages(5, 6, 9)]
    table = kv.residuals.table
    kv.residuals.evict(table.pages_in(range(1, 7), ResidualState.RESIDENT))
    budget = RoundBudget(2, 5)
    plan = stepper.plan_ahead([of_pages(r, 2) for r in "abc"], ids, [4, 4, 4], budget)
    assert len(plan.fetch) == 2
    assert len(plan.ahead) == 3
    assert set(table.pages_in(range(1, 7), ResidualState.STORED)) >= set(plan.ahead)
    # Somebody else has freed one meanwhile, and another one's slot is taken.
    kv.free_pages(plan.ahead[:1])
    stepper.fetch_ahead(plan)
    assert not table.pages_in(plan.ahead, ResidualState.STORED)
    kv.check_integrity()


def test_a_plan_that_is_taken_back_was_nobodys_turn(encoded):
    kv = encoded(4, cache_pages=2)
    ids, states = [pages(1, 2, 5), pages(3, 4, 6)], [of_pages("a", 2), of_pages("b", 2)]
    stepper = RoundStepper(kv)
    first = stepper.plan_ahead(states, ids, [4, 4], PLENTY).verify
    stepper.take_back()
    assert stepper.plan(states, ids, [4, 4], PLENTY).verify == first
    assert stepper.plan(states, ids, [4, 4], PLENTY).verify != first


def test_ranks_plan_alike_whose_fetches_end_at_different_times(encoded, monkeypatch):
    """The last pages that were away are on their way; on one rank they have arrived."""
    states, ids = [of_pages("a", 1), of_pages("b", 3)], [pages(1, 5), pages(2, 3, 4, 6)]
    budgets = [RoundBudget(0, 1), RoundBudget(0, 1), RoundBudget(0, 0)]
    plans = []
    for is_slow in (False, True):
        kv = encoded(4, cache_pages=4)
        kv.residuals.evict([4])
        stepper = RoundStepper(kv)
        if is_slow:
            monkeypatch.setattr(kv.residuals, "finish_fetches", lambda: None)
        plans.append([stepper.plan(states, ids, [4, 4], budget) for budget in budgets])
        assert kv.residuals.table.counts()["FETCHING"] == is_slow
        plans[-1].append(stepper._planner._learnt)
    assert plans[0] == plans[1]


def test_room_is_kept_for_pages_that_verifications_fill(encoded):
    kv = encoded(4, cache_pages=4)
    ids = [pages(1, 2, 5, 6), pages(3, 4, 7, 8)]
    short = [of_pages("a", 2, num_drafts=3), of_pages("b", 2)]
    assert RoundStepper(kv).plan(short, ids, [27, 4], PLENTY).verify == (0, 1)
    # One more draft and the pending token's page is full.
    assert len(RoundStepper(kv).plan(short, ids, [28, 4], PLENTY).verify) == 1


def test_the_budget_is_what_the_link_was_seen_to_move_meanwhile(encoded, monkeypatch):
    kv = encoded(1)
    page_bytes = kv.plan.page_bytes.residual
    cost = RoundCost(step=1.0, row=0.1, request=0.5, token=0.0)
    stepper = RoundStepper(kv)
    assert stepper.budget([3, 1], cost).round_pages == int(5.4 * GUESSED_BYTES_PER_S / page_bytes)
    # Ten pages a second.
    fetches = [(1000 * page_bytes, 100.0)] * 3
    monkeypatch.setattr(kv.residuals, "take_fetch_times", lambda: fetches)
    # Drafts: 3 steps and 4 rows; then a step and two requests.
    assert stepper.budget([3, 1], cost) == RoundBudget(34, 54)
    assert stepper.budget([0, 0], cost) == RoundBudget(0, 20)

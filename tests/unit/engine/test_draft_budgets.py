"""Budgets of requests by their own acceptance."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvspec.engine.draft_budgets import AutoBudgets, OneBudget
from sglang_kvspec.planning.draft_budget import ALL_PAGES, BUDGETS
from sglang_kvspec.planning.rounds import RoundCost
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams

PAGE = 64


def state(rid="r", num_tokens=32768):
    return RequestState(rid, num_tokens, 0, [], SamplingParams(), 10_000)


def budgets(row_s=1e-3, ranks=None):
    def cost(context):
        return RoundCost(4e-3, row_s * context / 32768, 2e-3 * context / 32768, 0.0)

    clock = SimpleNamespace(cost=cost)
    return AutoBudgets(BUDGETS, clock, ranks or Ranks(), PAGE)


def play(chooser, request, accepted_of, rounds=200):
    """Let the request verify rounds of 16 drafts. Return its budgets."""
    chosen = []
    for _ in range(rounds):
        chooser.choose([request])
        chosen.append(request.budget)
        request.drafts = [0] * 16
        request.commit([0] * (accepted_of(request.budget) + 1))
    return chosen


def test_acceptance_decides():
    needs_all = play(budgets(), state(), lambda budget: 16 if budget == ALL_PAGES else 1)
    assert needs_all[50:].count(ALL_PAGES) > 120
    needs_few = play(budgets(), state(), lambda budget: 14)
    assert ALL_PAGES not in needs_few[1:]


def test_a_budget_is_tried_again():
    turned = []

    def accepted(budget):
        turned.append(budget)
        return 14 if len(turned) > 60 or budget == ALL_PAGES else 1

    chosen = play(budgets(), state(), accepted, 400)
    assert chosen[40:60].count(ALL_PAGES) > 10
    assert chosen[-50:].count(ALL_PAGES) < 10


def test_where_reading_costs_nothing_all_pages_are_read():
    assert set(play(budgets(row_s=0.0), state(), lambda budget: 14)) == {ALL_PAGES}


def test_the_scheduler_sees_the_acceptance_of_the_present_budget():
    request, chooser = state(), budgets()
    play(chooser, request, lambda budget: 9, 20)
    assert request.acceptance is request.estimates[request.budget]


class OtherRank(Ranks):
    """Rank that is told what rank 0 has decided."""

    def numbers(self, values, about=()):
        return [BUDGETS.index(0.2)] * len(values)


def test_rank_0_decides():
    requests = [state("a"), state("b", 640)]
    budgets(ranks=OtherRank()).choose(requests)
    assert [request.budget for request in requests] == [0.2, 0.2]


@pytest.mark.parametrize("states", [[], [state()]])
def test_one_budget_for_all(states):
    OneBudget(0.3).choose(states)
    AutoBudgets(BUDGETS, SimpleNamespace(cost=None), Ranks(), PAGE).choose([])
    assert all(request.budget == 0.3 for request in states)

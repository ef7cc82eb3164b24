"""Choice of the share of pages that a request's drafts read."""

from __future__ import annotations

import pytest

from sglang_kvspec.planning.draft_budget import (
    ALL_PAGES,
    BUDGETS,
    allowed_budgets,
    best_budget,
    estimate_of,
    share_read,
)
from sglang_kvspec.planning.rounds import RoundCost

# Measured on an H200 with the 8B shape and 16 requests of 32K tokens.
STEP_S, ROW_S, REQUEST_S = 4.6e-3, 0.3e-3, 0.6e-3
PAGES = 512


def cost(context_pages):
    share = context_pages / PAGES
    return RoundCost(STEP_S, ROW_S * share, REQUEST_S * share, token=1e-5)


def priors():
    return {budget: estimate_of(budget).probability for budget in BUDGETS}


def test_long_contexts_read_a_share_at_first():
    assert best_budget(ALL_PAGES, priors(), PAGES, cost(PAGES), 16) < ALL_PAGES


@pytest.mark.parametrize("num_pages", [1, 8, 32])
def test_short_contexts_read_all_pages(num_pages):
    assert best_budget(ALL_PAGES, priors(), num_pages, cost(num_pages), 16) == ALL_PAGES


def test_a_request_whose_drafts_need_all_pages_reads_them():
    poor = {budget: 0.6 for budget in BUDGETS} | {ALL_PAGES: 0.98}
    assert best_budget(0.1, poor, PAGES, cost(PAGES), 16) == ALL_PAGES


def test_equal_acceptance_makes_the_smallest_budget_best():
    equal = dict.fromkeys(BUDGETS, 0.95)
    assert best_budget(ALL_PAGES, equal, PAGES, cost(PAGES), 16) == min(BUDGETS)


def test_a_small_gain_changes_nothing():
    same = dict.fromkeys(BUDGETS, 0.95)
    nothing = RoundCost(STEP_S, 0.0, 0.0, 0.0)
    assert best_budget(0.2, same, PAGES, nothing, 1) == 0.2


def test_a_budget_that_is_not_allowed_is_left():
    assert best_budget(ALL_PAGES, {0.1: 0.9}, PAGES, cost(PAGES), 1) == 0.1


def test_budgets_that_flags_allow():
    assert allowed_budgets(None, may_read_all=True) == BUDGETS
    assert allowed_budgets(None, may_read_all=False) == BUDGETS[:-1]
    assert allowed_budgets(0.3, may_read_all=True) == (0.3, ALL_PAGES)
    assert allowed_budgets(ALL_PAGES, may_read_all=True) == (ALL_PAGES,)


def test_an_estimate_begins_as_that_of_the_next_smaller_budget():
    assert estimate_of(0.02) == estimate_of(0.05)
    assert estimate_of(0.3) == estimate_of(0.2)
    assert estimate_of(0.05).probability < estimate_of(0.2).probability
    assert share_read(0.1, 5) < share_read(0.1, 3) == ALL_PAGES

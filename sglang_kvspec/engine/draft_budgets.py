"""Budgets of requests: the share of its pages that a request's drafts read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_kvspec.planning.draft_budget import ALL_PAGES, best_budget, estimate_of
from sglang_kvspec.planning.round_cost_model import RoundCostModel
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.request_state import RequestState


class DraftBudgets(Protocol):
    """Choice of the budgets of requests."""

    def choose(self, states: Sequence[RequestState]) -> None:
        """Set `budget` and `acceptance` of states for their next drafts. All ranks choose alike."""


class OneBudget:
    """Choice of one budget for all requests: all pages, unless a draft view reads a share."""

    def __init__(self, budget: float = ALL_PAGES) -> None:
        self._budget = budget

    def choose(self, states: Sequence[RequestState]) -> None:
        for state in states:
            state.budget = self._budget


class AutoBudgets:
    """The budget with the most expected tokens a second, by what the target accepted of the
    request's drafts at each budget, and by measured times of rounds.

    The estimate of a budget that is not used moves towards its prior. So a request tries other
    budgets again from time to time.
    """

    def __init__(
        self, allowed: Sequence[float], clock: RoundCostModel, ranks: Ranks, page_size: int
    ) -> None:
        """allowed: budgets to choose from, at least one."""
        self._allowed, self._clock = tuple(allowed), clock
        self._ranks, self._page_size = ranks, page_size

    def choose(self, states: Sequence[RequestState]) -> None:
        if not states:
            return
        for state in states:
            if not state.estimates:
                state.estimates = {budget: estimate_of(budget) for budget in self._allowed}
        places = [self._allowed.index(self._best(state, len(states))) for state in states]
        # Ranks measure different times but must do the same: rank 0 decides.
        about = [(state.rid, state.committed_len) for state in states]
        for state, place in zip(states, self._ranks.numbers(places, about=about), strict=True):
            state.budget = self._allowed[place]
            state.acceptance = state.estimates[state.budget]

    def _best(self, state: RequestState, num_requests: int) -> float:
        probabilities = {
            budget: estimate.probability for budget, estimate in state.estimates.items()
        }
        num_pages = state.committed_len // self._page_size
        cost = self._clock.cost(state.committed_len)
        return best_budget(state.budget, probabilities, num_pages, cost, num_requests)

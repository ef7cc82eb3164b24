"""Choice of the share of its pages that a request's drafts read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from sglang_kvspec.planning.draft_length import AcceptanceEstimate, expected_tokens
from sglang_kvspec.planning.rounds import RoundCost

Known = TypeVar("Known")

ALL_PAGES = 1.0
# Accepted and rejected drafts that a budget's estimate begins with. On eval-31m with 32K tokens of
# context, drafts that read a tenth of the pages were rejected twice as often as others.
PRIORS: Mapping[float, tuple[float, float]] = {
    0.05: (19.0, 1.5),
    0.1: (19.0, 1.25),
    0.2: (19.0, 1.1),
    ALL_PAGES: (19.0, 1.0),
}
BUDGETS = tuple(PRIORS)
# Pages that are read at any budget: the first ones, which draw much attention with any text, and
# the newest.
SINK_PAGES, NEWEST_PAGES = 1, 2
# Time of scoring all pages of a request, relative to a draft that reads all of them: 0.87 to 0.91
# with 4 queries on an H200 (benchmarks/results/page_selection.json).
SCORE_READS = 0.9
# Chance that a draft which the target would accept from all anchors is accepted from a share of the
# pages too: eval-31m after 16K tokens (benchmarks/results/views_eval31m_16k*.json).
KEPT_DRAFTS: Mapping[float, float] = {0.05: 0.988, 0.1: 0.9925, ALL_PAGES: 1.0}
# Share of the attention mass that drafts read: eval-31m after 32K tokens, as above
# (benchmarks/results/views_eval31m_32k.json).
MASS_READ: Mapping[float, float] = {0.05: 0.76, 0.1: 0.81, 0.2: 0.86, ALL_PAGES: 1.0}
# Draft lengths to compare budgets at.
LENGTHS = (4, 8, 12, 16, 24)
# Gain for which a request changes its budget. Less is within the error of an estimate.
LEAST_GAIN = 1.02


def estimate_of(budget: float) -> AcceptanceEstimate:
    """Return the estimate of a budget that was not tried yet. Budgets between those of PRIORS begin
    like the next smaller one."""
    prior = _of_budget(PRIORS, budget)
    return AcceptanceEstimate(*prior, prior)


def kept_drafts(budget: float) -> float:
    """Return the value of KEPT_DRAFTS for a budget. Budgets between count like the next smaller
    one."""
    return _of_budget(KEPT_DRAFTS, budget)


def mass_read(budget: float) -> float:
    """Return the value of MASS_READ for a budget. Budgets between count like the next smaller
    one."""
    return _of_budget(MASS_READ, budget)


def best_budget(
    current: float,
    probabilities: Mapping[float, float],
    num_pages: int,
    cost: RoundCost,
    num_requests: int,
) -> float:
    """Return the budget with the most expected tokens a second.

    probabilities: by allowed budget, the chance that the target agrees with one more draft.
    num_pages: of the request. cost: of a round in which drafts read all pages. num_requests:
    requests that share a round's steps.
    """
    rates, larger = {}, 1.0
    for budget in sorted(probabilities, reverse=True):
        # Drafts that read less are not accepted more often: that would be an error of estimates.
        larger = min(larger, probabilities[budget])
        rates[budget] = _rate(larger, share_read(budget, num_pages), cost, num_requests)
    best = max(rates, key=lambda budget: rates[budget])
    if current in rates and rates[best] < LEAST_GAIN * rates[current]:
        return current
    return best


def share_read(budget: float, num_pages: int) -> float:
    """Return the share of num_pages pages that drafts read at a budget."""
    return min(budget + (SINK_PAGES + NEWEST_PAGES) / max(num_pages, 1), ALL_PAGES)


def _of_budget(known: Mapping[float, Known], budget: float) -> Known:
    return known[max((each for each in known if each <= budget), default=min(known))]


def _rate(probability: float, share: float, cost: RoundCost, num_requests: int) -> float:
    """Return a request's tokens by the seconds that a round takes for it, at the best length."""
    step_s, target_s = cost.step / num_requests, cost.target / num_requests
    score_s = 0.0 if share == ALL_PAGES else SCORE_READS * cost.row
    return max(
        expected_tokens(probability, n)
        / (
            step_s * n
            + target_s
            + cost.token * (n + 1)
            + cost.request
            + score_s
            + n * share * cost.row
        )
        for n in LENGTHS
    )


def allowed_budgets(budget: float | None, *, may_read_all: bool) -> Sequence[float]:
    """Return the budgets to choose from. budget: of --kvspec-draft-budget, None for auto.
    may_read_all: also all pages."""
    chosen = [each for each in BUDGETS if each < ALL_PAGES] if budget is None else [budget]
    return (*chosen, ALL_PAGES) if may_read_all and ALL_PAGES not in chosen else tuple(chosen)

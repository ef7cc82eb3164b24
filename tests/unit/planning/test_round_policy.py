"""Draft length `auto` compared with a fixed length, with the measured acceptance."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.planning.costs import AcceptanceCurve
from sglang_kvspec.planning.draft_length import AcceptanceEstimate
from sglang_kvspec.planning.round_cost_model import RoundCostModel
from sglang_kvspec.planning.rounds import RoundCost, RoundRequest, plan_round

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results/acceptance.json"
FIXED_LEN = 16
CAP_LEN = KVSpecConfig().max_draft_len
BATCH, ROUNDS, WARM_UP = 16, 250, 50
# Milliseconds of an 8B model: at 32K tokens of context, and at a context so short that weights are
# almost all there is to read.
LONG = RoundCost(step=4.0, row=0.33, request=0.6, token=0.02)
SHORT = RoundCost(step=4.0, row=0.01, request=0.02, token=0.02)
# A model whose step costs less than reading all requests' contexts.
SMALL_MODEL = RoundCost(step=1.0, row=0.1, request=0.2, token=0.01)

curves = pytest.mark.parametrize("curve", ["log4", "log4_int8", "uniform4", "uniform4_int8"])
costs = pytest.mark.parametrize(
    "cost", [LONG, SHORT, SMALL_MODEL], ids=["long", "short", "small model"]
)


def measured_curve(name):
    prefix = f"accept.{name}.mean_of_"
    figures = json.loads(RESULTS.read_text(encoding="utf-8"))["figures"]
    means = {
        int(figure["name"].removeprefix(prefix)): figure["value"]
        for figure in figures
        if figure["name"].startswith(prefix)
    }
    return AcceptanceCurve.from_means(means)


def survival(curve):
    """Return the chance that the first j drafts are all accepted, for j = 1 .. CAP_LEN."""
    means = [curve.expected_accepted(length) for length in range(CAP_LEN + 1)]
    return [after - before for before, after in itertools.pairwise(means)]


class Crowd:
    """A batch whose drafts are accepted as a curve says, with an estimate for each request."""

    def __init__(self, curve, seed):
        self._curve, self._survival = curve, survival(curve)
        self._rng = random.Random(seed)
        self._estimates = [AcceptanceEstimate() for _ in range(BATCH)]

    @property
    def requests(self):
        return [RoundRequest(estimate.probability, CAP_LEN) for estimate in self._estimates]

    def verify(self, lens):
        """Return the expected tokens of these lengths. The estimates observe random draws."""
        for estimate, length in zip(self._estimates, lens, strict=True):
            luck = self._rng.random()
            estimate.observe(length, sum(luck < chance for chance in self._survival[:length]))
        return sum(map(self._curve.expected_tokens, lens))


def rate_of(curve, cost, seed, plan):
    """Return the expected tokens a second with lengths by plan(requests), after a warm-up."""
    crowd, tokens, seconds = Crowd(curve, seed), 0.0, 0.0
    for number in range(ROUNDS):
        lens = plan(crowd.requests)
        new = crowd.verify(lens)
        if number >= WARM_UP:
            tokens += new
            seconds += cost.seconds(lens)
    return tokens / seconds


def best_fixed_rate(curve, cost):
    rates = [
        BATCH * curve.expected_tokens(length) / cost.seconds([length] * BATCH)
        for length in range(CAP_LEN + 1)
    ]
    return rates[FIXED_LEN], max(rates)


@curves
@costs
@pytest.mark.parametrize("seed", [0, 1])
def test_auto_is_no_worse_than_a_fixed_length(curve, cost, seed):
    curve = measured_curve(curve)
    auto = rate_of(curve, cost, seed, lambda requests: plan_round(requests, cost))
    fixed, best = best_fixed_rate(curve, cost)
    assert auto >= 0.97 * fixed
    # Also compare with the best fixed length for this curve and cost.
    assert auto >= 0.95 * best


@curves
@costs
def test_auto_that_learns_its_costs_is_no_worse_either(curve, cost):
    """The step guess is 3 % off, measurements are 2 % off, and drafts are tried again where
    drafting stopped."""
    curve, rng = measured_curve(curve), random.Random(7)
    context = 32768.0
    clock = RoundCostModel(cost.step * 1.03, cost.request / cost.row)

    def plan(requests):
        lens = [8] * BATCH
        if clock.has_measured:
            lens = plan_round(requests, clock.cost(context))
        draft_s = cost.step * max(lens) + cost.row * sum(lens)
        verify_s = cost.seconds(lens) - draft_s
        clock.observe(lens, context, draft_s * rng.gauss(1, 0.02), verify_s * rng.gauss(1, 0.02))
        return lens

    fixed, _ = best_fixed_rate(curve, cost)
    assert rate_of(curve, cost, 3, plan) >= 0.97 * fixed


@curves
def test_curves_are_those_of_a_survival(curve):
    chances = survival(measured_curve(curve))
    assert chances[0] == pytest.approx(measured_curve(curve).expected_accepted(1))
    assert all(0 < after <= before + 0.02 for before, after in itertools.pairwise(chances))
    assert sum(chances) == pytest.approx(measured_curve(curve).expected_accepted(CAP_LEN))


def test_too_long_and_too_short_drafts_fail_the_comparison():
    curve = measured_curve("uniform4")
    fixed, _ = best_fixed_rate(curve, LONG)
    assert rate_of(curve, LONG, 0, lambda requests: [CAP_LEN] * BATCH) < 0.97 * fixed
    assert rate_of(curve, LONG, 0, lambda requests: [0] * BATCH) < 0.97 * fixed

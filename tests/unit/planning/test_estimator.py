"""Costs learnt online: they converge to the truth, and a stall does not move them far."""

from __future__ import annotations

import random

import pytest

from sglang_kvspec.planning.costs import IterationCosts
from sglang_kvspec.planning.estimator import CostEstimate, Rows

GUESS = IterationCosts(
    overhead_s=1e-3,
    weights_s=4e-3,
    token_s=1e-6,
    plain_kv_token_s=3e-8,
    draft_kv_token_s=1e-8,
    verify_kv_token_s=2e-8,
)


def random_rows(rng):
    drafts, verifies = rng.randint(1, 40), rng.randint(0, 8)
    return Rows(drafts, drafts * 32768, verifies, verifies * 17, verifies * 32768)


def seconds(costs, rows):
    return costs.seconds(
        rows.num_draft_rows,
        rows.draft_kv_tokens,
        rows.num_verify_rows,
        rows.verify_query_tokens,
        rows.verify_kv_tokens,
    )


def test_each_row_kind_is_learnt_from_mixed_iterations():
    truth = GUESS.scaled(base=1.5, draft=0.8, verify=2.0)
    estimate, rng = CostEstimate(GUESS), random.Random(0)
    for _ in range(4000):
        rows = random_rows(rng)
        estimate = estimate.observe_step(rows, seconds(truth, rows) * rng.uniform(0.97, 1.03))
    assert estimate.costs.weights_s == pytest.approx(truth.weights_s, rel=0.05)
    assert estimate.costs.draft_kv_token_s == pytest.approx(truth.draft_kv_token_s, rel=0.05)
    assert estimate.costs.verify_kv_token_s == pytest.approx(truth.verify_kv_token_s, rel=0.05)


def test_stalls_are_outliers_but_a_new_level_is_believed():
    estimate, rng = CostEstimate(GUESS), random.Random(1)
    for _ in range(500):
        rows = random_rows(rng)
        estimate = estimate.observe_step(rows, seconds(GUESS, rows) * rng.uniform(0.98, 1.02))
    rows = random_rows(rng)
    expected = seconds(estimate.costs, rows)
    stalled = estimate.observe_step(rows, 100 * expected)
    assert seconds(stalled.costs, rows) == pytest.approx(expected, rel=0.01)
    for _ in range(400):
        rows = random_rows(rng)
        stalled = stalled.observe_step(rows, 2 * seconds(GUESS, rows))
    assert seconds(stalled.costs, rows) == pytest.approx(2 * seconds(GUESS, rows), rel=0.05)


def test_observing_returns_a_new_estimate():
    before = CostEstimate(GUESS)
    after = before.observe_step(Rows(1, 1000, 0, 0, 0), 1.0)
    assert before == CostEstimate(GUESS)
    assert after != before


@pytest.mark.parametrize("taken", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_teach_nothing(taken):
    before = CostEstimate(GUESS)
    assert before.observe_step(Rows(1, 1000, 0, 0, 0), taken) is before


def test_empty_iterations_teach_nothing():
    before = CostEstimate(GUESS)
    assert before.observe_step(Rows(0, 0, 0, 0, 0), 1.0) is before

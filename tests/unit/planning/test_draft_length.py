"""The best draft length, and the estimate that it is computed from."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.planning.draft_length import (
    AcceptanceEstimate,
    DraftCost,
    best_draft_len,
    expected_tokens,
    most_auto_drafts,
)

probabilities = st.floats(0, 0.9999)
costs = st.builds(
    DraftCost,
    draft=st.floats(0.05, 2),
    verify=st.floats(0.1, 4),
    verify_token=st.floats(0, 0.5),
)


@given(probability=probabilities, num_drafts=st.integers(0, 64))
def test_expected_tokens_is_the_geometric_sum(probability, num_drafts):
    # The token after k drafts is emitted if all k were accepted.
    direct = math.fsum(probability**k for k in range(num_drafts + 1))
    assert expected_tokens(probability, num_drafts) == pytest.approx(direct, rel=1e-9)


def test_expected_tokens_is_what_a_simulation_emits():
    rng = random.Random(0)

    def emit():
        accepted = 0
        while accepted < 6 and rng.random() < 0.8:
            accepted += 1
        return accepted + 1

    mean = sum(emit() for _ in range(20_000)) / 20_000
    # The standard deviation of one verification is below 2.5. The tolerance is four standard
    # errors.
    assert mean == pytest.approx(expected_tokens(0.8, 6), abs=4 * 2.5 / math.sqrt(20_000))


@given(probability=probabilities, max_len=st.integers(1, 64), cost=costs)
def test_no_other_length_gives_more_tokens_per_cost(probability, max_len, cost):
    def rate(n):
        tokens = math.fsum(probability**k for k in range(n + 1))
        return tokens / (cost.verify + n * (cost.draft + cost.verify_token))

    best = best_draft_len(probability, max_len, cost)
    assert 1 <= best <= max_len
    assert rate(best) >= max(rate(n) for n in range(1, max_len + 1)) * (1 - 1e-9)


@given(low=probabilities, gap=st.floats(1e-6, 1), max_len=st.integers(1, 64), cost=costs)
def test_better_drafts_are_never_shorter(low, gap, max_len, cost):
    high = min(low + gap, 0.9999)
    assert best_draft_len(low, max_len, cost) <= best_draft_len(high, max_len, cost)


@given(probability=probabilities, max_len=st.integers(1, 63), cost=costs)
def test_a_higher_cap_only_lengthens(probability, max_len, cost):
    shorter = best_draft_len(probability, max_len, cost)
    assert shorter <= best_draft_len(probability, max_len + 1, cost)


def test_extremes():
    cost = DraftCost()
    assert best_draft_len(0.0, 32, cost) == 1
    assert best_draft_len(0.9999, 32, cost) == 32
    assert best_draft_len(0.5, 1, cost) == 1


@given(st.lists(st.tuples(st.integers(0, 64), st.floats(0, 1)), max_size=200))
def test_the_estimate_stays_a_probability_below_one(history):
    estimate = AcceptanceEstimate()
    for num_drafts, share in history:
        estimate.observe(num_drafts, int(num_drafts * share))
        assert 0 <= estimate.probability < 1
        assert best_draft_len(estimate.probability, 32, DraftCost()) >= 1


@pytest.mark.parametrize("probability", [0.2, 0.6, 0.9])
def test_the_estimate_finds_the_probability_of_independent_drafts(probability):
    rng, estimate = random.Random(1), AcceptanceEstimate()
    seen = []
    for _ in range(4000):
        accepted = 0
        while accepted < 8 and rng.random() < probability:
            accepted += 1
        estimate.observe(8, accepted)
        seen.append(estimate.probability)
    # The estimate averages about ten verifications, so single values scatter, but their mean does
    # not.
    assert sum(seen[500:]) / len(seen[500:]) == pytest.approx(probability, abs=0.04)


def test_the_estimate_forgets():
    estimate = AcceptanceEstimate()
    for _ in range(50):
        estimate.observe(8, 8)
    assert estimate.probability > 0.99
    for _ in range(50):
        estimate.observe(8, 0)
    assert estimate.probability < 0.1


def test_a_verification_without_drafts_changes_no_estimate():
    estimate = AcceptanceEstimate()
    estimate.observe(0, 0)
    assert estimate == AcceptanceEstimate()
    assert estimate.probability == pytest.approx(0.95)


def test_without_drafts_a_request_forgets_that_they_failed():
    estimate = AcceptanceEstimate()
    for _ in range(10):
        estimate.observe(8, 0)
    seen = [estimate.probability]
    for _ in range(300):
        estimate.observe(0, 0)
        seen.append(estimate.probability)
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(None, 31), (128, 31), (32, 31), (16, 15), (4, 3), (1, 3)]
)
def test_auto_drafts_what_one_pass_verifies(tokens, expected):
    """The pending token is verified, too."""
    assert most_auto_drafts(tokens) == expected

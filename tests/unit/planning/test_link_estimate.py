"""The link's speed, learnt from the first fetch on, in spite of noise and stalls."""

from __future__ import annotations

import random

import pytest

from sglang_kvspec.planning.link_estimate import GUESSED_BYTES_PER_S, LEAST_BYTES, LinkEstimate
from sglang_kvspec.planning.online import NUM_FIRST, OnlineValue

GB = 1e9
COPY = 64_000_000


def observed(rates, estimate=None):
    estimate = estimate or LinkEstimate()
    for rate in rates:
        estimate = estimate.observe(COPY, COPY / rate)
    return estimate


def test_without_a_fetch_the_estimate_is_the_guess():
    estimate = LinkEstimate()
    assert estimate.bytes_per_s == GUESSED_BYTES_PER_S
    assert estimate.rate.num_observed == 0


def test_a_link_much_slower_than_guessed_is_believed_after_a_few_fetches():
    estimate = observed([2 * GB] * 3)
    assert estimate.bytes_per_s == pytest.approx(2 * GB)
    assert estimate.rate.num_observed == 3


def test_a_stall_among_the_first_fetches_does_not_count():
    assert observed([2 * GB, 2e6, 2 * GB]).bytes_per_s == pytest.approx(2 * GB, rel=0.01)


def test_bandwidth_is_learnt_through_noise_and_stalls():
    rng = random.Random(2)
    rates = (
        30 * GB * rng.uniform(0.95, 1.05) / (20.0 if rng.random() < 0.02 else 1.0)
        for _ in range(1000)
    )
    assert observed(rates).bytes_per_s == pytest.approx(30 * GB, rel=0.05)


def test_one_stall_hardly_counts_and_a_new_level_is_believed():
    steady = observed([30 * GB] * 200)
    stalled = observed([30e6], steady)
    assert stalled.bytes_per_s == pytest.approx(30 * GB, rel=0.01)
    assert observed([10 * GB] * 400, stalled).bytes_per_s == pytest.approx(10 * GB, rel=0.05)


def test_small_fetches_count_together():
    estimate = LinkEstimate()
    small = LEAST_BYTES // 4
    for _ in range(3):
        estimate = estimate.observe(small, small / GB)
    assert estimate.rate.num_observed == 0
    # One of four fetches was slow. The time of all four counts.
    estimate = estimate.observe(small, 5 * small / GB)
    assert estimate.rate.num_observed == 1
    assert estimate == LinkEstimate().observe(4 * small, 8 * small / GB)


@pytest.mark.parametrize("taken", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_teach_nothing(taken):
    before = LinkEstimate()
    assert before.observe(COPY, taken) is before
    value = OnlineValue(1.0)
    assert value.observe(taken) is value


def test_observing_returns_a_new_estimate():
    before = LinkEstimate()
    assert observed([GB] * (NUM_FIRST + 1), before) != before == LinkEstimate()

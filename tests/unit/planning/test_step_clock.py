"""Prices of draft steps follow what is measured, and go back where nothing is measured."""

from __future__ import annotations

import pytest

from sglang_kvspec.planning.step_clock import (
    HOST_S,
    MOST_OF_FIRST,
    MOST_OF_MEAN,
    WEIGHT,
    Mean,
    StepClock,
)


def clock():
    return StepClock(1e-3, {4: 1.1e-3, 16: 1.5e-3})


def test_prices_begin_with_times_of_the_start():
    times = clock().times()
    assert times.ordinary == 1e-3
    assert times.wide == {4: 1.1e-3 + HOST_S, 16: 1.5e-3 + HOST_S}
    assert times.waited_rest > times.rest


def test_prices_follow_measurements():
    measured = clock()
    for _ in range(60):
        measured.observe_ordinary(16, 16 * 2e-3, 16 * 2e-3 + 5e-3)
        measured.wide[4].observe(3e-3)
        measured.observe_waited_rest(9e-3)
    times = measured.times()
    assert times.ordinary == pytest.approx(2e-3, rel=1e-3)
    assert times.wide[4] == pytest.approx(3e-3, rel=1e-3)
    assert (times.rest, times.waited_rest) == pytest.approx((5e-3, 9e-3), rel=1e-2)
    assert times.wide[16] == 1.5e-3 + HOST_S


def test_a_pause_counts_little():
    mean = Mean(1e-3)
    mean.observe(1.0)
    assert mean.value == MOST_OF_FIRST * 1e-3
    mean = Mean(1e-3)
    mean.observe(1e-3)
    mean.observe(1.0)
    assert mean.value == pytest.approx((1 + WEIGHT * (MOST_OF_MEAN - 1)) * 1e-3)


def test_a_faded_price_is_back_after_one_measurement():
    mean = Mean(1e-3)
    mean.observe(5e-3)
    for _ in range(800):
        mean.fade()
    assert mean.value < 1.1e-3
    mean.observe(5e-3)
    assert mean.value == pytest.approx(5e-3)


def test_prices_of_steps_that_are_not_taken_go_back():
    measured = clock()
    for _ in range(30):
        measured.wide[4].observe(9e-3)
        measured.observe_waited_rest(20e-3)
    high = measured.times()
    for _ in range(1600):
        measured.fade()
    times = measured.times()
    assert high.wide[4] > 8e-3
    assert times.wide[4] == pytest.approx(1.1e-3 + HOST_S, rel=1e-2)
    assert times.waited_rest < high.waited_rest
    assert times.rest == high.rest


def test_a_round_between_which_other_work_came_has_no_rest():
    measured = clock()
    before = measured.times().rest
    measured.observe_ordinary(4, 4e-3, None)
    assert measured.times().rest == before


def test_no_rest_is_negative():
    measured = clock()
    for _ in range(100):
        measured.observe_ordinary(4, 4e-3, 3e-3)
        measured.observe_waited_rest(0.0)
    times = measured.times()
    assert 0 <= times.rest <= times.waited_rest < 1e-5

"""Limits of a store, and the bandwidth of writing on a clock that the test sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.kv.prefix_store.budget import StoreLimits, TokenBucket


@given(
    steps=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 50)), min_size=1, max_size=50),
    rate=st.floats(1, 100),
    burst=st.integers(1, 60),
)
def test_no_stretch_of_time_takes_more_than_rate_and_burst_and_one_page(steps, rate, burst):
    now = [0.0]
    bucket = TokenBucket(rate, burst, lambda: now[0])
    taken: list[tuple[float, int]] = []
    for pause, size in steps:
        now[0] += pause
        if bucket.delay_s() == 0:
            bucket.take(size)
            taken.append((now[0], size))
    for start, (since, _) in enumerate(taken):
        total = 0
        for until, size in taken[start:]:
            assert total <= burst + rate * (until - since) + 1e-6
            total += size


def test_the_returned_delay_is_enough_and_not_too_long():
    now = [100.0]
    bucket = TokenBucket(10.0, 20, lambda: now[0])
    bucket.take(50)
    assert bucket.delay_s() == pytest.approx(3.0)
    now[0] += 2.9
    assert bucket.delay_s() == pytest.approx(0.1)
    now[0] += 0.1001
    assert bucket.delay_s() == 0


def test_no_limit_is_no_limit():
    bucket = TokenBucket(None, 1, lambda: 0.0)
    for _ in range(100):
        assert bucket.delay_s() == 0
        bucket.take(1 << 40)


@given(
    disk=st.integers(200, 5000),
    sizes=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    share=st.floats(0, 1),
)
def test_slots_fit_in_the_bytes_and_waste_less_than_a_page(disk, sizes, share):
    anchor, residual = sizes
    anchors, residuals = StoreLimits(disk, share).slots(anchor, residual, 20)
    used = 20 + anchors * anchor + residuals * residual
    assert used <= disk < used + 2 * (anchor + residual) + 1
    assert residuals <= anchors


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"residual_share": 1.5}, "residual_share must be from 0 to 1, got 1.5"),
        ({"queue_bytes": 0}, "queue_bytes and write_burst_bytes must be at least 1, got 0"),
        ({"write_bytes_per_s": 0.0}, "write_bytes_per_s must be above 0"),
    ],
)
def test_limits_that_make_no_sense(options, reason):
    with pytest.raises(ConfigError, match=reason):
        StoreLimits(1000, **options)


def test_a_budget_too_small_for_a_page_says_what_it_takes():
    with pytest.raises(ConfigError, match="needs at least 160 bytes for one page, got 100"):
        StoreLimits(100).slots(50, 90, 20)

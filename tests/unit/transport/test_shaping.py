"""The emulated link lets through its configured rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.shaping import TokenBucket


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 0.1)), min_size=1, max_size=60),
    st.integers(1000, 10**6),
)
def test_never_more_than_rate_burst_and_one_frame(
    frames: list[tuple[int, float]], rate: int
) -> None:
    burst, start_s = 2000, 10.0
    bucket, now_s, sent = TokenBucket(rate, burst, start_s), start_s, 0
    for num_bytes, pause_s in frames:
        now_s += pause_s
        now_s += bucket.delay_s(now_s)
        assert bucket.delay_s(now_s + 1e-9) == 0
        bucket.spend(num_bytes, now_s)
        sent += num_bytes
        assert sent <= rate * (now_s - start_s) + burst + num_bytes + 1


def test_a_busy_link_is_used_up() -> None:
    bucket, now_s, sent = TokenBucket(1e6, 1000, 0.0), 0.0, 0
    while now_s < 1.0:
        now_s += bucket.delay_s(now_s)
        bucket.spend(700, now_s)
        sent += 700
    assert sent == pytest.approx(1e6, rel=0.01)


def test_idle_time_is_not_saved_up() -> None:
    bucket = TokenBucket(1e6, 1000, 0.0)
    bucket.spend(1500, 3600.0)
    assert bucket.delay_s(3600.0) == pytest.approx(501e-6)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_link_without_a_rate_is_refused(rate: float) -> None:
    with pytest.raises(TransportError, match="rate > 0"):
        TokenBucket(rate, 1000, 0.0)

"""Verifications are spread over iterations."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.planning.stagger import StaggerRing


def fair_share(num_running: int, best: int) -> int:
    """A cycle of `best` drafts and a verification takes best + 1 iterations."""
    return -(-num_running // (best + 1))


def place_at_once(num_requests: int, best: int, max_len: int) -> Counter[int]:
    ring = StaggerRing()
    return Counter(ring.place(0, best, max_len, num_requests) for _ in range(num_requests))


@given(num_requests=st.integers(1, 300), best=st.integers(1, 32), more=st.integers(1, 32))
def test_requests_that_start_together_verify_apart(num_requests, best, more):
    placed = place_at_once(num_requests, best, best + more)
    assert max(placed.values()) <= fair_share(num_requests, best)


@given(num_requests=st.integers(1, 300), best=st.integers(1, 32))
def test_with_no_room_beyond_the_best_length_they_spread_evenly(num_requests, best):
    placed = place_at_once(num_requests, best, best)
    assert max(placed.values()) <= max(fair_share(num_requests, best), -(-num_requests // best))


@given(
    best=st.integers(1, 32),
    more=st.integers(0, 32),
    num_requests=st.integers(1, 100),
    now=st.integers(0, 10**9),
)
def test_lengths_stay_in_range(best, more, num_requests, now):
    ring = StaggerRing()
    for step in range(3):
        for _ in range(num_requests):
            assert 1 <= ring.place(now + step, best, best + more, num_requests) <= best + more


@given(best=st.integers(1, 32), more=st.integers(0, 32))
def test_a_lone_request_gets_the_best_length_every_time(best, more):
    ring, now = StaggerRing(), 0
    for _ in range(5):
        length = ring.place(now, best, best + more, 1)
        assert length == best
        now += length + 1


def test_the_nearest_free_length_is_taken_shorter_first():
    ring = StaggerRing()
    assert [ring.place(0, 4, 32, 4) for _ in range(4)] == [4, 3, 5, 2]


def verifications_over_time(
    num_requests: int, best: int, max_len: int, iterations: int, arrivals: int = 1
) -> list[tuple[int, list[int]]]:
    """Per iteration, how many verify and the lengths of the cycles that start.

    Requests arrive in `arrivals` equal waves, an iteration apart.
    """
    ring = StaggerRing()
    due: dict[int, int] = {}
    history = []
    for now in range(iterations):
        joining = [r for r in range(num_requests) if r % arrivals == now]
        verifying = [r for r, at in due.items() if at == now]
        lengths = []
        for request in (*verifying, *joining):
            lengths.append(ring.place(now, best, max_len, num_requests))
            due[request] = now + lengths[-1] + 1
        history.append((len(verifying), lengths))
    return history


@given(
    num_requests=st.integers(1, 64),
    best=st.integers(1, 16),
    more=st.integers(1, 16),
    arrivals=st.integers(1, 5),
)
def test_spread_lasts(num_requests, best, more, arrivals):
    history = verifications_over_time(num_requests, best, best + more, 100, arrivals)
    share = fair_share(num_requests, best)
    assert max(count for count, _ in history) <= share


@settings(max_examples=30)
@given(num_requests=st.integers(1, 64), best=st.integers(2, 16))
def test_in_the_steady_state_lengths_return_to_the_best(num_requests, best):
    history = verifications_over_time(num_requests, best, 2 * best, 160)
    settled = [length for _, lengths in history[80:] for length in lengths]
    assert settled
    assert abs(sum(settled) / len(settled) - best) <= 1


def test_reservations_of_past_iterations_are_dropped():
    ring = StaggerRing()
    for now in range(1000):
        ring.place(now, 4, 8, 4)
    assert len(ring._due) <= 9


@given(st.integers(1, 50), st.integers(1, 16), st.integers(0, 16))
def test_is_deterministic(num_requests, best, more):
    args = (num_requests, best, best + more, 30)
    assert verifications_over_time(*args) == verifications_over_time(*args)

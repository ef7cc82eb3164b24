"""Requests whose residuals stay in HBM: those used soonest and most often, without frequent
changes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvspec.planning.residency import ResidencyView, choose_resident, num_resident

views = st.builds(
    ResidencyView,
    request_id=st.just(0),
    residual_bytes=st.integers(1, 50),
    next_use=st.integers(0, 40),
    cycle_len=st.integers(1, 33),
    is_resident=st.booleans(),
)


@st.composite
def populations(draw: st.DrawFn) -> list[ResidencyView]:
    drawn = draw(st.lists(views, max_size=12))
    return [replace(view, request_id=index) for index, view in enumerate(drawn)]


@settings(max_examples=300)
@given(populations(), st.integers(0, 200))
def test_the_chosen_fit_and_leave_no_room_for_another(requests, spare_bytes):
    chosen = choose_resident(requests, spare_bytes)
    left = spare_bytes - sum(r.residual_bytes for r in requests if r.request_id in chosen)
    assert left >= 0
    assert all(r.residual_bytes > left for r in requests if r.request_id not in chosen)


@settings(max_examples=300)
@given(populations(), st.integers(0, 200))
def test_choosing_again_changes_nothing(requests, spare_bytes):
    chosen = choose_resident(requests, spare_bytes)
    settled = [replace(r, is_resident=r.request_id in chosen) for r in requests]
    again = choose_resident(settled, spare_bytes)
    kept = [replace(r, is_resident=r.request_id in again) for r in requests]
    assert choose_resident(kept, spare_bytes) == again


@settings(max_examples=200)
@given(
    cycle_len=st.integers(2, 33),
    num_requests=st.integers(2, 10),
    room=st.integers(1, 9),
    iterations=st.integers(1, 80),
)
def test_equal_requests_do_not_replace_each_other(cycle_len, num_requests, room, iterations):
    resident: frozenset[int] = frozenset()
    for now in range(iterations):
        requests = [
            ResidencyView(index, 10, (index - now) % cycle_len, cycle_len, index in resident)
            for index in range(num_requests)
        ]
        chosen = choose_resident(requests, 10 * room)
        assert now == 0 or chosen == resident
        resident = chosen


def test_sooner_and_more_often_used_stays():
    often = ResidencyView(0, 10, next_use=4, cycle_len=4, is_resident=False)
    seldom = ResidencyView(1, 10, next_use=4, cycle_len=20, is_resident=True)
    sooner = replace(often, request_id=2, next_use=1)
    assert choose_resident([often, seldom], 10) == {0}
    assert choose_resident([often, sooner], 10) == {2}


def test_a_small_advantage_does_not_replace_a_resident():
    stays = ResidencyView(0, 10, next_use=8, cycle_len=8, is_resident=True)
    comes = ResidencyView(1, 10, next_use=0, cycle_len=8, is_resident=False)
    assert choose_resident([stays, comes], 10) == {0}


def test_a_link_that_serves_all_requests_leaves_few_residuals_in_the_cache():
    # A room serves a fetch every second iteration. Three of twelve requests need a fetch every
    # fourth iteration.
    assert num_resident(12, 4, 12, num_slots=40, link_pages=100) == 9
    # With a verification every fourth iteration, four requests need two rooms.
    assert num_resident(12, 4, 4, num_slots=40, link_pages=100) == 8


def test_over_a_slow_link_as_many_stay_as_can():
    # On this link a fetch takes forty iterations.
    assert num_resident(30, 40, 10, num_slots=400, link_pages=1) == 9
    # On a fast link the cache is for fetches: ten rooms serve five requests in an iteration.
    assert num_resident(60, 40, 10, num_slots=400, link_pages=1000) == 0


@given(
    st.integers(1, 64),
    st.integers(1, 50),
    st.floats(1, 65),
    st.integers(0, 500),
    st.integers(1, 1000),
)
def test_a_room_is_left_for_a_fetch(num_requests, pages_each, cycle_len, num_slots, link_pages):
    num = num_resident(num_requests, pages_each, cycle_len, num_slots, link_pages)
    assert 0 <= num <= num_requests
    assert num == 0 or (num + 1) * pages_each <= num_slots

"""The chosen operating point against the simulator that runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.operating_point import (
    Loading,
    choose_operating_point,
    operating_points,
    plain_tokens_per_s,
)
from planner.simulation import Machine, Report, simulate
from planner.staggered import Staggered
from planner.traces import TraceRequest, generate_trace

from sglang_kvspec.planning.costs import AcceptanceCurve, IterationCosts

CONTEXT_LEN, OUTPUT_LEN = 8000, 200
MACHINE = Machine(
    costs=IterationCosts(
        overhead_s=1e-3,
        weights_s=4e-3,
        token_s=2e-5,
        plain_kv_token_s=30e-9,
        draft_kv_token_s=9e-9,
        verify_kv_token_s=20e-9,
    ),
    curve=AcceptanceCurve.geometric(0.97, 32),
    kv_bytes=20_000_000,
    link_bytes_per_s=1e9,
    plain_bytes=200,
    anchor_bytes=57,
    residual_bytes=50,
    max_requests=48,
    max_draft_len=32,
)


@dataclass(frozen=True)
class Nothing:
    """Acceptance curve of drafts that are never accepted."""

    def expected_tokens(self, draft_len: int) -> float:
        return 1.0


def trace(num_requests: int) -> tuple[TraceRequest, ...]:
    return generate_trace(
        0, num_requests, prompt_len=CONTEXT_LEN, output_len=OUTPUT_LEN, prompt_spread=0.05
    )


def run(machine: Machine) -> Report:
    point = choose_operating_point(machine, CONTEXT_LEN + OUTPUT_LEN, OUTPUT_LEN)
    assert point is not None
    schedule = Staggered(machine, point.draft_len, point.num_requests, point.rooms)
    return simulate(schedule, trace(4 * point.num_requests))


@settings(max_examples=25)
@given(
    kv_bytes=st.integers(8_000_000, 60_000_000),
    residual_bytes=st.sampled_from([50, 140, 200]),
    link_bytes_per_s=st.sampled_from([2e8, 1e9, 5e9]),
)
def test_the_simulated_server_reaches_what_was_expected(kv_bytes, residual_bytes, link_bytes_per_s):
    machine = replace(
        MACHINE,
        kv_bytes=kv_bytes,
        residual_bytes=residual_bytes,
        link_bytes_per_s=link_bytes_per_s,
    )
    point = choose_operating_point(machine, CONTEXT_LEN + OUTPUT_LEN, OUTPUT_LEN)
    if point is None:
        return
    report = run(machine)
    # The estimate uses mean lengths and fractions of requests, and the simulation does not.
    assert report.tokens_per_s() == pytest.approx(point.tokens_per_s, rel=0.2)
    assert report.stall_share() < 0.03


def test_no_request_waits_for_a_fetch_where_the_link_suffices():
    machine = replace(MACHINE, kv_bytes=16_000_000, residual_bytes=140, link_bytes_per_s=1e8)
    point = choose_operating_point(machine, CONTEXT_LEN + OUTPUT_LEN, OUTPUT_LEN)
    assert point is not None
    assert point.num_fetching
    assert 0.9 < point.link_load < 1
    assert run(machine).stall_share() < 0.005


def test_where_nothing_is_accepted_plain_decoding_is_chosen():
    machine = replace(MACHINE, curve=Nothing())
    assert choose_operating_point(machine, CONTEXT_LEN, OUTPUT_LEN) is None


def test_without_a_link_all_residuals_stay():
    point = choose_operating_point(replace(MACHINE, link_bytes_per_s=1.0), CONTEXT_LEN, OUTPUT_LEN)
    assert point is not None
    assert point.num_fetching == 0


def test_more_of_anything_is_never_slower():
    def speed(machine: Machine) -> float:
        point = choose_operating_point(machine, CONTEXT_LEN, OUTPUT_LEN)
        return point.tokens_per_s if point else plain_tokens_per_s(machine, CONTEXT_LEN)

    base = speed(MACHINE)
    assert speed(replace(MACHINE, kv_bytes=2 * MACHINE.kv_bytes)) >= base
    assert speed(replace(MACHINE, link_bytes_per_s=2 * MACHINE.link_bytes_per_s)) >= base
    assert speed(replace(MACHINE, max_requests=96)) >= base


def machines() -> st.SearchStrategy[Machine]:
    return st.builds(
        replace,
        st.just(MACHINE),
        kv_bytes=st.integers(8_000_000, 60_000_000),
        residual_bytes=st.sampled_from([50, 140, 200]),
        link_bytes_per_s=st.sampled_from([2e8, 1e9, 5e9]),
    )


def fastest(machine: Machine, loading: Loading) -> float:
    points = operating_points(machine, CONTEXT_LEN, OUTPUT_LEN, loading)
    return max((point.tokens_per_s for point in points), default=0.0)


@settings(max_examples=25)
@given(machine=machines(), span=st.floats(1, 8))
def test_longer_loads_bring_nothing(machine, span):
    assert fastest(machine, Loading(span=span)) <= fastest(machine, Loading())


@settings(max_examples=25)
@given(machine=machines(), verifications=st.integers(2, 8))
def test_loads_for_several_verifications_bring_no_more_than_rounding(machine, verifications):
    own = choose_operating_point(machine, CONTEXT_LEN, OUTPUT_LEN)
    if own is None:
        return
    several = fastest(machine, Loading(verifications=verifications))
    assert several <= own.tokens_per_s * (1 + 1 / own.num_requests)


def test_a_load_for_several_verifications_takes_the_link_once():
    points = operating_points(MACHINE, CONTEXT_LEN, OUTPUT_LEN, Loading(verifications=4))
    point = next(point for point in points if point.num_fetching)
    load_s = CONTEXT_LEN * MACHINE.residual_bytes / MACHINE.link_bytes_per_s
    cycle_s = (point.draft_len + 1) * point.iteration_s
    assert point.link_load == pytest.approx(point.num_fetching * load_s / (4 * cycle_s))
    # Each fetching request holds a room, except while it drafts before its load begins.
    assert point.rooms == point.num_fetching


@settings(max_examples=25)
@given(machine=machines())
def test_keeping_pages_in_what_is_left_of_hbm_is_never_slower(machine):
    assert fastest(machine, Loading(keeps_pages=True)) >= fastest(machine, Loading())

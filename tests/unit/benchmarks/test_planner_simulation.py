"""Simulated servers: every token arrives, memory and link are not exceeded, and the staggered plan
pays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.schedules import LockStep, PlainDecoding, Sequential
from planner.simulation import (
    Machine,
    Report,
    RunningRequest,
    Schedule,
    simulate,
)
from planner.staggered import Staggered
from planner.traces import TraceRequest, generate_trace, read_trace, write_trace

from sglang_kvspec.core.errors import CapacityError, ConfigError

DRAFTING = (Staggered, LockStep, Sequential)


@dataclass(frozen=True)
class MemoryBoundCosts:
    """Costs of reading weights, then KV. Anchors are a quarter of the KV."""

    def seconds(
        self,
        num_draft_rows: float,
        draft_kv_tokens: float,
        num_verify_rows: float,
        verify_query_tokens: float,
        verify_kv_tokens: float,
    ) -> float:
        if not num_draft_rows and not num_verify_rows:
            return 0.0
        return 4e-3 + (draft_kv_tokens / 4 + verify_kv_tokens) * 30e-9

    def plain_seconds(self, num_rows: float, kv_tokens: float) -> float:
        return 4e-3 + kv_tokens * 30e-9


@dataclass(frozen=True)
class NineInTen:
    def expected_tokens(self, draft_len: int) -> float:
        return (1 - 0.9 ** (draft_len + 1)) / 0.1


MACHINE = Machine(
    costs=MemoryBoundCosts(),
    curve=NineInTen(),
    kv_bytes=40_000_000,
    link_bytes_per_s=2e9,
    plain_bytes=200,
    anchor_bytes=50,
    residual_bytes=150,
    max_requests=64,
    max_draft_len=32,
)
TRACE = generate_trace(1, 100, prompt_len=16_000, output_len=120, prompt_spread=0.2)


def speed_up(schedule: Schedule, plain: Report) -> float:
    return simulate(schedule, TRACE).tokens_per_s() / plain.tokens_per_s()


def test_the_staggered_plan_beats_plain_decoding_and_stalling_schedules():
    plain = simulate(PlainDecoding(MACHINE), TRACE)
    staggered, lock_step, sequential = (
        speed_up(s(MACHINE, 12, 30, rooms=4), plain) for s in DRAFTING
    )
    assert staggered > 1.5
    assert staggered > lock_step
    assert staggered > sequential


def test_fetches_hide_where_the_link_suffices():
    machine = replace(MACHINE, link_bytes_per_s=8e9)
    report = simulate(Staggered(machine, 12, 28, rooms=5), TRACE)
    assert report.end.moved_bytes > 0
    assert report.stall_share() < 0.03


@pytest.mark.parametrize("kind", DRAFTING)
def test_a_new_request_takes_the_room_of_a_resident_that_left(kind):
    """The residuals of the new request are in HBM already, while those of others would have to be
    fetched."""
    # Room for the anchors of three requests, the residuals of one, and the fetch of another one's
    # residuals.
    schedule = kind(replace(MACHINE, kv_bytes=7_500_000), 8, 3, rooms=1)
    requests = [RunningRequest(n, TraceRequest(0.0, 15_000, 500)) for n in range(4)]
    for request in requests[:3]:
        schedule.join(request)
    (resident,) = (r for r in requests[:3] if r.is_resident)
    schedule.leave(resident)
    schedule.join(requests[3])
    assert [r for r in schedule.running if r.is_resident] == [requests[3]]
    assert schedule.steady_bytes() <= schedule.machine.kv_bytes


def test_verifications_are_spread_evenly():
    class Counting(Staggered):
        most = now = 0

        def step(self):
            self.now = 0
            done = super().step()
            self.most = max(self.most, self.now)
            return done

        def verify(self, request):
            self.now += 1
            return super().verify(request)

    schedule = Counting(replace(MACHINE, kv_bytes=10**9), 8, 36)
    simulate(schedule, TRACE)
    assert schedule.most == 36 / (8 + 1)


def test_a_link_that_does_not_suffice_is_kept_busy():
    machine = replace(MACHINE, link_bytes_per_s=5e8, max_draft_len=12)
    report = simulate(Staggered(machine, 6, 30, rooms=3), TRACE)
    assert report.stall_share() > 0.2
    assert 0.9 < report.link_utilisation(machine.link_bytes_per_s) <= 1


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    return replace(
        MACHINE,
        kv_bytes=draw(st.integers(2_000_000, 20_000_000)),
        link_bytes_per_s=draw(st.sampled_from([1e8, 5e8, 2e9, 1e11])),
        residual_bytes=draw(st.sampled_from([50, 150, 200])),
        window_bytes=draw(st.sampled_from([0, 10_000])),
        max_draft_len=16,
    )


@settings(max_examples=60)
@given(
    machine=machines(),
    kind=st.sampled_from([PlainDecoding, *DRAFTING]),
    draft_len=st.integers(1, 16),
    num_requests=st.integers(1, 20),
    seed=st.integers(0, 1000),
    rate=st.sampled_from([2.0, 50.0, float("inf")]),
)
def test_every_token_comes_within_memory_and_link(
    machine, kind, draft_len, num_requests, seed, rate
):
    trace = generate_trace(seed, 12, prompt_len=3000, output_len=30, requests_per_s=rate)
    schedule = kind(machine) if kind is PlainDecoding else kind(machine, draft_len, num_requests)
    report = simulate(schedule, trace)
    assert report.end.tokens == pytest.approx(sum(r.output_len for r in trace))
    assert report.peak_bytes <= machine.kv_bytes
    assert report.end.moved_bytes <= machine.link_bytes_per_s * report.end.busy_s * (1 + 1e-9)
    assert 0 <= report.stall_share() <= 1
    assert report.end.now_s >= report.end.busy_s * (1 - 1e-9)
    assert not schedule.running
    if isinstance(schedule, Staggered):
        assert not schedule.planner.placed
        assert not any(any(ring.amounts()) for ring in schedule.planner.rings.each())
        assert not schedule.held


@pytest.mark.parametrize("kind", DRAFTING)
def test_runs_repeat_exactly(kind):
    trace = TRACE[:20]
    assert simulate(kind(MACHINE, 8, 30), trace) == simulate(kind(MACHINE, 8, 30), trace)


def test_with_all_residuals_resident_nothing_moves():
    report = simulate(Staggered(replace(MACHINE, kv_bytes=10**9), 8, 36), TRACE)
    assert report.end.moved_bytes == 0
    assert report.stall_share() < 0.03


def test_a_request_that_can_never_fit_is_an_error():
    with pytest.raises(CapacityError, match="does not fit on an empty server"):
        simulate(PlainDecoding(MACHINE), [TraceRequest(0.0, 10**6, 1)])


def test_late_arrivals_leave_the_server_idle_not_busy():
    trace = [TraceRequest(0.0, 1000, 5), TraceRequest(100.0, 1000, 5)]
    report = simulate(PlainDecoding(MACHINE), trace)
    assert report.end.now_s > 100
    assert report.end.busy_s < 1


def test_traces_survive_writing_and_reading(tmp_path):
    trace = generate_trace(3, 20, prompt_len=500, output_len=50, requests_per_s=4)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace
    assert generate_trace(3, 20, prompt_len=500, output_len=50, requests_per_s=4) == trace


@pytest.mark.parametrize(
    "line",
    ["{", "[1]", '{"arrival_s": 0, "prompt_len": 0, "output_len": 1}', '{"arrival_s": 0}'],
)
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_len": 1, "output_len": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(path)

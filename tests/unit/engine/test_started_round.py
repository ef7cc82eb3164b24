"""A started round while requests leave, arrive and change places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.engine.started_round import StartedRound
from sglang_kvspec.planning.round_plan import RoundPlan
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams


def make_state(rid):
    params = SamplingParams(temperature=0, top_k=1)
    return RequestState(rid=rid, committed_len=3, pending=1, output=[1], params=params, remaining=9)


def make_round(lens, **fields):
    states = [make_state(str(i)) for i in range(len(lens))]
    order = [i for i, n in enumerate(lens) if n]
    tokens = torch.tensor([[10 * i + s for i in order] for s in range(max(lens))])
    made = DraftedTokens(tokens, order, list(lens))
    return StartedRound(states, list(lens), PhaseTimer(torch.device("cpu")), made=made, **fields)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any), st.data())
def test_every_request_finds_what_it_started(lens, data):
    started = make_round(lens)
    started.pending = frozenset(i for i, n in enumerate(lens) if n % 2)
    started.held = frozenset(i for i, n in enumerate(lens) if n > 2)
    started.plan = RoundPlan(tuple(i for i, n in enumerate(lens) if n > 1), fetch=(7,))
    stay = data.draw(st.sets(st.sampled_from(range(len(lens))), min_size=1))
    new = [make_state("new") for _ in range(data.draw(st.integers(0, 2)))]
    batch = data.draw(st.permutations([started.states[i] for i in stay] + new))
    now = started.for_batch(batch)
    known = {id(state): i for i, state in enumerate(started.states)}
    assert now is not None
    assert now.lens == [lens[known[id(s)]] if id(s) in known else 0 for s in batch]
    odd = {place for place, s in enumerate(batch) if id(s) in known and lens[known[id(s)]] % 2}
    assert now.pending == odd
    kept = {place for place, s in enumerate(batch) if id(s) in known and lens[known[id(s)]] > 2}
    assert now.held == kept
    assert now.num_verified == [0] * len(batch)
    long = {place for place, s in enumerate(batch) if id(s) in known and lens[known[id(s)]] > 1}
    if long or not started.plan.verify:
        assert now.plan == RoundPlan(tuple(sorted(long)), fetch=(7,))
    else:
        assert now.plan is None
    tokens = now.made.deliver()
    for place, state in enumerate(batch):
        i = known.get(id(state))
        wanted = [] if i is None else [10 * i + s for s in range(lens[i])]
        assert tokens.get(place, []) == wanted


class FixedTimer:
    """A timer of one phase."""

    def __init__(self, seconds):
        self._seconds = seconds

    def seconds(self):
        return [self._seconds]


def test_step_seconds_do_not_change_when_requests_leave():
    started = make_round([8, 2])
    started.timer, started.num_steps, started.is_interrupted = FixedTimer(0.8), 8, True
    now = started.for_batch(started.states[1:])
    assert now.lens == [2]
    assert now.step_seconds() == 0.1
    assert now.is_interrupted
    assert now.draft_ages_s(0) == pytest.approx([0.7, 0.6])
    empty = make_round([0, 1])
    empty.timer = FixedTimer(0.8)
    assert empty.step_seconds() == 0
    assert empty.draft_ages_s(0) == []


def test_a_round_that_all_requests_have_left_is_dropped():
    assert make_round([2, 3]).for_batch([make_state("0"), make_state("1")]) is None


def plain_round(lens, at, remaining):
    started = make_round(lens)
    started.is_plain = True
    for state, position, left in zip(started.states, at, remaining, strict=True):
        state.committed_len, state.remaining = position, left
    return started


@pytest.mark.parametrize(
    ("lens", "at", "remaining", "steps"),
    [
        ([8, 8], [16, 0], [50, 50], 8),
        ([4, 4], [6, 16], [50, 50], 6),
        ([4, 4], [0, 0], [50, 9], 5),
        # With the tokens of this round, one request ends its page or has all its tokens.
        ([8, 8], [8, 0], [50, 50], 0),
        ([8, 8], [12, 0], [50, 50], 0),
        ([8, 8], [0, 0], [50, 8], 0),
        # The device does not know the next token of a request that took fewer tokens.
        ([8, 7], [0, 0], [50, 50], 0),
        # A new request arrived in the meantime.
        ([8, 0], [0, 0], [50, 50], 0),
    ],
)
def test_steps_that_can_follow_before_the_cpu_has_seen_the_tokens(lens, at, remaining, steps):
    assert plain_round(lens, at, remaining).steps_on(16, 8) == steps


def test_no_steps_follow_once_a_request_has_left():
    started = plain_round([4, 4], [0, 0], [50, 50])
    assert started.steps_on(16, 8) == 8
    left = started.for_batch(started.states[:1])
    assert left.steps_on(16, 8) == 0


def test_no_steps_follow_once_other_forwards_have_used_the_rows():
    started = plain_round([4, 4], [0, 0], [50, 50])
    started.is_interrupted = True
    assert started.steps_on(16, 8) == 0


def test_kept_tokens_survive_other_uses_of_the_rows():
    started = make_round([2, 1])
    rows = started.made.tokens
    started.keep_tokens()
    rows.fill_(-1)
    now = started.for_batch(started.states[1:])
    assert now.made.deliver() == {0: [10]}
    nothing = make_round([1])
    nothing.made = None
    nothing.keep_tokens()
    assert nothing.made is None


def test_late_and_held_requests_do_not_verify():
    assert make_round([3, 3, 3], late=frozenset({1})).verify == [0, 2]
    assert make_round([3, 3, 3], held=frozenset({1})).verify == [0, 2]
    planned = make_round([3, 3, 3], late=frozenset({0}), held=frozenset({1}))
    assert planned.verify == [2]
    planned.plan = RoundPlan((0, 1))
    assert planned.verify == []


def idle_round(num_requests, **fields):
    states = [make_state(str(i)) for i in range(num_requests)]
    return StartedRound(states, [0] * num_requests, PhaseTimer(torch.device("cpu")), **fields)


def test_a_round_is_idle_where_no_request_drafts_or_verifies():
    assert idle_round(2, late=frozenset({0, 1})).is_idle
    assert idle_round(2, late=frozenset({0}), held=frozenset({1})).is_idle
    assert not make_round([0, 1], late=frozenset({0, 1})).is_idle
    assert not idle_round(2, late=frozenset({1})).is_idle
    assert not idle_round(2, late=frozenset({0, 1}), is_plain=True).is_idle
    assert idle_round(2, plan=RoundPlan(())).is_idle


def test_late_requests_are_looked_for_again_in_another_batch():
    started = make_round([2, 2], late=frozenset({0}))
    now = started.for_batch(started.states[::-1])
    assert now.late == frozenset()

"""A round that goes on while requests leave, come and change places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.runtime.draft_rows import DraftedTokens
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.started_round import StartedRound


def make_state(rid):
    params = SamplingParams(temperature=0, top_k=1)
    return RequestState(rid=rid, committed_len=3, pending=1, output=[1], params=params, remaining=9)


def make_round(lens):
    states = [make_state(str(i)) for i in range(len(lens))]
    order = [i for i, n in enumerate(lens) if n]
    tokens = torch.tensor([[10 * i + s for i in order] for s in range(max(lens))])
    timer = PhaseTimer(torch.device("cpu"))
    return StartedRound(states, list(lens), timer, made=DraftedTokens(tokens, order, list(lens)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any), st.data())
def test_every_request_finds_what_it_started(lens, data):
    started = make_round(lens)
    started.lacking = frozenset(i for i, n in enumerate(lens) if n % 2)
    stay = data.draw(st.sets(st.sampled_from(range(len(lens))), min_size=1))
    new = [make_state("new") for _ in range(data.draw(st.integers(0, 2)))]
    batch = data.draw(st.permutations([started.states[i] for i in stay] + new))
    now = started.for_batch(batch)
    known = {id(state): i for i, state in enumerate(started.states)}
    assert now is not None
    assert now.lens == [lens[known[id(s)]] if id(s) in known else 0 for s in batch]
    odd = {place for place, s in enumerate(batch) if id(s) in known and lens[known[id(s)]] % 2}
    assert now.lacking == odd
    tokens = now.made.deliver()
    for place, state in enumerate(batch):
        i = known.get(id(state))
        wanted = [] if i is None else [10 * i + s for s in range(lens[i])]
        assert tokens.get(place, []) == wanted


class Took:
    """A timer of one phase."""

    def __init__(self, seconds):
        self._seconds = seconds

    def seconds(self):
        return [self._seconds]


def test_a_step_takes_as_long_whoever_leaves():
    started = make_round([8, 2])
    started.timer, started.num_steps, started.is_held_up = Took(0.8), 8, True
    now = started.for_batch(started.states[1:])
    assert now.lens == [2]
    assert now.step_seconds() == 0.1
    assert now.is_held_up
    assert now.draft_ages_s(0) == pytest.approx([0.7, 0.6])
    empty = make_round([0, 1])
    empty.timer = Took(0.8)
    assert empty.step_seconds() == 0
    assert empty.draft_ages_s(0) == []


def test_a_round_that_all_have_left_is_nobodys():
    assert make_round([2, 3]).for_batch([make_state("0"), make_state("1")]) is None

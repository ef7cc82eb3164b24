"""Requests whose token is the largest logit: this shortcut must not change any token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import TOP_K_ALL, SamplingParams
from sglang_kvspec.runtime.spec_sampler import SpecSampler

VOCAB = 6
GREEDY = SamplingParams(top_k=1)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=5)
params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 0.3]),
    top_k=st.sampled_from([0, 1, 1, 1, 2]),
    top_p=st.sampled_from([1.0, 0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 3.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 3.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 5.0]),
    min_new_tokens=st.sampled_from([0, 0, 9]),
    stop_tokens=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.just(4.0), max_size=1),
    seed=st.sampled_from([None, 3]),
)


def make_state(params, drafts=(), output=(1,)):
    return RequestState("r", 10, output[-1], list(output), params, 50, drafts=list(drafts))


@given(
    params=params_of_any_kind,
    output=tokens,
    seed=st.integers(0, 1000),
    wrong_at=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_judging_an_argmax_request_is_verifying_it(params, output, seed, wrong_at, dtype):
    if not params.is_argmax:
        params = GREEDY
    logits = torch.randn((4, VOCAB), generator=torch.Generator().manual_seed(seed)).to(dtype)
    targets = logits.argmax(-1).tolist()
    drafts = [(t + (i == wrong_at)) % VOCAB for i, t in enumerate(targets[:3])]
    state, sampler = make_state(params, drafts, [*output, 1]), SpecSampler(0, torch.device("cpu"))
    judged = sampler.judge(state, targets, 4)
    assert judged == targets[: min(wrong_at, 3) + 1]
    assert judged == sampler.verify(state, logits, None).tokens
    assert state.drafts == drafts
    for row in logits[: len(drafts)]:
        sampler.draft(state, row[None], None)
    assert state.drafts == drafts + targets[:3], "drafting takes the largest logit too"


def test_judging_takes_one_target_more_than_there_are_drafts():
    assert SpecSampler.judge(make_state(GREEDY), [5], 1) == [5]
    for drafts in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(AssertionError):
            SpecSampler.judge(make_state(GREEDY, drafts), [1, 2, 3, 4], 4)


@given(params=params_of_any_kind)
def test_argmax_requests_are_greedy_without_anything_that_moves_the_maximum(params):
    moved = replace(GREEDY, **{name: getattr(params, name) for name in MOVERS})
    assert params.is_argmax == (params.top_k <= 1 and moved == GREEDY)


MOVERS = {
    "frequency_penalty": -0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 0.9,
    "min_new_tokens": 1,
    "logit_bias": {3: 1.0},
}


@pytest.mark.parametrize(("name", "value"), [*MOVERS.items(), ("top_k", 2), ("top_k", TOP_K_ALL)])
def test_whatever_moves_the_maximum_is_not_argmax(name, value):
    assert GREEDY.is_argmax
    assert not replace(GREEDY, **{name: value}).is_argmax

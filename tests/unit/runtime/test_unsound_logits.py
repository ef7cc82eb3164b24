"""Rows of logits from which no token can be chosen: NaN, inf, or every token masked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams, num_finite, num_sound_rows
from sglang_kvspec.runtime.spec_sampler import SpecSampler

VOCAB, CPU = 6, torch.device("cpu")
NAN, INF = float("nan"), float("inf")
KINDS = {
    "greedy": SamplingParams(top_k=1),
    "seeded": SamplingParams(temperature=0.9, top_k=5, seed=42),
    "sampled": SamplingParams(temperature=1.1, top_p=0.95),
    "unfiltered": SamplingParams(),
}
# Values of a row, and the tokens that its mask allows.
UNSOUND = {
    "one NaN": ({2: NAN}, None),
    "all NaN": (dict.fromkeys(range(VOCAB), NAN), None),
    "one inf": ({0: INF}, None),
    "NaN and inf": ({0: INF, 1: NAN}, None),
    "all -inf": (dict.fromkeys(range(VOCAB), -INF), None),
    "all masked": ({}, ()),
    "allowed is -inf": ({3: -INF}, (3,)),
}
SOUND = {
    "as they are": ({}, None),
    "one -inf": ({2: -INF}, None),
    "one finite": (dict.fromkeys(range(1, VOCAB), -INF), None),
    "one allowed": ({}, (3,)),
    "inf masked": ({0: INF}, (1, 2, 3)),
    "NaN masked": ({0: NAN}, (1, 2, 3)),
    "large": ({1: 3e38}, None),
}
every_kind = pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
every_unsound_row = pytest.mark.parametrize("content", UNSOUND.values(), ids=UNSOUND)


def make_rows(num_rows, contents):
    """Make logits and masks. contents: values and allowed tokens of some rows."""
    logits = torch.randn((num_rows, VOCAB), generator=torch.Generator().manual_seed(0))
    masks = torch.ones((num_rows, VOCAB), dtype=torch.bool)
    for row, (values, allowed) in contents.items():
        for token, value in values.items():
            logits[row, token] = value
        if allowed is not None:
            masks[row] = False
            masks[row, list(allowed)] = True
    return logits, masks


def make_state(params):
    return RequestState("r", 10, 1, [1], params, 50)


def drafted(sampler, params, logits):
    """Make a request that has drafted from these rows."""
    state = make_state(params)
    for row in logits:
        sampler.draft(state, row[None], None)
    return state


@every_kind
@every_unsound_row
def test_no_first_token_comes_from_an_unsound_row(params, content):
    logits, masks = make_rows(1, {0: content})
    first = SpecSampler(0, CPU).first(logits, params, (), 7, masks)
    assert first.tokens == []
    assert first.logits.shape == (1, VOCAB)


@every_kind
@pytest.mark.parametrize("content", SOUND.values(), ids=SOUND)
def test_a_sound_row_gives_a_token_it_allows(params, content):
    logits, masks = make_rows(1, {0: content})
    sampler, state = SpecSampler(0, CPU), make_state(params)
    (first,) = sampler.first(logits, params, (), 7, masks).tokens
    sampler.draft(state, logits, masks)
    (verified,) = sampler.verify(make_state(params), logits, masks).tokens
    values, allowed = content
    for token in (first, *state.drafts, verified):
        assert 0 <= token < VOCAB
        assert allowed is None or token in allowed
        assert values.get(token) != -INF


@every_kind
@every_unsound_row
def test_a_draft_of_an_unsound_row_is_some_token_and_its_distribution_is_sound(params, content):
    logits, masks = make_rows(1, {0: content})
    state = make_state(params)
    SpecSampler(0, CPU).draft(state, logits, masks)
    assert state.drafts == [0]
    for probs in state.draft_probs:
        assert probs.tolist() == [1] + [0] * (VOCAB - 1)
    assert len(state.draft_probs) == (not params.is_greedy and params.seed is None)


@every_kind
@every_unsound_row
def test_verification_of_an_unsound_draft_follows_a_sound_target(params, content):
    """The target forbids the draft, so it is rejected and replaced."""
    sampler, state = SpecSampler(0, CPU), make_state(params)
    sampler.draft(state, *make_rows(1, {0: content}))
    logits, masks = make_rows(2, {0: ({}, (4,))})
    assert sampler.verify(state, logits, masks).tokens == [4]


@every_kind
@every_unsound_row
def test_verification_of_an_unsound_first_row_emits_nothing(params, content):
    sampler = SpecSampler(0, CPU)
    logits, masks = make_rows(3, {0: content})
    state = drafted(sampler, params, make_rows(2, {})[0])
    before = list(state.drafts)
    assert sampler.verify(state, logits, masks).tokens == []
    assert state.drafts == before


@every_kind
@every_unsound_row
@pytest.mark.parametrize("at", [1, 2, 3])
def test_tokens_before_an_unsound_row_are_emitted(params, content, at):
    """The drafts were drawn from the rows before `at`, so all of them are accepted."""
    sampler = SpecSampler(0, CPU)
    sound = make_rows(4, {})[0]
    logits, masks = make_rows(4, {at: content})
    state = drafted(sampler, params, sound[:3])
    drafts = list(state.drafts)
    tokens = sampler.verify(state, logits, masks).tokens
    # An unsound row ends a run as the last draft does: the row before it adds no token of its own.
    assert tokens[: at - 1] == drafts[: at - 1]
    assert len(tokens) == at


@every_kind
def test_rows_behind_an_unsound_one_are_not_read(params):
    sampler = SpecSampler(0, CPU)
    state = drafted(sampler, params, make_rows(3, {})[0])
    found = []
    for later in ({}, {2: ({0: NAN}, None), 3: ({0: INF}, None)}):
        logits, masks = make_rows(4, {1: ({0: NAN}, None), **later})
        found.append(SpecSampler(0, CPU).verify(state, logits, masks).tokens)
    assert found[0] == found[1]
    assert len(found[0]) == 1


@every_kind
def test_an_overflow_by_temperature_is_unsound_where_tokens_are_sampled(params):
    logits = torch.full((1, VOCAB), 1e35)
    cold = replace(params, temperature=1e-5)
    assert num_sound_rows(logits, params) == 1
    # The temperature does not move the maximum of a greedy request.
    assert num_sound_rows(logits, cold) == params.is_greedy
    assert len(SpecSampler(0, CPU).first(logits, cold, (), 7, None).tokens) == params.is_greedy


@pytest.mark.parametrize("kind", ["greedy", "seeded", "sampled"])
def test_an_overflow_by_bias_or_penalty_is_unsound(kind):
    logits = torch.full((1, VOCAB), 3e38)
    sampler = SpecSampler(0, CPU)
    biased = replace(KINDS[kind], logit_bias={2: 3e38})
    assert sampler.first(logits, biased, (), 7, None).tokens == []
    penalised = replace(KINDS[kind], repetition_penalty=1e-30)
    assert sampler.first(logits, penalised, [2], 7, None).tokens == []
    assert len(sampler.first(logits, penalised, [], 7, None).tokens) == 1


@every_kind
@every_unsound_row
def test_a_failing_request_leaves_others_their_tokens(params, content):
    """One generator serves all requests, and an unsound row draws nothing from it."""
    logits, masks = make_rows(1, {})
    alone, beside = SpecSampler(3, CPU), SpecSampler(3, CPU)
    wanted, found = [], []
    for _ in range(5):
        wanted += alone.first(logits, params, (), 7, masks).tokens
        beside.first(*[make_rows(1, {0: content})[0], params, (), 7], make_rows(1, {0: content})[1])
        found += beside.first(logits, params, (), 7, masks).tokens
    assert found == wanted


@given(
    drafts=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
    sound=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_judging_stops_where_verifying_does(drafts, sound, seed):
    logits = torch.randn((len(drafts) + 1, VOCAB), generator=torch.Generator().manual_seed(seed))
    logits[sound:, 0] = NAN
    state = make_state(KINDS["greedy"])
    state.drafts.extend(drafts)
    largest, targets = logits.max(-1)
    judged = SpecSampler.judge(state, targets.tolist(), num_finite(largest))
    assert judged == SpecSampler(0, CPU).verify(state, logits, None).tokens
    assert len(judged) <= sound


@pytest.mark.parametrize(
    ("largest", "number"),
    [
        ([], 0),
        ([1.0, 2.0], 2),
        ([NAN, 1.0], 0),
        ([1.0, INF, 1.0], 1),
        ([1.0, -INF], 1),
        ([3e38, -3e38, NAN], 2),
    ],
)
def test_finite_numbers_are_counted_up_to_the_first_other(largest, number):
    assert num_finite(torch.tensor(largest)) == number

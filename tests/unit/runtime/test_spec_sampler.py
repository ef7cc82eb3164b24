"""SpecSampler: the right rule for greedy, seeded and unseeded requests, at the right positions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams, choose_with_noise, distribution
from sglang_kvspec.runtime.spec_sampler import SpecSampler

VOCAB = 6
GREEDY = SamplingParams(top_k=1)
SEEDED = SamplingParams(temperature=0.9, top_k=5, seed=42)
UNSEEDED = SamplingParams(temperature=1.1, top_p=0.95)
every_kind = pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, UNSEEDED], ids=["greedy", "seeded", "unseeded"]
)


@pytest.fixture
def sampler():
    return SpecSampler(0, torch.device("cpu"))


def make_state(params, drafts=(), committed_len=10, output=(1,)):
    return RequestState(
        rid="r",
        committed_len=committed_len,
        pending=output[-1],
        output=list(output),
        params=params,
        remaining=50,
        drafts=list(drafts),
    )


def random_logits(rows, seed=0):
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_most_likely_token(sampler):
    logits = random_logits(4)
    best = logits.argmax(-1).tolist()
    assert sampler.first(logits[:1], GREEDY, (), 7, None).tokens == best[:1]
    state = make_state(GREEDY)
    for row in range(3):
        sampler.draft(state, logits[row : row + 1], None)
    assert state.drafts == best[:3]
    assert state.draft_probs == []
    assert sampler.verify(state, logits, None).tokens == best
    state.drafts[1] = (best[1] + 1) % VOCAB
    assert sampler.verify(state, logits, None).tokens == best[:2]


def test_seeded_tokens_use_the_noise_of_their_own_position(sampler):
    logits = random_logits(4)
    probs = distribution(logits, SEEDED)

    def token(row, position):
        return choose_with_noise(probs[row : row + 1], SEEDED.seed, position)[0]

    # The first token after a prompt of 10 is at position 10, and becomes the pending token.
    assert sampler.first(logits[:1], SEEDED, (), 10, None).tokens == [token(0, 10)]
    state = make_state(SEEDED, committed_len=10)
    for row in range(3):
        sampler.draft(state, logits[row : row + 1], None)
    assert state.drafts == [token(row, 11 + row) for row in range(3)]
    assert state.draft_probs == []
    # Drafts from the target's own distribution are accepted, and one token is added.
    assert sampler.verify(state, logits, None).tokens == [*state.drafts, token(3, 14)]


def test_a_seeded_token_is_the_same_as_first_draft_and_target(sampler):
    logits = random_logits(1)
    first = sampler.first(logits, SEEDED, (), 11, None).tokens
    state = make_state(SEEDED, committed_len=10)
    verified = sampler.verify(state, logits, None).tokens
    sampler.draft(state, logits, None)
    assert first == verified == state.drafts


def test_unseeded_drafts_remember_what_they_were_drawn_from(sampler):
    logits = random_logits(3)
    state = make_state(UNSEEDED)
    for row in range(3):
        sampler.draft(state, logits[row : row + 1], None)
    wanted = distribution(logits, UNSEEDED)
    assert len(state.drafts) == len(state.draft_probs) == 3
    for row in range(3):
        assert torch.equal(state.draft_probs[row], wanted[row])
        assert wanted[row, state.drafts[row]] > 0


def test_unseeded_verification_follows_the_target(sampler):
    target, draft = random_logits(2, seed=1), random_logits(1, seed=2)
    target[1] = target[0]
    p = distribution(target[:1], UNSEEDED)[0]
    counts = Counter()
    for _ in range(1500):
        state = make_state(UNSEEDED)
        sampler.draft(state, draft, None)
        counts[sampler.verify(state, target, None).tokens[0]] += 1
    possible = [t for t in range(VOCAB) if p[t] > 0]
    assert set(counts) <= set(possible)
    expected = (p[possible].double() / p[possible].double().sum() * 1500).tolist()
    assert chisquare([counts[t] for t in possible], expected).pvalue > 1e-3


@every_kind
def test_verification_returns_the_logits_each_token_was_chosen_from(sampler, params):
    logits = random_logits(3)
    state = make_state(params)
    for row in range(2):
        sampler.draft(state, logits[row : row + 1], None)
    verified = sampler.verify(state, logits, None)
    assert torch.equal(verified.logits, logits)
    assert 1 <= len(verified.tokens) <= 3


@every_kind
def test_verifying_commits_nothing(sampler, params):
    logits = random_logits(2)
    state = make_state(params)
    sampler.draft(state, logits[:1], None)
    before = (state.committed_len, list(state.output), list(state.drafts), state.remaining)
    sampler.verify(state, logits, None)
    assert before == (state.committed_len, state.output, state.drafts, state.remaining)


@every_kind
def test_only_allowed_tokens_are_chosen(sampler, params):
    logits = random_logits(3)
    masks = torch.zeros((3, VOCAB), dtype=torch.bool)
    masks[[0, 1, 2], [4, 2, 0]] = True
    assert sampler.first(logits[:1], params, (), 9, masks[:1]).tokens == [4]
    state = make_state(params)
    for row in range(2):
        sampler.draft(state, logits[row : row + 1], masks[row : row + 1])
    assert state.drafts == [4, 2]
    assert sampler.verify(state, logits, masks).tokens == [4, 2, 0]


@every_kind
def test_penalties_count_output_then_drafts(sampler, params):
    """A large penalty rules out a token that was drafted or emitted once."""
    fields = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "seed")}
    params = SamplingParams(**fields, presence_penalty=200.0)
    flat = torch.zeros((1, VOCAB))
    state = make_state(params, output=(3, 1))
    for _ in range(3):
        sampler.draft(state, flat, None)
    assert len({*state.output, *state.drafts}) == 5
    emitted = sampler.verify(state, flat.expand(4, -1), None).tokens
    assert len({*state.output, *emitted}) == len(state.output) + len(emitted)
    assert sampler.first(flat, params, [0, 1, 2, 3, 5], 9, None).tokens == [4]


def test_the_server_seed_repeats_unseeded_requests():
    def run(seed):
        sampler, tokens = SpecSampler(seed, torch.device("cpu")), []
        for _ in range(40):
            state = make_state(UNSEEDED)
            sampler.draft(state, torch.zeros((1, VOCAB)), None)
            tokens += sampler.verify(state, torch.zeros((2, VOCAB)), None).tokens
        return tokens

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_seeded_request_depends_on_no_other_request_or_server_seed():
    logits = random_logits(2)

    def run(server_seed, others):
        sampler = SpecSampler(server_seed, torch.device("cpu"))
        for _ in range(others):
            sampler.draft(make_state(UNSEEDED), logits[:1], None)
        state = make_state(SEEDED)
        sampler.draft(state, logits[:1], None)
        return sampler.verify(state, logits, None).tokens

    assert run(0, 0) == run(9, 5)

"""From logits to the target's distribution, compared with plain Python written after SGLang's
sampler."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_kvspec.runtime.sampling import (
    TOP_K_ALL,
    SamplingParams,
    adjust_logits,
    choose_with_noise,
    distribution,
    logprobs_of,
)

VOCAB = 8
# Sixteenths are exact in fp32, so there are no near-ties by rounding.
logits = st.lists(
    st.integers(-64, 64).map(lambda x: x / 16), min_size=VOCAB, max_size=VOCAB, unique=True
)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=10)


def model_distribution(row, params):
    """Return the result of top_k_top_p_min_p_sampling_from_probs_torch, in which all filters see
    the unfiltered probabilities."""
    weights = [math.exp((x - max(row)) / params.temperature) for x in row]
    probs = [w / math.fsum(weights) for w in weights]
    order = sorted(range(len(row)), key=lambda t: -probs[t])
    kept, before = {}, 0.0
    for rank, token in enumerate(order):
        p = probs[token]
        if rank < params.top_k and before <= params.top_p and p >= probs[order[0]] * params.min_p:
            kept[token] = p
        before += p
    total = math.fsum(kept.values())
    return [kept.get(t, 0.0) / total for t in range(len(row))]


@given(
    rows=st.lists(logits, min_size=1, max_size=3),
    temperature=st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([2, 3, VOCAB - 1, VOCAB, TOP_K_ALL]),
    # Values between the sums that these logits can reach, or on the safe side of rounding.
    top_p=st.sampled_from([0.1003, 0.5001, 0.9007, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0503, 0.3001, 1.0]),
)
def test_filters_keep_what_sglang_keeps(rows, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = distribution(torch.tensor(rows), params)
    for row, probs in zip(rows, got.tolist(), strict=True):
        assert probs == pytest.approx(model_distribution(row, params), abs=1e-6)


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_p=0.5), {0, 1}),
        (SamplingParams(top_p=0.49), {0}),
        (SamplingParams(top_p=0.76), {0, 1, 2}),
        (SamplingParams(min_p=0.5), {0, 1}),
        (SamplingParams(min_p=0.51), {0}),
        # top_p counts the mass of tokens that top_k has dropped, and min_p uses the most likely
        # token.
        (SamplingParams(top_k=3, top_p=0.76, min_p=0.2), {0, 1, 2}),
        (SamplingParams(), {0, 1, 2, 3}),
    ],
)
def test_support_on_a_known_distribution(params, support):
    row = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    probs = distribution(row, params)[0]
    assert set(probs.nonzero().flatten().tolist()) == support
    assert float(probs.sum()) == pytest.approx(1, abs=1e-6)


def test_distribution_leaves_its_input_alone():
    row = torch.tensor([[1.0, 2.0, 3.0]])
    distribution(row, SamplingParams(temperature=0.5, top_k=2))
    assert row.tolist() == [[1.0, 2.0, 3.0]]


def test_reported_logprobs_see_temperature_but_no_filter():
    row = torch.tensor([[1.0, 2.0, 4.0]])
    got = logprobs_of(row, SamplingParams(temperature=2.0, top_k=2, top_p=0.5, min_p=0.5))
    assert torch.allclose(got, (row / 2).log_softmax(-1))


# Penalties

penalties = st.builds(
    SamplingParams,
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    min_new_tokens=st.integers(0, 12),
    stop_tokens=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 0.5, 3]), max_size=3
    ),
)


def model_adjust(row, params, seen, allowed):
    """Return logits adjusted as in SGLang: additive penalties, the multiplicative penalty, the
    mask, the bias."""
    counts = Counter(seen)
    out = []
    for token, x in enumerate(row):
        if counts[token]:
            x -= params.frequency_penalty * counts[token] + params.presence_penalty
        if len(seen) < params.min_new_tokens and token in params.stop_tokens:
            x = -math.inf
        if counts[token]:
            x = x * params.repetition_penalty if x < 0 else x / params.repetition_penalty
        if not allowed[token]:
            x = -math.inf
        out.append(x + params.logit_bias.get(token, 0))
    return out


@given(params=penalties, output=tokens, drafts=tokens, data=st.data(), masked=st.booleans())
def test_adjusted_logits_equal_the_model_row_by_row(params, output, drafts, data, masked):
    num_rows = len(drafts) + 1
    rows = data.draw(st.lists(logits, min_size=num_rows, max_size=num_rows))
    allowed = [[True] * VOCAB] * num_rows
    if masked:
        row_mask = st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB)
        allowed = data.draw(st.lists(row_mask, min_size=num_rows, max_size=num_rows))
    got = adjust_logits(
        torch.tensor(rows), params, output, drafts, torch.tensor(allowed) if masked else None
    )
    for j in range(num_rows):
        want = model_adjust(rows[j], params, [*output, *drafts[:j]], allowed[j])
        assert got[j].tolist() == pytest.approx(want, abs=1e-5)


@given(params=penalties, output=tokens, drafts=tokens, row=logits)
def test_a_drafted_token_and_its_verification_see_the_same_penalties(params, output, drafts, row):
    """A draft sees the tokens before it as output, and the verification sees them as drafts."""
    rows = torch.tensor([row] * (len(drafts) + 1))
    verified = adjust_logits(rows, params, output, drafts)
    for j in range(len(drafts) + 1):
        drafted = adjust_logits(rows[:1], params, [*output, *drafts[:j]], ())
        assert torch.equal(drafted[0], verified[j])


def test_adjusting_returns_new_fp32_logits():
    given_logits = torch.ones((1, VOCAB), dtype=torch.bfloat16)
    out = adjust_logits(given_logits, SamplingParams(logit_bias={1: 2}), (), ())
    assert out.dtype == torch.float32
    assert out[0, 1] == 3
    assert (given_logits == 1).all()
    same = torch.ones((1, VOCAB))
    assert adjust_logits(same, SamplingParams(), (), ()) is not same


# Noise fixed by seed and position


def assert_follows(observed, probabilities):
    expected = torch.tensor(probabilities, dtype=torch.float64) * sum(observed.values())
    counts = [observed[token] for token in range(len(probabilities))]
    possible = [e > 0 for e in expected]
    assert all(ok or not n for ok, n in zip(possible, counts, strict=True))
    kept = [(n, float(e)) for ok, n, e in zip(possible, counts, expected, strict=True) if ok]
    assert chisquare(*zip(*kept, strict=True)).pvalue > 1e-3


P = [0.45, 0.3, 0.15, 0.0, 0.07, 0.03]


def test_tokens_follow_p_over_positions():
    probs = torch.tensor([P]).expand(5000, -1)
    assert_follows(Counter(choose_with_noise(probs, 17, 0)), P)


def test_tokens_follow_p_over_seeds():
    probs = torch.tensor([P])
    assert_follows(Counter(choose_with_noise(probs, seed, 3)[0] for seed in range(5000)), P)


def test_neighbouring_positions_are_independent():
    half = torch.full((5001, 2), 0.5)
    chosen = choose_with_noise(half, 1, 0)
    pairs = Counter(2 * a + b for a, b in pairwise(chosen))
    assert_follows(pairs, [0.25] * 4)


@given(seed=st.integers(0, 2**62), position=st.integers(0, 10**6), length=st.integers(1, 4))
def test_a_token_depends_on_seed_and_position_alone(seed, position, length):
    probs = torch.tensor([P]).expand(length, -1)
    together = choose_with_noise(probs, seed, position)
    apart = [choose_with_noise(probs[:1], seed, position + i)[0] for i in range(length)]
    assert together == apart == choose_with_noise(probs, seed, position)


def test_a_certain_token_is_always_chosen():
    probs = torch.tensor([[0.0, 1.0, 0.0]]).expand(500, -1)
    assert set(choose_with_noise(probs, 3, 0)) == {1}


def test_close_distributions_mostly_agree():
    """Seeded drafts are accepted because both sides use the same noise."""
    p = torch.tensor([P]).expand(1000, -1)
    q = torch.tensor([[0.43, 0.32, 0.15, 0.0, 0.06, 0.04]]).expand(1000, -1)
    agree = sum(map(int.__eq__, choose_with_noise(p, 5, 0), choose_with_noise(q, 5, 0)))
    assert agree > 930

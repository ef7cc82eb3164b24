"""Emitted tokens of the accept rules: those of plain decoding, or tokens with the same
distribution."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import cycle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_kvspec.runtime import acceptance
from sglang_kvspec.runtime.acceptance import accept_by_rejection, accept_matching, draw

VOCAB = 5
NUM_DRAWS = 20_000
# Seeds are fixed, so a check always passes or always fails. Wrong rules give values many orders
# below.
LEAST_P_VALUE = 1e-3
tokens = st.integers(0, 3)


@given(st.lists(tokens, max_size=8), st.data())
def test_emits_the_targets_up_to_the_first_that_differs(drafts, data):
    targets = data.draw(st.lists(tokens, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    emitted = accept_matching(drafts, targets)
    kept = len(emitted) - 1
    assert emitted == targets[: kept + 1]
    assert drafts[:kept] == targets[:kept]
    assert kept == len(drafts) or drafts[kept] != targets[kept]


@given(
    plain=st.lists(tokens, min_size=30, max_size=30),
    proposals=st.lists(st.lists(tokens, max_size=6), max_size=40),
)
def test_whatever_is_drafted_the_output_is_that_of_plain_decoding(plain, proposals):
    """The target depends only on the number of emitted tokens."""
    output = []
    for drafts in proposals:
        drafts = drafts[: len(plain) - len(output) - 1]
        if len(output) == len(plain):
            break
        output += accept_matching(drafts, plain[len(output) : len(output) + len(drafts) + 1])
    assert output == plain[: len(output)]


@pytest.mark.parametrize("num_targets", [0, 2, 4])
def test_a_verification_has_one_target_more_than_drafts(num_targets):
    with pytest.raises(AssertionError):
        accept_matching([1, 1], [1] * num_targets)


# Rejection sampling

FLAT = [0.2, 0.2, 0.2, 0.2, 0.2]
SKEWED = [0.5, 0.3, 0.1, 0.07, 0.03]
LOW, HIGH = [0.7, 0.3, 0.0, 0.0, 0.0], [0.0, 0.0, 0.1, 0.3, 0.6]
PAIRS = {
    "p equals q": (SKEWED, SKEWED),
    "q is flat": (SKEWED, FLAT),
    "disjoint supports": (LOW, HIGH),
    "q misses tokens": (SKEWED, LOW),
}


class Chain:
    """A process whose next token depends on the last one."""

    def __init__(self, first):
        first = torch.tensor(first)
        # Rotations keep the support and shape of the distribution, and make the second token depend
        # on the first.
        self.after = {None: first} | {t: first.roll(t + 1) for t in range(VOCAB)}

    def pairs(self):
        """Return the probability of every pair of first tokens [VOCAB, VOCAB]."""
        second = torch.stack([self.after[t] for t in range(VOCAB)])
        return self.after[None].double()[:, None] * second.double()

    def draws(self, num, seed):
        """Return endless tokens after each token. They are drawn in bulk, as single draws would
        take half the test."""
        generator = torch.Generator().manual_seed(seed)
        return {
            last: cycle(torch.multinomial(law, num, True, generator=generator).tolist())
            for last, law in self.after.items()
        }


def decode_pairs(target, drafter, num_drafts, num_draws, seed):
    """Count the first two tokens that speculative decoding emits."""
    generator = torch.Generator().manual_seed(seed)
    drafted = drafter.draws(3 * num_draws, seed + 1)
    laws = cache(lambda *last: torch.stack([target.after[token] for token in last]))
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(num_draws):
        output: list[int] = []
        while len(output) < 2:
            last = [output[-1] if output else None]
            for _ in range(num_drafts):
                last.append(next(drafted[last[-1]]))
            qs = [drafter.after[token] for token in last[:-1]]
            output += acceptance.accept_by_rejection(last[1:], qs, laws(*last), generator)
        counts[output[0], output[1]] += 1
    return counts


def assert_follows(counts, probabilities):
    """Compare counts with probabilities by chi-square. Impossible outcomes must not occur."""
    expected = probabilities.flatten() / probabilities.sum() * counts.total()
    shape = probabilities.shape
    observed = torch.zeros(shape, dtype=torch.float64)
    for outcome, count in counts.items():
        observed[outcome] = count
    observed = observed.flatten()
    possible = expected > 0
    assert not observed[~possible].any(), "emitted what the target never emits"
    assert (observed[possible] > 0).all(), "never emitted what the target emits"
    p_value = chisquare(observed[possible].numpy(), expected[possible].numpy()).pvalue
    assert p_value > LEAST_P_VALUE, f"not the target's distribution (p value {p_value:.1e})"


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_tokens_follow_the_target(name):
    target, drafter = map(Chain, PAIRS[name])
    num_drafts = 2 if name == "q is flat" else 1
    counts = decode_pairs(target, drafter, num_drafts, NUM_DRAWS, seed=7)
    assert_follows(counts, target.pairs())


def test_without_drafts_it_draws_from_the_target():
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([SKEWED])
    counts = Counter((accept_by_rejection([], [], p, generator)[0],) for _ in range(NUM_DRAWS // 4))
    assert_follows(counts, p[0].double())


def test_perfect_drafts_are_all_accepted():
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([SKEWED] * 4)
    for _ in range(300):
        drafts = [draw(p[0], generator) for _ in range(3)]
        assert accept_by_rejection(drafts, list(p[:3]), p, generator)[:3] == drafts


def test_acceptance_rate_is_the_overlap_of_the_distributions():
    generator = torch.Generator().manual_seed(3)
    p, q = torch.tensor(SKEWED), torch.tensor(FLAT)
    overlap = float(torch.minimum(p, q).sum())
    accepted = sum(
        len(accept_by_rejection([draw(q, generator)], [q], torch.stack((p, p)), generator)) == 2
        for _ in range(2000)
    )
    # The tolerance is five standard errors of a binomial share.
    assert accepted / 2000 == pytest.approx(overlap, abs=5 * (0.25 / 2000) ** 0.5)


def test_the_same_generator_state_gives_the_same_tokens():
    p, q = torch.tensor([SKEWED] * 3), torch.tensor(FLAT)

    def run():
        generator = torch.Generator().manual_seed(5)
        return [accept_by_rejection([1, 2], [q, q], p, generator) for _ in range(50)]

    assert run() == run()


def test_the_probabilities_handed_in_are_left_alone():
    p, q = torch.tensor([LOW, LOW]), torch.tensor(HIGH)
    kept = p.clone(), q.clone()
    accept_by_rejection([4], [q], p, torch.Generator().manual_seed(0))
    assert torch.equal(p, kept[0])
    assert torch.equal(q, kept[1])


# Wrong rules must fail the same check


def accept_all(drafts, qs, ps, generator):
    return [*drafts, draw(ps[len(drafts)], generator)]


def redraw_from_the_target(drafts, qs, ps, generator):
    """Reject rightly, then draw from p instead of p - q."""
    emitted = []
    for index, (token, q) in enumerate(zip(drafts, qs, strict=True)):
        if float(torch.rand((), generator=generator)) * float(q[token]) < float(ps[index][token]):
            emitted.append(token)
        else:
            return [*emitted, draw(ps[index], generator)]
    return [*emitted, draw(ps[len(drafts)], generator)]


def last_row_of_the_wrong_position(drafts, qs, ps, generator):
    return accept_by_rejection(drafts, qs, torch.cat((ps[:-1], ps[-2:-1])), generator)


@pytest.mark.parametrize(
    "wrong", [accept_all, redraw_from_the_target, last_row_of_the_wrong_position]
)
def test_a_wrong_rule_is_detected(monkeypatch, wrong):
    monkeypatch.setattr(acceptance, "accept_by_rejection", wrong)
    target, drafter = map(Chain, PAIRS["q is flat"])
    counts = decode_pairs(target, drafter, 1, NUM_DRAWS // 8, seed=7)
    with pytest.raises(AssertionError, match="not the target's distribution"):
        assert_follows(counts, target.pairs())

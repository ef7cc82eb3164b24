"""Tokens of a sampled request have the target's distribution, drafts included.

A target and a drafter that disagree stand in for full precision and anchors. Each is a table of
logits by last token, so that the distribution of two emitted tokens is known exactly.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from sglang_kvspec.runtime import spec_sampler as chooser_module
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams, distribution
from sglang_kvspec.runtime.spec_sampler import SpecSampler

VOCAB = 7
NUM_DRAWS = 20_000
NUM_DRAFTS = 2
SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "top-p": SamplingParams(temperature=1.0, top_p=0.75),
    "cooler, top-k and min-p": SamplingParams(temperature=0.7, top_k=5, min_p=0.1),
}
# Chance of a false alarm. Generators are seeded, so a test that passes once passes always.
SIGNIFICANCE = 1e-3


def logit_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (target, drafter), each [VOCAB, VOCAB]: logits of the next token by the last one."""
    generator = torch.Generator().manual_seed(11)
    target = 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)
    return target, target + 1.2 * torch.randn(VOCAB, VOCAB, generator=generator)


def emitted_pairs(params: SamplingParams, num_draws: int) -> torch.Tensor:
    """Return how often each pair of tokens followed token 0: [VOCAB, VOCAB]."""
    target, drafter = logit_tables()
    sampler = SpecSampler(seed=5, device=torch.device("cpu"))
    counts = torch.zeros(VOCAB, VOCAB)
    for _ in range(num_draws):
        pair: list[int] = []
        state = RequestState("r", 3, pending=0, output=[0], params=params, remaining=100)
        while len(pair) < 2:
            for _ in range(NUM_DRAFTS):
                sampler.draft(state, drafter[state.last_token][None], None)
            rows = target[torch.tensor([state.pending, *state.drafts])]
            verified = sampler.verify(state, rows, None)
            state.commit(verified.tokens)
            pair += verified.tokens
        counts[pair[0], pair[1]] += 1
    return counts


def p_value(counts: torch.Tensor, params: SamplingParams) -> float:
    """Return the p value of the chi-square test against the target's chain. Impossible pairs must
    not occur."""
    target, _ = logit_tables()
    probs = distribution(target, params).double()
    expected = probs[0][:, None] * probs * counts.sum()
    assert not bool(counts[expected == 0].any()), "a filtered token was emitted"
    # By the usual rule, bins with fewer than five expected counts are pooled.
    large = expected >= 5
    observed = [*counts[large].tolist(), counts[~large].sum().item()]
    wanted = [*expected[large].tolist(), expected[~large].sum().item()]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    scale = sum(observed) / sum(wanted)
    return float(chisquare(observed, [value * scale for value in wanted]).pvalue)


@pytest.mark.parametrize("setting", SETTINGS)
def test_emitted_pairs_follow_the_target(setting: str) -> None:
    params = SETTINGS[setting]
    assert p_value(emitted_pairs(params, NUM_DRAWS), params) > SIGNIFICANCE


@pytest.mark.parametrize("fault", ["accept all", "keep the draft's probabilities"])
def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Neither accepting all drafts nor judging them by the drafter's own probabilities passes the
    test."""
    original = chooser_module.accept_by_rejection

    def wrong(drafts, draft_probs, target_probs, generator):  # type: ignore[no-untyped-def]
        if fault == "accept all":
            return list(drafts)
        return original(drafts, [target_probs[0]] * len(drafts), target_probs, generator)

    monkeypatch.setattr(chooser_module, "accept_by_rejection", wrong)
    params = SETTINGS["temperature 1"]
    assert p_value(emitted_pairs(params, 4_000), params) < 1e-6

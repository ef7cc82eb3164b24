"""Acceptance estimate of a request, and the best draft length for it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvspec.core.config import MOST_AUTO_DRAFTS

# Drafts that auto may always make.
LEAST_AUTO_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Cost of rows relative to a plain decode row; only ratios matter.

    draft: one draft row. verify: a verification of the pending token alone. verify_token: each
    further token verified in the same row.
    """

    draft: float = 0.35
    verify: float = 1.0
    verify_token: float = 0.02


def most_auto_drafts(tokens_of_a_pass: int | None) -> int:
    """Return the most drafts of a request with draft_len auto.

    tokens_of_a_pass: tokens, the pending one among them, for which a verification reads the
    request's KV once; None for no such limit.
    """
    if tokens_of_a_pass is None:
        return MOST_AUTO_DRAFTS
    # A second pass is better where one pass takes so few tokens that hardly any are drafts.
    return min(max(tokens_of_a_pass - 1, LEAST_AUTO_DRAFTS), MOST_AUTO_DRAFTS)


@dataclass(slots=True)
class AcceptanceEstimate:
    """Probability that the target agrees with one more draft, if drafts are independent.

    prior: accepted and rejected drafts, by default worth 20 drafts at 0.95. Drafts after a
    rejection say nothing and are not counted. A verification without drafts moves the estimate
    towards the prior, so that a request that stopped drafting tries again.
    """

    accepted: float = 19.0
    rejected: float = 1.0
    prior: tuple[float, float] = (19.0, 1.0)

    # Forget slowly, so that a request that turns from copying to composing adapts.
    DECAY = 0.9
    FADE = 0.98

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        if num_drafts == 0:
            accepted, rejected = self.prior
            self.accepted = accepted + (self.accepted - accepted) * self.FADE
            self.rejected = rejected + (self.rejected - rejected) * self.FADE
            return
        self.accepted = self.accepted * self.DECAY + num_accepted
        self.rejected = self.rejected * self.DECAY + (num_accepted < num_drafts)

    @property
    def probability(self) -> float:
        # A floor under rejections keeps the geometric series finite for perfect drafts.
        return self.accepted / (self.accepted + max(self.rejected, 0.05))


def expected_tokens(probability: float, num_drafts: int) -> float:
    """Tokens emitted by one verification of num_drafts (Leviathan et al. 2023, equation 1)."""
    return (1 - probability ** (num_drafts + 1)) / (1 - probability)


def best_draft_len(probability: float, max_draft_len: int, cost: DraftCost) -> int:
    """The draft length in 1..max_draft_len with the most expected tokens per cost."""

    def rate(num_drafts: int) -> float:
        spent = cost.verify + num_drafts * (cost.draft + cost.verify_token)
        return expected_tokens(probability, num_drafts) / spent

    return max(range(1, max_draft_len + 1), key=rate)

"""Costs learnt while serving: measured iterations correct what was expected."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sglang_kvspec.planning.costs import IterationCosts
from sglang_kvspec.planning.online import RATE, Deviation


@dataclass(frozen=True, slots=True)
class Rows:
    """What an iteration ran: the arguments of IterationCosts.seconds."""

    num_draft_rows: int
    draft_kv_tokens: int
    num_verify_rows: int
    verify_query_tokens: int
    verify_kv_tokens: int


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Costs as last believed; observing returns new ones.

    Exponentially weighted: each observation moves what it concerns by RATE of its (clipped) error.
    """

    costs: IterationCosts
    step_deviation: Deviation = field(default_factory=Deviation)

    def observe_step(self, rows: Rows, seconds: float) -> CostEstimate:
        """Learn from one iteration's time.

        Its error is shared among what all rows share, drafts' attention and verifications'
        attention, by the square of their parts of it (normalised least mean squares), so that
        iterations of different mixtures tell them apart.
        """
        parts = self._parts(rows)
        expected = sum(parts)
        if expected <= 0 or not 0 < seconds < float("inf"):
            return self
        error = seconds / expected - 1
        clipped = self.step_deviation.clip(error)
        norm = sum(part * part for part in parts)
        # No part shrinks by more than half at once, whatever the error.
        base, draft, verify = (
            max(1 + RATE * clipped * expected * part / norm, 0.5) for part in parts
        )
        return replace(
            self,
            costs=self.costs.scaled(base=base, draft=draft, verify=verify),
            step_deviation=self.step_deviation.observe(error),
        )

    def _parts(self, rows: Rows) -> tuple[float, float, float]:
        """Expected seconds of what all rows share, of drafts' and of verifications' attention."""
        num_tokens = rows.num_draft_rows + rows.verify_query_tokens
        if not num_tokens:
            return 0.0, 0.0, 0.0
        return (
            self.costs.base_seconds(num_tokens) + self.costs.kvspec_s,
            self.costs.draft_kv_token_s * rows.draft_kv_tokens,
            self.costs.verify_attention_seconds(
                rows.num_verify_rows, rows.verify_query_tokens, rows.verify_kv_tokens
            ),
        )

"""Costs learnt while serving: measured iterations and fetches correct what was expected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log

from sglang_kvspec.planning.costs import IterationCosts

# Weight of a new observation.
RATE = 0.05
# An observation further off than so many mean deviations counts as if it were that far off.
OUTLIER_DEVIATIONS = 3.0
LEAST_DEVIATION, FIRST_DEVIATION = 0.01, 0.2
# Smaller copies measure latency, not bandwidth.
LEAST_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Deviation:
    """Mean relative error of predictions, by which outliers are told from news.

    It grows by a tenth at most with an observation: one stall is an outlier, a lasting change of
    level raises it until the change is believed.
    """

    mean: float = FIRST_DEVIATION

    def clip(self, error: float) -> float:
        limit = OUTLIER_DEVIATIONS * self.mean
        return min(max(error, -limit), limit)

    def observe(self, error: float) -> Deviation:
        mean = self.mean + RATE * (abs(self.clip(error)) - self.mean)
        return Deviation(max(mean, LEAST_DEVIATION))


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
    """Costs and link bandwidth as last believed; observing returns a new one.

    Exponentially weighted: each observation moves what it concerns by RATE of its (clipped) error.
    """

    costs: IterationCosts
    link_bytes_per_s: float
    step_deviation: Deviation = Deviation()
    link_deviation: Deviation = Deviation()

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

    def observe_copy(self, num_bytes: int, seconds: float) -> CostEstimate:
        """Learn from one fetch. Its rate counts on a logarithmic scale: twice and half as fast
        weigh the same."""
        if num_bytes < LEAST_COPY_BYTES or not 0 < seconds < float("inf"):
            return self
        error = log(num_bytes / seconds / self.link_bytes_per_s)
        step = RATE * self.link_deviation.clip(error)
        return replace(
            self,
            link_bytes_per_s=self.link_bytes_per_s * exp(step),
            link_deviation=self.link_deviation.observe(error),
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

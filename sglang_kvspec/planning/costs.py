"""What an iteration takes and what a cycle of drafts brings: the numbers that plans weigh."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import hypot
from typing import Protocol

from sglang_kvspec.core.config import MAX_DRAFT_LEN
from sglang_kvspec.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Mean accepted drafts by draft length, as measured; linear between measured lengths.

    draft_lens: rising, from 1 on; accepted: of as many drafts. Past the last length nothing more
    is expected: a curve is never extended by a guess.
    """

    draft_lens: tuple[int, ...]
    accepted: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.draft_lens or len(self.draft_lens) != len(self.accepted):
            raise ConfigError(
                "an acceptance curve needs as many accepted lengths as draft lengths, got "
                f"{len(self.accepted)} and {len(self.draft_lens)}"
            )
        last_len, last_accepted = 0, 0.0
        for draft_len, accepted in zip(self.draft_lens, self.accepted, strict=True):
            more = draft_len - last_len
            # Not written as a negation of <, so that NaN is refused too.
            if more < 1 or not 0 <= accepted - last_accepted <= more:
                raise ConfigError(
                    "accepted lengths must rise with the draft length, by at most one a draft, "
                    f"got {accepted} accepted of {draft_len} after {last_accepted} of {last_len}"
                )
            last_len, last_accepted = draft_len, accepted

    @classmethod
    def from_means(cls, means: Mapping[int, float]) -> AcceptanceCurve:
        lens = tuple(sorted(means))
        return cls(lens, tuple(means[n] for n in lens))

    @classmethod
    def geometric(cls, probability: float, max_draft_len: int = MAX_DRAFT_LEN) -> AcceptanceCurve:
        """The curve of drafts that are each right with `probability`, whatever came before."""
        if not 0 <= probability <= 1:
            raise ConfigError(f"an acceptance probability is from 0 to 1, got {probability}")
        means, accepted = {}, 0.0
        for n in range(1, max_draft_len + 1):
            accepted += probability**n
            means[n] = min(accepted, n)
        return cls.from_means(means)

    def expected_accepted(self, draft_len: int) -> float:
        """Drafts that a verification of draft_len of them keeps, on average."""
        if draft_len <= 0:
            return 0.0
        at = bisect_left(self.draft_lens, draft_len)
        if at == len(self.draft_lens):
            return self.accepted[-1]
        left_len, left = (self.draft_lens[at - 1], self.accepted[at - 1]) if at else (0, 0.0)
        share = (draft_len - left_len) / (self.draft_lens[at] - left_len)
        return left + share * (self.accepted[at] - left)

    def expected_tokens(self, draft_len: int) -> float:
        """Tokens one cycle emits: the accepted drafts and the target's own token."""
        return self.expected_accepted(draft_len) + 1


class Costs(Protocol):
    """Seconds of an iteration; IterationCosts has the measured ones."""

    def seconds(
        self,
        num_draft_rows: float,
        draft_kv_tokens: float,
        num_verify_rows: float,
        verify_query_tokens: float,
        verify_kv_tokens: float,
    ) -> float: ...

    def plain_seconds(self, num_rows: float, kv_tokens: float) -> float: ...


@dataclass(frozen=True, slots=True)
class IterationCosts:
    """Seconds of each part of one ragged forward, on one rank.

    overhead_s: what an iteration costs beside the rest (small kernels, gaps). kvspec_s: what it
    costs more with KVSpec than without (encoding pages). weights_s: reading every weight that any
    token needs; experts_s: reading all routed experts, of which a token takes expert_share.
    token_s: the matrix products of one token, bound by arithmetic. plain_kv_token_s,
    draft_kv_token_s, verify_kv_token_s: reading what a row attends to, for each cached token.
    verify_pair_s: a verification's attention arithmetic, for each pair of a query token and a
    cached token.
    """

    overhead_s: float
    weights_s: float
    token_s: float
    plain_kv_token_s: float
    draft_kv_token_s: float
    verify_kv_token_s: float
    verify_pair_s: float = 0.0
    kvspec_s: float = 0.0
    experts_s: float = 0.0
    expert_share: float = 1.0

    def seconds(
        self,
        num_draft_rows: float,
        draft_kv_tokens: float,
        num_verify_rows: float,
        verify_query_tokens: float,
        verify_kv_tokens: float,
    ) -> float:
        """One iteration of draft rows (one token each) and verify rows, KV tokens summed over them.

        Numbers may be averages. Verify rows are taken to be alike. An iteration without rows takes
        no time.
        """
        num_tokens = num_draft_rows + verify_query_tokens
        if not num_tokens:
            return 0.0
        return (
            self.base_seconds(num_tokens)
            + self.kvspec_s
            + self.draft_kv_token_s * draft_kv_tokens
            + self.verify_attention_seconds(num_verify_rows, verify_query_tokens, verify_kv_tokens)
        )

    def plain_seconds(self, num_rows: float, kv_tokens: float) -> float:
        """One iteration of plain decoding with num_rows requests of kv_tokens together."""
        if not num_rows:
            return 0.0
        return self.base_seconds(num_rows) + self.plain_kv_token_s * kv_tokens

    def base_seconds(self, num_tokens: float) -> float:
        """All but attention: one pass over the weights, or its arithmetic if that is more."""
        touched = 1.0
        if self.experts_s:
            # Tokens choose experts independently, as far as a plan can know.
            touched = 1 - (1 - self.expert_share) ** num_tokens
        weights = self.weights_s + self.experts_s * touched
        return self.overhead_s + max(weights, self.token_s * num_tokens)

    def verify_attention_seconds(
        self, num_rows: float, query_tokens: float, kv_tokens: float
    ) -> float:
        """Reading anchors and residuals once a row, and its arithmetic.

        They overlap in part: the root of the sum of their squares is within 11 % of what our
        kernels took for 1 to 64 tokens (benchmarks/results/attention_h200.json).
        """
        if not num_rows:
            return 0.0
        pairs = query_tokens / num_rows * kv_tokens
        return hypot(self.verify_kv_token_s * kv_tokens, self.verify_pair_s * pairs)

    def with_faster(self, *, memory: float = 1.0, arithmetic: float = 1.0) -> IterationCosts:
        """These costs on a GPU with so many times the memory bandwidth and FLOP/s."""
        return replace(
            self,
            weights_s=self.weights_s / memory,
            experts_s=self.experts_s / memory,
            plain_kv_token_s=self.plain_kv_token_s / memory,
            draft_kv_token_s=self.draft_kv_token_s / memory,
            verify_kv_token_s=self.verify_kv_token_s / memory,
            token_s=self.token_s / arithmetic,
            verify_pair_s=self.verify_pair_s / arithmetic,
        )

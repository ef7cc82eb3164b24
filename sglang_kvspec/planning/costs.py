"""Costs of an iteration and gains of a draft cycle: the numbers that plans weigh."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import hypot
from typing import Protocol

from sglang_kvspec.core.config import MAX_DRAFT_LEN
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.draft_weights import int4_time


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Mean accepted drafts by draft length, as measured; linear between measured lengths.

    draft_lens: ascending, at least 1. accepted: mean accepted drafts of each length. Beyond the
    last length the curve stays flat: a curve is never extended by a guess.
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
            # `not a <= b` is True for NaN, where `a > b` would accept it.
            if more < 1 or not 0 <= accepted - last_accepted <= more:
                raise ConfigError(
                    "accepted lengths must rise with the draft length, by at most one a draft, "
                    f"got {accepted} at length {draft_len} after {last_accepted} at length "
                    f"{last_len}"
                )
            last_len, last_accepted = draft_len, accepted

    @classmethod
    def from_means(cls, means: Mapping[int, float]) -> AcceptanceCurve:
        lens = tuple(sorted(means))
        return cls(lens, tuple(means[n] for n in lens))

    @classmethod
    def geometric(cls, probability: float, max_draft_len: int = MAX_DRAFT_LEN) -> AcceptanceCurve:
        """Return the curve of drafts that are each right with `probability`, independently."""
        if not 0 <= probability <= 1:
            raise ConfigError(f"an acceptance probability must be from 0 to 1, got {probability}")
        means, accepted = {}, 0.0
        for n in range(1, max_draft_len + 1):
            accepted += probability**n
            means[n] = min(accepted, n)
        return cls.from_means(means)

    def thinned(self, kept: float) -> AcceptanceCurve:
        """Return the curve of drafts that are each spoiled with probability 1 - kept besides."""
        means, last_len, last_accepted, thinned = {}, 0, 0.0, 0.0
        for draft_len, accepted in zip(self.draft_lens, self.accepted, strict=True):
            each = (accepted - last_accepted) / (draft_len - last_len)
            thinned += sum(each * kept**n for n in range(last_len + 1, draft_len + 1))
            means[draft_len] = thinned
            last_len, last_accepted = draft_len, accepted
        return AcceptanceCurve.from_means(means)

    def expected_accepted(self, draft_len: int) -> float:
        """Return the mean number of drafts that a verification of draft_len drafts keeps."""
        if draft_len <= 0:
            return 0.0
        at = bisect_left(self.draft_lens, draft_len)
        if at == len(self.draft_lens):
            return self.accepted[-1]
        left_len, left = (self.draft_lens[at - 1], self.accepted[at - 1]) if at else (0, 0.0)
        share = (draft_len - left_len) / (self.draft_lens[at] - left_len)
        return left + share * (self.accepted[at] - left)

    def expected_tokens(self, draft_len: int) -> float:
        """Return the mean number of tokens that a cycle emits: accepted drafts and the target's own
        token."""
        return self.expected_accepted(draft_len) + 1


class Costs(Protocol):
    """Seconds of an iteration: the protocol that IterationCosts implements."""

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

    overhead_s: small kernels and gaps. kvspec_s: what KVSpec adds to an iteration (encoding pages).
    weights_s: reading the weights that every token needs. experts_s: reading all routed experts,
    of which a token takes expert_share. token_s: the matrix products of one token, bound by
    arithmetic. plain_kv_token_s, draft_kv_token_s, verify_kv_token_s: reading KV, for each cached
    token that a row attends to. verify_pair_s: attention arithmetic of a verification, for each
    pair of a query token and a cached token. score_kv_token_s: scoring pages after a verification,
    for each cached token. copied_s: the part of weights_s that drafts read in 4 bits instead, 0
    where they read the model's own weights.
    """

    overhead_s: float
    weights_s: float
    token_s: float
    plain_kv_token_s: float
    draft_kv_token_s: float
    verify_kv_token_s: float
    verify_pair_s: float = 0.0
    score_kv_token_s: float = 0.0
    kvspec_s: float = 0.0
    experts_s: float = 0.0
    expert_share: float = 1.0
    copied_s: float = 0.0

    def seconds(
        self,
        num_draft_rows: float,
        draft_kv_tokens: float,
        num_verify_rows: float,
        verify_query_tokens: float,
        verify_kv_tokens: float,
    ) -> float:
        """Return the seconds of an iteration of draft rows (one token each) and verify rows.

        KV tokens are summed over the rows. Numbers may be averages. Verify rows are taken to be
        alike. An iteration without rows takes no time.

        All rows draft together and verify together, so an average iteration drafts by as large a
        share as its rows do.
        """
        num_tokens = num_draft_rows + verify_query_tokens
        if not num_tokens:
            return 0.0
        saved_s = 0.0
        if self.copied_s:
            num_rows = num_draft_rows + num_verify_rows
            saved_s = num_draft_rows / num_rows * self.copied_s * (1 - int4_time(num_rows))
        return (
            self.base_seconds(num_tokens, saved_s)
            + self.kvspec_s
            + self.draft_kv_token_s * draft_kv_tokens
            + self.score_kv_token_s * verify_kv_tokens
            + self.verify_attention_seconds(num_verify_rows, verify_query_tokens, verify_kv_tokens)
        )

    def plain_seconds(self, num_rows: float, kv_tokens: float) -> float:
        """Return the seconds of a plain iteration of num_rows requests. kv_tokens: of all."""
        if not num_rows:
            return 0.0
        return self.base_seconds(num_rows) + self.plain_kv_token_s * kv_tokens

    def base_seconds(self, num_tokens: float, saved_s: float = 0.0) -> float:
        """Return the seconds of all but attention: overhead, and reading the weights or the
        arithmetic on them, whichever takes longer. saved_s: by which reading is shorter."""
        touched = 1.0
        if self.experts_s:
            # Assumption: tokens choose experts independently of each other.
            touched = 1 - (1 - self.expert_share) ** num_tokens
        weights = self.weights_s + self.experts_s * touched - saved_s
        return self.overhead_s + max(weights, self.token_s * num_tokens)

    def verify_attention_seconds(
        self, num_rows: float, query_tokens: float, kv_tokens: float
    ) -> float:
        """Return the seconds of reading anchors and residuals once a row, and of the arithmetic.

        Reads and arithmetic overlap in part: the root of the sum of their squares is within 11 % of
        our kernels' times for 1 to 64 tokens (benchmarks/results/attention_h200.json).
        """
        if not num_rows:
            return 0.0
        pairs = query_tokens / num_rows * kv_tokens
        return hypot(self.verify_kv_token_s * kv_tokens, self.verify_pair_s * pairs)

    def with_faster(self, *, memory: float = 1.0, arithmetic: float = 1.0) -> IterationCosts:
        """Return the costs on a GPU with `memory` times the bandwidth and `arithmetic` times the
        FLOP/s."""
        return replace(
            self,
            weights_s=self.weights_s / memory,
            experts_s=self.experts_s / memory,
            copied_s=self.copied_s / memory,
            plain_kv_token_s=self.plain_kv_token_s / memory,
            draft_kv_token_s=self.draft_kv_token_s / memory,
            score_kv_token_s=self.score_kv_token_s / memory,
            verify_kv_token_s=self.verify_kv_token_s / memory,
            token_s=self.token_s / arithmetic,
            verify_pair_s=self.verify_pair_s / arithmetic,
        )

"""State of a running request between iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_kvspec.planning.draft_budget import ALL_PAGES
from sglang_kvspec.planning.draft_length import AcceptanceEstimate
from sglang_kvspec.planning.proposals import RequestNgrams
from sglang_kvspec.runtime.disaggregation.timeline import Timeline
from sglang_kvspec.runtime.draft_counts import DraftCounts
from sglang_kvspec.runtime.sampling import SamplingParams
from sglang_kvspec.runtime.token_scores import TokenScores


@dataclass(slots=True)
class RequestState:
    """State of one running request. Positions 0 .. committed_len - 1 have verified KV, but for the
    tail.

    pending: the verified token at committed_len, whose KV is not computed yet; drafts follow it.
    output: every token that the user was or will be sent, pending included.
    draft_probs: for sampled requests, the distribution [vocab] that each draft was drawn from.
    remaining: tokens that the request may still emit.
    priority: requests of higher priority verify first where verifications compete.
    is_streamed: a client reads tokens as they are emitted.
    last_emitted: tokens that the last verification, or the prefill, emitted.
    has_waited: the request drafts because it could not verify, and shall verify as soon as it can.
    tail: for a request that started on anchors, the last tokens before `pending` until its first
    verification. They are known prompt tokens without verified KV. The first draft gives them KV
    that drafts may read.
    prompt: tokens of the prompt, also those whose KV was cached. The server's own list, never
    changed. ngrams: n-grams of prompt and output, where a drafter proposes from them.
    grammar: constraint on the tokens, as runtime/grammar.py takes it; None for no constraint.
    budget: share of its pages that drafts read, where a draft view asks for it. estimates: of
    acceptance, by budget, where budgets vary; `acceptance` is that of the present budget.
    draft_counts: what its drafts read, also before a retraction.
    slot: place among all running requests of what a device keeps of this one.
    num_scored: how many of its first pages have an attention mass, by which a draft view chooses.
    page_mass: that mass [num_layers, num_kv_heads, num_scored] on a CPU; None if num_scored is 0. A
    GPU keeps it in `slot`.
    token_scores: of its first tokens, where a scorer chooses what its drafts read.
    timeline, room: set for a request that another server prefilled. room: SGLang's bootstrap room.
    """

    rid: str
    committed_len: int
    pending: int
    output: list[int]
    params: SamplingParams
    remaining: int
    priority: int = 0
    prompt: Sequence[int] = ()
    drafts: list[int] = field(default_factory=list)
    draft_probs: list[torch.Tensor] = field(default_factory=list)
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    is_streamed: bool = False
    last_emitted: int = 1
    has_waited: bool = False
    tail: list[int] = field(default_factory=list)
    budget: float = ALL_PAGES
    estimates: dict[float, AcceptanceEstimate] = field(default_factory=dict)
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    slot: int = 0
    num_scored: int = 0
    page_mass: torch.Tensor | None = None
    token_scores: TokenScores | None = None
    timeline: Timeline | None = None
    room: int | None = None
    ngrams: RequestNgrams | None = None
    grammar: Any = None

    @property
    def is_greedy(self) -> bool:
        """Return True if every token is that of the model's largest unadjusted logit."""
        return self.params.is_argmax and self.grammar is None

    @property
    def next_position(self) -> int:
        """Position of the last token that has no KV yet: the last draft, or the pending token."""
        return self.committed_len + len(self.drafts)

    @property
    def last_token(self) -> int:
        return self.drafts[-1] if self.drafts else self.pending

    @property
    def verified_len(self) -> int:
        """Number of tokens with verified KV."""
        return self.committed_len - len(self.tail)

    @property
    def undrafted(self) -> list[int]:
        """Tokens up to last_token that have no KV, which the next draft is computed from."""
        return self.drafts[-1:] or [*self.tail, self.pending]

    @property
    def unverified(self) -> list[int]:
        """Tokens without verified KV, which a verification is computed from."""
        return [*self.tail, self.pending, *self.drafts]

    def cap_len(self, max_draft_len: int) -> int:
        """Return the most drafts that the request can use: a verification adds one token to the
        drafts."""
        return max(0, min(max_draft_len, self.remaining - 1))

    def commit(self, emitted: list[int]) -> None:
        """Apply a verification that kept the first len(emitted) - 1 drafts and emitted these
        tokens."""
        self.acceptance.observe(len(self.drafts), len(emitted) - 1)
        for estimate in self.estimates.values():
            if estimate is not self.acceptance:
                estimate.observe(0, 0)
        self.committed_len += len(emitted)
        self.pending = emitted[-1]
        self.last_emitted = len(emitted)
        self.output.extend(emitted)
        self.remaining -= len(emitted)
        self.has_waited = False
        self.tail.clear()
        self.drafts.clear()
        self.draft_probs.clear()

"""What the worker remembers of a running request between iterations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_kvspec.planning.draft_length import AcceptanceEstimate
from sglang_kvspec.runtime.disaggregation.timeline import Timeline
from sglang_kvspec.runtime.sampling import SamplingParams


@dataclass(slots=True)
class RequestState:
    """Positions 0 .. committed_len - 1 have verified KV, but for the tail. pending: the verified
    token at committed_len, whose KV is not computed yet; drafts follow it.

    output: every token the user was or will be sent, pending included. draft_probs: for sampled
    requests, the distribution [vocab] each draft was drawn from. remaining: tokens the request may
    still emit. priority: a higher one verifies first where verifications compete.
    is_streamed: a client reads tokens as they come. last_emitted: tokens that its last
    verification, or its prefill, emitted.
    has_waited: it drafts since it could not verify, and shall verify as soon as it can.
    tail: of a request that started on anchors, the last tokens before `pending` until its first
    verification: they are known, as all of the prompt, but have no verified KV before it. The first
    draft gives them KV that drafts may read.
    grammar: what constrains its tokens, as runtime/grammar.py takes it; None for nothing.
    timeline and room (SGLang's bootstrap room): of a request that another server prefilled.
    """

    rid: str
    committed_len: int
    pending: int
    output: list[int]
    params: SamplingParams
    remaining: int
    priority: int = 0
    drafts: list[int] = field(default_factory=list)
    draft_probs: list[torch.Tensor] = field(default_factory=list)
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    is_streamed: bool = False
    last_emitted: int = 1
    has_waited: bool = False
    tail: list[int] = field(default_factory=list)
    timeline: Timeline | None = None
    room: int | None = None
    grammar: Any = None

    @property
    def is_greedy(self) -> bool:
        """Whether every token is that of the largest logit, as the model gives it."""
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
        """Tokens with verified KV."""
        return self.committed_len - len(self.tail)

    @property
    def undrafted(self) -> list[int]:
        """Tokens that a draft is computed from, up to last_token: those without any KV."""
        return self.drafts[-1:] or [*self.tail, self.pending]

    @property
    def unverified(self) -> list[int]:
        """Tokens that a verification is computed from."""
        return [*self.tail, self.pending, *self.drafts]

    def cap_len(self, max_draft_len: int) -> int:
        """Most drafts it can use: the verification adds a token of its own to those drafted."""
        return max(0, min(max_draft_len, self.remaining - 1))

    def commit(self, emitted: list[int]) -> None:
        """A verification kept its first len(emitted) - 1 drafts and emitted these tokens."""
        self.acceptance.observe(len(self.drafts), len(emitted) - 1)
        self.committed_len += len(emitted)
        self.pending = emitted[-1]
        self.last_emitted = len(emitted)
        self.output.extend(emitted)
        self.remaining -= len(emitted)
        self.has_waited = False
        self.tail.clear()
        self.drafts.clear()
        self.draft_probs.clear()

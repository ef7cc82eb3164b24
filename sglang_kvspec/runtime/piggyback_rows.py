"""Rows of a captured forward in which some requests verify and others piggyback a draft."""

from __future__ import annotations

import torch

from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.verify_rows import VerifyRows

# Most piggyback drafts of a forward. Every such forward computes all these rows, used or not.
MOST_PIGGYBACK = 64


class PiggybackRows:
    """Tokens of all rows of `drafts`, and behind them those of `verify`. Both lie in `tokens`, [2,
    drafts.max_batch + verify.max_tokens] int64: input ids and positions."""

    def __init__(self, drafts: DraftRows, verify: VerifyRows, tokens: torch.Tensor) -> None:
        self.drafts, self.verify, self.device = drafts, verify, verify.device
        self.input_ids, self.positions = tokens

    def clear(self) -> None:
        """Remove all requests."""
        self.drafts.clear()
        self.verify.clear()

    # Calls of a captured forward

    def begin_step(self, num_tokens: int) -> None:
        self.drafts.begin_step(self.drafts.max_batch)

    def end_step(self, logits: torch.Tensor) -> None:
        """Store the chosen drafts. The other logits are used outside of the graph."""
        self.drafts.end_step(logits[: self.drafts.max_batch])

"""What a forward reads that verifies tokens of some requests and drafts one more of others."""

from __future__ import annotations

import torch

from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.verify_rows import VerifyRows

# Requests that draft while others verify: their rows are in every such product of weights.
MOST_PIGGYBACK = 64


class PiggybackRows:
    """The tokens of all rows of `drafts`, and behind them the first ones of `verify`: both lie in
    the [2, drafts.max_batch + verify.max_tokens] int64 `tokens`, input ids and positions."""

    def __init__(self, drafts: DraftRows, verify: VerifyRows, tokens: torch.Tensor) -> None:
        self.drafts, self.verify, self.device = drafts, verify, verify.device
        self.input_ids, self.positions = tokens

    def clear(self) -> None:
        """No request drafts or verifies."""
        self.drafts.clear()
        self.verify.clear()

    # What a captured forward calls

    def begin_step(self, num_tokens: int) -> None:
        self.drafts.begin_step(self.drafts.max_batch)

    def end_step(self, logits: torch.Tensor) -> None:
        """Notes what drafts were chosen; what follows from the others is decided outside."""
        self.drafts.end_step(logits[: self.drafts.max_batch])

"""Scores of a request's tokens, by which its drafts read some of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang_kvspec.scorers.base import Allocation
from sglang_kvspec.scorers.selection import kept_tokens


@dataclass(slots=True)
class TokenScores:
    """Scores of a request's first tokens. scores: [num_layers, num_kv_heads, num_tokens] float32.
    memory: what the scorer notes, by layer."""

    scores: torch.Tensor
    memory: list[dict[str, torch.Tensor]]
    # Masks that were made of these scores, by budget. Every draft step asks for one.
    _kept: dict[float, torch.Tensor] = field(default_factory=dict)
    _num_unread: dict[float, float] = field(default_factory=dict)

    def kept(self, budget: float, allocation: Allocation, unit: int) -> torch.Tensor:
        """Return which tokens of whole units drafts read, see kept_tokens()."""
        if budget not in self._kept:
            whole = self.scores.shape[-1] // unit * unit
            kept = kept_tokens(self.scores[..., :whole], budget, allocation, unit)
            self._kept[budget] = kept
        return self._kept[budget]

    def num_unread(self, budget: float, allocation: Allocation, unit: int) -> float:
        """Return how many of these tokens drafts do not read, the mean of layers and KV heads."""
        if budget not in self._num_unread:
            kept = self.kept(budget, allocation, unit)
            self._num_unread[budget] = float((~kept).float().sum(-1).mean())
        return self._num_unread[budget]

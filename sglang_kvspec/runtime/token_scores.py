"""Scores of a request's tokens, by which its drafts read some of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sglang_kvspec.scorers.base import Allocation
from sglang_kvspec.scorers.selection import kept_units


@dataclass(slots=True)
class TokenScores:
    """Scores of a request's first tokens. scores: [num_layers, num_kv_heads, num_tokens] float32 on
    the CPU. memory: what the scorer notes, by layer."""

    scores: torch.Tensor
    memory: list[dict[str, torch.Tensor]]
    # What was made of these scores, by budget. Every draft step asks for it.
    _units: dict[float, torch.Tensor] = field(default_factory=dict)
    _kept: dict[float, torch.Tensor] = field(default_factory=dict)
    _num_unread: dict[float, float] = field(default_factory=dict)
    # Newest lists of pages, and what they were made for.
    _pages: tuple[float, int, torch.Tensor] | None = None

    def kept(self, budget: float, allocation: Allocation, unit: int) -> torch.Tensor:
        """Return which tokens of whole units drafts read, see kept_tokens()."""
        if budget not in self._kept:
            units = self._kept_units(budget, allocation, unit)
            self._kept[budget] = units.repeat_interleave(unit, dim=-1)
        return self._kept[budget]

    def num_unread(self, budget: float, allocation: Allocation, unit: int) -> float:
        """Return how many of these tokens drafts do not read, the mean of layers and KV heads."""
        if budget not in self._num_unread:
            units = self._kept_units(budget, allocation, unit)
            self._num_unread[budget] = unit * float((~units).float().sum(-1).mean())
        return self._num_unread[budget]

    def pages(
        self, budget: float, allocation: Allocation, page_size: int, num_pages: int
    ) -> torch.Tensor:
        """Return the lists of the first num_pages pages that drafts read, ascending, int64
        [num_layers, num_kv_heads, longest list]: those that kept() selects, and all pages behind
        the scores. Shorter lists end in num_pages. Drafts of a page's tokens share lists."""
        if self._pages is None or self._pages[:2] != (budget, num_pages):
            kept = self._kept_units(budget, allocation, page_size)
            spare = max(0, num_pages - kept.shape[-1])
            read = F.pad(kept, (0, spare), value=True)[..., :num_pages]
            counts = read.sum(-1, keepdim=True)
            # Pages that are read come first, each part in order.
            order = (~read).to(torch.uint8).argsort(dim=-1, stable=True)
            places = torch.arange(num_pages)
            lists = torch.where(places < counts, order, num_pages)[..., : int(counts.max())]
            self._pages = (budget, num_pages, lists)
        return self._pages[2]

    def _kept_units(self, budget: float, allocation: Allocation, unit: int) -> torch.Tensor:
        if budget not in self._units:
            whole = self.scores.shape[-1] // unit * unit
            self._units[budget] = kept_units(self.scores[..., :whole], budget, allocation, unit)
        return self._units[budget]

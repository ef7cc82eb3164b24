"""Scores of a request's tokens, by which its drafts read some of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang_kvspec.scorers.base import Allocation
from sglang_kvspec.scorers.selection import kept_units


@dataclass(slots=True)
class TokenScores:
    """Scores of a request's first tokens. scores: [num_layers, num_kv_heads, num_tokens] float32 on
    the CPU. memory: what the scorer notes, by layer."""

    scores: torch.Tensor
    memory: list[dict[str, torch.Tensor]]
    # Units and tokens that are read, their counts and lists, by budget. Every draft step asks for
    # some of them.
    _units: dict[float, torch.Tensor] = field(default_factory=dict)
    _kept: dict[float, torch.Tensor] = field(default_factory=dict)
    _num_unread: dict[float, float] = field(default_factory=dict)
    _lists: dict[float, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    # Newest lists of pages, of each head or of all, and what they were made for.
    _pages: tuple[float, int, torch.Tensor] | None = None
    _same_pages: tuple[float, int, torch.Tensor] | None = None

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
            spare = num_pages - kept.shape[-1]
            if spare < 0:
                lists, _ = _listed(kept[..., :num_pages])
            else:
                lists = self._followed(budget, kept, spare)
            self._pages = (budget, num_pages, lists)
        return self._pages[2]

    def same_pages(self, budget: float, page_size: int, num_pages: int) -> torch.Tensor:
        """Return which of the first num_pages pages drafts read where all heads read the same,
        ascending, int64 [num_read]: those that kept() selects, and all pages behind the scores."""
        if self._same_pages is None or self._same_pages[:2] != (budget, num_pages):
            kept = self._kept_units(budget, "same", page_size)[0, 0, :num_pages]
            behind = torch.arange(len(kept), num_pages)
            read = torch.cat((kept.nonzero().flatten(), behind))
            self._same_pages = (budget, num_pages, read)
        return self._same_pages[2]

    def unread_pages(self, budget: float, page_size: int) -> torch.Tensor:
        """Return which scored pages drafts do not read, ascending, int64, where all heads read the
        same."""
        return (~self._kept_units(budget, "same", page_size)[0, 0]).nonzero().flatten()

    def _followed(self, budget: float, kept: torch.Tensor, spare: int) -> torch.Tensor:
        """Return the lists of pages that are kept, each followed by `spare` pages behind all of
        them. A draft waits for this whenever its request begins a page, so only the pages that are
        listed are touched, not all of the request's."""
        if budget not in self._lists:
            self._lists[budget] = _listed(kept)
        listed, counts = self._lists[budget]
        num_kept, num_pages = kept.shape[-1], kept.shape[-1] + spare
        lists = listed.new_full((*listed.shape[:2], listed.shape[-1] + spare), num_pages)
        lists[..., : listed.shape[-1]] = listed.masked_fill(listed == num_kept, num_pages)
        behind = torch.arange(spare)
        places = (counts + behind).expand(*listed.shape[:2], -1)
        return lists.scatter_(-1, places, (num_kept + behind).expand_as(places))

    def _kept_units(self, budget: float, allocation: Allocation, unit: int) -> torch.Tensor:
        if budget not in self._units:
            whole = self.scores.shape[-1] // unit * unit
            self._units[budget] = kept_units(self.scores[..., :whole], budget, allocation, unit)
        return self._units[budget]


def _listed(read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lists of the pages that are read, ascending, int64 [num_layers, num_kv_heads, longest
    list], and their lengths [num_layers, num_kv_heads, 1]. Shorter lists end in num_pages. read:
    bool [num_layers, num_kv_heads, num_pages]."""
    num_pages = read.shape[-1]
    counts = read.sum(-1, keepdim=True)
    # Pages that are read come first, each part in order.
    order = (~read).to(torch.uint8).argsort(dim=-1, stable=True)
    lists = torch.where(torch.arange(num_pages) < counts, order, num_pages)
    longest = int(counts.max()) if num_pages else 0
    return lists[..., :longest].contiguous(), counts

"""Draft views of what a scorer keeps: --kvspec-compressor."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from sglang_kvspec.planning.draft_budget import ALL_PAGES
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.scorers.base import Allocation


class ScoredTokens:
    """View of the tokens with the best scores, and of all tokens without one: those that the
    request has generated since its scores were made. For a CPU."""

    per_head: ClassVar[bool] = True
    num_queries: ClassVar[int] = 0

    def __init__(self, allocation: Allocation, page_size: int, *, by_tokens: bool) -> None:
        """by_tokens: select single tokens instead of pages."""
        self._allocation, self._page_size = allocation, page_size
        self._unit = 1 if by_tokens else page_size

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        """Return a mask of the tokens of the first num_pages pages, see Row.seen; None for all."""
        if _reads_all(state):
            return None
        assert state.token_scores is not None
        kept = state.token_scores.kept(state.budget, self._allocation, self._unit)
        num_tokens = num_pages * self._page_size
        return F.pad(kept, (0, max(0, num_tokens - kept.shape[-1])), value=True)[..., :num_tokens]

    def num_tokens(self, state: RequestState, num_pages: int) -> float:
        """Return how many tokens of the first num_pages pages a draft reads, the mean of layers and
        KV heads."""
        return _num_read(state, num_pages, self._allocation, self._page_size, self._unit)


class ScoredPageLists:
    """View of the pages with the best scores, and of all pages that have none, as lists of pages
    for a GPU."""

    per_head: ClassVar[bool] = True
    num_queries: ClassVar[int] = 0

    def __init__(self, allocation: Allocation, page_size: int) -> None:
        self._allocation, self._page_size = allocation, page_size

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        """Return lists of pages, see TokenScores.pages(); None for all, which takes no lists."""
        scores, size = state.token_scores, self._page_size
        if scores is None or _reads_all(state):
            return None
        if not scores.num_unread(state.budget, self._allocation, size):
            # A prompt that was too long to be repeated, say.
            return None
        return scores.pages(state.budget, self._allocation, size, num_pages)

    def num_tokens(self, state: RequestState, num_pages: int) -> float:
        """As ScoredTokens.num_tokens()."""
        size = self._page_size
        return _num_read(state, num_pages, self._allocation, size, size)


class SamePages:
    """View of the pages with the best scores, and of all pages that have none, the same for all
    layers and KV heads."""

    per_head: ClassVar[bool] = False
    num_queries: ClassVar[int] = 0

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        """Return the pages, see TokenScores.same_pages(); None for all."""
        if _reads_all(state):
            return None
        assert state.token_scores is not None
        return state.token_scores.same_pages(state.budget, self._page_size, num_pages)


def _reads_all(state: RequestState) -> bool:
    return state.token_scores is None or state.budget == ALL_PAGES


def _num_read(
    state: RequestState, num_pages: int, allocation: Allocation, page_size: int, unit: int
) -> float:
    num_tokens = num_pages * page_size
    if _reads_all(state):
        return num_tokens
    assert state.token_scores is not None
    return num_tokens - state.token_scores.num_unread(state.budget, allocation, unit)

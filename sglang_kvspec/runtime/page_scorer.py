"""Scores of a request's pages, by the attention mass of its newest verified queries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.runtime.page_mass import page_mass
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.target_queries import LayerQueries, TargetQueries


class PageScorer(Protocol):
    """Scorer of the pages that a draft view chooses from."""

    def score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        """Set page_mass of the states of requests that committed tokens.

        committed: (index of the request's row in the newest forward at the target precision, state,
        pages). All tokens before the state's committed_len have verified KV, and the last of them
        are of that row.
        """


class NoScores:
    """Scorer for views that choose without attention mass."""

    def score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        """Do nothing."""


class ReferenceScorer:
    """Scorer in plain torch: the CPU server's, and the specification of the GPU's.

    Queries of the last verifications, queries.most at once, attend to the keys that drafts read:
    the anchors, and the recent window. So a page counts as much as a draft will make of it.
    """

    def __init__(self, kv: ReferenceKVCache, queries: TargetQueries) -> None:
        self._kv, self._queries = kv, queries

    def score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        for index, state, pages in committed:
            new = self._queries.before(index, state.committed_len)
            state.queries = self._newest(state.queries, new)
            state.page_mass = self._mass(state.queries, state.committed_len, pages)

    def _newest(self, old: LayerQueries, new: LayerQueries) -> LayerQueries:
        if not old or len(new[0]) >= self._queries.most:
            return new
        both = zip(old, new, strict=True)
        return [torch.cat(parts)[-self._queries.most :] for parts in both]

    def _mass(self, queries: LayerQueries, num_tokens: int, pages: torch.Tensor) -> torch.Tensor:
        """Return the mass [num_layers, num_kv_heads, num_pages] of the full pages of a request."""
        size = self._kv.geometry.page_size
        num_full, filled = divmod(num_tokens, size)
        by_layer = []
        for layer, q in enumerate(queries):
            k = self._kv.read_draft(layer, pages[:num_full])[0].flatten(0, 1)
            if filled:
                last = self._kv.window.read(layer, pages[num_full : num_full + 1])[0]
                k = torch.cat((k, last[0, :filled]))
            by_layer.append(page_mass(q, k, num_full, size))
        return torch.stack(by_layer)

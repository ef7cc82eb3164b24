"""Scores of a request's pages, by the attention mass of its newest verified queries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F

from kvspec_kernels.reference.page_selection import page_mass, updated_mass
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.runtime.draft_view import DraftView
from sglang_kvspec.runtime.phase_timer import TotalTimer
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.target_queries import LayerQueries, TargetQueries


class PageScorer(Protocol):
    """Scorer of the pages that a draft view chooses from.

    selection_s: seconds that scores have taken so far, and on a GPU selections.
    """

    @property
    def selection_s(self) -> float: ...

    def score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        """Update the attention mass of the pages of requests that committed tokens, and num_scored
        of their states.

        committed: (index of the request's row in the newest forward at the target precision, state,
        pages). All tokens before the state's committed_len have verified KV, and the last of them
        are of that row.
        """

    def mass_read(self, state: RequestState) -> float | None:
        """Return the share of the attention mass that is on the pages that the request's newest
        drafts read, the mean of all layers and KV heads; None if no mass is known. On a GPU, it is
        a share of the mass of pages before the recent window."""


class NoScores:
    """Scorer for views that choose without attention mass."""

    selection_s: ClassVar[float] = 0.0

    def score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        """Do nothing."""

    def mass_read(self, state: RequestState) -> None:
        """Know no mass."""


class ReferenceScorer:
    """Scorer in plain torch, for the CPU server.

    Queries of verified tokens attend to the pages before them, as drafts read these: anchors, or
    pages of the recent window. So a page counts as much as a draft will make of it. The mass is
    that of about the last queries.most verified tokens.
    """

    def __init__(self, kv: ReferenceKVCache, queries: TargetQueries, view: DraftView) -> None:
        self._kv, self._queries, self._view = kv, queries, view
        self._timer = TotalTimer(kv.device)

    @property
    def selection_s(self) -> float:
        return self._timer.seconds

    def score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        with self._timer:
            self._score(committed)

    def mass_read(self, state: RequestState) -> float | None:
        num_pages = state.committed_len // self._kv.geometry.page_size
        seen, mass = self._view.select(state, num_pages), state.page_mass
        if seen is None or mass is None:
            return None
        # Pages behind those that are scored have no mass.
        known = F.pad(mass, (0, num_pages - state.num_scored))
        read = known.gather(-1, seen.expand(*mass.shape[:2], -1))
        return 1 - float((mass.sum(-1) - read.sum(-1)).mean())

    def _score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        size, most = self._kv.geometry.page_size, self._queries.most
        for index, state, pages in committed:
            queries = self._queries.before(index, state.committed_len)
            num_queries = len(queries[0])
            num_pages = (state.committed_len - num_queries) // size
            if not num_queries or not num_pages:
                continue
            new = self._mass(queries, pages[:num_pages])
            state.page_mass = updated_mass(state.page_mass, new, num_queries, most)
            state.num_scored = num_pages

    def _mass(self, queries: LayerQueries, pages: torch.Tensor) -> torch.Tensor:
        """Return the mass [num_layers, num_kv_heads, num_pages] of full pages."""
        size = self._kv.geometry.page_size
        by_layer = []
        for layer, q in enumerate(queries):
            k = self._kv.read_draft(layer, pages)[0].flatten(0, 1)
            by_layer.append(page_mass(q, k, size, scale=1.0))
        return torch.stack(by_layer)

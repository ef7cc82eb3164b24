"""Tokens that drafts read by a draft view, and the share of the attention mass on them."""

from __future__ import annotations

import torch

from acceptance.drafting import TargetRun
from acceptance.model import Llama
from acceptance.rounds import DraftCaches, Rounds
from kvspec_kernels.reference.page_selection import page_mass
from sglang_kvspec.runtime.draft_view import DraftView
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams

# Verified queries whose mass on the pages read is noted, for every view.
MASS_QUERIES = 8


class ViewReads:
    """rounds.Reads by a draft view. budget: share of the pages that a view with budgets reads."""

    def __init__(
        self, model: Llama, run: TargetRun, caches: DraftCaches, view: DraftView, budget: float
    ) -> None:
        self._shape, self._run, self._caches = model.shape, run, caches
        self._view, self._budget = view, budget

    def visible(self, at: torch.Tensor, going: torch.Tensor, found: list[Rounds]) -> torch.Tensor:
        shape, size, view = self._shape, self._caches.page_size, self._view
        num_tokens = self._run.cache[0][0].shape[2]
        masks = torch.ones(
            (shape.num_layers, len(found), shape.num_kv_heads, num_tokens),
            dtype=torch.bool,
            device=at.device,
        )
        for row in going.nonzero().flatten().tolist():
            committed = self._run.prompt_len + int(at[row])
            num_pages = committed // size
            state = RequestState("", committed, 0, [], SamplingParams(), 1, budget=self._budget)
            if view.num_queries:
                state.page_mass = self._mass(row, committed, view.num_queries)
                state.num_scored = state.page_mass.shape[-1]
            seen = view.select(state, num_pages)
            if seen is None:
                found[row].pages_read.append(1.0)
                found[row].mass.append(1.0)
                continue
            mass = self._mass(row, committed, MASS_QUERIES)
            lists = seen.to(at.device).expand(shape.num_layers, shape.num_kv_heads, -1)
            read = torch.zeros((*mass.shape[:-1], num_pages), dtype=torch.bool, device=at.device)
            read.scatter_(-1, lists, True)
            found[row].pages_read.append(float(read.float().mean()))
            covered = mass * read[..., : mass.shape[-1]]
            found[row].mass.append(float(covered.sum() / mass.sum()))
            masks[:, row, :, : num_pages * size] = read.repeat_interleave(size, -1)
        return masks

    def verified(self, row: int, first: int, count: int) -> None:
        """Nothing to note: views choose by the queries of the run."""

    def _mass(self, row: int, committed: int, num_queries: int) -> torch.Tensor:
        """Return page_mass of the last num_queries verified tokens on the pages before them,
        [num_layers, num_kv_heads, num_pages]."""
        run, size = self._run, self._caches.page_size
        num_pages = (committed - num_queries) // size
        begin, by_layer = committed - num_queries, []
        layers = self._caches.layers
        for before, after, (k, _) in zip(run.prompt_queries, run.queries, layers, strict=True):
            all_queries = torch.cat((before[row], after[row]), dim=1)
            first = begin - run.prompt_len + before.shape[2]
            q = all_queries[:, first : first + num_queries].transpose(0, 1)
            keys = k[row, :, : num_pages * size].transpose(0, 1)
            by_layer.append(page_mass(q, keys, size, k.shape[-1] ** -0.5))
        return torch.stack(by_layer)

"""Drafter with one eager forward a step, for a device that replays no CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import ModelForward
from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.runtime.draft_view import DraftView, draft_forward_row
from sglang_kvspec.runtime.grammar import mask_after
from sglang_kvspec.runtime.ranks import Ranks, broadcast_drafts
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.spec_sampler import SpecSampler


class EagerDrafter:
    """Drafter that runs one ragged forward a draft step."""

    def __init__(
        self,
        forward: ModelForward,
        sampler: SpecSampler,
        ranks: Ranks,
        page_size: int,
        view: DraftView | None = None,
    ) -> None:
        """view: selects the pages that drafts read, None for all pages."""
        self._forward, self._sampler, self._ranks = forward, sampler, ranks
        self._page_size, self._view = page_size, view

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Append lens[i] drafts to the state of request i."""
        states = batch.states
        starts = [state.next_position for state in states]
        is_greedy = batch.is_greedy
        for step in range(max(lens)):
            rows = {
                i: draft_forward_row(
                    state, starts[i] + step, batch.pages[i], self._page_size, self._view
                )
                for i, state in enumerate(states)
                if lens[i] > step
            }
            logits = self._forward.run(batch, rows)
            if is_greedy:
                self._sampler.draft_top1([states[i] for i in rows], logits)
            else:
                self._choose(states, rows, logits)
            broadcast_drafts(self._ranks, [states[i] for i in rows])

    def _choose(
        self, states: Sequence[RequestState], rows: Iterable[int], logits: torch.Tensor
    ) -> None:
        for i, row in zip(rows, logits, strict=True):
            mask = mask_after(states[i].grammar, states[i].drafts, row[None])
            self._sampler.draft(states[i], row[None], mask)

    def read_prompt_end(self, batch: RoundBatch) -> torch.Tensor:
        """Run the tail of the prompt as one DRAFT row. Return its last logits [1, vocab]."""
        (state,), (pages,) = batch.states, batch.pages
        row = Row(RowKind.DRAFT, state.verified_len, len(state.undrafted), pages)
        return self._forward.run(batch, {0: row})[-1:]

"""Draft steps of several tokens of a request, by forwards of the model that are not captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import ModelForward, WideLogits
from sglang_kvspec.planning.proposals import MOST_PROPOSED
from sglang_kvspec.runtime.draft_view import DraftView, draft_forward_row
from sglang_kvspec.runtime.request_state import RequestState


class EagerWideSteps:
    """WideSteps over a ModelForward."""

    def __init__(
        self, forward: ModelForward, page_size: int, view: DraftView | None = None
    ) -> None:
        """view: selects the pages that drafts read; None for all pages."""
        self._forward, self._page_size, self._view = forward, page_size, view

    def begin(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Do nothing: each forward plans its own rows."""

    def most_proposed(self, state: RequestState, num_requests: int) -> int:
        """Return the most tokens of a proposal, see WideSteps.most_proposed."""
        if self._view is None:
            return MOST_PROPOSED
        # A view may read other pages for a token of the next page.
        return self._page_size - 1 - state.next_position % self._page_size

    def run(self, batch: RoundBatch, proposed: Mapping[int, Sequence[int]]) -> WideLogits:
        """Run a step, see WideSteps.run."""
        rows, firsts, num_tokens = {}, {}, 0
        for i, tokens in proposed.items():
            state = batch.states[i]
            where = (state.next_position, batch.pages[i], self._page_size, self._view)
            rows[i] = draft_forward_row(state, *where, tokens)
            firsts[i] = num_tokens
            num_tokens += rows[i].length
        logits = self._forward.run(batch, rows)
        return WideLogits(logits, logits.argmax(-1).tolist(), firsts)

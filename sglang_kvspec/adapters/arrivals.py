"""Residuals on their way from another server, as the engine asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_kvspec.adapters import hit_breakdown
from sglang_kvspec.adapters.transfer.decoding import NEWS_WAIT_S, Decoding
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.runtime.remote_prefixes import EarlyStarts
from sglang_kvspec.runtime.request_state import RequestState


class ServerArrivals:
    """The engine's Arrivals: residuals from a prefill server, on a decode server; or from a prefix
    server, for requests that start on anchors."""

    def __init__(self, pool: Any, decoding: Decoding | None) -> None:
        """pool: SGLang's KV pool. The prefix cache sets its early_starts later, if at all."""
        self._pool, self._decoding = pool, decoding

    @property
    def early(self) -> EarlyStarts | None:
        """Return the requests that start on anchors; None where no request may."""
        early: EarlyStarts | None = self._pool.early_starts
        return early

    @property
    def may_be_pending(self) -> bool:
        return self._decoding is not None or self.early is not None

    @property
    def come_with_requests(self) -> bool:
        return self._decoding is not None

    def receive(self, batch: RoundBatch) -> None:
        if self._decoding is not None:
            self._decoding.receive(batch.handles)

    def is_pending(self, state: RequestState) -> bool:
        if self._decoding is not None:
            return self._decoding.is_pending(state)
        return self.early is not None and self.early.has_pending_residuals(state.rid)

    def note_drafts(
        self, batch: RoundBatch, index: int, ages_s: Sequence[float], *, on_anchors: bool
    ) -> None:
        if self._decoding is not None:
            self._decoding.note_drafts(batch.states[index], ages_s, on_anchors=on_anchors)
        elif on_anchors:
            assert self.early is not None
            self.early.note_drafts(len(ages_s))
            hit_breakdown.note_drafts(batch.handles[index], len(ages_s))

    def note_verification(self, state: RequestState, num_emitted: int) -> None:
        if self._decoding is not None:
            self._decoding.note_verification(state, num_emitted)

    def wait(self) -> None:
        if self._decoding is not None:
            self._decoding.wait()
            return
        assert self.early is not None, (
            "only early starts may wait on a server without a decode role"
        )
        self.early.wait_for_news(NEWS_WAIT_S)

"""How a round's drafts are made: forward by forward, or by replaying a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sglang_kvspec.adapters.draft_graphs import DraftGraphs
from sglang_kvspec.adapters.grammar import mask_after
from sglang_kvspec.adapters.requests import takes_argmax
from sglang_kvspec.pools.device_kv import DeviceKV
from sglang_kvspec.runtime.chooser import Chooser
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import DraftedTokens, DraftRows, draft_row, open_for_drafts
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime.request_state import RequestState

logger = logging.getLogger(__name__)


class Drafter(Protocol):
    """Makes lens[i] more drafts for states[i], and appends them or returns them where they are not
    known yet. pages[i]: page ids on the CPU, up to the last draft's and the token after it."""

    def draft(
        self,
        batch: Any,
        states: Sequence[RequestState],
        pages: Sequence[torch.Tensor],
        lens: Sequence[int],
    ) -> DraftedTokens | None: ...


class EagerDrafter:
    """One ragged forward a step, through the worker that owns this drafter."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def draft(
        self,
        batch: Any,
        states: Sequence[RequestState],
        pages: Sequence[torch.Tensor],
        lens: Sequence[int],
    ) -> None:
        worker = self._worker
        kept = {name: getattr(batch, name) for name in worker.FORWARD_FIELDS}
        for step in range(max(lens)):
            rows = {
                i: Row(RowKind.DRAFT, state.next_position, 1, pages[i])
                for i, state in enumerate(states)
                if lens[i] > step
            }
            result = worker._forward(
                ForwardPlan(tuple(rows.values())),
                forward_batch=worker._ragged_batch(batch, states, rows),
            )
            for name, value in kept.items():
                setattr(batch, name, value)
            for i, logits in zip(rows, result.logits_output.next_token_logits, strict=True):
                mask = mask_after(batch.reqs[i].grammar, states[i].drafts, logits[None])
                worker.chooser.draft(states[i], logits[None], mask)


class GraphDrafter:
    """Replays a captured draft step. For greedy batches nothing waits for the GPU, not even at the
    end; a batch with any other request stops after each step to choose its token."""

    def __init__(
        self,
        runner: Any,
        attention: DeviceAttention,
        kv: DeviceKV,
        max_steps: int,
        chooser: Chooser,
    ) -> None:
        size = kv.geometry.page_size
        self._kv = kv
        self._chooser = chooser
        table_width = runner.req_to_token_pool.req_to_token.shape[1]
        self._rows = DraftRows(
            runner.max_running_requests, max_steps, -(-table_width // size), size, kv.device
        )
        self._graphs = DraftGraphs(runner, attention, self._rows)
        self.empty_step_s = self._graphs.time_empty_step()
        logger.info(
            "KVSpec: captured a draft step for %d batch sizes up to %d; without context it takes "
            "%.2f ms",
            len(self._graphs.batch_sizes),
            self._graphs.batch_sizes[-1],
            self.empty_step_s * 1e3,
        )

    def draft(
        self,
        batch: Any,
        states: Sequence[RequestState],
        pages: Sequence[torch.Tensor],
        lens: Sequence[int],
    ) -> DraftedTokens | None:
        # Longest first, so that the requests of every step are the first ones.
        order = sorted((i for i, n in enumerate(lens) if n), key=lambda i: -lens[i])
        for i in order:
            open_for_drafts(self._kv, states[i].next_position, pages[i], lens[i])
        # Behind the drafts of earlier rounds, whose KV is in the window.
        starts = [(states[i].last_token, states[i].next_position) for i in order]
        self._rows.load(
            [
                draft_row(self._kv, token, position, pages[i], lens[i])
                for i, (token, position) in zip(order, starts, strict=True)
            ]
        )
        if all(takes_argmax(batch.reqs[i], states[i]) for i in order):
            for step in range(max(lens)):
                self._graphs.replay(sum(lens[i] > step for i in order))
            return DraftedTokens(self._rows.drafts[: max(lens), : len(order)], order, lens)
        for step in range(max(lens)):
            going = [i for i in order if lens[i] > step]
            logits = self._graphs.replay(len(going))[: len(going)]
            for i, row in zip(going, logits, strict=True):
                mask = mask_after(batch.reqs[i].grammar, states[i].drafts, row[None])
                self._chooser.draft(states[i], row[None], mask)
            self._rows.override([states[i].last_token for i in going])
        return None

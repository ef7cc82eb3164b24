"""How a round's steps are made: forward by forward, or by replaying CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sglang_kvspec.adapters.forward_capture import ForwardCapture
from sglang_kvspec.adapters.grammar import mask_after
from sglang_kvspec.adapters.requests import takes_argmax
from sglang_kvspec.adapters.step_graphs import StepGraphs
from sglang_kvspec.pools.device_kv import DeviceKV
from sglang_kvspec.runtime.chooser import Chooser
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import DraftRows, draft_row, open_for_drafts, target_row
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime.ranks import Ranks, agree_on_drafts
from sglang_kvspec.runtime.request_state import RequestState

logger = logging.getLogger(__name__)

# Tokens a request takes at once where nobody drafts: what one step's requests wait for each other
# for, and what one that ends in between computes in vain.
PLAIN_STEPS = 8
# As few that are worth an iteration of SGLang's, which has to keep up with the device.
LEAST_STEPS_ON = PLAIN_STEPS // 2
# Contexts of a batch that are read in less time than FlashInfer's kernels, ours for the tail, and
# one to merge both take to start.
SHORT_TOKENS = 24576


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
        for step in range(max(lens)):
            rows = {
                i: Row(RowKind.DRAFT, state.next_position, 1, pages[i])
                for i, state in enumerate(states)
                if lens[i] > step
            }
            for i, logits in zip(rows, self._logits(batch, states, rows), strict=True):
                mask = mask_after(batch.reqs[i].grammar, states[i].drafts, logits[None])
                worker.chooser.draft(states[i], logits[None], mask)
                worker._note_draft(batch.reqs[i], states[i])
            agree_on_drafts(worker.ranks, [states[i] for i in rows])

    def read_prompt_end(self, batch: Any, state: RequestState, pages: torch.Tensor) -> torch.Tensor:
        """As GraphStepper's."""
        start, length = state.verified_len, len(state.undrafted)
        row = Row(RowKind.DRAFT, start, length, pages)
        return self._logits(batch, [state], {0: row})[-1:]

    def _logits(
        self, batch: Any, states: Sequence[RequestState], rows: dict[int, Row]
    ) -> torch.Tensor:
        """Of every token of these rows, [num_tokens, vocab]. Leaves the batch as it is."""
        worker = self._worker
        kept = {name: getattr(batch, name) for name in worker.FORWARD_FIELDS}
        result = worker._forward(
            ForwardPlan(tuple(rows.values())),
            forward_batch=worker._ragged_batch(batch, states, rows),
        )
        for name, value in kept.items():
            setattr(batch, name, value)
        return result.logits_output.next_token_logits  # type: ignore[no-any-return]


class GraphStepper:
    """Replays captured steps: drafts, and tokens at the target precision where drafts do not pay.

    For requests that take the largest logit nothing waits for the GPU, not even at the end. Calls
    enqueue on the current stream.
    """

    def __init__(
        self,
        runner: Any,
        forward: ForwardCapture,
        attention: DeviceAttention,
        kv: DeviceKV,
        max_draft_len: int,
        chooser: Chooser,
        ranks: Ranks,
    ) -> None:
        size = kv.geometry.page_size
        self._kv = kv
        self._chooser = chooser
        self._ranks = ranks
        table_width = runner.req_to_token_pool.req_to_token.shape[1]
        self._rows = DraftRows(
            runner.max_running_requests,
            max(max_draft_len, PLAIN_STEPS),
            -(-table_width // size),
            size,
            kv.device,
        )

        capture = partial(StepGraphs, forward, attention, self._rows)
        self._target = capture(attention.make_target_step)
        self._short_target = self._target
        if attention.short_steps_differ:
            self._short_target = capture(attention.make_short_target_step)
        self._drafts: StepGraphs | None = None
        if max_draft_len:
            # A draft may round as it likes. But ranks that meet in a graph must take the same one.
            is_alone = ranks.size == 1
            self._drafts = capture(attention.make_draft_step, may_use_other_blas=is_alone)
        # That made the last tokens without drafts.
        self._advancing = self._target
        self.empty_step_s = self._short_target.time_empty_step()
        # The first message between devices sets up their link, which takes long.
        ranks.tensor(self._rows.drafts)
        logger.info(
            "KVSpec: captured steps for %d batch sizes up to %d; without context one takes %.2f ms",
            len(self._target.batch_sizes),
            self._target.batch_sizes[-1],
            self.empty_step_s * 1e3,
        )

    def draft(
        self,
        batch: Any,
        states: Sequence[RequestState],
        pages: Sequence[torch.Tensor],
        lens: Sequence[int],
    ) -> DraftedTokens | None:
        """Make lens[i] drafts for states[i]; append them, or return them where they are not known
        yet. pages[i]: page ids on the CPU, up to the last draft's and the token after it."""
        assert self._drafts is not None, "the server was started without drafting"
        order = _longest_first(lens)
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
                self._drafts.replay(sum(lens[i] > step for i in order))
            return DraftedTokens(self._made(max(lens), len(order)), order, lens)
        for step in range(max(lens)):
            going = [i for i in order if lens[i] > step]
            logits = self._drafts.replay(len(going))[: len(going)]
            for i, row in zip(going, logits, strict=True):
                mask = mask_after(batch.reqs[i].grammar, states[i].drafts, row[None])
                self._chooser.draft(states[i], row[None], mask)
            agree_on_drafts(self._ranks, [states[i] for i in going])
            self._rows.override([states[i].last_token for i in going])
        return None

    def read_prompt_end(self, batch: Any, state: RequestState, pages: torch.Tensor) -> torch.Tensor:
        """Of a request that starts on anchors: let the tokens of its prompt that have no KV have
        some that drafts may read. Returns the logits [1, vocab] of its first draft. pages: page ids
        on the CPU, up to the last of these tokens'. What draft() returned before is overwritten.

        Each token is a row of its own, as many in a step as that has rows, so that this takes few
        steps: the layers write KV of all rows before they attend.
        """
        assert self._drafts is not None, "the server was started without drafting"
        start, tokens = state.verified_len, state.undrafted
        open_for_drafts(self._kv, start, pages, len(tokens) - 1)
        most = self._rows.max_batch
        for first in range(0, len(tokens), most):
            part = tokens[first : first + most]
            rows = [
                draft_row(self._kv, token, start + place, pages, 0)
                for place, token in enumerate(part, first)
            ]
            # One step, in which no slot is needed but the token's own.
            self._rows.load([replace(row, num_drafts=1) for row in rows])
            logits = self._drafts.replay(len(part))
        return logits[len(part) - 1 : len(part)]

    def advance(
        self,
        states: Sequence[RequestState],
        pages: Sequence[torch.Tensor],
        max_steps: int,
        late: Collection[int] = (),
    ) -> tuple[DraftedTokens, torch.Tensor]:
        """Let every request take up to max_steps tokens, each the most likely one, but for those
        that are late, whose residuals are not all here: some other has tokens left to take.
        pages[i]: page ids on the CPU, up to the last token's.

        Returns the tokens and the logits of the last step, whose first rows are those of the
        tokens' order.
        """
        size = self._kv.geometry.page_size
        counts = []
        for i, state in enumerate(states):
            count = 0 if i in late else max(min(max_steps, state.remaining), 0)
            if self._kv.codec.target == "int8":
                # The next page's tokens are to see this one at 8 bits, once it is encoded.
                count = min(count, size - state.committed_len % size)
            counts.append(count)
        order = _longest_first(counts)
        rows = [
            target_row(self._kv, states[i].pending, states[i].committed_len, pages[i], counts[i])
            for i in order
        ]
        self._rows.load(rows)
        is_short = sum(len(row.past) for row in rows) * size <= SHORT_TOKENS
        self._advancing = self._short_target if is_short else self._target
        self._advancing.plan(rows)
        made, logits = self._advance(max(counts), order)
        return DraftedTokens(made, order, counts), logits

    def advance_on(self, made: DraftedTokens, steps: int) -> DraftedTokens:
        """Let requests go on behind `made`, which the last call of advance() or of this returned
        and in all of whose steps all took part, for so many steps within the pages they are on.
        Asks the CPU for nothing."""
        order = made.order
        self._rows.extend(made.tokens[-1], steps)
        tokens, _ = self._advance(steps, order)
        return DraftedTokens(tokens, order, [steps] * len(order))

    def _advance(self, steps: int, order: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the rows of `order` take, and the logits of the last step."""
        for _ in range(steps):
            # All rows in every step: attention was planned for this batch size.
            logits = self._advancing.replay(len(order))
        # They may go on before these are read.
        return self._made(steps, len(order)).clone(), logits

    def _made(self, num_steps: int, num_rows: int) -> torch.Tensor:
        """What the first steps chose for the first rows, [num_steps, num_rows]."""
        # Equal already wherever ranks gather their logits from one another; the few models whose
        # ranks each compute all of them need not round alike.
        return self._ranks.tensor(self._rows.drafts[:num_steps, :num_rows])


def _longest_first(lens: Sequence[int]) -> list[int]:
    """Indices of requests that take part, so that the requests of every step are the first ones."""
    return sorted((i for i, n in enumerate(lens) if n), key=lambda i: -lens[i])

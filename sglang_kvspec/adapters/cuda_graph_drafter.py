"""Drafts and plain steps by replay of CUDA graphs of one step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sglang_kvspec.adapters.draft_operators import draft_operators
from sglang_kvspec.adapters.draft_weights import DraftWeights
from sglang_kvspec.adapters.forward_capture import ForwardCapture
from sglang_kvspec.adapters.step_graphs import StepGraphs
from sglang_kvspec.adapters.wide_graphs import WideGraphs
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.device_pages import DevicePages
from sglang_kvspec.runtime.draft_rows import (
    DraftRow,
    DraftRows,
    draft_row,
    open_for_drafts,
    target_row,
)
from sglang_kvspec.runtime.draft_view import DraftView
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.grammar import mask_after
from sglang_kvspec.runtime.head_lists import HeadLists
from sglang_kvspec.runtime.ranks import Ranks, broadcast_drafts
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.spec_sampler import SpecSampler

logger = logging.getLogger(__name__)

# Most plain steps in a round without drafts. All requests of a round wait for its last step, and a
# request that ends earlier wastes its remaining steps.
PLAIN_STEPS = 8
# Tokens of context of a batch that are read in less time than it takes to start three kernels:
# FlashInfer's, ours for the tail, and the one that merges both.
SHORT_TOKENS = 24576


class CudaGraphDrafter:
    """The engine's Drafter, PlainSteps and PromptReader on a GPU: replays captured steps.

    For greedy requests the CPU never waits for the GPU. Calls enqueue on the current stream.
    """

    def __init__(
        self,
        runner: Any,
        forward: ForwardCapture,
        attention: DeviceAttention,
        kv: GpuKVCache,
        max_draft_len: int,
        sampler: SpecSampler,
        ranks: Ranks,
        view: DraftView | None = None,
        lists: HeadLists | None = None,
        chosen: DevicePages | None = None,
        weights: DraftWeights | None = None,
        *,
        is_wide: bool = False,
    ) -> None:
        """view: selects the pages that drafts read; None for all pages. lists: where it selects by
        layer and KV head. chosen: selects them on the device instead, for a MassView. weights:
        copies that drafts multiply with; None for the model's own weights, which plain steps always
        use. is_wide: also capture `wide`, draft steps of several tokens of a request."""
        size = kv.geometry.page_size
        self._kv = kv
        self._sampler = sampler
        self._ranks = ranks
        self._view, self._lists, self._chosen = view, lists, chosen
        table_width = runner.req_to_token_pool.req_to_token.shape[1]
        self._rows = DraftRows(
            runner.max_running_requests,
            max(max_draft_len, PLAIN_STEPS),
            -(-table_width // size),
            size,
            kv.device,
            lists=lists,
            by_mass=chosen is not None,
        )

        capture = partial(StepGraphs, forward, attention, self._rows)
        self._target = capture(attention.make_target_step)
        self._short_target = self._target
        if attention.short_steps_differ:
            self._short_target = capture(attention.make_short_target_step)
        self._drafts: StepGraphs | None = None
        self.wide: WideGraphs | None = None
        if max_draft_len:
            # Drafts may round differently. But ranks whose collectives meet need equal graphs.
            is_alone = ranks.size == 1
            # Products with copies must not overlap. Replays do not, though draft() runs on the side
            # stream and read_prompt_end() on the main one: each stream waits for the other before,
            # see SideStream and RoundLoop.interrupt(). Verifications use no copies.
            with draft_operators():
                self._drafts = capture(
                    attention.make_draft_step, may_use_other_blas=is_alone, weights=weights
                )
                if is_wide:
                    self.wide = WideGraphs(forward, attention, self._rows, max_draft_len, weights)
        # Graphs that made the newest plain steps.
        self._advancing = self._target
        self.empty_step_s = self.empty_draft_step_s = self._short_target.time_empty_step()
        if self._drafts is not None:
            self.empty_draft_step_s = self._drafts.time_empty_step()
        # The first message between devices sets up their link, which takes long.
        ranks.tensor(self._rows.drafts)
        logger.info(
            "KVSpec: captured steps for %d batch sizes up to %d; a step without context takes "
            "%.2f ms, one of drafts %.2f ms",
            len(self._target.batch_sizes),
            self._target.batch_sizes[-1],
            self.empty_step_s * 1e3,
            self.empty_draft_step_s * 1e3,
        )

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> DraftedTokens | None:
        """Make lens[i] drafts for request i. Append them to its state, or return them if only the
        device knows them."""
        states = batch.states
        assert self._drafts is not None, "the server was started without drafting"
        order = list(self.load_drafts(batch, lens))
        if all(states[i].is_greedy for i in order):
            for step in range(max(lens)):
                self._drafts.replay(sum(lens[i] > step for i in order))
            return DraftedTokens(self._made(max(lens), len(order)), order, lens)
        for step in range(max(lens)):
            going = [i for i in order if lens[i] > step]
            logits = self._drafts.replay(len(going))[: len(going)]
            for i, row in zip(going, logits, strict=True):
                mask = mask_after(states[i].grammar, states[i].drafts, row[None])
                self._sampler.draft(states[i], row[None], mask)
            broadcast_drafts(self._ranks, [states[i] for i in going])
            self._rows.override([states[i].last_token for i in going])
        return None

    def load_drafts(self, batch: RoundBatch, lens: Sequence[int]) -> dict[int, DraftRow]:
        """Open pages for lens[i] drafts of request i, and set the rows of draft steps. Return the
        rows by request, in order."""
        states, pages = batch.states, batch.pages
        order = _longest_first(lens)
        for i in order:
            open_for_drafts(self._kv, states[i].next_position, pages[i], lens[i])
        # Rows begin behind the drafts of earlier rounds, whose KV is in the window.
        rows = {i: self._draft_row(states[i], pages[i], lens[i]) for i in order}
        self._load(list(rows.values()))
        return rows

    def _draft_row(self, state: RequestState, pages: torch.Tensor, num_drafts: int) -> DraftRow:
        position, seen, counts = state.next_position, None, None
        num_pages = position // self._kv.geometry.page_size
        if self._chosen is not None:
            counts = self._chosen.counts(state, num_pages)
        elif self._view is not None:
            seen = self._view.select(state, num_pages)
        return draft_row(
            self._kv,
            state.last_token,
            position,
            pages,
            num_drafts,
            seen,
            counts,
            state.slot,
            self._lists,
        )

    def _load(self, rows: Sequence[DraftRow]) -> None:
        """Set the rows of draft steps, and the pages that they read."""
        self._rows.load(rows)
        if self._chosen is not None:
            self._chosen.select(self._rows)

    def read_prompt_end(self, batch: RoundBatch) -> torch.Tensor:
        """Compute KV that drafts may read for the tail of the prompt of the batch's only request.
        Return the logits [1, vocab] of its first draft. Overwrites what draft() returned before.

        Each token is a row of its own, and a step takes as many tokens as it has rows. One step can
        do so because each layer writes the KV of all rows before it attends.
        """
        assert self._drafts is not None, "the server was started without drafting"
        (state,), (pages,) = batch.states, batch.pages
        start, tokens = state.verified_len, state.undrafted
        open_for_drafts(self._kv, start, pages, len(tokens) - 1)
        most = self._rows.max_batch
        for first in range(0, len(tokens), most):
            part = tokens[first : first + most]
            rows = [
                draft_row(self._kv, token, start + place, pages, 0, slot=state.slot)
                for place, token in enumerate(part, first)
            ]
            # Each row takes one step, and needs no slot but its token's own.
            self._load([replace(row, num_drafts=1) for row in rows])
            logits = self._drafts.replay(len(part))
        return logits[len(part) - 1 : len(part)]

    def advance(
        self, batch: RoundBatch, max_steps: int, skipped: Collection[int]
    ) -> tuple[DraftedTokens, torch.Tensor]:
        """Take up to max_steps greedy plain steps for every request that is not in `skipped`. At
        least one such request must have tokens left to take.

        Returns the tokens, and the logits of the last step, whose first rows are in the order of
        the tokens.
        """
        states, pages = batch.states, batch.pages
        size = self._kv.geometry.page_size
        counts = []
        for i, state in enumerate(states):
            count = 0 if i in skipped else max(min(max_steps, state.remaining), 0)
            if self._kv.codec.target == "int8":
                # Stop at the end of a page: tokens of the next page must read it at 8 bits.
                count = min(count, size - state.committed_len % size)
            counts.append(count)
        order = _longest_first(counts)
        rows = [
            target_row(self._kv, states[i].pending, states[i].committed_len, pages[i], counts[i])
            for i in order
        ]
        self._rows.load(rows, at_target=True)
        is_short = sum(len(row.past) for row in rows) * size <= SHORT_TOKENS
        self._advancing = self._short_target if is_short else self._target
        self._advancing.plan(rows)
        made, logits = self._advance(max(counts), order)
        return DraftedTokens(made, order, counts), logits

    def advance_on(self, made: DraftedTokens, steps: int) -> DraftedTokens:
        """Take `steps` more plain steps after `made`. Does not wait for the tokens of `made`.

        made: from the last call of advance() or advance_on(); all its requests took part in all of
        its steps. The steps must stay within the page that each request is on.
        """
        order = made.order
        self._rows.extend(made.tokens[-1], steps)
        tokens, _ = self._advance(steps, order)
        return DraftedTokens(tokens, order, [steps] * len(order))

    def _advance(self, steps: int, order: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of the rows of `order`, and the logits of the last step."""
        for _ in range(steps):
            # Every step replays all rows: attention was planned for this batch size.
            logits = self._advancing.replay(len(order))
        # A copy: the next steps may overwrite these tokens before the CPU has read them.
        return self._made(steps, len(order)).clone(), logits

    def _made(self, num_steps: int, num_rows: int) -> torch.Tensor:
        """Return rank 0's tokens of the first steps and rows, [num_steps, num_rows]."""
        # A safeguard: ranks gather logits from one another, so their tokens should be equal.
        return self._ranks.tensor(self._rows.drafts[:num_steps, :num_rows])


def _longest_first(lens: Sequence[int]) -> list[int]:
    """Return the indices of requests with steps, so that each step has the first ones of them."""
    return sorted((i for i, n in enumerate(lens) if n), key=lambda i: -lens[i])

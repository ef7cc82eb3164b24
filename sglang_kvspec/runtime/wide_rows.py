"""Rows of a captured draft step that runs several tokens of each request, in fixed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvspec_kernels.ops.steps import StepEnd
from sglang_kvspec.kv.transfers import send_into
from sglang_kvspec.runtime.draft_rows import DraftRow, DraftRows


@dataclass(frozen=True, slots=True)
class WideRow:
    """Tokens of one request in a step. tokens: at row.position + done and behind; none where the
    request takes no part. row: the request's row, as `drafts` was loaded with it. done: tokens that
    have KV behind that row's."""

    row: DraftRow
    done: int
    tokens: Sequence[int]


class WideRows:
    """Tensors of up to max_tokens tokens, whose addresses never change. In a step of n tokens a
    request, rows n b to n (b + 1) - 1 have the tokens of request b.

    Pasts and tails are those of a DraftRows, which is loaded for a round. A request with fewer
    tokens has them in its last rows, see DraftAttention.plan(). Its first rows write no KV, and
    their results mean nothing.
    """

    def __init__(self, drafts: DraftRows, max_tokens: int) -> None:
        self.drafts, self.device, self.max_tokens = drafts, drafts.device, max_tokens

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=drafts.device)

        self._tokens = zeros(2, max_tokens, dtype=torch.int64)
        self.input_ids, self.positions = self._tokens
        self._places = zeros(2, max_tokens, dtype=torch.int32)
        self.slots, self.offsets = self._places
        self.tail_indptr, self.tail_slots = drafts.tail_indptr, drafts.tail_slots
        self.tail_lens = zeros(drafts.max_batch, dtype=torch.int32)
        # Most likely token of each row, once the step has run.
        self.top1 = zeros(1, max_tokens, dtype=torch.int64)
        self._end = StepEnd(max_tokens, drafts.device)
        self._step = zeros(1, dtype=torch.int64)
        # With limits of 0, the end of a step advances no position.
        self._limits = zeros(max_tokens, dtype=torch.int32)

    def clear(self) -> None:
        """Remove all requests."""
        self.drafts.clear()
        self.load([], 1)

    def load(self, rows: Sequence[WideRow], num_rows: int) -> None:
        """Set the tokens of the first len(rows) requests of the round, num_rows each, and clear all
        others. The tokens are the tails' last ones."""
        size = self.drafts.page_size
        spare = num_rows * len(rows)
        tokens, positions = [0] * spare, [0] * spare
        slots, offsets = [-1] * spare, [0] * spare
        tail_lens = []
        for b, wide in enumerate(rows):
            row, count = wide.row, len(wide.tokens)
            assert count <= num_rows
            before = row.tail_len + wide.done
            first = num_rows * (b + 1) - count
            for place, token in enumerate(wide.tokens):
                at = before + place
                tokens[first + place] = token
                positions[first + place] = row.position + wide.done + place
                slots[first + place] = row.tail[at // size]
                offsets[first + place] = at % size
            tail_lens.append(before + count)
        rest = [0] * (self.max_tokens - spare)
        no_slots = [-1] * len(rest)
        ends = [0] * (len(self.tail_lens) - len(rows))
        send_into(
            [
                (self._tokens, torch.tensor([tokens + rest, positions + rest])),
                (self._places, torch.tensor([slots + no_slots, offsets + rest])),
                (self.tail_lens, torch.tensor(tail_lens + ends)),
            ]
        )

    # Calls of a captured forward

    def begin_step(self, num_tokens: int) -> None:
        self._step.zero_()

    def end_step(self, logits: torch.Tensor) -> None:
        """Store the most likely tokens of logits [num_tokens, vocab] in `top1`."""
        count = len(logits)
        self._end(
            logits,
            self._limits[:count],
            self._limits[:count],
            self.input_ids[:count],
            self.positions[:count],
            self.top1,
            self._step,
        )

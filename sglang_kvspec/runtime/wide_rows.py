"""Rows of a captured draft step that runs several tokens of each request, in fixed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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

        # Tokens and positions, then slots, offsets and lengths of tails, sent as one.
        ends = np.cumsum([2 * max_tokens] * 2 + [max_tokens] * 2 + [drafts.max_batch]).tolist()
        self._sent = zeros(ends[-1], dtype=torch.int32)
        parts = self._sent.tensor_split(ends[:-1])
        self.input_ids, self.positions = (part.view(torch.int64) for part in parts[:2])
        self.slots, self.offsets, self.tail_lens = parts[2:]
        self._values = np.zeros(ends[-1], dtype=np.int32)
        fields = np.split(self._values, ends[:-1])
        self._long_values = [field.view(np.int64) for field in fields[:2]]
        self._int_values = fields[2:]
        self.tail_indptr, self.tail_slots = drafts.tail_indptr, drafts.tail_slots
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
        tokens, positions = self._long_values
        slots, offsets, tail_lens = self._int_values
        self._values.fill(0)
        slots.fill(-1)
        for b, wide in enumerate(rows):
            row, count = wide.row, len(wide.tokens)
            assert count <= num_rows
            before = row.tail_len + wide.done
            first, end = num_rows * (b + 1) - count, num_rows * (b + 1)
            begin = row.position + wide.done
            tokens[first:end] = wide.tokens
            positions[first:end] = range(begin, begin + count)
            places = range(before, before + count)
            slots[first:end] = [row.tail[at // size] for at in places]
            offsets[first:end] = [at % size for at in places]
            tail_lens[b] = before + count
        send_into([(self._sent, torch.from_numpy(self._values))])

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
